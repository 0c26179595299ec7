"""Products of rows with one matrix per group as kernels for GPUs, in Pallas's Triton dialect: what experts compute.

M rows in blocks of S, each block of one of E groups, or of none; K inputs, N outputs of a matrix.

The blocked products of models/experts/grouped.py go over blocks one after another, each far too small for a GPU. Here
all tiles of all blocks are programs of one kernel, which finds the matrix of its block by its number; gradients of
matrices add up the blocks of a group in their order, in float32. Without a GPU the kernels are interpreted: how they
are tested.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from models import gpu

# Of rows, outputs and inputs that a tile has at most; and the least that tensor cores take.
ROWS, COLUMNS, INPUTS, LEAST = 128, 128, 64, 16
WARPS, STAGES = 8, 3


def refusal(device: Any, block: int, sizes: tuple[int, ...], dtype: Any) -> str | None:
  """Why the kernels are not taken; None: they are. As `attention_gpu.refusal`.

  Args:
    block: rows of a block.
    sizes: K and N.
    dtype: of rows and matrices.
  """
  if block < LEAST:
    return f"blocks of {block} rows, fewer than {LEAST}"
  if any(size % LEAST for size in sizes):
    return f"matrices of {' x '.join(map(str, sizes))}: no multiples of {LEAST}"
  if (reason := gpu.unsuitable(device, dtype)) is not None or not gpu.is_here(device):
    return reason
  return _distrust(jnp.dtype(dtype).name)


@functools.cache
def _distrust(dtype: str) -> str | None:
  return gpu.tried(lambda: error(dtype))


def grouped(x_MxK: jax.Array, w_ExKxN: jax.Array, group_of_block: jax.Array, block: int, transpose: bool, dtype: Any, *,
            interpret: bool = False) -> jax.Array:
  """Rows of each block times the matrix of its group, or its transpose: [M, N] in `dtype`; 0 for those of no group.

  Args:
    x_MxK: rows; of w transposed, [M, N].
    group_of_block: int32 [M / block]; E or above: none.
    block: rows of a block.
    transpose: whether rows are multiplied by transposes, which gives [M, K].
    dtype: of the result; sums are float32.
    interpret: run without a GPU.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton

  E, K, N = w_ExKxN.shape
  inputs, outputs = (N, K) if transpose else (K, N)
  rows, columns, step = _divisor(block, ROWS), _divisor(outputs, COLUMNS), _divisor(inputs, INPUTS)

  def kernel(group_ref, x_ref, w_ref, y_ref):
    # Programs of no block leave out the loop, not the matrix: there is always some.
    group = group_ref[0]
    own, mine = jnp.minimum(group, E - 1), pl.ds(pl.program_id(1) * columns, columns)

    def add(k, total):
      here = pl.ds(k * step, step)
      w = w_ref[own, mine, here].T if transpose else w_ref[own, here, mine]
      return total + triton.dot(x_ref[:, here], w)

    steps = jnp.where(group < E, jnp.int32(inputs // step), jnp.int32(0))
    y_ref[...] = jax.lax.fori_loop(0, steps, add, jnp.zeros((rows, columns), jnp.float32)).astype(y_ref.dtype)

  return pl.pallas_call(
      kernel, name="grouped", grid=(len(x_MxK) // rows, outputs // columns), interpret=interpret,
      in_specs=[pl.BlockSpec((1,), lambda i, j: (i // (block // rows),)),
                pl.BlockSpec((rows, inputs), lambda i, j: (i, 0)), pl.BlockSpec((E, K, N), lambda i, j: (0, 0, 0))],
      out_specs=pl.BlockSpec((rows, columns), lambda i, j: (i, j)),
      out_shape=jax.ShapeDtypeStruct((len(x_MxK), outputs), dtype),
      compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES))(group_of_block, x_MxK, w_ExKxN)


def grouped_outer(x_MxK: jax.Array, g_MxN: jax.Array, starts_E: jax.Array, ends_E: jax.Array, block: int, dtype: Any, *,
                  interpret: bool = False) -> jax.Array:
  """The sum of x^T g over the rows of each group: [E, K, N] in `dtype`, 0 for a group without rows.

  Args:
    starts_E, ends_E: int32, the rows of each group, multiples of `block`.
    block: rows added at a time, or a part of that many.
    dtype: of the result; sums are float32.
    interpret: run without a GPU.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton

  (M, K), N, E = x_MxK.shape, g_MxN.shape[1], len(starts_E)
  rows, columns, step = _divisor(K, ROWS), _divisor(N, COLUMNS), _divisor(block, INPUTS)

  def kernel(start_ref, end_ref, x_ref, g_ref, w_ref):

    def add(m, total):
      here = pl.ds(m * step, step)
      return total + triton.dot(x_ref[here, :].T, g_ref[here, :])

    first, last = start_ref[0] // step, end_ref[0] // step
    w_ref[...] = jax.lax.fori_loop(first, last, add, jnp.zeros((rows, columns), jnp.float32)).astype(w_ref.dtype)

  group = pl.BlockSpec((1,), lambda i, j, e: (e,))
  return pl.pallas_call(
      kernel, name="grouped_outer", grid=(K // rows, N // columns, E), interpret=interpret,
      in_specs=[group, group, pl.BlockSpec((M, rows), lambda i, j, e: (0, i)),
                pl.BlockSpec((M, columns), lambda i, j, e: (0, j))],
      out_specs=pl.BlockSpec((None, rows, columns), lambda i, j, e: (e, i, j)),
      out_shape=jax.ShapeDtypeStruct((E, K, N), dtype),
      compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES))(starts_E, ends_E, x_MxK, g_MxN)


def _divisor(size: int, most: int) -> int:
  """The largest power of two that divides `size`, up to `most`."""
  return min(size & -size, most)


def error(dtype: Any = jnp.bfloat16, interpret: bool = False) -> float:
  """How far the kernels are from float32 on four groups made up, one of them empty, and rows of none."""
  E, K, N, block = 4, 192, 128, 64
  sizes = jnp.array([2, 0, 3, 1]) * block
  ends = jnp.cumsum(sizes)
  starts, M = ends - sizes, 8 * block
  group_of_row = jnp.searchsorted(ends, jnp.arange(M), side="right")
  of_block = group_of_row[::block].astype(jnp.int32)
  keys = jax.random.split(jax.random.key(0), 3)
  x, w, g = (jax.random.normal(key, shape).astype(dtype) for key, shape in zip(
      keys, ((M, K), (E, K, N), (M, N)), strict=True))
  run = functools.partial(jax.jit, static_argnums=(3, 4, 5), static_argnames=("interpret",))
  ours = (run(grouped)(x, w, of_block, block, False, jnp.float32, interpret=interpret),
          run(grouped)(g, w, of_block, block, True, jnp.float32, interpret=interpret),
          jax.jit(functools.partial(grouped_outer, block=block, dtype=jnp.float32, interpret=interpret))(
              x, g, starts.astype(jnp.int32), ends.astype(jnp.int32)))
  x, w, g = (part.astype(jnp.float32) for part in (x, w, g))
  one_hot = jax.nn.one_hot(group_of_row, E)  # rows of no group have none
  exact = (jnp.einsum("me,mk,ekn->mn", one_hot, x, w), jnp.einsum("me,mn,ekn->mk", one_hot, g, w),
           jnp.einsum("me,mk,mn->ekn", one_hot, x, g))
  return gpu.off(ours, exact)
