"""Arrays in the host's memory: the optimizer's state (`precision.offload_optimizer`), activations (`config.remat`).

Arrays there have shardings of memory kind `pinned_host`. A jitted step takes and returns them as they are, and fetches
them once the gradients are there, when what the backward pass needed is gone.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from trainer.errors import ConfigError

HOST = "pinned_host"


def check(mesh: Any, what: str) -> None:
  """Refuses a backend whose devices cannot reach the host's memory. Raises ConfigError, naming the backend.

  Args:
    mesh: of devices, or an AbstractMesh, which stands for any.
    what: the config key that asks for it, with its value.
  """
  if not isinstance(mesh, jax.sharding.Mesh):
    return
  device = mesh.devices.flat[0]
  try:
    kinds = {memory.kind for memory in device.addressable_memories()}
  except NotImplementedError:  # a device of a topology that is not here: TPUs and GPUs can
    return
  if HOST not in kinds:
    raise ConfigError(f"{what} needs the memory kind {HOST!r}, but the backend {device.platform!r} "
                      f"({device.device_kind}) has {', '.join(sorted(kinds))}. On any backend, "
                      "--config.precision.moments=int8 makes the optimizer's state smaller, and --config.remat=full "
                      "what is kept for the backward pass.")


def to_host(shardings: Any) -> Any:
  """The same placement in the host's memory."""
  return jax.tree.map(lambda sharding: sharding.with_memory_kind(HOST), shardings)


def with_state_on_device(condition: jax.Array, advance: Callable, params: Any, state: Any) -> tuple[Any, Any, Any]:
  """Within a jitted function: `advance(params, state)` if the condition holds, else (params, state, zeros).

  Args:
    advance: from parameters and state, both on the device, to new parameters, new state and a tree of arrays.
    state: in the host's memory, as is the one that is returned.
  """
  # A branch begins when what it depends on is there. Else the compiler would fetch the state when the step begins, and
  # it would lie on the device beside all that the backward pass needs.
  def taken(params, state):
    params, state, values = advance(params, jax.device_put(state, jax.memory.Space.Device))
    return params, jax.device_put(state, jax.memory.Space.Host), values

  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, state))
  values = jax.eval_shape(advance, *shapes)[2]

  def left(params, state):
    return params, state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), values)

  # Shapes alone are in no memory: when they are traced, the state seems to be on the device.
  state = jax.device_put(state, jax.memory.Space.Host)
  return jax.lax.cond(condition, taken, left, params, state)
