"""Attention on rows whose length is split over devices: the values and gradients of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import mask, ring
from tests.models.attention.common import attention
from tests.pairwise import covering
from trainer.distributed import mesh as mesh_lib

pytestmark = pytest.mark.devices(8)

B, T, H, G, K = 2, 32, 4, 2, 8
RNG = np.random.default_rng(0)
Q, KEYS, VALUES = (jnp.asarray(RNG.normal(size=(B, T, heads, K)), jnp.float32) for heads in (H, G, G))
WEIGHTS = jnp.asarray(RNG.normal(size=(B, T, H, K)), jnp.float32)
# Documents that begin and end anywhere, within a part and across several; padding in between and at the end.
SEGMENTS = jnp.asarray([[1] * 5 + [2] * 17 + [3] * 7 + [0] * 3, [1] * 9 + [0] * 2 + [2] * 21], jnp.int32)
BLOCKS = jnp.asarray([[0] * 6 + [1] * 9 + [0] * 17, [2] * 8 + [0] * 4 + [1] * 10 + [0] * 10], jnp.int32)
KINDS = {
    "causal": dict(), "cap": dict(logit_cap=2.0), "window": dict(window=3), "window of a part and one": dict(window=5),
    "long window": dict(window=14), "blocks": dict(block_ids=BLOCKS),
    "bounded blocks": dict(block_ids=BLOCKS, window=6, window_blocks=True),
    "prompts": dict(prompt_ids=jnp.where(SEGMENTS == 2, 1, 0)),
}
MESHES = {"context": dict(data=1, context=8), "context and data": dict(data=2, context=4),
          "context and tensor": dict(data=1, context=2, tensor=4), "three": dict(data=2, context=2, tensor=2)}


def value_and_gradients(**options):
  def loss(q, k, v):
    out = attention(q, k, v, segment_ids=SEGMENTS, scale=K**-0.5, block=4, **options)
    return jnp.sum(out * WEIGHTS), out

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


@functools.cache
def one_device(kind):
  (_, out), gradients = value_and_gradients(**KINDS[kind])(Q, KEYS, VALUES)
  return out, gradients


@pytest.mark.parametrize("name, kind", [
    *covering(["context"], KINDS), *covering([name for name in MESHES if name != "context"], KINDS, strength=1)])
def test_a_split_length_computes_the_same(name, kind):
  out, gradients = one_device(kind)
  with mesh_lib.activation_rules(mesh_lib.make_mesh(MESHES[name])):
    (_, actual), actual_gradients = value_and_gradients(**KINDS[kind])(Q, KEYS, VALUES)
  np.testing.assert_allclose(actual, out, atol=2e-6)
  for a, b in zip(actual_gradients, gradients, strict=True):
    np.testing.assert_allclose(a, b, atol=5e-6)


@pytest.mark.parametrize("kind", ["causal", "window", "prompts"])
def test_sinks_of_a_split_length_are_those_of_one_device(kind):
  """Round the ring, of neighbours, and of all keys gathered; heads are split, too."""
  sinks = jnp.array([-3.0, 0.5, 1.0, 2.0])

  def loss(q, k, v, sinks):
    out = attention(q, k, v, segment_ids=SEGMENTS, scale=K**-0.5, block=4, sinks_H=sinks, **KINDS[kind])
    return jnp.sum(out * WEIGHTS)

  run = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))
  value, gradients = jax.jit(run)(Q, KEYS, VALUES, sinks)
  with mesh_lib.activation_rules(mesh_lib.make_mesh(MESHES["three"])):
    actual, actual_gradients = jax.jit(lambda *given: run(*given))(Q, KEYS, VALUES, sinks)
  np.testing.assert_allclose(actual, value, rtol=1e-5)
  for a, b in zip(actual_gradients, gradients, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("kind", ["causal", "window"])
def test_other_documents_do_not_change_a_bit(kind):
  mine = (SEGMENTS == 2)[..., None, None]
  with mesh_lib.activation_rules(mesh_lib.make_mesh(MESHES["context and data"])):
    run = value_and_gradients(**KINDS[kind])
    (_, out), (_, dk, _) = run(Q, KEYS, VALUES)
    (_, other), _ = run(*(jnp.where(mine, x, 7.0 * x + 1.0) for x in (Q, KEYS, VALUES)))
  np.testing.assert_array_equal(jnp.where(mine, out, 0), jnp.where(mine, other, 0))
  assert np.any(out != other)
  padding = np.asarray(SEGMENTS == 0)
  assert not np.any(np.asarray(out)[padding]) and not np.any(np.asarray(dk)[padding])


@pytest.mark.parametrize("kind", ["causal", "window"])
def test_the_future_has_no_gradient(kind):
  """Causality by gradient, across parts; nor has the row's end, which comes round to the first part."""
  segments = jnp.ones((1, T), jnp.int32)
  places = np.array([1, 13])

  def read(v):
    return jnp.sum(attention(Q[:1], KEYS[:1], v, segment_ids=segments, scale=K**-0.5, block=4,
                             **KINDS[kind])[:, places])

  with mesh_lib.activation_rules(mesh_lib.make_mesh(MESHES["context"])):
    seen = np.abs(jax.jit(jax.grad(read))(VALUES[:1])).sum((0, 2, 3)) > 0
  before = places[:, None] - np.arange(T)
  np.testing.assert_array_equal(seen, ((before >= 0) & (before < KINDS[kind].get("window", T))).any(axis=0))


@pytest.mark.parametrize("kind, kept, unused", [("causal", "collective-permute", "all-gather"),
                                                ("window", "collective-permute", "all-gather"),
                                                ("blocks", "all-gather", "collective-permute")])
def test_keys_travel_as_they_should(kind, kept, unused):
  """By rings and neighbours nothing is gathered."""
  mesh = mesh_lib.make_mesh(MESHES["context"])
  split = jax.NamedSharding(mesh, jax.P(None, "context"))
  with mesh_lib.activation_rules(mesh):
    compiled = value_and_gradients(**KINDS[kind]).lower(
        *(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split) for x in (Q, KEYS, VALUES))).compile()
  text = compiled.as_text()
  assert f" {kept}(" in text or f" {kept}-start(" in text
  assert f" {unused}(" not in text and f" {unused}-start(" not in text


def test_scores_of_the_ring_are_made_a_few_at_a_time(monkeypatch):
  out, gradients = one_device("causal")
  monkeypatch.setattr(ring, "SCORE_BYTES", 4 * B * H * 4)
  with mesh_lib.activation_rules(mesh_lib.make_mesh(dict(data=4, context=2))):
    (_, actual), actual_gradients = value_and_gradients()(Q, KEYS, VALUES)
  np.testing.assert_allclose(actual, out, atol=2e-6)
  for a, b in zip(actual_gradients, gradients, strict=True):
    np.testing.assert_allclose(a, b, atol=5e-6)


def test_every_device_has_the_same_work():
  """Of the half products of a causal row each device does 2C + 1, of which two along the diagonal."""
  mesh = mesh_lib.make_mesh(MESHES["context"])
  with mesh_lib.activation_rules(mesh):
    jaxpr = str(jax.make_jaxpr(functools.partial(attention, segment_ids=SEGMENTS, scale=1.0))(Q, KEYS, VALUES))
  # Three products of its own and two in each of the 7 steps, each of scores and of values.
  assert jaxpr.count("dot_general[") == 2 * (3 + 2) and "length=7" in jaxpr


def test_what_is_cut_into_steps_is_joined_again():
  x = jnp.arange(2 * 6 * 3).reshape(2, 6, 3)
  cut = ring._cut(x, 1, 3)
  assert cut.shape == (3, 2, 2, 3)
  np.testing.assert_array_equal(cut[1], x[:, 2:4])
  np.testing.assert_array_equal(ring._join(cut, 1), x)


def test_chunks_of_a_cache_are_those_of_its_queries():
  """Of segment 1, with chunks of 4 of a row of 12; keys of a cache may be anywhere in a text."""
  tokens = mask.TokenIds(jnp.ones((1, 12), int))
  positions = jnp.arange(12)[None]
  np.testing.assert_array_equal(tokens.in_chunks(positions, 4).chunks, tokens.chunks_of(positions, 4))
  assert len(set(tokens.chunks_of(jnp.array([[0, 3, 4, 8, 11]]), 4)[0].tolist())) == 3
