"""Which checkpoints stay."""

from typing import Any

from orbax.checkpoint import checkpoint_managers as policies


def policy(keep_last: int, keep_steps: int, values: dict[int, float] | None, mode: str) -> Any:
  """Orbax's rule by which one of these is enough.

  Args:
    keep_last: that many newest ones stay.
    keep_steps: those at multiples of it stay; 0: none.
    values: {step: value of a metric}, as it is at any time; that with the best stays. None: there is no metric.
    mode: min or max.
  """
  kept: list[Any] = [policies.LatestN(keep_last)]
  if keep_steps:
    kept.append(policies.EveryNSteps(keep_steps))
  if values is not None:
    kept.append(_Best(values, mode))
  return policies.AnyPreservationPolicy(kept)


class _Best:
  """Keeps the checkpoint with the best value of a metric; those without one are not kept for it."""

  def __init__(self, values: dict[int, float], mode: str):
    self._values, self._sign = values, -1 if mode == "min" else 1

  def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
    values = {info.step: self._sign * self._values[info.step] for info in checkpoints if info.step in self._values}
    # Of equal ones the newest; NaN is no value.
    best = max((step for step in values if values[step] == values[step]), key=lambda s: (values[s], s), default=None)
    return [info.step == best for info in checkpoints]
