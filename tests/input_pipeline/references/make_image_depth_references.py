"""Writes image_depths.npz: one picture in many formats and depths, as libpng, tifffile, OpenJPEG and libavif write it.

    pip install imagecodecs tifffile
    python tests/input_pipeline/references/make_image_depth_references.py

The picture is 16 × 16, made of 4 × 4 squares, whose value is k / 15 of the largest for k in `levels` [4, 4, 3]. Names
are FORMAT_BITS_KIND. It was run with imagecodecs 2026.3.6; the tests read the file alone.
"""

from pathlib import Path

import imagecodecs
import numpy as np
import tifffile

LEVELS = np.arange(16).reshape(4, 4)
LEVELS = np.stack([LEVELS, LEVELS[::-1], LEVELS.T], axis=-1)


def picture(bits: int, kind: str) -> np.ndarray:
  values = np.rint(np.kron(LEVELS, np.ones((4, 4, 1))) * (2**bits - 1) / 15)
  opaque = np.full((16, 16, 1), 2**bits - 1)
  values = {"gray": values[..., 0], "graya": np.concatenate([values[..., :1], opaque], -1), "rgb": values,
            "rgba": np.concatenate([values, opaque], -1)}[kind]
  return values.astype(np.uint8 if bits <= 8 else np.uint16)


def tiff(**options) -> bytes:
  file = Path("made.tif")
  values = picture(16, options.pop("kind", "rgb"))
  if options.get("planarconfig") == "separate":
    values = values.transpose(2, 0, 1).copy()
  tifffile.imwrite(file, values, **options)
  try:
    return file.read_bytes()
  finally:
    file.unlink()


made = {f"png_{bits}_{kind}": imagecodecs.png_encode(picture(bits, kind))
        for bits in (8, 16) for kind in ("gray", "graya", "rgb", "rgba")}
made["apng_16_rgb"] = imagecodecs.apng_encode(np.stack([picture(16, "rgb")] * 2))
made["tiff_16_rgb"] = tiff(photometric="rgb")
made["tiff_16_deflate"] = tiff(photometric="rgb", compression="deflate")
made["tiff_16_planes"] = tiff(photometric="rgb", planarconfig="separate")
made["tiff_16_cmyk"] = tiff(photometric="separated", kind="rgba", planarconfig="contig")
for bits, kind in ((4, "rgb"), (8, "rgb"), (8, "gray"), (12, "rgb"), (16, "rgba")):
  for container in ("jp2", "j2k"):
    made[f"{container}_{bits}_{kind}"] = imagecodecs.jpeg2k_encode(
        picture(bits, kind), level=0, codecformat=container, bitspersample=bits, reversible=True)
for bits, kind in ((8, "rgb"), (8, "gray"), (10, "rgb"), (12, "gray")):
  made[f"avif_{bits}_{kind}"] = imagecodecs.avif_encode(picture(bits, kind), bitspersample=bits, level=100)
made["ppm_10_rgb"] = b"P6\n16 16 1023\n" + picture(10, "rgb").astype(">u2").tobytes()
made["ppm_4_rgb"] = b"P6\n16 16 15\n" + picture(4, "rgb").tobytes()
np.savez_compressed(Path(__file__).with_name("image_depths.npz"), levels=LEVELS,
                    **{name: np.frombuffer(data, np.uint8) for name, data in made.items()})
