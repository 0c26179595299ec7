"""What the host knows while texts are generated (trainer/generate/sampler.py): which wait, and which row has which."""

import hashlib
from collections.abc import Sequence

import numpy as np

from trainer.generate import image_tokens
from trainer.generate.buckets import bucket, power

# The smallest size of prompts and of caches. A cache begins with room for so many tokens, and rows become no fewer than
# these.
MIN_LENGTH, MIN_SLOTS, MIN_ROWS = 16, 128, 4


class Rows:
  """The rows as the host knows them: whose texts they hold, how far these are, and the sizes of the state."""

  def __init__(self, count: int, unit: int, prompt_lengths: Sequence[int], longest: int, chunk: int):
    """`unit`: they are a multiple of it; `longest`: the most tokens of a text with its completion, as a size."""
    # (prompt, sample) of each row; None: it is free.
    self.owners: list[tuple[int, int] | None] = [None] * count
    # Tokens drawn for each.
    self.counts = np.zeros(count, np.int32)
    self._prompt_lengths, self._longest, self._chunk, self._unit = prompt_lengths, longest, chunk, unit
    self._least = min(count, power(MIN_ROWS, unit))
    self._length = self._room(max(prompt_lengths))

  @property
  def sizes(self) -> tuple[int, int]:
    """How many they are, and for how many tokens each has room."""
    return len(self.owners), self._length

  def busy(self) -> list[int]:
    """The rows with a text."""
    return [row for row, owner in enumerate(self.owners) if owner is not None]

  def fit(self, waiting: bool) -> tuple[np.ndarray, int]:
    """Settles the sizes for the next chunk.

    Returns:
      (the rows that are kept, int32 in their new order, beyond the last for empty ones; how many must be without a text
      for the host to look before the chunk is over).
    """
    busy, old = self.busy(), len(self.owners)
    texts = [self._prompt_lengths[self.owners[row][0]] + int(self.counts[row]) for row in busy]
    self._length = max(self._length, self._room(max(texts)))
    new = old if waiting else min(old, max(power(len(busy), self._unit), self._least))
    kept = list(range(old)) if new == old else busy + [old] * (new - len(busy))
    self.owners = [self.owners[row] if row < old else None for row in kept]
    self.counts = np.array([self.counts[row] if row < old else 0 for row in kept], np.int32)
    if waiting:  # until an eighth can be given to texts that wait
      enough = new - len(busy) + max(1, new // 8)
    else:  # until half of them do, or, where they cannot become fewer, none has a text
      enough = new - new // 2 if new > self._least else new
    return np.array(kept, np.int32), enough

  def _room(self, tokens: int) -> int:
    """The size for texts of so many tokens and those of a chunk."""
    return min(self._longest, bucket(max(tokens + self._chunk, MIN_SLOTS), MIN_LENGTH))


class Waiting:
  """Completions that have not begun, those of the longest prompts first."""

  def __init__(self, prompts: list[np.ndarray], shown: list[image_tokens.PromptImages],
               samples: Sequence[Sequence[int]], limits: np.ndarray, seed: int | str):
    self.prompts, self.shown, self.limits, self._next = prompts, shown, limits, 0
    # Of a prompt, rounded up too.
    self.most_images = image_tokens.slots(max(len(part.images) for part in shown))
    # Of a prompt, rounded up, so that few shapes occur.
    self.most_samples = power(max(map(len, samples)), 1)
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    self._units = [(prompt, sample) for prompt in order for sample in samples[prompt]]
    self._hashes = [hashlib.blake2b(f"{seed}:".encode() + ids.tobytes(), digest_size=8) for ids in prompts]
    for digest, part in zip(self._hashes, shown, strict=True):
      for image in part.images:
        digest.update(b":image:" + image.tobytes())
      if part.image_grid is not None:
        digest.update(part.image_grid.tobytes())

  def __len__(self) -> int:
    return len(self._units) - self._next

  def next_length(self) -> int:
    """Tokens of the next prompt; those after it have no more."""
    return len(self.prompts[self._units[self._next][0]])

  def take(self, count: int, num_prompts: int) -> list[tuple[int, int]]:
    """(prompt, sample) of at most `count` completions of at most `num_prompts` prompts."""
    taken, prompts = [], set()
    for unit in self._units[self._next : self._next + count]:
      prompts.add(unit[0])
      if len(prompts) > num_prompts:
        break
      taken.append(unit)
    self._next += len(taken)
    return taken

  def key(self, prompt: int, sample: int) -> np.ndarray:
    """Data of the random key, uint32 [2]: a hash of seed, prompt with its images, and sample."""
    digest = self._hashes[prompt].copy()
    digest.update(f":{sample}".encode())
    return np.frombuffer(digest.digest(), np.uint32)
