"""Files cut into pieces of some megabytes, each a file of its own to its reader: what parts of a stream are made of.

Where a file is cut follows from its content and the number of bytes alone, not from how it comes here. Piece k of a
text begins with the first line that begins at byte k x size or behind it (where paragraphs are documents, the first
blank line); of .gz and .zst files, bytes are those of the unpacked text. Rows of CSV, whose cells may hold line ends,
are found from the beginning on, and their bytes counted behind the names of the columns, with which each piece begins.
A piece of a Parquet file is the fewest row groups that have `size` unpacked bytes together.

A piece comes by the cheapest way that gives it. Of lines, and of row groups, its bytes alone are asked for. What is
packed, CSV, and what a server sends whole only, are read from the beginning, a piece when all of it has arrived; who
goes on later with piece k passes over those before it. A Parquet file of such a server is fetched whole, since what
describes it stands at its end.
"""

import csv
import hashlib
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from input_pipeline import arriving, once, remote, urls
from input_pipeline.files import MAX_LINE, Tally, read_chunks, split_lines
from input_pipeline.sources import row_groups
from input_pipeline.sources.sources import Listed
from input_pipeline.sources.tables import delimiter_of
from trainer import atomic
from trainer.errors import DataError

LINES, PARAGRAPHS, CSV, ROW_GROUPS = "lines", "paragraphs", "CSV", "row groups"
# Endings of files of text that is read from the beginning, packed as it is.
PACKED = (".gz", ".zst")
# So many bytes more than a piece are asked for, in which its last line may end, and others where it does not.
MORE = 1 << 16
# Files that are kept open, each at its next piece.
MOST_OPEN = 64
_writing = threading.Lock()
_BLANK = re.compile(rb"\n[ \t\r]*\n")


class Piece(NamedTuple):
  """A piece of a file: its name, the file that holds it, how people know it, and whether it is the last."""

  name: str
  path: Path
  shown: str
  last: bool


class Cutter:
  """Cuts files in one of the ways above into pieces of so many bytes; safe to use from several threads."""

  def __init__(self, way: str, size: int):
    self._way, self._size = way, size
    self._open: dict[Path, _ByRange | _ByRowGroups | _InOrder] = {}
    # Pieces of files that were read to their end.
    self._ends: dict[Path, int] = {}
    self._lock = threading.Lock()

  def pieces(self, files: Sequence[Listed], number: int, scratch: Path, stop: threading.Event) -> list[Piece]:
    """Piece `number` of each file that has as many; those that are not kept lie in the folder `scratch`.

    Raises:
      DataError: a file cannot be read or cut, changed meanwhile, or `stop` was set.
    """
    with ThreadPoolExecutor(remote.AT_ONCE) as threads:
      found = list(threads.map(lambda file: self._piece(file, number, scratch, stop), files))
    return [piece for piece in found if piece is not None]

  def _piece(self, file: Listed, number: int, scratch: Path, stop: threading.Event) -> Piece | None:
    with self._lock:
      if number >= self._ends.get(file.path, number + 1):
        return None
      cut = self._open.pop(file.path, None)  # another thread would open it, too
    if cut is None:
      cut = self._cut(file, stop)
    piece = cut.piece(number, scratch, stop)
    with self._lock:
      if piece is None or piece.last:
        self._ends[file.path] = number + (piece is not None)
      else:
        self._open[file.path] = cut
      while len(self._open) > MOST_OPEN:
        del self._open[next(iter(self._open))]
    return piece

  def _cut(self, file: Listed, stop: threading.Event) -> "_ByRange | _ByRowGroups | _InOrder":
    source, folder = arriving.ranges(file.path), file.shown.rpartition("/")[0]
    if source is None and self._way == ROW_GROUPS:
      once.warning("%s/…: the server sends whole files only (no Range requests), and what describes a Parquet file "
                   "stands at its end: each is fetched whole before its first piece is read. JSON Lines would begin "
                   "sooner.", folder)
      urls.fetch_listed([file.path], stop)
      source = arriving.ranges(file.path)
    if source is not None and self._way == ROW_GROUPS:
      return _ByRowGroups(file, self._size, source)
    if source is not None and self._way != CSV and file.path.suffix not in PACKED:
      return _ByRange(file, self._way, self._size, source)
    if source is None:
      once.warning("%s/…: the server sends whole files only (no Range requests): they are read from their beginning, "
                   "in pieces of %s bytes as they arrive.", folder, f"{self._size:,}")
    return _InOrder(file, self._way, self._size)


def _cut_text(way: str, held: bytes | bytearray, at: int) -> int | None:
  """The first place from `at` on where text may be cut; None: not in what is held of it, which begins at such a place,
  or one byte before `at`."""
  if at <= 0:
    return 0
  if way == LINES:
    return found if (found := held.find(b"\n", at - 1) + 1) else None
  blank = _BLANK.search(held, at - 1)
  return None if blank is None else blank.start() + 1


def _folder_of(file: Listed, scratch: Path) -> Path:
  """Where pieces of a file lie that are not kept."""
  return scratch / hashlib.blake2b(file.name.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _write(folder: Path, number: int, begin: int, last: bool, suffix: str, content: bytes) -> Path:
  """Writes a piece that begins with byte `begin`; its name says so, and how many bytes there are."""
  try:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{number:06}.{begin}-{begin + len(content)}{'-last' * last}.{suffix}"
    with _writing:  # files of one process have one name until they are whole
      atomic.write(path, content)
  except OSError as e:
    raise DataError(f"{folder}: a piece cannot be written: {e.strerror or e}. Make room; pieces of URLs lie in "
                    "input.sources.NAME.copies, others in the folder that TMPDIR names.") from e
  return path


def _found(folder: Path, number: int) -> tuple[Path, int, bool] | None:
  """(path, first byte, whether it is the last) of a piece that `_write` wrote; None: there is none, or not all."""
  for path in folder.glob(f"{number:06}.*"):
    begin, end, *last = path.name.split(".")[1].split("-")
    if path.stat().st_size == int(end) - int(begin):
      return path, int(begin), bool(last)
  return None


def _text_at(file: Listed, begin: int) -> str:
  """How people are told where a piece of text begins: lines are counted from there."""
  return f"{file.shown}[{begin}:]" if begin else file.shown


class _ByRange:
  """Lines or paragraphs of a file that is not packed, by the bytes that they stand in."""

  def __init__(self, file: Listed, way: str, size: int, source: arriving.Ranges):
    self._file, self._way, self._size, self._source = file, way, size, source

  def piece(self, number: int, scratch: Path, stop: threading.Event) -> Piece | None:
    source = self._source
    kept = None if source.kept is None else source.kept / f"{self._way}-{self._size}"
    found = None if kept is None else _found(kept, number)
    if found is None:
      cut = self._read(number)
      if cut is None:
        return None
      begin, content = cut
      source.check()
      last = begin + len(content) >= source.size
      path = _write(kept or _folder_of(self._file, scratch), number, begin, last, self._file.path.name, content)
      found = path, begin, last
    return Piece(f"{self._file.name}[{number}]", found[0], _text_at(self._file, found[1]), found[2])

  def _read(self, number: int) -> tuple[int, bytes] | None:
    """(first byte, content) of a piece; None: the file has not as many."""
    source, size = self._source, self._source.size
    first, last = number * self._size, min((number + 1) * self._size, size)
    start = max(first - 1, 0)  # the byte before says whether a line begins here
    if number and first >= size:
      return None
    held, more = source.read(start, min(last + MORE, size)), MORE

    def cut(at: int) -> int:
      nonlocal held, more
      while (found := _cut_text(self._way, held, at - start)) is None and start + len(held) < size:
        held += source.read(start + len(held), min(start + len(held) + more, size))
        more *= 2
      return size if found is None else start + found

    begin = cut(first) if number else 0
    if number and begin >= size:
      return None
    end = cut(last) if last < size else size
    return begin, held[begin - start:end - start]


class _ByRowGroups:
  """Row groups of a Parquet file, by the bytes that they stand in."""

  def __init__(self, file: Listed, size: int, source: arriving.Ranges):
    self._file, self._size, self._source = file, size, source
    self._cutting = row_groups.Cutting(source, size, file.shown)

  def piece(self, number: int, scratch: Path, stop: threading.Event) -> Piece | None:
    parts, source = self._cutting.parts, self._source
    if number >= len(parts):
      return None
    part, last = parts[number], number == len(parts) - 1
    kept = None if source.kept is None else source.kept / f"row-groups-{self._size}"
    found = None if kept is None else _found(kept, number)
    if found is None:
      content = self._cutting.content(part)
      source.check()
      path = _write(kept or _folder_of(self._file, scratch), number, part.begin, last,
                    self._file.path.name + row_groups.SUFFIX, content)
    else:
      path = found[0]
    shown = f"{self._file.shown}, row groups {part.first} to {part.last - 1}"
    return Piece(f"{self._file.name}[{number}]", path, shown, last)


class _InOrder:
  """A file from its beginning on, as it arrives."""

  def __init__(self, file: Listed, way: str, size: int):
    self._file, self._way, self._size = file, way, size
    self._going: Iterator[tuple[int, bytes, bool]] = iter(())
    # Number of the piece that comes next, and what ends its arriving.
    self._next, self._stop = 0, threading.Event()
    self._stop.set()

  def piece(self, number: int, scratch: Path, stop: threading.Event) -> Piece | None:
    if self._next > number or self._stop.is_set():
      self._going, self._next, self._stop = self._pieces(stop), 0, stop
    for begin, content, last in self._going:
      self._next += 1
      if self._next > number:
        arriving.check(self._file.path)
        name = self._file.path.name
        suffix = name.removesuffix(self._file.path.suffix) if self._file.path.suffix in PACKED else name
        path = _write(_folder_of(self._file, scratch), number, begin, last, suffix, content)
        return Piece(f"{self._file.name}[{number}]", path, _text_at(self._file, begin), last)
    return None

  def _pieces(self, stop: threading.Event) -> Iterator[tuple[int, bytes, bool]]:
    """(first byte, content, whether it is the last) of each."""
    chunks = read_chunks(self._file.path, Tally(), arriving.arriving(self._file.path, stop))
    return self._rows(chunks) if self._way == CSV else self._texts(chunks)

  def _texts(self, chunks: Iterator[bytes]) -> Iterator[tuple[int, bytes, bool]]:
    held, base, number = bytearray(), 0, 0
    for chunk in chunks:
      held += chunk
      while len(held) > (number + 1) * self._size - base:
        end = _cut_text(self._way, held, (number + 1) * self._size - base)
        if end is None or end == len(held):  # whether anything stands behind it is not known
          break
        yield base, bytes(held[:end]), False
        del held[:end]
        base, number = base + end, number + 1
    yield base, bytes(held), True

  def _rows(self, chunks: Iterator[bytes]) -> Iterator[tuple[int, bytes, bool]]:
    csv.field_size_limit(MAX_LINE)
    lines = (line for _, _, line in split_lines(chunks, self._file.path))
    first = next(lines, b"")
    taken: list[bytes] = []

    def texts() -> Iterator[str]:
      for line in lines:
        taken.append(line)
        yield line.decode("utf-8", "replace")

    held, begin, at, number = [first], 0, len(first), 0
    rows = csv.reader(texts(), delimiter=delimiter_of(self._file.name, first.decode("utf-8", "replace")), strict=True)
    while True:
      try:
        if next(rows, None) is None:
          break
      except csv.Error as e:
        raise DataError(f"{_text_at(self._file, at)}:1: not valid CSV ({e}). A quotation mark within a cell is "
                        "doubled, and the cell stands between quotation marks.") from e
      while at - len(first) >= (number + 1) * self._size:
        yield begin, b"".join(held), False
        held, begin, number = [first], at, number + 1
      held += taken
      at += sum(map(len, taken))
      taken.clear()
    yield begin, b"".join(held), True
