"""The bytes of tokens: those of a text's tokens are the text's."""

import pytest
from tokenizers import Tokenizer, decoders, models

from input_pipeline.tokenizer.token_bytes import token_bytes
from input_pipeline.tokenizer.tokenizer import BytesTokenizer, load_tokenizer
from tests.tiny import ROOT

FOLDER = ROOT / "tests" / "input_pipeline" / "references"


@pytest.mark.parametrize("name, text", [
    ("tiny", "Grüße, 世界 😀\n\n  def f(x):\treturn"), ("stop_strings/bytes_as_letters", "abba é 😀\nbéab"),
    ("stop_strings/with_bytes", "a▁bé▁ab😀\n\né▁a"), ("stop_strings/words", "ab ba é\n\n😀 a")])
def test_a_text_is_the_bytes_of_its_tokens(name, text):
  tokenizer = load_tokenizer(FOLDER / name)
  pieces = tokenizer.token_bytes
  assert len(pieces) == tokenizer.vocab_size
  ids = tokenizer.encode_rendered(text).tolist()
  joined = b"".join(pieces[i] for i in ids).decode()
  assert joined.removeprefix(" ") == text.replace("▁", " ")  # of words with ▁, the first has one, too
  assert [pieces[int(tokenizer.encode_rendered(s)[-1])] for s in tokenizer.special_tokens] == [
      s.encode() for s in tokenizer.special_tokens]


def test_those_of_raw_bytes_and_of_what_they_are_saved_as(tmp_path):
  tokenizer = BytesTokenizer()
  tokenizer.save(tmp_path / "tokenizer.json")
  assert load_tokenizer(tmp_path).token_bytes == tokenizer.token_bytes
  assert tokenizer.token_bytes[:256] == tuple(bytes([b]) for b in range(256))
  assert tokenizer.token_bytes[256:] == (b"<|bos|>", b"<|eos|>")


@pytest.mark.parametrize("decoder, expected", [(decoders.ByteFallback(), b"\n"), (decoders.Fuse(), b"<0x0A>")])
def test_a_token_named_like_a_byte_is_one_where_the_decoder_says_so(decoder, expected):
  backend = Tokenizer(models.WordLevel({"a": 0, "<0x0A>": 1}, unk_token="a"))
  backend.decoder = decoder
  assert token_bytes(backend, backend.to_str()) == (b"a", expected)
