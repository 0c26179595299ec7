"""The command `python -m trainer.embed`, see command.py."""

from trainer import startup
from trainer.embed import command

if __name__ == "__main__":
  startup.run(command)
