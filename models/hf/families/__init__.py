"""The families of models that can be read and written, and the choice among them."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from models.hf.errors import HFError
from models.hf.families.cohere import COHERE, COHERE2
from models.hf.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, DOTS1
from models.hf.families.deepseek_v32 import DEEPSEEK_V32, GLM_MOE_DSA
from models.hf.families.gemma import GEMMA, GEMMA2, GEMMA3
from models.hf.families.gemma3_images import GEMMA3_IMAGES
from models.hf.families.gemma3n import GEMMA3N
from models.hf.families.gemma4 import GEMMA4
from models.hf.families.gemma4_images import GEMMA4_IMAGES
from models.hf.families.glm import GLM, GLM4, GLM4_MOE, GLM4_MOE_LITE
from models.hf.families.gpt2 import GPT2
from models.hf.families.gpt_oss import GPT_OSS
from models.hf.families.granite import GRANITE, GRANITE4, GRANITEMOE
from models.hf.families.llama import (
  APERTUS,
  ARCEE,
  ERNIE4_5,
  HELIUM,
  HUNYUAN_V1_DENSE,
  LLAMA,
  NEMOTRON,
  PHI3,
  SEED_OSS,
  SMOLLM3,
  STABLELM,
  STARCODER2,
)
from models.hf.families.llama4 import LLAMA4
from models.hf.families.llava import LLAVA
from models.hf.families.mistral import MINIMAX_M2, MINISTRAL3, MISTRAL, MIXTRAL
from models.hf.families.mistral3 import MISTRAL3
from models.hf.families.nemotron_h import NEMOTRON_H
from models.hf.families.olmo import EXAONE4, OLMO2, OLMO3
from models.hf.families.paligemma import PALIGEMMA
from models.hf.families.pixtral import PIXTRAL
from models.hf.families.qwen2 import QWEN2
from models.hf.families.qwen2_5_vl import QWEN2_5_VL
from models.hf.families.qwen2_moe import QWEN2_MOE
from models.hf.families.qwen2_vl import QWEN2_VL
from models.hf.families.qwen3 import QWEN3
from models.hf.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from models.hf.families.qwen3_5_vl import QWEN3_5_IMAGES, QWEN3_5_MOE_IMAGES
from models.hf.families.qwen3_moe import QWEN3_MOE
from models.hf.families.qwen3_next import QWEN3_NEXT
from models.hf.families.qwen3_vl import QWEN3_VL, QWEN3_VL_MOE
from models.hf.families.smolvlm import IDEFICS3, SMOLVLM
from models.hf.family import Family
from models.hf.images import Wrapper
from models.hf.source import each

# In the order in which `match` tries them: of two that fit, the one that more programs read comes first.
FAMILIES: tuple[Family, ...] = (
    LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, QWEN2_MOE, GEMMA, GEMMA2, GEMMA3, GEMMA3N, GEMMA4, GPT2,
    STARCODER2, STABLELM, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, GPT_OSS, PHI3, ARCEE, NEMOTRON, SEED_OSS, OLMO2, OLMO3, GLM,
    GLM4, GLM4_MOE, SMOLLM3, GRANITE, GRANITEMOE, GRANITE4, NEMOTRON_H, COHERE, COHERE2, DEEPSEEK_V3, DEEPSEEK_V2,
    GLM4_MOE_LITE, DEEPSEEK_V32, GLM_MOE_DSA, LLAMA4, ERNIE4_5, EXAONE4, MINIMAX_M2, HELIUM, DOTS1, HUNYUAN_V1_DENSE,
    MINISTRAL3, APERTUS,
)

# Models of images and text: each around several of the families above. `match` tries them in this order, too.
WRAPPERS: tuple[Wrapper, ...] = (
    PALIGEMMA, GEMMA3_IMAGES, LLAVA, PIXTRAL, QWEN2_VL, QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE, QWEN3_5_IMAGES,
    QWEN3_5_MOE_IMAGES, SMOLVLM, IDEFICS3, GEMMA4_IMAGES, MISTRAL3,
)

# Other models of images or sound and text, which cannot be read.
MULTIMODAL = ("internvl", "llava_next", "llava_onevision", "mllama",
              "vipllava")


def find(config: Mapping[str, Any], where: str, ignored: Iterable[str] = ()) -> Family:
  """The family of a config.json, by its model_type.

  Args:
    ignored: see `Family.read`. Where vision_config is named, the text model alone is meant, if that is a family, too.

  Raises:
    HFError: none, or one that is not here.
  """
  found = config.get("model_type")
  families: tuple[Any, ...] = (*WRAPPERS, *FAMILIES)
  by_type = {model_type: family for family in families for model_type in family.model_types}
  with_images = {model_type: wrapper for wrapper in reversed(WRAPPERS) for model_type in wrapper.model_types}
  if found == "mistral3" and isinstance(config.get("text_config"), Mapping):  # around one of two families
    text = by_type.get(config["text_config"].get("model_type", "mistral"))
    if isinstance(text, Family) and _text_alone(text, config, ignored):
      return text
  if isinstance(found, str) and found in by_type:
    family = by_type[found]
    if isinstance(family, Wrapper) or found in with_images and not _text_alone(family, config, ignored):
      return _with_tower(with_images[found], config).find(config, where)
    return family
  known = f"Known: {', '.join(sorted(by_type))}."
  if found in MULTIMODAL or "vision_config" in config:
    readable = ", ".join(dict.fromkeys(model_type for wrapper in WRAPPERS for model_type in wrapper.model_types))
    raise HFError(f"{where}: model_type is {found!r}, a model of images or sound and text that cannot be computed "
                  f"here; its text part alone would be another model. Those that can be read: {readable}.")
  near = difflib.get_close_matches(str(found), by_type, 1)
  hint = f" Did you mean {near[0]!r}?" if near else ""
  code = " The code that comes with the model (auto_map) is never run." if config.get("auto_map") else ""
  raise HFError(f"{where}: model_type is {found!r}, of no family that can be read here.{hint}{code} {known} "
                "docs/huggingface.md tells how to add a family.")


def _with_tower(wrapper: Wrapper, config: Mapping[str, Any]) -> Wrapper:
  """Of the wrappers with that one's model_type, the one whose tower a config.json names; else that one."""
  vision = config.get("vision_config")
  kind = vision.get("model_type") if isinstance(vision, Mapping) else None
  return next((other for other in WRAPPERS if other.model_types == wrapper.model_types and
               any(kind in tower.model_types for tower in other.towers)), wrapper)


def _text_alone(family: Family, config: Mapping[str, Any], ignored: Iterable[str]) -> bool:
  """Whether a config.json, by whose model_type there may be images, is of a text model, or is to be read as one."""
  named = config.get("architectures")
  return (not config.get("vision_config") or "vision_config" in each(ignored)
          or isinstance(named, list) and named[:1] == [family.architectures[0]])


def match(model: Mapping[str, Any]) -> tuple[Family, dict[str, Any]]:
  """The first family that expresses a model exactly, and the model's config.json.

  Args:
    model: {dotted key of config.model: value} for all keys of the architecture.

  Raises:
    HFError: there is none; the message says how the nearest one differs.
  """
  attempts: list[tuple[bool, int, int, str, list[str]]] = []
  with_images = [wrapper.of(text) for wrapper in WRAPPERS for text in wrapper.texts]
  candidates = FAMILIES if model.get("vision.tower", "none") == "none" else with_images
  for family in candidates:
    attempt = family.attempt(model)
    if not attempt.problems:
      return family, attempt.content
    attempts.append((not attempt.readable, len(attempt.problems), len(attempts), family.name, attempt.problems))
  *_, nearest, problems = min(attempts)
  ahead = (" What predicts tokens further ahead stays out with --config.export.mtp=False (trainer.export: --nomtp)."
           if model["mtp_layers"] else "")
  raise HFError(f"no family of Hugging Face models computes this model. The nearest is {nearest}, which cannot express "
                + "; ".join(problems) + f".{ahead} Change these keys of config.model before training to be able to "
                f"export. Families: {', '.join(family.name for family in candidates)}.")
