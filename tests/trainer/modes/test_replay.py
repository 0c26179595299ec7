"""A step of a run again: the batch and the parameters that it had, whatever was saved in between."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from tests import tiny
from trainer import train
from trainer.config import defaults
from trainer.errors import ConfigError
from trainer.modes import replay as replay_lib
from trainer.modes.inspect import inspect
from trainer.modes.replay import replay
from trainer.telemetry.writers import read_rows

pytestmark = pytest.mark.devices(8)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return tiny.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module", params=[1, 2], ids=["whole", "micro-batches"])
def begun(request, corpus, tmp_path_factory):
  """A run with dropout, whose checkpoints are of some steps only."""
  config = tiny.config(corpus, total_steps=8, ckpt_steps=3, keep_last=5, grad_accum_steps=request.param)
  config.model.dropout = 0.3
  config.mesh.update(data=4, tensor=2)
  workdir = tmp_path_factory.mktemp("run")
  train(config, workdir)
  return config, workdir


@pytest.mark.parametrize("step", [1, 3, 5, 8])
def test_the_rows_losses_add_up_to_what_was_logged(begun, step, capsys):
  """From the beginning, right after a checkpoint, and after steps that are taken again."""
  config, workdir = begun
  before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*") if "replay" not in str(path)}
  out = replay(config, workdir, step)
  rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
  logged = {row["step"]: row["loss"] for row in read_rows(workdir / "metrics.jsonl") if "loss" in row}[step]
  loss = sum(r["loss"] * r["weight"] for r in rows) / sum(r["weight"] for r in rows)
  np.testing.assert_allclose(loss, logged, rtol=1e-6)
  assert [row["row"] for row in rows] == list(range(8)) and len({row["loss"] for row in rows}) == 8
  assert all(len(row["tokens"]) == len(row["loss_weights"]) and row["text"] for row in rows)
  shown = capsys.readouterr().out
  assert f"update {step}: 8 rows, 0 with a loss that is not finite" in shown and f"{logged:.6f}" in shown
  assert f"{max(row['loss'] for row in rows):.6f}" in shown
  # Nothing else has changed, and nothing is left behind.
  assert {path: path.stat().st_mtime_ns for path in before} == before
  assert [path.name for path in (workdir / "replay").iterdir() if path.is_dir()] == []


def test_a_begun_run_can_be_inspected(begun):
  assert inspect(*begun, rows=1).exists()


@pytest.mark.parametrize("step, expected", [
    (0, "found --step=0; allowed: the number of an update"), (None, "found --step=None"),
    (9, "found --step=9; the run has 8 steps")])
def test_steps_that_are_not_there(begun, step, expected):
  with pytest.raises(ConfigError, match=expected):
    replay(*begun, step)


def test_a_folder_without_a_run_and_other_configs_are_refused(begun, tmp_path):
  with pytest.raises(ConfigError, match="holds no run"):
    replay(begun[0], tmp_path, 1)
  other = begun[0].copy_and_resolve_references()
  other.seed = 7
  with pytest.raises(ConfigError, match="was begun with another config"):
    replay(other, begun[1], 1)


@pytest.fixture
def recorded(monkeypatch, tmp_path):
  """`recorded(stop_requested)` replays step 4 of a run of nothing, which ends with step 3: (config, past) of it."""
  def of(config, stop_requested=""):
    given = []

    def train(*asked):
      given.append(asked)
      return SimpleNamespace(stop_requested=stop_requested, step=3)

    workdir = tmp_path / "w"
    workdir.mkdir(exist_ok=True)
    (workdir / "config.json").write_text("{}")
    monkeypatch.setattr(replay_lib, "train", train)
    monkeypatch.setattr(replay_lib.program_lib, "resolve", lambda config: (config, []))
    monkeypatch.setattr(replay_lib.program_lib, "settle", lambda config, backend: None)
    monkeypatch.setattr(replay_lib.workdir_lib, "prepare", lambda config, workdir: None)
    monkeypatch.setattr(replay_lib.position, "find", lambda workdir, step: ("past of", workdir, step))
    monkeypatch.setattr(replay_lib, "_micro_batches", lambda config, past, begun, step: 100 * begun + step)
    replay(config, workdir, 4)
    return given
  return of


@pytest.mark.parametrize("asked, error, words", [
    ("SIGTERM", KeyboardInterrupt, "^$"), ("", ConfigError, "^found --step=4; the run ends with step 3.$")])
def test_a_run_that_ends_before_the_step_is_told_or_was_asked_to(recorded, asked, error, words):
  with pytest.raises(error, match=words):
    recorded(defaults(), asked)


def test_what_is_run_again_saves_and_evaluates_nothing(recorded, monkeypatch, tmp_path):
  given = []

  def train(config, folder, past):
    given.append((config, past))
    raise replay_lib._Done

  config = defaults()
  config.update(ckpt_steps=5, ckpt_tokens=7, keep_steps=3, keep_best="loss", report=True)
  config.rollout.update(num_prompts=2, concurrent=True)
  with pytest.raises(ConfigError):
    recorded(config)
  config.rollout.concurrent = True
  monkeypatch.setattr(replay_lib, "train", train)
  (tmp_path / "w" / "checkpoints" / "2").mkdir(parents=True)
  out = replay(config, tmp_path / "w", 4)
  c, past = given[0]
  assert (c.ckpt_steps, c.ckpt_tokens, c.keep_steps, c.keep_best, c.report) == (0, -1, 0, None, False)
  assert (c.rollout.concurrent, c.rollout.schedule) == (False, str(tmp_path / "w" / "schedule.jsonl"))
  assert c.input.cache_dir is None and c.grad_accum_steps == 204 and past == ("past of", tmp_path / "w", None)
  assert dict(c.callbacks.replay) == dict(type="trainer.modes.replay.Replay", step=4, out=str(out)) and not c.evals
  assert out == tmp_path / "w" / "replay" / "step-4.jsonl"
  assert list((tmp_path / "w" / "replay").iterdir()) == []


def test_it_begins_at_the_newest_checkpoint_before_the_step(tmp_path):
  for number in ("3", "10", "7", "7.bad", "12"):
    (tmp_path / "w" / "checkpoints" / number).mkdir(parents=True)
    (tmp_path / "w" / "checkpoints" / number / "of").write_text(number)
  (tmp_path / "w" / "tokenizer.json").write_text("{}")
  for step, begun in ((10, 7), (11, 10), (4, 3), (3, None)):
    folder = tmp_path / f"to-{step}"
    folder.mkdir()
    assert replay_lib._begin(tmp_path / "w", folder, step) == begun
    assert [path.name for path in folder.glob("checkpoints/*")] == ([] if begun is None else [str(begun)])
    assert (folder / "tokenizer.json").exists()
    if begun is not None:
      file = folder / "checkpoints" / str(begun) / "of"
      assert file.read_text() == str(begun) and file.stat().st_nlink > 1


def test_samples_that_are_not_those_that_were_logged_are_told(tmp_path, capsys):
  def write(folder, **texts):
    (tmp_path / folder).mkdir(exist_ok=True)
    for name, rows in texts.items():
      (tmp_path / folder / f"rollout-{name}.jsonl").write_text(
          "".join(json.dumps(dict(completion=text, reward=reward)) + "\n" for text, reward in rows), encoding="utf-8")

  write("again", a=[("x", 1), ("y", 2), ("z", 3)], b=[("é", 1)], c=[("only here", 1)])
  write("logged", a=[("x", 1), ("y", 9), ("w", 3)], b=[("é", 1)], d=[("only there", 1)])
  replay_lib._compare_samples(tmp_path / "again", tmp_path / "logged")
  assert capsys.readouterr().out.startswith(
      "This is NOT what was trained on: of rollout-a, 2 of 3 completions are those that were logged, and where")
  write("again", a=[("x", 1)], b=[("é", 2)])
  replay_lib._compare_samples(tmp_path / "again", tmp_path / "logged")
  said = capsys.readouterr().out.splitlines()
  assert ["rollout-a, 1 of 3" in said[0], "rollout-b, 1 of 1" in said[1], len(said)] == [True, True, 2]


def test_the_run_is_ended_by_what_it_cannot_be(monkeypatch, tmp_path):
  callback = replay_lib.Replay(5, str(tmp_path / "step-5.jsonl"))
  callback.on_train_begin(SimpleNamespace(total_steps=5))
  with pytest.raises(ConfigError, match="^found --step=5; the run has 4 steps.$"):
    callback.on_train_begin(SimpleNamespace(total_steps=4))
  asked = []
  run = SimpleNamespace(step=3, settle=lambda: asked.append("settled"),
                        data=SimpleNamespace(take=lambda run: asked.append("taken")))
  callback.on_step_begin(run)
  assert asked == []  # its update is not the next one
  run.step = 4
  with pytest.raises(KeyboardInterrupt):
    callback.on_step_begin(run)
  assert asked == ["settled", "taken"]
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  with pytest.raises(ConfigError, match="^--mode=replay runs in one process; give it a mesh of its devices.$"):
    callback.on_train_begin(SimpleNamespace(total_steps=5))


@pytest.mark.parametrize("pieces, begun, step, sizes", [
    ([(0, 8, 2)], 0, 3, 2),  # micro-batches of 4, of 8 rows
    ([(0, 8, 4), (4, 8, 2)], 0, 6, 2),  # as that update had them, whatever others had
    ([(0, 6, 1), (4, 8, 1)], 0, 6, 4),  # one divides all batches that are taken again: 2
    ([(0, 6, 1), (4, 8, 1)], 4, 6, 1),  # after the first are done
])
def test_micro_batches_are_those_of_the_update_if_all_have_whole_ones(monkeypatch, pieces, begun, step, sizes):
  pieces = [SimpleNamespace(step=at, size=size, parts=parts) for at, size, parts in pieces]
  steps = SimpleNamespace(pieces=pieces, at=lambda step: [piece for piece in pieces if piece.step <= step][-1])
  monkeypatch.setattr(replay_lib.position, "steps_of", lambda config, past: steps)
  config = defaults()
  config.batch_size = 8
  assert replay_lib._micro_batches(config, None, begun, step) == sizes
  config.rollout.num_prompts, config.grad_accum_steps = 2, 7
  assert replay_lib._micro_batches(config, None, begun, step) == 7


def test_rows_without_a_finite_loss_are_shown_first_then_the_highest(monkeypatch, tmp_path, capsys):
  """Of four rows: 0.5 · 2 and 3 · 1 of loss and weight, one that is not finite, and one of padding."""
  asked = []

  class Rows:
    def __init__(self, run):
      pass

    def losses(self, batch, step):
      asked.append(step)
      return np.array([1.0, np.nan, 3.0, 0.0]), np.array([2.0, 1.0, 1.0, 0.0])

    def source(self, batch, row):
      return f"source {row}"

    def write(self, out, batch, sums, weights, of_tokens):
      asked.append((out.name, sums[2], weights[0], of_tokens))

  class Microscope:
    def __init__(self, run, rows):
      pass

    def look(self, batch, step):
      asked.append(step)
      return "numbers"

    def page(self, title, batch, of_tokens, losses, order, notes):
      asked.append((title, of_tokens, order, notes))
      return "the page"

  monkeypatch.setattr(replay_lib, "Rows", Rows)
  monkeypatch.setattr(replay_lib, "Microscope", Microscope)
  monkeypatch.setattr(replay_lib.inspect, "row_tokens", lambda batch, row, tokenizer: row)
  monkeypatch.setattr(replay_lib.inspect, "row_text", lambda tokens, row: f"text of {row}")
  batch = {"segment_ids": np.array([[1], [1], [2], [0]]), "tokens": np.zeros((4, 1), int)}
  run = SimpleNamespace(step=4, settle=lambda: None, data=SimpleNamespace(take=lambda run: batch), tokenizer=None,
                        model=SimpleNamespace(vocab_size=5))
  with pytest.raises(replay_lib._Done):
    replay_lib.Replay(5, str(tmp_path / "step-5.jsonl")).on_step_begin(run)
  lines = capsys.readouterr().out.splitlines()
  summary = "update 5: 3 rows, 1 with a loss that is not finite; loss nan"
  assert [line.split() for line in lines[1:5]] == [
      ["row", "loss", "weight", "source"], ["1", "nan", "1", "source", "1"], ["2", "3.000000", "1", "source", "2"],
      ["0", "0.500000", "2", "source", "0"]]
  assert [line for line in lines if line.startswith("text of")] == ["text of 1", "text of 2", "text of 0"]
  assert lines[-1] == summary and (tmp_path / "step-5.html").read_text() == "the page"
  assert asked == [5, 5, ("step-5.jsonl", 3.0, 2.0, "numbers"),
                   ("Update 5: its tokens", "numbers", [1, 2, 0], [summary])]
