"""The simulation that docs/grpo.md quotes."""

import random

import pytest

from benchmarks import async_rollouts as sim


def test_a_chip_decodes_what_it_should_in_the_time_that_it_reads_in():
  """One text of 100 tokens, by a loop over its steps; of two, rows in use until the first ends."""
  chip = sim.Chip()
  chip.waiting.extend([(100, "a", 0), (40, "b", 0)])
  chip.fill()
  assert chip.end_one() == "b" and chip.end_one() == "a" and not chip.rows
  seconds = rows = 0.0
  for step in range(100):
    alive = 2 if step < 40 else 1
    took = (sim.WEIGHTS + sim.CACHE * alive * (sim.PROMPT + step + 0.5)) / sim.BANDWIDTH
    seconds, rows = seconds + took, rows + took * alive
  assert chip.now == pytest.approx(seconds, rel=1e-9) and chip.row_seconds == pytest.approx(rows, rel=1e-9)
  assert chip._context == 0


def test_turns_leave_more_than_40_percent_idle_and_refilled_rows_less_than_10():
  turns, whole, refilled = sim.whole_rollouts(6, 0), sim.whole_rollouts(6, 1), sim.refilled(16, 4)
  assert turns.idle > 0.4 > 0.1 > refilled.idle and turns.stalest == 0
  assert sim.carried(20, 6).idle < 0.1  # what Weft does
  assert refilled.idle < whole.idle < turns.idle and whole.stalest == 1 and refilled.stalest <= 4
  assert sim.refilled(3, 2) == sim.refilled(3, 2) and sim.lengths(random.Random(1)) != sim.lengths(random.Random(2))


def test_rollouts_that_are_carried_over_train_on_every_group_in_time(monkeypatch):
  """Fewer and shorter texts on fewer rows: the more updates a group may wait, the less is idle; each is trained on
  once, and none is dropped."""
  for name, value in dict(ROWS=16, PROMPTS=24, GROUP=4, MEDIAN=100, MOST=1_500).items():
    monkeypatch.setattr(sim, name, value)
  lengths, trained, drawn, learned = sim.lengths, sim.trained, [], []
  monkeypatch.setattr(sim, "lengths", lambda rng: drawn.append(lengths(rng)) or drawn[-1])
  monkeypatch.setattr(sim, "trained", lambda groups: learned.extend(map(id, groups)) or trained(groups))
  found = {k: sim.carried(20, k) for k in (2, 6)}
  assert all(result.stalest <= k and result.dropped == 0 for k, result in found.items())
  assert len(learned) == len(set(learned)) == 2 * 20 * 24
  assert set(learned) <= {id(group) for rollout in drawn for group in rollout}
  assert found[6].idle < found[2].idle < sim.whole_rollouts(20, 0).idle
