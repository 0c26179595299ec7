"""Rewards and advantages against numbers worked out by hand; what has no reward is in no mean."""

import math
import statistics
import subprocess
import sys

import numpy as np
import pytest

from input_pipeline.examples import advantages
from tests import tiny
from trainer.metrics import to_floats

NAN = math.nan


def close(actual, expected, tolerance=1e-6):
  np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def combined(values, weights, failed=None):
  values = np.asarray(values, np.float64)
  return advantages.combine(values, np.asarray(weights), np.zeros(values.shape, bool) if failed is None else failed)


def test_rewards_are_weighted_sums_of_what_was_given():
  values = [[[1.0, 2.0], [NAN, 3.0], [NAN, NAN], [0.0, -1.0]]]
  close(combined(values, [0.5, 2.0]), [[4.5, 6.0, NAN, -2.0]])


def test_a_failure_is_no_reward_of_zero():
  """T27: the other function's reward does not stand for both."""
  failed = np.asarray([[[False, False], [True, False], [False, True]]])
  values = [[[1.0, 2.0], [NAN, 2.0], [1.0, NAN]]]
  close(combined(values, [1.0, 1.0], failed), [[3.0, NAN, NAN]])


def test_a_function_of_weight_zero_decides_nothing():
  """One that is only reported neither makes a reward of 0 nor takes one away."""
  failed = np.asarray([[[False, False], [False, False], [False, True]]])
  close(combined([[[1.0, 7.0], [NAN, 7.0], [2.0, NAN]]], [1.0, 0.0], failed), [[1.0, NAN, 2.0]])


def test_baseline_and_scale_of_the_group():
  """Deviations of a sample, as statistics.stdev has them, plus 1e-4."""
  rewards = [[1.0, 2.0, 6.0], [0.0, 0.5, -1.0]]
  expected = [[(r - statistics.mean(group)) / (statistics.stdev(group) + 1e-4) for r in group] for group in rewards]
  actual = advantages.advantages(np.asarray(rewards), "group", "group")
  assert actual.dtype == np.float32
  close(actual, expected)
  close(advantages.advantages(np.asarray([[1.0, 2.0, 6.0]]), "group", "none"), [[-2.0, -1.0, 3.0]])
  # In float32 numbers of this size are 0.008 apart.
  close(advantages.advantages(1e5 + np.asarray([[1.003, 2.001, 5.996]]), "group", "none"), [[-1.997, -0.999, 2.996]])


def test_leaving_one_out():
  """Against the mean of the others: (2 + 6) / 2, (1 + 6) / 2, (1 + 2) / 2."""
  close(advantages.advantages(np.asarray([[1.0, 2.0, 6.0]]), "leave_one_out", "none"), [[-3.0, -1.5, 4.5]])
  # G / (G - 1) times those of the group's mean (arXiv 2402.14740).
  rewards = np.random.default_rng(0).normal(size=(3, 5))
  close(advantages.advantages(rewards, "leave_one_out", "none"),
        advantages.advantages(rewards, "group", "none") * 5 / 4)


def test_baseline_and_scale_of_the_batch():
  rewards = np.asarray([[1.0, 3.0], [3.0, 9.0]])
  close(advantages.advantages(rewards, "batch", "none"), [[-3.0, -1.0], [-1.0, 5.0]])
  deviation = statistics.stdev([1.0, 3.0, 3.0, 9.0]) + 1e-4
  close(advantages.advantages(rewards, "batch", "batch"), np.asarray([[-3.0, -1.0], [-1.0, 5.0]]) / deviation)
  # The rewards' deviation, not that of what is divided.
  close(advantages.advantages(rewards, "group", "batch"), np.asarray([[-1.0, 1.0], [-3.0, 3.0]]) / deviation)
  close(advantages.advantages(rewards, "none", "none"), rewards)


@pytest.mark.parametrize("baseline, scale", [
    (b, s) for b in advantages.BASELINES for s in advantages.SCALES if not advantages.mismatch(b, s)])
def test_without_a_reward_a_completion_is_in_no_mean(baseline, scale):
  """I10, T27: the others have the advantages that they have without it; groups may differ in size."""
  full = np.asarray([[1.0, 4.0, 2.0], [0.0, 7.0, 1.0]])
  alone = advantages.advantages(full, baseline, scale)
  padded = np.full((3, 5), NAN)
  padded[0, [0, 2, 4]], padded[2, [1, 2, 3]] = full
  actual = advantages.advantages(padded, baseline, scale)
  np.testing.assert_array_equal(actual[0, [0, 2, 4]], alone[0])
  np.testing.assert_array_equal(actual[2, [1, 2, 3]], alone[1])
  assert np.isnan(actual).sum() == 15 - 6


@pytest.mark.parametrize("baseline, scale", [
    ("group", "group"), ("group", "none"), ("group", "batch"), ("leave_one_out", "group"), ("leave_one_out", "none")])
def test_equal_rewards_have_advantages_of_exactly_zero(baseline, scale):
  """T26: also where sums of equal numbers are not equal, and of a group with one reward left."""
  rewards = np.asarray([[0.1] * 7, [0.3 + 0.6, 0.9, 0.9, 0.9, 0.9, 0.9, 0.1 * 9], [1e6] * 6 + [1e6 + 0.01],
                        [NAN] * 6 + [5.0], [0.0] * 6 + [1.0]])
  assert (rewards[1].max() != rewards[1].min()) and rewards[0].mean() != 0.1
  np.testing.assert_array_equal(advantages.zero_spread(rewards), [True, True, True, True, False])
  actual = advantages.advantages(rewards, baseline, scale)
  assert not np.any(actual[:3]) and actual[3, 6] == 0 and np.all(actual[4] != 0)


def test_equal_rewards_of_a_whole_batch():
  assert not np.any(advantages.advantages(np.full((2, 5), 0.1), "batch", "batch"))
  np.testing.assert_array_equal(advantages.advantages(np.asarray([[NAN, 3.0]]), "batch", "batch"), [[NAN, 0.0]])


def test_rewards_that_are_compared_apart():
  """By TRL (make_grpo_references.py); by hand, of a group whose sums are equal, of functions that failed, abstained, or
  have no weight; 0 to the bit where nothing differs."""
  file = tiny.ROOT / "tests" / "trainer" / "strategies" / "grpo_references.npz"
  with np.load(file) as found:
    given, summed, apart = (found[key] for key in ("rewards", "advantages/sum_then_normalize",
                                                   "advantages/normalize_then_sum"))
  values, weights, none = given.reshape(3, 4, 2), np.asarray([1.0, 0.25]), np.zeros((3, 4, 2), bool)
  # TRL's are of float32.
  np.testing.assert_allclose(advantages.advantages(advantages.combine(values, weights, none), "group", "group"),
                             summed.reshape(3, 4), atol=1e-5)
  worth = advantages.normalized_sum(values, weights, advantages.combine(values, weights, none))
  np.testing.assert_allclose(advantages.normalized(worth), apart.reshape(3, 4), atol=1e-5)
  assert not worth[2].any() and not advantages.normalized(worth)[2].any()

  values = np.asarray([[[0.0, 4.0, 9.0], [1.0, 3.0, 0.0], [4.0, 0.0, 0.0]]])
  failed, weights = np.zeros(values.shape, bool), np.asarray([1.0, 1.0, 0.0])

  def normalized_sum():
    return advantages.normalized_sum(values, weights, advantages.combine(values, weights, failed))

  # Of 0, 1, 4 the deviation is √(13/3); 4, 3, 0 are the same turned round, and their sum says nothing, to the bit.
  assert not normalized_sum().any()
  weights[1], deviation = 0.5, math.sqrt(13 / 3) + 1e-4
  one = np.asarray([-5 / 3, -2 / 3, 7 / 3]) / deviation
  np.testing.assert_allclose(normalized_sum(), [one / 2], rtol=1e-12)
  failed[0, 0, 1] = True  # no reward at all, and in no mean
  values[0, 1, 0] = NAN  # abstained
  half = 1.5 / (math.sqrt(4.5) + 1e-4)
  np.testing.assert_allclose(normalized_sum(), [[NAN, half / 2, -half / 2]], rtol=1e-12)


def test_the_smallest_differences_that_count():
  """Relative to the larger of 1 and the largest reward."""
  spread = advantages.zero_spread(np.asarray([[0.0, 0.9e-6], [0.0, 1.1e-6], [100.0, 100.00009], [-100.0, -100.00011]]))
  np.testing.assert_array_equal(spread, [True, False, True, False])
  np.testing.assert_array_equal(advantages.zero_spread(np.asarray([[NAN, NAN], [NAN, 1.0]])), [True, True])


def test_dividing_by_nothing_is_refused():
  for baseline, scale, message in (("group", "std", "allowed: group, batch, none"), ("mean", "none", "leave_one_out"),
                                   ("batch", "group", "divided by 0"), ("none", "group", "divided by 0"),
                                   ("none", "batch", "divided by 0")):
    with pytest.raises(ValueError, match=message):
      advantages.advantages(np.zeros((1, 2)), baseline, scale)


def test_statistics_of_a_rollout():
  values = np.asarray([[[1.0, 10.0], [2.0, NAN], [NAN, NAN]], [[4.0, 20.0], [4.0, NAN], [NAN, 40.0]]])
  failed, abstained = np.zeros(values.shape, bool), np.zeros(values.shape, bool)
  failed[0, 2, 0] = abstained[0, 1, 1] = abstained[0, 2, 1] = abstained[1, 1, 1] = abstained[1, 2, 0] = True
  rewards = np.asarray([[1.0, 2.0, NAN], [4.0, 4.0, NAN]])
  given = advantages.advantages(rewards, "group", "none")
  actual = to_floats(advantages.statistics(("a", "b"), values, failed, abstained, rewards, given))
  expected = {
      "reward": 11 / 4, "reward_std": math.sqrt(0.5) / 2, "frac_reward_zero_std": 0.5, "advantage/abs_mean": 0.25,
      "frac_without_reward": 1 / 3,
      "rewards/a/mean": 11 / 4, "rewards/a/std": statistics.stdev([1, 2, 4, 4]), "rewards/a/failed": 1 / 6,
      "rewards/a/abstained": 1 / 6, "rewards/b/mean": 70 / 3, "rewards/b/std": statistics.stdev([10, 20, 40]),
      "rewards/b/failed": 0.0, "rewards/b/abstained": 0.5,
  }
  assert actual == pytest.approx(expected)


def test_statistics_without_rewards_and_with_padding():
  values = np.asarray([[[3.0], [NAN], [NAN]]])
  nothing, failed = np.zeros(values.shape, bool), np.asarray([[[False], [True], [False]]])
  rewards = np.asarray([[3.0, NAN, NAN]])
  metrics = advantages.statistics(("a",), values, failed, nothing, rewards, np.asarray([[0.0, NAN, NAN]]))
  floats = to_floats(metrics)
  assert floats["rewards/a/failed"] == 0.5 and floats["reward"] == 3.0 and floats["frac_without_reward"] == 0.5
  # One reward is equal to no other.
  assert "frac_reward_zero_std" not in floats and "reward_std" not in floats and "rewards/a/std" not in floats
  # Sums with weights: two rollouts add up.
  assert to_floats({"x": metrics["reward"] + metrics["reward"]}) == {"x": 3.0}
  empty = to_floats(advantages.statistics(("a",), np.full((1, 2, 1), NAN), np.ones((1, 2, 1), bool),
                                          np.zeros((1, 2, 1), bool), np.full((1, 2), NAN), np.full((1, 2), NAN)))
  assert empty == {"frac_without_reward": 1.0, "rewards/a/failed": 1.0, "rewards/a/abstained": 0.0}


def test_advantages_need_no_jax():
  """Data are prepared without it."""
  code = ("import sys, numpy as np; from input_pipeline.examples import advantages\n"
          "advantages.advantages(np.eye(2), 'group', 'group'); sys.exit('jax' in sys.modules)")
  assert subprocess.run([sys.executable, "-c", code], cwd=tiny.ROOT, check=False).returncode == 0


def test_without_baseline_and_scale_rewards_are_advantages():
  rewards = np.array([[1.0, -2.5, np.nan], [0.0, 0.0, 0.0]])
  np.testing.assert_array_equal(advantages.advantages(rewards, "none", "none"), rewards.astype(np.float32))
