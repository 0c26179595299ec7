"""A small model learns from nothing to find what is said of a picture; about 2 minutes on 2 CPU cores.

    python -m trainer --config=configs/quickstart_image_embeddings.py --workdir=runs/quickstart_image_embeddings

The pictures are the 1,797 handwritten digits that come with scikit-learn, the texts "a seven" and "a bold, wide seven".
A query is a picture with the word "name" or "describe", and what it looks for is that text. `recall@1` is the share of
held-out pictures to which the right text is the nearest: in the end 97.8%, of the 10 names, and 78.7%, of the 40
descriptions.
"""

from ml_collections import ConfigDict

from configs import quickstart_vlm
from trainer.config import evaluator, source, strategy


def get_config(arg: str | None = None) -> ConfigDict:
  """No argument. What is not said here is as in configs/quickstart_vlm.py: pictures, tokenizer, model, optimizer."""
  c = quickstart_vlm.get_config()
  # A row of the source has `image`, `prefix`, the question about it, and `suffix`, the answer.
  c.chat.fields = (("query", "prefix"), ("positive", "suffix"))
  # The same text answers many of a batch's queries: mask_duplicates, the default, makes it no negative of them.
  c.strategy = strategy("contrastive", pooling="mean", max_length=32, symmetric=True)
  c.model.head = "embedding"
  # A LLaVA of a small Qwen 3, which transformers reads.
  c.model.vision.update(attention="causal", projector="mlp", final_norm=False)

  # A row holds about five pairs.
  c.seq_len = 256
  c.batch_size = 32
  c.total_steps = 200

  def held_out(question: str) -> ConfigDict:
    digits = source(type="digits", dataset=question, split="validation", validation_fraction=0.15)
    return evaluator(type="retrieval", eval_percent=25.0, sources=dict(digits=digits), recall_at=(1, 5))

  c.evals = dict(name=held_out("name"), description=held_out("description"))
  return c
