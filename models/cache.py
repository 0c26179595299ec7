"""Keys and values of the tokens that a model has seen, so that a further token costs no more than its own work.

B rows of the cache, M rows that are written, T tokens, L layers, S slots, G key/value heads, K head size; N layers at
one place of the layer pattern.

A token of position p stands in slot p % S. Layers that see all have a slot for each position; those with a window have
no more slots than it has tokens, so that each new token replaces the one that has just left the window. Which position
a slot holds follows from the row's length alone: nothing is ever moved or cleared.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models.placement import constrain
from models.spec import Spec


class Cache(NamedTuple):
  """Layer l is entry l // period of the arrays at place l % period, where period is the layer pattern's length."""

  # For each place of the layer pattern, [N, B, G, S, K], after the rotation; in the compute dtype. The slots of a head
  # lie together, as products with a query read them.
  keys: tuple[jax.Array, ...]
  values: tuple[jax.Array, ...]
  # int32 [B]: how many tokens of each row have been seen; the next one's position.
  lengths: jax.Array


class Past(NamedTuple):
  """One layer's part of a cache, as the next token of each row finds it."""

  keys_BxGxSxK: jax.Array
  values_BxGxSxK: jax.Array
  # Whether the slot holds a token that the next one sees.
  seen_BxS: jax.Array


def empty(spec: Spec, rows: int, max_length: int, dtype: Any) -> Cache:
  """A cache of `rows` rows, for up to `max_length` tokens each."""
  period, arrays = len(spec.layer_pattern), []
  for place, kind in enumerate(spec.layer_pattern):
    layers = len(range(place, spec.num_layers, period))
    slots = max_length if kind == "global" else min(spec.window, max_length)
    arrays.append(jnp.zeros((layers, rows, spec.num_kv_heads, slots, spec.head_dim), dtype))
  return Cache(tuple(map(_constrain, arrays)), tuple(map(_constrain, arrays)), jnp.zeros(rows, jnp.int32))


def layer_of(cache: Cache, spec: Spec, index: jax.Array, place: int) -> Past:
  """The part of layer `index`, whose place in the layer pattern is `place`."""
  entry = index // len(spec.layer_pattern)
  keys, values = (jax.lax.dynamic_index_in_dim(part[place], entry, keepdims=False)
                  for part in (cache.keys, cache.values))
  positions_BxS = positions_of(cache.lengths, keys.shape[2])
  seen_BxS = positions_BxS >= 0
  if spec.layer_pattern[place] == "local":
    seen_BxS &= cache.lengths[:, None] - positions_BxS < spec.window
  return Past(keys, values, seen_BxS)


def positions_of(lengths_B: jax.Array, slots: int) -> jax.Array:
  """The position of the token in each slot [B, S]; negative where there is none."""
  newest_Bx1 = lengths_B[:, None] - 1
  return newest_Bx1 - (newest_Bx1 - jnp.arange(slots)) % slots


def put(cache: Cache, new: tuple[jax.Array, jax.Array], positions_MxT: jax.Array, segment_ids_MxT: jax.Array,
        rows_M: jax.Array | None = None) -> Cache:
  """The cache with the keys and values of more tokens.

  Args:
    cache: what to add to.
    new: keys and values [L, M, T, G, K].
    positions_MxT: of these tokens. Their row must hold the positions before them already, or they start at 0.
    segment_ids_MxT: 0: padding, not written. A row of padding alone changes nothing.
    rows_M: the row of the cache that each goes to; one beyond the last is left out. None: row m to row m. Rows that
      are named are begun anew.
  """
  period = len(cache.keys)
  real_MxT = segment_ids_MxT > 0
  ends_M = jnp.max(jnp.where(real_MxT, positions_MxT + 1, 0), axis=1)

  def write(old_NxBxGxSxK: jax.Array, new_NxMxTxGxK: jax.Array) -> jax.Array:
    S, new_NxMxGxTxK = old_NxBxGxSxK.shape[3], new_NxMxTxGxK.swapaxes(2, 3)
    # Of tokens that would share a slot only the last is written; the others go to a slot that does not exist.
    kept_MxT = real_MxT & (positions_MxT >= ends_M[:, None] - S)
    slots_MxT = jnp.where(kept_MxT, positions_MxT % S, S)
    if rows_M is not None:
      # Indices with a dimension between them come first in what is set.
      new_MxTxNxGxK = new_NxMxGxTxK.transpose(1, 3, 0, 2, 4)
      return _constrain(old_NxBxGxSxK.at[:, rows_M[:, None], :, slots_MxT].set(new_MxTxNxGxK, mode="drop"))

    def one(old_GxSxK, new_GxTxK, slots_T):
      return old_GxSxK.at[:, slots_T].set(new_GxTxK, mode="drop")

    # Row by row, so that the partitioner sees that no row needs another device's; in the order of the dimensions, so
    # that the cache is changed where it lies.
    rows = jax.vmap(jax.vmap(one), in_axes=(0, 0, None))
    return _constrain(rows(old_NxBxGxSxK, new_NxMxGxTxK, slots_MxT))

  keys, values = (tuple(write(old, part[place::period]) for place, old in enumerate(olds))
                  for olds, part in zip((cache.keys, cache.values), new, strict=True))
  if rows_M is None:
    lengths_B = jnp.where(ends_M > 0, ends_M, cache.lengths)
  else:
    lengths_B = cache.lengths.at[rows_M].set(ends_M, mode="drop")
  return Cache(keys, values, lengths_B)


def _constrain(part_NxBxGxSxK: jax.Array) -> jax.Array:
  return constrain(part_NxBxGxSxK, None, "batch", "kv_heads", None, None)
