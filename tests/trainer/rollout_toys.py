"""Rewards, an environment and callbacks for runs with rollouts, named in their configs by dotted path."""

import json
import os
import time
from pathlib import Path

from trainer.rollouts.environment import Turn


def low(completions, completion_ids, **columns):
  """More for smaller ids: it differs between nearly all completions."""
  return [1.0 - sum(ids) / 256 / len(ids) for ids in completion_ids]


def same(completions, **columns):
  return [0.5] * len(completions)


def some(completions, completion_ids, number, **columns):
  """As `low`; None for every other completion, and an error for prompts whose number is even."""
  if number[0] % 2 == 0:
    raise ValueError("no judge today")
  return [None if i % 2 else score for i, score in enumerate(low(completions, completion_ids))]


def never(completions, **columns):
  raise RuntimeError("out of order")


_ASKED = []


def from_prompt_8_on(completions, completion_ids, number, how="", **columns):
  """As `low` for the first 8 groups of this process's run, then equal rewards or none."""
  if how not in _ASKED:
    _ASKED[:] = [how]
  _ASKED.append(number)
  if len(_ASKED) <= 9:
    return low(completions, completion_ids)
  if how == "fail":
    return never(completions)
  return same(completions)


def two_kinds(completions, completion_ids, number, **columns):
  """Equal rewards for prompts with an even number, others for the rest."""
  return same(completions) if number[0] % 2 == 0 else low(completions, completion_ids)


def some_pass(completions, number, **columns):
  """1 for the first `number % 5` completions, 0 for the others."""
  return [float(i < number[0] % 5) for i in range(len(completions))]


def noting(completions, completion_ids, number, file="", **columns):
  """As `low`; notes which process was asked."""
  if file:
    with Path(file).open("a") as f:
      f.write(json.dumps([os.environ.get("JAX_PROCESS_ID"), number[0]]) + "\n")
  return low(completions, completion_ids)


def shout(text: str) -> str:
  """Says it aloud.

  Args:
    text: what to say.
  """
  return text.upper()


class Echo:
  """Says how long the answer was, twice, and rewards short ones."""

  def reset(self, prompt, /, **columns):
    self.turns = 0

  def step(self, completion):
    self.turns += 1
    return Turn(f" [{len(completion)}] ", -float(len(completion)), done=self.turns == 3)


class Slow(Echo):
  """Takes a little while to begin, and for ever where the prompt is number 1."""

  def reset(self, prompt, /, number=0, **columns):
    super().reset(prompt)
    time.sleep(0.05 if number != 1 else 1e6)


class SlowToAnswer(Echo):
  """Takes for ever to answer what has an odd number of characters."""

  def step(self, completion):
    while len(completion) % 2:
      time.sleep(0.01)
    return super().step(completion)


class StopInRollout:
  """Asks for a stop while the rollout that follows `step` is sampled, when so many parts of completions are there."""

  def __init__(self, step, after=3):
    self._step, self._after = step, after

  def on_step_begin(self, run):
    if run.step == self._step:
      sampler = run.data.producer.sampler
      stream, left = sampler.stream, [self._after]

      def counting(*args, **options):
        for part in stream(*args, **options):
          left[0] -= 1
          if not left[0]:
            run.stop_requested = "the test"
          yield part

      sampler.stream = counting

  def __getattr__(self, hook):
    return lambda *args: None
