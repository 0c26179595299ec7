"""A process that dies, hangs or fails is named by the others, which end within a bounded time.

Processes that train together wait for one another in every collective, and a process that waits for a dead one waits
for ever: no exception reaches Python, and nothing says who is missing. So each process of a run with several has two
threads beside the training.

One **talks**. It says, every few seconds and through the key-value store of JAX's coordinator (in process 0), that it
is there, in which phase and at which step, since when nothing has moved, and where its main thread stands. That of
process 0 also reads what all have said, and gives a verdict:

- *lost*: nothing heard from a process for `heartbeat_seconds`. It died, its host did, or it is stopped.
- *hung*: it talks, but nothing has moved for `hang_seconds`, or, within a phase that may take long (compilation, a
  checkpoint, an evaluation, a rollout, the end of training), for `phase_seconds`. All of them stand still then, since
  the others wait for it; the one to name is the one whose main thread does not stand in JAX, where one waits for the
  others. Set-up has no limit: the first process may tokenise for a day.
- *failed*: a process that ends with an error of its own says so itself, with the reason.

The other thread **guards**. It ends the process with a message once there is a verdict, and also when process 0 itself
is gone: its connection closed (trainer/distributed/relay.py), or nothing was heard from it for `heartbeat_seconds`. A
main thread that waits in a collective cannot be interrupted, so the process ends there and then, by `os._exit`.
Checkpoints are atomic; the same command continues from the last one.

Training says where it is by `moved`, `phase` and `reports_failure` below, which do nothing in a run of one process.
"""

import atexit
import contextlib
import faulthandler
import functools
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from trainer.distributed.verdicts import EXIT_CODE, STILL_SECONDS, Heartbeat, Verdict, judge, last, name, stands
from trainer.errors import ConfigError

SETUP, TRAINING = "set-up", "training"
# What a broken collective, or one that lost its coordinator, says; its cause is another process.
_BROKEN = re.compile(r"gloo|nccl|coordination|UNAVAILABLE|DEADLINE_EXCEEDED|connection (reset|closed|refused)|"
                     r"socket closed", re.IGNORECASE)


class Watch:
  """The two threads of this process. See the module's docstring.

  Args:
    store: JAX's distributed client, or what has its `key_value_set`, `key_value_try_get` and `key_value_dir_get`.
    index, count: this process, and how many there are.
    limits: the section `processes` of a config.
    lost: set when the connection to process 0 is closed.
    prefix: of the keys, another one for each run of these processes.
  """

  def __init__(self, store: Any, index: int, count: int, limits: Mapping[str, float], lost: threading.Event,
               prefix: str):
    self._store, self._index, self._count, self._lost, self._prefix = store, index, count, lost, prefix
    self._heartbeat = limits["heartbeat_seconds"]
    self._limits = {SETUP: 0.0, TRAINING: limits["hang_seconds"]}
    self._other_limit = limits["phase_seconds"]
    self._interval = min(5.0, self._heartbeat / 10)
    self._main = threading.current_thread().ident
    self._me = Heartbeat(socket.gethostname(), os.getpid())
    self._phases, self._step, self._moved = [SETUP], 0, time.monotonic()
    self._waited = 0.0
    self._waits: dict = {}
    self._heartbeats: dict[int, Heartbeat] = {}  # process 0: of all; others: of process 0
    self._silent = dict.fromkeys(range(count) if index == 0 else [0], 0.0)
    self._verdict: Verdict | None = None
    self._failed_at, self._done, self._wake = 0.0, threading.Event(), threading.Event()
    self._talker = threading.Thread(target=self._talk, name="liveness talk", daemon=True)
    self._guard = threading.Thread(target=self._watch_over, name="liveness guard", daemon=True)

  def start(self) -> None:
    self._talker.start()
    self._guard.start()

  # ---------------------------------------------------------------- what training says

  def moved(self, step: int | None) -> None:
    self._step = self._step if step is None else step
    self._moved = time.monotonic()

  def enter(self, phase: str) -> None:
    self._phases[0] = phase
    self._moved = time.monotonic()

  def waited(self, seconds: float) -> None:
    self._waited += seconds
    if seconds > STILL_SECONDS:
      self._wake.set()

  def longest_wait(self) -> float:
    """Of the other processes, for data, since the call before, as far as they have said."""
    if self._index == 0:
      with contextlib.suppress(RuntimeError):
        self._hear()
    others = [(i, heartbeat) for i, heartbeat in list(self._heartbeats.items()) if i != self._index]
    before, self._waits = self._waits, {i: heartbeat.waited for i, heartbeat in others}
    return max((seconds - before.get(i, 0.0) for i, seconds in self._waits.items()), default=0.0)

  @contextlib.contextmanager
  def phase(self, phase: str) -> Iterator[None]:
    self._phases.append(phase)
    self._moved = time.monotonic()
    try:
      yield
    finally:
      self._phases.pop()
      self._moved = time.monotonic()

  def finish(self) -> None:
    """The run has ended as it should, here."""
    self._done.set()
    self._wake.set()
    self._talker.join(2 * self._interval)
    self._within(2 * self._interval, self._say)

  def failed(self, error: BaseException) -> None:
    """Tells the others. If the cause is another process, which then is named, it does not return."""
    if self._failed_at:
      return
    if _is_of_another(error):
      self.enter("a broken collective")
      time.sleep(self._heartbeat + 4 * self._interval)  # the guard ends this process within this time
    self._failed_at = time.monotonic()
    reason = str(error) or "no message"
    text = f"{name(self._index, self._me)} ended with {type(error).__name__}: {reason[:2000]}"

    def tell():
      self._publish(Verdict((self._index,), text, 1))
      self._wait_for_readers({self._index})

    self._within(4 * self._interval, tell)

  # ---------------------------------------------------------------- the thread that talks

  def _talk(self) -> None:
    while not self._done.is_set() and self._verdict is None:
      with contextlib.suppress(RuntimeError):  # no answer from the store, in process 0: for the guard to notice
        self._say()
        self._listen()
      self._wake.wait(self._interval)
      self._wake.clear()

  def _say(self) -> None:
    still = time.monotonic() - self._moved
    phase = self._phases[-1]
    waits, place = stands(self._main) if still > STILL_SECONDS else (False, "")
    self._me = replace(
        self._me, beat=self._me.beat + 1, step=self._step, phase=phase, still=still, waits=waits, place=place,
        limit=self._limits.get(phase, self._other_limit), waited=self._waited, done=self._done.is_set())
    self._store.key_value_set(f"{self._prefix}/news/{self._index}", json.dumps(asdict(self._me)), allow_overwrite=True)

  def _listen(self) -> None:
    self._read_verdict()
    if self._verdict is not None:
      return
    self._hear()
    if self._index == 0:
      verdict = judge(self._heartbeats, self._silent, self._heartbeat)
      if verdict is not None:
        self._publish(verdict)
        self._wait_for_readers({i for i, seconds in self._silent.items() if seconds > self._heartbeat})
        self._verdict = verdict

  def _hear(self) -> None:
    if self._index:
      said = {0: self._store.key_value_try_get(f"{self._prefix}/news/0")}
    else:
      said = {int(key.rpartition("/")[2]): text for key, text in self._store.key_value_dir_get(f"{self._prefix}/news/")}
    for index, text in said.items():
      heartbeat = Heartbeat(**json.loads(text))
      if index not in self._heartbeats or heartbeat.beat != self._heartbeats[index].beat:
        self._silent[index] = 0.0
      self._heartbeats[index] = heartbeat

  def _read_verdict(self) -> None:
    for _, text in self._store.key_value_dir_get(f"{self._prefix}/verdict/"):
      said = json.loads(text)
      self._verdict = Verdict(tuple(said["processes"]), said["text"], said["code"])
      self._store.key_value_set(f"{self._prefix}/read/{self._index}", "", allow_overwrite=True)

  def _publish(self, verdict: Verdict) -> None:
    with contextlib.suppress(RuntimeError):  # the first one stands; or the store is gone, and the others know
      self._store.key_value_set(f"{self._prefix}/verdict/only", json.dumps(asdict(verdict)))

  def _wait_for_readers(self, besides: set[int]) -> None:
    """Stays until the others have read the verdict: with process 0 the store goes."""
    deadline = time.monotonic() + 3 * self._interval
    with contextlib.suppress(RuntimeError):
      while time.monotonic() < deadline:
        read = self._store.key_value_dir_get(f"{self._prefix}/read/")
        if len(read) >= self._count - len({*besides, self._index}):
          return
        time.sleep(min(0.2, self._interval))

  def _within(self, seconds: float, do: Callable[[], None]) -> None:
    """Without process 0 a call of the store may never return."""

    def quietly():
      with contextlib.suppress(RuntimeError):
        do()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(seconds)

  # ---------------------------------------------------------------- the thread that guards

  def _watch_over(self) -> None:
    at = time.monotonic()
    while not self._done.wait(min(0.2, self._interval)):
      before, at = at, time.monotonic()
      for index in self._silent:  # while this process was stopped itself, nobody was silent
        self._silent[index] += min(at - before, 1.0)
      if self._failed_at:
        if at - self._failed_at > self._heartbeat + 3 * self._interval:
          self._end(f"{name(self._index, self._me)} did not end by itself after its error.", 1)
      elif self._verdict is not None:
        self._talker.join(1.0)  # which says that the verdict was read
        if self._index in self._verdict.processes:
          faulthandler.dump_traceback(sys.stderr, all_threads=True)
        self._end(self._verdict.text, self._verdict.code)
      elif self._index and self._lost.is_set():
        heartbeat = self._heartbeats.get(0)
        self._end(f"{name(0, heartbeat)} is gone: its connection was closed. {last(heartbeat)}")
      elif self._index and self._silent[0] > self._heartbeat + 2 * self._interval:
        self._end(judge(self._heartbeats, self._silent, self._heartbeat).text)

  def _end(self, text: str, code: int = EXIT_CODE) -> None:
    again = "\nRun the same command to continue from the last checkpoint." if code == EXIT_CODE else ""
    sys.stderr.write(f"\n{text}{again}\nProcess {self._index} ends with code {code}.\n")
    _flush()
    os._exit(code)

  def leave(self) -> None:
    """At exit, after an error: JAX would wait for processes that are not coming."""
    if self._failed_at and not self._done.is_set():
      _flush()
      os._exit(1)


def _is_of_another(error: BaseException | None) -> bool:
  """Whether the error, or what caused it, is that of a broken collective."""
  seen = 0
  while error is not None and seen < 10:
    if not isinstance(error, (ConfigError, OSError)) and _BROKEN.search(str(error)):
      return True
    error, seen = error.__cause__ or error.__context__, seen + 1
  return False


def _flush() -> None:
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(Exception):
      stream.flush()


# ---------------------------------------------------------------- what training calls

_watch: Watch | None = None
_runs = 0


def start(store: Any, index: int, count: int, limits: Mapping[str, float], lost: threading.Event) -> None:
  """Watches over the run that begins now; every process calls it as often as the others."""
  global _watch, _runs
  if not _runs:
    atexit.register(lambda: _watch.leave() if _watch else None)
  _runs += 1
  _watch = Watch(store, index, count, limits, lost, f"weft/{_runs}")
  _watch.start()


def moved(step: int | None = None) -> None:
  """Something was done: a step, a part of an evaluation."""
  if _watch is not None:
    _watch.moved(step)


def waited(seconds: float) -> None:
  """For data."""
  if _watch is not None:
    _watch.waited(seconds)


def longest_wait() -> float:
  """In process 0, of another process, for data, in seconds since the call before; short ones may come late."""
  return 0.0 if _watch is None else _watch.longest_wait()


def enter(phase: str) -> None:
  """From here on, until the next phase, except within `with phase(…)`."""
  if _watch is not None:
    _watch.enter(phase)


def phase(name: str) -> contextlib.AbstractContextManager:
  """Within it, `phase_seconds` may pass without a move."""
  return contextlib.nullcontext() if _watch is None else _watch.phase(name)


def failed(error: BaseException) -> None:
  """The run ends with this error, in this process."""
  if _watch is not None:
    _watch.failed(error)


def reports_failure(function: Callable) -> Callable:
  """Reports an error of the function to the other processes; if it returns, the watch ends."""

  @functools.wraps(function)
  def watched(*args: Any, **kwargs: Any) -> Any:
    global _watch
    try:
      result = function(*args, **kwargs)
    except BaseException as error:
      failed(error)
      raise
    if _watch is not None:
      _watch.finish()
      _watch = None
    return result

  return watched


def check(limits: Mapping[str, float]) -> None:
  """Refuses limits that cannot be. Raises ConfigError."""
  for key, least in (("join_seconds", 1), ("heartbeat_seconds", 1), ("hang_seconds", 0), ("phase_seconds", 0)):
    if not limits[key] >= least:
      raise ConfigError(f"processes.{key} is {limits[key]}; it must be at least {least}"
                        f"{', where 0 means no limit' if not least else ''}.")
