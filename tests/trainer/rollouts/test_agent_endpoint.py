"""The endpoint of agents: what a request becomes, what of it cannot be, and what is answered (OpenAI's protocol)."""

import asyncio
import json
import re
import threading
import urllib.error
import urllib.request

import pytest

from trainer.rollouts import agent_endpoint
from trainer.serve.protocol import BadRequest

HI = {"role": "user", "content": "Hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add"}}


def ask(**more):
  return agent_endpoint.read({"model": "m", "messages": [HI], **more}, set())


def url_of(url):
  return {"type": "image_url", "image_url": url}


@pytest.mark.parametrize("given, found", [
    (HI, HI), ({"role": "user", "content": None}, {"role": "user", "content": ""}), ({"role": "user"}, {
        "role": "user", "content": ""}),
    ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, {
        "role": "user", "content": "ab"}),
    ({"role": "user", "content": [{"type": "text", "text": "a", "x": 1}, url_of({"url": "data:b", "detail": "low"})]}, {
        "role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "image": "data:b"}]}),
    ({"role": "user", "content": [url_of("data:c"), {"type": "video"}]}, {
        "role": "user", "content": [{"type": "image", "image": "data:c"}, {"type": "video"}]}),
    ({"role": "tool", "tool_call_id": "7", "name": "add", "content": "3", "other": 1}, {
        "role": "tool", "content": "3", "tool_call_id": "7", "name": "add"}),
    ({"role": "assistant", "content": "", "tool_calls": [], "name": ""}, {"role": "assistant", "content": ""}),
])
def test_what_a_message_is_taken_for(given, found):
  asked = ask(messages=[HI, given])
  assert asked.messages == [HI, found] and asked.tools is None
  assert ask(tools=[TOOL]).tools == [TOOL] and ask(tools=[]).tools is None


def test_arguments_of_calls_are_objects_however_they_came():
  for arguments in ({"a": 1}, '{"a": 1}'):
    call = CALL | {"function": {"name": "add", "arguments": arguments}}
    message = agent_endpoint.message_of({"role": "assistant", "content": None, "tool_calls": [call]})
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}} and message["content"] == ""


@pytest.mark.parametrize("more, message", [
    (dict(messages=None), "messages: allowed: a list of objects with role and content."),
    (dict(messages=[]), "messages: allowed: a list of objects"),
    (dict(messages={"role": "user"}), "messages: allowed: a list of objects"), (dict(messages=["Hi"]), "messages: all"),
    (dict(messages=[{"content": "x"}]), "messages: each has a role, a string, and a content, a string or a list of pa"),
    (dict(messages=[{"role": 1, "content": "x"}]), "messages: each has a role"),
    (dict(messages=[{"role": "user", "content": 5}]), "messages: each has a role"),
    (dict(messages=[{"role": "user", "content": ["x"]}]), "messages: a content with parts of type None; allowed here:"),
    (dict(messages=[{"role": "user", "content": [{"type": "text", "text": 1}]}]), "messages: a content with parts of"),
    (dict(messages=[{"role": "user", "content": [url_of({"url": 5})]}]), "messages: an image_url of 5; nothing is dow"),
    (dict(messages=[{"role": "assistant", "tool_calls": [{"function": 3}]}]), "messages: tool_calls"),
    (dict(tools=[{"function": "add"}]), 'tools: allowed: a list of {"type": "function"'), (dict(tools={"a": 1}), "too"),
    (dict(n=2), "n: found 2, which an episode has not. Leave it out."),
    (dict(return_token_ids=True), "return_token_ids: found True, which an episode has not"),
    (dict(chat_template_kwargs={"a": 1}), "chat_template_kwargs: found {'a': 1}, which"),
])
def test_what_cannot_be_asked_is_refused(more, message):
  with pytest.raises(BadRequest, match=f"^{re.escape(message)}"):
    ask(**more)


def test_each_key_that_has_no_effect_is_warned_of_once(caplog):
  warned = set()
  for _ in range(2):
    agent_endpoint.read({"model": "m", "messages": [HI], "max_tokens": 5, "seed": 3, "stop": None}, warned)
  assert warned == {"max_tokens", "seed"} and len(caplog.records) == 2
  assert "rollout.environment asks with max_tokens=5. It has no effect" in caplog.text


@pytest.mark.parametrize("truncated, message, reason", [
    (False, HI, "stop"), (True, HI, "length"), (False, {"tool_calls": [CALL, CALL]}, "tool_calls"),
    (True, {"tool_calls": [CALL]}, "length")])
def test_a_stream_has_the_whole_message_then_the_reason_then_an_end(truncated, message, reason):
  told = agent_endpoint.completion("m", truncated, message)
  assert told["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}]
  assert (told["model"], told["object"]) == ("m", "chat.completion")

  async def gathered():
    return [event async for event in agent_endpoint.events(told)]

  *parts, end = asyncio.run(gathered())
  first, last = (json.loads(part.removeprefix("data: ")) for part in parts)
  assert end == "data: [DONE]\n\n" and all(part.endswith("\n\n") for part in parts)
  calls = [CALL | {"index": i} for i in range(len(message.get("tool_calls", ())))]
  delta = message | ({"tool_calls": calls} if calls else {})
  assert first["choices"] == [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]
  assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": reason}]
  assert {first["object"], last["object"]} == {"chat.completion.chunk"} and first["id"] == last["id"] == told["id"]


def test_over_http():
  async def answer(body, asked):
    if body["model"] == "no":
      raise BadRequest("model: no such", "model")
    return {"role": "assistant", "content": f"{body['model']} hears {asked.messages[-1]['content']}"}, True

  address, loop = agent_endpoint.serve(answer, lambda: ["one", "two"])

  def get(path, data=None):
    try:
      with urllib.request.urlopen(urllib.request.Request(address + path, data), timeout=60) as found:
        return found.status, found.headers.get_content_type(), found.read().decode()
    except urllib.error.HTTPError as e:
      return e.code, "", json.loads(e.read())["error"]["message"]

  assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", address) and loop.is_running()
  # They end with the process.
  assert {thread.daemon for thread in threading.enumerate() if thread.name == "agents"} == {True}
  models = json.loads(get("/models")[2])
  assert models == {"object": "list", "data": [
      {"id": name, "object": "model", "owned_by": "weft"} for name in ("one", "two")]}
  body = {"model": "two", "messages": [HI]}
  status, kind, text = get("/chat/completions", json.dumps(body).encode())
  told = json.loads(text)
  assert (status, kind, told["model"]) == (200, "application/json", "two")
  assert told["choices"][0]["message"] == {"role": "assistant", "content": "two hears Hi"}
  assert told["choices"][0]["finish_reason"] == "length"
  status, kind, text = get("/chat/completions", json.dumps(body | {"stream": True}).encode())
  assert (status, kind) == (200, "text/event-stream") and text.endswith("data: [DONE]\n\n")
  for data, message in ((b"{", "the request is no JSON: "), (json.dumps(body | {"model": "no"}).encode(), "model: no")):
    status, _, said = get("/chat/completions", data)
    assert status == 400 and said.startswith(message)
