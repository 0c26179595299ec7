"""What is kept of documents that are longer than a row: all, a part, nothing. No token is read.

Dims: N pieces, S spans, D documents, P parts of a document.
"""

import hashlib
from typing import NamedTuple

import numpy as np

from input_pipeline.cache import WEIGHTS_READ, TokenizedSource
from input_pipeline.examples.roles import ABSENT, CHOSEN, EMBEDDED, MISMATCHED, REJECTED
from trainer.errors import DataError

OVER_LONG = ("split", "truncate_end", "truncate_start", "drop", "error")
# Of these, what documents with parts can have.
WHOLE_OVER_LONG = ("truncate_end", "truncate_start", "drop", "error")


class Pieces(NamedTuple):
  """Pieces of the rows asked for, in row order and, within a row, in order of place. All int64 [N].

  `row` is the index into the rows asked for; the piece is tokens begin to end of document `doc`.
  """

  row: np.ndarray
  doc: np.ndarray
  begin: np.ndarray
  end: np.ndarray


class Parts(NamedTuple):
  """Parts of documents, in the order in which they stand in rows, each before it the prompt that it may share; [N]."""

  # Of a source in which each part is a document.
  pieces: Pieces
  # Which document of its row it belongs to, and which part of it it is, from 0; -1: it is their prompt. int64.
  document: np.ndarray
  nth: np.ndarray
  # What each is (roles.py), int8; ABSENT for prompts.
  roles: np.ndarray
  # Float32, 0 for prompts; None: there are none.
  advantages: np.ndarray | None
  # How many tokens at its beginning are left out, int64: where its positions begin to count.
  cut: np.ndarray


class Spans(NamedTuple):
  """What is kept of a source's documents: `lengths` int64 [S], from token `begin` of document `doc` on.

  None for `doc`: span s is of document s. None for `begin`: all begin at 0. The numbers are of the documents:
  how many there are, their tokens, those truncated, those left out for their length, the tokens lost by either.
  """

  lengths: np.ndarray
  doc: np.ndarray | None
  begin: np.ndarray | None
  documents: int
  tokens: int
  truncated: int = 0
  too_long: int = 0
  lost: int = 0

  def place(self, span: np.ndarray, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(document, begin, end) of places in spans."""
    offset = 0 if self.begin is None else self.begin[span]
    return span if self.doc is None else self.doc[span], begin + offset, end + offset

  def only(self, which: np.ndarray) -> "Spans":
    """The spans in `which`, bool [S]."""
    doc = np.flatnonzero(which) if self.doc is None else self.doc[which]
    return self._replace(lengths=self.lengths[which], doc=doc, begin=None if self.begin is None else self.begin[which])


def fit(lengths: np.ndarray, seq_len: int, over_long: str, max_over_long: float, name: str) -> Spans:
  """What is kept of documents that are longer than a row.

  Args:
    lengths: tokens of each document, int64 [D].
    seq_len: places in a row.
    over_long: split: all, cut into pieces. truncate_end, truncate_start: a row's length, without what is beyond it at
      that side. drop: nothing. error: such documents are refused.
    max_over_long: the share of documents, from 0 to 1, that may be truncated or dropped.
    name: the source's, for messages.

  Raises:
    DataError: more documents are too long than may be.
  """
  whole = Spans(lengths, None, None, len(lengths), int(lengths.sum()))
  long = lengths > seq_len
  count = int(np.count_nonzero(long))
  if over_long == "split" or not count:
    return whole
  check_share(lengths, seq_len, over_long, max_over_long, name)
  if over_long == "drop":
    return whole.only(~long)._replace(too_long=count, lost=int(lengths[long].sum()))
  kept = np.minimum(lengths, seq_len)
  begin = lengths - kept if over_long == "truncate_start" else None
  return whole._replace(lengths=kept, begin=begin, truncated=count, lost=whole.tokens - int(kept.sum()))


def check_share(lengths: np.ndarray, seq_len: int, over_long: str, max_over_long: float, name: str,
                choices: tuple[str, ...] = OVER_LONG) -> None:
  """Raises DataError if more documents are longer than a row than may be; see `fit`."""
  count = int(np.count_nonzero(lengths > seq_len))
  if not count:
    return
  share, longest = count / len(lengths), int(lengths.max())
  if over_long == "error" or share > max_over_long:
    allowed = 0 if over_long == "error" else int(max_over_long * len(lengths))
    enough = int(np.partition(lengths, -1 - allowed)[-1 - allowed])
    limit = "" if over_long == "error" else f", and input.max_over_long allows {max_over_long:.1%} of them"
    raise DataError(
        f"source {name!r}: {count:,} of {len(lengths):,} documents ({share:.1%}) are longer than seq_len={seq_len} "
        f"(the longest: {longest:,} tokens); with input.over_long={over_long!r} they "
        f"{'are refused' if over_long == 'error' else 'lose tokens'}{limit}. Set seq_len={enough} or more, another "
        f"input.over_long ({', '.join(o for o in choices if o != over_long)})"
        f"{'' if over_long == 'error' else ', or a larger input.max_over_long'}.")


def keep_images_whole(spans: Spans, tokens: TokenizedSource) -> Spans:
  """`spans` of documents of which none is cut within an image: one that would be is left out, with all beyond the cut.

  Args:
    spans: as `fit` gives them, but not split.
    tokens: the source's, with images.
  """
  docs = np.arange(len(spans.lengths)) if spans.doc is None else spans.doc
  begin = np.zeros(len(docs), np.int64) if spans.begin is None else spans.begin
  starts = tokens.offsets[docs]
  first = tokens.images.outside(starts + begin, after=True)
  last = np.maximum(tokens.images.outside(starts + begin + spans.lengths, after=False), first)
  lengths = np.asarray(last - first)
  gone = (lengths == 0) & (spans.lengths > 0)
  spans = spans._replace(
      lengths=lengths, begin=None if spans.begin is None else np.asarray(first - starts),
      truncated=spans.truncated - int(gone.sum()), too_long=spans.too_long + int(gone.sum()),
      lost=spans.lost + int(spans.lengths.sum() - lengths.sum()))
  return spans.only(~gone) if gone.any() else spans


class Units:
  """What is kept of documents with parts, each of which needs a row's places for all of its parts.

  Of one that is too long, with truncate_end all parts are cut to the same maximum, the largest with which they fit. A
  preference of which that would cut one side alone is dropped, so that no comparison is between a whole answer and a
  beginning; so is what keeps no trained token on some side. A mismatched completion without any is left out alone.

  With truncate_start all parts lose the same tokens at the beginning of their prompt, as few as may be, and keep their
  completions whole. At least a token of the prompt stays; what does not fit then is dropped. A mismatched completion
  never costs its example: it is cut at its end, or left out.

  Parts may share their prompt, which then takes a row's places once: all that they begin with alike and that is not
  trained, but for its last token, with which each part begins (trainer/rollouts/experience.py says why).

  Args:
    tokens: with parts.
    seq_len: places in a row.
    over_long: truncate_end, truncate_start, drop or error; see `fit`.
    max_over_long: see `fit`.
    share_prompts: whether parts share their prompt. Not with images.

  Raises:
    DataError: more documents are too long than may be.

  Attributes:
    spans: for a plan, in which no document is cut further.
    shares: whether parts share their prompt.
    saved: places that this saves, of all documents together.
    dropped: documents left out, by reason.
    each: parts of a document.
    summed: tokens with a weight, those of mismatched completions included.
  """

  def __init__(self, tokens: TokenizedSource, seq_len: int, over_long: str, max_over_long: float,
               share_prompts: bool = False):
    self.each, self.shares = tokens.parts_each, share_prompts
    self.dropped: dict[str, int] = {}
    sizes_DxP = np.diff(tokens.parts).reshape(-1, self.each)
    roles_DxP = np.array(tokens.roles).reshape(-1, self.each)
    prompts_D = np.maximum(common_beginnings(tokens) - 1, 0) if share_prompts else np.zeros(len(sizes_DxP), np.int64)
    cut_D = np.zeros(len(sizes_DxP), np.int64)
    total_D = _places(sizes_DxP, prompts_D)
    long_D = total_D > seq_len
    check_share(total_D, seq_len, over_long, max_over_long, tokens.name, choices=WHOLE_OVER_LONG)
    if over_long == "drop":
      kept_DxP, bad_D = sizes_DxP, self._drop(long_D, "too long", False)
    elif over_long == "truncate_start":
      kept_DxP, cut_D, fits_D = _from_the_start(tokens, sizes_DxP, roles_DxP, prompts_D, seq_len)
      bad_D = self._drop(~fits_D, "too long", False)
    else:
      own_DxP = np.maximum(sizes_DxP - prompts_D[:, None], 0)
      most_D = prompts_D + _largest(own_DxP, seq_len - prompts_D)
      kept_DxP = np.where(long_D[:, None], np.minimum(sizes_DxP, most_D[:, None]), sizes_DxP)
      if tokens.images is not None:
        starts_DxP = np.array(tokens.parts[:-1]).reshape(-1, self.each)
        kept_DxP = tokens.images.outside(starts_DxP + kept_DxP, after=False) - starts_DxP
      compared_D = np.isin(roles_DxP, (CHOSEN, REJECTED)).all(axis=1)
      bad_D = self._drop(long_D & compared_D & (kept_DxP == sizes_DxP).any(axis=1), "one side too long", False)
    # Of a text that is embedded each token counts.
    trained_DxP = np.where(np.isin(roles_DxP, EMBEDDED), kept_DxP, self._count(tokens, cut_D, kept_DxP))
    spare_DxP = np.isin(roles_DxP, (MISMATCHED, ABSENT))
    bad_D = self._drop(((trained_DxP == 0) & ~spare_DxP).any(axis=1), "no room for a completion", bad_D)
    out_DxP = spare_DxP & (trained_DxP == 0)
    self._kept_DxP, self._roles_DxP = np.where(out_DxP, 0, kept_DxP), np.where(out_DxP, ABSENT, roles_DxP)
    self._advantages = tokens.advantages
    self._trained_D = np.where(spare_DxP, 0, trained_DxP).sum(axis=1)
    self.summed = int(np.where(out_DxP, 0, trained_DxP)[~bad_D].sum())
    self._cut_D = cut_D
    self._prompts_D = np.where((self._kept_DxP > 0).sum(axis=1) > 1, prompts_D, 0)
    own_DxP = np.maximum(self._kept_DxP - cut_D[:, None], 0)
    lengths_D, tokens_D = _places(own_DxP, np.maximum(self._prompts_D - cut_D, 0)), own_DxP.sum(axis=1)
    self.saved = int((tokens_D - lengths_D)[~bad_D].sum())
    whole = Spans(lengths_D, None, None, len(total_D), int(sizes_DxP.sum()), int((long_D & ~bad_D).sum()),
                  int(bad_D.sum()), int(sizes_DxP.sum() - tokens_D[~bad_D].sum()))
    self.spans = whole.only(~bad_D) if bad_D.any() else whole
    # Names what is kept: equal if and only if the same tokens are.
    kept = [np.where(bad_D[:, None], 0, self._kept_DxP), *([np.where(bad_D, 0, cut_D)] if cut_D.any() else [])]
    self.fingerprint = hashlib.blake2b(b"".join(x.astype("<i8").tobytes() for x in kept), digest_size=16).hexdigest()

  def count(self, doc: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Trained tokens of whole documents; what is only summed up for a mean is not counted."""
    return self._trained_D[doc]

  def count_images(self, tokens: TokenizedSource, doc: np.ndarray) -> np.ndarray:
    """How many tiles or squares of images each of these documents keeps, in all of its parts."""
    kept_NxP = self._kept_DxP[doc]
    part_NxP = doc[:, None] * self.each + np.arange(self.each)
    cut_NxP = np.minimum(self._cut_D[doc][:, None], kept_NxP)
    return tokens.of_parts().count_images(part_NxP, cut_NxP, kept_NxP).sum(axis=1)

  def parts(self, pieces: Pieces) -> Parts:
    """What these documents, which `spans` has, put into their rows; one that is left out alone takes no place."""
    first = -1 if self.shares else 0
    nth = np.tile(np.arange(first, self.each), len(pieces.doc))
    doc, row = (np.repeat(x, self.each - first) for x in (pieces.doc, pieces.row))
    _, document = ragged(np.bincount(pieces.row))
    part, prompt, cut = np.maximum(nth, 0), self._prompts_D[doc], self._cut_D[doc]
    kept = self._kept_DxP[doc, part]
    of_prompt = nth < 0
    begin = np.where(of_prompt, np.minimum(cut, prompt), np.minimum(np.maximum(prompt, cut), kept))
    some = Pieces(row, doc * self.each + part, begin, np.where(of_prompt, prompt, kept))
    roles = np.where(of_prompt, ABSENT, self._roles_DxP[doc, part])
    advantages = None if self._advantages is None else np.where(of_prompt, 0, self._advantages[some.doc])
    return Parts(some, np.repeat(document, self.each - first), nth, roles, advantages, cut)

  def _drop(self, which_D: np.ndarray, reason: str, before_D: np.ndarray | bool) -> np.ndarray:
    """`before_D` and `which_D`; those that are new are counted under `reason`."""
    if count := int(np.count_nonzero(which_D & ~np.asarray(before_D))):
      self.dropped[reason] = count
    return which_D | before_D

  def _count(self, tokens: TokenizedSource, cut_D: np.ndarray, kept_DxP: np.ndarray) -> np.ndarray:
    parts, kept = np.arange(kept_DxP.size), kept_DxP.reshape(-1)
    cut = np.minimum(np.repeat(cut_D, self.each), kept)
    return tokens.of_parts().count_trained(parts, cut, kept).reshape(kept_DxP.shape)


def _from_the_start(
    tokens: TokenizedSource, sizes_DxP: np.ndarray, roles_DxP: np.ndarray, prompts_D: np.ndarray, seq_len: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """(the tokens up to which each part is kept, int64 [D, P], those left out at the beginning of each, int64 [D],
  whether it all fits), so that parts fit into a row that share the first `prompts_D` tokens; see `Units`."""
  most_D = np.maximum(common_beginnings(tokens, of_one=True) - 1, 0)  # the token before the first that is trained stays

  def cut(kept_DxP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(tokens to leave out, tokens that are still too many)"""
    there_D = (kept_DxP > 0).sum(axis=1)
    shared_D = np.where(there_D > 1, prompts_D, 0)
    excess_D = np.maximum(_places(kept_DxP, shared_D) - seq_len, 0)
    times_D = np.where(shared_D > 0, 1, np.maximum(there_D, 1))  # so often the prompt stands in the row
    cut_D = np.minimum(-(-excess_D // times_D), most_D)
    if tokens.images is not None:  # none is cut
      starts_D = np.array(tokens.parts[:-1]).reshape(kept_DxP.shape)[:, 0]
      cut_D = tokens.images.outside(starts_D + cut_D, after=True) - starts_D
    return cut_D, np.maximum(excess_D - times_D * cut_D, 0)

  kept_DxP = sizes_DxP.copy()
  cut_D, left_D = cut(kept_DxP)
  if kept_DxP.shape[1] > 1:
    spare_DxP = roles_DxP == MISMATCHED
    least_D = most_D + 1  # of its prompt no token is trained
    kept_DxP -= np.where(spare_DxP, left_D[:, None], 0)
    kept_DxP[spare_DxP & (kept_DxP <= least_D[:, None])] = 0
    cut_D, left_D = cut(kept_DxP)
  return kept_DxP, cut_D, (left_D == 0) & (cut_D <= most_D)


def common_beginnings(tokens: TokenizedSource, of_one: bool = False) -> np.ndarray:
  """How many tokens the parts of each document begin with alike, of which none is trained, int64 [D]. Parts without
  tokens do not count; 0 where a document has fewer than two, unless `of_one`: then all that are before its first."""
  each, sizes = tokens.parts_each, np.diff(tokens.parts)
  result = np.zeros(tokens.num_documents, np.int64)
  if each < 2 and not of_one or tokens.weights is None:
    return result
  first = 0
  while first < len(result):  # so many documents at a time as have WEIGHTS_READ tokens, or one
    last = max(first + 1, int(np.searchsorted(tokens.offsets, tokens.offsets[first] + WEIGHTS_READ, "right")) - 1)
    start, stop = int(tokens.offsets[first]), int(tokens.offsets[last])
    ids, trained = np.asarray(tokens.tokens[start:stop]), np.flatnonzero(tokens.weights[start:stop])
    begin_DxP = tokens.parts[first * each:last * each].reshape(-1, each) - start
    sizes_DxP = sizes[first * each:last * each].reshape(-1, each)
    # Tokens before the first that is trained; where none is, all.
    trained = np.append(trained, stop - start)
    before_DxP = np.minimum(trained[np.searchsorted(trained, begin_DxP)] - begin_DxP, sizes_DxP)
    there_DxP = sizes_DxP > 0
    alike_D = np.where(there_DxP, before_DxP, stop - start).min(axis=1)
    of_first_D = begin_DxP[np.arange(len(begin_DxP)), there_DxP.argmax(axis=1)]
    for begin_D, is_there_D in zip(begin_DxP.T, there_DxP.T, strict=True):
      doc, place = ragged(np.where(is_there_D, alike_D, 0))
      other = ids[begin_D[doc] + place] != ids[of_first_D[doc] + place]
      np.minimum.at(alike_D, doc[other], place[other])
    result[first:last] = np.where(there_DxP.sum(axis=1) > (0 if of_one else 1), alike_D, 0)
    first = last
  return result


def _places(sizes_DxP: np.ndarray, prompts_D: np.ndarray) -> np.ndarray:
  """The places of a row that parts take that share so many tokens of each, int64 [D]."""
  return prompts_D + np.maximum(sizes_DxP - prompts_D[:, None], 0).sum(axis=1)


def ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """(group, index within it) of the items of groups with `counts` items: two int64 arrays of their sum."""
  group = np.repeat(np.arange(len(counts)), counts)
  starts = np.cumsum(counts) - counts
  return group, np.arange(len(group)) - starts[group]


def _largest(sizes_DxP: np.ndarray, seq_len: int | np.ndarray) -> np.ndarray:
  """The largest number of tokens to which parts can be cut (one or two of them) to fit in a row, or in rows of [D]
  places, int64 [D]."""
  each = sizes_DxP.shape[1]
  return np.maximum(seq_len // each, seq_len - (each - 1) * sizes_DxP.min(axis=1))
