"""Chips and how they are connected: the one table of what vendors say, and topologies by name.

Bandwidths are in bytes per second in one direction; data sheets of TPUs and of NVLink give the sum of both.
Sources: Google Cloud's pages "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x"; NVIDIA's data sheets of the GPUs
named and of DGX A100, H100, H200 and B200, whose network it is; for TPUs `usable` is what the compiler (libtpu 0.0.42)
says there is. A GPU's memory is what CUDA shows of it (80 GB on a data sheet are 79 GiB, 24 GB are 22 GiB). Its
multiprocessors, clock and cache are those of XLA's own descriptions of A100, H100, H200 and B200, and of NVIDIA's
papers on the architectures of the others (GH200: as H200).
"""

import difflib
import functools
import math
import os
import re
from typing import Any, NamedTuple

from trainer import startup
from trainer.errors import ConfigError

GIB, MIB = 2**30, 2**20


class Gpu(NamedTuple):
  """What XLA's compiler must know of a GPU besides its memory (trainer/planning/gpu.py).

  Attributes:
    capability: CUDA's compute capability, (major, minor).
    multiprocessors: of them.
    clock: the highest, GHz.
    l2: bytes of the cache that they share.
  """

  capability: tuple[int, int]
  multiprocessors: int
  clock: float
  l2: int


class Chip(NamedTuple):
  """One JAX device of a kind.

  Attributes:
    kinds: beginnings of `jax.Device.device_kind`.
    platform: tpu | gpu | cpu.
    peak: dense bfloat16, FLOP/s.
    memory, memory_bandwidth: of its own memory, bytes and bytes/s.
    usable: bytes of the memory that a program may use.
    link: what connects the devices of a slice or of a node.
    link_bandwidth: of one link of a torus, or of the device to the switch of its node.
    torus: dimensions of the slice's torus; 0: the devices of a node are connected by a switch.
    network, network_bandwidth: between slices, or between nodes, for each device.
    per_host: devices of a whole host or node.
    cores: devices for each chip that a topology's shape counts.
    gpu: of GPUs, what their compiler must know.
    hides_scatters: whether what is scattered travels while something is computed. v5e, which has no SparseCores, waits.
  """

  kinds: tuple[str, ...]
  platform: str
  peak: float
  memory: float
  usable: float
  memory_bandwidth: float
  link: str
  link_bandwidth: float
  torus: int
  network: str
  network_bandwidth: float
  per_host: int
  cores: int = 1
  gpu: Gpu | None = None
  hides_scatters: bool = True


_TPU = functools.partial(Chip, platform="tpu", link="ICI", network="DCN")


def _gpu(kind: str, memory: float, **more: Any) -> Chip:
  return Chip((kind,), "gpu", memory=memory, usable=startup.GPU_SHARE * memory, torus=0, network="InfiniBand",
              per_host=8, **{"link": "NVLink", **more})


CHIPS: dict[str, Chip] = {
    # A v4 has two cores, which JAX on Cloud TPU shows as one device.
    "v4": _TPU(kinds=("TPU v4",), peak=275e12, memory=32 * GIB, usable=30.5 * GIB, memory_bandwidth=1228e9,
               link_bandwidth=50e9, torus=3, network_bandwidth=6.25e9, per_host=4),
    "v5e": _TPU(kinds=("TPU v5 lite", "TPU v5e"), peak=197e12, memory=16 * GIB, usable=15.75 * GIB,
                memory_bandwidth=819e9, link_bandwidth=50e9, torus=2, network_bandwidth=3.125e9, per_host=8,
                hides_scatters=False),
    "v5p": _TPU(kinds=("TPU v5p", "TPU v5"), peak=459e12, memory=95 * GIB, usable=95.74 * GIB, memory_bandwidth=2765e9,
                link_bandwidth=100e9, torus=3, network_bandwidth=6.25e9, per_host=4),
    "v6e": _TPU(kinds=("TPU v6 lite", "TPU v6e"), peak=918e12, memory=32 * GIB, usable=31.25 * GIB,
                memory_bandwidth=1640e9, link_bandwidth=112e9, torus=2, network_bandwidth=12.5e9, per_host=8),
    # Two devices a chip, which share its links.
    "tpu7x": _TPU(kinds=("TPU7x",), peak=1153.5e12, memory=96 * GIB, usable=94.75 * GIB, memory_bandwidth=3690e9,
                  link_bandwidth=50e9, torus=3, network_bandwidth=6.25e9, per_host=8, cores=2),
    "a100": _gpu("NVIDIA A100", peak=312e12, memory=85.1e9, memory_bandwidth=2039e9, link_bandwidth=300e9,
                 network_bandwidth=25e9, gpu=Gpu((8, 0), 108, 1.41, 40 * MIB)),
    "a100-40": _gpu("NVIDIA A100-SXM4-40GB", peak=312e12, memory=42.3e9, memory_bandwidth=1555e9, link_bandwidth=300e9,
                    network_bandwidth=25e9, gpu=Gpu((8, 0), 108, 1.41, 40 * MIB)),
    "h100": _gpu("NVIDIA H100", peak=989e12, memory=84.9e9, memory_bandwidth=3350e9, link_bandwidth=450e9,
                 network_bandwidth=50e9, gpu=Gpu((9, 0), 132, 1.98, 50 * MIB)),
    "h100-pcie": _gpu("NVIDIA H100 PCIe", peak=756e12, memory=84.9e9, memory_bandwidth=2000e9, link="PCIe",
                      link_bandwidth=64e9, network_bandwidth=50e9, gpu=Gpu((9, 0), 114, 1.755, 50 * MIB)),
    "h200": _gpu("NVIDIA H200", peak=989e12, memory=150.1e9, memory_bandwidth=4800e9, link_bandwidth=450e9,
                 network_bandwidth=50e9, gpu=Gpu((9, 0), 132, 1.98, 50 * MIB)),
    "gh200": _gpu("NVIDIA GH200", peak=989e12, memory=101.9e9, memory_bandwidth=4000e9, link_bandwidth=450e9,
                  network_bandwidth=50e9, gpu=Gpu((9, 0), 132, 1.98, 50 * MIB)),
    "b200": _gpu("NVIDIA B200", peak=2250e12, memory=191.5e9, memory_bandwidth=8000e9, link_bandwidth=900e9,
                 network_bandwidth=50e9, gpu=Gpu((10, 0), 148, 1.965, 132_644_864)),
    "l4": _gpu("NVIDIA L4", peak=121e12, memory=23.6e9, memory_bandwidth=300e9, link="PCIe", link_bandwidth=32e9,
               network_bandwidth=12.5e9, gpu=Gpu((8, 9), 58, 2.04, 48 * MIB)),
    "a10": _gpu("NVIDIA A10", peak=125e12, memory=23.6e9, memory_bandwidth=600e9, link="PCIe", link_bandwidth=32e9,
                network_bandwidth=12.5e9, gpu=Gpu((8, 6), 72, 1.695, 6 * MIB)),
    "l40s": _gpu("NVIDIA L40S", peak=362e12, memory=47.7e9, memory_bandwidth=864e9, link="PCIe", link_bandwidth=32e9,
                 network_bandwidth=12.5e9, gpu=Gpu((8, 9), 142, 2.52, 96 * MIB)),
}

# Shapes of slices that can be had, besides multiples of 4 in each dimension of a 3-dimensional torus.
_SHAPES_2D = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_SMALL_3D = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
EXAMPLES = "v5e:16x16, v5p:4x4x8, h100:8x4 (8 GPUs a node, 4 nodes), cpu:8"


class Topology(NamedTuple):
  """Devices of one kind, and how they are connected.

  Attributes:
    name: as it was written, `v5e:16x16`.
    chip: each device.
    shape: of the slice's torus, in chips; (devices a node,) of others.
    groups: slices, or nodes.
    kind: the chip's name in CHIPS, or cpu.
  """

  name: str
  chip: Chip
  shape: tuple[int, ...]
  groups: int
  kind: str

  @property
  def per_group(self) -> int:
    """Devices of a slice or node."""
    return math.prod(self.shape) * self.chip.cores

  @property
  def devices(self) -> int:
    """All of them."""
    return self.per_group * self.groups

  @property
  def slices(self) -> int:
    """Slices of TPUs; 1 for others, whose nodes are all alike."""
    return self.groups if self.chip.platform == "tpu" else 1

  def describe(self) -> str:
    """In words."""
    kind = self.kind if self.chip.platform == "cpu" else f"{self.kind} ({self.chip.kinds[0]})"
    if self.chip.platform == "cpu":
      return f"{self.devices} host devices"
    group, extra = ("slice", "x".join(map(str, self.shape))) if self.chip.torus else ("node", f"{self.shape[0]} GPUs")
    return f"{self.devices} × {kind}, in {self.groups} {group}{'s' * (self.groups > 1)} of {extra}"


def find(device_kind: str) -> str | None:
  """The name in CHIPS of what JAX calls `device_kind`, None: not in the table."""
  beginnings = {beginning: name for name, chip in CHIPS.items() for beginning in chip.kinds}
  fitting = [beginning for beginning in beginnings if device_kind.startswith(beginning)]
  return beginnings[max(fitting, key=len)] if fitting else None


def topology(name: str, slices: int = 1, cpu_peak: float = 1e11) -> Topology:
  """The topology of that name.

  Args:
    name: `KIND:SHAPE`. SHAPE is that of a slice's torus for TPUs (`v5e:16x16`, `v5p:4x4x8`), for GPUs the devices of a
      node and how many nodes (`h100:8x4`, or `h100:8` for one), for `cpu` a number.
    slices: so many of these: slices of TPUs; groups of nodes are counted together.
    cpu_peak: FLOP/s of this machine's CPU, which the devices of `cpu:N` share.

  Raises:
    ConfigError: naming what is allowed, and the nearest.
  """
  kind, _, size = name.strip().lower().partition(":")
  kinds = ("cpu", *CHIPS)
  if kind not in kinds:
    near = difflib.get_close_matches(kind, kinds, 1, cutoff=0.3)
    raise ConfigError(f"plan.topology is {name!r}: no device is called {kind!r}"
                      f"{f'; do you mean {near[0]}?' if near else '.'} There are: {', '.join(kinds)}. "
                      f"For instance {EXAMPLES}.")
  if slices < 1:
    raise ConfigError(f"plan.slices is {slices}; it must be at least 1.")
  if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", size):
    raise ConfigError(f"plan.topology is {name!r}, whose size {size!r} is none; after the colon come numbers with x "
                      f"between them. For instance {EXAMPLES}.")
  shape = tuple(map(int, size.split("x")))
  if kind == "cpu":
    if len(shape) > 1 or slices > 1:
      raise ConfigError(f"plan.topology is {name!r}, plan.slices {slices}: CPU devices are just a number, e.g. cpu:8.")
    return Topology(name, host_chip(shape[0], cpu_peak / shape[0]), shape, 1, kind)
  chip = CHIPS[kind]
  if chip.torus:
    _check_slice(name, kind, shape)
    return Topology(name, chip, shape, slices, kind)
  per_node, *nodes = shape
  if len(shape) > 2 or per_node > chip.per_host:
    raise ConfigError(f"plan.topology is {name!r}: of GPUs, the first number is those of a node, at most "
                      f"{chip.per_host}, the second the nodes. For instance {kind}:{chip.per_host}x"
                      f"{max(1, math.prod(shape) // chip.per_host)}.")
  return Topology(name, chip, (per_node,), math.prod(nodes) * slices, kind)


def _check_slice(name: str, kind: str, shape: tuple[int, ...]) -> None:
  if CHIPS[kind].torus == 2:
    if shape in _SHAPES_2D:
      return
    known, allowed = _SHAPES_2D, ", ".join("x".join(map(str, s)) for s in _SHAPES_2D)
  else:
    if shape in _SMALL_3D or (len(shape) == 3 and not any(n % 4 for n in shape)):
      return
    known = (*_SMALL_3D, *((4, 4, 4 * i) for i in range(1, 65)))
    allowed = ", ".join("x".join(map(str, s)) for s in _SMALL_3D) + ", and multiples of 4 in each dimension"
  near = min(known, key=lambda s: (abs(math.log(math.prod(s) / math.prod(shape))), s))
  raise ConfigError(f"plan.topology is {name!r}: {kind} slices are {allowed}. The nearest is {kind}:"
                    f"{'x'.join(map(str, near))}.")


def host_chip(devices: int, peak: float) -> Chip:
  """One of so many host devices of a CPU, which share its memory and cores.

  Args:
    devices: among which memory is shared out.
    peak: FLOP/s of one of them.
  """
  memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / devices
  return Chip(("cpu",), "cpu", peak, memory, memory, 2e10 / devices, "memory", 5e9 / devices, 0, "memory",
              5e9 / devices, devices)


def of_devices(devices: list[Any], cpu_peak: float = 1e11) -> Topology:
  """The topology of devices that are here, as far as it can be told from them.

  Raises:
    ConfigError: a kind that is not in the table.
  """
  kind, count = devices[0].device_kind, len(devices)
  if devices[0].platform == "cpu":
    return topology(f"cpu:{count}", 1, cpu_peak)
  name = find(kind)
  if name is None:
    raise ConfigError(f"{kind!r} is not in the table of trainer/telemetry/hardware.py. Name a topology that is, with "
                      f"--config.plan.topology; for instance {EXAMPLES}.")
  groups = len({getattr(d, "slice_index", None) or 0 for d in devices})
  chip = CHIPS[name]
  if not chip.torus:
    nodes = len({d.process_index for d in devices})
    return Topology(f"{name}:{count // nodes}x{nodes}", chip, (count // nodes,), nodes, name)
  coords = [d.coords for d in devices]
  shape = tuple(max(c[i] for c in coords) - min(c[i] for c in coords) + 1 for i in range(chip.torus))
  return Topology(f"{name}:{'x'.join(map(str, shape))}", chip, shape, groups, name)
