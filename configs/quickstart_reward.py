"""Teaches a small model to tell right sums from wrong ones: a reward model, in about a minute on 2 CPU cores.

    python -m trainer --config=configs/quickstart_reward.py:runs/quickstart_arithmetic --workdir=runs/quickstart_reward

The argument is the workdir of configs/quickstart_arithmetic.py, whose model gets a head that scores sequences. Without
it that is runs/quickstart_arithmetic, which the same command trains first if no run has ended there.

A pair is an exercise with its result and with a wrong one. Those that the accuracy is measured on are never trained on.
"""

from ml_collections import ConfigDict

from configs import quickstart_arithmetic
from trainer.config import evaluator, strategy


def get_config(arg: str | None = None) -> ConfigDict:
  """`arg`: the workdir of a trained quickstart_arithmetic, or nothing: runs/quickstart_arithmetic, made if need be."""
  c = quickstart_arithmetic.get_config()
  c.input.sources.sums.type = "arithmetic_pairs"
  c.strategy = strategy("reward", center_rewards_coefficient=0.01)
  c.model.head = "score"
  c.init_from.path = arg or "runs/quickstart_arithmetic"
  c.init_from.made_by = None if arg else "configs.quickstart_arithmetic"

  c.total_steps = 200
  c.optimizer.name = "adamw"
  c.optimizer.learning_rate = 1e-3
  c.evals = dict(pairs=evaluator(type="preference", eval_percent=50.0, batch_size=64, max_documents=512))
  return c
