"""The command `python -m trainer.sweep`, see command.py."""

from absl import flags

from trainer import startup
from trainer.sweep import command

if __name__ == "__main__":
  startup.run(command, uses_devices=False, flags_parser=lambda argv: flags.FLAGS(argv, known_only=True))
