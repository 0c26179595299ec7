"""A jinja2 environment for chat templates, which come from strangers: what one may reach, and how much it may do.

jinja2's immutable sandbox keeps a template from changing its data and from most of Python. Here in addition:
- attributes and calls are those of a list, not all that are not forbidden;
- filters are those that templates use, without the random ones and without those that take quadratic time;
- nothing is computed at compile time, and everything that grows or takes time is paid for from a budget
  (`budget.py`), if possible before it is made.

Within its limits a template renders as in transformers.
"""

import functools
import json
import re
import types
from collections.abc import Callable, Iterable
from datetime import date
from typing import Any

from jinja2 import Undefined, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import BlockReference, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Joiner, Namespace

from input_pipeline.chat.budget import CALL_COST, PLAIN, BudgetedGenerator, LimitError, Limits, Meter, RefusalError

_STR = frozenset(
    "capitalize casefold center count endswith expandtabs find format format_map index isalnum isalpha isascii "
    "isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip "
    "partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines "
    "startswith strip swapcase title upper zfill".split())
_LOOP = frozenset(
    "index index0 revindex revindex0 first last length depth depth0 previtem nextitem cycle changed".split())
_ATTRIBUTES: tuple[tuple[type, frozenset[str]], ...] = (
    (str, _STR),
    (dict, frozenset(("get", "items", "keys", "values", "copy"))),
    (tuple, frozenset(("count", "index", "grouper", "list"))),
    (list, frozenset(("count", "index", "copy"))),
    (LoopContext, _LOOP),
    (Macro, frozenset(("name", "arguments", "catch_kwargs", "catch_varargs", "caller"))),
    (Cycler, frozenset(("next", "reset", "current"))),
)
_FILTERS = frozenset(
    "abs attr batch capitalize center count d default dictsort e escape first float forceescape format groupby indent "
    "int items join last length list lower map max min reject rejectattr replace reverse round safe select selectattr "
    "slice sort string title trim truncate unique upper wordcount".split())
# These neither print nor compare what they are given.
_SHALLOW = frozenset(
    "attr count d default first items last length list map reject rejectattr reverse safe select selectattr".split())
# These print it.
_PRINTING = frozenset("capitalize e escape forceescape indent lower string title trim truncate upper wordcount".split())
_SHALLOW_TESTS = frozenset(
    "boolean callable defined divisibleby even false filter float integer iterable mapping none number odd sequence "
    "string test true undefined".split())
# A number in a format, where it is a width; and what strftime may be asked, which is the same everywhere.
_NUMBER, _STRFTIME = re.compile(r"\d+|\*"), re.compile(r"(?:%-?[aAbBdHIjmMpSUuwWyYeGV%]|[^%])*")


class SafeNamespace(Namespace):
  """jinja2's namespace, without names that mean something to Python."""

  def __init__(*args, **kwargs):
    self, args = args[0], args[1:]
    attributes = dict(*args, **kwargs)
    for name in attributes:
      SafeNamespace._check(name)
    Namespace.__init__(self, attributes)

  def __setitem__(self, name, value):
    SafeNamespace._check(name)
    Namespace.__setitem__(self, name, value)

  @staticmethod
  def _check(name) -> None:
    if not isinstance(name, str) or name.startswith("_"):
      raise SecurityError(f"a namespace cannot have the attribute {name!r}")


class GenerationTag(Extension):
  """{% generation %}…{% endgeneration %}: renders its body and notes where."""

  tags = {"generation"}

  def parse(self, parser) -> nodes.CallBlock:
    line = next(parser.stream).lineno
    body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    return nodes.CallBlock(self.call_method("note"), [], [], body).set_lineno(line)

  def note(self, caller: Callable[[], str]) -> str:
    text = caller()
    self.environment.generated.append((self.environment.position, text))
    return text


class _Format:
  """A string's format or format_map method, sandboxed and paid for."""

  def __init__(self, environment: "Sandbox", text: str, is_map: bool):
    self._environment, self._text, self._is_map = environment, text, is_map

  def __call__(self, *args, **kwargs):
    if self._is_map:
      args, kwargs = (), args[0]
    return type(self._text)(_Formatter(self._environment).vformat(self._text, args, kwargs))


class _Formatter(SandboxedFormatter):
  def format_field(self, value, format_spec):
    meter = self._env.meter
    meter.grow(self._env.width(format_spec))
    text = super().format_field(self._env.text(value), format_spec)
    # All fields' texts are held until the last one is done.
    self._total = getattr(self, "_total", 0) + len(text)
    meter.grow(self._total)
    return text

  def convert_field(self, value, conversion):
    return super().convert_field(self._env.text(value), conversion)


class Sandbox(ImmutableSandboxedEnvironment):
  """The environment. One rendering at a time: `start` it, then run the template's root function.

  Args:
    limits: for each rendering.
  """

  code_generator_class = BudgetedGenerator
  intercepted_binops = frozenset(("+", "*", "**", "%"))

  def __init__(self, limits: Limits = Limits()):  # noqa: B008 (it is frozen)
    super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols], optimized=False,
                     finalize=pass_context(lambda context, value: self.text(value)))
    self.limits = limits
    self.start(None)
    original = self.filters
    self.filters = {name: self._paid(name, original[name]) for name in _FILTERS}
    for name, own in {"tojson": self._tojson, "join": self._join, "sum": self._sum, "format": self._percent,
                      "center": lambda value, width=80: self._method(self._str(value), "center", (width,)),
                      "replace": self._replace}.items():
      self.filters[name] = self._paid(name, own)
    self.filters |= {"!tick": lambda cost: self.meter.tick(cost), "!compared": self._compared,
                     "!concat": self._concat, "!shallow": self._shallow}
    self.tests = {name: test if name in _SHALLOW_TESTS else self._paid(name, test, self._compared)
                  for name, test in self.tests.items()}
    self.globals = {
        "range": self.globals["range"], "cycler": Cycler, "joiner": Joiner, "namespace": SafeNamespace,
        "dict": self._dict, "raise_exception": self._raise_exception, "strftime_now": self._strftime_now}
    self._callables = tuple(self.globals.values())

  def start(self, today: date | None) -> None:
    """Begins a rendering with a full budget, on that day."""
    self.meter, self.today = Meter(self.limits), today
    # Characters that have left the template, and (position, text) of its generation blocks.
    self.position = 0
    self.generated: list = []

  def text(self, value: Any) -> Any:
    """`value`, paid for, if its text is one that depends on it alone."""
    if type(value) is not str:
      if not isinstance(value, PLAIN):
        raise SecurityError(f"a {type(value).__name__} cannot be printed")
      self.meter.deep(value)
    else:
      self.meter.grow(len(value))
    return value

  def _str(self, value: Any) -> str:
    return str(self.text(value))

  def concat(self, pieces: Iterable[str]) -> str:
    """The text of a macro, a block or a `set` block."""
    kept, total = [], 0
    for piece in pieces:
      kept.append(piece)
      total += len(piece)
      if total > self.limits.characters:
        break
    self.meter.grow(total, min(len(kept) >> 4, self.limits.elements))
    return "".join(kept)

  # What may be reached.

  def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
    if not super().is_safe_attribute(obj, attr, value):
      return False
    if isinstance(obj, Namespace):
      return True
    return any(isinstance(obj, kind) and attr in names for kind, names in _ATTRIBUTES)

  def unsafe_undefined(self, obj: Any, attribute: str):
    raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} object is not allowed")

  def wrap_str_format(self, value: Any):
    owner = getattr(value, "__self__", None) if isinstance(value, (types.MethodType, types.BuiltinMethodType)) else None
    if isinstance(owner, str) and value.__name__ in ("format", "format_map"):
      return _Format(self, owner, value.__name__ == "format_map")
    return None

  def call(__self, __context, __obj, *args, **kwargs):  # noqa: B902 (keyword arguments of templates may be named self)
    meter = __self.meter
    owner = getattr(__obj, "__self__", None) if isinstance(__obj, (types.MethodType, types.BuiltinMethodType)) else None
    if isinstance(owner, str):
      for name in ("_loop_vars", "_block_vars"):  # the compiler's own
        kwargs.pop(name, None)
      return __self._method(owner, __obj.__name__, args, kwargs)
    if not (isinstance(__obj, (Macro, LoopContext, BlockReference, Undefined, _Format, Joiner))
            or isinstance(owner, (dict, list, tuple, LoopContext, Cycler, GenerationTag))
            or any(__obj is known for known in __self._callables)):
      raise SecurityError(f"a {type(__obj).__name__} cannot be called")
    pay = __self._compared if isinstance(owner, (list, tuple)) else meter.shallow
    for value in (owner, *args, *kwargs.values()):
      pay(value)
    meter.tick(CALL_COST)
    meter.depth += 1
    if meter.depth > meter.limits.depth:
      raise LimitError(f"its calls are nested more than {meter.limits.depth} deep")
    result = super().call(__context, __obj, *args, **kwargs)
    meter.depth -= 1
    return meter.shallow(result)

  # What is paid for.

  def _paid(self, name: str, func: Callable, pay: Callable | None = None) -> Callable:
    """A filter or test that pays for its arguments, by default as its name says, and for its result."""
    skipped = 1 if hasattr(func, "jinja_pass_arg") else 0
    pay = pay or (self._shallow if name in _SHALLOW else self.text if name in _PRINTING else self._deep)

    @functools.wraps(func)
    def paid(*args, **kwargs):
      meter = self.meter
      for value in (*args[skipped:], *kwargs.values()):
        pay(value)
      self._check_arguments(name, args[skipped:], kwargs)
      result = func(*args, **kwargs)
      if isinstance(result, types.GeneratorType):
        return meter.generator(result)
      return meter.shallow(result)

    return paid

  def _check_arguments(self, name: str, args: tuple, kwargs: dict) -> None:
    """Refuses numbers with which a filter would make something far larger than what it was given."""
    numbers = [v for v in (*args[1:], *kwargs.values()) if isinstance(v, int)]
    if name in ("batch", "slice"):
      self.meter.grow(0, max(numbers, default=0))
    elif name == "round" and any(abs(n) > 300 for n in numbers):
      raise LimitError("'round' has a precision beyond 300")
    elif name == "indent":
      lines = self._str(args[0]).count("\n") + 1
      widths = [len(v) for v in (*args[1:], *kwargs.values()) if isinstance(v, str)]
      self.meter.grow(lines * max(numbers + widths, default=4))

  def _shallow(self, value: Any) -> Any:
    return self.meter.shallow(value)

  def _deep(self, value: Any) -> None:
    self.meter.deep(value)

  def _compared(self, value: Any) -> Any:
    if type(value) is str:
      self.meter.grow(len(value))
    elif isinstance(value, PLAIN):  # others are compared by identity
      self.meter.deep(value)
    return value

  def _concat(self, values: list) -> str:
    texts = [self._str(value) for value in values]
    self.meter.grow(sum(map(len, texts)))
    return "".join(texts)

  def call_binop(self, context, operator: str, left: Any, right: Any) -> Any:
    if operator == "*":
      for some, number in ((left, right), (right, left)):
        if isinstance(number, int) and isinstance(some, str):
          self.meter.grow(len(some) * max(number, 0))
        elif isinstance(number, int) and isinstance(some, (list, tuple)):
          self.meter.grow(0, len(some) * max(number, 0))
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
      if left.bit_length() * max(right, 0) > 8192:
        raise LimitError("it makes a number of more than 8192 bits")
    elif operator == "%" and isinstance(left, str):
      return self._percent(left, *(right if isinstance(right, tuple) else (right,)))
    return self.meter.shallow(self.binop_table[operator](left, right))

  def width(self, spec: str) -> int:
    """The largest number in a format."""
    numbers = _NUMBER.findall(spec)
    if "*" in numbers or any(len(n) > 8 for n in numbers):
      raise LimitError("a format has a width of '*' or of more than 8 digits")
    return max(map(int, numbers), default=0)

  def _percent(self, text: Any, *args, **kwargs) -> str:
    """The filter `format` and the operator % on a string."""
    text = text if isinstance(text, str) else self._str(text)
    values = kwargs or (args[0] if len(args) == 1 and isinstance(args[0], dict) else args)
    fields = text.count("%")
    size = sum(len(self._str(v)) for v in (values.values() if isinstance(values, dict) else values))
    self.meter.grow(len(text) + fields * self.width(text) + size * (fields if isinstance(values, dict) else 1))
    return self.meter.shallow(text % values)

  def _method(self, text: str, name: str, args: tuple, kwargs: dict | None = None) -> Any:
    """A method of a string; those whose result can be longer than what they are given are paid before."""
    kwargs, meter = kwargs or {}, self.meter
    for value in (text, *args, *kwargs.values()):
      meter.shallow(value)
    numbers = [v for v in (*args, *kwargs.values()) if isinstance(v, int)]
    if name in ("ljust", "rjust", "center", "zfill"):
      meter.grow(max(numbers, default=0))
    elif name == "expandtabs":
      meter.grow(len(text) + text.count("\t") * max(numbers, default=8))
    elif name == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
      meter.grow(len(text) + text.count(args[0]) * max(len(args[1]) - len(args[0]), 0))
    elif name == "join" and args:
      parts = list(meter.generator(args[0]))
      meter.grow(sum(len(p) for p in parts if isinstance(p, str)) + len(text) * len(parts), len(parts))
      args = (parts,)
    return meter.shallow(getattr(text, name)(*args, **kwargs))

  def _replace(self, value: Any, old: str, new: str, count: int | None = None) -> str:
    value, old, new = (self._str(v) for v in (value, old, new))
    return self._method(value, "replace", (old, new, -1 if count is None else count))

  def _join(self, value: Iterable, d: Any = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
      parts = str(attribute).split(".")
      value = (functools.reduce(self.getitem, (int(p) if p.isdigit() else p for p in parts), item) for item in value)
    return self._method(self._str(d), "join", ([self._str(item) for item in self.meter.generator(value)],))

  def _sum(self, iterable: Iterable, attribute: str | int | None = None, start: Any = 0) -> Any:
    if attribute is not None:
      parts = str(attribute).split(".")
      iterable = (functools.reduce(self.getitem, (int(p) if p.isdigit() else p for p in parts), i) for i in iterable)
    for item in self.meter.generator(iterable):
      start = self.call_binop(None, "+", start, item)
    return start

  def _tojson(self, x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
              sort_keys: bool = False) -> str:
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None and separators is None:
      return encoder.encode(x)
    widest = indent if isinstance(indent, int) else max(map(len, map(str, (indent or "", *(separators or ())))))
    if widest > 64:
      raise LimitError("'tojson' has an indent or separators of more than 64 characters")
    return self.concat(encoder.iterencode(x))

  # What a template may call.

  def _dict(self, *args, **kwargs) -> dict:
    return dict(*args, **kwargs)

  def _raise_exception(self, message: Any):
    raise RefusalError(self._str(message))

  def _strftime_now(self, format: str) -> str:
    if self.today is None:
      raise TemplateError(
          "it asks for today's date (strftime_now), on which data must not depend. Give a fixed one: "
          "date=datetime.date(2024, 7, 26), say")
    if not isinstance(format, str) or len(format) > 200 or not _STRFTIME.fullmatch(format):
      raise TemplateError(f"strftime_now({format!r:.100}) asks for something that is not the same on every machine")
    return self.today.strftime(format)
