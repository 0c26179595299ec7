"""Vision towers that see images in their own shapes: those of Qwen2-VL (Wang et al. 2024, arXiv 2409.12191), Qwen2.5-VL
(Bai et al. 2025, arXiv 2502.13923), Qwen3-VL (Bai et al. 2025, arXiv 2511.21631), Gemma 4 and Pixtral (Agrawal et al.
2024, arXiv 2410.07073), in NNX.

B rows, N tiles of a row, S pixels of a tile's side, P patch size, M patches of a tile, D hidden size of the tower.

They are a Transformer over the patches of all of a row's images, which lie end to end; a patch sees those of its own
image, or of its window there. A patch of Qwen's has two frames: of a film two in a row, of an image it is the same
twice; it sees those of its own two frames. Rows and columns are told by rotary positions. Qwen2-VL has LayerNorm and a
plain MLP, Qwen2.5-VL RMSNorm, a gated MLP, and windows in most layers. Qwen3-VL is as Qwen2-VL, and adds learned
positions, a square table that is stretched over each image; features of some of its layers are given beside those of
the last. Gemma 4's layers are as those of its text model: norms before and after, on queries, keys and values, a gated
MLP. It has a learned position for each row and each column, and in some sizes linear layers that clip. Pixtral has
RMSNorm, before the first layer, too, a gated MLP, and no biases; rows and columns share the frequencies of its rotary
positions.
"""

import dataclasses
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import tiles, vit
from models.activations import GATED
from models.attention.context import LayerContext
from models.attention.mask import TokenIds
from models.attention.rope import axial_table
from models.blocks import Block, run_blocks, stack_blocks
from models.layers import Linear, Scope
from models.lookup import read_table
from models.residual import make_norm
from models.sharding.logical_axes import constrain
from models.spec import HALVES, Spec
from models.spec_vision import NATIVE, Vision
from models.tables import Embedding


class Tower(nnx.Module):
  """From tiles of images to the features of their patches."""

  def __init__(self, spec: Spec, scope: Scope):
    """`spec`: of the whole model, with a `vision`."""
    v = spec.vision
    self.native, self.own = NATIVE[v.tower], _own_spec(spec)
    self.patch_embed = Linear(scope / "patch_embed", self.native.frames * 3 * v.patch_size**2, v.hidden_size,
                              std=spec.init_std, bias=v.tower == "qwen3_vl")
    self.pre_norm = make_norm(self.own, scope / "pre_norm") if v.tower == "pixtral" else None
    learned, std = v.position_grid > 0, spec.init_std
    self.pos_embed = (Embedding(scope / "pos_embed", v.position_grid**2, v.hidden_size, std=std)
                      if learned and v.tower != "gemma4" else None)
    shape, axes = (2, v.position_grid, v.hidden_size), scope / "axis_embed"  # of columns, and of rows
    self.axis_embed = (nnx.Dict(embedding=axes.normal("embedding", shape, 0.02 if std is None else std))
                       if learned and v.tower == "gemma4" else None)
    self.blocks = stack_blocks(self.own, dataclasses.replace(scope / "blocks", clipped=v.clipped))
    self.vision, self.dtype = v, scope.compute_dtype

  def __call__(self, images: jax.Array, grid_BxNx6: jax.Array, remat: Callable, key: jax.Array | None = None
               ) -> tuple[jax.Array, list[jax.Array]]:
    """Features [B, N * M, D] of the patches, tile by tile, in the compute dtype: (of the last layer, and of those of
    `vision.deepstack_layers`).

    Args:
      images: tiles [B, N, S, S, 3 * F]; see `vit.pixels`.
      grid_BxNx6: what tiles they are; see models/tiles.py.
      remat: a `remat_policy`.
      key: for dropout on the adapters' input; None: no dropout.
    """
    v = self.vision
    x_BxPxD = self.patch_embed(self._patches(images))
    at = tiles.patches_of(grid_BxNx6, v.merged, v.window)
    if self.axis_embed is not None:
      columns, rows = self.axis_embed["embedding"][...]
      x_BxPxD = x_BxPxD + (read_table(columns, at.columns, x_BxPxD.dtype) + read_table(rows, at.rows, x_BxPxD.dtype))
    elif self.pos_embed is not None:
      x_BxPxD = x_BxPxD + _stretched(self.pos_embed.table(), v.position_grid, at).astype(x_BxPxD.dtype)
    if self.pre_norm is not None:
      x_BxPxD = self.pre_norm(x_BxPxD)
    x_BxPxD = constrain(x_BxPxD, "batch", "stream", "embed")
    halves = (at.columns, at.rows) if v.tower == "gemma4" else (at.rows, at.columns)
    table = axial_table(self.native.theta, self.own.head_dim, *halves, in_turns=v.tower == "pixtral")
    full_L = np.isin(np.arange(v.num_layers), v.full_layers) | (v.window is None)

    def run(x_BxPxD: jax.Array, start: int, stop: int) -> jax.Array:
      def layer(place: int, x_BxPxD: jax.Array, block: Block, index: jax.Array):
        layer_key = None if key is None else jax.random.fold_in(key, start + index)
        seen = jnp.where(jnp.asarray(full_L)[start + index], at.frames, at.windows)
        return block(x_BxPxD, LayerContext(TokenIds(seen, seen), table, key=layer_key))[0], None

      blocks = jax.tree.map(lambda p: p[start:stop], self.blocks)
      return run_blocks(dataclasses.replace(self.own, num_layers=stop - start), blocks, layer, remat, x_BxPxD)[0]

    deep = []
    for start, stop in itertools.pairwise((0, *(i + 1 for i in v.deepstack_layers))):
      x_BxPxD = run(x_BxPxD, start, stop)
      deep.append(x_BxPxD)
    last = v.deepstack_layers[-1] + 1 if deep else 0
    return run(x_BxPxD, last, v.num_layers) if last < v.num_layers else x_BxPxD, deep

  def _patches(self, images: jax.Array) -> jax.Array:
    """[B, N * M, frames * P * P * 3]: what the tower's frames have of each patch, end to end; see `vit.patches`."""
    B, N, S = images.shape[:3]
    given = images.shape[-1] // 3
    apart = images.reshape(B * N, S, S, given, 3).transpose(0, 3, 1, 2, 4).reshape(-1, S, S, 3)
    pixels = vit.patches(vit.pixels(apart, self.vision), self.vision.patch_size).astype(self.dtype)
    together = pixels.reshape(B * N, given, *pixels.shape[1:]).swapaxes(1, 2)
    whole = jnp.tile(together.reshape(B * N, pixels.shape[1], -1), self.native.frames // given)
    return whole.reshape(B, -1, whole.shape[-1])


def _own_spec(spec: Spec) -> Spec:
  """The tower's layers as `models.blocks` has them described."""
  own, norm = vit.tower_spec(spec), NATIVE[spec.vision.tower].norm
  own = dataclasses.replace(own, norm=norm, norm_bias=norm == "layernorm", rope_interleaved=False)
  if NATIVE[spec.vision.tower].frames == 1:  # Gemma 4, Pixtral
    own = dataclasses.replace(own, qkv_bias=False, attention_out_bias=False, mlp_bias=False)
  return own if spec.vision.tower != "gemma4" else dataclasses.replace(
      own, norm_position="sandwich", qk_norm=True, qk_norm_over="head", value_norm=True, attention_scale=1.0,
      positions=HALVES)


def _stretched(table: jax.Array, side: int, at: tiles.Patches) -> jax.Array:
  """The positions of patches [B, P, D], float32: the table [side * side, D], its corners at the image's corner patches,
  read between its entries (bilinear)."""
  def taps(place_BxP: jax.Array, size_BxP: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    exact_BxP = place_BxP.astype(jnp.float32) * (side - 1) / jnp.maximum(size_BxP - 1, 1)
    low_BxP = jnp.floor(exact_BxP)
    share_BxP, first_BxP = exact_BxP - low_BxP, low_BxP.astype(jnp.int32)
    return [(first_BxP, 1 - share_BxP), (jnp.minimum(first_BxP + 1, side - 1), share_BxP)]

  down, across = taps(at.rows, at.height), taps(at.columns, at.width)
  taken = [read_table(table, row * side + column, jnp.float32) * (share * part)[..., None]
           for row, share in down for column, part in across]
  return taken[0] + taken[1] + taken[2] + taken[3]


def flops_per_tile(vision: Vision, tiles_per_image: float) -> float:
  """Floating-point operations of matrix products in the tower for one tile, forward, in an image of so many."""
  v, M, D, native = vision, vision.patches, vision.hidden_size, NATIVE[vision.tower]
  mlp = 3 if v.activation in GATED else 2
  in_window = min(tiles_per_image, v.window**2) if v.window else tiles_per_image
  full = v.num_layers if not v.window else len(set(v.full_layers))
  seen = M * (full * tiles_per_image + (v.num_layers - full) * in_window)
  return float(2 * M * native.frames * 3 * v.patch_size**2 * D + v.num_layers * 2 * M * (4 * D * D + mlp * D *
               v.intermediate_size) + 4 * M * seen * D)
