"""Log-probs of a frozen reference model for every token of the data, computed once and kept beside the token cache.

    logprobs = data.reference(fingerprint, cache_dir)
    if not logprobs.complete:
      for batch in logprobs.batches(batch_size):
        logprobs.store(batch, values_BxT)
      logprobs.finish()
    data.use(logprobs)                 # from here on, batches have `ref_logprobs`

They belong to the tokens of a source under one reference, and to what is kept of its documents: a changed file,
tokenizer, template, seq_len or reference gets another folder. Each token that is trained (or summed up for a mean) is
given a value exactly once, whatever the order; a folder appears under its final name when all have one.

Dims: B rows, T places of a row, N tokens of a source.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import logging

from input_pipeline import folders
from input_pipeline.batches import Arrays, PackedSource, empty_batch, image_layout
from trainer.errors import ConfigError

VERSION = 1
# Values written at a time.
WRITTEN = 1 << 22


class UnitBatch(NamedTuple):
  """`arrays` as of a training batch, and for each place the token of the source (index `source_ids`) that stands there;
  -1 where it needs no value. `index` and `batch_size` say which batch it is."""

  arrays: dict[str, np.ndarray]
  tokens_BxT: np.ndarray
  index: int
  batch_size: int


class ReferenceLogprobs:
  """The reference log-probs of some packed sources; made by `PackedData.reference`.

  Args:
    packed: the sources; their documents have parts.
    seq_len: places in a row.
    pad_id: token of padding.
    arrays: which its batches have.
    fingerprint: all that decides the values: the reference's parameters and how they are computed with.
    cache_dir: where the token caches are.

  Attributes:
    complete: every value is there; nothing is left to compute.
  """

  def __init__(self, packed: list[PackedSource], seq_len: int, pad_id: int, arrays: Arrays, fingerprint: str,
               cache_dir: Path):
    self._packed, self._seq_len, self._pad_id, self._arrays = packed, seq_len, pad_id, arrays
    self._starts = np.cumsum([0, *(p.plan.num_rows for p in packed)])
    self._files = [_File(Path(cache_dir), p, fingerprint) for p in packed]

  @property
  def complete(self) -> bool:
    return all(file.complete for file in self._files)

  @property
  def values(self) -> list[np.ndarray]:
    """Of each source, float32 [N].

    Raises:
      ValueError: they are not complete.
    """
    if not self.complete:
      raise ValueError("the reference's log-probs are not complete: store those of every batch, then call finish().")
    return [file.values for file in self._files]

  def num_batches(self, batch_size: int) -> int:
    return -(-int(self._starts[-1]) // batch_size)

  def batch(self, index: int, batch_size: int, rows: slice | np.ndarray = slice(None)) -> UnitBatch:
    """Rows `rows` of the batch: the rows of all sources as in their first epoch, in order; past the last, padding.

    Every document that is kept is in exactly one row.
    """
    k = index * batch_size + np.arange(batch_size)[rows]
    arrays = empty_batch(len(k), self._seq_len, self._pad_id, self._arrays)
    tokens_BxT = np.full(arrays["tokens"].shape, -1, np.int64)
    for s, packed in enumerate(self._packed):
      here = np.flatnonzero((self._starts[s] <= k) & (k < self._starts[s + 1]))
      if len(here):
        places, tokens = packed.fill(arrays, here, 0, k[here] - self._starts[s], s)
        tokens_BxT.reshape(-1)[places] = tokens
    tokens_BxT[arrays["loss_weights"] == 0] = -1
    return UnitBatch(arrays, tokens_BxT, index, batch_size)

  def batches(self, batch_size: int) -> Iterator[UnitBatch]:
    """All of them."""
    for index in range(self.num_batches(batch_size)):
      yield self.batch(index, batch_size)

  def store(self, batch: UnitBatch, values_BxT: np.ndarray) -> None:
    """Keeps the log-probs of a batch (or of some of its rows), aligned as `loss_weights` are. One process does this.

    Raises:
      ValueError: a wrong shape, or a value that is no log-prob of a model.
    """
    values_BxT = np.asarray(values_BxT, np.float32)
    if values_BxT.shape != batch.tokens_BxT.shape:
      raise ValueError(f"log-probs of shape {values_BxT.shape} for a batch of shape {batch.tokens_BxT.shape}.")
    bad = np.argwhere((batch.tokens_BxT >= 0) & ~np.isfinite(values_BxT))
    if len(bad):
      row, column = bad[0]
      raise ValueError(f"the reference gives the token {batch.arrays['tokens'][row, column]} (row {row}, place "
                       f"{column} of batch {batch.index}) the log-prob {values_BxT[row, column]}. Check it.")
    for s in np.unique(batch.arrays["source_ids"]):
      mine = (batch.arrays["source_ids"][:, None] == s) & (batch.tokens_BxT >= 0)
      if s >= 0:
        self._files[s].write(batch.tokens_BxT[mine], values_BxT[mine])

  def finish(self) -> None:
    """Makes what was stored permanent. The process that stored does this; the others call `reopen` after it.

    Raises:
      ValueError: a value is missing.
      OSError: it cannot be written.
    """
    for file in self._files:
      file.finish()

  def reopen(self) -> None:
    """Looks again for what another process has written."""
    for file in self._files:
      file.open()


class _File:
  """Those of one source: `logprobs.bin` (float32 [N]) and `meta.json` in a folder of their own."""

  def __init__(self, cache_dir: Path, packed: PackedSource, fingerprint: str):
    tokens = packed.tokens
    parts = json.dumps([VERSION, tokens.fingerprint, packed.units.fingerprint, fingerprint,
                        *["prompts shared"] * packed.shares_prompts])  # which rounds differently
    key = hashlib.blake2b(parts.encode(), digest_size=12).hexdigest()
    self._folder = cache_dir / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', tokens.name)}-reference-{key}"
    self._size, self._needed = len(tokens.tokens), packed.units.summed
    self._stack = contextlib.ExitStack()
    # Where values are written until they are complete.
    self._temporary: Path | None = None
    self._writing: np.ndarray | None = None
    self.values: np.ndarray | None = None
    self.open()

  @property
  def complete(self) -> bool:
    return self.values is not None

  def open(self) -> None:
    if self.complete or not self._folder.exists():
      return
    damage = folders.find_damage(self._folder, _arrays)
    if damage is None:
      self.values = np.memmap(self._folder / "logprobs.bin", "<f4", mode="r", shape=(self._size,))
    else:
      logging.warning("reference log-probs in %s are damaged (%s); computing them again.", self._folder, damage)
      folders.remove(self._folder)

  def write(self, tokens: np.ndarray, values: np.ndarray) -> None:
    if self.complete:
      return
    if self._temporary is None:
      with contextlib.ExitStack() as stack:
        self._temporary = stack.enter_context(folders.new(self._folder, "the reference's log-probs"))
        # Written, not only mapped: so that a full disk is an error here and not a crash later.
        with open(self._temporary / "logprobs.bin", "wb") as file:
          for start in range(0, self._size, WRITTEN):
            np.full(min(WRITTEN, self._size - start), np.nan, "<f4").tofile(file)
        self._writing = np.memmap(self._temporary / "logprobs.bin", "<f4", mode="r+", shape=(self._size,))
        self._stack = stack.pop_all()  # the folder stays until `finish`
    self._writing[tokens] = values

  def finish(self) -> None:
    if self.complete:
      return
    found = 0 if self._temporary is None else int(np.count_nonzero(~np.isnan(self._writing)))
    if found != self._needed:
      raise ValueError(f"{found} of {self._needed} reference log-probs of {self._folder.name} were stored. Store those "
                       "of every batch before finish().")
    self._writing.flush()
    temporary, self._temporary, self._writing = self._temporary, None, None
    with self._stack, open(temporary / "logprobs.bin", "rb") as file:
      os.fsync(file.fileno())
      meta = {"tokens": self._size, "checksums": {"logprobs": folders.block_sums(file)}}
      (temporary / "meta.json").write_text(json.dumps(meta), "utf-8")
      folders.publish(temporary, self._folder, _arrays)
    self.open()


def _arrays(meta: dict) -> dict[str, tuple[str, int]]:
  return {"logprobs": ("<f4", meta["tokens"])}


class PackedData:
  """What training and evaluation data have in common: packed sources, maybe with a reference's log-probs."""

  def __init__(self, packed: list[PackedSource], seq_len: int, pad_id: int):
    self._packed, self._seq_len, self._pad_id = packed, seq_len, pad_id
    # S of `Arrays`, the same in every batch.
    self.sequences = max(source.sequences for source in packed)
    self.image_layout = image_layout(packed)
    # That a row of a batch has places for.
    self.images_per_row = self.image_layout.most if self.image_layout else 0
    # Without the reference's log-probs until `use`.
    self._arrays = Arrays(
        self.sequences, advantages=packed[0].advantages, images=self.image_layout, prompts=packed[0].shares_prompts,
        logprobs=any(source.tokens.logprobs is not None for source in packed))

  def reference(self, fingerprint: str, cache_dir: str | Path) -> ReferenceLogprobs:
    """The log-probs of a reference model for these data, or what is needed to compute them.

    Args:
      fingerprint: all that decides the values: the reference's parameters, and how they are computed with.
      cache_dir: see `evaluation.default_cache_dir`.

    Raises:
      ValueError: the documents have no parts, so that there is nothing to compare.
      ConfigError: images are augmented.
    """
    if not self.sequences:
      raise ValueError("a reference's log-probs are kept for preferences and labelled answers only.")
    if self._packed[0].row_images is not None and self._packed[0].row_images.augments:
      raise ConfigError("strategy.precompute and input.images.augment exclude each other: what the reference says of "
                        "an image is computed once, and the image changes. Switch one of them off.")
    arrays = self._arrays._replace(reference=False)
    return ReferenceLogprobs(self._packed, self._seq_len, self._pad_id, arrays, fingerprint, Path(cache_dir))

  def use(self, logprobs: ReferenceLogprobs) -> None:
    """From now on, batches have `ref_logprobs`: that of each token with a weight, 0 elsewhere.

    Raises:
      ValueError: they are not complete.
    """
    for source, values in zip(self._packed, logprobs.values, strict=True):
      source.reference = values
    self._arrays = self._arrays._replace(reference=True)

  def _empty(self, num_rows: int) -> dict[str, np.ndarray]:
    return empty_batch(num_rows, self._seq_len, self._pad_id, self._arrays)
