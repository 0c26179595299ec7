"""A run that stands still: told once, with the phase and the stacks, and not otherwise."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import tiny
from trainer import train
from trainer.callbacks import Callback
from trainer.distributed import watchdog
from trainer.distributed.watchdog import Watchdog


class Stuck(Callback):
  """Stands still after an update."""

  def on_optimizer_step(self, run):
    if run.step == 3:
      stand_still(3.0)


def stand_still(seconds):
  time.sleep(seconds)


def test_a_step_that_hangs_is_told_once_with_its_place(tmp_path, capfd, monkeypatch):
  monkeypatch.setattr("trainer.main.Watchdog", lambda: Watchdog(least_seconds=1.5, times=2.0))
  config = tiny.config(tiny.write_corpus(tmp_path / "texts"), total_steps=6)
  config.evals = {}
  config.callbacks.stuck = dict(type="tests.trainer.distributed.test_watchdog.Stuck")
  run = train(config, tmp_path / "w")
  said = capfd.readouterr().err
  assert run.step == 6 and said.count("nothing has moved for") == 1
  assert "After step 3 " in said and "in phase step" in said and "test_watchdog.py" in said and "stand_still" in said
  stacks = (tmp_path / "w" / "stacks.txt").read_text()
  assert stacks.count("--- after step 3, in step") == 1 and "in stand_still" in stacks


@pytest.fixture
def run(tmp_path):
  return SimpleNamespace(step=7, workdir=tmp_path, chrono=SimpleNamespace(phase="step", longest={}))


def watched(run, dog, seconds, step=0.05):
  """Steps of so long, then so long without one; whether something was told."""
  dog.on_train_begin(run)
  for _ in range(10):
    time.sleep(step)
    dog.on_step_end(run, 1, {})
  time.sleep(seconds)
  dog.on_train_end(run)
  return (Path(run.workdir) / "stacks.txt").exists()


@pytest.mark.parametrize("phase, longest, times, told", [
    ("step", {}, 2.0, True),  # longer than twice 0.05 s, and than 0.2 s
    ("step", {}, 1000.0, False),  # not far longer than steps are
    ("eval", {}, 2.0, False),  # a phase that may take long: ten times 0.2 s
    ("eval", {"eval": 5.0}, 2.0, False),
])
def test_what_is_far_longer_than_usual(run, phase, longest, times, told):
  run.chrono.phase, run.chrono.longest = phase, longest
  assert watched(run, Watchdog(least_seconds=0.2, times=times), 1.0) == told


def test_each_standstill_is_told(run):
  stacks, dog = run.workdir / "stacks.txt", Watchdog(least_seconds=0.2, times=0.0)
  stacks.touch()
  dog.on_train_begin(run)
  for number in (1, 2):
    dog.on_step_end(run, number, {})
    until = time.monotonic() + 20
    while stacks.read_text().count("--- after step 7") < number and time.monotonic() < until:
      time.sleep(0.05)
  dog.on_train_end(run)
  assert stacks.read_text().count("--- after step 7") == 2


def test_what_is_told_names_the_step_the_phase_and_the_place(run, capsys):
  for main, place in ((threading.get_ident(), "; it is at "), (None, "")):
    Watchdog()._report(run, main, "eval", 61.4, 0.25)
    said = capsys.readouterr().err
    assert said.startswith(
        f"\nAfter step 7 nothing has moved for 61 s, in phase eval, which takes 0.25 s as a rule{place}")
    assert said.endswith(f"What every thread is doing: {run.workdir / 'stacks.txt'}. The run goes on.\n")
  stacks = (run.workdir / "stacks.txt").read_text()
  assert stacks.count("--- after step 7, in eval, 61 s without a move") == 2 and "test_what_is_told" in stacks


def test_what_steps_take_is_the_median_from_one_end_to_the_next(run, monkeypatch):
  """1, 2 and 9 s: told after more than 5 times 2 s without a move, and not again before the next one."""
  clock, told = SimpleNamespace(now=100.0), []
  monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: clock.now))
  monkeypatch.setattr(watchdog.threading, "Thread", lambda **options: SimpleNamespace(start=lambda: None))
  dog = Watchdog(least_seconds=2.0, times=5.0)
  monkeypatch.setattr(dog, "_report", lambda run, main, phase, still, usual: told.append((phase, still, usual)))
  dog.on_train_begin(run)
  for number, seconds in enumerate((1.0, 9.0, 2.0)):
    clock.now += seconds / 2
    dog.on_optimizer_step(run)  # a move within a step
    clock.now += seconds / 2
    dog.on_step_end(run, number, {})
  ended = clock.now

  def looks(*seconds):
    waits = iter([*[(ended + s, False) for s in seconds], (ended, True)])

    def wait(between):
      assert between == 0.5  # a quarter of the least
      clock.now, done = next(waits)
      return done
    dog._done = SimpleNamespace(wait=wait)
    dog._look_on(run, None)

  looks(10.0, 10.5, 11.0)
  assert told == [("step", 10.5, 2.0)]
  run.chrono.phase, run.chrono.longest = "eval", {"eval": 5.0, "checkpoint": 1.0}
  dog.on_eval(run)
  looks(25.0, 25.5)
  run.chrono.phase = "checkpoint"
  dog.on_checkpoint(run)
  looks(20.0, 20.5)  # ten times the least
  assert told[1:] == [("eval", 25.5, 5.0), ("checkpoint", 20.5, 1.0)]
