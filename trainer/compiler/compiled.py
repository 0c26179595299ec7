"""The step, compiled for each of the shapes that batches have.

The first one is compiled in a thread of its own while the state is made or read: for a large model both take long, and
the compiler, most of it outside of Python, needs nothing of the parameters but their shapes.
"""

import functools
import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import Any

import jax

Shapes = dict[str, tuple[int, ...]]  # of a batch, by name
Key = frozenset[tuple[str, tuple[int, ...]]]  # the same in any order

THREAD = "compile-update"  # with which the name of a thread that compiles begins


class Step:
  """`step(state, batch) -> (state, metrics)`, by a program for each of the shapes.

  Args:
    update_fn: `(state, batch) -> (state, metrics)`, jitted. What is to be set when it is traced is to be set around
      `begin` and `compile`.
    compiler: of what is lowered; default: its own `compile`.
  """

  def __init__(self, update_fn: Any, compiler: Callable[[Any], Any] = lambda lowered: lowered.compile()):
    self._update_fn, self._compiler = update_fn, compiler
    self._worker = futures.ThreadPoolExecutor(1, thread_name_prefix=THREAD)
    self._begun: dict[Key, futures.Future] = {}
    self._ready: dict[Key, Any] = {}
    self._latest: Shapes = {}

  def begin(self, state: Any, batch: Mapping[str, Any]) -> None:
    """Starts to compile for such a batch, once. `state` may be ShapeDtypeStructs with the shardings of what will be
    there.

    Not on GPUs: their compiler chooses kernels by timing them on the device, which is not idle then.
    """
    if jax.default_backend() == "gpu":
      return
    self._begun[_key(batch)] = self._worker.submit(_timed, self._work(state, batch))
    self._worker.shutdown(wait=False)  # the thread ends with the one thing that it has to do

  def wait(self) -> None:
    """Until nothing that was begun is in progress."""
    self._worker.shutdown()

  def compile(self, state: Any, batch: Mapping[str, Any]) -> float:
    """Has the program for `batch` ready, and returns the seconds that the compiler took, waited for or not.

    Raises:
      JaxRuntimeError: the compiler's, also of what was begun.
      Whatever the compiler says that it was given.
    """
    key = _key(batch)
    begun = self._begun.pop(key, None)
    self._ready[key], seconds = begun.result() if begun else _timed(self._work(state, batch))
    return seconds

  def _work(self, state: Any, batch: Mapping[str, Any]) -> Callable[[], Any]:
    return functools.partial(self._compiler, self._update_fn.lower(state, batch))

  def __contains__(self, batch: Mapping[str, Any]) -> bool:
    """Whether the program for such a batch is ready."""
    return _key(batch) in self._ready

  def __len__(self) -> int:
    return len(self._ready)

  def __call__(self, state: Any, batch: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """One step, by the program that is ready; the state is donated."""
    self._latest = _shapes(batch)
    return self._ready[_key(batch)](state, batch)

  def changed(self, batch: Mapping[str, Any]) -> str:
    """What differs between the shapes, by name, of the step before and of `batch`."""
    old, new = self._latest, _shapes(batch)
    return ", ".join(f"{key} {old.get(key, 'absent')} → {new.get(key, 'absent')}" for key in {**old, **new}
                     if old.get(key) != new.get(key))


def in_progress() -> bool:
  """Whether a step is being compiled that was begun: Python waits for it when a program ends."""
  return any(thread.name.startswith(THREAD) for thread in threading.enumerate())


def _shapes(batch: Mapping[str, Any]) -> Shapes:
  return {name: part.shape for name, part in batch.items()}


def _key(batch: Mapping[str, Any]) -> Key:
  return frozenset(_shapes(batch).items())


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
  start = time.perf_counter()
  return work(), time.perf_counter() - start
