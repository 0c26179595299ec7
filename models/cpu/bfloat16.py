"""bfloat16 on CPU, where XLA converts to float32 and back whatever a library does not compute for it.

Two things which that makes slow are written otherwise here:

  Products run on the processor's own instructions for bfloat16 (AMX) if they are of matrices [M, K] and [K, N] as they
  lie, or the second turned, with a result in float32; and if the program was told so (trainer/startup.py). Of a layer's
  three products only the kernel's gradient is not such a one: one operand is turned for it. XLA decides early which
  products are; if it then turns one, by what stands before or after it, nobody can compute it, and the program ends
  with UNIMPLEMENTED. So all products of bfloat16 with a result in float32 are made by `einsum`.
  An array to which a loop adds a part at a time would be converted whole each time. As bits, uint16, it is not.

Elsewhere these functions do what their plain forms do. M rows, K inputs, N outputs.
"""

from typing import Any

import jax
import jax.numpy as jnp

from models.sharding import logical_axes


def is_bfloat16(x: jax.Array) -> bool:
  """Whether it is bfloat16 in a program for CPU."""
  return x.dtype == jnp.bfloat16 and logical_axes.platform() == "cpu"


def einsum(product: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """`jnp.einsum` with a result in float32; on CPU the product stays as it is written."""
  if not is_bfloat16(a) or a.dtype != b.dtype:
    return jnp.einsum(product, a, b, preferred_element_type=jnp.float32)
  return _stays(jnp.einsum(product, *_stays((a, b)), preferred_element_type=jnp.float32))


_stays = jax.lax.optimization_barrier


def matmul(x: jax.Array, w_KxN: jax.Array) -> jax.Array:
  """x [..., K] @ w, in their dtype."""
  return _matmul(x, w_KxN) if is_bfloat16(x) else jnp.matmul(x, w_KxN)


def inputs_gradient(g: jax.Array, w_KxN: jax.Array) -> jax.Array:
  """g [..., N] @ wᵀ: [..., K], in their dtype."""
  product = "...n,kn->...k"
  return einsum(product, g, w_KxN).astype(g.dtype) if is_bfloat16(g) else jnp.einsum(product, g, w_KxN)


def kernel_gradient(x: jax.Array, g: jax.Array, sums: Any = jnp.float32) -> jax.Array:
  """The sum over all rows of x [..., K] times g [..., N]: [K, N] in the dtype `sums`; of 8-bit integers, too."""
  if logical_axes.platform() != "cpu" or x.dtype not in (jnp.bfloat16, jnp.int8):
    return jnp.einsum("...k,...n->kn", x, g, preferred_element_type=sums)
  K, N = x.shape[-1], g.shape[-1]
  if N < K:
    return kernel_gradient(g, x, sums).T  # the smaller one is turned
  # With a dimension of 1, which the compiler leaves alone: else the operand is turned by how it is read.
  across_1xKxM, g_1xMxN = _stays((x.reshape(1, -1, K).swapaxes(1, 2), g.reshape(1, -1, N)))
  return _stays(jnp.matmul(across_1xKxM, g_1xMxN, preferred_element_type=sums))[0]


@jax.custom_vjp
def _matmul(x: jax.Array, w_KxN: jax.Array) -> jax.Array:
  return einsum("...k,kn->...n", x, w_KxN).astype(x.dtype)


def _matmul_fwd(x, w_KxN):
  return _matmul(x, w_KxN), (x, w_KxN)


def _matmul_bwd(saved, g):
  x, w_KxN = saved
  return inputs_gradient(g, w_KxN), kernel_gradient(x, g).astype(w_KxN.dtype)


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def as_bits(x: jax.Array) -> jax.Array:
  """What a loop may add to part by part: on CPU the bits of bfloat16; all else as it is."""
  return jax.lax.bitcast_convert_type(x, jnp.uint16) if is_bfloat16(x) else x


def from_bits(x: jax.Array) -> jax.Array:
  """The inverse of `as_bits`; nothing else that is kept is uint16."""
  return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
