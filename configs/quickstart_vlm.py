"""A small model learns from nothing to name and to describe pictures of handwritten digits; about 2 minutes on 2 cores.

    python -m trainer --config=configs/quickstart_vlm.py --workdir=runs/quickstart_vlm

The pictures are the 1,797 digits of 8 × 8 pixels that come with scikit-learn. A tower sees 16 patches of each, and a
decoder of bytes says "a seven", or, asked to describe, "a bold, wide seven". What it says of digits that it was never
trained on is compared with the truth: in the end it names 97.8% of them, and 81.7% of its descriptions are right in
every word. runs/quickstart_vlm/samples has pages with pictures, answers and mistakes; --mode=inspect shows what is
trained. Then show it a picture:

    python -m trainer.generate --workdir=runs/quickstart_vlm --image=FILE --prompt=describe --temperature=0
"""

from ml_collections import ConfigDict

from configs import quickstart
from trainer.config import evaluator, source, strategy


def get_config(arg: str | None = None) -> ConfigDict:
  """No argument. What is not said here is as in configs/quickstart.py: length of rows, optimizer."""
  c = quickstart.get_config()
  c.strategy = strategy("sft")
  c.input.sources = dict(digits=source(type="digits", split="train", validation_fraction=0.15))
  c.tokenizer = dict(type="bytes")

  c.model.num_layers = 2
  c.model.hidden_size = 96
  c.model.intermediate_size = 256
  c.model.vision = dict(
      tower="siglip", image_size=16, patch_size=4, num_layers=2, hidden_size=96, intermediate_size=256, num_heads=4,
      projector="linear", attention="prefix", image_token=258)  # the first id that bytes leave free

  # A row holds about six questions, each with its picture.
  c.batch_size = 16
  c.total_steps = 400

  def held_out(question: str) -> ConfigDict:
    digits = source(type="digits", dataset=question, split="validation", validation_fraction=0.15)
    return evaluator(type="generate", eval_percent=50.0, at_start=False, sources=dict(digits=digits), max_new_tokens=24,
                     temperature=0.0, batch_size=256)

  c.evals = dict(name=held_out("name"), description=held_out("description"))
  return c
