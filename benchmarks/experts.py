"""Grouped matrix products, forward and backward: models/experts/grouped.py, `jax.lax.ragged_dot`, and one dense
product.

    python benchmarks/experts.py [--repeats 5]
"""

import argparse
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models.experts import grouped

# Rows, inputs, outputs, experts.
CASES = ((4096, 128, 256, 8), (4096, 256, 256, 32), (16384, 512, 256, 64))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--repeats", type=int, default=5)
  repeats = parser.parse_args().repeats
  for M, K, N, E in CASES:
    rng = np.random.default_rng(0)
    block = grouped.block_size(M, E)
    # Uneven groups of whole blocks, as after sorting by expert.
    cuts = np.sort(rng.choice(np.arange(1, M // block), E - 1, replace=False))
    sizes = jnp.asarray(np.diff([0, *cuts, M // block]) * block, jnp.int32)
    x, w, one = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((M, K), (E, K, N), (K, N)))
    ways = {
        "models/experts/grouped.py": (
            lambda x, w, sizes=sizes, block=block: grouped.grouped_matmul(x, w, sizes, block), w),
        "ragged_dot": (lambda x, w, sizes=sizes: jax.lax.ragged_dot(x, w, sizes), w),
        "one dense product": (jnp.matmul, one),
    }
    print(f"{M} rows, {K} × {N}, {E} experts, on {jax.devices()[0].device_kind}")
    for name, (product, weights) in ways.items():
      step = jax.jit(jax.grad(lambda x, w, product=product: jnp.sum(jnp.square(product(x, w))), argnums=(0, 1)))
      jax.block_until_ready(step(x, weights))
      times = []
      for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(step(x, weights))
        times.append(time.perf_counter() - start)
      print(f"  {name:<18} {1e3 * min(times):8.1f} ms")


if __name__ == "__main__":
  main()
