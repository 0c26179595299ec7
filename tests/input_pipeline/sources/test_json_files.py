"""JSON files: lists of objects and objects that hold one, in parts of any size, are what the standard library reads."""

import gzip
import json
import random
from pathlib import Path

import pytest

from input_pipeline import files
from input_pipeline.sources.json_files import Scanner
from input_pipeline.sources.sources import open_source
from trainer.config import source
from trainer.errors import DataError

ROWS = [{"text": "one, [two] {\"three\"} \\"}, {"text": "é\n", "n": [1, {"m": None}]}, {"text": "x" * 50}]


def records(path, **cfg):
  return list(open_source(source(type="jsonl", path=str(path), **cfg), "mine", texts=False).records())


def fails(said, path, text, **cfg):
  path.write_text(text)
  with pytest.raises(DataError, match=said):
    records(path, **cfg)


def made(rng, depth=0):
  kind = rng.randrange(7 if depth < 4 else 4)
  if kind == 0:
    return rng.choice([1, -2.5, True, None, 1e9])
  if kind < 4:
    return "".join(rng.choice('ab"\\[]{},:é\n😀 ') for _ in range(rng.randrange(9)))
  values = [made(rng, depth + 1) for _ in range(rng.randrange(4))]
  return values if kind == 6 else {f'k{i}"[': value for i, value in enumerate(values)}


def test_what_is_scanned_is_what_the_standard_library_reads_and_each_entry_stands_where_it_is_said():
  rng = random.Random(0)
  for _ in range(600):
    rows, key = [made(rng) for _ in range(rng.randrange(5))], rng.choice([None, "data"])
    document = rows if key is None else {"before": made(rng), "data": rows, "behind": made(rng)}
    text = json.dumps(document, indent=rng.choice([None, 1]), ensure_ascii=rng.random() < 0.5).encode()
    text, size = rng.choice([b"", files.BOM]) + text + rng.choice([b"", b"\n \n"]), rng.choice([1, 2, 3, 7, 1000])
    found = list(Scanner(iter([text[i:i + size] for i in range(0, len(text), size)]), Path("x")).rows(key, "s"))
    assert [json.loads(raw) for _, _, raw in found] == rows
    assert all(text[at:at + len(raw)] == raw and text[:at].count(b"\n") + 1 == line for line, at, raw in found)
    whole = text.rstrip()
    if len(whole) > 5:
      with pytest.raises(DataError):  # nothing is read to its end that has none
        list(Scanner(iter([whole[:rng.randrange(4, len(whole))]]), Path("x")).rows(key, "s"))


@pytest.mark.parametrize("chunk", [5, 1 << 20])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz"])
def test_lists_lines_and_objects_with_a_list_give_the_same_rows(tmp_path, monkeypatch, name, chunk):
  monkeypatch.setattr(files, "CHUNK", chunk)
  path = tmp_path / name
  texts = {"lines": "\n".join(map(json.dumps, ROWS)), "list": json.dumps(ROWS), "indented": json.dumps(ROWS, indent=2),
           "object": json.dumps({"version": [0], "data": ROWS, "end": {}}, indent=1)}
  for kind, text in texts.items():
    for mark in (b"", files.BOM + b"\n "):
      raw = mark + text.encode()
      path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
      found = records(path, rows_key="data" if kind == "object" else None)
      assert [r.fields for r in found] == ROWS, kind
  path = tmp_path / "b.json"
  path.write_text(json.dumps(ROWS, indent=2))
  lines = [n for n, line in enumerate(path.read_text().splitlines(), 1) if line == "  {"]
  assert [r.where for r in records(path)] == [f"{path}: row {i} (from 0), line {n}" for i, n in enumerate(lines)]
  assert [r.name for r in records(path)] == ["b.json[0]", "b.json[1]", "b.json[2]"]


def test_empty_lists_have_no_rows(tmp_path):
  fails("source 'mine' has no text", tmp_path / "a.json", " [ ] ")


@pytest.mark.parametrize("text, said", [
    ('[{"a": 1}, 7]', r"a.json: row 1 \(from 0\), line 1: expected a JSON object, found int"),
    ('[{"a": 1},\n{"a": 1,}]', r"a.json: row 1 \(from 0\), line 2: not valid JSON \(.*: '\{\"a\": 1,\}'"),
    ('[{"a": 1}\n{"a": 1}]', r"a.json:2: not valid JSON \(expected ',' or '\]', found '\{"),
    ('[{"a": 1}, ]', r"a.json:1: not valid JSON \(expected a value, found '\]'"),
    ('[{"a": 1}', r"a.json:1: not valid JSON \(expected ',' or '\]', found the file's end"),
    ('[{"a": 1},\n {"a": "1}]', r"a.json:2: what begins here does not end"),
    ('[{"a": 1}]\n[{"a": 1}]', r"a.json:2: found '\[' behind the end of the list of rows"),
    ("[" * 100_000, "a.json:1: not valid JSON .nested too deeply"),
    ('{\n "version": 1,\n "data": [{"a": 1}]\n}', r"a.json:1: .* over several lines, name its key that holds the "
     r"list of rows: input.sources.mine.rows_key"),
])
def test_what_is_wrong_is_said_with_its_line(tmp_path, text, said):
  fails(said, tmp_path / "a.json", text)


@pytest.mark.parametrize("text, said", [
    ('{"x": 1, "y": []}', r"a.json: no key 'data'; found 'x', 'y'. Set input.sources.mine.rows_key"),
    ('{"x": 1,\n "data": {}}', r"a.json:2: behind 'data' \(input.sources.mine.rows_key\) is no list"),
    ('[{"data": []}]', "rows_key is 'data', but the file does not begin with an object"),
    ('{"data": [{"a": 1}]', r"expected ',' or '\}', found the file's end"),
    ('{"x": 1,\n "da\\q": []}', r"a.json:2: a key that is not valid JSON"),
    ('{"data": [{"a": 1}], "data": []}', "the key 'data' is there twice"),
])
def test_the_key_of_the_rows_is_checked(tmp_path, text, said):
  fails(said, tmp_path / "a.json", text, rows_key="data")


def test_a_row_that_is_longer_than_any_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr("input_pipeline.sources.json_files.MAX_LINE", 40)
  monkeypatch.setattr(files, "CHUNK", 10)
  fails("a.json:1: a row of more than 40 bytes", tmp_path / "a.json", json.dumps([{"text": "x" * 100}]))
