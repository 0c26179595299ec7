"""Schemas of Python functions are those that transformers makes of them; and what cannot have one is refused."""

import json
from typing import Literal

import pytest

from input_pipeline.chat import tool_functions
from tests.input_pipeline.references import example_tools
from tests.tiny import ROOT
from trainer.errors import ConfigError

HERE = "tests.input_pipeline.references.example_tools"
SCHEMAS = json.loads((ROOT / "tests" / "input_pipeline" / "references" / "tool_schemas.json").read_text())


@pytest.mark.parametrize("function", example_tools.ALL, ids=lambda function: function.__name__)
def test_a_schema_is_that_of_transformers(function):
  assert tool_functions.schema_of(function) == SCHEMAS[function.__name__]


def _untyped(a):
  """Text.

  Args:
    a: text.
  """


def _silent(a: int):
  """Text."""


def _odd(a: object):
  """Text.

  Args:
    a: text.
  """


def _choices(a: int):
  """Text.

  Args:
    a: text (choices: [1, 2)
  """


def _bytes(a: Literal[b"x"]):
  """Text.

  Args:
    a: text.
  """


def _any(*a: int):
  """Text."""


def _bare(a: int):
  pass


@pytest.mark.parametrize("function, message", [
    (_untyped, "its argument a has no type"), (_silent, "says nothing of the argument a"),
    (_odd, "its argument a has the type object; allowed are int"), (_any, "gives arguments by their names"),
    (_bare, "has no docstring"), (_choices, "the choices of its argument a are no list of JSON"),
    (_bytes, r"its argument a is one of \[b'x'\]; allowed are numbers, strings"),
])
def test_what_a_model_cannot_be_shown(function, message):
  with pytest.raises(ConfigError, match=message):
    tool_functions.schema_of(function)


def test_tools_are_found_by_their_paths():
  assert tool_functions.load_tools((f"{HERE}.add", f"{HERE}.later"), "rollout.tools") == {
      "add": example_tools.add, "later": example_tools.later}
  for paths, message in (((f"{HERE}.add", f"{HERE}.add"), "two functions have the name add"),
                         ((f"{HERE}.Unit",), "a tool is a function"), ((f"{HERE}.none",), "could not be imported")):
    with pytest.raises(ConfigError, match=message):
      tool_functions.load_tools(paths, "rollout.tools")


def test_two_tools_of_one_name_are_refused():
  assert tool_functions.load_tools(["json.dumps"], "rollout.tools") == {"dumps": json.dumps}
  with pytest.raises(ConfigError, match="rollout.tools: two functions have the name dumps, by which the model calls"):
    tool_functions.load_tools(["json.dumps", "pickle.dumps"], "rollout.tools")
