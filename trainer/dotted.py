"""What a config names by a dotted path: `my_package.my_module.thing`, the user's own or a built-in."""

import importlib
from collections.abc import Mapping
from typing import Any

from trainer.errors import ConfigError


def load_object(name: str, key: str, allowed: str = "") -> Any:
  """What a dotted path of the user's names: `my_package.my_module.thing`.

  Args:
    name: the dotted path.
    key: where the config says so, for messages.
    allowed: what else may stand there, and of what kind the user's own is, for messages.

  Raises:
    ConfigError: it cannot be imported, or the module has nothing of that name.
  """
  module, _, attribute = str(name).rpartition(".")
  try:
    return getattr(importlib.import_module(module), attribute)
  except (ImportError, AttributeError, ValueError, TypeError) as e:
    raise ConfigError(f"{key}: found {name!r}, which could not be imported ({e}). Allowed: {allowed}, importable from "
                      "where you run.") from e


def load_class(name: str, key: str, built_in: Mapping[str, str] | None = None) -> type:
  """The class that a config key names: one of `built_in` ({name: dotted path}), or the user's own by dotted path.

  Raises:
    ConfigError: if there is no such class.
  """
  known = f"{', '.join(built_in)}, or " if built_in else ""
  allowed = f"{known}the dotted path of a class of yours, e.g. my_package.MyClass"
  found = load_object((built_in or {}).get(name, name), key, allowed)
  if not isinstance(found, type):
    raise ConfigError(f"{key}: found {name!r}, which could not be imported (it is a {type(found).__name__}). Allowed: "
                      f"{allowed}, importable from where you run.")
  return found
