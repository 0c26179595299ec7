"""How long the matrix products of a step of benchmarks/speed take alone: the least that a step can take.

    python -m benchmarks.speed.products

Each product is compiled and timed by itself, the best of several times, and counted as often as a step needs it:
forward, for the gradient of its input and for that of its kernel. Attention's are those with keys that a block of 128
queries can see. What is computed again to save memory is not counted.
"""

import statistics
import time

import jax
import jax.numpy as jnp

from benchmarks.speed import sizes as s

BLOCK = 128


def seconds(product: str, a: tuple[int, ...], b: tuple[int, ...], repeats: int = 15) -> float:
  """The best time of an einsum of float32 arrays of these shapes."""
  x, y = jnp.ones(a, jnp.float32), jnp.ones(b, jnp.float32)
  compiled = jax.jit(lambda x, y: jnp.einsum(product, x, y)).lower(x, y).compile()
  jax.block_until_ready(compiled(x, y))
  times = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(compiled(x, y))
    times.append(time.perf_counter() - start)
  return min(times)


def linear(inputs: int, outputs: int) -> float:
  """The three products of a layer over all tokens of a step."""
  N = s.BATCH * s.SEQ
  return (seconds("nk,km->nm", (N, inputs), (inputs, outputs)) + seconds("nm,km->nk", (N, outputs), (inputs, outputs))
          + seconds("nk,nm->km", (N, inputs), (N, outputs)))


def attention() -> float:
  """The six products of a layer's attention."""
  total, size, rows = 0.0, s.HIDDEN // s.HEADS, s.BATCH * s.HEADS
  for stop in range(BLOCK, s.SEQ + 1, BLOCK):
    queries, keys, scores = (rows, BLOCK, size), (rows, stop, size), (rows, BLOCK, stop)
    to_scores = seconds("btk,bwk->btw", queries, keys)
    to_queries = seconds("btw,bwk->btk", scores, keys)
    to_keys = seconds("btw,btk->bwk", scores, queries)
    total += 2 * (to_scores + to_queries + to_keys)
  return total


def flops() -> float:
  """Of one step, as above."""
  per_token = 4 * s.HIDDEN**2 + 3 * s.HIDDEN * s.FFN
  linear_flops = 6 * s.BATCH * s.SEQ * (s.LAYERS * per_token + s.HIDDEN * s.VOCAB)
  seen = sum(range(BLOCK, s.SEQ + 1, BLOCK)) * BLOCK
  return linear_flops + 12 * s.LAYERS * s.BATCH * s.HIDDEN * seen


def main() -> None:
  parts = {
      "projections of attention": s.LAYERS * 4 * linear(s.HIDDEN, s.HIDDEN),
      "MLP": s.LAYERS * (2 * linear(s.HIDDEN, s.FFN) + linear(s.FFN, s.HIDDEN)),
      "attention": s.LAYERS * attention(),
      "unembedding": linear(s.HIDDEN, s.VOCAB),
  }
  for name, value in parts.items():
    print(f"{name:<26}{value:7.3f} s")
  total = sum(parts.values())
  square = statistics.median(seconds("nk,km->nm", (2048, 2048), (2048, 2048), 5) for _ in range(3))
  print(f"{'all products of a step':<26}{total:7.3f} s, {flops() / total / 1e9:.0f} GFLOP/s; a product of 2048×2048 "
        f"matrices: {2 * 2048**3 / square / 1e9:.0f} GFLOP/s")


if __name__ == "__main__":
  main()
