"""Compiles the training step of the recipes for TPUs, without a TPU, and says what each chip would need and send.

    JAX_PLATFORMS=cpu python benchmarks/compile_recipes.py [--only llama3_8b] [--slices 2]

Needs `pip install -e '.[tpu]'`, on any machine. It is what `--mode=plan` does, one recipe after another: the compiler
for TPUs compiles the whole step for all chips of the topology. Minutes each, on two cores.
"""

import argparse
import importlib
import os
import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
from ml_collections import ConfigDict

from input_pipeline import loader
from trainer import program as program_lib
from trainer import startup
from trainer.config import checks as config_checks
from trainer.distributed import mesh as mesh_lib
from trainer.planning import compile as plan_compile
from trainer.telemetry import hardware

RECIPES = ("llama3_8b", "llama3_70b", "qwen3_30b_a3b", "gemma3_27b")
GIB, GB = 2**30, 1e9


def recipe(name: str, slices: int) -> ConfigDict:
  """The recipe as it is; on several slices, each has a copy of it with as many rows."""
  config = importlib.import_module(f"configs.{name}").get_config()
  config.mesh.slice = config.plan.slices = slices
  config.batch_size *= slices
  resolved, _ = program_lib.resolve(config)
  program_lib.settle(resolved, "tpu")
  return resolved


def measure(name: str, slices: int) -> tuple[str, list[str]]:
  """(a row of the table of memory, those of that of the collectives)"""
  config = recipe(name, slices)
  topology = hardware.topology(config.plan.topology, slices)
  chip, sizes = topology.chip, mesh_lib.axis_sizes(config.mesh, topology.devices, topology.kind)
  model = program_lib.make_model(config, config.model.vocab_size)
  parameters = sum(leaf.size for leaf in jax.tree.leaves(model.abstract_params()))
  made = plan_compile.compile_step(config_checks.to_json(config), config.model.vocab_size,
                                   loader.used_sources(config.input), topology)
  mesh = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
  where = f"{slices} × {topology.name}" if slices > 1 else topology.name
  first = f"| {name} | {where} | {mesh} | {config.batch_size} × {config.seq_len:,} | {parameters:,} |"
  if made.failure and not made.too_large:
    raise SystemExit(f"{name} on {where}: {made.failure}")
  if made.failure:
    return f"{first} | | | {chip.usable / GIB:.2f} | no | | {made.seconds:.0f} |", []
  row = (f"{first} {made.arguments / GIB:.2f} | {(made.total - made.arguments) / GIB:.2f} | {made.total / GIB:.2f} | "
         f"{chip.usable / GIB:.2f} | {'yes' if made.total <= chip.usable else 'no'} | {made.copied / GIB:.3f} | "
         f"{made.seconds:.0f} |")
  return row, [f"| {name} | {where} | {kind} | {', '.join(axes)} | {count:,} | {sent / GB:.3f} | {hidden / sent:.0%} |"
               for kind, axes, count, sent, hidden in made.collectives if sent >= 1e6]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--only", choices=RECIPES, help="one recipe instead of all")
  parser.add_argument("--slices", type=int, default=1, help="so many slices of the recipe's topology")
  args = parser.parse_args()
  startup.set_environment()
  # Nothing runs on a TPU here, so several processes may have the compiler at once.
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  print(", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "libtpu")))
  print("\n| recipe | topology | mesh | rows × tokens | parameters | state, GiB a chip | temporaries | total | "
        "there are | fits | parameters copied, GiB | compiled in s |\n" + "|---" * 12 + "|")
  moved = []
  for name in [args.only] if args.only else RECIPES:
    row, lines = measure(name, args.slices)
    print(row, flush=True)
    moved += lines
  print("\n| recipe | topology | collective | between devices along | times a step | GB that a chip sends | beside "
        "computation |\n" + "|---" * 7 + "|")
  print("\n".join(moved))


if __name__ == "__main__":
  main()
