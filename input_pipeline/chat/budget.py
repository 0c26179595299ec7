"""What a chat template may use up: a budget of steps and characters, and the payments put into its program.

Each pass of a loop and each call costs the size of its body, operators, filters and methods the size of what they
handle. The budget is counted, not timed, so that it is the same on every machine; processor time is a second line of
defence.
"""

import re
import time
from collections import abc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jinja2 import Undefined, nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError, TemplateAssertionError, TemplateError
from jinja2.visitor import NodeTransformer

# What data are made of, and the views of a dict: their text depends on them alone.
PLAIN = (str, int, float, bool, type(None), list, tuple, dict, range, Undefined,
         abc.ItemsView, abc.KeysView, abc.ValuesView)


# What takes about as long as running so many nodes.
PASS_COST, OPERATION_COST, CALL_COST = 10, 16, 100


@dataclass(frozen=True)
class Limits:
  """What one rendering may use; a conversation of a million tokens needs a fraction of it."""

  # Nodes of the template that are run, with more for each pass, call and operation.
  steps: int = 20_000_000
  # Characters of the output, and of any string made on the way.
  characters: int = 1 << 22
  # Characters of all strings made on the way; an element of a list counts as 16.
  altogether: int = 1 << 29
  # Elements of a list, levels of calls.
  elements: int = 1 << 18
  depth: int = 64
  # Processor time.
  seconds: float = 1.0


class LimitError(TemplateError):
  """A template that wants more than its `Limits`."""


class RefusalError(TemplateError):
  """A template that called raise_exception."""


class Meter:
  """What is left of one rendering's budget."""

  def __init__(self, limits: Limits):
    self.limits, self.steps, self.altogether, self.depth = limits, limits.steps, limits.altogether, 0
    self._deadline, self._check_at = time.thread_time() + limits.seconds, limits.steps

  def tick(self, cost: int) -> bool:
    """Pays for `cost` steps."""
    self.steps -= cost
    if self.steps < self._check_at:
      self._check_at = self.steps - 1000
      if self.steps < 0:
        raise LimitError(f"it takes more than {self.limits.steps:,} steps")
      if time.thread_time() > self._deadline:
        raise LimitError(f"it takes more than {self.limits.seconds:g} s of processor time")
    return True

  def grow(self, characters: int, elements: int = 0) -> None:
    """Pays for a string or a list, if possible before it is made."""
    if characters > self.limits.characters:
      raise LimitError(f"it makes a text of more than {self.limits.characters:,} characters")
    if elements > self.limits.elements:
      raise LimitError(f"it makes a list of more than {self.limits.elements:,} elements")
    self.altogether -= characters + 16 * elements
    if self.altogether < 0:
      raise LimitError(f"the texts it makes have more than {self.limits.altogether:,} characters altogether")
    self.tick(OPERATION_COST + (characters >> 9) + elements)

  def shallow(self, value: Any) -> Any:
    """Pays for `value` without looking into it."""
    if isinstance(value, str):
      self.grow(len(value))
    elif isinstance(value, (list, tuple, dict)):
      self.grow(0, len(value))
    elif isinstance(value, int) and value.bit_length() > 8192:
      raise LimitError("it makes a number of more than 8192 bits")
    return value

  def deep(self, value: Any) -> None:
    """Pays for all that is in `value`, once for each time it would be printed or compared."""
    left = [value]
    while left:
      item = left.pop()
      self.tick(OPERATION_COST)
      self.shallow(item)
      if isinstance(item, dict):
        left += [*item, *item.values()]
      elif isinstance(item, (list, tuple, abc.ItemsView, abc.KeysView, abc.ValuesView)):
        left += item
      elif not isinstance(item, PLAIN) and not (item is value and isinstance(item, Iterator)):
        raise SecurityError(f"a {type(item).__name__} cannot be printed, compared or sorted")

  def generator(self, values: Iterable) -> Iterator:
    """Pays for each element when it is taken."""
    for value in values:
      self.tick(PASS_COST)
      yield value


class Budgeted(NodeTransformer):
  """Puts payments into a parsed template. Their filters' names cannot be written in one."""

  def _pay(self, name: str, node: nodes.Expr, like: nodes.Node) -> Any:
    return nodes.Filter(node, name, [], [], None, None).set_lineno(like.lineno)

  def _body(self, node: Any) -> nodes.Node:
    cost = nodes.Const(PASS_COST + sum(1 for _ in node.find_all(nodes.Node)))
    node = self.generic_visit(node)
    node.body.insert(0, nodes.ExprStmt(self._pay("!tick", cost, node)).set_lineno(node.lineno))
    if isinstance(node, nodes.For) and node.test is not None:
      node.test = nodes.And(self._pay("!tick", cost, node), node.test).set_lineno(node.lineno)
    return node

  visit_For = visit_Macro = visit_CallBlock = visit_Block = _body

  def visit_Concat(self, node: Any) -> nodes.Expr:
    node = self.generic_visit(node)
    return self._pay("!concat", nodes.List(node.nodes).set_lineno(node.lineno), node)

  def visit_Compare(self, node: Any) -> nodes.Expr:
    node = self.generic_visit(node)
    for side, key in ((node, "expr"), *((operand, "expr") for operand in node.ops)):
      if not isinstance(getattr(side, key), nodes.Const):
        setattr(side, key, self._pay("!compared", getattr(side, key), node))
    return node

  def visit_Getitem(self, node: Any) -> nodes.Expr:
    node = self.generic_visit(node)
    if isinstance(node.arg, nodes.Slice):
      node.node = self._pay("!shallow", node.node, node)
    return node

  def _refuse(self, node: nodes.Node) -> nodes.Node:
    tag = re.sub(r"(?<!^)(?=[A-Z])", " ", type(node).__name__).lower()
    raise TemplateAssertionError(f"'{tag}' is not allowed in a chat template", node.lineno)

  visit_Include = visit_Import = visit_FromImport = visit_Extends = _refuse
  visit_ScopedEvalContextModifier = visit_EvalContextModifier = _refuse


class BudgetedGenerator(CodeGenerator):
  """jinja2's compiler, of the template with its payments."""

  def visit_Template(self, node: nodes.Template, frame=None) -> None:
    super().visit_Template(Budgeted().visit(node).set_environment(self.environment), frame)
