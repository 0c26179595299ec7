"""Attention on the GPU that is here: the kernels of models/attention/gpu_kernels.py, cuDNN's, and the blocked
implementation.

    python benchmarks/attention_gpu.py [--tune]

Milliseconds forward, and forward and backward, and TFLOP/s: 4 K operations a query head for each pair of a query and a
key that it sees, forward, and 2.5 times as many backward (scores are made again). `off` is how far the kernels are from
models/attention/blocked.py in float32 on a small row, as in the trial before they are trusted. cuDNN's know no
documents.

--tune times other sizes of tiles, kernel by kernel, and names the best; TILES in models/attention/gpu_kernels.py is
where they go. --small does all of it with a few tokens, interpreted where there is no GPU: its times mean nothing.
"""

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from models.attention import gpu as attention_gpu
from models.attention import gpu_kernels as flash_gpu
from models.attention import mask
from models.attention.dispatch import attention
from models.attention.mask import Rule, Side


class Case(NamedTuple):
  """Rows [B, T] of documents of one length, H query heads of size K for G of keys and values."""

  rows: int
  length: int
  heads: int
  kv_heads: int
  size: int
  document: int
  window: int | None = None


CASES = {
    "whole rows": Case(8, 4096, 16, 8, 128, 4096),
    "documents of 512 tokens": Case(8, 4096, 16, 8, 128, 512),
    "a window of 1,024": Case(8, 4096, 16, 8, 128, 4096, 1024),
    "heads of 64": Case(8, 4096, 32, 8, 64, 4096),
    "32k tokens": Case(1, 32_768, 16, 8, 128, 32_768),
}
SMALL = {"small": Case(1, 64, 2, 1, 16, 32), "small, a window": Case(1, 64, 2, 1, 16, 64, 24)}
# What --tune tries.
QUERIES, KEYS, WARPS, STAGES = (32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3)


def made(case: Case) -> tuple[Rule, list[jax.Array], jax.Array]:
  """(rule, [queries, keys, values, the output's gradient], segments)."""
  rng = np.random.default_rng(0)
  arrays = [jnp.asarray(rng.normal(size=(case.rows, case.length, heads, case.size)), jnp.bfloat16)
            for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)]
  segments = jnp.broadcast_to(jnp.arange(case.length) // case.document + 1, (case.rows, case.length))
  return Rule(1 / math.sqrt(case.size), None, case.window, False), arrays, segments


def ways(case: Case) -> dict[str, Callable]:
  """name -> (q, k, v) -> output."""
  rule, _, segments = made(case)
  sides = Side(segments, jnp.arange(case.length), None), Side(mask.keys_of(segments), jnp.arange(case.length), None)
  found = {
      "kernels": lambda q, k, v: attention_gpu.on(jax.devices()[0])(rule, q, k, v, *sides),
      "blocked": lambda q, k, v: attention(q, k, v, segment_ids=segments, window=case.window, scale=rule.scale,
                                           impl="blocked"),
  }
  if case.document == case.length and jax.default_backend() == "gpu":
    window = None if case.window is None else (case.window - 1, 0)
    found["cuDNN"] = lambda q, k, v: jax.nn.dot_product_attention(
        q, k, v, scale=rule.scale, is_causal=True, local_window_size=window, implementation="cudnn")
  return found


def pairs(case: Case) -> int:
  """Of a query and a key that it sees, in all rows."""
  seen = np.minimum(np.arange(case.length) % case.document + 1, case.window or case.length)
  return case.rows * int(seen.sum())


def milliseconds(attend: Callable, arrays: list[jax.Array], repeats: int) -> tuple[float, float]:
  """Forward; forward and backward: the median of several."""
  *given, dout = arrays

  def both(q, k, v):
    out, pull = jax.vjp(attend, q, k, v)
    return out, pull(dout.astype(out.dtype))

  medians = []
  for run in (jax.jit(attend), jax.jit(both)):
    jax.block_until_ready(run(*given))
    times = []
    for _ in range(repeats):
      start = time.perf_counter()
      jax.block_until_ready(run(*given))
      times.append(time.perf_counter() - start)
    medians.append(1e3 * float(np.median(times)))
  return medians[0], medians[1]


def compare(cases: dict[str, Case], repeats: int) -> None:
  """Prints a table."""
  print("| case | implementation | forward, ms | TFLOP/s | forward and backward, ms | TFLOP/s | off |")
  print("|---" * 7 + "|")
  for name, case in cases.items():
    rule, arrays, _ = made(case)
    flops = 4 * case.heads * case.size * pairs(case)
    off = attention_gpu.error(attention_gpu.on(jax.devices()[0]), rule, case.heads // case.kv_heads, case.size)
    for way, attend in ways(case).items():
      forward, both = milliseconds(attend, arrays, repeats)
      print(f"| {name} | {way} | {forward:.2f} | {flops / forward / 1e9:.0f} | {both:.2f} | "
            f"{3.5 * flops / both / 1e9:.0f} | {f'{off:.1e}' if way == 'kernels' else ''} |", flush=True)


def other_sizes() -> Iterator[flash_gpu.Sizes]:
  return map(flash_gpu.Sizes._make, itertools.product(QUERIES, KEYS, WARPS, STAGES))


def tune(name: str, case: Case, repeats: int, most: int | None) -> None:
  """Prints the best sizes of each kernel, the others left as they are; what does not compile is passed over."""
  _, arrays, _ = made(case)
  attend, at = ways(case)["kernels"], max(size for size in flash_gpu.TILES if size <= case.size)
  before = flash_gpu.TILES[at]
  tiles = flash_gpu._tiles(case.size, case.length, case.length, getattr(
      jax.devices()[0], "shared_memory_per_block_optin", flash_gpu.SHARED_BYTES))
  for kernel in flash_gpu.Tiles._fields:
    times, failed = {}, 0
    for sizes in tqdm(list(other_sizes())[:most], desc=kernel, leave=False):
      tried = tiles._replace(**{kernel: sizes})
      flash_gpu.TILES[at] = tried, tried
      try:
        times[sizes] = milliseconds(attend, arrays, repeats)[kernel != "forward"]
      except Exception as error:  # whatever the compiler says of sizes that are too large
        failed += 1
        tqdm.write(f"{kernel} {tuple(sizes)}: {str(error).splitlines()[0][:100]}")
    flash_gpu.TILES[at] = tiles, tiles
    now, (best, fastest) = milliseconds(attend, arrays, repeats), min(times.items(), key=lambda item: item[1])
    print(f"{name}, {kernel}: {tuple(best)} {fastest:.2f} ms; now {tuple(getattr(tiles, kernel))} "
          f"{now[kernel != 'forward']:.2f} ms; {len(times)} tried, {failed} failed", flush=True)
  flash_gpu.TILES[at] = before


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--tune", action="store_true")
  parser.add_argument("--small", action="store_true")
  parser.add_argument("--repeats", type=int, default=20)
  args = parser.parse_args()
  if jax.default_backend() != "gpu" and not args.small:
    sys.exit(f"JAX has no GPU here, but {jax.devices()[0].device_kind}: pip install -e '.[cuda]' on a machine that has "
             "one, or try the command with --small.")
  print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, bfloat16\n")
  cases = SMALL if args.small else CASES
  compare(cases, args.repeats)
  if args.tune:
    for name in list(cases)[:1] if args.small else ("whole rows", "heads of 64"):
      tune(name, cases[name], args.repeats, 2 if args.small else None)


if __name__ == "__main__":
  main()
