"""Each program that a process of tests compiles is compiled once, and devices appear as a test asks for them.

Programs: a run that is stopped, goes on, and is compared to one that was not traces the same step three times, and XLA
for CPU would compile the same module three times. JAX's own cache would read it from a file each time, and is off on
meshes of a CPU (`startup.compile_anew`). What is shared here is the program itself, as it was compiled in this process.
That a program compiled anew gives the same bits is seen where runs are processes of their own (test_faults.py), and
with WEFT_TEST_AS_USERS, where nothing is shared.

Devices: a program of eight takes several times as long to compile as one of one, so that a test sees one device unless
it is marked with `devices(8)`. The number of JAX's devices is fixed when its first array is made; what differs is how
many of them a mesh is made of that names no devices.
"""

import functools
import hashlib
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

# {(client, digest of the module, options, devices): the program}
_compiled: dict[tuple, Any] = {}
# What a process of tests may take of memory before it lets go of programs.
MEMORY_BYTES = 3 * 2**30


def share() -> None:
  """From now on this process compiles a module again only after `forget`, or where Python is called from it."""
  from jax._src import compiler  # JAX has no other place where what is to be compiled is one text

  compile_anew = compiler.compile_or_get_cached

  @functools.wraps(compile_anew)
  def compile_once(client: Any, module: Any, devices: Any, options: Any, host_callbacks: Any, *more: Any) -> Any:
    if host_callbacks:
      return compile_anew(client, module, devices, options, host_callbacks, *more)
    # Without the lines that it comes from: another caller's are others.
    text = module.operation.get_asm(enable_debug_info=False)
    name = text.partition(" ")[2].partition(" ")[0]
    key = (client, name, hashlib.sha256(text.encode()).digest(), options.SerializeAsString(),
           tuple(device.id for device in devices.flat))
    if key not in _compiled:
      _compiled[key] = compile_anew(client, module, devices, options, host_callbacks, *more)
    return _compiled[key]

  compiler.compile_or_get_cached = compile_once


def forget() -> None:
  """Lets go of what was compiled and traced."""
  import jax
  _compiled.clear()
  jax.clear_caches()


def forget_if_large() -> None:
  """`forget`, if this process takes more than MEMORY_BYTES, or where Linux does not say what it takes."""
  statm = Path("/proc/self/statm")
  if not statm.exists() or int(statm.read_text().split()[1]) * resource.getpagesize() > MEMORY_BYTES:
    forget()


@functools.cache
def _of_jax() -> dict[str, Callable]:
  import jax
  return {name: getattr(jax, name) for name in ("devices", "local_devices", "device_count", "local_device_count")}


def show(count: int) -> None:
  """From now on `jax.devices` and its like tell of the first `count` of this process's devices."""
  import jax
  from jax.experimental.compilation_cache import compilation_cache

  for name, function in _of_jax().items():
    if name.endswith("count"):
      shown: Callable = lambda *args, function=function, **named: min(count, function(*args, **named))
    else:
      shown = lambda *args, function=function, **named: function(*args, **named)[:count]
    setattr(jax, name, functools.wraps(function)(shown))
  if not jax.config.values["jax_enable_compilation_cache"]:  # a mesh of several turned it off (trainer/mesh.py)
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
