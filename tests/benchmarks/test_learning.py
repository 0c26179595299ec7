"""The sides of benchmarks/parity/learning.py and characters.py are given the same; tables say what was found."""

import json

import jax
import numpy as np
import pytest

from benchmarks.parity import characters, learning
from tests import tiny
from trainer import train
from trainer.telemetry.writers import read_rows


def curve(side, *right, seconds=1.0):
  return learning.Curve(side, list(range(len(right))), list(right), seconds)


def test_bands_and_tables_of_seeds(tmp_path):
  found = {"weft": [curve("weft", 0.1, 0.5), curve("weft", 0.3, 0.6, seconds=3.0)], "trl": [curve("trl", 0.2, 0.4)]}
  np.testing.assert_allclose(learning.band(found["weft"]), [[0.2, 0.55], [0.1, 0.5], [0.3, 0.6]])
  assert learning.table(found).splitlines()[2:] == [
      "| 0 | 0.200 (0.100 to 0.300) | 0.200 (0.200 to 0.200) |",
      "| 1 | 0.550 (0.500 to 0.600) | 0.400 (0.400 to 0.400) |",
      "| wall time | 2 s | 1 s |"]
  learning.draw(found, tmp_path / "bands.svg")
  assert (tmp_path / "bands.svg").read_text().count("<svg") == 1


def test_both_sides_learn_from_exercises_that_are_not_evaluated(tmp_path):
  (tmp_path / "model").mkdir()
  tiny.hf_folder(tmp_path / "model")
  learning.write(tmp_path, None, learning.SETTINGS | {"steps": 4})
  rows = {split: [json.loads(line) for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
          for split in ("train", "validation")}
  assert len(rows["train"]) > 18_000 and len(rows["validation"]) == learning.SETTINGS["held_out"]
  assert not {row["prompt"] for row in rows["train"]} & {row["prompt"] for row in rows["validation"]}
  for row in rows["train"][:50]:
    assert eval(row["prompt"].removesuffix("= ")) == int(row["completion"])
  config = learning.get_config(f"{tmp_path},7")
  assert (config.seed, config.total_steps, config.rollout.num_prompts, config.rollout.group_size) == (7, 4, 32, 8)
  with pytest.raises(ValueError, match="results of other settings"):
    learning.write(tmp_path, None, learning.SETTINGS)


def test_characters_are_tokens_and_as_many_are_predicted_as_by_the_peer(tmp_path):
  text = "To be, or not to be: that is the question.\n" * 60
  (tmp_path / "input.txt").write_text(text)
  characters.write(tmp_path / "out", tmp_path / "input.txt", characters.SETTINGS | dict(steps=10, warmup=1, width=32))
  settings = json.loads((tmp_path / "out" / "settings.json").read_text())
  assert settings["vocab"] == sorted(set(text))
  assert "".join((tmp_path / "out" / f"{part}.txt").read_text() for part in ("train", "validation")) == text
  run = train(characters.get_config(f"{tmp_path / 'out'},weft,0"), tmp_path / "w")
  logged = [row for row in read_rows(tmp_path / "w" / "metrics.jsonl") if "trained_tokens" in row]
  assert logged[-1]["trained_tokens"] == settings["rows"] * settings["length"]
  # 12 of a block's matrices, embeddings of characters and places, and norms without biases.
  width, layers = 32, settings["layers"]
  count = sum(part.size for part in jax.tree.leaves(run.state["params"]))
  assert count == 12 * layers * width**2 + (len(settings["vocab"]) + 65) * width + (2 * layers + 1) * width
  losses = [row["eval/val/loss"] for row in read_rows(tmp_path / "w" / "metrics.jsonl") if "eval/val/loss" in row]
  assert losses[-1] < losses[0] == pytest.approx(np.log(len(settings["vocab"])), abs=0.2)
