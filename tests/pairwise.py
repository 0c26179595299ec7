"""Some cases of a product in every run of the tests, and all of them every night."""

import itertools
from collections.abc import Collection
from typing import Any

import pytest


def covering(*factors: Collection[Any], strength: int = 2) -> list:
  """All combinations of a value of each factor, for `parametrize`; those that are not needed are marked as slow.

  What is not marked has every combination of values of any `strength` of the factors: with 2 every pair, which finds
  most of what the whole product finds; with 1 every value. Chosen one by one, each time the first of those that add
  most.
  """
  rows = list(itertools.product(*factors))
  indices = list(itertools.product(*(range(len(factor)) for factor in factors)))
  parts = [{(some, tuple(row[i] for i in some)) for some in itertools.combinations(range(len(factors)), strength)}
           for row in indices]
  missing, chosen = set().union(*parts), set()
  while missing:
    best = max(range(len(rows)), key=lambda i: len(parts[i] & missing))
    chosen.add(best)
    missing -= parts[best]
  return [pytest.param(*row, marks=() if i in chosen else pytest.mark.slow) for i, row in enumerate(rows)]
