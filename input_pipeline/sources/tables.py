"""Tables as text: files of comma-separated values, with a line of column names."""

import csv
from collections.abc import Iterator
from pathlib import Path

from ml_collections import ConfigDict

from input_pipeline.files import (
  MAX_LINE,
  BadTextError,
  File,
  Record,
  Tally,
  decode,
  find_files,
  read_lines,
  the_path,
)
from trainer.errors import DataError

ENDINGS = (".csv", ".tsv")
# What may stand between columns; of those the one that the line of names has most of.
DELIMITERS = ",;\t|"


class CsvReader:
  """`.csv` and `.tsv` files, also `.gz` and `.zst`, whose first line names the columns; a record is a row, of strings.

  Cells with delimiters, quotation marks or line ends stand between quotation marks, doubled within (RFC 4180).
  """

  by_name = False
  cuts = "CSV"

  def __init__(self, cfg: ConfigDict, source: str):
    self.path, self._source, self._copies = the_path(cfg, source, "data/*.csv"), source, cfg.copies
    self.text_key, self.identity = cfg.text_key, ["csv", 1]

  def files(self) -> list[File]:
    return find_files(self.path, self._source, lambda name: any(ending in name.lower() for ending in ENDINGS),
                      "a .csv or .tsv file", self._copies)

  def read(self, tally: Tally) -> Iterator[Record]:
    csv.field_size_limit(MAX_LINE)  # Python's own is 128 KiB, less than some documents have
    for name, path in self.files():
      lines = _Lines(path, tally)
      first = next(lines, "")
      if lines.problem:
        raise lines.problem
      delimiter = delimiter_of(name, first)
      columns = next(csv.reader([first], delimiter=delimiter), [])
      if twice := {column for column in columns if columns.count(column) > 1}:
        raise DataError(f"{path}:1: the columns {', '.join(map(repr, sorted(twice)))} are there twice. Names stand in "
                        "the first line; rename them there.")
      yield from self._rows(name, path, lines, columns, delimiter)

  def _rows(self, name: str, path: Path, lines: "_Lines", columns: list[str], delimiter: str) -> Iterator[Record]:
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
      start = lines.number + 1
      where = f"{path}:{start}"
      try:
        cells = next(rows, None)
      except csv.Error as error:  # of a mark that is not closed; where the next row begins is not known then
        raise DataError(f"{where}: not valid CSV ({error}). A quotation mark within a cell is doubled, and the cell "
                        "stands between quotation marks.") from error
      if cells is None:
        return
      problem: DataError | None = lines.problem
      lines.problem = None
      if cells and problem is None and len(cells) != len(columns):
        problem = DataError(f"{where}: {len(cells)} cells, but the first line names {len(columns)} columns, with "
                            f"{delimiter!r} between them. Cells that hold it stand between quotation marks.")
      if cells:  # else it is an empty line
        fields = {} if problem else dict(zip(columns, cells, strict=True))
        yield Record(f"{name}:{start}", where, fields, path.parent, problem=problem)


class _Lines:
  """The lines of a file as text, with their line ends; `number` is that of the last one given, from 1.

  `problem`: of a line that is no text, which is given nevertheless, so that the rows behind it are found.
  """

  def __init__(self, path: Path, tally: Tally):
    self.number, self._path, self._lines = 0, path, read_lines(path, tally)
    self.problem: BadTextError | None = None

  def __iter__(self) -> "_Lines":
    return self

  def __next__(self) -> str:
    self.number, offset, raw = next(self._lines)
    try:
      return decode(raw, self._path, offset, self.number)
    except BadTextError as error:
      self.problem = self.problem or error
      return raw.decode("utf-8", "replace")


def delimiter_of(name: str, names: str) -> str:
  """What stands between the columns of a file, by its name and its first line, that of the columns' names."""
  outside = "".join(names.split('"')[::2])
  return "\t" if ".tsv" in name.lower() else max(DELIMITERS, key=outside.count)
