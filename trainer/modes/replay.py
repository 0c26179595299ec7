"""The batch of one update again, with the loss of each of its rows: `--mode=replay --step=N`, in a workdir of that run.

The parameters before update N come from the newest checkpoint before it, or from the run's beginning, and from the
updates between, which are taken again: a step is a function of the state and of the data's position, so that they are
those that the run had. So are rollouts: what is left of one is in the checkpoint, and those after it are sampled again,
from the same parameters with the same draws: where they were sampled at once with updates, those of the recorded
schedule. Nothing in the workdir changes but `replay/step-N.jsonl` and `.html`.
"""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from input_pipeline import loader
from input_pipeline.batches import check_ids
from input_pipeline.steps import Past
from trainer import position
from trainer import program as program_lib
from trainer import workdir as workdir_lib
from trainer.callbacks import Callback
from trainer.config import DURATION_UNITS
from trainer.errors import ConfigError
from trainer.main import train
from trainer.modes import inspect
from trainer.modes.microscope import Microscope
from trainer.rollouts import schedule
from trainer.telemetry import terminal, writers
from trainer.telemetry.row_losses import Rows, mean_losses

# Of the rows with the highest losses.
SHOWN, TEXTS = 20, 3


class _Done(BaseException):
  """What was asked for is there; the run is not to go on."""


def replay(config: Mapping, workdir: str | Path, step: int | None) -> Path:
  """Prints the rows of update `step` with the highest losses, or losses that are not finite; returns the file with all.

  Raises:
    ConfigError: the step is not one of the run's; several processes.
  """
  resolved, _ = program_lib.resolve(config)
  workdir = Path(workdir).expanduser().absolute()
  if not (workdir / "config.json").exists():
    raise ConfigError(f"{workdir} holds no run. Give the --workdir of the run whose step you want to see.")
  if step is None or step < 1:
    raise ConfigError(f"found --step={step}; allowed: the number of an update, from 1 on, as metrics.jsonl has it.")
  program_lib.settle(resolved, jax.default_backend())
  workdir_lib.prepare(resolved, workdir)
  (workdir / "replay").mkdir(exist_ok=True)
  out = workdir / "replay" / f"step-{step}.jsonl"
  with tempfile.TemporaryDirectory(dir=workdir / "replay") as folder:
    begun = _begin(workdir, Path(folder), step)
    print(f"from {'the run’s beginning' if begun is None else f'the checkpoint of step {begun}'} to step {step - 1}, "
          "then the batch of the next")
    # Rollouts have no token cache, and a key that nothing reads would be refused.
    cache = None if resolved.rollout.num_prompts else str(loader.default_cache_dir(resolved, workdir))
    resolved.input.cache_dir = cache
    past = position.find(workdir, None)
    resolved.grad_accum_steps = _micro_batches(resolved, past, begun or 0, step)
    for key in (f"{what}_{unit}" for what in ("ckpt", "keep") for unit in DURATION_UNITS):
      resolved[key] = 0 if key.endswith("_steps") else -1
    if resolved.rollout.concurrent:  # the clock has decided which policy sampled what
      resolved.rollout.concurrent, resolved.rollout.schedule = False, str(workdir / schedule.NAME)
    resolved.keep_best = None
    resolved.evals, resolved.report = ConfigDict(), False
    resolved.callbacks = ConfigDict(dict(replay=dict(type="trainer.modes.replay.Replay", step=step, out=str(out))))
    try:
      run = train(resolved, folder, past)
    except _Done:
      pass
    else:
      if run.stop_requested:
        raise KeyboardInterrupt
      raise ConfigError(f"found --step={step}; the run ends with step {run.step}.")
    _compare_samples(Path(folder) / "samples", workdir / "samples")
  logged = [row["loss"] for row in writers.read_rows(workdir / "metrics.jsonl")
            if row["step"] == step and "loss" in row]
  if logged:
    print(f"logged when it ran: {logged[-1]:.6f}")
  print(f"every row, with the numbers of its tokens: {out}\nthe same as coloured text: {out.with_suffix('.html')}")
  return out


def _begin(workdir: Path, folder: Path, step: int) -> int | None:
  """Gives the new folder what the run went on from, by hard links; returns the checkpoint's step."""
  for file in workdir.glob("tokenizer*"):
    shutil.copy(file, folder)
  saved = [int(p.name) for p in (workdir / "checkpoints").glob("*") if p.name.isdigit() and int(p.name) < step]
  if not saved:
    return None
  shutil.copytree(workdir / "checkpoints" / str(max(saved)), folder / "checkpoints" / str(max(saved)),
                  copy_function=os.link)
  return max(saved)


def _micro_batches(resolved: ConfigDict, past: Past | None, begun: int, step: int) -> int:
  """`grad_accum_steps` with which all batches that are taken again have whole micro-batches, of the size that update
  `step` had if that can be; the run may have had other ones."""
  if resolved.rollout.num_prompts:
    return resolved.grad_accum_steps
  steps = position.steps_of(resolved, past)
  last = steps.at(step - 1)
  # Those to come, too: a stage must have whole micro-batches.
  sizes = [piece.size for piece in steps.pieces if piece.step >= steps.at(begun).step]
  micro = math.gcd(last.size // last.parts, resolved.batch_size, *sizes)
  return resolved.batch_size // micro


def _compare_samples(again: Path, logged: Path) -> None:
  """Says so if a rollout that was sampled again is not the one that was logged."""
  for file in sorted(again.glob("rollout-*.jsonl")):
    if not (logged / file.name).exists():
      continue
    ours, theirs = ([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
                    for path in (file, logged / file.name))
    if ours == theirs:
      continue
    said = sum(a["completion"] == b["completion"] for a, b in zip(ours, theirs, strict=False))
    print(f"This is NOT what was trained on: of {file.stem}, {said} of {len(theirs)} completions are those that were "
          "logged, and where these are the same, their rewards are not. Rewards and environments that ask a clock, a "
          "network or a random generator give something else each time; so does sampling on other devices.")


class Replay(Callback):
  """Ends the run before update `step`, once the losses of its rows are known."""

  def __init__(self, step: int, out: str):
    self._step, self._out = step, Path(out)

  def on_train_begin(self, run):
    if jax.process_count() > 1:
      raise ConfigError("--mode=replay runs in one process; give it a mesh of its devices.")
    if self._step > run.total_steps:
      raise ConfigError(f"found --step={self._step}; the run has {run.total_steps} steps.")

  def on_step_begin(self, run):
    if run.step + 1 < self._step:
      return
    run.settle()
    batch = run.data.take(run)
    if batch is None:
      raise KeyboardInterrupt  # a stop was asked for while it was sampled
    rows = Rows(run)
    batch = check_ids(batch, run.model.vocab_size)
    sums_B, weights_B = rows.losses(batch, self._step)
    losses_B = mean_losses(sums_B, weights_B)
    microscope = Microscope(run, rows)
    of_tokens = microscope.look(batch, self._step)
    rows.write(self._out, batch, sums_B, weights_B, of_tokens=of_tokens)
    # Those that are not finite first, then the highest; padding is no row.
    order = [row for row in range(len(losses_B)) if np.any(batch["segment_ids"][row])]
    order.sort(key=lambda row: (math.isfinite(losses_B[row]), -losses_B[row]))
    print(f"\n{'row':>5}  {'loss':>12}  {'weight':>8}  source")
    for row in order[:SHOWN]:
      print(f"{row:>5}  {losses_B[row]:>12.6f}  {weights_B[row]:>8g}  {rows.source(batch, row)}")
    for row in order[:TEXTS]:
      terminal.say("\n" + inspect.row_text(inspect.row_tokens(batch, row, run.tokenizer), row))
    bad = int(np.sum(~np.isfinite(losses_B)))
    loss = f"loss {np.sum(sums_B) / np.sum(weights_B):.6f}" if np.sum(weights_B) else "nothing is trained"
    summary = f"update {self._step}: {len(order)} rows, {bad} with a loss that is not finite; {loss}"
    page = microscope.page(f"Update {self._step}: its tokens", batch, of_tokens, losses_B, order, [summary])
    self._out.with_suffix(".html").write_text(page, encoding="utf-8")
    print("\n" + summary)
    raise _Done
