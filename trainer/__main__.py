"""Train: python -m trainer --config=configs/quickstart.py --workdir=DIR [--config.key=value …] [--mode=MODE]"""

import sys

from absl import app, flags, logging
from ml_collections import config_flags

from trainer import startup
from trainer.config import ConfigError

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, e.g. configs/quickstart.py.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for checkpoints, metrics and samples; the same folder resumes.")
_MODE = flags.DEFINE_enum("mode", "train", ["train", "inspect", "plan"], "train; inspect: show what would be trained "
                          "on; plan: say what it would take, on devices that need not be here.")
flags.mark_flags_as_required(["config", "workdir"])


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments {argv[1:]}; overrides are written --config.key=value")
  # JAX takes seconds to import: only now, so that a mistyped flag is told at once.
  import jax

  from input_pipeline.sources import DataError
  from trainer.inspect import inspect
  from trainer.main import train
  from trainer.plan import plan
  startup.keep_compiled_programs()
  if _MODE.value == "plan" and _CONFIG.value.plan.topology is not None:
    # The plan is for other devices; those that are here, perhaps in use, are left alone.
    jax.config.update("jax_platforms", "cpu")
  try:
    {"train": train, "inspect": inspect, "plan": plan}[_MODE.value](_CONFIG.value, _WORKDIR.value)
  except KeyboardInterrupt:
    # While steps run, Ctrl-C saves and exits 0 (trainer/callbacks.py); before that there is nothing to save.
    sys.stderr.write("\nInterrupted while setting up: no step was taken, nothing is lost.\n")
    sys.exit(130)
  except (ConfigError, DataError, OSError, FloatingPointError) as error:
    # What a user can act on: one message, without a traceback (which --verbosity=1 adds).
    logging.debug("Traceback:", exc_info=True)
    sys.exit(f"\n{type(error).__name__}: {error}")


def _parse_flags(argv: list[str]) -> list[str]:
  """Parses flags; an override of a key that does not exist is told with the nearest one that does."""
  try:
    return app.parse_flags_with_usage(argv)
  except (AttributeError, KeyError) as error:
    from trainer import config_checks
    sys.exit(f"ConfigError: {config_checks.explain_override(argv, error)}")


if __name__ == "__main__":
  startup.use_huge_pages()
  startup.set_xla_flags()
  logging.set_verbosity(logging.WARNING)
  app.run(main, flags_parser=_parse_flags)
