"""How large a step is and how long it should take, from shapes, shardings and a table of hardware; nothing is compiled.

Bytes of parameters, optimizer and reference are exact: those of the shardings. Activations are what the traced program
keeps (trainer/planning/trace.py), split evenly over the devices. Times are a roofline with the factors of ASSUMPTIONS.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from models.experts import grouped
from models.sharding.logical_axes import names_of
from trainer import program as program_lib
from trainer import tree
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError
from trainer.planning import network as plan_network
from trainer.planning.trace import Trace, trace
from trainer.telemetry.hardware import Topology


class Assumptions(NamedTuple):
  """What the table of hardware does not say. One place; docs/scaling.md explains each."""

  # Share of the peak that matrix products of this size reach.
  products: float
  # Share of the memory's bandwidth, and of a link's.
  memory: float
  links: float
  # Arrays of the largest of a layer's that exist at once besides what is kept, forward and backward.
  in_flight: float = 4.0
  # Layers whose gathered parameters are there at once: the one that is computed, and the next.
  layers_gathered: int = 2
  # float32 arrays of a chunk of the logits that exist at once: the logits, and their gradient.
  logit_arrays: int = 2


ASSUMPTIONS = {
    "tpu": Assumptions(products=0.70, memory=0.80, links=0.80),
    "gpu": Assumptions(products=0.60, memory=0.80, links=0.70),
    "cpu": Assumptions(products=0.50, memory=0.50, links=0.50),
}


class Estimate(NamedTuple):
  """One configuration on one mesh.

  Attributes:
    sizes: of the mesh's axes.
    remat: the policy.
    memory: bytes of each device, by kind.
    host: bytes of host memory that belong to each device.
    per_row: bytes of each device for one more row of a micro-batch on it.
    rows: rows of a micro-batch on each group of devices that share rows.
    usable: bytes that a device has.
    model_flops, hardware_flops: of a step, over all devices; hardware: with what is recomputed.
    transfers: see plan_network.
    seconds: {compute, memory, hidden, exposed, step}.
    tokens: of a step.
    mfu: model FLOPs over what all devices could do in a step's time.
  """

  sizes: dict[str, int]
  remat: str
  memory: dict[str, float]
  host: float
  per_row: float
  rows: int
  usable: float
  model_flops: float
  hardware_flops: float
  transfers: list[plan_network.Transfer]
  seconds: dict[str, float]
  tokens: float
  mfu: float

  @property
  def total(self) -> float:
    return sum(self.memory.values())

  @property
  def fits(self) -> bool:
    return self.total <= self.usable

  @property
  def most_rows(self) -> int:
    """The most rows of a micro-batch on a device's group that fit; 0: not even one."""
    return max(0, math.floor((self.usable - self.total) / self.per_row) + self.rows)


class Planner:
  """Estimates of one config on one topology, with whatever mesh or remat; traces once for each remat.

  Args:
    config: the resolved config; precision is settled.
    vocab_size: entries of the tokenizer.
    source_names: see `program.make_program`.
  """

  def __init__(self, config: Any, vocab_size: int, topology: Topology, source_names: Any):
    self.config, self.vocab_size, self.topology, self._sources = config, vocab_size, topology, source_names
    self.devices = mesh_lib.num_training(config, topology.devices)
    self.assumptions = ASSUMPTIONS[topology.chip.platform]
    self._programs: dict[str, tuple[program_lib.Program, Trace]] = {}

  def mesh(self, sizes: Mapping[str, int]) -> AbstractMesh:
    """A mesh of devices that need not be there.

    Raises:
      ConfigError: as `mesh.make_mesh`; and if the slices of the topology are not what `slice` is for.
    """
    complete = mesh_lib.axis_sizes(sizes, self.devices, self.topology.kind)
    slices = self.topology.slices
    if slices > 1 and complete["slice"] % slices:
      raise ConfigError(f"mesh.slice is {complete['slice']}, but the devices are in {slices} slices, with slow links "
                        f"between them. Use --config.mesh.slice={slices}.")
    return AbstractMesh(tuple(complete.values()), tuple(complete), axis_types=(AxisType.Auto,) * len(complete))

  def traced(self, remat: str | None = None) -> tuple[program_lib.Program, Trace]:
    """The program with that remat (None: the config's), on one device, and what a row of it costs."""
    remat = self.config.remat if remat is None else remat
    if remat not in self._programs:
      config = _with_remat(self.config, remat)
      with config.unlocked():
        # Not a kernel that only its own backend can trace; what attention keeps and multiplies is the same.
        config.model.attention = "blocked"
      model = program_lib.make_model(config, self.vocab_size)
      one = AbstractMesh((1,) * len(mesh_lib.AXES), mesh_lib.AXES, axis_types=(AxisType.Auto,) * len(mesh_lib.AXES))
      program = program_lib.make_program(config, model, program_lib.planned_optimizer(config, model), one,
                                         self._sources)
      rows = max(1, config.batch_size // config.grad_accum_steps // self.devices)
      self._programs[remat] = program, trace(config, program, max(rows, _rows_of_whole_blocks(config)))
    return self._programs[remat]

  def estimate(self, sizes: Mapping[str, int], remat: str | None = None) -> Estimate:
    """The estimate on that mesh.

    Raises:
      ConfigError: a mesh that cannot be, or that cannot split the batch.
    """
    remat = self.config.remat if remat is None else remat
    mesh = self.mesh(sizes)
    mesh_lib.check_batch(mesh, self.config.batch_size // self.config.grad_accum_steps)
    program, cost = self.traced(remat)
    placed = Placed(self.config, program, mesh)
    memory, per_row = self._memory(placed, cost, self.traced("none")[1], mesh)
    config, tokens = self.config, self.config.batch_size * self.config.seq_len
    model_flops = model_flops_of(config, program) * tokens
    hardware_flops = cost.flops * config.batch_size
    transfers = plan_network.transfers(_with_remat(config, remat), program, placed.params, self.topology, mesh,
                                       self.assumptions.links)
    seconds = self._seconds(placed, cost, hardware_flops, transfers)
    rows = config.batch_size // config.grad_accum_steps // mesh_lib.batch_shards(mesh)
    whole = seconds["step"] * self.devices * self.topology.chip.peak
    host = placed.host + rows * cost.host / (mesh.shape["context"] * mesh.shape["tensor"])
    return Estimate(dict(mesh.shape), remat, memory, host, per_row, rows, self.topology.chip.usable,
                    model_flops, hardware_flops, transfers, seconds, tokens, model_flops / whole)

  def _memory(self, placed: "Placed", cost: Trace, unremat: Trace, mesh: Any) -> tuple[dict[str, float], float]:
    """(bytes of a device by kind, bytes for one more row)."""
    config, a, model = self.config, self.assumptions, placed.program.model
    number = np.dtype(config.precision.compute).itemsize
    rows = config.batch_size // config.grad_accum_steps // mesh_lib.batch_shards(mesh)
    across = mesh.shape["context"] * mesh.shape["tensor"]  # devices that share a row
    split = sum(leaf.size for leaf, _ in placed.parts.values()) / sum(part for _, part in placed.parts.values())
    layer = max(0.0, unremat.kept - cost.kept - cost.host) / max(1, model.num_layers) + a.in_flight * unremat.largest
    chunk = model.vocab_size / max(1, math.ceil(model.vocab_size / model.vocab_chunk))
    width = getattr(getattr(model, "spec", None), "hidden_size", 0)
    logits = config.seq_len * (chunk * 4 * a.logit_arrays + 4 * width)
    per_row = (cost.kept + max(layer, logits)) / across
    memory = {
        "parameters": placed.bytes["params"],
        "optimizer": placed.bytes["opt"],
        **{name: placed.bytes[name] for name in ("ema", "reference") if placed.bytes.get(name)},
        "gradients": placed.gradients + (placed.gradient_sums if config.grad_accum_steps > 1 else 0.0),
        "parameters gathered": placed.gathered(number, a.layers_gathered),
        "parameters in the dtype of products": cost.copies / split,
        "kept for the backward pass": rows * cost.kept / across,
        "within a layer": rows * layer / across,
        "batch": config.batch_size / mesh_lib.batch_shards(mesh) * placed.batch_row,
    }
    if logits > layer:
      del memory["within a layer"]
      memory["a chunk of logits"] = rows * logits / across
    return memory, per_row

  def _seconds(self, placed: "Placed", cost: Trace, flops: float,
               transfers: list[plan_network.Transfer]) -> dict[str, float]:
    """The roofline."""
    a, chip, config = self.assumptions, self.topology.chip, self.config
    compute = flops / (self.devices * chip.peak * a.products)
    number = np.dtype(config.precision.compute).itemsize
    # Every product reads its gathered kernel: forward, and twice backward. The update reads and writes the state.
    weights = 3 * config.grad_accum_steps * placed.gathered(number, None)
    update = 2 * (placed.bytes["params"] + placed.bytes["opt"]) + placed.gradients
    # What a layer makes is written once and read once, and made again where it is not kept.
    made = self.traced("none")[1].kept
    again = max(0.0, made - cost.kept - cost.host)
    activations = 2 * (made + again) * config.batch_size / self.devices
    memory = (weights + update + activations) / (chip.memory_bandwidth * a.memory)
    by_link: dict[str, float] = {}
    for transfer in transfers:
      if transfer.hidden:
        by_link[transfer.link] = by_link.get(transfer.link, 0.0) + transfer.seconds
    hidden = max(by_link.values(), default=0.0)
    exposed = sum(transfer.seconds for transfer in transfers if not transfer.hidden)
    return dict(compute=compute, memory=memory, hidden=hidden, exposed=exposed,
                step=max(compute, memory, hidden) + exposed)


class Placed:
  """The state of a program on a mesh: exact bytes of each device.

  Attributes:
    program: as given.
    params: nested dict of NamedShardings.
    bytes: of each device by part of the state (`params`, `opt`, `ema`, `reference`, counters).
    host: of those in host memory.
    parts: {path of a parameter: (itself, numbers of it on a device)}.
    gradients, gradient_sums: bytes of a micro-batch's gradients, in the dtype of parameters; of their float32 sums.
    batch_row: of a row of the batch.
  """

  def __init__(self, config: Any, program: program_lib.Program, mesh: Any):
    self.program, self._mesh = program, mesh
    state = program.abstract_state
    self.params, self.notes = mesh_lib.param_shardings(state["params"], mesh, config.sharding_rules)
    shardings = program_lib.place_state(state, self.params, mesh, config.precision.offload_optimizer)
    self.bytes: dict[str, float] = {}
    self.host = 0.0
    for name, part in state.items():
      for leaf, sharding in zip(jax.tree.leaves(part), jax.tree.leaves(shardings[name]), strict=True):
        size = math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        if sharding.memory_kind == "pinned_host":  # offloaded
          self.host += size
        else:
          self.bytes[name] = self.bytes.get(name, 0) + size
    flat, placed = tree.flatten(state["params"]), tree.flatten(self.params)
    self.parts = {path: (leaf, math.prod(placed[path].shard_shape(leaf.shape))) for path, leaf in flat.items()}
    trained = [self.parts[path] for path in self.parts if path in program.optimizer.trainable]
    self.gradients = float(sum(part * leaf.dtype.itemsize for leaf, part in trained))
    self.gradient_sums = 4.0 * sum(part for _, part in trained)
    row = program_lib.abstract_batch(config, program.model, 1, precompute=program.precompute,
                                     share_prompts=program.share_prompts)
    self.batch_row = float(sum(leaf.size * leaf.dtype.itemsize for leaf in row.values()))

  def gathered(self, number_bytes: int, layers: int | None) -> float:
    """Bytes of parameters as products need them, split over no axis that they are gathered over.

    Args:
      number_bytes: of a number in the dtype of products.
      layers: so many layers' and the larger of embedding and unembedding; None: all parameters.
    """
    blocks = others = 0.0
    placed = tree.flatten(self.params)
    count = max(1, self.program.model.num_layers)
    for path, (leaf, part) in self.parts.items():
      used = {axis for axes in placed[path].spec for axis in names_of(axes)}
      gather = plan_network.gathered_axes(path, used)
      size = part * math.prod(self._mesh.shape[axis] for axis in gather) * min(number_bytes, leaf.dtype.itemsize)
      if layers is not None and not gather:
        continue  # it is there already
      if path.startswith("blocks/"):
        blocks += size / (1 if layers is None else count)
      else:
        others = others + size if layers is None else max(others, size)
    return blocks * (1 if layers is None else min(layers, count)) + others


def model_flops_of(config: Any, program: program_lib.Program) -> float:
  """Model FLOPs of a token, forward and backward, as MFU is counted (trainer/telemetry/throughput.py)."""
  return program.flops_per_token(config.seq_len, program_lib.planned_images(config, program.model))


def active_parameters(model: Any) -> int:
  """Parameters that a token passes through: of experts only those that are chosen."""
  moe = getattr(getattr(model, "spec", None), "moe", None)
  share = 1.0 if moe is None else moe.experts_per_token / moe.num_experts
  return round(sum(leaf.size * (share if "/experts/" in path else 1.0)
                   for path, leaf in tree.flatten(model.abstract_params()).items()))


def _rows_of_whole_blocks(config: Any) -> int:
  """Rows from which on experts' blocks (models/experts/grouped.py) are of the largest size, so that twice as many rows
  make twice as many blocks: what a row costs has no padding, which depends on how many rows' tokens a device's experts
  get."""
  moe = config.model.moe
  blocks = 2 * grouped.MAX_BLOCK * moe.num_experts
  return math.ceil(blocks / (moe.experts_per_token * config.seq_len)) if moe.num_experts else 1


def _with_remat(config: Any, remat: str) -> Any:
  changed = config.copy_and_resolve_references()
  with changed.unlocked():
    changed.remat = remat
  return changed
