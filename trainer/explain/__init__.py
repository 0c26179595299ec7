"""The command `python -m trainer.explain`: what a config key or metric is, its default, where docs and code have it.

May import: trainer.config, trainer.strategies, trainer.telemetry.
"""
