"""Steps at which a run evaluates and saves; whole runs are in test_main.py, durations in test_durations.py."""

import types

import pytest

from trainer.config import defaults, evaluator
from trainer.errors import ConfigError
from trainer.horizon import make_horizon


def make(num_steps=None, **changed):
  config = defaults()
  config.total_steps, config.log_steps, config.ckpt_percent = 20, 5, None
  config.evals = dict(often=evaluator(type="loss", eval_steps=6, at_start=False), ends=evaluator(
    type="loss", eval_steps=0))
  config.evals = changed.pop("evals", config.evals)
  config.update(changed)
  said = []
  # 4 rows a step, 40 rows an epoch.
  data = types.SimpleNamespace(batch_range=lambda step: (4 * step, 4), rows_per_epoch=40, row_tokens=8,
                               num_steps=num_steps)
  return make_horizon(config, data, said.append), said


def test_evaluators_run_at_their_periods_and_at_both_ends():
  horizon, _ = make()
  assert {step: names for step in range(21) if (names := horizon.evaluates(step))} == {
      0: ["ends"], 6: ["often"], 12: ["often"], 18: ["often"], 20: ["ends", "often"]}


def test_an_evaluation_that_is_due_at_the_last_step_runs_although_none_is_asked_for_at_the_end():
  horizon, _ = make(evals=dict(often=evaluator(type="loss", eval_steps=10, at_start=False, at_end=False),
                               rare=evaluator(type="loss", eval_steps=6, at_start=False, at_end=False)))
  assert {step: names for step in range(21) if (names := horizon.evaluates(step))} == {
      6: ["rare"], 10: ["often"], 12: ["rare"], 18: ["rare"], 20: ["often"]}


@pytest.mark.parametrize("changed, steps, last", [
    (dict(), [], True), (dict(keep_steps=8), [8, 16], True), (dict(ckpt_steps=0), [], False),
    (dict(ckpt_steps=8), [8, 16], True), (dict(ckpt_steps=8, keep_epochs=1.0), [8, 10, 16, 20], True)])
def test_checkpoints_are_due_at_either_period(changed, steps, last):
  horizon, _ = make(**changed)
  assert [step for step in range(1, 21) if horizon.saves(step)] == steps and horizon.saves_last == last


def test_the_data_may_end_first():
  horizon, said = make(num_steps=13)
  assert horizon.total_steps == 13 and horizon.evaluates(13) == ["ends", "often"]
  assert said[0] == "total: 13 steps (the data end there, by input.stop; asked for: 20 steps)"
  with pytest.raises(ConfigError, match="the run has no end"):
    make(total_steps=None)


@pytest.mark.parametrize("total, every", [(20, 2), (9, 1), (100, 10), (95, 9)])
def test_an_evaluator_without_a_period_has_a_tenth_of_the_run(total, every):
  horizon, _ = make(total_steps=total, evals=dict(some=evaluator(type="loss", at_start=False)))
  assert [step for step in range(total) if "some" in horizon.evaluates(step)] == list(range(every, total, every))


def test_what_happens_when_is_said():
  _, said = make(ckpt_steps=0)
  assert "log: every 5 steps" in said and any(line.startswith("ckpt: never") for line in said)


def test_further_durations_are_shares_of_the_whole_run():
  horizon, _ = make()
  config = defaults().schedule
  config.update(warmup_percent=25.0)
  assert horizon.to_steps(config, "warmup") == horizon.total_steps // 4 == 5
