"""One step of training on the GPU that is here, in several ways: seconds, share of the peak, memory, and whether the
same step gives the same bits.

    WEFT_SPEED_SIZE=1b python -m benchmarks.step_gpu [--ways "as configured" …] [--seconds 200] [--profile 12]

The model and rows of benchmarks/speed/sizes.py, random tokens, without loader and logging. Each way is another value of
a config's key, another word to XLA, or Weft without one of its own parts; the first is a run as it is. A way that is
not begun within --seconds is left out. --profile names the kernels that take most of the time, of the first way.

What XLA has chosen by timing it knows for the rest of the process, and takes also where it is told to keep an order, so
that this comes before. Of memory, the peak is that of the process so far, and the other number what the compiler says
of the program.
"""

import argparse
import functools
import gc
import gzip
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from trainer import startup


class Way(NamedTuple):
  """Config keys by path, what XLA is told, whether beside what a run tells it, and (module, name, value) of what is
  another one meanwhile."""

  config: dict[str, Any] = {}
  told: dict[str, Any] = {}
  untimed: bool = True
  patched: tuple[tuple[str, str, Any], ...] = ()


WAYS = {
    "as configured": Way(),
    "XLA told to keep an order": Way(told={"xla_gpu_exclude_nondeterministic_ops": True}, untimed=False),
    "kernels chosen by timing": Way(untimed=False),
    "cuBLAS's chosen by timing": Way(told={"xla_gpu_autotune_level": 4}),
    "scan_layers=False": Way({"model.scan_layers": False}),
    "embeddings' gradient scattered": Way(patched=(("models.lookup", "IN_ORDER", False),)),
    "logits read twice": Way(patched=(("trainer.strategies.logprobs", "ONE_PASS", False),)),
    "model.vocab_chunk=32768": Way({"model.vocab_chunk": 32_768}),
    "scan_layers=False, remat=attention_mlp": Way({"model.scan_layers": False, "remat": "attention_mlp"}),
    "slices within products": Way(told={"xla_gpu_enable_dynamic_slice_fusion": True}),
    "loops unrolled twice": Way(told={"xla_gpu_enable_while_loop_double_buffering": True}),
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
  parser.add_argument("--seconds", type=float, default=240.0)
  parser.add_argument("--steps", type=int, default=6)
  parser.add_argument("--profile", type=int, default=0, metavar="KERNELS")
  args = parser.parse_args()
  startup.set_environment()
  startup.keep_compiled_programs()
  began = time.monotonic()
  import jax

  from benchmarks.speed import sizes
  print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {sizes.CHOSEN.batch} × {sizes.CHOSEN.seq} tokens\n\n"
        "| step | seconds, best | median | tokens/s | MFU | peak MB | the program's | compiled in | loss | "
        "the same bits twice |\n"
        "|---|---|---|---|---|---|---|---|---|---|", flush=True)
  for name in args.ways:
    if name != args.ways[0] and time.monotonic() - began > args.seconds:
      print(f"| {name} | not begun: {args.seconds:.0f} s are over |", flush=True)
      continue
    try:
      row, kernels = timed(WAYS[name], args.steps, args.profile if name == args.ways[0] else 0)
    except Exception as error:  # memory, or a flag that this XLA does not know
      row, kernels = [f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"], []
    print(f"| {name} | {' | '.join(row)} |", flush=True)
    for line in kernels:
      print(f"    {line}", flush=True)
    gc.collect()


def timed(way: Way, steps: int, kernels: int) -> tuple[list[str], list[str]]:
  """The cells of one way, and the kernels that take most of its time."""
  import importlib

  import jax

  from benchmarks.speed.sizes import CHOSEN as size
  from trainer.compiler import repeatable
  before = [(importlib.import_module(module), name, value) for module, name, value in way.patched]
  usual = [(module, name, getattr(module, name)) for module, name, _ in before]
  for module, name, value in before:
    setattr(module, name, value)
  try:
    program, model, fresh, batch = made(way)
    state = fresh()
    start = time.perf_counter()
    lowered = program.lower(state, batch)
    told = (repeatable.UNTIMED if way.untimed else {}) | way.told
    step = lowered.compile(compiler_options=told if jax.default_backend() == "gpu" else None)
    compiled = time.perf_counter() - start
  finally:
    for module, name, value in usual:
      setattr(module, name, value)
  flops = model.flops_per_token(size.seq) * size.batch * size.seq
  seconds: list[float] = []
  losses: list[float] = []
  first = None
  for n in range(steps + 1):
    start = time.perf_counter()
    state, metrics = jax.block_until_ready(step(state, batch))
    seconds.append(time.perf_counter() - start)
    losses.append(float(metrics["loss"].sum / metrics["loss"].weight))
    if n == 1:
      first = digest(state)
  del seconds[0]  # places arrays
  state, top = profiled(step, state, batch, kernels) if kernels else (state, [])
  memory = jax.local_devices()[0].memory_stats() or {}
  del state
  gc.collect()
  again = fresh()
  for _ in range(2):
    again, _ = step(again, batch)
  same = "yes" if digest(again) == first else "no"
  if found := repeatable.unordered(step.as_text()):
    same += f"; {len(found)} unordered: {found[0]}"
  best, median = min(seconds), sorted(seconds)[len(seconds) // 2]
  tokens = size.batch * size.seq
  cells = (
      lambda: f"{best:.4f}", lambda: f"{median:.4f}", lambda: f"{tokens / median:,.0f}",
      lambda: f"{flops / median / peak():.1%}", lambda: f"{memory.get('peak_bytes_in_use', 0) // 2**20:,}",
      lambda: f"{needs(step) // 2**20:,}", lambda: f"{compiled:.0f} s",
      lambda: f"{losses[0]:.4f}, {losses[-1]:.6f}", lambda: same)
  return list(map(tried, cells)), top


def tried(cell: Callable[[], str]) -> str:
  """What it gives, or which error it raises: of what was measured nothing is to be lost by another cell's mistake."""
  try:
    return cell()
  except Exception as error:
    return type(error).__name__


def needs(step: Any) -> int:
  """Bytes, by the compiler."""
  memory = step.memory_analysis()
  return (memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
          - memory.alias_size_in_bytes)


@functools.cache
def peak() -> float:
  import jax

  from trainer.telemetry import hardware
  chip = hardware.find(jax.devices()[0].device_kind)
  return hardware.CHIPS[chip].peak if chip else float("nan")


def made(way: Way) -> Any:
  """(what lowers the step, the model, what makes a state, a batch of random tokens)."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from benchmarks.speed import weft_config
  from benchmarks.speed.sizes import CHOSEN as size
  from benchmarks.speed.sizes import SPECIAL
  from trainer import program as program_lib
  from trainer.distributed import mesh as mesh_lib

  config = weft_config.get_config("seq,unused")
  for path, value in way.config.items():
    *parents, leaf = path.split(".")
    functools.reduce(lambda node, key: node[key], parents, config)[leaf] = value
  config, _ = program_lib.resolve(config)
  program_lib.settle(config, jax.default_backend())
  model, mesh = program_lib.make_model(config, size.vocab), mesh_lib.make_mesh({}, jax.devices()[:1])
  program = program_lib.make_program(config, model, program_lib.planned_optimizer(config, model), mesh, ["main"])

  @functools.partial(jax.jit, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, program.abstract_state))
  def fresh(key):
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), program.abstract_state)
    return {**state, "params": model.init(key)}

  rng, shape = np.random.default_rng(0), (size.batch, size.seq)
  ones = np.ones(shape)
  # As benchmarks/speed: of a row the first token is not predicted.
  whole = dict(tokens=rng.integers(len(SPECIAL), size.vocab, shape), segment_ids=ones, loss_weights=ones.copy(),
               positions=np.broadcast_to(np.arange(size.seq), shape))
  whole["loss_weights"][:, 0] = 0
  batch = {key: jax.device_put(np.asarray(whole.get(key, np.zeros(leaf.shape)), leaf.dtype), program.batch_sharding)
           for key, leaf in program_lib.abstract_batch(config, model, size.batch).items()}

  def traced(state, batch):
    with mesh_lib.activation_rules(mesh, config.activation_rules):
      return program.update_fn.lower(state, batch)

  class Lowering:
    lower = staticmethod(traced)

  return Lowering, model, lambda: fresh(jax.random.key(0)), batch


def digest(state: Any) -> int:
  """Of every bit of the parameters."""
  import jax
  import jax.numpy as jnp

  @jax.jit
  def sums(params):
    def of(leaf):
      bits = jax.lax.bitcast_convert_type(leaf, {4: jnp.uint32, 2: jnp.uint16, 1: jnp.uint8}[leaf.dtype.itemsize])
      bits = bits.astype(jnp.uint32).reshape(-1)
      weights = jnp.arange(bits.size, dtype=jnp.uint32) * jnp.uint32(2654435761) + jnp.uint32(1)
      return jnp.sum(bits * weights, dtype=jnp.uint32)
    return [of(leaf) for leaf in jax.tree.leaves(params)]
  return hash(tuple(map(int, sums(state["params"]))))


def profiled(step: Any, state: Any, batch: Any, number: int) -> tuple[Any, list[str]]:
  """(the next state, so many kernels that take most of a step, with the milliseconds and how often they run)."""
  import jax

  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder, create_perfetto_trace=False):
      state, _ = jax.block_until_ready(step(state, batch))
    return state, kernels_of(Path(folder), number)


def kernels_of(folder: Path, number: int) -> list[str]:
  """From a trace of JAX's profiler."""
  total, count = Counter(), Counter()
  for file in folder.rglob("*.trace.json.gz"):
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    streams = {(e["pid"], e["tid"]) for e in events
               if e.get("name") == "thread_name" and str(e["args"].get("name", "")).startswith("Stream")}
    for e in events:
      if e.get("ph") == "X" and (e["pid"], e["tid"]) in streams:
        name = e.get("args", {}).get("hlo_op") or e["name"]
        total[f"{name} ({e['name'][:60]})" if name != e["name"] else name] += e["dur"] / 1e3
        count[f"{name} ({e['name'][:60]})" if name != e["name"] else name] += 1
  if not total:
    return [f"no kernels in {[file.name for file in folder.rglob('*') if file.is_file()]}"]
  whole = sum(total.values())
  return [f"{ms:8.2f} ms {ms / whole:6.1%} ×{count[name]:<4} {name[:130]}" for name, ms in total.most_common(number)]


if __name__ == "__main__":
  main()
