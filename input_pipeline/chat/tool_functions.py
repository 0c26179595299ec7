"""Python functions that a model may call: their JSON schemas, made of signature and docstring.

    def add(a: int, b: int) -> int:
      '''Adds two numbers.

      Args:
        a: the first.
        b: the second.
      '''

The schemas are those of transformers' `get_json_schema`, so that a model is shown a tool as it was when it was made:
types from the hints, texts from a docstring in Google's style, `(choices: ["a", "b"])` behind an argument's text as an
enum.
"""

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, Union

from trainer.dotted import load_object
from trainer.errors import ConfigError

_NAMES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null", list: "array",
          tuple: "array", dict: "object"}
_SCALARS = (int, float, str, bool, type(None))
_SECTIONS = ("Args:", "Returns:", "Raises:")
_ARGUMENT = re.compile(r"([ \t]*)(\w+)(?:[ \t]*\([^()\n]*\))?:\s*(.*)")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def load_tools(paths: Sequence[str], key: str) -> dict[str, Callable]:
  """{name: function} of dotted paths; `key`: where the config says so, for messages.

  Raises:
    ConfigError: one cannot be imported, is no function, or two have the same name.
  """
  tools: dict[str, Callable] = {}
  for path in paths:
    function = load_object(path, key, "dotted paths of functions of yours")
    if not callable(function) or isinstance(function, type) or not hasattr(function, "__name__"):
      raise ConfigError(f"{key}: {path} is a {type(function).__name__}; a tool is a function.")
    if function.__name__ in tools:
      raise ConfigError(f"{key}: two functions have the name {function.__name__}, by which the model calls them.")
    tools[function.__name__] = function
  return tools


def schema_of(function: Callable) -> dict[str, Any]:
  """The function as a JSON schema, {"type": "function", "function": {…}}.

  Raises:
    ConfigError: an argument lacks a type or a text, or its type has no JSON.
  """
  name = function.__name__
  doc = (inspect.getdoc(function) or "").strip()
  if not doc:
    raise ConfigError(f"the tool {name} has no docstring, from which the model would learn what it does.")
  description, texts, returned = _parts(doc)
  hints, signature = typing.get_type_hints(function), inspect.signature(function)
  properties: dict[str, Any] = {}
  for argument, parameter in signature.parameters.items():
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
      raise ConfigError(f"the tool {name} has the argument {parameter}; a model gives arguments by their names.")
    if argument not in hints:
      raise ConfigError(f"the tool {name}: its argument {argument} has no type. Write {argument}: int, say.")
    if argument not in texts:
      raise ConfigError(f"the tool {name}: its docstring says nothing of the argument {argument}. It needs a line "
                        f'"{argument}: …" under "Args:".')
    schema, text = _type(hints[argument], f"the tool {name}: its argument {argument}"), texts[argument]
    if choices := _CHOICES.search(text):
      try:
        schema["enum"] = [c.strip() if isinstance(c, str) else c for c in json.loads(choices[1])]
      except json.JSONDecodeError as e:
        raise ConfigError(f"the tool {name}: the choices of its argument {argument} are no list of JSON ({e}).") from e
      text = text[:choices.start()].strip()
    properties[argument] = schema | {"description": text}
  parameters: dict[str, Any] = {"type": "object", "properties": properties}
  required = [argument for argument, p in signature.parameters.items() if p.default is inspect.Parameter.empty]
  parameters |= {"required": required} if required else {}
  made = {"name": name, "description": description, "parameters": parameters}
  if "return" in hints:
    try:
      made["return"] = _type(hints["return"], "") | ({} if returned is None else {"description": returned})
    except ConfigError:  # the model does not write it
      pass
  return {"type": "function", "function": made}


def _parts(doc: str) -> tuple[str, dict[str, str], str | None]:
  """(description, {argument: text}, text of what is returned) of a docstring."""
  parts: dict[str, list[str]] = {"": []}
  section = ""
  for line in doc.split("\n"):
    if line.strip() in _SECTIONS:
      section = line.strip()
      parts.setdefault(section, [])
    else:
      parts[section].append(line)
  texts: dict[str, list[str]] = {}
  base, name = "", None
  for line in filter(str.strip, parts.get("Args:", ())):
    found = _ARGUMENT.fullmatch(line)
    if found and (name is None or len(found[1]) <= len(base)):
      base, name = found[1], found[2]
      texts[name] = [found[3]]
    elif name is not None:
      texts[name].append(line)
  returned = "\n".join(parts["Returns:"]).strip() if "Returns:" in parts else None
  joined = {name: " ".join(part.strip() for part in lines).strip() for name, lines in texts.items()}
  return "\n".join(parts[""]).strip(), joined, returned


def _type(hint: Any, where: str) -> dict[str, Any]:
  """The JSON schema of a type."""
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if hint is Any:
    return {}
  if origin is None and isinstance(hint, type) and issubclass(hint, enum.Enum):
    return _enum([member.value for member in hint], where)
  if origin is None and hint in _NAMES:
    return {"type": _NAMES[hint]}
  if origin in (Union, types.UnionType):
    return _union(args, where)
  if origin is Literal:
    return _enum(list(args), where)
  if origin is list:
    return {"type": "array", "items": _type(args[0], where)}
  if origin is tuple and len(args) > 1 and ... not in args:
    return {"type": "array", "prefixItems": [_type(arg, where) for arg in args]}
  if origin is dict:
    return {"type": "object", "additionalProperties": _type(args[1], where)}
  shown = getattr(hint, "__name__", str(hint)) if origin is None else str(hint)
  raise ConfigError(f"{where} has the type {shown}; allowed are int, float, str, bool, None, Any, enums, Literal, and "
                    "lists, dicts, unions and tuples (of several, known types) of these.")


def _union(args: tuple[Any, ...], where: str) -> dict[str, Any]:
  kinds = [_type(arg, where) for arg in args if arg is not type(None)]
  if len(kinds) == 1:
    found = kinds[0]
  elif all(kind.keys() == {"type"} and isinstance(kind["type"], str) for kind in kinds):
    names = sorted({kind["type"] for kind in kinds})
    found = {"type": names[0] if len(names) == 1 else names}
  else:
    found = {"anyOf": kinds}
  return found | ({"nullable": True} if type(None) in args else {})


def _enum(values: list, where: str) -> dict[str, Any]:
  if not values or any(type(value) not in _SCALARS for value in values):
    raise ConfigError(f"{where} is one of {values}; allowed are numbers, strings, booleans and None.")
  kinds = list(dict.fromkeys(_NAMES[type(value)] for value in values))
  return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}
