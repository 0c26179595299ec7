"""What rollouts may be asked for, and what their batches hold; none of it needs a device."""

from typing import Any

import jax

from input_pipeline.examples import advantages
from input_pipeline.examples.top_k import ROWS
from trainer import strategies
from trainer.errors import ConfigError
from trainer.generate.sampling import Options
from trainer.rollouts import curriculum, engine, rewards, schedule

# What an environment gives counts as one more function, of weight 1, with this name.
ENVIRONMENT = "environment"


def check(config: Any) -> None:
  """Refuses rollouts that cannot be, before any device work. Raises ConfigError."""
  c, strategy = config.rollout, strategies.of(config)
  if not c.num_prompts:
    return
  if not strategy.takes_rollouts:
    able = [name for name, other in strategies.STRATEGIES.items() if other.takes_rollouts]
    raise ConfigError(f"rollout.num_prompts is {c.num_prompts}, but strategy {config.strategy.name!r} does not learn "
                      f"from completions that are sampled. Use strategy {' or '.join(able)}, or rollout.num_prompts=0.")
  # Rewards are compared within a group.
  alone = strategy.critic or not strategy.rewarded
  for key, least in (("num_prompts", 1), ("group_size", 1 if alone else 2), ("updates", 1), ("epochs", 1),
                     ("max_new_tokens", 1), ("batch_size", 1), ("resample", 0), ("max_without_lesson", 0),
                     ("reward_workers", 0), ("max_turns", 1), ("environment_workers", 1), ("max_staleness", 0),
                     ("prefill_chunk", 0), ("kept_texts", 0), ("devices", 0), ("tensor", 1), ("replay_groups", 0)):
    if c[key] < least:
      raise ConfigError(f"rollout.{key} is {c[key]}; it must be at least {least}.")
  engine.check(config)
  _check_devices(c)
  if c.replay_experts and not config.model.moe.num_experts:
    raise ConfigError("rollout.replay_experts is True, but the model has no experts (model.moe.num_experts=0), so that "
                      "there is nothing to replay. Use --config.rollout.replay_experts=False.")
  curriculum.check(config, strategy.rewarded)
  _check_staleness(config)
  if not c.reward_timeout_seconds > 0:
    raise ConfigError(f"rollout.reward_timeout_seconds is {c.reward_timeout_seconds}; it must be above 0.")
  options = Options(c.temperature, c.top_k, c.top_p, c.min_p)
  options.check("rollout.")
  if options.temperature == 0:
    raise ConfigError("rollout.temperature is 0: all completions of a prompt would be the same. Use 1.0, say.")
  if c.share_beginnings and c.in_flight:
    raise ConfigError("rollout.share_beginnings and rollout.in_flight exclude each other: a prompt would go on with "
                      "newer parameters from a beginning that older ones ran. Leave one of them out.")
  for key, section in c.rewards.items():
    rewards.make(key, section)
  if config.input.batch_size_stages:
    raise ConfigError("input.batch_size_stages has no effect on rollouts, whose steps take as many rows as their "
                      "completions need. Remove it.")
  _check_strategy(config, options.truncated)
  _check_environment(c)


def check_devices(config: Any) -> None:
  """Refuses what the devices and processes of the run cannot do at once, as soon as they are known. Raises ConfigError.

  Each device takes programs in the order in which they come to it. From two threads that may be one order here and
  another there, and where a program's parts wait for one another, all wait for ever.
  """
  c, count = config.rollout, jax.process_count()
  if not c.num_prompts:
    return
  if c.devices and count > 1:
    raise ConfigError(f"rollout.devices is {c.devices} in a run of {count} processes; devices are kept for sampling in "
                      "runs of one process. Use 0, and every device samples and trains in turns; or sample elsewhere "
                      "(rollout.engine, docs/grpo.md).")
  if not (c.concurrent or c.in_flight):
    return
  key, turns = "concurrent" if c.concurrent else "in_flight", "rollout.max_staleness alone works in turns"
  if count > 1 and c.engine is None:
    raise ConfigError(f"rollout.{key} is True in a run of {count} processes that sample themselves: each would begin "
                      "programs of sampling and of updates from two threads, in an order of its own. Sample elsewhere "
                      f"(rollout.engine, docs/grpo.md), or leave rollout.{key} out; {turns}.")
  models = [name for name, section in c.rewards.items() if section.type == rewards.MODEL]
  if count > 1 and models:
    raise ConfigError(f"rollout.{key} is True in a run of {count} processes, and rollout.rewards.{models[0]} is a "
                      "model on the devices that train: it would score beside updates, which each process would begin "
                      f"in an order of its own. Leave one of them out; {turns}.")
  if c.engine is None and not c.devices and len(jax.devices()) > 1:
    raise ConfigError(f"rollout.{key} is True on {len(jax.devices())} devices: two threads would begin programs on "
                      "them, in no one order. Keep some of them for sampling (rollout.devices), sample elsewhere "
                      f"(rollout.engine, docs/grpo.md), or leave it out; {turns}.")


def routing(config: Any, model: Any) -> tuple[int, int] | None:
  """Layers with experts, and experts of a token, where those of sampled tokens are recorded; else None."""
  c = config.rollout
  return getattr(model, "routing", None) if (
      c.num_prompts and c.engine is None and not c.carry_over and not c.replay_groups) else None


def _check_strategy(config: Any, truncated: bool) -> None:
  """Refuses what the strategy cannot learn from; `truncated`: some tokens are never sampled."""
  c, strategy = config.rollout, strategies.of(config)
  if strategy.data == "rollouts" and truncated:
    raise ConfigError(
        f"rollout has top_k={c.top_k}, top_p={c.top_p}, min_p={c.min_p}: what is sampled would come from a truncated "
        "distribution, but the loss is of log-probs of the whole one, so that its gradient would be that of another "
        "policy. Use top_k=0, top_p=1, min_p=0; a lower rollout.temperature is trained as it is sampled.")
  if strategy.data == "rollouts" and (problem := advantages.mismatch(*advantages.kinds(config.strategy))):
    raise ConfigError(f"strategy: {problem}")
  if (strategy.critic or not strategy.rewarded) and c.resample:
    raise ConfigError(f"rollout.resample is {c.resample}, but strategy {config.strategy.name!r} learns from every "
                      "completion, whatever its reward: there is nothing to replace. Use 0.")
  if strategy.rewarded and not len(c.rewards) and c.environment is None:
    raise ConfigError("rollout.rewards is empty and there is no rollout.environment: nothing says what is good. For "
                      'instance config.rollout.rewards.right = reward(type="numeric", answer_key="answer").')
  if "precompute" in config.strategy and config.strategy.precompute:
    raise ConfigError("strategy.precompute is True, but the completions of rollouts are not known before. Use False.")
  if config.strategy.get("teacher") == ROWS:
    raise ConfigError(f"strategy.teacher is {ROWS!r}, but no row says what a teacher expects where the student "
                      "will have said something else. Name a model as teacher.")
  if config.strategy.get("cached_top_k"):
    raise ConfigError(f"strategy.cached_top_k is {config.strategy.cached_top_k}, but what the student will say in "
                      "rollouts is not known before: the teacher has to be there. Use 0.")


def _check_environment(c: Any) -> None:
  """Refuses an environment beside what takes its place, and what is of no use without one."""
  if c.environment is not None and c.tools:
    raise ConfigError("rollout.tools are answered by an environment of their own, and there is rollout.environment. "
                      "Use one of them; an environment may make calls itself.")
  if not 0 < c.turn_share <= 1:
    raise ConfigError(f"rollout.turn_share is {c.turn_share}; it must be above 0, and 1 at most.")
  for key, unset, why in (("turn_share", 1, "so that each has one turn"), ("kept_texts", 0, "and no text goes on")):
    if c[key] != unset and c.environment is None and not c.tools:
      raise ConfigError(f"rollout.{key} is {c[key]}, but nothing answers completions, {why}: give rollout.environment "
                        f"or rollout.tools, or use --config.rollout.{key}={unset}.")
  if ENVIRONMENT in c.rewards and c.environment is not None:
    raise ConfigError(f"rollout.rewards.{ENVIRONMENT} has the name of what rollout.environment gives, in metrics and "
                      "tables. Give that function another name.")


def _check_devices(c: Any) -> None:
  """Refuses devices kept for sampling that would not sample, or not evenly; how many there are is not known yet."""
  if c.tensor > 1 and not c.devices:
    raise ConfigError(f"rollout.tensor is {c.tensor}, but rollout.devices is 0: rollouts are sampled as `mesh` says. "
                      "Use --config.mesh.tensor, or keep devices for sampling.")
  if c.devices % c.tensor:
    raise ConfigError(f"rollout.tensor is {c.tensor}: each copy of the parameters is spread over so many of the "
                      f"devices that sample, and rollout.devices is {c.devices}, no multiple of it.")
  if c.devices and c.engine is not None:
    raise ConfigError(f"rollout.devices is {c.devices}, but rollout.engine samples. Leave one of them out.")


def _check_staleness(config: Any) -> None:
  """Refuses completions of older policies where they cannot be, or would be taken for those of the policy itself."""
  c = config.rollout
  for key, given in (("concurrent", c.concurrent), ("schedule", c.schedule is not None), ("in_flight", c.in_flight)):
    if given and not c.max_staleness:
      raise ConfigError(f"rollout.{key} is {c[key]!r}, but with rollout.max_staleness=0 completions are of the policy "
                        "as it is before an update, and nothing can be sampled ahead. Use "
                        f"--config.rollout.max_staleness=1 or more, or leave rollout.{key} out.")
  if c.concurrent and c.schedule is not None:
    raise ConfigError("rollout.schedule says which policy samples what, and with rollout.concurrent the clock would. "
                      "Use --config.rollout.concurrent=False: the schedule is then followed in turns, to the bit.")
  if c.in_flight and not c.concurrent and c.schedule is None:
    raise ConfigError("rollout.in_flight is True, but nothing is sampled while updates go on. Use "
                      "--config.rollout.concurrent=True, or leave rollout.in_flight out.")
  others = [key for key in ("environment", "tools", "engine") if c[key] not in (None, ())]
  if c.in_flight and others:
    raise ConfigError(f"rollout.in_flight is True, and there is rollout.{others[0]}: the policy can change within a "
                      "rollout where this program samples it, and nothing answers. Leave one of them out.")
  if c.schedule is not None:
    schedule.read(c.schedule, c.max_staleness, c.in_flight)
  if c.carry_over:
    steps = c.updates * c.epochs
    if c.max_staleness < steps:
      raise ConfigError(f"rollout.carry_over is True, by which completions go on in the next rollout, {steps} updates "
                        f"later (rollout.updates × rollout.epochs), and rollout.max_staleness is {c.max_staleness}. "
                        f"Use --config.rollout.max_staleness={steps} or more, or leave rollout.carry_over out.")
    if c.replay_experts:
      raise ConfigError("rollout.carry_over and rollout.replay_experts exclude each other: what goes on in the next "
                        "rollout has experts of two policies. Leave one of them out.")
    if others:
      raise ConfigError(f"rollout.carry_over is True, and there is rollout.{others[0]}: completions can go on in the "
                        "next rollout where this program samples them, and nothing answers them. Leave one of them "
                        "out.")
  _check_replay(config)
  if c.max_staleness and "correction" in config.strategy and config.strategy.correction == "none":
    raise ConfigError(f"rollout.max_staleness is {c.max_staleness}, but strategy.correction is 'none': completions of "
                      "an older policy would be trained on as if they were of this one. Use "
                      "--config.strategy.correction=token_truncate (docs/grpo.md), or rollout.max_staleness=0.")


def _check_replay(config: Any) -> None:
  """Refuses groups of earlier rollouts where they cannot be trained on again."""
  c, strategy = config.rollout, strategies.of(config)
  if not c.replay_groups:
    return
  if c.replay_window < 1:
    raise ConfigError(f"rollout.replay_window is {c.replay_window}; it must be at least 1: groups are of so many "
                      "rollouts before.")
  if "correction" not in config.strategy or strategy.critic:
    raise ConfigError(f"rollout.replay_groups is {c.replay_groups}, by which completions of older policies are trained "
                      f"on again, with what they were worth then; strategy {config.strategy.name!r} does not know how. "
                      "Use strategy grpo, or 0.")
  if config.strategy.correction == "none":
    raise ConfigError(f"rollout.replay_groups is {c.replay_groups}, but strategy.correction is 'none': completions of "
                      "older policies would be trained on as if they were of this one. Use "
                      "--config.strategy.correction=token_truncate (docs/grpo.md), or rollout.replay_groups=0.")
  if c.replay_experts:
    raise ConfigError("rollout.replay_groups and rollout.replay_experts exclude each other: the recorded experts of "
                      "earlier rollouts are those of other routers. Leave one of them out.")
