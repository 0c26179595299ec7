"""Which tokens of a row see each other: segments, causality, windows, blocks and shared prompts.

B batch, T queries, W keys; N and M tiles.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Side(NamedTuple):
  """Queries, or keys, as far as it matters who sees whom."""

  # int32 [B, N]; a query sees keys of the same segment. Padding is 0 among queries and -1 among keys.
  segments: jax.Array
  # int32 [N]: the place in the row; of keys that a cache holds before it, in each row others [B, N], below 0.
  index: jax.Array
  # int32 [B, N]: tokens of the same block above 0 see each other both ways; None: there are no blocks.
  blocks: jax.Array | None
  # Of queries, int32 [B, N]: a further segment whose keys each sees, 0 for none; None: none does.
  prompts: jax.Array | None = None


class QKV(NamedTuple):
  """Queries, keys and values, by head: in models [B, T, H, K] and [B, S, G, K], in models/attention/blocked.py
  [B, G, R, T, K] and [B, G, W, K]. Query head h reads key/value head h // (H / G)."""

  q: jax.Array
  k: jax.Array
  v: jax.Array
  # Of each head one more score, as it stands, that no key or value goes with: a term of the softmax's denominator alone
  # (gpt-oss). float32 [H], in models/attention/blocked.py [G, R, 1]; None: there are none.
  sinks: jax.Array | None = None


class TokenIds(NamedTuple):
  """What decides which tokens of a row see each other, int32 [B, T]."""

  # Tokens attend only where these are equal; 0 is padding. The tokens of a segment are contiguous, so that index
  # differences are position differences.
  segments: jax.Array
  # Tokens of one segment with the same number above 0 see each other, whatever their order and distance. None:
  # attention is causal, and scores of keys to the right are never computed; with blocks, which may reach anywhere, all
  # are.
  blocks: jax.Array | None = None
  # A further segment that each token sees, 0 for none. It stands before the token in the row. None: there are none. Not
  # with a window, which counts places of the row.
  prompts: jax.Array | None = None
  # Parts of segments, which stand in their place in attention alone; None: there are none.
  chunks: jax.Array | None = None

  def in_chunks(self, positions_BxT: jax.Array, size: int) -> "TokenIds":
    """With chunks of so many positions: of a segment's tokens, one sees those of its own chunk."""
    # A row has fewer chunks of one segment than this, so that no two have the same number.
    chunks = self.segments.shape[1] // size + 2
    numbers_BxT = self.segments * chunks + positions_BxT // size % chunks
    return self._replace(chunks=jnp.where(self.segments > 0, numbers_BxT, 0))

  def chunks_of(self, positions_BxP: jax.Array, size: int) -> jax.Array:
    """The chunks of keys that a cache holds of segment 1. Two with the same number are further apart than a chunk."""
    chunks = self.segments.shape[1] // size + 2
    return chunks + positions_BxP // size % chunks

  def queries(self, index: jax.Array) -> Side:
    """These tokens as queries, at their places in the row, int32 [T]."""
    return Side(self.segments, index, self.blocks, self.prompts)

  def keys(self, index: jax.Array, before: Side | None = None) -> Side:
    """These tokens as keys, behind those of a cache (`behind`), if there are any."""
    own = Side(keys_of(self.segments), index, self.blocks)
    if before is None:
      return own
    index_BxT = jnp.broadcast_to(index, self.segments.shape)
    return Side(jnp.concatenate([before.segments, own.segments], axis=1),
                jnp.concatenate([before.index, index_BxT], axis=1), None)

  def sides(self, before: Side | None = None) -> tuple[Side, Side]:
    """Both, the places of queries being int32 [B, T]."""
    index = jnp.arange(self.segments.shape[1])
    return self.queries(jnp.broadcast_to(index, self.segments.shape)), self.keys(index, before)


class Rule(NamedTuple):
  """How scores are made, and who sees whom within a segment; static."""

  # Factor on the scores.
  scale: float
  # Scores become cap * tanh(score / cap), after scaling; None: no cap.
  logit_cap: float | None = None
  # How many tokens a query sees, itself included; None: all before it.
  window: int | None = None
  # Whether nothing further back than the window is seen of the own block either.
  window_blocks: bool = False
  # False: all queries come after all keys, so that no comparison is needed.
  causal: bool = True


def behind(behind_BxP: jax.Array, ids_BxP: jax.Array | None = None) -> Side:
  """The keys of a cache that stand before a row's tokens, which are then of segment 1, padded on the right.

  Args:
    behind_BxP: int32 [B, P]; how many tokens each stands before the row's first; 0: there is none.
    ids_BxP: int32 [B, P], their segments; None: all are of segment 1.
  """
  ids_BxP = jnp.ones_like(behind_BxP) if ids_BxP is None else ids_BxP
  return Side(jnp.where(behind_BxP > 0, ids_BxP, -1), -behind_BxP, None)


def keys_of(segments: jax.Array) -> jax.Array:
  """The segments of keys: padding equals no query's segment, not even a padding query's."""
  return jnp.where(segments == 0, -1, segments)


def seen(rule: Rule, queries: Side, keys: Side, keys_first: bool = True) -> jax.Array:
  """Who sees whom: bool [B, W, T], or [B, T, W]; without B where the sides have none, as in a kernel."""
  by_query, by_key = (jnp.s_[..., None, :], jnp.s_[..., None])[::1 if keys_first else -1]
  same = queries.segments[by_query] == keys.segments[by_key]
  if queries.prompts is not None:
    same |= queries.prompts[by_query] == keys.segments[by_key]  # no key is of segment 0
  behind = queries.index[by_query] - keys.index[by_key]
  near = behind < rule.window if rule.window is not None else True
  before = (behind >= 0) & near if rule.causal else near
  if queries.blocks is None:
    return same & before
  together = (queries.blocks[by_query] == keys.blocks[by_key]) & (queries.blocks > 0)[by_query]
  return same & (before | (together & near if rule.window_blocks else together))


def ends(ids_BxT: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
  """The least and the largest number above 0 of each tile of so many, int32 [B, N] each; T is a multiple of `size`."""
  by_tile = ids_BxT.reshape(len(ids_BxT), -1, size)
  return jnp.where(by_tile > 0, by_tile, np.iinfo(np.int32).max).min(2), by_tile.max(2)


def meet(of_queries: tuple[jax.Array, jax.Array], of_keys: tuple[jax.Array, jax.Array]) -> jax.Array:
  """bool [B, N, M]: from the least to the largest of both tiles there is a number in common, by their `ends`."""
  (least_BxN, largest_BxN), (least_BxM, largest_BxM) = of_queries, of_keys
  return (least_BxN[:, :, None] <= largest_BxM[:, None]) & (least_BxM[:, None] <= largest_BxN[:, :, None])
