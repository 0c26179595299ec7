"""Files that are whole at any moment: what a reader finds is what was written before, or all of what is written now."""

import os
from pathlib import Path


def write(path: Path, content: str | bytes) -> None:
  """Replaces a file's content; text as UTF-8. A crash in here leaves the old one, and at worst a hidden file beside it.

  Raises:
    OSError: there is no such folder, no room, or no permission.
  """
  temporary = path.with_name(f".{path.name}.{os.getpid()}")
  try:
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(temporary, path)
  except OSError:
    temporary.unlink(missing_ok=True)
    raise
