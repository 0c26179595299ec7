"""The bridge to verifiers: tasks as records, episodes scored by their environment. The package is a stand-in here, with
what of it is used (0.1.14, 0.4.0); both were run by hand, and are where they are installed."""

import asyncio
import contextlib
import json
import signal
import sys
import threading
import types

import pytest
from ml_collections import ConfigDict

from input_pipeline.files import Tally
from input_pipeline.prompt_data import make_prompt_data
from tests.trainer.rollouts.test_agents import post, said
from tests.trainer.rollouts.test_environment import TINY, Sampler
from trainer.config import defaults, source, strategy
from trainer.errors import ConfigError
from trainer.rollouts import verifiers as bridge
from trainer.rollouts.environment import Episodes

ROWS = [{"prompt": [{"role": "system", "content": "Be brief.", "tool_calls": None},
                    {"role": "user", "content": f"{i} + {i}?"}], "answer": str(2 * i), "example_id": i} for i in (2, 3)]


class Classic:
  """An environment of 0.1: asks through its client, once more if the answer is wrong."""

  requires_group_rollouts = False

  def __init__(self, fails=False, grouped=False):
    self.fails, self.requires_group_rollouts = fails, grouped
    signal.signal(signal.SIGTERM, lambda *_: None)  # as theirs do

  def get_dataset(self):
    return ROWS

  async def run_rollout(self, task, client, model, sampling_args):
    import asyncio
    endpoint = types.SimpleNamespace(base_url=client.api_base_url, model=model)
    messages = [{k: v for k, v in m.items() if v is not None} for m in task["prompt"]]
    answer = await asyncio.to_thread(post, endpoint, messages)
    if said(answer) != task["answer"]:
      messages += [answer["choices"][0]["message"], {"role": "user", "content": "No."}]
      answer = await asyncio.to_thread(post, endpoint, messages)
    return {"reward": float(said(answer) == task["answer"]), "error": "no luck" if self.fails else None}


@pytest.fixture
def _package(monkeypatch):
  """0.1 as far as it is used."""
  package, clients, kinds = (types.ModuleType(name) for name in (
      "verifiers", "verifiers.clients", "verifiers.types"))
  package.load_environment = lambda name, **args: {"sums": Classic}[name](**args)
  clients.resolve_client = lambda config: config
  kinds.ClientConfig = lambda **options: types.SimpleNamespace(**options)
  for module in (package, clients, kinds):
    monkeypatch.setitem(sys.modules, module.__name__, module)
  monkeypatch.setattr(bridge, "_loaded", {})


def episodes_of(group=1, replies=None, **args):
  config = defaults()
  config.strategy = strategy("grpo")
  config.update(seq_len=256)
  config.chat.template = "chatml"
  config.rollout.update(num_prompts=1, max_new_tokens=64, environment="trainer.rollouts.verifiers.play")
  config.input.sources.a = source(type="trainer.rollouts.verifiers.Tasks", env="sums", args=args)
  prompts = make_prompt_data(config, TINY)
  items = sorted((prompts.item(i) for i in range(len(prompts))), key=lambda item: item.prompt.where)
  return Episodes(config, TINY, prompts).run(items, group, Sampler(TINY, replies), 0)


def test_an_environment_plays_its_tasks(_package):
  before = signal.getsignal(signal.SIGTERM)
  groups = episodes_of(replies=lambda sample, turn: "4" if turn == 1 else "6")
  assert [(e.reward, e.turns) for (e,) in groups] == [(1.0, 1), (1.0, 2)]
  assert TINY.decode(groups[0][0].trajectory.ids, skip_special=False).startswith(
      "<|begin|><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>")
  assert signal.getsignal(signal.SIGTERM) is before  # a run saves when it is told to end


def test_an_episode_that_the_environment_gives_up_is_none(_package, caplog):
  ((first,), _) = episodes_of(replies=lambda sample, turn: "4", fails=True)
  assert first.failed and "the environment says: no luck" in caplog.text


def test_records_say_which_task_of_which_environment(_package):
  reader = bridge.Tasks(source(type="x", env="sums", args=dict(fails=False)), "a")
  both = [bridge.Tasks(source(type="x", env="sums", args=args), "a").identity for args in (
      dict(fails=False, grouped=False), dict(grouped=False, fails=False), dict(fails=True, grouped=False))]
  assert both[0] == both[1] != both[2]
  first, second = reader.read(Tally())
  assert first.fields["prompt"][0] == {"role": "system", "content": "Be brief."}
  assert second.fields["verifiers"] == {"env": "sums", "args": {"fails": False}, "task": ROWS[1]}
  assert json.loads(json.dumps(reader.identity)) != bridge.Tasks(source(type="x", env="sums"), "a").identity


@pytest.mark.parametrize("options, message", [
    (dict(env="sums", args=dict(grouped=True)), "scores the episodes of a group together"),
    (dict(env="nothing"), "'nothing' could not be loaded"), (dict(), "input.sources.a.env is None"),
    (dict(env="sums", args=dict(magic=1)), "could not be loaded with {'magic': 1}: TypeError")])
def test_what_cannot_be_is_refused(_package, options, message):
  with pytest.raises(ConfigError, match=message.replace("(", r"\(").replace("{", r"\{")):
    bridge.Tasks(source(type="x", **options), "a")


def test_without_the_package(monkeypatch):
  monkeypatch.setitem(sys.modules, "verifiers", None)
  monkeypatch.setattr(bridge, "_loaded", {})
  with pytest.raises(ConfigError, match="an environment of the package verifiers, installed beside it"):
    bridge.Tasks(source(type="x", env="sums"), "a")


def test_arguments_of_an_environment_are_dicts_all_the_way_down():
  found = bridge._plain(ConfigDict(dict(a=dict(b=dict(c=1)), d=[1])))
  assert found == {"a": {"b": {"c": 1}}, "d": [1]} and type(found["a"]) is type(found["a"]["b"]) is dict


class Tasksets:
  """An environment of 0.2: plays a task as its harness would, and serves something meanwhile."""

  def __init__(self, said, bounded=True, serves=True):
    data = types.SimpleNamespace
    tasks = [data(prompt="2?", prompt_text="other", system_prompt="Be brief.", name=None),
             data(prompt=["parts"], prompt_text="as text", system_prompt=None, name="x"),
             data(prompt=None, prompt_text="", system_prompt=None, name="named"),
             data(prompt=None, prompt_text=None, system_prompt="", name="")]
    self.said, self.serves, self.begun = said, serves, 0
    self.taskset = type("Taskset", (), {"bounded": bounded, "__iter__": lambda _: iter(
        [data(data=task) for task in tasks])})()

  @contextlib.asynccontextmanager
  async def serving(self):
    self.begun += 1
    if not self.serves:
      raise OSError("no port")
    yield

  async def run_episode(self, task, context):
    assert self.begun == 1
    self.asked = task.data.name, context.model, context.client.base_url, context.client.api_key_var
    return self.said


def episode(ok=True, errors=(), traces=((),)):
  error = lambda text: types.SimpleNamespace(type="E", message=text)  # noqa: E731
  return types.SimpleNamespace(ok=ok, errors=[error(text) for text in errors], traces=[
      types.SimpleNamespace(reward=0.75, errors=[error(text) for text in of]) for of in traces])


@pytest.fixture
def newer(monkeypatch):
  """0.2 as far as it is used: `newer(environment)` gives what it was asked to load."""
  def of(environment):
    asked = []
    names = ("verifiers", "verifiers.v1", "verifiers.v1.utils", "verifiers.v1.utils.loaders", "verifiers.v1.clients",
             "verifiers.v1.configs", "verifiers.v1.configs.client")
    modules = {name: types.ModuleType(name) for name in names}
    loaders = modules["verifiers.v1.utils.loaders"]
    loaders.resolve_env_config = lambda given: asked.append(given) or "config"
    loaders.load_environment = {"config": environment}.__getitem__
    modules["verifiers.v1.clients"].ModelContext = types.SimpleNamespace
    modules["verifiers.v1.configs.client"].EvalClientConfig = types.SimpleNamespace
    for name, module in modules.items():
      monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(bridge, "_loaded", {})
    return asked
  return of


ENDPOINT = types.SimpleNamespace(base_url="http://here/v1", model="episode 3")


def test_tasks_of_a_taskset_are_what_its_user_says_first(newer):
  asked = newer(Tasksets(None))
  reader = bridge.Tasks(source(type="x", env="sums", args=dict(taskset=dict(size=3), harness=dict(id="h"))), "a")
  assert asked == [{"taskset": {"id": "sums", "size": 3}, "harness": {"id": "h"}}]
  records = list(reader.read(Tally()))
  assert [record.fields["prompt"] for record in records] == [
      [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2?"}],
      [{"role": "user", "content": "as text"}], [{"role": "user", "content": "named"}],
      [{"role": "user", "content": "Task 3."}]]
  assert [record.fields["verifiers"]["task"] for record in records] == [0, 1, 2, 3] and len(asked) == 1
  assert records[2].where == "source a: task 2 of sums" and records[2][0] == "sums:2" and reader.files() == []


def test_its_episodes_are_played_while_it_serves(newer):
  environment = Tasksets(episode())
  newer(environment)
  columns = {bridge.KEY: {"env": "sums", "args": {}, "task": 1}}

  async def twice():
    return [await bridge.play([], ENDPOINT, **columns) for _ in range(2)]

  assert asyncio.run(twice()) == [0.75, 0.75] and environment.begun == 1
  assert environment.asked == ("x", "episode 3", "http://here/v1", "WEFT_NO_KEY")


@pytest.mark.parametrize("environment, error, message", [
    (Tasksets(episode(False, ["one"], [["two"], []])), RuntimeError, "^the environment says: E: one; E: two$"),
    (Tasksets(episode(False, ["x" * 600])), RuntimeError, f"^the environment says: E: {'x' * 497}$"),
    (Tasksets(episode(traces=[(), ()])), RuntimeError, "^2 agents played; an episode here has one$"),
    (Tasksets(episode(traces=[])), RuntimeError, "^0 agents played"),
    (Tasksets(None, serves=False), OSError, "^no port$")])
def test_an_episode_that_went_wrong_says_why(newer, environment, error, message):
  newer(environment)
  with pytest.raises(error, match=message):
    asyncio.run(bridge.play([], ENDPOINT, **{bridge.KEY: {"env": "sums", "args": {}, "task": 0}}))


def test_tasks_without_an_end_are_refused(newer):
  newer(Tasksets(None, bounded=False))
  with pytest.raises(ConfigError, match="^input.sources.a.env='sums': its taskset has no end. Give it one by its own"):
    bridge.Tasks(source(type="x", env="sums"), "a")


def test_signals_are_kept_in_the_main_thread_alone():
  before, found = signal.getsignal(signal.SIGTERM), []

  def other():
    with bridge._signals():
      found.append("there")

  thread = threading.Thread(target=other)
  thread.start()
  thread.join()
  with pytest.raises(KeyError), bridge._signals():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyError
  assert signal.getsignal(signal.SIGTERM) is before and found == ["there"]
