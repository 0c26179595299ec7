"""Meshes: clear refusals, placement by rules, and the same numbers on one device and on eight (I2)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests import tiny
from trainer import mesh as mesh_lib
from trainer import optim, patterns
from trainer import state as state_lib
from trainer import update as update_lib
from trainer.config import ConfigError, defaults
from trainer.config_checks import View
from trainer.metrics import to_floats
from trainer.strategies import seq

LAYOUTS = {"data": dict(data=8, fsdp=1, tensor=1), "fsdp": dict(data=1, fsdp=8, tensor=1),
           "tensor": dict(data=4, fsdp=1, tensor=2), "mixed": dict(data=2, fsdp=2, tensor=2)}


@functools.cache
def steps_on(layout, steps=2, dropout=0.1):
  """(state before, state after, metrics) of two AdamW steps; layout None: one device, no mesh."""
  model, config = tiny.model(dropout=dropout), defaults()
  config.optimizer.eps = 1e-3  # so that rounding of tiny gradients is not blown up to the size of a step
  optimizer = optim.make_optimizer(config.optimizer, config.schedule, model.abstract_params(), total_steps=10,
                                   to_steps=lambda cfg, prefix, default=None, where="": 0)
  strategy = View(config.strategy)

  def loss_fn(params, batch, rng):
    return seq.loss(model, params, batch, rng, strategy)

  update = update_lib.make_update_fn(loss_fn, optimizer, seed=0, micro_batch_size=8, clip_norm=1.0, ema_decay=0.9,
                                     source_names=("a", "b"))
  init = state_lib.make_init(model, optimizer, ema=True)
  batches = [tiny.batch(16, 16, seed) for seed in range(steps)]
  if layout is None:
    state, update = jax.jit(init)(jax.random.key(3)), jax.jit(update)
    placed = batches
    first = jax.device_get(state)
    for batch in placed:
      state, metrics = update(state, batch)
    return first, jax.device_get(state), to_floats(jax.device_get(metrics))
  mesh = mesh_lib.make_mesh(LAYOUTS[layout])
  abstract = jax.eval_shape(init, jax.random.key(0))
  params, _ = mesh_lib.param_shardings(abstract["params"], mesh)
  shardings = mesh_lib.state_shardings(abstract, abstract["params"], params, mesh)
  with mesh_lib.activation_rules(mesh):
    state = jax.jit(init, out_shardings=shardings)(jax.random.key(3))
    update = jax.jit(update, donate_argnums=0, out_shardings=(shardings, None))
    first = jax.device_get(state)
    for batch in batches:
      placed = mesh_lib.place_batch(lambda rows, b=batch: {k: v[rows] for k, v in b.items()}, 16,
                                    mesh_lib.batch_sharding(mesh))
      state, metrics = update(state, placed)
  return first, jax.device_get(state), to_floats(jax.device_get(metrics))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_device_and_eight_compute_the_same(layout):
  """I2, with dropout and two micro-batches: initialisation is exact, the rest equal to rounding."""
  first, after, metrics = steps_on(None)
  first_8, after_8, metrics_8 = steps_on(layout)
  for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(first)[0], jax.tree.leaves(first_8), strict=True):
    np.testing.assert_array_equal(a, b, err_msg=str(path))
  for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(after)[0], jax.tree.leaves(after_8), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=str(path))
  for name, value in metrics.items():
    assert metrics_8[name] == pytest.approx(value, rel=1e-5), name
  assert np.any(after["params"]["embed"]["embedding"] != first["params"]["embed"]["embedding"])


def test_parameters_and_moments_are_really_split():
  mesh = mesh_lib.make_mesh(LAYOUTS["mixed"])
  model, config = tiny.model(), defaults()
  optimizer = optim.make_optimizer(config.optimizer, config.schedule, model.abstract_params(), total_steps=10,
                                   to_steps=lambda cfg, prefix, default=None, where="": 0)
  abstract = jax.eval_shape(state_lib.make_init(model, optimizer, ema=True), jax.random.key(0))
  params, notes = mesh_lib.param_shardings(abstract["params"], mesh)
  assert notes == []
  shardings = mesh_lib.state_shardings(abstract, abstract["params"], params, mesh)
  assert patterns.flatten(params)["blocks/mlp/up/kernel"].spec == P(None, "fsdp", "tensor")
  followers = [s.spec for path, s in jax.tree_util.tree_flatten_with_path(shardings)[0]
               if "'up'" in str(path) and "'kernel'" in str(path)]
  assert followers == [P(None, "fsdp", "tensor")] * 4  # the parameter, its average, and two moments


def test_the_mesh_must_fit_the_devices():
  with pytest.raises(ConfigError, match=r"there are 8 .*try --config.mesh.data=-1"):
    mesh_lib.make_mesh(dict(data=3, fsdp=1, tensor=1))
  with pytest.raises(ConfigError, match="there are 8"):
    mesh_lib.make_mesh(dict(data=-1, fsdp=3, tensor=1))
  with pytest.raises(ConfigError, match="at most one is -1"):
    mesh_lib.make_mesh(dict(data=-1, fsdp=-1, tensor=1))
  assert mesh_lib.make_mesh(dict(data=-1, fsdp=2, tensor=2)).shape == dict(data=2, fsdp=2, tensor=2)


def test_the_batch_must_split_evenly():
  mesh = mesh_lib.make_mesh(LAYOUTS["mixed"])
  mesh_lib.check_batch(mesh, 8)
  with pytest.raises(ConfigError, match="multiple of 4"):
    mesh_lib.check_batch(mesh, 6)


def test_user_rules_come_first_and_are_checked():
  mesh = mesh_lib.make_mesh(LAYOUTS["mixed"])
  abstract = tiny.model().abstract_params()
  placed, _ = mesh_lib.param_shardings(abstract, mesh, (("mlp/up/kernel", (None, None, "data")),))
  assert patterns.flatten(placed)["blocks/mlp/up/kernel"].spec == P(None, None, "data")
  for rule, message in [(("mpl/up", (None,)), "mlp"), (("mlp/up/kernel", (None, "model")), "unknown mesh axis 'model'"),
                        (("final_norm", (None, "data")), "has 2 dimensions"),
                        (("blocks/attn_norm/scale", (("data", "fsdp"),)), "not divisible")]:
    with pytest.raises(ConfigError, match=message):
      mesh_lib.param_shardings(abstract, mesh, (rule,))


def test_a_dimension_that_does_not_divide_is_replicated_and_said():
  mesh = mesh_lib.make_mesh(dict(data=1, fsdp=1, tensor=8))
  placed, notes = mesh_lib.param_shardings({"blocks": {"attn": {"q": {"bias": jnp.zeros((2, 12))}}}}, mesh)
  assert placed["blocks"]["attn"]["q"]["bias"].spec == P(None, None)
  assert "blocks/attn/q/bias: dimension 1 of (2, 12) is not divisible by mesh axis 'tensor' (8)" in notes[0]


def test_place_batch_asks_only_for_rows_and_puts_them_in_order():
  mesh = mesh_lib.make_mesh(LAYOUTS["mixed"])
  whole = np.arange(32).reshape(8, 4)
  placed = mesh_lib.place_batch(lambda rows: {"x": whole[rows], "y": whole[rows, 0]}, 8, mesh_lib.batch_sharding(mesh))
  np.testing.assert_array_equal(placed["x"], whole)
  np.testing.assert_array_equal(placed["y"], whole[:, 0])
  assert {s.data.shape for s in placed["x"].addressable_shards} == {(2, 4)}
