"""Tokenizers: raw bytes, a byte-level BPE trained here, or a Hugging Face `tokenizer.json`.

Encoding never inserts special tokens and never recognises them in documents: one that contains the literal string of
a special token is encoded as ordinary text. BOS and EOS are added by id, in `cache.py`. Only in conversations that a
chat template has rendered (`chat.py`) are special tokens recognised, and there only where the template wrote them.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from absl import logging
from ml_collections import ConfigDict
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from input_pipeline import hf_folder, special_tokens
from input_pipeline.files import DataError
from input_pipeline.hf_folder import TokenizerFiles, add_tokens, find_tokenizer, make_backend
from trainer import whole_files
from trainer.config import ConfigError

BOS, EOS = "<|bos|>", "<|eos|>"
TYPES = ("bytes", "bpe", "hf")
# Longer documents are encoded in parts of about so many characters, to bound memory.
PART_CHARS = 1 << 18
# Training text is chosen in stripes of about so many bytes.
SAMPLE_STRIPE = 1 << 14


class Tokenizer(Protocol):
  """Text to ids and back. `pad_id` is any valid id: masks never look at ids."""

  vocab_size: int
  bos_id: int | None
  eos_id: int | None
  pad_id: int
  # Each of these ends a text that is being generated.
  stop_ids: tuple[int, ...]
  # What `encode_rendered` recognises, and those with a name (`bos_token`, …), as chat templates know them.
  special_tokens: tuple[str, ...]
  named_tokens: dict[str, str]
  # What else its folder said, {file name: content}.
  files: dict[str, str]
  # Equal for tokenizers that encode alike, on every machine.
  fingerprint: str

  def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
    """Ids (int32 [n]) of each text, without special tokens."""
    ...

  def encode_rendered(self, text: str, inert: Iterable[int] = ()) -> np.ndarray:
    """Ids (int32 [n]) of a chat template's output: special tokens in it are recognised, none is added.

    At the positions `inert` (of `chat.Rendered`) none begins: those characters came from the conversation.
    """
    ...

  def encode_rendered_batch(self, texts: list[str]) -> list[np.ndarray]:
    """`encode_rendered` of each text, faster; nothing is inert."""

  def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
    """Text of `ids`, without special tokens or with them written out; broken UTF-8 becomes U+FFFD."""
    ...

  def save(self, path: Path) -> None:
    """Writes `tokenizer.json` at `path` and beside it what else its folder said, each file atomically."""
    ...


class BytesTokenizer:
  """UTF-8 bytes are ids 0 to 255; BOS is 256, EOS 257."""

  vocab_size, bos_id, eos_id, pad_id = 258, 256, 257, 257
  stop_ids: tuple[int, ...] = (257,)
  special_tokens: tuple[str, ...] = (BOS, EOS)
  named_tokens, files = {"bos_token": BOS, "eos_token": EOS}, dict[str, Any]()
  fingerprint = "bytes-258"

  def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
    return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32) for text in texts]

  def encode_rendered(self, text: str, inert: Iterable[int] = ()) -> np.ndarray:
    ids = {BOS: self.bos_id, EOS: self.eos_id}
    pieces = special_tokens.split(text, ids, inert)
    return np.concatenate([np.zeros(0, np.int32), *(
        np.array([ids[p]], np.int32) if is_token else self.encode_batch([p])[0] for p, is_token in pieces)])

  def encode_rendered_batch(self, texts: list[str]) -> list[np.ndarray]:
    return [self.encode_rendered(text) for text in texts]

  def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
    special = dict.fromkeys((self.bos_id, self.eos_id), b"") if skip_special else {
        self.bos_id: BOS.encode(), self.eos_id: EOS.encode()}
    return b"".join(special.get(int(i)) or bytes([i] if i < 256 else []) for i in ids).decode("utf-8", errors="replace")

  def save(self, path: Path) -> None:
    backend = Backend(models.BPE(vocab={c: b for b, c in enumerate(_byte_chars())}, merges=[]))
    _byte_level(backend)
    backend.add_special_tokens([BOS, EOS])
    named = {"tokenizer_config.json": json.dumps({"bos_token": BOS, "eos_token": EOS}, indent=2)}
    _save(backend.to_str(pretty=True), named, path)


class HFTokenizer:
  """Any tokenizer of the `tokenizers` library.

  Args:
    files: what its folder says.
    where: names it in errors.

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
    pad = files.special_tokens.get("pad_token")
    self.pad_id = vocabulary[pad] if pad is not None else self.eos_id if self.eos_id is not None else 0
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
    parts = json.dumps([json.loads(files.serialized), *ends, *([more] if more else [])], sort_keys=True)
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
    inert = tuple(inert)
    if not inert:
      return np.array(self._try(self._recognizing.encode, text).ids, np.int32)
    special_tokens.refuse_noncharacters(text, "rendered conversation")
    pieces = special_tokens.split(text, self._added_tokens, inert)
    special = self._special
    marked = "".join(special_tokens.stand_in(special[p]) if is_token and p in special else p for p, is_token in pieces)
    return np.array(self._try(self._renamed.encode, marked).ids, np.int32)

  def encode_rendered_batch(self, texts: list[str]) -> list[np.ndarray]:
    return [np.array(e.ids, np.int32) for e in self._try(self._recognizing.encode_batch_fast, texts)]

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

  def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
    return self._decoder.decode([int(i) for i in ids], skip_special_tokens=skip_special)

  def save(self, path: Path) -> None:
    named = self._files.special_tokens
    # A token named here as absent would not be looked for in generation_config.json.
    absent = {k: None for k, i in (("bos_token", self.bos_id), ("eos_token", self.eos_id)) if i is None}
    files = {"tokenizer_config.json": json.dumps({**absent, **named}, indent=2), **self._files.files}
    _save(self._files.serialized, files, path)


def _id_of(key: str, files: TokenizerFiles, fallback: int | None, vocabulary: dict[str, int], where: str) -> int | None:
  """The id of a named special token, or the one that config.json gives."""
  if key in files.special_tokens:
    return vocabulary[files.special_tokens[key]]
  if fallback is not None and fallback not in vocabulary.values():
    raise DataError(f"{where}: {key}_id of generation_config.json or config.json is {fallback}, which tokenizer.json "
                    "lacks. Correct the file that is wrong.")
  return fallback


def make_tokenizer(
    cfg: ConfigDict, train_texts: Callable[[], Iterator[str]], save_path: Path, progress: bool = False
) -> Tokenizer:
  """The tokenizer of `cfg` (the `tokenizer` section), also saved at `save_path` (a file, tokenizer.json).

  A BPE found at `save_path` is used as it is; training, which is deterministic, happens only without one.

  Args:
    cfg: the section; `path` is read only for hf, `vocab_size` and `train_megabytes` only for bpe.
    train_texts: gives the training documents from the start, each time it is called.
    save_path: where the tokenizer is kept for restarts.
    progress: show a bar while training.

  Raises:
    ConfigError: an unknown type, a path that does not exist, an impossible size.
    DataError: an unreadable tokenizer file.
  """
  save_path = Path(save_path)
  if cfg.type == "bytes":
    tokenizer: Tokenizer = BytesTokenizer()
  elif cfg.type == "hf":
    if not cfg.path:
      raise ConfigError("tokenizer.path is not set: type 'hf' needs a tokenizer.json or the folder that holds one.")
    tokenizer = load_tokenizer(Path(cfg.path), key="tokenizer.path")
  elif cfg.type == "bpe":
    return _make_bpe(cfg.vocab_size, cfg.train_megabytes, cfg.split_digits, train_texts, save_path, progress)
  else:
    raise ConfigError(f"tokenizer.type={cfg.type!r}; allowed: {', '.join(map(repr, TYPES))}.")
  if save_path.exists():
    saved = load_tokenizer(save_path)
    if saved.fingerprint != _round_trip(tokenizer):
      raise ConfigError(
          f"tokenizer.type={cfg.type!r}: {save_path} holds another tokenizer ({saved.vocab_size} entries) than the "
          f"config asks for ({tokenizer.vocab_size}). Use a new workdir, or the tokenizer this one was started with."
      )
  else:
    tokenizer.save(save_path)
  return tokenizer


def load_tokenizer(path: Path, key: str = "tokenizer") -> Tokenizer:
  """The tokenizer in a tokenizer.json, or in the Hugging Face folder that holds it; see `hf_folder`.

  Raises:
    ConfigError: no such file.
    DataError: the file is not a tokenizer, or files beside it contradict it.
  """
  path = Path(path)
  where = path / "tokenizer.json" if path.is_dir() else path
  files = find_tokenizer(path, key)
  if not (files.special_tokens or files.files):
    logging.warning("%s: no tokenizer_config.json beside it, so there is no BOS and no EOS.", where)
  try:
    return HFTokenizer(files, str(where))
  except DataError:
    raise
  except Exception as e:  # the tokenizers library raises plain Exception
    raise DataError(f"{where}: not a readable tokenizer ({e}). Replace it, or delete it if Weft made it.") from e


def _round_trip(tokenizer: Tokenizer) -> str:
  """The fingerprint that `tokenizer` has once saved and loaded."""
  if isinstance(tokenizer, HFTokenizer):
    return tokenizer.fingerprint
  with tempfile.TemporaryDirectory() as folder:
    tokenizer.save(Path(folder) / "tokenizer.json")
    return load_tokenizer(Path(folder)).fingerprint


def _make_bpe(vocab_size, megabytes, split_digits, train_texts, save_path: Path, progress: bool) -> Tokenizer:
  """Trains a byte-level BPE, or reuses the one at `save_path`."""
  smallest = 256 + 2
  if vocab_size < smallest:
    raise ConfigError(f"tokenizer.vocab_size={vocab_size} is too small: 256 bytes, BOS and EOS make at least "
                      f"{smallest}.")
  if megabytes <= 0:
    raise ConfigError(f"tokenizer.train_megabytes={megabytes} must be positive.")
  if not save_path.exists():
    _train_bpe(vocab_size, megabytes, split_digits, train_texts, progress).save(save_path)
  tokenizer = load_tokenizer(save_path)
  if tokenizer.vocab_size > vocab_size:
    raise ConfigError(
        f"tokenizer.vocab_size={vocab_size}, but {save_path} was trained with {tokenizer.vocab_size} entries. "
        f"Set tokenizer.vocab_size={tokenizer.vocab_size}, or use a new workdir."
    )
  if tokenizer.vocab_size < vocab_size:
    logging.warning(
        "the BPE has %d entries, fewer than tokenizer.vocab_size=%d: its training text has no more pairs to merge.",
        tokenizer.vocab_size, vocab_size,
    )
  return tokenizer


def _train_bpe(vocab_size: int, megabytes: float, split_digits: bool, train_texts, progress: bool) -> HFTokenizer:
  """A byte-level BPE (GPT-2's pre-tokenisation), lossless for any text."""
  backend = Backend(models.BPE())
  _byte_level(backend)
  if split_digits:
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                     backend.pre_tokenizer])
  trainer = trainers.BpeTrainer(
      vocab_size=vocab_size, special_tokens=[BOS, EOS], show_progress=False,
      initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
  )
  budget = round(megabytes * 1e6)
  total = sum(_num_bytes(text) for text in train_texts())
  with tqdm(total=min(budget, total), desc="training the tokenizer", unit="B", unit_scale=True,
            disable=None if progress else True) as bar:

    def fed() -> Iterator[str]:
      for text in spread_sample(train_texts(), total, budget):
        bar.update(_num_bytes(text))
        yield text

    backend.train_from_iterator(fed(), trainer)
  return HFTokenizer(TokenizerFiles(backend.to_str(pretty=True), {"bos_token": BOS, "eos_token": EOS}))


def spread_sample(texts: Iterable[str], total: int, budget: int) -> Iterator[str]:
  """About `budget` of the `total` UTF-8 bytes of `texts`: evenly spaced stripes of them, laid end to end.

  Stripes go by position alone, so that each byte has the same chance in short and in long documents.
  """
  if total <= budget:
    yield from texts
    return
  seen, period = 0, SAMPLE_STRIPE * total / budget
  for text in texts:
    for piece in split_text(text, SAMPLE_STRIPE // 16):
      if seen % period < SAMPLE_STRIPE:
        yield piece
      seen += _num_bytes(piece)


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


def _num_bytes(text: str) -> int:
  return len(text) if text.isascii() else len(text.encode("utf-8", errors="replace"))


def _byte_level(backend: Backend) -> None:
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()


def _byte_chars() -> list[str]:
  """The character that stands for each byte in byte-level vocabularies (GPT-2): itself where printable."""
  printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  others = iter(range(0x100, 0x200))
  return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def _save(serialized: str, files: dict[str, str], path: Path) -> None:
  """Writes all files; tokenizer.json last, since its presence says that the tokenizer is complete."""
  for file, content in (*((path.parent / name, content) for name, content in files.items()), (path, serialized)):
    file.parent.mkdir(parents=True, exist_ok=True)
    whole_files.write(file, content)
