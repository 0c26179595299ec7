"""Learning-rate schedules: a factor on the peak learning rate for each optimizer step.

Steps are optimizer steps (updates), counted from 0. A schedule is warm-up times shape. With a warm-up
of W steps the factor of update k is (k + 1) / W, so the first update does something and update W - 1
has the peak; the shape is 1 until there. `linear`, `cosine` and `wsd` are on their way to `floor` until
the run's last update, and would reach it one later, as in Transformers and PyTorch: every update of a
run, or of a cycle of `sgdr`, learns something although the floor is 0.

A step is a traced int32 inside the compiled update, or a Python int: then NumPy computes, so that
logging a learning rate does not wait for the device.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.errors import ConfigError

# `to_steps(cfg, prefix, default=…, where=…)`: `durations.steps` with the run's lengths filled in.
ToSteps = Callable[..., int | None]
Step = int | jax.Array
Factor = jax.Array | np.floating

NAMES = ("constant", "linear", "cosine", "wsd", "sgdr", "rsqrt")
DECAY_SHAPES = ("linear", "sqrt", "cosine")


@dataclasses.dataclass(frozen=True)
class Schedule:
  """`schedule(step)` is the factor on the peak learning rate of update `step`, a float32 in [0, 1]."""

  warmup_steps: int
  # The factor without the warm-up; 1 until the peak.
  shape: Callable[[Step], Factor]

  def __call__(self, step: Step, warmup_steps: int | None = None) -> Factor:
    """The factor of update `step`, with another warm-up than the schedule's own if one is given."""
    return warmup(step, self.warmup_steps if warmup_steps is None else warmup_steps) * self.shape(step)


def warmup(step: Step, warmup_steps: int) -> Factor:
  """(step + 1) / warmup_steps, at most 1."""
  return _numpy(step).minimum(_float(step + 1) / _float(max(warmup_steps, 1)), _float(1))


def make_schedule(cfg: Any, *, total_steps: int, to_steps: ToSteps) -> Schedule:
  """The schedule of the config section `schedule`.

  Args:
    cfg: the section; only keys of the chosen schedule are read.
    total_steps: updates in the whole run.
    to_steps: `to_steps(cfg, prefix, default=…, where="schedule")` resolves durations.

  Raises:
    ConfigError: unknown shape, a value out of range, or parts longer than the run.
  """
  warm = to_steps(cfg, "warmup", default=0, where="schedule")
  if warm > total_steps:
    raise ConfigError(
        f"schedule.warmup lasts {warm:,} steps, but the run has {total_steps:,}; shorten it, e.g."
        f" --config.schedule.warmup_steps={max(total_steps // 50, 1)}"
    )
  # The update that has the peak; progress is counted from here.
  peak = max(warm - 1, 0)
  if cfg.name == "constant":
    return Schedule(warm, _constant)
  floor = cfg.floor
  if cfg.name == "wsd":
    return Schedule(warm, _wsd(cfg, floor, warm, total_steps, to_steps))
  if cfg.name == "sgdr":
    return Schedule(warm, _sgdr(cfg, floor, peak, total_steps, to_steps))
  if cfg.name == "rsqrt":
    return Schedule(warm, _rsqrt(cfg.timescale, floor, peak))
  return Schedule(warm, _decay(cfg.name, floor, peak, total_steps))


def _constant(step: Step) -> Factor:
  return _float(1) + 0 * _float(step)


def _decay(kind: str, floor: float, start: Step, end: Step) -> Callable[[Step], Factor]:
  """1 until update `start`, then down to `floor`, which update `end` would have, and on."""

  def shape(step: Step) -> Factor:
    xp = _numpy(step)
    # What is left of the way, not what lies behind: float32 tells the last of many updates from the end by this alone.
    # The subtractions are in integers, which float32 would not tell apart above 2**24.
    left = xp.clip(_float(end - step) / _float(end - start), 0, 1)
    above = {
        "linear": lambda: left,
        # 1 - sqrt(t), steep at first: the better cool-down in Hägele et al. 2024 (arXiv 2405.18392).
        "sqrt": lambda: left / (1 + xp.sqrt(1 - left)),
        # (1 + cos(pi t)) / 2
        "cosine": lambda: xp.sin(_float(np.pi / 2) * left) ** 2,
    }[kind]()
    # Both ends are exact whatever the rounding between them (compilers divide by multiplying with the inverse).
    between = xp.clip(_float(floor) + _float(1 - floor) * above, _float(floor), 1)
    return xp.where(step <= start, _float(1), xp.where(step >= end, _float(floor), between))

  return shape


def _wsd(
    cfg: Any, floor: float, warm: int, total_steps: int, to_steps: ToSteps
) -> Callable[[Step], Factor]:
  """Warm-up, stable, decay over the last updates (Hu et al. 2024, arXiv 2404.06395)."""
  if cfg.decay_shape not in DECAY_SHAPES:
    raise ConfigError(f"schedule.decay_shape = {cfg.decay_shape!r}; it is one of {', '.join(DECAY_SHAPES)}")
  decay = to_steps(cfg, "decay", where="schedule")
  if decay is None:
    decay = min(max(round(0.2 * total_steps), 1), total_steps - warm)
  if warm + decay > total_steps:
    raise ConfigError(
        f"schedule.warmup ({warm:,} steps) and schedule.decay ({decay:,} steps) together are longer than"
        f" the run ({total_steps:,} steps); shorten one, e.g."
        f" --config.schedule.decay_steps={total_steps - warm}"
    )
  if not decay:
    return _constant
  return _decay(cfg.decay_shape, floor, total_steps - decay, total_steps)


def _sgdr(
    cfg: Any, floor: float, peak: int, total_steps: int, to_steps: ToSteps
) -> Callable[[Step], Factor]:
  """Cosine cycles, each from the peak to the floor (Loshchilov & Hutter 2017, arXiv 1608.03983).

  A cycle of C updates has the peak at its first and would have the floor after its last, where the next one begins
  at the peak; that is t_mult × C long.
  The cycle that the run's end cuts short is not compressed.
  """
  cycle = to_steps(cfg, "cycle", where="schedule")
  if not cycle:
    raise ConfigError(
        "schedule.name = 'sgdr' needs the length of its first cycle: set one of schedule.cycle_{steps,"
        "examples,tokens,epochs,percent} above 0, e.g. --config.schedule.cycle_percent=25"
    )
  if cfg.t_mult < 1:
    raise ConfigError(f"schedule.t_mult = {cfg.t_mult}; cycles keep their length (1) or grow (above 1)")
  starts, length = [peak], float(cycle)
  while starts[-1] < total_steps:
    starts.append(starts[-1] + math.floor(length + 0.5))
    length *= cfg.t_mult
  bounds = np.array(starts, np.int32)

  def shape(step: Step) -> Factor:
    xp = _numpy(step)
    edges = xp.asarray(bounds)
    i = xp.clip(xp.searchsorted(edges, step, side="right") - 1, 0, len(bounds) - 2)
    return _decay("cosine", floor, edges[i], edges[i + 1])(step)

  return shape


def _rsqrt(timescale: float, floor: float, peak: int) -> Callable[[Step], Factor]:
  """1 / sqrt(1 + updates since the peak / timescale), at least `floor`."""
  if timescale <= 0:
    raise ConfigError(f"schedule.timescale = {timescale}; it is a number of steps above 0")

  def shape(step: Step) -> Factor:
    xp = _numpy(step)
    since = _float(xp.maximum(step - peak, 0))
    return xp.maximum(1 / xp.sqrt(1 + since / _float(timescale)), _float(floor))

  return shape


def _numpy(step: Step) -> Any:
  return jnp if isinstance(step, jax.Array) else np


def _float(x: Any) -> Factor:
  return x.astype(jnp.float32) if isinstance(x, jax.Array) else np.float32(x)
