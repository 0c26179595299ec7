"""The command `python -m trainer.embed`, see command.py."""

from trainer import startup
from trainer.embed import command

__doc__ = command.__doc__  # what --help prints

if __name__ == "__main__":
  startup.run(command)
