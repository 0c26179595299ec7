"""Few sizes for many numbers, so that few programs are compiled."""

import math


def power(n: int, unit: int) -> int:
  """The least of unit × 1, 2, 4, 8, … that is n or more."""
  return unit * 2 ** max(0, math.ceil(math.log2(n / unit)))


def bucket(n: int, unit: int) -> int:
  """The least of unit × 1, 2, 3, 4, 6, 8, 12, … that is n or more."""
  size = power(n, unit)
  return size // 4 * 3 if size > 2 * unit and size // 4 * 3 >= n else size
