"""Mamba 2's recurrence: in chunks as token by token, documents apart, padding nothing, gradients included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import state_space
from tests.models.attention import recurrent

B, T, G, H, N, P = 2, 37, 2, 4, 5, 3
# Documents that end within chunks and at their ends, of one token, over several chunks, with padding between and after.
SEGMENTS = np.array([[1] * 8 + [2] * 1 + [3] * 20 + [0] * 3 + [4] * 5, [7] * 16 + [2] * 14 + [0] * 7], np.int32)


def inputs(dtype=np.float64, seed=0):
  rng = np.random.default_rng(seed)
  (c, b), x = rng.normal(size=(2, B, T, G, N)), rng.normal(size=(B, T, H, P))
  dt = rng.exponential(0.5, (B, T, H))
  return state_space.Inputs(*(part.astype(dtype) for part in (c, b, x, -dt * rng.exponential(1.0, H), dt)))


def by_hand(c, b, x, g, dt, segments):
  """In float64, with no state: each token of a document reads all before it, faded by what lies between them."""
  out, states = np.zeros(x.shape), np.zeros((B, H, N, P))
  for row, head in np.ndindex(B, H):
    group = head // (H // G)
    real = np.flatnonzero(segments[row])
    for t in real:
      for s in real[(real <= t) & (segments[row, real] == segments[row, t])]:
        kept = np.exp(g[row, s + 1:t + 1, head].sum())
        out[row, t, head] += (c[row, t, group] @ b[row, s, group]) * kept * dt[row, s, head] * x[row, s, head]
    for s in real[segments[row, real] == segments[row, real[-1]]]:
      kept = np.exp(g[row, s + 1:real[-1] + 1, head].sum())
      states[row, head] += kept * dt[row, s, head] * np.outer(b[row, s, group], x[row, s, head])
  return out, states


def scans():
  return {"recurrent": recurrent.in_a_loop(state_space, (B, H, N, P)),
          **{f"chunks of {size}": functools.partial(state_space.chunked, chunk=size) for size in (1, 8, 64)}}


@pytest.mark.parametrize("name", scans())
def test_equals_the_sum_by_hand(name):
  given = inputs()
  with jax.enable_x64():
    found = jax.jit(scans()[name])(given, SEGMENTS)
    for ours, theirs in zip(found, by_hand(*given, SEGMENTS), strict=True):
      assert ours.dtype == np.float64
      np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


def test_chunks_have_the_gradients_of_the_recurrence():
  given = inputs()
  weights = np.random.default_rng(1).normal(size=(B, T, H, P)), np.random.default_rng(2).normal(size=(B, H, N, P))

  def total(scan, given):
    return sum(jnp.sum(w * part) for w, part in zip(weights, scan(given, SEGMENTS), strict=True))

  with jax.enable_x64():
    by_token, in_chunks = (jax.jit(jax.grad(functools.partial(total, scan)))(given)
                           for scan in (scans()["recurrent"], functools.partial(state_space.chunked, chunk=8)))
    for ours, theirs in zip(in_chunks, by_token, strict=True):
      assert np.abs(theirs).max() > 0.1
      np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)


def test_gradients_are_differences_of_the_sum_by_hand():
  given, weights = inputs(), np.random.default_rng(1).normal(size=(B, T, H, P))
  with jax.enable_x64():
    gradients = jax.jit(jax.grad(lambda given: jnp.sum(weights * state_space.chunked(given, SEGMENTS, 8)[0])))(given)
  for i, gradient in enumerate(gradients):
    along, step = np.random.default_rng(3).normal(size=gradient.shape), 1e-5
    ahead, behind = (np.sum(weights * by_hand(*given[:i], given[i] + sign * step * along, *given[i + 1:], SEGMENTS)[0])
                     for sign in (1, -1))
    assert (ahead - behind) / (2 * step) == pytest.approx(np.sum(np.asarray(gradient) * along), rel=1e-6)


@pytest.mark.parametrize("name", ["recurrent", "chunks of 8"])
def test_no_bit_of_a_document_depends_on_another(name):
  scan, given = jax.jit(scans()[name]), inputs(np.float32)
  before = np.asarray(scan(given, SEGMENTS)[0])
  for changed in (0, 2, 3, 7):
    where = SEGMENTS == changed
    c, b, x, g, dt = (np.where(where.reshape(B, T, *[1] * (part.ndim - 2)), other, part)
                      for part, other in zip(given, inputs(np.float32, seed=9), strict=True))
    x = x * np.where(where, 1e3, 1)[..., None, None].astype(np.float32)
    after = np.asarray(scan(state_space.Inputs(c, b, x, g, dt), SEGMENTS)[0])
    np.testing.assert_array_equal(after[~where], before[~where])
    assert changed == 0 or (after[where] != before[where]).any()
  assert not before[SEGMENTS == 0].any()


def test_nothing_sees_what_comes_later():
  given, at = inputs(np.float32), 12
  segments = np.ones((B, T), np.int32)
  gradients = jax.jit(jax.grad(lambda given: jnp.sum(state_space.chunked(given, segments, 8)[0][:, at])))(given)
  for gradient in gradients:
    assert not np.asarray(gradient[:, at + 1:]).any()
  assert all(np.abs(gradients[i][:, 1:at]).max() > 1e-4 for i in (1, 2, 3, 4))


def test_what_follows_a_token_that_forgets_all_keeps_its_digits():
  """In float32 a sum of 600 has 5 digits behind the point; what lies between two tokens after it needs more."""
  c, b, x, g, dt = inputs(np.float32)
  g = np.where(np.arange(T)[:, None] % 8 == 1, np.float32(-603.3), g * np.float32(0.1))
  expected, _ = by_hand(*(part.astype(np.float64) for part in (c, b, x, g, dt)), SEGMENTS)
  out, _ = jax.jit(functools.partial(state_space.chunked, chunk=32))(state_space.Inputs(c, b, x, g, dt), SEGMENTS)
  np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_strong_decay_and_long_rows_stay_finite():
  c, b, x, g, dt = (np.tile(part, (1, 8, *[1] * (part.ndim - 2))) for part in inputs(np.float32))
  segments, g = np.ones(g.shape[:2], np.int32), g * 1000

  def total(x, g):
    return jnp.sum(state_space.chunked(state_space.Inputs(c, b, x, g, dt), segments)[0] ** 2)

  loss = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))
  assert all(np.isfinite(part).all() for part in jax.tree.leaves(loss(x, g)))
