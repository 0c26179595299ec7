"""Batches from experience: every sequence once, whole, where its unit is; few shapes; nothing lost on the way."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from input_pipeline.examples.roles import CHOSEN, COMPLETION, REJECTED
from tests.models.common import FAMILIES, VOCAB, make, random_params
from trainer.generate.image_tokens import Layout
from trainer.modes.fixture import completions_apart
from trainer.rollouts import experience as experience_lib
from trainer.rollouts.experience import Experience, RowFormat, Trajectory, collect, make_batch
from trainer.strategies import sequences

LENGTHS = [(5,), (9,), (3, 4), (2,), (7, 6), (4,), (13,)]


def sequence(size, start, prompt=1):
  ids = np.arange(start, start + size, dtype=np.int32)
  weights = np.where(np.arange(size) < prompt, 0, 1).astype(np.float32)
  return Trajectory(ids, weights, -0.01 * ids.astype(np.float32) * weights, prompt, "stop")


def units():
  starts = iter(range(1000, 100_000, 1000))
  return [[(sequence(size, next(starts)), float(size) / 7, number % 2) for size in sizes]
          for number, sizes in enumerate(LENGTHS)]


def batch_of(which, keys=("advantages", "behavior_logprobs"), **changed):
  form = RowFormat(**dict(seq_len=16, pad_id=0, row_multiple=1) | changed)
  return make_batch(collect(units()), np.asarray(which, np.int64), form, keys=keys)


def found(batch):
  """{first token: (row, all that the batch says of the sequence)}."""
  result = {}
  for row, segments in enumerate(batch["segment_ids"]):
    for segment in range(1, segments.max() + 1):
      at = np.flatnonzero(segments == segment)
      assert np.all(np.diff(at) == 1)
      part = {key: batch[key][row, at] for key in ("tokens", "positions", "loss_weights", "behavior_logprobs")}
      marks = (batch[key][row, segment - 1] for key in ("segment_roles", "advantages"))
      result[int(part["tokens"][0])] = row, part, *marks
  return result


def test_every_sequence_is_there_once_with_all_that_belongs_to_it():
  which = [6, 2, 0, 4]
  batch = batch_of(which)
  there = found(batch)
  members = [member for unit in which for member in units()[unit]]
  assert len(there) == len(members) == (batch["segment_roles"] > 0).sum()
  roles = [role for unit in which for role in ((COMPLETION,), (CHOSEN, REJECTED))[len(units()[unit]) - 1]]
  for (given, advantage, _), role in zip(members, roles, strict=True):
    row, part, is_one, worth = there[int(given.ids[0])]
    np.testing.assert_array_equal(part["tokens"], given.ids)
    np.testing.assert_array_equal(part["positions"], np.arange(len(given.ids)))
    np.testing.assert_array_equal(part["loss_weights"], given.weights)
    np.testing.assert_array_equal(part["behavior_logprobs"], given.logprobs)
    assert is_one == role and worth == np.float32(advantage)
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
  assert batch_of([0], row_multiple=8)["segment_roles"].shape == (8, 8)


@pytest.mark.parametrize("share", [False, True])
def test_where_teachers_are_of_sources_a_row_is_of_one(share):
  """Eight short sequences, of two sources by turns, would fit into two rows in any order."""
  given = [(sequence(4, 100 * number, prompt=2), 1.0, number % 2) for number in range(8)]
  together = {}
  for by_source in (False, True):
    form = RowFormat(16, 0, 1, share_prompts=share, by_source=by_source)
    batch = make_batch(collect([[one] for one in given]), np.arange(8), form, keys=("advantages",))
    rows = [{int(token) // 100 % 2 for token in row[segments > 0]}
            for row, segments in zip(batch["tokens"], batch["segment_ids"], strict=True)]
    together[by_source] = max(map(len, rows))
    if by_source:
      assert [{int(at)} for at in batch["source_ids"]] == rows
  assert together == {False: 2, True: 1}


def test_nothing_to_train_is_a_batch_of_padding():
  batch = make_batch(collect([]), np.zeros(0, np.int64), RowFormat(16, 3, 4), keys=("advantages",))
  assert batch["tokens"].shape == (4, 16) and np.all(batch["tokens"] == 3)
  assert not batch["segment_ids"].any() and not batch["segment_roles"].any() and "behavior_logprobs" not in batch


def test_a_unit_longer_than_a_row_is_refused():
  with pytest.raises(ValueError, match="a unit of 13 tokens does not fit into a row of 12"):
    batch_of([6], seq_len=12)
  assert (batch_of([6], seq_len=13)["segment_ids"] > 0).sum(axis=1).max() == 13


def test_the_arrays_are_all_there_is():
  experience = collect(units())
  again = Experience(**{name: np.array(part) for name, part in experience.arrays().items()})
  assert again.num_units == len(LENGTHS)
  for key, part in batch_of([1, 4, 5]).items():
    np.testing.assert_array_equal(
        part, make_batch(again, np.array([1, 4, 5]), RowFormat(16, 0, 1),
                         keys=("advantages", "behavior_logprobs"))[key])


def of_group(prompt, completions):
  """(unit, sequence) of completions of these lengths, all of one prompt."""
  ids = np.arange(100 * prompt, 100 * prompt + prompt, dtype=np.int32)
  rng = np.random.default_rng(prompt)
  return [Trajectory(np.concatenate([ids, rng.integers(1, 50, n).astype(np.int32)]), np.repeat([0.0, 1.0], [prompt, n]),
                   np.repeat([0.0, -0.5], [prompt, n]), prompt, "stop") for n in completions]


# Prompts of 9, 1, 6 and 3 tokens; the last two sequences are a unit, as those of a preference are.
GROUPS = [[s] for s in [*of_group(9, (4, 2, 3, 5)), *of_group(1, (7, 3)), *of_group(6, (2, 2, 9))]] + [
    of_group(3, (4, 5))]


def shared(share=True, seq_len=24, groups=GROUPS):
  units = [[(sequence, float(number) + 1 + i / 2, number % 2) for i, sequence in enumerate(unit)]
           for number, unit in enumerate(groups)]
  return make_batch(collect(units), np.arange(len(units)), RowFormat(seq_len, 0, 1, share_prompts=share),
                    keys=("advantages", "behavior_logprobs"))


def texts(batch):
  """What the batch says of each sequence: {(tokens, advantage): (positions, weights, log-probs)}, prompts included."""
  result = {}
  for row, number in np.argwhere(batch["segment_roles"] > 0):
    mine = batch["segment_ids"][row] == number + 1
    of_prompt = batch["prompt_ids"][row][mine] if "prompt_ids" in batch else np.zeros(mine.sum(), np.int32)
    assert len(set(of_prompt.tolist())) == 1
    places = np.concatenate([np.flatnonzero((batch["segment_ids"][row] == of_prompt[0]) & (of_prompt[0] > 0)),
                             np.flatnonzero(mine)])
    assert np.all(np.diff(places) > 0)  # the prompt before its completions
    ids, positions, weights, logprobs = (batch[key][row][places].tolist() for key in (
        "tokens", "positions", "loss_weights", "behavior_logprobs"))
    if of_prompt[0]:  # the prompt's last token stands with the completion
      assert positions == list(range(len(places)))
    result[tuple(ids), float(batch["advantages"][row, number])] = positions, weights, logprobs
  return result


def test_completions_that_share_a_prompt_are_the_same_sequences():
  batch, apart = shared(), shared(False)
  assert texts(batch) == texts(apart) and len(texts(batch)) == 11
  assert "prompt_ids" not in apart and batch["loss_weights"].sum() == apart["loss_weights"].sum()
  assert len(batch["tokens"]) < len(apart["tokens"])
  for row, ids in enumerate(batch["segment_ids"]):
    of_prompts = set(ids[ids > batch["segment_roles"].shape[1]].tolist())
    assert of_prompts == set(batch["prompt_ids"][row][batch["prompt_ids"][row] > 0].tolist())
    for number in of_prompts:
      assert not batch["loss_weights"][row][ids == number].any()
      assert len(np.unique(ids[batch["prompt_ids"][row] == number])) > 1  # nothing to share for one alone


def test_sharing_never_takes_more_rows():
  rng = np.random.default_rng(0)
  for trial in range(30):
    groups = [[s] for number in range(1, 6) for s in of_group(number * 3, rng.integers(1, 12, rng.integers(1, 6)))]
    batch, apart = shared(groups=groups, seq_len=30), shared(False, groups=groups, seq_len=30)
    assert texts(batch) == texts(apart), trial
    assert len(batch["tokens"]) <= len(apart["tokens"])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_shared_prompts_change_neither_log_probs_nor_gradients(name):
  """Of completions with weights of their own, against each in a row of its own."""
  model = make(**FAMILIES[name])
  params, whole = random_params(model), shared(groups=[[s] for s in of_group(7, (4, 2, 6)) + of_group(4, (5, 3))])
  whole["tokens"] %= VOCAB
  alone = completions_apart(whole)
  assert "prompt_ids" not in alone and len(alone["tokens"]) == 5 and whole["prompt_ids"].any()

  @jax.jit
  def total(params, batch):
    logps = sequences.segment_sums(sequences.token_logprobs(model, params, batch), batch)
    return jnp.sum(logps * batch["advantages"]), logps

  (found, gradient), (expected, plain) = (jax.value_and_grad(total, has_aux=True)(params, batch)
                                          for batch in (whole, alone))
  by_worth = [dict(zip(np.asarray(batch["advantages"])[mask := batch["segment_roles"] > 0].tolist(),
                       np.asarray(logps)[mask].tolist(), strict=True))
              for batch, (_, logps) in ((whole, found), (alone, expected))]
  assert by_worth[0] == pytest.approx(by_worth[1], rel=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), gradient, plain)



LAYOUT = Layout(image_token=9, tokens_per_image=2, image_size=1, attention="prefix")


def seen(number, images, prompt, size):
  """A sequence about the images of prompt `number`, whose sampled tokens hold the placeholder's id too."""
  ids = np.array([number, *[9, 9] * images, *[5] * prompt, *[9] * (size - 1 - 2 * images - prompt)], np.int32)
  weights = (np.arange(size) >= 1 + 2 * images + prompt).astype(np.float32)
  return Trajectory(ids, weights, np.zeros(size, np.float32), int((weights == 0).sum()), "stop", number)


# Of prompt n: of the colours 10 n, 10 n + 1, …, as many as it has.
PICTURES = {number: [np.full((1, 1, 3), 10 * number + i, np.uint8) for i in range(count)]
            for number, count in {1: 1, 2: 0, 3: 2}.items()}


def test_every_sequence_sees_its_own_images_in_both_directions():
  given = [seen(1, 1, 1, 6), seen(2, 0, 2, 5), seen(3, 2, 1, 8), seen(1, 1, 1, 5), seen(3, 2, 1, 7)]
  batch = make_batch(collect([[(s, 1.0, 0)] for s in given]), np.arange(5), RowFormat(16, 0, 1, LAYOUT),
                     images=PICTURES)
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
  assert sum(part.nbytes for part in experience.arrays().values()) < 200
  again = Experience(**experience._asdict())
  form = RowFormat(16, 0, 1, LAYOUT)
  for key, part in make_batch(again, np.arange(1), form, images=PICTURES).items():
    np.testing.assert_array_equal(part, make_batch(experience, np.arange(1), form, images=PICTURES)[key])


def test_what_an_environment_showed_belongs_to_its_trajectory():
  """Also after a checkpoint, which has arrays alone."""
  shown = [(b"first", b""), (), (b"\x00\xff", b"last")]
  members = [(dataclasses.replace(sequence(3, 10 * n), images=images), 0.5, 0) for n, images in enumerate(shown)]
  made = collect([members[:1], members[1:]])
  expected = [(0, b"first"), (0, b""), (2, b"\x00\xff"), (2, b"last")]
  assert made.images == expected and Experience(**made.arrays()).images == expected
  assert made.image_sizes.tolist() == [5, 0, 2, 4] and made.image_owners.tolist() == [0, 0, 2, 2]
  assert collect(units()).images == [] and "image_bytes" not in collect(units()).arrays()


def test_experience_is_column_by_column_what_was_collected():
  made = collect(units())
  members = [(unit, *member) for unit, those in enumerate(units()) for member in those]
  assert made.units.tolist() == [unit for unit, *_ in members] and made.num_units == len(LENGTHS)
  assert made.lengths.tolist() == [len(one.ids) for _, one, _, _ in members]
  assert made.sources.tolist() == [number for *_, number in members]
  assert made.prompt_lengths.tolist() == [1] * len(members) and made.numbers.tolist() == [-1] * len(members)
  np.testing.assert_array_equal(made.tokens, np.concatenate([one.ids for _, one, _, _ in members]))
  nothing = collect([])
  assert nothing.num_units == 0 and nothing.arrays() == {} and nothing.tokens.dtype == np.int32
  assert made.experts is None


def test_experts_are_known_only_if_they_are_of_all():
  known = [(dataclasses.replace(sequence(2, n), experts=np.full((2, 1, 1), n, np.int16)), 0.0, 0) for n in (3, 4)]
  assert collect([known]).experts.reshape(-1).tolist() == [3, 3, 4, 4]
  assert collect([known, [(sequence(2, 5), 0.0, 0)]]).experts is None


def test_a_unit_that_fits_no_row_and_no_unit_at_all():
  made = collect([[(sequence(9, 0), 0.0, 0), (sequence(8, 100), 0.0, 0)]])
  assert experience_lib._whole_rows(made, [[0, 1]], 17) == [[0, 1]] and experience_lib._whole_rows(made, [], 16) == []
  with pytest.raises(ValueError, match="^a unit of 17 tokens does not fit into a row of 16$"):
    experience_lib._whole_rows(made, [[0, 1]], 16)
