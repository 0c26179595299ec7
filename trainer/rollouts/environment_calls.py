"""Calls of environments, of many at the same time, each with a limit of time: one that hangs costs its episode, not the
run.

Python cannot end a thread. So each environment has a thread of its own, in which it is made and every call of it runs;
what is a coroutine runs in an event loop of that thread. When a call takes too long its thread is left behind, with an
exception that it gets as soon as it runs Python code again, and its coroutine is cancelled: a loop ends by that; what
waits in C for ever stays, as a daemon that does not keep the program from ending. No more than MOST_LEFT may stay at a
time. Free of JAX.

Reward functions are called in processes instead (reward_pool.py): such a call is of a function that remembers nothing,
so that any process will do. An environment is an object that lives as long as its episode, and mostly waits for others.
"""

import asyncio
import contextlib
import ctypes
import functools
import inspect
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from trainer.errors import ConfigError

# Threads that may hang at a time; more, and the environment itself is broken.
MOST_LEFT = 16
# What fails an episode, and not the run: code that the policy wrote may call exit(), a client's request be cancelled.
FAILURES = (Exception, SystemExit, asyncio.CancelledError)
GRACE_SECONDS = 1.0  # for those that can end
_left: list[threading.Thread] = []


class TookTooLong(Exception):
  """A call that was left behind, and where it was."""


class TooManyLeft(ConfigError):
  """More calls hang than may."""


class _End(BaseException):
  """What ends a call that was left behind, if it still runs Python code."""


class Answer(NamedTuple):
  """What a call returned, or what it raised."""

  value: Any = None
  error: BaseException | None = None


class Calls:
  """Makes the calls of one environment.

  Args:
    seconds: what each may take; None: any time.
    in_thread: in a thread of its own, which a limit of time needs; else they run in the caller's.
  """

  def __init__(self, seconds: float | None, in_thread: bool = True):
    self.seconds, self.in_thread = seconds, in_thread or seconds is not None
    self._thread: threading.Thread | None = None
    self._asked: queue.SimpleQueue = queue.SimpleQueue()
    self._runner: asyncio.Runner | None = None
    self._task: asyncio.Task | None = None

  def start(self, function: Callable[[], Any], report: Callable[[Answer], Any]) -> None:
    """Begins a call, of which `report` is told the answer in the thread that it runs in. There may be one at a time."""
    if not self.in_thread:
      report(_answer(function))
      return
    if self._thread is None:
      self._thread = threading.Thread(target=self._work, name="environment", daemon=True)
      self._thread.start()
    self._asked.put((function, report))

  def result(self, value: Any) -> Any:
    """`value`; of a coroutine what it returns. To be called within a call.

    One environment has one event loop, in which its connections live on between two calls.
    """
    if not inspect.isawaitable(value):
      return value
    if self._runner is None:
      self._runner = asyncio.Runner()
    return self._runner.run(self._awaited(value))

  def leave(self) -> TookTooLong:
    """Leaves the call that runs behind. There must be no further one."""
    thread, task = self._thread, self._task
    at = _place(thread, task)
    if task is not None:
      with contextlib.suppress(RuntimeError):  # it has just ended, and its loop with it
        self._runner.get_loop().call_soon_threadsafe(task.cancel)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_End))
    self.close()
    _left.append(thread)
    return TookTooLong(f"took longer than rollout.environment_timeout_seconds={self.seconds:g}{at}")

  def close(self) -> None:
    """Ends the thread, unless it hangs."""
    if self.in_thread:
      self._asked.put(None)
    elif self._runner is not None:
      self._runner.close()

  async def _awaited(self, value: Awaitable[Any]) -> Any:
    self._task = asyncio.current_task()
    try:
      return await value
    finally:
      self._task = None

  def _work(self) -> None:
    try:
      while (asked := self._asked.get()) is not None:
        function, report = asked
        report(_answer(function))
    except _End:  # it came when the call had just ended
      pass
    finally:
      if self._runner is not None:
        self._runner.close()


class Together:
  """Makes calls of environments, at most so many at the same time, each with its time from when it begins."""

  def __init__(self, most: int):
    self._most = most
    self._answers: queue.SimpleQueue = queue.SimpleQueue()
    self._waiting: deque[tuple[Calls, Callable[[], Any]]] = deque()
    self._running: dict[Calls, float | None] = {}
    self._found: dict[Calls, Answer] = {}

  def start(self, calls: Calls, function: Callable[[], Any]) -> None:
    """Begins a call; where as many run as may, it begins when answers are waited for."""
    self._waiting.append((calls, function))
    self._begin()

  def answers(self, of: Sequence[Calls]) -> list[Answer]:
    """Those of calls that were started, when they are all there, in this order, in whatever order they come. A call
    whose time ran out while nobody waited, and that has ended since, has its answer.

    Raises:
      TooManyLeft: too many hang.
    """
    while not all(calls in self._found for calls in of):
      until = min((deadline for deadline in self._running.values() if deadline is not None), default=None)
      try:
        calls, answer = self._answers.get(timeout=None if until is None else max(until - time.monotonic(), 0.0))
        if calls in self._running:  # else it was left behind
          del self._running[calls]
          self._found[calls] = answer
      except queue.Empty:
        now = time.monotonic()
        for calls in [calls for calls, deadline in self._running.items() if deadline is not None and deadline <= now]:
          del self._running[calls]
          self._found[calls] = Answer(error=calls.leave())
        _check_left()
      self._begin()
    return [self._found.pop(calls) for calls in of]

  def _begin(self) -> None:
    while self._waiting and len(self._running) < self._most:
      calls, function = self._waiting.popleft()
      self._running[calls] = None if calls.seconds is None else time.monotonic() + calls.seconds
      calls.start(function, functools.partial(self._report, calls))

  def _report(self, calls: Calls, answer: Answer) -> None:
    self._answers.put((calls, answer))


def _check_left() -> None:
  """Raises TooManyLeft if too many threads that were left behind stay, after a moment in which they may end."""
  until = time.monotonic() + GRACE_SECONDS
  while True:
    _left[:] = [thread for thread in _left if thread.is_alive()]
    if len(_left) <= MOST_LEFT:
      return
    if time.monotonic() >= until:
      raise TooManyLeft(f"{len(_left)} calls of rollout.environment hang at the same time, each for longer than "
                        f"rollout.environment_timeout_seconds, the last{_place(_left[-1], None)}. Correct the "
                        "environment, or give its calls more time.")
    time.sleep(0.01)


def _answer(function: Callable[[], Any]) -> Answer:
  try:
    return Answer(function())
  except BaseException as e:
    return Answer(error=e)


def _place(thread: threading.Thread, task: asyncio.Task | None) -> str:
  """Where a call hangs: its innermost line."""
  coroutine: Any = None if task is None else task.get_coro()
  frame = sys._current_frames().get(thread.ident or 0)
  if coroutine is not None and not coroutine.cr_running:
    while getattr(coroutine.cr_await, "cr_frame", None) is not None:
      coroutine = coroutine.cr_await
    frame = coroutine.cr_frame
  stack = traceback.extract_stack(frame) if frame else []
  return f" ({stack[-1].filename}:{stack[-1].lineno}, in {stack[-1].name})" if stack else ""
