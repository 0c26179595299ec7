"""What a run was, start by start: `run.json` in the workdir; and the callback that writes the page at the end.

    {"starts": [{"time": …, "command": […], "weft": …, "git": …, "devices": …, "parameters": …, "data": …, "end": …}]}

Each start of a process adds one; `end` is null until it ends in one of the ways that a process can tell of, so that a
null in an earlier start is a process that was killed. Nothing in here may end a run: what goes wrong is a warning.
"""

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging

import trainer
from trainer import atomic, tree
from trainer.callbacks import Callback
from trainer.report import configs
from trainer.report.history import PAGE, RUN

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "qwix", "numpy", "ml_collections")
# Of the environment, what changes programs; none of them is a secret.
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS")
GIT_SECONDS = 10
# In tests whatever goes wrong here, but for a disk that fails, is an error (tests/conftest.py).
STRICT = "WEFT_REPORT_STRICT"


@contextlib.contextmanager
def harmless(what: str) -> Iterator[None]:
  """Makes an error in it a warning."""
  try:
    yield
  except OSError as e:
    logging.warning("%s was not written: %s", what, e)
  except Exception as e:
    if STRICT in os.environ:
      raise
    logging.warning("%s was not written: %s: %s", what, type(e).__name__, e, exc_info=True)


class Record(Callback):
  """Adds this start of the process to run.json, and how it ended. The first callback, to be there before any fails.

  Args:
    trained: paths of the parameters that are trained.
  """

  def __init__(self, trained: Sequence[str]):
    self._trained = frozenset(trained)
    self._starts: list[dict[str, Any]] | None = None

  def on_train_begin(self, run):
    if jax.process_index() == 0:
      with harmless(RUN):
        starts = read(run.workdir / RUN)
        starts.append(describe(run, self._trained))
        write(run.workdir / RUN, starts)
        self._starts = starts

  def on_train_end(self, run):
    done = run.step >= run.total_steps
    self._end(run, {"how": "finished"} if done else {"how": "stopped", "by": run.stop_requested})

  def on_error(self, run, error):
    self._end(run, {"how": "error", "type": type(error).__name__, "message": str(error)[:4000]})

  def _end(self, run, end: dict[str, Any]) -> None:
    if self._starts is None:
      return
    with harmless(RUN):
      memory = jax.local_devices()[0].memory_stats() or {}  # None on CPU
      end |= {
          "time": now(), "step": run.step, "goodput": run.chrono.goodput(), "seconds": run.chrono.state(),
          "data": run.data.counters(run.step), "epoch": run.data.epoch(run.step),
          "tokens": run.tokens_seen(run.step),
          # Kilobytes on Linux.
          "host_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
          "device_memory": {key: memory[key] for key in ("peak_bytes_in_use", "bytes_limit") if key in memory},
      }
      self._starts[-1]["end"] = end
      write(run.workdir / RUN, self._starts)


class Page(Callback):
  """Writes report.html at the end. The last callback, so that what others write is on it."""

  def on_train_end(self, run):
    self._write(run)

  def on_error(self, run, error):
    self._write(run)
    if (run.workdir / PAGE).exists():
      with harmless("the path of the report"):
        run.say(f"The run until then: {run.workdir / PAGE}")

  def _write(self, run) -> None:
    if jax.process_index() == 0:
      with harmless(PAGE):
        from trainer.report import page  # Jinja is needed only now
        page.write(run.workdir)


def describe(run: Any, trained: frozenset[str]) -> dict[str, Any]:
  """What is known when training begins; JSON-able."""
  device, sizes = jax.devices()[0], {path: leaf.size for path, leaf in tree.flatten(run.state["params"]).items()}
  code, folder = git(Path(trainer.__file__).parent, "__init__.py"), git(Path.cwd())
  return {
      "time": now(),
      "command": configs.without_secrets(sys.argv),
      "folder": str(Path.cwd()),
      "weft": configs.weft_version(),
      "git": code,
      # Of the user's own code, if it is another one.
      "folder_git": folder if folder and (code is None or folder["root"] != code["root"]) else None,
      "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
      "platform": platform.platform(),
      "host": socket.gethostname(),
      "cores": os.cpu_count(),
      "environment": {name: os.environ[name] for name in VARIABLES if os.environ.get(name)},
      "devices": {"kind": device.device_kind, "platform": device.platform, "count": jax.device_count(),
                  "processes": jax.process_count()},
      "mesh": {axis: int(size) for axis, size in run.mesh.shape.items()},
      "precision": {key: run.config_json["precision"][key] for key in ("params", "frozen", "compute", "moments")},
      "parameters": {"all": sum(sizes.values()), "trained": sum(sizes[path] for path in trained)},
      "peak": {"flops": run.chrono.peak, "source": run.chrono.peak_source},
      "from_step": run.step,
      "total_steps": run.total_steps,
      "data": run.data.stats(),
      "data_fingerprint": run.data.fingerprint,
      "end": None,
  }


def git(folder: Path, file: str | None = None) -> dict[str, Any] | None:
  """{root, commit, dirty} of the checkout that a folder is in, and `file` of it is part of; None: of none."""

  def ask(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=GIT_SECONDS,
                          check=True, env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"})
    return done.stdout.strip()

  try:
    if file is not None:
      ask("ls-files", "--error-unmatch", file)
    root, commit = ask("rev-parse", "--show-toplevel", "HEAD").splitlines()
    return {"root": root, "commit": commit, "dirty": bool(ask("status", "--porcelain", "--untracked-files=no"))}
  except (OSError, ValueError, subprocess.SubprocessError):  # no git, no checkout, no commit yet, a slow disk
    return None


def read(path: Path) -> list[dict[str, Any]]:
  """The starts that a run.json holds, oldest first; [] where there is none. One that cannot be read is set aside.

  Raises:
    OSError: it cannot be set aside.
  """
  try:
    starts = json.loads(path.read_text(encoding="utf-8"))["starts"]
    if isinstance(starts, list) and all(isinstance(start, dict) for start in starts):
      return starts
  except FileNotFoundError:
    return []
  except (OSError, ValueError, KeyError, TypeError, RecursionError):
    pass
  os.replace(path, path.with_name(path.name + ".unreadable"))
  return []


def write(path: Path, starts: list[dict[str, Any]]) -> None:
  """Writes run.json, which is whole at any moment."""
  atomic.write(path, json.dumps({"starts": starts}, indent=1, default=_plain) + "\n")


def now() -> str:
  return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _plain(value: Any) -> Any:
  """Numbers of NumPy, and paths."""
  return value.item() if isinstance(value, np.generic) else str(value)


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None
