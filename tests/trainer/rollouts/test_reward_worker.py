"""One call of a reward function: what may come of it, and the process that makes calls, without a process."""

import asyncio
import os
import pickle
import queue
import re
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from trainer.rollouts import reward_worker
from trainer.rollouts.reward_worker import Call, Failure


def rewarded(function, is_async=False):
  return SimpleNamespace(function=function, is_async=is_async, arguments=lambda prompt, completions, ids, columns: dict(
      prompt=prompt, completions=completions, ids=ids, columns=columns))


def payload(ids=0):
  return pickle.dumps(("p", ["a", "b"], ids, {"answer": 7}))


def made(found):
  """What comes of a call whose function returns or raises that."""
  def function(**given):
    if isinstance(found, BaseException):
      raise found
    return found
  return reward_worker.call(rewarded(function), payload())


def test_a_function_gets_the_group_and_gives_a_score_each():
  asked = []
  outcome = reward_worker.call(rewarded(lambda **given: asked.append(given) or [1, None]), payload())
  assert outcome == [1.0, None] and isinstance(outcome[0], float)
  assert asked == [dict(prompt="p", completions=["a", "b"], ids=0, columns={"answer": 7})]
  assert made(np.array([0.5, 2])) == [0.5, 2.0] and made((np.float32(3), np.array(4))) == [3.0, 4.0]
  assert made([True, 0]) == [1.0, 0.0]


@pytest.mark.parametrize("found, what", [
    (None, "None, expected a list with one score a completion (is there a `return`?)"),
    ("ab", "a str, expected a list with one score a completion"), ({"a": 1, "b": 2}, "a dict, expected a list"),
    (0.5, "a float, expected a list"), ([1.0], "a list of 1, expected 2: one score a completion"),
    ([1.0, 2.0, 3.0], "a list of 3, expected 2"), ([1.0, "x"], "a list with a str, expected numbers or None"),
    ([1j, 1.0], "a list with a complex, expected"),
    ([1.0, float("nan")], "a list with nan, expected finite numbers (None abstains)"),
    ([float("-inf"), 1.0], "a list with -inf, expected finite"), ([[1.0], 1.0], "a list with a list, expected numbers"),
])
def test_what_a_function_must_not_return(found, what):
  outcome = made(found)
  assert isinstance(outcome, Failure) and outcome.kind.startswith(what) and outcome.at == ""
  assert outcome.message == f"returned {outcome.kind}"


def test_an_exception_has_its_kind_its_text_and_its_line():
  outcome = made(ValueError("x" * 600))
  text = "ValueError: " + "x" * 600
  assert outcome.kind == "ValueError" and outcome.message == text[:500] + " …"
  assert re.fullmatch(r".*test_reward_worker.py:\d+ in function: raise found", outcome.at)
  assert made(KeyError("k")).message == "KeyError: 'k'" and made(SystemExit(3)).kind == "SystemExit"
  exact = made(ValueError("y" * (500 - len("ValueError: "))))
  assert len(exact.message) == 500 and not exact.message.endswith("…")
  with pytest.raises(KeyboardInterrupt):
    made(KeyboardInterrupt())


def test_async_calls_run_together_and_each_has_its_time():
  order, told, second = [], {}, asyncio.Event()

  async def reward(ids, **given):
    order.append(("begins", ids))
    if ids != 2:
      await (second if ids == 1 else asyncio.Event()).wait()
    order.append(("ends", ids))
    if ids == 2:
      second.set()
      raise TimeoutError("of its own")
    return [ids, ids]

  calls = [Call(10 + n, "r", payload(n)) for n in (1, 2, 3)]
  asyncio.run(reward_worker.call_together({"r": rewarded(reward, True)}, calls, 0.5, told.__setitem__))
  assert set(order[:4]) == {("begins", 1), ("begins", 2), ("begins", 3), ("ends", 2)} and order[4:] == [("ends", 1)]
  late = Failure("timeout", "took longer than rollout.reward_timeout_seconds=0.5")
  assert told[11] == [1.0, 1.0] and told[13] == late
  assert (told[12].kind, told[12].message) == ("TimeoutError", "TimeoutError: of its own")


class Gone(BaseException):
  """What stands for the end of the process."""


class Connection:
  """One on which that is received, then nothing any more."""

  def __init__(self, *received):
    self.sent, self._received = [], list(received)

  def fileno(self):
    return 5

  def recv(self):
    if not self._received:
      threading.Event().wait()
    return self._received.pop(0)

  def send(self, what):
    self.sent.append(what)


@pytest.fixture
def process(monkeypatch):
  """`process(*received)`: what is sent by a process that ends as soon as a call names no reward."""
  def serve(*received):
    def leave(code):
      raise Gone(code)

    handlers, inherited = {}, []
    monkeypatch.setattr(reward_worker.os, "set_inheritable", lambda *given: inherited.append(given))
    monkeypatch.setattr(reward_worker.os, "_exit", leave)
    monkeypatch.setattr(reward_worker, "signal", SimpleNamespace(
        signal=handlers.__setitem__, SIGINT=signal.SIGINT, SIGTERM=signal.SIGTERM))
    monkeypatch.setattr(reward_worker, "make", make)
    connection = Connection(*received)
    try:
      reward_worker.serve(connection)
    except Gone as gone:
      connection.sent.append(gone)
    assert inherited == [(5, False)] and handlers.keys() == {signal.SIGINT, signal.SIGTERM}
    assert handlers[signal.SIGINT](1, 2) is None
    return connection.sent

  async def later(ids, **given):
    return [ids, 2]

  def make(name, section):
    if section == "bad":
      raise reward_worker.ConfigError(f"{name} cannot be")
    return rewarded(later, True) if section == "async" else rewarded(lambda ids, **given: [ids, 1])

  return serve


def test_a_process_answers_each_list_of_calls_in_turn(process, capsys):
  sent = process({"now": "x", "later": "async"}, ([Call(3, "now", payload(5)), Call(4, "now", payload(6))], None),
                 ([Call(5, "later", payload(7))], 1.0), ([Call(6, "unknown", b"")], None))
  *told, gone = sent
  assert told == [("ready",), ("begun",), ("done", 3, [5.0, 1.0]), ("done", 4, [6.0, 1.0]), ("begun",),
                  ("done", 5, [7.0, 2.0]), ("begun",)]
  assert gone.args == (1,) and "KeyError: 'unknown'" in capsys.readouterr().err


def test_a_process_that_cannot_be_says_why(process):
  assert process({"a": "x", "b": "bad"}) == [("failed", "b cannot be")]


def test_with_its_parent_it_ends_and_all_that_it_has_started(monkeypatch):
  killed, inbox = [], queue.SimpleQueue()

  def kill(group, number):
    killed.append((group, number))
    raise Gone

  class Ended(Connection):
    def recv(self):
      if not self._received:
        raise EOFError
      return self._received.pop(0)

  monkeypatch.setattr(reward_worker.os, "killpg", kill)
  with pytest.raises(Gone):
    reward_worker._receive(Ended("one", "two"), inbox)
  assert killed == [(os.getpgrp(), signal.SIGKILL)] and [inbox.get(), inbox.get()] == ["one", "two"]
