"""Images: read from what rows say, checked, and made into square arrays of pixels, always the same ones.

    image = read(ImageRef("photo.jpg", "data/a.jsonl:7: image", Path("data")), max_pixels=10_000_000)
    pixels = to_pixels(image.data, Preprocess(size=224))      # uint8 [224, 224, 3]

Nothing is normalised here: that is the vision tower's business.

S pixels of a side.
"""

import base64
import binascii
import hashlib
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import ExifTags, Image

from input_pipeline.files import shown_names
from input_pipeline.images import augment, video_file
from input_pipeline.images.formats import ImageError, begins_as_image, decoded, opened
from input_pipeline.images.tiles import fitted_size, kept_size, limited_size, longest_size, squares
from trainer.errors import ConfigError

RESIZES = ("squash", "pad", "crop")
# What is done where the tower sees images in tiles (models/tiles.py), with Gemma 4's and with Pixtral's; and where it
# sees the squares that an image is cut into, and then all of it in one (`model.vision.split`).
KEEP, FIT, LIMIT, SPLIT = "keep", "fit", "limit", "split"
FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC,
           "lanczos": Image.Resampling.LANCZOS, "nearest": Image.Resampling.NEAREST}
MAX_BYTES = 1 << 30  # larger files are no images that anyone trains on
# Behind which key an image's content stands in an object, as in Hugging Face datasets and in chat APIs.
KEYS = ("bytes", "path", "image", "url", "base64", "image_url", "data")


class ImageRef(NamedTuple):
  """An image as a row has it: `value` (bytes, a path, base64, a data URL, or an object with one of these), `where` for
  messages, and the folder that relative paths start from. `video`: it is a video, see videos.py."""

  value: Any
  where: str
  folder: Path | None = None
  video: bool = False


class EncodedImage(NamedTuple):
  """The content of an image file, the files that lie beside the data and not in them, how many tokens it has, its rows
  and columns of tiles or squares; (0, 0): it is one; and how many of these there are, that with all of it, too.

  Of a video, `data` are those of video_file.py, rows and columns those of a frame, and `seconds` when those of each
  tile are seen, None: it is an image; `length`: whole seconds that all of it lasts.
  """

  data: bytes
  files: tuple[Path, ...] = ()
  tokens: int = 0
  grid: tuple[int, int] = (0, 0)
  squares: int = 1
  seconds: tuple[float, ...] | None = None
  length: int = 0


class Preprocess(NamedTuple):
  """How images become pixels.

  Attributes:
    size: S.
    resize: squash: to S × S whatever the shape; pad: the longer side to S, `fill` around it; crop: the shorter side to
      S, of which the middle is taken; keep, fit, limit, split: see `tiles.kept_size`, `fitted_size`, … `split_grid`.
    interpolation: a key of FILTERS; all average over what is made smaller. fill: red, green and blue of what pads.
    crop, flip: the least share of an image's area that augmentation takes; 1: all; and how often it is mirrored.
    color: brightness, contrast and saturation change by a factor of 1 ± that.
    min_pixels, max_pixels: with `keep` and `fit`, how many there are at least and at most.
    longest_side: with `squash` and `split`, the image is brought to this longer side before; 0: it is not. With `limit`
      it is at most that.
  """

  size: int
  resize: str = "squash"
  interpolation: str = "bicubic"
  fill: tuple[int, int, int] = (127, 127, 127)
  crop: float = 1.0
  flip: float = 0.0
  color: float = 0.0
  min_pixels: int = 0
  max_pixels: int = 0
  longest_side: int = 0

  @property
  def augments(self) -> bool:
    return self.crop < 1 or self.flip > 0 or self.color > 0

  def kept_size(self, width: int, height: int) -> tuple[int, int]:
    """The width and height, in multiples of S, of an image that keeps its shape. Raises ValueError: see `tiles`."""
    if self.resize == FIT:
      return fitted_size(width, height, self.size, self.max_pixels)
    if self.resize == LIMIT:
      return limited_size(width, height, self.size, self.longest_side)
    return kept_size(width, height, self.size, self.min_pixels, self.max_pixels)


def read(ref: ImageRef, max_pixels: int, checked: dict[bytes, tuple[int, int]] | None = None,
         measure: Callable[[int, int], tuple[int, tuple[int, int], int]] | None = None) -> EncodedImage:
  """The content of an image, after it was decoded once to see that it can be.

  Args:
    max_pixels: of the image as it is stored; more are refused before anything is decoded.
    checked: names of contents that were decoded before, which are not again, and their sizes; this one's is added.
    measure: `tokens`, `grid` and `squares` of an image of that width and height.

  Raises:
    ImageError: it is missing, no image, damaged, of a kind that is not read, or too large, or `measure` has raised
      ValueError; names the row and column.
  """
  data, file = content_of(ref, ref.value)
  checked, name = {} if checked is None else checked, hashlib.blake2b(data, digest_size=16).digest()
  where = ref.where if file is None else f"{ref.where} ({file})"
  if name not in checked:
    with opened(data, where, max_pixels, show_bytes=file is None) as image:
      stored = image.size
      upright = decoded(image, where, fast=True).size
      # Of a JPEG that came out smaller, which way up it is has to be asked for.
      turned = image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
      drafted = upright not in (stored, stored[::-1])
      checked[name] = (stored[::-1] if turned else stored) if drafted else upright
  try:
    return EncodedImage(data, () if file is None else (file,), *(() if measure is None else measure(*checked[name])))
  except ValueError as e:
    raise ImageError(f"{where}: {e}") from e


def to_pixels(data: bytes, how: Preprocess, key: Sequence[int | str] | None = None, where: str = "image"
              ) -> video_file.Shown:
  """An image's pixels, uint8 [S, S, 3], with `keep` and its like in multiples of S, with `split` [K, S, S, 3]: red,
  green, blue, upright, with white behind what is transparent. A video has its frames as they were read.

  Args:
    data: content of an image file, or of a video.
    how: see `Preprocess`.
    key: decides what augmentation draws; None: nothing is augmented.

  Raises:
    ImageError: it is no image that is read here.
  """
  if video_file.is_video(data):
    return video_file.unpacked(data)
  with opened(data, where, None) as image:
    return shape_pixels(decoded(image, where), how, key)


def shape_pixels(image: Image.Image, how: Preprocess, key: Sequence[int | str] | None = None) -> np.ndarray:
  """As `to_pixels`, of a decoded image of mode RGB."""
  draws = None if key is None or not how.augments else augment.uniform(key)
  whole = (0.0, 0.0, float(image.width), float(image.height))
  box = whole if draws is None else augment.random_box(image, how.crop, draws)
  if how.resize == SPLIT:  # which is not augmented, see `check_preprocess`
    return squares(image, how.longest_side, how.size, FILTERS[how.interpolation])
  pixels = np.array(_resized(image, how, box), np.uint8)
  if draws is None:
    return pixels
  if draws[4] < how.flip:
    pixels = pixels[:, ::-1]
  return augment.jittered(pixels, how.color, draws[5:8]) if how.color else np.ascontiguousarray(pixels)


class Images(Sequence):
  """The images of a prompt, as `to_pixels` gives each, decoded when they are asked for. Equal if their content is.

  Attributes:
    files: what was read.
    encoded: the contents of their files.
  """

  def __init__(self, files: Sequence[EncodedImage], how: Preprocess):
    self.files, self.encoded, self._how = tuple(files), tuple(image.data for image in files), how

  def __len__(self) -> int:
    return len(self.encoded)

  def __add__(self, other: "Images") -> "Images":
    return Images((*self.files, *other.files), self._how)

  def __getitem__(self, index):
    if isinstance(index, slice):
      return [to_pixels(data, self._how) for data in self.encoded[index]]
    return to_pixels(self.encoded[index], self._how)

  def __eq__(self, other) -> bool:
    return isinstance(other, Images) and (self.encoded, self._how) == (other.encoded, other._how)

  def __hash__(self) -> int:
    return hash((self.encoded, self._how))


def content_of(ref: ImageRef, value: Any) -> tuple[bytes, Path | None]:
  """The bytes that `value` stands for, and the file that they are in, if they are."""
  if isinstance(value, (bytes, bytearray, memoryview)):
    return bytes(value), None
  if isinstance(value, Mapping):
    given = [key for key in KEYS if value.get(key) is not None]
    if not given:
      raise ImageError(f"{ref.where} is an object with {shown_names(value, 'nothing')}; expected one of "
                       f"{', '.join(KEYS)}.")
    return content_of(ref, value[given[0]])
  if isinstance(value, Path):
    return _file(ref, value)
  if not isinstance(value, str) or not value:
    found = "null" if value is None else "empty" if value == "" else f"a {type(value).__name__}"
    raise ImageError(f"{ref.where} is {found}; expected a path, the bytes of an image file, base64 or a data URL.")
  if value.startswith("data:"):
    head, _, body = value.partition(",")
    if not head.endswith(";base64"):
      raise ImageError(f"{ref.where}: the data URL begins with {head[:40]!r}; expected base64, as in "
                       "'data:image/png;base64,…'.")
    try:
      return base64.b64decode("".join(body.split()), validate=True), None
    except (binascii.Error, ValueError) as e:
      raise ImageError(f"{ref.where}: not valid base64 ({e}): {body[:40]!r}.") from e
  if re.match(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]*://", value):
    raise ImageError(f"{ref.where} is the URL {value[:80]!r}. Nothing is downloaded: save the image and give its path.")
  if (data := _magic_base64(value)) is not None:
    return data, None
  return _file(ref, Path(value.removeprefix("file://")))


def _magic_base64(text: str) -> bytes | None:
  """The bytes, if `text` is base64 of something that begins as an image does."""
  try:
    if not begins_as_image(base64.b64decode(text[:16], validate=True)):
      return None
    return base64.b64decode("".join(text.split()), validate=True)
  except (binascii.Error, ValueError):
    return None


def _file(ref: ImageRef, path: Path) -> tuple[bytes, Path]:
  file = path
  try:
    file = (ref.folder or Path()) / path.expanduser()
    found = os.stat(file)  # before it is opened: a pipe or a device may have no end
    if not stat.S_ISREG(found.st_mode):
      raise OSError("it is not a regular file")
    if found.st_size > MAX_BYTES:
      raise OSError(f"it has {found.st_size:,} bytes, more than any image ({MAX_BYTES:,})")
    return file.read_bytes(), file
  except (OSError, ValueError, RuntimeError) as e:  # the last: there is no such user
    reason = getattr(e, "strerror", None) or str(e)
    beside = "" if path.is_absolute() else " Paths are relative to the folder of the data file."
    raise ImageError(f"{ref.where}: {str(file)[:200]!r} cannot be read: {reason}.{beside}") from e


def _resized(image: Image.Image, how: Preprocess, box: tuple[float, float, float, float]) -> Image.Image:
  """The part `box` (left, upper, right, lower) of the image as S × S pixels, or in the whole's size if it is kept."""
  size, resample = how.size, FILTERS[how.interpolation]
  width, height = box[2] - box[0], box[3] - box[1]
  if how.resize in (KEEP, FIT, LIMIT):
    return image.resize(how.kept_size(image.width, image.height), resample, box)
  if how.longest_side and how.resize == "squash":
    return image.resize(longest_size(width, height, how.longest_side), resample, box).resize((size, size), resample)
  if how.resize == "squash" or width == height:
    return image.resize((size, size), resample, box)
  longer, shorter = max(width, height), min(width, height)
  if how.resize == "pad":
    scaled = tuple(max(1, round(side * size / longer)) for side in (width, height))
    result = Image.new("RGB", (size, size), how.fill)
    result.paste(image.resize(scaled, resample, box), ((size - scaled[0]) // 2, (size - scaled[1]) // 2))
    return result
  # As image processors do it: the longer side is rounded down, and the middle taken.
  scaled = tuple(max(size, int(side * size / shorter)) for side in (width, height))
  if max(scaled) > 8 * size:  # of a very long image only the middle is made larger
    left, upper = (box[0] + (width - shorter) / 2, box[1] + (height - shorter) / 2)
    return image.resize((size, size), resample, (left, upper, left + shorter, upper + shorter))
  left, upper = ((side - size) // 2 for side in scaled)
  return image.resize(scaled, resample, box).crop((left, upper, left + size, upper + size))


def check_preprocess(how: Preprocess, only: str | None = None) -> Preprocess:
  """`how`, whose values are allowed; else raises ConfigError. `only`: what the tower asks for, KEEP say."""
  if only and how.resize != only:
    raise ConfigError(f"input.images.resize is {how.resize!r}, but " + (
        "images are cut. Leave it auto, or set model.vision.split=False." if only == SPLIT else
        "the tower sees images in their shapes. Use auto."))
  if only == SPLIT and how.augments:
    raise ConfigError("input.images.augment and model.vision.split exclude each other: the text says which place a "
                      "square has. Leave augment at crop=1, flip=0, color=0, or set model.vision.split=False.")
  for key, value, allowed in (("resize", how.resize, (only,) if only else RESIZES),
                              ("interpolation", how.interpolation, tuple(FILTERS))):
    if value not in allowed:
      raise ConfigError(f"input.images.{key} is {value!r}; allowed: auto, {', '.join(allowed)}.")
  for key, share, low in (("crop", how.crop, 0.01), ("flip", how.flip, 0.0), ("color", how.color, 0.0)):
    if not low <= share <= 1:
      raise ConfigError(f"input.images.augment.{key} is {share}; allowed: {low:g} to 1.")
  return how
