"""The run: everything that the loop shares with callbacks and evaluators, in one object."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from trainer.checkpoint import Checkpoints
from trainer.errors import ConfigError
from trainer.metrics import to_floats
from trainer.throughput import Chrono
from trainer.writers import MetricWriter


@dataclass
class Run:
  """A training run, as callbacks see it.

  `step` counts the updates dispatched; `state` (trainer/state.py) is the state after them, and is donated to the
  next update, so copy what must outlive the step. `say` prints a line for people, above the progress bar if
  there is one.
  """

  config: Any
  workdir: Path
  mesh: Mesh
  model: Any
  tokenizer: Any
  data: Any
  learning_rates: Callable[[int], dict[str, float]]
  total_steps: int
  log_steps: int  # metrics are written every so many steps; 0: never
  state: dict[str, Any]
  step: int
  writer: MetricWriter
  checkpoints: Checkpoints
  chrono: Chrono
  pinned: dict[str, str]  # fingerprints of what checkpoints leave out (trainer/state.py)
  config_json: dict[str, Any]
  saves_last: bool = True  # whether the last state, or that at a signal, is saved; `ckpt` = never: it is not
  callbacks: Callable[..., None] = lambda hook, *args: None
  say: Callable[[str], None] = print
  note: Callable[..., None] = lambda kind, name, text, advice="": None  # trainer/notes.py
  stop_requested: str = ""  # the signal that this process received
  agreed_stop: bool = False  # with several processes: all have learned of a request, at the same step
  last_row: dict[str, float] = field(default_factory=dict)
  last_eval: tuple[int, dict[str, float]] = (-1, {})
  batch: Any = None  # of the update whose metrics `on_step_end` is given
  remembered: dict[str, Any] = field(default_factory=dict)  # JSON-able, of callbacks; checkpoints hold it
  go_back: Any = None  # a spike (trainer/spikes.py) after which an earlier checkpoint is to be gone on from
  _pending: tuple[int, Any, Any] | None = None

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
        self.agreed_stop = True
        self.stop_requested = self.stop_requested or "a signal to another process"
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
