"""The most memory that a process held, on Linux."""

import ctypes
import gc


def used_mb(what: str = "VmHWM") -> float:
  """`VmHWM`: the most since the start or `forget`; `VmRSS`: now."""
  with open("/proc/self/status", encoding="utf-8") as lines:
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024


def forget() -> None:
  """What has been freed goes back to the system, and the peak is counted anew: what compilers took is left out."""
  gc.collect()
  ctypes.CDLL("libc.so.6").malloc_trim(0)
  with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
    file.write("5")
