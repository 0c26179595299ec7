"""Means add up as sums and weights."""

import jax.numpy as jnp
import pytest

from trainer.metrics import Max, Mean, to_floats


def test_means_add_as_sums_and_weights():
  total = Mean(1.0, 1.0) + Mean(9.0, 3.0)
  assert to_floats({"x": total}) == {"x": 2.5}  # the mean of means would be 2


def test_a_mean_of_no_weight_has_no_value():
  assert to_floats({"x": Mean(0.0, 0.0), "y": 3}) == {"y": 3.0}


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_of_nothing_is_left_out(sign):
  """A value without a weight is that of padding, however large it is."""
  some, nothing = Max(jnp.float32(-3.0), 2.0, sign), Max(jnp.float32(0.0), 0.0, sign)
  for total in (some + nothing, nothing + some, some + Max(jnp.float32(-5.0), 1.0, sign)):
    assert to_floats({"x": total}) == {"x": sign * -3.0}
  assert to_floats({"x": nothing + nothing}) == {}
