"""A reward function that fails loses its own scores and no others, whatever way it fails."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests import tiny
from trainer.config import reward
from trainer.errors import ConfigError, DataError
from trainer.rollouts.reward_pool import Group, Scorer, _pack, _Worker
from trainer.rollouts.reward_worker import Call, Failure

FUNCTIONS = "tests.trainer.reward_functions"
IN_BOTH = pytest.mark.parametrize("workers", [0, 2])


def group(*completions, where="a.jsonl:1", **columns):
  return Group("?", completions, [list(c.encode()) for c in completions], columns, where)


def scorer(workers=1, seconds=60.0, **types):
  return Scorer({name: reward(type=f"{FUNCTIONS}.{kind}") for name, kind in types.items()}, workers, seconds)


def wait_until(true, seconds=30.0):
  end = time.monotonic() + seconds
  while not true() and time.monotonic() < end:
    time.sleep(0.02)
  return true()


def is_alive(pid):
  try:  # a zombie that nobody has waited for is not alive
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
  except FileNotFoundError:
    return False


@IN_BOTH
def test_scores_have_the_order_of_groups_and_functions(workers):
  sections = dict(number=reward(type=f"{FUNCTIONS}.echo", factor=10, weight=0.5), length=reward(type="repetition"),
                  array=reward(type=f"{FUNCTIONS}.numpy_scores", weight=2))
  groups = [Group("?", ["x"] * n, [[1] * 5] * n, {"number": p}) for p, n in enumerate((2, 3, 1, 2, 0, 3))]
  with Scorer(sections, workers, 60.0) as pool:
    assert pool.names == ("number", "length", "array")
    np.testing.assert_array_equal(pool.weights, [0.5, 1.0, 2.0])
    for _ in range(2):
      scores = pool.score(groups)
      assert scores.messages == []
      for p, (n, values) in enumerate(zip((2, 3, 1, 2, 0, 3), scores.values, strict=True)):
        wanted = [[10.0 * p, 1 / 3 - 1, i] for i in range(n)]
        np.testing.assert_allclose(values, np.reshape(wanted, (n, 3)))
        assert values.dtype == np.float64
        assert not scores.failed[p].any() and not scores.abstained[p].any() and scores.failed[p].shape == (n, 3)
    assert pool.score([]).values == []


FAILURES = [
    ("raise", "ValueError: no score for 2"),
    ("exit", "SystemExit: 5"),
    ("short", "returned a list of 1, expected 2"),
    ("text", "returned a str, expected a list"),
    ("strings", "returned a list with a str, expected numbers or None"),
    ("nothing", "returned None, expected a list"),
    ("nan", "returned a list with nan, expected finite"),
    ("infinite", "returned a list with -inf, expected finite"),
]


@IN_BOTH
def test_each_failure_loses_one_group_of_one_function(workers):
  groups = [group(what, "b", where=f"a.jsonl:{i}") for i, (what, _) in enumerate(FAILURES)] + [group("fine", "b")]
  with scorer(workers, obey="obey", length="length") as pool:
    scores = pool.score(groups)
  for i, (what, message) in enumerate(FAILURES):
    assert scores.failed[i].tolist() == [[True, False]] * 2 and not scores.abstained[i].any()
    assert np.isnan(scores.values[i][:, 0]).all() and scores.values[i][:, 1].tolist() == [len(what), 1]
    found = [m for m in scores.messages if message in m]
    assert found and "rollout.rewards.obey (tests.trainer.reward_functions.obey) failed for" in found[0], what
  assert scores.values[-1].tolist() == [[1.0, 4.0], [1.0, 1.0]] and not scores.failed[-1].any()
  raised = scores.messages[0]
  assert "for 1 of 9 prompts, first for a.jsonl:0" in raised and 'raise ValueError(f"no score' in raised


@IN_BOTH
def test_equal_failures_are_one_message_with_their_count(workers):
  groups = [group("raise", where="x:0"), group("fine"), group("raise", "b", where="x:2"), group("raise", where="x:3")]
  with scorer(workers, obey="obey") as pool:
    messages = pool.score(groups).messages
  assert len(messages) == 1 and "failed for 3 of 4 prompts, first for x:0: ValueError: no score for 1 [" in messages[0]


@IN_BOTH
def test_none_abstains_and_is_not_a_failure(workers):
  with scorer(workers, obey="obey") as pool:
    scores = pool.score([group("abstain", "b"), group("mixed", "b")])
  assert [a.tolist() for a in scores.abstained] == [[[True], [False]], [[False], [True]]]
  assert not any(failed.any() for failed in scores.failed) and scores.messages == []
  np.testing.assert_array_equal(scores.values[0], [[np.nan], [2.0]])
  np.testing.assert_array_equal(scores.values[1], [[1.0], [np.nan]])


def test_a_call_that_hangs_or_ends_its_process_is_replaced_and_the_others_go_on():
  groups = [group("hang", "b"), group("fine", "b"), group("die", "b"), *[group("fine", "b")] * 3]
  with scorer(2, 0.5, obey="obey", length="length") as pool:
    for _ in range(2):
      scores = pool.score(groups)
      assert [f[:, 0].tolist() for f in scores.failed] == [[p in (0, 2)] * 2 for p in range(6)]
      assert not any(failed[:, 1].any() for failed in scores.failed)
      assert [v[0, 1] for v in scores.values] == [4, 4, 3, 4, 4, 4]
      assert len(scores.messages) == 2
      assert "first for a.jsonl:1: took longer than rollout.reward_timeout_seconds=0.5" in scores.messages[0]
      assert "its process ended in the call (exit code 3)" in scores.messages[1]
    assert pool.score(groups[1:2]).values[0].tolist() == [[1.0, 4.0], [1.0, 1.0]]


def test_async_calls_run_at_the_same_time(tmp_path):
  log = str(tmp_path / "log")
  with scorer(1, wait="wait", again="wait") as pool:
    scores = pool.score([group(str(i), log=log) for i in range(10)])
  assert [v.tolist() for v in scores.values] == [[[7.0, 7.0]]] * 10
  lines = Path(log).read_text().split()
  assert lines[0:40:2] == ["begin"] * 20 and lines[40::2] == ["end"] * 20


def test_async_calls_have_their_own_timeouts_and_keep_their_loop(tmp_path):
  groups = [group(what, log=str(tmp_path / "log")) for what in ("a", "late", "raise", "b")]
  with scorer(1, 1.0, wait="wait", loops="loops") as pool:
    scores = pool.score(groups)
    pid = pool._workers[0]._process.pid
    np.testing.assert_array_equal(np.concatenate(scores.values), [[7, 1], [np.nan, 1], [np.nan, 1], [7, 1]])
    assert "a.jsonl:1: took longer than rollout.reward_timeout_seconds=1" in scores.messages[0]
    assert "TimeoutError: of its own" in scores.messages[1]
    assert [v[0, 1] for v in pool.score(groups[:1]).values] == [1]  # what belongs to a loop, a connection say, lives on
    assert pool._workers[0]._process.pid == pid


@pytest.mark.parametrize("what, message", [
    ("block", "took longer"), ("stubborn", "took longer"), ("die", "its process ended in the call (exit code 4)")])
def test_an_async_call_that_blocks_or_dies_does_not_lose_those_beside_it(tmp_path, what, message):
  groups = [group(text, log=str(tmp_path / "log")) for text in ("a", what, "b")]
  with scorer(2, 1.0, wait="wait", length="length") as pool:
    scores = pool.score(groups)
  np.testing.assert_array_equal(np.concatenate(scores.values), [[7, 1], [np.nan, len(what)], [7, 1]])
  assert len(scores.messages) == 1 and message in scores.messages[0]


def test_async_functions_work_without_processes(tmp_path):
  log = tmp_path / "log"
  with scorer(0, wait="wait", loops="loops") as pool:
    for _ in range(2):
      scores = pool.score([group("a", log=str(log)), group("b", log=str(log))])
      assert [v.tolist() for v in scores.values] == [[[7.0, 1.0]]] * 2
  assert log.read_text().split()[:4] == ["begin", "a", "begin", "b"]


def test_processes_have_no_jax_stay_and_end_with_close():
  with scorer(2, obey="obey") as pool:
    assert pool._workers == []
    scores = pool.score([group("jax", "b"), group("process", "b"), group("interrupt", "b")])
    assert scores.values[0][:, 0].tolist() == [0.0, 1.0] and scores.values[2][:, 0].tolist() == [3.0, 4.0]
    pid, parent = map(int, scores.values[1][:, 0])
    assert parent == os.getpid() != pid
    pids = {worker._process.pid for worker in pool._workers}
    assert pid in pids
    pool.score([group("fine")])
    assert {worker._process.pid for worker in pool._workers} == pids and is_alive(pid)
  assert not any(map(is_alive, pids)) and pool._workers == []


def test_no_more_processes_are_started_than_there_are_calls():
  with scorer(8, length="length") as pool:
    pool.score([group("a"), group("b")])
    assert len(pool._workers) <= 2


def test_a_process_that_ended_between_scores_is_replaced():
  with scorer(1, length="length") as pool:
    pool.score([group("a")])
    first = pool._workers[0]._process
    first.kill()
    wait_until(lambda: not is_alive(first.pid))
    assert pool.score([group("abc")]).values[0].tolist() == [[3.0]]
    assert pool._workers[0]._process.pid != first.pid


def test_a_call_that_did_not_begin_before_its_process_ended_has_not_failed(monkeypatch):
  with scorer(1, length="length") as pool:
    pool.score([group("a")])
    [worker] = pool._workers
    give = worker.give
    os.kill(worker._process.pid, signal.SIGSTOP)

    def give_and_kill(*args):
      given = give(*args)
      worker._process.kill()
      return given

    monkeypatch.setattr(worker, "give", give_and_kill)
    scores = pool.score([group("abc")])
  assert scores.values[0].tolist() == [[3.0]] and scores.messages == [] and worker.ended


def test_what_a_process_has_said_counts_though_its_time_is_over():
  with scorer(1, length="length") as pool:
    pool.score([group("a")])
    [worker] = pool._workers
    assert worker.give([Call(0, "length", _pack(group("abc")))], 60.0, 0.0)
    assert worker.connection.poll(30.0)
    worker.deadline = 0.0
    assert not worker.overdue()
    while worker.calls:
      worker.receive()
    worker.deadline = 0.0
    assert worker.overdue() and worker.ended


@pytest.mark.parametrize("code, late, speaks, overdue, failure", [
    (None, False, False, False, "timed out"), (None, True, False, True, "timed out"),
    (None, True, True, False, "timed out"),
    (6, False, False, True, "its process ended in the call (exit code 6)"), (6, True, True, False, "timed out"),
    (-11, True, False, True, "its process ended in the call (SIGSEGV)")])
@pytest.mark.parametrize("begun", [False, True])
def test_a_process_that_is_gone_is_another_failure_than_one_that_is_silent(code, late, speaks, overdue, failure, begun):
  """Though a copy of it may hold the connection; what it said last still counts, and a call that it had not begun has
  not failed."""
  worker = _Worker.__new__(_Worker)
  worker.ready, worker.ended, worker._begun, worker.failure = True, False, begun, "timed out"
  worker._process = SimpleNamespace(poll=lambda: code, returncode=code)
  worker.connection = SimpleNamespace(poll=lambda: speaks)
  worker.deadline = time.monotonic() + (-1 if late else 60)
  worker.end = lambda: setattr(worker, "ended", True)
  assert (worker.overdue(), worker.ended) == (overdue, overdue)
  if overdue and code is not None:
    assert worker.failure == (Failure("death", failure) if begun else None)
  else:
    assert worker.failure == failure


def test_what_a_function_started_ends_with_it(tmp_path):
  pids = tmp_path / "pids"
  with scorer(1, 1.5, leave="leave_a_child") as pool:
    scores = pool.score([group("a", pids=str(pids))])
  assert scores.failed[0].all()
  assert wait_until(lambda: not any(map(is_alive, map(int, pids.read_text().split()))))


def test_processes_end_with_a_parent_that_is_killed(tmp_path):
  pids = tmp_path / "pids"
  code = ("from tests.trainer.rollouts.test_reward_pool import *\n"
          f"scorer(1, leave='leave_a_child').score([group('a', pids={str(pids)!r})])")
  parent = subprocess.Popen([sys.executable, "-c", code], cwd=tiny.ROOT)
  assert wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
  found = [int(pid) for pid in pids.read_text().split()]
  assert all(map(is_alive, found))
  parent.send_signal(signal.SIGKILL)
  parent.wait()
  assert wait_until(lambda: not any(map(is_alive, found)))


def test_a_process_ends_though_a_copy_of_it_holds_the_connection():
  with scorer(1, obey="obey") as pool:
    scores = pool.score([group("fork"), group("fine")])
  assert [v.tolist() for v in scores.failed] == [[[True]], [[False]]]
  assert "its process ended in the call (exit code 6)" in scores.messages[0]


def test_an_interrupted_score_leaves_nothing_behind(monkeypatch):
  with scorer(1, obey="obey") as pool:
    pool.score([group("fine")])
    [worker] = pool._workers
    receive = worker.receive

    def interrupted():
      receive()
      raise KeyboardInterrupt

    monkeypatch.setattr(worker, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
      pool.score([group("hang"), group("fine")])
    assert [v.tolist() for v in pool.score([group("fine", "b")]).values] == [[[1.0], [1.0]]]


def test_a_function_that_only_the_parent_can_import_is_refused_at_once(monkeypatch):
  monkeypatch.setattr(sys.modules["tests.trainer.reward_functions"], "made_here", lambda completions: [0.0],
                      raising=False)
  with scorer(1, made="made_here") as pool:
    with pytest.raises(ConfigError, match="(?s)made_here', which could not be imported.*move it to a module, or use "
                                          "--config.rollout.reward_workers=0"):
      pool.score([group("a")])
    assert pool._workers == []
  with scorer(0, made="made_here") as pool:
    assert pool.score([group("a")]).values[0].tolist() == [[0.0]]


def test_a_process_that_cannot_start_is_an_error(tmp_path, monkeypatch):
  (tmp_path / "ends_elsewhere.py").write_text(
      f"import os\nif os.getpid() != {os.getpid()}: os._exit(9)\ndef f(completions): return [0.0]\n")
  monkeypatch.syspath_prepend(tmp_path)
  with Scorer({"f": reward(type="ends_elsewhere.f")}, 1, 60.0) as pool:
    with pytest.raises(ConfigError, match=r"ended while it started \(exit code 9\)"):
      pool.score([group("a")])


def test_importing_does_not_count_against_the_timeout(tmp_path, monkeypatch):
  (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(1.0)\ndef f(completions): return [2.0]\n")
  monkeypatch.syspath_prepend(tmp_path)
  with Scorer({"f": reward(type="slow_to_import.f")}, 1, 0.5) as pool:
    assert pool.score([group("a")]).values[0].tolist() == [[2.0]]


@IN_BOTH
def test_columns_that_cannot_be_used_are_named(workers):
  with scorer(workers, echo="echo") as pool:
    with pytest.raises(DataError, match=r"a\.jsonl:1: column 'handle', a function, cannot be sent to the processes"):
      pool.score([group("a", number=1, handle=lambda: 0)])
    with pytest.raises(DataError, match=r"b:7: rollout\.rewards\.echo .*: no column 'number'; found 'other'"):
      pool.score([group("a", where="b:7", other=1)])
    with pytest.raises(DataError, match="no column 'number'"):
      pool.check_columns({}, "b:8")


@IN_BOTH
def test_what_a_function_changes_stays_with_it(workers):
  prompt = [{"role": "user", "content": "hi"}]
  groups = [Group(prompt, [[{"role": "assistant", "content": "a"}]], [[1]])] * 2
  with scorer(workers, change="change") as pool:
    assert [v.tolist() for v in pool.score(groups).values] == [[[2.0]], [[2.0]]]
  assert len(prompt) == 1


def test_without_functions_there_are_no_scores():
  with Scorer({}, 2, 1.0) as pool:
    assert pool.names == () and pool.score([group("a", "b")]).values[0].shape == (2, 0)


@pytest.mark.parametrize("workers, seconds", [(-1, 1.0), (1, 0.0), (1, float("nan"))])
def test_numbers_that_cannot_work_are_refused(workers, seconds):
  with pytest.raises(ConfigError, match="found rollout.reward_workers="):
    scorer(workers, seconds, length="length")


def test_a_group_has_tokens_for_each_completion():
  with pytest.raises(ValueError, match="2 completions, but tokens of 1"):
    Group("?", ["a", "b"], [[1]])
