"""Which runs of a sweep begin here, where, and with which GPUs; with processes that take no time."""

import threading
from types import SimpleNamespace

import pytest

from trainer.sweep import runs as sweep_runs


@pytest.fixture
def begun(monkeypatch):
  """(run, its GPUs, its slot) of each process; what `begun.ends` has for its number is called before it ends."""
  class Begun(list):
    pass
  found, handlers = Begun(), {}
  found.ends = {}

  def begin(run, gpus, slot, running):
    found.append((run.name, list(gpus), slot))
    number = len(found)
    running[slot] = SimpleNamespace(wait=lambda: 0 * bool(number in found.ends and found.ends[number](handlers)),
                                    send_signal=lambda signal: None)
    return 0

  monkeypatch.setattr(sweep_runs, "_begin", begin)
  monkeypatch.setattr(sweep_runs, "last_end", lambda workdir: {"how": "finished"})
  monkeypatch.setattr(sweep_runs.signal, "signal", lambda number, handler: handlers.update({number: handler}))
  return found


def planned(tmp_path, count):
  return [sweep_runs.Planned(f"r{n}", {}, tmp_path, []) for n in range(count)]


def test_each_job_has_gpus_of_its_own(begun, tmp_path, monkeypatch):
  """Whichever run it takes; of the visible ones as many as jobs need. The first two runs are there at once."""
  both = threading.Barrier(2)
  begun.ends = dict.fromkeys((1, 2), lambda handlers: both.wait(30))
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,9")
  runs = planned(tmp_path, 6)
  runs[2].status = "finished"
  assert sweep_runs.run_here(runs, 2, lambda text: None, gpus_per_run=2) is None
  assert sorted(name for name, *_ in begun) == ["r0", "r1", "r3", "r4", "r5"]
  assert {(slot, *gpus) for _, gpus, slot in begun} == {(0, "4", "5"), (1, "6", "7")}


def test_no_run_begins_after_the_sweep_was_told_to_end(begun, tmp_path):
  begun.ends[2] = lambda handlers: handlers[sweep_runs.signal.SIGTERM](sweep_runs.signal.SIGTERM, None)
  runs = planned(tmp_path, 4)
  assert sweep_runs.run_here(runs, 1, lambda text: None) == sweep_runs.signal.SIGTERM
  assert [name for name, *_ in begun] == ["r0", "r1"] and [run.status for run in runs] == [
      "finished", "finished", "new", "new"]
