"""Which frames of films are taken, read from a folder's files and written into them, as transformers has them."""

import json

import pytest

from models.hf import films
from models.hf.errors import HFError
from models.spec_video import SAMPLING
from tests.models.hf.test_native import content_of, read

OWN = "video_preprocessor_config.json"
QWEN2 = dict(fps=None, num_frames=None, min_frames=4, max_frames=768, min_pixels=100352, max_pixels=602112)
QWEN3 = dict(fps=2.0, num_frames=None, min_frames=4, max_frames=768, min_pixels=131072, max_pixels=786432)


def keys_of(name: str, **changed) -> dict:
  return read(content_of(name)) | changed


def found(folder, name: str = "qwen2_5_vl", file: str = OWN, **entries) -> dict:
  """What is read of a folder with a file of these entries."""
  folder.mkdir(exist_ok=True)
  (folder / file).write_text(json.dumps(entries))
  return {key.removeprefix("vision.video."): value for key, value in films.read(folder, keys_of(name)).items()}


def test_a_folder_that_says_nothing_has_what_the_processor_assumes(tmp_path):
  for name, assumed in (("qwen2_vl", QWEN2), ("qwen2_5_vl", QWEN2), ("qwen3_vl", QWEN3), ("qwen3_5", QWEN3)):
    assert films.read(tmp_path, keys_of(name)) == {f"vision.video.{key}": assumed[key] for key in SAMPLING}
  assert films.read(tmp_path, keys_of("gemma4")) == {}
  assert films.read(tmp_path, keys_of("qwen2_vl", **{"vision.video.token": None})) == {}


@pytest.mark.parametrize("name, entries, expected", [
    ("qwen2_5_vl", dict(fps=2, min_frames=8), QWEN2 | dict(min_frames=8)),  # not sampled unless it says so
    ("qwen2_5_vl", dict(fps=2, do_sample_frames=True), QWEN2 | dict(fps=2.0)),
    ("qwen2_5_vl", dict(min_pixels=64, max_pixels=640), QWEN2 | dict(min_pixels=64, max_pixels=640)),
    ("qwen3_vl", dict(min_pixels=64), QWEN3),  # of no effect there
    ("qwen3_vl", dict(size=dict(shortest_edge=64, longest_edge=640)), QWEN3 | dict(min_pixels=64, max_pixels=640)),
    ("qwen3_vl", dict(num_frames=8, fps=None), QWEN3 | dict(num_frames=8, fps=None)),
    ("qwen3_vl", dict(do_sample_frames=False), QWEN3 | dict(fps=None)),
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
    (dict(fps=1, num_frames=3, do_sample_frames=True), "num_frames is 3; allowed: null, or fps null"),
    (dict(min_frames=0), "min_frames is 0"),
])
def test_frames_prepared_in_another_way_are_refused(tmp_path, entries, message):
  with pytest.raises(HFError, match=rf"{OWN}: {message}"):
    found(tmp_path, **entries)


def test_what_a_config_changed_is_written(tmp_path):
  """Into a file of its own where the images' was read; what is as it would be read stays, to the letter."""
  before = dict(image_processor_type="Qwen2VLImageProcessor", patch_size=4, max_pixels=640, min_pixels=64)
  found(tmp_path, file="preprocessor_config.json", **before)
  keys = keys_of("qwen2_5_vl") | films.read(tmp_path, keys_of("qwen2_5_vl"))
  films.write(tmp_path, keys)
  assert [file.name for file in tmp_path.iterdir()] == ["preprocessor_config.json"]
  changed = keys | {"vision.video.num_frames": 8, "vision.video.max_pixels": 6400, "vision.mean": (0.1, 0.2, 0.3)}
  films.write(tmp_path, changed)
  told = json.loads((tmp_path / OWN).read_text())
  assert told["do_sample_frames"] and told["num_frames"] == 8 and told["fps"] is None and told["patch_size"] == 4
  assert told["size"] == dict(shortest_edge=64, longest_edge=6400) and "max_pixels" not in told
  assert told["image_mean"] == [0.1, 0.2, 0.3] and "image_processor_type" not in told
  assert films.read(tmp_path, changed) == {key: changed[key] for key in changed if key in films.read(tmp_path, changed)}
  assert json.loads((tmp_path / "preprocessor_config.json").read_text()) == before


def test_it_is_written_where_it_was_read(tmp_path):
  found(tmp_path, "qwen3_vl", "processor_config.json", video_processor=dict(fps=3), image_processor=dict(patch_size=4))
  keys = keys_of("qwen3_vl") | films.read(tmp_path, keys_of("qwen3_vl"))
  films.write(tmp_path, keys | {"vision.video.fps": None})
  told = json.loads((tmp_path / "processor_config.json").read_text())
  assert told["video_processor"]["do_sample_frames"] is False and told["image_processor"] == dict(patch_size=4)
  films.write(tmp_path / "none", keys)  # no folder of a processor
