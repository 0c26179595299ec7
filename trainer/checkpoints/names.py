"""Which folders are checkpoints: those named by a step, and those that were set aside."""

import os
import re
from pathlib import Path

from trainer.errors import ConfigError

ASIDE = ".unreadable"


def listed(directory: Path) -> list[int]:
  """Steps of the checkpoints in a folder, oldest first; [] if there is no such folder.

  Raises:
    OSError: nobody can say now.
  """
  try:
    return sorted(int(name) for name in os.listdir(directory) if re.fullmatch(r"\d+", name))
  except (FileNotFoundError, NotADirectoryError):
    return []


def set_aside(directory: Path) -> list[str]:
  """Names of the checkpoints that were set aside."""
  return sorted(path.name for path in directory.glob(f"*{ASIDE}*"))


def find(path: str) -> Path:
  """The checkpoint folder meant by a workdir (its newest one), its `checkpoints` folder, or one checkpoint.

  Raises:
    ConfigError: if there is none.
  """
  given = Path(path).expanduser().absolute()
  if (given / "state").is_dir():
    return given
  aside = ""
  for folder in (given / "checkpoints", given):
    if steps := listed(folder):
      return folder / str(max(steps))
    aside = aside or ", ".join(set_aside(folder))
  what = "does not exist" if not given.exists() else "holds no checkpoint" + (
      f" but those that were set aside as damaged ({aside})" if aside else "")
  raise ConfigError(f"{given} {what}: give a workdir, or one of its checkpoints (WORKDIR/checkpoints/STEP).")
