"""Special tokens that are recognised in some places of a text and are ordinary text in others.

In a rendered conversation the template's `<|im_end|>` is a token, and the same ten characters inside a user's message
are not. Noncharacters of Unicode (U+FDD0 to U+FDEF), which no text contains, keep the two apart.
"""

import functools
import json
import re
from collections.abc import Iterable, Iterator

from trainer.errors import DataError

# Of the tokenizers that are made here: bytes and bpe.
BOS, EOS = "<|bos|>", "<|eos|>"
NONCHARACTERS = range(0xFDD0, 0xFDF0)
# Stands in for the first character of a special token's literal that is ordinary text.
INERT = chr(NONCHARACTERS[1])


def stand_in(token_id: int) -> str:
  """The string that stands for a special token in the vocabulary of `renamed`."""
  return f"{chr(NONCHARACTERS[0])}{token_id}{chr(NONCHARACTERS[0])}"


@functools.lru_cache(maxsize=16)
def pattern(tokens: tuple[str, ...], overlapping: bool = False) -> re.Pattern | None:
  """Finds `tokens`, of overlapping ones the first, then the longest; or only where each begins. None: no tokens.

  What tokens have in common is looked at once, since vocabularies have hundreds that begin alike.
  """
  tree: dict = {}
  for token in filter(None, tokens):
    node = tree
    for char in token:
      node = node.setdefault(char, {})
    node[""] = {}  # a token ends here
  if not tree:
    return None

  def write(node: dict) -> str:
    prefix = ""
    while len(node) == 1 and "" not in node:
      ((char, node),) = node.items()
      prefix += re.escape(char)
    more = "|".join(re.escape(char) + write(rest) for char, rest in node.items() if char)
    return prefix + (f"(?:{more}){'?' if '' in node else ''}" if more else "")

  return re.compile(f"(?={write(tree)})" if overlapping else write(tree))


def split(text: str, tokens: Iterable[str], inert: Iterable[int]) -> Iterator[tuple[str, bool]]:
  """Pieces of `text`, each with whether it is one of `tokens`; of overlapping ones the first, then the longest.

  Args:
    inert: positions in `text` at which no token begins.
  """
  found = pattern(tuple(tokens))
  if found is None:
    yield text, False
    return
  chars = list(text)
  for at in inert:
    chars[at] = INERT
  end = 0
  for match in found.finditer("".join(chars)):
    if end < match.start():
      yield text[end : match.start()], False
    yield match.group(), True
    end = match.end()
  if end < len(text):
    yield text[end:], False


def refuse_noncharacters(text: str, where: str) -> None:
  """Raises DataError if `text` has the characters that mark places here."""
  for char in map(chr, NONCHARACTERS):
    if char in text:
      raise DataError(f"{where}: has U+{ord(char):04X}, a code point that Unicode keeps out of texts. Remove it.")


def in_model_vocabulary(spec: dict) -> bool:
  """Whether a tokenizer.json's model could make a special token out of the ordinary text that spells it.

  BPE builds tokens by merges, none of which ends in a special token; the other models look strings up.
  """
  model = spec["model"]
  if model.get("type", "BPE") == "BPE" and not model.get("ignore_merges"):
    return False
  vocabulary = {entry[0] for entry in model["vocab"]} if isinstance(model["vocab"], list) else set(model["vocab"])
  return any(t["special"] and t["content"] in vocabulary for t in spec.get("added_tokens") or ())


def renamed(serialized: str) -> str:
  """A tokenizer.json in which each special token, with its id, answers to its `stand_in` alone."""
  spec = json.loads(serialized)
  names = {}
  for token in spec.get("added_tokens") or ():
    if token["special"]:
      content, token["content"], token["normalized"] = token["content"], stand_in(token["id"]), False
      names[content] = token["content"]
  model = spec["model"]
  if isinstance(model["vocab"], list):
    model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
  else:
    model["vocab"] = {names.get(piece, piece): i for piece, i in model["vocab"].items()}
  if model.get("unk_token") in names:
    model["unk_token"] = names[model["unk_token"]]
  return json.dumps(spec)
