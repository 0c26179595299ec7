"""Folders of arrays that appear complete or not at all, and whose damage is found.

A folder holds `<name>.bin` for each of its arrays, and `meta.json`, from which their types and lengths follow, with the
`checksums` of each.
"""

import contextlib
import errno
import json
import os
import shutil
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from absl import logging

# Checksums cover blocks of so many bytes; of a large file only so many, evenly spaced, are read on opening.
BLOCK_BYTES, BLOCKS_CHECKED = 16 << 20, 64
# A temporary folder untouched for so long belongs to a build that died.
ABANDONED_SECONDS = 6 * 3600
# From what meta.json says to (dtype, length) of each array.
Arrays = Callable[[dict], dict[str, tuple[str, int]]]


@contextlib.contextmanager
def new(folder: Path, what: str) -> Iterator[Path]:
  """A temporary folder beside `folder`, to be renamed to it when it is complete; gone afterwards in any case.

  Raises:
    OSError: `what` cannot be written there; the message names the folder.
  """
  cache_dir = folder.parent
  try:
    cache_dir.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(cache_dir)
    temporary = cache_dir / f".tmp-{folder.name}-{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"
    temporary.mkdir()  # not mkdtemp, whose folders are private: a cache may be shared
    try:
      yield temporary
    finally:
      shutil.rmtree(temporary, ignore_errors=True)
  except OSError as e:
    full = "the disk is full" if e.errno in (errno.ENOSPC, errno.EDQUOT) else e.strerror or str(e)
    raise OSError(
        e.errno, f"cannot write {what}: {full}. Make room, or set input.cache_dir to another folder", str(cache_dir),
    ) from e


def publish(temporary: Path, folder: Path, arrays: Arrays) -> None:
  """Gives a complete build its final name, unless another process was first."""
  try:
    os.rename(temporary, folder)
  except OSError:
    if find_damage(folder, arrays) is not None:
      raise
    logging.info("%s was built by another process meanwhile; using that.", folder)


def find_damage(folder: Path, arrays: Arrays) -> str | None:
  """What is wrong with a folder, or None. Sizes are always checked, checksums of large files in part."""
  try:
    meta = json.loads((folder / "meta.json").read_text("utf-8"))
    for name, (dtype, length) in arrays(meta).items():
      file, size = folder / f"{name}.bin", length * np.dtype(dtype).itemsize
      if file.stat().st_size != size:
        return f"{file.name} has {file.stat().st_size} bytes instead of {size}"
      sums = meta["checksums"][name]
      checked = range(len(sums))
      if len(sums) > BLOCKS_CHECKED:
        checked = np.linspace(0, len(sums) - 1, BLOCKS_CHECKED).astype(int).tolist()
      with open(file, "rb") as f:
        for block in checked:
          f.seek(block * BLOCK_BYTES)
          if zlib.crc32(f.read(BLOCK_BYTES)) != sums[block]:
            return f"{file.name} does not match its checksum near byte {block * BLOCK_BYTES}"
  except FileNotFoundError as e:
    return f"{Path(e.filename).name} is missing"
  except (ValueError, KeyError, TypeError) as e:
    return f"meta.json is not readable: {e!r}"
  return None


def block_sums(file: BinaryIO) -> list[int]:
  """CRC-32 of every block of an open file."""
  file.seek(0)
  return [zlib.crc32(block) for block in iter(lambda: file.read(BLOCK_BYTES), b"")]


def remove(folder: Path) -> None:
  """Removes a damaged folder, out of the way of other processes first."""
  aside = folder.with_name(f".tmp-{folder.name}-damaged-{os.getpid()}-{time.time_ns()}")
  try:
    os.rename(folder, aside)
  except FileNotFoundError:
    return  # another process was first
  shutil.rmtree(aside, ignore_errors=True)


def _remove_abandoned(cache_dir: Path) -> None:
  """Removes what builds that died have left."""
  for folder in cache_dir.glob(".tmp-*"):
    try:
      newest = max(p.stat().st_mtime for p in (folder, *folder.iterdir()))
    except OSError:
      continue  # its build has just ended
    if time.time() - newest > ABANDONED_SECONDS:
      logging.warning("removing %s, which an unfinished build has left.", folder)
      shutil.rmtree(folder, ignore_errors=True)
