"""The parts that a stream is read in (streams.py): some files, or a piece of each of some files.

Which files are read together, and in which order, follows from the seed and their names. Files that are cut (pieces.py)
are read from their beginning to their end, side by side: part k has piece k of each that has as many. So what comes
first of a file is all that the first step waits for, by whatever way the file comes; and since how many pieces a file
has is seen at its end alone, no file must be looked into before its turn. What a whole index would give, rows mixed
over all of a file from the first epoch on, is not had: rows are mixed in a part, and over as many files as are read
side by side. Later epochs take all parts in another order.
"""

import contextlib
import hashlib
import json
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from input_pipeline.files import File
from input_pipeline.pieces import PACKED, Cutter
from input_pipeline.sources.sources import Listed, Source
from trainer.errors import ConfigError

# Bytes of text that a byte of a packed file is taken for, where progress is shown before its end is known.
UNPACKED = 4
# A group of files, and which of their pieces it is; 0 where files are not cut.
Part = tuple[int, int]


def groups_of(source: Source, cfg: ConfigDict, seed: int) -> list[list[Listed]]:
  """Files that are read together, none of them fetched, in an order that follows from the seed and their names.

  Raises:
    ConfigError: the source has no files, or they cannot be cut.
    DataError: they cannot be listed.
  """
  key = f"input.sources.{source.name}"
  if cfg.stream_bytes and source.cuts is None:
    raise ConfigError(f"{key}.stream_bytes is {cfg.stream_bytes}, but this source's files (type {cfg.type!r}) are not "
                      "cut into pieces. Those of types 'jsonl' (without rows_key), 'csv', 'parquet', and 'text' with "
                      "documents='line' or 'paragraph' are. Use stream_bytes=0, with which a part is whole files.")
  files = source.listed()
  if not files:
    raise ConfigError(f"{key}.stream_files is {cfg.stream_files}, but type {cfg.type!r} has no files. Use 0.")
  files = sorted(files, key=lambda file: (draw(seed, file.name), file.name))
  return [files[at:at + cfg.stream_files] for at in range(0, len(files), cfg.stream_files)]


class Parts:
  """The parts of a source. Args: see `groups_of`, and what it raises."""

  def __init__(self, source: Source, cfg: ConfigDict, seed: int):
    self.groups, self._source, self._bytes = groups_of(source, cfg, seed), source, cfg.stream_bytes
    self._cutter = Cutter(str(source.cuts), cfg.stream_bytes) if cfg.stream_bytes else None
    self.cut = self._cutter is not None

  @contextlib.contextmanager
  def open(self, part: Part, stop: threading.Event) -> Iterator[tuple[Source, bool]]:
    """(the source of what a part holds, whether it is the last of its files), until `stop` is set.

    Raises:
      DataError: see `Cutter.pieces`.
    """
    files = self.groups[part[0]]
    if self._cutter is None:
      yield self._source.part(files, stop), True
      return
    with tempfile.TemporaryDirectory(prefix="weft-") as scratch:
      pieces = self._cutter.pieces(files, part[1], Path(scratch), stop)
      shown = {str(piece.path): piece.shown for piece in pieces}
      yield (self._source.of(lambda: [File(piece.name, piece.path) for piece in pieces], shown),
             all(piece.last for piece in pieces))

  def expected(self, group: int) -> int:
    """About how many parts a group of files has."""
    if not self.cut:
      return 1
    packed = (*PACKED, ".parquet")
    sizes = [(file.size or 0) * (UNPACKED if file.path.suffix in packed else 1) for file in self.groups[group]]
    return max(1, -(-max(sizes) // self._bytes))

  def named(self, part: Part) -> str:
    """For messages."""
    names = ", ".join(file.shown for file in self.groups[part[0]][:3])
    return f"{names}, piece {part[1]} (from 0) of {self._bytes:,} bytes," if self.cut else names


@contextlib.contextmanager
def first_part(source: Source, config: ConfigDict) -> Iterator[Source]:
  """The first part of a source that is a stream; else all of it. Raises: see `Parts`."""
  if not (cfg := config.input.sources[source.name]).stream_files:
    yield source
    return
  stop = threading.Event()
  try:
    with Parts(source, cfg, config.seed).open((0, 0), stop) as (part, _):
      yield part
  finally:
    stop.set()


def draw(*of: Any) -> bytes:
  """A number that follows from `of`, on every machine and for years."""
  return hashlib.blake2b(json.dumps(of).encode(), digest_size=16).digest()
