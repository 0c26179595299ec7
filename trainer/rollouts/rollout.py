"""Rollouts: completions are sampled from the policy as it is now, scored, and trained on.

A rollout takes the next `num_prompts` prompts, samples `group_size` completions of each, scores them, and serves
`updates` × `epochs` optimizer steps. Token in, token out: what was sampled is what is trained, with the log-probs that
it was sampled with. Prompts, draws and the order of training are functions of (seed, number of the rollout); a
checkpoint holds what is left of a rollout (`saved`), so that a stopped run goes on as if it had not been; of images it
holds the number of their prompt, by which the data have them again.

P prompts (groups), G completions of each, K reward functions.
"""

import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from tqdm import tqdm

from input_pipeline.examples import advantages as advantages_lib
from input_pipeline.packing import permutation
from input_pipeline.prompt_data import PromptData, PromptItem
from input_pipeline.steps import ROWS, Past, steps_of_rollouts
from trainer import strategies
from trainer.distributed import processes
from trainer.errors import ConfigError, DataError
from trainer.generate import image_tokens
from trainer.generate.sampler import Completion, Request, collect
from trainer.metrics import to_floats
from trainer.rollouts import experience as experience_lib
from trainer.rollouts import groups as groups_lib
from trainer.rollouts import old_policy
from trainer.rollouts.curriculum import SAVED, Curriculum
from trainer.rollouts.engine import make_sampler
from trainer.rollouts.environment import Episodes
from trainer.rollouts.episode import Episode
from trainer.rollouts.experience import Experience
from trainer.rollouts.groups import ScoredGroup, TrainingSamples
from trainer.rollouts.options import ENVIRONMENT
from trainer.rollouts.reward_models import RewardModels
from trainer.rollouts.reward_pool import Group, make_scorer


class Policy(NamedTuple):
  """What samples: the model without its parameters, its tokenizer and the mesh that it is on."""

  model: Any
  tokenizer: Any
  mesh: Any


class Rollouts:
  """Training data (trainer/data.py) that are sampled as they are asked for.

  Args:
    config: the whole config.
    prompts: what to complete.
    policy: what completes them.
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
    self._group_size, self._resample, self._has_environment = c.group_size, c.resample, c.environment is not None
    self._max_without_signal, self._mask_truncated = c.max_without_lesson, c.mask_truncated
    self._prompts = prompts
    self._strategy = strategies.of(config)
    self._rows = experience_lib.RowFormat(
        config.seq_len, policy.tokenizer.pad_id, config.batch_size // config.grad_accum_steps,
        image_tokens.layout_of(policy.model), share_prompts)
    if not self._strategy.rewarded:
      self._compares_all = True
      self._select = lambda groups: groups_lib.every(groups, self._mask_truncated)
    elif self._strategy.data == "pairs":
      self._compares_all = not self._mask_truncated
      self._select = lambda groups: groups_lib.pairs(groups, config.seq_len, self._mask_truncated)
    else:
      how = (*advantages_lib.kinds(config.strategy), self._mask_truncated)
      self._compares_all = True
      self._select = lambda groups: groups_lib.sequences(groups, *how)
    self._sampling = dict(temperature=c.temperature, top_k=c.top_k, top_p=c.top_p, min_p=c.min_p)
    self._sampler = make_sampler(config, policy.model, policy.mesh, workdir)
    self._episodes = Episodes(config, policy.tokenizer, prompts)
    self._scorer = make_scorer(config, prompts)
    self._sampler.check([max((i.prompt.ids for i in prompts.every_item()), key=len)], c.max_new_tokens, "rollout.")
    self._models = RewardModels(config, policy.mesh)
    self._curriculum = Curriculum(config, prompts)
    self._rates = self._curriculum.unmeasured()
    self._names = (*self._scorer.names, *self._models.names, *(ENVIRONMENT,) * self._has_environment)
    self._weights = np.array([*self._scorer.weights, *self._models.weights, *(1.0,) * self._has_environment])
    self.source_names, self.rows_per_epoch = prompts.source_names, prompts.num_prompts
    self.fingerprint = self.past_fingerprint = prompts.fingerprint
    self.images_per_row, self.row_tokens, self.shapes_known = 0, None, False  # they follow from packing
    # The rollout that is being trained on, the step that it began at, its number, its metrics, the prompts that were
    # drawn for it and for those before, the steps that it serves, and those of a pass over it.
    self._experience: Experience | None = None
    self._images: dict[int, Sequence[np.ndarray]] = {}  # those of its prompts, by their numbers
    self._old: np.ndarray | None = None  # see trainer/rollouts/old_policy.py
    self._first_step = self._number = self._drawn = self._steps_each = self._updates = 0
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
    if self._drawn >= self._prompts.num_items:
      return self._first_step + self._steps_each
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
    return self._strategy.keys(self._steps_each or self.taken.pieces[-1].every)

  def example(self, step: int, program: Any) -> dict[str, np.ndarray]:
    """A batch of the smallest shape, of padding alone."""
    no_signal = experience_lib.collect([]), np.zeros(0, np.int64)
    return experience_lib.make_batch(*no_signal, self._rows, keys=self._keys())

  def batches(self, run: Any) -> "Batches":
    """The batches of the run from its step on, in their places."""
    return Batches(self, run)

  def take(self, run: Any) -> dict[str, np.ndarray] | None:
    """The batch of update `run.step + 1`, after a rollout if one is due; None if the run is to stop."""
    nth = run.step - self._first_step
    if self._experience is None or nth >= self._steps_each:  # what is left is trained on as it was begun
      if not self._roll(run):
        return None
      nth = 0
    batch = self._batch(nth, self._keys())
    before = self._at(run.step)
    # Metrics are written one step late, so that the step before is still asked for.
    self._totals = {run.step: before, run.step + 1: (before[0] + batch["tokens"].size, self._drawn)}
    return batch

  def _batch(self, nth: int, keys: Sequence[str]) -> dict[str, np.ndarray]:
    """The batch of a step of the rollout, from 0 on."""
    epoch, update = divmod(nth, self._updates)
    order = permutation(self._experience.num_units, self._seed, "rollout", self._number, epoch)
    units = np.array_split(order, self._updates)[update]
    old = None if self._old is None else self._old[epoch]
    return experience_lib.make_batch(self._experience, units, self._rows, keys=keys, images=self._images,
                                     old_logprobs=old)

  # ---------------------------------------------------------------- checkpoints

  def saved(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray] | None]:
    """(JSON-able, arrays or None) from which `restore` goes on after `step` updates."""
    tokens, drawn = self._at(step)
    done = self._experience is None or step - self._first_step >= self._steps_each
    meta = {"tokens": tokens, "drawn": drawn, "number": self._number, "first_step": self._first_step,
            "updates": self._updates, "steps": self._steps_each, "metrics": self.metrics, "done": done,
            "data": self.fingerprint, "without_lesson": self._without_signal, "learned": self._learned,
            "reward_models": self._models.saved()}
    arrays = {} if self._rates is None else {SAVED: self._rates}
    if not done and self._experience.num_units:  # checkpoints cannot hold empty arrays
      arrays |= self._experience._asdict() | ({} if self._old is None else {"old": self._old})
    return meta, arrays or None

  def restore(self, step: int, meta: dict[str, Any] | None, arrays: dict[str, np.ndarray] | None) -> None:
    """Goes on from what `saved(step)` gave; None: nothing.

    Raises:
      ConfigError: it is about images of other data.
    """
    if meta is None:
      return
    self._totals = {step: (meta["tokens"], meta["drawn"])}
    self._models.restore(meta.get("reward_models", {}))
    self._rates, arrays = self._curriculum.restored(dict(arrays or {}), meta["data"])
    self._number, self._first_step, self._drawn = meta["number"], meta["first_step"], meta["drawn"]
    self._updates, self._steps_each, self.metrics = meta["updates"], meta["steps"], meta["metrics"]
    # Checkpoints of earlier versions do not say.
    self._without_signal, self._learned = meta.get("without_lesson", 0), meta.get("learned", False)
    if meta["done"]:
      self._experience = None
    else:
      # A checkpoint without them is of an earlier version, whose p_old was what the sampler computed.
      before = np.tile(arrays.get("logprobs", np.zeros(0)), (self._steps_each // self._updates, 1))
      self._old = arrays.pop("old", before) if "old_logprobs" in self._keys() else None
      self._experience = Experience(**arrays) if arrays else experience_lib.collect([])
    if self._experience is not None and self._rows.layout and meta["data"] != self.fingerprint:
      raise ConfigError(f"the data are no longer those of rollout {self._number}, which is trained on until step "
                        f"{self._first_step + self._steps_each}: the images of its prompts cannot be had again. Train "
                        "to that step with the data as they were, then change them.")
    if self._experience is not None and self._rows.layout:
      self._images = {n: self._prompts.item(n).prompt.images for n in set(self._experience.numbers.tolist())}

  def close(self) -> None:
    """Ends the processes that compute rewards."""
    self._scorer.close()

  # ---------------------------------------------------------------- a rollout

  def _roll(self, run: Any) -> bool:
    """Samples and scores the next prompts; groups that teach nothing are replaced where the config says so.

    Returns False, with nothing changed, if the run was asked to stop meanwhile.
    """
    is_first = self._experience is None and run.step == 0
    drawn, number = self._drawn, 0 if is_first else self._number + 1
    size = self.taken.at(run.step)
    self._clock = {"rollout": 0.0, "rewards": 0.0}
    groups: list[ScoredGroup] = []
    replaced: list[ScoredGroup] = []
    jax.block_until_ready(run.state["params"])  # the update before is training, not sampling
    with run.chrono.pause("rollout"):
      for attempt in range(self._resample + 1):
        items, drawn = self._curriculum.choose(drawn, size.size - len(groups), self._rates)
        if not items:
          break
        episodes = self._sample(run, items, f"{self._seed}/{number}/{attempt}")
        if episodes is None:
          return False
        scored = self._score(items, episodes)
        last = attempt == self._resample
        for group in scored:
          (groups if last or not group.zero_spread else replaced).append(group)
      # Where even the last attempt left too few groups with something to teach, the ones without fill up.
      spare = max(size.size - len(groups), 0)
      groups, replaced = groups + replaced[:spare], replaced[spare:]
    self._rates, about = self._curriculum.after(self._rates, groups + replaced, drawn - self._drawn)
    self._number, self._first_step, self._drawn = number, run.step, drawn
    self._updates, self._steps_each = size.parts, size.every
    self._images = {group.item.number: group.item.prompt.images for group in groups}
    samples = self._select(groups)
    self._experience, self._old = experience_lib.collect(samples.units), None
    self.metrics = self._metrics(groups, replaced, samples) | about
    if "old_logprobs" in self._keys():
      with run.chrono.pause("rollout"):
        began = time.perf_counter()
        self._old = old_policy.of_rollout(
            functools.partial(self._score_step, run), lambda nth: self._batch(nth, (*self._keys(), "places")),
            len(self._experience.tokens), self._updates, self._steps_each // self._updates)
        self.metrics["time/old_logprobs"] = time.perf_counter() - began
    problem = self._problem(groups, samples)
    if jax.process_index() == 0 and (problem or self._logs_samples(run)):
      table = groups_lib.table(self._names, groups, samples)
      text = groups_lib.write(self._workdir / "samples" / f"rollout-{run.step + 1:08d}", table, groups,
                              f"rollout before step {run.step + 1}")
      run.writer.write_texts(run.step + 1, {"rollout": text})
    if problem:
      raise DataError(problem)
    return True

  def _score_step(self, run: Any, batch: dict[str, np.ndarray], nth: int) -> np.ndarray:
    """Log-probs of a step of the rollout under the policy as it is now, [B, T]."""
    return np.asarray(run.program.score_fn(run.state["params"], run.program.place(batch), np.int32(run.step + nth)))

  def _sample(self, run: Any, items: list[PromptItem], seed: str) -> list[list[Episode]] | None:
    """Episodes [P][G] of prompts; None: the run was asked to stop meanwhile."""
    total, began = len(items) * self._group_size, time.perf_counter()
    # None: no bar without a terminal.
    with tqdm(total=total, desc="rollout", unit="completion", leave=False, dynamic_ncols=True,
              disable=None if jax.process_index() == 0 else True) as bar:

      def generate(prompts: list[np.ndarray], **options: Any) -> list[Completion] | None:
        parts = []
        for part in self._sampler.stream(run.state["params"], prompts, Request(**self._sampling, **options)):
          if run.stop_requested and jax.process_count() == 1:
            return None
          bar.update(part.finish_reason != "")
          parts.append(part)
        return collect(parts)

      episodes = self._episodes.run(items, self._group_size, generate, seed)
    self._clock["rollout"] += time.perf_counter() - began
    return episodes

  def _score(self, items: list[PromptItem], episodes: list[list[Episode]]) -> list[ScoredGroup]:
    """The groups with their rewards, which the first process computes for all."""
    began = time.perf_counter()
    scores: Any = None
    groups = [Group(item.content, [e.completion for e in group], [e.completion_ids.tolist() for e in group],
                    item.columns, item.prompt.where) for item, group in zip(items, episodes, strict=True)]
    if jax.process_index() == 0:
      scores = self._scorer.score(groups)
      for message in scores.messages:
        logging.warning("rollout: %s", message)
      scores = [np.asarray(part).tolist() for part in (scores.values, scores.failed, scores.abstained)]
    found = [np.array(part, kind) for part, kind in zip(processes.from_first(scores), (float, bool, bool), strict=True)]
    more = [self._models.score(groups)]  # which all processes compute
    if self._has_environment:
      own = np.array([[np.nan if e.reward is None else e.reward for e in group] for group in episodes])
      broken = np.array([[e.failed for e in group] for group in episodes])
      more.append((own[..., None], broken[..., None], (np.isnan(own) & ~broken)[..., None]))
    values, failed, abstained = (np.concatenate(parts, axis=2) for parts in zip(found, *more, strict=True))
    rewards_PxG = advantages_lib.combine(values, self._weights, failed)
    equal = advantages_lib.zero_spread(rewards_PxG if self._compares_all else np.stack([
        groups_lib.compared(*group, mask_truncated=True) for group in zip(rewards_PxG, episodes, strict=True)]))
    self._clock["rewards"] += time.perf_counter() - began
    rows = zip(items, episodes, values, failed, abstained, rewards_PxG, equal, strict=True)
    return [ScoredGroup(*row) for row in rows]

  def _metrics(self, groups: list[ScoredGroup], replaced: list[ScoredGroup], samples: TrainingSamples
               ) -> dict[str, float]:
    """The rollout's metrics."""
    metrics = groups_lib.metrics(self._names, groups, replaced, samples)
    sampled = sum(float(e.trajectory.weights.sum()) for group in groups + replaced for e in group.episodes)
    metrics |= self._episodes.metrics([episode for group in groups + replaced for episode in group.episodes])
    return to_floats(metrics | {
        "time/rollout": self._clock["rollout"], "time/rewards": self._clock["rewards"],
        "sampling/tokens_per_second": sampled / max(self._clock["rollout"], 1e-9)})

  def _problem(self, groups: list[ScoredGroup], samples: TrainingSamples) -> str:
    """Warns of a rollout that teaches nothing. Returns the error that ends the run after too many in a row, else "".

    Equal rewards are no fault once the policy has learned: it may have mastered these prompts, and others will differ.
    While it has not, it stays what it is, and will be given the same rewards again.
    """
    no_signal = groups_lib.no_signal(self._names, groups, samples, self._strategy.rewarded)
    if no_signal is None or (no_signal.equal and self._learned):
      self._without_signal, self._learned = 0, True
      return ""
    self._without_signal += 1
    logging.warning("The rollout before step %d teaches nothing: %s. %s", self._first_step + 1, no_signal.why,
                    no_signal.advice)
    if not self._max_without_signal or self._without_signal < self._max_without_signal:
      return ""
    first = self._first_step - (self._without_signal - 1) * self._steps_each
    since = "" if self._learned else ", and nothing has been learned since the run began"
    return (f"{self._without_signal} rollouts in a row taught nothing, from step {first + 1} to {self._first_step + 1}"
            f"{since}. Of the last: {no_signal.why}. {no_signal.advice} The same command then goes on from the last "
            "checkpoint. rollout.max_without_lesson says after how many such rollouts a run ends (0: never).")

  def _logs_samples(self, run: Any) -> bool:
    """Whether the step that follows is one whose metrics are written."""
    every = run.log_steps
    return run.step == 0 or bool(every) and (run.step + self._steps_each) // every > run.step // every


class Batches(Iterator[dict[str, jax.Array]]):
  """Batches in their places, one after another; it ends where the run is asked to stop. A context manager."""

  # As of `input_pipeline.prefetch.Prefetcher`: nothing runs ahead, since what is sampled depends on the step before.
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
