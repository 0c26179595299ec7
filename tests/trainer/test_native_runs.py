"""Runs on images in their own sizes, from a folder to a folder: tests/native.py has the folder and the rows."""

import numpy as np
import pytest

from models import hf
from tests import native
from trainer import train
from trainer import tree as tree_lib
from trainer.config import defaults, source
from trainer.export import command as export


def configured(tmp_path):
  config = defaults()
  config.strategy.name = "sft"
  config.model.hf = str(native.folder(tmp_path / "hf"))
  config.input.sources.rows = source(type="jsonl", path=str(native.rows(tmp_path / "data")))
  config.update(seq_len=96, batch_size=4, total_steps=4, log_steps=1)
  config.optimizer.learning_rate = 1e-2
  return config


@pytest.mark.parametrize("part", ["vision"])
def test_a_run_with_a_frozen_tower_learns_and_is_exported_whole(tmp_path, part):
  """freeze_vit of VeOmni is one line here: the tower's arrays stay to the bit, the others do not."""
  config = configured(tmp_path)
  config.optimizer.freeze = (f"^{part}/",)
  train(config, str(tmp_path / "run"))
  out = export.export(tmp_path / "run", tmp_path / "out")
  before, after = (tree_lib.flatten(hf.load(path)[1]) for path in (tmp_path / "hf", out))
  assert before.keys() == after.keys()
  for path in before:
    assert np.array_equal(before[path], after[path]) == path.startswith(part), path
  kept = ("preprocessor_config.json", "tokenizer.json")
  assert all((out / name).is_file() for name in kept)
  assert hf.architecture(out)[1] == hf.architecture(tmp_path / "hf")[1]
