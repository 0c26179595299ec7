"""The built-in callbacks on their own; whole runs with them are in test_main.py and test_faults.py."""

import contextlib
import re
import signal
import types

import numpy as np
import pytest

from trainer import callbacks as cb
from trainer import strategies


def fake_run(**changed):
  said = []
  run = types.SimpleNamespace(step=0, total_steps=10, stop_requested="", batch=None, said=said, say=said.append,
                              saves_last=True, tokens_seen=lambda step: 64 * step, settle=lambda: None)
  vars(run).update(changed)
  return run


def test_callbacks_are_called_in_their_order_with_all_arguments_the_configs_own_last():
  calls = []

  class Noting(cb.Callback):
    def __init__(self, name):
      self.name = name

    def on_eval(self, run, name, metrics):
      calls.append((self.name, name, metrics))

  cb.Callbacks([Noting("first"), Noting("second")], [Noting("own")])("on_eval", None, "val", {"loss": 1.0})
  assert calls == [(name, "val", {"loss": 1.0}) for name in ("first", "second", "own")]


def test_progress_shows_steps_with_and_without_a_loss(monkeypatch):
  monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
  progress, run = cb.Progress(strategies.find("sft").shown, seconds_between_lines=0.0), fake_run()
  progress.on_train_begin(run)
  progress.on_step_end(run, 5, {"loss": 2.5})
  progress.on_step_end(run, 10, {"nonfinite": 0.0})  # nothing to train in that step
  assert run.said[0].startswith("step 5/10 (50%)  loss 2.500")
  assert run.said[1].startswith("step 10/10 (100%)  nothing to train")


def test_a_row_of_metrics_says_what_was_taken_up_to_its_step():
  """And the rate that the step itself was taken with, of the updates before it."""
  rows, log = [], cb.MetricsLog(4)
  run = fake_run(
      learning_rates=lambda step: {"learning_rate": step / 8},
      chrono=types.SimpleNamespace(window=lambda step, tokens: {"tokens_per_second": float(tokens)}),
      data=types.SimpleNamespace(epoch=lambda step: step / 2, source_names=("a", "b"),
                                 counters=lambda step: {"a": {"rows": 3 * step}, "b": {"rows": step}}),
      writer=types.SimpleNamespace(write_scalars=lambda step, row: rows.append((step, row))))
  for step in range(1, 11):
    log.on_step_end(run, step, {"loss": float(step), "nonfinite": 2.0, "nonfinite_leaf": -1.0})
  assert rows == [(step, {
      "loss": float(step), "nonfinite_steps": 2.0, "learning_rate": (step - 1) / 8, "tokens_seen": 64 * step,
      "epoch": step / 2, "data/a/rows": 3 * step, "data/b/rows": step, "tokens_per_second": 64.0 * step,
  }) for step in (1, 4, 8, 10)]


def test_rates_are_counted_anew_where_a_run_begins_and_where_it_goes_back():
  begun, log = [], cb.MetricsLog(4)
  run = fake_run(step=7, chrono=types.SimpleNamespace(start_window=lambda *args: begun.append(args)))
  log.on_train_begin(run)
  run.step = 3
  log.on_rollback(run)
  assert begun == [(7, 64 * 7), (3, 64 * 3)]


def test_after_a_restart_progress_is_that_of_the_steps_since(monkeypatch):
  """Two steps of 64 tokens in 30 s, and four to come."""
  now = [100.0]
  monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
  monkeypatch.setattr(cb, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
  progress, run = cb.Progress(strategies.find("sft").shown), fake_run(step=4)
  progress.on_train_begin(run)
  now[0] = 130.0
  progress.on_step_end(run, 6, {"loss": 2.5})
  assert run.said == ["step 6/10 (60%)  loss 2.500  4 tokens/s  1:00 left"]


ROLLOUT = {"loss": -0.0001, "reward": 0.125, "completions/mean_length": 17.5, "frac_reward_zero_std": 0.25,
           "reward_std": 0.3}
OF_ROLLOUT = "reward 0.125  length 18  taught nothing 25%"


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("name, metrics, shown", [
    ("grpo", ROLLOUT, OF_ROLLOUT),  # the loss of a policy that has not moved is 0 whatever it is worth
    ("grpo", {"loss": 0.5, "entropy": 1.0}, "loss 0.500"),  # completions from files
    ("dpo", ROLLOUT | {"rewards/accuracies": 0.75}, f"{OF_ROLLOUT}  loss -0.000  accuracy 0.750"),
    ("dpo", {"loss": 0.5, "rewards/accuracies": 0.75}, "loss 0.500  accuracy 0.750"),
    # Equal rewards of a prompt's completions are no lesson lost to what does not compare these.
    ("distill", ROLLOUT | {"loss": 0.2}, "divergence 0.200  reward 0.125  length 18"),
    ("ppo", ROLLOUT | {"value/explained_variance": 0.5}, "reward 0.125  length 18  explained 0.50"),
    ("reward", {"loss": 0.5, "accuracy": 0.625, "margin": 1.0}, "accuracy 0.625  loss 0.500"),
])
def test_progress_shows_what_the_strategy_is_judged_by(monkeypatch, terminal, name, metrics, shown):
  monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
  monkeypatch.setattr("os.get_terminal_size", lambda *_: types.SimpleNamespace(columns=80))
  monkeypatch.setattr("sys.stderr.fileno", lambda: 2, raising=False)
  of_bar = []
  monkeypatch.setattr(cb.tqdm, "set_postfix_str", lambda bar, text, **_: of_bar.append(text))
  progress, run = cb.Progress(strategies.find(name).shown, seconds_between_lines=0.0), fake_run(step=4)
  progress.on_train_begin(run)
  assert run.say == (cb.tqdm.write if terminal else run.said.append)  # lines go above the bar
  progress.on_step_end(run, 5, metrics)
  bar = progress._bar
  progress.on_error(run, KeyError("x")) if name == "dpo" else progress.on_train_end(run)
  if terminal:
    assert (bar.initial, bar.total) == (4, 10)
    assert bar.disable and run.say is print  # the bar is closed, and no line goes above it any more
  line = of_bar[0].replace(", ", "  ") if terminal else run.said[0].partition("%)  ")[2]
  assert re.match(re.escape(shown) + r"  [\d,]+ tokens/s", line)


def test_health_counts_only_steps_in_a_row_and_names_where_it_began():
  health, run = cb.Health(2, ["a", "b"]), fake_run()
  bad = {"nonfinite": 1.0, "nonfinite_leaf": 1.0}
  health.on_step_end(run, 1, {**bad, "nonfinite_in_a_row": 1.0})
  health.on_step_end(run, 2, {"nonfinite": 1.0, "nonfinite_leaf": -1.0, "nonfinite_in_a_row": 0.0})
  health.on_step_end(run, 3, {**bad, "nonfinite_in_a_row": 1.0})
  with pytest.raises(FloatingPointError, match="2 steps in a row .* from step 3 on, first in the gradient of b"):
    health.on_step_end(run, 4, {**bad, "nonfinite_leaf": 0.0, "nonfinite_in_a_row": 2.0})


def test_only_the_first_steps_of_a_process_that_are_not_finite_are_looked_into(monkeypatch):
  looked, health, run = [], cb.Health(9, ["a"]), fake_run(batch="b")
  monkeypatch.setattr(health, "_name_rows", lambda run, step: looked.append(step))
  for step in range(1, 8):
    health.on_step_end(run, step, {"nonfinite": 1.0, "nonfinite_leaf": 0.0, "nonfinite_in_a_row": float(step % 2)})
  assert looked == [1, 3, 5]


def test_the_bar_stands_at_the_step_wherever_that_is(monkeypatch):
  """After a spike the steps go on after those that are left out."""
  moved, progress, run = [], cb.Progress(strategies.find("sft").shown), fake_run()
  progress.on_rollback(run)
  progress._bar = types.SimpleNamespace(n=3, set_postfix_str=lambda text, **_: None, update=moved.append)
  progress.on_step_end(run, 4, {"loss": 2.5})
  progress.on_step_end(run, 9, {"loss": 2.5})
  assert moved == [1, 6]


def test_the_profiler_stays_off_unless_asked(monkeypatch, tmp_path):
  started = []
  monkeypatch.setattr("jax.profiler.start_trace", lambda *a, **k: started.append(a))
  profiler = cb.Profiler(tmp_path, start_step=3, num_steps=0)
  for step in range(6):
    profiler.on_step_begin(fake_run(step=step))
    profiler.on_optimizer_step(fake_run(step=step + 1))
  assert not started


def test_a_stop_asked_for_by_a_callback_does_not_count_as_a_first_signal():
  preemption, run = cb.Preemption(), fake_run(stop_requested="early stopping")
  preemption.on_train_begin(run)
  try:
    preemption._received(run, 15)  # would end this process if it were taken for the second signal
  finally:
    preemption.on_train_end(run)
  assert run.stop_requested == "SIGTERM" and "saving" in run.said[0]


@pytest.mark.parametrize("ended", [lambda p, run: p.on_train_end(run), lambda p, run: p.on_error(run, KeyError("x"))],
                         ids=["end", "error"])
def test_signals_are_taken_while_a_run_trains_and_given_back_however_it_ends(ended):
  preemption, run = cb.Preemption(), fake_run()
  before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
  preemption.on_train_begin(run)
  try:
    assert all(signal.getsignal(number) != handler for number, handler in before.items())
    signal.getsignal(signal.SIGINT)(signal.SIGINT, None)
    assert run.stop_requested == "SIGINT"
  finally:
    ended(preemption, run)
  assert {number: signal.getsignal(number) for number in before} == before


def test_a_second_signal_ends_the_process_at_once(monkeypatch, capsys):
  raised = []
  monkeypatch.setattr("signal.raise_signal", raised.append)
  monkeypatch.setattr("signal.signal", lambda number, handler: raised.append((number, handler)))
  preemption, run = cb.Preemption(), fake_run()
  preemption._received(run, 15)
  assert not raised and run.stop_requested == "SIGTERM"
  preemption._received(run, 2)
  assert raised == [(2, signal.SIG_DFL), 2] and "exiting at once" in capsys.readouterr().err


@pytest.mark.parametrize("begin", [0, 3, 4])
def test_the_profile_is_of_so_many_steps_from_that_one_on(begin, monkeypatch, tmp_path):
  """Of the steps 4 and 5, if the process takes 4, once those before are there; what is on is never left on."""
  seen = []
  monkeypatch.setattr("jax.profiler.start_trace", lambda *a, **k: seen.append("on"))
  monkeypatch.setattr("jax.profiler.stop_trace", lambda: seen.append("off"))
  profiler = cb.Profiler(tmp_path, start_step=3, num_steps=2)
  for step in range(begin, 8):
    profiler.on_step_begin(fake_run(step=step, settle=lambda: seen.append("settled")))
    seen.append(step + 1)
    profiler.on_optimizer_step(fake_run(step=step + 1, state={"step": 0}))
  assert seen == ([*range(begin + 1, 4), "settled", "on", 4, 5, "off", 6, 7, 8] if begin < 4 else [5, 6, 7, 8])
  profiler = cb.Profiler(tmp_path, start_step=7, num_steps=2)
  profiler.on_step_begin(fake_run(step=7))
  profiler.on_train_end(fake_run(step=8, state={"step": 0}))
  assert seen[-2:] == ["on", "off"]


def test_how_far_this_process_is_is_said_to_the_others(monkeypatch):
  said = []
  for name in ("enter", "moved", "failed"):
    monkeypatch.setattr(cb.liveness, name, lambda *given, name=name: said.append((name, *given)))
  alive, run, error = cb.Alive(), fake_run(step=4), KeyError("x")
  for call in (
      lambda: alive.on_train_begin(run), lambda: alive.on_step_begin(run), lambda: alive.on_optimizer_step(run),
      lambda: alive.on_step_end(run, 3, {}), lambda: alive.on_eval(run, "val", {}), lambda: alive.on_train_end(run),
      lambda: alive.on_error(run, error)):
    call()
  assert said == [("enter", cb.liveness.TRAINING), ("moved", 4), ("moved", 4), ("moved", 4), ("moved",), ("moved",),
                  ("enter", "the end of training"), ("failed", error)]


def test_in_another_thread_signals_keep_their_handlers(monkeypatch, caplog):
  def refuse(number, handler):
    raise ValueError("signal only works in main thread")

  monkeypatch.setattr(cb.signal, "signal", refuse)
  preemption = cb.Preemption()
  preemption.on_train_begin(fake_run())
  assert preemption._previous == {}


@pytest.mark.parametrize("offending, named", [
    ([2], "Step 7: rows 2 of 10: "), (list(range(9)), "Step 7: rows 0, 1, 2, 3, 4, 5, 6, 7 … of 10: "),
    ([], "Step 7: no row alone, as far as the parameters of one step later tell, so that all of them of 10: ")])
def test_rows_that_are_not_finite_are_named_and_written(monkeypatch, tmp_path, caplog, offending, named):
  written = []
  rows = types.SimpleNamespace(
      losses=lambda batch, step: (np.zeros(10), np.ones(10)), fetch=lambda batch: f"fetched {batch}",
      offending=lambda batch, step, sums: offending, write=lambda *given: written.append(given))
  monkeypatch.setattr(cb.rows_lib, "Rows", lambda run, paths: rows)
  guard = object.__new__(cb.Health)
  guard._rows, guard._paths = None, ()
  chrono = types.SimpleNamespace(pause=lambda phase: contextlib.nullcontext())
  run = fake_run(workdir=tmp_path, batch="b", chrono=chrono)
  guard._name_rows(run, 7)
  file = tmp_path / "nonfinite" / "step-7.jsonl"
  assert caplog.records[-1].getMessage() == f"{named}{file}"
  assert written[0][:2] == (file, "fetched b") and written[0][4] == (offending or None)
