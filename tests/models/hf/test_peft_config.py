"""Ranks and scales in an adapter's config, as PEFT takes them from patterns; what of it cannot be."""

import math
import re
from pathlib import Path

import pytest

from models.hf import peft_config
from models.hf.errors import HFError

NAMES = ["layers.0.attn.q_proj", "layers.1.attn.q_proj"]
OURS = {"rank": 4, "alpha": 8.0, "rslora": False}


def rank_of(ours=None, parts=1, **config):
  config = {"r": 4, "lora_alpha": 8.0, **config}
  return peft_config.check_scale(config, NAMES, parts, OURS | (ours or {}), Path("a.json"))


def test_the_rank_is_that_of_the_first_pattern_that_ends_a_name():
  assert rank_of() == 4 and rank_of(rank_pattern={"k_proj": 9}) == 4
  for pattern in ("q_proj", r"attn\.q_proj", r"layers\.\d\.attn\.q_proj"):
    assert rank_of(dict(rank=6, alpha=12.0), rank_pattern={pattern: 6, ".*proj": 7}, alpha_pattern={pattern: 12}) == 6
  assert rank_of(rank_pattern={"_proj": 6, "q": 7, "attn": 8}) == 4  # ends of names begin behind a dot
  assert rank_of(parts=3, r=12, lora_alpha=24.0) == 12  # of three in one: as many times ours


def test_scales_are_compared_as_each_side_says_them():
  """8 / 4 of ours is 4 / √4 of an adapter with rsLoRA, and the other way round."""
  assert rank_of(lora_alpha=4.0, use_rslora=True) == 4
  assert rank_of(dict(rslora=True, alpha=4.0)) == 4
  assert rank_of(dict(rslora=True), use_rslora=True) == 4
  with pytest.raises(HFError, match=r"^a.json: layers.0.attn.q_proj has rank 4 and scale 4 .lora_alpha 8, rsLoRA., but "
                                    r"the config has rank 4 and scale 2. Set model.lora.rank=4, model.lora.alpha=8, m"):
    rank_of(use_rslora=True)
  with pytest.raises(HFError, match="has rank 6 and scale 2 .lora_alpha 12., but the config has rank 4 and scale 2"):
    rank_of(r=6, lora_alpha=12.0)


@pytest.mark.parametrize("config, said", [
    (dict(rank_pattern={"layers.0.attn.q_proj": 6}), "a.json: by rank_pattern and alpha_pattern the layers of layers."),
    (dict(rank_pattern={"(": 6}), "a.json: '(' is not a regular expression: "),
    (dict(rank_pattern={"(a+)+": 6}), "a.json: the pattern '(a+)+' could take for ever to be tried."),
    (dict(alpha_pattern={"a*b*c*d*": 6}), "a.json: the pattern 'a*b*c*d*' could take for ever"),
    (dict(rank_pattern={"x" * 201: 6}), "a.json: the pattern 'xxx"),
    *((dict(rank_pattern={"q_proj": value}), "a.json: rank_pattern or alpha_pattern gives ") for value in (
        0, -1, True, "6", None, math.inf)),
])
def test_patterns_that_cannot_be(config, said):
  with pytest.raises(HFError, match=f"^{re.escape(said)}"):
    rank_of(**config)
