"""The trained part of each turn, from renderings of its beginnings alone."""

import numpy as np
import pytest

from input_pipeline.chat.schema import Conversation
from input_pipeline.chat.segments import Segment, SegmentEncoder
from input_pipeline.chat.spans import SpanFinder
from input_pipeline.chat.template import ChatTemplate
from input_pipeline.remarks import ACROSS, CHANGED, LITERAL, PROMPT
from input_pipeline.tokenizer.tokenizer import BytesTokenizer, load_tokenizer
from tests.tiny import ROOT
from trainer.errors import DataError

HERE = ROOT / "tests" / "input_pipeline" / "references"
CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
TURNS = [("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"), ("assistant", "So long")]


@pytest.fixture(scope="module")
def tokenizer():
  return load_tokenizer(HERE / "tiny")


def talk(*turns):
  messages = [{"role": role, "content": content} for role, content in turns]
  return Conversation("messages", messages, [1.0] * len(turns), 0)


def finder(source, tokenizer):
  return SpanFinder(ChatTemplate(source, tokenizer.named_tokens), tokenizer)


def trained(source, tokenizer, conversation, weights=None, policy="split"):
  """Of each example, what is trained in it, as text."""
  weights = weights or [float(m["role"] == "assistant") for m in conversation.messages]
  found = finder(source, tokenizer).turns(conversation, weights, policy)
  return [[tokenizer.decode(ids[weights == w], skip_special=False) for w in sorted({*weights.tolist()} - {0.0})]
          for ids, weights, _ in SegmentEncoder(tokenizer).encode(found)]


def test_the_span_is_content_and_end_without_header_and_trailing_newline(tokenizer):
  """T8, T10: a stock template without marks; the token that ends a turn belongs to it, the newline behind it not."""
  (segments,) = finder(CHATML, tokenizer).turns(talk(*TURNS), [0, 1, 0, 1], "split")
  (segment,) = segments
  assert [(segment.text[start:end], weight) for start, end, weight in segment.spans] == [
      ("Hello<|im_end|>", 1), ("So long<|im_end|>", 1)]
  assert segment.text == "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in TURNS)
  assert trained(CHATML, tokenizer, talk(*TURNS)) == [["Hello<|im_end|>So long<|im_end|>"]]


def test_weights_are_those_of_the_messages(tokenizer):
  assert trained(CHATML, tokenizer, talk(*TURNS), [0, 0.5, 0, 2]) == [["Hello<|im_end|>", "So long<|im_end|>"]]


def test_what_the_prompt_supplies_is_not_trained(tokenizer):
  """T11b: an empty block of thoughts in the generation prompt."""
  source = CHATML.replace("assistant\n{% endif %}", "assistant\n<think></think>{% endif %}").replace(
      "{{ m.content }}", "{{ '<think></think>' if m.role == 'assistant' }}{{ m.content }}")
  assert trained(source, tokenizer, talk(*TURNS[:2])) == [["Hello<|im_end|>"]]


REWRITING = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}")
THOUGHTS = talk(("user", "a"), ("assistant", "<think>1</think>b"), ("user", "c"), ("assistant", "<think>2</think>d"))


@pytest.mark.parametrize("policy, expected", [
    ("split", [["<think>1</think>b<|im_end|>"], ["<think>2</think>d<|im_end|>"]]),
    ("last", [["<think>2</think>d<|im_end|>"]])])
def test_rewritten_history_gives_an_example_for_each_turn(tokenizer, policy, expected):
  """T11b: each with the history as it is shown then."""
  assert trained(REWRITING, tokenizer, THOUGHTS, policy=policy) == expected
  last = finder(REWRITING, tokenizer).turns(THOUGHTS, [0, 1, 0, 1], policy)[-1]
  assert "".join(s.text for s in last).startswith("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>")


def test_rewritten_history_can_be_an_error(tokenizer):
  with pytest.raises(DataError, match=r"messages\[1\] is rendered differently once messages\[3\] follows.*'split'"):
    trained(REWRITING, tokenizer, THOUGHTS, policy="error")
  assert trained(REWRITING, tokenizer, THOUGHTS, [0, 0, 0, 1], policy="error") == [["<think>2</think>d<|im_end|>"]]


def test_a_prompt_that_the_turn_lacks_is_counted(tokenizer):
  """A template that drops the thoughts that its own prompt begins: trained is what follows where the two part (as in
  TRL), and the row says so; one whose answer has them is trained behind them, whatever a made-up answer would do."""
  source = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
  rows = [talk(("user", "a"), ("assistant", "b")), talk(("user", "a"), ("assistant", "<think>c</think>b"))]
  for row, expected, remarks in zip(rows, ["b<|im_end|>", "c</think>b<|im_end|>"], [((PROMPT, "<think>"),), ()],
                                    strict=True):
    assert trained(source, tokenizer, row) == [[expected]]
    (((segment,),)) = finder(source, tokenizer).turns(row, [0, 1], "split")
    assert segment.remarks == remarks


def test_an_answer_that_the_template_shows_in_part_is_counted(tokenizer):
  """R1's distilled models: thoughts are cut out of every answer. What is left is trained, and counted."""
  source = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
  row = talk(("user", "a"), ("assistant", "<think>c</think>b"))
  assert trained(source, tokenizer, row) == [["b<|im_end|>"]]
  (((segment,),)) = finder(source, tokenizer).turns(row, [0, 1], "split")
  assert segment.remarks == ((CHANGED, "content"),)


def test_a_turn_that_ends_with_no_token_is_an_error(tokenizer):
  """T8: of the row, and of whoever asks what ends an answer."""
  source = CHATML.replace("<|im_end|>", "[end]")
  for found in (finder(source, tokenizer), finder(CHATML, BytesTokenizer())):
    assert "no token of the tokenizer ends a text" in str(found.problem)
    with pytest.raises(DataError, match=r"^messages\[1\]: .*ends the turn with 'Hello.*'plain'"):
      found.turns(talk(*TURNS), [0, 1, 0, 1], "split")


def test_stop_ids_are_the_tokenizers_and_the_templates(tokenizer, caplog):
  """T7, T8, T11c: a template may end turns with another token than EOS; the start says which one is trained."""
  caplog.set_level("INFO", logger="absl")  # whatever verbosity another test has left
  eot = int(tokenizer.encode_rendered("<|eot_id|>")[0])
  assert finder(CHATML, tokenizer).stop_ids == tokenizer.stop_ids == (tokenizer.eos_id,)
  assert finder(CHATML.replace("<|im_end|>", "<|eot_id|>"), tokenizer).stop_ids == (tokenizer.eos_id, eot)
  assert f"turn ends with <|eot_id|> (id {eot}), which is trained" in caplog.text


def test_what_stands_behind_the_stop_token_is_not_trained(tokenizer):
  """Some templates write EOS behind a whole conversation: no model gets that far."""
  source = CHATML.replace("{% if add", "{% if not add_generation_prompt %}<|eot_id|>{% endif %}{% if add")
  assert trained(source, tokenizer, talk(*TURNS)) == [["Hello<|im_end|>So long<|im_end|>"]]
  with pytest.raises(DataError, match=r"writes 'Next\.' behind <\|im_end\|>, where a model stops"):
    trained(source.replace("<|eot_id|>", "Next."), tokenizer, talk(*TURNS))


def test_a_header_that_no_prompt_supplies_is_not_trained(tokenizer, caplog):
  """Templates that ignore add_generation_prompt."""
  source = CHATML.split("{% if add")[0]
  assert trained(source, tokenizer, talk(*TURNS)) == [["Hello<|im_end|>So long<|im_end|>"]]
  assert "add_generation_prompt changes nothing" in caplog.text


def test_other_roles_and_a_first_assistant_are_found(tokenizer):
  conversation = talk(("assistant", "Hello?"), ("user", "a hint"), ("assistant", "Well"), ("tool", "b"), ("user", "c"))
  assert trained(CHATML, tokenizer, conversation, [3, 1, 0, 2, 0]) == [
      ["a hint<|im_end|>", "b<|im_end|>", "Hello?<|im_end|>"]]


def test_generation_blocks_that_disagree_are_told(tokenizer, caplog):
  """Ours hold; whoever wrote the template's marks should know."""
  marked = CHATML.replace("{{ m.content }}<|im_end|>", "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}")
  finder(marked, tokenizer)
  assert "generation block" not in caplog.text
  source = CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
  assert trained(source, tokenizer, talk(*TURNS)) == [["Hello<|im_end|>So long<|im_end|>"]]
  assert "its generation block marks 'b'; trained is 'b<|im_end|>'" in caplog.text


def test_a_template_without_bos_is_followed_and_told(caplog):
  """T9: BOS is the template's business."""
  finder(CHATML, load_tokenizer(HERE / "tiny"))
  assert "writes no <|begin|>, though the tokenizer has one" in caplog.text


@pytest.mark.parametrize("replaced, by, changed, message", [
    ("{{ m.content }}", "{{ m.content if m.role != 'tool' }}", [("tool", "user")],
     r"messages\[0\], of the role 'tool', is left out"),
    ("{{ m.content }}", "{{ m.content if m.role == 'user' }}", [], r"messages\[2\]\.content is left out")])
def test_a_message_that_the_template_leaves_out_is_an_error(tokenizer, replaced, by, changed, message):
  conversation = talk(*changed, *TURNS) if changed else talk(("user", "b"), ("user", "b"), ("assistant", "qq"))
  with pytest.raises(DataError, match=message):
    trained(CHATML.replace(replaced, by), tokenizer, conversation)


@pytest.mark.parametrize("key, value, what", [
    ("reasoning_content", "hm", r"messages\[1\]\.reasoning_content"),
    ("tool_calls", [{"function": {"name": "f", "arguments": {}}}], r"messages\[1\]\.tool_calls")])
def test_thoughts_and_calls_that_the_template_leaves_out_are_an_error(tokenizer, key, value, what):
  conversation = talk(*TURNS)
  conversation.messages[1][key] = value
  with pytest.raises(DataError, match=f"{what} is left out"):
    trained(CHATML, tokenizer, conversation)
  with pytest.raises(DataError, match="the tool 'g' is left out"):
    trained(CHATML, tokenizer, talk(*TURNS)._replace(tools=[{"function": {"name": "g"}}]))


def test_special_tokens_in_what_is_said_end_no_turn(tokenizer):
  """T10: and are ordinary text, on both sides."""
  said = "a<|im_end|>\n<|im_start|>assistant\nb"
  (segments,) = finder(CHATML, tokenizer).turns(talk(("user", said), ("assistant", said)), [0, 1], "split")
  ((ids, weights, _),) = SegmentEncoder(tokenizer).encode([segments])
  assert (ids == tokenizer.eos_id).sum() == 2
  assert tokenizer.decode(ids[weights > 0], skip_special=False) == said + "<|im_end|>"
  assert ids[weights > 0][-1] == tokenizer.eos_id and (ids[weights > 0] == tokenizer.eos_id).sum() == 1


def test_a_token_of_prompt_and_answer_is_trained_and_counted(tokenizer):
  """T11: ids are those of the text, never changed; where one has characters of both, the row says so."""
  source = CHATML.replace("\n{{ m.content }}", "\n{{ 'H' if m.role == 'assistant' }}{{ m.content }}").replace(
      "assistant\n{% endif %}", "assistant\nH{% endif %}")
  (segments,) = finder(source, tokenizer).turns(talk(("user", "a"), ("assistant", "i")), [0, 1], "split")
  ((ids, weights, remarks),) = SegmentEncoder(tokenizer).encode([segments])
  assert ids.tolist() == tokenizer.encode_rendered("".join(s.text for s in segments)).tolist()
  assert tokenizer.decode(ids[weights > 0], skip_special=False) == "Hi<|im_end|>" and (weights > 0).sum() == 2
  assert remarks == ((ACROSS, "Hi"),)


def test_the_places_of_tokens():
  """By hand: a space that is put before a text belongs to its first character, bytes to theirs, whatever is inert."""
  tokenizer = load_tokenizer(HERE / "spans" / "mistral")
  text = "é</s>a</s>b"
  for inert, number in (((), 2), ((1,), 1)):
    (found,) = tokenizer.encode_placed([(text, inert)])
    assert (found.ids == tokenizer.eos_id).sum() == number
    ends = np.flatnonzero(found.ids == tokenizer.eos_id)
    assert [text[found.starts[i]:found.ends[i]] for i in ends] == ["</s>"] * number and found.starts[ends[-1]] == 6
    assert found.starts[:2].tolist() == [0, 0] and (np.diff(found.starts) >= 0).all() and found.ends[-1] == len(text)
  (found,) = BytesTokenizer().encode_placed([("é<|eos|>é", ())])
  assert found.starts.tolist() == [0, 0, 1, 8, 8] and found.ends.tolist() == [1, 1, 8, 9, 9]


def test_inert_and_weighted_segments():
  tokenizer = BytesTokenizer()
  encoder = SegmentEncoder(tokenizer)
  segments = [encoder.ordinary("a<|eos|>", 0.5), Segment("b<|eos|>c<|eos|>d", (1,), ((0, 16, 2.0),), 0.25)]
  ((ids, weights, remarks),) = encoder.encode([segments])
  expected = [*b"a<|eos|>b<|eos|>c", tokenizer.eos_id, ord("d")]
  assert ids.tolist() == expected
  np.testing.assert_array_equal(weights, [0.5] * 8 + [2.0] * 10 + [0.25])
  assert remarks == ((LITERAL, "<|eos|>"),) * 2


# In the shape of real ones: what each refuses is what a made-up conversation in the row's place may have.
END = "<|im_end|>\n"
PROMPT_OF = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
CALL = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}]
SHOWN_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
ONE_CALL = SHOWN_TOOLS + """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}
{%- endif %}{% set f = m.tool_calls[0].function %}{{ f.name + (f.arguments | tojson) }}{% else %}{{ m.content | trim }}
{%- endif %}{{ '<|im_end|>\n' }}{% endfor %}""" + PROMPT_OF
CONCATENATED = SHOWN_TOOLS + """{% for m in messages %}{% if m.role != 'assistant' or not m.tool_calls %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% else %}{{ '<|im_start|>' + m.role }}
{%- if m.content %}{{ '\n' + m.content }}{% endif %}{% for c in m.tool_calls %}
{{- '\n' + c.function.name + (c.function.arguments | tojson) }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- endfor %}""" + PROMPT_OF
# Thoughts before a call are dropped once there is an answer; several calls, or content with thoughts, are refused.
CHANNELS = SHOWN_TOOLS + """{% for m in messages %}{% set i = loop.index %}{% if m.role != 'assistant' %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% elif 'tool_calls' in m %}
{%- if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}
{%- set answered = namespace(yes=false) %}{% for later in messages[i:] %}
{%- if later.role == 'assistant' and 'tool_calls' not in later %}{% set answered.yes = true %}{% endif %}{% endfor %}
{%- if m.thinking and not answered.yes %}{{ '<|im_start|>assistant\n[' + m.thinking + ']<|im_end|>\n' }}{% endif %}
{{- '<|im_start|>assistant\nto ' + m.tool_calls[0].function.name + (m.tool_calls[0].function.arguments | tojson) }}
{{- '<|eot_id|>\n' }}{% else %}{{ '<|im_start|>assistant\n' }}
{%- if m.thinking and loop.last and not add_generation_prompt %}{{ '[' + m.thinking + ']' }}{% endif %}
{{- m.content + '<|eot_id|>\n' }}{% endif %}{% endfor %}""" + PROMPT_OF
ASKED, RESULT = {"role": "user", "content": "Bonn?"}, {"role": "tool", "content": "20 degrees"}
SUNNY = {"role": "assistant", "content": "Sunny."}
SAID = 'weather{"city": "Bonn"}'


@pytest.mark.parametrize("source, call, answer, expected", [
    (ONE_CALL, {}, {}, [[SAID + "<|im_end|>", "Sunny.<|im_end|>"]]),
    (CONCATENATED, {}, {}, [[SAID + "<|im_end|>", "Sunny.<|im_end|>"]]),
    (CONCATENATED, {"content": "I look."}, {}, [["I look.\n" + SAID + "<|im_end|>", "Sunny.<|im_end|>"]]),
    (CHANNELS, {}, {}, [["to " + SAID + "<|eot_id|>", "Sunny.<|eot_id|>"]]),
    (CHANNELS, {"thinking": "hm"}, {"thinking": "so"},
     [["[hm]<|im_end|>\n<|im_start|>assistant\nto " + SAID + "<|eot_id|>"], ["[so]Sunny.<|eot_id|>"]])])
def test_the_row_itself_is_tried(tokenizer, source, call, answer, expected):
  """One tool call, content that is absent, thoughts: what a template refuses of another conversation says nothing."""
  messages = [ASKED, {"role": "assistant", "tool_calls": CALL, **call}, RESULT, {**SUNNY, **answer}]
  conversation = Conversation("messages", messages, [1.0] * 4, 0, TOOLS)
  found = finder(source, tokenizer)
  found.stop_ids = (int(tokenizer.encode_rendered("<|eot_id|>")[0]),) if source is CHANNELS else found.stop_ids
  examples = found.turns(conversation, [0, 1, 0, 2], "split")
  shown = []
  for ids, weights, _ in SegmentEncoder(tokenizer).encode(examples):
    parts = [tokenizer.decode(ids[weights == w], skip_special=False) for w in (1.0, 2.0)]
    shown.append([part for part in parts if part])
  assert shown == expected


def test_what_cannot_be_tried_is_not_an_error(tokenizer, caplog):
  """Shown in another form, by a template that refuses anything else in its place: told, not refused."""
  source = CHATML.replace("{{ m.content }}", "{{ 'Q' if m.content == 'secret' else "
                          "(raise_exception('No.') if m.role == 'user' else m.content) }}")
  assert trained(source, tokenizer, talk(("user", "secret"), ("assistant", "b"))) == [["b<|im_end|>"]]
  assert "whether it shows messages[0], of the role 'user', could not be tried" in " ".join(caplog.text.split())


def test_a_template_that_refuses_to_end_with_a_call_is_followed(tokenizer):
  """The beginning of a row is no row of its own."""
  source = ONE_CALL.replace("{% for m in messages %}", "{% if 'tool_calls' in messages[-1] %}"
                            "{{ raise_exception('Results are missing') }}{% endif %}{% for m in messages %}", 1)
  messages = [ASKED, {"role": "assistant", "tool_calls": CALL}, RESULT, SUNNY]
  conversation = Conversation("messages", messages, [1.0] * 4, 0, TOOLS)
  ((segment,),) = finder(source, tokenizer).turns(conversation, [0, 1, 0, 1], "split")
  assert [segment.text[start:end] for start, end, _ in segment.spans] == [SAID + "<|im_end|>", "Sunny.<|im_end|>"]


@pytest.mark.parametrize("source, message", [
    (CHATML.replace("{{ m.content }}", "{{ m.content if loop.last }}"), "does not show what the assistant says once"),
    (CHATML.replace("<|im_end|>", "."), "does not end what the assistant says once more messages follow")])
def test_what_follows_an_answer_needs_an_answer_that_is_there_and_ends(tokenizer, source, message):
  user, added = [{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Bye"}]
  end, behind = finder(CHATML, tokenizer).behind(user, "Hello", added, None, {})
  assert (end, behind.text) == ("<|im_end|>", "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n")
  with pytest.raises(DataError, match=message):
    finder(source, tokenizer).behind(user, "Hello", added, None, {})
