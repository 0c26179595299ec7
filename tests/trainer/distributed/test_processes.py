"""From what an environment says to where a process stands, without a cluster."""

import os
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from tests.trainer.distributed import two_threads
from trainer.config import defaults
from trainer.distributed import mesh as mesh_lib
from trainer.distributed import processes
from trainer.distributed.processes import Place, find
from trainer.errors import ConfigError

GIVEN = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
# What srun sets in the sixth of eight tasks on nodes of 4, 2 and 2.
SLURM = {"SLURM_JOB_ID": "4099", "SLURM_NTASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
         "SLURM_STEP_NODELIST": "gpu[007-009]", "SLURM_STEP_TASKS_PER_NODE": "4,2(x2)"}
# What mpirun sets in the second of four processes, two a host.
MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
       "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPI_4 = MPI | {"PMIX_NAMESPACE": "455737345",
               "OMPI_MCA_orte_hnp_uri": "455737344.0;tcp://192.0.2.2:38317;tcp6://[fd00::2]:52191"}
MPI_5 = MPI | {"PMIX_NAMESPACE": "prterun-node-3-70001@1"}
JOB_SET = {"JOB_COMPLETION_INDEX": "3", "JOBSET_NAME": "weft", "REPLICATED_JOB_NAME": "hosts", "JAX_NUM_PROCESSES": "4"}
PORT = 61440  # the first of the last 4096


@pytest.mark.parametrize("env", [
    {},
    {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},  # no srun
    SLURM | {"SLURM_NTASKS": "1"},
    MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
    {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
    {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0", "JAX_PLATFORMS": "cpu"},
    {"JOB_COMPLETION_INDEX": "0"},
    JOB_SET | {"JAX_NUM_PROCESSES": "1", "JOB_COMPLETION_INDEX": "0"},
])
def test_one_process(env):
  assert find(env) is None


def test_given():
  place = find(GIVEN)
  assert (place.address, place.count, place.index, place.local_devices) == ("a:1", 2, 1, ())
  assert find(GIVEN | {"JAX_LOCAL_DEVICE_IDS": "2,3"}).local_devices == (2, 3)


@pytest.mark.parametrize("env, missing", [
    ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "but not JAX_NUM_PROCESSES and JAX_PROCESS_ID"),
    ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, "but not JAX_COORDINATOR_ADDRESS"),
    (MPI, "does not say what JAX_COORDINATOR_ADDRESS would"),
    ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "does not say what JAX_COORDINATOR_ADDRESS would"),
    ({"JOB_COMPLETION_INDEX": "2"}, "JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES would"),
    ({"JOB_COMPLETION_INDEX": "2", "JOBSET_NAME": "weft"}, "JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES would"),
    ({k: v for k, v in JOB_SET.items() if k != "JAX_NUM_PROCESSES"}, "does not say what JAX_NUM_PROCESSES would"),
])
def test_half_of_it_is_refused_with_what_to_set(env, missing):
  with pytest.raises(ConfigError, match=missing):
    find(env)


def test_what_is_given_wins_over_the_launcher_each_on_its_own():
  assert find(SLURM | GIVEN) == Place("Slurm", 2, 1, "a:1", (1,), ask="slurm")
  assert find(MPI | {"JAX_COORDINATOR_ADDRESS": "a:1"}) == Place("Open MPI", 4, 1, "a:1", (1,))


@pytest.mark.parametrize("more, devices", [
    ({}, (1,)),  # as JAX has it: one of several tasks takes one device
    ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (2, 3)),
    ({"CUDA_VISIBLE_DEVICES": "3"}, ()),  # bound to it already
    ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "2"}, ()),
    ({"SLURM_STEP_TASKS_PER_NODE": "1(x8)"}, ()),  # alone on its node: all devices
])
def test_tasks_of_slurm_share_out_the_gpus_of_their_node(more, devices):
  assert find(SLURM | more).local_devices == devices


def asked(monkeypatch, env):
  for name in list(os.environ):
    if name.startswith(("SLURM_", "OMPI_", "PMIX_", "TPU_", "MEGASCALE_", "JAX_COORD")):
      monkeypatch.delenv(name)
  for name, value in env.items():
    monkeypatch.setenv(name, value)
  return processes._ask_jax(find(env), 1)


def test_slurm_names_the_first_node_of_the_step(monkeypatch):
  place = asked(monkeypatch, SLURM)
  assert (place.address, place.count, place.index) == (f"gpu007:{PORT + 3}", 8, 5)
  assert asked(monkeypatch, SLURM | {"JAX_COORDINATOR_PORT": "9"}).address == "gpu007:9"


def test_open_mpi_up_to_4_says_where_mpirun_is(monkeypatch):
  place = asked(monkeypatch, MPI_4)
  assert (place.address, place.count, place.index) == (f"192.0.2.2:{PORT + 455737344 // 4096 % 4096}", 4, 1)


@pytest.mark.parametrize("more, host", [
    ({}, "node-3"),
    ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "localhost"),
    ({"SLURM_JOB_NODELIST": "gpu[12-14],x"}, "gpu12"),
    ({"SLURM_JOB_NODELIST": "gpu12,gpu14"}, "gpu12"),
    (SLURM | {"SLURM_JOB_NODELIST": "gpu12"}, "gpu12"),  # its daemons are tasks of srun
])
def test_open_mpi_5_is_found_by_the_name_of_its_job(more, host):
  place = find(MPI_5 | more)
  assert (place.address, place.count, place.index, place.ask) == (f"{host}:{PORT + 70001 % 4096}", 4, 1, None)


def test_a_job_set_is_found_by_the_names_of_its_pods():
  assert find(JOB_SET) == Place("JobSet", 4, 3, "weft-hosts-0-0.weft:8482")


def test_kubernetes_is_asked_where_its_package_is():
  assert find({"JOB_COMPLETION_INDEX": "2"}, has_kubernetes=True) == Place("Kubernetes", ask="")


def test_tpu_hosts_on_gke_and_their_slices(monkeypatch):
  env = {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}
  slices = env | {"MEGASCALE_NUM_SLICES": "3", "MEGASCALE_SLICE_ID": "2"}
  slices["MEGASCALE_COORDINATOR_ADDRESS"] = "localhost:7"
  assert find(env) == Place("GKE", 2, ask="gketpu") and find(slices).count == 6
  assert find({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}).count == 2  # slices of one host each
  monkeypatch.setattr("jax._src.clusters.cloud_tpu_cluster.running_in_cloud_tpu_vm", True)
  monkeypatch.setattr("jax._src.clusters.cluster.running_in_cloud_tpu_vm", True)
  monkeypatch.setattr("jax._src.clusters.cloud_tpu_cluster.get_tpu_env_value_from_metadata", lambda key: None)
  monkeypatch.delenv("JAX_PLATFORMS")
  place = asked(monkeypatch, slices)
  assert (place.address, place.count, place.index) == ("localhost:8482", 6, 5)


def test_tpu_hosts_elsewhere_ask_the_metadata_server(monkeypatch):
  assert find({}, on_tpu=True) == Place("the metadata of this TPU", ask="gcetpu")
  assert find({"TPU_SKIP_MDS_QUERY": "1"}, on_tpu=True) is None
  replies = {"agent-worker-number": "1", "worker-network-endpoints": "unused:0:127.0.0.1,unused:1:127.0.0.2"}
  cluster = "jax._src.clusters.cloud_tpu_cluster"
  monkeypatch.setattr(f"{cluster}.running_in_cloud_tpu_vm", True)
  monkeypatch.setattr(f"{cluster}.get_metadata", lambda key: (replies.get(key, ""), 200 if key in replies else 404))
  monkeypatch.setattr("jax._src.clusters.cluster.running_in_cloud_tpu_vm", True)
  monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
  found = processes._ask_jax(find({}, on_tpu=True), 1)
  assert (found.address, found.count, found.index) == ("127.0.0.1:8482", 2, 1)
  replies["worker-network-endpoints"] = "unused:0:127.0.0.1"  # a slice of one host
  assert processes._ask_jax(find({}, on_tpu=True), 1) is None

  def unreachable(key):
    raise OSError("no route to the metadata server")
  monkeypatch.setattr(f"{cluster}.get_metadata", unreachable)
  assert processes._ask_jax(find({}, on_tpu=True), 1) is None


@pytest.mark.parametrize("key, value", [("join_seconds", 0), ("heartbeat_seconds", 0.5), ("hang_seconds", -1)])
def test_limits_that_cannot_be(key, value):
  limits = defaults().processes
  limits[key] = value
  with pytest.raises(ConfigError, match=f"processes.{key} is"):
    processes.join(limits)


@pytest.mark.host_patches
def test_the_first_process_goes_first_decides_and_works_by_itself(monkeypatch):
  """The second finds what the first has done, however late; what one does alone tells the other nothing."""
  order = []

  def work(index):
    with processes.first_goes_first("a file"):
      order.append(index)
    told = [processes.decided("a choice", lambda: [index, None, "=é"]), processes.decided("none", lambda: "")]
    if index == 0:
      with processes.alone(), processes.first_goes_first("its own"):
        told.append(processes.from_first(float("nan")))
    return [*told, processes.decided("another", lambda: index)]

  (*first, alone, last), second = two_threads.run(monkeypatch, work)
  assert order == [0, 1] and first == second[:2] == [[0, None, "=é"], ""] and alone != alone
  assert last == second[2] == 0


@pytest.mark.host_patches
def test_what_fails_in_the_first_process_is_told(monkeypatch):
  def fails(index):
    if index == 0:
      raise ConfigError("no file")

  def goes_first(index):
    with processes.first_goes_first("a file"):
      fails(index)

  for work in (goes_first, lambda index: processes.decided("a file", lambda: fails(index))):
    assert [str(error) for error in two_threads.run(monkeypatch, work)] == [
        "no file", "process 0 failed at: a file: ConfigError: no file"]


def test_data_that_differ_in_any_part_are_refused(monkeypatch):
  processes.check_same("the training data", "alone")
  monkeypatch.setattr(processes.jax, "process_count", lambda: 3)
  others = [np.zeros(8, np.int32), np.zeros(8, np.int32)]
  monkeypatch.setattr(processes.multihost_utils, "process_allgather", lambda mine: np.stack([mine, mine + others[0],
                                                                                           mine + others[1]]))
  processes.check_same("the training data", "same")
  others[1][3] = 1
  with pytest.raises(ConfigError, match="the training data of process 2 differ from those of process 0"):
    processes.check_same("the training data", "same")


LIMITS = dict(join_seconds=90.5, heartbeat_seconds=60, hang_seconds=600, phase_seconds=3600)


@pytest.mark.parametrize("count", [1, 2])
def test_who_joins_is_watched_over(monkeypatch, count):
  asked, place, lost = [], Place("Slurm", 2, 1, "a:1"), threading.Event()
  state = SimpleNamespace(process_id=1, num_processes=count, client="store")
  monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
  monkeypatch.setattr(processes, "find", lambda env, on_tpu, has_kubernetes: place)
  monkeypatch.setattr(processes, "_ask_jax", lambda *given: asked.append(given) or place)
  monkeypatch.setattr(processes, "_connect", lambda *given: asked.append(given) or lost)
  monkeypatch.setattr(processes, "distributed", SimpleNamespace(global_state=state))
  monkeypatch.setattr(processes.liveness, "start", lambda *given: asked.append(given))
  processes.join(LIMITS)
  assert asked == [(place, 90.5), (place, LIMITS), ("store", 1, 2, LIMITS, lost)][:3 if count > 1 else 2]


def test_processes_that_have_joined_before_are_watched_over_again(monkeypatch):
  started = []
  state = SimpleNamespace(process_id=0, num_processes=2, client="store")
  monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
  monkeypatch.setattr(processes, "distributed", SimpleNamespace(global_state=state))
  monkeypatch.setattr(processes.liveness, "start", lambda *given: started.append(given))
  processes.join(LIMITS)
  assert started[0][:4] == ("store", 0, 2, LIMITS) and not started[0][4].is_set()


def test_a_launcher_that_cannot_be_asked_is_named(monkeypatch):
  asked = []

  def ask(*given):
    asked.append(given)
    raise RuntimeError("no such node")

  monkeypatch.setattr(processes.clusters.ClusterEnv, "auto_detect_unset_distributed_params", ask)
  with pytest.raises(ConfigError, match="^Slurm could not be asked for the processes of this run: no such node. Set "
                                        "JAX_COORDINATOR_ADDRESS=HOST:PORT .of process 0"):
    processes._ask_jax(Place("Slurm", 8, 5, "gpu7:1", ask="slurm"), 90.5)
  assert asked == [("gpu7:1", 8, 5, [], "slurm", 90)]
  place = Place("the environment", 2, 1, "a:1")
  assert processes._ask_jax(place, 90.5) is place and len(asked) == 1  # nothing to ask for


@pytest.fixture
def connected(monkeypatch):
  """`connected(place, error)` joins a cluster that is not there: (what JAX is called with, the event)."""
  called = []

  class Relay:
    address, lost = "127.0.0.1:99", threading.Event()

    def __init__(self, address):
      called.append(address)

    def open(self, seconds):
      called.append(seconds)

  def join(place, error=None, **limits):
    def initialize(*given, **options):
      called.append((*given, options))
      if error:
        raise error

    monkeypatch.setattr(processes, "Relay", Relay)
    monkeypatch.setattr(processes.startup, "add_threads", lambda: called.append("threads"))
    monkeypatch.setattr(jax.config, "update", lambda key, value: called.append((key, value)))
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    return called, processes._connect(place, LIMITS | limits), Relay.lost
  return join


BEFORE = [("jax_enable_preemption_service", False), ("jax_cpu_enable_async_dispatch", False), "threads"]


def test_process_0_joins_directly_and_the_others_by_a_relay(connected):
  called, lost, of_relay = connected(Place("Slurm", 2, 0, "a:1", (2, 3)))
  options = dict(cluster_detection_method="deactivate", initialization_timeout=90, heartbeat_timeout_seconds=180)
  assert called == [*BEFORE, ("a:1", 2, 0, [2, 3], options)] and lost is not of_relay and not lost.is_set()
  called.clear()
  called, lost, of_relay = connected(Place("Slurm", 2, 1, "a:1"), heartbeat_seconds=30)
  options["heartbeat_timeout_seconds"] = 100  # at least: liveness has to be the first to notice
  assert called == [*BEFORE, "a:1", 90.5, ("127.0.0.1:99", 2, 1, [], options)] and lost is of_relay


@pytest.mark.parametrize("env, after", [
    ({}, None), ({"HTTPS_PROXY": "http://p"}, "127.0.0.1"), ({"http_proxy": "p", "no_proxy": "x"}, "x,127.0.0.1")])
def test_the_relay_is_not_asked_for_through_a_proxy(connected, monkeypatch, env, after):
  for name in list(os.environ):
    if "_proxy" in name.lower():
      monkeypatch.delenv(name)
  monkeypatch.setenv("no_proxy", "")
  monkeypatch.delenv("no_proxy")  # is put back at the end
  for name, value in env.items():
    monkeypatch.setenv(name, value)
  connected(Place("Slurm", 2, 1, "a:1"))
  assert os.environ.get("no_proxy") == after


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("x"), OSError("x")], ids=repr)
def test_processes_that_do_not_find_one_another(connected, error):
  with pytest.raises(ConfigError, match=r"cannot be joined \(process 1 of 2, by Slurm\): x\. Set JAX_COORDINATOR_ADDR"):
    connected(Place("Slurm", 2, 1, "a:1"), error)


def test_all_wait_for_one_another_only_where_there_are_several(monkeypatch):
  waited = []
  monkeypatch.setattr(processes.multihost_utils, "sync_global_devices", waited.append)
  processes.sync("alone")
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  processes.sync("together")
  assert waited == ["together"]


def test_what_each_process_says_comes_in_their_order(monkeypatch):
  assert processes.said_by_all("x") == ["x"]
  said = two_threads.run(monkeypatch, lambda index: (monkeypatch.setattr(processes, "_SAID", processes._FIRSTS) or [
      processes.said_by_all(f"{index} says"), processes.said_by_all(f"{index} again")]))
  assert said == [[["0 says", "1 says"], ["0 again", "1 again"]]] * 2


def test_a_key_is_looked_up_for_some_seconds():
  asked = []

  def get(error):
    def blocking_key_value_get(key, milliseconds):
      asked.append((key, milliseconds))
      if error:
        raise RuntimeError(error)
      return "value"
    return SimpleNamespace(blocking_key_value_get=blocking_key_value_get)

  assert processes._look_up(get(""), "k", 1.5) == "value"
  assert processes._look_up(get("DEADLINE_EXCEEDED: x"), "k") is None
  with pytest.raises(RuntimeError, match="UNAVAILABLE"):
    processes._look_up(get("UNAVAILABLE"), "k")
  assert asked == [("k", 1500), ("k", 5000), ("k", 5000)]


def test_the_first_process_s_value_is_that_of_all(monkeypatch):
  """What the others hold of their own is not what they are given; sizes travel first."""
  assert processes.bytes_from_first(b"x") == b"x" and processes.from_first({"a": 1}) == {"a": 1}
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  sent, told = [], iter(())

  def broadcast(array):
    sent.append(np.array(array))
    return next(told)

  monkeypatch.setattr(processes.multihost_utils, "broadcast_one_to_all", broadcast)
  data = '{"a": [1, NaN, "é"]}'.encode("ascii", "backslashreplace").replace(b"\\xe9", b"\\u00e9")
  for index in (0, 1):
    monkeypatch.setattr(jax, "process_index", lambda index=index: index)
    told = iter([np.int64(len(data)), np.frombuffer(data, np.uint8)])
    found = processes.from_first({"a": [1, float("nan"), "é"]} if index == 0 else "its own")
    assert found["a"][0] == 1 and found["a"][1] != found["a"][1] and found["a"][2] == "é"
  (size, whole), (_, nothing) = sent[:2], sent[2:]
  assert size == len(data) and size.dtype == np.int64 and bytes(whole) == data
  assert nothing.shape == (len(data),) and nothing.dtype == np.uint8 and not nothing.any()


def test_arrays_of_several_processes_are_gathered_whole(monkeypatch):
  found = processes.on_every_host({"a": jax.numpy.arange(3)})
  assert isinstance(found["a"], np.ndarray) and found["a"].tolist() == [0, 1, 2]
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(processes.multihost_utils, "process_allgather", lambda arrays, tiled: (arrays, tiled))
  assert processes.on_every_host("arrays") == ("arrays", True)


@pytest.mark.devices(8)
@pytest.mark.parametrize("requested", [False, True])
def test_who_is_asked_to_stop_says_so_on_each_of_its_devices(requested):
  asked = processes.stop_requests(mesh_lib.make_mesh(dict(data=2, tensor=4)), requested)
  assert asked.dtype == np.int32 and asked.tolist() == [int(requested)] * 8
  assert [part.data.shape for part in asked.addressable_shards] == [(1,)] * 8


def test_only_the_first_process_speaks(monkeypatch, capsys):
  processes.say("one", "two")
  monkeypatch.setattr(jax, "process_index", lambda: 1)
  processes.say("three")
  assert capsys.readouterr().out == "one\ntwo\n"


@pytest.mark.parametrize("given, port", [("9", 9), ("", 8482)])
def test_the_port_of_a_job_set(given, port):
  assert find(JOB_SET | {"JAX_COORDINATOR_PORT": given}).address == f"weft-hosts-0-0.weft:{port}"


@pytest.mark.parametrize("env, expected", [
    ({"PMI_SIZE": "4", "PMI_RANK": "3", "JAX_COORDINATOR_ADDRESS": "a:1"}, Place("MPI", 4, 3, "a:1")),
    ({"PMI_SIZE": "1", "PMI_RANK": "0"}, None),
    ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "2"} | {
        "JAX_COORDINATOR_ADDRESS": "a:1"}, Place("Open MPI", 4, 3, "a:1", (2,))),  # how many are on a host is not said
    (GIVEN | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, Place("the environment", 1, 0, "a:1")),  # as said
    ({"TPU_PROCESS_ADDRESSES": "a:1,b:1,c:1", "TPU_WORKER_HOSTNAMES": "a"}, Place("GKE", 3, ask="gketpu")),
    (SLURM | {"SLURM_NODEID": "7"}, Place("Slurm", 8, 5, local_devices=(1,), ask="slurm")),  # not listed
    (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2"}, Place("Slurm", 8, 5, ask="slurm")),  # 3 GPUs of 2 tasks
])
def test_other_launchers_and_odd_ones(env, expected):
  assert find(env) == expected
