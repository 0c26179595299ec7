"""The command `python -m trainer.parity`, see command.py."""

from trainer import startup
from trainer.config import typed
from trainer.parity import command

__doc__ = command.__doc__  # what --help prints

if __name__ == "__main__":
  startup.run(command, uses_devices=False, flags_parser=typed.parse_flags)
