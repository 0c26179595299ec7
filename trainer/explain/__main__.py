"""The command `python -m trainer.explain`, see command.py."""

import signal
import sys

from trainer.explain import command

if __name__ == "__main__":
  if hasattr(signal, "SIGPIPE"):
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as other commands: `| head` is no error
  sys.exit(command.main(sys.argv[1:]))
