"""Tokens that a run adds to a Hugging Face folder's: `tokenizer.new_tokens` and `tokenizer.new_special_tokens`."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken

from input_pipeline.tokenizer.hf_folder import TokenizerFiles, add_tokens, find_tokenizer, make_backend
from input_pipeline.tokenizer.hugging_face import HFTokenizer
from trainer.errors import ConfigError

KEYS = {"new_tokens": False, "new_special_tokens": True}  # whether they are special


@dataclasses.dataclass(frozen=True)
class NewRows:
  """What new entries of an embedding begin as.

  Args:
    old: entries that the tokenizer has without the new tokens, whose mean is the default.
    means: {id of a new token: ids of the tokens whose mean it begins as; () for all old ones}.
  """

  old: int
  means: dict[int, tuple[int, ...]]


def wanted(cfg: Any) -> dict[str, tuple[bool, str]]:
  """{text: (whether it is special, the words that it begins as, "" for none)} of the section `tokenizer`.

  Raises:
    ConfigError: an entry of another kind, or twice; or the tokenizer is not of a folder.
  """
  found: dict[str, tuple[bool, str]] = {}
  for key, special in KEYS.items():
    for entry in cfg[key]:
      text, words = entry if isinstance(entry, (tuple, list)) and len(entry) == 2 else (entry, "")
      if not (isinstance(text, str) and text and isinstance(words, str)):
        raise ConfigError(f"tokenizer.{key} has {entry!r:.80}; an entry is a text, or a pair of a text and the words "
                          'whose embeddings it begins as, e.g. ("<tool>", "a tool call").')
      if text in found:
        raise ConfigError(f"tokenizer.{key} has {text!r:.80} twice, or new_tokens and new_special_tokens both have it.")
      found[text] = special, words
  if found and cfg.type != "hf":
    raise ConfigError(f"tokenizer.new_tokens and new_special_tokens are for tokenizers of a Hugging Face folder "
                      f"(tokenizer.type=hf), and tokenizer.type is {cfg.type!r}.")
  return found


def extended(files: TokenizerFiles, cfg: Any, where: str) -> tuple[TokenizerFiles, tuple[str, ...]]:
  """(the files with the new tokens in tokenizer.json, those of them that it lacked).

  Raises:
    ConfigError: see `wanted`; a token that the folder has and that would become special, or no longer be it.
  """
  asked = wanted(cfg)
  if not asked:
    return files, ()
  backend = make_backend(files.serialized, plain=False)
  add_tokens(backend, files, where)
  present = backend.get_vocab(with_added_tokens=True)
  kinds = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
  for text, (special, _) in asked.items():
    if kinds.get(text, special) != special:
      raise ConfigError(f"{where} has {text!r} as {'a special' if kinds[text] else 'an ordinary'} token; name it in "
                        f"tokenizer.{'new_special_tokens' if kinds[text] else 'new_tokens'}, or not at all.")
  new = tuple(text for text in asked if text not in kinds)
  if taken := [text for text in new if text in present]:
    raise ConfigError(f"tokenizer.new_tokens has {taken[0]!r}, which is a token of {where} already.")
  # What makes ids of whole texts (truncation, a post-processor, …) stays as it was in the file.
  whole = type(backend).from_str(files.serialized)
  add_tokens(whole, files, where)
  whole.add_tokens([AddedToken(text, special=asked[text][0], normalized=False) for text in new])
  return dataclasses.replace(files, serialized=whole.to_str(), added=()), new


def rows(cfg: Any) -> NewRows | None:
  """What the new tokens' embeddings begin as; None: there are no new ones.

  Raises:
    ConfigError, DataError: see `extended`; words that make no token.
  """
  if not wanted(cfg):
    return None
  path = Path(cfg.path).expanduser()
  files = find_tokenizer(path, "tokenizer.path")
  old = HFTokenizer(files, str(path))
  more, texts = extended(files, cfg, str(path))
  vocabulary = make_backend(more.serialized, plain=True).get_vocab(with_added_tokens=True)
  means = {}
  for text in texts:
    words = wanted(cfg)[text][1]
    means[vocabulary[text]] = tuple(int(i) for i in np.unique(old.encode_batch([words])[0])) if words else ()
    if words and not means[vocabulary[text]]:
      raise ConfigError(f"tokenizer: {text!r} is to begin as {words!r}, which the tokenizer makes no token of.")
  return NewRows(old.vocab_size, means)
