"""Hugging Face checkpoints in and out: config.json and safetensors, for the families of models/hf/families.

    from models import hf
    model, params = hf.load("path/to/folder", dtype="float32")
    logits_BxTxV = model.logits(params, tokens_BxT)
    hf.save(model, params, "path/to/new_folder")

Nothing is downloaded, unpickled or run: a folder is data.

May import: models.api, models.config, models.lora, models.spec, models.spec_video, models.spec_vision.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from models import api
from models import config as config_lib
from models.hf import convert, families, files, pixels, videos
from models.hf.canonical import NEUTRAL, abstract_params, canonical, keys_of, set_keys
from models.hf.convert import iter_params, plan
from models.hf.errors import HFError
from models.hf.family import Family
from models.hf.files import TensorFolder, write_json
from models.hf.peft import load_adapters, save_adapters
from models.hf.peft_modules import AdapterLayout
from models.hf.source import each
from trainer import atomic, tree

__all__ = ["AdapterLayout", "HFError", "SMALL_FILES", "TensorFolder", "abstract_params", "architecture", "config_json",
           "copy_small_files", "iter_params", "keys_of", "load", "load_adapters", "plan", "prepare",
           "save", "save_adapters", "set_keys", "with_dtype", "write_json"]

# What a folder holds besides config.json and tensors, as glob patterns: it goes unchanged from the source into the
# workdir and the export.
SMALL_FILES = (
    "generation_config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
    "tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt",
    *pixels.FILES, videos.FILE,
)
# What a config.json says of the tokenizer, not of the model: kept where the rest has to be written anew, and null where
# it is not known, since transformers would put its own idea of a family's ids in their place.
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def architecture(path: str | Path, ignored: Iterable[str] = ()) -> tuple[Family, dict[str, Any], list[str]]:
  """What model a folder holds: its family, {dotted key of config.model: value}, and sentences on that to be printed.

  Modules that predict tokens further ahead are passed over here: not every folder that should have them has.

  Reads config.json, and of a model of images preprocessor_config.json; touches no tensor and no device.

  Args:
    ignored: entries of config.json that are not known here and have no effect (`model.hf_ignore`), those of objects
      inside it with dots.

  Raises:
    HFError: no such folder, a damaged config.json, an architecture or option that Weft cannot compute exactly.
  """
  folder = files.existing_folder(path)
  content, where = files.read_config(folder), str(folder / files.CONFIG)
  family = families.find(content, where, ignored)
  keys = family.read(content, where, ignored) | {"mtp_layers": 0}
  if absent := sorted(name for name in each(ignored) if not _has(content, name)):
    raise HFError(f"model.hf_ignore names {absent[0]!r}, but {where} has no such entry. Leave it out.")
  keys |= pixels.read(folder, keys)
  return family, keys | videos.read(folder, keys), family.notes(content, where, ignored)


def load(path: str | Path, dtype: Any = "float32", shardings: Mapping | Callable[[Mapping], Mapping] | None = None,
         progress: bool = False, ignored: Iterable[str] = (), mtp_layers: int = 0) -> tuple[api.Model, dict[str, Any]]:
  """The model of a folder and its parameters, read straight onto their devices.

  Args:
    dtype: of parameters and computation; None: that of the tensors (of the embedding, for the computation).
    shardings: nested dict of shardings; or a function from the abstract parameters to it, e.g.
      `lambda p: trainer.distributed.mesh.param_shardings(p, mesh)[0]`; None: everything on the first device.
    ignored: see `architecture`.
    mtp_layers: modules that predict tokens further ahead to be read (`model.mtp_layers`).

  Raises:
    HFError: what is missing, damaged or cannot be represented, before any device work.
  """
  family, keys, _ = architecture(path, ignored)
  keys["mtp_layers"] = mtp_layers
  folder = TensorFolder(path)
  section = config_lib.model()
  set_keys(section, keys)
  section.hf = str(folder.path)

  def make(kind: Any) -> Any:
    return api.make_model(section, vocab_size=keys["vocab_size"], params_dtype=kind, compute_dtype=kind)

  model = make("float32" if dtype is None else dtype)
  abstract = model.abstract_params()
  fitting = plan(family, keys, abstract, folder)
  if dtype is None:
    model = make(fitting.leaves["embed/embedding"].dtype)
  placed = shardings(abstract) if callable(shardings) else shardings
  placed = None if placed is None else tree.flatten(placed)
  params = tree.unflatten(dict(iter_params(fitting, folder, placed, dtype, progress)))
  model.architecture, model.hf_config = keys, files.read_config(path)  # for `save`
  return model, params


def save(model: api.Model, params: Mapping, out: str | Path, dtype: Any = None, *, overwrite: bool = False,
         max_shard_bytes: int = files.MAX_SHARD_BYTES, progress: bool = False,
         gather: Callable[[jax.Array], np.ndarray] | None = None) -> None:
  """Writes parameters in memory as a folder: config.json and tensors; tokenizer files are the caller's.

  Args:
    model: what `load` gave; or another, of which `model.architecture` is set to what `keys_of` gives.
    params: its parameters, all in reach of this process unless it has `gather`.
    out: a folder, made if missing.
    dtype: of the tensors; None: that of the parameters.
    overwrite: replace a model that is in `out`.
    max_shard_bytes: where a new file begins.
    gather: makes an array that several processes hold whole in each. All of them call this then; the first writes.

  Raises:
    HFError: no family can express the model; `out` holds one already; files that cannot be written.
  """
  out = Path(out).expanduser().absolute()
  leaves = tree.flatten(params)
  writes = gather is None or jax.process_index() == 0
  elsewhere = [path for path, leaf in leaves.items() if not getattr(leaf, "is_fully_addressable", True)]
  if gather is None and elsewhere:
    raise HFError(f"{elsewhere[0]} is partly on devices of other processes. Save a checkpoint, and export that: "
                  "python -m trainer.export.")
  family, content = config_json(model.architecture, getattr(model, "hf_config", None))
  if writes:
    prepare(out, overwrite)
  whole = np.asarray if gather is None else gather
  convert.write_tensors(lambda path, index: whole(leaves[path][index]), family, model.architecture, leaves,
                        out if writes else None, dtype, max_shard_bytes, progress)
  if not writes:
    return
  kinds = {np.dtype(dtype if dtype is not None else leaf.dtype).name for leaf in leaves.values()}
  write_json(out / files.CONFIG, with_dtype(content, kinds.pop() if len(kinds) == 1 else "float32"))


def config_json(keys: Mapping[str, Any], source: Mapping[str, Any] | None = None, where: str = files.CONFIG,
                ignored: Iterable[str] = ()) -> tuple[Family, dict[str, Any]]:
  """The family of a model and its config.json.

  Args:
    keys: {dotted key: value} of the model.
    source: the config.json that the model came from. Its family is taken, and what it says is kept as far as it is
      still true.
    where: the name of `source` in messages.
    ignored: see `architecture`; of `source`.

  Raises:
    HFError: no family can express the model; the message names the keys that stand in the way.
  """
  tokens = {key: (source or {}).get(key) for key in TOKEN_KEYS}
  if source is not None:
    alone = ("vision_config",) if keys["vision.tower"] == "none" else ()
    family = families.find(source, where, (*ignored, *alone))
    if _reads_as(family, source, keys, where, ignored):
      return family, family.with_modules(family.kept(source), keys["mtp_layers"])
    try:
      written = family.write(keys)
    except HFError:  # changed into a model of another family, or of none
      return _matched(keys, tokens)
    return family, family.renewed(source, {**tokens, **written})
  return _matched(keys, tokens)


def _matched(keys: Mapping[str, Any], tokens: Mapping[str, Any]) -> tuple[Family, dict[str, Any]]:
  family, written = families.match(keys)
  return family, {**written, **tokens}


def with_dtype(content: Mapping[str, Any], dtype: str) -> dict[str, Any]:
  """config.json with the dtype of its tensors, under the key that is in use there, in the objects inside it too."""
  def of(part: Mapping[str, Any]) -> dict[str, Any]:
    return {**part, **{key: dtype for key in ("dtype", "torch_dtype") if key in part}}

  inner = {key: of(content[key]) for key in ("text_config", "vision_config") if isinstance(content.get(key), dict)}
  return {**content, **inner, "dtype" if "dtype" in content else "torch_dtype": dtype}


def prepare(out: Path, overwrite: bool) -> None:
  """Makes the folder for a model.

  Raises:
    HFError: there is a model in it, and `overwrite` is not set; it is a file, or cannot be made.
  """
  if out.is_dir() and not overwrite:
    present = [p.name for p in (*files.weights_in(out), out / files.CONFIG) if p.exists()]
    if present:
      raise HFError(f"{out} already holds {', '.join(present[:4])}. Give another folder, or say that it may be "
                    "overwritten.")
  try:
    out.mkdir(parents=True, exist_ok=True)
  except OSError as e:
    raise HFError(f"{out} cannot be made: {e.strerror}. Give a folder that you may write to.") from e


def copy_small_files(source: str | Path, out: str | Path, names: Iterable[str] = (files.CONFIG, *SMALL_FILES)) -> None:
  """Copies those of the named files (glob patterns) that `source` has. Each is whole or not there."""
  source, out = Path(source), Path(out)
  for file in [file for name in names for file in sorted(source.glob(name)) if file.is_file()]:
    target = out / file.relative_to(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(target, file.read_bytes())


def _has(content: Any, name: str) -> bool:
  """Whether there is an entry of that dotted name."""
  first, _, rest = name.partition(".")
  return isinstance(content, Mapping) and first in content and (not rest or _has(content[first], rest))


def _reads_as(family: Family, content: Mapping[str, Any], keys: Mapping[str, Any], where: str,
              ignored: Iterable[str]) -> bool:
  """Whether that config.json describes that model."""
  try:
    wanted = canonical({**NEUTRAL, **keys})
    return {**family.read(content, where, ignored), "mtp_layers": wanted["mtp_layers"]} == wanted
  except HFError:
    return False
