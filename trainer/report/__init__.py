"""A run on one page: `report.html` in the workdir, written when a run ends, is stopped or fails
(docs/observability.md).

    python -m trainer.report DIR [DIR…] [--out=FILE]

makes the page of a run again, or one page on which several runs stand side by side. `Record` keeps what a run knows
and nothing else writes down, in `run.json`; `Page` writes the page.

May import: trainer, trainer.callbacks, trainer.config.
"""


def __getattr__(name: str):
  # Imported on use: the command needs neither JAX nor a model.
  if name in ("Page", "Record"):
    from trainer.report import record
    return getattr(record, name)
  raise AttributeError(f"module 'trainer.report' has no attribute {name!r}")
