"""Tokenizer files that are broken, contradict one another, or would have the program do something else."""

import json

import pytest

from input_pipeline.tokenizer.tokenizer import BytesTokenizer, load_tokenizer
from tests.hostile.common import named, refused, write

DEEP = 100_000


def word_level(vocab, added=(), unk="[UNK]", **more):
  """A tokenizer.json of whole words."""
  return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": list(added), "normalizer": None,
          "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
          "model": {"type": "WordLevel", "vocab": vocab, "unk_token": unk}} | more


def token(number, content, special=True):
  return {"id": number, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
          "normalized": False, "special": special}


GOOD = word_level({"[UNK]": 0, "a": 1, "b": 2})


def files(**contents):
  """A folder's files by name, "__" for a dot; a tokenizer.json that is good unless it is given."""
  return {"tokenizer.json": GOOD} | {name.replace("__", "."): content for name, content in contents.items()}


def replaced(*path, to):
  """GOOD with another value at a path."""
  changed = json.loads(json.dumps(GOOD))
  node = changed
  for key in path[:-1]:
    node = node[key]
  node[path[-1]] = to
  return {"tokenizer.json": changed}


TABLE = [
    ("empty file", {"tokenizer.json": b""}, "tokenizer.json", "not a readable tokenizer"),
    ("not json", {"tokenizer.json": "hello"}, "tokenizer.json", "not a readable tokenizer"),
    ("not utf-8", {"tokenizer.json": b"\xff\xfe\0"}, "tokenizer.json", "cannot be read as UTF-8"),
    ("a list", {"tokenizer.json": "[]"}, "tokenizer.json", "not a readable tokenizer"),
    ("a number", {"tokenizer.json": "1"}, "tokenizer.json", "not a readable tokenizer"),
    ("nested deep", {"tokenizer.json": "[" * DEEP}, "tokenizer.json", "not a readable tokenizer"),
    ("a number of many digits", {"tokenizer.json": '{"a": ' + "9" * 9999 + "}"}, "tokenizer.json", "not a readable"),
    ("an empty object", {"tokenizer.json": "{}"}, "tokenizer.json", "not a readable tokenizer"),
    ("no model", replaced("model", to=None), "tokenizer.json", "not a readable tokenizer"),
    ("an unknown model", replaced("model", "type", to="Pickle"), "tokenizer.json", "not a readable tokenizer"),
    ("a vocabulary that is a list of numbers", replaced("model", "vocab", to=[1, 2]), "not a readable tokenizer"),
    ("an empty vocabulary", replaced("model", "vocab", to={}), "tokenizer.json", "its 0 tokens"),
    ("a negative id", replaced("model", "vocab", "a", to=-1), "tokenizer.json", "not a readable tokenizer"),
    ("an id beyond 32 bits", replaced("model", "vocab", "a", to=2**40), "tokenizer.json", "not a readable tokenizer"),
    ("an id far beyond the others", replaced("model", "vocab", "a", to=2**32 - 1), "tokenizer.json", "4294967295"),
    ("an id that is a fraction", replaced("model", "vocab", "a", to=1.5), "tokenizer.json", "not a readable tokenizer"),
    ("two tokens of one id", replaced("model", "vocab", "a", to=2), "tokenizer.json", "id 2"),
    ("an added token without an id", replaced("added_tokens", to=[{"content": "x"}]), "not a readable tokenizer"),
    ("added tokens that are strings", replaced("added_tokens", to=["<s>"]), "not a readable tokenizer"),
    ("added tokens that are an object", replaced("added_tokens", to={"a": 1}), "not a readable tokenizer"),
    ("a normalizer of a bad regex", replaced("normalizer", to={
        "type": "Replace", "pattern": {"Regex": "("}, "content": ""}), "tokenizer.json", "not a readable tokenizer"),
    ("an unknown pre-tokenizer", replaced("pre_tokenizer", to={"type": "Shell"}), "not a readable tokenizer"),
    ("a merge of tokens that are not there", {"tokenizer.json": word_level({}, model={
        "type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a c"]})}, "tokenizer.json", "not a readable tokenizer"),
    ("an unknown token that is not there", replaced("model", "unk_token", to="[NO]"), "tokenizer.json",
     "a text cannot be encoded"),
    ("a special token that is a number", files(tokenizer_config__json={"eos_token": 7}), "eos_token is 7"),
    ("a special token that is a list", files(tokenizer_config__json={"bos_token": ["a"]}), "bos_token is ['a']"),
    ("a special token that is empty", files(tokenizer_config__json={"eos_token": ""}), "special token ''"),
    ("a config that is a list", files(tokenizer_config__json=[1]), "tokenizer_config.json", "holds a list"),
    ("a config that is not json", files(tokenizer_config__json="{"), "tokenizer_config.json", "not valid JSON"),
    ("a config nested deep", files(tokenizer_config__json='{"a":' * DEEP), "tokenizer_config.json", "not valid JSON"),
    ("a config of many digits", files(tokenizer_config__json='{"a": ' + "9" * 9999 + "}"), "tokenizer_config.json"),
    ("ids that are names", files(tokenizer_config__json={"added_tokens_decoder": {"one": {"content": "a"}}}),
     "added_tokens_decoder", "'one'"),
    ("an added id that contradicts", files(tokenizer_config__json={"added_tokens_decoder": {"2": {"content": "a"}}}),
     "gives 'a' the id 2", "tokenizer.json gives it 1"),
    ("an added id far beyond", files(tokenizer_config__json={"added_tokens_decoder": {
        "99999999": {"content": "x", "special": True}}}), "gives 'x' the id 99999999"),
    ("added tokens that are a list", files(tokenizer_config__json={"added_tokens_decoder": ["a"]}),
     "added_tokens_decoder"),
    ("additional tokens that are numbers", files(tokenizer_config__json={"additional_special_tokens": [1, 2]}),
     "additional_special_tokens is 1"),
    ("additional tokens that are a number", files(tokenizer_config__json={"additional_special_tokens": 7}),
     "additional_special_tokens"),
    ("old added tokens that are strings", files(added_tokens__json={"x": "one"}), "added_tokens.json"),
    ("an end that is not there", files(generation_config__json={"eos_token_id": 99}), "eos_token_id", "99"),
    ("an end that is negative", files(generation_config__json={"eos_token_id": -1}), "eos_token_id is -1"),
    ("an end that is a string", files(config__json={"eos_token_id": "</s>"}), "eos_token_id is '</s>'"),
    ("code to be trusted", files(tokenizer_config__json={
        "auto_map": {"AutoTokenizer": ["evil.Pwned", None]}, "eos_token": 8}), "eos_token is 8"),
    ("gpt-2 without its merges", {"vocab.json": {"a": 0}}, "tokenizer.json", "does not exist"),
    ("gpt-2 with bad merges", {"vocab.json": {"a": 0}, "merges.txt": "x y z w", "config.json": {"model_type": "gpt2"}},
     "merges.txt", "not a readable GPT-2 vocabulary"),
    ("only sentencepiece", {"tokenizer.model": b"\x0a\x0b"}, "tokenizer.model", "the one format read"),
    ("nothing", {"readme.md": "hello"}, "tokenizer.json", "does not exist"),
]


@pytest.mark.parametrize("row", named([(row[0], row[1:]) for row in TABLE]))
def test_a_bad_tokenizer_is_one_message(row, tmp_path, guard):
  contents, *expected = row
  folder = tmp_path / "data"
  folder.mkdir()
  for name, content in contents.items():
    write(folder / name, content)
  with guard.only():
    refused(lambda: load_tokenizer(folder).encode_batch(["a b c <s> d"]), *expected)


def test_one_that_is_good_is_taken(tmp_path):
  write(tmp_path / "tokenizer.json", GOOD)
  assert load_tokenizer(tmp_path).encode_batch(["a b c"])[0].tolist() == [1, 2, 0]


def test_truncation_padding_and_dropout_of_a_file_have_no_effect(tmp_path):
  BytesTokenizer().save(tmp_path / "tokenizer.json")
  content = json.loads((tmp_path / "tokenizer.json").read_text())
  content["truncation"] = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
  content["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                        "pad_type_id": 0, "pad_token": "a"}
  content["model"]["dropout"] = 1.0
  write(tmp_path / "tokenizer.json", content)
  assert load_tokenizer(tmp_path).encode_batch(["abc"])[0].tolist() == [97, 98, 99]
