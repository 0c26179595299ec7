"""Batches prepared ahead of the step by threads, handed out in order."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Prefetcher(Iterator[Any]):
  """Iterates fn(start), fn(start + 1), …, computed up to `depth` calls ahead by `workers` threads.

  An exception in `fn` is raised to the consumer, with its traceback, at its step's turn; iteration ends
  there. With depth 0 nothing runs ahead. Close it, or use it as a context manager.

  Args:
    fn: must not depend on the order of calls.
    stop: step after the last; None: endless.
    closed: called when it was closed.
  """

  def __init__(self, fn: Callable[[int], Any], start: int, stop: int | None, depth: int = 2, workers: int = 1,
               closed: Callable[[], None] | None = None):
    if depth < 0 or workers < 1:
      raise ValueError(f"prefetch={depth} must be at least 0 and workers={workers} at least 1.")
    self._fn, self._next, self._stop, self._depth, self._closed = fn, start, stop, depth, closed
    self._pool = ThreadPoolExecutor(workers, thread_name_prefix="prefetch")
    self._ahead: deque[Future] = deque()
    # Seconds that the consumer has waited for results.
    self.wait_seconds = 0.0
    # Metrics of how the latest result was made: none.
    self.metrics: dict[str, float] = {}
    self._submit()

  def _submit(self, more: int = 0) -> None:
    while len(self._ahead) < self._depth + more and (self._stop is None or self._next < self._stop):
      self._ahead.append(self._pool.submit(self._fn, self._next))
      self._next += 1

  def __next__(self) -> Any:
    if self._pool is None:
      raise StopIteration
    started = time.perf_counter()
    if not self._ahead:
      self._submit(more=1)
    if not self._ahead:
      raise StopIteration
    try:
      result = self._ahead.popleft().result()
    except BaseException:
      self.close()
      raise
    finally:
      self.wait_seconds += time.perf_counter() - started
    self._submit()
    return result

  def seek(self, step: int) -> None:
    """The next result is that of `step`; what was prepared is dropped."""
    for future in self._ahead:
      future.cancel()
    self._ahead.clear()
    self._next = step
    self._submit()

  def close(self) -> None:
    """Drops what is not handed out yet and waits for the threads to end."""
    if self._pool is not None:
      pool, self._pool = self._pool, None
      pool.shutdown(wait=True, cancel_futures=True)
      self._ahead.clear()
      if self._closed is not None:
        self._closed()

  def __enter__(self) -> "Prefetcher":
    return self

  def __exit__(self, kind, error, trace) -> None:
    self.close()
