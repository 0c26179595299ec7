"""What a frozen other model says of every token of the data, computed once and kept beside the token cache: the
log-probs of a reference, or a teacher's most probable tokens with theirs.

    logprobs = data.reference(fingerprint, cache_dir)
    if not logprobs.complete:
      for batch in logprobs.batches(batch_size):
        logprobs.store(batch, values_BxT)
      logprobs.finish()
    data.use(logprobs)                 # from here on, batches have `ref_logprobs`

They belong to the tokens of a source under one reference, and to what is kept of its documents: a changed file,
tokenizer, template, seq_len or reference gets another folder. Each token that is trained (or summed up for a mean) is
given a value exactly once, whatever the order; a folder appears under its final name when all have one.

Dims: B rows, T places of a row, N tokens of a source, K entries of a teacher's.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from input_pipeline import folders
from input_pipeline.batches import Arrays, Kept, PackedSource, empty_batch, image_layout
from input_pipeline.examples.routed import INDEX
from trainer.errors import ConfigError

VERSION = 1
# Values written at a time.
WRITTEN = 1 << 22
# The array of batches that a reference's log-probs are.
REFERENCE = (Kept("ref_logprobs"),)
# That of whose each token is, where rows name their teacher.
ROUTE = Kept(INDEX, (), "int32")


class Said(NamedTuple):
  """What is kept of what another model says."""

  # Who: reference or teacher.
  who: str
  # {name of an array of a folder: (dtype, values of each token; 0: a number, no array)}; one is called `logprobs`.
  arrays: dict[str, tuple[str, int]]


OF_REFERENCE = Said("reference", {"logprobs": ("<f4", 0)})


def of_teachers(teachers: int, k: int) -> tuple[Kept, Kept]:
  """The arrays of batches that hold what so many teachers say of each token, [B, T, teachers, …]: their K most probable
  entries, and the log-probs of these and of the rest (trainer/strategies/top_k.py)."""
  return Kept("teacher_ids", (teachers, k), "int32"), Kept("teacher_logprobs", (teachers, k + 1))


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
    arrays: which its batches have.
    fingerprint, cache_dir: see `PackedData.reference`.
    said: what is kept.

  Attributes:
    complete: every value is there; nothing is left to compute.
  """

  def __init__(self, packed: list[PackedSource], seq_len: int, pad_id: int, arrays: Arrays, fingerprint: str,
               cache_dir: Path, said: Said = OF_REFERENCE):
    self._packed, self._seq_len, self._pad_id, self._arrays = packed, seq_len, pad_id, arrays
    self._starts = np.cumsum([0, *(p.plan.num_rows for p in packed)])
    self._what, self._held = said
    self._files = [_File(Path(cache_dir), p, fingerprint, said) for p in packed]

  @property
  def sources(self) -> list[str]:
    """Their names."""
    return [packed.tokens.name for packed in self._packed]

  @property
  def complete(self) -> bool:
    return all(file.complete for file in self._files)

  @property
  def values(self) -> list[dict[str, np.ndarray]]:
    """Of each source, its arrays [N, …].

    Raises:
      ValueError: they are not complete.
    """
    if not self.complete:
      raise ValueError(f"the {self._what}'s log-probs are not complete: store those of every batch, then call "
                       "finish().")
    return [file.values for file in self._files if file.values is not None]

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

  def store(self, batch: UnitBatch, values: np.ndarray | dict[str, np.ndarray]) -> None:
    """Keeps the log-probs, or all arrays, of a batch (or of some of its rows), aligned as `loss_weights` are. One
    process does this.

    Raises:
      ValueError: a wrong shape, or a value that is no log-prob of a model.
    """
    values = {key: np.asarray(part, self._held[key][0]) for key, part in (
        values.items() if isinstance(values, dict) else {"logprobs": values}.items())}
    for key, (_, width) in self._held.items():
      wanted = (*batch.tokens_BxT.shape, *([width] if width else []))
      if values[key].shape != wanted:
        raise ValueError(f"{key.replace('logprobs', 'log-probs')} of shape {values[key].shape} for a batch of shape "
                         f"{wanted}.")
    finite_BxT = np.isfinite(values["logprobs"]).reshape(*batch.tokens_BxT.shape, -1).all(-1)
    bad = np.argwhere((batch.tokens_BxT >= 0) & ~finite_BxT)
    if len(bad):
      row, column = bad[0]
      raise ValueError(f"the {self._what} gives the token {batch.arrays['tokens'][row, column]} (row {row}, place "
                       f"{column} of batch {batch.index}) the log-prob {values['logprobs'][row, column]}. Check it.")
    for s in np.unique(batch.arrays["source_ids"]):
      mine = (batch.arrays["source_ids"][:, None] == s) & (batch.tokens_BxT >= 0)
      if s >= 0:
        self._files[s].write(batch.tokens_BxT[mine], {key: part[mine] for key, part in values.items()})

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
  """Those of one source: a file for each array (`logprobs.bin`, float32 [N, …]) and `meta.json` in a folder of their
  own."""

  def __init__(self, cache_dir: Path, packed: PackedSource, fingerprint: str, said: Said):
    tokens, units, (self._what, self._held) = packed.tokens, packed.units, said
    parts = json.dumps([VERSION, tokens.fingerprint, packed.plan.fingerprint if units is None else units.fingerprint,
                        fingerprint, *["prompts shared"] * packed.shares_prompts])  # which rounds differently
    key = hashlib.blake2b(parts.encode(), digest_size=12).hexdigest()
    self._folder = cache_dir / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', tokens.name)}-{said.who}-{key}"
    self._size, self._needed = len(tokens.tokens), packed.plan.stats().trained if units is None else units.summed
    self._stack = contextlib.ExitStack()
    # Where values are written until they are complete.
    self._temporary: Path | None = None
    self._writing: dict[str, np.memmap] = {}
    self.values: dict[str, np.ndarray] | None = None
    self.open()

  @property
  def complete(self) -> bool:
    return self.values is not None

  def open(self) -> None:
    if self.complete or not self._folder.exists():
      return
    damage = folders.find_damage(self._folder, _arrays)
    if damage is None:
      self.values = {key: self._map(self._folder, key, "r") for key in self._held}
    else:
      logging.warning("%s log-probs in %s are damaged (%s); computing them again.", self._what, self._folder, damage)
      folders.remove(self._folder)

  def _map(self, folder: Path, key: str, mode: Any) -> np.memmap:
    dtype, width = self._held[key]
    return np.memmap(folder / f"{key}.bin", dtype, mode=mode, shape=(self._size, *([width] if width else [])))

  def write(self, tokens: np.ndarray, values: dict[str, np.ndarray]) -> None:
    if self.complete:
      return
    if self._temporary is None:
      with contextlib.ExitStack() as stack:
        self._temporary = stack.enter_context(folders.new(self._folder, f"the {self._what}'s log-probs"))
        # Written, not only mapped: so that a full disk is an error here and not a crash later.
        for key, (dtype, width) in self._held.items():
          size, empty = self._size * max(width, 1), np.nan if np.dtype(dtype).kind == "f" else 0
          with open(self._temporary / f"{key}.bin", "wb") as file:
            for start in range(0, size, WRITTEN):
              np.full(min(WRITTEN, size - start), empty, dtype).tofile(file)
          self._writing[key] = self._map(self._temporary, key, "r+")
        self._stack = stack.pop_all()  # the folder stays until `finish`
    for key, part in values.items():
      self._writing[key][tokens] = part

  def finish(self) -> None:
    if self.complete:
      return
    found = 0
    if self._temporary is not None:
      logprobs = self._writing["logprobs"]
      found = int(np.count_nonzero(~np.isnan(logprobs if logprobs.ndim == 1 else logprobs[:, 0])))
    if self._temporary is None or found != self._needed:
      raise ValueError(f"{found} of {self._needed} {self._what} log-probs of {self._folder.name} were stored. Store "
                       "those of every batch before finish().")
    for part in self._writing.values():
      part.flush()
    temporary, self._temporary, self._writing = self._temporary, None, {}
    with self._stack:
      sums = {}
      for key in self._held:
        with open(temporary / f"{key}.bin", "rb") as file:
          os.fsync(file.fileno())
          sums[key] = folders.block_sums(file)
      meta = {"tokens": self._size, "arrays": self._held, "checksums": sums}
      (temporary / "meta.json").write_text(json.dumps(meta), "utf-8")
      folders.publish(temporary, self._folder, _arrays)
    self.open()


def _arrays(meta: dict) -> dict[str, tuple[str, int]]:
  held = meta.get("arrays", OF_REFERENCE.arrays)  # which folders of earlier versions do not name
  return {key: (dtype, meta["tokens"] * max(width, 1)) for key, (dtype, width) in held.items()}


class PackedData:
  """What training and evaluation data have in common: packed sources, maybe with what other models say of them."""

  def __init__(self, packed: list[PackedSource], seq_len: int, pad_id: int):
    self._packed, self._seq_len, self._pad_id = packed, seq_len, pad_id
    # S of `Arrays`, the same in every batch.
    self.sequences = max(source.sequences for source in packed)
    self.image_layout = image_layout(packed)
    # That a row of a batch has places for.
    self.images_per_row = self.image_layout.most if self.image_layout else 0
    # Without what other models say until `use`, unless rows have it.
    said = packed[0].tokens.teacher_ids
    self._routes = () if packed[0].tokens.teachers is None else (ROUTE,)
    kept = () if said is None else of_teachers(1, said.shape[1])
    self._arrays = Arrays(
        self.sequences, (*kept, *self._routes), advantages=packed[0].advantages,
        images=self.image_layout, prompts=packed[0].shares_prompts,
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
    arrays = self._arrays._replace(kept=())
    return ReferenceLogprobs(self._packed, self._seq_len, self._pad_id, arrays, fingerprint, Path(cache_dir))

  def teacher(self, fingerprint: str, cache_dir: str | Path, k: int, sources: Collection[str]) -> ReferenceLogprobs:
    """A teacher's k most probable entries at each trained token of these sources, or what is needed to compute them;
    see `reference`."""
    packed = [source for source in self._packed if source.tokens.name in sources]
    arrays = self._arrays._replace(kept=self._routes)
    said = Said("teacher", {"ids": ("<i4", k), "logprobs": ("<f4", k + 1)})
    return ReferenceLogprobs(packed, self._seq_len, self._pad_id, arrays, fingerprint, Path(cache_dir), said)

  def use(self, logprobs: ReferenceLogprobs) -> None:
    """From now on, batches have `ref_logprobs`: that of each token with a weight, 0 elsewhere.

    Raises:
      ValueError: they are not complete.
    """
    for source, values in zip(self._packed, logprobs.values, strict=True):
      source.kept = [("ref_logprobs", values["logprobs"])]
    self._arrays = self._arrays._replace(kept=REFERENCE)

  def use_teachers(self, said: Sequence[ReferenceLogprobs], kept: tuple[Kept, Kept]) -> None:
    """From now on, batches have the arrays `kept`, see `of_teachers`. Of a token, the first of its teachers in this
    order comes first; where there is none there are zeros.

    Raises:
      ValueError: some are not complete.
    """
    for source in self._packed:
      of_source = [values for one in said for mine, values in zip(one.sources, one.values, strict=True)
                   if mine == source.tokens.name]
      source.kept = [(array.name, [values[key] for values in of_source])
                     for array, key in zip(kept, ("ids", "logprobs"), strict=True)] + source.routed
    self._arrays = self._arrays._replace(kept=(*kept, *self._routes))

  def _empty(self, num_rows: int) -> dict[str, np.ndarray]:
    return empty_batch(num_rows, self._seq_len, self._pad_id, self._arrays)
