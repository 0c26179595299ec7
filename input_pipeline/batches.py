"""Rows of tokens from pieces of documents: the arrays that the model and the loss see."""

import numpy as np

from input_pipeline.cache import TokenizedSource
from input_pipeline.packing import Pieces, Plan, ragged


def empty_batch(num_rows: int, seq_len: int, pad_id: int) -> dict[str, np.ndarray]:
  """Padding only: segment 0, weight 0, source -1."""
  shape = (num_rows, seq_len)
  return {
      "tokens": np.full(shape, pad_id, np.int32),
      "positions": np.zeros(shape, np.int32),
      "segment_ids": np.zeros(shape, np.int32),
      "loss_weights": np.zeros(shape, np.float32),
      "source_ids": np.full(num_rows, -1, np.int32),
  }


def fill(batch: dict[str, np.ndarray], where: np.ndarray, source: TokenizedSource, pieces: Pieces) -> None:
  """Writes `pieces` into rows `where` (int [R]) of `batch`: each row's pieces side by side from the left.

  Each piece is a segment, numbered from 1 in its row, with positions from 0. All its tokens but the first
  get loss weight 1.
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
  batch["tokens"].reshape(-1)[flat] = source.tokens[begin_P[piece] + position]
  batch["positions"].reshape(-1)[flat] = position
  batch["segment_ids"].reshape(-1)[flat] = (1 + np.arange(len(sizes_P)) - first_R[pieces.row])[piece]
  batch["loss_weights"].reshape(-1)[flat] = position > 0


class PackedSource:
  """A tokenised source with its plan."""

  def __init__(self, tokens: TokenizedSource, plan: Plan):
    self.tokens, self.plan = tokens, plan

  def fill(self, batch: dict[str, np.ndarray], where: np.ndarray, epoch: int, rows: np.ndarray, source_id: int) -> None:
    """Writes rows `rows` of `epoch` into rows `where` of `batch`."""
    fill(batch, where, self.tokens, self.plan.pieces(epoch, rows))
    batch["source_ids"][where] = source_id
