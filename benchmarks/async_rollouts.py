"""How long chips wait in reinforcement learning: 8 H100s that sample beside 8 that train, simulated, by schedule.

    python -m benchmarks.async_rollouts

A model of 8 B parameters in bfloat16, a copy on each chip that samples; completions whose lengths have a heavy tail. A
step of decoding reads the weights and the rows' caches once; training takes 6 FLOPs a parameter and token at 40% of the
peak. A row without a text counts as idle, as does a chip that trains nothing; handing weights over takes 2 s, in which
nothing is sampled. Pure Python, seeded: the same numbers everywhere. No chip was measured.

- in turns: a rollout is sampled, then trained on, then the next one is sampled.
- whole rollouts: `rollout.concurrent`. One rollout after another, each by one policy, at most k updates old.
- carried over: `rollout.concurrent` with `rollout.carry_over` and `rollout.in_flight`. A row that ends is given to a
  prompt of a later rollout, new weights go in between two tokens, and a rollout is over when enough groups are whole;
  the texts that go on do so in their rows.
- rows refilled: the same where no rollout ends: a group is trained on when it is whole, and dropped where it has become
  older than k updates. Not in Weft.
"""

import argparse
import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CHIPS, ROWS = 8, 256  # that sample; texts at a time on each
BANDWIDTH, WEIGHTS, CACHE = 3.35e12, 16e9, 131_072  # bytes a second, bytes, bytes a token
TRAINED_PER_SECOND = CHIPS * 0.4 * 989e12 / (6 * 8e9)  # tokens
PROMPTS, GROUP, PROMPT = 512, 8, 300  # groups of a rollout, completions of each, tokens of a prompt
MEDIAN, SIGMA, MOST = 1_200, 1.0, 16_384  # tokens of a completion: lognormal, cut off
HANDOVER = 2.0  # seconds


@dataclass
class Result:
  """Shares of time, updates an hour, and updates between sampling and training."""

  sampler_idle: float
  trainer_idle: float
  per_hour: float
  staleness: float
  stalest: int
  dropped: int = 0

  @property
  def idle(self) -> float:
    return (self.sampler_idle + self.trainer_idle) / 2


def lengths(rng: random.Random) -> list[list[int]]:
  """Of a rollout's completions, by group."""
  return [[max(1, min(MOST, int(rng.lognormvariate(0, SIGMA) * MEDIAN))) for _ in range(GROUP)] for _ in range(PROMPTS)]


class Chip:
  """Decodes up to ROWS texts at a time; time is the caller's. So do several in step, of which each has its ROWS.

  Attributes:
    waiting: texts that have no row, as (tokens to sample, name, tokens that were sampled before).
    rows: those that have one, a heap of (steps done at its end, its number, name, tokens at its end).
    begun: is told the name of each text that is given a row.
  """

  def __init__(self, count: int = 1, begun: Callable[[Any], None] = lambda name: None):
    self.waiting: deque[tuple[int, Any, int]] = deque()
    self.rows: list[tuple[int, int, Any, int]] = []
    self.steps, self._number, self._context, self.now = 0, 0, 0, 0.0
    self.row_seconds = 0.0
    self._count, self._begun = count, begun

  def fill(self) -> None:
    while self.waiting and len(self.rows) < ROWS * self._count:
      tokens, name, before = self.waiting.popleft()
      heapq.heappush(self.rows, (self.steps + tokens, self._number, name, before + tokens))
      self._number, self._context = self._number + 1, self._context + PROMPT + before
      self._begun(name)

  def leave(self) -> list[tuple[Any, int]]:
    """Takes all texts off; (name, tokens that are left) of those that had a row."""
    left = [(name, end - self.steps) for end, _, name, _ in self.rows]
    self.rows, self._context = [], 0
    self.waiting.clear()
    return left

  def next_end(self) -> float:
    """When the next text ends."""
    if not self.rows:
      return float("inf")
    return self.now + self._seconds(self.rows[0][0] - self.steps)

  def _seconds(self, steps: int) -> float:
    """Of so many steps with these rows, whose caches grow meanwhile."""
    mean = self._context + len(self.rows) * steps / 2
    return steps * (WEIGHTS + CACHE * mean / self._count) / BANDWIDTH

  def end_one(self) -> Any:
    """Decodes up to the end of the next text; returns its name."""
    steps = self.rows[0][0] - self.steps
    seconds = self._seconds(steps)
    self.now, self.steps, self.row_seconds = self.now + seconds, self.steps + steps, (
        self.row_seconds + seconds * len(self.rows))
    self._context += steps * len(self.rows)
    _, _, name, tokens = heapq.heappop(self.rows)
    self._context -= PROMPT + tokens
    return name


def sampled(groups: list[list[int]]) -> tuple[float, float]:
  """(seconds that a rollout takes, row-seconds in use): each group is on the chip that has the fewest groups."""
  chips = [Chip() for _ in range(CHIPS)]
  for number, group in enumerate(groups):
    chips[number % CHIPS].waiting.extend((tokens, number, 0) for tokens in group)
  for chip in chips:
    chip.fill()
    while chip.rows:
      chip.end_one()
      chip.fill()
  return max(chip.now for chip in chips), sum(chip.row_seconds for chip in chips)


def trained(groups: list[list[int]]) -> float:
  """Seconds of an update."""
  return sum(PROMPT + tokens for group in groups for tokens in group) / TRAINED_PER_SECOND


def whole_rollouts(updates: int, most_stale: int, seed: int = 0) -> Result:
  """One rollout after another; `most_stale` 0: in turns with updates."""
  rng = random.Random(seed)
  samples_free = trains_free = used = worked = 0.0
  ends, staleness = [0.0], []  # ends[v]: when the policy after v updates is there
  for number in range(updates):
    groups = lengths(rng)
    begin = max(samples_free, ends[max(0, number - most_stale)])
    version = max(v for v, end in enumerate(ends) if end <= begin)
    seconds, rows = sampled(groups)
    samples_free = begin + HANDOVER + seconds
    trains_free = max(trains_free, samples_free) + trained(groups)
    ends.append(trains_free)
    used, worked = used + rows, worked + trained(groups)
    staleness.append(number - version)
  return _result(ends[-1], used, worked, staleness)


def carried(updates: int, most_stale: int, seed: int = 0) -> Result:
  """Rollouts that are over when PROMPTS groups are whole, with what goes on in the next; each update is of one. As
  trainer/rollouts/carried.py says which groups are begun and when a rollout is over; `most_stale` 2 at least."""
  rng = random.Random(seed)
  groups: list[Begun] = []  # that are not trained on, the oldest first
  version, ends, worked, staleness = 0, [0.0], 0.0, []

  def begin(name: tuple[Begun, int]) -> None:
    group, _ = name
    group.oldest = version if group.oldest is None else group.oldest

  chip, upcoming = Chip(CHIPS, begin), deque(lengths(rng))
  for number in range(updates):
    chip.now = max(chip.now, ends[max(0, number - (most_stale - 1))])
    newest = max(v for v, end in enumerate(ends) if end <= chip.now)
    chip.now, version = chip.now + HANDOVER * (newest > version), newest
    most = PROMPTS + min(ROWS * CHIPS, (most_stale - number + version) * PROMPTS)
    while len(groups) < most:
      if not upcoming:
        upcoming.extend(lengths(rng))
      groups.append(Begun(upcoming.popleft()))
    chip.waiting.extend((left, (group, i), group.sizes[i] - left) for group in groups for i, left in group.left.items())
    chip.fill()
    whole = sum(not group.left for group in groups)
    while whole < PROMPTS or (rest := _rest(groups, number, most_stale)) is None:
      group, i = chip.end_one()
      del group.left[i]
      whole += not group.left
      if version + 1 < len(ends) and ends[version + 1] <= chip.now:  # weights that have come meanwhile
        chip.now, version = chip.now + HANDOVER, version + 1
      chip.fill()
    for (group, i), left in chip.leave():
      group.left[i] = left
    of_update = [group for group in groups if not any(group is other for other in rest)]
    seconds = trained([group.sizes for group in of_update])
    ends.append(max(chip.now, ends[-1]) + seconds)
    worked += seconds
    staleness += [number - group.oldest for group in of_update]
    groups = rest
  return _result(ends[-1], chip.row_seconds, worked, staleness)


@dataclass(eq=False)
class Begun:
  """A group: tokens of its texts, those that are left of each that is not whole, and the policy of its first token."""

  sizes: list[int]
  left: dict[int, int] = field(init=False)
  oldest: int | None = None

  def __post_init__(self):
    self.left = dict(enumerate(self.sizes))


def _rest(groups: list[Begun], number: int, most_stale: int) -> list[Begun] | None:
  """The groups that go on after the rollout of that number, which has enough whole ones; None: one would be too old."""
  chosen = {id(group) for group in [group for group in groups if not group.left][:PROMPTS]}
  rest = [group for group in groups if id(group) not in chosen]
  in_time = all(group.oldest is None or most_stale - number + group.oldest > place // PROMPTS
                for place, group in enumerate(rest))
  return rest if in_time else None


def refilled(updates: int, most_stale: int, seed: int = 0) -> Result:
  """Rows go on across rollouts and versions; an update takes the first PROMPTS groups that are whole."""
  rng = random.Random(seed)
  chips, left, begun_by, sizes = [Chip() for _ in range(CHIPS)], {}, {}, {}
  begun, version, dropped, busy_until, worked = 0, 0, 0, None, 0.0
  whole: deque[int] = deque()
  upcoming: deque[list[int]] = deque()
  staleness: list[int] = []
  now = 0.0
  while version < updates:
    while begun < (version + most_stale + 1) * PROMPTS + dropped:
      chip = min(chips, key=lambda c: len(c.waiting) + len(c.rows))
      if len(chip.waiting) + len(chip.rows) + GROUP > ROWS:
        break  # no room: what is begun later is of a newer policy
      if not upcoming:
        upcoming.extend(lengths(rng))
      group = upcoming.popleft()
      chip.now = chip.now if chip.rows else max(chip.now, now)
      chip.waiting.extend((tokens, begun, 0) for tokens in group)
      left[begun], begun_by[begun], sizes[begun] = len(group), version, group
      chip.fill()
      begun += 1
    if busy_until is None and len(whole) >= PROMPTS:
      batch = [whole.popleft() for _ in range(PROMPTS)]
      staleness += [version - begun_by[number] for number in batch]
      seconds = trained([sizes[number] for number in batch])
      busy_until, worked = now + seconds, worked + seconds
    chip = min(chips, key=Chip.next_end)
    if busy_until is not None and busy_until <= chip.next_end():
      now, busy_until, version = busy_until, None, version + 1
      for each in chips:
        each.now += HANDOVER if each.rows else 0.0
      stale = [number for number in whole if version - begun_by[number] > most_stale]
      dropped += len(stale)
      whole = deque(number for number in whole if version - begun_by[number] <= most_stale)
      continue
    number = chip.end_one()
    now = max(now, chip.now)
    left[number] -= 1
    if not left[number] and version - begun_by[number] <= most_stale:
      whole.append(number)
    dropped += not left[number] and version - begun_by[number] > most_stale
  return _result(now, sum(chip.row_seconds for chip in chips), worked, staleness, dropped)


def _result(end: float, used: float, worked: float, staleness: list[int], dropped: int = 0) -> Result:
  updates = len(staleness) if len(staleness) < PROMPTS else len(staleness) / PROMPTS
  return Result(1 - used / (end * CHIPS * ROWS), 1 - worked / end, 3600 * updates / end,
                sum(staleness) / len(staleness), max(staleness), dropped)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--updates", type=int, default=20)
  updates = parser.parse_args().updates
  print(f"{'schedule':<32}{'idle':>7}{'sampler':>9}{'trainer':>9}{'updates/h':>11}{'staleness':>11}{'most':>6}"
        f"{'dropped':>9}")
  rows = [("in turns", whole_rollouts(updates, 0)),
          *((f"whole rollouts, max_staleness={k}", whole_rollouts(updates, k)) for k in (1, 2, 4)),
          *((f"carried over, max_staleness={k}", carried(updates, k)) for k in (2, 4, 6)),
          *((f"rows refilled, max_staleness={k}", refilled(updates, k)) for k in (1, 2, 4))]
  for name, r in rows:
    print(f"{name:<32}{r.idle:>7.1%}{r.sampler_idle:>9.1%}{r.trainer_idle:>9.1%}{r.per_hour:>11.1f}"
          f"{r.staleness:>11.2f}{r.stalest:>6}{r.dropped:>9}")


if __name__ == "__main__":
  main()
