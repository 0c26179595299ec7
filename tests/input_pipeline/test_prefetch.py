"""Results in order, ahead of the consumer but not further than asked; errors and threads come to an end."""

import threading
import time
import traceback

import pytest

from input_pipeline.prefetch import Prefetcher


@pytest.mark.parametrize("depth, workers", [(0, 1), (1, 1), (2, 4), (8, 3)])
def test_in_order_whatever_the_workers(depth, workers):
  def fn(step):
    time.sleep(0.002 * (step % 3))
    return step * step

  with Prefetcher(fn, 3, 20, depth, workers) as results:
    assert list(results) == [step * step for step in range(3, 20)]


def test_an_endless_one_runs_only_so_far_ahead():
  called = []
  with Prefetcher(lambda step: called.append(step), 0, None, depth=3) as results:
    next(results)
    time.sleep(0.05)
    assert called == [0, 1, 2, 3]


def test_an_error_comes_at_its_step_with_its_traceback():
  def breaks(step):
    if step == 2:
      raise KeyError("row 7")
    return step

  results = Prefetcher(breaks, 0, 10, depth=4, workers=2)
  assert next(results) == 0 and next(results) == 1
  with pytest.raises(KeyError, match="row 7") as error:
    next(results)
  assert "breaks" in [frame.name for frame in traceback.extract_tb(error.value.__traceback__)]
  assert list(results) == []


def test_close_ends_the_threads():
  before = threading.active_count()
  results = Prefetcher(lambda step: time.sleep(0.01), 0, None, depth=4, workers=3)
  next(results)
  results.close()
  results.close()
  assert threading.active_count() == before and list(results) == []


def test_waiting_is_counted():
  with Prefetcher(lambda step: time.sleep(0.05), 0, 2, depth=1) as results:
    list(results)
    assert 0.05 <= results.wait_seconds < 2


def test_bad_numbers():
  with pytest.raises(ValueError, match="prefetch=-1 must be at least 0 and workers=1"):
    Prefetcher(print, 0, 1, depth=-1)
