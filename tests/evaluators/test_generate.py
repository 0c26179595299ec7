"""Scored generation: the numbers can be computed again from the table, and prompts and answers are what records say."""

import itertools
import json

import jax
import numpy as np
import pytest

from evaluators import common
from evaluators.generate import metrics, pass_at_k
from input_pipeline.files import DataError
from input_pipeline.tokenizer import BytesTokenizer
from models import api
from tests import tiny
from trainer import config_checks
from trainer.config import ConfigError, evaluator, source
from trainer.metrics import MultiWriter

GSM8K = r"####\s*(-?[\d,.]+)"
ROWS = [dict(question=f"{a}+{b}?", answer=f"Add.\n#### {a + b}") for a, b in itertools.product(range(3), range(2))]


def make(tmp_path, rows=ROWS, chat=None, **changed):
  path = tmp_path / "data.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
  config = tiny.config(tmp_path)
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
    from trainer.sampler import Completion
    found = []
    for number, text in enumerate(self.said):
      ids = np.array([*text.encode(), 257], np.int32)
      found.append(Completion(*divmod(number, num_samples), ids, np.full(len(ids), -0.5, np.float32),
                              np.full(len(ids), -0.5, np.float32), "stop"))
    return found


def table(tmp_path, step):
  return [json.loads(line) for line in (tmp_path / "samples" / f"math-{step}.jsonl").read_text().splitlines()]


def test_numbers_can_be_computed_again_from_the_table(tmp_path):
  ev, *_ = make(tmp_path)
  # The answers are 0, 1, 1, 2, 2, 3; right are 3, 0, 1, 2, 0, 0 of three samples.
  said = ["#### 0", "#### 0.", "x #### 9 #### 0,", "0", "", "#### 3", "#### 1.0", "#### 12", "####1 no",
          "#### 2", "#### $2", "####  2", "2", "2", "2", "#### -3", "3 ####", "#### 30"]
  ev._sampler = Scripted(said)
  found = dict(ev.run(None, 40))
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


def test_a_model_generates_and_the_draws_are_the_same_at_every_step(tmp_path):
  ev, model, _ = make(tmp_path, max_documents=3, temperature=1.0)
  params = jax.jit(model.init)(jax.random.key(0))
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
  prompts = ev._prompts
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
