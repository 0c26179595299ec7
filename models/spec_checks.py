"""Checks of values of the config's `model` section; each returns the value, or raises ConfigError."""

import dataclasses
import difflib
from collections.abc import Collection
from typing import Any

from ml_collections import ConfigDict

from trainer.errors import ConfigError

# Types of layers that mix no tokens; where there are some, each layer is one residual branch.
TOKENWISE = ("mlp", "moe")


def names(made: Any) -> tuple[str, ...]:
  """Of a dataclass's fields, which are called as the keys of their section."""
  return tuple(field.name for field in dataclasses.fields(made))


def as_they_are(made: Any, section: ConfigDict, but: Collection[str] = ()) -> dict[str, Any]:
  """{name: value in the section} of a dataclass's fields, those of `but` left out."""
  return {name: section[name] for name in names(made) if name not in but}


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


def check_branches(m: ConfigDict, pattern: tuple[str, ...]) -> None:
  """Refuses what layers of one residual branch, of which some are of `TOKENWISE`, cannot have."""
  if not any(kind in TOKENWISE for kind in pattern):
    return
  experts = "moe" in pattern
  wanted = {"parallel_blocks": False, "norm_position": "pre", "moe.dense_layers": 0, "moe.layer_step": 1,
            "moe.beside_mlp": False}
  found = {"parallel_blocks": m.parallel_blocks, "norm_position": m.norm_position,
           **{f"moe.{key}": m.moe[key] for key in ("dense_layers", "layer_step", "beside_mlp")}}
  for key, value in found.items():
    if value != wanted[key]:
      raise ConfigError(f"model.{key}: found {value!r} with layer_pattern={pattern}, where each layer is one branch "
                        f"behind one norm; allowed: {wanted[key]!r}.")
  if (m.moe.num_experts > 0) != experts:
    raise ConfigError(f"model.moe.num_experts: found {m.moe.num_experts} with layer_pattern={pattern}; allowed: "
                      + ("1 or more, for its layers of type 'moe'." if experts else
                         "0, or layers of type 'moe' that have them."))
