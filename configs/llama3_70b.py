"""Pretrains Llama 3 70B on 256 TPU v5p chips (":v5p", the default) or on 64 H100 GPUs in 8 nodes (":h100").

    python -m trainer --config=configs/llama3_70b.py:v5p --workdir=DIR \
      --config.tokenizer.path=FOLDER --config.input.sources.main.path='data/*.parquet'

FOLDER is a Hugging Face folder with Llama 3's tokenizer.json. To go on from its weights instead of from scratch, add
--config.model.hf=FOLDER and lower the learning rate. What it takes, without a device: add --mode=plan. On two such
slices: --config.mesh.slice=2 --config.plan.slices=2 --config.batch_size=1024.
"""

from ml_collections import ConfigDict

from configs import llama3_8b
from trainer.errors import ConfigError


def get_config(arg: str | None = None) -> ConfigDict:
  """`arg`: what it runs on: v5p (also nothing), or h100. What is not said here is as in configs/llama3_8b.py."""
  if arg not in (None, "", "v5p", "h100"):
    raise ConfigError(f"configs/llama3_70b.py:{arg}: found {arg!r}, allowed: v5p, h100, or nothing.")
  c = llama3_8b.get_config()
  # 70,553,706,496 parameters (arXiv 2407.21783, table 3, and the published config.json).
  c.model.num_layers = 80
  c.model.hidden_size = 8192
  c.model.intermediate_size = 28_672
  c.model.num_heads = 64

  # 4.2 million tokens a step, as in the paper's middle stage.
  c.batch_size = 512
  # A layer keeps nothing but its input, 128 MiB a row.
  c.remat = "full"
  if arg == "h100":
    # A row for each GPU at a time. It is computed longer than its kernels take to come, 1/8 of them over each of a
    # node's 8 adapters; the links within a node would be slower at the activations that mesh.tensor=8 sends.
    c.mesh.update(data=1, fsdp=-1)
    c.grad_accum_steps = 8
    c.plan.topology = "h100:8x8"
  else:
    # 16 bytes a parameter (float32 parameters, gradients, AdamW's moments) over 128 chips: 8 GiB of each chip's 95. Two
    # rows a chip, 20 GiB between layers, compute longer than it takes to gather a layer's kernels. Two copies, for the
    # reason that stands in configs/llama3_8b.py.
    c.mesh.update(data=2, fsdp=-1)
    c.plan.topology = "v5p:4x8x8"

  c.optimizer.learning_rate = 1.5e-4
  c.total_tokens = 1_400_000_000_000
  c.ckpt_steps = 250
  return c
