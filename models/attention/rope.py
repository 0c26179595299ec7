"""Rotary position embeddings (RoFormer, arXiv 2104.09864) and their scalings for longer contexts.

B batch, T length, H heads, K head size, P rotated pairs per head.

Pair p turns by position * frequency[p], frequency[p] = theta ** (-p / P). The scalings change the
frequencies, so that positions beyond the training length look like ones within it.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from models import cpu
from models.layers import document_lengths
from models.sharding import logical_axes

SCALINGS = ("none", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """The keys of `model.rope_scaling` that its type uses."""

  type: str
  factor: float
  original_positions: int = 0
  low_frequency_factor: float = 1.0
  high_frequency_factor: float = 4.0
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  truncate: bool = True
  attention_factor: float = 1.0
  # Of each pair [P], in texts within the original length, and in longer ones.
  short_factors: tuple[float, ...] = ()
  long_factors: tuple[float, ...] = ()

  @property
  def by_length(self) -> bool:
    """Whether a token's angle depends on the length of its text."""
    return self.type in ("dynamic", "longrope")


@dataclasses.dataclass(frozen=True)
class Rope:
  """How the layers of one type rotate."""

  theta: float
  # How many of a head's leading dimensions are rotated.
  dims: int
  scaling: RopeScaling | None = None
  # By which of a token's three positions each pair turns [P]; (): it has one.
  axes: tuple[int, ...] = ()
  # So many pairs turn, those with the highest frequencies (p-RoPE, arXiv 2410.06205); None: all.
  turning: int | None = None


def rope_table(rope: Rope, positions_BxT: jax.Array, segment_ids_BxT: jax.Array,
               axes_BxTx3: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
  """Cosines and sines [B, T, 1, P], float32, of the angle of every pair at every position.

  Segments matter to scalings whose frequencies depend on the length of the document (`by_length`). `axes_BxTx3`: where
  there are `axes`, a token's three positions; None: that of the text for all.
  """

  def table():
    angles, magnitude = _angles(rope, positions_BxT, segment_ids_BxT, axes_BxTx3 if rope.axes else None)
    return jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude

  return cpu.computed_once(table, positions_BxT, (*positions_BxT.shape, 1, rope.dims // 2))


def axial_table(theta: float, dims: int, row_BxT: jax.Array, column_BxT: jax.Array, in_turns: bool = False
                ) -> tuple[jax.Array, jax.Array]:
  """Cosines and sines [B, T, 1, P] where the first half of the pairs turns by a patch's row, the other by its column.

  As in Qwen2-VL's tower (arXiv 2409.12191): both halves have the same P / 2 frequencies; `dims` is 2P. Gemma 4's has
  the two the other way round. `in_turns`: rows have the first, third … of P frequencies, columns the others (Pixtral).
  """
  P = dims // 2
  each = [jnp.arange(axis, P, 2) / P if in_turns else jnp.arange(P // 2) / (P // 2) for axis in (0, 1)]
  halves = [place.astype(jnp.float32)[:, :, None, None] * theta ** -exponents.astype(jnp.float32)
            for place, exponents in zip((row_BxT, column_BxT), each, strict=True)]
  angles = jnp.concatenate(halves, axis=-1)
  return jnp.cos(angles), jnp.sin(angles)


def _angles(rope: Rope, positions_BxT: jax.Array, segment_ids_BxT: jax.Array, axes_BxTx3: jax.Array | None
            ) -> tuple[jax.Array, float]:
  """(the angles [B, T, 1, P], factor on cosines and sines)."""
  pairs = rope.dims // 2
  exponents_P = jnp.arange(pairs, dtype=jnp.float32) / pairs
  positions = positions_BxT.astype(jnp.float32)[:, :, None, None]
  if axes_BxTx3 is not None:
    positions = axes_BxTx3.astype(jnp.float32)[..., np.array(rope.axes)][:, :, None, :]
  s, magnitude = rope.scaling, 1.0
  if s is not None and s.type == "dynamic":
    frequencies = _dynamic_theta(rope, positions_BxT, segment_ids_BxT)[:, :, None, None] ** -exponents_P
  else:
    frequencies = rope.theta**-exponents_P
  if s is not None and s.type == "linear":
    frequencies = frequencies / s.factor
  elif s is not None and s.type == "llama3":
    frequencies = _llama3(s, frequencies)
  elif s is not None and s.type == "yarn":
    frequencies, magnitude = _yarn(s, rope, frequencies), s.attention_factor
  elif s is not None and s.type == "longrope":
    frequencies = frequencies / _longrope_factors(s, positions_BxT, segment_ids_BxT)[:, :, None, :]
    magnitude = s.attention_factor
  if rope.turning is not None:
    frequencies = jnp.where(jnp.arange(pairs) < rope.turning, frequencies, 0.0)
  return positions * frequencies, magnitude


def apply_rope(x_BxTxHxK: jax.Array, table: tuple[jax.Array, jax.Array], interleaved: bool = False,
               parts: int = 1) -> jax.Array:
  """Rotates the pairs (x[p], x[p + P]) of each head's first 2P dimensions; the others pass unchanged.

  With `parts`, these dimensions are so many parts, one behind the other, of which each has pairs of its own: its first
  half with its second. With `interleaved` there are P parts: the pairs are (x[2p], x[2p + 1]). They stand in the places
  p and p + P of what is returned: queries and keys in another order, the same for both, have the same products.
  """
  cos, sin = table
  pairs = cos.shape[-1]
  if (parts := pairs if interleaved else parts) > 1:
    turned = x_BxTxHxK[..., : 2 * pairs]
    turned = turned.reshape(*turned.shape[:-1], parts, 2, pairs // parts).swapaxes(-2, -3).reshape(turned.shape)
    x_BxTxHxK = jnp.concatenate([turned, x_BxTxHxK[..., 2 * pairs :]], axis=-1)
  x = x_BxTxHxK.astype(jnp.float32)
  if logical_axes.platform() == "cpu":
    return cpu.rotate(x, cos, sin).astype(x_BxTxHxK.dtype)
  first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
  rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
  return rotated.astype(x_BxTxHxK.dtype)


def temperature(scale: float, floor: int, positions_BxT: jax.Array) -> jax.Array:
  """A factor on queries [B, T, 1, 1], float32, that keeps attention to long texts from spreading out (Llama 4; after
  Scalable Softmax, arXiv 2501.19399): 1 + scale ln(1 + floor(position / floor))."""
  times_BxT = (positions_BxT // floor).astype(jnp.float32)
  return (1.0 + scale * jnp.log1p(times_BxT))[:, :, None, None]


def _dynamic_theta(rope: Rope, positions_BxT: jax.Array, segment_ids_BxT: jax.Array) -> jax.Array:
  """The base [B, T] that grows with each document's length beyond the original one (NTK-aware scaling).

  The length is the document's own, not the batch's, so that what it is packed with does not matter.
  """
  s, length_BxT = rope.scaling, document_lengths(positions_BxT, segment_ids_BxT)
  ratio = jnp.maximum(length_BxT, s.original_positions).astype(jnp.float32) / s.original_positions
  return rope.theta * (s.factor * ratio - (s.factor - 1)) ** (rope.dims / (rope.dims - 2))


def _longrope_factors(s: RopeScaling, positions_BxT: jax.Array, segment_ids_BxT: jax.Array) -> jax.Array:
  """What each pair's frequency is divided by [B, T, P]: found by search, for short texts and for long ones
  (arXiv 2402.13753). As in `_dynamic_theta`, the length is the document's own."""
  long_BxT = document_lengths(positions_BxT, segment_ids_BxT) > s.original_positions
  short_P, long_P = (jnp.asarray(factors, jnp.float32) for factors in (s.short_factors, s.long_factors))
  return jnp.where(long_BxT[:, :, None], long_P, short_P)


def _llama3(s: RopeScaling, frequencies_P: jax.Array) -> jax.Array:
  """Long wavelengths are stretched, short ones kept, those between blended (Llama 3.1)."""
  turns_P = s.original_positions * frequencies_P / (2 * math.pi)
  if s.low_frequency_factor == s.high_frequency_factor:  # none between (Llama 4 Scout)
    kept_P = (turns_P > s.low_frequency_factor).astype(jnp.float32)
  else:
    kept_P = (turns_P - s.low_frequency_factor) / (s.high_frequency_factor - s.low_frequency_factor)
    kept_P = jnp.clip(kept_P, 0.0, 1.0)
  return (1 - kept_P) * frequencies_P / s.factor + kept_P * frequencies_P


def _yarn(s: RopeScaling, rope: Rope, frequencies_P: jax.Array) -> jax.Array:
  """Pairs that turn often within the original length are kept, those that seldom do stretched (arXiv 2309.00071)."""

  def pair_that_turns(times: float) -> float:
    return rope.dims * math.log(s.original_positions / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

  low, high = pair_that_turns(s.beta_fast), pair_that_turns(s.beta_slow)
  if s.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, rope.dims - 1)
  stretched_P = jnp.clip((jnp.arange(rope.dims // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
  return stretched_P * frequencies_P / s.factor + (1 - stretched_P) * frequencies_P
