"""JSON files: an object a line, a list of objects, or an object of which one key holds that list."""

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from ml_collections import ConfigDict

from input_pipeline.files import (
  BOM,
  MAX_DEPTH,
  MAX_LINE,
  File,
  NotJSONError,
  Record,
  Tally,
  decode,
  find_files,
  parse_json,
  read_chunks,
  shown_names,
  split_lines,
  the_path,
)
from trainer.errors import DataError

_STRUCTURE = re.compile(rb'[\[\]{}"]')
_SPACE, _SCALAR = re.compile(rb"[ \t\r\n]*"), re.compile(rb"[^\s,:\[\]{}\"]+")


class JsonlReader:
  """JSON Lines (blank lines are skipped), or a list of objects, whatever the file's name; also .gz and .zst.

  Of a list, one row and a part of the file are in memory, whatever its size.
  """

  by_name = False
  # Whether files are pieces (pieces.py); set by the source.
  in_pieces = False
  suffixes = tuple(a + b for a in (".jsonl", ".ndjson", ".json") for b in ("", ".gz", ".zst"))

  def __init__(self, cfg: ConfigDict, source: str):
    self.path, self.text_key, self._source = the_path(cfg, source, "data/*.jsonl"), cfg.text_key, source
    self._rows_key, self._copies = cfg.rows_key, cfg.copies
    self.cuts = "lines" if self._rows_key is None else None
    self.identity = ["jsonl", *([] if self._rows_key is None else [self._rows_key])]

  def files(self) -> list[File]:
    expected = "a .jsonl or .json file, or one of these with .gz or .zst behind it"
    return find_files(self.path, self._source, lambda name: name.endswith(self.suffixes), expected, self._copies)

  def read(self, tally: Tally) -> Iterator[Record]:
    for name, path in self.files():
      chunks = read_chunks(path, tally)
      head = b""
      for chunk in chunks:  # up to what the file begins with
        head += chunk
        if head.removeprefix(BOM).strip():
          break
      # No line of JSON Lines begins so, since each is an object.
      is_list = head.removeprefix(BOM).lstrip().startswith(b"[")
      if is_list and self.in_pieces:
        if name.endswith("[0]"):
          raise DataError(f"{path}: is a list of objects, which is not cut into pieces. Write an object a line (JSON "
                          f"Lines), or set input.sources.{self._source}.stream_bytes=0.")
        is_list = False
      rest = chain((head,), chunks)
      if is_list or self._rows_key is not None:
        yield from self._elements(name, path, rest)
      else:
        yield from self._lines(name, path, rest)

  def _lines(self, name: str, path: Path, chunks: Iterator[bytes]) -> Iterator[Record]:
    open_ended = None
    for number, offset, line in split_lines(chunks, path):
      text = line.removeprefix(BOM) if offset == 0 else line
      if not text.strip():
        continue
      if open_ended is not None and not text.lstrip().startswith(b"{"):
        raise DataError(f"{open_ended.problem} If the file is one object over several lines, name its key that holds "
                        f"the list of rows: input.sources.{self._source}.rows_key.")
      if open_ended is not None:
        yield open_ended
      record = _record(f"{name}:{number}", f"{path}:{number}", path, line, offset, number)
      open_ended = record if number == 1 and record.problem is not None and _ends_open(text) else None
      if open_ended is None:
        yield record
    if open_ended is not None:
      yield open_ended

  def _elements(self, name: str, path: Path, chunks: Iterator[bytes]) -> Iterator[Record]:
    scanner = Scanner(chunks, path)
    for row, (line, offset, text) in enumerate(scanner.rows(self._rows_key, self._source)):
      where = f"{path}: row {row} (from 0), line {line}"
      yield _record(f"{name}[{row}]", where, path, text, offset, line)


def _record(name: str, where: str, path: Path, raw: bytes, offset: int, line: int) -> Record:
  """The record in the bytes of one object, or of none."""
  try:
    return Record(name, where, parse_object(decode(raw, path, offset, line).strip(), where, "not valid JSON ({})"),
                  path.parent)
  except DataError as e:
    return Record(name, where, {}, path.parent, problem=e)


def _ends_open(line: bytes) -> bool:
  """Whether an object begins in a line that does not end there."""
  try:
    Scanner(iter((line,)), Path()).value()
  except NoEndError:
    return True
  except DataError:
    pass
  return False


def parse_object(text: str, where: str, not_json: str) -> dict:
  """The JSON object in `text`. Raises DataError; `not_json`, with "{}" for the reason, says what it should be."""
  try:
    record = parse_json(text)
  except NotJSONError as e:
    raise DataError(f"{where}: {not_json.format(e)}: {text[:60]!r}. Each record must be one JSON object.") from e
  if not isinstance(record, dict):
    raise DataError(f"{where}: expected a JSON object, found {'null' if record is None else type(record).__name__}.")
  return record


class NoEndError(DataError):
  """The file ends within a value."""


class Scanner:
  """Finds where values of JSON begin and end, without reading what they say.

  Args:
    chunks: the bytes of a file, some at a time.
    path: of the file, for messages.
  """

  def __init__(self, chunks: Iterator[bytes], path: Path):
    self._chunks, self._path = chunks, path
    # What is held of the file, where in the file that begins, and the place in it up to which all is scanned.
    self._held, self._base, self._at, self._line = b"", 0, 0, 1

  def rows(self, key: str | None, source: str) -> Iterator[tuple[int, int, bytes]]:
    """(line from 1, offset in the file, bytes) of each entry of the list that the file is, or that stands behind `key`.

    Raises:
      DataError: there is no such list, or it is none; or it does not end.
    """
    first, option = self._next(), f"input.sources.{source}.rows_key"
    if key is None:
      yield from self._entries()
    elif first == b"{":
      yield from self._behind(key, option)
    else:
      raise DataError(f"{self._here()}: {option} is {key!r}, but the file does not begin with an object, of which "
                      "this would be a key. Leave it out for JSON Lines and for files that are a list.")
    if left := self._next():
      raise DataError(f"{self._here()}: found {left.decode(errors='replace')!r} behind the end of the list of rows. A "
                      "file has one list, or an object a line.")

  def value(self) -> tuple[int, int, bytes]:
    """(line, offset, bytes) of the value that is next; the bytes are a value only if `parse_json` says so."""
    first, line, offset = self._next(), self._line, self._base + self._at
    if first in (b"{", b"[", b'"'):
      return line, offset, self._take(self._end())
    while True:
      found = _SCALAR.match(self._held, self._at)
      if found is not None and found.end() < len(self._held) or not self._more():
        break
    if found is None:
      raise self._unexpected("a value")
    return line, offset, self._take(found.end())

  def _entries(self) -> Iterator[tuple[int, int, bytes]]:
    """The entries of the list that is next."""
    self._expect(b"[")
    if self._next() == b"]":
      self._expect(b"]")
      return
    while True:
      yield self.value()
      if self._next() == b"]":
        self._expect(b"]")
        return
      self._expect(b",", "',' or ']'")

  def _behind(self, key: str, option: str) -> Iterator[tuple[int, int, bytes]]:
    """The entries of the list behind `key` of the object that is next."""
    keys: list[str] = []
    self._expect(b"{")
    while self._next() != b"}":
      if keys:
        self._expect(b",", "',' or '}'")
      line, _, raw = self.value()
      where = f"{self._path}:{line}"
      try:
        name = parse_json(decode(raw, self._path))
      except NotJSONError as e:
        raise DataError(f"{where}: a key that is not valid JSON ({e}).") from e
      self._expect(b":")
      if name == key and name in keys:
        raise DataError(f"{where}: the key {key!r} is there twice.")
      keys.append(name)
      if name != key:
        self.value()
      elif self._next() != b"[":
        raise DataError(f"{self._here()}: behind {key!r} ({option}) is no list.")
      else:
        yield from self._entries()
    self._expect(b"}")
    if key not in keys:
      raise DataError(f"{self._path}: no key {key!r}; found {shown_names(keys)}. Set {option}.")

  def _end(self) -> int:
    """Where the object, list or string that is next ends in what is held."""
    at, depth = self._at, 0
    while True:
      found = _STRUCTURE.search(self._held, at)
      end = None
      if found is not None:
        end = self._end_of_string(found.start()) if found[0] == b'"' else found.end()
      if end is None:
        at = (len(self._held) if found is None else found.start()) - self._at  # which `_more` puts at 0
        if len(self._held) - self._at > MAX_LINE:
          raise DataError(f"{self._here()}: a row of more than {MAX_LINE:,} bytes.")
        if not self._more():
          raise NoEndError(f"{self._here()}: what begins here does not end: the file was cut short, or a bracket or "
                           "quotation mark is missing in it.")
        continue
      depth += {b"{": 1, b"[": 1, b"}": -1, b"]": -1}.get(found[0], 0)
      if depth > MAX_DEPTH + 1:  # the list of rows counts, too
        raise DataError(f"{self._here()}: not valid JSON (nested too deeply: more than {MAX_DEPTH} levels).")
      if depth <= 0:
        return end
      at = end

  def _end_of_string(self, start: int) -> int | None:
    """Where the string that begins at `start` ends in what is held; None: not there."""
    at = self._held.find(b'"', start + 1)
    while at >= 0:
      escapes = at
      while self._held[escapes - 1] == ord("\\"):
        escapes -= 1
      if (at - escapes) % 2 == 0:
        return at + 1
      at = self._held.find(b'"', at + 1)
    return None

  def _next(self) -> bytes:
    """The next byte that is no space, up to which all is taken; b"" at the file's end."""
    if self._base + self._at == 0:
      while len(self._held) < len(BOM) and self._more():
        pass
      self._at = len(BOM) if self._held.startswith(BOM) else 0
    while True:
      self._take(_SPACE.match(self._held, self._at).end())
      if self._at < len(self._held) or not self._more():
        return self._held[self._at:self._at + 1]

  def _expect(self, byte: bytes, what: str | None = None) -> None:
    if self._next() != byte:
      raise self._unexpected(what or repr(byte.decode()))
    self._take(self._at + 1)

  def _take(self, end: int) -> bytes:
    taken = self._held[self._at:end]
    self._line += taken.count(b"\n")
    self._at = end
    return taken

  def _more(self) -> bool:
    """Reads on; False at the file's end."""
    chunk = next(self._chunks, None)
    if chunk is None:
      return False
    self._held, self._base, self._at = self._held[self._at:] + chunk, self._base + self._at, 0
    return True

  def _here(self) -> str:
    return f"{self._path}:{self._line}"

  def _unexpected(self, expected: str) -> DataError:
    left = self._held[self._at:self._at + 20].decode(errors="replace")
    found = repr(left) if left else "the file's end"
    return DataError(f"{self._here()}: not valid JSON (expected {expected}, found {found}).")
