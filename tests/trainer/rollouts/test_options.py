"""What rollouts may be asked for: each refusal by a config that lacks nothing else, and what is allowed beside it."""

import re
from types import SimpleNamespace

import jax
import pytest

from tests.trainer.rollout_runs import TOYS, config
from trainer import program
from trainer.config import reward, strategy
from trainer.errors import ConfigError
from trainer.rollouts import options, schedule


@pytest.fixture(scope="module")
def resolved():
  """{name of a strategy: a config that is allowed}."""
  found = {}
  for name in ("grpo", "dpo", "ppo", "distill"):
    c = config(["a.jsonl"])
    c.strategy = strategy(name, **dict(teacher="a/model") if name == "distill" else {})
    if name == "distill":
      c.rollout.rewards = {}
    found[name] = program.resolve(c)[0]
  return found


def changed(resolved, name="grpo", section="rollout", **values):
  c = resolved[name].copy_and_resolve_references()
  with c.unlocked():
    (c if section is None else c[section]).update(values)
  return c


def refused(c, said):
  with pytest.raises(ConfigError, match=re.escape(said)):
    options.check(c)


def test_what_is_allowed_is(resolved):
  for c in resolved.values():
    options.check(c)
  # Without prompts there are no rollouts to check.
  c = changed(resolved, num_prompts=0, temperature=0.0)
  c.strategy = strategy("sft")
  options.check(c)
  c.rollout.num_prompts = 1
  refused(c, "rollout.num_prompts is 1, but strategy 'sft' does not learn from completions that are sampled")


@pytest.mark.parametrize("key, least", [
    ("group_size", 2), ("updates", 1), ("epochs", 1), ("max_new_tokens", 1), ("batch_size", 1), ("resample", 0),
    ("max_without_lesson", 0), ("reward_workers", 0), ("max_turns", 1), ("environment_workers", 1),
    ("max_staleness", 0), ("prefill_chunk", 0), ("kept_texts", 0), ("devices", 0), ("tensor", 1), ("replay_groups", 0)])
def test_numbers_have_their_least(resolved, key, least):
  refused(changed(resolved, **{key: least - 1}), f"rollout.{key} is {least - 1}; it must be at least {least}.")
  options.check(changed(resolved, **{key: least}))


def test_a_group_of_one_is_enough_where_nothing_is_compared_within_it(resolved):
  for name, allowed in (("grpo", False), ("dpo", False), ("ppo", True), ("distill", True)):
    c = changed(resolved, name, group_size=1)
    if allowed:
      options.check(c)
      refused(changed(resolved, name, group_size=0), "rollout.group_size is 0; it must be at least 1")
      refused(changed(resolved, name, resample=2), f"rollout.resample is 2, but strategy {name!r} learns from every")
    else:
      refused(c, "rollout.group_size is 1; it must be at least 2")
      options.check(changed(resolved, name, resample=2))


@pytest.mark.parametrize("values, said", [
    (dict(num_prompts=-1), "rollout.num_prompts is -1; it must be at least 1"),
    (dict(replay_experts=True), "rollout.replay_experts is True, but the model has no experts"),
    (dict(reward_timeout_seconds=0.0), "rollout.reward_timeout_seconds is 0.0; it must be above 0"),
    (dict(min_p=1.5), "rollout.min_p: found 1.5"), (dict(top_k=-1), "rollout.top_k: found -1"),
    (dict(temperature=0.0), "rollout.temperature is 0: all completions of a prompt would be the same"),
    (dict(top_k=5), "rollout has top_k=5, top_p=1.0, min_p=0.0: what is sampled would come from a truncated"),
    (dict(top_p=0.5), "rollout has top_k=0, top_p=0.5"), (dict(min_p=0.5), "min_p=0.5: what is sampled would come"),
    (dict(curriculum_target=1.5), "rollout.curriculum_target is 1.5"), (dict(engine="a"), "rollout.engine is 'a'"),
    (dict(turn_share=0.5), "rollout.turn_share is 0.5, but nothing answers completions, so that each has one turn"),
    (dict(turn_share=1.5), "rollout.turn_share is 1.5; it must be above 0, and 1 at most"),
    (dict(kept_texts=2), "rollout.kept_texts is 2, but nothing answers completions, and no text goes on"),
    (dict(tensor=2), "rollout.tensor is 2, but rollout.devices is 0"),
    (dict(tensor=2, devices=3), "and rollout.devices is 3, no multiple of it"),
    (dict(devices=2, engine="http://a"), "rollout.devices is 2, but rollout.engine samples"),
    (dict(concurrent=True), "rollout.concurrent is True, but with rollout.max_staleness=0 completions are of the"),
    (dict(in_flight=True), "rollout.in_flight is True, but with rollout.max_staleness=0"),
    (dict(schedule="a"), "rollout.schedule is 'a', but with rollout.max_staleness=0"),
    (dict(schedule="a", concurrent=True, max_staleness=4), "and with rollout.concurrent the clock would"),
    (dict(schedule="a", max_staleness=4), "rollout.schedule is 'a', which cannot be read"),
    (dict(in_flight=True, max_staleness=4), "rollout.in_flight is True, but nothing is sampled while updates go on"),
    (dict(in_flight=True, concurrent=True, max_staleness=4, environment=f"{TOYS}.Echo"),
     "rollout.in_flight is True, and there is rollout.environment"),
    (dict(in_flight=True, concurrent=True, max_staleness=4, engine="http://a"),
     "rollout.in_flight is True, and there is rollout.engine"),
    (dict(carry_over=True, max_staleness=5, updates=2, epochs=3),
     "completions go on in the next rollout, 6 updates later (rollout.updates × rollout.epochs), and rollout.max_stal"),
    (dict(carry_over=True, max_staleness=6, tools=("a.b",)), "rollout.carry_over is True, and there is rollout.tools"),
    (dict(max_staleness=1), "rollout.max_staleness is 1, but strategy.correction is 'none'"),
    (dict(replay_groups=2), "rollout.replay_groups is 2, but strategy.correction is 'none'"),
    (dict(replay_groups=2, replay_window=0), "rollout.replay_window is 0; it must be at least 1"),
    (dict(environment=f"{TOYS}.Echo", tools=("a.b",)), "rollout.tools are answered by an environment of their own"),
    (dict(environment=f"{TOYS}.Echo", rewards=dict(environment=reward(type=f"{TOYS}.low"))),
     "rollout.rewards.environment has the name of what rollout.environment gives"),
    (dict(rewards=dict(other=reward(type="numerik"))), "did you mean 'numeric'")], ids=str)
def test_what_cannot_be_is_refused(resolved, values, said):
  refused(changed(resolved, **values), said)


def test_what_stands_elsewhere_in_the_config_may_be_against_rollouts(resolved):
  refused(changed(resolved, section="input", batch_size_stages=((0, 2),)), "input.batch_size_stages has no effect on")
  c = changed(resolved, section="strategy", baseline="none", scale="group")
  refused(c, "strategy: ")
  refused(changed(resolved, "dpo", "strategy", precompute=True), "strategy.precompute is True, but the completions")
  refused(changed(resolved, "distill", "strategy", teacher="rows"), "strategy.teacher is 'rows', but no row says what")
  refused(changed(resolved, "distill", "strategy", cached_top_k=4), "strategy.cached_top_k is 4, but what the student")
  refused(changed(resolved, "distill", curriculum_target=0.5), "strategy 'distill' does not learn from rewards")
  c = changed(resolved)
  c.rollout.rewards = {}
  refused(c, "rollout.rewards is empty and there is no rollout.environment: nothing says what is good")
  moe = changed(resolved, carry_over=True, max_staleness=4, replay_experts=True)
  moe.model.moe.num_experts = 4
  refused(moe, "rollout.carry_over and rollout.replay_experts exclude each other")
  moe = changed(resolved, "grpo", "strategy", correction="token_mask")
  moe.model.moe.num_experts = 4
  moe.rollout.update(replay_groups=2, replay_window=1)
  options.check(moe)
  moe.rollout.replay_experts = True
  refused(moe, "rollout.replay_groups and rollout.replay_experts exclude each other")
  for name in ("dpo", "ppo", "distill"):
    refused(changed(resolved, name, replay_groups=2), f"strategy '{name}' does not know how. Use strategy grpo, or 0.")
  # Pairs are compared with their own log-probs, whatever was never sampled.
  options.check(changed(resolved, "dpo", top_k=5))


@pytest.mark.parametrize("values", [
    dict(max_staleness=1), dict(max_staleness=1, concurrent=True),
    dict(max_staleness=1, concurrent=True, in_flight=True), dict(share_beginnings=True),
    dict(max_staleness=6, updates=2, epochs=3, carry_over=True), dict(devices=4, tensor=2), dict(engine="http://a"),
    dict(environment=f"{TOYS}.Echo", turn_share=0.5, kept_texts=2), dict(tools=("a.b",), kept_texts=2)], ids=str)
def test_what_goes_together_is_allowed(resolved, values):
  c = changed(resolved, **values)
  c.strategy.correction = "token_truncate"
  options.check(c)
  if c.rollout.in_flight:
    c.rollout.share_beginnings = True
    refused(c, "rollout.share_beginnings and rollout.in_flight exclude each other")


def test_a_schedule_is_read_as_the_config_allows(resolved, tmp_path):
  schedule.write(tmp_path, 0, schedule.Sampled(1, [(2, 2)]), 3)
  c = changed(resolved, max_staleness=2, schedule=str(tmp_path / schedule.NAME), in_flight=True)
  c.strategy.correction = "token_truncate"
  options.check(c)
  c.rollout.in_flight = False
  refused(c, "its policy changes within a rollout. Use --config.rollout.in_flight=True")
  c.rollout.update(in_flight=True, max_staleness=1)
  refused(c, "rollout.max_staleness is 1. Use the one of the run that wrote it")


def test_experts_are_recorded_where_each_token_is_of_one_policy_of_this_program(resolved):
  model = SimpleNamespace(routing=(3, 2))
  for values, expected in (({}, (3, 2)), (dict(carry_over=True), None), (dict(engine="http://a"), None),
                           (dict(replay_groups=1), None), (dict(num_prompts=0), None)):
    assert options.routing(changed(resolved, **values), model) == expected
  assert options.routing(changed(resolved), SimpleNamespace()) is None


@pytest.mark.parametrize("values, count, said", [
    (dict(concurrent=True), 2, "rollout.concurrent is True on 2 devices"),
    (dict(in_flight=True), 2, "rollout.in_flight is True on 2 devices"), (dict(concurrent=True), 1, None),
    (dict(concurrent=True, devices=1), 2, None), (dict(concurrent=True, engine="http://a"), 2, None), ({}, 2, None)])
def test_two_threads_share_no_devices(resolved, monkeypatch, values, count, said):
  monkeypatch.setattr(jax, "devices", lambda: [None] * count)
  c = changed(resolved, **values)
  if said is None:
    options.check_devices(c)
    return
  with pytest.raises(ConfigError, match=said):
    options.check_devices(c)
