"""Which prompts are sampled for, by how often the policy passed them (`rollout.curriculum_target`).

Prompts come in the order of their stream. One that has not been measured yet is taken. One of whose completions the
share r passed when it was last sampled for is taken with the probability

    max(floor, exp(-KL(t ‖ r))),    KL(t ‖ r) = t log(t / r) + (1 - t) log((1 - t) / (1 - r)),

which is 1 where r is the target t, and the floor where all or none passed. With t = 1/2 the exponential is
2 √(r (1 - r)), in proportion to the standard deviation of a reward of 0 or 1. Whether it is taken follows from a hash
of the seed and the prompt's place in the stream: the choice is a pure function of seed, place and measured rates.

N prompts of an epoch, in the order of `PromptData.every_item`; a rate is NaN where none was measured.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from input_pipeline.prompt_data import PromptData, PromptItem
from trainer.errors import ConfigError
from trainer.rollouts.groups import ScoredGroup

# Its array in checkpoints.
SAVED = "pass_rates"
# Rewards that are sums of parts may fall short of what they add up to by so much.
ROUNDING = 1e-6


def chance(rate: float, target: float, floor: float) -> float:
  """The probability with which a prompt of that pass rate is taken."""
  if math.isnan(rate):
    return 1.0
  if not 0 < rate < 1:
    return floor
  divergence = target * math.log(target / rate) + (1 - target) * math.log((1 - target) / (1 - rate))
  return max(floor, math.exp(-divergence))


class Curriculum:
  """Chooses prompts; without a target all are taken, and nothing is measured."""

  def __init__(self, config: Any, prompts: PromptData):
    c = config.rollout
    self._prompts, self._seed, self._target = prompts, config.seed, c.curriculum_target
    if self._target is not None:
      self._floor, self._passing = c.curriculum_floor, c.curriculum_passing

  def unmeasured(self) -> np.ndarray | None:
    """Rates [N] of prompts that were never sampled for; None: there is no curriculum."""
    return None if self._target is None else np.full(self._prompts.num_prompts, np.nan, np.float32)

  def restored(self, arrays: Mapping[str, np.ndarray], data: str) -> tuple[np.ndarray | None, dict[str, np.ndarray]]:
    """(the rates that a checkpoint holds, its other arrays). `data`: the fingerprint of its prompts; of other prompts
    nothing is known."""
    others = {name: part for name, part in arrays.items() if name != SAVED}
    if self._target is not None and SAVED in arrays and data != self._prompts.fingerprint:
      logging.warning("The prompts are no longer those of the checkpoint: their pass rates are measured anew.")
    known = self._target is not None and SAVED in arrays and data == self._prompts.fingerprint
    return arrays[SAVED] if known else self.unmeasured(), others

  def choose(self, drawn: int, count: int, rates_N: np.ndarray | None) -> tuple[list[PromptItem], int]:
    """(the next `count` prompts that are taken, fewer where the stream ends, and the place after them), from place
    `drawn` of the stream on."""
    items: list[PromptItem] = []
    end = self._prompts.num_items
    while len(items) < count and (end is None or drawn < end):
      if self._takes(drawn, rates_N):
        items.append(self._prompts.item(drawn))
      drawn += 1
    return items, drawn

  def after(self, rates_N: np.ndarray | None, groups: Sequence[ScoredGroup], passed_over: int
            ) -> tuple[np.ndarray | None, dict[str, float]]:
    """(the rates after a rollout, metrics). Of each prompt with a reward the rate is the share of its rewarded
    completions that passed.

    Args:
      rates_N: before it.
      groups: all that were sampled for it, also those that were replaced.
      passed_over: prompts that were.
    """
    if rates_N is None or self._target is None:
      return None, {}
    rates_N = rates_N.copy()
    for group in groups:
      given_G = group.rewards[~np.isnan(group.rewards)]
      if len(given_G):
        rates_N[self._prompts.place(group.item.number)] = np.mean(given_G >= self._passing - ROUNDING)
    known = rates_N[~np.isnan(rates_N)]
    metrics = {"curriculum/passed_over": float(passed_over), "curriculum/measured": len(known) / len(rates_N)}
    if len(known):
      metrics["curriculum/pass_rate"] = float(np.mean(known, dtype=np.float64))
    return rates_N, metrics

  def _takes(self, place: int, rates_N: np.ndarray | None) -> bool:
    if rates_N is None or self._target is None:
      return True
    digest = hashlib.blake2b(repr((self._seed, "curriculum", place)).encode(), digest_size=8).digest()
    drawn = int.from_bytes(digest, "big") / 2**64
    return drawn < chance(float(rates_N[self._prompts.place(place)]), self._target, self._floor)


def check(config: Any, rewarded: bool) -> None:
  """Refuses options that cannot work. Raises ConfigError."""
  c = config.rollout
  if c.curriculum_target is None:
    return
  if not 0 < c.curriculum_target < 1:
    raise ConfigError(f"rollout.curriculum_target is {c.curriculum_target}; a share of completions that pass lies "
                      "between 0 and 1. Use 0.5, say, or leave it out.")
  if not 0 < c.curriculum_floor <= 1:
    raise ConfigError(f"rollout.curriculum_floor is {c.curriculum_floor}; it must be above 0, so that no prompt is "
                      "left out for ever, and at most 1.")
  if not rewarded:
    raise ConfigError(f"rollout.curriculum_target is {c.curriculum_target}, but strategy {config.strategy.name!r} does "
                      "not learn from rewards. Leave it out.")
