"""Streams in parts smaller than a file: rows are those of the local files, however they come, and after a kill."""

import csv
import gzip
import io
import json
import shutil
import signal
import subprocess
import sys
import threading
import time

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ml_collections import ConfigDict

from input_pipeline import loader, pieces, remote
from input_pipeline.parts import Parts
from input_pipeline.sources.sources import open_source
from input_pipeline.steps import ROWS, Past
from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from tests import tiny
from tests.input_pipeline.http_store import serving
from trainer.config import source
from trainer.errors import ConfigError, DataError

DOCUMENTS = [[dict(text=f"file {f}\nrow {r} " + "x" * (r * 7 % 30)) for r in range(60 - 25 * f)] for f in range(2)]
SIZE = 700


def content_of(kind: str, rows: list[dict]) -> bytes:
  lines, out = "".join(json.dumps(row) + "\n" for row in rows).encode(), io.BytesIO()
  if kind == "csv":
    csv.writer(text := io.StringIO()).writerows([["text"], *([row["text"]] for row in rows)])
    return text.getvalue().encode()
  if kind == "parquet":
    pq.write_table(pa.Table.from_pylist(rows), out, row_group_size=10)
    return out.getvalue()
  return gzip.compress(lines) if kind.endswith(".gz") else lines


def files(kind: str = "jsonl") -> dict[str, bytes]:
  return {f"/d/{f}.{kind}": content_of(kind, rows) for f, rows in enumerate(DOCUMENTS)}


def config(path, kind="jsonl", copies=None, **changed):
  c = tiny.config(path)
  options = dict(type=kind.partition(".")[0], stream_files=2, stream_bytes=SIZE, copies=copies) | changed
  c.input.sources.main = source(path=str(path), **options)
  c.input.packing, c.seq_len, c.batch_size, c.evals = "none", 64, 3, ConfigDict()
  return c


def data_of(c, workdir, past=None):
  return loader.make_train_data(c, BytesTokenizer(), learns="texts", workdir=workdir, past=past)


def texts_of(data, steps) -> list[str]:
  return [bytes(t for t in row[ids > 0].tolist() if t < 256).decode() for batch in map(data.batch, steps)
          for row, ids in zip(batch["tokens"], batch["segment_ids"], strict=True)]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  monkeypatch.setattr(remote, "PAUSES", (0.0, 0.0))
  monkeypatch.setattr(pieces, "MORE", 100)


@pytest.fixture
def folder(tmp_path):
  (tmp_path / "d").mkdir()
  for name, content in files().items():
    (tmp_path / name[1:]).write_bytes(content)
  return tmp_path / "d"


@pytest.fixture
def store():
  with serving(files()) as store:
    yield store


def test_each_epoch_has_every_document_once_side_by_side_from_the_beginning_of_the_files(folder, tmp_path):
  c = config(folder)
  c.batch_size = 19
  data, wanted = data_of(c, tmp_path / "w"), sorted(row["text"] for rows in DOCUMENTS for row in rows)
  assert len(wanted) == 5 * 19
  epochs = [texts_of(data, range(5 * e, 5 * e + 5)) for e in range(3)]
  assert [sorted(epoch) for epoch in epochs] == [wanted] * 3
  first = [int(text.split()[3]) for text in epochs[0]]
  assert max(first[:10]) < 20 < 40 < min(first[-10:]) and first[:19] != sorted(first[:19])
  assert {text[:6] for text in epochs[0][:19]} == {"file 0", "file 1"}
  assert epochs[1] != epochs[2] and [int(text.split()[3]) for text in epochs[1]][:10] != first[:10]
  seen = [data.epoch(step) for step in range(16)]
  assert seen == sorted(seen) and seen[0] == 0 and seen[5::5] == [pytest.approx(e, abs=0.01) for e in (1, 2, 3)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", *(
    pytest.param(kind, marks=pytest.mark.slow) for kind in ("jsonl.gz", "csv"))])
def test_rows_are_those_of_the_local_files_by_whatever_way_they_come(tmp_path, kind):
  fs, datas = fsspec.filesystem("memory"), {}
  with serving(files(kind)) as ranges, serving(files(kind)) as whole:
    whole.ranges = False
    for name, content in files(kind).items():
      (path := tmp_path / name[1:]).parent.mkdir(exist_ok=True)
      path.write_bytes(content)
      fs.pipe_file(f"memory://{tmp_path.name}{name}", content)
    for way, path in (("local", tmp_path / "d"), ("ranges", f"{ranges.url}/d/"), ("whole", f"{whole.url}/d/"),
                      ("memory", f"memory://{tmp_path.name}/d")):
      c = config(path, kind, None if way == "local" else str(tmp_path / f"copies {way}"))
      datas[way] = data_of(c, tmp_path / way)
    for step in range(40):  # of an epoch, and of the next
      wanted = datas["local"].batch(step)
      for way, data in datas.items():
        for name, rows in data.batch(step).items():
          np.testing.assert_array_equal(rows, wanted[name], f"{way}, step {step}, {name}")
  assert len({data.fingerprint for data in datas.values()}) == 1
  assert len({data.epoch(20) for data in datas.values()}) == 1


CHILD = """
import sys, time
from tests.input_pipeline.test_parts import config, data_of, texts_of
url, copies, workdir, out = sys.argv[1:]
begin = len(open(out).readlines())
data = data_of(config(url, copies=copies), workdir)
with open(out, "a") as file:
  for step in range(begin, 60):
    print(repr(texts_of(data, [step])), file=file, flush=True)
    time.sleep(0.02)
"""


@pytest.mark.parametrize("ranges, kills", [
    (True, (12,)), pytest.param(False, (12, 40), marks=pytest.mark.slow)])  # in the first epoch, and in the second
def test_a_process_that_is_killed_reads_the_rows_of_one_that_is_not(folder, tmp_path, store, ranges, kills):
  (out := tmp_path / "out").touch()
  store.ranges = ranges
  command = [sys.executable, "-c", CHILD, f"{store.url}/d/", str(tmp_path / "c"), str(tmp_path / "w"), str(out)]
  for rows in kills:
    child = subprocess.Popen(command, cwd=tiny.ROOT)
    while len(out.read_text().splitlines()) < rows and child.poll() is None:
      time.sleep(0.01)
    child.kill()
    assert child.wait(60) == -signal.SIGKILL
    out.write_text(out.read_text().rpartition("\n")[0] + "\n")  # without a line that was not written to its end
    shutil.rmtree(tmp_path / "w" / "cache")
  subprocess.run(command, cwd=tiny.ROOT, check=True)
  straight = data_of(config(folder), tmp_path / "straight")
  assert out.read_text().splitlines() == [repr(texts_of(straight, [step])) for step in range(60)]


def ahead(data):
  """Waits for the part that is made meanwhile."""
  for future in list(data._packed[0]._made.values()):
    future.result()


def run_to(c, workdir, steps):
  """(data, what a run that goes on after so many steps is told)."""
  data = data_of(c, workdir)
  for step in range(steps):
    data.batch(step)
  ahead(data)
  data._close()
  return Past(steps, steps, ROWS, tuple(data.taken.pieces), data.tokens_seen(steps))


def test_the_first_step_waits_for_a_piece_and_a_run_that_goes_on_for_that_it_is_in(tmp_path, store):
  c = config(f"{store.url}/d/", copies=str(tmp_path / "c"), stream_bytes=200)
  other = data_of(c, tmp_path / "other")
  other.batch(0)
  ahead(other)
  assert store.sent <= 4 * 301 + 2 < sum(map(len, store.files.values())) / 3
  past = run_to(c, tmp_path / "w", 20)
  shutil.rmtree(tmp_path / "c")
  store.sent = 0
  again = data_of(c, tmp_path / "w", past)
  again.batch(20)
  ahead(again)
  assert store.sent <= 2  # the token cache is there; whether the server knows ranges was asked
  again._close()
  shutil.rmtree(tmp_path / "w" / "cache")
  again = data_of(c, tmp_path / "w", past)
  rows = again.batch(20)
  ahead(again)
  assert 0 < store.sent <= 4 * 301 + 4  # that part, and the next
  np.testing.assert_array_equal(rows["tokens"], data_of(c, tmp_path / "straight").batch(20)["tokens"])


def test_a_file_that_changed_while_nobody_looked_is_refused_by_name(folder, tmp_path):
  c = config(folder)
  past = run_to(c, tmp_path / "w", 12)
  path = folder / "0.jsonl"
  content = path.read_bytes()
  path.write_bytes(content.replace(b"row 3 x", b"row 3 y"))
  with pytest.raises(DataError, match=r"0.jsonl.*piece 0 \(from 0\) of 700 bytes, is not what this run has read of it"):
    data_of(c, tmp_path / "w", past)
  path.write_bytes(content)  # another time of change, the same content
  for _ in range(2):
    np.testing.assert_array_equal(data_of(c, tmp_path / "w", past).batch(12)["tokens"],
                                  data_of(c, tmp_path / "straight").batch(12)["tokens"])


def test_another_version_of_the_same_content_is_read_again_and_taken(tmp_path, store, caplog):
  c = config(f"{store.url}/d/", copies=str(tmp_path / "c"))
  past = run_to(c, tmp_path / "w", 12)
  store.tag = "another"
  wanted = data_of(c, tmp_path / "straight").batch(12)
  np.testing.assert_array_equal(data_of(c, tmp_path / "w", past).batch(12)["tokens"], wanted["tokens"])
  assert "was of another version of the file when it was read; it is read again and compared" in caplog.text
  store.tag, store.files["/d/1.jsonl"] = "third", store.files["/d/1.jsonl"].replace(b"row 1", b"row 2")
  with pytest.raises(DataError, match=r"http://127\S+/d/1.jsonl.*is not what this run has read of it before"):
    data_of(c, tmp_path / "w", past)


def test_a_bpe_is_trained_on_the_first_part(folder):
  c = config(folder)
  opened, texts = open_source(c.input.sources.main, "main", streams=True), list(loader.train_texts(c, "texts")())
  parts = Parts(opened, c.input.sources.main, c.seed)
  assert parts.named((0, 2)).endswith(".jsonl, piece 2 (from 0) of 700 bytes,")
  with parts.open((0, 0), threading.Event()) as (part, last):
    assert not last and texts == [record.fields["text"] for record in part.records()] and 5 < len(texts) < 40


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz"])
def test_a_bad_row_is_told_by_its_file_its_byte_and_its_line_from_there(tmp_path, kind):
  lines = [json.dumps(row) + "\n" for row in DOCUMENTS[0]]
  lines[30] = "{bad\n"
  packed = gzip.compress("".join(lines).encode()) if kind.endswith("gz") else "".join(lines).encode()
  (path := tmp_path / f"0.{kind}").write_bytes(packed)
  begins = np.cumsum([0, *map(len, lines)])
  piece = int(begins[30]) // SIZE
  first = next(line for line, begin in enumerate(begins) if begin >= piece * SIZE)
  with pytest.raises(DataError) as error:
    data_of(config(path, kind), tmp_path / "w").batch(19)
  assert str(error.value).startswith(f"{path}[{begins[first]}:]:{31 - first}: not valid JSON")


@pytest.mark.parametrize("changed, said", [
    (dict(stream_files=0), "stream_bytes is 700, which cuts the files of a stream, but this is none"),
    (dict(stream_bytes=-1), "stream_bytes is -1; allowed: 0, which reads files whole"),
    (dict(rows_key="rows"), r"not cut into pieces. Those of types 'jsonl' \(without rows_key\)"),
    (dict(type="text"), r"this source's files \(type 'text'\) are not cut"),
    (dict(type="arithmetic"), "are not cut into pieces")])
def test_what_cannot_be_cut_is_refused(folder, tmp_path, changed, said):
  with pytest.raises(ConfigError, match=said):
    data_of(config(folder, **changed), tmp_path)


def test_a_list_of_objects_is_refused(tmp_path):
  (path := tmp_path / "0.json").write_text(json.dumps(DOCUMENTS[0], indent=1))
  with pytest.raises(DataError, match=r"0.json: is a list of objects, which is not cut into pieces"):
    data_of(config(path), tmp_path / "w").batch(0)
