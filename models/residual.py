"""What joins the residual stream besides attention and MLP: embeddings of each layer, LAuReL, AltUp; and norms on it.

B batch, T length, D hidden size, L layers, P size of a layer's embedding of a token, N streams of AltUp, M = N - 1.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.activations import activate
from models.layers import Linear, Norm, Scope
from models.sharding.logical_axes import constrain
from models.spec import Spec

# The least mean square that a projected stream is divided by the root of (`Streams`); and of what it is made as large
# as, whose root has no gradient at 0.
LEAST_POWER, TINY = 1e-5, 1e-30


class PerLayer(nnx.Module):
  """What a layer adds of its own embedding of each token (Gemma 3n and 4)."""

  def __init__(self, spec: Spec, scope: Scope):
    D, P, std = spec.hidden_size, spec.per_layer_size, spec.init_std
    # As latents, they are those of the tokens that a device has in the residual stream.
    plain: dict[str, Any] = dict(std=std, bias=False, names=(None, None))
    self.gate = Linear(scope / "gate", D, P, **plain)
    self.out = Linear(scope / "out", P, D, gain=out_gain(spec), **plain)
    self.norm, self.activation = make_norm(spec, scope / "norm"), spec.activation

  def __call__(self, x_BxTxD: jax.Array, own_BxTxP: jax.Array, key: jax.Array | None) -> jax.Array:
    """`own_BxTxP`: the embeddings; `key`: for dropout on the adapters' input."""
    return self.norm(self.out(activate(self.activation, own_BxTxP, self.gate(x_BxTxD, key)), key))


class Laurel(nnx.Module):
  """x + norm(right(left(x))), a residual connection with a learned matrix of low rank (LAuReL-LR, Menghani et al. 2024,
  arXiv 2411.07501, section 2.2)."""

  def __init__(self, spec: Spec, scope: Scope):
    D, rank = spec.hidden_size, spec.laurel_rank
    plain: dict[str, Any] = dict(std=spec.init_std, bias=False, names=(None, None))
    self.left = Linear(scope / "left", D, rank, **plain)
    self.right = Linear(scope / "right", rank, D, **plain)
    self.norm = make_norm(spec, scope / "norm")

  def __call__(self, x_BxTxD: jax.Array, key: jax.Array | None) -> jax.Array:
    """`key`: for dropout on the adapters' input."""
    return x_BxTxD + self.norm(self.right(self.left(x_BxTxD, key), key))


class AltUp(nnx.Module):
  """N streams around one layer, which computes on the first alone (Alternating Updates, Baykal et al. 2023, arXiv
  2301.13310, algorithm 1). How streams mix depends on the token, as in Gemma 3n."""

  def __init__(self, spec: Spec, scope: Scope):
    assert spec.altup is not None
    D, N, std = spec.hidden_size, spec.altup.num_inputs, spec.init_std
    self.router = nnx.Dict(kernel=(scope / "router").normal("kernel", (D, N), D**-0.5 if std is None else std))
    self.norm = make_norm(spec, scope / "norm")
    # Small beside what they are added to: streams are carried along at first, and all corrected alike.
    self.prediction = scope.normal("prediction", (N, N * N), 0.02 if std is None else std)
    self.correction = scope.normal("correction", (N, N), 0.02 if std is None else std)
    self.scale = scope.constant("scale", (D,), 1.0) if spec.per_layer_size else None
    self.spec = spec.altup

  def predict(self, x_NxBxTxD: jax.Array) -> jax.Array:
    """What streams are taken to be behind the layer, before it has run: each and a mixture of all."""
    N, B, T, _ = x_NxBxTxD.shape
    coefs_BxTxNxN = self._coefficients(x_NxBxTxD[0], self.prediction).reshape(B, T, N, N)
    coefs_NxNxBxTx1 = jnp.moveaxis(coefs_BxTxNxN, (2, 3), (0, 1))[..., None]  # to, from
    # Sums, which compilers fuse, since products of matrices this small are slow.
    mixed_NxBxTxD = (coefs_NxNxBxTx1 * x_NxBxTxD.astype(jnp.float32)).sum(1)
    return (mixed_NxBxTxD + x_NxBxTxD).astype(x_NxBxTxD.dtype)

  def correct(self, predicted_NxBxTxD: jax.Array, x_BxTxD: jax.Array) -> jax.Array:
    """Streams after the layer, which has made `x_BxTxD` of the first: to each is added a part of what that differs by
    from what was predicted."""
    coefs_BxTxN = 1.0 + self._coefficients(x_BxTxD, self.correction)
    news_BxTxD = (x_BxTxD - predicted_NxBxTxD[0]).astype(jnp.float32)
    corrected_NxBxTxD = predicted_NxBxTxD + jnp.moveaxis(coefs_BxTxN, 2, 0)[..., None] * news_BxTxD
    return corrected_NxBxTxD.astype(x_BxTxD.dtype)

  def scaled(self, x_BxTxD: jax.Array) -> jax.Array:
    """The first stream as the layer's own embedding is gated by it."""
    return x_BxTxD * self.scale[...].astype(x_BxTxD.dtype)

  def _coefficients(self, x_BxTxD: jax.Array, weights: nnx.Param) -> jax.Array:
    """Of each token, float32 [B, T, weights.shape[1]]."""
    kernel_DxN, weights_NxM = self.router["kernel"][...].astype(jnp.float32), weights[...].astype(jnp.float32)
    if self.spec.coef_clip is not None:
      weights_NxM = jnp.clip(weights_NxM, -self.spec.coef_clip, self.spec.coef_clip)
    normed_BxTxD = self.norm(x_BxTxD).astype(jnp.float32) / x_BxTxD.shape[-1]
    highest = jax.lax.Precision.HIGHEST
    return jnp.matmul(jnp.tanh(jnp.matmul(normed_BxTxD, kernel_DxN, precision=highest)), weights_NxM, precision=highest)


class Streams(nnx.Module):
  """The N streams of AltUp, made of one before the first layer, and one made of them behind the last."""

  def __init__(self, spec: Spec, scope: Scope):
    assert spec.altup is not None
    D, std = spec.hidden_size, spec.init_std
    shape, std = (spec.altup.num_inputs - 1, D, D), D**-0.5 if std is None else std
    self.split = nnx.Dict(kernel=(scope / "split").normal("kernel", shape, std))
    self.join = nnx.Dict(kernel=(scope / "join").normal("kernel", shape, std))

  def begin(self, x_BxTxD: jax.Array) -> jax.Array:
    """The stream itself, and projections of it of its magnitude [N, B, T, D]."""
    kernel = self.split["kernel"]
    others_MxBxTxD = self._projected(kernel, jnp.broadcast_to(x_BxTxD, (kernel.shape[0], *x_BxTxD.shape)), x_BxTxD)
    return constrain(jnp.concatenate([x_BxTxD[None], others_MxBxTxD]), None, "batch", "stream", "embed")

  def end(self, x_NxBxTxD: jax.Array) -> jax.Array:
    """The mean of the first stream and of projections of the others of its magnitude."""
    first_BxTxD = x_NxBxTxD[0]
    others_MxBxTxD = self._projected(self.join["kernel"], x_NxBxTxD[1:], first_BxTxD)
    total_BxTxD = first_BxTxD.astype(jnp.float32) + others_MxBxTxD.astype(jnp.float32).sum(0)
    mean_BxTxD = (total_BxTxD / len(x_NxBxTxD)).astype(first_BxTxD.dtype)
    return constrain(mean_BxTxD, "batch", "stream", "embed")

  def _projected(self, kernel: nnx.Param, x_MxBxTxD: jax.Array, like_BxTxD: jax.Array) -> jax.Array:
    """Each stream by its matrix [M, in, out], each token then as large as in `like_BxTxD`."""
    kernel_MxDxD = constrain(kernel[...].astype(like_BxTxD.dtype), None, None, None)  # as a whole on every device
    y_MxBxTxD = jnp.einsum("mbtd,mde->mbte", x_MxBxTxD, kernel_MxDxD).astype(jnp.float32)
    wanted_BxTx1 = jnp.sqrt(jnp.maximum(_power(like_BxTxD), TINY))
    return (y_MxBxTxD * (wanted_BxTx1 / jnp.sqrt(jnp.maximum(_power(y_MxBxTxD), LEAST_POWER)))).astype(like_BxTxD.dtype)


def _power(x: jax.Array) -> jax.Array:
  """The mean square over the last axis, float32 [..., 1]."""
  return jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)


def of_each_layer(spec: Spec, read: jax.Array, made: jax.Array, norm: Norm) -> jax.Array:
  """Of each layer its embeddings of the tokens [L, B, T, P]: those read from a table, and what was made of the
  usual ones, normalised; both [B, T, L * P]."""
  shape, dtype = (*read.shape[:2], spec.num_layers, spec.per_layer_size), read.dtype
  read_BxTxLxP = read.reshape(shape) * jnp.asarray(spec.per_layer_size**0.5, dtype)
  made_BxTxLxP = norm((made * jnp.asarray(spec.hidden_size**-0.5, dtype)).reshape(shape))
  both_BxTxLxP = (made_BxTxLxP + read_BxTxLxP) * jnp.asarray(2**-0.5, dtype)
  return constrain(jnp.moveaxis(both_BxTxLxP, 2, 0), None, "batch", "stream", None)


def make_norm(spec: Spec, scope: Scope, gain: float = 1.0) -> Norm:
  """The norm of that stack of layers; `gain`: a factor on what it gives."""
  return Norm(scope, spec.hidden_size, kind=spec.norm, eps=spec.norm_eps, plus_one=spec.norm_scale_plus_one,
              bias=spec.norm_bias, gain=gain)


def out_gain(spec: Spec) -> float:
  """Keeps the residual stream's variance independent of depth at the start (Radford et al. 2019, 2.3)."""
  return ((1 if spec.one_branch else 2) * spec.num_layers) ** -0.5
