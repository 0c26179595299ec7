"""Does a config compute what transformers computes? python -m trainer.parity --config=FILE --workdir=DIR [--steps=20]

Trains the first steps of the config in DIR/weft, and beside it writes what another program needs to train the same: the
initial parameters as a Hugging Face folder, the batches, the optimizer's settings, and a script of PyTorch that needs
nothing of Weft (trainer/parity/peer.py). It runs the script with --peer, a Python that has torch and transformers, and
prints losses and gradient norms of both, step by step. Ends with exit code 1 where a loss differs by more than 1e-3.
Strategies: seq, sft, and dpo with the losses sigmoid and sft. What cannot be the same on both sides is off, and told.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from absl import app, flags
from ml_collections import ConfigDict, config_flags

from trainer.config import DURATION_UNITS, defaults
from trainer.config import typed as config_typed
from trainer.errors import ConfigError, DataError

HERE = Path(__file__).resolve().parent
# Of each strategy, the options that the peer knows; others must have their defaults.
OPTIONS = {"seq": ("label_smoothing", "z_loss"), "sft": ("label_smoothing", "z_loss", "dft", "normalize"),
           "dpo": ("loss", "beta", "label_smoothing", "disable_dropout", "precompute")}


def compare(config: Mapping, workdir: str | Path, steps: int = 20, peer: str = sys.executable) -> int:
  """Trains both, prints the table; the peer's exit code.

  Args:
    config: as for a run.
    workdir: a new folder, or one of the same command: Weft's side is not trained again.
    steps: how many; fewer where the run has fewer.
    peer: a Python with torch, transformers and, for adapters, peft.

  Raises:
    ConfigError: the peer has no such strategy or option; the folder is one of another comparison.
  """
  from trainer import program as program_lib
  from trainer.config import checks
  from trainer.main import train

  folder = Path(workdir).expanduser().absolute()
  resolved, _ = program_lib.resolve(config)
  for note in comparable(resolved):
    print(note, flush=True)
  resolved.callbacks = ConfigDict(dict(parity=dict(type="trainer.parity.record.Record", folder=str(folder),
                                                   steps=steps)))
  asked = {"config": json.loads(checks.to_json(resolved)), "steps": steps}
  if (folder / "asked.json").exists():
    if json.loads((folder / "asked.json").read_text("utf-8")) != asked:
      raise ConfigError(f"{folder} holds the comparison of another config or other --steps. Give another --workdir.")
  else:
    shutil.rmtree(folder / "weft", ignore_errors=True)
    train(resolved, folder / "weft")
    shutil.copy(HERE / "peer.py", folder)
    (folder / "asked.json").write_text(json.dumps(asked), encoding="utf-8")
  needed = ["torch", "transformers", *["peft"] * (resolved.model.lora.rank > 0)]
  found = subprocess.run([peer, "-c", "import importlib.util, sys; sys.exit(' '.join(name for name in sys.argv[1:] if "
                          "not importlib.util.find_spec(name)) or 0)", *needed], capture_output=True, text=True)
  if found.returncode:
    raise ConfigError(f"{peer} lacks {found.stderr.strip()}. Weft's side is done; for the other give --peer, a Python "
                      f"that has {', '.join(needed)}, and run the same command again; or run there: python "
                      f"{folder}/peer.py {folder}")
  return subprocess.run([peer, str(folder / "peer.py"), str(folder)]).returncode


def comparable(config: ConfigDict) -> list[str]:
  """Turns off, in a resolved config, what the peer does not have; returns sentences on it.

  Raises:
    ConfigError: what cannot be turned off without asking another question.
  """
  from trainer import strategies
  name = config.strategy.name
  if name not in OPTIONS:
    raise ConfigError(f"strategy.name is {name!r}; the peer has {', '.join(OPTIONS)}. For others see docs/parity.md.")
  for key, value in strategies.of(config).options.items():
    if key not in OPTIONS[name] and config.strategy[key] != value:
      raise ConfigError(f"strategy.{key} is {config.strategy[key]!r}, which the peer does not have. Use "
                        f"--config.strategy.{key}={value!r}, or leave it out.")
  if name == "dpo" and (odd := [loss for loss in config.strategy.loss if loss not in ("sigmoid", "sft")]):
    raise ConfigError(f"strategy.loss has {odd[0]!r}; the peer has sigmoid and sft.")
  model, off = config.model, []
  for key in ("balance_loss", "z_loss"):
    if model.moe.num_experts and model.moe[key]:
      raise ConfigError(f"model.moe.{key} is {model.moe[key]}, a loss that transformers computes otherwise. Use "
                        f"--config.model.moe.{key}=0.")
  if model.vision.tower != "none":
    raise ConfigError("the config's model has images; the peer is for text alone.")
  if model.lora.rank and not model.hf:
    raise ConfigError("adapters are compared on a base that is a Hugging Face folder. Give --config.model.hf=FOLDER.")
  for section, key in ((model, "dropout"), (model, "neftune_alpha"), (model.lora, "dropout"),
                       (config.optimizer, "ema_decay")):
    if section[key]:
      section[key] = 0.0
      off.append(key)
  if config.optimizer.name != "adamw":
    off.append(f"updates (PyTorch has no {config.optimizer.name} of these rules: every batch meets the initial "
               "parameters)")
    config.optimizer.learning_rate = 0.0
  config.precision = defaults().precision
  config.precision.params = config.precision.frozen = config.precision.compute = "float32"
  if name == "dpo":
    config.input.share_prompts = "never"
  for key in (f"{what}_{unit}" for what in ("ckpt", "keep", "log") for unit in DURATION_UNITS):
    config[key] = (1 if key == "log_steps" else 0) if key.endswith("_steps") else -1
  config.spikes, config.evals, config.loggers = defaults().spikes, ConfigDict(), ConfigDict()
  config.keep_best = config.export.path = config.export.dtype = config.resume = None
  config.profile, config.report = defaults().profile, False
  return [f"both sides: float32{', without ' * bool(off)}{', '.join(off)}"]


def _define_flags() -> None:
  config_flags.DEFINE_config_file("config", None, "Config file of the run.", lock_config=True)
  flags.DEFINE_string("workdir", None, "Folder for both sides, made if missing.")
  flags.DEFINE_integer("steps", 20, "Steps to compare.", lower_bound=1)
  flags.DEFINE_string("peer", sys.executable, "A Python with torch, transformers and, for adapters, peft.")
  flags.mark_flags_as_required(["config", "workdir"])


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments {argv[1:]}")
  config, notes = config_typed.of_flag(flags.FLAGS["config"])
  from trainer import startup
  startup.set_environment(config.get("precision"))
  startup.errors_of_savers_in_short()
  startup.keep_compiled_programs()
  with startup.one_message(ConfigError, DataError, OSError):
    for note in notes:
      print(note, flush=True)
    sys.exit(compare(config, flags.FLAGS.workdir, flags.FLAGS.steps, flags.FLAGS.peer))
