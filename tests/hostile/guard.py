"""What no input may do, whatever is in it, watched by an audit hook: reach the network, start programs, run code of its
own, write outside the folders of its run.

An audit hook cannot be taken away again, so there is one for the process, which is asleep unless a `Guard` is armed.
"""

import contextlib
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path

import jinja2

ROOT = Path(__file__).resolve().parents[2]
# What hostile code of these tests would be called, so that it is known wherever it is compiled.
CANARY = "pwned"
NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request",
           "ftplib.connect", "http.client.connect")
PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "pty.spawn",
            "webbrowser.open")
# Events whose first argument is a path that is made, changed or removed; of `os.rename` and the like the second, too.
CHANGES = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 1, "os.truncate": 1, "os.chmod": 1, "os.chown": 1,
           "os.utime": 1, "os.rename": 2, "os.link": 2, "shutil.rmtree": 1, "shutil.move": 2}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_JINJA = str(Path(jinja2.__file__).parent)
_LIBRARIES = tuple(str(Path(p).resolve()) for p in (*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix))


class ForbiddenError(RuntimeError):
  """Raised where the forbidden thing would happen, so that it does not."""


class Guard:
  """Records what is forbidden while it is armed.

  Args:
    data: the folder that holds what is hostile: no code is run from it.
    writable: folders that may be changed.

  Attributes:
    seen: what was tried, one sentence each.
  """

  def __init__(self, data: Path, writable: tuple[Path, ...]):
    self.data, self.writable, self.seen = os.path.realpath(data), [os.path.realpath(p) for p in writable], []

  @contextlib.contextmanager
  def only(self, *writable: Path) -> Iterator[None]:
    """Fewer folders may be changed, for a while: those of the run, and those that were given with a cache in them."""
    before = self.writable
    self.writable = [os.path.realpath(p) for p in writable] + [p for p in before if not _inside(p, self.data)]
    try:
      yield
    finally:
      self.writable = before

  def check(self, event: str, args: tuple) -> None:
    """Raises ForbiddenError if the event is one that must not be."""
    told = self._told(event, args)
    if told:
      self.seen.append(told)
      raise ForbiddenError(told)

  def _told(self, event: str, args: tuple) -> str | None:
    if event in NETWORK or event in PROGRAMS:
      return f"{event}{args!r:.200}"
    if event == "open":
      path, mode, flags = args
      writes = any(c in mode for c in "wax+") if isinstance(mode, str) else bool((flags or 0) & WRITES)
      return self._written(event, path, None) if writes else None
    if event in CHANGES:
      folder = args[-1] if isinstance(args[-1], int) and event != "os.truncate" else None
      return next(filter(None, (self._written(event, path, folder) for path in args[:CHANGES[event]])), None)
    if event == "os.symlink":
      return self._written(event, args[1], None)
    if event == "pickle.find_class":
      return f"{event}{args!r:.200}" if not _called_from("jax") else None
    if event in ("compile", "exec"):
      return self._run(event, args)
    return None

  def _written(self, event: str, path, folder: int | None) -> str | None:
    if isinstance(path, int):
      return None  # opened before, and judged then
    path = os.fsdecode(path)
    if not os.path.isabs(path) and folder is not None and folder >= 0:
      path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
    real = os.path.realpath(path)
    if real.startswith("/dev/") or any(_inside(real, allowed) for allowed in self.writable):
      return None
    return f"{event} of {real}, outside {', '.join(self.writable)}"

  def _run(self, event: str, args: tuple) -> str | None:
    """Code that is compiled or run: that of libraries and of Weft is, and templates by jinja2 for template.py."""
    if event == "compile":
      source, file = (args[0] if isinstance(args[0], str) else ""), str(args[1])
    else:
      source, file = f"{args[0].co_names}{args[0].co_consts}", args[0].co_filename
    caller = sys._getframe(4).f_code.co_filename
    if caller.startswith(_JINJA):
      allowed = _called_from("input_pipeline/chat/template.py")
      return None if allowed else f"{event} of {file} by jinja2, not template.py"
    if _inside(os.path.realpath(file), self.data) or CANARY in source:
      return f"{event} of {file}, which is data, by {caller}"
    if caller.startswith(str(ROOT)) and not caller.startswith(str(ROOT / "tests")):
      in_library = any(caller.startswith(folder) for folder in _LIBRARIES)
      return None if in_library else f"{event} of {file} by {caller}"
    return None


def _inside(path: str, folder: str) -> bool:
  return path == folder or path.startswith(folder + os.sep)


def _called_from(part: str) -> bool:
  frame = sys._getframe(1)
  while frame is not None:
    if part in frame.f_code.co_filename.replace(os.sep, "/"):
      return True
    frame = frame.f_back
  return False


_armed: Guard | None = None
_installed = False
_judging = threading.local()


def _hook(event: str, args: tuple) -> None:
  guard = _armed
  if guard is None or getattr(_judging, "now", False):
    return
  _judging.now = True  # what is done to judge an event raises events, too
  try:
    guard.check(event, args)
  finally:
    _judging.now = False


@contextlib.contextmanager
def armed(guard: Guard) -> Iterator[Guard]:
  """The hook watches for `guard` meanwhile."""
  global _armed, _installed
  if not _installed:
    sys.addaudithook(_hook)
    _installed = True
  _armed = guard
  try:
    yield guard
  finally:
    _armed = None


@contextlib.contextmanager
def asleep() -> Iterator[None]:
  """The hook watches for nobody meanwhile."""
  global _armed
  before, _armed = _armed, None
  try:
    yield
  finally:
    _armed = before
