"""What folders of Mistral 3 and Pixtral say and hold beside what test_native.py compares with transformers."""

import json

import pytest

from models import api, config, hf
from models.hf import pixels
from models.hf.errors import HFError
from tests.models.hf.test_native import content_of, read
from trainer.errors import ConfigError


@pytest.mark.parametrize("part, key, value, message", [
    ("vision_config", "head_dim", 16, "head_dim is 16; allowed: 8: hidden_size, 16, by num_attention_heads, 2"),
    ("vision_config", "hidden_act", "relu", "hidden_act is 'relu'"),
    ("vision_config", "num_channels", 1, "num_channels is 1; allowed: 3"),
    ("vision_config", "rope_theta", 500.0, "rope_theta is 500.0; allowed: 10000.0; the tower has this base"),
    ("vision_config", "registers", 4, "registers = 4: the tower pixtral has no such entry"),
    ("vision_config", "model_type", "clip_vision_model", "is 'clip_vision_model'; allowed: pixtral"),
    (None, "vision_feature_layer", -2, "vision_feature_layer is -2; allowed: -1; the features are those of the"),
    (None, "image_gain", 2, "image_gain = 2: the family mistral3"),
])
def test_what_is_not_computed_is_refused_by_name(part, key, value, message):
  content = content_of("mistral3")
  (content if part is None else content[part])[key] = value
  with pytest.raises(HFError, match=message):
    read(content)


@pytest.mark.parametrize("text", ["mistral", "ministral3"])
def test_either_text_model_is_read_with_the_tower(text):
  """Of Mistral Small 3.1 and 3.2, and of Ministral 3; the text model alone where that is said."""
  content = content_of("mistral3")
  content["text_config"]["model_type"] = text
  family = hf.families.find(content, "config.json")
  assert family.name == f"mistral3 ({text})" and family.read(content, "config.json")["vision.tower"] == "pixtral"
  assert hf.families.find(content, "config.json", ("vision_config",)).name == text
  assert hf.families.find(content | {"vision_config": None}, "config.json").name == text
  del content["text_config"]["model_type"]  # as transformers writes none where it is its class's own
  assert hf.families.find(content, "config.json", ("vision_config",)).name == "mistral"


def test_pixtral_12b_is_a_llava_of_another_tower():
  """As published, where the text model's heads and most of the tower's sizes are what its classes assume."""
  vision = dict(head_dim=64, hidden_act="silu", image_size=1024, is_composition=True, model_type="pixtral",
                patch_size=16, rope_theta=10000.0, tie_word_embeddings=False)
  text = dict(head_dim=128, hidden_size=5120, intermediate_size=14336, is_composition=True, model_type="mistral",
              max_position_embeddings=1024000, num_hidden_layers=40, num_key_value_heads=8, rms_norm_eps=1e-5,
              rope_theta=1e9, sliding_window=None, vocab_size=131072)
  content = dict(architectures=["LlavaForConditionalGeneration"], ignore_index=-100, image_seq_length=1,
                 image_token_index=10, model_type="llava", projector_hidden_act="gelu", text_config=text,
                 vision_config=vision, vision_feature_layer=-1, vision_feature_select_strategy="full")
  keys = read(content)
  assert (keys["vision.tower"], keys["vision.projector"], keys["vision.image_size"]) == ("pixtral", "mlp", 16)
  assert (keys["num_heads"], keys["vision.num_layers"], keys["vision.projector_bias"]) == (32, 24, True)
  for key, value in (("vision_feature_layer", -2), ("vision_feature_select_strategy", "default")):
    with pytest.raises(HFError, match=f"{key} is '?{value}'?; allowed: .*: the features of all patches"):
      read(content | {key: value})
  other = dict(model_type="clip_vision_model", image_size=336, patch_size=14)
  assert read(content | dict(vision_config=other, vision_feature_select_strategy="default"))["vision.tower"] == "clip"


def test_how_large_images_are_is_read_and_written(tmp_path):
  keys, file = read(content_of("mistral3")), tmp_path / "preprocessor_config.json"
  assert keys["vision.longest_side"] == 1540 and pixels.read(tmp_path, keys) == {}
  file.write_text(json.dumps({"size": {"longest_edge": 700}, "patch_size": {"height": 4, "width": 4}}))
  assert pixels.read(tmp_path, keys) == {"vision.longest_side": 700}
  before = file.read_text()
  pixels.write(tmp_path, keys | {"vision.longest_side": 700})
  assert file.read_text() == before
  pixels.write(tmp_path, keys | {"vision.longest_side": 1000})
  written = json.loads(file.read_text())
  assert written["size"] == {"longest_edge": 1000} and "do_image_splitting" not in written
  for entry, message in ((dict(size=dict(height=9, width=9)), "allowed: a longest_edge alone"),
                         (dict(patch_size=8), "patch_size is 8; allowed: 4")):
    file.write_text(json.dumps(entry))
    with pytest.raises(HFError, match=message):
      pixels.read(tmp_path, keys)


@pytest.mark.parametrize("changed, message", [
    (dict(longest_side=0), "longest_side=0, .*; with the tower pixtral the first says how large images are"),
    (dict(max_pixels=6400), "max_pixels=6400; with the tower pixtral"), (dict(window=2), "only those of Qwen have"),
    (dict(split=True), "an image is cut into squares"),
    (dict(attention="image"), "the tower 'pixtral' has -1, 'causal'"),
    (dict(projector="mlp"), "image_size: found 8; with the projector 'mlp' each patch is a token: 4, as patch_size"),
    (dict(projector="linear"), "pixtral has 'merge_mlp' or 'mlp', and no other tower has 'merge', 'mean', 'merge_mlp'"),
    (dict(clipped=True), "clipped=True, standardized=False with the tower 'pixtral'; only gemma4"),
])
def test_a_tower_that_there_is_not_is_refused(changed, message):
  section = config.model()
  hf.set_keys(section, read(content_of("mistral3")) | {f"vision.{key}": value for key, value in changed.items()})
  with pytest.raises(ConfigError, match=message):
    api.make_model(section, vocab_size=61, params_dtype="float32", compute_dtype="float32")
