"""Attention over packed rows, causal but within blocks: the one place that knows how it is computed.

B batch, T query length, S key length (= T, or slots of a cache), H query heads, G key/value heads, R = H / G query
heads per key/value head, K head size, W keys that one block of queries can see.

Every implementation here keeps these promises:
- a query sees keys of its own segment, at its own index or before and within the window, or of its own block
  (tokens that see each other both ways: those of an image, a prefix; see `window_blocks`), nothing else;
- masked scores weigh exactly 0, so other documents in the row cannot change a bit of the output;
- padding (segment 0) is never attended to, and its own output is 0, with finite gradients;
- scores and softmax are float32, whatever the inputs' dtype.
"""

import functools

import jax
import jax.numpy as jnp

IMPLEMENTATIONS = ("auto", "blocked")
# Blocks are unrolled; on rows longer than so many of them they grow, which bounds compile time.
MAX_BLOCKS = 32
# Far below any score, yet finite: exp(MASKED - max) is exactly 0, with a gradient of exactly 0.
MASKED = -1e30
# Scores of one layer, before skipping, up to which the backward pass keeps them.
KEPT_BYTES = 64 * 2**20


def attention(
    q_BxTxHxK: jax.Array,
    k_BxSxGxK: jax.Array,
    v_BxSxGxK: jax.Array,
    *,
    segment_ids: jax.Array,
    block_ids: jax.Array | None = None,
    window: int | None = None,
    window_blocks: bool = False,
    scale: float,
    logit_cap: float | None = None,
    impl: str = "auto",
    block: int = 128,
) -> jax.Array:
  """Attends within segments, causally but for blocks; returns [B, T, H, K] in the dtype of `v`.

  Args:
    q_BxTxHxK: queries; H is a multiple of G. Head h reads key/value head h // (H / G).
    k_BxSxGxK: keys, S == T.
    v_BxSxGxK: values.
    segment_ids: int32 [B, T]; tokens attend only where these are equal; 0 is padding. The tokens of a
      segment are contiguous, so that index differences are position differences.
    block_ids: int32 [B, T]; tokens of one segment with the same number above 0 see each other, whatever their order
      and distance. None: attention is causal, and scores of keys to the right are never computed; with blocks, which
      may reach anywhere, all are.
    window: how many tokens a query sees, itself included; None: all before it.
    window_blocks: whether nothing further back than the window is seen of the own block either.
    scale: factor on the scores.
    logit_cap: scores become cap * tanh(score / cap), after scaling; None: no cap.
    impl: one of IMPLEMENTATIONS; "auto" takes the fastest for the backend.
    block: queries per block of the blocked implementation.

  Raises:
    ValueError: unknown `impl`, or shapes that do not fit.
  """
  if impl not in IMPLEMENTATIONS:
    raise ValueError(f"attention: found impl {impl!r}, allowed: {', '.join(IMPLEMENTATIONS)}")
  B, T, H, K = q_BxTxHxK.shape
  S, G = k_BxSxGxK.shape[1:3]
  if S != T or H % G or segment_ids.shape != (B, T) or (block_ids is not None and block_ids.shape != (B, T)):
    blocks = "" if block_ids is None else f", blocks {block_ids.shape}"
    raise ValueError(
        f"attention: queries {q_BxTxHxK.shape}, keys {k_BxSxGxK.shape}, segments {segment_ids.shape}{blocks}; needs "
        "equal lengths and a number of query heads that the key/value heads divide"
    )
  q_BxGxRxTxK = q_BxTxHxK.reshape(B, T, G, H // G, K).transpose(0, 2, 3, 1, 4)
  k_BxGxSxK, v_BxGxSxK = k_BxSxGxK.transpose(0, 2, 1, 3), v_BxSxGxK.transpose(0, 2, 1, 3)
  options = dict(window=window, window_blocks=window_blocks, scale=scale, logit_cap=logit_cap)
  out_BxGxRxTxK = _blocked(q_BxGxRxTxK, k_BxGxSxK, v_BxGxSxK, segment_ids, block_ids, block=block, **options)
  return out_BxGxRxTxK.transpose(0, 3, 1, 2, 4).reshape(B, T, H, K)


def _blocked(
    q_BxGxRxTxK, k_BxGxSxK, v_BxGxSxK, segment_ids, block_ids, *, block, window, window_blocks, **options
) -> jax.Array:
  """Query blocks one after another, each against only the keys it can see.

  Without `block_ids`, half of the score matrix is never computed (more with a window). Each block is recomputed in
  the backward pass, so that memory for scores is that of one block.
  """
  B, G, R, T, _ = q_BxGxRxTxK.shape
  causal = block_ids is None
  recompute = 4 * B * G * R * T * (min(T, window or T) if causal else T) > KEPT_BYTES
  block = max(1, block, -(-T // MAX_BLOCKS))
  # A padding key equals no query's segment, not even a padding query's.
  key_segments = jnp.where(segment_ids == 0, -1, segment_ids)
  blocks = []
  for start in range(0, T, block):
    end = min(start + block, T)
    first = 0 if window is None or not (causal or window_blocks) else max(0, start - window + 1)
    last = end if causal else T
    attend = functools.partial(_attend, offset=start - first, window=window, window_blocks=window_blocks, **options)
    blocks.append(
        (jax.checkpoint(attend) if recompute else attend)(
            q_BxGxRxTxK[:, :, :, start:end],
            k_BxGxSxK[:, :, first:last],
            v_BxGxSxK[:, :, first:last],
            segment_ids[:, start:end],
            key_segments[:, first:last],
            None if causal else (block_ids[:, start:end], block_ids[:, first:last]),
        )
    )
  return jnp.concatenate(blocks, axis=3) if len(blocks) > 1 else blocks[0]


def _attend(
    q_BxGxRxTxK, k_BxGxWxK, v_BxGxWxK, segments_BxT, segments_BxW, blocks, *, offset, window, window_blocks, scale,
    logit_cap
) -> jax.Array:
  """Softmax attention of one block of queries; query t sits at the index of key `offset` + t.

  `blocks`: the block ids of queries and keys, or None.
  """
  T, W = q_BxGxRxTxK.shape[3], k_BxGxWxK.shape[2]
  f32 = jnp.float32
  scores = jnp.einsum("bgrtk,bgwk->bgrtw", q_BxGxRxTxK, k_BxGxWxK, preferred_element_type=f32) * scale
  behind_TxW = (jnp.arange(T)[:, None] + offset) - jnp.arange(W)[None, :]
  near_TxW = True if window is None else behind_TxW < window
  causal_TxW = (behind_TxW >= 0) & near_TxW
  seen = segments_BxT[:, :, None] == segments_BxW[:, None, :]
  if blocks is None:
    seen &= causal_TxW
  else:
    blocks_BxT, blocks_BxW = blocks
    together = (blocks_BxT[:, :, None] == blocks_BxW[:, None, :]) & (blocks_BxT > 0)[:, :, None]
    seen &= causal_TxW | (together & near_TxW if window_blocks else together)
  weights = _unnormalised(scores, seen, logit_cap)
  dtype = v_BxGxWxK.dtype
  out = jnp.einsum("bgrtw,bgwk->bgrtk", weights.astype(dtype), v_BxGxWxK, preferred_element_type=f32)
  out = out / weights.sum(-1, keepdims=True)
  # Every query sees itself, except padding, which sees nothing.
  return jnp.where((segments_BxT != 0)[:, None, None, :, None], out, 0.0).astype(dtype)


def attend_to_past(
    q_Bx1xHxK: jax.Array,
    k_Bx1xGxK: jax.Array,
    v_Bx1xGxK: jax.Array,
    past_k_BxSxGxK: jax.Array,
    past_v_BxSxGxK: jax.Array,
    *,
    seen_BxS: jax.Array,
    active_B: jax.Array,
    scale: float,
    logit_cap: float | None = None,
) -> jax.Array:
  """`attention` of one more token per row, to itself and to what a cache holds; returns [B, 1, H, K].

  Args:
    q_Bx1xHxK, k_Bx1xGxK, v_Bx1xGxK: of the token.
    past_k_BxSxGxK, past_v_BxSxGxK: of the tokens before it, in any order.
    seen_BxS: which of these there are, and within the window.
    active_B: False for rows without a token, whose output is 0.
    scale, logit_cap: as in `attention`.
  """
  B, _, H, K = q_Bx1xHxK.shape
  S, G = past_k_BxSxGxK.shape[1:3]
  f32, dtype = jnp.float32, v_Bx1xGxK.dtype
  q_BxGxRxK = q_Bx1xHxK.reshape(B, G, H // G, K)
  old_BxGxRxS = jnp.einsum("bgrk,bsgk->bgrs", q_BxGxRxK, past_k_BxSxGxK, preferred_element_type=f32)
  own_BxGxRx1 = jnp.einsum("bgrk,bsgk->bgrs", q_BxGxRxK, k_Bx1xGxK, preferred_element_type=f32)
  scores_BxGxRxS = jnp.concatenate([old_BxGxRxS, own_BxGxRx1], axis=-1) * scale
  seen_BxS = jnp.pad(seen_BxS, ((0, 0), (0, 1)), constant_values=True)
  weights_BxGxRxS = _unnormalised(scores_BxGxRxS[:, :, :, None], seen_BxS[:, None], logit_cap)[:, :, :, 0]
  old, own = weights_BxGxRxS[..., :S].astype(dtype), weights_BxGxRxS[..., S:].astype(dtype)
  out_BxGxRxK = jnp.einsum("bgrs,bsgk->bgrk", old, past_v_BxSxGxK, preferred_element_type=f32)
  out_BxGxRxK += jnp.einsum("bgrs,bsgk->bgrk", own, v_Bx1xGxK, preferred_element_type=f32)
  out_BxGxRxK = out_BxGxRxK / weights_BxGxRxS.sum(-1, keepdims=True)
  return jnp.where(active_B[:, None, None, None], out_BxGxRxK, 0.0).astype(dtype).reshape(B, 1, H, K)


def _unnormalised(scores_BxGxRxTxW: jax.Array, seen_BxTxW: jax.Array, logit_cap: float | None) -> jax.Array:
  """exp of the capped scores up to a factor for each query, exactly 0 where a key is not seen."""
  scores = scores_BxGxRxTxW
  if logit_cap is not None:
    scores = logit_cap * jnp.tanh(scores / logit_cap)
  # Added, not selected: a number that swallows any score, at no cost in the backward pass.
  scores = scores + jnp.where(seen_BxTxW, 0.0, MASKED)[:, None, None]
  # The maximum only keeps exp in range; the result does not depend on it.
  top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
  return jnp.exp(scores - top)
