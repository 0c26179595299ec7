"""Fine-tunes a chat model: a Hugging Face folder and a JSONL of conversations in, a Hugging Face folder out.

    python -m trainer --config=configs/sft.py --workdir=DIR \
      --config.model.hf=FOLDER --config.input.sources.main.path='data/*.jsonl'

A line of the JSONL is {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}, or
{"prompt": "…", "completion": "…"}, or any other shape of docs/sft.md. Look first at what would be trained, token by
token: add --mode=inspect. Adapters instead of all parameters: add --config.model.lora.rank=16, and for a base in four
bits --config.precision.frozen=nf4. The result is in DIR/export.
"""

from ml_collections import ConfigDict

from trainer.config import defaults, evaluator, source, strategy


def get_config(arg: str | None = None) -> ConfigDict:
  """No argument."""
  c = defaults()
  c.strategy = strategy("sft")
  # Architecture, parameters, tokenizer and chat template; give it on the command line.
  c.model.hf = "path/to/a/hugging_face_folder"
  c.input.sources.main = source(type="jsonl", path="path/to/conversations.jsonl", split="train",
                                validation_fraction=0.02)

  # Rows of 4,096 tokens hold several conversations each, none of which sees another.
  c.seq_len = 4096
  c.batch_size = 16
  c.grad_accum_steps = 4
  c.total_steps = -1
  c.total_epochs = 2.0
  c.remat = "full"

  c.optimizer.learning_rate = 1e-5
  c.optimizer.weight_decay = 0.0
  c.schedule.name = "cosine"
  c.schedule.warmup_percent = 3.0
  c.schedule.floor = 0.0

  c.evals.val = evaluator(type="loss", eval_percent=25.0)
  c.ckpt_percent = 25.0
  c.export.path = "export"
  c.export.dtype = "bfloat16"
  return c
