"""Two learning rates and two optimizers for a small model of Python's own standard library: 4 short runs.

    python -m trainer.sweep --config=configs/sweep_quickstart.py --workdir=runs/sweep

Then runs/sweep/comparison.html; docs/configuration.md says more.
"""

from ml_collections import ConfigDict

from configs import quickstart
from trainer.sweep.command import chain, fixed, product, sweep


def get_config(arg: str | None = None) -> ConfigDict:
  """No argument."""
  c = quickstart.get_config()
  c.tokenizer.type = "bytes"
  c.total_steps = 100
  c.evals = {"val": c.evals.val}
  c.evals.val.max_documents = 20
  return c


def get_sweep() -> list[dict]:
  """Each optimizer with learning rates that suit it."""
  return chain(
      product(fixed({"optimizer.name": "muon"}), sweep("optimizer.learning_rate", [3e-3, 1e-2])),
      product(fixed({"optimizer.name": "adamw"}), sweep("optimizer.learning_rate", [1e-3, 3e-3])))
