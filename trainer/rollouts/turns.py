"""Turns of episodes: what a sampler is asked for them, and what their environments answer meanwhile.

Turn by turn, the longest completion of a turn keeps all others waiting, and then all wait for the slowest environment.
Interleaved (`rollout.turn_share`) an environment is asked as soon as the sampler tells that its completion has
ended, and the episode goes on in a row that is free. When answers are waited for follows from how many episodes go on,
not from the clock: so the sampler's batches, and with them the rounding, are the same in every run.

Nothing here imports JAX at the top, see trainer/rollouts/environment.py.
"""

import functools
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trainer.rollouts.environment_calls import FAILURES, Answer, Together, TookTooLong
from trainer.rollouts.episode import Playing


class Asked:
  """What the sampler is asked for. Equal texts about the same images are given once.

  Args:
    room: of an episode, the tokens that may still be sampled.
    sees: whether the model is shown images.
    max_turns: where texts are kept between turns: none goes on from that of an episode's last one. None: none is kept.
  """

  def __init__(self, room: Callable[[Playing], int], sees: bool, max_turns: int | None = None):
    self._room, self._sees, self._max_turns = room, sees, max_turns
    self._of: list[list[Playing]] = []  # the episodes of each prompt that was asked for

  def ask(self, episodes: Sequence[Playing]) -> tuple[list[np.ndarray], dict[str, list]]:
    """(prompts, their attributes of a `Request`) for one more completion of each episode."""
    alike: dict[tuple[bytes, int, Any], list[Playing]] = {}
    for episode in episodes:
      alike.setdefault((episode.ids.tobytes(), self._room(episode), episode.images), []).append(episode)
    self._of += alike.values()
    firsts = [same[0] for same in alike.values()]
    samples = [list(dict.fromkeys(episode.sample for episode in same)) for same in alike.values()]
    options: dict[str, list] = {"samples": samples, "max_new_tokens": [room for _, room, _ in alike]}
    if self._max_turns is not None:
      options["keep"] = [episode.turns + 1 < self._max_turns for episode in firsts]
    if self._sees:
      options |= {"images": [list(e.images) for e in firsts], "prefixes": [e.prompt_length for e in firsts],
                  "sampled": [e.weights > 0 for e in firsts]}
    return [episode.ids for episode in firsts], options

  def of(self, completions: Sequence[Any]) -> list[tuple[Playing, Any]]:
    """Each completion with its episode; one may be of several."""
    return [(episode, completion) for completion in completions for episode in self._of[completion.prompt]
            if episode.sample == completion.sample]


class Answers:
  """What environments are asked in the first process, and all processes are told; at most so many at the same time."""

  def __init__(self, most: int):
    import jax
    self._calls = Together(most) if jax.process_index() == 0 else None

  def start(self, ask: Callable[[Playing], dict[str, Any]], episodes: Sequence[Playing]) -> None:
    """Begins to ask each episode's environment."""
    for episode in episodes if self._calls is not None else ():
      self._calls.start(episode.calls, functools.partial(ask, episode))

  def of(self, episodes: Sequence[Playing]) -> list[dict[str, Any]]:
    """Waits for what `ask` gives for each of these, or {"error": why not, "late": it took too long}."""
    from trainer.distributed import processes
    answers = None
    if self._calls is not None:
      answers = [_or_error(answer) for answer in self._calls.answers([episode.calls for episode in episodes])]
    return processes.from_first(answers)


class Interleaved:
  """The turns of episodes, each of which goes on as soon as it can.

  Args:
    asked, answers: see there.
    step: asks an episode's environment.
    said: tells an episode what its completion is.
    answered: lets episodes go on with what their environments answered, or end.
    episodes: all that go on.
    share: answers are waited for when so much of them has asked for one.
  """

  def __init__(self, asked: Asked, answers: Answers, step: Callable[[Playing], dict[str, Any]],
               said: Callable[[Playing, Any], None],
               answered: Callable[[Sequence[Playing], list[dict[str, Any]]], None], episodes: Sequence[Playing],
               share: float):
    self._asked, self._answers, self._step, self._said, self._answered = asked, answers, step, said, answered
    self._episodes, self._share = episodes, share
    self._stepping: list[Playing] = []

  def more(self, ended: Sequence[Any], idle: bool) -> tuple[list[np.ndarray], dict[str, list], int]:
    """Between two chunks of the sampler.

    Args:
      ended: completions since the last time.
      idle: there are no others.

    Returns:
      (prompts that come now, their attributes of a `Request`, episodes that may still come).
    """
    due, new = self._stepping, []
    for episode, completion in self._asked.of(ended):
      self._said(episode, completion)
      new.append(episode)
    self._answers.start(self._step, new)
    self._stepping = due + new
    if idle:
      due = self._stepping
    elif len(due) < self._share * sum(not episode.over for episode in self._episodes):
      return [], {}, len(self._stepping)
    self._stepping = self._stepping[len(due):]
    if due:
      self._answered(due, self._answers.of(due))
    on = [episode for episode in due if not episode.over]
    return *self._asked.ask(on), len(self._stepping)


def _or_error(answer: Answer) -> dict[str, Any]:
  e = answer.error
  if e is None:
    return answer.value
  if isinstance(e, TookTooLong):
    return {"error": str(e), "late": True}
  if not isinstance(e, FAILURES):
    raise e
  last = traceback.extract_tb(e.__traceback__)[-1]
  return {"error": f"{type(e).__name__}: {e} ({last.filename}:{last.lineno}, in {last.name})", "late": False}
