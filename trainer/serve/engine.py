"""Completions for many callers at once: what waits is sampled together, in one thread that owns the parameters.

A job is a prompt with its samples. Jobs that are drawn alike (temperature, truncation, seed, ends) share a run of the
sampler, which those that come meanwhile join, unless others wait. What is drawn depends on a job alone, not on its
company (trainer/generate/sampler.py).
"""

import dataclasses
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trainer.generate.completion import Completion, More, Request
from trainer.generate.kept import Kept
from trainer.generate.sampler import Sampler
from trainer.generate.stop_strings import StopStrings

# Jobs of a run.
MOST = 256
# Fewer tokens in common with a kept text are not worth a program that runs the rest apart.
LEAST = 32


@dataclasses.dataclass(frozen=True)
class How:
  """What jobs must have in common to be sampled together: see `Request`. `seed`: None for chance."""

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  stop_ids: tuple[int, ...] = ()
  stop: tuple[str, ...] = ()
  seed: int | None = None


@dataclasses.dataclass
class Job:
  """A prompt to be completed.

  Attributes:
    ids: its tokens.
    max_new_tokens, num_samples: of it.
    how: see `How`.
    report: called in the engine's thread with each part of a completion, whose `sample` counts from 0, or with the
      exception that ended all of them.
    cancelled: nobody waits for it any more.
  """

  ids: np.ndarray
  max_new_tokens: int
  num_samples: int
  how: How
  report: Callable[[Completion | BaseException], None]
  cancelled: bool = False


class Engine:
  """Samples for jobs in a thread of its own.

  Args:
    tokenizer: for stop strings.
    kept_texts: how many answered conversations are kept, so that of one that goes on, or begins as one of them does,
      only what is new is run.

  Attributes:
    batches: jobs of each run so far, for people and tests.
    kept: those conversations; None: none is.
  """

  def __init__(self, sampler: Sampler, params: Any, tokenizer: Any, kept_texts: int = 0):
    self._sampler, self._params, self._tokenizer = sampler, params, tokenizer
    self.kept = Kept(kept_texts, cut=True, least=LEAST) if kept_texts else None
    self._waiting: queue.SimpleQueue = queue.SimpleQueue()
    self._left: list[Job] = []
    self.batches: list[int] = []
    # Of jobs without a seed: each has samples with numbers that nobody else has.
    self._chance = secrets.token_hex(8)
    self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
    self._thread.start()

  def check(self, ids: np.ndarray, max_new_tokens: int) -> None:
    """Raises ConfigError where the model cannot generate so many tokens behind these."""
    self._sampler.check([ids], max_new_tokens)

  def submit(self, job: Job) -> None:
    """Has the job done; its `report` is called from now on."""
    self._waiting.put(job)

  def swap(self, params: Any) -> threading.Event:
    """Other parameters of the same model, for what is submitted from now on; the event is set when it has them."""
    done = threading.Event()
    self._waiting.put((params, done))
    return done

  def close(self) -> None:
    """Ends the thread after the run that is under way."""
    self._waiting.put(None)
    self._thread.join()

  def _work(self) -> None:
    while True:
      asked = self._left.pop(0) if self._left else self._waiting.get()
      if asked is None:
        return
      if isinstance(asked, tuple):
        self._params, done = asked
        if self.kept is not None:
          self.kept.clear()
        done.set()
        continue
      self._run(self._alike(asked))

  def _alike(self, first: Job) -> list[Job]:
    """The job with those that wait and are drawn alike; others stay, in order, and so does what follows a swap."""
    jobs, others = [first], list[Any]()
    waiting, self._left = self._left, others
    while not self._waiting.empty():
      waiting.append(self._waiting.get())
    for number, job in enumerate(waiting):
      if not isinstance(job, Job):  # an order matters here
        others.extend(waiting[number:])
        break
      alike = job.how == first.how and len(jobs) < MOST
      (jobs if alike else others).append(job)
    return [job for job in jobs if not job.cancelled]

  def _joining(self, how: How, most: int) -> list[Job]:
    """Jobs that have come since, up to the first that cannot join those of this kind; nobody is passed by."""
    found: list[Job] = []
    while not self._left and len(found) < most and not self._waiting.empty():
      asked = self._waiting.get()
      if isinstance(asked, Job) and asked.how == how:
        found += [] if asked.cancelled else [asked]
      else:
        self._left.append(asked)
    return found

  def _run(self, jobs: list[Job]) -> None:
    if not jobs:
      return
    self.batches.append(0)
    how, all_of, samples = jobs[0].how, list[Job](), list[range]()

    def options(jobs: Sequence[Job]) -> dict[str, Any]:
      """What a `Request` has of each of these, which are now a part of the run."""
      firsts = [0 if how.seed is not None else secrets.randbits(60) for _ in jobs]
      new = [range(first, first + job.num_samples) for first, job in zip(firsts, jobs, strict=True)]
      all_of.extend(jobs)
      samples.extend(new)
      self.batches[-1] += len(jobs)
      return {"max_new_tokens": [job.max_new_tokens for job in jobs], "samples": new}

    def more(_idle: bool) -> More:
      new = self._joining(how, MOST - len(all_of))
      return More([job.ids for job in new], options(new))

    try:
      stop = StopStrings(self._tokenizer, how.stop).options
      request = Request(**options(jobs), temperature=how.temperature, top_k=how.top_k, top_p=how.top_p,
                        min_p=how.min_p, stop_ids=how.stop_ids, **stop, more=more, kept=self.kept,
                        seed=self._chance if how.seed is None else how.seed)
      for part in self._sampler.stream(self._params, [job.ids for job in jobs], request):
        if all(job.cancelled for job in all_of):
          return
        all_of[part.prompt].report(dataclasses.replace(part, sample=part.sample - samples[part.prompt][0]))
    except Exception as error:  # told to those who wait; the next run may do
      for job in all_of:
        job.report(error)
