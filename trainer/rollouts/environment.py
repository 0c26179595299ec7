"""Environments, which answer what the policy says, and the episodes sampled with them; without, they have one turn.

    class Guess:                                    # config.rollout.environment = "my_package.Guess"
      def reset(self, prompt, /, **columns): ...
      def step(self, completion): return Turn(observation="too low", done=False)

Token in, token out: what was sampled stays as it is, turn after turn, and is never encoded again. What an environment
adds is encoded as the chat template writes it between two turns, and has the weight 0.

Nothing here imports JAX: environments and reward functions may share a file, and the latter run in other processes.
"""

import math
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from absl import logging
from ml_collections import ConfigDict

from input_pipeline.prompt_data import PromptData, PromptItem
from input_pipeline.tokenizer.tokenizer import Tokenizer
from trainer.dotted import load_class
from trainer.errors import ConfigError, DataError
from trainer.generate.stop_strings import StopStrings
from trainer.rollouts.environment_calls import Calls, TookTooLong, TooManyLeft
from trainer.rollouts.experience import Trajectory

# Completions of prompts, see `Episodes.run`; None: the run is to stop.
Generate = Callable[..., list[Any] | None]


@dataclass(frozen=True)
class Turn:
  """An environment's answer to a completion.

  Attributes:
    observation: what the policy is to answer next: a text (in a conversation, what the user says), or messages. None
      ends the episode.
    reward: added up over the episode; None: this turn has none.
    done: ends the episode; the observation is not shown any more.
  """

  observation: str | list[dict] | None = None
  reward: float | None = None
  done: bool = False


class Environment(Protocol):
  """One object for each completion of a prompt; made without arguments."""

  def reset(self, prompt: str | list[dict], /, **columns: Any) -> str | list[dict] | None:
    """Begins an episode. `columns` are the record's other fields. What it returns is added to the prompt."""

  def step(self, completion: str) -> Turn:
    """Answers what the policy said: without the token that ended it, but with other special tokens; without the stop
    string that did, unless rollout.keep_stop leaves it there."""


@dataclass(frozen=True)
class Episode:
  """A completion of a prompt, or a conversation of several.

  Attributes:
    trajectory: its tokens. `finish_reason` is "length" where a completion or the room for the next one ended without an
      end, "timeout" where the environment took too long, else "stop".
    completion: for reward functions, all that follows the record's prompt: a text, or messages.
    text: the same for people.
    reward: the sum of the environment's; None: it gave none; NaN: it failed.
    failed: the environment raised, or answered what cannot be; there is a message in the log.
    turns: completions.
  """

  trajectory: Trajectory
  completion: str | list[dict]
  text: str
  reward: float | None
  failed: bool
  turns: int

  @property
  def completion_ids(self) -> np.ndarray:
    """All that follows what the policy was first asked, int32 [n]."""
    return self.trajectory.ids[self.trajectory.prompt_length:]


class Episodes:
  """Samples episodes.

  Args:
    config: the whole config, of which `seq_len` and `rollout` count.
    tokenizer: what decodes.
    prompts: where the items come from.

  Raises:
    ConfigError: `rollout.environment` is no environment.
  """

  def __init__(self, config: ConfigDict, tokenizer: Tokenizer, prompts: PromptData):
    rollout = config.rollout
    self._tokenizer, self._prompter = tokenizer, prompts.prompter
    self._seq_len, self._max_new_tokens = config.seq_len, rollout.max_new_tokens
    self._stop = StopStrings(tokenizer, rollout.stop, rollout.keep_stop, "rollout.stop")
    self._make, self._max_turns, self._seconds = None, 1, None
    self._sees = config.model.vision.tower != "none"
    if rollout.environment is not None:
      self._make, self._max_turns = _load(rollout.environment), rollout.max_turns
      self._seconds = rollout.environment_timeout_seconds
      if self._seconds is not None and not self._seconds > 0:
        raise ConfigError(f"rollout.environment_timeout_seconds is {self._seconds}; it must be above 0, or None for no "
                          "limit.")

  def run(self, items: list[PromptItem], group_size: int, generate: Generate, seed: int | str
          ) -> list[list[Episode]] | None:
    """`group_size` episodes of each item, in order; None: `generate` was told to stop.

    What is drawn follows from seed, the number of the sample in its group, and the ids before, as in `Sampler`.

    Args:
      items: the prompts.
      group_size: G.
      generate: called once a turn with what goes on: `generate(prompts, samples=…, max_new_tokens=[…], stop_ids=…,
        seed=…)` gives Completions as `trainer.generate.sampler.Sampler.generate` does; None ends all episodes.
      seed: of the draws.
    """
    groups = [[_Playing(item, sample, self._seconds) for sample in range(group_size)] for item in items]
    everyone = [episode for group in groups for episode in group]
    try:
      finished = self._play(everyone, generate, seed)
    finally:
      for episode in everyone:
        episode.calls.close()
    if not finished:
      return None
    messages = Counter(episode.message for episode in everyone if episode.message is not None)
    for message, count in messages.most_common():
      logging.warning("rollout.environment failed in %d of %d episodes: %s", count, len(everyone), message)
    return [[episode.result() for episode in group] for group in groups]

  def metrics(self, episodes: list[Episode]) -> dict[str, float]:
    """How they ended, as far as the config has ways to."""
    found, all_of = {}, [episode.trajectory for episode in episodes]
    if self._stop.strings:
      ended = sum(sequence.stop_reason is not None for sequence in all_of)
      found["completions/stop_string_ratio"] = ended / max(len(all_of), 1)
    if self._seconds is not None:
      found["rollout/timeouts"] = float(sum(sequence.finish_reason == "timeout" for sequence in all_of))
    return found

  # ---------------------------------------------------------------- turns

  def _play(self, everyone: list["_Playing"], generate: Generate, seed: int | str) -> bool:
    """All turns; False: `generate` was told to stop."""
    if self._make is not None:
      self._reset(everyone)
    for turn in range(self._max_turns):
      active = [episode for episode in everyone if not episode.over]
      if not active:
        break
      if not self._sample(active, generate, seed):
        return False
      if self._make is None:
        break
      self._step(active, last=turn + 1 == self._max_turns)
    return True

  def _reset(self, episodes: list["_Playing"]) -> None:
    def first(episode: _Playing) -> dict[str, Any]:
      episode.environment = self._make()
      opening = episode.environment.reset(episode.item.content, **episode.item.columns)
      return {"added": None if opening is None else episode.as_added(opening)}

    for episode, answer in zip(episodes, _from_first(first, episodes), strict=True):
      if "error" in answer:
        episode.fail(answer["error"], answer["late"])
      elif answer["added"] is not None:
        self._open(episode, answer["added"])

  def _open(self, episode: "_Playing", opening: str | list[dict]) -> None:
    """Adds what an environment begins with to the prompt."""
    item = episode.item
    try:
      encoded = getattr(item.prompt.images, "encoded", ())
      if isinstance(opening, str):
        ids = self._prompter.text(item.content + opening, item.prompt.where, encoded).ids
      else:
        ids = self._prompter.messages(
            item.content + opening, item.tools, item.prompt.where, encoded, **item.variables).ids
    except DataError as e:
      episode.fail(str(e))
      return
    episode.begin(ids, opening)
    if self._room(episode) < 1:
      episode.fail(f"reset() made a prompt of {len(ids)} tokens, after which seq_len={self._seq_len} has no room for a "
                   "completion.")

  def _sample(self, active: list["_Playing"], generate: Generate, seed: int | str) -> bool:
    """One completion for each; equal texts about the same images are given once. False: there are none, see `run`."""
    asked: dict[tuple[bytes, int, Any], list[_Playing]] = {}
    for episode in active:
      asked.setdefault((episode.ids.tobytes(), self._room(episode), episode.item.prompt.images), []).append(episode)
    firsts = [same[0] for same in asked.values()]
    seen = {}
    if self._sees:
      seen = dict(images=[list(e.item.prompt.images) for e in firsts], prefixes=[e.prompt_length for e in firsts])
    samples = [list(dict.fromkeys(episode.sample for episode in same)) for same in asked.values()]
    completions = generate([episode.ids for episode in firsts], samples=samples,
                           max_new_tokens=[room for _, room, _ in asked], stop_ids=self._prompter.stop_ids, seed=seed,
                           **self._stop.options, **seen)
    if completions is None:
      return False
    found = {(c.prompt, c.sample): c for c in completions}
    for number, same in enumerate(asked.values()):
      for episode in same:
        completion = found[number, episode.sample]
        episode.add_completion(completion, self._stop.text(completion), self._stop.text(completion, skip_special=False))
    return True

  def _step(self, episodes: list["_Playing"], last: bool) -> None:
    """Lets environments answer; `last`: nothing is sampled after this."""
    def step(episode: _Playing) -> dict[str, Any]:
      turn = episode.environment.step(episode.last_completion)
      if not isinstance(turn, Turn):
        raise TypeError(f"step() returned a {type(turn).__name__}; expected a trainer.rollouts.environment.Turn")
      over = turn.done or turn.observation is None
      return {"reward": _number(turn.reward), "added": None if over else episode.as_added(turn.observation)}

    for episode, answer in zip(episodes, _from_first(step, episodes), strict=True):
      if "error" in answer:
        episode.fail(answer["error"], answer["late"])
        continue
      if answer["reward"] is not None:
        episode.reward = (episode.reward or 0.0) + answer["reward"]
      if last or answer["added"] is None or episode.finish_reason == "length":
        episode.over = True
      else:
        self._go_on(episode, answer["added"])

  def _go_on(self, episode: "_Playing", observation: str | list[dict]) -> None:
    """Adds what an environment says, if there is room for an answer to it."""
    item = episode.item
    ended = episode.stop_reason is None  # by a token, which stands there already
    try:
      ids = self._prompter.added_text(observation) if isinstance(observation, str) else self._prompter.added_messages(
          item.content + episode.messages[:-1], episode.messages[-1]["content"], observation, item.tools, ended=ended,
          **item.variables)
    except DataError as e:
      episode.fail(str(e))
      return
    if self._room(episode, len(ids)) < 1:
      episode.over, episode.finish_reason, episode.stop_reason = True, "length", None
    else:
      episode.add_observation(ids, observation)

  def _room(self, episode: "_Playing", added: int = 0) -> int:
    """Tokens that may still be sampled, behind so many that are added."""
    return min(self._max_new_tokens - episode.sampled, self._seq_len - len(episode.ids) - added)


class _Playing:
  """An episode that is not over yet."""

  def __init__(self, item: PromptItem, sample: int, seconds: float | None):
    self.item, self.sample, self.calls = item, sample, Calls(seconds)
    self.environment: Environment | None = None
    self.over, self.message, self.reward = False, None, None
    self.turns, self.sampled, self.finish_reason, self.stop_reason = 0, 0, "stop", None
    # What the policy said last, with special tokens but without what ended it.
    self.last_completion = ""
    # What follows the record's prompt.
    self.messages: list[dict] = []
    self.text = ""
    self.begin(item.prompt.ids, None)

  def begin(self, ids: np.ndarray, opening: str | list[dict] | None) -> None:
    """Starts with these ids, which end with `opening`."""
    self.ids, self.prompt_length = ids, len(ids)
    self.weights, self.logprobs = (np.zeros(len(ids), np.float32) for _ in range(2))
    self._append(opening)

  def add_completion(self, completion: Any, text: str, with_special: str) -> None:
    self.last_completion, self.finish_reason = with_special, completion.finish_reason
    self.stop_reason = completion.stop_reason
    # Those of the distribution that training has, too, in which nothing is truncated.
    self._add(completion.ids, np.ones(len(completion.ids), np.float32), completion.full_logprobs)
    self.turns, self.sampled = self.turns + 1, self.sampled + len(completion.ids)
    self._append(text if isinstance(self.item.content, str) else [{"role": "assistant", "content": text}])

  def add_observation(self, ids: np.ndarray, observation: str | list[dict]) -> None:
    zeros = np.zeros(len(ids), np.float32)
    self._add(ids, zeros, zeros)
    self._append(observation)

  def as_added(self, said: str | list[dict]) -> str | list[dict]:
    """What an environment says, as a text where the prompt is one, else as messages.

    Raises:
      TypeError: it is neither.
    """
    if isinstance(said, str):
      return said if isinstance(self.item.content, str) else [{"role": "user", "content": said}]
    if isinstance(self.item.content, str):
      raise TypeError(f"the environment says a {type(said).__name__}, but the prompt is a text; expected a string")
    if not isinstance(said, list) or not said or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in said):
      raise TypeError(f"the environment says {said!r:.60}; expected a string, or a list of messages with role and "
                      "content")
    return said

  def fail(self, message: str, late: bool = False) -> None:
    self.over, self.message, self.reward = True, message, math.nan
    if late:
      self.finish_reason, self.stop_reason = "timeout", None

  def result(self) -> Episode:
    trajectory = Trajectory(self.ids.astype(np.int32), self.weights, self.logprobs, self.prompt_length,
                            self.finish_reason, self.item.number, self.stop_reason)
    completion = self.text if isinstance(self.item.content, str) else self.messages
    return Episode(trajectory, completion, self.text, self.reward, self.message is not None, self.turns)

  def _add(self, ids: np.ndarray, weights: np.ndarray, logprobs: np.ndarray) -> None:
    self.ids = np.concatenate([self.ids, ids]).astype(np.int32)
    self.weights = np.concatenate([self.weights, weights])
    self.logprobs = np.concatenate([self.logprobs, logprobs]).astype(np.float32)

  def _append(self, said: str | list[dict] | None) -> None:
    if isinstance(said, str):
      self.text += said
    elif said is not None:
      alone = not self.messages and len(said) == 1 and said[0]["role"] == "assistant"
      self.text += said[0]["content"] if alone else "".join(f"\n[{m['role']}] {m['content']}" for m in said)
      self.messages = self.messages + said


def _load(name: str) -> type:
  cls = load_class(name, "rollout.environment")
  missing = [method for method in ("reset", "step") if not callable(getattr(cls, method, None))]
  if missing:
    raise ConfigError(f"rollout.environment: {name} has no {missing[0]}(). An environment is a class with "
                      "reset(prompt, **columns) and step(completion); see docs/rewards.md.")
  return cls


def _from_first(ask: Callable[[_Playing], dict[str, Any]], episodes: list[_Playing]) -> list[dict[str, Any]]:
  """What `ask` gives for each episode, or {"error": why not, "late": it took too long}; asked in the first process, for
  all, one after another."""
  import jax  # imported here: see above

  from trainer.distributed import processes
  return processes.from_first([_or_error(ask, e) for e in episodes] if jax.process_index() == 0 else None)


def _or_error(ask: Callable[[_Playing], dict[str, Any]], episode: _Playing) -> dict[str, Any]:
  try:
    return episode.calls(lambda: ask(episode))
  except TookTooLong as e:
    return {"error": str(e), "late": True}
  except TooManyLeft:
    raise
  except Exception as e:
    last = traceback.extract_tb(e.__traceback__)[-1]
    return {"error": f"{type(e).__name__}: {e} ({last.filename}:{last.lineno}, in {last.name})", "late": False}


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
