"""What the keys of `precision` and `remat` save, by the TPU compiler: `python benchmarks/memory.py`, without a TPU.

Compiles the real training step of a decoder of 1.2 billion parameters (the shapes of Llama 3.2 1B) for four chips and
prints, for each variant, what the compiler says that every chip needs: the state that it holds between steps, what is
allocated beside it at the peak of a step, and what lies in the host's memory. Needs libtpu (`pip install -e '.[tpu]'`).
"""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nothing runs on a TPU here, so nothing has to be locked
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
from jax.experimental import topologies

from trainer import program as program_lib
from trainer.config import checks as config_checks
from trainer.config import defaults, source
from trainer.distributed import mesh as mesh_lib

VARIANTS = {
    "moments=float32, remat=full": {},
    "moments=bfloat16": {"precision.moments": "bfloat16"},
    "moments=int8": {"precision.moments": "int8"},
    "params=bfloat16, moments=int8": {"precision.params": "bfloat16", "precision.stochastic_rounding": True,
                                      "precision.moments": "int8"},
    "offload_optimizer=True": {"precision.offload_optimizer": True},
    "remat=offload": {"remat": "offload"},
    "remat=attention": {"remat": "attention"},
    "remat=attention_mlp": {"remat": "attention_mlp"},
    "remat=none": {"remat": "none"},
    "matmul=int8": {"precision.matmul": "int8"},
}
GIB = 2**30


def config_of(rows: int, changed: dict):
  """The config of the decoder; `changed`: values by dotted key."""
  c = defaults()
  c.input.sources.main = source(type="text", path="none")
  c.model.update(vocab_size=128_256, num_layers=16, hidden_size=2048, intermediate_size=8192, num_heads=32,
                 num_kv_heads=8, rope_theta=500_000.0)
  c.update(batch_size=rows, seq_len=4096, remat="full")
  c.precision.compute = "bfloat16"
  c.precision.frozen = "float32"
  c.mesh.update(data=1, fsdp=-1)
  for key, value in changed.items():
    section, _, leaf = key.rpartition(".")
    (c[section] if section else c)[leaf] = value
  return config_checks.resolve(c)


def compiled_step(config, devices):
  """The training step of that config, compiled for those devices."""
  config_checks.validate(config)
  mesh = mesh_lib.make_mesh(config.mesh, devices)
  model = program_lib.make_model(config, config.model.vocab_size)
  program = program_lib.make_program(config, model, program_lib.planned_optimizer(config, model), mesh, ("main",))
  batch = program_lib.abstract_batch(config, model, config.batch_size, sharding=program.batch_sharding)
  with mesh_lib.activation_rules(mesh, config.activation_rules):
    return program.update_fn.lower(program.abstract_state, batch).compile()


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--topology", default="v5e:2x2")
  parser.add_argument("--rows", type=int, default=8, help="rows of 4,096 tokens, over all chips")
  parser.add_argument("--only", default="", help="variants whose name contains this")
  args = parser.parse_args()
  devices = topologies.get_topology_desc(platform="tpu", topology_name=args.topology).devices
  print(f"{args.topology}, {args.rows} rows of 4,096 tokens, jax {jax.__version__}; GiB on a chip")
  print(f"{'':<32}{'state':>9}{'beside it':>11}{'together':>10}{'host':>8}{'seconds to compile':>20}", flush=True)
  for name, changed in VARIANTS.items():
    if args.only in name:
      began = time.perf_counter()
      try:
        m = compiled_step(config_of(args.rows, changed), devices).memory_analysis()
      except jax.errors.JaxRuntimeError as error:
        line = next((line for line in str(error).splitlines() if "Used" in line), str(error).splitlines()[0])
        print(f"{name:<32}  does not fit: {line.strip()[:100]}", flush=True)
        continue
      beside = m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
      state, host = m.argument_size_in_bytes, m.host_argument_size_in_bytes + m.host_temp_size_in_bytes
      print(f"{name:<32}{state / GIB:>9.2f}{beside / GIB:>11.2f}{(state + beside) / GIB:>10.2f}{host / GIB:>8.2f}"
            f"{time.perf_counter() - began:>20.0f}", flush=True)


if __name__ == "__main__":
  main()
