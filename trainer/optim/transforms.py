"""Directions of descent: Adam, Lion, momentum, Muon, Adafactor, as pure functions on nested dicts.

Each turns gradients into a direction of about the same size as Adam's; learning rate and weight decay are for
trainer/optim/optimizer.py. States are nested dicts of float32 arrays; those as large as a parameter lie under its path,
so that they can be sharded like it.

Dims: L layers (or any leading dims), M rows, N columns of a matrix.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from trainer import tree as tree_lib

Tree = dict[str, Any]

# Leaves whose last dim alone is a unit, whatever is stacked before it.
_VECTOR = re.compile(r"(bias|scale)$")
# Coefficients of the quintic iteration: https://kellerjordan.github.io/posts/muon
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
# RMS of AdamW's updates in practice, which Muon's are scaled to (arXiv 2502.16982, section 2.2).
_ADAM_RMS = 0.2


class Direction(NamedTuple):
  """How gradients become a direction of descent, for a nested dict of parameters."""

  # parameters -> state, a nested dict of arrays.
  init: Callable[[Tree], Tree]
  # (float32 gradients, state) -> (float32 directions, state). Of layers stacked on the first dimension each could be
  # given by itself.
  update: Callable[[Tree, Tree], tuple[Tree, Tree]]


def adam(b1: float, b2: float, eps: float) -> Direction:
  """Adam (Kingma & Ba 2015, arXiv 1412.6980): moments `mu` and `nu`, and `count`."""
  return _from_optax(optax.scale_by_adam(b1, b2, eps), optax.ScaleByAdamState)


def lion(b1: float, b2: float) -> Direction:
  """Lion (Chen et al. 2023, arXiv 2302.06675): one moment, `mu`, and `count`."""
  return _from_optax(optax.scale_by_lion(b1, b2), optax.ScaleByLionState)


def sgd(momentum: float, nesterov: bool) -> Direction:
  """The sum of all gradients, each times `momentum` for every step since: `trace`."""
  return _from_optax(optax.trace(momentum, nesterov), optax.TraceState)


def _from_optax(tx: optax.GradientTransformation, state_type: type) -> Direction:
  """An optax transformation with its state as a plain dict."""

  def init(params: Tree) -> Tree:
    return tx.init(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params))._asdict()

  def update(grads: Tree, state: Tree) -> tuple[Tree, Tree]:
    directions, new = tx.update(grads, state_type(**state))
    return directions, new._asdict()

  return Direction(init, update)


def muon(momentum: float, nesterov: bool, iterations: int) -> Direction:
  """Momentum, orthogonalised matrix by matrix (Jordan et al. 2024), at the RMS of Adam's updates.

  An orthogonal M×N matrix has the RMS 1 / sqrt(max(M, N)), so it is multiplied by 0.2 * sqrt(max(M, N))
  (Liu et al. 2025, arXiv 2502.16982, equation 4): one learning rate and weight decay serve both parts.
  """
  trace = sgd(momentum, nesterov)

  def update(grads: Tree, state: Tree) -> tuple[Tree, Tree]:
    directions, state = trace.update(grads, state)
    return jax.tree.map(scaled, directions), state

  def scaled(x: jax.Array) -> jax.Array:
    return orthogonalise(x, iterations) * (_ADAM_RMS * max(x.shape[-2:]) ** 0.5)

  return Direction(trace.init, update)


def orthogonalise(x_LxMxN: jax.Array, iterations: int = 5) -> jax.Array:
  """About U Vᵀ of each matrix U S Vᵀ, by Newton–Schulz iteration; any number of leading dims.

  The quintic with these coefficients grows small singular values fast instead of converging: after five
  iterations, those that were above 0.0015 of the Frobenius norm lie between 0.68 and 1.21. Matrix products
  are in float32 on CPU and bfloat16 elsewhere.
  """
  def in_dtype(dtype):
    return lambda x: _newton_schulz(x.astype(dtype), iterations).astype(jnp.float32)

  # Of the two sides the smaller one is squared.
  tall = x_LxMxN.shape[-2] > x_LxMxN.shape[-1]
  x = x_LxMxN.swapaxes(-1, -2) if tall else x_LxMxN
  x = x.astype(jnp.float32)
  # By the largest entry first, so that squares of tiny gradients do not vanish; a zero matrix stays zero.
  largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)
  x = x / jnp.where(largest > 0, largest, 1)
  # The Frobenius norm, now at least 1, bounds the largest singular value.
  x = x / jnp.maximum(jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True)), 1)
  x = jax.lax.platform_dependent(x, cpu=in_dtype(jnp.float32), default=in_dtype(jnp.bfloat16))
  return x.swapaxes(-1, -2) if tall else x


def _newton_schulz(x_LxMxN: jax.Array, iterations: int) -> jax.Array:
  a, b, c = _NEWTON_SCHULZ
  for _ in range(iterations):
    gram_LxMxM = x_LxMxN @ x_LxMxN.swapaxes(-1, -2)
    x_LxMxN = a * x_LxMxN + (b * gram_LxMxM + c * (gram_LxMxM @ gram_LxMxM)) @ x_LxMxN
  return x_LxMxN


def adafactor(decay_exponent: float, min_dim_size_to_factor: int) -> Direction:
  """Adafactor (Shazeer & Stern 2018, arXiv 1804.04235) without momentum and without parameter scaling.

  The last two dims of a parameter are its matrix (the last one its vector, of biases and scales), so layers
  stacked on leading dims do not mix. Where both are at least `min_dim_size_to_factor`, the second moment is
  kept as means over rows and over columns (algorithm 4), else in full. Each matrix's or vector's update is
  divided by max(1, its RMS). Since it is not scaled by the parameter's RMS, the learning rate means what it
  means for Adam (as in Zhai et al. 2021, arXiv 2106.04560, section 3.4).
  """
  tiny = 1e-30  # added to squared gradients, as in the paper

  def rank(path: str, p: Any) -> int:
    return min(len(p.shape), 1 if _VECTOR.search(path) else 2)

  def factored(path: str, p: Any) -> bool:
    return rank(path, p) == 2 and min(p.shape[-2:]) >= min_dim_size_to_factor

  def init(params: Tree) -> Tree:
    flat = tree_lib.flatten(params)
    shapes: dict[str, dict[str, tuple[int, ...]]] = {"v_row": {}, "v_col": {}, "v": {}}
    for path, p in flat.items():
      if factored(path, p):
        shapes["v_row"][path], shapes["v_col"][path] = p.shape[:-1], (*p.shape[:-2], p.shape[-1])
      else:
        shapes["v"][path] = p.shape
    moments = {name: {path: jnp.zeros(shape, jnp.float32) for path, shape in of.items()}
               for name, of in shapes.items() if of}
    return {"count": jnp.zeros((), jnp.int32)} | {k: tree_lib.unflatten(v) for k, v in moments.items()}

  def update(grads: Tree, state: Tree) -> tuple[Tree, Tree]:
    count = state["count"] + 1
    decay = 1 - count.astype(jnp.float32) ** -decay_exponent
    old = {name: tree_lib.flatten(tree) for name, tree in state.items() if name != "count"}
    new: dict[str, dict[str, jax.Array]] = {name: {} for name in old}

    def average(name, path, value):
      new[name][path] = decay * old[name][path] + (1 - decay) * value
      return new[name][path]

    directions = {}
    for path, g in tree_lib.flatten(grads).items():
      squared = jnp.square(g) + tiny
      if factored(path, g):
        row_LxMx1 = average("v_row", path, jnp.mean(squared, axis=-1))[..., :, None]
        col_Lx1xN = average("v_col", path, jnp.mean(squared, axis=-2))[..., None, :]
        row_LxMx1 = row_LxMx1 / jnp.mean(row_LxMx1, axis=-2, keepdims=True)
        u = g * jax.lax.rsqrt(row_LxMx1) * jax.lax.rsqrt(col_Lx1xN)
      else:
        u = g * jax.lax.rsqrt(average("v", path, squared))
      rms = jnp.sqrt(jnp.mean(jnp.square(u), axis=tuple(range(-rank(path, u), 0)), keepdims=True))
      directions[path] = u / jnp.maximum(1.0, rms)
    state = {"count": count} | {name: tree_lib.unflatten(flat) for name, flat in new.items()}
    return tree_lib.unflatten(directions), state

  return Direction(init, update)
