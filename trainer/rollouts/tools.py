"""Tools: Python functions that the policy may call in an episode, named by `rollout.tools`.

The chat template shows their schemas and writes calls and results. A completion that calls some is answered by one
`tool` message for each call; one that calls none is the answer, which ends the episode. What a tool raises is told to
the policy, as text. Free of JAX.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from input_pipeline.chat.tool_formats import ToolCall
from trainer.rollouts.episode import Turn

# What the result of a call begins with that went wrong.
ERROR = "Error: "


class ToolEnvironment:
  """An `Environment` that makes the calls of one episode, in the order in which they were written.

  Args:
    tools: {name: function}, coroutines or not.
  """

  def __init__(self, tools: Mapping[str, Callable], find_calls: Callable[[str], list[ToolCall]]):
    self._tools, self._find_calls = tools, find_calls

  def reset(self, prompt: str | list[dict], /, **columns: Any) -> None:
    """Nothing is added: the prompt shows the tools."""

  async def step(self, completion: str) -> Turn:
    """What the calls give; without any, the end."""
    calls = self._find_calls(completion)
    # Some templates ask for an id of nine characters.
    return Turn([{"role": "tool", "name": call.name or "unknown", "content": _text(await self._result(call)),
                  "tool_call_id": call.id or f"{number:09d}"} for number, call in enumerate(calls)] or None)

  async def _result(self, call: ToolCall) -> str:
    if call.problem is not None:
      return ERROR + call.problem
    function = self._tools.get(call.name or "")
    if function is None:
      return f"{ERROR}there is no tool {call.name!r}; there are {', '.join(self._tools)}"
    try:
      inspect.signature(function).bind(**call.arguments)
    except TypeError as e:
      return f"{ERROR}{call.name}: {e}"
    try:
      value = function(**call.arguments)
      value = await value if inspect.isawaitable(value) else value
      return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (Exception, SystemExit) as e:  # a tool may run code that the policy wrote
      return f"{ERROR}{type(e).__name__}: {e}"


def _text(result: str) -> str:
  """With half characters spelled out, which are no text: half of an emoji's escape in the arguments of a call, say."""
  return result.encode("utf-8", "backslashreplace").decode()


def frequencies(completions: Iterable[str | list[dict]]) -> dict[str, float]:
  """Calls of a completion, and the share of calls that went wrong; the names are TRL's."""
  completions = list(completions)
  results = [m["content"] for said in completions if isinstance(said, list) for m in said if m["role"] == "tool"]
  wrong = sum(text.startswith(ERROR) for text in results)
  return {"tools/call_frequency": len(results) / max(len(completions), 1),
          "tools/failure_frequency": wrong / max(len(results), 1)}
