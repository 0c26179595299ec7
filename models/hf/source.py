"""A config.json that remembers which of its entries were asked for, and what is refused in it.

No entry that could matter goes unread: what a family's rules (models/hf/keys.py) did not ask for is refused by name.
"""

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from models.hf.errors import HFError

REQUIRED = object()
# No dimension of a model is as large, and no model as deep.
LARGEST, DEEPEST = 2**31 - 1, 100_000
_KINDS = {float: "a number that is finite", bool: "true or false", str: "a string", list: "a list", dict: "an object"}


class Source:
  """A config.json, or an object inside it, that remembers which of its keys were asked for.

  Attributes:
    content: the JSON object.
    where: what messages call it.
    ignored: dotted names of entries, as from the whole file, that a user says have no effect (`model.hf_ignore`).
    path: what the names of these entries begin with, e.g. "text_config."; "" for the file itself.
  """

  def __init__(self, content: Mapping[str, Any], where: str, ignored: Iterable[str] = (), path: str = ""):
    self.content, self.where, self.ignored, self.path = content, where, each(ignored), path
    self._asked: set[str] = set()

  def inside(self, key: str, content: Mapping[str, Any]) -> "Source":
    """The object `key` inside this one."""
    return Source(content, f"{self.where}: {key}", self.ignored, f"{self.path}{key}.")

  def get(self, key: str, kind: type, default: Any = REQUIRED, null: Any = REQUIRED, *, least: int = 1) -> Any:
    """The value of `key`, checked to be of `kind`.

    Args:
      kind: int (`least` or more), float (an int will do), bool, str, list or dict.
      default: what an absent key means; an error if not given.
      null: what `null` means; an error if not given.

    Raises:
      HFError: the key is missing, or its value of another kind.
    """
    self._asked.add(key)
    if key not in self.content:
      if default is REQUIRED:
        near = difflib.get_close_matches(key, self.content, 1)
        raise HFError(f"{self.where} has no {key!r}, which must be {_kind(kind, least)}."
                      + (f" It has {near[0]!r}." if near else ""))
      return default
    value: Any = self.content[key]
    if value is None and null is not REQUIRED:
      return null
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST:
      value = float(value)
    if not isinstance(value, kind) or (kind is int and (isinstance(value, bool) or not least <= value <= LARGEST)) or (
        kind is float and not math.isfinite(value)):
      raise self.error(key, _kind(kind, least) + ("" if null is REQUIRED else ", or null"))
    return value

  def need(self, key: str, kind: type, wanted: Any, allowed: str) -> None:
    """Refuses another value of an entry than that one, which an absent one and `null` mean; `allowed`: see `error`."""
    if self.get(key, kind, wanted, wanted) != wanted:
      raise self.error(key, allowed)

  def error(self, key: str, allowed: str) -> HFError:
    """The value of `key` is none of the allowed ones."""
    return HFError(f"{self.where}: {key} is {self.content.get(key)!r:.200}; allowed: {allowed}.")

  def check_all_read(self, inert: Iterable[str], whose: str) -> None:
    """Refuses what was not asked for, is not inert and could matter, unless it is ignored.

    Raises:
      HFError: naming such entries and the flag that accepts them; or an ignored one that is read here.
    """
    if read := sorted(key for key in self._asked & self.content.keys() if self.path + key in self.ignored):
      raise HFError(f"model.hf_ignore names {self.path + read[0]}, but {self.where} says with it what the model "
                    f"computes: {read[0]} is {self.content[read[0]]!r:.200}. Leave it out of model.hf_ignore.")
    unknown = {key: value for key, value in self._unread(inert).items()
               if not cannot_matter(key, value) and self.path + key not in self.ignored}
    if unknown:
      flag = ",".join(sorted({*self.ignored, *(self.path + key for key in unknown if key.isidentifier())})[:20])
      raise HFError(f"{self.where}: {_listed(unknown)}: {whose} has no such entry here, and it could change what the "
                    f"model computes. If it does not, accept it with --config.model.hf_ignore={flag}")

  def notes(self, inert: Iterable[str]) -> list[str]:
    """One sentence on all entries that say something and are not read, though not refused."""
    passed = {key: value for key, value in self._unread(inert).items()
              if value not in (None, False, "", [], {}) or _is_number(value)}
    return [f"{self.where}: not read, and taken to have no effect: {_listed(passed)}"] if passed else []

  def _unread(self, inert: Iterable[str]) -> dict[str, Any]:
    known = self._asked.union(inert)
    return {key: value for key, value in self.content.items() if key not in known}


def _kind(kind: type, least: int) -> str:
  return f"a whole number from {least} to {LARGEST}" if kind is int else _KINDS[kind]


def _listed(entries: Mapping[str, Any]) -> str:
  """Some entries in one line, cut where they are long and escaped where a terminal would obey them."""
  shown = [f"{key if key.isprintable() else repr(key):.80} = {value!r:.80}" for key, value in [*entries.items()][:20]]
  return ", ".join(shown) + (f" … and {len(entries) - 20} more" if len(entries) > 20 else "")


def each(names: Iterable[str]) -> frozenset[str]:
  """The names of `model.hf_ignore`, of which one typed on the command line may be several, with commas."""
  return frozenset(part.strip() for name in names for part in name.split(",") if part.strip())


def cannot_matter(key: str, value: Any) -> bool:
  """Whether an entry that nothing reads is no reason to stop: it says nothing, is private to a program, or a string."""
  return key.startswith("_") or isinstance(value, str) or value in (None, False, [], {}) and not _is_number(value)


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)  # 0 == False


# What acts in training alone: allowed, and told, since Weft's model.dropout has one rate for the whole model.
DROPOUT = frozenset("""
    attention_dropout attn_pdrop classifier_dropout embd_pdrop embedding_dropout hidden_dropout resid_pdrop
    residual_dropout router_jitter_noise
""".split())

# What would make another kind of model of it, none of which is read here: {entry: (what it must say, why)}.
NEITHER: Mapping[str, tuple[Any, str]] = {
    "is_causal": (True, "what is read are causal language models"),
    "is_encoder_decoder": (False, "what is read are decoders alone"),
    "add_cross_attention": (False, "what is read are decoders alone"),
    "cross_attention_hidden_size": (None, "what is read are decoders alone"),
    "tie_encoder_decoder": (False, "what is read are decoders alone"),
    "use_bidirectional_attention": (False, "what is read are causal language models"),
    "pruned_heads": ({}, "all layers have the same heads here"),
}


# Values that are about tokens of images alone, of which texts have none (Gemma 4).
OF_IMAGES = {"use_bidirectional_attention": ("vision",)}


def check_kind(source: Source, but: Iterable[str] = ()) -> None:
  """Refuses what only other kinds of models have; see NEITHER. `but`: entries that do not matter here."""
  for key, (allowed, why) in NEITHER.items():
    if key not in but and source.get(key, object, allowed, allowed) not in (allowed, None, *OF_IMAGES.get(key, ())):
      raise source.error(key, f"{json.dumps(allowed)}: {why}")
