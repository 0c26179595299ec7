"""How parameters are kept in memory: frozen matrices in 8 or 4 bits, other frozen parameters in bfloat16.

A quantised kernel [..., in, out] is kept as plain arrays beside where it would be, of the same rank:

  int8  kernel_int8 [..., in, out] int8,      kernel_scale [..., 1, out] float32: one scale per output;
  nf4   kernel_nf4 [..., in / 2, out] uint8,  kernel_scale [..., ceil(in / 64), out] float32: one per 64 inputs.

nf4 is QLoRA's 4-bit NormalFloat (Dettmers et al. 2023, arXiv 2305.14314, section 3 and appendix E), without its second
quantisation of the scales: 4.5 bits per weight. Of a byte, the low half is the even row's code. Kernels are turned back
into the compute dtype where they are used, one layer at a time, and again in the backward pass.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.errors import ConfigError

KINDS = ("int8", "nf4")
# Inputs that share a scale in nf4.
BLOCK = 64
# Kernels of the blocks that decide rather than compute: small, and not worth an error.
DECIDING = re.compile(r"/(router|shared_gate|indexer/weights|delta/[ab]|mamba/dt)/")
# Of the blocks, kernels that are read in float32.
FLOAT32 = ("router/kernel", "indexer/weights/kernel")
_PART = re.compile(r"^(.*kernel)_(int8|nf4|scale)$")


def _normal_float() -> np.ndarray:
  """The 16 values of nf4, float32: the normal distribution's quantiles at evenly spaced probabilities, 8 above zero and
  7 below, zero itself, all divided by the largest."""
  first = 1 - (1 / 32 + 1 / 30) / 2
  above, below = ([NormalDist().inv_cdf(first + (0.5 - first) * i / n) for i in range(n)] for n in (8, 7))
  values = sorted([*above, 0.0, *(-q for q in below)])
  return np.array(values, np.float64).astype(np.float32) / np.float32(values[-1])


NORMAL_FLOAT = _normal_float()


@dataclasses.dataclass(frozen=True)
class Frozen:
  """In which form the parameters are kept that are not trained.

  Args:
    form: the name of a dtype, or one of KINDS for the matrices of the blocks, and bfloat16 for the rest.
    includes: whether the parameter of that path is frozen.
  """

  form: str
  includes: Callable[[str], bool]

  def kind(self, path: str) -> str | None:
    """One of KINDS, the name of a dtype, or None for a parameter that is trained."""
    if not self.includes(path) or self.form not in KINDS:
      return self.form if self.includes(path) else None
    is_matrix = path.startswith("blocks/") and path.endswith("/kernel") and not DECIDING.search(path)
    return self.form if is_matrix else "bfloat16"


def frozen(form: str, freeze: Sequence[str], trained_only: str | None) -> Frozen:
  """How frozen parameters are kept; see `models.api.make_model`, which has `trained_only` from the adapters."""
  if form in KINDS and trained_only is None:
    raise ConfigError(f"precision.frozen is {form}, but nothing is trained on top of quantised matrices: that needs "
                      "adapters, model.lora.rank of at least 1. Without them use float32 or bfloat16.")

  def is_frozen(path: str) -> bool:
    others = trained_only is not None and not re.search(trained_only, path)
    return others or any(re.search(pattern, path) for pattern in freeze)

  return Frozen(form, is_frozen)


def quantize(kernel: jax.Array, kind: str, path: str = "a kernel") -> dict[str, jax.Array]:
  """The parts of a kernel [..., in, out], by the end of their name: `_int8` or `_nf4`, and `_scale`.

  Raises:
    ConfigError: nf4 with an odd number of inputs.
  """
  w = kernel.astype(jnp.float32)
  if kind == "int8":
    scale = jnp.max(jnp.abs(w), axis=-2, keepdims=True) / 127
    return {"_int8": jnp.round(_divide(w, scale)).astype(jnp.int8), "_scale": scale}
  *lead, rows, out = w.shape
  if rows % 2:
    raise ConfigError(f"precision.frozen is nf4, which keeps two inputs in a byte, but {path} has {rows} of them. Use "
                      "--config.precision.frozen=int8.")
  blocks = _blocks(w)
  scale = jnp.max(jnp.abs(blocks), axis=-2)
  normed = _divide(blocks, scale[..., None, :]).reshape(*lead, -1, out)[..., :rows, :]
  borders = (NORMAL_FLOAT[1:] + NORMAL_FLOAT[:-1]) / 2
  codes = sum((normed > border).astype(jnp.uint8) for border in borders)
  pairs = codes.reshape(*lead, rows // 2, 2, out)
  return {"_nf4": pairs[..., 0, :] | pairs[..., 1, :] << 4, "_scale": scale}


def dequantize(parts: Mapping[str, jax.Array], dtype: Any) -> jax.Array:
  """The kernel that `quantize` took apart, in `dtype`; values are computed in float32."""
  scale = parts["_scale"]
  if "_int8" in parts:
    return (parts["_int8"] * scale).astype(dtype)
  packed = parts["_nf4"]
  codes = jnp.stack([packed & 15, packed >> 4], axis=-2)
  *lead, half, _, out = codes.shape
  values = jnp.asarray(NORMAL_FLOAT)[codes.reshape(*lead, 2 * half, out)]
  blocks = _blocks(values)
  return (blocks * scale[..., None, :]).reshape(*lead, -1, out)[..., : 2 * half, :].astype(dtype)


def _blocks(w: jax.Array) -> jax.Array:
  """[..., in, out] as [..., blocks, inputs of a block, out], filled up with zeros."""
  *lead, rows, out = w.shape
  block = min(BLOCK, rows)
  padded = jnp.pad(w, [(0, 0)] * len(lead) + [(0, -rows % block), (0, 0)])
  return padded.reshape(*lead, -1, block, out)


def _divide(w: jax.Array, scale: jax.Array) -> jax.Array:
  return w / jnp.where(scale > 0, scale, 1)


# ---------------------------------------------------------------------------------------------- trees, by path


def logical(stored: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
  """The parameters as a checkpoint from elsewhere has them: quantised kernels by their own name, shape, and float32.

  Args:
    stored: {path: array or ShapeDtypeStruct}. Shardings are kept; a kernel has that of its codes.
  """
  shapes = {}
  for path, leaf in stored.items():
    found = _PART.match(path)
    if found is None:
      shapes[path] = _struct(leaf.shape, leaf.dtype, leaf)
    elif found[2] != "scale":
      *lead, rows, out = leaf.shape
      shapes[found[1]] = _struct((*lead, rows * (2 if found[2] == "nf4" else 1), out), jnp.float32, leaf)
  return shapes


def store(path: str, leaf: jax.Array, stored: Mapping[str, Any]) -> dict[str, jax.Array]:
  """One parameter of `logical(stored)` in the form, and with the shardings, of `stored`; the leaf's memory is given up.

  Args:
    leaf: its values; deleted where they are not needed any more.
    stored: {path: ShapeDtypeStruct with a sharding or None}.

  Returns:
    {path: array}, of one part or two.
  """
  if path not in stored:
    kind = next(kind for kind in KINDS if f"{path}_{kind}" in stored)
    shardings = tuple((end, getattr(stored[path + end], "sharding", None)) for end in (f"_{kind}", "_scale"))
    parts = _quantizer(kind, path, None if None in dict(shardings).values() else shardings)(leaf)
  elif leaf.dtype == stored[path].dtype:
    return {path: leaf}
  else:
    parts = {"": leaf.astype(stored[path].dtype)}
  jax.block_until_ready(parts)
  leaf.delete()
  return {path + end: part for end, part in parts.items()}


@functools.cache
def _quantizer(kind: str, path: str, shardings: tuple | None) -> Callable:
  fn = functools.partial(quantize, kind=kind, path=path)
  return jax.jit(fn, out_shardings=None if shardings is None else dict(shardings))


def _struct(shape: tuple[int, ...], dtype: Any, like: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype, sharding=getattr(like, "sharding", None))
