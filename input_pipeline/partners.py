"""Who stands behind whom, for documents that need another one of their source: the next one with another prompt.

    partners = Partners(prompt_of)
    for document in documents:
      pairs += partners.add(document)     # [(document, the other), …], in the order in which documents came
    pairs += partners.close()

Files keep the answers to a prompt together, wanted ones first as often as not. So it does not do to take the next
answer with another prompt: some would be taken by all answers to the prompt before, and others by none. Here each is
taken once, but for some at the end of a source: a document waits for the first one after it that has another prompt and
that no document before it takes; those that still wait at the end get, in order, the first ones, which nobody took.
Where all prompts differ, that is the next document, and after the last the first.
"""

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from input_pipeline.examples.base import Encoded

# Documents that are in memory at a time, unless all before have one prompt.
MOST = 1024


@dataclass
class _Waiting:
  document: Encoded
  prompt: Hashable
  other: Encoded | None = None


class Partners:
  """See above.

  Args:
    prompt_of: what tells prompts apart.
    most: documents that may wait. Beyond them the first gets one that others have, too: the source's first, or the
      first one that has another prompt than that.
  """

  def __init__(self, prompt_of: Callable[[Encoded], Hashable], most: int = MOST):
    self._prompt_of, self._most = prompt_of, most
    self._waiting: deque[_Waiting] = deque()
    # Nobody has taken these. And the first of each of two prompts, of which every document can have one.
    self._left: list[_Waiting] = []
    self._firsts: list[_Waiting] = []

  def add(self, document: Encoded) -> list[tuple[Encoded, Encoded | None]]:
    """Those whose partner is known now, all before them included, with it."""
    new = _Waiting(document, self._prompt_of(document))
    if len(self._firsts) < 2 and all(new.prompt != first.prompt for first in self._firsts):
      self._firsts.append(new)
    taker = next((w for w in self._waiting if w.other is None and w.prompt != new.prompt), None)
    if taker is not None:
      taker.other = document
    elif len(self._left) < self._most:
      self._left.append(new)
    self._waiting.append(new)
    if len(self._waiting) > self._most and self._waiting[0].other is None:
      self._waiting[0].other = self._first_but(self._waiting[0])
    return self._ready()

  def close(self) -> list[tuple[Encoded, Encoded | None]]:
    """The rest. None for the other: all documents have the same prompt."""
    for waiting in self._waiting:
      if waiting.other is None:
        found = next((i for i, left in enumerate(self._left) if left.prompt != waiting.prompt), None)
        waiting.other = self._first_but(waiting) if found is None else self._left.pop(found).document
    rest = [(waiting.document, waiting.other) for waiting in self._waiting]
    self._waiting.clear()
    return rest

  def _first_but(self, waiting: _Waiting) -> Encoded | None:
    return next((first.document for first in self._firsts if first.prompt != waiting.prompt), None)

  def _ready(self) -> list[tuple[Encoded, Encoded | None]]:
    ready = []
    while self._waiting and self._waiting[0].other is not None:
      first = self._waiting.popleft()
      ready.append((first.document, first.other))
    return ready
