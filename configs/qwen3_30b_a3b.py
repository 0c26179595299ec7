"""Continues the pretraining of Qwen3-30B-A3B, a mixture of 128 experts, on 64 TPU v5p chips, experts split over 8.

    python -m trainer --config=configs/qwen3_30b_a3b.py --workdir=DIR --config.model.hf=FOLDER \
      --config.tokenizer.path=FOLDER --config.input.sources.main.path='data/*.parquet'

FOLDER is the published model as a Hugging Face folder. Without --config.model.hf all weights are fresh; give
--config.tokenizer.path in any case. What it takes, without a TPU: add --mode=plan. On two such slices:
--config.mesh.slice=2 --config.plan.slices=2 --config.batch_size=512.
"""

from ml_collections import ConfigDict

from trainer.config import defaults, evaluator, source


def get_config(arg: str | None = None) -> ConfigDict:
  """No argument."""
  c = defaults()
  # 30,532,122,624 parameters, of which a token passes through 3.3 billion (arXiv 2505.09388, table 2, and the published
  # config.json).
  c.model.vocab_size = 151_936
  c.model.num_layers = 48
  c.model.hidden_size = 2048
  # All MLPs are experts.
  c.model.intermediate_size = 768
  c.model.moe.num_experts = 128
  c.model.moe.experts_per_token = 8
  c.model.moe.expert_size = 768
  c.model.num_heads = 32
  c.model.num_kv_heads = 4
  c.model.head_dim = 128
  c.model.qk_norm = True
  c.model.norm_eps = 1e-6
  c.model.rope_theta = 1_000_000.0
  c.model.tie_embeddings = False
  c.model.init_std = 0.02
  # The published router_aux_loss_coef. No token is dropped, but an even load is what makes all chips finish together.
  c.model.moe.balance_loss = 0.001

  c.tokenizer.type = "hf"
  c.tokenizer.path = "path/to/a/hugging_face_folder"
  c.input.sources.main = source(type="parquet", path="path/to/documents/*.parquet", split="train",
                                validation_fraction=0.001)

  # 16 experts on each of 8 neighbours, between which tokens travel; their kernels, 95% of all parameters, are split
  # over fsdp as well. Gathering all experts of a layer on every chip, as fsdp alone would, is 8 times the traffic.
  c.mesh.update(data=1, fsdp=-1, expert=8)
  c.plan.topology = "v5p:4x4x4"
  c.seq_len = 4096
  c.batch_size = 256
  c.remat = "attention_mlp"

  c.optimizer.learning_rate = 2e-5
  c.optimizer.weight_decay = 0.1
  c.schedule.name = "cosine"
  c.schedule.warmup_steps = 500
  c.schedule.floor = 0.1
  c.total_tokens = 100_000_000_000

  c.ckpt_steps = 500
  c.keep_last = 3
  c.evals.val = evaluator(type="loss", eval_steps=1000, max_documents=2048)
  return c
