"""A small decoder learns Python from the sources of its own standard library, in 2 to 4 minutes on 2 CPU cores.

    python -m trainer --config=configs/quickstart.py --workdir=/tmp/weft

Four times as long: add --config.total_steps=3000. Text of your own: add
--config.input.sources.main.type=text --config.input.sources.main.path=FILE_OR_FOLDER
"""

from ml_collections import ConfigDict

from trainer.config import defaults, evaluator, source


def get_config(arg: str | None = None) -> ConfigDict:
  """No argument."""
  c = defaults()
  c.input.sources.main = source(type="python_stdlib", split="train")
  c.tokenizer.type = "bpe"
  c.tokenizer.vocab_size = 1024

  c.model.num_layers = 4
  c.model.hidden_size = 128
  c.model.intermediate_size = 384
  c.model.num_heads = 4
  c.model.qk_norm = True

  c.seq_len = 256
  c.batch_size = 8
  c.total_steps = 700
  c.optimizer.name = "muon"
  c.optimizer.learning_rate = 1e-2
  c.schedule.name = "wsd"
  c.schedule.decay_percent = 50.0
  c.schedule.floor = 0.02

  c.evals.val = evaluator(type="loss", baselines=("gzip", "xz"), eval_percent=50.0, batch_size=32)
  c.evals.samples = evaluator(
      type="samples", eval_percent=50.0, at_start=False,
      prompts=("def ", "class ", "import os\n", '    """Return the '))
  return c
