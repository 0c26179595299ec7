"""Images in their own sizes, or as one square: references/tiles.npz is what transformers' processors make of them."""

import types
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from input_pipeline.chat.image_placeholders import ImageFormat, preprocess_of
from input_pipeline.images import tiles
from input_pipeline.images.images import EncodedImage, ImageError, ImageRef, Preprocess, read, to_pixels
from input_pipeline.sources.made import png
from models import tiles as tile_lib
from models import vit
from models.spec_vision import PIXELS
from trainer.config import defaults
from trainer.errors import ConfigError

REFERENCES = dict(np.load(Path(__file__).parents[1] / "references" / "tiles.npz"))
HOW = Preprocess(8, "keep", min_pixels=192, max_pixels=768)
MEAN, STD = (np.array(values, np.float32) for values in PIXELS["clip"])


@pytest.mark.parametrize("number", range(6))
def test_pixels_and_their_order_are_those_of_the_image_processor(number):
  pixels = to_pixels(png(REFERENCES[f"image{number}"]), HOW)
  cut, grid = tiles.cut(pixels, 8)
  _, rows, columns = REFERENCES[f"grid{number}"] // [1, 2, 2]
  assert pixels.shape == (8 * rows, 8 * columns, 3) and len(cut) == rows * columns
  assert grid[-1].tolist() == [1, rows - 1, columns - 1, rows, columns, 0]
  values = np.asarray(vit.patches((cut / np.float32(255) - MEAN) / STD, 4)).reshape(-1, 4, 4, 3)
  expected = REFERENCES[f"values{number}"].reshape(-1, 3, 2, 4, 4)  # two frames, which are the same
  np.testing.assert_allclose(values, np.einsum("ncthw->nthwc", expected)[:, 0], rtol=0, atol=1e-6)
  np.testing.assert_array_equal(expected[:, :, 0], expected[:, :, 1])


@pytest.mark.parametrize("number", range(6))
def test_pixels_and_their_order_are_those_of_gemma_4s_image_processor(number):
  """As large as 70 tokens allow, by tiles here and patch by patch there; padding is at -1."""
  pixels = to_pixels(png(REFERENCES[f"image{number}"]), Preprocess(8, "fit", max_pixels=70 * 64))
  cut, grid = tiles.cut(pixels, 8)
  values = np.asarray(vit.patches(cut, 4)).reshape(-1, 48)
  at = tile_lib.patches_of(grid[None], 2, None)
  found = {(int(x), int(y)): patch for x, y, patch in zip(at.columns[0], at.rows[0], values, strict=True)}
  places, expected = REFERENCES[f"places{number}"], REFERENCES[f"fitted{number}"]
  real = places[:, 0] >= 0
  assert len(found) == real.sum() <= 280
  for place, patch in zip(places[real].tolist(), expected[real], strict=True):
    np.testing.assert_array_equal(found[tuple(place)], patch)


def test_sizes_are_those_of_gemma_4s_image_processor():
  """Of published models, whose images have up to 280 tokens, of 48 × 48 pixels; very long ones, too."""
  found = [tiles.fitted_size(*size, 48, 280 * 48**2) for size in REFERENCES["sizes"].tolist()]
  np.testing.assert_array_equal(found, REFERENCES["fitted_sizes"])


@pytest.mark.parametrize("number", range(6))
def test_pixels_are_those_of_pixtrals_image_processor(number):
  """No side longer than 40, up to multiples of a tile of 8 pixels."""
  pixels = to_pixels(png(REFERENCES[f"image{number}"]), Preprocess(8, "limit", longest_side=40))
  np.testing.assert_array_equal(pixels, REFERENCES[f"limited{number}"])


def test_sizes_are_those_of_pixtrals_image_processor():
  """Of published models, very long images, too."""
  found = [tiles.limited_size(*size, 28, 1540) for size in REFERENCES["sizes"].tolist()]
  np.testing.assert_array_equal(found, REFERENCES["limited_sizes"])


def test_tokens_of_an_image_are_those_of_pixtrals_processor():
  """Behind each row of tiles stands a token, and another behind the last; where the tokenizer has none, nothing."""
  config = defaults()
  config.model.vision.update(tower="pixtral", image_size=8, patch_size=4, projector="merge_mlp", image_token=0,
                             longest_side=40)
  names = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
  tokenizer = types.SimpleNamespace(special_tokens=names, encode_rendered=lambda text: np.array([names.index(text)]))
  images = ImageFormat(config, tokenizer)
  tokens, grid, count = images.measure(24, 16)
  ids, weights, places = images.finish(np.array([7, -1, 7]), np.array([1.0, 1.0, 1.0]), [
      EncodedImage(b"", (), tokens, grid, count)])
  assert "".join(names[i] for i in ids[1:-1]) == REFERENCES["limited_text"]
  assert (grid, count, places) == ((2, 3), 6, (1,))
  np.testing.assert_array_equal(weights, ids != 0)
  tokenizer.special_tokens = names[:1]
  assert ImageFormat(config, tokenizer).measure(24, 16) == (6, (2, 3), 6)


def test_text_around_an_image_is_that_of_gemma_4s_processor():
  config = defaults()
  config.model.vision.update(tower="gemma4", image_size=8, patch_size=4, projector="mean", image_token=260,
                             position_grid=560, max_pixels=70 * 64)
  images = ImageFormat(config, types.SimpleNamespace(special_tokens=("<|image>", "<|image|>", "<image|>")))
  assert images.before + 3 * "<|image|>" + images.after == REFERENCES["fitted_text"]
  assert images.preprocess[:3] == (8, "fit", "bicubic") and images.preprocess.max_pixels == 70 * 64
  config.input.images.resize = "keep"
  with pytest.raises(ConfigError, match="resize is 'keep', but the tower sees images in their shapes. Use auto"):
    preprocess_of(config)


@pytest.mark.parametrize("number", range(6))
def test_one_square_is_that_of_smolvlms_image_processor(number):
  """To the longer side first, its shape kept, and from there to the square: what is rounded twice differs."""
  how = Preprocess(16, "squash", "lanczos", longest_side=40)
  pixels = to_pixels(png(REFERENCES[f"image{number}"]), how)
  expected = REFERENCES[f"square{number}"].transpose(1, 2, 0)
  np.testing.assert_allclose((pixels / np.float32(255) - 0.5) / 0.5, expected, rtol=0, atol=1e-6)
  assert not np.array_equal(pixels, to_pixels(png(REFERENCES[f"image{number}"]), how._replace(longest_side=0)))


def test_text_around_one_square_is_that_of_smolvlms_processor():
  config = defaults()
  config.model.vision.update(tower="siglip", image_size=16, patch_size=4, projector="shuffle", tokens_per_image=4,
                             image_token=260, longest_side=40)
  specials = ("<fake_token_around_image>", "<global-img>", "<image>")
  tokenizer = types.SimpleNamespace(special_tokens=specials)
  images = ImageFormat(config, tokenizer)
  assert images.before + "<image>" * images.each + images.after == REFERENCES["square_text"]
  assert images.preprocess[:3] == (16, "squash", "lanczos") and images.preprocess.longest_side == 40
  tokenizer.special_tokens = specials[1:]
  assert ImageFormat(config, tokenizer).before == ""


def test_tiles_of_several_images_are_put_together_again():
  images = [np.random.default_rng(i).integers(0, 256, (8 * r, 8 * c, 3)).astype(np.uint8)
            for i, (r, c) in enumerate(((2, 3), (3, 2), (1, 1)))]
  cut = [tiles.cut(image, 8, number) for number, image in zip((2, 5, 9), images, strict=True)]
  unused = np.zeros((2, 8, 8, 3), np.uint8), np.zeros((2, 6), np.int32)
  again = tiles.joined(*map(np.concatenate, zip(*cut, unused, strict=True)))
  assert all(np.array_equal(a, b) for a, b in zip(images, again, strict=True))


def test_how_many_tokens_follows_from_the_upright_size_also_of_a_jpeg_that_is_decoded_smaller(tmp_path):
  exif = Image.Exif()
  exif[0x0112] = 6
  Image.new("RGB", (640, 320)).save(tmp_path / "turned.jpg", exif=exif)
  found = []
  read(ImageRef("turned.jpg", "x", tmp_path), 10**6, measure=lambda w, h: found.append((w, h)) or (1, (0, 0)))
  assert found == [(320, 640)]


def test_too_long_an_image_is_refused():
  with pytest.raises(ValueError, match="201 × 1 pixels, of which one side is more than 200"):
    tiles.kept_size(201, 1, 8, 192, 768)
  with pytest.raises(ImageError, match="row 3: 201 × 1 pixels"):
    read(ImageRef(png(np.zeros((1, 201, 3), np.uint8)), "row 3"), 10**6,
         measure=lambda w, h: (len(tiles.kept_size(w, h, 8, 192, 768)), (0, 0)))


def test_augmentation_changes_no_size():
  file = png(REFERENCES["image1"])
  whole = to_pixels(file, HOW)
  some = [to_pixels(file, HOW._replace(crop=0.3), ("k", i)) for i in range(4)]
  assert {x.shape for x in some} == {whole.shape} and not np.array_equal(some[0], some[1])
