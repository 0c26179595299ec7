"""The GPU kernels, interpreted, against models/attention/blocked.py: numbers, gradients, isolation, which tiles are
visited.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from models.attention import gpu as attention_gpu
from models.attention import gpu_kernels as flash_gpu
from models.attention import mask
from models.attention.gpu_kernels import Sizes
from models.attention.mask import QKV, Rule, Side
from tests.models.attention.common import attention
from tests.models.common import assert_isolated, value_and_gradients
from trainer.planning import gpu as plan_gpu

# Rows of several tiles. Documents that end within, at and after tiles, one of one token, padding at both ends.
B, T, H, G, K = 2, 300, 4, 2, 16
SEGMENTS = np.array([[1] * 64 + [2] * 108 + [3] + [4] * 90 + [0] * 37, [0] * 40 + [1] * 260], np.int32)
# Tokens that see each other both ways, across tiles and documents; and the documents that documents 3 and 4 see.
BLOCKS = np.zeros((B, T), np.int32)
BLOCKS[0, 70:150], BLOCKS[0, 180:200], BLOCKS[1, 30:170] = 1, 2, 1
PROMPTS = np.where(SEGMENTS == 4, 2, np.where(SEGMENTS == 3, 1, 0)).astype(np.int32)
PROMPTS[1] = 0
RULE = Rule(0.3)
# Both in float32; sums run in different orders over up to 300 numbers of size 1.
CLOSE = dict(atol=5e-6, rtol=1e-5)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
  """Of several sizes, so that rows have many."""
  tiles = flash_gpu.Tiles(Sizes(64, 32, 4, 1), Sizes(32, 64, 4, 1), Sizes(64, 64, 4, 1))
  monkeypatch.setattr(flash_gpu, "TILES", {16: (tiles, tiles)})


def inputs(dtype=jnp.float32, head=K):
  keys = jax.random.split(jax.random.key(0), 4)
  shapes = [(B, T, H, head), (B, T, G, head), (B, T, G, head), (B, T, H, head)]
  return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


def kernels(q, k, v, rule=RULE, segments=SEGMENTS, blocks=None, prompts=None):
  segments, index = jnp.asarray(segments), jnp.arange(T)
  blocks, prompts = (None if x is None else jnp.asarray(x) for x in (blocks, prompts))
  return flash_gpu.attend(rule, QKV(q, k, v), Side(segments, index, blocks, prompts),
                          Side(mask.keys_of(segments), index, blocks), interpret=True)


@pytest.mark.parametrize("rule,head,ids", [
    (RULE, 16, {}),
    (Rule(0.3, 0.7, 70, False), 40, {}),
    (RULE, 16, dict(blocks=BLOCKS)),
    (Rule(0.3, window=50), 16, dict(blocks=BLOCKS)),
    (Rule(0.3, None, 50, True), 16, dict(blocks=BLOCKS)),
    (RULE, 16, dict(prompts=PROMPTS)),
])
def test_equals_the_blocked_implementation(rule, head, ids):
  q, k, v, cotangent = inputs(head=head)
  blocked = functools.partial(
      attention, segment_ids=jnp.asarray(SEGMENTS), scale=rule.scale, logit_cap=rule.logit_cap, window=rule.window,
      window_blocks=rule.window_blocks, block_ids=ids.get("blocks"), prompt_ids=ids.get("prompts"), impl="blocked")
  ours = value_and_gradients(functools.partial(kernels, rule=rule, **ids), q, k, v, cotangent)
  theirs = value_and_gradients(blocked, q, k, v, cotangent)
  for a, b in zip(ours, theirs, strict=True):
    np.testing.assert_allclose(a, b, **CLOSE)
  for part in ours:
    assert not np.asarray(part)[SEGMENTS == 0].any()


def test_bfloat16_keeps_its_dtype_and_is_close():
  """To float32, by as much as rounding inputs, weights and output to 8 bits makes."""
  out = jax.jit(kernels)(*inputs(jnp.bfloat16)[:3])
  assert out.dtype == jnp.bfloat16
  np.testing.assert_allclose(out.astype(jnp.float32), jax.jit(kernels)(*inputs()[:3]), atol=0.04)


def test_documents_are_isolated_bit_for_bit():
  assert_isolated(functools.partial(kernels, blocks=BLOCKS), *inputs()[:3], SEGMENTS)


def test_padding_gives_zeros_whatever_arrives_there():
  """A gradient that is not a number at padding, and rows of nothing else."""
  q, k, v, cotangent = inputs()
  nan = jnp.where((SEGMENTS == 0)[:, :, None, None], jnp.nan, cotangent)
  for a, b in zip(value_and_gradients(kernels, q, k, v, nan), value_and_gradients(kernels, q, k, v, cotangent),
                  strict=True):
    np.testing.assert_array_equal(a, b)
  nothing = functools.partial(kernels, segments=np.zeros_like(SEGMENTS))
  assert all(not np.asarray(part).any() for part in value_and_gradients(nothing, q, k, v, cotangent))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("window,prompts,blocks", [(None, False, False), (60, False, False), (None, True, False),
                                                   (None, False, True), (90, False, True)])
def test_runs_leave_out_nothing_that_is_seen_and_need_no_mask_where_they_say_so(seed, window, prompts, blocks):
  rng, sizes, length = np.random.default_rng(seed), Sizes(16, 32, 4, 1), 256
  segments = np.sort(rng.integers(1, rng.integers(2, 9), (B, length))).astype(np.int32)
  segments[0, -rng.integers(1, 60):], segments[1] = 0, 1
  of_prompts = np.where(segments > 2, 1, 0) if prompts else None
  of_blocks = np.where(rng.random((B, length)) < 0.05, rng.integers(1, 4, (B, length)), 0) if blocks else None
  # Queries as in a zigzag: from the front and from the back.
  places = np.concatenate([np.arange(64), np.arange(192, 256)])
  rule = Rule(1.0, window=window)
  queries = Side(*jax.tree.map(jnp.asarray, (segments[:, places], places)),
                 *(None if x is None else jnp.asarray(x[:, places]) for x in (of_blocks, of_prompts)))
  keys = Side(mask.keys_of(jnp.asarray(segments)), jnp.arange(length),
              None if of_blocks is None else jnp.asarray(of_blocks))
  seen = np.asarray(mask.seen(rule, queries, keys, keys_first=False))
  by_tile = seen.reshape(B, len(places) // 16, 16, length // 32, 32).swapaxes(2, 3)
  whole = 0
  of_both = flash_gpu._runs(rule, queries, keys, sizes)
  for runs, seen_by_tile in zip(of_both, (by_tile, by_tile.swapaxes(1, 2)), strict=True):
    some, every = seen_by_tile.any((3, 4)), seen_by_tile.all((3, 4))
    number, (first, start, stop, end) = np.arange(some.shape[2]), np.moveaxis(np.asarray(runs), 2, 0)[..., None]
    assert ((first <= start) & (start <= stop) & (stop <= end)).all()
    assert not (some & ((number < first) | (number >= end))).any()
    unmasked = (number >= start) & (number < stop)
    assert not (unmasked & ~every).any()
    whole += unmasked.sum()
    # What is left out: most of what is not seen, where documents are contiguous.
    assert (end - first).sum() <= 2 * some.sum() + 2 * B
  assert whole  # the second row is one document


def test_a_causal_row_costs_half_and_documents_less():
  sizes, length, rule = Sizes(64, 64, 4, 1), 1024, Rule(1.0)

  def visited(segments):
    side = Side(jnp.asarray(segments), jnp.arange(length), None)
    runs, _ = flash_gpu._runs(rule, side, side._replace(segments=mask.keys_of(side.segments)), sizes)
    return int((runs[:, :, 3] - runs[:, :, 0]).sum()), int((runs[:, :, 2] - runs[:, :, 1]).sum())

  assert visited(np.ones((1, length), np.int32)) == (16 * 17 // 2, 16 * 15 // 2)  # the diagonal needs a mask
  assert visited(np.repeat([[1, 2, 3, 4]], length // 4, 1).astype(np.int32)) == (4 * 4 * 5 // 2, 4 * 4 * 3 // 2)


def test_rows_of_any_length_and_heads_of_any_size_are_taken():
  """Shorter than a tile, of one token, of heads of 3 numbers."""
  for length, head in ((1, 8), (7, 3), (33, 20)):
    q, k, v, _ = (x[:, :length] for x in inputs(head=head))
    segments = jnp.ones((B, length), jnp.int32)
    sides = Side(segments, jnp.arange(length), None), Side(segments, jnp.arange(length), None)
    ours = flash_gpu.attend(RULE, QKV(q, k, v), *sides, interpret=True)
    np.testing.assert_allclose(ours, attention(q, k, v, segment_ids=segments, scale=0.3, impl="blocked"), **CLOSE)


@pytest.mark.parametrize("head, shared", [
    (16, flash_gpu.SHARED_BYTES), (128, flash_gpu.LARGE), (256, flash_gpu.SHARED_BYTES), *(
        pytest.param(*values, marks=pytest.mark.slow) for values in (
            (16, flash_gpu.LARGE), (128, flash_gpu.SHARED_BYTES), (256, flash_gpu.LARGE)))])
def test_the_tiles_of_every_head_size_and_chip_give_the_same_numbers(head, shared, monkeypatch):
  monkeypatch.undo()
  attend = functools.partial(attention_gpu.on(jax.devices()[0]), shared_bytes=shared)
  assert attention_gpu.error(attend, Rule(0.1), K=head, dtype=jnp.float32) < 1e-5


@pytest.mark.skipif(plan_gpu.plugin() is None, reason="needs XLA for GPUs, JAX's CUDA plugin")
@pytest.mark.parametrize("kind,head", [("a100", 64), ("l4", 128), ("h100", 128), ("b200", 128), ("h100", 256)])
def test_kernels_compile_for_gpus_that_are_not_here(kind, head, monkeypatch):
  """In the memory that a tile's warps share there; no array is as large as the scores."""
  monkeypatch.undo()
  device = plan_gpu.devices(kind, 1, 1)[0]
  sharding = SingleDeviceSharding(device)
  attend = attention_gpu.on(device)
  length = 1024

  def loss(q, k, v, segments):
    index = jnp.arange(length)
    out = attend(RULE, QKV(q, k, v), Side(segments, index, None), Side(mask.keys_of(segments), index, None))
    return out.astype(jnp.float32).sum()

  def shaped(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  kv = shaped(1, length, 2, head)
  with plan_gpu.meant([device]):
    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(
        shaped(1, length, 8, head), kv, kv, shaped(1, length, dtype=jnp.int32)).compile()
  assert compiled.as_text().count('custom_call_target="__gpu$xla.gpu.triton"') == 3
  assert compiled.memory_analysis().temp_size_in_bytes < 8 * length * length
