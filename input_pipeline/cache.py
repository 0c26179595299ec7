"""Tokenised sources on disk: built once, keyed by content, read at random through memory maps.

A cache is a folder `<name>-<key>` with `tokens.bin` (uint16 or uint32, all documents end to end), `offsets.bin`
(int64 [documents + 1], where each document begins) and `num_bytes.bin` (int64 [documents], UTF-8 bytes) and
`meta.json`. The key is a hash of everything that decides the content, so a changed file, split or tokenizer
gets another folder. A folder appears under its final name by one rename, when it is complete.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import logging
from tqdm import tqdm

from input_pipeline.files import DataError, hash_file
from input_pipeline.sources import Document, Source, utf8
from input_pipeline.tokenizer import Tokenizer

# Raise when the same source and tokenizer would give other files.
VERSION = 1
BATCH_BYTES, BATCH_DOCUMENTS = 4 << 20, 1024
# Checksums cover blocks of so many bytes; of a large file only so many, evenly spaced, are read on opening.
BLOCK_BYTES, BLOCKS_CHECKED = 16 << 20, 64
# A temporary folder untouched for so long belongs to a build that died.
ABANDONED_SECONDS = 6 * 3600
ARRAYS = ("tokens", "offsets", "num_bytes")


class TokenizedSource(NamedTuple):
  """Memory maps of one tokenised source; document d is tokens[offsets[d]:offsets[d + 1]]."""

  name: str
  tokens: np.ndarray
  offsets: np.ndarray
  num_bytes: np.ndarray
  # Identity of the content, equal on every machine.
  fingerprint: str
  # What the build skipped: {"empty": …, "undecodable": …}.
  skipped: dict[str, int]

  @property
  def num_documents(self) -> int:
    return len(self.num_bytes)


class FileHasher:
  """Content hashes of files, remembered in `folder` for large files that did not change since.

  A remembered hash counts only for the same path, size, inode, modification time and inode change time, of
  which the last cannot be set back, and only if the file had rested for two seconds when it was hashed.
  """

  SMALL, REST_NS = 1 << 20, 2 * 10**9

  def __init__(self, folder: Path):
    self._file = Path(folder) / "hashes.json"
    try:
      self._known = json.loads(self._file.read_text("utf-8"))
    except (OSError, ValueError):
      self._known = {}
    self._changed = False

  def __call__(self, path: Path) -> str:
    path = path.resolve()
    stat = os.stat(path)
    if stat.st_size < self.SMALL or os.name == "nt":  # there, st_ctime_ns is the time of creation
      return hash_file(path)
    identity = [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]
    known = self._known.get(str(path))
    if known and known[:-1] == identity:
      return known[-1]
    content = hash_file(path)
    if time.time_ns() - max(stat.st_mtime_ns, stat.st_ctime_ns) > self.REST_NS:
      self._known[str(path)] = [*identity, content]
      self._changed = True
    return content

  def save(self) -> None:
    """Writes what was learnt; losing it costs time only."""
    if self._changed:
      temporary = self._file.with_name(f".hashes.{os.getpid()}")
      with contextlib.suppress(OSError):  # a cache that is only read may lie on a read-only disk
        self._file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(self._known), "utf-8")
        os.replace(temporary, self._file)
      self._changed = False


def tokenize_source(
    source: Source, tokenizer: Tokenizer, cache_dir: Path, add_bos: bool, add_eos: bool, progress: bool = False
) -> TokenizedSource:
  """The tokenised `source`, from `cache_dir` or, if it is not there or is damaged, built there first.

  Several processes may do this at once: each builds under its own name, and the first to finish is kept.

  Args:
    source: what to tokenise.
    tokenizer: its BOS and EOS are added where it has them and `add_bos`, `add_eos` ask for it.
    cache_dir: folder of the caches.
    add_bos: begin each document with BOS.
    add_eos: end each document with EOS.
    progress: show a bar while building.

  Raises:
    DataError: bad or no documents.
    OSError: the cache cannot be written; the message names the folder.
  """
  cache_dir = Path(cache_dir)
  hasher = FileHasher(cache_dir)
  bos = tokenizer.bos_id if add_bos else None
  eos = tokenizer.eos_id if add_eos else None
  content = source.fingerprint(hasher)
  parts = json.dumps([VERSION, content, tokenizer.fingerprint, bos, eos])
  hasher.save()
  key = hashlib.blake2b(parts.encode(), digest_size=12).hexdigest()
  folder = cache_dir / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', source.name)}-{key}"
  if folder.exists():
    damage = find_damage(folder)
    if damage is None:
      return _open(folder, source.name)
    logging.warning("token cache %s is damaged (%s); building it again.", folder, damage)
    _remove(folder)
  try:
    cache_dir.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(cache_dir)
    temporary = Path(tempfile.mkdtemp(prefix=f".tmp-{folder.name}-", dir=cache_dir))
    try:
      _build(temporary, source, tokenizer, bos, eos, key, progress)
      if source.fingerprint(hasher) != content:
        raise DataError(f"source {source.name!r}: its files changed while they were read. Run the command again.")
      _publish(temporary, folder)
    finally:
      shutil.rmtree(temporary, ignore_errors=True)
  except OSError as e:
    full = "the disk is full" if e.errno in (errno.ENOSPC, errno.EDQUOT) else e.strerror or str(e)
    raise OSError(
        e.errno, f"cannot write the token cache: {full}. Make room, or set input.cache_dir to another folder",
        str(cache_dir),
    ) from e
  return _open(folder, source.name)


def _build(folder: Path, source: Source, tokenizer: Tokenizer, bos, eos, key: str, progress: bool) -> None:
  """Streams the source's documents through the tokenizer into `folder`."""
  dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
  documents = total = 0
  head = np.array([] if bos is None else [bos], dtype)
  tail = np.array([] if eos is None else [eos], dtype)
  bar = tqdm(
      total=source.total_bytes(), desc=f"tokenizing {source.name}", unit="B", unit_scale=True, disable=not progress
  )
  with bar, _Writer(folder, ARRAYS) as writer:
    writer.write("offsets", np.zeros(1, "<i8"))
    for batch in _batches(source.documents()):
      ids = tokenizer.encode_batch([document.text for document in batch])
      lengths = np.array([len(i) + len(head) + len(tail) for i in ids], "<i8")
      writer.write("tokens", np.concatenate([a for i in ids for a in (head, i.astype(dtype), tail)]))
      writer.write("offsets", total + np.cumsum(lengths))
      writer.write("num_bytes", np.array([len(utf8(d.text, d.name)) for d in batch], "<i8"))
      total += int(lengths.sum())
      documents += len(batch)
      bar.update(source.tally.bytes_read - bar.n)
    bar.update(source.tally.bytes_read - bar.n)
    if not total:
      raise DataError(f"source {source.name!r}: its {documents} documents have no tokens under this tokenizer.")
    skipped = {"empty": source.tally.empty, "undecodable": source.tally.undecodable}
    if any(skipped.values()):
      # Empty documents have nothing to lose; both counts are in the start-up table.
      logging.log(logging.WARNING if skipped["undecodable"] else logging.INFO,
                  "source %r: skipped %s", source.name, ", ".join(f"{n} {why}" for why, n in skipped.items()))
    meta = {
        "key": key,
        "dtype": dtype.str,
        "documents": documents,
        "tokens": total,
        "skipped": skipped,
        "checksums": writer.checksums(),
    }
    (folder / "meta.json").write_text(json.dumps(meta), "utf-8")


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
  batch, size = [], 0
  for document in documents:
    batch.append(document)
    size += len(document.text)
    if size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
      yield batch
      batch, size = [], 0
  if batch:
    yield batch


class _Writer:
  """Appends to the arrays' files; on leaving, what they hold is on disk."""

  def __init__(self, folder: Path, names: tuple[str, ...]):
    self._files = {name: open(folder / f"{name}.bin", "w+b") for name in names}

  def __enter__(self):
    return self

  def __exit__(self, kind, error, trace):
    for file in self._files.values():
      file.close()

  def write(self, name: str, values: np.ndarray) -> None:
    self._files[name].write(values.tobytes())

  def checksums(self) -> dict[str, list[int]]:
    """CRC-32 of every block, after forcing the files to disk."""
    sums = {}
    for name, file in self._files.items():
      file.flush()
      os.fsync(file.fileno())
      file.seek(0)
      sums[name] = [zlib.crc32(block) for block in iter(lambda f=file: f.read(BLOCK_BYTES), b"")]
    return sums


def _publish(temporary: Path, folder: Path) -> None:
  """Gives a complete build its final name, unless another process was first."""
  os.chmod(temporary, 0o755)  # mkdtemp makes it private
  try:
    os.rename(temporary, folder)
  except OSError:
    if find_damage(folder) is not None:
      raise
    logging.info("token cache %s was built by another process meanwhile; using that.", folder)


def find_damage(folder: Path) -> str | None:
  """What is wrong with a cache folder, or None. Sizes are always checked, checksums of large files in part."""
  try:
    meta = json.loads((folder / "meta.json").read_text("utf-8"))
    sizes = {
        "tokens": meta["tokens"] * np.dtype(meta["dtype"]).itemsize,
        "offsets": (meta["documents"] + 1) * 8,
        "num_bytes": meta["documents"] * 8,
    }
    for name, size in sizes.items():
      file = folder / f"{name}.bin"
      if file.stat().st_size != size:
        return f"{file.name} has {file.stat().st_size} bytes instead of {size}"
      sums = meta["checksums"][name]
      checked = range(len(sums))
      if len(sums) > BLOCKS_CHECKED:
        checked = np.linspace(0, len(sums) - 1, BLOCKS_CHECKED).astype(int).tolist()
      with open(file, "rb") as f:
        for block in checked:
          f.seek(block * BLOCK_BYTES)
          if zlib.crc32(f.read(BLOCK_BYTES)) != sums[block]:
            return f"{file.name} does not match its checksum near byte {block * BLOCK_BYTES}"
  except FileNotFoundError as e:
    return f"{Path(e.filename).name} is missing"
  except (ValueError, KeyError, TypeError) as e:
    return f"meta.json is not readable: {e!r}"
  return None


def _open(folder: Path, name: str) -> TokenizedSource:
  meta = json.loads((folder / "meta.json").read_text("utf-8"))
  dtypes = {"tokens": meta["dtype"], "offsets": "<i8", "num_bytes": "<i8"}
  maps = {a: np.memmap(folder / f"{a}.bin", dtypes[a], mode="r") for a in ARRAYS}
  return TokenizedSource(name, **maps, fingerprint=meta["key"], skipped=meta["skipped"])


def _remove(folder: Path) -> None:
  """Removes a damaged cache, out of the way of other processes first."""
  aside = folder.with_name(f".tmp-{folder.name}-damaged-{os.getpid()}-{time.time_ns()}")
  try:
    os.rename(folder, aside)
  except FileNotFoundError:
    return  # another process was first
  shutil.rmtree(aside, ignore_errors=True)


def _remove_abandoned(cache_dir: Path) -> None:
  """Removes what builds that died have left."""
  for folder in cache_dir.glob(".tmp-*"):
    try:
      newest = max(p.stat().st_mtime for p in (folder, *folder.iterdir()))
    except OSError:
      continue  # its build has just ended
    if time.time() - newest > ABANDONED_SECONDS:
      logging.warning("removing %s, which an unfinished build has left.", folder)
      shutil.rmtree(folder, ignore_errors=True)
