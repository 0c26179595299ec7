"""Makes the tokenizers and stops.json here, where transformers and torch are installed: python make_stop_references.py

A tokenizer of each kind: bytes as letters (GPT-2), sentencepiece's with bytes for rare characters (Llama 2), and words
that begin with ▁ (T5). For each, rows of random ids, of which transformers' StopStringCriteria says after how many the
first stop string is complete (0: never).
"""

import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, StopStringCriteria

HERE = Path(__file__).parent
STOPS = (["ab"], ["a"], [" b", "ba"], ["\n\n"], ["é"], ["a😀"], ["</s>"], ["abba", "bb", "é b"], ["b\n", "aé", "</s>a"],
         ["bab"], ["\u00e9\u00e9", "😀"])
PIECES = ["ab", "ba", "abb", " a", " b", " ab", "\n\n", "a\n", "é", "éa", "é ", "bé"]


def bytes_as_letters():
  printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  others = iter(range(0x100, 0x200))
  letter = [chr(b) if b in printable else chr(next(others)) for b in range(256)]
  used = sorted(set("".join([*PIECES, "a😀bcdef \n"]).encode()))
  names = [letter[b] for b in used] + ["".join(letter[b] for b in piece.encode()) for piece in PIECES]
  names += ["".join(letter[b] for b in part) for part in ("😀".encode()[:2], "😀".encode()[2:], b"a\xc3", b"\xa9b")]
  t = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(dict.fromkeys(names))}, merges=[]))
  t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
  return t


def with_bytes():
  names = [f"<0x{b:02X}>" for b in sorted(set("é😀\n".encode()))] + [*"abcdef▁"] + [
      piece.replace(" ", "▁") for piece in PIECES if "\n" not in piece]
  vocabulary = {name: i for i, name in enumerate(dict.fromkeys(names))}
  t = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
  t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                 decoders.Strip(" ", 1, 0)])
  return t


def words():
  names = dict.fromkeys([*"abcdef▁\n😀", *(piece.replace(" ", "▁") for piece in PIECES)])
  t = Tokenizer(models.Unigram([(name, -1.0) for name in names], 0))
  t.pre_tokenizer, t.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
  return t


def main():
  rng, found = np.random.default_rng(0), {}
  for make in (bytes_as_letters, with_bytes, words):
    t = make()
    t.add_special_tokens(["</s>"])
    (HERE / make.__name__).mkdir(exist_ok=True)
    t.save(str(HERE / make.__name__ / "tokenizer.json"))
    (HERE / make.__name__ / "tokenizer_config.json").write_text('{"eos_token": "</s>"}\n')
    wrapped = PreTrainedTokenizerFast(tokenizer_object=t, eos_token="</s>")
    rows = []
    for stops in STOPS:
      criteria = StopStringCriteria(wrapped, stops)
      for ids in rng.integers(0, t.get_vocab_size(), (12, 24)).tolist():
        ends = (n for n in range(1, len(ids) + 1) if bool(criteria(torch.tensor([ids[:n]]), None)[0]))
        rows.append([stops, ids, next(ends, 0)])
    found[make.__name__] = rows
  lines = ",\n".join(f'"{name}": [\n' + ",\n".join(map(json.dumps, rows)) + "]" for name, rows in found.items())
  (HERE / "stops.json").write_text("{" + lines + "}\n")


if __name__ == "__main__":
  main()
