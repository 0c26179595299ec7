"""Layers against plain numpy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import activations, cpu, layers, tables
from models.cpu import padding
from models.quantization import quantize
from models.quantization.matmul import make_matmul_rules
from models.sharding import logical_axes
from models.spec import Lora
from tests import tiny

SCOPE = layers.Scope(jax.random.key(0), jnp.float32, jnp.float32)


def test_rmsnorm_and_layernorm_equal_numpy():
  x = np.random.default_rng(0).normal(2.0, 3.0, (2, 5, 16)).astype(np.float32)
  scale, bias = np.linspace(-1, 2, 16, dtype=np.float32), np.linspace(3, 1, 16, dtype=np.float32)
  for kind in layers.NORMS:
    for plus_one in (False, True):
      norm = layers.Norm(SCOPE, 16, kind=kind, eps=0.1, plus_one=plus_one, bias=True)
      norm.scale[...], norm.bias[...] = scale, bias
      centred = x - x.mean(-1, keepdims=True) if kind == "layernorm" else x
      expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 0.1) * (scale + plus_one) + bias
      np.testing.assert_allclose(norm(x), expected, atol=1e-5)


def test_the_length_of_a_document_is_that_of_its_segment_in_the_row():
  segments = np.array([[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 2, 2]])
  positions = np.array([[0, 1, 2, 0, 1, 0], [6, 0, 1, 2, 3, 4]])  # the first of the second row began before it
  lengths = layers.document_lengths(jnp.asarray(positions), jnp.asarray(segments))
  np.testing.assert_array_equal(lengths, [[3, 3, 3, 2, 2, 1], [7, 5, 5, 5, 5, 5]])


def test_norm_is_computed_in_float32():
  """In bfloat16 the squares of 300 and 1 could not be added exactly."""
  x = jnp.asarray([300.0, 1.0] * 64, jnp.bfloat16)
  norm = layers.Norm(SCOPE, 128, kind="rmsnorm", eps=0.0, plus_one=False)
  expected = (np.asarray(x, np.float32) / np.sqrt((300.0**2 + 1) / 2)).astype(jnp.bfloat16)
  assert norm(x).dtype == jnp.bfloat16
  np.testing.assert_array_equal(norm(x).astype(jnp.float32), expected.astype(np.float32))


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norms_of_bfloat16_are_rounded_once(kind):
  """A mean, a length or a scale in between that is bfloat16 too would move a third of them, or more."""
  rng = np.random.default_rng(0)
  x, scale = jnp.asarray(3 * rng.normal(size=(64, 128)), jnp.bfloat16), rng.uniform(0.5, 2.0, 128)
  norm = layers.Norm(SCOPE, 128, kind=kind, eps=1e-6, plus_one=False)
  norm.scale = nnx.Param(jnp.asarray(scale, jnp.float32))
  y = np.asarray(x, np.float64)
  y = y - y.mean(-1, keepdims=True) if kind == "layernorm" else y
  expected = jnp.asarray(y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * scale, jnp.bfloat16)
  assert np.mean(np.asarray(norm(x) != expected)) < 0.01


@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_few_rows_are_multiplied_by_a_kernel_where_it_lies(dtype):
  """The product is [out, rows], of the kernel as it is kept: XLA for CPU reads that without packing it."""
  kind = jnp.float32 if dtype is None else jnp.bfloat16
  x, kernel = (jax.random.normal(jax.random.key(i), shape, kind) for i, shape in enumerate([(3, 1, 8), (24, 8)]))
  run = jax.jit(functools.partial(cpu.few_rows, dtype=dtype))
  y = run(x, kernel)
  assert y.shape == (3, 1, 24) and y.dtype == jnp.float32
  np.testing.assert_allclose(y, np.asarray(x, np.float32) @ np.asarray(kernel, np.float32).T, atol=1e-5)
  dots = [line for line in run.lower(x, kernel).compile().as_text().splitlines() if " dot(" in line]
  assert len(dots) == 1 and "= f32[24,3]" in dots[0] and "lhs_contracting_dims={1}" in dots[0]


@pytest.mark.parametrize("activation", activations.ACTIVATIONS)
def test_mlp(activation):
  options = dict(activation=activation, std=None, bias=True, out_gain=1.0)
  mlp = layers.Mlp(SCOPE, 8, 12, **options)
  x = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
  for i, layer in enumerate(m for m in (mlp.gate, mlp.up, mlp.down) if m is not None):
    layer.bias[...] = 0.1 * (i + 1) * jnp.ones_like(layer.bias[...])
  dense = lambda layer, x: x @ np.asarray(layer.kernel[...]) + np.asarray(layer.bias[...])  # noqa: E731
  if activation in activations.GATED:
    offset = float(activation == "clamped_swiglu")
    hidden = activations.GATED[activation](dense(mlp.gate, x)) * (dense(mlp.up, x) + offset)
  elif activation == "xielu":  # with the numbers that it begins with
    up = dense(mlp.up, x).astype(np.float64)
    hidden = np.where(up > 0, 0.8 * up**2 + 0.5 * up, 0.8 * (np.expm1(np.minimum(up, -1e-6)) - up) + 0.5 * up)
  else:
    hidden = activations.UNGATED[activation](dense(mlp.up, x))
  np.testing.assert_allclose(mlp(x), dense(mlp.down, hidden), atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", activations.ACTIVATIONS)
def test_columns_that_put_rows_apart_change_nothing(activation, bias, monkeypatch):
  """Values and gradients, which have the shapes of the parameters."""
  graph, params = nnx.split(layers.Mlp(SCOPE, 8, 12, activation=activation, std=None, bias=bias, out_gain=1.0))
  params = jax.tree.map(lambda p: jax.random.normal(jax.random.key(p.size), p.shape), params)
  x, weights = (jax.random.normal(jax.random.key(i), (2, 5, 8)) for i in range(2))

  def weighted(params, x):
    y = nnx.merge(graph, params)(x)
    return (weights * y).sum(), y

  def computed():
    run = jax.value_and_grad(weighted, (0, 1), has_aux=True)
    made = [e.outvars[0].aval.shape for e in tiny.equations(jax.make_jaxpr(run)(params, x).jaxpr)
            if e.primitive.name == "dot_general"]
    return made, jax.jit(run)(params, x)

  shapes, expected = computed()
  monkeypatch.setattr(padding, "TOO_EVEN", 12)
  monkeypatch.setattr(padding, "ROWS", 11)
  assert computed()[0] == shapes  # with fewer rows than that, the copies of kernels would take too long
  monkeypatch.setattr(padding, "ROWS", 10)
  wider, found = computed()
  assert wider == [tuple(12 + padding.APART if n == 12 else n for n in shape) for shape in shapes] != shapes
  for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
    assert a.shape == b.shape
    np.testing.assert_allclose(b, a, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("changed", [
    dict(compute_dtype=jnp.bfloat16), dict(lora=Lora(2, 1.0, ("mlp/down",), 0.0)),
    dict(matmul_rules=make_matmul_rules("int8")),
    dict(frozen=quantize.Frozen("int8", lambda path: path.endswith("down/kernel"))), dict(outputs_first=True),
], ids=lambda changed: next(iter(changed)))
def test_products_that_are_not_of_plain_kernels_in_float32_have_no_more_columns(changed, monkeypatch):
  monkeypatch.setattr(padding, "TOO_EVEN", 12)
  monkeypatch.setattr(padding, "ROWS", 1)
  scope = dataclasses.replace(SCOPE, path="blocks/mlp", **changed)
  mlp = layers.Mlp(scope, 8, 12, activation="swiglu", std=None, bias=False, out_gain=1.0)
  sizes = {n for e in tiny.equations(jax.make_jaxpr(lambda x: mlp(x))(jnp.ones((2, 5, 8))).jaxpr)
           for n in e.outvars[0].aval.shape}
  assert 12 in sizes and 12 + padding.APART not in sizes


def test_gates_that_are_counted_have_no_more_columns(monkeypatch):
  """These, all 0, would move the mean that gates are cut by."""
  mlp = layers.Mlp(SCOPE, 8, 12, activation="geglu", std=None, bias=False, out_gain=1.0)
  x = jax.random.normal(jax.random.key(1), (2, 5, 8)) + 1.0
  expected = mlp(x, sparsity=0.6)
  monkeypatch.setattr(padding, "TOO_EVEN", 12)
  monkeypatch.setattr(padding, "ROWS", 1)
  np.testing.assert_allclose(mlp(x, sparsity=0.6), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_on_tpu_what_products_of_an_mlp_read_is_made_before_them_and_the_same(activation, monkeypatch):
  mlp = layers.Mlp(SCOPE, 8, 12, activation=activation, std=None, bias=False, out_gain=1.0)
  graph, params = nnx.split(mlp)
  x = jax.random.normal(jax.random.key(1), (2, 3, 8))

  def compute():
    step = lambda params, x: jax.vjp(lambda p, x: nnx.merge(graph, p)(x), params, x)[1](jnp.ones_like(x))  # noqa: E731
    return str(jax.make_jaxpr(step)(params, x)).count("optimization_barrier"), jax.jit(step)(params, x)

  barriers, expected = compute()
  monkeypatch.setattr(logical_axes, "platform", lambda: "tpu")
  # The input, the hidden layer, the gradients of what that is made of, and the input's.
  on_tpu, found = compute()
  assert (barriers, on_tpu) == (0, 4)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found, expected)


def test_dropout_keeps_the_mean_and_drops_the_share():
  x = jnp.ones((64, 64))
  y = np.asarray(layers.dropout(x, 0.25, jax.random.key(0)))
  assert set(np.unique(y)) == {0.0, np.float32(1 / 0.75)}
  assert abs((y == 0).mean() - 0.25) < 0.02


def test_an_id_beyond_the_table_gives_nan():
  embed = tables.Embedding(SCOPE / "embed", 10, 4, std=None)
  rows = embed(jnp.array([[3, 10]]))
  np.testing.assert_array_equal(rows[0, 0], embed.embedding[...][3])
  assert np.isnan(rows[0, 1]).all()


def test_initial_values_depend_on_rng_path_and_layer_only():
  def value(name="kernel", seed=0, layer=None):
    scope = layers.Scope(jax.random.key(seed), jnp.float32, jnp.float32, layer=layer)
    return np.asarray((scope / "a").normal(name, (4, 4), 1.0)[...])

  assert (value() == value()).all()
  others = [value("other"), value(seed=1), value(layer=0), value(layer=1)]
  assert all((value() != other).any() for other in others)
  assert (value(layer=0) != value(layer=1)).any()


def test_each_adapter_on_the_same_input_has_a_dropout_of_its_own():
  """Adapters that are the identity over kernels of 0: the outputs are the inputs as they were kept."""
  scope = dataclasses.replace(SCOPE, lora=Lora(rank=64, scale=1.0, targets=(".*",), dropout=0.5))
  made = [layers.Linear(scope / name, 64, 64, std=1.0, bias=False) for name in ("q", "k", "v")]
  for linear in made:
    linear.kernel[...], linear.lora_a[...], linear.lora_b[...] = jnp.zeros((64, 64)), jnp.eye(64), jnp.eye(64)
  key = jax.random.key(0)
  kept = [np.asarray(y) for y in layers.apply_linears(tuple(made), jnp.ones((4, 16, 64)), key)]
  for y in kept:
    assert set(np.unique(y)) == {0.0, 2.0} and 0.45 < (y > 0).mean() < 0.55
  for i, j in ((0, 1), (0, 2), (1, 2)):
    assert 0.45 < (kept[i] == kept[j]).mean() < 0.55
  np.testing.assert_array_equal(made[1](jnp.ones((4, 16, 64)), key), kept[1])


def test_dora_s_lengths_are_constants_to_the_gradient():
  """DoRA (arXiv 2402.09353, section 4.3): y = m x (W + AB) / |W + AB|, of whose length no gradient comes; by hand, in
  float64: that of B is Aᵀ xᵀ dy · m / |W + AB|."""
  scope = dataclasses.replace(SCOPE, lora=Lora(rank=2, scale=1.0, targets=(".*",), dropout=0.0, dora=True))
  linear = layers.Linear(scope / "q", 5, 3, std=1.0, bias=False)
  rng = np.random.default_rng(0)
  w, a, b, x, dy = (rng.normal(size=shape) for shape in ((5, 3), (5, 2), (2, 3), (4, 5), (4, 3)))
  linear.kernel[...], linear.lora_a[...], linear.lora_b[...] = (jnp.float32(part) for part in (w, a, b))
  graph, params = nnx.split(linear)
  value, gradient = jax.value_and_grad(lambda p: jnp.sum(nnx.merge(graph, p)(jnp.float32(x)) * dy))(params)
  factor = np.linalg.norm(w, axis=0) / np.linalg.norm(w + a @ b, axis=0)
  assert value == pytest.approx(np.sum(x @ (w + a @ b) * factor * dy), rel=1e-5)
  np.testing.assert_allclose(gradient["lora_b"][...], a.T @ x.T @ (dy * factor), rtol=1e-4, atol=1e-5)
