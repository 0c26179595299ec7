"""What a workdir says of its run. Whatever is missing or cut is left out, and what cannot be read is told."""

import datetime
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.errors import ConfigError

# What ran, and the page; of a workdir.
RUN, PAGE = "run.json", "report.html"
# Metrics of different names, and notes, that are read.
MOST_NAMES, MOST_NOTES = 4000, 20_000
# Any of these makes a folder one of a run.
SIGNS = ("config.json", "metrics.jsonl", RUN)


class Column(NamedTuple):
  """A metric: its value after each of some steps, which grow. int64 [N], float64 [N]; values may be NaN or infinite."""

  steps: np.ndarray
  values: np.ndarray

  @property
  def finite(self) -> "Column":
    """Without the values that are not finite."""
    good = np.isfinite(self.values)
    return Column(self.steps[good], self.values[good])


class History(NamedTuple):
  """A run as its workdir has it.

  Attributes:
    workdir: absolute.
    config: of config.json; {} if there is none.
    starts: of run.json (trainer/report/record.py), oldest first.
    started: seconds since 1970; None: not known.
    metrics: by name.
    notes: of notes.jsonl; None: there is no such file.
    verified: of verify/results.json; None: there is none.
    problems: sentences on what could not be read.
  """

  workdir: Path
  config: dict[str, Any]
  starts: list[dict[str, Any]]
  started: float | None
  metrics: dict[str, Column]
  notes: list[dict[str, Any]] | None
  verified: list[dict[str, Any]] | None
  problems: list[str]

  def last(self, name: str) -> float | None:
    """The last finite value of a metric; None: it has none."""
    values = self.metrics[name].finite.values if name in self.metrics else ()
    return float(values[-1]) if len(values) else None


def load(workdir: str | Path) -> History:
  """Reads a workdir.

  Raises:
    ConfigError: it holds no run.
  """
  workdir = Path(workdir).expanduser().absolute()
  if not workdir.is_dir():
    what = "is a file" if workdir.exists() else "does not exist"
    raise ConfigError(f"{workdir} {what}. Give the --workdir of a run.")
  if not any((workdir / name).is_file() for name in SIGNS):
    raise ConfigError(f"{workdir} holds no run: there is no {', '.join(SIGNS[:-1])} or {SIGNS[-1]} in it. Give the "
                      "--workdir of a run.")
  problems: list[str] = []
  config = _json(workdir / "config.json", dict, problems)
  starts = sequence(_json(workdir / RUN, dict, problems), "starts")
  notes = [note for _, note in zip(range(MOST_NOTES), _lines(workdir / "notes.jsonl", problems), strict=False)]
  verified = _json(workdir / "verify" / "results.json", list, problems)
  return History(
      workdir, config or {}, [start for start in starts if isinstance(start, dict)], _started(workdir, problems),
      read_metrics(workdir / "metrics.jsonl", problems), notes if (workdir / "notes.jsonl").exists() else None,
      None if verified is None else [row for row in verified if isinstance(row, dict)], problems)


def read_metrics(path: Path, problems: list[str]) -> dict[str, Column]:
  """The columns of a metrics.jsonl. Only numbers are kept, which JSON may have as strings where they are not finite; of
  several values of a step the last."""
  columns: dict[str, dict[int, float]] = {}
  left_out = set()
  for row in _lines(path, problems):
    for name, value in row.items():
      number = _number(value)
      if name == "step" or number is None:
        continue
      if name not in columns and len(columns) >= MOST_NAMES:
        left_out.add(name)
        continue
      columns.setdefault(name, {})[row["step"]] = number
  if left_out:
    problems.append(f"{path.name} has metrics of more than {MOST_NAMES:,} names; {len(left_out):,} are left out.")
  return {name: Column(np.array(sorted(found), np.int64), np.array([found[step] for step in sorted(found)]))
          for name, found in columns.items()}


def _number(value: Any) -> float | None:
  if isinstance(value, str) and value in ("nan", "inf", "-inf"):
    return float(value)
  if isinstance(value, (int, float)) and not isinstance(value, bool):
    return float(value)
  return None


def _lines(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
  """The rows of a JSON Lines file that have a step; a last one that was cut goes without a word, others are counted."""
  bad, cut = 0, False
  try:
    with open(path, encoding="utf-8", errors="replace") as file:
      for line in file:
        if not line.strip():
          continue
        bad, cut = bad + cut, False
        try:
          row = parse(line)
          row["step"] = _step(row["step"])
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
          cut = True
          continue
        yield row
    bad += cut and line.endswith("\n")
  except FileNotFoundError:
    return
  except OSError as e:
    problems.append(f"{path.name} cannot be read: {e.strerror}")
  if bad:
    problems.append(f"{path.name} has {bad:,} line(s) that are no rows; they are left out.")


def parse(text: str | bytes) -> Any:
  """JSON, in which whole numbers that count nothing, of 19 digits and more, are floats, infinite if need be."""
  return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 19 else float(digits))


def _step(value: Any) -> int:
  if not -2**62 < int(value) < 2**62:
    raise ValueError("no step")
  return int(value)


def _json(path: Path, kind: type, problems: list[str]) -> Any:
  """What a file holds, if it is of that kind; None if it is not there or is not."""
  try:
    found = parse(path.read_text(encoding="utf-8"))
  except FileNotFoundError:
    return None
  except (OSError, ValueError, RecursionError) as e:
    problems.append(f"{path.name} cannot be read: {type(e).__name__}: {e}")
    return None
  if isinstance(found, kind):
    return found
  problems.append(f"{path.name} holds a {type(found).__name__}, not a {kind.__name__}; it is left out.")
  return None


def _started(workdir: Path, problems: list[str]) -> float | None:
  try:
    return datetime.datetime.fromisoformat((workdir / "started").read_text(encoding="utf-8").strip()).timestamp()
  except FileNotFoundError:
    return None
  except (OSError, ValueError, OverflowError):
    problems.append("started cannot be read.")
    return None


def at(tree: Any, *path: str | int, default: Any = None) -> Any:
  """What stands at a path of keys in JSON; `default` where there is no such place."""
  for key in path:
    if isinstance(tree, Mapping) and key in tree:
      tree = tree[key]
    elif isinstance(tree, Sequence) and not isinstance(tree, str) and isinstance(key, int) and abs(key) < len(tree) + (
        key < 0):
      tree = tree[key]
    else:
      return default
  return default if tree is None else tree


def mapping(tree: Any, *path: str | int) -> Mapping[str, Any]:
  """The object at a path of keys in JSON; {} where there is none."""
  found = at(tree, *path)
  return found if isinstance(found, Mapping) else {}


def sequence(tree: Any, *path: str | int) -> Sequence[Any]:
  """The list at a path of keys in JSON; () where there is none."""
  found = at(tree, *path)
  return found if isinstance(found, list) else ()


class Status(NamedTuple):
  """`kind`: finished | stopped | error | open (it runs, or was killed). `step`: the last that is known."""

  kind: str
  word: str
  sentence: str
  step: int
  total: int | None
  until: float | None


def status(history: History) -> Status:
  """How the run ended, by its last start; where that says nothing, by its metrics."""
  end = at(history.starts, -1, "end", default={})
  how, total = at(end, "how"), at(history.starts, -1, "total_steps")
  trained = [column.steps[-1] for name, column in history.metrics.items() if not name.startswith("eval/")]
  seen = int(max(trained, default=0))
  step, total = integer(at(end, "step")), integer(total)
  step = seen if step is None else step
  of = f" of {total:,}" if total else ""
  until = timestamp(at(end, "time"))
  if how == "finished":
    return Status("finished", "finished", f"All {step:,} steps were taken.", step, total, until)
  if how == "stopped":
    return Status("stopped", "stopped", f"Stopped by {at(end, 'by', default='?')} after step {step:,}{of}, and saved; "
                  "the same command continues.", step, total, until)
  if how == "error":
    return Status("error", "failed", f"Ended after step {step:,}{of} with {at(end, 'type', default='an error')}: "
                  f"{at(end, 'message', default='')}", step, total, until)
  until = _modified(history.workdir / "metrics.jsonl")
  if not history.starts:
    return Status("open", "not known", f"There is no {RUN}: the run ended before its first step, or is of a "
                  "version of Weft that did not write it.", step, total, until)
  return Status("open", "no end", "It is running, or was killed: its last process has not said how it ended. The last "
                f"step that is written is {step:,}{of}.", step, total, until)


def last_end(workdir: Path) -> dict[str, Any]:
  """What the run.json of a run says of the end of its last process, `how` (finished, stopped, error) among it; {}:
  nothing."""
  return dict(mapping(_json(workdir / RUN, dict, []), "starts", -1, "end"))


def integer(value: Any) -> int | None:
  """A whole number of JSON; None for anything else."""
  return int(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def timestamp(value: Any) -> float | None:
  """Seconds since 1970 of a time in ISO 8601; None for anything else."""
  try:
    return datetime.datetime.fromisoformat(value).timestamp()
  except (TypeError, ValueError, OverflowError):
    return None


def _modified(path: Path) -> float | None:
  try:
    return path.stat().st_mtime
  except OSError:
    return None


def sources_of(config: Mapping[str, Any]) -> list[str]:
  """The names of the sources that a run trains on and evaluates."""
  names = [*mapping(config, "input", "sources")]
  for evaluation in mapping(config, "evals").values():
    names += mapping(evaluation, "sources")
  return list(dict.fromkeys(names))
