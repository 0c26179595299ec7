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
import hashlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from absl import logging
from tqdm import tqdm

from input_pipeline import once
from trainer.errors import ConfigError, DataError

# Bytes of one request, and files that are fetched at a time.
RANGE, AT_ONCE = 8 << 20, 8
# Seconds between two tries of a request that failed; a request that brings something begins them anew.
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)
# Seconds without a byte after which a request has failed.
SILENCE = 60.0
DEFAULT_COPIES = "~/.cache/weft/data"
# What must be installed for a protocol.
PACKAGES = {"http": "aiohttp requests", "https": "aiohttp requests", "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs",
            "gcs": "gcsfs", "hf": "huggingface_hub", "az": "adlfs", "abfs": "adlfs"}
# What stores say of a file's content, as their libraries call it; the first that is there counts. Lists of folders may
# write times otherwise than what is said of a single file.
_OF_CONTENT = ("ETag", "etag", "md5Hash", "blob_id", "Content-MD5", "Digest")
_TAGS = (*_OF_CONTENT, "generation", "LastModified", "Last-Modified", "updated", "mtime", "created")
_URL = re.compile(r"([a-zA-Z][\w+.-]*)://")
_SECRET = re.compile(r"[?&](X-Amz-(Signature|Credential|Security-Token)|Signature|sig|[\w-]*token|[\w-]*key|password)=",
                     re.IGNORECASE)
# What is left out of messages.
_HIDDEN = re.compile(r"(?<=://)[^/\s@'\"]*@|\?[^\s'\")]*")


class Remote(NamedTuple):
  """A file that is elsewhere: its name as `files.File` has it, its address for its library and for people, its size
  (None: the server does not say) and a hash of the address and of what is said of the content."""

  name: str
  path: str
  shown: str
  size: int | None
  version: str


def is_url(path: str) -> bool:
  """Whether a path begins with a protocol."""
  return _URL.match(path) is not None


def shown(text: str) -> str:
  """An address, or a message with one, without users, passwords and queries."""
  return _HIDDEN.sub(lambda found: "?…" if found[0].startswith("?") else "", text)


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
  sizes = _sizes.get()
  if sizes is not None:
    sizes.update({copy: file.size for file, copy in there.items()})
    _later.update({copy: (url, file) for file, copy in there.items()})
    return [(file.name, copy) for file, copy in there.items()]
  missing = [file for file, copy in there.items() if not copy.exists()]
  if missing:
    _fetch_all(url, [(file, there[file]) for file in missing], len(files))
  return [(file.name, copy) for file, copy in there.items()]


# Within `later`, the sizes of what was listed.
_sizes: contextvars.ContextVar[dict[Path, int | None] | None] = contextvars.ContextVar("sizes", default=None)
# The address and the file of each copy that was listed only.
_later: dict[Path, tuple[str, Remote]] = {}


@contextlib.contextmanager
def later() -> Iterator[dict[Path, int | None]]:
  """In it `fetch` only lists, for `fetch_listed`; gives the size of the file of each copy (None: it is not told)."""
  sizes: dict[Path, int | None] = {}
  token = _sizes.set(sizes)
  try:
    yield sizes
  finally:
    _sizes.reset(token)


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
    _fetch_all(url, files, len(files), stop)
  if stop is not None and stop.is_set():
    raise DataError("Stopped while files were fetched.")


# ----------------------------------------------------------------------------------------------
# Which files there are.


def _open(url: str) -> tuple[Any, str]:
  """(file system, path in it); nothing is remembered of what was listed before."""
  protocol = _URL.match(url)[1].lower()
  options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
  try:
    import fsspec
    if protocol in ("http", "https"):
      import aiohttp
      # trust_env: proxies, and ~/.netrc.
      limits = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE, sock_read=SILENCE)
      options["client_kwargs"] = {"trust_env": True, "timeout": limits}
    return fsspec.core.url_to_fs(url, **options)
  except ImportError as e:
    package = PACKAGES.get(protocol, "the package that it names")
    raise DataError(f"{shown(url)}: reading {protocol}:// needs `pip install fsspec {package}` ({e}).") from e
  except ValueError as e:
    raise DataError(f"{shown(url)}: {shown(str(e))}. Protocols are those of fsspec: s3, gs, hf, https, …") from e


def _listed(url: str, key: str, matches: Callable[[str], bool], expected: str) -> list[Remote]:
  """The files that a URL names, sorted by name."""
  fs, path = _open(url)
  is_http = url.lower().startswith("http")
  magic = re.search(r"[*\[]" if is_http else r"[*?\[]", path)
  address = f"{key}: {shown(url)!r}"
  try:
    if magic:
      base, found = path[:path.rfind("/", 0, magic.start()) + 1], _tried(lambda: fs.glob(path, detail=True), url)
    else:
      about = {} if is_http and path.endswith("/") else _tried(lambda: fs.info(path), url)
      if about.get("type", "directory") == "file":
        return [_remote(fs, url, PurePosixPath(path.partition("?")[0]).name, path, about)]
      if is_http:  # `find` passes over what does not answer
        _tried(lambda: fs.ls(path, detail=False), url)
      base, found = path.rstrip("/") + "/", _tried(lambda: fs.find(path, detail=True), url)
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
    return list(threads.map(lambda name: _remote(fs, url, name, *names[name]), usable))


def _remote(fs: Any, url: str, name: str, path: str, about: dict[str, Any]) -> Remote:
  """The file with what identifies its content, which not every listing says."""
  if about.get("size") is None or not any(tag in about for tag in _OF_CONTENT):
    about = _tried(lambda: fs.info(path), url)
  tag = next((str(about[tag]) for tag in _TAGS if about.get(tag) is not None), None)
  if tag is None:
    once.warning("%s: the server gives neither an ETag nor a time, so that a change that keeps the size is not seen.",
                 shown(path))
  size = about.get("size")
  identity = json.dumps([fs.unstrip_protocol(path), tag, size])
  version = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
  return Remote(name, path, shown(fs.unstrip_protocol(path)), size, version)


def _copy(folder: Path, file: Remote) -> Path:
  """Where the copy of a file is; the last part of its path is that of the address, with its suffixes."""
  protocol, _, rest = file.shown.partition("://")
  *above, name = [part for part in rest.removesuffix("?…").split("/") if part not in ("", ".", "..")]
  return folder.joinpath(protocol, *above, file.version, name)


# ----------------------------------------------------------------------------------------------
# Their copies.


def _fetch_all(url: str, files: list[tuple[Remote, Path]], total: int, given_up: threading.Event | None = None) -> None:
  """Makes copies of files, some at a time, until it is given up."""
  sizes = [file.size or 0 for file, _ in files]
  already = [_size(_part(copy)) for _, copy in files]
  tqdm.write(f"{shown(url)}: fetching {len(files):,} of {total:,} files, {sum(sizes) / 1e6:,.1f} MB, of which "
             f"{sum(already) / 1e6:,.1f} MB are there.", file=sys.stderr)
  fs, _ = _open(url)
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


def _part(copy: Path) -> Path:
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
    with open(_part(copy), "ab") as part:
      while file.size is None or part.tell() < file.size:
        if stopped():
          return
        data = _asked(fs, file, part.tell())
        part.write(data)
        part.flush()
        advance(len(data))
        if file.size is None:
          break
      os.fsync(part.fileno())
    if _changed(fs, file) or file.size not in (None, _size(_part(copy))):
      _part(copy).unlink()
      raise _change(file)
    os.replace(_part(copy), copy)


def _asked(fs: Any, file: Remote, at: int) -> bytes:
  """The next bytes of a file, from `at` on. Raises DataError: they cannot be had, or are those of another version."""
  try:
    return _tried(lambda: _range(fs, file, at), file.shown)
  except FileNotFoundError as e:
    raise _change(file) from e


def _range(fs: Any, file: Remote, at: int) -> bytes:
  """The next bytes of a file by one request. Raises EOFError: fewer than there should be."""
  if file.size is None:
    return fs.cat_file(file.path)[at:]
  stop = min(at + RANGE, file.size)
  data = fs.cat_file(file.path, start=at, end=stop)
  if len(data) == file.size and stop - at < file.size:  # a server that knows no ranges sends all of it
    return data[at:]
  if len(data) != stop - at:
    if _changed(fs, file):
      raise _change(file)
    raise EOFError(f"{len(data)} bytes came of {stop - at}")
  return data


def _changed(fs: Any, file: Remote) -> bool:
  """Whether the store has another version of the file by now, as far as it says."""
  return _remote(fs, file.shown, file.name, file.path, {}).version != file.version


def _change(file: Remote) -> DataError:
  return DataError(f"{file.shown}: changed while it was read. Run the command again.")


def _tried(request: Callable[[], Any], url: str) -> Any:
  """What a request gives, which is tried again where it may help.

  Raises:
    FileNotFoundError: there is no such file.
    DataError: it failed too often, or was denied.
  """
  for pause in (*PAUSES, None):
    try:
      return request()
    except DataError:
      raise
    except ImportError as e:
      raise DataError(f"{shown(url)}: {e}") from e
    except Exception as e:  # each library has its own
      error = e.__cause__ if isinstance(e, FileNotFoundError) and e.__cause__ is not None else e
      status = getattr(error, "status", None)
      if isinstance(error, FileNotFoundError) or status == 404:
        raise FileNotFoundError(shown(url)) from None
      reason = f"{type(error).__name__}: {shown(str(error))[:300]}"
      denied = isinstance(error, PermissionError) or status in (400, 401, 403, 405, 410)
    if denied or pause is None:
      tries = "is denied" if denied else f"failed {len(PAUSES) + 1} times in a row"
      raise DataError(f"{shown(url)}: reading it {tries} ({reason}). Credentials come from the environment "
                      "(docs/data.md#data-that-lie-elsewhere); what was fetched is kept.")
    logging.warning("%s: %s; trying again in %g s.", shown(url), reason, pause)
    time.sleep(pause)
  raise AssertionError("unreachable")
