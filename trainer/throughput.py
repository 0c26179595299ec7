"""Tokens per second, MFU and the time split of a run, across restarts.

MFU (model FLOPs utilisation; PaLM, arXiv 2204.02311, appendix B) = FLOPs per token × tokens/s / (devices × peak).
FLOPs per token is the model's own formula (`flops_per_token`: matrix products forward and backward, causal
attention counted by half, nothing for recomputation). The time of compilation, evaluation and checkpoints is left out.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp

# Dense bfloat16 peak per JAX device, FLOP/s, from the vendors' data sheets; matched on the start of device_kind.
PEAK_FLOPS = {
    "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5p": 459e12, "TPU v5": 459e12,
    "TPU v6 lite": 918e12, "TPU v6e": 918e12, "TPU7x": 2307e12,
    "NVIDIA A100": 312e12, "NVIDIA H100": 989e12, "NVIDIA H200": 989e12, "NVIDIA GH200": 989e12, "NVIDIA B200": 2250e12,
    "NVIDIA L4": 121e12, "NVIDIA A10": 125e12, "NVIDIA L40S": 362e12,
}


def peak_flops() -> tuple[float, str]:
  """FLOP/s of one device and where the number is from; measured where no data sheet applies (CPU)."""
  kind = jax.devices()[0].device_kind
  for name in sorted(PEAK_FLOPS, key=len, reverse=True):
    if kind.startswith(name):
      return PEAK_FLOPS[name], f"data sheet of {name}, dense bfloat16"
  size = 1024
  product = jax.jit(lambda a, b: a @ b, device=jax.local_devices()[0])
  a = jnp.ones((size, size), jnp.float32)
  product(a, a).block_until_ready()
  seconds = []
  for _ in range(5):
    start = time.perf_counter()
    product(a, a).block_until_ready()
    seconds.append(time.perf_counter() - start)
  # Forced host devices share the same cores.
  peak = 2 * size**3 / min(seconds) / jax.local_device_count()
  return peak, f"measured: a float32 {size}×{size} matrix product on {kind}"


class Chrono:
  """Where the time goes. Pauses (evaluation, checkpoints, waiting for data) are measured where they happen.

  Args:
    flops_per_token: forward and backward, see the module's docstring.
    saved: `state()` of the run that this one continues.
  """

  def __init__(self, flops_per_token: float, saved: dict[str, float] | None = None):
    self.peak, self.peak_source = peak_flops()
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
    start = time.perf_counter()
    try:
      yield
    finally:
      self.add(kind, time.perf_counter() - start)

  def add(self, kind: str, seconds: float) -> None:
    """Counts seconds spent on something other than steps."""
    self._window[kind] = self._window.get(kind, 0.0) + seconds
    self._total[kind] += seconds

  def window(self, tokens_seen: int, steps: int) -> dict[str, float]:
    """Metrics since `start_window`: tokens_per_second, mfu, time/step, and time/<kind> in seconds a step."""
    paused = sum(seconds for kind, seconds in self._window.items() if kind != "data")
    seconds = max(time.perf_counter() - self._started - paused, 1e-9)
    self._total["train"] += seconds
    rate = (tokens_seen - self._tokens) / seconds
    metrics = {
        "tokens_per_second": rate,
        "mfu": self._flops_per_token * rate / (self.peak * jax.device_count()),
        "time/step": seconds / max(steps, 1),
        "time/data": self._window.get("data", 0.0) / max(steps, 1),
    }
    self.start_window(tokens_seen)
    return metrics

  def state(self) -> dict[str, float]:
    """Seconds by kind since the run's first start, for the checkpoint."""
    return {kind: round(seconds, 3) for kind, seconds in self._total.items()}
