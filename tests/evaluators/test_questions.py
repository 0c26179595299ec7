"""Which questions are asked, and which answers are right."""

import json
from types import SimpleNamespace

import pytest

from evaluators import questions
from input_pipeline.files import Record
from tests.evaluators.test_common import config
from trainer.config import evaluator, source
from trainer.errors import ConfigError, DataError


class Prompter:
  """A prompt is the record's question, with how its one answer is; that its text column is empty does not matter."""

  def record(self, record, prompt_key, answer_key):
    return SimpleNamespace(text=record.fields[prompt_key], answer=record.fields.get(answer_key), images=())


def asked(tmp_path, max_documents=None, split="all", **files):
  cfg = evaluator(type="generate", split=split, max_documents=max_documents, max_new_tokens=4)
  cfg.prompt_key, cfg.answer_key = "q", "a"
  for name, rows in files.items():
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(dict(q=q, a=a, text="")) + "\n" for q, a in rows))
  c = config()
  c.input.sources = {name: source(type="jsonl", path=str(tmp_path / f"{name}.jsonl"), split="train") for name in files}
  found = questions.read("val", cfg, SimpleNamespace(config=c), Prompter())
  return [(question.prompt.text, question.answers) for question in found]


def test_the_questions_of_all_sources_come_by_their_names(tmp_path):
  files = dict(b=[("4?", "four"), ("5?", ["five", 5])], a=[("1?", "one"), ("2?", "two"), ("3?", "three")])
  found = asked(tmp_path, **files)
  assert sorted(found[:3]) == [("1?", ("one",)), ("2?", ("two",)), ("3?", ("three",))]
  assert sorted(found[3:]) == [("4?", ("four",)), ("5?", ("five", "5"))]
  one_of_each = asked(tmp_path, max_documents=1, **files)
  assert len(one_of_each) == 2 and one_of_each[0] in found[:3] and one_of_each[1] in found[3:]


def test_bad_rows_are_left_out_if_the_config_says_so_and_told_otherwise(tmp_path):
  (tmp_path / "a.jsonl").write_text('{"q": "1?", "a": "one"}\n{bad\n{"q": "2?", "a": []}\n')
  cfg = evaluator(type="generate", split="all", max_new_tokens=4, prompt_key="q", answer_key="a")
  c = config()
  c.input.sources = {"a": source(type="jsonl", path=str(tmp_path / "a.jsonl"), split="train")}
  with pytest.raises(DataError, match=r"2 of 3 rows.*cannot be used:\n.*a.jsonl:2: not valid.*\n.*a.jsonl:3: 'a' is"):
    questions.read("val", cfg, SimpleNamespace(config=c), Prompter())
  c.input.update(on_bad_row="drop", max_bad_rows=0.7)
  found, = questions.read("val", cfg, SimpleNamespace(config=c), Prompter())
  assert found.answers == ("one",) and found.record.fields == {"q": "1?", "a": "one"}


def test_of_each_source_only_the_split_is_asked(tmp_path):
  rows = [(f"{n}?", str(n)) for n in range(200)]
  train, validation = (asked(tmp_path, split=split, a=rows) for split in ("train", "validation"))
  assert 0 < len(validation) < len(train) and sorted(train + validation) == sorted(asked(tmp_path, a=rows))


@pytest.mark.parametrize("prompt_key, answer_key", [("q", None), (None, "a")])
def test_one_key_without_the_other_is_refused(prompt_key, answer_key):
  cfg = SimpleNamespace(prompt_key=prompt_key, answer_key=answer_key)
  with pytest.raises(ConfigError, match=f"prompt_key={prompt_key!r} and answer_key={answer_key!r}; set both or none"):
    questions.read("val", cfg, None, None)


@pytest.mark.parametrize("fields, found", [
    (dict(a=["x", 2, 0.5]), ("x", "2", "0.5")), (dict(a=[{"answer": "x"}, {"answer": "y"}]), ("x", "y")),
    (dict(a=[]), "'a' is ..;"), (dict(a="x"), "'a' is 'x'"), (dict(a=["x", None]), "'a' is .'x', None"),
    (dict(a=[True]), "'a' is .True"), (dict(b=["x"]), "no key 'a'")])
def test_answers_are_texts_or_numbers(fields, found):
  record = Record("rows.jsonl:3", "rows.jsonl:3", fields)
  if isinstance(found, tuple):
    assert questions.strings(record, "a") == found
    return
  with pytest.raises(DataError, match=f"rows.jsonl:3: {found}.*expected a list of texts"):
    questions.strings(record, "a")


@pytest.mark.parametrize("images, expected", [
    ((0, 0, 0, 0, 0), [(0, None)]), ((0, 1, 0, 2, 0), [(0, [0, 1]), (2, [0, 2]), (4, [0])])])
def test_images_are_decoded_a_part_of_the_questions_at_a_time(images, expected, monkeypatch):
  monkeypatch.setattr(questions, "DECODED", 2)
  given = [SimpleNamespace(prompt=SimpleNamespace(images=["image"] * n)) for n in images]
  found = [(begin, part and [len(some) for some in part]) for begin, part in questions.in_parts(given)]
  assert found == expected
