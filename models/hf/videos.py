"""How videos become frames: video_preprocessor_config.json, or the video processor inside processor_config.json.

As in transformers, a folder with neither has what its image processor's file says, as far as it says it.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.hf import files, pixels
from models.hf.source import Source
from models.spec_video import CLOCKED, INTRODUCED, LEAST_PIXELS, MOST_FRAMES, MOST_SIDE, SAMPLING, kind_of
from models.spec_vision import FRAMES, PIXELS

FILE, WHOLE, INSIDE = "video_preprocessor_config.json", "processor_config.json", "video_processor"
# {tower: what its video processor assumes of our keys, `sample`: whether frames are sampled}; see `assumed`.
ASSUMED: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), dict(
        fps=None, num_frames=None, min_frames=4, max_frames=768, min_pixels=128 * 28 * 28, max_pixels=28 * 28 * 768,
        sample=False)),
    "qwen3_vl": dict(fps=2.0, num_frames=None, min_frames=4, max_frames=768, min_pixels=128 * 32 * 32,
                     max_pixels=32 * 32 * 768, sample=True),
}
# Of Gemma 4, whose frames are those of 70 tokens, and SmolVLM, whose longer side is brought to SIDE first.
OF_FRAMES = dict(fps=None, num_frames=None, min_frames=1, max_frames=MOST_FRAMES, min_pixels=LEAST_PIXELS, sample=True)
TOKENS, SIDE = 70, 4 * 364
# Pillow's numbers of how frames are resized.
LANCZOS, BICUBIC = 1, 3
_SIZES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


def read(folder: Path, keys: Mapping[str, Any]) -> dict[str, Any]:
  """{our key: value} of `model.vision.video`, but for what config.json has; empty for models that see no videos.

  Args:
    keys: {dotted key of config.model: value}, those of pixels.py too.

  Raises:
    HFError: a damaged file, or frames that are prepared in another way.
  """
  if keys["vision.video.token"] is None:
    return {}
  source = _source(folder)
  _check(source, keys)
  return {f"vision.video.{key}": value for key, value in _sampling(source, keys).items()}


def assumed(keys: Mapping[str, Any]) -> dict[str, Any]:
  """What a model's video processor assumes: see ASSUMED."""
  kind = _kind(keys)
  if kind == CLOCKED:
    return {**OF_FRAMES, "num_frames": 32, "max_pixels": TOKENS * keys["vision.image_size"] ** 2}
  return {**OF_FRAMES, "max_pixels": SIDE**2} if kind == INTRODUCED else {**ASSUMED[keys["vision.tower"]]}


def _kind(keys: Mapping[str, Any]) -> str | None:
  return kind_of(keys["vision.tower"], keys["vision.projector"])


def _sampling(source: Source, keys: Mapping[str, Any]) -> dict[str, Any]:
  """Our keys without what they begin with."""
  own, tower = assumed(keys), keys["vision.tower"]
  if _kind(keys) == INTRODUCED:
    return _introduced(source, own)
  found = {"fps": source.get("fps", float, own["fps"], None),
           "num_frames": source.get("num_frames", int, own["num_frames"], None)}
  if None not in found.values() and "fps" in source.content:
    raise source.error("fps", "null, or num_frames null: each says how many frames are taken")
  if found["num_frames"] is not None:  # that the other is assumed does not count
    found["fps"] = None
  if not source.get("do_sample_frames", bool, own["sample"], own["sample"]):
    found = dict.fromkeys(found)
  if _kind(keys) == CLOCKED:
    return {**{key: own[key] for key in SAMPLING}, **found, "max_pixels": pixels.gemma4(source, keys, TOKENS)}
  found |= {key: source.get(key, int, own[key], own[key]) for key in ("min_frames", "max_frames")}
  size = source.inside("size", source.get("size", dict, {}, {}))
  for ours, theirs in _SIZES.items():
    given = None if tower == "qwen3_vl" else source.get(ours, int, None, None)
    found[ours] = given or size.get(theirs, int, None, None) or own[ours]
  return found


def _introduced(source: Source, own: Mapping[str, Any]) -> dict[str, Any]:
  """Of SmolVLM, whose processor samples where it knows how many frames a second, and how many at most: its own entries,
  or those of `video_sampling`, which count before them, but for `size`."""
  inside = source.inside("video_sampling", source.get("video_sampling", dict, {}, {}))
  given, most = (inside, "max_frames") if inside.content else (source, "num_frames")
  fps, frames = given.get("fps", float, None, None), given.get(most, int, None, None)
  if (fps is None) != (frames is None):
    raise given.error("fps", f"a number, with one of {most}, or neither of the two")
  size = source.get("size", dict, inside.get("video_size", dict, {}, {}), {})
  side = source.inside("size", size).get("longest_edge", int, *(() if size else (SIDE,)))
  if side > MOST_SIDE:
    raise source.error("size", f"a longest_edge of up to {MOST_SIDE}")
  frames = source.get("max_frames", int, own["max_frames"], own["max_frames"]) if frames is None else frames
  return {**{key: own[key] for key in SAMPLING}, "fps": fps, "max_frames": frames, "max_pixels": side**2}


def _check(source: Source, keys: Mapping[str, Any]) -> None:
  """Refuses what would make other patches of a video than those of images, and what is not computed."""
  kind, side = _kind(keys), keys["vision.image_size"]
  resample = LANCZOS if kind == INTRODUCED else BICUBIC
  source.need("resample", int, resample, f"{resample}")
  source.need("do_resize", bool, True, "true: frames are resized")
  if kind == CLOCKED:
    return  # the rest is as of images, see `pixels.gemma4`
  for key in ("do_rescale", "do_normalize"):
    source.need(key, bool, True, "true: frames are divided by 255 and normalised")
  pixels.check_factor(source)
  patch = keys["vision.patch_size"]
  sizes = {"patch_size": patch, "merge_size": side // patch, "temporal_patch_size": FRAMES}
  for key, value in sizes.items() if kind != INTRODUCED else ():
    source.need(key, int, value, f"{value}, as config.json says")
  if kind == INTRODUCED and source.content:
    pixels.check_square(source, side)
  for key, found in _normal(source, keys["vision.tower"]).items():
    wanted = _normal_of_images(keys)[key]
    if len(found) != 3 or not pixels.close(found, wanted):
      raise source.error(key, f"{list(wanted)}, as of images: they go through one tower")
  source.need("cap_pixels_per_frame", bool, False, "false, or null: that is not computed here")


def _normal(source: Source, tower: str) -> dict[str, tuple[float, ...]]:
  return {f"image_{key}": tuple(source.get(f"image_{key}", list, list(own), list(own)))
          for key, own in zip(("mean", "std"), PIXELS[tower], strict=True)}


def _normal_of_images(keys: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
  return {f"image_{key}": tuple(keys.get(f"vision.{key}") or own)
          for key, own in zip(("mean", "std"), PIXELS[keys["vision.tower"]], strict=True)}


def write(folder: Path, keys: Mapping[str, Any]) -> None:
  """Corrects what a folder says where the config has other frames, or another mean or standard deviation, in a file of
  its own where there was none for videos; nothing in a folder without a processor of images."""
  source = _source(folder)
  if keys["vision.video.token"] is None or not source.content:
    return
  kind, normal = _kind(keys), {} if _kind(keys) == CLOCKED else _normal_of_images(keys)
  wanted = {key: keys[f"vision.video.{key}"] for key in SAMPLING}
  found = _normal(source, keys["vision.tower"])
  if _sampling(source, keys) == wanted and all(pixels.close(found[key], normal[key]) for key in normal):
    return
  sampled = wanted["fps"] is not None or wanted["num_frames"] is not None
  entries = {key: wanted[key] for key in SAMPLING if key not in _SIZES}
  if kind == CLOCKED:
    entries = {**{key: entries[key] for key in ("fps", "num_frames")},
               "max_soft_tokens": wanted["max_pixels"] // keys["vision.image_size"] ** 2}
  elif kind == INTRODUCED:
    entries = {"fps": wanted["fps"], "max_frames": wanted["max_frames"],
               "num_frames": wanted["max_frames"] if sampled else None,
               "size": {"longest_edge": math.isqrt(wanted["max_pixels"])}}
  else:
    entries["size"] = {theirs: wanted[ours] for ours, theirs in _SIZES.items()}
  changed = {**{key: value for key, value in source.content.items() if key not in (*_SIZES, "video_sampling")},
             **entries, **{key: list(value) for key, value in normal.items()}, "do_sample_frames": sampled}
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
