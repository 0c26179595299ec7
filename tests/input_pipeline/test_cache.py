"""The token cache: its content, when it is reused, rebuilt or refused, and builds that die or meet."""

import errno
import functools
import json
import os
import threading
import time
import types

import numpy as np
import pytest

from input_pipeline import cache as cache_lib
from input_pipeline import cache_writer, files
from input_pipeline import folders as folders_lib
from input_pipeline.cache import FileHasher, tokenize_source
from input_pipeline.examples.base import Encoded
from input_pipeline.examples.registry import open_examples
from input_pipeline.examples.roles import MISMATCHED, UNDESIRABLE
from input_pipeline.sources.sources import open_source
from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from trainer.config import defaults, source
from trainer.errors import DataError
from trainer.strategies import learns

TEXTS = {"a.txt": "äb", "b.txt": "", "c.txt": "xyz"}


@pytest.fixture
def data(tmp_path):
  (tmp_path / "data").mkdir()
  for name, text in TEXTS.items():
    (tmp_path / "data" / name).write_text(text)
  return tmp_path / "data"


def build(data, add_bos=True, add_eos=True, tokenizer=None, **cfg):
  config, tokenizer = defaults(), tokenizer or BytesTokenizer()
  config.tokenizer.update(add_bos=add_bos, add_eos=add_eos)
  mine, encoder = open_examples(config, tokenizer, source(path=str(data), **cfg), "my source", learns=learns(config))
  return tokenize_source(mine, encoder, tokenizer.vocab_size, data.parent / "cache")


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
  monkeypatch.setattr(cache_lib, "BATCH_RECORDS", 7)
  monkeypatch.setattr(folders_lib, "BLOCK_BYTES", 64)
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


def test_a_folder_of_caches_is_made_with_those_above_it(data):
  config, tokenizer = defaults(), BytesTokenizer()
  mine, encoder = open_examples(config, tokenizer, source(path=str(data)), "my source", learns=learns(config))
  made = tokenize_source(mine, encoder, tokenizer.vocab_size, data.parent / "a" / "b")
  assert made.folder.parent == data.parent / "a" / "b" and made.tokens.tolist() == build(data).tokens.tolist()


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
  monkeypatch.setattr(folders_lib, "BLOCK_BYTES", 16)
  monkeypatch.setattr(folders_lib, "BLOCKS_CHECKED", 4)
  (data / "a.txt").write_text("a" * 1000)
  build(data)
  (folder,) = folders(data)
  whole = (folder / "tokens.bin").read_bytes()
  for at in (0, len(whole) - 1):
    (folder / "tokens.bin").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
    assert "does not match its checksum" in folders_lib.find_damage(folder, cache_lib._arrays)
  (folder / "tokens.bin").write_bytes(whole)
  assert folders_lib.find_damage(folder, cache_lib._arrays) is None


def test_a_build_that_dies_leaves_nothing_that_is_used(data, monkeypatch):
  monkeypatch.setattr(folders_lib, "publish", lambda *given: 1 / 0)
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
  old = time.time() - 2 * folders_lib.ABANDONED_SECONDS
  for path in (*killed.iterdir(), killed):
    os.utime(path, (old, old))
  build(data, add_bos=False)
  assert killed not in folders(data)


def test_others_may_read_a_cache_as_any_new_folder(data):
  before = os.umask(0o027)
  try:
    build(data)
  finally:
    os.umask(before)
  (folder,) = folders(data)
  assert folder.stat().st_mode & 0o777 == 0o750
  assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o640}


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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_names_the_folder_and_cleans_up(data, monkeypatch, number):
  def full(self, name, values):
    raise OSError(number, "No space left on device")

  monkeypatch.setattr(cache_writer.Writer, "write", full)
  with pytest.raises(OSError, match="disk is full.*input.cache_dir") as error:
    build(data)
  assert str(data.parent / "cache") in str(error.value) and error.value.errno == number
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
  monkeypatch.setattr(files, "hash_file", lambda path: hashed.append(path) or f"hash {len(hashed)}")
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


class Weighing:
  """Documents of the bytes of each line of a text, by what the line begins with."""

  fingerprint = "weighing 1"

  def encode(self, records):
    return [e for r in records for line in r.fields["text"].split("\n") for e in [self._encode(line)]]

  def _encode(self, line):
    if line.startswith("drop"):
      return line
    ids = np.frombuffer(line.encode(), np.uint8).astype(np.int32)
    return Encoded(ids, np.linspace(0, 2, len(ids), dtype=np.float32) if line.startswith("w") else None)

  def texts(self, record):
    return record.fields["text"].split("\n")

  def describe(self, record):
    return "several" if "\n" in record.fields["text"] else "one"

  def columns(self, record):
    return frozenset({"text"})


def weigh(data, encoder=None):
  mine = open_source(source(path=str(data)), "my source")
  return tokenize_source(mine, encoder or Weighing(), 258, data.parent / "cache")


def test_without_weights_there_is_no_file_of_them(data):
  assert build(data).weights is None
  assert not (folders(data)[0] / "weights.bin").exists()


@pytest.mark.parametrize("batch", [1, 1024])
def test_weights_reach_back_to_the_first_document(data, monkeypatch, batch):
  monkeypatch.setattr(cache_lib, "BATCH_RECORDS", batch)
  monkeypatch.setattr(cache_lib, "BATCH_BYTES", 2)
  monkeypatch.setattr(cache_writer, "FILLED", 2)
  (data / "d.txt").write_text("wabc\ndrop 1\nplain")
  (data / "e.txt").write_text("drop 1\ndrop 2")
  tokens = weigh(data)
  assert bytes(tokens.tokens.tolist()) == "äbxyzwabcplain".encode() and tokens.offsets.tolist() == [0, 3, 6, 10, 15]
  wanted = [1.0] * 6 + np.linspace(0, 2, 4).tolist() + [1.0] * 5
  np.testing.assert_allclose(tokens.weights, wanted, rtol=1e-6)
  assert tokens.weights.dtype == np.float32 and tokens.num_documents == 4
  assert tokens.num_bytes.tolist() == [3, 3, 4 + 6 + 5, 12]  # of each record
  assert tokens.dropped == {"drop 1": 2, "drop 2": 1} == weigh(data).dropped
  assert tokens.shapes == {"one": 2, "several": 2} == weigh(data).shapes


@pytest.mark.parametrize("harm", ["short", "flipped", "missing"])
def test_damaged_weights_are_rebuilt(data, harm, caplog):
  (data / "d.txt").write_text("wabc")
  good = weigh(data).weights.tolist()
  (folder,) = folders(data)
  file = folder / "weights.bin"
  raw = bytearray(file.read_bytes())
  if harm == "missing":
    file.unlink()
  else:
    raw[-2] ^= 1
    file.write_bytes(raw[:-4] if harm == "short" else raw)
  assert weigh(data).weights.tolist() == good
  assert "is damaged (weights.bin" in caplog.text and folders(data) == [folder]


def test_another_encoder_has_another_cache(data):
  other = Weighing()
  other.fingerprint = "weighing 2"
  assert len({weigh(data).fingerprint, weigh(data, other).fingerprint, build(data).fingerprint}) == 3


def test_nothing_but_dropped_records(data):
  for name in TEXTS:
    (data / name).write_text("drop it")
  with pytest.raises(DataError, match=r"its 3 documents have no tokens under this tokenizer \(3 dropped: drop it\)"):
    weigh(data)
  assert folders(data) == []


def test_ids_beyond_the_vocabulary_are_refused_before_they_wrap(data):
  class Wrong(Weighing):
    def encode(self, records):
      return [Encoded(np.array([1, 70_000], np.int32))]

  with pytest.raises(DataError, match="ids from 1 to 70000, but the tokenizer's vocabulary is 258"):
    weigh(data, Wrong())


@pytest.mark.parametrize("read", [1, 7, 1 << 20])
def test_counts_of_trained_tokens_are_those_of_a_loop(data, monkeypatch, read):
  monkeypatch.setattr(cache_lib, "WEIGHTS_READ", read)
  rng = np.random.default_rng(0)
  lengths = rng.integers(0, 9, 50)
  offsets = np.concatenate([[0], np.cumsum(lengths)])
  weights = rng.choice([0, 0.5, 1], offsets[-1]).astype(np.float32)
  doc = np.repeat(np.arange(50), 2)
  begin = np.where(np.arange(100) % 2, np.minimum(3, lengths[doc]), 0)
  end = np.where(np.arange(100) % 2, lengths[doc], np.minimum(4, lengths[doc]))
  for given in (weights, None):
    tokens = cache_lib.TokenizedSource("s", np.zeros(offsets[-1], np.uint16), offsets, lengths, "", {}, given)
    counted = weights if given is not None else np.ones_like(weights)
    wanted = [np.count_nonzero(counted[offsets[d]:][b + 1:e]) for d, b, e in zip(doc, begin, end, strict=True)]
    assert tokens.count_trained(doc, begin, end).tolist() == wanted


class Halving:
  """Each line as a document of two parts, the second of which is the beginning of the next line."""

  fingerprint = "halving 1"

  def __init__(self, join=True):
    self.with_next = self._join if join else None

  def encode(self, records):
    lines = [np.frombuffer(r.fields["text"].encode(), np.uint8).astype(np.int32) for r in records]
    return ["short" if len(ids) < 2 else Encoded(ids, np.ones(len(ids), np.float32), (len(ids),), (UNDESIRABLE,))
            for ids in lines]

  def _join(self, document, following):
    more = np.zeros(0, np.int32) if following is None else following.ids[:2]
    ids = np.concatenate([document.ids, more])
    return Encoded(ids, np.ones(len(ids), np.float32), (len(document.ids), len(more)),
                   (UNDESIRABLE, MISMATCHED))

  def texts(self, record):
    return record.fields["text"],

  def describe(self, record):
    return "a line"

  def columns(self, record):
    return frozenset({"text"})


def halved(data, join=True):
  mine = open_source(source(path=str(data), documents="line"), "mine")
  return tokenize_source(mine, Halving(join), 256, data.parent / f"cache {join}")


@pytest.mark.parametrize("batch", [1, 2, 100])
def test_parts_and_documents_that_depend_on_the_next_one(data, monkeypatch, batch):
  for name in TEXTS:
    (data / name).unlink()
  (data / "a.txt").write_text("abc\nx\ndefg\nhi\n")
  monkeypatch.setattr(cache_lib, "BATCH_RECORDS", batch)
  tokens = halved(data)
  assert bytes(tokens.tokens.tolist()) == b"abc" b"de" b"defg" b"hi" b"hi" b"ab"  # after the last comes the first
  assert tokens.offsets.tolist() == [0, 5, 11, 15] and tokens.parts.tolist() == [0, 3, 5, 9, 11, 13, 15]
  assert tokens.roles.tolist() == [UNDESIRABLE, MISMATCHED] * 3
  assert tokens.parts_each == 2 and tokens.dropped == {"short": 1} and tokens.advantages is None
  assert tokens.of_parts().num_documents == 6 and tokens.folder.is_dir()
  assert halved(data).parts.tolist() == tokens.parts.tolist()  # read again
  alone = halved(data, join=False)
  assert alone.parts_each == 1 and alone.parts.tolist() == alone.offsets.tolist() == [0, 3, 7, 9]
  (data / "a.txt").write_text("abc\n")
  assert halved(data).parts.tolist() == [0, 3, 3]


def test_documents_without_parts_have_no_files_of_them(data):
  tokens = build(data)
  assert tokens.parts is None and tokens.parts_each == 0
  assert not list(tokens.folder.glob("parts.bin")) and not list(tokens.folder.glob("roles.bin"))
  meta = json.loads((tokens.folder / "meta.json").read_text())
  del meta["parts"]  # as caches without the entry
  (tokens.folder / "meta.json").write_text(json.dumps(meta))
  assert build(data, tokenizer=Forbidden()).tokens.tolist() == tokens.tokens.tolist()


def test_damaged_parts_are_built_again(data):
  for name in ("parts", "roles"):
    tokens = halved(data, join=False)
    file = tokens.folder / f"{name}.bin"
    raw = bytearray(file.read_bytes())
    raw[0] ^= 1
    file.write_bytes(raw)
    assert f"{name}.bin does not match its checksum" in folders_lib.find_damage(tokens.folder, cache_lib._arrays)
    assert halved(data, join=False).parts.tolist() == tokens.offsets.tolist()


def test_of_images_each_tile_or_square_counts():
  """Two documents of 4 and 6 tokens, whose three images have 1, 3 and 2 squares and begin at tokens 1, 4 and 8."""
  starts = np.array([1, 4, 8])
  images = types.SimpleNamespace(squares=np.array([1, 3, 2]), between=lambda begin, end: (
      np.searchsorted(starts, begin), np.searchsorted(starts, end)))
  given = types.SimpleNamespace(images=images, offsets=np.array([0, 4, 10]))
  count = functools.partial(cache_lib.TokenizedSource.count_images, given)
  assert count(np.array([0, 1, 1, 1]), np.array([0, 0, 1, 0]), np.array([4, 6, 6, 2])).tolist() == [1, 5, 2, 3]
  given.images = None
  assert count(np.array([0, 1]), np.array([0, 0]), np.array([4, 6])).tolist() == [0, 0]
