"""The GPU kernels of the gated delta rule, interpreted, against the recurrence in float64: numbers, gradients, which
documents meet."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from models.attention import delta_chunk, delta_gpu, delta_kernels, delta_rule
from models.attention.delta_rule import Inputs
from tests.models.attention import recurrent
from trainer.planning import gpu as plan_gpu

# Three chunks, the last one not whole; four parts of the values, taken two ways; two heads of values for each of keys.
B, T, G, H, K, V = 2, 150, 2, 4, 16, 32
# Documents that end within chunks and at their ends, of one token, over several chunks; padding at both ends.
SEGMENTS = np.array([[1] * 64 + [2] * 9 + [3] + [4] * 60 + [0] * 16,
                     [0] * 5 + [5] * 100 + [0] * 5 + [6] * 40], np.int32)


@pytest.fixture(autouse=True)
def few_values(monkeypatch):
  monkeypatch.setattr(delta_kernels, "_VALUES", 16)
  monkeypatch.setattr(delta_kernels, "_FEW", 8)


def inputs(seed=0):
  rng = np.random.default_rng(seed)
  q, k, v = (rng.normal(size=shape) for shape in ((B, T, G, K), (B, T, G, K), (B, T, H, V)))
  k[:, ::2] = k[:, :1]  # half of them alike, whose corrections depend on each other most
  return Inputs(q, k, v, -rng.exponential(0.1, (B, T, H)), rng.uniform(size=(B, T, H)))


def as_bfloat16(given):
  """Numbers that bfloat16 has."""
  return Inputs(*(np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in given[:3]), *given[3:])


def in_a_loop(q, k, v, g, beta, *state, segments):
  """The recurrence, of keys of length one."""
  q, k = (jnp.repeat(delta_rule.unit_keys(x), H // G, axis=2) for x in (q, k))
  if not state:
    return recurrent.in_a_loop(delta_rule, (B, H, K, V))(Inputs(q, k, v, g, beta), segments)
  tokens = [x.swapaxes(0, 1) for x in (q * K**-0.5, k, v, g, beta)]
  state, out = jax.lax.scan(lambda state, token: delta_rule.one_token(state, *token), state[0], tokens)
  return out.swapaxes(0, 1), state


def pulled(rule, given):
  """What `rule` gives, and the gradients of a weighted sum of it."""
  weights = np.random.default_rng(1).normal(size=(B, T, H, V)), np.random.default_rng(2).normal(size=(B, H, K, V))

  def run(*given):
    made, pull = jax.vjp(rule, *given)
    return *made, *pull(tuple(jnp.asarray(w, x.dtype) for w, x in zip(weights, made, strict=True)))

  return [np.asarray(x, np.float64) for x in jax.jit(run)(*given)]


def kernels(*given, segments=SEGMENTS):
  return delta_kernels.chunked(Inputs(*given[:5]), jnp.asarray(segments), *given[5:], interpret=True)


def compare(ours, theirs, off):
  for a, b in zip(ours, theirs, strict=True):
    assert np.abs(b).max() > 0.01
    assert np.abs(a - b).max() < off * np.abs(b).max()


def test_numbers_and_gradients_of_the_recurrence():
  """As far as a pair of bfloat16 numbers goes, 2^-16 of each product; sums are of up to 64 of them."""
  given = inputs()
  with jax.enable_x64():
    exact = pulled(functools.partial(in_a_loop, segments=SEGMENTS), [jnp.asarray(x) for x in given])
  compare(pulled(kernels, [jnp.asarray(x, jnp.float32) for x in given]), exact, 5e-5)


def test_a_text_goes_on_from_the_state_that_it_is_given():
  given = (*inputs(), np.random.default_rng(3).normal(size=(B, H, K, V)))
  with jax.enable_x64():
    exact = pulled(functools.partial(in_a_loop, segments=None), [jnp.asarray(x) for x in given])
  one = np.ones((B, T), np.int32)
  compare(pulled(functools.partial(kernels, segments=one), [jnp.asarray(x, jnp.float32) for x in given]), exact, 5e-5)


def test_bfloat16_is_rounded_in_what_leaves_alone():
  """Output and gradients of queries, keys and values by half a bfloat16 place; what stays float32 as above."""
  given = as_bfloat16(inputs())
  with jax.enable_x64():
    exact = pulled(functools.partial(in_a_loop, segments=SEGMENTS), [jnp.asarray(x) for x in given])
  typed = [jnp.asarray(x, jnp.bfloat16) for x in given[:3]] + [jnp.asarray(x, jnp.float32) for x in given[3:]]
  assert [x.dtype for x in jax.eval_shape(kernels, *typed)] == [jnp.bfloat16, jnp.float32]
  ours = pulled(kernels, typed)
  compare(ours[:1] + ours[2:5], exact[:1] + exact[2:5], 2.0**-7)
  compare([ours[1]], [exact[1]], 5e-5)


def test_no_bit_of_a_document_depends_on_another():
  run = jax.jit(lambda *given: kernels(*given)[0])
  given = inputs()
  before = np.asarray(run(*(jnp.asarray(x, jnp.float32) for x in given)))
  for changed in (0, 2, 4, 5):
    where = SEGMENTS == changed
    others = [np.where(where.reshape(B, T, *[1] * (x.ndim - 2)), 1e3 * y if i == 2 else y, x)
              for i, (x, y) in enumerate(zip(given, inputs(seed=9), strict=True))]
    after = np.asarray(run(*(jnp.asarray(x, jnp.float32) for x in others)))
    np.testing.assert_array_equal(after[~where], before[~where])
    assert changed == 0 or (after[where] != before[where]).any()
  assert not before[SEGMENTS == 0].any()


def test_equal_keys_lose_no_more_than_products_round():
  """With beta 1 and nothing that fades: the inverse is 1 and -1 beside it, of powers that reach 1e18."""
  one = np.ones((delta_chunk.CHUNK,) * 2, np.float32)
  below = jnp.asarray(np.tril(one, -1))
  expected = np.eye(len(one)) - np.eye(len(one), k=-1)
  np.testing.assert_allclose(jax.jit(delta_chunk.inverse)(below), expected, atol=2e-4)


@pytest.mark.skipif(plan_gpu.plugin() is None, reason="needs XLA for GPUs, JAX's CUDA plugin")
@pytest.mark.parametrize("kind", ["a100", "l4", "h100", "b200"])
def test_kernels_compile_for_gpus_that_are_not_here(kind, monkeypatch):
  """With far less memory than the same in XLA's hands, and no loop over chunks outside of them."""
  monkeypatch.undo()
  device = plan_gpu.devices(kind, 1, 1)[0]
  rows, length, size = 2, 1024, 128

  def shaped(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

  def compiled(rule):
    def loss(*given):
      return rule(Inputs(*given[:5]), given[5])[0].astype(jnp.float32).sum()

    keys, scalars = shaped(rows, length, 2, size), shaped(rows, length, 4, dtype=jnp.float32)
    with plan_gpu.meant([device]):
      return jax.jit(jax.grad(loss, (0, 1, 2, 3, 4))).lower(
          keys, keys, shaped(rows, length, 4, size), scalars, scalars, shaped(rows, length, dtype=jnp.int32)).compile()

  ours = compiled(delta_kernels.chunked)
  theirs = compiled(lambda inputs, ids: delta_gpu.chunked("blocked", inputs, ids, delta_rule.CHUNK, None))
  assert ours.as_text().count('custom_call_target="__gpu$xla.gpu.triton"') == 4  # the output alone is not asked for
  assert " while(" not in ours.as_text()
  assert ours.memory_analysis().temp_size_in_bytes < 0.7 * theirs.memory_analysis().temp_size_in_bytes
