"""The command `python -m trainer.parity`, see command.py."""

from absl import app, flags, logging

from trainer.config import typed
from trainer.parity import command

__doc__ = command.__doc__  # what --help prints

if __name__ == "__main__":
  command._define_flags()
  logging.set_verbosity(logging.WARNING)
  flags.adopt_module_key_flags(command)
  app.run(command.main, flags_parser=typed.parse_flags)
