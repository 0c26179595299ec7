"""Trains a reward model on preference pairs: a Hugging Face folder and a JSONL of pairs in, a scoring folder out.

    python -m trainer --config=configs/reward.py --workdir=DIR \
      --config.model.hf=FOLDER --config.input.sources.main.path='data/*.jsonl'

A line of the JSONL is as for configs/dpo.py: {"prompt": "…", "chosen": "…", "rejected": "…"}, maybe with a number as
`margin` (docs/reward.md). The chat model of FOLDER gets a new head, or keeps the one it has. DIR/export is a folder of
*ForSequenceClassification, and DIR can be a reward in rollouts: reward(type="model", path="DIR").
"""

from ml_collections import ConfigDict

from configs import dpo
from trainer.config import strategy


def get_config(arg: str | None = None) -> ConfigDict:
  """No argument. What is not said here is as in configs/dpo.py: rows, batches, evaluation, export."""
  c = dpo.get_config()
  c.strategy = strategy("reward", center_rewards_coefficient=0.01)
  c.model.head = "score"
  c.optimizer.learning_rate = 1e-5
  return c
