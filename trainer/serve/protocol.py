"""Requests and responses of OpenAI's completions and chats, as far as they are known here; nothing is ignored unasked.

Beyond OpenAI's keys are those of vLLM: `top_k`, `min_p`, prompts as token ids, and `return_token_ids`. Log-probs are
those of the tokens that were drawn, of softmax(logits / temperature) over the whole vocabulary.
"""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from input_pipeline.chat import tool_formats
from input_pipeline.chat.tool_formats import ToolCall
from trainer.generate.command import Printed
from trainer.generate.completion import Completion
from trainer.serve.engine import How

DEFAULT_TOKENS = 256
# No whole number but a seed is larger, nor a token's id: what the device counts has 32 bits.
LARGEST = 2 ** 30
# No temperature but 0 is lower: logits divided by it would be no numbers.
COLDEST = 1e-6
# Keys that change nothing here, whatever they are.
INERT = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# Keys of what a chat is to answer.
CONVERSATION = ("messages", "tools", "chat_template_kwargs")
# Keys that must have one of these values, since others are not computed.
MUST: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0, None), "frequency_penalty": (0, None), "repetition_penalty": (1, None),
    "logit_bias": (None, {}), "echo": (False, None), "suffix": (None, ""), "best_of": (1, None),
    "top_logprobs": (0, None), "response_format": (None, {"type": "text"}), "tool_choice": (None, "none", "auto"),
    "functions": (None, []), "parallel_tool_calls": (None, True, False), "modalities": (None, ["text"])}


class BadRequest(ValueError):
  """What cannot be done; `key` names what of the request, `code` is one of OpenAI's."""

  def __init__(self, message: str, key: str | None = None, status: int = 400, code: str | None = None):
    super().__init__(message)
    self.key, self.status, self.code = key, status, code

  def body(self) -> dict[str, Any]:
    """As OpenAI's errors."""
    return {"error": {"message": str(self), "type": "invalid_request_error", "param": self.key, "code": self.code}}


class Asked(NamedTuple):
  """What a request asks for, besides its prompts."""

  how: How
  max_new_tokens: int
  num_samples: int
  stream: bool
  usage: bool  # in a stream, a last event with it
  logprobs: bool
  token_ids: bool
  keep_stop: bool
  # What finds calls of tools in a completion; None: it has none.
  find_calls: Callable[[str], list[ToolCall]] | None = None


def read(body: Any, chat: bool, stop_ids: Sequence[int]) -> Asked:
  """What a request asks for. Raises BadRequest, naming the key."""
  if not isinstance(body, Mapping):
    raise BadRequest(f"a request is a JSON object, and this is {type(body).__name__}.")
  given = dict(body)
  for key in (*INERT, *(CONVERSATION if chat else ("prompt",))):
    given.pop(key, None)
  for key, allowed in MUST.items():
    if given.pop(key, allowed[0]) not in allowed:
      raise BadRequest(f"{key}: found {body[key]!r}; allowed here: {', '.join(map(repr, allowed))}.", key)

  def number(key: str, default: Any, kind: type, low: float, high: float = LARGEST) -> Any:
    value = given.pop(key, None)
    if value is None:
      return default
    fits = isinstance(value, int) or kind is float and isinstance(value, float)
    if isinstance(value, bool) or not fits or not low <= value <= high:
      name = "a whole number" if kind is int else "a number"
      raise BadRequest(f"{key}: found {value!r}; allowed: {name} from {low:g} to {high:g}.", key)
    return kind(value)

  def switch(key: str) -> bool:
    value = given.pop(key, None)
    if value not in (None, True, False):
      raise BadRequest(f"{key}: found {value!r}; allowed: true, false.", key)
    return bool(value)

  limits = [number(key, None, int, 1) for key in ("max_completion_tokens", "max_tokens")]
  stop = given.pop("stop", None) or ()
  stop = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else stop
  if not isinstance(stop, tuple) or not all(isinstance(text, str) and text for text in stop):
    raise BadRequest(f"stop: found {body['stop']!r}; allowed: a string or several, none of them empty.", "stop")
  more = given.pop("stop_token_ids", None) or []
  if not isinstance(more, list) or not all(_is_id(i) for i in more):
    raise BadRequest(f"stop_token_ids: found {more!r}; allowed: a list of token ids.", "stop_token_ids")
  ends = {*more, *(() if switch("ignore_eos") else stop_ids)}
  temperature = number("temperature", 1.0, float, 0, 100)
  if 0 < temperature < COLDEST:
    raise BadRequest(f"temperature: found {temperature}; allowed: 0, which is greedy, or {COLDEST} and more.",
                     "temperature")
  how = How(temperature=temperature, top_k=max(number("top_k", 0, int, -1), 0),
            top_p=number("top_p", 1.0, float, 1e-9, 1), min_p=number("min_p", 0.0, float, 0, 1),
            stop_ids=tuple(sorted(ends)), stop=stop,
            seed=number("seed", None, int, -(2**63), 2**63))
  logprobs = switch("logprobs") if chat else number("logprobs", None, int, 0, 1) is not None
  options = mapping(body, "stream_options")
  given.pop("stream_options", None)
  asked = Asked(how, limits[0] or limits[1] or DEFAULT_TOKENS, number("n", 1, int, 1, 128), switch("stream"),
                bool(options.get("include_usage")), logprobs, switch("return_token_ids"),
                switch("include_stop_str_in_output"))
  if given:
    key = sorted(given)[0]
    raise BadRequest(f"{key}: not known here. Leave it out.", key)
  return asked


def _is_id(value: Any) -> bool:
  """Whether it may be a token's, in whatever vocabulary."""
  return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST


def mapping(body: Mapping[str, Any], key: str) -> Mapping[str, Any]:
  """An object within the request; {}: there is none."""
  value = body.get(key) or {}
  if not isinstance(value, Mapping):
    raise BadRequest(f"{key}: found {value!r}; allowed: an object.", key)
  return value


def prompts(body: Mapping[str, Any]) -> list[str | np.ndarray]:
  """The prompts of a completion: a text, several, token ids, or several of these."""
  given = body.get("prompt")
  several = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
  found: list[str | np.ndarray] = []
  for one in several:
    if isinstance(one, str) and one:
      found.append(one)
    elif isinstance(one, list) and one and all(_is_id(i) for i in one):
      found.append(np.array(one, np.int32))
    else:
      raise BadRequest("prompt: allowed: a text, a list of token ids, or a list of either, none of them empty.",
                       "prompt")
  return found


class Choice:
  """One completion as it is told, part by part."""

  def __init__(self, index: int, tokenizer: Any, printed: Printed):
    self.index, self._tokenizer, self._printed = index, tokenizer, printed
    self.ids: list[int] = []
    self.reused = 0  # tokens of the prompt that were kept
    self.finish_reason: str | None = None
    self.stop_reason: str | None = None  # the stop string that ended it
    self._text = ""

  def add(self, part: Completion) -> tuple[str, list[int], list[float]]:
    """(what of the text is new, the tokens, their log-probs)."""
    self.ids += part.ids.tolist()
    self.reused = part.reused
    self.finish_reason, self.stop_reason = part.finish_reason or None, part.stop_reason
    text = self._printed.add(part)
    self._text += text
    return text, part.ids.tolist(), [float(x) for x in part.full_logprobs]

  def message(self, text: str, asked: Asked) -> dict[str, Any]:
    """The assistant's, of which `text` is new; where tools may be called, all of it once it has ended."""
    if asked.find_calls is None:
      return {"role": "assistant", "content": text}
    if self.finish_reason is None:
      return {"role": "assistant", "content": ""}
    return tool_formats.message_of(self._text, asked.find_calls, self._printed.with_special())

  def logprobs(self, chat: bool, ids: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
    """In the form of each kind of response."""
    pieces = [self._tokenizer.token_bytes[i] if i < len(self._tokenizer.token_bytes) else b"" for i in ids]
    texts = [piece.decode(errors="replace") for piece in pieces]
    if not chat:
      return {"tokens": texts, "token_logprobs": list(values), "top_logprobs": None, "text_offset": None}
    return {"content": [{"token": text, "logprob": value, "bytes": [*piece], "top_logprobs": []}
                        for text, value, piece in zip(texts, values, pieces, strict=True)], "refusal": None}


class Responses:
  """The bodies that answer one request.

  Args:
    chat: whether it is one.
    model: its name. fingerprint: of its parameters.
  """

  def __init__(self, chat: bool, model: str, fingerprint: str, asked: Asked, prompt_ids: Sequence[np.ndarray]):
    self._chat, self._asked, self._prompts = chat, asked, prompt_ids
    kind = "chat.completion" if chat else "text_completion"
    self._head = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", "object": kind,
                  "created": int(time.time()), "model": model, "system_fingerprint": fingerprint}

  def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens read, of which those that were kept from other texts are told, and written."""
    read, written = sum(map(len, self._prompts)), sum(len(choice.ids) for choice in choices)
    reused = sum(choice.reused for choice in choices[::self._asked.num_samples])
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": reused}}

  def _choice(self, choice: Choice, text: str, ids: Sequence[int], values: Sequence[float], stream: bool
              ) -> dict[str, Any]:
    found: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish_reason,
                             "stop_reason": choice.stop_reason,
                             "logprobs": choice.logprobs(self._chat, ids, values) if self._asked.logprobs else None}
    if self._chat:
      message = choice.message(text, self._asked)
      if calls := message.get("tool_calls"):
        found["finish_reason"] = "tool_calls" if choice.finish_reason == "stop" else choice.finish_reason
        message["tool_calls"] = [{"index": n, **call} for n, call in enumerate(calls)] if stream else calls
      found["delta" if stream else "message"] = message
    else:
      found["text"] = text
    if self._asked.token_ids:
      found["token_ids"] = list(ids)
      if not stream and not self._chat:
        found["prompt_token_ids"] = self._prompts[choice.index // self._asked.num_samples].tolist()
    return found

  def whole(self, parts: Mapping[int, Sequence[tuple[str, list[int], list[float]]]], choices: Sequence[Choice]
            ) -> dict[str, Any]:
    """The one that has everything; `parts`: of each choice."""
    told = []
    for choice in choices:
      texts, ids, values = zip(*parts[choice.index], strict=True)
      told.append(self._choice(choice, "".join(texts), sum(ids, []), sum(values, []), stream=False))
    more = {"prompt_token_ids": self._prompts[0].tolist()} if self._chat and self._asked.token_ids else {}
    return {**self._head, "choices": told, "usage": self.usage(choices), **more}

  def event(self, choice: Choice, text: str, ids: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
    """One of a stream."""
    kind = "chat.completion.chunk" if self._chat else "text_completion"
    return {**self._head, "object": kind, "choices": [self._choice(choice, text, ids, values, stream=True)]}

  def last(self, choices: Sequence[Choice]) -> dict[str, Any]:
    """A stream's with its usage."""
    kind = "chat.completion.chunk" if self._chat else "text_completion"
    return {**self._head, "object": kind, "choices": [], "usage": self.usage(choices)}
