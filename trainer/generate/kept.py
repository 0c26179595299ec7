"""What is kept of texts that may go on: the next turn of a conversation then costs what is new in it.

A text is found by its ids, which a prompt begins with, and by its images: what was sampled stays as it is, turn after
turn, so that a conversation's next prompt begins with all that was sampled before. A prompt that has a beginning in
common with a text, a system prompt or examples, goes on from there, where the cache still holds it: of layers that
see all, not of states, nor of windows that were left.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
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
    beginnings: whether its cache holds each of its beginnings.
    of: the text of which it is a beginning, with the same arrays; None: it is whole.
  """

  ids: np.ndarray
  shown: bytes
  cache: Any
  slots: int
  experts: np.ndarray | None = None
  beginnings: bool = False
  of: "KeptText | None" = None


@dataclass(eq=False)
class Held:
  """Rows whose texts were left off: in the next request they go on where they are, and nothing is run again.

  Keys and values of what was run stay as they were computed, by older parameters as well. A text is known again by what
  decides its draws, by how many tokens it has, and by its limit.

  Attributes:
    state, rows: of the sampler, `trainer.generate.decoding.State` and `trainer.generate.slots.Rows`; None: no row is
      held.
    names: {what a text is known by: its row}.
  """

  state: Any = None
  rows: Any = None
  names: dict[tuple[bytes, int, int], int] = field(default_factory=dict)

  def put(self, state: Any, rows: Any, names: dict[tuple[bytes, int, int], int]) -> None:
    """Holds these rows, which the request leaves off."""
    self.state, self.rows, self.names = state, rows, names

  def clear(self) -> None:
    """Lets them go."""
    self.put(None, None, {})


class Kept:
  """Texts that are kept, all of them run with the same parameters.

  Args:
    most: how many at most, those included that prompts go on from that still wait; the one that was used longest ago
      gives its place to a new one, and is run again if its text goes on.
    once: no two prompts go on from the same whole text, so that one that was found is not kept any longer.
    cut: texts that reached their limit may go on, too.
    least: tokens that a prompt has in common with the beginning of a text, at least, to go on from there. None: prompts
      go on from whole texts alone, so that what a text is run with does not depend on which others were there before.

  Attributes:
    run, reused: tokens of prompts that were run, and that were not since they were kept.
    shared: of the latter, those of beginnings.
    given_up: texts that were kept and had to give their places to others, or that found none.
  """

  def __init__(self, most: int, once: bool = False, cut: bool = False, least: int | None = None):
    self._most, self._once, self._cut, self._least = most, once, cut, least
    self._texts: list[KeptText] = []  # the one used last at the end
    self._lent: list[KeptText] = []  # those that prompts wait to go on from, once for each prompt
    self.run = self.reused = self.shared = self.given_up = 0

  def find(self, ids: np.ndarray, shown: bytes, beginning: Callable[[Any, int], Any] = lambda cache, _: cache
           ) -> KeptText | None:
    """The longest text, or beginning of one, that these ids begin with and that is not all of them, or None. It has its
    place until it is released.

    Args:
      ids, shown: of the prompt, see `KeptText`.
      beginning: `model.beginning_of_cache`.
    """
    length, whole, found = 0, False, None
    for text in self._texts:
      if text.shown == shown:
        n = in_common(text.ids, ids[:-1])
        of_all = n == len(text.ids)
        usable = of_all or self._least is not None and text.beginnings and n >= self._least
        if usable and (n, of_all) > (length, whole):
          length, whole, found = n, of_all, text
    if found is None:
      return None
    self._texts.remove(found)
    self._lent.append(found)
    if not (self._once and whole):
      self._texts.append(found)
    if whole:
      return found
    self.shared += length
    experts = None if found.experts is None else found.experts[:length]
    return KeptText(found.ids[:length], shown, beginning(found.cache, length), found.slots, experts, of=found)

  def takes(self, finish_reason: str) -> bool:
    """Whether a text that ended so is kept, if need be in place of another; counts one for which there is no place."""
    if finish_reason != "stop" and not self._cut:
      return False
    while self._count() >= self._most and self._texts:
      self.given_up += 1
      del self._texts[0]
    if self._count() < self._most:
      return True
    self.given_up += 1
    return False

  def add(self, text: KeptText) -> None:
    """Keeps a text, for which there is a place."""
    self._texts.append(text)

  def begin(self) -> None:
    """No prompt waits: those before were run, or left off."""
    self._lent.clear()

  def release(self, text: KeptText) -> None:
    """A prompt has gone on from this text, which `find` gave; or from a beginning of its request (beginnings.py), which
    has no place."""
    if (text.of or text) in self._lent:
      self._lent.remove(text.of or text)

  def clear(self) -> None:
    """Forgets all texts: the parameters are others now."""
    self._texts.clear()

  def _count(self) -> int:
    return len({id(text) for text in (*self._texts, *self._lent)})


def in_common(one: np.ndarray, other: np.ndarray) -> int:
  """How many tokens both begin with."""
  n = min(len(one), len(other))
  differ = np.flatnonzero(one[:n] != other[:n])
  return int(differ[0]) if len(differ) else n
