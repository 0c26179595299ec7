"""Each source type: what records come out, and which file, line or row an error names."""

import collections
import gzip
import io
import json
import re
import subprocess
import sys
import types

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from array_record.python.array_record_module import ArrayRecordWriter

from input_pipeline.examples.registry import open_examples
from input_pipeline.files import Tally
from input_pipeline.sources import made, python, readers
from input_pipeline.sources.readers import _from_tfds
from input_pipeline.sources.sources import open_source
from tests.tiny import ROOT
from trainer.config import defaults, source
from trainer.errors import ConfigError, DataError


def records(**cfg):
  return list(open_source(source(**cfg), "mine", texts=False).records())


def read(**cfg):
  """(name, text) of what is trained on as text."""
  mine, encoder = open_examples(defaults(), None, source(**cfg), "mine", learns="texts")
  return [(r.name, text) for r in mine.records() for text in encoder.texts(r)]


def fails(said, error=DataError, **cfg):
  with pytest.raises(error) as raised:
    read(**cfg)
  assert re.search(said, str(raised.value)), f"{said!r} not in: {raised.value}"


def test_text_as_files_lines_and_paragraphs(tmp_path):
  (tmp_path / "a.txt").write_bytes("one\r\n\r\n\u00a0 \ntwo\nthree\n\n\n\nfour".encode())
  path = str(tmp_path)
  assert read(path=path) == [("a.txt", "one\r\n\r\n\u00a0 \ntwo\nthree\n\n\n\nfour")]
  assert read(path=path, documents="line") == [
      ("a.txt:1", "one"), ("a.txt:3", "\u00a0 "), ("a.txt:4", "two"), ("a.txt:5", "three"), ("a.txt:9", "four")]
  assert read(path=path, documents="paragraph") == [("a.txt:1", "one"), ("a.txt:4", "two\nthree"), ("a.txt:9", "four")]
  fails("'sentence'; allowed: 'file', 'line', 'paragraph'", ConfigError, path=path, documents="sentence")
  fails("mine.path is not set", ConfigError)


def test_text_drops_a_byte_order_mark_and_reads_compressed_files(tmp_path):
  (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfx")
  (tmp_path / "b.txt.gz").write_bytes(gzip.compress("é".encode()))
  assert read(path=str(tmp_path)) == [("a.txt", "x"), ("b.txt.gz", "é")]


@pytest.mark.parametrize("documents, where", [("file", "a.txt"), ("line", "a.txt:3"), ("paragraph", "a.txt:3")])
def test_text_that_is_not_utf8(tmp_path, documents, where):
  (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfgood\n\nbad \xff\n")
  fails(rf"{where}: not valid UTF-8 at byte offset 13 \(0xff", path=str(tmp_path), documents=documents)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_jsonl(tmp_path, suffix):
  rows = [{"text": "one\ntwo", "id": 1}, {"id": 2, "text": "drei é"}]
  data = ("\n".join(["\ufeff" + json.dumps(rows[0]), "  ", json.dumps(rows[1])])).encode()
  pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix]
  (tmp_path / f"x.jsonl{suffix}").write_bytes(pack(data))
  assert read(type="jsonl", path=str(tmp_path)) == [
      (f"x.jsonl{suffix}:1", "one\ntwo"), (f"x.jsonl{suffix}:3", "drei é")]


@pytest.mark.parametrize("line, said", [
    ('{"text": "x"', r"x.jsonl:3: not valid JSON \(Expecting ',' delimiter at column 13\)"),
    ('["x"]', r"x.jsonl:3: expected a JSON object, found list"),
    ('{"body": "x", "id": 2}', r"x.jsonl:3: no key 'text'; found 'body', 'id'. Set input.sources.mine.text_key"),
    ('{"text": 7}', r"x.jsonl:3: 'text' must be a string, found int"),
    ('{"text": null}', r"x.jsonl:3: 'text' must be a string, found null. Set .*, or filter such rows out"),
    ("[" * 100_000, r"x.jsonl:3: not valid JSON \(nested too deeply\)"),
])
def test_bad_jsonl_names_file_and_line(tmp_path, line, said):
  (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n\n' + line + "\n")
  fails(said, type="jsonl", path=str(tmp_path / "x.jsonl"))


def test_lone_surrogate_is_named(tmp_path):
  (tmp_path / "x.jsonl").write_text('{"text": "a\\ud800"}\n')
  fails(r"x.jsonl:1: character 1 is the lone surrogate U\+D800", type="jsonl", path=str(tmp_path), split="train")


def write_parquet(path, **columns):
  pq.write_table(pa.table(columns), path, row_group_size=2)


def test_parquet(tmp_path):
  write_parquet(tmp_path / "b.parquet", body=["c", "d é", "e"], other=[1, 2, 3])
  write_parquet(tmp_path / "a.parquet", body=pa.array(["a"], pa.large_string()))
  assert read(type="parquet", path=str(tmp_path), text_key="body") == [
      ("a.parquet[0]", "a"), ("b.parquet[0]", "c"), ("b.parquet[1]", "d é"), ("b.parquet[2]", "e")]


def test_bad_parquet(tmp_path):
  path = str(tmp_path / "a.parquet")
  write_parquet(path, body=["a", "b", None], id=[1, 2, 3])
  here = dict(type="parquet", path=path)
  fails(r"a.parquet: row 0 \(from 0\): no key 'text'; found 'body', 'id'. Set input.sources.mine.text_key", **here)
  fails(r"a.parquet: row 2 \(from 0\): 'body' must be a string, found null. Set .* filter", **here, text_key="body")
  fails(r"a.parquet: row 0 \(from 0\): 'id' must be a string, found int. Set .*text_key", **here, text_key="id")
  (tmp_path / "a.parquet").write_bytes(b"PAR1 but no more")
  fails(r"a.parquet: not a readable Parquet file", type="parquet", path=path)


def write_records(path, records):
  writer = ArrayRecordWriter(str(path), "group_size:1")
  for record in records:
    writer.write(record)
  writer.close()


def test_arrayrecord_of_text_and_of_json(tmp_path):
  write_records(tmp_path / "a.arrayrecord", ["x é".encode(), b"{not json"])
  assert read(type="arrayrecord", path=str(tmp_path)) == [
      ("a.arrayrecord[0]", "x é"), ("a.arrayrecord[1]", "{not json")]
  records = [json.dumps({"text": t}).encode() for t in ("one", "two")]
  write_records(tmp_path / "a.arrayrecord", records)
  assert [t for _, t in read(type="arrayrecord", path=str(tmp_path))] == ["one", "two"]
  assert [t for _, t in read(type="arrayrecord", path=str(tmp_path), text_key="")] == [r.decode() for r in records]


def test_many_arrayrecords_come_in_order(tmp_path):
  write_records(tmp_path / "a.arrayrecord", [b"%d" % i for i in range(600)])
  assert [t for _, t in read(type="arrayrecord", path=str(tmp_path))] == [str(i) for i in range(600)]


def test_bad_arrayrecord(tmp_path):
  path = tmp_path / "a.arrayrecord"
  here = dict(type="arrayrecord", path=str(path))
  write_records(path, [b'{"body": 1}'])
  fails(r"a.arrayrecord: record 0 \(from 0\): no key 'text'; found 'body'. Set .*text_key \(to '' to train on", **here)
  write_records(path, [b'{"text": "x"}', b"plain"])
  fails(r"record 1 \(from 0\): the first record is a JSON object, this one is not JSON", **here)
  write_records(path, [b"\xff"])
  fails(r"record 0 \(from 0\): not valid UTF-8 at byte 0", **here)
  path.write_bytes(b"no records")
  fails("not a readable ArrayRecord file", **here)


PREPARE = """
import sys
import numpy as np
import PIL.Image
import tensorflow_datasets as tfds

class Tiny(tfds.core.GeneratorBasedBuilder):
  VERSION = tfds.core.Version("1.0.0")

  def _info(self):
    text = tfds.features.Text()
    features = tfds.features.FeaturesDict({
        "text": text, "id": tfds.features.Scalar(np.int64), "raw": tfds.features.Tensor(shape=(), dtype=np.object_),
        "messages": tfds.features.Sequence({"role": text, "content": text}),
        "ids": tfds.features.Sequence(np.int64), "scores": tfds.features.Tensor(shape=(2,), dtype=np.float32)})
    return tfds.core.DatasetInfo(builder=self, features=features)

  def _split_generators(self, manager):
    return {"train": self._generate_examples(0, 6), "test": self._generate_examples(6, 8)}

  def _generate_examples(self, first, last):
    for i in range(first, last):
      turns = [{"role": "user", "content": f"é{k}"} for k in range(i)]
      yield i, {"text": f"tiny é {i}", "id": i, "raw": b"\\xff", "messages": turns, "ids": list(range(i)),
                "scores": [i, 0.5]}

Tiny(data_dir=sys.argv[1], file_format="array_record").download_and_prepare()
assert "tensorflow" not in sys.modules
"""


@pytest.fixture(scope="module")
def tfds_dir(tmp_path_factory):
  """A dataset that TFDS writes itself, without TensorFlow."""
  folder = tmp_path_factory.mktemp("tfds")
  (folder / "prepare.py").write_text(PREPARE)
  subprocess.run([sys.executable, folder / "prepare.py", folder], check=True, capture_output=True, timeout=120)
  return str(folder)


def test_tfds(tfds_dir):
  cfg = dict(type="tfds", dataset="tiny", path=tfds_dir)
  documents = read(**cfg)
  assert sorted(t for _, t in documents) == [f"tiny é {i}" for i in range(6)]
  assert documents == read(**cfg)
  assert {t for _, t in read(**cfg, dataset_split="test")} == {"tiny é 6", "tiny é 7"}
  assert len(read(**cfg, dataset_split="train[:50%]")) == 3
  prints = {open_source(source(**cfg, dataset_split=s), "mine").fingerprint() for s in ("train", "test", "train[:50%]")}
  assert len(prints) == 3
  assert "tensorflow" not in sys.modules


def test_bad_tfds(tfds_dir):
  cfg = dict(type="tfds", path=tfds_dir)
  fails("dataset is not set", ConfigError, **cfg)
  fails(r"dataset='no_such_set' not found", dataset="no_such_set", **cfg)
  fails(r"dataset='tiny:9.0.0' not found", dataset="tiny:9.0.0", **cfg)
  fails(r"dataset_split='dev': 'tiny' has the splits 'train', 'test'", dataset="tiny", dataset_split="dev", **cfg)
  fails(r"tiny/train\[0\]: no key 'body'; found .*'id'.*. Set .*text_key", dataset="tiny", text_key="body",
        **cfg)
  fails(r"tiny/train\[0\]: 'id' must be a string, found int", dataset="tiny", text_key="id", **cfg)


def test_tfds_features_become_plain_python(tfds_dir):
  rows = sorted((r.fields for r in records(type="tfds", dataset="tiny", path=tfds_dir)), key=lambda f: f["id"])
  assert rows == [
      {"text": f"tiny é {i}", "id": i, "raw": b"\xff", "ids": list(range(i)), "scores": [i, 0.5],
       "messages": [{"role": "user", "content": f"é{k}"} for k in range(i)]} for i in range(6)]
  assert all(type(v) is int for v in (rows[3]["id"], *rows[3]["ids"]))
  fails(r"'raw' must be a string, found bytes that are not UTF-8", type="tfds", dataset="tiny", path=tfds_dir,
        text_key="raw")


def test_records_within_records_of_tfds():
  import tensorflow_datasets as tfds
  text = tfds.features.Text()
  calls = tfds.features.Sequence({"name": text, "at": np.int64})
  features = tfds.features.FeaturesDict({"messages": tfds.features.Sequence({"role": text, "calls": calls})})
  names = [np.array([b"f", "g é".encode()], object), np.array([], object)]
  value = {"messages": {"role": np.array([b"a", b"b"], object), "calls": {"name": names, "at": [np.arange(2), []]}}}
  assert readers._from_tfds(features, value) == {"messages": [
      {"role": "a", "calls": [{"name": "f", "at": 0}, {"name": "g é", "at": 1}]}, {"role": "b", "calls": []}]}


ROWS = [
    {"messages": [{"role": "user", "content": "a é"}, {"role": "assistant", "content": "b"}], "n": 1, "weights": [0.5]},
    {"messages": [{"role": "user", "content": ""}], "n": 2, "weights": []},
    {"messages": [], "n": 3, "weights": [0.0, 1.0]},
]


def test_all_formats_give_the_same_fields(tmp_path):
  (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
  pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "x.parquet")
  write_records(tmp_path / "x.arrayrecord", [json.dumps(row).encode() for row in ROWS])
  for kind, name, where in (("jsonl", "x.jsonl:{1}", ":{1}"), ("parquet", "x.parquet[{0}]", ": row {0} (from 0)"),
                            ("arrayrecord", "x.arrayrecord[{0}]", ": record {0} (from 0)")):
    path = tmp_path / f"x.{kind}"
    assert [r[:4] for r in records(type=kind, path=str(path))] == [
        (name.format(i, i + 1), str(path) + where.format(i, i + 1), row, tmp_path) for i, row in enumerate(ROWS)]


def test_of_parquet_only_the_text_is_read_where_only_that_is_asked_for(tmp_path):
  write_parquet(tmp_path / "x.parquet", body=["a"], other=[1])
  path = dict(type="parquet", path=str(tmp_path))
  rows = open_source(source(**path, text_key="body"), "mine").records()
  assert [r.fields for r in rows] == [{"body": "a"}]
  assert records(**path, text_key="body")[0].fields == {"body": "a", "other": 1}
  assert list(open_source(source(**path), "mine").records())[0].fields == {"body": "a", "other": 1}


def test_where_says_where_a_text_is(tmp_path):
  file = tmp_path / "a.txt"
  file.write_text("one\n\ntwo\n")
  for documents, lines in (("file", [""]), ("line", [":1", ":3"]), ("paragraph", [":1", ":3"])):
    assert [r.where for r in records(path=str(tmp_path), documents=documents)] == [f"{file}{line}" for line in lines]


def test_python_stdlib_is_read_and_leaves_tests_out():
  files = [name for name, _ in open_source(source(type="python_stdlib"), "mine")._reader.files()]
  assert "json/decoder.py" in files and files == sorted(files)
  folders = {part for name in files for part in name.split("/")[:-1]}
  assert not folders & {"test", "tests", "site-packages", "idlelib", "lib2to3"}


def test_images_of_tfds_become_files():
  class Image:
    pass
  pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
  for value, wanted in ((pixels, pixels), (pixels[..., :1], np.repeat(pixels[..., :1], 3, axis=2))):
    found = _from_tfds({"image": Image()}, {"image": value})["image"]
    assert (np.asarray(PIL.Image.open(io.BytesIO(found)).convert("RGB")) == wanted).all()


def test_python_stdlib_skips_and_counts_undecodable_files(tmp_path, monkeypatch):
  (tmp_path / "latin.py").write_bytes("# coding: latin-1\nx = 'é'\n".encode("latin-1"))
  (tmp_path / "bad.py").write_bytes(b"x = '\xff'\n")
  (tmp_path / "data.txt").write_text("not Python")
  monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
  stdlib = open_source(source(type="python_stdlib"), "mine")
  assert [record[:4] for record in stdlib.records()] == [
      ("latin.py", str(tmp_path / "latin.py"), {"text": "# coding: latin-1\nx = 'é'\n"}, None)]
  assert stdlib.tally.undecodable == 1
  assert stdlib.tally.bytes_read == sum((tmp_path / n).stat().st_size for n in ("latin.py", "bad.py"))


def test_sources_of_another_python_are_skipped_and_counted(tmp_path, monkeypatch):
  (tmp_path / "new.py").write_text('def f():\n  """Does."""\n')
  (tmp_path / "old.py").write_text("print 'hello'\n")
  monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
  functions = open_source(source(type="python_docstrings"), "mine")
  assert [r.name for r in functions.records()] == ["new.py:1"] and functions.tally.undecodable == 1


def test_python_docstring_pairs(tmp_path, monkeypatch):
  """Each docstring is chosen for its function, and rejected for another; equal ones are never put side by side."""
  docs = [f"Does {i % 7}." if i % 3 else f"Gives the {i}." for i in range(60)]
  (tmp_path / "a.py").write_text("\n".join(f'def f{i}(x):\n  """{doc}\n\n  More.\n  """' for i, doc in enumerate(docs)))
  monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
  found = records(type="python_docstring_pairs")
  assert [(r.name, r.fields["prompt"]) for r in found] == [
      (f"a.py:{5 * i + 1}", f'def f{i}(x):\n    """') for i in range(60)]
  assert [r.fields["chosen"] for r in found] == docs
  rejected = [r.fields["rejected"] for r in found]
  assert set(rejected) <= set(docs) and all(a != b for a, b in zip(docs, rejected, strict=True))
  counts = collections.Counter(docs), collections.Counter(rejected)
  assert max(abs(counts[0][doc] - counts[1][doc]) for doc in docs) <= 3
  assert found == records(type="python_docstring_pairs")
  (tmp_path / "a.py").write_text('def f():\n  """Same."""\ndef g():\n  """Same."""')
  fails("source 'mine' has no text", type="python_docstring_pairs")


def test_libraries_are_imported_only_when_needed():
  code = """
import sys
from input_pipeline import loader
from input_pipeline.tokenizer import tokenizer
heavy = {"jax", "pyarrow", "array_record", "tensorflow_datasets", "tensorflow", "zstandard", "torch"} & set(sys.modules)
assert not heavy, heavy
"""
  subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_exercises_are_made_with_their_answers():
  made = records(type="arithmetic")
  assert len(made) == len({r.fields["prompt"] for r in made}) == 20_000
  for r in made[::997]:
    a, sign, b = re.fullmatch(r"(\d+) ([+-]) (\d+) = ", r.fields["prompt"]).groups()
    assert r.fields["completion"] == str(int(a) + int(b) if sign == "+" else int(a) - int(b))
  assert made[0].where == "source mine: 0+0"


def test_made_rows_as_conversations(tmp_path, monkeypatch):
  """With the same answers, in the same splits whatever they are asked for."""
  texts, chats = records(type="arithmetic"), records(type="arithmetic", dataset="chat")
  assert [r.name for r in texts] == [r.name for r in chats]
  asked = {r.name: r.fields for r in chats}["64-81"]
  assert asked == {"prompt": [{"role": "user", "content": "What is 64 - 81?"}],
                   "completion": [{"role": "assistant", "content": "-17"}], "answer": "-17"}
  (tmp_path / "a.py").write_text("".join(f'def f{i}(x, y={i}):\n  """Does {i}."""\n' for i in range(60)))
  monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
  said = {r.name: r.fields for r in records(type="python_docstrings", dataset="chat")}
  pairs = {r.name: r.fields for r in records(type="python_docstring_pairs", dataset="chat")}
  assert said["a.py:7"] == {"prompt": [{"role": "user", "content": "Document def f3(x, y=3)"}],
                            "completion": [{"role": "assistant", "content": "Does 3."}]}
  assert {name: (f["prompt"], f["chosen"]) for name, f in pairs.items()} == {
      name: (f["prompt"], f["completion"]) for name, f in said.items()}
  assert all(f["rejected"] != f["chosen"] and f["rejected"][0]["role"] == "assistant" for f in pairs.values())
  held = [{r.name for r in records(type=kind, dataset="chat", split="validation", validation_fraction=0.3)}
          for kind in ("python_docstrings", "python_docstring_pairs")]
  assert held[0] == held[1] and 5 < len(held[0]) < 35
  fails("dataset is 'talk'; for type 'arithmetic' it is 'chat'", ConfigError, type="arithmetic", dataset="talk")


def test_a_teacher_errs_in_half_of_the_exercises_always_alike():
  right = {r.fields["prompt"]: int(r.fields["completion"]) for r in records(type="arithmetic")}
  said = {r.fields["prompt"]: int(r.fields["completion"]) for r in records(type="arithmetic_mistakes")}
  off = collections.Counter(said[prompt] - right[prompt] for prompt in right)
  assert set(off) == {0, -10, -2, -1, 1, 2, 10}
  assert off[0] == pytest.approx(10_000, abs=300)
  assert all(off[by] == pytest.approx(10_000 / 6, abs=200) for by in off if by)
  assert said == {r.fields["prompt"]: int(r.fields["completion"]) for r in records(type="arithmetic_mistakes")}


def test_pairs_of_exercises_have_the_right_answer_and_a_mistake():
  right = {r.fields["prompt"]: r.fields["completion"] for r in records(type="arithmetic")}
  pairs = {r.fields["prompt"]: r.fields for r in records(type="arithmetic_pairs")}
  assert {prompt: row["chosen"] for prompt, row in pairs.items()} == right
  off = collections.Counter(int(row["rejected"]) - int(row["chosen"]) for row in pairs.values())
  assert set(off) == {-10, -2, -1, 1, 2, 10} and min(off.values()) > 3000
  chat = next(iter(records(type="arithmetic_pairs", dataset="chat"))).fields
  assert chat.keys() == {"prompt", "chosen", "rejected"} and chat["chosen"] == [{"role": "assistant", "content": "0"}]


def test_exercises_of_the_two_kinds_are_split_alike():
  """Those that one kind is evaluated on are not among those that the other is trained on."""
  train = {r.fields["prompt"] for r in records(type="arithmetic_mistakes", split="train")}
  validation = {r.fields["prompt"] for r in records(type="arithmetic", split="validation")}
  assert not train & validation and len(train | validation) == 20_000
  assert len(validation) == pytest.approx(1000, abs=120)
  contents = {open_source(source(type=kind), "a").fingerprint() for kind in ("arithmetic", "arithmetic_mistakes")}
  assert len(contents) == 2


class Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.mark.parametrize("kind", ["text", "arithmetic"])
def test_a_bar_counts_bytes_of_files_or_records_and_needs_a_terminal(tmp_path, monkeypatch, kind):
  (tmp_path / "a.txt").write_text("x" * 500)
  mine = open_source(source(type=kind, path=str(tmp_path)), "mine")
  for stderr, show, shown in ((Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False)):
    monkeypatch.setattr(sys, "stderr", stderr)
    with mine.bar("reading", show) as advance:
      for _ in mine.records():
        pass
      advance()
    text = stderr.getvalue()
    assert bool(text) == shown
    if shown:
      assert "reading mine" in text and ("500/500" if kind == "text" else "20.0k records") in text


def test_a_python_without_its_library_is_told(monkeypatch, tmp_path):
  monkeypatch.setattr(python.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
  (tmp_path / "a.txt").write_text("")
  fails(f"^source 'mine': this Python has no library sources in '{tmp_path}' .a zipped or embedded Python", type=(
      "python_stdlib"))


def test_functions_are_found_by_their_docstrings(monkeypatch, tmp_path):
  monkeypatch.setattr(python.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
  (tmp_path / "m.py").write_text('def one(a):\n  """Adds one.\n\n  More.\n  """\n  return a + 1\n\n'
                                 'class C:\n  def two(self):\n    """Says two."""\n')
  found = {r.fields["query"]: r.fields["positive"] for r in records(type="python_docstring_matches")}
  assert found == {"Adds one.": "def one(a):\n    return a + 1", "Says two.": "def two(self):\n    pass"}


def test_pairs_are_the_right_answer_and_one_that_is_off(monkeypatch):
  """By what a hash of the exercise says: of 12 draws each half errs, by one of six."""
  found = {made._mistake(str(n)) for n in range(500)}
  assert found == {(wrong, by) for wrong in (0, 1) for by in (-10, -2, -1, 1, 2, 10)}
  reader = object.__new__(made.ArithmeticPairsReader)
  for n in range(20):
    error = made._mistake(str(n))[1]
    assert reader.answers(str(n), 7) == {"chosen": "7", "rejected": str(7 + error)} and reader.beside({"a": "b"}) == {}
  teacher = object.__new__(made.ArithmeticMistakesReader)
  for n in range(20):
    wrong, error = made._mistake(str(n))
    assert teacher.answers(str(n), 7) == {"completion": str(7 + error if wrong else 7)}
  assert teacher.beside({"completion": "9"}) == {"answer": "9"}


class Tfds:
  """A prepared dataset as far as it is asked."""

  def __init__(self, folder, splits=("train",), fails=None, rows=()):
    self.data_dir, self._fails, self._rows = folder, fails, rows
    info = types.SimpleNamespace(filepaths=[])
    self.info = types.SimpleNamespace(splits=dict.fromkeys(splits, info), features="features")

  def as_data_source(self, split):
    if self._fails:
      raise self._fails
    return self._rows


@pytest.fixture
def tfds(monkeypatch, tmp_path):
  def of(builder):
    package = types.ModuleType("tensorflow_datasets")
    package.builder = lambda dataset, data_dir: builder
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", package)
    cfg = source(type="tfds", dataset="news", path=str(tmp_path), dataset_split="train")
    return readers.TfdsReader(cfg, "mine")
  return of


@pytest.mark.parametrize("builder, message", [
    (dict(splits=()), "TFDS dataset 'news' is not prepared in F. Prepare it once with `tfds.builder('news', "
                      "file_format='array_record').download_and_prepare()`."),
    (dict(fails=ValueError("no files\nmore")), "TFDS dataset 'news' in F cannot be read: no files"),
    (dict(fails=KeyError()), "TFDS dataset 'news' in F cannot be read: KeyError"),
    (dict(splits=("test",)), "input.sources.mine.dataset_split='train': 'news' has the splits 'test'."),
])
def test_a_dataset_of_tfds_that_cannot_be_read_says_why(tfds, builder, message):
  with pytest.raises(DataError) as told:
    list(tfds(Tfds("F", **builder)).read(Tally()))
  assert str(told.value) == message


def test_rows_of_tfds_have_their_own_problems(tfds, monkeypatch):
  def field(features, value):
    if isinstance(value, Exception):
      raise value
    return {"text": f"{features} {value}"}

  monkeypatch.setattr(readers, "_from_tfds", field)
  rows = list(tfds(Tfds("F", rows=["a", ValueError("bad"), "c"])).read(Tally()))
  assert [row.name for row in rows] == ["news/train[0]", "news/train[1]", "news/train[2]"]
  assert [row.fields for row in rows] == [{"text": "features a"}, {}, {"text": "features c"}]
  assert str(rows[1].problem) == "news/train[1]: cannot be read from F: ValueError: bad." and rows[2].problem is None
  with pytest.raises(DataError, match=r"^news/train\[0\]: TFDS cannot read this dataset's features without another li"):
    list(tfds(Tfds("F", rows=[ImportError("no librosa")])).read(Tally()))


@pytest.mark.parametrize("named, refused", [
    ({"features": {"a": {"pythonClassName": "mine.Feature"}}}, True),
    ({"type": "tensorflow_datasets.core.Text"}, False),
    ({"a": [{"json": json.dumps({"type": "os.system"})}]}, True), ({"a": {"json": "[1]", "type": "Text"}}, False)])
def test_features_whose_code_would_be_run_are_refused(tmp_path, named, refused):
  file = tmp_path / "features.json"
  file.write_text(json.dumps(named))
  if refused:
    with pytest.raises(DataError, match=f"^{file}: names the class '(mine.Feature|os.system)', whose code would be ru"):
      readers._check_features(file)
  else:
    readers._check_features(file)


@pytest.mark.parametrize("text, is_json", [
    ('{"a": 1}', True), (' \n{"a": 1}', True), ("[1]", False), ("{a", False), ("", False)])
def test_what_of_arrayrecord_looks_like_json(text, is_json):
  reader = object.__new__(readers.ArrayRecordReader)
  reader._never_json = False
  assert reader._looks_like_json(text) == is_json
  reader._never_json = True
  assert not reader._looks_like_json(text)


def test_bytes_of_tfds_are_counted_row_by_row(tfds, monkeypatch, tmp_path):
  monkeypatch.setattr(readers, "_from_tfds", lambda features, value: {})
  builder, tally = Tfds(str(tmp_path), rows=["a", "b", "c", "d"]), Tally()
  (tmp_path / "shard").write_bytes(b"x" * 10)
  builder.info.splits["train"].filepaths.append(tmp_path / "shard")
  tally.bytes_read, seen = 100, []
  for _ in tfds(builder).read(tally):
    seen.append(tally.bytes_read)
  assert seen == [100, 102, 105, 107] and tally.bytes_read == 110


@pytest.mark.parametrize("ink, covered, digit, caption", [
    (313, 6, 7, "a bold, wide seven"), (312, 6, 8, "a thin, wide eight"), (313, 5, 0, "a bold, narrow zero")])
def test_digits_are_described_by_their_ink_and_width(ink, covered, digit, caption):
  """Bold from 313 on, wide from six columns with ink of 4 on."""
  pixels = np.full((8, 8), 0, np.uint8)
  pixels[:, :covered] = 3
  pixels[0, :covered] = 4
  rest = ink - int(pixels.sum())
  for place in range(8 * covered):
    row, column = divmod(place, covered)
    more = min(rest, 16 - int(pixels[row, column]))
    pixels[row, column] += more
    rest -= more
  assert rest == 0
  reader = object.__new__(made.DigitsReader)
  assert reader.caption(pixels, digit, "description") == caption
  assert reader.caption(pixels, digit, "name") == {7: "a seven", 8: "an eight", 0: "a zero"}[digit]
