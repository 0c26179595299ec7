"""Tokenizers: raw bytes, a byte-level BPE trained here, or a Hugging Face `tokenizer.json`.

Encoding never inserts special tokens and never recognises them in documents: one that contains the literal string of
a special token is encoded as ordinary text. BOS and EOS are added by id, in `cache.py`. Only in conversations that a
chat template has rendered (`template.py`) are special tokens recognised, and there only where the template wrote them.
"""

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from absl import logging
from ml_collections import ConfigDict
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm

from input_pipeline import once
from input_pipeline.tokenizer import new_tokens, special_tokens
from input_pipeline.tokenizer.hf_folder import TokenizerFiles, find_tokenizer
from input_pipeline.tokenizer.hugging_face import HFTokenizer, Placed, split_text, write_files
from input_pipeline.tokenizer.special_tokens import BOS, EOS
from input_pipeline.tokenizer.token_bytes import byte_chars as _byte_chars
from trainer import atomic
from trainer.errors import ConfigError, DataError

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
  # What each id adds to a text; see `token_bytes.token_bytes`.
  @property
  def token_bytes(self) -> tuple[bytes, ...]: ...

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

  def encode_placed(self, texts: list[tuple[str, tuple[int, ...]]]) -> list[Placed]:
    """`encode_rendered` of each (text, inert), with the places of the tokens."""
    ...

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
  token_bytes = (*(bytes([b]) for b in range(256)), BOS.encode(), EOS.encode())

  def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
    return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32) for text in texts]

  def encode_rendered(self, text: str, inert: Iterable[int] = ()) -> np.ndarray:
    ids = {BOS: self.bos_id, EOS: self.eos_id}
    pieces = special_tokens.split(text, ids, inert)
    return np.concatenate([np.zeros(0, np.int32), *(
        np.array([ids[p]], np.int32) if is_token else self.encode_batch([p])[0] for p, is_token in pieces)])

  def encode_rendered_batch(self, texts: list[str]) -> list[np.ndarray]:
    return [self.encode_rendered(text) for text in texts]

  def encode_placed(self, texts: list[tuple[str, tuple[int, ...]]]) -> list[Placed]:
    return [self._placed(text, inert) for text, inert in texts]

  def _placed(self, text: str, inert: tuple[int, ...]) -> Placed:
    sizes, ends, at = [], [], 0
    for piece, is_token in special_tokens.split(text, (BOS, EOS), inert):
      lengths = [len(piece)] if is_token else [1] * len(piece)  # characters that one place has
      sizes += [1] if is_token else [len(char.encode("utf-8")) for char in piece]
      ends += (at + np.cumsum(lengths, dtype=np.int64)).tolist()
      at += len(piece)
    starts, stops = np.array([0, *ends[:-1]][:len(ends)], np.int64), np.array(ends, np.int64)
    return Placed(self.encode_rendered(text, inert), np.repeat(starts, sizes), np.repeat(stops, sizes))

  def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
    special = dict.fromkeys((self.bos_id, self.eos_id), b"") if skip_special else {
        self.bos_id: BOS.encode(), self.eos_id: EOS.encode()}
    return b"".join(special.get(int(i)) or bytes([i] if i < 256 else []) for i in ids).decode("utf-8", errors="replace")

  def save(self, path: Path) -> None:
    backend = Backend(models.BPE(vocab={c: b for b, c in enumerate(_byte_chars())}, merges=[]))
    _byte_level(backend)
    backend.add_special_tokens([BOS, EOS])
    named = {"tokenizer_config.json": json.dumps({"bos_token": BOS, "eos_token": EOS}, indent=2)}
    write_files(backend.to_str(pretty=True), named, path)


def make_tokenizer(
    cfg: ConfigDict, train_texts: Callable[[], Iterator[str]], save_path: Path, progress: bool = False
) -> Tokenizer:
  """The tokenizer of `cfg` (the `tokenizer` section), also saved at `save_path` (a file, tokenizer.json).

  A BPE found at `save_path` is used as it is; training, which is deterministic, happens only without one.

  Args:
    cfg: the section; `path` is read only for hf, `vocab_size` and `train_megabytes` only for bpe.
    train_texts: gives the training documents from the start, each time it is called.

  Raises:
    ConfigError: an unknown type, a path that does not exist, an impossible size.
    DataError: an unreadable tokenizer file.
  """
  save_path = Path(save_path)
  new_tokens.wanted(cfg)
  if cfg.path and cfg.type in ("bytes", "bpe"):
    raise ConfigError(f"tokenizer.path is {cfg.path!r}, and tokenizer.type={cfg.type!r} reads none. Use "
                      "--config.tokenizer.type=hf, or leave the path out.")
  if cfg.type == "bytes":
    tokenizer: Tokenizer = BytesTokenizer()
  elif cfg.type == "hf":
    if not cfg.path:
      raise ConfigError("tokenizer.path is not set: type 'hf' needs a tokenizer.json or the folder that holds one.")
    tokenizer = load_extended(cfg)
  else:
    return _make_bpe(cfg.vocab_size, cfg.train_megabytes, cfg.split_digits, train_texts, save_path, progress)
  if save_path.exists():
    saved = load_tokenizer(save_path)
    if saved.fingerprint != saved_fingerprint(tokenizer):
      raise ConfigError(
          f"tokenizer.type={cfg.type!r}: {save_path} holds another tokenizer ({saved.vocab_size} entries) than the "
          f"config asks for ({tokenizer.vocab_size}). Use a new workdir, or the tokenizer this one was started with."
      )
  else:
    tokenizer.save(save_path)
  return tokenizer


def load_extended(cfg: ConfigDict) -> Tokenizer:
  """The tokenizer of the folder `cfg.path`, with the new tokens of the section; see `load_tokenizer`."""
  return load_tokenizer(Path(cfg.path).expanduser(), key="tokenizer.path", section=cfg)


def load_tokenizer(path: Path, key: str = "tokenizer", section: ConfigDict | None = None) -> Tokenizer:
  """The tokenizer in a tokenizer.json, or in the Hugging Face folder that holds it; see `hf_folder`.

  Raises:
    ConfigError: no such file.
    DataError: the file is not a tokenizer, or files beside it contradict it.
  """
  path = Path(path)
  where = path / "tokenizer.json" if path.is_dir() else path
  files = find_tokenizer(path, key)
  if section is not None:
    files, _ = new_tokens.extended(files, section, str(where))
  if not (files.special_tokens or files.files):
    once.warning("%s: no tokenizer_config.json beside it, so there is no BOS and no EOS.", where)
  try:
    return HFTokenizer(files, str(where))
  except DataError:
    raise
  except Exception as e:  # the tokenizers library raises plain Exception
    raise DataError(f"{where}: not a readable tokenizer ({e}). Replace it, or delete it if Weft made it.") from e


def begins_with(section: Any, tokenizer: Tokenizer) -> tuple[int, ...]:
  """Ids before each text: BOS or none as `section.add_bos` says, or what its folder has other readers write.

  `section`: `config.tokenizer`.
  """
  made_here = tokenizer.named_tokens.get("bos_token") == BOS
  if section.add_bos is None and isinstance(tokenizer, HFTokenizer) and not made_here:
    return tokenizer.ends[0]
  return () if section.add_bos is False or tokenizer.bos_id is None else (tokenizer.bos_id,)


def write_ends(path: Path, head: Sequence[int], tail: Sequence[int] = ()) -> None:
  """Makes a saved tokenizer.json write these ids before and after a text for other readers, as it is trained.

  What is read here is told where BOS and EOS stand (`tokenizer.add_bos`); transformers and vLLM ask the file.
  """
  backend = Backend.from_file(str(path))
  names = [[backend.id_to_token(i) for i in ids] for ids in (head, tail)]
  single, second = ([*names[0], text, *names[1]] for text in ("$A", "$B"))
  backend.post_processor = processors.TemplateProcessing(
      single=single, pair=[*single, *(f"{part}:1" for part in second)],
      special_tokens=[(backend.id_to_token(i), i) for i in dict.fromkeys((*head, *tail))])
  atomic.write(path, backend.to_str(pretty=True))


def saved_fingerprint(tokenizer: Tokenizer) -> str:
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


def _num_bytes(text: str) -> int:
  return len(text) if text.isascii() else len(text.encode("utf-8", errors="replace"))


def _byte_level(backend: Backend) -> None:
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
