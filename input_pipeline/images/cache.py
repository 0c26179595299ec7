"""The images of a token cache: each kept once, as its file is, beside the tokens.

`image_bytes.bin` holds the contents of the image files end to end, `image_offsets.bin` (int64 [images + 1]) where each
begins, `image_places.bin` (int64 [uses]) with which tokens the places of images begin, ascending, `image_tokens.bin`
(int64 [uses]) how many tokens these are, `image_ids.bin` (int64 [uses]) which image stands there, and
`image_squares.bin` (int64 [uses]) how many squares it is, see `EncodedImage.squares`. `files.json` says
which files beside the data they came from, with size and time: when one of these has changed, the cache is outdated.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from input_pipeline.examples.base import Encoded
from input_pipeline.images.images import EncodedImage


class SourceImages(NamedTuple):
  """The images of a tokenised source: use u is image ids[u], in place of the tokens[u] tokens from places[u] on, and
  squares[u] squares.

  `data` is uint8; image i is the file with the content data[offsets[i]:offsets[i + 1]]. `films`: how many are.
  """

  data: np.ndarray
  offsets: np.ndarray
  places: np.ndarray
  ids: np.ndarray
  tokens: np.ndarray
  squares: np.ndarray
  films: int = 0

  def content(self, use: int) -> bytes:
    image = int(self.ids[use])
    return self.data[self.offsets[image]:self.offsets[image + 1]].tobytes()

  def between(self, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(first use, one after the last) of images that begin at tokens start to stop."""
    return np.searchsorted(self.places, start), np.searchsorted(self.places, stop)

  def outside(self, cut: np.ndarray, after: bool) -> np.ndarray:
    """Places to cut between tokens, moved to the begin or, with `after`, to the end of an image they are within."""
    use = np.searchsorted(self.places, cut) - 1
    if not len(self.places):
      return cut
    begin, size = self.places[np.maximum(use, 0)], self.tokens[np.maximum(use, 0)]
    within = (use >= 0) & (cut < begin + size)
    return np.where(within, begin + (size if after else 0), cut)


class ImageWriter:
  """Writes the images of documents, equal ones once; nothing if there are none.

  Args:
    write: appends to an array of the cache.
  """

  def __init__(self, write: Callable[[str, np.ndarray], None]):
    self._write = write
    self._contents = hashlib.blake2b(digest_size=8)
    self._known: dict[bytes, int] = {}
    self._files: dict[str, list[int]] = {}
    self._size = self._uses = self._films = 0

  def write(self, documents: list[Encoded], starts: np.ndarray) -> None:
    for document, start in zip(documents, starts.tolist(), strict=True):
      if len(document.images) != len(document.places):
        raise ValueError(f"a document has {len(document.images)} images in {len(document.places)} places")
      for image, place in zip(document.images, document.places, strict=True):
        self._write("image_ids", np.array([self._number(image)], "<i8"))
        self._write("image_places", np.array([start + place], "<i8"))
        self._write("image_tokens", np.array([image.tokens], "<i8"))
        self._write("image_squares", np.array([image.squares], "<i8"))
        self._uses += 1
        self._films += image.seconds is not None

  def finish(self, folder: Path) -> dict[str, int | str]:
    """What meta.json says of them."""
    if not self._uses:
      return {}
    (folder / "files.json").write_text(json.dumps(self._files), "utf-8")
    return {"images": len(self._known), "image_uses": self._uses, "image_squares": True, "films": self._films,
            "image_bytes": self._size, "image_contents": self._contents.hexdigest()}

  def _number(self, image: EncodedImage) -> int:
    for file in (file.resolve() for file in image.files):
      self._files[str(file)] = _size_and_time(file)
    key = hashlib.blake2b(image.data, digest_size=16).digest()
    self._contents.update(key)
    if key not in self._known:
      if not self._known:
        self._write("image_offsets", np.zeros(1, "<i8"))
      self._known[key] = len(self._known)
      self._size += len(image.data)
      self._write("image_bytes", np.frombuffer(image.data, np.uint8))
      self._write("image_offsets", np.array([self._size], "<i8"))
    return self._known[key]


def _size_and_time(file: Path) -> list[int]:
  stat = os.stat(file)
  return [stat.st_size, stat.st_mtime_ns]


def changed_file(folder: Path) -> str | None:
  """Which of the image files beside the data is not what it was. (One that is gone is in the cache.)"""
  if not (folder / "files.json").exists():
    return None
  for file, known in json.loads((folder / "files.json").read_text("utf-8")).items():
    with contextlib.suppress(OSError):
      if _size_and_time(Path(file)) != known:
        return f"outdated ({file} has changed)"
  return None


def arrays(meta: dict) -> dict[str, tuple[str, int]]:
  """(dtype, length) of each array of images, from what `ImageWriter.finish` gave."""
  uses = meta.get("image_uses", 0)
  return {} if not uses else {
      "image_bytes": ("|u1", meta["image_bytes"]), "image_offsets": ("<i8", meta["images"] + 1),
      "image_places": ("<i8", uses), "image_tokens": ("<i8", uses), "image_ids": ("<i8", uses),
      **({"image_squares": ("<i8", uses)} if "image_squares" in meta else {})}
