"""Documents with parts: cut alike on all sides or dropped, counted by reason, and laid into rows whole."""

import re

import numpy as np
import pytest

from input_pipeline import fitting
from input_pipeline.batches import Arrays, PackedSource, empty_batch
from input_pipeline.cache import TokenizedSource
from input_pipeline.examples.roles import ABSENT, CHOSEN, DESIRABLE, MISMATCHED, REJECTED, UNDESIRABLE
from input_pipeline.fitting import Pieces, Units
from input_pipeline.packing import make_plan
from trainer.errors import DataError


def source_of(units, roles=(CHOSEN, REJECTED), **more):
  """A source of documents whose parts are (untrained, trained) tokens."""
  roles = [roles] * len(units) if isinstance(roles[0], int) else roles
  sizes = [sum(part) for unit in units for part in unit]
  parts = np.concatenate([[0], np.cumsum(sizes)])
  each = len(units[0])
  weights = [w for unit in units for before, trained in unit for w in [0] * before + [1] * trained]
  return TokenizedSource(
      "s", np.arange(1, 1 + parts[-1], dtype=np.uint16), parts[::each], np.array(sizes), "print", {},
      np.array(weights, np.float32), parts=parts, roles=np.array(roles, np.int8).reshape(-1), **more)


def fit(units, seq_len, over_long="truncate_end", roles=(CHOSEN, REJECTED), share=1.0):
  return Units(source_of(units, roles), seq_len, over_long, share)


def kept(units, doc):
  parts = units.parts(Pieces(np.array([0]), np.array([doc]), np.array([0]), np.array([0])))
  return parts.pieces.end[parts.nth >= 0].tolist()


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
      "are refused. Set seq_len=20 or more, another input.over_long (truncate_end, truncate_start, "
      "drop).")):
    fit(long, 11, "error")
  with pytest.raises(DataError, match="and input.max_over_long allows 30.0% of them. Set seq_len=20"):
    fit(long, 11, share=0.3)
  assert fit(long, 20, "error", share=0.0).dropped == {}


def alike_source(units, roles=(CHOSEN, REJECTED)):
  """As `source_of`, with the same prompt on both sides, ids from 100 on; those of completions are all different."""
  source, ids, own = source_of(units, roles), [], 1000
  for unit in units:
    for before, trained in unit:
      ids += [*range(100, 100 + before), *range(own, own + trained)]
      own += trained
  return source._replace(tokens=np.array(ids, np.uint16))


def laid(source, units, doc, seq_len):
  """What a row with this document holds of each part: ids, with those of a shared prompt before them."""
  batch = empty_batch(1, seq_len, 0, Arrays(units.each + 1, prompts=units.shares))
  plan = make_plan("none", np.diff(source.offsets), seq_len, seed=0, name="s", shuffle=False, count=units.count,
                   spans=units.spans)
  row = (range(source.num_documents) if units.spans.doc is None else units.spans.doc.tolist()).index(doc)
  PackedSource(source, plan, units=units).fill(batch, np.array([0]), 0, np.array([row]), 0)
  found = []
  for number in range(1, units.each + 1):
    mine = batch["segment_ids"][0] == number
    if mine.any() and units.shares and (prompt := batch["prompt_ids"][0][mine][0]):
      assert not batch["loss_weights"][0][batch["segment_ids"][0] == prompt].any()
      mine |= batch["segment_ids"][0] == prompt
    found.append(batch["tokens"][0][mine].tolist())
    assert batch["positions"][0][mine].tolist() == list(range(mine.sum()))  # as of texts that begin there
    assert batch["loss_weights"][0][mine].tolist() == [float(i >= 1000) for i in found[-1]]
  return found


@pytest.mark.parametrize("share, cut", [(False, 5), (True, 3)])
def test_prompts_are_cut_at_their_beginning_and_answers_kept_whole(share, cut):
  """By hand: 23 tokens in 13 places: each side loses 5. A shared prompt stands there once, but for its last token:
  7 + 4 + 5 = 16 places lose 3."""
  source = alike_source([[(8, 3), (8, 4)], [(2, 9), (2, 7)], [(2, 3), (2, 3)], [(6, 6), (6, 5)]])
  units = Units(source, 13, "truncate_start", 1.0, share)
  assert laid(source, units, 0, 13) == [
      [*range(100 + cut, 108), 1000, 1001, 1002], [*range(100 + cut, 108), *range(1003, 1007)]]
  assert laid(source, units, 2, 13)[0][:2] == [100, 101]  # fits as it is
  # One token of the prompt must stay on each side: with it the answers of the second need 18 places, of the fourth 13.
  assert units.dropped == {"too long": 1} and laid(source, units, 3, 13) == [
      [105, *range(1029, 1035)], [105, *range(1035, 1040)]]
  s = units.spans
  assert (s.documents, s.truncated, s.too_long) == (4, 2, 1)
  assert s.lost == 20 + 2 * cut + 2 * 5 and s.doc.tolist() == [0, 2, 3]
  assert units.count(np.array([0, 2, 3]), None, None).tolist() == [7, 6, 11]
  assert units.fingerprint != Units(source, 13, "truncate_end", 1.0, share).fingerprint
  with pytest.raises(DataError, match=r"3 of 4 documents \(75.0%\) are longer than seq_len=13"):
    Units(source, 13, "truncate_start", 0.5)


@pytest.mark.parametrize("share", [False, True])
def test_no_more_is_cut_at_the_beginning_than_must_be(share):
  rng = np.random.default_rng(0)
  made = []
  for _ in range(60):
    before = int(rng.integers(2, 20))
    made.append([(before, int(rng.integers(1, 9))), (before, int(rng.integers(1, 9)))])
  source = alike_source(made)
  units = Units(source, 24, "truncate_start", 1.0, share)
  kept = set(range(60) if units.spans.doc is None else units.spans.doc.tolist())
  for doc, ((before, a), (_, b)) in enumerate(made):
    def places(prompt, a=a, b=b):
      return prompt - 1 + 1 + a + 1 + b if share else 2 * prompt + a + b
    fitting_prompts = [prompt for prompt in range(1, before + 1) if places(prompt) <= 24]
    assert (doc in kept) == bool(fitting_prompts)
    if doc in kept:
      one, other = laid(source, units, doc, 24)
      assert len(one) - a == len(other) - b == max(fitting_prompts)
      assert one[:len(one) - a] == other[:len(other) - b] == list(range(100, 100 + before))[before - len(one) + a:]


def test_a_mismatched_completion_is_cut_or_left_out_before_its_example():
  roles = [(DESIRABLE, MISMATCHED), (UNDESIRABLE, MISMATCHED), (DESIRABLE, MISMATCHED), (DESIRABLE, ABSENT)]
  source = alike_source([[(6, 3), (6, 4)], [(2, 3), (2, 9)], [(6, 11), (6, 2)], [(9, 6), (0, 0)]], roles)
  units = Units(source, 12, "truncate_start", 1.0)
  assert [list(map(len, laid(source, units, doc, 12))) for doc in range(4)] == [
      [5, 6],  # 19 places: the prompt loses 4 on each side, and 11 are used
      [4, 8],  # of 16 the prompt can give 2; the mismatched completion loses 2
      [12, 0],  # of 25 the prompt can give 10, and nothing would be left of the mismatched completion
      [12, 0]]
  assert units.dropped == {} and units.spans.truncated == 4


def test_single_answers_lose_the_beginning_of_their_prompt():
  source = alike_source([[(2, 3)], [(9, 5)], [(2, 9)]], (DESIRABLE,))
  units = Units(source, 8, "truncate_start", 1.0)
  assert laid(source, units, 1, 8) == [[106, 107, 108, *range(1003, 1008)]] and units.dropped == {"too long": 1}


def test_single_answers_are_cut_to_a_row():
  units = fit([[(2, 3)], [(2, 9)], [(8, 4)]], 8, roles=(DESIRABLE,))
  assert units.spans.lengths.tolist() == [5, 8] and units.dropped == {"no room for a completion": 1}
  assert units.spans.truncated == 1


def test_a_mismatched_completion_never_costs_its_example():
  roles = [(DESIRABLE, MISMATCHED), (UNDESIRABLE, MISMATCHED), (DESIRABLE, MISMATCHED), (DESIRABLE, ABSENT)]
  units = fit([[(2, 3), (2, 9)], [(2, 9), (2, 9)], [(2, 3), (7, 2)], [(2, 6), (0, 0)]], 12, roles=roles)
  assert [kept(units, doc) for doc in range(4)] == [[5, 7], [6, 6], [5, 0], [8, 0]]
  parts = units.parts(Pieces(*np.zeros((3, 4), np.int64)[:1], np.arange(4), *np.zeros((2, 4), np.int64)))
  assert parts.roles.tolist() == [DESIRABLE, MISMATCHED, UNDESIRABLE, MISMATCHED, DESIRABLE, ABSENT, DESIRABLE, ABSENT]
  assert parts.advantages is None
  assert units.dropped == {} and units.spans.too_long == 0
  assert units.count(np.arange(4), None, None).tolist() == [3, 4, 3, 6]  # what is summed up is not trained
  assert units.summed == 3 + 5 + 4 + 4 + 3 + 6


@pytest.mark.parametrize("share, expected", [(False, [5.0, 6.0, 1.0, 2.0]), (True, [0.0, 5.0, 6.0, 0.0, 1.0, 2.0])])
def test_each_part_has_its_own_number_and_a_shared_prompt_none(share, expected):
  """Advantages, or margins of graded pairs."""
  source = alike_source([[(2, 3), (2, 4)]] * 3)._replace(advantages=np.arange(1, 7, dtype=np.float32))
  units = Units(source, 24, "truncate_end", 1.0, share)
  parts = units.parts(Pieces(np.zeros(2, np.int64), np.array([2, 0]), *np.zeros((2, 2), np.int64)))
  assert units.shares == share and parts.advantages.tolist() == expected


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
    batch = empty_batch(len(rows), 24, 0, Arrays(packed.sequences))
    packed.fill(batch, rows, epoch, rows, 0)
    seen = []
    for row in rows:
      segments, tokens = batch["segment_ids"][row], batch["tokens"][row]
      count = segments.max()
      assert count % 2 == 0
      assert batch["segment_roles"][row].tolist() == [CHOSEN, REJECTED] * (count // 2) + [ABSENT] * (
          packed.sequences - count)
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


# ----------------------------------------------------------------------------------------------
# Prompts that parts share.


def pairs_with_ids(rng, count):
  """A source of preferences whose prompts are equal, equal up to a place, or have nothing in common."""
  units, ids = [], []
  for number in range(count):
    before, sizes = int(rng.integers(1, 12)), rng.integers(1, 9, 2).tolist()
    units.append([(before, size) for size in sizes])
    sides = [rng.integers(1, 50, before + size) for size in sizes]
    alike = before if number % 4 else int(rng.integers(0, before + 1))
    sides[1][:alike] = sides[0][:alike]
    ids += sides
  return source_of(units)._replace(tokens=np.concatenate(ids).astype(np.uint16))


def alike(source, doc):
  """By a plain loop: tokens that both parts begin with, before any is trained."""
  sides = [slice(source.parts[2 * doc + part], source.parts[2 * doc + part + 1]) for part in (0, 1)]
  count = 0
  for a, b, wa, wb in zip(*(source.tokens[s] for s in sides), *(source.weights[s] for s in sides), strict=False):
    if a != b or wa or wb:
      break
    count += 1
  return count


def test_common_beginnings_by_a_plain_loop(monkeypatch):
  source = pairs_with_ids(np.random.default_rng(0), 60)
  expected = [alike(source, doc) for doc in range(60)]
  assert 0 in expected and max(expected) > 5
  assert fitting.common_beginnings(source).tolist() == expected
  monkeypatch.setattr(fitting, "WEIGHTS_READ", 40)  # some documents at a time, or one that has more
  assert fitting.common_beginnings(source).tolist() == expected
  assert fitting.common_beginnings(source_of([[(3, 2)], [(2, 2)]], (1.0,))).tolist() == [0, 0]  # nothing beside it
  absent = source_of([[(3, 2), (0, 0)]], (1.0, 0.0))
  assert fitting.common_beginnings(absent).tolist() == [0]


@pytest.mark.parametrize("packing", ["best_fit", "none"])
@pytest.mark.parametrize("seq_len", [40, 22])
def test_sides_that_share_their_prompt_are_the_same_sides(packing, seq_len):
  """Each token at its position, with its weight, once; in no more places; some pairs are too long for a row."""
  source = pairs_with_ids(np.random.default_rng(1), 60)
  units = Units(source, seq_len, "truncate_end", 1.0, share_prompts=True)
  plan = make_plan(packing, np.diff(source.offsets), seq_len, seed=0, name="s", count=units.count, spans=units.spans)
  packed = PackedSource(source, plan, units=units)
  rows, seen = np.arange(plan.num_rows), []
  batch = empty_batch(len(rows), seq_len, 0, Arrays(packed.sequences + 2, prompts=packed.shares_prompts))
  packed.fill(batch, rows, 1, rows, 0)
  with pytest.raises(KeyError, match="prompt_ids"):  # sides would lose their prompts
    packed.fill(empty_batch(len(rows), seq_len, 0, Arrays(packed.sequences)), rows, 1, rows, 0)
  for row in rows:
    segments, prompts = batch["segment_ids"][row], batch["prompt_ids"][row]
    assert {0, *segments.tolist()} >= set(prompts.tolist()) and not prompts[segments > packed.sequences + 2].any()
    for first in np.flatnonzero(batch["segment_roles"][row])[::2]:
      sides = []
      for number in (first, first + 1):
        mine = np.flatnonzero(segments == number + 1)
        prompt = prompts[mine[0]]
        assert len(mine) and (prompts[mine] == prompt).all()
        assert batch["segment_roles"][row][number] == (CHOSEN, REJECTED)[number - first]
        before = np.flatnonzero((segments == prompt) & (prompt > 0))
        places = np.concatenate([before, mine])
        assert (np.diff(places) > 0).all()  # it stands before both
        assert not batch["loss_weights"][row][before].any()
        assert batch["positions"][row][places].tolist() == list(range(len(places)))
        sides.append((batch["tokens"][row][places], batch["loss_weights"][row][places], len(before)))
      doc = next(d for d in range(60) if d not in seen and all(
          np.array_equal(source.tokens[source.parts[2 * d + p]:][:len(side[0])], side[0])
          for p, side in enumerate(sides)))
      seen.append(doc)
      assert [len(ids) for ids, _, _ in sides] == kept(units, doc)
      assert {shared for _, _, shared in sides} == {max(alike(source, doc) - 1, 0)}
      for p, (_, weights, _) in enumerate(sides):
        assert weights[1:].tolist() == source.weights[source.parts[2 * doc + p]:][1:len(weights)].tolist()
  apart = Units(source, seq_len, "truncate_end", 1.0)
  assert sorted(seen) == sorted(range(60) if units.spans.doc is None else units.spans.doc.tolist())
  # With more room the cut may fall on the longer side alone, so that a pair is dropped that would be cut on both.
  gone = set(range(60) if apart.spans.doc is None else apart.spans.doc.tolist()) - set(seen)
  assert len(gone) <= units.dropped.get("one side too long", 0) and units.spans.tokens == apart.spans.tokens
  # In a larger row than any needs, what is saved is each shared prompt, once.
  whole = Units(source, 99, "error", 0.0, share_prompts=True)
  assert whole.saved == sum(max(alike(source, doc) - 1, 0) for doc in range(60)) > 100
  assert whole.spans.lengths.sum() == np.diff(source.offsets).sum() - whole.saved and whole.spans.lost == 0
  assert whole.fingerprint == Units(source, 99, "error", 0.0).fingerprint  # the same tokens are kept


def test_a_pair_whose_sides_fit_only_with_one_prompt_is_kept_whole():
  source = source_of([[(8, 3), (8, 4)]])
  source = source._replace(tokens=np.concatenate([np.arange(1, 9), [1, 2, 3], np.arange(1, 9), [4, 5, 6, 7]]))
  apart, units = (Units(source, 16, "truncate_end", 1.0, share) for share in (False, True))
  assert apart.dropped == {"no room for a completion": 1} and units.dropped == {}
  assert units.spans.lengths.tolist() == [7 + 4 + 5] and units.spans.truncated == 0
  # One place less: only the longer side would be cut.
  assert Units(source, 15, "truncate_end", 1.0, True).dropped == {"one side too long": 1}


def test_what_is_left_out_alone_leaves_nobody_to_share_with():
  source = source_of([[(4, 3), (4, 9)], [(4, 3), (0, 0)]], [(DESIRABLE, MISMATCHED), (DESIRABLE, ABSENT)])
  prompt = [7, 8, 9, 7]
  source = source._replace(tokens=np.concatenate([prompt, [1] * 3, prompt, [2] * 9, prompt, [3] * 3]))
  units = Units(source, 19, "truncate_end", 1.0, share_prompts=True)
  assert units.spans.lengths.tolist() == [3 + 4 + 10, 7] and units.saved == 3
  parts = units.parts(Pieces(np.array([0, 0]), np.arange(2), np.zeros(2, np.int64), np.zeros(2, np.int64)))
  assert parts.nth.tolist() == [-1, 0, 1, -1, 0, 1] and parts.document.tolist() == [0, 0, 0, 1, 1, 1]
  assert parts.pieces.begin.tolist() == [0, 3, 3, 0, 0, 0] and parts.pieces.end.tolist() == [3, 7, 13, 0, 7, 0]
