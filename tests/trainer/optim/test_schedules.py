"""Schedules against Transformers' and PyTorch's, and closed forms at the ends of their parts and between."""

import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.config import defaults, durations
from trainer.errors import ConfigError
from trainer.optim.schedules import make_schedule, warmup


def schedule(total_steps=100, **changed):
  """A schedule of the default config with some keys changed; warm-up in steps, none unless given."""
  cfg = defaults().schedule
  cfg.update({"warmup_percent": -1.0} | changed)
  to_steps = functools.partial(
      durations.steps, run=durations.RunLengths(total_steps, batch_size=8, seq_len=16, rows_per_epoch=None))
  return make_schedule(cfg, total_steps=total_steps, to_steps=to_steps)


EXPECTED = {
    # W = 11 puts the peak at update 10; update 110, after the last of 110, has the floor: update 60 is half-way.
    "constant": {0: 1 / 11, 4: 5 / 11, 10: 1, 11: 1, 109: 1},
    "linear": {0: 1 / 11, 10: 1, 60: 0.6, 90: 0.2 + 0.8 * 0.2, 109: 0.2 + 0.8 / 100, 110: 0.2},
    "cosine": {0: 1 / 11, 10: 1, 60: 0.6, 35: 0.2 + 0.4 * (1 + math.cos(math.pi / 4)),
               109: 0.2 + 0.4 * (1 + math.cos(math.pi * 0.99)), 110: 0.2},
    "rsqrt": {0: 1 / 11, 10: 1, 11: (1 + 1 / 30) ** -0.5, 100: 0.5, 1010: 0.2},
    # The decay: 20% of 110 is 22 updates, from 88 on, which still has the peak.
    "wsd": {0: 1 / 11, 10: 1, 88: 1, 89: 1 - 0.8 / 22, 99: 0.6, 109: 0.2 + 0.8 / 22, 110: 0.2},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_closed_forms(name):
  fn = schedule(110, name=name, warmup_steps=11, floor=0.2, timescale=30)
  for step, value in EXPECTED[name].items():
    assert float(fn(step)) == pytest.approx(value, rel=1e-6), step


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd", "sgdr", "rsqrt"])
@pytest.mark.parametrize("warm", [0, 1, 7])
def test_traced_equals_host_and_all_lie_between_0_and_1(name, warm):
  fn = schedule(name=name, warmup_steps=warm, floor=0.1, cycle_steps=20, timescale=5)
  traced = np.asarray(jax.jit(jax.vmap(fn))(jnp.arange(120)))
  host = [fn(step) for step in range(120)]
  assert traced.dtype == np.float32 and all(np.asarray(value).dtype == np.float32 for value in host)
  assert not any(isinstance(value, jax.Array) for value in host)
  np.testing.assert_allclose(traced, host, rtol=1e-6)
  assert traced.min() >= 0.1 or warm == 7
  assert traced[warm:].min() >= np.float32(0.1)
  # The first update is not a no-op, and the peak is reached exactly.
  assert traced[0] > 0 and traced[max(warm - 1, 0)] == 1 == traced.max()


REFERENCES = Path(__file__).parents[1] / "schedule_references.json"


@pytest.mark.parametrize("row", json.loads(REFERENCES.read_text())["rows"],
                         ids=lambda row: "-".join(map(str, row["options"].values())))
def test_from_the_peak_on_schedules_are_those_of_transformers_and_pytorch(row):
  fn = schedule(len(row["factors"]), **row["options"])
  peak = max(row["options"].get("warmup_steps", 0) - 1, 0)
  np.testing.assert_allclose([fn(step) for step in range(peak, 13)], row["factors"][peak:], rtol=2e-6)


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("floor", [0.0, 0.1, 1 / 3])
@pytest.mark.parametrize("total", [2, 3, 97, 1000])
def test_the_floor_comes_one_update_after_the_last(name, floor, total):
  fn = schedule(total, name=name, warmup_steps=1, floor=floor)
  values = np.asarray(jax.jit(jax.vmap(fn))(jnp.arange(total + 5)))
  assert (values[:total] > floor).all()
  assert (values[total:] == np.float32(floor)).all() and np.float32(floor) == np.float32(fn(total))


@pytest.mark.parametrize("total", [20_000, 2_000_000])
@pytest.mark.parametrize("options, last", [
    (dict(name="linear"), lambda n: 1 / n),
    (dict(name="cosine"), lambda n: math.sin(math.pi / 2 / n) ** 2),  # (1 + cos(pi (n - 1) / n)) / 2
    *((dict(name="wsd", decay_percent=100.0, decay_shape=shape), last) for shape, last in (
        ("linear", lambda n: 1 / n), ("sqrt", lambda n: 1 / n / (1 + math.sqrt(1 - 1 / n))),
        ("cosine", lambda n: math.sin(math.pi / 2 / n) ** 2))),
    (dict(name="sgdr", cycle_percent=100.0), lambda n: math.sin(math.pi / 2 / n) ** 2)])
def test_the_last_update_of_a_long_run_learns_although_the_floor_is_0(options, last, total):
  """Where 1 - t would be 0, or a third off, by float32's rounding."""
  fn = schedule(total, floor=0.0, **options)
  assert float(fn(total - 1)) == pytest.approx(last(total), rel=1e-5)
  assert float(jax.jit(fn)(jnp.int32(total - 1))) == pytest.approx(last(total), rel=1e-5)


def test_a_run_of_one_step_trains_at_the_peak():
  for name in ("constant", "linear", "cosine", "wsd", "rsqrt"):
    assert float(schedule(1, name=name, warmup_steps=1)(0)) == 1


@pytest.mark.parametrize("shape, half", [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5)), ("cosine", 0.5)])
def test_wsd_shapes(shape, half):
  fn = schedule(100, name="wsd", decay_steps=40, decay_shape=shape, floor=0.0)
  assert float(fn(60)) == 1
  assert float(fn(80)) == pytest.approx(half, rel=1e-5)
  quarter = {"linear": 0.75, "sqrt": 0.5, "cosine": (1 + math.cos(math.pi / 4)) / 2}[shape]
  assert float(fn(70)) == pytest.approx(quarter, rel=1e-6)
  assert float(fn(99)) > 0 == float(fn(100))


def test_wsd_without_decay_is_constant():
  assert {float(schedule(50, name="wsd", decay_steps=0)(step)) for step in range(50)} == {1.0}


def test_sgdr_cycles_grow_and_each_goes_from_peak_to_floor():
  fn = schedule(100, name="sgdr", warmup_steps=6, cycle_steps=12, t_mult=2.0, floor=0.1)
  # Peak at update 5; cycles begin at 5, 17, 41 and 89 (lengths 12, 24, 48, 96).
  values = np.asarray(jax.jit(jax.vmap(fn))(jnp.arange(100)))
  assert [step for step in range(5, 100) if values[step] == 1] == [5, 17, 41, 89]
  assert values[5:].min() > np.float32(0.1)
  assert values[16] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 11 / 12)))
  assert values[11] == pytest.approx(0.55)
  assert values[17 + 8] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 3)))
  # The last cycle is cut short by the end of the run, 10 / 96 of its way down.
  assert values[99] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 10 / 96)))


def test_sgdr_cycles_that_are_no_whole_steps_are_rounded_to_the_nearest():
  """Lengths 5, 7.5, 11.25 and 16.875 begin at 0, 5, 13 (7.5 rounds up), 24 and 41."""
  fn = schedule(60, name="sgdr", cycle_steps=5, t_mult=1.5, floor=0.0)
  assert [step for step in range(60) if float(fn(step)) == 1] == [0, 5, 13, 24, 41]


def test_sgdr_with_equal_cycles():
  values = [float(schedule(40, name="sgdr", cycle_steps=10, t_mult=1.0)(step)) for step in range(40)]
  assert values[:10] == values[10:20] == values[30:]


def test_neighbouring_steps_are_told_apart_beyond_float32():
  total = 2**25
  fn = schedule(total, name="linear", floor=0.0, warmup_steps=2**24 + 2)
  values = np.asarray(jax.jit(jax.vmap(fn))(jnp.array([2**24 + 1, 2**24 + 3, total - 2, total - 1, total])))
  length = total - 2**24 - 1
  assert values[0] == 1 and values[4] == 0
  np.testing.assert_allclose(values[1:4], [1 - 2 / length, 2 / length, 1 / length], rtol=1e-6)


def test_another_warmup_replaces_only_the_warmup():
  fn = schedule(100, name="cosine", warmup_steps=10)
  assert float(fn(3, 20)) == pytest.approx(4 / 20)
  assert float(fn(3, 0)) == 1
  assert float(fn(14, 20)) == pytest.approx(0.75 * float(fn(14)))
  assert float(fn(19, 20)) == float(fn(19))
  assert float(fn(60, 20)) == float(fn(60))


def test_warmup():
  assert [float(warmup(step, 4)) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
  assert float(warmup(0, 0)) == 1


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"warmup_steps": 101}, "101 steps, but the run has 100"),
        ({"name": "wsd", "decay_shape": "exp"}, "one of linear, sqrt, cosine"),
        ({"name": "wsd", "decay_steps": 90, "warmup_steps": 20}, r"decay_steps=80"),
        ({"name": "sgdr"}, "cycle_percent=25"),
        ({"name": "sgdr", "cycle_steps": 5, "t_mult": 0.5}, "t_mult"),
        ({"name": "rsqrt", "timescale": 0}, "timescale"),
    ],
)
def test_impossible_schedules(changed, message):
  with pytest.raises(ConfigError, match=message):
    schedule(**changed)
