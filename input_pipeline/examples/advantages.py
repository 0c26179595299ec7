"""From rewards to advantages, on the host: what a completion is worth compared with others.

P prompts, G completions of each (a group), K reward functions; all of a rollout at once, so that micro-batches and
devices decide nothing. NaN means "no reward": such a completion is in no mean, no deviation and no count, and is not
trained on. Groups of different sizes are padded with NaN. Computed in float64.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
  from trainer.metrics import Mean

BASELINES = ("group", "leave_one_out", "batch", "none")
SCALES = ("group", "batch", "none")
COMBINATIONS = ("sum_then_normalize", "normalize_then_sum")
# Added to standard deviations, as in TRL.
EPSILON = 1e-4
# Rewards this close together, relative to the larger of 1 and the largest of them, are equal but for rounding.
_ROUNDING = 1e-6


def kinds(cfg: Any) -> tuple[str, str]:
  """(baseline, scale) of a strategy: its options of these names, or else the group's mean and no scale."""
  return cfg.baseline if "baseline" in cfg else "group", cfg.scale if "scale" in cfg else "none"


def apart(cfg: Any) -> bool:
  """Whether each function's rewards are compared by themselves (`normalized_sum`), rather than their sum."""
  return "combine" in cfg and cfg.combine == "normalize_then_sum"


def combine(values_PxGxK: np.ndarray, weights_K: np.ndarray, failed_PxGxK: np.ndarray) -> np.ndarray:
  """The reward of each completion: the weighted sum over the functions that did not abstain.

  Args:
    values_PxGxK: rewards by function; NaN where it abstained or failed.
    weights_K: of the functions; one of weight 0 is only reported and decides nothing here.
    failed_PxGxK: whether the function failed. A failure is not a reward of 0: the completion has no reward.

  Returns:
    float64 [P, G], NaN where no function gave a reward or one failed.
  """
  counted_K = np.asarray(weights_K) != 0
  values_PxGxK, weights_K = np.asarray(values_PxGxK, np.float64)[..., counted_K], np.asarray(weights_K)[counted_K]
  given_PxGxK = ~np.isnan(values_PxGxK)
  rewards_PxG = np.sum(np.where(given_PxGxK, values_PxGxK, 0.0) * weights_K, axis=-1)
  has_reward_PxG = given_PxGxK.any(axis=-1) & ~np.asarray(failed_PxGxK)[..., counted_K].any(axis=-1)
  return np.where(has_reward_PxG, rewards_PxG, np.nan)


def normalized_sum(values_PxGxK: np.ndarray, weights_K: np.ndarray, rewards_PxG: np.ndarray) -> np.ndarray:
  """What completions are worth if each function is compared by itself, so that none drowns the others: the weighted sum
  of its advantages, with baseline and scale group (GDPO, arXiv 2601.05242).

  Args:
    values_PxGxK, weights_K: as of `combine`, which gave the rewards.

  Returns:
    float64 [P, G], NaN where there is no reward; its sum over a group is 0. Exactly 0 in a group where nothing
    differs, or what differs cancels but for rounding.
  """
  without_PxG = np.isnan(rewards_PxG)
  sum_PxG = np.zeros(without_PxG.shape)
  for k in np.flatnonzero(weights_K):
    own_PxG = np.where(without_PxG, np.nan, np.asarray(values_PxGxK, np.float64)[..., k])
    sum_PxG += weights_K[k] * np.nan_to_num(_advantages(own_PxG, "group", "group"))
  return np.where(without_PxG, np.nan, np.where(zero_spread(sum_PxG)[:, None], 0.0, sum_PxG))


def normalized(worth_PxG: np.ndarray) -> np.ndarray:
  """The advantages, float32 [P, G], of what `normalized_sum` says: over the standard deviation of all of it, plus 1e-4
  (the mean that GDPO also subtracts is 0)."""
  return _advantages(worth_PxG, "none", "batch").astype(np.float32)


def zero_spread(rewards_PxG: np.ndarray) -> np.ndarray:
  """Whether a group's rewards are all equal but for rounding, bool [P]; so are fewer than two."""
  rewards_PxG = np.asarray(rewards_PxG, np.float64)
  given_PxG = ~np.isnan(rewards_PxG)
  highest_P = np.max(rewards_PxG, axis=1, where=given_PxG, initial=-np.inf)
  lowest_P = np.min(rewards_PxG, axis=1, where=given_PxG, initial=np.inf)
  largest_P = np.max(np.abs(rewards_PxG), axis=1, where=given_PxG, initial=1.0)
  # max - min, not the deviation: that of equal numbers need not be 0 (EXACTNESS.md T26).
  return (given_PxG.sum(axis=1) < 2) | (highest_P - lowest_P <= _ROUNDING * largest_P)


def advantages(rewards_PxG: np.ndarray, baseline: str, scale: str) -> np.ndarray:
  """(reward - baseline) / (scale + 1e-4), float32 [P, G]; NaN where the reward is.

  Args:
    rewards_PxG: as from `combine`.
    baseline: group: the mean of the group. leave_one_out: the mean of the group's others. batch: the mean of all
      rewards. none: 0.
    scale: group: the standard deviation of the group's rewards. batch: that of all rewards, whatever the baseline.
      none: no division. Both are of a sample (divided by the count less one).

  Rewards that are equal but for rounding have advantages of exactly 0: those of a group with baseline group or
  leave_one_out, those of the whole batch with baseline batch.

  Raises:
    ValueError: an unknown baseline or scale, or a scale that does not go with the baseline; see `mismatch`.
  """
  if problem := mismatch(baseline, scale):
    raise ValueError(problem)
  return _advantages(np.asarray(rewards_PxG, np.float64), baseline, scale).astype(np.float32)


def _advantages(rewards_PxG: np.ndarray, baseline: str, scale: str) -> np.ndarray:
  """As `advantages`, of and in float64."""
  given_PxG = ~np.isnan(rewards_PxG)
  r_PxG = np.where(given_PxG, rewards_PxG, 0.0)
  count_Px1, sum_Px1 = given_PxG.sum(axis=1, keepdims=True), r_PxG.sum(axis=1, keepdims=True)

  equal_Px1 = np.zeros(count_Px1.shape, bool)
  if baseline == "group":
    base_PxG = sum_Px1 / np.maximum(count_Px1, 1)
    equal_Px1 = zero_spread(rewards_PxG)[:, None]
  elif baseline == "leave_one_out":
    base_PxG = (sum_Px1 - r_PxG) / np.maximum(count_Px1 - 1, 1)
    equal_Px1 = zero_spread(rewards_PxG)[:, None]
  elif baseline == "batch":
    base_PxG = r_PxG.sum() / max(given_PxG.sum(), 1)
    equal_Px1 = zero_spread(rewards_PxG.reshape(1, -1))[:, None]
  else:
    base_PxG = 0.0

  values_PxG = r_PxG - base_PxG
  if scale == "group":
    values_PxG = values_PxG / (_deviation(r_PxG, given_PxG, axis=1) + EPSILON)
  elif scale == "batch":
    values_PxG = values_PxG / (_deviation(r_PxG, given_PxG, axis=None) + EPSILON)
  return np.where(given_PxG, np.where(equal_Px1, 0.0, values_PxG), np.nan)


def mismatch(baseline: str, scale: str, combine: str = "sum_then_normalize") -> str:
  """Why these cannot be used together, with what to use; empty if they can.

  Dividing by the deviation of rewards that are all equal, which is 0, must have nothing to divide.
  """
  if baseline not in BASELINES:
    return f"baseline is {baseline!r}; allowed: {', '.join(BASELINES)}."
  if scale not in SCALES:
    return f"scale is {scale!r}; allowed: {', '.join(SCALES)}."
  if scale == "group" and baseline not in ("group", "leave_one_out"):
    return (f"scale is 'group' with baseline {baseline!r}: a group whose rewards are all equal would have advantages "
            "divided by 0. Use baseline 'group' or 'leave_one_out', or scale 'batch' or 'none'.")
  if scale == "batch" and baseline == "none":
    return ("scale is 'batch' with baseline 'none': rewards that are all equal would be divided by 0. Use another "
            "baseline, or scale 'none'.")
  if combine not in COMBINATIONS:
    return f"combine is {combine!r}; allowed: {', '.join(COMBINATIONS)}."
  if combine == "normalize_then_sum" and not baseline == scale == "group":
    return (f"combine is 'normalize_then_sum' with baseline {baseline!r} and scale {scale!r}: it compares each reward "
            "with its mean in the group, divides by the deviation there, and the sum by that over the rollout. Use "
            "'group' for both.")
  return ""


def statistics(names: Sequence[str], values_PxGxK: np.ndarray, failed_PxGxK: np.ndarray, abstained_PxGxK: np.ndarray,
               rewards_PxG: np.ndarray, advantages_PxG: np.ndarray, worth_PxG: np.ndarray | None = None
               ) -> dict[str, "Mean"]:
  """Metrics of a rollout by TRL's names, as sums with weights (trainer.metrics.Mean of floats).

  Args:
    worth_PxG: what advantages compare, `normalized_sum` say; None: the rewards.

  Returns:
    reward: mean over completions with a reward; reward_std: mean over groups with two rewards or more of the standard
    deviation within the group; frac_reward_zero_std: share of these groups for which `zero_spread` holds;
    frac_without_reward: share of completions; for each function
    rewards/<name>/mean (over completions that it gave a reward), rewards/<name>/std (over all of these at once),
    rewards/<name>/failed and rewards/<name>/abstained (shares of completions); advantage/abs_mean. What has nothing to
    be a mean of has weight 0.
  """
  from trainer.metrics import Mean  # imported here: it imports JAX, and input_pipeline/ uses this file without

  def mean(values: np.ndarray, where: np.ndarray) -> Mean:
    return Mean(float(np.sum(values, where=where)), float(where.sum()))

  values_PxGxK = np.asarray(values_PxGxK, np.float64)
  given_PxG = ~np.isnan(rewards_PxG)
  # Of groups that are smaller than others the rest is padding.
  there_PxG = (~np.isnan(values_PxGxK) | failed_PxGxK | abstained_PxGxK).any(axis=-1)
  several_P = given_PxG.sum(axis=1) >= 2
  spread_P = _deviation(np.where(given_PxG, rewards_PxG, 0.0), given_PxG, axis=1)[:, 0]
  metrics = {
      "reward": mean(rewards_PxG, given_PxG),
      "reward_std": mean(spread_P, several_P),
      "frac_reward_zero_std": mean(zero_spread(rewards_PxG if worth_PxG is None else worth_PxG), several_P),
      "frac_without_reward": mean(~given_PxG, there_PxG),
      "advantage/abs_mean": mean(np.abs(advantages_PxG), ~np.isnan(advantages_PxG)),
  }
  for k, name in enumerate(names):
    given, failed, abstained = ~np.isnan(values_PxGxK[..., k]), failed_PxGxK[..., k], abstained_PxGxK[..., k]
    metrics[f"rewards/{name}/mean"] = mean(values_PxGxK[..., k], given)
    deviation = _deviation(np.where(given, values_PxGxK[..., k], 0.0), given, axis=None)
    metrics[f"rewards/{name}/std"] = Mean(float(deviation), float(given.sum() >= 2))
    there = given | failed | abstained  # not padding
    metrics[f"rewards/{name}/failed"] = mean(failed, there)
    metrics[f"rewards/{name}/abstained"] = mean(abstained, there)
  return metrics


def _deviation(values_PxG: np.ndarray, where_PxG: np.ndarray, axis: int | None) -> np.ndarray:
  """The standard deviation of a sample, dimensions kept along `axis`; 0 of fewer than two values."""
  keep = axis is not None
  count = where_PxG.sum(axis=axis, keepdims=keep)
  mean = np.sum(values_PxG, axis=axis, keepdims=keep, where=where_PxG) / np.maximum(count, 1)
  squares = np.sum(np.square(values_PxG - mean), axis=axis, keepdims=keep, where=where_PxG)
  return np.sqrt(squares / np.maximum(count - 1, 1))
