"""Videos: read from what rows say, of which frames are chosen as the video processors of transformers choose them.

    video = read(ImageRef("clip.gif", "data/a.jsonl:7: video", Path("data"), video=True), how, max_pixels=10_000_000)

A video is a file (MP4, QuickTime, WebM, Matroska, AVI: by PyAV, an extra), an animated picture that Pillow
reads (GIF, WebP, PNG, TIFF, AVIF), or its frames one by one: a list of images, or a folder of them, in the order of
their names.

T places in time, F frames of a place.
"""

import contextlib
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from input_pipeline.files import shown_names
from input_pipeline.images import video_file
from input_pipeline.images.formats import AVIF, FORMATS, ImageError, begins_as_image, decoded, opened
from input_pipeline.images.images import KEYS, EncodedImage, ImageRef, content_of
from input_pipeline.images.tiles import fitted_size, longest_size, video_size
from trainer.errors import DataError

# How frames stand in a text: all of a video together; or those of a place in time, each behind a text with its time: in
# seconds, or in minutes and seconds (Gemma 4), or so behind a text that tells how many there are (SmolVLM).
TOGETHER, TIMED, CLOCKED, INTRODUCED = "together", "timed", "clocked", "introduced"
# Keys of an object that is a video, beside those of an image's.
VIDEO_KEYS = ("video", "video_url", "frames", *KEYS)
# Frames a second of a video that does not say it, as transformers assumes.
FPS = 24.0
# How many there may be.
RATES = (1e-3, 1e5)
# Seconds, fewer than which a video lasts.
LONGEST = 1e9
# Of all frames of a video, as they are kept.
MOST_PIXELS = 1 << 27
# How files of videos begin, or go on behind four bytes, and what FFmpeg calls them.
CONTAINERS = ((0, b"\x1aE\xdf\xa3", "matroska"), (4, b"ftyp", "mp4"), (4, b"moov", "mp4"), (4, b"wide", "mp4"),
              (4, b"mdat", "mp4"), (8, b"AVI ", "avi"))


class Sampling(NamedTuple):
  """Which frames of a video are taken, and what becomes of them; see the keys of `model.vision.video`.

  kind: TOGETHER, TIMED, CLOCKED or INTRODUCED. each: F. size: pixels of a tile's side.
  """

  kind: str
  each: int
  size: int
  fps: float | None
  num_frames: int | None
  min_frames: int
  max_frames: int
  min_pixels: int
  max_pixels: int
  tokens_per_second: float

  def indices(self, count: int, fps: float | None) -> np.ndarray:
    """Which of `count` frames, of which there are `fps` a second, are taken: int64, ascending.

    Raises:
      ValueError: there are too few, or it is not known how many are a second.
    """
    if count < 2:
      raise ValueError(f"has {count} frame(s); a video has 2 or more. Give it as an image")
    if self.fps is None and self.num_frames is None:
      return np.arange(count)
    if self.num_frames is None and fps is None:
      raise ValueError(f"says nothing of how many frames a second it has, of which model.vision.video.fps={self.fps:g} "
                       "are taken. Say it: {'frames': […], 'fps': 25}; or take all: model.vision.video.fps=None")
    if self.kind == INTRODUCED:
      return self._evenly(count, fps)
    number = self.num_frames
    if self.kind == TOGETHER and number is not None:
      number = round(number / self.each) * self.each
    elif self.kind == TOGETHER:
      most = math.floor(min(self.max_frames, count) / self.each) * self.each
      number = math.floor(min(max(count / fps * self.fps, self.min_frames), most, count) / self.each) * self.each
    elif number is None:
      number = max(int(count / fps * self.fps), self.min_frames)
      number = min(number, self.max_frames, count) if self.kind == TIMED else number
    if not 0 < number <= count:
      raise ValueError(f"has {count} frames, fewer than the {number or self.each} that model.vision.video asks for "
                       f"(fps={self.fps}, num_frames={self.num_frames})")
    if self.kind == TIMED:
      return np.linspace(0, count - 1, number).round().astype(int)
    if self.kind == CLOCKED:
      return np.arange(number) * count // number
    return np.array([int(np.float32(i * (count / number))) for i in range(number)])

  def _evenly(self, count: int, fps: float) -> np.ndarray:
    """As the video processor of SmolVLM takes them: of a video with more seconds than it has frames and two, those of
    the first and the last second are not."""
    seconds, first, last = count / fps, 0, count - 1
    if seconds - 2 > self.max_frames * self.fps:
      first, last = int(fps), min(int(count - fps), last)
    if first >= last:
      first, last = 0, count - 1
    number = max(1, min(round(self.fps * seconds), self.max_frames))
    return np.unique(np.linspace(first, last, number, dtype=int))

  def frame_size(self, frames: int, width: int, height: int) -> tuple[int, int]:
    """Width and height of each of so many frames. Raises ValueError: see `video_size`."""
    if self.kind == CLOCKED:
      return fitted_size(width, height, self.size, self.max_pixels)
    if self.kind == INTRODUCED:
      return self.size, self.size
    counted = frames if self.kind == TIMED else None
    return video_size(counted, width, height, self.size, self.min_pixels, self.max_pixels)

  def resized(self, frame: Image.Image, size: tuple[int, int]) -> np.ndarray:
    """A frame in that size, uint8 [H, W, 3]; of SmolVLM its longer side is brought to max_pixels ** 0.5 before."""
    sizes, resample = [size], Image.Resampling.BICUBIC
    if self.kind == INTRODUCED:
      sizes = [longest_size(*frame.size, math.isqrt(self.max_pixels)), size]
      resample = Image.Resampling.LANCZOS
    # Across first, as torchvision does it, which rounds 1 value of 200 otherwise, by 1. Pillow would choose.
    for width, height in sizes:
      frame = frame.resize((width, frame.height), resample).resize((width, height), resample)
    return np.asarray(frame, np.uint8)

  def times(self, taken: np.ndarray, count: int, fps: float | None) -> tuple[list[int] | None, list[float]]:
    """(`Video.times`, when each place in time is seen, in seconds) of the frames that are taken of so many. Where
    nothing says how many are a second, 24 are: of all frames in Qwen3-VL, of those that are taken in the others."""
    places = -(-len(taken) // self.each)
    if self.kind != TOGETHER:
      whole = [*taken.tolist(), *[int(taken[-1])] * (places * self.each - len(taken))]
      at = [index / (fps or FPS) for index in whole]
      return None, [(at[i] + at[i + self.each - 1]) / 2 for i in range(0, len(at), self.each)]
    long = self.each / (FPS if fps is None else len(taken) / count * fps)
    if not self.tokens_per_second:
      return list(range(places)), [place * long for place in range(places)]
    # In float32, as transformers does it.
    step = np.float32(self.tokens_per_second) * np.float32(long)
    return (np.arange(places, dtype=np.float32) * step).astype(int).tolist(), [place * long for place in range(places)]


class Frames(NamedTuple):
  """A video's frames: how many there are, how many a second if that is known, what gives some of them in order,
  decoded, and the files beside the data that they are in."""

  total: int
  fps: float | None
  take: Callable[[Sequence[int]], Iterable[Image.Image]]
  files: tuple[Path, ...] = ()


def read(ref: ImageRef, how: Sampling, max_pixels: int) -> EncodedImage:
  """A video's frames that are taken, in their size; `tokens` and `squares` are how many tiles they have.

  Args:
    how: which are taken.
    max_pixels: of a frame as it is stored.

  Raises:
    ImageError: it is missing, no video, damaged, of a kind that is not read, has too few frames, or frames of different
      sizes; names the row and column.
    DataError: PyAV is not installed.
  """
  if isinstance(ref.value, bytes) and video_file.is_video(ref.value):
    return _again(ref, how)
  frames = _frames(ref, ref.value, max_pixels, None)
  try:
    taken = how.indices(frames.total, frames.fps)
  except ValueError as e:
    raise ImageError(f"{ref.where} {e}.") from e
  kept, stored, size = [], None, (0, 0)
  for index, frame in zip(taken.tolist(), frames.take(taken.tolist()), strict=True):
    if stored is None:
      stored = frame.size
      size = _size(ref, how, len(taken), *stored)
    if frame.size != stored:
      raise ImageError(f"{ref.where}: frame {index} has {frame.width} × {frame.height} pixels, and those before it "
                       f"{stored[0]} × {stored[1]}. Give all frames of a video one size.")
    kept.append(how.resized(frame, size))
  times, seconds = how.times(taken, frames.total, frames.fps)
  kept += [kept[-1]] * (len(seconds) * how.each - len(kept))
  length = int(seconds[-1] if frames.fps is None else frames.total / frames.fps)
  data = video_file.packed(np.stack(kept), how.each, times, seconds, length)
  return _measured(data, frames.files, size, how, seconds)._replace(length=length)


def _measured(data: bytes, files: tuple[Path, ...], size: tuple[int, int], how: Sampling, seconds: Sequence[float]
              ) -> EncodedImage:
  columns, rows = (side // how.size for side in size)
  tiles = rows * columns * len(seconds)
  return EncodedImage(data, files, tiles, (rows, columns), tiles, tuple(seconds))


def _again(ref: ImageRef, how: Sampling) -> EncodedImage:
  """What `read` gives, of contents that it gave, which a run keeps of what it sampled."""
  try:
    video, says = video_file.unpacked(ref.value), video_file.told(ref.value)[0]
    T, height, width, channels = video.pixels.shape
    seconds, length = [float(second) for second in says["seconds"]], int(says.get("length", 0))
    sound = channels == 3 * how.each and not (height % how.size or width % how.size) and (
        len(video.times) == T if how.kind == TOGETHER else video.times is None) and all(
            0 <= second < LONGEST for second in (length, *seconds))
  except Exception as e:  # whatever is in them, a row may have it
    raise ImageError(f"{ref.where}: contents of a video that are damaged: {e}. Give the video itself.") from e
  if not sound:
    raise ImageError(f"{ref.where}: contents of a video of another model. Give the video itself.")
  return _measured(ref.value, (), (width, height), how, seconds)._replace(length=length)


def _size(ref: ImageRef, how: Sampling, frames: int, width: int, height: int) -> tuple[int, int]:
  try:
    size = how.frame_size(frames, width, height)
  except ValueError as e:
    raise ImageError(f"{ref.where}: frames of {e}") from e
  if frames * math.prod(size) > MOST_PIXELS:
    raise ImageError(f"{ref.where}: {frames} frames of {size[0]} × {size[1]} pixels are more than {MOST_PIXELS} in "
                     "all. Set model.vision.video.fps, max_frames or max_pixels.")
  return size


def _frames(ref: ImageRef, value: Any, max_pixels: int, fps: Any) -> Frames:
  """`fps`: what stands beside the frames."""
  if isinstance(value, Mapping):
    if given := [key for key in ("video", "video_url", "frames") if value.get(key) is not None]:
      return _frames(ref, value[given[0]], max_pixels, value.get("fps", fps))
    fps = value.get("fps", fps)
  if isinstance(value, str | Path) and (folder := _folder(ref, value)) is not None:
    value = [folder / name for name in _names(ref, folder)]
  if isinstance(value, (list, tuple)):
    return _listed(ref, value, max_pixels, _rate(ref, fps))
  if fps is not None:
    raise ImageError(f"{ref.where} has fps={fps!r}, which is of frames that are given one by one; a file says it "
                     "itself. Take it out. Which frames are taken is said by model.vision.video.")
  if isinstance(value, Mapping) and not any(value.get(key) is not None for key in KEYS):
    raise ImageError(f"{ref.where} is an object with {shown_names(value, 'nothing')}; expected one of "
                     f"{', '.join(VIDEO_KEYS)}.")
  if value is None or not isinstance(value, (Mapping, str, Path, bytes, bytearray, memoryview)):
    found = "null" if value is None else f"a {type(value).__name__}"
    raise ImageError(f"{ref.where} is {found}; expected a path, a folder of frames, a list of frames, or the bytes of "
                     "a file.")
  data, file = content_of(ref, value)
  where, files = ref.where if file is None else f"{ref.where} ({file})", () if file is None else (file,)
  kind = next((kind for at, begins, kind in CONTAINERS if data[at:at + len(begins)] == begins), None)
  if kind is not None and data[4:12] not in AVIF:
    return _container(data, kind, where, max_pixels)._replace(files=files)
  if not begins_as_image(data):
    begin = f" that begin with {data[:8]!r}" if file is None else ""
    raise ImageError(f"{where}: {len(data)} bytes{begin} are no video: no MP4, QuickTime, WebM, Matroska or AVI, and "
                     f"no picture of the formats {', '.join(FORMATS)}.")
  return _animated(data, where, max_pixels)._replace(files=files)


def _rate(ref: ImageRef, fps: Any) -> float | None:
  if fps is not None and (isinstance(fps, bool) or not isinstance(fps, int | float) or not RATES[0] <= fps <= RATES[1]):
    raise ImageError(f"{ref.where}: fps is {fps!r}; expected how many frames there are a second, from {RATES[0]:g} to "
                     f"{RATES[1]:g}.")
  return None if fps is None else float(fps)


def _folder(ref: ImageRef, value: str | Path) -> Path | None:
  """The folder that it names, if it names one."""
  text = str(value)
  if text.startswith("data:") or len(text) > 4096 or "\0" in text:
    return None
  try:
    path = (ref.folder or Path()) / Path(text.removeprefix("file://")).expanduser()
    return path if path.is_dir() else None
  except (OSError, RuntimeError, ValueError):  # no such user, no name of a file
    return None


def _names(ref: ImageRef, folder: Path) -> list[str]:
  """Of a folder's files, 2.png before 10.png."""
  def order(name: str) -> list[tuple[int, str]]:
    return [(int(part or -1) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", name)]

  there = [path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
  names = sorted(there, key=order)
  if not names:
    raise ImageError(f"{ref.where}: the folder {folder} has no files. Put the frames of the video there.")
  return names


def _listed(ref: ImageRef, values: Sequence[Any], max_pixels: int, fps: float | None) -> Frames:
  """Frames that are given one by one."""
  found = [content_of(ref._replace(where=f"{ref.where}[{i}]"), value) for i, value in enumerate(values)]

  def take(indices: Sequence[int]) -> Iterable[Image.Image]:
    for index in indices:
      data, file = found[index]
      where = f"{ref.where}[{index}]" if file is None else f"{ref.where}[{index}] ({file})"
      with opened(data, where, max_pixels, show_bytes=file is None) as image:
        yield decoded(image, where)

  return Frames(len(values), fps, take, tuple(file for _, file in found if file is not None))


def _animated(data: bytes, where: str, max_pixels: int) -> Frames:
  """An animated picture, whose frames say how long each is shown."""
  def frames(indices: Iterable[int]) -> Iterable[Image.Image]:
    with opened(data, where, max_pixels) as image:
      for index in indices:
        try:
          image.seek(index)
        except Exception as e:  # Pillow raises many kinds
          raise ImageError(f"{where}: frame {index} of a damaged or truncated {image.format}: {e}. Fetch it again, or "
                           "set input.images.on_error='drop'.") from e
        yield decoded(image.copy(), where)

  with opened(data, where, max_pixels) as image:
    count, long = 1, 0.0
    try:
      count = getattr(image, "n_frames", 1)
      for index in range(count):
        image.seek(index)
        image.load()
        long += image.info.get("duration", 0) / 1000
    except Exception as e:  # of many kinds, see above
      raise ImageError(f"{where}: a damaged or truncated {image.format} of {count} frames: {e}. Fetch it again, or set "
                       "input.images.on_error='drop'.") from e
  return Frames(count, min(max(count / long, RATES[0]), RATES[1]) if long else None, frames)


def _container(data: bytes, kind: str, where: str, max_pixels: int) -> Frames:
  """A file of a video. FFmpeg is given bytes and their kind, so that it opens nothing else, whatever they name."""
  try:
    import av  # an extra
  except ImportError as e:
    raise DataError(f"{where} is a video ({kind}), which PyAV reads, and that cannot be imported ({e}). Install it: "
                    "pip install 'weft[video]'. Or give its frames one by one, or a GIF or WebP.") from e

  def stream_of(container: Any) -> Any:
    if not container.streams.video:
      raise ImageError(f"{where}: {kind} without pictures, or a damaged one. Fetch it again, or set "
                       "input.images.on_error='drop'.")
    return container.streams.video[0]

  def frames(indices: Sequence[int]) -> Iterable[Image.Image]:
    wanted, number = set(indices), 0
    with _damaged(where, kind, av), av.open(io.BytesIO(data), format=kind) as container:
      for i, frame in enumerate(container.decode(stream_of(container))):
        if i in wanted:
          if getattr(frame, "rotation", 0):
            raise ImageError(f"{where}: its frames are stored turned by {frame.rotation} degrees, which is not undone "
                             "here. Encode it upright: ffmpeg -i IN OUT.")
          number += 1
          yield Image.fromarray(frame.to_ndarray(format="rgb24"))
        if number == len(wanted):
          return
    raise ImageError(f"{where}: says that it has {max(indices) + 1} frames or more, and has fewer. Encode it again, or "
                     "set input.images.on_error='drop'.")

  with _damaged(where, kind, av), av.open(io.BytesIO(data), format=kind) as container:
    stream = stream_of(container)
    if stream.width * stream.height > max_pixels:
      raise ImageError(f"{where}: frames of {stream.width} × {stream.height} pixels, more than input.images.max_pixels="
                       f"{max_pixels}. Make it smaller, or raise the limit.")
    depth = max((part.bits for part in stream.format.components), default=8) if stream.format else 8
    if depth > 8:
      raise ImageError(f"{where}: {depth} bits a channel; expected 8. Convert it: ffmpeg -i IN -pix_fmt yuv420p OUT.")
    fps = float(stream.average_rate) if stream.average_rate else None
    fps = fps if fps is not None and RATES[0] <= fps <= RATES[1] else None
    count = stream.frames or sum(1 for packet in container.demux(stream) if packet.size)
  return Frames(count, fps, frames)


@contextlib.contextmanager
def _damaged(where: str, kind: str, av: Any) -> Iterator[None]:
  """What FFmpeg raises as a message of ours."""
  try:
    yield
  except ImageError:
    raise
  except (av.error.FFmpegError, ValueError, MemoryError) as e:
    raise ImageError(f"{where}: a damaged or truncated {kind}: {e}. Fetch it again, or set "
                     "input.images.on_error='drop'.") from e
