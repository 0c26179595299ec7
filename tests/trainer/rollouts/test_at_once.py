"""Rollouts that several processes have at the same updates, though the first alone makes them and goes by its clock."""

import random
import re
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from input_pipeline.steps import steps_of_rollouts
from tests.trainer.distributed import two_threads
from tests.trainer.rollouts.test_ahead import Fake, played, run_of
from trainer.config import defaults, reward
from trainer.distributed import processes
from trainer.errors import ConfigError
from trainer.rollouts import at_once, experience, options, schedule
from trainer.rollouts.ahead import Ahead
from trainer.rollouts.at_once import Agreed, Concurrent, Followed
from trainer.rollouts.experience import Trajectory
from trainer.rollouts.groups import NoSignal
from trainer.rollouts.producer import Rollout

pytestmark = [pytest.mark.host_patches, pytest.mark.timeout(120)]


def made(wait=None, total_steps=20, staleness=2, every=1):
  """(what makes rollouts, with a list of the policies that its server was given, its producer, a run)."""
  fake, run = Fake(wait), run_of(total_steps)
  run.given, run.agreed = [], False
  fake.sampler = SimpleNamespace(hand_over=lambda params: run.given.append(int(params["w"])))
  run.agree_to_stop = lambda: setattr(run, "agreed", True)
  return Agreed(fake, steps_of_rollouts(4, every, 1), None, staleness), fake, run


@pytest.mark.parametrize("seed, every", [(0, 1), (1, 1), (2, 2)])
def test_all_have_a_rollout_at_the_same_update_and_give_the_policy_of_the_same(seed, every, monkeypatch):
  """Whatever the sampler and each of the processes take their time with; the first alone samples."""
  rng = random.Random(seed)

  def sample(number):
    with processes.first_goes_first("what the thread does by itself"):
      time.sleep(rng.choice([0, 0, 0.02]))

  def play(index):
    ahead, fake, run = made(sample, every=every)
    own = random.Random(10 * seed + index)
    fill = ahead.fill

    def late(*args):
      time.sleep(own.choice([0, 0.005]))
      return fill(*args)

    monkeypatch.setattr(ahead, "fill", late)
    try:
      found = played(ahead, run, 20)
    finally:
      ahead.close()
    idle = [(about["rollout/idle_trainer"], about["rollout/idle_sampler"]) for _, about in found]
    assert all(0 <= share <= 1 for shares in idle for share in shares)
    return [(r.number, r.version, r.first_step, r.drawn) for r, _ in found], fake.asked, run.given

  first, second = two_threads.run(monkeypatch, play)
  assert first[0] == second[0] and len(first[0]) == 20 // every and second[1] == []
  # Each is of the policy that was given when it was begun, as soon as the one before had been had.
  assert first[2] == second[2] == [version for _, version, *_ in first[0]]
  assert [asked[:2] for asked in first[1]] == [had[:2] for had in first[0]]
  for number, version, began, _ in first[0]:
    assert began == number * every and 0 <= began - version <= 2


def test_where_the_sampler_is_late_each_rollout_begins_when_the_one_before_is_there(monkeypatch):
  """Each is awaited, and the next begun at once, by the policy of that update."""
  def play(index):
    ahead, _, run = made(lambda number: time.sleep(0.02), total_steps=6)
    found = played(ahead, run, 6)
    ahead.close()
    return [rollout.version for rollout, _ in found]

  assert two_threads.run(monkeypatch, play) == [[0, 0, 1, 2, 3, 4]] * 2


def test_a_stop_of_the_first_process_does_not_wait_for_a_rollout_and_is_told(monkeypatch):
  gate = threading.Event()

  def play(index):
    ahead, _, run = made(lambda number: gate.wait(60))
    run.state["params"], run.stop_requested = {"w": jnp.asarray(0)}, "now" if index == 0 else ""
    went_on = ahead.fill(run, True)
    gate.set()
    ahead.close()
    return went_on, run.agreed

  assert two_threads.run(monkeypatch, play) == [(False, True)] * 2


def test_an_error_of_the_sampler_ends_all(monkeypatch):
  def fail(number):
    raise ConfigError(f"no rollout {number}")

  def play(index):
    ahead, _, run = made(fail)
    try:
      return played(ahead, run, 3)
    finally:
      ahead.close()

  errors = two_threads.run(monkeypatch, play)
  assert all(isinstance(error, ConfigError) for error in errors), errors
  assert [str(error) for error in errors] == [
      "no rollout 0", "process 0 failed at: sampling by rollout.engine: ConfigError: no rollout 0"]


def test_a_rollout_is_told_whole():
  """Also one that teaches nothing and one without a completion; NaN, infinities and bits of float64 are kept."""
  trajectory = Trajectory(np.arange(4), np.array([0, 0, 1, 1]), np.array([0, 0, -1.5, -np.inf]), 2, "stop", 7)
  of_one = experience.collect([[(trajectory, 0.25, 1)]])
  for held, signal, rates in ((of_one, None, np.array([0.5, np.nan], np.float32)),
                              (experience.collect([]), NoSignal("all equal", "wait", True), None)):
    rollout = Rollout(3, 2, 4, 2, 2, 16, [12, 7], held, {"reward": 0.1 + 0.2, "kl": float("nan")}, signal,
                      [{"completion": "é\n", "reward": None}], rates)
    again = Rollout.unpacked(rollout.packed())
    for name, part in rollout._asdict().items():
      if name in ("carried", "changes"):
        assert not getattr(again, name)
      else:
        np.testing.assert_equal(getattr(again, name), part, name)


@pytest.mark.parametrize("rollout, said", [
    (dict(concurrent=True), "rollout.concurrent is True in a run of 2 processes that sample themselves"),
    (dict(in_flight=True), "rollout.in_flight is True in a run of 2 processes that sample themselves"),
    (dict(concurrent=True, engine="http://127.0.0.1:9", model=True), "rollout.rewards.taste is a model on the devices"),
    (dict(devices=1), "rollout.devices is 1 in a run of 2 processes"),
    (dict(concurrent=True, engine="http://127.0.0.1:9"), ""),
    (dict(max_staleness=3), ""),
])
def test_what_several_processes_cannot_do_at_once_is_refused(rollout, said, monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  config = defaults()
  config.rollout.num_prompts = 4
  if rollout.pop("model", False):
    config.rollout.rewards.taste = reward(type="model", path="x")
  config.rollout.update(rollout)
  if not said:
    options.check_devices(config)
    return
  with pytest.raises(ConfigError, match=re.escape(said)):
    options.check_devices(config)


@pytest.mark.parametrize("rollout, num_processes, kind, lead", [
    ({}, 1, Ahead, 6), (dict(follows=True), 1, Ahead, 6), (dict(follows=True, in_flight=True), 1, Followed, 6),
    (dict(concurrent=True), 1, Concurrent, 6), (dict(concurrent=True, in_flight=True), 1, Concurrent, 6),
    (dict(concurrent=True), 2, Agreed, 6), (dict(carry_over=True), 1, Ahead, 0),
    (dict(carry_over=True, concurrent=True), 1, Concurrent, 2),
    (dict(carry_over=True, concurrent=True, epochs=5), 1, Concurrent, 0)], ids=str)
def test_how_rollouts_are_made_is_as_the_config_says(rollout, num_processes, kind, lead, monkeypatch, tmp_path):
  """Rollouts of two updates a pass and two passes, six updates ahead at most; what goes on takes a rollout's updates
  more."""
  monkeypatch.setattr(jax, "process_count", lambda: num_processes)
  config, follows = defaults(), rollout.get("follows", False)
  config.rollout.update(dict(max_staleness=6, updates=2, epochs=2) | {
      key: value for key, value in rollout.items() if key != "follows"})
  line = schedule.Sampled(1, [], 7 * rollout.get("in_flight", False))
  schedule.write(tmp_path, 0, line, 4)
  config.rollout.schedule = str(tmp_path / schedule.NAME) if follows else None
  fake, taken = Fake(), steps_of_rollouts(4, 2, 2)
  fake.sampler = SimpleNamespace(mesh="the sampler's mesh")
  for sampling, handover in ((0, None), (3, ("the sampler's mesh", config.sharding_rules))):
    monkeypatch.setattr(at_once.mesh_lib, "num_sampling", lambda config, sampling=sampling: sampling)
    monkeypatch.setattr(at_once, "Handover", lambda *of: of)
    ahead = at_once.make_ahead(config, fake, taken, 30)
    assert type(ahead) is kind and (ahead._lead, ahead._max_staleness, ahead._handover) == (lead, 6, handover)
    assert (ahead._producer, ahead._taken, ahead._num_items) == (fake, taken, 30)
    assert ahead._versions == ({0: line} if follows else None)
    assert bool(ahead._newer) == rollout.get("in_flight", False)


def test_an_update_that_has_a_rollout_does_not_wait_for_the_next(monkeypatch):
  gate, waited = threading.Event(), []

  def play(index):
    ahead, _, run = made(lambda number: number and waited.append(not gate.wait(2)))
    run.state["params"] = {"w": jnp.asarray(0)}
    try:
      assert ahead.fill(run, True) and len(ahead.ready) == 1  # the next has begun
      return ahead.fill(run, True)
    finally:
      gate.set()
      ahead.close()

  assert two_threads.run(monkeypatch, play) == [True] * 2 and waited == [False]


def test_sampling_at_once_goes_on_with_its_own_copy_when_the_update_takes_the_runs_parameters():
  gate = threading.Event()
  fake = Fake(lambda number: gate.wait(30))
  ahead, run = Concurrent(fake, steps_of_rollouts(4, 1, 1), None, 2), run_of(20)
  run.state["params"] = {"w": jnp.asarray(7)}
  try:
    assert ahead.fill(run, False)
    run.state["params"]["w"].delete()  # as the step does, to which it is donated
    run.state["params"] = {"w": jnp.asarray(8)}
    gate.set()
    assert ahead.fill(run, True) and fake.asked[0] == (0, 0, 0, 0, 7)
  finally:
    gate.set()
    ahead.close()
