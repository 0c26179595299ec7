"""The page of one run: `report.html` in its workdir."""

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from trainer.report import configs, pages, series, texts
from trainer.report.history import (
  PAGE,
  RUN,
  Column,
  History,
  Status,
  at,
  integer,
  load,
  mapping,
  sequence,
  sources_of,
  status,
  timestamp,
)
from trainer.report.pages import counted, dim, in_short, number, pairs, section, size, span, table, tag, when

# Names of notes, lines of each, lines for information, starts.
MOST_NOTES, MOST_OTHERS, MOST_INFO, MOST_STARTS = 60, 20, 100, 12
# What a reader wants to know first.
_KINDS = ("error", "rollback", "health", "warning", "stop")
# Kinds of Chrono that are parts of others, or have another name here.
_KIND_NAMES = {"train": "steps", "data": "waiting for data", "eval": "evaluations", "checkpoint": "checkpoints",
               "compile": "compilation", "rollout": "rollouts", "nonfinite": "looking into steps that were not finite"}


def write(workdir: str | Path, out: str | Path | None = None) -> Path:
  """Writes the page of a run; returns its path.

  Args:
    out: the file; None: report.html in the workdir.

  Raises:
    ConfigError: the folder holds no run.
    OSError: the page cannot be written.
  """
  history = load(workdir)
  return pages.save(history.workdir / PAGE if out is None else Path(out), make(history))


def make(history: History) -> str:
  """The page."""
  state, sources, name = status(history), sources_of(history.config), history.workdir.name
  found = series.charts([history.metrics], sources)
  groups = series.drawn(found, [name])
  throughput = [charts for title, charts in groups if title == series.THROUGHPUT]
  samples = texts.streams(history.workdir / "samples")
  evaluated = evaluations(history.metrics, sources)
  sections = [
      section("notes", "Health notes and warnings", *notes(history.notes)),
      section("evaluations", "Evaluations", table(
          ["metric", "first", "last", "best", "better is", "times"], evaluated, "Evaluations")
          if evaluated else tag("p", "None were made.")),
      section("curves", "Curves", pages.chart_tools([(name, series.places(history.metrics))]), *curves(groups, found)),
      section("throughput", "Throughput and time", *time_split(history), *throughput),
      section("samples", "Samples over time", *samples or [tag("p", "There are none. An evaluator of type samples "
                                                               "writes some.")]),
      section("data", "Data", *audit(history)), section("verify", "--mode=verify", *verified(history)),
      section("config", "Config", *config_tables(history.config)), section("ran", "What ran", *starts(history)),
      dim(*history.problems)]
  names = ("notes", "evaluations", "curves", "throughput", "samples", "data", "verify", "config", "ran")
  header = tag("header", tag("h1", f"{name} ", tag("span", state.word, class_=f"status {state.kind}")),
               dim(str(history.workdir)), tag("p", state.sentence), pairs(tiles(history, state), "tiles"),
               tag("nav", *(tag("a", one, href=f"#{one}") for one in names)))
  return pages.page(f"{name}: {state.word}", header, tag("main", *sections), written(),
                    columns=[texts.COLUMN] if any('class="tokens"' in one for one in samples) else [])


def written() -> Markup:
  return dim(f"Written {when(time.time())} by Weft {configs.weft_version()}.")


def curves(groups: Sequence[tuple[str, Markup]], found: series.Charts) -> list[Any]:
  """All groups but that of throughput, and metrics that do not change."""
  parts = [part for title, charts in groups if title != series.THROUGHPUT for part in (tag("h3", title), charts)]
  if found.constant:
    parts.append(pages.details(f"{counted(len(found.constant), 'metric')} of which all rows have the same value",
                               pairs([(name, number(value)) for name, value in found.constant.items()])))
  return [*(parts or [tag("p", "There are no metrics.")]), dim(*series.left_out(found))]


def tiles(history: History, state: Status) -> list[tuple[str, Any]]:
  """(what, value with a note) at the top."""
  found = [("steps", f"{state.step:,}", f"of {state.total:,}" if state.total else "")]
  tokens = integer(at(history.starts, -1, "end", "tokens", default=history.last("tokens_seen")))
  if tokens is not None:
    found.append(("tokens", in_short(tokens), f"{tokens:,} places in rows"))
  if history.started is not None and state.until is not None:
    found.append(("time since the first start", span(max(state.until - history.started, 0.0)),
                  counted(max(len(history.starts), 1), "start")))
  goodput = at(history.starts, -1, "end", "goodput", default=history.last("goodput"))
  if isinstance(goodput, (int, float)):
    found.append(("goodput", f"{goodput:.1%}", "of that went into steps that counted"))
  for name, label, text in (("tokens_per_second", "tokens per second", in_short), ("mfu", "MFU", "{:.2%}".format)):
    if name in history.metrics and len(values := history.metrics[name].finite.values):
      found.append((label, text(float(np.median(values))), "median of all rows"))
  for name in ("reward", "loss"):
    if (value := history.last(name)) is not None:
      found.append((name, number(value), f"at step {history.metrics[name].finite.steps[-1]:,}, the last written"))
  parameters = mapping(history.starts, -1, "parameters")
  if isinstance(at(parameters, "all"), int):
    trained = at(parameters, "trained")
    found.append(("parameters", in_short(parameters["all"]), "all trained" if trained == parameters["all"] else
                  f"{in_short(trained)} trained" if isinstance(trained, int) else ""))
  return [(what, pages.join([value, " ", tag("small", note)])) for what, value, note in found]


def notes(rows: Sequence[dict[str, Any]] | None) -> list[Any]:
  """The notes by kind and name, the grave ones first."""
  if rows is None:
    return [tag("p", "Not known: there is no notes.jsonl.")]
  by_name: dict[tuple[str, str], list[dict[str, Any]]] = {}
  for row in rows:
    by_name.setdefault((str(row.get("kind", "")), str(row.get("name", ""))), []).append(row)
  counts = {kind: sum(len(some) for (of, _), some in by_name.items() if of == kind) for kind in _KINDS}
  said = [counted(count, {"health": "health note", "stop": "stop"}.get(kind, kind)) for kind, count in counts.items()
          if count]
  order = sorted((key for key in by_name if key[0] in _KINDS), key=lambda key: _KINDS.index(key[0]))
  info = [_line(row) for row in rows if row.get("kind") not in _KINDS]
  parts = [tag("p", f"{', '.join(said)}." if said else "No health notes, no warnings and no errors."),
           *(_note(*key, by_name[key]) for key in order[:MOST_NOTES])]
  if info:
    parts.append(pages.details(f"{len(info)} more for information", _list(info[:MOST_INFO])))
  if len(order) > MOST_NOTES or len(info) > MOST_INFO:
    parts += [dim(f"Not shown: {counted(max(len(order) - MOST_NOTES, 0), 'further name')}; all of them are in "
                  "notes.jsonl.")]
  return parts


def _note(kind: str, name: str, rows: Sequence[dict[str, Any]]) -> Markup:
  """What was noted under one name: the last in full."""
  last, others = rows[-1], [_line(row) for row in rows[:-1] if row.get("text") != rows[-1].get("text")]
  others = others[:MOST_OTHERS] + [f"… and {len(others) - MOST_OTHERS:,} more"] * (len(others) > MOST_OTHERS)
  steps = f"step {last['step']:,}" if len(rows) == 1 else (
      f"{len(rows):,} times, from step {rows[0]['step']:,} to step {last['step']:,}; the last:")
  return tag("div", tag("b", kind), " ", tag("code", name), " ",
             tag("span", f"{steps} {when(timestamp(last.get('time')))} "), tag("p", last.get("text", "")),
             tag("p", tag("b", " What to do: "), last["advice"]) if last.get("advice") else "",
             pages.details("the others", _list(others)) if others else "", class_=f"card {kind}")


def _list(lines: Sequence[str]) -> Markup:
  return tag("ul", *(tag("li", line) for line in lines))


def _line(note: Mapping[str, Any]) -> str:
  return f"step {note['step']:,}: {note.get('text', '')}"


def evaluations(metrics: Mapping[str, Column], sources: Sequence[str]) -> list[list[str]]:
  """A row for each metric of an evaluator."""
  rows = []
  for name in metrics:
    found = series.figures(name, metrics[name], sources) if series.group_of(name) == "Evaluations" else None
    if found is not None:
      rows.append([name.removeprefix("eval/"), *map(series.at_step, (found.first, found.last, found.best)),
                   found.better, f"{found.count:,}"])
  return rows


def time_split(history: History) -> list[Any]:
  """Where the time went, in all."""
  totals = {kind: float(value) for kind, value in mapping(history.starts, -1, "end", "seconds").items()
            if isinstance(value, (int, float)) and math.isfinite(value)}
  of_all = bool(totals)
  if of_all:  # steps with what they waited for
    totals["train"] = max(totals.get("train", 0.0) - totals.get("data", 0.0), 0.0)
  else:
    totals = {name.removeprefix("time/split/"): float(column.finite.values.sum())
              for name, column in history.metrics.items() if name.startswith("time/split/")}
  if not totals:
    return []
  until, known = status(history).until, sum(totals.values())
  wall = until - history.started if of_all and history.started is not None and until is not None else 0.0
  whole = max(wall, known, 1e-9)
  rows = [[_KIND_NAMES.get(kind, kind), span(value), f"{value / whole:.1%}"]
          for kind, value in sorted(totals.items(), key=lambda item: -item[1]) if value]
  if wall:
    rows.append(["everything else", span(whole - known), f"{(whole - known) / whole:.1%}"])
  note = ("Everything else is setting up, the time when no process ran, and steps that were lost with their process."
          if wall else "Of the windows between rows of metrics; the run has not said more.")
  return [tag("h3", "Where the time went"), table(["kind", "time", "share"], rows, "Time by kind"), dim(note)]


def audit(history: History) -> list[Any]:
  """The statistics of the data as the run printed them at its last start, and how much of them was taken."""
  rows = [row for row in sequence(history.starts, -1, "data") if isinstance(row, dict) and row]
  if not rows:
    return [tag("p", "Not recorded.")]
  head = list(rows[0])
  facts = []
  epoch = at(history.starts, -1, "end", "epoch", default=history.last("epoch"))
  if isinstance(epoch, (int, float)):
    facts.append(("taken", f"{epoch:.4g} epochs of the rows"))
  for source, counts in mapping(history.starts, -1, "end", "data").items():
    if isinstance(counts, dict):
      facts.append((source, ", ".join(
          f"{number(value)} {'epochs' if name == 'epoch' else name}" for name, value in counts.items())))
  facts.append(("fingerprint", str(at(history.starts, -1, "data_fingerprint", default="?"))))
  cells = [[number(row.get(key, "")) for key in head] for row in rows]
  return [table(head, cells, "The data, by source"), pairs(facts)]


def verified(history: History) -> list[Any]:
  """What --mode=verify has measured in this workdir."""
  if history.verified is None:
    return [dim("It was not run in this workdir.")]

  def figure(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, (int, float)) else ""

  cells = [[str(row.get("status", "")), str(row.get("row", "")), str(row.get("what", "")), figure(row.get("measured")),
            figure(row.get("allowed")), str(row.get("why", ""))] for row in history.verified]
  return [dim("On a slice of the config as it was then; docs/exactness.md says what each row is."),
          table(["", "row", "what must be equal", "measured", "allowed", ""], cells, "Equalities", "words")]


def config_tables(config: Mapping[str, Any]) -> list[Any]:
  """What differs from the defaults, and everything."""
  if not config:
    return [dim("There is no config.json.")]
  changed, note = configs.changed(config)
  whole = [(key, configs.text(value)) for key, value in configs.flat(config).items()]
  most = configs.MOST_KEYS
  parts = [dim(note)] if note else []
  if changed:
    parts += [tag("h3", "What differs from the defaults"), table(
        ["key", "here", "default"], changed[:most], "Keys that differ from their defaults", "words")]
  parts.append(pages.details(f"The whole config, {len(whole)} keys",
                             table(["key", "value"], whole[:most], "The whole config", "words")))
  return [*parts, *(dim(f"{counted(len(some) - most, 'key')} of {len(some):,} not shown; config.json has them all.")
                    for some in (changed, whole) if len(some) > most)]


def starts(history: History) -> list[Any]:
  """Each start of a process, the last first."""
  if not history.starts:
    return [tag("p", f"Not recorded: there is no {RUN}.")]
  numbered = list(enumerate(history.starts, 1))[::-1]
  parts = [part for place, start in numbered[:MOST_STARTS]
           for part in (tag("h3", f"Start {place}"), pairs(start_rows(start)))]
  return [*parts, *[dim(f"{counted(len(numbered) - MOST_STARTS, 'earlier start')} in {RUN}.")]
          * (len(numbered) > MOST_STARTS)]


def start_rows(start: Mapping[str, Any]) -> list[tuple[str, Any]]:
  """What is told of a start."""
  devices, end, peak = (mapping(start, key) for key in ("devices", "end", "peak"))
  mesh = _listed({axis: count for axis, count in mapping(start, "mesh").items() if count != 1}, "=")
  rows: list[tuple[str, Any]] = [
      ("began", f"{when(timestamp(at(start, 'time')))}, after step {number(at(start, 'from_step', default='?'))} of "
                f"{number(at(start, 'total_steps', default='?'))}"),
      ("ended", _ended(end)),
      ("command", shlex.join(map(str, sequence(start, "command")))),
      ("in", at(start, "folder", default="")),
      ("Weft", f"{at(start, 'weft', default='?')}{_commit(at(start, 'git'))}"),
      ("your code", _commit(at(start, "folder_git")).removeprefix(", ")),
      ("versions", _listed(mapping(start, "versions"))),
      ("devices", f"{at(devices, 'count', default='?')} × {at(devices, 'kind', default='?')} "
                  f"({at(devices, 'platform', default='?')}) in {at(devices, 'processes', default='?')} process(es)"),
      ("mesh", mesh or "one device"),
      ("precision", _listed(mapping(start, "precision"))),
      ("peak for MFU", f"{peak['flops'] / 1e12:.3g} TFLOP/s a device, {at(peak, 'source', default='')}"
       if isinstance(at(peak, "flops"), (int, float)) else ""),
      ("host", f"{at(start, 'host', default='?')}, {at(start, 'cores', default='?')} cores, "
               f"{at(start, 'platform', default='?')}"),
      ("environment", _listed(mapping(start, "environment"), "=")),
      ("memory", _memory(end)),
  ]
  return [(name, value) for name, value in rows if value]


def _listed(values: Mapping[str, Any], between: str = " ") -> str:
  return ", ".join(f"{name}{between}{value}" for name, value in values.items() if value is not None)


def _ended(end: Any) -> str:
  if not end:
    return "it has not said: it is running, or was killed"
  how = {"finished": "finished", "stopped": f"stopped by {at(end, 'by', default='?')}",
         "error": f"{at(end, 'type', default='error')}: {at(end, 'message', default='')}"}.get(str(at(end, "how")), "?")
  return f"{when(timestamp(at(end, 'time')))} after step {number(at(end, 'step', default='?'))}: {how}"


def _commit(git: Any) -> str:
  if not at(git, "commit"):
    return ""
  return f", commit {str(git['commit'])[:12]}{', with changes that are not committed' if at(git, 'dirty') else ''}"


def _memory(end: Any) -> str:
  parts = []
  if isinstance(peak := at(end, "device_memory", "peak_bytes_in_use"), (int, float)):
    limit = at(end, "device_memory", "bytes_limit")
    parts.append(f"{size(peak)}{f' of {size(limit)}' if isinstance(limit, (int, float)) else ''} on the first device")
  if isinstance(host := at(end, "host_memory"), (int, float)):
    parts.append(f"{size(host)} in the first process")
  return "at most " + ", ".join(parts) if parts else ""
