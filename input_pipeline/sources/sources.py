"""Named sources of records: which records belong to a split, in a fixed order, with a content identity.

A record belongs to `validation` when a hash of its key falls below `validation_fraction`, else to `train`: whatever
the order of files, and whatever else is added to the source. The key is the relative file name where a file is a
document, else the content, so that duplicates stay on one side: the text, or all fields as canonical JSON.
"""

import contextlib
import copy
import difflib
import hashlib
import inspect
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from absl import logging
from ml_collections import ConfigDict
from tqdm import tqdm

from input_pipeline import urls
from input_pipeline.bad_rows import BadRows
from input_pipeline.files import File, Tally, hash_file
from input_pipeline.sources.readers import READERS, Record, TextReader
from trainer.dotted import load_object
from trainer.errors import ConfigError, DataError

__all__ = ["Record", "Source", "open_source"]

SPLITS = ("all", "train", "validation")
# Part of every fingerprint: raise it when the same files would give other records.
VERSION = 3


def open_source(
    cfg: ConfigDict, name: str, *, split: str | None = None, max_documents: int | None = None, texts: bool = True,
    streams: bool = False
) -> "Source":
  """The source that `cfg` (made by `trainer.config.source`) describes; reads no file yet.

  Args:
    cfg: the source's config; only the keys that its type uses are read.
    name: its name in `input.sources`, for messages.
    split: replaces `cfg.split`.
    max_documents: a further limit besides `cfg.max_documents`.
    texts: where a record has the field `text_key`, it counts for that text alone: it is empty if the text is, and the
      text is its key. False: a record counts for all its fields.
    streams: it may be one that is read in parts (streams.py).

  Raises:
    ConfigError: an unknown type or split, a reader of the user's own that is none, or a number out of range.
  """
  key = f"input.sources.{name}"
  if cfg.stream_files and not streams:
    raise ConfigError(f"{key}.stream_files is {cfg.stream_files}, but prompts and what evaluations read are read "
                      "whole. Use stream_files=0; for evaluations name other files in evals.<name>.sources.")
  if cfg.stream_bytes and not cfg.stream_files:
    raise ConfigError(f"{key}.stream_bytes is {cfg.stream_bytes}, which cuts the files of a stream, but this is none. "
                      f"Set {key}.stream_files=1, or so many files that are read side by side.")
  make_reader = _reader_class(cfg.type, f"{key}.type")
  split = cfg.split if split is None else split
  if split not in SPLITS:
    raise ConfigError(f"{key}: split {split!r}; allowed: {', '.join(map(repr, SPLITS))}.")
  fraction = None
  if split != "all":
    fraction = float(cfg.validation_fraction)
    if not 0.0 < fraction < 1.0:
      raise ConfigError(f"{key}.validation_fraction={fraction} must lie between 0 and 1; for no split set split='all'.")
  limits = [n for n in (cfg.max_documents, max_documents) if n is not None]
  if any(n < 1 for n in limits):
    raise ConfigError(f"{key}: max_documents={min(limits)} must be at least 1; leave it unset for all documents.")
  reader = make_reader(cfg, name)
  own = cfg.type if cfg.type not in READERS else None
  if own is not None:
    _check_reader(reader, own, f"{key}.type")
  return Source(name, reader, split, fraction, min(limits, default=None), texts, own)


# What a reader of the user's own has besides its constructor (docs/extending.md).
_MEMBERS = ("files", "read", "by_name", "text_key", "identity")


def _reader_class(kind: str, key: str) -> Callable[[ConfigDict, str], Any]:
  """The reader of a built-in type, or the user's own class by its dotted path.

  Raises:
    ConfigError: if there is none.
  """
  if kind in READERS:
    return READERS[kind]
  allowed = f"{', '.join(map(repr, READERS))}, or the dotted path of a reader of yours (docs/extending.md)"
  if "." not in str(kind):
    near = difflib.get_close_matches(str(kind), READERS, n=1, cutoff=0.6)
    raise ConfigError(f"{key}={kind!r}" + (f"; did you mean {near[0]!r}?" if near else "") + f"; allowed: {allowed}.")
  found = load_object(kind, key, allowed)
  if not isinstance(found, type):
    raise ConfigError(f"{key}={kind!r} is of type {type(found).__name__}; a reader is a class with "
                      f"__init__(cfg, source) and {', '.join(_MEMBERS)} (docs/extending.md).")
  try:
    inspect.signature(found).bind("cfg", "source")
  except TypeError as e:
    raise ConfigError(f"{key}={kind!r} is made as {found.__name__}(cfg, source), which its __init__ does not take: {e}."
                      " Give it these two arguments.") from e
  return found


def _check_reader(reader: Any, kind: str, key: str) -> None:
  """Refuses a reader of the user's own that lacks a member, or whose identity is not JSON's types."""
  if missing := [name for name in _MEMBERS if not hasattr(reader, name)]:
    raise ConfigError(f"{key}={kind!r} has no {', '.join(missing)}: a reader has {', '.join(_MEMBERS)} "
                      "(docs/extending.md). Set what is missing in the class, or in __init__.")
  try:
    json.dumps(reader.identity)
  except (TypeError, ValueError) as e:
    raise ConfigError(f"{key}={kind!r} has the identity {reader.identity!r:.80}, which is not JSON ({e}). Use a list "
                      "of names, numbers and strings: the options that change which records come out.") from e


class Listed(NamedTuple):
  """A file of a source, maybe not fetched yet; `size` is None where a server does not say. `shown` tells people where
  it is; `version` is what is known of its content without reading it."""

  name: str
  path: Path
  size: int | None
  shown: str
  version: str


class NothingError(DataError):
  """No document of a source falls into its split."""


class Source:
  """Records of one split of one source, in an order that depends on nothing but the files."""

  def __init__(self, name: str, reader, split: str, fraction: float | None, max_documents: int | None, texts: bool,
               own: str | None = None):
    self.name, self.split, self.text_key = name, split, reader.text_key
    # How messages about `text_key` call it.
    self.text_option = f"input.sources.{name}.text_key{getattr(reader, 'text_hint', '')}"
    self._reader, self._fraction, self._max_documents, self._texts = reader, fraction, max_documents, texts
    # The dotted path of a reader of the user's own: another one may call itself the same, and read otherwise.
    self._identity = reader.identity if own is None else [own, reader.identity]
    if hasattr(reader, "only_text"):
      reader.only_text = texts
    # Whether it has some files of a source, or pieces of them, and how people know these: see `of`.
    self._is_part = False
    self._shown: Mapping[str, str] = {}
    # Counts of the pass in progress, or of the last one.
    self.tally = Tally()

  def records(self, bad: BadRows | None = None) -> Iterator[Record]:
    """Yields the split's records; empty ones are skipped and counted in `tally`.

    Args:
      bad: takes those that cannot be read, and counts all; who gives it finishes it. Default: they are an error.

    Raises:
      DataError: unreadable data, or no record in the split.
    """
    self.tally = tally = Tally()
    if bad is None:
      bad = BadRows(self.name)
      yield from self.records(bad)
      bad.finish()
      return
    picked = self._select(tally) if not self._shown else self._as_known(self._select(tally))
    if self._max_documents is not None:
      total = sum(1 for _ in self._select(Tally()))
      picked = _evenly_spaced(picked, total, self._max_documents)
    for record in picked:
      bad.seen += 1
      if record.problem is not None:
        bad.add(record.where, record.problem)
        continue
      tally.documents += 1
      yield record

  def fingerprint(self, hasher: Callable[[Path], str] = hash_file) -> str:
    """Identity of what `records()` gives: relative names and contents of all files, split and options.

    `hasher` maps a file to a hash of its content (`cache.FileHasher` remembers those of unchanged files).
    """
    return self.identity([(name, hasher(path)) for name, path in self._reader.files()])

  def identity(self, files: Sequence[Any]) -> str:
    """Identity of what is read of `files`, which say what they are (JSON-able)."""
    counts_for = [self.text_key, self._texts]
    parts = [VERSION, self._identity, counts_for, self.split, self._fraction, self._max_documents, files]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

  def listed(self) -> list[Listed]:
    """The files; those of URLs are not fetched."""
    with urls.later():
      files = self._reader.files()
    return [_listed(file) for file in files]

  def part(self, files: Sequence[Listed], stop: threading.Event | None = None) -> "Source":
    """The same source of some of its files, which are fetched when they are to be read, unless `stop` is set."""
    def there() -> list[File]:
      urls.fetch_listed([file.path for file in files], stop)
      return [File(file.name, file.path) for file in files]

    return self.of(there)

  def of(self, files: Callable[[], list[File]], shown: Mapping[str, str] | None = None) -> "Source":
    """The same source of other files; `shown` are names that people know in place of paths."""
    reader, other = copy.copy(self._reader), copy.copy(self)
    reader.files, reader.in_pieces = files, shown is not None
    other._reader, other._is_part, other._shown, other.tally = reader, True, shown or {}, Tally()
    return other

  @property
  def cuts(self) -> str | None:
    """In which way its files can be cut into pieces (pieces.py); None: in none."""
    return getattr(self._reader, "cuts", None)

  @contextlib.contextmanager
  def bar(self, what: str, show: bool) -> Iterator[Callable[[], None]]:
    """A progress bar, if stderr is a terminal, over the bytes of the files, or the records of a source without any.

    What it gives is to be called now and then in a pass, and moves the bar to where the pass is.
    """
    sizes = [os.path.getsize(path) for _, path in self._reader.files()] if show else []
    unit, total = ("B", sum(sizes)) if sizes else (" records", None)
    with tqdm(total=total, desc=f"{what} {self.name}", unit=unit, unit_scale=True,
              disable=None if show else True) as bar:
      yield lambda: bar.update((self.tally.bytes_read if sizes else self.tally.documents) - bar.n)

  def _select(self, tally: Tally) -> Iterator[Record]:
    """The split's records, without the limit on their number."""
    found = self._not_empty(tally)
    if self.split == "all":
      picked = found
    else:
      head = list(islice(found, 2)) if isinstance(self._reader, TextReader) and not self._is_part else []
      if len(head) == 1 and head[0].problem is None:
        yield self._cut(head[0])
        return
      picked = filter(self._in_split, map(self._checked, chain(head, found)))
    count = 0
    for record in picked:
      count += 1
      yield record
    if count == 0:
      raise NothingError(self._nothing(tally))

  def _as_known(self, records: Iterator[Record]) -> Iterator[Record]:
    """The records, and errors, with the names of `_shown` in place of paths."""
    def known(text: str) -> str:
      for path, shown in self._shown.items():
        text = text.replace(path, shown)
      return text

    try:
      for record in records:
        problem = record.problem
        yield record._replace(where=known(record.where), problem=problem and type(problem)(known(str(problem))))
    except DataError as e:
      raise type(e)(known(str(e))) from e

  def _not_empty(self, tally: Tally) -> Iterator[Record]:
    for record in self._reader.read(tally):
      if not isinstance(record, Record):
        kinds = type(self._reader).__name__, type(record).__name__
        raise DataError(f"source {self.name!r}: {kinds[0]}.read gives a {kinds[1]}, where input_pipeline"
                        ".sources.readers.Record(name, where, fields) is wanted.")
      if record.problem is None and (self._text(record) == "" or not record.fields):
        tally.empty += 1
      else:
        yield record

  def _text(self, record: Record) -> str | None:
    """The text that the record counts for, if it is one."""
    fields = record.fields
    text = fields.get(self.text_key) if self._texts or len(fields) == 1 else None
    return text if isinstance(text, str) else None

  def _checked(self, record: Record) -> Record:
    """The record, as a bad one if it has no key."""
    try:
      self._key(record)
    except DataError as e:
      return record._replace(fields={}, problem=e)
    return record

  def _key(self, record: Record) -> bytes:
    """What decides its split."""
    if record.problem is not None:  # its content is not known
      return record.name.encode("utf-8", "surrogatepass")
    text = self._text(record)
    if self._reader.by_name:
      return utf8(record.name, record.where)
    if text is not None:
      return utf8(text, record.where)
    fields = _without_nulls(record.fields)
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), default=stable).encode()

  def _in_split(self, record: Record) -> bool:
    key = self._key(record)
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return (int.from_bytes(digest, "big") < self._fraction * 2**64) == (self.split == "validation")

  def _cut(self, document: Record) -> Record:
    """This split's part of a source's only document: train before, validation after one of its line ends."""
    raw = utf8(document.fields["text"], document.where)
    target = round(len(raw) * (1.0 - self._fraction))
    # A cut is just after a newline byte, and leaves text on both sides.
    below = raw.rfind(b"\n", 0, target) + 1
    above = raw.find(b"\n", target) + 1
    cuts = [c for c in (below, above) if 0 < c < len(raw)]
    if not cuts:
      raise DataError(
          f"source {self.name!r} is one document of one line ({document.name}), which split={self.split!r} cannot "
          f"divide. Set input.sources.{self.name}.split='all', or give more documents."
      )
    cut = min(cuts, key=lambda c: abs(c - target))
    logging.info(
        "source %r is a single document, %s, so its split is by position: the first %d bytes train, the last %d "
        "validation.", self.name, document.name, cut, len(raw) - cut,
    )
    part = raw[:cut] if self.split == "train" else raw[cut:]
    return Record(f"{document.name}[{self.split}]", document.where, {"text": part.decode("utf-8")})

  def _nothing(self, tally: Tally) -> str:
    """Why there are no documents."""
    files = self._reader.files()
    size = sum(os.path.getsize(path) for _, path in files)
    key = f"input.sources.{self.name}"
    where = f"{len(files)} files such as {files[0].path}" if len(files) > 1 else str(files[0].path) if files else "made"
    if self.split == "all" or (files and size == 0):
      skipped = f", {tally.empty} empty documents" if tally.empty else ""
      return f"source {self.name!r} has no text: {where}, {size} bytes{skipped}. Point {key}.path at files with text."
    return (
        f"source {self.name!r}: none of its documents falls into split {self.split!r} with "
        f"validation_fraction={self._fraction} ({where}, {size} bytes). Change {key}.validation_fraction, give more "
        f"documents (for type 'text', documents='line' or 'paragraph' makes more of them), or set split='all'."
    )


def _listed(file: File) -> Listed:
  remote = urls.listed_for(file.path)
  if remote is not None:
    return Listed(file.name, file.path, remote[1].size, remote[1].shown, remote[1].version)
  stat = os.stat(file.path)
  return Listed(file.name, file.path, stat.st_size, str(file.path), f"{stat.st_size} bytes of {stat.st_mtime_ns}")


def utf8(text: str, where: str) -> bytes:
  """`text` in UTF-8. Raises DataError for a lone surrogate, which JSON escapes can smuggle in."""
  try:
    return text.encode("utf-8")
  except UnicodeEncodeError as e:
    raise DataError(
        f"{where}: character {e.start} is the lone surrogate U+{ord(text[e.start]):04X}, which is not text. "
        "Remove it, or repair the escape it came from."
    ) from e


def _without_nulls(value: Any) -> Any:
  """A row without what is null in its objects, which is absent in one format and null in another."""
  if isinstance(value, dict):
    return {key: _without_nulls(part) for key, part in value.items() if part is not None}
  return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def stable(value: Any) -> str:
  """What JSON lacks (bytes, dates, decimals), as a string that is the same everywhere."""
  return value.hex() if isinstance(value, bytes) else str(value)


def _evenly_spaced(records: Iterator[Record], total: int, count: int) -> Iterator[Record]:
  """`count` of the `total` records, spread evenly (all of them if there are fewer)."""
  for i, record in enumerate(records):
    if total <= count or (i + 1) * count // total > i * count // total:
      yield record
