"""Several processes as one program: finding and joining them, and letting the first one go first."""

import contextlib
import contextvars
import hashlib
import importlib.util
import itertools
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from absl import logging
from jax._src import clusters, distributed
from jax._src.cloud_tpu_init import running_in_cloud_tpu_vm
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer import startup
from trainer.distributed import liveness
from trainer.distributed.relay import Relay
from trainer.errors import ConfigError

_ADDRESS, _COUNT, _INDEX = _GIVEN = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_HOW = (f"Set {_ADDRESS}=HOST:PORT (of process 0, a free port), {_COUNT} and {_INDEX} (0, 1, …) in each process.")
# Numbers those who went first, and what was said to all: one key of the coordinator's store each.
_FIRSTS, _SAID = itertools.count(), itertools.count()
# What values of keys begin with that are no errors.
_SAYS = "="
# Whether this thread works by itself, see `alone`.
_ALONE: contextvars.ContextVar[bool] = contextvars.ContextVar("alone", default=False)
# JAX's own port for TPU, free on others too; ports derived from a job's number lie in the last 4096.
_PORT, _PORTS = 8482, 4096


# ----------------------------------------------------------------------------------------------
# Finding the other processes.


@dataclass(frozen=True)
class Place:
  """Where this process stands among those of the run.

  Attributes:
    launcher: who said so.
    count, index: how many there are, and which one this is; None: JAX asks.
    address: host:port of process 0; None: JAX asks.
    local_devices: the GPUs of this host that are its own; none: all that it sees.
    ask: the name of JAX's way to find what is None; "": the first that works.
  """

  launcher: str
  count: int | None = None
  index: int | None = None
  address: str | None = None
  local_devices: tuple[int, ...] = ()
  ask: str | None = None


def find(env: Mapping[str, str], *, on_tpu: bool = False, has_kubernetes: bool = False) -> Place | None:
  """What the environment says of the processes of this run; None: there is one.

  JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID win over what a launcher says, each on its own.

  Args:
    on_tpu: this is a host with TPUs. has_kubernetes: Python's package of that name is there, for JAX to ask.

  Raises:
    ConfigError: if there are several, but something is missing; what to set.
  """
  place = None
  for look in (_open_mpi, _slurm, _tpu, _job_set, _other_mpi):
    place = place or look(env, on_tpu=on_tpu, has_kubernetes=has_kubernetes)
  given = {name: env[name] for name in _GIVEN if env.get(name)}
  if place is None and not given:
    return None
  if place is None and len(given) < len(_GIVEN):
    missing = " and ".join(name for name in _GIVEN if name not in given)
    raise ConfigError(f"{' and '.join(given)} set, but not {missing}. Set all three in each process, or none.")
  place = place or Place("the environment")
  numbers: dict[str, Any] = {field: int(given[name]) for field, name in (("count", _COUNT), ("index", _INDEX))
                             if name in given}
  place = replace(place, address=given.get(_ADDRESS, place.address), **numbers)
  return _complete(place, env) if place.count != 1 or len(given) == len(_GIVEN) else None


def _complete(place: Place, env: Mapping[str, str]) -> Place:
  known = zip(_GIVEN, (place.address, place.count, place.index), strict=True)
  missing = [name for name, value in known if value is None]
  if missing and place.ask is None:
    raise ConfigError(f"{place.launcher} started this process as one of several, but does not say what "
                      f"{' and '.join(missing)} would. {_HOW}")
  own = env.get("JAX_LOCAL_DEVICE_IDS")
  return replace(place, local_devices=tuple(int(i) for i in own.split(","))) if own else place



def _open_mpi(env: Mapping[str, str], **_) -> Place | None:
  """Before Slurm: `mpirun` within an allocation starts its own processes by srun."""
  count, index = int(env.get("OMPI_COMM_WORLD_SIZE") or 1), env.get("OMPI_COMM_WORLD_RANK")
  if count == 1 or index is None:
    return None
  local = int(env.get("OMPI_COMM_WORLD_LOCAL_SIZE") or 0)
  place = Place("Open MPI", count, int(index), local_devices=_share(env, env.get("OMPI_COMM_WORLD_LOCAL_RANK"), local))
  # Version 5 names its job after the host and the process of mpirun.
  job = re.fullmatch(r"\w+-(.+)-(\d+)@\d+", env.get("PMIX_NAMESPACE", ""))
  if "OMPI_MCA_orte_hnp_uri" in env:
    return replace(place, ask="ompi")
  if job is None:
    return place
  if local == count:
    host = "localhost"
  elif "SLURM_JOB_NODELIST" in env:
    host = "".join(re.match(r"([^\[,]+)\[?(\d*)", env["SLURM_JOB_NODELIST"]).groups())
  else:
    host = job[1]  # as JAX has it for earlier versions: process 0 is on the host of mpirun
  return replace(place, address=f"{host}:{_port(env, 1 << 16, -_PORTS + int(job[2]) % _PORTS)}")


def _slurm(env: Mapping[str, str], **_) -> Place | None:
  """A task of srun; an allocation alone (salloc, the batch script itself) has no step."""
  count = int(env.get("SLURM_NTASKS") or 1)
  if count == 1 or "SLURM_PROCID" not in env or "SLURM_STEP_NODELIST" not in env:
    return None
  # "2(x3),1": two tasks on each of three nodes, one on the fourth.
  on_nodes = [int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
              for _ in range(int(times or 1))]
  node = int(env.get("SLURM_NODEID") or 0)
  local = on_nodes[node] if node < len(on_nodes) else 0
  bound = "SLURM_GPUS_PER_TASK" in env  # each then sees its own alone
  return Place("Slurm", count, int(env["SLURM_PROCID"]), ask="slurm",
               local_devices=() if bound else _share(env, env.get("SLURM_LOCALID"), local))


def _share(env: Mapping[str, str], local_index: str | None, local_count: int) -> tuple[int, ...]:
  """Which of the GPUs that it sees are this process's, where several on a host see the same; none: all."""
  if local_index is None or local_count == 1:
    return ()
  visible = env.get("CUDA_VISIBLE_DEVICES")
  if visible is None:
    return (int(local_index),)
  each, rest = divmod(len(visible.split(",")), max(local_count, 1))
  if rest or not each:
    return ()  # fewer than processes: each sees its own
  return tuple(range(int(local_index) * each, (int(local_index) + 1) * each))


def _tpu(env: Mapping[str, str], *, on_tpu: bool, **_) -> Place | None:
  """GKE says it in the environment, also of several slices; elsewhere the metadata server does."""
  if "tpu" not in (env.get("JAX_PLATFORMS") or "tpu"):
    return None
  hosts = env.get("TPU_PROCESS_ADDRESSES") or env.get("TPU_WORKER_HOSTNAMES")
  if hosts:
    count = len(hosts.split(",")) * int(env.get("MEGASCALE_NUM_SLICES") or 1)
    return Place("GKE", count, ask="gketpu") if count > 1 else None
  return Place("the metadata of this TPU", ask="gcetpu") if on_tpu and "TPU_SKIP_MDS_QUERY" not in env else None


def _job_set(env: Mapping[str, str], *, has_kubernetes: bool, **_) -> Place | None:
  """launch/gke_jobset.yaml gives the names; Kubernetes itself gives only the index, and its API the rest."""
  if "JOB_COMPLETION_INDEX" not in env:
    return None
  index, name = int(env["JOB_COMPLETION_INDEX"]), env.get("JOBSET_NAME")
  if name and env.get("REPLICATED_JOB_NAME"):
    first = f"{name}-{env['REPLICATED_JOB_NAME']}-0-0.{name}"
    return Place("JobSet", None, index, f"{first}:{_port(env, _PORT)}")
  if has_kubernetes:
    return Place("Kubernetes", ask="")
  return Place("Kubernetes", None, index) if index else None


def _other_mpi(env: Mapping[str, str], **_) -> Place | None:
  count, index = int(env.get("PMI_SIZE") or 1), env.get("PMI_RANK")
  return Place("MPI", count, int(index)) if count > 1 and index is not None else None


def _port(env: Mapping[str, str], port: int, offset: int = 0) -> int:
  return int(env.get("JAX_COORDINATOR_PORT") or port + offset)


# ----------------------------------------------------------------------------------------------
# Joining them.


def join(limits: Mapping[str, float]) -> None:
  """Connects the processes of this run, if there are several, and watches over them from then on
  (trainer/distributed/liveness.py); call it before anything touches a device.

  Args:
    limits: the section `processes` of a config.

  Raises:
    ConfigError: if the environment says half of what is needed, or the processes do not find one another.
  """
  liveness.check(limits)
  lost = threading.Event()
  if not jax.distributed.is_initialized():
    place = find(os.environ, on_tpu=running_in_cloud_tpu_vm,
                 has_kubernetes=importlib.util.find_spec("kubernetes") is not None)
    place = place and _ask_jax(place, limits["join_seconds"])
    if place is None:
      return
    lost = _connect(place, limits)
  state = distributed.global_state
  logging.info("Process %d of %d.", state.process_id, state.num_processes)
  if state.num_processes > 1:
    liveness.start(state.client, state.process_id, state.num_processes, limits, lost)


def _ask_jax(place: Place, timeout_seconds: float) -> Place | None:
  """The place with all that JAX knows of it; None if that is one process."""
  if place.ask is None:
    return place
  try:
    address, count, index, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        place.address, place.count, place.index, [], place.ask or None, int(timeout_seconds))
  except OSError as error:  # no metadata server: not a host of a slice
    logging.warning("%s could not be asked for other processes: %s", place.launcher, error)
    return None
  except (RuntimeError, ValueError) as error:
    raise ConfigError(f"{place.launcher} could not be asked for the processes of this run: {error}. {_HOW}") from error
  if count == 1 or (count is None and place.ask == "gcetpu"):
    return None
  return _complete(replace(place, address=address, count=count, index=index, ask=None), {})


def _connect(place: Place, limits: Mapping[str, float]) -> threading.Event:
  """Joins the processes; the event is set when process 0 is gone."""
  address, relay = place.address, None
  seconds = limits["join_seconds"]
  # JAX would take over SIGTERM, for a service that nothing here uses.
  jax.config.update("jax_enable_preemption_service", False)
  # On CPU, programs that do not depend on one another would run at the same time, their collectives in any order.
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  startup.add_threads()
  try:
    if place.index:
      relay = Relay(address)
      relay.open(seconds)
      address = relay.address
      if any("_proxy" in name.lower() for name in os.environ):
        os.environ["no_proxy"] = ",".join(filter(None, [os.environ.get("no_proxy"), "127.0.0.1"]))
    jax.distributed.initialize(
        address, place.count, place.index, list(place.local_devices), cluster_detection_method="deactivate",
        initialization_timeout=int(seconds), heartbeat_timeout_seconds=int(max(100, 3 * limits["heartbeat_seconds"])))
  except (ValueError, RuntimeError, OSError) as error:
    raise ConfigError(f"the processes of this run cannot be joined (process {place.index} of {place.count}, by "
                      f"{place.launcher}): {error}. {_HOW}") from error
  return relay.lost if relay else threading.Event()


def sync(what: str) -> None:
  """Waits until every process is here; nothing with one process."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(what)


def say(*lines: str) -> None:
  """Prints lines, in the first process alone."""
  if jax.process_index() == 0:
    for line in lines:
      print(line)


def check_same(what: str, fingerprint: str) -> None:
  """Refuses processes that see different data. Raises ConfigError, naming the processes that differ from the first."""
  if jax.process_count() > 1:
    mine = np.frombuffer(hashlib.sha256(fingerprint.encode()).digest(), np.int32)
    everyones = multihost_utils.process_allgather(mine)
    differ = [i for i, row in enumerate(everyones) if np.any(row != everyones[0])]
    if differ:
      raise ConfigError(f"{what} of process {', '.join(map(str, differ))} differ from those of process 0: every host "
                        "must see the same files, the same tokenizer and the same config.")


@contextlib.contextmanager
def alone() -> Iterator[None]:
  """Within it `first_goes_first` and `from_first` are those of a run of one process: for a thread of the first process
  whose work the others learn of elsewhere. It must use no array of several processes."""
  token = _ALONE.set(True)
  try:
    yield
  finally:
    _ALONE.reset(token)


@contextlib.contextmanager
def first_goes_first(what: str) -> Iterator[None]:
  """The first process runs the body while the others wait; then they run it, and find what it has written.

  Raises:
    ConfigError: in the others, if the body failed in the first.
  """
  if jax.process_count() == 1 or _ALONE.get():
    yield
    return
  with _first(what):
    yield


def decided(what: str, decide: Callable[[], Any]) -> Any:
  """What `decide` gives in the first process, JSON-able, in all of them; waited for as in `first_goes_first`.

  Raises:
    ConfigError: in the others, if it failed in the first.
  """
  if jax.process_count() == 1:
    return decide()
  with _first(what) as said:
    if jax.process_index() == 0:
      said.append(json.dumps(decide()))
  return json.loads(said[0])


@contextlib.contextmanager
def _first(what: str) -> Iterator[list[str]]:
  """The first process runs the body; then the others do, which are given what it has put into the list, if anything.

  Not by a collective: these have a limit of time on some devices, and a tokeniser has none."""
  store, key = distributed.global_state.client, f"weft/first/{next(_FIRSTS)}"
  if jax.process_index() != 0:
    while (heard := _look_up(store, key)) is None:
      pass
    if not heard.startswith(_SAYS):
      raise ConfigError(f"process 0 failed at: {what}: {heard}")
    yield [heard.removeprefix(_SAYS)]
    return
  said: list[str] = []
  try:
    yield said
  except BaseException as error:
    store.key_value_set(key, f"{type(error).__name__}: {error}")
    raise
  store.key_value_set(key, _SAYS + "".join(said))


def said_by_all(value: str) -> list[str]:
  """What each process says, in their order, told without a collective: some may come from an error in the midst of one
  thing, others from its end. All call it as often."""
  if jax.process_count() == 1:
    return [value]
  store, key = distributed.global_state.client, f"weft/said/{next(_SAID)}"
  store.key_value_set(f"{key}/{jax.process_index()}", value)
  said = []
  for index in range(jax.process_count()):
    while (heard := _look_up(store, f"{key}/{index}")) is None:
      pass
    said.append(heard)
  return said


def _look_up(store: Any, key: str, seconds: float = 5.0) -> str | None:
  """The value of a key; None if it is not there within some seconds."""
  try:
    return store.blocking_key_value_get(key, int(1000 * seconds))
  except RuntimeError as error:
    if "DEADLINE_EXCEEDED" not in str(error):
      raise
    return None


def from_first(value: Any) -> Any:
  """The first process's value, JSON-able, in all of them; NaN and infinities pass."""
  if jax.process_count() == 1 or _ALONE.get():
    return value
  return json.loads(bytes_from_first(json.dumps(value).encode() if jax.process_index() == 0 else b""))


def bytes_from_first(data: bytes) -> bytes:
  """The first process's bytes, in all of them."""
  if jax.process_count() == 1:
    return data
  size = int(multihost_utils.broadcast_one_to_all(np.int64(len(data))))
  sent = np.zeros(size, np.uint8)
  if jax.process_index() == 0:
    sent[:] = np.frombuffer(data, np.uint8)
  return bytes(multihost_utils.broadcast_one_to_all(sent))


def on_every_host(arrays: Any) -> Any:
  """A pytree of arrays as NumPy arrays, whole in each process."""
  if jax.process_count() == 1:
    return jax.device_get(arrays)
  return multihost_utils.process_allgather(arrays, tiled=True)


def stop_requests(mesh: Mesh, requested: bool) -> jax.Array:
  """One int32 per device, 1 if this process was asked to stop: summed in the update, so that all processes learn of it
  at the same step without waiting for one another."""
  sharding = NamedSharding(mesh, PartitionSpec(tuple(mesh.shape)))
  return jax.make_array_from_callback((mesh.size,), sharding, lambda index: np.full(1, requested, np.int32))
