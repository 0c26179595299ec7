"""The command `python -m trainer.parity`, see command.py."""

from trainer import startup
from trainer.config import typed
from trainer.parity import command

if __name__ == "__main__":
  startup.run(command, uses_devices=False, flags_parser=typed.parse_flags)
