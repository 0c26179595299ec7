"""What is typed on the command line wins over what a config file says by another key of the same thing; and why an
override is refused.

A config file with `total_epochs = 3` and `--config.total_steps=12`: the run has 12 steps, and says that the epochs gave
way. Two such keys that are both in the file, or both typed, stay: whoever reads them refuses them. `None` unsets a key,
of whatever type.
"""

import difflib
import functools
import operator
import re
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import app
from ml_collections import ConfigDict

from trainer import tree
from trainer.config import sections
from trainer.config.keys import DURATION_UNITS, defaults

# (regex of a section, {keys of it of which one is given: the value that says "not given"}), besides durations.
GROUPS: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"init_from", {"path": None, "hf": None, "fresh": False}),
    (r"chat", {"train_on": "auto", "roles": ()}),
    (r"evals\.[^.]+", {"options": (), "options_key": None}),
)
# (regex of a section, a key, a value typed for it, the key that then means nothing).
MOOT: tuple[tuple[str, str, Any, str], ...] = (
    (r"input\.sources\.[^.]+", "split", "all", "validation_fraction"),
)


def of_flag(flag: Any) -> tuple[ConfigDict, list[str]]:
  """The config of a parsed `config_flags.DEFINE_config_file`; see `prefer`."""
  return prefer(flag.value, flag.override_values)


def prefer(config: ConfigDict, typed: Mapping[str, Any]) -> tuple[ConfigDict, list[str]]:
  """A copy in which other keys that say the same as a typed one are unset; and a sentence for each that the file set.

  Args:
    config: as the file gave it, with the overrides.
    typed: {dotted path: value} of the overrides.
  """
  config, notes, default = config.copy_and_resolve_references(), [], defaults()
  with config.unlocked(), config.ignore_type():
    for path, value in typed.items():
      section, _, key = path.rpartition(".")
      parts = section.split(".") if section else []
      node, default_node = functools.reduce(operator.getitem, parts, config), _get(default, parts)
      if value == "None":  # which the flags of texts take for a text
        value = node[key] = None
      for pattern, moot, of, other in MOOT:
        full = f"{section}.{other}"
        if (key, value) != (moot, of) or not re.fullmatch(pattern, section) or full in typed:
          continue
        if node[other] != (unset := sections.source()[other]):
          notes.append(f"{full} = {node[other]!r} of the config file means nothing with --config.{path}={value}")
          node[other] = unset
      group = _group(section, key, node)
      if not group or not _given(value, group[key]):
        continue
      for sibling, unset in group.items():
        full = f"{section}.{sibling}" if section else sibling
        found = node.get(sibling)
        if full in typed or not _given(found, unset):
          continue
        node[sibling] = unset
        if found == default_node.get(sibling):
          continue
        kept = full == "init_from.hf" and config.model.get("hf") is None
        if kept:  # parameters come from elsewhere, but the model is still that one
          config.model.hf = found
        notes.append(f"{full} = {found!r} of the config file gives way to --config.{path}={value}"
                     f"{'; model.hf is that folder now' if kept else ''}")
  return config, notes


def _get(config: ConfigDict, parts: list[str]) -> Mapping[str, Any]:
  """The section of the defaults; {} for one of a name that the user chose."""
  for part in parts:
    config = config.get(part) or {}
  return config


def _group(section: str, key: str, node: Mapping[str, Any]) -> dict[str, Any]:
  """The keys beside and with this one in `node`, each with what says that it is not given; {}: it stands alone."""
  prefix, _, unit = key.rpartition("_")
  units = [f"{prefix}_{other}" for other in DURATION_UNITS if f"{prefix}_{other}" in node]
  if unit in DURATION_UNITS and len(units) > 1:  # tokenizer.new_tokens is no duration
    return dict.fromkeys(units, -1)
  return next((keys for pattern, keys in GROUPS if key in keys and re.fullmatch(pattern, section)), {})


def _given(value: Any, unset: Any) -> bool:
  """Whether a value says something. Of a duration, None and -1 do not."""
  if unset == -1:
    return value not in (None, -1)
  return value is not None and value != unset


def parse_flags(argv: list[str]) -> list[str]:
  """For `app.run`: a config file or a key that does not exist is told with the nearest one that does."""
  if missing := _missing_file(argv):
    sys.exit(f"ConfigError: {missing}")
  try:
    return app.parse_flags_with_usage(argv)
  except (AttributeError, KeyError) as error:
    sys.exit(f"ConfigError: {explain_override(argv, error)}")


def _file(argv: list[str]) -> str:
  """What `--config` says, as one word or two; the last counts."""
  return next((word.partition("=")[2] if "=" in word else after
               for word, after in reversed(list(zip(argv, [*argv[1:], ""], strict=True)))
               if word.partition("=")[0] in ("-config", "--config")), "")


def _missing_file(argv: list[str]) -> str:
  """That the config file does not exist, with what is called nearly so in its folder; "" if it does."""
  path = Path(_file(argv).partition(":")[0])
  if path == Path() or path.is_file():
    return ""
  there = sorted(other.name for other in path.parent.glob("*.py") if not other.name.startswith("_"))
  near = difflib.get_close_matches(path.name, there, n=1)
  found = f"did you mean {path.with_name(near[0])}?" if near else (
      f"in {path.parent.absolute()} there {'are ' + ', '.join(there) if there else 'is no config file'}.")
  return f"--config={path}: no such file; {found}"


def did_you_mean(key: str, known: list[str], prefix: str = "") -> str:
  """`; did you mean …?` with the key of that name in another section, or the nearest known one, or the list of all."""
  places = [path for path in tree.flatten(defaults().to_dict()) if path.rpartition("/")[2] == key]
  if 0 < len(places) < 4:
    return f"; did you mean {' or '.join('config.' + path.replace('/', '.') for path in places)}?"
  near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
  if near:
    return f"; did you mean config.{prefix}{near[0]}?"
  return f"; known keys{' of config.' + prefix[:-1] if prefix else ''}: {', '.join(sorted(known))}"


def explain_override(argv: list[str], error: Exception) -> str:
  """Why the command line's overrides were refused: the first key that the config file does not have."""
  file = _file(argv)
  path, _, argument = file.partition(":")
  try:
    names = runpy.run_path(path)
    if "get_config" not in names:
      return f"{path} has no function get_config(), which is to return the config"
    config = names["get_config"](argument) if argument else names["get_config"]()
  except Exception as e:
    return f"{file or 'the config file'} cannot be read: {type(e).__name__}: {e}"
  for override in (a.lstrip("-").split("=", 1)[0] for a in argv):
    node, prefix = config, ""
    for key in override.split(".")[1:] if override.startswith("config.") else ():
      if not isinstance(node, ConfigDict) or key not in node:
        known = list(node.keys()) if isinstance(node, ConfigDict) else []
        return f"unknown key config.{prefix}{key}{did_you_mean(key, known, prefix)}"
      node, prefix = node[key], f"{prefix}{key}."
  return f"{type(error).__name__}: {error}"
