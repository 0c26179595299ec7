"""Images and films of any size as tiles, of which each is one token: where their patches stand, and what positions
tokens have.

B rows, T places, N tiles of a row, S pixels of a tile's side, F frames of a tile, M patches of a tile.

A batch holds the tiles of all of a row's images in `images` [B, N, S, S, 3 * F], one image after another, each row by
row, and in `image_grid` int32 [B, N, 6] what tile that is: the number of its image in the row, another than that of the
image before it (0: unused), its row and column in the image, how many rows and columns of tiles the image has, and its
place in time.

A film is an image with a time axis: its tiles have one number, in the order of time, and each begins anew at row and
column 0 where the next of its frames begin. F is 1 where no row has a film; else it is how many frames a patch of the
tower has, of which all are alike in an image.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Entries of image_grid, which input_pipeline/images/tiles.py writes.
IMAGE, ROW, COLUMN, ROWS, COLUMNS, TIME = range(6)
ENTRIES = 6


class Patches(NamedTuple):
  """Where patches [B, N * M] stand, tile by tile, and row by row in each: int32.

  frames: numbers of images, or of frames of a film that are one patch; 0: of none.
  height, width: of the patch's image, in patches.
  """

  frames: jax.Array
  windows: jax.Array
  rows: jax.Array
  columns: jax.Array
  height: jax.Array
  width: jax.Array


def patches_of(grid_BxNx6: jax.Array, merged: int, window: int | None) -> Patches:
  """Where the patches of tiles stand.

  Args:
    grid_BxNx6: `image_grid`.
    merged: patches of a side of a tile.
    window: tiles of a side of a window; None: a window is the frame.
  """
  image, row, column, rows, columns, _ = jnp.moveaxis(grid_BxNx6, -1, 0)
  first = (row == 0) & (column == 0) & (image > 0)
  frames = jnp.where(image > 0, jnp.cumsum(first, axis=1), 0)
  windows = frames
  if window is not None:
    # Counted over all frames of a row, so that no two of them share a number.
    across, down = -(-columns // window), -(-rows // window)
    before = jnp.cumsum(jnp.where(first, across * down, 0), axis=1) - across * down
    windows = jnp.where(image > 0, 1 + before + row // window * across + column // window, 0)
  inside = jnp.arange(merged**2)

  def each(of_tile_BxN: jax.Array, scale: int = 1, added: jax.Array | int = 0) -> jax.Array:
    return (of_tile_BxN[..., None] * scale + (0 * inside + added)).reshape(len(grid_BxNx6), -1)

  return Patches(each(frames), each(windows), each(row, merged, inside // merged),
                 each(column, merged, inside % merged), each(rows, merged), each(columns, merged))


def positions(grid_BxNx6: jax.Array, image_index_BxT: jax.Array, segment_ids_BxT: jax.Array) -> jax.Array:
  """The positions of tokens, int32 [B, T, 3]: time, row and column (M-RoPE, Qwen2-VL, arXiv 2409.12191, section 2.1).

  A text counts on all three. An image stands at one time, its tiles at their rows and columns from there on, and the
  text after it goes on behind the larger of its sides. So do the frames of a film, at their times; how long it is does
  not count (transformers from 5.3 on). Each segment begins at 0.
  """
  number_BxN = grid_BxNx6[..., IMAGE]
  first_BxN = jnp.diff(number_BxN, axis=1, prepend=0) != 0
  tile_BxTx7 = jnp.take_along_axis(jnp.concatenate([grid_BxNx6, first_BxN[..., None]], axis=-1),
                                   jnp.maximum(image_index_BxT - 1, 0)[..., None], axis=1, mode="clip")
  is_tile_BxT = image_index_BxT > 0
  extent_BxT = jnp.maximum(tile_BxTx7[..., ROWS], tile_BxTx7[..., COLUMNS])
  # An image's first tile stands for all of it.
  taken_BxT = jnp.where(is_tile_BxT, tile_BxTx7[..., ENTRIES] * extent_BxT, 1)
  ends_BxT = jnp.cumsum(taken_BxT, axis=1)
  first_BxT = jnp.diff(segment_ids_BxT, axis=1, prepend=segment_ids_BxT[:, :1] - 1) != 0
  before_BxT = jax.lax.cummax(jnp.where(first_BxT, ends_BxT - taken_BxT, 0), axis=1)
  begin_BxT = ends_BxT - before_BxT - jnp.where(is_tile_BxT, extent_BxT, 1)
  offsets_BxTx3 = jnp.stack([tile_BxTx7[..., axis] for axis in (TIME, ROW, COLUMN)], axis=-1)
  return begin_BxT[..., None] + jnp.where(is_tile_BxT[..., None], offsets_BxTx3, 0)
