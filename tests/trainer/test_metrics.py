"""Means add up as sums and weights."""

from trainer.metrics import Mean, to_floats


def test_means_add_as_sums_and_weights():
  total = Mean(1.0, 1.0) + Mean(9.0, 3.0)
  assert to_floats({"x": total}) == {"x": 2.5}  # the mean of means would be 2


def test_a_mean_of_no_weight_has_no_value():
  assert to_floats({"x": Mean(0.0, 0.0), "y": 3}) == {"y": 3.0}
