"""Two and four real processes: they train, evaluate and sample as one, on any mesh and on another one after a restart;
and if one dies, hangs, or cannot have its data, the others name it and end."""

import json
import os
import shutil
import signal
import socket
from pathlib import Path

import pytest

from tests import several, tiny
from tests.several import launch, outcome
from tests.test_faults import assert_same_run, logged, wait_for
from tests.trainer import rollout_runs
from tests.trainer.serve import servers
from trainer.compiler import compiled
from trainer.rollouts import schedule
from trainer.telemetry.writers import read_rows

STEPS = 14


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return tiny.write_corpus(tmp_path_factory.mktemp("processes") / "texts")


def argv(corpus, workdir, *overrides):
  return tiny.command(several.__file__, corpus, workdir, f"--config.total_steps={STEPS}", "--config.ckpt_steps=2",
                      "--config.processes.heartbeat_seconds=8", "--config.processes.hang_seconds=15", *overrides)


def rows_in(file, steps):
  """{(step, row): content} of the rows that were built for these steps; twice the same row has the same content."""
  contents = {}
  for line in Path(file).read_text().splitlines():
    step, row, content = json.loads(line)
    if step in steps:
      assert contents.setdefault((step, row), content) == content
  return contents


def texts_in(workdir, step):
  """What was sampled at that step."""
  lines = (workdir / "samples" / f"sums-{step}.jsonl").read_text().splitlines()
  return [(row["prompt"], row["completion"], row["correct"]) for row in map(json.loads, lines)]


def assert_equal_to_rounding(ours, theirs, steps):
  for key, value in theirs.items():
    if key[0] in steps:
      assert ours[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
  assert {key for key in ours if key[0] in steps} == {key for key in theirs if key[0] in steps}


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
  """One process with one device, to the end: (workdir, file of rows)."""
  workdir = tmp_path_factory.mktemp("alone")
  done = tiny.run(argv(corpus, workdir), devices=1, EVALS="1", ROWS=f"{workdir}.rows")
  assert done.returncode == 0, done.stderr
  return workdir, f"{workdir}.rows"


@pytest.fixture(scope="module")
def two(corpus, tmp_path_factory):
  """Two processes with a device each, to the end: the workdir."""
  workdir = tmp_path_factory.mktemp("two")
  codes, outputs = several.run(argv(corpus, workdir), 2, 1)
  assert codes == [0, 0], "\n".join(outputs)
  return workdir


@pytest.mark.parametrize("begun", [0, pytest.param(5, marks=pytest.mark.slow)])
def test_a_run_goes_on_on_other_hosts_devices_and_meshes(begun, corpus, alone, tmp_path):
  """1 process × 8 devices for `begun` steps, then 2 × 2, then 1 × 1, each with another mesh: the rows of every step are
  bitwise those of the run that stayed, the losses and evaluations equal to 1e-5, the sampled texts the same."""
  workdir, rows_file = tmp_path / "w", tmp_path / "rows"
  if begun:
    first = argv(corpus, workdir, "--config.mesh.fsdp=2", "--config.mesh.tensor=2")
    assert tiny.run(first, devices=8, EVALS="1", ROWS=str(rows_file), STOP=str(begun)).returncode == 0
    assert newest(workdir) == begun

  processes = launch(argv(corpus, workdir, "--config.mesh.fsdp=2"), 2, 2, EVALS="1", ROWS=str(rows_file),
                     COMPILED=str(tmp_path / "compiled"))
  assert wait_for(processes[0], lambda: any(step >= 7 for step, _ in logged(workdir)))
  os.kill(processes[1].pid, signal.SIGTERM)  # only one of them is told
  codes, outputs = outcome(processes)
  assert codes == [0, 0], "\n".join(outputs)
  stopped = newest(workdir)
  assert 7 <= stopped < STEPS
  assert "in 2 process(es), mesh: data=2, fsdp=2" in outputs[0]
  # One program each, which was begun while the checkpoint was read.
  assert [name.split("_")[0] for name in (tmp_path / "compiled").read_text().splitlines()] == [compiled.THREAD] * 2

  assert tiny.run(argv(corpus, workdir), devices=1, EVALS="1", ROWS=str(rows_file)).returncode == 0
  meta = json.loads((workdir / "checkpoints" / str(STEPS) / "meta" / "metadata").read_text())
  assert meta["rows_seen"] == STEPS * 8
  assert rows_in(rows_file, range(STEPS)) == rows_in(alone[1], range(STEPS))
  assert len(rows_in(rows_file, range(STEPS))) == STEPS * 8
  assert_equal_to_rounding(logged(workdir), logged(alone[0]), range(STEPS + 1))
  for step in (0, 4, 8, STEPS):
    assert texts_in(workdir, step) == texts_in(alone[0], step)


def newest(workdir):
  return max((int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit()), default=0)


def test_four_processes_train_evaluate_and_sample_as_one(corpus, alone, tmp_path):
  workdir, rows_file = tmp_path / "w", tmp_path / "rows"
  codes, outputs = several.run(argv(corpus, workdir), 4, 1, EVALS="1", ROWS=str(rows_file), STOP="4")
  assert codes == [0] * 4, "\n".join(outputs)
  assert rows_in(rows_file, range(4)) == rows_in(alone[1], range(4))
  assert_equal_to_rounding(logged(workdir), logged(alone[0]), range(5))
  for step in (0, 4):
    assert texts_in(workdir, step) == texts_in(alone[0], step)


def test_a_checkpoint_that_one_process_cannot_read_is_left_as_it_is_by_all(corpus, two, tmp_path):
  workdir = shutil.copytree(two, tmp_path / "w")
  shutil.rmtree(workdir / "checkpoints" / str(STEPS))
  names = sorted((workdir / "checkpoints").iterdir())
  assert names[-1].name == str(STEPS - 2)
  codes, outputs = several.run(argv(corpus, workdir), 2, 1, FAULT="1:0:away")
  assert 0 not in codes, "\n".join(outputs)
  assert f"{names[-1]} was not read by process 1, which says why" in outputs[0]
  assert "could not be read: OSError" in outputs[1]
  assert sorted((workdir / "checkpoints").iterdir()) == names
  assert several.run(argv(corpus, workdir), 2, 1)[0] == [0, 0] and newest(workdir) == STEPS
  assert_same_run(workdir, two, STEPS)


GRPO_CONFIG = """
from pathlib import Path
from tests.trainer import rollout_runs

def get_config(folder):
  folder = Path(folder)
  c = rollout_runs.config((folder / "a.jsonl", folder / "b.jsonl"), "noting", ckpt_steps=1, keep_last=2,
                          rollout=dict(reward_workers=1, epochs=2))
  c.rollout.rewards.noting.file = ""
  return c
"""


def test_two_and_four_processes_sample_rollouts_and_train_as_one(tmp_path):
  """A rollout and two of its steps; rewards are computed in the first process alone, and one process goes on with what
  is left of the rollout of several."""
  config = tmp_path / "grpo_config.py"
  config.write_text(GRPO_CONFIG)
  rollout_runs.write_prompts(tmp_path)

  def grpo(workdir, steps):
    return tiny.command(config, tmp_path, workdir, f"--config.total_steps={steps}",
                        f"--config.rollout.rewards.noting.file={workdir}.notes", "--config.allow_config_changes=True")

  alone = tmp_path / "alone"
  assert tiny.run(grpo(alone, 3), devices=4).returncode == 0
  for count in (2, 4):
    together = tmp_path / f"of_{count}"
    codes, outputs = several.run(grpo(together, 2), count, 4 // count)
    assert codes == [0] * count, "\n".join(outputs)
    notes = [json.loads(line) for line in Path(f"{together}.notes").read_text().splitlines()]
    assert {process for process, _ in notes} == {"0"} and len(notes) == 4
    assert rollout_runs.table(together, 1) == rollout_runs.table(alone, 1)

  assert tiny.run(grpo(together, 3), devices=4).returncode == 0
  assert len(Path(f"{together}.notes").read_text().splitlines()) == 4
  ours, theirs = rollout_runs.rows_of(together), rollout_runs.rows_of(alone)
  assert list(ours) == list(theirs) == [1, 2, 3]
  for step, row in theirs.items():
    assert ours[step] == pytest.approx(row, rel=2e-5, abs=2e-6), step


# What happens to which process, at which step's rows; the exit codes of both; what is said by the other one.
FAULTS = [
    ("1:4:killed", [75, -signal.SIGKILL], "has not been heard of for"),
    ("0:6:killed", [-signal.SIGKILL, 75], "is gone: its connection was closed"),
    ("1:8:stopped", [75, 75], "has not been heard of for"),
    ("0:9:stuck", [75, 75], "hangs: nothing has moved for"),
    ("1:10:failing", [1, 1], "ended with OSError: /data/part-7: input/output error"),
]


@pytest.mark.parametrize("faults", [
    pytest.param(FAULTS[1:2], id="one"), pytest.param(FAULTS, marks=pytest.mark.slow, id="all")])
def test_a_process_that_dies_hangs_or_fails_is_named_and_the_run_goes_on(faults, corpus, two, tmp_path):
  """One fault after another in one workdir, each started by the same command; at last a process whose data are slow.
  The result is bitwise that of the run without faults."""
  workdir, done = tmp_path / "w", 0
  for fault, expected, said in faults:
    process, _, kind = fault.split(":")
    process = int(process)
    codes, outputs = several.run(argv(corpus, workdir), 2, 1, FAULT=fault,
                                 stopped=process if kind == "stopped" else None)
    assert codes == expected, "\n".join([fault, *outputs])
    lines = [line for line in outputs[1 - process].splitlines() if said in line]
    assert len(lines) == 1 and lines[0].startswith(f"process {process} (host {socket.gethostname()}, pid "), outputs
    assert "Terminating process because the JAX distributed service" not in "".join(outputs)
    if kind == "stuck":  # it names itself too, and shows where its threads are
      assert lines[0] in outputs[process] and "in stuck" in outputs[process], outputs[process]
    if done:
      assert f"step {done}" in outputs[0], outputs[0]
    done = newest(workdir)
  assert done >= (6 if len(faults) > 1 else 2)

  codes, outputs = several.run(argv(corpus, workdir), 2, 1, FAULT="1:13:slow")
  assert codes == [0, 0], "\n".join(outputs)
  assert_same_run(workdir, two, STEPS)
  # Process 0, which writes it, has not waited itself.
  assert max(row.get("time/data", 0.0) for row in read_rows(workdir / "metrics.jsonl")) > 0.5


ENGINE_CONFIG = """
import os
from pathlib import Path
from tests.trainer import rollout_runs
from trainer.config import defaults

def get_config(folder):
  folder = Path(folder)
  c = rollout_runs.config((folder / "a.jsonl", folder / "b.jsonl"), total_steps=4)
  c.model = defaults().model
  if "STOP" in os.environ:
    c.callbacks.stop = dict(type=rollout_runs.STOP, step=int(os.environ["STOP"]))
  return c
"""


def test_a_server_samples_for_two_processes_as_for_one(tmp_path):
  """The parameters are split over the processes, and the server is given all of them before each of two rollouts."""
  config, folder = tmp_path / "engine_config.py", tiny.hf_folder(tmp_path / "model", vocab_size=264)
  config.write_text(ENGINE_CONFIG)
  rollout_runs.write_prompts(tmp_path)

  def argv(workdir, url, *more):
    flags = f"--config.model.hf={folder}", f"--config.rollout.engine={url}"
    return tiny.command(config, tmp_path, workdir, *flags, *more)

  alone, together = tmp_path / "alone", tmp_path / "together"
  with servers.serving(servers.app(folder)) as url:
    assert tiny.run(argv(alone, url), devices=1).returncode == 0
    codes, outputs = several.run(argv(together, url, "--config.mesh.fsdp=2"), 2, 1)
  assert codes == [0, 0], "\n".join(outputs)
  assert [path.name for path in (together / "engine").iterdir()] == ["2"]
  for step in (1, 3):
    assert rollout_runs.table(together, step) == rollout_runs.table(alone, step)
  ours, theirs = rollout_runs.rows_of(together), rollout_runs.rows_of(alone)
  for step, row in theirs.items():
    assert ours[step] == pytest.approx(row, rel=2e-5, abs=2e-6), step
  assert abs(ours[3]["sampling/kl"]) < 1e-6  # the second rollout is of what the first has made of the policy
  codes, outputs = several.run(argv(tmp_path / "gone", url, "--config.rollout.engine_timeout_seconds=1"), 2, 1)
  assert 0 not in codes and all("has not answered for 1 s" in output for output in outputs), "\n".join(outputs)


AT_ONCE = "--config.rollout.max_staleness=2", "--config.strategy.correction=token_truncate", "--config.total_steps=8"


def test_a_server_samples_for_two_processes_while_updates_go_on(tmp_path):
  """Also where they are stopped on their way; their schedule gives the run again, to the bit."""
  config, folder = tmp_path / "engine_config.py", tiny.hf_folder(tmp_path / "model", vocab_size=264)
  config.write_text(ENGINE_CONFIG)
  rollout_runs.write_prompts(tmp_path)

  def run(name, *more, **environment):
    flags = f"--config.model.hf={folder}", f"--config.rollout.engine={url}", "--config.mesh.fsdp=2", *AT_ONCE
    codes, outputs = several.run(tiny.command(config, tmp_path, tmp_path / name, *flags, *more), 2, 1,
                                 **environment)
    assert codes == [0, 0], "\n".join(outputs)
    return tmp_path / name

  with servers.serving(servers.app(folder)) as url:
    once = run("once", "--config.rollout.concurrent=True")
    run("stopped", "--config.rollout.concurrent=True", "--config.ckpt_steps=1", STOP="3")
    stopped = run("stopped", "--config.rollout.concurrent=True", "--config.ckpt_steps=1")
    for first in (once, stopped):
      sampled = schedule.read(first / schedule.NAME, 2)
      assert list(sampled) == [0, 1, 2, 3] and max(2 * n - by.version for n, by in sampled.items()) in (1, 2)
      again = run(f"{first.name}_again", f"--config.rollout.schedule={first / schedule.NAME}", "--config.ckpt_steps=8")
      rows = rollout_runs.rows_of(again)
      for step, row in rollout_runs.rows_of(first).items():
        idle = {key for key in row if key.startswith("rollout/idle_")}
        assert {key: row[key] for key in row.keys() - idle} == {key: rows[step][key] for key in row.keys() - idle}
      for step in (1, 3, 5, 7):
        assert rollout_runs.table(first, step) == rollout_runs.table(again, step)
    url = "http://127.0.0.1:9"
    gone = tiny.command(config, tmp_path, tmp_path / "gone", f"--config.model.hf={folder}", *AT_ONCE,
                        f"--config.rollout.engine={url}", "--config.rollout.concurrent=True",
                        "--config.rollout.engine_timeout_seconds=1")
    codes, outputs = several.run(gone, 2, 1)
  assert 0 not in codes and all("has not answered for 1 s" in output for output in outputs), "\n".join(outputs)


def test_two_processes_go_back_before_a_spike_as_one_does(corpus, tmp_path):
  """Noise at 31 to 34 is seen at 32: both leave the checkpoint of 24 as it is, and go on after 36 with later data."""
  spikes = dict(action="rollback", window=12, deviations=6.0, in_a_row=2, margin=5, skip=4)
  def command(name):
    return tiny.command(several.__file__, corpus, tmp_path / name, "--config.total_steps=40", "--config.ckpt_steps=6",
                        "--config.keep_last=4", "--config.schedule.name=constant", "--config.mesh.fsdp=2",
                        *(f"--config.spikes.{key}={value}" for key, value in spikes.items()))
  codes, outputs = several.run(command("two"), 2, 1, NOISE="30:34")
  assert codes == [0, 0], "\n".join(outputs)
  assert tiny.run(command("one"), devices=2, NOISE="30:34").returncode == 0
  rows = read_rows(tmp_path / "two" / "metrics.jsonl")
  assert [row["step"] for row in rows if row.get("spikes/rollbacks") == 1 and row.get("spikes/from_step") == 24] == [36]
  ours, theirs = logged(tmp_path / "two"), logged(tmp_path / "one")
  assert {(24, "loss"), (40, "loss")} <= ours.keys() and (34, "loss") not in ours
  assert_equal_to_rounding(ours, theirs, range(41))


@pytest.mark.parametrize("kind, reason", [("missing", "does not exist"), ("empty", "has no files")])
def test_data_that_one_host_lacks(corpus, tmp_path, kind, reason):
  codes, outputs = several.run(argv(corpus, tmp_path / "w"), 2, 1, FAULT=f"1:0:{kind}")
  assert codes == [1, 1], outputs
  for output in outputs:
    assert reason in output and str(corpus.parent / kind) in output, output
  assert "process 1 (host" in outputs[0] and "ended with DataError" in outputs[0], outputs[0]


def test_when_the_first_process_fails_at_the_data_the_others_end_too(corpus, tmp_path):
  codes, outputs = several.run(argv(corpus, tmp_path / "w"), 2, 1, FAULT="0:0:missing")
  assert codes == [1, 1], outputs
  assert "process 0" in outputs[1] and "DataError" in outputs[1] and "does not exist" in outputs[1], outputs[1]
