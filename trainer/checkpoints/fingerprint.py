"""A short name for the exact values of a tree of arrays, wherever they lie.

Two trees have the same fingerprint if and (but for chance, 1 in 2^64 a leaf) only if their paths, shapes, dtypes and
bits are equal. It is computed on the devices, from integer sums, which no sharding and no order of addition can
change; nothing is gathered.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer import tree as tree_lib

# Odd constants of the mixing function (SplitMix and MurmurHash3); one column for each of the two sums.
_SEEDS = (0x9E3779B9, 0x85EBCA6B)
_DIMENSIONS = (0x9E3779B1, 0xC2B2AE35, 0x27D4EB2F, 0x165667B1, 0x85EBCA77, 0xD3A2646D)


def fingerprint(tree: Mapping[str, Any]) -> str:
  """32 hexadecimal digits for a nested dict of arrays."""
  digest = hashlib.blake2b(digest_size=16)
  leaves = tree_lib.flatten(tree)
  sums = jax.device_get(_all_sums(leaves))
  for path, leaf in sorted(leaves.items()):
    digest.update(f"{path} {leaf.shape} {leaf.dtype} {[int(s) for s in sums[path]]}\n".encode())
  return digest.hexdigest()


def checksums(leaves: Mapping[str, jax.Array]) -> dict[str, str]:
  """16 hexadecimal digits for each array of a flat dict, of its bits alone."""
  return {path: "".join(f"{int(s):08x}" for s in sums) for path, sums in jax.device_get(_all_sums(leaves)).items()}


@jax.jit
def _all_sums(leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  return {path: _sums(leaf) for path, leaf in leaves.items()}


@jax.jit  # traced once for all leaves of a shape
def _sums(leaf: jax.Array) -> jax.Array:
  """Two sums [2], uint32, over the elements of a mix of each one's bits and its index."""
  bits = _bits(jax.device_put(leaf, jax.memory.Space.Device))  # it may be in the host's memory
  index = jnp.zeros(leaf.shape, jnp.uint32)
  for dim, size in enumerate(leaf.shape):
    iota = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, dim)
    index = (index + iota) * np.uint32(_DIMENSIONS[dim % len(_DIMENSIONS)]) + np.uint32(size)
  return jnp.stack([jnp.sum(_mix(bits ^ _mix(index + np.uint32(seed))), dtype=jnp.uint32) for seed in _SEEDS])


def _mix(x: jax.Array) -> jax.Array:
  """MurmurHash3's finaliser: every bit of the result depends on every bit of `x`."""
  x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
  return x ^ (x >> 16)


def _bits(leaf: jax.Array) -> jax.Array:
  """The elements' bits as uint32; of 64-bit ones both halves, mixed."""
  size = leaf.dtype.itemsize
  if leaf.dtype == jnp.bool_:
    return leaf.astype(jnp.uint32)
  if size == 8:
    halves = jax.lax.bitcast_convert_type(leaf, jnp.uint32)
    return _mix(halves[..., 0]) ^ (halves[..., 1] * np.uint32(3))
  return jax.lax.bitcast_convert_type(leaf, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[size]).astype(jnp.uint32)
