"""Augmentation of images: what is drawn depends on a key alone, and is the same on every machine."""

import hashlib
from collections.abc import Sequence

import numpy as np
from PIL import Image

# Crops of augmentation are at most so much wider than high, relative to the image, and the other way round.
MAX_ASPECT = 4 / 3


def uniform(key: Sequence[int | str]) -> np.ndarray:
  """Eight numbers from 0 to 1 that depend on `key` alone, on every machine."""
  digest = hashlib.blake2b(repr(tuple(key)).encode(), digest_size=16).digest()
  words = np.random.Philox(key=np.frombuffer(digest, "<u8").astype(np.uint64)).random_raw(8)
  return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def random_box(image: Image.Image, least: float, draws: np.ndarray) -> tuple[float, float, float, float]:
  """A part of the image of at least the share `least` of its area, at most MAX_ASPECT out of its shape."""
  area = least + (1 - least) * draws[0]
  aspect = MAX_ASPECT ** (2 * draws[1] - 1) if least < 1 else 1.0
  wide, high = min(1.0, (area * aspect) ** 0.5), min(1.0, (area / aspect) ** 0.5)
  wide, high = min(1.0, max(wide, area / high)), min(1.0, max(high, area / wide))
  width, height = max(1.0, wide * image.width), max(1.0, high * image.height)
  left, upper = draws[2] * (image.width - width), draws[3] * (image.height - height)
  return left, upper, min(left + width, image.width), min(upper + height, image.height)


def jittered(pixels: np.ndarray, color: float, draws: np.ndarray) -> np.ndarray:
  """Brightness, contrast and saturation times factors from 1 - color to 1 + color."""
  brightness, contrast, saturation = (np.float32(1 + color * (2 * d - 1)) for d in draws)
  x = pixels.astype(np.float32) * brightness
  gray = (x @ np.array([0.299, 0.587, 0.114], np.float32))[..., None]
  x = gray + (x - gray) * saturation
  mean = np.float32(gray.mean(dtype=np.float64))
  return np.clip(np.rint(mean + (x - mean) * contrast), 0, 255).astype(np.uint8)
