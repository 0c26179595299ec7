"""Where images stand in texts: in rows, in messages, in tokens.

In a text an image is one character that no text has, IMAGE; in token ids it is a run of IMAGE_ID, which `finish` turns
into the model's placeholder. So texts are cut, compared and tokenised with their images as without.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging
from ml_collections import ConfigDict

from input_pipeline.images.images import (
  FIT,
  FORMATS,
  KEEP,
  KEYS,
  LIMIT,
  SPLIT,
  EncodedImage,
  ImageError,
  ImageRef,
  Preprocess,
  check_preprocess,
  read,
)
from input_pipeline.images.tiles import split_grid
from input_pipeline.tokenizer.tokenizer import Tokenizer
from trainer.errors import ConfigError, DataError, one_of

# A noncharacter of Unicode, not among those of `special_tokens`; and an id that no token has.
IMAGE, IMAGE_ID = "\U0001fffe", -1
ON_ERROR, IMAGES_AT = ("error", "drop"), ("auto", "bos", "text")
BAD_IMAGE = "a bad image"
# Of parts of a message's content; and of those that are films, which are columns of rows, too.
PART_TYPES = ("image", "image_url")
FILMS = ("video", "videos", "video_url", "input_video")
NO_FILMS = "a film, which is not read. Allowed: images and text. Give some of its frames as images, in their order."
# What stands around an image's tokens in Gemma 3.
GEMMA3 = ("<start_of_image>", "<end_of_image>")
# And in the models of Qwen.
QWEN = ("<|vision_start|>", "<|vision_end|>")
# And in Gemma 4.
GEMMA4 = ("<|image>", "<image|>")
# What stands behind each row of an image's tokens in Mistral 3, and behind the last.
PIXTRAL = ("[IMG_BREAK]", "[IMG_END]")
# What towers ask for that see images in tiles.
IN_TILES = {"qwen2_vl": KEEP, "qwen2_5_vl": KEEP, "qwen3_vl": KEEP, "gemma4": FIT, "pixtral": LIMIT}
# And in SmolVLM: before each square of an image there are the first and the square's place, or the second.
FAKE, WHOLE = SMOLVLM = ("<fake_token_around_image>", "<global-img>")


class ImageFormat:
  """How the model of a config sees images in texts, and which images are accepted.

  Args:
    config: the whole config, of which `model.vision`, `chat` and `input.images` count.
    tokenizer: what texts are tokenised with; None if they are not.

  Attributes:
    token, each: the placeholder's id (None without a tokenizer), and how many of it an image takes, or each square of
      it; 0: as many as its size asks for.
    split: an image is cut into squares, with texts between the tokens of these.
    between: there are texts between the tokens of an image: with `split`, or behind each row of tiles.
    before, after: texts around these.
    marker: what stands for an image in the texts of rows.
    at_bos: the images of rows without a template stand before BOS.
    prefix_end: what stands between a prefix and its suffix.
    preprocess: how images become pixels, without augmentation.

  Raises:
    ConfigError: a key that is not set, or a value that is not allowed.
  """

  def __init__(self, config: ConfigDict, tokenizer: Tokenizer | None):
    vision, chat, options = config.model.vision, config.chat, config.input.images
    self.each, self.split, self.preprocess = tokens_per_image(vision), bool(vision.split), preprocess_of(config)
    self._tokenizer, self._between = tokenizer, {}
    self.marker, self.prefix_end = chat.image_marker, chat.prefix_end
    for key, value, allowed in (("input.images.on_error", options.on_error, ON_ERROR),
                                ("chat.images_at", chat.images_at, IMAGES_AT)):
      one_of(f"{key}", value, allowed)
    if not self.marker or options.max_pixels < 1:
      raise ConfigError(f"chat.image_marker is {self.marker!r} and input.images.max_pixels {options.max_pixels}; the "
                        "one must not be empty, the other must be at least 1.")
    self.drops, self._max_pixels = options.on_error == "drop", options.max_pixels
    self._checked: dict[bytes, tuple[int, int]] = {}
    self.at_bos = vision.attention == "prefix" if chat.images_at == "auto" else chat.images_at == "bos"
    specials = () if tokenizer is None else tokenizer.special_tokens
    known = {"pool": (f"\n\n{GEMMA3[0]}", f"{GEMMA3[1]}\n\n"), "merge": QWEN, "mean": GEMMA4,
             "shuffle": (FAKE + WHOLE, FAKE)}
    around = known.get(vision.projector, ("", ""))
    around = around if all(token in specials for token in re.findall("<[^>]+>", "".join(around))) else ("", "")
    if self.split:
      self._check_split(chat, specials if tokenizer else SMOLVLM)
      around = (FAKE, FAKE)
    self.between = self.split or vision.tower == "pixtral" and all(token in specials for token in PIXTRAL)
    self.before, self.after = (own if given is None else given for own, given in zip(
        around, (chat.image_before, chat.image_after), strict=True))
    self.token: int | None = vision.image_token
    if tokenizer is not None and self.token is None:
      ids = {s: tokenizer.encode_rendered(s).tolist() for s in specials if "image" in s.lower()}
      found = ", ".join(f"{s} is {i[0]}" for s, i in ids.items() if len(i) == 1) or (
          f"the tokenizer has none for images: {tokenizer.vocab_size} is free")
      raise ConfigError("model.vision.image_token is not set: the id of the token that holds an image's places "
                        f"({found}). Type --config.model.vision.image_token=ID.")

  @staticmethod
  def _check_split(chat: ConfigDict, specials: Iterable[str]) -> None:
    if chat.image_before is not None or chat.image_after is not None:
      raise ConfigError("chat.image_before and chat.image_after stand around an image that is whole; what is around "
                        "the squares of one that is cut is given. Leave them unset, or set model.vision.split=False.")
    if missing := [token for token in SMOLVLM if token not in specials]:
      raise ConfigError(f"model.vision.split: the tokenizer has no special token {missing[0]}, which stands before the "
                        "squares of an image. Use the tokenizer of a SmolVLM or Idefics3, or set "
                        "model.vision.split=False.")

  @property
  def fingerprint(self) -> list:
    """What decides tokens and which images are kept."""
    how = self.preprocess
    sizes = [] if self.each else ["tiles", how.size, how.min_pixels, how.max_pixels, how.longest_side]
    squares = ["split", how.size, how.longest_side] if self.between else []
    return [self.token, self.each, self.before, self.after, self.marker, self.at_bos, self.prefix_end, self.drops,
            self._max_pixels, FORMATS, "sizes", *sizes, *squares]

  def measure(self, width: int, height: int) -> tuple[int, tuple[int, int], int]:
    """`EncodedImage.tokens`, `grid` and `squares` of an image of that size. Raises ValueError: see `kept_size`."""
    how = self.preprocess
    if self.split:
      grid = split_grid(width, height, how.longest_side, how.size)
      return len(self._run(grid)), grid, math.prod(grid) + 1
    if self.each:
      return self.each, (0, 0), 1
    columns, rows = (side // how.size for side in how.kept_size(width, height))
    return len(self._run((rows, columns))) if self.between else rows * columns, (rows, columns), rows * columns

  def _run(self, grid: tuple[int, int]) -> np.ndarray:
    """The ids of an image that is cut so, int32 [n]: those of its squares, and of the texts before each, but for the
    FAKE before the first. As `_prompt_split_image` of transformers has it; or those of its tiles, row by row."""
    if grid not in self._between and not self.split:
      row = np.full(grid[1] + 1, self.token, np.int32)
      ends = [self._tokenizer.encode_rendered(token)[0] for token in PIXTRAL]
      self._between[grid] = np.tile(row, grid[0])
      self._between[grid][grid[1]::grid[1] + 1] = [ends[0]] * (grid[0] - 1) + ends[1:]
    if grid not in self._between:
      cells = [("\n" if row and not column else "", f"<row_{row + 1}_col_{column + 1}>")
               for row in range(grid[0]) for column in range(grid[1])]
      texts = [f"{line}{FAKE}{place}" for line, place in [*cells, ("\n\n" if cells else "", WHOLE)]]
      texts[0] = texts[0].removeprefix(FAKE)
      found = self._tokenizer.encode_rendered_batch([FAKE + text for text in texts])  # each behind a special token
      held = np.full(self.each, self.token, np.int32)
      self._between[grid] = np.concatenate([part for ids in found for part in (ids[1:], held)]).astype(np.int32)
    return self._between[grid]

  def load(self, refs: Iterable[ImageRef]) -> list[EncodedImage] | str:
    """The images of a row; or why the row is dropped, if it has one that cannot be used and may be.

    Raises:
      ImageError: see `images.read`.
    """
    try:
      return self.read(refs)
    except ImageError as e:
      if not self.drops:
        raise
      logging.info("dropped: %s", e)
      return BAD_IMAGE

  def read(self, refs: Iterable[ImageRef]) -> list[EncodedImage]:
    """Some images. Raises ImageError: see `images.read`."""
    return [read(ref, self._max_pixels, self._checked, self.measure) for ref in refs]

  def place(self, text: str, count: int) -> tuple[str, str]:
    """(what stands before BOS, the text) of a text with `count` images, each of them IMAGE.

    Raises:
      DataError: another number of markers in it.
    """
    refuse_stand_in(text)
    if not count:
      return "", text
    found = text.count(self.marker)
    if found not in (0, count):
      raise DataError(f"{count} image(s), but {found} × {self.marker!r} in the text. Have one for each image, or none "
                      "for images before the text.")
    if not self.at_bos:
      return "", text.replace(self.marker, IMAGE) if found else IMAGE * count + text
    for _ in range(found):
      text = text.lstrip()
      if not text.startswith(self.marker):
        raise DataError(f"{self.marker!r} stands within the text, but chat.images_at puts images before BOS. Take it "
                        "out, or set chat.images_at=text.")
      text = text[len(self.marker):]
    return IMAGE * count, text

  def finish(self, ids: np.ndarray, weights: np.ndarray, images: Sequence[EncodedImage]
             ) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """(ids with placeholders, int32 [n]; weights, 0 of these; where each image's tokens begin).

    Args:
      ids, weights: of a text in which an image is IMAGE_ID, with the weight of the texts between its squares.
      images: of it; those of others may follow.
    """
    held, repeats = np.flatnonzero(ids == IMAGE_ID), np.ones(len(ids), np.int64)
    repeats[held] = [image.tokens for image in images[:len(held)]]
    places = (np.cumsum(repeats) - repeats)[held]
    whole = np.repeat(np.where(ids == IMAGE_ID, self.token, ids).astype(np.int32), repeats)
    weights = np.repeat(weights, repeats)
    for place, image in zip(places, images, strict=False) if self.between else ():
      run = slice(place, place + image.tokens)
      whole[run] = self._run(image.grid)
      weights[run] *= whole[run] != self.token
    return whole, weights, tuple(places.tolist())


def image_format(config: ConfigDict, tokenizer: Tokenizer | None) -> ImageFormat | None:
  """None if the model sees no images. Raises: see `ImageFormat`."""
  return ImageFormat(config, tokenizer) if sees(config) else None


def sees(config: ConfigDict) -> bool:
  """Whether the config's model has a tower for images."""
  return config.model.vision.tower != "none"


def in_tiles(vision: ConfigDict) -> bool:
  """Whether the tower of the section `model.vision` sees images in their own sizes, in tiles of one token."""
  return vision.tower in IN_TILES


def tokens_per_image(vision: ConfigDict) -> int:
  """N, of the section `model.vision`; 0: as many as an image's size asks for."""
  return 0 if in_tiles(vision) else vision.tokens_per_image or (vision.image_size // vision.patch_size) ** 2


def vocab_size(config: ConfigDict, tokenizer: Tokenizer) -> int:
  """Ids in documents are below it: the tokenizer's, or one more than the placeholder of images."""
  return max(tokenizer.vocab_size, (config.model.vision.image_token or 0) + 1 if sees(config) else 0)


def preprocess_of(config: ConfigDict, augment: bool = False) -> Preprocess:
  """How the config's images become pixels; with its augmentation or without.

  Raises:
    ConfigError: a value that is not allowed.
  """
  vision, options = config.model.vision, config.input.images
  resize, interpolation = options.resize, options.interpolation
  only = IN_TILES.get(vision.tower) or (SPLIT if vision.split else None)
  if resize == "auto":
    resize = only or ("crop" if vision.tower == "clip" else "squash")
  if interpolation == "auto":
    interpolation = {"pool": "bilinear", "shuffle": "lanczos"}.get(vision.projector, "bicubic")
  mean = tuple(vision.mean) or ((0.48145466, 0.4578275, 0.40821073) if vision.tower == "clip" else (0.5,) * 3)
  a = options.augment
  how = Preprocess(vision.image_size, resize, interpolation, tuple(int(255 * m) for m in mean), a.crop, a.flip, a.color,
                   longest_side=vision.longest_side)
  if in_tiles(vision):
    how = how._replace(min_pixels=vision.min_pixels, max_pixels=vision.max_pixels)
  how = check_preprocess(how, only)
  return how if augment else how._replace(crop=1.0, flip=0.0, color=0.0)


def refuse_stand_in(text: str, where: str = "") -> None:
  """Raises DataError if a text has the character that stands for images here."""
  if IMAGE in text:
    raise DataError(f"{where}{': ' if where else ''}a text has U+1FFFE, a code point that Unicode keeps out of texts. "
                    "Remove it.")


def text_of(content: str | list[dict]) -> str:
  """The text in a message's content, without its images."""
  return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def with_more(content: str | list[dict], more: str) -> str | list[dict]:
  """A message's content with more text behind it."""
  return f"{content.strip()}{more}" if isinstance(content, str) else [*content, {"type": "text", "text": more}]


def column_refs(fields: Mapping[str, Any], one: str, several: str, where: str, folder) -> list[ImageRef]:
  """The images in a row's columns of these names.

  Raises:
    DataError: both columns are there, or one with a film.
  """
  if film := next((key for key in FILMS if fields.get(key) is not None), None):
    raise DataError(f"{where}: {film} is {NO_FILMS}")
  given = [key for key in (one, several) if fields.get(key) is not None]
  if len(given) == 2:
    raise DataError(f"{where}: has both {one!r} and {several!r}. Keep one of them.")
  if not given:
    return []
  value, key = fields[given[0]], given[0]
  if not isinstance(value, (list, tuple)):
    return [ImageRef(value, f"{where}: {key}", folder)]
  return [ImageRef(v, f"{where}: {key}[{i}]", folder) for i, v in enumerate(value)]


def content_parts(value: list, where: str) -> str | list[dict]:
  """A content given in parts: joined, if all are text; else {"type": "text", …} and {"type": "image", …} alone, where
  the latter has the image's value under "image" unless it is in a column.

  Raises:
    DataError: another kind of part.
  """
  parts: list[dict] = []
  for i, part in enumerate(value):
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
      parts.append({"type": "text", "text": part["text"]})
    elif kind in PART_TYPES:
      found = {key: part[key] for key in KEYS if part.get(key) is not None}
      parts.append({"type": "image", **({"image": found} if found else {})})
    elif kind in FILMS:
      raise DataError(f"{where}[{i}] is {NO_FILMS}")
    else:
      raise DataError(f"{where}[{i}] is {str(part)[:60]}; expected {{'type': 'text', 'text': …}} or "
                      "{'type': 'image', …}.")
  return parts if any(part["type"] == "image" for part in parts) else text_of(parts)


def attach(messages: list[dict], refs: Sequence[ImageRef], where: str, folder, marker: str
           ) -> tuple[list[dict], tuple[ImageRef, ...]]:
  """Messages in which each image is a part {"type": "image"}, and the images in the order of these.

  Args:
    messages: with contents as `content_parts` gives them.
    refs: those in the row's columns, for parts without an image of their own; else for the markers in the texts; else
      they stand before what the user says first.
    where: names the row.
    folder: see `ImageRef`.
    marker: stands for an image in a text, if the columns have images.

  Raises:
    DataError: more or fewer images than places for them.
  """
  contents = [message.get("content", "") for message in messages]
  for content in contents:
    refuse_stand_in(text_of(content), where)
  parts = [part for content in contents if isinstance(content, list) for part in content]
  bare = sum(part["type"] == "image" and "image" not in part for part in parts)
  marks = 0 if bare or not refs else sum(text_of(content).count(marker) for content in contents)
  if refs and not bare and not marks:
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
    contents[first] = [{"type": "image"}] * len(refs) + as_parts(contents[first])
  elif (bare or marks) != len(refs):
    places = f"{bare} parts of messages" if bare else f"{marks} × {marker!r} in its messages"
    raise DataError(f"{where}: its columns have {len(refs)} image(s), for {places}. Have one for each.")
  waiting, found, result = iter(refs), [], []
  for i, (message, content) in enumerate(zip(messages, contents, strict=True)):
    if marks and marker in text_of(content):
      content = [piece for part in as_parts(content) for piece in _split(part, marker)]
    for j, part in enumerate(content if isinstance(content, list) else ()):
      if part["type"] == "image":
        own = part.get("image")
        found.append(next(waiting) if own is None else ImageRef(own, f"{where}: messages[{i}].content[{j}]", folder))
    if isinstance(content, list):
      content = [{"type": "image"} if part["type"] == "image" else part for part in content]
      message = {**message, "content": content}
    result.append(message)
  return result, tuple(found)


def as_parts(content: str | list[dict]) -> list[dict]:
  """A message's content as parts."""
  return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []


def _split(part: dict, marker: str) -> list[dict]:
  """A part with each marker in its text as a part of its own."""
  if part["type"] != "text":
    return [part]
  pieces: list[dict] = []
  for i, text in enumerate(part["text"].split(marker)):
    pieces += ([{"type": "image"}] if i else []) + ([{"type": "text", "text": text}] if text else [])
  return pieces


def parts_of(message: Mapping) -> list[Mapping]:
  """The parts of a message; none if its content is a string."""
  content = message.get("content")
  return [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
