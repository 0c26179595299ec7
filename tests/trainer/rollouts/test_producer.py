"""One rollout by hand: which prompts are asked for, with which seeds, what replaces what, and what a rollout says; by a
sampler and rewards that are scripted."""

import contextlib
import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
from ml_collections import ConfigDict

from input_pipeline.examples.prompts import Prompt
from input_pipeline.prompt_data import PromptItem
from input_pipeline.steps import Piece
from trainer import strategies
from trainer.errors import ConfigError
from trainer.generate.completion import Completion
from trainer.generate.kept import Held
from trainer.rollouts import producer as producer_lib
from trainer.rollouts.carried import Group, Text
from trainer.rollouts.curriculum import Curriculum
from trainer.rollouts.episode import Episode
from trainer.rollouts.experience import Trajectory
from trainer.rollouts.groups import NoSignal
from trainer.rollouts.producer import Producer, Rollout
from trainer.rollouts.replay import Remembered, Replay
from trainer.rollouts.schedule import Policies

SIZE = Piece(0, 0, 2, 6, 3)  # two prompts for six steps, in passes of three


class Episodes:
  """Each completion is two tokens, `100 n + sample` and 1, of prompt n; notes prompts and seeds."""

  def __init__(self, rewards=None):
    self.noted, self._rewards = [], rewards or {}

  def run(self, items, group_size, generate, seed):
    self.noted.append(([item.number for item in items], seed))
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

  def asked(self, items):
    """Of prompt n, which shows "image n", completions of 50 + n tokens."""
    return [50 + item.number for item in items], dict(
        stop_ids=(77,), images=[[f"image {item.number}"] for item in items], prefixes=[item.number for item in items])

  def alone(self, item, completion):
    return Episode(Trajectory(np.concatenate([item.prompt.ids, completion.ids]),
                              np.array([0, *[1] * len(completion.ids)], np.float32),
                              np.array([0, *completion.full_logprobs], np.float32), 1, completion.finish_reason,
                              item.number), f"{item.number}", f"{item.number}", None, False, 1)

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


class Goes:
  """Gives to each request the chunks of the next script, parts `(number of the prompt, sample, ids, whether it ends)`,
  until it is told that this is enough; notes prompts, requests and their parameters."""

  rows = 3

  def __init__(self, *scripts):
    self.scripts, self.asked = [list(script) for script in scripts], []

  def stream(self, params, prompts, request):
    self.asked.append((params, [ids.tolist() for ids in prompts], request))
    if request.beginnings is not None:
      request.beginnings.saved += 4
    places = {(int(ids[0]), sample): place for place, ids in enumerate(prompts) for sample in request.samples[place]}
    script = self.scripts[len(self.asked) - 1]
    while script and not request.until():
      request.newer()
      for number, sample, ids, ends in script.pop(0):
        size = np.ones(len(ids), np.float32)
        yield Completion(places[number, sample], sample, np.array(ids, np.int32), -size, -2 * size, "stop" * ends)


def make(reward_of, resample=0, names=("good",), weights=(1.0,), rewards=None, **changed):
  """(producer, its sampler, its episodes) with groups of two; `reward_of(number, sample)`: NaN for none, or several."""
  made = Producer.__new__(Producer)
  prompts = SimpleNamespace(num_items=None, num_prompts=100, item=lambda number: PromptItem(
      Prompt(np.array([number], np.int32), f"prompt {number}", where=f"file:{number}"), "said", {"n": number},
      source=number % 2, number=number))
  made._seed, made._prompts, made._group_size, made._resample = 7, prompts, 2, resample
  made._carries, made._max_staleness, made._kept_texts, made._shares, made._held = False, 0, 0, False, None
  made._has_environment, made._compares_all, made._shows = rewards is not None, True, False
  made._strategy, made._apart, made._replay = strategies.find("grpo"), False, Replay(0, 0, 7)
  made._select = lambda groups: producer_lib.groups_lib.sequences(groups, "group", "none", False)
  made._sampling = dict(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1)
  made.sampler, made.episodes = Sampler(), Episodes(rewards)

  def score(groups):
    numbers = [[int(text) for text in group.completions] for group in groups]
    assert [[ids[0] for ids in group.completion_ids] for group in groups] == [
        [100 * n + sample for sample, n in enumerate(of)] for of in numbers]  # what follows the prompt
    values = np.array([[np.atleast_1d(reward_of(n, sample)) for sample, n in enumerate(group)] for group in numbers])
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


def roll(made, number=0, last=None, first_step=0, stopped=lambda: False, policies=None, size=SIZE):
  return made.roll(policies or Policies("params", 4), number, last, first_step, size, stopped)


class Chosen(Curriculum):
  """Takes all prompts but those of some places, and notes the rates by which it does."""

  def __init__(self, prompts, *without):
    c = SimpleNamespace(curriculum_target=0.5, curriculum_floor=0.1, curriculum_passing=1.0)
    super().__init__(SimpleNamespace(rollout=c, seed=7), prompts)
    self.without, self.rates = without, []

  def _takes(self, place, rates_N):
    self.rates.append(rates_N.tolist())
    return place not in self.without


def test_a_rollout_takes_the_next_prompts_by_a_seed_of_its_number():
  made = make(lambda n, sample: float(sample))
  first = roll(made)
  second = roll(made, 1, first, 6)
  assert made.episodes.noted == [([0, 1], "7/0/0"), ([2, 3], "7/1/0")]
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
  assert made.episodes.noted == asked and found.groups == groups
  assert found.metrics["rollout/groups_replaced"] == replaced and found.drawn == asked[-1][0][-1] + 1
  # Metrics are of all that was sampled.
  assert found.metrics["episodes"] == 2 * found.drawn


def test_what_teaches_nothing_is_seen_in_each_reward_where_they_are_compared_apart():
  """1 + 0 and 0 + 1 are the same sum; of prompt 1 both rewards are equal, and it is replaced."""
  def rewards_of(n, sample):
    return (1.0, 1.0) if n == 1 else (float(sample), 2.0 * (1 - sample))

  two = dict(names=("a", "b"), weights=(1.0, 0.5))
  assert roll(make(rewards_of, 1, **two)).no_signal.equal
  made = make(rewards_of, 1, _apart=True, _select=lambda groups:
              producer_lib.groups_lib.sequences(groups, "group", "group", False, True), **two)
  found = roll(made)
  assert found.groups == [0, 2] and found.metrics["frac_reward_zero_std"] == pytest.approx(1 / 3)
  # ±(1/2) / √(1/2), half of it taken away again: ±√(1/8); and over the deviation of four such numbers, √(1/6).
  np.testing.assert_allclose(found.experience.advantages, [-math.sqrt(3) / 2, math.sqrt(3) / 2] * 2, rtol=1e-3)
  assert [line["reward"] for line in found.table] == [1, 1] * 2


def test_where_the_last_attempt_leaves_too_few_those_without_a_lesson_fill_up():
  """Of 0, 1; 2, 3 and 4, 5 none teaches anything but 3; three attempts."""
  made = make(lambda n, sample: float(sample) if n == 3 else 1.0, 2)
  found = roll(made)
  assert made.episodes.noted == [([0, 1], "7/0/0"), ([2, 3], "7/0/1"), ([4], "7/0/2")]
  assert found.groups == [3, 4] and found.drawn == 5 and found.metrics["rollout/groups_replaced"] == 3
  nothing = roll(make(lambda n, sample: 1.0, 1))
  assert nothing.groups == [2, 3] and nothing.no_signal.equal and nothing.experience.advantages.tolist() == [0.0] * 4


def test_prompts_that_end_fill_up_with_groups_that_taught_nothing():
  """Three prompts in all; the first two teach nothing, and the third alone comes in their place."""
  made = make(lambda n, sample: float(sample) if n == 2 else 1.0, 5)
  made._prompts.num_items = 3
  found = roll(made)
  assert [numbers for numbers, _ in made.episodes.noted] == [[0, 1], [2]]
  assert found.groups == [2, 0] and found.drawn == 3


def test_rewards_of_functions_and_of_an_environment_are_added_by_their_weights():
  """2 · good + model / 2 + environment; a reward that is missing is left out, one that failed makes the whole
  missing."""
  rewards = {(0, 0): (3.0, False), (0, 1): (None, False), (1, 0): (math.nan, True), (1, 1): (5.0, False)}
  asked = []

  def score(groups):
    asked.extend(groups)
    values = np.array([[[100.0 * int(text) + 40 * sample] for sample, text in enumerate(group.completions)]
                       for group in groups])
    return values, np.zeros(values.shape, bool), np.zeros(values.shape, bool)

  made = make(lambda n, sample: 10.0 * n + sample, weights=(2.0,), rewards=rewards, models=SimpleNamespace(score=score))
  made.names, made._weights = ("good", "model", "environment"), np.array([2.0, 0.5, 1.0])
  found = roll(made)
  assert [line["reward"] for line in found.table] == [3.0, 22.0, None, 97.0]
  assert [line["rewards"] for line in found.table] == [
      {"good": 0.0, "model": 0.0, "environment": 3.0}, {"good": 1.0, "model": 40.0, "environment": None},
      {"good": 10.0, "model": 100.0, "environment": None}, {"good": 11.0, "model": 140.0, "environment": 5.0}]
  for name, failed, abstained in (("good", 0, 0), ("model", 0, 0), ("environment", 0.25, 0.25)):
    assert found.metrics[f"rewards/{name}/failed"] == failed, name
    assert found.metrics[f"rewards/{name}/abstained"] == abstained, name
  assert [dataclasses.astuple(group) for group in asked] == [
      ("said", [f"{n}"] * 2, [[100 * n + sample, 1] for sample in (0, 1)], {"n": n}, f"file:{n}")
      for n in (0, 1)]


@pytest.mark.parametrize("name, mask, combine", [
    ("grpo", True, None), ("grpo", False, "sum_then_normalize"), ("grpo", False, "normalize_then_sum"),
    ("dpo", True, None), ("dpo", False, None), ("ppo", True, None), ("distill", True, None)])
def test_a_producer_is_made_of_what_the_config_says(monkeypatch, name, mask, combine):
  asked, more, apart = {}, {} if combine is None else {"combine": combine}, combine == "normalize_then_sum"

  def note(key, gives=None):
    return lambda *arguments: asked.update({key: arguments}) or gives

  sampler = SimpleNamespace(check=note("check"))
  parts = dict(make_sampler=sampler, Episodes="episodes", Curriculum="curriculum",
               make_scorer=SimpleNamespace(names=("a",), weights=(2.0,)),
               RewardModels=SimpleNamespace(names=("b", "c"), weights=[3.0, 4.0]))
  for key, gives in parts.items():
    monkeypatch.setattr(producer_lib, key, note(key, gives))
  for key in ("every", "valued", "pairs", "sequences"):
    monkeypatch.setattr(producer_lib.groups_lib, key, note("select", key))
  items = [SimpleNamespace(prompt=SimpleNamespace(ids=np.arange(size))) for size in (2, 5, 3)]
  prompts = SimpleNamespace(every_item=lambda: items)
  given = dict(carry_over=True, in_flight=True, max_staleness=5, kept_texts=4, share_beginnings=True, group_size=3,
               resample=6, environment="mine", mask_truncated=mask, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1,
               max_new_tokens=9, concurrent=False, replay_groups=2, replay_window=5)
  config = SimpleNamespace(rollout=SimpleNamespace(**given), seed=7, seq_len=40,
                           strategy=ConfigDict(dict(name=name, baseline="none", scale="rollout", **more)))
  made = Producer(config, prompts, producer_lib.Policy("model", "tokenizer", "mesh"), "workdir")
  (longest,), *limit = asked.pop("check")
  assert longest is items[1].prompt.ids and limit == [9, "rollout."]
  assert asked == dict(make_sampler=(config, "model", "mesh", "workdir"), Episodes=(config, "tokenizer", prompts),
                       make_scorer=(config, prompts), RewardModels=(config, "mesh"), Curriculum=(config, prompts))
  assert made.names == ("a", "b", "c", "environment") and made._weights.tolist() == [2.0, 3.0, 4.0, 1.0]
  assert made._apart == apart and made._replay == Replay(2, 5, 7)
  assert made._sampling == dict(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1)
  assert [made._seed, made._prompts, made._carries, made._max_staleness, made._kept_texts, made._shares,
          made._group_size, made._resample] == [7, prompts, True, 5, 4, True, 3, 6]
  assert isinstance(made._held, Held) and made._shows and made._has_environment
  selected = made._select("groups")
  assert (selected, *asked["select"]) == dict(
      grpo=("sequences", "groups", "none", "rollout", mask, apart), dpo=("pairs", "groups", 40, mask),
      ppo=("valued", "groups", mask), distill=("every", "groups", mask))[name]
  assert made._compares_all == (not (name == "dpo" and mask))  # of pairs those that are cut off are none
  for change in (dict(carry_over=False), dict(in_flight=False)):
    config.rollout = SimpleNamespace(**given | change)
    assert Producer(config, prompts, producer_lib.Policy("model", "tokenizer", "mesh"), "workdir")._held is None
  config.rollout = SimpleNamespace(**given | dict(environment=None, concurrent=True))
  made = Producer(config, prompts, producer_lib.Policy("model", "tokenizer", "mesh"), "workdir")
  assert made.names == ("a", "b", "c") and made._weights.tolist() == [2.0, 3.0, 4.0]
  assert not made._shows and not made._has_environment


def test_prompts_that_a_curriculum_passes_over_are_counted_and_what_was_measured_goes_on():
  """Of prompts 0 to 5, all taken but 2; 3 to 5 stand for the first three once more."""
  made = make(lambda n, sample: float(sample) if n else 1.0)
  made._prompts.num_prompts, made._prompts.place = 3, lambda number: number % 3
  made.curriculum = Chosen(made._prompts, 2)
  rates = made.curriculum.rates
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


def test_what_ends_is_told_whole_and_once_while_others_are_sampled():
  """Of three texts the third is asked for when the second has ended; what has ended since is what is left at last."""
  made, told = make(lambda n, sample: 1.0, _kept_texts=3, _shares=True), []
  made._clock, made._sampled, made._of_prompts = {"rollout": 0.0}, 0, {}

  def more(ended, idle):
    told.append(([(c.prompt, c.sample, c.ids.tolist()) for c in ended], idle))
    return [np.array([9])], dict(samples=[[1]]), len(told)

  def part(prompt, sample, token, reason=""):
    return Completion(prompt, sample, np.array([token], np.int32), np.zeros(1), np.zeros(1), reason)

  def stream(params, prompts, request):
    assert (params, prompts, request.samples, request.seed) == ("params", ["a", "b"], "samples", "a seed")
    assert request.kept._most == 3 and request.kept._once and request.beginnings is not None
    request.beginnings.saved, request.kept.run = 6, 5
    yield from (part(0, 0, 1), part(1, 2, 2, "stop"))
    assert request.more(False) == ([np.array([9])], dict(samples=[[1]]), 1)
    yield from (part(2, 1, 4), part(0, 0, 3, "length"))
    assert request.more(True).coming == 2
    yield part(2, 1, 5, "stop")

  made.sampler = SimpleNamespace(stream=stream)
  made.episodes = SimpleNamespace(run=lambda items, size, generate, seed: generate(
      ["a", "b"], more, samples="samples", seed=seed, max_new_tokens=4))
  last, = made._sample(Policies("params", 4), [None, None], "a seed", lambda: False)
  assert told == [([(1, 2, [2])], False), ([(0, 0, [1, 3])], True)]
  assert (last.prompt, last.sample, last.ids.tolist(), last.finish_reason) == (2, 1, [4, 5], "stop")
  assert made._sampled == 5 and made._of_prompts["prompt_tokens_shared"] == 6
  assert made._of_prompts["prompt_tokens_run"] == 5


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


ONE_STEP = Piece(0, 0, 2)  # two prompts for each step


def begun(number, *texts):
  """A group of the seed "a seed" with texts (ids, versions, how it ended), all of log-prob -5."""
  return Group(number, "a seed", [Text(np.array(ids, np.int32), np.full(len(ids), -5, np.float32),
                                       np.array(versions, np.int32), reason) for ids, versions, reason in texts])


def carrying(made, *carried):
  """The rollout before, by which 12 prompts were drawn."""
  return roll(make(lambda n, sample: 1.0))._replace(drawn=12, carried=carried, rates=made.curriculum.unmeasured())


def test_what_has_begun_goes_on_with_what_belongs_to_its_prompt(caplog):
  """Of the rollout before 9 has begun, and 4, too long ago: it begins anew. 12 is passed over. 13 and 14 become whole,
  of which 13 teaches nothing, so that another request is made; 15 and 16 have not begun by then, as 4 has not. The
  policy changes before the second of three chunks."""
  made = make(lambda n, sample: float(sample) * (n != 13), 1, _carries=True, _max_staleness=3, _shares=True)
  made._held = SimpleNamespace(names=[1, 2, 3])
  made._prompts.num_prompts, made._prompts.place = 20, lambda number: number
  made.curriculum = Chosen(made._prompts, 12)
  made.sampler = Goes(
      [[(9, 1, [1], True), (13, 0, [1300], False), (14, 0, [1400], False)],
       [(13, 0, [1], True), (13, 1, [1301, 1], True)], [(15, 0, [1500], False)]],
      [[(14, 0, [1], True), (14, 1, [1401, 1], True)], [(15, 0, [1500], False)]])
  last = carrying(made, begun(9, ([900, 1], [4, 4], "stop"), ([901], [4], "")),
                  begun(4, ([400], [2], ""), ([], [], "")))
  policies = Policies("older", 5, lambda look, version: ("newer", 6) if look == 2 else None)
  found = roll(made, 1, last, 6, policies=policies, size=ONE_STEP)
  assert "1 of 2 groups that had begun begin again" in caplog.text and "rollout.max_staleness=3 updates" in caplog.text
  (params, prompts, one), (params_then, prompts_then, two) = made.sampler.asked
  assert (params, prompts) == ("older", [[9, 901], [4], [13], [14], [15]])  # as many as there are rows beside two
  assert (params_then, prompts_then) == ("newer", [[4], [14, 1400], [14], [15], [16]])
  assert one.samples == [[1], *[[0, 1]] * 4] and two.samples == [[0, 1], [0], [1], [0, 1], [0, 1]]
  assert one.begun == [1, 0, 0, 0, 0] and two.begun == [0, 1, 0, 0, 0]
  assert one.seed == ["a seed", "7/1/anew", "7/1/0", "7/1/0", "7/1/0"]
  assert two.seed == ["7/1/anew", "7/1/0", "7/1/0", "7/1/1", "7/1/1"]
  for request, numbers in ((one, (9, 4, 13, 14, 15)), (two, (4, 14, 14, 15, 16))):
    assert request.max_new_tokens == [50 + n for n in numbers] and request.prefixes == list(numbers)
    assert request.images == [[f"image {n}"] for n in numbers] and request.stop_ids == (77,) and request.in_order
    assert (request.temperature, request.top_k, request.top_p, request.min_p) == (0.5, 3, 0.9, 0.1)
    assert request.held is made._held and request.kept is None
  assert [len(script) for script in made.sampler.scripts] == [1, 1]  # no chunk more than was needed
  assert (found.groups, found.drawn, found.oldest, found.kept) == ([9, 14], 15, 4, 3)
  assert found.changes == [(2, 6)] and found.version == 5
  assert [(g.number, g.seed, g.oldest) for g in found.carried] == [(4, "7/1/anew", None)]
  assert found.experience.tokens.tolist() == [9, 900, 1, 9, 901, 1, 14, 1400, 1, 14, 1401, 1]
  assert found.experience.logprobs.tolist() == [0, -5, -5, 0, -5, -2, *[0, -2, -2] * 2]
  assert found.experience.advantages.tolist() == [-0.5, 0.5] * 2
  # Of the 12 tokens of 9, 13 and 14 three are of policy 4, three of policy 5; nine were sampled now.
  metrics = found.metrics
  assert (metrics["rollout/carried_ratio"], metrics["rollout/carried_groups"]) == (3 / 12, 1)
  assert (metrics["rollout/token_staleness"], metrics["rollout/max_token_staleness"]) == ((3 * 2 + 3 * 1) / 12, 2)
  assert metrics["sampling/tokens_per_second"] * metrics["time/rollout"] == pytest.approx(9)
  assert metrics["rollout/rows_held"] == 3 and metrics["rollout/prompt_tokens_shared"] == 8
  assert metrics["rollout/groups_replaced"] == 1 and metrics["curriculum/passed_over"] == 1
  assert np.flatnonzero(~np.isnan(found.rates)).tolist() == [9, 13, 14]


def test_turned_off_what_has_begun_goes_on_and_nothing_is_begun_beside_it(caplog):
  """A prompt for the other group of two, whose texts all end."""
  made = make(lambda n, sample: float(sample), _max_staleness=3)
  made.sampler = Goes([[(9, 1, [1], True), (12, 0, [1200, 1], True), (12, 1, [1201, 1], True)]])
  last = carrying(made, begun(9, ([900, 1], [4, 4], "stop"), ([901], [4], "")))
  found = roll(made, 1, last, 6, policies=Policies("params", 6), size=ONE_STEP)
  assert "begin again" not in caplog.text
  (_, prompts, request), = made.sampler.asked
  assert prompts == [[9, 901], [12]] and request.beginnings is None and request.held is None
  assert (found.groups, found.drawn, found.carried, found.oldest) == ([9, 12], 13, [], 4)
  assert "rollout/rows_held" not in found.metrics and "rollout/prompt_tokens_shared" not in found.metrics


@pytest.mark.parametrize("carries, terminal, concurrent, shown", [
    (False, True, False, True), (True, True, False, True), (False, True, True, False), (False, False, False, False)])
def test_a_bar_counts_completions_that_end(monkeypatch, carries, terminal, concurrent, shown):
  """Of four, each in two parts; where nobody looks, or training has a bar of its own, there is none."""
  bars = []

  class Bar(contextlib.nullcontext):
    def __init__(self, *, total, disable, **_):
      super().__init__(self)
      self.total, self.done, self.shown = total, 0, terminal if disable is None else not disable
      bars.append(self)

    def update(self, count):
      self.done += count

  monkeypatch.setattr(producer_lib, "tqdm", Bar)
  made = make(lambda n, sample: float(sample), _carries=carries, _shows=not concurrent)
  if carries:
    made.sampler = Goes(*[[[(n, sample, [100 * n + sample], False) for n in (0, 1) for sample in (0, 1)],
                           [(n, sample, [1], True) for n in (0, 1) for sample in (0, 1)]]])
  roll(made, size=ONE_STEP)
  assert [(bar.total, bar.done, bar.shown) for bar in bars] == [(4, 4, shown)]


@pytest.mark.parametrize("holds", [False, True])
def test_closing_lets_rows_go_and_ends_what_computes_rewards(holds):
  closed = []
  made = make(lambda n, sample: 1.0, _held=SimpleNamespace(clear=lambda: closed.append("rows")) if holds else None)
  made.scorer.close = lambda: closed.append("rewards")
  made.close()
  assert closed == ["rows"] * holds + ["rewards"]


def test_a_stop_leaves_off_what_goes_on():
  made = make(lambda n, sample: 1.0, _carries=True)
  made.sampler = Goes([[(n, sample, [100 * n + sample, 1], True) for n in (12, 13) for sample in (0, 1)]])
  asked = iter([False, False, True])
  assert roll(made, 1, carrying(made), stopped=lambda: next(asked), size=ONE_STEP) is None


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
      carried=[Group(9, "7/0/0", [text, begun])], oldest=3, changes=[(2, 5)], kept=1,
      remembered=[Remembered(1, 4, [(Trajectory(text.ids, np.ones(2, np.float32), text.logprobs, 0, ""), 0.5, 1)])])
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
      assert [(g.rollout, g.version, [(t.ids.tolist(), t.logprobs.tolist(), *more) for t, *more in g.members])
              for g in again.remembered] == [(1, 4, [([4, 5], [-1, -2], 0.5, 1)])] * len(made.remembered)
      assert [(g.number, g.seed, [(t.ids.tolist(), t.versions.tolist(), t.finish_reason, t.stop_reason)
                                  for t in g.texts]) for g in again.carried] == [
          (g.number, g.seed, [(t.ids.tolist(), t.versions.tolist(), t.finish_reason, t.stop_reason)
                              for t in g.texts]) for g in made.carried]
