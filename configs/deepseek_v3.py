"""Continues the pretraining of DeepSeek-V3, a mixture of 256 experts with latent attention: 671 billion parameters, on
1024 TPU v5p chips (":v5p", the default) or on 512 H100 GPUs in 64 nodes (":h100").

    python -m trainer --config=configs/deepseek_v3.py:v5p --workdir=DIR --config.model.hf=FOLDER \
      --config.tokenizer.path=FOLDER --config.input.sources.main.path='data/*.parquet'

FOLDER is the published model as a Hugging Face folder. Without --config.model.hf all weights are fresh; give
--config.tokenizer.path in any case. What it takes, without a device: add --mode=plan.
"""

import math

from ml_collections import ConfigDict

from configs import qwen3_30b_a3b
from trainer.config import defaults
from trainer.errors import ConfigError


def get_config(arg: str | None = None) -> ConfigDict:
  """`arg`: what it runs on: v5p (also nothing), or h100. What is not said here is, but for the model, as in
  configs/qwen3_30b_a3b.py: data, length of rows, schedule."""
  if arg not in (None, "", "v5p", "h100"):
    raise ConfigError(f"configs/deepseek_v3.py:{arg}: found {arg!r}, allowed: v5p, h100, or nothing.")
  c = qwen3_30b_a3b.get_config()
  c.model = defaults().model
  # 671,026,419,200 parameters, of which a token passes through 37 billion (arXiv 2412.19437, section 4.2, and the
  # published config.json); without the layer that predicts tokens further ahead.
  c.model.vocab_size = 129_280
  c.model.num_layers = 61
  c.model.hidden_size = 7168
  c.model.intermediate_size = 18_432
  c.model.num_heads = c.model.num_kv_heads = 128
  c.model.head_dim = 128 + 64
  c.model.latent.kv_rank = 512
  c.model.latent.q_rank = 1536
  c.model.latent.nope_dim = 128
  c.model.latent.rope_dim = 64
  c.model.latent.value_dim = 128
  c.model.moe.num_experts = 256
  c.model.moe.experts_per_token = 8
  c.model.moe.expert_size = 2048
  c.model.moe.shared_size = 2048
  c.model.moe.dense_layers = 3
  c.model.moe.scores = "sigmoid"
  c.model.moe.choice_bias = True
  c.model.moe.weight_scale = 2.5
  c.model.moe.groups = 8
  c.model.moe.groups_used = 4
  c.model.norm_eps = 1e-6
  c.model.rope_theta = 10_000.0
  c.model.rope_interleaved = True
  # Longer texts than the 4,096 tokens of the pretraining, up to 163,840.
  c.model.rope_scaling.update(type="yarn", factor=40.0, original_positions=4096, beta_fast=32.0, beta_slow=1.0,
                              attention_factor=1.0)
  c.model.attention_scale = (128 + 64) ** -0.5 * (0.1 * math.log(40.0) + 1) ** 2
  c.model.tie_embeddings = False
  c.model.init_std = 0.006

  # 4 experts of a layer on each device of 64. Their kernels are 97% of all parameters: to gather them takes longer than
  # to bring tokens to them, for which every device has 8,192 a step or fewer.
  c.batch_size = 1024
  if arg == "h100":
    # Tokens travel between nodes, each through its GPU's own adapter, longer than anything is computed.
    c.mesh.update(data=1, fsdp=-1, expert=64)
    c.plan.topology = "h100:8x64"
    c.remat = "full"
  else:
    # Two copies: of latents, 512 numbers, no more than 512 devices can have their parts.
    c.mesh.update(data=2, fsdp=-1, expert=64)
    c.plan.topology = "v5p:8x8x16"
    c.remat = "attention"

  c.optimizer.learning_rate = 7.3e-6
  c.ckpt_steps = 250
  return c
