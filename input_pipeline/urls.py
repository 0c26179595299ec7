"""Files that lie elsewhere (gs://, s3://, hf://, https:// and what else fsspec knows), as copies on this machine.

    files = fetch("s3://bucket/data/*.jsonl.gz", "input.sources.web.path", matches, "a .jsonl file", copies=None)

A file is fetched once, in ranges, and read from its copy ever after: `<copies>/<protocol>/<host and folder>/<version>/
<name>`, where the version is a hash of the address and of what the store says of the content (ETag, checksum, time,
size). So rows, their order and the content hashes of caches are those of the same files on a local disk. What a process
that was killed had fetched is gone on from; a file that changes while it is fetched is refused.

Credentials are never part of an address: each protocol's library finds them in the environment.
"""

import contextlib
import contextvars
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from tqdm import tqdm

from input_pipeline.remote import (
  AT_ONCE,
  URL,
  Remote,
  change_of,
  described,
  is_changed,
  open_url,
  read_from,
  shown,
  tried,
)
from trainer.errors import ConfigError, DataError

DEFAULT_COPIES = "~/.cache/weft/data"
# Bytes from which on it is said how to begin before all of them are there.
LARGE = 64 << 20
_SECRET = re.compile(r"[?&](X-Amz-(Signature|Credential|Security-Token)|Signature|sig|[\w-]*token|[\w-]*key|password)=",
                     re.IGNORECASE)


def is_url(path: str) -> bool:
  """Whether a path begins with a protocol."""
  return URL.match(path) is not None


def check(url: str, key: str) -> None:
  """Refuses an address with credentials, which would be written into config.json.

  Raises:
    ConfigError: naming the key.
  """
  if re.match(r"[^/]*//[^/]*@", url) or _SECRET.search(url):
    raise ConfigError(f"{key}: {shown(url)!r} has a user, a password or a signature in it, and would be written into "
                      "config.json, which goes wherever results go. Leave them out; they are found in the environment: "
                      "AWS_PROFILE or AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN, and for https "
                      "~/.netrc.")


def fetch(url: str, key: str, matches: Callable[[str], bool], expected: str, copies: str | None
          ) -> list[tuple[str, Path]]:
  """(name relative to the folder or glob, copy) of each file that a URL names, sorted by name: a file, a folder
  (recursive) or a glob; hidden ones are left out.

  Args:
    key: of the config, for messages. matches, expected: see `files.find_files`.
    copies: the folder that copies are in. Default: DEFAULT_COPIES.

  Raises:
    DataError: a missing package, no such file, a store that does not answer, or a file that changed meanwhile.
  """
  check(url, key)
  files = _listed(url, key, matches, expected)
  folder = Path(os.path.expanduser(copies or DEFAULT_COPIES))
  there = {file: _copy(folder, file) for file in files}
  if _lists_only.get():
    _later.update({copy: (url, file) for file, copy in there.items()})
    return [(file.name, copy) for file, copy in there.items()]
  missing = [file for file, copy in there.items() if not copy.exists()]
  if missing:
    if sum(file.size or 0 for file in missing) >= LARGE and key.startswith("input.sources."):
      cut = "".join(f" --config.{key.removesuffix('path')}{n}" for n in ("stream_files=1", "stream_bytes=8000000"))
      tqdm.write(f"{key}: all of it is fetched and tokenized before the first step. Texts and conversations that are "
                 f"trained on can begin with some megabytes:{cut} (docs/data.md#streams).", file=sys.stderr)
    fetch_all(url, [(file, there[file]) for file in missing], len(files))
  return [(file.name, copy) for file, copy in there.items()]


# Whether it is within `later`.
_lists_only: contextvars.ContextVar[bool] = contextvars.ContextVar("lists_only", default=False)
# The address and the file of each copy that was listed only.
_later: dict[Path, tuple[str, Remote]] = {}


def listed_for(copy: Path) -> tuple[str, Remote] | None:
  """(address, file) of a copy that was listed in `later`; None: it was not, being on this machine."""
  return _later.get(copy)


@contextlib.contextmanager
def later() -> Iterator[None]:
  """In it `fetch` only lists, for `listed_for` and `fetch_listed`."""
  token = _lists_only.set(True)
  try:
    yield
  finally:
    _lists_only.reset(token)


def fetch_listed(copies: Iterable[Path], stop: threading.Event | None = None) -> None:
  """Fetches those copies that were listed in `later` and are not there, unless `stop` is set meanwhile.

  Raises:
    DataError: see `fetch`; it was stopped.
  """
  missing: dict[str, list[tuple[Remote, Path]]] = {}
  for copy in copies:
    if copy in _later and not copy.exists():
      url, file = _later[copy]
      missing.setdefault(url, []).append((file, copy))
  for url, files in missing.items():
    fetch_all(url, files, len(files), stop)
  if stop is not None and stop.is_set():
    raise DataError("Stopped while files were fetched.")


# ----------------------------------------------------------------------------------------------
# Which files there are.


def _listed(url: str, key: str, matches: Callable[[str], bool], expected: str) -> list[Remote]:
  """The files that a URL names, sorted by name."""
  fs, path = open_url(url)
  is_http = url.lower().startswith("http")
  magic = re.search(r"[*\[]" if is_http else r"[*?\[]", path)
  address = f"{key}: {shown(url)!r}"
  try:
    if magic:
      base, found = path[:path.rfind("/", 0, magic.start()) + 1], tried(lambda: fs.glob(path, detail=True), url)
    else:
      about = {} if is_http and path.endswith("/") else tried(lambda: fs.info(path), url)
      if about.get("type", "directory") == "file":
        return [described(fs, url, PurePosixPath(path.partition("?")[0]).name, path, about)]
      if is_http:  # `find` passes over what does not answer
        tried(lambda: fs.ls(path, detail=False), url)
      base, found = path.rstrip("/") + "/", tried(lambda: fs.find(path, detail=True), url)
  except FileNotFoundError as e:
    raise DataError(f"{address} does not exist. Name {expected}, a folder or a glob.") from e
  names = {where[len(base):]: (where, about) for where, about in found.items()
           if where.startswith(base) and about.get("type") == "file"}
  names = {name: entry for name, entry in names.items() if name and not re.search(r"(^|/)\.", name)}
  if names.keys() & {"state.json", "dataset_dict.json"} and any(name.endswith(".arrow") for name in names):
    raise DataError(f"{address} is a folder that datasets' save_to_disk wrote, which is read from a local disk alone. "
                    "Copy it, or name its .arrow files by a glob.")
  usable = sorted(name for name in names if matches(name))
  if not usable:
    some = ", ".join(sorted(names)[:5]) or "no files"
    raise DataError(f"{address} has {'only ' if names else ''}{some}; expected {expected}.")
  with ThreadPoolExecutor(AT_ONCE) as threads:
    return list(threads.map(lambda name: described(fs, url, name, *names[name]), usable))


def _copy(folder: Path, file: Remote) -> Path:
  """Where the copy of a file is; the last part of its path is that of the address, with its suffixes."""
  protocol, _, rest = file.shown.partition("://")
  *above, name = [part for part in rest.removesuffix("?…").split("/") if part not in ("", ".", "..")]
  return folder.joinpath(protocol, *above, file.version, name)


# ----------------------------------------------------------------------------------------------
# Their copies.


def fetch_all(url: str, files: list[tuple[Remote, Path]], total: int, given_up: threading.Event | None = None) -> None:
  """Makes copies of files, some at a time, until it is given up."""
  sizes = [file.size or 0 for file, _ in files]
  already = [_size(unfinished(copy)) for _, copy in files]
  tqdm.write(f"{shown(url)}: fetching {len(files):,} of {total:,} files, {sum(sizes) / 1e6:,.1f} MB, of which "
             f"{sum(already) / 1e6:,.1f} MB are there.", file=sys.stderr)
  fs, _ = open_url(url)
  failed = threading.Event()

  def stopped() -> bool:
    return failed.is_set() or given_up is not None and given_up.is_set()

  with tqdm(total=sum(sizes) or None, initial=sum(already), desc="fetching", unit="B", unit_scale=True,
            disable=None) as bar, ThreadPoolExecutor(AT_ONCE) as threads:
    waiting = [threads.submit(_fetch, fs, file, copy, bar.update, stopped) for file, copy in files]
    try:
      for each in waiting:
        each.result()
    finally:  # after an error the others end with the range that they are at
      failed.set()


def unfinished(copy: Path) -> Path:
  """Where what has come of a copy is until it is whole."""
  return copy.with_name(f".{copy.name}.part")


def _size(path: Path) -> int:
  return path.stat().st_size if path.exists() else 0


@contextlib.contextmanager
def _alone(copy: Path) -> Iterator[None]:
  """No other process fetches the same file meanwhile. A lock is gone with the process that held it.

  Raises:
    DataError: the copy cannot be written.
  """
  import filelock
  try:
    copy.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(copy.with_name(f".{copy.name}.lock")):
      yield
  except OSError as e:
    raise DataError(f"{copy}: the copy cannot be written: {e.strerror or e}. Make room, or name another folder with "
                    "input.sources.NAME.copies.") from e


def _fetch(fs: Any, file: Remote, copy: Path, advance: Callable[[int], Any], stopped: Callable[[], bool]
           ) -> None:
  """Makes the copy of a file, going on from what is there of it."""
  if stopped():
    return
  with _alone(copy):
    if copy.exists():  # another process was first
      return
    with open(unfinished(copy), "ab") as part:
      for data in read_from(fs, file, part.tell()):
        part.write(data)
        part.flush()
        advance(len(data))
        if stopped():
          return
      os.fsync(part.fileno())
    if is_changed(fs, file) or file.size not in (None, _size(unfinished(copy))):
      unfinished(copy).unlink()
      raise change_of(file)
    os.replace(unfinished(copy), copy)
