"""Which tokens are completions'. Sums over sequences are those of loops in test_dpo.py, test_grpo.py and others."""

import numpy as np

from trainer.strategies import sequences


def test_a_token_with_a_weight_and_one_before_it_is_a_completion_s():
  """The first one of a row has a log-prob of the last position's prediction, else."""
  weights = np.array([[1.0, 0.5, 0.0, 1.0], [0.0, 0.0, 2.0, 0.0]])
  np.testing.assert_array_equal(sequences.completion_mask({"loss_weights": weights}), [[0, 1, 0, 1], [0, 0, 1, 0]])
