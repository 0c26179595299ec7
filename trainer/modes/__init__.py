"""What `--mode=` does beside training: `inspect` shows the data, `verify` the exactness, `replay` one update's rows and
tokens.

May import: trainer.callbacks, trainer.config, trainer.distributed, trainer.export, trainer.generate, trainer.main,
trainer.position, trainer.program, trainer.report, trainer.rollouts, trainer.strategies, trainer.telemetry,
trainer.update, trainer.workdir, evaluators, input_pipeline, models.
"""
