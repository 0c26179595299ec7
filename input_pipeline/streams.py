"""Sources that are too large to wait for: read in parts (parts.py), the next while one is trained on.

Rows are those of one part after another. What makes up a part, and the order of the parts in each epoch, follow from
the files and the seed; within a part rows are shuffled as those of a whole source, packed and split likewise: a
document's split follows from the document alone, and no row has documents of two parts. So every row follows from
the files and the seed alone. Where a part begins follows from how many rows the parts before it have: that is kept in
the workdir as soon as it is known, with a hash of what was read, so that a run that goes on reads the part that it is
in, and no other.
"""

import hashlib
import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from ml_collections import ConfigDict
from tqdm import tqdm

from input_pipeline.bad_rows import Policy
from input_pipeline.batches import PackedSource, pack, resolve_layout
from input_pipeline.cache import TokenizedSource, key_of, open_cache, tokenize_source
from input_pipeline.chat.image_placeholders import sees, vocab_size
from input_pipeline.evaluation import default_cache_dir
from input_pipeline.examples.base import Encoder
from input_pipeline.examples.kinds import WITH_PARTS
from input_pipeline.mixture import MAX_ROWS
from input_pipeline.packing import PlanStats
from input_pipeline.parts import Part, Parts, draw
from input_pipeline.sources.sources import NothingError, Source
from input_pipeline.tokenizer.tokenizer import Tokenizer
from trainer import atomic
from trainer.errors import ConfigError, DataError

# Parts whose arrays are kept at hand: that of the rows, the one before it, and the one that is being made.
AT_HAND = 3


class Known(NamedTuple):
  """Of a part that was read: a hash of its content (the key of its token cache), its rows, and whether its files end
  with it."""

  fingerprint: str
  rows: int
  last: bool = True


class EndlessPlan(NamedTuple):
  """Stands for a `packing.Plan` of which the rows are not known before they are read."""

  stream: "StreamedSource"
  num_rows: int = MAX_ROWS

  def stats(self) -> PlanStats:
    return self.stream.at_hand().plan.stats()


def check(config: ConfigDict, name: str, learns: str) -> None:
  """Refuses a stream where all of a source must be known.

  Raises:
    ConfigError: naming the key.
  """
  key, cfg = f"input.sources.{name}.stream_files", config.input.sources[name]
  if cfg.stream_files < 1:
    raise ConfigError(f"{key} is {cfg.stream_files}; allowed: 0, which reads the source whole, or the files of a part, "
                      "1 or more.")
  if learns in WITH_PARTS or sees(config):
    raise ConfigError(f"{key} is {cfg.stream_files}: streams have texts and conversations without images; strategy "
                      f"{config.strategy.name!r} {'sees images' if sees(config) else 'learns from groups of them'}. "
                      f"Use {key}=0.")
  if cfg.stream_bytes < 0:
    raise ConfigError(f"input.sources.{name}.stream_bytes is {cfg.stream_bytes}; allowed: 0, which reads files whole, "
                      "or the bytes of a piece, 1 or more; some 8000000 are a good beginning.")
  if cfg.max_documents is not None:
    raise ConfigError(f"{key} and max_documents exclude each other: documents are counted in all files. Use one of "
                      "them.")
  if config.input.stop != "never":
    raise ConfigError(f"{key} needs input.stop='never': where the data end is not known before. Found "
                      f"{config.input.stop!r}; set the run's length by total_steps or total_tokens.")


class StreamedSource:
  """A source in parts; to batches what a `PackedSource` is.

  Args:
    config: the whole config. learns: see `make_encoder`.
    source, encoder: of `open_examples`.
    tokenizer: of the run. workdir: of the run.
    progress: show a bar for the first part.

  Raises:
    ConfigError, DataError: see `check`, `Parts`; or what was read of a file is not what it is now.
  """

  row_images, units, reference = None, None, None
  advantages, shares_prompts = False, False
  most_images, sequences = 0, 0

  def __init__(self, config: ConfigDict, source: Source, encoder: Encoder, tokenizer: Tokenizer, *, learns: str,
               workdir: str | Path, progress: bool = False):
    check(config, name := source.name, learns)
    self._source, self._name, self._seed = source, name, config.seed
    self._parts = Parts(source, cfg := config.input.sources[name], config.seed)
    groups = self._parts.groups
    layout = [config.seq_len, *resolve_layout(config, learns), encoder.fingerprint, vocab_size(config, tokenizer)]
    listed = [[[file.name, file.size] for file in files] for files in groups]
    layout += [cfg.stream_bytes] if self._parts.cut else []
    self._fingerprint = draw("stream", source.identity(listed), layout).hex()
    # What is known before anything is read.
    said = np.zeros((0, config.strategy.cached_top_k), np.int32) if learns == "taught" else None
    self.tokens = TokenizedSource(name, np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros(0, np.int64),
                                  self._fingerprint, {}, teacher_ids=said,
                                  teachers=np.zeros(0, np.int16) if learns == "routed" else None)
    self._file = Path(workdir) / "streams" / f"{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}.json"
    self._known, self._versions = self._read()
    # Row of the stream that slot s begins with: part s % parts of an epoch's order; the last is that after the last.
    self._starts = [0]
    # The parts of the first epoch in their order, as far as they are known: how many pieces files have is seen at their
    # ends. Whether these are all.
    self._first, self._all = ([(0, 0)], False) if self._parts.cut else ([(g, 0) for g in range(len(groups))], True)
    # Of the epoch that was asked for last: which part stands where.
    self._order: tuple[int, list[int]] = (0, [])
    # Of where slots begin and which parts are at hand; and, as who has that may wait for a part, of what is known.
    self._lock, self._writing = threading.RLock(), threading.Lock()
    self._made: dict[Part, Future] = {}
    self._stop = threading.Event()

    vocab, folder, policy = vocab_size(config, tokenizer), default_cache_dir(config, workdir), Policy.of(config)

    def make(part: Part, stop: threading.Event) -> tuple[PackedSource | None, Known]:
      known = self._known.get(part)
      if self._parts.cut and known and known.rows and (
          tokens := open_cache(folder, name, known.fingerprint, policy)) is not None:
        return pack(config, tokens, learns=learns), known  # its bytes need not come here again
      with self._parts.open(part, stop) as (opened, last):
        try:
          tokens = tokenize_source(opened, encoder, vocab, folder, progress and not self._known, policy)
        except NothingError as e:
          logging.warning("%s The stream goes on without them.", e)
          return None, Known(key_of(opened, encoder, vocab), 0, last)
      packed = pack(config, tokens, learns=learns)
      return packed, Known(tokens.fingerprint, packed.plan.num_rows, last)

    self._make = make
    self._compare(lambda opened: key_of(opened, encoder, vocab))
    if self._parts.cut:
      size, each = sum(file.size or 0 for files in groups for file in files), cfg.stream_bytes
      tqdm.write(f"source {name!r}: {sum(map(len, groups)):,} files, {size / 1e6:,.1f} MB, {len(groups[0])} at a time, "
                 f"in pieces of {each / 1e6:,.1f} MB of each: the first step waits for the first.", file=sys.stderr)

  @property
  def plan(self) -> EndlessPlan:
    return EndlessPlan(self)

  def counts(self) -> dict[str, Any]:
    """Of the part at hand, see `PackedSource.counts`."""
    files, pieces = sum(map(len, self._parts.groups)), "a piece of each of " if self._parts.cut else ""
    return self.at_hand().counts() | {
        "source": f"{self._name}, {pieces}{len(self._parts.groups[0])} of {files:,} files"}

  def at_hand(self) -> PackedSource:
    """A part that was read, or is being read: the first where none is."""
    with self._lock:
      made = list(self._made.values())
    for future in reversed(made):
      if (packed := future.result()) is not None:
        return packed
    slots, _ = self._locate(np.zeros(1, np.int64))
    return self._part(self._at(int(slots[0]))[1]).result()

  def begin(self, row: int) -> None:
    """Begins to read the part that a row of the stream is in."""
    slots, _ = self._locate(np.array([row]))
    self._part(self._at(int(slots[0]))[1])

  def fill(self, batch: dict[str, np.ndarray], where: np.ndarray, epoch: int, rows: np.ndarray, source_id: int) -> None:
    """Writes rows `rows` of the stream, which has one endless epoch, into rows `where` of `batch`."""
    slots, row = self._locate(rows)
    for slot in np.unique(slots).tolist():
      here = np.flatnonzero(slots == slot)
      turn, part = self._at(slot)
      packed = self._part(part).result()
      self._part(self._at(slot + 1)[1])  # the next, meanwhile
      packed.fill(batch, where[here], turn, row[here], source_id)

  def epoch(self, rows: int) -> float:
    """Epochs that the first so many rows are, by their files."""
    if not rows:
      return 0.0
    slots, row = self._locate(np.array([rows - 1]))
    slot, (epoch, part) = int(slots[0]), self._at(int(slots[0]))
    share = (int(row[0]) + 1) / self._known[part].rows
    if epoch or not self._parts.cut:
      return (slot + share) / len(self._first)
    # Not by what was read ahead: a run that goes on says the same.
    return (part[0] + min(1.0, (part[1] + share) / self._parts.expected(part[0]))) / len(self._parts.groups)

  def close(self) -> None:
    """Gives up what is being read; what is asked for after that is read anew."""
    with self._lock:
      self._stop.set()
      self._stop = threading.Event()
      self._made = {part: future for part, future in self._made.items() if future.done() and not future.exception()}

  def _at(self, slot: int) -> tuple[int, Part]:
    """(epoch, part) of a slot; all parts before it have been read."""
    with self._lock:
      while not self._all and slot >= len(self._first):
        group, number = self._first[-1]
        if not self._known[group, number].last:
          self._first.append((group, number + 1))
        elif group + 1 < len(self._parts.groups):
          self._first.append((group + 1, 0))
        else:
          self._all = True
      epoch, place = divmod(slot, len(self._first))
      if not epoch:
        return 0, self._first[place]
      known, order = self._order
      if known != epoch:
        order = sorted(range(len(self._first)), key=lambda part: draw(self._seed, epoch, part))
        self._order = epoch, order
      return epoch, self._first[order[place]]

  def _locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(slot, row in its part) of rows of the stream, int64; reads what is not known yet of the parts before them."""
    with self._lock:
      while self._starts[-1] <= rows.max(initial=0):
        part = self._at(len(self._starts) - 1)[1]
        if part not in self._known:
          self._part(part).result()
        self._starts.append(self._starts[-1] + self._known[part].rows)
        if self._all and len(self._starts) > len(self._first) and not self._starts[-1]:
          raise DataError(f"source {self._name!r}: none of its files has a document of split {self._source.split!r}.")
      starts = np.array(self._starts)
    slots = np.searchsorted(starts, rows, "right") - 1
    return slots, rows - starts[slots]

  def _part(self, part: Part) -> Future:
    """A part, which a thread makes unless it is at hand; None: nothing of it is in the split."""
    with self._lock:
      if part not in self._made:
        future: Future = Future()
        threading.Thread(target=self._make_part, args=(part, future, self._stop), daemon=True).start()
        self._made[part] = future
      self._made[part] = self._made.pop(part)  # the latest stands last
      for old in list(self._made)[:-AT_HAND]:
        del self._made[old]
      return self._made[part]

  def _make_part(self, part: Part, future: Future, stop: threading.Event) -> None:
    try:
      packed, found = self._make(part, stop)
      self._keep(part, found)
      future.set_result(packed)
    except BaseException as e:
      future.set_exception(e)

  def _compare(self, key: Callable[[Source], str]) -> None:
    """Reads again what was read of files that are cut and of which there is another version now, by what is known
    without reading them; other parts of them may follow only if it is the same.

    Raises:
      DataError: it is not.
    """
    other = {g for g, files in enumerate(self._parts.groups) for file in files
             if self._versions.get(file.name, file.version) != file.version}
    for part in sorted(part for part in self._known if part[0] in other):
      if part[1] == 0:
        logging.warning("source %r: %s and so on was of another version of the file when it was read; it is read again "
                        "and compared.", self._name, self._parts.named(part))
      with self._parts.open(part, self._stop) as (opened, last):
        if (key(opened), last) != (self._known[part].fingerprint, self._known[part].last):
          raise self._another(part)
    self._versions |= {file.name: file.version for g in other for file in self._parts.groups[g]}

  def _read(self) -> tuple[dict[Part, Known], dict[str, str]]:
    """What a run before this one in the workdir has found of the parts of these files, and of which versions."""
    try:
      kept = json.loads(self._file.read_text("utf-8"))
    except FileNotFoundError:
      return {}, {}
    if kept["stream"] != self._fingerprint:  # of other files: the run is refused, or told to go on with them
      return {}, {}
    parts = {}
    for part, known in kept["parts"].items():
      group, _, number = part.partition(".")
      parts[int(group), int(number or 0)] = Known(*known)
    return parts, kept.get("versions", {})

  def _keep(self, part: Part, found: Known) -> None:
    """Writes down what was read of a part, on a disk before a row of it is trained.

    Raises:
      DataError: it is not what it was.
    """
    with self._writing:
      if self._known.get(part, found) != found:
        raise self._another(part)
      if part not in self._known:
        self._known[part] = found
        if self._parts.cut:
          self._versions |= {file.name: file.version for file in self._parts.groups[part[0]]}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        parts = {f"{group}.{number}" if self._parts.cut else str(group): known
                 for (group, number), known in self._known.items()}
        said = {"stream": self._fingerprint, "parts": parts, "versions": self._versions}
        atomic.write(self._file, json.dumps(said, indent=1))

  def _another(self, part: Part) -> DataError:
    return DataError(f"source {self._name!r}: the content of {self._parts.named(part)} is not what this run has read "
                     "of it before. Restore the file, or use a new --workdir.")
