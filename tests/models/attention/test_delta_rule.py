"""The gated delta rule: in chunks as token by token, documents apart, padding nothing, gradients included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import delta_rule, short_conv
from tests.models.attention import recurrent

B, T, H, K, V = 2, 37, 2, 4, 6
# Documents that end within chunks and at their ends, of one token, over several chunks, with padding between and after.
SEGMENTS = np.array([[1] * 8 + [2] * 1 + [3] * 20 + [0] * 3 + [4] * 5, [7] * 16 + [2] * 14 + [0] * 7], np.int32)


def inputs(dtype=np.float64, seed=0):
  rng = np.random.default_rng(seed)
  q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in rng.normal(size=(2, B, T, H, K)))
  v, g, beta = rng.normal(size=(B, T, H, V)), -rng.exponential(0.3, (B, T, H)), rng.uniform(size=(B, T, H))
  return delta_rule.Inputs(*(x.astype(dtype) for x in (q, k, v, g, beta)))


def by_hand(q, k, v, g, beta, segments):
  """In float64, one token of one row and head after another."""
  out, states = np.zeros(v.shape), np.zeros((B, H, K, V))
  for row, head in np.ndindex(B, H):
    state, before = np.zeros((K, V)), 0
    for t in np.flatnonzero(segments[row]):
      if segments[row, t] != before:
        state, before = np.zeros((K, V)), segments[row, t]
      key = k[row, t, head]
      state = np.exp(g[row, t, head]) * (np.eye(K) - beta[row, t, head] * np.outer(key, key)) @ state
      state += beta[row, t, head] * np.outer(key, v[row, t, head])
      out[row, t, head] = q[row, t, head] @ state / np.sqrt(K)
    states[row, head] = state
  return out, states


def rules():
  return {"recurrent": recurrent.in_a_loop(delta_rule, (B, H, K, V)),
          **{f"chunks of {c}": functools.partial(delta_rule.chunked, chunk=c) for c in (1, 8, 64)}}


@pytest.mark.parametrize("name", rules())
def test_equals_the_sum_by_hand(name):
  given = inputs()
  with jax.enable_x64():
    found = jax.jit(rules()[name])(given, SEGMENTS)
    for ours, theirs in zip(found, by_hand(*given, SEGMENTS), strict=True):
      assert ours.dtype == np.float64
      np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


def test_chunks_have_the_gradients_of_the_recurrence():
  given = inputs()
  weights = np.random.default_rng(1).normal(size=(B, T, H, V)), np.random.default_rng(2).normal(size=(B, H, K, V))

  def total(rule, given):
    return sum(jnp.sum(w * x) for w, x in zip(weights, rule(given, SEGMENTS), strict=True))

  with jax.enable_x64():
    by_token, in_chunks = (jax.jit(jax.grad(functools.partial(total, rule)))(given)
                           for rule in (rules()["recurrent"], functools.partial(delta_rule.chunked, chunk=8)))
    for ours, theirs in zip(in_chunks, by_token, strict=True):
      assert np.abs(theirs).max() > 0.1
      np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["recurrent", "chunks of 8"])
def test_no_bit_of_a_document_depends_on_another(name):
  rule, given = jax.jit(rules()[name]), inputs(np.float32)
  before = np.asarray(rule(given, SEGMENTS)[0])
  for changed in (0, 2, 3):
    where = SEGMENTS == changed
    q, k, v, g, beta = (np.where(where.reshape(B, T, *[1] * (x.ndim - 2)), y, x)
                        for x, y in zip(given, inputs(np.float32, seed=9), strict=True))
    v = v * np.where(where, 1e3, 1)[..., None, None].astype(np.float32)
    after = np.asarray(rule(delta_rule.Inputs(q, k, v, g, beta), SEGMENTS)[0])
    np.testing.assert_array_equal(after[~where], before[~where])
    assert changed == 0 or (after[where] != before[where]).any()
  assert not before[SEGMENTS == 0].any()


def test_strong_decay_and_long_rows_stay_finite():
  q, k, v, g, beta = (np.tile(x, (1, 8, *[1] * (x.ndim - 2))) for x in inputs(np.float32))
  segments, g = np.ones(g.shape[:2], np.int32), g * 100

  def total(v, g):
    return jnp.sum(delta_rule.chunked(delta_rule.Inputs(q, k, v, g, beta), segments)[0] ** 2)

  loss = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(loss(v, g)))


def test_keys_that_are_alike_lose_no_digits():
  """Equal keys with beta 1 make the triangular system as ill as it gets: its powers reach 1e18."""
  q, k, v, g, beta = inputs(np.float32)
  k, g, beta = np.broadcast_to(k[:, :1], k.shape), np.zeros_like(g), np.ones_like(beta)
  out, _ = jax.jit(delta_rule.chunked)(delta_rule.Inputs(q, k, v, g, beta), SEGMENTS)
  np.testing.assert_allclose(out, by_hand(*(x.astype(np.float64) for x in (q, k, v, g, beta)), SEGMENTS)[0], atol=2e-6)


@pytest.mark.parametrize("size", [1, 3, 8, 13, 64])
def test_triangular_systems_are_solved(size):
  """Also backward: x = A⁻¹ b, db = A⁻ᵀ dx, dA = -db xᵀ."""
  rng = np.random.default_rng(size)
  system, right, away = (rng.normal(size=(2, 3, size, n)) for n in (size, 5, 5))
  system = np.tril(system, -1) * 0.3 + np.eye(size)
  solution = np.linalg.solve(system, right)
  of_right = np.linalg.solve(np.swapaxes(system, -1, -2), away)
  of_system = np.tril(-of_right @ np.swapaxes(solution, -1, -2), -1)
  with jax.enable_x64():
    found, back = jax.vjp(jax.jit(delta_rule._solved), system, right)
    for a, b in zip((found, *back(away)), (solution, of_system, of_right), strict=True):
      np.testing.assert_allclose(np.tril(a, -1) if a.shape == system.shape else a, b, rtol=1e-9, atol=1e-9)


def test_nothing_of_it_is_a_library_call():
  """On CPU, LAPACK's solver for several systems waits in a thread of XLA's for others: a step with two of them on two
  processors waited for ever."""
  args = (inputs(np.float32), SEGMENTS)
  gradient = jax.jit(jax.grad(lambda *args: jnp.sum(delta_rule.chunked(*args)[0] ** 2), argnums=0))
  assert "custom-call" not in gradient.lower(*args).compile().as_text()


def test_convolution_sees_its_own_document():
  rng = np.random.default_rng(0)
  x, taps = rng.normal(size=(B, T, 3)), rng.normal(size=(4, 3))
  expected = np.zeros(x.shape)
  for row, t in np.ndindex(B, T):
    y = sum(taps[3 - back] * x[row, t - back] for back in range(4)
            if t >= back and SEGMENTS[row, t - back] == SEGMENTS[row, t])
    expected[row, t] = y / (1 + np.exp(-y))
  with jax.enable_x64():
    np.testing.assert_allclose(short_conv.short_convolution(x, taps, SEGMENTS), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("segments, expected", [
    ([1, 1, 1, 1, 1], [2, 3, 4]), ([1, 1, 1, 0, 0], [0, 1, 2]), ([0, 0, 0, 1, 1], [None, 3, 4]),
    ([1, 1, 1, 2, 0], [None, None, 3]), ([0, 0, 0, 0, 0], [None] * 3),
])
def test_last_inputs(segments, expected):
  x = np.arange(1.0, 6.0, dtype=np.float32)[None, :, None]
  found = short_conv.last_inputs(x, np.array([segments], np.int32), 3)[0, :, 0]
  np.testing.assert_array_equal(found, [0 if at is None else at + 1 for at in expected])
