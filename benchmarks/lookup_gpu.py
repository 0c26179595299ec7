"""The gradient of an embedding on the GPU that is here: in a fixed order (models/lookup.py), and scattered by XLA.

    python -m benchmarks.lookup_gpu [--small]

8 rows of 4,096 tokens, 2,048 features, of a vocabulary of 128,256; drawn evenly, by Zipf's law, and half of them
padding. Milliseconds, the best of three times, of the gradient in float32 from rows in bfloat16, and how far it is from
the sum in float32 on the host, as a part of the largest number.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from models import gpu, lookup


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--small", action="store_true")
  args = parser.parse_args()
  N, D, V = (512, 16, 100) if args.small else (32_768, 2048, 128_256)
  rng = np.random.default_rng(0)
  evenly = rng.integers(0, V, N)
  drawn = {"evenly": evenly, "Zipf": np.minimum(rng.zipf(1.2, N) - 1, V - 1),
           "half padding": np.where(np.arange(N) % 2, 0, evenly)}
  g = jax.random.normal(jax.random.key(0), (N, D), jnp.bfloat16)
  ways = {
      "in order": (lambda g, ids: lookup.add_rows(g, ids, V), {}),
      "scattered": (functools.partial(scattered, V), {"xla_gpu_exclude_nondeterministic_ops": False}),
      "scattered, XLA told to keep an order": (functools.partial(scattered, V),
                                               {"xla_gpu_exclude_nondeterministic_ops": True}),
  }
  print("| ids | gradient | ms | off |\n|---|---|---|---|", flush=True)
  for kind, ids in drawn.items():
    places = jnp.asarray(ids, jnp.int32)
    few = np.argsort(ids, kind="stable")[:: max(1, N // 2000)]
    entries = np.unique(ids[few])[:200]
    exact = np.stack([np.asarray(g, np.float32)[ids == entry].sum(0, dtype=np.float64) for entry in entries])
    for name, (way, told) in ways.items():
      run = jax.jit(way, compiler_options=told if jax.default_backend() == "gpu" else None)
      out = jax.block_until_ready(run(g, places))
      best = float("inf")
      for _ in range(3):
        start = time.perf_counter()
        for _ in range(5):
          out = run(g, places)
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - start) / 5)
      off = gpu.off([out[entries]], [exact])
      print(f"| {kind} | {name} | {1e3 * best:.2f} | {off:.1e} |", flush=True)


def scattered(entries: int, g: jax.Array, places: jax.Array) -> jax.Array:
  return jnp.zeros((entries, g.shape[1]), jnp.float32).at[places].add(g.astype(jnp.float32), mode="drop")


if __name__ == "__main__":
  main()
