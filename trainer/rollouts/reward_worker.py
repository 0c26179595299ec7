"""One call of a reward function and what may come of it; and the process that makes such calls.

The process is started by `reward_pool.py`, with one connection to it. It gets {name: section} once and says ("ready",)
or ("failed", why); then lists of calls. To each list it says ("begun",), to each call ("done", id, outcome) as soon as
it ends. Free of JAX.
"""

import asyncio
import math
import numbers
import os
import pickle
import queue
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from trainer.errors import ConfigError
from trainer.rollouts.rewards import Reward, make

SHOWN = 500  # characters of an exception


class Failure(NamedTuple):
  """Why a call has no scores: its kind (the exception's type, say), what to tell people, and the line of code."""

  kind: str
  message: str
  at: str = ""


class Call(NamedTuple):
  """A call: its number, the reward's name and the pickled (prompt, completions, completion_ids, columns)."""

  id: int
  name: str
  payload: bytes


Outcome = list[float | None] | Failure


def timed_out(seconds: float) -> Failure:
  return Failure("timeout", f"took longer than rollout.reward_timeout_seconds={seconds:g}")


def call(reward: Reward, payload: bytes) -> Outcome:
  """The scores of one prompt's completions by a function that is not async."""
  try:
    prompt, completions, *others = pickle.loads(payload)
    return _scores(reward.function(**reward.arguments(prompt, completions, *others)), len(completions))
  except (Exception, SystemExit) as e:
    return _failure(e)


async def call_async(reward: Reward, payload: bytes, seconds: float | None) -> Outcome:
  """The scores by an async function, which gets that much time."""
  clock = asyncio.timeout(seconds)
  try:
    prompt, completions, *others = pickle.loads(payload)
    async with clock:
      found = await reward.function(**reward.arguments(prompt, completions, *others))
    return _scores(found, len(completions))
  except (Exception, SystemExit, asyncio.CancelledError) as e:
    return timed_out(seconds) if clock.expired() and isinstance(e, TimeoutError) else _failure(e)


async def call_together(rewards: dict[str, Reward], calls: list[Call], seconds: float | None,
                        report: Callable[[int, Outcome], Any]) -> None:
  """Async calls at the same time, each reported when it ends."""

  async def one(item: Call) -> None:
    report(item.id, await call_async(rewards[item.name], item.payload, seconds))

  await asyncio.gather(*map(one, calls))


def _scores(found: Any, n: int) -> Outcome:
  """What a function returned as n floats and Nones, or why it is not that."""
  if found is None:
    return _unusable("None, expected a list with one score a completion (is there a `return`?)")
  if isinstance(found, (str, bytes, dict)) or not hasattr(found, "__len__"):
    return _unusable(f"a {type(found).__name__}, expected a list with one score a completion")
  if len(found) != n:
    return _unusable(f"a list of {len(found)}, expected {n}: one score a completion")
  scores: list[float | None] = []
  for value in found:
    value = value.item() if getattr(value, "ndim", None) == 0 else value  # a scalar of NumPy's or another's
    if value is not None and not isinstance(value, numbers.Real):
      return _unusable(f"a list with a {type(value).__name__}, expected numbers or None")
    value = None if value is None else float(value)
    if value is not None and not math.isfinite(value):
      return _unusable(f"a list with {value}, expected finite numbers (None abstains)")
    scores.append(value)
  return scores


def _unusable(what: str) -> Failure:
  return Failure(what, f"returned {what}")


def _failure(e: BaseException) -> Failure:
  message = "".join(traceback.format_exception_only(e)).strip()
  message = message if len(message) <= SHOWN else message[:SHOWN] + " …"
  last = traceback.extract_tb(e.__traceback__)[-1]
  return Failure(type(e).__name__, message, f"{last.filename}:{last.lineno} in {last.name}: {last.line}")


def serve(connection: Connection) -> None:
  """Makes the calls that come in, until the other side is gone."""
  os.set_inheritable(connection.fileno(), False)  # else it would stay open with programs that functions start
  for number in (signal.SIGINT, signal.SIGTERM):
    # Sent to all processes of a job; the parent decides what becomes of it. Not SIG_IGN, which programs would inherit.
    signal.signal(number, lambda *_: None)
  inbox: queue.SimpleQueue = queue.SimpleQueue()
  threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
  try:
    rewards = {name: make(name, section) for name, section in inbox.get().items()}
  except ConfigError as e:
    connection.send(("failed", str(e)))
    return
  connection.send(("ready",))

  def report(number: int, outcome: Outcome) -> None:
    connection.send(("done", number, outcome))

  try:
    with asyncio.Runner() as runner:
      while True:
        calls, seconds = inbox.get()
        connection.send(("begun",))
        if rewards[calls[0].name].is_async:
          runner.run(call_together(rewards, calls, seconds, report))
        else:
          for item in calls:
            report(item.id, call(rewards[item.name], item.payload))
  except BaseException:  # what is no Exception, of which a call makes a Failure
    traceback.print_exc()
    os._exit(1)


def _receive(connection: Connection, inbox: queue.SimpleQueue) -> None:
  """Reads in a thread, so that the end of the parent ends this process whatever it is doing, and all it started."""
  while True:
    try:
      inbox.put(connection.recv())
    except (EOFError, OSError):
      os.killpg(os.getpgrp(), signal.SIGKILL)
