"""Sums and differences again, from rewards alone: the model of configs/quickstart_arithmetic.py errs less and less.

    python -m trainer --config=configs/quickstart_grpo.py:runs/quickstart_arithmetic --workdir=runs/quickstart_grpo

The argument is the workdir of configs/quickstart_arithmetic.py. Without it that is runs/quickstart_arithmetic, which
the same command trains first if no run has ended there: a fresh model is never right, and learns nothing.

No right answer is shown any more: the model writes 8 answers to each of 64 exercises, each is said to be right or
wrong, and what was right is made likelier. pass@1 is measured on exercises that neither run has trained on.
"""

from ml_collections import ConfigDict

from configs import quickstart_arithmetic
from trainer.config import reward, strategy


def get_config(arg: str | None = None) -> ConfigDict:
  """`arg`: the workdir of a trained quickstart_arithmetic, or nothing: runs/quickstart_arithmetic, made if need be."""
  c = quickstart_arithmetic.get_config()
  c.input.sources.sums.type = "arithmetic"
  c.strategy = strategy("grpo")
  c.init_from.path = arg or "runs/quickstart_arithmetic"
  c.init_from.made_by = None if arg else "configs.quickstart_arithmetic"
  c.rollout.num_prompts = 64
  c.rollout.group_size = 8
  c.rollout.max_new_tokens = 8
  c.rollout.batch_size = 256
  c.rollout.rewards.right = reward(type="exact_match", answer_key="completion")

  c.batch_size = 16
  c.total_steps = 150
  c.optimizer.name = "adamw"
  c.optimizer.learning_rate = 1e-3
  c.schedule = dict(name="constant", warmup_percent=0.0)
  c.evals.pass1.eval_percent = 25.0
  return c
