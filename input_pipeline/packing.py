"""Packing plans: which pieces of which documents make each row. Index arithmetic only; no token is read.

A row has `seq_len` (T) places. First `fit` decides what is kept of documents longer than that: all, a part, nothing.
A span that is still too long for where it stands is cut into pieces that overlap by one token: a piece begins with the
last token of the piece before, as context only, so that every token of a span but its first is predicted exactly once
an epoch. Where tokens have weights, what has nothing to train is left out. An epoch has the same number of rows
whatever its order.

Dims: R rows asked for, D documents, S spans.
"""

import abc
import hashlib
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from input_pipeline.fitting import Pieces, Spans, fit, ragged
from trainer.errors import ConfigError, DataError

PACKINGS = ("concat", "best_fit", "none")
# (document, begin, end) -> how many of tokens begin + 1 to end have a weight; see `TokenizedSource.count_trained`.
Count = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class PlanStats(NamedTuple):
  """One epoch's accounting. `tokens` are the documents' own, without the repeated ones at cuts.

  `trained` of them are predicted with a weight (without weights: all kept but each span's first). `split` documents
  are cut (with concat: in epoch 0). `padded` is the share of row places that hold nothing. `truncated` documents are
  kept in part and `too_long` ones not at all, by which `lost` tokens are lost; `untrained` pieces (with concat:
  documents) are left out because none of their tokens has a weight.
  """

  documents: int
  tokens: int
  trained: int
  rows: int
  split: int
  padded: float
  truncated: int
  too_long: int
  lost: int
  untrained: int


def permutation(n: int, *key: int | str) -> np.ndarray:
  """A permutation of range(n), int64, that depends on n and `key` only.

  Sorts raw Philox words, which every NumPy version draws alike; `Generator.permutation` does not promise it.
  """
  digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
  words = np.random.Philox(key=np.frombuffer(digest, "<u8").astype(np.uint64)).random_raw(n)
  return np.argsort(words, kind="stable")


def make_plan(
    packing: str, lengths: np.ndarray, seq_len: int, *, seed: int, name: str, shuffle: bool = True,
    over_long: str = "split", max_over_long: float = 1.0, count: Count | None = None, spans: Spans | None = None,
) -> "Plan":
  """The plan of one source.

  Args:
    packing: concat | best_fit | none.
    lengths: tokens of each document, int [D].
    seq_len: places in a row.
    seed, name: with the epoch they decide the order; the name is the source's.
    shuffle: False keeps documents and rows in order, the same in each epoch.
    over_long, max_over_long: see `fit`.
    count: counts tokens with a weight; None: all have one, and nothing is left out for having none.
    spans: what is kept of the documents; None: as `fit` has it.

  Raises:
    ConfigError: rows of fewer than two tokens.
    DataError: too many documents are too long, or nothing is left.
  """
  if seq_len < 2:
    raise ConfigError(f"seq_len={seq_len}: a row needs at least 2 tokens, one to predict from and one to predict.")
  if spans is None:
    spans = fit(np.asarray(lengths, np.int64), seq_len, over_long, max_over_long, name)
  plan = PLANS[packing](spans, seq_len, (seed, name) if shuffle else None, count) if spans.lengths.any() else None
  if plan is None or not plan.num_rows:
    raise DataError(
        f"source {name!r}: nothing is left of its {spans.documents} documents: {spans.too_long} are too long for "
        f"seq_len={seq_len} and dropped, {spans.truncated} are truncated, and no token with a weight remains. Use a "
        "larger seq_len or another input.over_long, or check what is trained.")
  return plan


class Plan(abc.ABC):
  """Rows of a source; `pieces` is a pure function of (epoch, rows), safe to call from several threads."""

  num_rows: int
  # The most pieces that a row holds in any epoch; None: not known.
  most_pieces: int | None = None
  # Row places taken, repeated tokens included.
  _filled: int
  # Tokens predicted with a weight; pieces or documents left out for having none.
  _trained: int
  _untrained = 0

  def __init__(self, spans: Spans, seq_len: int, key: tuple[int, str] | None):
    self._spans, self.lengths, self.seq_len, self._key = spans, spans.lengths, seq_len, key
    self._trained = int(self.lengths.sum()) - int(np.count_nonzero(self.lengths))
    self._orders: dict[int, tuple] = {}
    self._lock = threading.Lock()

  def pieces(self, epoch: int, rows: np.ndarray) -> Pieces:
    """What makes up `rows` (int [R], each in range(num_rows)) of `epoch`."""
    order = self._order(epoch)
    pieces = self._pieces(order, order[0][rows])
    return Pieces(pieces.row, *self._spans.place(*pieces[1:]))

  def stats(self) -> PlanStats:
    """The accounting of one epoch."""
    spans, padded = self._spans, 1.0 - self._filled / (self.num_rows * self.seq_len)
    return PlanStats(spans.documents, spans.tokens, self._trained, self.num_rows, self._num_split(), padded,
                     spans.truncated, spans.too_long, spans.lost, self._untrained)

  def _order(self, epoch: int) -> tuple:
    """The epoch's permutations (rows first); the last two epochs' are kept, as batches may span two."""
    with self._lock:
      if epoch not in self._orders:
        while len(self._orders) > 1:
          self._orders.pop(next(iter(self._orders)))
        self._orders[epoch] = self._make_order(epoch)
      return self._orders[epoch]

  def _permutation(self, n: int, what: str, epoch: int) -> np.ndarray:
    return np.arange(n) if self._key is None else permutation(n, *self._key, what, epoch)

  @property
  def fingerprint(self) -> str:
    """Equal where what is kept of documents, and into which lengths that is cut, are."""
    digest = hashlib.blake2b(repr(self.seq_len).encode(), digest_size=12)
    for part in (self.lengths, self._spans.doc, self._spans.begin):
      digest.update(b"-" if part is None else np.ascontiguousarray(part, np.int64).tobytes())
    return digest.hexdigest()

  @abc.abstractmethod
  def _make_order(self, epoch: int) -> tuple:
    """The permutations of an epoch; first that of its rows."""

  @abc.abstractmethod
  def _pieces(self, order: tuple, rows: np.ndarray) -> Pieces:
    """What makes up these rows, numbered as the plan lays them out; `doc` and the places are those of spans."""

  def _num_split(self) -> int:
    return int(np.count_nonzero(self.lengths > self.seq_len))


class ConcatPlan(Plan):
  """Documents in an order of their own each epoch, end to end, cut into windows of T overlapping by one.

  Window w covers places w(T-1) to w(T-1)+T-1 of the stream, so all rows but the last are full. A window's
  first token was predicted in the window before, or is a document's first.
  """

  def __init__(self, spans, seq_len, key, count=None):
    if count is not None:
      trained = count(*spans.place(np.arange(len(spans.lengths)), 0, spans.lengths))
      spans = spans.only(trained > 0)
    super().__init__(spans, seq_len, key)
    if count is not None:
      self._trained, self._untrained = int(trained.sum()), int(np.count_nonzero(trained == 0))
    self._total = int(spans.lengths.sum())
    if not self._total:
      self.num_rows = 0
      return
    self.num_rows = max(1, -(-(self._total - 1) // (seq_len - 1)))
    self._filled = self._total + self.num_rows - 1

  def _make_order(self, epoch):
    docs = self._permutation(len(self.lengths), "documents", epoch)
    starts = np.concatenate([[0], np.cumsum(self.lengths[docs])])
    return self._permutation(self.num_rows, "rows", epoch), docs, starts

  def _pieces(self, order, rows):
    _, docs, starts = order
    begin_R = rows * (self.seq_len - 1)
    end_R = np.minimum(begin_R + self.seq_len, self._total)
    first_R = np.searchsorted(starts, begin_R, "right") - 1
    last_R = np.searchsorted(starts, end_R - 1, "right") - 1
    row, nth = ragged(last_R - first_R + 1)
    place = first_R[row] + nth
    begin = np.maximum(begin_R[row] - starts[place], 0)
    end = np.minimum(end_R[row], starts[place + 1]) - starts[place]
    some = end > begin  # a document without tokens takes no place
    return Pieces(row[some], docs[place[some]], begin[some], end[some])

  def _num_split(self):
    _, _, starts = self._order(0)
    cuts = np.arange(1, self.num_rows) * (self.seq_len - 1)
    place = np.searchsorted(starts, cuts, "right") - 1
    # The token at a cut ends one row and begins the next: its document is cut if it goes on on both sides.
    inside = (starts[place] < cuts) & (cuts < starts[place + 1] - 1)
    return len(np.unique(place[inside]))


class _PiecePlan(Plan):
  """What the plans of whole spans share: spans longer than T are cut into overlapping pieces."""

  def __init__(self, spans, seq_len, key, count=None):
    super().__init__(spans, seq_len, key)
    lengths = spans.lengths
    counts = np.where(lengths > 0, np.maximum(1, -(-(lengths - 1) // (seq_len - 1))), 0)
    self._first_piece = np.concatenate([[0], np.cumsum(counts)])
    self._num_pieces = int(self._first_piece[-1])
    self._filled = int(lengths.sum() + (counts - (lengths > 0)).sum())
    # Numbers of the pieces with something to train; None: all of them.
    self._kept = None
    if count is not None:
      span, begin, end = self._piece(np.arange(self._num_pieces))
      trained = count(*spans.place(span, begin, end))
      self._trained, self._untrained = int(trained.sum()), int(np.count_nonzero(trained == 0))
      if self._untrained:
        self._kept = np.flatnonzero(trained)
        self._num_pieces, self._filled = len(self._kept), int((end - begin)[self._kept].sum())

  def most(self, count: Count) -> int:
    """The most of something that a row holds in any epoch, where `count` says how many each piece has."""
    return self._most(count(*self._spans.place(*self._piece(np.arange(self._num_pieces)))))

  @abc.abstractmethod
  def _most(self, counts: np.ndarray) -> int:
    """The same, given the count of each piece."""

  def _piece(self, piece: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(span, begin, end) of piece numbers."""
    piece = piece if self._kept is None else self._kept[piece]
    doc = np.searchsorted(self._first_piece, piece, "right") - 1
    begin = (piece - self._first_piece[doc]) * (self.seq_len - 1)
    return doc, begin, np.minimum(begin + self.seq_len, self.lengths[doc])


class OnePlan(_PiecePlan):
  """One piece a row."""

  def __init__(self, spans, seq_len, key, count=None):
    super().__init__(spans, seq_len, key, count)
    self.num_rows, self.most_pieces = self._num_pieces, 1

  def _most(self, counts):
    return int(counts.max(initial=0))

  def _make_order(self, epoch):
    return (self._permutation(self.num_rows, "rows", epoch),)

  def _pieces(self, order, rows):
    return Pieces(np.arange(len(rows)), *self._piece(rows))


class BestFitPlan(_PiecePlan):
  """Best-fit decreasing: each piece, longest first, goes into the row where it leaves the least room.

  How many rows, and which lengths share one, depends on the lengths alone; which of the pieces of equal
  length goes where changes with the epoch.
  """

  def __init__(self, spans, seq_len, key, count=None):
    super().__init__(spans, seq_len, key, count)
    if not self._num_pieces:
      self.num_rows = 0
      return
    _, begin, end = self._piece(np.arange(self._num_pieces))
    self._piece_lengths = end - begin
    row_of_slot = best_fit_decreasing(np.bincount(self._piece_lengths, minlength=seq_len + 1), seq_len)
    # Slots are numbered in the order of packing (longest first); listed row by row, in that order.
    self._slots = np.argsort(row_of_slot, kind="stable")
    self.num_rows = int(row_of_slot.max()) + 1
    counts = np.bincount(row_of_slot)
    self.most_pieces = int(counts.max())
    self._row_starts = np.concatenate([[0], np.cumsum(counts)])

  def _most(self, counts):
    # Pieces of one length may stand in each other's place: a row may get those of them that have the most.
    largest = counts[np.lexsort((-counts, -self._piece_lengths))]
    lengths = np.sort(self._piece_lengths)[::-1]
    slot_length = lengths[self._slots]
    row = np.repeat(np.arange(self.num_rows), np.diff(self._row_starts))
    new = np.flatnonzero(np.concatenate([[True], (np.diff(row) != 0) | (np.diff(slot_length) != 0)]))
    _, nth = ragged(np.diff(np.append(new, len(row))))
    first = np.searchsorted(-lengths, -slot_length)
    return int(np.bincount(row, largest[first + nth]).max())

  def _make_order(self, epoch):
    random = self._permutation(self._num_pieces, "pieces", epoch)
    pieces = random[np.argsort(-self._piece_lengths[random], kind="stable")]
    return self._permutation(self.num_rows, "rows", epoch), pieces

  def _pieces(self, order, rows):
    _, pieces = order
    row, nth = ragged(self._row_starts[rows + 1] - self._row_starts[rows])
    slot = self._slots[self._row_starts[rows][row] + nth]
    return Pieces(row, *self._piece(pieces[slot]))


PLANS = {"concat": ConcatPlan, "best_fit": BestFitPlan, "none": OnePlan}


def best_fit_decreasing(counts: np.ndarray, size: int) -> np.ndarray:
  """The row (int64) of each piece under best-fit decreasing, pieces listed longest first.

  Pieces of one length are placed together: of the rows with the least sufficient room C, each takes C // length
  of them before any roomier row gets one, so the work grows with the distinct lengths and rooms.

  Args:
    counts: how many pieces have each length, int [size + 1]; counts[0] must be 0.
    size: places in a row.
  """
  rooms: dict[int, list[np.ndarray]] = {}  # room left -> numbers of the rows that have it
  present = 0  # bit C is set if rooms has C
  num_rows, placed = 0, []
  for length in np.flatnonzero(counts)[::-1].tolist():
    left = int(counts[length])
    while left:
      at_least = present >> length
      if at_least:
        room = length + (at_least & -at_least).bit_length() - 1
        rows = np.concatenate(rooms.pop(room))
        present &= ~(1 << room)
      else:
        room = size
        rows = num_rows + np.arange(-(-left // (size // length)))
        num_rows += len(rows)
      each = room // length
      full, rest = min(len(rows), left // each), 0
      placed.append(np.repeat(rows[:full], each))
      left -= full * each
      if left and full < len(rows):
        rest, left = left, 0
        placed.append(np.full(rest, rows[full]))
      used = full + (rest > 0)
      new_rooms = ((room - each * length, rows[:full]), (room - rest * length, rows[full:used]), (room, rows[used:]))
      for new_room, some in new_rooms:
        if new_room and len(some):
          rooms.setdefault(new_room, []).append(some)
          present |= 1 << new_room
  return np.concatenate(placed)
