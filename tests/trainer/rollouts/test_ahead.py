"""Rollouts by older policies: which one, in turns and at once; stopped, dropped, replayed; what is refused."""

import contextlib
import json
import re
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from input_pipeline.steps import PROMPTS, Past, Piece, steps_of_rollouts
from tests import programs
from tests.trainer import rollout_runs
from tests.trainer.rollout_runs import STOP, assert_same_state, start_of, table, write_prompts
from trainer import train
from trainer.config import strategy
from trainer.errors import ConfigError
from trainer.rollouts import ahead as ahead_lib
from trainer.rollouts import experience
from trainer.rollouts.ahead import Ahead
from trainer.rollouts.at_once import Concurrent
from trainer.rollouts.producer import Rollout
from trainer.rollouts.schedule import NAME, Policies, Sampled, read


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
  return write_prompts(tmp_path_factory.mktemp("prompts"))


def config(prompts, stop=None, total_steps=8, **rollout):
  """Rollouts of two updates each, two updates old at most."""
  c = rollout_runs.config(prompts, total_steps=total_steps, strategy=dict(correction="token_truncate"),
                          rollout=dict(max_staleness=2) | rollout)
  if stop is not None:
    c.callbacks.stop = dict(type=STOP, step=stop)
  return c


def rows_of(workdir):
  """{step: metrics} without what depends on the clock."""
  return {step: {key: value for key, value in row.items() if not key.startswith("rollout/idle_")}
          for step, row in rollout_runs.rows_of(workdir).items()}


def schedule_of(workdir):
  return [tuple(json.loads(line).values()) for line in (workdir / NAME).read_text().splitlines()]


# ----------------------------------------------------------------------------------------------
# Whole runs.


@pytest.fixture(scope="module")
def straight(prompts, tmp_path_factory):
  """(run, workdir) of 8 steps, in turns."""
  workdir = tmp_path_factory.mktemp("straight")
  return train(config(prompts), workdir), workdir


def test_in_turns_each_rollout_is_of_the_policy_two_updates_before(straight):
  """Except the first two, which the untrained policy samples; ratios are those of the policy that is trained, 1 at
  first, and the correction's those to the one that sampled."""
  run, workdir = straight
  assert schedule_of(workdir) == [(0, 0, 1), (1, 0, 3), (2, 2, 5), (3, 4, 7)]
  rows = rows_of(workdir)
  assert [rows[step]["rollout/staleness"] for step in range(1, 9)] == [0, 0, 2, 2, 2, 2, 2, 2]
  for step in (1, 3, 5, 7):
    assert rows[step]["policy/ratio_mean"] == 1 and rows[step]["clip_ratio/region_mean"] == 0
    assert (rows[step]["sampling/sampling_logp_difference/max"] < 1e-5) == (step == 1)
  before = SimpleNamespace(drawn=4, rates=None, carried=(), remembered=())
  again = run.data.producer.roll(Policies(start_of(run), 0), 1, before, 2, run.data.taken.at(2), lambda: False)
  assert again.table == table(workdir, 3)
  np.testing.assert_array_equal(again.groups, [4, 5, 6, 7])


def test_stopped_anywhere_it_becomes_the_same_run(prompts, straight, tmp_path):
  """Also with rollouts that wait, and with one that is left off: state, every number of each row, samples, schedule."""
  for step in (1, 2):
    assert train(config(prompts, stop=step), tmp_path / "w").step == step
  left = config(prompts)
  left.callbacks.stop = dict(type=f"{rollout_runs.TOYS}.StopInRollout", step=4)
  assert train(left, tmp_path / "w").step == 4
  assert train(config(prompts, stop=5), tmp_path / "w").step == 5
  run = train(config(prompts), tmp_path / "w")
  assert_same_state(run.state, straight[0].state)
  assert rows_of(tmp_path / "w") == rows_of(straight[1]) and schedule_of(tmp_path / "w") == schedule_of(straight[1])
  for step in (1, 3, 5, 7):
    assert table(tmp_path / "w", step) == table(straight[1], step)


def test_what_is_older_than_allowed_is_dropped_counted_and_sampled_again(prompts, straight, tmp_path, caplog):
  """Stopped while rollout 2 waits, and continued with staleness 1: its prompts are sampled by the policy of then."""
  assert train(config(prompts, stop=3), tmp_path / "w").step == 3
  c = config(prompts, total_steps=6, max_staleness=1)
  c.allow_config_changes = True
  train(c, tmp_path / "w")
  rows = rows_of(tmp_path / "w")
  assert rows[5]["rollout/groups_dropped"] == 4 and rows[5]["rollout/staleness"] == 1
  assert "4 groups that were sampled ahead (rollouts 2 to 2) are dropped" in caplog.text
  ours, theirs = table(tmp_path / "w", 5), table(straight[1], 5)
  assert [line["where"] for line in ours] == [line["where"] for line in theirs] and ours != theirs


def test_another_size_holds_after_the_rollouts_that_wait(prompts, tmp_path):
  """Stopped while rollout 2 waits, and continued with one update for each: 2 serves two, as it was made to."""
  assert train(config(prompts, stop=3), tmp_path / "w").step == 3
  c = config(prompts, total_steps=8, updates=1)
  c.allow_config_changes = True
  run = train(c, tmp_path / "w")
  assert schedule_of(tmp_path / "w") == [(0, 0, 1), (1, 0, 3), (2, 2, 5), (3, 4, 7), (4, 5, 8)]
  assert [run.data.taken.rows_before(step) for step in range(9)] == [0, 2, 4, 6, 8, 10, 12, 16, 20]
  assert sum(run.data.counters(8)[name]["prompts"] for name in ("main", "other")) == 20


def test_a_run_at_once_is_had_again_from_its_schedule(prompts, tmp_path):
  """Also one that was stopped on its way: parameters, optimizer, every number and every sample, to the bit."""
  assert train(config(prompts, stop=3, concurrent=True), tmp_path / "w").step == 3
  run = train(config(prompts, concurrent=True), tmp_path / "w")
  lines = {number: (version, update) for number, version, update in schedule_of(tmp_path / "w")}
  assert [update for _, update in lines.values()] == [1, 3, 5, 7]
  assert all(0 <= update - 1 - version <= 2 for version, update in lines.values()) and lines[1][0] < 2
  again = train(config(prompts, schedule=str(tmp_path / "w" / NAME)), tmp_path / "again")
  assert_same_state(run.state, again.state)
  assert rows_of(tmp_path / "w").keys() == rows_of(tmp_path / "again").keys()
  for step, row in rows_of(tmp_path / "again").items():
    assert row == rows_of(tmp_path / "w")[step]
  for step in (1, 3, 5, 7):
    assert table(tmp_path / "w", step) == table(tmp_path / "again", step)
  assert not any(thread.name == "rollouts" for thread in threading.enumerate())


def apart(prompts, **changed):
  """Two devices train and two sample."""
  c = config(prompts, **changed)
  c.mesh.update(data=2, fsdp=1)
  return c


@pytest.mark.devices(4)
def test_devices_that_only_sample_change_nothing(prompts, tmp_path):
  """In turns it is the run whose two devices do both."""
  programs.show(2)
  straight = train(apart(prompts, total_steps=4), tmp_path / "both")
  programs.show(4)
  run = train(apart(prompts, total_steps=4, devices=2), tmp_path / "kept")
  assert_same_state(run.state, straight.state)
  assert rows_of(tmp_path / "kept") == rows_of(tmp_path / "both")


@pytest.mark.devices(4)
def test_sampled_on_devices_of_its_own_at_once_a_run_is_had_again(prompts, tmp_path):
  """From its schedule in turns; two devices share the heads that sample, and two others the rows that are trained."""
  run = train(apart(prompts, total_steps=6, devices=2, tensor=2, concurrent=True), tmp_path / "w")
  sampler = run.data.producer.sampler
  assert sampler.mesh.shape["tensor"] == 2 and not set(sampler.mesh.devices.flat) & set(run.mesh.devices.flat)
  c = apart(prompts, total_steps=6, devices=2, tensor=2, schedule=str(tmp_path / "w" / NAME))
  assert_same_state(run.state, train(c, tmp_path / "again").state)
  assert rows_of(tmp_path / "w") == rows_of(tmp_path / "again")


# ----------------------------------------------------------------------------------------------
# Which policy samples what, with a sampler that takes no time.


class Fake:
  """A producer of rollouts without a completion, which notes what it is asked for."""

  def __init__(self, wait=None):
    self.asked, self.wait, self.changes = [], wait, []

  def roll(self, policies, number, last, first_step, size, stopped):
    drawn = 0 if last is None else last.drawn
    if self.wait is not None:
      self.wait(number)
    self.asked.append((number, policies.version, first_step, drawn, int(policies.params["w"])))
    for _ in range(5):
      if (params := policies.look()) is not None:
        assert params["w"] == policies.version
    self.changes.append(policies.changes)
    return Rollout(number, policies.version, first_step, size.every, size.parts, drawn + size.size, [0] * size.size,
                   experience.collect([]), {}, None, [])


def run_of(total_steps):
  chrono = SimpleNamespace(pause=lambda kind: contextlib.nullcontext())
  return SimpleNamespace(step=0, total_steps=total_steps, stop_requested="", chrono=chrono, state={})


def played(ahead, run, until):
  """The rollouts that are trained on up to so many updates; parameters are the number of updates."""
  found, now = [], None
  while run.step < until:
    run.state["params"] = {"w": jnp.asarray(run.step)}
    due = now is None or run.step >= now.end
    assert ahead.fill(run, due)
    if due:
      now, metrics = ahead.pop()
      found.append((now, metrics))
    run.step += 1
  return found


@pytest.mark.parametrize("staleness, every, versions", [
    (0, 1, [0, 1, 2, 3, 4, 5]), (1, 1, [0, 0, 1, 2, 3, 4]), (4, 1, [0, 0, 0, 0, 0, 1]), (1, 3, [0, 2, 5, 8]),
    (4, 3, [0, 0, 2, 5])])
def test_in_turns_a_rollout_is_sampled_as_early_as_it_may_be(staleness, every, versions):
  """Within a rollout that is trained on, too; each once, with its version's parameters, and none beyond the end."""
  fake, total = Fake(), every * len(versions)
  found = played(Ahead(fake, steps_of_rollouts(4, every, 1), None, staleness), run_of(total), total)
  assert fake.asked == [(n, version, n * every, 4 * n, version) for n, version in enumerate(versions)]
  if staleness:
    assert [metrics["rollout/staleness"] for _, metrics in found] == [
        n * every - version for n, version in enumerate(versions)]
  else:
    assert [metrics for _, metrics in found] == [{}] * len(found)


def test_after_a_restart_what_waits_is_as_old_as_its_oldest_tokens():
  ahead = Ahead(Fake(), steps_of_rollouts(4, 1, 1), None, 2)

  def waiting(number, version, oldest=None):
    return Rollout(number, version, number, 1, 1, 4 * number, [0] * 4, experience.collect([]), {}, None, [],
                   oldest=oldest)

  ahead.restore(5, None, [waiting(5, 3), waiting(6, 4, oldest=3), waiting(7, 6)])
  assert [rollout.number for rollout in ahead.ready] == [5] and ahead.made.number == 5


@pytest.mark.parametrize("step, number", [(0, 0), (5, 1)])
def test_the_first_rollout_of_a_run_that_goes_on_without_one_is_another_than_a_run_begins_with(step, number):
  """A run that had none, having trained on something else; its draws are none that a run begins with."""
  ahead, run = Ahead(fake := Fake(), steps_of_rollouts(4, 1, 1), None, 0), run_of(20)
  ahead.restore(step, None, [])
  run.step, run.state["params"] = step, {"w": jnp.asarray(step)}
  assert ahead.fill(run, True) and fake.asked == [(number, step, step, 0, step)]


def test_a_rollout_is_told_of_stops_and_of_the_rows_that_its_schedule_holds(monkeypatch):
  """Of several processes none leaves off by itself."""
  asked, lines = [], {0: Sampled(0, kept=7)}
  producer = SimpleNamespace(roll=lambda policies, *rest: asked.append((policies.kept, rest[-1])))
  run = run_of(20)
  run.state["params"] = {"w": jnp.asarray(0)}
  for versions, kept in ((None, None), (lines, 7)):
    assert not Ahead(producer, steps_of_rollouts(4, 1, 1), None, 0, versions).fill(run, True)  # it was left off
    found, stopped = asked.pop()
    assert found == kept and not stopped()
    run.stop_requested = "a signal"
    assert stopped()
    monkeypatch.setattr(ahead_lib.jax, "process_count", lambda: 2)
    assert not stopped()
    monkeypatch.undo()
    run.stop_requested = ""


def test_where_prompts_end_what_has_begun_is_still_made():
  """Eight prompts, four a rollout; of the second rollout one group goes on."""
  for carried, numbers in (((), [0, 1]), (("a group",), [0, 1, 2])):
    fake, run = Fake(), run_of(100)
    roll = fake.roll
    fake.roll = lambda policies, number, *rest, roll=roll, carried=carried: roll(policies, number, *rest)._replace(
        carried=carried if number == 1 else (), drawn=min(4 * number + 4, 8))
    ahead = Ahead(fake, steps_of_rollouts(4, 1, 1), 8, 3)
    played(ahead, run, len(numbers))
    assert [number for number, *_ in fake.asked] == numbers


def test_rollouts_are_made_on_the_devices_that_sample():
  """Also what is in no place of its own."""
  where, device = [], jax.devices("cpu")[0]
  handover = SimpleNamespace(device=device)
  for of, expected in ((None, None), (handover, device)):
    ahead = Ahead(Fake(), steps_of_rollouts(4, 1, 1), None, 2, handover=of)
    ahead._timed(lambda: where.append(jax.config.jax_default_device))
    assert where.pop() == expected


def test_a_rollout_is_of_the_size_of_the_steps_that_it_is_trained_in():
  """Sampled by the policy of step 3, for step 5, from which on the config has two prompts and no longer four."""
  past = Past(3, 5, PROMPTS, (Piece(0, 0, 4),), 0)
  ahead = Ahead(Fake(), steps_of_rollouts(2, 1, 1, past), None, 2)
  waiting = [Rollout(n, n - 2, n, 1, 1, 4 * n + 4, [0] * 4, experience.collect([]), {}, None, []) for n in (3, 4)]
  ahead.restore(3, None, waiting)
  run = run_of(6)
  run.step, run.state["params"] = 3, {"w": jnp.asarray(3)}
  assert ahead.fill(run, True)
  assert [(made.first_step, made.version, len(made.groups)) for made in ahead.ready] == [
      (3, 1, 4), (4, 2, 4), (5, 3, 2)]


def test_prompts_that_end_are_not_drawn_again():
  fake = Fake()
  ahead = Ahead(fake, steps_of_rollouts(4, 1, 1), 8, 3)
  played(ahead, run_of(100), 2)
  assert [number for number, *_ in fake.asked] == [0, 1] and ahead.made.end == 2


def test_at_once_no_rollout_is_older_than_allowed_and_updates_go_on_meanwhile():
  """The sampler waits for the policy where it is ahead, and updates for the sampler where that is late."""
  gates = {2: threading.Event()}
  fake = Fake(lambda number: gates[number].wait(30) if number in gates else None)
  ahead, run = Concurrent(fake, steps_of_rollouts(4, 1, 1), None, 2), run_of(20)
  try:
    played(ahead, run, 1)
    deadline = time.monotonic() + 30
    while len(ahead.ready) < 1 and time.monotonic() < deadline:
      time.sleep(0.01)
    assert len(fake.asked) == 2 and fake.asked[1][1] == 0  # the third is being made, by the untrained policy
    run.state["params"] = {"w": jnp.asarray(1)}
    assert ahead.fill(run, True) and ahead.pop()[0].number == 1  # an update, while the third is made
    gates[2].set()
    run.step = 2
    run.state["params"] = {"w": jnp.asarray(2)}
    assert ahead.fill(run, True)
    rollout, metrics = ahead.pop()
    assert rollout.number == 2 and rollout.version <= 1 and 0 <= metrics["rollout/idle_trainer"] <= 1
    run.step = 3
    for rollout, metrics in played(ahead, run, 20):
      assert 0 <= rollout.first_step - rollout.version <= 2 and metrics["rollout/groups_dropped"] == 0
    assert all(version == w for _, version, _, _, w in fake.asked) and len(fake.asked) == 20
  finally:
    ahead.close()


@pytest.mark.timeout(60)
def test_an_error_of_the_sampler_ends_the_run_and_a_stop_does_not_wait_for_it():
  def fail(number):
    raise ValueError(f"no rollout {number}")

  ahead, run = Concurrent(Fake(fail), steps_of_rollouts(4, 1, 1), None, 1), run_of(5)
  run.state["params"] = {"w": jnp.asarray(0)}
  with pytest.raises(ValueError, match="no rollout 0"):
    ahead.fill(run, True)
  ahead.close()
  gate = threading.Event()
  ahead, run.stop_requested = Concurrent(Fake(lambda number: gate.wait(30)), steps_of_rollouts(4, 1, 1), None, 1), "now"
  assert not ahead.fill(run, True)
  gate.set()
  ahead.close()


# ----------------------------------------------------------------------------------------------
# What is refused.


@pytest.mark.parametrize("change, said", [
    (dict(max_staleness=-1), "rollout.max_staleness is -1; it must be at least 0"),
    (dict(max_staleness=0, concurrent=True), "Use --config.rollout.max_staleness=1 or more, or leave rollout.co"),
    (dict(max_staleness=0, schedule="x.jsonl"), "rollout.schedule is 'x.jsonl', but with rollout.max_staleness=0"),
    (dict(concurrent=True, schedule="x.jsonl"), "Use --config.rollout.concurrent=False"),
    (dict(in_flight=True), "Use --config.rollout.concurrent=True, or leave rollout.in_flight out"),
    (dict(in_flight=True, concurrent=True, share_beginnings=True), "rollout.share_beginnings and rollout.in_flight ex"),
    (dict(share_beginnings=True, engine="http://127.0.0.1:9"),
     "use --config.rollout.share_beginnings=False"),
    (dict(in_flight=True, concurrent=True, engine="http://127.0.0.1:9"), "and there is rollout.engine"),
    (dict(max_staleness=1, carry_over=True), "Use --config.rollout.max_staleness=2 or more, or leave rollout.ca"),
    (dict(carry_over=True, environment="tests.trainer.rollout_toys.Echo"), "there is rollout.environment"),
    (dict(carry_over=True, engine="http://127.0.0.1:9"), "there is rollout.engine"),
    (dict(devices=1), "rollout.devices is 1, and there are 1 devices in all: none would be left to train. Use 0."),
    (dict(devices=3, tensor=2), "rollout.devices is 3, no multiple of it"),
    (dict(tensor=2), "rollout.devices is 0: rollouts are sampled as `mesh` says"),
    (dict(devices=2, engine="http://127.0.0.1:9"), "rollout.devices is 2, but rollout.engine samples"),
    (dict(schedule="/nowhere/x.jsonl"), "Give the schedule.jsonl in the workdir of"),
])
def test_what_cannot_be_is_refused_with_what_to_type(prompts, tmp_path, change, said):
  with pytest.raises(ConfigError, match=re.escape(said)):
    train(config(prompts, **change), tmp_path / "w")


def test_experts_of_two_policies_are_not_replayed(prompts, tmp_path):
  c = config(prompts, max_staleness=2, carry_over=True, replay_experts=True)
  c.model.moe.num_experts = 2
  with pytest.raises(ConfigError, match="rollout.carry_over and rollout.replay_experts exclude each other"):
    train(c, tmp_path / "w")


@pytest.mark.devices(8)
def test_two_threads_share_no_mesh(prompts, tmp_path):
  with pytest.raises(ConfigError, match="on 8 devices: two threads .* Keep some of them for sampling"):
    train(config(prompts, max_staleness=1, concurrent=True), tmp_path / "w")


def test_older_completions_are_corrected_or_refused(prompts, tmp_path):
  c = config(prompts)
  c.strategy = strategy("grpo")
  with pytest.raises(ConfigError, match="Use --config.strategy.correction=token_truncate"):
    train(c, tmp_path / "w")


@pytest.mark.parametrize("line, said", [
    ('{"rollout": 0}', "is no line of a schedule.jsonl"), ("[]", "is no line of a schedule.jsonl"),
    ('{"rollout": 1, "policy": 1, "update": 5}', "update 5 trains on what the policy after 1 updates sampled"),
    ('{"rollout": 1, "policy": 5, "update": 5}', "update 5 trains on what the policy after 5 updates sampled")])
def test_a_schedule_that_cannot_be_is_refused(tmp_path, line, said):
  good = '{"rollout": 0, "policy": 0, "update": 1}\n'
  (tmp_path / NAME).write_text(good + good.replace('"policy": 0, "update": 1', '"policy": 1, "update": 3'))
  assert read(tmp_path / NAME, 2) == {0: Sampled(1, [])}  # the last one of a number counts
  (tmp_path / NAME).write_text(good + line)
  with pytest.raises(ConfigError, match=re.escape(said)):
    read(tmp_path / NAME, 2)


def test_a_schedule_of_another_run_is_refused_when_it_does_not_fit():
  for versions, said in (({0: Sampled(0)}, "has no such rollout: rollout 1"),
                         ({0: Sampled(0), 1: Sampled(5)}, "that the policy after 5 sampled")):
    with pytest.raises(ConfigError, match=said):
      played(Ahead(Fake(), steps_of_rollouts(4, 1, 1), None, 2, versions), run_of(5), 5)


@pytest.mark.parametrize("since, began, busy", [(100.0, 110.0, 20.0), (115.0, 110.0, 15.0)])
def test_sampling_counts_from_when_it_began_or_from_the_rollout_before(since, began, busy, monkeypatch):
  """Until 130; what was sampled before the last rollout was handed over was counted with that one."""
  now = iter([began, 130.0])
  monkeypatch.setattr(ahead_lib, "time", SimpleNamespace(perf_counter=lambda: next(now)))
  ahead = Ahead(Fake(), steps_of_rollouts(4, 1, 1), None, 1)
  ahead._since = since
  assert ahead._timed(lambda: "made") == "made" and ahead._busy == busy and ahead._began is None


def test_shares_of_idle_time_are_of_the_time_since_the_rollout_before(monkeypatch):
  """Of 50 s updates have waited 10 and 30 were sampled, 5 of them of a rollout that is not over."""
  ahead = Ahead(Fake(), steps_of_rollouts(4, 1, 1), None, 2)
  ahead.ready.append(Rollout(3, 4, 6, 2, 2, 16, [0] * 4, experience.collect([]), {}, None, []))
  ahead._since, ahead._waited, ahead._busy, ahead._began, ahead._dropped = 100.0, 10.0, 25.0, 145.0, 3
  monkeypatch.setattr(ahead_lib, "time", SimpleNamespace(perf_counter=lambda: 150.0))
  _, metrics = ahead.pop()
  assert metrics == pytest.approx({"rollout/staleness": 2.0, "rollout/groups_dropped": 3.0,
                                   "rollout/idle_trainer": 0.2, "rollout/idle_sampler": 0.4})
  assert (ahead._since, ahead._waited, ahead._busy, ahead._dropped) == (150.0, 0.0, 0.0, 0)


@pytest.mark.parametrize("began, idle_sampler", [(None, 0.7), (104.0, 0.1), (90.0, 0.0)])
def test_what_stood_still_is_a_share_of_the_time_since_the_rollout_before(monkeypatch, began, idle_sampler):
  """10 s, in 2 of which updates waited and in 3 of which was sampled; and since `began`, which may be before."""
  monkeypatch.setattr(ahead_lib, "time", SimpleNamespace(perf_counter=lambda: 110.0))
  ahead = Ahead(Fake(), steps_of_rollouts(4, 1, 1), None, 2)
  ahead.ready.append(Rollout(5, 3, 5, 1, 1, 24, [0] * 4, experience.collect([]), {}, None, []))
  ahead._since, ahead._waited, ahead._busy, ahead._began, ahead._dropped = 100.0, 2.0, 3.0, began, 8
  rollout, metrics = ahead.pop()
  assert rollout.number == 5 and metrics == {
      "rollout/staleness": 2.0, "rollout/groups_dropped": 8.0, "rollout/idle_trainer": pytest.approx(0.2),
      "rollout/idle_sampler": pytest.approx(idle_sampler)}
  ahead.ready.append(rollout)
  ahead._began = None
  monkeypatch.setattr(ahead_lib, "time", SimpleNamespace(perf_counter=lambda: 111.0))
  again = ahead.pop()[1]
  assert (again["rollout/idle_trainer"], again["rollout/idle_sampler"], again["rollout/groups_dropped"]) == (0, 1, 0)


def test_the_policy_that_samples_is_handed_over_without_its_critic():
  ahead, asked = Ahead(Fake(), steps_of_rollouts(4, 1, 1), None, 2), []
  run = SimpleNamespace(state={"params": {"w": 1, "critic": 2}}, program=SimpleNamespace(
      optimizer=SimpleNamespace(trainable="those")))
  assert ahead._policy(run) == {"w": 1}
  ahead._handover = lambda params, trainable: asked.append((params, trainable)) or {"w": 3, "critic": 4}
  assert ahead._policy(run) == {"w": 3} and asked == [({"w": 1, "critic": 2}, "those")]


def test_what_is_dropped_after_a_restart_is_told(caplog):
  ahead = Ahead(Fake(), steps_of_rollouts(4, 1, 1), None, 2)
  last, *ready = (Rollout(n, version, n, 1, 1, 4 * n, [0] * n, experience.collect([]), {}, None, [])
                  for n, version in ((4, 3), (5, 3), (6, 3), (7, 6)))
  ahead.restore(5, last, ready)
  assert [rollout.number for rollout in ahead.ready] == [5]
  assert ("13 groups that were sampled ahead (rollouts 6 to 7) are dropped, from the first on whose policy is more "
          "than rollout.max_staleness=2 updates old.") in caplog.text
  ahead.restore(5, last, ready[1:])
  assert ahead.made is last and not ahead.ready


def test_tokens_are_as_old_as_the_policies_that_said_them():
  """10 tokens of version 3 and 30 of version 5, trained on after 7 updates."""
  newer = iter([None, ("p4", 5)])
  policies = Policies("p3", 3, lambda look, version: next(newer))
  assert policies.look() is None and policies.staleness(7) == {}
  assert policies.look() == "p4" and (policies.version, policies.changes) == (5, [(2, 5)])
  policies.tokens.update({3: 10, 5: 30})
  assert policies.staleness(7) == {"rollout/token_staleness": (4 * 10 + 2 * 30) / 40,
                                   "rollout/max_token_staleness": 4.0, "rollout/policy_changes": 1.0}
  assert Policies("p", 3).look() is None and Policies("p", 3).staleness(7) == {}


def test_the_time_of_sampling_counts_from_the_rollout_before(monkeypatch):
  """It began 6 s before it ends, of which 4 s are since the last rollout was taken."""
  clock = iter([100.0, 106.0])
  monkeypatch.setattr(ahead_lib, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
  ahead = Ahead(Fake(), steps_of_rollouts(4, 1, 1), None, 2)
  ahead._since, ahead._busy = 102.0, 1.0
  assert ahead._timed(lambda: "made") == "made" and ahead._busy == 5.0 and ahead._began is None
