"""Lists what transformers' config classes of our families know, into config_attributes.json beside this file.

    python tests/models/hf/make_config_attributes.py

in an environment with transformers; what other versions have added stays. Written with 4.41, 4.57 and 5.24.
"""

import inspect
import json
from pathlib import Path

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

FILE = Path(__file__).with_name("config_attributes.json")
TYPES = ("apertus", "arcee", "clip_vision_model", "cohere", "cohere2", "deepseek_v32", "dots1", "ernie4_5", "exaone4",
         "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_vision", "glm",
         "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt2", "gpt_oss", "granite", "granitemoe",
         "granitemoehybrid", "helium", "hunyuan_v1_dense", "llama", "llama4_text", "llava", "minimax_m2", "ministral3",
         "mistral", "mistral3", "mixtral", "nemotron", "nemotron_h", "olmo2", "olmo3", "paligemma", "phi3", "pixtral",
         "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_vl_vision", "qwen2_moe", "qwen2_vl", "qwen2_vl_text",
         "qwen2_vl_vision", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_moe_vision",
         "qwen3_5_text", "qwen3_5_vision", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "qwen3_vl_moe_text",
         "qwen3_vl_moe_vision", "qwen3_vl_text", "qwen3_vl_vision", "seed_oss", "siglip_vision_model", "smollm3",
         "stablelm", "starcoder2")
# Of the classes, and in no file.
OF_CLASSES = frozenset("""
    args attribute_map base_config_key base_model_ep_plan base_model_fsdp_plan base_model_pp_plan base_model_tp_plan
    extra_config_files extra_files has_no_defaults_at_init is_composition keys_to_ignore_at_inference kwargs self
    sub_configs sub_configs_defaults
""".split())


def attributes(cls) -> set[str]:
  """What a file of the class has, what its constructors take, and its fields."""
  names = set(cls().to_dict())
  for base in cls.__mro__[:-1]:
    names |= set(getattr(base, "__annotations__", {}))
    if base.__init__ is not object.__init__:
      names |= set(inspect.signature(base.__init__).parameters)
  return names - OF_CLASSES


def main():
  old = json.loads(FILE.read_text()) if FILE.is_file() else {}
  # What all have is the base class's, so that a type that is new here has it too.
  found = {kind: set(old.get(kind, ())) | set(old.get("all", ())) for kind in TYPES}
  for kind in TYPES:
    if kind in CONFIG_MAPPING:  # older versions lack some
      found[kind] |= attributes(CONFIG_MAPPING[kind])
  common = set.intersection(*found.values())
  told = {"all": sorted(common), **{kind: sorted(names - common) for kind, names in found.items()}}
  FILE.write_text("{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in told.items()) + "\n}\n")


if __name__ == "__main__":
  main()
