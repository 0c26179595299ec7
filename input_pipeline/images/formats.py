"""Files of images: which formats are read, and how they are decoded: to 8 bits a channel, upright, on white."""

import io
import re
import warnings

from PIL import Image, ImageOps, PpmImagePlugin, TiffImagePlugin, features

from trainer.errors import DataError


def _has(library: str) -> bool:
  """Whether Pillow was built with it."""
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a Pillow that has never heard of it
    return bool(features.check(library))


# Formats that are read; others (Postscript and so on) would start programs. Some builds of Pillow lack the last two.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM",
           *(name for name, library in (("JPEG2000", "jpg_2000"), ("AVIF", "avif")) if _has(library)))
# How files of these formats begin; an AVIF's first four bytes are a length.
MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"P4", b"P5", b"P6",
         b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51")
AVIF = (b"ftypavif", b"ftypavis")
# Modes with at most 8 bits a channel. A file of one of them may have more, which Pillow makes 8 of: see `_bits`.
MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")


class ImageError(DataError):
  """An image that cannot be used; `input.images.on_error` says what then."""


def begins_as_image(data: bytes) -> bool:
  """Whether they may be one of FORMATS."""
  return data.startswith(MAGIC) or data[4:12] in AVIF


def opened(data: bytes, where: str, max_pixels: int | None, show_bytes: bool = True) -> Image.Image:
  """The image, of which only the head is read yet. `show_bytes`: messages may show how the data begin. Not those of a
  file that a row names, which may be any."""
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # max_pixels is the limit here
      image = Image.open(io.BytesIO(data), formats=FORMATS)
      bits = _bits(image, data)
  except Image.DecompressionBombError as e:
    raise ImageError(f"{where}: a decompression bomb: {e}") from e
  except Exception as e:  # Pillow raises many kinds, those of struct and zlib among them
    known = begins_as_image(data)
    kind = ("a damaged or truncated image, or of a kind that Pillow does not read" if known else
            f"no image of the formats {', '.join(FORMATS)}")
    begin = f" that begin with {data[:8]!r}" if show_bytes or known else ""
    raise ImageError(f"{where}: {len(data)} bytes{begin} are {kind}.") from e
  if max_pixels is not None and image.width * image.height > max_pixels:
    raise ImageError(f"{where}: {image.width} × {image.height} pixels, more than input.images.max_pixels={max_pixels}. "
                     "Make it smaller, or raise the limit.")
  if image.mode not in MODES:
    raise ImageError(f"{where}: its mode is {image.mode!r}; expected 8 bits a channel ({', '.join(MODES)}). {_CONVERT}")
  if bits > 8 or bits < 8 and image.format == "JPEG2000":  # Pillow makes 240 of the white of 4 bits there
    raise ImageError(f"{where}: {image.format} of {bits} bits a channel; expected 8"
                     f"{'' if image.format == 'JPEG2000' else ' or fewer'}. {_CONVERT}")
  if image.format == "PNG" and image.mode == "L" and 0 < image.info.get("transparency", 0) < 2**bits:
    image.info["transparency"] *= 255 // (2**bits - 1)  # the gray that is transparent, as Pillow scales pixels
  return image


_CONVERT = "Convert it to 8 bits, or set input.images.on_error='drop'."


def _bits(image: Image.Image, data: bytes) -> int:
  """The most bits that a channel has in the file, whatever Pillow makes of them.

  Pillow keeps the high byte of RGB (A) and CMYK in PNG and TIFF, mixes up planes of TIFF, makes black of the white of
  JPEG 2000, and scales PPM and AVIF; so what is right differs, and none of it is known to be what was meant.
  """
  if image.format == "PNG":
    return data[24]
  if isinstance(image, TiffImagePlugin.TiffImageFile):
    return max(image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (1,)))
  if isinstance(image, PpmImagePlugin.PpmImageFile):  # the largest value, in what the decoder is told
    maximum = image.tile[0][3]
    return max((x.bit_length() for x in maximum if isinstance(x, int)), default=8) if isinstance(maximum, tuple) else 8
  if image.format == "JPEG2000":  # ISO 15444-1, A.5.1: the marker SIZ, three bytes for each component
    at = data.index(b"\xff\x4f\xff\x51")
    depths = {x & 127 for x in data[at + 42:at + 42 + 3 * int.from_bytes(data[at + 40:at + 42]):3]}
    return max(depths) + 1 if max(depths) >= 8 else min(depths) + 1
  if image.format == "AVIF":  # AV1-ISOBMFF, 2.3: av1C has the bits high_bitdepth and twelve_bit
    found = [x[1][0] for x in re.finditer(rb"av1C\x81.(.)", data, re.DOTALL)]
    return 12 if any(x & 32 for x in found) else 10 if any(x & 64 for x in found) else 8
  return 8


def decoded(image: Image.Image, where: str, fast: bool = False) -> Image.Image:
  """The image as RGB, upright, on white. `fast`: a JPEG may come out smaller."""
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # of broken metadata, which does not matter
      if fast:
        image.draft("RGB", (64, 64))
      image.load()
      upright = ImageOps.exif_transpose(image)
      if upright.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in upright.info:
        upright = upright.convert("RGBA")
        white = Image.new("RGBA", upright.size, (255, 255, 255, 255))
        upright = Image.alpha_composite(white, upright)
      return upright.convert("RGB")
  except Exception as e:  # of many kinds, see above
    raise ImageError(f"{where}: a damaged or truncated {image.format} of {image.width} × {image.height} pixels: {e}. "
                     "Fetch it again, or set input.images.on_error='drop'.") from e
