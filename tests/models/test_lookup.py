"""Tables and the gradient of what is read from them, which on GPU is added in a fixed order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import layers, lookup, tables
from models.sharding import logical_axes
from models.sharding.logical_axes import Placement
from tests import tiny
from trainer.distributed import mesh as mesh_lib


@pytest.fixture
def gpu(monkeypatch):
  monkeypatch.setattr(logical_axes, "platform", lambda: "gpu")


def summed(rows, places, entries):
  """A loop in float64."""
  sums = np.zeros((entries, rows.shape[1]))
  for row, place in zip(np.asarray(rows, np.float64), places, strict=True):
    if 0 <= place < entries:
      sums[place] += row
  return sums


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("rows", "entries", "often"), [
    (1, 5, 0.0), (7, 3, 0.0), (lookup.CHUNK, 9, 0.0), (lookup.CHUNK + 1, 1, 0.0), (1000, 5000, 0.0), (1000, 30, 0.0),
    (1000, 30, 0.7), (4 * lookup.CHUNK, 40, 0.5), (1000, 30, 1.0)])
def test_rows_are_added_up_as_by_a_loop(rows, entries, often, dtype):
  """Runs within a chunk, on its border, and over several; entries that are read often, or never; rows that count
  nowhere."""
  rng = np.random.default_rng(rows + entries)
  places = rng.integers(0, entries + 2, rows)
  places = np.where(rng.random(rows) < often, 1 % entries, places).astype(np.int32)
  g = jnp.asarray(rng.normal(size=(rows, 6)), dtype)
  found = jax.jit(lookup.add_rows, static_argnums=2)(g, places, entries)
  assert found.dtype == jnp.float32 and found.shape == (entries, 6)
  expected = summed(g, places, entries)
  np.testing.assert_allclose(found, expected, rtol=0, atol=3e-7 * np.sqrt(rows) * max(1.0, np.abs(expected).max()))
  assert not found[~np.isin(np.arange(entries), places)].any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("first", "size"), [(0, None), (20, 60)])
def test_on_gpu_reading_and_its_gradient_are_those_that_autodiff_makes(first, size, dtype, monkeypatch):
  """A whole table, and a part of one; with ids of other parts, ids beyond the table, and padding."""
  rng = np.random.default_rng(0)
  table = jnp.asarray(rng.normal(size=(30, 4)), jnp.float32)
  ids = rng.integers(-1, 35 if size is None else 70, (5, 90))
  ids[:, 40:] = 0  # padding
  g = jnp.asarray(rng.normal(size=(5, 90, 4)), dtype)

  def both(table):
    rows, pull = jax.vjp(lambda t: lookup.read_table(t, ids, dtype, first, size), table)
    return rows, pull(g)[0]

  rows, gradient = jax.jit(both)(table)
  monkeypatch.setattr(logical_axes, "platform", lambda: "gpu")
  rows_on_gpu, gradient_on_gpu = jax.jit(lambda table: both(table))(table)
  np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (rows_on_gpu, rows)))
  assert gradient_on_gpu.dtype == jnp.float32
  whole = 30 if size is None else size
  np.testing.assert_allclose(gradient_on_gpu, summed(
      g.reshape(-1, 4), np.where((ids < 0) | (ids >= whole), -1, ids - first).reshape(-1), 30), atol=2e-5)
  np.testing.assert_allclose(gradient_on_gpu, gradient, atol=2e-5)


def test_a_table_in_bfloat16_has_its_gradient_rounded_once(gpu):
  rng = np.random.default_rng(1)
  ids, g = np.zeros(300, np.int32), jnp.asarray(rng.uniform(0.5, 1, (300, 4)), jnp.bfloat16)
  gradient = jax.vjp(lambda t: lookup.read_table(t, ids, jnp.bfloat16), jnp.zeros((2, 4), jnp.bfloat16))[1](g)[0]
  assert gradient.dtype == jnp.bfloat16
  np.testing.assert_array_equal(gradient[0], np.asarray(g, np.float64).sum(0).astype(jnp.bfloat16))


def test_on_gpu_no_gradient_is_scattered(gpu):
  """Each row of a batch by itself, as images' features are placed, too."""
  table, ids = jnp.ones((3, 40, 4)), jnp.zeros((3, 7), jnp.int32)
  step = jax.vmap(lambda t, i: jax.vjp(lambda t: lookup.read_table(t, i, jnp.float32), t)[1](jnp.ones((7, 4)))[0])
  found = [e for e in tiny.equations(jax.make_jaxpr(step)(table, ids).jaxpr) if e.primitive.name.startswith("scatter")]
  assert all(e.params["unique_indices"] for e in found)
  np.testing.assert_array_equal(step(table, ids)[:, 0], np.full((3, 4), 7))


@pytest.mark.devices(8)
@pytest.mark.parametrize("sizes", [dict(tensor=8), dict(data=2, fsdp=2, tensor=2), dict(fsdp=8)])
def test_on_gpus_that_share_a_table_the_gradient_is_that_of_a_loop(sizes, gpu):
  scope = layers.Scope(jax.random.key(0), jnp.float32, jnp.bfloat16)
  graph, params = nnx.split(tables.Embedding(scope, 64, 16, std=None))
  rng = np.random.default_rng(0)
  ids, g = rng.integers(0, 64, (8, 24)).astype(np.int32), jnp.asarray(rng.normal(size=(8, 24, 16)), jnp.bfloat16)
  ids[:, 10:] = 3
  placed = Placement(mesh_lib.make_mesh(sizes), mesh_lib.ACTIVATION_RULES)

  @jax.jit
  def gradient(params):
    with logical_axes.placed(placed):
      rows, pull = jax.vjp(lambda p: nnx.merge(graph, p)(ids), params)
      return rows, pull(g)[0]

  rows, found = gradient(params)
  np.testing.assert_array_equal(rows, params["embedding"][...].astype(jnp.bfloat16)[ids])
  np.testing.assert_allclose(found["embedding"][...], summed(g.reshape(-1, 16), ids.reshape(-1), 64), atol=2e-5)
