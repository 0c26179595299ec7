"""From scored groups to what is trained on, by hand: no model and no device."""

import json
import math

import numpy as np
import pytest

from input_pipeline.examples import advantages
from input_pipeline.examples.prompts import Prompt
from input_pipeline.examples.roles import COMPLETION
from input_pipeline.prompt_data import PromptItem
from trainer.errors import ConfigError
from trainer.metrics import to_floats
from trainer.rollouts import experience, groups
from trainer.rollouts.episode import Episode
from trainer.rollouts.experience import Trajectory
from trainer.rollouts.groups import ScoredGroup

NAN = math.nan


def episode(prompt, said, reason="stop"):
  ids = np.array([*prompt, *said], np.int32)
  weights = np.array([0.0] * len(prompt) + [1.0] * len(said), np.float32)
  text = " ".join(map(str, said))
  return Episode(Trajectory(ids, weights, -weights / 2, len(prompt), reason), text, text, None, False, 1)


def group(rewards, *, number=0, reasons=None, failed=None, abstained=None):
  """Completions of 1, 2, 3, … tokens with these rewards of one function."""
  prompt = [7, number]
  rewards = np.array(rewards, np.float64)
  size = len(rewards)
  failed, abstained = (np.zeros(size, bool) if x is None else np.array(x, bool) for x in (failed, abstained))
  item = PromptItem(Prompt(np.array(prompt, np.int32), f"prompt {number}", where=f"file:{number}"), "said", {},
                    source=number % 2)
  episodes = [episode(prompt, range(10, 11 + i), reason) for i, reason in enumerate(reasons or ["stop"] * size)]
  return ScoredGroup(item, episodes, rewards[:, None], failed[:, None], abstained[:, None], rewards,
                     rewards, bool(advantages.zero_spread(rewards[None])[0]))


def test_each_completion_has_its_advantage_source_and_tokens():
  found = groups.sequences([group([0.0, 2.0]), group([1.0, 1.0], number=3)], "group", "none", False)
  assert [(s.ids.tolist(), a, source) for unit in found.units for s, a, source in unit] == [
      ([7, 0, 10], -1.0, 0), ([7, 0, 10, 11], 1.0, 0), ([7, 3, 10], 0.0, 1), ([7, 3, 10, 11], 0.0, 1)]
  np.testing.assert_array_equal(found.advantages, [[-1, 1], [0, 0]])
  assert all(len(unit) == 1 for unit in found.units) and not any(found.counts.values())


def test_what_has_no_reward_leaves_the_others_as_if_it_had_never_been():
  """T27, I10: in units, advantages and the batch."""
  def batch(made):
    collected = experience.collect(made.units)
    return experience.make_batch(collected, np.arange(collected.num_units), experience.RowFormat(16, 0, 1),
                                 keys=("advantages", "behavior_logprobs"))

  some = groups.sequences([group([0.0, 2.0, NAN]), group([NAN] * 3, number=1), group([4.0, 1.0, NAN], number=2)],
                          "group", "group", False)
  others = groups.sequences([group([0.0, 2.0]), group([4.0, 1.0], number=2)], "group", "group", False)
  assert some.counts == {"completions/masked": 0, "completions/without_reward": 5}
  ours, theirs = batch(some), batch(others)
  assert ours.keys() == theirs.keys() and (ours["segment_roles"] == COMPLETION).sum() == 4
  for key in ours:
    np.testing.assert_array_equal(ours[key], theirs[key], err_msg=key)


def test_a_completion_that_was_cut_off_counts_for_the_mean_alone():
  made = [group([0.0, 2.0, 4.0], reasons=["stop", "length", "stop"])]
  found = groups.sequences(made, "group", "none", True)
  assert [advantage for unit in found.units for _, advantage, _ in unit] == [-2.0, 2.0]
  assert found.counts == {"completions/masked": 1, "completions/without_reward": 0}
  assert len(groups.sequences(made, "group", "none", False).units) == 3


def test_pairs_are_the_best_and_the_worst_of_a_group():
  found = groups.pairs([group([0.5, NAN, 3.0, -1.0]), group([1.0, 1.0, NAN, NAN], number=1),
                        group([NAN, NAN, NAN, 2.0], number=2), group([0.0, 1.0, 1.0, 0.0], number=3)], 32, False)
  assert [[(s.ids.tolist(), mark, source) for s, mark, source in unit] for unit in found.units] == [
      [([7, 0, 10, 11, 12], 1.0, 0), ([7, 0, 10, 11, 12, 13], -1.0, 0)],
      [([7, 3, 10, 11], 1.0, 1), ([7, 3, 10], -1.0, 1)]]  # the first of equals
  assert found.counts == {"rollout/ties": 1, "rollout/unpaired": 1, "completions/masked": 0,
                          "completions/without_reward": 6}
  np.testing.assert_array_equal(found.advantages[0], [NAN, NAN, 1, -1])
  assert np.isnan(found.advantages[1:3]).all()


def test_a_pair_longer_than_a_row_is_named():
  pair = [group([1.0, 0.0], number=5)]  # 3 and 4 tokens
  assert len(groups.pairs(pair, 7, False).units) == 1
  with pytest.raises(ConfigError, match="file:5: the best and the worst completion with their prompts have 7 tokens"):
    groups.pairs(pair, 6, False)


def test_what_was_cut_off_is_neither_chosen_nor_rejected():
  """The best and the worst of the others; none where these are equal, or fewer than two."""
  cut = ["length", "stop", "stop", "length"]
  made = [group([9.0, 1.0, 0.5, -9.0], reasons=cut), group([1.0, 2.0, 2.0, NAN], number=1, reasons=cut),
          group([1.0, 2.0, NAN, 3.0], number=2, reasons=cut), group([0.0, 1.0], number=3)]
  made = [one._replace(zero_spread=bool(advantages.zero_spread(
      groups.compared(one.rewards, one.episodes, True)[None])[0])) for one in made]
  found = groups.pairs(made, 32, True)
  assert [[(len(s.ids) - 2, mark) for s, mark, _ in unit] for unit in found.units] == [
      [(2, 1.0), (3, -1.0)], [(2, 1.0), (1, -1.0)]]
  assert found.counts == {"rollout/ties": 1, "rollout/unpaired": 1, "completions/masked": 5,
                          "completions/without_reward": 2}
  assert [len(s.ids) - 2 for s, _, _ in groups.pairs(made[:1], 32, False).units[0]] == [1, 4]


ABSTAIN, FAIL, CUT = [True] * 2, [True] * 2, ["length"] * 2


@pytest.mark.parametrize("given, mask, told, equal", [
    ([group([NAN, NAN], failed=FAIL), group([NAN, NAN], number=1, abstained=ABSTAIN)], False,
     "none of its 4 completions have a reward: f failed for 50%, f abstained for 50%", False),
    ([group([NAN, 1.0], failed=[True, False])], False,
     "only 1, no two to one prompt, of its 2 completions have a reward: f failed for 50%", False),
    ([group([0.0, 1.0], reasons=CUT)], True, "2 of its 2 completions with a reward were cut off", False),
    ([group([0.0, 0.0]), group([0.0, 0.0], number=1)], False, "its 4 rewards do not differ (0)", True),
    ([group([0.0, 0.0]), group([1.0, 1.0], number=1)], True, "(0 to 1, the same within each group)", True),
    ([group([NAN, NAN], failed=FAIL), group([2.0, 2.0], number=1)], True, "its 2 rewards do not differ (2)", True),
    ([group([0.0, 0.0]), group([0.0, 1.0], number=1)], False, None, None)])
def test_why_nothing_is_taught(given, mask, told, equal):
  """Of sequences and of pairs alike."""
  compared = [one._replace(zero_spread=bool(advantages.zero_spread(
      groups.compared(one.rewards, one.episodes, mask)[None])[0])) for one in given]
  for samples in (groups.sequences(given, "group", "group", mask), groups.pairs(compared, 32, mask)):
    no_signal = groups.no_signal(("f",), given, samples, rewarded=True)
    if told is None:
      assert no_signal is None
    else:
      assert told in no_signal.why and no_signal.equal == equal and no_signal.advice



def test_where_a_critic_makes_advantages_each_completion_has_its_reward():
  """None without one and none that was cut off; equal rewards and single ones teach, too."""
  given = [group([0.5, NAN, 0.5], reasons=["stop", "stop", "length"]), group([0.0], number=1)]
  made = [groups.valued([one], True) for one in given]
  assert [[(len(s.ids) - 2, a) for s, a, _ in unit] for one in made for unit in one.units] == [[(1, 0.5)], [(1, 0.0)]]
  assert made[0].counts == {"completions/masked": 1, "completions/without_reward": 1}
  assert all(np.isnan(one.advantages).all() for one in made)
  for one, samples in zip(given, made, strict=True):
    assert groups.no_signal(("f",), [one], samples, rewarded=True, valued=True) is None
  for one, told in ((group([NAN], failed=[True]), "none of its 1 completions have a reward: f failed for 100%"),
                    (group([1.0], reasons=["length"]), "1 of its 1 completions with a reward were cut off")):
    assert told in groups.no_signal(("f",), [one], groups.valued([one], True), rewarded=True, valued=True).why


def test_metrics_are_of_all_that_was_sampled():
  kept = [group([0.0, 2.0], reasons=["stop", "length"])]
  replaced = [group([1.0, 1.0], number=1), group([NAN, NAN], number=2, failed=[True, True])]
  samples = groups.sequences(kept, "group", "none", True)
  found = to_floats(groups.metrics(("f",), kept, replaced, samples))
  assert found["reward"] == 1.0 and found["frac_reward_zero_std"] == 0.5
  assert found["frac_without_reward"] == pytest.approx(1 / 3)
  assert found["rewards/f/failed"] == pytest.approx(1 / 3) and found["rewards/f/mean"] == 1.0
  assert found["completions/clipped_ratio"] == pytest.approx(1 / 6)
  assert (found["completions/min_length"], found["completions/max_length"], found["completions/mean_length"]) == (
      1, 2, 1.5)
  assert found["completions/max_terminated_length"] == 2
  assert found["completions/mean_terminated_length"] == pytest.approx(1.4)
  assert found["advantage/abs_mean"] == 1.0  # of the kept group
  assert found["rollout/groups_replaced"] == 2 and found["completions/masked"] == 1
  cut = [group([0.0, 1.0], reasons=["length", "length"])]
  found = to_floats(groups.metrics(("f",), cut, [], groups.sequences(cut, "group", "none", False)))
  assert found["completions/clipped_ratio"] == 1 and "completions/mean_terminated_length" not in found


def test_the_table_is_json_with_null_for_what_there_is_not():
  made = [group([0.5, NAN], abstained=[False, True])]
  lines = groups.table(("f",), made, groups.sequences(made, "none", "none", False))
  assert json.loads(json.dumps(lines, allow_nan=False)) == [
      {"where": "file:0", "sample": 0, "prompt": "prompt 0", "completion": "10", "reward": 0.5, "advantage": 0.5,
       "rewards": {"f": 0.5}, "finish_reason": "stop", "tokens": 1},
      {"where": "file:0", "sample": 1, "prompt": "prompt 0", "completion": "10 11", "reward": None, "advantage": None,
       "rewards": {"f": None}, "finish_reason": "stop", "tokens": 2}]


def test_a_page_shows_each_completion_with_the_images_of_its_prompt(tmp_path, monkeypatch):
  shown = []
  monkeypatch.setattr(groups.pages, "cards_page", lambda *given: (shown.append(given), "")[1])
  rows = [dict(where=f"file:{n}", sample=i, prompt=f"prompt {n}", completion=f"said {i}", reward=1.0, advantage=None,
               finish_reason="stop", stop_reason=None) for n in range(2) for i in range(3)]
  text = groups.write(tmp_path / "samples" / "rollout-00000001", rows, [["a picture"], []], "title")
  (title, cards, total), = shown
  assert (title, total) == ("title", 6)
  assert [list(card.images) for card in cards] == [["a picture"]] * 3 + [[]] * 3
  lines = (tmp_path / "samples" / "rollout-00000001.jsonl").read_text().splitlines()
  assert [json.loads(line) for line in lines] == rows
  assert text.split("\n\n")[3].startswith("--- file:1, reward 1.0, advantage None") and "prompt 1\n>>> said 0" in text
