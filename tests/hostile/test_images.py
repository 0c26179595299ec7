"""Images that are none, that are too much, or that name what is none of a row's business."""

import base64
import io
import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.hostile.common import config_of, named, prepare, refused, write

RNG = np.random.default_rng(0)
NOISE = RNG.integers(0, 256, (20, 20, 3)).astype(np.uint8)


def encoded(kind="PNG", pixels=NOISE, **options):
  file = io.BytesIO()
  image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
  image.save(file, kind, **options)
  return file.getvalue()


def chunk(kind, data):
  return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, depth=8, color=2, data=b"", *more):
  """A PNG file that says so of itself, with that as its pixels."""
  head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
  return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def flipped(raw, at):
  return raw[:at] + bytes([raw[at] ^ 0xFF]) + raw[at + 1:]


def file(content, name="a.png"):
  """A row that names a file with that content."""
  def make(folder):
    write(folder / name, content)
    return name
  return make


def inline(content):
  return lambda folder: "data:image/png;base64," + base64.b64encode(content).decode()


def value(given):
  return lambda folder: given


def made(how, name="a.png"):
  """A row that names what `how` makes of a path."""
  def make(folder):
    how(folder / name)
    return name
  return make


TIFF16 = encoded("TIFF", np.zeros((4, 4), np.uint16))
TABLE = [
    ("no bytes", file(b""), "a.png", "0 bytes", "no image of the formats"),
    ("text named png", file("not an image"), "a.png", "no image of the formats"),
    ("only the magic", file(b"\x89PNG\r\n\x1a\n"), "a.png", "damaged or truncated"),
    ("png cut", file(encoded()[:-60]), "a.png", "damaged or truncated"),
    ("png flipped", file(flipped(encoded(), 60)), "a.png", "damaged or truncated"),
    ("png without an end of text", file(png(2, 2, 8, 2, b"", chunk(b"zTXt", b"a\0\0" + zlib.compress(b"a" * 10**7)))),
     "a.png"),
    ("png pixels missing", file(png(64, 64)), "a.png", "damaged or truncated"),
    ("png of no size", file(png(0, 0)), "a.png"),
    ("png that claims too many pixels", file(png(100_000, 1_000)), "max_pixels=50000000"),
    ("png that claims far too many", file(png(2**31 - 1, 2**31 - 1)), "a.png"),
    ("png of sixteen bits of gray", file(encoded(pixels=np.zeros((4, 4), np.uint16))), "its mode is", "8 bits"),
    ("png of sixteen bits of colour", file(png(2, 2, 16, 2, bytes(26))), "PNG of 16 bits", "expected 8", "Convert it"),
    ("png of sixteen bits with alpha", file(png(2, 2, 16, 6, bytes(34))), "PNG of 16 bits", "expected 8"),
    ("tiff of sixteen bits", file(TIFF16, "a.tif"), "its mode is", "8 bits"),
    ("tiff whose first part is itself", file(b"II*\0\x08\0\0\0\x01\0\0\x01\x03\0\x01\0\0\0\x01\0\0\0\x08\0\0\0"),
     "a.png"),
    ("jpeg cut", file(encoded("JPEG", RNG.integers(0, 256, (200, 200, 3)).astype(np.uint8))[:900]), "a.png",
     "truncated"),
    ("gif cut", file(encoded("GIF", NOISE[..., 0])[:400]), "a.png", "truncated"),
    ("webp cut", file(encoded("WEBP")[:60]), "a.png"),
    ("bmp with a negative size", file(b"BM" + struct.pack("<IHHIIiiHHIIiiII", 100, 0, 0, 54, 40, -5, -5, 1, 24, 0, 0,
                                                          0, 0, 0, 0)), "a.png"),
    ("postscript which would start a program", file(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n"),
     "a.png", "no image of the formats"),
    ("svg with a reference", file('<svg><image href="http://169.254.169.254/"/></svg>'), "no image of the formats"),
    ("missing file", value("b.png"), "b.png", "cannot be read", "relative to the folder"),
    ("url", value("http://127.0.0.1:1/a.png"), "is the URL 'http://127.0.0.1:1/a.png'", "Nothing is downloaded"),
    ("url in capitals", value("HTTPS://example.com/a.png"), "Nothing is downloaded"),
    ("url of a bucket", value("gs://bucket/a.png"), "Nothing is downloaded"),
    ("url in an object", value({"image_url": {"url": "https://example.com/a.png"}}), "Nothing is downloaded"),
    ("a file of secrets", value("/etc/passwd"), "/etc/passwd", "no image of the formats"),
    ("a file above the folder", value("../../../../../../../../etc/passwd"), "/etc/passwd", "no image of the formats"),
    ("a device without an end", value("/dev/zero"), "/dev/zero", "not a regular file"),
    ("a pipe", made(os.mkfifo), "a.png", "not a regular file"),
    ("a folder", made(os.mkdir), "a.png", "not a regular file"),
    ("a loop of links", made(lambda path: path.symlink_to(path)), "a.png", "cannot be read"),
    ("a path with a nul", value("a\0.png"), "cannot be read"),
    ("a path far too long", value("a" * 100_000), "cannot be read"),
    ("a path of nobody", value("~nobody_here/a.png"), "cannot be read"),
    ("data url without base64", value("data:image/png,abc"), "the data URL begins with"),
    ("base64 rubbish", value("data:image/png;base64,@@@@"), "not valid base64"),
    ("base64 of text", inline(b"text"), "no image of the formats"),
    ("base64 cut", inline(encoded()[:90]), "damaged or truncated"),
    ("a number", value(7), "image is a int"),
    ("an empty string", value(""), "image is empty"),
    ("an object without an image", value({"colour": "red"}), "an object with 'colour'"),
    ("objects within objects", value({"image": {"image": {"image": {"image": None}}}}), "is an object with 'image'"),
    ("a list of lists", value([["a.png"]]), "image[0] is a list"),
]
FINE = base64.b64encode(encoded()).decode()


def config_with_images(folder, *rows):
  config = config_of(write(folder / "a.jsonl", *rows), split="all")
  config.model.vision.update(tower="siglip", image_size=8, patch_size=4, num_layers=1, hidden_size=8,
                             intermediate_size=8, num_heads=1, image_token=258)
  return config


@pytest.mark.parametrize("row", named([(row[0], row[1:]) for row in TABLE]))
def test_a_bad_image_is_one_message_with_its_row(row, tmp_path, guard):
  make, *expected = row
  folder = tmp_path / "data"
  folder.mkdir()
  rows = [{"image": FINE, "prefix": "a", "suffix": "b"}, {"image": make(folder), "prefix": "a", "suffix": "b"}]
  config = config_with_images(folder, *rows)
  with guard.only(tmp_path / "work"):
    message = refused(lambda: prepare(config, tmp_path / "work"), f"{folder}/a.jsonl:2", *expected)
  assert "root:" not in message  # what is in a file that a row names is not told


@pytest.mark.parametrize("name, raw", [
    ("cmyk", encoded("JPEG", Image.fromarray(NOISE).convert("CMYK"))),
    ("animated", encoded("GIF", NOISE[..., 0], save_all=True, append_images=[Image.fromarray(NOISE[..., 0])] * 3)),
    ("palette", encoded("PNG", NOISE[..., 0], bits=1)), ("transparent", encoded("PNG", np.zeros((9, 1, 4), np.uint8))),
    ("one pixel high", encoded("PNG", np.zeros((1, 4000, 3), np.uint8)))])
def test_odd_images_are_accepted(name, raw, tmp_path):
  config = config_with_images(tmp_path, {"image": base64.b64encode(raw).decode(), "prefix": name, "suffix": "b"})
  _, data = prepare(config, tmp_path / "work")
  assert data.batch(0)["images"].shape[2:] == (8, 8, 3) or data.batch(0)["images"].shape[1:] == (8, 8, 3)


def test_a_bad_image_may_be_dropped_and_is_counted(tmp_path):
  config = config_with_images(tmp_path, {"image": FINE, "prefix": "a", "suffix": "b"},
                              {"image": "/dev/zero", "prefix": "a", "suffix": "b"})
  config.input.images.on_error = "drop"
  _, data = prepare(config, tmp_path / "work")
  assert [row for row in data.stats() if 1 in row.values()]
