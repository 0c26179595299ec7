"""Calls of one environment, with a limit of time: one that hangs costs its episode, not the run.

Python cannot end a thread. So each environment has a thread of its own, in which it is made and every call of it runs.
When a call takes too long its thread is left behind, with an exception that it gets as soon as it runs Python code
again: a loop ends by that; what waits in C for ever stays, as a daemon that does not keep the program from ending. No
more than MOST_LEFT may stay at a time. Free of JAX.
"""

import ctypes
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from trainer.errors import ConfigError

# Threads that may hang at a time; more, and the environment itself is broken.
MOST_LEFT = 16
_left: list[threading.Thread] = []


class TookTooLong(Exception):
  """A call that was left behind, and where it was."""


class TooManyLeft(ConfigError):
  """More calls hang than may."""


class _End(BaseException):
  """What ends a call that was left behind, if it still runs Python code."""


class Calls:
  """Makes the calls of one environment.

  Args:
    seconds: what each may take; None: any time, and they run in the caller's thread.
  """

  def __init__(self, seconds: float | None):
    self._seconds = seconds
    self._thread: threading.Thread | None = None
    self._asked: queue.SimpleQueue = queue.SimpleQueue()
    self._answers: queue.SimpleQueue = queue.SimpleQueue()

  def __call__(self, function: Callable[[], Any]) -> Any:
    """What it returns; what it raises is raised.

    Raises:
      TookTooLong: it has not ended in time. There must be no further call.
      TooManyLeft: nor have too many others.
    """
    if self._seconds is None:
      return function()
    if self._thread is None:
      self._thread = threading.Thread(target=_work, args=(self._asked, self._answers), name="environment", daemon=True)
      self._thread.start()
    self._asked.put(function)
    try:
      value, error = self._answers.get(timeout=self._seconds)
    except queue.Empty:
      raise self._leave() from None
    if error is not None:
      raise error
    return value

  def close(self) -> None:
    """Ends the thread, unless it hangs."""
    self._asked.put(None)

  def _leave(self) -> Exception:
    thread = self._thread
    frame = sys._current_frames().get(thread.ident)
    stack = traceback.extract_stack(frame) if frame else []
    at = f" ({stack[-1].filename}:{stack[-1].lineno}, in {stack[-1].name})" if stack else ""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_End))
    self.close()
    _left[:] = [*(other for other in _left if other.is_alive()), thread]
    if len(_left) > MOST_LEFT:
      return TooManyLeft(f"{len(_left)} calls of rollout.environment hang at the same time, each for longer than "
                         f"rollout.environment_timeout_seconds={self._seconds:g}, the last{at}. Correct the "
                         "environment, or give its calls more time.")
    return TookTooLong(f"took longer than rollout.environment_timeout_seconds={self._seconds:g}{at}")


def _work(asked: queue.SimpleQueue, answers: queue.SimpleQueue) -> None:
  try:
    while (function := asked.get()) is not None:
      answer: tuple[Any, BaseException | None]
      try:
        answer = function(), None
      except BaseException as e:
        answer = None, e
      answers.put(answer)
  except _End:  # it came when the call had just ended
    pass
