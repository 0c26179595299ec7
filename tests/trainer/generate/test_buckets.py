"""Sizes come from few values, none of which is too small or half too large."""

from trainer.generate.buckets import bucket, power


def test_powers_of_two_of_a_unit():
  assert [power(n, 1) for n in (1, 2, 3, 5)] == [1, 2, 4, 8]
  assert [power(n, 6) for n in (1, 6, 7, 13)] == [6, 6, 12, 24]


def test_buckets_are_at_most_a_half_too_large():
  assert [bucket(n, 16) for n in (1, 16, 17, 33, 49, 65, 97)] == [16, 16, 32, 48, 64, 96, 128]
  assert [bucket(n, 1) for n in range(1, 14)] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]
  for n in range(1, 300):
    assert n <= bucket(n, 3) and bucket(n, 3) <= (1.5 * (n + 3) if n > 6 else 6)
