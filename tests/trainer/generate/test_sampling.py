"""Draws follow their distribution, and their log-probs are of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.errors import ConfigError
from trainer.generate.sampling import BLOCK, Options, draw

LOGITS = np.array([0.0, 1.0, -1.0, 0.5, 2.0, -0.5, 0.2, -np.inf], np.float32)


def drawn(rows, logits=LOGITS, **options):
  """The tokens, and their log-probs, of `rows` draws from softmax(logits)."""
  o = Options(**options)
  numbers = np.array([o.temperature or 1, o.top_p, o.min_p], np.float32)
  keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(0)))(jnp.arange(rows))
  run = jax.jit(functools.partial(draw, greedy=o.temperature == 0, truncated=o.truncated))
  tokens, kept, full = run(keys, jnp.tile(logits, (rows, 1)), numbers, np.int32(o.top_k))
  return np.asarray(tokens), np.asarray(kept), np.asarray(full)


def expected(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
  """The distribution, token by token in order of their probability, without any sorting tricks."""
  p = np.exp(LOGITS.astype(np.float64) / temperature)
  p /= p.sum()
  best = np.argsort(-p)
  kept = set(best[:top_k] if top_k else best)
  share, some = 0.0, []
  for token in (t for t in best if t in kept):
    if share >= top_p * sum(p[t] for t in kept) and top_p < 1:
      break
    share += p[token]
    some.append(token)
  final = np.array([p[t] if t in some and p[t] >= min_p * p.max() else 0 for t in range(len(p))])
  return final / final.sum(), p


@pytest.mark.parametrize("options", [
    dict(), dict(temperature=0.7), dict(top_k=3), dict(top_p=0.8), dict(min_p=0.2), dict(top_k=100),
    dict(temperature=1.5, top_k=5, top_p=0.9, min_p=0.15)])
def test_the_distribution_is_exact(options):
  """4,096 draws by a chi-square test (7 degrees at most, p = 1e-4: 29.9); the log-probs are of that distribution."""
  rows = 4096
  tokens, kept, full = drawn(rows, **options)
  p, untruncated = expected(**options)
  counts = np.bincount(tokens, minlength=8)
  assert not counts[p == 0].any() and (p > 0).sum() >= 2
  assert np.sum((counts - rows * p)[p > 0] ** 2 / (rows * p[p > 0])) < 29.9
  np.testing.assert_allclose(kept, np.log(p[tokens]), atol=1e-6)
  np.testing.assert_allclose(full, np.log(untruncated[tokens]), atol=1e-6)


def test_draws_from_many_blocks_of_the_vocabulary_are_exact():
  """2^16 draws of 500 entries, which are three blocks and a part of one, by a chi-square test (p about 3e-5); one block
  is never drawn from, and nothing beyond the last entry is."""
  rows, V = 2**16, 500
  rng = np.random.default_rng(0)
  logits_V = rng.normal(size=V).astype(np.float32)
  logits_V[BLOCK:2 * BLOCK] = -np.inf
  logits_V[[3, V - 2]] = -np.inf
  tokens, kept, full = drawn(rows, logits_V)
  p = np.exp(np.float64(logits_V))
  p /= p.sum()
  counts, there = np.bincount(tokens, minlength=V), p > 0
  assert len(counts) == V and not counts[~there].any()
  degrees = there.sum() - 1
  assert np.sum((counts - rows * p)[there] ** 2 / (rows * p[there])) < degrees + 4 * np.sqrt(2 * degrees)
  np.testing.assert_allclose(kept, np.log(p[tokens]), atol=1e-5)
  np.testing.assert_array_equal(kept, full)


def test_temperature_zero_is_greedy_with_plain_logprobs():
  tokens, kept, full = drawn(3, temperature=0.0, top_k=1)
  assert (tokens == 4).all()
  np.testing.assert_allclose(kept, np.log(expected()[0][4]), atol=1e-6)
  np.testing.assert_array_equal(kept, full)


@pytest.mark.parametrize("key, fit, not_fit", [
    ("temperature", (0.0, 3.0), (-0.1,)), ("top_k", (0, 1), (-1,)), ("top_p", (0.01, 1.0), (0.0, 1.01)),
    ("min_p", (0.0, 1.0), (-0.01, 1.01))])
def test_options_out_of_range_are_refused_by_their_name(key, fit, not_fit):
  for value in fit:
    Options(**{key: value}).check("rollout.")
  for value in not_fit:
    with pytest.raises(ConfigError, match=f"^rollout.{key}: found {value}, allowed: "):
      Options(**{key: value}).check("rollout.")
