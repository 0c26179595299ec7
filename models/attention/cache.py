"""Keys and values of the tokens that a model has seen, so that a further token costs no more than its own work.

B rows of the cache, M rows that are copied, T tokens, L layers, S slots, G key/value heads, K head size; P places, N
layers at each; Q pages of Z slots, J of a row.

A token of position p stands in slot p % S. Layers that see all have a slot for each position; those with a window, or
chunks, have no more slots than it has tokens, so that each new token replaces the one that has just left the window.
Which position a slot holds follows from the row's length alone: nothing is ever moved or cleared.

Layers that see all may have pages of slots in place of rows (models/attention/pages.py).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models import cpu
from models.attention.pages import PAGE, Seen, Table
from models.sharding.logical_axes import constrain
from models.spec import RECURRENT, TOKENWISE, Spec

# An entry of [B, G, K] into each row of [N, B, G, S, K], at an index of N and one of S. With rows as a dimension that
# both have, and not as an index, the partitioner sees that no row needs another device's.
_ROW_BY_ROW = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(1, 2), inserted_window_dims=(0, 3), scatter_dims_to_operand_dims=(0, 3),
    operand_batching_dims=(1,), scatter_indices_batching_dims=(0,))
# The same into [N, Q, G, Z, K], at an index of N, one of Q and one of Z.
_PAGE_BY_PAGE = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(1, 2), inserted_window_dims=(0, 1, 3), scatter_dims_to_operand_dims=(0, 1, 3))


class Cache(NamedTuple):
  """Layer l is entry l // P of the arrays at place l % P.

  There are as many places as the layer pattern has, or as there are layers: then each has arrays of its own, which are
  read where they lie, and the model runs its layers one after another. Of stacked arrays a layer's part is copied
  before it is read, unless the compiler can do without, as those for CPU and GPU cannot.
  """

  # For each place of a layer of attention, [N, B, G, S, K], after the rotation; in the compute dtype, or as wide as its
  # products read them (`empty`). The slots of a head lie together, as products with a query read them. Layers without
  # keys and values of their own, the last ones, have no entry.
  keys: tuple[jax.Array, ...]
  # With latent attention, the one rotated key of all heads, behind it the indexer's, if layers have one, and in place
  # of values the latent.
  # In the place of a layer with a state, the last inputs of its convolutions [N, B, W - 1, C], in that dtype, stand in
  # place of keys, and its states [N, B, H, K, V], float32 or wider, in place of values.
  values: tuple[jax.Array, ...]
  # int32 [B]: how many tokens of each row have been seen; the next one's position.
  lengths: jax.Array
  # int32 [B]: with M-RoPE, what is added to that position, since an image takes fewer of them than it has tokens.
  shift: jax.Array | None = None
  # Given while a cache with pages is read or written: keys and values of layers that see all are then [N, Q, G, Z, K].
  table: Table | None = None


class Past(NamedTuple):
  """Where further tokens of each row find one layer's part of a cache."""

  cache: Cache
  # The layer's place in the pattern, or, of layers that run one after another, its number.
  place: int
  # Its number.
  layer: jax.Array
  # The tokens are several of each row, which read the cache as it is and add theirs when all layers have run
  # (`extended`): what they add to a window is in the place of what the first of them see. Else each row's is one, which
  # every layer adds before it reads.
  extends: bool = False
  # Whether its window is a chunk: it begins where positions are multiples of its size.
  chunked: bool = False

  def add(self, k_BxGxK: jax.Array, v_BxGxK: jax.Array, active_B: jax.Array, window: int | None
          ) -> tuple[Cache, Seen]:
    """The cache with the token's key and value in this layer, of rows that are active, and what the token then sees.

    Lengths stay as they are: other layers are still to come.
    """
    place, entry = self._at()
    S, table = self.cache.keys[place].shape[3], self.cache.table if window is None else None
    # Of rows that are not active it goes to a slot that does not exist. It is written before anything is read: else
    # the compiler keeps a copy of the cache for those who read.
    slots_B = jnp.where(active_B, self.cache.lengths % S, S)
    indices = [jnp.broadcast_to(entry, slots_B.shape), slots_B]
    if table is not None:
      indices.insert(1, jnp.take_along_axis(table.pages_BxJ, self.cache.lengths[:, None] // S, 1, mode="clip")[:, 0])
    indices_Bxn, where = jnp.stack(indices, axis=1), _ROW_BY_ROW if table is None else _PAGE_BY_PAGE

    def put_one(arrays: tuple[jax.Array, ...], new_BxGxK: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
      new_BxGxK = new_BxGxK.astype(arrays[place].dtype)
      changed = _constrain(jax.lax.scatter(
          arrays[place], indices_Bxn, new_BxGxK, where, indices_are_sorted=table is None, unique_indices=True,
          mode=jax.lax.GatherScatterMode.FILL_OR_DROP))
      of_layer = jax.lax.dynamic_index_in_dim(changed, entry, keepdims=False)
      return (*arrays[:place], changed, *arrays[place + 1:]), of_layer

    keys, of_keys = put_one(self.cache.keys, k_BxGxK)
    values, of_values = put_one(self.cache.values, v_BxGxK)
    return self.cache._replace(keys=keys, values=values), self._seen(of_keys, of_values, window)

  def before(self, k_BxTxGxK: jax.Array, v_BxTxGxK: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(keys [B, S + T, G, K], values, of the cache and then these; `behind_BxP` of `mask.behind`)."""
    keys, values = (jnp.concatenate([old.swapaxes(1, 2).astype(new.dtype), new], axis=1)
                    for old, new in zip(self.state(), (k_BxTxGxK, v_BxTxGxK), strict=True))
    positions_BxS = positions_of(self.cache.lengths, keys.shape[1] - k_BxTxGxK.shape[1])
    return keys, values, jnp.where(positions_BxS >= 0, self.cache.lengths[:, None] - positions_BxS, 0)

  def seen(self, window: int | None) -> Seen:
    """What the token sees in this layer, to which its own key and value have been added."""
    return self._seen(*self.state(), window)

  def _seen(self, of_keys: jax.Array, of_values: jax.Array, window: int | None) -> Seen:
    S, table = of_keys.shape[2], self.cache.table if window is None else None
    if table is not None:
      ends_Q = (self.cache.lengths + 1).at[table.owners_Q].get(mode="fill", fill_value=0)
      seen_QxZ = table.firsts_Q[:, None] + jnp.arange(S) < ends_Q[:, None]
      return Seen(of_keys, of_values, seen_QxZ, table)
    positions_BxS = positions_of(self.cache.lengths + 1, S)
    seen_BxS = positions_BxS >= 0
    if self.chunked:  # of a window, no slot holds what has left it
      seen_BxS &= positions_BxS >= (self.cache.lengths // window * window)[:, None]
    return Seen(of_keys, of_values, seen_BxS)

  def state(self) -> tuple[jax.Array, jax.Array]:
    """A layer's part: of one that has a state the last inputs of its convolutions [B, W - 1, C] and its states [B, H,
    K, V], of others keys and values [B, G, S, K]."""
    place, entry = self._at()
    inputs, states = (jax.lax.dynamic_index_in_dim(arrays[place], entry, keepdims=False)
                      for arrays in (self.cache.keys, self.cache.values))
    return inputs, states

  def with_state(self, inputs: jax.Array, states: jax.Array, active_B: jax.Array) -> Cache:
    """The cache with these in their place, of rows that are active."""
    place, entry = self._at()

    def put(arrays: tuple[jax.Array, ...], new: jax.Array, old: jax.Array) -> tuple[jax.Array, ...]:
      new = jnp.where(active_B.reshape(-1, *[1] * (new.ndim - 1)), new.astype(old.dtype), old)
      changed = jax.lax.dynamic_update_index_in_dim(arrays[place], new, entry, 0)
      return (*arrays[:place], _constrain(changed), *arrays[place + 1:])

    of_inputs, of_states = self.state()
    return self.cache._replace(keys=put(self.cache.keys, inputs, of_inputs),
                               values=put(self.cache.values, states, of_states))

  def _at(self) -> tuple[int, jax.Array]:
    """The layer's place in the cache, and its entry in the arrays there."""
    period = len(self.cache.keys)
    return self.place % period, self.layer // period


def empty(spec: Spec, rows: int, max_length: int, dtype: Any, apart: bool = False, pages: int | None = None) -> Cache:
  """A cache of `rows` rows, for up to `max_length` tokens each; `apart`: with arrays of its own for each layer.

  For `dtype`, in which keys and values come. `pages`: layers that see all have so many in place of rows.
  """
  dtype, wide = cpu.cache_dtype(dtype), jnp.promote_types(dtype, jnp.float32)
  period, keys, values = spec.num_layers if apart else len(spec.layer_pattern), [], []
  for place in range(period):
    layers = sum(spec.kv_source(i) is None for i in range(place, spec.num_layers, period))
    if spec.layer_type(place) in TOKENWISE:  # which leaves nothing
      for arrays in (keys, values):
        arrays.append(jnp.zeros((0, rows, 1, 1, 1), dtype))
      continue
    if (sizes_of := spec.recurrent(place)) is not None:
      keys.append(jnp.zeros((layers, rows, sizes_of.conv_width - 1, sizes_of.channels), dtype))
      values.append(jnp.zeros((layers, rows, *sizes_of.state_shape), wide))
      continue
    slots = min(spec.window_of(place) or max_length, max_length)
    G, K = spec.heads_of(spec.mixer_of(place))
    heads, *sizes = (G, K, K) if spec.latent is None else (1, *spec.latent.kept_sizes)
    paged = pages is not None and spec.window_of(place) is None
    for arrays, size in zip((keys, values), sizes, strict=True):
      arrays.append(jnp.zeros((layers, *((pages, heads, PAGE) if paged else (rows, heads, slots)), size), dtype))
  shift = jnp.zeros(rows, jnp.int32) if any(rope.axes for rope in spec.ropes.values()) else None
  return Cache(tuple(map(_constrain, keys)), tuple(map(_constrain, values)), jnp.zeros(rows, jnp.int32), shift)


def resized(cache: Cache, spec: Spec, rows_R: jax.Array, max_length: int, pages_Q: jax.Array | None = None) -> Cache:
  """These rows of the cache, in this order, with room for texts of up to `max_length` tokens if there was less.

  A row beyond the last gives an empty one. No text may be longer than there was room for. A layer's slots become more
  only while they are fewer than its window has tokens, and until then each token is in the slot of its position.
  Where layers have pages, those of `pages_Q` are kept, in this order; one beyond the last is an empty one.
  """

  def of_place(place: int, part_NxBxGxSxK: jax.Array) -> jax.Array:
    if spec.mixer_of(place) in (*RECURRENT, *TOKENWISE):
      return _constrain(part_NxBxGxSxK.at[:, rows_R].get(mode="fill", fill_value=0))
    if pages_Q is not None and spec.window_of(place) is None:
      return _constrain(part_NxBxGxSxK.at[:, pages_Q].get(mode="fill", fill_value=0))
    slots = min(spec.window_of(place) or max_length, max_length)
    kept = part_NxBxGxSxK.at[:, rows_R].get(mode="fill", fill_value=0)
    return _constrain(jnp.pad(kept, [(0, max(0, slots - kept.shape[3]) if d == 3 else 0) for d in range(5)]))

  keys, values = (tuple(of_place(place, part) for place, part in enumerate(parts))
                  for parts in (cache.keys, cache.values))
  lengths, shift = (None if part is None else part.at[rows_R].get(mode="fill", fill_value=0)
                    for part in (cache.lengths, cache.shift))
  return Cache(keys, values, lengths, shift)


def positions_of(lengths_B: jax.Array, slots: int) -> jax.Array:
  """The position of the token in each slot [B, S]; negative where there is none."""
  newest_Bx1 = lengths_B[:, None] - 1
  return newest_Bx1 - (newest_Bx1 - jnp.arange(slots)) % slots


def extended(cache: Cache, spec: Spec, new: Mapping[str, tuple[jax.Array, jax.Array]], segment_ids_BxT: jax.Array,
             axes_BxTx3: jax.Array | None = None) -> Cache:
  """The cache with further tokens of its rows.

  Args:
    cache: what to add to; without pages.
    new: by their mixer: attn, global_attn: keys and values [L, B, T, G, K] of the layers that have them; delta, mamba:
      the last inputs of the convolutions and the states of those [L, B, …], behind these tokens.
    segment_ids_BxT: 0: padding, not written.
    axes_BxTx3: positions for M-RoPE of a text's beginning, where these are others than those in the row. A text goes
      on behind the last row or column of all, whatever the times.
  """
  period = len(cache.keys)
  real_BxT = segment_ids_BxT > 0
  positions_BxT = cache.lengths[:, None] + jnp.cumsum(real_BxT, axis=1) - 1
  ends_B = cache.lengths + real_BxT.sum(1)

  def write(old_NxBxGxSxK: jax.Array, new_NxBxTxGxK: jax.Array) -> jax.Array:
    S = old_NxBxGxSxK.shape[3]
    # Of tokens that would share a slot only the last is written; the others go to a slot that does not exist. That no
    # two go to the same one is said: for XLA on GPU they would be written one after another.
    slots_BxT = jnp.where(real_BxT & (positions_BxT >= ends_B[:, None] - S), positions_BxT % S, S)
    # Indices with a dimension between them come first in what is set.
    return _constrain(old_NxBxGxSxK.at[:, jnp.arange(len(slots_BxT))[:, None], :, slots_BxT].set(
        new_NxBxTxGxK.transpose(1, 2, 0, 3, 4).astype(old_NxBxGxSxK.dtype), mode="drop", unique_indices=True))

  def at_place(place: int, old: jax.Array, which: int) -> jax.Array:
    mixer = spec.mixer_of(place)
    alike = [i for i in range(period) if spec.mixer_of(i) == mixer]
    if not len(old):
      return old
    of_place = new[mixer][which][alike.index(place)::len(alike)]
    return _constrain(of_place.astype(old.dtype)) if mixer in RECURRENT else write(old, of_place)

  keys, values = (tuple(at_place(place, old, which) for place, old in enumerate(olds))
                  for which, olds in enumerate((cache.keys, cache.values)))
  shift = cache.shift
  if shift is not None and axes_BxTx3 is not None:
    shift = jnp.where(real_BxT, axes_BxTx3[..., 1:].max(-1) + 1, 0).max(1) - ends_B
  return Cache(keys, values, ends_B, shift)


def copied(cache: Cache, spec: Spec, other: Cache, rows_M: jax.Array, sources_M: jax.Array) -> Cache:
  """The cache with rows `sources_M` of another in place of its rows `rows_M`, of which one beyond the last is left out.

  Either may have pages. No text may be longer than both have room for; until a window is full, each of its tokens is in
  the slot of its position.
  """

  def read(part_NxBxGxSxK: jax.Array, paged: bool) -> jax.Array:
    if not paged:
      return part_NxBxGxSxK[:, sources_M]
    pages_MxJ = other.table.pages_BxJ.at[sources_M].get(mode="clip")
    of_pages = jnp.moveaxis(part_NxBxGxSxK.at[:, pages_MxJ].get(mode="fill", fill_value=0), 3, 2)
    return of_pages.reshape(*of_pages.shape[:3], -1, of_pages.shape[-1])

  def write(old: jax.Array, new_NxMxGxSxK: jax.Array, paged: bool) -> jax.Array:
    if not paged:
      S = min(old.shape[3], new_NxMxGxSxK.shape[3])
      return old.at[:, rows_M, :, :S].set(new_NxMxGxSxK[:, :, :, :S], mode="drop", unique_indices=True)
    Z, pages_MxJ = old.shape[3], cache.table.pages_BxJ.at[rows_M].get(mode="fill", fill_value=old.shape[1])
    J = min(pages_MxJ.shape[1], -(-new_NxMxGxSxK.shape[3] // Z))
    new = jnp.pad(new_NxMxGxSxK, [(0, -size % Z if d == 3 else 0) for d, size in enumerate(new_NxMxGxSxK.shape)])
    new_NxMxGxJxZxK = new[:, :, :, :J * Z].reshape(*new.shape[:3], J, Z, new.shape[-1])
    return old.at[:, pages_MxJ[:, :J]].set(jnp.moveaxis(new_NxMxGxJxZxK, 3, 2), mode="drop", unique_indices=True)

  def at_place(place: int, old: jax.Array, new: jax.Array) -> jax.Array:
    if not len(old):
      return old
    if spec.mixer_of(place) in RECURRENT:
      return _constrain(old.at[:, rows_M].set(new[:, sources_M], mode="drop", unique_indices=True))
    from_pages, to_pages = (part.table is not None and spec.window_of(place) is None for part in (other, cache))
    return _constrain(write(old, read(new, from_pages), to_pages))

  keys, values = (tuple(map(at_place, range(len(olds)), olds, news))
                  for olds, news in ((cache.keys, other.keys), (cache.values, other.values)))
  lengths, shift = (None if old is None else old.at[rows_M].set(new[sources_M], mode="drop", unique_indices=True)
                    for old, new in ((cache.lengths, other.lengths), (cache.shift, other.shift)))
  return Cache(keys, values, lengths, shift, cache.table)


def has_beginnings(spec: Spec, length: int) -> bool:
  """Whether the beginnings of a text of so many tokens are still in a cache of it: no layer has put a state in their
  place, or later tokens in a window."""
  return all(spec.mixer_of(layer) not in RECURRENT and length <= (spec.window_of(layer) or length)
             for layer in range(spec.num_layers))


def beginning(cache: Cache, length: int) -> Cache:
  """The first so many tokens of each text, without a copy: which position a slot holds follows from lengths alone."""
  return cache._replace(lengths=jnp.minimum(cache.lengths, length))


def stacked(cache: Cache, spec: Spec) -> Cache:
  """The cache with the arrays of the layers of each place of the pattern in one, as a scan over layers reads them."""
  period = len(spec.layer_pattern)

  def at_place(parts: tuple[jax.Array, ...], place: int) -> jax.Array:
    same = [part for part in parts[place::period] if len(part)]
    return jnp.concatenate(same) if same else parts[place]

  if len(cache.keys) <= period:  # of each place one layer at most
    return cache
  keys, values = (tuple(at_place(parts, place) for place in range(period)) for parts in (cache.keys, cache.values))
  return cache._replace(keys=keys, values=values)


def _constrain(part: jax.Array) -> jax.Array:
  """[N, B, G, S, K], or the states of layers that have them [N, B, H, K, V], or the inputs of their convolutions."""
  return constrain(part, None, "batch", *(("kv_heads", None, None) if part.ndim == 5 else (None, None)))
