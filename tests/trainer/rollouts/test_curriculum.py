"""Prompts by measured pass rate: which are taken, against a loop over the stream; a stopped run goes on alike."""

import hashlib
import math
from types import SimpleNamespace

import numpy as np
import pytest

from tests.trainer import rollout_runs
from tests.trainer.rollout_runs import STOP, assert_same_state, table
from trainer import train
from trainer.config import defaults, strategy
from trainer.errors import ConfigError
from trainer.rollouts import curriculum as curriculum_lib
from trainer.rollouts.curriculum import Curriculum, chance


def config(prompts, **changed):
  """12 prompts, of whose 4 completions number % 5 pass; rollouts of 4 prompts, 16 updates."""
  rollout = dict(curriculum_target=0.5, curriculum_floor=0.2) | changed.pop("rollout", {})
  c = rollout_runs.config(prompts, "some_pass", **dict(total_steps=16) | changed, rollout=rollout)
  c.input.sources.main.max_documents, c.input.sources.other.max_documents = 7, 5
  return c


@pytest.mark.parametrize("rate, target, expected", [
    (0.5, 0.5, 1.0), (0.25, 0.5, math.sqrt(0.75)), (0.75, 0.5, math.sqrt(0.75)), (0.3, 0.3, 1.0),
    (0.9, 0.5, 0.6), (0.999999, 0.5, 0.1), (0.5, 0.25, 2 ** -1 * 4 ** 0.25 * (4 / 3) ** 0.75), (0.0, 0.5, 0.1),
    (1.0, 0.5, 0.1), (math.nan, 0.5, 1.0)])
def test_the_probability_is_that_of_the_closed_form(rate, target, expected):
  """(r/t)^t ((1-r)/(1-t))^(1-t), and for t = 1/2 twice the deviation of a reward of 0 or 1."""
  assert chance(rate, target, 0.1) == pytest.approx(expected, rel=1e-12)


def stream_of(rates, **changed):
  """A curriculum over as many prompts, which come again and again, all in one order."""
  options = dict(curriculum_target=0.5, curriculum_floor=0.1, curriculum_passing=1.0) | changed
  prompts = SimpleNamespace(num_prompts=len(rates), num_items=None, fingerprint="a", place=lambda k: k % len(rates),
                            item=lambda k: k)
  return Curriculum(SimpleNamespace(rollout=SimpleNamespace(**options), seed=3), prompts)


def test_how_often_a_prompt_is_taken():
  rates_N = np.array([0, 0.25, 0.5, 1, np.nan], np.float32)
  taken, drawn = stream_of(rates_N).choose(0, 6000, rates_N)
  visits = drawn / 5
  for place, expected in enumerate((0.1, math.sqrt(0.75), 1, 0.1, 1)):
    share = sum(k % 5 == place for k in taken) / visits
    assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / visits) + 1 / visits, place


def test_pass_rates_are_shares_of_rewarded_completions():
  """Of a prompt without any what is known stays known."""
  curriculum = stream_of([0, 0, 0, 0], curriculum_passing=0.9)
  groups = [SimpleNamespace(item=SimpleNamespace(number=number), rewards=np.array(rewards)) for number, rewards in (
      (5, [0.9, 0.3 * 3, 0.8, np.nan, 2.0]), (2, [np.nan] * 5), (0, [0.0] * 5), (4, [1.0, 0, 0, 0, 0]))]
  before_N = np.array([0.5, np.nan, 0.625, np.nan], np.float32)
  rates_N, metrics = curriculum.after(before_N, groups, 3)
  np.testing.assert_array_equal(rates_N, np.array([0.2, 0.75, 0.625, np.nan], np.float32))
  assert metrics == {"curriculum/passed_over": 3, "curriculum/measured": 0.75,
                     "curriculum/pass_rate": pytest.approx(0.525, abs=1e-7)}
  assert before_N[0] == 0.5 and np.isnan(curriculum.unmeasured()).all()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
  return rollout_runs.write_prompts(tmp_path_factory.mktemp("prompts"))


def rows(workdir):
  """{step: metrics} that do not depend on the clock."""
  return {step: {key: value for key, value in row.items() if not key.startswith("rollout/idle_")}
          for step, row in rollout_runs.rows_of(workdir).items()}


def numbers(workdir, step):
  return [line["prompt"] for line in table(workdir, step) if line["sample"] == 0]


@pytest.mark.parametrize("max_staleness", [0, 3])
def test_the_prompts_are_those_of_a_loop_and_stopped_anywhere_the_run_is_the_same(prompts, tmp_path, max_staleness):
  """Also of rollouts that were sampled ahead, which know what those before them measured."""
  given = dict(strategy=dict(correction="token_truncate"), rollout=dict(max_staleness=3)) if max_staleness else {}
  run = train(config(prompts, **given), tmp_path / "w")
  stream, rates, place = run.data._prompts, {}, 0
  chances = {0: 0.2, 1: math.sqrt(0.75), 2: 1.0, 3: math.sqrt(0.75), 4: 0.2, None: 1.0}
  found, passed_over = rows(tmp_path / "w"), []
  for step in range(1, 17, 2):
    taken, before = [], place
    while len(taken) < 4:
      item, key = stream.item(place), repr((run.config.seed, "curriculum", place)).encode()
      drawn = int(hashlib.blake2b(key, digest_size=8).hexdigest(), 16) / 2**64
      if drawn < chances[rates.get(item.prompt.text)]:
        taken.append(item)
      place += 1
    rates |= {item.prompt.text: item.columns["number"] % 5 for item in taken}
    assert numbers(tmp_path / "w", step) == [item.prompt.text for item in taken]
    passed_over.append(place - before - 4)
    assert found[step]["curriculum/passed_over"] == found[step + 1]["curriculum/passed_over"] == passed_over[-1]
    assert found[step]["curriculum/pass_rate"] == pytest.approx(sum(rates.values()) / 4 / len(rates))
    assert found[step]["epoch"] == place / 12
  assert passed_over[:2] == [0, 0] and sum(passed_over) > 3

  for stop in (5, 8, None):  # within a rollout, and between two
    stopping = config(prompts, **given)
    if stop is not None:
      stopping.callbacks.stop = dict(type=STOP, step=stop)
    again = train(stopping, tmp_path / "parts")
  assert_same_state(again.state, run.state)
  assert rows(tmp_path / "parts") == found
  assert [numbers(tmp_path / "parts", s) for s in range(1, 17, 2)] == [
      numbers(tmp_path / "w", s) for s in range(1, 17, 2)]


def test_of_other_prompts_nothing_is_known(caplog):
  curriculum, saved = stream_of([0, 0]), {"pass_rates": np.array([0, 1], np.float32), "tokens": np.arange(3)}
  rates_N, others = curriculum.restored(saved, "a")
  assert rates_N.tolist() == [0, 1] and list(others) == ["tokens"] and not caplog.records
  rates_N, _ = curriculum.restored(saved, "b")
  assert np.isnan(rates_N).all() and "measured anew" in caplog.text
  off = stream_of([0, 0], curriculum_target=None)
  assert off.restored(saved, "a")[0] is None
  assert off.choose(3, 2, saved["pass_rates"]) == ([3, 4], 5) and off.after(saved["pass_rates"], [], 2) == (None, {})


@pytest.mark.parametrize("rollout, said", [
    (dict(curriculum_target=1.0), "curriculum_target is 1.0; a share"),
    (dict(curriculum_floor=0.0), "curriculum_floor is 0.0; it must be above 0"),
    (dict(curriculum_passing=math.inf), "curriculum_passing is inf"),
    (dict(curriculum_target=None), "nothing in this configuration uses them:\n  - config.rollout.curriculum_floor")])
def test_what_cannot_work_is_refused(prompts, tmp_path, rollout, said):
  with pytest.raises(ConfigError, match=said):
    train(config(prompts, rollout=rollout), tmp_path / "w")


@pytest.mark.parametrize("target, floor, rewarded, said", [
    (0.0, 0.1, True, "rollout.curriculum_target is 0.0; a share"),
    (1.0, 0.1, True, "rollout.curriculum_target is 1.0; a share"),
    (0.5, 0.0, True, "rollout.curriculum_floor is 0.0; it must be above 0"),
    (0.5, 1.1, True, "rollout.curriculum_floor is 1.1; it must be above 0"),
    (0.5, 0.1, False, "rollout.curriculum_target is 0.5, but strategy 'grpo' does not learn from rewards. Leave it ou"),
    (0.5, 1.0, True, None), (None, 0.0, False, None)])
def test_limits_of_what_can_be_aimed_at(target, floor, rewarded, said):
  c = defaults()
  c.strategy = strategy("grpo")
  c.rollout.update(curriculum_target=target, curriculum_floor=floor)
  if said is None:
    curriculum_lib.check(c, rewarded)
  else:
    with pytest.raises(ConfigError, match=f"^{said}"):
      curriculum_lib.check(c, rewarded)


def test_a_stream_that_ends_gives_what_it_has_and_without_a_target_all():
  taken = stream_of([0.5, 0.5], curriculum_target=None)
  taken._prompts.num_items = 5
  assert taken.choose(1, 3, None) == ([1, 2, 3], 4) and taken.choose(4, 3, None) == ([4], 5)
  assert taken.unmeasured() is None and taken.after(None, [], 2) == (None, {})
  rates = np.array([1.0, 0.5])
  measured = stream_of([0, 0])
  found, others = measured.restored({"pass_rates": rates, "tokens": 7}, "a")
  assert found is rates and others == {"tokens": 7}
  assert np.isnan(measured.restored({"pass_rates": rates}, "b")[0]).all()
  assert taken.restored({"pass_rates": rates}, "a") == (None, {})
