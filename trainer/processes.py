"""Several processes as one program: joining them, and letting the first one go first."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.config import ConfigError

# Launchers that `jax.distributed.initialize()` recognises by itself, and where they say how many processes there are.
_LAUNCHERS = {"SLURM_NTASKS": "SLURM_PROCID", "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK"}
_TPU_HOSTS = "TPU_WORKER_HOSTNAMES"


def join() -> None:
  """Connects the processes of this run, if there are several; call it before anything touches a device.

  With JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and JAX_PROCESS_ID in the environment these are used;
  under Slurm, Open MPI, or on a TPU pod slice JAX finds them itself.

  Raises:
    ConfigError: if only some of the variables are set, or the processes do not find one another.
  """
  if jax.distributed.is_initialized():
    return
  names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
  given = {name: os.environ[name] for name in names if os.environ.get(name)}
  if given and len(given) < len(names):
    missing = " and ".join(name for name in names if name not in given)
    raise ConfigError(f"{' and '.join(given)} set, but not {missing}. Set all three in each process, or none.")
  # An allocation alone (`salloc`) sets the count; only a launcher (`srun`, `mpirun`) also says which one this is.
  launched = any(int(os.environ.get(count) or 1) > 1 and rank in os.environ for count, rank in _LAUNCHERS.items())
  try:
    if given:
      jax.distributed.initialize(given[names[0]], int(given[names[1]]), int(given[names[2]]))
    elif launched or "," in os.environ.get(_TPU_HOSTS, ""):
      jax.distributed.initialize()
    else:
      return
  except (ValueError, RuntimeError) as e:
    raise ConfigError(f"the processes of this run cannot be joined: {e}. Start each with {', '.join(names)} set "
                      "(the address is host:port of process 0), or with srun.") from e
  logging.info("Process %d of %d.", jax.process_index(), jax.process_count())


def sync(what: str) -> None:
  """Waits until every process is here; nothing with one process."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(what)


def check_same(what: str, fingerprint: str) -> None:
  """Refuses processes that see different data.

  Raises:
    ConfigError: naming the processes that differ from the first.
  """
  if jax.process_count() > 1:
    mine = np.frombuffer(hashlib.sha256(fingerprint.encode()).digest(), np.int32)
    everyones = multihost_utils.process_allgather(mine)
    differ = [i for i, row in enumerate(everyones) if np.any(row != everyones[0])]
    if differ:
      raise ConfigError(f"{what} of process {', '.join(map(str, differ))} differ from those of process 0: every host "
                        "must see the same files, the same tokenizer and the same config.")


@contextlib.contextmanager
def first_goes_first(what: str) -> Iterator[None]:
  """The first process runs the body while the others wait; then they run it, and find what it has written.

  Raises:
    ConfigError: in the others, if the body failed in the first.
  """
  if jax.process_index() != 0:
    if not _first_says():
      raise ConfigError(f"process 0 failed at: {what}. Its own message says why.")
    yield
    return
  try:
    yield
  except BaseException:
    _first_says(False)
    raise
  _first_says(True)


def from_first(value: Any) -> Any:
  """The first process's value, JSON-able, in all of them; NaN and infinities pass."""
  if jax.process_count() == 1:
    return value
  text = json.dumps(value).encode() if jax.process_index() == 0 else b""
  size = int(multihost_utils.broadcast_one_to_all(np.int64(len(text))))
  sent = np.zeros(size, np.uint8)
  sent[:len(text)] = np.frombuffer(text, np.uint8)
  return json.loads(bytes(multihost_utils.broadcast_one_to_all(sent)))


def _first_says(ok: bool = False) -> bool:
  """What the first process says, to all of them; with one process, nothing is exchanged."""
  if jax.process_count() == 1:
    return ok
  return bool(multihost_utils.broadcast_one_to_all(np.int32(ok)))


def stop_requests(mesh: Mesh, requested: bool) -> jax.Array:
  """One int32 per device, 1 if this process was asked to stop: summed in the update, so that all processes learn of it
  at the same step without waiting for one another."""
  sharding = NamedSharding(mesh, PartitionSpec(tuple(mesh.shape)))
  return jax.make_array_from_callback((mesh.size,), sharding, lambda index: np.full(1, requested, np.int32))
