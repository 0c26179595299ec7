"""SEQ against a float64 computation from full logits, with label smoothing and z-loss."""

import numpy as np
import pytest

from tests import tiny
from tests.models.initial import initial
from trainer.config import defaults
from trainer.config.checks import View
from trainer.strategies import seq


@pytest.mark.parametrize("smoothing, z_loss", [(0.0, 0.0), (0.1, 0.0), (0.0, 0.01), (0.2, 0.05)])
def test_loss_weight_and_metrics(smoothing, z_loss):
  model, batch = tiny.model(), tiny.batch(4, 16)
  params = initial(model)
  config = defaults()
  config.strategy.update(label_smoothing=smoothing, z_loss=z_loss)
  terms, metrics = seq.loss(model, params, batch, None, View(config.strategy))

  logits = np.asarray(model.logits(params, batch), np.float64)[:, :-1, :24]
  log_z = np.log(np.exp(logits).sum(-1))
  target = np.take_along_axis(logits, batch["tokens"][:, 1:, None], -1)[..., 0]
  nll, uniform = log_z - target, log_z - logits.mean(-1)
  w = batch["loss_weights"][:, 1:].astype(np.float64)
  expected = ((1 - smoothing) * nll + smoothing * uniform + z_loss * log_z**2) * w
  assert list(terms) == ["loss"]
  assert float(terms["loss"].sum.sum()) == pytest.approx(expected.sum(), rel=1e-6)
  np.testing.assert_allclose(terms["loss"].weight, w.sum(1), rtol=1e-6)
  np.testing.assert_allclose(terms["loss"].sum, expected.sum(1), rtol=1e-5, atol=1e-6)
  hits = ((logits.argmax(-1) == batch["tokens"][:, 1:]) * w).sum(1)
  np.testing.assert_allclose(metrics["accuracy"].sum, hits, rtol=1e-6)
  assert ("nll" in metrics) == bool(smoothing or z_loss)
  if "nll" in metrics:
    np.testing.assert_allclose(metrics["nll"].sum, (nll * w).sum(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("further", [0, 1])
def test_the_first_token_of_a_row_and_the_last_position_take_no_part(further):
  """Also where a document fills its row, and its first token has a weight; and of tokens further ahead."""
  batch = tiny.batch(2, 8)
  for weights in (batch["loss_weights"], np.ones((2, 8), np.float32)):
    batch = {"tokens": batch["tokens"], "loss_weights": weights, "segment_ids": np.ones((2, 8), np.int32)}
    targets, found = seq.next_tokens(batch, further)
    np.testing.assert_array_equal(targets[:, :-1 - further], batch["tokens"][:, 1 + further:])
    np.testing.assert_array_equal(found[:, :-1 - further], weights[:, 1 + further:])
    assert not np.any(found[:, -1 - further:])
