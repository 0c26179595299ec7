"""Matrices of integers of four bits as AWQ's tools store them (Lin et al. 2023, arXiv 2306.00978), layout `gemm`.

A linear layer MODULE.weight [N, K] is  w[n, k] = scales[g, n] (q[n, k] - zeros[g, n]),  g the group of input k.
MODULE.qweight [K, N / 8] int32 has the q of eight outputs in a word, MODULE.qzeros [G, N / 8] as many zeros, both in
the order 0 2 4 6 1 3 5 7 from the lowest bits on.

N outputs, K inputs, G groups.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from models.hf.quantised.slices import Packed, bits_of, filled

EACH, BITS = 8, 4
# Where the numbers 0, 1, … of a word stand in it.
_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])


def problem(options: Mapping[str, Any]) -> str:
  """What of the options is not read; "": nothing."""
  allowed = {"bits": (BITS,), "version": ("gemm", None), "zero_point": (True, None)}
  said = {key: options.get(key) for key in allowed}
  said["version"] = str(said["version"]).lower() if said["version"] is not None else None
  return " and ".join(f"{key} {said[key]!r}" for key, values in allowed.items() if said[key] not in values)


def find(tensors: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, tuple[tuple[str, ...], Any]]:
  """See models/hf/quantised."""
  found: dict[str, tuple[tuple[str, ...], Any]] = {}
  for name, words in tensors.items():
    module = name.removesuffix("qweight")
    names = (name, f"{module}qzeros", f"{module}scales")
    if module == name or not all(part in tensors for part in names):
      continue
    parts = tuple(tensors[part] for part in names)
    K, N = words.shape[0], words.shape[1] * EACH
    G = parts[2].shape[0]
    if (words.dtype, parts[1].dtype) == ("I32", "I32") and parts[1].shape == (G, N // EACH) and (
        parts[2].shape == (G, N) and K % G == 0):
      found[f"{module}weight"] = (names, dataclasses.replace(words, shape=(N, K), dtype=parts[2].dtype,
                                                             packed=Packed(parts, dequantised)))
  return found


def dequantised(words: np.ndarray, zeros: np.ndarray, scales_GxN: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
  """`whole[index]`, in the scales' dtype."""
  K, (G, N) = len(words), scales_GxN.shape

  def numbers(words: np.ndarray, outputs: slice) -> np.ndarray:
    """[R, W] words -> [R, outputs] int32."""
    first = outputs.start // EACH
    codes = bits_of(np.ascontiguousarray(words[:, first:-(-outputs.stop // EACH)]), BITS)[..., _PLACES]
    codes = codes.reshape(len(words), -1).astype(np.int32)
    return codes[:, outputs.start - first * EACH:][:, :outputs.stop - outputs.start]

  def make(where: tuple[int, ...], rows: slice, columns: slice) -> np.ndarray:
    g = np.arange(columns.start, columns.stop) * G // K
    return ((numbers(words[columns], rows) - numbers(zeros, rows)[g]) * scales_GxN[g][:, rows].astype(np.float32)).T

  return filled((N, K), scales_GxN.dtype, index, make)
