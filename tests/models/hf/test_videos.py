"""Which frames of videos are taken, read from a folder's files and written into them, as transformers has them."""

import json

import pytest

from models import config, hf
from models.hf import files, videos
from models.hf.errors import HFError
from models.spec import make_spec
from models.spec_video import SAMPLING
from tests import frames
from tests.models.hf.test_native import content_of, read
from trainer.errors import ConfigError

OWN = "video_preprocessor_config.json"
QWEN2 = dict(fps=None, num_frames=None, min_frames=4, max_frames=768, min_pixels=100352, max_pixels=602112)
QWEN3 = dict(fps=2.0, num_frames=None, min_frames=4, max_frames=768, min_pixels=131072, max_pixels=786432)
# Tiles of 8 pixels, and squares of 16.
GEMMA4 = dict(fps=None, num_frames=32, min_frames=1, max_frames=768, min_pixels=1, max_pixels=70 * 64)
SMOLVLM = dict(fps=None, num_frames=None, min_frames=1, max_frames=768, min_pixels=1, max_pixels=1456**2)
SQUARE = dict(max_image_size=dict(longest_edge=16))


def keys_of(name: str, **changed) -> dict:
  found = read(files.read_config(frames.FOLDER / name) if name == "smolvlm" else content_of(name))
  return found | changed


def found(folder, name: str = "qwen2_5_vl", file: str = OWN, **entries) -> dict:
  """What is read of a folder with a file of these entries."""
  folder.mkdir(exist_ok=True)
  (folder / file).write_text(json.dumps(entries))
  return {key.removeprefix("vision.video."): value for key, value in videos.read(folder, keys_of(name)).items()}


def test_a_folder_that_says_nothing_has_what_the_processor_assumes(tmp_path):
  for name, assumed in (("qwen2_vl", QWEN2), ("qwen2_5_vl", QWEN2), ("qwen3_vl", QWEN3), ("qwen3_5", QWEN3),
                        ("gemma4", GEMMA4), ("smolvlm", SMOLVLM)):
    assert videos.read(tmp_path, keys_of(name)) == {f"vision.video.{key}": assumed[key] for key in SAMPLING}
  assert videos.read(tmp_path, keys_of("mistral3")) == {}
  content = files.read_config(frames.FOLDER / "smolvlm")
  other = read(content | dict(
      model_type="idefics3", architectures=["Idefics3ForConditionalGeneration"],
      vision_config=content["vision_config"] | dict(model_type="idefics3_vision")))
  assert (keys_of("smolvlm")["vision.video.token"], other["vision.video.token"]) == (content["image_token_id"], None)
  assert videos.read(tmp_path, keys_of("qwen2_vl", **{"vision.video.token": None})) == {}


@pytest.mark.parametrize("name, entries, expected", [
    ("qwen2_5_vl", dict(fps=2, min_frames=8), QWEN2 | dict(min_frames=8)),  # not sampled unless it says so
    ("qwen2_5_vl", dict(fps=2, do_sample_frames=True), QWEN2 | dict(fps=2.0)),
    ("qwen2_5_vl", dict(min_pixels=64, max_pixels=640), QWEN2 | dict(min_pixels=64, max_pixels=640)),
    ("qwen3_vl", dict(min_pixels=64), QWEN3),  # of no effect there
    ("qwen3_vl", dict(size=dict(shortest_edge=64, longest_edge=640)), QWEN3 | dict(min_pixels=64, max_pixels=640)),
    ("qwen3_vl", dict(num_frames=8, fps=None), QWEN3 | dict(num_frames=8, fps=None)),
    ("qwen3_vl", dict(do_sample_frames=False), QWEN3 | dict(fps=None)),
    ("gemma4", dict(num_frames=8, max_soft_tokens=140), GEMMA4 | dict(num_frames=8, max_pixels=140 * 64)),
    ("gemma4", dict(num_frames=None, fps=2), GEMMA4 | dict(num_frames=None, fps=2.0)),
    ("gemma4", dict(do_sample_frames=False, do_normalize=False), GEMMA4 | dict(num_frames=None)),
    # SmolVLM samples where it knows both; what stands in `video_sampling` counts before the rest, but for `size`.
    ("smolvlm", dict(fps=1, num_frames=8, size=dict(longest_edge=40), **SQUARE),
     SMOLVLM | dict(fps=1.0, max_frames=8, max_pixels=1600)),
    ("smolvlm", dict(video_sampling=dict(fps=2, max_frames=9, video_size=dict(longest_edge=48)), fps=1, num_frames=8,
                     **SQUARE), SMOLVLM | dict(fps=2.0, max_frames=9, max_pixels=48**2)),
    ("smolvlm", dict(video_sampling=dict(fps=2, max_frames=9, video_size=dict(longest_edge=48)),
                     size=dict(longest_edge=40), **SQUARE), SMOLVLM | dict(fps=2.0, max_frames=9, max_pixels=1600)),
])
def test_what_is_read(tmp_path, name, entries, expected):
  assert found(tmp_path, name, **entries) == expected


def test_which_of_several_files_counts(tmp_path):
  """As in transformers: inside the processor's, then its own, then that of images."""
  assert found(tmp_path, file="preprocessor_config.json", max_frames=5)["max_frames"] == 5
  assert found(tmp_path, max_frames=6)["max_frames"] == 6
  assert found(tmp_path, file="processor_config.json", video_processor=dict(max_frames=7))["max_frames"] == 7


@pytest.mark.parametrize("entries, message", [
    (dict(temporal_patch_size=3), "temporal_patch_size is 3; allowed: 2, as config.json says"),
    (dict(patch_size=7), "patch_size is 7; allowed: 4"), (dict(merge_size=3), "merge_size is 3"),
    (dict(do_resize=False), "do_resize is False; allowed: true"), (dict(resample=2), "resample is 2; allowed: 3"),
    (dict(cap_pixels_per_frame=True), "cap_pixels_per_frame is True; allowed: false, or null"),
    (dict(rescale_factor=1.0), "rescale_factor is 1.0"), (dict(image_mean=[0.5] * 3), "image_mean is .*as of images"),
    (dict(fps=1, num_frames=3, do_sample_frames=True), "fps is 1; allowed: null, or num_frames null"),
    (dict(min_frames=0), "min_frames is 0"),
])
def test_frames_prepared_in_another_way_are_refused(tmp_path, entries, message):
  with pytest.raises(HFError, match=rf"{OWN}: {message}"):
    found(tmp_path, **entries)


@pytest.mark.parametrize("name, entries, message", [
    ("gemma4", dict(fps=1), "fps is 1; allowed: null, or num_frames null"), ("gemma4", dict(resample=2), "allowed: 3"),
    ("gemma4", dict(max_soft_tokens=71), "max_soft_tokens is 71; allowed: 70, 140"),
    ("gemma4", dict(image_mean=[0.5] * 3, do_normalize=True), "do_normalize is True"),
    ("gemma4", dict(pooling_kernel_size=3), "pooling_kernel_size is 3; allowed: 2, as config.json says"),
    ("smolvlm", dict(resample=3, **SQUARE), "resample is 3; allowed: 1"),
    ("smolvlm", dict(max_image_size=dict(longest_edge=32)), "allowed: {'longest_edge': 16}, as config.json"),
    ("smolvlm", dict(size=dict(height=16, width=16), **SQUARE), "size has no 'longest_edge'"),
    ("smolvlm", dict(size=dict(longest_edge=5000), **SQUARE), "size is .*a longest_edge of up to 4096"),
    ("smolvlm", dict(fps=1, **SQUARE), "fps is 1; allowed: a number, with one of num_frames, or neither"),
    ("smolvlm", dict(image_mean=[0.1] * 3, **SQUARE), r"image_mean is .*\[0.5, 0.5, 0.5\], as of images"),
])
def test_frames_as_images_prepared_in_another_way_are_refused(tmp_path, name, entries, message):
  with pytest.raises(HFError, match=message):
    found(tmp_path, name, **entries)


@pytest.mark.parametrize("name, changed, message", [
    ("gemma4", dict(max_frames=16), "max_frames=16, max_pixels=4480; of Gemma 4 the first stays 768"),
    ("gemma4", dict(max_pixels=4481), "the other is one of 4480, 8960, .*: 70, 140, "),
    ("gemma4", dict(min_pixels=64), "min_pixels=64, min_frames=1; Gemma 4 and SmolVLM have neither"),
    ("smolvlm", dict(min_frames=4), "min_pixels=1, min_frames=4; Gemma 4 and SmolVLM have neither"),
    ("smolvlm", dict(max_pixels=1500), "max_pixels is the square of the longer side"),
    ("smolvlm", dict(max_pixels=5000**2), "a frame is brought to, up to 4096"),
    ("smolvlm", dict(num_frames=8), "of SmolVLM fps and max_frames say how many frames are taken"),
    ("smolvlm", dict(token=3), "token: found 3, allowed: model.vision.image_token, since frames are images"),
    ("gemma4", dict(token=59), "token: found 59, allowed: the id of a token, another than model.vision.image_token"),
    ("mistral3", dict(token=3), "found 3 with the tower 'pixtral' and the projector 'merge_mlp', which see no videos"),
    ("gemma4", dict(max_pixels=1120 * 64), "position_grid: found 560, but an image may have 2240 patches"),
])
def test_keys_that_a_model_does_not_have_are_refused(name, changed, message):
  section = config.model()
  hf.set_keys(section, keys_of(name) | {f"vision.video.{key}": value for key, value in changed.items()})
  with pytest.raises(ConfigError, match=message):
    make_spec(section)


@pytest.mark.parametrize("name, changed, entries", [
    ("gemma4", dict(num_frames=None, fps=2.0, max_pixels=140 * 64), dict(fps=2.0, max_soft_tokens=140)),
    ("gemma4", dict(num_frames=None), dict(do_sample_frames=False)),
    ("smolvlm", dict(fps=None, max_frames=9), dict(fps=None, num_frames=None, do_sample_frames=False)),
    ("smolvlm", dict(fps=0.5, max_pixels=64**2), dict(fps=0.5, num_frames=6, size=dict(longest_edge=64))),
])
def test_what_a_config_changed_of_frames_as_images_is_written(tmp_path, name, changed, entries):
  given = dict(video_sampling=dict(fps=1, max_frames=6), size=dict(longest_edge=40), **SQUARE)
  found(tmp_path, name, **(given if name == "smolvlm" else {"num_frames": 4}))
  keys = keys_of(name) | videos.read(tmp_path, keys_of(name))
  before = (tmp_path / OWN).read_text()
  videos.write(tmp_path, keys)
  assert (tmp_path / OWN).read_text() == before
  changed = keys | {f"vision.video.{key}": value for key, value in changed.items()}
  videos.write(tmp_path, changed)
  told = json.loads((tmp_path / OWN).read_text())
  assert told | entries == told and "video_sampling" not in told
  again = videos.read(tmp_path, changed)
  assert again == {key: changed[key] for key in again}


def test_what_a_config_changed_is_written(tmp_path):
  """Into a file of its own where the images' was read; what is as it would be read stays, to the letter."""
  before = dict(image_processor_type="Qwen2VLImageProcessor", patch_size=4, max_pixels=640, min_pixels=64)
  found(tmp_path, file="preprocessor_config.json", **before)
  keys = keys_of("qwen2_5_vl") | videos.read(tmp_path, keys_of("qwen2_5_vl"))
  videos.write(tmp_path, keys)
  assert [file.name for file in tmp_path.iterdir()] == ["preprocessor_config.json"]
  changed = keys | {"vision.video.num_frames": 8, "vision.video.max_pixels": 6400, "vision.mean": (0.1, 0.2, 0.3)}
  videos.write(tmp_path, changed)
  told = json.loads((tmp_path / OWN).read_text())
  assert told["do_sample_frames"] and told["num_frames"] == 8 and told["fps"] is None and told["patch_size"] == 4
  assert told["size"] == dict(shortest_edge=64, longest_edge=6400) and "max_pixels" not in told
  assert told["image_mean"] == [0.1, 0.2, 0.3] and "image_processor_type" not in told
  again = videos.read(tmp_path, changed)
  assert again == {key: changed[key] for key in again}
  assert json.loads((tmp_path / "preprocessor_config.json").read_text()) == before


def test_it_is_written_where_it_was_read(tmp_path):
  found(tmp_path, "qwen3_vl", "processor_config.json", video_processor=dict(fps=3), image_processor=dict(patch_size=4))
  keys = keys_of("qwen3_vl") | videos.read(tmp_path, keys_of("qwen3_vl"))
  videos.write(tmp_path, keys | {"vision.video.fps": None})
  told = json.loads((tmp_path / "processor_config.json").read_text())
  assert told["video_processor"]["do_sample_frames"] is False and told["image_processor"] == dict(patch_size=4)
  videos.write(tmp_path / "none", keys)  # no folder of a processor
