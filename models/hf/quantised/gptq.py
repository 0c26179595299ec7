"""Matrices of integers as GPTQ's tools store them (Frantar et al. 2022, arXiv 2210.17323).

A linear layer MODULE.weight [N, K] is  w[n, k] = scales[g, n] (q[n, k] - zeros[g, n]),  g = g_idx[k] the group of input
k. MODULE.qweight [K b / 32, N] int32 has the q of 32 / b inputs in a word, MODULE.qzeros [G, N b / 32] the zeros of
as many outputs; in the format `gptq` less 1, in `gptq_v2` as they are. Where a zero less 1 is below 0 it has borrowed
from the next of its word; adding the ones to words, not to numbers, gives that back.

N outputs, K inputs, G groups, b bits.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from models.hf.quantised.slices import Packed, bits_of, filled

BITS = (2, 4, 8)
_FORMATS = {"gptq": 1, "gptq_v2": 0}


def problem(options: Mapping[str, Any]) -> str:
  """What of the options is not read; "": nothing."""
  if options.get("bits") not in BITS:
    return f"bits {options.get('bits')!r}; read are {', '.join(map(str, BITS))}"
  form = options.get("checkpoint_format", "gptq")
  return "" if form in _FORMATS else f"checkpoint_format {form!r}; read are {', '.join(_FORMATS)}"


def find(tensors: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, tuple[tuple[str, ...], Any]]:
  """See models/hf/quantised."""
  found: dict[str, tuple[tuple[str, ...], Any]] = {}
  bits, above = options["bits"], _FORMATS[options.get("checkpoint_format", "gptq")]
  for name, words in tensors.items():
    module = name.removesuffix("qweight")
    names = (name, f"{module}qzeros", f"{module}scales", f"{module}g_idx")
    if module == name or not all(part in tensors for part in names[:3]):
      continue
    K, N = words.shape[0] * 32 // bits, words.shape[1]
    parts = tuple(tensors[part] for part in names if part in tensors)
    G = parts[2].shape[0]
    if (words.dtype, parts[1].dtype) != ("I32", "I32") or parts[1].shape != (G, N * bits // 32) or (
        parts[2].shape != (G, N) or (len(parts) > 3 and parts[3].shape != (K,))):
      continue
    unpack = functools.partial(dequantised, bits=bits, above=above, group=-(-K // G))
    found[f"{module}weight"] = (names, dataclasses.replace(words, shape=(N, K), dtype=parts[2].dtype,
                                                           packed=Packed(parts, unpack)))
  return found


def dequantised(words: np.ndarray, zeros: np.ndarray, scales_GxN: np.ndarray, *more: Any, bits: int, above: int,
                group: int) -> np.ndarray:
  """`whole[index]`, in the scales' dtype; `more`: the group of each input where the folder says it, then the index.

  Args:
    above: by how much a zero is above the number that is stored, 1 or 0.
    group: inputs of a group, where they are in order.
  """
  *groups, index = more
  each, N = 32 // bits, words.shape[1]
  ones = np.uint32(above * sum(1 << shift for shift in range(0, 32, bits)))
  K = len(words) * each
  group_K = groups[0] if groups else np.arange(K) // group

  def make(where: tuple[int, ...], rows: slice, columns: slice) -> np.ndarray:
    first = columns.start // each
    codes = bits_of(np.ascontiguousarray(words[first:-(-columns.stop // each), rows].T), bits)
    codes_NxK = codes.reshape(len(codes), -1)[:, columns.start - first * each:][:, :columns.stop - columns.start]
    first = rows.start // each
    of_rows = np.ascontiguousarray(zeros[:, first:-(-rows.stop // each)]).view(np.uint32) + ones
    zero_GxN = bits_of(of_rows, bits).reshape(len(zeros), -1).astype(np.int32)
    zero_GxN = zero_GxN[:, rows.start - first * each:][:, :rows.stop - rows.start]
    g = group_K[columns]
    return (codes_NxK.astype(np.int32) - zero_GxN[g].T) * scales_GxN[g][:, rows].T.astype(np.float32)

  return filled((N, K), scales_GxN.dtype, index, make)
