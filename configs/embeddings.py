"""Trains a model of text embeddings on pairs: a Hugging Face folder and a JSONL in, a sentence-transformers folder out.

    python -m trainer --config=configs/embeddings.py --workdir=DIR \
      --config.model.hf=FOLDER --config.input.sources.main.path='data/*.jsonl'

A line of the JSONL is {"query": "…", "positive": "…"}, maybe with "negative", a text or a list (docs/embeddings.md);
with negatives add --config.strategy.negatives=N. Look first: add --mode=inspect. Adapters instead of all parameters:
add --config.model.lora.rank=16. Of a folder with a vision tower, texts may have images, {"text": "…", "image": "FILE"}.
The result is in DIR/export, and vectors of a file of texts are what
`python -m trainer.embed --workdir=DIR --texts=FILE` prints.
"""

from ml_collections import ConfigDict

from configs import sft
from trainer.config import evaluator, strategy


def get_config(arg: str | None = None) -> ConfigDict:
  """No argument. What is not said here is as in configs/sft.py: model, rows, export."""
  c = sft.get_config()
  # Of a language model the last token, which has seen the text, is the embedding; or the mean of all.
  c.strategy = strategy("contrastive", pooling="last")
  c.model.head = "embedding"
  c.input.sources.main.path = "path/to/pairs.jsonl"

  # A query is compared with the texts of the whole batch, however many micro-batches it takes: more rows are a harder
  # task. A row of seq_len tokens has as many pairs as fit.
  c.seq_len = 512
  c.batch_size = 64
  c.grad_accum_steps = 8
  c.total_epochs = 1.0
  c.optimizer.learning_rate = 2e-5
  c.schedule.warmup_percent = 10.0

  c.evals = dict(pairs=evaluator(type="retrieval", eval_percent=25.0, max_documents=2000))
  return c
