"""Divergences over chunks of the vocabulary against loops in float64, dense formulas and TRL."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pairwise import covering
from tests.tiny import ROOT
from trainer.strategies import divergence
from trainer.strategies.divergence import Side

B, T, D, E, V = 2, 5, 8, 12, 60
BETAS = (0.0, 0.3, 0.5, 1.0)
VARIANTS = [
    dict(),
    dict(temperature=0.6),
    dict(caps=(2.0, None), real=(53, None)),
    dict(caps=(None, 3.0), real=(None, 41), temperature=1.7),
    dict(wider=5),
]


def inputs(wider=0):
  """(student's hidden states and kernel, teacher's), whose kernel is wider."""
  keys = jax.random.split(jax.random.key(0), 4)
  shapes = (B, T, D), (D, V), (B, T, E), (E, V + wider)
  return [scale * jax.random.normal(key, shape)
          for key, shape, scale in zip(keys, shapes, (1, 0.3, 1, 0.3), strict=True)]


def chunked(hidden, kernel, teacher_hidden, teacher_kernel, *, beta, chunk, caps=(None, None), real=(None, None),
            temperature=1.0):
  return divergence.jensen_shannon(Side(hidden, kernel, caps[0], real[0]), Side(
      teacher_hidden, teacher_kernel, caps[1], real[1]), beta=beta, chunk=chunk, temperature=temperature)


def dense(hidden, kernel, teacher_hidden, teacher_kernel, *, beta, caps=(None, None), real=(None, None),
          temperature=1.0):
  """The definition, over all logits."""
  n = min(kernel.shape[1] if real[0] is None else real[0], teacher_kernel.shape[1] if real[1] is None else real[1])
  logps = []
  for h, k, cap in ((hidden, kernel, caps[0]), (teacher_hidden, teacher_kernel, caps[1])):
    z = h @ k
    z = z if cap is None else cap * jnp.tanh(z / cap)
    logps.append(jax.nn.log_softmax(z[..., :n] / temperature))
  p, q = map(jnp.exp, logps)
  if beta == 0:
    return (q * (logps[1] - logps[0])).sum(-1)
  if beta == 1:
    return (p * (logps[0] - logps[1])).sum(-1)
  logm = jnp.log((1 - beta) * p + beta * q)
  return (beta * q * (logps[1] - logm) + (1 - beta) * p * (logps[0] - logm)).sum(-1)


def in_loops(hidden, kernel, teacher_hidden, teacher_kernel, beta):
  """One position after another, one entry after another, in Python's floats."""
  found = np.zeros((B, T))
  for b in range(B):
    for t in range(T):
      probs = []
      for h, k in ((hidden[b, t], kernel), (teacher_hidden[b, t], teacher_kernel)):
        z = [sum(float(x) * float(w) for x, w in zip(h, k[:, v], strict=True)) for v in range(V)]
        total = sum(map(math.exp, z))
        probs.append([math.exp(value) / total for value in z])
      for p, q in zip(*probs, strict=True):
        m = (1 - beta) * p + beta * q
        if beta == 0:
          found[b, t] += q * math.log(q / p)
        elif beta == 1:
          found[b, t] += p * math.log(p / q)
        else:
          found[b, t] += beta * q * math.log(q / m) + (1 - beta) * p * math.log(p / m)
  return found


@pytest.mark.parametrize("beta", BETAS)
def test_values_are_those_of_loops(beta):
  made = inputs()
  found = jax.jit(functools.partial(chunked, beta=beta, chunk=7))(*made)
  np.testing.assert_allclose(found, in_loops(*map(np.asarray, made), beta), rtol=1e-6, atol=1e-6)
  assert found.dtype == jnp.float32


@pytest.mark.parametrize("chunk, variant", covering((1000, 30, 7), VARIANTS, strength=1))
def test_gradients_are_those_of_the_dense_formula(chunk, variant):
  """To 1e-6 of the largest entry; where the dense formula is itself that far off in float32, to three times as far."""
  variant = dict(variant)
  made = inputs(variant.pop("wider", 0))
  weights = np.linspace(0.5, 2, B * T).reshape(B, T).astype(np.float32)

  def total(of, options, weights, *given):
    return jnp.sum(of(*given, **options) * weights)

  for beta in BETAS:
    of_chunks = functools.partial(total, chunked, dict(beta=beta, chunk=chunk, **variant))
    ours = jax.jit(jax.value_and_grad(of_chunks, (1, 2)))(weights, *made)
    with jax.enable_x64():
      # One program whose arguments alone have the wider type: operations one by one share programs with those outside.
      exact = [jnp.asarray(np.asarray(x), jnp.float64) for x in (weights, *made)]
      of_all = functools.partial(total, dense, dict(beta=beta, **variant))
      value, grads = jax.jit(jax.value_and_grad(of_all, (1, 2)))(*exact)
      value, grads = np.asarray(value), list(map(np.asarray, grads))
    rounded = jax.jit(jax.grad(of_all, (1, 2)))(weights, *made)
    np.testing.assert_allclose(ours[0], value, rtol=1e-6)
    for found, in_float32, wanted in zip(ours[1], rounded, grads, strict=True):
      own = np.abs(np.asarray(in_float32) - wanted).max()
      np.testing.assert_allclose(found, wanted, rtol=0, atol=max(1e-6 * np.abs(wanted).max(), 3 * own))


REFERENCES = np.load(ROOT / "tests" / "trainer" / "strategies" / "distill_references.npz")


@pytest.mark.parametrize("name", sorted(key.removeprefix("loss/") for key in REFERENCES if key.startswith("loss/")))
def test_values_and_gradients_are_those_of_trl(name):
  beta, temperature = map(float, name.split("/"))
  hidden, kernel, teacher_hidden, teacher_kernel, weights = (jnp.asarray(REFERENCES[key], jnp.float32) for key in (
      "hidden", "kernel", "teacher_hidden", "teacher_kernel", "weights"))

  def mean(h, k):
    found = chunked(h, k, teacher_hidden, teacher_kernel, beta=beta, chunk=6, temperature=temperature)
    return jnp.sum(found * weights) / jnp.sum(weights)

  loss, grads = jax.jit(jax.value_and_grad(mean, (0, 1)))(hidden, kernel)
  np.testing.assert_allclose(loss, REFERENCES[f"loss/{name}"], rtol=2e-6)
  for found, key in zip(grads, ("dhidden", "dkernel"), strict=True):
    np.testing.assert_allclose(found, REFERENCES[f"{key}/{name}"], rtol=0, atol=2e-6)


def test_equal_models_have_no_divergence_and_no_gradient():
  hidden, kernel, *_ = inputs()
  for beta in BETAS:
    value, grads = jax.value_and_grad(lambda h, k, beta=beta: jnp.sum(chunked(
        h, k, hidden, kernel, beta=beta, chunk=7)), (0, 1))(hidden, kernel)
    assert abs(value) < 1e-5 and all(float(jnp.abs(g).max()) < 1e-5 for g in grads)


def test_logits_of_the_whole_vocabulary_are_never_made():
  made = inputs()
  for beta in BETAS:
    def loss(h, k, beta=beta):
      return jnp.sum(chunked(h, k, *made[2:], beta=beta, chunk=7))

    text = str(jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(*made[:2]))
    assert f"{B},{T},{V}]" not in text and f"{B * T},{V}]" not in text and f"{B},{T},6]" in text
