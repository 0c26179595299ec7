"""Tiny models of images and text that the tests of models/ share, and towers and projectors in numpy."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from tests.models.common import VOCAB, make, paths, random_params

IMAGE_TOKEN = VOCAB - 1
SIGLIP = dict(tower="siglip", image_size=8, patch_size=4, num_layers=2, hidden_size=12, intermediate_size=20,
              num_heads=2, image_token=IMAGE_TOKEN)
CLIP = SIGLIP | dict(tower="clip", num_layers=3, activation="quick_gelu", feature_layer=-2, projector="mlp")
POOL = SIGLIP | dict(patch_size=2, projector="pool", tokens_per_image=4, attention="image", feature_scale=0.5)
PREFIX = SIGLIP | dict(attention="prefix")
KINDS = dict(siglip=SIGLIP, clip=CLIP, pool=POOL, prefix=PREFIX)
# Tokens of an image, in all of them.
K = 4


def make_vlm(kind, **changed):
  own = dict(norm_scale_plus_one=True, scale_embeddings=True) if kind == "pool" else {}
  own |= dict(num_layers=2, num_kv_heads=2, attention_block=5)
  return make(**own | changed | dict(vision=KINDS[kind] | changed.get("vision", {})))


@functools.cache
def vlm(kind):
  """Model, random parameters and compiled hidden states of one of KINDS."""
  model = make_vlm(kind)
  return model, random_params(model), jax.jit(lambda params, batch: model.apply(params, batch).hidden)


def images(*shape, seed=0):
  return np.random.default_rng(seed).integers(0, 256, (*shape, 8, 8, 3)).astype(np.uint8)


def packed():
  """Two rows: two texts with an image each and padding; one text with two images, after padding."""
  tokens = np.arange(32).reshape(2, 16).astype(np.int32)
  segments = np.array([[1] * 7 + [2] * 8 + [0], [0] * 2 + [1] * 14], np.int32)
  index = np.zeros((2, 16), np.int32)
  index[0, 1:5], index[0, 8:12], index[1, 3:7], index[1, 9:13] = (np.arange(K) + k for k in (1, 1 + K, 1, 1 + K))
  return dict(tokens=np.where(index > 0, IMAGE_TOKEN, tokens), segment_ids=segments, image_index=index,
              images=images(2, 2))


def np_tower(v, params, image):
  """Features [patches, size] of one uint8 image, in float64; `v` is a `Vision`."""
  p = {path[7:]: np.asarray(leaf, np.float64) for path, leaf in paths(params).items() if path.startswith("vision/")}

  def norm(x, name, layer=...):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + v.norm_eps) * p[f"{name}/scale"][layer] + p[
        f"{name}/bias"][layer]

  def dense(x, name, layer=...):
    return x @ p[f"{name}/kernel"][layer] + (p[f"{name}/bias"][layer] if f"{name}/bias" in p else 0)

  side, size = v.image_size // v.patch_size, v.patch_size
  pixels = (np.asarray(image, np.float64) / 255 - np.array(v.mean)) / np.array(v.std)
  squares = [pixels[i * size:(i + 1) * size, j * size:(j + 1) * size] for i in range(side) for j in range(side)]
  x = dense(np.stack([square.reshape(-1) for square in squares]), "patch_embed")
  if v.tower == "clip":
    x = np.concatenate([p["cls_embed/embedding"], x])
  x = x + p["pos_embed/embedding"]
  if v.tower == "clip":
    x = norm(x, "pre_norm")
  act = dict(gelu=lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
             quick_gelu=lambda x: x / (1 + np.exp(-1.702 * x)))[v.activation]
  for layer in range(v.num_layers + 1 + v.feature_layer):
    y = norm(x, "blocks/attn_norm", layer)
    q, k, w = (dense(y, f"blocks/attn/{name}", layer).reshape(len(x), v.num_heads, -1) for name in "qkv")
    scores = np.exp(np.einsum("thk,shk->hts", q, k) / math.sqrt(q.shape[-1]))
    y = np.einsum("hts,shk->thk", scores / scores.sum(-1, keepdims=True), w).reshape(len(x), -1)
    x = x + dense(y, "blocks/attn/o", layer)
    x = x + dense(act(dense(norm(x, "blocks/mlp_norm", layer), "blocks/mlp/up", layer)), "blocks/mlp/down", layer)
  x = norm(x, "final_norm") if v.feature_layer == -1 else x
  return x[1:] if v.tower == "clip" else x


def np_features(v, params, image):
  """What stands in place of embeddings [tokens, size], for one image, in float64; scales are offsets from one."""
  p = {path[10:]: np.asarray(leaf, np.float64) for path, leaf in paths(params).items()
       if path.startswith("projector/")}
  x = np_tower(v, params, image)
  if v.projector == "mlp":
    x = x @ p["up/kernel"] + p["up/bias"]
    x = x * np.vectorize(lambda z: 0.5 * (1 + math.erf(z / math.sqrt(2))))(x)
    return x @ p["down/kernel"] + p["down/bias"]
  if v.projector == "pool":
    side, across = math.isqrt(len(x)), math.isqrt(v.tokens_per_image)
    width, x = side // across, x.reshape(side, side, -1)
    x = np.stack([x[i * width:(i + 1) * width, j * width:(j + 1) * width].mean((0, 1))
                  for i in range(across) for j in range(across)])
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + v.norm_eps) * (1 + p["norm/scale"])
  return (x @ p["linear/kernel"] + p.get("linear/bias", 0)) * v.feature_scale


def tanh_loss(model, batch):
  """A scalar of the hidden states of real tokens, as a function of the parameters."""
  mix = jnp.asarray(np.random.default_rng(5).normal(size=(16,)), jnp.float32)
  weights = batch["segment_ids"] > 0
  return lambda params: (jnp.square(jnp.tanh(model.apply(params, batch).hidden @ mix)) * weights).sum()
