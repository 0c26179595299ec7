"""The parts of a Transformer: dense layers, norms, embeddings, rotary positions, MLPs, dropout.

B batch, T length, D hidden size, F width of the MLP, H heads, K head size, P rotated pairs per head.
"""

import dataclasses
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.api import constrain

GATED = {"swiglu": jax.nn.silu, "geglu": lambda x: jax.nn.gelu(x, approximate=True)}
UNGATED = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
ACTIVATIONS = (*GATED, *UNGATED)
NORMS = ("rmsnorm", "layernorm")


@dataclasses.dataclass(frozen=True)
class Scope:
  """Where a module makes its parameters: a random key, a path, and for stacked layers the layer's index.

  A parameter's initial value is a function of (rng, path, layer) alone: not of the order in which
  modules are built, of other parameters, or of the mesh.
  """

  rng: jax.Array
  dtype: Any
  compute_dtype: Any
  path: str = ""
  layer: Any = None

  def __truediv__(self, name: str) -> "Scope":
    return dataclasses.replace(self, path=f"{self.path}/{name}" if self.path else name)

  def normal(self, name: str, shape: tuple[int, ...], std: float) -> nnx.Param:
    """A parameter drawn from a normal distribution."""
    # crc32 rather than hash(): the same in every process.
    key = jax.random.fold_in(self.rng, zlib.crc32((self / name).path.encode()))
    if self.layer is not None:
      key = jax.random.fold_in(key, self.layer)
    return nnx.Param((std * jax.random.normal(key, shape, jnp.float32)).astype(self.dtype))

  def constant(self, shape: tuple[int, ...], value: float) -> nnx.Param:
    """A parameter that starts with the same value everywhere."""
    return nnx.Param(jnp.full(shape, value, self.dtype))


class Linear(nnx.Module):
  """x @ kernel (+ bias), in the compute dtype."""

  def __init__(
      self, scope: Scope, d_in: int, d_out: int, *, std: float | None, bias: bool, gain: float = 1.0
  ):
    """`std`: of the initial kernel, d_in ** -0.5 if None; multiplied by `gain`."""
    self.kernel = scope.normal("kernel", (d_in, d_out), gain * (d_in**-0.5 if std is None else std))
    self.bias = scope.constant((d_out,), 0.0) if bias else None
    self.dtype = scope.compute_dtype

  def __call__(self, x: jax.Array) -> jax.Array:
    # As a product of two matrices: with [B, T] in front, XLA on CPU writes the transposed operand of the
    # kernel's gradient in a strided loop that takes longer than the product itself.
    y = (x.reshape(-1, x.shape[-1]) @ self.kernel[...].astype(self.dtype)).reshape(*x.shape[:-1], -1)
    return y if self.bias is None else y + self.bias[...].astype(self.dtype)


class Norm(nnx.Module):
  """RMSNorm (Zhang and Sennrich 2019) or LayerNorm over the last axis; computed in float32."""

  def __init__(self, scope: Scope, size: int, *, kind: str, eps: float, plus_one: bool, bias: bool = False):
    """`plus_one`: the scale is stored as an offset from one."""
    self.scale = scope.constant((size,), 0.0 if plus_one else 1.0)
    self.bias = scope.constant((size,), 0.0) if bias else None
    self.kind, self.eps, self.plus_one = kind, eps, plus_one

  def __call__(self, x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    if self.kind == "layernorm":
      y = y - y.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + self.eps)
    scale = self.scale[...].astype(jnp.float32)
    y = y * (1.0 + scale if self.plus_one else scale)
    if self.bias is not None:
      y = y + self.bias[...].astype(jnp.float32)
    return y.astype(x.dtype)


class Embedding(nnx.Module):
  """A table [size, D], read by index."""

  def __init__(self, scope: Scope, size: int, features: int, *, std: float | None):
    """`std`: of the initial table, 0.02 if None."""
    self.embedding = scope.normal("embedding", (size, features), 0.02 if std is None else std)
    self.dtype = scope.compute_dtype

  def __call__(self, ids_BxT: jax.Array) -> jax.Array:
    # An id beyond the table gives NaN, which the finite guard reports, rather than another entry's row.
    rows = self.embedding[...].at[ids_BxT].get(mode="fill", fill_value=jnp.nan)
    return rows.astype(self.dtype)


class Mlp(nnx.Module):
  """down(act(gate(x)) * up(x)) for gated activations (Shazeer 2020), down(act(up(x))) for others."""

  def __init__(
      self,
      scope: Scope,
      features: int,
      hidden: int,
      *,
      activation: str,
      std: float | None,
      bias: bool,
      out_gain: float,
  ):
    """`out_gain`: factor on the initial standard deviation of the last projection."""
    gated = activation in GATED
    self.gate = Linear(scope / "gate", features, hidden, std=std, bias=bias) if gated else None
    self.up = Linear(scope / "up", features, hidden, std=std, bias=bias)
    self.down = Linear(scope / "down", hidden, features, std=std, bias=bias, gain=out_gain)
    self.activation = activation

  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    up_BxTxF = constrain(self.up(x_BxTxD), "batch", "length", "mlp")
    if self.gate is None:
      h_BxTxF = UNGATED[self.activation](up_BxTxF)
    else:
      gate_BxTxF = constrain(self.gate(x_BxTxD), "batch", "length", "mlp")
      h_BxTxF = GATED[self.activation](gate_BxTxF) * up_BxTxF
    return self.down(h_BxTxF)


def rope_table(
    positions_BxT: jax.Array, head_dim: int, theta: float, fraction: float
) -> tuple[jax.Array, jax.Array]:
  """Cosines and sines [B, T, 1, P], float32, of the angles position * theta ** (-p / P) (Su et al. 2021)."""
  pairs = rotated_dims(head_dim, fraction) // 2
  frequencies_P = theta ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
  angles = positions_BxT.astype(jnp.float32)[:, :, None, None] * frequencies_P
  return jnp.cos(angles), jnp.sin(angles)


def rotated_dims(head_dim: int, fraction: float) -> int:
  """How many of a head's leading dimensions RoPE rotates."""
  return int(head_dim * fraction)


def apply_rope(x_BxTxHxK: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Rotates the pairs (x[p], x[p + P]) of each head's first 2P dimensions; the others pass unchanged."""
  cos, sin = table
  pairs = cos.shape[-1]
  x = x_BxTxHxK.astype(jnp.float32)
  first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
  rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
  return rotated.astype(x_BxTxHxK.dtype)


def dropout(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
  """Zeroes a share `rate` of the entries and scales the others by 1 / (1 - rate)."""
  keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
  return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)
