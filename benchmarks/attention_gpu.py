"""Attention on the GPU that is here: the kernels of models/attention/gpu_kernels.py beside cuDNN's.

    python benchmarks/attention_gpu.py [--cases "whole rows" …] [--ways kernels …] [--blocked] [--tune]

Milliseconds forward, and forward and backward, and TFLOP/s: 4 K operations a query head for each pair of a query and a
key that it sees, forward, and 2.5 times as many backward (scores are made again). cuDNN is told of documents where they
begin (its packed layout); "in order" is its backward pass that adds in a fixed order, which the other one does not;
"cuDNN, kernels" its forward pass with the backward pass of the kernels. (Those of JAX by Mosaic, 0.11.2, have no
backward pass of causal attention.) `off`, of the kernels, is how far they are from
models/attention/blocked.py in float32 on a small row, as in the trial before they are trusted; of others, how far their
output and gradients are from the kernels', as a part of the largest number. Each row is printed as it is there.

--blocked times models/attention/blocked.py, too, which takes minutes to compile. --tune times other sizes of tiles,
kernel by kernel, and names the best; TILES in models/attention/gpu_kernels.py is where they go. --small does all of it
with a few tokens, interpreted where there is no GPU: its times mean nothing.
"""

import argparse
import functools
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

from models import gpu
from models.attention import gpu as attention_gpu
from models.attention import gpu_kernels as flash_gpu
from models.attention import mask
from models.attention.dispatch import attention
from models.attention.mask import QKV, Rule, Side, TokenIds


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
  keys = jax.random.split(jax.random.key(0), 4)
  arrays = [jax.random.normal(key, (case.rows, case.length, heads, case.size), jnp.bfloat16)
            for key, heads in zip(keys, (case.heads, case.kv_heads, case.kv_heads, case.heads), strict=True)]
  segments = jnp.broadcast_to(jnp.arange(case.length) // case.document + 1, (case.rows, case.length))
  return Rule(1 / math.sqrt(case.size), window=case.window), arrays, segments


def ways(case: Case, segments: jax.Array, slow: bool) -> dict[str, tuple[Callable, dict]]:
  """name -> ((q, k, v) -> output, what the compiler is told)."""
  rule = Rule(1 / math.sqrt(case.size), window=case.window)
  sides = Side(segments, jnp.arange(case.length), None), Side(mask.keys_of(segments), jnp.arange(case.length), None)
  in_order = {"xla_gpu_exclude_nondeterministic_ops": True}
  found: dict[str, tuple[Callable, dict]] = {
      "kernels": (lambda q, k, v: attention_gpu.on(jax.devices()[0])(rule, QKV(q, k, v), *sides), {})}
  if jax.default_backend() == "gpu":
    found["cuDNN"] = functools.partial(cudnn, case), {}
    found["cuDNN, in order"] = functools.partial(cudnn, case), in_order
    if case.document == case.length and case.window is None:
      found["cuDNN, kernels"] = functools.partial(in_part, rule, sides), {}
  if slow:
    found["blocked"] = lambda q, k, v: attention(QKV(q, k, v), TokenIds(segments), rule, impl="blocked"), {}
  return found


def cudnn(case: Case, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  if case.document == case.length:
    window = None if case.window is None else (case.window - 1, 0)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=window, implementation="cudnn")
  from jax._src.cudnn import fused_attention_stablehlo as fused
  number = -(-case.length // case.document)
  begins = jnp.minimum(jnp.arange(number + 1) * case.document, case.length)
  lengths = jnp.broadcast_to(begins[1:] - begins[:-1], (case.rows, number)).astype(jnp.int32)
  # A row's end is the next one's beginning, and is told once: JAX lays the offsets of all rows end to end.
  begins = jnp.broadcast_to(begins.at[-1].set(-1), (case.rows, number + 1)).astype(jnp.int32)
  return fused.dot_product_attention(
      q, k, v, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=begins, kv_offsets=begins, scale=case.size**-0.5,
      mask_type=fused.MaskType.PADDING_CAUSAL, sliding_window_length=case.window)


def in_part(rule: Rule, sides: tuple[Side, Side], q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  """cuDNN's forward pass, and the kernels' backward pass, of rows of whole tiles."""
  from jax._src.cudnn import fused_attention_stablehlo as fused
  device = jax.devices()[0]
  tiles = flash_gpu._tiles(q.shape[-1], q.shape[1], k.shape[1], getattr(
      device, "shared_memory_per_block_optin", flash_gpu.SHARED_BYTES))

  def forward(q, k, v):
    out, lse_BxHxT = fused.dot_product_attention(q, k, v, scale=rule.scale, mask_type=fused.MaskType.CAUSAL,
                                                 return_residual=True)
    return out, (QKV(q, k, v), *sides, out, lse_BxHxT * flash_gpu.LOG2E)

  attend = jax.custom_vjp(lambda q, k, v: forward(q, k, v)[0])
  attend.defvjp(forward, lambda saved, dout: flash_gpu._attend_bwd(rule, tiles, False, saved, dout)[0][:3])
  return attend(q, k, v)


def pairs(case: Case) -> int:
  """Of a query and a key that it sees, in all rows."""
  seen = np.minimum(np.arange(case.length) % case.document + 1, case.window or case.length)
  return case.rows * int(seen.sum())


def milliseconds(attend: Callable, arrays: list[jax.Array], repeats: int, told: dict | None = None
                 ) -> tuple[float, float, list[jax.Array]]:
  """(forward; forward and backward; its results): of several at once, so that none waits for Python, the best of three
  times."""
  *given, dout = arrays

  def both(q, k, v):
    out, pull = jax.vjp(attend, q, k, v)
    return [out, *pull(dout.astype(out.dtype))]

  best, out = [], []
  for function in (attend, both):
    run = jax.jit(function, compiler_options=told if jax.default_backend() == "gpu" else None)
    out = jax.block_until_ready(run(*given))
    times = []
    for _ in range(3):
      start = time.perf_counter()
      for _ in range(repeats):
        out = run(*given)
      jax.block_until_ready(out)
      times.append((time.perf_counter() - start) / repeats)
    best.append(1e3 * min(times))
  return best[0], best[1], out


def compare(cases: dict[str, Case], repeats: int, slow: bool, only: list[str]) -> None:
  """Prints a table."""
  print("| case | implementation | forward, ms | TFLOP/s | forward and backward, ms | TFLOP/s | off |")
  print("|---" * 7 + "|", flush=True)
  for name, case in cases.items():
    rule, arrays, segments = made(case)
    flops = 4 * case.heads * case.size * pairs(case)
    kernels: list[jax.Array] = []
    for way, (attend, told) in ways(case, segments, slow).items():
      if only and way not in only:
        continue
      try:
        forward, both, out = milliseconds(attend, arrays, repeats, told)
      except Exception as error:  # what a library does not take
        print(f"| {name} | {way} | {type(error).__name__}: {str(error).strip().splitlines()[0][:90]} |", flush=True)
        continue
      kernels = kernels or out
      off = gpu.off(out, kernels) if way != "kernels" else attention_gpu.error(
          attention_gpu.on(jax.devices()[0]), rule, case.heads // case.kv_heads, case.size)
      print(f"| {name} | {way} | {forward:.2f} | {flops / forward / 1e9:.0f} | {both:.2f} | "
            f"{3.5 * flops / both / 1e9:.0f} | {off:.1e} |", flush=True)


def other_sizes() -> Iterator[flash_gpu.Sizes]:
  return map(flash_gpu.Sizes._make, itertools.product(QUERIES, KEYS, WARPS, STAGES))


def tune(name: str, case: Case, repeats: int, most: int | None) -> None:
  """Prints the best sizes of each kernel, the others left as they are; what does not compile is passed over."""
  _, arrays, segments = made(case)
  (attend, _), at = ways(case, segments, False)["kernels"], max(size for size in flash_gpu.TILES if size <= case.size)
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
  parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
  parser.add_argument("--ways", nargs="*", default=[], help="of the implementations; default: all")
  parser.add_argument("--blocked", action="store_true")
  parser.add_argument("--tune", action="store_true")
  parser.add_argument("--small", action="store_true")
  parser.add_argument("--repeats", type=int, default=10)
  args = parser.parse_args()
  if jax.default_backend() != "gpu" and not args.small:
    sys.exit(f"JAX has no GPU here, but {jax.devices()[0].device_kind}: pip install -e '.[cuda]' on a machine that has "
             "one, or try the command with --small.")
  print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, bfloat16\n")
  cases = SMALL if args.small else {name: CASES[name] for name in args.cases}
  compare(cases, args.repeats, args.blocked or args.small, args.ways)
  if args.tune:
    for name in list(cases)[:1] if args.small else ("whole rows", "heads of 64"):
      tune(name, cases[name], args.repeats, 2 if args.small else None)


if __name__ == "__main__":
  main()
