"""What `transformers` changes in a tokenizer.json, by the class that a folder names.

Some of its classes set anew how text is split (release 5, `models/*/tokenization_*.py`), from two switches of
tokenizer_config.json: `add_prefix_space` and `legacy`. Both decide whether a space is put before a text, so that
without them the same folder would give other ids here and there.
"""

import json
from typing import Any

# tokenizer.json as it stands.
AS_IT_IS = "PreTrainedTokenizerFast"
# Classes of byte-level tokenizers: a space before each text if add_prefix_space says so.
BYTE_LEVEL = ("GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer", "CohereTokenizer", "CodeGenTokenizer")
# A sign for spaces: before each piece of text between special tokens (legacy), before the first, or before none.
SENTENCEPIECE = "LlamaTokenizer"
CHANGING = (*BYTE_LEVEL, SENTENCEPIECE)
# Types of models for which the class in the folder does not count (`TOKENIZER_MAPPING_NAMES`), unless it is theirs.
IGNORING = frozenset(
    "arctic ernie4_5 ernie4_5_moe flex_olmo fuyu glm glm4 glm4_moe gpt_bigcode granite granitemoe granitemoehybrid "
    "internlm2 internlm3 jamba llava llava_next minicpm3 minimax_m2 ministral ministral3 mistral mistral3 mistral4 "
    "mixtral nemotron olmo2 olmo3 persimmon phi3 phi3_v phimoe pixtral smolvlm stablelm vipllava voxtral".split())


def tokenizer_class(named: dict, model: dict) -> str | None:
  """The class that counts; None: the folder names none.

  Args:
    named: tokenizer_config.json.
    model: config.json.
  """
  declared = named.get("tokenizer_class") or model.get("tokenizer_class")
  if not isinstance(declared, str):
    return None
  return AS_IT_IS if model.get("model_type") in IGNORING else declared.removesuffix("Fast")


def adapted(serialized: str, name: str | None, named: dict) -> str:
  """A tokenizer.json as the class `name` uses it: the same string if it changes nothing."""
  if name in BYTE_LEVEL:
    spec = json.loads(serialized)
    wanted = bool(named.get("add_prefix_space", False))
    found = [pre for pre in _parts(spec.get("pre_tokenizer"), "pretokenizers") if pre.get("type") == "ByteLevel"]
    if all(bool(pre.get("add_prefix_space")) == wanted for pre in found):
      return serialized
    for pre in found:
      pre["add_prefix_space"] = wanted
    return json.dumps(spec, ensure_ascii=False)
  if name == SENTENCEPIECE:
    return _sentencepiece(serialized, named)
  return serialized


def _sentencepiece(serialized: str, named: dict) -> str:
  spec = json.loads(serialized)
  before = [pre.get("type") for pre in _parts(spec.get("pre_tokenizer"), "pretokenizers")]
  if spec["model"].get("type", "BPE") != "BPE" or any(kind != "Metaspace" for kind in before):
    return serialized  # byte-level vocabularies, to which transformers does not apply this class either
  space = named.get("add_prefix_space")
  space = True if space is None else bool(space)
  scheme = "never" if not space else "always" if named.get("legacy", False) else "first"
  strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if space else []
  changed = {
      "normalizer": None,
      "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
      "decoder": {"type": "Sequence", "decoders": [
          {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
          *strip]}}
  return serialized if all(spec.get(k) == v for k, v in changed.items()) else json.dumps(spec | changed,
                                                                                         ensure_ascii=False)


def _parts(step: Any, key: str) -> list[dict]:
  """The steps of a sequence, or the one step; none for null."""
  if not isinstance(step, dict):
    return []
  return [part for one in step[key] for part in _parts(one, key)] if step.get("type") == "Sequence" else [step]
