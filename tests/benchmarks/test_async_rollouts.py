"""The simulation that docs/grpo.md quotes."""

import random

import pytest

from benchmarks import async_rollouts as sim


def test_a_chip_decodes_what_it_should_in_the_time_that_it_reads_in():
  """One text of 100 tokens, by a loop over its steps; of two, rows in use until the first ends."""
  chip = sim.Chip()
  chip.waiting.extend([(100, ("a", 100)), (40, ("b", 40))])
  chip.fill()
  assert chip.end_one()[0] == "b" and chip.end_one()[0] == "a" and not chip.rows
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
  assert refilled.idle < whole.idle < turns.idle and whole.stalest == 1 and refilled.stalest <= 4
  assert sim.refilled(3, 2) == sim.refilled(3, 2) and sim.lengths(random.Random(1)) != sim.lengths(random.Random(2))
