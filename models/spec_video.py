"""What films are to a model with a vision tower: `model.vision.video` checked, as a frozen dataclass.

A film is an image with a time axis: patches of its frames, or of two frames in a row (`Native.frames`), go through the
tower of images.
"""

import dataclasses
from collections.abc import Mapping

from ml_collections import ConfigDict

from trainer.errors import ConfigError

# The keys of `model.vision.video` that say what function is computed, and those of what films it was trained with.
KEYS = ("token", "tokens_per_second")
SAMPLING = ("fps", "num_frames", "min_frames", "max_frames", "min_pixels", "max_pixels")
# How frames of films stand in texts, by tower: all of a film's together; or those of a patch, each behind its time.
TOGETHER, TIMED = "together", "timed"
FILMS: Mapping[str, str] = {"qwen2_vl": TOGETHER, "qwen2_5_vl": TOGETHER, "qwen3_vl": TIMED}


@dataclasses.dataclass(frozen=True)
class Video:
  """The keys of `model.vision.video`."""

  token: int
  tokens_per_second: float
  fps: float | None
  num_frames: int | None
  min_frames: int
  max_frames: int
  min_pixels: int
  max_pixels: int
  of_all: bool = False

  @property
  def largest_frame(self) -> int:
    """Pixels of a frame at most: `of_all` frames together have max_pixels, and a film has two or more."""
    return self.max_pixels // 2 if self.of_all else self.max_pixels


def make_video(c: ConfigDict, tower: str, image_token: int | None, tile: int) -> Video | None:
  """Reads and checks `model.vision.video`; None: the model sees no films.

  Args:
    c: the section.
    tower, image_token: of `model.vision`.
    tile: pixels of a tile.

  Raises:
    ConfigError: what was found and what is allowed.
  """
  if c.token is None:
    return None
  if tower not in FILMS:
    raise ConfigError(f"model.vision.video.token: found {c.token} with the tower {tower!r}, which sees no films here; "
                      f"those of {', '.join(FILMS)} do. Leave it unset.")
  if c.token < 0 or c.token == image_token:
    raise ConfigError(f"model.vision.video.token: found {c.token}, allowed: the id of a token, another than "
                      f"model.vision.image_token, {image_token}.")
  if (tower == "qwen2_5_vl") != (c.tokens_per_second > 0):
    raise ConfigError(f"model.vision.video.tokens_per_second: found {c.tokens_per_second} with the tower {tower!r}; "
                      "qwen2_5_vl has a number above 0, others have 0.")
  if c.fps is not None and c.num_frames is not None:
    raise ConfigError(f"model.vision.video: found fps={c.fps} and num_frames={c.num_frames}; each says how many frames "
                      "are taken. Set one of them, or none: all are.")
  if (c.fps is not None and c.fps <= 0) or (c.num_frames is not None and c.num_frames < 2):
    raise ConfigError(f"model.vision.video: found fps={c.fps}, num_frames={c.num_frames}; allowed: above 0, and 2 or "
                      "more.")
  if not 1 <= c.min_frames <= c.max_frames or c.max_frames < 2:
    raise ConfigError(f"model.vision.video: found min_frames={c.min_frames}, max_frames={c.max_frames}; allowed: "
                      "min_frames from 1 to max_frames, and that at least 2.")
  if not 1 <= c.min_pixels <= c.max_pixels or c.max_pixels < tile:
    raise ConfigError(f"model.vision.video: found min_pixels={c.min_pixels}, max_pixels={c.max_pixels}; allowed: "
                      f"min_pixels from 1 to max_pixels, and that at least a tile, {tile}.")
  return Video(**{key: c[key] for key in (*KEYS, *SAMPLING)}, of_all=FILMS[tower] == TIMED)
