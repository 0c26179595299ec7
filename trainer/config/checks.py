"""From what the user gave to a config that can be trusted: resolved, validated, audited, compared.

`resolve` fills the gaps with the defaults and refuses unknown keys and wrong types; `validate` refuses values that
cannot work; both run before any device is touched. `View` records which keys are read while training is set
up, and `audit` then refuses keys that were changed but that nothing read. `differences` tells how a workdir's
saved config and the current one would train differently.
"""

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from trainer import strategies
from trainer.config.keys import DURATION_UNITS, defaults, evaluator, reward, source, strategy
from trainer.config.precision import check_precision
from trainer.config.typed import did_you_mean
from trainer.config.values import check_ranges, invalid, invalid_name
from trainer.errors import ConfigError, one_of

_DICTS = (Mapping, ConfigDict)
# The most problems that one error lists.
SHOWN = 8

# ----------------------------------------------------------------------------------------------
# Resolving: defaults + what the user gave, or one error that lists everything wrong with it.


def resolve(given: Mapping | ConfigDict) -> ConfigDict:
  """The complete, locked config: every key of `defaults()`, with the given values.

  Args:
    given: a ConfigDict or dict, complete or partial.

  Raises:
    ConfigError: naming each unknown key (with the nearest known one) and each value of a wrong type.
  """
  problems: list[str] = []
  template = defaults()
  given = _without_invalid_keys(given, problems)
  options = given.get("strategy") or {}
  if not isinstance(options, _DICTS):
    raise ConfigError(f"config.strategy is {options!r:.80}; it must be a dict, e.g. strategy('dpo', beta=0.2) in the "
                      "config file, or --config.strategy.name=NAME.")
  name = options.get("name", "seq")
  template.strategy = strategy(name)
  if options:
    given = {**given, "strategy": {k: v for k, v in options.items() if not _is_stale(name, k, v)}}
  model = given.get("model")
  if isinstance(model, _DICTS) and "." in str(model.get("name", "")):
    # A model of the user's own may have keys of its own.
    template.model.update({k: v for k, v in model.items() if k not in template.model})
  resolved = _merge(template, given, "", problems)
  for path, make in (("input.sources", source), ("evals", evaluator), ("callbacks", None), ("loggers", None),
                     ("rollout.rewards", reward)):
    parent, _, leaf = path.rpartition(".")
    node = resolved[parent] if parent else resolved
    node[leaf] = _merge_named(make, _get(given, path) or {}, path, problems)
  for name, evaluation in resolved.evals.items():
    evaluation.sources = _merge_named(source, evaluation.sources, f"evals.{name}.sources", problems)
  if problems:
    more = [f"  … and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    raise ConfigError("the config has {}:\n{}".format(
        "1 problem" if len(problems) == 1 else f"{len(problems)} problems",
        "\n".join([*(f"  - {p}" for p in problems[:SHOWN]), *more])))
  return resolved.lock()


def _without_invalid_keys(given: Mapping | ConfigDict, problems: list[str], prefix: str = "") -> dict:
  """`given` as dicts, without keys that no config can have, which are added to the problems."""
  kept = {}
  for key, value in given.items():
    if not isinstance(key, str) or not key or "." in key or not key.isprintable():
      problems.append(f"config{f'.{prefix[:-1]}' if prefix else ''} has the key {key!r:.80}; keys are names, without "
                      "dots")
    else:
      kept[key] = _without_invalid_keys(value, problems, f"{prefix}{key}.") if isinstance(value, _DICTS) else value
  return kept


def _is_stale(name: str, key: str, value) -> bool:
  """Whether an option stems from the strategy that the config had before its `strategy.name` was changed: it is None
  where this strategy has a default, or not among its options and at the default of another strategy."""
  own = strategy(name)
  if key in own and (value is None or isinstance(value, _DICTS) == isinstance(own[key], _DICTS)):
    return value is None and own[key] is not None
  return any(key in other.all_options() and strategy(other_name).to_dict()[key] == value
             for other_name, other in strategies.STRATEGIES.items())


# Sections whose keys are names that the user chooses.
_NAMED = ("input.sources", "evals", "callbacks", "loggers", "rollout.rewards")
# Sections that replace their default as a whole; whoever reads them checks their keys.
_WHOLE = ("strategy.loss", "strategy.teachers")


def _merge(template: ConfigDict, given: Mapping | ConfigDict, prefix: str, problems: list[str]) -> ConfigDict:
  merged = ConfigDict(template.to_dict(preserve_field_references=True))
  for key, value in given.items():
    path = f"{prefix}{key}"
    if key not in template:
      problems.append(f"unknown key config.{path}{did_you_mean(key, list(template.keys()), prefix)}")
    elif path in _NAMED:
      continue
    elif path in _WHOLE and isinstance(value, _DICTS):
      merged[key] = ConfigDict(dict(value))
    elif isinstance(template[key], ConfigDict):
      if isinstance(value, _DICTS):
        merged[key] = _merge(template[key], value, path + ".", problems)
      else:
        problems.append(f"config.{path} is {value!r}; it must be a dict with keys {', '.join(template[key].keys())}")
    else:
      checked, problem = _check_type(template, key, value)
      if problem:
        kind = "" if value is None else f" ({type(value).__name__})"
        problems.append(f"config.{path} is {value!r}{kind}; it must be {problem}")
      else:
        merged[key] = checked
  _forget_replaced_durations(template, merged)
  return merged


def _forget_replaced_durations(template: ConfigDict, merged: ConfigDict) -> None:
  """A duration given in one unit replaces the default, which may be in another."""
  for key in template:
    prefix, _, unit = key.rpartition("_")
    if unit in DURATION_UNITS and template[key] is not None and merged[key] == template[key]:
      others = (f"{prefix}_{other}" for other in DURATION_UNITS if other != unit)
      if any(merged.get(other) is not None and merged[other] >= 0 for other in others):
        merged[key] = -1


def _merge_named(make, given: Mapping | ConfigDict, path: str, problems: list[str]) -> ConfigDict:
  named = ConfigDict()
  if not isinstance(given, _DICTS):
    problems.append(f"config.{path} is {given!r:.80}; it must be a dict of names")
    return named
  for name, value in given.items():
    if allowed := invalid_name(name):
      problems.append(f"config.{path} has the name {name!r:.80}; allowed: {allowed}")
    elif not isinstance(value, _DICTS):
      problems.append(f"config.{path}.{name} is {value!r}; it must be a dict with a `type`")
    elif make is None or "." in str(value.get("type", "")):
      # Code of the user's own, by dotted path: its constructor checks its arguments.
      named[name] = ConfigDict({**(make().to_dict() if make else {}), **value})
      if "type" not in value:
        names = "wandb, mlflow or " if path == "loggers" else ""
        problems.append(f"config.{path}.{name} has no `type` ({names}the dotted path of a class)")
    else:
      template = make()
      nested = {k: v for k, v in value.items() if k != "sources"}
      named[name] = _merge(template, nested, f"{path}.{name}.", problems)
      if "sources" in value and "sources" in template:
        if isinstance(value["sources"], _DICTS):
          named[name].sources = value["sources"]
        else:
          problems.append(f"config.{path}.{name}.sources is {value['sources']!r:.80}; it must be a dict of names")
  return named


def _check_type(template: ConfigDict, key: str, value):
  """Returns (the value in its declared type, None) or (None, what it must be)."""
  kind = template.get_type(key)
  optional = template[key] is None
  if must_be := invalid(value):
    return None, must_be
  if value is None and optional:
    return None, None
  if kind in (tuple, list) and isinstance(value, (tuple, list)):
    return _as_tuple(value), None
  if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
    return float(value), None
  if kind is int and isinstance(value, float) and value.is_integer():
    return int(value), None
  if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
    return value, None
  names = {int: "a whole number", float: "a number", str: "a string", bool: "True or False", tuple: "a tuple"}
  return None, names.get(kind, str(kind)) + (" or None" if optional else "")


def _as_tuple(value):
  return tuple(_as_tuple(v) if isinstance(v, (tuple, list)) else v for v in value)


def _get(tree: Any, path: str):
  """What stands at `path`; None where there is nothing, or no section on the way (another check reports that)."""
  for key in path.split("."):
    tree = tree.get(key) if isinstance(tree, _DICTS) else None
  return tree


# ----------------------------------------------------------------------------------------------
# Validating values, before any device work.


def validate(config: ConfigDict) -> None:
  """Refuses values that cannot work, whatever the machine. Raises ConfigError."""
  c = config
  check_ranges(c)
  for key in ("batch_size", "grad_accum_steps", "seq_len"):
    if c[key] < 1:
      raise ConfigError(f"{key} is {c[key]}; it must be at least 1.")
  if c.seq_len < 2:
    raise ConfigError("seq_len is 1: a row needs two tokens for one of them to be predicted. Use at least 2.")
  if c.batch_size % c.grad_accum_steps:
    more = c.batch_size + -c.batch_size % c.grad_accum_steps
    raise ConfigError(
        f"batch_size {c.batch_size} is not divisible by grad_accum_steps {c.grad_accum_steps}: every micro-batch "
        f"must have the same number of rows. Try --config.batch_size={more}.")
  if not c.input.sources:
    raise ConfigError("input.sources is empty: nothing to train on. In the config file: "
                      'config.input.sources.main = source(type="text", path="my_file.txt").')
  choices = {
      "tokenizer.type": ("auto", "bytes", "bpe", "hf"),
      "input.packing": ("auto", "concat", "best_fit", "none"),
      "input.over_long": ("auto", "split", "truncate_end", "truncate_start", "drop", "error"),
      "input.on_bad_row": ("error", "drop"),
      "input.share_prompts": ("auto", "always", "never"),
      "input.mixture_by": ("examples", "tokens"),
      "input.stop": ("first", "all", "never"),
      "optimizer.name": ("adamw", "adafactor", "muon", "lion", "sgd"),
      "schedule.name": ("constant", "linear", "cosine", "wsd", "sgdr", "rsqrt"),
      "plan.compile": ("auto", "always", "never"),
      "keep_best_mode": ("min", "max"),
  }
  for path, allowed in choices.items():
    one_of(path, _get(c, path), allowed)
  for name, value in c.evals.items():
    one_of(f"evals.{name}.on_error", value.on_error, ("stop", "warn"))
  for path, low, high in (("schedule.floor", 0.0, 1.0), ("optimizer.ema_decay", 0.0, 1.0), ("model.dropout", 0.0, 1.0),
                          ("input.max_over_long", 0.0, 1.0), ("input.max_bad_rows", 0.0, 1.0),
                          ("optimizer.learning_rate", 0.0, float("inf")), ("optimizer.clip_norm", 0.0, float("inf")),
                          ("keep_last", 1, float("inf")), ("input.prefetch", 1, float("inf")),
                          ("input.workers", 1, float("inf")), ("optimizer.max_nonfinite_steps", 1, float("inf"))):
    value = _get(c, path)
    if not low <= value <= high:
      raise ConfigError(f"{path} is {value}; it must be between {low} and {high}.")
  check_precision(c)


# ----------------------------------------------------------------------------------------------
# Auditing: a changed key that nothing reads would silently do nothing.


class View(Mapping):
  """A read-only view of a config that remembers which keys were read."""

  def __init__(self, node: ConfigDict, prefix: str = "", read: set[str] | None = None):
    object.__setattr__(self, "_node", node)
    object.__setattr__(self, "_prefix", prefix)
    object.__setattr__(self, "_read", set() if read is None else read)

  def __getitem__(self, key: str):
    value = self._node[key]
    path = f"{self._prefix}{key}"
    self._read.add(path)
    return View(value, path + ".", self._read) if isinstance(value, ConfigDict) else value

  def __getattr__(self, key: str):
    try:
      return self[key]
    except KeyError as e:
      raise AttributeError(f"config.{self._prefix}{key} does not exist") from e

  def __setattr__(self, key: str, value):
    raise AttributeError(f"config.{self._prefix}{key} is read-only once training is set up")

  def __iter__(self):
    return iter(self._node)

  def __len__(self):
    return len(self._node)

  def __contains__(self, key):
    return key in self._node

  def __repr__(self):
    return repr(self._node)

  def to_dict(self) -> dict:
    """All of it, as dicts; none of it counts as read."""
    return self._node.to_dict()


def audit(view: View) -> None:
  """Refuses keys that differ from their default and that nothing read during set-up. Raises ConfigError."""
  config = view._node
  default = baseline(config)
  # What --mode=plan is asked may stay in a config that is then trained.
  unread = [k for k, v in flatten(config).items() if as_given(k, v) != as_given(k, default.get(k))
            and k not in view._read and not k.startswith("plan.")]
  if unread:
    # A config file may have set them for what a flag has then turned off.
    known = [k for k in unread if k in default]
    unset = f" (by a flag: --config.{known[0]}={shlex.quote(str(default[known[0]]))})" if known else ""
    raise ConfigError(
        "these keys were changed, but nothing in this configuration uses them:\n"
        + "\n".join(f"  - config.{k} = {_get(config, k)!r}" for k in unread)
        + f"\nRemove them{unset}, or change what should use them (for instance optimizer.name or strategy.name).")


def baseline(config: Mapping) -> dict[str, object]:
  """`{"a.b": default}` of a resolved config's keys, those of its sources, evaluators and rewards included.

  Raises:
    ConfigError: its strategy is not known.
  """
  default = flatten(resolve({"strategy": {"name": config["strategy"]["name"]}}))
  for path, make in (("input.sources", source), ("evals", evaluator), ("rollout.rewards", reward)):
    for name in _get(config, path) or ():
      default.update({f"{path}.{name}.{k}": v for k, v in flatten(make()).items()})
      if path == "evals":
        for sub in config["evals"][name].get("sources") or ():
          default.update({f"evals.{name}.sources.{sub}.{k}": v for k, v in flatten(source()).items()})
  return default


def as_given(path: str, value):
  """The value, or None for a duration that is -1: both mean "not given"."""
  is_duration = path.rpartition("_")[2] in DURATION_UNITS
  return None if is_duration and isinstance(value, (int, float)) and value == -1 else value


# ----------------------------------------------------------------------------------------------
# Saving and comparing.


def flatten(config: Mapping, prefix: str = "") -> dict[str, object]:
  """`{"a.b": leaf}` in order."""
  flat = {}
  for key, value in config.items():
    if isinstance(value, _DICTS):
      flat.update(flatten(value, f"{prefix}{key}."))
    else:
      flat[prefix + key] = value
  return flat


def to_json(config: ConfigDict) -> str:
  """The resolved config as text; `json.loads` gives it back with lists for tuples."""
  return json.dumps(config.to_dict(), indent=2, default=list)


# Keys that change how a run is watched or where it runs, but not what it computes.
_FREE = re.compile(
    r"(mesh|processes|evals|callbacks|loggers|profile|init_from|export|plan)(\..*)?|(log|ckpt|keep)_.*|"
    r"(sharding|activation)_rules|remat|deterministic|precision\.offload_optimizer|report|resume|allow_config_changes|"
    r"health_silent|input\.(cache_dir|prefetch|workers|max_over_long|on_bad_row|max_bad_rows)|"
    r"model\.(scan_layers|attention|attention_block|vocab_chunk)|"
    r"rollout\.(batch_size|reward_workers|reward_timeout_seconds|environment_workers|max_without_lesson)")
# What optimizer.wd_mults named in earlier versions; what it names since then, no model had before.
_DECAY = [[[f".*(scale|bias|embedding{m})$", 0.0]] for m in ("", "|A_log", "|A_log|sinks", r"|A_log|sinks|xielu/\w+")]


def trains(path: str) -> bool:
  """Whether the key changes what is computed."""
  return not _FREE.fullmatch(path)


def differences(saved: Mapping, current: Mapping) -> list[str]:
  """Keys in which two configs would train differently, as `key: saved -> current` lines.

  A key that the saved one lacks, and that has its default, has come with a later version: no difference.
  """
  a = flatten(saved)
  b, default = (json.loads(json.dumps(flat, default=list)) for flat in (flatten(current), baseline(current)))
  missing = object()
  if b.get("tokenizer.type") in ("bytes", "bpe") and a.get("tokenizer.add_bos") is True:
    a["tokenizer.add_bos"] = None  # which version 0.1 wrote, and which is the same with a tokenizer that is made here
  if b.get(decays := "optimizer.wd_mults") == default.get(decays) and a.get(decays) in _DECAY:
    a[decays] = b[decays]
  return [
      f"{key}: {'(absent)' if a.get(key, missing) is missing else repr(a[key])} -> "
      f"{'(absent)' if b.get(key, missing) is missing else repr(b[key])}"
      for key in sorted(a.keys() | b.keys())
      if as_given(key, a.get(key, missing)) != as_given(key, b.get(key, missing)) and trains(key)
      and (key in a or b[key] != default.get(key, missing))
  ]
