"""Videos against the video processors of transformers: references/videos.npz comes of make_video_references.py; and
what is refused."""

import contextlib
import io
import json
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from input_pipeline.images import tiles, video_file, videos
from input_pipeline.images.images import ImageError, ImageRef, Preprocess, to_pixels
from input_pipeline.images.videos import TIMED, TOGETHER, Sampling
from input_pipeline.sources.made import png
from tests import native
from trainer.errors import DataError

REFERENCES = dict(np.load(Path(__file__).parents[1] / "references" / "videos.npz"))
CASES, ASKED = (json.loads(str(REFERENCES[key])) for key in ("cases", "asked"))
EACH = {"qwen2_vl": (2 * 64, 6 * 64), "qwen3_vl": (8 * 64, 24 * 64)}


def sampling(kind: str, settings: dict, tokens_per_second: float = 0.0) -> Sampling:
  """What a processor of those settings does; those of Qwen3-VL assume two frames a second."""
  found = dict(fps=None if kind == "qwen2_vl" else 2.0, num_frames=None, min_frames=4, max_frames=768) | settings
  if found.pop("do_sample_frames", True) is False:
    found |= dict(fps=None, num_frames=None)
  return Sampling(TOGETHER if kind == "qwen2_vl" else TIMED, 2, 8, **found, min_pixels=EACH[kind][0],
                  max_pixels=EACH[kind][1], tokens_per_second=tokens_per_second)


HOW = sampling("qwen2_vl", dict(do_sample_frames=False))


def read(value, how: Sampling = HOW, folder: Path | None = None):
  return videos.read(ImageRef(value, "file:1: video", folder, True), how, 10**6)


def files(number: int) -> list[bytes]:
  return [png(frame) for frame in REFERENCES[f"video{number}"]]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_frames_and_their_pixels_are_those_of_the_video_processor(number):
  """Those that are taken, in their size; torchvision rounds a few of the values otherwise, by 1."""
  case, expected = CASES[number], REFERENCES[f"values{number}"]
  read_video = read({"frames": files(number), "fps": case["fps"]}, sampling(case["kind"], case["settings"]))
  video = to_pixels(read_video.data, Preprocess(8))
  T, _, height, width = expected.shape[:4]
  found = video.pixels.reshape(T, height, width, 2, 3).transpose(0, 3, 1, 2, 4)
  difference = np.abs(found.astype(int) - expected)
  assert difference.max() <= 1 and (difference > 0).mean() < 0.01
  assert read_video.grid == (height // 8, width // 8) and read_video.squares == T * height * width // 64
  if len(REFERENCES[f"taken{number}"]) % 2:  # the last frame is there twice
    np.testing.assert_array_equal(found[-1, 0], found[-1, 1])


@pytest.mark.parametrize("number", [i for i, case in enumerate(CASES) if case["kind"] == "qwen3_vl"])
def test_timestamps_are_those_of_the_processor(number):
  case = CASES[number]
  video = read({"frames": files(number), "fps": case["fps"]}, sampling(case["kind"], case["settings"]))
  pads = "<|video_pad|>" * (video.grid[0] * video.grid[1])
  text = "".join(f"<{s:.1f} seconds><|vision_start|>{pads}<|vision_end|>" for s in video.seconds)
  assert text == str(REFERENCES[f"text{number}"]) and to_pixels(video.data, Preprocess(8)).times is None


@pytest.mark.parametrize("number", [i for i, case in enumerate(CASES) if case["kind"] == "qwen2_vl"])
def test_times_are_those_of_qwen2_vl_and_qwen2_5_vl(number):
  """The first counts places, the other how long they last (transformers computes that in float32)."""
  case = CASES[number]
  value, T = {"frames": files(number), "fps": case["fps"]}, len(REFERENCES[f"values{number}"])
  plain, by_second = (to_pixels(read(value, sampling("qwen2_vl", case["settings"], rate)).data, Preprocess(8)).times
                      for rate in (0.0, 7.0))
  long = np.float32(7) * REFERENCES[f"seconds{number}"].astype(np.float32)
  assert plain.tolist() == list(range(T))
  np.testing.assert_array_equal(by_second, (np.arange(T, dtype=np.float32) * long).astype(int))


@pytest.mark.parametrize("number", range(len(ASKED)))
def test_which_frames_are_taken(number):
  kind, settings = ASKED[number]
  how = sampling(kind, settings)
  for frames in (7, 8, 30, 61, 500, 3001):
    for fps in (1.0, 12.5, 24.0, 29.97):
      expected = REFERENCES[f"taken{number}_{frames}_{fps}"]
      if len(expected):
        np.testing.assert_array_equal(how.indices(frames, fps), expected, str((frames, fps)))
      else:
        with pytest.raises(ValueError, match=f"has {frames} frames, fewer than the"):
          how.indices(frames, fps)


def test_sizes_are_those_of_qwen3_vls_video_processor():
  """So many pixels in all frames; small ones and long ones, too."""
  found = [tiles.video_size(*map(int, row[:3]), 32, 128 * 1024, 768 * 1024) for row in REFERENCES["sizes"]]
  np.testing.assert_array_equal(found, REFERENCES["sizes"][:, 3:])
  with pytest.raises(ValueError, match="one side is more than 200 times the other"):
    tiles.video_size(4, 10000, 40, 32, 128 * 1024, 768 * 1024)


def test_tiles_of_a_video():
  """Place by place, row by row; a video whose places stand by themselves has a number for each."""
  pixels = np.random.default_rng(0).integers(0, 256, (3, 16, 24, 6)).astype(np.uint8)
  cut, grid = tiles.cut(video_file.Video(pixels, np.array([0, 5, 11], np.int32)), 8, 4)
  assert cut.shape == (18, 8, 8, 6)
  assert grid[-1].tolist() == [4, 1, 2, 2, 3, 11] and grid[6].tolist() == [4, 0, 0, 2, 3, 5]
  np.testing.assert_array_equal(cut[6 + 4], pixels[1, 8:16, 8:16])
  _, apart = tiles.cut(video_file.Video(pixels), 8, 4)
  assert apart[::6].tolist() == [[number, 0, 0, 2, 3, 0] for number in (4, 5, 6)]
  strip, = tiles.joined(cut, grid)
  np.testing.assert_array_equal(strip[:, 24:48], pixels[0, ..., 3:])
  assert strip.shape == (16, 6 * 24, 3)


def test_a_video_is_read_from_wherever_frames_are(tmp_path):
  """One by one, by their paths, in a folder whose names have numbers, as an animated picture: the same frames."""
  frames = native.video(11)
  for i, frame in enumerate(frames):
    (tmp_path / "frames").mkdir(exist_ok=True)
    (tmp_path / "frames" / f"{i}.png").write_bytes(png(frame))
  (tmp_path / "a.webp").write_bytes(native.animated(frames, 0.5))
  given = [[png(frame) for frame in frames], [f"frames/{i}.png" for i in range(11)], "frames", "a.webp",
           {"path": "a.webp"}, {"frames": "frames", "fps": 2}, {"video": {"bytes": native.animated(frames, 0.5)}}]
  found = [read(value, folder=tmp_path) for value in given]
  pixels = [to_pixels(video.data, Preprocess(8)).pixels for video in found]
  assert all(np.array_equal(pixels[0], other) for other in pixels[1:]) and pixels[0].shape[0] == 6
  assert [len(video.files) for video in found] == [0, 11, 11, 1, 1, 11, 0]
  # 24 a second where nothing is said; of the picture, and where it is said, 2.
  assert [video.seconds[1] for video in found] == pytest.approx([2 / 24] * 3 + [1.0] * 4)


def test_a_gif_has_its_frames(tmp_path):
  """Of a palette of its own, each as long as it says."""
  file, frames = io.BytesIO(), [Image.fromarray(frame).quantize(250) for frame in native.video(5)]
  frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=[100, 300, 100, 300, 200])
  video = to_pixels(read(file.getvalue(), sampling("qwen2_vl", dict(num_frames=4))).data, Preprocess(8))
  assert video.pixels.shape[0] == 2 and read(file.getvalue()).seconds == pytest.approx((0.0, 0.4, 0.8))
  size = video.pixels.shape[2], video.pixels.shape[1]
  expected = frames[2].convert("RGB").resize(size, Image.Resampling.BICUBIC)  # frames 0, 1, 2 and 3 of 5
  np.testing.assert_array_equal(video.pixels[1, ..., :3], np.asarray(expected))


def test_contents_are_read_again_as_they_were_read():
  """A run keeps what it sampled of a prompt by its contents, without the files."""
  video = read([png(frame) for frame in native.video()])
  assert read(video.data) == video and video_file.is_video(video.data) and video.grid == (2, 3)
  for data in (video.data[:-40], video.data[:20], video_file.MAGIC, video.data.replace(b"seconds", b"minutes")):
    with pytest.raises(ImageError, match="contents of a video that are damaged"):
      read(data)
  head, body = video_file.told(video.data)
  for entries in (dict(length=-1), dict(seconds=[float("nan")] * len(head["seconds"]))):
    told = json.dumps(head | entries).encode()
    with pytest.raises(ImageError, match="contents of a video of another model"):
      read(video_file.MAGIC + len(told).to_bytes(4, "little") + told + body)
  with pytest.raises(ImageError, match="contents of a video of another model"):
    read(video.data, sampling("qwen3_vl", {}))


VIDEO = native.video()
OTHER = native.video(size=(20, 31))


@pytest.mark.parametrize("value, how, message", [
    (None, HOW, "file:1: video is null; expected a path, a folder of frames"),
    (7, HOW, "is a int; expected"), ({"nothing": 1}, HOW, "is an object with 'nothing'; expected one of video"),
    ("missing.gif", HOW, "missing.gif' cannot be read: No such file"),
    (b"words", HOW, "5 bytes that begin with b'words' are no video: no MP4"),
    ([png(VIDEO[0])], HOW, r"has 1 frame\(s\); a video has 2 or more. Give it as an image"),
    (png(VIDEO[0]), HOW, r"has 1 frame\(s\); a video has 2 or more"),
    ([], HOW, r"has 0 frame\(s\)"),
    ([png(VIDEO[0]), png(OTHER[0])], HOW, "frame 1 has 31 × 20 pixels, and those before it 30 × 20"),
    ([png(VIDEO[0]), png(VIDEO[0])[:90]], HOW, r"video\[1\]: a damaged or truncated PNG"),
    (native.animated(VIDEO)[:500], HOW, "damaged or truncated"),
    ({"frames": [png(f) for f in VIDEO], "fps": 0}, HOW, "fps is 0; expected how many frames there are a second, from"),
    ({"bytes": native.animated(VIDEO), "fps": 2}, HOW, "has fps=2, which is of frames that are given one by one"),
    ([png(f) for f in VIDEO], sampling("qwen3_vl", {}), "says nothing of how many frames a second"),
    ([png(f) for f in VIDEO], sampling("qwen2_vl", dict(num_frames=8)), "has 6 frames, fewer than the 8"),
    ([png(f) for f in VIDEO], sampling("qwen3_vl", dict(num_frames=8, fps=None)), "6 frames, fewer .*num_frames=8"),
    ("https://a.b/c.mp4", HOW, "Nothing is downloaded"),
])
def test_what_is_no_video_is_refused_by_name(value, how, message, tmp_path):
  with pytest.raises(ImageError, match=message):
    read(value, how, tmp_path)


def test_frames_that_are_too_large_are_refused():
  with pytest.raises(ImageError, match="30 × 20 pixels, more than input.images.max_pixels=500"):
    videos.read(ImageRef([png(frame) for frame in VIDEO], "file:1: video", None, True), HOW, 500)


def test_a_video_needs_pyav(monkeypatch):
  import sys
  monkeypatch.setitem(sys.modules, "av", None)
  with pytest.raises(DataError, match=r"is a video \(mp4\), which PyAV reads.*pip install 'weft\[video\]'") as error:
    read(b"\0\0\0\x18ftypisom" + bytes(40))
  assert not isinstance(error.value, ImageError)  # no row is dropped for it


def encoded(frames: list[np.ndarray], kind: str = "mp4", codec: str = "mpeg4", rate: int = 5) -> bytes:
  av = pytest.importorskip("av")
  file = io.BytesIO()
  with av.open(file, "w", format=kind) as container:
    stream = container.add_stream(codec, rate=rate)
    stream.width, stream.height, stream.pix_fmt = frames[0].shape[1], frames[0].shape[0], "yuv420p"
    for frame in frames:
      container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
    container.mux(stream.encode(None))
  return file.getvalue()


@pytest.mark.parametrize("kind, codec", [("mp4", "mpeg4"), ("webm", "libvpx"), ("matroska", "mpeg4"), ("avi", "mpeg4")])
def test_frames_of_videos(kind, codec):
  """Close to what was encoded, those that are taken; a second has as many as the file says."""
  frames = [np.full((32, 48, 3), 25 * i, np.uint8) for i in range(9)]
  data = encoded(frames, kind, codec)
  video = read(data, sampling("qwen2_vl", dict(num_frames=4)))
  pixels = to_pixels(video.data, Preprocess(8)).pixels
  means = pixels.reshape(2, *pixels.shape[1:3], 2, 3).mean((1, 2, 4)).reshape(-1)
  np.testing.assert_allclose(means, [25 * i for i in (0, 2, 4, 6)], atol=6)
  assert video.seconds[1] == pytest.approx(2 / (4 / 9 * 5), rel=1e-3)


def test_a_damaged_video_is_refused():
  data = encoded([np.full((32, 48, 3), 25 * i, np.uint8) for i in range(9)])
  with pytest.raises(ImageError, match="mp4 without pictures, or a damaged one"):
    read(data[:len(data) // 2])
  with pytest.raises(ImageError, match="frames of 48 × 32 pixels, more than input.images.max_pixels"):
    videos.read(ImageRef(data, "file:1: video", None, True), HOW, 500)


# ----------------------------------------------------------------------------------------------
# Files of videos, by a stand-in for PyAV with what of it is used.


class Broken(Exception):
  pass


def container(frames=6, size=(4, 3), rate=5, bits=8, says=None, turned=None, fails=None, streams=1):
  """What `av.open` gives of a file with so many frames, of which frame i is of the colour i."""
  def picture(i):
    pixels = np.full((size[1], size[0], 3), i, np.uint8)
    return types.SimpleNamespace(rotation=90 if i == turned else 0, to_ndarray=lambda format: pixels)

  def decode(stream):
    for i in range(frames):
      if i == fails:
        raise Broken("bad data")
      yield picture(i)

  depth = types.SimpleNamespace(components=[types.SimpleNamespace(bits=bits)])
  stream = types.SimpleNamespace(width=size[0], height=size[1], average_rate=rate, format=depth,
                                 frames=frames if says is None else says)
  packets = [types.SimpleNamespace(size=1)] * frames + [types.SimpleNamespace(size=0)]
  return types.SimpleNamespace(streams=types.SimpleNamespace(video=[stream] * streams), decode=decode,
                               demux=lambda stream: iter(packets))


@pytest.fixture
def av(monkeypatch):
  """`av(…)`: the frames of a file with such contents; what was opened."""
  opened = []

  def of(max_pixels=100, **contents):
    made = container(**contents)

    @contextlib.contextmanager
    def open_(file, format):
      opened.append((file.read(), format))
      yield made

    package = types.ModuleType("av")
    package.open, package.error = open_, types.SimpleNamespace(FFmpegError=Broken)
    monkeypatch.setitem(sys.modules, "av", package)
    return videos._container(b"data", "mp4", "row 3", max_pixels)
  of.opened = opened
  return of


def test_frames_of_a_file_are_those_that_are_asked_for(av):
  found = av()
  assert (found.total, found.fps) == (6, 5.0)
  assert [np.asarray(frame)[0, 0].tolist() for frame in found.take([1, 4, 5])] == [[1] * 3, [4] * 3, [5] * 3]
  assert av.opened == [(b"data", "mp4")] * 2  # bytes and their kind: nothing else is opened
  assert av(says=0).total == 6 and av(says=9).total == 9  # counted where the file does not say
  assert av(rate=None).fps is None and av(rate=videos.RATES[1]).fps == videos.RATES[1]
  assert av(rate=2 * videos.RATES[1]).fps is None and av(rate=videos.RATES[0] / 2).fps is None
  assert av(max_pixels=12).total == 6


@pytest.mark.parametrize("contents, message", [
    (dict(streams=0), "row 3: mp4 without pictures, or a damaged one. Fetch it again, or set input.images.on_error='d"),
    (dict(max_pixels=11), "row 3: frames of 4 × 3 pixels, more than input.images.max_pixels=11. Make it smaller, or r"),
    (dict(bits=10), "row 3: 10 bits a channel; expected 8. Convert it: ffmpeg -i IN -pix_fmt yuv420p OUT."),
    (dict(turned=2), "row 3: its frames are stored turned by 90 degrees, which is not undone here. Encode it upright:"),
    (dict(frames=4, says=9), "row 3: says that it has 5 frames or more, and has fewer. Encode it again, or set input."),
    (dict(fails=3), "row 3: a damaged or truncated mp4: bad data. Fetch it again, or set input.images.on_error='drop'"),
])
def test_files_that_cannot_be_used_are_told(av, contents, message):
  with pytest.raises(ImageError, match=f"^{re.escape(message)}"):
    list(av(**contents).take([1, 2, 4]))


def test_sizes_that_cannot_be_are_told_with_their_row(monkeypatch):
  def frame_size(frames, width, height):
    if width > 9:
      raise ValueError("10 × 2: too wide")
    return 2 * width, height

  how, ref = types.SimpleNamespace(frame_size=frame_size), ImageRef("v", "row 3: video")
  monkeypatch.setattr(videos, "MOST_PIXELS", 40)
  assert videos._size(ref, how, 5, 2, 2) == (4, 2)
  with pytest.raises(ImageError, match="^row 3: video: 6 frames of 4 × 2 pixels are more than 40 in all. Set model.vi"):
    videos._size(ref, how, 6, 2, 2)
  with pytest.raises(ImageError, match="^row 3: video: frames of 10 × 2: too wide$"):
    videos._size(ref, how, 1, 10, 2)


def test_folders_of_frames(tmp_path):
  ref = ImageRef("v", "row 3: video", tmp_path)
  (tmp_path / "empty").mkdir()
  (tmp_path / "empty" / ".hidden").write_text("")
  (tmp_path / "full" / "deep").mkdir(parents=True)
  for name in ("10.png", "2.png", "a1.png", "1.png"):
    (tmp_path / "full" / name).write_text("")
  assert videos._folder(ref, "full") == videos._folder(ref, f"file://{tmp_path}/full") == tmp_path / "full"
  for name in ("data:full", "no", "full/2.png", "x" * 5000, "full\0", "~nobody-of-that-name/x"):
    assert videos._folder(ref, name) is None, name
  assert videos._names(ref, tmp_path / "full") == ["1.png", "2.png", "10.png", "a1.png"]
  with pytest.raises(ImageError, match=f"^row 3: video: the folder {tmp_path}/empty has no files. Put the frames of t"):
    videos._names(ref, tmp_path / "empty")
