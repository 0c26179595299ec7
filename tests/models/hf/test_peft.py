"""Adapters in PEFT's format: what PEFT computed (make_peft_references.py), round trips to the bit, what is refused."""

import json
import re
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import api, hf, lora
from models.hf import convert, families, peft
from models.hf.errors import HFError
from models.hf.peft_modules import AdapterLayout
from trainer import tree
from trainer.config import defaults
from trainer.errors import ConfigError

REFERENCES = Path(__file__).resolve().parent / "peft_references"
# The config's model.lora for each reference.
LORA = {
    "llama": dict(rank=3, alpha=8.0, targets=("attn/[qv]/kernel", "mlp/down")),
    "llama_rslora": dict(rank=4, alpha=6.0, rslora=True, targets=("attn/o/",)),
    "gpt2": dict(rank=3, alpha=6.0, targets=("attn/[qkv]/", "mlp/down")),
    "llama_modules": dict(rank=2, alpha=4.0, targets=("attn/q/",),
                          modules_to_save=("^embed/", "attn_norm", "^final_norm")),
    "llama_apart": dict(rank=2, alpha=4.0, targets=("attn/q/",), modules_to_save=("embed/",)),
    "llama_dora": dict(rank=3, alpha=8.0, dora=True, targets=("attn/q/", "mlp/down")),
    "gpt2_dora": dict(rank=2, alpha=6.0, dora=True, targets=("attn/[qkv]/",)),
    "llama_score": dict(rank=2, alpha=4.0, targets=("attn/v/",)),
    "gemma4_moe": dict(rank=2, alpha=4.0),
    "gemma4_shared": dict(rank=2, alpha=4.0, targets=("attn/[qkvo]/", "mlp/", "per_layer/", "per_layer_proj")),
    "gemma3n": dict(rank=2, alpha=4.0, targets=("attn/[qvo]/", "mlp/gate", "laurel/", "per_layer/gate")),
    "glm_moe_dsa": dict(rank=2, alpha=4.0, targets=("attn/",)),
    "gemma4_some_layers": dict(rank=2, alpha=4.0, targets=("blocks/attn/q/", "wide_mlp/down")),
    "llama_embed": dict(rank=3, alpha=8.0, targets=("attn/q/", "^embed/")),
    "llama_embed_apart": dict(rank=3, alpha=8.0, targets=("attn/q/", "^embed/")),
    "llama_head": dict(rank=3, alpha=8.0, targets=("^embed/", "^unembed/")),
    "gemma4_embed": dict(rank=2, alpha=4.0, targets=("embed/",)),
    "llama_tokens": dict(rank=3, alpha=8.0, targets=("attn/q/",), trainable_token_indices=(17, 3, 39)),
    "llama_tokens_apart": dict(rank=3, alpha=8.0, targets=("attn/q/",), trainable_token_indices=(17, 3, 39)),
    "qwen3_moe": dict(rank=2, alpha=6.0, targets=("attn/q/", "moe/experts/")),
    "qwen3_moe_down": dict(rank=2, alpha=6.0, rslora=True, targets=("moe/experts/down",)),
    "gpt_oss": dict(rank=2, alpha=6.0, targets=("moe/experts/",)),
}
LINEARS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
MODULES = {"llama": ["down_proj", "q_proj", "v_proj"], "llama_rslora": ["o_proj"], "gpt2": ["c_attn", "mlp.c_proj"],
           "llama_modules": ["q_proj"], "llama_apart": ["q_proj"], "llama_score": ["v_proj"],
           "llama_dora": ["down_proj", "q_proj"], "gpt2_dora": ["c_attn"], "gemma4_moe": LINEARS,
           "gemma4_shared": sorted([*LINEARS, "per_layer_input_gate", "per_layer_projection",
                                    "per_layer_model_projection"]),
           "gemma3n": ["gate_proj", "linear_left", "linear_right", "o_proj", "per_layer_input_gate", "q_proj",
                       "v_proj"],
           "glm_moe_dsa": ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"],
           "gemma4_some_layers": r"(.*\.)?((0)\.self_attn\.q_proj|(2|3)\.mlp\.down_proj)",
           "llama_embed": ["embed_tokens", "q_proj"], "llama_embed_apart": ["embed_tokens", "q_proj"],
           "llama_head": ["embed_tokens", "lm_head"], "gemma4_embed": ["embed_tokens", "embed_tokens_per_layer"],
           "llama_tokens": ["q_proj"], "llama_tokens_apart": ["q_proj"], "qwen3_moe": ["q_proj"], "qwen3_moe_down": [],
           "gpt_oss": []}
WHOLE = {"llama_modules": ["embed_tokens", "input_layernorm", "lm_head", "model.norm"],
         "llama_apart": ["embed_tokens", "lm_head"], "llama_score": ["score"]}


class Case:
  """A model with adapters for the base of a reference."""

  lengths = table = None

  def __init__(self, name, **changed):
    self.folder = REFERENCES / name
    self.prepare(self.folder / "base", **{**LORA[name], **changed})

  def prepare(self, base, **options):
    self.family, self.keys, _ = hf.architecture(base)
    section = defaults().model
    hf.set_keys(section, self.keys)
    section.tie_embeddings = self.keys["tie_embeddings"] and not self.folder.name.endswith("_apart")
    section.lora.update(options)
    self.lora = section.lora
    self.model = api.make_model(section, vocab_size=self.keys["vocab_size"], params_dtype="float32",
                                compute_dtype="float32")
    self.shapes = tree.flatten(self.model.abstract_params())
    self.wanted = {path: leaf for path, leaf in self.shapes.items() if re.search(self.model.trained_only, path)}
    base = tree.flatten(hf.load(base)[1])
    self.table = lambda path: np.asarray(base[path].T if path == "unembed/kernel" and path in base
                                         else base["embed/embedding" if path == "unembed/kernel" else path])
    if self.lora.dora:
      self.lengths = lambda kernel: np.linalg.norm(np.float64(base[kernel]), axis=1).astype(np.float32)
    self.layout = AdapterLayout(self.family, self.keys, self.shapes, self.lora, self.lengths, self.table)

  def read(self, folder=None, wanted=None):
    return peft.load_adapters(folder or self.folder / "adapters", wanted or self.wanted, self.layout)

  def write(self, out, leaves, **kwargs):
    read = lambda path, index: np.asarray(leaves[path])[index]  # noqa: E731
    peft.save_adapters(out, read, self.layout, base="some/base", **kwargs)
    return json.loads((out / peft.CONFIG).read_text()), load_file(out / peft.TENSORS)

  def random(self, seed=0):
    rng = np.random.default_rng(seed)
    return {path: rng.normal(size=leaf.shape).astype(np.float32) for path, leaf in self.wanted.items()}


def outputs(model, params, tokens):
  """Logits, or the scores of whole rows."""
  if not model.num_labels:
    return jax.jit(model.logits)(params, tokens)
  return model.score(params, model.apply(params, dict(tokens=tokens)).hidden[:, -1])


@pytest.mark.parametrize("name", LORA)
def test_logits_are_those_of_peft(name):
  case, saved = Case(name), np.load(REFERENCES / name / "logits.npz")
  base_model, base = hf.load(case.folder / "base")
  np.testing.assert_allclose(outputs(base_model, base, saved["tokens"]), saved["base"], atol=1e-5)
  read = case.read()
  assert read.keys() == case.wanted.keys()
  base = tree.flatten(base)
  if "unembed/kernel" in case.shapes and "unembed/kernel" not in base and not case.model.num_labels:
    base["unembed/kernel"] = base["embed/embedding"].T
  params = tree.unflatten(base | read)
  np.testing.assert_allclose(outputs(case.model, params, saved["tokens"]), saved["adapted"], atol=1e-5)
  if base_model.abstract_params().keys() == set(params):  # else its base has one matrix for the two
    merged = lora.merge(params, case.model.spec.lora)
    np.testing.assert_allclose(outputs(base_model, merged, saved["tokens"]), saved["adapted"], atol=1e-5)


@pytest.mark.parametrize("name", LORA)
def test_reading_and_writing_gives_the_same_file(name, tmp_path):
  case = Case(name)
  config, tensors = case.write(tmp_path / "out", case.read())
  original = load_file(case.folder / "adapters" / peft.TENSORS)
  # PEFT writes the base's tables, too.
  original = {key: values for key, values in original.items() if not key.endswith(".base_layer.weight")}
  assert tensors.keys() == original.keys()
  for key, values in original.items():
    assert tensors[key].dtype == values.dtype, key
    if key.endswith(("magnitude_vector", "tokens_delta")):  # less what the base has, and that again
      np.testing.assert_allclose(tensors[key], values, rtol=3e-7, atol=1e-8, err_msg=key)
    else:
      assert tensors[key].tobytes() == values.tobytes(), key
  theirs = json.loads((case.folder / "adapters" / peft.CONFIG).read_text())
  assert config["modules_to_save"] == WHOLE.get(name)
  for key in ("peft_type", "task_type", "r", "lora_alpha", "use_rslora", "bias", "fan_in_fan_out", "rank_pattern",
              "alpha_pattern"):
    assert config[key] == theirs[key], key
  assert config.get("use_dora", False) == theirs["use_dora"]
  assert sorted(config.get("target_parameters", [])) == sorted(theirs["target_parameters"] or [])
  assert config.get("trainable_token_indices") == theirs["trainable_token_indices"]
  assert config.get("ensure_weight_tying", False) == theirs["ensure_weight_tying"]
  targets = theirs["target_modules"]
  if not isinstance(targets, str):  # with ensure_weight_tying PEFT names the embedding twice
    targets = [target for target in targets if target != "model.embed_tokens"]
  assert config["target_modules"] == MODULES[name] == (targets if isinstance(targets, str) else sorted(targets))
  assert config["base_model_name_or_path"] == "some/base"


@pytest.mark.parametrize("name, targets", [
    ("llama", ("attn/[qv]/kernel", "mlp/down")), ("gpt2", ("attn/[qkvo]/kernel",)), ("gpt2", ("attn/[qv]/", "mlp/up"))])
@pytest.mark.parametrize("rslora", [False, True])
def test_writing_and_reading_gives_the_same_adapters(name, targets, rslora, tmp_path):
  """Also where kernels with adapters of their own are one module there, of which some have none."""
  case = Case(name, targets=targets, rslora=rslora)
  leaves = case.random()
  case.write(tmp_path / "out", leaves)
  for path, values in case.read(tmp_path / "out").items():
    assert values.tobytes() == leaves[path].tobytes(), path


def test_a_fused_module_computes_what_its_parts_do(tmp_path):
  """GPT-2's c_attn with query and value adapted: B A of the file is [q | 0 | v], at three times the rank's scale."""
  case = Case("gpt2", targets=("attn/[qv]/",))
  leaves = case.random()
  config, tensors = case.write(tmp_path / "out", leaves)
  assert (config["r"], config["lora_alpha"]) == (3, 6)
  assert (config["rank_pattern"], config["alpha_pattern"]) == ({"c_attn": 6}, {"c_attn": 12})
  for layer in range(2):
    a, b = (tensors[f"base_model.model.transformer.h.{layer}.attn.c_attn.lora_{part}.weight"] for part in "AB")
    assert a.shape == (6, 16) and b.shape == (48, 6)
    q, v = (leaves[f"blocks/attn/{p}/lora_a"][layer] @ leaves[f"blocks/attn/{p}/lora_b"][layer] for p in "qv")
    expected = np.concatenate([q, np.zeros_like(q), v], axis=1)
    np.testing.assert_allclose((b @ a).T, expected, atol=1e-5)


@pytest.mark.parametrize("targets, expected", [
    (("attn/o/",), ["attn.c_proj"]), (("attn/o/", "mlp/down"), ["c_proj"]), (("mlp/",), ["c_fc", "mlp.c_proj"])])
def test_targets_are_the_shortest_names_that_mean_no_other_module(targets, expected, tmp_path):
  case = Case("gpt2", targets=targets)
  config, _ = case.write(tmp_path / "out", case.random())
  assert sorted(set(config["target_modules"])) == expected


def test_a_family_with_fused_linears(tmp_path):
  """Phi 3: query, key and value are one Linear, gate and up another."""
  case = Case("llama", targets=("attn/[qkv]/", "mlp/gate", "mlp/up"))
  case.layout = case.layout._replace(family=next(family for family in families.FAMILIES if family.name == "phi3"))
  leaves = case.random()
  config, tensors = case.write(tmp_path / "out", leaves)
  assert config["fan_in_fan_out"] is False and config["target_modules"] == ["gate_up_proj", "qkv_proj"]
  assert tensors["base_model.model.model.layers.1.self_attn.qkv_proj.lora_B.weight"].shape == (32, 9)
  for path, values in case.read(tmp_path / "out").items():
    assert values.tobytes() == leaves[path].tobytes(), path


def test_a_family_with_linears_in_groups(tmp_path):
  """Qwen 3 Next: query, key, value and gate of a head stand together; so do the lengths of their outputs."""
  case = Case.__new__(Case)
  case.folder = REFERENCES.parent / "references" / "qwen3_next"
  case.prepare(case.folder, rank=2, alpha=4.0, dora=True, targets=("delta/[qkvz]/kernel",))
  leaves = case.random()
  _, tensors = case.write(tmp_path / "out", leaves)
  read = case.read(tmp_path / "out")
  for path, values in read.items():
    np.testing.assert_allclose(values, leaves[path], atol=1e-6, err_msg=path)
  name = next(name for name in tensors if name.endswith("qkvz.lora_B.weight"))
  assert not np.array_equal(tensors[name], np.concatenate([
      leaves[f"blocks/delta/{part}/lora_b"][0].T for part in "qkvz"]))


def test_dtypes(tmp_path):
  """Written in bfloat16 on request; read into the dtype that is wanted."""
  case = Case("llama")
  leaves = case.random()
  _, tensors = case.write(tmp_path / "out", leaves, dtype=ml_dtypes.bfloat16)
  assert {values.dtype for values in tensors.values()} == {np.dtype(ml_dtypes.bfloat16)}
  assert len({(tmp_path / "out" / file).stat().st_mode for file in (peft.CONFIG, peft.TENSORS)}) == 1
  for path, values in case.read(tmp_path / "out").items():
    np.testing.assert_array_equal(values, leaves[path].astype(ml_dtypes.bfloat16).astype(np.float32))


def test_adapters_go_where_they_are_wanted():
  case = Case("llama")
  mesh = jax.make_mesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
  split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "tensor"))
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  wanted = {p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split if p.endswith("_a") else whole)
            for p, x in case.wanted.items()}
  expected = case.read()
  for path, values in case.read(wanted=wanted).items():
    assert values.sharding == wanted[path].sharding
    np.testing.assert_array_equal(values, expected[path])


@pytest.fixture
def copied(tmp_path):
  """(folder, change(config keys)): the Llama reference's adapters, to be spoilt."""
  folder = tmp_path / "adapters"
  shutil.copytree(REFERENCES / "llama" / "adapters", folder)

  def change(**keys):
    file = folder / peft.CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))

  return folder, change


@pytest.mark.parametrize("change, message", [
    (dict(use_dora=True), "use_dora is True, but model.lora.dora=False. Set model.lora.dora=True"),
    (dict(use_dora=1), "use_dora is 1"),
    (dict(bias="lora_only"), "bias is 'lora_only'"),
    (dict(layers_to_transform=[0]), "layers_to_transform"),
    (dict(init_lora_weights="pissa"), "init_lora_weights is 'pissa'"),
    (dict(peft_type="LOHA"), "peft_type is 'LOHA'"),
    (dict(task_type="FEATURE_EXTRACTION"), "task_type is 'FEATURE_EXTRACTION'"),
    (dict(fan_in_fan_out=True), "fan_in_fan_out is True.*Set fan_in_fan_out to false"),
    (dict(use_newest_trick=True), "use_newest_trick = True: not known"),
    (dict(lora_alpha=16), "model.lora.alpha=16"),
    (dict(use_rslora=True), "model.lora.rslora=True"),
    (dict(alpha_pattern={"v_proj": 4}), "v_proj has rank 3 and scale 1.33"),
    (dict(rank_pattern={"layers.1.self_attn.q_proj": 6}), "the layers of .*q_proj differ"),
    (dict(rank_pattern={"(": 6}), "not a regular expression"),
    (dict(r="three"), "r is 'three'"),
])
def test_options_that_are_not_ours_are_refused(copied, change, message):
  folder, spoil = copied
  spoil(**change)
  with pytest.raises(HFError, match=message):
    Case("llama").read(folder)


def test_whole_parameters_that_the_file_lacks_come_from_the_base():
  """Adapters of another run go on with the embedding trained, too."""
  case = Case("llama", modules_to_save=("^embed/",))
  assert "embed/embedding" in case.wanted and case.read().keys() == case.wanted.keys() - {"embed/embedding"}


@pytest.mark.parametrize("options, message", [
    (dict(modules_to_save=("^embed/", "attn_norm")), r"\+ .*model.norm.weight \(16,\): matches no target"),
    (dict(modules_to_save=("nothing",)), "modules_to_save: the pattern 'nothing' matches none"),
    (dict(modules_to_save=("attn/q/",)), "matches blocks/attn/q/kernel, which have adapters, too"),
    (dict(modules_to_save=("(",)), "modules_to_save"),
])
def test_whole_parameters_that_do_not_match(options, message):
  with pytest.raises((HFError, ConfigError), match=message):
    Case("llama_modules", **options).read()


def test_an_embedding_apart_from_the_unembedding_is_refused_where_they_are_one(tmp_path):
  case = Case("llama_modules", modules_to_save=("^embed/",))
  with pytest.raises(HFError, match="lm_head.weight is not model.embed_tokens.weight; .* model.tie_embeddings=False"):
    case.read(REFERENCES / "llama_apart" / "adapters")
  case.write(tmp_path / "out", case.random())
  tensors = load_file(tmp_path / "out" / peft.TENSORS)
  save_file({name: x for name, x in tensors.items() if "lm_head" not in name}, tmp_path / "out" / peft.TENSORS)
  with pytest.raises(HFError, match="no lm_head.weight, so that PEFT leaves the unembedding as the base has it"):
    case.read(tmp_path / "out")


def test_a_module_is_saved_as_a_whole_or_not_at_all(tmp_path):
  case = Case("gpt2", modules_to_save=("final_norm/scale",))
  with pytest.raises(HFError, match="ln_f.bias is not among model.lora.modules_to_save: add final_norm/bias"):
    case.write(tmp_path / "out", case.random())
  case = Case("gpt2_dora", targets=("attn/[qv]/",))
  with pytest.raises(HFError, match="c_attn holds blocks/attn/k/kernel, too, .* DoRA trains the lengths of a whole m"):
    case.write(tmp_path / "out", case.random())
  case = Case("gpt2", targets=("mlp/down",), modules_to_save=("attn/[qk]/",))
  with pytest.raises(HFError, match="c_attn.* holds blocks/attn/v/.* which model.lora.modules_to_save does not match"):
    case.write(tmp_path / "out", case.random())


def test_a_missing_layer_is_listed(copied):
  folder, _ = copied
  shutil.copytree(REFERENCES / "llama_modules" / "adapters", folder, dirs_exist_ok=True)
  tensors = load_file(folder / peft.TENSORS)
  save_file({n: x for n, x in tensors.items() if "layers.1.input_layernorm" not in n}, folder / peft.TENSORS)
  with pytest.raises(HFError, match=r"- model.layers.1.input_layernorm.weight: not in the file"):
    Case("llama_modules").read(folder)


def test_patterns_without_effect_are_read(copied):
  folder, change = copied
  expected = Case("llama").read()
  change(rank_pattern={"k_proj": 64}, alpha_pattern={r".*\.0\..*": 8.0})
  for path, values in Case("llama").read(folder).items():
    np.testing.assert_array_equal(values, expected[path])


@pytest.mark.parametrize("targets, message", [
    (("attn/q/", "mlp/down"), r"\+ .*0.self_attn.v_proj.lora_A.weight \(3, 16\): matches no target"),
    (("attn/[qkv]/", "mlp/down"), r"- .*0.self_attn.k_proj.lora_A.weight \(3, 16\): not in the file"),
])
def test_both_sides_are_listed_where_targets_differ(targets, message):
  with pytest.raises(HFError, match=message):
    Case("llama", targets=targets).read()


def test_another_shape_is_listed(copied):
  folder, _ = copied
  tensors = load_file(folder / peft.TENSORS)
  name = "base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"
  save_file(tensors | {name: np.zeros((4, 3), np.float32)}, folder / peft.TENSORS)
  with pytest.raises(HFError, match=r"! .*v_proj.lora_B.weight: \(4, 3\) in the file, \(8, 3\)"):
    Case("llama").read(folder)


def test_a_length_where_none_is_trained_is_listed(copied):
  folder, _ = copied
  name = "base_model.model.model.layers.0.self_attn.v_proj.lora_magnitude_vector"
  save_file(load_file(folder / peft.TENSORS) | {name: np.ones(8, np.float32)}, folder / peft.TENSORS)
  with pytest.raises(HFError, match=r"\+ .*0.self_attn.v_proj.lora_magnitude_vector \(8,\): matches no target"):
    Case("llama").read(folder)


def test_a_fused_adapter_that_changes_more_than_the_targets_is_refused():
  with pytest.raises(HFError, match="change blocks/attn/k/kernel too"):
    Case("gpt2", targets=("attn/[qv]/", "mlp/down")).read()


def test_a_fused_adapter_of_another_rank_is_refused(tmp_path):
  """Rank 6 could be two blocks of 3, but is not."""
  case = Case("gpt2", rank=6, alpha=12.0, targets=("attn/[qv]/",))
  leaves = case.random()
  leaves["blocks/attn/v/lora_a"] = leaves["blocks/attn/q/lora_a"]
  case.write(tmp_path / "out", leaves)
  with pytest.raises(HFError, match="not made of 2 blocks of rank 3"):
    Case("gpt2", rank=3, alpha=6.0, targets=("attn/[qv]/",)).read(tmp_path / "out")


def test_files_that_are_missing_or_damaged(copied):
  folder, _ = copied
  file = folder / peft.TENSORS
  content = file.read_bytes()
  file.write_bytes(content[:-10])
  with pytest.raises(HFError, match="truncated or damaged"):
    Case("llama").read(folder)
  file.rename(folder / "adapter_model.bin")
  with pytest.raises(HFError, match="only adapter_model.bin; pickled"):
    Case("llama").read(folder)
  (folder / peft.CONFIG).unlink()
  with pytest.raises(HFError, match="no adapter_config.json"):
    Case("llama").read(folder)


def test_kernels_without_a_module_are_refused(tmp_path):
  case = Case("llama", targets=("mlp/gate",))
  case.layout = case.layout._replace(family=next(family for family in families.FAMILIES if family.name == "mixtral"))
  with pytest.raises(HFError, match="mixtral has no module for blocks/mlp/gate/kernel"):
    case.write(tmp_path / "out", case.random())


@pytest.mark.parametrize("name, targets, count", [
    ("qwen3_next", ("delta/[qkvzo]/", "attn/q/"), 2 * 2 + 1),
    ("granite4", ("mamba/([zxbco]|dt)/", "attn/q/"), 2 * 2 + 1),
    ("llama4_interleaved", ("attn/q/", "mlp/gate/", "shared/up/"), 5 + 3 + 2)])
def test_adapters_of_projections_in_groups_are_those_of_their_matrix(name, targets, count, tmp_path):
  """Qwen3-Next: one matrix has, for each head of keys, its part of queries, keys, values and gates; in some layers.
  Granite 4: one has all five projections of a mamba layer. Llama 4: MLPs and shared experts have turns."""
  folder = REFERENCES.parent / "references" / name
  case = Case.__new__(Case)
  case.folder = folder
  case.prepare(folder, rank=2, alpha=6.0, targets=targets)
  leaves, (_, base) = case.random(), hf.load(folder)
  _, adapters = case.write(tmp_path / "adapters", leaves)
  merged = tree.flatten(lora.merge(tree.unflatten(tree.flatten(base) | leaves), case.model.spec.lora))
  read = lambda path, index: np.asarray(merged[path])[index]  # noqa: E731
  convert.write_tensors(read, case.family, case.keys, merged, tmp_path / "merged")
  before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "merged"))
  changed = {name for name, values in before.items() if not np.array_equal(values, after[name])}
  assert {f"base_model.model.{name.removesuffix('weight')}lora_A.weight" for name in changed} == {
      name for name in adapters if "lora_A" in name}
  assert len(changed) == count
  for name in changed:
    a, b = (adapters[f"base_model.model.{name.removesuffix('weight')}lora_{part}.weight"] for part in "AB")
    np.testing.assert_allclose(b @ a * case.model.spec.lora.scale, after[name] - before[name], atol=2e-5)
  for path, values in case.read(tmp_path / "adapters").items():
    np.testing.assert_array_equal(values, leaves[path])


def test_what_is_written_of_groups_is_what_was_read(tmp_path):
  folder = REFERENCES.parent / "references" / "qwen3_next"
  family, keys, _ = hf.architecture(folder)
  params = tree.flatten(hf.load(folder)[1])
  convert.write_tensors(lambda path, index: np.asarray(params[path])[index], family, keys, params, tmp_path)
  before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path))
  assert before.keys() == after.keys()
  for name, values in before.items():
    np.testing.assert_array_equal(values, after[name], err_msg=name)
