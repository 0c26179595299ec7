"""The stream of prompts: what a record asks, and which prompt is number k."""

import datetime
import json
from collections import Counter

import pytest

from input_pipeline import prompt_data
from input_pipeline.examples.prompts import Prompter
from input_pipeline.packing import permutation
from input_pipeline.prompt_data import make_prompt_data
from input_pipeline.sources.readers import Record
from input_pipeline.tokenizer.tokenizer import BytesTokenizer, load_tokenizer
from tests.tiny import ROOT
from trainer.config import defaults, source, strategy
from trainer.errors import ConfigError, DataError
from trainer.telemetry import terminal

TINY = load_tokenizer(ROOT / "tests" / "input_pipeline" / "references" / "tiny")
CHAT = "<|begin|><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def user(text):
  return {"role": "user", "content": text}


def said(text):
  return {"role": "assistant", "content": text}


def configured(template=None, **rollout):
  config = defaults()
  config.strategy = strategy("grpo")
  config.update(seq_len=64)
  config.chat.template = template
  config.rollout.update(dict(num_prompts=2, max_new_tokens=16) | rollout)
  return config


def write(folder, name, rows):
  path = folder / f"{name}.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return source(type="jsonl", path=str(path))


def make(tmp_path, tokenizer=None, config=None, **sources):
  """Prompts of {name: rows}."""
  config = config or configured()
  for name, rows in sources.items():
    config.input.sources[name] = write(tmp_path, name, rows)
  return make_prompt_data(config, tokenizer or BytesTokenizer())


def numbered(count, prefix=""):
  return [{"prompt": f"{prefix}{i}", "answer": i} for i in range(count)]


# ---------------------------------------------------------------------------------------------- what is asked


def asked(row, tokenizer=TINY, template="chatml", prompt_key=None, tools=(), **chat):
  config = configured(template)
  config.chat.update(chat)
  item = prompt_data._item(Record("a", "a.jsonl:3", row), Prompter(config, tokenizer), prompt_key, 0, tools)
  return item.prompt, item.content, item.columns


@pytest.mark.parametrize("row, options, columns", [
    ({"prompt": [user("Hi")], "answer": "4"}, {}, {"answer": "4"}),
    ({"prompt": [user("Hi")], "chosen": "a", "completion": [said("x")]}, {},
     {"chosen": "a", "completion": [said("x")]}),
    ({"messages": [user("Hi")], "n": 1}, {}, {"n": 1}),
    ({"messages": [user("Hi"), said("Hello")]}, {}, {"answer": "Hello"}),
    ({"messages": [user("Hi"), said("Hello")], "answer": "5"}, {}, {"answer": "5"}),
    ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]}, {}, {"answer": "Yo"}),
    ({"instruction": "Hi", "input": "", "output": "Yo"}, {}, {"output": "Yo"}),
    ({"question": "Hi", "answer": "#### 4"}, dict(prompt_key="question"), {"answer": "#### 4"}),
    ({"prompt": "Hi", "messages": [user("x")]}, dict(prompt_key="prompt"), {"messages": [user("x")]}),
    ({"turns": [user("Hi"), said("Yo")]}, dict(prompt_key="turns"), {"answer": "Yo"}),
    ({"q": [user("Hi")], "prompt_id": 3}, dict(fields=(("prompt", "q"),)), {"prompt_id": 3}),
], ids=lambda value: "-".join(value) if isinstance(value, dict) else None)
def test_conversations(row, options, columns):
  prompt, what, rest = asked(row, **options)
  assert TINY.decode(prompt.ids, skip_special=False) == CHAT and prompt.ids.tolist().count(TINY.bos_id) == 1
  assert what == [user("Hi")] and rest == columns and prompt.where == "a.jsonl:3"


@pytest.mark.parametrize("row, options, columns", [
    ({"prompt": "Hi", "answer": "4"}, {}, {"answer": "4"}),
    ({"prompts": "Hi"}, {}, {}),
    ({"question": "Hi", "answer": 4}, dict(prompt_key="question", template=None, tokenizer=BytesTokenizer()),
     {"answer": 4}),
])
def test_texts_to_continue(row, options, columns):
  """Without a template, and where no column is named that the user says: as in fine-tuning."""
  prompt, what, rest = asked(row, **options)
  tokenizer = options.get("tokenizer", TINY)
  assert tokenizer.decode(prompt.ids) == "Hi" and prompt.ids[0] == tokenizer.bos_id
  assert what == "Hi" and rest == columns


def test_a_text_begins_with_bos_only_where_the_tokenizer_is_to_write_it():
  config = configured()
  config.tokenizer.add_bos = False
  item = prompt_data._item(Record("a", "a", {"prompt": "Hi"}), Prompter(config, TINY), None, 0)
  assert item.prompt.ids.tolist() == TINY.encode_batch(["Hi"])[0].tolist()


def test_numbers_and_columns_that_json_lacks_are_strings():
  row = {"n": 12, "day": datetime.date(2025, 1, 2), "raw": b"\x01", "deep": {"x": [b"a"]}}
  prompt, what, rest = asked(row, BytesTokenizer(), None, "n")
  assert what == "12" and rest == {"day": "2025-01-02", "raw": "01", "deep": {"x": ["61"]}}
  assert prompt.ids.tolist() == [256, *b"12"]


def test_tools_and_a_system_message_stand_beside():
  tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
  row = {"question": "Hi", "system": "Be brief", "tools": [tool], "chat_template_kwargs": {"x": 1}, "answer": "4"}
  item = prompt_data._item(Record("a", "a", row), Prompter(configured("qwen3"), TINY), "question", 0)
  assert '"name": "add"' in item.prompt.text and item.content == [{"role": "system", "content": "Be brief"}, user("Hi")]
  assert item.tools == [tool] and item.variables == {"x": 1} and item.columns == {"answer": "4"}


SHOWS = """{% for m in messages %}{% if m.role in ROLES %}<|im_start|>{{ m.role }} {{ m.content }}
{%- for call in m.tool_calls or () %}{{ call.function.name }}({{ call.function.arguments.x }}){% endfor %}<|im_end|>
{%- endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"""


def template_of(folder, *roles):
  path = folder / "t.jinja"
  path.write_text(SHOWS.replace("ROLES", repr(list(roles))))
  return str(path)


@pytest.mark.parametrize("beside, left_out", [
    (dict(tools=[{"type": "function", "function": {"name": "add", "parameters": {}}}]), "the tool 'add' is"),
    (dict(system="Be brief"), "messages[0], of the role 'system', is"),
])
def test_what_a_template_hides_from_the_model_is_refused(beside, left_out, tmp_path):
  prompter = Prompter(configured(template_of(tmp_path, "user", "assistant")), TINY)
  with pytest.raises(DataError, match="t.jinja. Use a template that knows it") as refusal:
    prompt_data._item(Record("a", "a.jsonl:1", {"prompt": [user("Hi")], **beside}), prompter, None, 0)
  assert f"a.jsonl:1: {left_out} left out by" in str(refusal.value)


def test_roles_that_are_named_are_asked_too(tmp_path):
  config = configured(template_of(tmp_path, "user", "assistant", "ipython"))
  config.chat.roles = ("assistant", "ipython")
  item = prompt_data._item(Record("a", "a", {"prompt": [user("Hi"), {"role": "ipython", "content": "3"}]}),
                           Prompter(config, TINY), None, 0)
  assert item.prompt.text == "<|im_start|>user Hi<|im_end|><|im_start|>ipython 3<|im_end|><|im_start|>assistant "


def test_a_request_is_read_as_rows_are(tmp_path):
  config = configured(template_of(tmp_path, "user", "assistant", "tool"))
  config.chat.fields = (("messages", "dialogue"), ("role", "speaker"))  # of the run's rows, not of requests
  call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 4}'}}
  prompt = Prompter(config, TINY).request(dict(messages=[
      {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": None}, {"role": "assistant", "content": "",
      "tool_calls": [call]}, {"role": "tool", "content": "5"}], tools=None, chat_template_kwargs={}))
  assert prompt.text == ("<|im_start|>user Hi<|im_end|><|im_start|>assistant add(4)<|im_end|><|im_start|>tool 5"
                         "<|im_end|><|im_start|>assistant ")


@pytest.mark.parametrize("row, options, message", [
    ({"prompt": "a", "messages": [user("b")]}, {}, "prompt and messages may each be the prompt; its columns are "
     "'prompt', 'messages'. Say which it is with --config.rollout.prompt_key=prompt"),
    ({"text": "a"}, {}, "no prompt; its columns are 'text'. A prompt is in one of prompt, prompts, messages"),
    ({"a": "b"}, dict(prompt_key="q"), "no key 'q'; found 'a'. Set rollout.prompt_key"),
    ({"q": None}, dict(prompt_key="q"), "'q' is null; a prompt is a string or a list of messages"),
    ({"prompt": 3}, {}, "'prompt' is int; a prompt is"),
    ({"messages": "a"}, {}, "'messages' is str; a prompt is"),
    ({"prompt": [user("a"), said("b")]}, {}, "prompt ends with what the assistant says"),
    ({"messages": [said("b")]}, {}, "messages ends with what the assistant says"),
    ({"prompt": "", "x": 1}, dict(template=None, tokenizer=TINY), None),
    ({"prompt": [user("a")], "images": ["x"]}, {}, "has images"),
    ({"prompt": "a"}, dict(tools=[{"type": "function"}]), "is a text to be continued, which shows no rollout.tools"),
])
def test_records_that_ask_nothing(row, options, message):
  if message is None:  # BOS is a beginning
    assert asked(row, **options)[0].ids.tolist() == [TINY.bos_id]
    return
  with pytest.raises(DataError, match="^a.jsonl:3: .*") as error:
    asked(row, **options)
  assert message in str(error.value)


def test_a_conversation_needs_a_template(tmp_path):
  with pytest.raises(ConfigError, match="a.jsonl:1 is a conversation, but the tokenizer has no chat template"):
    make(tmp_path, a=[{"prompt": [user("Hi")]}])


# ---------------------------------------------------------------------------------------------- the stream


def texts(data, indices):
  return [data.item(i).content for i in indices]


def test_every_epoch_has_each_prompt_once_in_an_order_of_its_own(tmp_path):
  data = make(tmp_path, a=numbered(10))
  assert data.num_prompts == len(data) == 10 and data.num_items is None and data.source_names == ("a",)
  epochs = [texts(data, range(10 * e, 10 * e + 10)) for e in range(4)]
  assert all(sorted(epoch) == [str(i) for i in range(10)] for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs}) == 4
  assert data.epoch(25) == 2.5 and data.counters(25) == {"a": {"prompts": 25, "epoch": 2.5}}
  item = data.item(3)
  assert item.columns == {"answer": int(item.content)} and item.prompt.ids.tolist() == [256, *item.content.encode()]


def test_the_stream_is_a_function_of_seed_and_index(tmp_path):
  first, second = (make(tmp_path, a=numbered(10), b=numbered(4, "b")) for _ in range(2))
  assert first.fingerprint == second.fingerprint
  assert texts(first, range(40)) == list(reversed(texts(second, reversed(range(40)))))
  config = configured()
  config.seed = 1
  other = make(tmp_path, config=config, a=numbered(10), b=numbered(4, "b"))
  assert other.fingerprint != first.fingerprint and texts(other, range(10)) != texts(first, range(10))
  rows = numbered(10)
  rows[7]["answer"] = "another"
  assert make(tmp_path, a=rows, b=numbered(4, "b")).fingerprint != first.fingerprint
  config = configured()
  config.input.stop = "all"  # ends the stream and changes none of it
  ended = make(tmp_path, config=config, a=numbered(10), b=numbered(4, "b"))
  assert ended.fingerprint == first.fingerprint and texts(ended, range(10)) == texts(first, range(10))


def test_whatever_changes_a_prompt_or_its_place_changes_the_fingerprint(tmp_path):
  def fingerprint(weight=1.0, stages=(), names="ab", order=(0, 1, 2, 3), **beside):
    config = configured("chatml")
    config.input.weight_stages = stages
    some = {names[0]: [{"prompt": [user(f"{i}")], "answer": i} | beside for i in order], names[1]: numbered(4, "b")}
    for name, of_source in some.items():
      config.input.sources[name] = write(tmp_path, name, of_source)
    config.input.sources[names[1]].weight = weight
    return make_prompt_data(config, TINY).fingerprint

  found = [fingerprint(), fingerprint(weight=2.0), fingerprint(stages=((100, {"b": 2.0}),)),
           fingerprint(stages=((101, {"b": 2.0}),)), fingerprint(names="ac"), fingerprint(names="ba"),
           fingerprint(order=(1, 0, 2, 3)), fingerprint(note="x"), fingerprint(note="y"),
           fingerprint(chat_template_kwargs={"x": 1}), fingerprint(chat_template_kwargs={"x": 2})]
  assert len(set(found)) == len(found) and fingerprint() == found[0]


def test_each_source_has_an_order_of_its_own(tmp_path):
  with_text = [row | {"text": ""} for row in numbered(10, "b")]  # which is no column of a prompt
  config = configured()
  config.seed = 3
  data = make(tmp_path, config=config, a=numbered(10), b=with_text)
  items = [data.item(i) for i in range(20)]
  of_a, of_b = ([int(item.content.lstrip("b")) for item in items if item.source == s] for s in (0, 1))
  assert sorted(of_a) == sorted(of_b) == list(range(10)) and of_a != of_b
  assert [of_a, of_b] == [permutation(10, 3, name, "prompts", 0).tolist() for name in "ab"]  # for ever


def test_sources_are_mixed_by_their_weights_and_stages_count_prompts(tmp_path):
  config = configured()
  config.input.weight_stages = ((100, {"b": 3.0}),)
  data = make(tmp_path, config=config, a=numbered(10), b=numbered(6, "b"))
  sources = [data.item(i).source for i in range(200)]
  assert Counter(sources[:100]) == {0: 50, 1: 50} and Counter(sources[100:]) == {0: 25, 1: 75}
  assert all((data.item(i).content[0] == "b") == (sources[i] == 1) for i in range(200))
  assert data.counters(200) == {"a": {"prompts": 75, "epoch": 7.5}, "b": {"prompts": 125, "epoch": 125 / 6}}
  every = [item.content for item in data.every_item()]
  assert all(every[data.place(i)] == data.item(i).content for i in range(200))
  of_b = [data.item(i).content for i in range(200) if sources[i] == 1]
  assert all(len(set(of_b[k:k + 6])) == 6 for k in range(0, 120, 6))


def test_the_keys_of_a_source_without_weight_are_checked_and_no_prompt_of_it_is_read(tmp_path, caplog):
  config = configured()
  config.input.sources.b = source(type="jsonl", path=str(tmp_path / "nowhere"), weight=0.0)
  data = make(tmp_path, config=config, a=numbered(3), c=numbered(3, "c"))
  items = [data.item(index) for index in range(12)]
  assert {(item.source, item.content[0] == "c") for item in items} == {(0, False), (1, True)}
  assert data.source_names == ("a", "c") and "source 'b' has weight 0 throughout and is not used" in caplog.text
  config.input.sources.b.split = "test"
  with pytest.raises(ConfigError, match="input.sources.b: split 'test'"):
    make_prompt_data(config, BytesTokenizer())


@pytest.mark.parametrize("stop, source_name", [("first", "b"), ("all", "a")])
def test_the_stream_ends_where_the_config_says(tmp_path, stop, source_name):
  """When the smaller source has been seen once, or the larger one, too."""
  config = configured()
  config.input.stop = stop
  data = make(tmp_path, config=config, a=numbered(10), b=numbered(4, "b"))
  end = data.num_items
  assert data.counters(end)[source_name]["epoch"] == 1 > data.counters(end - 1)[source_name]["epoch"]
  assert data.epoch(10**6) == data.epoch(end) == end / 14
  data.item(end - 1)
  with pytest.raises(IndexError):
    data.item(end)


def test_what_is_left_out_is_counted(tmp_path, caplog):
  config = configured()
  config.input.max_over_long = 0.5
  long = {"prompt": "x" * 48}  # with BOS and 16 new ones one more than seq_len
  fits = {"prompt": "y" * 47}
  rows = [*numbered(3), {"prompt": "0", "answer": 0}, {"prompt": "0", "answer": 7}, long, fits]
  data = make(tmp_path, config=config, a=rows, b=numbered(2, "b"))
  assert data.num_prompts == 5 + 2 and fits["prompt"] in texts(data, range(20))
  a, b = data.stats()
  assert a == {"source": "a", "prompts": 5, "skipped": 0, "dropped: duplicate": 1, "dropped: too long": 1,
               "tokens": 2 * 4 + 48, "longest": 48, "records": "7 texts"}
  assert b["dropped: too long"] == 0 and a.keys() == b.keys() and "dropped: duplicate" in terminal.stats([a, b])
  assert "1 (duplicate), 1 (too long)" in caplog.text


def test_special_tokens_in_prompts_are_told_in_one_line(tmp_path, caplog):
  """Two of three prompts have one, by hand."""
  make(tmp_path, main=[{"prompt": "a <|eos|> <|eos|>"}, {"prompt": "b"}, {"prompt": "<|eos|>"}])
  assert caplog.text.count("source 'main': 2 of 3 documents have the characters of special tokens") == 1


def test_too_many_that_are_too_long_are_refused(tmp_path):
  rows = [*numbered(3), {"prompt": "x" * 60}]
  message = (r"source 'a': 1 of 4 prompts \(25.0%; the longest: 61 tokens\) leave no room for "
             r"rollout.max_new_tokens=16 in seq_len=64, and input.max_over_long allows 10.0% of them. Set "
             r"seq_len=77 or more")
  with pytest.raises(DataError, match=message):
    make(tmp_path, a=rows)
  config = configured()
  config.input.update(over_long="error", max_over_long=1.0)
  with pytest.raises(DataError, match="input.over_long is 'error'. Set seq_len=77 or more, .* or input.over_long=drop"):
    make(tmp_path, config=config, a=rows)
  config.input.over_long = "drop"
  with pytest.raises(DataError, match="1 of 1 prompts"):  # nothing would be left
    make(tmp_path, config=config, a=rows[3:])
  assert make(tmp_path, config=config, a=rows).num_prompts == 3


@pytest.mark.parametrize("changes, message", [
    ({"input.over_long": "truncate_end"}, "input.over_long is 'truncate_end', but a prompt is not cut"),
    ({"input.mixture_by": "tokens"}, "input.mixture_by is 'tokens'; prompts are mixed by their number"),
    ({"rollout.max_new_tokens": 64}, "rollout.max_new_tokens is 64; with seq_len=64 it must be from 1 to 63"),
])
def test_options_that_prompts_do_not_have(tmp_path, changes, message):
  config = configured()
  config.update_from_flattened_dict(changes)
  with pytest.raises(ConfigError, match=message):
    make(tmp_path, config=config, a=numbered(2))


def test_an_empty_source_is_named(tmp_path):
  with pytest.raises(DataError, match="source 'b' has no text"):
    make(tmp_path, a=numbered(2), b=[])
  with pytest.raises(ConfigError, match=r"input\.sources is empty"):
    make(tmp_path)


def test_lines_of_a_text_file(tmp_path):
  (tmp_path / "a.txt").write_text("one\n\ntwo\n")
  config = configured(prompt_key="text")
  config.input.sources.a = source(type="text", documents="line", path=str(tmp_path / "a.txt"))
  data = make_prompt_data(config, BytesTokenizer())
  assert sorted(texts(data, range(2))) == ["one", "two"] and data.stats()[0]["skipped"] == 1


def test_a_template_that_is_not_used_is_said(tmp_path, caplog):
  make(tmp_path, TINY, configured("chatml"), a=numbered(2))
  assert "2 prompts are texts to be continued, which the chat template does not touch" in caplog.text
  caplog.clear()
  data = make(tmp_path, TINY, configured("chatml", prompt_key="prompt"), a=numbered(2))
  assert "texts to be continued" not in caplog.text and data.item(0).content[0]["role"] == "user"


# ---------------------------------------------------------------------------------------------- a prompt with an answer


def prompter(template=None, tokenizer=None):
  return Prompter(configured(template), tokenizer or BytesTokenizer())


def answered(fields, template=None, **keys):
  found = prompter(template, TINY if template else None).record(Record("r", "a.jsonl:3", fields), **keys)
  return found.text, found.answer


def test_the_answer_is_what_the_assistant_says_last():
  talk = [user("Hi"), said("Hello"), user("Why?"), said("Because"), user("Oh"), said("")]
  prompt, answer = answered({"messages": talk}, "chatml")
  assert answer == "Because" and prompt.endswith("Why?<|im_end|>\n<|im_start|>assistant\n") and "Oh" not in prompt
  assert answered({"prompt": "2+2=", "completion": "4"}) == ("2+2=", "4")
  assert answered({"q": "2+2?", "a": 4}, prompt_key="q", answer_key="a") == ("2+2?", "4")
  prompt, answer = answered({"q": "Hi", "a": "x"}, "chatml", prompt_key="q", answer_key="a")
  assert (prompt, answer) == (CHAT, "x")


@pytest.mark.parametrize("fields, template, keys, message", [
    ({"messages": [user("Hi")]}, "chatml", {}, "the assistant answers nothing, so that there is no answer to compare"),
    ({"messages": [said("Hello"), user("Hi")]}, "chatml", {}, "the assistant answers nothing, so that"),
    ({"text": "a"}, None, {}, "is a text, without a prompt and an answer. Name the columns that hold them: prompt_key"),
    ({"q": "a", "b": 1}, None, dict(prompt_key="q", answer_key="c"), "no key 'c'; found 'q', 'b'. Set prompt_key and"),
    ({"q": ["a"], "b": 1}, None, dict(prompt_key="q", answer_key="b"), "'q' must be a string or a number, found list."),
    ({"q": "a", "b": True}, None, dict(prompt_key="q", answer_key="b"), "'b' must be a string or a number, found bool"),
])
def test_records_without_an_answer_are_named(fields, template, keys, message):
  with pytest.raises(DataError) as told:
    answered(fields, template, **keys)
  assert str(told.value).startswith(f"a.jsonl:3: {message}")


def test_an_empty_prompt_begins_with_bos_or_is_refused():
  assert prompter().text("", "here").ids.tolist() == [BytesTokenizer().bos_id]

  class NoBeginning(BytesTokenizer):
    named_tokens: dict = {}

  config = configured()
  config.tokenizer.add_bos = False
  assert Prompter(config, BytesTokenizer()).text("", "here").ids.tolist() == [BytesTokenizer().bos_id]
  with pytest.raises(DataError, match="^here: the prompt is empty, and there is no BOS token to start from.$"):
    Prompter(config, NoBeginning()).text("", "here")
  assert Prompter(config, NoBeginning()).text("a", "here").ids.tolist() == [97]


def test_images_that_cannot_be_placed_name_the_prompt():
  made = prompter()

  class Images:
    def place(self, text, refs):
      raise DataError(f"{len(refs)} images for {text}")

  made._images = Images()
  with pytest.raises(DataError, match="^here: 2 images for a$"):
    made.text("a", "here", ["x.png", "y.png"])
