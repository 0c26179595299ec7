"""What a run would take, before it is paid for: `python -m trainer --config=… --workdir=DIR --mode=plan`.

    … --mode=plan --config.plan.topology=v5e:16x16

No device, no data and no parameter is needed: shapes and shardings of the real step, a table of hardware, and for TPUs
and GPUs the real compiler where it is installed. Prints the plan and writes it as WORKDIR/plan.html.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from input_pipeline import loader
from input_pipeline.tokenizer.tokenizer import BytesTokenizer, load_extended, load_tokenizer
from trainer import program as program_lib
from trainer import startup
from trainer.config import checks as config_checks
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError, DataError
from trainer.planning import compile as plan_compile
from trainer.planning import page as plan_page
from trainer.planning import search as plan_search
from trainer.planning.estimate import Assumptions, Estimate, Planner, active_parameters
from trainer.planning.page import Plan
from trainer.report import pages
from trainer.telemetry import hardware, throughput

GB = 1e9
# Steps of more devices are compiled only where `plan.compile` says so: on a CPU each has a thread and a copy.
MOST_HOST_DEVICES = 16


def plan(config: Mapping, workdir: str | Path) -> Path:
  """Prints and writes what training with `config` would take; returns the page's path. Raises ConfigError: as training
  would; a topology or mesh that cannot be."""
  print("tracing the step, with each policy of what is recomputed; large models take minutes …", flush=True)
  made = make_plan(config, workdir)
  print(plan_page.text(made))
  workdir = Path(workdir).expanduser().absolute()
  workdir.mkdir(parents=True, exist_ok=True)
  page = pages.save(workdir / "plan.html", plan_page.page(made))
  print(f"\nThe same, with bars: {page}")
  return page


def out_of_memory(config: Mapping, workdir: str | Path, error: BaseException) -> str:
  """What a run that has run out of memory says: where its memory goes by the plan, and what to type."""
  what = f"The devices' memory is exhausted: {str(error).splitlines()[0]}"
  less = ("Less memory is needed with more micro-batches (a larger --config.grad_accum_steps), --config.remat=full, "
          "more devices along --config.mesh.fsdp, or a shorter --config.seq_len; docs/precision.md has more.")
  try:
    asked = ConfigDict(config).copy_and_resolve_references()
    with asked.unlocked():
      asked.plan.topology, asked.plan.compile = None, "never"
    return f"{what}\n\n{plan_page.text(make_plan(asked, workdir))}\n\n{less}"
  except Exception as e:  # the first error is the one to be told
    return f"{what}\n{less}\n(No plan could be made: {e})"


def make_plan(config: Mapping, workdir: str | Path) -> Plan:
  """All that the plan says."""
  resolved, notes = program_lib.resolve(config)
  asked = resolved.plan
  # What auto is on CPU, the only device whose peak depends on it here.
  topology = find_topology(asked, resolved.precision.compute.replace("auto", "float32"))
  notes += program_lib.settle(resolved, topology.chip.platform)
  vocab_size, vocabulary = find_vocabulary(resolved, Path(workdir).expanduser())
  planner = Planner(resolved, vocab_size, topology, loader.used_sources(resolved.input))
  now = planner.estimate(resolved.mesh)
  program, _ = planner.traced()
  micro, apart = resolved.batch_size // resolved.grad_accum_steps, mesh_lib.num_sampling(resolved)
  heading = [
      topology.describe(), f"mesh: {plan_page.mesh_text(now.sizes)}"
      + f"; {apart} more devices sample, which is not planned here" * bool(apart),
      f"a step: {resolved.batch_size} rows of {resolved.seq_len:,} tokens, {micro} at a time; remat {now.remat}; "
      f"parameters {resolved.precision.params}, products {resolved.precision.compute}", vocabulary,
      *notes, *program.optimizer.notes, *mesh_lib.param_shardings(
          program.abstract_state["params"], planner.mesh(resolved.mesh), resolved.sharding_rules)[1]]

  compiled, why_not = None, plan_compile.refusal(topology)
  if asked.compile == "never":
    why_not = "plan.compile is never"
  elif asked.compile == "always" and why_not:
    raise ConfigError(f"plan.compile is always, but {topology.name} cannot be compiled for here: {why_not}. Use "
                      "--config.plan.compile=auto for an estimate.")
  elif asked.compile == "auto" and topology.chip.platform == "cpu" and topology.devices > MOST_HOST_DEVICES:
    why_not = f"more than {MOST_HOST_DEVICES} host devices; --config.plan.compile=always does it"
  if not why_not:
    print(f"compiling the step for {topology.name}; large models take minutes …", flush=True)
    compiled = plan_compile.compile_step(config_checks.to_json(resolved), vocab_size,
                                         loader.used_sources(resolved.input), topology)
  by_remat, by_mesh = plan_search.remats(planner, resolved.mesh), plan_search.meshes(planner)
  if all((e.sizes, e.remat) != (now.sizes, now.remat) for e in by_mesh):
    by_mesh.append(now)
  leaves = jax.tree.leaves(program.abstract_state["params"])
  trained = jax.tree.leaves(program.optimizer.split(program.abstract_state["params"])[0])
  return Plan(heading, (_count(leaves), _count(trained), active_parameters(program.model)), now, compiled, why_not,
              by_remat, by_mesh, plan_search.advice(planner, now, by_remat, by_mesh),
              assumptions(planner.assumptions, topology, now))


def find_topology(asked: Any, dtype: str = "float32") -> hardware.Topology:
  """The topology of `config.plan`, or of the devices that are here, with the figures that the config gives; on CPU
  with the FLOP/s of products in `dtype`.

  Raises:
    ConfigError: no such topology.
  """
  if asked.topology is None:
    devices = jax.devices()
    topology = hardware.of_devices(devices, throughput.peak_flops(dtype)[0] * len(devices))
  else:
    is_cpu = asked.topology.strip().lower().startswith("cpu")
    cpu_peak = throughput.measured_flops(jax.local_devices(backend="cpu")[0], dtype) if is_cpu else 0.0
    topology = hardware.topology(asked.topology, asked.slices, cpu_peak)
  given = dict(usable=(asked.memory_gb, GB), peak=(asked.tflops, 1e12), memory_bandwidth=(asked.memory_bandwidth, GB),
               link_bandwidth=(asked.link_bandwidth, GB), network_bandwidth=(asked.network_bandwidth, GB))
  changed = {name: value * unit for name, (value, unit) in given.items() if value is not None}
  for name, value in changed.items():
    if not value > 0:
      raise ConfigError(f"plan.{'memory_gb' if name == 'usable' else 'tflops' if name == 'peak' else name} must be "
                        f"above 0, found {value:g}.")
  return topology._replace(chip=topology.chip._replace(**changed))


def find_vocabulary(config: Any, workdir: Path) -> tuple[int, str]:
  """(entries of the tokenizer, a sentence on where that number is from); no text is read.

  Raises:
    ConfigError, DataError: there is no tokenizer, and the config does not say how large the vocabulary is.
  """
  t, saved = config.tokenizer, workdir / "tokenizer.json"
  if saved.exists():
    return load_tokenizer(saved).vocab_size, f"vocabulary: that of {saved}"
  if t.type == "bytes":
    return BytesTokenizer.vocab_size, "vocabulary: bytes"
  if t.type == "bpe":
    return t.vocab_size, f"vocabulary: {t.vocab_size:,}, tokenizer.vocab_size (the tokenizer is not trained yet)"
  try:
    if not t.path:
      raise ConfigError("tokenizer.path is not set: type 'hf' needs a tokenizer.json or the folder that holds one.")
    return load_extended(t).vocab_size, f"vocabulary: that of {t.path}"
  except (ConfigError, DataError):
    if config.model.vocab_size is None:
      raise
    return config.model.vocab_size, (f"vocabulary: {config.model.vocab_size:,}, model.vocab_size (the tokenizer is "
                                     "not here)")


def assumptions(a: Assumptions, topology: hardware.Topology, now: Estimate) -> list[str]:
  """What the estimate takes for granted."""
  chip = topology.chip
  lines = [
      f"each device: {chip.peak / 1e12:.4g} TFLOP/s dense, {chip.usable / 2**30:.2f} GiB that a program may use, "
      f"{chip.memory_bandwidth / GB:,.0f} GB/s; {chip.link} {chip.link_bandwidth / GB:.4g} GB/s, {chip.network} "
      f"{chip.network_bandwidth / GB:.4g} GB/s, in each direction",
      f"reached of it: {a.products:.0%} in products, {a.memory:.0%} of the memory's and {a.links:.0%} of links' "
      "bandwidth",
      "parameters and gradients travel beside computation, everything else while it waits; an axis has its links for "
      "itself",
      f"what is kept for the backward pass is split evenly over devices; {a.in_flight:g} arrays of the largest of a "
      f"layer and {a.layers_gathered} layers' gathered parameters exist at a time",
  ]
  if chip.platform == "gpu":
    lines.append(f"{startup.GPU_SHARE:.0%} of the memory: what a run takes when it starts, unless "
                 "XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise")
  if chip.platform == "cpu":
    lines.append("a CPU's products are measured here; its memory and links are guesses")
  if any("expert" in transfer.axes for transfer in now.transfers):
    lines.append("tokens are shared out evenly among experts")
  return lines


def _count(leaves: list[Any]) -> int:
  return sum(leaf.size for leaf in leaves)
