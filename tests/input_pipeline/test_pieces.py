"""Files in pieces: every row once, in its order, where a rule says, by whatever way the file comes."""

import csv
import gzip
import io
import json
import threading

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from input_pipeline import pieces, remote, urls
from input_pipeline.pieces import Cutter
from input_pipeline.sources.sources import open_source
from tests.input_pipeline.http_store import serving
from trainer.config import source
from trainer.errors import DataError

OPTIONS = {"text": dict(documents="line")}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  monkeypatch.setattr(remote, "PAUSES", (0.0, 0.0))
  monkeypatch.setattr(pieces, "MORE", 100)


def opened(path, kind, **options):
  options = OPTIONS.get(kind, {}) | options
  return open_source(source(type=kind, path=str(path), stream_files=1, stream_bytes=1, **options), "mine", streams=True)


def pieces_of(path, kind, size, folder, **options):
  """(content, piece) of each."""
  of, found = opened(path, kind, **options), []
  cutter, stop = Cutter(of.cuts, size), threading.Event()
  while not found or not found[-1][1].last:
    (piece,) = cutter.pieces(of.listed(), len(found), folder, stop)
    found.append((piece.path.read_bytes(), piece))
  assert cutter.pieces(of.listed(), len(found), folder, stop) == []
  return found


def lines_of(rng, ends=b"\n"):
  lines = [bytes(rng.choice(list(b"ab \r"), n)) + ends for n in rng.integers(0, 30, 40)]
  lines[17] = b"x" * 700 + ends
  return lines


@pytest.mark.parametrize("size", [60, 500, 5000])
@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_a_line_is_of_the_piece_in_whose_bytes_it_begins(tmp_path, packed, size):
  rng = np.random.default_rng(0)
  for case, lines in enumerate([lines_of(rng), lines_of(rng, b"\r\n"), [*lines_of(rng), b"no end"], [b"\n"] * 9,
                                [b"one"], [b"\xef\xbb\xbfa\n", b"b\n"], []]):
    begins = np.cumsum([0, *map(len, lines)])[:-1]
    wanted = [b"".join(line for line, begin in zip(lines, begins, strict=True) if begin // size == k)
              for k in range(int(begins[-1]) // size + 1 if lines else 1)]
    path = tmp_path / f"{case}.txt{packed}"
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[packed]
    path.write_bytes(pack(b"".join(lines)))
    assert [content for content, _ in pieces_of(path, "text", size, tmp_path / "p")] == wanted


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_no_paragraph_is_cut(tmp_path, packed):
  rng = np.random.default_rng(1)
  text = b"".join(b"word\n" * n + rng.choice([b"\n", b" \t\n", b"\r\n\n\n"]) for n in rng.integers(1, 9, 60)) + b"end"
  (path := tmp_path / f"a.txt{packed}").write_bytes(gzip.compress(text) if packed else text)
  whole = [r.fields["text"] for r in opened(path, "text", documents="paragraph").records()]
  for size in (37, 200):
    found = pieces_of(path, "text", size, tmp_path / "p", documents="paragraph")
    assert b"".join(content for content, _ in found) == text and len(found) > 5
    begins = np.cumsum([0, *(len(content) for content, _ in found)])[:-1]
    assert all(k * size <= begin for k, begin in enumerate(begins))
    each = []
    for k, (content, _) in enumerate(found):
      if content.strip():
        (tmp_path / f"{k}.txt").write_bytes(content)
        each += [r.fields["text"] for r in opened(tmp_path / f"{k}.txt", "text", documents="paragraph").records()]
    assert each == whole


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz"])
def test_rows_of_csv_are_cut_outside_quotation_marks(tmp_path, name):
  rng = np.random.default_rng(2)
  delimiter, out = "\t" if "tsv" in name else ",", io.StringIO()
  rows = [["text", "n"], *(['a "b"\n,' + "c\n" * n, str(i)] for i, n in enumerate(rng.integers(0, 40, 50)))]
  csv.writer(out, delimiter=delimiter).writerows(rows)
  content = out.getvalue().encode()
  (path := tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
  found = pieces_of(path, "csv", 300, tmp_path / "p")
  each = [list(csv.reader(io.StringIO(c.decode(), newline=""), delimiter=delimiter)) for c, _ in found]
  assert all(rows_of[0] == rows[0] for rows_of in each) and len(found) > 5
  assert [row for rows_of in each for row in rows_of[1:]] == rows[1:]


def test_a_quotation_mark_within_a_cell_of_csv_is_refused(tmp_path):
  (path := tmp_path / "a.csv").write_bytes(b'text\none\n"a" b\nc\n')
  with pytest.raises(DataError, match="a.csv.* not valid CSV .*A quotation mark"):
    pieces_of(path, "csv", 300, tmp_path / "p")


def test_a_piece_of_a_parquet_file_is_row_groups_and_only_they_are_asked_for(tmp_path):
  rng = np.random.default_rng(3)
  table = pa.table(dict(text=[bytes(rng.integers(97, 123, 500)).decode() for _ in range(2000)], n=range(2000)))
  pq.write_table(table, path := tmp_path / "a.parquet", row_group_size=50, write_statistics=False)
  whole, rows = [r.fields for r in opened(path, "parquet", texts=False).records()], []
  with serving({"/a.parquet": path.read_bytes()}) as store:
    far = opened(f"{store.url}/a.parquet", "parquet", copies=str(tmp_path / "c"))
    size = pq.read_metadata(path).row_group(0).total_byte_size  # of each of 40, unpacked
    cutter, stop = Cutter(far.cuts, size * 3 // 2), threading.Event()
    for k in range(21):
      found = cutter.pieces(far.listed(), k, tmp_path / "p", stop)
      for piece in found:
        (of := tmp_path / f"{k}.parquet.row_groups").write_bytes(piece.path.read_bytes())
        rows += [r.fields for r in opened(of, "parquet").records()]
      if not k:
        assert store.sent < 0.1 * path.stat().st_size  # the footer is in its last 64 KiB
    assert found == [] and rows == whole and len(rows) == 2000
    assert store.sent < 1.1 * path.stat().st_size


CONTENT = "".join(json.dumps(dict(text=f"{i} " * (i % 20 + 1))) + "\n" for i in range(900)).encode()


def far(store, name, tmp_path, kind="jsonl"):
  return opened(f"{store.url}/{name}", kind, copies=str(tmp_path / "c"))


@pytest.mark.parametrize("way", ["ranges", "whole", "no size", "packed", "memory"])
def test_pieces_are_those_of_the_local_file(tmp_path, way):
  packed = way == "packed"
  name, content = ("a.jsonl.gz", gzip.compress(CONTENT)) if packed else ("last.jsonl", CONTENT)
  (near := tmp_path / name).write_bytes(content)
  wanted = [c for c, _ in pieces_of(near, "jsonl", 3000, tmp_path / "near")]
  fsspec.filesystem("memory").pipe_file(f"memory://{tmp_path.name}/{name}", content)
  with serving({f"/{name}": content}) as store:
    store.ranges, store.sizes = way not in ("whole", "no size"), way != "no size"
    url = f"memory://{tmp_path.name}/{name}" if way == "memory" else f"{store.url}/{name}"
    found = pieces_of(url, "jsonl", 3000, tmp_path / "far", copies=str(tmp_path / "c"))
    assert [c for c, _ in found] == wanted and b"".join(wanted) == CONTENT
    if way == "ranges":
      assert store.sent < 2 * len(content)  # a range for a piece, and a little to find its end
      sent = store.sent
      assert [c for c, _ in pieces_of(url, "jsonl", 3000, tmp_path / "far", copies=str(tmp_path / "c"))] == wanted
      assert store.sent <= sent + 1  # whether it knows ranges is asked; pieces are kept
      found[3][1].path.write_bytes(b"")  # as after a loss of power
      assert [c for c, _ in pieces_of(url, "jsonl", 3000, tmp_path / "far", copies=str(tmp_path / "c"))] == wanted


@pytest.fixture
def slow():
  """A server that stops after 50,000 bytes of an answer until it is told to go on, without ranges; (store, go on)."""
  rows = [bytes(b) for b in np.random.default_rng(0).integers(97, 123, (200, 500), np.uint8)]
  content, go_on = b"".join(b'{"text": "%s"}\n' % row for row in rows), threading.Event()
  with serving({"/a.jsonl": content, "/a.jsonl.gz": gzip.compress(content)}) as store:
    store.ranges, store.gate = False, lambda path, sent: (
        sent >= 50_000 and not store.ranges and (go_on.wait(30) or go_on.set()))
    yield store, go_on
    go_on.set()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_the_first_piece_waits_for_no_more_of_the_file(tmp_path, name, slow, caplog):
  store, go_on = slow
  of, stop = far(store, name, tmp_path), threading.Event()
  cutter = Cutter(of.cuts, 20_000)
  (first,) = cutter.pieces(of.listed(), 0, tmp_path / "p", stop)
  assert 20_000 <= len(first.path.read_bytes()) <= 20_600 and not first.last
  assert urls.unfinished(of.listed()[0].path).stat().st_size <= 50_000 < len(store.files[f"/{name}"])
  assert "sends whole files only (no Range requests): they are read from their beginning" in caplog.text
  threading.Timer(0.2, stop.set).start()
  with pytest.raises(DataError, match="Stopped"):
    cutter.pieces(of.listed(), 4, tmp_path / "p", stop)
  go_on.set()
  (later,) = cutter.pieces(of.listed(), 4, tmp_path / "p", threading.Event())
  begin = int(later.shown.partition("[")[2].partition(":")[0])
  assert 80_000 <= begin < 80_600 and store.files["/a.jsonl"].startswith(later.path.read_bytes(), begin)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "ranges"])
def test_a_file_that_changes_between_pieces_is_refused_by_name(tmp_path, name, slow):
  store, _ = slow
  store.ranges = name == "ranges"
  of, stop = far(store, name.replace("ranges", "a.jsonl"), tmp_path), threading.Event()
  cutter, files = Cutter(of.cuts, 20_000), of.listed()
  cutter.pieces(files, 0, tmp_path / "p", stop)
  store.files = {path: content[::-1] for path, content in store.files.items()}
  with pytest.raises(DataError, match=r"http://127\S+/a.jsonl\S*: changed while it was read"):
    cutter.pieces(files, 1, tmp_path / "p", stop)


def test_a_parquet_file_that_changes_while_it_is_streamed_gives_no_piece(tmp_path):
  rng = np.random.default_rng(4)
  contents = []
  for _ in range(2):  # of one size
    table = pa.table(dict(text=[bytes(rng.integers(97, 123, 500)).decode() for _ in range(2000)]))
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=50, compression=None, use_dictionary=False,
                   write_statistics=False)
    contents.append((tmp_path / "a.parquet").read_bytes())
  assert len(contents[0]) == len(contents[1])
  with serving({"/a.parquet": contents[0]}) as store:
    of, stop = far(store, "a.parquet", tmp_path, "parquet"), threading.Event()
    cutter, files = Cutter(of.cuts, 40_000), of.listed()
    cutter.pieces(files, 0, tmp_path / "p", stop)
    store.files["/a.parquet"] = contents[1]
    with pytest.raises(DataError, match=r"http://127\S+/a.parquet\S*: changed while it was read"):
      cutter.pieces(files, 10, tmp_path / "p", stop)


def test_bytes_that_cannot_be_had_are_named_and_asked_for_again(tmp_path):
  with serving({"/a.jsonl": CONTENT}) as store:
    of, broken = far(store, "a.jsonl", tmp_path), iter([503, "drop", None, 503, 503, 503])
    store.fault = lambda path, at: next(broken, None) if at and at > 5000 else None
    cutter, stop = Cutter(of.cuts, 3000), threading.Event()
    cutter.pieces(of.listed(), 1, tmp_path / "p", stop)
    assert cutter.pieces(of.listed(), 2, tmp_path / "p", stop)[0].path.read_bytes() in CONTENT  # the third try
    with pytest.raises(DataError, match=r"/a.jsonl, bytes 8,999 to 12,100: reading it failed 3 times in a row"):
      cutter.pieces(of.listed(), 3, tmp_path / "p", stop)


def test_an_answer_that_breaks_off_is_gone_on_with_where_there_are_no_ranges(tmp_path):
  with serving({"/a.jsonl": CONTENT}) as store:
    store.ranges, broken = False, iter([None, "drop", "drop"])
    store.fault = lambda path, at: next(broken, None) if at is not None else None
    found = pieces_of(f"{store.url}/a.jsonl", "jsonl", 3000, tmp_path / "p", copies=str(tmp_path / "c"))
    # Whether it knows ranges, and three times all of it.
    assert b"".join(c for c, _ in found) == CONTENT and len(store.asked) == 4
