"""Loss spikes: found, and if the config says so the run goes back to before one, and on with the data after it.

A run that diverges for some batches may never come back to where it was. What helped PaLM (arXiv 2204.02311, section
5.1): restart from a checkpoint of about 100 steps before, and leave out the data of 200 to 500 steps, those of the
spike among them. Here the step number goes on too: updates that are left out are never taken, so that the data and the
schedule stay functions of the step.

Whether there is a spike follows from the metrics alone, and what is remembered of them is in the checkpoints: a run
that is killed and continued goes back where the run that was left alone does.
"""

import math
import statistics
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from trainer.callbacks import Callback
from trainer.errors import ConfigError, one_of

# Median absolute deviation times this is the standard deviation, of a normal distribution.
_TO_DEVIATION = 1.4826
# Deviations are taken to be at least this share of the median: nearly constant values have nearly none.
_LEAST = 1e-3


class Spike(NamedTuple):
  """The update at which a spike was found, the checkpoint to go back to, and the update to go on after."""

  step: int
  checkpoint: int
  resume: int


def check(config: Any) -> None:
  """Refuses what cannot be, before any device work. Raises ConfigError."""
  c = config.spikes
  one_of("spikes.action", c.action, ("none", "warn", "rollback"))
  if c.action == "none":
    return
  for key, least in (("window", 10), ("in_a_row", 1), ("margin", 0), ("skip", 0), ("max_rollbacks", 1)):
    if c[key] < least:
      raise ConfigError(f"spikes.{key} is {c[key]}; it must be at least {least}.")
  if not c.deviations > 0:
    raise ConfigError(f"spikes.deviations is {c.deviations}; it must be above 0.")
  if c.action == "rollback" and config.rollout.num_prompts:
    raise ConfigError("spikes.action is 'rollback', but what is trained on is sampled: there are no data to leave out, "
                      "and the loss of such a strategy says nothing. Use spikes.action=warn with, say, "
                      "spikes.metric=grad_norm.")


class Spikes(Callback):
  """Watches one metric; `cfg`: the config's section `spikes`."""

  def __init__(self, cfg: Any):
    self._action, self._metric, self._window = cfg.action, cfg.metric, cfg.window
    self._deviations, self._in_a_row = cfg.deviations, cfg.in_a_row
    self._margin, self._skip, self._most = cfg.margin, cfg.skip, cfg.max_rollbacks

  def on_train_begin(self, run):
    self._seen = _remembered(run)

  on_rollback = on_train_begin  # what is remembered is that of the checkpoint

  def on_step_end(self, run, step, metrics):
    if run.go_back is not None:
      return  # dispatched before it was known
    value = metrics.get(self._metric)
    if value is None:
      if "loss" in metrics:  # a step that trains nothing has none
        raise ConfigError(f"spikes.metric is {self._metric!r}; a step's metrics are: {', '.join(sorted(metrics))}.")
      return
    seen = self._seen
    top = limit(seen["recent"], self._deviations) if len(seen["recent"]) >= self._window else math.inf
    if math.isfinite(value) and value <= top:
      seen["above"] = 0
      seen["recent"] = [*seen["recent"], value][-self._window:]
      return
    seen["above"] += 1
    if seen["above"] >= self._in_a_row and math.isfinite(top):
      self._found(run, step, value, top)

  def _found(self, run, step, value, top):
    seen = self._seen
    seen["found"] += 1
    what = (f"Step {step}: {self._metric} is {value:.6g}, for {self._in_a_row} step(s) above {top:.6g}, the median of "
            f"the {self._window} before and {self._deviations:g} deviations")
    seen["above"], seen["recent"] = 0, []  # what comes now may be the new level
    run.writer.write_scalars(step, {"spikes/found": seen["found"]})
    if self._action == "warn" or step + 1 >= run.total_steps:  # the last update is taken already
      logging.warning("%s.", what)
      return
    if seen["rollbacks"] >= self._most:
      raise FloatingPointError(f"{what}. The run has gone back {seen['rollbacks']} times, as often as "
                               "spikes.max_rollbacks allows. Lower optimizer.learning_rate or optimizer.clip_norm, or "
                               f"look at the data of that step (--mode=replay --step={step}).")
    run.checkpoints.wait()
    before = [saved for saved in run.checkpoints.steps() if saved <= step - self._margin]
    if not before:
      logging.warning("%s. There is no checkpoint of %d steps before (spikes.margin) to go back to: the run goes on. "
                      "More of them (ckpt_steps, keep_last) would help.", what, self._margin)
      return
    run.go_back = Spike(step, before[-1], min(step + self._skip, run.total_steps - 1))
    run.note("rollback", "spike", f"{what}. Going back to the checkpoint of step {before[-1]}, and on with the data "
             f"after step {run.go_back.resume}.")


def _remembered(run: Any) -> dict[str, Any]:
  """`recent`: values of the metric that were none of a spike; `above`: updates in a row that are above the limit."""
  return run.remembered.setdefault("spikes", {"recent": [], "above": 0, "found": 0, "rollbacks": 0})


def limit(values: list[float], deviations: float) -> float:
  """The median and so many deviations more, which half of the values being outliers would not move much."""
  median = statistics.median(values)
  spread = _TO_DEVIATION * statistics.median(abs(value - median) for value in values)
  return median + deviations * max(spread, _LEAST * abs(median))


def go_back(run: Any, batches: Any) -> None:
  """Puts the state of an earlier checkpoint in the place of the run's, and its data after the spike."""
  spike = run.go_back
  run.settle()  # of the update that was dispatched before the spike was known
  counts = {key: _remembered(run)[key] for key in ("found", "rollbacks")}
  was = run.state
  stored, left_out = run.checkpoints.split(was)
  target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), stored)
  step_sharding, nonfinite = was["step"].sharding, was["nonfinite"]
  jax.tree.map(lambda leaf: None if leaf is nonfinite else leaf.delete(), stored)  # there may be no room for both
  restored = run.checkpoints.restore(spike.checkpoint, target)
  run.checkpoints.forget_after(spike.checkpoint)
  run.state = run.checkpoints.merge(restored.state, left_out)
  # As in the run's beginning: every leaf is an array of its own.
  run.state["step"] = jax.device_put(np.int32(spike.resume), step_sharding)
  run.state["nonfinite"] = nonfinite  # they have been
  run.remembered = restored.meta["remembered"]
  _remembered(run).update(found=counts["found"], rollbacks=counts["rollbacks"] + 1)
  run.chrono.take_back(restored.meta["seconds"])
  run.step, run.go_back = spike.resume, None
  batches.seek(run.step)
  run.writer.write_scalars(run.step, {"spikes/rollbacks": counts["rollbacks"] + 1,
                                      "spikes/from_step": spike.checkpoint})
  run.callbacks("on_rollback", run)
  run.save()
