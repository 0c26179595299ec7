"""Which policy samples a rollout, and when: right before its training, or up to `rollout.max_staleness` updates before.

A rollout whose training begins after f updates is sampled by the policy after v of them, its version; f - v is its
staleness. In turns with updates v is as small as it may be, or what a schedule says; at once with them
(trainer/rollouts/at_once.py) the clock decides.
"""

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from absl import logging

from input_pipeline.steps import Steps
from trainer.distributed.handover import Handover
from trainer.errors import ConfigError
from trainer.rollouts import schedule
from trainer.rollouts.producer import Producer, Rollout
from trainer.strategies import critic


class Ahead:
  """Rollouts that wait for their training, made in turns with updates.

  Args:
    taken: the prompts of each step.
    num_items: prompts that there are; None: no end.
    max_staleness: updates.
    versions: {number of a rollout: by which policies it is sampled}; None: as early as it may be.
    lead: updates by which a rollout may be made ahead, `max_staleness` at most.
    handover: gives the parameters to the devices that sample; None: they are those that train.

  Attributes:
    ready: those that wait, the next first.
  """

  # What may take a policy's place while a rollout is sampled: see `trainer.rollouts.schedule.Policies`.
  _newer: Callable[[int, int], tuple[Any, int] | None] | None = None

  def __init__(self, producer: Producer, taken: Steps, num_items: int | None, max_staleness: int,
               versions: Mapping[int, schedule.Sampled] | None = None, lead: int | None = None,
               handover: Handover | None = None):
    self._producer, self._taken, self._num_items = producer, taken, num_items
    self._max_staleness, self._versions = max_staleness, versions
    self._lead, self._handover = max_staleness if lead is None else lead, handover
    self.ready: deque[Rollout] = deque()
    self._last: Rollout | None = None  # that was made
    self._start = 0  # the updates done when there was none
    self._dropped = 0  # groups, since the rollout before
    # Seconds that updates waited and that were sampled, since when, and since when a rollout is being made.
    self._waited = self._busy = self._since = 0.0
    self._began: float | None = None

  def fill(self, run: Any, due: bool) -> bool:
    """Makes what is to be made before the next update; `due`: it needs a rollout. False: the run is to stop first."""
    began = self._clock()
    while self._may(run.step, run.total_steps):
      params = jax.block_until_ready(self._policy(run))  # the update before is training, not sampling
      with run.chrono.pause("rollout"):
        made = self._make(params, run.step, lambda: bool(run.stop_requested) and jax.process_count() == 1)
      if made is None:
        return False
      self.ready.append(made)
    self._waited += time.perf_counter() - began
    return True

  def pop(self) -> tuple[Rollout, dict[str, float]]:
    """The next rollout, and metrics of the time since the one before."""
    now, rollout = time.perf_counter(), self.ready.popleft()
    if not self._max_staleness:
      return rollout, {}
    wall = max(now - self._since, 1e-9)
    busy = self._busy + (0.0 if self._began is None else now - max(self._began, self._since))
    metrics = {"rollout/staleness": float(rollout.first_step - rollout.version),
               "rollout/groups_dropped": float(self._dropped),
               "rollout/idle_trainer": min(self._waited / wall, 1.0),
               "rollout/idle_sampler": max(1.0 - busy / wall, 0.0)}
    self._since, self._waited, self._busy, self._dropped = now, 0.0, 0.0, 0
    return rollout, metrics

  def restore(self, step: int, last: Rollout | None, ready: Sequence[Rollout]) -> None:
    """Goes on after `last`, whose training has begun, with those that were waiting. From the first one on that is too
    old for the config as it is now, they are dropped, and will be made again."""
    self._start, fresh = step, []
    for rollout in ready:
      oldest = rollout.version if rollout.oldest is None else rollout.oldest
      if rollout.first_step - oldest > self._max_staleness:
        break
      fresh.append(rollout)
    stale = ready[len(fresh):]
    self._dropped = sum(len(rollout.groups) for rollout in stale)
    if stale:
      logging.warning("%d groups that were sampled ahead (rollouts %d to %d) are dropped, from the first on whose "
                      "policy is more than rollout.max_staleness=%d updates old. Their prompts are sampled again.",
                      self._dropped, stale[0].number, stale[-1].number, self._max_staleness)
    self.ready = deque(fresh)
    self._last = fresh[-1] if fresh else last

  @property
  def made(self) -> Rollout | None:
    """The rollout that was made last."""
    return self._last

  def close(self) -> None:
    """Ends what makes rollouts."""

  def _policy(self, run: Any) -> Any:
    """The parameters that sample, where they do."""
    params = run.state["params"]
    if self._handover is not None:
      params = self._handover(params, run.program.optimizer.trainable)
    return critic.policy_params(params)

  def _clock(self) -> float:
    """Now; what is measured begins with the first time that it is asked for."""
    now = time.perf_counter()
    self._since = self._since or now
    return now

  def _may(self, step: int, total_steps: int) -> bool:
    """Whether the policy after `step` updates is to make the next rollout."""
    if self._num_items is not None and self._drawn >= self._num_items and not (self._last and self._last.carried):
      return False
    return self._first_step < total_steps and self._version(step) <= step

  def _version(self, step: int) -> int:
    """The updates after which the next rollout is made, where `step` are done."""
    if self._versions is None:
      return self._first_step - self._lead
    number = self._next_number(step)
    sampled = self._versions.get(number)
    version = None if sampled is None else sampled.version
    if version is None or not step <= version <= self._first_step:
      found = "has no such rollout" if version is None else f"says that the policy after {version} sampled it"
      raise ConfigError(f"rollout.schedule {found}: rollout {number}, which is due after {step} updates. Give the "
                        f"schedule of a run of the same sizes and length, and a --workdir that goes on with no other.")
    return version

  @property
  def _first_step(self) -> int:
    return self._start if self._last is None else self._last.end

  @property
  def _drawn(self) -> int:
    return 0 if self._last is None else self._last.drawn

  def _next_number(self, step: int) -> int:
    if self._last is not None:
      return self._last.number + 1
    return 0 if self._start == 0 else 1

  def _make(self, params: Any, version: int, stopped: Callable[[], bool]) -> Rollout | None:
    """The next rollout; None: it was left off."""
    made = self._timed(self._next(params, version, stopped))
    if made is not None:
      self._last = made
    return made

  def _next(self, params: Any, version: int, stopped: Callable[[], bool]) -> Callable[[], Rollout | None]:
    """What makes the next rollout."""
    first, number = self._first_step, self._next_number(version)
    kept = None if self._versions is None else self._versions[number].kept
    return functools.partial(self._producer.roll, schedule.Policies(params, version, self._newer, kept), number,
                             self._last, first, self._taken.at(first), stopped)

  def _timed(self, make: Callable[[], Rollout | None]) -> Rollout | None:
    self._began = time.perf_counter()
    # What is in no place of its own would else wait for updates.
    with contextlib.nullcontext() if self._handover is None else jax.default_device(self._handover.device):
      made = make()
    self._busy += time.perf_counter() - max(self._began, self._since)
    self._began = None
    return made
