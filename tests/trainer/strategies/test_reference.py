"""Which parameters a reference has, by the log-probs and losses of a model where they can be computed by hand
(test_wiring.py); other runs with references are in test_dpo_runs.py."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.trainer.test_wiring import FIRST, softmax
from trainer import train
from trainer.callbacks import Callback
from trainer.config import defaults, source, strategy
from trainer.errors import ConfigError
from trainer.strategies import reference
from trainer.strategies.reference import first_reference

BETA = 0.5


class Keep(Callback):
  """{step: (w before it, its batch on the host, its loss)}; asks the run to stop after step `stop`."""

  found: dict = {}

  def __init__(self, stop=0):
    self._stop, self._before = stop, {}

  def on_step_begin(self, run):
    self._before[run.step + 1] = np.array(run.state["params"]["head"]["w"], np.float64)

  def on_optimizer_step(self, run):
    if run.step == self._stop:
      run.stop_requested = "a test"

  def on_step_end(self, run, step, metrics):
    batch = {name: np.asarray(values) for name, values in run.batch.items()}
    self.found[step] = self._before[step], batch, metrics["loss"]


def trained(folder, workdir, precompute, stop=0, **changed):
  """{step: what `Keep` keeps} of this process's steps, of four in all: a pair a row, the same four pairs each time; of
  grpo a group of two for each pair."""
  file = folder / "rows.jsonl"
  file.write_text("".join(json.dumps(dict(prompt="p", chosen=chosen * 2, rejected=rejected) if "strategy" not in changed
                                     or changed["strategy"].name == "dpo" else
                                     dict(prompt="p", responses=[chosen * 2, rejected], rewards=[1, 0])) + "\n"
                          for chosen, rejected in ("ab", "cd", "ef", "gh")))
  c = defaults()
  c.update(batch_size=4, seq_len=16, total_steps=4, report=False)
  c.model.name = "tests.trainer.test_wiring.Unigram"
  c.tokenizer.type = "bytes"
  c.strategy = strategy("dpo", precompute=precompute, beta=BETA)
  c.input.packing = "none"
  c.input.sources.main = source(type="jsonl", path=str(file))
  c.input.cache_dir = str(folder / "cache")
  c.optimizer.update(name="sgd", learning_rate=5.0, momentum=0.0, nesterov=False, weight_decay=0.0, clip_norm=0.0)
  c.schedule.update(name="constant", warmup_percent=0.0)
  c.callbacks.keep = dict(type="tests.trainer.strategies.test_reference.Keep", stop=stop)
  c.update(changed)
  Keep.found = {}
  train(c, workdir)
  return Keep.found


def loss_of(w, reference, batch):
  """-log σ(β (chosen's log-ratio - rejected's)), a mean over the pairs: DPO (arXiv 2305.18290, eq. 7)."""
  ratio = np.log(softmax(w)) - np.log(softmax(reference))
  trained, of_token = batch["loss_weights"] > 0, ratio[batch["tokens"]]
  scores = np.array([(of_token * (trained & (batch["segment_ids"] == segment))).sum(axis=1) for segment in (1, 2)]).T
  return np.mean([np.log1p(np.exp(-BETA * (chosen - rejected))) for chosen, rejected in scores])


@pytest.mark.parametrize("precompute", [False, True])
def test_a_run_that_goes_on_has_the_reference_that_it_began_with(precompute, tmp_path):
  before = trained(tmp_path, tmp_path / "w", precompute, stop=2)
  after = trained(tmp_path, tmp_path / "w", precompute)
  assert (list(before), list(after)) == ([1, 2], [3, 4])
  for step, (w, batch, loss) in (before | after).items():
    assert loss == pytest.approx(loss_of(w, FIRST, batch), rel=1e-5), step
    assert (step == 1) == (abs(loss - np.log(2)) < 1e-3)


def test_a_reference_that_moves_does_so_after_every_so_many_steps(tmp_path):
  """TR-DPO (arXiv 2404.09656, eq. 5): after steps 2 and 4 a quarter of the way to the policy; also where the run is
  stopped after 3."""
  options = strategy("dpo", beta=BETA, reference_ema=0.25, reference_ema_steps=2)
  before = trained(tmp_path, tmp_path / "w", False, stop=3, strategy=options)
  steps = before | trained(tmp_path, tmp_path / "w", False, strategy=options)
  moved = 0.75 * FIRST + 0.25 * steps[3][0]
  for step, (w, batch, loss) in steps.items():
    assert loss == pytest.approx(loss_of(w, FIRST if step <= 2 else moved, batch), rel=1e-5), step
  assert abs(loss_of(*steps[4][:1], FIRST, steps[4][1]) - steps[4][2]) > 1e-3


def test_two_models_with_one_folder_of_caches_have_log_probs_of_their_own(tmp_path):
  """The second run begins with the parameters that the first has come to."""
  one = trained(tmp_path, tmp_path / "one", True)
  two = trained(tmp_path, tmp_path / "two", True, init_from=dict(path=str(tmp_path / "one")))
  np.testing.assert_allclose(one[1][0], FIRST, atol=1e-7)
  assert np.abs(two[1][0] - FIRST).max() > 0.1
  for run in (one, two):
    first = run[1][0]
    for _, batch, _ in run.values():
      there = batch["loss_weights"] > 0
      expected = np.log(softmax(first))[batch["tokens"][there]]
      np.testing.assert_allclose(batch["ref_logprobs"][there], expected, atol=1e-5)


@pytest.mark.parametrize("kind, size", [("start", 2.0), ("base", 0.0)])
def test_of_adapters_that_were_trained_before_the_base_has_none(kind, size):
  params = {"attn": {"kernel": np.ones((1, 3, 2)), "lora_a": np.ones((1, 3, 1)), "lora_b": np.full((1, 1, 2), 2.0)}}
  c = defaults()
  c.strategy = strategy("dpo", reference=kind)
  found = first_reference(c, None, params, {"attn": {name: params["attn"][name] for name in ("lora_a", "lora_b")}})
  np.testing.assert_array_equal(found["attn"]["lora_a"] @ found["attn"]["lora_b"], np.full((1, 3, 2), size))


def test_log_probs_of_another_temperature_are_not_those_of_the_cache(tmp_path):
  for temperature in (1.0, 0.5):
    grpo = strategy("grpo", precompute=True, temperature=temperature, kl_coef=0.1, reference_ema=0.0)
    _, batch, _ = trained(tmp_path, tmp_path / f"at {temperature}", True, strategy=grpo, total_steps=1)[1]
    there = batch["loss_weights"] > 0
    expected = np.log(softmax(FIRST / temperature))[batch["tokens"][there]]
    np.testing.assert_allclose(batch["ref_logprobs"][there], expected, atol=1e-5)


def asked_of(changed=(), kind="start", meta=None, params=3.0):
  """(what the cache of log-probs is asked by, what the reference is made of), `changed` being options of the run."""
  changed, asked, made = dict(changed), [], []
  c = defaults()
  c.strategy = strategy("grpo", precompute=True, kl_coef=0.1, reference=kind,
                        temperature=changed.get("temperature", 1.0))
  c.precision.compute = changed.get("compute", "float32")
  leaf = SimpleNamespace(shape=(), dtype=np.float32)
  program = SimpleNamespace(
      model=SimpleNamespace(spec=changed.get("spec", "8 layers")), reference={"w": leaf}, params_sharding={"w": None},
      options=SimpleNamespace(micro_batch_size=changed.get("rows", 4)), precompute=True)

  @dataclasses.dataclass
  class Start:
    state: dict
    meta: dict
    pinned: dict

  data = SimpleNamespace(use=lambda logprobs: None, reference=lambda identity, folder: asked.append(identity))
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(reference, "complete", lambda *args: None)
    patch.setattr(reference, "_pin", lambda start, *rest: start)
    patch.setattr(reference.init_from, "origin_of", lambda config: None)
    patch.setattr(reference.init_from, "first_params", lambda *args, partial: ({"w": np.float32(7.0)}, ""))
    patch.setattr(reference, "first_reference", lambda config, model, params, target: (
        made.append(float(params["w"])), {"w": np.float32(changed.get("w", params["w"]))})[1])
    held = {"base": np.float32(changed.get("base", 1.0)), "w": np.float32(params)}
    reference.precompute(c, Start({"params": held}, meta or {}, {}), program, [data], Path("w"))
  return asked[0], made[0]


@pytest.mark.parametrize("changed", [{}, dict(temperature=0.5), dict(compute="bfloat16"), dict(spec="9 layers"),
                                     dict(rows=8), dict(w=3.5), dict(base=1.5)])
def test_log_probs_of_the_cache_are_those_of_the_same_computation(changed):
  """By whatever could change a bit of them: parameters, model, precision, rows computed at a time, temperature; the
  parameters also where they are the policy's, such as the base under adapters."""
  assert (asked_of(changed)[0] == asked_of()[0]) == (not changed)


@pytest.mark.parametrize("kind, meta, expected", [
    ("start", {}, 3.0), ("start", {"step": 2}, 7.0), ("base", {}, 3.0), ("base", {"step": 2}, 7.0),
    ("/a", {"step": 2}, 3.0)])
def test_a_run_that_goes_on_makes_its_reference_of_what_it_began_with(kind, meta, expected):
  """7, of which its checkpoint knows nothing, not 3, to which it has been trained. Another run's is read elsewhere."""
  assert asked_of(kind=kind, meta=meta)[1] == expected


@pytest.mark.parametrize("kind, rank, more, message", [
    ("base", 0, {}, "there are no adapters .model.lora.rank is 0"),
    ("base", 2, dict(modules_to_save=("^embed/",), peft="a"), "may have its own values of model.lora.modules_to_save"),
    ("base", 2, dict(modules_to_save=("^embed/",), path="a"), "may have its own values of model.lora.modules_to_save"),
    ("base", 2, dict(modules_to_save=("^embed/",)), None), ("base", 2, dict(peft="a", path="b"), None),
    ("start", 0, {}, None), ("start", 2, {}, None), ("base", 2, {}, None), ("/a", 0, {}, None), ("/a", 2, {}, None)])
def test_what_a_reference_holds(kind, rank, more, message):
  """With adapters they alone, unless it is another model as a whole: then what is frozen, too."""
  c = defaults()
  c.strategy, c.init_from.path = strategy("dpo", reference=kind), more.get("path")
  c.model.lora.update(rank=rank, **{key: value for key, value in more.items() if key != "path"})
  optimizer = SimpleNamespace(split=lambda params: ({"b": params["b"]}, {"a": params["a"]}),
                              merge=lambda trained, frozen: trained | frozen)
  if message is None:
    found = reference.shapes(c, optimizer, {"a": 1, "b": 2})
    assert found.keys() == ({"a", "b"} if (kind, rank) == ("/a", 0) else {"b"})
    return
  with pytest.raises(ConfigError, match=message):
    reference.shapes(c, optimizer, {"a": 1, "b": 2})


def test_references_that_cannot_be_are_refused(tmp_path, monkeypatch):
  c = defaults()
  c.strategy = strategy("dpo", reference=str(tmp_path / "no"))
  with pytest.raises(ConfigError, match="no', which is neither 'start', 'base', nor a folder that exists"):
    first_reference(c, None, {}, {})
  (tmp_path / "hf").mkdir()
  (tmp_path / "hf" / "config.json").write_text("{}")
  c.strategy.reference, c.model.lora.rank = str(tmp_path / "hf"), 2
  with pytest.raises(ConfigError, match="a whole model, but this run trains adapters over a fresh base"):
    first_reference(c, None, {}, {})
  c.model.lora.rank = 0
  for where in ("2 arrays from it, 1 fresh arrays", "fresh parameters"):
    monkeypatch.setattr(reference.init_from, "first_params", lambda *_, where=where, **__: ("loaded", where))
    with pytest.raises(ConfigError, match=f"does not have all of the model's parameters .{where}"):
      first_reference(c, None, {}, {})


def test_another_model_is_read_from_its_own_place_whatever_the_run_begins_with(tmp_path, monkeypatch):
  """A folder, and adapters of a run over the same base; names of folders say nothing of what is fresh."""
  (tmp_path / "hf").mkdir()
  (tmp_path / "hf" / "config.json").write_text("{}")
  (tmp_path / "run" / "checkpoints").mkdir(parents=True)
  (tmp_path / "run" / "config.json").write_text("{}")
  c, asked, policy = defaults(), [], SimpleNamespace()
  monkeypatch.setattr(reference.init_from, "first_params", lambda *given, **more: (
      asked.append((given, more)), ("loaded", "3 arrays from /runs/fresh arrays"))[1])
  c.init_from.update(path="of the run", remap=(("a", "b"),), ignore=("x",), fresh=True)
  for name, rank in (("hf", 0), ("run", 2)):
    c.strategy = strategy("dpo", reference=str(tmp_path / name))
    c.model.lora.update(rank=rank, peft="adapters")
    assert first_reference(c, policy, {"a": 1}, {"b": 2}) == "loaded"
    ((origin, model, target), more) = asked.pop()
    assert model is policy and target == {"b": 2} and more == dict(partial=True)
    assert (origin.path, origin.folder) == ((None, str(tmp_path / name)) if name == "hf" else
                                            (str(tmp_path / name), None))
    assert (origin.remap, origin.ignore, origin.peft, origin.fresh, origin.tokenizer, origin.model) == (
        (), (), None, False, None, c.model)


def test_a_run_that_goes_on_has_its_own_reference_alone():
  @dataclasses.dataclass
  class Start:
    meta: dict
    pinned: dict

  assert reference._pin(Start({}, {"base": "a"}), "b", "KEY").pinned == {"base": "a", "reference": "b"}
  assert reference._pin(Start({"pinned": {"reference": "b"}}, {}), "b", "KEY").pinned == {"reference": "b"}
  with pytest.raises(ConfigError, match="its fingerprint is c, that of the one here is b. Give the KEY that it was"):
    reference._pin(Start({"pinned": {"reference": "c"}}, {}), "b", "KEY")
