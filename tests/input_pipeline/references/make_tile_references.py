"""Makes tiles.npz: what the image processors of Qwen2-VL and SmolVLM in transformers make of small images.

    python tests/input_pipeline/references/make_tile_references.py

Needs `pip install transformers pillow`; it was run with transformers 5.24. The tests read the file alone.
"""

from pathlib import Path

import numpy as np
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

# Rows and columns: too few pixels, too many, long ones, half of a tile beyond a multiple, and one that fits.
SHAPES = ((9, 14), (70, 41), (6, 90), (90, 6), (20, 28), (24, 16))


def main():
  rng = np.random.default_rng(0)
  processor = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=dict(shortest_edge=192, longest_edge=768))
  # Images as one square of 16 pixels, brought to a longer side of 40 before.
  square = SmolVLMImageProcessorPil(do_image_splitting=False, size=dict(longest_edge=40),
                                    max_image_size=dict(longest_edge=16))
  text = get_image_prompt_string(0, 0, 4, "<fake_token_around_image>", "<image>", "<global-img>")
  arrays = {"square_text": np.array(text)}
  for i, shape in enumerate(SHAPES):
    arrays[f"image{i}"] = rng.integers(0, 256, (*shape, 3), np.uint8)
    made = processor(Image.fromarray(arrays[f"image{i}"]), return_tensors="np")
    arrays[f"grid{i}"], arrays[f"values{i}"] = made["image_grid_thw"][0], made["pixel_values"].astype(np.float32)
    made = square(Image.fromarray(arrays[f"image{i}"]), return_tensors="np")
    arrays[f"square{i}"] = made["pixel_values"][0, 0].astype(np.float32)
  np.savez_compressed(Path(__file__).parent / "tiles.npz", **arrays)


if __name__ == "__main__":
  main()
