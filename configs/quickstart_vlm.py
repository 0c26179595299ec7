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

from trainer.config import defaults, evaluator, source, strategy


def get_config(arg: str | None = None) -> ConfigDict:
  """No argument."""
  c = defaults()
  c.strategy = strategy("sft")
  c.input.sources.digits = source(type="digits", split="train", validation_fraction=0.15)
  c.tokenizer.type = "bytes"

  c.model.num_layers = 2
  c.model.hidden_size = 96
  c.model.intermediate_size = 256
  c.model.num_heads = 4
  c.model.qk_norm = True
  c.model.vision = dict(
      tower="siglip", image_size=16, patch_size=4, num_layers=2, hidden_size=96, intermediate_size=256, num_heads=4,
      projector="linear", attention="prefix", image_token=258)  # the first id that bytes leave free

  # A row holds about six questions, each with its picture.
  c.seq_len = 256
  c.batch_size = 16
  c.total_steps = 400
  c.optimizer.name = "muon"
  c.optimizer.learning_rate = 1e-2
  c.schedule.name = "wsd"
  c.schedule.decay_percent = 50.0
  c.schedule.floor = 0.02

  def held_out(question: str) -> ConfigDict:
    digits = source(type="digits", dataset=question, split="validation", validation_fraction=0.15)
    return evaluator(type="generate", eval_percent=50.0, at_start=False, sources=dict(digits=digits), max_new_tokens=24,
                     temperature=0.0, batch_size=256)

  c.evals.name = held_out("name")
  c.evals.description = held_out("description")
  return c
