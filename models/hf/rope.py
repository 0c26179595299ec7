"""Rotary positions in config.json: transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters), both ways.

What the scalings compute is in models/attention/rope.py.
"""

import math
from dataclasses import dataclass
from typing import Any

from models.hf.errors import HFError
from models.hf.keys import Rule
from models.hf.source import Source

# The keys of a scaling: theirs, ours, kind, default. `original_max_position_embeddings` is told by more than one key.
_NUMBERS = {
    "linear": (("factor", "factor", None),),
    "dynamic": (("factor", "factor", None),),
    "llama3": (("factor", "factor", None), ("low_freq_factor", "low_frequency_factor", None),
               ("high_freq_factor", "high_frequency_factor", None)),
    "yarn": (("beta_fast", "beta_fast", 32.0), ("beta_slow", "beta_slow", 1.0)),
    "longrope": (),
}
_LISTS = (("short_factor", "short_factors"), ("long_factor", "long_factors"))
_ORIGINAL = "original_max_position_embeddings"
# All that some type has.
_KNOWN = {"rope_type", "type", "rope_theta", "partial_rotary_factor", _ORIGINAL, "factor", "attention_factor",
          "truncate", "mscale", "mscale_all_dim", "short_factor", "long_factor",
          *(theirs for of in _NUMBERS.values() for theirs, _, _ in of)}
# Of Phi 3's first files.
_FORMERLY = {"su": "longrope"}
# What messages call the types together.
_TYPES = "this type of rotary positions"


@dataclass(frozen=True)
class Rope(Rule):
  """RoPE and its scaling.

  Args:
    theta: the base where config.json has none.
    scalings: the types that the family has.
    fraction: the share of a head that is rotated where config.json does not say; None: the family rotates all.
    local_theta: the base of layers with a window where config.json has none; None: theirs is that of all.
    local_entry: what says it in the layout of transformers 4. Where that is rope_theta, both layouts are written.
    inert: further entries, which have no effect.
    told: whether config.json must say them, since transformers assumes a scaling where it does not.
  """

  theta: float = 10000.0
  scalings: tuple[str, ...] = ("linear", "dynamic", "llama3", "yarn")
  fraction: float | None = None
  local_theta: float | None = None
  local_entry: str = "rope_local_base_freq"
  inert: tuple[str, ...] = ()
  told: bool = False

  def read(self, source, model):
    if self.told and not any(source.content.get(key) for key in ("rope_scaling", "rope_parameters")):
      raise HFError(f"{source.where} has neither rope_scaling nor rope_parameters, for which transformers assumes a "
                    "scaling in this family. Add rope_scaling; {\"rope_type\": \"default\"} is none.")
    theta, partial = (source.get(key, float, None, None) for key in ("rope_theta", "partial_rotary_factor"))
    limit, original = (source.get(key, int, None, None) for key in ("max_position_embeddings", _ORIGINAL))
    local_theta = source.get(self.local_entry, float, None, None) if self.local_theta is not None else None
    parameters, local = self._parameters(source)
    theta = _one(parameters, "rope_theta", float, theta, self.theta)
    partial = _one(parameters, "partial_rotary_factor", float, partial, None)
    if self.fraction is None and partial not in (None, 1.0):
      raise HFError(f"{source.where}: partial_rotary_factor is {partial}; allowed: 1.0, for this family rotates whole "
                    "heads.")
    fraction = self.fraction if partial is None else partial
    keys = {"rope_theta": theta, "rope_fraction": 1.0 if fraction is None else fraction}
    if local is not None:
      keys["rope_local_theta"] = _one(local, "rope_theta", float, local_theta, self.local_theta)
      if self.local_entry == "rope_theta" and theta != self.theta and "rope_theta" not in local.content:
        raise HFError(f"{source.where}: rope_theta is {theta:g}, and versions of transformers differ on whether that "
                      "holds for layers with a sliding window. Say it in rope_parameters, for full_attention and "
                      "sliding_attention.")
      if _type(local, ("default",)) != "default":
        raise local.error("rope_type", "default; layers with a window have no scaling")
      local.check_all_read((), _TYPES)
    keys |= self._scaling(parameters, limit, original)
    parameters.check_all_read(self.inert, _TYPES)
    return keys

  def write(self, model):
    scaling = {key.partition(".")[2]: value for key, value in model.items() if key.startswith("rope_scaling.")}
    content: dict[str, Any] = {"rope_theta": model["rope_theta"]}
    if self.fraction is not None:
      content["partial_rotary_factor"] = model["rope_fraction"]
    local_theta = model["rope_theta"] if model["rope_local_theta"] is None else model["rope_local_theta"]
    if self.local_theta is not None and self.local_entry != "rope_theta":
      content[self.local_entry] = local_theta
    limit, kind = model["max_positions"], scaling["type"]
    if self.told:
      content["rope_scaling"] = {"rope_type": "default"}
    if kind in self.scalings:
      written = {"rope_type": kind, "factor": scaling["factor"]}
      written |= {theirs: scaling[ours] for theirs, ours, _ in _NUMBERS[kind]}
      if kind == "yarn":
        written["truncate"] = scaling["truncate"]
        if scaling["attention_factor"] is not None:
          written["attention_factor"] = scaling["attention_factor"]
      if kind == "dynamic":
        limit = scaling["original_positions"]
      elif kind == "longrope":
        # In just these entries, which transformers 4 wants; it takes the ratio of the lengths for the factor.
        written = {"type": kind, **{theirs: list(scaling[ours]) for theirs, ours in _LISTS}}
        if scaling["attention_factor"] is not None:
          written["attention_factor"] = scaling["attention_factor"]
        content[_ORIGINAL] = scaling["original_positions"]
        limit = round(scaling["factor"] * scaling["original_positions"])
      elif kind != "linear":
        written[_ORIGINAL] = scaling["original_positions"]
        # transformers 4 takes this ratio for yarn's factor.
        limit = round(scaling["factor"] * scaling["original_positions"])
      content["rope_scaling"] = written
    if self.local_entry == "rope_theta":
      whole = content.get("rope_scaling", {"rope_type": "default"}) | {"rope_theta": model["rope_theta"]}
      content["rope_parameters"] = {"full_attention": whole,
                                    "sliding_attention": {"rope_type": "default", "rope_theta": local_theta}}
      if local_theta != model["rope_theta"]:
        del content["rope_theta"]
    if limit is not None:
      content["max_position_embeddings"] = limit
    return content

  def notes(self, source):
    parameters, local = self._parameters(source)
    notes = [note for part in (parameters, local) if part is not None for note in part.notes(_KNOWN.union(self.inert))]
    factor, limit = parameters.content.get("factor"), source.content.get("max_position_embeddings")
    original = parameters.content.get(_ORIGINAL, source.content.get(_ORIGINAL))
    if _type(parameters, ("default", *self.scalings)) != "yarn" or None in (factor, limit, original):
      return notes
    if math.isclose(factor, limit / original):
      return notes
    return [*notes, f"{source.where}: yarn's factor is {factor}, although max_position_embeddings / {_ORIGINAL} is "
            f"{limit / original:g}. The factor counts, as in transformers 5; transformers 4 takes the ratio."]

  def _parameters(self, source: Source) -> tuple[Source, Source | None]:
    """The parameters of global layers, and those of local ones if they have their own."""
    old, new = (source.get(key, dict, {}, {}) for key in ("rope_scaling", "rope_parameters"))
    local = None
    if self.local_theta is not None:
      nested = source.inside("rope_parameters", new)
      new, its = (nested.get(key, dict, {}, {}) for key in ("full_attention", "sliding_attention"))
      nested.check_all_read((), _TYPES)
      local = nested.inside("sliding_attention", its)
    for key in old.keys() & new.keys():
      if old[key] != new[key]:
        raise HFError(f"{source.where}: rope_scaling says {key}={old[key]!r}, rope_parameters {new[key]!r}. Remove the "
                      "one that is wrong.")
    return source.inside("rope_parameters" if new else "rope_scaling", {**old, **new}), local

  def _scaling(self, parameters: Source, limit: int | None, original: int | None) -> dict[str, Any]:
    kind = _type(parameters, ("default", *self.scalings))
    if kind == "default":
      return {"rope_scaling.type": "none"}
    keys: dict[str, Any] = {"type": kind}
    for theirs, ours, default in _NUMBERS[kind]:
      keys[ours] = parameters.get(theirs, float) if default is None else parameters.get(theirs, float, default, default)
    original = _one(parameters, _ORIGINAL, int, original, None if kind == "longrope" else limit)
    if kind == "dynamic":
      if original != limit:
        raise HFError(f"{parameters.where}: {_ORIGINAL} is {original}, but dynamic scaling starts at "
                      f"max_position_embeddings, {limit}. Make them equal.")
    if kind != "linear":
      if original is None:
        raise HFError(f"{parameters.where}: {kind} scaling needs {_ORIGINAL}.")
      keys["original_positions"] = original
    if kind == "yarn":
      keys |= _yarn(parameters, original, limit)
    if kind == "longrope":
      keys |= _longrope(parameters, original, limit)
    if keys["factor"] < 1:
      raise HFError(f"{parameters.where}: factor is {keys['factor']:g}; allowed: 1 or more.")
    return {f"rope_scaling.{key}": value for key, value in keys.items()}


def _yarn(parameters: Source, original: int, limit: int | None) -> dict[str, Any]:
  """The factors of yarn; those of DeepSeek (mscale, mscale_all_dim) become one factor on cosines and sines."""
  ratio = None if limit is None else limit / original
  factor = parameters.get("factor", float, ratio, ratio)
  if factor is None:
    raise HFError(f"{parameters.where}: yarn scaling needs factor.")
  if factor <= 0:
    raise parameters.error("factor", "1 or more")
  attention_factor = parameters.get("attention_factor", float, None, None)
  mscale, mscale_all_dim = (parameters.get(key, float, None, None) for key in ("mscale", "mscale_all_dim"))
  if attention_factor is None and mscale and mscale_all_dim and factor > 1:
    magnitude, all_dim = (0.1 * scale * math.log(factor) + 1.0 for scale in (mscale, mscale_all_dim))
    attention_factor = magnitude / all_dim
  return {"factor": factor, "attention_factor": attention_factor,
          "truncate": parameters.get("truncate", bool, True, True)}


def _longrope(parameters: Source, original: int, limit: int | None) -> dict[str, Any]:
  """Its factors; how many times longer texts may be is the ratio of the lengths, which `factor` may repeat."""
  keys: dict[str, Any] = {"attention_factor": parameters.get("attention_factor", float, None, None)}
  for theirs, ours in _LISTS:
    values = parameters.get(theirs, list)
    if not all(isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
               for value in values):
      raise parameters.error(theirs, "a list of numbers above 0")
    keys[ours] = tuple(map(float, values))
  ratio = None if limit is None else limit / original
  factor = parameters.get("factor", float, ratio, ratio)
  if factor is None:
    raise HFError(f"{parameters.where}: longrope scaling needs max_position_embeddings or factor.")
  if ratio is not None and not math.isclose(factor, ratio) and keys["attention_factor"] is None:
    raise HFError(f"{parameters.where}: factor is {factor:g}, but max_position_embeddings / {_ORIGINAL} is {ratio:g}, "
                  "and versions of transformers differ on which counts. Make them equal, or set attention_factor.")
  return {"factor": max(factor, 1.0), **keys}


def _type(parameters: Source, allowed: tuple[str, ...]) -> str:
  told = {parameters.get(key, str, None, None) for key in ("rope_type", "type")} - {None}
  kinds = {_FORMERLY.get(kind, kind) for kind in told}
  if len(kinds) > 1:
    raise parameters.error("rope_type", f"the same as type, {parameters.content['type']!r}")
  kind = kinds.pop() if kinds else "default"
  if kind not in allowed:
    raise parameters.error("rope_type" if "rope_type" in parameters.content else "type", ", ".join(allowed))
  return kind


def _one(parameters: Source, key: str, kind: type, outside: Any, default: Any) -> Any:
  """A value that may stand among the parameters or beside them."""
  inside = parameters.get(key, kind, None, None)
  if None not in (inside, outside) and inside != outside:
    raise parameters.error(key, f"{outside!r}, as the {key} beside it says")
  return next((value for value in (inside, outside) if value is not None), default)


def scaling_keys(kind: str) -> frozenset[str]:
  """Which keys of model.rope_scaling a type uses, `type` aside."""
  more = {"dynamic": ("original_positions",), "llama3": ("original_positions",),
          "yarn": ("original_positions", "factor", "truncate", "attention_factor"),
          "longrope": ("original_positions", "factor", "attention_factor", "short_factors", "long_factors")}
  return frozenset((*(ours for _, ours, _ in _NUMBERS.get(kind, ())), *more.get(kind, ())))
