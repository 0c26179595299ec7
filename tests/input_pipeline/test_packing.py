"""Each token but a document's first is trained exactly once an epoch; orders, accounting, best fit, speed."""

import numpy as np
import pytest

from input_pipeline.packing import PACKINGS, best_fit_decreasing, make_plan, permutation
from trainer.config import ConfigError

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


def test_bad_requests():
  with pytest.raises(ConfigError, match="packing 'tight'; allowed: 'concat', 'best_fit', 'none'"):
    make_plan("tight", np.array([3]), 8, seed=0, name="s")
  with pytest.raises(ConfigError, match="seq_len=1: a row needs at least 2 tokens"):
    make_plan("concat", np.array([3]), 1, seed=0, name="s")
