"""The page of one run: `report.html` in its workdir."""

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.report import checks, configs, render, series, texts
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
from trainer.report.render import at_step, counted, in_short, number, shown, size, span, when

# Notes that are seen at once, and at all; lines of each; lines for information; starts.
FIRST_NOTES, MOST_NOTES, MOST_OTHERS, MOST_INFO, MOST_STARTS = 6, 60, 20, 100, 12
# What a reader wants to know first.
_KINDS = ("error", "rollback", "health", "warning", "stop")
_PARTS = (("notes", "Health notes"), ("evaluations", "Evaluations"), ("curves", "Curves"),
          ("throughput", "Throughput"), ("samples", "Samples"), ("data", "Data"), ("checks", "Self-checks"),
          ("config", "Config"), ("ran", "What ran"), ("files", "Files"))
_FILES = (("config", "config.json"), ("what ran", RUN), ("metrics", "metrics.jsonl"), ("notes", "notes.jsonl"),
          ("TensorBoard", "tensorboard"), ("checkpoints", "checkpoints"), ("samples", "samples"),
          ("tokenizer", "tokenizer.json"), ("token cache", "cache"), ("export", "export"),
          ("steps that were not finite", "nonfinite"), ("steps seen again", "replay"), ("--mode=verify", "verify"),
          ("--mode=inspect", "inspect.html"), ("--mode=plan", "plan.html"), ("profile", "profile"))
# Kinds of Chrono that are parts of others, or have another name here.
_KIND_NAMES = {"train": "steps", "data": "waiting for data", "eval": "evaluations", "checkpoint": "checkpoints",
               "compile": "compilation", "rollout": "rollouts", "nonfinite": "looking into steps that were not finite"}


def write(workdir: str | Path, out: str | Path | None = None) -> Path:
  """Writes the page of a run; returns its path.

  Args:
    workdir: of the run.
    out: the file; None: report.html in the workdir.

  Raises:
    ConfigError: the folder holds no run.
    OSError: the page cannot be written.
  """
  history = load(workdir)
  return render.save(history.workdir / PAGE if out is None else Path(out), make(history))


def make(history: History) -> str:
  """The page."""
  state, sources = status(history), sources_of(history.config)
  charts = series.charts([history.metrics], sources)
  numbers = {chart.title: place for place, chart in enumerate(chart for _, some in charts.groups for chart in some)}
  payload, fewer = series.payload(charts.groups, [(history.workdir.name, history.metrics)], numbers)
  split = time_split(history, payload)
  groups = [(title, [shown(chart, numbers[chart.title], [history.workdir.name]) for chart in some])
            for title, some in charts.groups]
  streams, no_room = texts.streams(history.workdir / "samples")
  left_out = render.left_out(charts, fewer)
  return render.page(
      "run.html.jinja", payload, title=f"{history.workdir.name}: {state.word}", name=history.workdir.name,
      workdir=str(history.workdir), status=state, tiles=tiles(history, state), contents=_PARTS, notes=notes(history),
      evaluations=evaluations(history.metrics, sources),
      groups=[group for group in groups if group[0] != series.THROUGHPUT],
      throughput=[one for title, some in groups if title == series.THROUGHPUT for one in some],
      constant=[(name, number(value)) for name, value in charts.constant.items()],
      constant_title=f"{counted(len(charts.constant), 'metric')} of which all rows have the same value",
      curves_left_out=left_out, split=split,
      streams=[{"name": stream.name, "steps": stream.steps, "left_out": _not_shown(stream)} for stream in streams],
      coloured=any(text.said.tokens for stream in streams for step in stream.steps for text in step.texts),
      colours=list(enumerate(texts.BOUNDS, 1)),
      samples_left_out=[f"Not shown: {', '.join(no_room)}"] if no_room else [], audit=audit(history),
      checks=checks.found(history), verified=checks.verified(history), config=config_tables(history.config),
      starts=[start_rows(start, place + 1) for place, start in enumerate(history.starts)][::-1][:MOST_STARTS],
      starts_left_out=[f"{counted(len(history.starts) - MOST_STARTS, 'earlier start')} in {RUN}."]
      if len(history.starts) > MOST_STARTS else [], files=files(history.workdir), problems=history.problems)


def tiles(history: History, state: Status) -> list[tuple[str, str, str]]:
  """(what, value, note) at the top."""
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
  return found


# ----------------------------------------------------------------------------------------------
# Notes, evaluations, curves.


def notes(history: History) -> dict[str, Any]:
  """The notes by kind and name, the grave ones first."""
  rows = history.notes
  if rows is None:
    return {"lead": "Not known: there is no notes.jsonl.", "first": [], "more": [], "info": [], "left_out": []}
  by_name: dict[tuple[str, str], list[dict[str, Any]]] = {}
  for row in rows:
    by_name.setdefault((str(row.get("kind", "")), str(row.get("name", ""))), []).append(row)
  counts = {kind: sum(len(some) for (of, _), some in by_name.items() if of == kind) for kind in _KINDS}
  said = [counted(count, {"health": "health note", "stop": "stop"}.get(kind, kind)) for kind, count in counts.items()
          if count]
  lead = f"{', '.join(said)}." if said else "No health notes, no warnings and no errors."
  order = sorted((key for key in by_name if key[0] in _KINDS), key=lambda key: _KINDS.index(key[0]))
  cards = []
  for kind, name in order[:MOST_NOTES]:
    some = by_name[kind, name]
    last = some[-1]
    others = [_line(row) for row in some[:-1] if row.get("text") != last.get("text")]
    others = others[:MOST_OTHERS] + [f"… and {len(others) - MOST_OTHERS:,} more"] * (len(others) > MOST_OTHERS)
    steps = f"step {last['step']:,}" if len(some) == 1 else (
        f"{len(some):,} times, from step {some[0]['step']:,} to step {last['step']:,}; the last:")
    cards.append({"kind": kind, "name": name, "when": f"{steps} {when(timestamp(last.get('time')))}".rstrip(),
                  "text": last.get("text", ""), "advice": last.get("advice", ""), "others": others})
  info = [_line(row) for row in rows if row.get("kind") not in _KINDS]
  left_out = [f"Not shown: {counted(len(order) - MOST_NOTES, 'further name')}; all of them are in notes.jsonl."]
  return {"lead": lead, "first": cards[:FIRST_NOTES], "more": cards[FIRST_NOTES:], "info": info[:MOST_INFO],
          "left_out": left_out if len(order) > MOST_NOTES or len(info) > MOST_INFO else []}


def _line(note: Mapping[str, Any]) -> str:
  return f"step {note['step']:,}: {note.get('text', '')}"


def evaluations(metrics: Mapping[str, Column], sources: Sequence[str]) -> list[list[str]]:
  """A row for each metric of an evaluator."""
  rows = []
  for name in metrics:
    found = series.figures(name, metrics[name], sources) if series.group_of(name) == "Evaluations" else None
    if found is not None:
      rows.append([name.removeprefix("eval/"), at_step(found.first), at_step(found.last), at_step(found.best),
                   found.better, f"{found.count:,}"])
  return rows


def time_split(history: History, payload: dict[str, Any]) -> dict[str, Any] | None:
  """Where the time went, in all and over the steps, which are added to the payload; None: nothing is known."""
  over_time = series.time_split(history.metrics)
  totals = {kind: float(value) for kind, value in mapping(history.starts, -1, "end", "seconds").items()
            if isinstance(value, (int, float)) and math.isfinite(value)}
  of_all = bool(totals)
  if of_all:  # steps with what they waited for
    totals["train"] = max(totals.get("train", 0.0) - totals.get("data", 0.0), 0.0)
  elif over_time is not None:
    totals = {kind: sum(values) for kind, values in over_time["kinds"].items()}
  if not totals:
    return None
  until, known = status(history).until, sum(totals.values())
  wall = until - history.started if of_all and history.started is not None and until is not None else 0.0
  whole = max(wall, known, 1e-9)
  rows = [[_KIND_NAMES.get(kind, kind), span(value), f"{value / whole:.1%}"]
          for kind, value in sorted(totals.items(), key=lambda item: -item[1]) if value]
  if wall:
    rows.append(["everything else", span(whole - known), f"{(whole - known) / whole:.1%}"])
  if over_time is not None:
    over_time["kinds"] = {_KIND_NAMES.get(kind, kind): values for kind, values in over_time["kinds"].items()}
    payload["split"] = over_time
  note = ("Everything else is setting up, the time when no process ran, and steps that were lost with their process."
          if wall else "Of the windows between rows of metrics; the run has not said more.")
  return {"bars": list(over_time["kinds"]) if over_time else [], "totals": rows, "note": note,
          "summary": ", ".join(f"{kind} {share}" for kind, _, share in rows)}


def _not_shown(stream: texts.Stream) -> list[str]:
  if stream.all_steps > len(stream.steps):
    return [f"{len(stream.steps)} of {stream.all_steps:,} steps are shown; the others are in samples/."]
  return []


# ----------------------------------------------------------------------------------------------
# Data, config, what ran, files.


def audit(history: History) -> dict[str, Any] | None:
  """The statistics of the data as the run printed them at its last start, and how much of them was taken."""
  rows = [row for row in sequence(history.starts, -1, "data") if isinstance(row, dict) and row]
  if not rows:
    return None
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
  return {"head": head, "rows": [[number(row.get(key, "")) for key in head] for row in rows], "facts": facts}


def config_tables(config: Mapping[str, Any]) -> dict[str, Any]:
  """What differs from the defaults, and everything."""
  if not config:
    return {"note": "There is no config.json.", "changed": [], "whole": [], "left_out": []}
  changed, note = configs.changed(config)
  whole = [(key, configs.text(value)) for key, value in configs.flat(config).items()]
  most = configs.MOST_KEYS
  left_out = [f"{counted(len(some) - most, 'key')} of {len(some):,} not shown; config.json has them all."
              for some in (changed, whole) if len(some) > most]
  return {"note": note, "changed": changed[:most], "whole": whole[:most], "left_out": left_out}


def start_rows(start: Mapping[str, Any], place: int) -> dict[str, Any]:
  """A start of a process: what is told of it."""
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
  return {"title": f"Start {place}", "rows": [(name, value) for name, value in rows if value]}


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


def files(workdir: Path) -> list[tuple[str, str, str]]:
  """(what, where, how much) of what is in the workdir."""
  found = []
  for what, name in _FILES:
    path = workdir / name
    try:
      if path.is_file():
        found.append((what, str(path), size(path.stat().st_size)))
      elif path.is_dir():
        inside = sorted((entry.name for entry in path.iterdir()), key=lambda entry: (len(entry), entry))
        steps = [f"{int(entry):,}" for entry in inside if entry.isdigit()] if name == "checkpoints" else []
        said = f"of steps {', '.join(steps[:8])}{' …' if len(steps) > 8 else ''}" if steps else (
            counted(len(inside), "file"))
        found.append((what, str(path), said))
    except OSError as e:
      found.append((what, str(path), f"cannot be read: {e.strerror}"))
  return found
