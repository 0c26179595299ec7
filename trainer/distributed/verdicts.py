"""What processes say of themselves, and who is named for a standstill. See trainer/distributed/liveness.py."""

import os
import re
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass

# The exit code of a process that ends because another one died or hangs: sysexits' EX_TEMPFAIL, "try again".
# One that ends because another one failed has 1, as that one has: trying again would fail again.
EXIT_CODE = 75
# Shorter standstills are nothing to explain.
STILL_SECONDS = 1.0
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_SITE = os.sep + "site-packages" + os.sep
_WAITS_IN = re.compile(r"/(jax|jaxlib|orbax)/|/trainer/distributed/(processes|liveness)\.py$")


@dataclass(frozen=True)
class Heartbeat:
  """What a process says of itself.

  Attributes:
    host, pid: where it is.
    beat: grows each time.
    step, phase: the last update, and what it is doing.
    still: seconds for which nothing has moved.
    limit: for how many that may be so; 0: any number.
    waits: its main thread stands in JAX, which waits for devices and so for others.
    place: where its main thread stands.
    waited: seconds that it has waited for data, in all.
    done: it has ended as it should.
  """

  host: str
  pid: int
  beat: int = 0
  step: int = 0
  phase: str = "set-up"
  still: float = 0.0
  limit: float = 0.0
  waits: bool = False
  place: str = ""
  waited: float = 0.0
  done: bool = False


@dataclass(frozen=True)
class Verdict:
  """Why processes are to end: those it is about, a text for people, and the exit code of the others."""

  processes: tuple[int, ...]
  text: str
  code: int


def judge(heartbeats: Mapping[int, Heartbeat], silent: Mapping[int, float], heartbeat_seconds: float) -> Verdict | None:
  """Which processes are lost or hang, if any.

  Args:
    heartbeats: the last one of each process; those never heard of are absent.
    silent: {process: seconds since it was heard of}, for all processes.
  """
  lost = tuple(i for i, seconds in silent.items()
               if seconds > heartbeat_seconds and not (i in heartbeats and heartbeats[i].done))
  if lost:
    lines = [f"{name(i, heartbeats.get(i))} has not been heard of for {silent[i]:.0f} s: it died, its host did, or it "
             f"is stopped. {last(heartbeats.get(i))}" for i in lost]
    return Verdict(lost, "\n".join(lines), EXIT_CODE)
  if any(seconds > heartbeat_seconds / 3 for i, seconds in silent.items()
         if not (i in heartbeats and heartbeats[i].done)):
    return None  # it may be dead, and the others wait for it
  standing = {i: said for i, said in heartbeats.items() if not said.done}
  late = {i for i, said in standing.items() if 0 < said.limit < said.still}
  if not late or any(said.still < STILL_SECONDS for said in standing.values()):
    return None  # while one of them moves, the others may be waiting for it
  busy = [i for i in standing if not standing[i].waits]
  behind = min(standing[i].step for i in busy or standing)
  named = tuple(i for i in busy or standing if standing[i].step == behind)
  if not late.issuperset(named):
    return None  # those that are waited for may still take their time
  lines = [f"{name(i, heartbeats[i])} hangs: nothing has moved for {heartbeats[i].still:.0f} s. "
           f"{last(heartbeats[i])}" for i in named]
  if not busy:
    lines.insert(0, "all processes wait for one another; the furthest behind:")
  return Verdict(named, "\n".join(lines), EXIT_CODE)


def name(index: int, heartbeat: Heartbeat | None) -> str:
  """For people."""
  return f"process {index} ({f'host {heartbeat.host}, pid {heartbeat.pid}' if heartbeat else 'never heard of'})"


def last(heartbeat: Heartbeat | None) -> str:
  """Where it was, for people."""
  if heartbeat is None:
    return "It never said anything."
  at = f", at {heartbeat.place}" if heartbeat.place else ""
  return f"It was in {heartbeat.phase}, after step {heartbeat.step}{at}."


def stands(thread: int | None) -> tuple[bool, str]:
  """Whether a thread stands in JAX, where it waits for devices and other processes; and its place in our code or the
  user's, as `file:line in function`."""
  frame = sys._current_frames().get(thread)
  waits = None
  while frame is not None:
    file = frame.f_code.co_filename
    in_library = _SITE in file
    if in_library or not file.startswith((_STDLIB, "<")):
      waits = bool(_WAITS_IN.search(file)) if waits is None else waits
      if not in_library:
        return waits, f"{os.sep.join(file.split(os.sep)[-2:])}:{frame.f_lineno} in {frame.f_code.co_name}"
    frame = frame.f_back
  return bool(waits), ""
