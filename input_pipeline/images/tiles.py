"""Images that are cut: in tiles of one token each, or in squares of which each is seen as an image of its own.

S pixels of a side, F frames of a tile, N tiles. Of tiles a batch has `images` uint8 [B, N, S, S, 3 * F], those of all
of a row's images, each row by row, of videos one place in time after another, and `image_grid` int32 [B, N, 6]: the
number of the tile's image, above 0 (0: unused), the tile's row and column in it, how many rows and columns of tiles it
has, and its place in time (models/tiles.py reads them).
"""

import math

import numpy as np
from PIL import Image

from input_pipeline.images.video_file import Video

# Of the longer side to the shorter one.
MAX_RATIO = 200


def kept_size(width: int, height: int, size: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
  """To which width and height an image of that size is brought: its own shape, in multiples of a tile's.

  To the nearest multiples; where that gives more than `max_pixels` or fewer than `min_pixels`, to about as many, down
  or up to multiples. As the image processors of Qwen2-VL do it (arXiv 2409.12191, section 2.1).

  Raises:
    ValueError: one side is more than MAX_RATIO times the other.
  """
  return _size_within(1, 1, width, height, size, (min_pixels, max_pixels))


def video_size(frames: int | None, width: int, height: int, size: int, min_pixels: int, max_pixels: int
              ) -> tuple[int, int]:
  """To which width and height frames of that size are brought: as an image (`kept_size`), where `frames` is None; else
  so many frames have so many pixels in all, as the video processor of Qwen3-VL counts them.

  Raises:
    ValueError: one side is more than MAX_RATIO times the other.
  """
  if frames is None:
    return kept_size(width, height, size, min_pixels, max_pixels)
  if min(width, height) < size:
    scale = max(size / height, size / width)
    width, height = int(width * scale), int(height * scale)
  return _size_within(frames, round(frames / 2) * 2, width, height, size, (min_pixels, max_pixels))


def _size_within(frames: int, counted: int, width: int, height: int, size: int, pixels: tuple[int, int]
                 ) -> tuple[int, int]:
  """See `kept_size`; of so many frames, which count as `counted`, with the least and the most pixels of all."""
  if max(width, height) > MAX_RATIO * min(width, height):
    raise ValueError(f"{width} × {height} pixels, of which one side is more than {MAX_RATIO} times the other. Cut it, "
                     "or set input.images.on_error='drop'.")
  least, most = pixels
  sides = [round(side / size) * size for side in (width, height)]
  if counted * sides[0] * sides[1] > most:
    factor = math.sqrt(frames * height * width / most)
    sides = [max(size, math.floor(side / factor / size) * size) for side in (width, height)]
  elif counted * sides[0] * sides[1] < least:
    factor = math.sqrt(least / (frames * height * width))
    sides = [math.ceil(side * factor / size) * size for side in (width, height)]
  return sides[0], sides[1]


def fitted_size(width: int, height: int, size: int, max_pixels: int) -> tuple[int, int]:
  """To which width and height the image processor of Gemma 4 brings an image of that size: its own shape, as large as
  `max_pixels` allows, down to multiples of a tile's side. A side that would be shorter is one tile, and the other as
  many times longer as it was, or as many tiles as there may be."""
  factor = math.sqrt(max_pixels / (height * width))
  tiles = [math.floor(factor * side / size) for side in (width, height)]
  if not all(tiles):
    most, ratio = max_pixels // size**2, max(width, height) // min(width, height)
    tiles = [min(ratio, most) if tile else 1 for tile in tiles]
  return tiles[0] * size, tiles[1] * size


def limited_size(width: int, height: int, size: int, longest: int) -> tuple[int, int]:
  """To which width and height the image processor of Pixtral brings an image of that size: its own shape, with no side
  longer than `longest`, up to multiples of a tile's side."""
  ratio = max(width / longest, height / longest, 1.0)
  sides = (math.floor(side / ratio) if ratio > 1 else side for side in (width, height))
  columns, rows = ((side - 1) // size + 1 for side in sides)
  return columns * size, rows * size


def longest_size(width: float, height: float, side: int) -> tuple[int, int]:
  """The width and height of an image with its longer side brought to `side`, as the processor of SmolVLM does it: the
  other one is rounded down, and then up to an even number."""
  ratio = width / height
  other = int(side / ratio if width >= height else side * ratio)
  other = max(1, other + other % 2)
  return (side, other) if width >= height else (other, side)


def split_grid(width: int, height: int, side: int, size: int) -> tuple[int, int]:
  """How many rows and columns of squares of `size` pixels the processor of SmolVLM cuts an image into.

  With its longer side brought to `side` (`longest_size`), that side is brought up to a multiple of `size`, the other
  one along with it and then up to a multiple, too. (0, 0): one square holds it all, and it is not cut.
  """
  width, height = longest_size(width, height, side)
  ratio, long = width / height, math.ceil(max(width, height) / size)
  other = math.ceil(int(long * size / ratio if width >= height else long * size * ratio) / size)
  rows, columns = (max(other, 1), long) if width >= height else (long, max(other, 1))
  return (rows, columns) if long > 1 else (0, 0)


def squares(image: Image.Image, side: int, size: int, resample: Image.Resampling) -> np.ndarray:
  """The squares of `split_grid`, row by row, and last all of the image in one, uint8 [K, S, S, 3]; as the processor of
  SmolVLM does it, each step from the pixels of the one before."""
  rows, columns = split_grid(image.width, image.height, side, size)
  whole = image.resize(longest_size(image.width, image.height, side), resample)
  whole = whole.resize((max(columns, 1) * size, max(rows, 1) * size), resample)
  parts, _ = cut(np.array(whole, np.uint8), size)
  return np.concatenate([parts, np.array(whole.resize((size, size), resample), np.uint8)[None]]) if rows else parts


def cut(image: np.ndarray | Video, size: int, number: int = 1) -> tuple[np.ndarray, np.ndarray]:
  """(tiles [N, S, S, 3 * F], entries of `image_grid` [N, 6]) of an image, uint8 [rows * S, columns * S, 3], or a video.

  `number`: of the image in its row; places of a video that stand by themselves have numbers from there on.
  """
  video = image if isinstance(image, Video) else Video(image[None], np.zeros(1, np.int32))
  T, height, width, channels = video.pixels.shape
  rows, columns = height // size, width // size
  tiles = video.pixels.reshape(T, rows, size, columns, size, channels).swapaxes(2, 3)
  place, row, column = (part.reshape(-1) for part in np.indices((T, rows, columns), np.int32))
  grid = np.empty((T * rows * columns, 6), np.int32)
  grid[:, 0] = number + (place if video.times is None else 0)
  grid[:, 1], grid[:, 2], grid[:, 3:5] = row, column, (rows, columns)
  grid[:, 5] = 0 if video.times is None else video.times[place]
  return tiles.reshape(-1, size, size, channels), grid


def widened(tiles: np.ndarray, channels: int) -> np.ndarray:
  """Tiles [N, S, S, 3 * F] with so many channels: of one frame, which is there again."""
  return np.tile(tiles, channels // tiles.shape[-1])


def joined(tiles: np.ndarray, grid: np.ndarray) -> list[np.ndarray]:
  """The images, in the order of their numbers, of tiles [N, S, S, 3 * F] with entries of `image_grid` [N, 6]: uint8
  [H, W, 3], of videos with all frames from left to right. Two frames of a tile that are alike are one."""
  whole = []
  for number in np.unique(grid[grid[:, 0] > 0, 0]):
    own = grid[:, 0] == number
    size, (rows, columns) = tiles.shape[1], grid[own][0, 3:5]
    places = tiles[own].reshape(-1, rows, columns, size, size, tiles.shape[-1]).swapaxes(2, 3)
    pixels = places.reshape(len(places), rows * size, columns * size, -1)
    if len(pixels) == 1 and np.array_equal(pixels, widened(pixels[..., :3], pixels.shape[-1])):
      pixels = pixels[..., :3]
    whole.append(Video(pixels).picture())
  return whole
