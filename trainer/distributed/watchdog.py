"""A step that takes far longer than those before it is told, with what every thread is doing; the run goes on.

For runs of one process. Of several, trainer/distributed/liveness.py names the one that hangs, and ends them all.
"""

import collections
import faulthandler
import statistics
import sys
import threading
import time
from typing import Any

from trainer.callbacks import Callback
from trainer.distributed.verdicts import stands


class Watchdog(Callback):
  """Looks on from a thread of its own.

  Args:
    least_seconds: nothing is told before the run has stood still for so long; in a phase that may take long (an
      evaluation, a checkpoint, a rollout, a compilation) for ten times as long.
    times: and for so many times what steps, or the longest such phase until now, have taken.
  """

  def __init__(self, least_seconds: float = 60.0, times: float = 20.0):
    self._least, self._times = least_seconds, times
    self._done = threading.Event()

  def on_train_begin(self, run):
    self._steps = collections.deque(maxlen=100)  # seconds from one step's end to the next one's
    self._ended = self._moved = time.monotonic()
    self._reported = False
    main = threading.current_thread().ident
    threading.Thread(target=self._look_on, args=(run, main), name="watchdog", daemon=True).start()

  def _move(self, *_: Any) -> None:
    self._moved, self._reported = time.monotonic(), False

  on_step_begin: Any = _move
  on_optimizer_step: Any = _move
  on_eval: Any = _move
  on_checkpoint: Any = _move

  def on_step_end(self, run, step, metrics):
    self._move()
    self._steps.append(self._moved - self._ended)
    self._ended = self._moved

  def on_train_end(self, run):
    self._done.set()

  def on_error(self, run, error):
    self._done.set()

  def _look_on(self, run: Any, main: int | None) -> None:
    while not self._done.wait(min(1.0, self._least / 4)):
      phase = run.chrono.phase
      if phase == "step":
        usual, least = statistics.median(self._steps) if self._steps else 0.0, self._least
      else:
        usual, least = run.chrono.longest.get(phase, 0.0), 10 * self._least
      still = time.monotonic() - self._moved
      if not self._reported and still > max(least, self._times * usual):
        self._reported = True
        self._report(run, main, phase, still, usual)

  def _report(self, run: Any, main: int | None, phase: str, still: float, usual: float) -> None:
    file = run.workdir / "stacks.txt"
    with open(file, "a", encoding="utf-8") as stacks:
      stacks.write(f"--- after step {run.step}, in {phase}, {still:.0f} s without a move\n")
      stacks.flush()
      faulthandler.dump_traceback(stacks, all_threads=True)
    place = stands(main)[1]
    sys.stderr.write(
        f"\nAfter step {run.step} nothing has moved for {still:.0f} s, in phase {phase}, which takes {usual:.2g} s as "
        f"a rule{f'; it is at {place}' if place else ''}. What every thread is doing: {file}. The run goes on.\n")
