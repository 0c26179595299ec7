"""Bad rows: each of them is told, with its place and reason; dropped ones are counted, bounded, and change no other."""

import json
import re

import numpy as np
import pyarrow as pa
import pytest

from input_pipeline import cache as cache_lib
from input_pipeline import loader
from input_pipeline.evaluation import make_eval_data
from input_pipeline.prompt_data import make_prompt_data
from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from tests.input_pipeline.sources.test_readers import write_records
from trainer.config import defaults, source
from trainer.errors import ConfigError, DataError
from trainer.strategies import learns

# Refuses two turns of the user in a row, as many do.
TEMPLATE = """{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}
{%- endif %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
USER, SAID = {"role": "user", "content": "Say it."}, {"role": "assistant", "content": "It."}
GOOD = [{"messages": [{"role": "user", "content": f"Question {i}?"}, SAID]} for i in range(40)]
# A line of a file, and why it is bad.
BAD = {
    '{"messages": [': r"not valid JSON \(Expecting value",
    '{"messages": [{"role": "user", "content": "\udcff"}]}': "not valid UTF-8",
    '["a list"]': "expected a JSON object, found list",
    '{"dialogue": []}': "its columns .'dialogue'. are none that are known",
    '{"messages": []}': "messages is an empty list",
    json.dumps({"messages": [USER, {"role": "robot", "content": "x"}]}): "role is 'robot'",
    json.dumps({"messages": [USER, SAID | {"content": "a\ud800"}]}): "lone surrogate",
    json.dumps({"messages": [USER, SAID | {"content": " "}]}): "content is empty, and this message is trained",
    json.dumps({"messages": [USER, USER, SAID]}): "the template refuses the conversation",
    json.dumps({"input_ids": [1, 99999]}): "not in the tokenizer's vocabulary",
}


def config(folder, lines, name="a.jsonl", **changed):
  (folder / "t.jinja").write_text(TEMPLATE)
  (folder / name).write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
  c = defaults()
  c.strategy.name, c.seq_len, c.batch_size, c.chat.template = "sft", 256, 4, str(folder / "t.jinja")
  c.input.sources.main = source(type="jsonl", path=str(folder / name))
  c.input.update(changed)
  return c


def lines(every=3):
  """(lines with one of BAD after so many good ones, (number from 1, why) of the bad ones)."""
  found, bad, rows, problems = [], [], iter(GOOD), iter(BAD.items())
  for row in rows:
    found.append(json.dumps(row))
    if len(found) % every == 0 and (problem := next(problems, None)):
      found.append(problem[0])
      bad.append((len(found), problem[1]))
  return found, bad


def make(c, folder):
  return loader.make_train_data(c, BytesTokenizer(), learns=learns(c), workdir=folder)


def test_the_first_ten_are_told_with_file_line_and_reason(tmp_path):
  found, bad = lines()
  assert len(bad) == 10
  with pytest.raises(DataError) as raised:
    make(config(tmp_path, found), tmp_path)
  told = str(raised.value).splitlines()
  assert "source 'main': the first 10 rows that cannot be used" in told[0] and "on_bad_row=drop" in told[-1]
  for line, (number, why) in zip(sorted(told[1:-1], key=lambda line: int(re.search(r"a.jsonl:(\d+)", line)[1])), bad,
                                 strict=True):
    assert f"a.jsonl:{number}: " in line and re.search(why, line), (line, why)


def test_few_are_told_at_the_end_one_as_it_is_and_those_with_the_same_reason_together(tmp_path):
  found = [json.dumps(GOOD[0]), "[]", json.dumps(GOOD[1]), "{", "[1]"]
  with pytest.raises(DataError, match=r"3 of 5 rows \(60.0%\) cannot be used:\n  .*a.jsonl:2, .*a.jsonl:5: expected a "
                                      r"JSON object, found list.\n  .*a.jsonl:4: not valid JSON"):
    make(config(tmp_path, found), tmp_path)
  with pytest.raises(DataError, match=r"^[^\n]*a.jsonl:2: expected a JSON object, found list. \(Of 3 rows, no other"):
    make(config(tmp_path, found[:3]), tmp_path)


def test_dropped_rows_change_nothing_else_and_are_counted(tmp_path, caplog):
  found, bad = lines()
  good = [line for n, line in enumerate(found, 1) if n not in dict(bad)]
  dropped = make(config(tmp_path, found, on_bad_row="drop", max_bad_rows=0.2), tmp_path)
  without = make(config(tmp_path, good, name="good.jsonl"), tmp_path)
  (stats,) = dropped.stats()
  assert stats["dropped: bad row"] == 10 and stats["documents"] == 40
  assert without.num_steps == dropped.num_steps and "dropped: bad row" not in without.stats()[0]
  for step in range(6):
    for key, value in without.batch(step).items():
      np.testing.assert_array_equal(value, dropped.batch(step)[key], err_msg=key)
  assert "dropped, since 10 of 50 rows (20.0%) cannot be used" in caplog.text


@pytest.mark.parametrize("most, allowed", [(0.2, True), (0.19, False), (0.0, False)])
def test_their_share_is_bounded_also_where_the_cache_is_there_already(tmp_path, most, allowed):
  found, _ = lines()
  make(config(tmp_path, found, on_bad_row="drop", max_bad_rows=1.0), tmp_path)
  again = config(tmp_path, found, on_bad_row="drop", max_bad_rows=most)
  for folder in (tmp_path, tmp_path / "fresh"):
    if allowed:
      make(again, folder)
    else:
      with pytest.raises(DataError, match="10 of 50 rows .20.0%. cannot be used, and input.max_bad_rows allows"):
        make(again, folder)


def test_a_cache_without_its_bad_rows_stops_a_run_that_does_not_drop_them(tmp_path, monkeypatch):
  found, _ = lines()
  dropped = make(config(tmp_path, found, on_bad_row="drop", max_bad_rows=1.0), tmp_path)
  monkeypatch.setattr(cache_lib, "_build", None)  # nothing is built again
  with pytest.raises(DataError, match="a.jsonl:4: not valid JSON"):
    make(config(tmp_path, found), tmp_path)
  # Nor does the policy change what the data are.
  assert make(config(tmp_path, found, on_bad_row="drop", max_bad_rows=0.5), tmp_path).fingerprint == dropped.fingerprint


def test_each_part_of_a_split_has_its_own_bad_rows(tmp_path):
  found, _ = lines()
  counts = []
  for split in ("train", "validation"):
    c = config(tmp_path, found, on_bad_row="drop", max_bad_rows=1.0)
    c.input.sources.main.update(split=split, validation_fraction=0.5)
    data = make_eval_data(c, BytesTokenizer(), learns=learns(c), workdir=tmp_path)
    counts.append((data.stats()[0]["dropped: bad row"], data.stats()[0]["documents"]))
  assert sum(bad for bad, _ in counts) == 10 and sum(good for _, good in counts) == 40 and min(map(min, counts)) > 0


def test_the_texts_of_a_tokenizer_and_of_evaluations_are_those_of_good_rows(tmp_path):
  found = [json.dumps({"text": f"text {i}"}) for i in range(9)] + ["{", '{"text": 7}', '{"text": "\\ud800"}']
  c = config(tmp_path, found, on_bad_row="drop", max_bad_rows=0.25)
  c.strategy.name = "seq"
  wanted = [f"text {i}" for i in range(9)]
  assert list(loader.train_texts(c, learns(c))()) == wanted
  data = make_eval_data(c, BytesTokenizer(), learns=learns(c), workdir=tmp_path)
  assert list(data.raw_texts()) == wanted and data.num_documents == {"main": 9}
  c.input.on_bad_row = "error"
  with pytest.raises(DataError, match="3 of 12 rows .25.0%. cannot be used"):
    list(loader.train_texts(c, learns(c))())


def test_bad_prompts(tmp_path):
  found = [json.dumps({"prompt": f"Question {i}?"}) for i in range(8)] + ["{", '{"prompt": 7}']
  c = config(tmp_path, found, on_bad_row="drop", max_bad_rows=0.2)
  c.strategy.name, c.rollout.max_new_tokens = "grpo", 8
  data = make_prompt_data(c, BytesTokenizer())
  assert len(data) == 8 and data.stats()[0]["dropped: bad row"] == 2
  c.input.on_bad_row = "error"
  with pytest.raises(DataError, match=r"2 of 10 rows .*\n  .*a.jsonl:9: not valid JSON.*\n  .*a.jsonl:10: 'prompt'"):
    make_prompt_data(c, BytesTokenizer())


@pytest.mark.parametrize("kind", ["parquet", "arrow", "arrayrecord", "text", "json"])
def test_bad_rows_of_other_formats_are_single_rows_too(tmp_path, kind):
  texts = [b"a", b"b\xff", b"c", b"\xffd", b"e"]
  places = ["row 1 (from 0)", "row 3 (from 0)"]
  path = tmp_path / f"x.{kind}"
  if kind == "text":
    path, places = tmp_path / "x.txt", ["x.txt:2:", "x.txt:4:"]
    path.write_bytes(b"\n".join(texts))
  elif kind == "json":
    path.write_bytes(b"[" + b",\n".join(b'{"text": "%s"}' % t for t in texts) + b"]")
    places = ["x.json:2:", "x.json:4:"]
  elif kind == "arrayrecord":
    write_records(path, texts)
    places = ["record 1 (from 0)", "record 3 (from 0)"]
  else:
    ends = np.cumsum([0, *map(len, texts)]).astype(np.int32)
    table = pa.table({"text": pa.StringArray.from_buffers(5, pa.py_buffer(ends), pa.py_buffer(b"".join(texts)))})
    if kind == "parquet":
      pa.parquet.write_table(table, path)
    else:
      with pa.OSFile(str(path), "wb") as f, pa.ipc.new_stream(f, table.schema) as writer:
        writer.write_table(table)
  c = config(tmp_path, [], on_bad_row="drop", max_bad_rows=0.4)
  c.strategy.name = "seq"
  c.input.sources.main = source(type="jsonl" if kind == "json" else kind, path=str(path), documents="line")
  assert list(loader.train_texts(c, learns(c))()) == ["a", "c", "e"]
  c.input.on_bad_row = "error"
  with pytest.raises(DataError) as raised:
    list(loader.train_texts(c, learns(c))())
  assert all(place in str(raised.value) for place in places) and "UTF-8" in str(raised.value)


def test_what_becomes_of_them_is_one_of_two_things(tmp_path):
  c = config(tmp_path, [json.dumps(GOOD[0])], on_bad_row="skip")
  with pytest.raises(ConfigError, match="input.on_bad_row is 'skip'; allowed: error, drop"):
    make(c, tmp_path)
