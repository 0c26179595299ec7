"""Activations: those with a gate (Shazeer 2020, arXiv 2002.05202), and plain ones."""

import functools
import math
import statistics

import jax
import jax.numpy as jnp

from models.sharding.logical_axes import made_once

GATED = {
    "swiglu": jax.nn.silu,
    "geglu": lambda x: jax.nn.gelu(x, approximate=True),
    "geglu_exact": lambda x: jax.nn.gelu(x, approximate=False),
    "clamped_swiglu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}
# Of clamped_swiglu: what gates and the size of ups are cut at; ups are offsets from one (gpt-oss).
CLAMP = 7.0
UNGATED = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
# What is learned of xielu, which has no gate, and the values it begins with: softplus of the first is 0.8,
# and so is 0.5 + that of the second; the others are not trained.
XIELU = {"alpha_p": math.log(math.expm1(0.8)), "alpha_n": math.log(math.expm1(0.3)), "beta": 0.5, "eps": -1e-6}
ACTIVATIONS = (*GATED, *UNGATED, "xielu")


def xielu(x: jax.Array, alpha_p: jax.Array, alpha_n: jax.Array, beta: jax.Array, eps: jax.Array) -> jax.Array:
  """a x² + b x for x above 0, c (exp(min(x, eps)) - 1 - x) + b x for others, with a = softplus(alpha_p), b = beta and
  c = b + softplus(alpha_n) (xIELU, Huang and Schlag 2024, arXiv 2411.13010); in float32, rounded once."""
  f32 = x.astype(jnp.float32)
  a, c = jax.nn.softplus(alpha_p), beta + jax.nn.softplus(alpha_n)
  negative = c * (jnp.expm1(jnp.minimum(f32, eps)) - f32)
  return made_once((jnp.where(f32 > 0, a * f32 * f32, negative) + beta * f32).astype(x.dtype))


def sparse_gates(gate: jax.Array, sparsity: float) -> jax.Array:
  """What gates along the last axis have beyond a cutoff that the share `sparsity` of them is below, were they normally
  distributed with their mean and standard deviation; the others are 0.

  The statistical top-k of Spark Transformer (You et al. 2025, arXiv 2506.06644, section 3.1), computed in float32.
  """
  x = gate.astype(jnp.float32)
  mean, variance = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
  # A root has no gradient at 0.
  deviation = jnp.where(variance > 0, jnp.sqrt(jnp.where(variance > 0, variance, 1.0)), 0.0)
  return jax.nn.relu(x - (mean + deviation * statistics.NormalDist().inv_cdf(sparsity))).astype(gate.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def activate(activation: str, up: jax.Array, gate: jax.Array | None = None) -> jax.Array:
  """act(gate) * up, or act(up) for an activation without a gate, rounded to their dtype once; backward it is computed
  again from no more than these."""
  return made_once(_activate(activation, up, gate).astype(up.dtype))


def _activate(activation: str, up: jax.Array, gate: jax.Array | None) -> jax.Array:
  """In float32."""
  up = up.astype(jnp.float32)
  if gate is None:
    return UNGATED[activation](up)
  gate = gate.astype(jnp.float32)
  if activation == "clamped_swiglu":
    up, gate = jnp.clip(up, -CLAMP, CLAMP) + 1.0, jnp.minimum(gate, CLAMP)
  return GATED[activation](gate) * up


def _activate_fwd(activation, up, gate):
  return activate(activation, up, gate), (up, gate)


def _activate_bwd(activation, saved, g):
  return made_once(jax.vjp(functools.partial(_activate, activation), *saved)[1](g.astype(jnp.float32)))


activate.defvjp(_activate_fwd, _activate_bwd)
