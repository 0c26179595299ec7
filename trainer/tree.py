"""Trees of arrays by path, and the one regex idiom over paths: sharding, freezing, multipliers, partial loading.

A path joins a leaf's keys with "/": `blocks/attn/q/kernel`. A table of rules is `((regex, value), …)`;
a regex matches a path when `re.search` finds it there (anchor it with ^ and $ if you mean the whole
path), and the first rule that matches a path gives its value. A rule without effect is an error, so
that a typo cannot pass for a setting.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from trainer.errors import ConfigError


def flatten(tree: Mapping) -> dict[str, Any]:
  """Leaves of a nested dict by path, in the order of `jax.tree.leaves`; empty dicts leave no trace.

  Raises:
    ValueError: a key is not a string, is empty, or contains "/".
  """
  for key in tree:
    if not isinstance(key, str) or not key or "/" in key:
      raise ValueError(f"tree key {key!r} cannot be part of a path: use non-empty strings without '/'")
  flat = {}
  for key, value in sorted(tree.items()):
    if isinstance(value, Mapping):
      flat.update({f"{key}/{rest}": leaf for rest, leaf in flatten(value).items()})
    else:
      flat[key] = value
  return flat


def unflatten(flat: Mapping[str, Any]) -> dict:
  """The nested dict whose `flatten` is `flat`.

  Raises:
    ValueError: a path is both a leaf and the beginning of another path.
  """
  tree: dict = {}
  for path, leaf in flat.items():
    *parents, last = path.split("/")
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
      if type(node) is not dict:
        raise ValueError(f"the path {path!r} runs through the leaf {parent!r}")
    if last in node:
      raise ValueError(f"the path {path!r} is both a leaf and the beginning of another path")
    node[last] = leaf
  return tree


def compare(ours: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
  """Lines that say how two flat trees of arrays differ; empty if names and shapes are the same.

  `-`: only in ours, `+`: only in the saved one, `!`: in both, with different shapes.
  """
  lines = [f"- {path} {tuple(leaf.shape)}: not in the checkpoint" for path, leaf in ours.items() if path not in saved]
  lines += [f"+ {path} {tuple(leaf.shape)}: not in this run" for path, leaf in saved.items() if path not in ours]
  lines += [f"! {path}: here {tuple(leaf.shape)}, in the checkpoint {tuple(saved[path].shape)}"
            for path, leaf in ours.items() if path in saved and tuple(leaf.shape) != tuple(saved[path].shape)]
  return lines


def match(
    rules: Sequence[tuple[str, Any]],
    paths: Iterable[str],
    what: str,
    *,
    default: Any = None,
    must_match: bool = True,
    optional: Collection[str] = (),
) -> dict[str, Any]:
  """The value of each path: that of the first rule whose regex is found in it, else `default`.

  Args:
    rules: pairs of a regex and a value.
    what: the config key the rules come from, for messages, e.g. `optimizer.lr_mults`.
    default: value of the paths that no rule matches.
    must_match: False for built-in tables, whose rules need not have an effect.
    optional: regexes of `rules` that need not have an effect, where only some are built in.

  Raises:
    ConfigError: a rule is malformed, matches no path, or only paths taken by earlier rules.
  """
  paths = list(paths)
  values: dict[str, Any] = {}
  taken_by: dict[str, str] = {}
  for pattern, value in _pairs(rules, what):
    hits = search(pattern, paths, what, must_match=must_match and pattern not in optional)
    new = [path for path in hits if path not in values]
    if not new and must_match and pattern not in optional:  # `search` refuses one without hits
      earlier = ", ".join(sorted({repr(taken_by[path]) for path in hits}))
      raise ConfigError(
          f"{what}: the rule for {pattern!r} has no effect, because the first match wins and all it matches"
          f" ({_some(hits)}) is taken by the earlier {earlier}. Put it before, or remove it."
      )
    values.update(dict.fromkeys(new, value))
    taken_by.update(dict.fromkeys(new, pattern))
  return {path: values.get(path, default) for path in paths}


def select(patterns: Sequence[str], paths: Iterable[str], what: str, *,
           optional: Collection[str] = ()) -> frozenset[str]:
  """The paths in which at least one of the regexes is found; the regexes may overlap.

  Args:
    what: the config key that the regexes come from, for messages.
    optional: those of the regexes that may match no path, where only some are built in.

  Raises:
    ConfigError: a regex is malformed or matches no path.
  """
  if isinstance(patterns, str):
    raise ConfigError(f"{what} is the string {patterns!r}; write a tuple of patterns: ({patterns!r},)")
  paths = list(paths)
  return frozenset(path for pattern in patterns
                   for path in search(pattern, paths, what, must_match=pattern not in optional))


def search(pattern: str, paths: Sequence[str], what: str, *, must_match: bool = True) -> list[str]:
  """The paths in which one regex is found, in their order.

  Raises:
    ConfigError: the regex is malformed, or matches nothing although it must.
  """
  regex = _compile(pattern, what)
  hits = [path for path in paths if regex.search(path)]
  if not hits and must_match:
    raise ConfigError(_no_match(pattern, paths, what))
  return hits


def _pairs(rules: Sequence, what: str) -> list[tuple[str, Any]]:
  """The rules, each checked to be a pair that begins with a string."""
  example = "((regex, value), …), e.g. (('blocks/attn/', 0.5),)"
  if isinstance(rules, str):
    raise ConfigError(f"{what} is the string {rules!r}; it is a tuple of pairs {example}")
  for rule in rules:
    is_pair = isinstance(rule, Sequence) and not isinstance(rule, str) and len(rule) == 2
    if not is_pair or not isinstance(rule[0], str):
      raise ConfigError(f"{what}: found the rule {rule!r}; rules are pairs {example}")
  return [(pattern, value) for pattern, value in rules]


def _compile(pattern: str, what: str) -> re.Pattern:
  if not isinstance(pattern, str):
    raise ConfigError(f"{what}: found {pattern!r}, a {type(pattern).__name__}; patterns are strings")
  try:
    return re.compile(pattern)
  except re.error as e:
    position = e.pos or 0
    raise ConfigError(
        f"{what}: {pattern!r} is not a regular expression: {e.msg} at position {position}:\n"
        f"  {pattern}\n  {' ' * position}^"
    ) from e


def _no_match(pattern: str, paths: Sequence[str], what: str) -> str:
  """The message for a pattern that matches nothing: near misses, and what exists."""
  # Without the regex syntax, a pattern is close to the path it was meant for.
  words = re.sub(r"\\[a-zA-Z]|[\^$()\[\]{}*+?|\\.]", "", pattern)
  components = sorted({component for path in paths for component in path.split("/")})
  hints = []
  for word in dict.fromkeys(w for w in re.split(r"[^A-Za-z0-9_]+", pattern) if w):
    if not any(word in component for component in components):
      near = difflib.get_close_matches(word, components, n=2, cutoff=0.6)
      hints += [f"{' or '.join(map(repr, near))} instead of {word!r}"] if near else []
  near_paths = difflib.get_close_matches(words, paths, n=3, cutoff=0.6)
  message = f"{what}: the pattern {pattern!r} matches none of the {len(paths)} parameters."
  if hints:
    message += f" Did you mean {', '.join(hints)}?"
  if near_paths:
    message += f" Nearest: {', '.join(near_paths)}."
  return f"{message} There are: {_some(paths)}."


def _some(paths: Sequence[str], limit: int = 8) -> str:
  """A few of the paths, and how many there are besides."""
  shown = ", ".join(paths[:limit]) or "none"
  return shown if len(paths) <= limit else f"{shown} … and {len(paths) - limit} more"
