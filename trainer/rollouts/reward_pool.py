"""Scores of completions by the config's reward functions, in processes of their own (docs/rewards.md).

    with Scorer(config.rollout.rewards, workers=2, timeout_seconds=60.0) as scorer:
      scores = scorer.score([Group("2+3=", ["5", "6"], [[8], [9]], {"answer": "5"})])

A function is called once for each group, the completions of one prompt. A call that raises, returns something else than
scores, takes too long or ends its process has failed: its scores are missing, not zero, and nothing else is lost.
"""

import asyncio
import contextlib
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import numpy as np

from trainer.errors import ConfigError, DataError
from trainer.rollouts.reward_worker import Call, Failure, Outcome, call, call_together, timed_out
from trainer.rollouts.rewards import MODEL, Text, make, plain

# What a process runs: a program of its own, so that it has neither the parent's threads nor its main module.
_PROGRAM = ("import sys; from multiprocessing.connection import Connection; c = Connection(int(sys.argv[1])); "
            "sys.path[:] = c.recv(); from trainer.rollouts.reward_worker import serve; serve(c)")
GRACE_SECONDS = 1.0  # for async calls to be cancelled and say so
POLL_SECONDS = 1.0  # between looks at processes whose connection something else may hold open


@dataclass(frozen=True)
class Group:
  """The completions of one prompt.

  Attributes:
    prompt: a string, or a list of messages.
    completions: strings, or lists of messages.
    completion_ids: their tokens.
    columns: the record's other fields, one value each.
    where: the record's place, for messages.
  """

  prompt: Text
  completions: Sequence[Text]
  completion_ids: Sequence[Sequence[int]]
  columns: Mapping[str, Any] = field(default_factory=dict)
  where: str = "a record"

  def __post_init__(self):
    if len(self.completions) != len(self.completion_ids):
      raise ValueError(f"{len(self.completions)} completions, but tokens of {len(self.completion_ids)}")


class Scores(NamedTuple):
  """Scores of P groups by K functions; groups may differ in their number G of completions.

  Attributes:
    values: P arrays float64 [G, K], NaN where a function abstained or failed.
    failed, abstained: P arrays bool [G, K].
    messages: a line for each distinct failure (same function, same kind, same line of code), with its count.
  """

  values: list[np.ndarray]
  failed: list[np.ndarray]
  abstained: list[np.ndarray]
  messages: list[str]


class Scorer:
  """Calls reward functions.

  Args:
    rewards: {name: section}, as `config.rollout.rewards`.
    workers: processes, started when there is something to score first, replaced when one ends, and kept until
      `close()` or the end of this process, however that comes. 0: functions run in this process, without a limit of
      time.
    timeout_seconds: what a call may take; starting a process and importing functions does not count.

  Attributes:
    names: tuple of K names, in the order of `rewards`.
    weights: float64 [K].

  Raises:
    ConfigError: a section, or a number, that cannot be used.
  """

  def __init__(self, rewards: Mapping[str, Any], workers: int, timeout_seconds: float):
    if workers < 0 or not timeout_seconds > 0:
      raise ConfigError(f"found rollout.reward_workers={workers} and rollout.reward_timeout_seconds={timeout_seconds}; "
                        "allowed: 0 or more workers, more than 0 seconds.")
    self._sections = {name: plain(rewards[name]) for name in rewards}
    self._rewards = {name: make(name, section) for name, section in self._sections.items()}
    self.names = tuple(self._rewards)
    self.weights = np.array([reward.weight for reward in self._rewards.values()], np.float64)
    self._size, self._seconds = workers, timeout_seconds
    self._workers: list[_Worker] = []
    self._thread, self._runner = None, None

  def check_columns(self, columns: Mapping[str, Any], where: str) -> None:
    """Refuses a record, at `where`, whose columns some function cannot be called with. Raises DataError, naming the
    record, the function and the column."""
    for reward in self._rewards.values():
      reward.check_columns(columns, where)

  def score(self, groups: Sequence[Group]) -> Scores:
    """The scores of all completions, in the order of `groups`.

    Raises:
      ConfigError: a process could not start or import a function.
      DataError: a column is missing, has a name that is taken, or cannot be sent to another process.
    """
    for group in groups:
      self.check_columns(group.columns, group.where)
    payloads = [_pack(group) for group in groups]
    calls = [Call(p * len(self.names) + k, name, payloads[p])
             for p, group in enumerate(groups) if group.completions for k, name in enumerate(self.names)]
    outcomes = self._in_workers(calls) if self._size else self._here(calls)
    return self._scores(groups, outcomes)

  def close(self) -> None:
    """Ends the processes."""
    for worker in self._workers:
      worker.end()
    self._workers = []
    if self._runner is not None:
      self._thread.submit(self._runner.close).result()
      self._thread.shutdown()
      self._thread = self._runner = None

  def __enter__(self) -> "Scorer":
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  def _scores(self, groups: Sequence[Group], outcomes: dict[int, Outcome]) -> Scores:
    shapes = [(len(group.completions), len(self.names)) for group in groups]
    values = [np.full(shape, np.nan) for shape in shapes]
    failed, abstained = ([np.zeros(shape, bool) for shape in shapes] for _ in range(2))
    # (name, kind, line) -> [count, message, where], of the first.
    found: dict[tuple[str, str, str], list] = {}
    for number in sorted(outcomes):
      (p, k), outcome = divmod(number, len(self.names)), outcomes[number]
      if isinstance(outcome, Failure):
        failed[p][:, k] = True
        key = (self.names[k], outcome.kind, outcome.at)
        found.setdefault(key, [0, outcome.message, groups[p].where])[0] += 1
      else:
        values[p][:, k] = [np.nan if value is None else value for value in outcome]
        abstained[p][:, k] = [value is None for value in outcome]
    messages = [
        f"rollout.rewards.{name} ({self._rewards[name].kind}) failed for {count} of {len(groups)} prompts, first for "
        f"{where}: {message}" + (f" [{at}]" if at else "") for (name, _, at), (count, message, where) in found.items()]
    return Scores(values, failed, abstained, messages)

  def _split(self, calls: list[Call]) -> tuple[list[Call], list[Call]]:
    """Calls of async functions, and others."""
    is_async = [self._rewards[item.name].is_async for item in calls]
    return ([c for c, found in zip(calls, is_async, strict=True) if found],
            [c for c, found in zip(calls, is_async, strict=True) if not found])

  def _here(self, calls: list[Call]) -> dict[int, Outcome]:
    """Without processes."""
    together, single = self._split(calls)
    outcomes: dict[int, Outcome] = {}
    if together:
      if self._runner is None:
        # In a thread, since a notebook's own event loop runs in this one.
        self._thread, self._runner = ThreadPoolExecutor(1), asyncio.Runner()
      run = call_together(self._rewards, together, None, outcomes.__setitem__)
      self._thread.submit(self._runner.run, run).result()
    outcomes.update({item.id: call(self._rewards[item.name], item.payload) for item in single})
    return outcomes

  def _in_workers(self, calls: list[Call]) -> dict[int, Outcome]:
    """Hands out calls to whichever process is free: those of async functions all to one, others one by one."""
    together, single = self._split(calls)
    waiting = deque(([together] if together else []) + [[item] for item in single])
    outcomes: dict[int, Outcome] = {}
    try:
      while len(outcomes) < len(calls):
        self._hand_out(waiting)
        for worker, answer in self._events():
          if answer is not None:
            outcomes[answer[0]] = answer[1]
          elif worker.batch > 1:  # it is not known which call is to blame: each is repeated on its own
            waiting.extend([item] for item in worker.calls.values())
          elif worker.calls and worker.failure is None:
            waiting.append(list(worker.calls.values()))
          else:
            outcomes.update(dict.fromkeys(worker.calls, worker.failure))
    finally:
      for worker in self._workers:
        if worker.calls or not worker.ready:
          worker.end()
      self._workers = [worker for worker in self._workers if not worker.ended]
    return outcomes

  def _hand_out(self, waiting: deque[list[Call]]) -> None:
    for worker in self._workers:
      if waiting and worker.ready and not worker.calls:
        grace = GRACE_SECONDS if self._rewards[waiting[0][0].name].is_async else 0.0
        if worker.give(waiting[0], self._seconds, grace):
          waiting.popleft()
    self._workers = [worker for worker in self._workers if not worker.ended]
    unused = sum(not worker.calls for worker in self._workers)
    for _ in range(min(len(waiting) - unused, self._size - len(self._workers))):
      self._workers.append(_Worker(self._sections))

  def _events(self) -> Iterator[tuple["_Worker", tuple[int, Outcome] | None]]:
    """Waits for the processes that have something to do; (process, a call's outcome, or None: the process ended)."""
    busy = {worker.connection: worker for worker in self._workers if worker.calls or not worker.ready}
    until = min((worker.deadline for worker in busy.values()), default=0.0) - time.monotonic()
    ready = wait(list(busy), timeout=min(max(until, 0.0), POLL_SECONDS))
    for connection, worker in busy.items():
      if connection in ready:
        message = worker.receive()
        if message is None or message[0] == "done":
          yield worker, None if message is None else message[1:]
      elif worker.overdue():
        yield worker, None


class _Worker:
  """A process that makes calls, as its parent sees it.

  Attributes:
    ready: it has imported the functions.
    calls: {id: call} that it has been given and not answered.
    batch: how many it was given at once.
    deadline: when it must have said something, in the time of `time.monotonic`.
    failure: why it ended in the middle of a call; None: it had not begun.
    ended: it is no more.
  """

  def __init__(self, sections: dict[str, dict[str, Any]]):
    self.connection, theirs = Pipe()
    # A function's module may import JAX, which must leave the parent's accelerator alone. In a session of its own, it
    # gets no Ctrl-C from the terminal, and what it starts can be ended with it.
    self._process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
        env={**os.environ, "JAX_PLATFORMS": "cpu"}, start_new_session=True)
    theirs.close()
    self.ready, self.ended, self._begun = False, False, False
    self.calls: dict[int, Call] = {}
    self.failure: Failure | None = None
    self.batch, self.deadline, self._patience = 0, math.inf, math.inf
    self._sent(sys.path)
    self._sent(sections)

  def give(self, calls: list[Call], seconds: float, grace: float) -> bool:
    """Gives it calls of so many seconds each; False if it is no more."""
    if not self._sent((calls, seconds)):
      self.end()
      return False
    self.calls, self.batch, self._patience = {item.id: item for item in calls}, len(calls), seconds + grace
    self._begun, self.failure = False, timed_out(seconds)
    self.deadline = time.monotonic() + self._patience
    return True

  def receive(self) -> tuple | None:
    """What it says; None if it is no more.

    Raises:
      ConfigError: it could not start.
    """
    try:
      message = self.connection.recv()
    except (EOFError, OSError):
      self._died()
      return None
    if message[0] == "failed":
      self.end()
      raise ConfigError(f"in a process for rewards: {message[1]} (A function that is defined in a config file or in a "
                        "notebook is known only there: move it to a module, or use --config.rollout.reward_workers=0.)")
    self.ready = True
    if message[0] == "begun":
      self._begun = True
    elif message[0] == "done":
      del self.calls[message[1]]
    self.deadline = time.monotonic() + self._patience if self.calls else math.inf
    return message

  def overdue(self) -> bool:
    """Whether it is no more, or has been silent for too long and is now ended."""
    gone, late = self._process.poll() is not None, time.monotonic() >= self.deadline
    if not (gone or late) or self.connection.poll():  # what it said last still counts
      return False
    if gone:
      self._died()
    else:
      self.end()
    return True

  def end(self) -> None:
    """Ends it and what it has started."""
    if not self.ended:
      self.ended = True
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(self._process.pid, signal.SIGKILL)
      self._process.wait()
      self.connection.close()

  def _died(self) -> None:
    self.end()
    code = self._process.returncode
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    if not self.ready:
      raise ConfigError(f"a process for rewards ended while it started ({how}); what it said is above. Rewards can be "
                        "computed without processes, --config.rollout.reward_workers=0.")
    self.failure = Failure("death", f"its process ended in the call ({how})") if self._begun else None

  def _sent(self, message: Any) -> bool:
    try:
      self.connection.send(message)
    except OSError:
      return False
    return True


def _pack(group: Group) -> bytes:
  """What a call needs of a group, for another process."""
  columns = dict(group.columns)
  ids = [np.asarray(one).tolist() for one in group.completion_ids]
  try:
    return pickle.dumps((group.prompt, list(group.completions), ids, columns))
  except Exception:  # objects say in their own ways that they cannot be pickled
    for key, value in columns.items():
      try:
        pickle.dumps(value)
      except Exception as e:
        raise DataError(f"{group.where}: column {key!r}, a {type(value).__name__}, cannot be sent to the processes "
                        f"that compute rewards ({e}). Make it strings, numbers, lists and dicts, or leave it out of "
                        "the data.") from e
    raise


def make_scorer(config: Any, prompts: Any) -> Scorer:
  """What scores completions of these prompts by functions; its processes start with the first of them.

  Raises:
    ConfigError: see `Scorer`.
    DataError: naming the first prompt that lacks a column which some function is to be called with.
  """
  c = config.rollout
  functions = {name: c.rewards[name] for name in c.rewards if c.rewards[name].type != MODEL}
  scorer = Scorer(functions, c.reward_workers, c.reward_timeout_seconds)
  for item in prompts.every_item():
    scorer.check_columns(item.columns, item.prompt.where)
  return scorer
