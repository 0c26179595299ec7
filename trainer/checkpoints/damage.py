"""Why a checkpoint cannot be read: because it is damaged, which must be proven, or for a reason that may pass.

Proof is that the seal or a checksum does not match, that a file is missing or shorter than what is recorded of it, or
that it does not decode. All else (a file system that is away for a moment, too many open files, too little memory, an
error of a device or of a program) says nothing about the checkpoint: the run stops, and nothing is touched.
"""

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from trainer.checkpoints.checksums import checked_meta
from trainer.distributed import processes
from trainer.errors import CheckpointError, ConfigError, Damaged

# What TensorStore says of contents, by its code or in words; of the system's errors it gives the number, too.
_OF_CONTENTS = re.compile(r"^DATA_LOSS|^OUT_OF_RANGE|^NOT_FOUND|Error decoding|decompress|checksum verification failed")
_OF_SYSTEM = "os_error_code"
_FILE, _RANGE = re.compile(r'local file "([^"]+)"'), re.compile(r"[Bb]yte range \[\d+, (\d+)\)")
# What processes say to one another, the worse the later in the alphabet.
DAMAGED, UNREAD = "is damaged as it is read", "was not read"
# These end a run in ways of their own.
_OTHERS = (ConfigError, CheckpointError, MemoryError, jax.errors.JaxRuntimeError)


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
  """Within it a checkpoint is read.

  Raises:
    Damaged: that is proven.
    CheckpointError: it could not be read for another reason.
  """
  try:
    look(folder)
    yield
  except _OTHERS:
    raise
  except Exception as error:
    if proof := _proof(folder, error):
      raise Damaged(f"{folder} is damaged: {proof}") from error
    # Of a mistake in a program the message is none for people.
    reason = in_short(error) if isinstance(error, (OSError, ValueError)) or type(error) is Exception else (
        "an error in the program, which --verbosity=1 shows")
    raise CheckpointError(
        f"{folder} could not be read: {type(error).__name__}: {reason}\nThat is no proof of damage, so that "
        "nothing was changed. Run the same command again when the cause is gone. To do without this checkpoint, move "
        "its folder away: the one before it is then the newest.") from error


@contextlib.contextmanager
def together(folder: Path) -> Iterator[None]:
  """With several processes: what one of them cannot read, none has read. No collective may be in it.

  Raises:
    Damaged, CheckpointError: as in one of them.
  """
  error: Exception | None = None
  try:
    yield
  except Exception as caught:
    error = caught
  kind = "" if error is None else DAMAGED if isinstance(error, Damaged) else UNREAD
  kinds = processes.said_by_all(kind)
  worst = max(kinds)
  if error is not None and kind == worst:
    raise error
  if worst:
    which = ", ".join(str(index) for index, said in enumerate(kinds) if said == worst)
    raise (Damaged if worst == DAMAGED else CheckpointError)(f"{folder} {worst} by process {which}, which says why")


def look(folder: Path) -> None:
  """Refuses a checkpoint of which a part is missing, or does not say what it must; its arrays are not read.

  Raises:
    Damaged: naming the file.
    OSError: it cannot be looked at now.
  """
  os.stat(folder)
  try:
    meta = meta_of(folder)
    _look_at_arrays(folder / "state", meta.get("checksums", {}))
    if meta.get("arrays"):
      _look_at_arrays(folder / "arrays", meta["arrays"])
  except Damaged as e:
    raise Damaged(f"{folder} is damaged: {e}") from e


def meta_of(folder: Path) -> dict[str, Any]:
  """What it says of itself; raises as `look` does."""
  return checked_meta(_object(folder / "meta" / "metadata"))


def _look_at_arrays(folder: Path, named: Any) -> None:
  described = _object(folder / "_METADATA")
  try:
    tree = described["tree_metadata"].values()
    names = {"/".join(str(key["key"]) for key in entry["key_metadata"]) for entry in tree}
  except (AttributeError, KeyError, TypeError) as e:
    raise Damaged(f"{folder / '_METADATA'} does not list arrays") from e
  if absent := sorted(set(named) - names):
    raise Damaged(f"{folder / '_METADATA'} lacks {len(absent)} of {len(named)} arrays: {', '.join(absent[:8])}")
  if described.get("use_ocdbt"):
    _there(folder / "manifest.ocdbt")
  more = folder / "array_metadatas"
  for name in sorted(os.listdir(more)) if more.is_dir() else ():
    _object(more / name)


def _there(file: Path) -> int:
  """The size of a file."""
  try:
    found = os.stat(file)
  except (FileNotFoundError, NotADirectoryError) as e:
    raise Damaged(f"{file} is missing") from e
  if not stat.S_ISREG(found.st_mode):
    raise Damaged(f"{file} is not a file")
  return found.st_size


def _object(file: Path) -> dict[str, Any]:
  """The JSON object in a file."""
  _there(file)
  try:
    content = json.loads(file.read_bytes())
  except (ValueError, RecursionError) as e:
    raise Damaged(f"{file} is not JSON") from e
  if not isinstance(content, dict):
    raise Damaged(f"{file} is not a JSON object")
  return content


def _proof(folder: Path, error: Exception) -> str:
  """How the error, and a look at the files, prove that a checkpoint is damaged; "" if they do not."""
  chain: list[BaseException] = [error]
  while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
    chain.append(cause)
  texts = [str(e).partition("[tensorstore_spec")[0].strip() for e in chain]
  if any(isinstance(e, (OSError, MemoryError)) for e in chain) or any(_OF_SYSTEM in str(e) for e in chain):
    return ""
  said = next((text for text in texts if _OF_CONTENTS.search(text)), None)
  if said is None:
    return ""
  files = _FILE.findall(said)
  where = Path(files[-1]) if files else folder
  try:
    if where != folder and not files[-1].endswith("/"):
      size = _there(where)
      if said.startswith("NOT_FOUND"):
        return ""  # it is there now
      if said.startswith("OUT_OF_RANGE"):
        end = max(map(int, _RANGE.findall(said)), default=0)
        return f"{where} has {size:,} bytes of {end:,}" if size < end else ""
  except Damaged as e:
    return str(e)
  except OSError:
    return ""
  return in_short(said.split('": ')[-1])


def in_short(error: Exception | str) -> str:
  """The first line of a message, without its middle if it is long: the cause stands at the end."""
  text = str(error).partition("[tensorstore_spec")[0].strip() or type(error).__name__
  line = text.splitlines()[0]
  return line if len(line) <= 300 else f"{line[:140]} … {line[-140:]}"
