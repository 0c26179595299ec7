"""Makes tiles.npz: what image processors of transformers (Qwen2-VL, SmolVLM, Gemma 4, Pixtral) make of small images.

    python tests/input_pipeline/references/make_tile_references.py

Needs `pip install transformers pillow`; it was run with transformers 5.24. The tests read the file alone.
"""

import sys
import types
from pathlib import Path

import numpy as np
from PIL import Image
from transformers.models.gemma4.image_processing_pil_gemma4 import (
  Gemma4ImageProcessorPil,
  get_aspect_ratio_preserving_size,
)
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.pixtral import image_processing_pil_pixtral as pixtral
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

sys.modules["transformers.models.pixtral.image_processing_pixtral"] = pixtral  # the other one takes torchvision
from transformers.models.pixtral.processing_pixtral import PixtralProcessor  # noqa: E402

# Rows and columns: too few pixels, too many, long ones, half of a tile beyond a multiple, and one that fits.
SHAPES = ((9, 14), (70, 41), (6, 90), (90, 6), (20, 28), (24, 16))


def main():
  rng = np.random.default_rng(0)
  processor = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=dict(shortest_edge=192, longest_edge=768))
  # Images as one square of 16 pixels, brought to a longer side of 40 before.
  square = SmolVLMImageProcessorPil(do_image_splitting=False, size=dict(longest_edge=40),
                                    max_image_size=dict(longest_edge=16))
  text = get_image_prompt_string(0, 0, 4, "<fake_token_around_image>", "<image>", "<global-img>")
  # As large as 70 tokens of 8 × 8 pixels allow.
  fitted = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
  names = types.SimpleNamespace(boi_token="<|image>", image_token="<|image|>", eoi_token="<image|>")
  arrays = {"square_text": np.array(text), "fitted_text": np.array(
      Gemma4Processor.replace_image_token(names, {"num_soft_tokens_per_image": [3]}, 0))}
  # No side longer than 40, up to multiples of 8 pixels.
  limited = pixtral.PixtralImageProcessorPil(patch_size=dict(height=8, width=8), size=dict(longest_edge=40),
                                             do_normalize=False)
  names = types.SimpleNamespace(image_token="[IMG]", image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]",
                                patch_size=4, spatial_merge_size=2)
  arrays["limited_text"] = np.array(PixtralProcessor.replace_image_token(names, {"image_sizes": [(16, 24)]}, 0))
  sizes = np.array([[w, h] for w in (1, 7, 48, 100, 331, 1000, 20000) for h in (1, 13, 47, 240, 999, 31000)])
  arrays["sizes"] = sizes
  arrays["fitted_sizes"] = np.array([get_aspect_ratio_preserving_size(h, w, 16, 280 * 9, 3)[::-1] for w, h in sizes])
  arrays["limited_sizes"] = np.array([pixtral.get_resize_output_image_size(
      np.broadcast_to(np.zeros(1), (3, h, w)), (1540, 1540), (28, 28), "channels_first")[::-1] for w, h in sizes])
  for i, shape in enumerate(SHAPES):
    arrays[f"image{i}"] = rng.integers(0, 256, (*shape, 3), np.uint8)
    made = processor(Image.fromarray(arrays[f"image{i}"]), return_tensors="np")
    arrays[f"grid{i}"], arrays[f"values{i}"] = made["image_grid_thw"][0], made["pixel_values"].astype(np.float32)
    made = fitted(Image.fromarray(arrays[f"image{i}"]), return_tensors="np")
    arrays[f"fitted{i}"] = np.round(made["pixel_values"][0] * 255).astype(np.uint8)
    assert np.abs(made["pixel_values"][0] * 255 - arrays[f"fitted{i}"]).max() < 1e-4
    arrays[f"places{i}"] = made["image_position_ids"][0]
    made = limited(Image.fromarray(arrays[f"image{i}"]), return_tensors="np")
    arrays[f"limited{i}"] = np.round(made["pixel_values"][0] * 255).astype(np.uint8).transpose(1, 2, 0)
    made = square(Image.fromarray(arrays[f"image{i}"]), return_tensors="np")
    arrays[f"square{i}"] = made["pixel_values"][0, 0].astype(np.float32)
  np.savez_compressed(Path(__file__).parent / "tiles.npz", **arrays)


if __name__ == "__main__":
  main()
