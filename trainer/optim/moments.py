"""Optimizer moments in fewer bits, and rounding that loses no update on average.

Moments are computed in float32 and kept in float32, bfloat16 or int8. A moving average such as
v <- b2 v + (1 - b2) g^2 moves by less than half the distance of two numbers of 8 bits at most steps, so rounding to the
nearest would keep it where it is (EXACTNESS.md T33). What is stored is therefore rounded up or down at random, with
probabilities that make the mean exact. The random bits are a function of (seed, step, path, place in the array): not of
the mesh, nor of a restart.

int8 keeps a floating-point number of 8 bits relative to the largest of its row (the last dimension), so that small
values next to large ones do not vanish, as with the dynamic codes of Dettmers et al. 2022 (arXiv 2110.02861, section
2.1). With E the exponent of the row's largest absolute value, so that it lies in [2^E, 2^(E + 1)):

  first moments   int8, sign × 127 magnitudes: 3 bits of mantissa, from 2^(E + 1) down to 1.25 × 2^(E - 15), and 0;
  second moments  uint8, 256 magnitudes: 3 bits of mantissa, from 2^(E + 1) down to 1.125 × 2^(E - 31), never 0 unless
                  the row is 0: what is smaller becomes that, since Adam divides by its root;
  exponents       uint8 [..., 1] (of a scalar: []): the exponent bits of the row's largest value.

Neighbouring magnitudes differ by a sixteenth to an eighth, so a value within the range changes by less than 1/8 of
itself. A row is a whole one, not a block of 256 as in the paper: a scale then follows its parameter's sharding, and a
maximum over a split dimension is one small all-reduce, where blocks that straddle devices would gather the moments.
"""

import dataclasses
import zlib
from typing import Any

import jax
import jax.numpy as jnp

from trainer import tree as tree_lib

Tree = dict[str, Any]

# Trees of an optimizer's state that are averages of gradients, and of their squares.
FIRST, SECOND = ("mu", "trace"), ("nu",)
# Added to the name of a tree: the exponents of its rows.
EXPONENT = "_exponent"

_MANTISSA_BITS = 3
# Bits of a float32 below its sign, exponent and these bits of mantissa.
_DROPPED = 23 - _MANTISSA_BITS
# The highest code of each kind stands for 2^(E + 1).
_TOP_FIRST, _TOP_SECOND = 127, 255
# So that 2^(E + 1) is finite.
_MAX_EXPONENT = 253


@dataclasses.dataclass(frozen=True)
class Moments:
  """How an optimizer's first and second moments are kept: in float32, bfloat16 or int8."""

  first: str = "float32"
  second: str = "float32"
  seed: int = 0

  @property
  def reduced(self) -> bool:
    """Whether some are kept in less than float32."""
    return (self.first, self.second) != ("float32", "float32")

  def encode(self, state: Tree, step: Any, layer: Any = None) -> Tree:
    """The state of an optimizer's part as it is kept, from float32.

    Args:
      state: {name: tree by parameter path, or an array}; names that are not those of moments stay as they are.
      step: updates done before, which the random bits depend on.
      layer: see `rounding_bits`.
    """
    kept = dict(state)
    for name, form in self._forms(state):
      flat = tree_lib.flatten(state[name])
      # Of the 32 random bits of a place, first moments take the low half, second moments the high one.
      bits = {path: rounding_bits(self.seed, step, path, x.shape, layer) >> (16 if name in SECOND else 0)
              for path, x in flat.items()}
      if form == "bfloat16":
        kept[name] = tree_lib.unflatten({path: to_bfloat16(x, bits[path]) for path, x in flat.items()})
        continue
      encode = encode_second if name in SECOND else encode_first
      pairs = {path: encode(x, bits[path]) for path, x in flat.items()}
      kept[name] = tree_lib.unflatten({path: codes for path, (codes, _) in pairs.items()})
      kept[name + EXPONENT] = tree_lib.unflatten({path: exponents for path, (_, exponents) in pairs.items()})
    return kept

  def decode(self, kept: Tree) -> Tree:
    """The float32 state that `encode` was given, up to rounding."""
    state = {name: tree for name, tree in kept.items() if not name.endswith(EXPONENT)}
    for name, form in self._forms(kept):
      if form == "bfloat16":
        state[name] = jax.tree.map(lambda x: x.astype(jnp.float32), kept[name])
      else:
        decode = decode_second if name in SECOND else decode_first
        state[name] = jax.tree.map(decode, kept[name], kept[name + EXPONENT])
    return state

  def _forms(self, state: Tree) -> list[tuple[str, str]]:
    """(name, form) of the trees that are not kept in float32."""
    named = [(name, self.first) for name in FIRST] + [(name, self.second) for name in SECOND]
    return [(name, form) for name, form in named if name in state and form != "float32"]


# ---------------------------------------------------------------------------------------------- stochastic rounding


def rounding_bits(seed: int, step: Any, path: str, shape: tuple[int, ...], layer: Any = None) -> jax.Array:
  """32 random bits for each place of an array: uint32, a function of the arguments and the place alone.

  Args:
    seed, step, path: of the run, of the update, of the parameter.
    layer: which part of the parameter it is, of those along its first dimension; None: the whole of it.
  """
  key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), zlib.crc32(f"rounding/{path}".encode()))
  return jax.random.bits(key if layer is None else jax.random.fold_in(key, layer), shape, jnp.uint32)


def to_bfloat16(x: jax.Array, bits: jax.Array) -> jax.Array:
  """`x` rounded to one of its two neighbours in bfloat16, with probabilities that keep the mean.

  Args:
    x: any float dtype.
    bits: uint32 of the same shape, of which the lower 16 are random.
  """
  raw = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
  # The fraction that is cut off carries into the rest with the probability of its size.
  upper = (raw + (bits & 0xFFFF)) >> 16
  return jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)


# ---------------------------------------------------------------------------------------------- int8


def encode_first(x: jax.Array, bits: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(codes int8, exponents uint8) of float32 `x`, rounded with the lower 16 of `bits`. Below the smallest magnitude
  it becomes that or 0, also without bias."""
  raw = _raw(jnp.abs(x))
  exponents = _exponents(raw)
  base = _base(exponents, _TOP_FIRST)
  codes = jnp.clip(_rounded(raw, bits) - base, 0, _TOP_FIRST)
  smallest = _value(jnp.maximum(base + 1, 1))
  up = (bits & 0xFFFF).astype(jnp.float32) * smallest < jnp.abs(x) * 2.0**16
  codes = jnp.where(jnp.abs(x) < smallest, up.astype(jnp.int32), codes)
  return jnp.where(x < 0, -codes, codes).astype(jnp.int8), exponents.astype(jnp.uint8)


def decode_first(codes: jax.Array, exponents: jax.Array) -> jax.Array:
  """The float32 values of `encode_first`."""
  magnitude = jnp.abs(codes.astype(jnp.int32))
  values = jnp.where(magnitude > 0, _value(magnitude + _base(exponents, _TOP_FIRST)), 0.0)
  return jnp.where(codes < 0, -values, values)


def encode_second(x: jax.Array, bits: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(codes uint8, exponents uint8) of float32 `x` of at least 0, rounded with the lower 16 of `bits`."""
  raw = _raw(x)
  exponents = _exponents(raw)
  codes = jnp.clip(_rounded(raw, bits) - _base(exponents, _TOP_SECOND), 0, _TOP_SECOND)
  return codes.astype(jnp.uint8), exponents.astype(jnp.uint8)


def decode_second(codes: jax.Array, exponents: jax.Array) -> jax.Array:
  """The float32 values of `encode_second`."""
  return _value(codes.astype(jnp.int32) + _base(exponents, _TOP_SECOND))


def _raw(x: jax.Array) -> jax.Array:
  """The bits of float32 numbers of at least 0, which are in the order of the numbers: int32."""
  return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def _rounded(raw: jax.Array, bits: jax.Array) -> jax.Array:
  """Exponent and 3 bits of mantissa of a float32, rounded up or down at random."""
  return (raw + ((bits & 0xFFFF) << (_DROPPED - 16)).astype(jnp.int32)) >> _DROPPED


def _exponents(raw: jax.Array) -> jax.Array:
  """The exponent bits of each row's largest number: int32 [..., 1]."""
  largest = jnp.max(raw, axis=-1, keepdims=True) if raw.ndim else raw
  return jnp.minimum(largest >> 23, _MAX_EXPONENT)


def _base(exponents: jax.Array, top: int) -> jax.Array:
  """What a code is an offset from, in units of an eighth of an octave: code `top` stands for 2^(E + 1)."""
  return ((exponents.astype(jnp.int32) + 1) << _MANTISSA_BITS) - top


def _value(eighths: jax.Array) -> jax.Array:
  """The float32 with these bits of exponent and mantissa; 0 where they are below the smallest float32."""
  return jax.lax.bitcast_convert_type(jnp.maximum(eighths, 0) << _DROPPED, jnp.float32)
