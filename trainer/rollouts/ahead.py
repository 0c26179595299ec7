"""Which policy samples a rollout, and when: right before its training, or up to `rollout.max_staleness` updates before.

A rollout whose training begins after f updates is sampled by the policy after v of them, its version; f - v is its
staleness. In turns with updates (`Ahead`) v is as small as it may be, or what a schedule says. At once with them
(`Concurrent`), in a thread of its own, v is that of the newest parameters when the sampler has nothing else to do; with
`rollout.in_flight` newer ones take their place before each chunk of decoding steps (PipelineRL, arXiv 2509.19128). That
depends on the clock, and so it is written down, and can be had again, to the bit (`rollout.schedule`): in turns, or
where policies changed within rollouts, in a thread that waits for each update that it is to sample by (`Followed`).
"""

import contextlib
import contextvars
import functools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from input_pipeline.steps import Steps
from trainer.distributed import mesh as mesh_lib
from trainer.distributed.handover import Handover
from trainer.errors import ConfigError
from trainer.rollouts import schedule
from trainer.rollouts.producer import Producer, Rollout
from trainer.strategies import critic

# Seconds between two looks at whether a stop was asked for.
LOOK_SECONDS = 0.1


class Ahead:
  """Rollouts that wait for their training, made in turns with updates.

  Args:
    producer: makes them.
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
    first, self._began = self._first_step, time.perf_counter()
    # What is in no place of its own would else wait for updates.
    with contextlib.nullcontext() if self._handover is None else jax.default_device(self._handover.device):
      made = self._producer.roll(schedule.Policies(params, version, self._newer), self._next_number(version),
                                 self._last, first, self._taken.at(first), stopped)
    self._busy += time.perf_counter() - max(self._began, self._since)
    self._began = None
    if made is not None:
      self._last = made
    return made


class Concurrent(Ahead):
  """Rollouts that are made in a thread of their own while the policy is trained. One process.

  Before each update the thread is given a copy of the parameters, since the update takes the run's own; it begins a
  rollout whenever the newest of these may sample it. It shares no device with updates unless there is but one: it would
  begin programs in another order than they do.

  Args:
    in_flight: newer parameters are taken while a rollout is sampled, too.
  """

  def __init__(self, *args: Any, in_flight: bool = False):
    super().__init__(*args)
    if in_flight:
      self._newer = self._newest
    self._changed = threading.Condition()
    self._thread: threading.Thread | None = None
    self._given: tuple[Any, int, int] | None = None  # parameters, the updates that they had, those of the run
    self._error: BaseException | None = None
    self._closing = False

  def fill(self, run: Any, due: bool) -> bool:
    """See `Ahead.fill`."""
    began = self._clock()
    params = self._policy(run)
    if self._handover is None:
      params = jax.tree.map(jnp.copy, params)
    with self._changed:
      self._given = params, run.step, run.total_steps
      self._changed.notify_all()
    if self._thread is None:
      context = contextvars.copy_context()  # the mesh that models place activations on
      self._thread = threading.Thread(target=context.run, args=(self._work,), name="rollouts", daemon=True)
      self._thread.start()
    if not due or self.ready:
      return True
    with run.chrono.pause("rollout"), self._changed:
      while not self.ready and self._error is None and not run.stop_requested:
        self._changed.wait(LOOK_SECONDS)
    self._waited += time.perf_counter() - began
    if not self.ready and self._error is not None:
      raise self._error
    return bool(self.ready)

  def close(self) -> None:
    with self._changed:
      self._closing = True
      self._changed.notify_all()
    if self._thread is not None:
      self._thread.join()
      self._thread = None

  def _newest(self, look: int, version: int) -> tuple[Any, int] | None:
    """The newest policy, if its update is done."""
    with self._changed:
      params, newest, _ = self._given
    if newest == version or not all(leaf.is_ready() for leaf in jax.tree.leaves(params)):
      return None
    return params, newest

  def _take(self, version: int) -> None:
    """Notes that the policy of that version samples from now on."""

  def _work(self) -> None:
    try:
      while True:
        with self._changed:
          while not self._closing and not self._may(*self._given[1:]):
            self._changed.wait()
          if self._closing:
            return
          params, version, _ = self._given
          self._take(version)
        jax.block_until_ready(params)  # the update before is training, not sampling
        made = self._make(params, version, lambda: self._closing)
        del params  # only the newest are kept while it waits
        with self._changed:
          if made is not None:
            self.ready.append(made)
          self._changed.notify_all()
    except BaseException as e:
      with self._changed:
        self._error = e
        self._changed.notify_all()


class Followed(Concurrent):
  """What a schedule says was sampled at once, had again: sampling waits for each policy that it took, and updates go on
  when it has taken theirs."""

  def __init__(self, *args: Any):
    super().__init__(*args, in_flight=True)
    self._left: Counter[int] | None = None  # how often each policy is yet to be taken

  def fill(self, run: Any, due: bool) -> bool:
    """See `Ahead.fill`."""
    if self._left is None:
      first = self._next_number(run.step)
      self._left = Counter(version for number, sampled in self._versions.items() if number >= first
                           for version in (sampled.version, *dict(sampled.changes).values()))
    if not super().fill(run, due):
      return False
    with self._changed:
      while self._left[run.step] and self._error is None and not run.stop_requested and (
          self._began is not None or self._first_step < run.total_steps):
        self._changed.wait(LOOK_SECONDS)
      if self._error is not None:
        raise self._error
    return True

  def _newest(self, look: int, version: int) -> tuple[Any, int] | None:
    """The policy that took over at this look."""
    newer = dict(self._versions[self._next_number(version)].changes).get(look)
    if newer is None:
      return None
    with self._changed:
      while self._given[1] != newer and not self._closing:
        self._changed.wait()
      if self._closing:
        return None
      self._take(newer)
      return self._given[0], newer

  def _take(self, version: int) -> None:
    self._left[version] -= 1
    self._changed.notify_all()


def make_ahead(config: Any, producer: Producer, taken: Steps, num_items: int | None) -> Ahead:
  """As `config.rollout` says."""
  handover = Handover(producer.sampler.mesh, config.sharding_rules) if mesh_lib.num_sampling(config) else None
  c = config.rollout
  given = None if c.schedule is None else schedule.read(c.schedule, c.max_staleness, c.in_flight)
  at_once = Followed if given is not None else functools.partial(Concurrent, in_flight=c.in_flight)
  kind, lead = at_once if c.concurrent or c.in_flight else Ahead, c.max_staleness
  if c.carry_over:  # what goes on takes the next rollout's updates more to be trained on
    lead = max(lead - c.updates * c.epochs, 0) if c.concurrent else 0
  return kind(producer, taken, num_items, c.max_staleness, given, lead, handover)
