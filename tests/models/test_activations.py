"""Activations against plain numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import activations


def test_activations():
  x = np.linspace(-3, 3, 13, dtype=np.float32)
  tanh_gelu = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
  np.testing.assert_allclose(activations.GATED["swiglu"](x), x / (1 + np.exp(-x)), atol=1e-6)
  np.testing.assert_allclose(activations.GATED["geglu"](x), tanh_gelu, atol=1e-6)
  np.testing.assert_allclose(activations.UNGATED["gelu"](x), tanh_gelu, atol=1e-6)
  np.testing.assert_allclose(
      activations.UNGATED["gelu_exact"](x), x * jax.scipy.stats.norm.cdf(x), atol=1e-6
  )
  np.testing.assert_allclose(activations.GATED["geglu_exact"](x), x * jax.scipy.stats.norm.cdf(x), atol=1e-6)
  np.testing.assert_allclose(activations.UNGATED["relu"](x), np.maximum(x, 0), atol=1e-6)
  np.testing.assert_allclose(activations.UNGATED["silu"](x), x / (1 + np.exp(-x)), atol=1e-6)
  np.testing.assert_allclose(activations.UNGATED["relu2"](x), np.maximum(x, 0) ** 2, atol=1e-6)


@pytest.mark.parametrize("activation", (*activations.GATED, *activations.UNGATED))
def test_an_activation_is_rounded_once_and_needs_its_inputs_alone_backward(activation):
  gated = activation in activations.GATED
  inputs = [jax.random.normal(jax.random.key(i), (3, 8)).astype(jnp.bfloat16) for i in range(1 + gated)]
  g = jax.random.normal(jax.random.key(2), (3, 8)).astype(jnp.bfloat16)

  def plain(up, gate=None):
    return activations.UNGATED[activation](up) if gate is None else activations.GATED[activation](gate) * (up + offset)

  offset = float(activation == "clamped_swiglu")

  single = [x.astype(jnp.float32) for x in inputs]
  expected, backward = jax.vjp(plain, *single)
  found, vjp = jax.vjp(functools.partial(activations.activate, activation), *inputs)
  assert found.dtype == jnp.bfloat16
  for a, b in zip((found, *vjp(g)), (expected, *backward(g.astype(jnp.float32))), strict=True):
    np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=2.0**-8, atol=1e-6)
  kept = [x for x in jax.tree.leaves(vjp) if x.size > 1]
  assert len(kept) == len(inputs) and all(x.dtype == jnp.bfloat16 for x in kept)


def test_gates_count_beyond_the_cutoff_of_a_normal_distribution():
  """About the share of normally distributed gates is 0; the gradient goes through mean and deviation, too."""
  gate = jax.random.normal(jax.random.key(0), (2, 4096)) * 3.0 + 1.0
  found = activations.sparse_gates(gate, 0.95)
  assert abs(float((found == 0).mean()) - 0.95) < 0.01
  rows = np.asarray(gate, np.float64)
  cutoff = rows.mean(-1, keepdims=True) + rows.std(-1, keepdims=True) * 1.6448536269514722
  np.testing.assert_allclose(found, np.maximum(rows - cutoff, 0), atol=1e-5)
  # What is added to all gates changes nothing, and a factor on all is one on what they give.
  pull = jax.grad(lambda g: (activations.sparse_gates(g, 0.95) ** 2).sum())(gate)
  np.testing.assert_allclose(pull.sum(-1), 0, atol=1e-2)
  np.testing.assert_allclose((pull * gate).sum(-1), 2 * (found**2).sum(-1), rtol=1e-3)
  flat = jax.grad(lambda g: activations.sparse_gates(g, 0.5).sum())(jnp.ones((1, 8)))
  assert np.isfinite(flat).all()


def test_clamped_swiglu_is_cut_at_seven():
  """Gates above 7 and ups beyond ±7 are as 7, and have no slope; gates far below are not cut."""
  up, gate = jnp.array([-8.0, -2.0, 0.5, 9.0, 3.0]), jnp.array([3.0, 8.0, -9.0, 1.0, 0.7])
  cut_up, cut_gate = np.array([-7, -2, 0.5, 7, 3]), np.array([3, 7, -9, 1, 0.7])
  found, pull = jax.vjp(functools.partial(activations.activate, "clamped_swiglu"), up, gate)
  np.testing.assert_allclose(found, (cut_up + 1) * cut_gate / (1 + np.exp(-1.702 * cut_gate)), rtol=1e-6)
  of_up, of_gate = pull(jnp.ones(5))
  assert (np.asarray(of_up) == 0).tolist() == [True, False, False, True, False]
  assert (np.asarray(of_gate) == 0).tolist() == [False, True, False, False, False]
