"""Settings of our programs that come before anything else."""

import hashlib
import importlib.metadata
import os
import platform
import sys
from pathlib import Path

# Compiled programs take no more room than this; those that have not been used for longest go first.
CACHE_BYTES = 4 * 2**30


# What XLA is told beside what the user says in XLA_FLAGS, if jaxlib is one of TRIED: XLA ends a program that sets a
# flag that it does not know. On CPU, sums stay YNNPACK's, which are more exact; products are Eigen's, which are faster.
XLA_FLAGS = {"--xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}
TRIED = ("0.10.",)


def set_xla_flags() -> None:
  """Adds XLA_FLAGS to the environment's; what is set there already stands. XLA reads them when JAX first runs."""
  said = os.environ.get("XLA_FLAGS", "")
  if importlib.metadata.version("jaxlib").startswith(TRIED):
    more = [f"{flag}={value}" for flag, value in XLA_FLAGS.items() if flag not in said]
    os.environ["XLA_FLAGS"] = " ".join([said, *more]).strip()


def use_huge_pages() -> None:
  """Restarts the process with huge pages for malloc, where glibc offers them and the user has not set its tunables.

  XLA on CPU takes each step's buffers from malloc and gives them back; touching them anew in pages of 4 kB costs a
  tenth of a small model's step. glibc reads the setting only when a process starts; the process keeps its number.
  """
  if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def keep_compiled_programs() -> None:
  """Has JAX keep what it compiles in the user's cache folder, from where the next run takes it.

  JAX_COMPILATION_CACHE_DIR, if set, says where instead; empty: nowhere.
  """
  import jax  # takes seconds, and must not come before `use_huge_pages`

  if "JAX_COMPILATION_CACHE_DIR" in os.environ:
    return
  base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  try:
    folder = Path(base).expanduser() / "weft" / f"compiled-{_machine()}"
    folder.mkdir(parents=True, exist_ok=True)
  except (OSError, RuntimeError):
    return  # no home, or one that cannot be written to
  if os.access(folder, os.W_OK):
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ:
      jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)


def _machine() -> str:
  """Tells processors apart: a home may be shared by machines of which one lacks another's instructions."""
  described = [platform.machine(), platform.processor()]
  try:
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
      kept = ("model name", "flags", "Features")
      described += sorted({line.strip() for line in lines if line.startswith(kept)})
  except OSError:
    pass
  return hashlib.blake2b("\n".join(described).encode(), digest_size=6).hexdigest()
