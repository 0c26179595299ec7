"""Makes the folders of tests/models/hf/references: tiny random models as transformers saves them, and what it computes.

    python tests/models/hf/make_references.py [CASE …]

needs torch and transformers 5 (the versions that were used are in each reference.npz); the tests need neither. A case
has config.json and safetensors; config_4.json, the same in the layout of transformers 4; and reference.npz:

    tokens [2, T]        logits [2, T, V]           of the plain batch
    padded [R, V]        logits of row 1 where it has only its first R tokens
    documents [T, V]     logits of row 0 where tokens before and from SPLIT on are documents of their own
    gradient_names, gradient_0, gradient_1    of the mean next-token cross-entropy over the plain batch
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

FOLDER = Path(__file__).parent / "references"
# Of the family that docs/huggingface.md adds as an example.
EXAMPLE = "olmoe"
V, T, REAL, SPLIT = 61, 20, 13, 9

SMALL = dict(vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0)
EXPERTS = dict(num_experts_per_tok=2, num_experts=5, moe_intermediate_size=12)
DELTA = dict(head_dim=8, rms_norm_eps=0.02, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6,
             linear_value_head_dim=4, linear_conv_kernel_dim=3)
MROPE = dict(rope_type="default", rope_theta=5e3, partial_rotary_factor=0.5, mrope_section=[1, 1, 0],
             mrope_interleaved=True)
LATENT = dict(num_key_value_heads=4, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5,
              n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=12, first_k_dense_replace=1, n_group=4,
              topk_group=2, rms_norm_eps=1e-3)
INDEXED = dict(q_lora_rank=14, num_hidden_layers=3, index_topk=6, index_n_heads=8, index_head_dim=10)
GRANITE4 = dict(shared_intermediate_size=20, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=6, mamba_d_conv=3,
                mamba_chunk_size=8, embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.25,
                logits_scaling=2.0, position_embedding_type="nope", rms_norm_eps=1e-3)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
OSS = dict(model_type="gpt_oss", **SMALL) | dict(head_dim=8, num_hidden_layers=3, sliding_window=5, num_local_experts=5,
                                                num_experts_per_tok=2, rope_theta=500.0, rope_scaling=YARN | dict(
                                                    truncate=False))
GEMMA4 = dict(head_dim=8, global_head_dim=12, num_hidden_layers=5, sliding_window=5, hidden_size_per_layer_input=0,
              layer_types=[f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")],
              rms_norm_eps=1e-3, rope_parameters=dict(
                  full_attention=dict(rope_type="proportional", partial_rotary_factor=0.5, rope_theta=5e3),
                  sliding_attention=dict(rope_type="default", rope_theta=100.0)))
GEMMA3N = dict(head_dim=8, num_hidden_layers=5, sliding_window=5, hidden_size_per_layer_input=6, laurel_rank=7,
               layer_types=[f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
               rms_norm_eps=0.05, rope_parameters=dict(
                   full_attention=dict(rope_type="default", rope_theta=5e3),
                   sliding_attention=dict(rope_type="default", rope_theta=100.0)))
LLAMA4 = dict(head_dim=8, num_hidden_layers=5, num_local_experts=3, intermediate_size=12, intermediate_size_mlp=24,
              attention_chunk_size=5, floor_scale=4, attn_scale=0.3, rms_norm_eps=1e-2, rope_theta=500.0)
GPT2 = dict(model_type="gpt2", vocab_size=V, n_embd=16, n_head=4, n_layer=2, n_positions=T, n_inner=40, bos_token_id=1,
            eos_token_id=2)


def like(model_type: str, **changes) -> dict:
  return dict(model_type=model_type, **SMALL) | changes


def llama(**changes) -> dict:
  return like("llama", **dict(rope_theta=500.0) | changes)


# What each case is: entries of config.json, and under capital keys what is done to the files.
CASES = {
    "llama": llama(head_dim=6),
    "llama_biases": llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, hidden_act="gelu"),
    "llama_llama3": llama(rope_scaling=LLAMA3),
    "llama_linear": llama(rope_scaling=dict(rope_type="linear", factor=2.0)),
    "llama_dynamic": llama(rope_scaling=dict(rope_type="dynamic", factor=2.0), max_position_embeddings=10),
    "llama_yarn": llama(rope_scaling=YARN, head_dim=12),
    "llama_yarn_mscale": llama(head_dim=12, max_position_embeddings=4096, rope_scaling=YARN | dict(
        mscale=1.0, mscale_all_dim=0.5, beta_fast=8.0, truncate=False, original_max_position_embeddings=1024)),
    "llama_bf16": llama(DTYPE=torch.bfloat16),
    "llama_fp16": llama(DTYPE=torch.float16),
    "llama_sharded": llama(SHARD="10KB"),
    "mistral": like("mistral", sliding_window=5, head_dim=8),
    "mixtral": like("mixtral", num_local_experts=4, sliding_window=6),
    "mixtral_fused": like("mixtral", num_local_experts=4, FUSED=True),
    "qwen2": like("qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": like("qwen3", head_dim=8, attention_bias=True),
    "qwen3_moe": like("qwen3_moe", **EXPERTS, head_dim=8, norm_topk_prob=True),
    "qwen3_moe_fused": like("qwen3_moe", **EXPERTS, head_dim=8, FUSED=True),
    "qwen2_moe": like("qwen2_moe", **EXPERTS, shared_expert_intermediate_size=20),
    "qwen3_next": like("qwen3_next", **EXPERTS, **DELTA, shared_expert_intermediate_size=20, num_hidden_layers=3,
                       full_attention_interval=2),
    "qwen3_5": like("qwen3_5_text", **DELTA, num_hidden_layers=3, full_attention_interval=2, rope_parameters=MROPE),
    "qwen3_5_moe": like("qwen3_5_moe_text", **EXPERTS, **DELTA | dict(linear_key_head_dim=8),
                        shared_expert_intermediate_size=20, num_hidden_layers=3, full_attention_interval=2,
                        rope_parameters=MROPE),
    "deepseek_v2": like("deepseek_v2", **LATENT, q_lora_rank=14, topk_method="group_limited_greedy",
                        routed_scaling_factor=1.5, n_shared_experts=2, num_hidden_layers=3),
    "deepseek_v2_lite": like("deepseek_v2", **LATENT | dict(first_k_dense_replace=0), q_lora_rank=None,
                             topk_method="greedy", n_shared_experts=1, rope_scaling=YARN | dict(
                                 mscale=0.707, mscale_all_dim=0.707)),
    "deepseek_v3": like("deepseek_v3", **LATENT, q_lora_rank=14, num_hidden_layers=3, num_mtp_layers=0,
                        attention_bias=True, rope_scaling=YARN | dict(mscale=1.0, mscale_all_dim=1.0)),
    "deepseek_v3_halves": like("deepseek_v3", **LATENT | dict(v_head_dim=12), q_lora_rank=None, rope_interleave=False,
                               norm_topk_prob=False, num_mtp_layers=0, rope_scaling=YARN | dict(mscale_all_dim=0.5)),
    "gpt_oss": OSS | dict(rope_scaling=dict(rope_type="default")),
    "gpt_oss_mxfp4": OSS | dict(hidden_size=32, intermediate_size=32, MXFP4=True),
    "gemma": like("gemma", head_dim=8),
    "gemma2": like("gemma2", head_dim=8, sliding_window=5, query_pre_attn_scalar=5, attn_logit_softcapping=1.5,
                   final_logit_softcapping=10.0),
    "gemma3": like("gemma3_text", head_dim=8, num_hidden_layers=5, sliding_window=5, sliding_window_pattern=3,
                   query_pre_attn_scalar=5, rope_theta=5000.0, rope_local_base_freq=100.0,
                   rope_scaling=dict(rope_type="linear", factor=8.0), intermediate_size=16),
    "gemma3n": like("gemma3n_text", **GEMMA3N, num_kv_shared_layers=2, vocab_size_per_layer_input=V - 20,
                    activation_sparsity_pattern=[0.7, 0.4, 0.4, 0.0, 0.0], altup_num_inputs=3,
                    GRADIENT=".1.altup.prediction_coefs.weight"),
    # Coefficients are cut in training alone.
    "gemma3n_plain": like("gemma3n_text", **GEMMA3N | dict(num_hidden_layers=2, layer_types=["full_attention"] * 2),
                          num_kv_shared_layers=0, vocab_size_per_layer_input=V, activation_sparsity_pattern=None,
                          altup_num_inputs=2, attention_bias=True, tie_word_embeddings=False, altup_coef_clip=0.3,
                          TRAIN=True, GRADIENT=".1.altup.correction_coefs.weight"),
    "gemma4": like("gemma4_text", **GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1,
                   final_logit_softcapping=10.0, GRADIENT=".2.self_attn.k_proj.weight"),
    "gemma4_biases": like("gemma4_text", **GEMMA4 | dict(num_hidden_layers=2, layer_types=["full_attention"] * 2),
                          attention_bias=True, tie_word_embeddings=False),
    "gemma4_moe": like("gemma4_text", **GEMMA4 | dict(num_hidden_layers=3, layer_types=GEMMA4["layer_types"][:3]),
                       num_experts=5, top_k_experts=2, moe_intermediate_size=12, enable_moe_block=True,
                       GRADIENT=".1.router.per_expert_scale"),
    "gemma4_shared": like("gemma4_text", **GEMMA4 | dict(
        # So many norms blow rounding up where what they divide by is small: with 7 layers and an epsilon of 1e-3,
        # transformers is 2e-5 from itself in float64.
        rms_norm_eps=0.05, tie_word_embeddings=False, hidden_size_per_layer_input=6, layer_types=[
            f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")]),
        vocab_size_per_layer_input=V, num_kv_shared_layers=2, use_double_wide_mlp=True,
        GRADIENT=".per_layer_model_projection.weight"),
    # As Scout, with bounds of its llama3 scaling that coincide.
    "llama4": like("llama4_text", **LLAMA4, interleave_moe_layer_step=1, rope_scaling=LLAMA3 | dict(
        high_freq_factor=1.0), GRADIENT=".1.feed_forward.experts.gate_up_proj"),
    # As Maverick; and layers that rotate and see all.
    "llama4_interleaved": like("llama4_text", **LLAMA4, interleave_moe_layer_step=2, use_qk_norm=False,
                               num_experts_per_tok=2, attention_bias=True, no_rope_layers=[1, 0, 1, 1, 0], layer_types=[
                                   f"{kind}_attention" for kind in ("chunked", "full", "full", "chunked", "full")],
                               GRADIENT=".1.feed_forward.router.weight"),
    "gpt2": GPT2,
    "gpt2_bare": GPT2 | dict(BARE=True),
    "starcoder2": like("starcoder2", sliding_window=7),
    "stablelm": like("stablelm", use_qkv_bias=True, partial_rotary_factor=0.5),
    "stablelm_parallel": like("stablelm", use_parallel_residual=True, qk_layernorm=True, partial_rotary_factor=0.5),
    "arcee": like("arcee", head_dim=6, attention_bias=True, mlp_bias=True),
    "nemotron": like("nemotron", head_dim=8),
    "seed_oss": like("seed_oss", head_dim=8, mlp_bias=True),
    "olmo2": like("olmo2", attention_bias=True, rms_norm_eps=1e-3),
    "olmo3": like("olmo3", num_hidden_layers=3, sliding_window=5, rope_scaling=YARN,
                  layer_types=["sliding_attention", "sliding_attention", "full_attention"]),
    "glm": like("glm", head_dim=8),
    "glm4": like("glm4", head_dim=6, partial_rotary_factor=1.0, attention_bias=False),
    "glm4_moe": like("glm4_moe", head_dim=8, use_qk_norm=True, attention_bias=True, n_routed_experts=8, n_group=4,
                     topk_group=2, num_experts_per_tok=2, moe_intermediate_size=12, n_shared_experts=2,
                     first_k_dense_replace=1, routed_scaling_factor=2.5, num_mtp_layers=0, num_hidden_layers=3,
                     rms_norm_eps=1e-3),
    "glm4_moe_bare": like("glm4_moe", partial_rotary_factor=1.0, n_routed_experts=5, num_experts_per_tok=2,
                          moe_intermediate_size=12, norm_topk_prob=False, num_mtp_layers=0),
    # What first_k_dense_replace says is not read.
    "glm4_moe_lite": like("glm4_moe_lite", **LATENT, q_lora_rank=14, num_hidden_layers=3, n_shared_experts=2,
                          mlp_layer_types=["dense", "dense", "sparse"], rope_scaling=YARN | dict(mscale_all_dim=0.5),
                          GRADIENT=".2.mlp.gate.weight"),
    # Texts are longer than what is chosen, the first document, too.
    "deepseek_v32": like("deepseek_v32", **LATENT, **INDEXED, rope_scaling=YARN | dict(mscale=1.0, mscale_all_dim=1.0),
                         attention_bias=True, GRADIENT=".1.self_attn.q_b_proj.weight"),
    "glm_moe_dsa": like("glm_moe_dsa", **LATENT, **INDEXED | dict(num_hidden_layers=4),
                        indexer_types=["full", "shared", "full", "shared"],
                        GRADIENT=".3.self_attn.kv_a_proj_with_mqa.weight"),
    "ernie4_5": like("ernie4_5", head_dim=6, use_bias=True),
    "exaone4": like("exaone4", num_hidden_layers=4, sliding_window=5, sliding_window_pattern=3, rope_scaling=LLAMA3,
                    head_dim=6),
    "exaone4_plain": like("exaone4", sliding_window=None, layer_types=["full_attention"] * 2),
    "apertus": like("apertus", head_dim=8, hidden_act="xielu", attention_bias=True, rms_norm_eps=1e-3,
                    rope_scaling=LLAMA3, GRADIENT=".1.mlp.act_fn.alpha_n"),
    "helium": like("helium", head_dim=4, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3),
    "dots1": like("dots1", head_dim=8, n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=2,
                  moe_intermediate_size=12, n_shared_experts=2, first_k_dense_replace=1, norm_topk_prob=True,
                  routed_scaling_factor=2.5, num_hidden_layers=3, sliding_window=5, max_window_layers=2,
                  rms_norm_eps=1e-3),
    "hunyuan_v1_dense": like("hunyuan_v1_dense", head_dim=8, attention_bias=True, rms_norm_eps=1e-3, rope_scaling=dict(
        rope_type="dynamic", alpha=50.0, factor=1.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)),
    "ministral3": like("ministral3", head_dim=8, sliding_window=7, rope_parameters=YARN | dict(
        rope_theta=500.0, llama_4_scaling_beta=0.5, mscale=1.0, mscale_all_dim=1.0,
        original_max_position_embeddings=4)),
    "minimax_m2": like("minimax_m2", head_dim=8, rotary_dim=4, num_local_experts=5, num_experts_per_tok=2),
    "smollm3": like("smollm3", num_hidden_layers=3, no_rope_layers=[1, 0, 1], rope_theta=5e3),
    "granite": like("granite", head_dim=6, embedding_multiplier=3.0, residual_multiplier=0.22,
                    attention_multiplier=0.25, logits_scaling=6.0, mlp_bias=True),
    "granitemoe": like("granitemoe", num_local_experts=5, num_experts_per_tok=2, embedding_multiplier=3.0,
                       residual_multiplier=0.22, attention_multiplier=0.25, logits_scaling=2.0, attention_bias=True,
                       tie_word_embeddings=True, GRADIENT=".1.block_sparse_moe.router.weight"),
    "granite4": like("granitemoehybrid", **GRANITE4, num_hidden_layers=3, layer_types=["mamba", "attention", "mamba"],
                     num_local_experts=0, mamba_n_groups=2),
    "granite4_moe": like("granitemoehybrid", **GRANITE4, num_hidden_layers=4, num_local_experts=5,
                         layer_types=["mamba", "mamba", "attention", "mamba"], num_experts_per_tok=2, head_dim=6),
    "granite4_rope": like("granitemoehybrid", **GRANITE4 | dict(position_embedding_type="rope"), rope_theta=500.0,
                          layer_types=["attention", "attention"], num_local_experts=0),
    "nemotron_h": like("nemotron_h", num_hidden_layers=None, hybrid_override_pattern="M-M*-M", head_dim=6,
                       mamba_num_heads=4, mamba_head_dim=6, n_groups=2, ssm_state_size=5, conv_kernel=3, chunk_size=8,
                       layer_norm_epsilon=0.1, time_step_min=0.1, mlp_bias=True),
    "nemotron_h_moe": like("nemotron_h", num_hidden_layers=None, hybrid_override_pattern="ME*EM-E", head_dim=6,
                           mamba_num_heads=4, mamba_head_dim=6, n_groups=1, ssm_state_size=5, conv_kernel=3,
                           chunk_size=8, layer_norm_epsilon=0.1, n_routed_experts=8, n_group=4, topk_group=2,
                           num_experts_per_tok=3, moe_intermediate_size=10, moe_shared_expert_intermediate_size=14,
                           routed_scaling_factor=2.5, GRADIENT=".1.mixer.gate.weight"),
    EXAMPLE: like("olmoe", num_experts=5, num_experts_per_tok=2, rms_norm_eps=1e-3, attention_bias=True,
                  GRADIENT=".1.mlp.gate.weight"),
    "cohere": like("cohere", use_qk_norm=True, logit_scale=0.3, attention_bias=True),
    "cohere2": like("cohere2", num_hidden_layers=3, sliding_window=5, sliding_window_pattern=2, logit_scale=0.3),
    "phi3": like("phi3", partial_rotary_factor=0.5, sliding_window=6),
    # One of the two documents is as long as the original length, or shorter; all else is longer.
    "phi3_longrope": like("phi3", num_attention_heads=2, num_key_value_heads=1, partial_rotary_factor=0.75,
                          original_max_position_embeddings=SPLIT, tie_word_embeddings=True, rope_scaling=dict(
                              rope_type="longrope", short_factor=[1.0, 1.1, 1.3], long_factor=[1.2, 2.5, 6.0])),
}


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
  """Every parameter random, none at a value that hides it: kernels of gain 1.2, norms off one, biases off zero."""
  with torch.no_grad():
    for name, p in model.named_parameters():
      noise = torch.randn(p.shape, generator=generator)
      near_one = name.endswith(("router.scale", "per_expert_scale")) or "norm" in name or ".ln_" in name
      if name.endswith("bias") or near_one and p.ndim == 1:
        p.copy_(p + 0.3 * noise)
      elif "embed" in name or ".wte" in name or ".wpe" in name:
        p.copy_(noise)
      else:
        fan_in = p.shape[-2] if "c_" in name and name.startswith("transformer") else p.shape[-1]
        p.copy_(1.2 * noise / fan_in**0.5)
      if name.endswith("modality_router.weight"):  # what it sees is divided by its size
        p.mul_(p.shape[-1] / 2)
      if "ion_coefs" in name:  # streams that are nearly 0 would be blown up by norms
        p.mul_(0.4)
      if "act_fn" in name:  # off what they begin with
        p.add_(0.3 * noise)
      if name.endswith((".A_log", ".D", "dt_bias")):  # states that fade within some tokens
        p.copy_(0.5 * noise - (1.0 if name.endswith("dt_bias") else 0.0))
    for name, b in model.named_buffers():
      if name.endswith("e_score_correction_bias"):
        b.copy_(0.1 * torch.randn(b.shape, generator=generator))
      if name.endswith("layer_scalar"):
        b.copy_(0.8 + 0.2 * torch.randn(b.shape, generator=generator))


def in_mxfp4(tensors: dict) -> dict:
  """With random codes and scales in the place of experts' kernels."""
  numbers, found = np.random.default_rng(3), {}
  for name, values in tensors.items():
    if not name.endswith(("gate_up_proj", "down_proj")):
      found[name] = values.contiguous()
      continue
    experts, inputs, outputs = values.shape
    groups = experts, outputs, inputs // 32
    found[f"{name}_blocks"] = torch.tensor(numbers.integers(0, 256, (*groups, 16)).astype(np.uint8))
    found[f"{name}_scales"] = torch.tensor(numbers.integers(121, 125, groups).astype(np.uint8))
  return found


def save(case: dict, folder: Path) -> None:
  config = dict(case)
  dtype, shard = config.pop("DTYPE", torch.float32), config.pop("SHARD", "5GB")
  for key in ("GRADIENT", "TRAIN"):
    config.pop(key, None)
  fused, bare, mxfp4 = config.pop("FUSED", False), config.pop("BARE", False), config.pop("MXFP4", False)
  model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
  randomise(model, torch.Generator().manual_seed(0))
  model.to(dtype).save_pretrained(folder, max_shard_size=shard)
  (folder / "generation_config.json").unlink(missing_ok=True)
  tied = model.config.tie_word_embeddings
  tensors = {k: v for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}
  if bare:
    tensors = {k.removeprefix("transformer."): v for k, v in tensors.items()}
    mask = torch.tril(torch.ones(T, T, dtype=torch.bool))[None, None]
    tensors |= {f"h.{i}.attn.bias": mask.clone() for i in range(2)}
    tensors |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
  if mxfp4:
    tensors = in_mxfp4(tensors)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(quantization_config=dict(
        quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"])), indent=2))
  if fused or bare or mxfp4:
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def transformers_4(config: dict) -> dict:
  """The same config.json as transformers 4 writes it; of Gemma 4, which it does not have, as it is published."""
  if config["model_type"] == "gemma4_text":
    own = config["per_layer_config"].get(str(config["num_hidden_layers"] - 1), {})
    more = {"global_head_dim": own.get("head_dim", config["head_dim"]),
            "num_global_key_value_heads": own.get("num_key_value_heads")}
    return {k: v for k, v in config.items() if k != "per_layer_config"} | more
  new = ("rope_parameters", "layer_types", "dtype", "_sliding_window_pattern")
  told = "linear_key_head_dim" in config or config["model_type"] in (
      "cohere2", "exaone4", "gemma3n_text", "gpt_oss", "granitemoehybrid", "llama4_text", "olmo3")
  kept = ("layer_types",) if told else ()
  old = {k: v for k, v in config.items() if k not in new or k in kept}
  if config["model_type"] == "granitemoehybrid":
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    old["layer_types"] = [names[kind] for kind in old["layer_types"]]
  elif config["model_type"] == "nemotron_h":
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    old["hybrid_override_pattern"] = "".join(letters[kind] for kind in old.pop("layers_block_type"))
    old["num_hidden_layers"] = len(old["hybrid_override_pattern"])
  elif "num_local_experts" in old and old["model_type"] not in ("mixtral", "minimax_m2", "llama4_text", "granitemoe"):
    old["num_experts"] = old.pop("num_local_experts")
  old |= dict(torch_dtype=config["dtype"], transformers_version="4.51.3")
  rope = config.get("rope_parameters")
  if rope and "full_attention" in rope:
    if config["model_type"] != "olmo3":
      old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    rope = rope["full_attention"]
  if rope:
    old["rope_theta"] = rope["rope_theta"]
    if rope["rope_type"] != "default":
      kept = {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor")}
      old["rope_scaling"] = kept | {"type": kept["rope_type"]}
    else:  # where there is none, gpt-oss has YaRN
      old["rope_scaling"] = {"rope_type": "default"} if config["model_type"] == "gpt_oss" else None
    if "partial_rotary_factor" in rope:
      old["partial_rotary_factor"] = rope["partial_rotary_factor"]
  if config["model_type"] == "gemma3_text":
    old["sliding_window_pattern"] = config["layer_types"].index("full_attention") + 1
  return old


def load(folder: Path, train: bool) -> torch.nn.Module:
  model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
  model.set_experts_implementation("eager")
  return model.train(train)


def logits(train: bool, folder: Path, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> np.ndarray:
  """From a fresh model: `dynamic` scaling remembers the longest sequence that it has seen."""
  with torch.no_grad():
    return load(folder, train)(tokens, attention_mask=mask, use_cache=False).logits.numpy()


def gradients(train: bool, folder: Path, tokens: torch.Tensor, wanted: str | None) -> dict[str, np.ndarray]:
  """`wanted`: the end of the name of the second; None: one that all models have."""
  model = load(folder, train)
  parameters = dict(model.named_parameters())
  first = next(n for n in parameters if ".0." in n and (
      "q_proj.weight" in n or "qkv" in n or "c_attn.weight" in n or "kv_b_proj.weight" in n or "in_proj.weight" in n))
  second = next((n for n in parameters if (
      n.endswith(wanted) if wanted else ".1.mlp.gate.weight" in n or ".1.self_attn.sinks" in n or
      ".mamba.A_log" in n or ".mixer.A_log" in n)), None)
  names = [first, second or next(n for n in parameters if n in ("model.norm.weight", "transformer.ln_f.weight"))]
  out = model(tokens, use_cache=False).logits[:, :-1]
  torch.nn.functional.cross_entropy(out.reshape(-1, V), tokens[:, 1:].reshape(-1)).backward()
  return {"gradient_names": names, **{f"gradient_{i}": parameters[n].grad.numpy() for i, n in enumerate(names)}}


def make(name: str) -> None:
  folder = FOLDER.with_name("example") if name == EXAMPLE else FOLDER / name
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir(parents=True)
  save(CASES[name], folder)
  tokens = torch.randint(3, V, (2, T), generator=torch.Generator().manual_seed(1))
  train = CASES[name].get("TRAIN", False)
  plain = logits(train, folder, tokens)
  padded = logits(train, folder, tokens[1:, :REAL])[0]
  documents = np.concatenate([logits(train, folder, part)[0] for part in (tokens[:1, :SPLIT], tokens[:1, SPLIT:])])
  mask = torch.ones_like(tokens)
  mask[1, REAL:] = 0
  if name != "llama_dynamic":  # whose frequencies depend on the length, in transformers with padding
    by_mask = logits(train, folder, tokens, mask)
    np.testing.assert_allclose(by_mask[0], plain[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(by_mask[1, :REAL], padded, rtol=0, atol=1e-5)
  assert np.abs(documents[SPLIT:] - plain[0, SPLIT:]).max() > 1e-2, "documents must matter"

  config = json.loads((folder / "config.json").read_text())
  old = json.dumps(transformers_4(config), indent=2, sort_keys=True) + "\n"
  (folder / "config_4.json").write_text(old)
  with tempfile.TemporaryDirectory() as copy:
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    (Path(copy) / "config.json").write_text(old)
    np.testing.assert_array_equal(logits(train, Path(copy), tokens), plain)

  versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
  np.savez_compressed(folder / "reference.npz", tokens=tokens.numpy().astype(np.int32), logits=plain, padded=padded,
                      documents=documents, versions=versions,
                      **gradients(train, folder, tokens, CASES[name].get("GRADIENT")))
  print(f"{name}: {sum(f.stat().st_size for f in folder.iterdir())} bytes, |logits| up to {np.abs(plain).max():.2f}")


if __name__ == "__main__":
  transformers.utils.logging.disable_progress_bar()
  transformers.utils.logging.set_verbosity_error()
  for case_name in sys.argv[1:] or CASES:
    make(case_name)
