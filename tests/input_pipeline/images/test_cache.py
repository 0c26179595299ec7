"""Images beside a token cache: each content once, each use where its document begins."""

from types import SimpleNamespace

import numpy as np
import pytest

from input_pipeline.images.cache import ImageWriter
from input_pipeline.images.images import EncodedImage


def image(data, tokens=4, squares=1, seconds=None):
  return EncodedImage(data, (), tokens, (1, 1), squares, seconds)


def test_images_are_numbered_by_their_contents_and_placed_in_their_documents(tmp_path):
  written = {}
  writer = ImageWriter(lambda name, values: written.setdefault(name, []).extend(values.tolist()))
  assert writer.finish(tmp_path) == {} and not (tmp_path / "files.json").exists()
  one, two = image(b"one"), image(b"second", 9, 2, (0.0,))
  documents = [SimpleNamespace(images=(one, two), places=(1, 7)), SimpleNamespace(images=(), places=()),
               SimpleNamespace(images=(one,), places=(0,))]
  writer.write(documents, np.array([0, 20, 30]))
  assert written["image_ids"] == [0, 1, 0] and written["image_places"] == [1, 7, 30]
  assert written["image_tokens"] == [4, 9, 4] and written["image_squares"] == [1, 2, 1]
  found = writer.finish(tmp_path)
  assert {key: found[key] for key in ("images", "image_uses", "videos", "image_bytes")} == {
      "images": 2, "image_uses": 3, "videos": 1, "image_bytes": 9}
  with pytest.raises(ValueError, match="^a document has 1 images in 2 places$"):
    writer.write([SimpleNamespace(images=(one,), places=(0, 3))], np.array([0]))
