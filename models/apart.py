"""Products in float32 on CPU, with results whose rows do not lie too evenly in memory.

On some CPUs (AMD's Zen 3) XLA's products take a quarter longer where rows of the result lie a multiple of 2,048 numbers
apart, and twice as long at one of 4,096. A few columns that are not real put them elsewhere. What that takes is a copy
of the kernel for each product, little beside a product of many rows.
"""

from typing import Any

import jax.numpy as jnp

from models import placement

# Results this wide, or several times, get so many columns more.
TOO_EVEN, APART = 2048, 64
# With fewer rows, the copy of the kernel may take longer than rows that lie too evenly.
ROWS = 1024


def columns(width: int, dtype: Any) -> int:
  """How many columns a product in `dtype` should have beside its `width` ones; 0 where there are several devices."""
  on_one_cpu = placement.platform() == "cpu" and placement.current() is None
  return APART if on_one_cpu and dtype == jnp.float32 and width % TOO_EVEN == 0 else 0
