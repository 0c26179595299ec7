"""Fine-tunes the quickstart's model to write the docstring of a function from its signature, in about 2 minutes.

    python -m trainer --config=configs/quickstart_sft.py:runs/quickstart --workdir=runs/quickstart_sft

The argument is the workdir of configs/quickstart.py. Without it that is runs/quickstart, which the same command trains
first if no run has ended there. The pairs are made from the standard library's sources. Only docstrings are trained on:
--mode=inspect shows it.
"""

from ml_collections import ConfigDict

from configs import quickstart
from trainer.config import evaluator, source, strategy


def get_config(arg: str | None = None) -> ConfigDict:
  """`arg`: the workdir of a pretrained quickstart, or nothing: runs/quickstart, which is made if it is not there."""
  c = quickstart.get_config()
  c.strategy = strategy("sft")
  c.input.sources = dict(docstrings=source(type="python_docstrings", split="train"))
  c.init_from.path = arg or "runs/quickstart"
  c.init_from.made_by = None if arg else "configs.quickstart"
  c.tokenizer.type = "hf"
  c.tokenizer.path = f"{c.init_from.path}/tokenizer.json"

  c.total_steps = 400
  c.optimizer.learning_rate = 3e-3
  c.evals = dict(
      val=evaluator(type="loss", eval_percent=50.0, batch_size=32),
      samples=evaluator(type="samples", eval_percent=50.0, at_start=False, temperature=0.0, prompts=(
          'def is_open(self):\n    """', 'def read(self, size=-1):\n    """', 'def remove(path):\n    """')))
  return c
