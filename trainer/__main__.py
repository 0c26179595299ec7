"""Train: python -m trainer --config=configs/quickstart.py --workdir=DIR [--config.key=value …] [--mode=MODE]"""

import functools
import gc
import os
import sys
from typing import Any, NoReturn

from absl import app, flags, logging
from ml_collections import config_flags

from trainer import startup
from trainer.config import typed as config_typed
from trainer.errors import ConfigError

config_flags.DEFINE_config_file("config", None, "Config file, e.g. configs/quickstart.py.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for checkpoints, metrics and samples; the same folder resumes.")
_MODE = flags.DEFINE_enum("mode", "train", ["train", "inspect", "plan", "verify", "replay"], "train; inspect: show "
                          "what would be trained on; plan: say what it would take, on devices that need not be here; "
                          "verify: measure on a slice what must be equal; replay: the batch of one update of a run "
                          "again, with the loss of each row and the numbers of each token.")
_STEP = flags.DEFINE_integer("step", None, "The update that --mode=replay is to show, from 1 on.")
flags.mark_flags_as_required(["config", "workdir"])


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments {argv[1:]}; overrides are written --config.key=value")
  config, notes = config_typed.of_flag(flags.FLAGS["config"])
  startup.set_environment(config.get("precision"), untimed=_MODE.value == "verify" or config.get("deterministic", True))
  # These take seconds to import: only now, so that a mistyped flag is told before them.
  import jax

  from trainer import bases
  from trainer.errors import DataError
  from trainer.main import train
  from trainer.modes.inspect import inspect
  from trainer.modes.replay import replay
  from trainer.modes.verify import verify
  from trainer.planning.plan import out_of_memory, plan
  startup.look_for_garbage()
  startup.errors_of_savers_in_short()
  startup.keep_compiled_programs()
  if _MODE.value == "plan" and config.plan.topology is not None:
    # The plan is for other devices; those that are here, perhaps in use, are left alone.
    jax.config.update("jax_platforms", "cpu")
  mode: Any = {"train": train, "inspect": inspect, "plan": plan, "verify": verify,
          "replay": functools.partial(replay, step=_STEP.value)}[_MODE.value]
  if _STEP.value is not None and _MODE.value != "replay":
    raise app.UsageError(f"--step={_STEP.value} is for --mode=replay, but the mode is {_MODE.value}.")
  try:
    for note in notes:
      print(note, flush=True)
    if _MODE.value == "train" and (code := bases.make(config, _WORKDIR.value, sys.argv[1:])):
      sys.exit(code)
    if _MODE.value in ("inspect", "plan"):
      bases.check(config, _WORKDIR.value, of_tokenizer=True)
    mode(config, _WORKDIR.value)
  except KeyboardInterrupt:
    # While steps run, Ctrl-C saves and exits 0 (trainer/callbacks.py); before that there is nothing to save.
    _leave("Interrupted while setting up: no step was taken, nothing is lost.", 130)
  except (ConfigError, DataError, OSError, FloatingPointError) as error:
    # What a user can act on: one message, without a traceback (which --verbosity=1 adds).
    logging.debug("Traceback:", exc_info=True)
    _leave(f"{type(error).__name__}: {error}")
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    logging.debug("Traceback:", exc_info=True)
    _leave(out_of_memory(config, _WORKDIR.value, error))


def _leave(message: str, code: int = 1) -> NoReturn:
  """Ends the program with a message: while it sets up at once, though the compiler may be at work, for which Python
  would wait. Of several processes each waits, since they take leave of one another."""
  import jax

  from trainer.compiler import compiled
  sys.stderr.write(f"\n{message}\n")
  if compiled.in_progress() and jax.process_count() == 1:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
  sys.exit(code)


if __name__ == "__main__":
  startup.use_huge_pages()
  # Until `look_for_garbage`: while packages are imported Python finds none, but takes a tenth of the time to look.
  gc.disable()
  logging.set_verbosity(logging.WARNING)
  app.run(main, flags_parser=config_typed.parse_flags)
