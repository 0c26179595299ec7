"""Tokens that a run adds to a folder's: against the tokenizers library, which adds them to the same file."""

import numpy as np
import pytest
from ml_collections import ConfigDict
from tokenizers import AddedToken, Tokenizer

from input_pipeline.tokenizer import new_tokens
from input_pipeline.tokenizer.tokenizer import BytesTokenizer, load_extended, load_tokenizer, make_tokenizer
from trainer.config import defaults
from trainer.errors import ConfigError

TEXT = "an <a> and <|x|> here"


@pytest.fixture
def folder(tmp_path):
  BytesTokenizer().save(tmp_path / "folder" / "tokenizer.json")
  return tmp_path / "folder"


def section(folder, **changed) -> ConfigDict:
  cfg = defaults().tokenizer
  cfg.update(type="hf", path=str(folder), **changed)
  return cfg


def test_ids_are_those_of_the_library(folder, tmp_path):
  cfg = section(folder, new_tokens=("<a>", ("<bb>", "two")), new_special_tokens=("<|x|>",))
  ours = load_extended(cfg)
  theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
  theirs.add_tokens([AddedToken("<a>", normalized=False), AddedToken("<bb>", normalized=False)])
  theirs.add_special_tokens(["<|x|>"])
  assert ours.vocab_size == theirs.get_vocab_size() == 261
  np.testing.assert_array_equal(ours.encode_rendered(TEXT), theirs.encode(TEXT, add_special_tokens=False).ids)
  # In a document an ordinary token is found, and a special one is text.
  ids = ours.encode_batch([TEXT])[0]
  assert 258 in ids and 260 not in ids and ours.decode(ids) == TEXT
  assert ours.fingerprint != load_tokenizer(folder).fingerprint
  # What a run keeps is the same tokenizer, and one that others load.
  saved = make_tokenizer(cfg, lambda: iter(()), tmp_path / "run" / "tokenizer.json")
  again = load_tokenizer(tmp_path / "run")
  assert saved.fingerprint == again.fingerprint == ours.fingerprint and "<|x|>" in again.special_tokens
  loaded = Tokenizer.from_file(str(tmp_path / "run" / "tokenizer.json"))
  assert loaded.encode(TEXT, add_special_tokens=False).ids == list(ours.encode_rendered(TEXT))


def test_rows_begin_as_the_words_they_are_said_to_be(folder):
  rows = new_tokens.rows(section(folder, new_tokens=(("<a>", "aba"), "<bb>", "<|eos|>"[:3])))
  assert rows == new_tokens.NewRows(258, {258: (ord("a"), ord("b")), 259: (), 260: ()})
  assert new_tokens.rows(section(folder)) is None


def test_a_token_that_is_there_stays(folder):
  cfg = section(folder, new_special_tokens=("<|eos|>", "<|x|>"))
  assert load_extended(cfg).vocab_size == 259
  assert new_tokens.rows(cfg) == new_tokens.NewRows(258, {258: ()})


@pytest.mark.parametrize("changed, told", [
    (dict(new_tokens=(3,)), "tokenizer.new_tokens has 3; an entry is a text"),
    (dict(new_tokens=("",)), "has ''; an entry"),
    (dict(new_tokens=("<a>", "<a>")), "has '<a>' twice"),
    (dict(new_tokens=("<a>",), new_special_tokens=("<a>",)), "'<a>' twice, or new_tokens and new_special_tokens both"),
    (dict(new_tokens=("<|eos|>",)), "has '<|eos|>' as a special token; name it in tokenizer.new_special_tokens"),
    (dict(new_tokens=("a",)), "'a', which is a token of .* already"),
])
def test_tokens_that_cannot_be(folder, changed, told):
  with pytest.raises(ConfigError, match=told.replace("|", r"\|")):
    load_extended(section(folder, **changed))


def test_tokens_for_a_tokenizer_that_is_of_no_folder(tmp_path):
  cfg = defaults().tokenizer
  cfg.update(type="bytes", new_tokens=("<a>",))
  with pytest.raises(ConfigError, match="tokenizer.type=hf.*is 'bytes'"):
    make_tokenizer(cfg, lambda: iter(()), tmp_path / "tokenizer.json")
