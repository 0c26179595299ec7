"""Any tokenizer of the `tokenizers` library: what a Hugging Face folder says, as ids."""

import hashlib
import json
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from input_pipeline import once
from input_pipeline.tokenizer import hf_folder, special_tokens
from input_pipeline.tokenizer.hf_folder import TokenizerFiles, add_tokens, make_backend
from input_pipeline.tokenizer.token_bytes import token_bytes
from trainer import atomic
from trainer.errors import DataError

# Longer documents are encoded in parts of about so many characters, to bound memory.
PART_CHARS = 1 << 18


class Placed(NamedTuple):
  """Ids (int32 [n]) with the characters of the text that each stands for, from `starts` to before `ends` (int64 [n]).

  Tokens of one character's bytes all have its place; a space that the tokenizer puts before a text has that of the
  first character. Of a special token it is the token's own, without spaces around it that it takes along.
  """

  ids: np.ndarray
  starts: np.ndarray
  ends: np.ndarray


class HFTokenizer:
  """Any tokenizer of the `tokenizers` library.

  Raises:
    DataError: files that contradict each other.
  """

  def __init__(self, files: TokenizerFiles, where: str = "tokenizer"):
    self._files, self._where = files, where
    self._backend = make_backend(files.serialized, plain=True)
    before = self._backend.get_vocab(with_added_tokens=True)
    add_tokens(self._backend, files, where)
    # Only a changed vocabulary needs to be written out again, which takes long for a large one.
    self._serialized = self._backend.to_str() if files.added else files.serialized
    vocabulary = self._backend.get_vocab(with_added_tokens=True) if files.added else before
    self.vocab_size = max(vocabulary.values(), default=-1) + 1
    hf_folder.check_vocabulary(vocabulary, where)
    spec = json.loads(self._serialized)
    self._added_tokens = tuple(t["content"] for t in spec.get("added_tokens") or ())
    self._special = {t["content"]: vocabulary[t["content"]] for t in spec.get("added_tokens") or () if t["special"]}
    self.special_tokens = tuple(self._special)
    self._splits_at_spaces = hf_folder.splits_at_spaces(spec)
    self._decoder = self._backend
    looked_up = special_tokens.in_model_vocabulary(spec)
    if looked_up:
      self._backend = make_backend(special_tokens.renamed(self._serialized), plain=True)
    self.bos_id = _id_of("bos_token", files, files.bos_id, vocabulary, where)
    self.eos_id = _id_of("eos_token", files, files.eos_id, vocabulary, where)
    appended = {token.content: vocabulary[token.content] for token, wanted in files.added
                if wanted is None and token.content not in before}
    # One that is appended may have no row in the model's embedding.
    pads = [vocabulary.get(files.special_tokens.get("pad_token", "")), self.eos_id]
    self.pad_id = next((i for i in pads if i is not None and i not in appended.values()), 0)
    if appended:
      once.warning("%s: lacks special tokens that tokenizer_config.json names; they are appended, as transformers "
                   "does: %s.", where, ", ".join(f"{token} is {i}" for token, i in appended.items()))
    known = set(vocabulary.values())
    self.stop_ids = tuple(sorted({*files.stop_ids, *([] if self.eos_id is None else [self.eos_id])}))
    if unknown := [i for i in self.stop_ids if i not in known]:
      raise DataError(f"{where}: eos_token_id of generation_config.json or config.json has {unknown}, which "
                      f"tokenizer.json lacks; its ids end at {self.vocab_size - 1}. Correct the file that is wrong.")
    name = {i: token for token, i in vocabulary.items()}
    ends = [None if i is None else name[i] for i in (self.bos_id, self.eos_id)]
    numbered = {k: v for k, v in zip(("bos_token", "eos_token"), ends, strict=True) if v is not None}
    self.named_tokens, self.files = {**files.special_tokens, **numbered}, files.files
    more = [[str(token.content), i] for token, i in files.added] + ["looked up"] * looked_up
    named = json.loads(files.serialized)
    if special_tokens.BOS in ((named.get("post_processor") or {}).get("special_tokens") or ()):
      named["post_processor"] = None  # an exported run's (`tokenizer.write_ends`), which gives the same tokens here
    parts = json.dumps([named, *ends, *([more] if more else [])], sort_keys=True)
    self.fingerprint = "hf-" + hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()

  def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
    if not self._splits_at_spaces:
      return self._encode(texts)
    parts = [split_text(text, PART_CHARS) for text in texts]
    ids = iter(self._encode([part for of_text in parts for part in of_text]))
    return [np.concatenate([next(ids) for _ in of_text]) for of_text in parts]

  def _encode(self, texts: list[str]) -> list[np.ndarray]:
    ids, start = [], 0
    while start < len(texts):  # an Encoding takes many times its text's memory
      stop, size = start, 0
      while stop < len(texts) and (stop == start or size + len(texts[stop]) <= 16 * PART_CHARS):
        size += len(texts[stop])
        stop += 1
      encodings = self._try(self._backend.encode_batch_fast, texts[start:stop])
      ids += [np.array(e.ids, np.int32) for e in encodings]
      start = stop
    return ids

  def encode_rendered(self, text: str, inert: Iterable[int] = ()) -> np.ndarray:
    return self.encode_placed([(text, tuple(inert))])[0].ids

  def encode_rendered_batch(self, texts: list[str]) -> list[np.ndarray]:
    return [np.array(e.ids, np.int32) for e in self._try(self._recognizing.encode_batch_fast, texts)]

  def encode_placed(self, texts: list[tuple[str, tuple[int, ...]]]) -> list[Placed]:
    plain = iter(self._try(self._recognizing.encode_batch, [text for text, inert in texts if not inert]))
    return [self._with_inert(text, inert) if inert else self._placed(next(plain), text) for text, inert in texts]

  def _with_inert(self, text: str, inert: tuple[int, ...]) -> Placed:
    """Special tokens have other names then, so that those of `text` at which none begins are no tokens."""
    special_tokens.refuse_noncharacters(text, "rendered conversation")
    pieces = [(piece, self._special.get(piece) if is_token else None)
              for piece, is_token in special_tokens.split(text, self._added_tokens, inert)]
    marked = [piece if number is None else special_tokens.stand_in(number) for piece, number in pieces]
    found = self._placed(self._try(self._renamed.encode, "".join(marked)), "".join(marked))
    begins, ends = (np.cumsum([0, *map(len, some)]) for some in (marked, [piece for piece, _ in pieces]))
    named = np.array([number is not None for _, number in pieces])

    def back(places: np.ndarray, last: int) -> np.ndarray:
      """Places in `text`, of characters or (last=1) of what follows them."""
      piece = np.searchsorted(begins, places - last, "right") - 1
      return np.where(named[piece], ends[piece + last], ends[piece] + places - begins[piece])

    return Placed(found.ids, back(found.starts, 0), back(found.ends, 1))

  def _placed(self, encoding: Encoding, text: str) -> Placed:
    ids, places = np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2)
    starts, ends = places[:, 0], places[:, 1]
    for i in np.flatnonzero(np.isin(ids, list(self._special.values()))):
      token = text[starts[i]:ends[i]]  # some take spaces along
      starts[i] += len(token) - len(token.lstrip())
      ends[i] = max(starts[i] + 1, ends[i] - (len(token) - len(token.rstrip())))
    return Placed(ids, starts, np.maximum(ends, starts + 1))

  def _try(self, encode: Callable, texts: str | list[str]) -> Any:
    """Raises DataError where the tokenizer cannot encode a text, for want of an unknown token, say."""
    try:
      return encode(texts, add_special_tokens=False)
    except Exception as e:  # the tokenizers library raises plain Exception
      raise DataError(f"{self._where}: a text cannot be encoded: {e}. Correct the tokenizer's files.") from e

  @cached_property
  def _recognizing(self) -> Backend:
    return make_backend(self._serialized, plain=False)

  @cached_property
  def _renamed(self) -> Backend:
    return make_backend(special_tokens.renamed(self._serialized), plain=False)

  @cached_property
  def ends(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that transformers 5 writes before and after a text: by the post-processor, whatever `add_bos_token` says."""
    backend = Backend.from_str(self._files.serialized)  # not the one with further tokens, which has no post-processor
    backend.no_padding()
    whole = backend.encode("a")
    added = np.array(whole.special_tokens_mask, bool)
    first = int(np.argmin(added)) if len(added) else 0
    last = len(added) - int(np.argmin(added[::-1])) if len(added) else 0
    return tuple(whole.ids[:first]), tuple(whole.ids[last:])

  @cached_property
  def token_bytes(self) -> tuple[bytes, ...]:
    return token_bytes(self._decoder, self._serialized)

  def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
    return self._decoder.decode([int(i) for i in ids], skip_special_tokens=skip_special)

  def save(self, path: Path) -> None:
    named = self._files.special_tokens
    # A token named here as absent would not be looked for in generation_config.json.
    absent = {k: None for k, i in (("bos_token", self.bos_id), ("eos_token", self.eos_id)) if i is None}
    files = {"tokenizer_config.json": json.dumps({**absent, **named}, indent=2), **self._files.files}
    write_files(self._files.serialized, files, path)


def _id_of(key: str, files: TokenizerFiles, fallback: int | None, vocabulary: dict[str, int], where: str) -> int | None:
  """The id of a named special token, or the one that config.json gives."""
  if key in files.special_tokens:
    return vocabulary[files.special_tokens[key]]
  if fallback is not None and fallback not in vocabulary.values():
    raise DataError(f"{where}: {key}_id of generation_config.json or config.json is {fallback}, which tokenizer.json "
                    "lacks. Correct the file that is wrong.")
  return fallback


def split_text(text: str, size: int) -> list[str]:
  """Parts of `text` of about `size` characters, each cut between an ASCII letter and a following space.

  GPT-2's pre-tokenisation has a boundary at every such place, whatever stands around it, so encoding the
  parts is encoding the text. Without such a place a part is as long as it has to be.
  """
  parts, start = [], 0
  while len(text) - start > size:
    cut = text.find(" ", start + size)
    while cut > 0 and not (text[cut - 1].isascii() and text[cut - 1].isalpha()):
      cut = text.find(" ", cut + 1)
    if cut < 0:
      break
    parts.append(text[start:cut])
    start = cut
  return [*parts, text[start:]]


def write_files(serialized: str, files: dict[str, str], path: Path) -> None:
  """Writes all files; tokenizer.json last, since its presence says that the tokenizer is complete."""
  for file, content in (*((path.parent / name, content) for name, content in files.items()), (path, serialized)):
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(file, content)
