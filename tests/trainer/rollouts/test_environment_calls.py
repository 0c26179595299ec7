"""Calls of environments with a limit of time: one that hangs costs its episode alone."""

import asyncio
import functools
import math
import socket
import sqlite3
import threading
import time

import pytest

from tests.trainer.rollouts.test_environment import TINY, Sampler, setup
from trainer.errors import ConfigError
from trainer.rollouts import environment_calls as calls
from trainer.rollouts.environment import Turn

pytestmark = [pytest.mark.host_patches, pytest.mark.timeout(60)]

HERE = "tests.trainer.rollouts.test_environment_calls"
ENDED: list[str] = []


def _hang(how):
  if how == "sleep":
    time.sleep(1e6)
  if how == "lock":
    threading.Event().wait()
  if how == "socket":
    ours, theirs = socket.socketpair()
    ours.recv(1)
  try:
    while how in ("loop", "swallows"):
      try:
        time.sleep(0.001)
      except Exception:
        pass
  finally:
    ENDED.append(how)


class Hangs:
  """Hangs in the call and in the way that the record says; it has a thing that works in one thread only."""

  def __init__(self):
    self.db = sqlite3.connect(":memory:")

  def reset(self, prompt, /, reset=None, step=None):
    self.how = step
    if reset:
      _hang(reset)

  def step(self, completion):
    assert self.db.execute("select 1").fetchone() == (1,)
    if self.how and self.how != "fails":
      _hang(self.how)
    if self.how == "fails":
      raise RuntimeError("as ever")
    return Turn(reward=1.0, done=True)


def together(made, functions, most):
  """The answers to a call of each environment, of at most so many at the same time."""
  all_of = calls.Together(most)
  for one, function in zip(made, functions, strict=True):
    all_of.start(one, function)
  return all_of.answers(made)


def call(made, function):
  answer, = together([made], [function], 1)
  if answer.error is not None:
    raise answer.error
  return answer.value


@pytest.fixture(autouse=True)
def nobody_left(monkeypatch):
  monkeypatch.setattr(calls, "_left", [])
  ENDED.clear()


def test_a_call_that_hangs_costs_its_own_episode(tmp_path, monkeypatch, caplog):
  before = threading.enumerate()  # other tests' that hang as well
  monkeypatch.setattr("tests.trainer.rollouts.test_environment.HERE", HERE)
  rows = [{"q": "Hi"}, {"q": "a", "step": "sleep"}, {"q": "b", "reset": "lock"}, {"q": "c", "step": "loop"},
          {"q": "d", "step": "socket"}, {"q": "e", "step": "fails"}, {"q": "f"}]
  items, episodes = setup(tmp_path, rows, env="Hangs", environment_timeout_seconds=1.0)
  began = time.monotonic()
  found = [e for group in episodes.run(items, 1, Sampler(TINY, lambda *_: "a"), 0) for e in group]
  assert 2.0 <= time.monotonic() - began < 60  # one reset, then steps, all at the same time
  assert [e.trajectory.finish_reason for e in found] == ["stop", *["timeout"] * 4, "stop", "stop"]
  assert [e.failed for e in found] == [False, *[True] * 5, False]
  assert [math.isnan(e.reward) for e in found] == [False, *[True] * 5, False] and found[0].reward == 1.0
  assert episodes.metrics(found) == {"rollout/timeouts": 4.0}
  told = [r.getMessage() for r in caplog.records if "took longer" in r.getMessage()]
  assert len(told) == 4 and all("environment_timeout_seconds=1" in t and ".py:" in t for t in told)
  assert any("test_environment_calls.py" in t and "in _hang" in t for t in told)
  until = time.monotonic() + 10
  def others():
    return [t for t in threading.enumerate() if t.name == "environment" and t not in [*calls._left, *before]]

  while ("loop" not in ENDED or others()) and time.monotonic() < until:  # a loop is ended
    time.sleep(0.01)
  assert ENDED == ["loop"] and not others()


def test_an_environment_has_a_thread_of_its_own():
  """Or none, where nothing is limited."""
  assert call(calls.Calls(None, in_thread=False), threading.current_thread) is threading.current_thread()
  for made in (calls.Calls(5.0, in_thread=False), calls.Calls(None)):
    first, second = call(made, threading.current_thread), call(made, threading.current_thread)
    assert first is second is not threading.current_thread() and first.daemon
    with pytest.raises(KeyError, match="gone"):
      call(made, lambda: {}["gone"])
    made.close()
  first.join(5)
  assert not first.is_alive()


def test_where_too_many_hang_the_run_stops(monkeypatch):
  monkeypatch.setattr(calls, "MOST_LEFT", 2)
  release = threading.Event()
  for _ in range(2):
    with pytest.raises(calls.TookTooLong):
      call(calls.Calls(0.05), release.wait)
  with pytest.raises(ConfigError, match="3 calls of rollout.environment hang at the same time"):
    call(calls.Calls(0.05), release.wait)
  release.set()
  for thread in calls._left:
    thread.join(5)
  with pytest.raises(calls.TookTooLong):  # the others have come back
    call(calls.Calls(0.05), threading.Event().wait)


def test_those_that_can_end_are_given_the_time(monkeypatch):
  """Many coroutines that hang at once are cancelled, and no reason to stop."""
  monkeypatch.setattr(calls, "MOST_LEFT", 2)
  many = [calls.Calls(0.1) for _ in range(8)]
  found = together(many, [functools.partial(_await, made, asyncio.Event().wait) for made in many], 8)
  assert all(isinstance(answer.error, calls.TookTooLong) for answer in found)


def _await(made, function):
  return made.result(function())


# ---------------------------------------------------------------------------------------------- at the same time


def test_so_many_are_called_at_the_same_time():
  """A barrier that as many pass as may run, and a count that never is above."""
  barrier, lock, running, most = threading.Barrier(4), threading.Lock(), [0], [0]

  def step(number):
    with lock:
      running[0] += 1
      most[0] = max(most[0], running[0])
    barrier.wait(30)
    time.sleep(0.02)  # in which others would begin that may not yet
    with lock:
      running[0] -= 1
    return number

  made = [calls.Calls(None) for _ in range(12)]
  found = together(made, [functools.partial(step, n) for n in range(12)], 4)
  assert [answer.value for answer in found] == list(range(12)) and most == [4]
  for one in made:
    one.close()


class InTurn:
  """Answers in the order that the record's ranks say, whatever the order of the episodes; as a coroutine, or not."""

  done: dict[int, threading.Event] = {}
  order: list[int] = []

  def reset(self, prompt, /, rank, fails=False):
    self.rank, self.fails = rank, fails

  def step(self, completion):
    assert InTurn.done[self.rank].wait(30)
    return self._end(completion)

  def _end(self, completion):
    InTurn.order.append(self.rank)
    InTurn.done[self.rank + 1].set()
    if self.fails:
      raise RuntimeError(f"no answer to {completion}")
    return Turn(f"after {completion}", self.rank / 8, done=completion == "2")


class AsyncInTurn(InTurn):

  async def step(self, completion):
    while not InTurn.done[self.rank].is_set():
      await asyncio.sleep(0.001)
    return self._end(completion)


@pytest.mark.parametrize("env", ["InTurn", "AsyncInTurn"])
def test_the_order_in_which_steps_end_changes_nothing(tmp_path, monkeypatch, caplog, env):
  monkeypatch.setattr("tests.trainer.rollouts.test_environment.HERE", HERE)
  found = []
  for ranks in (range(6), [3, 5, 0, 1, 4, 2]):
    rows = [{"q": f"q{i}", "rank": rank, "fails": i == 4} for i, rank in enumerate(ranks)]
    items, episodes = setup(tmp_path, rows, env=env, max_turns=1)
    InTurn.done, InTurn.order = {rank: threading.Event() for rank in range(7)}, []
    InTurn.done[0].set()
    groups = episodes.run(items, 1, Sampler(TINY, lambda *_: "a"), 0)
    assert InTurn.order == list(range(6))
    found.append([(e.trajectory.ids.tolist(), e.trajectory.logprobs.tolist(), e.completion, e.failed)
                  for (e,) in groups])
    assert [e.reward for (e,) in groups if not e.failed] == [rank / 8 for i, rank in enumerate(ranks) if i != 4]
  assert found[0] == found[1] and [failed for *_, failed in found[0]] == [i == 4 for i in range(6)]
  told = [r.getMessage() for r in caplog.records if "no answer to a" in r.getMessage()]
  assert len(told) == 2 and all("in 1 of 6 episodes" in t and "a.jsonl:5, whose prompt is 'q4'" in t for t in told)


class Connected:
  """Has a thing that works in one event loop only, and hangs in it where the record says so, `after` so many turns."""

  async def reset(self, prompt, /, hangs=None, after=0):
    self.lock, self.hangs, self.before = asyncio.Lock(), hangs, after
    await self.lock.acquire()
    return "?"

  async def step(self, completion):
    waiting = asyncio.ensure_future(self.lock.acquire())
    await asyncio.sleep(0)
    self.lock.release()
    assert await waiting
    self.before -= 1
    if self.before >= 0:
      return Turn(completion, 0.5)
    if self.hangs == "await":
      try:
        await asyncio.sleep(1e6)
      finally:
        ENDED.append("await")
    if self.hangs == "block":
      _hang("loop")
    return Turn(completion, 0.5)


@pytest.mark.parametrize("late, reward", [(None, math.nan), (-0.25, -0.25), (0.0, 0.0)])
def test_coroutines_are_limited_and_what_hangs_has_the_reward_that_is_set(tmp_path, monkeypatch, caplog, late, reward):
  monkeypatch.setattr("tests.trainer.rollouts.test_environment.HERE", HERE)
  rows = [{"q": "a"}, {"q": "b", "hangs": "await"}, {"q": "c", "hangs": "block"}, {"q": "d"},
          {"q": "e", "hangs": "await", "after": 1}]
  items, episodes = setup(tmp_path, rows, env="Connected", max_turns=2, environment_timeout_seconds=1.0,
                          environment_timeout_reward=late)
  found = [e for group in episodes.run(items, 1, Sampler(TINY, lambda *_: "a"), 0) for e in group]
  assert [e.trajectory.finish_reason for e in found] == ["stop", "timeout", "timeout", "stop", "timeout"]
  # What the last one had before counts, too.
  assert [e.reward for e in found] == pytest.approx([1.0, reward, reward, 1.0, 0.5 + reward], nan_ok=True)
  assert [e.failed for e in found] == [False, late is None, late is None, False, late is None]
  assert episodes.metrics(found) == {"rollout/timeouts": 3.0}
  assert "environment_timeout_seconds=1" in caplog.text and "in _hang" in caplog.text
  until = time.monotonic() + 10
  while len(ENDED) < 3 and time.monotonic() < until:
    time.sleep(0.01)
  assert sorted(ENDED) == ["await", "await", "loop"]


def test_a_reset_that_hangs_has_no_reward(tmp_path, monkeypatch):
  monkeypatch.setattr("tests.trainer.rollouts.test_environment.HERE", HERE)
  items, episodes = setup(tmp_path, [{"q": "a", "reset": "loop"}], env="Hangs", environment_timeout_seconds=0.5,
                          environment_timeout_reward=-1.0)
  (e,), = episodes.run(items, 1, Sampler(TINY, lambda *_: "a"), 0)
  assert e.failed and math.isnan(e.reward)


def test_a_limit_of_nothing_is_refused(tmp_path):
  with pytest.raises(ConfigError, match="rollout.environment_timeout_seconds is 0"):
    setup(tmp_path, [{"q": "Hi"}], env="Guess", environment_timeout_seconds=0.0)


def test_too_many_that_hang_at_the_same_time_end_the_run(monkeypatch):
  release = threading.Event()
  hanging = [threading.Thread(target=release.wait, daemon=True) for _ in range(3)]
  for thread in hanging:
    thread.start()
  monkeypatch.setattr(calls, "GRACE_SECONDS", 0.0)
  monkeypatch.setattr(calls, "_left", [*hanging, threading.Thread()])  # one has ended
  monkeypatch.setattr(calls, "MOST_LEFT", 3)
  calls._check_left()
  assert calls._left == hanging
  monkeypatch.setattr(calls, "MOST_LEFT", 2)
  with pytest.raises(calls.TooManyLeft, match=r"^3 calls of rollout.environment hang at the same time, each for "
                     r"longer than rollout.environment_timeout_seconds, the last \(.*, in \w+\). Correct"):
    calls._check_left()
  release.set()
