"""Pages: pictures are within them to the pixel, nothing in the data acts on them, odd numbers spoil no scale."""

import base64
import html
import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from trainer.modes import microscope
from trainer.report import pages

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 5, 3)).astype(np.uint8)
EVIL = '"></script><script>alert(1)</script><img src=x onerror=alert(2)> {0} ${title} &amp;\u202e\x1b[2J'


def pictures(page):
  """The images in a page, uint8 [H, W, 3]."""
  found = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
  return [np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))) for data in found]


def test_pictures_are_in_the_page_to_the_pixel():
  cards = [pages.Card("a", [PIXELS, 255 - PIXELS], [("answer", "x")], True), pages.Card("b", right=False)]
  page = pages.cards_page("samples", cards, 7)
  for found, expected in zip(pictures(page), [PIXELS, 255 - PIXELS], strict=True):
    np.testing.assert_array_equal(found, expected)
  assert page.startswith("<!doctype html>\n<html lang=\"en\"><head>")
  assert "right: a" in page and "wrong: b" in page and "the first 2 of 7 examples" in page
  assert page.count("<img") == 2 and not re.search(r"https?:(?!//www.w3.org/2000/svg)", page)


def test_what_comes_from_data_is_text_everywhere():
  parts = [pages.section("a", EVIL, pages.table([EVIL], [[EVIL]], EVIL), pages.pairs([(EVIL, EVIL)]), pages.dim(EVIL)),
           pages.details(EVIL, EVIL), pages.bars([(EVIL, 1.0, EVIL)], EVIL), pages.chart_tools([(EVIL, {})] * 2),
           pages.chart(EVIL, [{"label": EVIL, "run": 0, "x": [1], "y": [2.0]}], [(EVIL, 1.0)], EVIL),
           pages.tokens([pages.token(EVIL)], {"weights": [1.0]}, EVIL, where=EVIL),
           pages.Card(EVIL, (), [(EVIL, EVIL)])]
  columns = [dict(key=EVIL, label=EVIL, kind="high", says=(EVIL, EVIL), scale=1.0)]
  page = pages.page(EVIL, *parts, columns=columns)
  assert page.count("<script") == page.count("</script>") == 1 and "<img" not in page
  assert page.count("&lt;script&gt;") > 15 and "\\u202e\\x1b[2J" in page  # of a token
  box = re.search(r'data-tokens="([^"]*)"', page)[1]
  assert json.loads(html.unescape(box)) == {"values": {"weights": [1.0]}, "where": EVIL}


def test_numbers_that_are_not_finite_are_told_and_spoil_no_scale():
  values = pages.listed(np.ma.array([np.nan, np.inf, -2.123456789, 4.0], mask=[0, 0, 0, 1]))
  assert values == ["nan", "inf", -2.1235, None]
  weights, logprobs = sorted(microscope.columns(["logprobs"], [{"weights": [0.0, 1.0], "logprobs": values}]),
                             key=lambda column: column["key"] == "logprobs")
  assert logprobs["scale"] == pytest.approx(2.1235, rel=1e-3) and weights["scale"] == 1.0


def test_rounding_does_not_look_like_a_difference():
  _, ratios = microscope.columns(["ratios"], [{"ratios": [1.0, 1.000001]}])
  assert ratios["key"] == "ratios" and ratios["scale"] == 0.02


@pytest.mark.parametrize("lengths, widths", [((1.0, 4.0, -2.0), ("25.0", "100.0", "0.0")), ((0.0, 0.0), ("0.0", "0.0")),
                                             ((), ())])
def test_bars_are_as_long_as_the_share_of_the_longest(lengths, widths):
  page = str(pages.bars([("a", length, "x") for length in lengths], "b"))
  assert re.findall(r"width:([-\d.]+)%", page) == list(widths)
