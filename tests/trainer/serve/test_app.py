"""`python -m trainer.serve` over HTTP: what it answers is what the sampler draws, alone and together, whole and in
parts; what it cannot do is refused by name."""

import asyncio
import contextlib
import functools
import json
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from input_pipeline.chat.template import load_template
from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from tests import tiny
from tests.tiny import ROOT
from tests.trainer.serve import servers
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError
from trainer.generate import command as generate
from trainer.generate.completion import Completion
from trainer.generate.sampler import Sampler
from trainer.serve import command, protocol
from trainer.serve.app import Server
from trainer.serve.engine import Engine, How, Job


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tiny.hf_folder(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def url(folder):
  with servers.serving(servers.app(folder)) as address:
    yield address


@pytest.fixture(scope="module")
def direct(folder):
  """(what is loaded, a sampler): the same without HTTP."""
  mesh = mesh_lib.make_mesh({})
  return generate.load_folder(folder, mesh, template="plain"), Sampler(generate.load_folder(folder, mesh).model, mesh)


def post(url, path, /, **body):
  data = json.dumps(body.get("whole", body)).encode() if body else b"{"
  request = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"})
  with urllib.request.urlopen(request, timeout=120) as response:
    return json.loads(response.read())


def refused(url, path, /, **body):
  with pytest.raises(urllib.error.HTTPError) as found:
    post(url, path, **body)
  error = json.loads(found.value.read())["error"]
  return found.value.code, error["param"], error["message"]


def test_a_completion_is_what_the_sampler_draws(url, direct):
  loaded, sampler = direct
  ids = loaded.prompter.text("the quick").ids
  (expected,) = sampler.generate(loaded.params, [ids], max_new_tokens=12, temperature=0.0,
                                 stop_ids=loaded.prompter.stop_ids)
  found = post(url, "/v1/completions", prompt="the quick", max_tokens=12, temperature=0, logprobs=1,
               return_token_ids=True)
  (choice,) = found["choices"]
  assert choice["token_ids"] == expected.ids.tolist() and choice["prompt_token_ids"] == ids.tolist()
  assert choice["text"] == loaded.tokenizer.decode(expected.text_ids)
  assert choice["finish_reason"] == expected.finish_reason
  np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], expected.full_logprobs, atol=1e-5)
  assert found["usage"] == dict(prompt_tokens=len(ids), completion_tokens=len(expected.ids),
                                total_tokens=len(ids) + len(expected.ids), prompt_tokens_details=dict(cached_tokens=0))
  # Token in, token out; what clients say of themselves changes nothing.
  again = post(url, "/v1/completions", prompt=ids.tolist(), max_tokens=12, temperature=0, return_token_ids=True,
               user="a", metadata={"b": "c"}, store=True, service_tier="auto", safety_identifier="d",
               prompt_cache_key="e", model="any")
  assert again["choices"][0]["token_ids"] == expected.ids.tolist() and found["model"] == "tiny"


def test_samples_of_a_seed_are_the_samplers_and_without_one_others_each_time(url, direct):
  loaded, sampler = direct
  prompts = [loaded.prompter.text(text).ids for text in ("a lazy", "dog")]
  expected = sampler.generate(loaded.params, prompts, max_new_tokens=8, num_samples=2, seed=7,
                              stop_ids=loaded.prompter.stop_ids)
  body = dict(prompt=["a lazy", "dog"], n=2, max_tokens=8, return_token_ids=True)
  found = post(url, "/v1/completions", seed=7, **body)["choices"]
  assert [choice["index"] for choice in found] == [0, 1, 2, 3]
  assert [choice["token_ids"] for choice in found] == [c.ids.tolist() for c in expected]
  assert [choice["prompt_token_ids"] for choice in found] == [prompts[i].tolist() for i in (0, 0, 1, 1)]
  others = [post(url, "/v1/completions", **body)["choices"] for _ in range(2)]
  assert len({str([choice["token_ids"] for choice in one]) for one in (found, *others)}) == 3


def test_a_chat_is_its_template_and_a_stream_adds_up_to_it(url, direct):
  loaded, sampler = direct
  messages = [{"role": "user", "content": "Brown fox?"}]
  ids = loaded.prompter.messages(messages).ids
  body = dict(messages=messages, max_completion_tokens=20, seed=3, logprobs=True, return_token_ids=True)
  whole = post(url, "/v1/chat/completions", **body)
  (choice,) = whole["choices"]
  (expected,) = sampler.generate(loaded.params, [ids], max_new_tokens=20, seed=3, stop_ids=loaded.prompter.stop_ids)
  assert whole["prompt_token_ids"] == ids.tolist() and choice["token_ids"] == expected.ids.tolist()
  assert choice["message"] == {"role": "assistant", "content": loaded.tokenizer.decode(expected.text_ids)}
  told = choice["logprobs"]["content"]
  np.testing.assert_allclose([one["logprob"] for one in told], expected.full_logprobs, atol=1e-5)
  assert b"".join(bytes(one["bytes"]) for one in told).decode(errors="replace").startswith(choice["message"]["content"])

  request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(
      body | dict(stream=True, stream_options=dict(include_usage=True))).encode())
  with urllib.request.urlopen(request, timeout=120) as response:
    assert response.headers["Content-Type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in response.read().decode().split("\n\n") if line]
  assert events.pop() == "[DONE]"
  *chunks, last = map(json.loads, events)
  assert last["choices"] == [] and last["usage"] == whole["usage"] and len(chunks) > 1
  deltas = [chunk["choices"][0] for chunk in chunks]
  assert "".join(one["delta"]["content"] for one in deltas) == choice["message"]["content"]
  assert sum((one["token_ids"] for one in deltas), []) == choice["token_ids"]
  assert [one["finish_reason"] for one in deltas] == [None] * (len(deltas) - 1) + [choice["finish_reason"]]


def test_a_stop_string_ends_it_and_is_cut(url, direct):
  loaded, _ = direct
  whole = post(url, "/v1/completions", prompt="läuft", max_tokens=24, seed=1)["choices"][0]["text"]
  stop = whole[5:7]
  found = post(url, "/v1/completions", prompt="läuft", max_tokens=24, seed=1, stop=stop)["choices"][0]
  assert found["text"] == whole[:whole.index(stop)] and found["finish_reason"] == "stop"
  kept = post(url, "/v1/completions", prompt="läuft", max_tokens=24, seed=1, stop=[stop],
              include_stop_str_in_output=True)["choices"][0]
  assert kept["text"] == whole[:whole.index(stop) + len(stop)]


def test_requests_at_the_same_time_get_what_each_gets_alone(url):
  bodies = [dict(prompt=f"number {i}", max_tokens=6 + i, seed=5, return_token_ids=True) for i in range(8)]
  alone = [post(url, "/v1/completions", **body)["choices"][0]["token_ids"] for body in bodies]
  with ThreadPoolExecutor(8) as pool:
    together = list(pool.map(lambda body: post(url, "/v1/completions", **body)["choices"][0]["token_ids"], bodies))
  assert together == alone


class Recorder:
  """A sampler that notes what it was asked, and waits where it is told to."""

  def __init__(self):
    self.asked, self.go, self.begun = [], threading.Event(), threading.Event()

  def stream(self, params, prompts, request):
    self.asked.append((params, [p.tolist() for p in prompts], request))
    self.begun.set()
    self.go.wait()
    if params == "broken":
      raise RuntimeError("no memory")
    return iter(())


def test_what_waits_is_sampled_together_if_it_is_drawn_alike(direct):
  recorder = Recorder()
  engine, errors = Engine(recorder, "old", direct[0].tokenizer), []

  def job(number, **how):
    made = Job(np.array([number], np.int32), number, 1, How(**how), errors.append)
    engine.submit(made)
    return made

  job(1)
  recorder.begun.wait()  # what follows waits
  job(2, temperature=0.5)
  job(3, seed=4)
  job(4, temperature=0.5)
  job(5, temperature=0.5).cancelled = True
  swapped = threading.Thread(target=engine.swap, args=("broken",))
  swapped.start()
  while engine._waiting.qsize() < 5:
    time.sleep(0.01)
  job(6, temperature=0.5)
  recorder.go.set()
  swapped.join()
  engine.close()
  # The sixth came behind the swap; by itself it is told what went wrong.
  assert [(params, ids) for params, ids, _ in recorder.asked] == [
      ("old", [[1]]), ("old", [[2], [4]]), ("old", [[3]]), ("broken", [[6]])]
  assert [request.max_new_tokens for *_, request in recorder.asked] == [[1], [2, 4], [3], [6]]
  assert recorder.asked[2][2].seed == 4 and list(recorder.asked[2][2].samples[0]) == [0]
  assert engine.batches == [1, 2, 1, 1] and [str(error) for error in errors] == ["no memory"]


class Gated(Sampler):
  """Gives a part of a text, then waits to be told to go on."""

  gate = threading.Event()

  def stream(self, params, prompts, request):
    for part in super().stream(params, prompts, request):
      yield part
      self.gate.wait(60)


def test_what_comes_meanwhile_joins_what_is_drawn_alike(direct):
  """It is over before the long text that it came in the middle of; both are what they are alone. What is drawn
  otherwise waits, and what comes behind that, too."""
  loaded, sampler = direct
  engine, ended, parts = Engine(Gated(loaded.model, rows=4, chunk=2), loaded.params, loaded.tokenizer), [], {}

  def report(name, part):
    parts.setdefault(name, []).append(part)
    ended.extend([name] if part.finish_reason else [])

  def job(name, count, **how):
    engine.submit(Job(np.arange(1, 5, dtype=np.int32), count, 1, How(seed=3, **how), functools.partial(report, name)))

  job("long", 40)
  while "long" not in parts:
    time.sleep(0.01)
  job("short", 3)
  job("other", 3, temperature=0.5)
  job("behind", 3)
  engine._sampler.gate.set()
  engine.close()
  assert ended == ["short", "long", "other", "behind"] and engine.batches == [2, 1, 1]
  for name, count in (("long", 40), ("short", 3)):
    alone, = sampler.generate(loaded.params, [np.arange(1, 5)], max_new_tokens=count, seed=3)
    assert np.concatenate([part.ids for part in parts[name]]).tolist() == alone.ids.tolist()


def test_of_a_conversation_that_is_kept_only_what_is_new_is_run(direct):
  """Twice from the same text; and not where the parameters are others since."""
  loaded, sampler = direct
  engine = Engine(Sampler(loaded.model, rows=4), loaded.params, loaded.tokenizer, kept_texts=4)
  first, told = np.arange(1, 40, dtype=np.int32), []

  def ask(ids):
    parts, over = [], threading.Event()
    engine.submit(Job(ids, 6, 1, How(seed=3), lambda part: parts.append(part) or part.finish_reason and over.set()))
    assert over.wait(300)
    told.extend(parts)
    alone, = sampler.generate(loaded.params, [ids], max_new_tokens=6, seed=3)
    assert np.concatenate([part.ids for part in parts]).tolist() == alone.ids.tolist()
    return alone.ids

  said = ask(first)
  whole = len(first) + len(said) - 1  # what was drawn last was not run
  ask(np.concatenate([first, said, [7]]).astype(np.int32))
  assert engine.kept.reused == whole and engine.kept.shared == 0
  # From the same, of which the second has run the last token, too.
  ask(np.concatenate([first, said, [8, 9]]).astype(np.int32))
  assert engine.kept.reused == 2 * whole + 1 and engine.kept.shared == whole + 1
  # Of another one that begins as the first does, which `usage` of OpenAI's protocol calls cached tokens.
  ask(np.concatenate([first[:35], [1, 2, 3]]).astype(np.int32))
  assert engine.kept.shared == whole + 1 + 35 and told[-1].reused == 35
  responses = protocol.Responses(True, "tiny", "", SimpleNamespace(num_samples=2), [np.arange(38)])
  choices = [protocol.Choice(i, loaded.tokenizer, SimpleNamespace(add=lambda part: "")) for i in range(2)]
  for choice in choices:
    choice.add(told[-1])
  assert responses.usage(choices)["prompt_tokens_details"] == {"cached_tokens": 35}  # of one prompt
  engine.swap(jax.tree.map(jnp.copy, loaded.params)).wait()
  ask(np.concatenate([first, said, [7]]).astype(np.int32))
  assert engine.kept.reused == 2 * whole + 1 + 35
  engine.close()


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("text, content, calls, end", [
    ('Sure. <tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>', "Sure.",
     [("weather", '{"city": "Zürich"}')], "tool_calls"),
    ('<tool_call>{"name": "weather", "arguments": {}}</tool_call><tool_call>{"name": "f", "arguments": {"x": 1}}'
     '</tool_call>', None, [("weather", "{}"), ("f", '{"x": 1}')], "tool_calls"),
    ("<tool_call>{weather}</tool_call>", "<tool_call>{weather}</tool_call>", [], "stop"),
    ("It is sunny.", "It is sunny.", [], "stop"),
])
def test_calls_of_tools_are_told_as_openai_tells_them(text, content, calls, end):
  tokenizer, template = BytesTokenizer(), load_template(ROOT / "input_pipeline" / "chat" / "templates" / "qwen3.jinja")
  server = Server(None, SimpleNamespace(prompter=SimpleNamespace(template=template)), "tiny", "")
  asked = protocol.read(dict(messages=[], tools=[WEATHER]), True, [])._replace(find_calls=server._find_calls(WEATHER))
  responses, ids = protocol.Responses(True, "tiny", "", asked, [np.arange(3)]), [*text.encode(), tokenizer.eos_id]
  halves = [Completion(0, 0, np.array(part, np.int32), *[np.zeros(len(part), np.float32)] * 2, finish_reason=reason)
            for part, reason in ((ids[:9], ""), (ids[9:], "stop"))]

  def choice():
    return protocol.Choice(0, tokenizer, generate.Printed(tokenizer))

  whole, streamed = choice(), choice()
  told = responses.whole({0: [whole.add(part) for part in halves]}, [whole])["choices"][0]
  first, last = (responses.event(streamed, *streamed.add(part))["choices"][0] for part in halves)
  assert first["delta"] == {"role": "assistant", "content": ""} and first["finish_reason"] is None
  for said, reason in ((told["message"], told["finish_reason"]), (last["delta"], last["finish_reason"])):
    assert said["content"] == content and reason == end
    functions = [call["function"] for call in said.get("tool_calls", [])]
    assert [(f["name"], f["arguments"]) for f in functions] == calls
    assert all(call["type"] == "function" and call["id"] for call in said.get("tool_calls", []))
  assert [call["index"] for call in last["delta"].get("tool_calls", [])] == list(range(len(calls)))


@pytest.mark.parametrize("path, body, key, says", [
    ("/v1/completions", dict(prompt="a", max_tokens=0), "max_tokens", "a whole number from 1"),
    # What has no place in 32 bits would else end what others asked for at the same time.
    ("/v1/completions", dict(prompt="a", max_tokens=10 ** 12), "max_tokens", "a whole number from 1 to"),
    ("/v1/completions", dict(prompt="a", top_k=10 ** 12), "top_k", "a whole number from -1 to"),
    ("/v1/completions", dict(prompt="a", stop_token_ids=[10 ** 12]), "stop_token_ids", "allowed: a list of token ids"),
    ("/v1/completions", dict(prompt=[10 ** 12]), "prompt", "token ids"),
    ("/v1/completions", dict(prompt="a", temperature=1e-40), "temperature", "allowed: 0, which is greedy, or 1e-06"),
    ("/v1/completions", dict(prompt="a", temperature="hot"), "temperature", "allowed: a number from 0 to 100"),
    ("/v1/completions", dict(prompt="a", top_p=0), "top_p", "found 0"),
    ("/v1/completions", dict(prompt="a", stop=[""]), "stop", "none of them empty"),
    ("/v1/completions", dict(prompt="a", stop_token_ids=[True]), "stop_token_ids", "allowed: a list of token ids"),
    ("/v1/completions", dict(prompt="a", stop="\ud800"), "prompt", "half a character"),
    ("/v1/completions", dict(prompt="a", stream_options=1), "stream_options", "allowed: an object"),
    ("/v1/chat/completions", dict(messages=[dict(role="user", content="a")], chat_template_kwargs=[1]),
     "chat_template_kwargs", "allowed: an object"),
    ("/v1/completions", dict(prompt="a", stream="yes"), "stream", "allowed: true, false"),
    ("/v1/completions", dict(prompt=[]), "prompt", "none of them empty"),
    ("/v1/completions", dict(prompt=[1, -1]), "prompt", "token ids"),
    ("/v1/completions", dict(prompt=[9999]), "prompt", "vocabulary ends at"),
    ("/v1/completions", dict(prompt="a", frequency_penalty=0.5), "frequency_penalty", "found 0.5; allowed here: 0"),
    ("/v1/completions", dict(prompt="a", beams=4), "beams", "not known here"),
    ("/v1/chat/completions", dict(max_tokens=4), "messages", "a list of objects"),
    ("/v1/chat/completions", dict(messages=[dict(role="user", content="a")], top_logprobs=5), "top_logprobs",
     "found 5"),
    ("/v1/chat/completions", dict(messages=[dict(role="user", content="a")], tools=[dict(type="function", function=dict(
        name="add"))]), "messages", "the tool 'add' is left out by"),
    ("/v1/chat/completions", dict(messages=[dict(role="user", content="a")], chat_template_kwargs=dict(messages=[])),
     "messages", "chat_template_kwargs.messages cannot be set there"),
    ("/v1/chat/completions", dict(messages=[dict(role="user", content="a")], tools="weather"),
     "messages", "tools is"),
    ("/v1/chat/completions", dict(messages=[dict(role="user", content="a")], tools="[]"),
     "tools", "each has a function"),
    ("/v1/chat/completions", dict(messages=[dict(content="a")]), "messages", "messages[0] has no 'role'"),
    ("/v1/load_weights", dict(path="/no/such/folder"), "path", "/no/such/folder"),
    ("/v1/load_weights", dict(path=7), "path", "a folder with the same model"),
    ("/v1/completions", {}, None, "is no JSON"),
    ("/v1/completions", dict(whole=[]), None, "a JSON object"),
    ("/v1/load_weights", dict(whole=[]), "path", "a folder with the same model"),
])
def test_what_cannot_be_done_is_refused_by_name(url, path, body, key, says):
  status, param, message = refused(url, path, **body)
  assert (status, param) == (400, key) and says in message


def test_a_client_that_goes_leaves_the_server_to_the_others(url):
  request = urllib.request.Request(f"{url}/v1/completions", json.dumps(
      dict(prompt="a", max_tokens=400, stream=True, temperature=1.5)).encode())
  with urllib.request.urlopen(request, timeout=120) as response:
    response.readline()
  assert post(url, "/v1/completions", prompt="a", max_tokens=2)["choices"][0]["finish_reason"] in ("length", "stop")
  with urllib.request.urlopen(f"{url}/v1/models") as response:
    assert json.loads(response.read())["data"][0]["id"] == "tiny"
  told = post(url, "/v1/completions", prompt="a", max_tokens=1)["system_fingerprint"]
  with urllib.request.urlopen(f"{url}/health") as response:
    assert json.loads(response.read()) == {"status": "ok", "system_fingerprint": told}


def test_what_nobody_waits_for_is_not_generated_to_its_end(direct):
  jobs = []
  server = Server(SimpleNamespace(submit=jobs.append), direct[0], "tiny", "")

  async def leave():
    parts = server._generate([np.array([1], np.int32)] * 2, protocol.read({"prompt": "a"}, False, ()))
    waiting = asyncio.ensure_future(anext(parts))
    await asyncio.sleep(0)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
      await waiting

  asyncio.run(leave())
  assert [job.cancelled for job in jobs] == [True, True]


@pytest.mark.parametrize("given, ends", [({}, (2,)), ({"stop_token_ids": [5]}, (2, 5)), (
    {"stop_token_ids": [5], "ignore_eos": True}, (5,))])
def test_ends_are_the_models_and_those_of_the_request(given, ends):
  assert protocol.read({"prompt": "a"} | given, False, (2,)).how.stop_ids == ends


def test_other_parameters_are_taken_from_a_folder(url, folder, tmp_path):
  def says():
    return post(url, "/v1/completions", prompt="fort", max_tokens=8, temperature=0, return_token_ids=True)

  before = says()
  other = tiny.hf_folder(tmp_path / "other", seed=2)
  told = post(url, "/v1/load_weights", path=str(other))["system_fingerprint"]
  after = says()
  assert after["system_fingerprint"] == told != before["system_fingerprint"]
  mesh = mesh_lib.make_mesh({})
  loaded = generate.load_folder(other, mesh)
  ids = loaded.prompter.text("fort").ids
  (expected,) = Sampler(loaded.model, mesh).generate(loaded.params, [ids], max_new_tokens=8, temperature=0.0,
                                                     stop_ids=loaded.prompter.stop_ids)
  assert after["choices"][0]["token_ids"] == expected.ids.tolist()
  wider = tiny.hf_folder(tmp_path / "wider", hidden_size=32)
  assert "another model than the one that is served" in refused(url, "/v1/load_weights", path=str(wider))[2]
  assert post(url, "/v1/load_weights", path=str(folder))["system_fingerprint"] == before["system_fingerprint"]
  assert says()["choices"] == before["choices"]


def test_what_is_asked_for_behind_a_swap_is_told_whose_parameters_it_gets(direct):
  """Also while others are sampled still, by those before."""
  swapped, given = threading.Event(), []
  server = Server(SimpleNamespace(swap=lambda params: given.append(params) or swapped), direct[0], "tiny", "first",
                  lambda path: (path, "second"))

  async def body():
    return b'{"path": "other"}'

  async def swap():
    answer = asyncio.ensure_future(server._load_weights(SimpleNamespace(body=body)))
    while not given and not answer.done():
      await asyncio.sleep(0.001)
    meanwhile = server.fingerprint, answer.done()
    swapped.set()
    return meanwhile, json.loads((await answer).body)

  assert asyncio.run(swap()) == (("second", False), {"system_fingerprint": "second"}) and given == ["other"]


def test_one_of_a_run_and_a_folder():
  with pytest.raises(ConfigError, match="one of --workdir"):
    command.make_app(SimpleNamespace(workdir=None, hf=None))
