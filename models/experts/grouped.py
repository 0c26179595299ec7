"""Products of rows with one matrix per group: what experts compute, and the order that it takes.

A assignments of a token to an expert, E experts, S rows per block, M rows of the assignments sorted by expert, each
expert's rows padded to whole blocks; K inputs, N outputs of a matrix.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from models import gpu
from models.experts import grouped_gpu
from models.quantization.matmul import QuantizedMatmul
from models.sharding import logical_axes

# Rows per block: large enough for an efficient product, small enough that padding adds less than a half to the rows.
MIN_BLOCK, MAX_BLOCK = 8, 256


def sort_by_expert(experts_A: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array, int]:
  """Assigns rows to assignments, each expert's in one run of whole blocks, in the order of the tokens.

  Returns:
    (places_A, assignments_M, sizes_E, S): the row of each assignment (M: none, where the expert is `num_experts`),
    the assignment of each row (A: none), the padded number of rows of each expert, and the rows of a block.
  """
  A, E = experts_A.shape[0], num_experts
  S = block_size(A, E)
  M = (A // S + min(E, A)) * S  # every group wastes less than a block, whatever the router chooses
  # Stable: of one expert, tokens keep their order.
  order_A = jnp.argsort(experts_A, stable=True)
  rank_A = jnp.zeros_like(order_A).at[order_A].set(jnp.arange(A), unique_indices=True)
  counts_E = jnp.sum(experts_A[:, None] == jnp.arange(E), axis=0, dtype=jnp.int32)
  sizes_E = (counts_E + S - 1) // S * S
  firsts_E, starts_E = jnp.cumsum(counts_E) - counts_E, jnp.cumsum(sizes_E) - sizes_E

  mine_A = jnp.minimum(experts_A, E - 1)
  places_A = jnp.where(experts_A < E, starts_E[mine_A] + rank_A - firsts_E[mine_A], M)
  expert_M = jnp.minimum(jnp.repeat(_expert_of_block(sizes_E, M // S, S), S), E - 1)
  within_M = jnp.arange(M) - starts_E[expert_M]
  real_M = within_M < counts_E[expert_M]
  assignments_M = jnp.where(real_M, order_A[jnp.where(real_M, firsts_E[expert_M] + within_M, 0)], A)
  return places_A, assignments_M, sizes_E, S


def block_size(assignments: int, num_experts: int) -> int:
  """The power of two at or below half of an expert's mean share, within bounds; on TPU, which needs no blocks, the
  least."""
  if logical_axes.platform() == "tpu":
    return MIN_BLOCK
  share = max(assignments // (2 * num_experts), 1)
  return min(max(2 ** int(math.log2(share)), MIN_BLOCK), MAX_BLOCK)


def _expert_of_block(sizes_E: jax.Array, num_blocks: int, block: int) -> jax.Array:
  """int32 [num_blocks]; E for the unused blocks at the end."""
  ends_E = jnp.cumsum(sizes_E) // block
  return jnp.sum(jnp.arange(num_blocks)[:, None] >= ends_E, axis=1, dtype=jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def gather_rows(x_PxD: jax.Array, index_Q: jax.Array, back_PxR: jax.Array, zeros: bool = True) -> jax.Array:
  """x[index]. `back[p]` lists the q with index[q] == p, filled up with Q or above.

  With the way back known, the gradient is a sum of gathered rows in a fixed order, where autodiff would scatter.

  Args:
    zeros: where the index is P or above, the row is 0; else it is any, which on TPU saves going through all once more.
  """
  return x_PxD.at[index_Q].get(mode="fill", fill_value=0) if zeros else x_PxD.at[index_Q].get(mode="clip")


def _gather_fwd(x_PxD, index_Q, back_PxR, zeros):
  return gather_rows(x_PxD, index_Q, back_PxR, zeros), back_PxR


def _gather_bwd(zeros, back_PxR, g_QxD):
  del zeros
  columns = (g_QxD.at[back_PxR[:, r]].get(mode="fill", fill_value=0) for r in range(back_PxR.shape[1]))
  return sum(column.astype(jnp.float32) for column in columns).astype(g_QxD.dtype), None, None


gather_rows.defvjp(_gather_fwd, _gather_bwd)


# ---------------------------------------------------------------------------------------------- grouped products


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_matmul(x_MxK: jax.Array, w_ExKxN: jax.Array, sizes_E: jax.Array, block: int,
                   last: bool = False) -> jax.Array:
  """Rows of group e times w[e]: [M, N] in the dtype of x; rows beyond the groups give 0.

  Args:
    x_MxK: rows, group after group.
    w_ExKxN: one matrix per group.
    sizes_E: rows of each group, int32, multiples of `block`; their sum is at most M.
    block: rows multiplied at a time, a divisor of M.
    last: nothing is multiplied by the output, whose rows beyond the groups may then be anything. If not, nothing is by
      the gradient of x, of which the same holds. On TPU zeros there would cost going through all once more.
  """
  return _grouped(x_MxK, w_ExKxN, sizes_E, block, False, x_MxK.dtype, not last)


def _grouped_fwd(x_MxK, w_ExKxN, sizes_E, block, last):
  return grouped_matmul(x_MxK, w_ExKxN, sizes_E, block, last), (x_MxK, w_ExKxN, sizes_E)


def _grouped_bwd(block, last, saved, g_MxN):
  x_MxK, w_ExKxN, sizes_E = saved
  dx_MxK = _grouped(g_MxN, w_ExKxN, sizes_E, block, True, g_MxN.dtype, last)
  dw_ExKxN = _grouped_outer(x_MxK, g_MxN, sizes_E, block, jnp.float32)
  return dx_MxK.astype(x_MxK.dtype), dw_ExKxN.astype(w_ExKxN.dtype), None


grouped_matmul.defvjp(_grouped_fwd, _grouped_bwd)


def grouped_matmul_as(how: QuantizedMatmul | None, x_MxK, w_ExKxN, sizes_E, block: int, last: bool = False
                      ) -> jax.Array:
  """`grouped_matmul`, in 8 bits where `how` says so."""
  if how is None:
    return grouped_matmul(x_MxK, w_ExKxN, sizes_E, block, last)
  return how.grouped(x_MxK, w_ExKxN, sizes_E, block, _grouped, _grouped_outer)


def add_biases(y_MxN: jax.Array, bias_ExN: jax.Array, sizes_E: jax.Array, block: int) -> jax.Array:
  """Rows of group e plus bias[e], in the dtype of y, rounded once more; nothing beyond the groups.

  By a product with zeros and ones for each block, whose gradient is one, too, and scatters nothing.
  """
  experts, E = _expert_of_block(sizes_E, len(y_MxN) // block, block), len(bias_ExN)
  added = jnp.matmul(jax.nn.one_hot(experts, E), bias_ExN.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
  return (y_MxN.astype(jnp.float32) + jnp.repeat(added, block, axis=0)).astype(y_MxN.dtype)


def _grouped(x_MxK, w, sizes_E, block: int, transpose: bool, dtype: Any, zeros: bool = True) -> jax.Array:
  """x times w[e], or times its transpose, in `dtype`, by whatever is fast where it runs; `zeros`: beyond the groups."""
  if _by_kernel(x_MxK, w.shape[1:], block):
    return grouped_gpu.grouped(x_MxK, w, _expert_of_block(sizes_E, len(x_MxK) // block, block), block, transpose, dtype)
  ragged, blocked = (functools.partial(f, block=block, transpose=transpose, dtype=dtype) for f in (_ragged, _blocked))
  return jax.lax.platform_dependent(x_MxK, w, sizes_E, tpu=functools.partial(ragged, zeros=zeros), default=blocked)


def _grouped_outer(x_MxK, g_MxN, sizes_E, block: int, dtype: Any) -> jax.Array:
  """The sum over each group's rows of x^T g: [E, K, N] in `dtype`."""
  if _by_kernel(x_MxK, (x_MxK.shape[1], g_MxN.shape[1]), block):
    ends_E = jnp.cumsum(sizes_E)
    return grouped_gpu.grouped_outer(x_MxK, g_MxN, ends_E - sizes_E, ends_E, block, dtype)
  ragged, blocked = (functools.partial(f, block=block, dtype=dtype) for f in (_ragged_outer, _blocked_outer))
  return jax.lax.platform_dependent(x_MxK, g_MxN, sizes_E, tpu=ragged, default=blocked)


def _by_kernel(x_MxK: jax.Array, sizes: tuple[int, ...], block: int) -> bool:
  """Whether the program is for a GPU whose kernels take these."""
  if logical_axes.platform() != "gpu":
    return False
  reason = grouped_gpu.refusal(logical_axes.device(), block, sizes, x_MxK.dtype)
  if reason is not None:
    gpu.warn("experts", reason)
  return reason is None


# Only on TPU does a ragged product cost what it should; XLA for CPU and (by default) GPU multiplies every row by every
# group's matrix. What kernels for GPUs do not take is multiplied block by block.
def _ragged(x_MxK, w, sizes_E, *, block: int, transpose: bool, dtype: Any, zeros: bool = True) -> jax.Array:
  del block
  dimensions = jax.lax.RaggedDotDimensionNumbers(
      dot_dimension_numbers=(((1,), (2 if transpose else 1,)), ((), ())), lhs_ragged_dimensions=[0],
      rhs_group_dimensions=[0])
  y_MxN = jax.lax.ragged_dot_general(x_MxK, w, sizes_E, dimensions, preferred_element_type=dtype)
  return jnp.where(jnp.arange(x_MxK.shape[0])[:, None] < jnp.sum(sizes_E), y_MxN, 0) if zeros else y_MxN


def _ragged_outer(x_MxK, g_MxN, sizes_E, *, block: int, dtype: Any) -> jax.Array:
  del block
  dimensions = jax.lax.RaggedDotDimensionNumbers(
      dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[])
  return jax.lax.ragged_dot_general(x_MxK, g_MxN, sizes_E, dimensions, preferred_element_type=dtype)


def _blocked(x_MxK, w, sizes_E, *, block: int, transpose: bool, dtype: Any) -> jax.Array:
  """One product per block that is in use, with its group's matrix."""
  M = x_MxK.shape[0]
  expert = _expert_of_block(sizes_E, M // block, block)
  dimensions = (((1,), (1 if transpose else 0,)), ((), ()))

  def one(i, y_MxN):
    x_SxK = jax.lax.dynamic_slice_in_dim(x_MxK, i * block, block)
    y_SxN = jax.lax.dot_general(x_SxK, jax.lax.dynamic_index_in_dim(w, expert[i], keepdims=False), dimensions,
                                preferred_element_type=dtype)
    return jax.lax.dynamic_update_slice_in_dim(y_MxN, y_SxN, i * block, axis=0)

  zeros = jnp.zeros((M, w.shape[1 if transpose else 2]), dtype)
  return jax.lax.fori_loop(0, jnp.sum(sizes_E) // block, one, zeros)


def _blocked_outer(x_MxK, g_MxN, sizes_E, *, block: int, dtype: Any) -> jax.Array:
  expert = _expert_of_block(sizes_E, x_MxK.shape[0] // block, block)

  def one(i, w_ExKxN):
    x_SxK, g_SxN = (jax.lax.dynamic_slice_in_dim(part, i * block, block) for part in (x_MxK, g_MxN))
    w_KxN = jax.lax.dot_general(x_SxK, g_SxN, (((0,), (0,)), ((), ())), preferred_element_type=dtype)
    return w_ExKxN.at[expert[i]].add(w_KxN)

  zeros = jnp.zeros((sizes_E.shape[0], x_MxK.shape[1], g_MxN.shape[1]), dtype)
  return jax.lax.fori_loop(0, jnp.sum(sizes_E) // block, one, zeros)
