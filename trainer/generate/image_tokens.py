"""Which tokens of prompts and sequences are images, and which see one another in both directions.

A model with a tower for images puts features in place of its placeholder tokens (`config.model.vision.image_token`):
`tokens_per_image` for each image, in the order of the images. A batch says so with

    images       uint8 [B, I, S, S, 3 * F], I a row at most; unused ones are 0
    image_index  int32 [B, T], k > 0: feature k - 1 of the row's images, laid end to end; 0: an ordinary token
    image_grid   int32 [B, I, 6], only where the model sees tiles (`tiles`): what each of the I is then a tile of, one
                 token each (input_pipeline/images/tiles.py)
    block_ids    int32 [B, T], tokens of a segment with the same number above 0 see one another; 0: only what is before

For models without a tower there is nothing of this.

B rows, T places of a row, I images of a row, S pixels of a side, F frames of a tile
(input_pipeline/images/video_file.py), n tokens.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from input_pipeline.batches import empty_batch
from input_pipeline.image_batches import OF_IMAGES, PREFIX, ImageLayout
from input_pipeline.images import tiles
from input_pipeline.images.video_file import Shown, Video
from trainer.errors import ConfigError
from trainer.generate.buckets import power


class Layout(NamedTuple):
  """What a model makes of images: see the keys of `config.model.vision`."""

  image_token: int | None
  tokens_per_image: int
  image_size: int
  attention: str
  tiles: bool = False
  video_token: int | None = None
  frames: int = 1

  @property
  def held(self) -> list[int]:
    """The ids that hold places of images and videos."""
    return [token for token in (self.image_token, self.video_token) if token is not None]


class PromptImages(NamedTuple):
  """The images of one text, their squares or tiles, uint8 [S, S, 3 * F] each, and its arrays [n]; None where the model
  has none.

  `image_grid` [I, 6]: of tiles.
  """

  images: tuple[np.ndarray, ...] = ()
  image_index: np.ndarray | None = None
  block_ids: np.ndarray | None = None
  image_grid: np.ndarray | None = None

  @property
  def digest(self) -> bytes:
    """Of the images and of the tokens that see one another: equal texts that have it in common are read alike."""
    digest = hashlib.blake2b(b"".join(image.tobytes() for image in self.images), digest_size=16)
    for part in (self.image_grid, None if self.block_ids is None else np.trim_zeros(self.block_ids, "b")):
      digest.update(b"-" if part is None else part.tobytes())
    return digest.digest()

  @property
  def frames(self) -> int:
    """F: 1 where none is of a video."""
    return max((image.shape[-1] // 3 for image in self.images), default=1)

  @property
  def causal(self) -> bool:
    """Whether there are no images, and each token sees only those before it."""
    return not self.images and (self.block_ids is None or not self.block_ids.any())


def layout_of(model: Any) -> Layout | None:
  """What a model makes of images; None: it takes none."""
  vision = getattr(model, "vision", None)
  if vision is None:
    return None
  video = vision.video
  return Layout(vision.image_token, vision.tokens_per_image, vision.image_size, vision.attention, vision.native,
                None if video is None else video.token, 1 if video is None else vision.frames)


def slots(count: int) -> int:
  """I for rows of up to `count` images: 0, 1, 2, 4, 8, …, so that few shapes occur."""
  return power(count, 1) if count else 0


def shown(layout: Layout | None, prompts: Sequence[np.ndarray], images: Sequence[Sequence[Shown]] | None,
          prefixes: Sequence[int] | None = None, sampled: Sequence[np.ndarray] | None = None) -> list[PromptImages]:
  """What is shown with each prompt.

  Args:
    prompts: ids [n].
    images: of each prompt; None: none.
    prefixes: how many tokens of each are its beginning; None: all. See `of_text`.
    sampled: bool [n] of each, which the model has written; None: those behind its prefix.

  Raises:
    ConfigError: see `of_text`; images for a model that takes none.
  """
  if images is not None and len(images) != len(prompts):
    raise ConfigError(f"found images for {len(images)} prompts, and {len(prompts)} prompts. Give a list for each "
                      "prompt, an empty one where it has none.")
  images = [()] * len(prompts) if images is None else images
  prefixes = [len(prompt) for prompt in prompts] if prefixes is None else prefixes
  written = [None] * len(prompts) if sampled is None else sampled
  return [of_text(layout, ids, some, prefix, f"prompt {number}", own)
          for number, (ids, some, prefix, own) in enumerate(zip(prompts, images, prefixes, written, strict=True))]


def of_text(layout: Layout | None, ids: np.ndarray, images: Sequence[Shown], prefix: int, where: str,
            sampled: np.ndarray | None = None) -> PromptImages:
  """The images of one text.

  Args:
    ids: the text, [n].
    images: in the order of their placeholders, each uint8 [S, S, 3], [K, S, S, 3] of K squares or, of tiles, multiples
      of S; or a video.
    prefix: the first so many tokens are read in both directions where the model does so.
    sampled: bool [n], the tokens that the model itself has written, of which a placeholder is a token like others.
      None: all behind the prefix.

  Raises:
    ConfigError: images of another kind or number than the text and the model want.
  """
  if layout is None:
    if len(images):
      raise ConfigError(f"{where} has {len(images)} image(s), but the model has no tower for images "
                        "(config.model.vision.tower is none). Leave them out, or use a model that takes images.")
    return PromptImages()
  if len(images) and layout.image_token is None:
    raise ConfigError("model.vision.image_token is not set: the id of the token that holds an image's places. Set it.")
  given = len(images)
  apart = _apart(layout, images, where)
  grid, squares = None, [image for image in apart if isinstance(image, np.ndarray)]
  kinds: list[int | None] = []
  if layout.tiles:
    cut: list[tuple[np.ndarray, np.ndarray]] = []
    for image in apart:
      cut.append(tiles.cut(image, layout.image_size, 1 + (cut[-1][1][-1, 0] if cut else 0)))
      kinds += [layout.video_token if isinstance(image, Video) else layout.image_token] * len(cut[-1][0])
    squares = [tile for some, _ in cut for tile in some]
    grid = np.concatenate([np.zeros((0, 6), np.int32), *(grid for _, grid in cut)])
  own = np.arange(len(ids)) >= prefix if sampled is None else sampled
  is_image = np.isin(np.asarray(ids), layout.held) & ~own
  found, wanted = int(is_image.sum()), len(squares) * layout.tokens_per_image
  if found == wanted and layout.tiles and (odd := np.flatnonzero(np.asarray(ids)[is_image] != kinds)).size:
    raise ConfigError(f"{where}: the id of an image, {layout.image_token}, and that of a video, {layout.video_token}, "
                      f"are not in the order of its images and videos: its tile {odd[0]} is of the other. Make the "
                      "prompt and its images together, with input_pipeline.examples.prompts.")
  if found != wanted:
    of_squares = f", of {len(squares)} squares" if len(squares) > given and not layout.tiles else ""
    side = layout.image_size
    each = f"one for each {side} × {side} pixels" if layout.tiles else f"{layout.tokens_per_image} each"
    raise ConfigError(f"{where} has {given} image(s), for which it needs {wanted} tokens of the id "
                      f"{' or '.join(map(str, layout.held))} ({each}{of_squares}), and {found} of them. Make the "
                      "prompt and its images together, with input_pipeline.examples.prompts.")
  index = np.where(is_image, np.cumsum(is_image), 0).astype(np.int32)
  return PromptImages(tuple(squares), index, _blocks(layout, index, prefix, grid), grid)


def _apart(layout: Layout, images: Sequence[Shown], where: str) -> list[Shown]:
  """Images, their squares, and videos of a model that sees tiles. Raises ConfigError: one of another kind."""
  S, shape, found = layout.image_size, (layout.image_size, layout.image_size, 3), list[Shown]()
  for number, image in enumerate(images):
    if isinstance(image, Video) and layout.tiles:
      if layout.video_token is None or image.pixels.shape[-1] != 3 * layout.frames:
        seen = f"{layout.frames} of them" if layout.video_token is not None else "no videos"
        raise ConfigError(f"{where}, image {number}: is a video of {image.pixels.shape[-1] // 3} frames in a place, "
                          f"and the model sees {seen} (model.vision.video.token). Make it with "
                          "input_pipeline.examples.")
      found.append(image)
      continue
    pixels = image.pixels if isinstance(image, Video) else np.asarray(image)
    for square in pixels if pixels.ndim == 4 and not layout.tiles else (pixels,):
      kept = layout.tiles and square.ndim == 3 and not (square.shape[0] % S or square.shape[1] % S)
      if square.shape != shape and not kept or square.shape[-1] != 3 or square.dtype != np.uint8:
        multiples = ", or multiples of the first two" if layout.tiles else ""
        raise ConfigError(f"{where}, image {number}: found {square.dtype} {list(square.shape)}, the model wants uint8 "
                          f"{list(shape)}{multiples}. Make it with input_pipeline.images.images.")
      found.append(square)
  return found


def _blocks(layout: Layout, image_index: np.ndarray, prefix: int, grid: np.ndarray | None) -> np.ndarray:
  """Numbers of the blocks whose tokens see one another, int32 [n]."""
  if layout.attention == PREFIX:
    return (np.arange(len(image_index)) < prefix).astype(np.int32)
  if layout.attention in OF_IMAGES:
    before = np.maximum(image_index - 1, 0)
    numbers = before // layout.tokens_per_image + 1 if grid is None else np.append(grid[:, 0], 0)[before]
    return np.where(image_index > 0, numbers, 0).astype(np.int32)
  return np.zeros(len(image_index), np.int32)


def empty(layout: Layout | None, rows: int, length: int, most_images: int, frames: int = 1) -> dict[str, np.ndarray]:
  """The arrays of a batch without images, for up to I = `most_images` a row, of F = `frames`; of these none if it is
  0."""
  if layout is None:
    return {}
  arrays = ImageLayout(most_images, layout.image_size, layout.tokens_per_image, layout.attention, layout.tiles,
                       frames=frames)
  return arrays.empty(rows, length)


def put(layout: Layout | None, batch: dict[str, np.ndarray], part: PromptImages, row: int, begin: int = 0,
        first: int = 0) -> None:
  """Writes what is shown with a text into a row of a batch that has room for it.

  Args:
    layout: of the model; None: there is nothing to write.
    batch: has the arrays of `empty`.
    row, begin: where the text begins.
    first: images that the row has already; the next ones follow them.
  """
  if layout is None:
    return
  for number, image in enumerate(part.images, first):
    batch["images"][row, number] = np.tile(image, batch["images"].shape[-1] // image.shape[-1])
  if part.image_grid is not None and len(part.image_grid):
    # Numbers of images in a row need only differ, and no row has more images than tiles.
    batch["image_grid"][row, first:first + len(part.images)] = part.image_grid + [first, 0, 0, 0, 0, 0]
  for key, added in (("image_index", first * layout.tokens_per_image), ("block_ids", first)):
    values = getattr(part, key)
    if key in batch:
      batch[key][row, begin:begin + len(values)] = np.where(values > 0, values + added, 0)


def batch_of_texts(layout: Layout | None, rows: int, length: int, pad_id: int, texts: Sequence[np.ndarray],
                   parts: Sequence[PromptImages]) -> dict[str, np.ndarray]:
  """A batch (`input_pipeline.batches.empty_batch`) with a text of ids and what is shown with it in each row, and rows
  without one behind them."""
  batch = empty_batch(rows, length, pad_id)
  most = slots(max(len(part.images) for part in parts))
  batch |= empty(layout, rows, length, most, max(part.frames for part in parts))
  for row, (ids, part) in enumerate(zip(texts, parts, strict=True)):
    batch["tokens"][row, :len(ids)], batch["positions"][row, :len(ids)] = ids, np.arange(len(ids))
    batch["segment_ids"][row, :len(ids)] = 1
    put(layout, batch, part, row)
  return batch


def images_of(layout: Layout | None, batch: Mapping[str, np.ndarray], row: int) -> tuple[list[np.ndarray], np.ndarray]:
  """(the images of a row of a batch, uint8 [H, W, 3], those that are used, of a video its frames from left to right; of
  which of them, from 1 on, each token is, int [T], 0: of none)."""
  if layout is None or "images" not in batch:
    return [], np.zeros_like(batch["tokens"][row])
  index_T = batch["image_index"][row]
  if not layout.tiles:
    numbers_T = -(-index_T // layout.tokens_per_image)
    return list(batch["images"][row, :numbers_T.max(initial=0)]), numbers_T
  grid = batch["image_grid"][row]
  numbers = np.unique(grid[grid[:, 0] > 0, 0])
  own_T = np.searchsorted(numbers, grid[np.maximum(index_T - 1, 0), 0]) + 1
  return tiles.joined(batch["images"][row], grid), np.where(index_T > 0, own_T, 0)
