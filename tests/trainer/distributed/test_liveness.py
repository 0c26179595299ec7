"""Verdicts on what processes say of themselves; and the threads that talk, on a store in this process."""

import json
import re
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from trainer.distributed import liveness, verdicts
from trainer.distributed.verdicts import Heartbeat, judge
from trainer.errors import ConfigError

# The time a thread may stand still beside what else runs here is in proportion to the heartbeat.
LIMITS = {"heartbeat_seconds": 3.0, "hang_seconds": 600.0, "phase_seconds": 3600.0}


def standing(step, seconds, **said):
  """A process that has taken `step` steps and stands still, in JAX, for so many seconds."""
  found = {"phase": "training", "still": seconds, "limit": 600.0, "waits": True} | said
  return Heartbeat("host", 7, 1, step, **found)


def named(*heartbeats, silent=()):
  verdict = judge(dict(enumerate(heartbeats)), {i: silent[i] if silent else 0.0 for i in range(len(heartbeats))}, 60.0)
  return verdict and verdict.processes


def test_who_is_silent_is_lost():
  a, b = standing(7, 0.1), standing(7, 0.1, place="data.py:3 in read")
  assert named(a, b, silent=(0.0, 60.0)) is None
  verdict = judge({0: a, 1: replace(b, host="node-3")}, {0: 0.0, 1: 61.0}, 60.0)
  assert verdict.processes == (1,) and verdict.code == verdicts.EXIT_CODE
  assert "process 1 (host node-3, pid 7) has not been heard of for 61 s" in verdict.text
  assert "in training, after step 7, at data.py:3 in read" in verdict.text
  assert judge({0: a}, {0: 0.0, 1: 61.0}, 60.0).processes == (1,)  # never heard of
  assert named(a, replace(b, done=True), silent=(0.0, 61.0)) is None


def test_who_does_not_wait_for_the_others_hangs():
  assert named(standing(8, 601), standing(7, 601, waits=False)) == (1,)
  assert named(standing(7, 601, waits=False), standing(8, 601)) == (0,)
  assert named(standing(7, 601), standing(8, 601, waits=False)) == (1,)  # who waits is further behind
  # In the same step, and two of four.
  assert named(standing(7, 601), standing(7, 601, waits=False), standing(7, 601),
               standing(7, 601, waits=False)) == (1, 3)
  # All wait for one another: the furthest behind, if one is.
  assert named(standing(8, 601), standing(7, 601)) == (1,)
  assert named(standing(7, 601), standing(7, 601)) == (0, 1)
  everyone = "all processes wait for one another; the furthest behind:\n"
  for waits, words in ((True, f"{everyone}process 1 "), (False, "process 1 ")):
    text = judge({0: standing(8, 601), 1: standing(7, 601, waits=waits)}, {0: 0.0, 1: 0.0}, 60.0).text
    assert text.startswith(words) and "hangs: nothing has moved for 601 s" in text


def test_what_becomes_of_a_run_is_told_to_the_others(monkeypatch):
  told = []
  watch = SimpleNamespace(finish=lambda: told.append("finished"), failed=told.append)
  monkeypatch.setattr(liveness, "_watch", watch)
  error = KeyError("x")

  @liveness.reports_failure
  def run(fails):
    if fails:
      raise error
    return 7

  with pytest.raises(KeyError):
    run(True)
  assert told == [error] and liveness._watch is watch
  assert run(False) == 7 and told == [error, "finished"] and liveness._watch is None
  assert run(fails=False) == 7 and len(told) == 2
  with pytest.raises(KeyError):
    run(True)


def test_nobody_hangs_while_something_moves_or_may_take_its_time():
  assert named(standing(8, 599), standing(7, 599, waits=False)) is None
  assert named(standing(8, 601), standing(7, 0.5, waits=False)) is None
  slow = dict(waits=False, phase="eval", limit=3600.0)
  assert named(standing(8, 601), standing(8, 601, **slow)) is None
  assert named(standing(8, 3601), standing(8, 3601, **slow)) == (1,)
  assert named(standing(8, 601), standing(8, 601, **slow), standing(8, 601, waits=False)) is None
  assert named(standing(8, 601), standing(7, 601, waits=False), silent=(0.0, 30.0)) is None  # it may be dead instead
  setup = dict(waits=False, phase="set-up", limit=0.0)
  assert named(standing(0, 1e6), standing(0, 1e6, **setup)) is None
  assert named(standing(8, 601), standing(9, 601, done=True)) == (0,)


class Store:
  """What the watch asks of JAX's client, in this process; `down` for no answer."""

  def __init__(self):
    self.values, self.down = {}, False

  def key_value_set(self, key, value, allow_overwrite=False):
    self._answer(not allow_overwrite and key in self.values)
    self.values[key] = value

  def key_value_try_get(self, key):
    self._answer(key not in self.values)
    return self.values[key]

  def key_value_dir_get(self, prefix):
    self._answer(False)
    return [(key, value) for key, value in sorted(self.values.items()) if key.startswith(prefix)]

  def _answer(self, refused):
    if self.down or refused:
      raise RuntimeError("UNAVAILABLE" if self.down else "ALREADY_EXISTS or NOT_FOUND")


@pytest.fixture
def watches(monkeypatch):
  """(store, three watches, {process: (text, code)} of those that have ended)."""
  ended = {}

  def end(self, text, code=verdicts.EXIT_CODE):
    ended[self._index] = (text, code)
    self._done.set()

  monkeypatch.setattr(liveness.Watch, "_end", end)
  store = Store()
  made = [liveness.Watch(store, i, 3, LIMITS, threading.Event(), "run") for i in range(3)]
  for watch in made:
    watch.start()
  yield store, made, ended
  for watch in made:
    watch._done.set()


def until(condition):
  deadline = time.monotonic() + 30
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def test_an_error_of_one_reaches_the_others_with_its_reason(watches):
  _, (_, second, _), ended = watches
  second.failed(OSError("no such file: /data/7"))
  until(lambda: ended.keys() == {0, 2})
  assert all(code == 1 and "process 1 (host" in text and "OSError: no such file: /data/7" in text
             for text, code in ended.values())


def test_an_error_that_another_process_is_the_cause_of_names_that_one(watches):
  store, (first, second, third), ended = watches
  until(lambda: len(store.values) == 3)
  second._done.set()  # dies: says nothing any more
  threading.Thread(target=first.failed, args=(ValueError("Gloo AllGather failed: Connection reset"),)).start()
  until(lambda: ended.keys() == {0, 2})
  assert all("process 1 (host" in text and "has not been heard of" in text and code == 75
             for text, code in ended.values())


def test_without_the_first_process_the_others_say_so(watches):
  store, (first, second, third), ended = watches
  until(lambda: len(second._heartbeats) == len(third._heartbeats) == 1)
  second._lost.set()
  until(lambda: 1 in ended)
  assert "process 0 (host" in ended[1][0] and "its connection was closed" in ended[1][0]
  store.down = True
  until(lambda: 2 in ended)
  assert "process 0 (host" in ended[2][0] and "has not been heard of" in ended[2][0] and 0 not in ended


def test_a_run_that_ends_as_it_should_ends_nobody(watches):
  store, made, ended = watches
  until(lambda: len(store.values) == 3)
  made[2].finish()
  time.sleep(1.5 * LIMITS["heartbeat_seconds"])
  assert ended == {}


def test_what_training_says_of_itself():
  watch = liveness.Watch(Store(), 0, 1, LIMITS, threading.Event(), "run")

  def said():
    watch._say()
    return watch._me.phase, watch._me.limit, watch._me.step

  assert said() == ("set-up", 0.0, 0)
  watch.enter(liveness.TRAINING)
  watch.moved(4)
  with watch.phase("eval"):
    with watch.phase("compile"):
      assert said() == ("compile", 3600.0, 4)
    assert said() == ("eval", 3600.0, 4)
  assert said() == ("training", 600.0, 4)
  watch._moved -= 100
  with watch.phase("eval"):  # that it begins, or ends, is a move
    assert said()[0] == "eval" and watch._me.still < 50
    watch._moved -= 100
  assert said()[0] == "training" and watch._me.still < 50
  watch._moved -= 100
  saying = threading.Thread(target=watch._say)
  saying.start()
  saying.join()
  assert 100 <= watch._me.still < 110


def test_the_longest_wait_for_data_of_the_others(watches):
  store, (first, second, third), _ = watches
  for watch, seconds in ((first, 9.0), (second, 1.0), (third, 2.5)):
    watch.waited(seconds)
  until(lambda: len(first._heartbeats) == 3 and all(said.waited for said in first._heartbeats.values()))
  assert first.longest_wait() == 2.5 and first.longest_wait() == 0.0
  second.waited(0.5)
  second.waited(4.0)
  until(lambda: '"waited": 5.5' in store.values["run/news/1"])
  assert first.longest_wait() == 4.5  # without waiting for its own turn to listen


def test_where_a_thread_stands():
  """JAX's frames count as waiting for the others; the place is that of our code, above them."""
  release, in_jax = threading.Event(), {}
  exec(compile("def device_get(event): event.wait()", "/lib/site-packages/jax/_src/api.py", "exec"), in_jax)
  exec(compile("def call(function, *given): function(*given)", "/lib/site-packages/other/calls.py", "exec"), in_jax)

  def fetch():
    in_jax["call"](in_jax["device_get"], release)

  threads = [threading.Thread(target=fetch), threading.Thread(target=lambda: release.wait())]
  for thread in threads:
    thread.start()
  try:
    (waits, place), (busy_waits, busy_place) = (verdicts.stands(thread.ident) for thread in threads)
    assert waits and place.startswith("distributed/test_liveness.py:") and place.endswith("in fetch")
    assert not busy_waits and busy_place.endswith("in <lambda>")
    assert verdicts.stands(-1) == (False, "")
  finally:
    release.set()


class Ended(Exception):
  """What stands for the end of the process: (text, code)."""


@pytest.fixture
def guard(monkeypatch):
  """`guard(index)` gives a watch without threads; its guard raises `Ended` where it would end the process."""
  def end(self, text, code=verdicts.EXIT_CODE):
    raise Ended(text, code)

  monkeypatch.setattr(liveness.Watch, "_end", end)

  def made(index):
    watch = liveness.Watch(Store(), index, 2, LIMITS, threading.Event(), "run")
    watch._interval = 0.01
    watch._talker = SimpleNamespace(join=lambda seconds: None)
    watch._me = Heartbeat("here", 8)
    watch._heartbeats[0] = Heartbeat("there", 9, 1, step=4, phase="eval", place="x.py:3 in f")
    return watch
  return made


def test_the_guard_ends_a_process_for_its_reason(guard, monkeypatch):
  dumped = []
  monkeypatch.setattr(liveness.faulthandler, "dump_traceback", lambda file, all_threads: dumped.append(all_threads))
  for index, named, told in ((1, (1,), [True]), (1, (0,), [True])):  # its own stacks, and those of no other
    watch = guard(index)
    watch._verdict = verdicts.Verdict(named, "why", 3)
    with pytest.raises(Ended, match=re.escape("('why', 3)")):
      watch._watch_over()
    assert dumped == told
  watch = guard(1)
  watch._lost.set()
  gone = ("process 0 (host there, pid 9) is gone: its connection was closed. "
          "It was in eval, after step 4, at x.py:3 in f.")
  with pytest.raises(Ended, match=re.escape(f"({gone!r}, 75)")):
    watch._watch_over()
  watch = guard(1)
  watch._silent[0] = LIMITS["heartbeat_seconds"] + 3 * watch._interval
  with pytest.raises(Ended, match="process 0 .host there, pid 9. has not been heard of for 3 s.*75"):
    watch._watch_over()


@pytest.mark.parametrize("later, ends", [(3.1, True), (2.0, False)])
def test_a_process_that_does_not_end_after_its_error_is_ended(guard, later, ends):
  watch = guard(1)
  watch._failed_at = time.monotonic() - later  # of 3 s
  watch._verdict, looks = verdicts.Verdict((0,), "another's", 75), iter([False, True])
  watch._done = SimpleNamespace(wait=lambda seconds: next(looks))  # it looks once
  if ends:
    said = "('process 1 (host here, pid 8) did not end by itself after its error.', 1)"
    with pytest.raises(Ended, match=re.escape(said)):
      watch._watch_over()
  else:
    watch._watch_over()


def test_process_0_is_not_lost_to_itself(guard):
  watch = guard(0)
  watch._lost.set()
  watch._silent[0] = 100.0
  threading.Timer(0.1, watch._done.set).start()
  watch._watch_over()


def test_silence_is_not_counted_while_the_process_itself_was_stopped(guard, monkeypatch):
  watch, clock = guard(0), iter([0.0, 0.25, 100.0])
  monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: next(clock)))
  looks = iter([False, False, True])
  watch._done = SimpleNamespace(wait=lambda seconds: next(looks))
  watch._watch_over()
  assert watch._silent == {0: 1.25, 1: 1.25}  # 0.25 s, and of 99.75 s one


@pytest.mark.parametrize("code, again", [(75, "\nRun the same command to continue from the last checkpoint."), (1, "")])
def test_the_last_words_of_a_process(monkeypatch, capsys, code, again):
  def leave(code):
    raise SystemExit(code)

  monkeypatch.setattr(liveness.os, "_exit", leave)
  watch = liveness.Watch(Store(), 1, 2, LIMITS, threading.Event(), "run")
  with pytest.raises(SystemExit) as ended:
    watch._end("gone", code)
  assert ended.value.code == code and capsys.readouterr().err == f"\ngone{again}\nProcess 1 ends with code {code}.\n"


@pytest.mark.parametrize("failed_at, done, leaves", [(5.0, False, [1]), (0.0, False, []), (5.0, True, [])])
def test_at_exit_who_has_failed_waits_for_nobody(monkeypatch, failed_at, done, leaves):
  left = []
  monkeypatch.setattr(liveness.os, "_exit", left.append)
  watch = liveness.Watch(Store(), 1, 2, LIMITS, threading.Event(), "run")
  watch._failed_at = failed_at
  if done:
    watch._done.set()
  watch.leave()
  assert left == leaves


def test_an_error_is_told_once_and_a_long_one_is_cut():
  store = Store()
  watch = liveness.Watch(store, 1, 2, LIMITS, threading.Event(), "run")
  watch._interval, watch._me = 0.01, Heartbeat("here", 8)
  watch.failed(ValueError("x" * 3000))
  watch.failed(KeyError("later"))
  said = json.loads(store.values["run/verdict/only"])
  assert said == dict(processes=[1], code=1, text=f"process 1 (host here, pid 8) ended with ValueError: {'x' * 2000}")
  other = liveness.Watch(Store(), 0, 1, LIMITS, threading.Event(), "run")
  other.failed(ValueError())
  assert json.loads(other._store.values["run/verdict/only"])["text"].endswith("ended with ValueError: no message")


def caused(error, *causes):
  """An error that others are the cause of, one of the next."""
  at = error
  for cause in causes:
    at.__cause__ = cause
    at = cause
  return error


@pytest.mark.parametrize("error, another", [
    (ValueError("Gloo AllReduce failed"), True),
    (RuntimeError("UNAVAILABLE: Socket closed"), True),
    (RuntimeError("DEADLINE_EXCEEDED"), True),
    (ValueError("shapes differ"), False),
    (ConfigError("mesh: NCCL is not there"), False),  # of a user's config
    (OSError("connection refused"), False),  # of a download
    (caused(ValueError("no batch"), KeyError("x"), RuntimeError("coordination service")), True),
    (caused(ConfigError("no file"), RuntimeError("connection reset by peer")), True),
    (caused(*[ValueError("a") for _ in range(9)], RuntimeError("nccl")), True),
    (caused(*[ValueError("a") for _ in range(10)], RuntimeError("nccl")), False),  # as far as it looks
], ids=str)
def test_whose_error_it_is(error, another):
  assert liveness._is_of_another(error) == another


def test_the_error_before_counts_as_the_cause():
  try:
    try:
      raise RuntimeError("nccl: unhandled")
    except RuntimeError:
      raise ValueError("then this") from None  # which keeps it as the context
  except ValueError as error:
    assert liveness._is_of_another(error)


def test_the_end_of_a_run_is_said_and_the_threads_end():
  store = Store()
  watch = liveness.Watch(store, 1, 2, LIMITS, threading.Event(), "run")
  store.key_value_set("run/news/0", json.dumps(dict(host="there", pid=9)))
  watch.start()
  watch.finish()
  assert json.loads(store.values["run/news/1"])["done"] is True
  watch._guard.join(10)
  assert not watch._guard.is_alive() and not watch._talker.is_alive()


def test_what_training_says_reaches_the_watch_of_its_run(monkeypatch):
  made, at_exit = [], []

  class Recorder:
    def __init__(self, *given):
      self.given, self.said = given, []
      made.append(self)

    def __getattr__(self, name):
      return lambda *given: self.said.append((name, *given)) or f"{name} of the watch"

  monkeypatch.setattr(liveness, "Watch", Recorder)
  monkeypatch.setattr(liveness, "_watch", None)
  monkeypatch.setattr(liveness, "_runs", 0)
  monkeypatch.setattr(liveness.atexit, "register", at_exit.append)
  for _ in range(2):  # nothing to tell, then the first run
    liveness.moved(3)
    liveness.waited(0.5)
    liveness.enter("eval")
    phase = liveness.phase("checkpoint")
    assert phase == ("phase of the watch" if made else phase)
    liveness.failed(KeyError)
    if not made:
      liveness.start("store", 1, 2, LIMITS, "lost")
  at_exit[0]()
  assert made[0].given == ("store", 1, 2, LIMITS, "lost", "weft/1")
  assert made[0].said == [
      ("start",), ("moved", 3), ("waited", 0.5), ("enter", "eval"), ("phase", "checkpoint"),
      ("failed", KeyError), ("leave",)]
  liveness.start("store", 1, 2, LIMITS, "lost")
  at_exit[0]()
  assert made[1].given[-1] == "weft/2" and made[1].said[-1] == ("leave",) and len(at_exit) == 1


@pytest.mark.parametrize("heartbeat, interval", [(3.0, 0.3), (50.0, 5.0), (600.0, 5.0)])
def test_a_process_talks_ten_times_within_a_heartbeat(heartbeat, interval):
  limits = LIMITS | dict(heartbeat_seconds=heartbeat)
  assert liveness.Watch(Store(), 1, 2, limits, threading.Event(), "run")._interval == interval


def test_who_gives_a_verdict_stays_until_the_others_have_read_it(monkeypatch):
  """Of four processes one is dead; at most for three intervals."""
  watch, slept, readers = liveness.Watch(Store(), 0, 4, LIMITS, threading.Event(), "run"), [], [1, 2]

  def sleep(seconds):
    slept.append(seconds)
    if readers:
      watch._store.values[f"run/read/{readers.pop()}"] = ""

  monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: sum(slept), sleep=sleep))
  for times in (2, 5):  # the second time nobody reads: 3 * 0.3 s, of 0.2 s each
    watch._wait_for_readers({3})
    assert slept == [0.2] * times
    slept.clear()
    watch._store.values.clear()
