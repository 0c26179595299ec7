"""Loss spikes: what is one, what is done, and that a killed run does the same."""

import logging
import math
import types

import jax
import numpy as np
import pytest

from input_pipeline import loader
from input_pipeline.prefetch import Prefetcher
from tests import tiny
from trainer import train
from trainer.callbacks import Callback
from trainer.config import defaults
from trainer.errors import ConfigError
from trainer.program import resolve
from trainer.telemetry import spikes
from trainer.telemetry.writers import read_rows

pytestmark = pytest.mark.host_patches

STEPS, SPIKE = 44, 31  # the data of updates SPIKE to SPIKE + 3 are noise


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return tiny.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def noise(monkeypatch):
  """Random tokens in the batches of some steps."""
  batch = loader.TrainData.batch

  def noisy(self, number, rows=None):
    made = batch(self, number) if rows is None else batch(self, number, rows)
    if SPIKE <= number + 1 < SPIKE + 4:
      made["tokens"] = np.random.default_rng(number).integers(0, 250, made["tokens"].shape).astype(np.int32)
    return made

  monkeypatch.setattr(loader.TrainData, "batch", noisy)


def config(corpus, **changed):
  c = tiny.config(corpus, total_steps=STEPS, ckpt_steps=6, keep_last=4)
  c.evals = {}
  c.schedule.name = "constant"
  c.spikes.update(action="rollback", window=12, deviations=6.0, in_a_row=2, margin=5, skip=4, max_rollbacks=2)
  c.spikes.update(changed)
  return c


class Watch(Callback):
  """The steps that were taken."""

  taken: list[int] = []

  def on_optimizer_step(self, run):
    self.taken.append(run.step)


def rows(workdir):
  kept = [{k: v for k, v in row.items() if k in ("step", "loss", "grad_norm") or k.startswith("spikes/")}
          for row in read_rows(workdir / "metrics.jsonl")]
  return [row for row in kept if len(row) > 1]


@pytest.mark.parametrize("crash", [None, 28, 32, 36, 40], ids=lambda at: f"crash{at}")
def test_it_goes_back_and_on_with_the_data_after_the_spike(corpus, noise, tmp_path, crash):
  """Found at SPIKE + 1 = 32, whose margin makes 24 the checkpoint to go back to; on after 32 + 4 = 36."""
  c = config(corpus)
  c.callbacks.watch = dict(type="tests.trainer.telemetry.test_spikes.Watch")
  Watch.taken.clear()
  straight = train(c, tmp_path / "straight")
  # 33 was dispatched before the metrics of 32 were known.
  assert Watch.taken == [*range(1, 34), *range(37, STEPS + 1)] and straight.step == STEPS
  assert [row for row in rows(tmp_path / "straight") if "spikes/rollbacks" in row] == [
      {"step": 36, "spikes/rollbacks": 1, "spikes/from_step": 24}]
  assert straight.remembered["spikes"]["rollbacks"] == 1 and straight.remembered["spikes"]["found"] == 1
  if crash is None:
    return
  c.callbacks.crash = dict(type="tests.test_faults.Crash", step=crash)
  with pytest.raises(RuntimeError, match="crashed"):
    train(c, tmp_path / "again")
  del c.callbacks.crash
  again = train(c, tmp_path / "again")
  jax.tree.map(np.testing.assert_array_equal, again.state, straight.state)
  assert rows(tmp_path / "again") == rows(tmp_path / "straight")


def test_what_it_goes_on_from_is_the_checkpoint_and_the_later_data(corpus, noise, tmp_path):
  """The same parameters as a run that stopped at 24, told by hand that it has done 36 updates."""
  went_back = train(config(corpus), tmp_path / "a")
  c = config(corpus)
  c.callbacks.crash = dict(type="tests.test_faults.Crash", step=25)
  with pytest.raises(RuntimeError, match="crashed"):
    train(c, tmp_path / "b")
  c = config(corpus)
  c.callbacks.jump = dict(type="tests.trainer.telemetry.test_spikes.Jump")
  jumped = train(c, tmp_path / "b")
  jax.tree.map(np.testing.assert_array_equal, jumped.state["params"], went_back.state["params"])


class Jump(Callback):
  def on_train_begin(self, run):
    assert run.step == 24
    run.remembered["spikes"] = {"recent": [], "above": 0, "found": 0, "rollbacks": 0}
    run.go_back = spikes.Spike(32, 24, 36)


@pytest.mark.parametrize("end", ["crash", "stop"])
def test_what_is_to_be_left_is_not_saved(corpus, noise, tmp_path, end):
  """A checkpoint is due just when the spike is known, and the run is killed, or asked to stop, before it goes back."""
  c = config(corpus)
  c.ckpt_steps = 11
  straight = train(c, tmp_path / "straight")
  c.callbacks.end = dict(type="tests.trainer.telemetry.test_spikes.End", how=end)
  if end == "crash":
    with pytest.raises(RuntimeError, match="crashed"):
      train(c, tmp_path / "again")
  else:
    assert train(c, tmp_path / "again").step == 36
  assert not (tmp_path / "again" / "checkpoints" / "33").exists()
  del c.callbacks.end
  again = train(c, tmp_path / "again")
  jax.tree.map(np.testing.assert_array_equal, again.state, straight.state)


class End(Callback):
  def __init__(self, how):
    self._how = how

  def on_optimizer_step(self, run):
    if run.step == 33 and run.go_back is not None:
      if self._how == "crash":
        raise RuntimeError("crashed")
      run.stop_requested = "a test"


def test_warn_says_so_and_goes_on(corpus, noise, tmp_path, caplog):
  with caplog.at_level(logging.WARNING):
    run = train(config(corpus, action="warn"), tmp_path)
  assert run.step == STEPS and "Step 32: loss is" in caplog.text
  assert [row["spikes/found"] for row in rows(tmp_path) if "spikes/found" in row] == [1]
  assert len({row["step"] for row in rows(tmp_path)}) == STEPS


def test_without_an_old_enough_checkpoint_the_run_goes_on(corpus, noise, tmp_path, caplog):
  with caplog.at_level(logging.WARNING):
    run = train(config(corpus, margin=40), tmp_path)
  assert run.step == STEPS and "no checkpoint of 40 steps before (spikes.margin)" in caplog.text


def fake(**changed):
  said = []
  run = types.SimpleNamespace(remembered={}, go_back=None, total_steps=1000, said=said, step=0,
                              note=lambda kind, name, text: said.append(text),
                              writer=types.SimpleNamespace(write_scalars=lambda *a: None),
                              checkpoints=types.SimpleNamespace(wait=lambda: None, steps=lambda: [0, 10, 20]))
  vars(run).update(changed)
  return run


def make(run, **changed):
  made = spikes.Spikes(types.SimpleNamespace(**dict(
      action="rollback", metric="loss", window=10, deviations=5.0, in_a_row=2, margin=3, skip=7,
      max_rollbacks=1) | changed))
  made.on_train_begin(run)
  return made


def feed(made, run, values, first=1):
  for step, value in enumerate(values, first):
    made.on_step_end(run, step, {"loss": value})


CALM = [1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 1.0, 1.1, 0.9, 1.0]  # median 1, median deviation 0.05


@pytest.mark.parametrize("after, expected", [
    ([1.36], None), ([1.36, 1.36], None),  # the limit is 1 + 5 · 1.4826 · 0.05 = 1.37
    ([1.38], None), ([1.38, 1.38], (12, 0, 19)), ([1.38, 1.0, 1.38], None),
    ([float("nan"), float("inf")], (12, 0, 19))])
def test_so_many_in_a_row_above_the_limit_are_a_spike(after, expected):
  run = fake(checkpoints=types.SimpleNamespace(wait=lambda: None, steps=lambda: [0, 10]))
  made = make(run)
  feed(made, run, CALM + after)
  assert run.go_back == (expected and spikes.Spike(*expected))


def test_before_the_window_is_full_nothing_is_a_spike():
  run = fake()
  feed(make(run), run, CALM[:7] + [100.0] * 3)
  assert run.go_back is None


def test_nearly_constant_values_may_vary_a_little():
  run = fake()
  feed(make(run), run, [2.0] * 10 + [2.009] * 5)  # 5 · 0.001 · 2 = 0.01
  assert run.go_back is None
  feed(make(run := fake()), run, [2.0] * 10 + [2.011] * 2)
  assert run.go_back is not None


def test_after_max_rollbacks_the_run_stops():
  run = fake(remembered={"spikes": {"recent": CALM, "above": 1, "found": 1, "rollbacks": 1}})
  with pytest.raises(FloatingPointError, match="gone back 1 times.*max_rollbacks.*--mode=replay --step=30"):
    make(run).on_step_end(run, 30, {"loss": 9.0})


def test_a_metric_that_is_not_there_is_named():
  run = fake()
  with pytest.raises(ConfigError, match="spikes.metric is 'los'; a step's metrics are: grad_norm, loss"):
    make(run, metric="los").on_step_end(run, 1, {"loss": 1.0, "grad_norm": 2.0})


@pytest.mark.parametrize("changed, expected", [
    (dict(action="back"), "allowed: none, warn, rollback"), (dict(action="warn", window=3), "at least 10"),
    (dict(action="warn", deviations=0.0), "above 0"), (dict(action="rollback", skip=-1), "spikes.skip is -1")])
def test_bad_values_are_refused(corpus, changed, expected):
  c = tiny.config(corpus)
  c.spikes.update(changed)
  with pytest.raises(ConfigError, match=expected):
    resolve(c)


def test_a_prefetcher_seeks():
  with Prefetcher(lambda step: step * step, 0, 20, depth=3, workers=2) as batches:
    assert [next(batches) for _ in range(3)] == [0, 1, 4]
    batches.seek(10)
    assert list(batches) == [step * step for step in range(10, 20)]


@pytest.mark.parametrize("saved, margin, expected", [
    ([0, 9], 3, (12, 9, 19)), ([0, 10], 3, (12, 0, 19)),  # found at 12: 9 is just old enough, 10 is not
    ([0, 12], 0, (12, 12, 19)), ([10], 3, None)])
def test_the_margin_counts_steps_back_from_the_spike(saved, margin, expected):
  run = fake(checkpoints=types.SimpleNamespace(wait=lambda: None, steps=lambda: saved))
  feed(make(run, margin=margin), run, CALM + [1.38, 1.38])
  assert run.go_back == (expected and spikes.Spike(*expected))


@pytest.mark.parametrize("total, expected", [(12, None), (13, None), (14, 13), (19, 18), (20, 19), (21, 19)])
def test_near_its_end_a_run_goes_on_with_what_is_left(total, expected):
  """Found at 12, whose metrics are known when 13 is dispatched; the last update is always taken."""
  run = fake(total_steps=total, checkpoints=types.SimpleNamespace(wait=lambda: None, steps=lambda: [0]))
  feed(make(run), run, CALM + [1.38, 1.38])
  assert (run.go_back and run.go_back.resume) == expected


def test_the_limit_is_that_of_the_last_values_of_the_window_alone():
  """Ten of them after five others."""
  run = fake()
  feed(made := make(run), run, [9.0] * 5 + [1.0] * 10)
  assert made._seen["recent"] == [1.0] * 10 and run.go_back is None


def test_a_run_goes_back_with_what_its_checkpoint_remembers_and_counts_on():
  """Of the time after the checkpoint only how often spikes were found, and how often the run went back, are kept."""
  calls = []
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  state = {"step": jax.device_put(np.int32(33), sharding), "nonfinite": jax.device_put(np.int32(2), sharding),
           "params": jax.device_put(np.float32(5.0), sharding)}
  saved = {"step": np.int32(24), "nonfinite": np.int32(0), "params": np.float32(3.0)}
  meta = {"seconds": {"train": 7.0}, "remembered": {"mine": 1, "spikes": {
      "recent": CALM, "above": 0, "found": 0, "rollbacks": 0}}}
  run = fake(step=33, state=state, go_back=spikes.Spike(32, 24, 36), callbacks=lambda *args: calls.append(args[0]),
             remembered={"mine": 2, "spikes": {"recent": [], "above": 3, "found": 4, "rollbacks": 1}},
             settle=lambda: calls.append("settle"), save=lambda: calls.append("save"),
             chrono=types.SimpleNamespace(take_back=lambda seconds: calls.append(seconds)),
             writer=types.SimpleNamespace(write_scalars=lambda step, row: calls.append((step, row))),
             checkpoints=types.SimpleNamespace(
                 split=lambda state: (state, {"base": 1}), merge=lambda stored, left_out: stored | left_out,
                 restore=lambda step, target: (
                     calls.append(("restore", step, {leaf.sharding for leaf in jax.tree.leaves(target)})),
                     types.SimpleNamespace(state=dict(saved), meta=meta))[1],
                 forget_after=lambda step: calls.append(("forget after", step))))
  spikes.go_back(run, types.SimpleNamespace(seek=lambda step: calls.append(("seek", step))))
  assert run.remembered == {"mine": 1, "spikes": {"recent": CALM, "above": 0, "found": 4, "rollbacks": 2}}
  assert {name: int(value) for name, value in run.state.items()} == {
      "step": 36, "nonfinite": 2, "params": 3, "base": 1}
  assert run.step == 36 and run.go_back is None
  # There is never room for two states; what was counted stays.
  assert {name: leaf.is_deleted() for name, leaf in state.items()} == {"step": True, "params": True, "nonfinite": False}
  assert calls == ["settle", ("restore", 24, {sharding}), ("forget after", 24), {"train": 7.0}, ("seek", 36),
                   (36, {"spikes/rollbacks": 2, "spikes/from_step": 24}), "on_rollback", "save"]


def test_a_value_that_is_not_finite_is_none_to_compare_with():
  run = fake()
  feed(made := make(run), run, [math.inf, *CALM[:5], math.nan, -math.inf])
  assert made._seen["recent"] == CALM[:5] and run.go_back is None


@pytest.mark.parametrize("count", [9, 10])
def test_the_window_is_full_with_its_last_value(count):
  run = fake()
  feed(make(run), run, CALM[:count] + [100.0] * 2)
  assert (run.go_back is not None) == (count == 10)


def test_going_back_takes_the_state_the_time_and_the_data_of_its_step():
  """Of a run of nothing: what is given back to whom, in what order."""
  called = []

  def note(name, gives=None):
    return lambda *given: called.append((name, *given)) or gives

  old = {"params": jax.numpy.ones(2), "step": jax.numpy.int32(9), "nonfinite": jax.numpy.int32(3)}
  state = {"params": jax.numpy.zeros(2), "step": jax.numpy.int32(4), "nonfinite": jax.numpy.int32(0)}
  remembered = {"spikes": {"recent": [1.0], "above": 0, "found": 0, "rollbacks": 0}}
  restored = types.SimpleNamespace(state=state, meta={"remembered": remembered, "seconds": {"train": 5.0}})
  checkpoints = types.SimpleNamespace(
      split=lambda state: (state, "left out"), restore=note("restore", restored), forget_after=note("forget"),
      merge=lambda state, left_out: called.append(("merge", left_out)) or dict(state))
  run = types.SimpleNamespace(
      state=old, step=9, go_back=spikes.Spike(8, 4, 10), settle=note("settle"), checkpoints=checkpoints,
      remembered={"spikes": {"recent": [2.0], "above": 1, "found": 2, "rollbacks": 1}}, callbacks=note("callbacks"),
      chrono=types.SimpleNamespace(take_back=note("take back")), save=note("save"),
      writer=types.SimpleNamespace(write_scalars=note("write")))
  spikes.go_back(run, types.SimpleNamespace(seek=note("seek")))
  (settled, (restore, step, target), *rest) = called
  assert settled == ("settle",) and (restore, step) == ("restore", 4) and target["params"].shape == (2,)
  assert rest == [("forget", 4), ("merge", "left out"), ("take back", {"train": 5.0}), ("seek", 10),
                  ("write", 10, {"spikes/rollbacks": 2, "spikes/from_step": 4}), ("callbacks", "on_rollback", run),
                  ("save",)]
  assert (run.step, run.go_back, int(run.state["step"]), int(run.state["nonfinite"])) == (10, None, 10, 3)
  assert run.state["params"].tolist() == [0, 0] and old["params"].is_deleted()
  assert run.remembered["spikes"] == {"recent": [1.0], "above": 0, "found": 2, "rollbacks": 2}


def test_what_is_sampled_cannot_be_left_out():
  c = defaults()
  c.spikes.action = "rollback"
  spikes.check(c)
  c.rollout.num_prompts = 2
  with pytest.raises(ConfigError, match="^spikes.action is 'rollback', but what is trained on is sampled: there are n"):
    spikes.check(c)
  c.spikes.action = "warn"
  spikes.check(c)
