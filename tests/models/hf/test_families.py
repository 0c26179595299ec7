"""Weft against transformers, for every family: the files in references/ were made by make_references.py beside it."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import api, hf
from models.hf import families
from models.hf.canonical import NEUTRAL, canonical
from models.hf.errors import HFError
from models.hf.families import gemma, mtp, qwen2_5_vl, smolvlm
from models.hf.family import Family, Tensor
from models.hf.source import Source
from models.spec import ARCHITECTURE_KEYS
from trainer import tree as tree_lib

REFERENCES = Path(__file__).parent / "references"
CASES = sorted(p.name for p in REFERENCES.iterdir())
# Whose function an earlier family computes, too.
SAME_AS = {"qwen3_5_moe": "qwen3_next", "granite4_rope": "granite", "glm4_moe_lite": "deepseek_v3"}
# Of the same family as another: what has to be compiled for them is every night's.
SLOW = ("deepseek_v2_lite", "deepseek_v3_halves", "glm4_moe_bare", "gpt_oss", "granite4_moe", "granite4_rope",
        "mixtral_fused", "qwen3_5_moe", "qwen3_moe_fused", "stablelm_parallel")
# Whose gradients, which take twice as long to compile as logits, are compared by default, too: one for each way to
# attend, to carry a state, to choose experts, and to add to the residual stream. JAX derives those of the others.
GRADIENTS = ("gemma3n", "glm_moe_dsa", "gpt_oss_mxfp4", "llama", "llama4_interleaved", "nemotron_h", "qwen3_5")


@dataclasses.dataclass
class Case:
  """A reference, and the model that was read from its folder."""

  folder: Path
  family: Family
  params: dict
  # From tokens and segments [2, T] to logits [2, T, V], and for one of GRADIENTS to what `with_gradients` gives.
  run: Callable
  # The same to logits, the mean next-token cross-entropy and its gradient.
  with_gradients: Callable
  reference: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def runs():
  return {}


def cases(slow):
  return [pytest.param(name, marks=pytest.mark.slow if slow(name) else ()) for name in CASES]


@pytest.fixture(scope="module", params=cases(lambda name: name in SLOW))
def case(request, runs):
  folder = REFERENCES / request.param
  model, params = hf.load(folder, dtype="float32")
  architecture = tuple(sorted(read(folder).items()))
  # bfloat16, sharded and other copies are one architecture, compiled once.
  logits, with_gradients = runs.setdefault(architecture, compiled(model))
  run = with_gradients if request.param in GRADIENTS else logits
  with np.load(folder / "reference.npz") as reference:
    return Case(folder, family_of(request.param), params, functools.partial(run, params),
                functools.partial(with_gradients, params), dict(reference))


def compiled(model: api.Model) -> tuple[Callable, Callable]:
  """From parameters, tokens and segments to logits alone, and to logits, loss and gradients."""
  def logits(params, tokens_BxT, segments_BxT):
    return (model.logits(params, tokens_BxT, segment_ids=segments_BxT),)

  def run(params, tokens_BxT, segments_BxT):
    def loss(params):
      logits_BxTxV = model.logits(params, tokens_BxT, segment_ids=segments_BxT)
      log_probs = jax.nn.log_softmax(logits_BxTxV[:, :-1])
      return -jnp.take_along_axis(log_probs, tokens_BxT[:, 1:, None], axis=-1).mean(), logits_BxTxV

    (value, logits_BxTxV), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    return logits_BxTxV, value, gradients

  return jax.jit(logits), jax.jit(run)


def family_of(name: str) -> Family:
  return families.find(json.loads((REFERENCES / name / "config.json").read_text()), name)


def read(folder: Path, name: str = "config.json") -> dict:
  config = json.loads((folder / name).read_text())
  return families.find(config, name).read(config, name)


def assert_close(actual, expected, tolerance: float):
  """Relative to the largest expected value."""
  np.testing.assert_allclose(np.asarray(actual) / np.abs(expected).max(), expected / np.abs(expected).max(), rtol=0,
                             atol=tolerance)


def test_every_family_has_a_reference():
  assert {family_of(name) for name in CASES} == set(families.FAMILIES)


def test_logits(case):
  logits, *_ = case.run(case.reference["tokens"], np.ones_like(case.reference["tokens"]))
  assert_close(logits, case.reference["logits"], 1e-5)


def test_logits_with_padding(case):
  real = len(case.reference["padded"])
  segments = np.ones_like(case.reference["tokens"])
  segments[1, real:] = 0
  logits, *_ = case.run(case.reference["tokens"], segments)
  assert_close(logits[1, :real], case.reference["padded"], 1e-5)
  assert_close(logits[0], case.reference["logits"][0], 1e-5)


def test_logits_of_packed_documents(case):
  """Two documents in one row, the first of them alone in the other."""
  first = 9  # SPLIT of make_references.py
  tokens = np.stack([case.reference["tokens"][0], case.reference["tokens"][0]])
  segments = np.where(np.arange(tokens.shape[1]) < first, 1, [[2], [0]]).astype(np.int32)
  logits, *_ = case.run(tokens, segments)
  assert_close(logits[0], case.reference["documents"], 1e-5)
  assert_close(logits[1, :first], case.reference["documents"][:first], 1e-5)


@pytest.mark.parametrize("case", cases(lambda name: name not in GRADIENTS), indirect=True)
def test_loss_and_gradients(case):
  """Theirs is the mean cross-entropy of the logits that are kept, in float64."""
  _, loss, gradients = case.with_gradients(case.reference["tokens"], np.ones_like(case.reference["tokens"]))
  logits_NxV = case.reference["logits"][:, :-1].astype(np.float64).reshape(-1, case.reference["logits"].shape[-1])
  chosen_N = np.take_along_axis(logits_NxV, case.reference["tokens"][:, 1:].reshape(-1, 1), axis=1)[:, 0]
  assert loss == pytest.approx((np.log(np.exp(logits_NxV).sum(axis=1)) - chosen_N).mean(), rel=1e-6)
  names = [str(name) for name in case.reference["gradient_names"]]
  assert len(set(names)) == 2
  for i, name in enumerate(names):
    assert_close(theirs(case, name, gradients), case.reference[f"gradient_{i}"], 1e-5)


def theirs(case: Case, name: str, tree: dict) -> np.ndarray:
  """A tensor of theirs, put together from ours; a second way to do what models/hf/convert.py does."""
  def layer_of(tensor: Tensor) -> int | None:
    layers = range(8) if tensor.layers is None else tensor.layers
    names = {case.family.prefixes[0] + tensor.theirs.format(layer=i, expert=0, head=0): i for i in layers}
    return names.get(name)

  leaves = tree_lib.flatten(tree)
  tensor = next(t for t in case.family.tensors(read(case.folder)) if layer_of(t) is not None)
  parts = [np.asarray(leaves[p]) for p in paths(tensor)]
  if "{layer}" in tensor.theirs:
    layer = layer_of(tensor)
    parts = [part[layer if tensor.layers is None else tensor.layers.index(layer)] for part in parts]
  if "{expert}" in tensor.theirs:  # the first
    parts = [part[0] for part in parts]
  if tensor.groups:  # of each head of keys: its share of queries, keys, values and gates
    parts = [np.concatenate([share for shares in zip(*(np.split(part, tensor.groups, axis=-1) for part in parts),
                                                     strict=True) for share in shares], axis=-1)]
  return np.concatenate([part.swapaxes(-1, -2) if tensor.transpose else part for part in parts], tensor.axis)


def test_tensors_are_the_parameters_of_the_model(case):
  """The family's list covers what the model has, and lists nothing that it has not."""
  listed = {path for tensor in case.family.tensors(read(case.folder)) for path in paths(tensor)}
  assert listed == set(tree_lib.flatten(case.params))


def paths(tensor: Tensor) -> tuple[str, ...]:
  return (tensor.ours,) if isinstance(tensor.ours, str) else tensor.ours


# ------------------------------------------------------------------------------------------------ config.json


@pytest.mark.parametrize("name", CASES)
def test_both_layouts_say_the_same(name):
  new, old = read(REFERENCES / name), read(REFERENCES / name, "config_4.json")
  assert new == old
  assert set(new) == set(ARCHITECTURE_KEYS)


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_reads_back(name):
  model = read(REFERENCES / name)
  family = family_of(name)
  written = json.loads(json.dumps(family.write(model)))
  assert family.read(written, "written") == model
  assert written["architectures"] == [family.architectures[0]]
  assert family.notes(written) == []


@pytest.mark.parametrize("name", CASES)
def test_match_finds_the_family(name):
  """Each case has something that no other family has; but Qwen3.5 with experts computes what Qwen3-Next does, GLM 4.7
  Flash what DeepSeek-V3 does, and Granite 4 without layers of Mamba and without experts what Granite 3 does."""
  model = read(REFERENCES / name)
  family, config = families.match(model)
  assert family is family_of(SAME_AS.get(name, name))
  assert family.read(config, "matched") == model


def test_match_says_what_no_family_has():
  model = read(REFERENCES / "llama") | {"norm_position": "post", "positions": "none"}
  says = r"nearest is granite4.*model\.norm_position = 'post' \(nearest: 'pre'\).*Families:"
  with pytest.raises(HFError, match=says):
    families.match(model)


def test_write_names_what_the_family_cannot_express():
  model = read(REFERENCES / "llama")
  mistral = families.MISTRAL
  with pytest.raises(HFError, match=r"family mistral cannot express model\.qkv_bias = True"):
    mistral.write(model | {"qkv_bias": True})
  with pytest.raises(HFError, match="activation = 'relu2'"):
    families.LLAMA.write(model | {"activation": "relu2"})
  with pytest.raises(HFError, match="attention_out_bias = False"):
    families.LLAMA.write(model | {"qkv_bias": True})
  with pytest.raises(HFError, match="attention_scale = 0.3"):
    families.GEMMA2.write(read(REFERENCES / "gemma2") | {"attention_scale": 0.3})
  uneven = model | {"hidden_size": 18}
  with pytest.raises(HFError, match="hidden_size 18 must be a multiple of the 4 heads"):
    families.LLAMA.write(uneven)
  assert families.match(uneven)[0] is mistral


def test_canonical_joins_what_is_the_same_function():
  model = read(REFERENCES / "llama")
  same = model | {"num_kv_heads": model["num_kv_heads"], "attention_scale": model["head_dim"] ** -0.5, "window": 7,
                  "layer_pattern": ("global", "global"), "rope_local_theta": 3.0, "rope_scaling.factor": 9.0,
                  "moe.experts_per_token": 1, "max_positions": 99}
  assert canonical(same) == model
  moe = read(REFERENCES / "mixtral")
  assert canonical(moe | {"moe.softmax": "after_topk", "moe.normalize_weights": False}) == moe
  assert canonical(moe | {"moe.normalize_weights": False}) != moe
  periodic = model | {"num_layers": 5, "window": 4, "layer_pattern": ("local", "global", "local", "global", "local")}
  assert canonical(periodic)["layer_pattern"] == ("local", "global")
  assert canonical(NEUTRAL | model) == model


def test_the_example_in_the_documentation_computes_what_transformers_does(monkeypatch, tmp_path):
  """docs/huggingface.md shows the whole file of a family that is not here."""
  page = (Path(families.__file__).parents[3] / "docs" / "huggingface.md").read_text(encoding="utf-8")
  shown = re.search(r"```python\n# models/hf/families/olmoe\.py\n(.*?)```", page, re.DOTALL)[1]
  assert len(shown.splitlines()) < 80 and "olmoe" not in {family.name for family in families.FAMILIES}
  exec(compile(shown, "olmoe.py", "exec"), made := {})
  monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, made["OLMOE"]))
  folder = REFERENCES.with_name("example")
  model, params = hf.load(folder)
  with np.load(folder / "reference.npz") as opened:
    reference = dict(opened)
  logits, loss, gradients = compiled(model)[1](params, reference["tokens"], np.ones_like(reference["tokens"]))
  assert_close(logits, reference["logits"], 1e-5)
  case = Case(folder, made["OLMOE"], params, None, None, reference)
  for i, name in enumerate(map(str, reference["gradient_names"])):
    assert_close(theirs(case, name, gradients), reference[f"gradient_{i}"], 1e-5)
  assert families.match(read(folder))[0] is made["OLMOE"]
  hf.save(model, params, tmp_path / "out")
  assert (tmp_path / "out/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_gpt_oss_says_its_scaling():
  """Where nothing is said, versions of transformers take YaRN of their own numbers."""
  content = json.loads((REFERENCES / "gpt_oss" / "config.json").read_text())
  assert families.GPT_OSS.read(content, "config.json")["rope_scaling.type"] == "none"
  with pytest.raises(HFError, match="neither rope_scaling nor rope_parameters"):
    families.GPT_OSS.read({**content, "rope_parameters": None}, "config.json")


@pytest.mark.parametrize("changed, message", [
    (dict(mlp_bias=True), "mlp_bias is True; allowed: false where there are experts"),
    (dict(moe_latent_size=8), "moe_latent_size is 8; allowed: None; experts see hidden states as they are"),
    (dict(layers_block_type=["linear_attention", "sparse"]), "allowed: one of mamba, .*, mlp, moe for each layer"),
    (dict(layers_block_type=["linear_attention"]), "allowed: a layer with an MLP or experts among the others"),
])
def test_what_nemotron_h_does_not_compute_is_refused(changed, message):
  content = json.loads((REFERENCES / "nemotron_h_moe" / "config.json").read_text())
  with pytest.raises(HFError, match=message):
    families.NEMOTRON_H.read(content | changed, "config.json")


def test_the_limit_of_positions_is_written():
  model = read(REFERENCES / "llama")
  assert "max_position_embeddings" not in families.LLAMA.write(model)
  assert families.LLAMA.write(model | {"max_positions": 512})["max_position_embeddings"] == 512


@pytest.mark.parametrize("changed, message", [
    (dict(mlp_layer_types=["dense", "sparse", "dense"]), "allowed: 3 times .* dense or sparse, the dense ones first"),
    (dict(mlp_layer_types=["dense"] * 3), "allowed: 3 times .*, and one that is sparse"),
    (dict(mlp_layer_types=["sparse"] * 2), "allowed: 3 times"),
    (dict(mlp_layer_types=None, first_k_dense_replace=2), "first_k_dense_replace is 2; allowed: 1, unless mlp"),
    (dict(head_dim=10), "head_dim is 10; allowed: 4; it is qk_rope_head_dim once more"),
])
def test_which_layers_of_glm_have_experts(changed, message):
  content = json.loads((REFERENCES / "glm4_moe_lite" / "config.json").read_text())
  with pytest.raises(HFError, match=message):
    families.GLM4_MOE_LITE.read(content | changed, "config.json")
  assert families.GLM4_MOE_LITE.read(content | dict(mlp_layer_types=None), "config.json")["moe.dense_layers"] == 1


@pytest.mark.parametrize("said, fraction", [
    (dict(rotary_dim=4), 0.5), (dict(rotary_dim=8), 1.0), (dict(partial_rotary_factor=0.25), 0.25), ({}, 1.0),
    (dict(rotary_dim=2, rope_parameters=dict(partial_rotary_factor=0.25, rope_theta=5e3)), 0.25)])
def test_the_share_of_a_head_that_minimax_rotates(said, fraction):
  content = json.loads((REFERENCES / "minimax_m2" / "config.json").read_text())
  del content["rope_parameters"], content["rotary_dim"]
  assert families.MINIMAX_M2.read(content | said, "config.json")["rope_fraction"] == fraction


@pytest.mark.parametrize("changed, message", [
    (dict(rotary_dim=2), "rotary_dim is 2; allowed: at most 8, the head_dim, and partial_rotary_factor times that"),
    (dict(rope_parameters={}, rotary_dim=10), "rotary_dim is 10; allowed: at most 8"),
    (dict(attn_type_list=[1, 0]), "attn_type_list is .*; allowed: 1 for each of the 2 layers"),
    (dict(shared_intermediate_size=8), "shared_intermediate_size is 8; allowed: 0"),
    (dict(layernorm_mlp_beta=2.0), "layernorm_mlp_beta is 2.0; allowed: 1.0"),
    (dict(scoring_func="softmax"), "scoring_func is .?softmax.?; allowed: .?sigmoid"),
])
def test_what_minimax_does_not_compute_is_refused(changed, message):
  content = json.loads((REFERENCES / "minimax_m2" / "config.json").read_text())
  with pytest.raises(HFError, match=message):
    families.MINIMAX_M2.read(content | changed, "config.json")


def test_exaone_has_windows_with_rotation_and_no_positions_without():
  content = json.loads((REFERENCES / "exaone4" / "config.json").read_text())
  del content["layer_types"]
  read = lambda **said: families.EXAONE4.read(content | said, "config.json")["layer_pattern"]  # noqa: E731
  assert read() == ("local", "local", "nope") and read(sliding_window_pattern=2) == ("local", "nope")
  assert read(sliding_window=None, sliding_window_pattern=None) == ("global",)
  assert read(layer_types=["full_attention"] * 4) == ("nope",)
  with pytest.raises(HFError, match="has no layer_types, and versions of transformers differ"):
    read(sliding_window_pattern="LLLG")


@pytest.mark.parametrize("said, shared", [
    (dict(index_topk_pattern="FSSF"), (1, 2)),
    (dict(index_topk_pattern=["full", "full", "shared", "shared"]), (2, 3)),
    (dict(index_topk_freq=2), (2,)),
    (dict(index_topk_freq=3, index_skip_topk_offset=1), (1, 2)),
    (dict(index_topk_freq=3, indexer_types=["full", "shared", "shared", "full"]), (1, 2)),
    (dict(indexer_types=None), ()),
])
def test_which_layers_have_an_indexer(said, shared):
  """As transformers 5.24 makes indexer_types of these entries."""
  content = json.loads((REFERENCES / "glm_moe_dsa" / "config.json").read_text())
  del content["indexer_types"]
  assert families.GLM_MOE_DSA.read(content | said, "config.json")["latent.index_shared_layers"] == shared


@pytest.mark.parametrize("changed, message", [
    (dict(indexer_types=["shared", "full", "full", "full"]), "indexer_types is .* full for the first"),
    (dict(indexer_types=["full"] * 3), "full or shared for each of the 4 layers"),
    (dict(indexer_types=None, index_topk_pattern="FSXF"), "index_topk_pattern is 'FSXF'; allowed: full or shared"),
    (dict(indexer_rope_interleave=False), "indexer_rope_interleave is False; allowed: True"),
    (dict(rope_interleave=False), "rope_interleave is False; allowed: True"),
    (dict(layer_types=["full_attention"] * 4), "allowed: 'indexed_attention' for each of the 4 layers"),
    (dict(index_topk=0), "index_topk is 0; allowed: a whole number from 1"),
])
def test_indexers_that_are_not_computed_are_refused(changed, message):
  content = json.loads((REFERENCES / "glm_moe_dsa" / "config.json").read_text())
  with pytest.raises(HFError, match=message):
    families.GLM_MOE_DSA.read(content | changed, "config.json")


@pytest.mark.parametrize("changed, message", [
    (dict(num_kv_shared_layers=4), "num_kv_shared_layers is 4; allowed: a number below 5, so that before"),
    (dict(num_kv_shared_layers=5), "num_kv_shared_layers is 5; allowed: a number below 5"),
    (dict(num_kv_shared_layers=-1), "num_kv_shared_layers is -1; allowed: a whole number from 0"),
    (dict(hidden_size_per_layer_input=4), "vocab_size_per_layer_input is 262144; allowed: 61, the vocab_size"),
    (dict(layer_types=["full_attention"] * 4 + ["sliding_attention"]), "allowed: full_attention for the last layer"),
    (dict(per_layer_config={"4": {"head_dim": 12}}), r"of full_attention \[\(8, 2\), \(12, 2\)\]; allowed: one"),
    (dict(per_layer_config={"0": {"head_dim": 12}}), "allowed: one for each"),
    (dict(per_layer_config={"4": {"sliding_window": 3}}), "sliding_window = 3: this family has no such entry"),
    (dict(per_layer_config={"9": {"head_dim": 12}}), "9 = .*: this family has no such entry"),
    (dict(rope_parameters={"full_attention": {"rope_type": "yarn", "rope_theta": 1e4},
                           "sliding_attention": {"rope_theta": 1e4}}), "is 'yarn'; allowed: default, proportional"),
    (dict(rope_parameters={"full_attention": {"rope_theta": 1e4}}), "has no 'sliding_attention'"),
    (dict(rope_parameters={"full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "factor": 8.0},
                           "sliding_attention": {"rope_theta": 1e4}}), "factor is 8.0; allowed: 1.0"),
    (dict(rope_parameters={"full_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
                           "sliding_attention": {"rope_theta": 1e4}}), "factor is 0.5; allowed: 1.0 with rope_type"),
])
def test_a_gemma_4_of_another_form_is_refused(changed, message):
  content = json.loads((REFERENCES / "gemma4" / "config.json").read_text()) | changed
  with pytest.raises(HFError, match=message):
    families.GEMMA4.read(content, "config.json")


@pytest.mark.parametrize("changed, message", [
    (dict(intermediate_size=[24, 24, 24, 24, 32]), "allowed: a number above 0, or it 5 times .*: layers whose MLPs"),
    (dict(intermediate_size=[24] * 4), "intermediate_size is .*; allowed: a number above 0, or it 5 times"),
    (dict(intermediate_size=True), "intermediate_size is True; allowed: a number"),
    (dict(activation_sparsity_pattern=[0.95]), r"allowed: 5 times \(num_hidden_layers\) a number from 0 to below 1"),
    (dict(activation_sparsity_pattern=[1.0] * 5), "allowed: 5 times"),
    (dict(activation_sparsity_pattern=0.95), "activation_sparsity_pattern is 0.95; allowed: a list"),
    (dict(altup_num_inputs=1), "altup_num_inputs is 1; allowed: 2 or more"),
    (dict(altup_coef_clip=-1.0), "altup_coef_clip is -1.0; allowed: a number above 0"),
    (dict(altup_coef_clip=None), "altup_coef_clip is None; allowed: a number"),
    (dict(altup_active_idx=1), "altup_active_idx is 1; allowed: 0; layers compute on the first stream"),
    (dict(altup_correct_scale=False), "altup_correct_scale is False; allowed: True; the first stream is scaled"),
    (dict(vocab_size_per_layer_input=62), "vocab_size_per_layer_input is 62; allowed: at most the vocab_size, 61"),
    (dict(hidden_size_per_layer_input=0), "hidden_size_per_layer_input is 0; allowed: a whole number"),
    (dict(num_kv_shared_layers=4), "num_kv_shared_layers is 4; allowed: a number below 5"),
    (dict(laurel_rank=0), "laurel_rank is 0"),
    (dict(altup_gain=2.0), "altup_gain = 2.0: the family gemma3n has no such entry"),
])
def test_a_gemma_3n_of_another_form_is_refused(changed, message):
  content = json.loads((REFERENCES / "gemma3n" / "config.json").read_text()) | changed
  with pytest.raises(HFError, match=message):
    families.GEMMA3N.read(content, "config.json")


def test_what_gemma_3n_does_not_say_is_as_in_its_configuration_class():
  """Of transformers: ten sparse layers of more than ten, else none; a width for all layers is one for each."""
  content = json.loads((REFERENCES / "gemma3n" / "config_4.json").read_text())
  model = families.GEMMA3N.read(content, "config.json")
  short = families.GEMMA3N.read(content | {"activation_sparsity_pattern": None, "intermediate_size": 24}, "config.json")
  assert short == model | {"activation_sparsity": ()}
  long = content | {"activation_sparsity_pattern": None, "num_hidden_layers": 12, "layer_types": None,
                    "intermediate_size": 24}
  model = families.GEMMA3N.read(long, "config.json")
  assert model["activation_sparsity"] == (0.95,) * 10 + (0.0,) * 2
  assert model["layer_pattern"] == ("local",) * 4 + ("global",)


@pytest.mark.parametrize("changed, message", [
    (dict(moe_layers=[0, 2, 3]), r"moe_layers is \[0, 2, 3\]; allowed: the number of every n-th layer of the 5"),
    (dict(moe_layers=[]), "moe_layers is .*; allowed: the number of every n-th layer"),
    (dict(moe_layers=None, interleave_moe_layer_step=6), "interleave_moe_layer_step is 6; allowed: 1 to 5"),
    (dict(no_rope_layers=[1, 0]), "no_rope_layers is .*; allowed: 1 or 0 for each of the 5 layers"),
    (dict(layer_types=["chunked_attention"] * 5), "allowed: for each of the 5 layers full_attention, or, where"),
    (dict(attention_chunk_size=None), "layer_types is .* attention_chunk_size is set"),
    (dict(attn_temperature_tuning="yes"), "attn_temperature_tuning is 'yes'; allowed: true or false"),
    (dict(attn_scale=-0.1), "attn_scale is -0.1; allowed: 0 or more"),
    (dict(hidden_act="relu"), "hidden_act is 'relu'"),
    (dict(attn_gain=2.0), "attn_gain = 2.0: the family llama4 has no such entry"),
])
def test_a_llama_4_of_another_form_is_refused(changed, message):
  content = json.loads((REFERENCES / "llama4" / "config.json").read_text()) | changed
  with pytest.raises(HFError, match=message):
    families.LLAMA4.read(content, "config.json")


def test_what_llama_4_says_in_several_ways_is_the_same():
  """As published files have it, and what is left out; layers that rotate see all where there are no chunks."""
  content = json.loads((REFERENCES / "llama4" / "config_4.json").read_text())
  model = families.LLAMA4.read(content, "config.json")
  same = dict(no_rope_layers=[], layer_types=None, moe_layers=None, attn_temperature_tuning=4)
  assert families.LLAMA4.read(content | same, "config.json") == model
  unchunked = families.LLAMA4.read(content | dict(same, attention_chunk_size=None), "config.json")
  assert unchunked["layer_pattern"] == ("global", "global", "global", "nope")
  assert families.LLAMA4.read(content | {"attn_temperature_tuning": 0}, "config.json") == model | {
      "nope_temperature.scale": 0.0, "nope_temperature.floor": 8192}


def test_key_value_heads_of_global_layers_count_where_their_values_are_keys():
  """transformers leaves num_global_key_value_heads aside without attention_k_eq_v."""
  content = json.loads((REFERENCES / "gemma4" / "config_4.json").read_text())
  heads = [families.GEMMA4.read(content | {"attention_k_eq_v": of_keys}, "config.json")["global_attention.num_kv_heads"]
           for of_keys in (True, False)]
  assert heads == [1, 2]


# ----------------------------------------------------------------------------------------------
# What single entries of a config.json must be.


@pytest.mark.parametrize("rule, content, model, found", [
    (qwen2_5_vl.Seconds, {}, {}, {"vision.video.tokens_per_second": 4.0}),
    (qwen2_5_vl.Seconds, {"tokens_per_second": 2}, {}, {"vision.video.tokens_per_second": 2.0}),
    (qwen2_5_vl.Seconds, {"tokens_per_second": 0}, {}, "tokens_per_second"),
    (qwen2_5_vl.Seconds, {"tokens_per_second": -1.5}, {}, "tokens_per_second"),
    (smolvlm.Places, {}, {"vision.image_size": 64, "vision.patch_size": 16}, {}),
    (smolvlm.Scale, {"scale_factor": 0}, {"vision.image_size": 64, "vision.patch_size": 16}, "scale_factor"),
    (smolvlm.Scale, {"scale_factor": 3}, {"vision.image_size": 64, "vision.patch_size": 16}, "scale_factor"),
], ids=lambda x: getattr(x, "__name__", None))
def test_entries_with_a_rule_of_their_own(rule, content, model, found):
  source = Source(content, "config.json")
  if isinstance(found, str):
    with pytest.raises(HFError, match=f"^config.json: {found} is "):
      rule().read(source, model)
  else:
    assert rule().read(source, model) == found


@pytest.mark.parametrize("types, written", [
    (("local", "local", "global", "local", "local", "global", "local"), {"sliding_window_pattern": 3}),
    (("local", "local"), {"sliding_window_pattern": 3}), (("global", "global"), {"sliding_window_pattern": 1}),
    (("local", "global", "global"), {}), (("local", "global", "local", "local"), {})])
def test_a_pattern_is_written_where_it_is_one(types, written):
  """Every n-th layer is global, as configuration_gemma3.py of transformers reads the old form."""
  assert gemma.write_pattern(types, 8) == {"sliding_window": 8, **written}


def test_positions_that_rounding_moves_are_refused():
  """Of all grids up to 64 a side, those in which a patch reads its neighbour's entry, by fractions in float32."""
  moved = []
  for side in range(1, 65):
    edges = np.linspace(0, 1, side + 1)[1:-1].astype(np.float32)  # as exact as float32 is
    places = [int(np.sum(edges <= np.float32(i) * np.float32(1 / side))) for i in range(side)]
    model = {"vision.image_size": 4 * side, "vision.patch_size": 4}
    try:
      assert smolvlm.Places().read(Source({}, "config.json"), model) == {}
    except HFError as e:
      assert str(e).startswith("config.json: image_size is ") and f"are not {side} a side" in str(e)
      moved.append((side, places != list(range(side))))
  assert moved


def test_no_more_layers_ahead_are_written_than_there_are_names_for():
  rule = mtp.Modules("modules", "layers", most=2)
  assert [rule.write({"mtp_layers": count}) for count in (0, 2)] == [{"modules": 0}, {"modules": 2}]
  assert mtp.Modules("modules", always=False).write({"mtp_layers": 0}) == {}
  with pytest.raises(HFError, match="^model.mtp_layers is 3; folders of this family have names for at most 2$"):
    rule.write({"mtp_layers": 3})
  read = [rule.read(Source(content, "c"), {}) for content in ({}, {"layers": 1}, {"modules": 2, "layers": 1})]
  assert [found["mtp_layers"] for found in read] == [0, 1, 2]
  for wrong in (3, -1, True, 1.0):
    with pytest.raises(HFError, match="^c: layers is .*a whole number from 0 to 2"):
      rule.read(Source({"layers": wrong}, "c"), {})
