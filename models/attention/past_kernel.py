"""Attention of one more token per row to what a cache holds, as a kernel for GPUs in Pallas's Triton dialect.

B batch, G key/value heads, R query heads of each, H = G R, S slots of a row, K head size, P parts that a row's slots
are cut into, M rows of a product that tensor cores take, R of them queries.

In XLA's hands it is a product, a softmax and a product, which go over all slots of a row, also those that hold nothing
yet. Here a program goes once over the tiles of slots, or the pages, in which its row has something to see, with a
running maximum and sum (Milakov and Gimelshein 2018, arXiv 1805.02867). Where rows and heads are too few to keep a chip
busy, parts of a row's slots have programs of their own, whose sums are put together afterwards (Flash-Decoding, Dao et
al. 2023).
"""

import functools

import jax
import jax.numpy as jnp

from models.attention.blocked import MASKED
from models.attention.mask import Rule
from models.attention.pages import Seen

# Slots that are read at a time; a program has at least PART of them.
TILE, PART = 64, 256
# Programs that a chip is to have, about two for each of its multiprocessors.
PROGRAMS = 256
# Rows of a product that tensor cores take at least.
_LEAST = 16


def attend(rule: Rule, q_BxHxK: jax.Array, seen: Seen, *, sinks_H: jax.Array | None = None, interpret: bool = False
           ) -> jax.Array:
  """What the tokens read [B, H, K], in the dtype of queries; 0 for rows that see nothing.

  Args:
    rule: how scores are made.
    q_BxHxK: queries; H is a multiple of the key/value heads G, and K a power of two, 16 at least.
    seen: the cache, in rows or in pages, of tiles of 16 slots at least (`tile`).
    sinks_H: see `QKV`.
    interpret: run without a GPU.
  """
  (B, H, K), G = q_BxHxK.shape, seen.keys_BxGxSxK.shape[1]
  R, size, tiles = H // G, tile(seen), seen.positions // tile(seen)
  rows = max(_LEAST, 1 << (R - 1).bit_length())
  parts = 1
  while B * G * parts < PROGRAMS and tiles * size // (2 * parts) >= PART and tiles % (2 * parts) == 0:
    parts *= 2
  q_BxGxMxK = jnp.pad(q_BxHxK.reshape(B, G, R, K), ((0, 0), (0, 0), (0, rows - R), (0, 0)))
  acc, top, total = _call(rule, parts, interpret, q_BxGxMxK, seen)
  most_BxGx1xM = top.max(2, keepdims=True)
  if sinks_H is not None:
    sinks_GxM = jnp.pad(sinks_H.astype(jnp.float32).reshape(G, R), ((0, 0), (0, rows - R)))
    most_BxGx1xM = jnp.maximum(most_BxGx1xM, sinks_GxM[None, :, None])
  share_BxGxPxM = jnp.exp(top - most_BxGx1xM)
  total_BxGxM = (total * share_BxGxPxM).sum(2)
  if sinks_H is not None:
    total_BxGxM += jnp.exp(sinks_GxM[None] - most_BxGx1xM[:, :, 0])
  acc_BxGxMxK = (acc * share_BxGxPxM[..., None]).sum(2)
  out = acc_BxGxMxK / jnp.where(total_BxGxM > 0, total_BxGxM, 1.0)[..., None]
  return out[:, :, :R].reshape(B, H, K).astype(q_BxHxK.dtype)


def tile(seen: Seen) -> int:
  """Slots of a tile: a page, or the largest power of two up to TILE that divides a row's."""
  slots = seen.seen_BxS.shape[1]
  return min(TILE, slots & -slots) if seen.table is None else slots


def _runs(seen: Seen, B: int, parts: int) -> jax.Array:
  """Of each part of a row the first tile that has something to see, and the one behind the last, int32 [B, P, 2]."""
  if seen.table is None:
    some = seen.seen_BxS.reshape(B, -1, tile(seen)).any(2)
  else:
    some = seen.table.per_row(seen.seen_BxS.any(1), False)
  some = some.reshape(B, parts, -1)
  number = jnp.arange(some.shape[2])
  end_BxP = jnp.where(some, number + 1, 0).max(2)
  first_BxP = jnp.where(some, number, end_BxP[..., None]).min(2)
  return jnp.stack([first_BxP, end_BxP], axis=2).astype(jnp.int32)


def _call(rule: Rule, parts: int, interpret: bool, q_BxGxMxK: jax.Array, seen: Seen) -> tuple[jax.Array, ...]:
  """(weighted values [B, G, P, M, K], largest scores [B, G, P, M], sums of weights [B, G, P, M]), float32."""
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton
  (B, G, M, K), size, table = q_BxGxMxK.shape, tile(seen), seen.table

  def kernel(runs_ref, q_ref, k_ref, v_ref, seen_ref, *refs):
    *pages_ref, acc_ref, top_ref, total_ref = refs
    q = q_ref[...]

    def see(n, carry):
      acc, top, total = carry
      here = pages_ref[0][n] if pages_ref else pl.ds(n * size, size)
      k, v = (ref[(here, *[slice(None)] * (ref.ndim - 1))].astype(q.dtype) for ref in (k_ref, v_ref))
      seen = (seen_ref[here, :] if pages_ref else seen_ref[here]) != 0
      scores = rule.scale * triton.dot(q, k, trans_b=True)
      if rule.logit_cap is not None:
        scores = rule.logit_cap * jnp.tanh(scores / rule.logit_cap)
      scores = jnp.where(seen[None, :], scores, MASKED)
      new_top = jnp.maximum(top, scores.max(1))
      weights, shrunk = jnp.exp(scores - new_top[:, None]), jnp.exp(top - new_top)
      weights = jnp.where(seen[None, :], weights, 0.0)
      acc = acc * shrunk[:, None] + triton.dot(weights.astype(v.dtype), v)
      return acc, new_top, total * shrunk + weights.sum(1)

    begin = jnp.zeros((M, K), jnp.float32), jnp.full(M, MASKED, jnp.float32), jnp.zeros(M, jnp.float32)
    acc_ref[...], top_ref[...], total_ref[...] = jax.lax.fori_loop(runs_ref[0], runs_ref[1], see, begin)

  spec, arrays = pl.BlockSpec, [seen.keys_BxGxSxK, seen.values_BxGxSxK, seen.seen_BxS.astype(jnp.int32)]
  if table is None:
    slots = seen.positions // parts
    cache = spec((None, None, slots, K), lambda g, b, p: (b, g, p, 0))
    places = [cache, cache, spec((None, slots), lambda g, b, p: (b, p))]
  else:
    pages, own = arrays[0].shape[0], table.pages_BxJ.shape[1] // parts
    cache = spec((pages, None, size, K), lambda g, b, p: (0, g, 0, 0))
    places = [cache, cache, spec((pages, size), lambda g, b, p: (0, 0)), spec((None, own), lambda g, b, p: (b, p))]
    arrays.append(jnp.minimum(table.pages_BxJ, pages - 1).astype(jnp.int32))
  per_query = spec((None, None, None, M), lambda g, b, p: (b, g, p, 0))
  shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
  return tuple(pl.pallas_call(
      kernel, name="attention_to_past", grid=(G, B, parts), interpret=interpret,
      in_specs=[spec((None, None, 2), lambda g, b, p: (b, p, 0)),
                spec((None, None, M, K), lambda g, b, p: (b, g, 0, 0)), *places],
      out_specs=[spec((None, None, None, M, K), lambda g, b, p: (b, g, p, 0, 0)), per_query, per_query],
      out_shape=[shape((B, G, parts, M, K)), shape((B, G, parts, M)), shape((B, G, parts, M))],
      compiler_params=triton.CompilerParams(num_warps=4, num_stages=2))(_runs(seen, B, parts), q_BxGxMxK, *arrays))
