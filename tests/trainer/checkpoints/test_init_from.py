"""Where first parameters come from: another run's by name after `remap`, with both sides listed where they differ."""

import dataclasses
import json
import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from input_pipeline.tokenizer.tokenizer import load_tokenizer
from models import hf
from tests import tiny
from trainer import program as program_lib
from trainer import tree
from trainer.checkpoints import init_from
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.config import defaults
from trainer.errors import ConfigError
from trainer.export import command as export
from trainer.main import train


class Fresh:
  """A model whose fresh parameters are sevens."""

  def __init__(self, shapes):
    self._shapes = shapes

  def init(self, rng):
    return jax.tree.map(lambda leaf: jnp.full(leaf.shape, 7.0), self._shapes)


@pytest.fixture
def run(tmp_path):
  """A run's folder; shapes that fit it after `remap` and `ignore`."""
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, {"params": {"old": {"kernel": jnp.full((8, 2), 3.0)}, "extra": jnp.ones(4)}}, {})
  checkpoints.close()
  like = {"a": {"kernel": jnp.zeros((8, 2))}, "head": jnp.zeros(5)}
  return tmp_path, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)


def first(run, **changed):
  path, wanted = run
  config = defaults()
  config.init_from.path = str(path)
  config.init_from.update(changed)
  return init_from.first_params(init_from.origin_of(config), Fresh(wanted), wanted)


def test_where_parameters_are_from_is_counted_apart(monkeypatch):
  """Two of a run, one of a folder, one of none."""
  monkeypatch.setattr(init_from, "_from_run", lambda *_, **__: [("a", 1.0), ("b", 2.0)])
  monkeypatch.setattr(init_from, "_from_hugging_face", lambda *_: [("c", 3.0)])
  monkeypatch.setattr(init_from, "_fresh", lambda model, seed, wanted: dict.fromkeys(wanted, 4.0))
  monkeypatch.setattr(init_from.quantize, "store", lambda path, leaf, stored: {path: leaf})
  origin = dataclasses.replace(init_from.origin_of(defaults()), path="run", folder="folder")
  wanted = {name: jax.ShapeDtypeStruct((), jnp.float32) for name in "abcd"}
  found = init_from.first_params(origin, None, wanted, partial=True)
  assert found == (dict(a=1.0, b=2.0, c=3.0, d=4.0), "2 arrays from run, 1 arrays from folder, 1 fresh arrays")
  assert init_from.has_fresh(found[1])
  _, where = init_from.first_params(dataclasses.replace(origin, path="7 fresh arrays", folder="fresh parameters"), None,
                                    {name: wanted[name] for name in "abc"}, partial=True)
  assert where == "2 arrays from 7 fresh arrays, 1 arrays from fresh parameters" and not init_from.has_fresh(where)
  _, where = init_from.first_params(dataclasses.replace(origin, path=None, folder=None), None, wanted)
  assert where == "fresh parameters" and init_from.has_fresh(where)


def test_another_runs_parameters_with_remap_and_ignore(run, caplog):
  caplog.set_level(logging.INFO, logger="absl")
  loaded, where = first(run, remap=(("^old/", "a/"), ("^extra$", "")), ignore=("^head$",))
  assert np.all(loaded["a"]["kernel"] == 3.0) and np.all(loaded["head"] == 7.0)
  assert where == f"1 arrays from {run[0]}, 1 fresh arrays"
  assert "1 kept fresh, 1 of the checkpoint dropped" in caplog.text


@pytest.mark.parametrize("changed, says", [
    ({"init_from.path": "gone"}, "gone does not exist: give a workdir"),
    ({"model.hf": "model"}, "has no safetensors, only pytorch_model.bin"),
])
def test_what_is_not_there_is_told_before_the_data_are_read(changed, says, tmp_path):
  folder = tiny.hf_folder(tmp_path / "model")
  (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
  (tmp_path / "data").mkdir()
  (tmp_path / "data" / "a.txt").write_text("abc " * 99)
  config = tiny.config(tmp_path / "data")
  key, name = next(iter(changed.items()))
  config.update_from_flattened_dict({key: str(tmp_path / name)})
  with pytest.raises(ValueError, match=says):
    train(config, tmp_path / "w")
  assert not (tmp_path / "w" / "cache").exists() and not (tmp_path / "w" / "tokenizer.json").exists()


def test_what_is_ignored_begins_fresh_though_the_checkpoint_has_it(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, {"params": {"a": jnp.full(3, 3.0), "b": jnp.full(4, 3.0)}}, {})
  checkpoints.close()
  one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  wanted = {name: jax.ShapeDtypeStruct((size,), jnp.float32, sharding=one) for name, size in (("a", 3), ("b", 4))}
  params, _ = first((tmp_path, wanted), ignore=("^b$",))
  assert np.all(params["a"] == 3.0) and np.all(params["b"] == 7.0)
  with pytest.raises(ConfigError, match=r"none is loaded: init_from.ignore and .* leave"):
    first((tmp_path, wanted), ignore=("^a$", "^b$"))


def test_adapters_alone_are_no_start_where_nothing_gives_their_base(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, {"params": {"blocks": {"attn": {"q": {"lora_a": jnp.ones((8, 2))}}}}}, {})
  checkpoints.close()
  one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  wanted = {"blocks": {"attn": {"q": {name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=one)
                                      for name, shape in (("lora_a", (8, 2)), ("kernel", (8, 8)))}}}}
  with pytest.raises(ConfigError, match=r"- blocks/attn/q/kernel \(8, 8\): not in the checkpoint"):
    first((tmp_path, wanted))


def test_adapters_of_a_run_and_of_a_folder_are_too_many(monkeypatch):
  """Where the run gave the base alone, the folder gives the adapters."""
  paths = ("q/kernel", "q/lora_a")
  wanted = tree.unflatten({path: jax.ShapeDtypeStruct((8, 2), jnp.float32) for path in paths})
  origin = dataclasses.replace(init_from.origin_of(defaults()), path="r", peft="p")
  monkeypatch.setattr(init_from, "_from_peft", lambda *_: [("q/lora_a", np.ones((8, 2), np.float32))])
  monkeypatch.setattr(init_from, "_from_run", lambda *_, **__: [("q/kernel", np.ones((8, 2), np.float32))])
  assert init_from.first_params(origin, None, wanted)[1] == "1 arrays from r, 1 arrays from p"
  monkeypatch.setattr(init_from, "_from_run", lambda *_, **__: [(path, np.ones((8, 2), np.float32)) for path in paths])
  with pytest.raises(ConfigError, match=r"both init_from.path='r' and model.lora.peft='p' hold adapters; give one"):
    init_from.first_params(origin, None, wanted)


def test_what_does_not_fit_is_listed_from_both_sides(run):
  with pytest.raises(ConfigError) as error:
    first(run)
  for line in ("- a/kernel (8, 2): not in the checkpoint", "+ old/kernel (8, 2): not in this run", "- head (5,)"):
    assert line in str(error.value)


def test_another_shape_and_two_names_for_one(run):
  with pytest.raises(ConfigError, match=r"! head: here \(5,\), in the checkpoint \(4,\)"):
    first(run, remap=(("^extra$", "head"), ("^old/", "a/")))
  with pytest.raises(ConfigError, match="maps both old/kernel and extra|maps both extra and old/kernel"):
    first(run, remap=(("^extra$", "head"), ("^old/kernel$", "head")))


def test_new_tokens_begin_as_means_and_are_trained_beside_adapters(tmp_path):
  """The folder has 258 tokens in 264 rows; with ten more 268 are needed, 320 by the multiple."""
  base = tiny.hf_folder(tmp_path / "base")
  config = tiny.config(tiny.write_corpus(tmp_path / "corpus"), total_steps=1, evals={})
  config.tokenizer = dict(type="auto", new_tokens=(("<a>", "ab"), *(f"<{i}>" for i in range(9))))
  config.model = dict(hf=str(base), lora=dict(rank=2, modules_to_save=("^embed/", "^unembed/")))
  config.optimizer.learning_rate = 0.1
  run = train(config, tmp_path / "run")
  old, table = load_file(base / "model.safetensors"), {}
  for path, name in (("embed/embedding", "model.embed_tokens.weight"), ("unembed/kernel", "lm_head.weight")):
    begun = np.asarray(tree.flatten(init_from.first_params(
        init_from.origin_of(run.config), run.model, placed(run))[0])[path])
    begun, theirs = begun if path.startswith("embed") else begun.T, np.float64(old[name])
    assert begun.shape == (320, 16)
    np.testing.assert_array_equal(begun[:258], old[name][:258])
    np.testing.assert_array_equal(begun[268:], np.broadcast_to(begun[259], (52, 16)))
    np.testing.assert_allclose(begun[258], (theirs[ord("a")] + theirs[ord("b")]) / 2, atol=1e-7)
    np.testing.assert_allclose(begun[259:], np.broadcast_to(theirs[:258].mean(0), (61, 16)), atol=1e-7)
    table[name] = begun
  out = export.export(tmp_path / "run", tmp_path / "out")
  new = load_file(out / "model.safetensors")
  assert all(new[name].shape == (320, 16) and np.any(new[name][:258] != table[name][:258]) for name in table)
  assert json.loads((out / "config.json").read_text())["vocab_size"] == 320
  assert load_tokenizer(out).fingerprint == run.tokenizer.fingerprint
  peft = load_file(export.export(tmp_path / "run", tmp_path / "peft", adapter="peft") / "adapter_model.safetensors")
  assert peft["base_model.model.lm_head.weight"].shape == (320, 16)


def test_another_run_s_parameters_win_over_those_of_the_folder(tmp_path):
  """A run that goes on from one that was trained from the same folder: model.hf is its architecture alone."""
  folder = tiny.hf_folder(tmp_path / "base")
  shapes = hf.abstract_params(hf.architecture(folder)[1])
  checkpoints = Checkpoints(tmp_path / "run")
  checkpoints.save(1, {"params": jax.tree.map(lambda leaf: jnp.full(leaf.shape, 3.0), shapes)}, {})
  checkpoints.close()
  one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  wanted = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=one), shapes)
  config = defaults()
  config.model.hf, config.init_from.path = str(folder), str(tmp_path / "run")
  origin = dataclasses.replace(init_from.origin_of(config), tokenizer=None)
  params, where = init_from.first_params(origin, SimpleNamespace(abstract_params=lambda: shapes), wanted)
  assert all(np.all(leaf == 3.0) for leaf in jax.tree.leaves(params))
  assert where == f"{len(jax.tree.leaves(shapes))} arrays from {tmp_path / 'run'}"


def placed(run):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), run.state["params"])


def test_new_tokens_that_nothing_trains_are_refused(tmp_path):
  config = tiny.config(tiny.write_corpus(tmp_path / "corpus"), total_steps=1, evals={})
  config.tokenizer = dict(type="auto", new_tokens=("<a>",))
  config.model = dict(hf=str(tiny.hf_folder(tmp_path / "base")), lora=dict(rank=2))
  with pytest.raises(ConfigError, match="their embeddings are not trained.*modules_to_save"):
    train(config, tmp_path / "run")


def test_a_reference_with_new_tokens_of_its_own_keeps_their_rows(tmp_path):
  """A folder that was trained with the new tokens is a reference as it is."""
  config = tiny.config(tiny.write_corpus(tmp_path / "corpus"), total_steps=1, evals={})
  config.tokenizer = dict(type="auto", new_tokens=("<a>",))
  config.model = dict(hf=str(tiny.hf_folder(tmp_path / "base")))
  config.optimizer.learning_rate = 0.1
  run = train(config, tmp_path / "run")
  folder = export.export(tmp_path / "run", tmp_path / "out")
  trained = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
  from_folder = dataclasses.replace(init_from.origin_of(run.config), folder=str(folder), tokenizer=None)
  found = init_from.first_params(from_folder, run.model, placed(run))[0]["embed"]["embedding"]
  np.testing.assert_array_equal(found, trained)
  as_base = dataclasses.replace(from_folder, tokenizer=run.config.tokenizer)
  assert np.any(init_from.first_params(as_base, run.model, placed(run))[0]["embed"]["embedding"][258] != trained[258])


@pytest.mark.parametrize("fresh, found, path, of_start, of_model, looked", [
    (False, None, "run", None, "hf", ["find run", "folder hf"]), (False, None, None, "other", "hf", ["folder other"]),
    (False, None, None, "other", None, ["folder other"]), (False, None, None, None, None, []),
    (True, None, "run", "other", "hf", []), (False, "a past", "run", "other", "hf", [])])
def test_what_a_run_begins_from_is_looked_for_only_where_it_begins(fresh, found, path, of_start, of_model, looked,
                                                                   monkeypatch):
  calls = []
  monkeypatch.setattr(init_from.checkpoint, "find", lambda path: calls.append(f"find {path}"))
  monkeypatch.setattr(init_from.hf, "TensorFolder", lambda folder: calls.append(f"folder {folder}"))
  config = SimpleNamespace(init_from=SimpleNamespace(path=path, hf=of_start, fresh=fresh),
                           model=SimpleNamespace(hf=of_model))
  init_from.look(config, found)
  assert calls == looked


@pytest.mark.parametrize("frozen, hf, path, refused", [
    ("float32", None, None, False), ("float32", "folder", None, True), ("bfloat16", None, "run", True),
    ("int8", "folder", None, False), ("nf4", None, "run", False)])
def test_only_a_base_that_is_read_as_it_was_must_be_the_same_to_the_bit(frozen, hf, path, refused, monkeypatch, caplog):
  """One that is drawn or rounded again may differ on another kind of device, and is told."""
  monkeypatch.setattr(init_from.checkpoint, "read_meta", lambda folder: {"pinned": {"base": "then"}})
  monkeypatch.setattr(init_from, "fingerprint", lambda base: base)
  config = SimpleNamespace(precision=SimpleNamespace(frozen=frozen), model=SimpleNamespace(hf=hf),
                           init_from=SimpleNamespace(path=path))
  init_from.check_base(config, "then", "from there", "4")
  assert "fingerprint" not in caplog.text
  if refused:
    with pytest.raises(ConfigError, match=f"has now. Its files have changed since; put back .*{hf or path}"):
      init_from.check_base(config, "now", "from there", "4")
  else:
    init_from.check_base(config, "now", "from there", "4")
    assert "has now. It was rounded or drawn on another kind of device" in caplog.text


def test_parameters_are_of_init_from_where_the_architecture_is_that_of_another_folder(tmp_path):
  """Two folders of one shape, with other numbers in them."""
  named, wanted = (tiny.hf_folder(tmp_path / name, seed) for name, seed in (("model", 1), ("init_from", 2)))
  config, _ = program_lib.resolve(tiny.config(tmp_path, model=dict(hf=str(named)), init_from=dict(hf=str(wanted))))
  program_lib.settle(config, "cpu")
  model = program_lib.make_model(config, 260)
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  target = {"embed": jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
                                  model.abstract_params()["embed"])}
  found, where = init_from.first_params(init_from.origin_of(config), model, target, partial=True)
  np.testing.assert_array_equal(found["embed"]["embedding"],
                                load_file(wanted / "model.safetensors")["model.embed_tokens.weight"])
  assert where == f"1 arrays from {wanted}"


def test_rows_of_a_table_are_those_of_tokens_whichever_way_it_lies():
  table = np.arange(6.0).reshape(3, 2)
  np.testing.assert_array_equal(init_from.base_table("embed/embedding", {"embed/embedding": table}), table)
  np.testing.assert_array_equal(init_from.base_table("unembed/kernel", {"unembed/kernel": table.T}), table)


def test_a_table_larger_than_the_folders_is_refused_where_no_tokens_are_new(tmp_path):
  """Also of a folder that is not the run's own, a reference's say."""
  folder = tiny.hf_folder(tmp_path / "model")
  config, _ = program_lib.resolve(tiny.config(tmp_path, model=dict(hf=str(folder))))
  config.model.vocab_size = 272
  program_lib.settle(config, "cpu")
  model = program_lib.make_model(config, 272)
  origin = init_from.origin_of(config)
  for found in (origin, dataclasses.replace(origin, typed=None)):
    with pytest.raises(ConfigError, match=r"model.vocab_size=272 \(config.json: 264\).*embed/embedding is "
                                          r"\(272, 16\) here, \(264, 16\) there\. Leave out"):
      init_from.first_params(found, model, model.abstract_params())
