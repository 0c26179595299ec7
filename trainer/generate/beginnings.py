"""What prompts of one request have in common at their beginnings, a system prompt or examples: it is run once.

Each prompt goes on from one beginning at most. Which, follows from the prompts alone, so that a rollout that is sampled
again is the same, to the bit. As with texts that are run in chunks, what is computed at once has other shapes than
without, so that log-probs are the same to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.generate.kept import in_common

# Tokens that prompts have in common, at least: fewer are as soon run again.
LEAST = 64


@dataclass
class Beginnings:
  """Counts what was shared.

  Attributes:
    least: tokens of a beginning, at least.
    saved: tokens of prompts that were not run, since they were run for another.
  """

  least: int = LEAST
  saved: int = 0


def groups(prompts: Sequence[np.ndarray], least: int) -> list[tuple[int, list[int]]]:
  """(tokens in common, the numbers of prompts that have them) of those that share; of all such partitions one that
  leaves the fewest tokens to run. Of each prompt at least one token is its own.

  Args:
    prompts: int32 [n] each.
    least: tokens of a beginning, from 1.
  """
  order = sorted(range(len(prompts)), key=lambda i: prompts[i].tolist())
  # Prompts that have a beginning in common stand side by side: common[j] is that of order[j] and the one before it.
  common = np.array([0] + [in_common(prompts[one][:-1], prompts[other][:-1])
                           for one, other in zip(order, order[1:], strict=False)], np.int64)
  saved, first = np.zeros(len(order) + 1, np.int64), np.arange(-1, len(order))
  for end in range(1, len(order) + 1):
    # Of a group from `begin` on, as far back as there is enough in common.
    least_of = np.minimum.accumulate(common[1:end][::-1])
    least_of = least_of[:int(np.argmax(least_of < least)) if (least_of < least).any() else len(least_of)]
    begins = end - 2 - np.arange(len(least_of))
    gains = saved[begins] + least_of * (end - begins - 1)
    best = int(np.argmax(gains)) if len(gains) else -1
    alone = best < 0 or gains[best] <= saved[end - 1]
    first[end], saved[end] = (end - 1, saved[end - 1]) if alone else (begins[best], gains[best])
  found, end = [], len(order)
  while end:
    begin = int(first[end])
    if end - begin > 1:
      found.append((int(common[begin + 1:end].min()), sorted(order[begin:end])))
    end = begin
  return found[::-1]
