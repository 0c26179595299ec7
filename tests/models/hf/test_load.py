"""Whole folders in and out: a model and its parameters from one, and the same folder from these."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from models import hf
from models.hf import convert, files
from models.hf.errors import HFError
from models.spec import ARCHITECTURE_KEYS
from tests import tiny
from tests.models.initial import initial
from trainer import tree as tree_lib
from trainer.config import defaults
from trainer.distributed import mesh as mesh_lib

REFERENCES = sorted(p.parent for p in (Path(__file__).parent / "references").glob("*/config.json"))
# Those whose tensors have other names than the ones that are written.
OTHER_SPELLINGS = ("_bare", "_fused")
TOKENS = np.arange(12, dtype=np.int32).reshape(2, 6)


def section(**changed):
  cfg = defaults().model
  cfg.update(dict(num_layers=2, hidden_size=16, intermediate_size=32, num_heads=4, num_kv_heads=2, max_positions=64))
  cfg.update(changed)
  return cfg


def small(seed=0, **changed):
  """(model, parameters, keys) of a Llama with norms that are not all ones."""
  cfg = section(**changed)
  model = tiny.model(**{key: cfg[key] for key in ("num_kv_heads", "max_positions", "tie_embeddings")}, num_heads=4)
  model.architecture = hf.keys_of(cfg, 24)
  params = initial(model, seed)
  params["final_norm"]["scale"] += jax.random.normal(jax.random.key(1), (16,))
  return model, params


def flat(tree):
  return {path: np.asarray(leaf) for path, leaf in tree_lib.flatten(tree).items()}


def assert_bitwise(one, other):
  one, other = flat(one), flat(other)
  assert one.keys() == other.keys()
  for path in one:
    assert one[path].dtype == other[path].dtype and one[path].tobytes() == other[path].tobytes(), path


def tensors_of(path):
  folder = files.TensorFolder(path)
  return {name: folder.read(name) for name in folder.tensors}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def saved(request, tmp_path_factory):
  """(model, parameters, the folder they were saved in)."""
  model, params = small(tie_embeddings=request.param)
  path = tmp_path_factory.mktemp("saved") / "model"
  hf.save(model, params, path)
  return model, params, path


@pytest.fixture
def copy(saved, tmp_path):
  return shutil.copytree(saved[2], tmp_path / "copy")


def edit(path, **changed):
  content = json.loads((path / files.CONFIG).read_text())
  (path / files.CONFIG).write_text(json.dumps({**content, **changed}))
  return path


def test_what_was_saved_is_loaded(saved):
  model, params, path = saved
  again, loaded = hf.load(path)
  assert_bitwise(loaded, params)
  np.testing.assert_array_equal(jax.jit(again.logits)(loaded, TOKENS), jax.jit(model.logits)(params, TOKENS))
  assert (again.vocab_size, again.num_real_vocab) == (24, 24)
  assert ("unembed" in loaded) != again.spec.tie_embeddings


def test_saving_what_was_loaded_gives_the_same_bytes(saved, tmp_path):
  path = saved[2]
  hf.save(*hf.load(path), tmp_path / "again")
  assert (tmp_path / "again" / files.SINGLE).read_bytes() == (path / files.SINGLE).read_bytes()
  assert files.read_config(tmp_path / "again") == files.read_config(path)


def test_of_several_processes_all_gather_and_the_first_writes(saved, tmp_path, monkeypatch):
  model, params, path = saved
  gathered = {0: [], 1: []}
  for index, shapes in gathered.items():
    monkeypatch.setattr(jax, "process_index", lambda index=index: index)
    hf.save(model, params, tmp_path / str(index),
            gather=lambda x, shapes=shapes: shapes.append(x.shape) or np.asarray(x))
  assert gathered[0] == gathered[1] and len(gathered[0]) == len(tensors_of(path))
  assert [folder.name for folder in tmp_path.iterdir()] == ["0"]
  assert (tmp_path / "0" / files.SINGLE).read_bytes() == (path / files.SINGLE).read_bytes()
  with pytest.raises(HFError, match="is partly on devices of other processes"):
    hf.save(model, {**params, "embed": {"embedding": SimpleNamespace(is_fully_addressable=False)}}, tmp_path / "2")


@pytest.mark.parametrize("path", REFERENCES, ids=lambda p: p.name)
def test_references_survive_the_round_trip(path, tmp_path):
  model, params = hf.load(path, dtype=None)
  hf.save(model, params, tmp_path / "again")
  assert_bitwise(hf.load(tmp_path / "again", dtype=None)[1], params)
  assert hf.architecture(tmp_path / "again")[1] == hf.architecture(path)[1]
  if not path.name.endswith(OTHER_SPELLINGS):
    before, after = tensors_of(path), tensors_of(tmp_path / "again")
    assert before.keys() == after.keys()
    for name, values in before.items():
      assert values.dtype == after[name].dtype and values.shape == after[name].shape, name
      assert values.tobytes() == after[name].tobytes(), name


@pytest.mark.parametrize("path", REFERENCES, ids=lambda p: p.name)
def test_transformers_computes_the_same_from_what_was_saved(path, tmp_path):
  transformers = pytest.importorskip("transformers")
  torch = pytest.importorskip("torch")

  def logits(folder):
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", output_loading_info=True)
    wrong = {key: report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if report[key]}
    assert not wrong or folder == path, wrong
    with torch.no_grad():
      return model.eval()(torch.tensor(TOKENS.astype(np.int64))).logits.numpy()

  model, params = hf.load(path, dtype=None)
  hf.save(model, params, tmp_path / "kept")
  del model.hf_config  # now config.json is made from the keys alone
  hf.save(model, params, tmp_path / "made")
  expected = logits(path)
  np.testing.assert_array_equal(logits(tmp_path / "kept"), expected)
  np.testing.assert_allclose(logits(tmp_path / "made"), expected, rtol=1e-5, atol=1e-5)


def test_shards_are_read_as_one(saved, tmp_path):
  model, params, path = saved
  hf.save(model, params, tmp_path / "shards", max_shard_bytes=2000)
  assert len(list((tmp_path / "shards").glob("model-*-of-*.safetensors"))) > 3
  assert_bitwise(hf.load(tmp_path / "shards")[1], params)


def test_a_sharded_load_is_the_one_on_a_single_device(saved):
  mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
  _, sharded = hf.load(saved[2], shardings=lambda abstract: mesh_lib.param_shardings(abstract, mesh)[0])
  kernel = sharded["blocks"]["attn"]["q"]["kernel"]
  assert kernel.sharding.num_devices == 8 and not kernel.sharding.is_fully_replicated
  assert_bitwise(sharded, hf.load(saved[2])[1])


def test_dtypes(saved, tmp_path):
  model, params, path = saved
  hf.save(model, params, tmp_path / "half", "bfloat16")
  assert files.read_config(tmp_path / "half")["torch_dtype"] == "bfloat16"
  halved = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params)
  kept_model, kept = hf.load(tmp_path / "half", dtype=None)
  assert_bitwise(kept, halved)
  assert kept_model.apply(kept, dict(tokens=TOKENS)).hidden.dtype == "bfloat16"
  assert_bitwise(hf.load(tmp_path / "half", dtype="float32")[1], jax.tree.map(lambda x: x.astype("float32"), halved))


def test_loaded_parameters_may_be_donated(saved):
  _, params = hf.load(saved[2])
  kernel = params["blocks"]["mlp"]["up"]["kernel"]
  before = np.array(kernel)
  doubled = jax.jit(lambda x: 2 * x, donate_argnums=0)(kernel)
  assert kernel.is_deleted()
  np.testing.assert_array_equal(doubled, 2 * before)


def test_architecture_reads_config_json_alone(copy):
  (copy / files.SINGLE).unlink()
  family, keys, notes = hf.architecture(copy)
  assert family.name == "llama" and keys["num_layers"] == 2 and keys["vocab_size"] == 24
  assert notes == []
  _, _, notes = hf.architecture(edit(copy, attention_dropout=0.1))
  assert "attention_dropout is 0.1" in notes[0]


@pytest.mark.parametrize("changed, message", [
    (dict(num_hidden_layers=3), "- model.layers.2.mlp.up_proj.weight"),
    (dict(num_hidden_layers=1), r"\+ model.layers.1.mlp.up_proj.weight"),
    (dict(num_hidden_layers=100_000), "asks for 100,000 tensors of one kind"),
    (dict(intermediate_size=31), r"! model.layers.0.mlp.up_proj.weight: \(31, 16\) by config.json, \(32, 16\) in"),
    (dict(vocab_size=25), r"! model.embed_tokens.weight: \(25, 16\) by config.json"),
    (dict(model_type="unheard_of", architectures=["UnheardOf"]), "unheard_of"),
])
def test_what_does_not_fit_is_told_before_any_device_is_touched(copy, monkeypatch, changed, message):
  monkeypatch.setattr(convert, "_put", lambda *args: pytest.fail("a device was touched"))
  with pytest.raises(HFError, match=message):
    hf.load(edit(copy, **changed))


def test_what_is_to_be_ignored_must_be_there(copy):
  with pytest.raises(HFError, match="model.hf_ignore names 'no_such', but .*config.json has no such entry"):
    hf.architecture(copy, ("no_such",))


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(HFError, match="file/model cannot be made: Not a directory. Give a folder that you may write to"):
    hf.prepare(tmp_path / "file" / "model", overwrite=False)


def test_a_folder_is_overwritten_only_when_asked(saved, copy):
  model, params, path = saved
  (copy / "README.md").write_text("mine")
  with pytest.raises(HFError, match="already holds model.safetensors, config.json"):
    hf.save(model, params, copy)
  hf.save(model, jax.tree.map(lambda x: x + 1, params), copy, max_shard_bytes=2000, overwrite=True)
  assert_bitwise(hf.load(copy)[1], jax.tree.map(lambda x: x + 1, params))
  assert (copy / "README.md").read_text() == "mine" and not (copy / files.SINGLE).exists()


def test_an_interrupted_overwrite_is_no_model(saved, copy, monkeypatch):
  model, params, path = saved

  def interrupted(*args):
    raise KeyboardInterrupt

  monkeypatch.setattr(hf, "write_json", interrupted)
  with pytest.raises(KeyboardInterrupt):
    hf.save(model, params, copy, overwrite=True)
  with pytest.raises(HFError, match="has no config.json"):
    hf.load(copy)


def test_a_failed_overwrite_leaves_the_old_model(saved, copy):
  model, params, path = saved
  with pytest.raises(HFError, match="beyond float16's range"):
    hf.save(model, jax.tree.map(lambda x: 1e9 * x, params), copy, "float16", overwrite=True)
  assert_bitwise(hf.load(copy)[1], params)


def test_the_source_of_a_model_is_kept_as_far_as_it_is_true(saved):
  model, _, path = saved
  source = {**files.read_config(path), "bos_token_id": 5, "initializer_range": 0.5}
  family, content = hf.config_json(model.architecture, source)
  assert content == source and family.name == "llama"
  keys = {**model.architecture, "rope_theta": 5e5}
  family, content = hf.config_json(keys, source)
  assert (content["bos_token_id"], content["initializer_range"]) == (5, 0.5)
  assert family.read(content, "here")["rope_theta"] == 5e5
  family, content = hf.config_json({**keys, "qk_norm": True}, source)
  assert family.name == "qwen3" and content["bos_token_id"] == 5


def test_keys_are_those_of_the_architecture_by_their_dotted_names():
  keys = hf.keys_of(json.loads(json.dumps(section(layer_pattern=("local", "global"), window=8).to_dict())), 24)
  assert set(keys) == set(ARCHITECTURE_KEYS)
  assert keys["vocab_size"] == 24 and keys["layer_pattern"] == ("local", "global")
  assert keys["rope_scaling.type"] == "none"
  cfg = section()
  hf.set_keys(cfg, keys)
  assert cfg.layer_pattern == ("local", "global") and cfg.window == 8


def test_small_files_are_copied_as_they_are(tmp_path):
  source = tmp_path / "source"
  (source / "additional_chat_templates").mkdir(parents=True)
  for name in (files.CONFIG, "tokenizer.json", "chat_template.jinja", "model.py", files.SINGLE,
               "additional_chat_templates/tool.jinja"):
    (source / name).write_bytes(name.encode() + b"\r\n\xff")
  hf.copy_small_files(source, tmp_path / "out")
  out = tmp_path / "out"
  copied = {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}
  expected = (files.CONFIG, "tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool.jinja")
  assert copied == {name: name.encode() + b"\r\n\xff" for name in expected}


@pytest.mark.parametrize("family", ["gemma4_shared", "gemma3n"])
def test_keys_and_values_that_no_layer_uses_are_passed_over(family, tmp_path):
  """Published folders of Gemma 3n, and Gemma 4 E2B and E4B, have them in layers that use those of others; elsewhere
  they are extra."""
  source = next(path for path in REFERENCES if path.name == family)
  folder = shutil.copytree(source, tmp_path / "folder")
  tensors = {name: np.array(values) for name, values in tensors_of(source).items()}
  more = {f"model.layers.{layer}.self_attn.{name}.weight": np.ones((16, 16), np.float32)
          for layer in (3, 4) for name in ("k_proj", "v_proj", "k_norm", "v_norm")}
  files.save_tensors(tensors | more, folder / "model.safetensors")
  model, params = hf.load(folder)
  assert_bitwise(params, hf.load(source)[1])
  hf.save(model, params, tmp_path / "saved")
  assert tensors_of(tmp_path / "saved").keys() == tensors.keys()
  files.save_tensors(tensors | {"model.layers.2.self_attn.v_norm.weight": np.ones(8, np.float32)},
                     folder / "model.safetensors")
  with pytest.raises(HFError, match=r"\+ model.layers.2.self_attn.v_norm.weight"):
    hf.load(folder)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "glm4_moe_lite", "deepseek_v32"])
def test_layers_that_predict_tokens_further_ahead_are_passed_over_with_a_word(family, tmp_path):
  """Published folders of DeepSeek-V3 and GLM 4.5 have one after the last layer; what is saved says that there is
  none."""
  source = next(path for path in REFERENCES if path.name == family)
  folder = shutil.copytree(source, tmp_path / "folder")
  tensors = {name: np.array(values) for name, values in tensors_of(source).items()}
  ahead = {f"model.layers.3.{name}": np.ones((16, 4), np.float32) for name in (
      "eh_proj.weight", "embed_tokens.weight", "self_attn.o_proj.weight", "mlp.experts.0.up_proj.weight")}
  files.save_tensors(tensors | ahead, folder / "model.safetensors")
  config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
  (folder / "config.json").write_text(json.dumps(config))
  *_, notes = hf.architecture(folder)
  assert any("num_nextn_predict_layers is 1; layers that predict tokens further ahead are passed over" in note
             for note in notes)
  model, params = hf.load(folder)
  assert_bitwise(params, hf.load(source)[1])
  hf.save(model, params, tmp_path / "saved")
  assert json.loads((tmp_path / "saved" / "config.json").read_text())["num_nextn_predict_layers"] == 0
  assert tensors_of(tmp_path / "saved").keys() == tensors.keys()
  files.save_tensors({name: values for name, values in (tensors | ahead).items() if "eh_proj" not in name},
                     folder / "model.safetensors")
  with pytest.raises(HFError, match=r"\+ model.layers.3.embed_tokens.weight"):
    hf.load(folder)
