"""When things happen in a run, in optimizer steps: how long it is, when it logs, evaluates and saves."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer.config import durations
from trainer.data import Data
from trainer.errors import ConfigError
from trainer.optim.schedules import ToSteps

# What (durations' prefix, steps) means where nothing is saved now and then.
NEVER = {("ckpt", None): "only at the end",
         ("ckpt", 0): "never: the last state is not saved either, nor that at a signal"}


@dataclass(frozen=True)
class Evaluation:
  """When one evaluator runs: every so many steps (0: never), before the first step, after the last; and whether the run
  goes on if it fails ("stop" or "warn")."""

  every: int
  at_start: bool
  at_end: bool
  on_error: str


@dataclass(frozen=True)
class Horizon:
  """Steps are updates done; a period of 0 steps is never.

  Attributes:
    total_steps: the last step.
    log_steps, ckpt_steps, keep_steps: periods of writing metrics, of saving, and of saving what is kept for good.
    saves_last: whether the last state, or that at a signal, is saved; `ckpt` = never: it is not.
    evaluations: {name of an evaluator: when it runs}.
    to_steps: resolves further durations of the config, see `schedules.ToSteps`.
  """

  total_steps: int
  log_steps: int
  ckpt_steps: int
  keep_steps: int
  saves_last: bool
  evaluations: dict[str, Evaluation]
  to_steps: ToSteps

  def evaluates(self, step: int) -> list[str]:
    """Names of the evaluators that run after `step` updates; 0: before the first."""
    if step == 0:
      return [name for name, plan in self.evaluations.items() if plan.at_start]
    last = step == self.total_steps
    return [name for name, plan in self.evaluations.items()
            if last and plan.at_end or plan.every and step % plan.every == 0]

  def saves(self, step: int) -> bool:
    """Whether a checkpoint is due after `step` updates; that the last state is saved is another matter."""
    return any(every and step % every == 0 for every in (self.ckpt_steps, self.keep_steps))


def make_horizon(config: Any, data: Data, say: Callable[[str], None]) -> Horizon:
  """The durations of the config as steps of a run on these data; `say` is told what they are.

  Raises:
    ConfigError: durations that cannot be, or a run without an end.
  """
  run = durations.RunLengths(None, lambda step: data.batch_range(step)[0], data.row_tokens, data.rows_per_epoch)
  total_steps = _total_steps(durations.resolve(config, "total", run), data.num_steps, say)
  run = run._replace(total_steps=total_steps)
  periods = {}
  for prefix in ("log", "ckpt", "keep"):
    period = durations.resolve(config, prefix, run)
    say(f"{prefix}: {f'every {period}' if period.steps else NEVER.get((prefix, period.steps), 'never')}")
    periods[prefix] = period.steps
  to_steps: Any = functools.partial(durations.steps, run=run)
  evaluations = {}
  for name in config.evals:
    cfg = config.evals[name]
    every = to_steps(cfg, "eval", default=max(1, total_steps // 10), where=f"evals.{name}")
    evaluations[name] = Evaluation(every, cfg.at_start, cfg.at_end, cfg.on_error)
  return Horizon(total_steps, periods["log"] or 0, periods["ckpt"] or 0, periods["keep"] or 0, periods["ckpt"] != 0,
                 evaluations, to_steps)


def _total_steps(asked: durations.Duration, available: int | None, say: Callable[[str], None]) -> int:
  """The run's last step: what the config asks for, or the end of the data if that comes first."""
  if asked.steps is None and available is None:
    raise ConfigError("the run has no end: give one of total_{steps,examples,tokens,epochs}, or input.stop=first.")
  if asked.steps == 0:
    raise ConfigError("total_steps is 0: nothing would be trained. Use at least 1.")
  if available is not None and (asked.steps is None or available < asked.steps):
    say(f"total: {available:,} steps (the data end there, by input.stop; asked for: {asked})")
    return available
  say(f"total: {asked}")
  return asked.steps
