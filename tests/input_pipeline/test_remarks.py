"""What is counted of documents is told in one line, with the count, from the data and from the cache."""

from input_pipeline import once
from input_pipeline.cache import tokenize_source
from input_pipeline.examples.registry import open_examples
from input_pipeline.remarks import ACROSS, LITERAL, Tally
from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from trainer.config import defaults, source
from trainer.strategies import learns


def test_documents_are_counted_not_remarks(caplog):
  tally = Tally()
  tally.add([(LITERAL, "<s>"), (LITERAL, "<s>"), (LITERAL, "</s>"), (ACROSS, "Hi")])
  tally.add([(LITERAL, "<s>")])
  tally.add([])
  assert tally.counts == {LITERAL: {"": 2, "<s>": 2, "</s>": 1}, ACROSS: {"": 1, "Hi": 1}}
  Tally(tally.counts).say("main", 1234)
  assert "'main': 2 of 1,234 documents have the characters of special tokens" in caplog.text
  assert "('<s>' in 2, '</s>' in 1)" in caplog.text and "in 1 of 1,234 documents a token reaches" in caplog.text


def test_texts_with_special_tokens_are_told_once_and_by_later_runs_too(tmp_path, caplog):
  """Of three texts, two have the characters of one: by hand."""
  (tmp_path / "a.txt").write_text("x <|eos|> y <|eos|>\n\nplain\n\n<|bos|> and <|eos|>\n")
  config = defaults()
  config.input.sources.main = source(type="text", path=str(tmp_path / "a.txt"), documents="paragraph", split="all")
  for _ in range(3):
    text, encoder = open_examples(config, BytesTokenizer(), config.input.sources.main, "main", learns=learns(config))
    tokenize_source(text, encoder, 258, tmp_path / "cache")
  line = "source 'main': 2 of 3 documents have the characters of special tokens in ordinary text ('<|eos|>' in 2, "
  assert caplog.text.count(line + "'<|bos|>' in 1)") == 1
  once.forget()  # another run
  tokenize_source(text, encoder, 258, tmp_path / "cache")
  assert caplog.text.count(line) == 2
