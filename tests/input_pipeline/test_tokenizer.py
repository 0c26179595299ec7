"""Lossless round trips, special strings in text, deterministic training, reuse, and refusals."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from input_pipeline import tokenizer as tok
from input_pipeline.files import DataError
from tests.conftest import ROOT
from trainer.config import ConfigError, defaults

CORPUS = [f"def f_{i}(x):\n    return x * {i}  # läuft {'the quick brown fox ' * (i % 5)}\n" for i in range(200)]
NASTY = [
    "", " ", "\n\n  \t\r\n", "plain ASCII", "don't  stop ", "naïve café ß ẞ", "日本語 한국어 ไทย", "🏳️‍🌈👩‍👩‍👧‍👦 🇩🇪",
    "e\u0301 vs \u00e9", "\u202eright to left\u202c", "שלום عليكم", "\x00\x01\x7f", "\ufeffBOM \ufeff", "\ufffd\uffff",
    "\U0010ffff\U0001f9ff", "\u00a0\u2003\u3000 spaces", "<|bos|>x<|eos|>", "Ġ Ċ ▁ </s> [PAD]", "a" * 5000, "𝔘𝔫𝔦 ﷽",
]


def config(**changed):
  cfg = defaults().tokenizer
  cfg.update(changed)
  return cfg


def make(folder, texts=CORPUS, **cfg):
  return tok.make_tokenizer(config(**cfg), lambda: iter(texts), folder / "tokenizer.json")


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request, tmp_path):
  return make(tmp_path, type=request.param, vocab_size=400)


@pytest.mark.parametrize("text", NASTY)
def test_any_text_survives_the_round_trip(tokenizer, text):
  (ids,) = tokenizer.encode_batch([text])
  assert ids.dtype == np.int32 and (0 <= ids).all() and (ids < tokenizer.vocab_size).all()
  assert tokenizer.decode(ids) == text
  assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids.tolist())


def test_specials_are_distinct_and_left_out_when_decoding(tokenizer):
  assert tokenizer.bos_id != tokenizer.eos_id and 0 <= tokenizer.pad_id < tokenizer.vocab_size
  ids = tokenizer.encode_batch(["é"])[0].tolist()
  assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id]) == "é"


def test_saved_and_loaded_it_encodes_alike(tokenizer, tmp_path):
  tokenizer.save(tmp_path / "saved" / "tokenizer.json")
  loaded = tok.load_tokenizer(tmp_path / "saved")
  for a, b in zip(tokenizer.encode_batch(NASTY), loaded.encode_batch(NASTY), strict=True):
    assert a.tolist() == b.tolist()
  assert (loaded.vocab_size, loaded.bos_id, loaded.eos_id) == (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id)


def test_long_documents_encoded_in_parts_are_encoded_whole(tmp_path, monkeypatch):
  tokenizer = make(tmp_path, type="bpe", vocab_size=500)
  texts = ["".join(CORPUS), " ".join(NASTY) * 3, "x" * 3000, "a  b   c\n d's  ll" * 99]
  whole = [ids.tolist() for ids in tokenizer.encode_batch(texts)]
  monkeypatch.setattr(tok, "PART_CHARS", 7)
  assert len(tok.split_text(texts[0], 7)) > 100 and "".join(tok.split_text(texts[1], 7)) == texts[1]
  assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == whole


def test_bpe_compresses_and_training_is_deterministic_across_processes(tmp_path):
  tokenizer = make(tmp_path, type="bpe", vocab_size=500)
  text = "".join(CORPUS)
  assert tokenizer.vocab_size == 500
  assert len(tokenizer.encode_batch([text])[0]) < len(text.encode()) / 3
  code = f"""
from pathlib import Path
from tests.input_pipeline.test_tokenizer import make
print(make(Path({str(tmp_path / "again")!r}), type="bpe", vocab_size=500).fingerprint)
"""
  again = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT, timeout=60)
  assert again.stdout.strip() == tokenizer.fingerprint


def test_bpe_is_reused_on_restart(tmp_path):
  first = make(tmp_path, type="bpe", vocab_size=300)
  again = make(tmp_path, type="bpe", vocab_size=300, texts=None)  # would fail if it read any text
  assert again.fingerprint == first.fingerprint
  with pytest.raises(ConfigError, match="was trained with 300 entries"):
    make(tmp_path, type="bpe", vocab_size=280)
  (tmp_path / "tokenizer.json").write_text("{half a fi")
  with pytest.raises(DataError, match=r"tokenizer.json: not a readable tokenizer"):
    make(tmp_path, type="bpe", vocab_size=300)


def test_a_small_corpus_says_the_size_reached(tmp_path, caplog):
  tokenizer = make(tmp_path, texts=["aaaa bb"], type="bpe", vocab_size=1000)
  assert 258 < tokenizer.vocab_size < 270
  assert f"the BPE has {tokenizer.vocab_size} entries, fewer than tokenizer.vocab_size=1000" in caplog.text


def test_training_text_is_spread_over_the_documents():
  # Long documents of one letter among short ones of another: both give a tenth of their bytes.
  texts = ["a " * 50 if i % 50 else "b " * 5000 for i in range(10_000)]
  total = sum(map(len, texts))
  sample = list(tok.spread_sample(texts, total, total // 10))
  for letter in "ab":
    assert "".join(sample).count(letter) == pytest.approx("".join(texts).count(letter) / 10, rel=0.1)
  numbered = [f"{i} " for i in range(100_000)]
  kept = np.array([int(t) for t in tok.spread_sample(numbered, sum(map(len, numbered)), 100_000)])
  assert kept[0] < 10_000 and kept[-1] > 80_000 and np.diff(kept).max() < 20_000
  assert list(tok.spread_sample(texts, total, total)) == texts


@pytest.mark.parametrize("cfg, said", [
    (dict(type="word"), "type='word'; allowed: 'bytes', 'bpe', 'hf'"),
    (dict(type="bpe", vocab_size=100), "vocab_size=100 is too small: 256 bytes, BOS and EOS make at least 258"),
    (dict(type="bpe", train_megabytes=0.0), "train_megabytes=0.0 must be positive"),
    (dict(type="hf"), "tokenizer.path is not set"),
    (dict(type="hf", path="/no/such"), "'/no/such' does not exist"),
])
def test_bad_config(tmp_path, cfg, said):
  with pytest.raises(ConfigError) as error:
    make(tmp_path, **cfg)
  assert said in str(error.value)


def write_hf(folder: Path, **config_file) -> Path:
  """A tokenizer.json with everything that could change text unasked: truncation, padding, a template, dropout."""
  folder.mkdir(exist_ok=True)
  chars = tok._byte_chars()
  vocabulary = {**{c: i for i, c in enumerate(chars)}, "he": 256}
  backend = Backend(models.BPE(vocab=vocabulary, merges=[("h", "e")], dropout=0.5))
  backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
  backend.add_special_tokens(["<s>", "</s>"])
  backend.enable_truncation(3)
  backend.enable_padding(length=50)
  from tokenizers.processors import TemplateProcessing
  backend.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 257), ("</s>", 258)])
  backend.save(str(folder / "tokenizer.json"))
  if config_file:
    (folder / "tokenizer_config.json").write_text(json.dumps(config_file))
  return folder


def test_hf_adds_nothing_and_drops_nothing(tmp_path):
  path = write_hf(tmp_path / "hf", bos_token={"content": "<s>"}, eos_token="</s>")
  hf = make(tmp_path / "run", type="hf", path=str(path))
  assert (hf.vocab_size, hf.bos_id, hf.eos_id) == (259, 257, 258)
  text = "hello he <s> </s> " * 20
  (ids,) = hf.encode_batch([text])
  assert hf.decode(ids) == text and set(ids.tolist()) < set(range(257)) and len(ids) > 50
  assert all((hf.encode_batch([text])[0] == ids).all() for _ in range(5))
  assert tok.load_tokenizer(tmp_path / "run").fingerprint == hf.fingerprint


def test_hf_without_its_config_has_no_specials_and_a_wrong_one_is_refused(tmp_path):
  hf = tok.load_tokenizer(write_hf(tmp_path / "hf") / "tokenizer.json")
  assert hf.bos_id is None and hf.eos_id is None and 0 <= hf.pad_id < hf.vocab_size
  with pytest.raises(DataError, match="'<x>' of tokenizer_config.json is not in tokenizer.json's vocabulary"):
    tok.load_tokenizer(write_hf(tmp_path / "hf", bos_token="<x>"))


def test_a_workdir_keeps_its_tokenizer(tmp_path):
  make(tmp_path, type="bytes")
  make(tmp_path, type="bytes")
  with pytest.raises(ConfigError, match="holds another tokenizer"):
    make(tmp_path, type="hf", path=str(write_hf(tmp_path / "hf")))


@pytest.mark.parametrize("change, exact", [
    (dict(), True),
    (dict(normalizer={"type": "NFC"}), False),
    (dict(pre_tokenizer={"type": "Whitespace"}), False),
    (dict(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}), False),
    (dict(added_tokens=[{"content": "two words"}]), False),
])
def test_only_gpt2_like_tokenizers_encode_in_parts(tmp_path, change, exact):
  spec = json.loads((write_hf(tmp_path / "hf") / "tokenizer.json").read_text())
  assert tok._splits_at_spaces({**spec, **change}) is exact
