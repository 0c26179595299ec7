"""Groups of earlier rollouts that are trained on again: which, with what they were sampled with; from checkpoints."""

import itertools

import numpy as np
import pytest

from tests.trainer.rollout_runs import STOP, assert_same_state, config, rows_of, table, write_prompts
from trainer import train
from trainer.rollouts import replay
from trainer.rollouts.experience import Trajectory


def completion(number, sample, advantage=1.0, **more):
  """A completion of prompt `number`, of `sample` + 1 tokens."""
  ids = np.array([number, *range(50, 51 + sample)], np.int32)
  weights = np.array([0, *[1] * (sample + 1)], np.float32)
  return Trajectory(ids, weights, -weights * (number + 1), 1, "stop", number, **more), advantage, number % 2


def rollout(number, *advantages):
  """Units of a rollout whose groups have these advantages, each of two completions."""
  return [[completion(10 * number + place, sample, sign * advantage)]
          for place, advantage in enumerate(advantages) for sample, sign in enumerate((1, -1))]


def test_what_had_something_to_teach_is_remembered_for_so_many_rollouts():
  again, remembered = replay.Replay(2, 2, 0), []
  for number, advantages, expected in ((0, (1.0, 0.0, 0.5), [0, 2]), (1, (2.0,), [0, 2, 10]), (2, (0.0, 3.0), [10, 21]),
                                       (3, (0.0,), [21]), (4, (0.0,), [])):
    remembered = again.after(remembered, number, 7 * number, rollout(number, *advantages))
    assert [group.members[0][0].number for group in remembered] == expected
    assert all((group.rollout, group.version) == (n // 10, 7 * (n // 10))
               for group, n in zip(remembered, expected, strict=True))
    assert {tuple(a for _, a, _ in group.members) for group in remembered} <= {(1, -1), (0.5, -0.5), (2, -2), (3, -3)}
  assert replay.Replay(0, 0, 0).after([], 0, 0, rollout(0, 1.0)) == []


def test_each_of_them_is_drawn_as_often_as_the_others_and_once_at_most():
  again, remembered = replay.Replay(2, 3, 5), replay.Replay(1, 9, 5).after([], 4, 0, rollout(4, 1.0, 1.0, 1.0))
  drawn = [[group.members[0][0].number for group in again.choose(remembered, number)] for number in range(5, 8)]
  assert drawn == [[group.members[0][0].number for group in again.choose(remembered, n)] for n in range(5, 8)]
  assert drawn != [[group.members[0][0].number for group in replay.Replay(2, 3, 6).choose(remembered, n)]
                   for n in range(5, 8)]  # another seed
  assert again.choose(remembered, 8) == []  # of more than three rollouts before
  far = replay.Replay(2, 10**6, 5)
  pairs = [tuple(sorted(group.members[0][0].number for group in far.choose(remembered, n))) for n in range(600)]
  counts = [pairs.count(pair) for pair in itertools.combinations((40, 41, 42), 2)]
  assert sum(counts) == 600 and all(abs(count - 200) < 4 * np.sqrt(600 * 2 / 9) for count in counts)
  assert len(replay.Replay(9, 10**6, 5).choose(remembered, 5)) == 3
  assert replay.units(remembered) == [[member] for group in remembered for member in group.members]
  assert replay.metrics(remembered, 6) == {"rollout/replayed_groups": 3, "rollout/replayed_staleness": 6}
  assert replay.metrics([], 6) == {}


@pytest.mark.parametrize("more", [{}, dict(experts=True), dict(images=True)], ids=str)
def test_a_checkpoint_holds_them(more):
  def extra(sample):
    experts = {"experts": np.full((sample + 2, 3, 2), sample, np.int16)} if "experts" in more else {}
    return experts | ({"images": (b"a", b"bc")[:sample]} if "images" in more else {})

  groups = [replay.Remembered(3, 5, [completion(7, sample, 0.5 - sample, **extra(sample)) for sample in range(2)]),
            replay.Remembered(4, 9, [completion(8, 1, 2.0, **extra(1))])]
  meta, arrays = replay.saved(groups, "x_")
  assert all(name.startswith("x_") and part.size for name, part in arrays.items())
  arrays["other"] = np.zeros(1)
  found = replay.restored(meta, arrays, "x_")
  assert list(arrays) == ["other"]
  assert [(group.rollout, group.version) for group in found] == [(3, 5), (4, 9)]
  for one, other in zip(found, groups, strict=True):
    for (a, *values), (b, *expected) in zip(one.members, other.members, strict=True):
      assert values == expected and (a.prompt_length, a.number, a.images) == (b.prompt_length, b.number, b.images)
      for name in ("ids", "weights", "logprobs", "experts"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
  assert replay.saved([], "x_") == ([], {}) and replay.restored([], {}, "x_") == []


# ----------------------------------------------------------------------------------------------
# Runs: three rollouts of two updates, each with two groups of the one or two before it.


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
  return write_prompts(tmp_path_factory.mktemp("prompts"))


def again(prompts, stop=None, **changed):
  c = config(prompts, total_steps=6, strategy=dict(correction="token_truncate"),
             rollout=dict(replay_groups=2, replay_window=2), ckpt_steps=1000, **changed)
  if stop is not None:
    c.callbacks.stop = dict(type=STOP, step=stop)
  return c


@pytest.fixture(scope="module")
def stopped(prompts, tmp_path_factory):
  """(the last run, its workdir, what each rollout trained on) of a run that was stopped in and after each rollout."""
  workdir, trained = tmp_path_factory.mktemp("stopped"), {}
  for step in (1, 2, 3, 5, None):
    run = train(again(prompts, stop=step), workdir)
    trained[run.data._now.number] = run.data._now.experience
  return run, workdir, trained


def test_stopped_anywhere_it_becomes_the_same_run(prompts, stopped, tmp_path):
  run = train(again(prompts), tmp_path)
  assert_same_state(run.state, stopped[0].state)
  assert rows_of(tmp_path) == rows_of(stopped[1])


def test_a_rollout_trains_on_its_own_groups_and_on_earlier_ones_as_they_were(stopped):
  """Tokens, what they were sampled with, and what they were worth."""
  run, workdir, trained = stopped
  rows = rows_of(workdir)
  assert [len(trained[number].lengths) for number in range(3)] == [16, 24, 24]
  assert "rollout/replayed_groups" not in rows[1]
  assert rows[3]["rollout/replayed_groups"] == rows[5]["rollout/replayed_groups"] == 2
  assert rows[3]["rollout/replayed_staleness"] == 2 and rows[5]["rollout/replayed_staleness"] in (2, 3, 4)

  def completions(number):
    """{(tokens, log-probs, advantage, source)} of what a rollout trained on, the last ones first sampled for others."""
    e = trained[number]
    ends = np.cumsum(e.lengths)
    return [(e.tokens[end - size:end].tobytes(), e.logprobs[end - size:end].tobytes(), float(a), int(s))
            for end, size, a, s in zip(ends, e.lengths, e.advantages, e.sources, strict=True)]

  before = set(completions(0))
  for number in (1, 2):
    own, earlier = completions(number)[:16], completions(number)[16:]
    assert set(earlier) <= before and len(set(earlier)) == 8 and not before & set(own)
    before |= set(own)
    said = [line["advantage"] for line in table(workdir, 2 * number + 1)]
    assert [a for _, _, a, _ in own] == pytest.approx(said, abs=1e-6)
  assert [group.rollout for group in run.data._now.remembered] == [1] * 4 + [2] * 4
  # The policy has moved since they were sampled, and what was sampled now is as it is.
  assert rows[3]["sampling/sampling_logp_difference/max"] > 1e-3 > rows[1]["sampling/sampling_logp_difference/max"]


def test_the_loss_is_of_all_of_them(prompts, tmp_path):
  """Of a policy that does not move: ratios and corrections are 1, and each completion counts alike."""
  c = again(prompts)
  c.total_steps, c.rollout.updates, c.optimizer.learning_rate = 2, 1, 0.0
  c.strategy.baseline = c.strategy.scale = "none"  # else the mean of all advantages is 0
  run = train(c, tmp_path)
  trained = run.data._now.experience
  assert len(trained.advantages) == 24 and np.abs(np.mean(trained.advantages)) > 1e-3
  assert rows_of(tmp_path)[2]["loss"] == pytest.approx(-np.mean(trained.advantages), abs=2e-5)


def test_the_prompts_of_other_data_are_forgotten(prompts, stopped, tmp_path, caplog):
  """The numbers of prompts would be those of others, whose images they might show."""
  train(again(prompts, stop=2), tmp_path)
  other = again(prompts[:1], stop=4, allow_config_changes=True)
  run = train(other, tmp_path)
  assert "groups of earlier rollouts are forgotten" in caplog.text
  assert {group.rollout for group in run.data._now.remembered} == {1}
  assert len(run.data._now.experience.lengths) == 16
