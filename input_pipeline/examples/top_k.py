"""What a teacher has said of the tokens of a row, in columns of it: its most probable entries with their log-probs.

    teacher_ids        for each of `input_ids` a list of ids, in any order; null or empty where nothing is trained
    teacher_logprobs   for each a list as long, of their log-probs in nats, at temperature 1

Both stand at the token that they are about, as labels do: entry t is what the teacher, having read the tokens before t,
expected at t. So servers give them (`prompt_logprobs` of vLLM).

N tokens of a row, K entries kept of each, E entries given for all that are trained.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from input_pipeline.sources.readers import Record
from trainer.errors import DataError

# What `strategy.teacher` is where rows have these columns.
ROWS = "rows"
COLUMNS = ("teacher_ids", "teacher_logprobs")
# Raise when the same rows would give other values.
VERSION = 1
# By how much probabilities may add up to more than 1: log-probs are rounded, to bfloat16 or to a few digits.
TOLERANCE = 0.01
# The least that is left for all entries that are not kept. A sum of float32 probabilities cannot tell it from nothing;
# with nothing the reverse KL would be infinite.
LEAST = 2.0**-24
# The log-prob of what cannot be; finite, so that its product with a probability of 0 is 0.
NEVER = -1e30
# Stands for an id where fewer than K are given; in no vocabulary.
NOBODY = 2**31 - 1


class TopK(NamedTuple):
  """Of each token the K most probable entries, the first first, int32 [N, K], and the log-probs of these and of all
  others together, float32 [N, K + 1]; zeros where nothing is trained."""

  ids: np.ndarray
  logprobs: np.ndarray


class TopKReader:
  """Reads the columns of rows.

  The k most probable entries that a row gives are kept; further ones count to the rest, of which the mass
  alone is known, 1 - Σ exp(log-prob). Where fewer than k are given, the others have no probability.

  Args:
    k: entries kept of each token, at most `vocab_size`.
    vocab_size: ids are below it.
    name: what a column is called in rows.
  """

  def __init__(self, k: int, vocab_size: int, name: Callable[[str], str]):
    self.k, self._vocab_size, self._name = k, vocab_size, name

  def read(self, record: Record, trained_N: np.ndarray) -> TopK:
    """Of a row in which these tokens are trained.

    Raises:
      DataError: names the record, the column, the token, and what was found.
    """
    at = np.flatnonzero(trained_N)
    ids, logprobs = ([column[t] for t in at.tolist()] for column in self._columns(record, len(trained_N)))
    sizes = [self._check_lists(record, t, *lists) for t, *lists in zip(at.tolist(), ids, logprobs, strict=True)]
    token_E = np.repeat(np.arange(len(at)), sizes)
    ids_E, logprobs_E = (self._numbers(record, key, lists, types, at, token_E) for key, lists, types in zip(
        COLUMNS, (ids, logprobs), ((int,), (int, float)), strict=True))
    self._refuse(record, at, token_E, 0, ids_E, (ids_E < 0) | (ids_E >= self._vocab_size),
                 f"which is not in the tokenizer's vocabulary of {self._vocab_size}. Teacher and student have the same "
                 "tokenizer")
    self._refuse(record, at, token_E, 1, logprobs_E, ~((logprobs_E <= 0) & np.isfinite(logprobs_E)),
                 "expected a finite log-prob in nats, at most 0")
    by_id = np.lexsort((ids_E, token_E))
    twice = np.zeros(len(ids_E), bool)
    twice[by_id[1:]] = (np.diff(ids_E[by_id]) == 0) & (np.diff(token_E[by_id]) == 0)
    self._refuse(record, at, token_E, 0, ids_E, twice, "a second time; each entry stands once")
    mass = np.bincount(token_E, np.exp(logprobs_E), minlength=len(at))
    if (beyond := np.flatnonzero(mass > 1 + TOLERANCE)).size:
      t = int(beyond[0])
      raise DataError(f"{record.where}: the probabilities of {self._name(COLUMNS[1])}[{at[t]}] add up to "
                      f"{mass[t]:.4g}; they are log-probs of a distribution over all tokens, at most 1 together.")
    return self._best(len(trained_N), at, token_E, ids_E, logprobs_E)

  def _best(self, size: int, at: np.ndarray, token_E: np.ndarray, ids_E: np.ndarray, logprobs_E: np.ndarray) -> TopK:
    """The k most probable of each token, the first of equal ones first, and the rest."""
    order = np.lexsort((-logprobs_E, token_E))
    counts = np.bincount(token_E, minlength=len(at))
    rank_E = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = rank_E < self.k
    row, column, entry = token_E[order][kept], rank_E[kept], order[kept]
    ids = np.full((len(at), self.k), NOBODY, np.int32)
    logprobs = np.full((len(at), self.k + 1), NEVER)
    ids[row, column], logprobs[row, column] = ids_E[entry], logprobs_E[entry]
    mass = np.exp(logprobs[:, :-1]).sum(1)
    rest = np.where(np.minimum(counts, self.k) == self._vocab_size, 0.0, np.maximum(1 - mass, LEAST))
    logprobs[:, -1] = np.where(rest > 0, np.log(np.where(rest > 0, rest, 1)), NEVER)
    logprobs -= np.log(mass + rest)[:, None]  # where they were rounded to more than 1
    found = TopK(np.zeros((size, self.k), np.int32), np.zeros((size, self.k + 1), np.float32))
    found.ids[at], found.logprobs[at] = ids, logprobs
    return found

  def _columns(self, record: Record, size: int) -> list[Sequence]:
    """Both, with an entry for each token."""
    found: list[Sequence] = []
    for key in map(self._name, COLUMNS):
      value = record.fields.get(key)
      if value is None:
        raise DataError(f"{record.where}: no {key!r} (or null), and strategy.teacher is {ROWS!r}. Rows then bring what "
                        f"a teacher has said, {COLUMNS[0]} and {COLUMNS[1]} (docs/sft.md); or name a model as teacher.")
      if not isinstance(value, (list, tuple)) or len(value) != size:
        what = f"has {len(value)} entries" if isinstance(value, (list, tuple)) else f"is {value!r:.60}"
        raise DataError(f"{record.where}: {key} {what}, but there are {size} tokens ({self._name('input_ids')}); "
                        "expected a list for each, null where nothing is trained.")
      found.append(value)
    return found

  def _check_lists(self, record: Record, t: int, ids: Any, logprobs: Any) -> int:
    """How many entries token t, which is trained, has."""
    for key, value in zip(COLUMNS, (ids, logprobs), strict=True):
      if not isinstance(value, (list, tuple)) or not value:
        raise DataError(f"{record.where}: {self._name(key)}[{t}] is {value!r:.60}, but this token is trained; expected "
                        "a list of the teacher's most probable entries. Give it, or the token a label of -100.")
    if len(ids) != len(logprobs):
      raise DataError(f"{record.where}: {self._name(COLUMNS[0])}[{t}] has {len(ids)} entries, "
                      f"{self._name(COLUMNS[1])}[{t}] has {len(logprobs)}; expected one log-prob for each.")
    return len(ids)

  def _numbers(self, record: Record, key: str, lists: list, types: tuple[type, ...], at: np.ndarray,
               token_E: np.ndarray) -> np.ndarray:
    """The entries of all tokens, one after another."""
    flat = list(itertools.chain.from_iterable(lists))
    bad = next((i for i, value in enumerate(flat) if not isinstance(value, types) or isinstance(value, bool) or
                isinstance(value, int) and abs(value) >= 1 << 63), None)
    if bad is not None:
      raise DataError(f"{record.where}: {self._name(key)}[{at[token_E[bad]]}] has {flat[bad]!r:.60}; expected "
                      f"{'numbers' if float in types else 'whole numbers'}.")
    return np.array(flat, np.float64 if float in types else np.int64)

  def _refuse(self, record: Record, at: np.ndarray, token_E: np.ndarray, column: int, values_E: np.ndarray,
              bad_E: np.ndarray, why: str) -> None:
    if bad_E.any():
      i = int(np.flatnonzero(bad_E)[0])
      raise DataError(f"{record.where}: {self._name(COLUMNS[column])}[{at[token_E[i]]}] has {values_E[i]}, {why}.")
