"""Vision towers, SigLIP (Zhai et al. 2023, arXiv 2303.15343) and CLIP (Radford et al. 2021, arXiv 2103.00020), in NNX.

N images, S image size in pixels, P patch size, M patches of an image, D hidden size of the tower.

Both are a Transformer over an image's patches, all of which see one another: learned positions, LayerNorm before
attention and MLP, biases everywhere. CLIP has a class token before the patches, a norm after the embeddings, and no
bias in the patches' projection.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention.context import LayerContext
from models.attention.mask import TokenIds
from models.blocks import Block, run_blocks, stack_blocks
from models.layers import Linear, Scope
from models.residual import make_norm
from models.sharding.logical_axes import constrain
from models.spec import Spec
from models.spec_vision import Vision
from models.tables import Embedding


class Tower(nnx.Module):
  """From images to the features of their patches. The head that pools them into one vector is not part of it."""

  def __init__(self, spec: Spec, scope: Scope):
    """`spec`: of the whole model, with a `vision`."""
    v, std, clip = spec.vision, spec.init_std, spec.vision.tower == "clip"
    own = tower_spec(spec)
    self.patch_embed = Linear(scope / "patch_embed", 3 * v.patch_size**2, v.hidden_size, std=std, bias=not clip)
    self.pos_embed = Embedding(scope / "pos_embed", v.positions, v.hidden_size, std=std)
    self.cls_embed = Embedding(scope / "cls_embed", 1, v.hidden_size, std=std) if clip else None
    self.pre_norm = make_norm(own, scope / "pre_norm") if clip else None
    self.blocks = stack_blocks(own, scope / "blocks")
    self.final_norm = make_norm(own, scope / "final_norm")
    self.vision, self.dtype = v, scope.compute_dtype
    # Of the layers that the features come through; those after them are only kept.
    self.run = dataclasses.replace(own, num_layers=v.layers_run)

  def __call__(self, images: jax.Array, remat: Callable, key: jax.Array | None = None) -> jax.Array:
    """Features [N, M, D] of the patches, row by row, in the compute dtype.

    Args:
      images: see `pixels`.
      remat: a `remat_policy`.
      key: for dropout on the adapters' input; None: no dropout.
    """
    v = self.vision
    x_NxMxD = self.patch_embed(patches(pixels(images, v), v.patch_size).astype(self.dtype))
    if self.cls_embed is not None:
      first_Nx1xD = jnp.broadcast_to(self.cls_embed.table(), (len(x_NxMxD), 1, v.hidden_size))
      x_NxMxD = jnp.concatenate([first_Nx1xD, x_NxMxD], axis=1)
    x_NxMxD = constrain(x_NxMxD + self.pos_embed.table(), "batch", "stream", "embed")
    if self.pre_norm is not None:
      x_NxMxD = self.pre_norm(x_NxMxD)
    # One segment and one block: every patch sees every other.
    ones_NxM = jnp.ones(x_NxMxD.shape[:2], jnp.int32)

    def layer(place: int, x_NxMxD: jax.Array, block: Block, index: jax.Array):
      layer_key = None if key is None else jax.random.fold_in(key, index)
      return block(x_NxMxD, LayerContext(TokenIds(ones_NxM, ones_NxM), key=layer_key))[0], None

    blocks = jax.tree.map(lambda p: p[: v.layers_run], self.blocks)
    x_NxMxD, _ = run_blocks(self.run, blocks, layer, remat, x_NxMxD)
    if v.feature_layer == -1 and v.final_norm:
      x_NxMxD = self.final_norm(x_NxMxD)
    return x_NxMxD if self.cls_embed is None else x_NxMxD[:, 1:]


def tower_spec(spec: Spec) -> Spec:
  """The tower's layers as `models.blocks` has them described."""
  v = spec.vision
  head_dim = v.hidden_size // v.num_heads
  return dataclasses.replace(
      spec, num_layers=v.num_layers, hidden_size=v.hidden_size, intermediate_size=v.intermediate_size,
      num_heads=v.num_heads, num_kv_heads=v.num_heads, head_dim=head_dim, attention_scale=head_dim**-0.5,
      norm="layernorm", norm_eps=v.norm_eps, norm_scale_plus_one=False, norm_bias=True, norm_position="pre",
      activation=v.activation, positions="none", ropes={}, qkv_bias=True, attention_out_bias=True, mlp_bias=True,
      qk_norm=False, attention_logit_cap=None, window=None, layer_pattern=("global",), moe=None, dropout=0.0,
      residual_scale=1.0, parallel_blocks=False, attention_gate=False, attention_sinks=False,
      delta=None, mamba=None, latent=None, layer_scale=False, value_norm=False, global_attention=None,
      kv_shared_layers=0, double_wide_mlp=False, per_layer_size=0, laurel_rank=0, altup=None, activation_sparsity=())


def pixels(images: jax.Array, vision: Vision) -> jax.Array:
  """Normalised images [N, S, S, 3] float32.

  Args:
    images: [N, S, S, 3], red, green and blue; uint8, or floats that are normalised already.

  Raises:
    ValueError: another shape or dtype.
  """
  S = vision.image_size
  allowed = images.dtype == jnp.uint8 or jnp.issubdtype(images.dtype, jnp.floating)
  if images.shape[1:] != (S, S, 3) or not allowed:
    raise ValueError(f"images: found {images.dtype} {images.shape}, allowed: uint8 (0 to 255), or floats that are "
                     f"normalised, [..., {S}, {S}, 3] (model.vision.image_size = {S})")
  x = images.astype(jnp.float32)
  if images.dtype != jnp.uint8:
    return x
  return (x / 255.0 - jnp.asarray(vision.mean, jnp.float32)) / jnp.asarray(vision.std, jnp.float32)


def patches(images_NxSxSx3: jax.Array, size: int) -> jax.Array:
  """[N, M, P * P * 3]: patches from left to right, row by row; in each the rows of pixels, in these the pixels, with
  three channels each. So a convolution's kernel [P, P, 3, D], flattened to [P * P * 3, D], is what to multiply by.
  Pixels at the end that make no whole patch are left out, as by a convolution."""
  N, S = images_NxSxSx3.shape[:2]
  side = S // size
  whole = images_NxSxSx3[:, :side * size, :side * size]
  split = whole.reshape(N, side, size, side, size, 3).transpose(0, 1, 3, 2, 4, 5)
  return split.reshape(N, side * side, size * size * 3)


def flops_per_image(vision: Vision) -> float:
  """Floating-point operations of matrix products in the tower for one image, forward."""
  v, T, D = vision, vision.positions, vision.hidden_size
  per_layer = 2 * T * (4 * D * D + 2 * D * v.intermediate_size) + 4 * T * T * D
  return float(2 * v.patches * 3 * v.patch_size**2 * D + v.layers_run * per_layer)
