"""Products of rows with one matrix per group, against loops, and what experts make of them."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.experts import grouped
from models.experts import moe as moe_lib
from models.sharding import logical_axes

GROUPS = {"even": [16, 16, 16, 16], "empty": [0, 24, 0, 16], "one": [0, 0, 64, 0], "none": [0, 0, 0, 0],
          "ragged": [8, 32, 8, 16], "short": [8, 8, 8, 8]}


@pytest.mark.parametrize("implementation", ["by platform", "ragged"])
@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS)
def test_grouped_matmul_equals_a_loop_over_groups(sizes, implementation, monkeypatch):
  """Both implementations, with empty groups, all rows in one, unused rows at the end (64 rows, blocks of 8)."""
  if implementation == "ragged":
    monkeypatch.setattr(grouped, "_blocked", grouped._ragged)
    monkeypatch.setattr(grouped, "_blocked_outer", grouped._ragged_outer)
  rng = np.random.default_rng(0)
  x, w, mix = (rng.normal(size=shape).astype(np.float32) for shape in ((64, 6), (4, 6, 10), (64, 10)))

  def loss(x, w):
    y = grouped.grouped_matmul(x, w, jnp.asarray(sizes, jnp.int32), 8)
    return jnp.sum(y * mix), y

  (_, y), (dx, dw) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(x, w)
  y_expected, dx_expected, dw_expected = np.zeros((64, 10)), np.zeros((64, 6)), np.zeros((4, 6, 10))
  start = 0
  for e, size in enumerate(sizes):
    rows = slice(start, start + size)
    y_expected[rows], dx_expected[rows], dw_expected[e] = x[rows] @ w[e], mix[rows] @ w[e].T, x[rows].T @ mix[rows]
    start += size
  for actual, expected in ((y, y_expected), (dx, dx_expected), (dw, dw_expected)):
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize("tokens,experts,k", [(1, 2, 1), (5, 3, 3), (300, 4, 2), (40, 64, 2), (1000, 2, 1)])
def test_every_assignment_gets_one_row_in_its_experts_blocks(tokens, experts, k):
  rng = np.random.default_rng(tokens)
  sort = jax.jit(grouped.sort_by_expert, static_argnums=1)
  for share in (0.0, 0.3, 1.0):  # of padding
    chosen = rng.permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)[:, :k]
    chosen = np.where(rng.random((tokens, 1)) < share, experts, chosen).reshape(-1)
    places, assignments, sizes, block = jax.device_get(sort(chosen, experts))
    rows, real = len(assignments), chosen < experts
    starts = np.cumsum(sizes) - sizes
    assert rows % block == 0 and np.all(sizes % block == 0) and int(np.sum(sizes)) <= rows
    assert np.all(places[~real] == rows) and np.sum(assignments < len(chosen)) == real.sum()
    for a in np.flatnonzero(real):
      place = int(places[a])
      assert int(assignments[place]) == a
      assert starts[chosen[a]] <= place < starts[chosen[a]] + np.bincount(chosen, minlength=experts)[chosen[a]]


def test_block_size_wastes_little():
  assert [grouped.block_size(*n) for n in ((1, 8), (1024, 8), (4096, 8), (4096, 32), (10**6, 8))] == [
      8, 64, 256, 64, 256]


@pytest.mark.parametrize("zeros", [True, False])
def test_nothing_comes_of_rows_without_an_assignment(zeros, monkeypatch):
  """What kernels leave beyond the groups, where nobody multiplies by it, may be NaN; what it is made of, any."""
  rng = np.random.default_rng(0)
  N, D, F, experts, k = 12, 6, 10, 4, 2
  x, mix = jnp.asarray(rng.normal(size=(N, D))), jnp.asarray(rng.normal(size=(k * N, D)))
  kernels = tuple(jnp.asarray(rng.normal(size=shape)) for shape in ((experts, D, F), (experts, D, F), (experts, F, D)))
  chosen = np.where(np.arange(N) % 3 == 0, experts, rng.permuted(np.tile(np.arange(experts), (N, 1)), axis=1)[:, :k].T)
  none = (chosen.reshape(-1) == experts)[:, None]
  product, made = grouped._grouped, []

  def unclean(x_MxK, w, sizes_E, block, transpose, dtype, clean=True):
    y_MxN = product(x_MxK, w, sizes_E, block, transpose, dtype)
    made.append(clean)
    return y_MxN if clean else jnp.where(jnp.arange(len(y_MxN))[:, None] < jnp.sum(sizes_E), y_MxN, jnp.nan)

  def outcome():
    def loss(x, kernels):
      y = moe_lib.expert_outputs(x, jnp.asarray(chosen.reshape(-1), jnp.int32), kernels, "swiglu", (None,) * 3, zeros)
      return jnp.sum(jnp.where(none, 0.0, y) * mix), y

    (_, y), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, kernels)
    return (y if zeros else jnp.where(none, 0.0, y)), gradients

  expected = outcome()
  monkeypatch.setattr(grouped, "_grouped", unclean)
  for a, b in zip(jax.tree.leaves(outcome()), jax.tree.leaves(expected), strict=True):
    np.testing.assert_array_equal(a, b)
  # Of the output's product, and of the gradients of what the first two take in.
  assert made.count(False) == 3 and made.count(True) == 3
  assert not expected[0][none[:, 0]].any() and np.isfinite(expected[0]).all() and expected[0].any()


def test_on_tpu_rows_need_no_blocks(monkeypatch):
  monkeypatch.setattr(logical_axes, "platform", lambda: "tpu")
  assert [grouped.block_size(*n) for n in ((1, 8), (1024, 8), (10**6, 8))] == [grouped.MIN_BLOCK] * 3
