"""Configs: every key with its default and meaning, and the way from what a user gave to a config that can be trusted.

`defaults()` gives the whole config; `sections` and `model` hold the keys that a run may have several or one of several
kinds of; `checks` resolves, validates, audits and compares; `durations` turns lengths into optimizer steps.

May import: trainer.strategies, models.
"""

from trainer.config.keys import DURATION_UNITS, defaults, duration, evaluator, reward, source, strategy

__all__ = ["DURATION_UNITS", "defaults", "duration", "evaluator", "reward", "source", "strategy"]
