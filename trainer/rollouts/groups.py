"""From scored completions to what is trained on: sequences with advantages, or pairs; the metrics and the table.

P groups (a prompt each), G completions of each, K reward functions. All of it is NumPy on the host, over the whole
rollout, so that neither micro-batches nor devices decide what a completion is compared with.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from input_pipeline.examples import advantages as advantages_lib
from input_pipeline.prompt_data import PromptItem
from trainer.errors import ConfigError
from trainer.generate.stop_strings import columns, ending
from trainer.metrics import Mean
from trainer.report import pages
from trainer.rollouts.episode import Episode
from trainer.rollouts.experience import Trajectory

# Completions of a rollout that its table shows as text.
SHOWN = 8


class ScoredGroup(NamedTuple):
  """A group with its rewards; NaN for a missing one."""

  item: PromptItem
  episodes: list[Episode]
  # By function, [G, K].
  values: np.ndarray
  failed: np.ndarray
  abstained: np.ndarray
  # Combined, [G]; what advantages compare, these or `advantages.normalized_sum`; whether all of that is equal.
  rewards: np.ndarray
  worth: np.ndarray
  zero_spread: bool


class TrainingSamples(NamedTuple):
  """The sequences of a rollout that are trained on."""

  # Each the sequences that must share a row: (sequence, advantage, number of its source).
  units: list[list[tuple[Trajectory, float, int]]]
  # Of every completion, [P, G]; NaN for a completion without one.
  advantages: np.ndarray
  # Completions or groups left out, by metric.
  counts: dict[str, float]


def sequences(groups: list[ScoredGroup], baseline: str, scale: str, mask_truncated: bool, apart: bool = False
              ) -> TrainingSamples:
  """Every completion with its advantage, a unit each; left out are those without a reward, and with `mask_truncated`
  those that were cut off (which count in their group's mean). `apart`: baseline and scale are in `worth` already."""
  worth_PxG = np.stack([group.worth for group in groups])
  advantages_PxG = (advantages_lib.normalized(worth_PxG) if apart else
                    advantages_lib.advantages(worth_PxG, baseline, scale))
  units, masked, without = [], 0, 0
  for group, advantages_G in zip(groups, advantages_PxG, strict=True):
    for episode, advantage in zip(group.episodes, advantages_G.tolist(), strict=True):
      if math.isnan(advantage):
        without += 1
      elif mask_truncated and episode.trajectory.finish_reason == "length":
        masked += 1
      else:
        units.append([(episode.trajectory, advantage, group.item.source)])
  return TrainingSamples(units, advantages_PxG, {"completions/masked": masked, "completions/without_reward": without})


def valued(groups: list[ScoredGroup], mask_truncated: bool) -> TrainingSamples:
  """As `sequences`, each with its reward in the place of the advantage, which a critic makes of it for each token."""
  samples = sequences(groups, "none", "none", mask_truncated)
  return samples._replace(advantages=np.full_like(samples.advantages, np.nan))


def every(groups: list[ScoredGroup], mask_truncated: bool) -> TrainingSamples:
  """Every completion, a unit each, without advantages; left out are those that were cut off, with `mask_truncated`."""
  ended = [(episode, group.item.source) for group in groups for episode in group.episodes
           if not (mask_truncated and episode.trajectory.finish_reason == "length")]
  total = sum(len(group.episodes) for group in groups)
  return TrainingSamples([[(episode.trajectory, 0.0, source)] for episode, source in ended],
                         np.full((len(groups), len(groups[0].episodes)), np.nan, np.float32),
                         {"completions/masked": total - len(ended)})


def compared(rewards_G: np.ndarray, episodes: list[Episode], mask_truncated: bool) -> np.ndarray:
  """The rewards among which a pair is looked for: NaN for completions that were cut off, with `mask_truncated`."""
  cut_G = np.array([episode.trajectory.finish_reason == "length" for episode in episodes])
  return np.where(cut_G & mask_truncated, np.nan, rewards_G)


def pairs(groups: list[ScoredGroup], seq_len: int, mask_truncated: bool) -> TrainingSamples:
  """Of each group the best and the worst completion, chosen and rejected; none of a group whose rewards are all equal,
  or that has fewer than two. With `mask_truncated` those that were cut off are neither.

  Raises:
    ConfigError: a pair does not fit into a row.
  """
  signs_PxG = np.full((len(groups), len(groups[0].episodes)), np.nan, np.float32)
  units = []
  counts = dict.fromkeys(("completions/masked", "completions/without_reward", "rollout/ties", "rollout/unpaired"), 0.0)
  for group, signs_G in zip(groups, signs_PxG, strict=True):
    rewards_G = compared(group.rewards, group.episodes, mask_truncated)
    without = int(np.isnan(group.rewards).sum())
    usable = int(np.isfinite(rewards_G).sum())
    counts["completions/without_reward"] += without
    counts["completions/masked"] += len(rewards_G) - usable - without
    if group.zero_spread:
      counts["rollout/ties" if usable >= 2 else "rollout/unpaired"] += 1
      continue
    best, worst = int(np.nanargmax(rewards_G)), int(np.nanargmin(rewards_G))
    signs_G[best], signs_G[worst] = 1.0, -1.0
    pair = [(group.episodes[i].trajectory, float(signs_G[i]), group.item.source) for i in (best, worst)]
    size = sum(len(sequence.ids) for sequence, _, _ in pair)
    if size > seq_len:
      raise ConfigError(f"{group.item.prompt.where}: the best and the worst completion with their prompts have {size} "
                        f"tokens, more than a row of seq_len={seq_len}. Set seq_len to twice the longest prompt and "
                        "rollout.max_new_tokens.")
    units.append(pair)
  return TrainingSamples(units, signs_PxG, counts)


class NoSignal(NamedTuple):
  """Why a rollout teaches nothing, and what helps.

  `equal`: its rewards are there, and all those that are compared with one another are the same.
  """

  why: str
  advice: str
  equal: bool


def no_signal(names: tuple[str, ...], groups: list[ScoredGroup], samples: TrainingSamples, rewarded: bool,
              valued: bool = False) -> NoSignal | None:
  """Why these groups teach nothing; None if some advantage is not 0, or where none is needed (no rewards, or a critic,
  which learns from equal ones) if some are trained on."""
  if not rewarded:
    total = sum(len(group.episodes) for group in groups)
    return None if samples.units else _all_cut_off(f"all of its {total} completions")
  if valued and samples.units or any(advantage for unit in samples.units for _, advantage, _ in unit):
    return None
  rewards_PxG = np.stack([group.rewards for group in groups])
  given = int(np.isfinite(rewards_PxG).sum())
  least = 1 if valued else 2
  masked, several = samples.counts["completions/masked"], (np.isfinite(rewards_PxG).sum(axis=1) >= least).any()
  if not several:
    shares = [(name, what, np.mean([getattr(group, what)[:, k] for group in groups]))
              for k, name in enumerate(names) for what in ("failed", "abstained")]
    failures = ", ".join(f"{name} {what} for {share:.0%}" for name, what, share in shares if share)
    some = f"only {given}, no two to one prompt," if given else "none"
    return NoSignal(f"{some} of its {rewards_PxG.size} completions have a reward: {failures}",
                   "Mend what gives the rewards, and look at the completions in samples/.", False)
  if masked and not samples.units and not samples.counts.get("rollout/ties"):
    return _all_cut_off(f"{masked:g} of its {given} completions with a reward")
  low, high = float(np.nanmin(rewards_PxG)), float(np.nanmax(rewards_PxG))
  what = f"{low:g}" if low == high else f"{low:g} to {high:g}, the same within each group"
  return NoSignal(f"its {given} rewards do not differ ({what}), so that no completion is better than another",
                 "Use prompts that the model sometimes gets right, a reward with more than two values, more "
                 "completions a prompt (rollout.group_size), or a model that begins with more.", True)


def _all_cut_off(which: str) -> NoSignal:
  return NoSignal(f"{which} were cut off at rollout.max_new_tokens, and are left out by rollout.mask_truncated",
                  "Raise rollout.max_new_tokens (and seq_len), or use rollout.mask_truncated=False.", False)


def metrics(names: tuple[str, ...], kept: list[ScoredGroup], replaced: list[ScoredGroup], samples: TrainingSamples
            ) -> dict[str, Any]:
  """Metrics of all samples, by TRL's names; see `advantages.statistics`. `replaced`: groups that are not kept."""
  groups = kept + replaced
  advantages_PxG = np.full((len(groups), samples.advantages.shape[1]), np.nan, np.float32)
  advantages_PxG[:len(kept)] = samples.advantages
  columns = ("values", "failed", "abstained", "rewards")
  parts = (np.stack([getattr(group, column) for group in groups]) for column in columns)
  found = advantages_lib.statistics(names, *parts, advantages_PxG, np.stack([group.worth for group in groups]))
  lengths = np.array([e.trajectory.weights.sum() for group in groups for e in group.episodes])
  reasons = np.array([e.trajectory.finish_reason for group in groups for e in group.episodes])
  ended = reasons == "stop"
  found["completions/clipped_ratio"] = Mean(float((reasons == "length").sum()), float(len(reasons)))
  # Terminated: of completions that ended by themselves.
  for name, some in (("length", lengths), ("terminated_length", lengths[ended])):
    if len(some):
      found |= {f"completions/mean_{name}": some.mean(), f"completions/min_{name}": some.min(),
                f"completions/max_{name}": some.max()}
  return found | samples.counts | {"rollout/groups_replaced": len(replaced)}


def table(names: tuple[str, ...], groups: list[ScoredGroup], samples: TrainingSamples) -> list[dict[str, Any]]:
  """A line for each completion, JSON-able."""

  def number(x: Any) -> float | None:
    return None if math.isnan(x) else round(float(x), 6)

  return [
      {"where": group.item.prompt.where, "sample": i, "prompt": group.item.prompt.text, "completion": episode.text,
       "reward": number(group.rewards[i]), "advantage": number(advantage),
       "rewards": {name: number(value) for name, value in zip(names, group.values[i], strict=True)},
       **columns(episode.trajectory.finish_reason, episode.trajectory.stop_reason),
       "tokens": int(episode.trajectory.weights.sum())}
      for group, advantages_G in zip(groups, samples.advantages, strict=True)
      for i, (episode, advantage) in enumerate(zip(group.episodes, advantages_G, strict=True))]


def write(file: Path, rows: list[dict[str, Any]], images: list[Sequence[Any]], title: str) -> str:
  """Writes the table of `table` to `file`.jsonl, and as a page with each group's images to `file`.html; returns the
  first of it as text."""
  file.parent.mkdir(parents=True, exist_ok=True)
  lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
  file.with_suffix(".jsonl").write_text(lines, encoding="utf-8")
  of_rows = [images[row * len(images) // len(rows)] for row in range(len(rows))]
  cards = [pages.Card(f"{row['where']}, sample {row['sample']}", shown, [
      *((key, str(row[key])) for key in ("prompt", "completion", "reward", "advantage")),
      ("finish_reason", ending(row))])
           for row, shown in zip(rows[:pages.MOST_CARDS], of_rows, strict=False)]
  file.with_suffix(".html").write_text(pages.cards_page(title, cards, len(rows)), encoding="utf-8")
  return "\n\n".join(
      f"--- {row['where']}, reward {row['reward']}, advantage {row['advantage']}, {ending(row)}\n"
      f"{row['prompt']}\n>>> {row['completion']}" for row in rows[:SHOWN])
