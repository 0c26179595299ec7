"""Each program that a file of tests compiles is compiled once.

A run that is stopped, goes on, and is compared to one that was not traces the same step three times, and XLA for CPU
would compile the same module three times: a third of the time that runs on meshes take in tests. JAX's own cache, which
would find it, is off on meshes of a CPU (`startup.compile_anew`). What is shared here is the program itself, as it was
compiled in this process. That a program compiled anew gives the same bits is seen where runs are processes of their own
(test_faults.py), and with WEFT_TEST_AS_USERS, where nothing is shared.
"""

import functools
from typing import Any

# {(client, module, options, devices): the program}
_compiled: dict[tuple, Any] = {}


def share() -> None:
  """From now on this process compiles a module again only after `forget`, or where Python is called from it."""
  from jax._src import compiler  # JAX has no other place where what is to be compiled is one text

  compile_anew = compiler.backend_compile_and_load

  @functools.wraps(compile_anew)
  def compile_once(client: Any, module: Any, devices: Any, options: Any, host_callbacks: Any) -> Any:
    if host_callbacks:
      return compile_anew(client, module, devices, options, host_callbacks)
    # Without the lines that it comes from: another caller's are others.
    key = (client, module.operation.get_asm(enable_debug_info=False), options.SerializeAsString(),
           tuple(device.id for device in devices))
    if key not in _compiled:
      _compiled[key] = compile_anew(client, module, devices, options, host_callbacks)
    return _compiled[key]

  compiler.backend_compile_and_load = compile_once


def forget() -> None:
  """Lets go of what was compiled."""
  _compiled.clear()
