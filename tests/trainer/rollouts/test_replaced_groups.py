"""Groups without spread are replaced without bias: every outcome of a toy is enumerated, with its probability.

The policy answers prompt j rightly with the probability p_j = σ(θ_j). The gradient of a group by its advantages A is
Σ_i A_i (r_i - p_j), in expectation (G - 1) p_j (1 - p_j), which is the policy gradient times G - 1. A group whose
rewards are equal has a gradient of 0. So the sum over the kept groups of a rollout is the sum over all that were
sampled: their expected number times the expectation of one.
"""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from input_pipeline.examples import advantages
from trainer.rollouts import groups as groups_lib
from trainer.rollouts.producer import Producer
from trainer.rollouts.schedule import Policies

PASS_J, SIZE = (0.2, 0.7), 2
# What a group may become: (prompt, rewards), each with its probability; prompts come equally often.
OUTCOMES = {(j, rewards): np.prod([p if r else 1 - p for r in rewards]) / len(PASS_J)
            for j, p in enumerate(PASS_J) for rewards in itertools.product((0.0, 1.0), repeat=SIZE)}


class MoreIsAsked(Exception):
  pass


class Selected(Exception):
  pass


def kept(script, num_prompts, resample):
  """The groups that a rollout is made of where what is sampled is `script`, and how many of it were sampled."""
  left = list(script)

  def score(items, episodes):
    if len(left) < len(items):
      raise MoreIsAsked
    now, left[:] = left[:len(items)], left[len(items):]
    return [groups_lib.ScoredGroup(SimpleNamespace(number=j, source=0), [SimpleNamespace(trajectory=None)] * SIZE, None,
                                   None, None, np.array(rewards), np.array(rewards),
                                   bool(advantages.zero_spread(np.array([rewards]))[0]))
            for j, rewards in now]

  def select(groups):
    raise Selected(groups)

  producer = object.__new__(Producer)
  producer.__dict__.update(
      _resample=resample, _seed=0, _carries=False, _held=None, _max_staleness=0, _sample=lambda *args: [], _score=score,
      _select=select,
      curriculum=SimpleNamespace(unmeasured=lambda: None, after=lambda *args: (None, {}),
                                 choose=lambda drawn, count, rates: ([None] * count, drawn + count)))
  try:
    producer.roll(Policies(None, 0), 0, None, 0, SimpleNamespace(size=num_prompts, every=1), lambda: False)
  except Selected as found:
    return found.args[0], len(script) - len(left)


def expectations(num_prompts, resample):
  """Of a rollout: the gradient by each θ, summed over its groups, and how many groups were sampled."""
  gradient_J, sampled = np.zeros(len(PASS_J)), 0.0
  waiting = [((), 1.0)]
  while waiting:
    script, probability = waiting.pop()
    try:
      groups, count = kept(script, num_prompts, resample)
    except MoreIsAsked:
      waiting += [((*script, outcome), probability * p) for outcome, p in OUTCOMES.items()]
      continue
    assert len(groups) == num_prompts and count == len(script)
    values_PxG = groups_lib.sequences(groups, "group", "none", False).advantages
    sampled += probability * count
    for group, advantages_G in zip(groups, values_PxG, strict=True):
      p = PASS_J[group.item.number]
      gradient_J[group.item.number] += probability * float(advantages_G.astype(np.float64) @ (group.rewards - p))
  return gradient_J, sampled


@pytest.mark.parametrize("num_prompts, resample", [(1, 0), (1, 2), (2, 1)])
def test_the_expected_gradient_is_that_of_all_that_was_sampled(num_prompts, resample):
  gradient_J, sampled = expectations(num_prompts, resample)
  p_J = np.array(PASS_J)
  equal = np.mean(p_J ** SIZE + (1 - p_J) ** SIZE)
  assert sampled == pytest.approx(num_prompts * sum(equal ** k for k in range(resample + 1)), rel=1e-12)
  np.testing.assert_allclose(gradient_J, sampled / len(p_J) * (SIZE - 1) * p_J * (1 - p_J), rtol=1e-12)
