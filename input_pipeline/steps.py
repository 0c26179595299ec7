"""Which rows a step takes: a closed form of the step, given the sizes of batches and since which step each holds.

A run may have had other sizes before it was stopped and started again. Its checkpoints hold these pieces of its past.
So each step, past or to come, takes the rows that follow on those of the step before: every row once an epoch, whatever
the sizes were.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from trainer.errors import ConfigError

ROWS, PROMPTS = "rows", "prompts"
MAX_STEPS = 2**31 - 1


class Piece(NamedTuple):
  """From `step` on, before which `rows` rows of `tokens` places were taken, each `every` steps take `size` rows.

  `parts`: of a batch, its micro-batches; of the prompts of a rollout, the updates of one pass over what became of them.
  `row_tokens`: places of a row; 0: they are not known before.
  """

  step: int
  rows: int
  size: int
  every: int = 1
  parts: int = 1
  tokens: int = 0
  row_tokens: int = 0

  @property
  def rate(self) -> tuple[int, ...]:
    return self.size, self.every, self.parts, self.row_tokens


class Past(NamedTuple):
  """What the steps before `step` have taken, as a checkpoint knows it: pieces, of ROWS or PROMPTS, and the places of
  all their rows. The pieces hold what was to come, too. Until `begin` it goes on as it was: to the end of a rollout
  that is trained on."""

  step: int
  begin: int
  of: str
  pieces: tuple[Piece, ...]
  tokens: int


class Steps:
  """The rows of each step of a run.

  Args:
    of: ROWS or PROMPTS.
    rates: [(from this step on, size, every, parts, row_tokens)] as the config says, the first from step 0.
    past: of the run that is gone on with; after it the rates hold. None: there is none.
  """

  def __init__(self, of: str, rates: Sequence[tuple[int, int, int, int, int]], past: Past | None = None):
    self.of = of
    self.pieces: list[Piece] = []
    begin = 0
    if past and past.of == of:
      begin = past.begin
      self.pieces = [piece for piece in past.pieces if piece.step < begin]
    elif past:  # what was taken then is nothing of what is taken now
      begin = past.step
      self.pieces = [Piece(0, 0, 0, tokens=past.tokens)]
    for number, (step, *rest) in enumerate(rates):
      until = rates[number + 1][0] if number + 1 < len(rates) else None
      if until is not None and until <= begin:
        continue
      step = max(step, begin)
      size, every, parts, row_tokens = rest
      if not self.pieces or self.pieces[-1].rate != tuple(rest):
        rows = self.rows_before(step) if self.pieces else 0
        tokens = self.tokens_before(step) if self.pieces else 0
        self.pieces.append(Piece(step, rows, size, every, parts, tokens, row_tokens))

  def at(self, step: int) -> Piece:
    """The piece that a step is in."""
    return self.pieces[int(np.searchsorted([piece.step for piece in self.pieces], step, "right")) - 1]

  def rows_before(self, step: int) -> int:
    """Rows that all steps before `step` take together; where several steps share some, as if each had its share."""
    piece = self.at(step)
    return piece.rows + (step - piece.step) * piece.size // piece.every

  def tokens_before(self, step: int) -> int:
    """Places of these rows."""
    piece = self.at(step)
    return piece.tokens + (self.rows_before(step) - piece.rows) * piece.row_tokens

  def range(self, step: int) -> tuple[int, int]:
    """(first row that `step` takes, how many it takes)."""
    first = self.rows_before(step)
    return first, self.rows_before(step + 1) - first

  def steps_for(self, rows: float) -> int:
    """The fewest first steps, of those that share rows all, that take at least `rows` rows."""
    piece = self.pieces[max(0, int(np.searchsorted([piece.rows for piece in self.pieces], rows, "left")) - 1)]
    return piece.step + max(0, int(-((piece.rows - rows) // max(piece.size, 1)))) * piece.every

  def saved(self, tokens: int) -> dict[str, Any]:
    """For a checkpoint (trainer/position.py), with the places of all rows that were taken."""
    return {"of": self.of, "pieces": [list(piece) for piece in self.pieces], "tokens": tokens}


def steps_of_batches(batch_size: int, grad_accum_steps: int, stages: Sequence, seq_len: int,
                     past: Past | None = None) -> Steps:
  """`batch_size` rows a step, until a stage of `input.batch_size_stages` changes it.

  Raises:
    ConfigError: steps that do not increase, or a size that is not a multiple of the micro-batch.
  """
  if batch_size < 1 or grad_accum_steps < 1 or batch_size % grad_accum_steps:
    raise ConfigError(f"batch_size={batch_size} must be a positive multiple of grad_accum_steps={grad_accum_steps}.")
  micro = batch_size // grad_accum_steps
  rates = [(0, batch_size, 1, grad_accum_steps, seq_len)]
  for entry in stages:
    try:
      step, size = entry
    except (TypeError, ValueError) as e:
      raise ConfigError(f"input.batch_size_stages: {entry!r} is not (step, batch_size).") from e
    if step <= rates[-1][0]:
      raise ConfigError(f"input.batch_size_stages: steps must increase from 1 on, found {step}.")
    if size < 1 or size % micro:
      raise ConfigError(
          f"input.batch_size_stages: {size} from step {step} on is not a multiple of the micro-batch of {micro} "
          f"rows (batch_size={batch_size} / grad_accum_steps={grad_accum_steps}).")
    rates.append((step, size, 1, size // micro, seq_len))
  return Steps(ROWS, rates, past)


def steps_of_rollouts(num_prompts: int, updates: int, epochs: int, past: Past | None = None) -> Steps:
  """`num_prompts` prompts for every `updates` × `epochs` steps."""
  return Steps(PROMPTS, [(0, num_prompts, updates * epochs, updates, 0)], past)
