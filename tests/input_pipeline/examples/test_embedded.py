"""Texts that are embedded: what stands for one in a row, and the tokens and places of images that it becomes."""

from pathlib import Path

import numpy as np
import pytest

from input_pipeline.chat.image_placeholders import image_format
from input_pipeline.chat.schema import Plain
from input_pipeline.examples.embedded import TextReader, TextTokens, is_text, max_length_of, text_tokens
from input_pipeline.images.images import ImageError, ImageRef
from input_pipeline.sources.made import png
from input_pipeline.sources.readers import Record
from input_pipeline.tokenizer.tokenizer import BytesTokenizer, load_tokenizer, write_ends
from trainer.config import defaults, strategy
from trainer.errors import ConfigError, DataError

BOS, EOS, IMAGE = 256, 257, 300


def test_ends_are_the_tokenizers_own(tmp_path):
  BytesTokenizer().save(tmp_path / "tokenizer.json")
  c = defaults().tokenizer
  assert TextTokens(load_tokenizer(tmp_path), c, 8).head == (BOS,)
  write_ends(tmp_path / "tokenizer.json", (), (EOS, EOS))
  own = load_tokenizer(tmp_path)
  assert own.ends == ((), (EOS, EOS))
  for ends in ("eos", "tokenizer"):
    assert [text.ids.tolist() for text in TextTokens(own, c, 8, ends).encode(["a"])] == [[97, EOS, EOS]]
  write_ends(tmp_path / "tokenizer.json", (BOS,))
  own = load_tokenizer(tmp_path)
  assert TextTokens(own, c, 8, "tokenizer").encode(["a"])[0].ids.tolist() == [BOS, 97]
  assert TextTokens(own, c, 8, "eos").encode(["a"])[0].ids.tolist() == [BOS, 97, EOS]
  c.add_eos = False
  assert TextTokens(own, c, 8, "eos").tail == ()
  # What others make of the file, which the tokenizers library does.
  from tokenizers import Tokenizer
  assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("a").ids == [BOS, 97]


def config_of(**changed):
  """Images of 2 × 2 tokens."""
  c = defaults()
  c.strategy = strategy("contrastive", **dict(max_length=24, text_ends="eos", generation_prompt=False,
                                              as_messages=False) | changed)
  c.model.vision.update(tower="siglip", image_size=4, patch_size=2, image_token=IMAGE)
  return c


def picture(folder, number=0):
  (folder / f"{number}.png").write_bytes(png(np.full((4, 4), number, np.uint8)))
  return f"{number}.png"


def read(folder, *values, shared=(), seen=True):
  images = image_format(config_of(), BytesTokenizer()) if seen else None
  record = Record("r", "file:1", {}, Path(folder))
  return TextReader(images).read(record, [(f"c{n}", value) for n, value in enumerate(values)], [
      ImageRef(name, f"file:1: images[{n}]", Path(folder)) for n, name in enumerate(shared)])


def shown(folder, *texts, prompt="", shared=(), attention="causal", **options):
  """The tokens of each text, with its bytes as a string and I for a token of an image; and its images' shades."""
  c = config_of(**options)
  c.model.vision.attention = attention
  if options.get("as_messages"):
    c.chat.template = "chatml"
  tokens = text_tokens(c, BytesTokenizer())
  made = tokens.encode([tokens.prompted(prompt, text) for text in read(folder, *texts, shared=shared)])
  letters = {BOS: "[", EOS: "]", IMAGE: "I"}
  found = []
  for text in made:
    assert [text.ids[at:at + 4].tolist() for at in text.places] == [[IMAGE] * 4] * len(text.images)
    found.append("".join(letters.get(i, chr(i) if i < 256 else "?") for i in text.ids.tolist()).replace("IIII", "█"))
  return found


@pytest.mark.parametrize("text, expected", [
    ("a", "[a]"),
    ({"text": "a"}, "[a]"),
    ({"text": "a", "image": "0.png"}, "[█a]"),
    ({"text": "a <image> b<image>", "images": ["0.png", "1.png"]}, "[a █ b█]"),
    ({"image": "0.png"}, "[█]"),
    ({"path": "0.png", "bytes": None}, "[█]"),
    ("<image> without one", "[<image> without one]"),
    ({"text": "<|im_end|>", "image": "0.png"}, "[█<|im_end|>]"),  # as text, not as a special token
])
def test_a_text_has_its_images_where_they_stand(tmp_path, text, expected):
  for number in range(2):
    picture(tmp_path, number)
  assert shown(tmp_path, text) == [expected]
  prompted, = shown(tmp_path, text, prompt="Q:")
  assert prompted == f"[Q:{expected[1:]}"


def test_before_bos_images_stand_where_the_model_wants_them(tmp_path):
  picture(tmp_path)
  found = shown(tmp_path, {"text": "a", "image": "0.png"}, "b", prompt="Q:", attention="prefix")
  assert found == ["█[Q:a]", "[Q:b]"]


def test_bytes_are_an_image(tmp_path):
  assert shown(tmp_path, png(np.zeros((4, 4), np.uint8))) == ["[█]"]


@pytest.mark.parametrize("values, shared, expected", [
    (["a<image>", "b", "<image>c"], ["0.png", "1.png"], ["a█", "b", "█c"]),
    (["a", "b"], ["0.png", "1.png"], ["██a", "b"]),
    (["a", {"text": "b", "image": "0.png"}], ["1.png"], ["█a", "█b"]),
    ([{"text": "a <image>", "image": "0.png"}, "<image>"], ["1.png"], ["a █", "█"]),  # which have their own
])
def test_images_of_the_row_go_where_a_text_waits_for_one(tmp_path, values, shared, expected):
  for number in range(2):
    picture(tmp_path, number)
  assert [text[1:-1] for text in shown(tmp_path, *values, shared=shared)] == expected


def test_texts_become_what_the_user_says_and_prompts_the_system(tmp_path):
  picture(tmp_path)
  values = ("a", {"text": "a<image>", "image": "0.png"}, [{"role": "user", "content": "b"}])
  found = shown(tmp_path, *values, prompt="Find it.", as_messages=True, max_length=200)
  whole = "[<|im_start|>system\nFind it.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
  assert found == [whole.format(said) for said in ("a", "a█", "b")]
  begun, = shown(tmp_path, "a", as_messages=True, generation_prompt=True, max_length=200)
  assert begun == "[<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


def test_messages_need_a_template():
  with pytest.raises(ConfigError, match="strategy.as_messages makes conversations of texts, but the tokenizer has no"):
    text_tokens(config_of(as_messages=True), BytesTokenizer())


def test_a_conversation_that_is_cut_ends_as_it_would(tmp_path):
  ending = "<|im_end|>\n<|im_start|>assistant\n"
  for length in (len("[<|im_start|>user\nabc" + ending), 400):
    found, = shown(tmp_path, "abcdef", as_messages=True, generation_prompt=True, max_length=length)
    assert found == f"[<|im_start|>user\nabc{'def' * (length == 400)}{ending}"
  picture(tmp_path)
  begin = len("[<|im_start|>user\n" + ending)
  found, = shown(tmp_path, {"text": "<image>abc", "image": "0.png"}, as_messages=True, generation_prompt=True,
                 max_length=begin + 5)
  assert found == f"[<|im_start|>user\n█a{ending}"
  with pytest.raises(DataError, match="up to the end of its last image, but strategy.max_length is"):
    shown(tmp_path, {"text": "<image>abc", "image": "0.png"}, as_messages=True, generation_prompt=True,
          max_length=begin + 3)


def test_what_conversations_are_made_with_is_in_the_fingerprint():
  found = []
  for options in ({}, dict(as_messages=True), dict(generation_prompt=True)):
    c = config_of(**options)
    c.chat.template = "chatml"
    found.append(text_tokens(c, BytesTokenizer()).fingerprint)
  assert found[0] not in found[1:] and found[1] != found[2]


def test_a_text_is_cut_behind_its_images_and_no_image_is(tmp_path):
  picture(tmp_path)
  assert shown(tmp_path, {"text": "<image>abcdef", "image": "0.png"}, max_length=9) == ["[█abc]"]
  assert shown(tmp_path, {"text": "abc<image>", "image": "0.png"}, max_length=9) == ["[abc█]"]
  with pytest.raises(DataError, match="a text has 10 tokens up to the end of its last image, but strategy.max_l"):
    shown(tmp_path, {"text": "abcd<image>ef", "image": "0.png"}, max_length=9)


@pytest.mark.parametrize("value, told", [
    ([{"role": "user", "content": "a", "weight": 0.5}], "file:1: c0 has messages with a weight, but all of a text"),
    ({"text": "a", "image": "none.png"}, "c0: image: .*none.png.* cannot be read"),
    ({"text": "<image><image>", "image": "0.png"}, "1 image.s., but 2 × '<image>' in the text"),
    ({"text": "a", "imgae": "0.png"}, r'file:1: c0 is .* expected a text, or messages, or {"text": …, "image": …}'),
    ({"text": " "}, "file:1: c0 is empty"),
    ({}, "file:1: c0 is {} .dict.; expected"),
    ("0.png", "file:1: c0 is '0.png', a text that looks like an image. Write it as"),
    ("data:image/png;base64,AAAA", "file:1: c0 is 'data:image/png"),
    ({"image": "0.png", "video": "a.mp4"}, "file:1: c0: video is a video, which the model does not see"),
    ([{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}], "is a video, which the model does not see"),
    ({"messages": [{"role": "user", "content": "<image>"}], "images": ["0.png", "0.png"]}, "have 2 image.s., for 1 ×"),
])
def test_what_is_no_text_is_refused(tmp_path, value, told):
  picture(tmp_path)
  with pytest.raises(DataError, match=told):
    shown(tmp_path, value)


@pytest.mark.parametrize("values, shared, told", [
    (["<image>", "<image>"], ["0.png"], "file:1: its columns have 1 image.s., for 2 places of images in its texts"),
    (["<image>", "b"], ["0.png", "0.png"], "have 2 image.s., for 1 places"),
    ([{"text": "a", "image": "0.png"}, "b"], ["0.png"], "have 1 image.s., for 0 places"),
])
def test_more_or_fewer_places_than_images_are_refused(tmp_path, values, shared, told):
  with pytest.raises(DataError, match=told):
    read(tmp_path, *values, shared=shared)


GARBAGE = (None, 5, 1.5, True, [], {}, [None], [[]], [5, "a"], {"messages": 5}, {"messages": [5]}, {"messages": {}},
           {"text": 5}, {"text": ["a"]}, {"text": "a", "images": 5}, {"text": "a", "images": [None]},
           {"text": "a", "image": {"a": 1}}, {"image": "a", "images": ["b"]}, {"path": None, "bytes": None},
           {"bytes": "a"}, {"text": "a", "messages": [{"role": "user", "content": "b"}]}, {5: "a"},
           {"text": "a", 5: "b"}, [{"role": "user", "content": 5}], [{"role": "user", "content": [5]}],
           [{"role": "user"}], b"", b"abc",
           [{"role": "user", "content": [{"type": "image", "image": {}}]}], float("nan"))


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("number", range(len(GARBAGE)))
def test_garbage_is_told_as_such(tmp_path, number, seen):
  """With an image in a column that waits for a place, or without."""
  c = config_of()
  c.chat.template = "chatml"
  tokens = text_tokens(c, BytesTokenizer())
  picture(tmp_path)
  for shared in ([], ["0.png"]) if seen else ([],):
    with pytest.raises(DataError, match="^file:1: (c0|its columns have 1 image)"):
      tokens.encode([tokens.prompted("", text) for text in read(tmp_path, GARBAGE[number], shared=shared, seen=seen)])
      raise AssertionError(GARBAGE[number])


def test_a_model_of_text_refuses_images_and_takes_names_of_files_for_words(tmp_path):
  assert read(tmp_path, "0.png", {"text": "a"}, seen=False) == ["0.png", "a"]
  for value in ({"image": "0.png"}, b"abc"):
    with pytest.raises(DataError, match="has images, which the model does not see"):
      read(tmp_path, value, seen=False)


def test_an_image_that_cannot_be_used_may_drop_its_row(tmp_path):
  c = config_of()
  tokens = {}
  for how in ("error", "drop"):
    c.input.images.on_error = how
    tokens[how] = text_tokens(c, BytesTokenizer())
  texts = read(tmp_path, "a", {"image": "none.png"})
  assert tokens["drop"].encode(texts)[1] == "a bad image"
  with pytest.raises(ImageError, match="file:1: c1: image"):
    tokens["error"].encode(texts)


def test_lists_are_one_text_or_several():
  assert is_text("a") and is_text([{"role": "user", "content": "a"}]) and is_text({"image": "a"})
  assert not is_text(["a"]) and not is_text([{"image": "a"}, {"image": "b"}]) and not is_text([])
  assert not is_text([{"messages": [{"role": "user", "content": "a"}]}])


def test_a_video_belongs_to_a_text(tmp_path):
  record = Record("r", "file:1", {}, tmp_path)
  shared = [ImageRef("a.png", "file:1: images[0]", tmp_path),
            ImageRef("a.mp4", "file:1: videos[0]", tmp_path, video=True)]
  with pytest.raises(DataError, match='^file:1: has a video in a column of its own; here it belongs to a text: {"tex'):
    TextReader(image_format(config_of(), BytesTokenizer())).read(record, [("query", "a")], shared)


def test_texts_that_end_with_eos_need_one():
  class NoEnd(BytesTokenizer):
    eos_id = None

  c = defaults().tokenizer
  with pytest.raises(ConfigError, match="^the tokenizer has no EOS to end texts with. Name one in tokenizer_config.js"):
    TextTokens(NoEnd(), c, 8)
  assert TextTokens(NoEnd(), c, 8, "tokenizer").tail == ()
  c.add_eos = False
  assert TextTokens(NoEnd(), c, 8).tail == ()


@pytest.mark.parametrize("seq_len, negatives, own, most", [
    (100, 2, None, 25), (100, 0, None, 50), (7, 1, None, 2), (100, 2, 90, 90)])
def test_texts_are_as_long_as_lets_all_of_a_row_fit(seq_len, negatives, own, most):
  c = defaults()
  c.seq_len, c.strategy = seq_len, strategy("contrastive", negatives=negatives, max_length=own)
  assert max_length_of(c) == most


@pytest.mark.parametrize("length, kept, cut", [(5, 5, False), (6, 6, False), (7, 6, True)])
def test_only_a_text_that_is_longer_is_cut(length, kept, cut):
  """8 tokens with BOS and EOS; of a model of text, and of one that sees images."""
  plain = TextTokens(BytesTokenizer(), defaults().tokenizer, 8), "x" * length
  seeing = text_tokens(config_of(max_length=8), BytesTokenizer()), Plain("", None, "x" * length)
  for tokens, text in (plain, seeing):
    (found,) = tokens.encode([text])
    assert found.ids.tolist() == [BOS, *[120] * kept, EOS] and found.cut == cut
