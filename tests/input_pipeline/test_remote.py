"""What stores are asked, and what is done where they fail, send less, or have another version: of a store that is
scripted. Real servers are in test_urls.py."""

import contextlib
import io

import pytest

from input_pipeline import remote
from trainer.errors import DataError

CONTENT = bytes(range(200)) * 3


class Store:
  """Holds CONTENT under one path; fails with the errors of `failing` before it answers, and may send less."""

  def __init__(self, failing=(), etag="v1", ranges=True, short=()):
    self.failing, self.etag, self.ranges, self.short, self.asked = list(failing), etag, ranges, list(short), []

  def unstrip_protocol(self, path):
    return path if "://" in path else f"mem://{path}"

  def info(self, path):
    self._fail()
    if self.etag is None:
      raise FileNotFoundError(path)
    return {"size": len(CONTENT), "ETag": self.etag}

  def _fail(self):
    if self.failing and (error := self.failing.pop(0)) is not None:
      raise error

  def cat_file(self, path, start, end):
    self.asked.append((start, end))
    self._fail()
    return CONTENT[start:self.short.pop(0) if self.short else end]

  def open(self, path, **options):
    self.asked.append(("open", options.get("block_size"), options.get("cache_type")))
    self._fail()
    if options.get("cache_type") == "none" and not self.ranges:
      raise ValueError("the server knows no ranges")
    return contextlib.closing(io.BytesIO(CONTENT[:self.short.pop(0)] if self.short else CONTENT))


@pytest.fixture(autouse=True)
def slept(monkeypatch):
  found = []
  monkeypatch.setattr(remote.time, "sleep", found.append)
  monkeypatch.setattr(remote, "RANGE", 250)
  monkeypatch.setattr(remote, "_without_ranges", set())
  return found


def file_of(store, path="a/b.bin"):
  return remote.described(store, "mem://a", "b.bin", path, {"size": len(CONTENT), "ETag": store.etag})


class StatusError(Exception):
  def __init__(self, status):
    super().__init__(f"status {status}")
    self.status = status


@pytest.mark.parametrize("text, expected", [
    ("s3://user:secret@bucket/a?token=1", "s3://bucket/a?…"), ("see https://x/y?a=b now", "see https://x/y?… now"),
    ("plain", "plain")])
def test_addresses_are_shown_without_what_is_secret(text, expected):
  assert remote.shown(text) == expected


def test_a_file_is_known_by_its_address_its_size_and_what_is_said_of_its_content():
  store = Store()
  first = file_of(store)
  assert (first.name, first.path, first.shown, first.size) == ("b.bin", "a/b.bin", "mem://a/b.bin", 600)
  about = dict(size=600, ETag="v1")
  others = [remote.described(store, "u", "b.bin", path, about | changed).version for path, changed in (
      ("a/c.bin", {}), ("a/b.bin", {"ETag": "v2"}), ("a/b.bin", {"size": 601}))]
  assert len({first.version, *others}) == 4
  # Times do not count where there is something of the content; what a list does not say is asked for.
  assert remote.described(store, "u", "b.bin", "a/b.bin", about | {"mtime": 5}).version == first.version
  assert remote.described(store, "u", "b.bin", "a/b.bin", {"mtime": 5}).version == first.version


def test_what_fails_is_tried_again_with_longer_pauses_and_then_told(slept):
  store = Store([OSError("reset")] * 3)
  file = remote.described(store, "u", "b.bin", "a/b.bin", {"size": 600, "ETag": "v1"})
  assert remote.read_range(store, file, 10, 20) == CONTENT[10:20] and slept == [0.5, 1.0, 2.0]
  slept.clear()
  store.failing = [OSError("reset")] * 9
  with pytest.raises(DataError, match="b.bin, bytes 10 to 20: reading it failed 6 times in a row .OSError: reset"):
    remote.read_range(store, file, 10, 20)
  assert slept == list(remote.PAUSES)


@pytest.mark.parametrize("error, told", [
    (PermissionError("no"), "is denied"), (StatusError(403), "is denied"), (StatusError(401), "is denied"),
    (FileNotFoundError("gone"), "changed while it was read"), (StatusError(404), "changed while it was read"),
    (ImportError("no s3fs"), "no s3fs")])
def test_what_no_second_try_mends_is_told_at_once(error, told, slept):
  store = Store([error])
  file = remote.described(store, "u", "b.bin", "a/b.bin", {"size": 600, "ETag": "v1"})
  with pytest.raises(DataError, match=told):
    remote.read_range(store, file, 0, 5)
  assert slept == []


@pytest.mark.parametrize("etag, told", [("v1", None), ("v2", "changed"), (None, "changed")])
def test_fewer_bytes_are_another_version_or_a_reason_to_ask_again(etag, told, slept):
  store = Store(short=[15])
  file = file_of(store)
  store.etag = etag
  with contextlib.nullcontext() if told is None else pytest.raises(DataError, match=told):
    assert remote.read_range(store, file, 10, 20) == CONTENT[10:20]
  assert slept == ([0.5] if told is None else []) and remote.is_changed(store, file) == (told is not None)


@pytest.mark.parametrize("at", [0, 1, 250, 599, 600])
def test_a_file_is_read_by_ranges_from_any_byte_on(at):
  store = Store()
  assert b"".join(remote.read_from(store, file_of(store), at)) == CONTENT[at:]
  assert store.asked == [(begin, min(begin + 250, 600)) for begin in range(at, 600, 250)]


@pytest.mark.parametrize("at", [0, 100, 600])
def test_a_server_without_ranges_sends_it_whole_and_is_not_asked_for_ranges_again(at, monkeypatch):
  monkeypatch.setattr(remote, "PIECE", 70)
  store = Store(ranges=False)
  file = file_of(store, "http://host/b.bin")
  assert not remote.knows_ranges(store, file) and len(store.asked) == 1
  assert b"".join(remote.read_from(store, file, at)) == CONTENT[at:]
  assert store.asked[1:] == ([("open", 0, None)] if at < 600 else [])
  assert remote.knows_ranges(Store(), file_of(Store()))


def test_what_came_before_a_whole_file_broke_off_is_not_given_twice(monkeypatch, slept):
  monkeypatch.setattr(remote, "PIECE", 70)
  store = Store(ranges=False, short=[130, 300])
  file = file_of(store, "http://host/b.bin")
  remote.knows_ranges(store, file)
  assert b"".join(remote.read_from(store, file, 0)) == CONTENT
  assert slept == [0.5, 0.5]  # since each brought something


def test_of_a_size_that_is_not_known_all_is_read():
  store = Store()
  file = file_of(store)._replace(size=None)
  assert not remote.knows_ranges(store, file) and b"".join(remote.read_from(store, file, 0)) == CONTENT


def test_a_protocol_that_nothing_reads_says_what_to_install():
  with pytest.raises(DataError, match="nothing://bucket/a: .*Protocols are those of fsspec"):
    remote.open_url("nothing://user:secret@bucket/a")
