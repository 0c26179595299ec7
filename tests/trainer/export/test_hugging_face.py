"""A run that starts from a Hugging Face folder: architecture, tokenizer, parameters, adapters, and the export."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import hf
from tests import tiny
from trainer import train, tree
from trainer.callbacks import Callback
from trainer.checkpoints import checkpoint
from trainer.config import checks as config_checks
from trainer.config import defaults
from trainer.errors import ConfigError
from trainer.export import hugging_face
from trainer.telemetry.writers import read_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tiny.hf_folder(tmp_path_factory.mktemp("hf") / "base", rope_theta=5000.0, num_kv_heads=1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return tiny.write_corpus(tmp_path_factory.mktemp("corpus"))


def config(corpus, folder, **changed):
  c = tiny.config(corpus, **changed)
  c.model = defaults().model
  c.model.hf = str(folder)
  return c


def filled(**changed):
  resolved = config_checks.resolve(changed)
  return resolved, hugging_face.fill_in(resolved)


def test_the_architecture_and_the_tokenizer_come_from_the_folder(folder):
  resolved, notes = filled(model=dict(hf=str(folder)))
  assert (resolved.model.hidden_size, resolved.model.rope_theta, resolved.model.num_kv_heads) == (16, 5000.0, 1)
  assert resolved.model.vocab_size == 264 and not resolved.model.tie_embeddings
  assert (resolved.tokenizer.type, resolved.tokenizer.path) == ("hf", str(folder))
  assert "llama" in notes[0]


def test_a_path_alone_is_a_tokenizer_of_hugging_face():
  resolved, _ = filled(tokenizer=dict(path="/somewhere"))
  assert resolved.tokenizer.type == "hf" and filled()[0].tokenizer.type == "bytes"


def test_init_from_names_the_folder_as_well(folder):
  resolved, _ = filled(init_from=dict(hf=str(folder)))
  assert resolved.model.hf == str(folder) and resolved.model.hidden_size == 16


def test_what_the_config_changes_wins_and_is_said(folder):
  resolved, notes = filled(model=dict(hf=str(folder), rope_theta=9999.0, dropout=0.1))
  assert resolved.model.rope_theta == 9999.0 and resolved.model.dropout == 0.1
  assert any("model.rope_theta = 9999.0" in note and "5000.0" in note for note in notes)
  assert not any("dropout" in note for note in notes)


@pytest.mark.parametrize("given, message", [
    (dict(model=dict(hf="/nowhere")), "does not exist"),
    (dict(init_from=dict(hf="x", path="y")), "give one"),
    (dict(init_from=dict(fresh=True, path="y")), "fresh is True"),
    (dict(model=dict(hf="x", name="my.Model")), "only the built-in"),
])
def test_contradictions_are_refused(given, message):
  with pytest.raises(ConfigError, match=message):
    filled(**given)


@pytest.mark.parametrize("given, message", [
    (dict(path="../out"), r"export.path is '../out'; a path with '\.\.' would lead out"),
    (dict(path="out", dtype="int8"), "export.dtype is 'int8'; allowed: .*float32.* or unset"),
])
def test_an_export_that_cannot_be_is_refused_before_training(folder, given, message):
  resolved, _ = filled(model=dict(hf=str(folder)))
  model = SimpleNamespace(num_real_vocab=264)
  assert hugging_face.export_folder(resolved, model, Path("w")) is None
  resolved.export.path = "out"
  assert hugging_face.export_folder(resolved, model, Path("w")) == Path("w/out")
  resolved.export.update(given)
  with pytest.raises(ConfigError, match=message):
    hugging_face.export_folder(resolved, model, Path("w"))


def test_training_starts_from_the_folders_parameters_and_their_export_is_the_model(folder, corpus, tmp_path):
  run = train(config(corpus, folder, total_steps=2, export=dict(path="out")), tmp_path / "w")
  model, before = hf.load(folder)
  first = run.last_eval  # kept below: the evaluation at the end
  assert not np.array_equal(run.state["params"]["unembed"]["kernel"], before["unembed"]["kernel"])
  again, after = hf.load(tmp_path / "w" / "out")
  for path, leaf in tree.flatten(after).items():
    np.testing.assert_array_equal(leaf, tree.flatten(run.state["params"])[path], err_msg=path)
  tokens = jnp.arange(20)[None] + 65
  np.testing.assert_allclose(jax.jit(again.logits)(after, tokens),
                             jax.jit(run.model.logits)(run.state["params"], tokens), atol=1e-6)
  assert json.loads((tmp_path / "w" / "out" / "config.json").read_text())["rope_theta"] == 5000.0
  assert (tmp_path / "w" / "out" / "tokenizer.json").exists() and first[1]

  resumed = train(config(corpus, folder, total_steps=2, export=dict(path="out")), tmp_path / "w")
  assert resumed.step == 2


@pytest.mark.devices(8)
def test_the_first_loss_is_that_of_the_folders_model(folder, corpus, tmp_path):
  train(config(corpus, folder, total_steps=1), tmp_path / "a")
  train(config(corpus, folder, total_steps=1, mesh=dict(data=2, fsdp=2, tensor=2)), tmp_path / "b")
  loss = {}
  for name in "ab":
    rows = {row["step"]: row for row in read_rows(tmp_path / name / "metrics.jsonl") if "eval/val/loss" in row}
    loss[name] = rows[0]["eval/val/loss"]
  fresh = config(corpus, folder, total_steps=1)
  fresh.init_from.fresh = True
  train(fresh, tmp_path / "c")
  rows = {row["step"]: row for row in read_rows(tmp_path / "c" / "metrics.jsonl") if "eval/val/loss" in row}
  assert loss["a"] == pytest.approx(loss["b"], rel=1e-5) and abs(loss["a"] - rows[0]["eval/val/loss"]) > 1e-3


@pytest.mark.parametrize("typed, told", [
    (dict(vocab_size=272), r"model.vocab_size=272 \(config.json: 264\).*embedding is \(272, 16\) here, \(264, 16\)"),
    (dict(num_layers=3), r"model.num_layers=3 \(config.json: 2\)"),
    (dict(num_kv_heads=2), r"model.num_kv_heads=2 \(config.json: 1\)"),
    (dict(qk_norm=True), r"model.qk_norm=True .*blocks/attn/k_norm/scale is \(2, 8\) here, none there"),
    (dict(activation="relu"), r"model.activation='relu' .*blocks/mlp/gate/kernel is none here"),
    (dict(positions="learned", max_positions=32), r"model.positions='learned'.*pos_embed/embedding"),
    (dict(hidden_size=32, intermediate_size=64, rope_theta=9.0), r"model.hidden_size=32 .*model.intermediate_size=64"),
])
def test_a_key_with_which_the_folder_cannot_be_read_is_the_configs(folder, corpus, tmp_path, typed, told):
  c = config(corpus, folder, total_steps=1)
  c.model.update(typed)
  with pytest.raises(ConfigError, match="this config has .*" + told) as error:
    train(c, tmp_path / "w")
  assert "init_from.fresh=True" in str(error.value) and "Fetch" not in str(error.value)


def test_an_entry_that_a_user_answers_for_comes_through_the_run_and_the_export(folder, corpus, tmp_path, capsys):
  base = tmp_path / "base"
  shutil.copytree(folder, base)
  content = json.loads((base / "config.json").read_text())
  (base / "config.json").write_text(json.dumps({**content, "odd": 2, "_made_by": "x", "origin": "a name"}))
  c = config(corpus, base, total_steps=1, export=dict(path="out"))
  with pytest.raises(ConfigError, match="odd = 2: .*--config.model.hf_ignore=odd$"):
    train(c, tmp_path / "w")
  c.model.hf_ignore = ("odd",)
  train(c, tmp_path / "w")
  said = capsys.readouterr().out
  assert said.count("not read, and taken to have no effect: odd = 2, _made_by = 'x', origin = 'a name'") == 1
  exported = json.loads((tmp_path / "w" / "out" / "config.json").read_text())
  assert (exported["odd"], exported["_made_by"], exported["origin"]) == (2, "x", "a name")
  for names, message in ((("odd", "even"), "names 'even', but .* has no such entry"),
                         (("odd", "rope_theta"), "names rope_theta, but .* says with it what the model computes")):
    with pytest.raises(ConfigError, match=message):
      filled(model=dict(hf=str(base), hf_ignore=names))


def lora_config(corpus, folder, **changed):
  c = config(corpus, folder, **changed)
  c.model.lora.update(rank=2, alpha=4.0)
  return c


def test_adapters_alone_are_trained_saved_and_restored(folder, corpus, tmp_path):
  """I5 under LoRA: stopped and continued equals straight through; checkpoints hold no base."""
  straight = train(lora_config(corpus, folder, total_steps=4), tmp_path / "straight")
  _, base = hf.load(folder)
  now = tree.flatten(straight.state["params"])
  for path, leaf in tree.flatten(base).items():
    np.testing.assert_array_equal(leaf, now[path], err_msg=path)
  adapters = {path for path in now if path.rpartition("/")[2].startswith("lora_")}
  assert adapters and set(now) - adapters == set(tree.flatten(base))
  assert all(np.any(now[path]) for path in adapters if path.endswith("lora_b"))
  assert set(checkpoint.param_shapes(tmp_path / "straight" / "checkpoints" / "4")) == adapters

  half = lora_config(corpus, folder, total_steps=4)
  half.callbacks.stop = dict(type="tests.trainer.export.test_hugging_face.StopAt", step=2)
  train(half, tmp_path / "halves")
  continued = train(lora_config(corpus, folder, total_steps=4), tmp_path / "halves")
  for path, leaf in tree.flatten(continued.state).items():
    np.testing.assert_array_equal(leaf, tree.flatten(straight.state)[path], err_msg=path)


def test_another_base_is_refused(folder, corpus, tmp_path):
  copy = tmp_path / "copy"
  shutil.copytree(folder, copy)
  train(lora_config(corpus, copy, total_steps=1), tmp_path / "w")
  tensors = (copy / "model.safetensors").read_bytes()
  (copy / "model.safetensors").write_bytes(tensors[:-4] + b"\x00\x00\x00\x3f")
  with pytest.raises(ConfigError, match="another base"):
    train(lora_config(corpus, copy, total_steps=2, allow_config_changes=True), tmp_path / "w")


def test_adapters_of_another_run_go_on_over_the_same_base(folder, corpus, tmp_path):
  first = train(lora_config(corpus, folder, total_steps=2), tmp_path / "first")
  second = lora_config(corpus, folder, total_steps=1)
  second.init_from.path = str(tmp_path / "first")
  second.optimizer.learning_rate = 0.0
  run = train(second, tmp_path / "second")
  for path, leaf in tree.flatten(first.state["params"]).items():
    np.testing.assert_array_equal(leaf, tree.flatten(run.state["params"])[path], err_msg=path)


class StopAt(Callback):
  """Asks for a stop after some step."""

  def __init__(self, step):
    self._step = step

  def on_optimizer_step(self, run):
    if run.step == self._step:
      run.stop_requested = "the test"


@pytest.mark.parametrize("entries, wanted", [(259, 320), (260, 260), (261, 261)])
def test_entries_are_made_for_new_tokens_where_there_are_too_few(folder, tmp_path, entries, wanted):
  """The tokenizer has 258 tokens, and two more."""
  shutil.copytree(folder, tmp_path / "hf")
  file = tmp_path / "hf" / "config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | dict(vocab_size=entries)))
  resolved, notes = filled(model=dict(hf=str(tmp_path / "hf")), tokenizer=dict(new_tokens=("<a>", "<b>")))
  assert resolved.model.vocab_size == wanted and ("there are 260" in "".join(notes)) == (wanted != entries)
