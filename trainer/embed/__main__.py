"""The command `python -m trainer.embed`, see command.py."""

from absl import app, flags, logging

from trainer import startup
from trainer.embed import command

__doc__ = command.__doc__  # what --help prints

if __name__ == "__main__":
  startup.set_environment()
  command._define_flags()
  logging.set_verbosity(logging.WARNING)
  flags.adopt_module_key_flags(command)
  app.run(command.main)
