"""Images in a text: the projector from a tower's features to embeddings, which tokens they replace, who sees whom.

B batch, T length, I images of a row at most, S image size, M patches of an image, K tokens of an image, D hidden size
(of the tower in the projector's input, else of the decoder).

What a batch with images has besides `tokens`, `positions` and `segment_ids`:

  images        [B, I, S, S, 3], uint8, or floats that are normalised already; unused ones are 0
  image_index   int32 [B, T]; 0: an ordinary token; k > 0: feature k - 1 of the row takes the place of the token's
                embedding, image i's being those from i * K on. Without it, the tokens that are
                `model.vision.image_token` take the features in order
  block_ids     int32 [B, T]: see `models.attention.dispatch.attention`. Without it, `model.vision.attention` says who
                sees whom
  prefix_length int32 [B] or a number: with the attention `prefix`, how many tokens of each text see one another; in
                place of `block_ids`
  image_grid    int32 [B, I, 6]: where a tower sees tiles, of which each is an "image" of one token here, see
                models/tiles.py; `images` are then [B, I, S, S, 3 * F] with S the side of a tile, of F frames
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models import tiles, vit, vit_native
from models.activations import UNGATED
from models.layers import Linear, Norm, Scope, rms_normalised
from models.lookup import read_table
from models.sharding.logical_axes import constrain
from models.spec import Spec
from models.spec_vision import NATIVE, OF_IMAGES, Vision


class Merger(nnx.Module):
  """From a tower's features of patches to one feature of each tile, for DeepStack: as the projector `merge`, but
  normalised after the patches of a tile are end to end."""

  def __init__(self, spec: Spec, scope: Scope):
    v = spec.vision
    self.wide = v.hidden_size * v.patches
    self.norm = Norm(scope / "norm", self.wide, kind="layernorm", eps=v.norm_eps, plus_one=False, bias=True)
    self.up = Linear(scope / "up", self.wide, self.wide, std=spec.init_std, bias=True)
    self.down = Linear(scope / "down", self.wide, spec.hidden_size, std=spec.init_std, bias=True)

  def __call__(self, x_BxPxD: jax.Array, key: jax.Array | None) -> jax.Array:
    """[B, N, D]. `key`: see `Projector`."""
    x_BxNxD = self.norm(x_BxPxD.reshape(len(x_BxPxD), -1, self.wide))
    return self.down(UNGATED["gelu_exact"](self.up(x_BxNxD, key)), key)


class Projector(nnx.Module):
  """From the tower's features to what stands in place of embeddings, and to what is added in the first layers."""

  def __init__(self, spec: Spec, scope: Scope):
    v, D, std = spec.vision, spec.hidden_size, spec.init_std
    bias = v.projector_bias and v.projector not in ("pool", "shuffle", "mean")
    mlp, pool, merge, both = (v.projector == kind for kind in ("mlp", "pool", "merge", "merge_mlp"))
    wide = v.hidden_size * (v.patches if merge else v.patches // v.tokens_per_image if v.projector == "shuffle" else 1)
    hidden, two = wide if merge else D, mlp or merge or both
    # Of the patches of a tile, end to end, one of their size.
    self.merge = Linear(scope / "merge", v.hidden_size * v.patches, wide, std=std, bias=False) if both else None
    self.up = Linear(scope / "up", wide, hidden, std=std, bias=bias) if two else None
    self.down = Linear(scope / "down", hidden, D, std=std, bias=bias) if two else None
    self.linear = None if two else Linear(scope / "linear", wide, D, std=std, bias=bias)
    norm: dict[str, Any] = dict(kind="rmsnorm", eps=v.norm_eps, plus_one=spec.norm_scale_plus_one)
    if merge:
      norm |= dict(kind=NATIVE[v.tower].norm, plus_one=False, bias=NATIVE[v.tower].norm == "layernorm")
    if both:
      norm |= dict(eps=spec.norm_eps, plus_one=False)
    self.norm = Norm(scope / "norm", v.hidden_size, **norm) if pool or merge or both else None
    standard = scope / "standard"
    self.standard = nnx.Dict({name: standard.constant(name, (v.hidden_size,), value) for name, value in (
        ("bias", 0.0), ("scale", 1.0))}) if v.standardized else None
    deep = scope / "deepstack"
    # Stacked, as layers are.
    self.deepstack = jax.vmap(lambda i: Merger(spec, dataclasses.replace(deep, layer=i)))(
        jnp.arange(spec.deepstack)) if spec.deepstack else None
    self.vision, self.features = v, D

  def __call__(self, x_NxMxD: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """[N, K, D] in the dtype of `x`. `key`: for dropout on the adapters' input; None: no dropout."""
    v = self.vision
    if v.projector == "merge":
      x_NxMxD = self.norm(x_NxMxD).reshape(len(x_NxMxD), -1, v.patches * v.hidden_size)
    elif self.merge is not None:  # each feature of all patches, and then the next
      x_NxMxD = self.norm(x_NxMxD).reshape(len(x_NxMxD), -1, v.patches, v.hidden_size).swapaxes(2, 3)
      x_NxMxD = self.merge(x_NxMxD.reshape(*x_NxMxD.shape[:2], -1), key)
    elif v.projector == "mean":
      x_NxMxD = rms_normalised(self._means(x_NxMxD), v.norm_eps)
    elif self.norm is not None:
      x_NxMxD = self.norm(_squares(x_NxMxD, v.tokens_per_image).astype(jnp.float32).mean(2).astype(x_NxMxD.dtype))
    elif v.projector == "shuffle":
      x_NxMxD = _squares(x_NxMxD, v.tokens_per_image).reshape(len(x_NxMxD), v.tokens_per_image, -1)
    if self.linear is not None:
      y_NxKxD = self.linear(x_NxMxD, key)
    else:
      y_NxKxD = self.down(UNGATED[v.projector_activation](self.up(x_NxMxD, key)), key)
    return y_NxKxD if v.feature_scale == 1.0 else y_NxKxD * jnp.asarray(v.feature_scale, y_NxKxD.dtype)

  def _means(self, x_BxPxD: jax.Array) -> jax.Array:
    """Of a tile's patches [B, N, D], times sqrt(D), and then made standard where a checkpoint says how (Gemma 4)."""
    v = self.vision
    y_BxNxD = x_BxPxD.astype(jnp.float32).reshape(len(x_BxPxD), -1, v.patches, v.hidden_size).mean(2)
    y_BxNxD = y_BxNxD * v.hidden_size**0.5
    if self.standard is not None:
      bias, scale = jax.lax.stop_gradient([self.standard[name][...] for name in ("bias", "scale")])  # buffers of theirs
      y_BxNxD = (y_BxNxD - bias.astype(jnp.float32)) * scale.astype(jnp.float32)
    return y_BxNxD.astype(x_BxPxD.dtype)


def make_tower(spec: Spec, scope: Scope) -> "vit.Tower | vit_native.Tower":
  """The tower of that spec, which has one."""
  return (vit_native if spec.vision.native else vit).Tower(spec, scope)


def features(tower: "vit.Tower | vit_native.Tower", projector: Projector, images_BxIxSxSx3: jax.Array, remat: Callable,
             key: jax.Array | None = None, grid_BxIx6: jax.Array | None = None) -> tuple[jax.Array, jax.Array | None]:
  """The features of each row's images [B, I * K, D], one image after another; and those that are added to what the
  first layers give [layers, B, I * K, D], None: there are none. `grid_BxIx6`: of a tower of tiles."""
  B, D = len(images_BxIxSxSx3), projector.features
  if isinstance(tower, vit_native.Tower):
    x_BxPxD, deep = tower(images_BxIxSxSx3, grid_BxIx6, remat, key)
    return constrain(projector(x_BxPxD, key), "batch", None, "embed"), _deepstack(projector, deep, key)
  x_NxMxD = tower(images_BxIxSxSx3.reshape(-1, *images_BxIxSxSx3.shape[2:]), remat, key)
  return constrain(projector(x_NxMxD, key).reshape(B, -1, D), "batch", None, "embed"), None


def _deepstack(projector: Projector, deep: Sequence[jax.Array], key: jax.Array | None) -> jax.Array | None:
  if not deep:
    return None

  def merged(n: int, x_BxPxD: jax.Array) -> jax.Array:
    own = None if key is None else jax.random.fold_in(key, n)
    return jax.tree.map(lambda p: p[n], projector.deepstack)(x_BxPxD, own)

  return jnp.stack([constrain(merged(n, x_BxPxD), "batch", None, "embed") for n, x_BxPxD in enumerate(deep)])


def place(x_BxTxD: jax.Array, features_BxFxD: jax.Array, image_index_BxT: jax.Array) -> jax.Array:
  """The embeddings with features in place of those that `image_index` marks.

  A number beyond the row's features gives NaN, which the finite guard reports, rather than another image's feature.
  """
  rows_BxTxD = _rows(features_BxFxD, image_index_BxT).astype(x_BxTxD.dtype)
  return jnp.where((image_index_BxT > 0)[..., None], rows_BxTxD, x_BxTxD)


def add(x_BxTxD: jax.Array, features_LxBxFxD: jax.Array, layer: jax.Array, image_index_BxT: jax.Array) -> jax.Array:
  """What a layer gives, with its features added at the tokens of images; those of a layer beyond L as they are."""
  last = len(features_LxBxFxD) - 1
  features_BxFxD = jax.lax.dynamic_index_in_dim(features_LxBxFxD, jnp.minimum(layer, last), keepdims=False)
  rows_BxTxD = _rows(features_BxFxD, image_index_BxT).astype(x_BxTxD.dtype)
  y_BxTxD = x_BxTxD + jnp.where((image_index_BxT > 0)[..., None] & (layer <= last), rows_BxTxD, 0)
  return constrain(y_BxTxD, "batch", "stream", "embed")


def _rows(features_BxFxD: jax.Array, image_index_BxT: jax.Array) -> jax.Array:
  """Of each token its feature [B, T, D], of those that are no image's any."""
  def one(features_FxD, at_T):
    return read_table(features_FxD, at_T, features_FxD.dtype)

  # Row by row, so that the partitioner sees that no row needs another device's.
  return jax.vmap(one)(features_BxFxD, jnp.maximum(image_index_BxT - 1, 0))


def complete(batch: dict, vision: Vision | None) -> dict:
  """The batch with every key that the decoder reads, of which those of images are None where not needed.

  `axes` [B, T, 3] are positions for M-RoPE, of a batch with tiles.

  Raises:
    ValueError: images for a model of text alone, indices without images, a number of images or of their tokens that
      does not fit, or no word on who sees whom.
  """
  batch = _complete_text(batch)
  images, index, blocks = (batch[key] for key in ("images", "image_index", "block_ids"))
  if batch["prefix_length"] is not None and (vision is None or vision.attention != "prefix"):
    raise ValueError("prefix_length is for models whose model.vision.attention is 'prefix'; this one's is "
                     f"{'causal' if vision is None else vision.attention!r}")
  if vision is None:
    if images is not None or index is not None:
      raise ValueError("this model reads tokens alone; it takes no images (model.vision.tower is none)")
    return batch
  if images is None and index is not None:
    raise ValueError("the batch has image_index, but no images to index")
  if images is not None:
    batch["images"] = images = jnp.asarray(images)
    if images.ndim != 5 or len(images) != len(batch["tokens"]):
      raise ValueError(f"images: found shape {images.shape}, allowed: [rows, images of a row, size, size, 3], with the "
                       f"{len(batch['tokens'])} rows of the tokens")
    if index is None:
      batch["image_index"] = index = _index_of(batch, images.shape[1], vision)
    if images.shape[-1] not in (3, 3 * vision.frames):
      raise ValueError(f"images: found {images.shape[-1]} channels, allowed: 3" +
                       (f", or {3 * vision.frames}, those of {vision.frames} frames" if vision.frames > 1 else ""))
    if vision.native:
      batch["axes"] = tiles.positions(_grid(batch), index, batch["segment_ids"])
  if blocks is None:
    batch["block_ids"] = _block_ids(batch, index, vision)
  return batch


def _complete_text(batch: dict) -> dict:
  """The batch with `segment_ids` and `positions` where it has none, and nothing that no model reads."""
  tokens = batch["tokens"]
  segment_ids = batch.get("segment_ids")
  if segment_ids is None:
    segment_ids = jnp.ones_like(tokens)
  positions = batch.get("positions")
  if positions is None:
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    starts = jnp.concatenate([jnp.ones_like(tokens[:, :1]), jnp.diff(segment_ids, axis=1)], axis=1) != 0
    positions = index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
  rest = {key: batch.get(key) for key in ("images", "image_index", "image_grid", "block_ids", "prompt_ids",
                                          "prefix_length", "sampled_experts", "replayed_experts")}
  return dict(tokens=tokens, segment_ids=segment_ids, positions=positions, axes=None, **rest)


def _grid(batch: dict) -> jax.Array:
  grid, images = batch["image_grid"], batch["images"]
  if grid is None or grid.shape != (*images.shape[:2], tiles.ENTRIES):
    found = "none" if grid is None else f"shape {grid.shape}"
    raise ValueError(f"image_grid: found {found}, allowed for these images: shape "
                     f"{(*images.shape[:2], tiles.ENTRIES)}, what each of the tiles is (models/tiles.py)")
  return grid


def _index_of(batch: dict, images: int, vision: Vision) -> jax.Array:
  """`image_index`: the placeholders of a row are its features in order."""
  if vision.image_token is None:
    raise ValueError("the batch has images, but no image_index; without it model.vision.image_token must say which "
                     "tokens hold their places")
  tokens, K = batch["tokens"], vision.tokens_per_image
  held_BxT = tokens == vision.image_token
  if vision.video is not None:
    held_BxT |= tokens == vision.video.token
  held_BxT &= batch["segment_ids"] > 0
  if not isinstance(held_BxT, jax.core.Tracer):
    for row, count in enumerate(held_BxT.sum(1).tolist()):
      if count % K or count > images * K:
        raise ValueError(f"row {row} has {count} tokens {vision.image_token} (model.vision.image_token) and {images} "
                         f"images; allowed: {K} tokens for each image, of none up to all")
  return jnp.where(held_BxT, jnp.cumsum(held_BxT, axis=1), 0).astype(jnp.int32)


def _block_ids(batch: dict, image_index_BxT: jax.Array | None, vision: Vision) -> jax.Array | None:
  """`block_ids` as `model.vision.attention` has them; None: causal."""
  if vision.attention in OF_IMAGES and image_index_BxT is not None:
    if not vision.native:
      return (image_index_BxT + vision.tokens_per_image - 1) // vision.tokens_per_image
    # Number 0 is of no tile.
    of_tiles_BxN = jnp.pad(batch["image_grid"][..., tiles.IMAGE], ((0, 0), (1, 0)))
    return jnp.take_along_axis(of_tiles_BxN, image_index_BxT, axis=1, mode="clip")
  if vision.attention == "prefix":
    if batch["prefix_length"] is not None:
      length_Bx1 = jnp.reshape(jnp.asarray(batch["prefix_length"]), (-1, 1))
      return ((batch["positions"] < length_Bx1) & (batch["segment_ids"] > 0)).astype(jnp.int32)
    if batch["images"] is not None:
      raise ValueError("model.vision.attention is 'prefix', so a batch with images needs block_ids, or prefix_length: "
                       "the answer must not be seen by the prompt")
  return None


def _squares(x_NxMxD: jax.Array, tokens: int) -> jax.Array:
  """Squares of neighbouring patches, [N, tokens, patches of a square, D], row by row."""
  N, M, D = x_NxMxD.shape
  across, width = round(tokens**0.5), round((M / tokens) ** 0.5)
  squares = x_NxMxD.reshape(N, across, width, across, width, D).swapaxes(2, 3)
  return squares.reshape(N, tokens, width * width, D)
