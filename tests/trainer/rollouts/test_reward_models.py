"""Rewards by models that score: equal to scores computed apart, on several devices too; and what is refused."""

import dataclasses
import shutil
from types import SimpleNamespace

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
from trainer.rollouts import reward_models
from trainer.rollouts.reward_models import RewardModel, RewardModels
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


# ----------------------------------------------------------------------------------------------
# Of models that are not there.


def of_tokens(most=None, batch_size=3, shards=1):
  """A model whose score is the sum of a text's tokens; what it is given, as (rows, length, tokens of the rows)."""
  made, asked = object.__new__(RewardModel), []
  made._key, made._path, made._params, made.fingerprint, made._most = "k", "a/model", "params", "", most
  made._mesh, made._config = "mesh", SimpleNamespace(
      rollout=SimpleNamespace(batch_size=batch_size), activation_rules=(), sharding_rules=())
  made._encoder = SimpleNamespace(ids=lambda prompt, completion, columns, where: np.array(
      [len(prompt), *map(ord, completion)]))

  def scores(params, batch):
    assert params == "params" and {"tokens", "positions", "segment_ids", "segment_roles"} <= set(batch)
    there = batch["segment_ids"] == 1
    asked.append((*there.shape, sorted(there.sum(1).tolist(), reverse=True) == there.sum(1).tolist()))
    assert np.all(batch["positions"] == np.where(there, np.arange(there.shape[1]), 0))
    assert np.all(batch["tokens"][~there] == 0) and batch["segment_roles"].tolist() == [[1]] * len(there)
    return batch["tokens"].sum(1).astype(np.float32)

  made._scores = scores
  return made, asked


@pytest.fixture
def placed(monkeypatch):
  monkeypatch.setattr(reward_models.mesh_lib, "batch_shards", lambda mesh: 2)
  monkeypatch.setattr(reward_models.mesh_lib, "batch_sharding", lambda mesh: None)
  monkeypatch.setattr(reward_models.mesh_lib, "place", lambda batch, sharding: batch)
  monkeypatch.setattr(reward_models.mesh_lib, "activation_rules", lambda mesh, rules: mesh_lib.contextlib.nullcontext())


def test_texts_of_similar_lengths_are_scored_together_and_each_has_its_own_score(placed):
  """7 texts of these lengths, three at a time: rows by powers of two for two devices, lengths by multiples of 64."""
  made, asked = of_tokens()
  lengths = [3, 100, 1, 64, 65, 2, 1]
  texts = [np.arange(n) + 10 * i for i, n in enumerate(lengths)]
  assert made.score(texts).tolist() == [float(text.sum()) for text in texts]
  assert asked == [(4, 128, True), (4, 64, True), (2, 64, True)]
  assert made.score([]).shape == (0,) and len(asked) == 3


def test_scores_stand_where_their_completions_do_and_what_cannot_be_scored_is_told(placed, caplog):
  models = object.__new__(RewardModels)
  one, other = of_tokens()[0], of_tokens(most=3)[0]
  models.names, models._models = ("one", "other"), {"one": one, "other": other}
  groups = [Group("pp", ["a", "bcd"], [[0]] * 2, {}, "x.jsonl:1"), Group("", ["ef", "ghi"], [[0]] * 2, {}, "x.jsonl:2")]
  values, failed, abstained = models.score(groups)
  expected = [[2 + 97, 2 + 98 + 99 + 100], [101 + 102, 103 + 104 + 105]]
  assert values[:, :, 0].tolist() == expected and values[:, 0, 1].tolist() == [99, 203]
  assert failed.tolist() == [[[False, False], [False, True]]] * 2 and not abstained.any()
  assert np.isnan(values[:, 1, 1]).all()
  assert [record.getMessage() for record in caplog.records] == [
      "rollout: rollout.rewards.other (model) failed for 2 completions, first: x.jsonl:1: 4 tokens, where a/model sees "
      "3."]
  assert len(other.encode(groups[1], "ef")) == 3


def test_parameters_are_known_by_their_fingerprint(monkeypatch):
  made, _ = of_tokens()
  made._params, asked = None, []
  leaf = jax.ShapeDtypeStruct((2, 3), np.float32)
  made._model = SimpleNamespace(abstract_params=lambda: {"a": {"b": leaf}})
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  monkeypatch.setattr(reward_models.mesh_lib, "param_shardings", lambda *given: (
      asked.append(given) or {"a": {"b": device}}, []))
  monkeypatch.setattr(reward_models.teacher, "load", lambda *given: asked.append(given) or "loaded")
  monkeypatch.setattr(reward_models, "fingerprint", lambda params: f"of {params}")
  made._load()
  assert made._params == "loaded" and made.fingerprint == "of loaded"
  config, target, path, key = asked[1]
  assert (config, path, key) == (made._config, "a/model", "k") and asked[0][1:] == ("mesh", ())
  assert (target["a"]["b"].shape, target["a"]["b"].dtype, target["a"]["b"].sharding) == ((2, 3), np.float32, device)
  models = object.__new__(RewardModels)
  models.names, models._models = ("one", "new"), {"one": made, "new": of_tokens()[0]}
  assert models.saved() == {"one": "of loaded"}
  models.restore({"one": "of another"})
  assert models._models["new"].fingerprint == ""
  with pytest.raises(ConfigError, match="^k: a/model has the fingerprint of loaded; the model that this run was "
                                        "trained with had of another. Give that one, as it was.$"):
    made._load()


@pytest.mark.parametrize("section, found", [
    (dict(head="lm", num_labels=1), "no head that scores"), (dict(head="score", num_labels=3), "3 labels"),
    (dict(head="score", num_labels=1, vision=dict(tower="siglip")), "images")])
def test_models_that_give_no_single_score_of_a_text(monkeypatch, section, found):
  model = defaults().model
  model.update(section)
  monkeypatch.setattr(reward_models.teacher, "find", lambda path, key: SimpleNamespace(section=model))
  with pytest.raises(ConfigError, match=f"^k is 'p', a model with {found}. Give one with a single score of a text"):
    RewardModel("k", "p", None, None)
