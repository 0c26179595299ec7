"""The page of the token microscope by itself: nothing in the data acts on it, odd numbers spoil no scale."""

import json
import re

import numpy as np
import pytest

from trainer import microscope_page

EVIL = '</script><script>alert(1)</script><img src=x onerror=alert(2)> ${title} $rows "&amp;\u202e\x1b[2J'


def row_of(text, values=None, **changed):
  texts = [text, ""]
  made = dict(number=1, label=text, sums=[(text, text)], texts=texts, ids=[1, 2], positions=[0, 1],
              values={"weights": [0.0, 1.0], "logprobs": [None, -1.0]} | (values or {}), instead=[text, text],
              images=[0, 0], pictures={}, left_out=0) | changed
  return microscope_page.Row(3, text, 1.0, [[microscope_page.Segment(**made)]])


def columns(*keys):
  return [column for column in microscope_page.COLUMNS if column.key in keys]


def test_what_comes_from_data_cannot_act_on_the_page():
  page = microscope_page.page(EVIL, [EVIL], [row_of(EVIL)], columns("weights", "logprobs"))
  assert page.count("<script") == page.count("</script>") == 2 and "<img" not in page
  data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1)
  assert json.loads(data)["parts"][0]["instead"] == [microscope_page.visible(EVIL)] * 2
  for hidden in "\u202e\x1b":
    assert hidden not in page
  assert "${title}" in page and "$rows" in page and "\\u202e\\x1b[2J" in page


def test_numbers_that_are_not_finite_are_told_and_spoil_no_scale():
  values = microscope_page.listed(np.ma.array([np.nan, np.inf, -2.123456789, 4.0], mask=[0, 0, 0, 1]))
  assert values == ["nan", "inf", -2.1235, None]
  page = microscope_page.page("t", [], [row_of("a", {"logprobs": values[1:3]})], columns("weights", "logprobs"))
  data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1))
  assert data["columns"][1]["scale"] == pytest.approx(2.1235, rel=1e-3) and "loss 1.0000" in page


def test_rounding_does_not_look_like_a_difference():
  page = microscope_page.page("t", [], [row_of("a", {"ratios": [1.0, 1.000001]})], columns("ratios"))
  assert '"scale":0.02' in page
