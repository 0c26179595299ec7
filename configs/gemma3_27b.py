"""Continues the pretraining of Gemma 3 27B (text) on rows of 131,072 tokens, on 128 TPU v5p chips.

    python -m trainer --config=configs/gemma3_27b.py --workdir=DIR --config.model.hf=FOLDER \
      --config.tokenizer.path=FOLDER --config.input.sources.main.path='data/*.parquet'

FOLDER is the published model as a Hugging Face folder with its text part alone (model_type gemma3_text). Without
--config.model.hf all weights are fresh; give --config.tokenizer.path in any case. What it takes, without a TPU: add
--mode=plan. On two such slices: --config.mesh.slice=2 --config.plan.slices=2 --config.batch_size=32.
"""

from ml_collections import ConfigDict

from trainer.config import defaults, evaluator, source


def get_config(arg: str | None = None) -> ConfigDict:
  """No argument."""
  c = defaults()
  # 27,009,346,304 parameters (arXiv 2503.19786, table 1, and the published config.json). The vocabulary has 262,144
  # tokens, the image's one, and padding.
  c.model.vocab_size = 262_208
  c.model.num_layers = 62
  c.model.hidden_size = 5376
  c.model.intermediate_size = 21_504
  c.model.num_heads = 32
  c.model.num_kv_heads = 16
  c.model.head_dim = 128
  c.model.activation = "geglu"
  c.model.norm_eps = 1e-6
  c.model.norm_position = "sandwich"
  c.model.norm_scale_plus_one = True
  c.model.qk_norm = True
  c.model.scale_embeddings = True
  # hidden_size / num_heads, whatever the head size is.
  c.model.attention_scale = 168**-0.5
  # Five layers that see 1,024 tokens for each that sees all; only these have their positions stretched.
  c.model.window = 1024
  c.model.layer_pattern = ("local", "local", "local", "local", "local", "global")
  c.model.rope_theta = 1_000_000.0
  c.model.rope_local_theta = 10_000.0
  c.model.rope_scaling.update(type="linear", factor=8.0)
  c.model.init_std = 0.02

  c.tokenizer.type = "hf"
  c.tokenizer.path = "path/to/a/hugging_face_folder"
  # Books, repositories: documents as long as a row. Several shorter ones share a row and do not see one another.
  c.input.sources.main = source(type="parquet", path="path/to/long/documents/*.parquet", split="train",
                                validation_fraction=0.005)

  # A row is split over 8 chips, 16,384 tokens each: the input of all layers, which is kept for the backward pass, takes
  # 10 GiB there and would take 81 on one chip. Parameters and their moments are split over all 128.
  c.mesh.update(data=1, fsdp=-1, context=8)
  c.plan.topology = "v5p:4x4x8"
  c.seq_len = 131_072
  c.batch_size = 16
  c.remat = "full"

  c.optimizer.learning_rate = 2e-5
  c.optimizer.weight_decay = 0.1
  c.schedule.name = "cosine"
  c.schedule.warmup_steps = 100
  c.schedule.floor = 0.1
  c.total_tokens = 10_000_000_000

  c.ckpt_steps = 200
  c.keep_last = 3
  c.evals.val = evaluator(type="loss", eval_steps=500, max_documents=64)
  return c
