"""Rows become the ids and weights that another computation finds (committed references), under every option."""

import doctest
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from input_pipeline.chat.builtin import TEMPLATES, template_names
from input_pipeline.chat.schema import Plain
from input_pipeline.examples.base import NOTHING_TO_TRAIN
from input_pipeline.examples.conversations import ChatEncoder
from input_pipeline.examples.prompts import Prompter
from input_pipeline.examples.registry import make_encoder
from input_pipeline.remarks import ACROSS, LITERAL
from input_pipeline.sources.readers import Record
from input_pipeline.tokenizer.tokenizer import BytesTokenizer, load_tokenizer
from tests.tiny import ROOT
from trainer.config import defaults
from trainer.errors import ConfigError, DataError

HERE = ROOT / "tests" / "input_pipeline" / "references"
REFERENCES = json.loads((HERE / "spans" / "spans.json").read_text("utf-8"))
CASES = [(family, case) for family, cases in REFERENCES.items() for case in cases]
USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
TURNS = [{"role": "system", "content": "S"}, USER, ANSWER, {"role": "user", "content": "Bye"},
         {"role": "assistant", "content": "So long"}]


@pytest.fixture(scope="module")
def tiny():
  return load_tokenizer(HERE / "tiny")


def make(tokenizer, template="chatml", add_eos=True, add_bos=True, **options):
  config = defaults()
  config.tokenizer.update(add_eos=add_eos, add_bos=add_bos)
  config.chat.update(template=template, **options)
  return ChatEncoder(config, tokenizer)


def encode(encoder, *rows):
  return encoder.encode([Record("a.jsonl", f"a.jsonl:{i + 1}", row) for i, row in enumerate(rows)])


def parts(encoded, tokenizer):
  """[(weight, text)] of runs of tokens with one weight."""
  weights = np.ones(len(encoded.ids)) if encoded.weights is None else encoded.weights
  cuts = [0, *(np.flatnonzero(np.diff(weights)) + 1), len(weights)]
  return [(float(weights[a]), tokenizer.decode(encoded.ids[a:b], skip_special=False))
          for a, b in zip(cuts, cuts[1:], strict=False)]


def trained(encoder, tokenizer, row):
  return [[text for weight, text in parts(e, tokenizer) if weight] for e in encode(encoder, row)]


@pytest.mark.parametrize("family, case", CASES)
def test_ids_and_weights_equal_the_references(family, case):
  """I13: ids are those of transformers, weights those between the markers of the format."""
  tokenizer = load_tokenizer(HERE / "spans" / family)
  found = encode(make(tokenizer, family), REFERENCES[family][case]["row"])
  expected = REFERENCES[family][case]["examples"]
  assert len(found) == len(expected) > 0
  for example, reference in zip(found, expected, strict=True):
    assert example.ids.tolist() == reference["ids"]
    assert example.weights.tolist() == reference["weights"]
    assert 0 < sum(reference["weights"]) < len(reference["weights"])


def test_the_references_cover_what_they_should():
  assert set(REFERENCES) == {"chatml", "llama3", "qwen3", "gemma", "mistral"}
  rows = [case["row"] for cases in REFERENCES.values() for case in cases.values()]
  assert sum("tools" in row for row in rows) >= 6 and any("chat_template_kwargs" in row for row in rows)
  assert any(len(case["examples"]) == 2 for case in REFERENCES["qwen3"].values())


@pytest.mark.parametrize("family", ["gemma", "mistral", "chatml"])
def test_the_end_is_trained_though_padding_has_its_id(family):
  """T7: weights do not come from ids, so that a model learns to stop even where EOS is the padding."""
  tokenizer = load_tokenizer(HERE / "spans" / family)
  encoder = make(tokenizer, family)
  (chat,) = encode(encoder, {"messages": [USER, ANSWER]})
  assert chat.ids[chat.weights > 0][-1] in encoder.stop_ids
  (plain,) = encode(encoder, {"prompt": "Question", "completion": "Hello"})
  assert plain.ids[-1] == tokenizer.eos_id and plain.weights[-1] == 1
  assert family == "chatml" or tokenizer.pad_id == tokenizer.eos_id


@pytest.mark.parametrize("family", ["llama3", "gemma", "mistral"])
def test_there_is_one_bos(family):
  """T9: at the start, for chats, pairs and texts, and none where a text says so."""
  tokenizer = load_tokenizer(HERE / "spans" / family)
  bos = tokenizer.named_tokens["bos_token"]
  rows = [{"messages": [{"role": "user", "content": f"Hi {bos}"}, {**ANSWER, "content": f"{bos}a"}]},
          {"prompt": f"{bos} a", "completion": f"{bos} b"}, {"text": f"a {bos}"}]
  for example in encode(make(tokenizer, family), *rows):
    assert np.flatnonzero(example.ids == tokenizer.bos_id).tolist() == [0]
  without = encode(make(tokenizer, family, add_bos=False), *rows)
  assert [tokenizer.bos_id in e.ids for e in without] == [True, False, False]  # a chat's is the template's business


def test_a_second_bos_is_an_error(tiny, tmp_path):
  """T9"""
  (tmp_path / "t.jinja").write_text("{{ bos_token }}" + (TEMPLATES / "chatml.jinja").read_text("utf-8"))
  with pytest.raises(DataError, match=r"a\.jsonl:1: BOS stands twice at the place 0 of its \d+ tokens.*t\.jinja"):
    encode(make(tiny, str(tmp_path / "t.jinja")), {"messages": [USER, ANSWER]})
  with pytest.raises(DataError, match=r"prompt: BOS stands twice"):
    config = defaults()
    config.chat.template = str(tmp_path / "t.jinja")
    Prompter(config, tiny).messages([USER])


def test_bos_at_every_turn_is_right(tiny, tmp_path):
  """Llama 2's and Seed-OSS's form: only a BOS doubled in one place is a mistake."""
  (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ bos_token + m.role + '\\n' + m.content + eos_token }}"
                                    "{% endfor %}{% if add_generation_prompt %}{{ bos_token }}assistant\n{% endif %}")
  (example,) = encode(make(tiny, str(tmp_path / "t.jinja")), {"messages": TURNS})
  assert (example.ids == tiny.bos_id).sum() == len(TURNS)
  assert [text for weight, text in parts(example, tiny) if weight] == ["Hello<|im_end|>", "So long<|im_end|>"]


@pytest.mark.parametrize("options, expected", [
    ({}, ["Hello<|im_end|>", "So long<|im_end|>"]),
    ({"train_on": "assistant"}, ["Hello<|im_end|>", "So long<|im_end|>"]),
    ({"train_on": "completion"}, ["So long<|im_end|>"]),
    ({"train_on": "last_assistant"}, ["So long<|im_end|>"]),
    ({"roles": ("user",)}, ["Hi<|im_end|>", "Bye<|im_end|>"]),
    ({"roles": ("user", "assistant")}, ["Hi<|im_end|>", "Hello<|im_end|>", "Bye<|im_end|>", "So long<|im_end|>"])])
def test_what_is_trained_of_messages(tiny, options, expected):
  assert trained(make(tiny, **options), tiny, {"messages": TURNS}) == [expected]


def test_all_trains_every_token(tiny):
  whole, weighted = encode(make(tiny, train_on="all"), {"messages": TURNS}, {
      "messages": [{**TURNS[0], "weight": 2}, *TURNS[1:4], {**TURNS[4], "weight": 0}]})
  assert whole.weights is None
  assert [w for w, _ in parts(weighted, tiny)] == [1, 2, 1, 0, 1]
  assert [text for w, text in parts(weighted, tiny) if w != 1] == ["S<|im_end|>", "So long<|im_end|>"]


def test_weights_of_messages_multiply(tiny):
  messages = [TURNS[0], {**USER, "weight": 7}, {**ANSWER, "weight": 0.5}, TURNS[3], {**TURNS[4], "weight": 0}]
  (example,) = encode(make(tiny), {"messages": messages})
  assert [part for part in parts(example, tiny) if part[0]] == [(0.5, "Hello<|im_end|>")]
  assert example.weights.dtype == np.float32 and example.ids.dtype == np.int32


def test_a_completion_of_messages_is_trained_and_its_prompt_is_not(tiny):
  row = {"prompt": TURNS[:4], "completion": TURNS[4:]}
  assert trained(make(tiny), tiny, row) == [["So long<|im_end|>"]]
  assert trained(make(tiny, train_on="assistant"), tiny, row) == [["Hello<|im_end|>", "So long<|im_end|>"]]


def test_an_instruction_is_a_conversation(tiny):
  row = {"instruction": "Add", "input": "1, 2", "output": "3"}
  assert parts(encode(make(tiny), row)[0], tiny) == [
      (0, "<|begin|><|im_start|>user\nAdd\n\n1, 2<|im_end|>\n<|im_start|>assistant\n"), (1, "3<|im_end|>"), (0, "\n")]


def test_strings_are_tokenised_as_one_text(tiny):
  """T11: as TRL does it, without a template; special tokens in them are text. What a token of both has is trained."""
  (example,) = encode(make(tiny, None), {"prompt": "<|im_end|>H", "completion": "i<|im_end|>"})
  assert parts(example, tiny) == [(0, "<|begin|><|im_end|>"), (1, "Hi<|im_end|><|im_end|>")]
  assert (example.ids == tiny.eos_id).sum() == 1
  assert example.ids.tolist() == [tiny.bos_id, *tiny.encode_batch(["<|im_end|>Hi<|im_end|>"])[0], tiny.eos_id]
  assert set(example.remarks) == {(ACROSS, "Hi"), (LITERAL, "<|im_end|>")}
  row = {"prompt": "a", "completion": "b"}
  assert trained(make(tiny, None, train_on="all"), tiny, row) == [["<|begin|>ab<|im_end|>"]]
  assert trained(make(tiny, None, roles=("user",)), tiny, row) == [["a"]]
  assert trained(make(tiny, None, add_eos=False), tiny, {**row, "prompt": "xyz"}) == [["b"]]


def test_texts_are_encoded_as_for_strategy_seq(tiny):
  config = defaults()
  config.tokenizer.add_bos = True
  seq = make_encoder(config, tiny, learns="texts")
  for text in ("Hi there <|im_end|>", "日本 role\n"):
    (found,), (expected,) = encode(make(tiny, None), {"text": text}), encode(seq, {"text": text})
    np.testing.assert_array_equal(found.ids, expected.ids)
    assert found.weights is None
  mistral = load_tokenizer(HERE / "spans" / "mistral")  # writes a space before the first word
  pretraining = make_encoder(config, mistral, learns="texts")
  (found,), (expected,) = encode(make(mistral), {"text": "Hi"}), encode(pretraining, {"text": "Hi"})
  np.testing.assert_array_equal(found.ids, expected.ids)


def test_rewritten_history(tiny):
  """T11b: the policy is the config's; no turn is trained twice."""
  row = {"messages": [USER, {**ANSWER, "reasoning_content": "1"}, TURNS[3], {**TURNS[4], "reasoning_content": "2"}]}
  first, second = "<think>\n1\n</think>\n\nHello<|im_end|>", "<think>\n2\n</think>\n\nSo long<|im_end|>"
  assert trained(make(tiny, "qwen3"), tiny, row) == [[first], [second]]
  assert trained(make(tiny, "qwen3", on_rewritten_history="last"), tiny, row) == [[second]]
  assert trained(make(tiny, "qwen3", train_on="last_assistant"), tiny, row) == [[second]]
  with pytest.raises(DataError, match=r"a\.jsonl:1: messages\[1\] is rendered differently"):
    encode(make(tiny, "qwen3", on_rewritten_history="error"), row)


def test_template_and_stop_ids_can_be_kept_with_the_model(tiny):
  """T11c: what was trained is what export writes: the template's text and every id that ends a turn."""
  encoder = make(tiny, "llama3")
  assert encoder.template.source == (TEMPLATES / "llama3.jinja").read_text("utf-8")
  (example,) = encode(encoder, {"messages": [USER, ANSWER]})
  assert encoder.stop_ids == (tiny.eos_id, example.ids[example.weights > 0][-1])


def test_the_tokenizers_own_template_is_used(tmp_path):
  """T11c: also from the copy that a workdir keeps, and the same ids either way."""
  folder = tmp_path / "hf"
  folder.mkdir()
  for name in ("tokenizer.json", "tokenizer_config.json"):
    (folder / name).write_bytes((HERE / "tiny" / name).read_bytes())
  (folder / "chat_template.jinja").write_bytes((TEMPLATES / "chatml.jinja").read_bytes())
  tokenizer = load_tokenizer(folder)
  tokenizer.save(tmp_path / "workdir" / "tokenizer.json")
  kept = load_tokenizer(tmp_path / "workdir")
  encoders = [make(tokenizer, None), make(kept, None), make(tokenizer, "chatml")]
  found = [encode(encoder, {"messages": TURNS})[0] for encoder in encoders]
  for other in found[1:]:
    np.testing.assert_array_equal(found[0].ids, other.ids)
  assert len({encoder.fingerprint for encoder in encoders}) == 1


def test_no_template_is_an_error_only_for_conversations(tiny):
  encoder = make(tiny, None)
  assert encode(encoder, {"text": "a"})
  with pytest.raises(ConfigError, match=r"a\.jsonl:1 is a conversation, but the tokenizer has no .*chatml"):
    encode(encoder, {"messages": TURNS})


def test_nothing_to_train_is_said(tiny):
  rows = [{"messages": [USER]}, {"messages": [USER, {**ANSWER, "weight": 0, "content": ""}]}, {"messages": TURNS}]
  found = encode(make(tiny), *rows)
  assert found[:2] == [NOTHING_TO_TRAIN] * 2 and found[2].weights.any()


BAD = {
    "empty answer": ({"messages": [USER, {**ANSWER, "content": " \n"}]}, {}, r"messages\[1\]\.content is empty"),
    "empty completion": ({"prompt": "a", "completion": ""}, {}, r"completion is empty"),
    "empty text": ({"text": " "}, {}, r"text is empty"),
    "refused": ({"messages": [ANSWER, USER]}, {"template": "gemma"}, r"gemma\.jinja:\d+: the template refuses"),
    "text without turns": ({"text": "a"}, {"train_on": "assistant"}, r"a text has no turns.*'assistant'"),
    "text without roles": ({"text": "a"}, {"roles": ("user",)}, r"a text has no turns.*chat\.roles=\['user'\]"),
    "unknown to the template": ({"messages": [{"role": "developer", "content": "x"}, USER, ANSWER]},
                                {"template": "qwen3"}, r"messages\[0\], of the role 'developer', is left out"),
    "tools unknown to it": ({"messages": [USER, ANSWER], "tools": [{"name": "Hi"}]}, {}, r"the tool 'Hi' is left out"),
    "noncharacter": ({"messages": [USER, {**ANSWER, "content": "\ufdd0"}]}, {}, r"U\+FDD0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_named(tiny, name):
  row, options, message = BAD[name]
  with pytest.raises(DataError, match=rf"^a\.jsonl:2: .*{message}"):
    encode(make(tiny, **options), {"prompt": "fine", "completion": "fine"}, row)


def test_a_completion_that_cannot_end_is_an_error(tmp_path):
  (tmp_path / "tokenizer.json").write_bytes((HERE / "tiny" / "tokenizer.json").read_bytes())
  tokenizer = load_tokenizer(tmp_path)
  with pytest.raises(DataError, match="no EOS to end this completion with.*add_eos=False"):
    encode(make(tokenizer), {"prompt": "a", "completion": "b"})


@pytest.mark.parametrize("options, message", [
    ({"train_on": "answer"}, "chat.train_on is 'answer'; allowed: auto, completion"),
    ({"on_rewritten_history": "keep"}, "chat.on_rewritten_history is 'keep'; allowed: split, last, error"),
    ({"template": "chat"}, "chat.template is 'chat'; allowed: chatml, gemma, llama3, mistral, plain, qwen3, or"),
    ({"template": "no.jinja"}, "chat.template: 'no.jinja' does not exist"),
    ({"date": "today"}, "chat.date is 'today'"),
    ({"fields": (("dialogue", "messages"),)}, "chat.fields: 'dialogue' is no name of ours; names are messages"),
    ({"fields": ("messages",)}, "chat.fields has 'messages'; expected pairs"),
    ({"fields": (("text", "a"), ("text", "b"))}, "'text' is named twice"),
    ({"roles": ("assistant", 1)}, "chat.roles is ('assistant', 1); expected names of roles"),
    ({"roles": ("tool",), "train_on": "all"}, "chat.roles and chat.train_on='all' are both set")])
def test_bad_options_are_named(tiny, options, message):
  with pytest.raises(ConfigError, match=re.escape(message)):
    make(tiny, **options)


def test_the_fingerprint_covers_all_that_decides(tiny):
  variants = [{}, {"template": "plain"}, {"train_on": "all"}, {"roles": ("user",)}, {"on_rewritten_history": "last"},
              {"date": "2025-01-02"}, {"fields": (("text", "a"),)}, {"add_eos": False}, {"add_bos": False}]
  prints = [make(tiny, **v).fingerprint for v in variants] + [make(BytesTokenizer()).fingerprint]
  assert len(set(prints)) == len(prints)
  assert make(tiny).fingerprint == prints[0]


def test_texts_and_shapes_without_a_tokenizer():
  encoder = make(None)
  call = {"role": "assistant", "reasoning": "hm", "tool_calls": [{"name": "f", "arguments": {"x": "ü"}}]}
  rows = [({"messages": [USER, call]}, ["Hi", "hm", "", '{"name": "f", "arguments": {"x": "ü"}}'], "messages"),
          ({"conversations": [USER]}, ["Hi"], "conversations, ends with the user"),
          ({"prompt": "a", "completion": "b"}, ["a", "b"], "prompt/completion"), ({"text": "c"}, ["c"], "text")]
  for fields, texts, shape in rows:
    record = Record("a", "a:1", fields)
    assert list(encoder.texts(record)) == texts and encoder.describe(record) == shape


@pytest.mark.parametrize("name", template_names())
def test_every_template_trains_a_tokenizer_that_has_its_tokens(name):
  """Each ends a turn so that a model learns to stop, and can be rendered for an answer."""
  folder = HERE / "spans" / name
  tokenizer = load_tokenizer(folder) if folder.exists() else BytesTokenizer()
  encoder = make(tokenizer, name)
  (example,) = encode(encoder, {"messages": [USER, ANSWER]})
  prompt = encoder.template.render([USER], add_generation_prompt=True)
  whole = encoder.template.render([USER, ANSWER])
  assert whole.startswith(prompt) and "Hello" in whole[len(prompt):]
  assert example.ids[example.weights > 0][-1] in encoder.stop_ids


def test_the_documentation_does_what_it_says(monkeypatch):
  monkeypatch.chdir(ROOT)
  text = (ROOT / "docs" / "sft.md").read_text("utf-8")
  blocks = "\n".join(re.findall(r"^```pycon\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
  test = doctest.DocTestParser().get_doctest(blocks, {}, "docs/sft.md", None, 0)
  assert len(test.examples) >= 30
  said = []
  doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS).run(test, out=said.append)
  assert not said, "".join(said)


def test_a_finder_of_turns_needs_a_template(tiny):
  with pytest.raises(ConfigError, match="^the data has conversations, but the tokenizer has no chat template"):
    _ = make(tiny, None).finder
  finder = make(tiny).finder
  assert finder.template.where and make(tiny).finder is not finder


def test_images_of_a_text_that_cannot_be_placed_name_the_row(tiny):
  encoder = make(tiny)
  encoder.images, asked = SimpleNamespace(), []

  def in_order(text, refs):
    asked.append((text, refs))
    if text == "bad":
      raise DataError("2 markers for 1 image")
    return refs[::-1]

  encoder.images.in_order = in_order
  assert encoder._in_order(Plain("", "p", "c", (1, 2)), "a.jsonl:3") == (2, 1)
  assert encoder._in_order(Plain("", None, "c", (1,)), "a.jsonl:3") == (1,)
  assert asked == [("p", (1, 2)), ("c", (1,))]
  with pytest.raises(DataError, match="^a.jsonl:3: 2 markers for 1 image$"):
    encoder._in_order(Plain("", "bad", "c", (1,)), "a.jsonl:3")
