"""Compiled programs outlive the run, where the user has not said otherwise."""

import logging
import os
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests import tiny
from trainer import startup
from trainer.distributed import mesh as mesh_lib
from trainer.telemetry import hardware

KEYS = ("jax_compilation_cache_dir", "jax_compilation_cache_max_size", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture(autouse=True)
def settings(monkeypatch):
  """As in a user's process; what was set for the tests comes back."""
  before = {key: jax.config.values[key] for key in KEYS}
  monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
  monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
  jax.config.update(KEYS[0], None)
  yield
  for key, value in before.items():
    jax.config.update(key, value)


def test_they_are_kept_in_the_users_cache_one_folder_for_each_processor(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  startup.keep_compiled_programs()
  (folder,) = (tmp_path / "weft").iterdir()
  assert folder.name.startswith("compiled-") and jax.config.jax_compilation_cache_dir == str(folder)
  assert jax.config.jax_compilation_cache_max_size == startup.CACHE_BYTES
  assert jax.config.values[KEYS[2]] == startup.CACHED_FROM_SECONDS
  instructions = startup._processors()
  monkeypatch.setattr(startup, "_processors", lambda: [*instructions, "flags: amx_bf16"])
  startup.keep_compiled_programs()
  monkeypatch.setattr(startup.platform, "machine", lambda: "another")
  startup.keep_compiled_programs()
  assert len(list((tmp_path / "weft").iterdir())) == 3


@pytest.mark.parametrize("said", ["", "elsewhere"])
def test_what_the_user_says_stands(said, tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", said)
  startup.keep_compiled_programs()
  assert jax.config.jax_compilation_cache_dir is None and not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", KEYS[1:])
def test_what_the_user_says_of_how_much_is_kept_stands(key, tmp_path, monkeypatch):
  """JAX has read it from the environment."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  monkeypatch.setenv(key.upper(), "7")
  jax.config.update(key, 7)
  startup.keep_compiled_programs()
  assert jax.config.values[key] == 7 and jax.config.values[KEYS[0]] is not None


@pytest.mark.parametrize(("variable", "version", "count"), [
    ("XLA_FLAGS", "0.10.9", 5), ("XLA_FLAGS", "0.11.2", 5), ("LIBTPU_INIT_ARGS", "0.0.42.1", 4),
    ("LIBTPU_INIT_ARGS", "0.0.48.1", 5)])
def test_flags_for_compilers_are_added_to_what_the_user_says(variable, version, count, monkeypatch):
  package, known = startup.FLAGS[variable]
  flags = {name: v for versions, some in known.items() if version.startswith(versions) for name, v in some.items()}
  assert len(flags) == count
  flag, value = next(iter(flags.items()))
  rest = [f"{other}={v}" for other, v in flags.items() if other != flag]
  installed = {package: version}
  monkeypatch.setattr(startup.importlib.metadata, "version", lambda name: installed.get(name, "0"))
  for said, expected in (("", [f"{flag}={value}", *rest]), ("--dump=x", ["--dump=x", f"{flag}={value}", *rest]),
                         (f"{flag}=other", [f"{flag}=other", *rest])):
    monkeypatch.setenv(variable, said)
    startup.set_environment()
    assert startup.os.environ[variable].split() == expected
  # A compiler of which nothing is known is told nothing.
  monkeypatch.setenv(variable, "--dump=x")
  installed[package] = "99.0"
  startup.set_environment()
  assert startup.os.environ[variable] == "--dump=x"


def test_on_a_gpu_no_kernels_are_timed_unless_the_user_says_so(monkeypatch):
  monkeypatch.setattr(startup.importlib.metadata, "version", lambda name: "0.11.2")
  off = ["--xla_gpu_dot_merger_threshold_mb=0", "--xla_gpu_enable_triton_gemm=false"]
  for said, untimed, expected in (("", False, []), ("", True, ["--xla_gpu_autotune_level=0", *off]),
                                  ("--xla_gpu_autotune_level=2", True, ["--xla_gpu_autotune_level=2", *off])):
    monkeypatch.setenv("XLA_FLAGS", said)
    startup.set_environment(untimed=untimed)
    added = os.environ["XLA_FLAGS"].split()
    assert sorted(flag for flag in added if any(word in flag for word in ("autotune", "triton", "merger"))) == expected


@pytest.mark.parametrize("flags, number, processors, expected", [
    ("", "", 1, None), ("", "1", 1, None), ("--xla_force_host_platform_device_count=1", "", 1, None),
    ("", "2", 7, "8"), ("", "2", 8, None),
    ("--xla_force_host_platform_device_count=3 --xla_force_host_platform_device_count=8", "", 9, "32")])
def test_several_devices_of_a_cpu_have_threads_to_wait_in(flags, number, processors, expected, monkeypatch):
  monkeypatch.delenv("PJRT_NPROC", raising=False)
  monkeypatch.setenv("XLA_FLAGS", flags)
  monkeypatch.setenv("JAX_NUM_CPU_DEVICES", number)
  monkeypatch.setattr(startup.os, "sched_getaffinity", lambda process: set(range(processors)), raising=False)
  startup.set_environment()
  assert os.environ.get("PJRT_NPROC") == expected
  # What the user says stands.
  monkeypatch.setenv("PJRT_NPROC", "5")
  startup.set_environment()
  assert os.environ["PJRT_NPROC"] == "5"


def test_no_device_of_a_cpu_waits_for_ever(tmp_path):
  """With as many threads as devices, which is what XLA makes by itself, this evaluation never ended. On a busy machine
  it takes more than four minutes: the limit is just below pytest's own, which would leave the process behind."""
  environment = tiny.environment(8, JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=8")
  done = subprocess.run([sys.executable, "-m", "tests.trainer.evaluate_on_a_mesh", tmp_path], cwd=tiny.ROOT,
                        env=environment, capture_output=True, text=True, timeout=800)
  assert done.returncode == 0 and "evaluated: " in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize("compute, matmul, unit, expected", [
    ("float32", "none", True, startup.SUMS), ("auto", "none", True, startup.SUMS),
    ("bfloat16", "none", True, startup.SUMS_AND_PRODUCTS), ("bfloat16", "none", False, startup.SUMS),
    ("float32", "int8", False, startup.SUMS_AND_PRODUCTS)])
def test_who_makes_products_on_cpu(compute, matmul, unit, expected, monkeypatch):
  monkeypatch.setattr(startup, "has_matrix_unit", lambda: unit)
  monkeypatch.setattr(startup.importlib.metadata, "version", lambda name: "0.10.2")
  monkeypatch.setenv("XLA_FLAGS", "")
  startup.set_environment(dict(compute=compute, matmul=matmul))
  assert f"{startup.YNN}={expected}" in startup.os.environ["XLA_FLAGS"].split()
  # What the user says stands.
  monkeypatch.setenv("XLA_FLAGS", f"{startup.YNN}=")
  startup.set_environment(dict(compute=compute, matmul=matmul))
  assert f"{startup.YNN}=" in startup.os.environ["XLA_FLAGS"].split()


def test_a_run_takes_the_memory_of_a_gpu_that_the_plan_counts_with(monkeypatch):
  for said, expected in ((None, f"{startup.GPU_SHARE}"), ("0.5", "0.5")):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    if said:
      monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", said)
    startup.set_environment()
    assert startup.os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == expected
  h100 = hardware.CHIPS["h100"]
  assert h100.usable == startup.GPU_SHARE * h100.memory


def test_without_a_home_nothing_is_kept_and_nothing_fails(tmp_path, monkeypatch):
  (tmp_path / "file").write_text("not a folder")
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
  startup.keep_compiled_programs()
  assert jax.config.jax_compilation_cache_dir is None


def test_the_second_run_finds_what_the_first_compiled(tmp_path):
  corpus, config = tiny.write_corpus(tmp_path / "corpus"), tiny.write_config_file(tmp_path)
  environment = tiny.environment(1, XDG_CACHE_HOME=str(tmp_path / "cache"), **{KEYS[2].upper(): "0"})
  found = []
  for run in ("first", "second"):
    subprocess.run(tiny.command(config, corpus, tmp_path / run), cwd=tiny.ROOT, env=environment, check=True,
                   capture_output=True, timeout=300)
    found.append({path.name for path in (tmp_path / "cache" / "weft").rglob("*-cache")})
  assert any(name.startswith("jit_update-") for name in found[0])
  assert found[0] == found[1]  # nothing is compiled again, to the same or to something else


def test_garbage_is_looked_for_from_when_packages_are_imported(tmp_path):
  """At the end of a process it is, but not through what there was before the mode began."""
  config = tiny.write_config_file(tmp_path)
  config.write_text(config.read_text() + """
import atexit
import gc
print(gc.isenabled())
atexit.register(lambda: print(gc.isenabled(), gc.get_freeze_count() > 100_000))
""")
  command = tiny.command(config, tiny.write_corpus(tmp_path / "corpus"), tmp_path / "run")
  done = subprocess.run([*command, "--mode=inspect"], cwd=tiny.ROOT, env=tiny.environment(1), check=True,
                        capture_output=True, text=True, timeout=300)
  said = done.stdout.splitlines()
  assert (said[0], said[-1]) == ("False", "True True")


@pytest.mark.devices(8)
def test_programs_of_several_devices_on_cpu_are_always_compiled_anew(tmp_path):
  """Those from the cache have lost the order of their collectives: seen to hang, two devices in two of them."""
  jax.config.update("jax_compilation_cache_dir", str(tmp_path))
  jax.config.update("jax_enable_compilation_cache", True)
  jax.config.update(KEYS[2], 0)
  compilation_cache.reset_cache()
  try:
    for devices, kept in ((jax.devices()[:1], True), (jax.devices(), False)):
      count = len(list(tmp_path.iterdir()))
      rows = mesh_lib.batch_sharding(mesh_lib.make_mesh({"data": -1}, devices))
      jax.block_until_ready(jax.jit(lambda x: x.sum(), in_shardings=rows)(np.zeros((8, len(devices) + 2))))
      assert (len(list(tmp_path.iterdir())) > count) == kept
  finally:
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def test_what_orbax_logs_of_an_error_is_one_line(monkeypatch):
  from absl import logging as absl_logging
  logger = absl_logging.get_absl_logger()
  monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: printed.append(unraisable.exc_value))
  monkeypatch.setattr(logger, "filters", [])
  printed = []
  startup.errors_of_savers_in_short()
  kept = []
  for path in ("/venv/orbax/checkpoint/future.py", "/home/me/mine.py"):
    try:
      raise ValueError("the cause")
    except ValueError:
      record = logging.LogRecord("absl", logging.ERROR, path, 1, "it failed: %s\nat length", ("so",), sys.exc_info())
    assert logger.filter(record)
    kept.append((record.getMessage(), record.exc_info is None))
  assert kept == [("it failed: so", True), ("it failed: so\nat length", False)]
  for error in (RuntimeError("Event loop is closed"), RuntimeError("another")):
    sys.unraisablehook(types.SimpleNamespace(exc_type=type(error), exc_value=error))
  assert [str(error) for error in printed] == ["another"]


@pytest.mark.parametrize("error, code", [
    (OSError("no file"), "\nOSError: no file"), (KeyboardInterrupt(), 130), (None, None)])
def test_what_a_user_can_act_on_is_one_message(error, code):
  ended = None
  try:
    with startup.one_message(OSError, KeyError):
      if error:
        raise error
  except SystemExit as e:
    ended = e.code
  assert ended == code
  with pytest.raises(ValueError, match="ours"), startup.one_message(OSError):
    raise ValueError("ours")


def test_commands_without_arguments_are_run_with_their_flags(monkeypatch):
  done = []
  monkeypatch.setattr(startup, "keep_compiled_programs", lambda: done.append("kept"))
  monkeypatch.setattr(startup.flags, "FLAGS", "the flags")
  startup.run_given(["prog"], done.append)
  assert done == ["kept", "the flags"]
  with pytest.raises(startup.app.UsageError, match="^unexpected arguments .'x'.; write --texts=FILE$"):
    startup.run_given(["prog", "x"], done.append, "write --texts=FILE")
  with pytest.raises(startup.app.UsageError, match="^unexpected arguments .'x'.$"):
    startup.run_given(["prog", "x"], done.append)
  assert len(done) == 2

  def fails(flags):
    raise startup.DataError("row 3")

  with pytest.raises(SystemExit) as ended:
    startup.run_given(["prog"], fails)
  assert ended.value.code == "\nDataError: row 3"


@pytest.mark.parametrize("platform, tunables, restarts", [
    ("linux", None, True), ("linux", "x", False), ("darwin", None, False)])
def test_huge_pages_are_asked_for_once(monkeypatch, platform, tunables, restarts):
  restarted = []
  monkeypatch.setattr(startup.sys, "platform", platform)
  monkeypatch.setattr(startup.sys, "orig_argv", ["python", "-m", "trainer", "--x"])
  monkeypatch.setattr(startup.os, "execv", lambda *given: restarted.append(given))
  monkeypatch.setenv("GLIBC_TUNABLES", "")
  monkeypatch.delenv("GLIBC_TUNABLES")
  if tunables:
    monkeypatch.setenv("GLIBC_TUNABLES", tunables)
  for _ in range(2):
    startup.use_huge_pages()
  assert restarted == [(sys.executable, [sys.executable, "-m", "trainer", "--x"])] * restarts
  assert os.environ.get("GLIBC_TUNABLES") == ("glibc.malloc.hugetlb=1" if restarts else tunables)
