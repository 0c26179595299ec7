"""JAX's random bits on CPU, without loops.

JAX draws all random numbers from Threefry-2x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). On
CPU alone it runs the rounds in a loop over arrays, five times there and back through memory, and each place where
numbers are drawn is a dozen small kernels to compile. Written out, the rounds are one pass that XLA fuses with what
becomes of the bits, and the bits are the same. Drawing parameters, rounding at random and dropout take a half of the
time or less, and so does compiling them, of which a first run waits for the parameters (benchmarks/drawing.py).
"""

from typing import Any

import numpy as np
from jax.extend.random import threefry2x32_p
from jax.interpreters import mlir

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.uint32(0x1BD11BDA)  # of a key's words, with which they make a third one


def threefry(key_0: Any, key_1: Any, x_0: Any, x_1: Any) -> tuple[Any, Any]:
  """Threefry-2x32 with 20 rounds: two words of random bits for two words of key and two of a counter.

  Args:
    key_0, key_1, x_0, x_1: uint32, of NumPy or JAX, whose shapes broadcast.
  """
  keys = (key_0, key_1, key_0 ^ key_1 ^ PARITY)
  x_0, x_1 = x_0 + key_0, x_1 + key_1
  for i in range(5):
    for bits in ROTATIONS[i % 2]:
      x_0 = x_0 + x_1
      x_1 = x_0 ^ (x_1 << np.uint32(bits) | x_1 >> np.uint32(32 - bits))
    x_0, x_1 = x_0 + keys[(i + 1) % 3], x_1 + keys[(i + 2) % 3] + np.uint32(i + 1)
  return x_0, x_1


def write_out_random_bits() -> None:
  """From now on this process compiles JAX's random numbers for CPU so."""
  mlir.register_lowering(threefry2x32_p, mlir.lower_fun(threefry, multiple_results=True), platform="cpu")
