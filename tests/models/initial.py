"""Initial parameters by NumPy. The program that draws them takes longer to compile than most that use what it draws."""

import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from flax import nnx

from models import layers
from models.cpu.random_bits import threefry
from trainer import tree


def _even(path, layer, seed, shape):
  """Of [0, 1): what JAX draws for a parameter, whose key is made of path and layer (`models.layers.Scope`)."""
  zero = np.zeros(1, np.uint32)
  key = zero, zero + np.uint32(seed)
  for word in (zlib.crc32(path.encode()), layer):
    key = key if word is None else threefry(*key, zero, zero + np.uint32(word))
  count = np.arange(math.prod(shape), dtype=np.uint32)
  words = threefry(*key, np.zeros_like(count), count)
  bits = ((words[0] ^ words[1]) >> np.uint32(9)) | np.uint32(0x3F800000)
  return bits.view(np.float32).reshape(shape).astype(float) - 1


def _between(even, low, high):
  return low + even * (high - low)


_OF_EVEN = {
    "normal": lambda even, std: std * math.sqrt(2) * scipy.special.erfinv(_between(even, -1 + 2**-24, 1)),
    "uniform": lambda even, bound: _between(even, -bound, bound),
    "log_uniform": lambda even, low, high: np.log(_between(even, low, high)),
    "softplus_log_uniform": lambda even, low, high: np.log(np.expm1(np.exp(_between(
        even, math.log(low), math.log(high))))),
    "constant": lambda even, value: np.full_like(even, value),
}


def initial(model, seed=0):
  """`jax.jit(model.init)(jax.random.key(seed))` to four digits or more, for parameters in floating point."""
  made = {}

  def noted(kind):
    def make(self, name, shape, *numbers, **named):
      made[(self / name).path] = kind, shape, self.layer is not None, (*numbers, *named.values())
      return nnx.Param(jnp.zeros(shape, self.kind(name)))
    return make

  with pytest.MonkeyPatch.context() as patch:
    for kind in _OF_EVEN:
      patch.setattr(layers.Scope, kind, noted(kind))
    abstract = tree.flatten(jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0))))

  def leaf(path, like):
    # The bias that chooses experts is made without a scope.
    kind, shape, stacked, numbers = made.get(path, ("constant", like.shape, False, (0.0,)))
    top, _, rest = path.partition("/")
    numbers_of = [None] if not stacked else model.spec.layers_with(rest.partition("/")[0]) if top == "blocks" else (
        range(like.shape[0]))
    drawn = [_OF_EVEN[kind](_even(path, number, seed, shape), *numbers) for number in numbers_of]
    return jnp.asarray(np.stack(drawn) if stacked else drawn[0], like.dtype)

  return tree.unflatten({path: leaf(path, like) for path, like in abstract.items()})
