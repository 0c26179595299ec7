"""Checks of values of the config's `model` section; each returns the value, or raises ConfigError."""

import difflib

from trainer.errors import ConfigError


def one_of(key: str, value: str, allowed: tuple[str, ...]) -> str:
  """`value`, if it is one of `allowed`."""
  if value not in allowed:
    near = difflib.get_close_matches(str(value), allowed, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"model.{key}: found {value!r}, allowed: {', '.join(allowed)}.{hint}")
  return value


def at_least_one(key: str, value: int) -> int:
  """`value`, if it is set and above 0."""
  if value is None or value < 1:
    raise ConfigError(f"model.{key}: found {value}, allowed: 1 or more.")
  return value


def cap(key: str, value: float | None) -> float | None:
  """`value`, if it is above 0 or not set."""
  if value is not None and value <= 0:
    raise ConfigError(f"model.{key}: found {value}, allowed: a number above 0, or unset for no cap.")
  return value
