"""Pretrains Llama 3 8B on the 256 chips of a TPU v5e-256, 2.1 million tokens a step.

    python -m trainer --config=configs/llama3_8b.py --workdir=DIR \
      --config.tokenizer.path=FOLDER --config.input.sources.main.path='data/*.parquet'

FOLDER is a Hugging Face folder with Llama 3's tokenizer.json. To go on from its weights instead of from scratch, add
--config.model.hf=FOLDER and lower the learning rate. What it takes, without a TPU: add --mode=plan. On two such slices:
--config.mesh.slice=2 --config.plan.slices=2 --config.batch_size=512.
"""

from ml_collections import ConfigDict

from trainer.config import defaults, evaluator, source


def get_config(arg: str | None = None) -> ConfigDict:
  """No argument."""
  c = defaults()
  # 8,030,261,248 parameters (arXiv 2407.21783, table 3, and the published config.json).
  c.model.vocab_size = 128_256
  c.model.num_layers = 32
  c.model.hidden_size = 4096
  c.model.intermediate_size = 14_336
  c.model.num_heads = 32
  c.model.num_kv_heads = 8
  c.model.head_dim = 128
  c.model.norm_eps = 1e-5
  c.model.rope_theta = 500_000.0
  c.model.tie_embeddings = False
  c.model.init_std = 0.02

  c.tokenizer.type = "hf"
  c.tokenizer.path = "path/to/a/hugging_face_folder"
  c.input.sources.main = source(type="parquet", path="path/to/documents/*.parquet", split="train",
                                validation_fraction=0.001)

  # Parameters, gradients and AdamW's moments are float32, 16 bytes a parameter: split over 128 chips they take 1 of
  # each chip's 16 GiB. One row a chip is enough arithmetic to hide the gathering of the next layer's kernels. There are
  # two copies, since over the whole of a square slice libtpu sums gradients on every chip (all-reduce) where each needs
  # its part alone (reduce-scatter): twice the traffic.
  c.mesh.update(data=2, fsdp=-1)
  c.plan.topology = "v5e:16x16"
  c.seq_len = 8192
  c.batch_size = 256
  # A layer keeps its input, 64 MiB a row, and queries, keys, values and outputs of attention: these fit.
  c.remat = "attention"

  c.optimizer.learning_rate = 3e-4
  c.optimizer.weight_decay = 0.1
  c.schedule.name = "cosine"
  c.schedule.warmup_steps = 2000
  c.schedule.floor = 0.01
  # 20 tokens for each parameter. Llama 3 itself saw 15 trillion.
  c.total_tokens = 160_000_000_000

  c.ckpt_steps = 500
  c.keep_last = 3
  c.evals.val = evaluator(type="loss", eval_steps=2000, max_documents=2048)
  return c
