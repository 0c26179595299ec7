"""The command `python -m trainer.generate`, see command.py."""

from trainer import startup
from trainer.generate import command

__doc__ = command.__doc__  # what --help prints

if __name__ == "__main__":
  startup.run(command)
