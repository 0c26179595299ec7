"""Two threads that take each other for two processes, as far as they tell each other things without a collective."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax

from trainer.distributed import processes
from trainer.errors import ConfigError


class Store:
  """The coordinator's."""

  def __init__(self):
    self.said, self._changed = {}, threading.Condition()

  def key_value_set(self, key, value):
    with self._changed:
      assert self.said.setdefault(key, value) is value, key
      self._changed.notify_all()

  def blocking_key_value_get(self, key, milliseconds):
    with self._changed:
      if not self._changed.wait_for(lambda: key in self.said, milliseconds / 1000):
        raise RuntimeError("DEADLINE_EXCEEDED")
      return self.said[key]


class Place(threading.local):
  """Of each thread: which process it is, and how often it has counted."""

  def __init__(self):
    self.begin(0)

  def begin(self, index):
    self.index, self._count = index, itertools.count()

  def __next__(self):
    return next(self._count)


def run(patch, work):
  """[what `work(index)` gives or raises] in both, or the ConfigError that it raises; `patch`: pytest's monkeypatch."""
  place, store = Place(), Store()
  patch.setattr(jax, "process_count", lambda: 2)
  patch.setattr(jax, "process_index", lambda: place.index)
  patch.setattr(processes, "distributed", SimpleNamespace(global_state=SimpleNamespace(client=store)))
  patch.setattr(processes, "_FIRSTS", place)
  told = []

  def bytes_from_first(data):
    number = next(place)
    if place.index == 0:
      told.append(data)
      store.key_value_set(f"bytes/{number}", str(len(told) - 1))
    return told[int(store.blocking_key_value_get(f"bytes/{number}", 30_000))]

  patch.setattr(processes, "bytes_from_first", bytes_from_first)

  def one(index):
    place.begin(index)  # one thread may do the work of both, one after the other
    try:
      return work(index)
    except ConfigError as error:
      return error

  with ThreadPoolExecutor(2) as pool:
    return list(pool.map(one, range(2)))
