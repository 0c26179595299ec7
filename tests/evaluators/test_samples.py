"""Text samples: greedy ones are the teacher-forced argmax; drawn ones follow the softmax and the seed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evaluators import common, samples
from input_pipeline.tokenizer import BytesTokenizer
from models import api
from tests import tiny
from trainer import config_checks
from trainer.config import ConfigError, evaluator
from trainer.metrics import MultiWriter


def make(tmp_path, **changed):
  config = tiny.config(tmp_path)
  config.evals.text = evaluator(type="samples", **{"prompts": ("the quick", "a"), "max_new_tokens": 6, **changed})
  config = config_checks.View(config_checks.resolve(config))
  tokenizer = BytesTokenizer()
  model = api.make_model(config.model, vocab_size=tokenizer.vocab_size, params_dtype="float32", compute_dtype="float32")
  setup = common.Setup(config, model, tokenizer, None, tmp_path, MultiWriter())
  return common.make("text", config.evals.text, setup), model, jax.jit(model.init)(jax.random.key(0)), tokenizer


def test_greedy_samples_are_the_argmax_of_the_model_on_its_own_text(tmp_path):
  ev, model, params, tokenizer = make(tmp_path, temperature=0.0)
  params = jax.tree.map(lambda x: x * 3, params)  # away from ties
  tokens = np.asarray(ev._sample(params, ev._tokens, ev._lengths, jax.random.key(0)))
  for row, length in zip(tokens, ev._lengths, strict=True):
    alone = row[None, :length + 6]
    predicted = np.asarray(jnp.argmax(model.logits(params, alone), axis=-1))[0]
    np.testing.assert_array_equal(predicted[length - 1:-1], alone[0, length:])
    assert row[0] == tokenizer.bos_id


def test_samples_are_written_and_a_function_of_seed_and_step(tmp_path):
  ev, _, params, _ = make(tmp_path)
  first = dict(ev.run(params, 3))
  text = (tmp_path / "samples" / "text_00000003.txt").read_text()
  assert "--- 'the quick'\nthe quick" in text and 0 < first["new_tokens"] <= 6
  dict(ev.run(params, 3))
  assert (tmp_path / "samples" / "text_00000003.txt").read_text() == text
  dict(ev.run(params, 4))
  assert (tmp_path / "samples" / "text_00000004.txt").read_text() != text


def test_the_distribution_of_a_sampled_token_is_the_softmax():
  """4,096 draws from one fixed distribution of 8 tokens, by a chi-square test (7 degrees, p = 1e-4: 29.9)."""
  logits_V = jnp.asarray([0.0, 1.0, -1.0, 0.5, 2.0, -0.5, 0.2, -2.0])

  class Fixed:
    def apply(self, params, batch):
      return jnp.zeros((*batch["tokens"].shape, 1))

    def unembed(self, params, hidden):
      return jnp.broadcast_to(logits_V, (*hidden.shape[:2], 8))

  rows, temperature = 4096, 0.7
  sample = samples._make_sampler(Fixed(), 1, temperature)
  tokens = sample({}, jnp.zeros((rows, 2), jnp.int32), jnp.ones(rows, jnp.int32), jax.random.key(0))
  counts = np.bincount(np.asarray(tokens[:, 1]), minlength=8)
  expected = rows * np.asarray(jax.nn.softmax(logits_V / temperature))
  assert np.sum((counts - expected) ** 2 / expected) < 29.9


@pytest.mark.parametrize("changed, expected", [({"prompts": ()}, "prompts is empty")])
def test_what_cannot_be_sampled_is_refused(tmp_path, changed, expected):
  with pytest.raises(ConfigError, match=expected):
    make(tmp_path, **changed)
