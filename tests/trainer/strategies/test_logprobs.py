"""Chunked token statistics against full logits (I4), closed forms, and what the compiled program holds."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from models.cpu import padding
from models.sharding import logical_axes
from trainer.distributed import mesh as mesh_lib
from trainer.planning.collectives import collectives
from trainer.strategies import logprobs
from trainer.strategies.logprobs import STATS, cross_entropy, cross_entropy_stats, token_stats

B, T, D, V = 2, 7, 16, 60
CHUNKS = [1000, 30, 7]
VARIANTS = [
    dict(),
    dict(logit_cap=2.0),
    dict(num_real_vocab=53),
    dict(temperature=0.6),
    dict(logit_cap=3.0, num_real_vocab=41, temperature=1.7),
]


def inputs(dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(0), 3)
  hidden = jax.random.normal(keys[0], (B, T, D)).astype(dtype)
  kernel = 0.7 * jax.random.normal(keys[1], (D, V))
  return hidden, kernel, jax.random.randint(keys[2], (B, T), 0, 41)


@functools.partial(jax.jit, static_argnames=("logit_cap", "num_real_vocab", "temperature"))
def full(hidden, kernel, targets, logit_cap=None, num_real_vocab=None, temperature=1.0):
  """All statistics from full logits, by their definitions."""
  z = hidden @ kernel
  z = z if logit_cap is None else logit_cap * jnp.tanh(z / logit_cap)
  z = (z / temperature)[..., :num_real_vocab]
  logp = jax.nn.log_softmax(z)
  return logprobs.TokenStats(
      logprob=jnp.take_along_axis(logp, targets[..., None], -1)[..., 0],
      logsumexp=jax.nn.logsumexp(z, -1),
      mean_logit=z.mean(-1),
      entropy=-(jnp.exp(logp) * logp).sum(-1),
      is_top=(z.argmax(-1) == targets).astype(jnp.float32),
      log_square=jax.nn.logsumexp(2 * logp, -1),
  )


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients_equal_full_logits(chunk, variant):
  hidden, kernel, targets = inputs()
  # Some targets are the most likely entry.
  targets = jnp.where(jnp.arange(T) < 3, (hidden @ kernel)[..., :41].argmax(-1), targets)
  ours = jax.jit(lambda h, k: token_stats(h, k, targets, chunk=chunk, **variant))
  for name, a, b in zip(STATS, ours(hidden, kernel), full(hidden, kernel, targets, **variant), strict=True):
    assert a.dtype == jnp.float32
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=2e-6, err_msg=name)

  weights = jax.random.normal(jax.random.key(5), (4, B, T))

  def weighted(stats):
    return sum((w * s).sum() for w, s in zip(weights, stats[:4], strict=True))

  grads = jax.jit(jax.grad(lambda h, k: weighted(ours(h, k)), (0, 1)))(hidden, kernel)
  expected = jax.jit(jax.grad(lambda h, k: weighted(full(h, k, targets, **variant)), (0, 1)))(hidden, kernel)
  for a, b in zip(grads, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", STATS[:4])
@pytest.mark.parametrize("chunk", [60, 16])
def test_each_statistic_alone(name, chunk):
  hidden, kernel, targets = inputs()
  stats = jax.eval_shape(lambda h: token_stats(h, kernel, targets, chunk=chunk, want=(name,)), hidden)
  assert [s is not None for s in stats] == [n == name for n in STATS]
  ours = jax.jit(lambda h: token_stats(h, kernel, targets, chunk=chunk, want=(name,)))
  grad = jax.jit(jax.grad(lambda h: getattr(ours(h), name).sum()))(hidden)
  expected = jax.jit(jax.grad(lambda h: getattr(full(h, kernel, targets), name).sum()))(hidden)
  np.testing.assert_allclose(grad, expected, atol=1e-5)


@pytest.mark.parametrize("chunk", [1000, 7])
def test_logits_that_are_read_once_as_on_a_gpu_have_the_same_statistics(chunk, monkeypatch):
  """By NumPy in float64; the largest of a later chunk is above or below that of those before."""
  monkeypatch.setattr(logprobs.logical_axes, "platform", lambda: "gpu")
  hidden, kernel, targets = inputs()
  want = ("logprob", "logsumexp", "mean_logit", "is_top")
  ours = jax.jit(lambda h, k: token_stats(h, k, targets, chunk=chunk, num_real_vocab=53, want=want))
  found = ours(3 * hidden, kernel)
  z = (3 * np.asarray(hidden, np.float64) @ np.asarray(kernel, np.float64))[..., :53]
  top = z.max(-1)
  total = top + np.log(np.exp(z - top[..., None]).sum(-1))
  target = np.take_along_axis(z, np.asarray(targets)[..., None], -1)[..., 0]
  for name, expected in zip(want, (target - total, total, z.mean(-1), target == top), strict=True):
    np.testing.assert_allclose(getattr(found, name), expected, rtol=1e-5, atol=1e-5, err_msg=name)


def test_unreal_entries_get_no_probability_and_no_gradient():
  """Whatever stands in their columns."""
  hidden, kernel, targets = inputs()
  options = dict(chunk=16, num_real_vocab=53)

  def loss(kernel):
    return sum(s.sum() for s in token_stats(hidden, kernel, targets, **options)[:4])

  differentiate = jax.jit(jax.value_and_grad(loss))
  value, grad = differentiate(kernel)
  loud_value, loud_grad = differentiate(kernel.at[:, 53:].set(1e4))
  assert value == loud_value
  np.testing.assert_array_equal(grad, loud_grad)
  assert not grad[:, 53:].any() and grad[:, :53].any()


@pytest.mark.parametrize("chunk", [60, 16])
def test_large_logits_stay_finite(chunk):
  hidden, kernel, targets = inputs()
  stats, grad = jax.value_and_grad(
      lambda h: sum(s.sum() for s in token_stats(h, kernel, targets, chunk=chunk)[:4])
  )(1e4 * hidden)
  assert np.isfinite(stats) and np.isfinite(grad).all()


@pytest.mark.parametrize("chunk", [30, 7])
@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_that_do_not_count_change_nothing_for_those_that_do(chunk, variant, monkeypatch):
  """Values and gradients of the others, whether some, all or none count; of those the gradient is 0."""
  monkeypatch.setattr(logprobs, "MIN_TOKENS", 1)
  hidden, kernel, targets = inputs()
  weights = jax.random.normal(jax.random.key(5), (len(STATS), B, T))
  for share in (0.0, 0.4, 1.0):
    counts = jax.random.uniform(jax.random.key(6), (B, T)) < share

    def weighted(hidden, kernel, of, **options):
      stats = token_stats(hidden, kernel, targets, chunk=chunk, **variant, **options)
      stats = [jnp.where(of, values, 0.0) for values in stats]
      return sum((w * values).sum() for w, values in zip(weights, stats, strict=True)), stats

    differentiate = jax.jit(jax.value_and_grad(weighted, (0, 1), has_aux=True))
    expected, found = differentiate(hidden, kernel, counts), differentiate(hidden, kernel, counts, counts_BxT=counts)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
      np.testing.assert_allclose(b, a, rtol=2e-6, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(found[1][0])[~np.asarray(counts)], 0)


def test_bfloat16_hidden_states_give_float32_statistics():
  hidden, kernel, targets = inputs(jnp.bfloat16)
  stats = token_stats(hidden, kernel, targets, chunk=16)
  expected = full(hidden.astype(jnp.float32), kernel.astype(jnp.bfloat16).astype(jnp.float32), targets)
  for name, a, b in zip(STATS, stats, expected, strict=True):
    assert a.dtype == jnp.float32
    np.testing.assert_allclose(a, b, atol=1e-5, err_msg=name)
  dhidden, dkernel = jax.grad(lambda h, k: token_stats(h, k, targets, chunk=16).logprob.sum(), (0, 1))(hidden, kernel)
  assert dhidden.dtype == jnp.bfloat16 and dkernel.dtype == jnp.float32


def test_cross_entropy_with_label_smoothing_and_z_loss():
  hidden, kernel, targets = inputs()
  smoothing, z_loss = 0.1, 0.03
  logits = np.asarray(hidden @ kernel, np.float64)
  lse = np.log(np.exp(logits).sum(-1))
  wanted = (1 - smoothing) * np.eye(V)[targets] + smoothing / V
  expected = -(wanted * (logits - lse[..., None])).sum(-1) + z_loss * lse**2
  stats = token_stats(hidden, kernel, targets, chunk=16, want=cross_entropy_stats(smoothing, z_loss))
  np.testing.assert_allclose(cross_entropy(stats, smoothing, z_loss), expected, rtol=1e-5)
  plain = token_stats(hidden, kernel, targets, chunk=16, want=cross_entropy_stats())
  np.testing.assert_array_equal(cross_entropy(plain), -plain.logprob)


def test_is_top_counts_ties_as_right():
  stats = token_stats(jnp.zeros((1, 1, D)), jnp.ones((D, V)), jnp.array([[V - 1]]), chunk=16)
  assert stats.is_top[0, 0] == 1


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("chunk", "counts"), [(1000, None), (30, None), (30, True)])
def test_entries_that_put_rows_apart_change_nothing(chunk, counts, variant, monkeypatch):
  """Values, gradients, and their shapes, whether chunks are of entries or of tokens."""
  monkeypatch.setattr(logprobs, "MIN_TOKENS", 1)
  hidden, kernel, targets = inputs()
  weights = jax.random.normal(jax.random.key(5), (len(STATS), B, T))
  counts = counts and jnp.ones((B, T), bool)

  def weighted(hidden, kernel):
    stats = token_stats(hidden, kernel, targets, chunk=chunk, counts_BxT=counts, **variant)
    return sum((w * values).sum() for w, values in zip(weights, stats, strict=True)), stats

  expected = jax.jit(jax.value_and_grad(weighted, (0, 1), has_aux=True))(hidden, kernel)
  monkeypatch.setattr(padding, "TOO_EVEN", 10)
  added = logprobs.padded(kernel, None, hidden.dtype, 2 if chunk == 30 and counts is None else 1)
  assert added[0].shape[1] > V == added[1]
  found = jax.jit(jax.value_and_grad(lambda *x: weighted(*x), (0, 1), has_aux=True))(hidden, kernel)
  for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
    assert a.shape == b.shape
    np.testing.assert_allclose(b, a, rtol=2e-6, atol=1e-5)


def rows_of_products(program: str) -> set[int]:
  """How long the rows of what products of matrices make are in a lowered program."""
  return {int(shape.split("x")[-2]) for shape in re.findall(r"dot_general.*-> tensor<([0-9x]+f32)>", program)}


@pytest.mark.parametrize("counts", [None, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_cpu_rows_of_logits_lie_no_multiple_of_8_kilobytes_apart(counts, dtype):
  args = [jax.ShapeDtypeStruct(s, dt) for s, dt in (
      ((2, 1024, D), dtype), ((D, 8192), "float32"), ((2, 1024), "int32"), ((2, 1024), "bool"))]

  def loss(hidden, kernel, targets, counts_BxT):
    return token_stats(hidden, kernel, targets, chunk=4096, counts_BxT=counts and counts_BxT).logprob.sum()

  lowered = jax.jit(jax.grad(loss, (0, 1))).lower(*args)
  rows = {rows for rows in rows_of_products(lowered.as_text()) if rows > D}
  more = padding.APART if dtype == "float32" else 0  # those of bfloat16 are other kernels
  assert rows == {(8192 if counts else 4096) + more}
  assert [x.shape for x in jax.tree.leaves(lowered.out_info)] == [(2, 1024, D), (D, 8192)]


@pytest.mark.parametrize("vocab,chunk,expected", [(1024, 8192, 1), (50304, 8192, 8), (151936, 8192, 32), (61, 10, 7)])
def test_num_chunks(vocab, chunk, expected):
  n = logprobs.num_chunks(vocab, chunk)
  assert n == expected and -(-vocab // n) <= chunk


def largest_buffer(want, chunk, grad=True) -> int:
  """Elements of the largest array in the compiled forward and backward program."""
  b, t, d, v = 3, 11, 8, 640

  def loss(hidden, kernel, targets):
    stats = token_stats(hidden, kernel, targets, chunk=chunk, want=want, logit_cap=5.0, num_real_vocab=600)
    return sum(s.sum() for s in stats if s is not None)

  fn = jax.grad(loss, (0, 1)) if grad else loss
  args = [jax.ShapeDtypeStruct(s, dt) for s, dt in (((b, t, d), "float32"), ((d, v), "float32"), ((b, t), "int32"))]
  hlo = jax.jit(fn).lower(*args).compile().as_text()
  sizes = [int(np.prod([int(n) for n in dims.split(",")])) for dims in re.findall(r"[fsup][a-z0-9]+\[([0-9,]+)\]", hlo)]
  assert max(sizes) >= d * v
  return max(sizes)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("want", [("logprob",), STATS[:4]])
def test_no_logits_for_the_whole_vocabulary_in_the_compiled_program(want, grad):
  everything = 3 * 11 * 640
  assert largest_buffer(want, chunk=64, grad=grad) < everything / 3
  # The same search does find them where they exist.
  assert largest_buffer(want, chunk=640, grad=grad) >= everything


def test_sharded_over_the_vocabulary_equals_unsharded():
  hidden, kernel, targets = inputs()
  mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  put = lambda x, *spec: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))  # noqa: E731
  fn = jax.jit(
      jax.value_and_grad(lambda h, k, t: sum(s.sum() for s in token_stats(h, k, t, chunk=20)[:4]), (0, 1))
  )
  value, grads = fn(put(hidden, "data"), put(kernel, None, "tensor"), put(targets, "data"))
  expected_value, expected_grads = fn(hidden, kernel, targets)
  np.testing.assert_allclose(value, expected_value, rtol=1e-5)
  for a, b in zip(grads, expected_grads, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.devices(8)
@pytest.mark.parametrize("chunk", [60, 20])
@pytest.mark.parametrize("sizes", [dict(fsdp=4, context=2), dict(data=2, fsdp=2, expert=2), dict(fsdp=2, tensor=4)],
                         ids=str)
def test_on_a_mesh_the_kernel_is_gathered_and_its_gradient_scattered(sizes, chunk):
  """Along one axis at a time, and never all of it summed on every device; with the values of one device."""
  rng = np.random.default_rng(0)
  hidden, kernel = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((8, 8, 32), (32, V)))
  targets = jnp.asarray(rng.integers(0, V, (8, 8)))

  def run(h, k):
    stats = token_stats(h, k, targets, chunk=chunk, want=("logprob", "entropy"))
    return jnp.sum(stats.logprob + 0.3 * stats.entropy)

  expected = jax.value_and_grad(run, (0, 1))(hidden, kernel)
  mesh = mesh_lib.make_mesh(sizes)
  with mesh_lib.activation_rules(mesh):
    placed = logical_axes.current()
    split = [NamedSharding(mesh, placed.spec(names, x.shape))
             for names, x in ((("batch", "length", None), hidden), (("shard", "vocab"), kernel))]
    program = jax.jit(jax.value_and_grad(run, (0, 1)), in_shardings=split, out_shardings=(None, tuple(split))).lower(
        hidden, kernel).compile()
  for a, b in zip(jax.tree.leaves(program(*map(jax.device_put, (hidden, kernel), split))), jax.tree.leaves(expected),
                  strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
  moved = collectives(program.as_text(), mesh)
  chunk_of_kernel = 4 * 32 * chunk // sizes.get("tensor", 1)
  shard = [axis for axis in ("fsdp", "expert", "context") if axis in sizes]
  for axis in shard:
    assert any(one.kind == "all-gather" and one.axes == (axis,) for one in moved)
  # Over data, whose devices hold the same part, the parts of a gradient are summed, over tensor the hidden states'.
  most = chunk_of_kernel // np.prod([sizes[axis] for axis in shard])
  assert all(one.bytes <= max(most, 4 * 64) for one in moved
             if one.kind == "all-reduce" and one.axes != ("tensor",)), moved


@pytest.mark.parametrize("chunk", [60, 7])
def test_the_log_of_summed_squares_alone_spans_its_range_and_has_no_gradient(chunk):
  """From log(1 / V) of uniform logits to 0 of a certain token, whatever else is asked for."""
  hidden, kernel, targets = inputs()

  def square(h):
    return token_stats(h, kernel, targets, chunk=chunk, want=("log_square",)).log_square

  np.testing.assert_allclose(square(hidden), full(hidden, kernel, targets).log_square, rtol=1e-6, atol=2e-6)
  np.testing.assert_allclose(square(jnp.zeros_like(hidden)), -np.log(V), rtol=1e-6)
  np.testing.assert_allclose(square(1e4 * hidden), 0.0, atol=1e-6)
  assert not jax.grad(lambda h: square(h).sum())(hidden).any()


def test_bad_arguments():
  with pytest.raises(ValueError, match="allowed: want of"):
    token_stats(*inputs(), chunk=16, want=("perplexity",))
  with pytest.raises(ValueError, match="temperature above 0"):
    token_stats(*inputs(), chunk=16, temperature=0.0)


def test_whether_a_target_is_the_likeliest_can_be_asked_alone():
  hidden, kernel = jnp.eye(3)[None], jnp.array([[0.0, 2, 1, 1.5], [3, 0, 1, 2], [0, 0, 0, 1]])
  stats = token_stats(hidden, kernel, jnp.array([[1, 3, 3]]), chunk=2, want=("is_top",))
  assert stats.is_top.tolist() == [[1, 0, 1]] and stats.logprob is None


def test_without_a_gradient_tokens_in_chunks_have_their_statistics(monkeypatch):
  """Of those that count, by NumPy in float64."""
  monkeypatch.setattr(logprobs, "MIN_TOKENS", 1)
  rng = np.random.default_rng(0)
  hidden, kernel, targets = rng.normal(size=(2, 5, 3)), rng.normal(size=(3, 8)), rng.integers(0, 8, (2, 5))
  counts = rng.random((2, 5)) < 0.6
  found = token_stats(jnp.asarray(hidden, jnp.float32), jnp.asarray(kernel, jnp.float32), jnp.asarray(targets), chunk=4,
                      want=("logprob",), counts_BxT=jnp.asarray(counts)).logprob
  z = hidden @ kernel
  logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
  expected = np.take_along_axis(logp, targets[..., None], -1)[..., 0]
  np.testing.assert_allclose(np.asarray(found)[counts], expected[counts], rtol=1e-5)
