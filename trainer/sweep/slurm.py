"""A sweep as a Slurm array: a task for each run that is not finished, started again as launch/slurm.sbatch does it."""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.errors import ConfigError
from trainer.sweep.runs import Planned

# What is submitted, with the runs' arguments in it and other options.
LAUNCH = Path(__file__).resolve().parents[2] / "launch" / "slurm.sbatch"


def write_script(root: Path, runs: Sequence[Planned], options: Sequence[str], at_once: int | None) -> Path:
  """Writes `array-HASH.sbatch`, which has the arguments of each run by its number; returns its path.

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
  open_ones = [str(number) for number, run in enumerate(runs) if run.status != "finished"]
  options = [f"--job-name=sweep-{root.name}", f"--array={','.join(open_ones)}{f'%{at_once}' if at_once else ''}",
             f"--chdir={os.getcwd()}", f"--output={root / 'slurm-%A_%a.out'}", *options]
  # A line of #SBATCH is split at spaces, and quotes keep words together.
  given = "\n".join("#SBATCH " + (f'"{option}"' if " " in option else option) for option in options)
  cases = "\n".join(f"  {number}) set -- {shlex.join(run.arguments)} ;;" for number, run in enumerate(runs))
  script = re.sub(r"\A(#!.*\n)(?:#(?!SBATCH).*\n)*#SBATCH --job-name=.*\n", lambda first: (
      f"{first[1]}# Made by python -m trainer.sweep.\n{given}\n"), LAUNCH.read_text(encoding="utf-8"))
  script = script.replace("\n\n", (
      f'\n\ncase "$SLURM_ARRAY_TASK_ID" in\n{cases}\nesac\nPYTHON="${{PYTHON:-{sys.executable}}}"\n\n'), 1)
  path = root / f"array-{hashlib.sha256(cases.encode()).hexdigest()[:8]}.sbatch"
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
