"""Rollouts that are made while the policy is trained (`rollout.concurrent`), and which policy makes them.

In a thread of its own (`Concurrent`) the sampler takes the newest parameters when it has nothing else to do; with
`rollout.in_flight` newer ones take their place before each chunk of decoding steps (PipelineRL, arXiv 2509.19128). That
depends on the clock, and so it is written down, and can be had again, to the bit (`rollout.schedule`): in turns, or
where policies changed within rollouts, in a thread that waits for each update that it is to sample by (`Followed`).
Several processes (`Agreed`) are told by the first what its clock decided.
"""

import contextlib
import contextvars
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import jax
import jax.numpy as jnp

from input_pipeline.steps import Steps
from trainer.distributed import mesh as mesh_lib
from trainer.distributed import processes
from trainer.distributed.handover import Handover
from trainer.rollouts import schedule
from trainer.rollouts.ahead import Ahead
from trainer.rollouts.engine import Engine
from trainer.rollouts.producer import Producer, Rollout

# Seconds between two looks at whether a stop was asked for.
LOOK_SECONDS = 0.1
# What the first of several processes says: a rollout is there, or the run stops before it.
MADE, STOPS = "made", "stops"


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


class Agreed(Ahead):
  """Rollouts that are made while the policy is trained, in a run of several processes, by a server (`rollout.engine`).

  The first process makes them, in a thread that begins no program on a device: it asks the server, environments and
  reward functions. Whether a rollout is there is decided by that process before an update, and told to the others; so
  they all have it before the same update. When nothing is being made, they give the server the policy of that update,
  in their main threads, as it takes what all of them hold.
  """

  def __init__(self, *args: Any):
    super().__init__(*args)
    self._thread, self._closing = ThreadPoolExecutor(1, "rollouts"), False
    self._is_making = False
    self._making: Future[Rollout | None] | None = None  # in the first process

  def fill(self, run: Any, due: bool) -> bool:
    """See `Ahead.fill`."""
    self._clock()
    while True:
      if self._is_making:
        said = self._ask(run, due and not self.ready)
        if said == STOPS:
          run.agree_to_stop()
          return False
        if said == MADE:
          self._take()
      if not self._is_making and self._may(run.step, run.total_steps):
        self._begin(run)
      if not due or self.ready:
        return True

  def close(self) -> None:
    self._closing = True
    self._thread.shutdown()

  def _ask(self, run: Any, waits: bool) -> str:
    """What the first process says of the rollout that is being made; `waits`: an update cannot do without."""
    def look() -> str:
      while waits and not self._making.done() and not run.stop_requested:
        futures.wait([self._making], LOOK_SECONDS)
      if not self._making.done():
        return STOPS if waits else ""
      self._making.result()  # or its error
      return MADE

    began = time.perf_counter()
    with run.chrono.pause("rollout") if waits else contextlib.nullcontext():
      said = processes.decided("sampling by rollout.engine", look)
    self._waited += (time.perf_counter() - began) * waits
    return said

  def _take(self) -> None:
    """Has the rollout that was made in all processes."""
    made = self._making.result() if self._making else None
    told = processes.bytes_from_first(made.packed() if made else b"")
    self._last, self._is_making = made or Rollout.unpacked(told), False
    self.ready.append(self._last)

  def _begin(self, run: Any) -> None:
    """Has the next rollout made by the policy as it is."""
    params = jax.block_until_ready(self._policy(run))  # the update before is training, not waiting
    began = time.perf_counter()
    with run.chrono.pause("rollout"):
      cast(Engine, self._producer.sampler).hand_over(params)
    self._waited += time.perf_counter() - began
    self._is_making = True
    if jax.process_index() == 0:
      self._making = self._thread.submit(self._work, self._next(params, run.step, lambda: self._closing))

  def _work(self, make: Callable[[], Rollout | None]) -> Rollout | None:
    with processes.alone():
      return self._timed(make)


def make_ahead(config: Any, producer: Producer, taken: Steps, num_items: int | None) -> Ahead:
  """As `config.rollout` says."""
  handover = Handover(producer.sampler.mesh, config.sharding_rules) if mesh_lib.num_sampling(config) else None
  c = config.rollout
  given = None if c.schedule is None else schedule.read(c.schedule, c.max_staleness, c.in_flight)
  kind: Callable[..., Ahead] = Ahead
  if c.in_flight and given is not None:
    kind = Followed
  elif c.concurrent:
    kind = Agreed if jax.process_count() > 1 else functools.partial(Concurrent, in_flight=c.in_flight)
  lead = c.max_staleness
  if c.carry_over:  # what goes on takes the next rollout's updates more to be trained on
    lead = max(lead - c.updates * c.epochs, 0) if c.concurrent else 0
  return kind(producer, taken, num_items, c.max_staleness, given, lead, handover)
