"""The real step, compiled for devices that need not be here: `python -m trainer.planning.compile REQUEST RESULT`.

A process of its own, since the platform, the number of devices and the compiler are settled when JAX starts: for TPUs
libtpu and for GPUs JAX's CUDA plugin compile on any machine, for `cpu:N` there are N forced host devices.
"""

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from trainer import tree
from trainer.planning import collectives
from trainer.planning import gpu as plan_gpu
from trainer.telemetry.hardware import CHIPS, Topology

# What this libtpu describes in another way than JAX on such machines shows it: v4 with two devices a chip.
NOT_COMPILED = ("v4",)
# What compilers say when a program does not fit, and their figures in it.
NO_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|[Rr]an out of memory|exceeds available")


class Compiled(NamedTuple):
  """What the compiler says of the step, for each device.

  Attributes:
    arguments, outputs, temporaries, aliased: bytes; the outputs that are aliased lie in the arguments' memory.
    flops: that the program counts (loops once, so it says little where layers are scanned); None: it does not say.
    collectives: (kind, axes, how many run, bytes that a device sends, of these while something is computed) of each
      kind, the most bytes first.
    copied: bytes of parameters and gradients, or of a device's parts of them, that a step copies or transposes on their
      own.
    seconds: that compiling took.
    failure: why there is nothing of this; "" if there is.
    too_large: whether it is that the program needs more memory than there is.
  """

  arguments: float = 0.0
  outputs: float = 0.0
  temporaries: float = 0.0
  aliased: float = 0.0
  flops: float | None = None
  collectives: tuple[tuple[str, tuple[str, ...], int, float, float], ...] = ()
  copied: float = 0.0
  seconds: float = 0.0
  failure: str = ""
  too_large: bool = False

  @property
  def total(self) -> float:
    """Bytes that the program needs at its peak."""
    return self.arguments + self.outputs + self.temporaries - self.aliased


def refusal(topology: Topology) -> str:
  """Why there is no compiler here for that topology; "" if there is one."""
  if topology.chip.platform == "cpu":
    return ""
  if topology.chip.platform == "gpu":
    if plan_gpu.plugin() is None:
      return "XLA for GPUs is not installed; pip install -e '.[cuda]', on any machine with Linux, brings it"
    return ""
  if topology.kind in NOT_COMPILED:
    return f"libtpu describes {topology.kind} with two devices a chip, where Cloud TPU has one"
  if importlib.util.find_spec("libtpu") is None:
    return "libtpu, the compiler for TPUs, is not installed; pip install -e '.[tpu]', on any machine, brings it"
  return ""


def compile_step(config_json: str, vocab_size: int, source_names: list[str], topology: Topology) -> Compiled:
  """Compiles the step of that config for the topology, in a process of its own.

  Args:
    config_json: the resolved config (`config_checks.to_json`).
    vocab_size: entries of the tokenizer.
    source_names: see `program.make_program`.
  """
  # Nothing runs on a TPU or GPU here, so that nothing has to be locked.
  env = dict(os.environ, JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
  if topology.chip.platform == "cpu":
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", env.get("XLA_FLAGS", ""))
    env["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={topology.devices}".strip()
  with tempfile.TemporaryDirectory() as folder:
    request, result = Path(folder) / "request.json", Path(folder) / "result.json"
    request.write_text(json.dumps(dict(config=config_json, vocab_size=vocab_size, source_names=source_names,
                                       kind=topology.kind, shape=topology.shape, groups=topology.groups)))
    done = subprocess.run([sys.executable, "-m", "trainer.planning.compile", str(request), str(result)], env=env,
                          cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, check=False)
    if not result.exists():
      last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
      return Compiled(failure=f"the compiling process ended with {done.returncode}: {' '.join(last)}")
    found = json.loads(result.read_text())
  moved = tuple((kind, tuple(axes), *numbers) for kind, axes, *numbers in found.get("collectives", ()))
  return Compiled(**{**found, "collectives": moved})


def main(request: Path, result: Path) -> None:
  """The child process."""
  import jax
  from jax.experimental import topologies

  from trainer import program as program_lib
  from trainer.config import checks as config_checks
  from trainer.distributed import mesh as mesh_lib

  asked = json.loads(request.read_text())
  config = config_checks.resolve(json.loads(asked["config"]))
  if asked["kind"] == "cpu":
    devices = jax.devices()
  elif CHIPS[asked["kind"]].platform == "gpu":
    devices = plan_gpu.devices(asked["kind"], asked["groups"], *asked["shape"])
  else:
    options = {} if asked["groups"] == 1 else dict(num_slices=asked["groups"])
    if asked["shape"] == [1, 1]:
      options["chips_per_host_bounds"] = [1, 1, 1]
    name = f"{asked['kind']}:{'x'.join(map(str, asked['shape']))}"
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
  mesh = mesh_lib.training_mesh(config, devices)
  model = program_lib.make_model(config, asked["vocab_size"])
  program = program_lib.make_program(config, model, program_lib.planned_optimizer(config, model), mesh,
                                     asked["source_names"])
  batch = program_lib.abstract_batch(config, model, config.batch_size, precompute=program.precompute,
                                     share_prompts=program.share_prompts, sharding=program.batch_sharding)
  began = time.monotonic()
  try:
    meant = plan_gpu.meant(mesh) if devices[0].platform == "gpu" else contextlib.nullcontext()
    with mesh_lib.activation_rules(mesh, config.activation_rules), meant:
      compiled = program.update_fn.lower(program.abstract_state, batch).compile()
    found = _read(compiled, mesh, program.abstract_state["params"])
  except Exception as error:  # the compiler's errors are of many kinds, and its words are what is asked for
    found = dict(failure=str(error), too_large=bool(NO_MEMORY.search(str(error))))
  result.write_text(json.dumps(found | dict(seconds=time.monotonic() - began)))


def _read(compiled: Any, mesh: Any, params: Any) -> dict[str, Any]:
  """The fields of `Compiled`."""
  memory = compiled.memory_analysis()
  found = dict(arguments=memory.argument_size_in_bytes, outputs=memory.output_size_in_bytes,
               temporaries=memory.temp_size_in_bytes, aliased=memory.alias_size_in_bytes)
  text = compiled.as_text()
  found["collectives"] = [(kind, axes, *numbers) for (kind, axes), numbers in collectives.summary(
      collectives.collectives(text, mesh)).items()]
  # Matrices, whole or a device's part, of all layers or of one.
  matrices = [leaf for leaf in tree.flatten(params).values() if len(leaf.shape) > 1]
  shapes = {shape for leaf in matrices for shape in (leaf.shape, leaf.sharding.shard_shape(leaf.shape))}
  shapes |= {shape[1:] for shape in shapes if len(shape) > 2}
  found["copied"] = sum(collectives.size_of(shape) * times for shape, times in collectives.copies(text, shapes))
  with contextlib.suppress(KeyError, TypeError):
    found["flops"] = compiled.cost_analysis()["flops"]
  return found


if __name__ == "__main__":
  main(Path(sys.argv[1]), Path(sys.argv[2]))
