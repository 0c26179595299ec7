"""Episodes whose turns are interleaved: what is asked when, and the same episodes as turn by turn."""

import json
import random
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from tests.trainer import rollout_runs
from tests.trainer.rollout_runs import assert_same_state, rows_of, table, write_prompts
from tests.trainer.rollout_toys import Echo
from trainer import train
from trainer.errors import ConfigError
from trainer.generate.completion import Completion
from trainer.generate.sampler import Sampler
from trainer.rollouts.environment_calls import Answer, Calls, TookTooLong
from trainer.rollouts.episode import Playing
from trainer.rollouts.turns import Answers, Asked, Interleaved, _or_error

pytestmark = pytest.mark.host_patches

HERE = "tests.trainer.rollouts.test_turns"


class Noting(Echo):
  """Tells which turn was answered, in the order in which they were; how long each takes is chance."""

  turns_answered: list[int] = []
  most_seconds = 0.0

  def step(self, completion):
    time.sleep(random.random() * self.most_seconds)
    turn = super().step(completion)
    Noting.turns_answered.append(self.turns)
    return turn


class Fails(Echo):
  """Raises, or hangs, in the second turn of some prompts."""

  def reset(self, prompt, /, number=0, **columns):
    super().reset(prompt)
    self.number = number

  def step(self, completion):
    turn = super().step(completion)
    if self.turns == 2 and self.number % 3 == 1:
      raise RuntimeError("no second turn")
    if self.turns == 2 and self.number % 3 == 2:
      threading.Event().wait()
    return turn


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
  return write_prompts(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
  """The host looks after every other token; every fifth token ends a completion."""
  monkeypatch.setitem(Sampler.__init__.__kwdefaults__, "chunk", 2)
  monkeypatch.setattr(Noting, "turns_answered", [])
  with rollout_runs.stops_often():
    yield


def played(prompts, workdir, share=0.125, env="Noting", **rollout):
  """(the run, its rollout's table, the turns in the order in which they were answered)."""
  Noting.turns_answered.clear()
  c = rollout_runs.config(prompts, None, total_steps=1, rollout=dict(
      environment=f"{HERE}.{env}", updates=1, max_new_tokens=32, turn_share=share) | rollout)
  run = train(c, workdir)
  return run, table(workdir, 1), list(Noting.turns_answered)


def test_the_episodes_are_those_of_turn_by_turn(prompts, tmp_path):
  """16 episodes in 8 rows: the same tokens by the same log-probs; but some are answered while others' turns before
  go on."""
  one, expected, in_turn = played(prompts, tmp_path / "turns", share=1.0)
  two, found, turns = played(prompts, tmp_path / "interleaved")
  assert in_turn == sorted(in_turn) and sorted(turns) == in_turn and turns != in_turn
  assert {2, 3} <= set(turns[:turns.index(1) + 1] + turns[:len(turns) - turns[::-1].index(1)])
  assert [line["completion"] for line in found] == [line["completion"] for line in expected]
  a, b = one.data._now.experience, two.data._now.experience
  for key in ("tokens", "weights", "lengths"):
    np.testing.assert_array_equal(getattr(a, key), getattr(b, key), err_msg=key)
  np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
  row = rows_of(tmp_path / "interleaved")[1]
  assert row["sampling/sampling_logp_difference/max"] < 1e-5
  assert row["reward"] == pytest.approx(rows_of(tmp_path / "turns")[1]["reward"], abs=1e-6)


def test_how_long_environments_take_changes_nothing(prompts, tmp_path, monkeypatch):
  """Not a bit of the parameters, in two runs whose answers come in other orders."""
  monkeypatch.setattr(Noting, "most_seconds", 0.02)
  (one, a, first), (two, b, second) = (played(prompts, tmp_path / name) for name in "ab")
  assert a == b and first != second
  assert_same_state(one.state, two.state)
  assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")


@pytest.mark.parametrize("share", [1.0, pytest.param(0.125, marks=pytest.mark.slow)])
def test_texts_that_are_kept_between_turns_change_no_token(prompts, tmp_path, share):
  """Turn by turn and interleaved: all episodes of 16 go on from what is kept; with room for three, most do not."""
  one, expected, _ = played(prompts, tmp_path / "again", share=share)
  rows = {}
  for kept in (16, 3):
    run, found, _ = played(prompts, tmp_path / str(kept), share=share, kept_texts=kept, prefill_chunk=8)
    assert [line["completion"] for line in found] == [line["completion"] for line in expected]
    a, b = one.data._now.experience, run.data._now.experience
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
    rows[kept] = rows_of(tmp_path / str(kept))[1]
    assert rows[kept]["sampling/sampling_logp_difference/max"] < 1e-5
  run, reused, given_up = ({kept: row[f"rollout/{name}"] for kept, row in rows.items()}
                           for name in ("prompt_tokens_run", "prompt_tokens_reused", "texts_given_up"))
  assert run[16] + reused[16] == run[3] + reused[3]  # all tokens of all turns' prompts
  assert reused[16] > run[16] / 2 and reused[3] < reused[16] / 2 and given_up[16] == 0 < given_up[3]
  assert "rollout/prompt_tokens_run" not in rows_of(tmp_path / "again")[1]


def test_beginnings_that_prompts_share_change_no_token(prompts, tmp_path):
  """Behind 70 letters in common. A rollout that is sampled again is the same, to the bit."""
  file = tmp_path / "long.jsonl"
  file.write_text("".join(json.dumps(dict(prompt=70 * "x" + f" {n}: ", number=n, answer="a")) + "\n" for n in range(8)))
  runs = []
  for name, shares in (("alone", False), ("shared", True), ("again", True)):
    c = rollout_runs.config([file], seq_len=96, total_steps=1, rollout=dict(share_beginnings=shares))
    runs.append(train(c, tmp_path / name).data._now.experience)
  alone, shared, again = runs
  np.testing.assert_array_equal(alone.tokens, shared.tokens)
  np.testing.assert_allclose(alone.logprobs, shared.logprobs, atol=2e-5)
  np.testing.assert_array_equal(shared.logprobs, again.logprobs)
  rows = {name: rows_of(tmp_path / name)[1] for name in ("alone", "shared")}
  assert rows["shared"]["rollout/prompt_tokens_shared"] >= 3 * 70
  assert "rollout/prompt_tokens_shared" not in rows["alone"]


def test_what_fails_or_hangs_costs_its_own_episode(prompts, tmp_path):
  run, found, _ = played(prompts, tmp_path / "w", env="Fails", environment_timeout_seconds=1.0, num_prompts=8)
  kinds = {int(line["prompt"].split()[-1][:-1]) % 3: [] for line in found}
  for line in found:
    kinds[int(line["prompt"].split()[-1][:-1]) % 3].append(line)
  assert all(line["reward"] is not None for line in kinds.pop(0)) and set(kinds) == {1, 2}
  for kind, lines in kinds.items():
    reached = [line for line in lines if line["reward"] is None]
    assert reached and {line["finish_reason"] == "timeout" for line in reached} == {kind == 2}
  assert rows_of(tmp_path / "w")[1]["rollout/timeouts"] == sum(line["reward"] is None for line in kinds[2])


def test_episodes_that_are_alike_are_sampled_together_and_each_completion_is_its_own_episodes():
  """Alike: of the same tokens, room and images. Two that are alike to the sample share a completion."""
  def playing(sample, images=("a",), room=5, ids=(1, 2)):
    return SimpleNamespace(ids=np.array(ids, np.int32), images=images, sample=sample, room=room, turns=0,
                           prompt_length=len(ids), weights=np.zeros(len(ids)))

  episodes = [playing(0), playing(1), playing(0, images=("b",)), playing(2, room=4), playing(0, ids=(1, 3)), playing(1)]
  asked = Asked(lambda episode: episode.room, sees=True)
  prompts, options = asked.ask(episodes)
  assert [ids.tolist() for ids in prompts] == [[1, 2], [1, 2], [1, 2], [1, 3]]
  assert (options["samples"], options["max_new_tokens"]) == ([[0, 1], [0], [2], [0]], [5, 5, 4, 5])
  assert options["images"] == [["a"], ["b"], ["a"], ["a"]]
  more = playing(0, ids=(9,))
  assert [ids.tolist() for ids in asked.ask([more])[0]] == [[9]]
  said = [SimpleNamespace(prompt=prompt, sample=sample) for prompt, sample in ((1, 0), (0, 1), (4, 0))]
  assert [(episode is expected, completion) for (episode, completion), expected in zip(
      asked.of(said), (episodes[2], episodes[1], episodes[5], more), strict=True)] == [
          (True, said[0]), (True, said[1]), (True, said[1]), (True, said[2])]


def test_what_was_said_last_and_never_run_has_no_experts():
  item = SimpleNamespace(prompt=SimpleNamespace(ids=np.arange(2), images=()), content="abc", number=0)
  episode = Playing(item, 0, Calls(None, True))
  of_three = np.array([5, 6, 7], np.int16).reshape(3, 1, 1)
  episode.add_completion(SimpleNamespace(ids=np.array([3]), full_logprobs=np.zeros(1), experts=of_three,
                                         finish_reason="stop", stop_reason=None), "a", "a")
  episode.add_observation(np.array([4, 5]), "b")
  assert episode.result().trajectory.experts.ravel().tolist() == [5, 6, 7, -1, -1]


def test_experts_are_those_that_were_chosen_when_a_token_was_said():
  """Also expert 0; what was run later as a part of a prompt fills in where nothing was known."""
  item = SimpleNamespace(prompt=SimpleNamespace(ids=np.arange(1), images=()), content="abc", number=0)
  episode = Playing(item, 0, Calls(None, True))
  for experts in ([3, 0, -1], [1, 1, 1, 1, 4]):
    said = SimpleNamespace(ids=np.array([3, 4]), full_logprobs=np.zeros(2), finish_reason="stop", stop_reason=None,
                           experts=np.array(experts, np.int16).reshape(-1, 1, 1))
    episode.add_completion(said, "a", "a")
  assert episode.experts.ravel().tolist() == [3, 0, 1, 1, 4]


def test_answers_are_waited_for_a_look_later_when_they_are_enough():
  """16 episodes of one prompt, of which an eighth are 2; an answer of which nobody is in need is let alone."""
  prompt = SimpleNamespace(ids=np.arange(3), images=())
  item = SimpleNamespace(prompt=prompt, content="abc", number=0)
  episodes = [Playing(item, sample, Calls(None, True)) for sample in range(16)]
  told, gate = [], threading.Event()

  def step(episode):
    gate.wait(30)
    return {"reward": None, "added": episode.sample}

  def answered(those, answers):
    told.append([answer["added"] for answer in answers])
    for episode in those:
      episode.over = episode.sample % 2 == 1
      episode.ids = np.arange(4)

  def said(episode, completion):
    assert episode.sample == completion.sample

  asked = Asked(lambda episode: 9, False, 2)
  prompts, options = asked.ask(episodes)
  assert [p.tolist() for p in prompts] == [[0, 1, 2]] and options == {
      "samples": [[*range(16)]], "max_new_tokens": [9], "keep": [True]}
  turns = Interleaved(asked, Answers(4), step, said, answered, episodes, 1 / 8)

  def ended(*samples, prompt=0):
    return [Completion(prompt, n, np.array([1]), np.zeros(1), np.zeros(1), "stop") for n in samples]

  nothing = ([], {"samples": [], "max_new_tokens": [], "keep": []})
  assert turns.more([], False) == ([], {}, 0)
  assert turns.more(ended(5), False) == ([], {}, 1) == turns.more([], False)  # one is not enough
  assert turns.more(ended(0, 2, 3), False) == ([], {}, 4) and not told  # nor do these count before the next look
  gate.set()
  found, options, coming = turns.more(ended(7), False)
  assert told == [[5, 0, 2, 3]] and coming == 1  # in the order in which they were asked for
  assert [ids.tolist() for ids in found] == [[0, 1, 2, 3]] and options["samples"] == [[0, 2]]
  assert turns.more(ended(2, prompt=1), False)[2] == 2  # prompts are counted on
  assert turns.more([], True)[2] == 0 and told[1] == [7, 2]  # nothing else is left to do
  assert turns.more([], True) == (*nothing, 0)
  assert turns.more(ended(1, 9, 11, 13, 15), True)[2] == 0 and told[2] == [1, 9, 11, 13, 15]  # that ended just now, too
  assert turns.more(ended(4), False)[2] == 1 and turns.more([], False)[2] == 0 and told[3] == [4]  # of 8 that go on
  for episode in episodes:
    episode.calls.close()


def test_without_an_environment_there_is_nothing_to_interleave_or_to_keep(prompts, tmp_path):
  for key, value, says in (("turn_share", 0.5, "rollout.turn_share is 0.5, but nothing answers completions"),
                           ("turn_share", 0.0, "it must be above 0"), ("kept_texts", -1, "it must be at least 0"),
                           ("kept_texts", 4, "rollout.kept_texts is 4, but nothing answers completions")):
    with pytest.raises(ConfigError, match=says):
      train(rollout_runs.config(prompts, rollout={key: value}), tmp_path / "w")


def test_what_a_call_raised_is_its_episode_s_unless_it_ends_the_run():
  def fails():
    raise ValueError("no turn")

  try:
    fails()
  except ValueError as error:
    told = _or_error(Answer(error=error))
  line = fails.__code__.co_firstlineno + 1
  assert told == {"error": f"ValueError: no turn ({__file__}:{line}, in fails)", "late": False}
  assert _or_error(Answer({"reward": 1.0})) == {"reward": 1.0}
  assert _or_error(Answer(error=TookTooLong("too long (a.py:3)"))) == {"error": "too long (a.py:3)", "late": True}
  with pytest.raises(KeyboardInterrupt):
    _or_error(Answer(error=KeyboardInterrupt()))
