"""Advantages and returns of tokens against the sums that define them, written out token by token in float64."""

import math

import numpy as np
import pytest

from tests.trainer.strategies.pairs import options
from trainer.rollouts import experience, returns
from trainer.rollouts.experience import Trajectory

# Prompt, sampled and an environment's tokens of four trajectories, the last of which nothing was sampled in.
WEIGHTS = ((0, 0, 1, 1, 1), (0, 1), (0, 1, 1, 0, 0, 1, 1, 0), (0, 0))
REWARDS = (1.5, -0.7, 0.4, 2.0)


def rollout():
  """(an experience, values, log-ratios of its tokens)."""
  units = [[(Trajectory(np.arange(len(w)), np.array(w), np.zeros(len(w)), 1, "stop"), reward, 0)]
           for w, reward in zip(WEIGHTS, REWARDS, strict=True)]
  made, rng = experience.collect(units), np.random.default_rng(0)
  return made, *(rng.normal(size=len(made.tokens)).astype(np.float32) for _ in range(2))


def penalty(d, kind):
  return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]


def by_sums(values, log_ratios, cfg):
  """{token: (advantage, return, value)}: A_t = Σ_l (γλ)^l δ_{t+l} over the tokens that were sampled."""
  found, rewards, start, chains = {}, {}, 0, []
  for weights, reward in zip(WEIGHTS, REWARDS, strict=True):
    at = [start + i for i, w in enumerate(weights) if w]
    for t in at:
      rewards[t] = (0 if log_ratios is None else -cfg.kl_coef * penalty(float(log_ratios[t]), cfg.kl)) + (
          reward if t == at[-1] else 0)
    chains.append(at)
    start += len(weights)
  if cfg.whiten_rewards:
    mean = sum(rewards.values()) / len(rewards)
    deviation = math.sqrt(sum((r - mean)**2 for r in rewards.values()) / (len(rewards) - 1) + 1e-8)
    rewards = {t: (r - mean) / deviation + mean for t, r in rewards.items()}
  for at in chains:
    errors = [rewards[t] + cfg.gamma * (float(values[at[i + 1]]) if i + 1 < len(at) else 0) - float(values[t])
              for i, t in enumerate(at)]
    for i, t in enumerate(at):
      a = sum((cfg.gamma * cfg.gae_lambda)**k * errors[i + k] for k in range(len(at) - i))
      found[t] = a, a + float(values[t]), float(values[t])
  if cfg.whiten:
    mean = sum(a for a, *_ in found.values()) / len(found)
    deviation = math.sqrt(sum((a - mean)**2 for a, *_ in found.values()) / (len(found) - 1) + 1e-8)
    found = {t: ((a - mean) / deviation, *more) for t, (a, *more) in found.items()}
  return found


@pytest.mark.parametrize("changed", [
    {}, dict(whiten=False), dict(whiten=False, gamma=0.9, gae_lambda=0.0), dict(gamma=0.9, gae_lambda=1.0),
    dict(whiten_rewards=True), *(dict(kl_coef=0.3, kl_in="reward", kl=kind) for kind in ("k1", "k2", "k3"))], ids=str)
def test_advantages_and_returns_are_the_sums_that_define_them(changed):
  """An environment's tokens are no actions: those around them follow one another."""
  cfg = options("ppo", **dict(kl_coef=0.0) | changed)
  made, values, log_ratios = rollout()
  log_ratios = log_ratios if cfg.kl_coef else None
  found, metrics = returns.Returns(cfg).make(made, values, log_ratios)
  wanted = by_sums(values, log_ratios, cfg)
  for key, index in (("token_advantages", 0), ("returns", 1), ("old_values", 2)):
    expected = np.array([wanted.get(t, (0, 0, 0))[index] for t in range(len(made.tokens))])
    np.testing.assert_allclose(found[key], expected, rtol=1e-6, atol=1e-6)
    assert found[key].dtype == np.float32
  came, said = (np.array([v[i] for v in wanted.values()]) for i in (1, 2))
  assert metrics["value/explained_variance"] == pytest.approx(1 - np.var(came - said) / np.var(came))
  assert metrics["returns/mean"] == pytest.approx(came.mean())
  assert metrics["returns/std"] == pytest.approx(came.std())
  assert metrics["value/old_mean"] == pytest.approx(said.mean())
  assert metrics["advantage/abs_mean"] == pytest.approx(np.abs(came - said).mean())  # before they are white
  if cfg.kl_coef:
    taken = sum(penalty(float(log_ratios[t]), cfg.kl) for t in wanted)
    assert metrics["objective/non_score_reward"] == pytest.approx(-0.3 * taken / 4)
    assert metrics["objective/rlhf_reward"] == pytest.approx((sum(REWARDS) - 0.3 * taken) / 4)
    assert metrics["kl"] == pytest.approx(sum(penalty(float(log_ratios[t]), "k3") for t in wanted) / len(wanted))


def test_with_lambda_one_a_return_is_what_was_given():
  """γ = λ = 1: the values cancel."""
  made, values, _ = rollout()
  found, _ = returns.Returns(options("ppo", gae_lambda=1.0, kl_coef=0.0)).make(made, values, None)
  ends = np.cumsum(made.lengths)
  for reward, start, end in zip(REWARDS[:3], ends - made.lengths, ends, strict=False):
    sampled = made.weights[start:end] > 0
    np.testing.assert_allclose(found["returns"][start:end][sampled], reward, rtol=1e-6)


@pytest.mark.parametrize("coef, where, penalised", [
    (0.3, "reward", True), (0.3, "loss", False), (0.0, "reward", False)])
def test_the_penalty_is_taken_off_rewards_where_the_config_says(coef, where, penalised):
  """A term of the loss is none of rewards, too."""
  cfg = options("ppo", kl_coef=coef, kl_in=where, kl="k1", whiten=False)
  made, values, log_ratios = rollout()
  of = returns.Returns(cfg)
  assert of.penalised is penalised
  found = of.make(made, values, log_ratios if penalised else None)[0]["returns"]
  plain = returns.Returns(options("ppo", kl_coef=0.0, whiten=False)).make(made, values, None)[0]["returns"]
  assert (np.abs(found - plain).max() > 0.01) == penalised


def test_a_rollout_without_anything_has_nothing():
  empty = experience.collect([])
  found, metrics = returns.Returns(options("ppo", kl_coef=0.0)).make(empty, np.zeros(0), None)
  assert all(not len(part) for part in found.values()) and not metrics
  silent = experience.collect([[(Trajectory(np.arange(3), np.zeros(3), np.zeros(3), 3, "length"), 2.0, 0)]])
  for whiten in (False, True):  # a completion in which nothing was sampled
    cfg = options("ppo", kl_coef=0.3, kl_in="reward", kl="k1", whiten=whiten, whiten_rewards=whiten)
    found, metrics = returns.Returns(cfg).make(silent, np.ones(3), np.ones(3))
    assert sorted(found) == ["old_values", "returns", "token_advantages"] and not metrics
    assert all(part.tolist() == [0.0] * 3 for part in found.values())


def test_whitening_leaves_a_single_value_alone():
  there = np.array([[True, False]])
  np.testing.assert_array_equal(returns.whitened(np.array([[3.0, 0.0]]), there), [[3.0, 0.0]])
