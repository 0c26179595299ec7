"""Products of 8-bit numbers: their error, their gradients, what they depend on, and that a model learns with them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import api
from models.experts import grouped
from models.quantization.matmul import QuantizedMatmul, make_matmul_rules
from models.sharding import logical_axes
from models.sharding.linear import SplitKernel, project
from trainer.config import defaults
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError

M, K, N = 24, 48, 40
# Half the distance of neighbouring numbers: of int8 in terms of the row's largest, of e4m3 and e5m2 of the number.
INT8, E4M3, E5M2 = 0.5 / 127, 2.0**-4, 2.0**-3


@functools.cache
def arrays(seed=0):
  """(x, w, g) with rows of very different size, float32."""
  rng = np.random.default_rng(seed)
  x, w, g = (rng.normal(size=shape).astype(np.float32) for shape in ((M, K), (K, N), (M, N)))
  return x * np.exp(2 * rng.normal(size=(M, 1))).astype(np.float32), w, g


def rounded(x, axis, bound, relative):
  """The largest error of each entry of `x`, rounded with one scale for each line along `axis`."""
  # With a scale, e4m3 and e5m2 also have evenly spaced numbers near 0: these add 2^-10 / 448 of the largest at most.
  largest = np.abs(x).max(axis, keepdims=True)
  return bound * np.abs(x) + 3e-6 * largest if relative else np.broadcast_to(bound * largest, x.shape)


def product_bound(a, b, da, db):
  """The largest error of a @ b whose factors are wrong by da and db at most."""
  return np.abs(a) @ db + da @ np.abs(b) + da @ db + 1e-5 * (np.abs(a) @ np.abs(b))


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_products_are_as_exact_as_their_format(form):
  x, w, _ = arrays()
  bound, relative = (INT8, False) if form == "int8" else (E4M3, True)
  error = np.abs(np.asarray(jax.jit(QuantizedMatmul(form))(x, w)) - x.astype(np.float64) @ w)
  assert (error <= product_bound(x, w, rounded(x, 1, bound, relative), rounded(w, 0, bound, relative))).all()
  assert error.max() > 0


@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("gradients", ["none", "inputs", "all"])
def test_gradients_are_those_of_the_rounded_factors(form, gradients):
  """Straight through the rounding: g ŵᵀ and x̂ᵀ g, up to the rounding of g that `gradients` asks for."""
  x, w, g = arrays()
  how = QuantizedMatmul(form, gradients)
  _, backward = jax.vjp(how, x, w)
  dx, dw = (np.asarray(d) for d in jax.jit(backward)(g))
  x_hat, w_hat = (np.asarray(q.qvalue, np.float32) * np.asarray(q.scale)
                  for q in (how.quantize(x, along=1), how.quantize(w, along=0)))
  w_scale, x_scale = how.quantize(w, along=0).scale, how.quantize(x, along=1).scale
  bound, relative = (INT8, False) if form == "int8" else (E5M2, True)
  for got, exact, error in (
      (dx, g @ w_hat.T, rounded(g * w_scale, 1, bound, relative) @ np.abs(w_hat / w_scale).T * (gradients != "none")),
      (dw, x_hat.T @ g, np.abs(x_hat / x_scale).T @ rounded(g * x_scale, 0, bound, relative) * (gradients == "all"))):
    slack = 1e-5 * np.abs(exact).max()
    assert (np.abs(got - exact) <= error + slack).all()
    assert (np.abs(got - exact).max() > slack) == bool(error.any())


def test_gradients_of_fp8_have_the_range_of_e5m2():
  """What is 1e-6 of a line's largest would be 0 in e4m3, whose smallest number is 2^-9 of at most 448."""
  x, w, g = np.eye(8, dtype=np.float32), np.eye(8, dtype=np.float32), np.full((8, 8), 1e-6, np.float32)
  np.fill_diagonal(g, 1.0)
  _, backward = jax.vjp(QuantizedMatmul("fp8", "all"), x, w)
  for d in jax.jit(backward)(g):
    np.testing.assert_allclose(np.asarray(d), g, rtol=0.125)


@pytest.mark.parametrize("form, codes", [("int8", "s8"), ("fp8", "f8e4m3fn")])
def test_the_compiled_program_multiplies_codes(form, codes):
  """What the backend makes of products of fp8 is its matter; that they are asked for is ours."""
  x, w, _ = arrays()
  lowered = jax.jit(QuantizedMatmul(form)).lower(x, w)
  assert ("xi8>" if form == "int8" else "xf8E4M3FN>") in next(
      line for line in lowered.as_text().splitlines() if "dot_general" in line)
  assert codes in lowered.compile().as_text()


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_a_row_does_not_depend_on_the_rows_beside_it(form):
  x, w, g = arrays()
  run = jax.jit(lambda x, g: (QuantizedMatmul(form)(x, w), jax.vjp(lambda x: QuantizedMatmul(form)(x, w), x)[1](g)[0]))
  kept = np.arange(M)[:, None] == 3
  for before, after in zip(run(x, g), run(np.where(kept, x, 1000 * x), np.where(kept, g, 1 - g)), strict=True):
    np.testing.assert_array_equal(before[3], after[3])
    assert (before[4] != after[4]).any()


def test_zeros_and_tiny_rows_are_finite():
  x, w, g = arrays()
  for scale in (0.0, 1e-30):
    y, backward = jax.vjp(QuantizedMatmul("int8", "all"), x * np.float32(scale), w)
    assert np.isfinite(y).all() and all(np.isfinite(d).all() for d in backward(g * np.float32(scale)))


@pytest.mark.parametrize("gradients", ["none", "inputs", "all"])
def test_grouped_products_equal_one_product_per_group(gradients):
  """The mixture's products, with an empty group and rows of no group, against the plain ones."""
  x, w, g = arrays()
  how, block, sizes = QuantizedMatmul("int8", gradients), 4, jnp.array([8, 0, 12])
  kernels = np.stack([w, 2 * w, w[::-1] ** 3])
  run = functools.partial(how.grouped, sizes_E=sizes, block=block, multiply=grouped._grouped,
                          outer=grouped._grouped_outer)
  y, backward = jax.vjp(lambda x, w: run(x, w), x, kernels)
  dx, dw = backward(g)
  assert not y[20:].any() and not dx[20:].any() and not dw[1].any()
  for rows, expert in ((slice(0, 8), 0), (slice(8, 20), 2)):
    expected, expected_backward = jax.vjp(how, x[rows], kernels[expert])
    expected_dx, expected_dw = expected_backward(g[rows])
    np.testing.assert_allclose(y[rows], expected, rtol=1e-6)
    np.testing.assert_allclose(dx[rows], expected_dx, rtol=1e-5, atol=1e-5 * float(jnp.abs(dx).max()))
    # With `all`, the groups share the scales of g's columns.
    atol = (0.02 if gradients == "all" else 1e-6) * float(jnp.abs(dw).max())
    np.testing.assert_allclose(dw[expert], expected_dw, atol=atol)


@pytest.mark.devices(8)
@pytest.mark.parametrize("gradients", ["inputs", "all"])
def test_a_kernel_split_to_save_memory_gives_the_same_product_to_the_bit(gradients):
  """I2, where no device has a part of a sum: kernels are gathered, and scales are those of whole rows and columns."""
  x, w, g = arrays()
  x, g = x.reshape(8, 3, K), g.reshape(8, 3, N)
  how = QuantizedMatmul("int8", gradients)

  def run(x, w, g):
    placed = logical_axes.current()

    def product(x, w):
      if placed is None:
        return how(x.reshape(-1, K), w).reshape(8, 3, N)
      return project(placed, x, (w,), (SplitKernel((None, "mlp"), how),), jnp.float32)[0]

    y, backward = jax.vjp(product, x, w)
    return y, *backward(g)

  expected = jax.jit(run)(x, w, g)
  with mesh_lib.activation_rules(mesh_lib.make_mesh(dict(data=1, fsdp=4, tensor=2))):
    got = jax.jit(run)(x, w, g)
  np.testing.assert_array_equal(got[0], expected[0])
  for a, b in zip(got[1:], expected[1:], strict=True):
    # Parts of gradients are added up over devices; with `all`, each has scales for the tokens that it has.
    np.testing.assert_allclose(a, b, atol=(1e-6 if gradients == "inputs" else 2e-2) * float(jnp.abs(b).max()))


def test_kernels_are_chosen_by_path():
  matmul_rules = make_matmul_rules("int8", "inputs", ("attn/[qk]/",))
  paths = ("blocks/attn/q/kernel", "blocks/attn/o/kernel", "blocks/moe/router/kernel", "blocks/moe/shared_gate/kernel",
           "blocks/moe/experts/up/kernel", "unembed/kernel", "vision/blocks/attn/o/kernel", "blocks/attn/o/bias")
  chosen = [path for path in paths if matmul_rules.of(path)]
  assert chosen == ["blocks/attn/o/kernel", "blocks/moe/experts/up/kernel"]
  matmul_rules.check(paths)
  with pytest.raises(ConfigError, match="matmul_skip: the pattern 'atn' matches none"):
    make_matmul_rules("int8", "inputs", ("atn",)).check(paths)
  with pytest.raises(ConfigError, match="leaves no kernel"):
    make_matmul_rules("int8", "inputs", ("blocks",)).check(paths)
  assert make_matmul_rules("none") is None


class NoProducts:
  """A model of someone's own that does not know of them."""

  def __init__(self, cfg_model, *, vocab_size, params_dtype, compute_dtype, remat="none"):
    pass


def test_a_model_that_would_ignore_them_is_refused():
  cfg = defaults().model
  cfg.name = f"{__name__}.NoProducts"
  options = dict(vocab_size=8, params_dtype="float32", compute_dtype="float32")
  assert type(api.make_model(cfg, **options)) is NoProducts
  with pytest.raises(ConfigError, match="matmul is int8, but .*NoProducts does not take `matmul_rules`"):
    api.make_model(cfg, matmul_rules=make_matmul_rules("int8"), **options)
