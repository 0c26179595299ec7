"""Exact softmax attention between some queries and some keys, forward and backward by hand.

The scores of a few queries at a time are made, reduced, and made again for the gradient, so that never more than those
of one block exist (Rabe and Staats 2021, arXiv 2112.05682; Dao et al. 2022, arXiv 2205.14135). Results over some of the
keys are `Partial`s, which `merge` into the result over all of them: attention may see its keys in any order and from
any device.

Few blocks of queries, with all keys that each may see, are unrolled; on longer rows loops go over tiles of queries and
of keys instead. Neither the program nor what it holds at a time then grows with the length, and tiles that have no
segment in common are passed over.

B batch, G key/value heads, R query heads for each, T queries, W keys, K head size.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models import cpu
from models.attention.mask import QKV, Rule, Side, ends, keys_of, meet, seen
from models.remat import named
from models.sharding import logical_axes

# Far below any score, yet finite: exp(MASKED - top) is exactly 0, with a gradient of exactly 0.
MASKED = -1e30
# On CPU, so many bytes of scores at a time: they stay in a core's cache between the products.
CACHED_BYTES = 2**20
# More spans than these are not unrolled: on CPU, where cores share out unrolled ones better but loops cost no more;
# and elsewhere, where one that ends when it will has its price.
MAX_UNROLLED, MAX_UNROLLED_ELSEWHERE = 4, 32
# Queries, and keys, of a tile: on CPU, times those of a span; and elsewhere.
SPANS_OF_TILE, TILE = 2, 1024
# Around a loop whose length depends on the data is a scope of this name and of how often it runs at most (over the keys
# of a tile of queries: on average, where no segment is passed over): who counts operations cannot see it otherwise.
TIMES = "runs_at_most_"


class Span(NamedTuple):
  """Queries [start, stop) see nothing but keys [first, last)."""

  start: int
  stop: int
  first: int
  last: int


class Partial(NamedTuple):
  """Softmax attention over some of the keys, up to the normaliser: float32."""

  # Σ exp(score - top) v, [B, G, R, T, K].
  out: jax.Array
  # Any number close to the largest score, and Σ exp(score - top): [B, G, R, T].
  top: jax.Array
  total: jax.Array


class OfOutput(NamedTuple):
  """What gradients are made of beside queries, keys and values, for each query."""

  # Log-sum-exp of the scores over all keys, of `finish`, [B, G, R, T].
  lse: jax.Array
  # The output times its gradient, [B, G, R, T], and that gradient, [B, G, R, T, K], of `prepare_backward`.
  delta: jax.Array
  dout: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(spans: tuple[Span, ...], rule: Rule, qkv: QKV, queries: Side, keys: Side) -> jax.Array:
  """Attention of q [B, G, R, T, K] to k, v [B, G, W, K]: [B, G, R, T, K] in the dtype of v, 0 at padding.

  `spans` cover the queries in order; what they leave out is not seen, and never computed. Sinks: see `with_sinks`.
  """
  return _attend_fwd(spans, rule, qkv, queries, keys)[0]


def _attend_fwd(spans, rule, qkv, queries, keys):
  q, k, v, sinks = qkv
  # Rounded once, at the end.
  kind = v.dtype if sinks is None else jnp.float32

  def some(arrays, queries, keys):
    q, k, v = arrays
    if (size := _tile_size(spans)) is not None:
      return _forward_by_tiles(spans, size, rule, QKV(q, k, v), queries, keys, kind)
    parts = []
    for span in spans:
      sides = _cut_queries(queries, span.start, span.stop), _cut_keys(keys, span)
      part = forward(rule, q[:, :, :, span.start:span.stop], *(x[:, :, span.first:span.last] for x in (k, v)), *sides)
      parts.append(finish(part, sides[0], kind))
    return tuple(jnp.concatenate(pieces, axis=3) if len(spans) > 1 else pieces[0]
                 for pieces in zip(*parts, strict=True))

  out, lse = _few_heads_at_a_time(some, spans, queries, keys, q, k, v)
  if sinks is not None:
    out, lse = with_sinks(sinks, out, lse, queries, v.dtype)
  out, lse = named((out, lse), "attention", in_rule=True)
  return out, (qkv, queries, keys, out, lse)


def _attend_bwd(spans, rule, saved, dout):
  (q, k, v, sinks), queries, keys, out, lse = saved

  def some(arrays, queries, keys):
    q, k, v, out, lse, dout = arrays
    dout, delta = prepare_backward(out, dout, queries)
    if (size := _tile_size(spans)) is not None:
      return _backward_by_tiles(spans, size, rule, QKV(q, k, v), queries, keys, OfOutput(lse, delta, dout))
    dq, dk, dv = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for span in spans:
      mine, seen = slice(span.start, span.stop), slice(span.first, span.last)
      dq_part, dk_part, dv_part = backward(
          rule, QKV(q[:, :, :, mine], k[:, :, seen], v[:, :, seen]), _cut_queries(queries, span.start, span.stop),
          _cut_keys(keys, span), OfOutput(lse[:, :, :, mine], delta[:, :, :, mine], dout[:, :, :, mine]))
      dq.append(dq_part)
      dk, dv = (_add(total, part, span.first, 2) for total, part in ((dk, dk_part), (dv, dv_part)))
    dq = jnp.concatenate(dq, axis=3) if len(spans) > 1 else dq[0]
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

  dsinks = None if sinks is None else gradient_of_sinks(sinks, lse, prepare_backward(out, dout, queries)[1])
  return QKV(*_few_heads_at_a_time(some, spans, queries, keys, q, k, v, out, lse, dout), dsinks), None, None


def _few_heads_at_a_time(some: Callable, spans: tuple[Span, ...], queries: Side, keys: Side, *arrays: jax.Array
                         ) -> tuple[jax.Array, ...]:
  """`some(arrays, queries, keys)` of arrays [B, G, …]: on CPU, of as many heads at a time as CACHED_BYTES allow."""
  B, G, R = arrays[0].shape[:3]
  size = _tile_size(spans)
  scores = 4 * R * (max((span.stop - span.start) * (span.last - span.first) for span in spans) if size is None
                    else size * size)
  at_once = next(n for n in range(B * G, 0, -1) if B * G % n == 0 and (n == 1 or n * scores <= CACHED_BYTES))
  if logical_axes.platform() != "cpu" or at_once == B * G:
    return some(arrays, queries, keys)

  def part(parts):
    arrays, queries, keys = parts
    return tuple(map(cpu.as_bits, some(map(cpu.from_bits, arrays), queries, keys)))

  def by_head(x: jax.Array) -> jax.Array:
    return cpu.as_bits(x).reshape(-1, at_once, 1, *x.shape[2:])

  def of_heads(side: Side, number: int) -> Side:
    """A side for each group of heads."""
    return Side(*(x if x is None else jnp.broadcast_to(x, (number, *x.shape)) if x.ndim == 1 else
                  jnp.repeat(x, G, axis=0).reshape(number, at_once, -1) for x in side))

  sides = (of_heads(side, B * G // at_once) for side in (queries, keys))
  outs = jax.lax.map(part, (tuple(map(by_head, arrays)), *sides))
  return tuple(cpu.from_bits(x).reshape(B, G, *x.shape[3:]) for x in outs)


attend.defvjp(_attend_fwd, _attend_bwd)


def _tile_size(spans: tuple[Span, ...]) -> int | None:
  """How many queries, and keys, a tile has; None: spans are unrolled."""
  on_cpu = logical_axes.platform() == "cpu"
  if len(spans) <= (MAX_UNROLLED if on_cpu else MAX_UNROLLED_ELSEWHERE):
    return None
  block = spans[0].stop - spans[0].start
  return SPANS_OF_TILE * block if on_cpu else max(block, TILE)


class _Tiles:
  """Queries or keys, and what goes with them, in tiles of `size`. After the last token come some of no segment."""

  def __init__(self, size: int, side: Side, *arrays: jax.Array):
    """`arrays`: of queries [B, G, R, T, …], of keys [B, G, W, K]."""
    self._size, self._at = size, 2 if arrays[0].ndim == 4 else 3
    self._arrays = [self._whole(x, self._at) for x in arrays]
    side = jax.tree.map(lambda ids: self._whole(ids, ids.ndim - 1), side)
    self.side = side._replace(segments=keys_of(side.segments)) if self._at == 2 else side

  def __len__(self) -> int:
    return self.side.index.shape[-1] // self._size

  def at(self, number: jax.Array) -> tuple[Side, list[jax.Array]]:
    """That tile."""
    side = jax.tree.map(lambda ids: self._cut(ids, number, ids.ndim - 1), self.side)
    return side, [self._cut(x, number, self._at) for x in self._arrays]

  def zeros(self) -> list[jax.Array]:
    """Of each array, float32."""
    return [jnp.zeros(x.shape, jnp.float32) for x in self._arrays]

  def _whole(self, x: jax.Array, at: int) -> jax.Array:
    return jnp.pad(x, [(0, -size % self._size if d == at else 0) for d, size in enumerate(x.shape)])

  def _cut(self, x: jax.Array, number: jax.Array, at: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, number * self._size, self._size, axis=at)


def _forward_by_tiles(spans: tuple[Span, ...], size: int, rule: Rule, qkv: QKV, queries: Side, keys: Side, kind: Any
                      ) -> tuple[jax.Array, jax.Array]:
  """`finish` of all queries, the output as `kind`."""
  of_queries, of_keys = _Tiles(size, queries, qkv.q), _Tiles(size, keys, qkv.k, qkv.v)
  seen = _TilesSeen(spans, size, of_queries, of_keys)

  def one(n: jax.Array) -> tuple[jax.Array, jax.Array]:
    mine, (q,) = of_queries.at(n)

    def see(m: jax.Array) -> Partial:
      theirs, (k, v) = of_keys.at(m)
      return forward(rule, q, k, v, mine, theirs)

    return finish(seen.loop(n, see, lambda m, so_far: merge(so_far, see(m))), mine, kind)

  out, lse = jax.lax.map(one, jnp.arange(len(of_queries)))
  T = qkv.q.shape[3]
  return _joined(out, T), _joined(lse, T)


def _backward_by_tiles(spans: tuple[Span, ...], size: int, rule: Rule, qkv: QKV, queries: Side, keys: Side,
                       of_output: OfOutput) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The gradients of q, k and v, in their dtypes."""
  (q, k, v, _), of_keys = qkv, _Tiles(size, keys, qkv.k, qkv.v)
  of_queries = _Tiles(size, queries, q, *of_output)
  seen = _TilesSeen(spans, size, of_queries, of_keys)

  def one(gradients: list[jax.Array], n: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    mine, (q, *rest) = of_queries.at(n)

    def see(m: jax.Array, of_keys_so_far: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
      theirs, (k, v) = of_keys.at(m)
      dq, *more = backward(rule, QKV(q, k, v), mine, theirs, OfOutput(*rest))
      return dq, [_add(total, part, m * size, 2) for total, part in zip(of_keys_so_far, more, strict=True)]

    def also(m: jax.Array, so_far: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
      dq, of_keys_so_far = see(m, so_far[1])
      return so_far[0] + dq, of_keys_so_far

    dq_tile, gradients = seen.loop(n, lambda m: see(m, gradients), also)
    return gradients, dq_tile.astype(q.dtype)

  (dk, dv), dq = jax.lax.scan(one, of_keys.zeros(), jnp.arange(len(of_queries)))
  W = k.shape[2]
  return _joined(dq, q.shape[3]), dk[:, :, :W].astype(k.dtype), dv[:, :, :W].astype(v.dtype)


def _add(total: jax.Array, part: jax.Array, first: jax.Array | int, axis: int) -> jax.Array:
  """`total` with `part` added to what begins there. Not `.at[first:...].add`: of constant places it is a scatter with
  an empty array of indices, over which XLA of jaxlib 0.11 crashes on a mesh."""
  there = jax.lax.dynamic_slice_in_dim(total, first, part.shape[axis], axis)
  return jax.lax.dynamic_update_slice_in_dim(total, there + part, first, axis)


class _TilesSeen:
  """Which tiles of keys those of queries may see: those that spans allow, without those before the first and after the
  last between whose segments, from the least to the largest, there is one in common."""

  def __init__(self, spans: tuple[Span, ...], size: int, queries: _Tiles, keys: _Tiles):
    spanned_NxM = np.zeros((len(queries), len(keys)), bool)
    for span in spans:
      spanned_NxM[span.start // size:-(-span.stop // size), span.first // size:-(-span.last // size)] = True
    self._times = spanned_NxM.sum() / len(queries)
    of_keys = ends(keys.side.segments, size)
    seen_BxNxM = meet(ends(queries.side.segments, size), of_keys)
    if queries.side.prompts is not None:
      seen_BxNxM |= meet(ends(queries.side.prompts, size), of_keys)
    seen_NxM = seen_BxNxM.any(0) & spanned_NxM
    behind_N = jnp.argmax(seen_NxM[:, ::-1], axis=1)
    self.first_N = jnp.argmax(seen_NxM, axis=1)
    self.last_N = jnp.where(seen_NxM.any(1), len(keys) - behind_N, self.first_N)

  def loop(self, n: jax.Array, see: Callable, also: Callable) -> Any:
    """`carry = see(m)` for the last tile of keys that tile n of queries sees, then `carry = also(m, carry)` for each
    before it. Of a tile of padding something is computed."""
    last = jnp.maximum(self.last_N[n] - 1, 0)
    with jax.named_scope(f"{TIMES}{self._times - 1:.6g}"):
      return jax.lax.fori_loop(self.first_N[n], last, also, see(last))


def _joined(tiles: jax.Array, length: int) -> jax.Array:
  """[N, B, G, R, tile, …] as [B, G, R, T, …]."""
  tiles = jnp.moveaxis(tiles, 0, 3)
  return tiles.reshape(*tiles.shape[:3], -1, *tiles.shape[5:])[:, :, :, :length]


def forward(rule: Rule, q: jax.Array, k: jax.Array, v: jax.Array, queries: Side, keys: Side) -> Partial:
  """Attention of the queries to these keys alone."""
  scores = _scores(rule, q, k, queries, keys)[0]
  top = scores.max(2)
  weights = jnp.exp(scores - top[:, :, None])
  out = cpu.einsum("bgkw,bgwrt->bgkrt", v.swapaxes(2, 3), weights.astype(v.dtype))
  return Partial(out.transpose(0, 1, 3, 4, 2), top, weights.sum(2))


def merge(a: Partial, b: Partial) -> Partial:
  """Attention to the keys of both."""
  top = jnp.maximum(a.top, b.top)
  of_a, of_b = jnp.exp(a.top - top), jnp.exp(b.top - top)
  out = a.out * of_a[..., None] + b.out * of_b[..., None]
  return Partial(out, top, a.total * of_a + b.total * of_b)


def finish(part: Partial, queries: Side, dtype) -> tuple[jax.Array, jax.Array]:
  """(output [B, G, R, T, K]; log-sum-exp of the scores [B, G, R, T], float32), both 0 at padding."""
  # Every query sees itself, except padding, which sees nothing.
  real = _real(queries)
  out = jnp.where(real, part.out / part.total[..., None], 0.0).astype(dtype)
  return out, jnp.where(real[..., 0], part.top + jnp.log(part.total), 0.0)


def with_sinks(sinks: jax.Array, out: jax.Array, lse: jax.Array, queries: Side, dtype: Any
               ) -> tuple[jax.Array, jax.Array]:
  """`finish` where each head has one more score, its sink, that no key or value goes with (gpt-oss): it is a term of
  the normaliser alone. What is computed backward of these two is then right for q, k and v as it stands.

  Args:
    sinks: [G, R, 1], float32.
    out, lse: of `finish` over the keys alone.
    queries: whose they are.
    dtype: of the output.
  """
  real = _real(queries)[..., 0]
  both = jnp.where(real, jnp.logaddexp(lse, sinks), 0.0)
  return (out.astype(jnp.float32) * jnp.exp(lse - both)[..., None]).astype(dtype), both


def gradient_of_sinks(sinks: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
  """Of the sinks, for lse and delta of `with_sinks` and `prepare_backward`; the last axis is the queries'."""
  weights = jnp.exp(jnp.minimum(sinks - lse, 0.0))  # at padding, whose delta is 0, it could be anything
  return -jnp.sum(weights * delta, axis=(0, -1))[..., None]


def prepare_backward(out: jax.Array, dout: jax.Array, queries: Side) -> tuple[jax.Array, jax.Array]:
  """(gradient of the output, 0 at padding; its product with the output for each query, float32 [B, G, R, T])."""
  dout = jnp.where(_real(queries), dout, jnp.zeros((), dout.dtype))
  return dout, jnp.einsum("bgrtk,bgrtk->bgrt", out, dout, preferred_element_type=jnp.float32)


def backward(rule: Rule, qkv: QKV, queries: Side, keys: Side, of_output: OfOutput
             ) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The gradients of q, k and v as far as these queries and keys have part in them, float32."""
  (q, k, v, _), (lse, delta, dout) = qkv, of_output
  scores, slope = _scores(rule, q, k, queries, keys)
  weights = jnp.exp(scores - lse[:, :, None])
  dv = cpu.einsum("bgwrt,bgrtk->bgwk", weights.astype(v.dtype), dout)
  dweights = cpu.einsum("bgwk,bgkrt->bgwrt", v, _by_size(dout))
  dscores = weights * (dweights - delta[:, :, None]) * rule.scale
  if slope is not None:
    dscores = dscores * slope
  dscores = dscores.astype(q.dtype)
  dq = cpu.einsum("bgkw,bgwrt->bgkrt", k.swapaxes(2, 3), dscores)
  dk = cpu.einsum("bgwrt,bgrtk->bgwk", dscores, q)
  return dq.transpose(0, 1, 3, 4, 2), dk, dv


def _by_size(q: jax.Array) -> jax.Array:
  """[B, G, R, T, K] as [B, G, K, R, T]"""
  return q.transpose(0, 1, 4, 2, 3)


def _scores(rule: Rule, q, k, queries: Side, keys: Side) -> tuple[jax.Array, jax.Array | None]:
  """(scores [B, G, W, R, T] float32, far below any other where a key is not seen; slope of the cap, None without).

  With keys first, so that maxima and sums over keys add up whole vectors, and that of the five products backward
  none reads the scores across.
  """
  scores = cpu.einsum("bgwk,bgkrt->bgwrt", k, _by_size(q)) * rule.scale
  slope = None
  if rule.logit_cap is not None:
    bent = jnp.tanh(scores / rule.logit_cap)
    scores, slope = rule.logit_cap * bent, 1.0 - jnp.square(bent)
  # Added, not selected: a number that swallows any score.
  hidden_BxWxT = jnp.where(seen(rule, queries, keys), 0.0, MASKED)
  return scores + hidden_BxWxT[:, None, :, None], slope


def _real(queries: Side) -> jax.Array:
  return (queries.segments != 0)[:, None, None, :, None]


def _cut_queries(side: Side, start: int, stop: int) -> Side:
  return Side(*(None if x is None else x[..., start:stop] for x in side))


def _cut_keys(side: Side, span: Span) -> Side:
  return _cut_queries(side, span.first, span.last)
