"""Runs on videos, from a folder to a folder: tests/native.py has the folder and the rows."""

import json
import re

import numpy as np
import pytest

from input_pipeline.examples.roles import COMPLETION
from models import hf
from tests import native
from tests.trainer.report.test_pages import pictures
from trainer import program as program_lib
from trainer import train
from trainer import tree as tree_lib
from trainer.config import defaults, reward, source, strategy
from trainer.export import command as export
from trainer.generate import image_tokens
from trainer.modes import inspect
from trainer.rollouts import rollout


def configured(tmp_path, name: str = "qwen2_5_vl", rows=None):
  config = defaults()
  config.strategy.name = "sft"
  config.model.hf = str(native.folder(tmp_path / "hf", name))
  config.input.sources.rows = source(type="jsonl", path=str(rows or native.video_rows(tmp_path / "data")))
  config.update(seq_len=192, batch_size=4, total_steps=2, log_steps=1)
  config.optimizer.learning_rate = 1e-2
  return config


@pytest.mark.parametrize("name", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def test_a_run_learns_from_videos_and_is_exported_whole(tmp_path, name):
  """Every array is trained, frames included; the export says how frames are taken, as the config has it."""
  config = configured(tmp_path, name)
  config.model.vision.video.fps = 3.0
  run = train(config, str(tmp_path / "run"))
  # What a token takes counts the tower, forward and backward.
  whole = run.model.flops_per_token(192, images_per_row=run.data.images_per_row, tower_frozen=False)
  assert run.chrono._flops_per_token == whole > run.model.flops_per_token(192)
  out = export.export(tmp_path / "run", tmp_path / "out")
  before, after = (tree_lib.flatten(hf.load(path)[1]) for path in (tmp_path / "hf", out))
  assert before.keys() == after.keys()
  assert not any(np.array_equal(before[path], after[path]) for path in before)
  told = json.loads((out / "video_preprocessor_config.json").read_text())
  given = json.loads((tmp_path / "hf" / "video_preprocessor_config.json").read_text())
  assert told == {**given, "do_sample_frames": True, "fps": 3.0, "num_frames": None,
                  "min_frames": given.get("min_frames", 4), "max_frames": 768}
  assert hf.architecture(out)[1] == hf.architecture(tmp_path / "hf")[1] | {"vision.video.fps": 3.0}


def spied(take, seen):
  def spy(self, run):
    seen.append(take(self, run))
    return seen[-1]
  return spy


def test_what_is_trained_is_what_was_sampled_about_its_own_video(tmp_path):
  """On the first step the policy is the one that sampled: its ratios are 1 only if it sees the same frames."""
  rows = [json.loads(line) for line in native.video_rows(tmp_path / "data", 4).read_text().splitlines()]
  (tmp_path / "data" / "rows.jsonl").write_text("".join(
      json.dumps({"prompt": row["messages"][:1]}) + "\n" for row in rows))
  c = configured(tmp_path, rows=tmp_path / "data" / "rows.jsonl")
  c.strategy = strategy("grpo")
  c.rollout.update(num_prompts=2, group_size=2, max_new_tokens=4)
  c.rollout.rewards.a = reward(type="regex", pattern="[a-m]")
  seen: list = []
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(rollout.Rollouts, "take", spied(rollout.Rollouts.take, seen))
    train(c, tmp_path / "w")
  for batch in (batch for batch in seen if batch is not None):
    videos = np.isin(batch["tokens"], [native.VIDEO]) & (batch["image_index"] > 0)
    held = batch["image_grid"][np.nonzero(videos)[0], batch["image_index"][videos] - 1]
    assert batch["images"].shape[-1] == 6 and videos.any(1).sum() >= 1 and len({*held[:, 5].tolist()}) > 1
    assert (batch["segment_roles"] == COMPLETION).sum() == 4
  lines = [json.loads(line) for line in (tmp_path / "w" / "metrics.jsonl").read_text().splitlines()]
  first = next(line for line in lines if line.get("step") == 1 and "policy/ratio_mean" in line)
  assert first["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)
  shown = pictures((tmp_path / "w" / "samples" / "rollout-00000001.html").read_text())
  assert max(picture.shape[1] / picture.shape[0] for picture in shown) > 4  # frames from left to right


@pytest.mark.slow  # what goes from rows to batches, and what a policy computes of videos, others have by day
def test_pairs_about_videos_are_preferred(tmp_path):
  rows = [json.loads(line) for line in native.video_rows(tmp_path / "data", 4).read_text().splitlines()]
  (tmp_path / "data" / "rows.jsonl").write_text("".join(json.dumps({
      "prompt": row["messages"][:1], "chosen": row["messages"][1:],
      "rejected": [{"role": "assistant", "content": "green"}]}) + "\n" for row in rows))
  c = configured(tmp_path, rows=tmp_path / "data" / "rows.jsonl")
  c.strategy = strategy("dpo")
  c.update(seq_len=512, total_steps=2)
  train(c, tmp_path / "w")
  lines = [json.loads(line) for line in (tmp_path / "w" / "metrics.jsonl").read_text().splitlines()]
  losses = [line["loss"] for line in lines if "loss" in line]
  assert losses[0] == pytest.approx(np.log(2), rel=1e-5) and losses[-1] < losses[0]


def test_what_a_video_became_is_shown_before_it_is_trained(tmp_path, capsys):
  """Its frames from left to right, its tokens in short; and how many videos there are."""
  inspect.inspect(configured(tmp_path), tmp_path / "w")
  said = capsys.readouterr().out
  names, counts = ([line for line in said.splitlines() if line.startswith(start)][0].split("  ") for start in (
      "source", "rows  "))
  table = dict(zip(filter(None, map(str.strip, names)), filter(None, map(str.strip, counts)), strict=True))
  assert re.search(r"\|video_pad\|> × \d+⟩", said) and (table["images"], table["videos"]) == ("4", "8")
  shown = pictures((tmp_path / "w" / "inspect.html").read_text())
  assert sum(picture.shape[1] > 3 * picture.shape[0] for picture in shown) >= 4


def test_the_plan_has_places_for_tiles_of_two_frames(tmp_path):
  """And counts what the tower does with them: a tile sees those of its frame, which has up to 6 of them, or of an image
  of up to 12."""
  config = configured(tmp_path, "qwen3_vl")
  config.plan.images_per_row = 40
  config, _ = program_lib.resolve(config)
  program_lib.settle(config, "cpu")
  model = program_lib.make_model(config, 264)
  batch = program_lib.abstract_batch(config, model, 2)
  assert batch["images"].shape == (2, 40, 8, 8, 6) and batch["image_grid"].shape == (2, 40, 6)
  per_tile = [model.flops_per_token(192, images_per_row=count) - model.flops_per_token(192) for count in (12, 24, 48)]
  np.testing.assert_allclose(per_tile, [per_tile[0], 2 * per_tile[0], 4 * per_tile[0]], rtol=1e-9)


def test_the_layout_of_a_model_that_sees_videos(tmp_path):
  model, _ = hf.load(native.folder(tmp_path))
  assert image_tokens.layout_of(model) == image_tokens.Layout(native.IMAGE, 1, 8, "causal", True, native.VIDEO, 2)
