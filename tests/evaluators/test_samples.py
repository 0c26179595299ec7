"""Text samples: they continue the prompts, and are a function of the seed and the step."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evaluators import common, samples
from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from models import api
from tests import tiny
from tests.models.initial import initial
from trainer.config import checks as config_checks
from trainer.config import evaluator
from trainer.errors import ConfigError
from trainer.generate.completion import Completion
from trainer.telemetry.writers import MultiWriter


def make(tmp_path, **changed):
  config = tiny.config(tmp_path, seed=9)
  config.evals.text = evaluator(type="samples", **{"prompts": ("the quick", "a"), "max_new_tokens": 6, **changed})
  config = config_checks.View(config_checks.resolve(config))
  tokenizer = BytesTokenizer()
  model = api.make_model(config.model, vocab_size=tokenizer.vocab_size, params_dtype="float32", compute_dtype="float32")
  setup = common.Setup(config, model, tokenizer, None, tmp_path, MultiWriter())
  return common.make("text", config.evals.text, setup), model, initial(model), tokenizer


def test_samples_are_written_and_a_function_of_seed_and_step(tmp_path):
  ev, _, params, _ = make(tmp_path)
  first = dict(ev.run(params, 3))
  text = (tmp_path / "samples" / "text_00000003.txt").read_text()
  assert "--- 'the quick'\nthe quick" in text and 0 < first["new_tokens"] <= 6
  dict(ev.run(params, 3))
  assert (tmp_path / "samples" / "text_00000003.txt").read_text() == text
  dict(ev.run(params, 4))
  assert (tmp_path / "samples" / "text_00000004.txt").read_text() != text


def test_every_token_is_written_with_the_log_prob_that_the_model_gives_it(tmp_path):
  ev, model, params, tokenizer = make(tmp_path, temperature=0.7)
  dict(ev.run(params, 3))
  rows = [json.loads(line) for line in (tmp_path / "samples" / "text_00000003.jsonl").read_text().splitlines()]
  text = (tmp_path / "samples" / "text_00000003.txt").read_text()
  assert [row["prompt"] for row in rows] == ["the quick", "a"]
  for row, prompt in zip(rows, ev._ids, strict=True):
    assert len(row["tokens"]) == len(row["ids"]) == len(row["logprobs"]) > 0 and row["temperature"] == 0.7
    assert f"--- {row['prompt']!r}\n{row['prompt']}{row['completion']}\n" in text
    assert "".join(row["tokens"]) == tokenizer.decode(row["ids"], skip_special=False)
    ids = jnp.array([[*prompt, *row["ids"]]])
    batch = {"tokens": ids, "positions": jnp.arange(ids.shape[1])[None], "segment_ids": jnp.ones_like(ids)}
    hidden = model.apply(params, batch).hidden
    logits = (hidden @ model.unembedding(params))[0, len(prompt) - 1:-1, :tokenizer.vocab_size]
    expected = jax.nn.log_softmax(logits / 0.7)[jnp.arange(len(row["ids"])), jnp.array(row["ids"])]
    np.testing.assert_allclose(row["logprobs"], expected, atol=2e-4)


def test_what_the_reference_writes_from_the_same_draws_stands_beside(tmp_path):
  ev, model, params, _ = make(tmp_path)
  dict(ev.run(params, 1, params))
  same = [block.split("\n--- the reference\n") for block in
          (tmp_path / "samples" / "text_00000001.txt").read_text().removesuffix("\n").split("\n\n--- ")]
  assert len(same) == 2 and all(ours.endswith(theirs) for ours, theirs in same)
  dict(ev.run(params, 1, initial(model, 1)))
  blocks = (tmp_path / "samples" / "text_00000001.txt").read_text().split("\n\n--- ")
  assert not all(ours.endswith(theirs) for ours, theirs in (b.split("\n--- the reference\n") for b in blocks))


def test_a_sample_ends_with_the_document(tmp_path):
  """With an unembedding that makes EOS the most likely token everywhere, nothing but it is generated, or shown."""
  ev, _, params, tokenizer = make(tmp_path, temperature=0.0)
  params = jax.tree.map(lambda x: x * 0, params)
  params["final_norm"]["scale"] += 1
  # With all else 0, hidden states are the normalised embeddings of the tokens.
  params["embed"]["embedding"] = params["embed"]["embedding"].at[:].set(1.0).at[tokenizer.eos_id].set(2.0)
  assert dict(ev.run(params, 0)) == {"new_tokens": 1.0}
  assert (tmp_path / "samples" / "text_00000000.txt").read_text() == "--- 'the quick'\nthe quick\n\n--- 'a'\na\n"


def test_the_sampler_is_asked_for_all_that_the_config_says_and_the_table_has_all_that_it_says(tmp_path, monkeypatch):
  asked = []

  class Sampler:
    def __init__(self, model, mesh, rows):
      asked.append((model.vocab_size, mesh, rows))

    def check(self, prompts, new, where):
      asked.append(([ids.tolist() for ids in prompts], new, where))

    def generate(self, params, prompts, *, stop_ids, stop, **given):
      asked.append((params, [ids.tolist() for ids in prompts], set(stop_ids), stop.strings, given))
      ids = np.array([*f"{params},".encode()], np.int32)
      logprobs = -np.arange(1.0, len(ids) + 1, dtype=np.float32) / 4
      return [Completion(0, 0, ids, logprobs, logprobs - 1, "stop", ","),
              Completion(1, 0, ids[:2], logprobs[:2], logprobs[:2] - 1, "length")]

  monkeypatch.setattr(samples, "Sampler", Sampler)
  ev, model, _, tokenizer = make(tmp_path, stop=(",",), keep_stop=True, temperature=0.25, batch_size=3)
  dict(ev.run("ab", 5, "xyz"))
  prompts = [[tokenizer.bos_id, *b"the quick"], [tokenizer.bos_id, *b"a"]]
  given = dict(max_new_tokens=6, temperature=0.25, seed="9/5")
  assert asked == [(model.vocab_size, None, 3), (prompts, 6, "evals.text."), *(
      (params, prompts, {tokenizer.eos_id}, (",",), given) for params in ("ab", "xyz"))]
  ours = dict(completion="ab,", finish_reason="stop", stop_reason=",", tokens=["a", "b", ","], ids=[97, 98, 44],
              logprobs=[-0.25, -0.5, -0.75])
  theirs = dict(completion="xyz,", finish_reason="stop", stop_reason=",", tokens=["x", "y", "z", ","],
                ids=[120, 121, 122, 44], logprobs=[-0.25, -0.5, -0.75, -1.0])
  cut = [dict(completion=text, finish_reason="length", tokens=[*text], ids=[*text.encode()], logprobs=[-0.25, -0.5])
         for text in ("ab", "xy")]
  rows = [json.loads(line) for line in (tmp_path / "samples" / "text_00000005.jsonl").read_text().splitlines()]
  assert rows == [dict(prompt="the quick", temperature=0.25, **ours, reference=theirs),
                  dict(prompt="a", temperature=0.25, **cut[0], reference=cut[1])]
  asked.clear()
  make(tmp_path, batch_size=None)
  assert asked[0][2] == 32
  other = make(tmp_path, stop=(",",))[0]
  dict(other.run("ab", 5))
  rows = [json.loads(line) for line in (tmp_path / "samples" / "text_00000005.jsonl").read_text().splitlines()]
  assert [row["completion"] for row in rows] == ["ab", "ab"] and "reference" not in rows[0]


@pytest.mark.parametrize("changed, expected", [
    (dict(prompts=()), "prompts is empty"), (dict(temperature=-1.0), "evals.text.temperature: found -1.0")])
def test_what_cannot_be_sampled_is_refused(tmp_path, changed, expected):
  with pytest.raises(ConfigError, match=expected):
    make(tmp_path, **changed)


def test_what_is_drawn_is_of_the_step_and_its_length_has_the_end(tmp_path):
  """Completions of 3 tokens, the last a stop, and of 4; samples that the policy and its reference give."""
  asked = []

  def generate(params, prompts, **given):
    asked.append((params, given["seed"], given["max_new_tokens"]))
    return [Completion(n, 0, np.arange(3 + n, dtype=np.int32), -np.ones(3 + n, np.float32), -np.ones(3 + n, np.float32),
                       "length" if n else "stop") for n in range(len(prompts))]

  made = samples.Samples.__new__(samples.Samples)
  made._name, made._seed, made._new, made._temperature = "val", 5, 9, 0.5
  made._prompts, made._ids = ["a", "b"], [np.array([97]), np.array([98])]
  made._tokenizer, made._sampler = BytesTokenizer(), SimpleNamespace(generate=generate)
  made._stop = SimpleNamespace(options={}, text=lambda completion: f"said {len(completion.ids)}")
  written = []
  made._setup = SimpleNamespace(workdir=tmp_path, writer=SimpleNamespace(
      write_texts=lambda step, texts: written.append((step, list(texts)))))
  assert dict(made.run("policy", 7)) == {"new_tokens": 3.5}
  assert dict(made.run("policy", 8, "reference")) == {"new_tokens": 3.5}
  assert asked == [("policy", "5/7", 9), ("policy", "5/8", 9), ("reference", "5/8", 9)]
  assert written == [(7, ["eval/val"]), (8, ["eval/val"])]
  rows = [[json.loads(line) for line in (tmp_path / "samples" / f"val_{step:08d}.jsonl").read_text().splitlines()]
          for step in (7, 8)]
  assert ["reference" in row for row in rows[0] + rows[1]] == [False, False, True, True]
  assert [row["completion"] for row in rows[0]] == ["said 3", "said 4"]
