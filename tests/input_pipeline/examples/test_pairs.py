"""Preferences and labelled answers: what each row becomes, and every row that is refused."""

import doctest
import re

import numpy as np
import pytest

from input_pipeline.examples import schema_pairs
from input_pipeline.examples.pairs import AnswerEncoder, LabelledEncoder, PairEncoder
from input_pipeline.examples.registry import make_encoder
from input_pipeline.examples.roles import ABSENT, CHOSEN, DESIRABLE, MISMATCHED, REJECTED, UNDESIRABLE
from input_pipeline.sources.readers import Record
from input_pipeline.tokenizer.tokenizer import BytesTokenizer, load_tokenizer
from tests.tiny import ROOT
from trainer.config import defaults
from trainer.config import strategy as section
from trainer.errors import ConfigError, DataError
from trainer.strategies import learns

TINY = load_tokenizer(ROOT / "tests" / "input_pipeline" / "references" / "tiny")
USER, GOOD, BAD = (dict(role=r, content=c) for r, c in (("user", "Hi"), ("assistant", "Hello"), ("assistant", "Go")))
MORE = {"role": "user", "content": "Why?"}


def make(strategy="dpo", tokenizer=TINY, loss=None, **chat):
  config = defaults()
  config.strategy = section(strategy)
  if loss:
    config.strategy.loss = loss
  config.chat.update({"template": "chatml", **chat})
  config.tokenizer.add_bos = True
  return make_encoder(config, tokenizer, learns=learns(config))


def records(*rows):
  return [Record("a.jsonl", f"a.jsonl:{i + 1}", row) for i, row in enumerate(rows)]


def sides(encoded, tokenizer=TINY):
  """[(untrained text, trained text)] of the parts of a document; what is trained must be in one piece at the end, but
  for what a template writes behind it."""
  found, begin = [], 0
  for length in encoded.parts:
    ids, weights = encoded.ids[begin:begin + length], encoded.weights[begin:begin + length]
    at = np.flatnonzero(weights)
    assert set(weights.tolist()) <= {0.0, 1.0} and at.tolist() == list(range(at[0], at[-1] + 1))
    found.append(tuple(tokenizer.decode(part, skip_special=False) for part in (ids[:at[0]], ids[at])))
    begin += length
  assert begin == len(encoded.ids)
  return found


CHAT = "<|begin|><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("row", [
    {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    {"chosen": [USER, GOOD], "rejected": [USER, BAD]},  # the prompt is implied
    {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},  # whole conversations
    {"prompt": "Hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD | {"content": [{"type": "text", "text": "Go"}]}]},
], ids=["prompt", "implicit", "whole", "whole, prompt a string", "parts"])
def test_messages(row):
  (found,) = make().encode(records(row))
  assert sides(found) == [(CHAT, "Hello<|im_end|>"), (CHAT, "Go<|im_end|>")]
  assert found.roles == (CHOSEN, REJECTED) and sum(found.parts) == len(found.ids)


def test_a_side_is_what_fine_tuning_makes_of_it():
  """Ids and weights of each part are those of the same prompt and completion under sft."""
  tuned = make("sft").encode(records(*({"prompt": [USER], "completion": [c]} for c in (GOOD, BAD))))
  (found,) = make().encode(records({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}))
  assert found.ids.tolist() == [*tuned[0].ids, *tuned[1].ids]
  assert found.weights.tolist() == [*tuned[0].weights, *tuned[1].weights]
  assert (found.ids == TINY.bos_id).sum() == 2 and found.ids[0] == found.ids[found.parts[0]] == TINY.bos_id


@pytest.mark.parametrize("prompt, answer, strings", [("Hi", " Hello", True), ("Hi", "", True),
                                                   ([USER], [GOOD], False), ([USER], [GOOD | {"content": ""}], False)])
def test_answers_of_a_model_are_whole_texts_and_may_be_empty(prompt, answer, strings):
  config = defaults()
  config.chat.template, config.tokenizer.add_bos = "chatml", True
  config.strategy = section("reward")
  ids = AnswerEncoder(config, TINY).ids(prompt, answer, {"other": 1}, "here")
  said = answer if isinstance(answer, str) else answer[0]["content"]
  wanted = f"<|begin|>{prompt}{said}" if strings else f"{CHAT}{said}<|im_end|>"
  assert TINY.decode(ids, skip_special=False).startswith(wanted)


def test_later_turns_are_trained_and_shared_ones_are_not():
  row = {"chosen": [USER, GOOD, MORE, GOOD], "rejected": [USER, GOOD, MORE, BAD]}
  (found,) = make().encode(records(row))
  prompt = CHAT + "Hello<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
  assert sides(found) == [(prompt, "Hello<|im_end|>"), (prompt, "Go<|im_end|>")]
  (found,) = make().encode(records({"chosen": [USER, GOOD, MORE, GOOD], "rejected": [USER, BAD]}))
  weights = found.weights[:found.parts[0]]
  trained = TINY.decode(found.ids[:found.parts[0]][weights > 0], skip_special=False)
  assert trained == "Hello<|im_end|>Hello<|im_end|>"
  row["chosen"][1] = GOOD | {"weight": 0}
  row["rejected"] = [USER, BAD]
  (found,) = make().encode(records(row))
  assert sides(found)[0][1] == "Hello<|im_end|>"  # the second one alone


def test_strings_are_joined_as_they_stand_with_one_bos_and_eos():
  rows = [{"prompt": "Q:", "chosen": " yes <|im_end|>", "rejected": " no"},
          {"chosen": "Q: is it\n yes or no", "rejected": "Q: is it\n yesterday"}]
  found = make(tokenizer=BytesTokenizer(), template=None).encode(records(*rows))
  begin, end = [256], [257]
  assert found[0].ids.tolist() == [
      *begin, *b"Q:", *b" yes <|im_end|>", *end, *begin, *b"Q:", *b" no", *end]
  assert found[0].weights.tolist() == [0] * 3 + [1] * 16 + [0] * 3 + [1] * 4
  assert found[1].ids[:found[1].parts[0]].tolist() == [*begin, *b"Q: is it\n yes or no", *end]
  assert found[1].weights.tolist() == [0] * 9 + [1] * 12 + [0] * 9 + [1] * 12
  (special,) = make().encode(records(rows[0]))  # what looks like the end of a turn is not one
  assert (special.ids == TINY.encode_rendered("<|im_end|>")[0]).sum() == 2


def test_columns_of_other_names_and_beside_the_messages():
  encoder = make(fields=(("prompt", "question"), ("chosen", "better"), ("rejected", "worse")))
  (found,) = encoder.encode(records({"question": "Q", "better": " a", "worse": " b", "score": 3}))
  assert [text for _, text in sides(found)] == [" a<|im_end|>", " b<|im_end|>"]
  (found,) = make().encode(records({"system": "S", "chosen": [USER, GOOD], "rejected": [USER, BAD]}))
  assert sides(found)[1][0].startswith("<|begin|><|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi")


PAIR = {"prompt": "Q", "chosen": " a", "rejected": " b"}
CHATS = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}


@pytest.mark.parametrize("row, said", [
    ({"prompt": "Q", "chosen": " a"}, "no 'rejected' (or null); its columns are 'prompt', 'chosen'. A preference is"),
    (PAIR | {"chosen": None}, "no 'chosen' (or null)"),
    (PAIR | {"chosen": " \n"}, "chosen is empty. Remove the row"),
    (PAIR | {"rejected": ""}, "rejected is empty"),
    (PAIR | {"rejected": " a"}, "chosen equals rejected: there is nothing to prefer"),
    (PAIR | {"rejected": 3}, "chosen is a str and rejected a int; they are two strings or two lists of messages"),
    (PAIR | {"rejected": [BAD]}, "chosen is a str and rejected a list"),
    (PAIR | {"prompt": [USER]}, "prompt is [{'role': 'user'"),
    ({"chosen": "yes it is", "rejected": "no"}, "chosen and rejected begin differently ('yes it is', 'no'), and"),
    ({"chosen": "A: yes", "rejected": "A: "}, "rejected is empty"),
    ({"chosen": "A: yes", "rejected": "A: yes"}, "chosen equals rejected"),
    ({"chosen": [GOOD], "rejected": [GOOD]}, "chosen equals rejected"),
    (CHATS | {"rejected": [USER, GOOD | {"content": [{"type": "text", "text": "Hello"}]}]}, "chosen equals rejected"),
    (CHATS | {"rejected": [MORE, BAD]}, "the prompts differ: chosen[0] is not rejected[0], and there is no 'prompt'"),
    (CHATS | {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD, MORE, BAD]},
     "the prompts differ: where the sides part, chosen goes on with what the user says ('Hi')"),
    (CHATS | {"prompt": [MORE]}, "the prompts differ: where the sides part, chosen goes on with what the user says"),
    (CHATS | {"prompt": [USER], "rejected": [MORE, BAD]}, "the prompts differ: where the sides part, rejected goes on"),
    (CHATS | {"prompt": "Why?"}, "prompt is a string ('Why?') that no message of the user says"),
    (CHATS | {"chosen": [USER, GOOD, MORE, BAD], "rejected": [USER, GOOD]}, "rejected says nothing beyond the prompt"),
    (CHATS | {"chosen": []}, "chosen is an empty list"),
    (CHATS | {"chosen": [USER, GOOD, MORE]}, "chosen ends with what the user says; expected the assistant"),
    (CHATS | {"chosen": [USER, GOOD | {"content": " "}]}, "chosen: messages[1].content is empty"),
    (CHATS | {"chosen": [USER, GOOD | {"weight": 0}]}, "chosen: no token of it is trained"),
    (CHATS | {"chosen": [USER, GOOD | {"weight": 0.5}]}, "a message of chosen has the weight 0.5"),
    (CHATS | {"chosen": [USER, {"role": "assistant"}]}, "chosen[1] has no 'content'"),
    (CHATS | {"images": ["x"]}, "has images"),
    (CHATS | {"chosen": [USER, GOOD | {"content": "Hello "}], "rejected": [USER, GOOD]}, None),
])
def test_rows_that_are_refused(row, said):
  if said is None:  # the template keeps the space: they differ
    assert len(make().encode(records(row))) == 1
    return
  with pytest.raises(DataError, match=re.escape(f"a.jsonl:2: {said}")):
    make().encode(records(PAIR, row))


def test_sides_that_become_the_same_tokens_are_refused(tmp_path):
  stripping = tmp_path / "stripping.jinja"
  stripping.write_text("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.strip() }}<|im_end|>\n"
                       "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
  row = CHATS | {"rejected": [USER, GOOD | {"content": "Hello "}]}
  with pytest.raises(DataError, match="a.jsonl:1: both sides have the same tokens"):
    make(template=str(stripping)).encode(records(row))


def test_a_history_that_is_rewritten_needs_a_decision():
  thought = GOOD | {"reasoning_content": "A guest."}
  row = {"chosen": [USER, thought, MORE, thought], "rejected": [USER, BAD]}
  with pytest.raises(DataError, match="a.jsonl:1: chosen: the template renders earlier turns of it differently"):
    make(template="qwen3").encode(records(row))
  (found,) = make(template="qwen3", on_rewritten_history="last").encode(records(row))
  assert sides(found)[0][1].endswith("Hello<|im_end|>") and sides(found)[0][0].count("Hello") == 1


@pytest.mark.parametrize("options", [dict(train_on="all"), dict(train_on="assistant"), dict(roles=("user",))])
@pytest.mark.parametrize("strategy", ["dpo", "kto"])
def test_only_completions_are_trained(strategy, options):
  with pytest.raises(ConfigError, match=f"strategy '{strategy}' trains completions. Leave chat.roles empty"):
    make(strategy, **options)


def test_texts_and_descriptions():
  encoder = make()
  rows = records(PAIR, {k: v for k, v in PAIR.items() if k != "prompt"} | {"chosen": "Q a", "rejected": "Q b"}, CHATS,
                 CHATS | {"prompt": [USER]})
  assert [list(encoder.texts(r)) for r in rows] == [["Q", " a", " b"], ["Q", " a", " b"], *[["Hi", "Hello", "Go"]] * 2]
  assert [encoder.describe(r) for r in rows] == [
      "pairs of strings", "pairs of strings, implicit prompt", "pairs of messages, implicit prompt",
      "pairs of messages"]
  labelled = make("kto")
  rows = records(*({"prompt": p, "completion": c, "label": label} for p, c, label in
                   (("Q", " a", True), ([USER], [BAD], False))))
  assert [list(labelled.texts(r)) for r in rows] == [["Q", " a"], ["Hi", "Go"]]
  assert [labelled.describe(r) for r in rows] == ["strings, wanted", "messages, not wanted"]


def test_fingerprints_name_all_that_decides():
  prints = {make(s, **o).fingerprint for s, o in (
      ("dpo", {}), ("kto", {}), ("kto", dict(loss="apo_zero_unpaired")), ("sft", {}), ("dpo", dict(template="gemma")),
      ("dpo", dict(fields=(("chosen", "better"),))))}
  assert len(prints) == 6 and make().fingerprint == make().fingerprint


LABELLED = [{"prompt": "Q", "completion": " a", "label": True}, {"prompt": [USER], "completion": [BAD], "label": False},
            {"prompt": "P", "completion": " cc", "label": False}]


def test_a_table_of_texts_says_what_is_wanted_in_words():
  made = make("kto")
  rows = records(*(LABELLED[0] | {"label": label} for label in ("true", "False", " TRUE ", False)))
  assert [made.describe(r) for r in rows] == ["strings, wanted", "strings, not wanted"] * 2


def test_labelled_answers():
  encoder = make("kto", loss="apo_zero_unpaired")
  found = encoder.encode(records(*LABELLED))
  assert [e.roles for e in found] == [(DESIRABLE,), (UNDESIRABLE,), (UNDESIRABLE,)] and encoder.with_next is None
  assert [s for e in found for s in sides(e)] == [("<|begin|>Q", " a<|im_end|>"), (CHAT, "Go<|im_end|>"),
                                                ("<|begin|>P", " cc<|im_end|>")]


def test_a_mismatched_completion_is_that_of_the_next_example():
  encoder = make("kto")
  found = encoder.encode(records(*LABELLED))
  joined = encoder.with_next(found[0], found[2])
  assert sides(joined) == [("<|begin|>Q", " a<|im_end|>"), ("<|begin|>Q", " cc<|im_end|>")]
  assert joined.roles == (DESIRABLE, MISMATCHED)
  joined = encoder.with_next(found[1], found[0])
  assert sides(joined) == [(CHAT, "Go<|im_end|>"), (CHAT, " a<|im_end|>")]
  assert joined.roles == (UNDESIRABLE, MISMATCHED)
  alone = encoder.with_next(found[0], None)
  assert alone.parts == (len(found[0].ids), 0) and alone.roles == (DESIRABLE, ABSENT)


@pytest.mark.parametrize("row, said", [
    (LABELLED[0] | {"label": 1}, "label is 1 (int); expected true for an answer that is wanted, false"),
    (LABELLED[0] | {"label": "good"}, "label is 'good' (str)"),
    (LABELLED[0] | {"label": None}, "no 'label' (or null)"),
    (LABELLED[0] | {"completion": ""}, "completion is empty"),
    (LABELLED[0] | {"prompt": [USER]}, "completion is ' a' (str); prompt and completion are two strings"),
    (LABELLED[1] | {"completion": [BAD, MORE]}, "completion ends with what the user says"),
    (LABELLED[1] | {"completion": [BAD | {"weight": 0}]}, "completion: no token of it is trained"),
    ({"prompt": "Q", "label": True}, "no 'completion' (or null); its columns are 'prompt', 'label'. An example is"),
])
def test_labelled_rows_that_are_refused(row, said):
  with pytest.raises(DataError, match=re.escape(f"a.jsonl:2: {said}")):
    make("kto").encode(records(LABELLED[0], row))


def test_the_encoders_are_those_of_their_strategies():
  assert type(make()) is PairEncoder and type(make("kto")) is LabelledEncoder
  assert doctest.testmod(schema_pairs).attempted == 1 and doctest.testmod(schema_pairs).failed == 0


def test_the_documentation_shows_what_happens():
  result = doctest.testfile(str(ROOT / "docs" / "dpo.md"), module_relative=False,
                            optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
  assert result.attempted > 10 and result.failed == 0


@pytest.mark.parametrize("loaded, found", [
    (["", "bad image"], "bad image"), (["first bad", "second bad"], "first bad"), (["only bad", ""], "only bad")])
def test_a_pair_is_dropped_with_the_image_of_either_side(loaded, found):
  """And what is beside it keeps its own sides."""
  encoder, given = make(), iter(["", "", *loaded, "", ""])
  encoder._chat.load = lambda refs: next(given) or []
  rows = records(*({"prompt": "Q", "chosen": f" {n} a", "rejected": f" {n} b"} for n in range(3)))
  first, dropped, last = encoder.encode(rows)
  assert dropped == found
  for number, pair in ((0, first), (2, last)):
    assert [trained.split() for _, trained in sides(pair)] == [
        [str(number), f"{side}<|im_end|>"] for side in "ab"]


def test_a_side_of_which_nothing_is_trained_names_its_row(monkeypatch):
  encoder = make()
  tokenize = encoder._chat.tokenize
  monkeypatch.setattr(encoder._chat, "tokenize", lambda *given: [
      (ids, weights * (n % 2 == 0), remarks) for n, (ids, weights, remarks) in enumerate(tokenize(*given))])
  with pytest.raises(DataError, match="^a.jsonl:1: rejected: no token of it is trained. Remove the row.$"):
    encoder.encode(records(PAIR))
