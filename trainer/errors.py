"""Errors that users see. Their message says what was found, where, what is allowed, and what to type."""


class ConfigError(ValueError):
  """A config that cannot be run."""


class DataError(ValueError):
  """Data that cannot be used."""


class CheckpointError(OSError):
  """A checkpoint that could not be written or read."""


class Damaged(CheckpointError):
  """A checkpoint that is proven not to be what was saved (trainer/checkpoints/damage.py)."""
