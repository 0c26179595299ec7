"""Prompts are run: at once, or behind what is kept of them, or in chunks between which others are decoded.

N prompts, T tokens of each that are run together; L layers with experts, of which each token goes through k.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from trainer.generate import image_tokens
from trainer.generate.buckets import bucket, power
from trainer.generate.kept import Kept
from trainer.generate.slots import MIN_LENGTH, MIN_SLOTS, Prefilled, Waiting


class Prefill:
  """Runs the prompts of the completions that wait.

  Args:
    program: `program(name, sizes=…)` gives a compiled function of trainer/generate/decoding.py.
    layout: what the model makes of images.
    waiting: what waits; says how many tokens of a prompt are run together at most.
    most_tokens: prompts are run together up to so many tokens, padding included.
    unit: how many prompts are run together is a multiple of it.
    kept: counts the tokens; None: nothing is kept.

  Attributes:
    params: the model's; may become others.
  """

  def __init__(self, program: Callable[..., Callable], layout: image_tokens.Layout | None, params: Any,
               waiting: Waiting, most_tokens: int, unit: int, kept: Kept | None):
    self._program, self._layout, self.params, self._waiting = program, layout, params, waiting
    self._most_tokens, self._unit, self._kept = most_tokens, unit, kept
    self._going: _InChunks | None = None

  def ready(self, count: int) -> bool:
    """Whether the prompts of the next completions, for `count` rows in all, were run; else runs their next chunk."""
    waiting = self._waiting
    if waiting.prefilled.prompts:
      return True
    if self._going is None:
      longest = waiting.next_length()
      chosen = waiting.to_prefill(count, max(1, self._most_tokens // max(waiting.next_slots(), longest)))
      if self._kept is not None:
        self._kept.reused += sum(map(waiting.kept_length, chosen))
        self._kept.run += sum(len(waiting.prompts[prompt]) - waiting.kept_length(prompt) for prompt in chosen)
      if not waiting.in_pieces(chosen[0]):
        waiting.prefilled = self._at_once(chosen, bucket(longest, MIN_LENGTH))
        return True
      self._going = _InChunks(self._program, waiting, chosen, power(len(chosen), self._unit), self._kept)
    waiting.prefilled = self._going.run(self.params)
    if waiting.prefilled.prompts:
      self._going = None
    return bool(waiting.prefilled.prompts)

  def _at_once(self, chosen: list[int], width: int) -> Prefilled:
    waiting, N = self._waiting, power(len(chosen), self._unit)
    tokens_NxT, lengths_N = np.zeros((N, width), np.int32), np.ones(N, np.int32)
    seen = image_tokens.empty(self._layout, N, width, waiting.most_images, waiting.frames)
    for n, prompt in enumerate(chosen):
      ids = waiting.prompts[prompt]
      tokens_NxT[n, :len(ids)], lengths_N[n] = ids, len(ids)
      image_tokens.put(self._layout, seen, waiting.shown[prompt], n)
    run = self._program("prefill", sizes=(N, width, waiting.most_images))
    last_NxD, begun, *experts_NxTxLxk = run(self.params, tokens_NxT, lengths_N, seen)
    experts = [part[n, :lengths_N[n]] for part in map(np.asarray, experts_NxTxLxk) for n in range(len(chosen))]
    return Prefilled(chosen, (N, width), last_NxD, begun, experts)


class _InChunks:
  """Prompts that go on behind what was run of them, if anything was."""

  def __init__(self, program: Callable[..., Callable], waiting: Waiting, chosen: list[int], N: int, kept: Kept | None):
    self._program, self._waiting, self._chosen = program, waiting, chosen
    self._slots = power(max(len(waiting.prompts[prompt]) for prompt in chosen), MIN_SLOTS)
    T = power(max(map(waiting.piece, chosen)), MIN_LENGTH)
    self._sizes = N, min(T, waiting.chunk) if waiting.chunk else T
    self._last_NxD, self._cache = program("room", sizes=(N, self._slots))()
    self._ends = [waiting.kept_length(prompt) for prompt in chosen]
    self._experts: list[list[np.ndarray]] = [[] for _ in chosen]
    for n, prompt in enumerate(chosen):
      if (text := waiting.kept[prompt]) is not None:
        join = program("join", sizes=(N, self._slots, text.slots))
        self._cache = join(self._cache, text.cache, np.array([n], np.int32), np.array([0], np.int32))
        self._experts[n] += [] if text.experts is None else [text.experts]
        waiting.kept[prompt] = None
        if kept is not None:
          kept.release(text)

  def run(self, params: Any) -> Prefilled:
    """Runs one more chunk of each prompt; what comes has no prompts while some are not at their ends."""
    N, T = self._sizes
    tokens_NxT, lengths_N = np.zeros((N, T), np.int32), np.zeros(N, np.int32)
    for n, (prompt, end) in enumerate(zip(self._chosen, self._ends, strict=True)):
      piece = self._waiting.prompts[prompt][end:end + T]
      tokens_NxT[n, :len(piece)], lengths_N[n] = piece, len(piece)
    extend = self._program("extend", sizes=(N, T, self._slots))
    self._last_NxD, self._cache, *experts = extend(params, self._cache, self._last_NxD, tokens_NxT, lengths_N)
    for part_NxTxLxk in map(np.asarray, experts):
      for n, parts in enumerate(self._experts):
        parts.append(part_NxTxLxk[n, :lengths_N[n]])
    self._ends = [end + int(length) for end, length in zip(self._ends, lengths_N[:len(self._ends)], strict=True)]
    if any(end < len(self._waiting.prompts[prompt]) for prompt, end in zip(self._chosen, self._ends, strict=True)):
      return Prefilled()
    return Prefilled(self._chosen, (N, self._slots), self._last_NxD, self._cache,
                     [np.concatenate(parts) for parts in self._experts if parts])
