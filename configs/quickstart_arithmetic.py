"""Teaches a small model sums and differences by examples of which half are wrong; about a minute on 2 CPU cores.

    python -m trainer --config=configs/quickstart_arithmetic.py --workdir=runs/quickstart_arithmetic

It learns to answer, and to err as often: where configs/quickstart_grpo.py starts from. The exercises are made, not
read; those that pass@1 is measured on, with the right answers, are never trained on.
"""

from ml_collections import ConfigDict

from configs import quickstart
from trainer.config import evaluator, source, strategy


def get_config(arg: str | None = None) -> ConfigDict:
  """No argument. What is not said here is as in configs/quickstart.py: width of the model, optimizer."""
  c = quickstart.get_config()
  c.strategy = strategy("sft")
  c.input.sources = dict(sums=source(type="arithmetic_mistakes", split="train"))
  c.tokenizer = dict(type="bytes")
  c.model.num_layers = 3

  c.seq_len = 128
  c.batch_size = 32
  c.total_steps = 400
  c.schedule.floor = 0.1
  right = source(type="arithmetic", split="validation")
  c.evals = dict(pass1=evaluator(type="generate", eval_percent=50.0, sources=dict(sums=right), max_documents=256,
                                 max_new_tokens=8, temperature=1.0, batch_size=256))
  return c
