"""Rewards by models that score: equal to scores computed apart, on several devices too; and what is refused."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from models import hf
from tests import tiny
from tests.trainer import rollout_runs
from trainer import train
from trainer.config import defaults, reward
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError, DataError
from trainer.rollouts.reward_models import RewardModels
from trainer.rollouts.reward_pool import Group


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A reward model of bytes, whose scores are of the size of a trained one's."""
  folder = tiny.hf_folder(tmp_path_factory.mktemp("scorer") / "hf", head="score", vocab_size=258)
  model, params = hf.load(folder)
  params["score"]["kernel"] = params["score"]["kernel"] * 40
  hf.save(model, params, folder, overwrite=True)
  return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
  return rollout_runs.write_prompts(tmp_path_factory.mktemp("prompts"))


def apart(folder, texts):
  """The score of each text between BOS and EOS, in a row of its own."""
  model, params = hf.load(folder)
  tokenizer = BytesTokenizer()
  tokens = [[tokenizer.bos_id, *text.encode(), tokenizer.eos_id] for text in texts]
  batch = np.array([row + [0] * (160 - len(row)) for row in tokens], np.int32)
  there = np.array([[1] * len(row) + [0] * (160 - len(row)) for row in tokens], np.int32)
  hidden = jax.jit(model.apply)(params, dict(tokens=batch, positions=None, segment_ids=there)).hidden
  last = np.stack([np.asarray(row, np.float64)[len(text) - 1] for row, text in zip(hidden, tokens, strict=True)])
  return (last @ np.asarray(params["score"]["kernel"], np.float64))[:, 0]


def models_of(path, mesh=None, **rollout):
  config = defaults()
  config.precision.params = config.precision.compute = "float32"
  config.rollout.update(dict(batch_size=4) | rollout)
  config.rollout.rewards.taste = reward(type="model", path=str(path), weight=0.5)
  return RewardModels(config, mesh or mesh_lib.make_mesh(dict(data=1), jax.devices()[:1]))


GROUPS = [Group(f"{i} plus one is ", [text * (1 + i) for text in (" two", "", " not known to me at all", " 7")],
                [[0]] * 4, {"answer": "x"}) for i in range(3)]
TEXTS = [group.prompt + completion for group in GROUPS for completion in group.completions]


def test_scores_are_those_of_the_texts_alone(folder):
  values, failed, abstained = models_of(folder).score(GROUPS)
  expected = apart(folder, TEXTS)
  assert np.ptp(expected) > 0.5 and not failed.any() and not abstained.any()
  np.testing.assert_allclose(values.reshape(-1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.devices(8)
def test_so_they_are_on_several_devices(folder):
  mesh = mesh_lib.make_mesh(dict(data=2, fsdp=2, tensor=2))
  values, *_ = models_of(folder, mesh).score(GROUPS)
  np.testing.assert_allclose(values.reshape(-1), apart(folder, TEXTS), rtol=1e-4, atol=1e-4)


def test_rollouts_are_rewarded_by_it_and_go_on_with_the_same(folder, prompts, tmp_path):
  path = shutil.copytree(folder, tmp_path / "scorer")

  def config(**changed):
    c = rollout_runs.config(prompts, None, **changed)
    c.rollout.rewards.taste = reward(type="model", path=str(path))
    return c

  train(config(ckpt_steps=1), tmp_path / "w")
  rows = rollout_runs.table(tmp_path / "w", 1)
  texts = [row["prompt"] + row["completion"] for row in rows]
  np.testing.assert_allclose([row["rewards"]["taste"] for row in rows], apart(folder, texts), rtol=1e-4, atol=1e-4)
  metrics = rollout_runs.rows_of(tmp_path / "w")[1]
  assert metrics["reward"] == pytest.approx(np.mean([row["rewards"]["taste"] for row in rows]), abs=1e-5)
  shutil.rmtree(path)
  tiny.hf_folder(path, seed=5, head="score", vocab_size=258)
  with pytest.raises(ConfigError, match="rollout.rewards.taste.path: .*scorer has the fingerprint .* Give that one"):
    train(config(total_steps=4, allow_config_changes=True), tmp_path / "w")


def test_a_text_that_it_cannot_see_has_no_reward(tmp_path):
  folder = tiny.hf_folder(tmp_path / "short", head="score", vocab_size=258, positions="learned", max_positions=24,
                          norm="layernorm", norm_bias=True, activation="gelu", qkv_bias=True, attention_out_bias=True,
                          mlp_bias=True, tie_embeddings=True)
  group = dataclasses.replace(GROUPS[0], completions=["ok", "much too long for it"], completion_ids=[[0], [0]])
  values, failed, _ = models_of(folder).score([group])
  assert failed.tolist() == [[[False], [True]]] and np.isnan(values).tolist() == failed.tolist()
  with pytest.raises(DataError, match="tokens, where .* sees 24"):
    models_of(folder)._models["taste"].encode(group, "much too long for it")


def test_what_scores_nothing_is_refused(tmp_path, folder):
  with pytest.raises(ConfigError, match="rollout.rewards.taste.path is .*, a model with no head that scores"):
    models_of(tiny.hf_folder(tmp_path / "lm"))
  with pytest.raises(ConfigError, match="a model with 3 labels"):
    models_of(tiny.hf_folder(tmp_path / "three", head="score", num_labels=3))
  with pytest.raises(ConfigError, match="rollout.rewards.taste.path is .*, which is no folder"):
    models_of(tmp_path / "nothing")
