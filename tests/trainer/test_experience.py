"""Batches from experience: every sequence once, whole, where its unit is; few shapes; nothing lost on the way."""

import numpy as np
import pytest

from trainer.experience import Experience, Sequence, collect, make_batch
from trainer.image_tokens import Layout

LENGTHS = [(5,), (9,), (3, 4), (2,), (7, 6), (4,), (13,)]


def sequence(size, start, prompt=1):
  ids = np.arange(start, start + size, dtype=np.int32)
  weights = np.where(np.arange(size) < prompt, 0, 1).astype(np.float32)
  return Sequence(ids, weights, -0.01 * ids.astype(np.float32) * weights, prompt, "stop")


def units():
  starts = iter(range(1000, 100_000, 1000))
  return [[(sequence(size, next(starts)), float(size) / 7, number % 2) for size in sizes]
          for number, sizes in enumerate(LENGTHS)]


def batch_of(which, keys=("advantages", "behavior_logprobs"), **changed):
  options = dict(seq_len=16, pad_id=0, row_multiple=1) | changed
  return make_batch(collect(units()), np.asarray(which, np.int64), keys=keys, **options)


def found(batch):
  """{first token: (row, all that the batch says of the sequence)}."""
  result = {}
  for row, segments in enumerate(batch["segment_ids"]):
    for segment in range(1, segments.max() + 1):
      at = np.flatnonzero(segments == segment)
      assert np.all(np.diff(at) == 1)
      part = {key: batch[key][row, at] for key in ("tokens", "positions", "loss_weights", "behavior_logprobs")}
      marks = (batch[key][row, segment - 1] for key in ("sequences", "advantages"))
      result[int(part["tokens"][0])] = row, part, *marks
  return result


def test_every_sequence_is_there_once_with_all_that_belongs_to_it():
  which = [6, 2, 0, 4]
  batch = batch_of(which)
  there = found(batch)
  members = [member for unit in which for member in units()[unit]]
  assert len(there) == len(members) == batch["sequences"].sum()
  for given, advantage, _ in members:
    row, part, exists, worth = there[int(given.ids[0])]
    np.testing.assert_array_equal(part["tokens"], given.ids)
    np.testing.assert_array_equal(part["positions"], np.arange(len(given.ids)))
    np.testing.assert_array_equal(part["loss_weights"], given.weights)
    np.testing.assert_array_equal(part["behavior_logprobs"], given.logprobs)
    assert exists == 1 and worth == np.float32(advantage)
  assert batch["loss_weights"].sum() == sum(given.weights.sum() for given, _, _ in members)


def test_a_unit_shares_a_row_side_by_side():
  there = found(batch_of(range(len(LENGTHS))))
  for unit in units():
    rows = {there[int(given.ids[0])][0] for given, _, _ in unit}
    assert len(rows) == 1
  batch = batch_of([2, 4])
  for row in range(2):
    sides = [batch["tokens"][row, batch["segment_ids"][row] == segment][0] for segment in (1, 2)]
    assert sides[1] - sides[0] == 1000  # the two of a preference, the first one first


def test_rows_are_few_and_of_few_numbers():
  assert batch_of(range(len(LENGTHS)))["tokens"].shape == (4, 16)  # 53 tokens; fewer rows cannot hold them
  assert batch_of(range(len(LENGTHS)), row_multiple=3)["tokens"].shape == (6, 16)
  assert batch_of([0])["tokens"].shape == (1, 16)
  assert batch_of([0], row_multiple=8)["sequences"].shape == (8, 8)


def test_nothing_to_train_is_a_batch_of_padding():
  batch = make_batch(collect([]), np.zeros(0, np.int64), seq_len=16, pad_id=3, row_multiple=4, keys=("advantages",))
  assert batch["tokens"].shape == (4, 16) and np.all(batch["tokens"] == 3)
  assert not batch["segment_ids"].any() and not batch["sequences"].any() and "behavior_logprobs" not in batch


def test_a_unit_longer_than_a_row_is_refused():
  with pytest.raises(ValueError, match="a unit of 13 tokens does not fit into a row of 12"):
    batch_of([6], seq_len=12)


def test_the_arrays_are_all_there_is():
  experience = collect(units())
  again = Experience(**{name: np.array(part) for name, part in experience._asdict().items()})
  assert again.num_units == len(LENGTHS)
  for key, part in batch_of([1, 4, 5]).items():
    np.testing.assert_array_equal(
        part, make_batch(again, np.array([1, 4, 5]), seq_len=16, pad_id=0, row_multiple=1,
                         keys=("advantages", "behavior_logprobs"))[key])


LAYOUT = Layout(image_token=9, tokens_per_image=2, image_size=1, attention="prefix")


def seen(number, images, prompt, size):
  """A sequence about the images of prompt `number`, whose sampled tokens hold the placeholder's id too."""
  ids = np.array([number, *[9, 9] * images, *[5] * prompt, *[9] * (size - 1 - 2 * images - prompt)], np.int32)
  weights = (np.arange(size) >= 1 + 2 * images + prompt).astype(np.float32)
  return Sequence(ids, weights, np.zeros(size, np.float32), int((weights == 0).sum()), "stop", number)


def pictures(asked):
  """Gives the images of prompt n: of the colours 10 n, 10 n + 1, …, as many as it has."""
  def images(number):
    asked.append(number)
    return [np.full((1, 1, 3), 10 * number + i, np.uint8) for i in range({1: 1, 2: 0, 3: 2}[number])]
  return images


def test_every_sequence_sees_its_own_images_in_both_directions():
  given = [seen(1, 1, 1, 6), seen(2, 0, 2, 5), seen(3, 2, 1, 8), seen(1, 1, 1, 5), seen(3, 2, 1, 7)]
  asked = []
  batch = make_batch(collect([[(s, 1.0, 0)] for s in given]), np.arange(5), seq_len=16, pad_id=0, row_multiple=1,
                     layout=LAYOUT, images=pictures(asked))
  assert sorted(asked) == [1, 2, 3]  # once each, for all completions of a prompt
  found = []
  for row, segments in enumerate(batch["segment_ids"]):
    for segment in range(1, segments.max() + 1):
      at = np.flatnonzero(segments == segment)
      tokens, index, blocks = (batch[key][row, at] for key in ("tokens", "image_index", "block_ids"))
      s = next(s for s in given if s.ids.tolist() == tokens.tolist())
      found.append(tokens.tolist())
      held = (tokens == 9) & (np.arange(len(at)) < s.prompt_length)
      np.testing.assert_array_equal(index > 0, held)
      colours = batch["images"][row, (index[held] - 1) // 2, 0, 0, 0]
      assert colours.tolist() == [10 * s.number + i for i in range(held.sum() // 2) for _ in range(2)]
      assert np.diff(index[held]).tolist() == [1] * max(held.sum() - 1, 0)
      np.testing.assert_array_equal(blocks > 0, np.arange(len(at)) < s.prompt_length)
      assert len(set(blocks[blocks > 0])) == 1
  assert sorted(found) == sorted(s.ids.tolist() for s in given)
  assert batch["images"].shape[1] in (2, 4) and batch["images"].dtype == np.uint8


def test_experience_of_images_is_no_larger_than_of_texts():
  experience = collect([[(seen(3, 2, 1, 8), 1.0, 0)]])
  assert experience.numbers.tolist() == [3] and experience.prompt_lengths.tolist() == [6]
  assert sum(part.nbytes for part in experience) < 200
  again = Experience(**experience._asdict())
  options = dict(seq_len=16, pad_id=0, row_multiple=1, layout=LAYOUT, images=pictures([]))
  for key, part in make_batch(again, np.arange(1), **options).items():
    np.testing.assert_array_equal(part, make_batch(experience, np.arange(1), **options)[key])
