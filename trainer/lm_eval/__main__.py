"""The command `python -m trainer.lm_eval`, see command.py."""

from trainer import startup
from trainer.lm_eval import command

if __name__ == "__main__":
  startup.run(command)
