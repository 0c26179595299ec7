"""The runs of a sweep: how each stands, running them here as processes of their own, and the table at the end."""

import collections
import contextlib
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from trainer import atomic
from trainer.config import checks as config_checks
from trainer.errors import ConfigError
from trainer.report.history import last_end
from trainer.telemetry import terminal
from trainer.telemetry.writers import read_rows

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
  try:
    saved = json.loads((planned.workdir / "config.json").read_text(encoding="utf-8"))
    # What `auto` stands for is decided on the devices.
    changed = planned.config is not None and any(
        not line.startswith("precision.") for line in config_checks.differences(saved, planned.config))
  except (OSError, ValueError, AttributeError):
    return "begun"
  return "begun" if changed else "finished"


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
  gpus, received = _visible_gpus(jobs * gpus_per_run), []
  waiting = collections.deque(run for run in runs if run.status != "finished")
  running: dict[int, subprocess.Popen] = {}

  def work(slot: int) -> None:
    while waiting and not received:
      run = waiting.popleft()
      try:
        first = _begin(run, gpus[slot * gpus_per_run:(slot + 1) * gpus_per_run], slot, running)
      except BlockingIOError:
        run.status = "busy"
        say(f"{run.name}: a process of an earlier sweep still trains there; left alone")
        continue
      say(f"{run.name} {run.status} ({len(waiting)} wait)")
      if received:  # while it began
        running[slot].send_signal(signal.SIGTERM)
      run.exit_code = running[slot].wait()
      del running[slot]
      _end(run, bool(received), first)
      say("\n    ".join([f"{run.name} {run.status}" + (
          f" with exit code {run.exit_code}; the end of {run.workdir / LOG}:" if run.said else ""), *run.said]))

  def hand_on(number: int, frame: Any) -> None:
    received.append(number)
    now = list(running.values())
    for process in now:
      process.send_signal(signal.SIGTERM if len(received) < 3 else signal.SIGKILL)
    say(f"\n{signal.Signals(number).name}: " + (
        f"{len(now)} running, each saves after its step and ends. (Once more: at once, without saving.)"
        if len(received) == 1 else "ending them at once."))

  before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
  try:
    with futures.ThreadPoolExecutor(jobs) as pool:
      list(pool.map(work, range(jobs)))
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
  return received[0] if received else None


def _begin(run: Planned, gpus: Sequence[str], slot: int, running: dict[int, subprocess.Popen]) -> int:
  """Starts a run's process, as running[slot]; returns where its output begins in the log.

  The lock on the log belongs to its output, and so outlives us: no second process is started beside it.

  Raises:
    BlockingIOError: there is one already.
  """
  run.workdir.mkdir(parents=True, exist_ok=True)
  with open(run.workdir / LOG, "ab") as file:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    first = file.tell()
    run.status = "continues" if run.status == "begun" else "begins"
    # In a session of its own: a Ctrl-C in the terminal reaches it through us, once.
    running[slot] = subprocess.Popen(
        [*TRAINER, *run.arguments], stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        env=os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}), start_new_session=True)
    return first


def _end(run: Planned, told: bool, first: int) -> None:
  """Sets the status of a run whose process has ended, and what it said last if it failed.

  Args:
    told: it was told to end; one that was setting up does so by the signal.
    first: where its output begins in the log.
  """
  code = run.exit_code or 0
  stopped = last_end(run.workdir).get("how") == "stopped" if code == 0 else told and code < 0
  run.status = "stopped" if stopped else "finished" if code == 0 else "failed"
  if run.status == "failed":
    lines = (run.workdir / LOG).read_bytes()[first:].decode(errors="replace").splitlines()
    run.said = [printable(line) for line in lines if line.strip()][-LAST_LINES:]


def _visible_gpus(needed: int) -> list[str]:
  """The names of so many GPUs, of those that this process may use."""
  given = os.environ.get("CUDA_VISIBLE_DEVICES")
  names = [name for name in given.split(",") if name] if given else [str(number) for number in range(needed)]
  if len(names) < needed:
    raise ConfigError(f"CUDA_VISIBLE_DEVICES is {given!r}, but --jobs times --gpus_per_run is {needed}. Lower one of "
                      "them.")
  return names[:needed]


def last_values(workdir: Path, names: Sequence[str]) -> dict[str, float]:
  """The last value of each of these metrics that is a finite number, and the last `step`; for a metric whose value is
  of an earlier step, `NAME/step`, too."""
  found: dict[str, float] = {}
  steps: dict[str, float] = {}
  with contextlib.suppress(OSError, ValueError):
    for row in read_rows(workdir / "metrics.jsonl"):
      finite = {name: row[name] for name in ("step", *names)
                if isinstance(row.get(name), (int, float)) and math.isfinite(row[name])}
      found |= finite
      steps |= {f"{name}/step": row["step"] for name in finite}
  return found | {name: step for name, step in steps.items() if step != found["step"]}


def in_order(runs: Sequence[Planned], metric: str, largest: bool) -> list[tuple[Planned, dict[str, float]]]:
  """The runs with the last values of `metric`, `loss` and `step`; the best first, those without a value last."""
  found = [(run, last_values(run.workdir, (metric, "loss"))) for run in runs]
  return sorted(found, key=lambda one: (metric not in one[1], (-1 if largest else 1) * one[1].get(metric, 0.0)))


def table(ordered: Sequence[tuple[Planned, Mapping[str, float]]], metric: str) -> str:
  """A line for each run; values that are not of its last step say of which."""
  names = list(dict.fromkeys((metric, "loss")))
  rows = [["", *names, "step", "status", "run"]]
  for place, (run, values) in enumerate(ordered, 1):
    cells = [f"{values[name]:.6g}" if name in values else "" for name in names]
    cells = [f"{cell} at step {values[f'{name}/step']:,}" if f"{name}/step" in values else cell
             for cell, name in zip(cells, names, strict=True)]
    rows.append([str(place), *cells, f"{values['step']:,}" if "step" in values else "", run.status, run.name])
  return terminal.table(rows, left=(len(names) + 2, len(names) + 3))


def write(file: Path, ordered: Sequence[tuple[Planned, Mapping[str, float]]], about: Mapping[str, Any]) -> None:
  """Writes the same as JSON, with each run's overrides and arguments; whole at any moment."""
  runs = [dict(name=run.name, overrides=run.overrides, status=run.status, exit_code=run.exit_code, values=dict(values),
               workdir=str(run.workdir), arguments=run.arguments, said=run.said) for run, values in ordered]
  atomic.write(file, json.dumps({**about, "runs": runs}, indent=1, default=list) + "\n")


def printable(text: str) -> str:
  """Output of other programs, for a terminal."""
  return "".join(c if c.isprintable() else "\ufffd" for c in text.expandtabs())[:400]
