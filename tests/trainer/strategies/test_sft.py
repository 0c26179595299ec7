"""SFT against plain sums: weights, DFT, NEFTune; the rest is SEQ's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.layers import document_lengths, embedding_noise
from tests import tiny
from tests.models.initial import initial
from trainer.strategies import seq, sft


class Options(dict):
  __getattr__ = dict.__getitem__


def options(**changed):
  return Options(sft.SFT.options | changed)


def test_without_options_it_is_seq():
  model, batch = tiny.model(), tiny.batch(4, 16)
  params = initial(model)
  ours, _ = sft.loss(model, params, batch, None, options())
  theirs, _ = seq.loss(model, params, batch, None, Options(seq.SEQ.options))
  np.testing.assert_array_equal(ours["loss"].sum, theirs["loss"].sum)
  np.testing.assert_array_equal(ours["loss"].weight, theirs["loss"].weight)


def test_dft_weighs_each_token_by_its_probability_without_a_gradient_through_it():
  """arXiv 2508.05629, eq. 9: the gradient is that of Σ c_t nll_t with constants c_t = p_t."""
  model, batch = tiny.model(), tiny.batch(4, 16)
  params = initial(model)
  logits = np.asarray(model.logits(params, batch), np.float64)[:, :-1, :24]
  logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  target = np.take_along_axis(logp, batch["tokens"][:, 1:, None], -1)[..., 0]
  weights = batch["loss_weights"][:, 1:]

  def dft(params):
    terms, metrics = sft.loss(model, params, batch, None, options(dft=True))
    return jnp.sum(terms["loss"].sum), metrics

  (value, metrics), gradient = jax.value_and_grad(dft, has_aux=True)(params)
  assert float(value) == pytest.approx((-np.exp(target) * target * weights).sum(), rel=1e-5)
  assert float(metrics["nll"].sum.sum()) == pytest.approx((-target * weights).sum(), rel=1e-5)

  constants = np.zeros_like(batch["loss_weights"])
  constants[:, 1:] = np.exp(target) * weights
  weighted = {**batch, "loss_weights": constants}
  expected = jax.grad(lambda p: jnp.sum(sft.loss(model, p, weighted, None, options())[0]["loss"].sum))(params)
  for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6)


def test_entropy_is_reported():
  model, batch = tiny.model(), tiny.batch(4, 16)
  params = jax.tree.map(jnp.zeros_like, initial(model))
  _, metrics = sft.loss(model, params, batch, None, options())
  assert float(metrics["entropy"].sum.sum() / metrics["entropy"].weight.sum()) == pytest.approx(np.log(24), rel=1e-6)


def test_neftune_noise_has_the_papers_size_for_each_document_and_is_only_in_training():
  batch = tiny.batch(4, 32)
  lengths = np.asarray(document_lengths(batch["positions"], batch["segment_ids"]))
  for row, segments in enumerate(batch["segment_ids"]):
    for segment in set(segments.tolist()) - {0}:
      assert set(lengths[row, segments == segment]) == {np.sum(segments == segment)}
  noise = np.asarray(embedding_noise(jnp.asarray([[4, 400]]), 64, 5.0, jax.random.key(0)))
  bounds = 5.0 / np.sqrt(np.array([4, 400]) * 64)
  assert np.all(np.abs(noise).max(-1) <= bounds) and np.all(np.abs(noise).max(-1) > 0.8 * bounds)

  model, plain = tiny.model(neftune_alpha=5.0), tiny.model()
  params = initial(model)
  np.testing.assert_array_equal(model.apply(params, batch).hidden, plain.apply(params, batch).hidden)
  noisy = [np.asarray(model.apply(params, batch, rng=jax.random.key(k), train=True).hidden) for k in (0, 0, 1)]
  np.testing.assert_array_equal(noisy[0], noisy[1])
  assert not np.array_equal(noisy[0], noisy[2])
  with pytest.raises(ValueError, match="needs rng"):
    model.apply(params, batch, train=True)
