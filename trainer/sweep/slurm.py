"""A sweep as a Slurm array: a task for each run that is not finished, started again as launch/slurm.sbatch does it."""

import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError
from trainer.sweep.runs import TRAINER, Planned

# What is submitted, with another program in the trainer's place and other options.
LAUNCH = Path(__file__).resolve().parents[2] / "launch" / "slurm.sbatch"


def write_script(root: Path, runs: Sequence[Planned], options: Sequence[str], at_once: int | None) -> Path:
  """Writes `array-HASH.json`, the runs by their numbers, and `array-HASH.sbatch`; returns the latter.

  The numbers are those of that file for good: a sweep that grows has another.

  Args:
    options: of sbatch, as they would stand on its command line.
    at_once: tasks that may run at a time; None: all.

  Raises:
    ConfigError: an option that is none, or that the script sets; there is no launch/ here.
  """
  if not LAUNCH.exists():
    raise ConfigError(f"--slurm takes its script from {LAUNCH}, which is not there: run it from a checkout.")
  for option in options:
    if not option.startswith("-") or "\n" in option or option.split("=")[0] in ("--array", "-a", "--wrap"):
      raise ConfigError(f"found --sbatch={option!r}; it must be one option of sbatch, such as --sbatch=--time=4:00:00, "
                        "and --array is set here (--jobs: how many tasks at a time).")
  plan = [dict(name=run.name, workdir=str(run.workdir), arguments=run.arguments) for run in runs]
  text = json.dumps(dict(folder=os.getcwd(), runs=plan), indent=1) + "\n"
  stem = f"array-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
  file = root / f"{stem}.json"
  file.write_text(text, encoding="utf-8")
  open_ones = [number for number, run in enumerate(runs) if run.status != "finished"]
  options = [f"--job-name=sweep-{root.name}", f"--array={_ranges(open_ones)}{f'%{at_once}' if at_once else ''}",
             f"--chdir={os.getcwd()}", f"--output={root / 'slurm-%A_%a.out'}", *options]
  # A line of #SBATCH is split at spaces, and quotes keep words together.
  given = "\n".join("#SBATCH " + (f'"{option}"' if " " in option else option) for option in options)
  script = re.sub(r"\A(#!.*\n)(?:#(?!SBATCH).*\n)*#SBATCH --job-name=.*\n",
                  lambda first: f"{first[1]}# Made by python -m trainer.sweep for the runs of {file.name}.\n{given}\n",
                  LAUNCH.read_text(encoding="utf-8"))
  script = script.replace('"${PYTHON:-python}" -u -m trainer "$@"', (
      f'"${{PYTHON:-{sys.executable}}}" -u -m trainer.sweep {shlex.quote(f"--array={file}")} '
      '--index="$SLURM_ARRAY_TASK_ID"'))
  path = root / f"{stem}.sbatch"
  path.write_text(script, encoding="utf-8")
  return path


def submit(script: Path) -> None:
  """Hands the script to sbatch.

  Raises:
    ConfigError: there is none here, or it refuses.
  """
  if shutil.which("sbatch") is None:
    raise ConfigError(f"there is no sbatch here. On a machine of the cluster type: sbatch {shlex.quote(str(script))}")
  done = subprocess.run(["sbatch", str(script)], capture_output=True, text=True, check=False)
  if done.returncode:
    raise ConfigError(f"sbatch {shlex.quote(str(script))} failed with exit code {done.returncode}: "
                      f"{done.stderr.strip()[:500]!r}. Put its options right (--sbatch=…).")
  print(done.stdout.strip())


def task(array: Path, index: int) -> dict[str, Any]:
  """The run that a task of the array is for: name, workdir, arguments.

  Raises:
    ConfigError: no such file, or no such run in it.
  """
  try:
    plan = json.loads(array.read_text(encoding="utf-8"))
    runs = plan["runs"]
  except (OSError, ValueError, KeyError, TypeError) as e:
    raise ConfigError(f"--array={array} cannot be read ({type(e).__name__}: {e}). It is written by --slurm.") from e
  if not 0 <= index < len(runs):
    raise ConfigError(f"--index is {index}; {array.name} has the runs 0 to {len(runs) - 1}.")
  return runs[index]


def become(run: dict[str, Any]) -> None:
  """Turns this process into the trainer, so that signals and exit codes are its own."""
  sys.stderr.write(f"{run['name']}\n")
  sys.stdout.flush()
  os.execv(TRAINER[0], [*TRAINER, *run["arguments"]])


def _ranges(numbers: Sequence[int]) -> str:
  """0,2-4 for 0, 2, 3, 4."""
  parts = [[number for _, number in some]
           for _, some in itertools.groupby(enumerate(numbers), lambda at: at[1] - at[0])]
  return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
