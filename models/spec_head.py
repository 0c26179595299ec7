"""What hidden states become: logits of tokens, scores of sequences, or embeddings of texts (`model.head`)."""

import dataclasses

from ml_collections import ConfigDict

from models.spec_checks import at_least_one, one_of
from trainer.errors import ConfigError

HEADS = ("lm", "score", "embedding")
# {model.similarity: the scalars that are learned of the similarity of two embeddings}.
SIMILARITIES: dict[str, tuple[str, ...]] = {
    "fixed": (), "scale": ("log_scale",), "scale_bias": ("log_scale", "bias")}


@dataclasses.dataclass(frozen=True)
class Head:
  """One of HEADS; with `num_labels` scores of a sequence (0: none), and `similarity`, names of parameters."""

  kind: str
  num_labels: int = 0
  similarity: tuple[str, ...] = ()

  def need(self, kind: str, lacks: str) -> None:
    """Raises ConfigError if it is of another kind; `lacks`: what it therefore does not do."""
    if self.kind != kind:
      raise ConfigError(f"model.head is {self.kind!r}, which {lacks}: this needs --config.model.head={kind}.")

  @property
  def predicts(self) -> bool:
    """Whether it has logits of tokens."""
    return self.kind == "lm"


def make_head(m: ConfigDict) -> Head:
  """Of the config's `model` section; raises ConfigError."""
  kind = one_of("head", m.head, HEADS)
  if m.similarity is not None and kind != "embedding":
    raise ConfigError(f"model.similarity is {m.similarity!r}, but model.head is {kind!r}: only embeddings are "
                      "compared. Leave it unset, or use --config.model.head=embedding.")
  names = SIMILARITIES[one_of("similarity", m.similarity or "fixed", tuple(SIMILARITIES))]
  return Head(kind, at_least_one("num_labels", m.num_labels) if kind == "score" else 0, names)


def padded_vocab_size(m: ConfigDict, num_real_vocab: int, reasons: list[str]) -> int:
  """The vocabulary with padding, for a tokenizer of `num_real_vocab` entries; appends to `reasons`."""
  if m.vocab_size is None:
    multiple = at_least_one("vocab_multiple", m.vocab_multiple)
    size = -(-num_real_vocab // multiple) * multiple
    reasons.append(f"model.vocab_size = {size}: the tokenizer's {num_real_vocab}, up to a multiple of {multiple}")
    return size
  if m.vocab_size < num_real_vocab:
    if m.hf is not None:
      reasons.append(
          f"the tokenizer has {num_real_vocab} entries, the model {m.vocab_size}: a text that uses one of the others "
          "is refused"
      )
      return m.vocab_size
    raise ConfigError(
        f"model.vocab_size: found {m.vocab_size}, but the tokenizer has {num_real_vocab} entries. Allowed: "
        f"{num_real_vocab} or more, or leave it unset to have it derived."
    )
  return m.vocab_size
