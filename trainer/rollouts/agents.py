"""Agents: programs that ask the policy themselves, through an endpoint with OpenAI's protocol.

    async def solve(prompt, endpoint, /, **columns):       # config.rollout.environment = "my_package.solve"
      client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
      reply = await client.chat.completions.create(model=endpoint.model, messages=prompt)
      return 1.0 if ... else 0.0

Each call of the function is an episode, and each of its requests a turn of it: what it adds behind the last answer is
the observation. So an agent is an environment (`AgentEnvironment`), and what was sampled stays as it is. Requests find
their episode by the name of the model, which is another one for each.

Nothing here imports JAX.
"""

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import itertools
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from input_pipeline.chat import tool_formats
from trainer.errors import ConfigError
from trainer.rollouts.episode import Conversation, Turn


class Endpoint(NamedTuple):
  """Where an agent reaches the policy: what a client of OpenAI's protocol is made with, and the model that it names."""

  base_url: str
  model: str
  api_key: str = "weft"


@dataclasses.dataclass
class _Reply:
  """What answers a request: a completion, or why there is none."""

  text: str = ""
  truncated: bool = False
  error: Exception | None = None


class Agents:
  """An agent's function and the endpoint that it is told, which is opened when the first episode begins.

  Args:
    function: `(prompt, endpoint, /, **columns) -> reward or None`; a coroutine, or called in a thread.
    find_calls: the calls of tools in a completion, given the schema of one; see `tool_formats.find_format`.

  Raises:
    ConfigError: starlette or uvicorn is missing.
  """

  def __init__(self, function: Callable, find_calls: Callable[[dict], Callable[[str], list[tool_formats.ToolCall]]]):
    if not callable(function):
      raise ConfigError(f"rollout.environment names a {type(function).__name__}; expected a class with reset and step, "
                        "or a function that asks the policy itself (docs/rewards.md).")
    try:
      from trainer.rollouts import agent_endpoint
    except ImportError as e:
      raise ConfigError(f"rollout.environment is a function, which asks the policy over HTTP, and that needs {e.name}: "
                        "pip install 'weft[serve]'.") from e
    self._serve, self._function, self.find_calls = agent_endpoint.serve, function, find_calls
    self._episodes: dict[str, _Talk] = {}
    self._numbers = itertools.count()
    self._loop: asyncio.AbstractEventLoop | None = None
    self._base_url = ""
    self._lock = threading.Lock()

  def __call__(self) -> "AgentEnvironment":
    """An episode's environment."""
    return AgentEnvironment(self)

  def begin(self, prompt: Any, columns: Mapping[str, Any]) -> "_Talk":
    """Calls the function for an episode."""
    with self._lock:
      if self._loop is None:
        self._base_url, self._loop = self._serve(self._answer, lambda: list(self._episodes))
    talk = _Talk(self, Endpoint(self._base_url, f"episode-{next(self._numbers)}"))
    self._episodes[talk.endpoint.model] = talk
    talk.task = asyncio.run_coroutine_threadsafe(self._run(talk, prompt, columns), self._loop)
    return talk

  def end(self) -> None:
    """Cancels all that still runs."""
    for talk in list(self._episodes.values()):
      talk.cancel()

  def resolve(self, reply: asyncio.Future, value: _Reply) -> None:
    """Answers a request, from any thread."""
    def answer() -> None:
      if not reply.done():
        reply.set_result(value)

    assert self._loop is not None
    self._loop.call_soon_threadsafe(answer)

  async def _run(self, talk: "_Talk", prompt: Any, columns: Mapping[str, Any]) -> None:
    try:
      if inspect.iscoroutinefunction(self._function):
        ended = await self._function(prompt, talk.endpoint, **columns)
      else:
        ended = await _in_thread(functools.partial(self._function, prompt, talk.endpoint, **columns))
      talk.events.put(_Ended(ended))
    except BaseException as e:
      talk.events.put(_Ended(error=e))
    finally:
      self._episodes.pop(talk.endpoint.model, None)

  async def _answer(self, body: dict, asked: Conversation) -> tuple[dict, bool]:
    talk = self._episodes.get(body.get("model", ""))
    if talk is None:
      raise _refusal("model: it names no episode that goes on. Use the endpoint's `model`.")
    reply = await talk.ask(asked)
    if reply.error is not None:
      raise reply.error
    return talk.message(reply.text), reply.truncated


class _Ended(NamedTuple):
  """An agent's function is over: what it returned, or raised."""

  value: Any = None
  error: BaseException | None = None


class _Talk:
  """The requests of one episode and their answers."""

  def __init__(self, agents: Agents, endpoint: Endpoint):
    self.endpoint, self._agents = endpoint, agents
    self.events: queue.SimpleQueue = queue.SimpleQueue()  # Conversations, then one _Ended
    self.task: Future | None = None
    self._pending: asyncio.Future | None = None
    self._known: list[dict] = []
    self._tools: list[dict] | None = None
    self._find_calls: Callable | None = None
    self._names: dict[str, str] = {}  # of tools, by the ids of calls
    self._closed: Exception | None = None

  async def ask(self, asked: Conversation) -> _Reply:
    """Waits for what the policy says to a request; in the loop of the endpoint."""
    if self._closed is not None:
      return _Reply(error=self._closed)
    if self._pending is not None and not self._pending.done():
      raise _refusal("a request of this episode is not answered yet: an episode is one conversation, in which one "
                     "request follows another.")
    self._pending = asyncio.get_running_loop().create_future()
    self.events.put(asked)
    return await self._pending

  def next(self) -> Conversation | _Ended:
    """The next request, or the end; in the environment's thread."""
    while True:
      with contextlib.suppress(queue.Empty):  # a thread that is left behind gets its exception between two waits
        return self.events.get(timeout=0.5)

  def new(self, asked: Conversation) -> list[dict]:
    """What a request adds to the conversation so far. Raises ValueError: it is another one."""
    known = self._known
    for number, before in enumerate(known):
      now = asked.messages[number] if number < len(asked.messages) else None
      if now is None or now["role"] != before["role"] or now["role"] != "assistant" and now["content"] != before[
          "content"]:
        raise ValueError(f"the agent's request does not go on from its last one: message {number} was "
                         f"{_shown(before)}, and is {_shown(now) if now else 'missing'}. An episode is one "
                         "conversation; each request has all messages of the one before, the answer, and new ones.")
    if known and asked.tools != self._tools:
      raise ValueError("the agent's request has other tools than the one before it. They stand in the prompt, which "
                       "was sampled from; give all of them from the first request on.")
    added = asked.messages[len(known):]
    if not added:
      raise ValueError("the agent's request adds no message to the last answer. Say something, or return.")
    self._known, self._tools = [*known, *added], asked.tools
    if self._find_calls is None and asked.tools:
      self._find_calls = self._agents.find_calls(asked.tools[0])
    return [m | {"name": self._names[m["tool_call_id"]]} if m.get("tool_call_id") in self._names else m for m in added]

  def reply(self, text: str, truncated: bool) -> None:
    """Answers the request that waits."""
    self._known.append({"role": "assistant", "content": text})
    assert self._pending is not None
    self._agents.resolve(self._pending, _Reply(text, truncated))

  def close(self) -> None:
    """Further requests are told that there is no room."""
    self._closed = _refusal("This model's maximum context length is exceeded, or its turns are used up (seq_len, "
                            "rollout.max_new_tokens, rollout.max_turns).", "context_length_exceeded")

  def refuse(self) -> None:
    """So is the request that waits."""
    self.close()
    if self._pending is not None:
      self._agents.resolve(self._pending, _Reply(error=self._closed))

  def message(self, text: str) -> dict:
    """The assistant's message of a completion, with the calls of tools in it."""
    message = tool_formats.message_of(text, self._find_calls)
    self._names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
    return message

  def cancel(self) -> None:
    """Ends the agent, if it still runs: a coroutine is cancelled, a thread has its request refused."""
    self.refuse()
    if self.task is not None:
      self.task.cancel()


class AgentEnvironment:
  """An agent as an `Environment`: it waits for the agent's next request, and tells it what the policy says."""

  def __init__(self, agents: Agents):
    self._agents = agents
    self._talk: _Talk | None = None

  def reset(self, prompt: str | list[dict], /, **columns: Any) -> Conversation:
    """What the agent asks first.

    Raises:
      ValueError: nothing.
    """
    if isinstance(prompt, str):
      raise ValueError("the prompt is a text to be continued, and an agent has conversations: name the column with "
                       "rollout.prompt_key, or give messages")
    self._talk = self._agents.begin(prompt, columns)
    with self._cancelling():
      asked = self._talk.next()
      if isinstance(asked, _Ended):
        _reward(asked)
        raise ValueError("the agent returned before it asked anything, so that there is nothing to train")
      return Conversation(self._talk.new(asked), asked.tools)

  def step(self, completion: str) -> Turn:
    """What the agent makes of a completion: the next request, or the end with its reward."""
    assert self._talk is not None
    with self._cancelling():
      self._talk.reply(completion, truncated=False)
      asked = self._talk.next()
      if isinstance(asked, _Ended):
        return Turn(reward=_reward(asked), done=True)
      return Turn(self._talk.new(asked))

  def truncate(self, completion: str | None, finish_reason: str) -> float | None:
    """The reward of an episode that has no further turn; `completion` is the last, None: it is answered already."""
    assert self._talk is not None
    with self._cancelling():
      if completion is None:
        self._talk.refuse()
      else:
        self._talk.close()
        self._talk.reply(completion, finish_reason == "length")
      while not isinstance(asked := self._talk.next(), _Ended):
        pass  # it was refused
      return _reward(asked)

  @contextlib.contextmanager
  def _cancelling(self) -> Iterator[None]:
    try:
      yield
    except BaseException:
      self._talk.cancel()
      raise


async def _in_thread(function: Callable[[], Any]) -> Any:
  """What a function returns. Its thread does not keep the program from ending, as those of an executor do."""
  loop = asyncio.get_running_loop()
  answer = loop.create_future()

  def tell(set_it: Callable[[Any], None], value: Any) -> None:
    if not answer.done():
      set_it(value)

  def run() -> None:
    try:
      found, set_it = function(), answer.set_result
    except BaseException as e:
      found, set_it = e, answer.set_exception
    loop.call_soon_threadsafe(tell, set_it, found)

  threading.Thread(target=run, name="agent", daemon=True).start()
  return await answer


def _reward(ended: _Ended) -> Any:
  if ended.error is not None:
    known = isinstance(ended.error, (Exception, SystemExit))
    raise ended.error if known else RuntimeError("the agent was cancelled")
  return ended.value


def _refusal(message: str, code: str | None = None) -> Exception:
  from trainer.serve.protocol import BadRequest
  return BadRequest(message, code=code)


def _shown(message: dict) -> str:
  text = re.sub(r"\s+", " ", str(message.get("content")))
  return f"{message.get('role')}: {text if len(text) <= 60 else text[:60] + '…'!r}"
