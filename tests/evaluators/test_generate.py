"""Scored generation: the numbers can be computed again from the table, and prompts and answers are what records say."""

import dataclasses
import itertools
import json
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from evaluators import common, generate, questions
from evaluators.generate import metrics, pass_at_k
from input_pipeline.examples.prompts import Prompter
from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from models import api
from tests import tiny
from tests.evaluators import digits
from tests.models.initial import initial
from tests.trainer.report.test_pages import pictures
from trainer.config import checks as config_checks
from trainer.config import evaluator, source
from trainer.errors import ConfigError, DataError
from trainer.generate.completion import Completion
from trainer.telemetry.writers import MultiWriter

GSM8K = r"####\s*(-?[\d,.]+)"
ROWS = [dict(question=f"{a}+{b}?", answer=f"Add.\n#### {a + b}") for a, b in itertools.product(range(3), range(2))]


def make(tmp_path, rows=ROWS, chat=None, **changed):
  path = tmp_path / "data.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
  config = tiny.config(tmp_path, seed=11)
  given = dict(prompt_key="question", answer_key="answer", extract=GSM8K, max_new_tokens=5, num_samples=3,
               pass_at=(1, 2), sources=dict(main=source(type="jsonl", path=str(path))))
  config.evals.math = evaluator(type="generate", **{**given, **changed})
  config.chat.template = chat
  config = config_checks.View(config_checks.resolve(config))
  tokenizer = BytesTokenizer()
  model = api.make_model(config.model, vocab_size=tokenizer.vocab_size, params_dtype="float32", compute_dtype="float32")
  setup = common.Setup(config, model, tokenizer, None, tmp_path, MultiWriter())
  return common.make("math", config.evals.math, setup), model, tokenizer


class Scripted:
  """A sampler that says what it is told to, one text a sample."""

  def __init__(self, said):
    self.said = said

  def generate(self, params, prompts, *, num_samples, **options):
    self.asked = params, prompts, num_samples, options
    found = []
    for number, text in enumerate(self.said):
      ids = np.array([*text.encode(), 257], np.int32)
      found.append(Completion(*divmod(number, num_samples), ids, np.full(len(ids), -0.5, np.float32),
                              np.full(len(ids), -0.5, np.float32), "stop"))
    return found


def table(tmp_path, step):
  return [json.loads(line) for line in (tmp_path / "samples" / f"math-{step}.jsonl").read_text().splitlines()]


def test_numbers_can_be_computed_again_from_the_table(tmp_path):
  ev, *_ = make(tmp_path, temperature=0.75, top_k=4, top_p=0.5, min_p=0.25)
  # The answers are 0, 1, 1, 2, 2, 3; right are 3, 0, 1, 2, 0, 0 of three samples.
  said = ["#### 0", "#### 0.", "x #### 9 #### 0,", "0", "", "#### 3", "#### 1.0", "#### 12", "####1 no",
          "#### 2", "#### $2", "####  2", "2", "2", "2", "#### -3", "3 ####", "#### 30"]
  ev._sampler = Scripted(said)
  found = dict(ev.run("parameters", 40))
  params, prompts, count, options = ev._sampler.asked
  assert (params, count, [BytesTokenizer().decode(ids) for ids in prompts]) == (
      "parameters", 3, [row["question"] for row in ROWS])
  options["stop_ids"] = tuple(options["stop_ids"])
  assert options == dict(max_new_tokens=5, stop_ids=(257,), seed=11, temperature=0.75, top_k=4, top_p=0.5, min_p=0.25)
  rows = table(tmp_path, 40)
  right = np.array([row["correct"] for row in rows]).reshape(6, 3)
  np.testing.assert_array_equal(right.sum(1), [3, 0, 2, 2, 0, 0])
  assert found["accuracy"] == right.mean() == found["pass@1"]
  pairs = [[right[p, i] or right[p, j] for i, j in itertools.combinations(range(3), 2)] for p in range(6)]
  np.testing.assert_allclose(found["pass@2"], np.mean(pairs))
  assert found["stopped"] == 1.0 and found["length"] == np.mean([len(text) + 1 for text in said])
  assert dict(metrics(rows, (1, 2))) == found
  first = rows[0]
  assert (first["prompt"], first["completion"], first["answer"], first["extracted"]) == ("0+0?", "#### 0", "0", "0")
  assert first["where"].endswith("data.jsonl:1") and first["logprob"] == -0.5 * 7
  shown = (tmp_path / "samples" / "math-40.txt").read_text()
  assert "right: '0', the answer is '0'\n0+0?\n>>> #### 0" in shown and "wrong: None" in shown


def test_the_sampler_is_asked_for_all_that_the_config_says_and_people_are_shown_it(tmp_path, monkeypatch):
  asked, written = [], []

  class Sampler:
    def __init__(self, model, mesh, rows):
      asked.append((model.vocab_size, mesh, rows))

    def check(self, prompts, new, where):
      asked.append((list(map(len, prompts)), new, where))

    def generate(self, params, prompts, *, stop, **given):
      asked.append((stop.strings, {**given, "stop_ids": set(given["stop_ids"])}))
      found = []
      for prompt, sample in itertools.product(range(len(prompts)), range(2)):
        ids = np.array([*f"#### {prompt}{sample + 5}."[sample:].encode()], np.int32)
        logprobs = np.full(len(ids), -0.25 - sample, np.float32)
        ended = ("stop", ".") if prompt else ("length", None)
        found.append(Completion(prompt, sample, ids, logprobs, 2 * logprobs, *ended))
      return found

  class EndsTurns(Prompter):
    """Of a template with an end of its own."""

    def __init__(self, *given):
      super().__init__(*given)
      self.stop_ids = (*self.stop_ids, 7)

  monkeypatch.setattr(generate, "Sampler", Sampler)
  monkeypatch.setattr(generate, "Prompter", EndsTurns)
  rows = [dict(question="a", answer="#### 0"), dict(question="bcd", answer=["15.", "7"])]
  ev, model, tokenizer = make(tmp_path, rows, stop=(".",), keep_stop=True, batch_size=4, num_samples=2, pass_at=(2,),
                              temperature=0.5, top_k=3, top_p=0.75, min_p=0.125)
  ev._setup = dataclasses.replace(ev._setup, writer=SimpleNamespace(write_texts=lambda *of: written.append(of)))
  found = dict(ev.run(None, 40))
  assert asked == [(model.vocab_size, None, 4), ([2, 4], 5, "evals.math."), ((".",), dict(
      num_samples=2, max_new_tokens=5, stop_ids={tokenizer.eos_id, 7}, seed=11, temperature=0.5, top_k=3, top_p=0.75,
      min_p=0.125))]
  # Samples 0 have the mark, samples 1 do not.
  assert found == {"accuracy": 0.25, "pass@2": 0.5, "stopped": 0.5, "length": 7.5}
  assert [(row["prompt_index"], row["sample"], row["completion"], row["extracted"], row["answer"], row["score"],
           row["tokens"], row["logprob"], row.get("stop_reason")) for row in table(tmp_path, 40)] == [
      (0, 0, "#### 05.", "5", "0", 0.0, 8, -2.0, None), (0, 1, "### 06.", None, "0", 0.0, 7, -8.75, None),
      (1, 0, "#### 15.", "15", ["15", "7"], 1.0, 8, -2.0, "."),
      (1, 1, "### 16.", None, ["15", "7"], 0.0, 7, -8.75, ".")]
  (step, texts), = written
  assert step == 40 and texts["eval/math"] == (tmp_path / "samples" / "math-40.txt").read_text().removesuffix("\n")
  assert "data.jsonl:1, length, wrong: '5'" in texts["eval/math"] and "stop at '.', right: '15'" in texts["eval/math"]
  page = (tmp_path / "samples" / "math-40.html").read_text()
  assert all(part in page for part in (
      ">math, step 40<", "accuracy 0.2500\npass@2 0.5000\n", "4 examples", "data.jsonl:1, sample 1<", "15 | 7",
      "stop at &#39;.&#39;"))
  right, = re.findall(r'class="card right"><h3>right: \S*/data.jsonl(:\d, sample \d)<', page)
  assert right == ":2, sample 0" and page.count('class="card wrong"') == 3
  asked.clear()
  make(tmp_path)
  assert asked[0][2] == 32


def test_a_model_generates_and_the_draws_are_the_same_at_every_step(tmp_path):
  ev, model, _ = make(tmp_path, max_documents=3, temperature=1.0)
  params = initial(model)
  found = dict(ev.run(params, 1))
  assert found.keys() == {"accuracy", "pass@1", "pass@2", "stopped", "length"} and 1 <= found["length"] <= 5
  assert dict(ev.run(params, 2)) == found and table(tmp_path, 1) == table(tmp_path, 2)
  rows = table(tmp_path, 1)
  assert len(rows) == 9 and len({row["completion"] for row in rows}) > 3
  assert sorted({row["prompt"] for row in rows}) == ["0+1?", "1+1?", "2+1?"]  # evenly spaced


def test_prompts_and_answers_of_each_shape(tmp_path):
  asked = {"role": "user", "content": "2+3?"}
  said = {"role": "assistant", "content": "5"}
  rows = [dict(messages=[asked, said, asked, {"role": "assistant", "content": "still 5"}]),
          dict(prompt="2+3=", completion="5"), dict(prompt=[asked], completion=[said]),
          dict(instruction="2+3?", output="5"), dict(conversations=[{"from": "human", "value": "2+3?"},
                                                                    {"from": "gpt", "value": "5"}])]
  ev, _, tokenizer = make(tmp_path, rows, "plain", prompt_key=None, answer_key=None, extract=None)
  prompts = [question.prompt for question in ev._questions]
  question = "User: 2+3?\nAssistant:"
  history = "<|bos|>User: 2+3?\nAssistant: 5<|eos|>\n"
  assert [p.text for p in prompts] == [history + question, "2+3=", *["<|bos|>" + question] * 3]
  assert [p.answer for p in prompts] == ["still 5", "5", "5", "5", "5"]
  assert prompts[1].ids.tolist() == [tokenizer.bos_id, *b"2+3="]
  assert prompts[2].ids.tolist() == [tokenizer.bos_id, *question.encode()]


@pytest.mark.parametrize("rows, changed, error, message", [
    ([dict(text="a")], dict(prompt_key=None, answer_key=None), DataError, "data.jsonl:1: is a text, without a prompt"),
    ([dict(question="a")], {}, DataError, "data.jsonl:1: no key 'answer'; found 'question'"),
    ([dict(question="a", answer=None)], {}, DataError, "'answer' must be a string or a number, found NoneType"),
    (ROWS, dict(answer_key=None), ConfigError, "prompt_key='question' and answer_key=None; set both"),
    (ROWS, dict(pass_at=(1, 4)), ConfigError, "evals.math.pass_at: found 4, allowed: whole numbers from 1 to"),
    (ROWS, dict(num_samples=0, pass_at=()), ConfigError, "evals.math: found num_samples=0, max_new_tokens="),
    (ROWS, dict(max_new_tokens=0), ConfigError, "max_new_tokens=0; allowed: 1 or more"),
    (ROWS, dict(temperature=0.0), ConfigError, "temperature 0 makes all 3 samples of a prompt the same"),
    (ROWS, dict(top_p=1.5), ConfigError, "evals.math.top_p: found 1.5"),
    (ROWS, dict(extract="("), ConfigError, "evals.math.extract: '\\(' is no regex"),
    ([dict(messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])],
     dict(prompt_key=None, answer_key=None), ConfigError, "no chat template"),
])
def test_what_cannot_be_evaluated_is_refused(tmp_path, rows, changed, error, message):
  with pytest.raises(error, match=message):
    make(tmp_path, rows, **changed)


def test_pass_at_k_is_the_mean_over_all_choices_of_k():
  for n, c, k in ((5, 2, 1), (5, 2, 3), (4, 0, 2), (4, 4, 4), (6, 1, 6)):
    right = [True] * c + [False] * (n - c)
    np.testing.assert_allclose(pass_at_k(n, c, k), np.mean([any(x) for x in itertools.combinations(right, k)]))


# ---------------------------------------------------------------------------------------------- several answers, images


def test_any_of_several_answers_is_right(tmp_path):
  rows = [dict(question="a", answer=["red", "dark red"]), dict(question="b", answer=[{"answer": "7"}, {"answer": "8"}])]
  ev, *_ = make(tmp_path, rows, extract=None, num_samples=2, pass_at=(1,))
  ev._sampler = Scripted(["dark red", "dark", "8.0", "78"])
  found = dict(ev.run(None, 1))
  assert [row["correct"] for row in table(tmp_path, 1)] == [True, False, True, False] and found["accuracy"] == 0.5
  assert table(tmp_path, 1)[0]["answer"] == ["red", "dark red"]


def test_vqa_accuracy_is_the_mean_of_what_answers_are_worth(tmp_path):
  ten = ["two"] * 2 + ["2 dogs"] * 5 + ["three"] + ["dogs"] * 2
  ev, *_ = make(tmp_path, [dict(question="a", answer=ten)], extract=None, num_samples=3, pass_at=(1,), match="vqa")
  ev._sampler = Scripted(["The 2 dogs.", "2", "cats"])
  found = dict(ev.run(None, 1))
  worth = [1.0, (2 * 1 / 3 + 8 * 2 / 3) / 10, 0.0]
  assert [row["score"] for row in table(tmp_path, 1)] == pytest.approx(worth)
  assert found["accuracy"] == pytest.approx(np.mean(worth)) and found["pass@1"] == pytest.approx(1 / 3)


def test_answers_that_are_no_texts_are_refused(tmp_path):
  with pytest.raises(DataError, match="data.jsonl:1: 'answer' is .None.; expected a list of texts"):
    make(tmp_path, [dict(question="a", answer=[None])])
  with pytest.raises(ConfigError, match="evals.math.match is 'some'; allowed: exact, vqa"):
    make(tmp_path, match="some")


@pytest.mark.host_patches
def test_questions_about_images_and_their_page(tmp_path, monkeypatch):
  """Each question is asked with its own picture, also where pictures are decoded a few at a time."""
  monkeypatch.setattr(questions, "DECODED", 2)
  images = [digits.picture(n) for n in range(3)]
  rows = [dict(image=digits.encoded(image), prefix=f"what {n}?", suffix="x") for n, image in enumerate(images)]
  config = digits.config(tmp_path, rows)
  config.evals.math = evaluator(type="generate", split="all", max_new_tokens=6, temperature=1.0)
  config = config_checks.View(config_checks.resolve(config))
  model = digits.model(config)
  setup = common.Setup(config, model, BytesTokenizer(), None, tmp_path, MultiWriter())
  ev = common.make("math", config.evals.math, setup)
  params = jax.tree.map(lambda p: 3 * p, initial(model))
  dict(ev.run(params, 1))
  found = table(tmp_path, 1)
  assert [row["prompt_index"] for row in found] == [0, 1, 2] and len({row["completion"] for row in found}) == 3
  assert [(row["prompt"], row["where"][-2:]) for row in found] == [(f"what {n}?\n", f":{n + 1}") for n in range(3)]
  prompt = Prompter(config, BytesTokenizer()).text("what 1?\n", images=[rows[1]["image"]])
  alone, = ev._sampler.generate(params, [prompt.ids], images=[list(prompt.images)], max_new_tokens=6, stop_ids=[257],
                                seed=config.seed)
  assert BytesTokenizer().decode(alone.text_ids) == found[1]["completion"]
  for shown, expected in zip(pictures((tmp_path / "samples" / "math-1.html").read_text()), images, strict=True):
    np.testing.assert_array_equal(shown, expected)
