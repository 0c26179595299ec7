"""What encoders give, and what an encoder is: the contract that examples*.py share."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np

from input_pipeline.examples.top_k import TopK
from input_pipeline.images.images import EncodedImage
from input_pipeline.remarks import Remark
from input_pipeline.sources.readers import Record

# Labels of tokens that are not trained, as in transformers.
NOT_TRAINED = -100
NOTHING_TO_TRAIN = "nothing to train"


class Encoded(NamedTuple):
  """Token ids (int32 [n]) and weights (float32 [n]): weights[t] is that of predicting ids[t]. None: all are 1.

  A document may consist of parts, which do not see one another but belong together, such as the two sides of a
  preference: `parts` are their lengths, `roles` what each is (roles.py), and `advantages` a number for each (kinds.py):
  those of sampled completions, or the margin of a chosen one. `logprobs` (float32 [n], NaN: not known) are what the
  program that sampled the tokens gave them, `top_k` is what a teacher expected in their places, `teacher` the number of
  the one that the row names (routed.py). It may have `images`, whose tokens begin at `places`, in ascending order.
  `remarks` are counted and logged at the start (`remarks.py`).
  """

  ids: np.ndarray
  weights: np.ndarray | None = None
  parts: tuple[int, ...] = ()
  roles: tuple[int, ...] = ()
  advantages: tuple[float, ...] = ()
  images: tuple[EncodedImage, ...] = ()
  places: tuple[int, ...] = ()
  remarks: tuple[Remark, ...] = ()
  logprobs: np.ndarray | None = None
  top_k: TopK | None = None
  teacher: int | None = None


class Encoder(Protocol):
  """Its tokenizer is what encodes; None where only `texts` and `describe` are used.

  An encoder may have `with_next(document, following) -> document`, too, if a document depends on another one of its
  source: the next one with another `prompt_of(document)` (partners.py; if all have the same: on None). And
  `sees_images`: documents may have images."""

  @property
  def fingerprint(self) -> str:
    """All that decides what `encode` gives: tokenizer, template, options. Equal on every machine."""
    ...

  def encode(self, records: list[Record]) -> list[Encoded | str]:
    """The documents in `records`, in order; a record may give several. A string is why a record is dropped, for the
    table at the start, where they are counted by reason.

    Raises:
      DataError: naming the record (`where`), the key, and what was found.
    """
    ...

  def texts(self, record: Record) -> Iterable[str]:
    """The texts in it, to train a tokenizer on and to count bytes."""
    ...

  def describe(self, record: Record) -> str:
    """What it was taken for, in a word or two, to be counted and shown at the start."""
    ...

  def columns(self, record: Record) -> frozenset[str]:
    """The names of its fields that are read; the others are counted and shown at the start."""
    ...
