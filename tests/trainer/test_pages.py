"""Pages of what was generated: pictures are within them to the pixel, and nothing in the data acts on them."""

import base64
import io
import re

import numpy as np
from PIL import Image

from trainer import pages

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 5, 3)).astype(np.uint8)


def pictures(html):
  """The images in a page, uint8 [H, W, 3]."""
  found = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
  return [np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))) for data in found]


def test_pictures_are_in_the_page_to_the_pixel():
  cards = [pages.Card("a", [PIXELS, 255 - PIXELS], [("answer", "x")], True), pages.Card("b", right=False)]
  html = pages.page("samples", cards, 7)
  for found, expected in zip(pictures(html), [PIXELS, 255 - PIXELS], strict=True):
    np.testing.assert_array_equal(found, expected)
  assert "right: a" in html and "wrong: b" in html and "the first 2 of 7 examples" in html
  assert html.count("<img") == 2 and "http" not in html


def test_what_comes_from_data_is_escaped():
  evil = '"><script>alert(1)</script>{0}'
  html = pages.page(evil, [pages.Card(evil, [], [(evil, evil)])], 1, evil)
  assert "<script" not in html and html.count("&lt;script&gt;") == 6
