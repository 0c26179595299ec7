"""Queries with texts that answer them: what rows may look like, and the tokens they become."""

import json
from pathlib import Path

import numpy as np
import pytest

from input_pipeline.examples.matches import MatchEncoder
from input_pipeline.examples.roles import ABSENT, NEGATIVE, POSITIVE, QUERY
from input_pipeline.images.images import ImageError, Preprocess, to_pixels
from input_pipeline.remarks import CUT
from input_pipeline.sources.made import png
from input_pipeline.sources.readers import Record
from input_pipeline.tokenizer.tokenizer import BytesTokenizer, load_tokenizer
from trainer.config import defaults, strategy
from trainer.errors import ConfigError, DataError

BOS, EOS = 256, 257


def encoder(fields=(), max_length=16, **options):
  c = defaults()
  c.strategy = strategy("contrastive", **dict(max_length=max_length, text_ends="eos") | options)
  c.chat.fields = tuple(fields)
  return MatchEncoder(c, BytesTokenizer())


def parts(document):
  """The parts of a document as bytes, without BOS and EOS, which each has."""
  found, begin = [], 0
  for length in document.parts:
    ids, begin = document.ids[begin:begin + length].tolist(), begin + length
    if length:
      assert (ids[0], ids[-1]) == (BOS, EOS)
    found.append(bytes(ids[1:-1]).decode())
  assert begin == len(document.ids)
  return found


def documents(fields, **options):
  return encoder(**options).encode([Record("r", "file:1", fields)])


@pytest.mark.parametrize("fields, expected", [
    (dict(query="q", positive="p"), [["q", "p", "", ""]]),
    (dict(anchor="q", pos=["p", "r"], neg=["n"]), [["q", "p", "n", ""], ["q", "r", "n", ""]]),
    (dict(query="q", positive="p", negative_2="m", negative_1="n"), [["q", "p", "n", "m"]]),
    (dict(query="q", positive="p", negatives=["n", "m"], id=7), [["q", "p", "n", "m"]]),
    (dict(query="q", positive="p", negative=None), [["q", "p", "", ""]]),
])
def test_rows_become_documents_of_equally_many_parts(fields, expected):
  found = documents(fields, negatives=2)
  assert [parts(document) for document in found] == expected
  for document, texts in zip(found, expected, strict=True):
    assert document.roles == (QUERY, POSITIVE, *(NEGATIVE if text else ABSENT for text in texts[2:]))


def test_columns_have_other_names_and_the_rest_is_not_read():
  made = encoder(fields=(("query", "question"), ("positive", "answer")))
  record = Record("r", "file:1", dict(question="q", answer="a", query="other", id=1))
  assert parts(made.encode([record])[0]) == ["q", "a"]
  assert made.columns(record) == {"question", "answer"} and list(made.texts(record)) == ["q", "a"]
  assert made.describe(record) == "query and positive"


def test_a_name_that_chat_fields_gives_and_no_row_has_is_told():
  record = Record("r", "file:1", dict(query="q", positive="p"))
  with pytest.raises(DataError, match="no 'question' .or null., which chat.fields has for 'query'; its columns are"):
    encoder(fields=(("query", "question"),)).encode([record])


def test_prompts_stand_before_texts_and_what_is_too_long_is_cut_before_its_end():
  row = dict(query="abcdef", positive="abcdefgh")
  found, = documents(row, query_prompt="q: ", document_prompt="d: ", max_length=10)
  assert parts(found) == ["q: abcde", "d: abcde"]
  assert found.remarks == ((CUT, "query"), (CUT, "positive"))


@pytest.mark.parametrize("fields, told", [
    (dict(query="q"), "file:1: no 'positive' .or null.; its columns are 'query'"),
    (dict(positive="p"), "file:1: no 'query'"),
    (dict(query="q", anchor="q", positive="p"), "file:1: several queries .query, anchor."),
    (dict(query="q", positive=" "), "file:1: positive is empty"),
    (dict(query="q", positive=[]), "file:1: positive is an empty list; expected a text, or a list of texts"),
    (dict(query="q", pos=[]), "file:1: pos is an empty list"),
    (dict(query="q", positive=None), "file:1: no 'positive' .or null.; its columns are"),
    (dict(query=["q"], positive="p"), "file:1: query is ..q.. .list.; expected a text"),
    (dict(query="q", positive=["p", 3]), "file:1: positive is 3 .int.; expected a text, or messages"),
    (dict(query="q", positive="p", negative="p"), "file:1: a negative has the same tokens as a positive"),
    (dict(query="q", positive="p", negative=["n", "m"]), "file:1: 2 negatives, but strategy.negatives is 1. Use"),
])
def test_a_row_that_is_no_match_is_refused(fields, told):
  with pytest.raises(DataError, match=told):
    documents(fields, negatives=1)


def test_no_room_for_a_text_is_refused():
  with pytest.raises(ConfigError, match="strategy.max_length is 2: beside 2 tokens"):
    encoder(max_length=2)


def test_whatever_decides_the_tokens_is_in_the_fingerprint():
  made = [encoder(), encoder(negatives=1), encoder(max_length=9), encoder(query_prompt="q"),
          encoder(document_prompt="q"), encoder(fields=(("query", "a"),))]
  assert len({one.fingerprint for one in made}) == len(made) and made[0].fingerprint == encoder().fingerprint


def seeing(tmp_path, fields=(), **options):
  """An encoder of a model that sees images, as 2 × 2 tokens each; and the record of a row beside 0.png and 1.png."""
  for number in range(2):
    (tmp_path / f"{number}.png").write_bytes(png(np.full((4, 4), number, np.uint8)))
  c = defaults()
  c.strategy = strategy("contrastive", **dict(max_length=16, text_ends="eos") | options)
  c.model.vision.update(tower="siglip", image_size=4, patch_size=2, image_token=300)
  c.chat.fields = tuple(fields)
  return MatchEncoder(c, BytesTokenizer()), lambda row: Record("r", "file:1", row, tmp_path)


@pytest.mark.parametrize("row, texts, images, described", [
    (dict(query="q", positive={"image": "0.png"}), ["q", "█"], [0], "query and positive with images"),
    (dict(query={"text": "q", "image": "0.png"}, positive=["p", {"image": "1.png"}], negative="n"),
     ["█q", "p", "n", "█q", "█", "n"], [0, 0, 1], "query with images and positive with images, 1 negative"),
    (dict(query="q", positive="p", negative=[{"image": "0.png"}]), ["q", "p", "█"], [0],
     "query and positive, 1 negative with images"),
    # Columns of images: where the texts have places, in the place of what is missing, or before the query.
    (dict(query="<image> q", positive="p", negative="<image>", images=["0.png", "1.png"]), ["█ q", "p", "█"], [0, 1],
     "query with images and positive, 1 negative with images"),
    (dict(query="q", positive="p", image="1.png"), ["█q", "p"], [1], "query with images and positive"),
    (dict(positive="p", image="1.png"), ["█", "p"], [1], "query with images and positive"),
    (dict(query="q", images=["0.png", "1.png"]), ["q", "██"], [0, 1], "query and positive with images"),
])
def test_any_text_of_a_row_may_have_images(tmp_path, row, texts, images, described):
  made, record = seeing(tmp_path, negatives=1)
  found, shades = [], []
  for document in made.encode([record(row)]):
    begin = 0
    for length in document.parts:
      ids, begin = document.ids[begin:begin + length].tolist(), begin + length
      found += ["".join("I" if i == 300 else chr(i) for i in ids[1:-1]).replace("IIII", "█")] * (length > 0)
    shades += [int(to_pixels(image.data, Preprocess(4)).max()) for image in document.images]
    assert [document.ids[at:at + 4].tolist() for at in document.places] == [[300] * 4] * len(document.images)
  assert (found, shades, made.describe(record(row))) == (texts, images, described)
  assert made.columns(record(row)) == row.keys() and made.sees_images


def test_a_column_called_image_may_be_the_query(tmp_path):
  made, record = seeing(tmp_path, fields=(("query", "image"), ("positive", "caption")))
  found, = made.encode([record(dict(image={"bytes": (tmp_path / "1.png").read_bytes(), "path": None}, caption="p"))])
  assert found.places == (1,) and found.parts == (6, 3)
  with pytest.raises(DataError, match="file:1: image is '1.png', a text that looks like an image. Write it as"):
    made.encode([record(dict(image="1.png", caption="p"))])


def test_texts_with_other_images_are_others(tmp_path):
  made, record = seeing(tmp_path, negatives=1)
  assert made.encode([record(dict(query="q", positive={"image": "0.png"}, negative={"image": "1.png"}))])
  with pytest.raises(DataError, match="file:1: a negative has the same tokens as a positive"):
    made.encode([record(dict(query="q", positive={"image": "0.png"}, negative={"image": "0.png"}))])


def test_a_row_with_an_image_that_cannot_be_used_is_dropped_where_that_is_said(tmp_path):
  made, record = seeing(tmp_path)
  row = record(dict(query="q", positive=["p", {"image": "none.png"}]))
  with pytest.raises(DataError, match="^file:1: positive: image: .*none.png"):
    made.encode([row])
  made._tokens._images.drops = True
  kept, dropped = made.encode([row])
  assert kept.parts == (3, 3) and dropped == "a bad image"


def test_whatever_decides_images_is_in_the_fingerprint(tmp_path):
  one, other = seeing(tmp_path)[0], seeing(tmp_path)[0]
  other._tokens._images.each = 9
  assert len({one.fingerprint, other.fingerprint, encoder().fingerprint}) == 3


@pytest.mark.parametrize("row, told", [
    (dict(positive="p", image="0.png"), "file:1: has images, which the model does not see"),
    (dict(query={"image": "0.png"}, positive="p"), "file:1: query: has images, which the model does not see"),
])
def test_a_model_of_text_refuses_images(row, told):
  with pytest.raises(DataError, match=told):
    documents(row)


REFERENCES = Path(__file__).parents[1] / "references"


@pytest.mark.parametrize("name", ["llama3", "gemma", "chatml", "mistral"])
def test_conversations_have_the_tokens_that_transformers_renders(name):
  """Nothing stands before or behind them; references are those of tests/input_pipeline/chat/test_template.py."""
  references, compared = json.loads((REFERENCES / "chat.json").read_text("utf-8")), 0
  c = defaults()
  c.chat.update(template=str(REFERENCES / "templates" / f"{name}.jinja"), date=references["date"])
  tokenizer = load_tokenizer(REFERENCES / "tiny")
  for case, expected in references["templates"][name].items():
    given = references["cases"][case]
    others = given.keys() - {"messages", "tools", "add_generation_prompt"}
    if "error" in expected or given.get("tools") == [] or others or not all(
        isinstance(m.get("content"), str) for m in given["messages"]):
      continue
    c.strategy = strategy("contrastive", text_ends="eos", max_length=4096, query_prompt="not here: ",
                          generation_prompt=given.get("add_generation_prompt", False))
    query = given["messages"] if "tools" not in given else {key: given[key] for key in ("messages", "tools")}
    row = dict(query=query, positive=[query, "p"])
    one, two = MatchEncoder(c, tokenizer).encode([Record("r", "file:1", row)])
    ids = one.ids.tolist()
    assert ids[:one.parts[0]] == ids[one.parts[0]:] == expected["ids"], case
    assert two.ids.tolist()[:two.parts[0]] == expected["ids"] and two.ids[-1] == tokenizer.eos_id
    compared += 1
  assert compared >= 3


@pytest.mark.parametrize("query, told", [
    ([dict(role="user", content="q", weight=0.5)], "query has messages with a weight"),
    ([dict(role="nobody", content="q")], "file:1: query.*role"),
    ({"messages": []}, "file:1: query"), ({"role": "user"}, "expected a text, or messages"),
    ([dict(role="user", content=[dict(type="image", image="a.png")])], "file:1: query"),
])
def test_a_conversation_that_cannot_be_rendered_is_refused(query, told):
  with pytest.raises(DataError, match=told):
    documents(dict(query=query, positive="p"))


def test_conversations_without_a_template_are_a_fault_of_the_config():
  with pytest.raises(ConfigError, match="are conversations, but the tokenizer has no chat template"):
    documents(dict(query=[dict(role="user", content="q")], positive="p"))


def test_what_is_wrong_with_a_text_names_its_row(monkeypatch):
  made = encoder()
  for error, said in ((DataError("no text"), "a.jsonl:7: no text"), (ImageError("a.jsonl:7: bad"), "a.jsonl:7: bad")):
    def fails(texts, error=error):
      raise error
    monkeypatch.setattr(made._tokens, "encode", fails)
    with pytest.raises(DataError) as told:
      made.encode([Record("r", "a.jsonl:7", {"query": "q", "positive": "p"})])
    assert str(told.value) == said
