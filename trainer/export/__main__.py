"""The command `python -m trainer.export`, see command.py."""

from trainer import startup
from trainer.export import command

if __name__ == "__main__":
  startup.run(command, uses_devices=False)
