"""The endpoint of agents: what a request of theirs may ask, what answers it, and the server that takes it."""

import asyncio
import json
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn
from absl import logging
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from input_pipeline.chat.tool_calls import calls_of
from trainer.errors import DataError
from trainer.rollouts.episode import Conversation
from trainer.serve import protocol

# Keys of a request that `rollout` decides: the policy is sampled as it is trained.
DECIDED = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "stop", "seed")


def serve(answer: Callable[[dict, Conversation], Any], names: Callable[[], list[str]]
          ) -> tuple[str, asyncio.AbstractEventLoop]:
  """Opens the endpoint in a thread of its own, on a port that is free.

  Args:
    answer: a coroutine: (a request, what it asks) -> (the assistant's message, whether it is cut). Raises BadRequest.
    names: of the models that there are.

  Returns:
    (its address, the event loop of its thread).
  """
  warned: set[str] = set()

  async def chat(request: Request) -> Response:
    try:
      try:
        body = json.loads(await request.body())
      except ValueError as e:
        raise protocol.BadRequest(f"the request is no JSON: {e}") from e
      message, truncated = await answer(body, read(body, warned))
    except protocol.BadRequest as e:
      return JSONResponse(e.body(), e.status)
    told = completion(body["model"], truncated, message)
    return StreamingResponse(events(told), media_type="text/event-stream") if body.get("stream") else JSONResponse(told)

  async def models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": name, "object": "model", "owned_by": "weft"}
                                                    for name in names()]})

  app = Starlette(routes=[Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])])
  listening = socket.socket()
  listening.bind(("127.0.0.1", 0))
  listening.listen(2048)  # connections wait there until the server takes them
  server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_keep_alive=600))
  loop = asyncio.new_event_loop()

  def run() -> None:
    asyncio.set_event_loop(loop)
    loop.run_until_complete(server.serve(sockets=[listening]))

  threading.Thread(target=run, name="agents", daemon=True).start()
  return f"http://127.0.0.1:{listening.getsockname()[1]}/v1", loop


def read(body: dict, warned: set[str]) -> Conversation:
  """What a request asks. `warned`: the keys that were warned of. Raises BadRequest."""
  asked = protocol.read(body, True, ())
  for key, given in (("n", asked.num_samples > 1), ("logprobs", asked.logprobs), ("return_token_ids", asked.token_ids),
                     ("chat_template_kwargs", body.get("chat_template_kwargs"))):
    if given:
      raise protocol.BadRequest(f"{key}: found {body[key]!r}, which an episode has not. Leave it out.", key)
  for key in DECIDED:
    if body.get(key) is not None and key not in warned:
      warned.add(key)
      logging.warning("rollout.environment asks with %s=%r. It has no effect: the run samples as config.rollout "
                      "says.", key, body[key])
  messages, tools = body.get("messages"), body.get("tools") or None
  if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
    raise protocol.BadRequest("messages: allowed: a list of objects with role and content.", "messages")
  if tools is not None and not (isinstance(tools, list) and all(
      isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in tools)):
    raise protocol.BadRequest('tools: allowed: a list of {"type": "function", "function": {…}}.', "tools")
  return Conversation([message_of(m) for m in messages], tools)


def message_of(message: dict) -> dict:
  """A message whose content is a text, or has images among its parts. Raises BadRequest: it has something else."""
  content = message.get("content")
  if isinstance(content, list):
    parts = [_part_of(part) for part in content]
    content = parts if any(part["type"] != "text" for part in parts) else "".join(part["text"] for part in parts)
  if not isinstance(message.get("role"), str) or not isinstance(content, str | list | None):
    raise protocol.BadRequest("messages: each has a role, a string, and a content, a string or a list of parts.")
  if isinstance(content, list) and message["role"] == "assistant":
    raise protocol.BadRequest("messages: an assistant's message with an image; the policy says texts.")
  kept = {key: message[key] for key in ("tool_calls", "tool_call_id", "name") if message.get(key)}
  if "tool_calls" in kept:  # an object is what templates write of arguments, wherever it was JSON in a string
    try:
      kept["tool_calls"] = calls_of(kept["tool_calls"], "messages: tool_calls")
    except DataError as error:
      raise protocol.BadRequest(str(error), "messages") from error
  return {"role": message["role"], "content": content or "", **kept}


def _part_of(part: Any) -> dict:
  """A part of a content as an environment gives it. Raises BadRequest: it is neither a text nor an image."""
  kind = part.get("type") if isinstance(part, dict) else None
  if kind == "text" and isinstance(part.get("text"), str):
    return {"type": "text", "text": part["text"]}
  if part in ({"type": "image"}, {"type": "video"}):  # of the prompt, which the agent was told so
    return part
  if kind != "image_url":
    raise protocol.BadRequest(f"messages: a content with parts of type {kind}; allowed here: text and image_url.")
  url = part.get("image_url")
  url = url.get("url") if isinstance(url, dict) else url
  if not isinstance(url, str) or not url.startswith("data:"):
    raise protocol.BadRequest(f"messages: an image_url of {url!r:.80}; nothing is downloaded here. Give the image "
                              "itself: data:image/png;base64,…", "messages")
  return {"type": "image", "image": url}


def completion(model: str, truncated: bool, message: dict) -> dict:
  """As OpenAI's."""
  reason = "length" if truncated else "tool_calls" if "tool_calls" in message else "stop"
  return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion", "created": int(time.time()),
          "model": model, "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}]}


async def events(told: dict) -> AsyncIterator[str]:
  """The same as a stream."""
  choice = told["choices"][0]
  delta = dict(choice["message"])
  if "tool_calls" in delta:
    delta["tool_calls"] = [call | {"index": i} for i, call in enumerate(delta["tool_calls"])]
  for part, reason in ((delta, None), ({}, choice["finish_reason"])):
    event = told | {"object": "chat.completion.chunk",
                    "choices": [{"index": 0, "delta": part, "logprobs": None, "finish_reason": reason}]}
    yield f"data: {json.dumps(event)}\n\n"
  yield "data: [DONE]\n\n"
