"""Classification by scoring: scores are the model's log-probs of the options, whatever the batches, and are counted."""

import dataclasses
import functools
import json
import re
import types

import jax
import numpy as np
import pytest

from evaluators import classify, common, questions
from evaluators.classify import confusion, metrics
from input_pipeline.examples.prompts import Prompter
from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from tests.evaluators import digits
from tests.models.initial import initial
from trainer.config import checks as config_checks
from trainer.config import evaluator
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError, DataError
from trainer.generate import image_tokens
from trainer.report import pages
from trainer.telemetry.writers import MultiWriter

OPTIONS = ("one", "one two", "three")
ROWS = [*(dict(image=digits.encoded(digits.picture(n // 2)), prefix=f"q{n % 2}", suffix=OPTIONS[n % 3],
               choices=OPTIONS[::-1]) for n in range(5)),
        dict(prefix="no picture", suffix="three", choices=OPTIONS[1:])]


def make(tmp_path, rows=ROWS, mesh=None, **changed):
  config = digits.config(tmp_path, rows)
  config.model.final_logit_cap = 2.0
  config.evals.which = evaluator(**(dict(type="classify", split="all", options=OPTIONS, batch_size=4) | changed))
  config = config_checks.View(config_checks.resolve(config))
  model = digits.model(config)
  mesh = mesh or jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
  setup = common.Setup(config, model, BytesTokenizer(), mesh, tmp_path, MultiWriter())
  params = jax.tree.map(lambda p: 4 * p, initial(model))
  return common.make("which", config.evals.which, setup), model, params


def table(tmp_path, step):
  return [json.loads(line) for line in (tmp_path / "samples" / f"which-{step}.jsonl").read_text().splitlines()]


ROOM = 64  # of one text, so that all share a program


@functools.cache
def jitted_logits(model):
  return jax.jit(model.logits)


def expected(ev, model, params, question, option, ends):
  """(the sum, the number of terms) of the log-probs of an option, from logits of its text alone in a row; if there are
  ends, with that of any of them."""
  prompt = ev._questions[question].prompt
  layout = image_tokens.layout_of(model)
  ids = np.concatenate([prompt.ids, np.frombuffer(option.encode(), np.uint8), ends[:1]]).astype(np.int32)
  batch = image_tokens.empty(layout, 1, ROOM, image_tokens.slots(len(prompt.images)))
  image_tokens.put(layout, batch, image_tokens.of_text(layout, ids, prompt.images, len(prompt.ids), ""), 0)
  text = np.arange(ROOM) < len(ids)
  batch |= dict(tokens=np.pad(ids, (0, ROOM - len(ids)))[None], segment_ids=text[None].astype(np.int32))
  logprobs = jax.nn.log_softmax(jitted_logits(model)(params, batch))[0]
  at = np.arange(len(prompt.ids), len(ids))
  terms = np.asarray(logprobs)[at - 1, ids[at]]
  if ends:
    terms[-1] = np.logaddexp.reduce(np.asarray(logprobs)[at[-1] - 1, list(ends)])
  return float(terms.sum()), len(at)


class EndsTurns(Prompter):
  """Of a template with an end of its own."""

  def __init__(self, *given):
    super().__init__(*given)
    self.stop_ids = (*self.stop_ids, 7)


@pytest.mark.host_patches  # which ends there are is no part of the model
@pytest.mark.parametrize("score, with_end", [("sum", True), ("mean", True), ("sum", False)])
def test_scores_are_log_probs_of_the_options(tmp_path, monkeypatch, score, with_end):
  monkeypatch.setattr(classify, "Prompter", EndsTurns)
  ev, model, params = make(tmp_path, score=score, with_end=with_end)
  found, rows = dict(ev.run(params, 3)), table(tmp_path, 3)
  for number, row in enumerate(rows):
    for option, value in zip(row["options"], row["scores"], strict=True):
      total, count = expected(ev, model, params, number, option, (BytesTokenizer.eos_id, 7) if with_end else ())
      np.testing.assert_allclose(value, total / (count if score == "mean" else 1), atol=1e-4)
    assert row["taken"] == row["options"][int(np.argmax(row["scores"]))] and row["correct"] == (
        row["taken"] == row["answer"])
    shares = np.exp(row["scores"]) / np.exp(row["scores"]).sum()
    np.testing.assert_allclose(row["nll"], -np.log(shares[row["options"].index(row["answer"])]))
  assert found == dict(metrics(rows)) and found["accuracy"] == np.mean([row["correct"] for row in rows])


@pytest.mark.devices(8)
def test_values_depend_neither_on_the_batch_size_nor_on_the_mesh(tmp_path):
  ev, _, params = make(tmp_path)
  base = dict(ev.run(params, 0))
  for changed in (dict(batch_size=1), dict(batch_size=16),
                  dict(batch_size=8, mesh=mesh_lib.make_mesh(dict(data=2, fsdp=2, tensor=2)))):
    other = dict(make(tmp_path, **changed)[0].run(params, 0))
    assert other["accuracy"] == base["accuracy"] and other["nll"] == pytest.approx(base["nll"], rel=1e-5)


def test_options_of_each_record_and_images_that_matter(tmp_path):
  ev, _, params = make(tmp_path, options=(), options_key="choices")
  dict(ev.run(params, 1))
  rows = table(tmp_path, 1)
  assert [row["options"] for row in rows[4:]] == [list(OPTIONS[::-1]), list(OPTIONS[1:])]
  assert rows[0]["prompt"] == rows[2]["prompt"] and rows[0]["scores"] != rows[2]["scores"]  # other pictures
  page = (tmp_path / "samples" / "which-1.html").read_text()
  assert page.count("<img") == 5 and page.count('class="card ') == 6


@pytest.mark.host_patches
def test_people_are_shown_what_was_taken_and_what_is_right(tmp_path, monkeypatch):
  written = []
  monkeypatch.setattr(pages, "MOST_CARDS", 4)
  ev, _, params = make(tmp_path)
  ev._setup = dataclasses.replace(ev._setup, writer=types.SimpleNamespace(write_texts=lambda *of: written.append(of)))
  found = dict(ev.run(params, 5))
  rows = table(tmp_path, 5)
  assert [row["prompt"] for row in rows] == ["q0\n", "q1\n", "q0\n", "q1\n", "q0\n", "no picture\n"]
  assert all(row["options"] == list(OPTIONS) for row in rows) and len({row["correct"] for row in rows}) == 2
  assert [row["answer"] for row in rows] == [OPTIONS[n % 3] for n in range(5)] + ["three"]
  (step, texts), = written
  shown = (tmp_path / "samples" / "which-5.txt").read_text().removesuffix("\n")
  assert (step, texts) == (5, {"eval/which": shown})
  notes, *blocks = shown.split("\n\n--- ")
  assert notes == "\n".join([f"accuracy {found['accuracy']:.4f}", f"nll {found['nll']:.4f}", "", *confusion(rows)])
  for row, block in zip(rows, blocks, strict=True):
    assert block == (f"{row['where']}, {'right' if row['taken'] == row['answer'] else 'wrong'}: {row['taken']!r}, "
                     f"the answer is {row['answer']!r}\n{row['prompt']}")
  page = (tmp_path / "samples" / "which-5.html").read_text()
  assert ">which, step 5<" in page and "the first 4 of 6 examples" in page and f"nll {found['nll']:.4f}" in page
  cards = re.findall(r'class="card (right|wrong)"', page)
  assert cards == ["right" if row["taken"] == row["answer"] else "wrong" for row in rows[:4]]


def test_batches_are_those_of_a_micro_batch_unless_the_config_says_so(tmp_path):
  config = digits.config(tmp_path, ROWS, batch_size=12, grad_accum_steps=3)
  mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
  for given, wanted in ((None, 4), (5, 5)):
    config.evals.which = evaluator(type="classify", split="all", options=OPTIONS, batch_size=given)
    view = config_checks.View(config_checks.resolve(config))
    setup = common.Setup(view, digits.model(view), BytesTokenizer(), mesh, tmp_path, MultiWriter())
    assert common.make("which", view.evals.which, setup)._batch_size == wanted


def test_confusions_are_counted():
  rows = [dict(answer=a, taken=t) for a, t in ("ab", "aa", "aa", "bb", "ac")]
  assert confusion(rows)[1:] == ["'a': 'a' 2, 'b' 1, 'c' 1", "'b': 'b' 1"]


@pytest.mark.parametrize("changed, error, message", [
    (dict(score="max"), ConfigError, "evals.which.score is 'max'; allowed: sum, mean"),
    (dict(options=()), ConfigError, "set one of them"),
    (dict(options_key="choices"), ConfigError, "set one of them"),
    (dict(options=("one", "three")), DataError, "data.jsonl:2: the answer is 'one two'; evals.which wants it"),
    (dict(options=("one", "one")), DataError, "needs at least two, each once"),
    (dict(options=(), options_key="what"), DataError, "data.jsonl:1: no key 'what'; expected a list of texts"),
    (dict(options=(*OPTIONS, "")), DataError, "data.jsonl:1: option 3 is empty"),
    (dict(options=(*OPTIONS, "x" * 60)), DataError, "data.jsonl:1: with option 3 .* more than seq_len=64")])
def test_what_cannot_be_classified_is_refused(tmp_path, changed, error, message):
  with pytest.raises(error, match=message):
    make(tmp_path, **changed)


@pytest.mark.parametrize("options, answer, found", [
    (("yes", "no"), "no", 1), ((" yes", "no "), "yes", 0), (("yes", "no"), " no ", 1), (("yes", "no"), "maybe", None),
    (("yes",), "yes", None), (("yes", "yes"), "yes", None)])
def test_the_right_option_is_the_one_that_reads_as_the_answer(options, answer, found):
  question = questions.Question(types.SimpleNamespace(where="a:1"), (answer,), None)
  if found is None:
    with pytest.raises(DataError, match="a:1: the (answer|options)"):
      classify._right(question, options, "evals.val")
  else:
    assert classify._right(question, options, "evals.val") == found


def test_several_answers_are_no_option():
  question = questions.Question(types.SimpleNamespace(where="a:1"), ("yes", "no"), None)
  with pytest.raises(DataError, match="a:1: the answer is 'yes | no'; evals.val wants it to be one of the options"):
    classify._right(question, ("yes", "no"), "evals.val")


@pytest.mark.parametrize("seq_len, told", [(8, None), (7, "with option 1 8 tokens, more than seq_len=7")])
def test_a_text_may_be_as_long_as_a_row(seq_len, told):
  """Prompts of 5 tokens, options of 2 and 3."""
  made = classify.Classify.__new__(classify.Classify)
  made._setup = types.SimpleNamespace(config=types.SimpleNamespace(seq_len=seq_len))
  made._questions = [questions.Question(types.SimpleNamespace(where="a:1"), ("xx",), None)]
  made._options = [("xx", "yyy")]
  prompter = types.SimpleNamespace(answered=lambda prompt, text: (np.arange(5 + len(text)), 5))
  if told is not None:
    with pytest.raises(DataError, match=f"a:1: {told}"):
      made._make_rows(prompter)
    return
  rows, prefixes = made._make_rows(prompter)
  assert [(question, option, len(ids)) for question, option, ids in rows] == [(0, 1, 8), (0, 0, 7)]
  assert prefixes == {(0, 0): 5, (0, 1): 5}
