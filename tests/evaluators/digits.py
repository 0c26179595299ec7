"""A tiny model that sees images, and questions about pictures, for the tests of evaluators and of what generates."""

import base64
import io
import json

import numpy as np
from PIL import Image

from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from models import api
from tests import tiny
from trainer.config import source

VISION = dict(tower="siglip", image_size=4, patch_size=2, num_layers=1, hidden_size=8, intermediate_size=8, num_heads=2,
              attention="prefix", image_token=258)


def picture(seed):
  """Random pixels, uint8 [4, 4, 3]."""
  return np.random.default_rng(seed).integers(0, 256, (4, 4, 3)).astype(np.uint8)


def encoded(pixels):
  """A PNG as JSON can hold it."""
  file = io.BytesIO()
  Image.fromarray(pixels).save(file, "PNG")
  return base64.b64encode(file.getvalue()).decode()


def write(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
  return source(type="jsonl", path=str(path))


def config(folder, rows, **changed):
  """A config that trains on the rows, and sees."""
  c = tiny.config(folder, seq_len=64, **changed)
  c.input.sources = dict(main=write(folder / "data.jsonl", rows))
  c.strategy = dict(name="sft")
  c.tokenizer.type = "bytes"
  c.model.vision = VISION
  c.evals = {}
  return c


def model(c):
  tokenizer = BytesTokenizer()
  return api.make_model(c.model, vocab_size=tokenizer.vocab_size, params_dtype="float32", compute_dtype="float32")
