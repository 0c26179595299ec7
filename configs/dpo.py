"""Aligns a chat model on preference pairs: a Hugging Face folder and a JSONL of pairs in, a Hugging Face folder out.

    python -m trainer --config=configs/dpo.py --workdir=DIR \
      --config.model.hf=FOLDER --config.input.sources.main.path='data/*.jsonl'

A line of the JSONL is {"prompt": "…", "chosen": "…", "rejected": "…"}, with strings or lists of messages; without
`prompt` what both begin with is the prompt (docs/dpo.md). Look first: add --mode=inspect. Adapters instead of all
parameters, which also makes the reference free: add --config.model.lora.rank=16. The result is in DIR/export.
"""

from ml_collections import ConfigDict

from configs import sft
from trainer.config import evaluator, strategy


def get_config(arg: str | None = None) -> ConfigDict:
  """No argument. What is not said here is as in configs/sft.py: model, rows, export."""
  c = sft.get_config()
  # The loss is one of docs/dpo.md, or several with weights; the reference is what the run begins with.
  c.strategy = strategy("dpo", loss={"sigmoid": 1.0}, beta=0.1)
  c.input.sources.main.path = "path/to/pairs.jsonl"

  # A pair lies in one row, its two sides one after the other.
  c.batch_size = 32
  c.grad_accum_steps = 8
  c.total_epochs = 1.0
  c.optimizer.learning_rate = 5e-7
  c.schedule.warmup_percent = 10.0

  c.evals = dict(pairs=evaluator(type="preference", eval_percent=25.0))
  return c
