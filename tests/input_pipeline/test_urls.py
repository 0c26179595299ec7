"""Files at URLs are read as the same files on a local disk, whatever happens while they are fetched."""

import gzip
import json
import os
import signal
import subprocess
import sys
import threading

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from input_pipeline import loader, remote, urls
from input_pipeline.files import find_files, hash_file
from input_pipeline.sources.sources import open_source
from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from tests import tiny
from tests.input_pipeline.http_store import serving
from trainer.config import source
from trainer.errors import ConfigError, DataError

ROWS = [[dict(text=f"file {f} row {r}", n=r) for r in range(40)] for f in range(3)]
CONTENT = bytes(range(256)) * 20  # 5,120 bytes: six ranges of 1,000


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch):
  monkeypatch.setattr(remote, "RANGE", 1000)
  monkeypatch.setattr(remote, "PAUSES", (0.0, 0.0))


def write(folder, kind):
  """ROWS as files of that type in a folder and its subfolder."""
  (folder / "b").mkdir(parents=True)
  for number, rows in enumerate(ROWS):
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = folder / ("b" if number == 2 else "") / f"{number}"
    if kind == "parquet":
      pq.write_table(pa.Table.from_pylist(rows), path.with_suffix(".parquet"))
    elif kind == "jsonl":
      path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(lines))
    else:
      path.with_suffix(".txt").write_bytes(lines)
  (folder / ".hidden.jsonl").write_text("{}")
  return folder


def upload(folder, where):
  fs = fsspec.filesystem("memory")
  for path in folder.rglob("*"):
    if path.is_file():
      fs.pipe_file(f"{where}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def fetched(url, tmp_path):
  return [(f.name, f.path.read_bytes()) for f in find_files(url, "mine", lambda n: True, "a file", str(tmp_path / "c"))]


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
@pytest.mark.parametrize("spec", ["", "/**/[0-2].*"])
def test_records_and_content_are_those_of_the_local_files(tmp_path, kind, spec):
  local, far = write(tmp_path / "local", kind), f"memory://{tmp_path.name}/far"
  upload(local, far)
  mine = open_source(source(type=kind, path=f"{local}{spec}", split="train"), "mine")
  theirs = open_source(source(type=kind, path=f"{far}{spec}", split="train", copies=str(tmp_path / "c")), "mine")
  assert [(r.name, r.fields) for r in theirs.records()] == [(r.name, r.fields) for r in mine.records()]
  assert theirs.fingerprint(hash_file) == mine.fingerprint(hash_file)


def test_over_http_a_folder_a_file_and_several_are_found_and_fetched_once(tmp_path, capsys):
  with serving({"/d/a.jsonl": b'{"text": "a"}\n', "/d/s/b.jsonl": b'{"text": "b"}\n', "/d/.c.jsonl": b"",
                "/d/s/.t/f.jsonl": b"", "/e": b"x"}) as store:
    both = [("a.jsonl", b'{"text": "a"}\n'), ("s/b.jsonl", b'{"text": "b"}\n')]
    assert fetched(f"{store.url}/d/", tmp_path) == both
    assert f"{store.url}/d/: fetching 2 of 2 files, 0.0 MB, of which 0.0 MB are there." in capsys.readouterr().err
    assert fetched(f"{store.url}/e?download=1, {store.url}/d/*.jsonl", tmp_path) == [("e", b"x"), both[0]]
    assert sorted(store.asked) == [("/d/a.jsonl", 0), ("/d/s/b.jsonl", 0), ("/e", 0)]
    store.files["/e"] = b"y"  # what changed since is fetched anew
    assert fetched(f"{store.url}/e", tmp_path) == [("e", b"y")]


def test_large_sources_say_how_to_begin_sooner(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(urls, "LARGE", 5000)
  with serving({"/f": CONTENT, "/g": CONTENT[:4999]}) as store:
    for name, says in (("g", False), ("f", True)):
      fetched(f"{store.url}/{name}", tmp_path)
      command = "--config.input.sources.mine.stream_files=1 --config.input.sources.mine.stream_bytes=8000000"
      assert (command in capsys.readouterr().err) == says


def test_batches_are_those_of_the_local_files(tmp_path):
  corpus = tiny.write_corpus(tmp_path / "corpus")
  upload(corpus, f"memory://{tmp_path.name}")
  near, far = tiny.config(corpus), tiny.config(f"memory://{tmp_path.name}")
  far.input.sources.main.copies = str(tmp_path / "c")
  made = [loader.make_train_data(c, BytesTokenizer(), learns="texts", workdir=tmp_path / name)
          for name, c in (("near", near), ("far", far))]
  assert made[0].fingerprint == made[1].fingerprint
  for name, rows in made[0].batch(5).items():
    np.testing.assert_array_equal(made[1].batch(5)[name], rows)


# ----------------------------------------------------------------------------------------------
# What may happen meanwhile.


def test_a_connection_that_drops_is_gone_on_with_at_its_place(tmp_path):
  with serving({"/f": CONTENT}) as store:
    broken = iter(["drop", None, "drop", 503])
    store.fault = lambda path, at: next(broken, None) if at in (1000, 3000) else None
    assert fetched(f"{store.url}/f", tmp_path) == [("f", CONTENT)]
  assert [at for _, at in store.asked] == [0, 1000, 1000, 2000, 3000, 3000, 3000, 4000, 5000]


def test_a_server_without_ranges_is_read_too(tmp_path):
  with serving({"/f": CONTENT}) as store:
    store.ranges = False
    assert fetched(f"{store.url}/f", tmp_path) == [("f", CONTENT)]


def test_a_packed_file_stays_packed_where_the_server_calls_that_its_encoding(tmp_path):
  """As Apache does by `AddEncoding`; of a file that is not packed the encoding is the server's own."""
  packed = gzip.compress(CONTENT)
  with serving({"/a.jsonl.gz": packed, "/b.jsonl": packed}) as store:
    store.encoding = "gzip"
    assert fetched(f"{store.url}/a.jsonl.gz, {store.url}/b.jsonl", tmp_path) == [
        ("a.jsonl.gz", packed), ("b.jsonl", CONTENT)]


@pytest.mark.parametrize("status, said, tries", [
    (404, r"'http://\S+/f' does not exist", 1), (403, "is denied", 1), (500, "failed 3 times in a row", 3)])
def test_what_cannot_be_had_is_told(tmp_path, status, said, tries):
  with serving({"/f": CONTENT}) as store:
    asked = []
    store.fault = lambda path, at: asked.append(at) or status
    with pytest.raises(DataError, match=said):
      fetched(f"{store.url}/f", tmp_path)
  assert len(asked) == 2 * tries  # HEAD and GET


def test_a_server_that_does_not_answer_is_no_empty_folder(tmp_path):
  with serving({"/d/f": CONTENT}) as store:
    url = store.url
  with pytest.raises(DataError, match="failed 3 times in a row .*Cannot connect"):
    fetched(f"{url}/d/", tmp_path)


@pytest.mark.parametrize("new", [CONTENT[::-1], CONTENT[:2500], None])
def test_a_file_that_changes_meanwhile_is_refused_by_name(tmp_path, new):
  with serving({"/f": CONTENT}) as store:
    def fault(path, at):
      if at == 2000:
        store.files.pop("/f") if new is None else store.files.update({"/f": new})

    store.fault = fault
    with pytest.raises(DataError, match=r"http://127\S+/f: changed while it was read"):
      fetched(f"{store.url}/f", tmp_path)
    store.fault = lambda path, at: None
    store.files["/f"] = new or b"back"
    assert fetched(f"{store.url}/f", tmp_path) == [("f", new or b"back")]


def test_what_a_killed_process_had_fetched_is_not_fetched_again(tmp_path):
  code = ("import sys\nfrom input_pipeline import remote, files\nremote.RANGE = 1000\n"
          "files.find_files(sys.argv[1], 'mine', lambda n: True, 'a file', sys.argv[2])")
  with serving({"/f": CONTENT}) as store:
    reached, go_on = threading.Event(), threading.Event()

    def fault(path, at):
      if at == 3000:
        reached.set()
        go_on.wait(60)

    store.fault = fault
    child = subprocess.Popen([sys.executable, "-c", code, f"{store.url}/f", str(tmp_path / "c")], cwd=tiny.ROOT)
    assert reached.wait(120)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    go_on.set()
    store.fault, store.asked[:] = lambda path, at: None, []
    assert fetched(f"{store.url}/f", tmp_path) == [("f", CONTENT)]
    assert {at for _, at in store.asked} == {3000, 4000, 5000}


# ----------------------------------------------------------------------------------------------
# What is refused.


@pytest.mark.parametrize("path", [
    "https://me:pass1234@host/a.jsonl", "https://host/a.jsonl?X-Amz-Signature=pass1234", "gs://b/a.jsonl?x=1&sig=pass1234",
    "https://host/a.jsonl?access_token=pass1234"])
def test_credentials_in_an_address_are_refused_and_not_repeated(path):
  with pytest.raises(ConfigError, match=r"input.sources.mine.path: .* found in the environment") as error:
    open_source(source(type="jsonl", path=path), "mine")
  assert "pass1234" not in str(error.value)


def test_nothing_secret_of_an_address_or_an_error_is_shown(tmp_path, caplog, capsys):
  assert remote.shown("of https://a:b@h/x?sig=1: 'https://h/y?k=2' no") == "of https://h/x?… 'https://h/y?…' no"
  with serving({"/f": CONTENT}) as store:
    store.fault = lambda path, at: 500 if at == 1000 else None
    with pytest.raises(DataError) as error, caplog.at_level("INFO"):
      fetched(f"{store.url}/f?download=pass1234", tmp_path)
  assert "pass1234" not in str(error.value) + caplog.text + capsys.readouterr().err and "trying again" in caplog.text


def test_copies_belong_to_urls():
  with pytest.raises(ConfigError, match="copies is 'x', but input.sources.mine.path names no URL"):
    open_source(source(type="jsonl", path="data.jsonl", copies="x"), "mine")


@pytest.mark.parametrize("url, module, said", [
    ("s3://b/a.jsonl", "s3fs", "needs `pip install fsspec s3fs`"),
    ("gs://b/a.jsonl", "gcsfs", "needs `pip install fsspec gcsfs`"),
    ("nothing://b/a.jsonl", "s3fs", "Protocols are those of fsspec")])
def test_a_missing_package_is_named(monkeypatch, tmp_path, url, module, said):
  monkeypatch.setitem(sys.modules, module, None)
  with pytest.raises(DataError, match=said):
    fetched(url, tmp_path)


def test_a_folder_without_such_files_and_one_of_save_to_disk_are_refused(tmp_path):
  fs = fsspec.filesystem("memory")
  fs.pipe_file(f"memory://{tmp_path.name}/d/data.arrow", b"")
  fs.pipe_file(f"memory://{tmp_path.name}/d/state.json", b"{}")
  fs.pipe_file(f"memory://{tmp_path.name}/e/a.csv", b"")
  with pytest.raises(DataError, match="save_to_disk wrote, which is read from a local disk alone"):
    fetched(f"memory://{tmp_path.name}/d", tmp_path)
  with pytest.raises(DataError, match="has only a.csv; expected a .jsonl"):
    open_source(source(type="jsonl", path=f"memory://{tmp_path.name}/e"), "mine").fingerprint()


@pytest.mark.parametrize("given, folder", [(None, ".cache/weft/data"), ("~/copies", "copies")])
def test_copies_are_in_the_home_folder_where_that_is_said(given, folder, tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  file = remote.Remote("a.txt", "bucket/a.txt", "mem://bucket/a.txt", 3, "v")
  made = []
  monkeypatch.setattr(urls, "_listed", lambda *_: [file])
  monkeypatch.setattr(urls, "_copy", lambda folder, file: (made.append(folder), tmp_path / "there")[1])
  (tmp_path / "there").write_text("abc")
  urls.fetch("memory://bucket/a.txt", "input.sources.a.path", lambda name: True, "files", given)
  assert made == [tmp_path / folder]
