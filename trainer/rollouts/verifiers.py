"""Environments of the package `verifiers`, as they are: their tasks as a source, and the agent that plays them.

    config.input.sources.tasks = source(type="trainer.rollouts.verifiers.Tasks", env="reverse-text", args=dict(...))
    config.rollout.environment = "trainer.rollouts.verifiers.play"

An environment asks the policy itself (agents.py) and scores its episodes. Both kinds of the package are known: those
whose module has `load_environment` (0.1), and tasksets with harnesses (`verifiers.v1`, since 0.2).
"""

import asyncio
import contextlib
import json
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from input_pipeline.files import File, Record, Tally
from trainer.errors import ConfigError
from trainer.rollouts.agents import Endpoint

KEY = "verifiers"  # the column that says which task of which environment a record is


class Tasks:
  """The tasks of an environment as records (a reader, see docs/extending.md).

  Args:
    cfg: the source's config; `env` is the environment's id, `args` what it is loaded with: keyword arguments of its
      `load_environment`, or the fields of its `EnvConfig`.

  Raises:
    ConfigError: there is no such environment, or it compares the episodes of a group.
  """

  by_name = True
  text_key = "text"

  def __init__(self, cfg: ConfigDict, source: str):
    key = f"input.sources.{source}.env"
    if not isinstance(cfg.get("env"), str):
      raise ConfigError(f"{key} is {cfg.get('env')!r}; it names an environment of the package verifiers that is "
                        "installed, e.g. 'reverse-text'.")
    self._source, self._name, self._args = source, cfg.env, _plain(cfg.get("args", {}))
    self.identity = ["verifiers", self._name, json.dumps(self._args, sort_keys=True)]
    load(self._name, self._args, key)

  def files(self) -> list[File]:
    return []

  def read(self, tally: Tally) -> Iterator[Record]:
    for number, (prompt, task) in enumerate(load(self._name, self._args).tasks()):
      yield Record(f"{self._name}:{number}", f"source {self._source}: task {number} of {self._name}",
                   {"prompt": prompt, KEY: {"env": self._name, "args": self._args, "task": task}})


async def play(prompt: list[dict], endpoint: Endpoint, /, **columns: Any) -> float:
  """Plays a record's task: the reward that its environment gives.

  Raises:
    RuntimeError: the environment says that the episode failed.
  """
  said = columns[KEY]
  return await load(said["env"], said["args"]).play(said["task"], endpoint)


_loaded: dict[str, Any] = {}
_lock = threading.Lock()


def load(name: str, args: Mapping[str, Any], key: str = "env") -> "_Classic | _Tasksets":
  """An environment, once in a program.

  Raises:
    ConfigError: see `Tasks`.
  """
  ident = json.dumps([name, args], sort_keys=True)
  with _lock:
    if ident not in _loaded:
      try:
        import verifiers
        kind = _Classic if hasattr(verifiers, "load_environment") else _Tasksets
        with _signals():
          _loaded[ident] = kind(name, args)
      except ConfigError as e:
        raise ConfigError(f"{key}={name!r}: {e}") from e
      except Exception as e:  # whatever the environment's own code raises
        raise ConfigError(f"{key}={name!r} could not be loaded with {dict(args)}: {type(e).__name__}: "
                          f"{str(e).rstrip('.')}. It is an environment of the package verifiers, installed beside it."
                          ) from e
    return _loaded[ident]


class _Classic:
  """An environment of verifiers 0.1: a dataset, a protocol of turns, a rubric."""

  def __init__(self, name: str, args: Mapping[str, Any]):
    import verifiers
    self._env = verifiers.load_environment(name, **args)
    self._clients: dict[str, Any] = {}
    if getattr(self._env, "requires_group_rollouts", False):
      raise ConfigError("its rubric scores the episodes of a group together, and here each is scored by itself.")

  def tasks(self) -> Iterator[tuple[list[dict], Any]]:
    for row in self._env.get_dataset():
      prompt = row["prompt"]
      messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
      # Rows of Arrow have all keys of all messages.
      yield [{key: value for key, value in message.items() if value is not None} for message in messages], row

  async def play(self, task: dict, endpoint: Endpoint) -> float:
    from verifiers.clients import resolve_client
    from verifiers.types import ClientConfig
    if endpoint.base_url not in self._clients:
      self._clients[endpoint.base_url] = resolve_client(ClientConfig(
          api_base_url=endpoint.base_url, api_key_var="WEFT_NO_KEY", max_retries=0))
    output = await self._env.run_rollout(task, self._clients[endpoint.base_url], endpoint.model, {})
    if output.get("error"):
      raise RuntimeError(f"the environment says: {output['error']}"[:500])
    return output["reward"]


class _Tasksets:
  """An environment of verifiers.v1: a taskset, and a harness in which a program asks the policy."""

  def __init__(self, name: str, args: Mapping[str, Any]):
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config
    given = json.loads(json.dumps(args))
    given["taskset"] = {"id": name, **given.get("taskset", {})}
    self._env = load_environment(resolve_env_config(given))
    if not self._env.taskset.bounded:
      raise ConfigError("its taskset has no end. Give it one by its own arguments.")
    self._tasks = list(self._env.taskset)
    self._serving: asyncio.Task | None = None

  def tasks(self) -> Iterator[tuple[list[dict], Any]]:
    for number, task in enumerate(self._tasks):
      data = task.data
      said = data.prompt if isinstance(data.prompt, str) else task.data.prompt_text
      system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
      yield [*system, {"role": "user", "content": said or data.name or f"Task {number}."}], number

  async def play(self, task: int, endpoint: Endpoint) -> float:
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.client import EvalClientConfig
    if self._serving is None:  # as long as the program
      ready = asyncio.get_running_loop().create_future()
      self._serving = asyncio.create_task(self._serve(ready))
      self._ready = ready
    await asyncio.shield(self._ready)
    client = EvalClientConfig(base_url=endpoint.base_url, api_key_var="WEFT_NO_KEY")
    episode = await self._env.run_episode(self._tasks[task], ModelContext(model=endpoint.model, client=client))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
      raise RuntimeError("the environment says: " + "; ".join(f"{e.type}: {e.message}" for e in errors)[:500])
    if len(episode.traces) != 1:
      raise RuntimeError(f"{len(episode.traces)} agents played; an episode here has one")
    return episode.traces[0].reward

  async def _serve(self, ready: asyncio.Future) -> None:
    try:
      async with self._env.serving():
        ready.set_result(None)
        await asyncio.Event().wait()
    except Exception as e:
      if ready.done():
        raise
      ready.set_exception(e)


def _plain(value: Any) -> Any:
  """A section as dicts."""
  return {key: _plain(part) for key, part in value.items()} if isinstance(value, (Mapping, ConfigDict)) else value


@contextlib.contextmanager
def _signals() -> Iterator[None]:
  """Keeps this program's handlers of signals: environments set their own, by which a run could not save at the end."""
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
  try:
    yield
  finally:
    for number, handler in kept.items():
      signal.signal(number, handler)
