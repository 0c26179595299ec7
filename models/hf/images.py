"""Families of models of images and text: a wrapper around a vision tower and a text family.

A `Wrapper` (families/paligemma.py, llava.py, gemma3_images.py) has rules of its own for config.json, and those of the
tower and of a text family for the objects vision_config and text_config inside it. With a text family it makes a
`Family` like any other.
"""

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from models.hf.errors import HFError
from models.hf.family import DROPOUT, INERT, Family, Tensor
from models.hf.keys import Rule
from models.hf.source import Source, check_kind

# Sizes that transformers' classes of text models assume where text_config, as published folders have it, says nothing.
ASSUMED_SIZES: Mapping[str, Mapping[str, int]] = {
    model_type: dict(zip(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                          "num_key_value_heads"), sizes, strict=True))
    for model_type, sizes in {
        "gemma": (256000, 3072, 24576, 28, 16, 16), "gemma2": (256000, 2304, 9216, 26, 8, 4),
        "gemma3_text": (262208, 2304, 9216, 26, 8, 4), "llama": (32000, 4096, 11008, 32, 32, 32),
        "mistral": (32000, 4096, 14336, 32, 32, 8), "qwen2": (151936, 4096, 22016, 32, 32, 32),
        "qwen3": (151936, 4096, 22016, 32, 32, 32), "qwen2_vl_text": (152064, 8192, 29568, 80, 64, 8),
        "qwen2_5_vl_text": (152064, 8192, 29568, 80, 64, 8),
    }.items()
}
# Entries of text_config that repeat what the wrapper says, and one of a program.
TEXT_INERT = frozenset({"architectures", "is_composition", "num_image_tokens"})
# Entries beside text_config that are about the text model, and those that are not.
OUTER = ("architectures", "tie_word_embeddings", "quantization_config")
OUTER_INERT = frozenset({*OUTER, "vision_config", "image_token_id", "video_token_id", "vision_start_token_id",
                         "vision_end_token_id"})
# Entries of vision_config of heads, losses and other modules.
VISION_INERT = frozenset("""
    initializer_factor is_causal is_composition logit_scale_init_value num_image_tokens projection_dim
    projector_hidden_act
    tie_word_embeddings use_bidirectional_attention vocab_size
""".split())
# What tensor names begin with: as published folders have them, as transformers 5 has them in memory, and others.
_TOWER = ("vision_tower.vision_model.", "model.vision_tower.", "vision_tower.", "model.vision_tower.vision_model.")
_PROJECTOR = ("multi_modal_projector.", "model.multi_modal_projector.")
# What all of these begin with where a program has loaded the model, but for the unembedding.
_LOADED = "model."
# Our keys for what hidden states become.
_OF_HEAD = ("head", "num_labels")
# And the text model: (prefixed, unprefixed) names as published, and in memory, where the head is outside of it.
_TEXT = (("language_model.{prefix}", "language_model."), ("model.language_model.", ""))
# A pooling head, which no wrapper uses, and a buffer.
_IGNORED = (r"^(model\.)?vision_tower\.(vision_model\.)?head\.", r"vision_tower\..*embeddings\.position_ids$")


@dataclass(frozen=True)
class Tower:
  """A kind of vision tower.

  Args:
    name: the value of our key vision.tower.
    model_types: values of vision_config.model_type; the first is written.
    keys: the rules for vision_config.
    table: its tensors, with names as inside the tower.
  """

  name: str
  model_types: tuple[str, ...]
  keys: tuple[Rule, ...]
  table: tuple[Tensor, ...]


@dataclass(frozen=True)
class VisionConfig(Rule):
  """vision_config, of one of some towers; the first is meant where it has no model_type."""

  towers: tuple[Tower, ...]

  def read(self, source, model):
    inner, keys = self._read(source, model)
    inner.check_all_read(INERT | DROPOUT | VISION_INERT, f"the tower {keys['vision.tower']}")
    return keys

  def write(self, model):
    tower = next((tower for tower in self.towers if tower.name == model["vision.tower"]), self.towers[0])
    content: dict[str, Any] = {"model_type": tower.model_types[0]}
    for rule in tower.keys:
      content.update(rule.write(model))
    return {"vision_config": content}

  def notes(self, source):
    inner, _ = self._read(source, {"hidden_size": None})
    return [f"{inner.where}: {key} is {inner.content[key]}; it acts in training alone, and the tower has none here."
            for key in sorted(DROPOUT) if inner.content.get(key)] + inner.notes(INERT | DROPOUT | VISION_INERT)

  def _read(self, source: Source, model: Mapping[str, Any]) -> tuple[Source, dict[str, Any]]:
    """(the object, our keys)."""
    inner = source.inside("vision_config", source.get("vision_config", dict))
    by_type = {model_type: tower for tower in self.towers for model_type in tower.model_types}
    found = inner.get("model_type", str, self.towers[0].model_types[0])
    if found not in by_type:
      raise inner.error("model_type", f"{', '.join(by_type)}; other towers cannot be computed here")
    check_kind(inner, VISION_INERT)
    keys: dict[str, Any] = {"vision.tower": by_type[found].name}
    for rule in by_type[found].keys:
      keys.update(rule.read(inner, {**model, **keys}))
    return inner, keys


@dataclass(frozen=True)
class TextConfig(Rule):
  """text_config, of one family; and the entry beside it that says whether the unembedding is the embedding.

  Args:
    family: of the text model.
    tied: what transformers 5 takes the outer tie_word_embeddings for where there is none; None: the inner one.
    both_ways: what text_config.use_bidirectional_attention may say besides null; or, where it says who sees whom, our
      vision.attention by what it says.
    beside: where there is no text_config, its entries stand in the outer object, in which those of these names are not
      its own; None: there must be one.
  """

  family: Family
  tied: bool | None
  both_ways: bool | Mapping[str | None, str]
  beside: frozenset[str] | None = None

  def read(self, source, model):
    content = self._content(source)
    where = f"{source.where}: text_config"
    both_ways, seen = content.pop("use_bidirectional_attention", None), {}
    if isinstance(self.both_ways, Mapping):
      if both_ways not in list(self.both_ways):
        raise HFError(f"{where}: use_bidirectional_attention is {both_ways!r}; allowed: "
                      f"{' or '.join(map(json.dumps, self.both_ways))}.")
      seen = {"vision.attention": self.both_ways[both_ways]}
    elif both_ways not in (None, self.both_ways):
      raise HFError(f"{where}: use_bidirectional_attention is {both_ways!r}; allowed: {self.both_ways}, for what sees "
                    "what is the same in all models of this family.")
    keys = self.family.read_source(source.inside("text_config", content))
    inner, outer = keys["tie_embeddings"], source.get("tie_word_embeddings", bool, self.tied, self.tied)
    # Of LLaVA, transformers 4 and 5 agree that the inner entry can say it alone.
    if outer is not None and inner != outer and not (inner and self.tied is None):
      raise source.error("tie_word_embeddings", f"the same as in text_config, {inner}: versions of transformers differ "
                         "on which of the two counts")
    return _without_vision(keys) | seen

  def write(self, model):
    attempt = self.family.attempt(_without_vision(model))
    if not attempt.readable:
      raise HFError("; ".join(attempt.problems))
    content = {key: value for key, value in attempt.content.items() if key != "architectures"}
    if isinstance(self.both_ways, Mapping):
      content["use_bidirectional_attention"] = {ours: theirs for theirs, ours in self.both_ways.items()}.get(
          model["vision.attention"])
    return {"text_config": content, "tie_word_embeddings": model["tie_embeddings"]}

  def notes(self, source):
    content = self._content(source)
    content.pop("use_bidirectional_attention", None)
    return self.family.notes_on(source.inside("text_config", content))

  def _content(self, source: Source) -> dict[str, Any]:
    if self.beside is None or source.content.get("text_config") is not None:
      given = source.get("text_config", dict)
    else:
      given = {key: source.get(key, object) for key in source.content if key not in self.beside}
    content = {**ASSUMED_SIZES.get(self.family.model_types[0], {}), "model_type": self.family.model_types[0], **given}
    return {key: value for key, value in content.items() if key not in TEXT_INERT}


class TextPart(Family):
  """A family of text models that are also read out of folders of models of images and text.

  There config.json has theirs inside it, as text_config. What is written is the text model alone.
  """

  def read_source(self, source):
    return super().read_source(self._text(source))

  def notes_on(self, source):
    text = self._text(source)
    notes = super().notes_on(text)
    if text is not source:
      others = [kind for kind in ("vision", "audio") if source.content.get(f"{kind}_config")]
      notes.append(f"{source.where} is that of a model of images and text. Of it the text model alone is read, trained "
                   f"and exported; its tensors for {' and '.join(others) or 'images'} are passed over.")
    return notes

  def kept(self, config):
    if "text_config" not in config:
      return super().kept(config)
    text = self._text(Source(config, "its config.json")).content
    return {**text, "architectures": [self.architectures[0]], "model_type": self.model_types[0]}

  def renewed(self, config, written):
    return super().renewed(self.kept(config), written)

  def _text(self, source: Source) -> Source:
    if "text_config" not in source.content:
      return source
    content = source.get("text_config", dict)
    tied = source.get("tie_word_embeddings", bool, None, None)
    if tied is not None and content.get("tie_word_embeddings", tied) != tied:
      raise source.error("tie_word_embeddings", f"the same as in text_config, {content['tie_word_embeddings']!r}: "
                         "which of the two counts depends on whether the whole model is loaded")
    source.check_all_read(INERT | OUTER_INERT | self.inert, f"the family {self.name}")
    return source.inside("text_config", content | {key: source.content[key] for key in OUTER if key in source.content})


class ImageFamily(Family):
  """What a `Wrapper` makes; a Family whose config.json has objects inside it."""

  def tensors(self, model):
    """See `Family.tensors`. A body alone has those of a loaded model, without what these begin with there."""
    found = super().tensors(model)
    if model["head"] != "embedding":
      return found
    body = [replace(t, theirs=t.theirs.removeprefix(_LOADED)) for t in found if t.theirs.startswith(self.in_memory)]
    return body + found

  def kept(self, config):
    """See `Family.kept`. The head that a tower may have is not written, so config.json must not ask for it."""
    rule = next(rule for rule in self.keys if isinstance(rule, VisionConfig))
    written = rule.write(self.read(config, "its config.json"))["vision_config"]
    vision = {key: value for key, value in written.items() if key == "vision_use_head"}
    unheard = {"audio_config": None} if config.get("audio_config") else {}  # of tensors that are not written either
    return {**config, **unheard, "vision_config": {**config["vision_config"], **vision}}

  def passed_over(self, model):
    """See `Family.passed_over`; what the text family passes over, too."""
    text = next(rule.family for rule in self.keys if isinstance(rule, TextConfig))
    return (*self.ignored, *text.passed_over(model))

  def renewed(self, config, written):
    """See `Family.renewed`; the same for the objects inside."""
    inner = {}
    for name, inert in (("text_config", TEXT_INERT), ("vision_config", VISION_INERT)):
      kept = (INERT | DROPOUT | inert) - {"model_type"}
      old = config.get(name) or {}
      inner[name] = {**{key: value for key, value in old.items() if key in kept}, **written[name]}
    return {**super().renewed(config, written), **inner}

  def with_modules(self, config, number):
    """See `Family.with_modules`: what predicts tokens further ahead is passed over where there are images."""
    text = {**config["text_config"]} if isinstance(config.get("text_config"), dict) else {}
    none = {key: 0 for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers") if key in text}
    return {**config, "text_config": text | none} if none else config


@dataclass(frozen=True, eq=False)
class Wrapper:
  """A kind of model of images and text.

  Args:
    model_types, architectures, inert, name: see `Family`; of the outer config.json.
    texts: the text families that it may have; the first is meant where text_config has no model_type.
    towers: the towers that it may have; the first is meant where vision_config has no model_type.
    keys: the rules for the outer config.json, read after the two objects.
    table: the projector's tensors, with names as inside it.
    fixed: our keys that have one value in all models of this kind.
    tied, both_ways, beside: see `TextConfig`.
    names: what the names of tensors of the text model, the tower and the projector begin with, as published and
      otherwise. In a model that transformers 5 has loaded: the text model's last, and of others the first in `model.`.
  """

  model_types: tuple[str, ...]
  architectures: tuple[str, ...]
  texts: tuple[Family, ...]
  towers: tuple[Tower, ...]
  keys: tuple[Rule, ...]
  table: tuple[Tensor, ...]
  fixed: Mapping[str, Any] = field(default_factory=dict)
  inert: frozenset[str] = frozenset()
  tied: bool | None = True
  both_ways: bool | Mapping[str | None, str] = False
  beside: frozenset[str] | None = None
  names: tuple[tuple[Any, ...], tuple[str, ...], tuple[str, ...]] = (_TEXT, _TOWER, _PROJECTOR)
  name: str = ""

  def __post_init__(self):
    object.__setattr__(self, "name", self.name or self.model_types[0])

  def find(self, config: Mapping[str, Any], where: str) -> Family:
    """The family for a config.json of this kind, by its text_config; raises HFError."""
    given = Source(config, where).get("text_config", dict, *([] if self.beside is None else [{}, {}]))
    inner = Source(given, f"{where}: text_config")
    by_type = {model_type: text for text in self.texts for model_type in text.model_types}
    found = inner.get("model_type", str, self.texts[0].model_types[0])
    if found not in by_type:
      raise inner.error("model_type", f"{', '.join(by_type)}; the text part of a {self.name} must be one of these")
    return self.of(by_type[found])

  @functools.cache  # noqa: B019, for wrappers are made once and live as long as the program
  def of(self, text: Family) -> Family:
    """The family of this kind with that text part."""
    towers = {tensor.theirs: tensor for tower in self.towers for tensor in tower.table}.values()
    return ImageFamily(
        name=f"{self.name} ({text.name})", model_types=self.model_types, architectures=self.architectures,
        keys=(TextConfig(text, self.tied, self.both_ways, self.beside), VisionConfig(self.towers), *self.keys),
        table=(*_text_table(text, self.names[0]), *_renamed(towers, self.names[1]),
               *_renamed(self.table, self.names[2])),
        fixed={**text.fixed, **self.fixed}, prefixes=("",), inert=self.inert,
        ignored=(*text.ignored, *_IGNORED, *([text.ahead.names] if text.ahead and text.ahead.names else [])),
        in_memory=(self.names[0][-1][0], "lm_head.", *(next(name for name in names if name.startswith("model."))
                                                      for names in self.names[1:])))


def _text_table(text: Family, beginnings: tuple[tuple[str, str], ...]) -> tuple[Tensor, ...]:
  """Under each of the names of `Wrapper.names`."""
  return tuple(replace(t, theirs=(inside if t.prefixed else outside).format(prefix=text.prefixes[0]) + t.theirs)
               for inside, outside in beginnings for t in text.table)


def _renamed(table: Iterable[Tensor], beginnings: tuple[str, ...]) -> tuple[Tensor, ...]:
  return tuple(replace(tensor, theirs=beginning + tensor.theirs) for beginning in beginnings for tensor in table)


def _without_vision(model: Mapping[str, Any]) -> dict[str, Any]:
  """What the text model says, which has no part in what the head is."""
  return {key: value for key, value in model.items() if not key.startswith("vision.") and key not in _OF_HEAD}
