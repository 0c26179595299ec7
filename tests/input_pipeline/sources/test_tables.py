"""CSV files: the rows that Python's own writer wrote, whatever is in them; what is wrong is told with its line."""

import csv
import gzip

import pytest

from input_pipeline.files import Tally
from input_pipeline.sources.sources import open_source
from input_pipeline.sources.tables import CsvReader
from trainer.config import source
from trainer.errors import DataError

COLUMNS = ["prompt", "completion", "id, or number"]
ROWS = [
    ["one", "two", "3"], ['say "hi", or not', "two\nlines\r\nor three", ""], ["é; 😀", "a\tb|c;d", "'"],
    ["x" * 200_000, "longer than a cell of Python's", "5"],
]


def read(path, **cfg):
  return list(open_source(source(type="csv", path=str(path), **cfg), "mine", texts=False).records())


def written(path, rows=ROWS, columns=COLUMNS, **how):
  with open(path, "w", newline="", encoding="utf-8") as file:
    csv.writer(file, **how).writerows([columns, *rows])
  return path


@pytest.mark.parametrize("ending, how", [
    ("csv", dict()), ("csv", dict(lineterminator="\n", quoting=csv.QUOTE_ALL)), ("csv", dict(delimiter=";")),
    ("csv", dict(delimiter="|")), ("tsv", dict(delimiter="\t")), ("CSV", dict(delimiter="\t"))])
def test_rows_are_those_that_were_written(tmp_path, ending, how):
  records = read(written(tmp_path / f"a.{ending}", **how))
  assert [list(record.fields.values()) for record in records] == ROWS
  assert all(list(record.fields) == COLUMNS for record in records)
  assert [record.where.rpartition(":")[2] for record in records] == ["2", "3", "6", "7"]  # where each begins


def test_compressed_with_a_mark_and_empty_lines(tmp_path):
  """As Excel writes it: a byte-order mark, lines that end in CR LF."""
  (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"\xef\xbb\xbftext,n\r\n\r\none,1\r\n\r\ntwo,2"))
  assert [record.fields for record in read(tmp_path)] == [dict(text="one", n="1"), dict(text="two", n="2")]
  (tmp_path / "b.csv").write_text("text\nof one column\n")
  assert [record.fields for record in read(tmp_path)][-1] == dict(text="of one column")
  (tmp_path / "b.csv").write_text("text\n")
  (tmp_path / "c.csv").write_text("")
  assert len(read(tmp_path)) == 2


@pytest.mark.parametrize("content, said", [
    (b"a,b,a\n1,2,3\n", r"a\.csv:1: the columns 'a' are there twice"),
    (b"text\n\"never closed\nand more\n", r"a\.csv:2: not valid CSV .*A quotation mark"),
    (b"text\none\n\"a\" b\nc\n", r"a\.csv:3: not valid CSV"),
    (b"te\xffxt\none\n", r"a\.csv:1: not valid UTF-8"),
])
def test_a_file_that_cannot_be_read_is_told_with_its_line(tmp_path, content, said):
  (tmp_path / "a.csv").write_bytes(content)
  with pytest.raises(DataError, match=said):
    read(tmp_path)


def test_a_bad_row_is_a_single_one(tmp_path):
  """Too many cells, too few, and what is no UTF-8, in the second line of a cell."""
  (tmp_path / "a.csv").write_bytes(b'a,b\n1,2\n1,2,3\n1\n"x\ny\xff",2\n3,4\n')
  records = list(CsvReader(source(type="csv", path=str(tmp_path)), "mine").read(Tally()))
  assert [record.fields for record in records] == [dict(a="1", b="2"), {}, {}, {}, dict(a="3", b="4")]
  for record, said in zip(records[1:4], (":3: 3 cells, but the first line names 2 columns", ":4: 1 cells",
                                         ":6: not valid UTF-8"), strict=True):
    assert said in str(record.problem)
