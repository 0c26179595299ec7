"""Matrices in four or eight bits as bitsandbytes stores them: QLoRA's nf4 (Dettmers et al. 2023, arXiv 2305.14314,
section 3), fp4, and LLM.int8() (arXiv 2208.07339).

In four bits, NAME is [numel / 2, 1] uint8: codes of a matrix's numbers, row after row, of which two share a byte, the
first in its high bits. A code is an entry of NAME.quant_map, times the scale of its block, NAME.absmax; with double
quantisation these scales are codes themselves. NAME.quant_state.bitsandbytes__nf4 is JSON with the shape.
In eight bits, NAME [N, K] int8 has a scale for each row, SCB / 127.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from models.hf.errors import HFError
from models.hf.quantised.slices import Packed, filled

_STATE = ".quant_state.bitsandbytes__"
_DTYPES = {"bfloat16": ("BF16", ml_dtypes.bfloat16), "float16": ("F16", np.float16), "float32": ("F32", np.float32)}


def problem(options: Mapping[str, Any]) -> str:
  """What of the options is not read; "": nothing."""
  kind = options.get("bnb_4bit_quant_type", "nf4")
  return "" if kind in ("nf4", "fp4") else f"bnb_4bit_quant_type {kind!r}"


def find(tensors: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, tuple[tuple[str, ...], Any]]:
  """See models/hf/quantised."""
  found: dict[str, tuple[tuple[str, ...], Any]] = {}
  for name, info in tensors.items():
    whole, is_state, _ = name.partition(_STATE)
    if is_state and whole in tensors:
      found[whole] = _four_bits(tensors, whole, name)
    elif name.split(".")[-1] == "SCB":
      module = name.removesuffix("SCB")
      codes = tensors.get(f"{module}weight")
      if codes is not None and codes.dtype == "I8" and info.shape == codes.shape[:1]:
        form = tensors.get(f"{module}weight_format")
        if form is not None and (said := _bytes(form)) != b"\0":
          raise HFError(f"{form.file}: {module}weight_format is {said[0]}; rows one after another (0) are read alone. "
                        "Fetch the model in float32, bfloat16 or float16.")
        found[f"{module}weight"] = ((name, f"{module}weight_format"), dataclasses.replace(
            codes, dtype="BF16", packed=Packed((codes, info), of_eight_bits)))
  return found


def _four_bits(tensors: Mapping[str, Any], whole: str, state: str) -> tuple[tuple[str, ...], Any]:
  """Of `find`, the entry of one matrix."""
  info = tensors[state]
  try:
    said = json.loads(_bytes(info))
    shape, (dtype, kind) = tuple(map(int, said["shape"])), _DTYPES[said["dtype"]]
    names = [whole, f"{whole}.absmax", f"{whole}.quant_map"]
    layout = FourBits(shape, kind, int(said["blocksize"]))
    if "nested_blocksize" in said:
      names += [f"{whole}.nested_absmax", f"{whole}.nested_quant_map"]
      layout = layout._replace(nested_block=int(said["nested_blocksize"]), offset=float(said["nested_offset"]))
    unpack = functools.partial(of_four_bits, layout)
    parts = tuple(tensors[name] for name in names)
    if len(shape) != 2 or 2 * int(np.prod(parts[0].shape)) < int(np.prod(shape)):
      raise ValueError(f"shape {shape}")
  except (KeyError, ValueError, TypeError, AttributeError) as e:
    raise HFError(f"{info.file}: {state} does not say how {whole} is stored ({type(e).__name__}: {e}). Fetch the "
                  "folder again.") from e
  return (*names, state), dataclasses.replace(parts[0], shape=shape, dtype=dtype, packed=Packed(parts, unpack))


def _bytes(info: Any) -> bytes:
  """What a small tensor of uint8 holds."""
  with open(info.file, "rb") as f:
    f.seek(info.offset)
    return f.read(int(np.prod(info.shape, dtype=int)))


class FourBits(NamedTuple):
  """How a matrix [N, K] is stored: numbers of a block have one scale, and with double quantisation scales of a
  `nested_block` have one, to which `offset` is added."""

  shape: tuple[int, ...]
  dtype: Any
  block: int
  nested_block: int = 0
  offset: float = 0.0


def of_four_bits(layout: FourBits, codes: np.ndarray, absmax: np.ndarray, values_16: np.ndarray, *more: Any
                 ) -> np.ndarray:
  """`whole[index]` of a matrix [N, K]; `more`: with double quantisation its two arrays, then the index."""
  (shape, dtype, block, nested_block, offset), (*nested, index) = layout, more
  codes, K = codes.reshape(-1), shape[1]

  def scale(first: int, last: int) -> np.ndarray:
    blocks = np.arange(first, last)
    if not nested:
      return absmax[blocks]
    scales, values_256 = nested
    return values_256[absmax[blocks]] * scales[blocks // nested_block] + np.float32(offset)

  def make(where: tuple[int, ...], rows: slice, columns: slice) -> np.ndarray:
    first, last = rows.start * K, rows.stop * K
    from_byte = first // 2
    pairs = codes[from_byte:-(-last // 2)]
    numbers = values_16[np.stack([pairs >> 4, pairs & 15], axis=-1).reshape(-1)][first - 2 * from_byte:][:last - first]
    of_block = np.arange(first, last) // block
    scales = scale(first // block, -(-last // block))[of_block - first // block]
    return (numbers * scales).reshape(-1, K)[:, columns]

  return filled(shape, dtype, index, make)


def of_eight_bits(codes: np.ndarray, scales_N: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
  """`whole[index]` of a matrix [N, K], bfloat16."""
  def make(where: tuple[int, ...], rows: slice, columns: slice) -> np.ndarray:
    return codes[rows, columns].astype(np.float32) * scales_N[rows, None].astype(np.float32) * np.float32(1 / 127)

  return filled(codes.shape, ml_dtypes.bfloat16, index, make)
