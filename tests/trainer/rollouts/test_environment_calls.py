"""Calls of environments with a limit of time: one that hangs costs its episode alone."""

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


@pytest.fixture(autouse=True)
def nobody_left(monkeypatch):
  monkeypatch.setattr(calls, "_left", [])
  ENDED.clear()


def test_a_call_that_hangs_costs_its_own_episode(tmp_path, monkeypatch, caplog):
  monkeypatch.setattr("tests.trainer.rollouts.test_environment.HERE", HERE)
  rows = [{"q": "Hi"}, {"q": "a", "step": "sleep"}, {"q": "b", "reset": "lock"}, {"q": "c", "step": "loop"},
          {"q": "d", "step": "socket"}, {"q": "e", "step": "fails"}, {"q": "f"}]
  items, episodes = setup(tmp_path, rows, env="Hangs", environment_timeout_seconds=1.0)
  began = time.monotonic()
  found = [e for group in episodes.run(items, 1, Sampler(TINY, lambda *_: "a"), 0) for e in group]
  assert 4.0 <= time.monotonic() - began < 60
  assert [e.trajectory.finish_reason for e in found] == ["stop", *["timeout"] * 4, "stop", "stop"]
  assert [e.failed for e in found] == [False, *[True] * 5, False]
  assert [math.isnan(e.reward) for e in found] == [False, *[True] * 5, False] and found[0].reward == 1.0
  assert episodes.metrics(found) == {"rollout/timeouts": 4.0}
  told = [r.getMessage() for r in caplog.records if "took longer" in r.getMessage()]
  assert len(told) == 4 and all("environment_timeout_seconds=1" in t and ".py:" in t for t in told)
  assert any("test_environment_calls.py" in t and "in _hang" in t for t in told)
  until = time.monotonic() + 10
  def others():
    return [t for t in threading.enumerate() if t.name == "environment" and t not in calls._left]

  while ("loop" not in ENDED or others()) and time.monotonic() < until:  # a loop is ended
    time.sleep(0.01)
  assert ENDED == ["loop"] and not others()


def test_without_a_limit_calls_are_made_where_they_are_asked_for():
  assert calls.Calls(None)(threading.current_thread) is threading.current_thread()
  made = calls.Calls(5.0)
  first, second = made(threading.current_thread), made(threading.current_thread)
  assert first is second is not threading.current_thread() and first.daemon
  with pytest.raises(KeyError, match="gone"):
    made(lambda: {}["gone"])
  made.close()
  first.join(5)
  assert not first.is_alive()


def test_where_too_many_hang_the_run_stops(monkeypatch):
  monkeypatch.setattr(calls, "MOST_LEFT", 2)
  release = threading.Event()
  for _ in range(2):
    with pytest.raises(calls.TookTooLong):
      calls.Calls(0.05)(release.wait)
  with pytest.raises(ConfigError, match="3 calls of rollout.environment hang at the same time"):
    calls.Calls(0.05)(release.wait)
  release.set()
  for thread in calls._left:
    thread.join(5)
  with pytest.raises(calls.TookTooLong):  # the others have come back
    calls.Calls(0.05)(threading.Event().wait)


def test_a_limit_of_nothing_is_refused(tmp_path):
  with pytest.raises(ConfigError, match="rollout.environment_timeout_seconds is 0"):
    setup(tmp_path, [{"q": "Hi"}], env="Guess", environment_timeout_seconds=0.0)
