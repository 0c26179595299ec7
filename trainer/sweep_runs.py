"""The runs of a sweep: how each stands, running them here as processes of their own, and the table at the end."""

import contextlib
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from trainer import config_checks, whole_files, writers
from trainer.errors import ConfigError
from trainer.report.history import last_end

# Seconds between two looks at the processes, and between two lines on how far they are.
LOOK, TELL = 0.2, 30.0
# Lines of a failed run's output that are shown.
LAST_LINES = 8
LOG = "sweep.log"
TRAINER = (sys.executable, "-u", "-m", "trainer")


@dataclass
class Planned:
  """One run of a sweep.

  Attributes:
    name: of its folder below the sweep's.
    overrides: {dotted key: value}.
    workdir: absolute.
    arguments: those of `python -m trainer`.
    config: resolved; None where it was not looked at.
    status: new | begun | finished | running | stopped | failed | busy
    exit_code: of its last process here.
    said: the last lines of that process, if it failed.
  """

  name: str
  overrides: dict[str, Any]
  workdir: Path
  arguments: list[str]
  config: ConfigDict | None = None
  status: str = "new"
  exit_code: int | None = None
  said: list[str] = field(default_factory=list)


def status_of(planned: Planned) -> str:
  """new, begun or finished, by what is in the workdir: finished is a run that has said so and has this config."""
  if not (planned.workdir / "config.json").exists():
    return "new"
  if last_end(planned.workdir).get("how") != "finished":
    return "begun"
  if planned.config is None:
    return "finished"
  try:
    saved = json.loads((planned.workdir / "config.json").read_text(encoding="utf-8"))
    # What `auto` stands for is decided on the devices.
    changed = [line for line in config_checks.differences(saved, planned.config) if not line.startswith("precision.")]
  except (OSError, ValueError, AttributeError):
    return "begun"
  return "begun" if changed else "finished"


# ----------------------------------------------------------------------------------------------
# Running them here.


class _Process:
  """A run's process. The lock on its log belongs to its output, and so outlives us: no second one is started beside it.
  """

  def __init__(self, planned: Planned, slot: int, gpus: Sequence[str]):
    planned.workdir.mkdir(parents=True, exist_ok=True)
    self.planned, self.slot = planned, slot
    self.log = planned.workdir / LOG
    with open(self.log, "ab") as file:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      self._from = file.tell()
      command = [*TRAINER, *planned.arguments]
      env = os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
      # In a session of its own: a Ctrl-C in the terminal reaches it through us, once.
      self.popen = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env,
                                    start_new_session=True)

  def ended(self, told: bool) -> bool:
    """Whether it has; then its run has its status. `told`: to end, and one that was setting up does so by the signal.
    """
    code = self.popen.poll()
    if code is None:
      return False
    stopped = last_end(self.planned.workdir).get("how") == "stopped" if code == 0 else told and code < 0
    self.planned.exit_code = code
    self.planned.status = "stopped" if stopped else "finished" if code == 0 else "failed"
    if self.planned.status == "failed":
      with open(self.log, "rb") as file:
        file.seek(self._from)
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
      self.planned.said = [printable(line) for line in lines[-LAST_LINES:]]
    return True


def run_here(runs: Sequence[Planned], jobs: int, say: Callable[[str], None], gpus_per_run: int = 0) -> int | None:
  """Runs those that are not finished, `jobs` at a time, each as `python -m trainer`; its output goes to LOG.

  The first SIGINT or SIGTERM is handed on as SIGTERM: each run finishes its step, saves and ends, and no other begins.
  The second makes them exit at once, the third kills them.

  Args:
    gpus_per_run: each of the jobs sees that many GPUs, its own; 0: all that are visible here.

  Returns:
    The signal that ended the sweep early; None: none did.

  Raises:
    ConfigError: there are fewer GPUs than the jobs are to have.
  """
  waiting, running = [run for run in runs if run.status != "finished"], []
  visible = _visible_gpus(jobs * gpus_per_run)
  received: list[int] = []
  told, begun = time.monotonic(), 0
  with _signals(lambda number: _hand_on(received, number, running, say)):
    while running or (waiting and not received):
      free = sorted(set(range(jobs)) - {process.slot for process in running})
      while waiting and free and not received:
        run, slot = waiting.pop(0), free.pop(0)
        word, begun = "continues" if run.status == "begun" else "begins", begun + 1
        try:
          running.append(_Process(run, slot, visible[slot * gpus_per_run:(slot + 1) * gpus_per_run]))
        except BlockingIOError:
          run.status = "busy"
          say(f"{run.name}: a process of an earlier sweep still trains there; left alone")
          free.insert(0, slot)
          continue
        run.status = "running"
        say(f"{run.name} {word} ({begun} of {begun + len(waiting)})")
      time.sleep(LOOK)
      for process in [process for process in running if process.ended(bool(received))]:
        running.remove(process)
        say(_told(process))
      if time.monotonic() - told > TELL:
        told = time.monotonic()
        for process in running:
          say(f"  {process.planned.name}: {progress(process.planned.workdir)}")
  return received[0] if received else None


def _told(process: _Process) -> str:
  run = process.planned
  if run.status != "failed":
    return f"{run.name} {run.status}"
  return "\n".join([f"{run.name} failed with exit code {run.exit_code}; the end of {process.log}:",
                    *(f"    {line}" for line in run.said)])


def _hand_on(received: list[int], number: int, running: list[_Process], say: Callable[[str], None]) -> None:
  received.append(number)
  for process in running:
    if process.popen.poll() is None:
      process.popen.send_signal(signal.SIGTERM if len(received) < 3 else signal.SIGKILL)
  say(f"\n{signal.Signals(number).name}: " + (
      f"{len(running)} running, each saves after its step and ends. (Once more: at once, without saving.)"
      if len(received) == 1 else "ending them at once."))


@contextlib.contextmanager
def _signals(handle: Callable[[int], None]):
  """Hands SIGINT and SIGTERM to `handle`, in here."""
  before = {number: signal.signal(number, lambda received, frame: handle(received))
            for number in (signal.SIGINT, signal.SIGTERM)}
  try:
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def _visible_gpus(needed: int) -> list[str]:
  """The names of so many GPUs, of those that this process may use."""
  given = os.environ.get("CUDA_VISIBLE_DEVICES")
  names = [name for name in given.split(",") if name] if given else [str(number) for number in range(needed)]
  if len(names) < needed:
    raise ConfigError(f"CUDA_VISIBLE_DEVICES is {given!r}, but --jobs times --gpus_per_run is {needed}. Lower one of "
                      "them.")
  return names[:needed]


def progress(workdir: Path) -> str:
  """`step 120, loss 2.345` by the last rows that are written there; of rollouts the reward, too."""
  row = last_values(workdir, ("reward", "loss"), tail=True)
  told = [f"{name} {row[name]:.4g}" for name in ("reward", "loss") if name in row]
  return ", ".join([f"step {row['step']:,}", *told]) if told else "no step yet"


def last_values(workdir: Path, names: Sequence[str], tail: bool = False) -> dict[str, float]:
  """The last value of each of these metrics that is a finite number, and the last `step`; for a metric whose value is
  of an earlier step, `NAME/step`, too.

  Args:
    tail: look at the end of the file only.
  """
  found: dict[str, float] = {}
  with contextlib.suppress(OSError, ValueError):
    if tail:
      with open(workdir / "metrics.jsonl", "rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 65536, 0))
        rows = [_row(line) for line in file.read().split(b"\n")[1 if file.tell() > 65536 else 0:]]
    else:
      rows = writers.read_rows(workdir / "metrics.jsonl")
    for row in rows:
      finite = {name: row[name] for name in ("step", *names)
                if isinstance(row.get(name), (int, float)) and math.isfinite(row[name])}
      found |= finite | {f"{name}/step": row["step"] for name in finite if name != "step" and "step" in finite}
  return {name: value for name, value in found.items()
          if not (name.endswith("/step") and name not in names and value == found["step"])}


def _row(line: bytes) -> dict[str, Any]:
  try:
    row = json.loads(line)
    return row if isinstance(row, dict) else {}
  except ValueError:  # cut
    return {}


# ----------------------------------------------------------------------------------------------
# The table.


def in_order(runs: Sequence[Planned], metric: str, largest: bool) -> list[tuple[Planned, dict[str, float]]]:
  """The runs with the last values of `metric`, `loss` and `step`; the best first, those without a value last."""
  found = [(run, last_values(run.workdir, (metric, "loss"))) for run in runs]
  return sorted(found, key=lambda one: (metric not in one[1], (-1 if largest else 1) * one[1].get(metric, 0.0)))


def table(ordered: Sequence[tuple[Planned, Mapping[str, float]]], metric: str) -> str:
  """A line for each run."""
  rows = [("", metric, "loss", "step", "status", "run")]
  for place, (run, values) in enumerate(ordered, 1):
    rows.append((str(place), *(f"{values[name]:.6g}{_older(values, name)}" if name in values else ""
                               for name in (metric, "loss")),
                 f"{values['step']:,}" if "step" in values else "", run.status, run.name))
  if metric == "loss":
    rows = [row[:1] + row[2:] for row in rows]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  last = len(widths) - 1
  return "\n".join("  ".join(cell.ljust(width) if place >= last - 1 else cell.rjust(width)
                             for place, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
                   for row in rows)


def _older(values: Mapping[str, float], name: str) -> str:
  """` at step N`, where a value is not of the last step."""
  return f" at step {values[f'{name}/step']:,}" if f"{name}/step" in values else ""


def write(file: Path, ordered: Sequence[tuple[Planned, Mapping[str, float]]], about: Mapping[str, Any]) -> None:
  """Writes the same as JSON, with each run's overrides and arguments; whole at any moment."""
  runs = [dict(name=run.name, overrides=run.overrides, status=run.status, exit_code=run.exit_code, values=dict(values),
               workdir=str(run.workdir), arguments=run.arguments, said=run.said) for run, values in ordered]
  whole_files.write(file, json.dumps({**about, "runs": runs}, indent=1, default=list) + "\n")


def printable(text: str) -> str:
  """Output of other programs, for a terminal."""
  return "".join(c if c.isprintable() else "\ufffd" for c in text.expandtabs())[:400]
