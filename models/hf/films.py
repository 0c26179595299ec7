"""How films become frames: video_preprocessor_config.json, or the video processor inside processor_config.json.

As in transformers, a folder with neither has what its image processor's file says, as far as it says it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.hf import files, pixels
from models.hf.source import Source
from models.spec_video import SAMPLING
from models.spec_vision import FRAMES, PIXELS

FILE, WHOLE, INSIDE = "video_preprocessor_config.json", "processor_config.json", "video_processor"
# {tower: what its video processor assumes of our keys, `sample`: whether frames are sampled}.
ASSUMED: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), dict(
        fps=None, num_frames=None, min_frames=4, max_frames=768, min_pixels=128 * 28 * 28, max_pixels=28 * 28 * 768,
        sample=False)),
    "qwen3_vl": dict(fps=2.0, num_frames=None, min_frames=4, max_frames=768, min_pixels=128 * 32 * 32,
                     max_pixels=32 * 32 * 768, sample=True),
}
# Pillow's number of how frames are resized.
BICUBIC = 3
_SIZES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


def read(folder: Path, keys: Mapping[str, Any]) -> dict[str, Any]:
  """{our key: value} of `model.vision.video`, but for what config.json has; empty for models that see no films.

  Args:
    folder: of a checkpoint.
    keys: {dotted key of config.model: value}, those of pixels.py too.

  Raises:
    HFError: a damaged file, or frames that are prepared in another way.
  """
  if keys["vision.video.token"] is None:
    return {}
  source = _source(folder)
  _check(source, keys)
  return {f"vision.video.{key}": value for key, value in _sampling(source, keys["vision.tower"]).items()}


def _sampling(source: Source, tower: str) -> dict[str, Any]:
  """Our keys without what they begin with."""
  assumed = ASSUMED[tower]
  found = {"fps": source.get("fps", float, assumed["fps"], None),
           "num_frames": source.get("num_frames", int, assumed["num_frames"], None)}
  if None not in found.values() and "fps" in source.content and "num_frames" in source.content:
    raise source.error("num_frames", "null, or fps null: each says how many frames are taken")
  if found["num_frames"] is not None:  # that the other is assumed does not count
    found["fps"] = None
  if not source.get("do_sample_frames", bool, assumed["sample"], assumed["sample"]):
    found = dict.fromkeys(found)
  found |= {key: source.get(key, int, assumed[key], assumed[key]) for key in ("min_frames", "max_frames")}
  size = source.inside("size", source.get("size", dict, {}, {}))
  for ours, theirs in _SIZES.items():
    given = None if tower == "qwen3_vl" else source.get(ours, int, None, None)
    found[ours] = given or size.get(theirs, int, None, None) or assumed[ours]
  return found


def _check(source: Source, keys: Mapping[str, Any]) -> None:
  """Refuses what would make other patches of a film than those of images, and what is not computed."""
  for key in ("do_rescale", "do_normalize", "do_resize"):
    if not source.get(key, bool, True, True):
      raise source.error(key, "true: frames are resized, divided by 255 and normalised")
  pixels.check_factor(source)
  patch = keys["vision.patch_size"]
  for key, value in (("patch_size", patch), ("merge_size", keys["vision.image_size"] // patch),
                     ("temporal_patch_size", FRAMES), ("resample", BICUBIC)):
    if source.get(key, int, value, value) != value:
      raise source.error(key, f"{value}" if key == "resample" else f"{value}, as config.json says")
  for key, found in _normal(source, keys["vision.tower"]).items():
    wanted = _normal_of_images(keys)[key]
    if len(found) != 3 or not pixels.close(found, wanted):
      raise source.error(key, f"{list(wanted)}, as of images: they go through one tower")
  if source.get("cap_pixels_per_frame", bool, False, False):
    raise source.error("cap_pixels_per_frame", "false, or null: that is not computed here")


def _normal(source: Source, tower: str) -> dict[str, tuple[float, ...]]:
  return {f"image_{key}": tuple(source.get(f"image_{key}", list, list(own), list(own)))
          for key, own in zip(("mean", "std"), PIXELS[tower], strict=True)}


def _normal_of_images(keys: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
  return {f"image_{key}": tuple(keys.get(f"vision.{key}") or own)
          for key, own in zip(("mean", "std"), PIXELS[keys["vision.tower"]], strict=True)}


def write(folder: Path, keys: Mapping[str, Any]) -> None:
  """Corrects what a folder says where the config has other frames, or another mean or standard deviation, in a file of
  its own where there was none for films; nothing in a folder without a processor of images."""
  source = _source(folder)
  if keys["vision.video.token"] is None or not source.content:
    return
  tower, normal = keys["vision.tower"], _normal_of_images(keys)
  wanted = {key: keys[f"vision.video.{key}"] for key in SAMPLING}
  found = _normal(source, tower)
  if _sampling(source, tower) == wanted and all(pixels.close(found[key], normal[key]) for key in normal):
    return
  sampled = wanted["fps"] is not None or wanted["num_frames"] is not None
  entries = {key: wanted[key] for key in SAMPLING if key not in _SIZES}
  changed = {**{key: value for key, value in source.content.items() if key not in _SIZES}, **entries,
             **{key: list(value) for key, value in normal.items()}, "do_sample_frames": sampled,
             "size": {theirs: wanted[ours] for ours, theirs in _SIZES.items()}}
  changed.pop("image_processor_type", None)  # of the file that was read in place of this one
  whole = folder / WHOLE
  inside = files.read_json(whole) if whole.is_file() else {}
  if isinstance(inside.get(INSIDE), dict):
    files.write_json(whole, {**inside, INSIDE: changed})
  else:
    files.write_json(folder / FILE, changed)


def _source(folder: Path) -> Source:
  whole, own, single = folder / WHOLE, folder / FILE, folder / pixels.FILES[0]
  content = files.read_json(whole).get(INSIDE) if whole.is_file() else None
  if isinstance(content, dict):
    return Source(content, f"{whole}: {INSIDE}")
  there = next((file for file in (own, single) if file.is_file()), None)
  return Source({} if there is None else files.read_json(there), str(there or own))
