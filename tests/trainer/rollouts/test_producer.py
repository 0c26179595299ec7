"""One rollout by hand: which prompts are asked for, with which seeds, what replaces what, and what a rollout says; by a
sampler and rewards that are scripted."""

import contextlib
import math
from types import SimpleNamespace

import numpy as np
import pytest

from input_pipeline.examples.prompts import Prompt
from input_pipeline.prompt_data import PromptItem
from input_pipeline.steps import Piece
from trainer import strategies
from trainer.errors import ConfigError
from trainer.generate.completion import Completion
from trainer.rollouts import producer as producer_lib
from trainer.rollouts.carried import Group, Text
from trainer.rollouts.curriculum import Curriculum
from trainer.rollouts.episode import Episode
from trainer.rollouts.experience import Trajectory
from trainer.rollouts.groups import NoSignal
from trainer.rollouts.producer import Producer, Rollout
from trainer.rollouts.schedule import Policies

SIZE = Piece(0, 0, 2, 6, 3)  # two prompts for six steps, in passes of three


class Episodes:
  """Each completion is two tokens, `100 n + sample` and 1, of prompt n; notes prompts and seeds."""

  def __init__(self, rewards=None):
    self.asked, self._rewards = [], rewards or {}

  def run(self, items, group_size, generate, seed):
    self.asked.append(([item.number for item in items], seed))
    completions = generate([item.prompt.ids for item in items], samples=[range(group_size)] * len(items), seed=seed,
                           max_new_tokens=2)
    if completions is None:
      return None
    found = []
    for place, item in enumerate(items):
      of = sorted((c for c in completions if c.prompt == place), key=lambda c: c.sample)
      found.append([Episode(
          Trajectory(np.concatenate([item.prompt.ids, c.ids]), np.array([0, *[1] * len(c.ids)], np.float32),
                     np.array([0, *c.full_logprobs], np.float32), 1, c.finish_reason, item.number), f"{item.number}",
          f"{item.number}", *self._rewards.get((item.number, c.sample), (None, False)), 1) for c in of])
    return found

  def metrics(self, episodes):
    return {"episodes": float(len(episodes))}


class Sampler:
  """Gives each completion in two parts, the second of `last` tokens, and notes the requests and their parameters."""

  def __init__(self):
    self.requests, self.last = [], 1

  def stream(self, params, prompts, request):
    self.requests.append((params, request))
    for column in range(2):
      newer = request.newer()
      params = params if newer is None else newer
      for place, ids in enumerate(prompts):
        for sample in request.samples[place]:
          tokens = [100 * int(ids[0]) + sample] if not column else [1] * self.last
          size = np.ones(len(tokens), np.float32)
          yield Completion(place, sample, np.array(tokens, np.int32), -size, -2 * size, "stop" if column else "")


def make(reward_of, resample=0, names=("good",), weights=(1.0,), rewards=None, **changed):
  """(producer, its sampler, its episodes) with groups of two; `reward_of(number, sample)`: NaN for none."""
  made = Producer.__new__(Producer)
  prompts = SimpleNamespace(num_items=None, num_prompts=100, item=lambda number: PromptItem(
      Prompt(np.array([number], np.int32), f"prompt {number}", where=f"file:{number}"), "said", {}, source=number % 2,
      number=number))
  made._seed, made._prompts, made._group_size, made._resample = 7, prompts, 2, resample
  made._carries, made._max_staleness, made._kept_texts, made._shares, made._held = False, 0, 0, False, None
  made._has_environment, made._compares_all, made._shows = rewards is not None, True, False
  made._strategy = strategies.find("grpo")
  made._select = lambda groups: producer_lib.groups_lib.sequences(groups, "group", "none", False)
  made._sampling = dict(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1)
  made.sampler, made.episodes = Sampler(), Episodes(rewards)

  def score(groups):
    numbers = [[int(text) for text in group.completions] for group in groups]
    assert [[ids[0] for ids in group.completion_ids] for group in groups] == [
        [100 * n + sample for sample, n in enumerate(of)] for of in numbers]  # what follows the prompt
    values = np.array([[[reward_of(n, sample)] for sample, n in enumerate(group)] for group in numbers])
    return SimpleNamespace(values=values, failed=np.zeros(values.shape, bool), abstained=np.isnan(values), messages=[])

  made.scorer = SimpleNamespace(names=names, weights=weights, score=score, close=lambda: None)
  made.models = SimpleNamespace(names=(), weights=(), score=lambda groups: (
      np.zeros((len(groups), 2, 0)), np.zeros((len(groups), 2, 0), bool), np.zeros((len(groups), 2, 0), bool)))
  made.curriculum = Curriculum(SimpleNamespace(rollout=SimpleNamespace(curriculum_target=None), seed=7), prompts)
  made.names = (*names, *(("environment",) * made._has_environment))
  made._weights = np.array([*weights, *((1.0,) * made._has_environment)])
  for name, value in changed.items():
    setattr(made, name, value)
  return made


def roll(made, number=0, last=None, first_step=0, stopped=lambda: False, policies=None):
  return made.roll(policies or Policies("params", 4), number, last, first_step, SIZE, stopped)


def test_a_rollout_takes_the_next_prompts_by_a_seed_of_its_number():
  made = make(lambda n, sample: float(sample))
  first = roll(made)
  second = roll(made, 1, first, 6)
  assert made.episodes.asked == [([0, 1], "7/0/0"), ([2, 3], "7/1/0")]
  fields = ("number", "version", "first_step", "steps", "updates", "drawn", "groups", "end")
  assert [[getattr(made, name) for name in fields] for made in (first, second)] == [
      [0, 4, 0, 6, 3, 2, [0, 1], 6], [1, 4, 6, 6, 3, 4, [2, 3], 12]]
  assert first.no_signal is None and first.carried == [] and first.rates is None and first.oldest is None
  assert second.experience.tokens.tolist() == [2, 200, 1, 2, 201, 1, 3, 300, 1, 3, 301, 1]
  assert second.experience.advantages.tolist() == [-0.5, 0.5, -0.5, 0.5]
  assert second.experience.sources.tolist() == [0, 0, 1, 1] and second.experience.numbers.tolist() == [2, 2, 3, 3]
  assert second.experience.logprobs.tolist() == [0, -2, -2] * 4  # those of the whole vocabulary
  (params, request), *_ = made.sampler.requests
  assert params == "params" and (request.temperature, request.top_k, request.top_p, request.min_p) == (0.5, 3, 0.9, 0.1)
  assert request.seed == "7/0/0" and request.kept is None and request.beginnings is None
  assert second.metrics["reward"] == 0.5 and second.metrics["episodes"] == 4
  assert second.metrics["rollout/groups_replaced"] == 0
  assert second.metrics["time/rewards"] > 0 and second.metrics["time/rollout"] > 0
  assert [line["reward"] for line in second.table] == [0, 1, 0, 1]


@pytest.mark.parametrize("resample, asked, groups, replaced", [
    (0, [([0, 1], "7/3/0")], [0, 1], 0),  # nothing is replaced: 1 teaches nothing
    (1, [([0, 1], "7/3/0"), ([2], "7/3/1")], [0, 2], 1),
    (2, [([0, 1], "7/3/0"), ([2], "7/3/1")], [0, 2], 1)])
def test_groups_without_a_lesson_are_replaced_by_the_next_prompts(resample, asked, groups, replaced):
  made = make(lambda n, sample: float(sample) * (n != 1), resample)
  found = roll(made, 3)
  assert made.episodes.asked == asked and found.groups == groups
  assert found.metrics["rollout/groups_replaced"] == replaced and found.drawn == asked[-1][0][-1] + 1
  # Metrics are of all that was sampled.
  assert found.metrics["episodes"] == 2 * found.drawn


def test_where_the_last_attempt_leaves_too_few_those_without_a_lesson_fill_up():
  """Of 0, 1; 2, 3 and 4, 5 none teaches anything but 3; three attempts."""
  made = make(lambda n, sample: float(sample) if n == 3 else 1.0, 2)
  found = roll(made)
  assert made.episodes.asked == [([0, 1], "7/0/0"), ([2, 3], "7/0/1"), ([4], "7/0/2")]
  assert found.groups == [3, 4] and found.drawn == 5 and found.metrics["rollout/groups_replaced"] == 3
  nothing = roll(make(lambda n, sample: 1.0, 1))
  assert nothing.groups == [2, 3] and nothing.no_signal.equal and nothing.experience.advantages.tolist() == [0.0] * 4


def test_prompts_that_end_fill_up_with_groups_that_taught_nothing():
  """Three prompts in all; the first two teach nothing, and the third alone comes in their place."""
  made = make(lambda n, sample: float(sample) if n == 2 else 1.0, 5)
  made._prompts.num_items = 3
  found = roll(made)
  assert [numbers for numbers, _ in made.episodes.asked] == [[0, 1], [2]]
  assert found.groups == [2, 0] and found.drawn == 3


def test_rewards_of_functions_and_of_an_environment_are_added_by_their_weights():
  """2 · good + environment; a reward that is missing is left out, one that failed makes the whole missing."""
  rewards = {(0, 0): (3.0, False), (0, 1): (None, False), (1, 0): (math.nan, True), (1, 1): (5.0, False)}
  found = roll(make(lambda n, sample: 10.0 * n + sample, weights=(2.0,), rewards=rewards))
  assert [line["reward"] for line in found.table] == [3.0, 2.0, None, 27.0]
  assert [line["rewards"] for line in found.table] == [
      {"good": 0.0, "environment": 3.0}, {"good": 1.0, "environment": None}, {"good": 10.0, "environment": None},
      {"good": 11.0, "environment": 5.0}]
  assert found.metrics["rewards/environment/failed"] == 0.25 and found.metrics["rewards/environment/abstained"] == 0.25


def test_prompts_that_a_curriculum_passes_over_are_counted_and_what_was_measured_goes_on():
  """Of prompts 0 to 5, all taken but 2; 3 to 5 stand for the first three once more."""
  made = make(lambda n, sample: float(sample) if n else 1.0)
  rates = []

  class Chosen(Curriculum):
    def _takes(self, place, rates_N):
      rates.append(rates_N.tolist())
      return place != 2

  c = SimpleNamespace(curriculum_target=0.5, curriculum_floor=0.1, curriculum_passing=1.0)
  made._prompts.num_prompts, made._prompts.place = 3, lambda number: number % 3
  made.curriculum = Chosen(SimpleNamespace(rollout=c, seed=7), made._prompts)
  first = roll(made)
  second = roll(made, 1, first, 6)
  assert (first.groups, second.groups, second.drawn) == ([0, 1], [3, 4], 5)
  assert first.metrics["curriculum/passed_over"] == 0 and second.metrics["curriculum/passed_over"] == 1
  np.testing.assert_array_equal(first.rates, np.array([1.0, 0.5, np.nan], np.float32))
  assert all(math.isnan(x) for x in rates[0]) and rates[2][:2] == [1.0, 0.5]
  np.testing.assert_array_equal(second.rates, np.array([0.5, 0.5, np.nan], np.float32))
  assert second.metrics["curriculum/measured"] == pytest.approx(2 / 3)


def test_a_stop_leaves_a_rollout_off():
  asked = iter([False, False, True])
  assert roll(make(lambda n, sample: 1.0), stopped=lambda: next(asked)) is None


def test_a_policy_that_changes_meanwhile_is_counted_by_its_tokens():
  """Four tokens by the policy after 4 updates, twelve by that after 5; trained on after 6."""
  newer, made = {2: ("newer", 5)}, make(lambda n, sample: float(sample))
  made.sampler.last = 3
  policies = Policies("params", 4, lambda look, version: newer.get(look))
  found = roll(made, first_step=6, policies=policies)
  assert found.changes == [(2, 5)] and found.version == 4
  assert found.metrics["rollout/token_staleness"] == (4 * 2 + 12 * 1) / 16
  assert found.metrics["rollout/max_token_staleness"] == 2 and found.metrics["rollout/policy_changes"] == 1


def test_what_was_kept_and_shared_is_counted_over_all_attempts():
  made = make(lambda n, sample: 1.0, 1, _kept_texts=3, _shares=True)
  stream = made.sampler.stream

  def counting(params, prompts, request):
    request.kept.run, request.kept.reused, request.kept.given_up = 5, 3, 1
    request.beginnings.saved = 4
    return stream(params, prompts, request)

  made.sampler.stream = counting
  found = roll(made)
  assert {name: found.metrics[f"rollout/{name}"] for name in (
      "prompt_tokens_run", "prompt_tokens_reused", "texts_given_up", "prompt_tokens_shared")} == dict(
      prompt_tokens_run=10, prompt_tokens_reused=6, texts_given_up=2, prompt_tokens_shared=8)
  assert roll(make(lambda n, sample: 1.0)).metrics.keys().isdisjoint({"rollout/prompt_tokens_run"})


def test_a_rollout_is_as_old_as_the_oldest_token_of_its_groups():
  """Of two that were carried, whose first tokens are of policies 4 and 3, and 2 and 4."""
  made = make(lambda n, sample: float(sample), _max_staleness=9)
  carried = [Group(number, "a seed", [Text(np.array([5, 1], np.int32), -np.ones(2), np.array([version, 4]), "stop")
                                      for version in versions]) for number, versions in ((9, (4, 3)), (8, (2, 4)))]

  def go_on(policies, begun, need, ages, stopped):
    items = [made._prompts.item(group.number) for group in begun]
    return items, made._sample(policies, items, "a seed", stopped), begun, []

  made._go_on = go_on
  found = roll(made, 1, roll(made)._replace(carried=carried), 6)
  assert (found.groups, found.oldest, found.version, found.drawn) == ([9, 8], 2, 4, 2)


@pytest.mark.parametrize("held, asked, found", [
    (None, None, 0), (None, 0, 0), (3, None, 3), (3, 3, 3), (3, 0, 0), (3, 2, None), (None, 1, None)])
def test_a_schedule_says_how_many_rows_go_on(held, asked, found):
  cleared = []
  rows = held and SimpleNamespace(names=dict.fromkeys(range(held)), clear=lambda: (cleared.append(1),
                                                                                  rows.names.clear()))
  made = make(lambda n, sample: 1.0, _held=rows)
  with contextlib.nullcontext() if found is not None else pytest.raises(
      ConfigError, match=f"says that {asked} completions go on in their rows, and {held or 0} are there"):
    assert made._hold(asked) == found
  assert bool(cleared) == (held is not None and asked == 0)


def test_a_rollout_comes_back_as_it_was_from_checkpoints_and_other_processes():
  text = Text(np.array([4, 5], np.int32), np.array([-1, -2], np.float32), np.array([3, 4], np.int32), "stop", "!")
  begun = Text(np.array([6], np.int32), np.array([-3], np.float32), np.array([4], np.int32))
  whole = roll(make(lambda n, sample: float(sample)))._replace(
      no_signal=NoSignal("why", "what", True), rates=np.array([0.5, np.nan], np.float32),
      carried=[Group(9, "7/0/0", [text, begun])], oldest=3, changes=[(2, 5)], kept=1)
  empty = roll(make(lambda n, sample: 1.0))._replace(experience=producer_lib.experience_lib.collect([]))
  for made in (whole, empty):
    meta, arrays = made.saved("ahead0_")
    assert all(name.startswith("ahead0_") for name in arrays)
    others = {"tokens": np.zeros(3), "ahead1_tokens": np.ones(2)}
    for again in (Rollout.restored("ahead0_", meta, arrays | others), Rollout.unpacked(made.packed())):
      assert again.metrics == made.metrics and again.table == made.table and again.no_signal == made.no_signal
      for name in ("number", "version", "first_step", "steps", "updates", "drawn", "groups", "oldest", "kept"):
        assert getattr(again, name) == getattr(made, name), name
      assert [tuple(change) for change in again.changes] == list(made.changes)
      for name, part in made.experience._asdict().items():
        np.testing.assert_array_equal(getattr(again.experience, name), part, err_msg=name)
      np.testing.assert_array_equal(again.rates, made.rates)
      assert [(g.number, g.seed, [(t.ids.tolist(), t.versions.tolist(), t.finish_reason, t.stop_reason)
                                  for t in g.texts]) for g in again.carried] == [
          (g.number, g.seed, [(t.ids.tolist(), t.versions.tolist(), t.finish_reason, t.stop_reason)
                              for t in g.texts]) for g in made.carried]
