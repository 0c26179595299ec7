"""Schedules against closed forms at the ends of their parts and between."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer import durations
from trainer.config import ConfigError, defaults
from trainer.schedules import make_schedule, warmup


def schedule(total_steps=100, **changed):
  """A schedule of the default config with some keys changed; warm-up in steps, none unless given."""
  cfg = defaults().schedule
  cfg.update({"warmup_percent": -1.0} | changed)
  to_steps = functools.partial(
      durations.steps, total_steps=total_steps, batch_size=8, seq_len=16, rows_per_epoch=None)
  return make_schedule(cfg, total_steps=total_steps, to_steps=to_steps)


EXPECTED = {
    # W = 11 puts the peak at update 10; the last is 100 of 101, so update 55 is half-way.
    "constant": {0: 1 / 11, 4: 5 / 11, 10: 1, 11: 1, 100: 1},
    "linear": {0: 1 / 11, 10: 1, 55: 0.6, 82: 0.2 + 0.8 * 0.2, 100: 0.2},
    "cosine": {0: 1 / 11, 10: 1, 55: 0.6, 40: 0.2 + 0.4 * (1 + math.cos(math.pi / 3)), 100: 0.2},
    "rsqrt": {0: 1 / 11, 10: 1, 11: (1 + 1 / 30) ** -0.5, 100: 0.5},
    # The decay: 20% of 101 is 20 updates, from 81 on.
    "wsd": {0: 1 / 11, 10: 1, 80: 1, 81: 1 - 0.8 / 20, 90: 0.6, 100: 0.2},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_closed_forms(name):
  fn = schedule(101, name=name, warmup_steps=11, floor=0.2, timescale=30)
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


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("floor", [0.0, 0.1, 1 / 3])
@pytest.mark.parametrize("total", [2, 3, 97, 1000])
def test_the_last_update_has_exactly_the_floor(name, floor, total):
  fn = schedule(total, name=name, warmup_steps=1, floor=floor)
  values = np.asarray(jax.jit(jax.vmap(fn))(jnp.arange(total + 5)))
  assert values[total - 1] == np.float32(floor) == np.float32(fn(total - 1))
  assert values[total - 2] > floor
  assert (values[total:] == np.float32(floor)).all()


def test_a_run_of_one_step_trains_at_the_peak():
  for name in ("constant", "linear", "cosine", "wsd", "rsqrt"):
    assert float(schedule(1, name=name, warmup_steps=1)(0)) == 1


@pytest.mark.parametrize("shape, half", [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5)), ("cosine", 0.5)])
def test_wsd_shapes(shape, half):
  fn = schedule(100, name="wsd", decay_steps=40, decay_shape=shape, floor=0.0)
  assert float(fn(59)) == 1
  assert float(fn(79)) == pytest.approx(half, rel=1e-5)
  quarter = {"linear": 0.75, "sqrt": 0.5, "cosine": (1 + math.cos(math.pi / 4)) / 2}[shape]
  assert float(fn(69)) == pytest.approx(quarter, rel=1e-6)
  assert float(fn(99)) == 0


def test_wsd_without_decay_is_constant():
  assert {float(schedule(50, name="wsd", decay_steps=0)(step)) for step in range(50)} == {1.0}


def test_sgdr_cycles_grow_and_each_goes_from_peak_to_floor():
  fn = schedule(100, name="sgdr", warmup_steps=6, cycle_steps=11, t_mult=2.0, floor=0.1)
  # Peak at update 5; cycles begin at 5, 16, 38 and 82 (lengths 11, 22, 44, 88).
  values = np.asarray(jax.jit(jax.vmap(fn))(jnp.arange(100)))
  assert [step for step in range(5, 100) if values[step] == 1] == [5, 16, 38, 82]
  assert [step for step in range(100) if step > 5 and values[step] == np.float32(0.1)] == [15, 37, 81]
  assert values[10] == pytest.approx(0.55)
  assert values[16 + 7] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 3)))
  # The last cycle is cut short by the end of the run, 17 / 87 of its way down.
  assert values[99] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 17 / 87)))


def test_sgdr_with_equal_cycles():
  values = [float(schedule(40, name="sgdr", cycle_steps=10, t_mult=1.0)(step)) for step in range(40)]
  assert values[:10] == values[10:20] == values[30:]


def test_neighbouring_steps_are_told_apart_beyond_float32():
  total = 2**25
  fn = schedule(total, name="linear", floor=0.0, warmup_steps=2**24 + 2)
  values = np.asarray(jax.jit(jax.vmap(fn))(jnp.array([2**24 + 1, total - 2, total - 1])))
  assert values[0] == 1 and values[1] > 0 and values[2] == 0


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
        ({"name": "cosin"}, "one of constant, linear, cosine"),
        ({"warmup_steps": 101}, "101 steps, but the run has 100"),
        ({"floor": 1.5}, "between 0 and 1"),
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
