"""Lossless round trips, special strings in text, deterministic training, reuse, refusals, and Hugging Face folders."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from input_pipeline.examples.prompts import Prompter
from input_pipeline.examples.registry import make_encoder
from input_pipeline.sources.readers import Record
from input_pipeline.tokenizer import hf_folder
from input_pipeline.tokenizer import hugging_face as tokenizer_hf
from input_pipeline.tokenizer import tokenizer as tok
from tests.tiny import ROOT
from trainer.config import defaults
from trainer.errors import ConfigError, DataError
from trainer.strategies import learns

TINY = Path(__file__).parents[1] / "references" / "tiny"
REFERENCES = json.loads((TINY.parent / "chat.json").read_text("utf-8"))
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
  monkeypatch.setattr(tokenizer_hf, "PART_CHARS", 7)
  assert len(tok.split_text(texts[0], 7)) > 100 and "".join(tok.split_text(texts[1], 7)) == texts[1]
  assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == whole


def test_bpe_compresses_and_training_is_deterministic_across_processes(tmp_path):
  tokenizer = make(tmp_path, type="bpe", vocab_size=500)
  text = "".join(CORPUS)
  assert tokenizer.vocab_size == 500
  assert len(tokenizer.encode_batch([text])[0]) < len(text.encode()) / 3
  code = f"""
from pathlib import Path
from tests.input_pipeline.tokenizer.test_tokenizer import make
print(make(Path({str(tmp_path / "again")!r}), type="bpe", vocab_size=500).fingerprint)
"""
  again = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT, timeout=60)
  assert again.stdout.strip() == tokenizer.fingerprint


def test_digits_can_be_tokens_of_their_own(tmp_path):
  texts = ["in 1984 and 1985 the years 1984, 1985 and 1986 were 1984 to 1986\n"] * 20
  whole, split = (make(tmp_path / str(digits), type="bpe", vocab_size=300, split_digits=digits, texts=texts)
                  for digits in (False, True))
  text = " 1984 the 1985?"
  tokens = [[tokenizer.decode([i]) for i in tokenizer.encode_batch([text])[0]] for tokenizer in (whole, split)]
  assert any(len(token.strip()) > 1 and token.strip().isdigit() for token in tokens[0])
  assert [token for token in tokens[1] if any(c.isdigit() for c in token)] == list("19841985")
  assert "".join(tokens[1]) == text and any(len(token) > 1 for token in tokens[1])
  again = tok.load_tokenizer(tmp_path / "True" / "tokenizer.json")
  assert again.encode_batch([text])[0].tolist() == split.encode_batch([text])[0].tolist()


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
    (dict(type="bpe", vocab_size=100), "vocab_size=100 is too small: 256 bytes, BOS and EOS make at least 258"),
    (dict(type="bpe", train_megabytes=0.0), "train_megabytes=0.0 must be positive"),
    (dict(type="hf"), "tokenizer.path is not set"),
    (dict(type="bytes", path="/a"), "tokenizer.path is '/a', and tokenizer.type='bytes' reads none"),
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


def test_hf_without_its_config_has_no_specials(tmp_path):
  hf = tok.load_tokenizer(write_hf(tmp_path / "hf") / "tokenizer.json")
  assert hf.bos_id is None and hf.eos_id is None and 0 <= hf.pad_id < hf.vocab_size


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
  assert hf_folder.splits_at_spaces({**spec, **change}) is exact


def test_a_folder_means_what_it_means_to_transformers():
  hf, expected = tok.load_tokenizer(TINY), REFERENCES["tokenizer"]
  found = dict(bos=hf.bos_id, eos=hf.eos_id, pad=hf.pad_id, size=hf.vocab_size)
  assert found == expected and hf.stop_ids == (hf.eos_id,) and "<pad>" in hf.special_tokens
  assert len(REFERENCES["texts"]) == 10
  for text in REFERENCES["texts"]:
    assert hf.encode_batch([text["text"]])[0].tolist() == text["plain"], text
    assert hf.encode_rendered(text["text"]).tolist() == text["ids"], text
    assert hf.decode(text["ids"]) == text["decoded"], text


def folder(path: Path, tokens=("<s>", "</s>", "<|end|>"), **files) -> Path:
  """A byte-level tokenizer with special tokens from id 256, and JSON files beside it."""
  path.mkdir(exist_ok=True)
  backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(tok._byte_chars())}, merges=[]))
  backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
  backend.add_special_tokens(list(tokens))
  backend.save(str(path / "tokenizer.json"))
  for name, content in files.items():
    (path / f"{name}.json").write_text(json.dumps(content))
  return path


@pytest.mark.parametrize("name, head", [
    ("spans/llama3", []), ("spans/qwen3", []), ("tiny", ["<|begin|>"]), ("two tokens", ["<|im_end|>", "<|begin|>"])])
def test_texts_begin_as_other_readers_of_the_folder_begin_them(name, head, tmp_path):
  """By the library's own `encode`; as with SmolLM 2 and GPT-2, the first has a BOS, but does not write it."""
  folder = ROOT / "tests" / "input_pipeline" / "references" / name
  if name == "two tokens":
    folder = shutil.copytree(folder.with_name("tiny"), tmp_path / "tiny")
    ids = [Backend.from_file(str(folder / "tokenizer.json")).token_to_id(token) for token in head]
    tok.write_ends(folder / "tokenizer.json", ids)
  tokenizer, backend = tok.load_tokenizer(folder), Backend.from_file(str(folder / "tokenizer.json"))
  written, plain = (backend.encode("Hi there", add_special_tokens=add).ids for add in (True, False))
  assert written[:len(written) - len(plain)] == [backend.token_to_id(token) for token in head]
  config = defaults()
  record = Record("a", "a", {"text": "Hi there"})
  config.strategy.name = "sft"
  for learned in ("texts", learns(config)):
    (encoded,) = make_encoder(config, tokenizer, learns=learned).encode([record])
    assert encoded.ids.tolist() == [*written, tokenizer.eos_id]
  assert Prompter(config, tokenizer).text("Hi there").ids.tolist() == written
  begun = [backend.token_to_id(token) for token in head] or [tokenizer.bos_id]
  if begun != [None]:  # something has to be there
    assert Prompter(config, tokenizer).text("").ids.tolist() == begun
  for add_bos, expected in ((True, (tokenizer.bos_id,) if tokenizer.bos_id is not None else ()), (False, ())):
    config.tokenizer.add_bos = add_bos
    assert tok.begins_with(config.tokenizer, tokenizer) == expected


@pytest.mark.parametrize("files, bos, eos, stops", [
    (dict(tokenizer_config=dict(eos_token="</s>")), None, 257, (257,)),
    (dict(special_tokens_map=dict(bos_token=dict(content="<s>"), eos_token="</s>")), 256, 257, (257,)),
    # special_tokens_map.json wins, unless tokenizer_config.json lists its added tokens.
    (dict(tokenizer_config=dict(eos_token="<s>"), special_tokens_map=dict(eos_token="</s>")), None, 257, (257,)),
    (dict(tokenizer_config=dict(eos_token="<s>", added_tokens_decoder={}), special_tokens_map=dict(eos_token="</s>")),
     None, 256, (256,)),
    (dict(tokenizer_config=dict(eos_token="</s>"), generation_config=dict(eos_token_id=[258, 256])), None, 257,
     (256, 257, 258)),
    (dict(tokenizer_config=dict(eos_token="</s>"), config=dict(eos_token_id=258)), None, 257, (257, 258)),
    # Ids stand in for names that no file gives, and not for those given as null.
    (dict(config=dict(bos_token_id=256, eos_token_id=257), generation_config=dict(eos_token_id=[258, 257])), 256, 258,
     (257, 258)),
    (dict(tokenizer_config=dict(bos_token=None), config=dict(bos_token_id=256, eos_token_id=257)), None, 257, (257,)),
])
def test_special_tokens_and_stop_ids(tmp_path, files, bos, eos, stops):
  hf = tok.load_tokenizer(folder(tmp_path / "hf", **files))
  assert (hf.bos_id, hf.eos_id, hf.stop_ids) == (bos, eos, stops)
  hf.save(tmp_path / "run" / "tokenizer.json")
  (tmp_path / "run" / "config.json").write_text('{"model": {}}')  # a workdir's own
  kept = tok.load_tokenizer(tmp_path / "run")
  assert (kept.bos_id, kept.eos_id, kept.stop_ids, kept.fingerprint) == (bos, eos, stops, hf.fingerprint)


def test_what_export_needs_is_kept_as_it_was(tmp_path):
  path = folder(tmp_path / "hf", tokenizer_config=dict(eos_token="</s>", model_max_length=7, chat_template="a"),
                special_tokens_map=dict(eos_token="</s>"), generation_config=dict(eos_token_id=[257, 258], top_k=3))
  (path / "chat_template.jinja").write_text("{{ 1 }}")
  (path / "additional_chat_templates").mkdir()
  (path / "additional_chat_templates" / "b.jinja").write_text("b")
  make(tmp_path / "run", type="hf", path=str(path))
  for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
               "additional_chat_templates/b.jinja"):
    assert (tmp_path / "run" / name).read_bytes() == (path / name).read_bytes()
  assert json.loads((tmp_path / "run" / "generation_config.json").read_text()) == dict(eos_token_id=[257, 258], top_k=3)
  make(tmp_path / "run", type="hf", path=str(path))


def test_added_tokens_get_their_ids_or_are_refused(tmp_path):
  def entry(content, **more):
    return dict(content=content, special=True, normalized=False, **more)

  path = folder(tmp_path, tokenizer_config=dict(
      eos_token="<|im_end|>", added_tokens_decoder={"256": entry("<s>"), "259": entry("<|im_end|>"),
                                                    "260": dict(content="<think>", special=False)}))
  hf = tok.load_tokenizer(path)
  assert (hf.eos_id, hf.vocab_size) == (259, 261)
  assert hf.encode_rendered("a<|im_end|><think>").tolist() == [97, 259, 260]
  assert hf.encode_batch(["a<|im_end|>"])[0].tolist() == list(b"a<|im_end|>")
  assert hf.decode([97, 259, 260]) == "a<think>"
  assert hf.fingerprint != tok.load_tokenizer(folder(tmp_path, tokenizer_config=dict(eos_token="</s>"))).fingerprint

  folder(tmp_path, tokenizer_config=dict(eos_token="[E]"), added_tokens={"[E]": 259, "<s>": 256})
  assert tok.load_tokenizer(tmp_path).eos_id == 259
  (tmp_path / "added_tokens.json").unlink()
  folder(tmp_path, tokenizer_config=dict(added_tokens_decoder={"999": entry("<x>")}))
  with pytest.raises(DataError, match="gives '<x>' the id 999, where tokenizer.json gives it 259"):
    tok.load_tokenizer(tmp_path)


@pytest.mark.parametrize("files, said", [
    (dict(tokenizer_config=dict(eos_token="</s>"), config=dict(eos_token_id=5000)),
     r"has \[5000\], which tokenizer.json lacks; its ids end at 258"),
    (dict(config=dict(bos_token_id=5000)), "bos_token_id of .* is 5000, which tokenizer.json lacks"),
    (dict(generation_config=dict(eos_token_id="x")), "eos_token_id is 'x'; expected a token id or a list"),
    (dict(tokenizer_config=dict(eos_token=3)), "eos_token is 3; expected a string"),
    (dict(tokenizer_config=[]), "tokenizer_config.json: holds a list; expected an object"),
])
def test_files_that_contradict_each_other_are_refused(tmp_path, files, said):
  with pytest.raises(DataError, match=said):
    tok.load_tokenizer(folder(tmp_path, **files))


def test_words_are_not_looked_up_as_special_tokens(tmp_path):
  """A model that looks strings up has special tokens in its vocabulary; a document's text must not become one."""
  backend = Backend(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), *((c, -5.0) for c in "</s>ab")], unk_id=0))
  backend.add_special_tokens(["<unk>", "</s>"])
  backend.save(str(tmp_path / "tokenizer.json"))
  (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
  hf = tok.load_tokenizer(tmp_path)
  assert hf.encode_batch(["a</s>b"])[0].tolist() == [6, 2, 3, 4, 5, 7]
  assert hf.encode_rendered("a</s>b").tolist() == [6, 1, 7]
  assert hf.encode_rendered("a</s>b</s>", inert=[1]).tolist() == [6, 2, 3, 4, 5, 7, 1]
  assert hf.decode([6, 1, 7]).replace(" ", "") == "ab"


def test_gpt2_files_make_the_tokenizer(tmp_path):
  reference = tok.load_tokenizer(write_hf(tmp_path / "hf"))
  spec = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())["model"]
  path = tmp_path / "gpt2"
  path.mkdir()
  (path / "vocab.json").write_text(json.dumps({**spec["vocab"], "<|endoftext|>": 257}))
  (path / "merges.txt").write_text("#version: 0.2\nh e\n")
  with pytest.raises(ConfigError, match="say nothing about the kind of tokenizer"):
    tok.load_tokenizer(path)
  (path / "config.json").write_text('{"model_type": "roberta"}')
  with pytest.raises(ConfigError, match="its files say roberta; only GPT-2's splitting"):
    tok.load_tokenizer(path)
  (path / "config.json").write_text('{"model_type": "gpt2"}')
  (path / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
  gpt2 = make(tmp_path / "run", type="hf", path=str(path))
  assert (gpt2.bos_id, gpt2.eos_id, gpt2.vocab_size) == (257, 257, 258)
  for text in CORPUS[:20] + NASTY:
    assert gpt2.encode_batch([text])[0].tolist() == reference.encode_batch([text])[0].tolist()
  assert gpt2.encode_rendered("he<|endoftext|>").tolist() == [256, 257]
  assert make(tmp_path / "run", type="hf", path=str(path)).fingerprint == gpt2.fingerprint


def test_a_sentencepiece_model_alone_says_how_to_convert_it(tmp_path):
  (tmp_path / "tokenizer.model").write_bytes(b"x")
  with pytest.raises(ConfigError, match=r"has tokenizer.model but no tokenizer.json.*save_pretrained"):
    tok.load_tokenizer(tmp_path)


def test_properties_of_added_tokens_are_kept(tmp_path):
  path = folder(tmp_path)
  backend = Backend.from_file(str(path / "tokenizer.json"))
  backend.add_special_tokens([AddedToken("<mid>", lstrip=True, rstrip=True)])
  backend.save(str(path / "tokenizer.json"))
  hf = tok.load_tokenizer(path)
  assert hf.encode_rendered("a <mid> b").tolist() == [97, 259, 98]
  # The same where a part of the text is inert, and so another copy of the vocabulary is used.
  assert hf.encode_rendered("<s>a <mid> b", inert=[0]).tolist() == [*b"<s>a", 259, 98]
