"""The command `python -m trainer.speedrun`, see command.py."""

from trainer import startup
from trainer.speedrun import command

if __name__ == "__main__":
  startup.run(command, uses_devices=False)
