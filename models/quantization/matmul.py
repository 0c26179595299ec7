"""Matrix products of 8-bit numbers (`config.precision.matmul`): int8, or the floating-point formats e4m3 and e5m2.

A product y = x w of rows x [M, K] with a kernel w [K, N] becomes  s_x[m] s_w[n] Σ_k x̂[m, k] ŵ[k, n]:  each row of x
and each column of w is divided by its own scale, so that its largest entry is the format's largest number, and rounded.
Scales are computed anew each time and belong to one row or column, so that no token depends on the tokens beside it.
Where devices hold parts of the inputs (o and down over the mesh axis `tensor`), a row and a column have a scale of
their own on each, so that numbers are rounded a little differently there.

Gradients pass through the rounding as if it were none (straight-through), so they are those of the product of what was
rounded:

  dx = g ŵᵀ   with `gradients` inputs or all, g times s_w is rounded row by row and multiplied by the codes of w;
  dw = x̂ᵀ g   with `gradients` all, g times s_x is rounded column by column and multiplied by the codes of x.

The second sums over all tokens of the micro-batch, which is where rounding hurts: SwitchBack (Wortsman et al. 2023,
arXiv 2304.13013, section 2) keeps it in 16 bits, and so does `inputs`, the default. With `all`, one scale serves a
column of the whole micro-batch, so that gradients depend on how a batch is cut into micro-batches. fp8 is e4m3 forward
and e5m2 for gradients (Micikevicius et al. 2022, arXiv 2209.05433, section 3). What is kept for the backward pass are
the codes (on a mesh, what enters: kernels are gathered, and rounded, once more).

M rows, K inputs, N outputs, E experts.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from models import cpu
from models.quantization.quantize import DECIDING
from trainer import tree
from trainer.errors import ConfigError

# (forward, gradients)
_TYPES = {"int8": (jnp.int8, jnp.int8), "fp8": (jnp.float8_e4m3fn, jnp.float8_e5m2)}


@dataclasses.dataclass(frozen=True)
class QuantizedMatmul:
  """A matmul of 8-bit numbers: `form` int8 or fp8, `gradients` "none", "inputs" or "all"."""

  form: str
  gradients: str = "inputs"

  def __call__(self, x_MxK: jax.Array, w_KxN: jax.Array) -> jax.Array:
    """About x @ w, in the dtype of x, which is that of w."""
    return _matmul(x_MxK, w_KxN, self)

  def grouped(self, x_MxK: jax.Array, w_ExKxN: jax.Array, sizes_E: jax.Array, block: int, multiply: Callable,
              outer: Callable) -> jax.Array:
    """About `moe.grouped_matmul(x, w, sizes, block)`.

    Args:
      multiply: `multiply(x, w, sizes, block, transpose, dtype)`, the product itself, in that dtype.
      outer: `outer(x, g, sizes, block, dtype)`, the sum over each group's rows of xᵀ g: [E, K, N].
    """
    return _grouped(x_MxK, w_ExKxN, sizes_E, self, block, multiply, outer)

  def quantize(self, x: jax.Array, along: int, gradient: bool = False) -> Any:
    """The `qwix.QArray` of `x`, with one scale for all entries along that dimension; values and scales as float32."""
    import qwix  # here, and below: only runs with such products wait for it
    kind = _TYPES[self.form][gradient]
    return qwix.quantize(x.astype(jnp.float32), kind, channelwise_axes=[i for i in range(x.ndim) if i != along])

  @property
  def sums(self) -> Any:
    """The dtype that products of codes add up in."""
    return jnp.int32 if self.form == "int8" else jnp.float32


@dataclasses.dataclass(frozen=True)
class MatmulRules:
  """Which kernels of the blocks are multiplied in 8 bits: all but routers, gates (shared ones, and those of
  delta layers), the steps of mamba layers, and those that match `skip`."""

  matmul: QuantizedMatmul
  skip: tuple[str, ...] = ()

  def of(self, path: str) -> QuantizedMatmul | None:
    """The matmul of the kernel at that path; None: a plain one."""
    quantized = path.startswith("blocks/") and path.endswith("/kernel") and not DECIDING.search(path)
    return self.matmul if quantized and not any(re.search(skip, path) for skip in self.skip) else None

  def check(self, paths: Collection[str]) -> None:
    """Refuses a `skip` that matches none of the kernels, or all.

    Raises:
      ConfigError: naming the pattern, and the kernels that there are.
    """
    kernels = [path for path in paths if MatmulRules(self.matmul).of(path)]
    if kernels and len(tree.select(self.skip, kernels, "precision.matmul_skip")) == len(kernels):
      raise ConfigError(f"precision.matmul_skip = {self.skip!r} leaves no kernel to be multiplied in "
                        f"{self.matmul.form}; there are {', '.join(kernels[:8])}. Use --config.precision.matmul=none.")


def make_matmul_rules(form: str, gradients: str = "inputs", skip: Sequence[str] = ()) -> MatmulRules | None:
  """The `MatmulRules` of the keys `precision.matmul`, `matmul_gradients` and `matmul_skip`; None for `none`.

  Raises:
    ConfigError: the library that this needs is not installed.
  """
  if form == "none":
    return None
  return MatmulRules(QuantizedMatmul(form, gradients), tuple(skip))


# ---------------------------------------------------------------------------------------------- one matrix


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x_MxK: jax.Array, w_KxN: jax.Array, how: QuantizedMatmul) -> jax.Array:
  return _matmul_fwd(x_MxK, w_KxN, how)[0]


def _matmul_fwd(x_MxK, w_KxN, how):
  x, w = how.quantize(x_MxK, along=1), how.quantize(w_KxN, along=0)
  import qwix
  y_MxN = qwix.dot_general(x, w, (((1,), (0,)), ((), ())))
  return y_MxN.astype(x_MxK.dtype), (x, w)


def _matmul_bwd(how, saved, g_MxN):
  import qwix
  (x, w), dtype, dot = saved, g_MxN.dtype, qwix.dot_general
  if how.gradients == "none":
    dx_MxK = cpu.inputs_gradient(g_MxN, _restored(w, dtype))
  else:
    scaled = how.quantize(g_MxN * w.scale, along=1, gradient=True)
    dx_MxK = dot(scaled, w.qvalue, (((1,), (1,)), ((), ())))
  if how.gradients == "all":
    scaled = how.quantize(g_MxN * x.scale, along=0, gradient=True)
    dw_KxN = cpu.kernel_gradient(x.qvalue, scaled.qvalue, how.sums).astype(jnp.float32) * scaled.scale
  else:
    dw_KxN = cpu.kernel_gradient(_restored(x, dtype), g_MxN)
  return dx_MxK.astype(dtype), dw_KxN.astype(dtype)


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def _restored(array: Any, dtype: Any) -> jax.Array:
  import qwix
  return qwix.dequantize(array).astype(dtype)


# ---------------------------------------------------------------------------------------------- one matrix per group


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _grouped(x_MxK, w_ExKxN, sizes_E, how: QuantizedMatmul, block: int, multiply: Callable, outer: Callable
             ) -> jax.Array:
  return _grouped_fwd(x_MxK, w_ExKxN, sizes_E, how, block, multiply, outer)[0]


def _grouped_fwd(x_MxK, w_ExKxN, sizes_E, how, block, multiply, outer):
  x, w = how.quantize(x_MxK, along=1), how.quantize(w_ExKxN, along=1)
  y_MxN = multiply(x.qvalue, w.qvalue, sizes_E, block, False, how.sums)
  y_MxN = y_MxN.astype(jnp.float32) * x.scale * _scales_of_rows(w, sizes_E, len(x_MxK))
  return y_MxN.astype(x_MxK.dtype), (x, w, sizes_E)


def _grouped_bwd(how, block, multiply, outer, saved, g_MxN):
  (x, w, sizes_E), dtype = saved, g_MxN.dtype
  if how.gradients == "none":
    dx_MxK = multiply(g_MxN, _restored(w, dtype), sizes_E, block, True, dtype)
  else:
    scaled = how.quantize(g_MxN * _scales_of_rows(w, sizes_E, len(g_MxN)), along=1, gradient=True)
    dx_MxK = multiply(scaled.qvalue, w.qvalue, sizes_E, block, True, how.sums).astype(jnp.float32) * scaled.scale
  if how.gradients == "all":
    scaled = how.quantize(g_MxN * x.scale, along=0, gradient=True)
    dw_ExKxN = outer(x.qvalue, scaled.qvalue, sizes_E, block, how.sums).astype(jnp.float32) * scaled.scale
  else:
    dw_ExKxN = outer(_restored(x, dtype), g_MxN, sizes_E, block, jnp.float32)
  return dx_MxK.astype(dtype), dw_ExKxN.astype(dtype), None


_grouped.defvjp(_grouped_fwd, _grouped_bwd)


def _scales_of_rows(w: Any, sizes_E: jax.Array, rows: int) -> jax.Array:
  """For each row the scales of its group's columns: float32 [M, N]; those of the last group beyond the groups."""
  return jnp.repeat(w.scale[:, 0], sizes_E, axis=0, total_repeat_length=rows)
