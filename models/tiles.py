"""Images of any size as tiles, of which each is one token: where their patches stand, and what positions tokens have.

B rows, T places, N tiles of a row, S pixels of a tile's side, M patches of a tile.

A batch holds the tiles of all of a row's images in `images` [B, N, S, S, 3], one image after another, each row by row,
and in `image_grid` int32 [B, N, 5] what tile that is: the number of its image in the row from 1 on (0: unused), its row
and column in the image, and how many rows and columns of tiles the image has.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Entries of image_grid, which input_pipeline/images/tiles.py writes.
IMAGE, ROW, COLUMN, ROWS, COLUMNS = range(5)


class Patches(NamedTuple):
  """Where patches [B, N * M] stand, tile by tile, and row by row in each: int32.

  height, width: of the patch's image, in patches.
  """

  images: jax.Array
  windows: jax.Array
  rows: jax.Array
  columns: jax.Array
  height: jax.Array
  width: jax.Array


def patches_of(grid_BxNx5: jax.Array, merged: int, window: int | None) -> Patches:
  """Where the patches of tiles stand.

  Args:
    grid_BxNx5: `image_grid`.
    merged: patches of a side of a tile.
    window: tiles of a side of a window; None: a window is the image.
  """
  image, row, column, rows, columns = jnp.moveaxis(grid_BxNx5, -1, 0)
  windows = image
  if window is not None:
    # Counted over all images of a row, so that no two of them share a number.
    across, down = -(-columns // window), -(-rows // window)
    first = (row == 0) & (column == 0) & (image > 0)
    before = jnp.cumsum(jnp.where(first, across * down, 0), axis=1) - across * down
    windows = jnp.where(image > 0, 1 + before + row // window * across + column // window, 0)
  inside = jnp.arange(merged**2)

  def each(of_tile_BxN: jax.Array, scale: int = 1, added: jax.Array | int = 0) -> jax.Array:
    return (of_tile_BxN[..., None] * scale + (0 * inside + added)).reshape(len(grid_BxNx5), -1)

  return Patches(each(image), each(windows), each(row, merged, inside // merged),
                 each(column, merged, inside % merged), each(rows, merged), each(columns, merged))


def positions(grid_BxNx5: jax.Array, image_index_BxT: jax.Array, segment_ids_BxT: jax.Array) -> jax.Array:
  """The positions of tokens, int32 [B, T, 3]: time, row and column (M-RoPE, Qwen2-VL, arXiv 2409.12191, section 2.1).

  A text counts on all three. An image stands at one time, its tiles at their rows and columns from there on, and the
  text after it goes on behind the larger of its sides. Each segment begins at 0.
  """
  tile_BxTx5 = jnp.take_along_axis(grid_BxNx5, jnp.maximum(image_index_BxT - 1, 0)[..., None], axis=1, mode="clip")
  is_tile_BxT = image_index_BxT > 0
  row, column = tile_BxTx5[..., ROW], tile_BxTx5[..., COLUMN]
  extent_BxT = jnp.maximum(tile_BxTx5[..., ROWS], tile_BxTx5[..., COLUMNS])
  # An image's first tile stands for all of it.
  taken_BxT = jnp.where(is_tile_BxT, jnp.where((row == 0) & (column == 0), extent_BxT, 0), 1)
  ends_BxT = jnp.cumsum(taken_BxT, axis=1)
  first_BxT = jnp.diff(segment_ids_BxT, axis=1, prepend=segment_ids_BxT[:, :1] - 1) != 0
  before_BxT = jax.lax.cummax(jnp.where(first_BxT, ends_BxT - taken_BxT, 0), axis=1)
  begin_BxT = ends_BxT - before_BxT - jnp.where(is_tile_BxT, extent_BxT, 1)
  offsets_BxTx3 = jnp.stack([jnp.zeros_like(row), row, column], axis=-1)
  return begin_BxT[..., None] + jnp.where(is_tile_BxT[..., None], offsets_BxTx3, 0)
