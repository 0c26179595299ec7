"""Folders of tiny models that see images in their own sizes, and rows of images for them, that tests share."""

import json
from pathlib import Path

import numpy as np

TOKENS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
START, END, BEGIN, CLOSE, IMAGE, VIDEO = range(258, 264)
# As the published folders write it: their order of markers, for parts and for strings.
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}\
<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Patches of 4 pixels, 2 × 2 of them a token of 8 pixels; images of 3 to 12 tokens.
PROCESSOR = dict(image_processor_type="Qwen2VLImageProcessor", patch_size=4, merge_size=2, temporal_patch_size=2,
                 min_pixels=3 * 64, max_pixels=12 * 64, image_mean=[0.48145466, 0.4578275, 0.40821073],
                 image_std=[0.26862954, 0.26130258, 0.27577711])
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
}


def folder(path: Path, name: str = "qwen2_5_vl", seed: int = 1) -> Path:
  """A folder of a tiny random model, with a tokenizer of bytes, a chat template and an image processor."""
  import jax  # after conftest has set its flags

  from input_pipeline.tokenizer.tokenizer import BytesTokenizer
  from models import api, config, hf
  from models.hf import families

  keys = families.find(CONFIGS[name], name).read(CONFIGS[name], name)
  section = config.model()
  hf.set_keys(section, keys)
  model = api.make_model(section, vocab_size=264, params_dtype="float32", compute_dtype="float32")
  model.architecture, model.hf_config = keys, CONFIGS[name]
  hf.save(model, jax.jit(model.init)(jax.random.key(seed)), path)
  (path / "config.json").write_text(json.dumps(CONFIGS[name]))
  BytesTokenizer().save(path / "tokenizer.json")
  spec = json.loads((path / "tokenizer.json").read_text())
  last = spec["added_tokens"][-1]
  spec["added_tokens"] += [{**last, "id": START + i, "content": token} for i, token in enumerate(TOKENS)]
  (path / "tokenizer.json").write_text(json.dumps(spec))
  (path / "tokenizer_config.json").write_text(json.dumps(dict(eos_token="<|im_end|>", chat_template=TEMPLATE)))
  (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
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
