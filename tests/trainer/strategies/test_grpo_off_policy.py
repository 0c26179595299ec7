"""Completions of another policy, on a toy small enough to enumerate: the expected corrected gradient, in float64."""

import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.api import Output
from tests.trainer.strategies.pairs import options
from tests.trainer.strategies.test_grpo import OPTIONS
from trainer.strategies import grpo, logprobs, presets, sequences

# Completions are two of three tokens: logits [3] of the first, and of the second [3, 3], given the first.
TEXTS = np.array(list(itertools.product(range(3), repeat=2)))
UNBIASED = dict(clip="none", aggregate="constant", aggregate_length=1, baseline="none", scale="none", temperature=1.0)


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def policies(count):
  """Flat logits of policies that are near one another, [12] each, and a reward of each text."""
  rng = np.random.default_rng(4)
  start = rng.normal(size=12)
  return [start + 0.5 * rng.normal(size=12) for _ in range(count)], rng.normal(size=9)


def token_logps(theta):
  """log p of the two tokens of each text, [9, 2]."""
  first, second = jax.nn.log_softmax(theta[:3]), jax.nn.log_softmax(theta[3:].reshape(3, 3))
  return jnp.stack([first[TEXTS[:, 0]], second[TEXTS[:, 0], TEXTS[:, 1]]], axis=1)


def token_gradients(theta):
  """∇ log p of these, [9, 2, 12], written out: of a softmax it is the token's unit vector less the probabilities."""
  found = np.zeros((9, 2, 12))
  p = np.exp(theta[:3]) / np.exp(theta[:3]).sum()
  for number, (first, second) in enumerate(TEXTS):
    found[number, 0, :3] = np.eye(3)[first] - p
    row = theta[3 + 3 * first:6 + 3 * first]
    found[number, 1, 3 + 3 * first:6 + 3 * first] = np.eye(3)[second] - np.exp(row) / np.exp(row).sum()
  return found


def expected_gradient(theta, behavior, rewards, old=None, **changed):
  """The gradient of GRPO's loss, summed over all texts with their probabilities under `behavior`, and its metrics.

  Each text stands in a row behind a prompt of one token; `old`: the policy that began the rollout."""
  row = np.array([[1, 1, 1]] * 9)
  batch = dict(tokens=np.c_[np.zeros(9, int), TEXTS], positions=row.cumsum(1) - 1, segment_ids=row,
               loss_weights=np.array([[0.0, 1.0, 1.0]] * 9), segment_roles=np.ones((9, 1), int),
               advantages=rewards[:, None], behavior_logprobs=np.pad(token_logps(behavior), ((0, 0), (1, 0))))
  if old is not None:
    batch["old_logprobs"] = np.pad(token_logps(old), ((0, 0), (1, 0)))
  cfg = options("grpo", **OPTIONS | UNBIASED | changed)
  likely = np.exp(np.asarray(token_logps(behavior)).sum(1))

  def total(theta):
    logps = jnp.pad(token_logps(theta), ((0, 0), (1, 0)))
    stats = logprobs.TokenStats(logprob=logps, entropy=jnp.zeros_like(logps))
    with mock.patch.object(sequences, "token_stats", lambda *args: (stats, Output(None))):
      terms, metrics = grpo.loss(None, theta, batch, None, cfg)
    return jnp.sum(likely * terms["loss"].sum), metrics

  gradient, metrics = jax.grad(total, has_aux=True)(jnp.asarray(theta))
  assert gradient.dtype == jnp.float64
  return gradient, metrics


def exact_gradient(theta, rewards):
  """Of minus the expected reward, by enumeration."""
  return jax.grad(lambda theta: -jnp.sum(jnp.exp(token_logps(theta).sum(1)) * rewards))(jnp.asarray(theta))


@pytest.mark.parametrize("how", ["sequence_truncate", "sequence_mask"])
def test_without_a_cap_the_expected_gradient_is_that_of_the_policy(how):
  """p / q of the whole sequence is the weight that makes it so. Where the policy has moved since the rollout began, the
  tokens' own ratios p / p_old come on top of p_old / q."""
  (theta, behavior, old), rewards = policies(3)
  exact = exact_gradient(theta, rewards)
  token_ratio = dict(correction=how, correction_max=float("inf"))
  np.testing.assert_allclose(expected_gradient(theta, behavior, rewards, **token_ratio)[0], exact, atol=1e-10)
  uncorrected, _ = expected_gradient(theta, behavior, rewards)
  assert np.abs(uncorrected - exact).max() > 1e-2
  moved, _ = expected_gradient(theta, behavior, rewards, old=old, **token_ratio)
  p, p_old, q = (np.asarray(token_logps(x)) for x in (theta, old, behavior))
  weights = np.exp(q.sum(1) + (p_old - q).sum(1))[:, None] * np.exp(p - p_old)
  np.testing.assert_allclose(
      moved, -np.einsum("nt,n,ntd->d", weights, rewards, token_gradients(theta)), atol=1e-10)


@pytest.mark.parametrize("how", ["sequence_truncate", "sequence_mask"])
def test_nor_need_both_tokens_be_of_one_policy(how):
  """The first token by one policy, the second by another that followed it (`rollout.carry_over`): with the log-prob
  that each token was sampled with the expected gradient is that of the policy that is trained; with those of the newer
  policy for both it is not."""
  (theta, first, second), rewards = policies(3)
  mixed, exact = np.r_[first[:3], second[3:]], exact_gradient(theta, rewards)
  uncapped = dict(correction=how, correction_max=float("inf"))
  np.testing.assert_allclose(expected_gradient(theta, mixed, rewards, **uncapped)[0], exact, atol=1e-10)
  likely = np.exp(np.asarray(token_logps(mixed)).sum(1) - np.asarray(token_logps(second)).sum(1))
  wrong, _ = expected_gradient(theta, second, rewards * likely, **uncapped)
  assert np.abs(wrong - exact).max() > 1e-2


@pytest.mark.parametrize("how", presets.CORRECTIONS[1:])
def test_with_caps_it_is_the_sum_over_texts_of_bounded_weights(how):
  (theta, behavior), rewards = policies(2)
  low, high = 0.7, 1.3
  found, metrics = expected_gradient(theta, behavior, rewards, correction=how, correction_min=low, correction_max=high)
  q = np.asarray(token_logps(behavior))
  ratio = np.exp(np.asarray(token_logps(theta)) - q)
  if how.startswith("sequence"):
    ratio = ratio.prod(1, keepdims=True)
  outside = (ratio < low) | (ratio > high)
  weight = np.where(outside, 0, ratio) if how.endswith("mask") else np.clip(ratio, low, high)
  expected = -np.einsum("n,nt,n,ntd->d", np.exp(q.sum(1)), np.broadcast_to(weight, (9, 2)), rewards,
                        token_gradients(theta))
  np.testing.assert_allclose(found, expected, atol=1e-10)
  bounded = metrics["sampling/correction_bounded"]
  assert 0 < outside.mean() < 1 and np.sum(bounded.sum) / np.sum(bounded.weight) == pytest.approx(outside.mean())


def test_of_one_token_both_levels_are_exact():
  """Where the second token is always the same, whatever it is, a token's weight is that of its sequence."""
  (theta, behavior), rewards = policies(2)
  theta[3:], behavior[3:] = [0, -np.inf, -np.inf] * 3, [0, -np.inf, -np.inf] * 3
  finite = np.where(np.isinf(theta), -40.0, theta), np.where(np.isinf(behavior), -40.0, behavior)
  exact = exact_gradient(finite[0], rewards)
  for how in ("token_truncate", "sequence_truncate"):
    found, _ = expected_gradient(*finite, rewards, correction=how, correction_max=float("inf"))
    np.testing.assert_allclose(found, exact, atol=1e-10, err_msg=how)
