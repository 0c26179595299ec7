"""What folders of Gemma 4 with images say and hold beside what test_native.py compares with transformers."""

import json
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import api, config, hf
from models.hf import files, pixels
from models.hf.errors import HFError
from models.spec_vision import UNBOUNDED
from tests.models.hf.test_native import REFERENCES, content_of, read
from trainer import tree as tree_lib
from trainer.config import defaults
from trainer.errors import ConfigError


@pytest.mark.parametrize("name, part, key, value, message", [
    ("gemma4", "vision_config", "num_key_value_heads", 1, "num_key_value_heads is 1; allowed: 2: num_attention_heads"),
    ("gemma4", "vision_config", "head_dim", 16, "head_dim is 16; allowed: 8: num_attention_heads, 2, is that of keys"),
    ("gemma4", "vision_config", "attention_bias", True, "attention_bias is True; allowed: False; the tower has no"),
    ("gemma4", "vision_config", "hidden_activation", "relu", "hidden_activation is 'relu'"),
    ("gemma4", "vision_config", "rope_parameters", {"rope_theta": 1e4}, "rope_theta is 10000.0; allowed: 100.0"),
    ("gemma4", "vision_config", "rope_parameters", {"rope_type": "yarn"}, "rope_type is 'yarn'; allowed: 'axial' or"),
    ("gemma4", "vision_config", "output_proj_dims", 4, "output_proj_dims = 4: the tower gemma4 has no such entry"),
    ("gemma4", "vision_config", "model_type", "siglip_vision_model", "'siglip_vision_model'; allowed: gemma4_vision"),
    ("gemma4", "text_config", "use_bidirectional_attention", "all", "'all'; allowed: null or \"vision\""),
    ("gemma4", "text_config", "pad_token_id", 3, "pad_token_id is 3; allowed: 0, whose embeddings of each layer stand"),
    ("gemma4", None, "audio_config", 7, "audio_config is 7; allowed: an object, or null"),
    ("gemma4", None, "frames", 2, "frames = 2: the family gemma4 with images"),
])
def test_what_is_not_computed_is_refused_by_name(name, part, key, value, message):
  content = content_of(name)
  (content if part is None else content[part])[key] = value
  with pytest.raises(HFError, match=message):
    read(content)


def test_what_is_said_of_no_layer_is_the_same_as_nothing():
  """Tokens of images see one another in layers with a window alone; padding matters where layers have embeddings."""
  content = content_of("gemma4_local", "config_4.json")
  assert read(content)["vision.attention"] == "local_image"
  content["text_config"].update(layer_types=["full_attention"] * 2, pad_token_id=3)
  assert read(content)["vision.attention"] == "causal"


def test_a_folder_with_a_tower_for_sound_is_read_without_it(tmp_path):
  """As published: it is told, its tensors are passed over, and the export says that there is none; nor are bounds lost
  that are infinite, nor keys of layers that use those of others."""
  path, tensors = tmp_path / "whole", load_file(REFERENCES / "gemma4" / files.SINGLE)
  shutil.copytree(REFERENCES / "gemma4", path)
  content = content_of("gemma4") | {"audio_config": {"model_type": "gemma4_audio", "hidden_size": 8}}
  (path / files.CONFIG).write_text(json.dumps(content))
  others = ("audio_tower.output_proj.bias", "embed_audio.embedding_projection.weight",
            "language_model.layers.2.self_attn.k_proj.weight")
  save_file(tensors | {f"model.{name}": np.ones((3, 4), np.float32) for name in others}, path / files.SINGLE)
  _, keys, notes = hf.architecture(path)
  assert keys == hf.architecture(REFERENCES / "gemma4")[1]
  assert "its tensors for sound are passed over" in notes[-1]
  model, params = hf.load(path)
  bounds = np.asarray(params["vision"]["blocks"]["attn"]["q"]["clip"]["input_max"])
  assert bounds[0] == UNBOUNDED > bounds[1] > 0
  hf.save(model, params, tmp_path / "saved")
  saved = load_file(tmp_path / "saved" / files.SINGLE)
  assert saved.keys() == tensors.keys() and all(np.array_equal(saved[name], tensors[name]) for name in saved)
  assert files.read_config(tmp_path / "saved") == content | {"audio_config": None}
  changed = keys | {"norm_eps": 0.5}  # what is written anew has none either
  assert "audio_config" not in hf.config_json(changed, content)[1]


def folder(path, **processor):
  path.mkdir()
  (path / "processor_config.json").write_text(json.dumps({"image_seq_length": 280, "image_processor": {
      "do_normalize": False, "image_mean": [0.0] * 3, "image_std": [1.0] * 3, "image_seq_length": 280, "patch_size": 4,
      "pooling_kernel_size": 2, "rescale_factor": 1 / 255, "size": {"height": 224, "width": 224}, **processor}}))
  return path


def test_how_many_tokens_an_image_has_is_read_and_written(tmp_path):
  keys, path = read(content_of("gemma4")), folder(tmp_path / "one", max_soft_tokens=140)
  assert keys["vision.max_pixels"] == 280 * 64 and pixels.read(tmp_path, keys) == {}
  assert pixels.read(path, keys) == {"vision.max_pixels": 140 * 64}
  before = (path / "processor_config.json").read_text()
  pixels.write(path, keys | {"vision.max_pixels": 140 * 64})
  assert (path / "processor_config.json").read_text() == before
  pixels.write(path, keys | {"vision.max_pixels": 1120 * 64})
  assert json.loads((path / "processor_config.json").read_text())["image_processor"]["max_soft_tokens"] == 1120


@pytest.mark.parametrize("entry, message", [
    (dict(max_soft_tokens=300), "max_soft_tokens is 300; allowed: 70, 140, 280, 560, 1120"),
    (dict(patch_size=8), "patch_size is 8; allowed: 4, as config.json says"),
    (dict(pooling_kernel_size=3), "pooling_kernel_size is 3; allowed: 2"),
    (dict(do_rescale=False), "do_rescale is False"),
    (dict(do_normalize=True, image_mean=[0.5] * 3), "do_normalize is True; allowed: false: pixels are divided by 255"),
    (dict(rescale_factor=1.0), "rescale_factor is 1.0")])
def test_pixels_prepared_in_another_way_are_refused(tmp_path, entry, message):
  with pytest.raises(HFError, match=message):
    pixels.read(folder(tmp_path / "one", **entry), read(content_of("gemma4")))
  assert pixels.read(folder(tmp_path / "two", do_normalize=True), read(content_of("gemma4")))  # by 0 and 1


@pytest.mark.parametrize("changed, message", [
    (dict(max_pixels=100 * 64), "max_pixels=6400; with the tower gemma4 the first stays 3136, .* is one of 4480, 8960"),
    (dict(min_pixels=64), "found min_pixels=64"), (dict(mean=(0.1, 0.2, 0.3)), "the tower gemma4 has 0.5 for each"),
    (dict(position_grid=100), "position_grid: found 100, but an image may have 560 patches in a row or column"),
    (dict(position_grid=0), "found 0 with the tower 'gemma4'; qwen3_vl, gemma4 have learned positions"),
    (dict(projector="merge"), "'merge' with the tower 'gemma4'; .*gemma4 has 'mean', .*no other tower has"),
    (dict(window=2), "with the tower 'gemma4'; only those of Qwen have windows"),
    (dict(attention="image"), "the tower 'gemma4' has -1, 'causal' or 'local_image', and a multiple of 4"),
    (dict(activation="gelu"), "model.vision.activation"),
    (dict(tower="qwen3_vl", projector="merge", activation="gelu"), "clipped=True, standardized=False with the tower"),
])
def test_a_tower_that_there_is_not_is_refused(changed, message):
  section = config.model()
  hf.set_keys(section, read(content_of("gemma4")) | {f"vision.{key}": value for key, value in changed.items()})
  with pytest.raises(ConfigError, match=message):
    api.make_model(section, vocab_size=61, params_dtype="float32", compute_dtype="float32")


@pytest.mark.parametrize("name", ["gemma4", "gemma4_local"])
def test_buffers_do_not_decay(name):
  """Bounds, what is standard, the factor on a layer: test_native.py has it that they have no gradient."""
  paths = tree_lib.flatten(hf.abstract_params(read(content_of(name))))
  factors = tree_lib.match(defaults().optimizer.wd_mults, paths, "wd_mults", default=1.0)
  buffers = {path for path in paths if re.search("/clip/|/standard/|layer_scale", path)}
  assert len(buffers) == 1 + {"gemma4": 28, "gemma4_local": 2}[name]
  assert not any(factors[path] for path in buffers) and factors["vision/blocks/attn/q/kernel"] == 1
