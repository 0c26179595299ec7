"""Who is dealt row k: a closed form that agrees with dealing one by one, in the weights' proportions."""

import numpy as np
import pytest

from input_pipeline.mixture import MAX_ROWS, Mixture, stage_weights
from trainer.errors import ConfigError


def mixture(weights, rows=None, starts=(0,), stop="never"):
  weights = np.atleast_2d(np.array(weights, float))
  rows = rows or [10] * weights.shape[1]
  return Mixture(starts, weights, rows, stop, [f"s{i}" for i in range(weights.shape[1])])


WEIGHTS = [
    [1.0], [0.5, 0.5], [3, 1], [0.7, 0.2, 0.1], [1, 0, 2, 0], [1e-4, 1, 1e-4], list(range(1, 12)),
    [1 / 3, 1e6, 5, 0.01],
]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_every_prefix_is_in_proportion(weights):
  m, n = mixture(weights), 5000
  source, _, _ = m.locate(np.arange(n))
  counts = np.cumsum(source[:, None] == np.arange(len(weights)), axis=0)
  wanted = np.arange(1, n + 1)[:, None] * np.array(weights) / sum(weights)
  depth = int(np.ceil(np.log2(len(weights))))
  assert np.abs(counts - wanted).max() <= depth / 2 + 1e-3
  assert not counts[-1][np.array(weights) == 0].any()


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_a_sources_rows_are_consumed_one_after_another_across_epochs(weights):
  rows = [3 + 2 * i for i in range(len(weights))]
  m = mixture([weights, weights[::-1]], rows, starts=(0, 333))
  source, epoch, row = m.locate(np.arange(2000))
  for s, r in enumerate(rows):
    draw = (epoch * r + row)[source == s]
    assert draw.tolist() == list(range(len(draw))) and (row[source == s] < r).all()


def test_closed_form_counters_are_the_counts_at_any_row():
  m = mixture([[1, 2, 0], [0, 1, 5], [2, 0, 1]], starts=(0, 101, 350))
  source, _, _ = m.locate(np.arange(1000))
  for k in (0, 1, 100, 101, 102, 349, 350, 351, 1000):
    assert m.draws(k).tolist() == [(source[:k] == s).sum() for s in range(3)]
  assert set(source[:101]) == {0, 1} and set(source[101:350]) == {1, 2} and set(source[350:]) == {0, 2}
  assert (source[101:350] == 2).mean() == pytest.approx(5 / 6, abs=0.01)


def test_rows_may_be_asked_for_in_any_order():
  m = mixture([[1, 2, 4], [4, 1, 1]], starts=(0, 50))
  k = np.random.default_rng(0).permutation(200)
  whole = np.stack(m.locate(np.arange(200)))
  assert (np.stack(m.locate(k)) == whole[:, k]).all()


def test_far_rows_are_exact():
  m = mixture([1, 2])
  k = MAX_ROWS - 3 + np.arange(3)
  source, epoch, row = m.locate(k)
  assert (np.bincount(source, minlength=2) == m.draws(MAX_ROWS) - m.draws(MAX_ROWS - 3)).all()
  assert (epoch * 10 + row <= k).all() and abs(m.draws(MAX_ROWS)[0] / MAX_ROWS - 1 / 3) < 1e-9


@pytest.mark.parametrize("weights, rows", [([1, 1], [10, 25]), ([5, 1, 1], [40, 3, 9]), ([1], [7]), ([1, 0], [6, 9])])
def test_stops_are_where_dealing_one_by_one_finds_them(weights, rows):
  source, epoch, row = mixture(weights, rows).locate(np.arange(2000))
  last = [(source == s) & (row == r - 1) & (epoch == 0) for s, r in enumerate(rows) if weights[s]]
  ends = [np.flatnonzero(rows_here)[0] + 1 for rows_here in last]
  assert mixture(weights, rows, stop="first").num_rows == min(ends)
  assert mixture(weights, rows, stop="never").num_rows is None
  if all(weights):
    assert mixture(weights, rows, stop="all").num_rows == max(ends)
  else:
    with pytest.raises(ConfigError, match="stop='all', but source 's1' is never seen whole"):
      mixture(weights, rows, stop="all")


def test_stop_all_over_stages():
  m = mixture([[1, 0], [0, 1]], [10, 20], starts=(0, 10), stop="all")
  assert m.num_rows == 30
  with pytest.raises(ConfigError, match="source 's0' is never seen whole: its weight ends at 0"):
    mixture([[1, 0], [0, 1]], [11, 20], starts=(0, 10), stop="all")


def test_stage_weights_carry_over_what_they_leave_out():
  steps, weights = stage_weights({"a": 1.0, "b": 2.0}, ((10, {"a": 0.0}), (20, {"a": 3.0, "b": 0.0}),
                                                         (30, {"b": 1.0})))
  assert steps == [0, 10, 20, 30]
  assert weights == [{"a": 1.0, "b": 2.0}, {"a": 0.0, "b": 2.0}, {"a": 3.0, "b": 0.0}, {"a": 3.0, "b": 1.0}]
  assert stage_weights({"a": 0.0}, ((0, {"a": 1.0}),)) == ([0], [{"a": 1.0}])


@pytest.mark.parametrize("base, stages, said", [
    ({"a": 1.0}, ((10, {"b": 1.0}),), "at step 10: unknown source 'b'; input.sources has 'a'"),
    ({"a": 1.0}, ((10, {"a": -1.0}),), "weight of source 'a' from step 10 on is -1.0; it must be >= 0"),
    ({"a": float("nan")}, (), "weight of source 'a' from step 0 on is nan"),
    ({"a": 0.0, "b": 0.0}, (), "from step 0 on all source weights are 0"),
    ({"a": 1.0}, ((10, {"a": 0.0}),), "from step 10 on all source weights are 0"),
    ({"a": 1.0}, ((10, {}), (10, {})), "steps must be increasing integers from 0 on, found 10"),
    ({"a": 1.0}, ((1.5, {}),), "found 1.5"),
    ({"a": 1.0}, ((10, {}), (0, {})), "found 0"),
    ({"a": 1.0}, ((10, 2.0),), "is not (step, {source: weight"),
    ({"a": 1.0}, (10,), "is not (step, {source: weight"),
])
def test_bad_stages(base, stages, said):
  with pytest.raises(ConfigError) as error:
    stage_weights(base, stages)
  assert said in str(error.value)
