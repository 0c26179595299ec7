"""What the host knows while texts are generated (trainer/generate/sampler.py): which wait, and which row has which."""

import hashlib
import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from models.attention.pages import PAGE, Table
from trainer.generate import image_tokens
from trainer.generate.buckets import bucket, power
from trainer.generate.kept import KeptText

# The smallest size of prompts and of caches. A cache begins with room for so many tokens, and rows become no fewer than
# these.
MIN_LENGTH, MIN_SLOTS, MIN_ROWS = 16, 128, 4
# Texts that stay shorter are not in pages: rows as long as the longest are then about as short.
MIN_PAGED = 256


class Texts(NamedTuple):
  """Prompts that are to be completed.

  Attributes:
    prompts: the ids of each.
    shown: its images.
    samples: the numbers of its completions.
    limits: the most tokens of each completion.
    seeds: of the draws.
    begun: how many of its last ids are of its completions.
    kept: the text whose cache it goes on from; None: it is run from its beginning.
    keep: whether what its completions leave is kept.
  """

  prompts: list[np.ndarray]
  shown: list[image_tokens.PromptImages]
  samples: list[Sequence[int]]
  limits: list[int]
  seeds: list[int | str]
  begun: list[int]
  kept: list[KeptText | None]
  keep: list[bool]

  @property
  def lengths(self) -> list[int]:
    """Ids of each that are not of completions."""
    return [len(ids) - n for ids, n in zip(self.prompts, self.begun, strict=True)]

  @property
  def longest(self) -> int:
    """The most ids that one may have in the end."""
    return max(map(sum, zip(self.lengths, self.limits, strict=True)))


class Sizes(NamedTuple):
  """Of a state: its rows, the tokens that each may have, the pages that they share (None: each has its own slots)."""

  rows: int
  length: int
  pages: int | None = None


NO_ROWS = Sizes(0, 0)


class Pages:
  """Which pages of a cache each row has (`models.attention.cache.Table`)."""

  def __init__(self, rows: int):
    self._unit = max(8, rows // 2)  # sizes are multiples of it
    self.size = bucket(rows, self._unit)  # of all, in use or not
    self._of: list[list[int]] = [[] for _ in range(rows)]
    self._free: list[int] = []  # a heap
    self._end = 0  # those from here on were never given away

  def give(self, row: int, tokens: int) -> None:
    """Sees to it that the row has pages for so many tokens."""
    while len(self._of[row]) * PAGE < tokens:
      if not self._free:
        heapq.heappush(self._free, self._end)
        self._end += 1
      self._of[row].append(heapq.heappop(self._free))
    self.size = max(self.size, bucket(self._end, self._unit))

  def add(self, rows: int) -> None:
    """More rows, without pages."""
    self._of += [[] for _ in range(rows)]

  def take_back(self, row: int) -> None:
    """The row needs none any more."""
    for page in self._of[row]:
      heapq.heappush(self._free, page)
    self._of[row] = []

  def wasteful(self) -> bool:
    """Whether half of them would do."""
    return 2 * bucket(max(sum(map(len, self._of)), 1), self._unit) <= self.size

  def gathered(self, kept: Sequence[int]) -> np.ndarray:
    """Keeps these rows in this order, one beyond the last being one without pages, and no more pages than they need.
    Returns the old numbers of the pages in the new order, int32."""
    of = [self._of[row] if row < len(self._of) else [] for row in kept]
    old = [page for pages in of for page in pages]
    fresh = iter(range(len(old)))
    self._of, self._free, self._end = [[next(fresh) for _ in pages] for pages in of], [], len(old)
    beyond, self._unit = self.size, min(self._unit, max(8, len(of) // 2))
    self.size = bucket(max(len(old), 1), self._unit)
    return np.array(old + [beyond] * (self.size - len(old)), np.int32)

  def table(self, length: int) -> Table:
    """For rows of up to `length` tokens."""
    pages_BxJ = np.full((len(self._of), -(-length // PAGE)), self.size, np.int32)
    owners_Q, firsts_Q = np.full(self.size, len(self._of), np.int32), np.zeros(self.size, np.int32)
    for row, pages in enumerate(self._of):
      pages_BxJ[row, :len(pages)], owners_Q[pages], firsts_Q[pages] = pages, row, PAGE * np.arange(len(pages))
    return Table(pages_BxJ, owners_Q, firsts_Q)


class Rows:
  """The rows as the host knows them: whose texts they hold, how far these are, and the sizes of the state."""

  def __init__(self, count: int, unit: int, texts: Texts, chunk: int, paged: bool):
    """`unit`: they are a multiple of it; `paged`: they share pages, if texts may be long enough for that to be worth
    anything."""
    # (prompt, sample) of each row; None: it is free.
    self.owners: list[tuple[int, int] | None] = [None] * count
    # Tokens drawn for each.
    self.counts = np.zeros(count, np.int32)
    self._prompt_lengths, self._limits, self._begun = list[int](), list[int](), list[int]()
    self._chunk, self._unit, self._longest, self._length, self._pages = chunk, unit, 0, 0, None
    self._least = min(count, power(MIN_ROWS, unit))
    if paged and bucket(texts.longest, MIN_LENGTH) >= MIN_PAGED:
      self._pages = Pages(count)
    self.add(texts)

  def add(self, texts: Texts) -> None:
    """Texts that may have rows from now on."""
    self._prompt_lengths += texts.lengths
    self._limits += texts.limits
    self._begun += texts.begun
    self._longest = max(self._longest, bucket(texts.longest, MIN_LENGTH))
    self._length = max(self._length, self._room(max(map(len, texts.prompts))))

  @property
  def sizes(self) -> Sizes:
    """How many they are, for how many tokens each has room, and how many pages they share."""
    return Sizes(len(self.owners), self._length, None if self._pages is None else self._pages.size)

  @property
  def table(self) -> Table | None:
    """Whose the pages are; None: there are none."""
    return None if self._pages is None else self._pages.table(self._length)

  def busy(self) -> list[int]:
    """The rows with a text."""
    return [row for row, owner in enumerate(self.owners) if owner is not None]

  def begin(self, row: int, unit: tuple[int, int]) -> None:
    """Gives a row to a text."""
    self.owners[row], self.counts[row] = unit, self._begun[unit[0]]
    self._give_pages([row])

  def end(self, row: int) -> None:
    """Its text has ended."""
    self.owners[row] = None
    if self._pages is not None:
      self._pages.take_back(row)

  def go_on(self, texts: Texts, units: Mapping[int, tuple[int, int]]) -> None:
    """The texts of another request take the place of those before; `units` are those that are in rows already."""
    for row in self.busy():
      if row not in units:
        self.end(row)
    self.owners = [units.get(row) for row in range(len(self.owners))]
    self._prompt_lengths, self._limits, self._begun = [], [], []
    self.add(texts)

  def grow(self, waiting: int, most: int) -> None:
    """Adds rows, up to so many in all, where more texts wait than are free."""
    missing = min(most, power(len(self.busy()) + waiting, self._unit)) - len(self.owners)
    if missing > 0:
      self.owners += [None] * missing
      self.counts = np.pad(self.counts, (0, missing))
      if self._pages is not None:
        self._pages.add(missing)

  def grown(self, old: Sizes) -> tuple[np.ndarray, np.ndarray | None]:
    """(rows, pages) that are kept where nothing was taken away since these sizes; see `fit`."""
    pages = None if old.pages is None else np.arange(self.sizes.pages, dtype=np.int32)
    return np.minimum(np.arange(self.sizes.rows, dtype=np.int32), old.rows), pages

  def fit(self, waiting: bool, coming: int = 0) -> tuple[np.ndarray, np.ndarray | None, int]:
    """Settles the sizes for the next chunk, where texts wait for rows, and so many more may come.

    Returns:
      (the rows that are kept, int32 in their new order, beyond the last for empty ones; pages in the same way; how many
      rows must be without a text for the host to look before the chunk is over).
    """
    busy, old = self.busy(), self.sizes
    texts = [self._prompt_lengths[self.owners[row][0]] + int(self.counts[row]) for row in busy]
    self._length = max(self._length, self._room(max(texts)))
    new = old.rows if waiting else min(old.rows, max(power(len(busy) + coming, self._unit), self._least))
    kept = list(range(old.rows)) if new == old.rows else busy + [old.rows] * (new - len(busy))
    self.owners = [self.owners[row] if row < old.rows else None for row in kept]
    self.counts = np.array([self.counts[row] if row < old.rows else 0 for row in kept], np.int32)
    pages = None
    if self._pages is not None:
      if new < old.rows or not waiting and self._pages.wasteful():
        pages = self._pages.gathered(kept)
      self._give_pages(self.busy())
      extra = np.full(max(self._pages.size - len(pages), 0), old.pages, np.int32) if pages is not None else None
      pages = self.grown(old)[1] if pages is None else np.concatenate([pages, extra])
    if waiting or coming:  # until an eighth can be given to texts that wait
      enough = new - len(busy) + max(1, new // 8)
    else:  # until half of them do, or, where they cannot become fewer, none has a text
      enough = new - new // 2 if new > self._least else new
    return np.array(kept, np.int32), pages, enough

  def _give_pages(self, rows: list[int]) -> None:
    """Pages for what these rows hold and may have after the next chunk."""
    for row in rows if self._pages is not None else ():
      prompt = self.owners[row][0]
      new = min(int(self.counts[row]) + self._chunk, self._limits[prompt])
      self._pages.give(row, self._prompt_lengths[prompt] + new)

  def _room(self, tokens: int) -> int:
    """The size for texts of so many tokens and those of a chunk."""
    least = max(tokens + self._chunk, MIN_SLOTS)
    room = bucket(least, MIN_LENGTH)
    if self._pages is not None:  # of whose programs it is a size beside the number of pages: powers of four
      room = MIN_SLOTS * 4 ** math.ceil(math.log(least / MIN_SLOTS, 4) - 1e-9)
    return min(self._longest, room)


class Prefilled(NamedTuple):
  """Prompts that were run, some of whose completions may still wait for a row.

  Attributes:
    prompts: their numbers, in the order of what follows; none: nothing was run.
    sizes: (N, tokens that `begun` has room for).
    last_NxD, begun: hidden states of their last tokens, and the cache with them.
    experts: int16 [tokens, L, k] of each, on the host; []: not recorded.
  """

  prompts: Sequence[int] = ()
  sizes: tuple[int, int] = (0, 0)
  last_NxD: Any = None
  begun: Any = None
  experts: Sequence[np.ndarray] = ()


class Waiting:
  """Completions that have no row yet, those of the longest prompts first.

  Args:
    in_order: in the order of the prompts instead.
    chunk: the most tokens of a prompt to run at once; 0: all.

  Attributes:
    prompts, shown, limits, begun, kept, keep: as of `Texts`, of all that were added.
    reused: tokens of each prompt that were kept when it came.
    prefilled: the prompts of those that are next. A prompt is run once for all of its completions, however late their
      rows become free, and with as many others as completions fit into all rows.
  """

  def __init__(self, texts: Texts, in_order: bool = False, chunk: int = 0):
    self.prompts, self.shown = list[np.ndarray](), list[image_tokens.PromptImages]()
    self.limits, self.begun, self._hashes = list[int](), list[int](), list[Any]()
    self.kept, self.keep, self.reused = list[KeptText | None](), list[bool](), list[int]()
    self._units, self._next, self.prefilled, self._ready = list[tuple[int, int]](), 0, Prefilled(), 0
    self._in_order, self.chunk, self.most_images, self.frames = in_order, chunk, 0, 1
    self.add(texts)

  def add(self, texts: Texts) -> None:
    """Texts that wait behind those that do."""
    first = len(self.prompts)
    self.prompts += texts.prompts
    self.shown += texts.shown
    self.limits += texts.limits
    self.begun += texts.begun
    self.kept += texts.kept
    self.reused += [0 if text is None else len(text.ids) for text in texts.kept]
    texts.kept.clear()  # nobody else holds what may go
    self.keep += texts.keep
    # Of a prompt, rounded up too.
    self.most_images = max(self.most_images, image_tokens.slots(max(len(part.images) for part in texts.shown)))
    self.frames = max(self.frames, *(part.frames for part in texts.shown))
    order = list(range(first, len(self.prompts)))
    if not self._in_order:
      order.sort(key=lambda i: (self.kept[i] is None, -len(self.prompts[i])))
    self._wait([*self._units, *((prompt, sample) for prompt in order for sample in texts.samples[prompt - first])])
    # Of what a prompt was before its completions began: what is drawn does not depend on where they were left off.
    hashes = [hashlib.blake2b(f"{seed}:".encode() + ids[:len(ids) - n].tobytes(), digest_size=8)
              for seed, ids, n in zip(texts.seeds, texts.prompts, texts.begun, strict=True)]
    for digest, part in zip(hashes, texts.shown, strict=True):
      for image in part.images:
        digest.update(b":image:" + image.tobytes())
      if part.image_grid is not None:
        digest.update(part.image_grid.tobytes())
    self._hashes += hashes

  def __len__(self) -> int:
    return len(self._units) - self._next

  def _wait(self, units: list[tuple[int, int]]) -> None:
    """These have no row; those that had none before are the first of them."""
    self._units = units
    lengths = [self.piece(prompt) for prompt, _ in units]
    self._longest = list(itertools.accumulate(reversed(lengths), max))[::-1]  # from each unit on

  def known(self, names: Mapping[tuple[bytes, int, int], int]) -> dict[int, tuple[int, int]]:
    """{row: (prompt, sample) of the completion that it has}, by `name`; they do not wait any more."""
    found = {}
    for unit in self._units:
      row = names.get(self.name(*unit, self.begun[unit[0]]))
      if row is not None:
        found[row] = unit
    gone = set(found.values())
    self._wait([unit for unit in self._units if unit not in gone])
    return found

  def name(self, prompt: int, sample: int, count: int) -> tuple[bytes, int, int]:
    """What a completion with so many tokens is known by in another request."""
    return self.key(prompt, sample).tobytes(), int(count), self.limits[prompt]

  def kept_length(self, prompt: int) -> int:
    """Tokens of a prompt that need not be run."""
    text = self.kept[prompt]
    return 0 if text is None else len(text.ids)

  def piece(self, prompt: int) -> int:
    """Tokens of a prompt that are run together: all that were not run before, or a chunk of them."""
    length = len(self.prompts[prompt]) - self.kept_length(prompt)
    # Images, and tokens that see one another, are run together; but not again.
    return min(length, self.chunk) if self.chunk and (self.kept[prompt] or self.shown[prompt].causal) else length

  def in_pieces(self, prompt: int) -> bool:
    """Whether a prompt goes on from a text that is kept, or is longer than a chunk."""
    return self.piece(prompt) < len(self.prompts[prompt])

  def next_length(self) -> int:
    """The most tokens of a prompt that are run at once, from the next prompt on."""
    return self._longest[self._next]

  def next_slots(self) -> int:
    """Tokens of the next prompt."""
    return len(self.prompts[self._units[self._next][0]])

  def to_prefill(self, count: int, num_prompts: int) -> list[int]:
    """The prompts to run next, at most `num_prompts` and those of `count` completions, all of them at once or none."""
    prompts: dict[int, None] = {}
    first = self._units[self._next][0]
    for unit in self._units[self._next : self._next + count]:
      if unit[0] not in prompts and (len(prompts) == num_prompts or self.in_pieces(unit[0]) != self.in_pieces(first)):
        break
      prompts[unit[0]] = None
    # All completions of these, so that none is run again.
    self._ready = next((n for n, unit in enumerate(self._units[self._next:]) if unit[0] not in prompts), len(self))
    return list(prompts)

  def take(self, count: int) -> list[tuple[int, int]]:
    """(prompt, sample) of at most `count` completions whose prompts were run; the last let these go."""
    taken = self._units[self._next : self._next + min(count, self._ready)]
    self._next, self._ready = self._next + len(taken), self._ready - len(taken)
    self.prefilled = self.prefilled if self._ready else Prefilled()
    return taken

  def key(self, prompt: int, sample: int) -> np.ndarray:
    """Data of the random key, uint32 [2]: a hash of seed, prompt with its images, and sample."""
    digest = self._hashes[prompt].copy()
    digest.update(f":{sample}".encode())
    return np.frombuffer(digest.digest(), np.uint32)
