"""Texts as token ids, with weights that follow from the places of characters."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from input_pipeline.chat.image_parts import IMAGE
from input_pipeline.chat.image_placeholders import IMAGE_ID, ImageFormat
from input_pipeline.images.images import EncodedImage
from input_pipeline.remarks import ACROSS, LITERAL, Remark
from input_pipeline.tokenizer import special_tokens
from input_pipeline.tokenizer.tokenizer import Placed, Tokenizer

# (start, end, weight) of characters.
Span = tuple[int, int, float]


class Segment(NamedTuple):
  """A text that is tokenised as one: a rendered conversation, or a string.

  Special tokens are recognised in it, but for those that begin at the positions `inert`. `spans` do not overlap; all
  characters outside them have the weight `rest`.
  """

  text: str
  inert: tuple[int, ...] = ()
  spans: tuple[Span, ...] = ()
  rest: float = 0.0
  remarks: tuple[Remark, ...] = ()


class Tokens(NamedTuple):
  """Token ids (int32 [n]), their weights (float32 [n]), and what is to be counted."""

  ids: np.ndarray
  weights: np.ndarray
  remarks: tuple[Remark, ...] = ()


class _Piece(NamedTuple):
  """What is encoded at once: a segment's text, or the part of it between two images.

  `front` is a special token before it, whose id is taken away again: some tokenizers write a space before the first
  word of a text. The characters behind `skip` are the segment's from `start` to `stop`.
  """

  text: str
  inert: tuple[int, ...]
  front: str
  skip: int
  start: int
  stop: int


class SegmentEncoder:
  """Tokenises texts as `transformers` does, each as a whole; weights are those of the characters in a token.

  A token is trained if one of its characters is: one that reaches over the border of a span counts as inside.

  Args:
    images: what IMAGE in a text stands for; None: there is none.
  """

  def __init__(self, tokenizer: Tokenizer, images: ImageFormat | None = None):
    self._tokenizer, self._images = tokenizer, images
    self._begins = special_tokens.pattern(tuple(tokenizer.special_tokens), overlapping=True)
    self._literal = special_tokens.pattern(tuple(tokenizer.special_tokens))
    self._front = next(filter(self._stands_alone, tokenizer.special_tokens), "")

  def encode(self, examples: list[list[Segment]], images: Sequence[Sequence[EncodedImage]] | None = None
             ) -> list[Tokens]:
    """The tokens of each example, whose segments follow one another. An image is one IMAGE_ID, of weight 0, or of the
    weight of its place where it is cut into squares: that of the texts between them. `images`: those of each example,
    of which videos say what stands around them; others may follow."""
    shown = [iter(own) for own in images or [()] * len(examples)]
    pieces = [[self._pieces(segment, own) for segment in segments]
              for segments, own in zip(examples, shown, strict=True)]
    placed = iter(self._tokenizer.encode_placed([(p.text, p.inert) for some in pieces for of in some for p in of]))
    results = []
    for segments, some in zip(examples, pieces, strict=True):
      found = [self._tokens(segment, of, [_back(next(placed), piece) for piece in of])
               for segment, of in zip(segments, some, strict=True)]
      results.append(Tokens(np.concatenate([f.ids for f in found]), np.concatenate([f.weights for f in found]),
                            tuple(remark for f in found for remark in f.remarks)))
    return results

  def behind(self, token: str | None, segment: Segment, images: Sequence[EncodedImage] = ()) -> np.ndarray:
    """Ids, int32 [n], of a text with these images behind a special token; None: behind any. See `encode`."""
    front = token if token is not None and self._stands_alone(token) else self._front
    at = len(front)
    (found,) = self.encode([[Segment(front + segment.text, tuple(i + at for i in segment.inert))]], [images])
    return found.ids[1:] if front else found.ids

  def ordinary(self, text: str, weight: float = 0.0) -> Segment:
    """A text in which no special token is recognised."""
    return Segment(text, self.literals(text), rest=weight)

  def literals(self, text: str) -> tuple[int, ...]:
    """Where the characters of special tokens begin in a text."""
    return () if self._begins is None else tuple(match.start() for match in self._begins.finditer(text))

  def _stands_alone(self, token: str) -> bool:
    """Whether a special token is one id, and takes no space along that follows it."""
    one, two = self._tokenizer.encode_rendered_batch([token, token + " "])
    return len(one) == 1 and len(two) > 1

  def _pieces(self, segment: Segment, images: Iterator[EncodedImage]) -> list[_Piece]:
    text, inert = segment.text, segment.inert
    if self._images is None or IMAGE not in text:
      return [_Piece(text, inert, "", 0, 0, len(text))]
    texts, start, pieces = text.split(IMAGE), 0, []
    around = [self._images.around(next(images, None)) for _ in texts[1:]]
    for i, part in enumerate(texts):
      front, head = (self._front, around[i - 1][1]) if i else ("", "")
      tail = around[i][0] if i < len(around) else ""
      skip, stop = len(front) + len(head), start + len(part)
      here = tuple(at - start + skip for at in inert if start <= at < stop)
      pieces.append(_Piece(front + head + part + tail, here, front, skip, start, stop))
      start = stop + len(IMAGE)
    return pieces

  def _tokens(self, segment: Segment, pieces: list[_Piece], found: list[Placed]) -> Tokens:
    """Of the pieces of one segment, with an image between each two."""
    weighed = [_weigh(placed, segment) for placed in found]
    ids, weights = [weighed[0].ids], [weighed[0].weights]
    for before, tokens in zip(pieces[:-1], weighed[1:], strict=True):
      at = np.array([before.stop])
      image = _weigh(Placed(np.full(1, IMAGE_ID, np.int32), at, at + 1), segment)
      ids += [image.ids, tokens.ids]
      weights += [image.weights * self._images.between, tokens.weights]
    literals = [self._literal.match(segment.text, at) for at in segment.inert] if self._literal else []
    remarks = (*segment.remarks, *(remark for tokens in weighed for remark in tokens.remarks),
               *((LITERAL, match.group()) for match in literals if match))
    return Tokens(np.concatenate(ids), np.concatenate(weights), remarks)


def _back(placed: Placed, piece: _Piece) -> Placed:
  """Places in the segment, without the front. What stands around an image has the image's place."""
  first = 1 if piece.front else 0
  starts, ends = (places[first:] - piece.skip + piece.start for places in (placed.starts, placed.ends))
  return Placed(placed.ids[first:], np.clip(starts, piece.start - 1, piece.stop),
                np.clip(ends, piece.start, piece.stop + 1))


def _weigh(placed: Placed, segment: Segment) -> Tokens:
  weights = np.full(len(placed.ids), segment.rest, np.float32)
  remarks: list[Remark] = []
  for start, end, weight in sorted(segment.spans, key=lambda span: span[2] > 0):  # trained wins over not trained
    weights[(placed.starts < end) & (placed.ends > start)] = weight
    for border in (start, end) if weight != segment.rest else ():
      for i in np.flatnonzero((placed.starts < border) & (placed.ends > border)):
        remarks.append((ACROSS, segment.text[max(placed.starts[i], 0):placed.ends[i]]))
  return Tokens(placed.ids, weights, tuple(remarks))
