"""What is kept of texts that may go on: the next turn of a conversation then costs what is new in it.

A text is found by its ids, which a prompt begins with, and by its images: what was sampled stays as it is, turn after
turn, so that a conversation's next prompt begins with all that was sampled before.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(eq=False)
class KeptText:
  """A text whose tokens were run.

  Attributes:
    ids: of these tokens, int32 [n].
    shown: `trainer.generate.image_tokens.PromptImages.digest` of its images.
    cache: of the model, with one row, and room for so many tokens (`slots`).
    experts: int16 [n, L, k], those that the tokens went through; None: not recorded.
  """

  ids: np.ndarray
  shown: bytes
  cache: Any
  slots: int
  experts: np.ndarray | None = None


class Kept:
  """Texts that are kept, all of them run with the same parameters.

  Args:
    most: how many at most, those included that prompts go on from that still wait; the one that was used longest ago
      gives its place to a new one, and is run again if its text goes on.
    once: no two prompts go on from the same text, so that one that was found is not kept any longer.
    cut: texts that reached their limit may go on, too.

  Attributes:
    run, reused: tokens of prompts that were run, and that were not since they were kept.
    given_up: texts that were kept and had to give their places to others, or that found none.
  """

  def __init__(self, most: int, once: bool = False, cut: bool = False):
    self._most, self._once, self._cut = most, once, cut
    self._texts: list[KeptText] = []  # the one used last at the end
    self._alive: weakref.WeakSet[KeptText] = weakref.WeakSet()
    self.run = self.reused = self.given_up = 0

  def find(self, ids: np.ndarray, shown: bytes) -> KeptText | None:
    """The longest text that these ids begin with, and that is not all of them; None: there is none."""
    found = None
    for text in self._texts:
      n = len(text.ids)
      if (n < len(ids) and (found is None or n > len(found.ids)) and text.ids[-1] == ids[n - 1] and text.shown == shown
          and np.array_equal(text.ids, ids[:n])):
        found = text
    if found is not None:
      self._texts.remove(found)
      if not self._once:
        self._texts.append(found)
    return found

  def takes(self, finish_reason: str) -> bool:
    """Whether a text that ended so is kept, if need be in place of another; counts one for which there is no place."""
    if finish_reason != "stop" and not self._cut:
      return False
    while len(self._alive) >= self._most and self._texts:
      self.given_up += 1
      del self._texts[0]
    if len(self._alive) < self._most:
      return True
    self.given_up += 1
    return False

  def add(self, text: KeptText) -> None:
    """Keeps a text, for which there is a place."""
    self._texts.append(text)
    self._alive.add(text)

  def clear(self) -> None:
    """Forgets all texts: the parameters are others now."""
    self._texts.clear()
