"""Groups of earlier rollouts that are trained on once more, beside those of a rollout (docs/grpo.md).

A rollout remembers the groups that had something to teach, its own and those of the rollouts before it. Their tokens
keep the log-probs that they were sampled with, so that `strategy.correction` makes up for their age; advantages are
those that they had, among completions of the same policy. Which are trained on again follows from the seed, the number
of the rollout, and what is remembered: checkpoints hold that.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from input_pipeline.packing import permutation
from trainer.rollouts import experience as experience_lib
from trainer.rollouts.experience import Experience, Trajectory

# A completion that is trained on: (itself, its advantage, number of its source).
Member = tuple[Trajectory, float, int]
# What the names of its arrays in checkpoints begin with.
NAME = "remembered_"


class Remembered(NamedTuple):
  """A group that was trained on: the number of its rollout, the updates that its policy had had, its completions."""

  rollout: int
  version: int
  members: Sequence[Member]


@dataclass(frozen=True)
class Replay:
  """How groups are trained on again: `count` for each rollout, of the `window` rollouts before it."""

  count: int
  window: int
  seed: int

  def choose(self, remembered: Sequence[Remembered], number: int) -> list[Remembered]:
    """Those that rollout `number` trains on again, each at most once: the first of a permutation."""
    known = [group for group in remembered if group.rollout >= number - self.window]
    return [known[place] for place in permutation(len(known), self.seed, "replay", number)[:self.count]]

  def after(self, remembered: Sequence[Remembered], number: int, version: int, units: Iterable[Sequence[Member]]
            ) -> list[Remembered]:
    """What is remembered after rollout `number`, whose own units are completions, those of a prompt side by side."""
    if not self.count:
      return []
    own = [Remembered(number, version, [unit[0] for unit in group])
           for _, group in itertools.groupby(units, lambda unit: unit[0][0].number)]
    return [group for group in remembered if group.rollout > number - self.window] + [
        group for group in own if any(advantage for _, advantage, _ in group.members)]


def units(groups: Iterable[Remembered]) -> list[list[Member]]:
  """Each of their completions by itself."""
  return [[member] for group in groups for member in group.members]


def metrics(groups: Sequence[Remembered], first_step: int) -> dict[str, float]:
  """Of the groups that are trained on again after `first_step` updates: how many, and how old they are in the mean."""
  if not groups:
    return {}
  return {"rollout/replayed_groups": float(len(groups)),
          "rollout/replayed_staleness": float(np.mean([first_step - group.version for group in groups]))}


def saved(groups: Sequence[Remembered], name: str) -> tuple[list[tuple[int, int]], dict[str, np.ndarray]]:
  """(JSON-able, {name of an array, which begins with `name`: it}), from which `restored` makes them again."""
  arrays = experience_lib.collect(group.members for group in groups).arrays()
  return [(group.rollout, group.version) for group in groups], {f"{name}{key}": part for key, part in arrays.items()}


def restored(meta: Sequence[Sequence[int]], arrays: dict[str, np.ndarray], name: str) -> list[Remembered]:
  """The groups, whose arrays are taken out of `arrays`."""
  parts = {key.removeprefix(name): arrays.pop(key) for key in list(arrays) if key.startswith(name)}
  members = _members(Experience(**parts)) if parts else []
  return [Remembered(rollout, version, group) for (rollout, version), group in zip(meta, members, strict=True)]


def _members(experience: Experience) -> list[list[Member]]:
  """What `experience.collect` was given, but for how completions ended, which training does not ask for."""
  images: dict[int, list[bytes]] = {}
  for owner, content in experience.images:
    images.setdefault(owner, []).append(content)
  found: list[list[Member]] = [[] for _ in range(experience.num_units)]
  ends = np.cumsum(experience.lengths)
  for place, unit in enumerate(experience.units.tolist()):
    taken = slice(int(ends[place] - experience.lengths[place]), int(ends[place]))
    found[unit].append((Trajectory(
        experience.tokens[taken], experience.weights[taken], experience.logprobs[taken],
        int(experience.prompt_lengths[place]), "", int(experience.numbers[place]),
        experts=None if experience.experts is None else experience.experts[taken],
        images=tuple(images.get(place, ()))), float(experience.advantages[place]), int(experience.sources[place])))
  return found
