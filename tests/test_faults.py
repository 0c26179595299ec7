"""Real processes: killed at any moment, asked to stop, out of disk, started with rubbish."""

import logging
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from tests import docs_commands, tiny
from trainer import train
from trainer.callbacks import Callback
from trainer.checkpoints import checkpoint
from trainer.compiler import compiled
from trainer.errors import ConfigError
from trainer.telemetry.writers import read_rows

STEPS = 60


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
  folder = tmp_path_factory.mktemp("faults")
  return tiny.write_config_file(folder), tiny.write_corpus(folder / "texts")


def argv(setup, workdir, *overrides):
  return tiny.command(*setup, workdir, f"--config.total_steps={STEPS}", "--config.ckpt_steps=5", "--config.keep_last=3",
                      *overrides)


def final_params(workdir, step=STEPS):
  folder = workdir / "checkpoints" / str(step)
  shapes = checkpoint.param_shapes(folder)
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  wanted = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here) for path, leaf in shapes.items()}
  return {path: np.asarray(x) for path, x in checkpoint.restore_params(folder, wanted).items()}


def logged(workdir):
  """Everything that training computes, without what depends on the clock."""
  return {(row["step"], name): value for row in read_rows(workdir / "metrics.jsonl") for name, value in row.items()
          if name in ("loss", "grad_norm", "accuracy") or name.startswith("eval/")}


def assert_same_run(workdir, reference, step=STEPS):
  assert logged(workdir) == logged(reference)
  expected = final_params(reference, step)
  for path, value in final_params(workdir, step).items():
    np.testing.assert_array_equal(value, expected[path], err_msg=path)


@pytest.fixture(scope="module", params=[1, 8], ids=["1device", "8devices"])
def straight(request, setup, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("straight")
  done = tiny.run(argv(setup, workdir), devices=request.param)
  assert done.returncode == 0, done.stderr
  return request.param, workdir


def start(setup, workdir, devices, *overrides):
  return subprocess.Popen(argv(setup, workdir, *overrides), cwd=tiny.ROOT, env=tiny.environment(devices),
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(process, condition, seconds=120.0):
  """Polls until the condition holds or the process has ended; returns whether it still ran."""
  deadline = time.monotonic() + seconds
  while not condition():
    if process.poll() is not None:
      return False
    assert time.monotonic() < deadline, process.stdout.read()
    time.sleep(0.001)
  return True


def rows(workdir):
  try:
    return (workdir / "metrics.jsonl").read_text().count("\n")
  except FileNotFoundError:
    return 0


def assert_saved_when_told(process, number, workdir):
  """Asked to end, the process saves the step that it has reached and exits with 0."""
  process.send_signal(number)
  output, _ = process.communicate(timeout=120)
  assert process.returncode == 0, output
  assert "the same command continues" in output
  step = max(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit())
  assert max(row["step"] for row in read_rows(workdir / "metrics.jsonl")) == step < STEPS


@pytest.mark.parametrize("at", [("saving",), pytest.param(("some row", "saving"), marks=pytest.mark.slow)],
                         ids=["while saving", "twice"])
def test_killed_at_any_moment_it_becomes_the_same_run(at, setup, straight, tmp_path):
  """I5: killed after random rows of metrics, and while a checkpoint is being written; then asked to end."""
  devices, reference = straight
  some_row = random.Random(devices).randint(1, STEPS // 2)

  def saving():
    begun, written = any((tmp_path / "checkpoints").glob("*orbax-checkpoint-tmp*")), rows(tmp_path)
    return written > STEPS // 2 and begun or written > STEPS - 4  # by then it was written between two looks

  moments = {"some row": lambda: rows(tmp_path) >= some_row, "saving": saving}
  killed = 0
  for moment in at:
    process = start(setup, tmp_path, devices)
    if wait_for(process, moments[moment]):
      process.send_signal(signal.SIGKILL)
      killed += 1
    process.communicate()
  assert killed >= 1
  process, already = start(setup, tmp_path, devices), rows(tmp_path)
  assert wait_for(process, lambda: rows(tmp_path) > already)
  assert_saved_when_told(process, signal.SIGTERM, tmp_path)
  done = tiny.run(argv(setup, tmp_path), devices=devices)
  assert done.returncode == 0, done.stderr
  assert_same_run(tmp_path, reference)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_0_and_the_run_goes_on(setup, straight, tmp_path, number):
  devices, reference = straight
  if (devices, number) == (8, signal.SIGINT):
    pytest.skip("once is enough")
  process = start(setup, tmp_path, devices)
  assert wait_for(process, lambda: rows(tmp_path) > 12)
  assert_saved_when_told(process, number, tmp_path)
  assert tiny.run(argv(setup, tmp_path), devices=devices).returncode == 0
  assert_same_run(tmp_path, reference)


def test_a_second_signal_exits_at_once(setup, tmp_path):
  config = tmp_path / "slow.py"
  config.write_text(tiny.CONFIG_FILE.replace("return ", "config = ").replace("COSINE)", """COSINE)
  config.callbacks.slow = dict(type="tests.test_faults.Slow")
  return config"""))
  process = start((config, setup[1]), tmp_path / "w", 1)
  assert wait_for(process, lambda: rows(tmp_path / "w") >= 4)  # evaluation, compilation, steps 1 and 2
  process.send_signal(signal.SIGTERM)
  time.sleep(0.5)
  began = time.monotonic()
  process.send_signal(signal.SIGTERM)
  output, _ = process.communicate(timeout=60)
  assert process.returncode == -signal.SIGTERM and time.monotonic() - began < 10, output
  assert "again: exiting at once" in output


class Crash(Callback):
  """Ends the process's part of the run before some update."""

  def __init__(self, step):
    self._step = step

  def on_step_begin(self, run):
    if run.step == self._step:
      raise RuntimeError("crashed")


def flip(file, at=0.5):
  content = bytearray(file.read_bytes())
  content[int(len(content) * at)] ^= 0x10
  file.write_bytes(content)


def largest(folder, pattern="*"):
  return max((p for p in folder.rglob(pattern) if p.is_file()), key=lambda p: p.stat().st_size)


def cut(file):
  file.write_bytes(file.read_bytes()[:-20])


HARMS = {
    "metrics cut mid-line": (lambda w: cut(w / "metrics.jsonl"), ""),
    "a byte of the token cache": (lambda w: flip(largest(w / "cache", "tokens.bin")), "tokens.bin does not match"),
    "a cut token cache": (lambda w: cut(largest(w / "cache", "tokens.bin")), "bytes instead of"),
    "a byte of the newest checkpoint": (lambda w: flip(largest(w / "checkpoints" / "8" / "state" / "d")),
                                        "8 is damaged"),
    "a cut checkpoint": (lambda w: cut(largest(w / "checkpoints" / "8" / "state" / "d")), "8 is damaged"),
    "a checkpoint without its end": (lambda w: shutil.rmtree(w / "checkpoints" / "8" / "meta"), "8 is damaged"),
    "a checkpoint that was being written": (lambda w: shutil.copytree(
        w / "checkpoints" / "8", w / "checkpoints" / "9.orbax-checkpoint-tmp-1"), ""),
    "a clock that was set back by a year": (lambda w: (w / "started").write_text("2099-01-01T00:00:00+00:00\n"), ""),
    "an empty started": (lambda w: (w / "started").write_text(""), ""),
}


@pytest.fixture(scope="module")
def crashed(setup, tmp_path_factory):
  """(config, the final state of a run left alone, the workdir of one that crashed before update 11)."""
  folder = tmp_path_factory.mktemp("harmed")
  config = tiny.config(setup[1], total_steps=12, ckpt_steps=4, keep_last=3, schedule=tiny.COSINE)
  alone = jax.device_get(train(config, folder / "alone").state)
  config.callbacks.crash = dict(type="tests.test_faults.Crash", step=10)
  with pytest.raises(RuntimeError, match="crashed"):
    train(config, folder / "crashed")
  del config.callbacks.crash
  return config, alone, folder / "crashed"


@pytest.mark.parametrize("harm", HARMS)
def test_a_harmed_workdir_becomes_the_same_run(crashed, tmp_path, caplog, harm):
  """What is damaged is named and made again, or the checkpoint before it is used: never taken for what it was."""
  config, alone, left = crashed
  shutil.copytree(left, tmp_path / "w")
  do, told = HARMS[harm]
  do(tmp_path / "w")
  with caplog.at_level(logging.WARNING):
    run = train(config, tmp_path / "w")
  assert told in caplog.text
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(run.state), alone)
  rows = [row for row in read_rows(tmp_path / "w" / "metrics.jsonl") if "loss" in row]
  assert [row["step"] for row in rows] == list(range(1, 13))
  assert 0 <= rows[-1]["goodput"] <= 1


def test_another_tokenizer_in_the_workdir_is_refused(crashed, tmp_path):
  """Its token cache is not used either: caches are named by what made them."""
  config, _, left = crashed
  shutil.copytree(left, tmp_path / "w")
  bpe = config.copy_and_resolve_references()
  bpe.tokenizer.update(type="bpe", vocab_size=300)
  train(bpe, tmp_path / "bpe")
  shutil.copytree(tmp_path / "bpe" / "cache", tmp_path / "w" / "cache", dirs_exist_ok=True)
  before = sorted(p.name for p in (tmp_path / "w" / "cache").glob("main-*"))
  assert len(before) > len(list((left / "cache").glob("main-*")))
  shutil.copy(tmp_path / "bpe" / "tokenizer.json", tmp_path / "w")
  with pytest.raises(ConfigError, match="tokenizer"):
    train(config, tmp_path / "w")


class Slow:
  """A callback whose every step takes long after the second, so that a stop has to wait for it."""

  def __getattr__(self, hook):
    def call(run, *args):
      if hook == "on_optimizer_step" and run.step > 2:
        for _ in range(600):
          time.sleep(0.1)
    return call


def test_a_disk_that_fills_up_while_saving_is_an_error_that_says_so(setup, tmp_path):
  """Files may grow to 60 kB in this process: metrics fit, the second checkpoint's data do not."""
  big = argv(setup, tmp_path, "--config.model.hidden_size=128", "--config.total_steps=8")
  done = subprocess.run(big, cwd=tiny.ROOT, env=tiny.environment(1, JAX_COMPILATION_CACHE_DIR=""), capture_output=True,
                        text=True, timeout=300, check=False,
                        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)))
  assert done.returncode not in (0, None)
  assert "CheckpointError: could not" in done.stderr and "run the same command" in done.stderr, done.stderr
  assert str(tmp_path / "checkpoints") in done.stderr
  assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) < 20, done.stderr
  again = tiny.run(big)
  assert again.returncode == 0, again.stderr


def test_exhausted_memory_says_where_it_goes_and_what_to_type(setup, tmp_path):
  """The process may have 8 GB; a step of so many tokens needs more."""
  big = argv(setup, tmp_path, "--config.batch_size=2048", "--config.seq_len=1024", "--config.model.hidden_size=64",
             "--config.evals.val.at_start=False")
  done = subprocess.run(big, cwd=tiny.ROOT, env=tiny.environment(1), capture_output=True, text=True, timeout=300,
                        check=False, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30)))
  assert done.returncode not in (0, None)
  assert "memory is exhausted: RESOURCE_EXHAUSTED: Out of memory allocating" in done.stderr, done.stderr
  assert "Traceback" not in done.stderr and "optimizer" in done.stderr and "--config.grad_accum_steps" in done.stderr


@pytest.mark.parametrize("overrides, expected", [
    (["--config.optimizer.learning_rat=1"], "did you mean config.optimizer.learning_rate?"),
    (["--config.batch_size=x"], "invalid literal for int()"),
    (["--config.batch_size=6", "--config.grad_accum_steps=4"], "Try --config.batch_size=8"),
    (["--config.mesh.tensor=3"], "there are 1"),
    (["--config.input.sources.main.path=/nowhere"], "/nowhere"),
    (["stray"], "unexpected arguments"),
])
def test_bad_command_lines_end_with_one_message(setup, tmp_path, monkeypatch, capsys, overrides, expected):
  code, said = ended(argv(setup, tmp_path, *overrides), monkeypatch, capsys)
  assert code != 0 and expected in said and "Traceback" not in said, said


def ended(command, monkeypatch, capsys):
  """(exit code, what stands in stderr) of the command, in this process. That a process of its own ends so, too,
  tests/hostile/test_commands.py says."""
  monkeypatch.setattr(compiled, "in_progress", lambda: False)  # else the process would end at once
  capsys.readouterr()
  code = docs_commands.exit_code(command[2:], monkeypatch)
  return code, capsys.readouterr().err + (code if isinstance(code, str) else "")


@pytest.mark.parametrize("variables", [
    {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, {"JAX_COORDINATOR_ADDRESS": "localhost:1"}])
def test_half_a_set_of_process_variables_is_refused(setup, tmp_path, monkeypatch, capsys, variables):
  for name, value in variables.items():
    monkeypatch.setenv(name, value)
  code, said = ended(argv(setup, tmp_path), monkeypatch, capsys)
  assert code != 0 and "Set all three in each process, or none" in said and "Traceback" not in said, said


def test_an_allocation_without_a_launcher_is_one_process(setup, tmp_path, monkeypatch, capsys):
  monkeypatch.setenv("SLURM_NTASKS", "4")
  monkeypatch.setenv("SLURM_JOB_ID", "5")
  docs_commands.run(argv(setup, tmp_path, "--config.total_steps=1")[2:], monkeypatch)
  assert "in 1 process(es)" in capsys.readouterr().out


def test_bad_data_ends_with_file_and_line(setup, tmp_path, monkeypatch, capsys):
  empty, broken, other = tmp_path / "empty.txt", tmp_path / "broken.jsonl", tmp_path / "other.jsonl"
  empty.write_text("")
  broken.write_text('{"text": "fine"}\n{"text": oops}\n')
  other.write_text('{"text": "fine"}\n{"body": "no text"}\n')
  cases = [(empty, "text", str(empty)), (broken, "jsonl", f"{broken}:2"), (other, "jsonl", f"{other}:2")]
  for path, kind, expected in cases:
    code, said = ended(argv(setup, tmp_path / "w", f"--config.input.sources.main.path={path}",
                            f"--config.input.sources.main.type={kind}", "--config.input.sources.main.split=all"),
                       monkeypatch, capsys)
    assert code != 0 and expected in said and "Traceback" not in said, said


def test_no_tensorflow_torch_or_transformers_is_imported():
  code = ("import sys, trainer.main, evaluators.loss, evaluators.samples, input_pipeline.loader;"
          "print([m for m in ('tensorflow', 'torch', 'transformers') if m in sys.modules])")
  assert tiny.run([sys.executable, "-c", code]).stdout.strip() == "[]"
