"""Tokens per second, MFU and the time split, with a clock of our own, and a device that is ready when we say so."""

import threading

import jax
import pytest

from trainer.config import defaults
from trainer.telemetry import throughput

pytestmark = pytest.mark.devices(8)


@pytest.fixture
def clock(monkeypatch):
  now = [100.0]
  for name in ("perf_counter", "time"):
    monkeypatch.setattr(throughput.time, name, lambda: now[0])
  monkeypatch.setattr(throughput, "peak_flops", lambda dtype: (1000.0, "made up"))
  return now


class Results:
  """A step's results, which are there at a moment; `at_once`: before its dispatch returns."""

  def __init__(self, at_once=False):
    self._ready = threading.Event()
    if at_once:
      self._ready.set()

  def is_ready(self):
    return self._ready.is_set()

  def block_until_ready(self):
    assert self._ready.wait(30)


@pytest.fixture
def device(clock):
  """A Chrono with `dispatch(step)` and `ends(step, at)`."""
  chrono, running = throughput.Chrono(flops_per_token=6.0), {}
  chrono.start_window(0, 0)

  def dispatch(step, at_once=False):
    running[step] = Results(at_once)
    chrono.ends.dispatched(step, {"a float": 1.0, "loss": running[step]})

  def ends(step, at):
    clock[0] = at
    running[step]._ready.set()
    assert chrono.ends.of(step).result(30) == at

  chrono.dispatch, chrono.end = dispatch, ends
  yield chrono
  chrono.ends.close()


def test_a_step_s_time_is_from_end_to_end_whenever_its_metrics_are_fetched(device, clock):
  """Steps of 2 s; those of 1 and 2 are looked at late, and the last one at once."""
  device.dispatch(1)
  clock[0] += 0.1
  device.dispatch(2)
  device.end(1, at=102.0)
  clock[0] = 103.9  # the host was held up: by writing, or in the dispatch
  first = device.window(1, tokens_seen=100)
  device.dispatch(3)
  device.end(2, at=104.0)
  clock[0] = 105.9
  second = device.window(2, tokens_seen=200)
  device.end(3, at=106.0)
  last = device.window(3, tokens_seen=300)
  assert [row["time/step"] for row in (first, second, last)] == [2.0, 2.0, 2.0]
  assert [row["tokens_per_second"] for row in (first, second, last)] == [50.0, 50.0, 50.0]
  assert last["mfu"] == pytest.approx(6.0 * 50.0 / (1000.0 * jax.device_count()))


def test_one_thread_waits_for_all_steps_and_ends_with_the_run(device):
  device.dispatch(1)
  thread = device.ends._thread
  device.dispatch(2)
  assert device.ends._thread is thread and thread.is_alive()
  device.end(1, at=102.0)
  device.end(2, at=104.0)
  device.ends.close()
  thread.join(30)
  assert not thread.is_alive()


def test_a_dispatch_that_returns_when_all_is_computed(device, clock):
  """As on CPU: step k is there before the metrics of k - 1 are fetched. Rows of metrics every two steps."""
  rows = []
  for step in range(1, 5):
    clock[0] += 3.0
    device.dispatch(step, at_once=True)
    if step - 1 == 2:
      rows.append(device.window(2, tokens_seen=200))
  rows.append(device.window(4, tokens_seen=400))
  assert [row["time/step"] for row in rows] == [3.0, 3.0]


def test_a_pause_begins_for_the_device_when_its_step_ends(device, clock):
  """Step 1 takes 2 s, of which an evaluation already runs for 1.5 s on the host; step 2 takes 2 s after it."""
  device.dispatch(1)
  clock[0] = 100.5
  with device.pause("eval"):
    device.end(1, at=102.0)
    clock[0] = 107.0
  device.dispatch(2)
  first = device.window(1, tokens_seen=100)
  device.end(2, at=109.0)
  second = device.window(2, tokens_seen=200)
  assert first["time/step"] == second["time/step"] == 2.0
  assert "time/split/eval" not in first and second["time/split/eval"] == 5.0
  assert second["time/split/train"] == 2.0


def test_what_is_done_while_a_step_runs_takes_nothing_from_it(device, clock):
  device.dispatch(1)
  with device.pause("nonfinite"):
    clock[0] = 101.5
  device.end(1, at=102.0)
  assert device.window(1, tokens_seen=100)["time/step"] == 2.0


def test_a_peak_that_was_measured_too_low_is_corrected(device, clock, monkeypatch):
  """600 FLOP/s for each device where 1000 were measured; then 3000, while which mfu is 1."""
  device.peak_source = f"{throughput.MEASURED}: a product"
  tokens = 100 * jax.device_count()
  rates = []
  for step, seconds in ((1, 1.0), (2, 0.2), (3, 0.4)):
    clock[0] += seconds
    device.dispatch(step, at_once=True)
    rates.append(device.window(step, tokens_seen=step * tokens)["mfu"])
  assert rates == pytest.approx([0.6, 1.0, 0.5])


@pytest.mark.devices(8)
def test_mfu_is_of_the_devices_that_train(clock):
  """Two of eight sample; 12,000 FLOP/s are twice what the six can."""
  c = defaults()
  c.rollout.update(num_prompts=1, devices=2)
  chrono = throughput.make_chrono(c, 6.0, {}, 0.0)
  chrono.start_window(0, 0)
  clock[0] += 1.0
  assert chrono.window(1, tokens_seen=2000)["mfu"] == 6.0 * 2000.0 / (1000.0 * 6)


def test_rates_leave_pauses_out_and_mfu_follows_its_formula(clock):
  chrono = throughput.Chrono(flops_per_token=6.0)
  chrono.start_window(0, 0)
  clock[0] += 4.0
  with chrono.pause("eval"):
    clock[0] += 50.0
  with chrono.pause("compile"):
    clock[0] += 30.0
  chrono.waited(1.0)  # waiting for data is part of training, and shown beside it
  metrics = chrono.window(2, tokens_seen=800)
  assert metrics["tokens_per_second"] == 200.0
  assert metrics["mfu"] == 6.0 * 200.0 / (1000.0 * jax.device_count())
  assert (metrics["time/step"], metrics["time/data"]) == (2.0, 0.5)
  # The whole window, each second of it once.
  split = {name: value for name, value in metrics.items() if name.startswith("time/split/")}
  assert split == {"time/split/train": 3.0, "time/split/data": 1.0, "time/split/eval": 50.0, "time/split/compile": 30.0}
  assert metrics["time/wall"] == 84.0
  clock[0] += 1.0
  metrics = chrono.window(3, tokens_seen=900)
  assert metrics["tokens_per_second"] == 100.0 and metrics["time/wall"] == 85.0
  assert {name: value for name, value in metrics.items() if "split" in name} == {"time/split/train": 1.0}


def test_totals_go_on_across_restarts(clock):
  chrono = throughput.Chrono(1.0, saved={"train": 10.0, "eval": 3.0})
  chrono.start_window(0, 0)
  clock[0] += 2.0
  with chrono.pause("eval"):
    clock[0] += 1.0
  chrono.window(1, 10)
  assert chrono.state() == {"train": 12.0, "data": 0.0, "eval": 4.0, "checkpoint": 0.0, "compile": 0.0,
                            "rollout": 0.0}


def test_goodput_is_the_share_of_all_time_since_the_first_start(clock):
  """40 s of steps before a crash, of which 10 s were saved; 50 s without a process; 20 s of steps and a rollout."""
  chrono = throughput.Chrono(1.0, saved={"train": 10.0}, first_start=clock[0] - 90.0)
  chrono.start_window(0, 0)
  clock[0] += 15.0
  with chrono.pause("rollout"):
    clock[0] += 5.0
  with chrono.pause("eval"):
    clock[0] += 10.0
  assert chrono.window(1, 10)["goodput"] == pytest.approx(30.0 / 120.0)
  clock[0] -= 500.0  # a clock that is set back
  assert chrono.goodput() == pytest.approx(30.0 / 40.0)


def test_steps_that_are_taken_back_do_not_count(clock):
  """30 s of steps and a rollout of 6 s, of which a checkpoint has 10 s and 2 s; then 5 s more of steps."""
  chrono = throughput.Chrono(1.0)
  chrono.start_window(0, 0)
  clock[0] += 30.0
  with chrono.pause("rollout"):
    clock[0] += 6.0
  chrono.window(3, 30)
  chrono.take_back({"train": 10.0, "rollout": 2.0})
  clock[0] += 5.0
  assert chrono.window(1, 10)["goodput"] == pytest.approx((10.0 + 5.0 + 2.0) / 41.0)


def test_a_pause_within_another_is_a_part_of_it(clock):
  chrono = throughput.Chrono(1.0)
  chrono.start_window(0, 0)
  clock[0] += 1.0
  with chrono.pause("eval"):
    clock[0] += 2.0
    with chrono.pause("compile"):
      clock[0] += 4.0
    with chrono.pause("compile"):
      clock[0] += 8.0
  row = chrono.window(1, 10)
  assert {name: value for name, value in row.items() if "split" in name} == {
      "time/split/train": 1.0, "time/split/eval": 14.0}
  assert {kind: spent for kind, spent in chrono.state().items() if spent} == {"train": 1.0, "eval": 14.0}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_measured_peak_is_positive_and_says_how(dtype):
  peak, source = throughput.peak_flops(dtype)
  assert peak > 0 and source.startswith(f"measured: a {dtype} ")


def test_waiting_for_data_is_counted_once_and_is_no_time_of_its_own(clock):
  """8 s of steps, 3 of which waited for data, and 2 s of an evaluation: 10 s, by a clock that is then set back too."""
  chrono = throughput.Chrono(1.0)
  chrono.start_window(0, 0)
  clock[0] += 8.0
  chrono.waited(1.0)
  chrono.waited(2.0)
  with chrono.pause("eval"):
    clock[0] += 2.0
  row = chrono.window(4, 10)
  assert (row["time/data"], row["time/split/data"], row["time/split/train"]) == (0.75, 3.0, 5.0)
  assert {kind: spent for kind, spent in chrono.state().items() if spent} == {"train": 8.0, "data": 3.0, "eval": 2.0}
  assert row["goodput"] == pytest.approx(0.8)
  clock[0] -= 500.0
  assert chrono.goodput() == pytest.approx(0.8)


def test_devices_that_share_the_cores_share_their_peak(monkeypatch):
  monkeypatch.setattr(throughput, "measured_flops", lambda device, dtype: 8e9)
  monkeypatch.setattr(throughput.jax, "local_device_count", lambda: 4)
  assert throughput.peak_flops()[0] == 2e9


@pytest.mark.parametrize("own, others, shown", [(1.0, 3.0, 1.5), (3.0, 1.0, 1.5), (0.0, 0.0, 0.0)])
def test_data_are_as_late_as_for_the_process_that_waits_longest(clock, monkeypatch, own, others, shown):
  monkeypatch.setattr(throughput.liveness, "longest_wait", lambda: others)
  chrono = throughput.Chrono(flops_per_token=6.0)
  chrono.start_window(0, 0)
  clock[0] += 4.0
  chrono.waited(own)
  metrics = chrono.window(2, tokens_seen=800)
  assert metrics["time/data"] == shown and metrics["time/split/train"] == 4.0 - own
  assert metrics.get("time/split/data", 0.0) == own
