"""The command `python -m trainer.serve`, see command.py."""

from trainer import startup
from trainer.serve import command

if __name__ == "__main__":
  startup.run(command)
