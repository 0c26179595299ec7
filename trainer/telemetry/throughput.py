"""Tokens per second, MFU and the time split of a run, across restarts.

MFU (model FLOPs utilisation; PaLM, arXiv 2204.02311, appendix B) = FLOPs per token × tokens/s / (devices × peak).
FLOPs per token is the model's own formula (`flops_per_token`: matrix products forward and backward, causal
attention counted by half, nothing for recomputation). The time of compilation, evaluation and checkpoints is left out.

A step's time is from the end of the one before to its own, on the device. The host dispatches steps ahead, and may or
may not be held while it does, so that neither the dispatch nor the fetching of metrics says when one ended: a thread
waits for each. The device never waits for that thread.

Goodput = the time of steps and rollouts that counted / the time since the run's first start, when it did not run
included. Steps that were lost with their process do not count: they are in no checkpoint, nor is their time.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp

from models import cpu
from trainer.distributed import liveness, processes
from trainer.distributed import mesh as mesh_lib
from trainer.telemetry import hardware

# Of the matrices whose product is timed.
_SIZE = 1024
MEASURED = "measured"
# Of so many steps back the ends are known.
_REMEMBERED = 64


def peak_flops(dtype: str = "float32") -> tuple[float, str]:
  """FLOP/s of one device and where the number is from; measured, of products in `dtype`, where no data sheet applies
  (CPU)."""
  kind = jax.devices()[0].device_kind
  name = hardware.find(kind)
  if name is not None:
    return hardware.CHIPS[name].peak, f"data sheet of {hardware.CHIPS[name].kinds[0]}, dense bfloat16"
  # Forced host devices share the same cores.
  peak = measured_flops(jax.local_devices()[0], dtype) / jax.local_device_count()
  return peak, f"{MEASURED}: a {dtype} {_SIZE}×{_SIZE} matrix product on {kind}"


def measured_flops(device: jax.Device, dtype: str = "float32") -> float:
  """FLOP/s of a matrix product in that dtype on one device, which has all cores to itself meanwhile."""
  a = jax.device_put(jnp.ones((_SIZE, _SIZE), dtype), device)
  product = jax.jit(cpu.matmul)
  product(a, a).block_until_ready()
  seconds = []
  for _ in range(5):
    start = time.perf_counter()
    product(a, a).block_until_ready()
    seconds.append(time.perf_counter() - start)
  return 2 * _SIZE**3 / min(seconds)


class Ends:
  """When each update was there: a thread waits for its results, if they are not there at once.

  Attributes:
    step: the update that was dispatched last; 0: none.
  """

  def __init__(self):
    self.step = 0
    self._ends: dict[int, Future[float]] = {}
    self._waiting: queue.SimpleQueue[tuple[jax.Array, Future[float]] | None] = queue.SimpleQueue()
    self._thread: threading.Thread | None = None

  def dispatched(self, step: int, results: Any) -> None:
    """An update was just dispatched, of which `results` has an array that is not donated."""
    array = next(leaf for leaf in jax.tree.leaves(results) if hasattr(leaf, "is_ready"))
    end = self._ends[step] = Future()
    self.step = step
    self._ends.pop(step - _REMEMBERED, None)
    if array.is_ready():
      end.set_result(time.perf_counter())
      return
    if self._thread is None:
      self._thread = threading.Thread(target=self._wait, name="ends of steps", daemon=True)
      self._thread.start()
    self._waiting.put((array, end))

  def of(self, step: int) -> Future[float] | None:
    """`time.perf_counter()` at the end of one of the latest updates; None: it was not dispatched here."""
    return self._ends.get(step)

  def close(self) -> None:
    """Ends the thread, once it has no more to wait for."""
    if self._thread is not None:
      self._waiting.put(None)
      self._thread = None

  def _wait(self) -> None:
    while (waiting := self._waiting.get()) is not None:
      array, end = waiting
      with contextlib.suppress(Exception):  # the loop has the same error when it fetches metrics
        array.block_until_ready()
      end.set_result(time.perf_counter())
      del waiting, array


def make_chrono(config: Any, flops_per_token: float, meta: Mapping[str, Any], first_start: float) -> "Chrono":
  """The clock of a run, which says what its `mfu` is a share of; `meta`: of the checkpoint that it goes on from."""
  chrono = Chrono(flops_per_token, meta.get("seconds"), first_start, config.precision.compute,
                  mesh_lib.num_training(config, jax.device_count()))
  processes.say(f"mfu: of {chrono.peak / 1e12:.3g} TFLOP/s a device ({chrono.peak_source})")
  return chrono


class Chrono:
  """Where the time goes. Pauses (evaluation, checkpoints, waiting for data) are measured where they happen.

  Args:
    flops_per_token: forward and backward, see the module's docstring.
    saved: `state()` of the run that this one continues.
    first_start: `time.time()` when the run was begun; None: now.
    dtype: of the products.
    devices: those that train; None: all.

  Attributes:
    phase: the pause that this is, or "step".
    ends: of updates; the loop says when one is dispatched.
    longest: seconds that the longest pause of each kind has taken, in this process.
  """

  def __init__(self, flops_per_token: float, saved: dict[str, float] | None = None, first_start: float | None = None,
               dtype: str = "float32", devices: int | None = None):
    self._first_start = time.time() if first_start is None else first_start
    self.phase = "step"
    self.longest: dict[str, float] = {}
    self.peak, self.peak_source = peak_flops(dtype)
    self._flops_per_token, self._devices = flops_per_token, devices or jax.device_count()
    self._total = {"train": 0.0, "data": 0.0, "eval": 0.0, "checkpoint": 0.0, "compile": 0.0,
                   "rollout": 0.0, **(saved or {})}
    self.ends = Ends()
    self._data = 0.0  # seconds waited for them, in the window
    self._pauses: list[tuple[str, float, float, Future[float] | None]] = []
    self.start_window(0, 0)

  def start_window(self, step: int, tokens_seen: int) -> None:
    """The next `window` covers the time from here on, and the updates after `step`."""
    self._pauses, self._data = [], 0.0
    self._started, self._step, self._tokens = time.perf_counter(), step, tokens_seen

  @contextlib.contextmanager
  def pause(self, kind: str) -> Iterator[None]:
    """Time spent in it counts as `time/<kind>` and not as training."""
    start, outer, running = time.perf_counter(), self.phase, self.ends.of(self.ends.step)
    self.phase = kind
    try:
      with liveness.phase(kind):
        yield
    finally:
      end = time.perf_counter()
      self.phase, self.longest[kind] = outer, max(end - start, self.longest.get(kind, 0.0))
      if outer == "step":  # else it is part of another pause
        self._total[kind] = self._total.get(kind, 0.0) + end - start
        self._pauses.append((kind, start, end, running))

  def waited(self, seconds: float) -> None:
    """Counts seconds of waiting for data, which are part of training."""
    liveness.waited(seconds)
    self._data += seconds
    self._total["data"] += seconds

  def take_back(self, saved: dict[str, float]) -> None:
    """Steps since `state()` gave this do not count: the run goes on from there."""
    for kind in ("train", "rollout"):
      self._total[kind] = saved[kind]

  def goodput(self) -> float:
    """The share of the time since the first start that went into steps and rollouts that counted, up to the last
    `window`. A clock that was set back makes the time no shorter than its parts."""
    wall = max(time.time() - self._first_start, sum(self._total.values()) - self._total["data"])
    return (self._total["train"] + self._total["rollout"]) / wall if wall > 0 else 0.0

  def window(self, step: int, tokens_seen: int) -> dict[str, float]:
    """Metrics of the updates since `start_window`, or the last window, up to `step`, whose results are on the host:
    tokens_per_second, mfu, time/step and time/data in seconds a step; goodput; time/wall, seconds since the run's first
    start; time/split/<kind>, those of the window (`train` without `data`).

    Of several processes, time/data is that of the one that waited longest.
    """
    end = self.ends.of(step)
    until = time.perf_counter() if end is None else end.result()
    split = self._paused(until)
    seconds, steps = max(until - self._started - sum(split.values()), 1e-9), max(step - self._step, 1)
    self._total["train"] += seconds
    rate = (tokens_seen - self._tokens) / seconds
    flops = self._flops_per_token * rate / self._devices
    if flops > self.peak and self.peak_source.startswith(MEASURED):  # while the machine had other things to do
      self.peak = flops
    metrics = {
        "tokens_per_second": rate,
        "mfu": flops / self.peak,
        "time/step": seconds / steps,
        "time/data": max(self._data, liveness.longest_wait()) / steps,
        "time/split/train": max(seconds - self._data, 0.0),
        **({"time/split/data": self._data} if self._data else {}),
        **{f"time/split/{kind}": spent for kind, spent in split.items()},
        "time/wall": time.time() - self._first_start,
        "goodput": self.goodput(),
    }
    self._started, self._step, self._tokens, self._data = until, step, tokens_seen, 0.0
    return metrics

  def _paused(self, until: float) -> dict[str, float]:
    """Seconds of the window that ends then, by the kinds of pauses; what is later is left for the next one.

    A pause during which a step still runs begins, for the device, when that one ends.
    """
    split: dict[str, float] = {}
    later = []
    for kind, start, end, running in self._pauses:
      ran_until = start if running is None else running.result() if running.done() else end
      spent = min(end, until) - max(start, ran_until, self._started)
      if spent > 0:
        split[kind] = split.get(kind, 0.0) + spent
      if end > until:
        later.append((kind, start, end, running))
    self._pauses = later
    return split

  def state(self) -> dict[str, float]:
    """Seconds by kind since the run's first start, for the checkpoint."""
    return {kind: round(seconds, 3) for kind, seconds in self._total.items()}
