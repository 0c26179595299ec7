"""A teacher's most probable tokens and the divergences from these: loops, dense formulas in float64, and limits."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from input_pipeline.examples.top_k import NEVER, NOBODY
from tests.trainer.strategies import test_divergence as whole
from trainer.strategies import divergence, top_k
from trainer.strategies.divergence import Side

B, T, V = whole.B, whole.T, whole.V
CHUNKS = (1000, 30, 7)


def kept(teacher_hidden, teacher_kernel, k, chunk=7, cap=None, real=None, temperature=1.0):
  return jax.jit(lambda hidden, kernel: top_k.most_probable(
      Side(hidden, kernel, cap, real), k, chunk=chunk, temperature=temperature))(teacher_hidden, teacher_kernel)


def from_kept(hidden, kernel, ids, logprobs, *, beta, chunk, cap=None, real=None, temperature=1.0):
  return top_k.jensen_shannon(Side(hidden, kernel, cap, real), ids, logprobs, beta=beta, chunk=chunk,
                              temperature=temperature)


def in_loops(hidden, kernel, teacher_hidden, teacher_kernel, k, beta):
  """One position after another, one bucket after another, in Python's floats."""
  found = np.zeros((B, T))
  for b in range(B):
    for t in range(T):
      probs = []
      for h, w in ((hidden[b, t], kernel), (teacher_hidden[b, t], teacher_kernel)):
        z = [sum(float(x) * float(y) for x, y in zip(h, w[:, v], strict=True)) for v in range(V)]
        total = sum(map(math.exp, z))
        probs.append([math.exp(value) / total for value in z])
      best = sorted(range(V), key=lambda v, q=probs[1]: -q[v])[:k]
      buckets = [[dist[v] for v in best] + [sum(dist[v] for v in range(V) if v not in best)] * (k < V)
                 for dist in probs]
      for p, q in zip(*buckets, strict=True):
        m = (1 - beta) * p + beta * q
        if beta == 0:
          found[b, t] += q * math.log(q / p)
        elif beta == 1:
          found[b, t] += p * math.log(p / q)
        else:
          found[b, t] += beta * q * math.log(q / m) + (1 - beta) * p * math.log(p / m)
  return found


def dense(hidden, kernel, ids, logprobs, *, beta, cap=None, real=None, temperature=1.0):
  """The definition over all logits."""
  z = hidden @ kernel
  z = z if cap is None else cap * jnp.tanh(z / cap)
  p = jax.nn.softmax(z[..., :real] / temperature)
  mine = jnp.take_along_axis(p, ids, -1)
  taken = jax.nn.one_hot(ids, p.shape[-1]).sum(-2)
  rest = jnp.sum(p * (1 - taken), -1, keepdims=True)
  p, q = (mine, jnp.exp(logprobs[..., :-1])) if ids.shape[-1] == p.shape[-1] else (
      jnp.concatenate([mine, rest], -1), jnp.exp(logprobs))
  if beta == 0:
    return (q * jnp.log(q / p)).sum(-1)
  if beta == 1:
    return (p * jnp.log(p / q)).sum(-1)
  m = (1 - beta) * p + beta * q
  return (beta * q * jnp.log(q / m) + (1 - beta) * p * jnp.log(p / m)).sum(-1)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_what_is_kept_are_the_most_probable_and_the_rest(chunk):
  *_, hidden, kernel = whole.inputs()
  ids, logprobs = kept(hidden, kernel, 5, chunk, cap=3.0, real=41, temperature=0.7)
  z = np.asarray(hidden, np.float64) @ np.asarray(kernel, np.float64)
  z = 3.0 * np.tanh(z / 3.0)[..., :41] / 0.7
  q = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
  order = np.argsort(-q, axis=-1)[..., :5]
  np.testing.assert_array_equal(ids, order)
  wanted = np.take_along_axis(q, order, -1)
  np.testing.assert_allclose(np.exp(logprobs[..., :-1]), wanted, rtol=2e-6)
  np.testing.assert_allclose(np.exp(logprobs[..., -1]), 1 - wanted.sum(-1), rtol=2e-6)


@pytest.mark.parametrize("beta", whole.BETAS)
def test_values_are_those_of_loops(beta):
  hidden, kernel, *teacher = whole.inputs()
  for k in (1, 6, V):
    found = jax.jit(functools.partial(from_kept, beta=beta, chunk=7))(hidden, kernel, *kept(*teacher, k))
    np.testing.assert_allclose(found, in_loops(*map(np.asarray, (hidden, kernel, *teacher)), k, beta), rtol=1e-6,
                               atol=1e-6)


@pytest.mark.parametrize("chunk, k, variant", [
    (1000, 4, dict()), (30, 4, dict(temperature=0.6)), (7, 9, dict(cap=2.0, real=53)), (7, V, dict()),
    (7, 1, dict(cap=3.0, temperature=1.7)), (30, 41, dict(real=41))])
def test_gradients_are_those_of_the_dense_formula(chunk, k, variant):
  hidden, kernel, *teacher = whole.inputs()
  given = kept(*teacher, k, real=variant.get("real"), temperature=variant.get("temperature", 1.0))
  weights = np.linspace(0.5, 2, B * T).reshape(B, T).astype(np.float32)

  def total(of, options, h, w):
    ids, logprobs = given[0], jnp.asarray(np.asarray(given[1]), h.dtype)
    return jnp.sum(of(h, w, ids, logprobs, **options) * weights)

  for beta in whole.BETAS:
    ours = jax.jit(jax.value_and_grad(functools.partial(
        total, from_kept, dict(beta=beta, chunk=chunk, **variant)), (0, 1)))(hidden, kernel)
    with jax.enable_x64():
      exact = [jnp.asarray(np.asarray(x), jnp.float64) for x in (hidden, kernel)]
      value, grads = jax.jit(jax.value_and_grad(functools.partial(
          total, dense, dict(beta=beta, **variant)), (0, 1)))(*exact)
      value, grads = np.asarray(value), list(map(np.asarray, grads))
    np.testing.assert_allclose(ours[0], value, rtol=1e-6, atol=1e-6)
    for found, wanted in zip(ours[1], grads, strict=True):
      np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * max(1, np.abs(wanted).max()))


@pytest.mark.parametrize("beta", whole.BETAS)
@pytest.mark.parametrize("chunk, real", [(1000, None), (7, 53)])
def test_entries_that_stand_for_nobody_change_nothing(beta, chunk, real):
  """Where a row has fewer entries than are kept: values and gradients are those of the dense formula over these."""
  hidden, kernel, *teacher = whole.inputs()
  ids, logprobs = map(np.asarray, kept(*teacher, 4, real=real))
  none = np.ones((B, T, 2), np.int32)
  padded = (np.concatenate([ids, NOBODY * none], -1),
            np.concatenate([logprobs[..., :-1], NEVER * none, logprobs[..., -1:]], -1, dtype=np.float32))
  found = jax.jit(jax.value_and_grad(
      lambda h, w: jnp.sum(from_kept(h, w, *padded, beta=beta, chunk=chunk, real=real)), (0, 1)))(hidden, kernel)
  with jax.enable_x64():
    exact = [jnp.asarray(np.asarray(x), jnp.float64) for x in (hidden, kernel)]
    wanted = jax.jit(jax.value_and_grad(lambda h, w: jnp.sum(dense(
        h, w, ids, jnp.asarray(logprobs, jnp.float64), beta=beta, real=real)), (0, 1)))(*exact)
    wanted = jax.tree.map(np.asarray, wanted)
  for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6 * max(1, np.abs(theirs).max()))


def test_with_all_entries_it_is_the_whole_divergence_and_with_fewer_never_more():
  hidden, kernel, *teacher = whole.inputs()
  of_k = [kept(*teacher, k) for k in (1, 8, 30, V)]

  @functools.partial(jax.jit, static_argnums=0)
  def both(beta, hidden, kernel, teacher, of_k):
    exact = divergence.jensen_shannon(Side(hidden, kernel), Side(*teacher), beta=beta, chunk=7)
    return exact, [from_kept(hidden, kernel, *of, beta=beta, chunk=7) for of in of_k]

  for beta in whole.BETAS:
    exact, found = both(beta, hidden, kernel, teacher, of_k)
    np.testing.assert_allclose(found[-1], exact, rtol=1e-6, atol=1e-6)
    assert all((few <= more + 1e-6).all() for few, more in zip(found, found[1:], strict=False))


def test_logits_of_the_whole_vocabulary_are_never_made():
  hidden, kernel, *teacher = whole.inputs()
  for beta in whole.BETAS:
    def loss(h, w, beta=beta):
      return jnp.sum(from_kept(h, w, *kept(*teacher, 3), beta=beta, chunk=7))

    text = str(jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(hidden, kernel))
    assert f"{B},{T},{V}]" not in text and f"{B * T},{V}]" not in text and f"{B},{T},6]" in text
