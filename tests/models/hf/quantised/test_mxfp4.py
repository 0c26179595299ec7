"""MXFP4 against its definition, number by number."""

import numpy as np
import pytest

from models.hf import files
from models.hf.quantised import mxfp4

NUMBERS = np.random.default_rng(0)
E, N, G = 3, 5, 2
BLOCKS = NUMBERS.integers(0, 256, (E, N, G, 16)).astype(np.uint8)
SCALES = NUMBERS.integers(120, 134, (E, N, G)).astype(np.uint8)


def number(code: int) -> float:
  """Sign, two bits of exponent, one of mantissa; an exponent of 0 has no leading one."""
  sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
  return (-1) ** sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1))


def reference() -> np.ndarray:
  whole = np.zeros((E, G * 32, N))
  for e, n, k in np.ndindex(E, N, G * 32):
    byte = int(BLOCKS[e, n, k // 32, k % 32 // 2])
    whole[e, k, n] = number(byte >> 4 if k % 2 else byte & 15) * 2.0 ** (int(SCALES[e, n, k // 32]) - 127)
  return whole


@pytest.mark.parametrize("index", [(), np.s_[1:2], np.s_[0:3, 31:33, 1:4], np.s_[2:3, 32:64], np.s_[0:1, 3:3]])
def test_every_slice_is_that_of_the_numbers_that_are_meant(index):
  index = index if isinstance(index, tuple) else (index,)
  found = mxfp4.dequantised(BLOCKS, SCALES, index)
  assert found.dtype == files.DTYPES["BF16"]
  np.testing.assert_array_equal(found.astype(np.float64), reference()[index])


def test_only_pairs_that_fit_are_joined(tmp_path):
  def info(dtype, *shape):
    return files.TensorInfo(shape, dtype, tmp_path, 0)

  pair = {"a_blocks": info("U8", E, N, G, 16), "a_scales": info("U8", E, N, G)}
  found = mxfp4.find(pair | {"b_blocks": info("F32", E, N, G, 16), "b_scales": info("U8", E, N, G)}, {})
  (names, whole), = found.values()
  assert found.keys() == {"a"} and names == tuple(pair) and whole.packed.parts == tuple(pair.values())
  assert (whole.shape, whole.dtype) == ((E, G * 32, N), "BF16")
  assert not mxfp4.find({"a_blocks": info("U8", E, N, G, 8), "a_scales": info("U8", E, N, G)}, {})
