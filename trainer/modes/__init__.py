"""What `--mode=` does besides training: `inspect` shows the data, `verify` the exactness, `replay` the tokens of an
update.

May import: trainer.callbacks, trainer.config, trainer.distributed, trainer.export, trainer.generate, trainer.main,
trainer.position, trainer.program, trainer.report, trainer.rollouts, trainer.strategies, trainer.telemetry,
trainer.update, trainer.workdir, evaluators, input_pipeline, models.
"""
