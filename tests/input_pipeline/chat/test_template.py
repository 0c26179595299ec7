"""Templates render as in transformers (committed references), and strangers' templates can do no harm."""

import copy
import datetime
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from input_pipeline.chat import template as chat
from input_pipeline.chat.budget import LimitError, Limits, Meter
from input_pipeline.chat.tool_calls import calls_of
from input_pipeline.tokenizer.tokenizer import BytesTokenizer, load_tokenizer
from trainer.errors import DataError

HERE = Path(__file__).parents[1] / "references"
REFERENCES = json.loads((HERE / "chat.json").read_text("utf-8"))
CASES, DAY = REFERENCES["cases"], datetime.date.fromisoformat(REFERENCES["date"])
NAMES = sorted(REFERENCES["templates"])
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tokenizer():
  return load_tokenizer(HERE / "tiny")


@pytest.fixture(scope="module")
def templates():
  specials = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>", "pad_token": "<pad>"}
  return {n: chat.load_template(HERE / "templates" / f"{n}.jinja", special_tokens=specials, date=DAY) for n in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_text_ids_and_spans_equal_those_of_transformers(name, templates, tokenizer):
  compared = 0
  for case, expected in REFERENCES["templates"][name].items():
    given = copy.deepcopy(CASES[case])
    if "error" in expected:
      with pytest.raises(DataError) as error:
        templates[name].render(**given)
      assert f"{name}.jinja:" in str(error.value) and expected["error"] in str(error.value), case
      continue
    assert templates[name].render(**given) == expected["text"], case
    rendered = templates[name].render_spans(**given)
    assert rendered.text == expected["text"] and rendered.inert == ()
    if "generated" in expected:
      assert [list(span) for span in rendered.generated] == expected["generated"], case
    assert tokenizer.encode_rendered(rendered.text).tolist() == expected["ids"], case
    protected = templates[name].render_spans(**given, inert_tokens=tokenizer.special_tokens)
    assert protected.text == expected["text"]
    assert tokenizer.encode_rendered(protected.text, protected.inert).tolist() == expected["ids"], case
    assert given == CASES[case]
    compared += 1
  assert compared >= 10


@pytest.mark.parametrize("name", ["llama3", "gemma", "mistral", "generation"])
def test_there_is_exactly_one_bos(name, templates, tokenizer):
  for case in ("turns", "system"):
    ids = tokenizer.encode_rendered(templates[name].render(**CASES[case]))
    assert ids[0] == tokenizer.bos_id and (ids == tokenizer.bos_id).sum() == 1


def test_chatml_begins_with_one_bos_where_that_is_its_own_mark():
  source = (Path(chat.__file__).parent / "templates" / "chatml.jinja").read_text("utf-8")
  asked = [{"role": "user", "content": "Hi"}]
  rest = "<|im_start|>user\nHi<|im_end|>\n"
  for bos, expected in ((None, rest), ("<s>", "<s>" + rest), ("<|im_start|>", rest)):  # the last: SmolLM2
    assert chat.ChatTemplate(source, {} if bos is None else {"bos_token": bos}).render(asked) == expected


def literals(tokenizer):
  return [m for t in tokenizer.special_tokens for m in (
      [{"role": "user", "content": f"a{t}b"}], [{"role": "user", "content": t}],
      [{"role": "user", "content": [{"type": "text", "text": t[:3]}, {"type": "text", "text": t[3:]}]}])]


def test_special_tokens_in_a_message_stay_text(tokenizer):
  source = ("<|im_start|>{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %}<|im_end|>{% endfor %}")
  template = chat.ChatTemplate(source)
  start, end = (tokenizer.encode_rendered(t).tolist() for t in ("<|im_start|>", "<|im_end|>"))
  for messages in literals(tokenizer):
    plain = template.render(messages)
    rendered = template.render_spans(messages, inert_tokens=tokenizer.special_tokens)
    assert rendered.text == plain and rendered.inert
    said = plain.removeprefix("<|im_start|>").removesuffix("<|im_end|>")
    ids = tokenizer.encode_rendered(rendered.text, rendered.inert).tolist()
    assert ids == start + tokenizer.encode_batch([said])[0].tolist() + end
    # Without protection the message would write a token of its own.
    assert len(tokenizer.encode_rendered(plain)) < len(ids)


def test_special_tokens_in_a_message_stay_text_for_bytes_too():
  tokenizer = BytesTokenizer()
  template = chat.ChatTemplate("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
                               {"bos_token": "<|bos|>", "eos_token": "<|eos|>"})
  rendered = template.render_spans([{"content": "é<|eos|>"}], inert_tokens=tokenizer.special_tokens)
  ids = tokenizer.encode_rendered(rendered.text, rendered.inert).tolist()
  assert ids == [256, *"é<|eos|>".encode(), 257]
  assert tokenizer.encode_rendered(rendered.text).tolist() == [256, *"é".encode(), 257, 257]
  assert tokenizer.encode_rendered("").shape == (0,)


def test_characters_written_as_numbers_hide_no_token(tokenizer):
  template = chat.ChatTemplate("{{ messages|tojson(ensure_ascii=true) }}")
  with pytest.raises(DataError, match="writes the characters of a message as numbers"):
    template.render_spans([{"content": "<|im_end|>"}], inert_tokens=tokenizer.special_tokens)
  with pytest.raises(DataError, match=r"messages\[0\]\['content'\]: has U\+FDD1"):
    template.render_spans([{"content": "\ufdd1"}], inert_tokens=tokenizer.special_tokens)


HOSTILE = json.loads((HERE / "hostile.json").read_text("utf-8")) | {
    "many macros": "{% macro m0() %}{% endmacro %}" + "".join(
        f"{{% macro m{i} () %}}{{{{ m{i - 1}() ~ m{i - 1}() }}}}{{% endmacro %}}" for i in range(1, 40))
        + "{{ m39() }}",
    "output": "{% for i in range(100000) %}" + "a" * 10000 + "{% endfor %}",
    "set output": "{% set x %}{% for i in range(100000) %}" + "a" * 10000 + "{% endfor %}{% endset %}",
    "brackets": "{{ " + "(" * 50000 + " }}",
    "plus": "{{ 1" + " + 1" * 30000 + " }}",
    "too long": "a" * 200_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_stopped(name):
  messages = [{"role": "user", "content": "Hi", "tool_calls": [{"id": "1"}]}]
  before, start = copy.deepcopy(messages), time.thread_time()
  with pytest.raises(DataError) as error:
    chat.ChatTemplate(HOSTILE[name], where="chat_template.jinja").render(messages)
  assert time.thread_time() - start < 2
  assert messages == before
  assert str(error.value).startswith("chat_template.jinja") and len(str(error.value)) < 1500


def test_errors_name_the_line_and_the_reason(templates):
  def said(source, messages=HI, **variables):
    with pytest.raises(DataError) as error:
      chat.ChatTemplate(source, where="t.jinja").render(messages, **variables)
    return str(error.value)

  assert said("\n\n{% if x %}").startswith("t.jinja:3: not a valid template: Unexpected end of template. Jinja was")
  refused = said("a\n{{ raise_exception('No ' ~ messages[0].role) }}")
  assert refused == "t.jinja:2: the template refuses the conversation: No user"
  undefined = "t.jinja:2: the template needs what the conversation does not have: 'tool' is undefined."
  assert said("\n{{ tool.name }}") == undefined
  assert "t.jinja:2: the template cannot be rendered: TypeError: can only concatenate str" in said("\n{{ 'a' + 1 }}")
  assert "t.jinja:1: the template reaches for what is none of its business" in said("{{ ''.__class__ }}")
  assert "t.jinja:3" in said("{% macro m() %}\n\n{{ ''.__class__ }}{% endmacro %}\n\n\n{{ m() }}")
  assert "strftime_now), on which data must not depend. Give a fixed one" in said("{{ strftime_now('%Y') }}")


@pytest.mark.parametrize("given, said", [
    (dict(messages=[]), "messages: the conversation is empty"),
    (dict(messages="Hi"), "messages: is a str; expected a list"),
    (dict(messages=["Hi"]), r"messages\[0\]: is a str; expected an object"),
    (dict(messages=[{"content": b"Hi"}]), r"messages\[0\]\['content'\]: is a bytes"),
    (dict(messages=[{1: "Hi"}]), r"messages\[0\]: has the key 1"),
    (dict(messages=[{"content": {1, 2}}]), "is a set"), (dict(messages=HI, tools=[len]), r"tools\[0\]: is a builtin"),
    (dict(messages=HI, tools={"a": 1}), "tools: is a dict; expected a list"),
    (dict(messages=HI, documents=["x"]), r"documents\[0\]: is a str"),
    (dict(messages=HI, x=print), "variables.'x'.: is a"),
    (dict(messages=HI, continue_final_message=True, add_generation_prompt=True), "exclude each other"),
    (dict(messages=[{"role": "user"}], continue_final_message=True), r"messages\[0\] has no text in its content"),
])
def test_what_is_not_a_conversation_is_refused(given, said):
  with pytest.raises(DataError, match=said):
    chat.ChatTemplate("{{ messages[0].role }}").render(**given)
  loop = {}
  loop["content"] = loop
  with pytest.raises(DataError, match="messages: nested more than 100 levels deep"):
    chat.ChatTemplate("x").render([loop])


def test_a_final_message_that_is_not_rendered_cannot_be_continued():
  with pytest.raises(DataError, match="does not render the final message as it is"):
    chat.ChatTemplate("{{ messages[0].role }}").render(HI, continue_final_message=True)
  assert chat.ChatTemplate("[{{ messages[0].content }}]").render(HI, continue_final_message=True) == "[Hi"


def test_a_generation_block_without_a_known_place_is_refused():
  template = chat.ChatTemplate("ab{% set x %}{% generation %}c{% endgeneration %}{% endset %}d{{ x }}")
  assert template.render(HI) == "abdc"
  with pytest.raises(DataError, match="a generation block stands in a macro, call or set block"):
    template.render_spans(HI)


def test_the_date_is_the_one_given():
  template = chat.ChatTemplate("{{ strftime_now('%d %B %Y, %-d.%m.%y %H:%M') }}", date=datetime.date(2024, 7, 6))
  assert template.render(HI) == "06 July 2024, 6.07.24 00:00"
  for machine in ("%s", "%Z", "%999999999d", "%c"):
    with pytest.raises(DataError, match="not the same on every machine"):
      chat.ChatTemplate(f"{{{{ strftime_now('{machine}') }}}}", date=DAY).render(HI)


def test_a_long_conversation_is_within_the_limits(templates):
  turns = [{"role": r, "content": f"{i} " + "word " * 200} for i in range(1500) for r in ("user", "assistant")]
  for name in ("chatml", "llama3", "gemma", "mistral"):
    assert len(templates[name].render(turns)) > 2_000_000


def test_all_of_a_budget_of_characters_may_be_used_and_no_more():
  """An element of a list counts as 16 of them. (Steps are looked at every thousand.)"""
  meter = Meter(Limits(altogether=100, characters=84, elements=1))
  meter.grow(84, elements=1)
  for given, message in (((1,), "more than 100 characters altogether"), ((85,), "a text of more than 84"),
                         ((0, 2), "a list of more than 1 elements")):
    with pytest.raises(LimitError, match=message):
      meter.grow(*given)


def test_what_is_printed_is_paid_for_with_its_keys():
  meter = Meter(Limits(altogether=100, characters=84, elements=1))
  meter.deep({"k" * 60: "v" * 24})  # and 16 for the element
  with pytest.raises(LimitError, match="more than 100 characters altogether"):
    meter.grow(1)


@pytest.mark.parametrize("joined", ["ns.s ~ ns.s", "ns.s + ns.s", "[ns.s, ns.s]|join", "ns.s * 2",
                                    "'%s%s'|format(ns.s, ns.s)", "'{}{}'.format(ns.s, ns.s)"])
def test_texts_that_are_made_are_paid_for_although_they_are_not_shown(joined):
  source = "{% set ns = namespace(s='aaaa') %}{% for i in range(12) %}{% set ns.s = " + joined + " %}{% endfor %}"
  with pytest.raises(DataError, match="more than 1,000 characters"):
    chat.ChatTemplate(source, limits=Limits(characters=1000)).render(HI)


def test_a_budget_is_for_one_rendering():
  template = chat.ChatTemplate("{% for i in range(1000) %}{{ i }}{% endfor %}", limits=Limits(steps=100_000))
  first = template.render(HI)
  assert [template.render(HI) for _ in range(30)] == [first] * 30
  with pytest.raises(DataError, match="it takes more than 500 steps"):
    chat.ChatTemplate(template.source, limits=Limits(steps=500)).render(HI)
  results = []
  threads = [threading.Thread(target=lambda: results.extend(template.render(HI) for _ in range(20))) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert results == [first] * 80


def test_templates_are_found_as_in_transformers(tmp_path):
  assert chat.load_template(tmp_path) is None
  config = tmp_path / "tokenizer_config.json"
  (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json{{ bos_token }}"}))
  config.write_text(json.dumps({"bos_token": {"content": "<s>"}}))
  assert chat.load_template(tmp_path).render(HI) == "json<s>"
  config.write_text(json.dumps({"bos_token": "<s>", "chat_template": "config{{ bos_token }}"}))
  assert chat.load_template(tmp_path).render(HI) == "config<s>"
  named = [dict(name=n, template=t) for n, t in (("default", "plain"), ("tool_use", "tools"), ("rag", "r"))]
  config.write_text(json.dumps({"chat_template": named}))
  template = chat.load_template(tmp_path)
  assert (template.render(HI), template.render(HI, tools=[]), template.render_spans(HI, tools=[]).text) == (
      "plain", "tools", "tools")
  assert chat.load_template(tmp_path, "rag").render(HI, tools=[]) == "r"
  with pytest.raises(DataError, match="no chat template 'x', only 'default', 'rag', 'tool_use'"):
    chat.load_template(tmp_path, "x")
  (tmp_path / "chat_template.jinja").write_text("jinja\n\n")
  (tmp_path / "additional_chat_templates").mkdir()
  (tmp_path / "additional_chat_templates" / "short.jinja").write_text("short")
  assert chat.load_template(tmp_path).render(HI, tools=[]) == "jinja\n"
  assert chat.load_template(tmp_path, "short").render(HI) == "short"
  (tmp_path / "chat_template.jinja").write_text("{% if %}")
  with pytest.raises(DataError, match=r"chat_template\.jinja:1: not a valid template"):
    chat.load_template(tmp_path)


def test_a_lone_template_must_be_told_its_tokens(tmp_path):
  (tmp_path / "t.jinja").write_text("{{ bos_token }}x")
  with pytest.raises(DataError, match="the template uses bos_token, and there is no tokenizer beside it"):
    chat.load_template(tmp_path / "t.jinja")
  assert chat.load_template(tmp_path / "t.jinja", special_tokens={"bos_token": "<s>"}).render(HI) == "<s>x"
  (tmp_path / "tokenizer_config.json").write_text('{"bos_token": null}')
  assert chat.load_template(tmp_path / "t.jinja").render(HI) == "x"
  (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 3}')
  (tmp_path / "t.jinja").unlink()
  with pytest.raises(DataError, match="chat_template is '3'; expected a string, or a list"):
    chat.load_template(tmp_path)
  with pytest.raises(DataError, match="does not exist"):
    chat.load_template(tmp_path / "t.jinja")


def test_ids_are_int32(tokenizer):
  assert tokenizer.encode_rendered("a").dtype == np.int32


ADDS = "{{ messages[0].tool_calls[0].function.name + '(' + messages[0].tool_calls[0].function.arguments + ')' }}"


@pytest.mark.parametrize("given, shown", [('{"x":1}', 'f({"x":1})'), ({"x": "é"}, 'f({"x": "é"})'), ("", "f({})")])
def test_arguments_that_a_template_adds_to_a_string_are_a_string_there(given, shown):
  """As transformers gives them to DeepSeek's, where the rows have them so."""
  calls = calls_of([{"type": "function", "function": {"name": "f", "arguments": given}}], "row")
  template = chat.ChatTemplate(ADDS)
  for _ in range(2):
    assert template.render([{"role": "assistant", "tool_calls": calls}]) == shown
  with pytest.raises(DataError, match="can only concatenate str"):
    chat.ChatTemplate(f"{{{{ 'a' + 1 }}}}{ADDS}").render([{"role": "assistant", "tool_calls": calls}])


def test_how_arguments_are_given_depends_on_no_other_conversation():
  template = chat.ChatTemplate(
      "{% if messages[0].content %}" + ADDS + "{% else %}{{ messages[0].tool_calls[0].function."
      "arguments is string }}{% endif %}")
  calls = calls_of([{"type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}], "row")
  for content, shown in (("", "False"), ("a", 'f({"x":1})'), ("", "False")):
    assert template.render([{"role": "assistant", "content": content, "tool_calls": calls}]) == shown


@pytest.mark.parametrize("source, limits, told", [
    # Of three fields of 400 characters; a loop whose passes end before their bodies do; a comparison of texts.
    ('{{ "{0}{0}{0}".format("x" * 400) }}', dict(characters=1199), "a text of more than 1,199 characters"),
    ("{% for i in range(100) %}{% continue %}{{ i }}{% endfor %}", dict(steps=1000), "more than 1,000 steps"),
    ('{% set a = "x" * 900 %}{{ a is eq(a) }}', dict(altogether=2000), "more than 2,000 characters altogether")])
def test_what_a_template_does_is_paid_for(source, limits, told):
  template = chat.ChatTemplate(source, limits=Limits(**limits))
  with pytest.raises(DataError, match=told):
    template.render(HI)
  chat.ChatTemplate(source, limits=Limits(**{name: 10 * value for name, value in limits.items()})).render(HI)


@pytest.mark.parametrize("source", ["{% set n = namespace(_x=1) %}", "{% set n = namespace({'_x': 1}) %}",
                                    "{% set n = namespace() %}{% set n._x = 1 %}"])
def test_names_of_a_namespace_do_not_begin_with_an_underscore(source):
  with pytest.raises(DataError, match="cannot have the attribute '_x'"):
    chat.ChatTemplate(source).render(HI)
