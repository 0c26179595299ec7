"""Parts of Parquet files: some row groups of one, as a file that holds their bytes and the footer that describes them.

Bytes are those of the Parquet file, none made anew, so that a part is the same whatever library wrote or cut it. A part
begins with a line of JSON that says where its bytes stand in the file.
"""

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from input_pipeline.files import open_binary
from trainer.errors import DataError

if TYPE_CHECKING:
  from input_pipeline.arriving import Ranges

SUFFIX = ".row_groups"
# Before 2016 parquet-mr left a header out of what it said of a chunk's length; Arrow reads so many bytes more then.
MARGIN = 100
# What stands behind a footer: its length, in four bytes, and a mark; and how much is asked for to have all of it.
END, GUESS = 8, 1 << 16


class RowGroups(NamedTuple):
  """Row groups `first` to `last` (not included) and the bytes of the file that they stand in."""

  first: int
  last: int
  begin: int
  end: int


class Cutting:
  """A file in parts: row groups that follow one another, the fewest that have `size` unpacked bytes together.

  Raises:
    DataError: it is no readable Parquet file.
  """

  def __init__(self, source: "Ranges", size: int, shown: str):
    import pyarrow as pa
    import pyarrow.parquet as pq
    self._source = source
    # Where the footer begins, and what stands from there on.
    self._footer = max(0, source.size - GUESS)
    self._tail = source.read(self._footer, source.size)
    length = int.from_bytes(self._tail[-END:-4], "little") + END
    if len(self._tail) < length <= source.size:
      self._tail = source.read(source.size - length, self._footer) + self._tail
    self._tail = self._tail[-length:]
    self._footer = source.size - len(self._tail)
    try:
      with pq.ParquetFile(_Window(source.size, [(self._footer, self._tail)])) as table:
        groups = [table.metadata.row_group(g) for g in range(table.metadata.num_row_groups)]
    except (pa.ArrowException, OSError) as e:
      raise DataError(f"{shown}: not a readable Parquet file: {e}") from e
    self.parts: list[RowGroups] = []
    filled = size
    for number, group in enumerate(groups):
      begin, end = _span(group)
      if filled >= size:
        self.parts.append(RowGroups(number, number + 1, begin, end))
        filled = 0
      else:
        last = self.parts.pop()
        self.parts.append(RowGroups(last.first, number + 1, min(last.begin, begin), max(last.end, end)))
      filled += group.total_byte_size
    self.parts = self.parts or [RowGroups(0, 0, 0, 0)]

  def content(self, part: RowGroups) -> bytes:
    """The content of the file of a part."""
    end = min(part.end + MARGIN, self._footer) if part.end else 0
    said = dict(part._asdict(), end=end, footer=self._footer, size=self._source.size)
    return json.dumps(said).encode() + b"\n" + self._source.read(part.begin, end) + self._tail


def _span(group: Any) -> tuple[int, int]:
  """(first byte, the one behind the last) of a row group."""
  begins, ends = [], []
  for c in range(group.num_columns):
    column = group.column(c)
    begin = column.data_page_offset
    if column.has_dictionary_page and column.dictionary_page_offset:
      begin = min(begin, column.dictionary_page_offset)
    begins.append(begin)
    ends.append(begin + column.total_compressed_size)
  return min(begins, default=0), max(ends, default=0)


class _Window(io.RawIOBase):
  """A file of `size` bytes of which some are there: (first byte, bytes). Others are only passed over, as zeros, on the
  way to a footer."""

  def __init__(self, size: int, there: list[tuple[int, bytes]]):
    self._size, self._there, self._at = size, there, 0

  def readable(self) -> bool:
    return True

  def seekable(self) -> bool:
    return True

  def tell(self) -> int:
    return self._at

  def seek(self, offset: int, whence: int = 0) -> int:
    self._at = offset + (0, self._at, self._size)[whence]
    return self._at

  def readinto(self, buffer: Any) -> int:
    begin, end = self._at, max(self._at, min(self._at + len(buffer), self._size))
    data = bytearray(end - begin)
    for first, held in self._there:
      if (low := max(first, begin)) < (high := min(first + len(held), end)):
        data[low - begin:high - begin] = held[low - first:high - first]
    buffer[:len(data)], self._at = data, end
    return len(data)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[Path | io.RawIOBase, range | None]]:
  """(a Parquet file, or as much of it as a part has; the part's row groups, or None for all)."""
  if path.suffix != SUFFIX:
    yield path, None
    return
  with open_binary(path) as file:
    said = json.loads(file.readline())
    held, tail = file.read(said["end"] - said["begin"]), file.read()
  window = _Window(said["size"], [(said["begin"], held), (said["footer"], tail)])
  yield window, range(said["first"], said["last"])
