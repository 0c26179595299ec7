"""Tools in an episode: the prompt shows them, calls are made, results are not trained on, and errors are told."""

import asyncio
import json
import math

import pytest

from input_pipeline.chat.tool_formats import ToolCall
from tests.input_pipeline.references import example_tools
from tests.trainer.rollouts.test_environment import TINY, Sampler, marked, rendered, setup
from trainer.errors import ConfigError, DataError
from trainer.rollouts import tools
from trainer.rollouts.episode import Turn

PATHS = tuple(f"tests.input_pipeline.references.example_tools.{function.__name__}" for function in (
    example_tools.add, example_tools.broken, example_tools.later))


def call(name, **arguments):
  return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def play(tmp_path, replies, **options):
  """(the only episode, whose replies are these; its Episodes; its item)."""
  items, episodes = setup(tmp_path, [{"q": "2+3?"}], template="qwen3", seq_len=4096, **dict(
      tools=PATHS, max_turns=4, max_new_tokens=2048) | options)
  (episode,), = episodes.run(items, 1, Sampler(TINY, lambda sample, turn: replies[turn - 1]), 0)
  return episode, episodes, items[0]


def test_a_call_is_answered_and_the_answer_is_not_trained(tmp_path):
  said = "I add." + call("add", a=2, b=3)
  e, episodes, item = play(tmp_path, [said, "5"])
  assert '"name": "add"' in item.prompt.text and "how far." in item.prompt.text  # it shows them
  assert [(m["role"], m["content"]) for m in e.completion] == [("assistant", said), ("tool", "5"), ("assistant", "5")]
  result = "<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
  assert marked(e)[len(item.prompt.text):] == f"«{said}<|im_end|>»\n{result}«5<|im_end|>»"
  # As the template writes the whole conversation, but for the empty thought that it shows in the last turn.
  whole = TINY.decode(rendered(episodes, item, e.completion), skip_special=False)
  assert TINY.decode(e.trajectory.ids, skip_special=False) == whole.replace("<think>\n\n</think>\n\n", "").rstrip("\n")
  assert not e.failed and e.reward is None and e.turns == 2
  assert episodes.metrics([e]) == {"tools/call_frequency": 1.0, "tools/failure_frequency": 0.0}


def test_several_calls_are_made_in_their_order_and_errors_are_told(tmp_path):
  said = "".join([call("later", n=3), call("broken", text="no luck"), call("add", a=2), call("sub", a=1),
                  "<tool_call>add</tool_call>", call("broken", text="exit()")])
  e, episodes, _ = play(tmp_path, [said, "done"])
  results = [m["content"] for m in e.completion if m["role"] == "tool"]
  assert results[:4] == ["[0, 1, 2]", "Error: ValueError: no luck", "Error: add: missing a required argument: 'b'",
                         "Error: there is no tool 'sub'; there are add, broken, later"]
  assert results[4].startswith("Error: the call is not valid JSON") and len(results) == 6 and not e.failed
  assert results[5] == "Error: SystemExit: exit()"  # not the end of the run
  assert all(text in marked(e) for text in results)
  assert episodes.metrics([e]) == {"tools/call_frequency": 6.0, "tools/failure_frequency": 5 / 6}


def test_results_are_texts_or_json_and_each_call_has_an_id_of_its_own():
  async def later(of):
    return {"é": [of]}

  calls = [ToolCall("say", {"text": "hé\ud83d"}), ToolCall("later", {"of": 2}, id="given"),
           ToolCall("say", {"text": 3}), ToolCall(None, None, problem="it is none"), ToolCall("say", {"texts": "a"})]
  made = tools.ToolEnvironment({"say": lambda text: text, "later": later}, lambda completion: calls)
  turn = asyncio.run(made.step("…"))
  assert [(m["role"], m["name"], m["content"], m["tool_call_id"]) for m in turn.observation] == [
      ("tool", "say", r"hé\ud83d", "000000000"), ("tool", "later", '{"é": [2]}', "given"),
      ("tool", "say", "3", "000000002"), ("tool", "unknown", "Error: it is none", "000000003"),
      ("tool", "say", "Error: say: missing a required argument: 'text'", "000000004")]
  calls.clear()
  assert asyncio.run(made.step("…")) == Turn() and made.reset("a prompt", column=1) is None


def test_without_a_call_the_episode_ends_and_turns_are_limited(tmp_path):
  e, _, _ = play(tmp_path, ["5"])
  assert e.turns == 1 and e.completion == [{"role": "assistant", "content": "5"}]
  e, _, _ = play(tmp_path, [call("add", a=1, b=1)] * 3, max_turns=2)
  assert e.turns == 2 and e.completion[-1]["role"] == "assistant"


def test_tools_of_the_record_are_shown_too(tmp_path):
  own = {"type": "function", "function": {"name": "own", "description": "d", "parameters": {}}}
  rows = [{"messages": [{"role": "user", "content": "Hi"}], "tools": [own]}]
  items, _ = setup(tmp_path, rows, template="qwen3", seq_len=4096, tools=PATHS, prompt_key="messages")
  assert [tool["function"]["name"] for tool in items[0].tools] == ["own", "add", "broken", "later"]


def test_what_cannot_be_is_refused(tmp_path):
  with pytest.raises(ConfigError, match=r"^rollout.tools: .*gemma.jinja does not show them, .*chat.template='qwen3'"):
    setup(tmp_path, [{"q": "Hi"}], template="gemma", tools=PATHS)  # of no row, though none could be used
  with pytest.raises(DataError, match="a text to be continued, which shows no rollout.tools"):
    setup(tmp_path, [{"q": "Hi"}], template=None, tools=PATHS)


def test_frequencies_without_a_completion():
  assert not any(map(math.isnan, tools.frequencies([]).values()))
