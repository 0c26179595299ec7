"""Several runs: the command `python -m trainer.sweep`, variants of a config, here or by Slurm.

May import: trainer.config, trainer.program, trainer.report, trainer.startup, trainer.telemetry.
"""
