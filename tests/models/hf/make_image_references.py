"""Makes the folders of tests/models/hf/image_references: tiny models of images and text, what transformers computes.

    python tests/models/hf/make_image_references.py [CASE …]

needs what make_references.py beside it needs. A case has config.json and safetensors; config_4.json, the same in the
layout of transformers 4; and reference.npz:

    images [2, 2, S, S, 3]  uint8; row 0 has two images, row 1 one, and zeros for the other
    tokens [2, T]           with placeholders; lengths [2]: row 1 ends in padding
    prefix [2]              how many tokens of a row are the prompt, images included; loss is on those after it
    logits [2, T, V]        of the padded batch, 0 where there is padding
    text [1, R], text_logits [1, R, V]    of a text without images, all of it prompt
    loss, gradient_names, gradient_…      of the mean cross-entropy with labels -100 on prompt and padding; gradients in
                            float64, from which transformers' float32 is up to 1e-5 of their largest entries away
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import transformers
from make_references import SMALL, V, like, randomise, transformers_4
from transformers import AutoConfig, AutoModelForImageTextToText

FOLDER = Path(__file__).parent / "image_references"
IMAGE = V - 2
SIGLIP_STATISTICS = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
CLIP_STATISTICS = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


def tower(model_type: str, **changes) -> dict:
  sizes = dict(hidden_size=12, intermediate_size=20, num_hidden_layers=3, num_attention_heads=3, image_size=12,
               patch_size=4)
  return dict(model_type=model_type, **sizes) | changes


SIGLIP = tower("siglip_vision_model", vision_use_head=False)
CLIP = tower("clip_vision_model", projection_dim=10, image_size=8)
GEMMA2 = like("gemma2", head_dim=8, sliding_window=5, query_pre_attn_scalar=5, attn_logit_softcapping=1.5,
              final_logit_softcapping=10.0)
GEMMA3 = like("gemma3_text", head_dim=8, num_hidden_layers=4, sliding_window=5, sliding_window_pattern=3,
              query_pre_attn_scalar=5, rope_theta=5000.0, rope_local_base_freq=100.0, intermediate_size=16,
              rope_scaling=dict(rope_type="linear", factor=8.0))
PALIGEMMA = dict(model_type="paligemma", image_token_index=IMAGE, projection_dim=SMALL["hidden_size"],
                 hidden_size=SMALL["hidden_size"], vocab_size=V, vision_config=SIGLIP)
LLAVA = dict(model_type="llava", image_token_index=IMAGE)
SMOL = dict(image_token_id=IMAGE, scale_factor=2, text_config=like("llama", rope_theta=500.0))

# What each case is: entries of config.json, and under capital keys whose names its tensors have: LAYOUT is a key of
# LAYOUTS, None: what transformers 5 writes.
CASES = {
    "paligemma": PALIGEMMA | dict(text_config=like("gemma", head_dim=8), LAYOUT="published"),
    "paligemma2": PALIGEMMA | dict(text_config=GEMMA2),
    "llava_clip": LLAVA | dict(text_config=like("llama", rope_theta=500.0), vision_config=CLIP, image_seq_length=4,
                               LAYOUT="published"),
    "llava_clip_memory": LLAVA | dict(text_config=like("mistral", sliding_window=5), vision_config=CLIP,
                                      image_seq_length=4, vision_feature_layer=-1, LAYOUT="memory"),
    "llava_siglip": LLAVA | dict(text_config=like("qwen2", tie_word_embeddings=True), image_seq_length=9,
                                 vision_config=SIGLIP | dict(image_size=14), vision_feature_layer=-1,
                                 vision_feature_select_strategy="full"),
    "gemma3": dict(model_type="gemma3", image_token_index=IMAGE, mm_tokens_per_image=4, text_config=GEMMA3,
                   boi_token_index=3, eoi_token_index=4, vision_config=SIGLIP | dict(image_size=16),
                   LAYOUT="memory"),
    # As SigLIP's 384 pixels in patches of 14: those at the end make no whole patch.
    "smolvlm": dict(model_type="smolvlm", **SMOL, vision_config=tower("smolvlm_vision", image_size=18)),
    "idefics3": dict(model_type="idefics3", **SMOL, vision_config=tower("idefics3_vision", image_size=16)),
}

# From names in memory to names in files.
LAYOUTS = {
    "memory": (),
    "published": (("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."),
                  ("model.vision_tower.", "vision_tower.vision_model."),
                  ("model.multi_modal_projector.", "multi_modal_projector.")),
}


def save(case: dict, folder: Path) -> None:
  config = dict(case)
  layout = config.pop("LAYOUT", None)
  parts = {name: AutoConfig.for_model(**config.pop(name)) for name in ("text_config", "vision_config")}
  kind = type(AutoConfig.for_model(config.pop("model_type")))
  model = AutoModelForImageTextToText.from_config(kind(**parts, **config))
  generator = torch.Generator().manual_seed(0)
  randomise(model, generator)
  with torch.no_grad():
    for name, p in model.named_parameters():
      if "patch_embedding.weight" in name:
        p.copy_(1.2 * torch.randn(p.shape, generator=generator) / p[0].numel() ** 0.5)
      if "mm_input_projection_weight" in name:  # not a Linear: [in, out]
        p.copy_(1.2 * torch.randn(p.shape, generator=generator) / p.shape[0] ** 0.5)
  model.save_pretrained(folder)
  (folder / "generation_config.json").unlink(missing_ok=True)
  if layout is not None:
    tied = model.config.tie_word_embeddings
    tensors = {k: v.contiguous() for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}
    renamed = {}
    for name, values in tensors.items():
      old, new = next(((a, b) for a, b in LAYOUTS[layout] if name.startswith(a)), ("", ""))
      renamed[new + name.removeprefix(old)] = values
    safetensors.torch.save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


def config_4(config: dict) -> dict:
  """The same config.json as transformers 4 and the published folders have it."""
  old = {k: v for k, v in config.items() if k not in ("dtype", "text_config", "vision_config")}
  text = transformers_4(config["text_config"] | dict(dtype="float32"))
  vision = {k: v for k, v in config["vision_config"].items() if k != "dtype"} | dict(torch_dtype="float32")
  if config["model_type"] == "paligemma":
    text.pop("use_bidirectional_attention", None)
    old.pop("vocab_size", None)
    patches = (vision["image_size"] // vision["patch_size"]) ** 2
    vision |= dict(num_image_tokens=patches, projection_dim=config["projection_dim"], projector_hidden_act="gelu_fast")
    text["num_image_tokens"] = patches
    old |= dict(_vocab_size=V, ignore_index=-100)
  if config["model_type"] == "llava":
    old |= dict(ignore_index=-100)
    old.pop("image_seq_length")
    old.pop("multimodal_projector_bias")
  if config["model_type"] in ("smolvlm", "idefics3"):
    text |= dict(is_llama_config=True, neftune_noise_alpha=0.0, pixel_shuffle_factor=2, qk_layer_norms=False,
                 rope_interleaved=False, use_resampler=False, perceiver_config=dict(model_type="vllama3"))
    vision |= dict(max_image_size=dict(longest_edge=vision["image_size"]), size=dict(longest_edge=64),
                   use_base_siglip=False, model_type=config["model_type"])
    old |= dict(use_reentrant_checkpointing=False)
  return old | dict(torch_dtype="float32", transformers_version="4.51.3", text_config=text, vision_config=vision)


def load(folder: Path) -> torch.nn.Module:
  model, told = AutoModelForImageTextToText.from_pretrained(
      folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
  assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
  return model.eval()


def normalised(images: np.ndarray, case: dict) -> torch.Tensor:
  """uint8 [N, S, S, 3] as pixel values [N, 3, S, S]."""
  statistics = CLIP_STATISTICS if case["vision_config"] is CLIP else SIGLIP_STATISTICS
  mean, std = (np.array(values, np.float32) for values in statistics)
  return torch.tensor(((images.astype(np.float32) / 255 - mean) / std).transpose(0, 3, 1, 2).astype(np.float32))


def batch(case: dict) -> dict[str, np.ndarray]:
  vision = case["vision_config"]
  side = vision["image_size"] // vision["patch_size"] // case.get("scale_factor", 1)
  count = case.get("mm_tokens_per_image", side**2)
  rng = np.random.default_rng(1)
  rows, prefix = [], []
  for prompt, suffix in (("t.tt.tt", 6), (".ttt", 7)):
    ids = np.concatenate([[IMAGE] * count if c == "." else rng.integers(3, IMAGE, 1) for c in prompt])
    prefix.append(len(ids))
    rows.append(np.concatenate([ids, rng.integers(3, IMAGE, suffix)]))
  lengths = [len(row) for row in rows]
  tokens = np.stack([np.pad(row, (0, max(lengths) - len(row))) for row in rows]).astype(np.int32)
  size = vision["image_size"]
  images = rng.integers(0, 256, (2, 2, size, size, 3)).astype(np.uint8)
  images[1, 1] = 0
  return dict(images=images, tokens=tokens, lengths=np.array(lengths), prefix=np.array(prefix),
              text=rng.integers(3, IMAGE, (1, 9)).astype(np.int32))


def inputs(case: dict, data: dict[str, np.ndarray], rows: slice = slice(None)) -> dict:
  """What transformers' forward takes for some of the rows."""
  tokens, lengths, prefix = (torch.tensor(data[key][rows]).long() for key in ("tokens", "lengths", "prefix"))
  used = data["images"][:, :].reshape(-1, *data["images"].shape[2:])[:3]
  pixels = normalised({0: used[:2], 1: used[2:], None: used}[rows.start], case)
  if "scale_factor" in case:  # of each row, what is 0 there is no image
    pixels = torch.cat([pixels, torch.zeros(-len(pixels) % 2, *pixels.shape[1:])])
    pixels = pixels.reshape(len(tokens), -1, *pixels.shape[1:])
  place = torch.arange(tokens.shape[1])[None]
  mask = place < lengths[:, None]
  labels = torch.where(mask & (place >= prefix[:, None]), tokens, -100)
  return dict(input_ids=tokens, pixel_values=pixels, attention_mask=mask.long(), labels=labels, use_cache=False,
              **token_types(case, tokens, prefix))


def token_types(case: dict, tokens: torch.Tensor, prefix: torch.Tensor) -> dict:
  if case["model_type"] == "paligemma":
    return dict(token_type_ids=(torch.arange(tokens.shape[1])[None] >= prefix[:, None]).long())
  return dict(token_type_ids=(tokens == IMAGE).long()) if case["model_type"] == "gemma3" else {}


GRADIENTS = ("language_model.layers.0.self_attn.q_proj.weight", "vision_tower.encoder.layers.0.self_attn.k_proj.weight",
             "vision_tower.embeddings.patch_embedding.weight", "vision_tower.embeddings.position_embedding.weight",
             "multi_modal_projector.linear.bias", "multi_modal_projector.linear_1.weight",
             "multi_modal_projector.linear_2.bias", "multi_modal_projector.mm_soft_emb_norm.weight",
             "multi_modal_projector.mm_input_projection_weight", "vision_tower.pre_layrnorm.weight",
             "vision_tower.embeddings.class_embedding", "text_model.layers.0.self_attn.q_proj.weight",
             "vision_model.encoder.layers.0.self_attn.k_proj.weight", "vision_model.embeddings.patch_embedding.weight",
             "vision_model.embeddings.position_embedding.weight", "connector.modality_projection.proj.weight")


def gradients_in_double(model: torch.nn.Module, given: dict) -> dict[str, np.ndarray]:
  """{name: gradient of the loss} in float64, in which transformers' float32 softmax is too, then."""
  softmax = torch.nn.functional.softmax
  torch.nn.functional.softmax = lambda x, dim=None, dtype=None: softmax(x, dim=dim, dtype=x.dtype)
  try:
    model(**given | dict(pixel_values=given["pixel_values"].double())).loss.backward()
  finally:
    torch.nn.functional.softmax = softmax
  return {k.removeprefix("model."): p.grad.numpy() for k, p in model.named_parameters() if p.grad is not None}


def make(name: str) -> None:
  folder, case = FOLDER / name, CASES[name]
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir(parents=True)
  save(case, folder)
  data = batch(case)
  model = load(folder)
  out = model(**inputs(case, data))
  logits = out.logits.detach().numpy() * (np.arange(data["tokens"].shape[1]) < data["lengths"][:, None])[..., None]
  exact = gradients_in_double(load(folder).double(), inputs(case, data))
  names = [k for k in GRADIENTS if k in exact]
  gradients = {f"gradient_{i}": exact[k].astype(np.float32) for i, k in enumerate(names)}
  assert all(np.abs(g).max() > 0 for g in gradients.values())
  with torch.no_grad():
    text = torch.tensor(data["text"]).long()
    of_text = model(input_ids=text, use_cache=False, **token_types(case, text, torch.tensor([text.shape[1]]))).logits
    for row in range(2):  # padding and the other row do not matter
      alone = model(**inputs(case, data, slice(row, row + 1))).logits[0, :data["lengths"][row]].numpy()
      np.testing.assert_allclose(alone, logits[row, :data["lengths"][row]], rtol=0, atol=1e-5)
    other = dict(data, images=255 - data["images"])
    moved = np.abs(model(**inputs(case, other)).logits.numpy()[0] - logits[0])
    assert moved[data["prefix"][0]:].max() > 1e-2, "images must matter"

  old = json.dumps(config_4(json.loads((folder / "config.json").read_text())), indent=2, sort_keys=True) + "\n"
  (folder / "config_4.json").write_text(old)
  with tempfile.TemporaryDirectory() as copy, torch.no_grad():
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    (Path(copy) / "config.json").write_text(old)
    np.testing.assert_array_equal(load(Path(copy))(**inputs(case, data)).logits, out.logits.detach())

  versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
  np.savez_compressed(folder / "reference.npz", **data, logits=logits, text_logits=of_text.numpy(),
                      loss=out.loss.item(), gradient_names=["model." + k for k in names], versions=versions,
                      **gradients)
  print(f"{name}: {sum(f.stat().st_size for f in folder.iterdir())} bytes, |logits| up to {np.abs(logits).max():.2f}, "
        f"loss {out.loss.item():.3f}, gradients {[float(np.abs(g).max().round(4)) for g in gradients.values()]}")


if __name__ == "__main__":
  transformers.utils.logging.disable_progress_bar()
  transformers.utils.logging.set_verbosity_error()
  for case_name in sys.argv[1:] or CASES:
    make(case_name)
