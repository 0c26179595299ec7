"""Environments, which answer what the policy says, and the episodes sampled with them; without, they have one turn.

    class Guess:                                    # config.rollout.environment = "my_package.Guess"
      def reset(self, prompt, /, **columns): ...
      def step(self, completion): return Turn(observation="too low", done=False)

Token in, token out: what was sampled stays as it is, turn after turn, and is never encoded again. What an environment
adds is encoded as the chat template writes it between two turns, and has the weight 0.

Nothing here imports JAX: environments and reward functions may share a file, and the latter run in other processes.
"""

import functools
import inspect
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import numpy as np
from absl import logging
from ml_collections import ConfigDict

from input_pipeline.chat import tool_formats, tool_functions
from input_pipeline.prompt_data import PromptData, PromptItem
from input_pipeline.tokenizer.tokenizer import Tokenizer
from trainer.dotted import load_object
from trainer.errors import ConfigError, DataError
from trainer.generate.stop_strings import StopStrings
from trainer.rollouts.agents import Agents
from trainer.rollouts.environment_calls import Calls
from trainer.rollouts.episode import Conversation, Episode, Playing, Turn
from trainer.rollouts.tools import ToolEnvironment, frequencies
from trainer.rollouts.turns import Answers, Asked, Interleaved

# Completions of prompts, see `Episodes.run`; None: the run is to stop.
Generate = Callable[..., list[Any] | None]


class Environment(Protocol):
  """One object for each completion of a prompt; made without arguments. Either method may be a coroutine (`async def`).

  Those of several episodes are called at the same time, in threads (`rollout.environment_workers`). It may have a
  method `truncate(completion, finish_reason)`, which is called in place of `step` for the last completion that there
  can be, and with None where there is no room for the answer to what `step` said; it returns a reward, or None.
  """

  def reset(self, prompt: str | list[dict], /, **columns: Any
            ) -> str | list[dict] | Conversation | None | Awaitable[str | list[dict] | Conversation | None]:
    """Begins an episode. `columns` are the record's other fields. What it returns is added to the prompt; a
    Conversation takes its place."""

  def step(self, completion: str) -> Turn | Awaitable[Turn]:
    """Answers what the policy said: without the token that ended it, but with other special tokens; without the stop
    string that did, unless rollout.keep_stop leaves it there."""


class Episodes:
  """Samples episodes.

  Args:
    config: the whole config, of which `seq_len` and `rollout` count.
    prompts: where the items come from.

  Raises:
    ConfigError: `rollout.environment` is no environment, or the model cannot be shown `rollout.tools`.
  """

  def __init__(self, config: ConfigDict, tokenizer: Tokenizer, prompts: PromptData):
    rollout = config.rollout
    self._tokenizer, self._prompter = tokenizer, prompts.prompter
    self._seq_len, self._max_new_tokens = config.seq_len, rollout.max_new_tokens
    self._stop = StopStrings(tokenizer, rollout.stop, rollout.keep_stop, "rollout.stop")
    self._make, self._max_turns, self._seconds, self._workers, self._late_reward = None, 1, None, 1, None
    self._turn_share, self._keeps = rollout.turn_share, rollout.kept_texts > 0
    self._sees = config.model.vision.tower != "none"
    self._tools, self._truncates = prompts.tools, False
    if rollout.environment is not None or self._tools:
      self._make, self._max_turns = _maker(rollout, prompts), rollout.max_turns
      self._truncates = isinstance(self._make, Agents) or hasattr(self._make, "truncate")
      self._seconds = rollout.environment_timeout_seconds
      if self._seconds is not None and not self._seconds > 0:
        raise ConfigError(f"rollout.environment_timeout_seconds is {self._seconds}; it must be above 0, or None for no "
                          "limit.")
      self._workers, self._late_reward = rollout.environment_workers, rollout.environment_timeout_reward

  def run(self, items: list[PromptItem], group_size: int, generate: Generate, seed: int | str
          ) -> list[list[Episode]] | None:
    """`group_size` episodes of each item, in order; None: `generate` was told to stop.

    What is drawn follows from seed, the number of the sample in its group, and the ids before, as in `Sampler`.

    Args:
      group_size: G.
      generate: called once a turn with what goes on: `generate(prompts, samples=…, max_new_tokens=[…], stop_ids=…,
        seed=…)`, and `keep=[…]` with rollout.kept_texts, gives Completions as
        `trainer.generate.sampler.Sampler.generate` does; None ends all episodes. With rollout.turn_share < 1 it is
        called once, with `more(ended, idle)` (`trainer.generate.completion.More`), which it tells what has ended since
        the last time.
    """
    is_async = any(inspect.iscoroutinefunction(getattr(self._make, method, None)) for method in ("reset", "step"))
    in_thread = self._workers > 1 or bool(self._tools) or self._turn_share < 1 or is_async
    groups = [[Playing(item, sample, Calls(self._seconds, in_thread)) for sample in range(group_size)]
              for item in items]
    everyone = [episode for group in groups for episode in group]
    play = self._play_interleaved if self._turn_share < 1 and self._make is not None else self._play
    try:
      finished = play(everyone, generate, seed)
    finally:
      for episode in everyone:
        episode.calls.close()
      if isinstance(self._make, Agents):
        self._make.end()
    if not finished:
      return None
    failed = [episode for episode in everyone if episode.message is not None]
    first = {episode.message: episode.item for episode in reversed(failed)}
    for message, count in Counter(episode.message for episode in failed).most_common():
      logging.warning("rollout.environment failed in %d of %d episodes: %s; first for %s, whose prompt is %s", count,
                      len(everyone), message, first[message].prompt.where, _shown(first[message].content))
    return [[episode.result() for episode in group] for group in groups]

  def asked(self, items: list[PromptItem]) -> tuple[list[int], dict[str, Any]]:
    """(the most tokens of a completion of each item, how they are completed) without an environment: `stop_ids`, and
    other attributes of a `Request`."""
    limits = [min(self._max_new_tokens, self._seq_len - len(item.prompt.ids)) for item in items]
    seen = {}
    if self._sees:
      seen = dict(images=[list(item.prompt.images) for item in items],
                  prefixes=[len(item.prompt.ids) for item in items])
    return limits, dict(stop_ids=self._prompter.stop_ids, **self._stop.options, **seen)

  def alone(self, item: PromptItem, completion: Any) -> Episode:
    """The episode of one completion, without an environment."""
    episode = Playing(item, completion.sample, Calls(None, False))
    self._add(episode, completion)
    return episode.result()

  def metrics(self, episodes: list[Episode]) -> dict[str, float]:
    """How they ended, as far as the config has ways to."""
    found, all_of = {}, [episode.trajectory for episode in episodes]
    if self._stop.strings:
      ended = sum(sequence.stop_reason is not None for sequence in all_of)
      found["completions/stop_string_ratio"] = ended / max(len(all_of), 1)
    if self._seconds is not None:
      found["rollout/timeouts"] = float(sum(sequence.finish_reason == "timeout" for sequence in all_of))
    if self._tools:
      found |= frequencies(episode.completion for episode in episodes)
    return found

  # ---------------------------------------------------------------- turns

  def _play(self, everyone: list[Playing], generate: Generate, seed: int | str) -> bool:
    """All turns; False: `generate` was told to stop."""
    if self._make is not None:
      self._reset(everyone)
    for _ in range(self._max_turns):
      active = [episode for episode in everyone if not episode.over]
      if not active:
        break
      if not self._sample(active, generate, seed):
        return False
      if self._make is None:
        break
      self._answer(active, self._ask(self._step, active))
    return True

  def _play_interleaved(self, everyone: list[Playing], generate: Generate, seed: int | str) -> bool:
    """As `_play`; but an episode's next turn begins while others are still sampled."""
    self._reset(everyone)
    if not (playing := [episode for episode in everyone if not episode.over]):
      return True
    asked = Asked(self._room, self._sees, self._max_turns if self._keeps else None)
    turns = Interleaved(asked, Answers(self._workers), self._step, self._add, self._answer, playing, self._turn_share)
    return self._generate(generate, *asked.ask(playing), seed=seed, more=turns.more) is not None

  def _ask(self, ask: Callable[[Playing], dict[str, Any]], episodes: list[Playing]) -> list[dict[str, Any]]:
    """What `ask` gives for each episode, or why not; see `Answers`."""
    answers = Answers(self._workers)
    answers.start(ask, episodes)
    return answers.of(episodes)

  def _reset(self, episodes: list[Playing]) -> None:
    def first(episode: Playing) -> dict[str, Any]:
      episode.environment = self._make()
      opening = episode.calls.result(episode.environment.reset(episode.item.content, **episode.item.columns))
      if isinstance(opening, Conversation):
        return {"added": [], "asked": episode.as_added(opening.messages), "tools": opening.tools}
      return {"added": None if opening is None else episode.as_added(opening)}

    for episode, answer in zip(episodes, self._ask(first, episodes), strict=True):
      if "error" in answer:
        episode.fail(answer["error"], answer["late"])
        continue
      if "asked" in answer:
        episode.item = episode.item._replace(content=answer["asked"], tools=answer["tools"])
      if answer["added"] is not None:
        self._open(episode, answer["added"])

  def _open(self, episode: Playing, opening: str | list[dict]) -> None:
    """Adds what an environment begins with to the prompt."""
    item = episode.item
    if not self._sees and not isinstance(item.content, str) and any(
        isinstance(m["content"], list) for m in [*item.content, *opening]):
      episode.fail("what it begins with has images, but the model sees none (model.vision.tower is 'none').")
      return
    try:
      encoded = getattr(item.prompt.images, "encoded", ())
      if isinstance(opening, str):
        prompt = self._prompter.text(item.content + opening, item.prompt.where, encoded)
      else:
        prompt = self._prompter.messages(
            item.content + opening, item.tools, item.prompt.where, encoded, **item.variables)
    except DataError as e:
      episode.fail(str(e))
      return
    if encoded != getattr(prompt.images, "encoded", ())[:len(encoded)]:  # which are had again from the data
      episode.fail("what stands before the prompt's own images has another image. Show it behind them.")
      return
    episode.begin(prompt.ids, opening)
    episode.images = prompt.images
    if self._room(episode) < 1:
      episode.fail(f"reset() made a prompt of {len(prompt.ids)} tokens, after which seq_len={self._seq_len} has no "
                   "room for a completion.")

  def _sample(self, active: list[Playing], generate: Generate, seed: int | str) -> bool:
    """One completion for each. False: there are none, see `run`."""
    asked = Asked(self._room, self._sees, self._max_turns if self._keeps else None)
    completions = self._generate(generate, *asked.ask(active), seed=seed)
    for episode, completion in asked.of(completions or ()):
      self._add(episode, completion)
    return completions is not None

  def _generate(self, generate: Generate, prompts: list[np.ndarray], options: dict[str, list], **more: Any
                ) -> list[Any] | None:
    return generate(prompts, **options, stop_ids=self._prompter.stop_ids, **self._stop.options, **more)

  def _add(self, episode: Playing, completion: Any) -> None:
    episode.add_completion(completion, self._stop.text(completion), self._stop.text(completion, skip_special=False))

  def _step(self, episode: Playing) -> dict[str, Any]:
    """What its environment answers."""
    if self._truncates and (episode.finish_reason == "length" or episode.turns == self._max_turns):
      return self._truncate(episode, episode.last_completion)
    turn = episode.calls.result(episode.environment.step(episode.last_completion))
    if not isinstance(turn, Turn):
      raise TypeError(f"step() returned a {type(turn).__name__}; expected a trainer.rollouts.environment.Turn")
    over = turn.done or turn.observation is None
    return {"reward": _number(turn.reward), "added": None if over else episode.as_added(turn.observation)}

  def _truncate(self, episode: Playing, completion: str | None = None) -> dict[str, Any]:
    """What an environment says to an episode's end for want of room."""
    reward = episode.calls.result(episode.environment.truncate(completion, episode.finish_reason))
    return {"reward": _number(reward), "added": None}

  def _answer(self, episodes: list[Playing], answers: list[dict[str, Any]]) -> None:
    """Goes on with these answers of environments."""
    full = []
    for episode, answer in zip(episodes, answers, strict=True):
      if "error" in answer:
        episode.fail(answer["error"], answer["late"], self._late_reward)
        continue
      if answer["reward"] is not None:
        episode.reward = (episode.reward or 0.0) + answer["reward"]
      if episode.turns == self._max_turns or answer["added"] is None or episode.finish_reason == "length":
        episode.over = True
      elif not self._go_on(episode, answer["added"]) and self._truncates:
        full.append(episode)
    if full:
      self._answer(full, self._ask(self._truncate, full))

  def _go_on(self, episode: Playing, observation: str | list[dict]) -> bool:
    """Adds what an environment says; False: there is no room for an answer to it."""
    item = episode.item
    ended = episode.stop_reason is None  # by a token, which stands there already
    try:
      ids, images = (self._prompter.added_text(observation), ()) if isinstance(observation, str) else (
          self._prompter.added_messages(item.content + episode.messages[:-1], episode.messages[-1]["content"],
                                        observation, item.tools, ended=ended, **item.variables))
    except DataError as e:
      episode.fail(str(e))
      return True
    if self._room(episode, len(ids)) < 1:
      episode.over, episode.finish_reason, episode.stop_reason = True, "length", None
      return False
    episode.add_observation(ids, observation, images)
    return True

  def _room(self, episode: Playing, added: int = 0) -> int:
    """Tokens that may still be sampled, behind so many that are added."""
    return min(self._max_new_tokens - episode.sampled, self._seq_len - len(episode.ids) - added)


def _maker(rollout: ConfigDict, prompts: PromptData) -> Callable[[], Environment]:
  """What makes the environment of an episode."""
  find_format = functools.partial(tool_formats.find_format, rollout.tool_format, prompts.prompter.template)
  if not prompts.tools:
    found = load_object(rollout.environment, "rollout.environment", "the dotted path of a class or function of yours")
    return _checked(found, rollout.environment) if isinstance(found, type) else Agents(found, find_format)
  schema = tool_functions.schema_of(next(iter(prompts.tools.values())))
  return functools.partial(ToolEnvironment, prompts.tools, find_format(schema))


def _checked(cls: type, name: str) -> type:
  missing = [method for method in ("reset", "step") if not callable(getattr(cls, method, None))]
  if missing:
    raise ConfigError(f"rollout.environment: {name} has no {missing[0]}(). An environment is a class with "
                      "reset(prompt, **columns) and step(completion), or a function that asks the policy itself; see "
                      "docs/rewards.md.")
  return cls


def _shown(prompt: str | list[dict], most: int = 200) -> str:
  """The end of a prompt, for messages."""
  text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content"))
  return repr(text if len(text) <= most else "… " + text[-most:])


def _number(reward: Any) -> float | None:
  """A reward as a float.

  Raises:
    TypeError, ValueError: it is none.
  """
  if reward is None:
    return None
  if not isinstance(reward, (int, float, np.number, np.bool_)):
    raise TypeError(f"the reward is {reward!r:.60} ({type(reward).__name__}); expected a number or None")
  if not math.isfinite(reward):
    raise ValueError(f"the reward is {reward}; expected a finite number")
  return float(reward)
