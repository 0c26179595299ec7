"""Images from rows: found, refused by name, and the same pixels always."""

import base64
import io
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from input_pipeline.chat.image_placeholders import preprocess_of
from input_pipeline.images import augment, formats, images
from input_pipeline.images.images import ImageError, ImageRef, Images, Preprocess, read, to_pixels
from input_pipeline.images.workers import Task, decode
from input_pipeline.sources.made import png
from trainer.config.checks import resolve
from trainer.errors import ConfigError

PLAIN = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
FILE = png(PLAIN)
LIMIT = 1000


def encoded(image, kind="PNG", **options):
  file = io.BytesIO()
  image.save(file, kind, **options)
  return file.getvalue()


def content(value, folder=None):
  return read(ImageRef(value, "a.jsonl:3: image", folder), LIMIT)


@pytest.mark.parametrize("value", [
    FILE, bytearray(FILE), {"bytes": FILE, "path": None}, {"bytes": None, "path": "p.png"}, "p.png", "sub/../p.png",
    base64.b64encode(FILE).decode(), f"data:image/png;base64,{base64.b64encode(FILE).decode()}",
    {"url": f"data:image/png;base64,{base64.b64encode(FILE).decode()}"}, {"image_url": {"url": "p.png"}}])
def test_every_way_to_name_an_image(value, tmp_path):
  (tmp_path / "sub").mkdir()
  (tmp_path / "p.png").write_bytes(FILE)
  found = content(value, tmp_path)
  assert found.data == FILE
  assert (not found.files) == (not re.search(r"p\.png", str(value)))


def bomb(width, height):
  """A PNG that says it is large, and has no pixels."""
  head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
  chunk = b"IHDR" + head
  return (b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
          + b"\0\0\0\0IEND\xaeB`\x82")


@pytest.mark.parametrize("value, says", [
    ("missing.png", "'.*missing.png' cannot be read: No such file.*relative to the folder of the data file"),
    (None, " is null; expected a path"),
    (3, " is a int; expected a path"),
    ({"type": "image"}, "an object with 'type'; expected one of bytes"),
    ("https://a.b/c.png", "is the URL 'https://a.b/c.png'. Nothing is downloaded"),
    ("data:image/png,abc", "expected base64"),
    (b"not an image", "12 bytes that begin with b'not an i' are no image"),
    (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "are no image of the formats PNG"),
    (FILE[:-30], "a damaged or truncated PNG of 6 × 4 pixels"),
    (encoded(Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 30, 3), np.uint8)), "JPEG")[:-400],
     "a damaged or truncated JPEG"),
    (bomb(100, 11), "100 × 11 pixels, more than input.images.max_pixels=1000"),
    (bomb(60_000, 60_000), "decompression bomb"),
    (encoded(Image.fromarray(np.zeros((3, 3), np.uint16))), "mode is 'I;16'; expected 8 bits"),
])
def test_what_cannot_be_used_is_refused_by_name(value, says, tmp_path):
  with pytest.raises(ImageError, match=f"^a.jsonl:3: image.*{says}"):
    content(value, tmp_path)


def test_a_large_image_is_refused_before_it_is_decoded(monkeypatch):
  def decoded(*args):
    raise AssertionError("decoded")
  monkeypatch.setattr(images, "decoded", decoded)
  with pytest.raises(ImageError, match="max_pixels"):
    content(png(np.zeros((40, 40), np.uint8)))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_modes_become_rgb(mode):
  gray = Image.fromarray(np.full((4, 4, 3), 255, np.uint8)).convert("RGBA" if mode in ("LA", "RGBA") else "RGB")
  image = gray.convert(mode)
  pixels = to_pixels(encoded(image, "TIFF" if mode == "CMYK" else "PNG"), Preprocess(4))
  assert pixels.shape == (4, 4, 3) and pixels.dtype == np.uint8 and (pixels == 255).all()


DEPTHS = np.load(Path(__file__).parents[1] / "references" / "image_depths.npz")


@pytest.mark.parametrize("name", [name for name in DEPTHS if name != "levels"])
def test_more_than_8_bits_a_channel_are_refused_by_the_files_own_depth(name):
  """Of each Pillow makes an image of 8 bits in its own way; what has no more is as it was written."""
  kind, bits, colors = name.split("_")
  data = DEPTHS[name].tobytes()
  if kind == "avif" and "AVIF" not in formats.FORMATS:
    pytest.skip("this Pillow reads no AVIF")
  if int(bits) == 8 or kind == "ppm" and int(bits) < 8:
    expected = DEPTHS["levels"] * 17
    expected = expected[..., :1].repeat(3, axis=-1) if colors.startswith("gray") else expected
    assert content(data).data == data and (to_pixels(data, Preprocess(16))[::4, ::4] == expected).all()
    return
  for use in (content, lambda data: to_pixels(data, Preprocess(16))):
    with pytest.raises(ImageError, match=rf"(of {bits} bits a channel; expected 8|mode is 'I;16'; .* 8 bits).*Convert"):
      use(data)


def test_avif_and_jpeg_2000_are_read_as_other_formats_are(tmp_path):
  names = {"JPEG2000": ("jp2_8_rgb", "j2k_8_rgb"), "AVIF": ("avif_8_rgb",)}
  for data in (DEPTHS[name].tobytes() for kind in names if kind in formats.FORMATS for name in names[kind]):
    assert content(base64.b64encode(data).decode()).data == data
    with pytest.raises(ImageError, match="a damaged or truncated"):
      content(data[:-60], tmp_path)
  clear = Image.fromarray(np.array([[[200, 0, 0, 0], [9, 9, 9, 255]]] * 2, np.uint8).repeat(8, 0).repeat(8, 1))
  exif = Image.Exif()
  exif[0x0112] = 6  # turned by 90 degrees to the right; AVIF says it as irot
  for kind, options in (("JPEG2000", {}), ("AVIF", dict(quality=100, exif=exif))):
    if kind in formats.FORMATS:
      pixels = to_pixels(encoded(clear, kind, **options), Preprocess(16))
      first, last = (pixels[:, :7], pixels[:, 9:]) if kind == "JPEG2000" else (pixels[:7], pixels[9:])
      assert (first == 255).all() and (last == 9).all()


@pytest.mark.parametrize("missing", ["avif", "jpg_2000"])
def test_a_pillow_without_a_library_reads_the_rest(missing):
  code = (f"from PIL import features\nhas = features.check\nfeatures.check = lambda x: x != '{missing}' and has(x)\n"
          "from input_pipeline.images import formats; print(*formats.FORMATS)")
  found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
  assert found == [name for name in formats.FORMATS if name != {"avif": "AVIF", "jpg_2000": "JPEG2000"}[missing]]


@pytest.mark.parametrize("bits, row", [(1, 0b01000000), (2, 0b00011011), (4, 0x01)])
def test_gray_of_few_bits_with_a_transparent_value(bits, row):
  """PNG 1.2, 4.2.2: tRNS has the value as pixels have it, before they are scaled to 8 bits."""
  values = [row >> 8 - bits * (i + 1) & 2**bits - 1 for i in range(8 // bits)]
  for clear in range(2**bits):
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", len(values), 1, bits, 0, 0, 0, 0)), (b"tRNS", struct.pack(">H", clear)),
              (b"IDAT", zlib.compress(bytes([0, row]))), (b"IEND", b""))
    data = b"\x89PNG\r\n\x1a\n" + b"".join(struct.pack(">I", len(body)) + kind + body + struct.pack(
        ">I", zlib.crc32(kind + body)) for kind, body in chunks)
    pixels = to_pixels(data, Preprocess(len(values), interpolation="nearest"))
    assert pixels[0, :, 0].tolist() == [255 if value == clear else value * 255 // (2**bits - 1) for value in values]


def test_transparency_is_on_white_and_exif_turns():
  clear = np.zeros((2, 2, 4), np.uint8)
  clear[0, 0] = 200, 0, 0, 255
  clear[0, 1] = 200, 0, 0, 0
  assert to_pixels(png(clear), Preprocess(2)).tolist()[0] == [[200, 0, 0], [255, 255, 255]]
  exif = Image.Exif()
  exif[0x0112] = 6  # turned by 90 degrees to the right
  turned = to_pixels(encoded(Image.fromarray(PLAIN[:4, :4]), exif=exif), Preprocess(4))
  assert (turned == np.rot90(PLAIN[:4, :4], -1)).all()


def test_squash_pad_and_crop():
  wide = np.zeros((4, 8, 3), np.uint8)
  wide[:, 2:6] = 100
  wide[:, :2] = 250
  file = png(wide)
  how = Preprocess(4, interpolation="nearest", fill=(1, 2, 3))
  assert to_pixels(file, how)[0, :, 0].tolist() == [250, 100, 100, 0]
  padded = to_pixels(file, how._replace(resize="pad"))
  assert padded[0].tolist() == [[1, 2, 3]] * 4 and padded[1, :, 0].tolist() == [250, 100, 100, 0]
  assert (to_pixels(file, how._replace(resize="crop")) == 100).all()
  tall = to_pixels(png(wide.transpose(1, 0, 2)), how._replace(resize="pad"))
  assert (tall == padded.transpose(1, 0, 2)).all()


@pytest.mark.parametrize("name, vision", [
    ("clip", dict(tower="clip")), ("siglip", dict(tower="siglip")), ("gemma3", dict(tower="siglip", projector="pool"))])
def test_what_is_derived_gives_the_pixels_of_each_familys_image_processor(name, vision):
  references = np.load(Path(__file__).parents[1] / "references" / "images.npz")
  how = preprocess_of(resolve({"model": {"vision": dict(image_size=12, patch_size=4, **vision)}}))
  for i in range(5):
    assert (to_pixels(png(references[f"image{i}"]), how) == references[f"{name}{i}"]).all()


def test_making_smaller_averages():
  board = (np.indices((16, 16)).sum(axis=0) % 2 * 255).astype(np.uint8)
  for interpolation in ("bilinear", "bicubic", "lanczos"):
    middle = to_pixels(png(board), Preprocess(4, interpolation=interpolation))[1:3, 1:3]
    assert np.abs(middle.astype(int) - 127).max() < 10


def test_a_long_thin_image_takes_no_memory_of_its_square():
  thin = png(np.full((1, 30_000, 3), 9, np.uint8))
  for resize in images.RESIZES:
    assert to_pixels(thin, Preprocess(16, resize=resize, fill=(9, 9, 9))).tolist() == [[[9] * 3] * 16] * 16


def test_augmentation_is_a_pure_function_of_its_key():
  noise = png(np.random.default_rng(0).integers(0, 255, (20, 30, 3), np.uint8))
  how = Preprocess(8, crop=0.5, flip=0.5, color=0.3)
  made = [to_pixels(noise, how, ("s", 0, epoch)) for epoch in range(6)]
  assert all((a == to_pixels(noise, how, ("s", 0, e))).all() for e, a in enumerate(made))
  assert all((made[i] != made[j]).any() for i in range(6) for j in range(i))
  assert (to_pixels(noise, how) == to_pixels(noise, Preprocess(8))).all()  # no key: as in evaluation
  # Pinned, since a change here changes runs that go on.
  assert augment.uniform((0, "s", 1))[:2].round(6).tolist() == [0.876478, 0.116199]


def test_flip_crop_and_color_each_do_what_they_say():
  square = np.zeros((8, 8, 3), np.uint8)
  square[:, :4] = 200
  file = png(square)
  flipped = [to_pixels(file, Preprocess(8, flip=0.25), ("k", i))[0, 0, 0] == 0 for i in range(400)]
  assert 70 < sum(flipped) < 130
  rng = np.random.default_rng(0)
  image = Image.fromarray(np.zeros((50, 100, 3), np.uint8))
  for _ in range(200):
    left, upper, right, lower = augment.random_box(image, 0.3, rng.random(8))
    assert 0 <= left < right <= 100 and 0 <= upper < lower <= 50
    width, height = (right - left) / 100, (lower - upper) / 50
    assert 0.3 - 1e-9 <= width * height <= 1 + 1e-9
  bright = [int(to_pixels(file, Preprocess(8, color=0.1), ("k", i)).max()) for i in range(100)]
  assert 200 * 0.78 < min(bright) < 195 and 205 < max(bright) < 200 * 1.27


def test_processes_give_the_same_pixels_and_errors():
  tasks = [Task(FILE, Preprocess(8, crop=0.5), ("k", i), f"image {i}") for i in range(5)]
  for here, there in zip(decode(tasks, 0), decode(tasks, 2), strict=True):
    assert (here == there).all()
  with pytest.raises(ImageError, match="image x"):
    decode([*tasks, Task(b"", Preprocess(8), None, "image x")], 2)


def test_a_prompts_images_are_decoded_when_asked_for():
  file, damaged = images.EncodedImage(FILE), images.EncodedImage(FILE[:5])
  shown = Images([file, damaged], Preprocess(4))
  assert len(shown) == 2 and shown[0].shape == (4, 4, 3)
  assert shown == Images([file, damaged], Preprocess(4)) != Images([file], Preprocess(4))
  with pytest.raises(ImageError):
    shown[1]


@pytest.mark.parametrize("given, says", [
    (dict(resize="stretch"), "resize is 'stretch'; allowed: auto, squash"), (dict(crop=0.0), "crop is 0.0"),
    (dict(interpolation="box"), "allowed: auto, bilinear"), (dict(flip=2.0), "flip is 2.0"),
    (dict(color=-1.0), "color is -1.0")])
def test_options_that_are_not_allowed(given, says):
  with pytest.raises(ConfigError, match=says):
    images.check_preprocess(Preprocess(8, **given))


def test_no_jax_in_what_workers_import():
  code = "import sys, input_pipeline.images.workers; sys.exit('jax' in sys.modules)"
  assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_where_a_file_is_looked_for(tmp_path, monkeypatch):
  """In the home folder, beside the data, or where it says; not a folder, and not what is larger than any image."""
  monkeypatch.setenv("HOME", str(tmp_path / "home"))
  for folder in ("home", "data"):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "a.bin").write_bytes(folder.encode())
  ref = ImageRef("x", "row 3", tmp_path / "data")
  found = {name: images._file(ref, Path(name)) for name in ("~/a.bin", "a.bin", f"{tmp_path}/home/a.bin")}
  assert [content for content, _ in found.values()] == [b"home", b"data", b"home"]
  assert [file for _, file in found.values()] == [tmp_path / folder / "a.bin" for folder in ("home", "data", "home")]
  with pytest.raises(ImageError, match="^row 3: '.*/data' cannot be read: it is not a regular file. Paths are relat"):
    images._file(ref, Path("."))
  monkeypatch.setattr(images, "MAX_BYTES", 4)
  with pytest.raises(ImageError, match=r"/b.bin' cannot be read: it has 5 bytes, more than any image \(4\).$"):
    (tmp_path / "b.bin").write_bytes(b"12345")
    images._file(ref, tmp_path / "b.bin")
