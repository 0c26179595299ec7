"""Folders of images and text, read and written: config.json, names of tensors, preprocessor_config.json, adapters."""

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import hf
from models.hf import convert, families, files, pixels
from models.hf.errors import HFError
from tests.models.hf.test_images import REFERENCES, content_of, read
from tests.trainer.export.test_command import write_run
from trainer import tree
from trainer.config import defaults
from trainer.export import command as export

# ------------------------------------------------------------------------------------------------ config.json


LLAVA_1_5 = {
    "architectures": ["LlavaForConditionalGeneration"], "ignore_index": -100, "image_token_index": 32000,
    "model_type": "llava", "pad_token_id": 32001, "projector_hidden_act": "gelu", "tie_word_embeddings": False,
    "text_config": {"_name_or_path": "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"],
                    "max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-05,
                    "torch_dtype": "float16", "vocab_size": 32064},
    "vision_config": {"hidden_size": 1024, "image_size": 336, "intermediate_size": 4096,
                      "model_type": "clip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 24,
                      "patch_size": 14, "projection_dim": 768, "vocab_size": 32000},
    "vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "mm_tokens_per_image": 256, "model_type": "gemma3",
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                    "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                    "sliding_window": 1024},
    "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
                      "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27,
                      "patch_size": 14, "vision_use_head": False}}


def test_sizes_that_a_published_folder_leaves_out():
  """As the classes of transformers assume them."""
  llava, gemma = read(LLAVA_1_5), read(GEMMA_3_4B)
  sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
  assert [llava[key] for key in sizes] == [32064, 4096, 11008, 32, 32, 32, 128]
  assert [gemma[key] for key in sizes] == [262208, 2560, 10240, 34, 8, 4, 256]
  vision = ("feature_layer", "tokens_per_image", "image_token", "activation", "norm_eps", "attention", "projector")
  assert [llava[f"vision.{key}"] for key in vision] == [-2, 576, 32000, "quick_gelu", 1e-5, "causal", "mlp"]
  assert [gemma[f"vision.{key}"] for key in vision] == [-1, 256, 262144, "gelu", 1e-6, "image", "pool"]
  assert not llava["tie_embeddings"] and gemma["tie_embeddings"]


def test_a_layer_counted_from_the_bottom_is_the_same():
  assert read(LLAVA_1_5 | dict(vision_feature_layer=23)) == read(LLAVA_1_5)


def changed(config: dict, changes: dict) -> dict:
  """With entries put in; "a.b" is inside, ... takes one out."""
  config = json.loads(json.dumps(config))
  for key, value in changes.items():
    *parents, last = key.split(".")
    part = config
    for parent in parents:
      part = part[parent]
    part[last] = value
    if value is ...:
      del part[last]
  return config


@pytest.mark.parametrize("name, changes, message", [
    ("llava_clip", {"text_config": ...}, "DIR/config.json has no 'text_config'"),
    ("llava_clip", {"vision_config": ...}, "DIR/config.json has no 'vision_config'"),
    ("llava_clip", {"vision_config": []}, "vision_config is []; allowed: an object"),
    ("llava_clip", {"vision_config.model_type": "vivit"},
     "vision_config: model_type is 'vivit'; allowed: clip_vision_model, siglip_vision_model"),
    ("gemma3", {"vision_config.model_type": "clip_vision_model"}, "allowed: siglip_vision_model"),
    ("llava_clip", {"text_config.model_type": "gpt2"}, "text_config: model_type is 'gpt2'; allowed: llama, mistral"),
    ("paligemma", {"text_config.model_type": "llama"}, "allowed: gemma, gemma2"),
    ("llava_clip", {"architectures": ["LlavaForSequenceClassification"]},
     "['LlavaForConditionalGeneration', 'LlavaModel'] for model_type 'llava'"),
    ("llava_clip", {"new_option": 3}, "new_option = 3: the family llava (llama) has no such entry"),
    ("llava_clip", {"vision_config.rotary": True}, "vision_config: rotary = True: the tower clip has no such entry"),
    ("llava_clip", {"text_config.rotary": 2}, "text_config: rotary = 2: the family llama has no such entry"),
    ("llava_clip", {"vision_config.num_channels": 4}, "num_channels is 4; allowed: 3; images are red, green and blue"),
    ("llava_clip", {"vision_config.hidden_act": "mish"}, "vision_config: hidden_act is 'mish'"),
    ("llava_clip", {"vision_config.image_size": [8, 8]}, "image_size is [8, 8]; allowed: a whole number"),
    ("llava_clip", {"vision_feature_layer": [-2, -5]}, "several layers are not put together"),
    ("llava_clip", {"vision_feature_layer": -4}, "from -3 to -1, or 1 to 3"),
    ("llava_clip", {"vision_feature_select_strategy": "full"}, "'default' for a clip tower"),
    ("llava_siglip", {"vision_feature_select_strategy": "default"}, "'full' for a siglip tower"),
    ("llava_clip", {"projector_hidden_act": "glu"}, "projector_hidden_act is 'glu'"),
    ("llava_clip", {"quantization_config": {"bits": 4}}, "has quant_method None; read are awq"),
    ("llava_clip", {"tie_word_embeddings": True}, "tie_word_embeddings is True; allowed: the same as in text_config"),
    ("gemma3", {"tie_word_embeddings": False}, "tie_word_embeddings is False; allowed: the same as in text_config"),
    ("gemma3", {"mm_tokens_per_image": 16}, "mm_tokens_per_image is 16; allowed: up to sliding_window"),
    ("gemma3", {"text_config.use_bidirectional_attention": True}, "_attention is True; allowed: False"),
    ("paligemma", {"text_config.use_bidirectional_attention": False}, "is False; allowed: True"),
    ("paligemma", {"projection_dim": 9}, "projection_dim is 9; allowed: 16"),
    ("paligemma", {"image_token_id": 3}, "image_token_id is 3; allowed: the same as image_token_index, 59"),
])
def test_refusals_name_key_and_value(name, changes, message):
  with pytest.raises(HFError, match=re.escape(message)):
    read(changed(content_of(name), changes))


def test_an_export_keeps_what_it_does_not_change():
  """Of a model whose tower has other activations than in the folder it came from."""
  source = content_of("gemma3") | dict(eos_token_id=[1, 106])
  family, content = hf.config_json(read(source) | {"vision.activation": "relu"}, source)
  assert content["eos_token_id"] == [1, 106] and content["boi_token_index"] == 3
  assert content["text_config"]["bos_token_id"] == 1 and content["text_config"]["model_type"] == "gemma3_text"
  assert content["vision_config"]["hidden_act"] == "relu"
  assert family.read(content, "") == read(source) | {"vision.activation": "relu"}


def test_what_no_family_has_is_named():
  model = read(content_of("paligemma"))
  with pytest.raises(HFError, match=r"nearest is paligemma \(gemma\).*attention = 'image' \(nearest: 'prefix'\)"):
    families.match(model | {"vision.attention": "image"})
  with pytest.raises(HFError, match="vision.feature_scale = 2.0"):
    families.match(model | {"vision.feature_scale": 2.0})


def test_a_model_of_text_alone_has_no_keys_of_images():
  """The keys of config.model.vision then have no effect, whatever they are."""
  model = families.LLAMA.read(dict(model_type="llama", vocab_size=9, hidden_size=8, intermediate_size=8,
                                   num_hidden_layers=1, num_attention_heads=2), "")
  default = hf.keys_of(defaults().model, 9)
  assert {key: model[key] for key in model if key.startswith("vision.")} == {
      key: default[key] for key in default if key.startswith("vision.")}
  assert families.match(model | {"vision.patch_size": 7})[0] is families.LLAMA


def test_with_dtype_reaches_the_objects_inside():
  content = dict(dtype="float32", text_config=dict(dtype="float32"), vision_config=dict(torch_dtype="float32", a=1))
  assert hf.with_dtype(content, "bfloat16") == dict(
      dtype="bfloat16", text_config=dict(dtype="bfloat16"), vision_config=dict(torch_dtype="bfloat16", a=1))


# ------------------------------------------------------------------------------------------------ tensors, other files


@pytest.fixture
def copy(tmp_path):
  """Copies a reference and changes its tensors and its config."""
  def make(name: str, change=lambda tensors: tensors, **changes) -> Path:
    folder = tmp_path / name
    shutil.copytree(REFERENCES / name, folder)
    opened = files.TensorFolder(folder)
    tensors = change({key: np.array(opened.read(key)) for key in opened.tensors})
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(changed(content_of(name), changes)))
    return folder

  return make


def test_a_missing_tower_is_told(copy):
  folder = copy("paligemma", lambda tensors: {k: v for k, v in tensors.items() if "vision_tower" not in k})
  with pytest.raises(HFError, match=r"as paligemma \(gemma\) \(") as error:
    hf.load(folder)
  told = str(error.value).split("dtype):")[1]
  assert "- vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight (20, 12): not in the folder" in told
  assert "+ " not in told and "language_model" not in told


def test_tensors_of_another_shape_are_told(copy):
  folder = copy("llava_clip", **{"vision_config.image_size": 12, "vision_config.patch_size": 2})
  with pytest.raises(HFError) as error:
    hf.load(folder)
  assert "patch_embedding.weight: (12, 3, 2, 2) by config.json, (12, 3, 4, 4) in" in str(error.value)
  assert "position_embedding.weight: (37, 12) by config.json, (5, 12) in" in str(error.value)


def test_a_tied_head_must_be_the_embedding(copy):
  def add(values):
    return lambda tensors: tensors | {"lm_head.weight": values(tensors["language_model.model.embed_tokens.weight"])}

  hf.load(copy("paligemma", add(np.copy)))
  with pytest.raises(HFError, match="lm_head.weight .* is not equal to language_model.model.embed_tokens.weight"):
    hf.load(copy("llava_siglip", add(lambda values: values + 1)))


def test_the_head_of_a_tower_is_left_out(copy, tmp_path):
  """And config.json then says so, or transformers would miss it."""
  head = {"vision_tower.vision_model.head.probe": np.zeros((1, 1, 12), np.float32),
          "vision_tower.vision_model.embeddings.position_ids": np.zeros((1, 9), np.int64)}
  folder = copy("paligemma", lambda tensors: tensors | head, **{"vision_config.vision_use_head": True})
  model, params = hf.load(folder)
  hf.save(model, params, tmp_path / "out")
  assert json.loads((tmp_path / "out/config.json").read_text()) == content_of("paligemma")
  written, whole = (files.TensorFolder(path).tensors.keys() for path in (tmp_path / "out", REFERENCES / "paligemma"))
  assert written == whole


def pixel_keys(folder: Path) -> dict:
  _, keys, _ = hf.architecture(folder)
  return {key: keys[key] for key in ("vision.mean", "vision.std")}


def test_how_pixels_are_normalised(copy):
  folder = copy("paligemma")
  assert pixel_keys(folder) == {"vision.mean": (), "vision.std": ()}
  (folder / "processor_config.json").write_text(json.dumps(
      dict(image_processor=dict(image_mean=[0.5, 0.5, 0.5], image_std=[0.25, 0.5, 1]), image_seq_length=9)))
  assert pixel_keys(folder) == {"vision.mean": (), "vision.std": (0.25, 0.5, 1.0)}
  own = dict(image_mean=[0.1, 0.2, 0.3], image_std=[0.5, 0.5, 0.5], rescale_factor=1 / 255, size=dict(height=12))
  (folder / "preprocessor_config.json").write_text(json.dumps(own))
  assert pixel_keys(folder) == {"vision.mean": (0.1, 0.2, 0.3), "vision.std": ()}
  model, _ = hf.load(folder)
  assert model.spec.vision.mean == (0.1, 0.2, 0.3) and model.spec.vision.std == (0.5, 0.5, 0.5)
  keys = read(content_of("paligemma"))
  pixels.write(folder, keys | {"vision.mean": (0.1, 0.2, 0.3)})
  assert json.loads((folder / "preprocessor_config.json").read_text()) == own
  pixels.write(folder, keys)
  assert json.loads((folder / "preprocessor_config.json").read_text()) == own | dict(image_mean=[0.5, 0.5, 0.5])


@pytest.mark.parametrize("entry, message", [
    (dict(do_normalize=False), "do_normalize is False; allowed: true"),
    (dict(rescale_factor=0.5), "rescale_factor is 0.5; allowed: 1/255"),
    (dict(image_mean=[0.5]), "image_mean is [0.5]; allowed: three numbers"),
    (dict(image_std=[0, 1, 1]), "image_std is [0, 1, 1]; allowed: three numbers"),
])
def test_pixels_prepared_in_another_way_are_refused(copy, entry, message):
  folder = copy("llava_clip")
  (folder / "preprocessor_config.json").write_text(json.dumps(entry))
  with pytest.raises(HFError, match=re.escape(message)) as error:
    hf.architecture(folder)
  assert "preprocessor_config.json" in str(error.value)


def test_adapters_are_named_as_in_memory(tmp_path):
  """PEFT finds modules by target_modules; the tower has some whose names end alike."""
  folder = REFERENCES / "llava_clip"
  family, keys, _ = hf.architecture(folder)
  model, params = hf.load(folder)
  shapes = tree.flatten(model.abstract_params())
  lora = dict(rank=2, alpha=4.0, rslora=False, dora=False, dropout=0.0, modules_to_save=(),
              targets=(r"^blocks/attn/q/kernel",), trainable_token_indices=())
  adapters = {f"blocks/attn/q/lora_{x}": np.random.default_rng(0).normal(size=shape).astype(np.float32)
              for x, shape in (("a", (2, 16, 2)), ("b", (2, 2, 16)))}
  layout = hf.AdapterLayout(family, keys, shapes | adapters, lora)
  hf.save_adapters(tmp_path, lambda path, index: adapters[path][index], layout, base=None)
  target = re.compile(json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"])
  assert target.fullmatch("model.language_model.layers.1.self_attn.q_proj")
  assert not target.fullmatch("model.language_model.layers.1.self_attn.k_proj")
  assert not target.fullmatch("model.vision_tower.encoder.layers.1.self_attn.q_proj")
  # So are whole modules beside adapters, those of the tower and of the projector, too.
  sizes = {path: tuple(leaf.shape) for path, leaf in shapes.items()}
  assert {name.split(".")[0] for name in convert.layout(family, keys, sizes, in_memory=True)} == {"model", "lm_head"}
  wanted = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in adapters.items()}
  again = hf.load_adapters(tmp_path, wanted, layout._replace(shapes=shapes))
  assert all(np.array_equal(again[path], adapters[path]) for path in adapters)


def nested(keys: dict) -> dict:
  """{"a.b": 1} as {"a": {"b": 1}}."""
  return tree.unflatten({key.replace(".", "/"): value for key, value in keys.items()})


def test_a_run_is_exported_with_its_tower(tmp_path):
  """How images are prepared comes along even where the run had another tokenizer."""
  _, params = hf.load(REFERENCES / "paligemma")
  keys = read(content_of("paligemma")) | {"vision.std": (0.25, 0.5, 0.75)}
  workdir = write_run(tmp_path / "run", params, (1,), hf="somewhere", **nested(keys))
  hf.copy_small_files(REFERENCES / "paligemma", workdir / "hf")
  prepared = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3, resample=3, size=dict(height=12, width=12))
  hf.write_json(workdir / "hf" / "preprocessor_config.json", prepared)
  out = export.export(workdir, tmp_path / "out")
  _, again, _ = hf.architecture(out)
  assert again == keys
  one, other = tree.flatten(params), tree.flatten(hf.load(out)[1])
  assert one.keys() == other.keys() and all(np.array_equal(one[path], other[path]) for path in one)
  assert files.read_json(out / "preprocessor_config.json") == prepared | dict(image_std=[0.25, 0.5, 0.75])
  assert files.read_config(out)["vision_config"] == content_of("paligemma")["vision_config"]


# ------------------------------------------------------------------------------------------------ the text part alone


QWEN3_5 = REFERENCES.parent / "references" / "qwen3_5"


def with_images(out, **outer):
  """The folder of a text model as the published ones of its kind are: beside layers that are passed over."""
  out.mkdir()
  text = files.read_config(QWEN3_5)
  content = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "image_token_id": 50,
             "text_config": {**text, "architectures": None, "attn_output_gate": True, "mtp_num_hidden_layers": 1},
             "vision_config": {"model_type": "qwen3_5", "depth": 2}, "tie_word_embeddings": False, **outer}
  (out / files.CONFIG).write_text(json.dumps(content))
  tensors = {name.replace("model.", "model.language_model.", 1): values
             for name, values in load_file(QWEN3_5 / files.SINGLE).items()}
  more = {name: np.ones((3, 4), np.float32) for name in ("model.visual.pos_embed.weight", "mtp.fc.weight")}
  save_file(tensors | more, out / files.SINGLE)
  return out


@pytest.mark.parametrize("outer, ignored", [
    ({}, ("vision_config",)), (dict(architectures=["Qwen3_5ForCausalLM"]), ()), (dict(vision_config=None), ())],
                         ids=str)
def test_the_text_model_of_a_folder_with_images_is_that_of_a_folder_of_text(outer, ignored, tmp_path):
  """As a user says by model.hf_ignore, or the folder itself."""
  path = with_images(tmp_path / "whole", **outer)
  _, keys, notes = hf.architecture(path, ignored)
  assert keys == hf.architecture(QWEN3_5)[1] and "text model alone is read" in notes[-1]
  model, params = hf.load(path, dtype=None, ignored=ignored)
  hf.save(model, params, tmp_path / "saved")
  assert (tmp_path / "saved" / files.SINGLE).read_bytes() == (QWEN3_5 / files.SINGLE).read_bytes()
  saved = files.read_config(tmp_path / "saved")
  assert (saved["architectures"], saved["model_type"]) == (["Qwen3_5ForCausalLM"], "qwen3_5_text")
  assert "vision_config" not in saved and hf.architecture(tmp_path / "saved")[1] == keys
  assert saved["initializer_range"] == files.read_config(QWEN3_5)["initializer_range"]  # of no effect, and kept


GEMMAS = {  # what published files say beside text_config, and in it
    "Gemma4": (dict(boi_token_id=50, eoi_token_id=51, image_token_id=52, video_token_id=53, boa_token_id=54,
                    eoa_token_index=55, audio_token_id=56, tie_word_embeddings=True),
               {"use_bidirectional_attention": "vision"}),
    "Gemma3n": (dict(boi_token_id=50, eoi_token_id=51, image_token_id=52, boa_token_id=54, eoa_token_id=55,
                     audio_token_id=56, audio_soft_tokens_per_image=188, vision_soft_tokens_per_image=256),
                {"altup_lr_multiplier": 1.0, "query_pre_attn_scalar": 256}),
}


@pytest.mark.parametrize("name", GEMMAS)
def test_the_text_model_of_a_gemma_is_read_beside_towers_for_images_and_sound(name, tmp_path):
  """As published: numbers of special tokens beside text_config, in which images, and only these, see both ways."""
  (outer, inner), kind = GEMMAS[name], name.lower()
  text_folder, path = REFERENCES.parent / "references" / kind, tmp_path / "whole"
  path.mkdir()
  text = files.read_json(text_folder / "config_4.json") | inner
  content = {"architectures": [f"{name}ForConditionalGeneration"], "model_type": kind,
             "text_config": text, "vision_config": {"model_type": f"{kind}_vision", "hidden_size": 8},
             "audio_config": {"model_type": f"{kind}_audio", "hidden_size": 8}, **outer}
  (path / files.CONFIG).write_text(json.dumps(content))
  tensors = {name.replace("model.", "model.language_model.", 1): values
             for name, values in load_file(text_folder / files.SINGLE).items()}
  others = ("vision_tower.std_bias", "embed_vision.embedding_projection.weight", "audio_tower.output_proj.bias",
            "embed_audio.embedding_projection.weight")
  save_file(tensors | {f"model.{name}": np.ones((3, 4), np.float32) for name in others}, path / files.SINGLE)
  ignored = ("vision_config",) if name == "Gemma4" else ()  # of which images can be read, too
  _, keys, notes = hf.architecture(path, ignored)
  assert keys == hf.architecture(text_folder)[1]
  assert "text model alone is read, trained and exported; its tensors for vision and audio are passed" in notes[-1]
  model, params = hf.load(path, dtype=None, ignored=ignored)
  hf.save(model, params, tmp_path / "saved")
  assert (tmp_path / "saved" / files.SINGLE).read_bytes() == (text_folder / files.SINGLE).read_bytes()
  saved = files.read_config(tmp_path / "saved")
  assert (saved["architectures"], saved["model_type"]) == ([f"{name}ForCausalLM"], f"{kind}_text")
  assert hf.architecture(tmp_path / "saved")[1] == keys
  (path / files.CONFIG).write_text(json.dumps(content | {"text_config": text | {"use_bidirectional_attention": "all"}}))
  with pytest.raises(HFError, match="use_bidirectional_attention is 'all'; allowed: false"):
    hf.architecture(path, ignored)


def test_the_text_model_of_llama_4_is_read_beside_a_tower(tmp_path):
  """As published: its head is named with the rest, and attn_temperature_tuning a number, which transformers 5 does not
  load."""
  text_folder, path = REFERENCES.parent / "references" / "llama4", tmp_path / "whole"
  path.mkdir()
  text = files.read_json(text_folder / "config_4.json") | {"attn_temperature_tuning": 4, "for_llm_compressor": False}
  content = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "tie_word_embeddings": False,
             "boi_token_index": 50, "eoi_token_index": 51, "image_token_index": 52, "text_config": text,
             "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 8}}
  (path / files.CONFIG).write_text(json.dumps(content))
  tensors = {f"language_model.{name}": values for name, values in load_file(text_folder / files.SINGLE).items()}
  others = ("vision_model.class_embedding", "multi_modal_projector.linear_1.weight")
  save_file(tensors | {name: np.ones((3, 4), np.float32) for name in others}, path / files.SINGLE)
  _, keys, notes = hf.architecture(path)
  assert keys == hf.architecture(text_folder)[1]
  assert "text model alone is read, trained and exported; its tensors for vision are passed over" in notes[-1]
  model, params = hf.load(path, dtype=None)
  hf.save(model, params, tmp_path / "saved")
  assert (tmp_path / "saved" / files.SINGLE).read_bytes() == (text_folder / files.SINGLE).read_bytes()
  family = hf.architecture(path)[0]
  for saved in (files.read_config(tmp_path / "saved"), family.kept(content)):
    assert (saved["architectures"], saved["model_type"]) == (["Llama4ForCausalLM"], "llama4_text")
    assert saved["attn_temperature_tuning"] is True and family.read(saved, "saved") == keys


@pytest.mark.parametrize("outer, message", [
    (dict(tie_word_embeddings=True), "tie_word_embeddings is True; allowed: the same as in text_config, False"),
    (dict(architectures=["Qwen3_5ForSequenceClassification"]), "allowed: .'Qwen3_5ForCausalLM'"),
    (dict(quantization_config=dict(bits=8)), "has quant_method None; read are awq"),
    (dict(image_gain=2), "image_gain = 2: the family qwen3_5 has no such entry")])
def test_what_stands_beside_the_text_model_and_concerns_it_is_read(tmp_path, outer, message):
  with pytest.raises(HFError, match=message):
    hf.architecture(with_images(tmp_path / "whole", **outer), ("vision_config",))


@pytest.mark.parametrize("before", ["language_model.", "model.language_model."])
@pytest.mark.parametrize("family", ["mistral", "ministral3"])
def test_the_text_model_of_mistral_3_is_read_and_written_alone(family, before, tmp_path):
  """As published, and as transformers 5 saves it: the head stands beside the model there."""
  source = QWEN3_5.parent / family
  text = {key: value for key, value in files.read_config(source).items() if key != "architectures"}
  (tmp_path / files.CONFIG).write_text(json.dumps(dict(
      architectures=["Mistral3ForConditionalGeneration"], model_type="mistral3", image_token_index=10,
      multimodal_projector_bias=False, projector_hidden_act="gelu", spatial_merge_size=2, vision_feature_layer=-1,
      vision_config=dict(model_type="pixtral", hidden_size=8), text_config=text)))
  tensors = load_file(source / files.SINGLE)
  whole = {(before + name if before == "language_model." else name.replace("model.", before, 1)): values
           for name, values in tensors.items()}
  whole["lm_head.weight" if before != "language_model." else f"{before}lm_head.weight"] = tensors["lm_head.weight"]
  more = {name: np.ones((3, 4), np.float32) for name in ("vision_tower.patch_conv.weight",
                                                         "multi_modal_projector.linear_1.weight")}
  save_file(whole | more, tmp_path / files.SINGLE)
  found, keys, notes = hf.architecture(tmp_path, ("vision_config",))
  assert (found.name, keys) == (family, hf.architecture(source)[1]) and "text model alone is read" in notes[-1]
  model, params = hf.load(tmp_path, ignored=("vision_config",))
  hf.save(model, params, tmp_path / "saved")
  saved = load_file(tmp_path / "saved" / files.SINGLE)
  assert saved.keys() == tensors.keys() and all(np.array_equal(saved[name], tensors[name]) for name in saved)
  assert files.read_config(tmp_path / "saved")["model_type"] == family
