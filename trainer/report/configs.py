"""A run's config as text: how it differs from the defaults, and from those of other runs."""

import importlib.metadata
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config import checks as config_checks
from trainer.errors import ConfigError

# Characters of a value, and keys of a table.
MOST_CHARACTERS, MOST_KEYS = 400, 1500
_SECRET = re.compile(r"(.*_)?(api_?key|password|passwd|secret|credentials?|token)", re.IGNORECASE)
HIDDEN, ABSENT = "(hidden)", "—"


def weft_version() -> str:
  """The version that is installed, or else that of the source tree that runs."""
  try:
    return importlib.metadata.version("weft")
  except importlib.metadata.PackageNotFoundError:
    pass
  try:
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    return f"{tomllib.loads(project.read_text(encoding='utf-8'))['project']['version']}, not installed"
  except (OSError, ValueError, KeyError):
    return "not installed"


def text(value: Any) -> str:
  """A value of a config, as Python would have it in a config file."""
  shown = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
  return shown if len(shown) <= MOST_CHARACTERS else shown[:MOST_CHARACTERS] + " …"


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
  """{"a.b": leaf}; what looks like a secret, by its name, is hidden."""
  return {key: HIDDEN if _SECRET.fullmatch(key.rpartition(".")[2]) and isinstance(value, str) and value else value
          for key, value in config_checks.flatten(config).items()}


def without_secrets(command: Sequence[str]) -> list[str]:
  """The arguments of a command, without the values of those that are secrets by their names."""
  found = []
  for argument in command:
    name, equals, _ = argument.partition("=")
    secret = equals and _SECRET.fullmatch(name.rpartition(".")[2].lstrip("-"))
    found.append(f"{name}={HIDDEN}" if secret else argument)
  return found


def changed(config: Mapping[str, Any]) -> tuple[list[tuple[str, str, str]], str]:
  """([(key, value, default)] of a resolved config where these differ, a sentence if the defaults are not known)."""
  defaults, why = _defaults(config)
  if why:
    return [], f"How it differs from the defaults is not known: it is of another version of Weft ({why})."
  return [(key, _given(key, value), _given(key, defaults[key]) if key in defaults else ABSENT)
          for key, value in flat(config).items() if _given(key, value) != _given(key, defaults.get(key))], ""


def differences(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
  """[(key, value in each config)] where they differ, keys that change the training first; ABSENT: it has no such key,
  which is a difference only where another one has something else than its default, or a type."""
  every, defaults = [flat(config) for config in configs], {}
  for config in configs:
    defaults |= _defaults(config)[0]
  rows = []
  for key in sorted({key for one in every for key in one}, key=lambda key: (not config_checks.trains(key), key)):
    found = [_given(key, one[key]) if key in one else ABSENT for one in every]
    usual = _given(key, defaults[key]) if key in defaults and not key.endswith(".type") else ABSENT
    if len({usual if value == ABSENT else value for value in found}) > 1:
      rows.append((key, *found))
  return rows


def _given(key: str, value: Any) -> str:
  return text(config_checks.as_given(key, value))


def _defaults(config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
  """(the defaults of a config's keys, why they are not known)."""
  try:
    return json.loads(json.dumps(config_checks.baseline(config), default=list)), ""
  except (ConfigError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as e:
    return {}, f"{type(e).__name__}: {e}"
