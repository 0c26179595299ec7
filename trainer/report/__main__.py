"""The page of a run again, or one page of several: python -m trainer.report DIR [DIR…] [--out=FILE]

With one DIR, a run's --workdir, it writes DIR/report.html; with several, comparison.html where you are.
"""

from pathlib import Path

from absl import app, flags, logging

from trainer import startup
from trainer.errors import ConfigError
from trainer.report import compare, page

COMPARISON = "comparison.html"


def _define_flags() -> None:
  flags.DEFINE_multi_string("workdir", [], "The same as DIR, as other commands have it.")
  flags.DEFINE_string("out", None, f"The file to write. Default: report.html in DIR, or {COMPARISON} here for several.")


def main(argv: list[str]) -> None:
  workdirs, out = [*argv[1:], *flags.FLAGS.workdir], flags.FLAGS.out
  if not workdirs:
    raise app.UsageError("give the folder of a run, as in: python -m trainer.report runs/quickstart")
  with startup.one_message(ConfigError, OSError):
    if out is not None and Path(out).is_dir():
      raise ConfigError(f"--out {out} is a folder; give a file, e.g. {Path(out) / COMPARISON}.")
    written = page.write(workdirs[0], out) if len(workdirs) == 1 else compare.write(workdirs, out or COMPARISON)
  print(written)


if __name__ == "__main__":
  _define_flags()
  logging.set_verbosity(logging.WARNING)
  app.run(main)
