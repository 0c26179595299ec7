"""Matrix products with split kernels, with every collective written out: ZeRO-3, tensor and sequence parallelism.

On a mesh a kernel [in, out] is split twice: over the axes of `shard` along one of its dimensions, only to save memory,
and over those of heads, MLP width, … along the other, to share out the work (Rajbhandari et al. 2020, arXiv 1910.02054;
Shoeybi et al. 2019, arXiv 1909.08053; Korthikanti et al. 2022, arXiv 2205.05198). What is to be sent follows:

              forward                                        backward
  out split   x gathered over the length of the stream,      gradient of x summed and split over the stream,
              kernel gathered over `shard`                   that of the kernel summed and split over `shard`
  in split    kernel gathered over `shard`,                  gradient of y gathered over the stream,
              y summed and split over the stream             that of the kernel as above

A kernel that is split for no work multiplies the stream's tokens where they are. Gradients of kernels are summed once
more over the devices with other rows that hold the same part. These sums are taken in float32, whatever the products
are computed in: over many devices, partial sums in bfloat16 would lose most of their digits. Kernels are gathered in
the compute dtype and once more in the backward pass; no layer's whole kernel is kept. By hand, since the partitioner
decides such things by the sizes at hand, and sometimes gathers activations.

B batch, T length, K inputs, N outputs.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from models import cpu
from models.remat import named
from models.sharding import logical_axes
from models.sharding.logical_axes import Placement, as_rows, names_of


class SplitKernel(NamedTuple):
  """How to multiply by a kernel; static."""

  # The logical names of its inputs and outputs, of which one at most is split.
  names: tuple[str | None, str | None]
  # x [M, K], w [K, N] -> [M, N]; None: as it is.
  matmul: Callable | None

  @property
  def split_input(self) -> bool:
    return self.names[0] is not None

  def spec(self, placed: Placement, shape: tuple[int, ...]) -> PartitionSpec:
    """How it is split. `shard` takes the dimension that is not split for work."""
    return placed.spec((self.names[0], "shard") if self.split_input else ("shard", self.names[1]), shape)


def project(placed: Placement, x_BxTxK: jax.Array, weights: tuple[jax.Array, ...], kernels: tuple[SplitKernel, ...],
            dtype: Any) -> list[jax.Array]:
  """x @ w for each of several kernels [K, N], in `dtype`: [B, T, N] each.

  Args:
    x_BxTxK: in the layout of the residual stream, or split along K where the kernels' input is.
    weights: the kernels, in any dtype.
    kernels: how to multiply by each; of all or none is the input split.
    dtype: of the products.
  """
  split_input = kernels[0].split_input
  stream = placed.spec(("batch", "stream"), x_BxTxK.shape[:2])
  by_token = placed.spec(("batch", "length"), x_BxTxK.shape[:2])
  specs = tuple(kernel.spec(placed, w.shape) for kernel, w in zip(kernels, weights, strict=True))
  # The axes of the stream's length beyond those of `length`: between layers tokens are split over them.
  beyond = tuple(axis for axis in names_of(stream[1]) if axis not in names_of(by_token[1]))
  if all(kernel.names == (None, None) for kernel in kernels):
    by_token, beyond = stream, ()
  static = _Static(() if split_input else beyond, jnp.dtype(dtype), tuple(
      (names_of(spec[1 if split_input else 0]), 1 if split_input else 0, kernel.matmul)
      for spec, kernel in zip(specs, kernels, strict=True)))

  def local(x, *weights):
    parts = _matmuls(static, x, weights)
    if not split_input:
      return parts
    # Each device has a part of the sum over K.
    return [_summed(part, names_of(spec[0]), beyond) for part, spec in zip(parts, specs, strict=True)]

  if split_input:
    in_spec, out_specs = PartitionSpec(*by_token, specs[0][0]), [PartitionSpec(*stream, None)] * len(specs)
  else:
    in_spec, out_specs = PartitionSpec(*stream, None), [PartitionSpec(*by_token, spec[1]) for spec in specs]
  outputs = jax.shard_map(local, mesh=placed.mesh, in_specs=(in_spec, *specs), out_specs=out_specs, check_vma=False)(
      x_BxTxK, *weights)
  return [named(output, "product") for output in outputs]


def gather(w: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
  """The whole of what is split over these axes along `dim`; inside `shard_map`.

  Axis by axis, the last one first: little travels twice, and each time among the devices of one axis. libtpu 0.0.42
  turns collectives among all devices of a square slice into sums of everything on every device.
  """
  for axis in reversed(axes):
    w = jax.lax.all_gather(w, axis, axis=dim, tiled=True)
  return w


def scatter(total: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
  """This device's part of the sum over the devices along these axes, axis by axis; inside `shard_map`."""
  for axis in axes:
    total = jax.lax.psum_scatter(total, axis, scatter_dimension=dim, tiled=True)
  return total


def all_inputs(w_KxN: jax.Array, names: tuple[str, str]) -> jax.Array:
  """A kernel, or a part of its outputs, with all its inputs on every device; on no mesh as it is.

  To be multiplied by the partitioner; has no gradient that sums in float32, see `kernel_gradient`.

  Args:
    w_KxN: in the dtype that it is to travel in.
    names: logical names of inputs, split only to save memory, and outputs.
  """
  placed = logical_axes.current()
  spec = None if placed is None else placed.spec(names, w_KxN.shape)
  if spec is None or spec[0] is None:
    return w_KxN
  axes = names_of(spec[0])
  return jax.shard_map(lambda w: gather(w, axes, 0), mesh=placed.mesh, in_specs=spec,
                       out_specs=PartitionSpec(None, spec[1]), check_vma=False)(w_KxN)


def kernel_gradient(x_BxTxK: jax.Array, g_BxTxN: jax.Array, names: tuple[str, str]) -> jax.Array:
  """The gradient [K, N] of the kernel of x @ w, float32, from that of the product; on a mesh split as the kernel is.

  Args:
    x_BxTxK: whole along K.
    g_BxTxN: split along N as the kernel's outputs are.
    names: logical names of inputs, split only to save memory, and outputs.
  """
  placed = logical_axes.current()
  if placed is None:
    return cpu.kernel_gradient(as_rows(x_BxTxK), as_rows(g_BxTxN))
  by_token = placed.spec(("batch", "length"), x_BxTxK.shape[:2])
  spec = placed.spec(names, (x_BxTxK.shape[-1], g_BxTxN.shape[-1]))
  shard, tokens = names_of(spec[0]), sum(map(names_of, by_token), ())
  if not set(shard) <= set(tokens):  # devices with the same tokens would each add them
    return cpu.kernel_gradient(x_BxTxK, g_BxTxN)
  others = tuple(axis for axis in tokens if axis not in shard)

  def local(x, g):
    part = scatter(cpu.kernel_gradient(x, g), shard, 0)
    return jax.lax.psum(part, others) if others else part

  return jax.shard_map(local, mesh=placed.mesh, out_specs=spec, check_vma=False,
                       in_specs=(PartitionSpec(*by_token, None), PartitionSpec(*by_token, spec[1])))(x_BxTxK, g_BxTxN)


class _Static(NamedTuple):
  """What the compiled program depends on."""

  # The axes over which the length of x is gathered.
  length: tuple[str, ...]
  dtype: Any
  # Of each kernel: the axes over which it is gathered, along which dimension, and its matmul.
  kernels: tuple[tuple[tuple[str, ...], int, Callable | None], ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmuls(static: _Static, x, weights) -> list[jax.Array]:
  x = gather(x, static.length, 1)
  return [_matmul_rows(matmul)(x, gather(w.astype(static.dtype), axes, dim))
          for w, (axes, dim, matmul) in zip(weights, static.kernels, strict=True)]


def _matmuls_fwd(static, x, weights):
  return _matmuls(static, x, weights), (x, weights)


def _matmuls_bwd(static, saved, gradients):
  x, weights = saved
  x = gather(x, static.length, 1)
  dx, dweights = [], []
  for w, g, (axes, dim, matmul) in zip(weights, gradients, static.kernels, strict=True):
    whole = gather(w.astype(static.dtype), axes, dim)
    if matmul is None:
      dx.append(cpu.inputs_gradient(g, whole))
      dw = cpu.kernel_gradient(x, g)
    else:
      # What would be kept of the forward pass is made again: a gathered kernel's codes are as large as the model's.
      dx_part, dw = jax.vjp(_matmul_rows(matmul), x, whole)[1](g)
      dx.append(dx_part)
    dweights.append(scatter(dw.astype(jnp.float32), axes, dim).astype(w.dtype))
  return scatter(sum(dx), static.length, 1), tuple(dweights)


_matmuls.defvjp(_matmuls_fwd, _matmuls_bwd)


def _matmul_rows(matmul: Callable | None) -> Callable:
  if matmul is None:
    return cpu.matmul
  return lambda x, w: matmul(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], -1)


def _summed(part: jax.Array, axes: tuple[str, ...], length: tuple[str, ...]) -> jax.Array:
  """The sum over devices that hold parts of the inputs; where the stream's length is split over the same, a part."""
  if axes and axes == length:
    return scatter(part, axes, 1)
  whole = jax.lax.psum(part, axes) if axes else part
  if not length:
    return whole
  # The stream is split over other axes than the inputs are: this device's part of the length is cut out.
  size = part.shape[1] // jax.lax.axis_size(length)
  return jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index(length) * size, size, axis=1)
