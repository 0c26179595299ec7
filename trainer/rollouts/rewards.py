"""Reward functions: those built in, and how a config's section becomes a call (docs/rewards.md).

    config.rollout.rewards.right = reward(type="numeric")
    config.rollout.rewards.mine = reward(type="my_project.rewards.polite", weight=0.5, word="please")

A reward function scores the completions of one prompt. Its signature is that of TRL's GRPOTrainer:
`f(prompts, completions, completion_ids, **columns) -> list[float | None]`, all lists with one entry a completion.
Prompts and completions are strings, or lists of messages where the data are conversations; columns are the records'
other fields. None abstains. Options of the section arrive as keyword arguments too.

Free of JAX, since the processes that score import this file.
"""

import difflib
import importlib
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from ml_collections import ConfigDict

from input_pipeline.examples.answers import compile_pattern, extract, last_number, normalize
from trainer.config.sections import reward
from trainer.errors import ConfigError, DataError

Text = str | list[dict[str, Any]]

# ----------------------------------------------------------------------------------------------
# Built in. Keyword-only arguments are the options of `reward()`.


def exact_match(prompts, completions, completion_ids, *, answer_key, pattern=None, **columns) -> list[float | None]:
  """1 where the text, normalised, equals the answer, else 0; with `pattern`, what it extracts from both is compared.

  An answer in which the pattern has no match is compared as it stands. Abstains where the answer is None.

  Raises:
    DataError: no such column, or an answer that is neither a string nor a number.
  """
  compiled, scores = None if pattern is None else re.compile(pattern), []
  for completion, answer in zip(completions, _answers(columns, answer_key), strict=True):
    if answer is not None:
      extracted, found = extract(answer, compiled), extract(text_of(completion), compiled)
      answer = normalize(answer) if extracted is None else extracted
    scores.append(None if answer is None else float(found == answer))
  return scores


def numeric(prompts, completions, completion_ids, *, answer_key, pattern=None, **columns) -> list[float | None]:
  """1 where the last number of the text (with `pattern`: of what that extracts) equals the answer's, else 0.

  The answer's number is the last one after its "####", or without that mark the last one (GSM8K, arXiv 2110.14168).
  Separators between thousands, currency, percent signs and final points do not count: "$1,250.50." is 1250.5. A text
  without a number scores 0; an answer without one abstains.

  Raises:
    DataError: as `exact_match`.
  """
  compiled, scores = None if pattern is None else re.compile(pattern), []
  for completion, answer in zip(completions, _answers(columns, answer_key), strict=True):
    wanted = None if answer is None else last_number(answer.rpartition("####")[2])
    text = text_of(completion) if compiled is None else extract(text_of(completion), compiled) or ""
    scores.append(None if wanted is None else float(last_number(text) == wanted))
  return scores


def regex(prompts, completions, completion_ids, *, pattern, **columns) -> list[float]:
  """1 where `pattern` is found in the text, else 0."""
  return [float(re.search(pattern, text_of(completion)) is not None) for completion in completions]


def format_match(prompts, completions, completion_ids, *, pattern, **columns) -> list[float]:
  """1 where all of the text matches `pattern`, in which a point matches a line's end too, else 0."""
  return [float(re.fullmatch(pattern, text_of(completion), re.DOTALL) is not None) for completion in completions]


def length(prompts, completions, completion_ids, *, min_length=0, max_length=None, cache_length=0, **columns
           ) -> list[float]:
  """0 for lengths, in tokens, that are right; it falls linearly to -1 where they are too long or too short.

  Too long: from max_length - cache_length to max_length, and it stays at -1 (DAPO, arXiv 2503.14476, eq. 13).
  Too short: from min_length down to 0.
  """
  scores = []
  for n in map(len, completion_ids):
    score = min(n / min_length - 1.0, 0.0) if min_length else 0.0
    if max_length and n > max_length - cache_length:
      score = -1.0 if n >= max_length else (max_length - cache_length - n) / cache_length
    scores.append(score)
  return scores


def repetition(prompts, completions, completion_ids, *, ngram=3, max_penalty=1.0, **columns) -> list[float]:
  """-max_penalty times the share of a completion's n-grams of tokens that occurred before in it; 0 if it has none."""
  scores = []
  for ids in completion_ids:
    ngrams = [tuple(ids[i:i + ngram]) for i in range(len(ids) - ngram + 1)]
    scores.append(max_penalty * (len(set(ngrams)) / len(ngrams) - 1.0) if ngrams else 0.0)
  return scores


def model(prompts, completions, completion_ids, *, path, **columns) -> list[float | None]:
  """The score of a reward model, a folder or a run, which trainer/rollouts/reward_models.py computes on the mesh."""
  raise RuntimeError("a reward of type 'model' is not computed in a process for rewards")


MODEL = "model"
BUILT_IN: dict[str, Callable] = {
    "exact_match": exact_match, "regex": regex, "numeric": numeric, "length": length, "format": format_match,
    "repetition": repetition, MODEL: model}


def text_of(completion: Text) -> str:
  """A completion's text: itself, or what the assistant says in its last message ("" if it has none)."""
  if isinstance(completion, str):
    return completion
  said = [message.get("content") for message in completion if message.get("role") == "assistant"]
  content = (said[-1] if said else None) or ""
  return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _answers(columns: Mapping[str, Sequence], key: str) -> list[str | None]:
  if key not in columns:
    raise missing(key, columns)
  for value in columns[key]:
    if isinstance(value, bool) or not isinstance(value, (str, int, float, Decimal, type(None))):
      raise DataError(f"column {key!r} has a {type(value).__name__} where an answer must be text, a number or null.")
  return [None if value is None else str(value) for value in columns[key]]


def missing(key: str, columns: Mapping[str, Any], where: str = "the records") -> DataError:
  """The error of a column that is not there."""
  return DataError(f"{where}: no column {key!r}; found {', '.join(map(repr, columns)) or 'none'}. Add it to the data, "
                   "or name another one (answer_key, of a reward that is built in).")


# ----------------------------------------------------------------------------------------------
# From a section of the config to a function and its arguments.

_GIVEN = ("prompts", "completions", "completion_ids")


@dataclass(frozen=True)
class Reward:
  """A reward function with its options bound.

  Attributes:
    name, kind: the section's name, and its `type`.
    weight: of its scores in the sum.
    function: what is called, by keywords.
    options: those of the section that it is given.
    takes: names of arguments that it is given if there are such; None: all.
    needs: columns that it cannot do without.
    is_async: whether it is to be awaited.
  """

  name: str
  kind: str
  weight: float
  function: Callable
  options: dict[str, Any]
  takes: frozenset[str] | None
  needs: tuple[str, ...]
  is_async: bool

  def check_columns(self, columns: Mapping[str, Any], where: str) -> None:
    """Refuses a record, at `where`, that lacks a column or has one whose name is taken. Raises DataError, naming the
    record, the column and what to do."""
    for key in self.needs:
      if key not in columns:
        raise missing(key, columns, f"{where}: rollout.rewards.{self.name} ({self.kind})")
    for key in columns:
      if key in _GIVEN and self.kind not in BUILT_IN:
        raise DataError(f"{where}: column {key!r} has the name of an argument that reward functions get otherwise. "
                        "Rename the column.")
      if key in self.options and self.kind not in BUILT_IN:
        raise DataError(f"{where}: column {key!r} has the name of an option of rollout.rewards.{self.name}. Rename one "
                        "of them.")

  def arguments(self, prompt: Text, completions: list[Text], completion_ids: list[list[int]],
                columns: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of the call for the completions of one prompt, of which `columns` has one value each."""
    n = len(completions)
    given = dict(prompts=[prompt] * n, completions=completions, completion_ids=completion_ids)
    given = {**{key: [value] * n for key, value in columns.items()}, **given}
    return {**{key: value for key, value in given.items() if self.takes is None or key in self.takes}, **self.options}


def make(name: str, cfg: Any) -> Reward:
  """The reward function that the section `rollout.rewards.<name>` describes.

  Raises:
    ConfigError: an unknown type, a value that is not allowed, an option without effect.
  """
  key, defaults = f"rollout.rewards.{name}", plain(reward())
  given = {**defaults, **plain(cfg)}
  kind, weight = given.pop("type"), given.pop("weight")
  if not _is_number(weight):
    raise ConfigError(f"{key}.weight: found {weight!r}, allowed: finite numbers.")
  function = load(kind, f"{key}.type")
  parameters = _parameters(function, key, kind)
  named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
  takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
  # An option that a function of the user's does not name is not for it; nor is one that was left as it is.
  changed = {k: v for k, v in given.items() if k not in defaults or v != defaults[k]}
  for option in changed:
    if option in _GIVEN:
      raise ConfigError(f"{key}.{option} has the name of an argument that reward functions get otherwise. Rename it.")
    if option not in named and (option in defaults or not takes_all or kind in BUILT_IN):
      raise ConfigError(f"{key}.{option}={given[option]!r} is without effect: {kind} has the options "
                        f"{', '.join(sorted(named - set(_GIVEN))) or '(none)'}. Remove it.")
  if kind in BUILT_IN:
    options = {k: given[k] for k in given if k in named}
    _check_options(key, kind, options)
    needs: tuple[str, ...] = (options["answer_key"],) if "answer_key" in options else ()
    takes: frozenset[str] | None = frozenset((*_GIVEN, *needs))
  else:
    options = changed
    needs = tuple(p.name for p in parameters if p.name in named and p.default is p.empty
                  and p.name not in _GIVEN and p.name not in options)
    takes = None if takes_all else frozenset(named)
  is_async = any(inspect.iscoroutinefunction(f) for f in (function, getattr(function, "__call__", None)))  # noqa: B004
  return Reward(name, kind, float(weight), function, options, takes, needs, is_async)


def load(kind: str, key: str) -> Callable:
  """The function that `kind` names: built in, or by its dotted path.

  Raises:
    ConfigError: if there is none; `key` is where the config says so.
  """
  if kind in BUILT_IN:
    return BUILT_IN[kind]
  allowed = f"Allowed: {', '.join(BUILT_IN)}, or the dotted path of a function of yours, importable from where you run."
  module, _, attribute = str(kind).rpartition(".")
  if not module:
    near = difflib.get_close_matches(str(kind), BUILT_IN, n=1, cutoff=0.5)
    raise ConfigError(f"{key}: found {kind!r}" + (f"; did you mean {near[0]!r}? " if near else ". ") + allowed)
  try:
    function = getattr(importlib.import_module(module), attribute)
  except Exception as e:  # importing runs code of the user's, which may raise anything
    raise ConfigError(f"{key}: found {kind!r}, which could not be imported ({type(e).__name__}: {e}). {allowed}") from e
  if inspect.isclass(function) or not callable(function):
    what = "a class" if inspect.isclass(function) else f"of type {type(function).__name__}"
    raise ConfigError(f"{key}: {kind!r} is {what}, not a function. {allowed}")
  return function


def plain(cfg: Any) -> dict[str, Any]:
  """A section of the config as a dict of Python's own types, for functions and for other processes."""
  return {key: plain(cfg[key]) if isinstance(cfg[key], (Mapping, ConfigDict)) else cfg[key] for key in cfg}


def _parameters(function: Callable, key: str, kind: str) -> list[inspect.Parameter]:
  try:
    parameters = list(inspect.signature(function).parameters.values())
  except (TypeError, ValueError):  # written in C without one
    return [inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)]
  nameless = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
  if nameless:
    raise ConfigError(f"{key}.type: {kind} takes {', '.join(nameless)} by position only, but is called by keywords. "
                      "Remove the `/` from its definition.")
  return parameters


def _check_options(key: str, kind: str, options: dict[str, Any]) -> None:
  """Refuses values that a built-in function cannot use."""
  if "pattern" in options:
    if options["pattern"] is None and kind in ("regex", "format"):
      raise ConfigError(f"{key}: type {kind!r} needs a pattern. Set {key}.pattern to a regex.")
    compile_pattern(options["pattern"], f"{key}.pattern")
  if "path" in options and not options["path"]:
    raise ConfigError(f"{key}: type {kind!r} needs a path. Set {key}.path to a run of strategy reward, or to a Hugging "
                      "Face folder of a model that scores.")
  if options.get("answer_key") in (*_GIVEN, *options, ""):
    raise ConfigError(f"{key}.answer_key: found {options['answer_key']!r}, which no column can be called that a reward "
                      "reads. Rename the column.")
  for option, least in (("min_length", 0), ("cache_length", 0), ("ngram", 1), ("max_length", 1)):
    value = options.get(option)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
      raise ConfigError(f"{key}.{option}: found {value!r}, allowed: whole numbers from {least}.")
  if kind == "repetition" and not (_is_number(options["max_penalty"]) and options["max_penalty"] > 0):
    raise ConfigError(f"{key}.max_penalty: found {options['max_penalty']!r}, allowed: finite numbers above 0.")
  if kind == "length":
    low, high, cache = (options[k] for k in ("min_length", "max_length", "cache_length"))
    if not low and high is None:
      raise ConfigError(f"{key}: type 'length' needs min_length or max_length, in tokens.")
    if cache and high is None or high is not None and low > high - cache:
      raise ConfigError(f"{key}: found min_length={low}, max_length={high}, cache_length={cache}; allowed: min_length "
                        "up to max_length - cache_length.")


def _is_number(value: Any) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
