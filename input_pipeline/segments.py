"""Parts of a text that are tokenised by themselves, with the weights of their tokens."""

from typing import NamedTuple

import numpy as np

from input_pipeline import special_tokens
from input_pipeline.image_texts import IMAGE, IMAGE_ID, ImageFormat
from input_pipeline.tokenizer import Tokenizer


class Segment(NamedTuple):
  """A part of an example that is tokenised by itself.

  `weight` is that of the tokens up to and including the `count`-th whose id is `end` (None: of all), `rest` that of
  those behind. Special tokens are recognised in `text`, but for those that begin at the positions `inert`.
  """

  text: str
  inert: tuple[int, ...] = ()
  weight: float = 0.0
  end: int | None = None
  count: int = 0
  rest: float = 0.0
  # Nothing but BOS stands before it.
  begins: bool = False


class SegmentEncoder:
  """Tokenises segments so that their ids, joined, continue one text.

  Some tokenizers write a space before the first word of a text; a segment is none that begins one. There a special
  token is put in front and its id taken away again.

  Args:
    tokenizer: what encodes.
    images: what IMAGE in a text stands for; None: there is none.
  """

  def __init__(self, tokenizer: Tokenizer, images: ImageFormat | None = None):
    self._tokenizer, self._images = tokenizer, images
    self._begins = special_tokens.pattern(tuple(tokenizer.special_tokens), overlapping=True)
    self._front = ""
    alone = tokenizer.encode_rendered("a")
    for special in tokenizer.special_tokens:
      one, two = (tokenizer.encode_rendered(special + text) for text in ("", " "))
      if len(one) == 1 and len(two) > 1:  # it does not swallow spaces behind it
        self._front = special if tokenizer.encode_rendered(special + "a")[1:].tolist() != alone.tolist() else ""
        break

  def encode(self, examples: list[list[Segment]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids int32 [n], weights float32 [n]) of each example. The tokens of images are IMAGE_ID, of weight 0."""
    pieces = [[self._pieces(segment) for segment in segments] for segments in examples]
    fronts = [[["" if i + j == 0 or j == 0 and s.begins else self._front for j in range(len(parts))]
               for i, (s, parts) in enumerate(zip(segments, some, strict=True))]
              for segments, some in zip(examples, pieces, strict=True)]
    plain = [front + piece.text for some, of_some in zip(fronts, pieces, strict=True)
             for given, parts in zip(some, of_some, strict=True)
             for front, piece in zip(given, parts, strict=True) if not piece.inert]
    ids = iter(self._tokenizer.encode_rendered_batch(plain) if plain else ())
    results = []
    for segments, some, of_some in zip(examples, fronts, pieces, strict=True):
      weighted = []
      for segment, given, parts in zip(segments, some, of_some, strict=True):
        found = []
        for front, piece in zip(given, parts, strict=True):
          if piece.inert:
            here = self._tokenizer.encode_rendered(front + piece.text, [at + len(front) for at in piece.inert])
          else:
            here = next(ids)
          found.append(here[1:] if front else here)
        weighted.append(_weighted(self._joined(found), segment))
      results.append((np.concatenate([p[0] for p in weighted]), np.concatenate([p[1] for p in weighted])))
    return results

  def _pieces(self, segment: Segment) -> list[Segment]:
    """The texts between images, with what stands around each image."""
    if self._images is None or IMAGE not in segment.text:
      return [segment]
    texts, start, pieces = segment.text.split(IMAGE), 0, []
    for i, text in enumerate(texts):
      head = self._images.after if i else ""
      tail = self._images.before if i + 1 < len(texts) else ""
      inert = tuple(at - start + len(head) for at in segment.inert if start <= at < start + len(text))
      pieces.append(Segment(head + text + tail, inert))
      start += len(text) + len(IMAGE)
    return pieces

  def _joined(self, found: list[np.ndarray]) -> np.ndarray:
    """Ids of pieces with an image between each two."""
    if len(found) == 1:
      return found[0]
    image = np.full(self._images.each, IMAGE_ID, np.int32)
    return np.concatenate([part for i, ids in enumerate(found) for part in ([image, ids] if i else [ids])])

  def ordinary(self, text: str, weight: float) -> Segment:
    """A text in which no special token is recognised."""
    inert = () if self._begins is None else tuple(match.start() for match in self._begins.finditer(text))
    return Segment(text, inert, weight)


def _weighted(ids: np.ndarray, segment: Segment) -> tuple[np.ndarray, np.ndarray]:
  weights = np.full(len(ids), segment.weight, np.float32)
  if segment.end is not None:
    places = np.flatnonzero(ids == segment.end)
    weights[places[segment.count - 1] + 1 :] = segment.rest
  weights[ids == IMAGE_ID] = 0
  return ids, weights
