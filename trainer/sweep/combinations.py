"""An algebra over overrides: which configs a sweep (trainer/sweep/command.py) is made of.

A sweep is a list of combinations, each a dict {dotted key: value} of what differs from the config:

    sweep("optimizer.learning_rate", [1e-3, 3e-3])        2 combinations
    product(a, b, …)                                       each of a with each of b: len(a) · len(b)
    zipped(a, b, …)                                        the first of a with the first of b, …: len(a)
    chain(a, b, …)                                         those of a, then those of b: len(a) + len(b)
    fixed({"schedule.name": "wsd", "optimizer.b2": 0.95})  1

so that `product(chain(fixed({"optimizer.name": "adamw"}), product(fixed({"optimizer.name": "muon"}), momenta)), seeds)`
says what it does. Nothing is read or checked against a config here.
"""

import ast
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.errors import ConfigError

Combination = dict[str, Any]
# Characters of a name without its hash.
LONGEST_NAME = 80
_KEY = re.compile(r"[^\W\d]\w*([.][\w\-]+)*")


def sweep(key: str, values: Iterable[Any]) -> list[Combination]:
  """A combination for each value of a key.

  Raises:
    ConfigError: what is no key, or no values.
  """
  if not isinstance(key, str) or not _KEY.fullmatch(key):
    raise ConfigError(f"a sweep's key is {key!r:.80}; it must be a dotted key of the config, as in "
                      'sweep("optimizer.learning_rate", [1e-3, 3e-3]).')
  if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
    raise ConfigError(f"the values of {key} are {values!r:.80}; they must be a list, as in "
                      f"sweep({key!r}, [{values!r:.40}]).")
  found = [{key: value} for value in values]
  if not found:
    raise ConfigError(f"the sweep over {key} has no values.")
  return found


def fixed(overrides: Mapping[str, Any]) -> list[Combination]:
  """One combination; with {} the config as it is."""
  return product(*(sweep(key, [value]) for key, value in overrides.items()))


def product(*sweeps: Sequence[Combination]) -> list[Combination]:
  """Every combination of one of each; the last varies fastest.

  Raises:
    ConfigError: a key that two of them set.
  """
  return [_joined(parts) for parts in itertools.product(*map(_checked, sweeps))]


def zipped(*sweeps: Sequence[Combination]) -> list[Combination]:
  """The first of each together, then the second of each, and so on.

  Raises:
    ConfigError: different lengths, or a key that two of them set.
  """
  lengths = [len(_checked(one)) for one in sweeps]
  if len(set(lengths)) > 1:
    raise ConfigError(f"zipped needs sweeps of one length; found {', '.join(map(str, lengths))}.")
  return [_joined(parts) for parts in zip(*sweeps, strict=True)]


def chain(*sweeps: Sequence[Combination]) -> list[Combination]:
  """One sweep after the other."""
  return [combination for one in sweeps for combination in _checked(one)]


def _checked(one: Any) -> Sequence[Combination]:
  if not isinstance(one, (list, tuple)) or not all(isinstance(c, Mapping) for c in one):
    raise ConfigError(f"found {one!r:.80} in place of a sweep, a list of dicts {{key: value}}. Make it by "
                      'sweep("key", [values]), product, zipped, chain or fixed.')
  return one


def _joined(parts: Iterable[Combination]) -> Combination:
  joined: Combination = {}
  for part in parts:
    if twice := joined.keys() & part.keys():
      raise ConfigError(f"{min(twice)} is set twice in one combination. Leave it out of one of the sweeps.")
    joined |= part
  return joined


def parsed(text: str) -> list[Combination]:
  """The sweep that `key=value,value,…` says. Commas in brackets or quotes are part of a value; a value that is no
  Python literal is a string.

  Raises:
    ConfigError: it has another form.
  """
  key, _, values = text.partition("=")
  parts, depth, quote = [""], 0, ""
  for character in values:
    if character in "'\"" and quote in ("", character):
      quote = "" if quote else character
    elif not quote:
      depth += (character in "([{") - (character in ")]}")
    if character == "," and depth == 0 and not quote:
      parts.append("")
    else:
      parts[-1] += character
  if depth or quote or not all(part.strip() for part in parts):
    raise ConfigError(f"found --set={text!r}; it must be KEY=VALUE,VALUE,…, as in "
                      "--set='optimizer.learning_rate=1e-3,3e-3', with brackets and quotes closed.")
  return sweep(key.strip().removeprefix("config."), [_literal(part.strip()) for part in parts])


def _literal(text: str) -> Any:
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text


def argument(key: str, value: Any) -> str:
  """An override as the trainer's command line has it.

  Raises:
    ConfigError: a value that cannot be written there.
  """
  if value is None:
    raise ConfigError(f"{key} is None in a combination; the command line cannot say that. Leave the key out of that "
                      "combination (chain); a duration is unset by -1.")
  if isinstance(value, Mapping):
    raise ConfigError(f"{key} is a dict in a combination; set its keys one by one, as in {key}.KEY.")
  text = str(value) if isinstance(value, (str, bool)) else repr(tuple(value) if isinstance(value, list) else value)
  return f"--config.{key}={text}"


def name_of(combination: Combination) -> str:
  """A folder's name: what is overridden, in short, and a hash of it in full.

  It depends on that combination alone, in whatever order its keys are, so that a run keeps its folder when a sweep
  grows. Letters, digits and `_ . = - +` only; at most LONGEST_NAME + 9 characters.
  """
  if not combination:
    return "base"
  short = {key: _short(key, combination) for key in sorted(combination)}
  label = "__".join(f"{short[key]}={_value(combination[key])}" for key in short)
  exact = json.dumps({key: repr(combination[key]) for key in sorted(combination)})
  return f"{label[:LONGEST_NAME].rstrip('.')}-{hashlib.sha256(exact.encode()).hexdigest()[:8]}"


def _short(key: str, keys: Iterable[str]) -> str:
  """The fewest last parts of a key that no other of the keys ends with."""
  parts = key.split(".")
  for count in range(2 if parts[-1] in ("name", "type") else 1, len(parts)):
    tail = "." + ".".join(parts[-count:])
    if not any(other != key and f".{other}".endswith(tail) for other in keys):
      return tail[1:]
  return key


def _value(value: Any) -> str:
  text = f"{value:g}" if isinstance(value, float) else str(value)
  return re.sub(r"[^A-Za-z0-9_.+\-]+", "-", text.rstrip("/").rpartition("/")[2]).strip("-") or "-"
