"""Matrices in float8 e4m3 with a scale for each block of 128 × 128, as DeepSeek V3 (arXiv 2412.19437, section 3.3.2)
and Qwen 3's FP8 folders are published, or one for each row or for all.

Beside NAME [..., N, K] stands NAME_scale_inv [..., N / 128, K / 128], by which its numbers are multiplied. What a
program that computes in float8 needs for its activations (`activation_scale`, `input_scale`) is left aside.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from models.hf.quantised.slices import Packed, filled

_SUFFIX, _ACTIVATIONS = "_scale_inv", ("activation_scale", "input_scale")


def problem(options: Mapping[str, Any]) -> str:
  """What of the options is not read; "": nothing."""
  block = options.get("weight_block_size")
  if block is not None and not (isinstance(block, (list, tuple)) and len(block) == 2
                                and all(isinstance(n, int) and n > 0 for n in block)):
    return f"weight_block_size {block!r}; it must be two numbers"
  allowed = {"fmt": ("e4m3", None), "expert_dtype": ("fp8", None)}
  wrong = [f"{key} {options.get(key)!r}" for key, values in allowed.items() if options.get(key) not in values]
  return " and ".join(wrong)


def find(tensors: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, tuple[tuple[str, ...], Any]]:
  """See models/hf/quantised."""
  found, block = {}, tuple(options.get("weight_block_size") or ())
  for scales, info in tensors.items():
    whole = scales.removesuffix(_SUFFIX)
    codes = tensors.get(whole)
    if whole == scales or codes is None or codes.dtype != "F8_E4M3" or len(codes.shape) < 2:
      continue
    blocks = _blocks(codes.shape, info.shape, block)
    if blocks is not None:
      module = whole.removesuffix("weight")
      unpack = functools.partial(dequantised, blocks=blocks)
      found[whole] = ((whole, scales, *(module + name for name in _ACTIVATIONS)),
                      dataclasses.replace(codes, dtype="BF16", packed=Packed((codes, info), unpack)))
  return found


def _blocks(shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, int] | None:
  """Rows and columns that share a scale; None: the scales do not fit."""
  N, K = shape[-2:]
  of_blocks = tuple(-(-n // b) for n, b in zip((N, K), block, strict=False))
  if block and scales == (*shape[:-2], *of_blocks):
    return block[0], block[1]
  if scales in ((), (1,), (1, 1)) or scales == (*shape[:-2], 1, 1):
    return N, K
  return (1, K) if scales in ((N,), (*shape[:-1], 1)) else None


def dequantised(codes: np.ndarray, scales: np.ndarray, index: tuple[slice, ...],
                blocks: tuple[int, int]) -> np.ndarray:
  """`whole[index]`, bfloat16; codes [..., N, K], a scale for `blocks` rows and columns."""
  *before, N, K = codes.shape
  grid = (-(-N // blocks[0]), -(-K // blocks[1]))
  scales = scales.astype(np.float32).reshape(*before, *grid) if scales.size > 1 else np.broadcast_to(
      scales.astype(np.float32).reshape(()), (*before, *grid))

  def make(where: tuple[int, ...], rows: slice, columns: slice) -> np.ndarray:
    of_rows = np.arange(rows.start, rows.stop) // blocks[0]
    of_columns = np.arange(columns.start, columns.stop) // blocks[1]
    return codes[where][rows, columns].astype(np.float32) * scales[where][of_rows[:, None], of_columns]

  return filled(codes.shape, ml_dtypes.bfloat16, index, make)
