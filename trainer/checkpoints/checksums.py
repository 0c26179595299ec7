"""Checksums in checkpoints, by which damage on a disk or on the way to it is seen and named.

`meta` holds a checksum of each array, of its bits as they were on the devices when it was saved, which no sharding
changes (trainer/checkpoints/fingerprint.py), and one of `meta` itself, under the key "seal".
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trainer.checkpoints.fingerprint import checksums
from trainer.errors import Damaged


def add_checksums(meta: dict[str, Any], leaves: Mapping[str, jax.Array], arrays: Mapping[str, np.ndarray]
                  ) -> dict[str, Any]:
  """`meta` with the checksums of the state's leaves, by path, of further arrays, by name, and of itself ("seal").

  It is a copy, in depth: it is written while the run goes on, and what callbacks remember changes with every step.
  """
  meta = json.loads(json.dumps(meta | {"checksums": checksums(leaves), "arrays": _of_arrays(arrays)}))
  return meta | {"seal": _digest(meta)}


def checked_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
  """`meta` without its own checksum. Raises Damaged: it does not match."""
  rest = {key: part for key, part in meta.items() if key != "seal"}
  if meta.get("seal") != _digest(rest):
    raise Damaged("what the checkpoint says of itself (meta/metadata) is not what was saved")
  return rest


def check(meta: Mapping[str, Any], leaves: Mapping[str, jax.Array], folder: Path) -> None:
  """Refuses leaves, by path, that are not those of `meta`. Raises Damaged, naming them."""
  found = checksums(leaves)
  _refuse([path for path in leaves if meta.get("checksums", {}).get(path) != found[path]], len(leaves), folder)


def check_arrays(meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray], folder: Path) -> None:
  """The same of further arrays, all of which must be there."""
  found, saved = _of_arrays(arrays), meta.get("arrays", {})
  names = sorted({*found, *saved})
  _refuse([name for name in names if found.get(name) != saved.get(name)], len(names), folder)


def _refuse(wrong: list[str], number: int, folder: Path) -> None:
  if wrong:
    raise Damaged(f"{len(wrong)} of {number} arrays in {folder} are not what was saved: "
                  f"{', '.join(wrong[:8])}{' …' if wrong[8:] else ''}")


def _of_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
  return {name: hashlib.blake2b(np.ascontiguousarray(part).tobytes(), digest_size=8).hexdigest()
          for name, part in arrays.items()}


def _digest(meta: Mapping[str, Any]) -> str:
  return hashlib.blake2b(json.dumps(meta, sort_keys=True).encode(), digest_size=8).hexdigest()
