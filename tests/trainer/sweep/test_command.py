"""Sweeps: the runs and their processes, Slurm's array. Most processes here are a program that only says what a trainer
would say; the trainer itself runs in two of the tests."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import docs_commands, tiny
from trainer.callbacks import Callback
from trainer.errors import ConfigError
from trainer.sweep import command as sweep_lib
from trainer.sweep import runs as sweep_runs
from trainer.sweep import slurm as sweep_slurm
from trainer.sweep.combinations import argument, chain, fixed, name_of, sweep
from trainer.sweep.runs import Planned

# In place of the trainer: leaves what a finished run leaves, or does what --config.seed says.
STUB = """
import json, os, pathlib, signal, sys, time
given = dict(text.lstrip("-").split("=", 1) for text in sys.argv[1:])
folder, seed = pathlib.Path(given["workdir"]), given.get("config.seed", "0")
how = "finished"

def stop(*_):
  global how
  how = "stopped"

signal.signal(signal.SIGTERM, stop)
(folder / "pid").write_text(str(os.getpid()))
(folder / "began").write_text(str(time.time()))
print("begins")
if seed == "13":
  print("a line\\n\\n\\x1b[31mred\\nthe last line")
  sys.exit(3)
while seed == "7" and how == "finished":
  time.sleep(0.02)
time.sleep(float(given.get("config.sleep", 0)))
(folder / "config.json").write_text("{}")
rows = [{"step": 0, "loss": 9.0}, {"step": 5, "loss": float(seed)}, {"step": 5, "eval/val/loss": float(seed) / 2}]
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
(folder / "run.json").write_text(json.dumps({"starts": [{"end": {"how": how}}]}))
(folder / "ended").write_text(str(time.time()))
"""


class Fail(Callback):
  def __init__(self, fails=False):
    self._fails = fails

  def on_optimizer_step(self, run):
    if self._fails:
      raise RuntimeError("as it was told to")


@pytest.fixture
def stub(tmp_path, monkeypatch):
  (tmp_path / "stub.py").write_text(STUB, encoding="utf-8")
  monkeypatch.setattr(sweep_runs, "TRAINER", (sys.executable, "-u", str(tmp_path / "stub.py")))


def planned(root, *seeds, **more):
  return [Planned(f"seed={seed}", {"seed": seed}, root / f"seed={seed}", [
      f"--workdir={root / f'seed={seed}'}", f"--config.seed={seed}", *(f"--config.{k}={v}" for k, v in more.items())])
      for seed in seeds]


# ---------------------------------------------------------------------------------------------- plans


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return tiny.write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture
def config_file(tmp_path, corpus):
  (tmp_path / "tiny_sweep.py").write_text(f"""
from pathlib import Path
from tests import tiny
from trainer.sweep.command import product, sweep

def get_config(arg=None):
  config = tiny.config(Path({str(corpus)!r}), total_steps=2, evals={{}})
  config.callbacks.fail = dict(type="tests.trainer.sweep.test_command.Fail", fails=False)
  return config

def get_sweep():
  return product(sweep("seed", [1, 2]), sweep("optimizer.b2", [0.9]))
""", encoding="utf-8")
  return str(tmp_path / "tiny_sweep.py")


@pytest.mark.parametrize("key, value", [
    ("optimizer.learning_rate", 3e-3), ("optimizer.learning_rate", 1), ("seed", 3), ("optimizer.nesterov", False),
    ("optimizer.freeze", (".*bias", "a,b")), ("optimizer.freeze", ["x"]), ("schedule.name", "wsd"),
    ("optimizer.wd_mults", ((".*", 0.5),)), ("input.sources.main.path", "a b/*.txt"), ("total_tokens", 10**6),
    ("chat.prefix_end", "'quoted'\n"),
])
def test_an_override_arrives_as_it_is(config_file, key, value):
  config = sweep_lib.config_of(config_file, [argument(key, value)])
  for part in key.split("."):
    config = config[part]
  assert config == (tuple(value) if isinstance(value, list) else value)


def test_everything_that_cannot_be_is_told_at_once_and_nothing_is_made(config_file, tmp_path):
  found = chain(sweep("seed", [0, "x"]), sweep("optimizer.learning_rat", [1]), sweep("batch_size", [0]), fixed({}),
                sweep("optimizer.b2", [0.95]), sweep("evals", [None]), sweep("schedule.name", ["cosinus"]))
  with pytest.raises(ConfigError) as told:
    sweep_lib.plan(config_file, tmp_path / "root", found, [])
  text = str(told.value)
  assert "7 of 8 runs cannot be; nothing was started" in text
  for words in ("seed=x", "invalid literal", "did you mean config.optimizer.learning_rate?", "batch_size is 0",
                "would train what seed=0", "evals is None", "schedule.name is 'cosinus'"):
    assert words in text, words
  assert not (tmp_path / "root").exists()


def test_a_key_of_all_runs_is_not_one_of_the_sweep(config_file, tmp_path):
  with pytest.raises(ConfigError, match="seed is set for all runs and by the sweep"):
    sweep_lib.plan(config_file, tmp_path, sweep("seed", [1]), ["--config.seed=3"])


def test_where_the_runs_come_from(config_file, tmp_path):
  assert [c["seed"] for c in sweep_lib.combinations(config_file, None, [], False)] == [1, 2]
  assert len(sweep_lib.combinations(config_file, None, ["a=1,2", "b=3,4"], False)) == 4
  assert len(sweep_lib.combinations(config_file, None, ["a=1,2", "b=3,4"], True)) == 2
  (tmp_path / "other.py").write_text("def get_sweep():\n  return [{'seed': 5}]\n")
  assert sweep_lib.combinations(config_file, str(tmp_path / "other.py"), [], False) == [{"seed": 5}]
  (tmp_path / "none.py").write_text("x = 1\n")
  (tmp_path / "broken.py").write_text("x = \n")
  (tmp_path / "empty.py").write_text("def get_sweep():\n  return []\n")
  (tmp_path / "wrong.py").write_text("from trainer.errors import ConfigError\nraise ConfigError('of its own')\n")
  for arguments, words in (((config_file, "none.py", ["a=1"], False), "give one of them"),
                           ((config_file, None, [], True), "there is none"),
                           ((str(tmp_path / "none.py"), None, [], False), r"has no get_sweep\(\)"),
                           ((str(tmp_path / "empty.py"), None, [], False), "empty.py has no combination"),
                           ((str(tmp_path / "wrong.py"), None, [], False), "^of its own$"),
                           ((str(tmp_path / "broken.py"), None, [], False), "cannot be read: SyntaxError")):
    with pytest.raises(ConfigError, match=words):
      sweep_lib.combinations(*arguments)


def test_planning_takes_no_device(config_file, tmp_path):
  """The process that plans stays beside those that train, which want the device's memory."""
  program = ("import sys\nfrom pathlib import Path\nfrom trainer.sweep import command as sweep\n"
             f"runs = sweep.plan({config_file!r}, Path({str(tmp_path / 'root')!r}), [{{'seed': 1}}], [])\n"
             "from jax._src import xla_bridge\nassert runs[0].config.seed == 1 and not xla_bridge._backends\n")
  done = tiny.run([sys.executable, "-c", program])
  assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------------------------- processes


def test_runs_go_on_after_one_that_fails_whose_last_lines_are_shown(stub, tmp_path):
  said, runs = [], planned(tmp_path, 1, 13, 2)
  assert sweep_runs.run_here(runs, 1, said.append) is None
  assert [run.status for run in runs] == ["finished", "failed", "finished"] and runs[1].exit_code == 3
  assert runs[1].said == ["begins", "a line", "\ufffd[31mred", "the last line"]
  assert any("seed=13 failed with exit code 3" in text and "    the last line" in text for text in said)
  # Again: what is finished stays as it is, what failed is tried again; its earlier output is not taken for this one.
  before = (tmp_path / "seed=1" / "began").read_text()
  for run in runs:
    run.status = sweep_runs.status_of(run)
  assert [run.status for run in runs] == ["finished", "new", "finished"]
  sweep_runs.run_here(runs, 1, said.append)
  assert (tmp_path / "seed=1" / "began").read_text() == before and len(runs[1].said) == 4
  assert (tmp_path / "seed=13" / sweep_runs.LOG).read_text().count("the last line") == 2


@pytest.mark.parametrize("jobs", [1, 3])
def test_as_many_run_at_a_time_as_were_asked_for(stub, tmp_path, jobs):
  runs = planned(tmp_path, 1, 2, 3, 4, 5, 6, sleep=0.5)
  sweep_runs.run_here(runs, jobs, lambda text: None)
  times = sorted((float((run.workdir / "began").read_text()), float((run.workdir / "ended").read_text()))
                 for run in runs)
  most = max(sum(begin <= moment < end for begin, end in times) for moment, _ in times)
  assert most == jobs


def test_each_job_has_gpus_of_its_own(tmp_path, monkeypatch):
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
  program = "import os, pathlib, sys, time; time.sleep(0.3)\n" \
            "pathlib.Path(sys.argv[1].split('=')[1], 'gpus').write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
  monkeypatch.setattr(sweep_runs, "TRAINER", (sys.executable, "-c", program))
  runs = [Planned(name, {}, tmp_path / name, [f"--workdir={tmp_path / name}"]) for name in "abcd"]
  sweep_runs.run_here(runs, 2, lambda text: None, gpus_per_run=2)
  assert sorted((run.workdir / "gpus").read_text() for run in runs) == ["4,5", "4,5", "6,7", "6,7"]
  with pytest.raises(ConfigError, match="--jobs times --gpus_per_run is 6"):
    sweep_runs.run_here(runs, 3, lambda text: None, gpus_per_run=2)


def sweeping(tmp_path, seeds, jobs):
  """A process that runs the stub in place of trainers, and how it ended on its output's last line."""
  (tmp_path / "stub.py").write_text(STUB, encoding="utf-8")
  program = f"""
import sys
from pathlib import Path
from tests.trainer.sweep.test_command import planned
from trainer.sweep import runs as sweep_runs
sweep_runs.TRAINER = (sys.executable, "-u", {str(tmp_path / "stub.py")!r})
runs = planned(Path({str(tmp_path)!r}), {", ".join(map(str, seeds))})
received = sweep_runs.run_here(runs, {jobs}, lambda text: print(text, flush=True))
print(received, [run.status for run in runs])
"""
  return subprocess.Popen([sys.executable, "-c", program], cwd=tiny.ROOT, stdout=subprocess.PIPE, text=True,
                          env=tiny.environment(1))


def wait_for(path, process=None):
  until = time.monotonic() + 120
  while not path.exists():
    assert time.monotonic() < until and (process is None or process.poll() is None)
    time.sleep(0.02)


def test_a_stop_is_handed_on_and_no_other_run_begins(tmp_path):
  process = sweeping(tmp_path, (7, 1, 2), 1)
  wait_for(tmp_path / "seed=7" / "began", process)
  process.send_signal(signal.SIGINT)
  out, _ = process.communicate(timeout=60)
  assert out.splitlines()[-1] == f"{int(signal.SIGINT)} ['stopped', 'new', 'new']"
  assert "SIGINT: 1 running, each saves after its step and ends" in out and not (tmp_path / "seed=1").exists()


def test_a_run_whose_sweep_was_killed_is_not_started_twice(stub, tmp_path):
  process = sweeping(tmp_path, (7,), 1)
  wait_for(tmp_path / "seed=7" / "began", process)
  process.kill()
  process.communicate()
  said, runs = [], planned(tmp_path, 7, 1)
  sweep_runs.run_here(runs, 1, said.append)
  assert [run.status for run in runs] == ["busy", "finished"] and "still trains there" in said[0]
  assert (tmp_path / "seed=7" / sweep_runs.LOG).read_text() == "begins\n"  # of the first process alone
  os.kill(int((tmp_path / "seed=7" / "pid").read_text()), signal.SIGTERM)
  wait_for(tmp_path / "seed=7" / "ended")


# ---------------------------------------------------------------------------------------------- the table


def test_the_table_is_sorted_and_what_has_no_value_comes_last(tmp_path):
  rows = {"a": [0.5], "b": [0.1, 0.7], "c": ["nan"], "d": [], "e": [0.2]}
  runs = []
  for name, values in rows.items():
    (tmp_path / name).mkdir()
    (tmp_path / name / "metrics.jsonl").write_text("".join(
        json.dumps({"step": step, "eval/val/loss": value}) + "\n" for step, value in enumerate(values)))
    runs.append(Planned(name, {}, tmp_path / name, [], status="finished"))
  assert [run.name for run, _ in sweep_runs.in_order(runs, "eval/val/loss", False)] == ["e", "a", "b", "c", "d"]
  ordered = sweep_runs.in_order(runs, "eval/val/loss", True)
  assert [run.name for run, _ in ordered] == ["b", "a", "e", "c", "d"]
  lines = sweep_runs.table(ordered, "eval/val/loss").splitlines()
  assert lines[0].split() == ["eval/val/loss", "loss", "step", "status", "run"]
  assert lines[1].split() == ["1", "0.7", "1", "finished", "b"] and lines[4].split() == ["4", "0", "finished", "c"]
  sweep_runs.write(tmp_path / "sweep.json", ordered, dict(metric="eval/val/loss"))
  saved = json.loads((tmp_path / "sweep.json").read_text())
  assert saved["metric"] == "eval/val/loss" and saved["runs"][0]["values"]["eval/val/loss"] == 0.7


def test_a_value_of_an_earlier_step_names_it(tmp_path):
  """As of a run that was stopped long after its last evaluation."""
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (
      {"step": 0, "eval/val/loss": 6.5}, {"step": 150, "loss": 2.0}, {"step": 179, "time/checkpoint": 1.0})))
  ordered = sweep_runs.in_order([Planned("a", {}, tmp_path, [], status="stopped")], "eval/val/loss", False)
  assert "6.5 at step 0" in (line := sweep_runs.table(ordered, "eval/val/loss").splitlines()[1])
  assert "2 at step 150" in line and " 179  stopped" in line
  sweep_runs.write(tmp_path / "sweep.json", ordered, {})
  assert json.loads((tmp_path / "sweep.json").read_text())["runs"][0]["values"] == {
      "step": 179, "eval/val/loss": 6.5, "eval/val/loss/step": 0, "loss": 2.0, "loss/step": 150}


# ---------------------------------------------------------------------------------------------- Slurm


def slurm(tmp_path, monkeypatch, body='echo "Submitted batch job 7"'):
  """A folder with a fake sbatch and srun first in the path; what sbatch was given is in `asked`."""
  commands = tmp_path / "bin"
  commands.mkdir()
  # The real srun starts its program on each node; here once.
  for name, text in (("sbatch", f'echo "$@" >> {tmp_path}/asked\n{body}'),
                     ("srun", 'while [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"'),
                     ("scontrol", f'echo "scontrol $*" >> {tmp_path}/asked')):
    (commands / name).write_text(f"#!/bin/bash\n{text}\n")
    (commands / name).chmod(0o755)
  monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")


def test_the_array_has_the_runs_that_are_not_finished(tmp_path, monkeypatch):
  slurm(tmp_path, monkeypatch)
  runs = planned(tmp_path, 0, 1, 2, 3, 4)
  runs[1].status = "finished"
  script = sweep_slurm.write_script(tmp_path, runs, ["--time=4:00:00", "--comment=two words"], 2)
  lines = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
  assert "#SBATCH --array=0,2,3,4%2" in lines and "#SBATCH --time=4:00:00" in lines
  assert '#SBATCH "--comment=two words"' in lines and f"#SBATCH --chdir={os.getcwd()}" in lines
  subprocess.run(["bash", "-n", script], check=True)
  # It is launch/slurm.sbatch but for what names the run.
  launch = (tiny.ROOT / "launch" / "slurm.sbatch").read_text().splitlines()
  ours = script.read_text().splitlines()
  assert [line for line in launch if line not in ours and not line.startswith("#")] == []
  assert f"  4) set -- {shlex.join(runs[4].arguments)} ;;" in ours
  sweep_slurm.submit(script)
  assert (tmp_path / "asked").read_text().split() == [str(script)]
  # The numbers of an array stay, whatever becomes of the sweep.
  assert sweep_slurm.write_script(tmp_path, planned(tmp_path, 9), [], None) != script and script.exists()
  for option in ("time=3", "--array=1-2", "--x\nrm -rf /"):
    with pytest.raises(ConfigError, match="--sbatch="):
      sweep_slurm.write_script(tmp_path, runs, [option], None)


def test_a_refusing_sbatch_and_a_missing_one_are_told(tmp_path, monkeypatch):
  slurm(tmp_path, monkeypatch, "echo no such partition >&2; exit 1")
  with pytest.raises(ConfigError, match="exit code 1: 'no such partition'"):
    sweep_slurm.submit(tmp_path / "x.sbatch")
  monkeypatch.setenv("PATH", "")
  with pytest.raises(ConfigError, match="there is no sbatch here.*type: sbatch .*x.sbatch"):
    sweep_slurm.submit(tmp_path / "x.sbatch")


# ---------------------------------------------------------------------------------------------- the trainer itself


def command(config_file, root, *more):
  return [sys.executable, "-m", "trainer.sweep", f"--config={config_file}", f"--workdir={root}", *more]


def said(argv, monkeypatch, capsys):
  """What such a command says, in this process."""
  capsys.readouterr()
  docs_commands.run(argv[2:], monkeypatch)
  return capsys.readouterr().out


def test_runs_are_compared_by_their_first_loss_of_evaluation_unless_told(config_file, tmp_path, monkeypatch, capsys):
  without = tmp_path / "without.py"
  text = Path(config_file).read_text()
  without.write_text(text.replace("  return config\n", "  config.evals = {}\n  return config\n"))
  for file, more, metric in ((config_file, (), "eval/val/loss"), (config_file, ("--metric=step",), "step"),
                             (without, (), "loss")):
    said(command(file, tmp_path / "root", "--gather", *more), monkeypatch, capsys)
    assert json.loads((tmp_path / "root" / "sweep.json").read_text())["metric"] == metric


def test_a_sweep_of_real_runs(config_file, tmp_path, monkeypatch, capsys):
  """One of two fails; the other is finished, and left alone the next time."""
  root = tmp_path / "root"
  values = ("--set=seed=1,2", "--set=callbacks.fail.fails=False,True", "--zip", "--metric=loss")
  done = tiny.run(command(config_file, root, *values))
  assert done.returncode == 1, done.stderr
  assert "as it was told to" in done.stdout and "1 of 2 are not finished" in done.stdout
  saved = json.loads((root / "sweep.json").read_text())["runs"]
  assert [(run["overrides"]["seed"], run["status"]) for run in saved] == [(1, "finished"), (2, "failed")]
  assert saved[0]["values"]["step"] == 2 and saved[0]["values"]["loss"] > 0
  assert json.loads((root / saved[0]["name"] / "config.json").read_text())["seed"] == 1

  shown = said(command(config_file, root, *values, "--dry_run"), monkeypatch, capsys)
  assert "2 runs in" in shown and ", 1 of them finished" in shown
  gathered = said(command(config_file, root, *values, "--gather"), monkeypatch, capsys)
  assert "finished  fails=False__seed=1-" in gathered


def test_a_dry_run_hands_nothing_to_slurm(config_file, tmp_path, monkeypatch, capsys):
  slurm(tmp_path, monkeypatch)
  shown = said(command(config_file, tmp_path / "root", "--slurm", "--dry_run"), monkeypatch, capsys)
  assert "array-" in shown and "Submitted" not in shown and not (tmp_path / "asked").exists()


def test_a_task_of_slurm_is_a_run_of_the_sweep(config_file, tmp_path, monkeypatch, capsys):
  slurm(tmp_path, monkeypatch)
  root = tmp_path / "root"
  submitted = said(command(config_file, root, "--slurm", "--sbatch=--partition=gpu"), monkeypatch, capsys)
  assert "Submitted batch job 7" in submitted
  (script,) = root.glob("array-*.sbatch")
  task = tiny.run(["bash", str(script)], SLURM_ARRAY_TASK_ID="1", SLURM_JOB_ID="7")
  assert task.returncode == 0, task.stderr
  (workdir,) = [path for path in root.iterdir() if path.is_dir()]
  assert workdir.name == name_of({"seed": 2, "optimizer.b2": 0.9}) and "finished all 2 steps" in task.stdout
  again = said(command(config_file, root, "--slurm", "--dry_run"), monkeypatch, capsys)
  assert ", 1 of them finished" in again
  script = max(root.glob("array-*.sbatch"), key=lambda path: path.stat().st_mtime)
  assert "#SBATCH --array=0\n" in script.read_text()


@pytest.mark.parametrize("changed, rest, words", [
    (dict(), ["seed=1"], "unexpected argument 'seed=1'; overrides for all runs are written --config.key=value"),
    (dict(), ["--config.seed"], "unexpected argument '--config.seed'"),
    (dict(config=None), [], "give --config"), (dict(workdir=None), [], "give --config .* and --workdir"),
    (dict(gather=True, slurm=True), [], "--gather starts no run"),
    (dict(gather=True, dry_run=True), [], "--gather starts no run"),
    (dict(), [], "is the workdir of a run; a sweep needs a folder of its own")])
def test_wrong_flags_are_told(tmp_path, changed, rest, words):
  (tmp_path / "config.json").write_text("{}")
  given = dict(array=None, index=None, config="c.py", workdir=str(tmp_path), slurm=False, gather=False, dry_run=False)
  with pytest.raises(ConfigError, match=words):
    sweep_lib._run(SimpleNamespace(**given | changed), rest)
