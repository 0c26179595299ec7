"""Images among tokens: each placeholder has its own feature, blocks are what the model's attention says."""

from types import SimpleNamespace

import numpy as np
import pytest

from trainer.errors import ConfigError
from trainer.generate import image_tokens
from trainer.generate.image_tokens import Layout

LAYOUT = Layout(image_token=9, tokens_per_image=2, image_size=2, attention="image")
IDS = np.array([1, 9, 9, 2, 9, 9, 3])


def image(value):
  return np.full((2, 2, 3), value, np.uint8)


@pytest.mark.parametrize("attention, blocks", [
    ("causal", [0, 0, 0, 0, 0, 0, 0]), ("image", [0, 1, 1, 0, 2, 2, 0]), ("prefix", [1, 1, 1, 1, 1, 1, 0])])
def test_each_placeholder_takes_the_next_feature_and_blocks_are_the_models(attention, blocks):
  found = image_tokens.of_text(LAYOUT._replace(attention=attention), IDS, [image(1), image(2)], 6, "x")
  assert found.image_index.tolist() == [0, 1, 2, 0, 3, 4, 0] and found.block_ids.tolist() == blocks
  assert [part[0, 0, 0] for part in found.images] == [1, 2]


def test_a_placeholder_behind_the_beginning_is_an_ordinary_token():
  found = image_tokens.of_text(LAYOUT, IDS, [image(1)], 3, "x")
  assert found.image_index.tolist() == [0, 1, 2, 0, 0, 0, 0] and found.block_ids.tolist() == [0, 1, 1, 0, 0, 0, 0]


def test_texts_side_by_side_index_their_own_images():
  batch = image_tokens.empty(LAYOUT, 2, 10, image_tokens.slots(3))
  assert batch["images"].shape == (2, 4, 2, 2, 3)
  first = image_tokens.of_text(LAYOUT, IDS, [image(1), image(2)], 7, "x")
  second = image_tokens.of_text(LAYOUT, np.array([9, 9, 4]), [image(3)], 3, "y")
  image_tokens.put(LAYOUT, batch, first, 1)
  image_tokens.put(LAYOUT, batch, second, 1, begin=7, first=2)
  assert batch["images"][1, :, 0, 0, 0].tolist() == [1, 2, 3, 0] and not batch["images"][0].any()
  assert batch["image_index"].tolist() == [[0] * 10, [0, 1, 2, 0, 3, 4, 0, 5, 6, 0]]
  assert batch["block_ids"].tolist() == [[0] * 10, [0, 1, 1, 0, 2, 2, 0, 3, 3, 0]]


@pytest.mark.parametrize("attention, most, keys", [
    ("causal", 0, set()), ("causal", 1, {"images", "image_index"}), ("image", 0, set()), ("prefix", 0, {"block_ids"}),
    ("image", 2, {"images", "image_index", "block_ids"})])
def test_a_batch_has_the_arrays_that_say_something(attention, most, keys):
  assert image_tokens.empty(LAYOUT._replace(attention=attention), 1, 4, most).keys() == keys
  assert image_tokens.empty(None, 1, 4, 0) == {}


@pytest.mark.parametrize("layout, images, message", [
    (None, [image(1)], "x has 1 image.s., but the model has no tower"),
    (LAYOUT._replace(image_token=None), [image(1)], "model.vision.image_token is not set"),
    (LAYOUT, [image(1)], "x has 1 image.s., for which it needs 2 tokens of the id 9 .2 each., and 4 of them"),
    (LAYOUT, [image(1), image(1)[:1]], "x, image 1: found uint8 .1, 2, 3., the model wants uint8 .2, 2, 3."),
    (LAYOUT, [image(1), image(1) / 255], "x, image 1: found float64")])
def test_what_does_not_fit_is_refused(layout, images, message):
  with pytest.raises(ConfigError, match=message):
    image_tokens.of_text(layout, IDS, images, 7, "x")
  with pytest.raises(ConfigError, match="found images for 2 prompts, and 1 prompts"):
    image_tokens.shown(LAYOUT, [IDS], [[], []])


def test_without_prefixes_all_of_a_prompt_is_its_beginning():
  """So that its placeholders are those of images, and not tokens that the model has written."""
  whole, = image_tokens.shown(LAYOUT, [IDS], [[image(1), image(2)]])
  assert whole.image_index.tolist() == [0, 1, 2, 0, 3, 4, 0]


@pytest.mark.parametrize("layout", [None, LAYOUT, LAYOUT._replace(tiles=True)])
def test_texts_without_images_have_none_whatever_the_model_takes(layout):
  """Several, side by side in a batch that has no arrays for any."""
  texts = [np.array([1, 2, 3]), np.array([4, 5])]
  parts = image_tokens.shown(layout, texts, None)
  assert [(part.images, part.frames, part.causal) for part in parts] == [((), 1, True)] * 2
  batch = image_tokens.batch_of_texts(layout, 3, 4, 7, texts, parts)
  assert batch["tokens"].tolist() == [[1, 2, 3, 7], [4, 5, 7, 7], [7] * 4]
  assert batch["positions"].tolist() == [[0, 1, 2, 0], [0, 1, 0, 0], [0] * 4]
  assert batch["segment_ids"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [0] * 4]
  assert not {"images", "image_grid", "image_index"} & batch.keys()


def test_a_layout_is_what_the_models_tower_takes():
  """Frames are of videos, which not every tower takes."""
  vision = SimpleNamespace(image_token=7, tokens_per_image=5, image_size=28, attention="prefix", native=True,
                           video=None, frames=3)
  assert image_tokens.layout_of(SimpleNamespace(vision=vision)) == Layout(7, 5, 28, "prefix", True, None, 1)
  vision.video = SimpleNamespace(token=9)
  found = image_tokens.layout_of(SimpleNamespace(vision=vision))
  assert found == Layout(7, 5, 28, "prefix", True, 9, 3) and found.held == [7, 9]
  for model in (SimpleNamespace(vision=None), SimpleNamespace()):
    assert image_tokens.layout_of(model) is None
