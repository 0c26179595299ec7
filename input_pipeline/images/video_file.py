"""Videos as a token cache and a run's experience hold them: frames that are chosen and have their size, in one PNG.

S pixels of a side, T places in time, F frames of a place: 2 where a tower's patches have two, else 1.
"""

import dataclasses
import io
import json
from collections.abc import Sequence

import numpy as np
from PIL import Image

# What the contents begin with; no file of an image does. Then 4 bytes: the length of what JSON says, which follows.
MAGIC = b"\x89weftvideo"


@dataclasses.dataclass(frozen=True, eq=False)
class Video:
  """The frames of a video, uint8 [T, H, W, 3 * F]; and their times, int32 [T], from 0 on, as positions count them.

  times: None: each place in time stands in the text by itself, as an image does.
  """

  pixels: np.ndarray
  times: np.ndarray | None = None

  def picture(self) -> np.ndarray:
    """All frames from left to right, uint8 [H, T * F * W, 3]."""
    T, H, W, channels = self.pixels.shape
    frames = self.pixels.reshape(T, H, W, channels // 3, 3)
    return frames.transpose(1, 0, 3, 2, 4).reshape(H, -1, 3)


# What a model is shown: an image, or a video.
Shown = np.ndarray | Video


def packed(frames: np.ndarray, each: int, times: Sequence[int] | None, seconds: Sequence[float], length: int = 0
           ) -> bytes:
  """The contents of a video.

  Args:
    frames: uint8 [T * F, H, W, 3].
    each: F.
    times: see `Video`.
    seconds: when each place in time is seen.
    length: whole seconds that the video lasts.
  """
  told = json.dumps(dict(each=each, times=None if times is None else list(times), seconds=list(seconds),
                         length=length)).encode()
  strip = io.BytesIO()
  Image.fromarray(frames.reshape(-1, *frames.shape[2:])).save(strip, "PNG", compress_level=1)
  return MAGIC + len(told).to_bytes(4, "little") + told + strip.getvalue()


def is_video(data: bytes) -> bool:
  """Whether contents are those of a video."""
  return data.startswith(MAGIC)


def told(data: bytes) -> tuple[dict, bytes]:
  """(`each`, `times`, `seconds` and `length` of contents, their PNG)."""
  at = len(MAGIC) + 4
  end = at + int.from_bytes(data[len(MAGIC):at], "little")
  return json.loads(data[at:end]), data[end:]


def unpacked(data: bytes) -> Video:
  """The video of contents that `packed` gave."""
  says, strip = told(data)
  with Image.open(io.BytesIO(strip), formats=("PNG",)) as image:
    pixels = np.asarray(image)
  T, F = len(says["seconds"]), says["each"]
  frames = pixels.reshape(T, F, -1, *pixels.shape[1:])
  whole = frames.transpose(0, 2, 3, 1, 4).reshape(T, *frames.shape[2:4], 3 * F)
  return Video(whole, None if says["times"] is None else np.array(says["times"], np.int32))
