"""Rollouts whose completions a server samples: with the policy's own parameters, checked, and resumable."""

import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from models import api, hf, lora
from tests import tiny
from tests.models.initial import initial
from tests.trainer import rollout_runs
from tests.trainer.serve import servers
from trainer import train, tree
from trainer.config import defaults
from trainer.errors import ConfigError, DataError
from trainer.generate.completion import More, Request
from trainer.generate.stop_strings import StopStrings
from trainer.rollouts import engine as engine_lib
from trainer.rollouts import schedule
from trainer.rollouts.engine import Engine, check


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tiny.hf_folder(tmp_path_factory.mktemp("model") / "model", vocab_size=264)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
  return rollout_runs.write_prompts(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(scope="module")
def url(folder):
  with servers.serving(servers.app(folder)) as address:
    yield address


def config(prompts, folder, url, **changed):
  c = rollout_runs.config(prompts, **changed)
  c.model = defaults().model
  c.model.hf, c.rollout.engine = str(folder), url
  return c


def test_it_samples_with_the_policys_own_parameters_each_time(prompts, folder, url, tmp_path):
  """Of three rollouts with two updates each, log-probs of the server are those of the policy when the rollout began."""
  run = train(config(prompts, folder, url, total_steps=6, strategy=dict(correction="token_truncate")), tmp_path / "w")
  rows = rollout_runs.rows_of(tmp_path / "w")
  for step in (1, 3, 5):
    assert abs(rows[step]["sampling/kl"]) < 1e-6, (step, rows[step]["sampling/kl"])
    assert rows[step]["completions/mean_length"] > 0 and rows[step]["update_norm"] > 0
  texts = {line["completion"] for step in (1, 3, 5) for line in rollout_runs.table(tmp_path / "w", step)}
  assert len(texts) > 10
  # The server has what the last rollout was sampled with, and no folder but the last is left.
  assert [p.name for p in (tmp_path / "w" / "engine").iterdir()] == ["3"]
  again = train(config(prompts, folder, url, total_steps=6, strategy=dict(correction="token_truncate")),
                tmp_path / "again")
  rollout_runs.assert_same_state(run.state["params"], again.state["params"])


def test_a_stopped_run_goes_on(prompts, folder, url, tmp_path):
  whole = train(config(prompts, folder, url, total_steps=4, ckpt_steps=1), tmp_path / "whole")
  train(config(prompts, folder, url, total_steps=3, ckpt_steps=1), tmp_path / "parts")
  c = config(prompts, folder, url, total_steps=4, ckpt_steps=1, allow_config_changes=True)
  parts = train(c, tmp_path / "parts")
  rollout_runs.assert_same_state(whole.state["params"], parts.state["params"])


def test_adapters_are_handed_over_merged(prompts, folder, url, tmp_path):
  c = config(prompts, folder, url, total_steps=4)
  c.model.lora.rank = 2
  train(c, tmp_path / "w")
  rows = rollout_runs.rows_of(tmp_path / "w")
  assert abs(rows[3]["sampling/kl"]) < 1e-6 and rows[2]["update_norm"] > 0


def test_a_server_samples_while_updates_go_on_and_the_run_is_had_again_by_its_schedule(prompts, folder, url, tmp_path):
  ahead = dict(total_steps=8, strategy=dict(correction="token_truncate"))
  at_once = train(config(prompts, folder, url, rollout=dict(max_staleness=2, concurrent=True), **ahead), tmp_path / "w")
  sampled = schedule.read(str(tmp_path / "w" / schedule.NAME), 2)
  assert max(2 * number - by.version for number, by in sampled.items()) in (1, 2)  # of two updates each
  rows = rollout_runs.rows_of(tmp_path / "w")
  stale = [step for step in (1, 3, 5, 7) if rows[step]["rollout/staleness"]]
  assert stale and all(rows[step]["sampling/sampling_logp_difference/max"] > 1e-5 for step in stale)
  again = dict(max_staleness=2, schedule=str(tmp_path / "w" / schedule.NAME))
  in_turns = train(config(prompts, folder, url, rollout=again, **ahead), tmp_path / "again")
  for step in (1, 3, 5, 7):
    assert rollout_runs.table(tmp_path / "w", step) == rollout_runs.table(tmp_path / "again", step)
  rollout_runs.assert_same_state(at_once.state["params"], in_turns.state["params"])


@pytest.fixture(scope="module")
def policy(folder):
  return hf.load(folder)


def engine(policy, url, tmp_path, seconds=20.0):
  c = defaults()
  c.rollout.update(engine=url, engine_timeout_seconds=seconds)
  c.model.update(num_layers=2, hidden_size=16, intermediate_size=32, num_heads=2, vocab_size=264, tie_embeddings=False)
  return Engine(c, policy[0], None, tmp_path / "engine")


def test_without_an_engine_the_program_samples_as_the_config_says(monkeypatch, tmp_path):
  made, c = [], defaults()
  for name in ("Sampler", "Engine"):
    monkeypatch.setattr(engine_lib, name, lambda *given, name=name, **more: made.append((name, given, more)))
  c.rollout.update(batch_size=12, prefill_chunk=34)
  engine_lib.make_sampler(c, "model", "mesh", tmp_path)
  c.rollout.engine = "http://a"
  engine_lib.make_sampler(c, "model", "mesh", tmp_path)
  assert made == [("Sampler", ("model", "mesh"), dict(rows=12, prefill_chunk=34, record=True)),
                  ("Engine", (c, "model", "mesh", tmp_path / "engine"), {})]


def choice(**changed):
  return dict(index=0, token_ids=[5, 6, 7], logprobs=dict(token_logprobs=[-1.0, -2.0, -3.0]), finish_reason="stop",
              stop_reason=None) | changed


def complete(policy, tmp_path, *choices, seconds=20.0, status=200, **more):
  def answer(route, body):
    if route != "/v1/completions":
      return 200, {"system_fingerprint": "new"}
    asked.append(body)
    return status, dict(choices=choices or [choice()], system_fingerprint="new") | more

  asked: list = []
  with servers.answering(answer) as url:
    stop = StopStrings(SimpleNamespace(token_bytes=[b"a"] * 264), ("b",))
    found = engine(policy, url, tmp_path, seconds).generate(
        policy[1], [[1, 2]], max_new_tokens=4, stop_ids=(7,), temperature=0.5, stop=stop, seed="3/1/0")
  return asked, found


def test_what_is_asked_and_what_is_read(policy, tmp_path):
  asked, (found,) = complete(policy, tmp_path)
  assert asked == [dict(
      model="scripted", prompt=[1, 2], n=1, max_tokens=4, logprobs=0, temperature=0.5, top_p=1.0, top_k=-1, min_p=0.0,
      seed=asked[0]["seed"], return_token_ids=True, stop_token_ids=[7], stop=["b"], include_stop_str_in_output=True)]
  assert 0 <= asked[0]["seed"] < 2**31
  np.testing.assert_array_equal(found.ids, [5, 6, 7])
  np.testing.assert_array_equal(found.logprobs, np.float32([-1, -2, -3]))
  assert (found.finish_reason, found.stop_reason) == ("stop", None)
  _, (found,) = complete(policy, tmp_path, choice(token_ids=[5, 6], logprobs=dict(token_logprobs=[-1, -2]),
                                                  stop_reason="b"))
  assert (found.finish_reason, found.stop_reason) == ("stop", "b")


def test_what_a_request_says_of_sampling_is_asked_for(policy, tmp_path):
  bodies = []

  def answer(route, body):
    bodies.append(body)
    return 200, dict(choices=[choice()])

  how = dict(temperature=0.25, top_k=3, top_p=0.75, min_p=0.125)
  with servers.answering(answer) as url:
    engine(policy, url, tmp_path).generate(policy[1], [[1, 2]], max_new_tokens=4, stop_ids=(7, 5, 7), **how)
  assert {key: bodies[-1][key] for key in how} == how and bodies[-1]["stop_token_ids"] == [5, 7]
  assert "stop" not in bodies[-1] and "include_stop_str_in_output" not in bodies[-1]


def test_prompts_that_come_later_are_asked_for_with_options_of_their_own(policy, tmp_path):
  """One while the first two are completed, another when nothing is left."""
  asked, idle = {}, []

  def answer(route, body):
    if "prompt" in body:
      asked[body["prompt"][0]] = (body["max_tokens"], body["n"], body["temperature"], body["stop_token_ids"])
    return 200, dict(choices=[choice(index=n, token_ids=[10 * body["prompt"][0] + n, 20, 7]) for n in range(body["n"])]
                     if "prompt" in body else [])

  def more(none_left):
    idle.append(none_left)
    assert len(idle) < 1000  # it is asked as often as something ends
    if len(idle) == 1:
      return More([[2, 2]], dict(max_new_tokens=[5], samples=[[3]]), coming=1)
    if none_left and sum(idle) == 2:
      return More([np.array([1, 9])], dict(max_new_tokens=[6], samples=[[1, 0]]))
    return More(coming=1 if sum(idle) < 2 else 0)

  with servers.answering(answer) as url:
    found = list(engine(policy, url, tmp_path).stream(policy[1], [[0, 4], [3, 3, 3]], Request(
        max_new_tokens=[4, 8], stop_ids=(7,), temperature=0.5, samples=[[2], [5]], more=more)))
  # Numbers of prompts go on behind those that came before.
  assert sorted((c.prompt, c.sample, c.ids[0]) for c in found) == [
      (0, 2, 0), (1, 5, 30), (2, 3, 20), (3, 0, 11), (3, 1, 10)]
  assert asked == {0: (4, 1, 0.5, [7]), 3: (8, 1, 0.5, [7]), 2: (5, 1, 0.5, [7]), 1: (6, 2, 0.5, [7])}
  assert not idle[0] and idle[-1]


def test_samples_are_in_their_order_and_others_have_another_seed(policy, tmp_path):
  asked = []

  def answer(route, body):
    asked.append(body)
    return 200, dict(choices=[choice(index=1, token_ids=[6, 7], logprobs=dict(token_logprobs=[-1.0, -2.0])), choice()])

  with servers.answering(answer) as url:
    request = Request(max_new_tokens=4, stop_ids=(7,), samples=[range(2), range(2, 4)])
    found = list(engine(policy, url, tmp_path).stream(policy[1], [[1, 2]] * 2, request))
  assert sorted((c.prompt, c.sample, c.ids.tolist()) for c in found) == [
      (0, 0, [5, 6, 7]), (0, 1, [6, 7]), (1, 2, [5, 6, 7]), (1, 3, [6, 7])]
  assert len({body["seed"] for body in asked if "seed" in body}) == 2


@pytest.mark.parametrize("choices, more, says", [
    ([choice(token_ids=[5, 6, 264])], {}, "token 264, where the vocabulary has 264"),
    ([choice(logprobs=dict(token_logprobs=[-1.0, -2.0]))], {}, "3 tokens with 2 log-probs"),
    ([choice(logprobs=dict(token_logprobs=[-1.0, -2.0, 0.5]))], {}, "some of them no log-probs"),
    ([choice(token_ids=None)], {}, "no token_ids or no logprobs"),
    ([choice(logprobs=None)], {}, "no token_ids or no logprobs"),
    ([choice(finish_reason="length")], {}, "3 tokens that end by 'length', where 4 were allowed"),
    ([choice(finish_reason="abort")], {}, "end by 'abort'"),
    ([choice(token_ids=[5, 7, 6])], {}, "an end by token 6, which ends nothing"),
    ([choice(), choice(index=1)], {}, "2 completions where 1 were asked for"),
    ([], dict(system_fingerprint="old"), "the fingerprint old, and was given those of new"),
])
def test_answers_that_cannot_be_are_told(policy, tmp_path, choices, more, says):
  with pytest.raises(DataError, match=says):
    complete(policy, tmp_path, *choices, **more)


@pytest.mark.timeout(60)
def test_a_server_that_refuses_fails_or_is_not_there(policy, tmp_path):
  with pytest.raises(ConfigError, match="/v1/completions refuses with status 400"):
    complete(policy, tmp_path, status=400)
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{free.getsockname()[1]}"
  with pytest.raises(ConfigError, match="has not answered for 0.7 s .*refused.* Start it"):
    engine(policy, address, tmp_path, 0.7).generate(policy[1], [[1]], max_new_tokens=1)
  # The last one, since it asks in a thread, which nothing ends but its answer.
  with pytest.raises(ConfigError, match="has not answered for 1 s .*status 503"):
    complete(policy, tmp_path, status=503, seconds=1.0)


@pytest.mark.timeout(60)
def test_a_run_that_stops_waits_for_no_server(policy, tmp_path, monkeypatch):
  """It is not there, or fails while it samples; its threads end, too, for which the program would wait."""
  monkeypatch.setattr(engine_lib, "LOOK_SECONDS", 0.01)
  looks = iter((False, False))

  def asked(url):
    made = engine(policy, url, tmp_path, 1e4)
    return list(made.stream(policy[1], [[1], [2]], Request(max_new_tokens=1, stopped=lambda: next(looks, True))))

  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    assert asked(f"http://127.0.0.1:{free.getsockname()[1]}") == []
  looks = iter([False] * 9)
  with servers.answering(lambda route, body: (503 if "completions" in route else 200, {})) as url:
    assert asked(url) == [] and next(looks, None) is None
    waiting = [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]
    for thread in waiting:
      thread.join(20)
    assert waiting and not any(thread.is_alive() for thread in waiting)


def test_one_that_fails_for_a_moment_is_asked_again(policy, tmp_path, caplog, monkeypatch):
  monkeypatch.setattr(engine_lib, "RETRY_SECONDS", 0.01)
  times = []

  def answer(route, body):
    times.append(route)
    return (500, {}) if len(times) in (2, 3) else (200, dict(choices=[choice()]))

  with servers.answering(answer) as url:
    (found,) = engine(policy, url, tmp_path).generate(policy[1], [[1, 2]], max_new_tokens=4, stop_ids=(7,))
  assert found.ids.tolist() == [5, 6, 7]
  assert times == ["/v1/load_weights"] + ["/v1/completions"] * 3
  told, = [line for line in caplog.messages if "asked again" in line]
  assert "/v1/completions: status 500" in told and "up to 20 s" in told


def test_a_server_that_was_started_anew_is_given_the_parameters_again(policy, tmp_path):
  """What it said meanwhile, by those that it was started with, is not trained on."""
  given: list = []

  def answer(route, body):
    if route == "/v1/load_weights":
      given.append(body["path"])
      return 200, {"system_fingerprint": "new"}
    if len(given) == 1:
      return 200, dict(choices=[choice(token_ids=[1, 2, 7])], system_fingerprint="its own")
    return 200, dict(choices=[choice()], system_fingerprint="new")

  with servers.answering(answer) as url:
    found = engine(policy, url, tmp_path).generate(policy[1], [[1], [2], [3]], max_new_tokens=4, stop_ids=(7,))
  assert [one.ids.tolist() for one in found] == [[5, 6, 7]] * 3 and given == [str(tmp_path / "engine" / "1")] * 2


def test_parameters_are_handed_over_once_and_as_the_server_wants_it(policy, tmp_path):
  told = []

  def answer(route, body):
    told.append((route, body))
    return 200, dict(choices=[choice()])

  with servers.answering(answer) as url:
    sampler = engine(policy, url, tmp_path)
    sampler._handover = "sglang"
    for _ in range(2):
      list(sampler.stream(policy[1], [[1]], Request(max_new_tokens=4, stop_ids=(7,))))
  (route, body), *completions = told
  assert (route, body) == ("/update_weights_from_disk", {"model_path": str(tmp_path / "engine" / "1")})
  assert [route for route, _ in completions] == ["/v1/completions"] * 2
  _, params = hf.load(tmp_path / "engine" / "1")
  rollout_runs.assert_same_state(params, policy[1])


def test_with_adapters_the_merged_model_is_handed_over(policy, tmp_path):
  cfg = defaults().model
  cfg.update(num_layers=2, hidden_size=16, intermediate_size=32, num_heads=2, vocab_size=264, tie_embeddings=False)
  cfg.lora.rank = 2
  adapted = api.make_model(cfg, vocab_size=264, params_dtype="float32", compute_dtype="float32")
  rng = np.random.default_rng(0)
  params = tree.unflatten(tree.flatten(policy[1]) | {
      path: rng.normal(size=leaf.shape).astype(np.float32)
      for path, leaf in tree.flatten(adapted.abstract_params()).items() if lora.is_adapter(path)})
  with servers.answering(lambda route, body: (200, dict(choices=[choice()]))) as url:
    list(engine((adapted, params), url, tmp_path).stream(params, [[1]], Request(max_new_tokens=4, stop_ids=(7,))))
  _, given = hf.load(tmp_path / "engine" / "1")
  rollout_runs.assert_same_state(given, lora.merge(params, adapted.spec.lora))
  assert np.any(given["blocks"]["attn"]["q"]["kernel"] != policy[1]["blocks"]["attn"]["q"]["kernel"])


def test_entries_that_pad_the_vocabulary_are_not_handed_over(tmp_path):
  """A run that began with no folder rounds its vocabulary up; what a server reads has the tokenizer's entries alone."""
  cfg = defaults().model
  cfg.update(num_layers=1, hidden_size=16, intermediate_size=32, num_heads=2, tie_embeddings=False)
  model = api.make_model(cfg, vocab_size=260, params_dtype="float32", compute_dtype="float32")
  assert model.vocab_size == 384
  params = initial(model)
  with servers.answering(lambda route, body: (200, dict(choices=[choice(token_ids=[5, 6, 260])]))) as url:
    c = defaults()
    c.model, c.rollout.engine = cfg, url
    with pytest.raises(DataError, match="token 260, where the vocabulary has 260"):
      Engine(c, model, None, tmp_path / "engine").generate(params, [[1]], max_new_tokens=4, stop_ids=(260,))
  read, given = hf.load(tmp_path / "engine" / "1")
  assert read.vocab_size == 260
  expected = tree.flatten(params)
  expected["embed/embedding"] = expected["embed/embedding"][:260]
  expected["unembed/kernel"] = expected["unembed/kernel"][:, :260]
  rollout_runs.assert_same_state(given, tree.unflatten(expected))


@pytest.mark.parametrize("change, says", [
    ({"engine": "localhost:8000"}, "allowed: the address of a server"),
    ({"engine_handover": "carrier pigeon"}, "allowed: weft, vllm, sglang"),
    ({"engine_timeout_seconds": 0.0}, "it must be above 0"),
    ({"replay_experts": True}, "rollout.replay_experts is True, but servers do not tell"),
    ({"share_beginnings": True}, "rollout.share_beginnings is True, but rollout.engine runs prompts in its own way"),
    ({"vision": "siglip"}, "rollout.engine is for models of text"),
    ({"frozen": "nf4"}, "precision.frozen is nf4: a base in few bits cannot be handed"),
])
def test_what_cannot_be_is_refused(change, says):
  c = defaults()
  c.rollout.engine = "http://127.0.0.1:1"
  c.model.vision.tower, c.precision.frozen = change.pop("vision", "none"), change.pop("frozen", "bfloat16")
  c.rollout.update(change)
  with pytest.raises(ConfigError, match=says):
    check(c)
