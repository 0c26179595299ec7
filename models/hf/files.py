"""The files of a Hugging Face folder: config.json, and tensors in safetensors files, read a slice at a time.

A safetensors file is 8 bytes (the header's length, little-endian), a JSON header {name: dtype, shape, data_offsets}
and the tensors' bytes (https://huggingface.co/docs/safetensors). The `safetensors` library checks headers and writes
files; slices are read through a memory map of the bytes, which touches only the pages they lie in.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
from safetensors.numpy import save_file

from models.hf import names as names_lib
from models.hf import quantised
from models.hf.errors import HFError
from models.hf.quantised.slices import Packed
from trainer import atomic

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# The dtypes that can hold parameters, by their names in safetensors.
DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
# Those that may stand for such with others (models/hf/quantised).
_PACKED = DTYPES | {"U8": np.dtype(np.uint8), "I8": np.dtype(np.int8), "I32": np.dtype(np.int32),
                    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu)}
MAX_SHARD_BYTES = 5_000_000_000
# What pickled or foreign checkpoints look like; they are named in messages, never opened.
FOREIGN = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf")


@dataclass(frozen=True)
class TensorInfo:
  """Where a tensor lies: `dtype` as safetensors names it, `offset` in bytes from the file's beginning; `packed`: of one
  that stands for others (models/hf/quantised), these."""

  shape: tuple[int, ...]
  dtype: str
  file: Path
  offset: int
  packed: Packed | None = None


class TensorFolder:
  """The tensors of a folder, from model.safetensors or the shards that model.safetensors.index.json names.

  Opening reads and checks the headers alone.

  Attributes:
    path: the folder.
    tensors: {name: TensorInfo}, without what programs put before names (models/hf/names.py), and with one in the place
      of those that it is made of (models/hf/quantised).
    note: a sentence on what that was; "" for nothing.

  Raises:
    HFError: no such folder or file, a file that is truncated or malformed, an index that does not fit its files.
  """

  def __init__(self, path: str | Path):
    self.path = existing_folder(path)
    single, index = self.path / SINGLE, self.path / INDEX
    if single.is_file() and index.is_file():
      raise HFError(f"{self.path} has both {SINGLE} and {INDEX}, so it is not clear which one is meant. Remove one.")
    if single.is_file():
      found = read_header(single)
    elif index.is_file():
      found = _read_index(index)
    else:
      raise HFError(_no_tensors(self.path))
    found, self.note = names_lib.renamed(found)
    config = self.path / CONFIG
    options = read_json(config).get("quantization_config") if config.is_file() else None
    self.tensors = quantised.joined(found, options)

  def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
    """A slice of a tensor in its own dtype: a read-only view of the file, read from disk where it is used; of
    one that is made of others, an array.

    Raises:
      HFError: no such tensor, or its dtype holds no parameters (integers, float8, …).
    """
    if name not in self.tensors:
      raise HFError(f"{self.path} has no tensor {name!r}.")
    info = self.tensors[name]
    if info.dtype not in DTYPES:
      raise HFError(f"{info.file}: tensor {name!r} is {info.dtype}; parameters are {', '.join(DTYPES)}. A quantised "
                    "checkpoint must be turned back into one of these first.")
    if 0 in info.shape:
      return np.empty(info.shape, DTYPES[info.dtype])[index]
    if info.packed is not None:
      return info.packed.unpack(*map(self._part, info.packed.parts), index)
    return _view(info, DTYPES[info.dtype])[index]

  def _part(self, info: TensorInfo) -> np.ndarray:
    """What a tensor is made of, in its own dtype."""
    if info.dtype not in _PACKED:
      raise HFError(f"{info.file}: a tensor of a quantised matrix is {info.dtype}; read are {', '.join(_PACKED)}.")
    return _view(info, _PACKED[info.dtype])


def _view(info: TensorInfo, dtype: np.dtype) -> np.ndarray:
  return np.memmap(info.file, dtype, mode="r", offset=info.offset, shape=info.shape).view(np.ndarray)


def existing_folder(path: str | Path) -> Path:
  """The folder as an absolute path; raises HFError if there is none."""
  folder = Path(path).expanduser().absolute()
  if not folder.is_dir():
    what = "is a file" if folder.exists() else "does not exist"
    raise HFError(f"{folder} {what}; give the folder of a Hugging Face checkpoint, with {CONFIG} and *.safetensors. "
                  "Weft downloads nothing: fetch it first, e.g. with `hf download ORGANISATION/NAME --local-dir DIR`.")
  return folder


def read_config(path: str | Path) -> dict[str, Any]:
  """The folder's config.json; raises HFError if it is missing, not JSON, or not an object."""
  folder = existing_folder(path)
  if not (folder / CONFIG).is_file():
    if message := _adapters_in(folder):
      raise HFError(message)
    raise HFError(f"{folder} has no {CONFIG}, which says what model it holds. It stands beside the tensors in the "
                  "place that the folder was copied from.")
  return read_json(folder / CONFIG)


def read_json(file: Path) -> dict[str, Any]:
  """A JSON object from a file; raises HFError for anything else."""
  try:
    content = json.loads(file.read_bytes().decode("utf-8"), object_pairs_hook=_unique)
  except (ValueError, RecursionError) as e:
    raise HFError(f"{file} is not valid JSON: {e or type(e).__name__}. Fetch it again.") from e
  except OSError as e:
    raise HFError(f"{file} cannot be read: {e.strerror}.") from e
  if not isinstance(content, dict):
    raise HFError(f"{file} holds a JSON {type(content).__name__}; it must be an object, {{\"key\": value, …}}.")
  return content


def write_json(file: Path, content: Mapping[str, Any] | list[Any]) -> None:
  """A JSON object, or a list, as a file, which is whole or not there."""
  atomic.write(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_header(file: Path) -> dict[str, TensorInfo]:
  """{name: TensorInfo} of one safetensors file, checked: every byte belongs to exactly one tensor.

  Raises:
    HFError: the file is truncated or malformed.
  """
  try:
    with safetensors.safe_open(file, "np"):  # checks the header and the file's size
      pass
    with open(file, "rb") as f:
      length = int.from_bytes(f.read(8), "little")
      header = json.loads(f.read(length), object_pairs_hook=_unique)
  except (safetensors.SafetensorError, ValueError, OSError) as e:
    size = file.stat().st_size if file.is_file() else 0
    raise HFError(f"{file} ({size:,} bytes) is not a whole safetensors file: {e}. It is truncated or damaged; fetch it "
                  "again and compare its size and checksum with the original's.") from e
  return {name: TensorInfo(tuple(entry["shape"]), entry["dtype"], file, 8 + length + entry["data_offsets"][0])
          for name, entry in header.items() if name != "__metadata__"}


def _read_index(index: Path) -> dict[str, TensorInfo]:
  """The tensors of all shards, which must be those that the index names."""
  weight_map = read_json(index).get("weight_map")
  if not isinstance(weight_map, dict) or not all(
      isinstance(name, str) and name.isprintable() for entry in weight_map.items() for name in entry):
    raise HFError(f"{index}: \"weight_map\" must be an object that gives the file of each tensor.")
  tensors: dict[str, Any] = {}
  problems: list[str] = []
  for file in sorted(set(weight_map.values())):
    if Path(file).name != file or not (index.parent / file).is_file():
      problems.append(f"{file}: named by the index, but not in the folder")
      continue
    for name, info in read_header(index.parent / file).items():
      if name in tensors:
        problems.append(f"{name}: in both {tensors[name].file.name} and {file}")
      elif weight_map.get(name) != file:
        problems.append(f"{name}: in {file}, but in the index {weight_map.get(name, 'nowhere')}")
      tensors[name] = info
  present = {info.file.name for info in tensors.values()}
  problems += [f"{name}: in the index with {file}, which does not hold it" for name, file in weight_map.items()
               if name not in tensors and file in present]
  if problems:
    raise HFError(f"{index} does not fit its files ({len(problems)} problems):\n  " + "\n  ".join(problems[:20])
                  + "\nFetch the folder again.")
  return tensors


def _no_tensors(folder: Path) -> str:
  if others := [p for p in (folder / SINGLE, folder / INDEX) if os.path.lexists(p)]:
    return f"{others[0]} is not a regular file, nor a link to one. Fetch it again."
  if message := _adapters_in(folder):
    return message
  shards = sorted(p.name for p in folder.glob("*.safetensors"))
  if shards:
    return (f"{folder} has neither {SINGLE} nor {INDEX}, only {', '.join(shards[:5])}. Of several files the index says "
            f"what each holds: fetch it too; a single file must be named {SINGLE}.")
  foreign = sorted(p.name for pattern in FOREIGN for p in folder.glob(pattern))
  if foreign:
    return (f"{folder} has no safetensors, only {', '.join(foreign[:5])}. Pickled weights can run code and are never "
            "opened. Convert them where you trust them: python -c \"from transformers import AutoModelForCausalLM as "
            f"M; M.from_pretrained('{folder}').save_pretrained('NEW_DIR')\"")
  return f"{folder} has no {SINGLE} and no {INDEX}."


def _adapters_in(folder: Path) -> str | None:
  """That a folder holds adapters, and how they are read; None: it does not."""
  if not (folder / "adapter_config.json").is_file():
    return None
  base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
  return (f"{folder} holds adapters in PEFT's format, without the model that they are for ({base}). Give that model's "
          f"folder and these: --config.model.hf=FOLDER --config.model.lora.peft={folder} (docs/precision.md).")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """A JSON object, in which no key stands twice."""
  found = dict(pairs)
  if len(found) < len(pairs):
    keys = [key for key, _ in pairs]
    raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands in it twice")
  return found


# ---------------------------------------------------------------------------------------------------- writing


def shards_of(sizes: Mapping[str, int], max_shard_bytes: int) -> dict[str, list[str]]:
  """{file name: tensor names}, in order; a tensor larger than a shard has one to itself. Sizes are in bytes."""
  if max_shard_bytes < 1:
    raise HFError(f"the largest size of a shard is {max_shard_bytes} bytes; allowed: 1 or more, e.g. 5 GB.")
  groups: list[list[str]] = []
  room = 0
  for name, size in sizes.items():
    if not groups or size > room:
      groups.append([])
      room = max_shard_bytes
    groups[-1].append(name)
    room -= size
  if len(groups) <= 1:
    return {SINGLE: list(sizes)}
  return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


def write_tensors(out: Path, tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]],
                  make: Callable[[str], np.ndarray], max_shard_bytes: int = MAX_SHARD_BYTES) -> list[Path]:
  """Writes safetensors into `out`, with an index if there is more than one shard; holds one shard at a time.

  Everything is first written under temporary names. Then weights that `out` had are removed with its config.json, and
  the new ones take their names, the index last. So an index is never there without all of its files, and a folder
  half-way between two models has no config.json.

  Args:
    out: a folder, made if missing.
    tensors: {name: (shape, dtype)} in the order in which they are written.
    make: gives the tensor of a name; called once for each, in order.
    max_shard_bytes: where a new shard begins.

  Returns:
    The files written.

  Raises:
    HFError: they could not be written (a full disk, say); `out` then has no new file.
  """
  sizes = {name: int(np.prod(shape)) * np.dtype(dtype).itemsize for name, (shape, dtype) in tensors.items()}
  shards = shards_of(sizes, max_shard_bytes)
  out.mkdir(parents=True, exist_ok=True)
  temporary = {out / file: out / f"{file}.tmp" for file in shards}
  try:
    for file, names in shards.items():
      arrays = {}
      for name in names:
        shape, dtype = tensors[name]
        arrays[name] = np.asarray(make(name), order="C")
        if arrays[name].shape != tuple(shape) or arrays[name].dtype != dtype:
          raise ValueError(f"{name} became {arrays[name].dtype}{arrays[name].shape}, announced: {dtype}{shape}")
      save_tensors(arrays, temporary[out / file])
      del arrays
    if len(shards) > 1:
      temporary[out / INDEX] = out / f"{INDEX}.tmp"
      count = sum(int(np.prod(shape)) for shape, _ in tensors.values())
      index = {"metadata": {"total_parameters": count, "total_size": sum(sizes.values())},
               "weight_map": {name: file for file, names in shards.items() for name in names}}
      temporary[out / INDEX].write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
  except BaseException as e:
    for unfinished in temporary.values():
      unfinished.unlink(missing_ok=True)
    if isinstance(e, (OSError, safetensors.SafetensorError)):
      raise HFError(f"the tensors could not be written to {out}: {e}. Free space or fix the folder's permissions, then "
                    "run the same command again.") from e
    raise
  for old in (out / CONFIG, *weights_in(out)):
    old.unlink(missing_ok=True)
  for file, written in temporary.items():
    os.replace(written, file)
  return list(temporary)


def save_tensors(tensors: dict[str, np.ndarray], file: Path) -> None:
  """Writes one safetensors file, with the permissions that any new file of this process has.

  Raises:
    OSError, safetensors.SafetensorError: it cannot be written.
  """
  file.unlink(missing_ok=True)
  file.touch()
  mode = file.stat().st_mode & 0o777
  save_file(tensors, file, metadata={"format": "pt"})  # makes another file, for its owner alone, and renames it
  file.chmod(mode)


def weights_in(folder: Path) -> list[Path]:
  """The files of `folder` that hold a model's tensors, or say where they are; the index first."""
  names = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
  return [p for p in (folder / INDEX, *sorted(folder.glob("model*.safetensors")))
          if p.is_file() and (p.name == INDEX or names.fullmatch(p.name))]
