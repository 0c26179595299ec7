"""Strings that end a completion: found while it is sampled, across borders of tokens, and cut from its text or kept.

    stop = StopStrings(tokenizer, ("</answer>", "\\n\\n"))
    completions = sampler.generate(params, prompts, …, stop=stop)
    texts = [stop.text(completion) for completion in completions]

A completion ends with the first token by which its text has one of the strings; they are looked for in bytes, in all
that was sampled and in nothing before it, special tokens written out. Its tokens stay as they were sampled, that one
included. Its text ends where the first string begins, or with its end: that which is complete first, of several that
end there the longest.

An automaton (Aho and Corasick 1975) reads the bytes. Its state is how much of a string the text ends with; what a
whole token does to each state is a table, in which the device that draws the tokens looks: no text waits for the host.

S states, C classes of tokens that do the same to every state, V vocabulary.
"""

import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from input_pipeline.tokenizer.tokenizer import Tokenizer
from trainer.errors import ConfigError
from trainer.generate.buckets import power


class Automaton(NamedTuple):
  """What tokens do to the state of a text, which begins with 0."""

  # Of each id, and of all beyond the last; int32.
  classes_V: np.ndarray
  # The next state, int32; from `found` on, `found` + the number of the string that is complete.
  moves_SxC: np.ndarray
  found: int

  def after(self, ids: np.ndarray) -> int:
    """The state of a text of these ids, in which nothing is complete."""
    state = 0
    for kind in self.classes_V[np.minimum(ids, len(self.classes_V) - 1)].tolist():
      state = int(self.moves_SxC[state, kind])
    return state


# Nothing is ever found.
NOTHING = Automaton(np.zeros(1, np.int32), np.zeros((8, 8), np.int32), 8)


def check(strings: Any, where: str) -> None:
  """Raises ConfigError unless they are strings that a text can have; `where` is the key's name."""
  if isinstance(strings, str) or not all(isinstance(s, str) and s for s in strings):
    raise ConfigError(f"{where}: found {strings!r}, allowed: several strings of at least one character, for instance "
                      '("</answer>",) or ("\\n\\n", "Question:").')
  for string in strings:
    try:
      string.encode()
    except UnicodeEncodeError as e:
      raise ConfigError(f"{where}: {string!r} has half a character ({e.reason}), which no text has.") from e


def columns(finish_reason: str, stop_reason: str | None) -> dict[str, str]:
  """Why a completion ended, for a line of a table; `stop_reason` is there where a string ended it."""
  return {"finish_reason": finish_reason} | ({} if stop_reason is None else {"stop_reason": stop_reason})


def ending(row: Mapping[str, Any]) -> str:
  """The same for people."""
  return f"{row['finish_reason']} at {row['stop_reason']!r}" if "stop_reason" in row else row["finish_reason"]


class StopStrings:
  """The strings that end completions, and the texts that these have.

  Args:
    strings: may be none; then a text is that of all tokens but the one that ended it.
    keep: leave the string in the text.
    where: the name of their key, for messages.

  Raises:
    ConfigError: see `check`.
  """

  def __init__(self, tokenizer: Tokenizer, strings: Sequence[str] = (), keep: bool = False, where: str = "stop"):
    check(strings, where)
    self.strings, self._keep, self._tokenizer = tuple(dict.fromkeys(strings)), keep, tokenizer
    self._longest = max((len(string.encode()) for string in self.strings), default=0)

  @property
  def options(self) -> dict[str, Any]:
    """The argument of `Sampler.generate`, if there is any string."""
    return {"stop": self} if self.strings else {}

  # ---------------------------------------------------------------- texts

  def text(self, completion: Any, skip_special: bool = True) -> str:
    """The text of a `Completion`, without its end, or with it where that is a string that is kept."""
    if completion.stop_reason is None:
      return self._tokenizer.decode(completion.text_ids, skip_special=skip_special)
    ids, string = completion.ids.tolist(), completion.stop_reason.encode()
    beyond = self._read(ids)[1]  # bytes behind the string, in the last token
    return self._without(ids, beyond if self._keep else beyond + len(string), skip_special)

  def certain(self, ids: Iterable[int]) -> str:
    """The text of the beginning of a completion, without what may turn out to be a string that is cut."""
    ids = [int(number) for number in ids]
    if self._keep or not self.strings:
      return self._tokenizer.decode(ids)
    return self._without(ids, self._depths[self._read(ids)[0]], True)

  def _read(self, ids: Sequence[int]) -> tuple[int, int]:
    """(the state behind these ids, or `found` and the number of the string that their last token completes; the bytes
    of that token behind it)."""
    pieces, begin = [self._piece(number) for number in ids[-1:]], len(ids) - 1
    while begin > 0 and sum(map(len, pieces[1:])) < self._longest:  # no state depends on more
      begin -= 1
      pieces.append(self._piece(ids[begin]))
    state = 0
    for piece in reversed(pieces):
      for at, byte in enumerate(piece, 1):
        state = int(self._steps[state, byte])
        if state >= len(self._depths):
          return state, len(piece) - at
    return state, 0

  def _piece(self, number: int) -> bytes:
    pieces = self._tokenizer.token_bytes
    return pieces[number] if number < len(pieces) else b""  # a model may have more ids than its tokenizer

  def _without(self, ids: list[int], count: int, skip_special: bool) -> str:
    """The text of these ids without its last `count` bytes, special tokens written out."""
    while count and count >= len(self._piece(ids[-1])):
      count -= len(self._piece(ids.pop()))
    text = self._tokenizer.decode(ids, skip_special=skip_special)
    if not count:
      return text
    # Of its last token a text may show less than the bytes: nothing of a special token, no space where it begins.
    before, piece = self._tokenizer.decode(ids[:-1], skip_special=skip_special), self._piece(ids[-1])
    head, tail = (part.decode(errors="replace") for part in (piece[:-count], piece[-count:]))
    if text.endswith(tail) and len(text) - len(tail) >= len(before):
      return text[:-len(tail)]
    return before if text == before else os.path.commonprefix([text, before + head.lstrip()])

  # ---------------------------------------------------------------- the automaton

  @cached_property
  def automaton(self) -> Automaton:
    """What the sampler needs; sizes are rounded up, so that few programs are compiled."""
    if not self.strings:
      return NOTHING
    states = len(self._depths)
    pieces = (*self._tokenizer.token_bytes, b"")  # ids beyond the last say nothing
    lengths = np.array([len(piece) for piece in pieces])
    order = np.argsort(-lengths, kind="stable")
    bytes_VxL = np.zeros((len(pieces), lengths.max()), np.uint8)
    for row, number in enumerate(order.tolist()):
      bytes_VxL[row, :lengths[number]] = np.frombuffer(pieces[number], np.uint8)
    moved_VxS = np.tile(np.arange(states, dtype=np.int32), (len(pieces), 1))
    for column in range(bytes_VxL.shape[1]):
      rows = int((lengths > column).sum())
      moved_VxS[:rows] = self._steps[moved_VxS[:rows], bytes_VxL[:rows, column, None]]
    kinds_CxS, class_of = np.unique(moved_VxS, axis=0, return_inverse=True)
    found = power(states, NOTHING.found)
    moves_SxC = np.zeros((found, power(len(kinds_CxS), NOTHING.found)), np.int32)
    moves_SxC[:states, :len(kinds_CxS)] = np.where(kinds_CxS < states, kinds_CxS, kinds_CxS - states + found).T
    classes_V = np.zeros(len(pieces), np.int32)
    classes_V[order] = class_of.reshape(-1)
    return Automaton(classes_V, moves_SxC, found)

  @property
  def _depths(self) -> list[int]:
    """Of each state, the bytes of a string that the text ends with."""
    return self._built[0]

  @property
  def _steps(self) -> np.ndarray:
    """The state after a byte in a state, int32 [states + strings, 256]; of what is found, it stays."""
    return self._built[1]

  @cached_property
  def _built(self) -> tuple[list[int], np.ndarray]:
    children: list[dict[int, int]] = [{}]
    depths, ends = [0], [-1]  # of each state, the longest string that ends with it
    for number, string in enumerate(self.strings):
      state = 0
      for byte in string.encode():
        if byte not in children[state]:
          children[state][byte] = len(children)
          children.append({})
          depths.append(depths[state] + 1)
          ends.append(-1)
        state = children[state][byte]
      ends[state] = number
    steps = np.zeros((len(children), 256), np.int32)
    shorter, waiting = [0] * len(children), deque([0])  # the state of the longest other end that is a beginning, too
    while waiting:
      state = waiting.popleft()
      if ends[state] < 0:
        ends[state] = ends[shorter[state]]
      steps[state] = steps[shorter[state]] if state else 0
      for byte, child in children[state].items():
        shorter[child] = int(steps[state, byte])
        steps[state, byte] = child
        waiting.append(child)
    complete = np.array(ends)
    steps = np.where(complete[steps] >= 0, len(children) + complete[steps], steps)
    stays = np.repeat(len(children) + np.arange(len(self.strings)), 256).reshape(-1, 256)
    return depths, np.concatenate([steps, stays]).astype(np.int32)
