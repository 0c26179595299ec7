"""Folders of runs, which may lie among the data: what a run writes is not what it reads."""

import datetime
import functools
import os
from pathlib import Path

from absl import logging

# A run's folder has this file, with the time when it was begun.
STARTED = "started"
# So many folders are named in a message.
SHOWN = 3


def began(workdir: str | Path) -> float | None:
  """Seconds since 1970 when the run of this folder was begun, or None where there is none (or its file is cut)."""
  try:
    return datetime.datetime.fromisoformat(Path(workdir, STARTED).read_text(encoding="ascii").strip()).timestamp()
  except (OSError, ValueError, OverflowError):
    return None


def begin(workdir: str | Path, seconds: float) -> None:
  """Notes when the run of this folder was begun."""
  text = datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()
  Path(workdir, STARTED).write_text(text + "\n", encoding="ascii")


def without_theirs(paths: list[str], base: str, key: str) -> list[str]:
  """Those of the paths, all below `base`, that do not lie in the folder of a run below `base`; how many do is told.
  Where `base` itself is a run's folder or within one, what is in it is meant."""

  @functools.cache
  def of_run(folder: str) -> bool:
    if not folder or os.path.samefile(folder, base):
      return False
    if began(folder) is None:
      return of_run(os.path.dirname(folder))
    found.append(folder)
    return True

  found: list[str] = []
  kept = [path for path in paths if not of_run(os.path.dirname(path))]
  if found:
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    logging.warning("%s: %d files are of runs, which wrote them into %s%s, and are not read. To read those of a run, "
                    "name its folder.", key, len(paths) - len(kept), ", ".join(sorted(found)[:SHOWN]), more)
  return kept
