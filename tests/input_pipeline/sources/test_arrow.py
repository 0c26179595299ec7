"""Rows of Arrow tables: what `datasets` wrote comes back as it was given to it, in whatever way it was kept."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from input_pipeline import loader
from input_pipeline.bad_rows import BadRows, Policy
from input_pipeline.sources import arrow
from input_pipeline.sources.sources import open_source
from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from tests.tiny import ROOT
from trainer.config import defaults, source
from trainer.errors import DataError
from trainer.strategies import learns

FILES = ROOT / "tests" / "input_pipeline" / "references" / "datasets"
ROWS = [json.loads(line) for line in (FILES / "rows.jsonl").read_text("utf-8").splitlines()]
TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif %}
{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}
{%- if m.role == 'assistant' %}{{ eos_token }}{% endif %}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
# Each way in which references/make_dataset_references.py kept ROWS.
KEPT = [("parquet", "padded.parquet"), ("parquet", "json.parquet"), ("parquet", "whole.parquet"),
        ("parquet", "mixed.parquet"), ("arrow", "saved"), ("arrow", "saved/*.arrow"), ("arrow", "splits"),
        ("arrow", "splits/train")]


def records(kind, path, **cfg):
  return [r.fields for r in open_source(source(type=kind, path=str(path), **cfg), "mine", texts=False).records()]


def fails(said, kind, path, **cfg):
  with pytest.raises(DataError, match=said):
    records(kind, path, **cfg)


@pytest.mark.parametrize("kind, path", KEPT)
def test_rows_are_those_that_were_given_to_datasets(kind, path):
  assert records(kind, FILES / path) == ROWS


def trained(folder, kind, path, **cfg):
  """(tokens of all documents, their weights, the start-up table) of fine-tuning on a source."""
  config = defaults()
  (folder / "t.jinja").write_text(TEMPLATE)
  config.strategy.name, config.seq_len, config.chat.template = "sft", 2048, str(folder / "t.jinja")
  config.input.sources.main = source(type=kind, path=str(path), **cfg)
  data = loader.make_train_data(config, BytesTokenizer(), learns=learns(config), workdir=folder)
  (packed,) = data._packed
  return bytes(np.asarray(packed.tokens.tokens, np.uint8)), np.array(packed.tokens.weights), data.stats()


def test_the_same_rows_give_the_same_tokens_from_every_format(tmp_path):
  (tmp_path / "rows.json").write_text(json.dumps(ROWS, indent=2))
  (tmp_path / "named.json").write_text(json.dumps({"version": 1, "data": ROWS}))
  wanted, weights, _ = trained(tmp_path, "jsonl", FILES / "rows.jsonl")
  assert b'{"town": "Bonn"}' in wanted and b"null" not in wanted and b"\\\\" not in wanted
  for kind, path, more in [("jsonl", tmp_path / "rows.json", {}), ("jsonl", tmp_path / "named.json",
                           {"rows_key": "data"}), *((kind, FILES / path, {}) for kind, path in KEPT)]:
    tokens, found, (stats,) = trained(tmp_path, kind, path, **more)
    assert tokens == wanted, path
    np.testing.assert_array_equal(found, weights)
    # Messages without calls have a null there, too, unless whole columns are JSON.
    without = kind == "jsonl" or path.name in ("whole.parquet", "mixed.parquet")
    assert (stats.get("nulls left out", 0) == 0) == without


def test_nulls_of_objects_are_left_out_and_counted_those_of_lists_maps_and_json_stay(tmp_path):
  kind = pa.struct([("a", pa.int64()), ("b", pa.struct([("c", pa.string())])), ("d", pa.list_(pa.int64()))])
  table = pa.table({
      "x": pa.array([{"a": 1}, {"b": {}, "d": [None, 2]}, None], kind),
      "m": pa.array([[("k", None), ("l", 1)], [], None], pa.map_(pa.string(), pa.int64())),
      "j": pa.array(['{"z": null}', '[null]', None], pa.string()),
  }).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": {"j": {"_type": "Json"}}}})})
  pq.write_table(table, tmp_path / "x.parquet")
  opened = open_source(source(type="parquet", path=str(tmp_path)), "mine", texts=False)
  assert [r.fields for r in opened.records()] == [
      {"x": {"a": 1}, "m": {"k": None, "l": 1}, "j": {"z": None}},
      {"x": {"b": {}, "d": [None, 2]}, "m": {}, "j": [None]}, {"x": None, "m": None, "j": None}]
  assert opened.tally.nulls == 4  # b and d; a, and c


def test_a_row_is_on_the_same_side_of_a_split_in_every_format():
  for split in ("train", "validation"):
    cut = dict(split=split, validation_fraction=0.6)
    wanted = records("jsonl", FILES / "rows.jsonl", **cut)
    assert 0 < len(wanted) < len(ROWS)
    for kind, path in KEPT:
      assert records(kind, FILES / path, **cut) == wanted, path


def test_saved_folders_are_read_as_their_description_says(tmp_path):
  shutil.copytree(FILES / "saved", tmp_path / "saved")
  saved = tmp_path / "saved"
  shutil.copy(saved / "data-00000-of-00002.arrow", saved / "cache-0123.arrow")  # what map() leaves
  shutil.copy(saved / "data-00000-of-00002.arrow", saved / "other.arrow")
  assert records("arrow", saved) == ROWS
  assert records("arrow", f"{saved}, {FILES / 'splits'}", dataset_split="test") == [*ROWS, ROWS[1]]
  state = json.loads((saved / "state.json").read_text())
  (saved / "state.json").write_text(json.dumps(state | {"_data_files": state["_data_files"][::-1]}))
  assert records("arrow", saved) == [ROWS[2], *ROWS[:2]]
  for changed, said in (
      ({"_data_files": [{"filename": "../x.arrow"}]}, "expected the names of files beside it"),
      ({"_data_files": [{"filename": "gone.arrow"}]}, "gone.arrow is missing, which state.json"),
      ({"_indices_data_files": [{"filename": "indices.arrow"}]}, r"Save it again after flatten_indices\(\)")):
    (saved / "state.json").write_text(json.dumps(state | changed))
    fails(said, "arrow", saved)
  (saved / "state.json").unlink()  # a folder of files that are no Dataset
  assert records("arrow", saved) == [*ROWS, *ROWS[:2]]


def test_a_split_of_a_dict_is_chosen_and_else_the_message_lists_them():
  assert records("arrow", FILES / "splits", dataset_split="test") == [ROWS[1]]
  fails("has the splits 'train', 'test', and no 'dev'. Name one of them with input.sources.mine.dataset_split", "arrow",
        FILES / "splits", dataset_split="dev")


@pytest.mark.parametrize("folder", ["saved", "splits"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "text"])
def test_another_type_says_which_one_reads_saved_folders(kind, folder):
  fails("save_to_disk wrote. Set input.sources.mine.type='arrow'", kind, FILES / folder)


@pytest.mark.parametrize("kind, name, right", [
    ("jsonl", "a.parquet", "parquet"), ("text", "a.parquet", "parquet"), ("csv", "a.arrow", "arrow"),
    ("jsonl", "a.CSV.gz", "csv"), ("csv", "a.json.zst", "jsonl"), ("parquet", "a.tsv", "csv")])
def test_another_type_says_which_one_reads_a_file_of_this_name(kind, name, right, tmp_path):
  (tmp_path / name).write_bytes(b"PAR1")
  fails(f"{name} is no file of this type of source. Name .*, or set input.sources.mine.type='{right}'", kind,
        tmp_path / name)
  if kind != "text":
    fails(f"has only {name}; expected .* Set input.sources.mine.type='{right}' to read these", kind, tmp_path)


def test_text_is_read_from_files_of_other_types_that_are_text_and_rows_from_a_name_in_capitals(tmp_path):
  (tmp_path / "a.csv").write_text("a,b\n")
  assert records("text", tmp_path / "a.csv") == [{"text": "a,b\n"}]
  (tmp_path / "in").mkdir()
  (tmp_path / "in" / "B.JSONL").write_text("")
  fails("has only B.JSONL; expected a .jsonl .* behind it[.]$", "jsonl", tmp_path / "in")
  (tmp_path / "B.JSONL").write_text('{"text": "b"}\n')
  assert records("jsonl", tmp_path / "B.JSONL") == [{"text": "b"}]


def test_both_kinds_of_arrow_files_and_damaged_ones(tmp_path):
  table = pa.table({"text": [f"row {i}" for i in range(1200)]})
  with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as f, pa.ipc.new_file(f, table.schema) as writer:
    writer.write_table(table, 1100)
  with pa.OSFile(str(tmp_path / "b.arrow"), "wb") as f, pa.ipc.new_stream(f, table.schema) as writer:
    writer.write_table(table, 100)
  found = records("arrow", tmp_path)
  assert found == 2 * [{"text": f"row {i}"} for i in range(1200)]
  for cut in (3, 200, 2000):
    (tmp_path / "b.arrow").write_bytes((tmp_path / "b.arrow").read_bytes()[:-cut])
    fails("b.arrow: not a readable Arrow file", "arrow", tmp_path / "b.arrow")
  (tmp_path / "b.arrow").write_bytes(b"")
  fails("b.arrow: not a readable Arrow file", "arrow", tmp_path / "b.arrow")


def test_a_bad_row_among_good_ones_is_that_row_alone(tmp_path):
  ends = pa.py_buffer(np.array([0, 1, 2, 3], np.int32))
  columns = {"t": pa.StringArray.from_buffers(3, ends, pa.py_buffer(b"a\xffc"))}
  table = pa.table(columns | {"j": ['{"a": 1}', "{}", "{no"]}).replace_schema_metadata(
      {"huggingface": json.dumps({"info": {"features": {"j": {"_type": "Json"}}}})})
  pq.write_table(table, tmp_path / "x.parquet")
  bad = BadRows("mine", Policy("drop", 1.0))
  opened = open_source(source(type="parquet", path=str(tmp_path)), "mine", texts=False)
  assert [r.fields for r in opened.records(bad)] == [{"t": "a", "j": {"a": 1}}]
  assert [(where[-14:], why[:30]) for where, why in bad.first] == [
      ("row 1 (from 0)", "text that is not valid UTF-8 ("), ("row 2 (from 0)", "a column of JSON holds what is")]


def test_a_description_that_is_none_says_what_to_do(tmp_path):
  file = tmp_path / "state.json"
  for text, said in (("{", "cannot be read: "), ("[1]", "is a list; expected an object. Save the dataset again.")):
    file.write_text(text)
    with pytest.raises(DataError, match=f"^{file}: {said}"):
      arrow._parsed(file)
  with pytest.raises(DataError, match="none.json: cannot be read: .* Save the dataset again with save_to_disk.$"):
    arrow._parsed(tmp_path / "none.json")


def test_maps_with_names_are_objects_and_others_stay_lists_of_pairs(tmp_path):
  names = pa.array([[("a", 1), ("b", None)], None], pa.map_(pa.string(), pa.int64()))
  numbers = pa.array([[(1, 2)], []], pa.map_(pa.int64(), pa.int64()))
  pq.write_table(pa.table({"names": names, "numbers": numbers}), tmp_path / "a.parquet")
  first, second = records("parquet", tmp_path / "a.parquet")
  assert first["names"] == {"a": 1, "b": None}
  assert first["numbers"] == [(1, 2)] and second["numbers"] == [] and second.get("names") is None
