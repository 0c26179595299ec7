"""Sections of rotated pairs, by hand; and what cannot be."""

import re

import pytest

from models import config as config_lib
from models.spec_rope import _axes
from trainer.errors import ConfigError


def axes(sections, tower="qwen2_vl", interleaved=False, scaling="none", dims=16):
  m = config_lib.model()
  m.update(rope_sections=sections, rope_sections_interleaved=interleaved)
  m.vision.tower, m.rope_scaling.type = tower, scaling
  return _axes(m, dims)


def test_each_pair_turns_by_time_row_or_column():
  assert axes((2, 3, 3)) == (0, 0, 1, 1, 1, 2, 2, 2) and axes(()) == ()
  assert axes((8, 0, 0)) == (0,) * 8 and axes((2, 3, 3), scaling="yarn") == axes((2, 3, 3))


@pytest.mark.parametrize("given, message", [
    (dict(sections=(), interleaved=True), "model.rope_sections_interleaved is True, but model.rope_sections is (). Se"),
    (dict(sections=(4, 4)), "model.rope_sections: found (4, 4), allowed: three numbers, of which the sum is the 8 pai"),
    (dict(sections=(9, -1, 0)), "model.rope_sections: found (9, -1, 0), allowed"),
    (dict(sections=(2, 3, 4)), "model.rope_sections: found (2, 3, 4), allowed"),
    (dict(sections=(2, 3, 2)), "model.rope_sections: found (2, 3, 2), allowed"),
    (dict(sections=(2, 3, 3), tower="siglip"), "model.rope_sections: found (2, 3, 3), but only a tower of "),
    (dict(sections=(2, 3, 3), scaling="dynamic"), "model.rope_scaling.type: found 'dynamic', which depends on a text'"),
    (dict(sections=(2, 3, 3), scaling="longrope"), "model.rope_scaling.type: found 'longrope', which depends"),
])
def test_sections_that_cannot_be(given, message):
  with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
    axes(**given)
