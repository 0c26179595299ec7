"""Several processes as one program: joining them, and letting the first one go first."""

import contextlib
import os
from collections.abc import Iterator

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.config import ConfigError

# Launchers that `jax.distributed.initialize()` recognises by itself, and where they say how many processes there are.
_LAUNCHERS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
_TPU_HOSTS = "TPU_WORKER_HOSTNAMES"


def join() -> None:
  """Connects the processes of this run, if there are several; call it before anything touches a device.

  With JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and JAX_PROCESS_ID in the environment these are used;
  under Slurm, Open MPI, or on a TPU pod slice JAX finds them itself.

  Raises:
    ConfigError: if only some of the variables are set.
  """
  if jax.distributed.is_initialized():
    return
  names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
  given = {name: os.environ[name] for name in names if os.environ.get(name)}
  if len(given) == len(names):
    jax.distributed.initialize(given[names[0]], int(given[names[1]]), int(given[names[2]]))
  elif given and names[0] in given:
    missing = ", ".join(name for name in names if name not in given)
    raise ConfigError(f"JAX_COORDINATOR_ADDRESS is set, but {missing} is not. Set all three in each process, or none.")
  elif any(int(os.environ.get(name) or 1) > 1 for name in _LAUNCHERS) or "," in os.environ.get(_TPU_HOSTS, ""):
    jax.distributed.initialize()
  else:
    return
  logging.info("Process %d of %d.", jax.process_index(), jax.process_count())


def sync(what: str) -> None:
  """Waits until every process is here; nothing with one process."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(what)


@contextlib.contextmanager
def first_goes_first(what: str) -> Iterator[None]:
  """The first process runs the body while the others wait; then they run it, and find what it has written."""
  if jax.process_index() != 0:
    sync(what)
  yield
  if jax.process_index() == 0:
    sync(what)


def stop_requests(mesh: Mesh, requested: bool) -> jax.Array:
  """One int32 per device, 1 if this process was asked to stop: summed in the update, so that all processes learn of it
  at the same step without waiting for one another."""
  sharding = NamedSharding(mesh, PartitionSpec(tuple(mesh.shape)))
  return jax.make_array_from_callback((mesh.size,), sharding, lambda index: np.full(1, requested, np.int32))
