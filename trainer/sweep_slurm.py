"""A sweep as a Slurm array: a task for each run that is not finished, started again as launch/slurm.sbatch does it."""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError
from trainer.sweep_runs import TRAINER, Planned

# launch/slurm.sbatch with another program in the place of the trainer (tests/trainer/test_sweep.py compares them).
SCRIPT = r"""#!/bin/bash
# @made
@options
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --signal=B:TERM@180
#SBATCH --open-mode=append

again=0
# The time limit is near: all processes save and exit.
trap 'again=1; scancel --signal=TERM "$SLURM_JOB_ID"' TERM

srun --kill-on-bad-exit=0 --wait=300 "${PYTHON:-@python}" -u -m trainer.sweep @plan --index="$SLURM_ARRAY_TASK_ID" &
until wait $!; code=$?; ! kill -0 $! 2> /dev/null; do :; done # a trap interrupts a wait

# 75: another process died or hangs (docs/processes.md). Above 128: this one was killed. 1: trying again would not help.
if [ $code = 75 ] || [ $code -gt 128 ]; then again=1; fi
if [ $again = 1 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "${MAX_RESTARTS:-100}" ]; then
  echo "Exit code $code after ${SLURM_RESTART_COUNT:-0} restarts: job $SLURM_JOB_ID is queued again."
  exec scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


def write_script(root: Path, runs: Sequence[Planned], options: Sequence[str], at_once: int | None) -> Path:
  """Writes `array-HASH.json`, the runs by their numbers, and `array-HASH.sbatch`; returns the latter.

  The numbers are those of that file for good: a sweep that grows has another.

  Args:
    options: of sbatch, as they would stand on its command line.
    at_once: tasks that may run at a time; None: all.

  Raises:
    ConfigError: an option that is none, or that the script sets.
  """
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
  given = [f"--job-name=sweep-{root.name}", f"--array={_ranges(open_ones)}{f'%{at_once}' if at_once else ''}",
           f"--chdir={os.getcwd()}", f"--output={root / 'slurm-%A_%a.out'}", *options]
  script = SCRIPT.replace("@options", "\n".join(f"#SBATCH {_quoted(option)}" for option in given))
  script = script.replace("@made", f"Made by python -m trainer.sweep for the runs of {file.name}.")
  script = script.replace("@python", sys.executable).replace("@plan", shlex.quote(f"--array={file}"))
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


def _quoted(option: str) -> str:
  """As a line of #SBATCH wants it, where words are split at spaces and quotes keep them together."""
  return option if " " not in option else f'"{option}"'


def _ranges(numbers: Sequence[int]) -> str:
  """0,2-4 for 0, 2, 3, 4."""
  parts: list[list[int]] = []
  for number in numbers:
    if parts and parts[-1][1] == number - 1:
      parts[-1][1] = number
    else:
      parts.append([number, number])
  return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)
