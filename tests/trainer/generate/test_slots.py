"""Rows and pages as the host knows them."""

import numpy as np
import pytest

from models.attention.pages import PAGE
from trainer.generate.image_tokens import PromptImages
from trainer.generate.kept import KeptText
from trainer.generate.slots import Pages, Prefilled, Rows, Texts, Waiting


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
  rows.give(2, 28 * PAGE)  # all that were given back are there again
  assert rows.size == 48 and not rows.wasteful()
  rows.take_back(2)
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


def texts(lengths=(3, 5), samples=2, limits=10, begun=0, seeds=0, kept=None, shown=None):
  """Prompts of so many tokens, each with as many completions; text n has the ids n + 1."""
  count = len(lengths)
  return Texts([np.full(length, n + 1, np.int32) for n, length in enumerate(lengths)],
               list(shown or [PromptImages()] * count), [range(samples)] * count, [limits] * count, [seeds] * count,
               [begun] * count, list(kept or [None] * count), [False] * count)


def rows_of(given, count=8, chunk=4, paged=False):
  return Rows(count, 1, given, chunk, paged)


def test_the_longest_text_counts_what_was_begun_once():
  """A prompt of 300 of which 20 are of the completion, up to 100 tokens in all of it: 380."""
  given = texts((300, 10), begun=20, limits=100)
  assert given.lengths == [280, -10] and given.longest == 380
  rows = rows_of(given)
  rows.begin(2, (0, 1))
  assert rows.counts[2] == 20 and rows.owners[2] == (0, 1) and rows.busy() == [2]


def test_a_cache_has_room_for_the_texts_so_far_and_a_chunk_but_for_no_more_than_the_longest():
  """Of 150 tokens, in steps of 16 × 1, 2, 3, 4, 6, …; the longest of all may have 400, one that is added has 20."""
  rows = rows_of(texts((150,), limits=250))
  assert rows.sizes == (8, 192, None)
  rows.add(texts((10,), limits=10))
  rows.begin(0, (0, 0))
  found = []
  for count in (38, 39, 230, 240, 20):
    rows.counts[0] = count
    rows.fit(False)
    found.append(rows.sizes.length)
  assert found == [192, 256, 384, 512, 512]
  assert rows_of(texts((10,), limits=10)).sizes.length == 32  # the smallest that is ever needed
  assert rows_of(texts((10,), limits=500)).sizes.length == 128  # of those that may grow the smallest


@pytest.mark.parametrize("waiting, most, expected", [(3, 64, 8), (7, 64, 16), (60, 64, 64), (60, 20, 20), (0, 64, 8)])
def test_rows_grow_for_what_waits_up_to_the_most(waiting, most, expected):
  rows = rows_of(texts((3,) * 8, samples=1))
  for row in range(4):
    rows.begin(row, (row, 0))
  rows.grow(waiting, most)
  assert len(rows.owners) == len(rows.counts) == expected
  assert rows.busy() == [0, 1, 2, 3]


@pytest.mark.parametrize("count, waiting, coming, kept, enough", [
    (16, True, 0, 16, 16 - 3 + 2), (4, True, 0, 4, 4 - 3 + 1),  # an eighth of the rows, or one
    (16, False, 0, 4, 4),  # three texts: four rows, the fewest; none of which has a text
    (16, False, 5, 8, 8 - 3 + 1), (6, False, 0, 4, 4)])
def test_rows_become_fewer_when_nothing_waits_and_the_host_looks_when_enough_are_free(
    count, waiting, coming, kept, enough):
  rows = rows_of(texts((3,) * 3, samples=1), count)
  for n, row in enumerate((1, 2, count - 1)):
    rows.begin(row, (n, 0))
    rows.counts[row] = 10 + n
  chosen, pages, found = rows.fit(waiting, coming)
  assert pages is None and found == enough and len(chosen) == kept == len(rows.owners)
  held = {unit: int(n) for unit, n in zip(rows.owners, rows.counts, strict=True) if unit}
  assert held == {(0, 0): 10, (1, 0): 11, (2, 0): 12}
  old = [1, 2, count - 1]
  for row, unit in enumerate(rows.owners):
    assert (int(chosen[row]) in old) == (unit is not None)


def test_half_of_the_rows_are_to_be_free_where_they_can_become_fewer():
  rows = rows_of(texts((3,) * 6, samples=1), 8)
  for row in range(6):
    rows.begin(row, (row, 0))
  assert rows.fit(False)[2] == 4


def test_texts_of_another_request_go_on_in_their_rows_and_the_others_leave_theirs():
  rows = rows_of(texts((3, 3, 3), samples=1))
  for row in range(3):
    rows.begin(row, (row, 0))
    rows.counts[row] = row + 5
  rows.go_on(texts((3, 4), samples=1, begun=2), {1: (0, 0)})
  assert rows.busy() == [1] and rows.owners[1] == (0, 0) and rows.counts[1] == 6


def order_of(waiting, count=99):
  waiting.to_prefill(count, 99)
  return waiting.take(count)


def test_the_longest_prompts_come_first_and_before_them_those_that_go_on():
  kept = KeptText(np.full(2, 2, np.int32), b"", None, 8)
  assert [prompt for prompt, _ in order_of(Waiting(texts((3, 9, 5), samples=1)))] == [1, 2, 0]
  assert [prompt for prompt, _ in order_of(Waiting(texts((3, 9, 5), samples=1), in_order=True))] == [0, 1, 2]
  waiting = Waiting(texts((3, 9, 5), samples=1, kept=[kept, None, None]))
  assert order_of(waiting) == [(0, 0)] and waiting.reused == [2, 0, 0]  # what goes on is run by itself
  assert order_of(waiting) == [(1, 0), (2, 0)] and len(waiting) == 0


def test_what_comes_later_waits_behind_what_waits():
  waiting = Waiting(texts((3,), samples=2))
  waiting.add(texts((9, 1), samples=1))
  assert len(waiting) == 4 and order_of(waiting) == [(0, 0), (0, 1), (1, 0), (2, 0)]


def test_all_completions_of_prompts_that_were_run_are_ready_and_no_others():
  waiting = Waiting(texts((5, 4, 3), samples=3))
  assert waiting.to_prefill(4, 99) == [0, 1] and waiting.next_length() == 5
  waiting.prefilled = Prefilled([0, 1])
  assert waiting.take(4) == [(0, 0), (0, 1), (0, 2), (1, 0)] and waiting.prefilled.prompts
  assert waiting.take(9) == [(1, 1), (1, 2)] and not waiting.prefilled.prompts
  assert waiting.next_length() == waiting.next_slots() == 3 and len(waiting) == 3
  assert waiting.to_prefill(9, 1) == [2]
  assert Waiting(texts((5, 4, 3), samples=1)).to_prefill(9, 2) == [0, 1]


def test_prompts_are_cut_into_chunks_unless_tokens_of_theirs_see_one_another():
  """Of 9 tokens and chunks of 4; where 7 were kept the two that are left are run behind them."""
  blocks = PromptImages(block_ids=np.array([0, 1, 1, 0, 0, 0, 0, 0, 0], np.int32))
  kept = KeptText(np.full(7, 1, np.int32), b"", None, 8)

  def waiting(shown, kept=None, chunk=4):
    return Waiting(texts((9,), shown=[shown], kept=[kept]), chunk=chunk)

  assert [waiting(PromptImages()).piece(0), waiting(blocks).piece(0), waiting(PromptImages(), chunk=0).piece(0)] == [
      4, 9, 9]
  assert [waiting(blocks, kept).piece(0), waiting(PromptImages(), kept).piece(0)] == [2, 2]
  assert [waiting(PromptImages()).in_pieces(0), waiting(blocks).in_pieces(0), waiting(blocks, kept).in_pieces(0)] == [
      True, False, True]
  assert [waiting(blocks, kept).kept_length(0), waiting(blocks).kept_length(0)] == [7, 0]


def key(prompt=0, sample=0, **changed):
  return Waiting(texts(**changed)).key(prompt, sample).tobytes()


def test_draws_depend_on_seed_prompt_images_and_sample_and_on_nothing_else():
  picture, other = np.zeros((2, 2, 3), np.uint8), np.ones((2, 2, 3), np.uint8)
  same = [key(), key(limits=3), key(samples=5), key(kept=[KeptText(np.ones(2, np.int32), b"", None, 8), None])]
  assert len(set(same)) == 1 and len(same[0]) == 8
  # The first three of five ids are the prompt, the others were drawn before: as of a prompt of three.
  assert key(lengths=(5, 5), begun=2) == key(lengths=(3, 5))
  others = [key(seeds=1), key(sample=1), key(lengths=(4, 5)), key(prompt=1), key(lengths=(5, 5)),
            *(key(shown=[PromptImages((image,)), PromptImages()]) for image in (picture, other)),
            key(shown=[PromptImages((picture,), image_grid=np.ones((1, 6), np.int32)), PromptImages()])]
  assert len({same[0], *others}) == 1 + len(others)


def test_a_completion_that_was_held_is_known_by_its_draws_its_length_and_its_limit():
  before = Waiting(texts((4, 6), samples=2))
  names = {before.name(0, 1, 3): 5, before.name(1, 0, 2): 6}
  # Prompt 0 has come back with 3 tokens that were drawn, prompt 1 with 1, which is not where its row is.
  again = Waiting(texts((7, 7), samples=2)._replace(
      prompts=[np.array([1] * 4 + [8, 8, 8], np.int32), np.array([2] * 6 + [8], np.int32)], begun=[3, 1]))
  assert again.known(names) == {5: (0, 1)} and len(again) == 3
  other = Waiting(texts((7,), samples=2, limits=11)._replace(
      prompts=[np.array([1] * 4 + [8, 8, 8], np.int32)], begun=[3]))
  assert other.known(names) == {} and len(other) == 2
