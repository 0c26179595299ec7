"""What is left of a product has every pair, or every value, and little more; the rest is marked as slow."""

import itertools

import pytest

from tests.pairwise import covering

FACTORS = "abcd", (1, 2, 3), (True, False), (None, 7)


@pytest.mark.parametrize("strength, at_most", [(1, 4), (2, 14), (4, 48)])
def test_every_combination_is_there(strength, at_most):
  params = covering(*FACTORS, strength=strength)
  assert [param.values for param in params] == list(itertools.product(*FACTORS))
  assert all([mark.name for mark in param.marks] in ([], ["slow"]) for param in params)
  kept = [param.values for param in params if not param.marks]
  assert len(kept) <= at_most
  for some in itertools.combinations(range(len(FACTORS)), strength):
    wanted = set(itertools.product(*(FACTORS[i] for i in some)))
    assert {tuple(values[i] for i in some) for values in kept} == wanted
