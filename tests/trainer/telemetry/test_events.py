"""What a run says is written, once, and stays with the step that it is about."""

import json
import logging
import types

import pytest
from absl import logging as absl_logging

from tests import tiny
from trainer import train
from trainer.callbacks import Callback
from trainer.telemetry.events import MOST_WARNINGS, Notes, read_notes


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return tiny.write_corpus(tmp_path_factory.mktemp("corpus"))


class Speaks(Callback):
  """Notes at some steps; stops or fails at others."""

  def __init__(self, stop: int = 0, fail: int = 0):
    self._stop, self._fail = stop, fail

  def on_optimizer_step(self, run):
    if run.step == 2:
      absl_logging.warning("something odd: %d", 7)
      absl_logging.warning("something odd: %d", 7)
      logging.getLogger("a.library").warning("of a library")
      logging.getLogger("a.library").info("not a warning")
    if run.step in (2, 5):
      run.note("health", "a_sign", f"text of {run.step}.", "do this")
    if run.step == self._stop:
      run.stop_requested = "SIGTERM"
    if run.step == self._fail:
      raise RuntimeError("broken on purpose")


def config(corpus, **arguments):
  c = tiny.config(corpus, ckpt_steps=3, evals={})
  c.callbacks.speaks = dict(type="tests.trainer.telemetry.test_events.Speaks", **arguments)
  return c


def told(workdir):
  return [(row["step"], row["kind"], row["name"], row["text"], row["advice"]) for row in
          read_notes(workdir / "notes.jsonl")]


def test_notes_and_warnings_are_written_once_and_shown(corpus, tmp_path, capsys):
  train(config(corpus), tmp_path)
  assert [row for row in told(tmp_path) if row[1] != "info"] == [
      (2, "warning", "test_events", "something odd: 7", ""), (2, "warning", "test_events", "of a library", ""),
      (2, "health", "a_sign", "text of 2.", "do this"), (5, "health", "a_sign", "text of 5.", "do this")]
  assert "health, step 5: text of 5. do this" in capsys.readouterr().out
  before = told(tmp_path)
  absl_logging.warning("after the run")
  assert told(tmp_path) == before


def test_a_crash_and_a_stop_stay_and_what_is_done_again_is_said_once(corpus, tmp_path):
  with pytest.raises(RuntimeError, match="broken on purpose"):
    train(config(corpus, fail=5), tmp_path)
  assert told(tmp_path)[-1] == (5, "error", "RuntimeError", "broken on purpose", "")
  train(config(corpus, stop=7), tmp_path)  # from the checkpoint of step 3
  assert told(tmp_path)[-1] == (7, "stop", "stopped", "Stopped by SIGTERM after step 7 of 8.", "")
  train(config(corpus), tmp_path)
  signs = [row[:2] for row in told(tmp_path)]
  assert signs == [(2, "warning"), (2, "warning"), (2, "health"), (5, "error"), (5, "health"), (7, "stop")]


def test_an_unknown_kind_is_refused():
  with pytest.raises(ValueError, match="found kind 'news'; allowed: health, warning"):
    Notes().note("news", "a", "b")


def test_warnings_are_bounded_and_the_rest_counted(corpus, tmp_path):

  class Run:
    step, total_steps, workdir, say = 1, 1, tmp_path, print

  notes = Notes()
  notes.on_train_begin(Run)
  for number in range(MOST_WARNINGS + 5):
    absl_logging.warning("number %d", number)
  notes.on_train_end(Run)
  rows = told(tmp_path)
  assert len(rows) == MOST_WARNINGS + 1
  assert rows[-1][3] == "5 further warnings are not written here."


def test_a_file_that_was_cut_is_read_as_far_as_it_goes(tmp_path):
  path = tmp_path / "notes.jsonl"
  good = json.dumps({"step": 3, "kind": "info", "text": "x"})
  path.write_text(f'{good}\n{{"step": "no"}}\n[1]\n{{"step": 4, "kind": "other"}}\n{good[:9]}', encoding="utf-8")
  assert read_notes(path) == [{"step": 3, "time": "", "kind": "info", "name": "", "text": "x", "advice": ""}]
  assert read_notes(tmp_path / "none") == []


def noting(tmp_path, step=3, total=9):
  notes, said = Notes(), []
  run = types.SimpleNamespace(workdir=tmp_path, step=step, total_steps=total, say=said.append, stop_requested="SIGTERM")
  notes.on_train_begin(run)
  return notes, run, said


def test_notes_of_other_processes_are_not_written(tmp_path, monkeypatch):
  monkeypatch.setattr("jax.process_index", lambda: 1)
  notes, run, said = noting(tmp_path)
  run.note("info", "a", "text")
  notes.on_train_end(run)
  assert said == [] and list(tmp_path.iterdir()) == []


def test_a_note_that_cannot_be_written_is_told_and_the_run_goes_on(tmp_path, capsys):
  notes, run, said = noting(tmp_path)
  (tmp_path / "notes.jsonl").unlink()
  (tmp_path / "notes.jsonl").mkdir()
  run.note("health", "a", "text", "advice")
  notes._listen_no_more()
  assert said == ["health, step 3: text advice"]
  assert capsys.readouterr().err == f"A note was not written to {tmp_path}/notes.jsonl: Is a directory\n"
  with pytest.raises(ValueError, match="^found kind 'helth'; allowed: "):
    run.note("helth", "a", "text")


def test_only_a_run_that_was_stopped_says_so(tmp_path):
  for step, texts in ((9, []), (3, ["Stopped by SIGTERM after step 3 of 9."])):
    notes, run, _ = noting(tmp_path, step)
    notes.on_train_end(run)
    assert [row["text"] for row in read_notes(tmp_path / "notes.jsonl")] == texts


def test_what_was_said_up_to_the_step_that_a_run_goes_on_from_stays(tmp_path):
  """Of later steps only what happened to the process."""
  notes, run, _ = noting(tmp_path, 3)
  for step in (3, 4):
    run.step = step
    for kind in ("health", "warning"):
      run.note(kind, "a", f"{kind} {step}")
  notes._listen_no_more()
  noting(tmp_path, 3)[0]._listen_no_more()
  assert [row["text"] for row in read_notes(tmp_path / "notes.jsonl")] == ["health 3", "warning 3", "warning 4"]
