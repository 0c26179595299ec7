"""Durations of the config (`{prefix}_{steps,examples,tokens,epochs,percent}`) as optimizer steps.

One unit of a prefix may be given; None or -1 means "not given", 0 means never.
Examples are rows, tokens are row positions (rows × seq_len), percent is of the whole run. Values are
rounded to the nearest step, and to at least one unless they are exactly 0.

Batches may grow over a run. A duration then counts from the run's first step: `warmup_tokens` ends at
the step by which that many tokens were seen. Periods (`ckpt_tokens`) are converted once, in the same
way, to a constant number of steps.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from trainer.config.keys import DURATION_UNITS
from trainer.errors import ConfigError

MAX_STEPS = 2**31 - 1
Rows = int | Callable[[int], int]


@dataclasses.dataclass(frozen=True)
class Duration:
  """A number of steps (None: not given) and how it was found: `20% of 1000`."""

  steps: int | None
  reason: str

  def __str__(self) -> str:
    if self.steps is None:
      return "unset"
    count = f"{self.steps:,} step{'' if self.steps == 1 else 's'}"
    return f"{count} ({self.reason})" if self.reason else count


class RunLengths(NamedTuple):
  """What a run's durations are counted in."""

  # Of the run; None while that is what is being resolved.
  total_steps: int | None
  # Rows per step, or a function from a step to the rows of all steps before it.
  batch_size: Rows
  # Tokens per row; None: rows have no fixed number (they are prompts).
  seq_len: int | None
  # Rows of the data; None: not known.
  rows_per_epoch: int | None


def steps(cfg: Any, prefix: str, run: RunLengths, default: int | None = None, where: str = "") -> int | None:
  """Optimizer steps of `{prefix}_…`, or None if no unit is given and there is no default; see `resolve`."""
  return resolve(cfg, prefix, run, default, where).steps


def resolve(cfg: Any, prefix: str, run: RunLengths, default: int | None = None, where: str = "") -> Duration:
  """The one duration given among `{prefix}_{steps,examples,tokens,epochs,percent}` of `cfg`.

  Args:
    cfg: the section of the config that holds the five keys.
    prefix: such as `total`, `warmup`, `ckpt`.
    run: its lengths.
    default: steps where no unit is given.
    where: the section's name, for messages, e.g. `schedule`.

  Raises:
    ConfigError: several units are given, a value is out of range, or its unit has no meaning here.
  """
  given = {unit: getattr(cfg, f"{prefix}_{unit}") for unit in DURATION_UNITS}
  given = {unit: value for unit, value in given.items() if value is not None and value != -1}
  key = f"{where}.{prefix}" if where else prefix
  for unit, value in given.items():
    if value < 0:
      raise ConfigError(f"{key}_{unit} = {value:g}; it must be 0 or more, or -1 (in a file None, too): not given")
  if len(given) > 1:
    first, *others = given
    found = " and ".join(f"{key}_{unit} = {value:g}" for unit, value in given.items())
    unset = " ".join(f"--config.{key}_{unit}=-1" for unit in others)
    raise ConfigError(
        f"{found} are both set; give one of them. To keep {key}_{first}, add {unset}"
        f" (in a config file: None); to keep another one, add --config.{key}_{first}=-1."
    )
  if not given:
    return Duration(default, "default" if default is not None else "")
  (unit, value), = given.items()
  if not math.isfinite(value):
    raise ConfigError(f"{key}_{unit} = {value}; it must be a finite number")
  if unit == "steps":
    return Duration(_bounded(value, f"{key}_steps", value), "")
  if unit == "percent":
    exact, reason = _from_percent(value, f"{key}_percent", run.total_steps)
  else:
    exact, reason = _from_rows(unit, value, f"{key}_{unit}", run)
  _bounded(exact, f"{key}_{unit}", value)
  # Half a step counts as one, so that the rule does not depend on whether the number is odd or even.
  return Duration(0 if value == 0 else max(1, math.floor(exact + 0.5)), reason)


def _bounded(exact: float, key: str, value: float) -> Any:
  """So many steps, if they can be counted in an int32, as they are on devices."""
  if exact > MAX_STEPS:
    raise ConfigError(f"{key} = {value:g}, which is {exact:g} steps; there are {MAX_STEPS:,} at most")
  return exact


def _from_percent(value: float, key: str, total_steps: int | None) -> tuple[float, str]:
  if not 0 <= value <= 100:
    raise ConfigError(f"{key} = {value:g}; percents lie between 0 and 100 (of the whole run)")
  if total_steps is None:
    raise ConfigError(f"{key} = {value:g}, but the length of the run is what percents are counted of;"
                      f" set {key.removesuffix('percent')}steps, _examples, _tokens or _epochs")
  return total_steps * value / 100, f"{value:g}% of {total_steps:,}"


def _from_rows(unit: str, value: float, key: str, run: RunLengths) -> tuple[float, str]:
  """Steps, not yet rounded, in which so many examples, tokens or epochs are seen."""
  _, batch_size, seq_len, rows_per_epoch = run
  if callable(batch_size):
    step_of, rows_before = functools.partial(_step_of_rows, batch_size), batch_size
  else:
    step_of, rows_before = (lambda rows: rows / batch_size), (lambda step: step * batch_size)
  if unit == "epochs":
    if rows_per_epoch is None:
      raise ConfigError(
          f"{key} = {value:g}, but the length of an epoch is not known for these data;"
          f" set {key.removesuffix('epochs')}steps, _examples or _tokens instead"
      )
    return step_of(value * rows_per_epoch), f"{value:g} epochs of {rows_per_epoch:,} rows"
  if unit == "tokens" and seq_len is None:
    raise ConfigError(f"{key} = {value:,}, but how many tokens rollouts give is not known before; set "
                      f"{key.removesuffix('tokens')}steps, _examples (prompts) or _epochs instead")
  exact = step_of(value / seq_len if unit == "tokens" else value)
  count = max(math.ceil(exact), 1)
  first, last = rows_before(1), rows_before(count) - rows_before(count - 1)
  per_step = f"{first:,} rows a step" if first == last else f"{first:,} to {last:,} rows a step"
  return exact, f"{value:,} {unit}, {per_step}" + (f" of {seq_len:,} tokens" if unit == "tokens" else "")


def _step_of_rows(rows_before_step: Callable[[int], int], rows: float) -> float:
  """The (fractional) step before which `rows` rows are seen."""
  high = 1
  while rows_before_step(high) < rows:
    high *= 2
  low = 0  # rows_before_step(low) <= rows <= rows_before_step(high)
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (middle, high) if rows_before_step(middle) <= rows else (low, middle)
  below = rows_before_step(low)
  return low + (rows - below) / (rows_before_step(high) - below)
