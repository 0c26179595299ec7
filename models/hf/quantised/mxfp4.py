"""Experts stored in MXFP4 (OCP Microscaling Formats 1.0), as gpt-oss is published: read as the bfloat16 they stand for.

A pair of tensors uint8, NAME_blocks [E, N, K / 32, 16] and NAME_scales [E, N, K / 32], is the tensor NAME [E, K, N] of
transformers: each byte of a block is two numbers of four bits, the low ones first, and 32 of them have one scale, a
power of two.

E experts, K inputs, N outputs, G groups of 32 inputs.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from models.hf.quantised.slices import Packed, filled

# By their codes: a sign, two bits of exponent, one of mantissa.
_POSITIVE = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
VALUES = np.concatenate([_POSITIVE, -_POSITIVE])
GROUP, BIAS = 32, 127


def find(tensors: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, tuple[tuple[str, ...], Any]]:
  """See models/hf/quantised."""
  found: dict[str, tuple[tuple[str, ...], Any]] = {}
  for name, blocks in tensors.items():
    whole = name.removesuffix("_blocks")
    scales = tensors.get(f"{whole}_scales")
    if whole != name and scales is not None and (blocks.dtype, scales.dtype) == ("U8", "U8") and (
        blocks.shape == (*scales.shape, GROUP // 2) and len(scales.shape) == 3):
      E, N, G = scales.shape
      found[whole] = ((name, f"{whole}_scales"), dataclasses.replace(
          blocks, shape=(E, G * GROUP, N), dtype="BF16", packed=Packed((blocks, scales), dequantised)))
  return found


def dequantised(blocks_ExNxGx16: np.ndarray, scales_ExNxG: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
  """`whole[index]`, bfloat16."""
  E, N, G = scales_ExNxG.shape

  def make(where: tuple[int, ...], inputs: slice, outputs: slice) -> np.ndarray:
    groups = slice(inputs.start // GROUP, -(-inputs.stop // GROUP))
    (e,) = where
    codes, scales = blocks_ExNxGx16[e, outputs, groups], scales_ExNxG[e, outputs, groups, None]
    both = VALUES[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(*codes.shape[:2], GROUP)
    whole_NxK = np.ldexp(both, scales.astype(np.int32) - BIAS).reshape(len(codes), -1)
    return whole_NxK.T[inputs.start - groups.start * GROUP:][:inputs.stop - inputs.start]

  return filled((E, G * GROUP, N), ml_dtypes.bfloat16, index, make)
