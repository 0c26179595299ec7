"""Products in float32 on CPU, with results whose rows do not lie too evenly in memory.

On some CPUs (AMD's Zen 3) XLA's products take a quarter longer where rows of the result lie a multiple of 2,048 numbers
apart, and twice as long at one of 4,096. A few columns that are not real put them elsewhere. What that takes is a copy
of the kernel for each product, little beside a product of many rows.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from models.cpu import bfloat16
from models.sharding import logical_axes

# Results this wide, or several times, get so many columns more.
TOO_EVEN, APART = 2048, 64
# With fewer rows, the copy of the kernel may take longer than rows that lie too evenly.
ROWS = 1024


def extra_columns(width: int, dtype: Any) -> int:
  """How many columns a product in `dtype` should have besides its `width` ones; 0 where there are several devices."""
  on_one_cpu = logical_axes.platform() == "cpu" and logical_axes.current() is None
  return APART if on_one_cpu and dtype == jnp.float32 and width % TOO_EVEN == 0 else 0


def mlp_columns(x: jax.Array, linears: Sequence[Any]) -> int:
  """How many columns an MLP's hidden layer should have besides its own, for inputs `x`; `linears` (models/layers.py):
  gate, where there is one, up and down."""
  if x.size < ROWS * x.shape[-1] or not all(linear.plain for linear in linears):
    return 0
  return extra_columns(linears[-1].kernel.shape[-2], linears[-1].dtype)


def wider(linear: Any, x: jax.Array, inputs: int = 0, outputs: int = 0) -> jax.Array:
  """What a plain `Linear` gives with so many more inputs and outputs, whose weights are zero."""
  kernel = jnp.pad(linear.kernel[...].astype(linear.dtype), ((0, inputs), (0, outputs)))
  y = bfloat16.matmul(logical_axes.as_rows(x), kernel).reshape(*x.shape[:-1], -1)
  return y if linear.bias is None else y + jnp.pad(linear.bias[...].astype(linear.dtype), (0, outputs))
