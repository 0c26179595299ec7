"""The tokenizer files of a Hugging Face folder, resolved to what `transformers` makes of them.

Which file says what, in the order of their weight:
- tokenizer.json: the vocabulary and how text is split. Without it, GPT-2's vocab.json and merges.txt are used.
- tokenizer_config.json: the names of the special tokens (those that tokenizer.json lacks are appended) and, in
  `added_tokens_decoder`, tokens to add; and the class of the tokenizer, see `hf_classes`.
- special_tokens_map.json and added_tokens.json: the same, read only where tokenizer_config.json has no
  `added_tokens_decoder`.
- generation_config.json, then config.json: ids that end a text; and EOS and BOS where no file above mentions them.
"""

import contextlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from input_pipeline.tokenizer import hf_classes
from trainer.errors import ConfigError, DataError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Kept beside a saved tokenizer.json, as they are.
KEPT = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
        "chat_template.json")
# Ids beyond it belong to no model, but to a file that is wrong.
MAX_VOCABULARY = 1 << 24
OTHER_FORMATS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tiktoken.model", "tekken.json")


@dataclass(frozen=True)
class TokenizerFiles:
  """What a folder says about its tokenizer.

  `special_tokens` are named as in transformers (`bos_token`, …). `added` are tokens that tokenizer.json lacks or has
  with other properties, with the id that each must get (None: that of the vocabulary). `stop_ids` end a text; `bos_id`
  and `eos_id` are used where no special token is named. `files` is everything else worth keeping: {name: content}.
  """

  serialized: str
  special_tokens: dict[str, str] = field(default_factory=dict)
  added: tuple[tuple[AddedToken, int | None], ...] = ()
  stop_ids: tuple[int, ...] = ()
  bos_id: int | None = None
  eos_id: int | None = None
  files: dict[str, str] = field(default_factory=dict)


def find_tokenizer(path: Path, key: str = "tokenizer") -> TokenizerFiles:
  """The tokenizer in a tokenizer.json, or in the folder that holds it.

  Raises:
    ConfigError: no such file, or a folder without a tokenizer that can be read exactly; says how to make one.
    DataError: a file that is not what its name says.
  """
  path = Path(path)
  folder = path if path.is_dir() else path.parent
  file = folder / "tokenizer.json" if path.is_dir() else path
  named, legacy = _named(folder)
  model, generation = (read_json(folder / name) for name in ("config.json", "generation_config.json"))
  if file.is_file():
    serialized, defaults = read_text(file), {}
  else:
    serialized = _from_gpt2(folder, file, key, named, model)
    defaults = {k: "<|endoftext|>" for k in NAMED_TOKENS[:3] if k not in named}
    named = {**named, **defaults}
  name = hf_classes.tokenizer_class(named, model)
  # What is no tokenizer stays as it is, which is told where it is made.
  with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
    serialized = hf_classes.adapted(serialized, name, named)
  special_tokens = _special_tokens(named, folder)
  ids = {k: _ids(generation, k, folder / "generation_config.json") or _ids(model, k, folder / "config.json")
         for k in ("bos_token_id", "eos_token_id")}
  stop_ids = (*_ids(generation, "eos_token_id", folder), *_ids(model, "eos_token_id", folder))
  kept = {name: read_text(folder / name) for name in KEPT if (folder / name).is_file()}
  if name == hf_classes.AS_IT_IS and hf_classes.tokenizer_class(named, {}) in hf_classes.CHANGING:
    defaults["tokenizer_class"] = name  # config.json, which decided it, is not kept
  written = read_json(folder / "tokenizer_config.json")
  if any(written.get(k) != v for k, v in defaults.items()):
    kept["tokenizer_config.json"] = json.dumps({**written, **defaults}, indent=2)
  for template in sorted((folder / "additional_chat_templates").glob("*.jinja")):
    kept[f"additional_chat_templates/{template.name}"] = read_text(template)
  if generation or ids["bos_token_id"] or ids["eos_token_id"]:
    found: dict[str, Any] = {k: list(v) for k, v in {**ids, "eos_token_id": dict.fromkeys(stop_ids)}.items() if v}
    found = {k: v[0] if len(v) == 1 else v for k, v in found.items()}
    kept["generation_config.json"] = json.dumps({**generation, **found}, indent=2)
  return TokenizerFiles(
      serialized, special_tokens, _added(serialized, named, special_tokens, folder, legacy, file),
      tuple(dict.fromkeys(stop_ids)),
      bos_id=ids["bos_token_id"][0] if ids["bos_token_id"] and "bos_token" not in named else None,
      eos_id=ids["eos_token_id"][0] if ids["eos_token_id"] and "eos_token" not in named else None, files=kept)


def special_tokens(folder: Path) -> dict[str, str] | None:
  """{`bos_token`: …} as transformers hands them to chat templates; None where no file of the folder names any."""
  if (folder / "tokenizer.json").is_file():
    found = find_tokenizer(folder)
    named = (("bos_token", found.bos_id), ("eos_token", found.eos_id))
    numbered: dict[str, Any] = {k: i for k, i in named if i is not None}
    if numbered:
      backend = make_backend(found.serialized, plain=True)
      add_tokens(backend, found, str(folder))
      numbered = {k: backend.id_to_token(i) for k, i in numbered.items()}
    return {**found.special_tokens, **{k: v for k, v in numbered.items() if v is not None}}
  if not any((folder / name).is_file() for name in ("tokenizer_config.json", "special_tokens_map.json")):
    return None
  return _special_tokens(_named(folder)[0], folder)


def make_backend(serialized: str, plain: bool) -> Backend:
  """The library's tokenizer, deterministic and without truncation and padding; `plain`: special tokens are text."""
  backend = Backend.from_str(serialized)
  # A tokenizer.json may carry truncation and padding, which would drop text or add tokens.
  backend.no_truncation()
  backend.no_padding()
  backend.post_processor = None  # whose tokens are not wanted, and by which places would be those of trimmed words
  backend.encode_special_tokens = plain
  if getattr(backend.model, "dropout", None):  # BPE dropout would make the tokens random
    backend.model.dropout = None
  return backend


def add_tokens(backend: Backend, files: TokenizerFiles, where: str) -> None:
  """Adds what tokenizer.json lacks, behind its last id as transformers does, if each token gets the id it must have."""
  for token, wanted in files.added:
    if not token.content:
      raise DataError(f"{where}: tokenizer_config.json or special_tokens_map.json names a special token '', which has "
                      "no text. Give it one, or remove it there.")
    backend.add_tokens([token])
    given = backend.token_to_id(token.content)
    if wanted is not None and given != wanted:
      raise DataError(f"{where}: tokenizer_config.json or added_tokens.json gives {token.content!r} the id {wanted}, "
                      f"where tokenizer.json gives it {given}. Correct the file that is wrong.")


def splits_at_spaces(spec: dict) -> bool:
  """Whether a tokenizer.json encodes the parts of `tokenizer.split_text` as it would encode the whole.

  So it is with GPT-2's pre-tokenisation, unless a normalizer or an added token could reach over the cut.
  """
  pre = spec.get("pre_tokenizer") or {}
  gpt2 = pre.get("type") == "ByteLevel" and pre.get("use_regex", True) and not pre.get("add_prefix_space")
  reaching = [t for t in spec.get("added_tokens", ()) if " " in t["content"] or t.get("lstrip") or t.get("rstrip")]
  return gpt2 and not spec.get("normalizer") and not reaching


def check_vocabulary(vocabulary: dict[str, int], where: str) -> None:
  """Refuses a vocabulary in which two tokens have one id, or an id is so large that no embedding has room for it."""
  last, token = max(((number, token) for token, number in vocabulary.items()), default=(-1, ""))
  if not 0 <= last < MAX_VOCABULARY:
    raise DataError(f"{where}: the ids of its {len(vocabulary):,} tokens end at {last} ({token!r:.40}); allowed: 0 to "
                    f"{MAX_VOCABULARY - 1}. Correct the file.")
  if len(set(vocabulary.values())) < len(vocabulary):
    names: dict[int, str] = {}
    token, number = next((t, i) for t, i in sorted(vocabulary.items()) if names.setdefault(i, t) != t)
    raise DataError(f"{where}: {names[number]!r:.40} and {token!r:.40} both have the id {number}. Correct one of them.")


def read_text(path: Path) -> str:
  """A UTF-8 file's content; DataError names a file that is something else."""
  try:
    return path.read_text("utf-8")
  except (OSError, UnicodeDecodeError) as e:
    raise DataError(f"{path}: cannot be read as UTF-8 text ({e}). Fetch the file again.") from e


def read_json(path: Path) -> dict:
  """A JSON object, empty without the file; DataError names a file that holds something else."""
  return parse_json(read_text(path), path) if path.is_file() else {}


def parse_json(text: str, where: Path | str) -> dict:
  """The JSON object in a file's text; DataError names a file that holds something else."""
  try:
    entries = json.loads(text)
  except (ValueError, RecursionError) as e:
    raise DataError(f"{where}: not valid JSON ({e}). Fetch the file again.") from e
  if not isinstance(entries, dict):
    raise DataError(f"{where}: holds a {type(entries).__name__}; expected an object with keys. Fetch the file again.")
  return entries


def _named(folder: Path) -> tuple[dict, bool]:
  """(what names the special tokens, whether the older files do, too)."""
  named = read_json(folder / "tokenizer_config.json")
  legacy = "added_tokens_decoder" not in named
  return {**named, **(read_json(folder / "special_tokens_map.json") if legacy else {})}, legacy


def _special_tokens(named: dict, folder: Path) -> dict[str, str]:
  """The named special tokens, those of the model's own (`image_token`) included."""
  own = sorted(k for k, v in named.items()
               if k.endswith("_token") and k not in NAMED_TOKENS and isinstance(v, (str, dict)))
  extra = named.get("extra_special_tokens")
  named = {**named, **extra} if isinstance(extra, dict) else named
  keys = (*NAMED_TOKENS, *own, *(sorted(extra) if isinstance(extra, dict) else ()))
  return {k: _token(named[k], k, folder).content for k in keys if named.get(k) is not None}


def _token(entry, key: str, folder: Path) -> AddedToken:
  """Files give a token as a string or as an object with its content and properties."""
  if isinstance(entry, str):
    return AddedToken(entry, special=True)
  if isinstance(entry, dict) and isinstance(entry.get("content"), str):
    properties = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(entry["content"], **{k: bool(entry[k]) for k in properties if k in entry})
  raise DataError(f"{folder}: {key} is {entry!r}; expected a string, or an object with 'content', in "
                  "tokenizer_config.json or special_tokens_map.json.")


def _added(serialized: str, named: dict, special_tokens: dict, folder: Path, legacy: bool, file: Path):
  """Tokens to add to the vocabulary, each with its required id, in the order in which transformers adds them."""
  try:
    present = {t["content"]: t for t in json.loads(serialized).get("added_tokens") or ()}
  except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
    why = str(e) if isinstance(e, ValueError) else "it is no object with a model and added_tokens"
    raise DataError(f"{file}: not a readable tokenizer ({why}). Replace it, or delete it if Weft made it.") from e
  declared = {}
  for number, entry in _numbered(named.get("added_tokens_decoder"), f"{folder}: added_tokens_decoder").items():
    token = declared[number] = _token(entry, f"added_tokens_decoder[{number}]", folder)
    token.special = token.special or token.content in special_tokens.values()
  if legacy:
    old = {number: content for content, number in read_json(folder / "added_tokens.json").items()}
    for number, content in _numbered(old, str(folder / "added_tokens.json")).items():
      if content not in present:
        special = content in special_tokens.values()
        declared[number] = AddedToken(content, special=special, normalized=not special)
  added = []
  for number, token in sorted(declared.items()):
    there = present.get(token.content)
    if there is None or any(bool(there.get(k)) != getattr(token, k) for k in
                            ("special", "lstrip", "rstrip", "single_word", "normalized")):
      added.append((token, number))
  known = {*present, *(token.content for token in declared.values())}
  extra = named.get("extra_special_tokens") or named.get("additional_special_tokens") or ()
  if not isinstance(extra, (dict, list, tuple)):
    raise DataError(f"{folder}: additional_special_tokens is {extra!r:.80}; expected a list of tokens, in "
                    "tokenizer_config.json or special_tokens_map.json.")
  extra = [] if isinstance(extra, dict) else [_token(e, "additional_special_tokens", folder) for e in extra]
  for token in [*(AddedToken(t, special=True) for t in special_tokens.values()), *extra]:
    if token.content not in known:
      known.add(token.content)
      added.append((AddedToken(token.content, special=True, lstrip=token.lstrip, rstrip=token.rstrip,
                               single_word=token.single_word, normalized=token.normalized), None))
  return tuple(added)


def _numbered(entries: Any, where: str) -> dict[int, Any]:
  """Entries by their ids. Raises DataError if they are not."""
  if not isinstance(entries or {}, dict):
    raise DataError(f"{where} is a {type(entries).__name__}; expected an object of ids and tokens.")
  found = {}
  for number, entry in (entries or {}).items():
    if not re.fullmatch(r"\d{1,10}", str(number), re.ASCII):
      raise DataError(f"{where} has the id {number!r:.80}; expected a whole number from 0 on.")
    found[int(number)] = entry
  return found


def _ids(config: dict, key: str, where: Path) -> tuple[int, ...]:
  """A token id or a list of them, as a tuple."""
  found = config.get(key)
  ids = tuple(found) if isinstance(found, list) else () if found is None else (found,)
  if any(type(i) is not int or i < 0 for i in ids):
    raise DataError(f"{where}: {key} is {found!r}; expected a token id or a list of them.")
  return ids


def _from_gpt2(folder: Path, file: Path, key: str, named: dict, model: dict) -> str:
  """A tokenizer.json made of GPT-2's vocab.json and merges.txt."""
  kinds = {str(named.get("tokenizer_class", "")).removesuffix("Fast"), model.get("model_type")} - {"", None}
  pair = (folder / "vocab.json", folder / "merges.txt")
  how = ("Make one where `transformers` is installed: python -c \"from transformers import AutoTokenizer as T; "
         f"T.from_pretrained('{folder}').save_pretrained('{folder}')\"")
  if all(p.is_file() for p in pair):
    if not kinds <= {"GPT2Tokenizer", "gpt2"} or not kinds:
      raise ConfigError(
          f"{key}: {str(folder)!r} has vocab.json and merges.txt but no tokenizer.json, and its files say "
          f"{' and '.join(sorted(kinds)) or 'nothing about the kind of tokenizer'}; only GPT-2's splitting of text is "
          f"known without a tokenizer.json. {how}")
    try:
      backend = Backend(models.BPE.from_file(*map(str, pair), fuse_unk=False))
    except Exception as e:  # the tokenizers library raises plain Exception
      raise DataError(f"{pair[0]}, {pair[1]}: not a readable GPT-2 vocabulary ({e}). Fetch the files again.") from e
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(named.get("add_prefix_space", False)))
    backend.decoder = decoders.ByteLevel()
    return backend.to_str(pretty=True)
  other = [name for name in OTHER_FORMATS if (folder / name).is_file()]
  if other:
    raise ConfigError(f"{key}: {str(folder)!r} has {' and '.join(other)} but no tokenizer.json, the one format read "
                      f"here. {how} (for *.model also `pip install sentencepiece protobuf`)")
  raise ConfigError(f"{key}: {str(file)!r} does not exist. Name a tokenizer.json or the folder that holds one.")
