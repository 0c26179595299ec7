"""Rollouts: completions are sampled from the policy, scored, and trained on.

A rollout takes the next `num_prompts` prompts, samples `group_size` completions of each, scores them, and serves
`updates` × `epochs` optimizer steps. Token in, token out: what was sampled is what is trained, with the log-probs that
it was sampled with. Prompts, draws and the order of training are functions of (seed, number of the rollout); a
checkpoint holds what is left of a rollout and those that wait (`saved`), so that a stopped run goes on as if it had not
been; of images it holds the number of their prompt, by which the data have them again.
"""

import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from input_pipeline.chat.image_placeholders import preprocess_of
from input_pipeline.examples.routed import INDEX
from input_pipeline.images.images import to_pixels
from input_pipeline.images.video_file import Shown
from input_pipeline.packing import permutation
from input_pipeline.prompt_data import PromptData
from input_pipeline.steps import ROWS, Past, steps_of_rollouts
from trainer import strategies
from trainer.errors import ConfigError, DataError
from trainer.generate import image_tokens
from trainer.rollouts import carried as carried_lib
from trainer.rollouts import experience as experience_lib
from trainer.rollouts import groups as groups_lib
from trainer.rollouts import old_policy, options, schedule
from trainer.rollouts import replay as replay_lib
from trainer.rollouts.at_once import make_ahead
from trainer.rollouts.curriculum import SAVED
from trainer.rollouts.experience import Experience
from trainer.rollouts.producer import CARRIED, Policy, Producer, Rollout
from trainer.rollouts.returns import Returns
from trainer.strategies import teachers
from trainer.strategies.record import OF_CRITIC


class Rollouts:
  """Training data (trainer/data.py) that are sampled as they are asked for.

  Args:
    share_prompts: whether completions in one row share their prompt.
    workdir: of the run, for the tables in samples/. past: what it goes on from (input_pipeline/steps.py).

  Attributes:
    metrics: of the rollout that the latest batch is from. The others: see `Data`; a row is a prompt.

  Raises:
    ConfigError, DataError: see `make_scorer`, `Episodes`, `Sampler.check`.
  """

  def __init__(self, config: Any, prompts: PromptData, policy: Policy, *, share_prompts: bool, workdir: Any,
               past: Past | None = None):
    c, self._seed, self._workdir = config.rollout, config.seed, workdir
    self.taken = steps_of_rollouts(c.num_prompts, c.updates, c.epochs, past)
    self._num_prompts = c.num_prompts
    self._max_without_signal, self._is_ahead = c.max_without_lesson, c.max_staleness > 0
    self._prompts = prompts
    self._strategy = strategies.of(config)
    self._rows = experience_lib.RowFormat(
        config.seq_len, policy.tokenizer.pad_id, config.batch_size // config.grad_accum_steps,
        image_tokens.layout_of(policy.model), share_prompts,
        by_source=self._strategy.teacher and teachers.routes(config.strategy),
        routing=options.routing(config, policy.model), replay=c.replay_experts)
    self.producer = Producer(config, prompts, policy, workdir)
    self._ahead = make_ahead(config, self.producer, self.taken, prompts.num_items)
    self.source_names, self.rows_per_epoch = prompts.source_names, prompts.num_prompts
    self.fingerprint = self.past_fingerprint = prompts.fingerprint
    self.images_per_row, self.row_tokens, self.shapes_known = 0, None, False  # they follow from packing
    self._now: Rollout | None = None  # that is trained on
    self._images: dict[int, Sequence[Shown]] = {}  # those of its prompts, by their numbers
    self._added: dict[int, list[Shown]] = {}  # those that environments showed, by trajectories
    self._preprocess = preprocess_of(config) if self._rows.layout else None
    self._old: np.ndarray | None = None  # see trainer/rollouts/old_policy.py
    self._returns = Returns(config.strategy) if self._strategy.critic else None
    self._routed = self._strategy.learns(config.strategy) == "routed"
    self._valued: dict[str, np.ndarray] = {}  # what it made of the rollout that is trained on
    self.metrics: dict[str, float] = {}
    # Rollouts in a row that taught nothing, and whether there was one that did.
    self._without_signal, self._learned = 0, False
    # {updates done: (row positions trained on, prompts drawn for these)}, for the latest two updates.
    self._totals = {0: (0, 0)} | ({past.step: (past.tokens, 0)} if past and past.of == ROWS else {})

  # ---------------------------------------------------------------- what a run asks of its data

  def batch_range(self, step: int) -> tuple[int, int]:
    """(prompts taken before `step`, prompts it takes), as if a rollout's prompts were shared out to its steps."""
    return self.taken.range(step)

  @property
  def num_steps(self) -> int | None:
    """After so many the prompts end: with those of the rollout that took the last, or as expected if no group is
    replaced; None: never."""
    if self._prompts.num_items is None:
      return None
    made = self._ahead.made
    if made is not None and made.drawn >= self._prompts.num_items:
      return made.end + -(-len(made.carried) // self._num_prompts) * made.steps
    return self.taken.steps_for(self._prompts.num_items)

  def tokens_seen(self, step: int) -> int:
    """Row positions that the updates before `step` were computed on."""
    return self._at(step)[0]

  def epoch(self, step: int) -> float:
    """How often the prompts have been drawn."""
    return self._prompts.epoch(self._at(step)[1])

  def counters(self, step: int) -> dict[str, dict[str, float]]:
    """For each source, the prompts drawn from it and its epochs."""
    return self._prompts.counters(self._at(step)[1])

  def stats(self) -> list[dict[str, Any]]:
    """One row a source for the start-up table."""
    return self._prompts.stats()

  def _at(self, step: int) -> tuple[int, int]:
    """(row positions, prompts drawn) after `step` updates: the latest entry of `_totals` that is not later."""
    return self._totals[max(done for done in self._totals if done <= step)]

  # ---------------------------------------------------------------- batches

  def _keys(self) -> tuple[str, ...]:
    """What batches hold, of the rollout that is trained on, or else of one as the config says."""
    held = self._strategy.keys(self.taken.pieces[-1].every if self._now is None else self._now.steps)
    return (*held, INDEX) if self._routed else held

  def example(self, step: int, program: Any) -> dict[str, np.ndarray]:
    """A batch of the smallest shape, of padding alone."""
    no_signal = experience_lib.collect([]), np.zeros(0, np.int64)
    return experience_lib.make_batch(*no_signal, self._rows, keys=self._keys())

  def batches(self, run: Any) -> "Batches":
    """The batches of the run from its step on, in their places."""
    return Batches(self, run)

  def take(self, run: Any) -> dict[str, np.ndarray] | None:
    """The batch of update `run.step + 1`, after a rollout if one is due; None if the run is to stop."""
    due = self._now is None or run.step >= self._now.end  # what is left is trained on as it was begun
    if not self._ahead.fill(run, due):
      return None
    if due:
      self._begin(run)
    batch = self._batch(run.step - self._now.first_step, self._keys())
    before = self._at(run.step)
    # Metrics are written one step late, so that the step before is still asked for.
    self._totals = {run.step: before, run.step + 1: (before[0] + batch["tokens"].size, self._now.drawn)}
    return batch

  def _batch(self, nth: int, keys: Sequence[str]) -> dict[str, np.ndarray]:
    """The batch of a step of the rollout, from 0 on."""
    epoch, update = divmod(nth, self._now.updates)
    order = permutation(self._now.experience.num_units, self._seed, "rollout", self._now.number, epoch)
    units = np.array_split(order, self._now.updates)[update]
    of_tokens = self._valued if self._old is None else self._valued | {"old_logprobs": self._old[epoch]}
    if self._routed:
      of_tokens = of_tokens | {INDEX: self._teachers(self._now.experience)}
    return experience_lib.make_batch(self._now.experience, units, self._rows, keys=keys, images=self._images,
                                     added=self._added, of_tokens=of_tokens)

  def _teachers(self, experience: Experience) -> np.ndarray:
    """Of each token of the experience, int32 [n], the number of the teacher that its prompt's row names."""
    of_each = [self._prompts.item(number).teacher for number in experience.numbers.tolist()]
    return np.repeat(np.array(of_each, np.int32), experience.lengths)

  def _images_of(self, numbers: Iterable[int]) -> dict[int, Sequence[Shown]]:
    """{number of a prompt: its images}; none where the model sees none."""
    return {number: self._prompts.item(number).prompt.images for number in numbers} if self._rows.layout else {}

  def _added_of(self, experience: Experience) -> dict[int, list[Shown]]:
    """{trajectory: the images that its environment showed}."""
    found: dict[int, list[Shown]] = {}
    for owner, data in experience.images:
      found.setdefault(owner, []).append(to_pixels(data, self._preprocess))
    return found

  # ---------------------------------------------------------------- checkpoints

  def saved(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray] | None]:
    """(JSON-able, arrays or None) from which `restore` goes on after `step` updates."""
    tokens, drawn = self._at(step)
    now, waiting = self._now, list(self._ahead.ready)
    done = now is None or step >= now.end
    ahead: list[dict[str, Any]] = []
    meta = {"tokens": tokens, "drawn": drawn, "number": now.number if now else 0, "version": now.version if now else 0,
            "first_step": now.first_step if now else 0, "updates": now.updates if now else 0,
            "steps": now.steps if now else 0, "metrics": self.metrics, "done": done, "data": self.fingerprint,
            "without_lesson": self._without_signal, "learned": self._learned,
            "reward_models": self.producer.models.saved(), "ahead": ahead}
    arrays = {} if now is None or now.rates is None else {SAVED: now.rates}
    meta["carried"], carried = carried_lib.saved(now.carried if now else (), CARRIED)
    meta["remembered"], remembered = replay_lib.saved(now.remembered if now else (), replay_lib.NAME)
    arrays |= carried | remembered
    if not done and now.experience.num_units:
      arrays |= now.experience.arrays() | self._valued | ({} if self._old is None else {"old": self._old})
    for place, rollout in enumerate(waiting):
      said, parts = rollout.saved(f"ahead{place}_")
      ahead.append(said)
      arrays |= parts
    return meta, arrays or None

  def restore(self, step: int, meta: dict[str, Any] | None, arrays: dict[str, np.ndarray] | None) -> None:
    """Goes on from what `saved(step)` gave; None: nothing.

    Raises:
      ConfigError: it is about images or teachers of other data.
    """
    self._ahead.restore(step, None, [])
    if meta is None:
      return
    self._totals = {step: (meta["tokens"], meta["drawn"])}
    self.producer.models.restore(meta.get("reward_models", {}))
    # Checkpoints of earlier versions do not say.
    self._without_signal, self._learned = meta.get("without_lesson", 0), meta.get("learned", False)
    self.metrics = meta["metrics"]
    rates, arrays = self.producer.curriculum.restored(dict(arrays or {}), meta["data"])
    waiting = [Rollout.restored(f"ahead{place}_", said, arrays) for place, said in enumerate(meta.get("ahead", ()))]
    own = {key: part for key, part in arrays.items() if not key.startswith("ahead")}
    carried = carried_lib.restored(meta.get("carried", ()), own, CARRIED)
    remembered = replay_lib.restored(meta.get("remembered", ()), own, replay_lib.NAME)
    if meta["data"] != self.fingerprint:
      last = (waiting[-1].carried, waiting[-1].remembered) if waiting else (carried, remembered)
      for count, what in zip(map(len, last), ("that had begun are left off", "of earlier rollouts are forgotten"),
                             strict=True):
        if count:
          logging.warning("The prompts are no longer those of the checkpoint: %d groups %s.", count, what)
      waiting = [rollout._replace(rates=None, carried=(), remembered=()) for rollout in waiting]
      carried, remembered = [], []
    if meta["steps"]:
      # A checkpoint without them is of an earlier version, whose p_old was what the sampler computed.
      before = np.tile(own.get("logprobs", np.zeros(0)), (meta["steps"] // meta["updates"], 1))
      old = own.pop("old", before)
      self._valued = {key: own.pop(key) for key in OF_CRITIC if key in own}
      self._now = Rollout(meta["number"], meta.get("version", meta["first_step"]), meta["first_step"], meta["steps"],
                          meta["updates"], meta["drawn"], [],
                          Experience(**own) if own else experience_lib.collect([]), self.metrics, None, [], rates,
                          carried, remembered)
      self._old = old if "old_logprobs" in self._keys() and not meta["done"] else None
    self._ahead.restore(step, self._now, waiting)
    left = [rollout for rollout in (None if meta["done"] else self._now, *waiting) if rollout is not None]
    if left and (self._rows.layout or self._routed) and meta["data"] != self.fingerprint:
      what = "the images of its prompts" if self._rows.layout else "the teachers that its prompts name"
      raise ConfigError(f"the data are no longer those of rollout {left[-1].number}, which is trained on until step "
                        f"{left[-1].end}: {what} cannot be had again. Train to that step with the data as they were, "
                        "then change them.")
    if self._now is not None:
      self._images = self._images_of(set(self._now.experience.numbers.tolist()))
      self._added = self._added_of(self._now.experience)

  def close(self) -> None:
    """Ends what samples, and the processes that compute rewards."""
    self._ahead.close()
    self.producer.close()

  # ---------------------------------------------------------------- a rollout

  def _begin(self, run: Any) -> None:
    """Begins to train on the next rollout."""
    self._now, ahead = self._ahead.pop()
    now = self._now
    self.metrics = now.metrics | ahead
    self._images = self._images_of({*now.groups, *now.experience.numbers.tolist()})
    self._added = self._added_of(now.experience)
    self._old, self._valued = None, {}
    if self._returns is not None or "old_logprobs" in self._keys():
      with run.chrono.pause("rollout"):
        began = time.perf_counter()
        self._look_back(run)
        self.metrics["time/old_logprobs"] = time.perf_counter() - began
    if jax.process_index() == 0 and self._is_ahead:
      schedule.write(self._workdir, now.number, schedule.Sampled(now.version, now.changes, now.kept), now.first_step)
    problem = self._problem(now)
    if jax.process_index() == 0 and (problem or self._logs_samples(run)):
      images = [self._images.get(number, ()) for number in now.groups]
      text = groups_lib.write(self._workdir / "samples" / f"rollout-{run.step + 1:08d}", now.table, images,
                              f"rollout before step {run.step + 1}")
      run.writer.write_texts(run.step + 1, {"rollout": text})
    if problem:
      raise DataError(problem)

  def _look_back(self, run: Any) -> None:
    """Keeps what policy and critic say of the rollout's tokens before its first update, and what that makes of them."""
    now, returns = self._now, self._returns
    old, first = old_policy.of_rollout(
        functools.partial(self._score_step, run), lambda nth: self._batch(nth, (*self._keys(), "places")),
        len(now.experience.tokens), now.updates, now.steps // now.updates, with_critic=returns is not None)
    if "old_logprobs" in self._keys():
      self._old = old
    if returns is not None:
      log_ratios = first["old_logprobs"] - first["ref_logprobs"] if returns.penalised else None
      self._valued, about = returns.make(now.experience, first["old_values"], log_ratios)
      self.metrics |= about

  def _score_step(self, run: Any, batch: dict[str, np.ndarray], nth: int, whole: bool) -> dict[str, np.ndarray]:
    """What policy, critic and reference as they are now say of a step of the rollout, [B, T] each."""
    reference = run.reference if whole and self._returns.penalised else None
    found = run.program.score_fn(run.state["params"], run.program.place(batch), np.int32(run.step + nth), reference,
                                 whole)
    return {name: np.asarray(values) for name, values in found.items()}

  def _problem(self, now: Rollout) -> str:
    """Warns of a rollout that teaches nothing. Returns the error that ends the run after too many in a row, else "".

    Equal rewards are no fault once the policy has learned: it may have mastered these prompts, and others will differ.
    While it has not, it stays what it is, and will be given the same rewards again.
    """
    no_signal, step = now.no_signal, now.first_step + 1
    if no_signal is None or (no_signal.equal and self._learned):
      self._without_signal, self._learned = 0, True
      return ""
    self._without_signal += 1
    logging.warning("The rollout before step %d teaches nothing: %s. %s", step, no_signal.why, no_signal.advice)
    if not self._max_without_signal or self._without_signal < self._max_without_signal:
      return ""
    first = step - (self._without_signal - 1) * now.steps
    since = "" if self._learned else ", and nothing has been learned since the run began"
    return (f"{self._without_signal} rollouts in a row taught nothing, from step {first} to {step}"
            f"{since}. Of the last: {no_signal.why}. {no_signal.advice} The same command then goes on from the last "
            "checkpoint. rollout.max_without_lesson says after how many such rollouts a run ends (0: never).")

  def _logs_samples(self, run: Any) -> bool:
    """Whether the step that follows is one whose metrics are written."""
    every = run.log_steps
    return run.step == 0 or bool(every) and (run.step + self._now.steps) // every > run.step // every


class Batches(Iterator[dict[str, jax.Array]]):
  """Batches in their places, one after another; it ends where the run is asked to stop. A context manager."""

  # As of `input_pipeline.prefetch.Prefetcher`: waiting for a rollout is a pause of its own.
  wait_seconds = 0.0

  def __init__(self, rollouts: Rollouts, run: Any):
    self._rollouts, self._run = rollouts, run

  @property
  def metrics(self) -> dict[str, float]:
    return self._rollouts.metrics

  def __next__(self) -> dict[str, jax.Array]:
    batch = self._rollouts.take(self._run)
    if batch is None:
      raise StopIteration
    return self._run.program.place(batch)

  def __enter__(self) -> "Batches":
    return self

  def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
    self._rollouts.close()
