"""The folder of a run: made, guarded against another config, and described at the end.

It holds `config.json` (resolved), `started` (when the run was begun), `run.json` (what ran, start by start),
`metrics.jsonl`, `report.html` (the run on one page), `tensorboard/`, `checkpoints/`, `samples/`, the tokenizer,
`cache/`, and `hf/` (the small files of a Hugging Face folder that the run started from, for the export).
"""

import os
import time
from pathlib import Path
from typing import Any

import jax

from input_pipeline import runs
from input_pipeline.chat.builtin import find_template
from input_pipeline.tokenizer.tokenizer import Tokenizer
from models import hf
from models.hf import files
from trainer import atomic, strategies
from trainer.config import checks as config_checks
from trainer.errors import ConfigError
from trainer.export import chat_files, hugging_face
from trainer.telemetry import writers

# So many lines of the last samples are shown at the end.
SAMPLE_LINES = 40


def prepare(config: Any, workdir: Path) -> None:
  """Makes the folder; refuses to continue one whose config trains differently, and says what differs.

  Raises:
    ConfigError: the folder cannot be made, or belongs to another run.
  """
  if workdir.exists() and not workdir.is_dir():
    raise ConfigError(f"--workdir {workdir} is a file; give a folder, which is made if it is missing.")
  try:
    workdir.mkdir(parents=True, exist_ok=True)
  except OSError as e:
    raise ConfigError(f"--workdir {workdir} cannot be made: {e.strerror}. Give a folder that you may write to.") from e
  if not os.access(workdir, os.W_OK):
    raise ConfigError(f"--workdir {workdir} cannot be written to (it is read-only, or another user's). Give a folder "
                      "that you may write to.")
  first_start(workdir)
  saved = workdir / "config.json"
  if config.allow_config_changes or not saved.exists() or not (workdir / "checkpoints").exists():
    return
  differences = config_checks.differences(files.read_json(saved), config)
  if differences:
    raise ConfigError(
        f"{workdir} was begun with another config:\n  " + "\n  ".join(differences) + "\nUse another --workdir, the "
        "config as it was, or --config.allow_config_changes=True to continue with the new values.")


def first_start(workdir: Path) -> float:
  """Seconds since 1970 when the run was begun, in its first process; noted here the first time."""
  if (then := runs.began(workdir)) is not None:
    return then
  now = time.time()
  if jax.process_index() == 0:
    runs.begin(workdir, now)
  return now


def check_saves(config: Any, saves: bool) -> None:
  """Refuses what needs checkpoints where there are none. Raises ConfigError."""
  if saves:
    return
  for key, value, needs in (("keep_best", config.keep_best, config.keep_best is not None),
                            ("spikes.action", config.spikes.action, config.spikes.action == "rollback")):
    if needs:
      raise ConfigError(f"{key} is {value!r}, which needs checkpoints, but ckpt is never (0), and keep is not set. "
                        "Give one of ckpt_{steps,examples,tokens,epochs,percent}.")


def save_config(resolved: Any, workdir: Path, tokenizer: Tokenizer) -> None:
  """Writes config.json, once everything in it has been accepted, and keeps the files an export will repeat: those of
  the Hugging Face folder, and the chat template, which wherever it came from belongs to the tokenizer from now on."""
  if jax.process_index() == 0:
    atomic.write(workdir / "config.json", config_checks.to_json(resolved) + "\n")
    if resolved.model.hf is not None:
      hf.copy_small_files(Path(resolved.model.hf), workdir / hugging_face.FOLDER)
    texts = strategies.of(resolved).data == "texts"
    if not texts and (template := find_template(resolved.chat, tokenizer)) is not None:
      chat_files.write(workdir, template, own=not resolved.chat.template)


def say_where_everything_is(run: Any, seconds: float, exported: Path | None = None) -> None:
  """The last words: how it ended, what was measured and after which step, where to look. `exported`: the folder."""
  saved = run.saves_last or (run.workdir / "checkpoints" / str(run.step)).is_dir()
  done = f"finished all {run.total_steps} steps" if run.step >= run.total_steps else (
      f"stopped by {run.stop_requested} after step {run.step} of {run.total_steps}"
      + ("; the same command continues" if saved else ""))
  run.say(f"\nThe run has {done} ({seconds:.0f} s in this process). Of the time since its first start "
          f"{run.chrono.goodput():.0%} went into steps that counted.")
  if not saved:
    run.say("The last state was not saved, since ckpt is never.")
  for name, (step, value) in sorted(writers.evaluations(run.workdir, run.step).items()):
    run.say(f"  {name:<40} {value:.4f}  at {_step(step, run.step)}")
  samples = sorted((step, file) for file in (run.workdir / "samples").glob("*.txt")
                   if (step := _step_of(file)) <= run.step)
  if samples:
    step, file = samples[-1]
    lines = file.read_text(encoding="utf-8").splitlines()
    more = [f"… and more in {file}"] if len(lines) > SAMPLE_LINES else []
    written = f"\nSamples of {_step(step, run.step)}:" if step >= 0 else ""
    run.say("\n".join([written, *lines[:SAMPLE_LINES], *more, ""]))
  for what, where in (("report", "report.html"), ("checkpoints", "checkpoints"), ("metrics", "metrics.jsonl"),
                      ("TensorBoard", "tensorboard"), ("samples", "samples"), ("tokenizer", "tokenizer.json"),
                      ("config", "config.json"), ("export", exported)):
    if where is not None and (run.workdir / where).exists() and (
        what != "checkpoints" or any((run.workdir / where).iterdir())):
      run.say(f"  {what:<12} {run.workdir / where}")


def _step(step: int, last: int) -> str:
  """A step's name, which says if much was trained since."""
  since = last - step
  return f"step {step:,}" + (f", {since:,} step{'s' * (since > 1)} before the last" if since > 0 else "")


def _step_of(samples: Path) -> int:
  """The step in the name of a file of samples, NAME_00000100.txt; -1: there is none."""
  number = samples.stem.rpartition("_")[2]
  return int(number) if number.isdigit() else -1
