"""Reward models: the loss by a loop in float64; runs: a new head on a language model, margins, adapters, exports."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from models import hf
from tests import tiny
from tests.models.initial import initial
from tests.trainer.strategies import pairs
from trainer import train
from trainer.config import defaults, evaluator, source, strategy
from trainer.errors import ConfigError, DataError
from trainer.export import command as export
from trainer.metrics import to_floats
from trainer.strategies import reward
from trainer.telemetry.writers import read_rows

EXAMPLES = pairs.examples(5)
ROWS = [EXAMPLES[:2], EXAMPLES[2:3], EXAMPLES[3:], []]
MARGINS = [0.5, 0.0, 2.0, 0.25, 0.0]


def made(**changed):
  model = tiny.model(head="score", **changed)
  params = initial(model, 3)
  params["score"]["kernel"] *= 20  # scores of the size of a trained model's
  return model, params


def with_margins(batch):
  margins = iter(MARGINS)
  batch["advantages"] = np.array([[next(margins) if role == 1 else 0.0 for role in row]
                                  for row in batch["segment_roles"]], np.float32)
  return batch


def alone(model, params):
  """Scores of the two sides of EXAMPLES, each a row of its own, float64 [5, 2]."""
  texts = [x + y for x, *both in EXAMPLES for y in both]
  tokens = np.array([text + [0] * (16 - len(text)) for text in texts], np.int32)
  there = np.array([[1] * len(text) + [0] * (16 - len(text)) for text in texts], np.int32)
  hidden = jax.jit(model.apply)(params, dict(tokens=tokens, positions=None, segment_ids=there)).hidden
  last = np.stack([np.asarray(row, np.float64)[len(text) - 1] for row, text in zip(hidden, texts, strict=True)])
  return (last @ np.asarray(params["score"]["kernel"], np.float64)).reshape(-1, 2)


@pytest.mark.parametrize("center", [0.0, 0.3])
@pytest.mark.parametrize("margins", [False, True])
def test_loss_and_metrics_are_those_of_the_sequences_alone(center, margins):
  model, params = made()
  batch = pairs.batch(ROWS)
  batch = with_margins(batch) if margins else batch
  cfg = pairs.options("reward", center_rewards_coefficient=center)
  scores, loss = alone(model, params), jax.jit(lambda p, b: reward.loss(model, p, b, None, cfg))
  for sign in (1, -1):  # the least score is a rejected answer's, then a chosen one's
    signed = params | {"score": {"kernel": sign * params["score"]["kernel"]}}
    check_terms(loss(signed, batch), sign * scores, center, margins)


def check_terms(found, scores, center, margins):
  """Against a loop in float64."""
  total = 0.0
  for (chosen, rejected), margin in zip(scores, MARGINS, strict=True):
    total += np.log1p(np.exp(-(chosen - rejected - margin * margins))) + center * (chosen + rejected)**2
  found = to_floats({name: type(m)(m.sum.sum(), m.weight.sum()) if hasattr(m, "sum") else m
                     for name, m in {**found[0], **found[1]}.items()})
  expected = dict(loss=total / 5, accuracy=(scores[:, 0] > scores[:, 1]).mean(), margin=-np.diff(scores).mean(),
                  mean_reward=scores.mean(), min_reward=scores.min(), max_reward=scores.max())
  assert 0 < expected["accuracy"] < 1 and found.keys() == expected.keys()
  for name, value in expected.items():
    assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_rows_without_pairs_have_no_part_in_the_gradient():
  model, params = made()
  cfg = pairs.options("reward", center_rewards_coefficient=0.1)

  def gradient(rows):
    def objective(params):
      terms, _ = reward.loss(model, params, pairs.batch(rows), None, cfg)
      return jnp.sum(terms["loss"].sum) / jnp.sum(terms["loss"].weight)
    return jax.jit(jax.grad(objective))(params)

  for a, b in zip(jax.tree.leaves(gradient(ROWS)), jax.tree.leaves(gradient([[e] for e in EXAMPLES])), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6 * np.abs(b).max() + 1e-9)


# ------------------------------------------------------------------------------------------------ runs


def config_of(folder, **changed):
  file = folder / "pairs.jsonl"
  file.write_text("".join(json.dumps(dict(prompt=f"{i} and", chosen=f" {i + 1}", rejected=" no", margin=i / 8)) + "\n"
                          for i in range(16)))
  c = defaults()
  c.update(batch_size=4, seq_len=32, total_steps=4, report=False, log_steps=1)
  c.model.update(num_layers=1, hidden_size=16, intermediate_size=32, num_heads=2, head="score")
  c.tokenizer.type = "bytes"
  c.strategy = strategy("reward")
  c.input.sources.main = source(type="jsonl", path=str(file))
  c.input.cache_dir = str(folder / "cache")
  c.update(changed)
  return c


def losses(workdir):
  return [row["loss"] for row in read_rows(workdir / "metrics.jsonl") if "loss" in row]


def test_a_language_model_gets_a_new_head_and_its_export_is_read_back(tmp_path):
  folder = tiny.hf_folder(tmp_path / "lm", vocab_size=258, num_layers=1)
  c = config_of(tmp_path, evals=dict(held_out=evaluator(type="preference", split="all", at_start=True)))
  c.model.hf, c.export.path, c.optimizer.learning_rate = str(folder), "export", 1e-2
  train(c, tmp_path / "w")
  rows = read_rows(tmp_path / "w" / "metrics.jsonl")
  accuracies = [row["eval/held_out/accuracy"] for row in rows if "eval/held_out/accuracy" in row]
  assert len(accuracies) == 5 and losses(tmp_path / "w")[-1] < losses(tmp_path / "w")[0]
  out = tmp_path / "w" / "export"
  content = json.loads((out / "config.json").read_text())
  assert content["architectures"] == ["LlamaForSequenceClassification"] and content["id2label"] == {"0": "LABEL_0"}
  tensors, before = load_file(out / "model.safetensors"), load_file(folder / "model.safetensors")
  assert tensors.keys() == (before.keys() - {"lm_head.weight"}) | {"score.weight"}
  assert tensors["score.weight"].shape == (1, 16)
  # What was read is the language model: a step's change away from it, and not fresh.
  assert np.abs(tensors["model.embed_tokens.weight"] - before["model.embed_tokens.weight"]).max() < 0.1
  again = config_of(tmp_path, total_steps=1)
  again.model.hf, again.model.head = str(out), "lm"  # as in the folder, it scores
  train(again, tmp_path / "again")
  model, params = hf.load(out)
  assert model.num_labels == 1 and "unembed" not in params


def test_margins_are_those_of_the_rows(tmp_path):
  train(config_of(tmp_path, total_steps=1), tmp_path / "with")
  plain = config_of(tmp_path, total_steps=1)
  plain.chat.fields = (("margin", "nothing"),)
  train(plain, tmp_path / "without")
  assert losses(tmp_path / "with")[0] > losses(tmp_path / "without")[0]


def test_a_margin_that_is_no_number_is_refused(tmp_path):
  c = config_of(tmp_path)
  (tmp_path / "pairs.jsonl").write_text(json.dumps(dict(prompt="a", chosen="b", rejected="c", margin="much")) + "\n")
  with pytest.raises(DataError, match="margin is 'much' .str.; expected a finite number"):
    train(c, tmp_path / "w")


def test_adapters_train_the_head_and_go_on_where_they_were(tmp_path):
  folder = tiny.hf_folder(tmp_path / "lm", vocab_size=258, num_layers=1)

  def config(**changed):
    c = config_of(tmp_path, **changed)
    c.model.hf, c.model.lora.rank, c.optimizer.learning_rate = str(folder), 2, 1e-2
    return c

  train(config(), tmp_path / "whole")
  stopped = config()
  stopped.callbacks.stop = dict(type="tests.trainer.strategies.test_distill.Keep", stop=2)
  train(stopped, tmp_path / "parts")
  train(config(), tmp_path / "parts")
  assert losses(tmp_path / "parts")[-2:] == losses(tmp_path / "whole")[-2:]
  out = [export.export(tmp_path / name, tmp_path / f"{name}_out") for name in ("whole", "parts")]
  first, second = (load_file(folder / "model.safetensors") for folder in out)
  assert all(np.array_equal(first[name], second[name]) for name in first)
  begun = load_file(export.export(tmp_path / "whole", tmp_path / "begin", step=4) / "model.safetensors")
  assert np.array_equal(begun["score.weight"], first["score.weight"])
  # PEFT's file has the head, too, and a run begins from it.
  peft = export.export(tmp_path / "whole", tmp_path / "peft", adapter="peft")
  assert np.array_equal(load_file(peft / "adapter_model.safetensors")["base_model.model.score.weight"],
                        first["score.weight"])
  # A run begins from it, head and all.
  follow = config(total_steps=1)
  follow.init_from.path = str(tmp_path / "whole")
  train(follow, tmp_path / "follow")
  assert losses(tmp_path / "follow")[0] < losses(tmp_path / "whole")[0]
  other = config(total_steps=1)
  other.model.lora.peft = str(peft)
  train(other, tmp_path / "other")
  assert losses(tmp_path / "other")[0] == losses(tmp_path / "follow")[0]


@pytest.mark.parametrize("changed, told", [
    ({"model.head": "lm"}, "model.head is 'lm', but strategy 'reward' reads scores of sequences. Use --config.model"),
    ({"model.num_labels": 2}, "model.num_labels is 2, but strategy reward learns one score"),
    ({"strategy": strategy("dpo")}, "model.head is 'score', but strategy 'dpo' reads logits of tokens"),
    ({"strategy.center_rewards_coefficient": -1.0}, "center_rewards_coefficient is -1.0; it must be 0 or more"),
    ({"model.head": "scores"}, "model.head"),
    ({"model.dropout": 0.1}, "strategy.disable_dropout leaves it without effect"),
    ({"rollout.num_prompts": 2}, "strategy 'reward' does not learn from completions that are sampled"),
])
def test_what_cannot_be_is_refused(tmp_path, changed, told):
  c = config_of(tmp_path)
  for path, value in changed.items():
    *parents, leaf = path.split(".")
    node = c
    for name in parents:
      node = node[name]
    node[leaf] = value
  with pytest.raises(ConfigError, match=told):
    train(c, tmp_path / "w")
