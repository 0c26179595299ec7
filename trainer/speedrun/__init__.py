"""The command `python -m trainer.speedrun`: stages that build on one another, their scores, and a chat in the end.

May import: trainer.report, trainer.startup, trainer.sweep, trainer.telemetry.
"""
