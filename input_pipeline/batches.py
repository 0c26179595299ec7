"""Rows of tokens from pieces of documents: the arrays that the model and the loss see."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from ml_collections import ConfigDict

from input_pipeline.cache import TokenizedSource
from input_pipeline.chat.image_placeholders import sees
from input_pipeline.examples.kinds import WITH_ADVANTAGES, WITH_PARTS
from input_pipeline.examples.registry import learns_texts
from input_pipeline.examples.routed import INDEX
from input_pipeline.files import SHOWN_NAME
from input_pipeline.fitting import OVER_LONG, WHOLE_OVER_LONG, Parts, Pieces, Units, fit, keep_images_whole, ragged
from input_pipeline.image_batches import ImageLayout, RowImages
from input_pipeline.packing import Plan, make_plan
from trainer.errors import ConfigError, DataError, one_of

NORMALIZE = ("token", "sequence")
# How many columns that nothing reads are named in the table at the start.
SHOWN_COLUMNS = 8


class Kept(NamedTuple):
  """An array of batches, [B, T, *tail], of what another model says of each trained token, or whose it is, known before
  the first step: computed then (input_pipeline/reference.py), or a part of the data."""

  name: str
  tail: tuple[int, ...] = ()
  dtype: str = "float32"


class Arrays(NamedTuple):
  """Which arrays a batch has besides those that every batch has.

  Attributes:
    sequences: S, the most segments of a row, where documents have parts; else 0, and there is no such array.
    kept: those of what other models say of tokens.
    advantages: one for those of segments.
    logprobs: one for the log-probs that tokens were sampled with.
    images: which there are for images; None: none.
    prompts: one for the segments of prompts that parts share.
  """

  sequences: int = 0
  kept: tuple[Kept, ...] = ()
  advantages: bool = False
  logprobs: bool = False
  images: ImageLayout | None = None
  prompts: bool = False


def empty_batch(num_rows: int, seq_len: int, pad_id: int, arrays: Arrays = Arrays()  # noqa: B008 (it is frozen)
                ) -> dict[str, np.ndarray]:
  """Padding only, [num_rows, seq_len]: segment 0, weight 0, source -1."""
  shape = (num_rows, seq_len)
  batch = {
      "tokens": np.full(shape, pad_id, np.int32),
      "positions": np.zeros(shape, np.int32),
      "segment_ids": np.zeros(shape, np.int32),
      "loss_weights": np.zeros(shape, np.float32),
      "source_ids": np.full(num_rows, -1, np.int32),
  }
  if arrays.sequences:
    batch["segment_roles"] = np.zeros((num_rows, arrays.sequences), np.int32)
  if arrays.advantages:
    batch["advantages"] = np.zeros((num_rows, arrays.sequences), np.float32)
  for kept in arrays.kept:
    batch[kept.name] = np.zeros((*shape, *kept.tail), kept.dtype)
  if arrays.logprobs:
    batch["behavior_logprobs"] = np.zeros(shape, np.float32)
  if arrays.prompts:
    batch["prompt_ids"] = np.zeros(shape, np.int32)
  return batch if arrays.images is None else batch | arrays.images.empty(*shape)


class Segments(NamedTuple):
  """Of pieces, the numbers of their segments, and of those of the prompts that they share, 0 for none; int64 [P].

  The positions of their tokens are those in the documents that they are of, counted from token `first`.
  """

  numbers: np.ndarray
  prompts: np.ndarray
  first: np.ndarray


def fill(
    batch: dict[str, np.ndarray], where: np.ndarray, source: TokenizedSource, pieces: Pieces, normalize: str = "token",
    segments: Segments | None = None,
) -> tuple[np.ndarray, np.ndarray]:
  """Writes `pieces` into rows `where` (int [R]) of `batch`: each row's pieces side by side from the left.

  Each piece is a segment, without `segments` numbered from 1 in its row, with positions from 0. All its tokens but the
  first get their weight, 1 if the source has none. With `normalize="sequence"`, a piece's weights are divided by their
  sum.

  Returns:
    Of each token written, its place in the batch (row * seq_len + column) and in the source, int64.
  """
  seq_len = batch["tokens"].shape[1]
  sizes_P = pieces.end - pieces.begin
  counts_R = np.bincount(pieces.row, minlength=len(where))
  first_R = np.cumsum(counts_R) - counts_R
  before_P = np.cumsum(sizes_P) - sizes_P
  column_P = before_P - before_P[first_R][pieces.row]
  piece, position = ragged(sizes_P)
  flat = (where[pieces.row] * seq_len + column_P)[piece] + position
  begin_P = source.offsets[pieces.doc] + pieces.begin
  token = begin_P[piece] + position
  batch["tokens"].reshape(-1)[flat] = source.tokens[token]
  if segments is None:
    batch["positions"].reshape(-1)[flat] = position
    batch["segment_ids"].reshape(-1)[flat] = (1 + np.arange(len(sizes_P)) - first_R[pieces.row])[piece]
  else:
    batch["positions"].reshape(-1)[flat] = (pieces.begin - np.minimum(segments.first, pieces.begin))[piece] + position
    batch["segment_ids"].reshape(-1)[flat] = segments.numbers[piece]
    if "prompt_ids" in batch or segments.prompts.any():  # without the array nobody would see the prompts
      batch["prompt_ids"].reshape(-1)[flat] = segments.prompts[piece]
  weights = position > 0 if source.weights is None else np.where(position > 0, source.weights[token], 0)
  if normalize == "sequence":
    sums_P = np.bincount(piece, weights, minlength=len(sizes_P))
    weights = weights / np.where(sums_P > 0, sums_P, 1)[piece]
  batch["loss_weights"].reshape(-1)[flat] = weights
  return flat, token


def check_ids(batch: dict[str, np.ndarray], vocab_size: int) -> dict[str, np.ndarray]:
  """The batch, whose tokens are all entries of the model's vocabulary.

  Raises:
    DataError: naming the first that is not; a tokenizer may have more entries than the model has embeddings.
  """
  if (largest := batch["tokens"].max(initial=0)) >= vocab_size:
    row, column = np.argwhere(batch["tokens"] >= vocab_size)[0]
    raise DataError(f"token {batch['tokens'][row, column]} (row {row} of the batch, position {column}) is not in the "
                    f"model's vocabulary of {vocab_size}; the largest id of this batch is {largest}. Use the tokenizer "
                    "that belongs to the model, or remove the texts with its additional tokens.")
  return batch


def image_layout(packed: Iterable["PackedSource"]) -> ImageLayout | None:
  """The arrays for images in batches of these sources; None: the model sees none."""
  packed = list(packed)
  row_images = packed[0].row_images
  return None if row_images is None else row_images.layout(
      max(source.most_images for source in packed), any(source.videos for source in packed))


def resolve_layout(config: ConfigDict, learns: str) -> tuple[str, str, str]:
  """(packing, over_long, normalize) of a config, with what "auto" stands for; `learns`: see `make_encoder`.

  Raises:
    ConfigError: options that cannot be, or not together.
  """
  texts, packing, over_long = learns_texts(config, learns), config.input.packing, config.input.over_long
  normalize = config.strategy.normalize if "normalize" in config.strategy else "token"
  one_of("strategy.normalize", normalize, NORMALIZE)
  if packing == "concat" and not texts:
    raise ConfigError(f"input.packing is 'concat', which would cut conversations anywhere; strategy "
                      f"{config.strategy.name!r} needs them whole. Use --config.input.packing=best_fit, or none.")
  if over_long not in ("auto", *WHOLE_OVER_LONG) and learns in WITH_PARTS:
    raise ConfigError(f"input.over_long is {over_long!r}, which strategy {config.strategy.name!r} cannot do: "
                      f"the parts of an example belong together. Use {', '.join(WHOLE_OVER_LONG)}.")
  if learns == "matches" and over_long.startswith("truncate"):
    raise ConfigError(f"input.over_long is {over_long!r}, which would cut the ends of texts that are embedded, with "
                      "the tokens that end them. Leave it at auto (error) or use drop; strategy.max_length cuts each "
                      "text before its end.")
  packing = ("concat" if texts else "best_fit") if packing == "auto" else packing
  if over_long == "auto":
    over_long = "split" if texts else "error" if learns == "matches" else "truncate_end"
  return packing, over_long, normalize


def pack(config: ConfigDict, tokens: TokenizedSource, *, learns: str, shuffle: bool = True,
         share_prompts: bool = False) -> "PackedSource":
  """A source laid into rows as the config says; what is lost by that is logged. `learns`: see `make_encoder`;
  `share_prompts`: see `Units`.

  Raises:
    ConfigError, DataError: see `resolve_layout`, `make_plan`.
  """
  packing, over_long, normalize = resolve_layout(config, learns)
  units, count = None, None if tokens.weights is None else tokens.count_trained
  spans = None
  row_images = None
  if sees(config) and not learns_texts(config, learns):
    row_images = RowImages(config, augment=shuffle, embedded=learns == "matches")
  if tokens.parts_each:
    units = Units(tokens, config.seq_len, over_long, config.input.max_over_long, share_prompts)
    count, spans = units.count, units.spans
  elif tokens.images is not None:
    if over_long == "split":
      raise ConfigError(f"input.over_long is 'split', which would cut the images of source {tokens.name!r} in two. Use "
                        f"{', '.join(o for o in OVER_LONG if o != 'split')}.")
    lengths = np.diff(tokens.offsets)
    spans = keep_images_whole(fit(lengths, config.seq_len, over_long, config.input.max_over_long, tokens.name), tokens)
  plan = make_plan(
      packing, np.diff(tokens.offsets), config.seq_len, seed=config.seed if shuffle else 0, name=tokens.name,
      shuffle=shuffle, over_long=over_long, max_over_long=config.input.max_over_long, count=count,
      spans=spans)
  s = plan.stats()
  if s.lost:
    logging.warning(
        "source %r: of %d documents, %d are truncated and %d dropped (input.over_long=%s, seq_len=%d): %d of %d tokens "
        "are lost.", tokens.name, s.documents, s.truncated, s.too_long, over_long, config.seq_len, s.lost, s.tokens)
  if s.untrained:
    logging.warning("source %r: %d documents or parts of them are left out: none of their tokens is trained.",
                    tokens.name, s.untrained)
  return PackedSource(tokens, plan, normalize, units, learns in WITH_ADVANTAGES, row_images)


class PackedSource:
  """A tokenised source with its plan; `units` if its documents have parts, which may have `advantages`; `row_images`
  if the model sees images."""

  def __init__(self, tokens: TokenizedSource, plan: Plan, normalize: str = "token", units: Units | None = None,
               advantages: bool = False, row_images: RowImages | None = None):
    self.row_images = row_images
    self.videos = 0 if tokens.images is None else tokens.images.videos
    # The most images of a row, or tiles of them, in whatever epoch.
    self.most_images = 0 if tokens.images is None else plan.most(
        tokens.count_images if units is None else lambda doc, begin, end: units.count_images(tokens, doc))
    self.tokens, self.plan, self.units, self.advantages, self._normalize = tokens, plan, units, advantages, normalize
    # The most segments of a row, in whatever epoch, where documents have parts; else 0.
    self.sequences = 0 if units is None else plan.most_pieces * units.each
    self.shares_prompts = units is not None and units.shares
    # Of other models, for each of `tokens`: (name of the array of batches, values [N, …], or one after another those of
    # its third dimension).
    self.kept: list[tuple[str, np.ndarray | list[np.ndarray]]] = [
        (name, [values]) for name, values in (("teacher_ids", tokens.teacher_ids),
                                              ("teacher_logprobs", tokens.teacher_logprobs)) if values is not None]
    self.kept += self.routed

  @property
  def routed(self) -> list[tuple[str, np.ndarray | list[np.ndarray]]]:
    """Whose each token is, as `kept` has it, where rows name their teacher."""
    return [] if self.tokens.teachers is None else [(INDEX, self.tokens.teachers)]

  def fill(
      self, batch: dict[str, np.ndarray], where: np.ndarray, epoch: int, rows: np.ndarray, source_id: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Writes rows `rows` of `epoch` into rows `where` of `batch`; returns what `fill` does."""
    source, pieces, segments = self.tokens, self.plan.pieces(epoch, rows), None
    if self.units is not None:
      parts = self.units.parts(pieces)
      source, pieces, segments = source.of_parts(), parts.pieces, self._mark(batch, where, parts)
    flat, token = fill(batch, where, source, pieces, self._normalize, segments)
    if self.row_images is not None:
      self.row_images.fill(batch, where, source, pieces, flat, epoch)
    trained = batch["loss_weights"].reshape(-1)[flat] != 0
    for key, values in self.kept:
      given = batch[key].reshape(-1, *batch[key].shape[2:])
      if isinstance(values, list):
        for nth, of_nth in enumerate(values):
          given[flat[trained], nth] = of_nth[token[trained]]
      else:
        given[flat[trained]] = values[token[trained]]
    if "behavior_logprobs" in batch:  # NaN: not known
      known = np.nan if source.logprobs is None else source.logprobs[token[trained]]
      batch["behavior_logprobs"].reshape(-1)[flat[trained]] = known
    batch["source_ids"][where] = source_id
    return flat, token

  def _mark(self, batch: dict[str, np.ndarray], where: np.ndarray, parts: Parts) -> Segments:
    """Says in `batch` what each part is; returns the parts' segments, those of prompts numbered beyond the others."""
    number = parts.document * self.units.each + parts.nth + 1
    of_prompt = batch["segment_roles"].shape[1] + 1 + parts.document
    there = parts.nth >= 0
    row, segment = where[parts.pieces.row[there]], number[there] - 1
    batch["segment_roles"][row, segment] = parts.roles[there]
    if parts.advantages is not None:
      batch["advantages"][row, segment] = parts.advantages[there]
    sees = there & (parts.pieces.begin > parts.cut)
    return Segments(np.where(there, number, of_prompt), np.where(sees, of_prompt, 0), parts.cut)

  def counts(self) -> dict[str, Any]:
    """This source's row of `stats_table`."""
    s, tokens, shapes = self.plan.stats(), self.tokens, self.tokens.shapes
    too_long = {"too long": s.too_long} if self.units is None else {"too long": 0, **self.units.dropped}
    return {
        "source": tokens.name,
        "documents": s.documents,
        "skipped": sum(tokens.skipped.values()),
        **{f"dropped: {why}": n for why, n in tokens.dropped.items()},
        **{f"dropped: {why}": n for why, n in too_long.items()},
        "truncated": s.truncated,
        "tokens lost": s.lost,
        "pieces untrained": s.untrained,
        "nulls left out": tokens.nulls,
        "prompt tokens shared": 0 if self.units is None else self.units.saved,
        "bytes": int(tokens.num_bytes.sum()),
        "tokens": s.tokens,
        "images": 0 if tokens.images is None else len(tokens.images.ids) - self.videos,
        "videos": self.videos,
        "rows": s.rows,
        "documents split": s.split,
        "padded %": 100 * s.padded,
        "supervised %": 100 * s.trained / (s.rows * self.plan.seq_len),
        "records": ", ".join(f"{n:,} {shape}" for shape, n in shapes.items()) if shapes.keys() - {"text"} else "",
        "columns not read": _list_columns(tokens.unread),
    }


def _list_columns(unread: dict[str, int]) -> str:
  """Names of columns, each with the number of rows that have it."""
  names = list(unread)[:SHOWN_COLUMNS]
  more = f" and {len(unread) - len(names)} more" if len(unread) > len(names) else ""
  return ", ".join(f"{name[:SHOWN_NAME]} {unread[name]:,}" for name in names) + more


# Columns of `stats_table` that are there even if they hold zeros only.
ALWAYS = ("source", "documents", "skipped", "bytes", "tokens", "rows", "documents split", "padded %", "supervised %")


def stats_table(sources: Iterable[PackedSource]) -> list[dict[str, Any]]:
  """One row a source, all with the same columns; what was dropped, truncated or left out has one if there is any.

  `records` says what the records were taken for, if any was not a plain text.
  """
  rows = [source.counts() for source in sources]
  reasons = list(dict.fromkeys(key for row in rows for key in row if key not in rows[0]))
  columns = list(rows[0])
  at = columns.index("dropped: too long")
  columns[at:at] = reasons
  columns = [key for key in columns if key in ALWAYS or any(row.get(key) for row in rows)]
  return [{key: row.get(key, 0) for key in columns} for row in rows]
