"""Steps of generation on CPU."""

from typing import Any

import jax
import jax.numpy as jnp

from models.cpu.bfloat16 import is_bfloat16
from models.sharding import logical_axes


def few_rows(x: jax.Array, kernel_MxK: jax.Array, dtype: Any = None) -> jax.Array:
  """x [..., K] times a kernel that is kept [out, in]: [..., M], in `dtype` or that of x.

  For the few rows of a step of generation on CPU. XLA (Eigen) would pack the whole kernel anew for each product of more
  than 16 rows; one that lies so, times rows that lie across, it reads where it is: 32 rows take half of the time.
  """
  # Without the barriers the compiler takes both transpositions into the product.
  across_KxN = jax.lax.optimization_barrier(x.reshape(-1, x.shape[-1]).T)
  sums = jnp.float32 if is_bfloat16(x) else dtype
  y_MxN = jax.lax.optimization_barrier(jnp.matmul(kernel_MxK, across_KxN, preferred_element_type=sums))
  return y_MxN.T.reshape(*x.shape[:-1], -1).astype(dtype or x.dtype)


def cache_dtype(dtype: Any) -> Any:
  """What keys and values of `dtype` are kept in: on CPU bfloat16 in float32, in which XLA multiplies them by one query.
  Else it would convert all that there are for each token."""
  return jnp.float32 if dtype == jnp.bfloat16 and logical_axes.platform() == "cpu" else dtype
