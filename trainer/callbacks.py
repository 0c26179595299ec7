"""What watches a run: the protocol, and the built-in callbacks in the order they are called.

A config adds its own by dotted path, called after the built-in ones, and after what is evaluated and saved at a step:

    config.callbacks.mine = dict(type="my_package.MyCallback", some_argument=3)

What must happen inside the compiled step (clipping, rematerialisation, the finite guard) is config, not callback.
"""

import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from absl import logging
from tqdm import tqdm

from trainer.distributed import liveness
from trainer.dotted import load_class
from trainer.errors import ConfigError
from trainer.telemetry import row_losses as rows_lib

if TYPE_CHECKING:
  from trainer.run import Run


class Callback:
  """Every hook, doing nothing. `run` (trainer/run.py) holds the step, the state, the config and the writers."""

  def on_train_begin(self, run: "Run") -> None:
    """Everything is set up, nothing is trained in this process yet; `run.step` may be above 0."""

  def on_epoch_begin(self, run: "Run", epoch: int) -> None:
    """The data begin anew."""

  def on_step_begin(self, run: "Run") -> None:
    """Before the batch of update `run.step + 1` is taken."""

  def on_optimizer_step(self, run: "Run") -> None:
    """Update `run.step` is dispatched and `run.state` is the state after it, though the device may still compute."""

  def on_step_end(self, run: "Run", step: int, metrics: dict[str, float]) -> None:
    """The metrics of update `step` are on the host. Called one step late, so that the device never waits."""

  def on_epoch_end(self, run: "Run", epoch: int) -> None:
    """The data have all been seen once more."""

  def on_eval(self, run: "Run", name: str, metrics: dict[str, float]) -> None:
    """Evaluator `name` has run; metrics are named `eval/<name>/<metric>`."""

  def on_checkpoint(self, run: "Run", step: int) -> None:
    """A checkpoint of update `step` is being written."""

  def on_rollback(self, run: "Run") -> None:
    """After a spike `run.state` is that of an earlier checkpoint, and the data go on after `run.step` updates."""

  def on_train_end(self, run: "Run") -> None:
    """The last step is done, or a stop was asked for; everything is saved."""

  def on_error(self, run: "Run", error: BaseException) -> None:
    """The run ends with this error, which is raised again afterwards."""


class Alive(Callback):
  """Says how far this process is, for the others to know where it stopped (trainer/distributed/liveness.py)."""

  def on_train_begin(self, run):
    liveness.enter(liveness.TRAINING)
    liveness.moved(run.step)

  def on_step_begin(self, run):
    liveness.moved(run.step)

  def on_optimizer_step(self, run):
    liveness.moved(run.step)

  def on_step_end(self, run, step, metrics):
    liveness.moved()

  def on_eval(self, run, name, metrics):
    liveness.moved()

  def on_train_end(self, run):
    liveness.enter("the end of training")

  def on_error(self, run, error):
    liveness.failed(error)


class Preemption(Callback):
  """SIGTERM and SIGINT: finish the step, save unless `ckpt` is never, exit 0. A second one exits at once."""

  def __init__(self):
    self._previous: dict[int, Any] = {}
    self._signalled = False

  def on_train_begin(self, run):
    for number in (signal.SIGTERM, signal.SIGINT):
      try:
        self._previous[number] = signal.signal(number, lambda received, frame: self._received(run, received))
      except ValueError:  # not the main thread (a notebook, say): the caller keeps its own handling
        logging.info("Not in the main thread: signals keep their handlers, a stop is not saved.")
        return

  def _received(self, run, number):
    name = signal.Signals(number).name
    if self._signalled:
      sys.stderr.write(f"\n{name} again: exiting at once, without saving.\n")
      # Not sys.exit: threads that are writing must not hold the process.
      signal.signal(number, signal.SIG_DFL)
      signal.raise_signal(number)
    self._signalled, run.stop_requested = True, name
    saving = "saving" if run.saves_last else "without saving (ckpt is never)"
    run.say(f"{name}: stopping after this step, {saving}. (Once more: exit at once.)")

  def on_train_end(self, run):
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def on_error(self, run, error):
    self.on_train_end(run)


class Health(Callback):
  """Names the rows of steps that are not finite; stops a run whose steps no longer are, and says where it began."""

  # So many steps of a process are looked into, which takes as long as several steps each.
  looked_into = 3

  def __init__(self, max_in_a_row: int, gradient_paths: list[str]):
    self._max, self._paths = max_in_a_row, gradient_paths
    self._first, self._rows, self._left = None, None, self.looked_into

  def on_step_end(self, run, step, metrics):
    in_a_row = int(metrics["nonfinite_in_a_row"])
    if not in_a_row:
      self._first = None
      return
    leaf = int(metrics["nonfinite_leaf"])
    where = f"the gradient of {self._paths[leaf]}" if leaf >= 0 else "the loss"
    self._first = self._first or (step, where)
    logging.warning("Step %d was not finite (first in %s): skipped, nothing changed. %d in a row, %d in all.",
                    step, where, in_a_row, int(metrics["nonfinite"]))
    if run.batch is not None and self._left:
      self._left -= 1
      self._name_rows(run, step)
    if in_a_row >= self._max:
      first_step, first_where = self._first
      raise FloatingPointError(
          f"{in_a_row} steps in a row were not finite, from step {first_step} on, first in {first_where}. Parameters "
          "are as before that step. Lower optimizer.learning_rate, raise schedule.warmup, or look at the data of "
          f"that step (--mode=replay --step={first_step}); optimizer.max_nonfinite_steps sets how many steps are "
          "tolerated.")

  def _name_rows(self, run, step):
    """Writes the rows that made the step not finite. The parameters are those of one step later, mostly the same."""
    self._rows = self._rows or rows_lib.Rows(run, self._paths)
    with run.chrono.pause("nonfinite"):
      sums_B, weights_B = self._rows.losses(run.batch, step)
      offending = self._rows.offending(run.batch, step, sums_B)
      batch = self._rows.fetch(run.batch)
      file = run.workdir / "nonfinite" / f"step-{step}.jsonl"
      if jax.process_index() == 0:
        self._rows.write(file, batch, sums_B, weights_B, offending or None)
    which = f"rows {', '.join(map(str, offending[:8]))}{' …' if offending[8:] else ''}" if offending else (
        "no row alone, as far as the parameters of one step later tell, so that all of them")
    logging.warning("Step %d: %s of %d: %s", step, which, len(sums_B), file)


class MetricsLog(Callback):
  """Writes rows of metrics: every `log_*`, and the first and the last step."""

  def __init__(self, every: int):
    self._every = every

  def on_train_begin(self, run):
    run.chrono.start_window(run.step, run.tokens_seen(run.step))

  on_rollback = on_train_begin

  def on_step_end(self, run, step, metrics):
    if not (self._every and (step % self._every == 0 or step in (1, run.total_steps))):
      return
    row = {k: v for k, v in metrics.items() if not k.startswith("nonfinite")}
    row["nonfinite_steps"] = metrics["nonfinite"]
    row |= run.learning_rates(step - 1)
    row |= {"tokens_seen": run.tokens_seen(step), "epoch": run.data.epoch(step)}
    if len(run.data.source_names) > 1:
      for source, counts in run.data.counters(step).items():
        row |= {f"data/{source}/{name}": value for name, value in counts.items()}
    run.last_row = row | run.chrono.window(step, run.tokens_seen(step))
    run.writer.write_scalars(step, run.last_row)

  def on_train_end(self, run):
    run.writer.flush()


class Progress(Callback):
  """A progress bar with what the strategy's record names as its headline (the loss, the reward of rollouts), tokens/s
  and time left; in a log file, a line now and then instead.

  Args:
    shown: what is said of a step's metrics.
  """

  def __init__(self, shown: Callable[[dict[str, float]], list[str]], seconds_between_lines: float = 10.0):
    self._shown = shown
    self._bar, self._interval, self._line_at = None, seconds_between_lines, 0.0

  def on_rollback(self, run):
    self._began, self._first, self._tokens = time.monotonic(), run.step, run.tokens_seen(run.step)

  def on_train_begin(self, run):
    self.on_rollback(run)
    # A terminal that does not know its width (0) would show no bar at all.
    if jax.process_index() == 0 and sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns:
      self._bar = tqdm(total=run.total_steps, initial=run.step, unit="step", dynamic_ncols=True, desc="train")
      run.say = self._bar.write

  def on_step_end(self, run, step, metrics):
    now = time.monotonic()
    values = self._shown(metrics)
    values = values if "loss" in metrics else [*values, "nothing to train"]
    seconds = max(now - self._began, 1e-9)
    rate = (run.tokens_seen(step) - self._tokens) / seconds
    if self._bar is not None:
      self._bar.set_postfix_str(", ".join([*values, f"{rate:,.0f} tokens/s"]), refresh=False)
      self._bar.update(step - self._bar.n)
    elif now - self._line_at >= self._interval or step == run.total_steps:
      self._line_at = now
      left = (run.total_steps - step) * seconds / max(step - self._first, 1)
      run.say(f"step {step}/{run.total_steps} ({step / run.total_steps:.0%})  {'  '.join(values)}  "
              f"{rate:,.0f} tokens/s  {int(left // 60)}:{int(left % 60):02d} left")

  def on_train_end(self, run):
    if self._bar is not None:
      self._bar.close()
      self._bar, run.say = None, print

  def on_error(self, run, error):
    self.on_train_end(run)


class Profiler(Callback):
  """Writes a trace of `num_steps` steps into <workdir>/profile, for TensorBoard or Perfetto."""

  def __init__(self, directory: Path, start_step: int, num_steps: int):
    self._directory, self._start, self._stop = directory, start_step, start_step + num_steps
    self._on = False

  def on_step_begin(self, run):
    if run.step == self._start < self._stop:
      run.settle()
      options = jax.profiler.ProfileOptions()
      options.python_tracer_level = 0  # it can crash while checkpoint threads run, and drowns the device's events
      jax.profiler.start_trace(self._directory, profiler_options=options)
      self._on = True

  def on_optimizer_step(self, run):
    if self._on and run.step >= self._stop:
      self._end(run)

  def _end(self, run):
    if self._on:
      jax.block_until_ready(run.state["step"])
      jax.profiler.stop_trace()
      self._on = False
      run.say(f"Profile of steps {self._start + 1} to {run.step} in {self._directory}")

  def on_train_end(self, run):
    self._end(run)


def make_custom(cfg: Any) -> list[Callback]:
  """The callbacks that `config.callbacks` names: {name: {type: dotted path, …its arguments}}.

  Raises:
    ConfigError: if a class cannot be imported or does not take those arguments.
  """
  made = []
  for name, given in cfg.items():
    arguments = {key: given[key] for key in given if key != "type"}
    try:
      made.append(load_class(given.type, f"callbacks.{name}.type")(**arguments))
    except TypeError as e:
      raise ConfigError(f"callbacks.{name}: {given.type} does not take {arguments}: {e}") from e
  return made


class Callbacks:
  """Several callbacks; `callbacks("on_eval", run, name, metrics)` calls that hook of each, in their order.

  Attributes:
    built_in, own: those that every run has, and those of the config: evaluation and saving come between the two.
  """

  def __init__(self, built_in: Sequence[Callback], own: Sequence[Callback] = ()):
    self.built_in, self.own = functools.partial(_call, built_in), functools.partial(_call, own)
    self.all = (*built_in, *own)

  def __call__(self, hook: str, *args: Any) -> None:
    self.built_in(hook, *args)
    self.own(hook, *args)


def _call(callbacks: Sequence[Callback], hook: str, *args: Any) -> None:
  for callback in callbacks:
    getattr(callback, hook)(*args)
