"""The run's own methods, each of a run of which only what it needs is there; whole runs are in test_wiring.py."""

import contextlib
import types

import jax.numpy as jnp
import pytest

from trainer.config import defaults
from trainer.errors import ConfigError
from trainer.horizon import Evaluation, Horizon
from trainer.run import Run


class Batches:
  """Has waited 1, 3 and 7 s for its three batches, all of them together."""

  def __init__(self):
    self.wait_seconds, self._more = 0.0, iter([1.0, 2.0, 4.0])

  def __next__(self):
    self.wait_seconds += next(self._more)
    return {"tokens": self.wait_seconds}


def test_the_wait_for_each_batch_is_counted_once():
  waited, looked = [], []
  run = types.SimpleNamespace(chrono=types.SimpleNamespace(waited=waited.append),
                              end_with_data=lambda: looked.append("whether the data end"))
  batches = Batches()
  batches_seen = [Run.next_batch(run, batches) for _ in range(4)]
  assert waited == [1.0, 2.0, 4.0] and batches_seen[2:] == [{"tokens": 7.0}, None]
  assert looked == ["whether the data end"] * 3  # each batch may have shown it


def test_what_a_run_begins_with(tmp_path):
  """Its config as JSON, its last evaluation, a copy of what callbacks remember; it may be shorter than it was meant."""
  (tmp_path / "metrics.jsonl").write_text('{"step": 2, "eval/a": 1.5}\n{"step": 4, "eval/a": 0.5}\n')
  called, remembered, config = [], {"mine": 1}, defaults()
  config.seed = 7
  run = types.SimpleNamespace(config=config, workdir=tmp_path, step=3, remembered=remembered,
                              end_with_data=lambda: called.append("whether the data end"))
  Run.__post_init__(run)
  assert run.config_json["seed"] == 7 and run.last_eval == (2, {"eval/a": 1.5})
  assert run.remembered == remembered and run.remembered is not remembered and called == ["whether the data end"]


def test_what_is_being_saved_is_finished_and_then_writers_are_closed():
  called = []
  saves, rows = (types.SimpleNamespace(close=lambda name=name: called.append(name)) for name in ("saves", "rows"))
  Run.close(types.SimpleNamespace(checkpoints=saves, writer=rows))
  assert called == ["saves", "rows"]


def test_metrics_of_a_step_are_fetched_when_the_next_is_dispatched_and_once():
  found = []
  run = Run.__new__(Run)
  run._pending, run.stop_requested, run.agreed_stop = None, "", False
  run.callbacks = lambda hook, run, step, metrics: found.append((hook, step, metrics, run.batch))
  run.defer(1, {"loss": jnp.float32(0.5)}, "first")
  assert not found
  run.defer(2, {"loss": jnp.float32(0.25), "stop_requests": jnp.int32(1)}, "second")
  assert found == [("on_step_end", 1, {"loss": 0.5}, "first")] and not run.agreed_stop
  run.settle()
  assert found[1:] == [("on_step_end", 2, {"loss": 0.25}, "second")] and run.batch is None
  assert run.agreed_stop and run.stop_requested
  run.settle()
  assert len(found) == 2


def saving(metrics, at, best="eval/val/loss", saved=True, go_back=None):
  """What a run that is at step 8 saves, whose last evaluation, after step `at`, gave `metrics`."""
  found, paused = [], []
  run = Run.__new__(Run)
  run._pending, run.step, run.state, run.go_back = (8, {"loss": 0.5}, "batch"), 8, {"x": 1}, go_back
  run.pinned, run.remembered = {"base": "b"}, {"spikes": 1}
  run.config, run.config_json = types.SimpleNamespace(keep_best=best), {"seed": 2}
  run.chrono = types.SimpleNamespace(pause=lambda kind: paused.append(kind) or contextlib.nullcontext(),
                                     state=lambda: {"train": 3.0})
  run.data = types.SimpleNamespace(
      batch_range=lambda step: (10 * step, 10), taken=types.SimpleNamespace(saved=lambda tokens: {"tokens": tokens}),
      counters=lambda step: {"main": step}, fingerprint="f", saved=lambda step: ({"rest": step}, None),
      tokens_seen=lambda step: 100 * step)
  run.last_eval = (at, metrics)
  run.checkpoints = types.SimpleNamespace(save=lambda *args: (found.append(args), saved)[1])
  run.writer = types.SimpleNamespace(write_scalars=lambda step, row: found.append((step, list(row))))
  run.callbacks = lambda hook, run, step, *metrics: found.append((hook, step, *metrics))
  run.save()
  assert paused == ["checkpoint"] * (go_back is None)
  assert found.pop(0) == ("on_step_end", 8, {"loss": 0.5})  # before anything else
  return found


def test_a_checkpoint_has_what_was_evaluated_of_its_own_state_alone():
  metrics = {"eval/val/loss": 1.5, "eval/other/loss": 2.5}
  (step, state, meta, scored, arrays), *after = saving(metrics, at=8)
  assert (step, state, scored, arrays) == (8, {"x": 1}, metrics, None)
  assert after == [(8, ["time/checkpoint"]), ("on_checkpoint", 8)]
  assert meta == {"step": 8, "rows_seen": 80, "taken": {"tokens": 800}, "data": {"main": 8}, "data_fingerprint": "f",
                  "seconds": {"train": 3.0}, "config": {"seed": 2}, "pinned": {"base": "b"},
                  "remembered": {"spikes": 1}, "rest_of_rollout": {"rest": 8}}
  assert saving(metrics, at=7)[0][3] == {} == saving({}, at=-1)[0][3]


@pytest.mark.parametrize("last, total, told", [(None, 9, False), (9, 9, False), (8, 8, True), (12, 9, False)])
def test_a_run_is_shortened_only_where_its_data_end_earlier(last, total, told):
  said = []
  run = types.SimpleNamespace(data=types.SimpleNamespace(num_steps=last), total_steps=9, say=said.append,
                              horizon=Horizon(9, 1, 1, 0, True, {}, None))
  Run.end_with_data(run)
  assert run.horizon.total_steps == total
  assert bool(said) == told and (not told or said[0].startswith("total: 8 steps instead of 9"))


class Scores:
  """An evaluator that gives what it is asked with."""

  def __init__(self, wants=False, error=None):
    self.wants_reference, self._error = wants, error

  def run(self, params, step, *reference):
    if self._error:
      raise ValueError(self._error)
    yield "seen", (params, step, *reference)


def evaluating(names, on_error="stop", **evaluators):
  """(the run after these evaluations at step 8, what it wrote and called); its last one was after step 6."""
  found, paused = [], []
  run = Run.__new__(Run)
  run._pending, run.step, run.failed_evaluations = (8, {"loss": 0.5}, "batch"), 8, 0
  run.state = {"params": {"a": 1, "b": 2}, "ema": {"a": 10}, "reference": {"b": 20}}
  run.chrono = types.SimpleNamespace(pause=lambda kind: paused.append(kind) or contextlib.nullcontext())
  run.evaluators, run.last_eval = evaluators, (6, {"eval/old/loss": 1.0})
  run.horizon = Horizon(9, 1, 1, 0, True, {name: Evaluation(2, False, True, on_error) for name in evaluators}, None)
  run.writer = types.SimpleNamespace(write_scalars=lambda step, row: found.append((step, row)))
  run.callbacks = lambda hook, run, *args: found.append((hook, *args))
  run.evaluate(names)
  assert paused == ["eval"]
  assert found.pop(0) == ("on_step_end", 8, {"loss": 0.5})  # before anything else
  return run, found


def test_an_evaluation_is_of_the_averages_with_the_reference_where_it_is_wanted_and_of_nothing_older():
  run, (of_plain, of_wanting, (step, row)) = evaluating(["plain", "wanting"], plain=Scores(), wanting=Scores(True),
                                                        other=Scores())
  plain, wanting = ({"a": 10, "b": 2}, 8), ({"a": 10, "b": 2}, 8, {"a": 1, "b": 20})
  assert of_plain == ("on_eval", "plain", {"eval/plain/seen": plain})
  assert of_wanting == ("on_eval", "wanting", {"eval/wanting/seen": wanting})
  assert step == 8 and row.pop("time/eval") >= 0
  assert row == {"eval/plain/seen": plain, "eval/wanting/seen": wanting}
  assert run.last_eval[0] == 8 and "eval/old/loss" not in run.last_eval[1]


def test_an_evaluator_that_fails_ends_the_run_or_is_counted():
  with pytest.raises(RuntimeError, match=r"'bad' failed at step 8: no data .*--config.evals.bad.on_error=warn"):
    evaluating(["bad"], bad=Scores(error="no data"))
  run, found = evaluating(["bad", "worse", "good"], "warn", bad=Scores(error="x"), worse=Scores(error="y"),
                          good=Scores())
  assert [row[1:] for row in found[:2]] == [
      ("bad", {"eval/bad/failures": 1.0}), ("worse", {"eval/worse/failures": 2.0})]
  assert run.last_eval[1].keys() == {"eval/bad/failures", "eval/worse/failures", "eval/good/seen", "time/eval"}


def test_what_is_saved_already_or_to_be_left_is_not_told():
  assert len(saving({}, at=-1, saved=False)) == 1
  assert saving({}, at=-1, go_back="a spike") == []


def test_a_metric_that_its_evaluator_does_not_give_is_an_error_where_it_was_evaluated():
  for at, best in ((6, "eval/val/los"), (8, "eval/test/loss")):
    assert saving({"eval/val/loss": 1.0}, at=at, best=best)
  with pytest.raises(ConfigError, match="keep_best is 'eval/val/los'.* It gives: eval/val/loss"):
    saving({"eval/val/loss": 1.0}, at=8, best="eval/val/los")
