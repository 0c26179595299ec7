"""Where rows name images and videos: in columns, and in parts of messages.

Both are parts {"type": "image"} and {"type": "video"} of messages, without what they show, and a list of that in their
order. In a text each is one character that no text has, IMAGE.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from input_pipeline.images.images import KEYS, ImageRef
from input_pipeline.images.videos import VIDEO_KEYS
from trainer.errors import DataError

# A noncharacter of Unicode, not among those of `special_tokens`.
IMAGE = "\U0001fffe"
# What parts of a message's content are that are none of its texts, by what rows call them.
KINDS = IMAGE_KIND, VIDEO_KIND = ("image", "video")
PART_TYPES = {"image": IMAGE_KIND, "image_url": IMAGE_KIND, "video": VIDEO_KIND, "video_url": VIDEO_KIND,
              "input_video": VIDEO_KIND}
# Columns that hold one, or several.
COLUMNS = {IMAGE_KIND: ("image", "images"), VIDEO_KIND: ("video", "videos")}


def refuse_stand_in(text: str, where: str = "") -> None:
  """Raises DataError if a text has the character that stands for images here."""
  if IMAGE in text:
    raise DataError(f"{where}{': ' if where else ''}a text has U+1FFFE, a code point that Unicode keeps out of texts. "
                    "Remove it.")


def text_of(content: str | list[dict]) -> str:
  """The text in a message's content, without its images."""
  return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def with_more(content: str | list[dict], more: str) -> str | list[dict]:
  """A message's content with more text behind it."""
  return f"{content.strip()}{more}" if isinstance(content, str) else [*content, {"type": "text", "text": more}]


def columns_of(fields: Mapping[str, Any], name: Callable[[str], str]) -> list[str]:
  """The row's columns that hold images or videos. `name`: what a row calls one of COLUMNS."""
  return [name(key) for keys in COLUMNS.values() for key in keys if fields.get(name(key)) is not None]


def column_refs(fields: Mapping[str, Any], name: Callable[[str], str], where: str, folder: Path | None
                ) -> list[ImageRef]:
  """The images in a row's columns, and then its videos. `name`: see `columns_of`.

  Raises:
    DataError: both columns of a kind are there.
  """
  found: list[ImageRef] = []
  for kind, (one, several) in COLUMNS.items():
    given = [name(key) for key in (one, several) if fields.get(name(key)) is not None]
    if len(given) == 2:
      raise DataError(f"{where}: has both {given[0]!r} and {given[1]!r}. Keep one of them.")
    for key in given:
      value, video = fields[key], kind == VIDEO_KIND
      # A list in the column `video` is one video, of these frames.
      if isinstance(value, (list, tuple)) and not (video and key == name(one)):
        found += [ImageRef(v, f"{where}: {key}[{i}]", folder, video) for i, v in enumerate(value)]
      else:
        found.append(ImageRef(value, f"{where}: {key}", folder, video))
  return found


def content_parts(value: list, where: str, check_videos: Callable[[str], Any]) -> str | list[dict]:
  """A content given in parts: joined, if all are text; else texts, images and videos alone, where the latter have what
  they show under their kind unless it is in a column. `check_videos`: refuses them, or not.

  Raises:
    DataError: another kind of part.
  """
  parts: list[dict] = []
  for i, part in enumerate(value):
    said = part.get("type") if isinstance(part, Mapping) else None
    kind = PART_TYPES.get(said) if isinstance(said, str) else None
    if said == "text" and isinstance(part.get("text"), str):
      parts.append({"type": "text", "text": part["text"]})
    elif kind == IMAGE_KIND:
      found = {key: part[key] for key in KEYS if part.get(key) is not None}
      parts.append({"type": kind, **({kind: found} if found else {})})
    elif kind == VIDEO_KIND:
      check_videos(f"{where}[{i}]")
      found = {key: shown for key, shown in part.items() if shown is not None and key not in ("type", "text")}
      if odd := [key for key in found if key not in (*VIDEO_KEYS, "fps")]:
        raise DataError(f"{where}[{i}] is a video with {odd[0]!r}, which is not read here. Allowed: "
                        f"{', '.join(VIDEO_KEYS)}; fps with frames. Which of them are taken says model.vision.video.")
      parts.append({"type": kind, **({kind: found} if found.keys() - {"fps"} else {})})
    else:
      raise DataError(f"{where}[{i}] is {str(part)[:60]}; expected {{'type': 'text', 'text': …}}, "
                      "{'type': 'image', …} or {'type': 'video', …}.")
  return parts if any(part["type"] in KINDS for part in parts) else text_of(parts)


def attach(messages: list[dict], refs: Sequence[ImageRef], where: str, folder: Path | None, markers: Sequence[str]
           ) -> tuple[list[dict], tuple[ImageRef, ...]]:
  """Messages in which each image and video is a part of its kind alone, and what these show, in their order.

  Args:
    messages: with contents as `content_parts` gives them.
    refs: those in the row's columns, for parts of their kind without one of their own; else for the markers in the
      texts; else they stand before what the user says first, images before videos.
    folder: see `ImageRef`.
    markers: what stands for one of KINDS in a text, if the columns have some.

  Raises:
    DataError: more or fewer than places for them.
  """
  contents = [message.get("content", "") for message in messages]
  for content in contents:
    refuse_stand_in(text_of(content), where)
  first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
  waiting = {}
  for kind, marker in reversed([*zip(KINDS, markers, strict=True)]):
    own = [ref for ref in refs if ref.video == (kind == VIDEO_KIND)]
    contents = _with_places(contents, kind, marker, len(own), first, where)
    waiting[kind] = iter(own)
  found, result = [], []
  for i, (message, content) in enumerate(zip(messages, contents, strict=True)):
    for j, part in enumerate(content if isinstance(content, list) else ()):
      if (kind := part["type"]) in KINDS:
        at = f"{where}: messages[{i}].content[{j}]"
        found.append(ImageRef(part[kind], at, folder, kind == VIDEO_KIND) if kind in part else next(waiting[kind]))
    if isinstance(content, list):
      content = [{"type": part["type"]} if part["type"] in KINDS else part for part in content]
      message = {**message, "content": content}
    result.append(message)
  return result, tuple(found)


def _with_places(contents: list, kind: str, marker: str, count: int, first: int, where: str) -> list:
  """Contents with a part for each of the columns' `count` of that kind; see `attach`."""
  parts = [part for content in contents if isinstance(content, list) for part in content]
  bare = sum(part["type"] == kind and kind not in part for part in parts)
  marks = 0 if bare or not count else sum(text_of(content).count(marker) for content in contents)
  if count and not bare and not marks:
    return [[{"type": kind}] * count + as_parts(content) if i == first else content
            for i, content in enumerate(contents)]
  if (bare or marks) != count:
    places = f"{bare} parts of messages" if bare else f"{marks} × {marker!r} in its messages"
    raise DataError(f"{where}: its columns have {count} {kind}(s), for {places}. Have one for each.")
  return contents if not marks else [
      [piece for part in as_parts(content) for piece in _split(part, kind, marker)] if marker in text_of(content)
      else content for content in contents]


def as_parts(content: str | list[dict]) -> list[dict]:
  """A message's content as parts."""
  return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []


def _split(part: dict, kind: str, marker: str) -> list[dict]:
  """A part with each marker in its text as a part of its own."""
  if part["type"] != "text":
    return [part]
  pieces: list[dict] = []
  for i, text in enumerate(part["text"].split(marker)):
    pieces += ([{"type": kind}] if i else []) + ([{"type": "text", "text": text}] if text else [])
  return pieces


def parts_of(message: Mapping) -> list[Mapping]:
  """The parts of a message; none if its content is a string."""
  content = message.get("content")
  return [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
