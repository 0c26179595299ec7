"""The gated delta rule on the device that is here, as models/attention/delta_rule.py computes it: in other chunks, and
with products that round more.

    python -m benchmarks.delta_gpu [--small]

Milliseconds forward, and forward and backward, of one layer of Qwen3-Next (32 heads of 128, keys and values) on rows of
4,096 tokens in documents of 512; TFLOP/s of its products; and how far output and gradients are from those of float32
products in chunks of 64 tokens, as a part of the largest number. What a model takes is `highest` with
`model.delta.chunk`: how much the others would gain says whether a kernel pays. --small does it with a few tokens: its
times mean nothing.
"""

import argparse
import functools

import jax
import jax.numpy as jnp

from benchmarks.attention_gpu import milliseconds
from models import gpu
from models.attention import delta_rule

PRECISIONS = {"highest": jax.lax.Precision.HIGHEST, "high": jax.lax.Precision.HIGH,
              "default": jax.lax.Precision.DEFAULT}


def made(rows: int, length: int, heads: int, size: int) -> tuple[list[jax.Array], jax.Array, jax.Array]:
  """([queries, keys, values, the output's gradient], logarithm of what is kept, share of the correction)."""
  keys = jax.random.split(jax.random.key(0), 6)
  arrays = [jax.random.normal(key, (rows, length, heads, size), jnp.bfloat16) for key in keys[:4]]
  kept, beta = (jax.random.uniform(key, (rows, length, heads)) for key in keys[4:])
  return [*map(delta_rule.unit_keys, arrays[:2]), *arrays[2:]], jnp.log(0.9 + 0.1 * kept), beta


def operations(rows: int, length: int, heads: int, size: int, chunk: int) -> int:
  """Of products, forward: three among a chunk's tokens, its system for keys and values, four with the state."""
  return rows * length * heads * (2 * chunk * size * 3 + 2 * chunk * 2 * size + 2 * size * size * 4)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--small", action="store_true")
  parser.add_argument("--repeats", type=int, default=5)
  args = parser.parse_args()
  sizes = (1, 128, 2, 16) if args.small else (8, 4096, 32, 128)
  arrays, g, beta = made(*sizes)
  segments = jnp.broadcast_to(jnp.arange(sizes[1]) // 512 + 1, sizes[:2])
  print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}\n\n"
        "| delta rule | chunk | forward, ms | forward and backward, ms | TFLOP/s | off |\n" + "|---" * 6 + "|",
        flush=True)
  exact: list[jax.Array] = []
  for name, precision in PRECISIONS.items():
    for chunk in (64, 32, 128):
      delta_rule._einsum = functools.partial(jnp.einsum, precision=precision)

      def attend(q, k, v, chunk=chunk):
        return delta_rule.chunked(delta_rule.Inputs(q, k, v, g, beta), segments, chunk)[0]

      forward, both, out = milliseconds(attend, arrays, args.repeats)
      exact = exact or out
      rate = 3 * operations(*sizes, chunk) / both / 1e9
      print(f"| {name} | {chunk} | {forward:.2f} | {both:.2f} | {rate:.1f} | {gpu.off(out, exact):.1e} |", flush=True)


if __name__ == "__main__":
  main()
