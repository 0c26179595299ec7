"""Folders of tiny models that see images in their own sizes, and rows of images for them, that tests share."""

import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

TOKENS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
START, END, BEGIN, CLOSE, IMAGE, VIDEO = range(258, 264)
# As the published folders write it: their order of markers, for parts and for strings.
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'video' %}<|vision_start|>\
<|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Patches of 4 pixels, 2 × 2 of them a token of 8 pixels; images of 3 to 12 tokens.
PROCESSOR = dict(image_processor_type="Qwen2VLImageProcessor", patch_size=4, merge_size=2, temporal_patch_size=2,
                 min_pixels=3 * 64, max_pixels=12 * 64, image_mean=[0.48145466, 0.4578275, 0.40821073],
                 image_std=[0.26862954, 0.26130258, 0.27577711])
# Of films: frames of 2 to 6 tokens; in Qwen3-VL and 3.5 of 8 to 24 in all, of which two a second are taken.
SIZE = dict(shortest_edge=2 * 64, longest_edge=6 * 64)
FILMS = {key: value for key, value in PROCESSOR.items() if not key.startswith(("image_processor", "m"))} | dict(
    merge_size=2, video_processor_type="Qwen2VLVideoProcessor", size=SIZE)
FILMS_3 = FILMS | dict(video_processor_type="Qwen3VLVideoProcessor", image_mean=[0.5] * 3, image_std=[0.5] * 3,
                       size={key: 4 * value for key, value in SIZE.items()}, fps=2, min_frames=2)
TEXT = dict(vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, rms_norm_eps=1e-6, rope_theta=10000.0, hidden_act="silu",
            rope_scaling=dict(type="mrope", mrope_section=[2, 3, 3]), max_position_embeddings=512)
OUTER = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=BEGIN, vision_end_token_id=CLOSE,
             tie_word_embeddings=True, torch_dtype="float32")
COMMON = dict(num_heads=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=2, in_chans=3)
# config.json as published folders have it.
CONFIGS = {
    "qwen2_vl": dict(model_type="qwen2_vl", architectures=["Qwen2VLForConditionalGeneration"], **TEXT, **OUTER,
                     vision_config=dict(depth=2, embed_dim=16, hidden_size=32, mlp_ratio=2, **COMMON)),
    "qwen2_5_vl": dict(model_type="qwen2_5_vl", architectures=["Qwen2_5_VLForConditionalGeneration"], **TEXT, **OUTER,
                       vision_config=dict(depth=2, hidden_size=16, intermediate_size=24, out_hidden_size=32,
                                          window_size=16, fullatt_block_indexes=[1], **COMMON)),
    "qwen3_vl": dict(model_type="qwen3_vl", architectures=["Qwen3VLForConditionalGeneration"], **OUTER,
                     text_config=dict(model_type="qwen3_vl_text", **TEXT | dict(head_dim=16, num_hidden_layers=3,
                         rope_scaling=dict(mrope_interleaved=True, mrope_section=[4, 2, 2], rope_type="default")),
                                      tie_word_embeddings=True),
                     vision_config=dict(depth=3, hidden_size=16, intermediate_size=24, out_hidden_size=32,
                                        num_position_embeddings=16, deepstack_visual_indexes=[0, 1], in_channels=3,
                                        **{k: v for k, v in COMMON.items() if k != "in_chans"})),
    "qwen3_5": dict(model_type="qwen3_5", architectures=["Qwen3_5ForConditionalGeneration"], **OUTER,
                    text_config=dict(
                        model_type="qwen3_5_text", **{k: v for k, v in TEXT.items() if not k.startswith("rope")},
                        head_dim=32, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
                        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
                        tie_word_embeddings=True, rope_parameters=dict(
                            rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25, mrope_interleaved=True,
                            mrope_section=[2, 1, 1])),
                    vision_config=dict(depth=2, hidden_size=16, intermediate_size=24, out_hidden_size=32,
                                       num_position_embeddings=16, in_channels=3,
                                       **{k: v for k, v in COMMON.items() if k != "in_chans"})),
}


def gemma4(path: Path, seed: int = 1) -> Path:
  """The folder of a tiny Gemma 4, as published: with a tower that clips, per-layer embeddings, an audio_config, and
  images of up to 70 tokens of 4 × 4 pixels."""
  names = ("<|turn>", "<turn|>", "<|image>", "<image|>", "<|image|>", "<|video|>")
  tokens = dict(zip(range(258, 264), names, strict=True))
  ropes = dict(full_attention=dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e6),
               sliding_attention=dict(rope_type="default", rope_theta=1e4))
  text = dict(vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
              num_key_value_heads=1, head_dim=16, global_head_dim=32, rms_norm_eps=1e-6, sliding_window=16,
              layer_types=["sliding_attention", "full_attention", "full_attention"], rope_parameters=ropes,
              hidden_size_per_layer_input=8, vocab_size_per_layer_input=264, num_kv_shared_layers=1,
              use_double_wide_mlp=True, tie_word_embeddings=True, final_logit_softcapping=30.0)
  config = dict(
      model_type="gemma4", architectures=["Gemma4ForConditionalGeneration"], image_token_id=262, boi_token_id=260,
      eoi_token_id=261, video_token_id=263, vision_soft_tokens_per_image=280, tie_word_embeddings=True,
      text_config=dict(model_type="gemma4_text", **text), audio_config=dict(model_type="gemma4_audio"),
      vision_config=dict(model_type="gemma4_vision", hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=2, head_dim=8, patch_size=2, pooling_kernel_size=2,
                         position_embedding_size=560, use_clipped_linears=True,
                         rope_parameters=dict(rope_theta=100.0, rope_type="default")))
  template = """{% for message in messages %}<|turn>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{{ '<|image|>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}<turn|>
{% endfor %}{% if add_generation_prompt %}<|turn>assistant
{% endif %}"""
  processor = dict(image_processor_type="Gemma4ImageProcessor", do_normalize=False, image_mean=[0.0] * 3,
                   image_std=[1.0] * 3, patch_size=2, pooling_kernel_size=2, max_soft_tokens=70)
  return _written(path, config, tokens, template, processor, "<turn|>", seed)


def mistral3(path: Path, seed: int = 1) -> Path:
  """The folder of a tiny Mistral 3, as published: tiles of 4 × 4 pixels, of which a row ends in a token of its own."""
  names = ("[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "</s>")
  text = dict(vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
              num_key_value_heads=1, head_dim=16, rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=None)
  config = dict(
      model_type="mistral3", architectures=["Mistral3ForConditionalGeneration"], image_token_index=260,
      multimodal_projector_bias=False, projector_hidden_act="gelu", spatial_merge_size=2, vision_feature_layer=-1,
      text_config=dict(model_type="mistral", **text), vision_config=dict(
          model_type="pixtral", hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
          head_dim=8, patch_size=2, image_size=32, hidden_act="silu", rope_theta=10000.0))
  template = """{% for message in messages %}{% if message.role == 'user' %}[INST]{% if message.content is string %}\
{{ message.content }}{% else %}{% for part in message.content %}{{ '[IMG]' if part.type == 'image' else part.text }}\
{% endfor %}{% endif %}[/INST]{% else %}{{ message.content }}</s>{% endif %}{% endfor %}"""
  processor = dict(image_processor_type="PixtralImageProcessor", size=dict(longest_edge=32),
                   patch_size=dict(height=2, width=2))
  return _written(path, config, dict(zip(range(258, 264), names, strict=True)), template, processor, "</s>", seed)


def squares(path: Path) -> Path:
  """The folder of a tiny SmolVLM, whose images are one square of 16 pixels and 4 tokens."""
  tokens = dict(zip(range(258, 264), ("<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<global-img>",
                                      "<image>", "<video>"), strict=True))
  config = dict(
      model_type="smolvlm", architectures=["SmolVLMForConditionalGeneration"], image_token_id=262, scale_factor=2,
      tie_word_embeddings=False, torch_dtype="float32",
      text_config=dict(model_type="llama", **{k: v for k, v in TEXT.items() if k != "rope_scaling"}),
      vision_config=dict(model_type="smolvlm_vision", hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                         num_attention_heads=2, image_size=16, patch_size=4))
  template = """<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'] is \
string %}{{': ' + message['content']}}{% else %}{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}\
{{': '}}{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}{% elif \
line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}{% endif %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
  processor = dict(image_processor_type="SmolVLMImageProcessor", do_image_splitting=False, size=dict(longest_edge=40),
                   max_image_size=dict(longest_edge=16), image_mean=[0.5] * 3, image_std=[0.5] * 3)
  return _written(path, config, tokens, template, processor, "<end_of_utterance>", 1)


def folder(path: Path, name: str = "qwen2_5_vl", seed: int = 1) -> Path:
  """A folder of a tiny random model, with a tokenizer of bytes, a chat template and processors of images and films."""
  own = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3) if name.startswith("qwen3") else {}
  _written(path, CONFIGS[name], dict(enumerate(TOKENS, START)), TEMPLATE, PROCESSOR | own, "<|im_end|>", seed)
  (path / "video_preprocessor_config.json").write_text(json.dumps(FILMS_3 if own else FILMS))
  return path


def _written(path: Path, content: dict, tokens: dict[int, str], template: str, processor: dict, end: str,
             seed: int) -> Path:
  from input_pipeline.tokenizer.tokenizer import BytesTokenizer
  from models import api, config, hf
  from models.hf import families
  from tests.models.initial import initial

  keys = families.find(content, "config.json").read(content, "config.json")
  section = config.model()
  hf.set_keys(section, keys)
  model = api.make_model(section, vocab_size=264, params_dtype="float32", compute_dtype="float32")
  model.architecture, model.hf_config = keys, content
  hf.save(model, initial(model, seed), path)
  (path / "config.json").write_text(json.dumps(content))
  BytesTokenizer().save(path / "tokenizer.json")
  spec = json.loads((path / "tokenizer.json").read_text())
  last = spec["added_tokens"][-1]
  spec["added_tokens"] += [{**last, "id": i, "content": token} for i, token in tokens.items()]
  (path / "tokenizer.json").write_text(json.dumps(spec))
  (path / "tokenizer_config.json").write_text(json.dumps(dict(eos_token=end, chat_template=template)))
  (path / "preprocessor_config.json").write_text(json.dumps(processor))
  return path


def rows(path: Path, count: int = 12, seed: int = 0) -> Path:
  """A JSONL file of conversations about one or two images of different sizes, which lie beside it as PNGs."""
  from input_pipeline.sources.made import png

  rng, lines = np.random.default_rng(seed), []
  path.mkdir(parents=True, exist_ok=True)
  for i in range(count):
    names = []
    for j in range(1 + i % 3 // 2):
      size = rng.integers(9, 60, 2)
      red = (i + j) % 2
      pixels = rng.integers(0, 60, (*size, 3)) + np.array([180 * red, 0, 180 * (1 - red)])
      names.append(f"{i}-{j}.png")
      (path / names[-1]).write_bytes(png(pixels.astype(np.uint8)))
    said = "red" if i % 2 else "blue"
    parts = [*({"type": "image", "image": name} for name in names), {"type": "text", "text": "which color?"}]
    lines.append({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": said}]})
  file = path / "rows.jsonl"
  file.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return file


def film(count: int = 6, size: tuple[int, int] = (20, 30), red: bool = True, seed: int = 0) -> list[np.ndarray]:
  """Frames, uint8 [H, W, 3]: a square that moves to the right, red or blue, on noise."""
  frames = np.random.default_rng(seed).integers(0, 60, (count, *size, 3))
  for i, frame in enumerate(frames):
    at = i * (size[1] - 8) // count
    frame[4:12, at:at + 8] += np.array([180 * red, 0, 180 * (not red)])
  return list(frames.astype(np.uint8))


def animated(frames: list[np.ndarray], seconds: float = 0.25) -> bytes:
  """A lossless animated WebP of frames, each shown so long."""
  file, (first, *others) = io.BytesIO(), map(Image.fromarray, frames)
  first.save(file, "WEBP", save_all=True, append_images=others, duration=round(1000 * seconds), lossless=True)
  return file.getvalue()


def film_rows(path: Path, count: int = 8, seed: int = 0) -> Path:
  """A JSONL file of conversations about a film, of which every other has an image, too: animated WebPs, and frames one
  by one, which lie beside it."""
  from input_pipeline.sources.made import png

  rng, lines = np.random.default_rng(seed), []
  path.mkdir(parents=True, exist_ok=True)
  for i in range(count):
    frames = film(int(rng.integers(4, 8)), tuple(rng.integers(16, 40, 2)), red=i % 2 == 0, seed=i)
    if i % 3:
      (path / f"{i}.webp").write_bytes(animated(frames))
      shown = {"type": "video", "video": f"{i}.webp"}
    else:
      names = [f"{i}-{j}.png" for j in range(len(frames))]
      for name, frame in zip(names, frames, strict=True):
        (path / name).write_bytes(png(frame))
      shown = {"type": "video", "video": names, "fps": 4}
    (path / f"{i}.png").write_bytes(png(frames[0]))
    beside = [{"type": "image", "image": f"{i}.png"}] if i % 2 else []
    parts = [shown, *beside, {"type": "text", "text": "which color?"}]
    lines.append({"messages": [{"role": "user", "content": parts},
                               {"role": "assistant", "content": "blue" if i % 2 else "red"}]})
  file = path / "rows.jsonl"
  file.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return file
