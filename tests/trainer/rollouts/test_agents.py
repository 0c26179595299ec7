"""Agents: their requests become the turns of an episode, token for token as an environment's would."""

import asyncio
import json
import math
import re
import threading
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest

from tests.tiny import ROOT
from tests.trainer.rollouts.test_environment import TINY, Sampler, marked, rendered, setup
from trainer.errors import ConfigError
from trainer.rollouts import agents as agents_lib
from trainer.rollouts.episode import Conversation, Turn

HERE = "tests.trainer.rollouts.test_agents"
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}
SEEN: list = []


def post(endpoint, messages, **more):
  """What the endpoint answers, as a client of OpenAI's protocol would ask."""
  body = {"model": endpoint.model, "messages": messages, **more}
  request = urllib.request.Request(endpoint.base_url + "/chat/completions", json.dumps(body).encode(),
                                   {"Content-Type": "application/json"})
  try:
    with urllib.request.urlopen(request, timeout=60) as answer:
      raw = answer.read().decode()
  except urllib.error.HTTPError as e:
    return json.loads(e.read())
  return raw if more.get("stream") else json.loads(raw)


def pictured(url):
  return {"type": "image_url", "image_url": {"url": url}}


def said(answer):
  return answer["choices"][0]["message"]["content"]


def guess(prompt, endpoint, /, number, **columns):
  """The same game as test_environment.Guess."""
  messages, reward = list(prompt), None
  for left in (2, 1, 0):
    text = said(post(endpoint, messages))
    digits = "".join(c for c in text if c.isdigit())
    if digits == str(number):
      return (reward or 0.0) + 1.0
    reward = (reward or 0.0) + 0.25 if left else reward
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"not {digits}"}]
  return reward


def looks(prompt, endpoint, /, first, **columns):
  """Shows a picture, first or later."""
  picture = {"role": "user", "content": [{"type": "text", "text": "See:"}, pictured("data:image/png;base64,AA")]}
  messages = [*prompt, picture] if first else list(prompt)
  answer = post(endpoint, messages)
  return post(endpoint, [*messages, answer["choices"][0]["message"], picture])


async def later(prompt, endpoint, /, **columns):
  """A coroutine, whose first request has a message more in front."""
  messages = [{"role": "system", "content": "Be brief."}, *prompt]
  answer = await asyncio.to_thread(post, endpoint, messages)
  await asyncio.sleep(0.01 * columns["number"])
  return float(len(said(answer)))


def calculator(prompt, endpoint, /, **columns):
  messages = list(prompt)
  for _ in range(4):
    answer = post(endpoint, messages, tools=[TOOL], tool_choice="auto")
    choice = answer["choices"][0]
    SEEN.append(choice)
    if choice["finish_reason"] != "tool_calls":
      return float(choice["message"]["content"] == "5")
    messages.append(choice["message"])
    for call in choice["message"]["tool_calls"]:
      asked = json.loads(call["function"]["arguments"])
      messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(asked["a"] + asked["b"])})


def endless(prompt, endpoint, /, says="go on", **columns):
  """Asks until it is told that there is no room."""
  messages = list(prompt)
  for turn in range(100):
    answer = post(endpoint, messages)
    SEEN.append(answer)
    if "error" in answer:
      return 10.0 + turn
    messages += [answer["choices"][0]["message"], {"role": "user", "content": says}]


def streaming(prompt, endpoint, /, **columns):
  SEEN.append(post(endpoint, prompt, stream=True))
  return 1.0


def hangs(prompt, endpoint, /, **columns):
  if columns.get("hang"):
    time.sleep(30)
  return float(len(said(post(endpoint, prompt))))


def bad(prompt, endpoint, /, how, **columns):
  """One that goes wrong, in each of these ways."""
  if how == "silent":
    return 1.0
  first = post(endpoint, prompt)
  answered = [*prompt, first["choices"][0]["message"]]
  if how == "raises":
    raise RuntimeError("no luck")
  if how == "rewrites":
    return post(endpoint, [{"role": "user", "content": "another"}, *answered[1:], {"role": "user", "content": "so?"}])
  if how == "forgets":
    return post(endpoint, prompt)
  if how == "adds nothing":
    return post(endpoint, answered)
  if how == "other tools":
    return post(endpoint, [*answered, {"role": "user", "content": "so?"}], tools=[TOOL])
  if how == "several":
    asked = [*answered, {"role": "user", "content": "so?"}]
    threads = [threading.Thread(target=lambda: SEEN.append(post(endpoint, asked))) for _ in range(2)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    return 2.0
  assert how == "nan"
  return math.nan


def play(tmp_path, rows, agent, replies, group=1, **options):
  items, episodes = setup(tmp_path, rows, **dict(seq_len=512, max_new_tokens=128) | options, env=f"{HERE}.{agent}")
  SEEN.clear()
  return episodes.run(items, group, Sampler(TINY, replies), 0), items, episodes


def test_an_agent_plays_as_an_environment_does(tmp_path):
  rows = [{"q": "Which?", "number": 7}, {"q": "And now?", "number": 4}]

  def replies(sample, turn):
    return str(sample + 5 + turn)

  groups, _, _ = play(tmp_path, rows, "guess", replies, group=3, max_turns=3)
  items, episodes = setup(tmp_path, rows, env="Guess", seq_len=512, max_new_tokens=128, max_turns=3)
  by_class = episodes.run(items, 3, Sampler(TINY, replies), 0)
  for one, other in zip(sum(groups, []), sum(by_class, []), strict=True):
    for name in ("ids", "weights", "logprobs"):
      np.testing.assert_array_equal(getattr(one.trajectory, name), getattr(other.trajectory, name), err_msg=name)
    assert (one.reward, one.turns, one.failed) == (other.reward, other.turns, other.failed)
    assert one.trajectory.finish_reason == other.trajectory.finish_reason == "stop"
  assert {episode.reward for episode in groups[0]} == {1.25, 1.0, 0.5}


def test_what_it_asks_first_takes_the_place_of_the_prompt(tmp_path):
  rows = [{"q": "Which?", "number": 3}, {"q": "And?", "number": 0}]
  (group, other), _, episodes = play(tmp_path, rows, "later", lambda sample, turn: "five " * sample + "six", group=2)
  whole = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which?"}]
  for sample, episode in enumerate(group):
    text = "five " * sample + "six"
    asked = episodes._prompter.messages(whole, None, "here").ids
    np.testing.assert_array_equal(episode.trajectory.ids[:episode.trajectory.prompt_length], asked)
    assert marked(episode).endswith(f"«{text}<|im_end|>»") and episode.reward == len(text)
  assert [episode.reward for episode in other] == [3.0, 8.0] and other[0].completion[-1]["content"] == "six"


def test_calls_of_tools(tmp_path):
  call = 'I add. <tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
  ((e,),), items, episodes = play(tmp_path, [{"q": "2+3?"}], "calculator", lambda sample, turn: [call, "5"][turn - 1],
                                  template="qwen3", seq_len=2048, max_new_tokens=512)
  assert (e.reward, e.turns) == (1.0, 2)
  first, second = SEEN
  assert first["message"]["content"] == "I add." and first["finish_reason"] == "tool_calls"
  assert first["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2, "b": 3}'}
  assert second["finish_reason"] == "stop"
  # The prompt shows the tool, and all is as the template writes such a conversation.
  item = items[0]._replace(tools=[TOOL])
  whole = TINY.decode(rendered(episodes, item, e.completion), skip_special=False)
  assert '"name": "add"' in whole
  assert TINY.decode(e.trajectory.ids, skip_special=False) == whole.replace("<think>\n\n</think>\n\n", "").rstrip("\n")
  assert "\n<tool_response>\n5\n</tool_response>" in marked(e).replace("«", "").replace("»", "")


@pytest.mark.parametrize("options, turns, finish, reward", [
    (dict(max_turns=2), 2, "stop", 12.0),  # the third request is refused
    (dict(max_new_tokens=10), 2, "length", 12.0),  # the second completion is cut, and the next request refused
    (dict(seq_len=60, max_new_tokens=30, says="a long answer " * 9), 1, "length", 11.0)])  # no room for what it says
def test_an_end_for_want_of_room_is_told_and_scored(tmp_path, options, turns, finish, reward):
  row = {"q": "Which?", "says": options.pop("says", "go on")}
  ((e,),), _, _ = play(tmp_path, [row], "endless", lambda sample, turn: "one two", **options)
  assert (e.turns, e.trajectory.finish_reason, e.reward, e.failed) == (turns, finish, reward, False)
  assert SEEN[-1]["error"]["code"] == "context_length_exceeded"
  reasons = [answer["choices"][0]["finish_reason"] for answer in SEEN[:-1]]
  assert reasons == ["stop"] * (turns - 1) + ["length" if options.get("max_new_tokens") == 10 else "stop"]


def test_a_stream_has_the_same(tmp_path):
  ((e,),), _, _ = play(tmp_path, [{"q": "Which?"}], "streaming", lambda sample, turn: "seven")
  events = [line.removeprefix("data: ") for line in SEEN[0].splitlines() if line]
  parts = [json.loads(event)["choices"][0] for event in events[:-1]]
  assert [part["delta"].get("content") for part in parts] == ["seven", None] and events[-1] == "[DONE]"
  assert parts[-1]["finish_reason"] == "stop" and e.reward == 1.0


@pytest.mark.parametrize("how, message", [
    ("silent", "returned before it asked anything"), ("raises", "RuntimeError: no luck"),
    ("rewrites", "message 0 was user: 'Which[?]', and is user: 'another'"), ("forgets", "message 1 .* is missing"),
    ("adds nothing", "adds no message"), ("other tools", "has other tools"), ("nan", "the reward is nan")])
def test_one_that_goes_wrong_costs_its_own_episode(tmp_path, how, message, caplog):
  rows = [{"q": "Which?", "how": how, "number": 1}]
  ((e,),), _, _ = play(tmp_path, rows, "bad", lambda sample, turn: "seven")
  assert e.failed and math.isnan(e.reward)
  assert re.search(message, caplog.text), caplog.text


def test_requests_side_by_side_are_refused(tmp_path):
  def replies(sample, turn):
    until = time.monotonic() + 30  # one of the two waits for this completion, so that the other is told no
    while turn == 2 and not SEEN and time.monotonic() < until:
      time.sleep(0.01)
    return "seven"

  ((e,),), _, _ = play(tmp_path, [{"q": "Which?", "how": "several"}], "bad", replies)
  refused = [answer["error"]["message"] for answer in SEEN if "error" in answer]
  assert len(refused) == 1 and "one conversation" in refused[0] and e.reward == 2.0 and e.turns == 2


def test_one_that_hangs_costs_its_own_episode(tmp_path):
  rows = [{"q": "Which?", "hang": True}, {"q": "And?", "hang": False}]
  (first, second), _, _ = play(tmp_path, rows, "hangs", lambda sample, turn: "one", environment_timeout_seconds=2.0)
  assert first[0].failed and first[0].trajectory.finish_reason == "timeout" and second[0].reward == 3.0


def test_pictures_for_a_model_that_sees_none_cost_their_episodes(tmp_path, caplog):
  rows = [{"q": "Which?", "first": True}, {"q": "And?", "first": False}]
  (first, second), _, _ = play(tmp_path, rows, "looks", lambda sample, turn: "one")
  assert first[0].failed and first[0].turns == 0 and second[0].failed and second[0].turns == 1
  assert "has images, but the model sees none" in caplog.text and "but the model sees no images" in caplog.text


@pytest.mark.parametrize("more, message", [
    (dict(n=2), "n: found 2"), (dict(logprobs=True), "logprobs: found True"), (dict(magic=1), "magic: not known here"),
    (dict(messages=[{"role": "user", "content": [{"type": "input_audio"}]}]), "parts of type input_audio"),
    (dict(messages=[{"role": "user", "content": [pictured("https://example.com/a.png")]}]),
     "an image_url of 'https://example.com/a.png'; nothing is downloaded"),
    (dict(messages=[{"role": "user", "content": [pictured("/etc/passwd")]}]), "an image_url of '/etc/passwd'; nothing"),
    (dict(messages=[{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]), "parts of type image;"),
    (dict(messages=[{"role": "assistant", "content": [pictured("data:image/png;base64,AA")]}]), "policy says texts"),
    (dict(model="gpt"), "names no episode"), (dict(tools=["add"]), "tools: allowed")])
def test_requests_that_cannot_be_are_refused(more, message):
  from trainer.rollouts import agents
  made = agents.Agents(lambda prompt, endpoint, /: post(endpoint, **dict(messages=prompt) | {
      key: value for key, value in more.items() if key != "model"}) if "model" not in more else post(
          endpoint._replace(model="gpt"), prompt), None)
  talk = made.begin([{"role": "user", "content": "Hi"}], {})
  event = talk.next()
  assert event.error is None and message in event.value["error"]["message"]


def test_what_rollout_decides_is_warned_of_once(tmp_path, caplog):
  from trainer.rollouts import agent_endpoint
  warned: set = set()
  for _ in range(2):
    agent_endpoint.read({"model": "m", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0.2}, warned)
  assert caplog.text.count("temperature=0.2") == 1


def test_a_text_prompt_is_no_conversation(tmp_path):
  ((e,),), _, _ = play(tmp_path, [{"q": "Which?", "number": 1}], "guess", lambda sample, turn: "one", template=None)
  assert e.failed


def test_what_is_neither_class_nor_function_is_refused(tmp_path):
  with pytest.raises(ConfigError, match="a list; expected"):
    play(tmp_path, [{"q": "Which?"}], "SEEN", None)


def test_the_page_does_what_it_says(tmp_path, monkeypatch):
  """docs/rewards.md: its agent plays."""
  page = (ROOT / "docs" / "rewards.md").read_text("utf-8")
  (code,) = re.findall(r"^```python\n# my_project/agent.py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
  (tmp_path / "agent_of_the_page.py").write_text(code)
  monkeypatch.syspath_prepend(tmp_path)
  items, episodes = setup(tmp_path, [{"q": "2+3?", "answer": "5"}], env="agent_of_the_page.solve", seq_len=512,
                          max_new_tokens=128)
  replies = [["4", "5"], ["4", "6"]]
  ((right, wrong),) = episodes.run(items, 2, Sampler(TINY, lambda sample, turn: replies[sample][turn - 1]), 0)
  assert (right.reward, wrong.reward, right.turns) == (1.0, 0.0, 2)
  assert right.completion[1] == {"role": "user", "content": "Check that, and say the result alone."}


@pytest.mark.parametrize("env, told", [(f"{HERE}.guess", True), ("Guess", False)])
def test_a_function_is_told_when_a_text_is_full(tmp_path, env, told):
  _, episodes = setup(tmp_path, [{"q": [{"role": "user", "content": "a"}], "number": 1}], env=env)
  assert episodes._truncates == told


# ---------------------------------------------------------------------------------------------- without an endpoint


def talk_of():
  """(the requests of an episode, what their endpoint is told)."""
  told = []
  agents = SimpleNamespace(resolve=lambda reply, value: told.append((reply, value)),
                           find_calls=lambda schema: told.append(schema) or (lambda text: []))
  return agents_lib._Talk(agents, agents_lib.Endpoint("url", "episode-0")), told


def test_a_request_adds_what_follows_the_last_answer():
  """The answer itself may come back in other words, which are not those that are trained; results of tools have the
  names of their calls."""
  talk, told = talk_of()
  asks, back = {"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "in other words"}
  assert talk.new(Conversation([asks], [TOOL])) == [asks] and told == [TOOL]
  talk._pending, talk._names = "the first request", {"7": "add"}
  talk.reply("sampled", False)
  assert told.pop() == ("the first request", agents_lib._Reply("sampled", False))
  result = {"role": "tool", "tool_call_id": "7", "content": "5"}
  other = {"role": "tool", "tool_call_id": "8", "content": "6"}
  for messages, tools, message in (
      ([asks], [TOOL], "message 1 was assistant: 'sampled', and is missing"),
      ([asks, asks], [TOOL], "message 1 was assistant: 'sampled', and is user: '2+3?'"),
      ([back, back], [TOOL], "message 0 was user: '2+3?', and is assistant: 'in other words'"),
      ([asks | {"content": "3+3?"}, back], [TOOL], "message 0 was user: '2+3?', and is user: '3+3?'"),
      ([asks, back], [TOOL], "adds no message"), ([asks, back, result], None, "has other tools")):
    with pytest.raises(ValueError, match=re.escape(message)):
      talk.new(Conversation(messages, tools))
  assert talk.new(Conversation([asks, back, result, other], [TOOL])) == [result | {"name": "add"}, other]
  assert told == [TOOL]  # whose format is found once
  talk.reply("more", True)
  assert told.pop() == ("the first request", agents_lib._Reply("more", True))
  with pytest.raises(ValueError, match="message 4 was assistant: 'more', and is missing"):
    talk.new(Conversation([asks, back, result, other], [TOOL]))


@pytest.mark.parametrize("ends", ["close", "refuse", "cancel"])
def test_an_episode_that_is_full_or_over_answers_no_request(ends):
  talk, told = talk_of()
  cancelled, talk._pending = [], "a request"
  talk.task = SimpleNamespace(cancel=lambda: cancelled.append(True))
  getattr(talk, ends)()
  assert bool(cancelled) == (ends == "cancel")
  refusals = [reply.error for _, reply in told] + [asyncio.run(talk.ask(Conversation([], None))).error]
  assert len(refusals) == 1 + (ends != "close") and {reply for reply, _ in told} <= {"a request"}
  assert {(error.code, error.status) for error in refusals} == {("context_length_exceeded", 400)}
  assert talk.events.empty()


class Talked:
  """An episode whose requests are given; notes what is said to it."""

  def __init__(self, *events):
    self.events, self.noted = list(events), []

  def next(self):
    return self.events.pop(0)

  def new(self, asked):
    return ["new", asked]

  def __getattr__(self, name):
    return lambda *given, **more: self.noted.append((name, *given, *more.values()))


def ended(*given, **more):
  return agents_lib._Ended(*given, **more)


def test_what_an_agent_returns_is_the_reward_of_its_last_turn():
  environment = agents_lib.AgentEnvironment(None)
  environment._talk = talk = Talked("a request", ended(0.75))
  assert environment.step("one") == Turn(["new", "a request"])
  assert environment.step("two") == Turn(reward=0.75, done=True)
  assert talk.noted == [("reply", "one", False), ("reply", "two", False)]
  environment._talk = talk = Talked(ended(error=KeyError("x")))
  with pytest.raises(KeyError):
    environment.step("one")
  assert talk.noted == [("reply", "one", False), ("cancel",)]
  environment._talk = Talked(ended(error=asyncio.CancelledError()))
  with pytest.raises(RuntimeError, match="the agent was cancelled"):
    environment.step("one")
  environment._talk = Talked(ended(error=SystemExit(3)))  # which costs the episode alone, as any environment's
  with pytest.raises(SystemExit, match="3"):
    environment.step("one")


@pytest.mark.parametrize("completion, finish, noted", [
    ("one", "length", [("close",), ("reply", "one", True)]), ("one", "stop", [("close",), ("reply", "one", False)]),
    (None, "stop", [("refuse",)])])
def test_where_there_is_no_room_the_agent_hears_so_and_has_its_reward(completion, finish, noted):
  """Whatever it still asks, having been refused."""
  environment = agents_lib.AgentEnvironment(None)
  environment._talk = talk = Talked("a request", "another", ended(0.5))
  assert environment.truncate(completion, finish) == 0.5 and talk.noted == noted and not talk.events


def test_an_agent_begins_with_what_it_asks_first():
  environment = agents_lib.AgentEnvironment(SimpleNamespace(begin=lambda *given: begun.append(given) or talk))
  begun, first = [], Conversation(["m"], ["tools"])
  talk = Talked(first)
  assert environment.reset(["a"], number=3) == Conversation(["new", first], ["tools"])
  assert begun == [(["a"], {"number": 3})] and not talk.noted
  talk = Talked(ended(1.0))
  with pytest.raises(ValueError, match="returned before it asked anything"):
    environment.reset(["a"])
  assert talk.noted == [("cancel",)]
  with pytest.raises(ValueError, match="the prompt is a text to be continued"):
    environment.reset("a")
  assert len(begun) == 2


def test_all_that_still_runs_is_cancelled_when_episodes_end():
  made = agents_lib.Agents(lambda prompt, endpoint, /: None, None)
  made._episodes = {name: Talked() for name in "ab"}
  made.end()
  assert [talk.noted for talk in made._episodes.values()] == [[("cancel",)]] * 2


def test_what_a_thread_returns_or_raises_is_had():
  def raises():
    raise KeyError("x")

  async def had(function):
    return await asyncio.wait_for(agents_lib._in_thread(function), 20)

  assert asyncio.run(had(lambda: 5)) == 5
  with pytest.raises(KeyError):
    asyncio.run(had(raises))
