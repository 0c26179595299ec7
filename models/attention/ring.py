"""Attention where the length of rows is split over devices: context parallelism.

Each function runs on every device of a mesh axis (inside `jax.shard_map`) with its own part of the rows, the c-th of C
parts of N tokens each. Only attention needs other parts' tokens; everything else in a model treats tokens alone.

  ring        causal rows. Keys and values travel round the devices (Liu et al. 2023, arXiv 2310.01889) while each
              device attends to those that it has. Of a causal row the last part would have all the work, so each
              device works on one half part from the front and one from the back, c and 2C - 1 - c (zigzag order, as in
              Brandon et al. 2023, arXiv 2311.09431): every device then does the same at every step, with no masked
              score beyond the diagonal. Queries, keys and values are put into that order, and outputs back, by one
              exchange; the rest of the model sees rows in their own order.
  neighbours  a window that is no longer than a part: each device needs the end of the part before its own.
  gathered    whatever may see keys anywhere (blocks that see each other both ways, prompts that several completions
              share): all keys and values on all devices.
  by_kernel   where a kernel takes queries and keys of any places: all keys and values on all devices, unless a window
              is shorter than a part; queries in zigzag order, so that causal rows are shared evenly.

B batch, G key/value heads, R query heads for each, N tokens of a part, h = N / 2, K head size.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from models.attention import blocked, mask
from models.attention.blocked import OfOutput, Partial, Span
from models.attention.mask import QKV, Rule, Side, TokenIds
from models.remat import named

# Bytes of the scores that one product of the ring may hold; more are computed a few queries at a time.
SCORE_BYTES = 64 * 2**20


def gathered(axis: Any, rule: Rule, block: int, qkv: QKV, tokens: TokenIds) -> jax.Array:
  """Attention of a part's queries to the keys of all parts; arguments as in `neighbours`."""
  N, part = qkv.q.shape[3], jax.lax.axis_index(axis)
  everything = functools.partial(jax.lax.all_gather, axis_name=axis, tiled=True)
  qkv = qkv._replace(k=everything(qkv.k, axis=2), v=everything(qkv.v, axis=2))
  whole, S = everything(tokens.segments, axis=1), qkv.k.shape[2]
  queries = tokens.queries(part * N + jnp.arange(N))
  blocks = None if tokens.blocks is None else everything(tokens.blocks, axis=1)
  keys = Side(mask.keys_of(whole), jnp.arange(S), blocks)
  spans = tuple(Span(start, min(start + block, N), 0, S) for start in range(0, N, block))
  return blocked.attend(spans, rule, qkv, queries, keys)


def neighbours(axis: Any, rule: Rule, block: int, qkv: QKV, segments: jax.Array) -> jax.Array:
  """Attention within a window of at most N + 1 tokens.

  Args:
    axis: the mesh axis (or axes) that rows are split over.
    rule: with a window.
    block: queries computed at a time.
    qkv: queries [B, G, R, N, K], keys and values [B, G, N, K].
    segments: int32 [B, N]; 0 is padding.
  """
  N, before = qkv.q.shape[3], rule.window - 1
  queries, keys = _sides_of_neighbours(axis, before, segments)
  # Query s is key before + s, and sees the `before` keys that precede it.
  spans = tuple(Span(start, min(start + block, N), start, before + min(start + block, N))
                for start in range(0, N, block))
  k, v = (_with_end_of_last(axis, before, x, 2) for x in (qkv.k, qkv.v))
  return blocked.attend(spans, rule, qkv._replace(k=k, v=v), queries, keys)


def _with_end_of_last(axis: Any, before: int, x: jax.Array, at: int) -> jax.Array:
  """`x` after the last `before` along `at` of the part before; of the first part, of the row's end."""
  C, N = jax.lax.axis_size(axis), x.shape[at]
  end = jax.lax.slice_in_dim(x, N - before, N, axis=at)
  return jnp.concatenate([jax.lax.ppermute(end, axis, [(c, (c + 1) % C) for c in range(C)]), x], axis=at)


def _sides_of_neighbours(axis: Any, before: int, segments: jax.Array) -> tuple[Side, Side]:
  """A part's queries, and its keys with those of `_with_end_of_last`."""
  N = segments.shape[1]
  own, seen = jnp.arange(-before, N), mask.keys_of(_with_end_of_last(axis, before, segments, 1))
  # What comes round to the first part is the end of the row, which it must not see.
  seen = jnp.where((jax.lax.axis_index(axis) == 0) & (own < 0), -1, seen)
  return Side(segments, jnp.arange(N), None), Side(seen, own, None)


def by_kernel(axis: Any, rule: Rule, attend: Callable, qkv: QKV, tokens: TokenIds) -> jax.Array:
  """Attention by `attend(rule, qkv, queries, keys)` of queries and keys of any places; [B, N, H, K].

  Gradients of keys and values are rounded to their dtype once for each device that saw them.

  Args:
    qkv: queries [B, N, H, K], keys and values [B, N, G, K].
    tokens: this device's parts.
  """
  N = tokens.segments.shape[1]
  if rule.window is not None and rule.window <= N + 1 and tokens.blocks is None and tokens.prompts is None:
    before = rule.window - 1
    k, v = (_with_end_of_last(axis, before, x, 1) for x in (qkv.k, qkv.v))
    return attend(rule, qkv._replace(k=k, v=v), *_sides_of_neighbours(axis, before, tokens.segments))
  everything = functools.partial(jax.lax.all_gather, axis_name=axis, axis=1, tiled=True)
  k, v, whole, all_blocks = jax.tree.map(everything, (qkv.k, qkv.v, tokens.segments, tokens.blocks))
  qkv = qkv._replace(k=k, v=v)
  keys = Side(mask.keys_of(whole), jnp.arange(whole.shape[1]), all_blocks)
  if N % 2:
    return attend(rule, qkv, tokens.queries(jax.lax.axis_index(axis) * N + jnp.arange(N)), keys)
  order = _Zigzag(axis, N)
  q, tokens = jax.tree.map(lambda x: jnp.concatenate(order.halves(x, 1), axis=1), (qkv.q, tokens))
  out = attend(rule, qkv._replace(q=q), tokens.queries(jnp.concatenate([order.first, order.second])), keys)
  first, second = jnp.split(out, 2, axis=1)
  return order.whole(first, second, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def ring(axis: Any, rule: Rule, qkv: QKV, segments: jax.Array) -> jax.Array:
  """Causal attention; arguments as in `neighbours`, with an even N."""
  return _ring_fwd(axis, rule, qkv, segments)[0]


def _ring_fwd(axis, rule, qkv, segments):
  q, k, v, sinks = qkv
  order = _Zigzag(axis, segments.shape[1])
  (q1, q2), (k1, k2), (v1, v2) = order.halves(q, 3), order.halves(k, 2), order.halves(v, 2)
  segments1, segments2 = order.halves(segments, 1)
  queries1, queries2 = Side(segments1, order.first, None), Side(segments2, order.second, None)
  near, far = rule, rule._replace(causal=False)

  def keys(part, halves):
    return [Side(mask.keys_of(s), index, None) for s, index in zip(halves, order.places(part), strict=True)]

  # Its own keys first, so that every query has seen one.
  keys1, keys2 = keys(order.part, (segments1, segments2))
  first = _forward(near, q1, k1, v1, queries1, keys1)
  second = blocked.merge(_forward(far, q2, k1, v1, queries2, keys1), _forward(near, q2, k2, v2, queries2, keys2))

  def step(carry, distance):
    first, second, travelling = carry
    travelling = order.pass_on(travelling)
    (k1, k2), (v1, v2), halves = travelling
    part = (order.part - distance) % order.parts
    keys1, keys2 = keys(part, halves)
    second = blocked.merge(second, _forward(far, q2, k1, v1, queries2, keys1))
    # From a part before its own, the first half is seen by both; from one after it, both halves by the second.
    earlier = part < order.part
    some = _choose(earlier, (q1, queries1, k1, v1, keys1), (q2, queries2, k2, v2, keys2))
    more = _forward(far, some[0], some[2], some[3], some[1], some[4])
    first = _choose(earlier, blocked.merge(first, more), first)
    second = _choose(earlier, second, blocked.merge(second, more))
    return (first, second, travelling), None

  carry = (first, second, ((k1, k2), (v1, v2), (segments1, segments2)))
  (first, second, _), _ = jax.lax.scan(step, carry, jnp.arange(1, order.parts))

  def finish(part, queries):
    if sinks is None:
      return blocked.finish(part, queries, v.dtype)
    return blocked.with_sinks(sinks, *blocked.finish(part, queries, jnp.float32), queries, v.dtype)

  halves = finish(first, queries1), finish(second, queries2)
  (out1, lse1), (out2, lse2) = named(halves, "attention", in_rule=True)
  return order.whole(out1, out2, 3), (qkv, segments, (out1, out2), (lse1, lse2))


def _ring_bwd(axis, rule, saved, dout):
  (q, k, v, sinks), segments, outs, lses = saved
  order = _Zigzag(axis, segments.shape[1])
  (q1, q2), (k1, k2), (v1, v2) = order.halves(q, 3), order.halves(k, 2), order.halves(v, 2)
  segments1, segments2 = order.halves(segments, 1)
  queries = Side(segments1, order.first, None), Side(segments2, order.second, None)
  near, far = rule, rule._replace(causal=False)
  (dout1, delta1), (dout2, delta2) = (blocked.prepare_backward(out, half, side) for out, half, side in zip(
      outs, order.halves(dout, 3), queries, strict=True))
  dsinks = None if sinks is None else sum(
      blocked.gradient_of_sinks(sinks, lse, delta) for lse, delta in zip(lses, (delta1, delta2), strict=True))
  mine1 = q1, queries[0], OfOutput(lses[0], delta1, dout1)
  mine2 = q2, queries[1], OfOutput(lses[1], delta2, dout2)

  def keys(part, halves):
    return [Side(mask.keys_of(s), index, None) for s, index in zip(halves, order.places(part), strict=True)]

  keys1, keys2 = keys(order.part, (segments1, segments2))
  dq1, dk1, dv1 = _backward(near, mine1, k1, v1, keys1)
  dq2, dk2, dv2 = _backward(near, mine2, k2, v2, keys2)
  dq, dk, dv = _backward(far, mine2, k1, v1, keys1)
  gradients = ((dk1 + dk, dk2), (dv1 + dv, dv2))

  def step(carry, distance):
    dq1, dq2, travelling, gradients = carry
    travelling, gradients = order.pass_on(travelling), order.pass_on(gradients)
    (k1, k2), (v1, v2), halves = travelling
    (dk1, dk2), (dv1, dv2) = gradients
    part = (order.part - distance) % order.parts
    keys1, keys2 = keys(part, halves)
    dq, dk, dv = _backward(far, mine2, k1, v1, keys1)
    dq2, dk1, dv1 = dq2 + dq, dk1 + dk, dv1 + dv
    earlier = part < order.part
    mine, k, v, side = _choose(earlier, (mine1, k1, v1, keys1), (mine2, k2, v2, keys2))
    dq, dk, dv = _backward(far, mine, k, v, side)
    dq1, dq2 = _choose(earlier, (dq1 + dq, dq2), (dq1, dq2 + dq))
    gradients = _choose(earlier, ((dk1 + dk, dk2), (dv1 + dv, dv2)), ((dk1, dk2 + dk), (dv1, dv2 + dv)))
    return (dq1, dq2, travelling, gradients), None

  carry = (dq1, dq2 + dq, ((k1, k2), (v1, v2), (segments1, segments2)), gradients)
  (dq1, dq2, _, gradients), _ = jax.lax.scan(step, carry, jnp.arange(1, order.parts))
  (dk1, dk2), (dv1, dv2) = order.pass_on(gradients)  # home
  return QKV(order.whole(dq1, dq2, 3).astype(q.dtype), order.whole(dk1, dk2, 2).astype(k.dtype),
             order.whole(dv1, dv2, 2).astype(v.dtype), dsinks), None


ring.defvjp(_ring_fwd, _ring_bwd)


class _Zigzag:
  """Rows of C parts in natural order, and in halves such that device c has those numbered c and 2C - 1 - c."""

  def __init__(self, axis: Any, length: int):
    self.axis, self.parts, self.part, self._half = axis, jax.lax.axis_size(axis), jax.lax.axis_index(axis), length // 2
    homes = [min(half, 2 * self.parts - 1 - half) for half in range(2 * self.parts)]
    # Where the even and the odd halves go: each device gets one of either kind.
    self._even = [(c, homes[2 * c]) for c in range(self.parts)]
    self._odd = [(c, homes[2 * c + 1]) for c in range(self.parts)]
    self.first, self.second = self.places(self.part)

  def places(self, part: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The places in the row of a device's two halves, int32 [h] each."""
    within = jnp.arange(self._half)
    return part * self._half + within, (2 * self.parts - 1 - part) * self._half + within

  def halves(self, x: jax.Array, at: int) -> tuple[jax.Array, jax.Array]:
    """This device's half from the front and its half from the back, of `x` split in natural order along `at`."""
    even, odd = jnp.split(x, 2, axis=at)
    even, odd = jax.lax.ppermute(even, self.axis, self._even), jax.lax.ppermute(odd, self.axis, self._odd)
    # Device c has half c from the front, which is even where c is.
    return _choose(self.part % 2 == 0, (even, odd), (odd, even))

  def whole(self, first: jax.Array, second: jax.Array, at: int) -> jax.Array:
    """The way back."""
    even, odd = _choose(self.part % 2 == 0, (first, second), (second, first))
    even = jax.lax.ppermute(even, self.axis, [(b, a) for a, b in self._even])
    odd = jax.lax.ppermute(odd, self.axis, [(b, a) for a, b in self._odd])
    return jnp.concatenate([even, odd], axis=at)

  def pass_on(self, tree: Any) -> Any:
    """What the device before this one has."""
    return jax.lax.ppermute(tree, self.axis, [(c, (c + 1) % self.parts) for c in range(self.parts)])


def _choose(condition: jax.Array, yes: Any, no: Any) -> Any:
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def _forward(rule: Rule, q, k, v, queries: Side, keys: Side) -> Partial:
  """`blocked.forward`, a few queries at a time where there would be many scores."""
  steps = _steps(q, k)
  if steps == 1:
    return blocked.forward(rule, q, k, v, queries, keys)

  def some(step):
    q, segments, index = step
    return blocked.forward(rule, q, k, v, Side(segments, index, None), keys)

  parts = jax.lax.map(some, (_cut(q, 3, steps), _cut(queries.segments, 1, steps), _cut(queries.index, 0, steps)))
  return Partial(*(_join(part, 3) for part in parts))


def _backward(rule: Rule, mine: tuple, k, v, keys: Side) -> tuple[jax.Array, jax.Array, jax.Array]:
  """`blocked.backward`, a few queries at a time; `mine`: (q, queries, `OfOutput`)."""
  q, queries, of_output = mine
  steps = _steps(q, k)
  if steps == 1:
    return blocked.backward(rule, QKV(q, k, v), queries, keys, of_output)

  def some(gradients, step):
    q, segments, index, *rest = step
    dq, dk, dv = blocked.backward(rule, QKV(q, k, v), Side(segments, index, None), keys, OfOutput(*rest))
    return (gradients[0] + dk, gradients[1] + dv), dq

  steps_of = (_cut(q, 3, steps), _cut(queries.segments, 1, steps), _cut(queries.index, 0, steps),
              *(_cut(x, 3, steps) for x in of_output))
  zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
  (dk, dv), dq = jax.lax.scan(some, zeros, steps_of)
  return _join(dq, 3), dk, dv


def _steps(q: jax.Array, k: jax.Array) -> int:
  """Into how many parts the queries are cut: a power of two, as few as SCORE_BYTES allows."""
  steps, T = 1, q.shape[3]
  while 4 * q.size // q.shape[-1] * k.shape[2] // steps > SCORE_BYTES and T % (2 * steps) == 0:
    steps *= 2
  return steps


def _cut(x: jax.Array, at: int, steps: int) -> jax.Array:
  shape = (*x.shape[:at], steps, x.shape[at] // steps, *x.shape[at + 1:])
  return jnp.moveaxis(x.reshape(shape), at, 0)


def _join(x: jax.Array, at: int) -> jax.Array:
  x = jnp.moveaxis(x, 0, at)
  return x.reshape(*x.shape[:at], -1, *x.shape[at + 2:])
