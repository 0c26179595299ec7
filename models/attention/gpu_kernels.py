"""Exact softmax attention as kernels for GPUs, in Pallas's Triton dialect: models/attention/blocked.py on the chip.

B batch, T queries, S keys, H query heads, G key/value heads, R = H / G, K head size; N tiles of queries, M of keys.

As FlashAttention-2 (Dao 2023, arXiv 2307.08691): a tile of queries goes over the tiles of keys with a running maximum
and sum, and scores never leave the chip; backward, they are made again from the log-normalisers, by tiles of queries
for the queries' gradient, by tiles of keys for theirs. Which tiles have something to see is told to the kernels by
numbers (`_runs`), so that other documents, what lies behind a window and what comes later cost nothing; and within
these, which tiles need no mask.

Everything that models/attention/blocked.py knows of is kept: windows, caps, prompts that several completions share,
tokens that see each other both ways, and queries and keys of any places in a row, as parts of it need that are on
several devices.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models.attention import mask
from models.attention.blocked import MASKED, OfOutput, gradient_of_sinks
from models.attention.mask import QKV, Rule, Side
from models.remat import named

# exp(x) is exp2(x LOG2E), which the hardware has.
LOG2E = math.log2(math.e)


class Sizes(NamedTuple):
  """Of one kernel: queries and keys of a tile, warps, and how many tiles ahead are fetched."""

  queries: int
  keys: int
  warps: int
  stages: int


class Tiles(NamedTuple):
  """The sizes of each kernel; static."""

  forward: Sizes
  to_queries: Sizes
  to_keys: Sizes


# From that head size on, for chips whose warps share little memory, and for those with at least LARGE bytes of it: as
# large as they may be before the compiler keeps much of them outside of registers.
LARGE, SHARED_BYTES = 160 * 1024, 99 * 1024
TILES = {
    16: (Tiles(Sizes(128, 64, 4, 2), Sizes(128, 64, 8, 2), Sizes(64, 64, 4, 2)),
         Tiles(Sizes(128, 64, 4, 3), Sizes(128, 64, 8, 2), Sizes(64, 128, 8, 2))),
    128: (Tiles(Sizes(64, 64, 4, 2), Sizes(64, 32, 4, 2), Sizes(32, 64, 4, 2)),
          Tiles(Sizes(128, 64, 8, 3), Sizes(128, 64, 8, 2), Sizes(64, 128, 8, 2))),
    256: (Tiles(Sizes(64, 32, 8, 1), Sizes(32, 32, 8, 1), Sizes(32, 32, 8, 1)),
          Tiles(Sizes(64, 64, 8, 2), Sizes(64, 32, 8, 2), Sizes(32, 64, 8, 2))),
}


def attend(rule: Rule, qkv: QKV, queries: Side, keys: Side, *, shared_bytes: int = SHARED_BYTES,
           interpret: bool = False) -> jax.Array:
  """`blocked.attend` in the layout of models: [B, T, H, K] in the dtype of `v`, 0 at padding.

  Args:
    rule: how scores are made, and who sees whom.
    qkv: queries [B, T, H, K], keys and values [B, S, G, K]; H is a multiple of G. Sinks: see `blocked.with_sinks`.
    queries, keys: which they are; `keys.segments` are those of `mask.keys_of`.
    shared_bytes: of the memory that the warps of a tile share, for which tiles are chosen.
    interpret: run without a GPU.
  """
  (_, T, _, K), S = qkv.q.shape, qkv.k.shape[1]
  head = _power_of_two(max(K, 16))
  tiles = _tiles(head, T, S, shared_bytes)
  # Whole tiles, of heads whose size is a power of two; what is added is of no segment.
  step_q, step_k = max(sizes.queries for sizes in tiles), max(sizes.keys for sizes in tiles)
  queries, keys = _whole(queries, step_q, 0), _whole(keys, step_k, -1)
  q, k, v = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % step), (0, 0), (0, head - K)))
             for x, step in ((qkv.q, step_q), (qkv.k, step_k), (qkv.v, step_k)))
  return _attend(rule, tiles, interpret, QKV(q, k, v, qkv.sinks), queries, keys)[:, :T, :, :K]


def _power_of_two(n: int) -> int:
  return 1 << (n - 1).bit_length()


def _tiles(K: int, T: int, S: int, shared_bytes: int) -> Tiles:
  """For heads of size K, a power of two, and rows of so many queries and keys."""
  little, much = TILES[max(size for size in TILES if size <= K)]

  def at_most(sizes: Sizes) -> Sizes:
    queries, keys = (min(size, max(16, _power_of_two(n))) for size, n in ((sizes.queries, T), (sizes.keys, S)))
    return sizes._replace(queries=queries, keys=keys)

  return Tiles(*(at_most(sizes) for sizes in (much if shared_bytes >= LARGE else little)))


def _whole(side: Side, step: int, padding: int) -> Side:
  """`side` with tokens of segment `padding` after the last, up to a multiple of `step`."""
  def pad(ids, **how):
    return None if ids is None else jnp.pad(ids, [(0, 0)] * (ids.ndim - 1) + [(0, -ids.shape[-1] % step)], **how)

  # Of places the last is repeated, so that a tile reaches no further than its tokens do.
  return Side(pad(side.segments, constant_values=padding), pad(side.index, mode="edge"), pad(side.blocks),
              pad(side.prompts))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(rule: Rule, tiles: Tiles, interpret: bool, qkv: QKV, queries: Side, keys: Side) -> jax.Array:
  return _attend_fwd(rule, tiles, interpret, qkv, queries, keys)[0]


def _attend_fwd(rule, tiles, interpret, qkv, queries, keys):
  out, lse_BxHxT = _forward(rule, tiles.forward, interpret, qkv, queries, keys)
  if (sinks_H := qkv.sinks) is not None:  # one more term of the normaliser (`blocked.with_sinks`)
    both_BxHxT = jnp.logaddexp2(lse_BxHxT, LOG2E * sinks_H[:, None])
    both_BxHxT = jnp.where((queries.segments != 0)[:, None], both_BxHxT, 0.0)
    share_BxTxHx1 = jnp.exp2(lse_BxHxT - both_BxHxT).swapaxes(1, 2)[..., None]
    out, lse_BxHxT = (out.astype(jnp.float32) * share_BxTxHx1).astype(out.dtype), both_BxHxT
  out, lse_BxHxT = named((out, lse_BxHxT), "attention", in_rule=True)
  return out, (qkv, queries, keys, out, lse_BxHxT)


def _attend_bwd(rule, tiles, interpret, saved, dout):
  qkv, queries, keys, out, lse = saved
  delta_BxHxT = jnp.einsum("bthk,bthk->bht", out, dout, preferred_element_type=jnp.float32)
  delta_BxHxT = jnp.where((queries.segments != 0)[:, None], delta_BxHxT, 0.0)
  given = interpret, qkv, queries, keys, OfOutput(lse, delta_BxHxT, dout)
  dk, dv = _to_keys(rule, tiles.to_keys, *given)
  dsinks = None if qkv.sinks is None else gradient_of_sinks(qkv.sinks[:, None], lse / LOG2E, delta_BxHxT)[:, 0]
  return QKV(_to_queries(rule, tiles.to_queries, *given), dk, dv, dsinks), None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _forward(rule: Rule, sizes: Sizes, interpret: bool, qkv: QKV, queries: Side, keys: Side
             ) -> tuple[jax.Array, jax.Array]:
  """(output [B, T, H, K]; log-normalisers of the scores in base 2 [B, H, T], float32), both 0 at padding."""
  q, k, v, _ = qkv
  B, T, H, _ = q.shape

  def kernel(runs_ref, q_ref, k_ref, v_ref, queries_ref, keys_ref, out_ref, lse_ref):
    q, mine = q_ref[...], _some(queries_ref)

    def see(m, carry, masked):
      acc, top, total = carry
      here = _tile(m, sizes.keys)
      k, v, theirs = k_ref[here, :], v_ref[here, :], _some(keys_ref, here) if masked else None
      scores, _ = _scores(rule, _dot(q, k.T), mine, theirs)
      new_top = jnp.maximum(top, scores.max(1))
      weights, shrunk = jnp.exp2(scores - new_top[:, None]), jnp.exp2(top - new_top)
      acc = acc * shrunk[:, None] + _dot(weights.astype(v.dtype), v)
      return acc, new_top, total * shrunk + weights.sum(1)

    zeros = jnp.zeros(sizes.queries, jnp.float32)
    acc, top, total = _loop(runs_ref, see, (jnp.zeros(q.shape, jnp.float32), zeros + MASKED, zeros))
    # Every query sees itself, except padding.
    real = mine.segments != 0
    total = jnp.where(real, total, 1.0)
    out_ref[...] = jnp.where(real[:, None], acc / total[:, None], 0.0).astype(out_ref.dtype)
    lse_ref[...] = jnp.where(real, top + jnp.log2(total), 0.0)

  at = _ByQueries(q, k, sizes)
  return _call(kernel, "attention_forward", sizes, interpret, (at.number, H, B),
               [at.runs, at.own, at.keys, at.keys, at.sides(queries), at.all_of(keys)],
               [(at.own, q.shape, v.dtype), (at.per_query, (B, H, T), jnp.float32)],
               _runs(rule, queries, keys, sizes)[0], q, k, v, queries, keys)


def _to_queries(rule: Rule, sizes: Sizes, interpret: bool, qkv: QKV, queries: Side, keys: Side, of_output: OfOutput
                ) -> jax.Array:
  """The gradient of the queries, in their dtype. Of `of_output` here and below, lse is to base 2."""
  q, k, v, _ = qkv
  B, _, H, _ = q.shape

  def kernel(runs_ref, q_ref, k_ref, v_ref, queries_ref, keys_ref, lse_ref, delta_ref, dout_ref, dq_ref):
    q, mine, lse, delta = q_ref[...], _some(queries_ref), lse_ref[...], delta_ref[...]
    dout = _real(dout_ref[...], mine)

    def see(m, dq, masked):
      here = _tile(m, sizes.keys)
      k, v, theirs = k_ref[here, :], v_ref[here, :], _some(keys_ref, here) if masked else None
      scores, slope = _scores(rule, _dot(q, k.T), mine, theirs)
      dscores = jnp.exp2(scores - lse[:, None]) * (_dot(dout, v.T) - delta[:, None]) * slope
      return dq + _dot(dscores.astype(k.dtype), k)

    dq = _loop(runs_ref, see, jnp.zeros(q.shape, jnp.float32))
    dq_ref[...] = (dq * rule.scale).astype(dq_ref.dtype)

  at = _ByQueries(q, k, sizes)
  return _call(kernel, "attention_to_queries", sizes, interpret, (at.number, H, B),
               [at.runs, at.own, at.keys, at.keys, at.sides(queries), at.all_of(keys), at.per_query, at.per_query,
                at.own], [(at.own, q.shape, q.dtype)],
               _runs(rule, queries, keys, sizes)[0], q, k, v, queries, keys, *of_output)[0]


def _to_keys(rule: Rule, sizes: Sizes, interpret: bool, qkv: QKV, queries: Side, keys: Side, of_output: OfOutput
             ) -> tuple[jax.Array, jax.Array]:
  """The gradients of keys and values, in their dtypes, of all query heads that read them.

  Scores are made with keys first, so that no product reads them across.
  """
  q, k, v, _ = qkv
  (B, _, G, _), R = k.shape, q.shape[2] // k.shape[2]

  def kernel(runs_ref, q_ref, k_ref, v_ref, queries_ref, keys_ref, lse_ref, delta_ref, dout_ref, dk_ref, dv_ref):
    k, v, mine = k_ref[...], v_ref[...], _some(keys_ref)

    def of_head(r, carry):

      def seen_by(n, carry, masked):
        dk, dv = carry
        here = _tile(n, sizes.queries)
        q, dout, theirs = q_ref[here, r, :], dout_ref[here, r, :], _some(queries_ref, here) if masked else None
        dout = dout if theirs is None else _real(dout, theirs)
        scores, slope = _scores(rule, _dot(k, q.T), theirs, mine, keys_first=True)
        weights = jnp.exp2(scores - lse_ref[r, here][None, :])
        dscores = weights * (_dot(v, dout.T) - delta_ref[r, here][None, :]) * slope
        return dk + _dot(dscores.astype(q.dtype), q), dv + _dot(weights.astype(dout.dtype), dout)

      return _loop(runs_ref, seen_by, carry)

    zeros = jnp.zeros(k.shape, jnp.float32)
    dk, dv = jax.lax.fori_loop(0, R, of_head, (zeros, zeros))
    dk_ref[...], dv_ref[...] = (dk * rule.scale).astype(dk_ref.dtype), dv.astype(dv_ref.dtype)

  at = _ByKeys(q, k, sizes)
  return _call(kernel, "attention_to_keys", sizes, interpret, (at.number, G, B),
               [at.runs, at.queries, at.own, at.own, at.all_of(queries), at.sides(keys), at.per_query, at.per_query,
                at.queries], [(at.own, k.shape, k.dtype), (at.own, v.shape, v.dtype)],
               _runs(rule, queries, keys, sizes)[1], q, k, v, queries, keys, *of_output)


def _scores(rule: Rule, products: jax.Array, queries: Side | None, keys: Side | None, keys_first: bool = False
            ) -> tuple[jax.Array, jax.Array | float]:
  """(scores times LOG2E, float32, far below any other where a key is not seen; slope of the cap, 1 without one).

  `queries` or `keys` None: each sees each.
  """
  slope: jax.Array | float = 1.0
  if rule.logit_cap is None:
    scores = products * (rule.scale * LOG2E)
  else:
    bent = jnp.tanh(products * (rule.scale / rule.logit_cap))
    scores, slope = bent * (rule.logit_cap * LOG2E), 1.0 - bent * bent
  if queries is None or keys is None:
    return scores, slope
  return jnp.where(mask.seen(rule, queries, keys, keys_first), scores, MASKED), slope


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
  from jax.experimental.pallas import triton
  return triton.dot(a, b)


def _tile(number: jax.Array, size: int) -> Any:
  from jax.experimental import pallas as pl
  return pl.ds(number * size, size)


def _some(refs: Side, here: Any = slice(None)) -> Side:
  """What `refs` hold of these tokens."""
  return jax.tree.map(lambda ref: ref[here], refs)


def _real(dout: jax.Array, queries: Side) -> jax.Array:
  """The gradient of the output, 0 at padding."""
  return jnp.where((queries.segments != 0)[:, None], dout, jnp.zeros((), dout.dtype))


def _loop(runs_ref: Any, see: Callable, carry: Any) -> Any:
  """`carry = see(number, carry, masked)` for the tiles of `_runs`."""
  first, whole, partly, end = (runs_ref[i] for i in range(4))
  carry = jax.lax.fori_loop(first, whole, functools.partial(see, masked=True), carry)
  carry = jax.lax.fori_loop(whole, partly, functools.partial(see, masked=False), carry)
  return jax.lax.fori_loop(partly, end, functools.partial(see, masked=True), carry)


def _runs(rule: Rule, queries: Side, keys: Side, sizes: Sizes) -> tuple[jax.Array, jax.Array]:
  """Which tiles each has to do with: of queries int32 [B, N, 4], of keys [B, M, 4]. Before the first of the four
  numbers and from the fourth on nothing is seen; from the second to the third everything is."""
  N, M = queries.segments.shape[1] // sizes.queries, keys.segments.shape[1] // sizes.keys
  of_keys = mask.ends(keys.segments, sizes.keys)

  def met(ids):
    return mask.meet(mask.ends(ids, sizes.queries), of_keys)

  def all_of(ids, number, size):
    """The number that all tokens of a tile have, -2 where they differ: [B, number]."""
    by_tile = ids.reshape(-1, number, size)
    return jnp.where((by_tile == by_tile[:, :, :1]).all(2), by_tile[:, :, 0], -2)

  key_BxM = all_of(keys.segments, M, sizes.keys)
  places_N, places_M = queries.index.reshape(N, -1), keys.index.reshape(M, -1)
  nearest_NxM = places_N.min(1)[:, None] - places_M.max(1)[None, :]
  furthest_NxM = places_N.max(1)[:, None] - places_M.min(1)[None, :]
  segment_BxN = all_of(queries.segments, N, sizes.queries)
  some, every = met(queries.segments), segment_BxN[:, :, None] == key_BxM[:, None]
  if queries.prompts is not None:
    some |= met(queries.prompts)
    every |= (all_of(queries.prompts, N, sizes.queries)[:, :, None] == key_BxM[:, None]) & (segment_BxN > 0)[:, :, None]
  every &= (segment_BxN >= 0)[:, :, None] & (key_BxM > 0)[:, None]
  before, near = furthest_NxM >= 0, nearest_NxM < rule.window if rule.window is not None else True
  some_before = before & near if rule.causal else near
  if queries.blocks is None:
    some &= some_before
  else:
    together = mask.meet(mask.ends(queries.blocks, sizes.queries), mask.ends(keys.blocks, sizes.keys))
    some &= some_before | (together & near if rule.window_blocks else together)
  if rule.causal:
    every &= nearest_NxM >= 0
  if rule.window is not None:
    every &= furthest_NxM < rule.window
  return _run(some, every), _run(some.swapaxes(1, 2), every.swapaxes(1, 2))


def _run(some_BxNxM: jax.Array, every_BxNxM: jax.Array) -> jax.Array:
  """`_runs` of one side: from the first to the last of `some`, in it the last run of `every`."""
  number_M = jnp.arange(some_BxNxM.shape[2])

  def after_last(which):
    return jnp.where(which, number_M + 1, 0).max(2)

  end = after_last(some_BxNxM)
  first = jnp.where(some_BxNxM, number_M, end[:, :, None]).min(2)
  partly = after_last(every_BxNxM)
  whole = after_last(~every_BxNxM & (number_M < partly[:, :, None]))
  none = partly == 0
  return jnp.stack([first, jnp.where(none, end, whole), jnp.where(none, end, partly), end], axis=2).astype(jnp.int32)


class _Places:
  """Where a program finds its arrays: the n-th tile, the h-th head and the b-th row are its own."""

  def __init__(self, size: int, length: int, last_first: bool):
    self._size, self.number = size, length // size
    # Of causal rows the last tiles have the most to do; begun first, they do not end alone.
    self._n = (lambda n: self.number - 1 - n) if last_first else (lambda n: n)
    self.runs = self.spec((None, None, 4), lambda n, h, b: (b, n, 0))

  def spec(self, shape: tuple[int | None, ...], place: Callable) -> Any:
    from jax.experimental import pallas as pl
    return pl.BlockSpec(shape, lambda i, h, b: place(self._n(i), h, b))

  def sides(self, side: Side) -> Side:
    """The tile's."""
    return jax.tree.map(lambda ids: self.spec((self._size,), lambda n, h, b: (n,)) if ids.ndim == 1 else self.spec(
        (None, self._size), lambda n, h, b: (b, n)), side)

  def all_of(self, side: Side) -> Side:
    """The row's."""
    return jax.tree.map(lambda ids: self.spec(ids.shape, lambda n, h, b: (0,)) if ids.ndim == 1 else self.spec(
        (None, ids.shape[1]), lambda n, h, b: (b, 0)), side)


class _ByQueries(_Places):
  """Of tiles of queries."""

  def __init__(self, q: jax.Array, k: jax.Array, sizes: Sizes):
    (_, T, H, K), (_, S, G, _) = q.shape, k.shape
    super().__init__(sizes.queries, T, last_first=True)
    self.own = self.spec((None, sizes.queries, None, K), lambda n, h, b: (b, n, h, 0))
    self.keys = self.spec((None, S, None, K), lambda n, h, b: (b, 0, h // (H // G), 0))
    self.per_query = self.spec((None, None, sizes.queries), lambda n, h, b: (b, h, n))


class _ByKeys(_Places):
  """Of tiles of keys; a head of keys has R of queries."""

  def __init__(self, q: jax.Array, k: jax.Array, sizes: Sizes):
    (_, T, H, K), (_, S, G, _) = q.shape, k.shape
    super().__init__(sizes.keys, S, last_first=False)
    self.own = self.spec((None, sizes.keys, None, K), lambda n, g, b: (b, n, g, 0))
    self.queries = self.spec((None, T, H // G, K), lambda n, g, b: (b, 0, g, 0))
    self.per_query = self.spec((None, H // G, T), lambda n, g, b: (b, g, 0))


def _call(kernel: Callable, name: str, sizes: Sizes, interpret: bool, grid: tuple[int, ...], ins: list[Any],
          outs: list[tuple[Any, tuple[int, ...], Any]], *arrays: Any) -> Any:
  """`kernel` of `arrays`, whose places are `ins`; `outs`: (place, shape, dtype) of each output."""
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton
  return tuple(pl.pallas_call(
      kernel, name=name, grid=grid, in_specs=ins, out_specs=[place for place, *_ in outs], interpret=interpret,
      out_shape=[jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in outs],
      compiler_params=triton.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages))(*arrays))
