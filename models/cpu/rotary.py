"""Rotary embeddings on CPU."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from models.sharding import logical_axes


def computed_once(make: Callable[[], tuple[jax.Array, jax.Array]], positions: jax.Array, shape: tuple[int, ...]
                  ) -> tuple[jax.Array, jax.Array]:
  """`make()`, two arrays in float32 of that shape. XLA on CPU would compute them again wherever they are used: into a
  branch it does not look. That the other one is never taken it does not know."""
  if logical_axes.current() is not None or logical_axes.platform() != "cpu":
    return make()
  unused = jnp.zeros(shape, jnp.float32)
  return jax.lax.cond(jnp.max(positions) >= jnp.min(positions), make, lambda: (unused, unused))


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Turns the pairs (x[p], x[p + P]) of the first 2P entries, as XLA for CPU makes vectors of it: where parts are put
  together it asks of each number where it is."""
  P = cos.shape[-1]
  both_2xP = x[..., : 2 * P].reshape(*x.shape[:-1], 2, P)
  sines_2xP = jnp.stack([-sin, sin], axis=-2)
  rotated = (both_2xP * cos[..., None, :] + jnp.flip(both_2xP, -2) * sines_2xP).reshape(*x.shape[:-1], 2 * P)
  return rotated if 2 * P == x.shape[-1] else jnp.concatenate([rotated, x[..., 2 * P :]], axis=-1)
