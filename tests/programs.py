"""Each program that a process of tests compiles is compiled once, and devices appear as a test asks for them.

Programs: a run that is stopped, goes on, and is compared to one that was not traces the same step three times, and XLA
for CPU would compile the same module three times. JAX's own cache would read it from a file each time, and is off on
meshes of a CPU (`startup.compile_anew`). What is shared here is the program itself, as it was compiled in this process.
That a program compiled anew gives the same bits is seen where runs are processes of their own (test_faults.py), and
with WEFT_TEST_AS_USERS, where nothing is shared. What initialises a model, samples from it, or evaluates its loss, and
the step of runs that train in the same way, are traced once, too.

Devices: a program of eight takes several times as long to compile as one of one, so that a test sees one device unless
it is marked with `devices(8)`. The number of JAX's devices is fixed when its first array is made; what differs is how
many of them a mesh is made of that names no devices.
"""

import contextlib
import dataclasses
import functools
import hashlib
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests import tiny

# {(client, digest of the module, options, devices): the program}
_compiled: dict[tuple, Any] = {}
# {(what, model, sizes): the function that JAX has traced}, and whether they are taken from here: not where a test may
# have changed what is traced: it uses `monkeypatch`, and is not marked with `host_patches`.
_jitted: dict[tuple, Any] = {}
traced = True
# What programs are made with beside XLA_FLAGS: {flag: value}.
_options: dict[str, Any] = {}
# What a process of tests may take before it lets go of programs: of memory, and of its areas, of which a program on CPU
# has some 50. Linux allows 65,530 (vm.max_map_count); XLA crashes when it writes a program that it could not map.
MEMORY_BYTES = 3 * 2**30
AREAS = 40_000
# So many programs more, and areas are counted again.
LOOK_AFTER = 100
_looked_at = 0  # programs, when they were counted last


def share() -> None:
  """From now on this process compiles a module again only after `forget`, or where Python is called from it; how fast
  its CPU is is measured once."""
  import jax
  from jax._src import compiler  # JAX has no other place where what is to be compiled is one text
  from jax._src.interpreters import mlir

  from evaluators import loss
  from models.transformer import Transformer
  from trainer import main
  from trainer.checkpoints import init_from
  from trainer.config import checks
  from trainer.generate import sampler
  from trainer.telemetry import throughput

  _share_contexts(mlir)
  compile_anew = compiler.compile_or_get_cached

  @functools.wraps(compile_anew)
  def compile_once(client: Any, module: Any, devices: Any, options: Any, host_callbacks: Any, *more: Any) -> Any:
    options.env_option_overrides = [*options.env_option_overrides, *_options.items()]
    if host_callbacks:
      return compile_anew(client, module, devices, options, host_callbacks, *more)
    # Without the lines that it comes from: another caller's are others.
    text = module.operation.get_asm(enable_debug_info=False)
    name = text.partition(" ")[2].partition(" ")[0]
    key = (client, name, hashlib.sha256(text.encode()).digest(), options.SerializeAsString(),
           tuple(device.id for device in devices.flat))
    if key not in _compiled:
      _compiled[key] = compile_anew(client, module, devices, options, host_callbacks, *more)
    return _compiled[key]

  compiler.compile_or_get_cached = compile_once
  throughput.measured_flops = functools.cache(throughput.measured_flops)
  Transformer._abstract = _traced_once(Transformer._abstract, lambda self, *across: (
      None if (of := _identity(self)) is self else ("shapes", of, across)))
  init_from.initialiser = _traced_once(init_from.initialiser, lambda model, wanted: (
      "init", _identity(model), *((path, leaf.shape, leaf.dtype, leaf.sharding) for path, leaf in wanted.items())))
  sampler.Sampler._jitted = _traced_once(sampler.Sampler._jitted, lambda self, *sizes: (
      "sample", _identity(self.model), self.chunk, self._record, self.mesh, sizes))
  # On several devices it depends on the mesh too, which it finds when it is traced.
  loss._make_row_sums = _traced_once(loss._make_row_sums, lambda model: (
      ("row sums", _identity(model)) if jax.device_count() == 1 else None))
  main.program_lib = of_train = _OfTrain(main.program_lib)
  audit = checks.audit

  @functools.wraps(audit)
  def audit_what_is_traced(config: Any) -> None:
    of_train.keep(config)
    audit(config)

  checks.audit = audit_what_is_traced


def _share_contexts(mlir: Any, modules: int = 200) -> None:
  """Each thread makes so many modules in one context of MLIR: a new one takes 5 ms, more than to lower `x + 1`."""
  make_anew, mine = mlir.make_ir_context, threading.local()

  def make_or_reuse() -> Any:
    mine.made = getattr(mine, "made", 0) + 1
    if mine.made % modules == 1:
      mine.context = make_anew()
    return mine.context

  mlir.make_ir_context = make_or_reuse


# What the functions of a step are traced from, beside the shapes of its arguments: keys of a config. Those of rollouts
# that matter are filled in as the strategy's, or are read where the program is made.
_OF_A_STEP = ("activation_rules", "batch_size", "grad_accum_steps", "model", "optimizer", "precision", "remat",
              "schedule", "seed", "sharding_rules", "strategy")


class _OfTrain:
  """trainer/program.py as `train` sees it: a run's step is that of an earlier run where all of that is the same."""

  def __init__(self, module: Any):
    self._module = module
    self._durations: list[int] = []  # of the optimizer made last: of the run, and those that its schedule asked for
    self._latest: tuple = ()  # (config, key, program) of what will be kept when it is traced

  def __getattr__(self, name: str) -> Any:
    return getattr(self._module, name)

  def make_optimizer(self, config: Any, model: Any, total_steps: int, to_steps: Callable) -> Any:
    self._durations = durations = [total_steps]

    def told(*args: Any, **named: Any) -> Any:
      durations.append(to_steps(*args, **named))
      return durations[-1]

    return self._module.make_optimizer(config, model, total_steps, told)

  def make_program(self, config: Any, model: Any, optimizer: Any, mesh: Any, source_names: Any) -> Any:
    program = self._module.make_program(config, model, optimizer, mesh, source_names)
    self._latest = ()
    if not traced:
      return program
    loss = self._module.strategies.find(config._node.strategy.name).loss
    constant = config._node.schedule.name == "constant"  # whatever the run's length
    key = ("step", _identity(model), mesh, loss, repr({name: config._node[name] for name in _OF_A_STEP}),
           tuple(self._durations[constant:]), tuple(source_names), program.precompute, program.share_prompts,
           program.score_fn is None, tuple(_options.items()))
    if key not in _jitted:
      self._latest = config, key, program
      return program
    first, read = _jitted[key]
    config._read.update(read)
    return dataclasses.replace(program, update_fn=first.update_fn, score_fn=first.score_fn)

  def keep(self, config: Any) -> None:
    """The step of that run is traced; keys that were read for it count as read by those that take it, too."""
    if self._latest and self._latest[0] is config:
      _, key, program = self._latest
      _jitted[key] = program, frozenset(path for path in config._read if path.partition(".")[0] in _OF_A_STEP)
    self._latest = ()


def _traced_once(make: Callable, key_of: Callable) -> Callable:
  """`make`, which gives the same function again for the same key, unless that is None."""
  @functools.wraps(make)
  def made_once(*args: Any) -> Any:
    key = key_of(*args)
    if not traced or key is None:
      return make(*args)
    if key not in _jitted:
      _jitted[key] = make(*args)
    return _jitted[key]

  return made_once


def _identity(model: Any) -> Any:
  """Equal for models that compute the same of the same parameters, remat aside."""
  from models.transformer import Transformer
  if type(model) is not Transformer or model._frozen is not None or model._matmul_rules is not None:
    return model
  return repr(model.spec), model.vocab_size, model.num_real_vocab, model._dtypes


def forget() -> None:
  """Lets go of what was compiled and traced."""
  import jax
  global _looked_at
  _looked_at = 0
  _compiled.clear()
  _jitted.clear()
  jax.clear_caches()


def forget_if_large() -> None:
  """`forget`, if this process takes more than MEMORY_BYTES or AREAS, or where Linux does not say what it takes."""
  statm = Path("/proc/self/statm")
  if (not statm.exists() or int(statm.read_text().split()[1]) * resource.getpagesize() > MEMORY_BYTES
      or _has_many_areas()):
    forget()


def _has_many_areas() -> bool:
  global _looked_at
  if len(_compiled) < _looked_at + LOOK_AFTER:
    return False
  _looked_at = len(_compiled)
  return Path("/proc/self/maps").read_bytes().count(b"\n") > AREAS


@functools.cache
def _of_jax() -> dict[str, Callable]:
  import jax
  return {name: getattr(jax, name) for name in ("devices", "local_devices", "device_count", "local_device_count")}


def _first(count: int, function: Callable, *args: Any, **named: Any) -> Any:
  found = function(*args, **named)
  return min(count, found) if isinstance(found, int) else found[:count]


def show(count: int) -> None:
  """From now on `jax.devices` and its like tell of the first `count` of this process's devices."""
  import jax
  from jax.experimental.compilation_cache import compilation_cache

  for name, function in _of_jax().items():
    setattr(jax, name, functools.partial(_first, count, function))
  if not jax.config.values["jax_enable_compilation_cache"]:  # a mesh of several turned it off
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@contextlib.contextmanager
def devices(count: int) -> Iterator[None]:
  """In here `count` devices are shown, and afterwards one."""
  show(count)
  try:
    yield
  finally:
    show(1)


@contextlib.contextmanager
def as_users() -> Iterator[None]:
  """In here programs are made as in users' runs, well rather than quickly."""
  _options.update(tiny.AS_USERS)
  try:
    yield
  finally:
    _options.clear()
