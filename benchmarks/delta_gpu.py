"""The gated delta rule on the device that is here: the kernels of models/attention/delta_kernels.py beside what XLA
makes of models/attention/delta_rule.py, in chunks of several sizes.

    python -m benchmarks.delta_gpu [--small]

Milliseconds forward, and forward and backward, of one layer of Qwen3-Next (16 heads of 128 for queries and keys, 32 for
values) on rows of 4,096 tokens in documents of 512; TFLOP/s of its products, each counted once; and how far output and
gradients are from those of XLA's in chunks of 64, as a part of the largest number. --small does it with a few tokens:
its times mean nothing.

    JAX_PLATFORMS=cpu python -m benchmarks.delta_gpu --compile h100

compiles both for a GPU that is not here, and says what they keep and move of its memory.
"""

import argparse
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from benchmarks.attention_gpu import milliseconds
from benchmarks.compile_gpu import GB, moved
from models import gpu
from models.attention import delta_gpu, delta_kernels
from models.attention.delta_rule import Inputs
from trainer.planning import gpu as plan_gpu
from trainer.telemetry import hardware

SIZES, SMALL = (8, 4096, 32, 128), (1, 128, 2, 16)


def in_chunks(chunk: int) -> Callable:
  return lambda inputs, segment_ids: delta_gpu.chunked("blocked", inputs, segment_ids, chunk, None)


def arrays(rows: int, length: int, heads: int, size: int) -> list[tuple[tuple[int, ...], jnp.dtype]]:
  """(shape, dtype) of queries, keys, values, and of the logarithm of what is kept and the share of the correction."""
  keys, values = (rows, length, heads // 2, size), (rows, length, heads, size)
  return [(keys, jnp.bfloat16)] * 2 + [(values, jnp.bfloat16)] + [((rows, length, heads), jnp.float32)] * 2


def made(*sizes: int) -> tuple[list[jax.Array], jax.Array, jax.Array]:
  """([queries, keys, values, the output's gradient], logarithm of what is kept, share of the correction)."""
  keys = jax.random.split(jax.random.key(0), 6)
  shapes = arrays(*sizes)
  given = [jax.random.normal(key, shape, dtype)
           for key, (shape, dtype) in zip(keys[:4], [*shapes[:3], shapes[2]], strict=True)]
  kept, beta = (jax.random.uniform(key, shapes[3][0]) for key in keys[4:])
  return given, jnp.log(0.9 + 0.1 * kept), beta


def operations(rows: int, length: int, heads: int, size: int, chunk: int) -> int:
  """Of products, forward: three among a chunk's tokens, its system for keys and values, four with the state."""
  return rows * length * heads * (2 * chunk * size * 3 + 2 * chunk * 2 * size + 2 * size * size * 4)


def compiled(kind: str) -> None:
  """The table of what both keep and move on that GPU."""
  device = plan_gpu.devices(kind, 1, 1)[0]
  bandwidth = hardware.CHIPS[kind].memory_bandwidth

  def shaped(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

  of_inputs = [shaped(*what) for what in arrays(*SIZES)]
  segment_ids = shaped(SIZES[:2], jnp.int32)
  print("| delta rule | | temporaries, GB | read and written, GB | ms at the memory's bandwidth |\n" + "|---" * 5 + "|")
  for name, rule in (("XLA's, chunks of 64", in_chunks(64)), ("kernels", delta_kernels.chunked)):

    def out(segment_ids, *given, rule=rule):
      return rule(Inputs(*given), segment_ids)[0].astype(jnp.bfloat16)

    def both(segment_ids, dout, *given, out=out):
      found, pull = jax.vjp(functools.partial(out, segment_ids), *given)
      return found, pull(dout)

    for what, function, given in (("forward", out, [segment_ids]),
                                  ("forward and backward", both, [segment_ids, of_inputs[2]])):
      with plan_gpu.meant([device]):
        program = jax.jit(function).lower(*given, *of_inputs).compile()
      total = sum(moved(program.as_text()))
      print(f"| {name} | {what} | {program.memory_analysis().temp_size_in_bytes / GB:.2f} | {total / GB:.1f} | "
            f"{total / bandwidth * 1e3:.1f} |", flush=True)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--small", action="store_true")
  parser.add_argument("--repeats", type=int, default=5)
  parser.add_argument("--compile", metavar="GPU", choices=[k for k, c in hardware.CHIPS.items() if c.platform == "gpu"])
  args = parser.parse_args()
  if args.compile:
    return compiled(args.compile)
  sizes = SMALL if args.small else SIZES
  given, g, beta = made(*sizes)
  segments = jnp.broadcast_to(jnp.arange(sizes[1]) // 512 + 1, sizes[:2])
  print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}\n\n"
        "| delta rule | chunk | forward, ms | forward and backward, ms | TFLOP/s | off |\n" + "|---" * 6 + "|",
        flush=True)
  kernels = functools.partial(delta_kernels.chunked, interpret=jax.default_backend() != "gpu")
  exact: list[jax.Array] = []
  for name, chunk, rule in (*(("XLA's", chunk, in_chunks(chunk)) for chunk in (64, 32, 128)), ("kernels", 64, kernels)):

    def attend(q, k, v, rule=rule):
      return rule(Inputs(q, k, v, g, beta), segments)[0].astype(jnp.bfloat16)

    forward, both, out = milliseconds(attend, given, args.repeats)
    exact = exact or out
    rate = 3 * operations(*sizes, chunk) / both / 1e9
    print(f"| {name} | {chunk} | {forward:.2f} | {both:.2f} | {rate:.1f} | {gpu.off(out, exact):.1e} |", flush=True)


if __name__ == "__main__":
  main()
