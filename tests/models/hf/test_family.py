"""What config.json may say: defaults, both layouts, and every refusal with its key and value."""

import json
import math
import re
from pathlib import Path

import pytest

from models.hf import families, images
from models.hf.errors import HFError
from models.hf.family import DROPOUT, INERT
from models.hf.source import NEITHER, Source
from trainer.errors import ConfigError

LLAMA = dict(model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=61, hidden_size=16,
             intermediate_size=24, num_hidden_layers=4, num_attention_heads=4)
MIXTRAL = LLAMA | dict(model_type="mixtral", architectures=["MixtralForCausalLM"], num_local_experts=4)
QWEN2 = LLAMA | dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"], num_key_value_heads=2)
QWEN2_MOE = QWEN2 | dict(model_type="qwen2_moe", architectures=["Qwen2MoeForCausalLM"], moe_intermediate_size=12)
QWEN3_MOE = QWEN2_MOE | dict(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"])
GEMMA = LLAMA | dict(model_type="gemma", architectures=["GemmaForCausalLM"], num_key_value_heads=1)
GEMMA2 = GEMMA | dict(model_type="gemma2", architectures=["Gemma2ForCausalLM"])
GEMMA3 = GEMMA | dict(model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], num_hidden_layers=8)
MISTRAL = LLAMA | dict(model_type="mistral", architectures=["MistralForCausalLM"])
PHI3 = LLAMA | dict(model_type="phi3", architectures=["Phi3ForCausalLM"])
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}
STABLELM = LLAMA | dict(model_type="stablelm", architectures=["StableLmForCausalLM"], num_key_value_heads=4)
STARCODER2 = LLAMA | dict(model_type="starcoder2", architectures=["Starcoder2ForCausalLM"])
GPT2 = dict(model_type="gpt2", architectures=["GPT2LMHeadModel"], vocab_size=61, n_embd=16, n_layer=2, n_head=4)


def changed(config: dict, **changes) -> dict:
  """With other entries, and without those that are to be `...`."""
  return {k: v for k, v in (config | changes).items() if v is not ...}


def read(config: dict, **changes) -> dict:
  config = changed(config, **changes)
  return families.find(config, "DIR/config.json").read(config, "DIR/config.json")


def scaling(config: dict, **changes) -> dict:
  return {k.removeprefix("rope_scaling."): v for k, v in read(config, **changes).items()
          if k.startswith("rope_scaling.")}


# ------------------------------------------------------------------------------------------------ meanings


@pytest.mark.parametrize("config, expected", [
    (LLAMA, dict(num_kv_heads=4, head_dim=4, norm_eps=1e-6, activation="swiglu", tie_embeddings=False, rope_theta=1e4)),
    (LLAMA | dict(head_dim=None, num_key_value_heads=None), dict(num_kv_heads=4, head_dim=4)),
    (LLAMA | dict(attention_bias=True), dict(qkv_bias=True, attention_out_bias=True, mlp_bias=False)),
    (LLAMA | dict(rope_theta=500000), dict(rope_theta=500000.0, max_positions=None)),
    (MISTRAL | dict(num_attention_heads=8), dict(num_kv_heads=8, window=4096, layer_pattern=("local",))),
    (MISTRAL | dict(sliding_window=None), dict(window=None, layer_pattern=("global",))),
    (QWEN2, dict(qkv_bias=True, attention_out_bias=False, window=None)),
    (QWEN2 | dict(use_sliding_window=False, sliding_window=0, max_window_layers=0), dict(window=None)),
    (QWEN2 | dict(use_sliding_window=True, sliding_window=6, max_window_layers=2),
     dict(window=6, layer_pattern=("global", "global", "local", "local"))),
    (QWEN2 | dict(use_sliding_window=True, sliding_window=6, max_window_layers=0), dict(layer_pattern=("local",))),
    (QWEN2_MOE, {"moe.num_experts": 60, "moe.experts_per_token": 4, "moe.normalize_weights": False,
                 "moe.shared_size": 5632, "moe.shared_gate": True, "moe.expert_size": 12, "qkv_bias": True}),
    (QWEN3_MOE | dict(num_local_experts=5), {"moe.num_experts": 5, "moe.shared_size": 0, "qk_norm": True}),
    (QWEN3_MOE | dict(sliding_window=0, max_window_layers=28), dict(window=None)),
    (QWEN3_MOE | dict(use_sliding_window=True, sliding_window=7), dict(window=7, layer_pattern=("local",))),
    (QWEN2_MOE | dict(sliding_window=0), dict(window=None)),
    (MIXTRAL, {"moe.num_experts": 4, "moe.expert_size": 24, "moe.normalize_weights": True, "rope_theta": 1e6}),
    (GEMMA | dict(hidden_act="gelu"), dict(activation="geglu", head_dim=256, norm_scale_plus_one=True)),
    (GEMMA2, dict(layer_pattern=("local", "global"), window=4096, attention_logit_cap=50.0, final_logit_cap=30.0,
                  attention_scale=None, norm_position="sandwich", scale_embeddings=True)),
    (GEMMA2 | dict(query_pre_attn_scalar=144, final_logit_softcapping=None),
     dict(attention_scale=1 / 12, final_logit_cap=None)),
    (GEMMA3, dict(layer_pattern=("local",) * 5 + ("global",), rope_theta=1e6, rope_local_theta=1e4, qk_norm=True)),
    (GEMMA3 | dict(sliding_window_pattern=2), dict(layer_pattern=("local", "global"))),
    (GPT2, dict(intermediate_size=64, max_positions=1024, activation="gelu", positions="learned", tie_embeddings=True)),
    (STABLELM, dict(rope_fraction=0.25, norm="layernorm", norm_bias=True, qkv_bias=False, parallel_blocks=False)),
    (STARCODER2, dict(num_kv_heads=2, activation="gelu", mlp_bias=True, window=None)),
    (PHI3 | dict(partial_rotary_factor=0.5), dict(rope_fraction=0.5)),
    # A model made shorter: what scales attention is no less than 1.
    (PHI3 | dict(rope_scaling=LONGROPE, max_position_embeddings=8, original_max_position_embeddings=16),
     {"rope_scaling.factor": 1.0}),
    (PHI3 | dict(rope_scaling=LONGROPE, max_position_embeddings=64, original_max_position_embeddings=16),
     {"rope_scaling.factor": 4.0}),
])
def test_read(config, expected):
  model = read(config)
  assert {key: model[key] for key in expected} == expected


@pytest.mark.parametrize("name, ours", [
    ("silu", "swiglu"), ("swish", "swiglu"), ("gelu", "geglu_exact"), ("gelu_pytorch_tanh", "geglu"),
    ("gelu_new", "geglu"),
])
def test_activations_as_gates(name, ours):
  assert read(LLAMA, hidden_act=name)["activation"] == ours


@pytest.mark.parametrize("name, ours", [
    ("gelu", "gelu_exact"), ("gelu_new", "gelu"), ("relu", "relu"), ("relu2", "relu2"), ("silu", "silu"),
])
def test_activations_without_a_gate(name, ours):
  model = read(GPT2, activation_function=name)
  assert model["activation"] == ours
  assert families.GPT2.write(model)["activation_function"] == name


def test_layer_types_win_over_older_ways():
  kinds = ["sliding_attention", "full_attention"] * 2
  assert read(QWEN2, use_sliding_window=True, sliding_window=5, max_window_layers=3,
              layer_types=kinds)["layer_pattern"] == ("local", "global")


# ------------------------------------------------------------------------------------------------ rotary positions


def test_scalings_in_both_layouts():
  llama3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
  four = read(LLAMA, rope_theta=5e5, rope_scaling=llama3 | {"rope_type": "llama3"})
  five = read(LLAMA, rope_parameters=llama3 | {"rope_type": "llama3", "rope_theta": 5e5})
  assert four == five
  assert four["rope_theta"] == 5e5 and four["rope_scaling.original_positions"] == 32
  assert scaling(LLAMA, rope_scaling={"type": "linear", "factor": 2}) == scaling(
      LLAMA, rope_parameters={"rope_type": "linear", "factor": 2.0})
  assert scaling(LLAMA, rope_scaling={"rope_type": "default"})["type"] == "none"


def test_dynamic_starts_at_the_longest_position():
  found = scaling(LLAMA, max_position_embeddings=48, rope_scaling={"type": "dynamic", "factor": 2.0})
  assert (found["type"], found["original_positions"], found["factor"]) == ("dynamic", 48, 2.0)


def test_yarn_factors():
  yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

  def attention_factor(**more) -> float | None:
    return scaling(LLAMA, max_position_embeddings=128, rope_scaling=yarn | more)["attention_factor"]

  assert attention_factor() is None
  assert attention_factor(attention_factor=1.5) == 1.5
  assert attention_factor(attention_factor=1.5, mscale=2.0, mscale_all_dim=1.0) == 1.5
  expected = (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)
  assert attention_factor(mscale=2.0, mscale_all_dim=1.0) == pytest.approx(expected, abs=1e-15)
  # transformers wants both or takes neither.
  assert attention_factor(mscale=2.0) is None and attention_factor(mscale=2.0, mscale_all_dim=0) is None
  without = {k: v for k, v in yarn.items() if k != "factor"}
  assert scaling(LLAMA, max_position_embeddings=128, rope_scaling=without)["factor"] == 4.0
  outside = {k: v for k, v in yarn.items() if not k.startswith("original")}
  for where in ({"original_max_position_embeddings": 32}, {"max_position_embeddings": 32}):
    assert scaling(LLAMA, rope_scaling=outside, **where)["original_positions"] == 32


def test_yarn_says_where_versions_differ():
  config = LLAMA | dict(max_position_embeddings=32, rope_scaling={
      "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32})
  (note,) = families.LLAMA.notes(config)
  assert "factor is 4.0" in note and "is 1. The factor counts" in note
  assert read(config)["rope_scaling.factor"] == 4.0
  assert families.LLAMA.notes(config | dict(max_position_embeddings=128)) == []


def test_gemma3_rotates_its_layers_differently():
  nested = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}
  five = read(GEMMA3, rope_parameters=nested)
  four = read(GEMMA3, rope_theta=3e5, rope_local_base_freq=2e4, rope_scaling={"type": "linear", "factor": 8.0})
  assert five == four
  assert (five["rope_theta"], five["rope_local_theta"], five["rope_scaling.factor"]) == (3e5, 2e4, 8.0)


def test_every_number_of_a_scaling_counts():
  """None is taken for one without use: it comes through, and is written again."""
  for config, said in (
      (LLAMA, dict(rope_type="yarn", factor=4.0, attention_factor=1.5, beta_fast=16.0, beta_slow=2.0, truncate=False,
                   original_max_position_embeddings=8)),
      (LLAMA, dict(rope_type="llama3", factor=8.0, low_freq_factor=1.5, high_freq_factor=3.0,
                   original_max_position_embeddings=8)),
      (PHI3, dict(rope_type="longrope", factor=4.0, attention_factor=1.5, short_factor=[1.0, 1.5],
                  long_factor=[2.0, 4.0], original_max_position_embeddings=8))):
    config = config | dict(max_position_embeddings=32, rope_scaling=said)
    family = families.find(config, "c.json")
    model = family.read(config, "c.json")
    written = family.write(model)
    again = written.get("rope_scaling") or written["rope_parameters"]
    own = said.keys() - {"rope_type", "factor", "original_max_position_embeddings"}  # these may stand elsewhere
    assert {key: again.get(key) for key in own} == {key: said[key] for key in own}
    assert family.read(config | written, "c.json") == model


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("config, changes, message", [
    # Entries that are not known, or ask for what is not there.
    (LLAMA, dict(logit_scale=0.5), "logit_scale = 0.5: the family llama"),
    (LLAMA, dict(sliding_window=128), "sliding_window = 128"),
    (LLAMA, dict(num_experts=4), "num_experts = 4"),
    (LLAMA, dict(residual_multiplier=0), "residual_multiplier = 0"),
    (GPT2, dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx is True; allowed: False"),
    (GPT2, dict(add_cross_attention=True), "add_cross_attention is True; allowed: false: what is read are decoders"),
    (GPT2, dict(scale_attn_weights=False), "scale_attn_weights is False; allowed: True"),
    (GEMMA2, dict(use_bidirectional_attention=True), "use_bidirectional_attention is True; allowed: false"),
    (STABLELM, dict(use_parallel_residual=1), "use_parallel_residual is 1; allowed: true or false"),
    (STARCODER2, dict(norm_type="rms_norm"), "norm_type is 'rms_norm'; allowed: 'layer_norm'"),
    (QWEN3_MOE, dict(decoder_sparse_step=2), "decoder_sparse_step is 2; allowed: 1"),
    (QWEN3_MOE, dict(mlp_only_layers=[0]), "mlp_only_layers is [0]; allowed: []"),
    (QWEN3_MOE, dict(num_experts=4, num_local_experts=5), "num_local_experts is 5; allowed: the same as"),
    (LLAMA, dict(quantization_config={"quant_method": "gptq", "bits": 3}), "bits 3; read are 2, 4, 8"),
    (LLAMA, dict(is_causal=False), "is_causal is False; allowed: true"),
    # Activations.
    (LLAMA, dict(hidden_act="mish"), "hidden_act is 'mish'; allowed: silu, swish, gelu_pytorch_tanh"),
    (LLAMA, dict(hidden_act="relu"), "hidden_act is 'relu'"),
    (GPT2, dict(activation_function="laplace"), "activation_function is 'laplace'"),
    (GEMMA2, dict(hidden_act="gelu", hidden_activation="gelu_pytorch_tanh"), "hidden_act is 'gelu'"),
    # Rotary positions.
    (LLAMA, dict(rope_scaling={"type": "longrope", "factor": 2.0}), "type is 'longrope'; allowed: default, linear"),
    (PHI3, dict(rope_scaling={"rope_type": "yarn", "factor": 2.0}), "rope_type is 'yarn'; allowed: default"),
    (PHI3, dict(rope_scaling=LONGROPE), "longrope scaling needs original_max_position_embeddings"),
    (PHI3, dict(rope_scaling=LONGROPE | {"long_factor": [2.0, 0.0]}, original_max_position_embeddings=16),
     "long_factor is [2.0, 0.0]; allowed: a list of"),
    (PHI3, dict(rope_scaling=LONGROPE | {"factor": 3.0}, max_position_embeddings=64,
                original_max_position_embeddings=16), "factor is 3, but max_position_embeddings / original"),
    (LLAMA, dict(rope_scaling={"type": "linear", "rope_type": "yarn", "factor": 2.0}), "the same as type, 'linear'"),
    (LLAMA, dict(rope_scaling={"type": "linear"}), "has no 'factor'"),
    (LLAMA, dict(rope_scaling={"type": "linear", "factor": 2.0, "beta": 3}), "beta = 3: this type of rotary positions"),
    (LLAMA, dict(rope_scaling={"type": "default", "mrope_section": [1, 1]}), "mrope_section = [1, 1]"),
    (LLAMA, dict(rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
     "llama3 scaling needs original_max_position_embeddings"),
    (LLAMA, dict(rope_theta=1e4, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
     "rope_theta is 500000.0"),
    (LLAMA, dict(rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_parameters={"factor": 4.0}),
     "rope_scaling says factor=2.0, rope_parameters 4.0"),
    (LLAMA, dict(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5; allowed: 1.0"),
    (LLAMA, dict(rope_parameters={"full_attention": {"rope_type": "default"}}), "full_attention = {"),
    (LLAMA, dict(rope_local_base_freq=1e4), "rope_local_base_freq = 10000.0"),
    (GEMMA3, dict(rope_parameters={"rope_theta": 1e4}), "rope_theta = 10000.0: this type"),
    (GEMMA3, dict(rope_parameters={"sliding_attention": {"rope_type": "linear", "factor": 2.0}}),
     "rope_type is 'linear'; allowed: default"),
    # Windows.
    (QWEN2, dict(layer_types=["full_attention", "chunked_attention"] * 2), "chunked_attention"),
    (QWEN2, dict(layer_types=["full_attention"]), "4 times (num_hidden_layers)"),
    (QWEN2, dict(layer_types=["sliding_attention"] * 4), "switched off by use_sliding_window"),
    (QWEN2, dict(use_sliding_window=True, max_window_layers=-1), "max_window_layers is -1"),
    (QWEN2_MOE, dict(use_sliding_window=True), "versions of transformers differ"),
    (QWEN3_MOE, dict(use_sliding_window=True, max_window_layers=2), "max_window_layers is 2"),
    (MISTRAL, dict(layer_types=["sliding_attention", "full_attention"] * 2), "layer_types is"),
    # Values of the wrong kind.
    (LLAMA, dict(hidden_size="16"), "hidden_size is '16'; allowed: a whole number"),
    (LLAMA, dict(hidden_size=16.5), "hidden_size is 16.5"),
    (LLAMA, dict(num_hidden_layers=0), "num_hidden_layers is 0"),
    (LLAMA, dict(num_hidden_layers=True), "num_hidden_layers is True"),
    (LLAMA, dict(vocab_size=...), "has no 'vocab_size'"),
    (LLAMA, dict(rms_norm_eps="1e-6"), "rms_norm_eps is '1e-6'; allowed: a number"),
    (LLAMA, dict(tie_word_embeddings=None), "tie_word_embeddings is None; allowed: true or false"),
    (LLAMA, dict(rope_scaling=[]), "rope_scaling is []; allowed: an object"),
    # What is not a language model of a known family.
    (LLAMA, dict(architectures=["LlamaForTokenClassification"]), "['LlamaForTokenClassification']; allowed: ["),
    (LLAMA, dict(model_type="llamma"), "is 'llamma', of no family that can be read here. Did you mean 'llama'?"),
    (LLAMA, dict(model_type=...), "model_type is None"),
    (LLAMA, dict(model_type=["llama"]), "model_type is ['llama']"),
    (LLAMA, dict(model_type="kimi_linear", auto_map={"AutoModel": "x.Y"}), "(auto_map) is never run"),
    (LLAMA, dict(model_type="llava_next", text_config={}), "is 'llava_next', a model of images or sound and text that "
     "cannot be computed here; its text part alone would be another model. Those that can be read: paligemma, gemma3, "
     "llava, qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, qwen3_5, qwen3_5_moe, smolvlm, idefics3, gemma4, mistral3."),
    (LLAMA, dict(model_type="something_new", vision_config={}), "a model of images or sound and text"),
])
def test_refusals_name_key_and_value(config, changes, message):
  with pytest.raises(HFError, match=re.escape(message)) as error:
    read(config, **changes)
  assert "DIR/config.json" in str(error.value)
  assert isinstance(error.value, ConfigError)


def reference(name: str, changes: dict) -> dict:
  """A committed config.json of that name, with changes; of a part with a dot: vision_config.X."""
  file = min(Path(__file__).parent.glob(f"*references/{name}/config.json"), key=lambda file: len(file.parts[-3]))
  content = json.loads(file.read_text())
  for key, value in changes.items():
    *parts, last = key.split(".")
    inner = content
    for part in parts:
      inner = inner[part]
    inner[last] = value
  return content


YARN = {"rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize("name, changes, message", [
    ("cohere2", dict(head_dim=3), "head_dim is 3; allowed: 4, the hidden size divided by the heads"),
    ("deepseek_v2", dict(first_k_dense_replace=3), "first_k_dense_replace is 3; allowed: 0 to 2, so that a layer"),
    ("deepseek_v2", dict(first_k_dense_replace=-1), "first_k_dense_replace is -1; allowed: 0 to 2"),
    ("deepseek_v2", dict(topk_method="noaux_tc"), "topk_method is 'noaux_tc'; allowed: greedy, group_limited_greedy"),
    ("gemma4", {"rope_parameters.sliding_attention.rope_type": "linear"}, "rope_type is 'linear'; allowed: default"),
    ("glm4_moe", dict(num_nextn_predict_layers=101), "num_nextn_predict_layers is 101; allowed: a whole number from 0"),
    ("granite", dict(logits_scaling=0.0), "logits_scaling is 0.0; allowed: a number above 0"),
    ("granite4", dict(layers_block_type=["mamba"] * 3), "layers_block_type is .*; allowed: the same as layer_types"),
    ("granite4", dict(layer_types=["mamba"]), "layer_types is .*; allowed: 3 times"),
    ("granite4", dict(mamba_d_head=7), "mamba_d_head is 7; allowed: 8, so that the 4 heads"),
    ("granite4", dict(time_step_limit=[0.1, 2.0]), "time_step_limit is .*; allowed: .0.0 or more, Infinity"),
    ("granite4", dict(time_step_limit=[-1.0, "Infinity"]), "time_step_limit is"),
    ("granite4", dict(position_embedding_type="alibi"), "is 'alibi'; allowed: rope, nope or null"),
    ("granite4_moe", dict(num_local_experts=-1), "num_local_experts is -1; allowed: a whole number from 0 to"),
    ("granite4_moe", dict(num_experts_per_tok=0), "num_experts_per_tok is 0; allowed: a whole number from 1 to"),
    ("ministral3", dict(rope_parameters={"rope_theta": 500.0, "llama_4_scaling_beta": 0.5}),
     "beta is 0.5, which needs a type of rotary positions"),
    ("nemotron_h", dict(hybrid_override_pattern="M-M*-*"), "what each layer is; found two that differ"),
    ("nemotron_h", dict(layers_block_type=None), "what each layer is; found neither"),
    ("nemotron_h", dict(num_hidden_layers=7), "num_hidden_layers is 7; allowed: 6, as many as layers_block_type has"),
    ("smollm3", dict(no_rope_layers=[1, 0]), "no_rope_layers is .*; allowed: 1 or 0 for each of the 3 layers"),
    ("smollm3", dict(no_rope_layers=[1, 0, 2]), "no_rope_layers is .*; allowed: 1 or 0"),
    ("smollm3", dict(layer_types=["sliding_attention"] * 3), "layer_types is .*; allowed: 'full_attention' for"),
    ("smolvlm", dict(scale_factor=7), "scale_factor is 7; allowed: a divisor of the"),
    ("olmo3", dict(rope_theta=1e4, rope_parameters=None), "rope_theta is 10000, and versions of transformers differ"),
    ("llama", dict(num_hidden_layers=100_001), "asks for 100,001 layers; at most 100,000"),
    ("llama", dict(num_attention_heads=32, num_key_value_heads=1, head_dim=None), "has 32 heads for a hidden size"),
    ("llama", dict(rope_parameters=None, rope_scaling={"type": "linear", "factor": 0.5}), "factor is 0.5; allowed: 1"),
    ("llama", dict(rope_parameters=None, rope_scaling=YARN | {"factor": 0.0}), "factor is 0.0; allowed: 1 or more"),
    ("llama", dict(rope_parameters=None, max_position_embeddings=None, rope_scaling={
        "rope_type": "yarn", "original_max_position_embeddings": 8}), "yarn scaling needs factor"),
    ("llama", dict(rope_parameters=None, max_position_embeddings=64, rope_scaling={
        "rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32}),
     "original_max_position_embeddings is 32, but dynamic scaling starts at max_position_embeddings, 64"),
    ("phi3_longrope", dict(max_position_embeddings=None), "longrope scaling needs max_position_embeddings or factor"),
])
def test_forms_of_families_that_are_refused(name, changes, message):
  config = reference(name, changes)
  with pytest.raises(HFError, match=message):
    families.find(config, "DIR/config.json").read(config, "DIR/config.json")


@pytest.mark.parametrize("name, kinds", [
    ("gemma2", "sfsfsfsfsfsfs"), ("gemma3", "sssssfsssssfs"), ("gemma4", "sssssfsssssff"), ("cohere2", "sssfsssfsssfs"),
    ("exaone4", "sssfsssfsssfs"), ("olmo3", "sssfsssfsssfs"), ("gpt_oss", "sfsfsfsfsfsfs"),
    ("smollm3", "rrrnrrrnrrrnr"), ("qwen3_next", "lllflllflllfl"), ("llama4", "cccncccncccnc")])
def test_the_kinds_of_thirteen_layers_of_which_nothing_is_said(name, kinds):
  """As transformers 5.24's configuration classes have them: s a window, c chunks, l linear, n no positions."""
  config = reference(name, dict(num_hidden_layers=13, layer_types=None, no_rope_layers=None, moe_layers=None,
                                mlp_layer_types=None, per_layer_config=None, sliding_window_pattern=None,
                                _sliding_window_pattern=None))
  family = families.find(config, "c.json")
  pattern = family.read({key: value for key, value in config.items() if value is not None}, "c.json")["layer_pattern"]
  found = [pattern[i % len(pattern)] for i in range(13)]
  theirs = {"s": "local", "f": "global", "l": "delta", "c": "chunked", "n": "nope", "r": "global"}
  assert [kind if kind != "nope" or "n" in kinds else "global" for kind in found] == [theirs[kind] for kind in kinds]


def test_entries_without_effect_are_accepted():
  plain = read(LLAMA)
  assert plain == read(LLAMA, use_cache=True, pretraining_tp=2, eos_token_id=[1], transformers_version="4.31",
                       torch_dtype="bfloat16", dtype="bfloat16", initializer_range=0.5, max_position_embeddings=7,
                       _name_or_path="x", temperature=0.6, some_new_option=None, other_option=False, third={},
                       auto_map={"A": "b.C"}, attention_dropout=0.1)


DEFAULTS = json.loads(Path(__file__).with_name("config_defaults.json").read_text())


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_is_left_out_is_what_transformers_takes(name):
  """Entry by entry, of the model or of its tower, unless we require it, as we do a scaling of rotary positions."""
  folder = Path(__file__).parent / ("" if "/" in name else "references") / name
  whole = json.loads((folder / "config.json").read_text())
  content = whole["vision_config"] if "/" in name else whole

  def read_with(key, value):
    return read(whole, vision_config=changed(content, **{key: value})) if "/" in name else read(content, **{key: value})

  for key, value in DEFAULTS[name].items():
    if key == "num_nextn_predict_layers":  # transformers computes none of them
      value = 0
    elif key == "num_key_value_heads" and "kv_lora_rank" in content:  # one for each head, whatever stands there
      value = content["num_attention_heads"]
    try:
      found = read_with(key, ...)
    except HFError as error:  # where it takes what is not computed, that is refused as well
      if not re.search(f"has no {key!r}|rope_scaling", str(error)):
        pytest.raises(HFError, read_with, key, value)
      continue
    assert found == read_with(key, value), key


# What class of transformers' has files of the model_type: of a tower, the part of a file.
ATTRIBUTES = json.loads(Path(__file__).with_name("config_attributes.json").read_text())
WRITTEN = {}
for file in sorted(Path(__file__).parent.glob("*references/*/config.json")):
  content = json.loads(file.read_text())
  for part in (content, content.get("vision_config", {}), content.get("text_config", {})):
    inner = part is content.get("text_config")
    if "model_type" in part and (not inner or part["model_type"].endswith(("_vl_text", "_vl_moe_text"))):
      WRITTEN.setdefault(part["model_type"], content)


@pytest.mark.parametrize("model_type", sorted(ATTRIBUTES.keys() - {"all"}))
def test_every_attribute_of_transformers_classes_is_known(model_type):
  """Each is read, or refused with its reason, or harmless by name, so that none needs `hf_ignore`."""
  config = WRITTEN[model_type]
  family, source = families.find(config, "c.json"), Source(config, "c.json")
  family.read_source(source)
  known = source._asked | INERT | DROPOUT | family.inert
  if model_type.endswith(("_vl_text", "_vl_moe_text")):
    rule = next(rule for rule in family.keys if isinstance(rule, images.TextConfig))
    family, source = rule.family, Source(config["text_config"], "c.json: text_config")
    family.read_source(source)
    known = source._asked | INERT | DROPOUT | family.inert
  if model_type.endswith(("vision_model", "vision", "pixtral")):
    rule = next(rule for rule in family.keys if isinstance(rule, images.VisionConfig))
    inner, _ = rule._read(source, {"hidden_size": None})
    known = inner._asked | INERT | DROPOUT | images.VISION_INERT
  names = {name for name in (*ATTRIBUTES["all"], *ATTRIBUTES[model_type]) if not name.startswith("_")}
  assert names - known == set() and len(names) > 60


@pytest.mark.parametrize("name", sorted(NEITHER))
@pytest.mark.parametrize("config", [LLAMA, GPT2, GEMMA2, QWEN3_MOE], ids=lambda config: config["model_type"])
def test_what_makes_another_kind_of_model_stops_and_its_default_does_not(config, name):
  allowed, _ = NEITHER[name]
  read(config, **{name: allowed})
  read(config, **{name: None})
  other = {"0": [1]} if allowed == {} else 16 if allowed is None else not allowed
  with pytest.raises(HFError, match=f"{name} is .*; allowed: "):
    read(config, **{name: other})


STRAY = dict(_model_name_or_path="Smollm2 135M 8k Lc100K Mix1 Ep2", _private=3, _nested={"a": 1}, origin="a name",
             nothing=None, off=False, empty=[], hollow={}, blank="")


def test_names_and_what_says_nothing_do_not_stop_a_user_and_are_told_in_one_line():
  assert read(LLAMA, **STRAY) == read(LLAMA)
  (note,) = families.LLAMA.notes(LLAMA | STRAY, "c.json")
  assert note == ("c.json: not read, and taken to have no effect: _model_name_or_path = 'Smollm2 135M 8k Lc100K Mix1 "
                  "Ep2', _private = 3, _nested = {'a': 1}, origin = 'a name'")
  (note,) = families.LLAMA.notes(LLAMA | {"_\x1b[2J": 1, "long": "x" * 1_000_000}, "c.json")
  assert "\x1b" not in note and len(note) < 300
  scaled = dict(rope_scaling={"type": "linear", "factor": 2.0, "_note": 1, "author": "me"})
  assert read(LLAMA, **scaled) == read(LLAMA, rope_scaling={"type": "linear", "factor": 2.0})
  (note,) = families.LLAMA.notes(LLAMA | scaled, "c.json")
  assert "c.json: rope_scaling: not read" in note and "author = 'me'" in note


@pytest.mark.parametrize("entry", [dict(number=2), dict(zero=0), dict(share=0.0), dict(switch=True),
                                   dict(part={"a": 1}), dict(items=["a"])], ids=lambda entry: next(iter(entry)))
def test_what_could_matter_is_accepted_by_the_flag_that_the_message_gives(entry):
  (name, _), = entry.items()
  with pytest.raises(HFError, match=f"accept it with --config.model.hf_ignore={name}$"):
    read(LLAMA, **entry)
  assert families.LLAMA.read(LLAMA | entry, "c.json", (name,)) == read(LLAMA)
  assert f"{name} = " in families.LLAMA.notes(LLAMA | entry, "c.json", (name,))[0]
  with pytest.raises(HFError, match=f"--config.model.hf_ignore={name},zzz$"):
    families.LLAMA.read(LLAMA | entry | dict(zzz=1), "c.json", (name,))
  assert families.LLAMA.read(LLAMA | entry | dict(zzz=1), "c.json", (f"{name}, zzz",)) == read(LLAMA)  # as typed


def test_what_is_inside_an_object_has_its_name_with_dots():
  scaled = LLAMA | dict(rope_scaling={"type": "linear", "factor": 2.0, "beta": 3})
  with pytest.raises(HFError, match="--config.model.hf_ignore=rope_scaling.beta$"):
    read(scaled)
  assert families.LLAMA.read(scaled, "c", ("rope_scaling.beta",))["rope_scaling.factor"] == 2.0


@pytest.mark.parametrize("config, name", [(LLAMA | dict(rope_theta=5e5), "rope_theta"),
                                          (STABLELM | dict(use_parallel_residual=False), "use_parallel_residual")])
def test_what_is_read_cannot_be_ignored(config, name):
  with pytest.raises(HFError, match=f"hf_ignore names {name}, but c.json says with it what the model computes"):
    families.find(config, "c.json").read(config, "c.json", (name,))


def test_what_acts_in_training_alone_is_told():
  notes = families.GPT2.notes(GPT2 | dict(resid_pdrop=0.1, embd_pdrop=0.0), "c.json")
  assert len(notes) == 1 and notes[0].startswith("c.json: resid_pdrop is 0.1")
  (note,) = families.MIXTRAL.notes(MIXTRAL | dict(router_aux_loss_coef=0.02))
  assert "0.02" in note and "model.moe.balance_loss" in note


@pytest.mark.parametrize("layers, pattern, written", [
    (5, ("local", "local", "global"), 3), (4, ("local",), 5), (4, ("global",), 1), (4, ("global", "local"), None),
])
def test_patterns_of_layers_are_written_in_the_old_way_where_it_has_them(layers, pattern, written):
  model = read(GEMMA3) | dict(num_layers=layers, layer_pattern=pattern)
  config = json.loads(json.dumps(families.GEMMA3.write(model)))
  assert config.get("sliding_window_pattern") == written
  del config["layer_types"]
  if written is not None:
    assert read(config)["layer_pattern"] == pattern


def test_yarn_is_written_so_that_versions_agree():
  model = read(LLAMA, rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32})
  written = families.LLAMA.write(model)
  assert written["max_position_embeddings"] == 128
  assert written["rope_scaling"]["rope_type"] == "yarn"
  assert "attention_factor" not in written["rope_scaling"]
  assert families.LLAMA.notes(written) == []


