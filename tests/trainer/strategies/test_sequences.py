"""Which tokens are completions'. Sums over sequences are those of loops in test_dpo.py, test_grpo.py and others."""

import jax.numpy as jnp
import numpy as np

from trainer.strategies import sequences


def test_a_token_with_a_weight_and_one_before_it_is_a_completion_s():
  """The first one of a row has a log-prob of the last position's prediction, else."""
  weights = np.array([[1.0, 0.5, 0.0, 1.0], [0.0, 0.0, 2.0, 0.0]])
  np.testing.assert_array_equal(sequences.completion_mask({"loss_weights": weights}), [[0, 1, 0, 1], [0, 0, 1, 0]])


def test_a_reference_chooses_experts_of_its_own(monkeypatch):
  """Those of a batch are the policy's, compared with or gone through again."""
  asked = []
  monkeypatch.setattr(sequences, "token_logprobs", lambda model, params, batch, temperature: (
      asked.append((model, params, sorted(batch), temperature)), jnp.ones((1, 2)))[1])
  batch = {"tokens": 1, "loss_weights": 2, "sampled_experts": 3, "replayed_experts": 4}
  found = sequences.reference_logprobs("model", batch, 5.0, 0.5)
  assert asked == [("model", 5.0, ["loss_weights", "tokens"], 0.5)] and found.tolist() == [[1, 1]]
