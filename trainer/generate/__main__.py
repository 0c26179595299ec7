"""The command `python -m trainer.generate`, see command.py."""

from trainer import startup
from trainer.generate import command

if __name__ == "__main__":
  startup.run(command)
