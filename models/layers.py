"""The parts of a Transformer: dense layers, norms, MLPs, dropout.

B batch, T length, D hidden size, F width of the MLP.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models import cpu
from models import lora as lora_lib
from models.activations import GATED, XIELU, activate, sparse_gates, xielu
from models.quantization import quantize
from models.quantization.matmul import MatmulRules
from models.remat import named
from models.sharding import logical_axes
from models.sharding.linear import SplitKernel, project
from models.sharding.logical_axes import as_rows, constrain, made_once
from models.spec_vision import BOUNDS, UNBOUNDED

NORMS = ("rmsnorm", "layernorm")

cpu.write_out_random_bits()  # before anything is drawn here


@dataclasses.dataclass(frozen=True)
class Scope:
  """Where a module makes its parameters: a random key, a path, and for stacked layers the layer's index.

  A parameter's initial value is a function of (rng, path, layer) alone: not of the order in which
  modules are built, of other parameters, or of the mesh.
  """

  # None where shapes alone are wanted: what would be drawn is 0.
  rng: jax.Array | None
  dtype: Any
  compute_dtype: Any
  path: str = ""
  layer: Any = None
  # How frozen parameters are stored; None: in `dtype`, as all others.
  frozen: quantize.Frozen | None = None
  # `spec.lora`, which says what kernels have adapters.
  lora: Any = None
  # Which matmuls are computed in 8 bits; None: none.
  matmul_rules: MatmulRules | None = None
  # Whether linear layers store kernels that are not quantised as [out, in], as `few_rows` reads them.
  outputs_first: bool = False
  # Whether linear layers clip what they are given and what they give (`Linear.bounded`).
  clipped: bool = False

  def __truediv__(self, name: str) -> "Scope":
    return dataclasses.replace(self, path=f"{self.path}/{name}" if self.path else name)

  def normal(self, name: str, shape: tuple[int, ...], std: float) -> nnx.Param:
    """A parameter drawn from a normal distribution."""
    return nnx.Param((std * self._drawn(jax.random.normal, name, shape)).astype(self.kind(name)))

  def uniform(self, name: str, shape: tuple[int, ...], bound: float) -> nnx.Param:
    """A parameter drawn evenly from [-bound, bound)."""
    return nnx.Param(self._drawn(jax.random.uniform, name, shape, -bound, bound).astype(self.kind(name)))

  def log_uniform(self, name: str, shape: tuple[int, ...], low: float, high: float) -> nnx.Param:
    """The logarithm of what is drawn evenly from [low, high)."""
    return nnx.Param(jnp.log(self._drawn(jax.random.uniform, name, shape, low, high)).astype(self.kind(name)))

  def softplus_log_uniform(self, name: str, shape: tuple[int, ...], low: float, high: float) -> nnx.Param:
    """What softplus takes to numbers of [low, high) whose logarithms are drawn evenly."""
    drawn = jnp.exp(self._drawn(jax.random.uniform, name, shape, math.log(low), math.log(high)))
    return nnx.Param(jnp.log(jnp.expm1(drawn)).astype(self.kind(name)))

  def constant(self, name: str, shape: tuple[int, ...], value: float) -> nnx.Param:
    """A parameter that starts with the same value everywhere."""
    return nnx.Param(jnp.full(shape, value, self.kind(name)))

  def quantized(self, name: str, shape: tuple[int, ...], std: float) -> dict[str, nnx.Param]:
    """As `normal`, as the arrays of `quantize.quantize`."""
    values = std * self._drawn(jax.random.normal, name, shape)
    parts = quantize.quantize(values, self.kind(name), (self / name).path)
    return {end: nnx.Param(part) for end, part in parts.items()}

  def adapters(self, name: str) -> Any:
    """`spec.lora` where that has adapters beside the parameter of that name, else None."""
    return self.lora if self.lora is not None and lora_lib.adapts(self.lora.targets, (self / name).path) else None

  def kind(self, name: str) -> str:
    """How the parameter is stored: the name of a dtype, or one of `quantize.KINDS`."""
    kind = self.frozen.kind((self / name).path) if self.frozen is not None else None
    return kind or jnp.dtype(self.dtype).name

  def _drawn(self, draw: Callable, name: str, shape: tuple[int, ...], *bounds: float) -> jax.Array:
    """float32"""
    return jnp.zeros(shape) if self.rng is None else draw(self._key(name), shape, jnp.float32, *bounds)

  def _key(self, name: str) -> jax.Array:
    # crc32 rather than hash(): the same in every process.
    key = jax.random.fold_in(self.rng, zlib.crc32((self / name).path.encode()))
    return key if self.layer is None else jax.random.fold_in(key, self.layer)


class Kernel(nnx.Module):
  """The parameter `kernel` [..., in, out] of a matmul, drawn from a normal distribution.

  A frozen one may be stored quantised, as `kernel_int8` or `kernel_nf4` with `kernel_scale`; for generation on CPU, it
  is `kernel_across` [..., out, in].
  """

  def __init__(self, scope: Scope, shape: tuple[int, ...], std: float, outputs_first: bool = False):
    kind, path = scope.kind("kernel"), (scope / "kernel").path
    # The 8-bit matmul with it; None: a plain one.
    self.matmul = scope.matmul_rules.of(path) if scope.matmul_rules is not None else None
    plain, across = kind not in quantize.KINDS, outputs_first and self.matmul is None
    self.kernel = scope.normal("kernel", shape, std) if plain and not across else None
    self.kernel_across = scope.normal("kernel", shape[::-1], std) if plain and across else None
    parts = scope.quantized("kernel", shape, std) if kind in quantize.KINDS else {}
    self.kernel_int8, self.kernel_nf4 = parts.get("_int8"), parts.get("_nf4")
    self.kernel_scale = parts.get("_scale")


def with_kernels(kernels: tuple[Kernel, ...], function: Callable, dtype: Any, *args: Any) -> Any:
  """`function((kernel in dtype, …), *args)` of kernels that are stored alike. For the backward pass, a quantised kernel
  keeps its codes alone."""
  if kernels[0].kernel is not None:
    return function(tuple(k.kernel[...].astype(dtype) for k in kernels), *args)
  named = (dict(_int8=k.kernel_int8, _nf4=k.kernel_nf4, _scale=k.kernel_scale) for k in kernels)
  stored = [{end: part[...] for end, part in parts.items() if part is not None} for parts in named]

  def restore_and_multiply(stored, *args):
    return function(tuple(quantize.dequantize(parts, dtype) for parts in stored), *args)

  return jax.checkpoint(restore_and_multiply)(stored, *args)


class Linear(Kernel):
  """x @ kernel (+ bias), in the compute dtype; with adapters, + x @ lora_a @ lora_b * scale.

  Adapters start as those of LoRA (Hu et al. 2021, arXiv 2106.09685, section 4.1): `lora_a` [in, r] random, here evenly
  in ± in ** -0.5 as in PEFT, and `lora_b` [r, out] zero, so that they change nothing at first; nor does `lora_m` [out],
  with which each output is multiplied by 1 + `_gain`.
  """

  def __init__(
      self, scope: Scope, d_in: int, d_out: int, *, std: float | None, bias: bool, gain: float = 1.0,
      names: tuple[str | None, str | None] | None = None,
  ):
    """`std`: of the initial kernel, d_in ** -0.5 if None; multiplied by `gain`. `names`: the logical names of inputs
    and outputs (models/sharding/logical_axes.py), of which one at most is split; None: the partitioner decides how it
    is computed.
    """
    super().__init__(scope, (d_in, d_out), gain * (d_in**-0.5 if std is None else std), scope.outputs_first)
    self.bias = scope.constant("bias", (d_out,), 0.0) if bias else None
    lora = scope.adapters("kernel")
    self.lora_a = scope.uniform("lora_a", (d_in, lora.rank), d_in**-0.5) if lora else None
    self.lora_b = scope.constant("lora_b", (lora.rank, d_out), 0.0) if lora else None
    self.lora_m = scope.constant("lora_m", (d_out,), 0.0) if lora and lora.dora else None
    self.lora, self.dtype, self.names = lora, scope.compute_dtype, names
    self.salt = zlib.crc32(scope.path.encode())
    bounds = {name: (scope / "clip").constant(name, (), -UNBOUNDED if name.endswith("min") else UNBOUNDED)
              for name in BOUNDS} if scope.clipped else {}
    self.clip = nnx.Dict(bounds) if bounds else None

  def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """`key`: the layer's key for dropout on the adapter's input; None: no dropout."""
    return apply_linears((self,), x, key)[0]

  def matrix(self) -> jax.Array:
    """What it multiplies by, [in, out], adapters included, in the compute dtype."""
    kernel = self._kernel(self.dtype)
    if self.lora is None:
      return kernel
    moved = kernel + self.lora_a[...].astype(self.dtype) @ self.lora_b[...].astype(self.dtype) * self.lora.scale
    return moved if self.lora_m is None else moved + moved * self._gain().astype(self.dtype)

  def _kernel(self, dtype: Any) -> jax.Array:
    """Without adapters, [in, out]."""
    if self.kernel_across is not None:
      return self.kernel_across[...].astype(dtype).T
    return with_kernels((self,), lambda kernels: kernels[0], dtype)

  def _gain(self) -> jax.Array:
    """`lora.gain`, float32 [out]. Lengths are constants to the gradient, as in the paper (DoRA, section 4.3)."""
    kernel = jax.lax.stop_gradient(self._kernel(jnp.float32))
    a, b = (jax.lax.stop_gradient(part[...]).astype(jnp.float32) for part in (self.lora_a, self.lora_b))
    return lora_lib.gain(kernel, a @ b * self.lora.scale, self.lora_m[...].astype(jnp.float32))

  @property
  def plain(self) -> bool:
    """Whether it is a plain matmul, with at most a bias."""
    return self.kernel is not None and self.matmul is None and self.lora is None and self.clip is None

  def bounded(self, x: jax.Array, which: str) -> jax.Array:
    """Its input, or output, within what a checkpoint says of it."""
    if self.clip is None:
      return x
    low, high = (self.clip[f"{which}_{end}"][...].astype(x.dtype) for end in ("min", "max"))
    return jnp.clip(x, *jax.lax.stop_gradient((low, high)))  # buffers of theirs

  def _matmul(self, x: jax.Array) -> jax.Array:
    if self.kernel_across is not None:
      return cpu.few_rows(x, self.kernel_across[...].astype(self.dtype))
    rows = as_rows(x) if self.matmul is None else x.reshape(-1, x.shape[-1])
    matmul = self.matmul or cpu.matmul
    y = with_kernels((self,), lambda kernels, rows: matmul(rows, kernels[0]), self.dtype, rows)
    return y.reshape(*x.shape[:-1], -1)

  def _finish(self, x: jax.Array, y: jax.Array, key: jax.Array | None) -> jax.Array:
    """Adds the outputs of adapters and the bias."""
    if self.lora is not None:
      if key is not None:
        x = dropout(x, self.lora.dropout, jax.random.fold_in(key, self.salt))
      low = as_rows(x) @ self.lora_a[...].astype(self.dtype)
      low = (low @ self.lora_b[...].astype(self.dtype) * self.lora.scale).reshape(y.shape)
      if self.lora_m is None:
        y = y + low
      else:
        y = y + (low + (y + low) * self._gain().astype(self.dtype))
    return y if self.bias is None else y + self.bias[...].astype(self.dtype)


def apply_linears(linears: tuple[Linear, ...], x: jax.Array, key: jax.Array | None = None) -> list[jax.Array]:
  """Several layers on the same input, which on a mesh is sent only once; `key` as in `Linear`. Where they are clipped,
  each has an input of its own."""
  if linears[0].clip is None:
    return _apply_linears(linears, x, key)
  return [linear.bounded(_apply_linears((linear,), linear.bounded(x, "input"), key)[0], "output") for linear in linears]


def _apply_linears(linears: tuple[Linear, ...], x: jax.Array, key: jax.Array | None) -> list[jax.Array]:
  placed = logical_axes.current()
  alike = len({(linear.kernel is None, linear.kernel_across is None) for linear in linears}) == 1
  if placed is None or x.ndim != 3 or not alike or any(linear.names is None for linear in linears):
    return [linear._finish(x, linear._matmul(x), key) for linear in linears]
  kernels, dtype = tuple(SplitKernel(linear.names, linear.matmul) for linear in linears), linears[0].dtype
  if linears[0].kernel is not None:
    outputs = project(placed, x, tuple(linear.kernel[...] for linear in linears), kernels, dtype)
  elif linears[0].kernel_across is not None:
    outputs = project(placed, x, tuple(linear.kernel_across[...].T for linear in linears), kernels, dtype)
  else:
    outputs = with_kernels(linears, lambda weights, x: project(placed, x, weights, kernels, dtype), dtype, x)
  return [linear._finish(x, y, key) for linear, y in zip(linears, outputs, strict=True)]


class Norm(nnx.Module):
  """RMSNorm (Zhang and Sennrich 2019) or LayerNorm over the last axis; computed in float32."""

  def __init__(self, scope: Scope, size: int | tuple[int, int], *, kind: str, eps: float, plus_one: bool,
               bias: bool = False, gain: float = 1.0, groups: int = 1):
    """`size`: of the last axis, or of the last two, where each entry of the one before has a scale of its own.
    `plus_one`: the scale is stored as an offset from one. `gain`: a factor on the output, before it is rounded.
    `groups`: the last axis is so many groups, of which each is normalised by itself."""
    shape = size if isinstance(size, tuple) else (size,)
    self.scale = scope.constant("scale", shape, 0.0 if plus_one else 1.0)
    self.bias = scope.constant("bias", shape, 0.0) if bias else None
    self.kind, self.eps, self.plus_one, self.gain, self.groups = kind, eps, plus_one, gain, groups

  def __call__(self, x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    if self.groups > 1:
      y = y.reshape(*x.shape[:-1], self.groups, -1)
    if self.kind == "layernorm":
      y = y - y.mean(-1, keepdims=True)
    y = rms_normalised(y, self.eps).reshape(x.shape)
    scale = self.scale[...].astype(jnp.float32)
    y = y * (1.0 + scale if self.plus_one else scale)
    if self.bias is not None:
      y = y + self.bias[...].astype(jnp.float32)
    if self.gain != 1.0:
      y = y * self.gain
    return y.astype(x.dtype)


def rms_normalised(x: jax.Array, eps: float) -> jax.Array:
  """RMSNorm over the last axis without a scale; computed in float32."""
  y = x.astype(jnp.float32)
  return (y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + eps)).astype(x.dtype)


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
    wide: dict[str, Any] = dict(std=std, bias=bias, names=(None, "mlp"))
    self.gate = Linear(scope / "gate", features, hidden, **wide) if gated else None
    self.up = Linear(scope / "up", features, hidden, **wide)
    self.down = Linear(scope / "down", hidden, features, std=std, bias=bias, gain=out_gain, names=("mlp", None))
    learned = {name: (scope / "xielu").constant(name, (1,) if name.startswith("alpha") else (), value)
               for name, value in XIELU.items()}
    self.xielu = nnx.Dict(learned) if activation == "xielu" else None
    self.activation = activation

  def __call__(self, x_BxTxD: jax.Array, key: jax.Array | None = None, sparsity: float = 0.0) -> jax.Array:
    """`key`: the layer's key for dropout on the adapters' input; None: no dropout. `sparsity`: about which share of the
    hidden layer is 0 (`sparse_gates`)."""
    linears = (self.up,) if self.gate is None else (self.up, self.gate)
    more = 0 if sparsity else cpu.mlp_columns(x_BxTxD, (*linears, self.down))  # columns of 0 would be counted
    x_BxTxD = made_once(x_BxTxD)
    outputs = [cpu.wider(linear, x_BxTxD, outputs=more) for linear in linears] if more else apply_linears(
        linears, x_BxTxD, key)
    up_BxTxF, *gate = (named(constrain(y_BxTxF, "batch", "length", "mlp"), "mlp") for y_BxTxF in outputs)
    if sparsity:
      gate = [sparse_gates(gate[0], sparsity)]
    if self.xielu is None:
      hidden_BxTxF = activate(self.activation, up_BxTxF, *gate)
    else:
      of = {name: value[...].astype(jnp.float32) for name, value in self.xielu.items()}
      fixed = jax.lax.stop_gradient((of["beta"], of["eps"]))  # buffers of theirs
      hidden_BxTxF = xielu(up_BxTxF, of["alpha_p"], of["alpha_n"], *fixed)
    return cpu.wider(self.down, hidden_BxTxF, inputs=more) if more else self.down(hidden_BxTxF, key)


def document_lengths(positions_BxT: jax.Array, segment_ids_BxT: jax.Array) -> jax.Array:
  """For each token, the number of tokens of its document: one more than its last position, int [B, T]."""
  T = positions_BxT.shape[1]
  changes = segment_ids_BxT[:, 1:] != segment_ids_BxT[:, :-1]
  last_BxT = jnp.concatenate([changes, jnp.ones_like(changes, shape=(len(changes), 1))], axis=1)
  end_BxT = jax.lax.cummin(jnp.where(last_BxT, jnp.arange(T), T), axis=1, reverse=True)
  return jnp.take_along_axis(positions_BxT, end_BxT, axis=1) + 1


def embedding_noise(lengths_BxT: jax.Array, features: int, alpha: float, key: jax.Array) -> jax.Array:
  """Even noise [B, T, D] float32 in ± alpha / sqrt(length * features) (NEFTune, arXiv 2310.05914, algorithm 1)."""
  bound_BxT = alpha * jax.lax.rsqrt(lengths_BxT.astype(jnp.float32) * features)
  return bound_BxT[..., None] * jax.random.uniform(key, (*lengths_BxT.shape, features), jnp.float32, -1.0, 1.0)


def dropout(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
  """Zeroes a share `rate` of the entries and scales the others by 1 / (1 - rate)."""
  if not rate:
    return x
  keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
  return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)
