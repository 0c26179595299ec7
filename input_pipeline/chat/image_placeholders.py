"""Where images and videos stand in texts, and in tokens.

In a text each is one character that no text has, IMAGE; in token ids it is a run of IMAGE_ID, which `finish` turns into
the model's placeholder. So texts are cut, compared and tokenised with their images as without.
"""

import math
import re
from collections.abc import Iterable, Sequence

import numpy as np
from absl import logging
from ml_collections import ConfigDict

from input_pipeline.chat import video_texts
from input_pipeline.chat.image_parts import IMAGE, refuse_stand_in
from input_pipeline.images import videos
from input_pipeline.images.formats import FORMATS, ImageError
from input_pipeline.images.images import (
  FIT,
  KEEP,
  LIMIT,
  SPLIT,
  EncodedImage,
  ImageRef,
  Preprocess,
  check_preprocess,
  read,
)
from input_pipeline.images.tiles import split_grid
from input_pipeline.images.videos import CLOCKED, INTRODUCED, TIMED, TOGETHER, Sampling
from input_pipeline.tokenizer.tokenizer import Tokenizer
from trainer.errors import ConfigError, DataError, one_of

# An id that no token has.
IMAGE_ID = -1
ON_ERROR, IMAGES_AT = ("error", "drop"), ("auto", "bos", "text")
BAD_IMAGE = "a bad image"
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
# How videos stand in texts, by the tower, or the projector, of those models that see them; models/spec_video.py has the
# same. And what stands around frames.
VIDEOS = {"qwen2_vl": TOGETHER, "qwen2_5_vl": TOGETHER, "qwen3_vl": TIMED, "gemma4": CLOCKED, "shuffle": INTRODUCED}
SEEING_VIDEOS = "the models of Qwen-VL, Gemma 4 and SmolVLM"
AROUND_FRAMES = {TIMED: QWEN, CLOCKED: GEMMA4, INTRODUCED: SMOLVLM}


class ImageFormat:
  """How the model of a config sees images in texts, and which images are accepted.

  Args:
    config: the whole config, of which `model.vision`, `chat` and `input.images` count.
    tokenizer: what texts are tokenised with; None if they are not.

  Attributes:
    token, each: the placeholder's id (None without a tokenizer), and how many of it an image takes, or each square of
      it; 0: as many as its size asks for.
    split: an image is cut into squares, with texts between the tokens of these.
    video_token: the placeholder's id of videos.
    videos: which of a video's frames are taken; None: the model sees none.
    between: there are texts between the tokens of an image: with `split`, or behind each row of tiles; or of a video.
    before, after: texts around these.
    markers: what stands for an image in the texts of rows, and for a video.
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
    self.videos, self.video_token = sampling_of(config), vision.video.token
    self._tower, self._knows_videos = vision.tower, kind_of_videos(vision) is not None
    self.markers, self.prefix_end = (chat.image_marker, chat.video_marker), chat.prefix_end
    for key, value, allowed in (("input.images.on_error", options.on_error, ON_ERROR),
                                ("chat.images_at", chat.images_at, IMAGES_AT)):
      one_of(f"{key}", value, allowed)
    if not all(self.markers) or self.markers[0] == self.markers[1] or options.max_pixels < 1:
      raise ConfigError(f"chat.image_marker is {self.markers[0]!r}, chat.video_marker {self.markers[1]!r} and "
                        f"input.images.max_pixels {options.max_pixels}; the first two must not be empty, nor the same, "
                        "the other must be at least 1.")
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
    needed = () if self.videos is None or tokenizer is None else AROUND_FRAMES.get(self.videos.kind, ())
    if missing := [token for token in needed if token not in specials]:
      raise ConfigError(f"model.vision.video.token: the tokenizer has no special token {missing[0]}, which stands "
                        "around frames of a video. Use the model's own tokenizer, or leave the key unset.")
    apart = self.videos is not None and self.videos.kind != TOGETHER
    in_rows = vision.tower == "pixtral" and all(token in specials for token in PIXTRAL)
    self.between, self._in_rows = self.split or in_rows or apart, in_rows
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
    squares = ["split", how.size, how.longest_side] if self.split or self._in_rows else []
    sampled = [] if self.videos is None else ["videos", self.video_token, self.markers[1], *self.videos]
    return [self.token, self.each, self.before, self.after, self.markers[0], self.at_bos, self.prefix_end, self.drops,
            self._max_pixels, FORMATS, "sizes", *sizes, *squares, *sampled]

  def measure(self, width: int, height: int) -> tuple[int, tuple[int, int], int]:
    """`EncodedImage.tokens`, `grid` and `squares` of an image of that size. Raises ValueError: see `kept_size`."""
    how = self.preprocess
    if self.split:
      grid = split_grid(width, height, how.longest_side, how.size)
      return len(self._run(grid)), grid, math.prod(grid) + 1
    if self.each:
      return self.each, (0, 0), 1
    columns, rows = (side // how.size for side in how.kept_size(width, height))
    return len(self._run((rows, columns))) if self._in_rows else rows * columns, (rows, columns), rows * columns

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
    """Some images, and videos. Raises ImageError: see `images.read`, `videos.read`; DataError: it sees no videos."""
    return [self._video(ref) if ref.video else read(ref, self._max_pixels, self._checked, self.measure) for ref in refs]

  def check_videos(self, where: str) -> Sampling:
    """What is done with the video there. Raises DataError: the model sees none."""
    if self.videos is None:
      why = ("model.vision.video.token is not set, the id of the token that holds the places of one"
             if self._knows_videos else "it sees images alone")
      raise DataError(f"{where} is a video, which the model does not see (model.vision.tower is {self._tower!r}): "
                      f"{why}. Videos are for {SEEING_VIDEOS}. Give some of its frames as images, in their order.")
    return self.videos

  def _video(self, ref: ImageRef) -> EncodedImage:
    video = videos.read(ref, self.check_videos(ref.where), self._max_pixels)
    return video._replace(tokens=len(self._run_of_video(video)))

  def _run_of_video(self, video: EncodedImage) -> np.ndarray:
    """The ids of a video, int32 [n]: of its tiles; or of those of each place in time, and of the texts between them, of
    Qwen3-VL also before the first and behind the last."""
    kind, held = self.videos.kind, np.full(self.each or math.prod(video.grid), self.video_token, np.int32)
    if kind == TOGETHER:
      return np.tile(held, len(video.seconds))
    held = self._run((0, 0)) if self.split else held
    texts = self._texts(video)
    if kind != TIMED:  # which are of the text around it, see `around`
      texts[0] = texts[-1] = ""
    front = AROUND_FRAMES[kind][0]
    first, *others = (ids[1:] for ids in self._tokenizer.encode_rendered_batch([front + text for text in texts]))
    return np.concatenate([first, *(part for ids in others for part in (held, ids))]).astype(np.int32)

  def _texts(self, video: EncodedImage) -> list[str]:
    around = QWEN if self.videos.kind == TIMED else (self.before, self.after)
    return video_texts.texts(self.videos.kind, video, *around)

  def around(self, image: EncodedImage | None) -> tuple[str, str]:
    """The texts before and behind an image, or a video; None: any image."""
    if image is None or image.seconds is None or self.videos.kind in (TOGETHER, TIMED):
      return self.before, self.after
    texts = self._texts(image)
    return texts[0], texts[-1]

  def in_order(self, text: str, refs: Sequence[ImageRef]) -> Sequence[ImageRef]:
    """The images and videos of a text in the order in which they stand in it. Raises: see `place`."""
    return refs if len({ref.video for ref in refs}) < 2 else self.place(text, refs)[2]

  def place(self, text: str, refs: Sequence[ImageRef]) -> tuple[str, str, list[ImageRef]]:
    """(what stands before BOS, the text, the images in their order) of a text with images, each of them IMAGE.

    Raises:
      DataError: another number of markers in it.
    """
    refuse_stand_in(text)
    if not refs:
      return "", text, []
    waiting, places = [], []
    for video, marker in enumerate(self.markers):
      own = [ref for ref in refs if ref.video == bool(video)]
      at = [match.start() for match in re.finditer(re.escape(marker), text)] if own else []
      if len(at) not in (0, len(own)):
        raise DataError(f"{len(own)} {'video' if video else 'image'}(s), but {len(at)} × {marker!r} in the text. Have "
                        "one for each, or none for those before the text.")
      waiting += [] if at else own
      places += [(start, marker, ref) for start, ref in zip(at, own, strict=False)]
    places.sort(key=lambda place: place[0])
    ordered = [*waiting, *(ref for *_, ref in places)]
    if not self.at_bos:
      for start, marker, _ in reversed(places):
        text = text[:start] + IMAGE + text[start + len(marker):]
      return "", IMAGE * len(waiting) + text, ordered
    for _, marker, _ in places:
      text = text.lstrip()
      if not text.startswith(marker):
        raise DataError(f"{marker!r} stands within the text, but chat.images_at puts images before BOS. Take it "
                        "out, or set chat.images_at=text.")
      text = text[len(marker):]
    return IMAGE * len(ordered), text, ordered

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
    for place, image in zip(places, images, strict=False):
      run, token = slice(place, place + image.tokens), self.token
      if image.seconds is not None:
        whole[run], token = self._run_of_video(image), self.video_token
      elif self.split or self._in_rows:
        whole[run] = self._run(image.grid)
      weights[run] *= whole[run] != token
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
  """Ids in documents are below it: the tokenizer's, or one more than the placeholders of images and videos."""
  vision = config.model.vision
  held = (vision.image_token or 0, vision.video.token or 0)
  return max(tokenizer.vocab_size, max(held) + 1 if sees(config) else 0)


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


def sampling_of(config: ConfigDict) -> Sampling | None:
  """Which frames of videos the config's model takes; None: it sees none."""
  vision = config.model.vision
  v, kind = vision.video, kind_of_videos(vision)
  if v.token is None or kind is None:
    return None
  return Sampling(kind, 2 if kind in (TOGETHER, TIMED) else 1, vision.image_size, v.fps, v.num_frames, v.min_frames,
                  v.max_frames, v.min_pixels, v.max_pixels, v.tokens_per_second)


def kind_of_videos(vision: ConfigDict) -> str | None:
  """How videos stand in texts of the section `model.vision`; None: it sees none."""
  return VIDEOS.get(vision.tower, VIDEOS.get(vision.projector))
