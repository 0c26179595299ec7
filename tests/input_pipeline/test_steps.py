"""Which rows a step takes, also after other sizes: counted by hand."""

import pytest

from input_pipeline.steps import PROMPTS, ROWS, Past, Piece, steps_of_batches, steps_of_rollouts
from trainer import position


def ranges(steps, count):
  return [steps.range(step) for step in range(count)]


def gone_on(steps, step, begin=None):
  """What the next start finds in the checkpoint of a step."""
  saved = steps.saved(steps.tokens_before(step))
  return Past(step, step if begin is None else begin, saved["of"], tuple(Piece(*p) for p in saved["pieces"]),
              saved["tokens"])


def test_sizes_that_change_at_restarts_and_in_stages():
  first = steps_of_batches(8, 1, (), 10)
  assert ranges(first, 3) == [(0, 8), (8, 8), (16, 8)]
  second = steps_of_batches(4, 1, (), 10, gone_on(first, 2))
  assert ranges(second, 5) == [(0, 8), (8, 8), (16, 4), (20, 4), (24, 4)]
  third = steps_of_batches(6, 2, ((4, 9), (6, 3)), 10, gone_on(second, 3))
  assert ranges(third, 8) == [(0, 8), (8, 8), (16, 4), (20, 6), (26, 9), (35, 9), (44, 3), (47, 3)]
  assert third.tokens_before(6) == 440
  # A stage that was to come, and one in which the run was stopped; the config's own first size no longer holds there.
  again = steps_of_batches(6, 2, ((4, 9), (6, 3)), 10, gone_on(third, 5))
  assert again.pieces == third.pieces
  assert ranges(steps_of_batches(2, 1, ((6, 4),), 10, gone_on(third, 5)), 8)[4:] == [(26, 9), (35, 2), (37, 4), (41, 4)]
  # A restart goes back to a checkpoint before a change: what came after it never was.
  assert ranges(steps_of_batches(5, 1, (), 10, gone_on(second, 1)), 3) == [(0, 8), (8, 5), (13, 5)]


def test_the_same_sizes_leave_no_trace():
  steps = steps_of_batches(8, 2, ((3, 16),), 10)
  for step in (0, 1, 3, 5):
    assert steps_of_batches(8, 2, ((3, 16),), 10, gone_on(steps, step)).pieces == steps.pieces
  rollouts = steps_of_rollouts(5, 2, 2)
  assert steps_of_rollouts(5, 2, 2, gone_on(rollouts, 6, 8)).pieces == rollouts.pieces


@pytest.mark.parametrize("rows", range(60))
def test_the_fewest_steps_that_take_so_many_rows(rows):
  steps = steps_of_batches(6, 2, ((5, 3),), 10, gone_on(steps_of_batches(8, 1, (), 10), 2))
  assert steps.steps_for(rows) == next(step for step in range(99) if steps.rows_before(step) >= rows)


def test_rollouts_are_trained_on_to_their_end():
  """4 prompts for 4 steps each; stopped after 6, the second rollout goes on until 8, then 6 prompts for 3 each."""
  steps = steps_of_rollouts(6, 3, 1, gone_on(steps_of_rollouts(4, 2, 2), 6, 8))
  assert [steps.rows_before(step) for step in (0, 4, 6, 8, 11, 14)] == [0, 4, 6, 8, 14, 20]
  assert (steps.at(7).parts, steps.at(8).parts) == (2, 3)
  # Of 15 prompts the last 7 take two rollouts, of which the last is a small one.
  assert steps.steps_for(15) == 14 and steps.steps_for(14) == 11


def test_rows_after_prompts_and_prompts_after_rows_begin_anew_but_places_are_counted_on():
  rows = steps_of_batches(8, 1, (), 10)
  prompts = steps_of_rollouts(4, 2, 1, gone_on(rows, 3))
  assert [prompts.rows_before(step) for step in (3, 5, 7)] == [0, 4, 8]
  back = steps_of_batches(8, 1, (), 10, Past(5, 5, PROMPTS, tuple(prompts.pieces), 777))
  assert (back.rows_before(5), back.rows_before(6), back.tokens_before(6)) == (0, 8, 857)
  assert back.steps_for(8) == 6


def test_checkpoints_from_before_are_read_by_their_config():
  config = {"batch_size": 8, "grad_accum_steps": 1, "seq_len": 10, "rollout": {"num_prompts": 0},
            "input": {"batch_size_stages": [[3, 16]]}}
  past = position.past_of({"step": 4, "config": config})
  assert (past.step, past.begin, past.of, past.tokens) == (4, 4, ROWS, 400)
  assert ranges(steps_of_batches(4, 1, (), 10, past), 5) == [(0, 8), (8, 8), (16, 8), (24, 16), (40, 4)]
  config["rollout"] = {"num_prompts": 4, "updates": 2, "epochs": 2}
  rest = {"done": False, "first_step": 4, "tokens": 1234, "drawn": 9}
  meta = {"step": 6, "config": config, "rest_of_rollout": rest}
  past = position.past_of(meta)
  assert (past.step, past.begin, past.of, past.tokens) == (6, 8, PROMPTS, 1234)
  assert position.rest_of_rollout(meta) == rest | {"updates": 2, "steps": 4}
