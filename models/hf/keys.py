"""The vocabulary of a family's description: entries of config.json, each understood in both directions.

A family (models/hf/family.py) is a list of rules. `read` turns entries of config.json into values of config.model,
named by dotted keys such as `moe.num_experts`; `write` turns these back. A rule need not refuse what it cannot write:
`Family.write` reads what was written and compares.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from models.hf.errors import HFError
from models.hf.source import REQUIRED, Source


class Rule:
  """Some entries of config.json and what they mean: nothing, but for what a rule says."""

  def read(self, source: Source, model: Mapping[str, Any]) -> dict[str, Any]:
    """{our key: value}; `model` has what the rules before this one gave. Raises HFError."""
    return {}

  def write(self, model: Mapping[str, Any]) -> dict[str, Any]:
    """{their key: value} for a complete model."""
    return {}

  def notes(self, source: Source) -> list[str]:
    """Sentences on entries that a user should know of."""
    return []


@dataclass(frozen=True)
class Key(Rule):
  """An entry whose value is ours as it stands; several of ours have the same.

  `default` and `null` say what an absent key and `null` mean: a value, or a function of what was read before. `alias`
  is another name for the entry, which is read but not written. `least`: what whole numbers begin at.
  """

  theirs: str
  ours: str | tuple[str, ...]
  kind: type = int
  default: Any = REQUIRED
  null: Any = REQUIRED
  alias: str | None = None
  least: int = 1

  def read(self, source, model):
    default, null = (v(model) if callable(v) else v for v in (self.default, self.null))
    if self.alias and self.alias in source.content:
      default = source.get(self.alias, self.kind, default, null, least=self.least)
      if source.content.get(self.theirs, default) != default:
        raise source.error(self.alias, f"the same as {self.theirs}, {source.content[self.theirs]!r}")
    value = source.get(self.theirs, self.kind, default, null, least=self.least)
    return dict.fromkeys((self.ours,) if isinstance(self.ours, str) else self.ours, value)

  def write(self, model):
    return {self.theirs: model[self.ours if isinstance(self.ours, str) else self.ours[0]]}


@dataclass(frozen=True)
class Must(Rule):
  """An entry that must have one value, `null` or absent: the model has nothing for another.

  `why` continues "allowed: <value>; ".
  """

  theirs: str
  value: Any
  why: str

  def read(self, source, model):
    value = source.get(self.theirs, object, self.value, self.value)
    if value != self.value or isinstance(value, bool) != isinstance(self.value, bool):
      raise source.error(self.theirs, f"{self.value!r}; {self.why}")
    return {}


@dataclass(frozen=True)
class OfAllLayers(Rule):
  """An entry that must say the same of each layer, if it is there."""

  theirs: str
  kind: Any

  def read(self, source, model):
    kinds = [self.kind] * model["num_layers"]
    source.need(self.theirs, list, kinds, f"{self.kind!r} for each of the {len(kinds)} layers")
    return {}


@dataclass(frozen=True)
class Same(Rule):
  """An entry that repeats another. `why` continues "allowed: <value>; "."""

  theirs: str
  ours: str
  why: str

  def read(self, source, model):
    source.need(self.theirs, object, model[self.ours], f"{model[self.ours]!r}; {self.why}")
    return {}

  def write(self, model):
    return {self.theirs: model[self.ours]}


@dataclass(frozen=True)
class Head(Rule):
  """What hidden states become: logits, the scores of a *ForSequenceClassification, or embeddings, of a *Model.

  `scorer`, `body`: the architectures of the latter; None: there is none in transformers.
  """

  scorer: str | None
  body: str | None = None

  def read(self, source, model):
    found = (source.get("architectures", list, None, None) or [None])[0]
    if found is not None and found == self.body:
      return {"head": "embedding"}
    if found is None or found != self.scorer:
      return {}
    names = source.get("id2label", dict, None, None)  # transformers leaves out those of 2 labels, its default
    return {"head": "score", "num_labels": len(names) if names else source.get("num_labels", int, 2, 2)}

  def write(self, model):
    if model["head"] == "lm":
      return {}
    if (named := self.scorer if model["head"] == "score" else self.body) is None:
      raise HFError("transformers has no such architecture with a head that scores (model.head)")
    if model["head"] == "embedding":
      return {"architectures": [named]}
    names = [f"LABEL_{i}" for i in range(model["num_labels"])]
    return {"architectures": [named], "id2label": {str(i): name for i, name in enumerate(names)},
            "label2id": {name: i for i, name in enumerate(names)}}


class WholeHeads(Rule):
  """Some families want a hidden size that is a multiple of the heads, although head_dim says the heads' size."""

  def write(self, model):
    if model["hidden_size"] % model["num_heads"]:
      raise HFError(f"hidden_size {model['hidden_size']} must be a multiple of the {model['num_heads']} heads for "
                    "transformers 5 to load it")
    return {}


# transformers' names of activations, by what they are as a gate and without one; the first of each is written. All
# "gelu_" variants of the tanh approximation (Hendrycks and Gimpel 2016) differ in rounding only.
_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh", "gelu_accurate")
GATED = {"swiglu": ("silu", "swish"), "geglu": _TANH, "geglu_exact": ("gelu", "gelu_python")}
UNGATED = {"gelu": _TANH, "gelu_exact": ("gelu", "gelu_python"), "relu": ("relu",), "relu2": ("relu2",),
           "silu": ("silu", "swish"), "quick_gelu": ("quick_gelu",)}


@dataclass(frozen=True)
class Activation(Rule):
  """The activation of an MLP.

  Args:
    default: their name of it where the entry is absent; it is also written, where several names say the same.
    names: {ours: their names}.
    same: further entries; where they are there, they must name the same function.
  """

  theirs: str
  default: str
  names: Mapping[str, tuple[str, ...]]
  same: tuple[str, ...] = ()
  ours: str = "activation"

  def read(self, source, model):
    by_theirs = {name: ours for ours, names in self.names.items() for name in names}
    found = source.get(self.theirs, str, self.default)
    if found not in by_theirs:
      raise source.error(self.theirs, ", ".join(by_theirs))
    for key in self.same:
      other = source.get(key, str, None, None)
      if other is not None and by_theirs.get(other) != by_theirs[found]:
        raise source.error(key, f"the same function as {self.theirs}, {found!r}")
    return {self.ours: by_theirs[found]}

  def write(self, model):
    names = self.names.get(model[self.ours], (self.default,))
    return {self.theirs: self.default if self.default in names else names[0]}


@dataclass(frozen=True)
class QueryScale(Rule):
  """query_pre_attn_scalar s: attention logits are q·k / sqrt(s) (Gemma 2 and 3)."""

  default: int = 256

  def read(self, source, model):
    return {"attention_scale": source.get("query_pre_attn_scalar", int, self.default) ** -0.5}

  def write(self, model):
    scale = model["attention_scale"]
    return {"query_pre_attn_scalar": model["head_dim"] if scale is None else max(round(scale**-2), 1)}


@dataclass(frozen=True)
class Window(Rule):
  """A sliding window in all layers, or in none: `sliding_window` tokens, the current one included.

  Args:
    default: where the entry is absent.
    switch: an entry without which (or with false) there is no window.
  """

  default: int | None
  switch: str | None = None

  def read(self, source, model):
    on = self.switch is None or source.get(self.switch, bool, False)
    # Where it is switched off, the number may be anything.
    found = source.get("sliding_window", int if on else object, self.default, None)
    window = found if on else None
    kind = "local" if window else "global"
    types = source.get("layer_types", list, None, None)
    if types is not None and types != [_THEIRS[kind]] * model["num_layers"]:
      raise source.error("layer_types", f"{_THEIRS[kind]!r} for each of the {model['num_layers']} layers, since this "
                         f"family has one kind and sliding_window is {window}")
    return {"layer_pattern": (kind,), "window": window}

  def write(self, model):
    return {"sliding_window": model["window"], **({self.switch: model["window"] is not None} if self.switch else {})}


_THEIRS = {"local": "sliding_attention", "global": "full_attention", "nope": "full_attention"}
_OURS = {"sliding_attention": "local", "full_attention": "global", "attention": "global"}


def kinds_of(model: Mapping[str, Any]) -> tuple[str, ...]:
  """The kind of each layer."""
  pattern = model["layer_pattern"]
  return tuple(pattern[i % len(pattern)] for i in range(model["num_layers"]))


def named_kinds(source: Source, key: str, layers: int, ours: Mapping[str, str]) -> tuple[str, ...]:
  """Ours of an entry that has a name for each layer. Raises HFError."""
  given = source.get(key, list)
  if len(given) != layers or not all(isinstance(kind, str) and kind in ours for kind in given):
    raise source.error(key, f"{layers} times (num_hidden_layers) one of {', '.join(ours)}")
  return tuple(ours[kind] for kind in given)


def sliding_window(default: int) -> Callable[[Source], int | None]:
  """Reads sliding_window, which is `default` where it is not said."""
  return lambda source: source.get("sliding_window", int, default, None)


def all_but_every_nth(usual: int, told: bool = False) -> Callable[[Source, int], tuple[str, ...]]:
  """Every so manieth layer has no window; `told`: config.json may say which, in sliding_window_pattern."""
  def kinds(source: Source, layers: int) -> tuple[str, ...]:
    period = usual
    if told:
      period = source.get("sliding_window_pattern", int, source.get("_sliding_window_pattern", int, usual))
    return tuple("local" if (i + 1) % period else "global" for i in range(layers))
  return kinds


@dataclass(frozen=True)
class LayerTypes(Rule):
  """A window in some layers: `layer_types` with an entry for each, or an older way to say it.

  Args:
    read_window: from the source to the window, None: there is none.
    older: from the source and the number of layers to ("local" | "global", …), or None: only `layer_types` can say.
    write_older: from the layers' types and the window to the entries of the older way, the window among them.
  """

  read_window: Callable[[Source], int | None]
  older: Callable[[Source, int], tuple[str, ...] | None]
  write_older: Callable[[tuple[str, ...], int | None], dict[str, Any]] = lambda _, window: {"sliding_window": window}

  def read(self, source, model):
    layers = model["num_layers"]
    window, types = self.read_window(source), self.older(source, layers)
    if source.get("layer_types", list, None, None) is not None:
      types = named_kinds(source, "layer_types", layers, _OURS)
    if types is None:
      raise HFError(f"{source.where} has no layer_types, and versions of transformers differ on which layers have a "
                    "sliding window then. Add layer_types: 'sliding_attention' or 'full_attention' for each layer.")
    if "local" in types and window is None:
      raise HFError(f"{source.where} has layers with a sliding window, but sliding_window is "
                    f"{source.content.get('sliding_window')!r} or switched off by use_sliding_window.")
    return {"layer_pattern": types, "window": window}

  def write(self, model):
    types = kinds_of(model)
    return self.write_older(types, model["window"]) | {"layer_types": [_THEIRS.get(kind, kind) for kind in types]}
