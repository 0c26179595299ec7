"""Rows and pages as the host knows them."""

import numpy as np

from models.attention.pages import PAGE
from trainer.generate.slots import Pages, Rows, Texts


def test_a_page_is_of_one_row_and_keeps_its_text_when_rows_are_chosen_anew():
  """Rows begin, grow, end and become fewer at random; what each page holds is moved as the device moves it."""
  rng = np.random.default_rng(0)
  rows = Pages(8)
  tokens, held = [0] * 8, {}  # of each row; page: (row's name, its place there)
  names, next_name, sizes = list(range(8)), 8, set()
  for _ in range(400):
    row = int(rng.integers(len(tokens)))
    if rng.random() < 0.25:
      rows.take_back(row)
      held = {page: what for page, what in held.items() if what[0] != names[row]}
      tokens[row], names[row], next_name = 0, next_name, next_name + 1
    else:
      tokens[row] += int(rng.integers(1, 3 * PAGE))
      rows.give(row, tokens[row])
    if rng.random() < 0.05 and len(tokens) > 2:
      kept = [*rng.permutation(len(tokens))[:len(tokens) - 1].tolist()]
      old = rows.gathered(kept)
      held = {new: held[page] for new, page in enumerate(old.tolist()) if page in held}
      tokens, names = [tokens[row] for row in kept], [names[row] for row in kept]
      assert len(old) == rows.size
    table = rows.table(PAGE * 400)
    sizes.add(rows.size)
    for row, name in enumerate(names):
      mine = [page for page in table.pages_BxJ[row].tolist() if page < rows.size]
      assert len(mine) == -(-tokens[row] // PAGE)
      for place, page in enumerate(mine):
        assert held.setdefault(page, (name, place)) == (name, place)
        assert (table.owners_Q[page], table.firsts_Q[page]) == (row, place * PAGE)
    assert (table.owners_Q < len(tokens)).sum() == sum(-(-n // PAGE) for n in tokens)
  assert len(sizes) > 3


def test_half_of_the_pages_that_are_not_needed_are_wasteful():
  rows = Pages(16)
  rows.give(0, 40 * PAGE)
  assert rows.size == 48 and not rows.wasteful()
  rows.take_back(0)
  rows.give(1, 20 * PAGE)
  assert rows.wasteful() and rows.size == 48
  assert len(rows.gathered(range(16))) == rows.size == 24


def test_a_text_that_has_ended_leaves_its_pages_to_others():
  prompt = np.ones(300, np.int32)
  rows = Rows(8, 8, Texts([prompt], [], [range(3)], [100], [0], [0], [None], [False]), 4, True)

  def held():
    return [(rows.table.owners_Q == row).sum() for row in range(3)]

  rows.begin(0, (0, 0))
  assert held() == [5, 0, 0]  # for 304 tokens
  rows.begin(1, (0, 1))
  rows.end(0)
  assert held() == [0, 5, 0] and rows.busy() == [1]
  rows.begin(2, (0, 2))
  assert held() == [0, 5, 5] and rows.sizes.pages == 16
