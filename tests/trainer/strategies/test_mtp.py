"""The loss of modules that predict tokens further ahead against a float64 loop; runs that train them.

What the modules compute is compared with transformers' layers in tests/models/hf/test_mtp.py.
"""

import json
import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from models import hf
from tests import tiny
from tests.models.initial import initial
from trainer import strategies, tree
from trainer.config import defaults, strategy
from trainer.errors import ConfigError
from trainer.export.command import export
from trainer.main import train
from trainer.strategies import seq, sft

OPTIONS = dict(label_smoothing=0.1, z_loss=0.01, mtp_weight=0.3)
GLM = dict(mtp_layers=1, rope_fraction=0.5, num_kv_heads=1, moe=dict(
    num_experts=4, experts_per_token=2, expert_size=8, shared_size=8, scores="sigmoid", choice_bias=True,
    dense_layers=1))


def by_loop(logits_BxTxV, batch, k, dft=False):
  """(the loss of module k in float64, its accuracy, how much all predictions weigh), token by token."""
  total = hits = weight = 0.0
  tokens, segments = batch["tokens"], batch["segment_ids"]
  for b, row in enumerate(np.asarray(logits_BxTxV, np.float64)):
    for t in range(len(row) - k - 1):
      there = t + k + 1
      if segments[b, t] == 0 or segments[b, t] != segments[b, there]:
        continue
      logits_V = row[t, :24]
      log_z = np.log(np.exp(logits_V).sum())
      nll = log_z - logits_V[tokens[b, there]]
      loss = 0.9 * nll + 0.1 * (log_z - logits_V.mean()) + 0.01 * log_z**2
      w = float(batch["loss_weights"][b, there])
      total += w * loss * (np.exp(-nll) if dft else 1.0)
      hits += w * (logits_V.argmax() == tokens[b, there])
      weight += w
  return total / weight, hits / weight, weight


@pytest.mark.parametrize("chunk", [None, 8])
def test_loss_and_metrics_are_those_of_a_loop(chunk):
  """Rows of two documents, with weights that are fractions and padding; the vocabulary as a whole or in chunks."""
  model, batch = tiny.model(mtp_layers=2, vocab_chunk=chunk), tiny.batch(4, 16)
  params = initial(model)
  ahead = model.apply(params, batch).ahead
  for objective, more in ((seq.loss, {}), (sft.loss, {"dft": True})):
    terms, metrics = objective(model, params, batch, None, SimpleNamespace(**OPTIONS, **more))
    values = {name: float(mean.sum.sum() / mean.weight.sum()) for name, mean in (terms | metrics).items()}
    assert list(terms) == ["loss", "mtp/term_1", "mtp/term_2"]
    for k in (1, 2):
      loss, accuracy, weight = by_loop(model.unembed(params, ahead[k - 1]), batch, k, bool(more))
      assert float(terms[f"mtp/term_{k}"].weight.sum()) == pytest.approx(weight, rel=1e-6)
      assert values[f"mtp/loss_{k}"] == pytest.approx(loss, rel=1e-5)
      assert values[f"mtp/term_{k}"] == pytest.approx(0.3 / 2 * loss, rel=1e-5)
      assert values[f"mtp/accuracy_{k}"] == pytest.approx(accuracy, rel=1e-5)


def test_a_module_sees_the_tokens_up_to_those_that_it_was_given_and_no_other_document():
  """By gradient: no two places have the same token, so that the embedding's rows are the places."""
  model = tiny.model(mtp_layers=2, tie_embeddings=False)
  params = initial(model)
  segments = np.array([[1] * 9 + [2] * 7], np.int32)
  batch = dict(tokens=np.arange(16, dtype=np.int32)[None], segment_ids=segments)

  def hidden(table, k, t):
    return jnp.sum(model.apply({**params, "embed": {"embedding": table}}, batch).ahead[k - 1, 0, t])

  gradient = jax.jit(jax.grad(hidden), static_argnums=1)
  for k, t in ((1, 4), (2, 4), (1, 10), (2, 6)):
    moved = np.flatnonzero(np.any(np.asarray(gradient(params["embed"]["embedding"], k, t)) != 0, axis=1))
    first = 0 if t < 9 else 9
    np.testing.assert_array_equal(moved, np.arange(first, t + k + 1))


def test_the_number_of_operations_is_that_of_a_layer_a_projection_and_an_unembedding():
  one, none = (tiny.model(mtp_layers=n, tie_embeddings=False).flops_per_token(16) for n in (1, 0))
  kernels = 4 * 16 * 16 + 3 * 16 * 32 + 2 * 16 * 16 + 16 * 24
  assert one - none == 6 * kernels + 6 * 2 * (8 + 8) * 17 / 2


@pytest.mark.parametrize("chosen, message", [
    (strategy("distill", teacher="T"), "strategy 'distill' does not train"),
    (strategy("dpo"), "strategy 'dpo' does not train"),
    (strategy("seq", mtp_weight=0.0), "strategy.mtp_weight is 0.0"),
])
def test_a_strategy_that_would_not_train_them_refuses_them(chosen, message):
  config = defaults()
  config.strategy, config.model.mtp_layers = chosen, 1
  with pytest.raises(ConfigError, match=message):
    strategies.check(config)


@pytest.mark.parametrize("changed, message", [
    (dict(mtp_layers=-1), "found -1"), (dict(lora=dict(rank=2)), "model.lora.rank: adapters"),
    (dict(head="embedding"), "model.head"), (dict(layer_pattern=("mamba",)), "no layer is global, local or nope"),
    (dict(per_layer_size=4), "per_layer_size"), (dict(kv_shared_layers=1), "kv_shared_layers"),
    (dict(altup=dict(num_inputs=2)), "altup"),
])
def test_models_that_they_are_not_defined_for(changed, message):
  with pytest.raises(ConfigError, match=message):
    tiny.model(**{"mtp_layers": 1, **changed})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return tiny.write_corpus(tmp_path_factory.mktemp("corpus"))


def test_a_run_from_a_folder_trains_them_and_writes_them(corpus, tmp_path, caplog):
  """Biases of experts step towards even loads in modules, too; in a folder without modules these begin fresh; what no
  family has can be left out."""
  folder = tiny.hf_folder(tmp_path / "folder", **GLM)
  config = tiny.config(corpus, total_steps=6, evals={})
  config.model = defaults().model
  config.model.update(hf=str(folder), mtp_layers=1)
  config.model.moe.choice_bias_rate = 0.01
  config.strategy.mtp_weight = 1.0
  run = train(config, tmp_path / "run")
  rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
  losses = [row["mtp/loss_1"] for row in rows if "mtp/loss_1" in row]
  assert losses[-1] < 0.9 * losses[0]
  before, after = load_file(folder / "model.safetensors"), tree.flatten(run.state["params"])
  export(tmp_path / "run", tmp_path / "out")
  written = load_file(tmp_path / "out" / "model.safetensors")
  assert written.keys() == before.keys()
  np.testing.assert_array_equal(written["model.layers.2.eh_proj.weight"].T, after["mtp/eh_proj/kernel"][0])
  np.testing.assert_array_equal(written["model.layers.2.shared_head.head.weight"], written["lm_head.weight"])
  bias = written["model.layers.2.mlp.gate.e_score_correction_bias"] - before[
      "model.layers.2.mlp.gate.e_score_correction_bias"]
  assert np.any(bias) and np.abs(bias).max() < 0.07
  plain = tiny.hf_folder(tmp_path / "plain", **{**GLM, "mtp_layers": 0})
  config.model.hf = str(plain)
  config.update(total_steps=1)
  with caplog.at_level(logging.WARNING):
    train(config, tmp_path / "fresh")
  assert "holds nothing that predicts tokens further ahead" in caplog.text
  export(tmp_path / "fresh", tmp_path / "without", mtp=False)
  assert load_file(tmp_path / "without" / "model.safetensors").keys() == load_file(plain / "model.safetensors").keys()
  assert hf.architecture(tmp_path / "without")[1]["moe.num_experts"] == 4


def test_what_no_family_has_is_told_before_the_training(corpus, tmp_path):
  config = tiny.config(corpus, total_steps=1, evals={})
  config.model.mtp_layers, config.export.path = 1, "out"
  with pytest.raises(hf.HFError, match="model.mtp_layers = 1.*export.mtp=False"):
    train(config, tmp_path / "run")
