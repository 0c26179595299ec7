"""Teaches a small model to prefer a function's own docstring to another function's; under 3 minutes on 2 CPU cores.

    python -m trainer --config=configs/quickstart_dpo.py:runs/quickstart_sft --workdir=runs/quickstart_dpo

The argument is the workdir of configs/quickstart_sft.py. Without it that is runs/quickstart_sft, which the same command
trains first if no run has ended there, and before it, if need be, runs/quickstart.

The pairs are made from the standard library's sources: a signature, its docstring, and that of another function. With
the DPO loss goes the likelihood of the right docstring, so that it does not fall along with that of the wrong one.
"""

from ml_collections import ConfigDict

from configs import quickstart_sft
from trainer.config import evaluator, source, strategy


def get_config(arg: str | None = None) -> ConfigDict:
  """`arg`: the workdir of a fine-tuned quickstart, or nothing: runs/quickstart_sft, made if it is not there."""
  c = quickstart_sft.get_config(arg or "runs/quickstart_sft")
  c.init_from.made_by = None if arg else "configs.quickstart_sft"
  c.strategy = strategy("dpo", loss={"sigmoid": 1.0, "sft": 1.0}, beta=0.1)
  c.input.sources = dict(pairs=source(type="python_docstring_pairs", split="train"))
  c.total_steps = 300
  c.optimizer.learning_rate = 5e-4
  c.evals = dict(
      pairs=evaluator(type="preference", eval_percent=50.0, batch_size=32),
      samples=c.evals.samples)
  return c
