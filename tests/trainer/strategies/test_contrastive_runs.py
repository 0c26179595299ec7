"""Runs of strategy contrastive: a body of a language model, adapters, stopped and continued, exported and read back."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests import tiny
from trainer import train
from trainer.config import checks, defaults, source, strategy
from trainer.distributed import mesh as mesh_lib
from trainer.embed import command as embed
from trainer.errors import ConfigError
from trainer.export import command as export
from trainer.generate.command import load_folder, load_run
from trainer.strategies import contrastive
from trainer.telemetry.writers import read_rows


def config_of(folder, **changed):
  file = folder / "matches.jsonl"
  rows = [dict(query=f"what is {i // 2 * 2} and 1", positive=f"it is {i}", negative=f"not {i}" if i % 3 else None)
          for i in range(18)]
  file.write_text("".join(json.dumps(row) + "\n" for row in rows))
  c = defaults()
  c.update(batch_size=4, grad_accum_steps=2, seq_len=64, total_steps=4, report=False, log_steps=1)
  c.model.update(num_layers=1, hidden_size=16, intermediate_size=32, num_heads=2, head="embedding")
  c.tokenizer.type, c.optimizer.learning_rate = "bytes", 1e-2
  c.strategy = changed.pop("strategy", strategy("contrastive", negatives=1, pooling="mean", query_prompt="Q: "))
  c.input.sources.main = source(type="jsonl", path=str(file))
  c.input.cache_dir = str(folder / "cache")
  c.update(changed)
  return c


def test_a_run_that_was_begun_before_there_was_as_messages_goes_on(tmp_path):
  config = checks.resolve(config_of(tmp_path))
  contrastive.fill_in(config)
  saved = json.loads(checks.to_json(config))
  del saved["strategy"]["as_messages"]
  assert checks.differences(saved, config) == []


def losses(workdir):
  return [row["loss"] for row in read_rows(workdir / "metrics.jsonl") if "loss" in row]


def embedded(loaded_of, at, texts, **of_folder):
  mesh = mesh_lib.make_mesh({})
  loaded = loaded_of(at, mesh)
  if loaded_of is load_folder:
    embed.of_folder(loaded, None, None)
  return embed.Embedder(loaded, mesh, 2)(texts, "query")[0]


def test_a_language_models_body_is_trained_and_its_export_embeds_the_same(tmp_path):
  folder = tiny.hf_folder(tmp_path / "lm", vocab_size=258, num_layers=1)
  c = config_of(tmp_path)
  c.model.hf, c.export.path, c.model.similarity = str(folder), "export", "scale"
  train(c, tmp_path / "w")
  assert losses(tmp_path / "w")[-1] < losses(tmp_path / "w")[0]
  temperatures = [row["temperature"] for row in read_rows(tmp_path / "w" / "metrics.jsonl") if "temperature" in row]
  assert temperatures[0] == pytest.approx(0.07) and temperatures[-1] != temperatures[0]
  out = tmp_path / "w" / "export"
  assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaModel"]
  tensors, before = load_file(out / "model.safetensors"), load_file(folder / "model.safetensors")
  assert {f"model.{name}" for name in tensors} == before.keys() - {"lm_head.weight"}
  # What was read is the language model: some steps' change away from it, and not fresh.
  assert 0 < np.abs(tensors["embed_tokens.weight"] - before["model.embed_tokens.weight"]).max() < 0.1
  texts = ["what", "what is 3 and 1", "a text that is longer than the thirty tokens that were allowed"]
  ours, theirs = embedded(load_run, tmp_path / "w", texts), embedded(load_folder, out, texts)
  np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
  # A run that begins from it pools as it says, and says where the config says otherwise.
  again = config_of(tmp_path, total_steps=1, strategy=strategy("contrastive", negatives=1))
  again.model.hf, again.model.head = str(out), "lm"  # as in the folder, it embeds
  run = train(again, tmp_path / "again")
  assert (run.config.strategy.pooling, run.config.strategy.query_prompt) == ("mean", "Q: ")
  np.testing.assert_allclose(losses(tmp_path / "again")[0], losses(tmp_path / "w")[-1], rtol=0.5)


def test_a_conflict_with_the_folder_is_told(tmp_path, capsys):
  c = config_of(tmp_path, total_steps=1)
  c.export.path = "export"
  train(c, tmp_path / "w")
  again = config_of(tmp_path, total_steps=1, strategy=strategy("contrastive", negatives=1, pooling="last"))
  again.model.hf = str(tmp_path / "w" / "export")
  capsys.readouterr()
  train(again, tmp_path / "again")
  assert "strategy.pooling = 'last', as this config says; " in capsys.readouterr().out


def test_adapters_go_on_where_they_were(tmp_path):
  folder = tiny.hf_folder(tmp_path / "lm", vocab_size=258, num_layers=1)

  def config(**changed):
    c = config_of(tmp_path, **changed)
    c.model.hf, c.model.lora.rank, c.strategy.loss = str(folder), 2, "siglip"
    return c

  train(config(), tmp_path / "whole")
  stopped = config()
  stopped.callbacks.stop = dict(type="tests.trainer.strategies.test_distill.Keep", stop=2)
  train(stopped, tmp_path / "parts")
  train(config(), tmp_path / "parts")
  assert losses(tmp_path / "parts")[-2:] == losses(tmp_path / "whole")[-2:]
  rows = [row for row in read_rows(tmp_path / "whole" / "metrics.jsonl") if "bias" in row]
  assert rows[0]["bias"] == -10 and rows[-1]["bias"] != -10  # trained though the base is frozen
  first, second = (load_file(export.export(tmp_path / name, tmp_path / f"{name}_out") / "model.safetensors")
                   for name in ("whole", "parts"))
  assert all(np.array_equal(first[name], second[name]) for name in first)
  with pytest.raises(ValueError, match="written as a whole"):
    export.export(tmp_path / "whole", tmp_path / "peft", adapter="peft")


@pytest.mark.devices(8)
def test_on_a_mesh_it_is_the_same_run(tmp_path):
  for name, mesh in (("data", dict(data=8)), ("mixed", dict(data=2, fsdp=2, tensor=2))):
    c = config_of(tmp_path, total_steps=2, batch_size=16)
    c.mesh.update(mesh)
    train(c, tmp_path / name)
  np.testing.assert_allclose(losses(tmp_path / "mixed"), losses(tmp_path / "data"), rtol=1e-4)


@pytest.mark.parametrize("changed, told", [
    ({"model.head": "lm"}, "model.head is 'lm', but strategy 'contrastive' reads embeddings of texts. Use"),
    ({"model.head": "lm", "model.similarity": "scale"}, "model.similarity is 'scale', but model.head is 'lm'"),
    ({"model.similarity": "scale_bias"}, "model.similarity is 'scale_bias', which changes nothing of infonce"),
    ({"strategy.bias": 1.0}, "strategy.bias is 1.0, which changes nothing of infonce"),
    ({"strategy.loss": "triplet"}, "strategy.loss is 'triplet'; allowed: infonce, siglip"),
    ({"strategy.pooling": "cls"}, "strategy.pooling is 'cls'; allowed: last, mean"),
    ({"strategy.temperature": 0.0}, "strategy.temperature is 0.0; it must be above 0"),
    ({"strategy.negatives": -1}, "strategy.negatives is -1; it must be 0 or more"),
    ({"strategy.loss": "siglip", "strategy.symmetric": True}, "siglip compares pairs, whichever is the query"),
    ({"input.over_long": "truncate_end"}, "would cut the ends of texts that are embedded"),
    ({"rollout.num_prompts": 2}, "strategy 'contrastive' does not learn from completions that are sampled"),
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
