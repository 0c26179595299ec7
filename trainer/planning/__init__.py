"""`--mode=plan`: what a run would take in memory, time and network, before it is paid for, by estimate and by compiler.

May import: trainer.config, trainer.distributed, trainer.program, trainer.report, trainer.startup, trainer.strategies,
trainer.telemetry, input_pipeline, models.
"""
