"""Tokens per second, MFU and the time split of a run, across restarts.

MFU (model FLOPs utilisation; PaLM, arXiv 2204.02311, appendix B) = FLOPs per token × tokens/s / (devices × peak).
FLOPs per token is the model's own formula (`flops_per_token`: matrix products forward and backward, causal
attention counted by half, nothing for recomputation). The time of compilation, evaluation and checkpoints is left out.

Goodput = the time of steps and rollouts that counted / the time since the run's first start, when it did not run
included. Steps that were lost with their process do not count: they are in no checkpoint, nor is their time.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp

from models import halves
from trainer import hardware, liveness

# Of the matrices whose product is timed.
_SIZE = 1024


def peak_flops(dtype: str = "float32") -> tuple[float, str]:
  """FLOP/s of one device and where the number is from; measured, of products in `dtype`, where no data sheet applies
  (CPU)."""
  kind = jax.devices()[0].device_kind
  name = hardware.find(kind)
  if name is not None:
    return hardware.CHIPS[name].peak, f"data sheet of {hardware.CHIPS[name].kinds[0]}, dense bfloat16"
  # Forced host devices share the same cores.
  peak = measured_flops(jax.local_devices()[0], dtype) / jax.local_device_count()
  return peak, f"measured: a {dtype} {_SIZE}×{_SIZE} matrix product on {kind}"


def measured_flops(device: jax.Device, dtype: str = "float32") -> float:
  """FLOP/s of a matrix product in that dtype on one device, which has all cores to itself meanwhile."""
  a = jax.device_put(jnp.ones((_SIZE, _SIZE), dtype), device)
  product = jax.jit(halves.matmul)
  product(a, a).block_until_ready()
  seconds = []
  for _ in range(5):
    start = time.perf_counter()
    product(a, a).block_until_ready()
    seconds.append(time.perf_counter() - start)
  return 2 * _SIZE**3 / min(seconds)


class Chrono:
  """Where the time goes. Pauses (evaluation, checkpoints, waiting for data) are measured where they happen.

  Args:
    flops_per_token: forward and backward, see the module's docstring.
    saved: `state()` of the run that this one continues.
    first_start: `time.time()` when the run was begun; None: now.
    dtype: of the products.

  Attributes:
    phase: the pause that this is, or "step".
    longest: seconds that the longest pause of each kind has taken, in this process.
  """

  def __init__(self, flops_per_token: float, saved: dict[str, float] | None = None, first_start: float | None = None,
               dtype: str = "float32"):
    self._first_start = time.time() if first_start is None else first_start
    self.phase = "step"
    self.longest: dict[str, float] = {}
    self.peak, self.peak_source = peak_flops(dtype)
    self._flops_per_token = flops_per_token
    self._total = {"train": 0.0, "data": 0.0, "eval": 0.0, "checkpoint": 0.0, "compile": 0.0,
                   "rollout": 0.0, **(saved or {})}
    self._window: dict[str, float] = {}
    self.start_window(0)

  def start_window(self, tokens_seen: int) -> None:
    """The next `window` covers the time from here on."""
    self._window = dict.fromkeys(self._window, 0.0)
    self._started, self._tokens = time.perf_counter(), tokens_seen

  @contextmanager
  def pause(self, kind: str) -> Iterator[None]:
    """Time spent in it counts as `time/<kind>` and not as training."""
    start, outer = time.perf_counter(), self.phase
    self.phase = kind
    try:
      with liveness.phase(kind):
        yield
    finally:
      seconds = time.perf_counter() - start
      self.phase, self.longest[kind] = outer, max(seconds, self.longest.get(kind, 0.0))
      self.add(kind, seconds)

  def add(self, kind: str, seconds: float) -> None:
    """Counts seconds spent on something other than steps."""
    if kind == "data":
      liveness.waited(seconds)
    self._window[kind] = self._window.get(kind, 0.0) + seconds
    self._total[kind] = self._total.get(kind, 0.0) + seconds

  def take_back(self, saved: dict[str, float]) -> None:
    """Steps since `state()` gave this do not count: the run goes on from there."""
    for kind in ("train", "rollout"):
      self._total[kind] = saved[kind]

  def goodput(self) -> float:
    """The share of the time since the first start that went into steps and rollouts that counted, up to the last
    `window`. A clock that was set back makes the time no shorter than its parts."""
    wall = max(time.time() - self._first_start, sum(self._total.values()) - self._total["data"])
    return (self._total["train"] + self._total["rollout"]) / wall if wall > 0 else 0.0

  def window(self, tokens_seen: int, steps: int) -> dict[str, float]:
    """Metrics since `start_window`: tokens_per_second, mfu, time/step and time/data in seconds a step; goodput;
    time/wall, seconds since the run's first start; time/split/<kind>, those of the window (`train` without `data`).

    Of several processes, time/data is that of the one that waited longest.
    """
    paused = sum(seconds for kind, seconds in self._window.items() if kind != "data")
    seconds = max(time.perf_counter() - self._started - paused, 1e-9)
    self._total["train"] += seconds
    rate = (tokens_seen - self._tokens) / seconds
    metrics = {
        "tokens_per_second": rate,
        "mfu": self._flops_per_token * rate / (self.peak * jax.device_count()),
        "time/step": seconds / max(steps, 1),
        "time/data": max(self._window.get("data", 0.0), liveness.longest_wait()) / max(steps, 1),
        "time/split/train": max(seconds - self._window.get("data", 0.0), 0.0),
        **{f"time/split/{kind}": spent for kind, spent in self._window.items() if spent},
        "time/wall": time.time() - self._first_start,
        "goodput": self.goodput(),
    }
    self.start_window(tokens_seen)
    return metrics

  def state(self) -> dict[str, float]:
    """Seconds by kind since the run's first start, for the checkpoint."""
    return {kind: round(seconds, 3) for kind, seconds in self._total.items()}
