"""How pixels are normalised: preprocessor_config.json, or the image processor inside processor_config.json.

What is done with the values of pixels is part of the function that a model computes, but is not in its config.json; so
is how many pixels an image has where it keeps its shape. Other sizes and resizing are the data's business.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.hf import files
from models.hf.source import Source
from models.spec_video import MOST_SIDE, MOST_TOKENS
from models.spec_vision import MAX_PIXELS, MIN_PIXELS, PIXELS

# {our key: (its name in `size`, what the image processor assumes)}
_PIXELS = {"min_pixels": ("shortest_edge", MIN_PIXELS), "max_pixels": ("longest_edge", MAX_PIXELS)}
FILES = ("preprocessor_config.json", "processor_config.json")


def read(folder: Path, keys: Mapping[str, Any]) -> dict[str, Any]:
  """{our key: value} of vision.mean, std, min_pixels, max_pixels, longest_side and split; empty for text models, and
  where the tower's own are meant.

  Args:
    keys: {dotted key of config.model: value}.

  Raises:
    HFError: a damaged file, or pixels that are prepared in another way.
  """
  if keys["vision.tower"] == "none":
    return {}
  source = _source(folder)
  if source is None:
    return {}
  if keys["vision.tower"] == "gemma4":
    return {"vision.max_pixels": gemma4(source, keys)}
  for key in ("do_rescale", "do_normalize"):
    source.need(key, bool, True, "true: pixels are divided by 255 and normalised")
  check_factor(source)
  own = dict(zip(("mean", "std"), PIXELS[keys["vision.tower"]], strict=True))
  found = {key: tuple(source.get(f"image_{key}", list, list(value), list(value))) for key, value in own.items()}
  for key, value in found.items():
    if len(value) != 3 or not all(isinstance(x, int | float) and (key == "mean" or x > 0) for x in value):
      raise source.error(f"image_{key}", "three numbers, for red, green and blue, those of image_std above 0")
  kept = {f"vision.{key}": tuple(map(float, value)) for key, value in found.items() if not close(value, own[key])}
  return kept | _counts(source, keys) | _longest(source, keys)


def check_factor(source: Source) -> None:
  """Raises HFError unless pixels are divided by 255."""
  if not math.isclose(source.get("rescale_factor", float, 1 / 255, 1 / 255), 1 / 255, rel_tol=1e-6):
    raise source.error("rescale_factor", "1/255")


def check_square(source: Source, side: int) -> None:
  """Raises HFError unless squares (of SmolVLM) have the side that config.json says."""
  if source.inside("max_image_size", source.get("max_image_size", dict, {}, {})).get("longest_edge", int, 364) != side:
    raise source.error("max_image_size", f"{{'longest_edge': {side}}}, as config.json says")


def gemma4(source: Source, keys: Mapping[str, Any], tokens: int = 280) -> int:
  """As many pixels as its most tokens have, `tokens` where it says nothing; pixels are from 0 to 1, of which the tower
  makes -1 to 1. Raises: see `read`."""
  for key, value in (("do_rescale", True), ("do_normalize", False)):
    if source.get(key, bool, value, value) != value and (key == "do_rescale" or any(
        source.get(name, object, [own] * 3) != [own] * 3 for name, own in (("image_mean", 0.0), ("image_std", 1.0)))):
      raise source.error(key, f"{str(value).lower()}: pixels are divided by 255, and no more")
  check_factor(source)
  patch, side = keys["vision.patch_size"], keys["vision.image_size"]
  for key, value in (("patch_size", patch), ("pooling_kernel_size", side // patch)):
    source.need(key, int, value, f"{value}, as config.json says")
  if (most := source.get("max_soft_tokens", int, tokens, tokens)) not in MOST_TOKENS:
    raise source.error("max_soft_tokens", ", ".join(map(str, MOST_TOKENS)))
  return most * side**2


def _longest(source: Source, keys: Mapping[str, Any]) -> dict[str, Any]:
  """To which longer side an image is brought first, and whether it is cut into squares then (SmolVLM)."""
  if keys["vision.tower"] == "pixtral":
    return _limit(source, keys)
  if keys["vision.projector"] != "shuffle":
    return {}
  check_square(source, keys["vision.image_size"])
  side = source.inside("size", source.get("size", dict, {}, {})).get("longest_edge", int, 4 * 364, 4 * 364)
  if not 1 <= side <= MOST_SIDE:
    raise source.error("size", f"a longest_edge of 1 to {MOST_SIDE}, beyond which the image processor has another")
  return {"vision.longest_side": side, "vision.split": source.get("do_image_splitting", bool, True, True)}


def _limit(source: Source, keys: Mapping[str, Any]) -> dict[str, Any]:
  """The longest side that images keep (Pixtral); its processor counts in merged patches, whatever this says."""
  patch = keys["vision.patch_size"]
  if source.get("patch_size", object, patch, patch) not in (patch, {"height": patch, "width": patch}):
    raise source.error("patch_size", f"{patch}, as config.json says")
  size = source.inside("size", source.get("size", dict, {}, {}))
  if {*size.content} - {"longest_edge"}:
    raise source.error("size", "a longest_edge alone")
  return {"vision.longest_side": size.get("longest_edge", int, 1024)}


def _counts(source: Source, keys: Mapping[str, Any]) -> dict[str, int]:
  """How many pixels an image has where its size is its own: entries of the file, or of its `size`."""
  if keys["vision.projector"] != "merge":
    return {}
  size = source.inside("size", source.get("size", dict, {}, {}))
  found = {}
  for ours, (side, default) in _PIXELS.items():
    given = source.get(ours, int, None, None) or size.get(side, int, None, None) or size.get(ours, int, None, None)
    found[f"vision.{ours}"] = given or default
  if found["vision.min_pixels"] > found["vision.max_pixels"]:
    raise source.error("min_pixels", f"up to max_pixels, {found['vision.max_pixels']}")
  patch = keys["vision.patch_size"]
  for key, value in (("patch_size", patch), ("merge_size", keys["vision.image_size"] // patch)):
    source.need(key, int, value, f"{value}, as config.json says")
  return found


def write(folder: Path, keys: Mapping[str, Any]) -> None:
  """Corrects the mean and the standard deviation in a folder's file, if it has one and they were changed."""
  if keys["vision.tower"] == "none" or (source := _source(folder)) is None:
    return
  if keys["vision.tower"] == "gemma4":
    most = keys["vision.max_pixels"] // keys["vision.image_size"] ** 2
    if most != source.get("max_soft_tokens", int, 280, 280):
      _put(folder, {**source.content, "max_soft_tokens": most})
    return
  own = dict(zip(("mean", "std"), PIXELS[keys["vision.tower"]], strict=True))
  wanted = {key: tuple(keys[f"vision.{key}"]) or value for key, value in own.items()}
  found = {**own, **{key.removeprefix("vision."): value for key, value in read(folder, keys).items()}}
  counts = {key: keys[f"vision.{key}"] for key in _PIXELS} if keys["vision.projector"] == "merge" else {}
  same = all(found[key] == value for key, value in counts.items())
  longest, split = keys["vision.longest_side"], bool(keys["vision.split"])
  moved = longest and (longest, split) != (found.get("longest_side", longest), found.get("split", split))
  if same and not moved and all(close(wanted[key], found[key]) for key in own):
    return
  changed = {**source.content, **{f"image_{key}": list(value) for key, value in wanted.items()}}
  if not same:
    changed |= {**counts, "size": {side: counts[key] for key, (side, _) in _PIXELS.items()}}
  if moved:
    changed |= {"size": {"longest_edge": longest}}
    changed |= {"do_image_splitting": split} if keys["vision.projector"] == "shuffle" else {}
  _put(folder, changed)


def _put(folder: Path, changed: Mapping[str, Any]) -> None:
  """Writes an image processor's entries into the file that has them."""
  single, whole = (folder / name for name in FILES)
  if single.is_file():
    files.write_json(single, changed)
  else:
    files.write_json(whole, {**files.read_json(whole), "image_processor": changed})


def close(one: tuple, other: tuple) -> bool:
  """Whether numbers are the same but for rounding."""
  return all(math.isclose(a, b, abs_tol=1e-7) for a, b in zip(one, other, strict=True))


def _source(folder: Path) -> Source | None:
  single, whole = (folder / name for name in FILES)
  if single.is_file():
    return Source(files.read_json(single), str(single))
  content = files.read_json(whole).get("image_processor") if whole.is_file() else None
  return Source(content, f"{whole}: image_processor") if isinstance(content, dict) else None
