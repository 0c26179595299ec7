"""What a token cache is written by: documents in their order, to arrays that are files (input_pipeline/cache.py)."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from input_pipeline import folders, partners
from input_pipeline.examples.base import Encoded, Encoder
from input_pipeline.examples.top_k import TopK
from input_pipeline.images.cache import ImageWriter
from trainer.errors import DataError

# Fewer records at a time where each may hold images.
BATCH_WITH_IMAGES = 64
# Numbers of tokens that have none, written at a time.
FILLED = 4 << 20


class Writer:
  """Appends to the arrays' files, each made when it is first written to; `checksums` forces them to disk."""

  def __init__(self, folder: Path):
    self._folder = folder
    self._files: dict = {}

  def __enter__(self):
    return self

  def __exit__(self, kind, error, trace):
    for file in self._files.values():
      file.close()

  def write(self, name: str, values: np.ndarray) -> None:
    if name not in self._files:
      self._files[name] = open(self._folder / f"{name}.bin", "w+b")
    self._files[name].write(values.tobytes())

  def checksums(self) -> dict[str, list[int]]:
    """CRC-32 of every block, after forcing the files to disk."""
    sums = {}
    for name, file in self._files.items():
      file.flush()
      os.fsync(file.fileno())
      sums[name] = folders.block_sums(file)
    return sums


class Documents:
  """Writes documents; `weights.bin` and `logprobs.bin` begin with the first document that has any, and hold those of
  the ones before it too.

  The encoder's `with_next`, if there is one, makes of each document and the next one with another prompt (partners.py)
  what is written in its place.
  """

  def __init__(self, writer: Writer, source: str, vocab_size: int, encoder: Encoder, images: ImageWriter):
    self.images = images
    self._writer, self._source, self._vocab_size = writer, source, vocab_size
    self._with_next: Callable[[Encoded, Encoded | None], Encoded] | None = getattr(encoder, "with_next", None)
    most = BATCH_WITH_IMAGES if getattr(encoder, "sees_images", False) else partners.MOST
    # Each document is as a prompt of its own where the encoder knows none; those that are compared are all alive.
    self._partners = partners.Partners(getattr(encoder, "prompt_of", id), most)
    self.dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    self.count = self.tokens = 0
    self.has_weights = self.has_logprobs = False
    # Parts of each document, and whether they have advantages, known from the first one on.
    self.parts_each: int | None = None
    self.has_advantages = False
    # Entries of a teacher for each token; 0: there are none.
    self.top_k = 0
    # Whether documents have a teacher each.
    self.routed = False
    writer.write("tokens", np.zeros(0, self.dtype))
    writer.write("offsets", np.zeros(1, "<i8"))

  def write(self, documents: list[Encoded]) -> None:
    if self._with_next is not None:
      documents = [self._with_next(*pair) for document in documents for pair in self._partners.add(document)]
    self._write(documents)

  def close(self) -> None:
    """Writes what waited for another."""
    if self._with_next is not None:
      self._write([self._with_next(*pair) for pair in self._partners.close()])

  def _write(self, documents: list[Encoded]) -> None:
    if not documents:
      return
    ids = np.concatenate([d.ids for d in documents])
    if len(ids) and not 0 <= ids.min() <= ids.max() < self._vocab_size:
      raise DataError(f"source {self._source!r}: its documents were given ids from {ids.min()} to {ids.max()}, but the "
                      f"tokenizer's vocabulary is {self._vocab_size}. Use the tokenizer that belongs to these data.")
    self.has_weights = self._write_each("weights", [d.weights for d in documents], documents, 1.0, self.has_weights)
    self.has_logprobs = self._write_each("logprobs", [d.logprobs for d in documents], documents, np.nan,
                                         self.has_logprobs)
    self._write_top_k([d.top_k for d in documents if d.top_k is not None])
    self._write_parts(documents)
    lengths = np.array([len(d.ids) for d in documents], "<i8")
    if documents[0].teacher is not None:
      self.routed = True
      self._writer.write("teachers", np.repeat([d.teacher for d in documents], lengths).astype("<i2"))
    self.images.write(documents, self.tokens + np.cumsum(lengths) - lengths)
    self._writer.write("tokens", ids.astype(self.dtype))
    self._writer.write("offsets", self.tokens + np.cumsum(lengths))
    self.tokens += int(lengths.sum())
    self.count += len(documents)

  def _write_each(self, name: str, values: list[np.ndarray | None], documents: list[Encoded], without: float,
                  begun: bool) -> bool:
    """Writes a number of each token, `without` for those of documents that have none; whether any has had one yet."""
    if not begun and all(part is None for part in values):
      return False
    if not begun:
      for start in range(0, self.tokens, FILLED):
        self._writer.write(name, np.full(min(FILLED, self.tokens - start), without, "<f4"))
    parts = [np.full(len(d.ids), without, np.float32) if part is None else part
             for part, d in zip(values, documents, strict=True)]
    self._writer.write(name, np.concatenate(parts).astype("<f4"))
    return True

  def _write_top_k(self, said: list[TopK]) -> None:
    """What a teacher said of each document's tokens; of all documents, or of none."""
    if said:
      self.top_k = said[0].ids.shape[1]
      self._writer.write("teacher_ids", np.concatenate([of.ids for of in said]).astype("<i4"))
      self._writer.write("teacher_logprobs", np.concatenate([of.logprobs for of in said]).astype("<f4"))

  def _write_parts(self, documents: list[Encoded]) -> None:
    if self.parts_each is None:
      self.parts_each, self.has_advantages = len(documents[0].parts), bool(documents[0].advantages)
      if self.parts_each:
        self._writer.write("parts", np.zeros(1, "<i8"))
    for d in documents:
      valued = len(d.parts) if self.has_advantages else 0
      if not len(d.parts) == len(d.roles) == self.parts_each or d.parts and sum(d.parts) != len(d.ids) or (
          len(d.advantages) != valued):
        raise ValueError(f"a document of {len(d.ids)} tokens has the parts {d.parts}, roles {d.roles} and advantages "
                         f"{d.advantages}, where others have {self.parts_each} parts and {valued} advantages")
    if self.parts_each:
      self._writer.write("parts", self.tokens + np.cumsum([d.parts for d in documents], dtype="<i8"))
      self._writer.write("roles", np.array([d.roles for d in documents], "<i1"))
    if self.has_advantages:
      self._writer.write("advantages", np.array([d.advantages for d in documents], "<f4"))
