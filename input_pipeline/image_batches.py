"""Images in batches: the arrays, and what is written into them.

B rows, I images of a row at most (squares of them, where they are cut: `model.vision.split`), T places, N tokens of an
image, S pixels of a side, F frames of a tile, P pieces of documents.
"""

import hashlib
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from input_pipeline.cache import TokenizedSource
from input_pipeline.chat.image_placeholders import preprocess_of, sampling_of, tokens_per_image
from input_pipeline.fitting import Pieces, ragged
from input_pipeline.images import tiles
from input_pipeline.images.video_file import Video
from input_pipeline.images.workers import Task, decode
from trainer.errors import ConfigError

CAUSAL, PREFIX = "causal", "prefix"
# Values of `model.vision.attention` with which tokens of an image see one another.
OF_IMAGES = ("image", "local_image")


class ImageLayout(NamedTuple):
  """Arrays of batches: I (0: no row has an image), S, N, and what sees what (`model.vision.attention`).

  With `tiles`, each of the I is a tile of an image, of one token; see models/tiles.py. With `named`, there are the
  names of images: `image_names`, uint32 [B, T, 2], at each of its tokens 64 bits of the content of its file. `frames`:
  F, 2 where a row may have a video of a tower whose patches have two.
  """

  most: int
  size: int
  each: int
  attention: str
  tiles: bool = False
  named: bool = False
  frames: int = 1

  def empty(self, num_rows: int, seq_len: int) -> dict[str, np.ndarray]:
    """The arrays of a batch that are there besides those of texts, all 0."""
    arrays = {}
    if self.most:
      arrays["images"] = np.zeros((num_rows, self.most, self.size, self.size, 3 * self.frames), np.uint8)
      arrays["image_index"] = np.zeros((num_rows, seq_len), np.int32)
    if self.most and self.named:
      arrays["image_names"] = np.zeros((num_rows, seq_len, 2), np.uint32)
    if self.most and self.tiles:
      arrays["image_grid"] = np.zeros((num_rows, self.most, 6), np.int32)
    if self.attention == PREFIX or self.attention in OF_IMAGES and self.most:
      arrays["block_ids"] = np.zeros((num_rows, seq_len), np.int32)
    return arrays


class RowImages:
  """Writes images into batches, and which tokens are theirs.

  Args:
    augment: change images as `input.images.augment` has it, in each epoch differently.
    embedded: texts are embedded: with the attention `prefix` all tokens of one see one another, and images are named,
      so that equal ones are known.

  Raises:
    ConfigError: a value that is not allowed, or no room for an image in a row.
  """

  def __init__(self, config: ConfigDict, augment: bool, embedded: bool = False):
    self._embedded = embedded
    vision, options = config.model.vision, config.input.images
    self.each, self._attention, self._seed = tokens_per_image(vision), vision.attention, config.seed
    sampling = sampling_of(config)
    self._tokens = [vision.image_token, *([] if sampling is None else [vision.video.token])]
    self._frames = 1 if sampling is None else sampling.each
    self._workers, self._how = options.workers, preprocess_of(config, augment)
    if self._workers < 0:
      raise ConfigError(f"input.images.workers is {self._workers}; allowed: 0 (no processes) or more.")
    self.tiles = not self.each
    if self.each >= config.seq_len:
      raise ConfigError(f"seq_len={config.seq_len} has no room for an image, which takes {self.each} tokens. Set a "
                        "larger seq_len.")

  @property
  def augments(self) -> bool:
    return self._how.augments

  @property
  def fingerprint(self) -> list:
    """What decides the arrays of images."""
    return [*self._how, self.each, self._attention]

  def layout(self, most: int, videos: bool = False) -> ImageLayout:
    """That of batches with up to so many images in a row. `videos`: of which some are."""
    return ImageLayout(most, self._how.size, self.each or 1, self._attention, self.tiles, self._embedded,
                       self._frames if videos else 1)

  def fill(self, batch: dict[str, np.ndarray], where: np.ndarray, source: TokenizedSource, pieces: Pieces,
           flat: np.ndarray, epoch: int) -> None:
    """Writes the images of pieces that `batches.fill` has written.

    Args:
      batch: has the arrays of `ImageLayout.empty`.
      where, source, pieces: as given to it.
      flat: places that it gave.
    """
    sizes_P = pieces.end - pieces.begin
    if source.images is not None:
      self._fill_images(batch, where, source, pieces, flat, epoch)
    if self._attention == PREFIX:
      piece, position = ragged(sizes_P)
      trained = (batch["loss_weights"].reshape(-1)[flat] != 0) & (not self._embedded)
      first_P = sizes_P.copy()
      np.minimum.at(first_P, piece[trained], position[trained])
      batch["block_ids"].reshape(-1)[flat] = position < first_P[piece]

  def _fill_images(self, batch, where, source, pieces, flat, epoch):
    sizes_P = pieces.end - pieces.begin
    begin_P = source.offsets[pieces.doc] + pieces.begin
    first, last = source.images.between(begin_P, begin_P + sizes_P)
    piece, nth = ragged(last - first)
    use = first[piece] + nth
    if not len(use):
      return
    row, size = pieces.row[piece], source.images.tokens[use]
    _, slot = ragged(np.bincount(row, minlength=len(where)))
    before_P = np.cumsum(sizes_P) - sizes_P
    start = flat[before_P[piece] + source.images.places[use] - begin_P[piece]]
    image, nth = ragged(size)
    places = start[image] + nth
    if self._embedded:
      names = [hashlib.blake2b(source.images.content(u), digest_size=8).digest() for u in use.tolist()]
      batch["image_names"].reshape(-1, 2)[places] = np.frombuffer(b"".join(names), "<u4").reshape(-1, 2)[image]
    places = places[np.isin(batch["tokens"].reshape(-1)[places], self._tokens)]  # between its squares it has texts
    count, each = source.images.squares[use], self.each or 1
    before = np.cumsum(count) - count
    first = before - before[np.arange(len(use)) - slot]  # its first square among those of the row
    image, feature = ragged(count * each)
    index = first[image] * each + feature
    batch["image_index"].reshape(-1)[places] = index + 1
    if self._attention in OF_IMAGES and not self.tiles:
      batch["block_ids"].reshape(-1)[places] = index // each + 1
    key = (self._seed, source.name, epoch)
    tasks = [Task(source.images.content(u), self._how, (*key, u), f"source {source.name!r}: image {u} of its cache")
             for u in use.tolist()]
    for r, n, pixels in zip(where[row].tolist(), first.tolist(), decode(tasks, self._workers), strict=True):
      if self.tiles:
        number = 1 + (batch["image_grid"][r, n - 1, 0] if n else 0)
        cut, grid = tiles.cut(pixels, self._how.size, number)
        here = slice(n, n + len(cut))
        batch["images"][r, here] = tiles.widened(cut, batch["images"].shape[-1])
        batch["image_grid"][r, here] = grid
      else:
        squares = (pixels.pixels if isinstance(pixels, Video) else pixels).reshape(-1, *batch["images"].shape[2:])
        batch["images"][r, n:n + len(squares)] = squares
    if self._attention in OF_IMAGES and self.tiles:  # those of an image, or of a video's frame
      numbers = np.pad(batch["image_grid"][..., 0], ((0, 0), (1, 0)))
      batch["block_ids"][:] = np.take_along_axis(numbers, batch["image_index"], axis=1)
