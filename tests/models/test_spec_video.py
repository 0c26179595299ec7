"""`model.vision.video`: where each of its keys ends, and what is read of it."""

import re

import pytest

from models import config as config_lib
from models.spec_video import make_video
from trainer.errors import ConfigError

GOOD = dict(fps=None, num_frames=None, min_frames=4, max_frames=8, min_pixels=100, max_pixels=1000,
            tokens_per_second=0.0)


def made(tower="qwen3_vl", projector="linear", token=9, **changed):
  c = config_lib.model().vision
  c.update(tower=tower, projector=projector, image_token=5, image_size=8)
  c.video.update(GOOD | changed, token=token)
  return make_video(c)


def test_what_is_read_of_it():
  found = made(fps=2.0)
  assert (found.token, found.fps, found.num_frames, found.min_frames, found.max_frames) == (9, 2.0, None, 4, 8)
  assert (found.min_pixels, found.max_pixels) == (100, 1000) and made(token=None) is None
  assert found.largest_frame == (500 if found.of_all else 1000)
  assert {made("qwen2_5_vl", tokens_per_second=2.0).of_all, made().of_all} == {False, True}


# Frames that are images, and frames of one of five sizes, 70 tiles.
SMOLVLM = dict(projector="shuffle", token=5, min_frames=1, max_frames=64, min_pixels=1, max_pixels=512**2)
GEMMA4 = dict(min_frames=1, max_frames=768, min_pixels=1, max_pixels=70 * 64)


@pytest.mark.parametrize("tower, changed, message", [
    ("siglip", {}, "model.vision.video.token: found 9 with the tower 'siglip' and the projector 'linear', which see n"),
    ("qwen3_vl", dict(token=-1), "model.vision.video.token: found -1, allowed: the id of a token, another than model.vi"
                                 "sion.image_token, 5."),
    ("qwen3_vl", dict(token=5), "model.vision.video.token: found 5, allowed"),
    ("qwen3_vl", dict(tokens_per_second=1.0), "model.vision.video.tokens_per_second: found 1.0 with the tower 'qwen3_"),
    ("qwen2_5_vl", {}, "model.vision.video.tokens_per_second: found 0.0 with the tower 'qwen2_5_vl'; qwen2_5_vl has a"),
    ("qwen3_vl", dict(fps=1.0, num_frames=4), "model.vision.video: found fps=1.0 and num_frames=4; each says how many"),
    ("qwen3_vl", dict(fps=0.0), "model.vision.video: found fps=0.0, num_frames=None; allowed: above 0, and 2 or more."),
    ("qwen3_vl", dict(num_frames=1), "model.vision.video: found fps=None, num_frames=1; allowed"),
    ("qwen3_vl", dict(min_frames=0), "model.vision.video: found min_frames=0, max_frames=8; allowed: min_frames from"),
    ("qwen3_vl", dict(min_frames=9), "model.vision.video: found min_frames=9, max_frames=8"),
    ("qwen3_vl", dict(min_frames=1, max_frames=1), "model.vision.video: found min_frames=1, max_frames=1"),
    ("qwen3_vl", dict(min_pixels=0), "model.vision.video: found min_pixels=0, max_pixels=1000; allowed: min_pixels fr"),
    ("qwen3_vl", dict(min_pixels=1001), "model.vision.video: found min_pixels=1001, max_pixels=1000"),
    ("qwen3_vl", dict(min_pixels=1, max_pixels=63), "model.vision.video: found min_pixels=1, max_pixels=63; allowed:"),
    ("qwen3_vl", dict(token=0, num_frames=2, min_frames=1, max_frames=2, min_pixels=64, max_pixels=64), None),
    ("qwen3_vl", dict(min_frames=8, min_pixels=1000), None),
    ("siglip", SMOLVLM, None),
    ("siglip", SMOLVLM | dict(token=9), "model.vision.video.token: found 9, allowed: model.vision.image_token, since "),
    ("siglip", SMOLVLM | dict(min_frames=2), "model.vision.video: found min_pixels=1, min_frames=2; Gemma 4 and SmolV"),
    ("siglip", SMOLVLM | dict(max_pixels=1000), "model.vision.video: found num_frames=None, max_pixels=1000; of SmolV"),
    ("siglip", SMOLVLM | dict(max_pixels=4097**2), "model.vision.video: found num_frames=None, max_pixels=16785409; o"),
    ("siglip", SMOLVLM | dict(num_frames=8), "model.vision.video: found num_frames=8, max_pixels=262144; of SmolVLM"),
    ("gemma4", GEMMA4, None),
    ("gemma4", GEMMA4 | dict(token=5), "model.vision.video.token: found 5, allowed: the id of a token, another than m"),
    ("gemma4", GEMMA4 | dict(min_pixels=2), "model.vision.video: found min_pixels=2, min_frames=1; Gemma 4 and SmolVL"),
    ("gemma4", GEMMA4 | dict(max_frames=8), "model.vision.video: found max_frames=8, max_pixels=4480; of Gemma 4 the "),
    ("gemma4", GEMMA4 | dict(max_pixels=71 * 64), "model.vision.video: found max_frames=768, max_pixels=4544; of Gemm"),
])
def test_where_each_key_ends(tower, changed, message):
  if message is None:
    assert made(tower, **changed) is not None
  else:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
      made(tower, **changed)
