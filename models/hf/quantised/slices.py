"""Slices of a tensor that is made of others, a few rows at a time, so that little is in float32 at once."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

# So many numbers are unpacked at once.
AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Packed:
  """What a tensor is made of.

  Attributes:
    parts: TensorInfo of the tensors in the files.
    unpack: `(*arrays of the parts, index) -> array`: the slice `whole[index]`.
  """

  parts: tuple[Any, ...]
  unpack: Callable[..., np.ndarray]


def filled(shape: tuple[int, ...], dtype: Any, index: tuple[slice, ...],
           make: Callable[[tuple[int, ...], slice, slice], np.ndarray]) -> np.ndarray:
  """`whole[index]` of a whole [..., N, K].

  Args:
    shape, dtype: of the whole.
    index: slices without steps; fewer than dimensions: the others are whole.
    make: `make(before, rows, columns)` gives those rows and columns of the matrix whole[before], in any dtype.
  """
  *before, rows, columns = (range(*part.indices(n)) for part, n in zip(
      (*index, *[slice(None)] * len(shape)), shape, strict=False))
  values = np.empty((*map(len, before), len(rows), len(columns)), dtype)
  step = max(1, AT_ONCE // max(1, shape[-1]))
  for place in itertools.product(*map(range, map(len, before))):
    where = tuple(part[i] for part, i in zip(before, place, strict=True))
    for start in range(rows.start, rows.stop, step):
      stop = min(start + step, rows.stop)
      values[place][start - rows.start:stop - rows.start] = make(
          where, slice(start, stop), slice(columns.start, columns.stop))
  return values


def bits_of(words: np.ndarray, bits: int) -> np.ndarray:
  """[..., W] int32 -> [..., W, 32 / bits]: the numbers in each word, the lowest bits first."""
  shifts = np.arange(0, 32, bits, dtype=np.uint32)
  return (words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
