"""Tokens per second, MFU and the time split, with a clock of our own."""

import jax
import pytest

from trainer import throughput


@pytest.fixture
def clock(monkeypatch):
  now = [100.0]
  monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])
  monkeypatch.setattr(throughput, "peak_flops", lambda: (1000.0, "made up"))
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
  clock[0] += 1.0
  assert chrono.window(tokens_seen=900, steps=1)["tokens_per_second"] == 100.0


def test_totals_go_on_across_restarts(clock):
  chrono = throughput.Chrono(1.0, saved={"train": 10.0, "eval": 3.0})
  chrono.start_window(0)
  clock[0] += 2.0
  with chrono.pause("eval"):
    clock[0] += 1.0
  chrono.window(10, 1)
  assert chrono.state() == {"train": 12.0, "data": 0.0, "eval": 4.0, "checkpoint": 0.0, "compile": 0.0,
                            "rollout": 0.0}


def test_the_measured_peak_is_positive_and_says_how(monkeypatch):
  peak, source = throughput.peak_flops()
  assert peak > 0 and source.startswith("measured")
