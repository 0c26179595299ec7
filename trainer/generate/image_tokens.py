"""Which tokens of prompts and sequences are images, and which see one another in both directions.

A model with a tower for images puts features in place of its placeholder tokens (`config.model.vision.image_token`):
`tokens_per_image` for each image, in the order of the images. A batch says so with

    images       uint8 [B, I, S, S, 3], I a row at most; unused ones are 0
    image_index  int32 [B, T], k > 0: feature k - 1 of the row's images, laid end to end; 0: an ordinary token
    block_ids    int32 [B, T], tokens of a segment with the same number above 0 see one another; 0: only what is before

For models without a tower there is nothing of this.

B rows, T places of a row, I images of a row, S pixels of a side, n tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from input_pipeline.image_batches import IMAGE, PREFIX, ImageLayout
from trainer.errors import ConfigError
from trainer.generate.buckets import power


class Layout(NamedTuple):
  """What a model makes of images: see the keys of `config.model.vision`."""

  image_token: int | None
  tokens_per_image: int
  image_size: int
  attention: str


class PromptImages(NamedTuple):
  """The images of one text, uint8 [S, S, 3] each, and its arrays [n]; None where the model has no tower."""

  images: tuple[np.ndarray, ...] = ()
  image_index: np.ndarray | None = None
  block_ids: np.ndarray | None = None


def layout_of(model: Any) -> Layout | None:
  """What a model makes of images; None: it takes none."""
  vision = getattr(model, "vision", None)
  return vision and Layout(vision.image_token, vision.tokens_per_image, vision.image_size, vision.attention)


def slots(count: int) -> int:
  """I for rows of up to `count` images: 0, 1, 2, 4, 8, …, so that few shapes occur."""
  return power(count, 1) if count else 0


def shown(layout: Layout | None, prompts: Sequence[np.ndarray], images: Sequence[Sequence[np.ndarray]] | None,
          prefixes: Sequence[int] | None = None) -> list[PromptImages]:
  """What is shown with each prompt.

  Args:
    layout: of the model.
    prompts: ids [n].
    images: of each prompt; None: none.
    prefixes: how many tokens of each are its beginning; None: all. See `of_text`.

  Raises:
    ConfigError: see `of_text`; images for a model that takes none.
  """
  if images is not None and len(images) != len(prompts):
    raise ConfigError(f"found images for {len(images)} prompts, and {len(prompts)} prompts. Give a list for each "
                      "prompt, an empty one where it has none.")
  images = [()] * len(prompts) if images is None else images
  prefixes = [len(prompt) for prompt in prompts] if prefixes is None else prefixes
  return [of_text(layout, ids, some, prefix, f"prompt {number}")
          for number, (ids, some, prefix) in enumerate(zip(prompts, images, prefixes, strict=True))]


def of_text(layout: Layout | None, ids: np.ndarray, images: Sequence[np.ndarray], prefix: int, where: str
            ) -> PromptImages:
  """The images of one text.

  Args:
    layout: of the model.
    ids: the text, [n].
    images: in the order of their placeholders.
    prefix: only the first so many tokens may be placeholders, and are read in both directions where the model does so:
      a placeholder that the model itself has written is a token like others.
    where: for messages.

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
  images = tuple(np.asarray(image) for image in images)
  shape = (layout.image_size, layout.image_size, 3)
  for number, image in enumerate(images):
    if image.shape != shape or image.dtype != np.uint8:
      raise ConfigError(f"{where}, image {number}: found {image.dtype} {list(image.shape)}, the model wants uint8 "
                        f"{list(shape)}. Make it with input_pipeline.images.images.")
  is_image = (np.asarray(ids) == layout.image_token) & (np.arange(len(ids)) < prefix)
  found, wanted = int(is_image.sum()), len(images) * layout.tokens_per_image
  if found != wanted:
    raise ConfigError(f"{where} has {len(images)} image(s), for which it needs {wanted} tokens of the id "
                      f"{layout.image_token} ({layout.tokens_per_image} each), and {found} of them. Make the prompt "
                      "and its images together, with input_pipeline.examples.prompts.")
  index = np.where(is_image, np.cumsum(is_image), 0).astype(np.int32)
  return PromptImages(images, index, _blocks(layout, index, prefix))


def _blocks(layout: Layout, image_index: np.ndarray, prefix: int) -> np.ndarray:
  """Numbers of the blocks whose tokens see one another, int32 [n]."""
  if layout.attention == PREFIX:
    return (np.arange(len(image_index)) < prefix).astype(np.int32)
  if layout.attention == IMAGE:
    return np.where(image_index > 0, (image_index - 1) // layout.tokens_per_image + 1, 0).astype(np.int32)
  return np.zeros(len(image_index), np.int32)


def empty(layout: Layout | None, rows: int, length: int, most_images: int) -> dict[str, np.ndarray]:
  """The arrays of a batch without images, for up to I = `most_images` a row; of these none if it is 0."""
  if layout is None:
    return {}
  arrays = ImageLayout(most_images, layout.image_size, layout.tokens_per_image, layout.attention)
  return arrays.empty(rows, length)


def put(layout: Layout | None, batch: dict[str, np.ndarray], part: PromptImages, row: int, begin: int = 0,
        first: int = 0) -> None:
  """Writes what is shown with a text into a row of a batch that has room for it.

  Args:
    layout: of the model; None: there is nothing to write.
    batch: has the arrays of `empty`.
    part: of the text.
    row, begin: where the text begins.
    first: images that the row has already; the next ones follow them.
  """
  if layout is None:
    return
  for number, image in enumerate(part.images, first):
    batch["images"][row, number] = image
  for key, added in (("image_index", first * layout.tokens_per_image), ("block_ids", first)):
    values = getattr(part, key)
    if key in batch:
      batch[key][row, begin:begin + len(values)] = np.where(values > 0, values + added, 0)
