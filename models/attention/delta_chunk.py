"""What kernels of the gated delta rule compute of a chunk, in the registers of a program; see delta_kernels.py.

C tokens of a chunk; a pair of bfloat16 numbers is a float32 one, rounded, and what was left of it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

CHUNK = 64
# Blocks of so many equations are solved by powers, which do not grow far in them.
_SMALLEST = 8
ALL = slice(None)


class Tokens(NamedTuple):
  """What kernels are told of tokens beside queries, keys and values; all but `owner` float32.

  Attributes:
    q_scale, k_scale [B, G, T]: what makes queries and keys as long as they are to be.
    beta, total, since, left [B, H, T]: as in delta_rule.py.
    owner [B, T]: int32, see `delta_rule.owners`.
  """

  q_scale: Any
  k_scale: Any
  beta: Any
  total: Any
  since: Any
  left: Any
  owner: Any


def earlier(t: Tokens) -> jax.Array:
  """Whether token j is of the same owner as i and not after it, [C, C]."""
  i, j = (jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), d) for d in (0, 1))
  return (t.owner[:, None] == t.owner[None, :]) & (i >= j)


def diagonal() -> jax.Array:
  i, j = (jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), d) for d in (0, 1))
  return i == j


def decay(t: Tokens) -> jax.Array:
  """The share of what token j writes that is left at i, [C, C]."""
  return jnp.where(earlier(t), jnp.exp(jnp.minimum(t.total[:, None] - t.total[None, :], 0.0)), 0.0)


def weights(q: jax.Array, k: jax.Array, t: Tokens) -> jax.Array:
  return dot(q, k, across=True) * (t.q_scale[:, None] * t.k_scale[None, :]) * decay(t)


def system(k: jax.Array, t: Tokens) -> jax.Array:
  """Below the diagonal; zeros elsewhere."""
  products = dot(k, k, across=True) * ((t.beta * t.k_scale)[:, None] * t.k_scale[None, :]) * decay(t)
  return jnp.where(diagonal(), 0.0, products)


def inverse(below: jax.Array) -> jax.Array:
  """Of 1 + below, a lower triangular [C, C]: in small blocks (1 - L)(1 + L²)(1 + L⁴), then of blocks of twice the size
  as `delta_rule._inverse` does, all at once."""
  i, j = (jax.lax.broadcasted_iota(jnp.int32, below.shape, d) for d in (0, 1))
  one = jnp.where(i == j, 1.0, 0.0)
  small = jnp.where(i // _SMALLEST == j // _SMALLEST, below, 0.0)
  squares = dot(small, small)
  fourths = dot(squares, squares)
  inverse = dot(one - small, one + squares)
  inverse = inverse + dot(inverse, fourths)
  size = _SMALLEST
  while size < CHUNK:
    beside = (i // (2 * size) == j // (2 * size)) & (i // size != j // size)
    inverse = inverse - dot(dot(inverse, jnp.where(beside, below, 0.0)), inverse)
    size *= 2
  return inverse


def dot(a: Any, b: Any, *, across: bool = False) -> jax.Array:
  """a b, or a bᵀ, in float32, of arrays or `parts`: less what is left times what is left."""
  from jax.experimental.pallas import triton
  (a, *a_left), (b, *b_left) = parts(a), parts(b)
  multiply = functools.partial(triton.dot, trans_b=across)
  total = multiply(a, b)
  for left in a_left:
    total += multiply(left, b)
  for left in b_left:
    total += multiply(a, left)
  return total


def parts(x: Any) -> tuple[jax.Array, ...]:
  """The bfloat16 numbers whose sum it is: the number rounded, and what was left."""
  if isinstance(x, tuple):
    return x
  if x.dtype == jnp.bfloat16:
    return (x,)
  rounded = x.astype(jnp.bfloat16)
  return rounded, (x - rounded.astype(x.dtype)).astype(jnp.bfloat16)


def transposed(x: Any) -> tuple[jax.Array, ...]:
  return tuple(part.T for part in parts(x))


def load(ref: Any, *here: Any) -> tuple[jax.Array, ...]:
  """The parts that `store` wrote."""
  return ref[(0, *here)], ref[(1, *here)]


def store(ref: Any, x: Any, *here: Any) -> None:
  ref[(0, *here)], ref[(1, *here)] = parts(x)


def tile(number: Any, size: int = CHUNK) -> Any:
  from jax.experimental import pallas as pl
  return pl.ds(number * size, size)


def at(refs: Tokens, here: Any = slice(None)) -> Tokens:
  """What `refs` hold of these tokens."""
  return jax.tree.map(lambda ref: ref[here], refs)
