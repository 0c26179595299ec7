"""The recipes for large models: the published architecture to the last parameter, split over the devices they name."""

import importlib
import json

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from models import hf
from trainer import program as program_lib
from trainer.config import checks as config_checks
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError
from trainer.planning.estimate import active_parameters
from trainer.telemetry import hardware

LLAMA = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], attention_bias=False, hidden_act="silu",
    max_position_embeddings=8192, num_key_value_heads=8, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=500000.0,
    tie_word_embeddings=False, vocab_size=128256)
LLAMA_70B = LLAMA | dict(hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_hidden_layers=80)
DEEPSEEK_V3 = dict(
    model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], attention_bias=False, attention_dropout=0.0,
    aux_loss_alpha=0.001, ep_size=1, first_k_dense_replace=3, hidden_act="silu", hidden_size=7168,
    intermediate_size=18432, kv_lora_rank=512, max_position_embeddings=163840, moe_intermediate_size=2048,
    moe_layer_freq=1, n_group=8, n_routed_experts=256, n_shared_experts=1, norm_topk_prob=True,
    num_attention_heads=128, num_experts_per_tok=8, num_hidden_layers=61, num_key_value_heads=128,
    num_nextn_predict_layers=1, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-6,
    rope_scaling={"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                  "original_max_position_embeddings": 4096, "type": "yarn"},
    rope_theta=10000, routed_scaling_factor=2.5, scoring_func="sigmoid", seq_aux=True, tie_word_embeddings=False,
    topk_group=4, topk_method="noaux_tc", v_head_dim=128, vocab_size=129280)
# Of 61 layers: attention's kernels, the norms of latents, two norms of the stream. 3 have an MLP, 58 have 256 experts,
# one that all tokens use, and a router with a bias. Around them are embedding, unembedding and a norm.
DEEPSEEK_V3_PARAMETERS = (
    61 * (7168 * 1536 + 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 + 512 * 128 * 256 + 128 * 128 * 7168 + 2 * 7168)
    + 3 * 3 * 7168 * 18432 + 58 * (257 * 3 * 7168 * 2048 + 256 * 7168 + 256)
    + 2 * 129280 * 7168 + 7168)
# (recipe, argument): (parameters, what is published as config.json).
RECIPES = {
    ("llama3_8b", None): (8_030_261_248, LLAMA | dict(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_hidden_layers=32)),
    ("llama3_70b", "v5p"): (70_553_706_496, LLAMA_70B),
    ("llama3_70b", "h100"): (70_553_706_496, LLAMA_70B),
    ("qwen3_30b_a3b", None): (30_532_122_624, dict(
        model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], attention_bias=False, decoder_sparse_step=1,
        head_dim=128, hidden_act="silu", hidden_size=2048, intermediate_size=6144, max_position_embeddings=40960,
        max_window_layers=48, mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True,
        num_attention_heads=32, num_experts=128, num_experts_per_tok=8, num_hidden_layers=48, num_key_value_heads=4,
        rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1000000.0, sliding_window=None, tie_word_embeddings=False,
        use_sliding_window=False, vocab_size=151936)),
    ("deepseek_v3", "v5p"): (DEEPSEEK_V3_PARAMETERS, DEEPSEEK_V3),
    ("deepseek_v3", "h100"): (DEEPSEEK_V3_PARAMETERS, DEEPSEEK_V3),
    # 62 layers of 412,898,560, an embedding of 262,208 × 5,376 and a norm of 5,376.
    ("gemma3_27b", None): (62 * 412_898_560 + 262_208 * 5376 + 5376, dict(
        model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], attention_bias=False, head_dim=128,
        hidden_activation="gelu_pytorch_tanh", hidden_size=5376, intermediate_size=21504,
        max_position_embeddings=131072, num_attention_heads=32, num_hidden_layers=62, num_key_value_heads=16,
        query_pre_attn_scalar=168, rms_norm_eps=1e-6, rope_local_base_freq=10000.0,
        rope_scaling={"factor": 8.0, "rope_type": "linear"}, rope_theta=1000000.0, sliding_window=1024,
        sliding_window_pattern=6, tie_word_embeddings=True, vocab_size=262208)),
}
recipes = pytest.mark.parametrize("name, arg", RECIPES, ids=lambda part: part or "")


def resolved(name, arg, slices=1):
  config = importlib.import_module(f"configs.{name}").get_config(arg)
  config.mesh.slice = config.plan.slices = slices
  config.batch_size *= slices
  config, _ = program_lib.resolve(config)
  program_lib.settle(config, hardware.topology(config.plan.topology).chip.platform)
  return config


@recipes
def test_the_architecture_is_the_published_one(name, arg, tmp_path):
  parameters, published = RECIPES[name, arg]
  config = resolved(name, arg)
  model = program_lib.make_model(config, config.model.vocab_size)
  assert sum(leaf.size for leaf in jax.tree.leaves(model.abstract_params())) == parameters
  (tmp_path / "config.json").write_text(json.dumps(published))
  _, keys, _ = hf.architecture(tmp_path)
  mine = hf.keys_of(config.model, config.model.vocab_size)
  ours = {key: mine[key] for key in keys if key in mine}
  assert {key: (ours[key], keys[key]) for key in ours if ours[key] != pytest.approx(keys[key])} == {}
  assert len(ours) > 15


@recipes
def test_starting_from_the_published_weights_changes_no_key(name, arg, tmp_path):
  """Only what the folder adds is filled in, and nothing contradicts it."""
  (tmp_path / "config.json").write_text(json.dumps(RECIPES[name, arg][1]))
  config = importlib.import_module(f"configs.{name}").get_config(arg)
  config.model.hf = str(tmp_path)
  _, notes = program_lib.resolve(config)
  assert not [note for note in notes if "as this config says" in note]


@pytest.mark.parametrize("slices", [1, 2])
@recipes
def test_parameters_and_moments_are_split_over_the_devices_and_fit(name, arg, slices):
  config = resolved(name, arg, slices)
  topology = hardware.topology(config.plan.topology, slices)
  sizes = mesh_lib.axis_sizes(config.mesh, topology.devices, topology.kind)
  mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
  mesh_lib.check_batch(mesh, config.batch_size // config.grad_accum_steps)
  model = program_lib.make_model(config, config.model.vocab_size)
  program = program_lib.make_program(
      config_checks.View(config), model, program_lib.planned_optimizer(config, model), mesh, ("main",))
  assert not [note for note in program.notes if "not divisible" in note]
  state = zip(jax.tree.leaves(program.abstract_state), jax.tree.leaves(program.state_sharding), strict=True)
  held = sum(np.prod(sharding.shard_shape(leaf.shape), dtype=float) * leaf.dtype.itemsize for leaf, sharding in state)
  # float32 parameters and two moments, over all devices but for copies: the axes that parameters are not split over.
  assert 1e6 <= config.batch_size * config.seq_len / slices <= 5e6
  copies = sizes["slice"] * sizes["data"]
  assert held == pytest.approx(12 * RECIPES[name, arg][0] * copies / topology.devices, rel=0.01)
  assert 16 / 12 * held < 0.6 * topology.chip.usable


def test_of_deepseek_v3_a_token_passes_through_37_billion():
  """Published: 671 billion in all, 37 billion activated (arXiv 2412.19437, abstract)."""
  config = resolved("deepseek_v3", "v5p")
  active = active_parameters(program_lib.make_model(config, config.model.vocab_size))
  assert active == DEEPSEEK_V3_PARAMETERS - 58 * (256 - 8) * 3 * 7168 * 2048
  assert (DEEPSEEK_V3_PARAMETERS // 10**8, active // 10**9) == (6710, 37)


@pytest.mark.parametrize("name", ["llama3_70b", "deepseek_v3"])
def test_unknown_hardware_is_refused(name):
  with pytest.raises(ConfigError, match="allowed: v5p, h100"):
    importlib.import_module(f"configs.{name}").get_config("a100")
