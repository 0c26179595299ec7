"""Several processes on this machine as one run, and what may go wrong in one of them.

As a config file it is the tiny config, with what the environment asks for:

    EVALS=1                   two evaluators: the loss, and one that samples
    FAULT=PROCESS:STEP:KIND   in that process, when it comes to that step's rows: one of KINDS; or, whatever the step,
                              `missing` or `empty`: its data; `away`: the files of checkpoints
    STOP=STEP                 asks for a stop after that step
    NOISE=FIRST:AFTER         the tokens of these steps' rows are noise, the same in any process
    ROWS=FILE                 a line of JSON [step, row, hash of its content] for each row that this process builds
    COMPILED=FILE             a line for each program of the step: the name of the thread that had it compiled
"""

import hashlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import numpy as np

from input_pipeline import loader
from tests import tiny
from tests.trainer import rollout_runs
from trainer.checkpoints import checkpoint
from trainer.compiler import compiled
from trainer.config import evaluator, source


def stuck():
  while True:
    time.sleep(1)


def failing():
  raise OSError("/data/part-7: input/output error")


KINDS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stuck": stuck,
    "failing": failing,
    "slow": lambda: time.sleep(5),
}


def noise(tokens_BxT):
  """Bytes that follow from the row alone, but to a model are anything."""
  rows = [np.random.default_rng(row.tolist()).integers(0, 250, row.shape) for row in tokens_BxT]
  return np.array(rows, tokens_BxT.dtype).reshape(tokens_BxT.shape)


def get_config(corpus):
  config = tiny.config(Path(corpus), keep_last=3, schedule=tiny.COSINE)
  config.evals.sums = evaluator(type="generate", sources=dict(sums=source(type="arithmetic")), eval_steps=4,
                                max_documents=5, num_samples=2, pass_at=(1, 2), max_new_tokens=5, temperature=1.0)
  if "EVALS" not in os.environ:
    config.evals = {}
  if "STOP" in os.environ:
    config.callbacks.stop = dict(type=rollout_runs.STOP, step=int(os.environ["STOP"]))
  process, step, kind = os.environ.get("FAULT", "::").split(":")
  here = process == os.environ.get("JAX_PROCESS_ID")
  if kind in ("missing", "empty") and here:
    folder = Path(corpus).parent / kind
    config.input.sources.main.path = str(folder)
    if kind == "empty":
      folder.mkdir(exist_ok=True)
  if kind == "away" and here:
    checkpoint.saved_tree = lambda folder: failing()
  batch, rows_file = loader.TrainData.batch, os.environ.get("ROWS")
  noisy = range(*map(int, os.environ.get("NOISE", "0:0").split(":")))

  def watched(self, at, rows=slice(None)):
    if kind in KINDS and here and at == int(step):
      KINDS[kind]()
    made = batch(self, at, rows)
    if at in noisy:
      made["tokens"] = noise(made["tokens"])
    if rows_file:
      numbers = np.arange(self.batch_range(at)[1])[rows].tolist()
      contents = (b"".join(made[name][i].tobytes() for name in sorted(made)) for i in range(len(numbers)))
      with open(rows_file, "a") as file:
        file.writelines(json.dumps([at, row, hashlib.sha256(content).hexdigest()]) + "\n"
                        for row, content in zip(numbers, contents, strict=True))
    return made

  loader.TrainData.batch = watched
  if "COMPILED" in os.environ:
    tell_who_compiles(os.environ["COMPILED"])
  return config


def tell_who_compiles(file):
  timed = compiled._timed

  def told(work):
    with open(file, "a") as lines:
      lines.write(threading.current_thread().name + "\n")
    return timed(work)

  compiled._timed = told


def launch(command, count, devices, **environment):
  """That many processes of one run, each with so many devices."""
  with socket.socket() as s:
    s.bind(("localhost", 0))
    address = f"localhost:{s.getsockname()[1]}"
  return [subprocess.Popen(
      command, cwd=tiny.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
      env=tiny.environment(devices, JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES=str(count),
                           JAX_PROCESS_ID=str(index), **environment)) for index in range(count)]


def outcome(processes, stopped=None):
  """([exit code], [output]) of them all; the `stopped` one goes on when the others have ended."""
  outputs = {}
  for i in sorted(range(len(processes)), key=lambda i: i == stopped):
    if i == stopped:
      processes[i].send_signal(signal.SIGCONT)
    outputs[i] = processes[i].communicate(timeout=200)[0]
  return [process.returncode for process in processes], [outputs[i] for i in range(len(processes))]


def run(command, count, devices, stopped=None, **environment):
  """What comes of processes that are left alone."""
  return outcome(launch(command, count, devices, **environment), stopped)
