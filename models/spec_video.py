"""What videos are to a model with a vision tower: `model.vision.video` checked, as a frozen dataclass.

A video is an image with a time axis: patches of its frames, or of two frames in a row (`Native.frames`), go through the
tower of images.
"""

import dataclasses
import math
from collections.abc import Mapping

from ml_collections import ConfigDict

from trainer.errors import ConfigError

# The keys of `model.vision.video` that say what function is computed, and those of what videos it was trained with.
KEYS = ("token", "tokens_per_second")
SAMPLING = ("fps", "num_frames", "min_frames", "max_frames", "min_pixels", "max_pixels")
# How frames of videos stand in texts, by tower or projector: all of a video's together; or each, or those of a patch,
# behind its time, of SmolVLM as images, with their token. input_pipeline/chat/image_placeholders.py has the same.
TOGETHER, TIMED, CLOCKED, INTRODUCED = "together", "timed", "clocked", "introduced"
VIDEOS: Mapping[str, str] = {"qwen2_vl": TOGETHER, "qwen2_5_vl": TOGETHER, "qwen3_vl": TIMED, "gemma4": CLOCKED,
                             "shuffle": INTRODUCED}
# Of frames that are made as large as they may be, and are as many as `num_frames` or `fps` say.
LEAST_PIXELS, MOST_FRAMES = 1, 768
# Pixels of SmolVLM's longer side, at most.
MOST_SIDE = 4096
# How many tokens at most Gemma 4's image and video processors make of an image, or a frame: one of these.
MOST_TOKENS = (70, 140, 280, 560, 1120)


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
    """Pixels of a frame at most: `of_all` frames together have max_pixels, and a video has two or more."""
    return self.max_pixels // 2 if self.of_all else self.max_pixels


def kind_of(tower: str, projector: str) -> str | None:
  """One of VIDEOS; None: the model sees no videos."""
  return VIDEOS.get(tower, VIDEOS.get(projector))


def make_video(vision: ConfigDict) -> Video | None:
  """Reads and checks `model.vision.video`; None: the model sees no videos."""
  c, tower, kind, tile = vision.video, vision.tower, kind_of(vision.tower, vision.projector), vision.image_size**2
  if c.token is None:
    return None
  if kind is None:
    raise ConfigError(f"model.vision.video.token: found {c.token} with the tower {tower!r} and the projector "
                      f"{vision.projector!r}, which see no videos here; {', '.join(VIDEOS)} do. Leave it unset.")
  if c.token < 0 or (c.token == vision.image_token) != (kind == INTRODUCED):
    wanted = "model.vision.image_token, since frames are images" if kind == INTRODUCED else (
        "the id of a token, another than model.vision.image_token")
    raise ConfigError(f"model.vision.video.token: found {c.token}, allowed: {wanted}, {vision.image_token}.")
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
  if not 1 <= c.min_pixels <= c.max_pixels or c.max_pixels < tile and kind != INTRODUCED:
    raise ConfigError(f"model.vision.video: found min_pixels={c.min_pixels}, max_pixels={c.max_pixels}; allowed: "
                      f"min_pixels from 1 to max_pixels, and that at least a tile, {tile}.")
  if kind in (CLOCKED, INTRODUCED):
    _check_frames(c, kind, tile)
  return Video(**{key: c[key] for key in (*KEYS, *SAMPLING)}, of_all=kind == TIMED)


def _check_frames(c: ConfigDict, kind: str, tile: int) -> None:
  """Keys of which these models' processors know nothing, and what they allow of others."""
  if c.min_pixels != LEAST_PIXELS or c.min_frames != 1:
    raise ConfigError(f"model.vision.video: found min_pixels={c.min_pixels}, min_frames={c.min_frames}; Gemma 4 and "
                      f"SmolVLM have neither. Leave them at {LEAST_PIXELS} and 1.")
  if kind == CLOCKED and (c.max_frames != MOST_FRAMES or c.max_pixels not in [n * tile for n in MOST_TOKENS]):
    raise ConfigError(f"model.vision.video: found max_frames={c.max_frames}, max_pixels={c.max_pixels}; of Gemma 4 the "
                      f"first stays {MOST_FRAMES} (num_frames or fps say how many are taken), and the other is one of "
                      f"{', '.join(str(n * tile) for n in MOST_TOKENS)}: {', '.join(map(str, MOST_TOKENS))} tiles.")
  side = math.isqrt(c.max_pixels)
  if kind == INTRODUCED and (c.num_frames is not None or side**2 != c.max_pixels or side > MOST_SIDE):
    raise ConfigError(f"model.vision.video: found num_frames={c.num_frames}, max_pixels={c.max_pixels}; of SmolVLM fps "
                      "and max_frames say how many frames are taken, and max_pixels is the square of the longer side "
                      f"that a frame is brought to, up to {MOST_SIDE}: 262144, say, for 512.")
