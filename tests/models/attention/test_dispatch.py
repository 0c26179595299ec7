"""Attention against a loop in numpy; who sees whom, by gradient; isolation of packed documents, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import blocked, mask
from models.attention.dispatch import _spans, attend_to_past
from models.attention.mask import Rule
from models.attention.pages import Seen
from tests.models.attention.common import attention
from tests.models.common import assert_isolated
from tests.pairwise import covering

B, T, H, G, K = 2, 24, 4, 2, 8
SEGMENTS = np.array([[1] * 9 + [2] + [3] * 10 + [0] * 4, [0] * 3 + [1] * 21], np.int32)


@pytest.fixture(params=["tiles", "unrolled"])
def both_ways(request, monkeypatch):
  """Loops over tiles, as on CPU and on long rows, or unrolled blocks of queries."""
  monkeypatch.setattr(blocked, "MAX_UNROLLED", 1 if request.param == "tiles" else 1000)


def inputs(heads=H, kv_heads=G, dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(0), 3)
  shapes = [(B, T, heads, K), (B, T, kv_heads, K), (B, T, kv_heads, K)]
  return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


def reference(q, k, v, segments, window, scale, cap, sinks=None):
  """One query at a time, float64; a head's sink is a key to everything, whose value is 0."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  out = np.zeros(q.shape)
  for b, t, h in np.ndindex(q.shape[:3]):
    g = h // (q.shape[2] // k.shape[2])
    first = 0 if window is None else max(0, t - window + 1)
    seen = [s for s in range(first, t + 1) if segments[b, t] == segments[b, s] != 0]
    if seen:
      scores = scale * k[b, seen, g] @ q[b, t, h]
      scores = scores if cap is None else cap * np.tanh(scores / cap)
      weights = np.exp(scores - scores.max())
      sink = 0.0 if sinks is None else np.exp(sinks[h] - scores.max())
      out[b, t, h] = weights @ v[b, seen, g] / (weights.sum() + sink)
  return out


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("block", [5, 128])
def test_equals_the_numpy_loop(window, cap, block):
  q, k, v = inputs()
  options = dict(segment_ids=SEGMENTS, window=window, scale=0.3, logit_cap=cap, block=block)
  out = jax.jit(lambda *qkv: attention(*qkv, **options))(q, k, v)
  np.testing.assert_allclose(out, reference(q, k, v, SEGMENTS, window, 0.3, cap), atol=2e-6)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("cap,heads_at_once", [(None, 4), (0.7, 4), (None, 1), (0.7, 2)])
def test_gradient_equals_that_of_plain_softmax(cap, heads_at_once, monkeypatch):
  """Of several blocks; documents of one token, whose only weight is 1 whatever the scores."""
  monkeypatch.setattr(blocked, "CACHED_BYTES", 4 * heads_at_once * (H // G) * 8 * T)
  cotangent = jax.random.normal(jax.random.key(3), (B, T, H, K))

  def plain(q, k, v):
    scores = jnp.einsum("bthk,bshk->bhts", q, jnp.repeat(k, H // G, 2)) * 0.3
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    seen = np.tril(np.ones((T, T), bool)) & (SEGMENTS[:, :, None] == SEGMENTS[:, None]) & (SEGMENTS > 0)[:, :, None]
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30)) * (SEGMENTS > 0)[:, None, :, None]
    return (jnp.einsum("bhts,bshk->bthk", weights, jnp.repeat(v, H // G, 2)) * cotangent).sum()

  def ours(q, k, v):
    return (attention(q, k, v, segment_ids=SEGMENTS, scale=0.3, logit_cap=cap, block=8) * cotangent).sum()

  grads = jax.jit(jax.grad(ours, (0, 1, 2)))(*inputs())
  for a, b in zip(grads, jax.jit(jax.grad(plain, (0, 1, 2)))(*inputs()), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-6)
  lone = np.argwhere(SEGMENTS[0] == 2)[0, 0]
  for g in grads[:2]:
    assert np.abs(g[0, lone]).max() < 1e-6


# Segment 4 and 5 see the prompt 3 beside themselves, segment 2 the prompt 1; the last segment of a row sees none.
SHARED = np.array([[1] * 5 + [2] * 4 + [3] * 4 + [4] * 3 + [5] * 4 + [0] * 4, [1] * 12 + [2] * 7 + [3] * 5], np.int32)
PROMPTS = np.where(SHARED == 2, 1, np.where(SHARED > 3, 3, 0)).astype(np.int32)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("block,heads_at_once", [(5, 4), (128, 1)])
def test_a_prompt_is_seen_by_those_who_share_it_and_by_nobody_else(block, heads_at_once, monkeypatch):
  """Each completion gets what it gets behind a copy of the prompt of its own; so do the gradients of the prompt, added
  up over those who see it."""
  monkeypatch.setattr(blocked, "CACHED_BYTES", 4 * heads_at_once * (H // G) * block * T)
  cotangent = jax.random.normal(jax.random.key(3), (B, T, H, K))

  def shared(q, k, v):
    out = attention(q, k, v, segment_ids=SHARED, prompt_ids=PROMPTS, scale=0.3, logit_cap=0.7, block=block)
    return (out * cotangent).sum(), out

  def apart(q, k, v):
    out = jnp.zeros((B, T, H, K))
    for row in range(B):
      for segment in np.unique(SHARED[row][SHARED[row] > 0]):
        own = np.flatnonzero(SHARED[row] == segment)
        before = np.flatnonzero(SHARED[row] == PROMPTS[row, own[0]]) if PROMPTS[row, own[0]] else own[:0]
        text = np.concatenate([before, own])
        q1, k1, v1 = (x[row:row + 1, text] for x in (q, k, v))
        part = attention(q1, k1, v1, segment_ids=np.ones((1, len(text)), np.int32), scale=0.3, logit_cap=0.7)
        out = out.at[row, own].set(part[0, len(before):])
    return (out * cotangent).sum(), out

  found, expected = (jax.jit(jax.grad(f, (0, 1, 2), has_aux=True))(*inputs()) for f in (shared, apart))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found, expected)
  without = attention(*inputs(), segment_ids=SHARED, scale=0.3, logit_cap=0.7)
  differs = np.abs(np.asarray(found[1] - without)).max((2, 3)) > 1e-3
  np.testing.assert_array_equal(differs, PROMPTS > 0)


def test_grouped_heads_equal_repeated_heads():
  q, k, v = inputs()
  attend = jax.jit(lambda *qkv: attention(*qkv, segment_ids=SEGMENTS, scale=0.3))
  grouped, repeated = attend(q, k, v), attend(q, *(jnp.repeat(x, H // G, 2) for x in (k, v)))
  np.testing.assert_allclose(grouped, repeated, atol=1e-6)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("window", [None, 1, 4])
def test_who_sees_whom_by_gradient(window):
  """d out[t] / d value[s] is nonzero exactly for s of t's segment, not after t, within the window."""
  q, k, v = inputs()

  def out_of_v(v):
    return attention(q, k, v, segment_ids=SEGMENTS, window=window, scale=0.3, block=7).sum((2, 3))

  jacobian_BxTxBxS = np.abs(jax.jit(jax.jacrev(out_of_v))(v)).sum((4, 5))
  behind = np.arange(T)[:, None] - np.arange(T)[None]
  for b in range(B):
    expected = (behind >= 0) & (behind < (window or T)) & (SEGMENTS[b][:, None] == SEGMENTS[b][None])
    expected &= SEGMENTS[b][:, None] > 0
    np.testing.assert_array_equal(jacobian_BxTxBxS[b, :, b] > 0, expected)
    assert not jacobian_BxTxBxS[b, :, 1 - b].any()


@pytest.mark.usefixtures("both_ways")
def test_documents_are_isolated_bit_for_bit():
  assert_isolated(functools.partial(attention, segment_ids=SEGMENTS, scale=0.3, block=8), *inputs(), SEGMENTS)


@pytest.mark.usefixtures("both_ways")
def test_padding_gives_zeros_and_finite_gradients():
  empty = np.zeros((B, T), np.int32)
  q, k, v = inputs()
  value, grads = jax.jit(jax.value_and_grad(
      lambda *qkv: jnp.square(attention(*qkv, segment_ids=empty, scale=0.3, block=8) + 1.0).sum(), argnums=(0, 1, 2)
  ))(q, k, v)
  assert value == B * T * H * K
  assert all(not g.any() for g in grads)


def test_bfloat16_is_close_to_float32_and_keeps_its_dtype():
  attend = jax.jit(lambda *qkv: attention(*qkv, segment_ids=SEGMENTS, scale=0.3, block=8))
  out = attend(*inputs(dtype=jnp.bfloat16))
  assert out.dtype == jnp.bfloat16
  np.testing.assert_allclose(
      out.astype(jnp.float32), reference(*inputs(), SEGMENTS, None, 0.3, None), atol=0.04
  )


def test_causal_skipping_saves_arithmetic(monkeypatch):
  """Eight blocks need little more than half the products of one, and a window of one block about a fifth."""
  monkeypatch.setattr(blocked, "MAX_UNROLLED", 1000)  # what is in a loop the compiler counts once

  def flops(**options):
    q = jnp.zeros((1, 512, 1, 64))
    lowered = jax.jit(lambda q: attention(q, q, q, segment_ids=jnp.ones((1, 512), jnp.int32), scale=1.0, **options))
    return lowered.lower(q).compile().cost_analysis()["flops"]

  whole = flops(block=512)
  assert flops(block=64) < 0.6 * whole
  assert flops(block=64, window=64) < 0.3 * whole


def test_tiles_without_a_common_segment_are_passed_over():
  segments = np.array([[1] * 7 + [2] * 9 + [3] * 8, [4] * 5 + [5] * 11 + [0] * 8], np.int32)
  ids, index = jnp.asarray(segments), jnp.arange(T)

  def seen(window=None, prompts=None, rows=slice(None)):
    spans = _spans(T, 4, Rule(1.0, window=window), True)
    q, k = jnp.zeros((B, 1, 1, T, K))[rows], jnp.zeros((B, 1, T, K))[rows]
    found = blocked._TilesSeen(spans, 4, blocked._Tiles(4, mask.Side(ids[rows], index, None, prompts), q),
                             blocked._Tiles(4, mask.Side(mask.keys_of(ids)[rows], index, None), k))
    return list(zip(found.first_N.tolist(), found.last_N.tolist(), strict=True))

  # The second segment begins in the second tile, the third with the fifth.
  assert seen(rows=slice(0, 1)) == [(0, 1), (0, 2), (1, 3), (1, 4), (4, 5), (4, 6)]
  assert seen(rows=slice(1, 2)) == [(0, 1), (0, 2), (1, 3), (1, 4), (0, 0), (0, 0)]  # padding sees nothing
  assert seen() == [(0, 1), (0, 2), (1, 3), (1, 4), (4, 5), (4, 6)]
  assert seen(window=4) == [(0, 1), (0, 2), (1, 3), (2, 4), (4, 5), (4, 6)]
  shared = jnp.where(ids[:1] == 3, 1, 0)
  assert seen(prompts=shared, rows=slice(0, 1)) == [(0, 1), (0, 2), (1, 3), (1, 4), (0, 5), (0, 6)]


def test_long_rows_need_no_longer_program_and_no_square_of_memory():
  """Of rows twice as long the compiled gradient has as many instructions, and holds twice as much."""
  def compiled(length):
    x, ids = jnp.zeros((1, length, 1, 32)), jnp.ones((1, length), jnp.int32)
    grad = jax.jit(jax.grad(lambda q, k, v: attention(q, k, v, segment_ids=ids, scale=1.0, block=64).sum(), (0, 1, 2)))
    done = grad.lower(x, x, x).compile()
    return done.as_text().count(" = "), done.memory_analysis().temp_size_in_bytes

  (some, held), (more, held_more) = compiled(2048), compiled(4096)
  assert some == more
  assert held_more < 2.1 * held


def test_bad_arguments():
  q, k, v = inputs()
  with pytest.raises(ValueError, match="allowed: auto, blocked, splash, triton"):
    attention(q, k, v, segment_ids=SEGMENTS, scale=1.0, impl="flash")
  with pytest.raises(ValueError, match="needs equal lengths"):
    attention(q[:, :, :3], k, v, segment_ids=SEGMENTS, scale=1.0)
  with pytest.raises(ValueError, match=r"segments \(2, 24\), prompts \(2, 23\); needs equal lengths"):
    attention(q, k, v, segment_ids=SEGMENTS, prompt_ids=PROMPTS[:, 1:], scale=1.0)
  with pytest.raises(ValueError, match="found prompts and window 5"):
    attention(q, k, v, segment_ids=SEGMENTS, prompt_ids=PROMPTS, window=5, scale=1.0)


# Blocks of tokens that see each other: two in one segment, one that reaches beyond windows and query blocks, one number
# in two segments, and one in the padding.
BLOCKS = np.array([[0] * 2 + [1] * 3 + [0] + [2] * 3 + [0] + [2] * 2 + [1] * 7 + [2] * 5, [0] * 3 + [4] * 15 + [0] * 6],
                  np.int32)


def seen_with_blocks(window, window_blocks):
  """Whether query t sees key s [B, T, T], a pair at a time."""
  seen = np.zeros((B, T, T), bool)
  for b, t, s in np.ndindex(seen.shape):
    near = window is None or t - s < window
    together = BLOCKS[b, t] == BLOCKS[b, s] > 0
    allowed = (s <= t and near) or (together and (near or not window_blocks))
    seen[b, t, s] = allowed and SEGMENTS[b, t] == SEGMENTS[b, s] > 0
  return seen


@pytest.mark.parametrize("both_ways, windows, blocks", covering(
    ["tiles", "unrolled"], [(None, False), (4, False), (4, True)], [(5, 1), (5, 2), (5, 4), (128, 4)]),
    indirect=["both_ways"])
def test_blocks_see_each_other_both_ways(both_ways, windows, blocks, monkeypatch):
  """Packed rows, padding, grouped heads, caps: the outputs, and their gradients, of a plain softmax with that mask.
  However many heads' scores, of the B * G pairs, exist at a time."""
  (window, window_blocks), (block, heads_at_once) = windows, blocks
  monkeypatch.setattr(blocked, "CACHED_BYTES", 4 * heads_at_once * (H // G) * min(block, T) * T)
  cotangent = jax.random.normal(jax.random.key(3), (B, T, H, K))
  seen = seen_with_blocks(window, window_blocks)

  def plain(q, k, v):
    scores = 0.7 * jnp.tanh(jnp.einsum("bthk,bshk->bhts", q, jnp.repeat(k, H // G, 2)) * 0.3 / 0.7)
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30)) * (SEGMENTS > 0)[:, None, :, None]
    return jnp.einsum("bhts,bshk->bthk", weights, jnp.repeat(v, H // G, 2))

  def ours(q, k, v):
    options = dict(window=window, window_blocks=window_blocks, scale=0.3, logit_cap=0.7, block=block)
    return attention(q, k, v, segment_ids=SEGMENTS, block_ids=BLOCKS, **options)

  def both(attend):
    out, pull = jax.vjp(attend, *inputs())
    return [out, *pull(cotangent)]

  for a, b in zip(jax.jit(both, static_argnums=0)(ours), jax.jit(both, static_argnums=0)(plain), strict=True):
    np.testing.assert_allclose(a, b, atol=3e-6)


def test_blocks_of_none_are_causal_attention():
  q, k, v = inputs()
  options = dict(segment_ids=SEGMENTS, window=5, scale=0.3, block=7)
  none = jax.jit(lambda *qkv: attention(*qkv, block_ids=np.zeros_like(SEGMENTS), **options))(q, k, v)
  causal = jax.jit(lambda *qkv: attention(*qkv, **options))(q, k, v)
  np.testing.assert_allclose(none, causal, atol=1e-6)


@pytest.mark.usefixtures("both_ways")
def test_documents_with_blocks_are_isolated_bit_for_bit():
  """Although segments 1 and 3 have blocks of the same numbers."""
  q, k, v = inputs()
  attend = functools.partial(attention, segment_ids=SEGMENTS, block_ids=BLOCKS, scale=0.3, block=8)
  assert_isolated(attend, q, k, v, SEGMENTS)
  with pytest.raises(ValueError, match=r"blocks \(2, 3\)"):
    attention(q, k, v, segment_ids=SEGMENTS, block_ids=BLOCKS[:, :3], scale=1.0)


# ------------------------------------------------------------------------------------------------ sinks

# Far below the scores, among them, and above.
SINKS = jnp.array([-9.0, 0.3, 1.0, 4.0])


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("window, impl, block", [(None, "blocked", 5), (5, "blocked", 5), (5, "triton", 5),
                                                 (None, "splash", 128)])
def test_sinks_are_a_term_of_the_denominator(window, impl, block):
  """Values, and slopes along a random direction of all four inputs, against the loop in float64."""
  given, options = [*inputs(), SINKS], dict(segment_ids=SEGMENTS, window=window, scale=0.3, block=block, impl=impl)
  weights = np.random.default_rng(1).normal(size=(B, T, H, K)).astype(np.float32)

  def run(*given):
    out, pull = jax.vjp(lambda q, k, v, sinks: attention(q, k, v, sinks_H=sinks, **options), *given)
    return out, pull(jnp.asarray(weights))

  out, gradients = jax.jit(run)(*given)
  q, k, v, sinks = (np.asarray(x, np.float64) for x in given)
  np.testing.assert_allclose(out, reference(q, k, v, SEGMENTS, window, 0.3, None, sinks), atol=2e-6)
  for at, gradient in enumerate(gradients):
    numbers = np.random.default_rng(at)
    for _ in range(2):
      step = 1e-5 * numbers.normal(size=gradient.shape)
      up, down = ([x + sign * step if i == at else x for i, x in enumerate((q, k, v, sinks))] for sign in (1, -1))
      rise = sum(sign * np.sum(weights * reference(*x[:3], SEGMENTS, window, 0.3, None, x[3]))
                 for sign, x in ((1, up), (-1, down)))
      np.testing.assert_allclose(np.sum(np.asarray(gradient, np.float64) * step), rise / 2, rtol=2e-4, atol=2e-10)


def test_rows_with_sinks_are_isolated_bit_for_bit():
  assert_isolated(functools.partial(attention, segment_ids=SEGMENTS, scale=0.3, block=5, sinks_H=SINKS), *inputs(),
                  SEGMENTS)


def test_a_row_without_a_token_answers_nothing():
  """While others are decoded; the other row is seen to in full."""
  rng = np.random.default_rng(0)
  q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 1, 4, 8), (2, 2, 5, 8), (2, 2, 5, 8)))
  seen = Seen(k, v, jnp.array([[True] * 3 + [False] * 2, [False] * 5]))
  out = attend_to_past(Rule(0.3), q, seen, jnp.array([True, False]))
  scores = np.einsum("grk,gsk->grs", np.float64(q[0, 0]).reshape(2, 2, 8), np.float64(k[0, :, :3])) * 0.3
  weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
  np.testing.assert_allclose(out[0, 0], np.einsum("grs,gsk->grk", weights, v[0, :, :3]).reshape(4, 8), atol=1e-6)
  assert not out[1].any()
