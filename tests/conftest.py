"""Settings of all tests: 8 forced CPU devices, NNX's tree mode, a compilation cache for the session."""

import os
import shutil
import tempfile
from pathlib import Path

from trainer import startup

ROOT = Path(__file__).resolve().parent.parent

# Before JAX is imported. Subprocesses inherit these; those that want another number of devices override XLA_FLAGS.
os.environ.update(
    JAX_PLATFORMS="cpu",
    # Tiny programs take longer to be optimised than to run.
    XLA_FLAGS="--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=1",
    NNX_GRAPH_MODE="false",
    NNX_GRAPH_UPDATES="false",
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.3",
    WEFT_REPORT_STRICT="1",  # a report that cannot be written is a warning elsewhere (trainer/report/record.py)
    PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
)
startup.set_compiler_flags()  # as in a user's run, if this jaxlib is known to take them
# One cache for all workers of this session, in a folder of its own that is new each time.
_OWNS_CACHE = "WEFT_TEST_CACHE" not in os.environ
if _OWNS_CACHE:
  os.environ["WEFT_TEST_CACHE"] = tempfile.mkdtemp(prefix="weft-test-cache-")
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["WEFT_TEST_CACHE"]


def pytest_unconfigure():
  if _OWNS_CACHE:
    shutil.rmtree(os.environ["WEFT_TEST_CACHE"], ignore_errors=True)
