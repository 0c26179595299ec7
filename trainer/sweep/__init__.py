"""Several runs: the commands `python -m trainer.sweep` (variants of a config) and `python -m trainer.speedrun`
(stages).

May import: trainer.config, trainer.program, trainer.report, trainer.telemetry.
"""
