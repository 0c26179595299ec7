"""The teacher of a student: another model over the same tokens, of any size, as `strategy.teacher` names it. A reward
model in rollouts is found and read in the same way.

It is a Hugging Face folder, or a run (a workdir or a checkpoint). Its parameters are `state["reference"]["teacher"]`:
on the same mesh, by the same rules of sharding, with a fingerprint in every checkpoint but not in it. Of several
(`strategy.teachers`, which trainer/strategies/teachers.py reads) that is a dict of theirs by name.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from input_pipeline.tokenizer.tokenizer import Tokenizer, load_tokenizer, saved_fingerprint
from models import api, hf
from models import config as config_lib
from trainer.checkpoints import checkpoint, init_from
from trainer.errors import ConfigError

KEY = "strategy.teacher"


@dataclasses.dataclass(frozen=True)
class Source:
  """What a path holds: the model's section, its tokenizer, and the entries that the latter has; `config`: of a run, the
  whole; None: it is a folder of Hugging Face."""

  path: str
  section: ConfigDict
  tokenizer: Path
  vocab_size: int
  config: Mapping[str, Any] | None = None

  @property
  def is_hf(self) -> bool:
    return self.config is None


def find(path: str | None, key: str = KEY) -> Source:
  """What the path holds, which messages call `key`; no tensor is read.

  Raises:
    ConfigError: nothing that can teach.
  """
  if path is None:
    raise ConfigError(f"{key} is not set. Give a Hugging Face folder, or a run: its workdir or a checkpoint.")
  folder = Path(path).expanduser()
  if not folder.is_dir():
    raise ConfigError(f"{key} is {path!r}, which is no folder. Give a Hugging Face folder, or a run: its workdir or a "
                      "checkpoint.")
  section = config_lib.model()
  if (folder / "config.json").is_file() and not (folder / "checkpoints").is_dir():
    _, keys, _ = hf.architecture(folder)
    hf.set_keys(section, keys)
    section.hf = str(folder)
    return Source(str(folder), section, folder, keys["vocab_size"])
  if (folder / "adapter_config.json").is_file():
    raise ConfigError(f"{key} is {path!r}, adapters without the model that they change. Give the model with its "
                      "adapters merged (PEFT: merge_and_unload).")
  try:
    workdir = checkpoint.find(str(folder)).parent.parent
  except ConfigError as e:
    raise ConfigError(f"{key}: {e}") from e
  config = hf.files.read_json(workdir / "config.json")
  _update(section, config["model"])
  if section.lora.rank:
    raise ConfigError(f"{key} is {path!r}, a run that trained adapters. Export it first, with its base: python -m "
                      f"trainer.export --workdir={workdir}.")
  size = load_tokenizer(workdir / "tokenizer.json").vocab_size
  return Source(str(folder), section, workdir / "tokenizer.json", min(size, section.vocab_size or size), config)


def files(source: Source) -> dict[str, Path]:
  """{name: file} of all that its parameters are read from."""
  if source.is_hf:
    folder, kinds = Path(source.path), (".json", ".safetensors")
    return {file.relative_to(folder).as_posix(): file for file in folder.rglob("*")
            if file.suffix in kinds and file.is_file()}
  folder = checkpoint.find(source.path)
  found = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
  return found | {"../../config.json": folder.parent.parent / "config.json"}


def make_model(path: str, params_dtype: str, compute_dtype: str, key: str = KEY) -> Any:
  """The teacher without its parameters. Raises: see `find`."""
  source = find(path, key)
  return api.make_model(source.section, vocab_size=source.vocab_size, params_dtype=params_dtype,
                        compute_dtype=compute_dtype)


def check(config: Any, tokenizer: Tokenizer, path: str | None, key: str = KEY) -> None:
  """Refuses the model at `path`, which messages call `key`, of other tokens than the run's, of fewer, or one that
  cannot see so many at a time. Raises ConfigError, before any device work."""
  source = find(path, key)
  api.validate(source.section, config.seq_len)
  theirs = load_tokenizer(source.tokenizer)
  if theirs.fingerprint == saved_fingerprint(tokenizer):
    # Either may have fewer embeddings than the tokenizer has entries; batches are checked for the run's model alone.
    ours = min(tokenizer.vocab_size, config.model.vocab_size or tokenizer.vocab_size)
    if source.vocab_size < ours:
      raise ConfigError(f"{key} is {path!r}, whose embeddings are of {source.vocab_size:,} tokens, where this run's "
                        f"model has {ours:,}: it cannot read the others. Give one that has them all, or resize its "
                        "embeddings.")
    return
  ours, others = tokenizer.token_bytes, theirs.token_bytes
  differ = next((i for i, pair in enumerate(zip(ours, others, strict=False)) if pair[0] != pair[1]), None)
  if differ is None and len(ours) == len(others):
    what = "they split texts in other ways, or have other special tokens"
  elif differ is None:
    what = f"this one has {len(ours):,} entries, that one {len(others):,}"
  else:
    what = f"entry {differ} is {ours[differ]!r} here, and {others[differ]!r} there"
  raise ConfigError(f"{key} is {path!r}, whose tokenizer is another one than this run's: {what}. It reads the very "
                    "tokens that are trained; train with its tokenizer (tokenizer.type=hf, tokenizer.path).")


def load(config: Any, target: Any, path: str, key: str = KEY) -> Any:
  """The parameters of the model at `path`, which messages call `key`.

  Args:
    target: nested dict of ShapeDtypeStructs with shardings.

  Raises:
    ConfigError: it does not have all of them.
  """
  source = find(path, key)
  origin = origin_at(init_from.origin_of(config), source, source.section)
  model = make_model(path, str(config.precision.params), str(config.precision.compute), key)
  loaded, where = init_from.first_params(origin, model, target)
  if init_from.has_fresh(where):
    raise ConfigError(f"{key}: {source.path} does not have all of its model's parameters ({where}).")
  return loaded


def origin_at(origin: init_from.Origin, source: Source, section: ConfigDict) -> init_from.Origin:
  """Where the parameters of a model with that section are, which begins from `source`; `origin`: that of the run."""
  return dataclasses.replace(
      origin, path=None if source.is_hf else source.path, remap=(), ignore=(),
      folder=source.path if source.is_hf else None, peft=None, fresh=False, tokenizer=None, hf_ignore=(), typed=None,
      model=section)


def _update(section: ConfigDict, saved: Mapping[str, Any]) -> None:
  """Gives a section the values that a run's config.json has; what that does not have stays."""
  for key, value in saved.items():
    if isinstance(value, Mapping) and key in section and isinstance(section[key], ConfigDict):
      _update(section[key], value)
    elif key in section:
      section[key] = tuple(value) if isinstance(value, list) else value
