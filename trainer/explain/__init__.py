"""The command `python -m trainer.explain`: what a config key or metric is, its default, who reads it, where docs tell
of it.

May import: trainer.config, trainer.strategies, trainer.telemetry.
"""
