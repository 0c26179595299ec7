"""Makes images.npz: what the image processors of transformers make of small images.

    python tests/input_pipeline/references/make_image_references.py

Needs `pip install transformers pillow`; it was run with transformers 5.23. The tests read the file alone.
"""

from pathlib import Path

import numpy as np
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

SIZE = 12
SHAPES = ((20, 33), (33, 20), (15, 16), (8, 25), (12, 12))


def main():
  rng = np.random.default_rng(0)
  square = {"height": SIZE, "width": SIZE}
  pixels_only = dict(do_rescale=False, do_normalize=False)
  processors = {
      "clip": CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size=square, **pixels_only),
      "siglip": SiglipImageProcessorPil(size=square, **pixels_only),
      "gemma3": Gemma3ImageProcessorPil(size=square, **pixels_only),
  }
  arrays = {}
  for i, shape in enumerate(SHAPES):
    arrays[f"image{i}"] = rng.integers(0, 256, (*shape, 3), np.uint8)
    for name, processor in processors.items():
      pixels = processor(Image.fromarray(arrays[f"image{i}"]), return_tensors="np")["pixel_values"]
      arrays[f"{name}{i}"] = np.asarray(pixels)[0].transpose(1, 2, 0).astype(np.uint8)
  np.savez_compressed(Path(__file__).parent / "images.npz", **arrays)


if __name__ == "__main__":
  main()
