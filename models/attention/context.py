"""What a layer computes with beside the residual stream and its parameters."""

from typing import Any, NamedTuple

import jax

from models.attention.cache import Past
from models.attention.mask import TokenIds


class LayerContext(NamedTuple):
  """Of one layer; what a kind of attention has no use for, it does not read. B batch, T length, G key/value heads."""

  # Which tokens of the rows see each other.
  tokens: TokenIds
  # A `rope_table`, with a factor on queries [B, T, 1, 1] or without; or that alone, or None.
  rope: Any = None
  # How many tokens a query sees, itself included; None: all before it.
  window: int | None = None
  # For dropout, on the adapters' inputs, too; None: no dropout.
  key: jax.Array | None = None
  # Where the tokens of each row find those before them; None: rows begin here.
  past: Past | None = None
  # The keys and values [B, T, G, K] of the layer whose this one uses, if it has none of its own; `past` is then that
  # layer's.
  lent: tuple[jax.Array, jax.Array] | None = None
  # Which keys an indexer chose in the layer before, int32 [B, T, C]; see `LatentAttention`.
  chosen_BxTxC: jax.Array | None = None
