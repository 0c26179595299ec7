"""GPUs that are not here, described to XLA's compiler for them, which JAX's CUDA plugin brings and which needs none."""

import contextlib
import importlib.metadata
import importlib.util
import re
from typing import Any

from trainer.telemetry.hardware import CHIPS, Chip

# The plugin's modules, and of each the packages that say which cuDNN and which CUDA a program will run with.
PLUGINS = {
    "jax_cuda13_plugin": dict(dnn_version_info="nvidia-cudnn-cu13", runtime_version="nvidia-cuda-runtime"),
    "jax_cuda12_plugin": dict(dnn_version_info="nvidia-cudnn-cu12", runtime_version="nvidia-cuda-runtime-cu12"),
}
# {compute capability: (KiB of shared memory, threads, float32 units) of a multiprocessor}, from the table of technical
# specifications in NVIDIA's CUDA C++ Programming Guide. A block may have all of that memory but 1 KiB.
_MULTIPROCESSOR = {(8, 0): (164, 2048, 64), (8, 6): (100, 1536, 128), (8, 9): (100, 1536, 128),
                   (9, 0): (228, 2048, 128), (10, 0): (228, 2048, 128)}


def plugin() -> str | None:
  """The module of JAX's CUDA plugin that is installed here; None: none is."""
  return next((name for name in PLUGINS if importlib.util.find_spec(name) is not None), None)


def target(chip: Chip) -> str:
  """That GPU as a text of XLA's `GpuTargetConfigProto`."""
  assert chip.gpu is not None
  (major, minor), count, clock, l2 = chip.gpu
  shared, threads, units = _MULTIPROCESSOR[chip.gpu.capability]
  # From 9.0 on, instructions that later architectures lack (wgmma) are a feature besides the capability's number.
  feature = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
  versions = "".join(f"{field} {{ major: {version[0]} minor: {version[1]} patch: {version[2]} }}\n"
                     for field, version in _versions().items())
  return f"""gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor}{feature} }}
  core_count: {count}
  clock_rate_ghz: {clock}
  fpus_per_core: {units}
  device_memory_size: {chip.memory:.0f}
  memory_bandwidth: {chip.memory_bandwidth:.0f}
  l2_cache_size: {l2}
  shared_memory_per_block: {48 * 1024}
  shared_memory_per_block_optin: {(shared - 1) * 1024}
  shared_memory_per_core: {shared * 1024}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {threads}
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
{versions}device_description_str: "{chip.kinds[0]}"
"""


def devices(kind: str, nodes: int, per_node: int) -> list[Any]:
  """JAX's devices of so many nodes of GPUs, in the order of the nodes, to compile for; nothing can run on them.

  Args:
    kind: of GPU, as in `hardware.CHIPS`.
    nodes: of them.
    per_node: GPUs of a node.
  """
  from jax.experimental import topologies

  # To XLA it is slices x hosts x devices of each; all nodes are in one slice, as they are where they exist.
  shape = f"1x{nodes}x{per_node}"
  return topologies.get_topology_desc(platform="cuda", target_config=target(CHIPS[kind]), topology=shape).devices


def meant(devices: Any) -> contextlib.AbstractContextManager:
  """Within it, what is lowered is for these GPUs: from 0.11 on, JAX asks for their name to lower kernels, and would
  take that of a GPU that is here.

  Args:
    devices: of `devices`, or a mesh of them.
  """
  import jax

  mesh = devices if isinstance(devices, jax.sharding.Mesh) else jax.sharding.Mesh(devices, ("gpus",))
  return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def _versions() -> dict[str, tuple[int, int, int]]:
  """{field: version} of what is installed as packages."""
  found = {}
  for field, package in PLUGINS.get(plugin() or "", {}).items():
    try:
      numbers = [int(n) for n in re.findall(r"\d+", importlib.metadata.version(package))]
    except importlib.metadata.PackageNotFoundError:
      continue  # a CUDA of the system's own
    major, minor, patch = (*numbers, 0, 0, 0)[:3]
    found[field] = (major, minor, patch)
  return found
