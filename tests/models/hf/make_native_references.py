"""Makes the folders of tests/models/hf/native_references: tiny models that see images in their own sizes.

    python tests/models/hf/make_native_references.py [CASE …]

needs what make_references.py beside it needs, and Pillow. A case has config.json and safetensors; config_4.json, the
same as published folders have it; and reference.npz:

    images [2, N, S, S, 3]  uint8 tiles; row 0 has two images, row 1 one, and zeros behind them
    grid [2, N, 6]          what tiles they are: number of the image, row, column, rows, columns, time
    tokens [2, T]           with placeholders; lengths [2]: row 1 ends in padding; prefix [2]: loss is on those after it
    positions [2, T, 3]     of M-RoPE, of real tokens; not of Gemma 4, Mistral 3 and Pixtral, which have none
    logits [2, T, V]        of the padded batch, 0 where there is padding
    text [1, R], text_logits [1, R, V]    of a text without images
    loss, gradient_names, gradient_…      of the mean cross-entropy with labels -100 on prefix and padding
"""

import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import transformers
from make_references import EXPERTS, GEMMA4, SMALL, V, like, randomise, transformers_4
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

FOLDER = Path(__file__).parent / "native_references"
START, END, IMAGE, VIDEO = V - 4, V - 3, V - 2, V - 1
TOKENS = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)
PATCH, TILE = 4, 8
WIDTH = SMALL["hidden_size"]
# Heads of 8, whose 4 pairs are 1 of time, 2 of rows, 1 of columns.
TEXT = dict(rope_theta=500.0, num_attention_heads=2, num_key_value_heads=1)


# Of 8 pairs, the first 6 take turns.
TURNS = dict(mrope_interleaved=True, mrope_section=[4, 2, 2])
PLAIN = dict(depth=4, hidden_size=16, intermediate_size=20, out_hidden_size=WIDTH, num_heads=2, patch_size=PATCH)
DEEP = PLAIN | dict(deepstack_visual_indexes=[0, 2])


# Of heads of 16 the first half turns, by pairs that take turns; layers 0 and 2 have the delta rule.
GATED = dict(head_dim=16, num_hidden_layers=3, full_attention_interval=2, rms_norm_eps=0.02, linear_num_key_heads=2,
             linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=4, linear_conv_kernel_dim=3,
             tie_word_embeddings=False, rope_parameters=dict(
                 rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5, mrope_section=[2, 1, 1],
                 mrope_interleaved=True))


# Gemma 4's tower: images of up to 280 tokens may be as long as that. The first row's tiles outnumber the text's window.
POOLED = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
              head_dim=8, patch_size=PATCH, pooling_kernel_size=2, position_embedding_size=560, rms_norm_eps=0.2)
GEMMA = dict(model_type="gemma4", image_token_id=IMAGE, video_token_id=VIDEO, boi_token_id=START, eoi_token_id=END,
             audio_token_id=V + 1, boa_token_id=V + 2, eoa_token_index=V + 3)


def gemma(kinds: str, **changes) -> dict:
  types = [{"s": "sliding_attention", "f": "full_attention"}[kind] for kind in kinds]
  return like("gemma4_text", **GEMMA4 | dict(num_hidden_layers=len(kinds), layer_types=types, rms_norm_eps=0.1,
                                             tie_word_embeddings=True) | changes)


def text(model_type: str, **changes) -> dict:
  return like(model_type, **TEXT | changes)


CASES = {
    "qwen2_vl": dict(model_type="qwen2_vl", **TOKENS, text_config=text(
        "qwen2_vl_text", rope_scaling=dict(type="mrope", mrope_section=[1, 2, 1])), vision_config=dict(
            depth=2, embed_dim=16, hidden_size=WIDTH, mlp_ratio=2, num_heads=2, patch_size=PATCH)),
    "qwen2_5_vl": dict(model_type="qwen2_5_vl", **TOKENS, tie_word_embeddings=True, text_config=text(
        "qwen2_5_vl_text", tie_word_embeddings=True, rope_scaling=dict(
            rope_type="yarn", mrope_section=[1, 2, 1], factor=4.0, original_max_position_embeddings=16),
        max_position_embeddings=64), vision_config=dict(
            depth=3, hidden_size=16, intermediate_size=20, out_hidden_size=WIDTH, num_heads=2, patch_size=PATCH,
            window_size=2 * TILE, fullatt_block_indexes=[1])),
    "qwen3_vl": dict(model_type="qwen3_vl", **TOKENS, tie_word_embeddings=False, text_config=text(
        "qwen3_vl_text", num_hidden_layers=3, head_dim=16, rope_scaling=dict(**TURNS, rope_type="default")),
        vision_config=dict(**DEEP, num_position_embeddings=25)),
    "qwen3_vl_moe": dict(model_type="qwen3_vl_moe", **TOKENS, tie_word_embeddings=False, text_config=text(
        "qwen3_vl_moe_text", num_hidden_layers=3, head_dim=16, **EXPERTS, tie_word_embeddings=False, rope_scaling=dict(
            **TURNS | dict(mrope_section=[2, 3, 3]), rope_type="default")),
        vision_config=dict(**DEEP, num_position_embeddings=9)),
    "qwen3_5": dict(model_type="qwen3_5", **TOKENS, tie_word_embeddings=False, text_config=text(
        "qwen3_5_text", **GATED), vision_config=dict(**PLAIN, num_position_embeddings=25)),
    "qwen3_5_moe": dict(model_type="qwen3_5_moe", **TOKENS, tie_word_embeddings=False, text_config=text(
        "qwen3_5_moe_text", **GATED, **EXPERTS, shared_expert_intermediate_size=20),
        vision_config=dict(**PLAIN, num_position_embeddings=9)),
    # As E2B and E4B, and as 31B: layers that clip, or means that are made standard.
    "gemma4": dict(**GEMMA, text_config=gemma(
        "sff", hidden_size_per_layer_input=6, vocab_size_per_layer_input=V, num_kv_shared_layers=1,
        use_double_wide_mlp=True), vision_config=dict(**POOLED, use_clipped_linears=True)),
    "gemma4_local": dict(**GEMMA, text_config=gemma(
        "sf", attention_k_eq_v=True, num_global_key_value_heads=1, use_bidirectional_attention="vision"),
        vision_config=dict(**POOLED, standardize=True)),
    "mistral3": dict(
        model_type="mistral3", image_token_index=IMAGE, tie_word_embeddings=False, spatial_merge_size=2,
        multimodal_projector_bias=True, text_config=text("mistral", rms_norm_eps=0.03, head_dim=8, sliding_window=None),
        vision_config=dict(model_type="pixtral", hidden_size=16, intermediate_size=20, num_hidden_layers=2,
                           num_attention_heads=2, patch_size=PATCH, image_size=64, hidden_act="silu")),
    # Each patch is a token: of the size of a tile here.
    "pixtral": dict(
        model_type="llava", image_token_index=IMAGE, tie_word_embeddings=False, vision_feature_layer=-1,
        vision_feature_select_strategy="full", image_seq_length=1,
        text_config=text("mistral", head_dim=8, sliding_window=None),
        vision_config=dict(model_type="pixtral", hidden_size=16, intermediate_size=20, num_hidden_layers=2,
                           num_attention_heads=2, patch_size=TILE, image_size=64)),
}
# Rows and columns of tiles of each row's images.
SIZES = (((3, 2), (1, 3)), ((4, 5),))


def save(case: dict, folder: Path) -> None:
  config = dict(case)
  kind = type(AutoConfig.for_model(config.pop("model_type")))
  texts = {k: v for k, v in config.pop("text_config").items() if k != "model_type" or kind.model_type == "llava"}
  model = AutoModelForImageTextToText.from_config(kind(text_config=texts, **config))
  generator = torch.Generator().manual_seed(0)
  randomise(model, generator)
  with torch.no_grad():
    if folder.name.startswith("gemma4"):
      of_gemma4(model.model, generator)
    elif folder.name in ("mistral3", "pixtral"):
      kernel = model.model.vision_tower.patch_conv.weight
      kernel.copy_(1.2 * torch.randn(kernel.shape, generator=generator) / kernel[0].numel() ** 0.5)
    else:
      kernel = model.model.visual.patch_embed.proj.weight
      kernel.copy_(1.2 * torch.randn(kernel.shape, generator=generator) / kernel[0].numel() ** 0.5)
  model.save_pretrained(folder)
  (folder / "generation_config.json").unlink(missing_ok=True)
  tensors = safetensors.torch.load_file(folder / "model.safetensors")
  for name in tensors:
    if "qwen3_vl" in folder.name and re.search(r"experts\.(gate_up|down)_proj$", name):
      # inputs first, as published; transformers 5 saves the other
      tensors[name] = tensors[name].transpose(1, 2).contiguous()
  safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def of_gemma4(model: torch.nn.Module, generator: torch.Generator) -> None:
  """Kernels, bounds that are reached but for one that is not there, and what is standard."""
  tower = model.vision_tower
  for kernel in (tower.patch_embedder.input_proj.weight, model.embed_vision.embedding_projection.weight):
    kernel.copy_(1.2 * torch.randn(kernel.shape, generator=generator) / kernel.shape[1] ** 0.5)
  tower.patch_embedder.position_embedding_table[:, 32:] = 0  # of longer images than here
  for name, p in model.named_parameters():  # scores are not divided by anything: as small as where they are
    if name.endswith("q_norm.weight"):
      p.mul_(0.25)
  for name, b in tower.named_buffers():
    if name.endswith(("_min", "_max")):
      b.copy_((-1 if name.endswith("min") else 1) * (0.8 + 0.5 * torch.rand(b.shape, generator=generator)))
    if name.startswith("std_"):
      b.copy_(0.3 * torch.randn(b.shape, generator=generator) + name.endswith("scale"))
  if tower.config.use_clipped_linears:
    tower.encoder.layers[0].self_attn.q_proj.input_max.fill_(float("inf"))


def config_4(config: dict) -> dict:
  """The same config.json as published folders have it: the text model's entries beside the others."""
  outer = {k: v for k, v in config.items() if k not in ("dtype", "text_config", "vision_config")}
  if config["model_type"] == "gemma4":
    return gemma4_4(config, outer)
  if config["model_type"] in ("mistral3", "llava"):
    return mistral3_4(config, outer)
  if config["model_type"].startswith("qwen3"):
    return qwen3_4(config, outer)
  given = config["text_config"]
  parameters = given["rope_parameters"]
  text = transformers_4({k: v for k, v in given.items() if k != "rope_parameters"} | dict(dtype="float32"))
  text.pop("layer_types", None)
  text.pop("model_type")
  scaling = {k: v for k, v in parameters.items() if k not in ("rope_theta", "rope_type")}
  scaling["type"] = "mrope" if parameters["rope_type"] == "default" else parameters["rope_type"]
  vision = {k: v for k, v in config["vision_config"].items()
            if k not in ("dtype", "in_channels", "model_type", "rope_parameters", "initializer_range")}
  vision |= dict(in_chans=3, spatial_patch_size=PATCH)
  return {**text, **outer, "rope_theta": parameters["rope_theta"], "rope_scaling": scaling, "vision_config": vision,
          "torch_dtype": "float32", "transformers_version": "4.41.2"}


def qwen3_4(config: dict, outer: dict) -> dict:
  """Of Qwen3-VL and 3.5, whose text model has an object of its own there, too."""
  text = {k: v for k, v in config["text_config"].items() if k not in ("layer_types", "rope_parameters")}
  parameters = dict(config["text_config"]["rope_parameters"])
  text |= dict(rope_theta=parameters.pop("rope_theta"), rope_scaling=parameters, dtype="float32")
  if "layer_types" in config["text_config"]:
    text["full_attention_interval"] = GATED["full_attention_interval"]
  vision = {k: v for k, v in config["vision_config"].items() if k not in ("dtype", "rope_parameters")}
  return {**outer, "text_config": text, "vision_config": vision | dict(model_type=config["model_type"]),
          "transformers_version": "4.57.0"}


def gemma4_4(config: dict, outer: dict) -> dict:
  """Of Gemma 4, with what published folders have beside that."""
  given, vision = config["text_config"], {k: v for k, v in config["vision_config"].items() if k != "dtype"}
  text = {k: v for k, v in given.items() if k != "per_layer_config"} | dict(dtype="float32")
  full = next(iter(given["per_layer_config"].values()))
  text |= dict(global_head_dim=full["head_dim"], num_global_key_value_heads=full.get("num_key_value_heads"))
  vision |= dict(rope_parameters=dict(rope_theta=100.0, rope_type="default"), default_output_length=280)
  return {**outer, "text_config": text, "vision_config": vision, "vision_soft_tokens_per_image": 280,
          "dtype": "float32", "transformers_version": "5.5.0.dev0"}


def mistral3_4(config: dict, outer: dict) -> dict:
  """Of Mistral Small 3.1 and Pixtral, whose files say rope_theta of both."""
  text, vision = ({k: v for k, v in config[f"{part}_config"].items() if k not in ("dtype", "rope_parameters")}
                  for part in ("text", "vision"))
  return {**outer, "text_config": text | dict(rope_theta=config["text_config"]["rope_parameters"]["rope_theta"]),
          "vision_config": vision | dict(rope_theta=10000.0), "torch_dtype": "float32",
          "transformers_version": "4.50.0.dev0"}


def load(folder: Path) -> torch.nn.Module:
  model, told = AutoModelForImageTextToText.from_pretrained(
      folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
  assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
  return model.eval()


def batch() -> tuple[dict[str, np.ndarray], list[list[np.ndarray]]]:
  """The arrays, and the images of each row."""
  rng = np.random.default_rng(1)
  pictures = [[rng.integers(0, 256, (r * TILE, c * TILE, 3)).astype(np.uint8) for r, c in row] for row in SIZES]
  rows, prefix = [], []
  for sizes, parts, suffix in zip(SIZES, ((2, 3), (1,)), (6, 5), strict=True):
    ids: list[int] = []
    for (r, c), before in zip(sizes, parts, strict=True):
      ids += [*rng.integers(3, START, before), START, *[IMAGE] * (r * c), END]
    ids += [*rng.integers(3, START, 2)]
    prefix.append(len(ids))
    rows.append(np.array([*ids, *rng.integers(3, START, suffix)]))
  lengths = [len(row) for row in rows]
  tokens = np.stack([np.pad(row, (0, max(lengths) - len(row))) for row in rows]).astype(np.int32)
  most = max(sum(r * c for r, c in row) for row in SIZES)
  images, grid = np.zeros((2, most, TILE, TILE, 3), np.uint8), np.zeros((2, most, 6), np.int32)
  for i, row in enumerate(pictures):
    n = 0
    for number, picture in enumerate(row, 1):
      r, c = SIZES[i][number - 1]
      for y in range(r):
        for x in range(c):
          images[i, n] = picture[y * TILE:(y + 1) * TILE, x * TILE:(x + 1) * TILE]
          grid[i, n], n = (number, y, x, r, c, 0), n + 1
  return dict(images=images, grid=grid, tokens=tokens, lengths=np.array(lengths), prefix=np.array(prefix),
              text=rng.integers(3, START, (1, 9)).astype(np.int32)), pictures


def images_of(name: str, pictures: list[np.ndarray]) -> dict:
  """What transformers' forward takes for pictures, which have their sizes already."""
  own = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3) if name.startswith("qwen3") else {}
  processor = Qwen2VLImageProcessorPil(do_resize=False, patch_size=PATCH, **own)
  if name in ("mistral3", "pixtral"):
    processor = PixtralImageProcessorPil(do_resize=False)
  if name.startswith("gemma4"):
    processor = Gemma4ImageProcessorPil(do_resize=False, patch_size=PATCH, pooling_kernel_size=2, max_soft_tokens=70)
  seen = processor([Image.fromarray(picture) for picture in pictures], return_tensors="pt")
  kept = ("pixel_values", "image_grid_thw", "image_position_ids", "image_sizes")
  return {key: seen[key] for key in kept if key in seen}


def inputs(name: str, data: dict[str, np.ndarray], pictures: list[list[np.ndarray]], rows: slice = slice(None)) -> dict:
  """What transformers' forward takes for some of the rows."""
  tokens, lengths, prefix = (torch.tensor(data[key][rows]).long() for key in ("tokens", "lengths", "prefix"))
  seen = images_of(name, [picture for row in pictures[rows] for picture in row])
  place = torch.arange(tokens.shape[1])[None]
  mask = place < lengths[:, None]
  labels = torch.where(mask & (place >= prefix[:, None]), tokens, -100)
  return dict(input_ids=tokens, **seen, attention_mask=mask.long(), labels=labels, use_cache=False,
              mm_token_type_ids=(tokens == IMAGE).int())


GRADIENTS = ("language_model.layers.0.self_attn.q_proj.weight", "visual.patch_embed.proj.weight",
             "visual.blocks.0.attn.qkv.weight", "visual.blocks.0.attn.qkv.bias", "visual.blocks.1.norm1.weight",
             "visual.blocks.0.mlp.fc1.weight", "visual.blocks.0.mlp.gate_proj.weight", "visual.merger.ln_q.weight",
             "visual.merger.mlp.0.weight", "visual.merger.mlp.2.bias", "visual.pos_embed.weight",
             "visual.blocks.0.mlp.linear_fc1.weight", "visual.merger.linear_fc1.weight",
             "visual.deepstack_merger_list.1.norm.weight", "visual.deepstack_merger_list.1.linear_fc1.weight",
             "visual.deepstack_merger_list.0.linear_fc2.bias", "language_model.layers.0.linear_attn.in_proj_qkv.weight",
             "language_model.layers.2.linear_attn.A_log", "vision_tower.patch_embedder.input_proj.weight",
             "vision_tower.patch_embedder.position_embedding_table",
             "vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight",
             "vision_tower.encoder.layers.1.self_attn.v_proj.linear.weight",
             "vision_tower.encoder.layers.1.input_layernorm.weight",
             "vision_tower.encoder.layers.0.self_attn.q_norm.weight",
             "vision_tower.encoder.layers.0.mlp.gate_proj.linear.weight", "embed_vision.embedding_projection.weight",
             "vision_tower.patch_conv.weight", "vision_tower.ln_pre.weight",
             "vision_tower.transformer.layers.0.attention.q_proj.weight",
             "vision_tower.transformer.layers.1.ffn_norm.weight",
             "vision_tower.transformer.layers.0.feed_forward.gate_proj.weight", "multi_modal_projector.norm.weight",
             "multi_modal_projector.patch_merger.merging_layer.weight", "multi_modal_projector.linear_1.weight",
             "multi_modal_projector.linear_2.bias", "language_model.embed_tokens_per_layer.weight",
             "language_model.per_layer_model_projection.weight")


def of_names(model: torch.nn.Module) -> dict[str, np.ndarray]:
  """Gradients by the names of GRADIENTS that the model has; each is above 0 somewhere."""
  parameters = {k.removeprefix("model."): p for k, p in model.named_parameters()}
  found = {k: parameters[k].grad.numpy() for k in GRADIENTS if k in parameters}
  assert all(np.abs(g).max() > 0 for g in found.values())
  return found


def make(name: str) -> None:
  folder, case = FOLDER / name, CASES[name]
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir(parents=True)
  save(case, folder)
  data, pictures = batch()
  model = load(folder)
  given = inputs(name, data, pictures)
  out = model(**given)
  out.loss.backward()
  real = np.arange(data["tokens"].shape[1]) < data["lengths"][:, None]
  logits = out.logits.detach().numpy() * real[..., None]
  if name.startswith("qwen"):
    positions, _ = model.model.get_rope_index(given["input_ids"], mm_token_type_ids=given["mm_token_type_ids"],
                                              image_grid_thw=given["image_grid_thw"],
                                              attention_mask=given["attention_mask"])
    data["positions"] = positions.permute(1, 2, 0).numpy().astype(np.int32) * real[..., None]
  found = of_names(model)
  names, gradients = list(found), {f"gradient_{i}": g for i, g in enumerate(found.values())}
  with torch.no_grad():
    of_text = model(input_ids=torch.tensor(data["text"]).long(), use_cache=False).logits
    for row in range(2):  # padding and the other row do not matter
      alone = model(**inputs(name, data, pictures, slice(row, row + 1))).logits[0, :data["lengths"][row]].numpy()
      np.testing.assert_allclose(alone, logits[row, :data["lengths"][row]], rtol=0, atol=1e-5)
    other = [[255 - picture for picture in row] for row in pictures]
    moved = np.abs(model(**inputs(name, data, other)).logits.numpy()[0] - logits[0])
    assert moved[data["prefix"][0]:].max() > 1e-2, "images must matter"

  old = json.dumps(config_4(json.loads((folder / "config.json").read_text())), indent=2, sort_keys=True) + "\n"
  (folder / "config_4.json").write_text(old)
  with tempfile.TemporaryDirectory() as copy, torch.no_grad():
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    (Path(copy) / "config.json").write_text(old)
    np.testing.assert_array_equal(load(Path(copy))(**given).logits, out.logits.detach())

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
