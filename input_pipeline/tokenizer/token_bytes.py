"""What each token of a vocabulary adds to a text, in bytes; several tokens may make up one character."""

import json
import re

from tokenizers import Tokenizer as Backend

# A byte as sentencepiece's vocabularies write it.
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_chars() -> list[str]:
  """The character that stands for each byte in byte-level vocabularies (GPT-2): itself where printable."""
  printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  others = iter(range(0x100, 0x200))
  return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def token_bytes(backend: Backend, serialized: str) -> tuple[bytes, ...]:
  """The bytes of each id within a text; a special token's are its name's, those of an id without a token none.

  Where a vocabulary is of bytes, they are what its decoder joins before it looks for characters; else what a token's
  text is behind another's, so that a word keeps the space that it begins with. `serialized`: the backend, as JSON.
  """
  kinds = _decoders(json.loads(serialized).get("decoder"))
  names = {i: token for token, i in backend.get_vocab(with_added_tokens=True).items()}
  size = max(names, default=-1) + 1
  if "ByteLevel" in kinds:
    byte_of = {c: b for b, c in enumerate(byte_chars())}
    return tuple(_of_chars(names.get(i, ""), byte_of) for i in range(size))
  singles = {i: bytes.fromhex(found[1]) for i, token in names.items()
             if "ByteFallback" in kinds and (found := _BYTE.fullmatch(token))}
  alone = backend.decode_batch([[i] for i in range(size)], skip_special_tokens=False)
  before = next((i for i, text in enumerate(alone) if text.isascii() and text.isalpha()), None)
  behind = alone if before is None else backend.decode_batch([[before, i] for i in range(size)],
                                                             skip_special_tokens=False)
  start = "" if before is None else alone[before]
  return tuple(b"" if i not in names else singles[i] if i in singles else
               (text.removeprefix(start) if text.startswith(start) else alone[i]).encode()
               for i, text in enumerate(behind))


def _decoders(spec: object) -> set[str]:
  """The types of all decoders in a specification."""
  if isinstance(spec, list):
    return set().union(*map(_decoders, spec))
  if isinstance(spec, dict):
    return {str(spec["type"])}.union(*map(_decoders, spec.values())) if "type" in spec else set()
  return set()


def _of_chars(token: str, byte_of: dict[str, int]) -> bytes:
  return bytes(byte_of[c] for c in token) if all(c in byte_of for c in token) else token.encode()
