"""The TPU kernel, interpreted, against the blocked implementation: numbers, gradients, isolation, rows in parts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from models.attention import tpu as attention_tpu
from models.attention.mask import QKV, Rule
from tests.models.attention.common import attention
from tests.models.common import assert_isolated, value_and_gradients

# Three blocks of 128 a row. Documents that end within, at and after blocks, one of one token, padding at both ends.
B, T, H, G, K = 2, 384, 4, 2, 16
SEGMENTS = np.array([[1] * 100 + [2] * 156 + [3] + [4] * 90 + [0] * 37, [0] * 140 + [1] * 244], np.int32)
# Both in float32; sums run in different orders over up to 384 numbers of size 1.
CLOSE = dict(atol=5e-6, rtol=1e-5)


def inputs(dtype=jnp.float32, length=T, head=K, heads=H):
  keys = jax.random.split(jax.random.key(0), 4)
  shapes = [(B, length, heads, head), (B, length, G, head), (B, length, G, head), (B, length, heads, head)]
  return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


def kernel(q, k, v, segment_ids=SEGMENTS, **options):
  return attention_tpu.attend(Rule(0.3, **options), QKV(q, k, v), jnp.asarray(segment_ids), interpret=True)


blocked = functools.partial(attention, segment_ids=jnp.asarray(SEGMENTS), scale=0.3, impl="blocked")


@pytest.mark.parametrize("window,cap,head", [(None, None, 16), (130, 0.7, 40), (None, None, 512)])
def test_equals_the_blocked_implementation(window, cap, head):
  q, k, v, cotangent = inputs(head=head)
  q, cotangent = (x * (16 / head) ** 0.5 for x in (q, cotangent))  # so that rounding is of one size
  options = dict(window=window, logit_cap=cap)
  ours = value_and_gradients(functools.partial(kernel, **options), q, k, v, cotangent)
  theirs = value_and_gradients(functools.partial(blocked, **options), q, k, v, cotangent)
  for a, b in zip(ours, theirs, strict=True):
    np.testing.assert_allclose(a, b, **CLOSE)
  for part in ours:
    assert not np.asarray(part)[SEGMENTS == 0].any()


def test_bfloat16_keeps_its_dtype_and_is_close():
  """To the blocked implementation in float32, by as much as rounding inputs and output to 8 bits makes."""
  out = jax.jit(kernel)(*inputs(jnp.bfloat16)[:3])
  assert out.dtype == jnp.bfloat16
  np.testing.assert_allclose(out.astype(jnp.float32), blocked(*inputs()[:3]), atol=0.04)


def test_documents_are_isolated_bit_for_bit():
  assert_isolated(kernel, *inputs()[:3], SEGMENTS)


def test_rows_of_padding_give_zeros():
  q, k, v, cotangent = inputs()
  empty = functools.partial(kernel, segment_ids=jnp.zeros((B, T), jnp.int32))
  assert all(not np.asarray(part).any() for part in value_and_gradients(empty, q, k, v, cotangent))


# Parts of 256 on four devices: all of the row, a window that reaches into the part before, one that reaches beyond it.
@pytest.mark.devices(8)
@pytest.mark.parametrize("window", [None, 130, 301])
def test_rows_in_parts_equal_whole_rows(window):
  C, length = 4, 1024
  q, k, v, cotangent = inputs(length=length, heads=G)
  segments = np.sort(np.random.default_rng(0).integers(1, 6, (B, length)).astype(np.int32))
  segments[1, -350:] = 0
  rule = Rule(0.3, window=window, logit_cap=2.0)
  mesh = jax.make_mesh((C,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:C])
  spec = PartitionSpec(None, "context")

  def local(q, k, v, segments):
    return attention_tpu.attend_in_parts(rule, QKV(q, k, v), segments, "context", C, interpret=True)

  def ours(q, k, v):
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec, check_vma=False)
    return mapped(q, k, v, jnp.asarray(segments))

  theirs = functools.partial(attention, segment_ids=jnp.asarray(segments), impl="blocked", **rule._asdict())
  for a, b in zip(value_and_gradients(ours, q, k, v, cotangent), value_and_gradients(theirs, q, k, v, cotangent),
                  strict=True):
    np.testing.assert_allclose(a, b, **CLOSE)


@pytest.mark.devices(8)
def test_work_of_a_causal_row_is_shared_evenly():
  """Every part of the row visits as many blocks as every other."""
  C, length = 4, 2048
  q, k, v, _ = inputs(length=length)
  visited = []

  def count(kernel, parts, index):
    info = kernel.fwd_mask_info.block_mask
    visited.extend(int((part > 0).sum()) for part in np.split(info, parts, axis=1))
    return attention_tpu_part_of(kernel, parts, index)

  attention_tpu_part_of = attention_tpu._part_of
  mesh = jax.make_mesh((C,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:C])
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(attention_tpu, "_part_of", count)
    spec = PartitionSpec(None, "context")
    jax.eval_shape(jax.shard_map(lambda q, k, v, s: attention_tpu.attend_in_parts(
        Rule(0.3), QKV(q, k, v), s, "context", C, interpret=True), mesh=mesh, in_specs=(spec,) * 4,
                                 out_specs=spec, check_vma=False), q, k, v, jnp.ones((B, length), jnp.int32))
  assert len(visited) == C and len(set(visited)) == 1
  blocks = 2 * C
  assert sum(visited) < 0.7 * blocks * blocks


def test_refusals_name_the_reason():
  assert attention_tpu.refusal(384, False) is None
  assert attention_tpu.refusal(200, False) == "rows of 200 tokens: no multiple of 128"
  assert attention_tpu.refusal(384, False, C=4) == "rows in 4 parts of 384 tokens each: no multiple of 256"
  assert "both ways" in attention_tpu.refusal(384, True)
  assert "share" in attention_tpu.refusal(384, False, prompts=True)
