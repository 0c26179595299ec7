"""Settings of all tests: CPU devices, of which a test sees one unless it is marked with `devices(8)`, NNX's tree mode,
a compilation cache for the session."""

import gc
import os
import shutil
import tempfile

import hypothesis
import pytest

from input_pipeline import once
from tests import programs, tiny
from tests.tiny import ROOT
from trainer import startup

# Before JAX is imported, which nothing above does. Subprocesses inherit these; those that want another number
# of devices override XLA_FLAGS.
os.environ.update(
    JAX_PLATFORMS="cpu",
    XLA_FLAGS=tiny.xla_flags(8),
    NNX_GRAPH_MODE="false",
    NNX_GRAPH_UPDATES="false",
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.3",
    WEFT_REPORT_STRICT="1",  # a report that cannot be written is a warning elsewhere (trainer/report/record.py)
    PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
)
startup.set_environment()  # as in a user's run, if this jaxlib is known to take them
# One cache for all workers of this session, in a folder of its own that is new each time.
_OWNS_CACHE = "WEFT_TEST_CACHE" not in os.environ
if _OWNS_CACHE:
  os.environ["WEFT_TEST_CACHE"] = tempfile.mkdtemp(prefix="weft-test-cache-")
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["WEFT_TEST_CACHE"]

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("weft", deadline=None)
hypothesis.settings.load_profile("weft")


def pytest_unconfigure():
  if _OWNS_CACHE:
    shutil.rmtree(os.environ["WEFT_TEST_CACHE"], ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def look_for_garbage_less_often():
  """Tracing makes so many objects that Python by itself would look through all of them every few seconds, a twentieth
  of the time; what importing all files of tests has made stays to the end."""
  gc.collect()
  gc.freeze()
  gc.set_threshold(50_000, 20, 4)


@pytest.fixture(autouse=True)
def say_everything_again():
  """What a process says once, each test may hear."""
  once.forget()


@pytest.fixture(scope="session", autouse=True)
def share_programs():
  """What several tests compile is compiled once; as users do it, each run compiles for itself."""
  if not tiny.AS_IN_USERS_RUNS:
    programs.share()


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
  """What one file's tests compiled is often of use to the next's, but all of it would be gigabytes by the end."""
  yield
  programs.forget_if_large()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
  """Before fixtures, those of whole files too."""
  marker = item.get_closest_marker("devices")
  programs.show(marker.args[0] if marker else 1)
  programs.traced = "monkeypatch" not in item.fixturenames or item.get_closest_marker("host_patches") is not None


def _slow() -> list[str]:
  """Names of tests/slow.txt: an indented test is one of the file above it."""
  names, file = [], ""
  for line in (ROOT / "tests" / "slow.txt").read_text(encoding="utf-8").splitlines():
    if line.startswith("  "):
      names.append(f"{file}::{line.strip()}")
    elif not line.startswith("#"):
      file = line
  return names


SLOW = _slow()


# Files that take longest, in this order (`python -m benchmarks.durations` makes the table): they are run first, so that
# all workers end at about the same time.
LONG = """
tests/test_processes.py
tests/test_faults.py
tests/trainer/test_every_key.py
tests/models/hf/test_families.py
tests/models/test_transformer.py
tests/models/attention/test_cache.py
tests/models/experts/test_moe.py
tests/trainer/strategies/test_teachers.py
tests/models/hf/test_native.py
tests/trainer/strategies/test_contrastive_images.py
tests/trainer/test_update.py
tests/trainer/strategies/test_sft_runs.py
tests/trainer/generate/test_sampler.py
tests/trainer/test_main.py
tests/trainer/test_position.py
tests/models/attention/test_dispatch.py
tests/trainer/strategies/test_grpo_runs.py
tests/models/hf/test_load.py
tests/models/hf/test_peft.py
tests/trainer/planning/test_plan.py
tests/trainer/strategies/test_contrastive.py
tests/models/test_exactness.py
tests/models/test_tables.py
tests/trainer/strategies/test_logprobs.py
tests/trainer/distributed/test_liveness.py
tests/models/test_lora.py
tests/trainer/generate/test_prefill.py
tests/trainer/strategies/test_dpo.py
tests/trainer/strategies/test_top_k.py
tests/trainer/strategies/test_distill.py
tests/trainer/strategies/test_reward.py
tests/trainer/serve/test_app.py
tests/trainer/strategies/test_dpo_runs.py
tests/trainer/strategies/test_ppo_runs.py
tests/input_pipeline/test_parts.py
tests/trainer/strategies/test_grpo.py
tests/trainer/test_program.py
tests/models/test_layers.py
tests/models/test_remat.py
tests/models/attention/test_ring.py
tests/trainer/export/test_hugging_face.py
tests/trainer/export/test_command.py
tests/trainer/generate/test_command.py
tests/trainer/modes/test_microscope.py
tests/trainer/rollouts/test_rollout_images.py
tests/test_docs.py
tests/models/test_vlm.py
tests/trainer/rollouts/test_ahead.py
tests/trainer/rollouts/test_old_policy.py
tests/models/test_lookup.py
tests/models/experts/test_kernels.py
tests/trainer/strategies/test_grpo_model.py
tests/models/hf/test_mtp.py
tests/trainer/distributed/test_layouts.py
tests/trainer/report/test_report.py
""".split()


def pytest_configure(config):
  for what, names in (("LONG in tests/conftest.py", LONG), ("tests/slow.txt", SLOW)):
    if missing := sorted({name for name in names if not (ROOT / name.partition("::")[0]).exists()}):
      raise pytest.UsageError(f"{what} names {missing}, of which there is no file.")
  config.option.loadscopereorder = False  # pytest-xdist would run the files with the most tests first


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
  order = {ROOT / name: number for number, name in enumerate(LONG)}
  items.sort(key=lambda item: order.get(item.path, len(order)))
  by_name = {item.nodeid: item for item in items}
  files = {item.path for item in items}
  for name in SLOW:
    if name in by_name:
      by_name[name].add_marker("slow")
    elif ROOT / name.partition("::")[0] in files and all("::" not in argument for argument in config.args):
      raise pytest.UsageError(f"tests/slow.txt names {name}, which is no test.")
