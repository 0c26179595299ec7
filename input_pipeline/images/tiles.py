"""Images in tiles of one token each: to which size they are brought, and how they are cut and put into a batch.

S pixels of a tile's side, N tiles. A batch has `images` uint8 [B, N, S, S, 3], the tiles of all of a row's images, each
row by row, and `image_grid` int32 [B, N, 5]: the number of the tile's image, above 0 (0: unused), the tile's row and
column in it, and how many rows and columns of tiles it has (models/tiles.py reads them).
"""

import math

import numpy as np

# Of the longer side to the shorter one.
MAX_RATIO = 200


def kept_size(width: int, height: int, size: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
  """To which width and height an image of that size is brought: its own shape, in multiples of a tile's.

  To the nearest multiples; where that gives more than `max_pixels` or fewer than `min_pixels`, to about as many, down
  or up to multiples. As the image processors of Qwen2-VL do it (arXiv 2409.12191, section 2.1).

  Raises:
    ValueError: one side is more than MAX_RATIO times the other.
  """
  if max(width, height) > MAX_RATIO * min(width, height):
    raise ValueError(f"{width} × {height} pixels, of which one side is more than {MAX_RATIO} times the other. Cut it, "
                     "or set input.images.on_error='drop'.")
  sides = [round(side / size) * size for side in (width, height)]
  if sides[0] * sides[1] > max_pixels:
    factor = math.sqrt(width * height / max_pixels)
    sides = [max(size, math.floor(side / factor / size) * size) for side in (width, height)]
  elif sides[0] * sides[1] < min_pixels:
    factor = math.sqrt(min_pixels / (width * height))
    sides = [math.ceil(side * factor / size) * size for side in (width, height)]
  return sides[0], sides[1]


def longest_size(width: float, height: float, side: int) -> tuple[int, int]:
  """The width and height of an image with its longer side brought to `side`, as the processor of SmolVLM does it: the
  other one is rounded down, and then up to an even number."""
  ratio = width / height
  other = int(side / ratio if width >= height else side * ratio)
  other = max(1, other + other % 2)
  return (side, other) if width >= height else (other, side)


def cut(pixels: np.ndarray, size: int, number: int = 1) -> tuple[np.ndarray, np.ndarray]:
  """(tiles [N, S, S, 3], entries of `image_grid` [N, 5]) of an image, uint8 [rows * S, columns * S, 3].

  `number`: of the image in its row.
  """
  rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
  tiles = pixels.reshape(rows, size, columns, size, 3).swapaxes(1, 2).reshape(-1, size, size, 3)
  row, column = np.divmod(np.arange(rows * columns), columns)
  grid = np.empty((rows * columns, 5), np.int32)
  grid[:, 0], grid[:, 1], grid[:, 2], grid[:, 3:] = number, row, column, (rows, columns)
  return tiles, grid


def joined(tiles: np.ndarray, grid: np.ndarray) -> list[np.ndarray]:
  """The images, in the order of their numbers, of tiles [N, S, S, 3] with entries of `image_grid` [N, 5]."""
  whole = []
  for number in np.unique(grid[grid[:, 0] > 0, 0]):
    own = grid[:, 0] == number
    size, (rows, columns) = tiles.shape[1], grid[own][0, 3:]
    squares = tiles[own].reshape(rows, columns, size, size, 3)
    whole.append(squares.swapaxes(1, 2).reshape(rows * size, columns * size, 3))
  return whole
