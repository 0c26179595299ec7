"""The scripts in launch/ are whole: their syntax, and the commands and keys that they use."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml  # ml_collections needs it

from tests import tiny
from trainer.distributed import processes

LAUNCH = tiny.ROOT / "launch"


@pytest.mark.parametrize("name", ["slurm.sbatch", "tpu_vm.sh"])
def test_shell_scripts_parse(name):
  subprocess.run(["bash", "-n", LAUNCH / name], check=True)


def test_each_script_starts_the_trainer_and_is_documented():
  page = (tiny.ROOT / "docs" / "processes.md").read_text()
  assert sorted(p.name for p in LAUNCH.iterdir()) == ["gke_jobset.yaml", "slurm.sbatch", "tpu_vm.sh"]
  for path in LAUNCH.iterdir():
    text = path.read_text()
    assert path.name in page and re.search(r"-m,? trainer", text)
    config = re.search(r"--config=(configs/\w+\.py)", text)[1]
    assert (tiny.ROOT / config).is_file()


def manifest():
  return yaml.safe_load((LAUNCH / "gke_jobset.yaml").read_text())


def container(made):
  job = made["spec"]["replicatedJobs"][0]["template"]["spec"]
  return job, job["template"]["spec"]["containers"][0]


def test_pods_find_one_another_by_what_the_manifest_gives_them():
  made = manifest()
  job, pod = container(made)
  given = {entry["name"]: entry.get("value") for entry in pod["env"]}
  sources = {entry["name"]: entry["valueFrom"]["fieldRef"]["fieldPath"] for entry in pod["env"] if "valueFrom" in entry}
  assert sources == {"JOBSET_NAME": "metadata.annotations['jobset.sigs.k8s.io/jobset-name']",
                     "REPLICATED_JOB_NAME": "metadata.annotations['jobset.sigs.k8s.io/replicatedjob-name']"}
  named = {"JOBSET_NAME": made["metadata"]["name"], "REPLICATED_JOB_NAME": made["spec"]["replicatedJobs"][0]["name"]}
  place = processes.find(given | named | {"JOB_COMPLETION_INDEX": "2"})
  assert (place.index, place.address) == (2, "weft-hosts-0-0.weft:8482")
  assert place.count == job["parallelism"] == job["completions"] == 4


def pod_of(tmp_path, code, told):
  """The exit code of the pod's command around a program that ends with `code`; `told`: after it got SIGTERM."""
  _, pod = container(manifest())
  program = ["bash", "-c", f"trap 'exit {code}' TERM; touch ready; while true; do sleep 0.1; done"] if told else [
      "bash", "-c", f"touch ready; exit {code}"]
  process = subprocess.Popen([*pod["command"], *program], cwd=tmp_path)
  if told:
    while not (tmp_path / "ready").exists():
      assert process.poll() is None
    process.terminate()
  return process.wait(timeout=60)


@pytest.mark.parametrize("code", [0, 1, 75])
def test_a_pod_has_the_exit_code_of_the_trainer(tmp_path, code):
  assert pod_of(tmp_path, code, told=False) == code


def test_a_pod_that_was_told_to_end_does_not_count_as_finished(tmp_path):
  assert pod_of(tmp_path, 0, told=True) == 75


def batch(tmp_path, body, restarts="0", signal_it=False):
  """(exit code, what was asked of Slurm) of slurm.sbatch with an `srun` that runs `body`."""
  commands = tmp_path / "bin"
  commands.mkdir()
  # The real scancel signals the tasks; here the one task is told by a file.
  for name, text in (("srun", body), ("scontrol", f'echo "scontrol $*" >> {tmp_path}/asked'),
                     ("scancel", f'echo "scancel $*" >> {tmp_path}/asked; touch {tmp_path}/told')):
    (commands / name).write_text(f"#!/bin/bash\n{text}\n")
    (commands / name).chmod(0o755)
  env = os.environ | {"PATH": f"{commands}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": restarts}
  process = subprocess.Popen(["bash", LAUNCH / "slurm.sbatch", "--config=c.py"], cwd=tmp_path, env=env)
  if signal_it:
    while not (tmp_path / "ready").exists():
      assert process.poll() is None
    process.terminate()
  code = process.wait(timeout=60)
  asked = tmp_path / "asked"
  return code, asked.read_text().splitlines() if asked.exists() else []


@pytest.mark.parametrize("code, again", [(0, False), (1, False), (75, True), (137, True)])
def test_a_batch_job_is_queued_again_where_that_may_help(tmp_path, code, again):
  assert batch(tmp_path, f"exit {code}") == (0 if again else code, ["scontrol requeue 7"] if again else [])


def test_a_batch_job_is_not_queued_again_for_ever(tmp_path):
  assert batch(tmp_path, "exit 75", restarts="100") == (75, [])


def test_before_the_time_limit_the_tasks_are_told_and_the_job_is_queued_again(tmp_path):
  body = "touch ready; while [ ! -e told ]; do sleep 0.1; done; sleep 0.3; touch saved; exit 0"
  code, asked = batch(tmp_path, body, signal_it=True)
  assert asked == ["scancel --signal=TERM 7", "scontrol requeue 7"] and code == 0
  assert (tmp_path / "saved").exists()  # only then


def test_the_batch_script_starts_the_trainer_with_its_arguments(tmp_path):
  code, _ = batch(tmp_path, f'echo "$@" > {tmp_path}/arguments')
  assert code == 0
  assert (tmp_path / "arguments").read_text().split() == [
      "--kill-on-bad-exit=0", "--wait=300", os.environ.get("PYTHON", "python"), "-u", "-m", "trainer", "--config=c.py"]


def tpu(tmp_path, states, endings):
  """(exit code, commands) of tpu_vm.sh with a `gcloud` that tells these states of the slice, and these exit codes of
  the trainer, one run after another."""
  commands = tmp_path / "bin"
  commands.mkdir()
  (commands / "gcloud").write_text(f"""#!{sys.executable}
import json, pathlib, sys
folder, line = pathlib.Path({str(tmp_path)!r}), " ".join(sys.argv[1:])
with (folder / "asked").open("a") as file:
  file.write(line + "\\n")
def next_of(name):
  values = json.loads((folder / name).read_text())
  (folder / name).write_text(json.dumps(values[1:]))
  return values[0]
if "describe" in line:
  print(next_of("states"))
elif "trainer" in line:
  print("\\n".join(f"exit code {{code}}" for code in next_of("endings")))
""")
  (commands / "sleep").write_text("#!/bin/bash\n")
  for command in commands.iterdir():
    command.chmod(0o755)
  (tmp_path / "states").write_text(json.dumps(states))
  (tmp_path / "endings").write_text(json.dumps(endings))
  env = os.environ | {"PATH": f"{commands}:{os.environ['PATH']}", "ZONE": "z", "TYPE": "v4-32", "VERSION": "v"}
  done = subprocess.run([LAUNCH / "tpu_vm.sh", "mine", "--config=c.py", "--workdir=/a b"], env=env, cwd=tmp_path,
                        capture_output=True, text=True, timeout=60)
  return done.returncode, (tmp_path / "asked").read_text().splitlines()


def test_a_slice_is_asked_for_set_up_and_trained_on_until_the_run_is_finished(tmp_path):
  """Not there, coming up, there: a process is lost; preempted; asked for again; finished."""
  states = ["", "PROVISIONING", "ACTIVE", "SUSPENDED", "", "ACTIVE"]
  code, asked = tpu(tmp_path, states, [[75, 137], [0, 0]])
  assert code == 0
  verbs = [line.split()[2:4] for line in asked if "describe" not in line]
  create, ssh, delete = ["queued-resources", "create"], ["tpu-vm", "ssh"], ["queued-resources", "delete"]
  assert verbs == [create, ssh, ssh, delete, create, ssh, ssh]
  assert all("--zone=z" in line for line in asked) and "--accelerator-type=v4-32" in asked[1]
  trained = [line for line in asked if "trainer" in line]
  assert all("--worker=all" in line and "--workdir=/a b'" in line for line in trained)


def test_a_slice_is_not_asked_for_again_after_an_error_of_the_run(tmp_path):
  assert tpu(tmp_path, ["ACTIVE"], [[1, 75]])[0] == 1


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("name", ["slurm.sbatch", "tpu_vm.sh"])
def test_shellcheck_finds_nothing(name):
  subprocess.run(["shellcheck", "--severity=warning", LAUNCH / name], check=True)
