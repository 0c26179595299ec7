"""Documents with parts: cut alike on all sides or dropped, counted by reason, and laid into rows whole."""

import re

import numpy as np
import pytest

from input_pipeline.batches import PackedSource, empty_batch
from input_pipeline.cache import TokenizedSource
from input_pipeline.examples import MISMATCHED
from input_pipeline.files import DataError
from input_pipeline.fitting import Pieces, Units
from input_pipeline.packing import make_plan


def source_of(units, marks=(1.0, 1.0), **more):
  """A source of documents whose parts are (untrained, trained) tokens."""
  marks = [marks] * len(units) if isinstance(marks[0], float) else marks
  sizes = [sum(part) for unit in units for part in unit]
  parts = np.concatenate([[0], np.cumsum(sizes)])
  each = len(units[0])
  weights = [w for unit in units for before, trained in unit for w in [0] * before + [1] * trained]
  return TokenizedSource(
      "s", np.arange(1, 1 + parts[-1], dtype=np.uint16), parts[::each], np.array(sizes), "print", {},
      np.array(weights, np.float32), parts=parts, marks=np.array(marks, np.float32).reshape(-1), **more)


def fit(units, seq_len, over_long="truncate_end", marks=(1.0, 1.0), share=1.0):
  return Units(source_of(units, marks), seq_len, over_long, share)


def kept(units, doc):
  pieces, _ = units.parts(Pieces(np.array([0]), np.array([doc]), np.array([0]), np.array([0])))
  return pieces.end.tolist()


def test_a_pair_is_cut_at_one_place_on_both_sides_or_dropped():
  units = fit([
      [(2, 3), (2, 3)],  # fits
      [(2, 9), (2, 7)],  # both sides are longer than half a row
      [(2, 9), (2, 3)],  # the cut would fall on one side alone
      [(2, 9), (2, 4)],  # a side of half a row exactly would be left whole
      [(6, 3), (6, 3)],  # the prompt fills half a row
      [(6, 3), (5, 9)],  # … on one side
  ], 13)
  assert kept(units, 0) == [5, 5] and kept(units, 1) == [6, 6]
  assert units.spans.doc.tolist() == [0, 1] and units.spans.lengths.tolist() == [10, 12]
  assert units.dropped == {"one side too long": 2, "no room for a completion": 2}
  s = units.spans
  assert (s.documents, s.truncated, s.too_long) == (6, 1, 4)
  assert s.lost == s.tokens - 22 and s.tokens == 10 + 20 + 16 + 17 + 18 + 23
  assert units.count(np.array([0, 1]), None, None).tolist() == [6, 8] and units.summed == 14


def test_drop_and_error():
  long = [[(2, 3), (2, 3)], [(2, 9), (2, 7)], [(2, 4), (2, 3)]]
  units = fit(long, 11, "drop")
  assert units.dropped == {"too long": 1} and units.spans.doc.tolist() == [0, 2]
  with pytest.raises(DataError, match=re.escape(
      "1 of 3 documents (33.3%) are longer than seq_len=11 (the longest: 20 tokens); with input.over_long='error' they "
      "are refused. Set seq_len=20 or more, another input.over_long (truncate_end, drop).")):
    fit(long, 11, "error")
  with pytest.raises(DataError, match="and input.max_over_long allows 30.0% of them. Set seq_len=20"):
    fit(long, 11, share=0.3)
  assert fit(long, 20, "error", share=0.0).dropped == {}


def test_single_answers_are_cut_to_a_row():
  units = fit([[(2, 3)], [(2, 9)], [(8, 4)]], 8, marks=(1.0,))
  assert units.spans.lengths.tolist() == [5, 8] and units.dropped == {"no room for a completion": 1}
  assert units.spans.truncated == 1


def test_a_mismatched_completion_never_costs_its_example():
  marks = [(1.0, MISMATCHED), (-1.0, MISMATCHED), (1.0, MISMATCHED), (1.0, 0.0)]
  units = fit([[(2, 3), (2, 9)], [(2, 9), (2, 9)], [(2, 3), (7, 2)], [(2, 6), (0, 0)]], 12, marks=marks)
  assert [kept(units, doc) for doc in range(4)] == [[5, 7], [6, 6], [5, 0], [8, 0]]
  pieces, found = units.parts(Pieces(*np.zeros((3, 4), np.int64)[:1], np.arange(4), *np.zeros((2, 4), np.int64)))
  assert found.tolist() == [1, MISMATCHED, -1, MISMATCHED, 1, 0, 1, 0]
  assert units.dropped == {} and units.spans.too_long == 0
  assert units.count(np.arange(4), None, None).tolist() == [3, 4, 3, 6]  # what is summed up is not trained
  assert units.summed == 3 + 5 + 4 + 4 + 3 + 6


def test_the_fingerprint_is_that_of_what_is_kept():
  long = [[(2, 3), (2, 3)], [(2, 9), (2, 7)]]
  prints = [fit(long, n).fingerprint for n in (13, 14, 15, 20, 21)]
  assert prints[0] != prints[1] == prints[2] != prints[3] == prints[4]
  assert fit(long, 13, "drop").fingerprint not in prints


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_rows_by_a_plain_loop(packing):
  rng = np.random.default_rng(0)
  made = [[tuple(rng.integers(1, 9, 2).tolist()) for _ in range(2)] for _ in range(40)]
  source = source_of(made)
  units = Units(source, 24, "truncate_end", 1.0)
  plan = make_plan(packing, np.diff(source.offsets), 24, seed=0, name="s", count=units.count, spans=units.spans)
  packed = PackedSource(source, plan, units=units)
  rows = np.arange(plan.num_rows)
  assert packed.sequences == 2 * plan.most_pieces == (2 if packing == "none" else packed.sequences)
  for epoch in (0, 3):
    batch = empty_batch(len(rows), 24, 0, packed.sequences)
    packed.fill(batch, rows, epoch, rows, 0)
    seen = []
    for row in rows:
      segments, tokens = batch["segment_ids"][row], batch["tokens"][row]
      count = segments.max()
      assert count % 2 == 0 and batch["sequences"][row].tolist() == [1] * count + [0] * (packed.sequences - count)
      pairs = []
      for segment in range(1, count + 1):
        here = np.flatnonzero(segments == segment)
        assert here.tolist() == list(range(here[0], here[-1] + 1))  # in one piece
        assert batch["positions"][row, here].tolist() == list(range(len(here)))
        part = int(np.searchsorted(source.parts, tokens[here[0]] - 1, "right")) - 1
        before, trained = made[part // 2][part % 2]
        assert part % 2 == (segment - 1) % 2 and tokens[here[0]] - 1 == source.parts[part]
        assert np.array_equal(tokens[here], tokens[here[0]] + np.arange(len(here)))
        assert batch["loss_weights"][row, here].tolist() == ([0] * before + [1] * trained)[:len(here)]
        pairs.append(part // 2)
      assert pairs[::2] == pairs[1::2]  # both sides of a pair, side by side
      seen += pairs[::2]
    assert sorted(seen) == sorted(units.spans.doc.tolist() if units.spans.doc is not None else range(40))
  assert plan.stats().trained == sum(np.minimum(t, max(0, k - b)) for doc in seen for (b, t), k in
                                     zip(made[doc], kept(units, doc), strict=True))
