"""Whether what must be equal is equal, on one's own config, model and data: `--mode=verify`.

A slice of the config is trained for a few steps, in float32: a few rows of its data a step, its model, its strategy,
its mesh. On the model and the batch that it had, every equality of trainer/modes/invariances.py that applies is
measured; then the run is stopped, continued, and compared (I5). Nothing is written but `verify/` and the token cache in
the workdir.
"""

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from input_pipeline import loader
from input_pipeline.examples import top_k
from models.spec import RECURRENT
from trainer import program as program_lib
from trainer.callbacks import Callback
from trainer.config import DURATION_UNITS, defaults, reward
from trainer.distributed import mesh as mesh_lib
from trainer.distributed import processes
from trainer.errors import ConfigError
from trainer.main import train
from trainer.modes import invariances
from trainer.modes.fixture import Fixture, Skip
from trainer.telemetry import writers

# Steps of the slice, the step that the stopped run ends at, tokens of a batch, rows of a batch at most.
STEPS, STOP, TOKENS, ROWS = 3, 1, 16384, 8
# What is kept of `config.rollout`, as it is or at most.
OF_ROLLOUTS = ("prompt_key", "stop", "keep_stop", "temperature", "top_k", "top_p", "min_p", "prefill_chunk",
               "share_beginnings", "replay_experts", "devices", "tensor")


class Result(NamedTuple):
  """Of one equality: PASS, FAIL or SKIP."""

  status: str
  row: str
  what: str
  measured: float | None
  allowed: float
  why: str

  def line(self) -> str:
    sign = "≤" if self.status == "PASS" else ">"
    numbers = self.why if self.measured is None else f"{self.measured:.1e} {sign} {self.allowed:.0e}"
    return f"{self.status}  {self.row:<4} {self.what:<50} {numbers}".rstrip()


def verify(config: Mapping, workdir: str | Path) -> list[Result]:
  """Prints and returns what was measured; also in WORKDIR/verify/results.json.

  Raises:
    ConfigError: as training would; several processes; an equality does not hold.
  """
  began = time.monotonic()
  resolved, _ = program_lib.resolve(config)
  processes.join(resolved.processes)
  if jax.process_count() > 1:
    raise ConfigError("--mode=verify runs in one process; give it a mesh of its devices.")
  program_lib.settle(resolved, jax.default_backend())
  workdir = Path(workdir).expanduser().absolute()
  (workdir / "verify").mkdir(parents=True, exist_ok=True)
  results = []
  with tempfile.TemporaryDirectory(dir=workdir / "verify") as folder, jax.default_matmul_precision("highest"):
    given = slice_of(resolved, workdir)
    log = workdir / "verify" / "log.txt"
    print(f"{given.batch_size} rows of {given.seq_len} tokens, float32, {STEPS} steps; what they print: {log}",
          flush=True)
    with open(log, "w", encoding="utf-8") as file:
      with contextlib.redirect_stdout(file):
        fixture, straight = _straight(given, Path(folder), workdir, resolved.precision.compute)
      resumed = invariances.Check("I5", f"arrays of the state: {STEPS} steps, {STOP} + {STEPS - STOP}", 0,
                                  lambda _: _resumed(given, Path(folder), workdir, straight))
      for check in (*invariances.CHECKS, resumed):
        with contextlib.redirect_stdout(file):
          results.append(_measured(check, fixture))
        print(results[-1].line(), flush=True)
  (workdir / "verify" / "results.json").write_text(
      json.dumps([made._asdict() for made in results], indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
  counts = {status: sum(made.status == status for made in results) for status in ("PASS", "FAIL", "SKIP")}
  print(", ".join(f"{count} {status}" for status, count in counts.items()) + f" in {time.monotonic() - began:.0f} s")
  if counts["FAIL"]:
    raise ConfigError(f"{counts['FAIL']} of {len(results)} equalities do not hold with this config (docs/exactness.md "
                      f"says what each is; {workdir / 'verify' / 'results.json'} has the numbers). With a model or "
                      "strategy of your own the mistake is most likely there; else it is ours: please tell us.")
  return results


def slice_of(resolved: ConfigDict, workdir: Path) -> ConfigDict:
  """The config of the slice: fewer rows and steps, float32, nothing besides the steps; made-up rewards for rollouts."""
  c, fresh = resolved.copy_and_resolve_references().unlock(), defaults()
  shards = mesh_lib.batch_shards(mesh_lib.training_mesh(c))
  rows = max(2, min(ROWS, TOKENS // c.seq_len))
  c.batch_size, c.grad_accum_steps = -(-rows // shards) * shards, 1
  c.input.batch_size_stages = ()
  if not c.rollout.num_prompts:  # prompts have no cache
    c.input.cache_dir = str(loader.default_cache_dir(resolved, workdir))
  c.schedule, c.optimizer.group_warmup, c.spikes, c.profile = fresh.schedule, (), fresh.spikes, fresh.profile
  for prefix in ("total", "log", "ckpt", "keep"):
    for unit in DURATION_UNITS:
      c[f"{prefix}_{unit}"] = -1
  c.total_steps, c.log_steps = STEPS, 1
  c.evals, c.callbacks, c.keep_best, c.resume = ConfigDict(), ConfigDict(), None, None
  c.export, c.report = fresh.export, False
  for key in ("params", "compute", "matmul", "matmul_gradients", "matmul_skip", "stochastic_rounding"):
    c.precision[key] = fresh.precision[key]
  c.precision.params = c.precision.compute = "float32"
  if c.precision.frozen in ("auto", "bfloat16"):
    c.precision.frozen = "float32"
  c.model.dropout = c.model.neftune_alpha = c.model.lora.dropout = 0.0
  if "precompute" in c.strategy:
    c.strategy.precompute = False
  if "cached_top_k" in c.strategy and c.strategy.get("teacher") != top_k.ROWS:  # there is nobody else who says it
    c.strategy.cached_top_k = 0
  if c.rollout.num_prompts:
    # Nothing is ahead, answers or gives rewards but what is made up here.
    r, given = fresh.rollout.unlock(), c.rollout
    r.update({key: given[key] for key in OF_ROLLOUTS})
    r.update(num_prompts=2, group_size=min(4, given.group_size), max_new_tokens=min(16, given.max_new_tokens),
             batch_size=8, updates=2, resample=0, reward_workers=0)
    r.rewards.made_up = reward(type="trainer.modes.verify.made_up")
    c.rollout = r
  return c.lock()


def made_up(completions: list[str], **_: Any) -> list[float]:
  """Rewards that differ within a group, so that there is something to learn."""
  return [(number % 4) / 3 for number in range(len(completions))]


def _straight(given: ConfigDict, folder: Path, workdir: Path, compute: str) -> tuple[Fixture, Any]:
  """The slice in one go: what to measure on, and what the state is at the end."""
  Capture.params = Capture.reference = Capture.batch = None
  run = _train(given, folder / "straight", workdir, capture=dict(type="trainer.modes.verify.Capture"))
  fixture = Fixture(given, folder / "straight", run, Capture.params, Capture.reference, Capture.batch, compute)
  return fixture, (jax.device_get(run.state), _losses(folder / "straight"))


def _resumed(given: ConfigDict, folder: Path, workdir: Path, straight: Any) -> float:
  """I5: how many arrays differ, and losses that were logged, where the run was stopped and continued."""
  _train(given, folder / "stopped", workdir, stop=dict(type="trainer.modes.verify.Stop"))
  run = _train(given, folder / "stopped", workdir)
  state, losses = straight
  pairs = zip(jax.tree.leaves(state), jax.tree.leaves(jax.device_get(run.state)), strict=True)
  return float(sum(not np.array_equal(one, other) for one, other in pairs) + (losses != _losses(folder / "stopped")))


def _train(given: ConfigDict, folder: Path, workdir: Path, **callbacks: Any) -> Any:
  folder.mkdir(exist_ok=True)
  for file in workdir.glob("tokenizer*"):
    shutil.copy(file, folder)
  config = given.copy_and_resolve_references().unlock()
  config.callbacks = ConfigDict(callbacks)
  return train(config, folder)


def rounding(check: invariances.Check, model: Any) -> float:
  """By how much more gradients may differ than in a model of attention alone: a recurrence carries rounding on."""
  pattern = getattr(getattr(model, "spec", None), "layer_pattern", ())
  return 10.0 if check.row in ("I1", "I11") and set(RECURRENT) & set(pattern) else 1.0


def _losses(folder: Path) -> list[tuple[int, float]]:
  return [(row["step"], row["loss"]) for row in writers.read_rows(folder / "metrics.jsonl") if "loss" in row]


def _measured(check: invariances.Check, fixture: Fixture) -> Result:
  check = check._replace(allowed=check.allowed * rounding(check, fixture.model))
  try:
    measured = check.measure(fixture)
  except Skip as e:
    return Result("SKIP", check.row, check.what, None, check.allowed, str(e))
  except Exception as e:  # also a way not to hold; the others are to be seen all the same
    return Result("FAIL", check.row, check.what, None, check.allowed, f"{type(e).__name__}: {e}")
  return Result("PASS" if measured <= check.allowed else "FAIL", check.row, check.what, measured, check.allowed, "")


class Capture(Callback):
  """Keeps what the run begins with, and its first batch."""

  params = reference = batch = None

  def on_train_begin(self, run):
    Capture.params = jax.device_get(run.state["params"])
    Capture.reference = jax.device_get(run.state["reference"]) if "reference" in run.state else None

  def on_step_end(self, run, step, metrics):
    if step == 1:
      Capture.batch = {key: np.asarray(part) for key, part in run.batch.items()}


class Stop(Callback):
  """Asks for a stop."""

  def on_optimizer_step(self, run):
    if run.step == STOP:
      run.stop_requested = "--mode=verify"
