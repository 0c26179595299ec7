"""The run: everything that the loop shares with callbacks and evaluators, in one object."""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from absl import logging

from trainer.callbacks import Callbacks
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.config import checks as config_checks
from trainer.data import Batches, Data
from trainer.distributed import processes
from trainer.errors import ConfigError
from trainer.horizon import Horizon
from trainer.metrics import to_floats
from trainer.program import Program
from trainer.state import averaged
from trainer.strategies.reference import overlay
from trainer.telemetry.throughput import Chrono
from trainer.telemetry.writers import MetricWriter, last_evaluation


@dataclass
class Run:
  """A training run, as callbacks see it.

  `step` counts the updates dispatched; `state` (trainer/state.py) is the state after them, and is donated to the
  next update, so copy what must outlive the step. `say` prints a line for people, above the progress bar if
  there is one.
  """

  config: Any
  workdir: Path
  program: Program
  tokenizer: Any
  data: Data
  horizon: Horizon
  state: dict[str, Any]
  step: int
  writer: MetricWriter
  checkpoints: Checkpoints
  chrono: Chrono
  pinned: dict[str, str]  # fingerprints of what checkpoints leave out (trainer/state.py)
  evaluators: Mapping[str, Any] = field(default_factory=dict)
  callbacks: Callbacks = field(default_factory=lambda: Callbacks([]))
  say: Callable[[str], None] = processes.say
  note: Callable[..., None] = lambda kind, name, text, advice="": None  # trainer/telemetry/events.py
  stop_requested: str = ""  # the signal that this process received
  agreed_stop: bool = False  # with several processes: all have learned of a request, at the same step
  last_row: dict[str, float] = field(default_factory=dict)
  last_eval: tuple[int, dict[str, float]] = field(init=False)  # (after which step, metrics); (-1, {}): none yet
  failed_evaluations: int = 0
  batch: Any = None  # of the update whose metrics `on_step_end` is given
  remembered: dict[str, Any] = field(default_factory=dict)  # JSON-able, of callbacks; checkpoints hold it
  go_back: Any = None  # a spike (trainer/telemetry/spikes.py) after which an earlier checkpoint is to be gone on from
  _pending: tuple[int, Any, Any] | None = None

  def __post_init__(self) -> None:
    self.config_json: dict[str, Any] = json.loads(config_checks.to_json(self.config))
    self.last_eval = last_evaluation(self.workdir, self.step)
    self.remembered = dict(self.remembered)
    self.end_with_data()

  model = property(lambda self: self.program.model)
  mesh = property(lambda self: self.program.mesh)
  learning_rates = property(lambda self: self.program.optimizer.learning_rates)
  total_steps = property(lambda self: self.horizon.total_steps)
  log_steps = property(lambda self: self.horizon.log_steps)  # metrics are written every so many steps; 0: never
  saves_last = property(lambda self: self.horizon.saves_last)

  @property
  def reference(self) -> Any:
    """The parameters of the strategy's reference policy as they are now; None: the state holds none, or a teacher's."""
    held = self.state.get("reference")
    return None if held is None or "teacher" in held else overlay(self.state["params"], held)

  @property
  def stops(self) -> bool:
    """Whether to stop before the next step. Several processes agree through the metrics, which they all see alike."""
    return bool(self.agreed_stop if jax.process_count() > 1 else self.stop_requested)

  def agree_to_stop(self) -> None:
    """All of several processes know that one of them was asked to stop."""
    self.agreed_stop, self.stop_requested = True, self.stop_requested or "a signal to another process"

  def next_batch(self, batches: Batches) -> dict[str, Any] | None:
    """The batch of the next update; None: a stop was asked for while it was sampled."""
    waited = batches.wait_seconds
    batch = next(batches, None)
    if batch is None:
      return None
    self.chrono.waited(batches.wait_seconds - waited)
    if jax.process_count() > 1:
      batch["stop_requests"] = processes.stop_requests(self.mesh, bool(self.stop_requested))
    self.end_with_data()
    return batch

  def end_with_data(self) -> None:
    """Shortens a run whose data end earlier than was expected: prompts, of which some took the place of others."""
    last = self.data.num_steps
    if last is not None and last < self.total_steps:
      self.say(f"total: {last:,} steps instead of {self.total_steps:,}: the prompts end there, since others took the "
               "place of some (rollout.resample, rollout.curriculum_target)")
      self.horizon = dataclasses.replace(self.horizon, total_steps=last)

  def tokens_seen(self, step: int) -> int:
    """Row positions consumed by the first `step` updates."""
    return self.data.tokens_seen(step)

  def defer(self, step: int, metrics: Any, batch: Any) -> None:
    """Keeps an update's device metrics until the next update is dispatched, and settles those of the one before."""
    previous, self._pending = self._pending, (step, metrics, batch)
    self._finish(previous)

  def settle(self) -> None:
    """Fetches the metrics that are still on the device; call it before anything that looks at the last step."""
    previous, self._pending = self._pending, None
    self._finish(previous)

  def _finish(self, pending: tuple[int, Any, Any] | None) -> None:
    if pending is not None:
      step, metrics, self.batch = pending
      values = to_floats(jax.device_get(metrics))
      if values.pop("stop_requests", 0):
        self.agree_to_stop()
      self.callbacks("on_step_end", self, step, values)
      self.batch = None

  def save(self) -> None:
    """Saves the state after `step`, once that step's metrics are written: what is logged and what is saved agree."""
    self.settle()
    if self.go_back is not None:
      return  # killed after this save, the run would go on from what it is to leave
    start = time.perf_counter()
    with self.chrono.pause("checkpoint"):
      meta = {
          "step": self.step,
          "rows_seen": self.data.batch_range(self.step)[0],
          "taken": self.data.taken.saved(self.tokens_seen(self.step)),
          "data": self.data.counters(self.step),
          "data_fingerprint": self.data.fingerprint,
          "seconds": self.chrono.state(),
          "config": self.config_json,
          "pinned": self.pinned,
          "remembered": self.remembered,
      }
      meta["rest_of_rollout"], arrays = self.data.saved(self.step)
      evaluated, metrics = self.last_eval
      metrics = metrics if evaluated == self.step else {}
      best = self.config.keep_best
      if best and best not in metrics and any(key.startswith(best.rpartition("/")[0] + "/") for key in metrics):
        raise ConfigError(f"keep_best is {best!r}, which that evaluator does not give. It gives: "
                          f"{', '.join(key for key in metrics if key.startswith('eval/'))}.")
      saved = self.checkpoints.save(self.step, self.state, meta, metrics, arrays)
    if saved:
      self.writer.write_scalars(self.step, {"time/checkpoint": time.perf_counter() - start})
      self.callbacks("on_checkpoint", self, self.step)

  def close(self) -> None:
    """Waits for checkpoints that are being written, and closes the writers."""
    self.checkpoints.close()
    self.writer.close()

  def evaluate(self, names: list[str]) -> None:
    """Runs these evaluators on the state after `step`, once that step's metrics are written.

    Raises:
      RuntimeError: one failed, and the config does not say that the run goes on.
    """
    self.settle()
    row = {}
    with self.chrono.pause("eval"):
      start = time.perf_counter()
      params = averaged(self.state)
      for name in names:
        evaluator = self.evaluators[name]
        given = (self.reference,) if getattr(evaluator, "wants_reference", False) else ()
        try:
          metrics = {f"eval/{name}/{k}": v for k, v in evaluator.run(params, self.step, *given)}
        except Exception as e:
          if self.horizon.evaluations[name].on_error != "warn":
            raise RuntimeError(f"evaluator {name!r} failed at step {self.step}: {e} (to go on all the same: "
                               f"--config.evals.{name}.on_error=warn)") from e
          self.failed_evaluations += 1
          logging.exception("Evaluator %r failed at step %d; the run goes on.", name, self.step)
          metrics = {f"eval/{name}/failures": float(self.failed_evaluations)}
        row |= metrics
        self.callbacks("on_eval", self, name, metrics)
    row["time/eval"] = time.perf_counter() - start
    self.last_eval = (self.step, row)
    self.writer.write_scalars(self.step, row)
