"""Each token but a document's first is trained exactly once an epoch; orders, accounting, best fit, speed."""

import numpy as np
import pytest

from input_pipeline.packing import PACKINGS, best_fit_decreasing, make_plan, permutation
from trainer.errors import ConfigError, DataError

RNG = np.random.default_rng(0)
LENGTHS = {
    "mixed": RNG.integers(1, 40, 60),
    "with empty ones": np.array([0, 5, 0, 0, 3, 1, 17, 0]),
    "one long": np.array([1000]),
    "one token": np.array([1]),
    "exact rows": np.array([8, 8, 8, 15, 22, 4, 4]),
    "all short": np.ones(20, int),
    "pairs": np.full(30, 2),
}


@pytest.fixture(params=[(p, n, t) for p in PACKINGS for n in LENGTHS for t in (2, 3, 8)], ids=str)
def case(request):
  packing, name, seq_len = request.param
  return make_plan(packing, LENGTHS[name], seq_len, seed=1, name="s"), LENGTHS[name], seq_len


def all_pieces(plan, epoch=0):
  return plan.pieces(epoch, np.arange(plan.num_rows))


def trained(pieces):
  """(document, token) of each position with a loss weight."""
  return sorted((d, t) for d, b, e in zip(*map(np.ndarray.tolist, pieces[1:]), strict=True) for t in range(b + 1, e))


@pytest.mark.parametrize("epoch", [0, 3])
def test_every_token_but_the_first_is_trained_exactly_once(case, epoch):
  plan, lengths, _ = case
  assert trained(all_pieces(plan, epoch)) == [(d, t) for d, n in enumerate(lengths) for t in range(1, n)]


def test_rows_hold_no_more_than_they_can_and_none_is_empty(case):
  plan, _, seq_len = case
  pieces = all_pieces(plan)
  assert (pieces.end > pieces.begin).all() and (pieces.begin >= 0).all() and (np.diff(pieces.row) >= 0).all()
  filled = np.bincount(pieces.row, pieces.end - pieces.begin, minlength=plan.num_rows)
  assert (filled > 0).all() and (filled <= seq_len).all()


def test_a_cut_document_goes_on_with_its_last_token_repeated(case):
  plan, lengths, _ = case
  by_doc = {}
  for d, b, e in sorted(zip(*map(np.ndarray.tolist, all_pieces(plan)[1:]), strict=True)):
    by_doc.setdefault(d, []).append((b, e))
  assert sorted(by_doc) == np.flatnonzero(lengths).tolist()
  for d, pieces in by_doc.items():
    assert pieces[0][0] == 0 and pieces[-1][1] == lengths[d]
    assert all(after[0] == before[1] - 1 for before, after in zip(pieces, pieces[1:], strict=False))


def test_accounting_is_that_of_the_rows(case):
  plan, lengths, seq_len = case
  pieces, stats = all_pieces(plan), plan.stats()
  assert (stats.documents, stats.tokens, stats.rows) == (len(lengths), lengths.sum(), plan.num_rows)
  assert stats.trained == len(trained(pieces))
  filled = (pieces.end - pieces.begin).sum()
  assert stats.padded == pytest.approx(1 - filled / (plan.num_rows * seq_len))
  # Cut: predicted in several pieces. (A first token alone at a row's end, or a last one at its start, does not count.)
  predicting = pieces.doc[pieces.end - pieces.begin > 1]
  assert stats.split == (np.bincount(predicting) > 1).sum()


def test_rows_asked_for_in_any_order_or_number_are_the_same(case):
  plan, _, _ = case
  whole = all_pieces(plan, 2)
  for rows in (np.arange(plan.num_rows)[::-1], np.array([0, plan.num_rows - 1, 0]), np.array([], int)):
    some = plan.pieces(2, rows)
    for i, row in enumerate(rows):
      for a, b in zip(some[1:], whole[1:], strict=True):
        assert a[some.row == i].tolist() == b[whole.row == row].tolist()


@pytest.mark.parametrize("packing", PACKINGS)
def test_epochs_seeds_and_sources_have_orders_of_their_own(packing):
  def order(epoch=0, **key):
    plan = make_plan(packing, LENGTHS["mixed"], 8, **{"seed": 1, "name": "s", **key})
    return tuple(np.concatenate(plan.pieces(epoch, np.arange(plan.num_rows))).tolist())

  assert order() == order()
  assert len({order(), order(epoch=1), order(epoch=2), order(seed=2), order(name="t")}) == 5


@pytest.mark.parametrize("packing", PACKINGS)
def test_rows_are_in_another_order_each_epoch_whatever_is_in_them(packing):
  """Where each row is one of twelve texts as long as it, by the text's number."""
  def rows(epoch):
    plan = make_plan(packing, np.full(12, 8), 8, seed=1, name="s")
    plan._permutation = lambda n, what, epoch: permutation(n, epoch) if what == "rows" else np.arange(n)
    return all_pieces(plan, epoch).doc.tolist()

  assert rows(3) != rows(4)


def test_a_plan_is_known_by_what_is_kept_of_documents():
  """Beginnings and ends of two texts of 30 tokens, in rows of 8: of equal lengths, from other places."""
  ends = {over_long: make_plan("none", np.array([30, 30]), 8, seed=0, name="s", over_long=over_long).fingerprint
          for over_long in ("truncate_start", "truncate_end")}
  assert len(set(ends.values())) == 2
  assert ends["truncate_end"] == make_plan("none", np.array([30, 30]), 8, seed=5, name="t",
                                           over_long="truncate_end").fingerprint


def test_which_documents_share_a_row_changes_with_the_epoch():
  plan = make_plan("best_fit", np.full(64, 4), 8, seed=0, name="s")

  def pairs(epoch):
    docs = all_pieces(plan, epoch).doc.reshape(-1, 2)
    return {frozenset(pair) for pair in docs.tolist()}

  assert len(pairs(0) & pairs(1)) < 16


@pytest.mark.parametrize("packing", PACKINGS)
def test_without_shuffling_documents_come_in_order(packing):
  plan = make_plan(packing, np.array([9, 3, 20]), 8, seed=0, name="s", shuffle=False)
  pieces = all_pieces(plan, 5)
  if packing != "best_fit":  # which sorts by length
    assert (np.diff(pieces.doc) >= 0).all()
  assert all((a == b).all() for a, b in zip(pieces, all_pieces(plan, 0), strict=True))


def test_concat_fills_all_rows_but_the_last():
  plan = make_plan("concat", LENGTHS["mixed"], 8, seed=0, name="s", shuffle=False)
  pieces = all_pieces(plan)
  assert (np.bincount(pieces.row, pieces.end - pieces.begin)[:-1] == 8).all()


def test_best_fit_cuts_only_what_is_longer_than_a_row():
  lengths = RNG.integers(1, 30, 500)
  pieces = all_pieces(make_plan("best_fit", lengths, 16, seed=0, name="s"))
  assert (np.bincount(pieces.doc)[lengths <= 16] == 1).all()


def textbook_best_fit(lengths, size):
  """Rooms left, sorted, after placing one piece at a time."""
  rooms = []
  for length in sorted(lengths, reverse=True):
    fitting = [room for room in rooms if room >= length]
    if fitting:
      rooms.remove(min(fitting))
    rooms.append((min(fitting) if fitting else size) - length)
  return sorted(rooms)


@pytest.mark.parametrize("seed", range(20))
def test_best_fit_decreasing_is_the_textbooks(seed):
  rng = np.random.default_rng(seed)
  size = int(rng.integers(2, 40))
  lengths = rng.integers(1, size + 1, int(rng.integers(1, 300)))
  rows = best_fit_decreasing(np.bincount(lengths, minlength=size + 1), size)
  filled = np.bincount(rows, np.sort(lengths)[::-1])
  assert sorted((size - filled).astype(int).tolist()) == textbook_best_fit(lengths.tolist(), size)


def test_a_million_documents_are_packed_tightly():
  lengths = np.minimum(np.random.default_rng(0).lognormal(5, 1, 1_000_000).astype(int) + 1, 8192)
  plan = make_plan("best_fit", lengths, 2048, seed=0, name="s")
  assert plan.stats().padded < 0.01
  assert plan.pieces(0, np.arange(4)).row.max() == 3


def test_permutations_are_fixed_for_ever():
  assert sorted(permutation(1000, 0, "s").tolist()) == list(range(1000))
  # Another value here means that every run's data order has changed.
  assert permutation(8, 0, "s", "rows", 0).tolist() == [2, 1, 5, 3, 7, 4, 6, 0]
  # What a plan makes of them: a run that goes on with a later version has the same rows.
  for packing, seq_len, what in (("none", 4, "rows"), ("concat", 99, "documents"), ("best_fit", 99, "pieces")):
    plan = make_plan(packing, np.full(8, 3), seq_len, seed=5, name="s")
    for epoch in (0, 2):
      found = plan.pieces(epoch, np.arange(plan.num_rows)).doc
      np.testing.assert_array_equal(found, permutation(8, 5, "s", what, epoch), packing)



# Seven, eight and nine tokens in rows of eight, and one much longer.
LONG = np.array([7, 8, 9, 20, 3])
KEPT = {
    "truncate_end": [(0, 0, 7), (1, 0, 8), (2, 0, 8), (3, 0, 8), (4, 0, 3)],
    "truncate_start": [(0, 0, 7), (1, 0, 8), (2, 1, 9), (3, 12, 20), (4, 0, 3)],
    "drop": [(0, 0, 7), (1, 0, 8), (4, 0, 3)],
    "split": [(0, 0, 7), (1, 0, 8), (2, 0, 8), (2, 7, 9), (3, 0, 8), (3, 7, 15), (3, 14, 20), (4, 0, 3)],
}


def listed(plan, epoch=0):
  return sorted(zip(*map(np.ndarray.tolist, all_pieces(plan, epoch)[1:]), strict=True))


@pytest.mark.parametrize("packing", ["best_fit", "none"])
@pytest.mark.parametrize("over_long", KEPT)
def test_what_is_kept_of_documents_longer_than_a_row(packing, over_long):
  plan = make_plan(packing, LONG, 8, seed=0, name="s", over_long=over_long)
  assert listed(plan) == listed(plan, 3) == KEPT[over_long]
  stats = plan.stats()
  truncated, too_long, lost = {"drop": (0, 2, 29), "split": (0, 0, 0)}.get(over_long, (2, 0, 1 + 12))
  assert (stats.documents, stats.tokens) == (5, 47)
  assert (stats.truncated, stats.too_long, stats.lost, stats.untrained) == (truncated, too_long, lost, 0)
  assert stats.split == (2 if over_long == "split" else 0)
  assert stats.trained == len(trained(all_pieces(plan)))
  assert stats.padded == pytest.approx(1 - sum(e - b for _, b, e in KEPT[over_long]) / (8 * plan.num_rows))


@pytest.mark.parametrize("over_long", ["truncate_end", "truncate_start", "drop"])
def test_concat_trains_each_token_of_what_is_kept_once(over_long):
  plan = make_plan("concat", LONG, 8, seed=0, name="s", over_long=over_long)
  wanted = [(d, t) for d, begin, end in KEPT[over_long] for t in range(begin + 1, end)]
  assert trained(all_pieces(plan, 2)) == wanted and plan.stats().trained == len(wanted)


def count_in(weights, lengths):
  """Counts trained tokens one by one."""
  starts = np.cumsum(lengths) - lengths

  def count(doc, begin, end):
    doc, begin, end = np.broadcast_arrays(doc, begin, end)
    return np.array([np.count_nonzero(weights[starts[d] + b + 1:starts[d] + e])
                     for d, b, e in zip(doc, begin, end, strict=True)], np.int64)

  return count


@pytest.mark.parametrize("packing", ["best_fit", "none"])
@pytest.mark.parametrize("over_long", KEPT)
def test_pieces_without_a_trained_token_are_left_out_and_counted(packing, over_long):
  lengths = np.tile(LONG, 4)
  weights = np.random.default_rng(1).random(lengths.sum()) < 0.15
  count = count_in(weights, lengths)
  plan = make_plan(packing, lengths, 8, seed=0, name="s", over_long=over_long, count=count)
  every = [(d + 5 * i, b, e) for i in range(4) for d, b, e in KEPT[over_long]]
  counts = dict(zip(every, count(*np.array(every).T), strict=True))
  kept = sorted(piece for piece, n in counts.items() if n)
  assert 0 < len(kept) < len(every)
  assert listed(plan) == listed(plan, 1) == kept
  stats = plan.stats()
  assert stats.untrained == len(every) - len(kept) and stats.trained == sum(counts.values())
  assert stats.padded == pytest.approx(1 - sum(e - b for _, b, e in kept) / (8 * plan.num_rows))


def test_a_weight_on_the_first_token_of_a_piece_trains_nothing():
  weights = np.array([1, 0, 0, 0, 1, 0, 0, 1])  # documents of 4; the second's last is trained
  plan = make_plan("none", np.array([4, 4]), 8, seed=0, name="s", count=count_in(weights, np.array([4, 4])))
  assert listed(plan) == [(1, 0, 4)] and plan.stats().untrained == 1


def test_truncation_that_leaves_nothing_to_train_drops_the_document():
  lengths = np.array([12, 5])
  weights = np.zeros(17)
  weights[[10, 11, 16]] = 1
  count = count_in(weights, lengths)
  for packing in PACKINGS:
    plan = make_plan(packing, lengths, 8, seed=0, name="s", over_long="truncate_end", count=count)
    assert listed(plan) == [(1, 0, 5)]
    assert plan.stats()[-4:] == (1, 0, 4, 1)  # truncated, and then left out
    plan = make_plan(packing, lengths, 8, seed=0, name="s", over_long="truncate_start", count=count)
    assert trained(all_pieces(plan)) == [(0, t) for t in range(5, 12)] + [(1, t) for t in range(1, 5)]
  with pytest.raises(DataError, match="source 's': nothing is left of its 1 documents: .* 1 are truncated"):
    make_plan("best_fit", lengths[:1], 8, seed=0, name="s", over_long="truncate_end", count=count)


def test_concat_leaves_out_documents_without_a_trained_token_and_cuts_nothing_else_out():
  lengths = np.array([5, 6, 7])
  weights = np.repeat([0.0, 0.5, 0.0], lengths)
  weights[-1] = 1
  plan = make_plan("concat", lengths, 4, seed=0, name="s", count=count_in(weights, lengths))
  assert trained(all_pieces(plan)) == [(1, t) for t in range(1, 6)] + [(2, t) for t in range(1, 7)]
  assert plan.stats().untrained == 1 and plan.stats().trained == 6
  with pytest.raises(DataError, match="nothing is left of its 1 documents"):
    make_plan("concat", lengths[:1], 4, seed=0, name="s", count=count_in(weights, lengths))


@pytest.mark.parametrize("over_long", ["truncate_end", "truncate_start", "drop"])
def test_too_large_a_share_of_long_documents_is_an_error_that_says_what_would_do(over_long):
  lengths = np.array([5, 20, 9, 8, 30, 8, 8, 8, 12, 8])  # 4 of 10 are too long

  def plan(seq_len, share):
    return make_plan("best_fit", lengths, seq_len, seed=0, name="s", over_long=over_long, max_over_long=share)

  with pytest.raises(DataError) as error:
    plan(8, 0.25)
  said = str(error.value)
  assert "source 's': 4 of 10 documents (40.0%) are longer than seq_len=8 (the longest: 30 tokens)" in said
  assert "input.max_over_long allows 25.0% of them. Set seq_len=12 or more" in said
  assert plan(12, 0.25).stats().lost and plan(8, 0.4).stats().lost
  with pytest.raises(DataError, match="Set seq_len=30 or more"):
    plan(8, 0.0)


def test_long_documents_can_be_refused_or_cut_whatever_their_share():
  with pytest.raises(DataError, match=r"2 of 5 .* they are refused. Set seq_len=20 or more, another .*\(split, trunc"):
    make_plan("none", LONG, 8, seed=0, name="s", over_long="error", max_over_long=1.0)
  assert make_plan("none", LONG, 20, seed=0, name="s", over_long="error", max_over_long=0.0).num_rows == 5
  assert make_plan("none", LONG, 8, seed=0, name="s", over_long="split", max_over_long=0.0).stats().lost == 0
  with pytest.raises(DataError, match="nothing is left of its 2 documents: 2 are too long for seq_len=8 and dropped"):
    make_plan("none", LONG[2:4], 8, seed=0, name="s", over_long="drop")


def test_bad_requests():
  with pytest.raises(ConfigError, match="seq_len=1: a row needs at least 2 tokens"):
    make_plan("concat", np.array([3]), 1, seed=0, name="s")
