"""Products with split kernels against the same products on one device, in whole numbers, so that they are equal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.sharding import linear, logical_axes
from models.sharding.linear import SplitKernel
from trainer.distributed import mesh as mesh_lib

pytestmark = pytest.mark.devices(8)


@pytest.mark.parametrize("sizes", [dict(data=2, fsdp=2, tensor=2), dict(data=2, fsdp=4), dict(data=8), dict(
    fsdp=4, context=2)], ids=str)
def test_gradients_of_an_unembedding_are_sums_over_all_tokens(sizes):
  """Of which devices that hold the same part of it have some each."""
  rng = np.random.default_rng(1)
  x, g = (jnp.asarray(rng.integers(-4, 5, shape), jnp.float32) for shape in ((8, 8, 16), (8, 8, 24)))
  with logical_axes.placed(mesh_lib.make_placement(mesh_lib.make_mesh(sizes))):
    dw = jax.jit(lambda x, g: linear.kernel_gradient(x, g, ("embed", "vocab")))(x, g)
  np.testing.assert_array_equal(dw, np.einsum("btk,btn->kn", x, g))


@pytest.mark.parametrize("names", [(None, "mlp"), ("mlp", None), (None, None)])
@pytest.mark.parametrize("sizes", [dict(fsdp=2, expert=2, tensor=2), dict(fsdp=4, expert=2), dict(
    fsdp=2, context=2, tensor=2)])
def test_kernels_that_several_axes_save_memory_with_are_put_together_in_their_order(names, sizes):
  """The product, and the gradients of both for an arbitrary one of it."""
  rng = np.random.default_rng(0)
  x, w, g = (jnp.asarray(rng.integers(-4, 5, shape), jnp.float32) for shape in ((8, 8, 16), (16, 24), (8, 8, 24)))
  placed = mesh_lib.make_placement(mesh_lib.make_mesh(sizes))
  kernel = SplitKernel(names, None)
  assert len(jax.tree.leaves(tuple(kernel.spec(placed, w.shape)))) == len(sizes) - (names == (None, None)) * (
      "tensor" in sizes)

  def product(x, w):
    y, = linear.project(placed, x, (w,), (kernel,), jnp.float32)
    return jnp.sum(y * g), y

  (_, y), (dx, dw) = jax.jit(jax.value_and_grad(product, argnums=(0, 1), has_aux=True))(x, w)
  np.testing.assert_array_equal(y, x @ w)
  np.testing.assert_array_equal(dx, g @ w.T)
  np.testing.assert_array_equal(dw, np.einsum("btk,btn->kn", x, g))
