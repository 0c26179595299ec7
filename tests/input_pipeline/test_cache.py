"""The token cache: its content, when it is reused, rebuilt or refused, and builds that die or meet."""

import errno
import json
import os
import threading
import time

import numpy as np
import pytest

from input_pipeline import cache as cache_lib
from input_pipeline.cache import FileHasher, tokenize_source
from input_pipeline.sources import DataError, open_source
from input_pipeline.tokenizer import BytesTokenizer
from trainer.config import source

TEXTS = {"a.txt": "äb", "b.txt": "", "c.txt": "xyz"}


@pytest.fixture
def data(tmp_path):
  (tmp_path / "data").mkdir()
  for name, text in TEXTS.items():
    (tmp_path / "data" / name).write_text(text)
  return tmp_path / "data"


def build(data, add_bos=True, add_eos=True, tokenizer=None, **cfg):
  mine = open_source(source(path=str(data), **cfg), "my source")
  return tokenize_source(mine, tokenizer or BytesTokenizer(), data.parent / "cache", add_bos, add_eos)


def folders(data):
  return sorted(p for p in (data.parent / "cache").iterdir() if p.is_dir())


class Forbidden(BytesTokenizer):
  """Fails the test if anything is tokenised."""

  def encode_batch(self, texts):
    raise AssertionError("tokenised again")


def test_content(data):
  tokens = build(data)
  assert tokens.tokens.tolist() == [256, *"äb".encode(), 257, 256, *b"xyz", 257] and tokens.tokens.dtype == np.uint16
  assert tokens.offsets.tolist() == [0, 5, 10] and tokens.num_bytes.tolist() == [3, 3]
  assert tokens.skipped == {"empty": 1, "undecodable": 0}
  assert build(data, add_bos=False).tokens.tolist() == [*"äb".encode(), 257, *b"xyz", 257]
  assert build(data, add_bos=False, add_eos=False).tokens.tolist() == list("äbxyz".encode())


def test_many_batches_give_the_same_as_one(data, monkeypatch):
  (data / "lines.txt").write_text("".join(f"line {i}\n" for i in range(100)))
  whole = build(data, documents="line")
  monkeypatch.setattr(cache_lib, "BATCH_DOCUMENTS", 7)
  monkeypatch.setattr(cache_lib, "BLOCK_BYTES", 64)
  (folder,) = folders(data)
  folder.rename(data.parent / "aside")
  again = build(data, documents="line")
  assert all((a == b).all() for a, b in zip(whole[1:4], again[1:4], strict=True))


def test_large_vocabularies_take_four_bytes(data):
  class Large(BytesTokenizer):
    vocab_size, fingerprint = 70_000, "large"

    def encode_batch(self, texts):
      return [np.full(len(text), 69_999, np.int32) for text in texts]

  tokens = build(data, tokenizer=Large())
  assert tokens.tokens.dtype == np.uint32 and tokens.tokens[1] == 69_999


def test_reused_while_nothing_changes_and_only_then(data):
  first = build(data)
  again = build(data, tokenizer=Forbidden())
  assert again.tokens.tolist() == first.tokens.tolist() and again.fingerprint == first.fingerprint
  stat = os.stat(data / "c.txt")
  (data / "c.txt").write_text("xyw")  # same size, and the same time below: still another content
  os.utime(data / "c.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns))
  changed = build(data)
  assert changed.tokens[-2] == ord("w") and changed.fingerprint != first.fingerprint
  (data / "c.txt").write_text("xyz")
  assert build(data, tokenizer=Forbidden()).fingerprint == first.fingerprint
  assert len({build(data, add_bos=b, add_eos=e).fingerprint for b in (True, False) for e in (True, False)}) == 4


@pytest.mark.parametrize("harm", ["short", "flipped", "missing", "meta", "no_meta"])
def test_damage_is_noticed_and_repaired(data, harm, caplog):
  good = build(data).tokens.tolist()
  (folder,) = folders(data)
  tokens = folder / "tokens.bin"
  if harm == "short":
    tokens.write_bytes(tokens.read_bytes()[:-2])
  elif harm == "flipped":
    raw = bytearray(tokens.read_bytes())
    raw[3] ^= 1
    tokens.write_bytes(raw)
  elif harm == "missing":
    (folder / "offsets.bin").unlink()
  elif harm == "meta":
    (folder / "meta.json").write_text('{"dtype"')
  else:
    (folder / "meta.json").unlink()
  with pytest.raises(AssertionError, match="tokenised again"):
    build(data, tokenizer=Forbidden())
  assert "is damaged" in caplog.text and folder.name in caplog.text
  assert build(data).tokens.tolist() == good
  assert folders(data) == [folder]


def test_only_some_blocks_of_a_large_file_are_checked_first_and_last_among_them(data, monkeypatch):
  monkeypatch.setattr(cache_lib, "BLOCK_BYTES", 16)
  monkeypatch.setattr(cache_lib, "BLOCKS_CHECKED", 4)
  (data / "a.txt").write_text("a" * 1000)
  build(data)
  (folder,) = folders(data)
  whole = (folder / "tokens.bin").read_bytes()
  for at in (0, len(whole) - 1):
    (folder / "tokens.bin").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
    assert "does not match its checksum" in cache_lib.find_damage(folder)
  (folder / "tokens.bin").write_bytes(whole)
  assert cache_lib.find_damage(folder) is None


def test_a_build_that_dies_leaves_nothing_that_is_used(data, monkeypatch):
  monkeypatch.setattr(cache_lib, "_publish", lambda temporary, folder: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    build(data)
  assert folders(data) == []
  monkeypatch.undo()
  # What a killed process leaves: a temporary folder, here a complete one but for its name.
  killed = data.parent / "cache" / ".tmp-my_source-killed"
  build(data)
  (folder,) = folders(data)
  folder.rename(killed)
  assert build(data).num_documents == 2 and killed in folders(data)
  old = time.time() - 2 * cache_lib.ABANDONED_SECONDS
  for path in (*killed.iterdir(), killed):
    os.utime(path, (old, old))
  build(data, add_bos=False)
  assert killed not in folders(data)


def test_two_builds_at_once(data):
  both = threading.Barrier(2)

  class Meeting(BytesTokenizer):
    def encode_batch(self, texts):
      both.wait(timeout=10)
      return super().encode_batch(texts)

  results, threads = [], []
  for _ in range(2):
    threads.append(threading.Thread(target=lambda: results.append(build(data, tokenizer=Meeting()))))
    threads[-1].start()
  for thread in threads:
    thread.join()
  assert results[0].tokens.tolist() == results[1].tokens.tolist() and len(folders(data)) == 1


def test_full_disk_names_the_folder_and_cleans_up(data, monkeypatch):
  def full(self, name, values):
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(cache_lib._Writer, "write", full)
  with pytest.raises(OSError, match="disk is full.*input.cache_dir") as error:
    build(data)
  assert str(data.parent / "cache") in str(error.value) and error.value.errno == errno.ENOSPC
  assert folders(data) == []


def test_files_that_change_while_they_are_read_are_refused(data):
  class Slow(BytesTokenizer):
    def encode_batch(self, texts):
      (data / "a.txt").write_text("changed")
      return super().encode_batch(texts)

  with pytest.raises(DataError, match="changed while they were read"):
    build(data, tokenizer=Slow())
  assert folders(data) == []


def test_bad_data_leaves_no_cache(data):
  (data / "d.txt").write_bytes(b"\xff")
  with pytest.raises(DataError, match=r"d.txt: not valid UTF-8"):
    build(data)
  assert folders(data) == []


def test_hashes_of_large_resting_files_are_remembered_until_they_change(tmp_path, monkeypatch):
  monkeypatch.setattr(FileHasher, "SMALL", 4)
  hashed = []
  monkeypatch.setattr(cache_lib, "hash_file", lambda path: hashed.append(path) or f"hash {len(hashed)}")
  file = tmp_path / "x"
  file.write_text("12345")

  def ask():
    hasher = FileHasher(tmp_path / "cache")
    value = hasher(file)
    hasher.save()
    return value

  assert ask() == "hash 1" and ask() == "hash 2"  # too fresh to be remembered
  monkeypatch.setattr(FileHasher, "REST_NS", -1)
  assert ask() == ask() == ask() == "hash 3"
  stat = os.stat(file)
  time.sleep(0.02)
  file.write_text("54321")
  os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
  assert ask() == "hash 4"
  (tmp_path / "cache" / "hashes.json").write_text("not JSON")
  assert ask() == "hash 5"
  assert json.loads((tmp_path / "cache" / "hashes.json").read_text())[str(file.resolve())][-1] == "hash 5"
