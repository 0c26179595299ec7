"""Runs that build on one another, as one: python -m trainer.speedrun --config=configs/speedrun.py --workdir=ROOT

The config file has two names: `STAGES`, {stage: {column of the table: metric of that stage's evaluations}}, in their
order, and `get_config("STAGE:ROOT")`, the config of a stage, which finds what the stage before has left in
ROOT/STAGE_BEFORE. Each stage is an ordinary run in a process of its own, whose command is shown: the same command after
a crash, or after Ctrl-C, goes on where it was. `ROOT/speedrun.json` and the table in the end hold the scores of every
stage.

`--set=seq.total_steps=3000` changes a key of one stage, `--set=optimizer.b2=0.95` one of all; it may be repeated. In
the end the last model answers the file's `QUESTIONS`, or, on a terminal, talks to you.
"""

import json
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from trainer import atomic, startup
from trainer.errors import ConfigError
from trainer.report.history import last_end
from trainer.sweep import command as sweep
from trainer.sweep import runs as sweep_runs
from trainer.telemetry import terminal


class Stages:
  """What the file says, checked.

  Attributes:
    names: the stages in their order.
    columns: {stage: {column: metric}}.
    questions: asked in the end; may be empty.

  Raises:
    ConfigError: the file cannot be read, or lacks one of the names.
  """

  def __init__(self, path: str):
    if not Path(path).is_file():
      raise ConfigError(f"--config={path} is no file; give a Python file with STAGES and get_config, e.g. "
                        "configs/speedrun.py.")
    found = runpy.run_path(path)
    if missing := [name for name in ("STAGES", "get_config") if name not in found]:
      raise ConfigError(f"{path} has no {' and no '.join(missing)}; a speedrun's file has STAGES = {{stage: {{column: "
                        "metric}} and get_config('STAGE:ROOT'), as configs/speedrun.py has.")
    self.path, self.columns, self.names = path, found["STAGES"], list(found["STAGES"])
    self.questions: Sequence[str] = found.get("QUESTIONS", ())


def check(stages: Stages, root: Path, given: Sequence[str]) -> None:
  """Refuses what some stage would refuse later, before the first one runs; no device is touched. Raises ConfigError,
  naming the stage."""
  for stage in stages.names:
    try:
      config = sweep.config_of(f"{stages.path}:{stage}:{root}", overrides_of(stage, stages.names, given))
    except ConfigError as e:
      raise ConfigError(f"stage {stage!r}: {e}") from e
    for metric in stages.columns[stage].values():
      if metric.split("/")[0] != "eval" or metric.split("/")[1] not in config.evals:
        raise ConfigError(f"STAGES of {stages.path} names the metric {metric!r} for {stage!r}; it is one of that "
                          f"stage's evaluators, eval/NAME/METRIC: {', '.join(config.evals) or 'it has none'}.")


def overrides_of(stage: str, stages: Sequence[str], given: Sequence[str]) -> list[str]:
  """The flags of `python -m trainer` for what `--set` says of a stage.

  Raises:
    ConfigError: not of the form KEY=VALUE.
  """
  found = []
  for text in given:
    key, equals, value = text.partition("=")
    if not equals or not key:
      raise ConfigError(f"--set={text}; it is written KEY=VALUE or STAGE.KEY=VALUE, e.g. --set=seq.total_steps=3000.")
    first, _, rest = key.partition(".")
    if first not in stages:
      found.append(f"--config.{key}={value}")
    elif first == stage:
      found.append(f"--config.{rest}={value}")
  return found


def run_stage(stages: Stages, stage: str, root: Path, overrides: Sequence[str]) -> dict[str, Any]:
  """Runs a stage to its end, or finds that it has ended; returns its record.

  Raises:
    ConfigError: the run has not measured what the table is to show.
    SystemExit: with the exit code of a stage that fails, or that was stopped.
  """
  workdir = root / stage
  command, file = [sys.executable, "-m", "trainer", f"--config={stages.path}:{stage}:{root}", f"--workdir={workdir}",
                   *overrides], workdir / "speedrun.json"
  done = _read(file)
  if done.get("command") == command[1:] and "scores" in done:
    print(f"\n{stage}: done before, in {workdir}", flush=True)
    return done
  print(f"\n{stage}: python {shlex.join(command[1:])}\n", flush=True)
  began, before = time.time(), done.get("seconds", 0.0)
  code = call(command)
  seconds = before + time.time() - began
  end = last_end(workdir)
  if code or end.get("how") != "finished":
    if workdir.is_dir():
      _write(file, {"seconds": seconds})
    print(f"\nStage {stage!r} is not finished. The same command goes on where it was.", file=sys.stderr)
    sys.exit(code if code > 0 else 1)
  columns = stages.columns[stage]
  last = sweep_runs.last_values(workdir, list(columns.values()))
  made = {"command": command[1:], "seconds": seconds, "steps": last["step"], "tokens": end["tokens"],
          "scores": {column: _metric(last, metric, stage) for column, metric in columns.items()},
          # Of those that were not measured at the end.
          "score_steps": {column: last[f"{metric}/step"] for column, metric in columns.items()
                          if f"{metric}/step" in last}}
  _write(file, made)
  return made


def call(command: Sequence[str]) -> int:
  """Runs a command and returns its exit code. What would stop this process stops the other, which saves first."""
  child = subprocess.Popen(command)
  # An interrupt from the terminal reaches both.
  previous = {signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: child.send_signal(signal.SIGTERM)),
              signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None)}
  try:
    return child.wait()
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)


def _metric(last: Mapping[str, float], name: str, stage: str) -> float:
  if name not in last:
    raise ConfigError(f"STAGES names the metric {name!r} for {stage!r}, of which that run has written no finite value.")
  return last[name]


def table(stages: Stages, records: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
  """The final table, a heading and a row for each stage; `records`: of each stage."""
  columns = list(dict.fromkeys(column for stage in stages.names for column in stages.columns[stage]))
  lines = [["stage", "minutes", "steps", "tokens", *columns]]
  for stage in stages.names:
    made = records[stage]
    lines.append([stage, f"{made['seconds'] / 60:.1f}", f"{made['steps']:,.0f}", f"{made['tokens']:,.0f}",
                  *(_score(made, column) for column in columns)])
  return lines


def _score(made: Mapping[str, Any], column: str) -> str:
  """The score of a stage, with the step where that is not its last; "" where it has none."""
  if column not in made["scores"]:
    return ""
  step = made.get("score_steps", {}).get(column)
  return f"{made['scores'][column]:.4f}" + ("" if step is None else f" at step {step:,}")


def _read(file: Path) -> dict[str, Any]:
  try:
    return json.loads(file.read_text(encoding="utf-8"))
  except (OSError, ValueError):
    return {}


def _write(file: Path, record: Mapping[str, Any]) -> None:
  atomic.write(file, json.dumps(record, indent=2) + "\n")


def chat(stages: Stages, workdir: Path) -> None:
  """A conversation with the last model on a terminal; elsewhere its answers to the file's questions."""
  command = [sys.executable, "-m", "trainer.generate", f"--workdir={workdir}"]
  if sys.stdin.isatty() and sys.stdout.isatty():
    print(f"\nTalk to it (an empty line ends): python {shlex.join(command[1:])}\n", flush=True)
    subprocess.call([*command, "--temperature=0"])
  elif stages.questions:
    print("\n" + "\n".join(f"prompt {i}: {question}" for i, question in enumerate(stages.questions)), flush=True)
    strategy = json.loads((workdir / "config.json").read_text(encoding="utf-8"))["strategy"]["name"]
    subprocess.call([*command, *(["--chat"] if strategy != "seq" else []), "--temperature=0", "--max_new_tokens=64",
                     *(f"--prompt={question}" for question in stages.questions)])
    print(f"\nTalk to it: python {shlex.join(command[1:])}")


def _define_flags() -> None:
  flags.DEFINE_string("config", "configs/speedrun.py", "A file with STAGES and get_config.")
  flags.DEFINE_string("workdir", None, "Folder of the stages' workdirs; the same folder goes on.", required=True)
  flags.DEFINE_multi_string("set", [], "KEY=VALUE for all stages, or STAGE.KEY=VALUE for one.")
  flags.DEFINE_bool("chat", True, "Ask the last model something in the end.")


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments {argv[1:]}; keys are set by --set=KEY=VALUE")
  given = flags.FLAGS
  with startup.one_message(ConfigError, OSError):
    stages, root = Stages(given.config), Path(given.workdir).expanduser().absolute()
    check(stages, root, given.set)
    root.mkdir(parents=True, exist_ok=True)
    records = {stage: run_stage(stages, stage, root, overrides_of(stage, stages.names, given.set))
               for stage in stages.names}
    _write(root / "speedrun.json", {"config": stages.path, "stages": records})
    print(f"\n{terminal.table(table(stages, records))}\n")
  if given.chat:
    chat(stages, root / stages.names[-1])
