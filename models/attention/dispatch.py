"""Attention over packed rows, causal but within blocks: the one place that knows how it is computed.

B batch, T query length, S key length (= T, P + T, or P), P slots of a cache, H query heads, G key/value heads,
R = H / G query heads per key/value head, K head size.

Every implementation here keeps these promises:
- a query sees keys of its own segment, and of the prompt that it shares with others, at its own index or before and
  within the window, or of its own block (tokens that see each other both ways: those of an image, a prefix; see
  `window_blocks`), nothing else;
- masked scores weigh exactly 0, so other documents in the row cannot change a bit of the output;
- padding (segment 0) is never attended to, and its own output is 0, with finite gradients;
- scores and softmax are float32, whatever the inputs' dtype.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from models import gpu
from models.attention import blocked, mask, ring
from models.attention import gpu as attention_gpu
from models.attention import tpu as attention_tpu
from models.attention.blocked import MASKED, Span
from models.attention.mask import Rule, Side, TokenIds
from models.attention.pages import Table
from models.sharding import logical_axes

IMPLEMENTATIONS = ("auto", "blocked", "splash", "triton")


def attention(
    q_BxTxHxK: jax.Array,
    k_BxSxGxK: jax.Array,
    v_BxSxGxK: jax.Array,
    *,
    segment_ids: jax.Array,
    block_ids: jax.Array | None = None,
    prompt_ids: jax.Array | None = None,
    behind_BxP: jax.Array | None = None,
    behind_ids_BxP: jax.Array | None = None,
    window: int | None = None,
    window_blocks: bool = False,
    scale: float,
    logit_cap: float | None = None,
    sinks_H: jax.Array | None = None,
    impl: str = "auto",
    block: int = 128,
) -> jax.Array:
  """Attends within segments, causally but for blocks; returns [B, T, H, K] in the dtype of `v`.

  Args:
    q_BxTxHxK: queries; H is a multiple of G. Head h reads key/value head h // (H / G).
    k_BxSxGxK: keys, S == T, or P + T: those of a cache, in any order, then the row's own.
    v_BxSxGxK: values.
    segment_ids: int32 [B, T]; tokens attend only where these are equal; 0 is padding. The tokens of a
      segment are contiguous, so that index differences are position differences.
    block_ids: int32 [B, T]; tokens of one segment with the same number above 0 see each other, whatever their order
      and distance. None: attention is causal, and scores of keys to the right are never computed; with blocks, which
      may reach anywhere, all are.
    prompt_ids: int32 [B, T]; a further segment that each token sees, 0 for none. It stands before the token in the row.
      None: there are none. Not with a window, which counts places of the row.
    behind_BxP: int32 [B, P]; of each key of a cache, how many tokens it stands before the row's first; 0: there is
      none. The row's tokens are then of segment 1, padded on the right. None: rows have nothing before them (P = 0).
    behind_ids_BxP: int32 [B, P], their segments; None: all are of segment 1.
    window: how many tokens a query sees, itself included; None: all before it.
    window_blocks: whether nothing further back than the window is seen of the own block either.
    scale: factor on the scores.
    logit_cap: scores become cap * tanh(score / cap), after scaling; None: no cap.
    sinks_H: of each head one more score, as it stands, that no key or value goes with: a term of the softmax's
      denominator alone (gpt-oss). None: there are none.
    impl: one of IMPLEMENTATIONS. splash, triton: the kernels of models/attention/tpu.py and models/attention/gpu.py
      where they can, else blocked, saying why. auto: those where the program is for a TPU or a GPU, else blocked.
    block: queries per block of the blocked implementation.

  Raises:
    ValueError: unknown `impl`, or shapes that do not fit.
  """
  if impl not in IMPLEMENTATIONS:
    raise ValueError(f"attention: found impl {impl!r}, allowed: {', '.join(IMPLEMENTATIONS)}")
  B, T, H, K = q_BxTxHxK.shape
  S, G = k_BxSxGxK.shape[1:3]
  P = 0 if behind_BxP is None else behind_BxP.shape[1]
  tokens = TokenIds(segment_ids, block_ids, prompt_ids)
  of_tokens = {name: ids for name, ids in tokens._asdict().items() if ids is not None}
  if S != P + T or H % G or any(ids.shape != (B, T) for ids in of_tokens.values()):
    raise ValueError(
        f"attention: queries {q_BxTxHxK.shape}, keys {k_BxSxGxK.shape}, "
        f"{', '.join(f'{name} {ids.shape}' for name, ids in of_tokens.items())}; needs equal lengths and a number of "
        "query heads that the key/value heads divide"
    )
  if prompt_ids is not None and window is not None:
    raise ValueError(f"attention: found prompt_ids and window {window}, which counts places of the row; allowed: one "
                     "of them")
  rule = Rule(scale, logit_cap, window, window_blocks)
  sinks_H = None if sinks_H is None else sinks_H.astype(jnp.float32)
  before = None if behind_BxP is None else mask.behind(behind_BxP, behind_ids_BxP)
  placed = logical_axes.current()
  if placed is None:
    return _attend(None, rule, impl, block, q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, tokens, sinks_H, before)
  return _mapped(placed, rule, impl, block, q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, tokens, sinks_H, before)


def _mapped(placed: logical_axes.Placement, rule: Rule, impl: str, block: int, q_BxTxHxK, k_BxTxGxK, v_BxTxGxK,
            tokens: TokenIds, sinks_H: jax.Array | None, before: Side | None) -> jax.Array:
  """Each device attends for its rows, its part of their length and its heads.

  By hand, so that no partitioner gathers what is not needed, and since it could not look into a kernel.
  """
  H, G = q_BxTxHxK.shape[2], k_BxTxGxK.shape[2]
  by_head = placed.spec(("batch", "length", "heads", None), q_BxTxHxK.shape)
  by_token, length = PartitionSpec(*by_head[:2]), by_head[1]
  # Every device needs the key/value heads of its query heads: where there are fewer of them than devices, copies.
  devices = logical_axes.size_of(placed.mesh, by_head[2])
  copies = next(n for n in range(1, H // G + 1) if H // G % n == 0 and G * n % devices == 0)
  if copies > 1:
    k_BxTxGxK, v_BxTxGxK = jnp.repeat(k_BxTxGxK, copies, axis=2), jnp.repeat(v_BxTxGxK, copies, axis=2)

  def local(q, k, v, tokens, sinks, before):
    return _attend(length, rule, impl, block, q, k, v, tokens, sinks, before)

  # check_vma would want every loop inside to say over which axes its values differ.
  return jax.shard_map(local, mesh=placed.mesh, out_specs=by_head, check_vma=False,
                       in_specs=(by_head, by_head, by_head, by_token, PartitionSpec(by_head[2]),
                                 PartitionSpec(by_head[0])))(
                           q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, tokens, sinks_H, before)


def _attend(axis: logical_axes.Axes, rule: Rule, impl: str, block: int, q_BxTxHxK, k_BxTxGxK, v_BxTxGxK,
            tokens: TokenIds, sinks_H: jax.Array | None, before: Side | None) -> jax.Array:
  """`attention` on one device, T being its part of the length where that is split over the mesh axis `axis`."""
  B, T, H, K = q_BxTxHxK.shape
  has_blocks, has_prompts = tokens.blocks is not None, tokens.prompts is not None
  parts = 1 if axis is None else jax.lax.axis_size(axis)
  platform = logical_axes.platform()
  on_tpu, on_gpu = platform == "tpu", platform == "gpu"
  if before is not None:  # which no kernel knows of
    impl = "blocked"
  if impl == "splash" or (impl == "auto" and on_tpu):
    reason = attention_tpu.refusal(T, has_blocks, parts, has_prompts, sinks_H is not None)
    if reason is None:
      options: dict[str, Any] = dict(scale=rule.scale, logit_cap=rule.logit_cap, window=rule.window,
                                     interpret=not on_tpu)
      if axis is None:
        return attention_tpu.attend(q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, segment_ids=tokens.segments, **options)
      return attention_tpu.attend_in_parts(
          q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, segment_ids=tokens.segments, axis=axis, C=parts, **options)
    attention_tpu.warn(reason)
  if impl == "triton" or (impl == "auto" and on_gpu):
    device = logical_axes.device()
    reason = attention_gpu.refusal(device, rule, q_BxTxHxK, k_BxTxGxK, has_blocks, has_prompts)
    if reason is None:
      attend = functools.partial(attention_gpu.on(device), sinks_H=sinks_H)
      if axis is None:
        index = jnp.arange(T)
        return attend(rule, q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, tokens.queries(index),
                      tokens.keys(index))
      return ring.by_kernel(axis, rule, attend, q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, tokens)
    gpu.warn("attention", reason)
  G = k_BxTxGxK.shape[2]
  q = q_BxTxHxK.reshape(B, T, G, H // G, K).transpose(0, 2, 3, 1, 4)
  k, v = k_BxTxGxK.transpose(0, 2, 1, 3), v_BxTxGxK.transpose(0, 2, 1, 3)
  sinks = None if sinks_H is None else sinks_H.reshape(G, H // G, 1)
  block = max(1, block)
  if axis is None:
    index = jnp.arange(T)
    keys, spans = tokens.keys(index, before), _spans(T, block, rule, not has_blocks)
    if before is not None:
      P = before.segments.shape[1]
      spans = tuple(Span(start, stop, 0, P + last) for start, stop, _, last in spans)
    out = blocked.attend(spans, rule, q, k, v, tokens.queries(index), keys, sinks)
  elif has_blocks or has_prompts or T % 2:
    out = ring.gathered(axis, rule, block, q, k, v, tokens, sinks)
  elif rule.window is not None and rule.window <= T + 1:
    out = ring.neighbours(axis, rule, block, q, k, v, tokens.segments, sinks)
  else:
    out = ring.ring(axis, rule, q, k, v, tokens.segments, sinks)
  return out.transpose(0, 3, 1, 2, 4).reshape(B, T, H, K)


def _spans(T: int, block: int, rule: Rule, causal: bool) -> tuple[Span, ...]:
  """Which keys each block of queries can see: without blocks of tokens none to the right, with a window few."""
  bounded = rule.window is not None and (causal or rule.window_blocks)
  spans = []
  for start in range(0, T, block):
    stop = min(start + block, T)
    spans.append(Span(start, stop, max(0, start - rule.window + 1) if bounded else 0, stop if causal else T))
  return tuple(spans)


def attend_to_past(
    q_Bx1xHxK: jax.Array,
    k_BxGxSxK: jax.Array,
    v_BxGxSxK: jax.Array,
    *,
    seen_BxS: jax.Array,
    active_B: jax.Array,
    scale: float,
    logit_cap: float | None = None,
    sinks_H: jax.Array | None = None,
    more: tuple[jax.Array, jax.Array] | None = None,
    table: Table | None = None,
) -> jax.Array:
  """`attention` of one more token per row to what a cache holds, itself included; returns [B, 1, H, K].

  Args:
    q_Bx1xHxK: of the token.
    k_BxGxSxK, v_BxGxSxK: of it and the tokens before it, in any order; in the dtype of q, or a wider one.
    seen_BxS: which of these there are, and within the window.
    active_B: False for rows without a token, whose output is 0.
    scale, logit_cap, sinks_H: as in `attention`.
    more: further dimensions of queries and keys, whose products are added.
    table: keys, values and what is seen of them are by page in place of row, and this says whose the pages are.
  """
  B, _, H, K = q_Bx1xHxK.shape
  G, f32, dtype = k_BxGxSxK.shape[1], jnp.float32, q_Bx1xHxK.dtype
  pairs = [(q_Bx1xHxK, k_BxGxSxK), *([] if more is None else [more])]
  queries = [q.reshape(B, G, H // G, -1) for q, _ in pairs]
  if table is not None:
    queries = [table.per_page(q_BxGxRxK) for q_BxGxRxK in queries]
  scores_BxGxRxS = scale * sum(jnp.einsum("bgrk,bgsk->bgrs", q, k, preferred_element_type=f32)
                               for q, (_, k) in zip(queries, pairs, strict=True))
  if logit_cap is not None:
    scores_BxGxRxS = logit_cap * jnp.tanh(scores_BxGxRxS / logit_cap)
  scores_BxGxRxS = jnp.where(seen_BxS[:, None, None], scores_BxGxRxS, MASKED)
  top_BxGxRx1, sinks_GxRx1 = scores_BxGxRxS.max(-1, keepdims=True), None
  if table is not None:
    top_BxGxRx1 = table.per_row(top_BxGxRx1, MASKED).max(1)
  if sinks_H is not None:
    sinks_GxRx1 = sinks_H.astype(f32).reshape(G, H // G, 1)
    top_BxGxRx1 = jnp.maximum(top_BxGxRx1, sinks_GxRx1)
  weights_BxGxRxS = jnp.exp(scores_BxGxRxS - (top_BxGxRx1 if table is None else table.per_page(top_BxGxRx1)))
  out_BxGxRxK = jnp.einsum("bgrs,bgsk->bgrk", weights_BxGxRxS.astype(dtype), v_BxGxSxK, preferred_element_type=f32)
  total_BxGxRx1 = weights_BxGxRxS.sum(-1, keepdims=True)
  if table is not None:
    out_BxGxRxK, total_BxGxRx1 = (table.per_row(part, 0.0).sum(1) for part in (out_BxGxRxK, total_BxGxRx1))
  if sinks_GxRx1 is not None:
    total_BxGxRx1 = total_BxGxRx1 + jnp.exp(sinks_GxRx1 - top_BxGxRx1)
  out_BxGxRxK = out_BxGxRxK / total_BxGxRx1
  return jnp.where(active_B[:, None, None, None], out_BxGxRxK, 0.0).astype(dtype).reshape(B, 1, H, K)
