"""What makes programs for CPU fast, behind functions that elsewhere do what their plain forms do.

  bfloat16      products, and arrays that a loop adds to, without conversions: `matmul`, `einsum`, `as_bits` …
  padding       products in float32 whose rows do not lie too evenly in memory: `extra_columns`, `wider`
  generation    a step of generation: `few_rows` for kernels that are kept [out, in], `cache_dtype`
  rotary        rotary embeddings computed once, and turned without putting parts together
  random_bits   JAX's random numbers without loops

Imports `models.sharding.logical_axes` alone. Settings of the process and of XLA for CPU are in trainer/startup.py.

May import: models.sharding.
"""

from models.cpu.bfloat16 import as_bits, einsum, from_bits, inputs_gradient, is_bfloat16, kernel_gradient, matmul
from models.cpu.generation import cache_dtype, few_rows
from models.cpu.padding import extra_columns, mlp_columns, wider
from models.cpu.random_bits import write_out_random_bits
from models.cpu.rotary import computed_once, rotate

__all__ = ["as_bits", "cache_dtype", "computed_once", "einsum", "extra_columns", "few_rows", "from_bits",
           "inputs_gradient", "is_bfloat16", "kernel_gradient", "matmul", "mlp_columns", "rotate", "wider",
           "write_out_random_bits"]
