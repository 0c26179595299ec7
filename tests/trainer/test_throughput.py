"""Tokens per second, MFU and the time split, with a clock of our own."""

import jax
import pytest

from trainer import throughput


@pytest.fixture
def clock(monkeypatch):
  now = [100.0]
  for name in ("perf_counter", "time"):
    monkeypatch.setattr(throughput.time, name, lambda: now[0])
  monkeypatch.setattr(throughput, "peak_flops", lambda dtype: (1000.0, "made up"))
  return now


def test_rates_leave_pauses_out_and_mfu_follows_its_formula(clock):
  chrono = throughput.Chrono(flops_per_token=6.0)
  chrono.start_window(0)
  clock[0] += 4.0
  with chrono.pause("eval"):
    clock[0] += 50.0
  with chrono.pause("compile"):
    clock[0] += 30.0
  chrono.add("data", 1.0)  # waiting for data is part of training, and shown beside it
  metrics = chrono.window(tokens_seen=800, steps=2)
  assert metrics["tokens_per_second"] == 200.0
  assert metrics["mfu"] == 6.0 * 200.0 / (1000.0 * jax.device_count())
  assert (metrics["time/step"], metrics["time/data"]) == (2.0, 0.5)
  # The whole window, each second of it once.
  split = {name: value for name, value in metrics.items() if name.startswith("time/split/")}
  assert split == {"time/split/train": 3.0, "time/split/data": 1.0, "time/split/eval": 50.0, "time/split/compile": 30.0}
  assert metrics["time/wall"] == 84.0
  clock[0] += 1.0
  metrics = chrono.window(tokens_seen=900, steps=1)
  assert metrics["tokens_per_second"] == 100.0 and metrics["time/wall"] == 85.0
  assert {name: value for name, value in metrics.items() if "split" in name} == {"time/split/train": 1.0}


def test_totals_go_on_across_restarts(clock):
  chrono = throughput.Chrono(1.0, saved={"train": 10.0, "eval": 3.0})
  chrono.start_window(0)
  clock[0] += 2.0
  with chrono.pause("eval"):
    clock[0] += 1.0
  chrono.window(10, 1)
  assert chrono.state() == {"train": 12.0, "data": 0.0, "eval": 4.0, "checkpoint": 0.0, "compile": 0.0,
                            "rollout": 0.0}


def test_goodput_is_the_share_of_all_time_since_the_first_start(clock):
  """40 s of steps before a crash, of which 10 s were saved; 50 s without a process; 20 s of steps and a rollout."""
  chrono = throughput.Chrono(1.0, saved={"train": 10.0}, first_start=clock[0] - 90.0)
  chrono.start_window(0)
  clock[0] += 15.0
  with chrono.pause("rollout"):
    clock[0] += 5.0
  with chrono.pause("eval"):
    clock[0] += 10.0
  assert chrono.window(10, 1)["goodput"] == pytest.approx(30.0 / 120.0)
  clock[0] -= 500.0  # a clock that is set back
  assert chrono.goodput() == pytest.approx(30.0 / 40.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_measured_peak_is_positive_and_says_how(dtype):
  peak, source = throughput.peak_flops(dtype)
  assert peak > 0 and source.startswith(f"measured: a {dtype} ")
