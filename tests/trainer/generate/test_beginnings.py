"""What prompts have in common is run once: which prompts share what, and that nothing else changes."""

import itertools

import numpy as np
import pytest

from tests.trainer.generate.test_prefill import OPTIONS, assert_same
from tests.trainer.generate.test_sampler import case, prompts, teacher_forced
from trainer.generate.beginnings import Beginnings, groups
from trainer.generate.kept import Kept
from trainer.generate.sampler import Sampler


def best_by_force(given, least):
  """The most tokens that any partition of the prompts saves."""
  def in_common(members):
    columns = zip(*(given[i][:-1] for i in members), strict=False)
    return len(list(itertools.takewhile(lambda at: len(set(at)) == 1, columns)))

  def partitions(left):
    if not left:
      yield []
      return
    for size in range(len(left)):
      for others in itertools.combinations(left[1:], size):
        mine = [left[0], *others]
        for rest in partitions([i for i in left if i not in mine]):
          yield [mine, *rest]

  def saved(members):
    n = in_common(members)
    return (len(members) - 1) * n if n >= least and len(members) > 1 else 0

  return max(sum(map(saved, parts)) for parts in partitions(list(range(len(given)))))


@pytest.mark.parametrize("seed", range(12))
def test_no_partition_saves_more(seed):
  rng = np.random.default_rng(seed)
  given = [rng.integers(0, 2, rng.integers(1, 9)) for _ in range(6)]
  for least in (1, 3):
    found = groups(given, least)
    members = [i for _, some in found for i in some]
    assert len(set(members)) == len(members) and all(len(some) > 1 for _, some in found)
    for length, some in found:
      assert length >= least and all(len(given[i]) > length for i in some)
      assert len({given[i][:length].tobytes() for i in some}) == 1
    assert sum(length * (len(some) - 1) for length, some in found) == best_by_force(given, least)


def test_of_two_system_prompts_that_begin_alike_each_is_shared():
  one, other = [1] * 70 + [2] * 200, [1] * 70 + [3] * 200
  given = [np.array(of + [9, i]) for i, of in enumerate((one, other, one, other, one))] + [np.array([5, 6])]
  assert groups(given, 64) == [(271, [0, 2, 4]), (271, [1, 3])] and groups([], 64) == []
  # Three that have 3 in common save more than two of them that have 4.
  given = [np.array(ids) for ids in ([1, 1, 1, 1, 5], [1, 1, 1, 1, 6], [1, 1, 1, 2, 7])]
  assert groups(given, 2) == [(3, [0, 1, 2])]


@pytest.mark.parametrize("name, chunk, keeps", [("llama", 0, True), *(
    pytest.param(*of, marks=pytest.mark.slow) for of in (
        ("gemma", 0, True), ("moe", 4, False), ("qwen3_next", 0, False)))])
def test_shared_beginnings_change_no_completion(name, chunk, keeps):
  """With windows that are left, states and experts, in chunks, and beside kept texts; among prompts that share none."""
  model, params = case(name)
  sampler = Sampler(model, rows=3, chunk=4, prefill_chunk=chunk, record=True)
  one, other, *own = prompts([11, 9, 3, 1, 4, 2, 5])
  given = [np.concatenate(parts).astype(np.int32) for parts in (
      (one, own[0]), (other, own[1]), (one, own[2]), (own[4],), (other, own[3]), (one, own[4]))]
  shared = Beginnings(least=4)
  kept = Kept(4, once=True) if keeps else None
  found, again = (sampler.generate(params, given, num_samples=2, **OPTIONS, beginnings=of, kept=texts)
                  for of, texts in ((shared, kept), (Beginnings(least=4), None)))
  expected = sampler.generate(params, given, num_samples=2, **OPTIONS)
  assert_same(found, expected)
  assert shared.saved == sum(n * (len(some) - 1) for n, some in groups(given, 4)) >= 2 * 11 + 9
  if kept is not None:
    assert kept.run == sum(map(len, given)) - shared.saved and kept.reused == shared.saved
  for a, b in zip(found, again, strict=True):  # the same every time, to the bit
    np.testing.assert_array_equal(a.logprobs, b.logprobs)
  for c, (forced, _) in zip(found, teacher_forced(model, params, given, found), strict=True):
    np.testing.assert_allclose(c.logprobs, forced, rtol=1e-5, atol=1e-5)
