"""Processes that decode images."""

import functools
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from input_pipeline.images.film_file import Shown
from input_pipeline.images.images import Preprocess, to_pixels


class Task(NamedTuple):
  """An image to decode; see `images.to_pixels`."""

  data: bytes
  how: Preprocess
  key: tuple[int | str, ...] | None
  where: str


def decode(tasks: list[Task], workers: int) -> list[Shown]:
  """The pixels of each, as `to_pixels` gives them, by so many processes; 0: by the calling thread.

  Raises:
    ImageError: the first that cannot be decoded.
  """
  if not workers:
    return [_decode(task) for task in tasks]
  return list(_pool(workers).map(_decode, tasks, chunksize=max(1, len(tasks) // (4 * workers))))


def _decode(task: Task) -> Shown:
  return to_pixels(*task)


@functools.lru_cache(maxsize=1)
def _pool(workers: int) -> ProcessPoolExecutor:
  """Fresh processes, since a fork of one that runs JAX may hang."""
  return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_begin)


def _begin() -> None:
  """Leaves Ctrl-C to the parent, and ends with it, however it ends."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
  multiprocessing.parent_process().join()
  os._exit(1)
