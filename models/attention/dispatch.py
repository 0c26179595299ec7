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

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from models import gpu
from models.attention import blocked, past_kernel, ring
from models.attention import gpu as attention_gpu
from models.attention import tpu as attention_tpu
from models.attention.blocked import MASKED, Span
from models.attention.mask import QKV, Rule, Side, TokenIds
from models.attention.pages import Seen
from models.sharding import logical_axes

IMPLEMENTATIONS = ("auto", "blocked", "splash", "triton")


def attention(qkv: QKV, tokens: TokenIds, rule: Rule, *, before: Side | None = None, impl: str = "auto",
              block: int = 128) -> jax.Array:
  """Attends within segments, causally but for blocks; returns [B, T, H, K] in the dtype of the values.

  Args:
    qkv: queries [B, T, H, K], keys and values [B, S, G, K], those of a cache, in any order, then the row's own; H is a
      multiple of G.
    tokens: which tokens see each other.
    rule: how scores are made, and the window.
    before: keys of a cache, the first P of all (`mask.behind`). None: rows have nothing before them (P = 0).
    impl: one of IMPLEMENTATIONS. splash, triton: the kernels of models/attention/tpu.py and models/attention/gpu.py
      where they can, else blocked, saying why. auto: those where the program is for a TPU or a GPU, else blocked.
    block: queries per block of the blocked implementation.

  Raises:
    ValueError: unknown `impl`, or shapes that do not fit.
  """
  if impl not in IMPLEMENTATIONS:
    raise ValueError(f"attention: found impl {impl!r}, allowed: {', '.join(IMPLEMENTATIONS)}")
  (B, T, H, _), (_, S, G, _) = qkv.q.shape, qkv.k.shape
  P = 0 if before is None else before.segments.shape[1]
  of_tokens = {name: ids for name, ids in tokens._asdict().items() if ids is not None}
  if S != P + T or H % G or any(ids.shape != (B, T) for ids in of_tokens.values()):
    raise ValueError(
        f"attention: queries {qkv.q.shape}, keys {qkv.k.shape}, "
        f"{', '.join(f'{name} {ids.shape}' for name, ids in of_tokens.items())}; needs equal lengths and a number of "
        "query heads that the key/value heads divide"
    )
  if tokens.prompts is not None and rule.window is not None:
    raise ValueError(f"attention: found prompts and window {rule.window}, which counts places of the row; allowed: one "
                     "of them")
  if qkv.sinks is not None:
    qkv = qkv._replace(sinks=qkv.sinks.astype(jnp.float32))
  placed = logical_axes.current()
  if placed is None:
    return _attend(None, rule, impl, block, qkv, tokens, before)
  return _mapped(placed, rule, impl, block, qkv, tokens, before)


def _mapped(placed: logical_axes.Placement, rule: Rule, impl: str, block: int, qkv: QKV, tokens: TokenIds,
            before: Side | None) -> jax.Array:
  """Each device attends for its rows, its part of their length and its heads.

  By hand, so that no partitioner gathers what is not needed, and since it could not look into a kernel.
  """
  H, G = qkv.q.shape[2], qkv.k.shape[2]
  by_head = placed.spec(("batch", "length", "heads", None), qkv.q.shape)
  by_token, length = PartitionSpec(*by_head[:2]), by_head[1]
  # Every device needs the key/value heads of its query heads: where there are fewer of them than devices, copies.
  devices = logical_axes.size_of(placed.mesh, by_head[2])
  copies = next(n for n in range(1, H // G + 1) if H // G % n == 0 and G * n % devices == 0)
  if copies > 1:
    qkv = qkv._replace(k=jnp.repeat(qkv.k, copies, axis=2), v=jnp.repeat(qkv.v, copies, axis=2))
  # check_vma would want every loop inside to say over which axes its values differ.
  return jax.shard_map(functools.partial(_attend, length, rule, impl, block), mesh=placed.mesh, out_specs=by_head,
                       in_specs=(QKV._make((*(by_head,) * 3, PartitionSpec(by_head[2]))), by_token,
                                 PartitionSpec(by_head[0])), check_vma=False)(qkv, tokens, before)


def _attend(axis: logical_axes.Axes, rule: Rule, impl: str, block: int, qkv: QKV, tokens: TokenIds,
            before: Side | None) -> jax.Array:
  """`attention` on one device, T being its part of the length where that is split over the mesh axis `axis`."""
  (B, T, H, K), G = qkv.q.shape, qkv.k.shape[2]
  has_blocks, has_prompts = tokens.blocks is not None, tokens.prompts is not None
  parts = 1 if axis is None else jax.lax.axis_size(axis)
  platform = logical_axes.platform()
  on_tpu, on_gpu = platform == "tpu", platform == "gpu"
  if before is not None:  # which no kernel knows of
    impl = "blocked"
  if impl == "splash" or (impl == "auto" and on_tpu):
    reason = attention_tpu.refusal(T, has_blocks, parts, has_prompts, qkv.sinks is not None)
    if reason is None:
      if axis is None:
        return attention_tpu.attend(rule, qkv, tokens.segments, interpret=not on_tpu)
      return attention_tpu.attend_in_parts(rule, qkv, tokens.segments, axis, parts, interpret=not on_tpu)
    attention_tpu.warn(reason)
  if impl == "triton" or (impl == "auto" and on_gpu):
    device = logical_axes.device()
    reason = attention_gpu.refusal(device, rule, qkv, has_blocks, has_prompts)
    if reason is None:
      attend = attention_gpu.on(device)
      if axis is None:
        index = jnp.arange(T)
        return attend(rule, qkv, tokens.queries(index), tokens.keys(index))
      return ring.by_kernel(axis, rule, attend, qkv, tokens)
    gpu.warn("attention", reason)
  qkv = QKV(qkv.q.reshape(B, T, G, H // G, K).transpose(0, 2, 3, 1, 4), qkv.k.transpose(0, 2, 1, 3),
            qkv.v.transpose(0, 2, 1, 3), None if qkv.sinks is None else qkv.sinks.reshape(G, H // G, 1))
  block = max(1, block)
  if axis is None:
    index = jnp.arange(T)
    keys, spans = tokens.keys(index, before), _spans(T, block, rule, not has_blocks)
    if before is not None:
      P = before.segments.shape[1]
      spans = tuple(Span(start, stop, 0, P + last) for start, stop, _, last in spans)
    out = blocked.attend(spans, rule, qkv, tokens.queries(index), keys)
  elif has_blocks or has_prompts or T % 2:
    out = ring.gathered(axis, rule, block, qkv, tokens)
  elif rule.window is not None and rule.window <= T + 1:
    out = ring.neighbours(axis, rule, block, qkv, tokens.segments)
  else:
    out = ring.ring(axis, rule, qkv, tokens.segments)
  return out.transpose(0, 3, 1, 2, 4).reshape(B, T, H, K)


def _spans(T: int, block: int, rule: Rule, causal: bool) -> tuple[Span, ...]:
  """Which keys each block of queries can see: without blocks of tokens none to the right, with a window few."""
  bounded = rule.window is not None and (causal or rule.window_blocks)
  spans = []
  for start in range(0, T, block):
    stop = min(start + block, T)
    spans.append(Span(start, stop, max(0, start - rule.window + 1) if bounded else 0, stop if causal else T))
  return tuple(spans)


def attend_to_past(rule: Rule, q_Bx1xHxK: jax.Array, seen: Seen, active_B: jax.Array, *,
                   sinks_H: jax.Array | None = None, more: tuple[jax.Array, jax.Array] | None = None,
                   impl: str = "auto") -> jax.Array:
  """`attention` of one more token per row to what a cache holds, itself included; returns [B, 1, H, K].

  Args:
    rule: how scores are made; within the window is what `seen` says.
    seen: keys and values of it and the tokens before it, in any order; in the dtype of q, or a wider one.
    active_B: False for rows without a token, whose output is 0.
    sinks_H: see `QKV`.
    more: further dimensions of queries and keys, whose products are added.
    impl: as of `attention`: `triton` and `auto`, which means GPUs alone, take the kernel of past_kernel.py where it
      can, of queries without further dimensions; of pages on one device.
  """
  k_BxGxSxK, v_BxGxSxK, seen_BxS, table = seen
  by_kernel = impl == "triton" or (impl == "auto" and logical_axes.platform() == "gpu")
  if by_kernel and more is None and (table is None or logical_axes.current() is None):
    reason = attention_gpu.refusal_to_past(logical_axes.device(), rule, q_Bx1xHxK, seen)
    if reason is None:
      return _to_past_by_kernel(rule, q_Bx1xHxK, seen, active_B, sinks_H)
    gpu.warn("attention to a cache", reason)
  B, _, H, K = q_Bx1xHxK.shape
  G, f32, dtype = k_BxGxSxK.shape[1], jnp.float32, q_Bx1xHxK.dtype
  pairs = [(q_Bx1xHxK, k_BxGxSxK), *([] if more is None else [more])]
  queries = [q.reshape(B, G, H // G, -1) for q, _ in pairs]
  if table is not None:
    queries = [table.per_page(q_BxGxRxK) for q_BxGxRxK in queries]
  scores_BxGxRxS = rule.scale * sum(jnp.einsum("bgrk,bgsk->bgrs", q, k, preferred_element_type=f32)
                                    for q, (_, k) in zip(queries, pairs, strict=True))
  if rule.logit_cap is not None:
    scores_BxGxRxS = rule.logit_cap * jnp.tanh(scores_BxGxRxS / rule.logit_cap)
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


def _to_past_by_kernel(rule: Rule, q_Bx1xHxK: jax.Array, seen: Seen, active_B: jax.Array, sinks_H: jax.Array | None
                       ) -> jax.Array:
  """`attend_to_past`, each device for its rows and heads."""
  attend = functools.partial(past_kernel.attend, rule, interpret=logical_axes.platform() != "gpu")
  active_BxS = active_B[:, None] if seen.table is None else seen.table.per_page(active_B)[:, None]
  seen = seen._replace(seen_BxS=seen.seen_BxS & active_BxS)
  placed = logical_axes.current()
  if placed is None:
    return attend(q_Bx1xHxK[:, 0], seen, sinks_H=sinks_H)[:, None]

  def local(q_Bx1xHxK, sinks_H, *cache):
    return attend(q_Bx1xHxK[:, 0], Seen(*cache), sinks_H=sinks_H)[:, None]

  # Where key/value heads cannot be split as query heads are, each device has all of both.
  batch, _, heads, _ = placed.spec(("batch", None, "heads", None), q_Bx1xHxK.shape)
  heads = heads if placed.spec((None, "heads"), seen.keys_BxGxSxK.shape[:2])[1] == heads else None
  by_head, cache = PartitionSpec(batch, None, heads), PartitionSpec(batch, heads)
  return jax.shard_map(local, mesh=placed.mesh, out_specs=by_head, check_vma=False, in_specs=(
      by_head, PartitionSpec(heads), cache, cache, PartitionSpec(batch)))(q_Bx1xHxK, sinks_H, *seen[:3])
