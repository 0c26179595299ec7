"""One rollout after another: prompts are drawn, completed by given parameters, and scored.

A rollout is a function of (seed, its number, the rollouts before it, the parameters that sample); which parameters
these are, and when it is trained on, others say (trainer/rollouts/ahead.py).

P prompts (groups), G completions of each, K reward functions.
"""

import io
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from tqdm import tqdm

from input_pipeline.examples import advantages as advantages_lib
from input_pipeline.prompt_data import PromptData, PromptItem
from input_pipeline.steps import Piece
from trainer import strategies
from trainer.distributed import processes
from trainer.errors import ConfigError
from trainer.generate.beginnings import Beginnings
from trainer.generate.completion import Completion, More, Request, joined
from trainer.generate.kept import Held, Kept
from trainer.metrics import to_floats
from trainer.rollouts import carried as carried_lib
from trainer.rollouts import experience as experience_lib
from trainer.rollouts import groups as groups_lib
from trainer.rollouts import replay as replay_lib
from trainer.rollouts.carried import Ages, Group
from trainer.rollouts.curriculum import SAVED, Curriculum
from trainer.rollouts.engine import make_sampler
from trainer.rollouts.environment import Episodes
from trainer.rollouts.episode import Episode
from trainer.rollouts.experience import Experience
from trainer.rollouts.groups import NoSignal, ScoredGroup, TrainingSamples
from trainer.rollouts.options import ENVIRONMENT
from trainer.rollouts.reward_models import RewardModels
from trainer.rollouts.reward_pool import Group as Answers
from trainer.rollouts.reward_pool import make_scorer
from trainer.rollouts.schedule import Policies

# What the names of its arrays in checkpoints begin with.
CARRIED = "carried_"
# Its array in what is told to other processes that holds all that is no array.
META = "meta"


class Policy(NamedTuple):
  """What samples: the model without its parameters, its tokenizer and the mesh that it is on."""

  model: Any
  tokenizer: Any
  mesh: Any


class Rollout(NamedTuple):
  """A rollout that is sampled and scored.

  Attributes:
    number: from 0 on; with the seed it decides what is drawn.
    version: updates that the policy that sampled it had had.
    first_step, steps, updates: the updates done when its training begins, those that it serves, and those of a pass.
    drawn: prompts that were drawn for it and for those before.
    groups: its prompts' numbers in their stream.
    experience: what is trained on.
    metrics: of its sampling and its rewards.
    no_signal: why it teaches nothing, if so.
    table: a line for each completion, JSON-able.
    rates: of prompts after it (trainer/rollouts/curriculum.py); None: not measured.
    carried: groups that had begun when it was over, and go on in the next one.
    remembered: groups, its own among them, that later ones may train on again (trainer/rollouts/replay.py).
    oldest: updates of the policy that sampled its oldest tokens; None: as `version`.
    changes, kept: of the policy while it was sampled, and rows that were held (trainer/rollouts/schedule.py).
  """

  number: int
  version: int
  first_step: int
  steps: int
  updates: int
  drawn: int
  groups: list[int]
  experience: Experience
  metrics: dict[str, float]
  no_signal: NoSignal | None
  table: list[dict[str, Any]]
  rates: np.ndarray | None = None
  carried: Sequence[Group] = ()
  remembered: Sequence[replay_lib.Remembered] = ()
  oldest: int | None = None
  changes: Sequence[tuple[int, int]] = ()
  kept: int = 0

  @property
  def end(self) -> int:
    """The updates done when its training is over."""
    return self.first_step + self.steps

  def saved(self, name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(JSON-able, {name of an array, which begins with `name`: it}), from which `restored` makes it again."""
    meta = {key: value for key, value in self._asdict().items() if key not in ("experience", "rates", "carried",
                                                                               "remembered")}
    meta["carried"], carried = carried_lib.saved(self.carried, CARRIED)
    meta["remembered"], remembered = replay_lib.saved(self.remembered, replay_lib.NAME)
    arrays = self.experience.arrays() | carried | remembered | ({} if self.rates is None else {SAVED: self.rates})
    return meta, {f"{name}{key}": part for key, part in arrays.items()}

  @staticmethod
  def restored(name: str, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> "Rollout":
    own = {key.removeprefix(name): part for key, part in arrays.items() if key.startswith(name)}
    signal, rates = meta["no_signal"], own.pop(SAVED, None)
    carried = carried_lib.restored(meta.get("carried", ()), own, CARRIED)
    remembered = replay_lib.restored(meta.get("remembered", ()), own, replay_lib.NAME)
    return Rollout(**dict(meta) | {"rates": rates, "no_signal": None if signal is None else NoSignal(*signal),
                                   "experience": Experience(**own) if own else experience_lib.collect([]),
                                   "carried": carried, "remembered": remembered})

  def packed(self) -> bytes:
    """The rollout for another process, which `unpacked` makes it again from."""
    meta, arrays = self.saved("")
    parts: dict[str, Any] = {**arrays, META: np.frombuffer(json.dumps(meta).encode(), np.uint8)}
    with io.BytesIO() as file:
      np.savez(file, **parts)
      return file.getvalue()

  @staticmethod
  def unpacked(data: bytes) -> "Rollout":
    with np.load(io.BytesIO(data)) as file:
      arrays = {name: file[name] for name in file.files}
    return Rollout.restored("", json.loads(arrays.pop(META).tobytes()), arrays)


class Producer:
  """Makes rollouts.

  Args:
    workdir: of the run; an engine is given parameters there.

  Attributes:
    names: of what gives rewards.

  Raises:
    ConfigError, DataError: see `make_scorer`, `Episodes`, `Sampler.check`.
  """

  def __init__(self, config: Any, prompts: PromptData, policy: Policy, workdir: Any):
    c, self._seed, self._prompts = config.rollout, config.seed, prompts
    self._carries, self._max_staleness, self._kept_texts = c.carry_over, c.max_staleness, c.kept_texts
    self._replay = replay_lib.Replay(c.replay_groups, c.replay_window if c.replay_groups else 0, config.seed)
    self._shares = c.share_beginnings
    # Where policies change within a text anyway, what goes on is not run again by a newer one.
    self._held = Held() if c.carry_over and c.in_flight else None
    self._group_size, self._resample, self._has_environment = c.group_size, c.resample, c.environment is not None
    self._strategy, mask_truncated = strategies.of(config), c.mask_truncated
    self._compares_all, self._apart = True, advantages_lib.apart(config.strategy)
    if not self._strategy.rewarded:
      self._select = lambda groups: groups_lib.every(groups, mask_truncated)
    elif self._strategy.critic:
      self._select = lambda groups: groups_lib.valued(groups, mask_truncated)
    elif self._strategy.data == "pairs":
      self._compares_all = not mask_truncated
      self._select = lambda groups: groups_lib.pairs(groups, config.seq_len, mask_truncated)
    else:
      how = (*advantages_lib.kinds(config.strategy), mask_truncated, self._apart)
      self._select = lambda groups: groups_lib.sequences(groups, *how)
    self._sampling = dict(temperature=c.temperature, top_k=c.top_k, top_p=c.top_p, min_p=c.min_p)
    self.sampler = make_sampler(config, policy.model, policy.mesh, workdir)
    self.episodes = Episodes(config, policy.tokenizer, prompts)
    self.scorer = make_scorer(config, prompts)
    self.sampler.check([max((i.prompt.ids for i in prompts.every_item()), key=len)], c.max_new_tokens, "rollout.")
    self.models = RewardModels(config, policy.mesh)
    self.curriculum = Curriculum(config, prompts)
    self.names = (*self.scorer.names, *self.models.names, *(ENVIRONMENT,) * self._has_environment)
    self._weights = np.array([*self.scorer.weights, *self.models.weights, *(1.0,) * self._has_environment])
    # A bar over a terminal's last line would fight with that of training, where both go on at once.
    self._shows = not c.concurrent

  def roll(self, policies: Policies, number: int, last: Rollout | None, first_step: int, size: Piece,
           stopped: Callable[[], bool]) -> Rollout | None:
    """Samples and scores the next prompts; groups that teach nothing are replaced where the config says so.

    Args:
      policies: that samples, and what may take its place meanwhile.
      number, first_step: of the rollout (`Rollout`).
      last: the rollout before it; None: there was none.
      size: the prompts of a rollout and the steps that it serves.
      stopped: whether to leave off.

    Returns:
      None if it was left off.
    """
    version = policies.version
    self._clock, self._sampled = {"rollout": 0.0, "rewards": 0.0}, 0
    self._of_prompts: dict[str, int] = {}
    groups: list[ScoredGroup] = []
    replaced: list[ScoredGroup] = []
    ages, kept = Ages(version, first_step, size.every, size.size, self._max_staleness), self._hold(policies.kept)
    carried = self._in_time([] if last is None else last.carried, ages, f"{self._seed}/{number}/anew")
    whole: list[Group] = []  # of those that were carried, and of others in their way
    before = drawn = 0 if last is None else last.drawn
    going, carries = len(carried), self._carries or bool(carried)
    rates = self.curriculum.unmeasured() if last is None or last.rates is None else last.rates
    for attempt in range(self._resample + 1):
      need, seed = size.size - len(groups), f"{self._seed}/{number}/{attempt}"
      items, drawn = self.curriculum.choose(drawn, self._to_begin(need, len(carried), ages) if carries else need, rates)
      if carries:
        begun = [*carried, *(carried_lib.fresh(item.number, seed, self._group_size) for item in items)]
        found = self._go_on(policies, begun, need, ages, stopped)
        if found is None:
          return None
        items, episodes, ended, rest = found
        # Those that have not begun, the last ones, have not been drawn.
        drawn = min((group.number for group in rest if group.oldest is None and group.number >= before), default=drawn)
        carried, whole = [group for group in rest if group.number < drawn], whole + ended
      elif (episodes := self._sample(policies, items, seed, stopped) if items else []) is None:
        return None
      if not items:
        break
      scored = self._score(items, episodes)
      is_last = attempt == self._resample
      for group in scored:
        (groups if is_last or not group.zero_spread else replaced).append(group)
    # Where even the last attempt left too few groups with something to teach, the ones without fill up.
    spare = max(size.size - len(groups), 0)
    groups, replaced = groups + replaced[:spare], replaced[spare:]
    begun_here = len(groups) + len(replaced) + len(carried) - going
    rates, about = self.curriculum.after(rates, groups + replaced, drawn - before - begun_here)
    samples = self._select(groups)
    remembered = () if last is None else last.remembered
    again = self._replay.choose(remembered, number)
    about |= policies.staleness(first_step) | replay_lib.metrics(again, first_step)
    if carries:
      about |= carried_lib.metrics(whole, carried, ages)
    if self._held is not None:
      about["rollout/rows_held"] = float(kept)
    return Rollout(number, version, first_step, size.every, size.parts, drawn, [group.item.number for group in groups],
                   experience_lib.collect(samples.units + replay_lib.units(again)),
                   self._metrics(groups, replaced, samples) | about,
                   groups_lib.no_signal(self.names, groups, samples, self._strategy.rewarded, self._strategy.critic),
                   groups_lib.table(self.names, groups, samples), rates, carried,
                   self._replay.after(remembered, number, version, samples.units),
                   min((group.oldest for group in whole), default=None), policies.changes, kept)

  def close(self) -> None:
    """Ends the processes that compute rewards."""
    if self._held is not None:
      self._held.clear()
    self.scorer.close()

  def _hold(self, asked: int | None) -> int:
    """How many rows go on from the rollout before; `asked`: see `Policies`."""
    if asked == 0 and self._held is not None:
      self._held.clear()
    found = 0 if self._held is None else len(self._held.names)
    if asked is not None and asked != found:
      raise ConfigError(f"rollout.schedule says that {asked} completions go on in their rows, and {found} are there: "
                        "what they were run with is gone since this run was stopped. Follow the schedule from its "
                        "start, without a stop, in another --workdir.")
    return found

  def _in_time(self, carried: Sequence[Group], ages: Ages, seed: str) -> list[Group]:
    """Those that go on; what can no longer be trained on in time, the config having changed, begins anew."""
    found = ages.begun_anew(carried, seed)
    anew = sum(before.oldest is not None and now.oldest is None for before, now in zip(carried, found, strict=True))
    if anew:
      logging.warning("%d of %d groups that had begun begin again: with the config as it is now they would be more "
                      "than rollout.max_staleness=%d updates old when they are trained on.", anew, len(found),
                      ages.max_staleness)
    return found

  def _to_begin(self, need: int, going: int, ages: Ages) -> int:
    """Prompts to begin beside so many that go on, where `need` groups are to become whole."""
    return max((ages.most(need, self.sampler.rows) if self._carries else need) - going, 0)

  def _go_on(self, policies: Policies, groups: list[Group], need: int, ages: Ages, stopped: Callable[[], bool]
             ) -> tuple[list[PromptItem], list[list[Episode]], list[Group], list[Group]] | None:
    """(items, episodes of the groups that became whole, these, the others); None: it was left off."""
    began, items = time.perf_counter(), [self._prompts.item(group.number) for group in groups]
    limits, how = self.episodes.asked(items)
    shared = Beginnings() if self._shares else None

    def stream(prompts: list[np.ndarray], places: list[int], **options: Any) -> Iterator[tuple[Completion, int]]:
      options |= how | {key: [how[key][place] for place in places] for key in ("images", "prefixes") if key in how}
      request = Request(**self._sampling, **options, beginnings=shared, held=self._held, newer=policies.look)
      for part in self.sampler.stream(policies.params, prompts, request):
        self._count(part, policies, bar)
        yield part, policies.version

    with self._bar(need * self._group_size) as bar:
      found = carried_lib.go_on(groups, need, ages, [item.prompt.ids for item in items], limits, stream, stopped)
    self._count_shared(shared)
    self._clock["rollout"] += time.perf_counter() - began
    if found is None:
      return None
    chosen = [self._prompts.item(group.number) for group in found[0]]
    return chosen, [[self.episodes.alone(item, text.completion(sample)) for sample, text in enumerate(group.texts)]
                    for item, group in zip(chosen, found[0], strict=True)], *found

  def _bar(self, total: int) -> tqdm:
    """Of completions; None: no bar without a terminal."""
    return tqdm(total=total, desc="rollout", unit="completion", leave=False, dynamic_ncols=True,
                disable=None if jax.process_index() == 0 and self._shows else True)

  def _count(self, part: Completion, policies: Policies, bar: tqdm) -> None:
    bar.update(part.finish_reason != "")
    self._sampled += len(part.ids)
    policies.tokens[policies.version] += len(part.ids)

  def _sample(self, policies: Policies, items: list[PromptItem], seed: str, stopped: Callable[[], bool]
              ) -> list[list[Episode]] | None:
    """Episodes [P][G] of prompts; None: it was left off."""
    total, began = len(items) * self._group_size, time.perf_counter()
    # Of these parameters, and of episodes that go on: of a seed of their own, no two have a text in common.
    kept = Kept(self._kept_texts, once=True) if self._kept_texts else None
    shared = Beginnings() if self._shares else None
    with self._bar(total) as bar:

      def generate(prompts: list[np.ndarray], more: Callable[..., tuple] | None = None, **options: Any
                   ) -> list[Completion] | None:
        going: dict[tuple[int, int], list[Completion]] = {}
        ended: list[Completion] = []

        def told(idle: bool) -> More:
          new, ended[:] = list(ended), []
          return More(*more(new, idle))

        request = Request(**self._sampling, **options, kept=kept, beginnings=shared,
                          more=None if more is None else told,
                          newer=policies.look, stopped=stopped)
        for part in self.sampler.stream(policies.params, prompts, request):
          if stopped():
            return None
          self._count(part, policies, bar)
          going.setdefault((part.prompt, part.sample), []).append(part)
          if part.finish_reason:
            ended.append(joined(going.pop((part.prompt, part.sample))))
        return None if stopped() else ended

      episodes = self.episodes.run(items, self._group_size, generate, seed)
    self._clock["rollout"] += time.perf_counter() - began
    self._count_shared(shared)
    if kept is not None:
      for name, count in dict(prompt_tokens_run=kept.run, prompt_tokens_reused=kept.reused,
                              texts_given_up=kept.given_up).items():
        self._of_prompts[name] = self._of_prompts.get(name, 0) + count
    return episodes

  def _count_shared(self, shared: Beginnings | None) -> None:
    if shared is not None:
      self._of_prompts["prompt_tokens_shared"] = self._of_prompts.get("prompt_tokens_shared", 0) + shared.saved

  def _score(self, items: list[PromptItem], episodes: list[list[Episode]]) -> list[ScoredGroup]:
    """The groups with their rewards, which the first process computes for all."""
    began = time.perf_counter()
    scores: Any = None
    groups = [Answers(item.content, [e.completion for e in group], [e.completion_ids.tolist() for e in group],
                    item.columns, item.prompt.where) for item, group in zip(items, episodes, strict=True)]
    if jax.process_index() == 0:
      scores = self.scorer.score(groups)
      for message in scores.messages:
        logging.warning("rollout: %s", message)
      scores = [np.asarray(part).tolist() for part in (scores.values, scores.failed, scores.abstained)]
    found = [np.array(part, kind) for part, kind in zip(processes.from_first(scores), (float, bool, bool), strict=True)]
    more = [self.models.score(groups)]  # which all processes compute
    if self._has_environment:
      own = np.array([[np.nan if e.reward is None else e.reward for e in group] for group in episodes])
      broken = np.array([[e.failed for e in group] for group in episodes])
      more.append((own[..., None], broken[..., None], (np.isnan(own) & ~broken)[..., None]))
    values, failed, abstained = (np.concatenate(parts, axis=2) for parts in zip(found, *more, strict=True))
    rewards_PxG = worth_PxG = advantages_lib.combine(values, self._weights, failed)
    if self._apart:
      worth_PxG = advantages_lib.normalized_sum(values, self._weights, rewards_PxG)
    equal = advantages_lib.zero_spread(worth_PxG if self._compares_all else np.stack([
        groups_lib.compared(*group, mask_truncated=True) for group in zip(rewards_PxG, episodes, strict=True)]))
    self._clock["rewards"] += time.perf_counter() - began
    rows = zip(items, episodes, values, failed, abstained, rewards_PxG, worth_PxG, equal, strict=True)
    return [ScoredGroup(*row) for row in rows]

  def _metrics(self, groups: list[ScoredGroup], replaced: list[ScoredGroup], samples: TrainingSamples
               ) -> dict[str, float]:
    """The rollout's metrics."""
    metrics = groups_lib.metrics(self.names, groups, replaced, samples)
    metrics |= self.episodes.metrics([episode for group in groups + replaced for episode in group.episodes])
    metrics |= {f"rollout/{name}": count for name, count in self._of_prompts.items()}
    return to_floats(metrics | {
        "time/rollout": self._clock["rollout"], "time/rewards": self._clock["rewards"],
        "sampling/tokens_per_second": self._sampled / max(self._clock["rollout"], 1e-9)})
