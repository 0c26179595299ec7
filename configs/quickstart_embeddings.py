"""Teaches a small model to find the function that a docstring tells of; 2 to 4 minutes on 2 CPU cores.

    python -m trainer --config=configs/quickstart_embeddings.py --workdir=runs/quickstart_embeddings

A pair is the first paragraph of a docstring in Python's standard library, and the function without it. `recall@1` is
the share of held-out docstrings whose function is the nearest of all held-out ones.
"""

from ml_collections import ConfigDict

from configs import quickstart
from trainer.config import evaluator, source, strategy


def get_config(arg: str | None = None) -> ConfigDict:
  """No argument. What is not said here is as in configs/quickstart.py: tokenizer, model, optimizer."""
  c = quickstart.get_config()
  c.input.sources = dict(functions=source(type="python_docstring_matches", split="train"))
  c.strategy = strategy("contrastive", pooling="mean", max_length=96, symmetric=True)
  c.model.head = "embedding"

  c.seq_len = 192
  c.batch_size = 32
  c.total_steps = 200
  c.optimizer.learning_rate = 3e-3
  c.evals = dict(functions=evaluator(type="retrieval", eval_percent=50.0))
  return c
