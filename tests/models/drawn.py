"""Random numbers as Weft draws them, by JAX alone: `python tests/models/drawn.py FILE` writes them as .npz."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

SEED = 2**31 + 7
DRAWN = {
    "bits": lambda key: jax.random.bits(key, (40, 7)),
    "bits of 16": lambda key: jax.random.bits(key, (40, 7), "uint16"),
    "normal": lambda key: jax.random.normal(key, (40, 7)),
    "uniform": lambda key: jax.random.uniform(key, (33,)),
    "categorical": lambda key: jax.random.categorical(key, jnp.arange(50.0), shape=(20,)),
    "bernoulli": lambda key: jax.random.bernoulli(key, 0.3, (9, 8)),
    "split": lambda key: jax.random.key_data(jax.random.split(key, 5)),
    "fold_in": lambda key: jax.random.key_data(jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(6))),
}


def drawn() -> dict[str, np.ndarray]:
  """Each of them, as compiled here."""
  return {name: np.asarray(jax.jit(draw)(jax.random.key(SEED))) for name, draw in DRAWN.items()}


if __name__ == "__main__":
  np.savez(sys.argv[1], **drawn())
