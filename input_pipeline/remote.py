"""What stores of files are asked (by fsspec), again where it may help: what they say of a file, and bytes of it."""

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from absl import logging

from input_pipeline import once
from trainer.errors import DataError

# Bytes of one request, and files that are fetched at a time.
RANGE, AT_ONCE = 8 << 20, 8
# Bytes that are taken at a time of an answer that is a whole file.
PIECE = 1 << 18
# Seconds between two tries of a request that failed; a request that brings something begins them anew.
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)
# Seconds without a byte after which a request has failed.
SILENCE = 60.0
# What must be installed for a protocol.
PACKAGES = {"http": "aiohttp requests", "https": "aiohttp requests", "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs",
            "gcs": "gcsfs", "hf": "huggingface_hub", "az": "adlfs", "abfs": "adlfs"}
# What stores say of a file's content, as their libraries call it; the first that is there counts. Lists of folders may
# write times otherwise than what is said of a single file.
_OF_CONTENT = ("ETag", "etag", "md5Hash", "blob_id", "Content-MD5", "Digest")
_TAGS = (*_OF_CONTENT, "generation", "LastModified", "Last-Modified", "updated", "mtime", "created")
URL = re.compile(r"([a-zA-Z][\w+.-]*)://")
_PACKED = re.compile(r"\.(gz|zst)$", re.IGNORECASE)
# What is left out of messages.
_HIDDEN = re.compile(r"(?<=://)[^/\s@'\"]*@|\?[^\s'\")]*")


# Versions of files whose servers send them whole.
_without_ranges: set[str] = set()


class Remote(NamedTuple):
  """A file that is elsewhere: its name as `files.File` has it, its address for its library and for people, its size
  (None: the server does not say) and a hash of the address and of what is said of the content."""

  name: str
  path: str
  shown: str
  size: int | None
  version: str


class NoRangesError(Exception):
  """A server that sends whole files only."""


def shown(text: str) -> str:
  """An address, or a message with one, without users, passwords and queries."""
  return _HIDDEN.sub(lambda found: "?…" if found[0].startswith("?") else "", text)


def open_url(url: str) -> tuple[Any, str]:
  """(file system, path in it); nothing is remembered of what was listed before."""
  protocol = URL.match(url)[1].lower()
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


def described(fs: Any, url: str, name: str, path: str, about: dict[str, Any]) -> Remote:
  """The file with what identifies its content, which not every listing says."""
  if about.get("size") is None or not any(tag in about for tag in _OF_CONTENT):
    about = tried(lambda: fs.info(path), url)
  tag = next((str(about[tag]) for tag in _TAGS if about.get(tag) is not None), None)
  if tag is None:
    once.warning("%s: the server gives neither an ETag nor a time, so that a change that keeps the size is not seen.",
                 shown(path))
  size = about.get("size")
  identity = json.dumps([fs.unstrip_protocol(path), tag, size])
  version = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
  return Remote(name, path, shown(fs.unstrip_protocol(path)), size, version)


def tried(request: Callable[[], Any], url: str) -> Any:
  """What a request gives, which is tried again where it may help.

  Raises:
    FileNotFoundError: there is no such file.
    DataError: it failed too often, or was denied.
  """
  for pause in (*PAUSES, None):
    try:
      return request()
    except (DataError, NoRangesError):
      raise
    except Exception as e:  # each library has its own
      _wait(e, pause, url)
  raise AssertionError("unreachable")


def _wait(e: Exception, pause: float | None, url: str) -> None:
  """Waits after an error of a request, to try it again. Raises: see `tried`; None: it was the last."""
  if isinstance(e, ImportError):
    raise DataError(f"{shown(url)}: {e}") from e
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


# ----------------------------------------------------------------------------------------------
# Their bytes.


def read_from(fs: Any, file: Remote, at: int) -> Iterator[bytes]:
  """The bytes of a file from `at` on, some at a time: by ranges, or as they come where the server knows none.

  Raises:
    DataError: see `read_range`.
  """
  try:
    while file.size is not None and at < file.size and file.version not in _without_ranges:
      data = read_range(fs, file, at, min(at + RANGE, file.size))
      yield data
      at += len(data)
  except NoRangesError:
    pass
  pauses = iter(PAUSES)
  # Servers may call what a packed file is the encoding in which they send it, and aiohttp would send it on unpacked.
  as_it_is = {"auto_decompress": False} if file.path.startswith("http") and _PACKED.search(file.name) else {}
  while file.size is None or at < file.size:
    try:
      with fs.open(file.path, block_size=0, size=file.size or 1, **as_it_is) as answer:
        passed = 0
        while data := answer.read(PIECE):
          passed += len(data)
          if passed > at:  # what came by a request before this one is not wanted again
            yield data[at - passed:]
            at, pauses = passed, iter(PAUSES)
      if file.size in (None, passed):
        return
      raise EOFError(f"{passed} bytes came of {file.size}")
    except Exception as e:  # each library has its own
      try:
        _wait(e, next(pauses, None), f"{file.shown}, from byte {at:,}")
      except FileNotFoundError as gone:
        raise change_of(file) from gone


def knows_ranges(fs: Any, file: Remote) -> bool:
  """Whether parts of a file can be had. Raises DataError: see `read_range`."""
  if file.size is None:
    return False
  try:
    if file.size > 1 and file.version not in _without_ranges:
      read_range(fs, file, 1, 2)
  except NoRangesError:
    pass
  return file.version not in _without_ranges


def read_range(fs: Any, file: Remote, begin: int, end: int) -> bytes:
  """Bytes of a file whose size is known.

  Raises:
    NoRangesError: the server sends whole files only.
    DataError: they cannot be had, or are those of another version.
  """
  try:
    return tried(lambda: _range(fs, file, begin, end), f"{file.shown}, bytes {begin:,} to {end:,}")
  except FileNotFoundError as e:
    raise change_of(file) from e


def _range(fs: Any, file: Remote, begin: int, end: int) -> bytes:
  """The same by one request. Raises EOFError: fewer came than there should be."""
  if file.path.startswith("http"):  # what `cat_file` gives of a server without ranges is the whole file
    try:
      with fs.open(file.path, cache_type="none", size=file.size) as answer:
        answer.seek(begin)
        data = answer.read(end - begin)
    except ValueError as e:
      _without_ranges.add(file.version)
      raise NoRangesError(file.shown) from e
  else:
    data = fs.cat_file(file.path, start=begin, end=end)
  if len(data) != end - begin:
    if is_changed(fs, file):
      raise change_of(file)
    raise EOFError(f"{len(data)} bytes came of {end - begin}")
  return data


def is_changed(fs: Any, file: Remote) -> bool:
  """Whether the store has another version of the file by now, or none, as far as it says."""
  try:
    return described(fs, file.shown, file.name, file.path, {}).version != file.version
  except FileNotFoundError:
    return True


def change_of(file: Remote) -> DataError:
  return DataError(f"{file.shown}: changed while it was read. Run the command again.")
