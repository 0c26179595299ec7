"""The ASGI application: /v1/completions, /v1/chat/completions, /v1/models, /health, and /v1/load_weights for a trainer
that hands over new parameters."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from input_pipeline import once
from input_pipeline.chat import tool_formats
from input_pipeline.chat.tool_formats import ToolCall
from trainer.errors import ConfigError, DataError
from trainer.generate.command import Loaded, Printed
from trainer.generate.stop_strings import StopStrings
from trainer.serve import protocol
from trainer.serve.engine import Engine, Job
from trainer.serve.protocol import BadRequest, Choice, Responses


class Server:
  """What the routes answer with.

  Args:
    loaded: the model's tokenizer and the form of its prompts.
    name: of the model, as told.
    fingerprint: of its parameters.
    reload: `(folder) -> (parameters, fingerprint)` of other parameters of the same model; None: there are none.
  """

  def __init__(self, engine: Engine, loaded: Loaded, name: str, fingerprint: str,
               reload: Callable[[str], tuple[Any, str]] | None = None):
    self._engine, self._loaded, self._name, self.fingerprint, self._reload = engine, loaded, name, fingerprint, reload

  def app(self) -> Starlette:
    """The application."""
    return Starlette(routes=[
        Route("/health", self._health), Route("/v1/models", self._models),
        Route("/v1/completions", self._answering(False), methods=["POST"]),
        Route("/v1/chat/completions", self._answering(True), methods=["POST"]),
        Route("/v1/load_weights", self._load_weights, methods=["POST"])])

  async def _health(self, request: Request) -> Response:
    return JSONResponse({"status": "ok", "system_fingerprint": self.fingerprint})

  async def _models(self, request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [
        {"id": self._name, "object": "model", "owned_by": "weft", "max_model_len": self._loaded.model.max_length}]})

  async def _load_weights(self, request: Request) -> Response:
    try:
      body = await _json(request)
      if self._reload is None or not isinstance(body, dict) or not isinstance(body.get("path"), str):
        raise BadRequest("path: a folder with the same model; a server of a run's checkpoint (--workdir) takes none.",
                         "path")
      params, fingerprint = await asyncio.to_thread(self._reload, body["path"])
      # Of what is asked for from now on, though others are sampled still.
      swapped, self.fingerprint = self._engine.swap(params), fingerprint
      await asyncio.to_thread(swapped.wait)
      return JSONResponse({"system_fingerprint": fingerprint})
    except (ConfigError, DataError, OSError) as error:
      return _refused(BadRequest(str(error), "path"))
    except BadRequest as error:
      return _refused(error)

  def _answering(self, chat: bool) -> Callable:
    async def answer(request: Request) -> Response:
      try:
        body = await _json(request)
        asked = protocol.read(body, chat, self._loaded.prompter.stop_ids)
        prompts = self._prompts(body, chat)
        if chat and body.get("tools") and body.get("tool_choice") != "none":
          asked = asked._replace(find_calls=self._find_calls(body["tools"][0]))
        for ids in prompts:
          self._engine.check(ids, asked.max_new_tokens)
        stop = StopStrings(self._loaded.tokenizer, asked.how.stop, asked.keep_stop)
      except (ConfigError, DataError) as error:
        return _refused(BadRequest(str(error), "messages" if chat else "prompt"))
      except BadRequest as error:
        return _refused(error)
      responses = Responses(chat, self._name, self.fingerprint, asked, prompts)
      choices = [Choice(i, self._loaded.tokenizer, Printed(self._loaded.tokenizer, stop))
                 for i in range(len(prompts) * asked.num_samples)]
      parts = self._generate(prompts, asked)
      if asked.stream:
        return StreamingResponse(_events(responses, choices, parts, asked), media_type="text/event-stream")
      return await _whole(request, responses, choices, parts)

    return answer

  def _prompts(self, body: dict[str, Any], chat: bool) -> list[np.ndarray]:
    """The token ids of each."""
    prompter = self._loaded.prompter
    if not chat:
      return [prompter.text(one).ids if isinstance(one, str) else one for one in protocol.prompts(body)]
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
      raise BadRequest("messages: allowed: a list of objects with role and content.", "messages")
    protocol.mapping(body, "chat_template_kwargs")
    return [prompter.request({key: body[key] for key in protocol.CONVERSATION if key in body}).ids]

  def _find_calls(self, tool: Any) -> Callable[[str], list[ToolCall]] | None:
    """What finds calls in completions of a model that is shown such tools; None: how it writes them is not known."""
    inner = tool.get("function", tool) if isinstance(tool, dict) else tool
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
      raise BadRequest("tools: each has a function with a name.", "tools")
    tool = {"type": "function", "function": inner}
    try:
      return tool_formats.find_format("auto", self._loaded.prompter.template, tool)
    except ConfigError as error:
      once.warning("Calls of tools are told as text: %s", error)
      return None

  async def _generate(self, prompts: list[np.ndarray], asked: protocol.Asked) -> AsyncGenerator[tuple[int, Any]]:
    """(choice, part) as they come; raises what ended them."""
    told: asyncio.Queue = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def job(number: int, ids: np.ndarray) -> Job:
      def report(part: Any) -> None:
        loop.call_soon_threadsafe(told.put_nowait, (number, part))
      return Job(ids, asked.max_new_tokens, asked.num_samples, asked.how, report)

    jobs = [job(number, ids) for number, ids in enumerate(prompts)]
    for one in jobs:
      self._engine.submit(one)
    left = len(jobs) * asked.num_samples
    try:
      while left:
        number, part = await told.get()
        if isinstance(part, BaseException):
          raise part
        left -= bool(part.finish_reason)
        yield number * asked.num_samples + part.sample, part
    finally:  # where the client has gone, too
      for one in jobs:
        one.cancelled = True


async def _json(request: Request) -> Any:
  try:
    return json.loads(await request.body())
  except ValueError as error:
    raise BadRequest(f"the request is no JSON: {error}.") from error


def _refused(error: BadRequest) -> Response:
  return JSONResponse(error.body(), status_code=error.status)


async def _whole(request: Request, responses: Responses, choices: list[Choice], parts: AsyncGenerator) -> Response:
  told: dict[int, list] = {choice.index: [] for choice in choices}
  try:
    async for number, part in parts:
      told[number].append(choices[number].add(part))
      if await request.is_disconnected():
        await parts.aclose()
        return Response(status_code=499)
  except Exception as error:
    return JSONResponse({"error": {"message": f"{type(error).__name__}: {error}", "type": "server_error"}}, 500)
  return JSONResponse(responses.whole(told, choices))


async def _events(responses: Responses, choices: list[Choice], parts: AsyncIterator, asked: protocol.Asked
                  ) -> AsyncIterator[str]:
  try:
    async for number, part in parts:
      yield f"data: {json.dumps(responses.event(choices[number], *choices[number].add(part)))}\n\n"
  except Exception as error:
    yield f"data: {json.dumps({'error': {'message': f'{type(error).__name__}: {error}', 'type': 'server_error'}})}\n\n"
    return
  if asked.usage:
    yield f"data: {json.dumps(responses.last(choices))}\n\n"
  yield "data: [DONE]\n\n"
