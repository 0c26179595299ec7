"""What a run takes from a Hugging Face folder: the architecture, the tokenizer, and the files that an export repeats.

The parameters themselves are read by trainer/checkpoints/init_from.py, the format is known to models/hf.
"""

import re
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from input_pipeline.tokenizer import new_tokens
from input_pipeline.tokenizer.tokenizer import load_extended
from models import hf, lora
from models.hf import files
from models.spec import ARCHITECTURE_KEYS
from trainer import tree
from trainer.config import defaults
from trainer.errors import ConfigError

# The folder inside a workdir that keeps the small files of the checkpoint a run started from.
FOLDER = "hf"
# A vocabulary that is enlarged for new tokens has a multiple of so many entries, which devices can share.
ROWS = 64


def fill_in(config: ConfigDict) -> list[str]:
  """Sets, in a resolved config, what follows from `model.hf` and `init_from.hf`; returns sentences on what it did.

  Keys of the architecture that still have their default value get that of config.json; changed ones stay, since they
  were changed on purpose (to extend the context, say), and are named.

  Raises:
    ConfigError: if the folder cannot be used, or contradicts the rest of the config.
  """
  model, start = config.model, config.init_from
  with config.unlocked():
    if start.fresh and (start.path or start.hf):
      raise ConfigError(f"init_from.fresh is True, but init_from.{'path' if start.path else 'hf'} names parameters to "
                        "start from. Remove one of them.")
    if start.path and start.hf:
      raise ConfigError(f"init_from has both path={start.path!r} and hf={start.hf!r}; give one. The base of an "
                        "adapter checkpoint is named by model.hf.")
    if model.hf is None:
      model.hf = start.hf
    if config.tokenizer.type == "auto":
      config.tokenizer.type = "bytes" if model.hf is None and config.tokenizer.path is None else "hf"
      if model.hf is not None and config.tokenizer.path is None:
        config.tokenizer.path = model.hf
    if model.hf is None:
      return []
    if model.name != "transformer":
      raise ConfigError(f"model.hf is {model.hf!r}, but model.name is {model.name!r}: only the built-in transformer "
                        "has a config.json's architecture. Leave out model.hf; init_from.path can load parameters.")
    family, keys, family_notes = hf.architecture(Path(model.hf), model.hf_ignore)
    notes = [f"model: {family.name}, as {model.hf}/config.json says"]
    default = defaults().model
    for key in ARCHITECTURE_KEYS:
      if key not in keys or key == "mtp_layers":  # what predicts tokens further ahead is read where it is asked for
        continue
      section, name, unset = _find(model, key)[0], *_find(default, key)[1:]
      if section[name] == unset:
        section[name] = keys[key]
      elif section[name] != keys[key]:
        notes.append(f"model.{key} = {section[name]!r}, as this config says; config.json says {keys[key]!r}")
    if new_tokens.wanted(config.tokenizer):
      needed, had = load_extended(config.tokenizer).vocab_size, model.vocab_size
      if needed > had:
        model.vocab_size = -(-needed // ROWS) * ROWS
        notes.append(f"model.vocab_size = {model.vocab_size}, a multiple of {ROWS}: with the new tokens there are "
                     f"{needed}, and {model.hf} has {had} entries")
      _check_trained(config)
  return notes + list(family_notes)


def _check_trained(config: Any) -> None:
  """Refuses new tokens beside adapters that train nothing of their embeddings."""
  options = config.model.lora
  table = "embed/embedding"
  if not options.rank or re.search(lora.trained(options.modules_to_save), table) or any(
      tree.search(target, [table], "model.lora.targets", must_match=False) for target in options.targets):
    return
  rows = new_tokens.rows(config.tokenizer)
  ids = sorted(rows.means) if rows is not None else []
  if not set(ids).issubset(options.trainable_token_indices):
    raise ConfigError("tokenizer.new_tokens: their embeddings are not trained, since model.lora.rank freezes what has "
                      f"no adapter. Add --config.model.lora.trainable_token_indices=\"{tuple(ids)!r}\", which trains "
                      "these rows, or --config.model.lora.modules_to_save=\"('^embed/','^unembed/')\", which trains "
                      "all rows (without the second where the embedding is the unembedding).")


def export_folder(config: Any, model: Any, workdir: Path) -> Path | None:
  """Where the run's export goes, None: nowhere.

  Raises:
    ConfigError: no family of Hugging Face models can express this one; better said now than after the training.
  """
  if not config.export.path:
    return None
  if ".." in Path(config.export.path).parts:
    raise ConfigError(f"export.path is {config.export.path!r}; a path with '..' would lead out of the workdir. Give a "
                      "name inside it, or an absolute path.")
  keys = hf.keys_of(config.model, model.num_real_vocab)
  hf.config_json(keys | {"mtp_layers": keys["mtp_layers"] * config.export.mtp})
  names = [dtype.name for dtype in files.DTYPES.values()]
  if config.export.dtype not in (None, *names):
    raise ConfigError(f"export.dtype is {config.export.dtype!r}; allowed: {', '.join(names)}, or unset.")
  return workdir / config.export.path


def _find(section: ConfigDict, dotted: str) -> tuple[ConfigDict, str, object]:
  """(the section that holds the key, its last name, its value)"""
  *parents, name = dotted.split(".")
  for parent in parents:
    section = section[parent]
  return section, name, section[name]
