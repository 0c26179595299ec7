"""The run that another one begins from, trained first where it is not there: `init_from.made_by`.

A config that begins from a run of another config can name both, the run's folder (`init_from.path`) and the config
(`init_from.made_by`). Then one command does it all: the first run is an ordinary one, in a process of its own, whose
command is shown; stopped and started again, each goes on where it was.
"""

import fcntl
import importlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from input_pipeline import runs
from trainer.errors import ConfigError
from trainer.report.history import last_end

LOCK = ".made_by"


def pending(config: Mapping[str, Any], workdir: str | Path) -> Path | None:
  """The folder of the run that is to be trained first; None: there is none, or it has ended, or it is not needed, since
  the workdir has a checkpoint. What is no run (a checkpoint alone) is left alone."""
  start = config.get("init_from") or {}
  if not start.get("made_by") or not start.get("path"):
    return None
  path, checkpoints = Path(start["path"]).expanduser(), Path(workdir).expanduser() / "checkpoints"
  if checkpoints.is_dir() and any(checkpoints.iterdir()):
    return None
  begun = (path / runs.STARTED).exists() or not path.exists() or not [f for f in path.iterdir() if f.name != LOCK]
  return path if begun and last_end(path).get("how") != "finished" else None


def command(config: Mapping[str, Any], path: Path, more: Sequence[str] = ()) -> list[str]:
  """The arguments of `python` that train it; `more`: overrides.

  Raises:
    ConfigError: there is no such config.
  """
  name, colon, argument = config["init_from"]["made_by"].partition(":")
  try:
    file = importlib.import_module(name).__file__ or ""
  except ImportError as e:
    raise ConfigError(f"init_from.made_by is {name!r}, which cannot be imported ({e}); give the dotted name of a "
                      "config, e.g. configs.quickstart.") from e
  file = os.path.relpath(file) if Path(file).is_relative_to(Path.cwd()) else file
  return ["-m", "trainer", f"--config={file}{colon}{argument}", f"--workdir={path}", *more]


def check(config: Mapping[str, Any], workdir: str | Path, of_tokenizer: bool = False) -> None:
  """Refuses to begin without it. `of_tokenizer`: only if the tokenizer is that run's. Raises ConfigError, with the
  command that trains it."""
  path = pending(config, workdir)
  if path is not None and (not of_tokenizer or Path(config["tokenizer"].get("path") or "").is_relative_to(path)):
    raise ConfigError(f"init_from.path is {str(path)!r}, where no run has ended yet. Train it first:\n  "
                      f"python {shlex.join(command(config, path))}")


def make(config: Mapping[str, Any], workdir: str | Path, typed: Sequence[str]) -> int:
  """Trains it if it is pending; returns an exit code, 0 if the run may begin.

  Args:
    typed: the command line. What it says of the model is said of that run's, too; a path that it gives is the user's
      own affair.
  """
  path = pending(config, workdir)
  if path is None or any(argument.startswith("--config.init_from.path") for argument in typed):
    return 0
  if int(os.environ.get("JAX_NUM_PROCESSES", "1")) > 1:
    check(config, workdir)  # each process would train it
  from trainer.speedrun.command import call
  arguments = command(config, path, [argument for argument in typed if argument.startswith("--config.model.")])
  path.mkdir(parents=True, exist_ok=True)
  with open(path / LOCK, "a") as file:  # two runs that need it wait for one another
    fcntl.flock(file, fcntl.LOCK_EX)
    if pending(config, workdir) is None:
      return 0
    print(f"This run begins from {path}, where no run has ended yet. First:\n\n  python {shlex.join(arguments)}\n",
          flush=True)
    code = call([sys.executable, *arguments])
  if code == 0 and pending(config, workdir) is None:
    print(f"\nNow the run itself, from {path}.\n", flush=True)
    return 0
  print(f"\n{path} is not finished, so that the run itself does not begin. The same command goes on where it was.",
        file=sys.stderr)
  return code if code > 0 else 1
