"""Sources that are too large to wait for: read in parts of a few files, the next while one is trained on.

Rows are those of one part after another. Which files make up a part, and the order of the parts in each epoch, follow
from the seed; within a part rows are shuffled as those of a whole source. So every row follows from the files and the
seed alone. Where a part begins follows from how many rows the parts before it have: that is kept in the workdir as soon
as it is known, with a hash of what was read, so that a run that goes on reads the part that it is in, and no other.
"""

import hashlib
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from ml_collections import ConfigDict

from input_pipeline.bad_rows import Policy
from input_pipeline.batches import PackedSource, pack, resolve_layout
from input_pipeline.cache import TokenizedSource, tokenize_source
from input_pipeline.chat.image_placeholders import sees, vocab_size
from input_pipeline.evaluation import default_cache_dir
from input_pipeline.examples.base import Encoder
from input_pipeline.examples.kinds import WITH_PARTS
from input_pipeline.mixture import MAX_ROWS
from input_pipeline.packing import PlanStats
from input_pipeline.sources.sources import Listed, NothingError, Source
from input_pipeline.tokenizer.tokenizer import Tokenizer
from trainer import atomic
from trainer.errors import ConfigError, DataError

# Parts whose arrays are kept at hand: that of the rows, the one before it, and the one that is being made.
AT_HAND = 3


class Known(NamedTuple):
  """Of a part that was read: a hash of its tokens, and its rows."""

  fingerprint: str
  rows: int


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
  if cfg.max_documents is not None:
    raise ConfigError(f"{key} and max_documents exclude each other: documents are counted in all files. Use one of "
                      "them.")
  if config.input.stop != "never":
    raise ConfigError(f"{key} needs input.stop='never': where the data end is not known before. Found "
                      f"{config.input.stop!r}; set the run's length by total_steps or total_tokens.")


def parts_of(source: Source, cfg: ConfigDict, seed: int) -> list[list[Listed]]:
  """The files of each part, none of them fetched, in an order that follows from the seed and their names.

  Raises:
    ConfigError: the source has no files.
    DataError: they cannot be listed.
  """
  files = source.listed()
  if not files:
    raise ConfigError(f"input.sources.{source.name}.stream_files is {cfg.stream_files}, but type {cfg.type!r} has no "
                      "files. Use 0.")
  files = sorted(files, key=lambda file: (_draw(seed, file.name), file.name))
  return [files[at:at + cfg.stream_files] for at in range(0, len(files), cfg.stream_files)]


def _draw(*of: Any) -> bytes:
  """A number that follows from `of`, on every machine and for years."""
  return hashlib.blake2b(json.dumps(of).encode(), digest_size=16).digest()


class StreamedSource:
  """A source in parts; to batches what a `PackedSource` is.

  Args:
    config: the whole config. name: the source's. learns: see `make_encoder`.
    source, encoder: of `open_examples`.
    tokenizer: of the run. workdir: of the run.
    progress: show a bar for the first part.

  Raises:
    ConfigError, DataError: see `check`, `parts_of`.
  """

  row_images, units, reference = None, None, None
  advantages, shares_prompts = False, False
  most_images, sequences = 0, 0

  def __init__(self, config: ConfigDict, name: str, source: Source, encoder: Encoder, tokenizer: Tokenizer, *,
               learns: str, workdir: str | Path, progress: bool = False):
    check(config, name, learns)
    self._source, self._name, self._seed = source, name, config.seed
    self._parts = parts_of(source, config.input.sources[name], config.seed)
    layout = [config.seq_len, *resolve_layout(config, learns), encoder.fingerprint, vocab_size(config, tokenizer)]
    listed = [[[file.name, file.size] for file in files] for files in self._parts]
    self._fingerprint = _draw("stream", source.identity(listed), layout).hex()
    # What is known before anything is read.
    said = np.zeros((0, config.strategy.cached_top_k), np.int32) if learns == "taught" else None
    self.tokens = TokenizedSource(name, np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros(0, np.int64),
                                  self._fingerprint, {}, teacher_ids=said,
                                  teachers=np.zeros(0, np.int16) if learns == "routed" else None)
    self._file = Path(workdir) / "streams" / f"{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}.json"
    self._known = self._read()
    # Row of the stream that slot s begins with: part s % parts of an epoch's order; the last is that after the last.
    self._starts = [0]
    # Of the epoch that was asked for last: which part stands where.
    self._order: tuple[int, list[int]] = (0, [])
    # Of where slots begin and which parts are at hand; and, as who has that may wait for a part, of what is known.
    self._lock, self._writing = threading.RLock(), threading.Lock()
    self._made: dict[int, Future] = {}
    self._stop = threading.Event()

    def make(files: list[Listed], stop: threading.Event) -> PackedSource:
      tokens = tokenize_source(source.part(files, stop), encoder, vocab_size(config, tokenizer),
                               default_cache_dir(config, workdir), progress and not self._known, Policy.of(config))
      return pack(config, tokens, learns=learns)

    self._make: Callable[[list[Listed], threading.Event], PackedSource] = make

  @property
  def plan(self) -> EndlessPlan:
    return EndlessPlan(self)

  def counts(self) -> dict[str, Any]:
    """Of the part at hand, see `PackedSource.counts`."""
    files = sum(map(len, self._parts))
    return self.at_hand().counts() | {"source": f"{self._name}, {len(self._parts[0])} of {files:,} files"}

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
    slot = int(slots[0])
    return (slot + (int(row[0]) + 1) / self._known[self._at(slot)[1]].rows) / len(self._parts)

  def close(self) -> None:
    """Gives up what is being read; what is asked for after that is read anew."""
    with self._lock:
      self._stop.set()
      self._stop = threading.Event()
      self._made = {part: future for part, future in self._made.items() if future.done() and not future.exception()}

  def _at(self, slot: int) -> tuple[int, int]:
    """(epoch, part) of a slot."""
    epoch, place = divmod(slot, len(self._parts))
    if not epoch:
      return 0, place
    known, order = self._order
    if known != epoch:
      order = sorted(range(len(self._parts)), key=lambda part: _draw(self._seed, epoch, part))
      self._order = epoch, order
    return epoch, order[place]

  def _locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(slot, row in its part) of rows of the stream, int64; reads what is not known yet of the parts before them."""
    with self._lock:
      while self._starts[-1] <= rows.max(initial=0):
        part = self._at(len(self._starts) - 1)[1]
        if part not in self._known:
          self._part(part).result()
        self._starts.append(self._starts[-1] + self._known[part].rows)
        if len(self._starts) > len(self._parts) and not self._starts[-1]:
          raise DataError(f"source {self._name!r}: none of its files has a document of split {self._source.split!r}.")
      starts = np.array(self._starts)
    slots = np.searchsorted(starts, rows, "right") - 1
    return slots, rows - starts[slots]

  def _part(self, part: int) -> Future:
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

  def _make_part(self, part: int, future: Future, stop: threading.Event) -> None:
    try:
      try:
        packed = self._make(self._parts[part], stop)
      except NothingError as e:
        logging.warning("%s The stream goes on without them.", e)
        packed = None
      self._keep(part, Known("", 0) if packed is None else Known(packed.tokens.fingerprint, packed.plan.num_rows))
      future.set_result(packed)
    except BaseException as e:
      future.set_exception(e)

  def _read(self) -> dict[int, Known]:
    """What a run before this one in the workdir has found of the parts of these files."""
    try:
      kept = json.loads(self._file.read_text("utf-8"))
    except FileNotFoundError:
      return {}
    if kept["stream"] != self._fingerprint:  # of other files: the run is refused, or told to go on with them
      return {}
    return {int(part): Known(*known) for part, known in kept["parts"].items()}

  def _keep(self, part: int, found: Known) -> None:
    """Writes down what was read of a part, on a disk before a row of it is trained.

    Raises:
      DataError: it is not what it was.
    """
    with self._writing:
      if part in self._known and self._known[part] != found:
        names = ", ".join(file.name for file in self._parts[part][:3])
        raise DataError(f"source {self._name!r}: the content of {names} is not what this run has read of it before. "
                        "Restore the file, or use a new --workdir.")
      if part not in self._known:
        self._known[part] = found
        self._file.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(self._file, json.dumps({"stream": self._fingerprint, "parts": self._known}, indent=1))
