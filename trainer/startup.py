"""Settings of our programs that come before anything else."""

import contextlib
import gc
import hashlib
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from absl import app, flags, logging

from trainer.errors import ConfigError, DataError

# Flags that are defined here are those of the command that asks for them, which shows them by --help.
flags.disclaim_key_flags()

# Compiled programs take no more room than this; those that have not been used for longest go first.
CACHE_BYTES = 4 * 2**30
# What took as long to compile, or longer, is kept. JAX by itself keeps what took a second, but a run has a dozen
# programs besides its step, which together take as long.
CACHED_FROM_SECONDS = 0.1
# Of a GPU's memory, what a program takes when it starts: all but what the driver and CUDA's own buffers need. JAX takes
# 0.75 by itself.
GPU_SHARE = 0.92

# Threads that XLA for CPU is given for each device, where several wait for one another. By itself it makes one for each
# (or for each processor, if those are more), and a device may wait in two collectives at once: in one of a loop, and in
# the next one after it, if that needs nothing of the loop. When all threads wait, nobody runs the task that they wait
# for.
THREADS = 4
# On CPU: what YNNPACK does, and what it does in a program whose products it makes, too (models/cpu/bfloat16.py).
YNN, SUMS = "--xla_cpu_experimental_ynn_fusion_type", "LIBRARY_FUSION_TYPE_REDUCE"
# On GPU, where the compiler is to time no kernels to choose one: products are cuBLAS's, by its own first choice. Of
# Triton's, which only timing tells apart, none is taken: the first that it names took 22 times as long for a step. Nor
# are products of one array with several made one product: cuBLAS's needs the several side by side in memory, where they
# are put for each token that is sampled; Triton's reads them from where they are.
UNTIMED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
SUMS_AND_PRODUCTS = f"{SUMS},LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"

# Flags of compilers besides what the user says: {variable: (package, {its versions known to take the flags:
# flags})}. They end a program that sets a flag which they do not know.
FLAGS: dict[str, tuple[str, dict[tuple[str, ...], dict[str, str]]]] = {
    "XLA_FLAGS": ("jaxlib", {("0.10.", "0.11."): {
        # On CPU, sums stay YNNPACK's, which are more exact; products are Eigen's, which are faster.
        YNN: SUMS,
        # Several devices of one CPU wait for one another: XLA aborts after 40 s, which a large model, or a machine that
        # does other things, may take. What hangs, the watchdog names.
        "--xla_cpu_collective_call_terminate_timeout_seconds": "1800",
        # On GPU, transfers run while something is computed. XLA decides so by itself for Hopper and later; for an A100
        # nothing was hidden without the flag, 37% of what is gathered and half of what is scattered with it.
        "--xla_gpu_enable_latency_hiding_scheduler": "true",
        # A layer's gradients are each sent as soon as they are there, not all at its end, nor, kept in copies, during
        # the next layer: of Llama 3 70B on 64 H100 this takes away 4.2 of 31.6 GiB of temporaries, and all but 101 of
        # the 2,123 GiB that a step copied; by a model of the schedule a step waits 3.0 s for transfers in place of 4.0.
        "--xla_gpu_enable_pipelined_reduce_scatter": "false",
        "--xla_gpu_reduce_scatter_combine_threshold_bytes": "4194304",
    }}),
    # On TPU, the SparseCores of chips that have them (v5p and later) gather what the next products need, scatter
    # gradients and take tokens to their experts while the TensorCore computes. v5e's compiler by itself has what is
    # gathered come in meanwhile, fused with products (xla_tpu_enable_async_collective_fusion_fuse_all_gather); later
    # versions refuse that elsewhere, since results may be wrong. `--mode=plan` says what is hidden.
    "LIBTPU_INIT_ARGS": ("libtpu", {("0.0.42", "0.0.48"): {
        "--xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
        "--xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": "true",
        "--xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": "true",
        "--xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
    }, ("0.0.48",): {
        # 0.0.42 does not compile those of few numbers, such as of embeddings.
        "--xla_tpu_enable_sparse_core_collective_offload_dense_all_to_all": "true",
    }}),
}


def run(command: ModuleType, uses_devices: bool = True, **options: Any) -> None:
  """Runs `main(argv)` of a command's module, whose docstring and flags are shown by --help.

  Args:
    command: its flags are those of `_define_flags()`; programs that import it may have flags of the same names.
    uses_devices: it computes in this process.
    options: of `absl.app.run`.
  """
  if uses_devices:
    set_environment()
  sys.modules["__main__"].__doc__ = command.__doc__
  command._define_flags()
  logging.set_verbosity(logging.WARNING)
  for flag in flags.FLAGS.get_key_flags_for_module(command):
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
  app.run(command.main, **options)


def define_model_flags() -> None:
  """The flags by which a command is told which model it is about (`trainer.generate.command.load`)."""
  flags.DEFINE_string("workdir", None, "A run's folder.")
  flags.DEFINE_integer("step", None, "Which of its checkpoints. Default: the newest.")
  flags.DEFINE_string("hf", None, "A Hugging Face folder, in place of a run.")
  flags.DEFINE_integer("tensor", 1, "Devices that each matrix is split over; the others each hold a share of it.")
  flags.DEFINE_string("template", None, "Chat template in place of the model's: a name, or a .jinja file.")


def run_given(argv: list[str], do: Callable[[Any], None], hint: str = "") -> None:
  """`do(flags)`, of a command that compiles programs and takes no arguments but flags; `hint`: how these are written.
  What a user can act on is one message."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments {argv[1:]}{hint and '; '}{hint}")
  keep_compiled_programs()
  with one_message(ConfigError, DataError, OSError):
    do(flags.FLAGS)


def set_environment(precision: Mapping[str, Any] | None = None, untimed: bool = False) -> None:
  """Adds FLAGS, GPU_SHARE and THREADS to the environment; what is set there already stands. It is read when JAX first
  runs.

  Args:
    precision: the config's section, of a program that trains. On CPU products of 8-bit integers become YNNPACK's, and
      those of bfloat16 where the processor has instructions for them: a large one takes a fiftieth and a quarter of
      the time.
    untimed: XLA for GPU times no kernels: for programs that run a few times, and for those that are to take the same
      kernels each time.
  """
  by_library = precision is not None and (
      precision.get("matmul") == "int8" or precision.get("compute") == "bfloat16" and has_matrix_unit())
  os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{GPU_SHARE:.2f}")
  for variable, (package, known) in FLAGS.items():
    said = os.environ.get(variable, "")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      version = importlib.metadata.version(package)
      added = {flag: value for versions, some in known.items() if version.startswith(versions)
               for flag, value in some.items() if f"{flag}=" not in said}
      if untimed and variable == "XLA_FLAGS" and added:
        added |= {flag: value for flag, value in untimed_flags().items() if f"{flag}=" not in said}
      if by_library and YNN in added:
        added[YNN] = SUMS_AND_PRODUCTS
      more = [f"{flag}={value}" for flag, value in added.items()]
      if more:
        os.environ[variable] = " ".join([said, *more]).strip()
  if _cpu_devices() > 1:
    add_threads()


def untimed_flags() -> dict[str, str]:
  """UNTIMED as XLA_FLAGS has them."""
  return {f"--{name}": str(value).lower() for name, value in UNTIMED.items()}


def add_threads() -> None:
  """Gives programs for CPU THREADS for each device of this process, unless XLA makes as many by itself: one for each
  processor that the process may use. XLA reads it when the first array is made."""
  threads = THREADS * _cpu_devices()
  # Not os.cpu_count(): a launcher may have left this process a few of a host's processors.
  own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
  if threads > own:
    os.environ.setdefault("PJRT_NPROC", str(threads))


def _cpu_devices() -> int:
  """How many devices JAX makes of this process's CPU."""
  forced = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
  return max(1, int(os.environ.get("JAX_NUM_CPU_DEVICES") or 1), *map(int, forced[-1:]))


def use_huge_pages() -> None:
  """Restarts the process with huge pages for malloc, where glibc offers them and the user has not set its tunables.

  XLA on CPU takes each step's buffers from malloc and gives them back; touching them anew in pages of 4 kB costs a
  tenth of a small model's step. glibc reads the setting only when a process starts; the process keeps its number.
  """
  if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def look_for_garbage() -> None:
  """From now on Python looks for garbage, if that was put off, but never through what there is by now."""
  if not gc.isenabled():
    gc.freeze()
    gc.enable()


@contextlib.contextmanager
def one_message(*errors: type[BaseException]) -> Iterator[None]:
  """Ends the program with one message, without a traceback (which --verbosity=1 adds), where one of `errors` is raised
  in it: what a user can act on. Ctrl-C ends it silently, with code 130."""
  try:
    yield
  except KeyboardInterrupt:
    sys.exit(130)
  except errors as error:
    logging.debug("Traceback:", exc_info=True)
    sys.exit(f"\n{type(error).__name__}: {error}")


def errors_of_savers_in_short() -> None:
  """From now on what Orbax logs of an error is one line: it does so in each of its threads with a traceback, and raises
  it as well. What TensorStore prints of writes that end when nobody waits for them any more is left out, and what a
  thread says that had not begun when the program ended. --verbosity=1 shows it all."""
  logger, print_unraisable = logging.get_absl_logger(), sys.unraisablehook

  def shorten(record: Any) -> bool:
    if record.exc_info and f"{os.sep}orbax{os.sep}" in record.pathname and not logger.isEnabledFor(10):
      line = record.getMessage().partition("\n")[0]
      if "cannot schedule new futures after" in line:
        return False
      record.msg, record.args, record.exc_info, record.exc_text = line[:200], None, None, None
    return True

  def report(unraisable: Any) -> None:
    in_passing = unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"
    if not in_passing or logger.isEnabledFor(10):
      print_unraisable(unraisable)

  logger.addFilter(shorten)
  sys.unraisablehook = report


def keep_compiled_programs() -> None:
  """Has JAX keep what it compiles in the user's cache folder, from where the next run takes it.

  JAX_COMPILATION_CACHE_DIR, if set, says where instead; empty: nowhere.
  """
  import jax  # takes seconds, and must not come before `use_huge_pages`

  if "JAX_COMPILATION_CACHE_DIR" in os.environ:
    return
  base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  # A home may be shared by machines of which one lacks another's instructions.
  described = "\n".join([platform.machine(), platform.processor(), *_processors()])
  machine = hashlib.blake2b(described.encode(), digest_size=6).hexdigest()
  try:
    folder = Path(base).expanduser() / "weft" / f"compiled-{machine}"
    folder.mkdir(parents=True, exist_ok=True)
  except (OSError, RuntimeError):
    return  # no home, or one that cannot be written to
  if os.access(folder, os.W_OK):
    jax.config.update("jax_compilation_cache_dir", str(folder))
    for option, value in (("compilation_cache_max_size", CACHE_BYTES),
                          ("persistent_cache_min_compile_time_secs", CACHED_FROM_SECONDS)):
      if f"JAX_{option.upper()}" not in os.environ:
        jax.config.update(f"jax_{option}", value)


def compile_anew() -> None:
  """From now on this process takes no programs from JAX's cache and leaves none there."""
  import jax
  from jax.experimental.compilation_cache import compilation_cache

  if jax.config.values["jax_enable_compilation_cache"]:
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # else what was decided at the first compilation stands


def has_matrix_unit() -> bool:
  """Whether this processor multiplies matrices of bfloat16 (AMX, of Intel's servers since 2023)."""
  return any("amx_bf16" in line.split() for line in _processors())


def _processors() -> list[str]:
  """What Linux says of them: model, instructions."""
  with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
    return sorted({line.strip() for line in lines if line.startswith(("model name", "flags", "Features"))})
  return []
