"""Processes that decode images, without a process: what each is given, and how it begins and ends."""

import signal
import threading
from types import SimpleNamespace

import pytest

from input_pipeline.images import workers


@pytest.fixture
def pooled(monkeypatch):
  asked = []
  pool = SimpleNamespace(map=lambda function, tasks, chunksize: asked.append((len(tasks), chunksize)) or map(
      function, tasks))
  monkeypatch.setattr(workers, "to_pixels", lambda *task: f"pixels of {task}")
  monkeypatch.setattr(workers, "_pool", lambda count: asked.append(count) or pool)
  return asked


@pytest.mark.parametrize("count, tasks, chunk", [(2, 3, 1), (2, 16, 2), (3, 23, 1), (3, 24, 2)])
def test_tasks_are_shared_out_in_four_parts_a_process(pooled, count, tasks, chunk):
  given = [workers.Task(b"", None, None, str(n)) for n in range(tasks)]
  expected = [f"pixels of {tuple(task)}" for task in given]
  assert workers.decode(given, count) == expected and pooled == [count, (tasks, chunk)]
  assert workers.decode(given, 0) == expected and len(pooled) == 2


def test_a_process_ends_with_its_parent_and_leaves_interrupts_to_it(monkeypatch):
  handlers, gone, ended = {}, threading.Event(), threading.Event()
  codes = []
  monkeypatch.setattr(workers, "signal", SimpleNamespace(signal=handlers.__setitem__, SIGINT=2, SIG_IGN=signal.SIG_IGN))
  monkeypatch.setattr(workers.multiprocessing, "parent_process", lambda: SimpleNamespace(join=gone.wait))
  monkeypatch.setattr(workers.os, "_exit", lambda code: (codes.append(code), ended.set()))
  workers._begin()
  assert handlers == {2: signal.SIG_IGN} and codes == []
  gone.set()
  assert ended.wait(30) and codes == [1]


def test_processes_are_begun_anew_once(monkeypatch):
  made = []
  monkeypatch.setattr(workers, "ProcessPoolExecutor", lambda *given, **named: made.append((given, named)) or object())
  workers._pool.cache_clear()
  try:
    assert workers._pool(3) is workers._pool(3)
    ((count, context), named), = made
    assert (count, context.get_start_method(), named) == (3, "spawn", dict(initializer=workers._begin))
  finally:
    workers._pool.cache_clear()
