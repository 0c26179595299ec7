"""Weft's losses and gradient norms are TRL's, step by step, on the tiny model of benchmarks/parity."""

import json
import sys

import numpy as np
import pytest

from benchmarks.parity import __main__ as parity
from benchmarks.parity import rows, settings
from benchmarks.parity.weft_config import get_config, with_labels
from tests import tiny
from tests.benchmarks.make_trl_losses import FILE, PARTS, STEPS
from trainer import train
from trainer.telemetry.writers import read_rows

TRL = json.loads(FILE.read_text())


@pytest.mark.parametrize("part", PARTS)
def test_losses_and_gradient_norms_are_trls(tmp_path, part):
  folder = tmp_path / part
  settings.write(folder, part, None, None, steps=STEPS)
  train(get_config(str(folder)), folder / "weft")
  if part == "grpo":
    assert json.loads((folder / "advantages.json").read_text()) == pytest.approx(TRL[part]["advantages"], abs=1e-6)
  else:  # TRL trained these rows in this order, and was given the same mismatched completions
    assert json.loads((folder / "order.json").read_text()) == TRL[part]["order"]
  ours = [row for row in read_rows(folder / "weft" / "metrics.jsonl") if "grad_norm" in row]
  # GRPO's loss is 0 on policy, and its gradient a small difference of large ones.
  for key, rtol in (("loss", 2e-5), ("grad_norm", 1e-4 if part == "grpo" else 2e-5)):
    np.testing.assert_allclose([row[key] for row in ours], [step[key] for step in TRL[part]["steps"]], rtol, atol=1e-6)


def test_every_row_is_trained_once():
  for part in set(PARTS) - {"grpo"}:
    taken = [row["row"] for step in TRL[part]["order"] for row in step]
    assert sorted(taken) == list(range(STEPS * settings.TINY[part]["batch_size"]))


def test_kto_compares_with_completions_of_other_prompts():
  made = rows.rows("kto", rows.questions(None, STEPS * settings.TINY["kto"]["batch_size"]))
  pairs = [(made[row["row"]], made[row["other"]]) for step in TRL["kto"]["order"] for row in step]
  assert all(row["completion"] != other["completion"] for row, other in pairs)


def test_labels_as_trls_have_what_follows_the_last_trained_token():
  row = dict(tokens=np.array([7, 8, 9, 5, 0]), segment_ids=np.array([1, 1, 1, 1, 0]),
             loss_weights=np.array([0.0, 0.0, 1.0, 0.0, 0.0]))
  assert with_labels(row) == {"input_ids": [7, 8, 9, 5], "labels": [-100, -100, 9, 5]}


def test_other_settings_than_those_of_results_are_refused(tmp_path):
  settings.write(tmp_path / "sft", "sft", None, None, steps=2)
  with pytest.raises(ValueError, match="results of other settings"):
    settings.write(tmp_path / "sft", "sft", None, None, steps=3)


def test_table_and_picture(tmp_path):
  steps = [dict(loss=2.0, grad_norm=4.0), dict(loss=1.0, grad_norm=3.0)]
  pair = parity.Pair("sft", steps, [steps[0], dict(loss=1.25, grad_norm=2.0)])
  assert (pair.apart("loss"), pair.apart("grad_norm", relative=True)) == (0.25, 0.5)
  assert parity.table([pair]).splitlines()[-1] == (
      "| sft | 2 | 2.000000, 1.000000 | 2.000000, 1.250000 | 2.5e-01 | 5.0e-01 |")
  parity.draw([pair], tmp_path / "curves.svg")
  assert (tmp_path / "curves.svg").read_text().count("<svg") == 1


def test_means_of_seeds_agree_where_they_lie_in_the_peers_range():
  def steps(*losses):
    return [dict(loss=loss, grad_norm=1.0) for loss in losses]

  one = parity.Pair("bf16", steps(4.0, 2.0), steps(5.0, 2.5))
  other = parity.Pair("bf16", steps(6.0, 4.0), steps(4.0, 3.0))
  both = parity.of_seeds("bf16", [one, other])
  assert (both.name, both.weft, both.peer) == ("bf16, 2 seeds", steps(5.0, 3.0), steps(4.5, 2.75)) and both.agrees()
  apart = parity.of_seeds("bf16", [one, other._replace(weft=steps(6.1, 4.0))])  # 5.05, above all of the peer's
  assert not apart.agrees()
  assert not one.agrees() and one._replace(name="kto, TRL as it is").agrees()


def test_each_seed_has_its_rows_and_all_share_a_model(tmp_path):
  for seed in range(settings.SEEDS["bf16"]):
    settings.write(tmp_path / "bf16" / str(seed), "bf16", None, None, steps=2, seed=seed)
    config = get_config(str(tmp_path / "bf16" / str(seed)))
    assert (config.seed, config.precision.compute, config.precision.params) == (seed, "bfloat16", "float32")
    assert config.model.hf == str((tmp_path / "model").resolve())


def test_command_with_trl(tmp_path):
  pytest.importorskip("trl")
  command = [sys.executable, "-m", "benchmarks.parity", "sft", "--tiny", "--steps=3", f"--peer={sys.executable}",
             f"--out={tmp_path}"]
  done = tiny.run(command)
  assert done.returncode == 0, done.stdout + done.stderr
  assert "| sft | 3 |" in done.stdout
