"""Compiles training and sampling for a GPU that is not here, and says what memory they need and how much they move.

    JAX_PLATFORMS=cpu python benchmarks/compile_gpu.py [--gpu h100] [--rows 8] [--config model.attention=blocked …]

Needs `pip install -e '.[cuda]'`, on any machine with Linux. A dense Transformer of 1.3 billion parameters: a step of
SEQ on rows of 4,096 tokens, and one more token for each of 64 texts with room for 2,048. What a program moves is what
its kernels read and write of the GPU's memory, one after another, as its text says: of what is sliced, gathered or
updated in place, only the part. What stays in a cache between two kernels counts twice all the same.
"""

import argparse
import ast
import functools
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from trainer import program as program_lib
from trainer import startup
from trainer.config import defaults, source
from trainer.distributed import mesh as mesh_lib
from trainer.generate import decoding
from trainer.planning import collectives
from trainer.planning import gpu as plan_gpu
from trainer.telemetry import hardware

VOCABULARY, TOKENS, TEXTS, ROOM = 128_256, 4096, 64, 2048
GB = 1e9
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)[a-z0-9]*\[([\d,]*)\]")
_MOVES_NOTHING = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while", "after-all", "call",
                  "conditional", "iota", "partition-id", "fusion-done"}
# Of these, only what they give is read, or only what they are given is written.
_READS_PART, _WRITES_PART = {"dynamic-slice", "gather", "slice"}, {"dynamic-update-slice": 1, "scatter": 2}


def config(rows: int, changes: list[str]):
  """The resolved config."""
  c = defaults()
  c.batch_size, c.seq_len, c.total_steps, c.model.vocab_size = rows, TOKENS, 10, VOCABULARY
  c.tokenizer.type, c.tokenizer.path, c.remat = "hf", "not/here", "attention_mlp"
  c.input.sources.main = source(type="parquet", path="not/here", split="train")
  m = c.model
  m.num_layers, m.hidden_size, m.intermediate_size, m.num_heads, m.num_kv_heads, m.head_dim = 16, 2048, 8192, 16, 8, 128
  for change in changes:
    key, value = change.split("=", 1)
    *path, last = key.split(".")
    with_key = functools.reduce(lambda section, name: section[name], path, c)
    with_key[last] = value if value.isalpha() else ast.literal_eval(value)
  resolved, _ = program_lib.resolve(c)
  program_lib.settle(resolved, "gpu")
  return resolved


def size(shape: str) -> float:
  """Bytes of all arrays in a shape as it is written."""
  total = 0.0
  for kind, bits, dims in _ARRAY.findall(shape):
    count = 1
    for n in filter(None, dims.split(",")):
      count *= int(n)
    total += count * (1 if kind == "pred" else int(bits or 0) / 8)
  return total


def moved(text: str) -> tuple[float, float]:
  """(bytes that products read and write, and all others) in one run of a program, of which that is the text."""
  bodies = collectives.computations(text)
  times = collectives.times_of(bodies)
  fused = {name for lines in bodies.values() for line in lines if collectives.FUSION.search(line)
           for name in re.findall(r"calls=%?([\w.\-]+)", line)}
  products = others = 0.0
  for name, lines in bodies.items():
    if name in fused or not times.get(name):
      continue
    parsed = [match for match in map(_LINE.match, lines) if match]
    shapes = {match[1]: match[2] for match in parsed}
    for match in parsed:
      if match[3] in _MOVES_NOTHING:
        continue
      given = [shapes.get(operand, "") for operand in re.findall(r"%([\w.\-]+)", match[4].split("), ")[0])]
      called = re.search(r"calls=%?([\w.\-]+)", match[4])
      inside = [m for m in map(_LINE.match, bodies.get(called[1], [])) if m] if called else []
      total = (of_fusion(inside) if inside else size(match[2]) + sum(map(size, given))) * times[name]
      multiplies = any(m[3] == "dot" for m in inside) or "cublas" in match[4]
      products, others = products + total * multiplies, others + total * (not multiplies)
  return products, others


def of_fusion(inside: list[re.Match]) -> float:
  """Bytes that one kernel reads and writes."""
  shapes, users = {m[1]: m[2] for m in inside}, {}
  for m in inside:
    for operand in re.findall(r"%([\w.\-]+)", m[4].split("), ")[0]):
      users.setdefault(operand, []).append(m)

  def read(name: str) -> float:
    whole = size(shapes[name])
    through = users.get(name, [])
    if through and all(m[3] == "bitcast" for m in through):
      return sum(min(read(m[1]), whole) for m in through[:1])
    if through and all(m[3] in _READS_PART for m in through):
      return min(whole, sum(size(m[2]) for m in through))
    in_place = [m for m in through if m[3] in _WRITES_PART and m[4].lstrip("%").startswith(name)]
    return 0.0 if in_place and len(in_place) == len(through) else whole

  total = sum(read(m[1]) for m in inside if m[3] == "parameter")
  updates = [m for m in inside if m[3] in _WRITES_PART]
  if updates:
    return total + sum(size(shapes.get(re.findall(r"%([\w.\-]+)", m[4])[_WRITES_PART[m[3]]], "")) for m in updates)
  return total + size(inside[-1][2])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  gpus = [kind for kind, chip in hardware.CHIPS.items() if chip.platform == "gpu"]
  parser.add_argument("--gpu", default="h100", choices=gpus)
  parser.add_argument("--rows", type=int, default=8)
  parser.add_argument("--config", nargs="*", default=[], metavar="KEY=VALUE")
  args = parser.parse_args()
  startup.set_environment()
  c = config(args.rows, args.config)
  mesh = mesh_lib.make_mesh(c.mesh, plan_gpu.devices(args.gpu, 1, 1))
  bandwidth = hardware.CHIPS[args.gpu].memory_bandwidth
  everywhere = NamedSharding(mesh, PartitionSpec())

  def here(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), tree)

  def show(name: str, compiled) -> None:
    memory, (products, others) = compiled.memory_analysis(), moved(compiled.as_text())
    print(f"| {name} | {memory.argument_size_in_bytes / GB:.2f} | {memory.temp_size_in_bytes / GB:.2f} | "
          f"{products / GB:.1f} | {others / GB:.1f} | {(products + others) / bandwidth * 1e3:.1f} |", flush=True)

  model = program_lib.make_model(c, VOCABULARY)
  program = program_lib.make_program(c, model, program_lib.planned_optimizer(c, model), mesh, ["main"])
  batch = program_lib.abstract_batch(c, model, c.batch_size, precompute=False, share_prompts=False)
  print(f"{args.gpu}, {args.rows} rows of {TOKENS:,} tokens; {' '.join(args.config) or 'as configured'}\n\n"
        "| program | arguments, GB | temporaries | read and written by products | by others | ms at the memory's "
        "bandwidth |\n|---|---|---|---|---|---|")
  with mesh_lib.activation_rules(mesh, c.activation_rules), plan_gpu.meant(mesh):
    show("a step", program.update_fn.lower(here(program.abstract_state), here(batch)).compile())
    read = here(jax.eval_shape(model.decoding_params, model.abstract_params()))
    state = here(jax.eval_shape(functools.partial(decoding.empty, model, TEXTS, ROOM)))
    one, stops = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.int32)
    given = here((stops, jax.ShapeDtypeStruct((3,), jnp.float32), one, one))
    decode = functools.partial(decoding.decode, model, decoding.DecodeOptions(32, False, False))
    show("a token of each text", jax.jit(decode, donate_argnums=1).lower(read, state, given).compile())


if __name__ == "__main__":
  main()
