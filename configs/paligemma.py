"""Transfers PaliGemma to a task of yours: a Hugging Face folder and rows of (image, prefix, suffix) in, a folder out.

    python -m trainer --config=configs/paligemma.py --workdir=DIR \
      --config.model.hf=FOLDER --config.input.sources.main.path='data/train*.jsonl'

A line of the JSONL is {"image": "photos/1.jpg", "prefix": "caption en", "suffix": "a red boat"}; paths are relative to
the JSONL's folder (docs/images.md has all other forms). Only suffixes are trained; an image and its prefix see one
another in both directions. Look first: add --mode=inspect. The result is in DIR/export; every few percent of the run
DIR/samples has a page with held-out pictures and what is said about them.

--config=configs/paligemma.py:frozen leaves the tower as it is, which saves its gradient and optimizer memory; with
:slow it learns at a tenth of the rate. Adapters instead of all parameters: --config.model.lora.rank=16. PaliGemma 2 and
LLaVA folders work as well. For answers of ten people (VQA): --config.evals.answers.match=vqa, with
--config.evals.answers.prompt_key=question --config.evals.answers.answer_key=answers.
"""

from ml_collections import ConfigDict

from configs import sft
from trainer.config import evaluator, source
from trainer.errors import ConfigError

TOWER = r"^vision/"


def get_config(arg: str | None = None) -> ConfigDict:
  """`arg`: what becomes of the tower: nothing (it is trained like the rest), `frozen`, or `slow`. What is not said here
  is as in configs/sft.py: the folder to start from, the loss that is measured, export."""
  c = sft.get_config()
  c.input.sources.main = source(type="jsonl", path="path/to/rows.jsonl", split="train", validation_fraction=0.02)
  c.input.images.workers = 8

  # An image of 224 × 224 pixels has 256 tokens: a row holds three examples or more, none of which sees another.
  c.seq_len = 1024
  c.grad_accum_steps = 2
  c.total_epochs = 5.0

  c.optimizer.b2 = 0.999
  c.schedule.warmup_percent = 5.0
  if arg == "frozen":
    c.optimizer.freeze = (TOWER,)
  elif arg == "slow":
    c.optimizer.lr_mults = ((TOWER, 0.1),)
  elif arg:
    raise ConfigError(f"configs/paligemma.py:{arg}: found {arg!r}, allowed: frozen, slow, or nothing.")

  c.evals.val.eval_percent = 20.0
  c.evals.answers = evaluator(type="generate", eval_percent=20.0, max_documents=256, max_new_tokens=64, temperature=0.0)
  c.ckpt_percent = 20.0
  return c
