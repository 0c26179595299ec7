"""Finding a source's files in a fixed order, and reading their bytes and lines with useful errors."""

import contextlib
import glob
import gzip
import hashlib
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from absl import logging
from ml_collections import ConfigDict

from input_pipeline import runs, urls
from trainer import atomic
from trainer.errors import ConfigError, DataError

CHUNK = 1 << 20
# Compressed files are unpacked so many bytes at a time: what these become is bounded, however well they are compressed.
UNPACKED = 1 << 12
# Longer lines are no text of anyone's, but a damaged file or one that unpacks without an end.
MAX_LINE = 1 << 30
# No system has longer paths.
MAX_PATH = 1 << 12
# How deep JSON may be nested, and how many names of columns a message lists, of so many characters each.
MAX_DEPTH, SHOWN_NAMES, SHOWN_NAME = 100, 20, 60
BOM = b"\xef\xbb\xbf"
# {how a file's name ends: the type of source that reads it}
TYPES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet",
         ".arrow": "arrow"}
# What datasets' `save_to_disk` writes beside a Dataset's files, and in the folder of a DatasetDict.
SAVED_DATASET, SAVED_SPLITS = "state.json", "dataset_dict.json"


class BadTextError(DataError):
  """Bytes that are not UTF-8."""


class NotJSONError(ValueError):
  """Text that is no JSON; the message is the reason, without a place or a full stop."""


class File(NamedTuple):
  """A file and its name relative to the folder it was found in (equal on every machine)."""

  name: str
  path: Path


class Record(NamedTuple):
  """A row of a file, or a file.

  `name` is its file's relative name, with ":line" or "[row]" where a file holds several; `where` tells people where it
  is, as in "data/a.jsonl:7". `fields` are JSON's types and whatever else the format has (bytes, dates). A text that
  belongs to no field has the name of the reader's `text_key`. Paths in it are relative to `folder`. `others` are
  columns of the row that were not read from the file. `problem`: it cannot be read, and has no fields.
  """

  name: str
  where: str
  fields: dict[str, Any]
  folder: Path | None = None
  others: tuple[str, ...] = ()
  problem: DataError | None = None


class Tally:
  """What one pass over a source has met; `bytes_read` reaches the size of the files."""

  def __init__(self):
    self.bytes_read = 0
    self.documents = 0
    self.empty = 0
    self.undecodable = 0
    # Entries of objects left out because they were null in a format that cannot tell null from absent.
    self.nulls = 0


def the_path(cfg: ConfigDict, source: str, example: str) -> str:
  """The `path` of a source. Raises ConfigError if it is not set, or has credentials."""
  key = f"input.sources.{source}"
  if not cfg.path:
    raise ConfigError(f"{key}.path is not set: type {cfg.type!r} needs it, e.g. {example!r}.")
  addresses = [part.strip() for part in cfg.path.split(",") if urls.is_url(part.strip())]
  for address in addresses:
    urls.check(address, f"{key}.path")
  if cfg.copies and not addresses:
    raise ConfigError(f"{key}.copies is {cfg.copies!r}, but {key}.path names no URL of which copies would be made. "
                      "Leave it out.")
  return cfg.path


def find_files(spec: str, source: str, matches: Callable[[str], bool], expected: str, copies: str | None = None
               ) -> list[File]:
  """Files named by `spec`: a file, a folder (recursive) or a glob, several separated by commas; those of URLs as copies
  in the folder `copies` (urls.py).

  Entries keep the order of `spec`; within a folder or glob, files are sorted by relative name. Hidden files and
  folders, and those of runs, are left out unless named directly; a folder reached twice (a symlink loop) and a file
  reached twice are read once. `matches` filters the names found in folders, not those named directly.

  Raises:
    DataError: a path that does not exist, one without a usable file, or a file whose name says that another type of
      source reads it.
  """
  key = f"input.sources.{source}.path"
  entries = [spec] if os.path.exists(spec) else [part.strip() for part in spec.split(",") if part.strip()]
  if not entries:
    raise DataError(f"{key} is empty. Name {expected}, a folder or a glob of such files.")
  files, seen, repeated = [], set(), 0
  for entry in entries:
    if "\0" in entry or len(entry) > MAX_PATH:
      raise DataError(f"{key} has {entry[:80]!r}…, which is no path: paths have at most {MAX_PATH:,} characters, and "
                      "no NUL. Several are separated by commas.")
    found = ([File(*file) for file in urls.fetch(entry, key, matches, expected, copies)] if urls.is_url(entry) else
             _expand(os.path.expanduser(entry), key, matches, expected))
    for file in found:
      kind = _type_of(file.name)
      if kind and kind not in expected and (kind in ("parquet", "arrow") or not matches(file.name)):
        raise DataError(f"{key}: {file.path} is no file of this type of source. Name {expected}, or set "
                        f"{key[:-4]}type={kind!r}.")
      real = os.path.realpath(file.path)
      repeated += real in seen
      if real not in seen:
        files.append(file)
      seen.add(real)
  if repeated:
    logging.warning("%s: %d files were reached more than once and are read once.", key, repeated)
  return files


def _expand(entry: str, key: str, matches, expected: str) -> list[File]:
  """The files of one entry of a path specification."""
  if os.path.isfile(entry):
    return [File(os.path.basename(entry), Path(entry))]
  if os.path.isdir(entry):
    if "arrow" not in expected and any(os.path.isfile(os.path.join(entry, n)) for n in (SAVED_DATASET, SAVED_SPLITS)):
      raise DataError(f"{key}: {entry!r} is a folder that datasets' save_to_disk wrote. Set {key[:-4]}type='arrow'.")
    base, found = entry, walk(entry)
  elif glob.has_magic(entry):
    base = entry
    while glob.has_magic(base):
      base = os.path.dirname(base) or "."
    found = [p for p in glob.glob(entry, recursive=True) if os.path.isfile(p)]
  elif os.path.lexists(entry):
    raise DataError(f"{key}: {entry!r} is neither a file nor a folder (a broken link?).")
  else:
    parent = os.path.dirname(os.path.abspath(entry))
    is_name = entry.count("/") == 1 and entry[0] not in "./~" and not os.path.splitext(entry)[1]  # ORGANISATION/NAME
    there = f"the folder holds {_some(os.listdir(parent))}" if os.path.isdir(parent) else (
        f"nor does {parent!r}" + f"; on Hugging Face's hub: hf://datasets/{entry}" * is_name)
    raise DataError(f"{key}: {entry!r} does not exist ({there}). Name {expected}, a folder or a glob.")
  files = [File(Path(os.path.relpath(p, base)).as_posix(), Path(p)) for p in runs.without_theirs(found, base, key)]
  usable = sorted(f for f in files if matches(f.name))
  if not usable:
    what = f"only {_some(f.name for f in files)}" if files else "no files"
    kind, *others = {_type_of(f.name) for f in files} - {""} or {""}
    hint = f" Set {key[:-4]}type={kind!r} to read these." if kind and not others and kind not in expected else ""
    raise DataError(f"{key}: {entry!r} has {what}; expected {expected}.{hint}")
  if len(usable) < len(files):
    logging.info("%s: %r has %d other files, which are not read.", key, entry, len(files) - len(usable))
  return usable


def _type_of(name: str) -> str:
  """The type of source that reads files of this name; "": it does not say."""
  return TYPES.get(Path(re.sub(r"\.(gz|zst)$", "", name.lower())).suffix, "")


def walk(folder: str, skip_folders: frozenset[str] = frozenset()) -> list[str]:
  """Paths of the regular, not hidden files under `folder`; each real folder is entered once."""
  entered: set = set()
  found: list[str] = []
  others: list[str] = []
  for root, folders, names in os.walk(folder, followlinks=True):
    real = os.path.realpath(root)
    if real in entered:
      folders.clear()
      continue
    entered.add(real)
    # The order of entering decides which name a folder reached twice gets, so it must be fixed.
    folders[:] = sorted(d for d in folders if not d.startswith(".") and d not in skip_folders)
    for name in sorted(n for n in names if not n.startswith(".")):
      path = os.path.join(root, name)
      (found if os.path.isfile(path) else others).append(path)
  if others:
    logging.warning("%s: %d entries are not regular files and are not read: %s", folder, len(others), _some(others))
  return found


def _some(names, limit: int = 5) -> str:
  """A few names for a message."""
  names = sorted(map(str, names))
  rest = f" and {len(names) - limit} more" if len(names) > limit else ""
  return (", ".join(names[:limit]) or "nothing") + rest


def shown_names(names: Iterable[Any], none: str = "none") -> str:
  """The names of a row's columns, or of an object's keys, for a message: as many as a person reads."""
  names = list(names)
  shown = [f"{name[:SHOWN_NAME]!r}…" if isinstance(name, str) and len(name) > SHOWN_NAME else repr(name)
           for name in names[:SHOWN_NAMES]]
  more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
  return (", ".join(shown) or none) + more


def printable(text: str) -> str:
  """A text of strangers for a message, without what a terminal would obey."""
  return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def parse_json(text: str) -> Any:
  """What a JSON text says.

  Raises:
    NotJSONError: it is none; it is nested more than MAX_DEPTH levels deep; an object in it has a key twice, of which
      JSON does not say which one counts; or a number has more digits than Python takes.
  """
  try:
    value = json.loads(text, object_pairs_hook=_unique)
  except json.JSONDecodeError as e:
    raise NotJSONError(f"{e.msg} at column {e.colno}") from e
  except RecursionError as e:
    raise NotJSONError("nested too deeply") from e
  except NotJSONError:
    raise
  except ValueError as e:
    raise NotJSONError("a whole number of thousands of digits") from e
  if text.count("[") + text.count("{") > MAX_DEPTH and _deeper(value, MAX_DEPTH):
    raise NotJSONError(f"nested too deeply: more than {MAX_DEPTH} levels")
  return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  found = dict(pairs)
  if len(found) < len(pairs):
    keys = [key for key, _ in pairs]
    raise NotJSONError(f"an object has the key {shown_names(k for k in found if keys.count(k) > 1)} twice")
  return found


def _deeper(value: Any, levels: int) -> bool:
  """Whether lists and objects are nested in one another in more than so many levels."""
  level = [value]
  for _ in range(levels):
    level = [part for outer in level for part in (outer.values() if isinstance(outer, dict) else outer)
             if isinstance(part, (dict, list))]
    if not level:
      return False
  return True


def hash_file(path: Path) -> str:
  """BLAKE2b of a file's content, as hex."""
  digest = hashlib.blake2b(digest_size=16)
  with open_binary(path) as f:
    while chunk := f.read(CHUNK):
      digest.update(chunk)
  return digest.hexdigest()


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
      with contextlib.suppress(OSError):  # a cache that is only read may lie on a read-only disk
        self._file.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(self._file, json.dumps(self._known))
      self._changed = False


def open_binary(path: Path):
  """The file, opened for reading bytes; a DataError names it if that fails."""
  try:
    return open(path, "rb")
  except OSError as e:
    raise DataError(f"{path}: cannot be read: {e.strerror}.") from e


def decode(raw: bytes, path: Path, offset: int = 0, line: int | None = None) -> str:
  """UTF-8 text of `raw`, which begins `offset` bytes into the file; a byte-order mark there is dropped."""
  if offset == 0 and raw.startswith(BOM):
    raw, offset = raw[len(BOM) :], len(BOM)
  try:
    return raw.decode("utf-8")
  except UnicodeDecodeError as e:
    where = f"{path}:{line}" if line else f"{path}"
    raise BadTextError(
        f"{where}: not valid UTF-8 at byte offset {offset + e.start} (0x{raw[e.start]:02x}: {e.reason}). "
        "Convert the file to UTF-8, or name only text files, e.g. with a glob such as 'folder/**/*.txt'."
    ) from e


def read_bytes(path: Path, tally: Tally) -> bytes:
  """The uncompressed content of a plain, .gz or .zst file. Raises DataError for a damaged one."""
  return b"".join(line for _, _, line in read_lines(path, tally))


def read_lines(path: Path, tally: Tally) -> Iterator[tuple[int, int, bytes]]:
  """Yields (line number from 1, byte offset, bytes with their line end) of a plain, .gz or .zst file.

  Offsets count uncompressed bytes. Raises DataError for a damaged or truncated compressed file.
  """
  return split_lines(read_chunks(path, tally), path)


def split_lines(chunks: Iterable[bytes], path: Path) -> Iterator[tuple[int, int, bytes]]:
  """The lines of what `read_chunks` gives; see `read_lines`."""
  offset = 0
  for number, line in enumerate(_split_lines(chunks, path), 1):
    yield number, offset, line
    offset += len(line)


def read_chunks(path: Path, tally: Tally, opened=None) -> Iterator[bytes]:
  """The uncompressed bytes of a plain, .gz or .zst file, some at a time. Raises DataError for a damaged one."""
  before, offset = tally.bytes_read, 0
  with open_binary(path) if opened is None else opened as raw:
    try:
      for chunk in _decompress(raw, path):
        tally.bytes_read = before + raw.tell()
        yield chunk
        offset += len(chunk)
    except (EOFError, zlib.error, gzip.BadGzipFile, OSError) as e:
      raise DataError(f"{path}: damaged or truncated after {offset} bytes of text: {e}.") from e
    tally.bytes_read = before + raw.tell()


def _decompress(raw, path: Path):
  """Chunks of the file's uncompressed bytes."""
  if path.suffix != ".zst":
    # Not as much as was asked for, but what there is: a file may still be arriving.
    read = gzip.GzipFile(fileobj=raw).read1 if path.suffix == ".gz" else raw.read
    while chunk := read(CHUNK):
      yield chunk
    return
  import zstandard
  frame = fed = None
  for chunk in _pieces(raw):
    while chunk:  # a file may be several frames in a row
      if frame is None:
        frame = zstandard.ZstdDecompressor().decompressobj()
      try:
        yield frame.decompress(chunk)
      except zstandard.ZstdError as e:
        raise DataError(f"{path}: damaged: {e}.") from e
      chunk, fed = frame.unused_data if frame.eof else b"", True
      frame = None if frame.eof else frame
  if fed and frame is not None:
    raise DataError(f"{path}: truncated: the last compressed frame has no end.")


def _pieces(raw) -> Iterator[bytes]:
  while chunk := raw.read(CHUNK):
    for start in range(0, len(chunk), UNPACKED):
      yield chunk[start : start + UNPACKED]


def _split_lines(chunks, path: Path) -> Iterator[bytes]:
  """Lines, cut after each newline byte; only the last may lack one. Raises DataError for one beyond MAX_LINE."""
  rest: list[bytes] = []
  size = 0
  for chunk in chunks:
    lines = chunk.split(b"\n")
    if len(lines) > 1:
      yield b"".join([*rest, lines[0], b"\n"])
      for line in lines[1:-1]:
        yield line + b"\n"
      rest, size = [], 0
    rest.append(lines[-1])
    size += len(lines[-1])
    if size > MAX_LINE:
      raise DataError(f"{path}: a line of more than {MAX_LINE:,} bytes. Cut it into lines, or the file into "
                      "several, if it is text at all.")
  last = b"".join(rest)
  if last:
    yield last
