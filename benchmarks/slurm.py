"""A Slurm of one node in a temporary folder, and launch/slurm.sbatch on it: left alone, preempted, one process killed.

    apt-get install slurm-wlm munge        # Debian; as root, and nothing is started or changed outside the folder
    python benchmarks/slurm.py

Each case trains a small model to the same last step, in two tasks of one CPU device each, and is compared with a run of
one process. Prints a table; exits with 1 if a case did not end as it should. Takes some minutes on 2 cores.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = 60
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
TRAIN = ["--config=configs/quickstart.py", f"--config.total_steps={STEPS}", "--config.log_steps=1",
         "--config.ckpt_steps=10", "--config.seq_len=64", "--config.batch_size=4", "--config.model.num_layers=2",
         "--config.model.hidden_size=64", "--config.model.intermediate_size=128", "--config.tokenizer.type=bytes",
         "--config.input.sources.main.max_documents=40", "--config.evals.samples.at_end=False",
         "--config.evals.samples.eval_percent=0", "--config.processes.heartbeat_seconds=10"]
# A requeued job waits for its credential to expire: two minutes by default.
CONF = """
ClusterName=weft
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=10
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
{node} NodeAddr=127.0.0.1 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=60 State=UP
"""


@contextlib.contextmanager
def slurm(folder: Path):
  """Runs a controller and a node; SLURM_CONF then leads every command to them."""
  ports = []
  with contextlib.ExitStack() as open_sockets:
    for _ in range(2):
      s = open_sockets.enter_context(socket.socket())
      s.bind(("localhost", 0))
      ports.append(s.getsockname()[1])
  node = subprocess.run(["slurmd", "-C"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
  host = re.search(r"NodeName=(\S+)", node)[1]
  conf = folder / "slurm.conf"
  conf.write_text(CONF.format(host=host, controller=ports[0], daemon=ports[1], folder=folder, node=node))
  for name in ("state", "spool"):
    (folder / name).mkdir()
  key = folder / "munge.key"
  key.write_bytes(os.urandom(1024))
  key.chmod(0o600)
  os.environ["SLURM_CONF"] = str(conf)
  munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"]
  daemons = []
  try:
    for command in (munged, ["slurmctld", "-D"], ["slurmd", "-D"]):
      daemons.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
      time.sleep(2)
    deadline = time.monotonic() + 60
    while "idle" not in subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True).stdout:
      if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in daemons):
        logs = "\n".join(f"--- {log}\n{log.read_text()[-2000:]}" for log in sorted(folder.glob("*.log")))
        raise SystemExit(f"Slurm did not start:\n{logs}")
      time.sleep(1)
    yield
  finally:
    for daemon in reversed(daemons):
      daemon.terminate()
      daemon.wait()


class Job:
  """launch/slurm.sbatch, submitted; its log is beside its workdir."""

  def __init__(self, workdir: Path):
    self.workdir, self.log = workdir, Path(f"{workdir}.log")
    submit = ["sbatch", "--parsable", "--ntasks-per-node=2", f"--output={self.log}", "launch/slurm.sbatch", *TRAIN,
              f"--workdir={workdir}"]
    self.id = subprocess.run(submit, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    self.restarts = 0

  def shows(self, key: str) -> str:
    shown = subprocess.run(["scontrol", "show", "job", self.id], capture_output=True, text=True, check=True).stdout
    return re.search(rf"\b{key}=(\S+)", shown)[1]

  def until(self, condition, seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
      if time.monotonic() > deadline or self.shows("JobState") in ("FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT"):
        raise SystemExit(f"job {self.id} is {self.shows('JobState')}; its log:\n{self.log.read_text()[-4000:]}")
      time.sleep(0.5)

  def until_step(self, step: int) -> None:
    self.until(lambda: max(losses(self.workdir), default=0) >= step)

  def finish(self) -> None:
    self.until(lambda: self.shows("JobState") == "COMPLETED")
    self.restarts = int(self.shows("Restarts"))


def losses(workdir: Path) -> dict[int, float]:
  try:
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  except (FileNotFoundError, json.JSONDecodeError):
    return {}
  return {row["step"]: row["loss"] for row in rows if "loss" in row}


def command(workdir: Path) -> list[str]:
  return [sys.executable, "-u", "-m", "trainer", *TRAIN, f"--workdir={workdir}"]


def kill_the_second_task(job: Job) -> None:
  """Finds it by its environment."""
  for process in Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(OSError):
      variables = (process / "environ").read_bytes().split(b"\0")
      mine = f"SLURM_JOB_ID={job.id}".encode() in variables and b"SLURM_PROCID=1" in variables
      if mine and b"trainer" in (process / "cmdline").read_bytes():
        os.kill(int(process.name), signal.SIGKILL)


# How a job is disturbed once it has taken some steps.
DISTURBED = {
    "sbatch": None,
    "sbatch, TERM as before the time limit": lambda job: subprocess.run(
        ["scancel", "--signal=TERM", "--batch", job.id], check=True),
    "sbatch, preempted (scontrol requeue)": lambda job: subprocess.run(["scontrol", "requeue", job.id], check=True),
    "sbatch, one task killed (kill -9)": kill_the_second_task,
}


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--keep", action="store_true", help="keep the folder with all logs")
  keep = parser.parse_args().keep
  missing = [name for name in NEEDED if shutil.which(name) is None]
  if missing or os.geteuid() != 0:
    raise SystemExit(f"missing: {', '.join(missing) or 'root'}. As root: apt-get install slurm-wlm munge")
  os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=1", PYTHON=sys.executable)
  folder = Path(tempfile.mkdtemp(prefix="weft-slurm-"))
  rows = []
  try:
    began = time.monotonic()
    two_devices = dict(os.environ, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    subprocess.run(command(folder / "alone"), cwd=ROOT, env=two_devices, check=True, stdout=subprocess.DEVNULL)
    alone = losses(folder / "alone")
    rows.append(("one process, two devices", 1, 0, alone, time.monotonic() - began))
    with slurm(folder):
      began = time.monotonic()
      done = subprocess.run(["srun", "-n2", *command(folder / "srun")], cwd=ROOT, capture_output=True, text=True)
      assert done.returncode == 0, done.stdout + done.stderr
      rows.append(("srun -n2", processes(done.stdout), 0, losses(folder / "srun"), time.monotonic() - began))
      for number, (name, disturb) in enumerate(DISTURBED.items()):
        began = time.monotonic()
        job = Job(folder / f"job{number}")
        if disturb is not None:
          job.until_step(15)
          disturb(job)
        job.finish()
        said = job.log.read_text()
        if disturb is kill_the_second_task:
          print(next(line for line in said.splitlines() if line.startswith("process 1 (host")))
        assert (disturb is None) == (job.restarts == 0), said
        rows.append((name, processes(said), job.restarts, losses(job.workdir), time.monotonic() - began))
    return report(rows)
  finally:
    if not keep:
      shutil.rmtree(folder, ignore_errors=True)


def processes(said: str) -> int:
  """How many the run found, each time that it started."""
  found = set(re.findall(r"in (\d+) process\(es\)", said))
  assert len(found) == 1, said
  return int(found.pop())


def report(rows: list) -> int:
  """Prints the table; 1 if something in it is not as it should be."""
  version = subprocess.run(["slurmd", "-V"], capture_output=True, text=True, check=True).stdout.strip()
  print(f"{version}, {os.cpu_count()} cores\n")
  print("| | processes | queued again | steps | last loss | largest difference from one process | seconds |")
  print("|---|---|---|---|---|---|---|")
  alone, straight, bad = rows[0][3], rows[1][3], []
  for name, count, restarts, found, seconds in rows:
    difference = max(abs(found.get(step, float("inf")) - loss) for step, loss in alone.items())
    print(f"| {name} | {count} | {restarts} | {len(found)} | {found[STEPS]:.6f} | {difference:.1e} | {seconds:.0f} |")
    if difference > 1e-4 or name != rows[0][0] and (count != 2 or found != straight):
      bad.append(name)
  print(f"\nNOT as it should be: {bad}" if bad else
        "\nThe losses of all runs of two processes are the same to the bit.")
  return bool(bad)


if __name__ == "__main__":
  sys.exit(main())
