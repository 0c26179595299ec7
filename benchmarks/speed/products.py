"""How long the matrix products of a step of benchmarks/speed take alone on CPU: the least that a step can take.

    python -m benchmarks.speed.products [--peer peers/bin/python]

Each product is compiled as `python -m trainer` has programs compiled, timed by itself, the best of several times, and
counted as often as a step needs it: forward, for the gradient of its input and for that of its kernel. Attention's are
those with keys that a block of 128 queries can see. What is computed again to save memory is not counted. With a peer,
PyTorch's times of the same products follow.
"""

import argparse
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.speed.sizes import CHOSEN as size
from trainer import startup

BLOCK = 128
REPEATS = 15
# einsum, shapes of its operands, float32 -> seconds
Seconds = Callable[[str, tuple[int, ...], tuple[int, ...]], float]


def best(run: Callable[[], object]) -> float:
  """The best time of several, after one that is not counted."""
  run()
  times = []
  for _ in range(REPEATS):
    start = time.perf_counter()
    run()
    times.append(time.perf_counter() - start)
  return min(times)


def of_jax(product: str, a: tuple[int, ...], b: tuple[int, ...]) -> float:
  import jax
  import jax.numpy as jnp

  x, y = jnp.ones(a, jnp.float32), jnp.ones(b, jnp.float32)
  compiled = jax.jit(lambda x, y: jnp.einsum(product, x, y)).lower(x, y).compile()
  return best(lambda: jax.block_until_ready(compiled(x, y)))


def of_torch(product: str, a: tuple[int, ...], b: tuple[int, ...]) -> float:
  import torch

  x, y = torch.ones(a), torch.ones(b)
  return best(lambda: torch.einsum(product, x, y))


def linear(seconds: Seconds, inputs: int, outputs: int) -> float:
  """The three products of a layer over all tokens of a step."""
  N = size.batch * size.seq
  return (seconds("nk,km->nm", (N, inputs), (inputs, outputs)) + seconds("nm,km->nk", (N, outputs), (inputs, outputs))
          + seconds("nk,nm->km", (N, inputs), (N, outputs)))


def attention(seconds: Seconds) -> float:
  """The six products of a layer's attention, as models/attention/blocked.py has them: keys first."""
  total, K, rows = 0.0, size.head_dim, size.batch * size.heads
  for stop in range(BLOCK, size.seq + 1, BLOCK):
    of_queries, of_keys, scores = (rows, BLOCK, K), (rows, stop, K), (rows, stop, BLOCK)
    queries_across, keys_across = (rows, K, BLOCK), (rows, K, stop)
    total += 2 * seconds("bwk,bkt->bwt", of_keys, queries_across)  # scores; the gradient of weights
    total += 2 * seconds("bkw,bwt->bkt", keys_across, scores)  # the output; the gradient of queries
    total += 2 * seconds("bwt,btk->bwk", scores, of_queries)  # those of values and of keys
  return total


def projections() -> list[tuple[int, int]]:
  """Inputs and outputs of those for queries, keys, values and attention's output."""
  of_queries, of_keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
  return [(size.hidden, of_queries), (size.hidden, of_keys), (size.hidden, of_keys), (of_queries, size.hidden)]


def wide(columns: int) -> int:
  """So many columns as runs make of them, so that rows lie apart."""
  import jax.numpy as jnp

  from models import cpu
  return columns + cpu.extra_columns(columns, jnp.float32)


def flops() -> float:
  """Of one step, as above."""
  per_token = sum(inputs * outputs for inputs, outputs in projections()) + 3 * size.hidden * size.ffn
  linear_flops = 6 * size.batch * size.seq * (size.layers * per_token + size.hidden * size.vocab)
  seen = sum(range(BLOCK, size.seq + 1, BLOCK)) * BLOCK
  return linear_flops + 12 * size.layers * size.batch * size.heads * size.head_dim * seen


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--peer", help="the Python with torch")
  parser.add_argument("--torch", action="store_true", help="PyTorch's times alone")
  args = parser.parse_args()
  startup.use_huge_pages()
  startup.set_environment()
  seconds = of_torch if args.torch else of_jax
  vocab, ffn = (n if args.torch else wide(n) for n in (size.vocab, size.ffn))
  parts = {
      "projections of attention": size.layers * sum(linear(seconds, *shape) for shape in projections()),
      "MLP": size.layers * (2 * linear(seconds, size.hidden, ffn) + linear(seconds, ffn, size.hidden)),
      "attention": size.layers * attention(seconds),
      "unembedding": linear(seconds, size.hidden, vocab),
  }
  print("PyTorch" if args.torch else "JAX")
  for name, value in parts.items():
    print(f"{name:<26}{value:7.3f} s")
  total = sum(parts.values())
  square = statistics.median(seconds("nk,km->nm", (2048, 2048), (2048, 2048)) for _ in range(3))
  print(f"{'all products of a step':<26}{total:7.3f} s, {flops() / total / 1e9:.0f} GFLOP/s; a product of 2048×2048 "
        f"matrices: {2 * 2048**3 / square / 1e9:.0f} GFLOP/s", flush=True)
  if args.peer:
    subprocess.run([args.peer, "-m", "benchmarks.speed.products", "--torch"], check=True,
                   cwd=Path(__file__).resolve().parents[2])


if __name__ == "__main__":
  main()
