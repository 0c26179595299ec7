"""Files that are read before all of them is there: any bytes of them on demand, or from the beginning as they arrive.

A file that is on this machine, or whose copy is there (urls.py), is read where it lies.
"""

import functools
import io
import os
import threading
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from tqdm import tqdm

from input_pipeline import remote, urls
from input_pipeline.files import open_binary
from trainer.errors import DataError

# Seconds between looks at whether more has arrived.
LOOK = 0.05
# Copies that are being made, each once in this process, whoever reads them.
_fetching: dict[Path, "_Fetching"] = {}
_lock = threading.Lock()


class Ranges(Protocol):
  """A file any bytes of which can be had. `kept`: a folder for pieces of it, which need not be fetched twice then."""

  size: int
  kept: Path | None

  def read(self, begin: int, end: int) -> bytes:
    """Bytes `begin` to `end`, which are in the file. Raises DataError: they cannot be had."""

  def check(self) -> None:
    """Raises DataError: the file is not the version that was listed."""


class _Here:

  def __init__(self, path: Path):
    self._path, self.size = path, os.path.getsize(path)
    self.kept: Path | None = None

  def read(self, begin: int, end: int) -> bytes:
    with open_binary(self._path) as file:
      file.seek(begin)
      return file.read(end - begin)

  def check(self) -> None:
    pass


class _Elsewhere:

  def __init__(self, fs: Any, file: remote.Remote, copy: Path):
    self._fs, self._file, self.size = fs, file, file.size or 0
    self.kept: Path | None = copy.with_name(f"{copy.name}.pieces")

  def read(self, begin: int, end: int) -> bytes:
    data = bytearray()
    with tqdm(total=end - begin, desc=f"fetching of {self._file.name}", unit="B", unit_scale=True, leave=False,
              disable=None if end - begin > remote.RANGE else True) as bar:
      for at in range(begin, end, remote.RANGE):
        data += remote.read_range(self._fs, self._file, at, min(at + remote.RANGE, end))
        bar.update(len(data) - bar.n)
    return bytes(data)

  def check(self) -> None:
    if remote.is_changed(self._fs, self._file):
      raise remote.change_of(self._file)


def ranges(path: Path) -> Ranges | None:
  """The file, or the file that `path` was listed as the copy of; None: its server sends whole files only."""
  listed = urls.listed_for(path)
  if listed is None or path.exists():
    return _Here(path)
  fs = _store(listed[0])
  return _Elsewhere(fs, listed[1], path) if remote.knows_ranges(fs, listed[1]) else None


@functools.lru_cache(maxsize=16)
def _store(url: str) -> Any:
  """The file system of an address."""
  return remote.open_url(url)[0]


def check(path: Path) -> None:
  """Raises DataError: of what is being fetched for this copy, the store has another version by now."""
  listed = urls.listed_for(path)
  if listed is not None and not path.exists() and remote.is_changed(_store(listed[0]), listed[1]):
    raise remote.change_of(listed[1])


def arriving(path: Path, stop: threading.Event) -> BinaryIO:
  """The file from its beginning on; its copy is made meanwhile, until `stop` is set. Reading raises DataError then, and
  where the copy cannot be made."""
  listed = urls.listed_for(path)
  return open_binary(path) if listed is None or path.exists() else _Arriving(*listed, path, stop)  # type: ignore


class _Fetching:
  """A copy that is being made; `done` is set when it is, or when `stop` was set, or with an `error`."""

  def __init__(self, url: str, file: remote.Remote, copy: Path, stop: threading.Event):
    self.done, self.error = threading.Event(), None

    def make() -> None:
      try:
        urls.fetch_all(url, [(file, copy)], 1, stop)
      except BaseException as e:
        self.error = e
      finally:
        self.done.set()

    threading.Thread(target=make, daemon=True).start()


class _Arriving(io.RawIOBase):
  """What has arrived of a copy, whoever fetches it; more is waited for."""

  def __init__(self, url: str, file: remote.Remote, copy: Path, stop: threading.Event):
    self._url, self._file, self._copy, self._stop = url, file, copy, stop
    self._raw: BinaryIO | None = None

  def readable(self) -> bool:
    return True

  def tell(self) -> int:
    return 0 if self._raw is None else self._raw.tell()

  def read(self, size: int = -1) -> bytes:
    while True:
      whole = self._copy.exists()  # asked first, so that nothing arrives between
      if data := self._arrived(size):
        return data
      if whole:
        return b""
      with _lock:
        if self._copy not in _fetching or _fetching[self._copy].done.is_set():  # another's end is none for this one
          _fetching[self._copy] = _Fetching(self._url, self._file, self._copy, self._stop)
        fetching = _fetching[self._copy]
      fetching.done.wait(LOOK)
      if fetching.error is not None:
        raise fetching.error
      if self._stop.is_set():
        raise DataError("Stopped while files were fetched.")

  def _arrived(self, size: int) -> bytes:
    for path in (urls.unfinished(self._copy), self._copy):
      if self._raw is None and path.exists():
        self._raw = open_binary(path)
    return b"" if self._raw is None else self._raw.read(size)

  def close(self) -> None:
    if self._raw is not None:
      self._raw.close()
    super().close()
