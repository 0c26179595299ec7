"""A step of a run again: the batch and the parameters that it had, whatever was saved in between."""

import json

import numpy as np
import pytest

from tests import tiny
from trainer import train
from trainer.errors import ConfigError
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
