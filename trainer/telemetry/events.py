"""What a run has to say besides its numbers, for people: `notes.jsonl` in the workdir, a JSON object a line.

    {"step": 120, "time": "2026-01-31T12:00:00+00:00", "kind": "health", "name": "input_bound", "text": …, "advice": …}

`kind` is one of KINDS: `health`, what trainer/telemetry/diagnostics.py has recognised; `warning`, what was logged as
one; `info`; `rollback`, `stop` and `error`, turns that the run took. Callbacks write by `run.note(kind, name, text,
advice)`, which also shows it. A run that goes on from an earlier step drops what will be said again: `health`, `info`
and `rollback` of later steps; what happened to its processes stays.
"""

import datetime
import json
import logging
import sys
from pathlib import Path
from typing import Any

import jax

from trainer import atomic
from trainer.callbacks import Callback

KINDS = ("health", "warning", "info", "rollback", "stop", "error")
# Of a step that is taken again they are said again.
_OF_STEPS = ("health", "info", "rollback")
# Different warnings that one process writes; further ones are counted.
MOST_WARNINGS = 200


class Notes(Callback):
  """Writes notes, those of other callbacks and the warnings that are logged while the run trains, in process 0."""

  def __init__(self) -> None:
    self._path, self._handler, self._run = None, None, None
    self._seen: set[str] = set()
    self._left_out = 0

  def on_train_begin(self, run):
    self._run, run.note = run, self.note
    if jax.process_index() != 0:
      return
    self._path = run.workdir / "notes.jsonl"
    rows = [row for row in read_notes(self._path) if row["kind"] not in _OF_STEPS or row["step"] <= run.step]
    atomic.write(self._path, "".join(json.dumps(row) + "\n" for row in rows))
    self._handler = _Handler(self)
    logging.getLogger().addHandler(self._handler)

  def note(self, kind: str, name: str, text: str, advice: str = "") -> None:
    """Writes a note of the run's present step, and shows it. Every process may call it; one does so.

    Raises:
      ValueError: no such kind.
    """
    if kind not in KINDS:
      raise ValueError(f"found kind {kind!r}; allowed: {', '.join(KINDS)}")
    if self._path is not None:
      self._run.say(f"{kind}, step {self._run.step}: {text} {advice}".rstrip() if kind == "health" else text)
      self._write(kind, name, text, advice)

  def warn(self, name: str, text: str) -> None:
    """A logged warning: each text once."""
    if text not in self._seen and len(self._seen) < MOST_WARNINGS:
      self._seen.add(text)
      self._write("warning", name, text)
    elif text not in self._seen:
      self._left_out += 1

  def _write(self, kind: str, name: str, text: str, advice: str = "") -> None:
    row = {"step": self._run.step, "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
           "kind": kind, "name": name, "text": text, "advice": advice}
    try:
      with open(self._path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    except OSError as e:  # the metrics, which a run needs, will say so themselves
      sys.stderr.write(f"A note was not written to {self._path}: {e.strerror}\n")

  def on_train_end(self, run):
    if run.step < run.total_steps and self._path is not None:
      self._write("stop", "stopped", f"Stopped by {run.stop_requested} after step {run.step} of {run.total_steps}.")
    self._listen_no_more()

  def on_error(self, run, error):
    if self._path is not None:
      self._write("error", type(error).__name__, str(error)[:2000] or "no message")
    self._listen_no_more()

  def _listen_no_more(self):
    if self._handler is None:
      return
    logging.getLogger().removeHandler(self._handler)
    self._handler = None
    if self._left_out:
      self._write("warning", "warnings", f"{self._left_out} further warnings are not written here.")


class _Handler(logging.Handler):
  """What is logged as a warning, or worse, becomes a note."""

  def __init__(self, notes: Notes):
    super().__init__(logging.WARNING)
    self._notes = notes

  def emit(self, record: logging.LogRecord) -> None:
    self._notes.warn(Path(record.pathname).stem, record.getMessage()[:2000])


def read_notes(path: str | Path) -> list[dict[str, Any]]:
  """The notes of a file, [] if there is none. A line that a crash cut short, or that is no note, is left out."""
  path = Path(path)
  if not path.exists():
    return []
  rows = []
  for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
    try:
      row = json.loads(line)
      row["step"] = int(row["step"])
      if row["kind"] in KINDS:
        rows.append({"time": "", "name": "", "text": "", "advice": ""} | row)
    except (ValueError, KeyError, TypeError):
      continue
  return rows
