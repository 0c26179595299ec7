"""Errors that users see. Their message says what was found, where, what is allowed, and what to type."""

from collections.abc import Collection
from typing import Any


class ConfigError(ValueError):
  """A config that cannot be run."""


class DataError(ValueError):
  """Data that cannot be used."""


class CheckpointError(OSError):
  """A checkpoint that could not be written or read."""


class Damaged(CheckpointError):
  """A checkpoint that is proven not to be what was saved (trainer/checkpoints/damage.py)."""


def one_of(key: str, value: Any, allowed: Collection[str]) -> None:
  """Refuses a value of a config that is none of those allowed.

  Raises:
    ConfigError: naming the key, what was found and what is allowed.
  """
  if value not in allowed:
    raise ConfigError(f"{key} is {value!r}; allowed: {', '.join(allowed)}.")
