"""Mixtures: which source, and which of its rows, is row k of the whole run. A closed form of k.

Rows are dealt by a balanced binary tree over the sources: a node that has dealt n rows has sent
floor(n P / 2^30 + 1/2) of them to its left side, P / 2^30 being that side's share. So the rows dealt to a source
before row k are known without dealing, and at every k they differ from its weight's share of k by at most half
the depth of the tree, besides the rounding of shares to multiples of 2^-30.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from trainer.errors import ConfigError

SHARE_BITS = 30
# No run is longer: searches for a row stop here.
MAX_ROWS = 1 << 50
# Beyond it, sums of weights would not be finite, or shares would lose their digits.
MAX_WEIGHT = 1e15


class Node(NamedTuple):
  """Sources [first, last) of a stage; with one source, a leaf. `share` of 2^SHARE_BITS goes left."""

  first: int
  last: int
  middle: int = 0
  share: int = 0
  left: "Node | None" = None
  right: "Node | None" = None


def make_tree(weights: np.ndarray, first: int = 0, last: int | None = None) -> Node:
  """The dealing tree over sources first to last, split where the two sides' numbers are even."""
  last = len(weights) if last is None else last
  if last - first == 1:
    return Node(first, last)
  middle = (first + last) // 2
  left, right = math.fsum(weights[first:middle]), math.fsum(weights[middle:last])
  whole = 1 << SHARE_BITS
  share = round(whole * left / (left + right)) if left + right else 0
  if left and right:  # a small weight is still some weight
    share = min(max(share, 1), whole - 1)
  return Node(first, last, middle, share, make_tree(weights, first, middle), make_tree(weights, middle, last))


def sent_left(n: np.ndarray, share: int) -> np.ndarray:
  """floor(n share / 2^SHARE_BITS + 1/2), exact for int64 n."""
  high, low = n >> SHARE_BITS, n & ((1 << SHARE_BITS) - 1)
  return high * share + ((low * share + (1 << (SHARE_BITS - 1))) >> SHARE_BITS)


def dealt(node: Node, n: int) -> list[int]:
  """Rows that each of the node's sources has got when the node has dealt n."""
  if node.left is None:
    return [n]
  left = int(sent_left(np.int64(n), node.share))
  return dealt(node.left, left) + dealt(node.right, n - left)


def deal(node: Node, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """(source, how many rows it got before) of the node's n-th rows, both int64 like n."""
  if node.left is None:
    return np.full(len(n), node.first), n
  before = sent_left(n, node.share)
  goes_left = sent_left(n + 1, node.share) > before
  source, draw = np.empty_like(n), np.empty_like(n)
  source[goes_left], draw[goes_left] = deal(node.left, before[goes_left])
  source[~goes_left], draw[~goes_left] = deal(node.right, (n - before)[~goes_left])
  return source, draw


class Mixture:
  """Deals rows to sources; weights are constant between `starts`.

  Args:
    starts: first row of each stage, increasing, the first 0.
    weights: float [stages, sources], each row with a positive sum.
    rows: rows in one epoch of each source.
    stop: first: the data end when some source has been seen once; all: when each has; never.
    names: the sources', for messages.

  Raises:
    ConfigError: weights that cannot be dealt by, or `stop='all'` with a source that is never seen whole.
  """

  def __init__(self, starts: Sequence[int], weights: np.ndarray, rows: Sequence[int], stop: str, names: Sequence[str]):
    self._starts, self.rows, self.names = np.array(starts, np.int64), np.array(rows, np.int64), tuple(names)
    self._trees = [make_tree(w) for w in weights]
    bases = [np.zeros(len(names), np.int64)]
    for i, length in enumerate(np.diff(self._starts)):
      bases.append(bases[-1] + dealt(self._trees[i], int(length)))
    self._bases = np.array(bases)
    self.num_rows = self._num_rows(stop)

  def draws(self, k: int) -> np.ndarray:
    """How many of the first k rows came from each source, int64 [sources]."""
    stage = int(np.searchsorted(self._starts, k, "right")) - 1
    return self._bases[stage] + dealt(self._trees[stage], k - int(self._starts[stage]))

  def locate(self, k: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(source, its epoch, row within the epoch) of rows k, all int64."""
    k = np.asarray(k, np.int64)
    source, draw = np.empty_like(k), np.empty_like(k)
    stages = np.searchsorted(self._starts, k, "right") - 1
    for stage in np.unique(stages):
      here = stages == stage
      source[here], drawn = deal(self._trees[stage], k[here] - self._starts[stage])
      draw[here] = drawn + self._bases[stage][source[here]]
    return source, draw // self.rows[source], draw % self.rows[source]

  def _num_rows(self, stop: str) -> int | None:
    if stop == "never":
      return None
    ends = {name: self._seen_once(i) for i, name in enumerate(self.names)}
    if stop == "first":
      return min(end for end in ends.values() if end is not None)
    unseen = [name for name, end in ends.items() if end is None]
    if unseen:
      raise ConfigError(
          f"input.stop='all', but source {unseen[0]!r} is never seen whole: its weight ends at 0. "
          "Give it a weight in the last of input.weight_stages, or set input.stop to 'first' or 'never'."
      )
    return max(ends.values())

  def _seen_once(self, source: int) -> int | None:
    """The smallest k whose first k rows hold one epoch of the source; None if there is none."""
    wanted = int(self.rows[source])
    if self.draws(MAX_ROWS)[source] < wanted:
      return None
    low, high = 0, MAX_ROWS  # draws(low) < wanted <= draws(high)
    while high - low > 1:
      middle = (low + high) // 2
      low, high = (low, middle) if self.draws(middle)[source] >= wanted else (middle, high)
    return high


def stage_weights(base: Mapping[str, float], stages: Sequence) -> tuple[list[int], list[dict[str, float]]]:
  """(first step, weight of every source) of each stage; a source left out of a stage keeps its weight.

  Args:
    base: each source's own weight.
    stages: `input.weight_stages`, ((step, {source: weight, …}), …).

  Raises:
    ConfigError: unknown sources, steps that do not increase, weights that are negative or all zero.
  """
  steps, weights = [0], [dict(base)]
  for entry in stages:
    try:
      step, changed = entry
      changed = dict(changed.items())
    except (TypeError, ValueError, AttributeError) as e:
      raise ConfigError(f"input.weight_stages: {entry!r} is not (step, {{source: weight, …}}).") from e
    unknown = sorted(set(changed) - set(base))
    if unknown:
      raise ConfigError(
          f"input.weight_stages at step {step}: unknown source {unknown[0]!r}; input.sources has "
          f"{', '.join(map(repr, sorted(base)))}."
      )
    if step == 0 and steps == [0]:
      weights[0].update(changed)
      continue
    if isinstance(step, bool) or not isinstance(step, int) or step <= steps[-1]:
      raise ConfigError(f"input.weight_stages: steps must be increasing integers from 0 on, found {step!r}.")
    steps.append(step)
    weights.append({**weights[-1], **changed})
  for step, of_stage in zip(steps, weights, strict=True):
    bad = [name for name, w in of_stage.items() if not (isinstance(w, (int, float)) and 0 <= w <= MAX_WEIGHT)]
    if bad:
      raise ConfigError(f"weight of source {bad[0]!r} from step {step} on is {of_stage[bad[0]]!r:.80}; it must be "
                        f">= 0, and at most {MAX_WEIGHT:g}.")
    if not any(of_stage.values()):
      raise ConfigError(f"from step {step} on all source weights are 0: there is nothing to train on.")
  return steps, weights
