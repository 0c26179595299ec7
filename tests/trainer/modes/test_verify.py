"""`--mode=verify`: what holds passes, on every strategy and on a mesh; what does not hold is told, with a number."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evaluators import loss as loss_evaluator
from input_pipeline import loader
from input_pipeline.examples import top_k
from tests import tiny
from tests.trainer import rollout_runs, test_image_runs
from tests.trainer.strategies import test_dpo_runs as test_dpo
from tests.trainer.strategies import test_reward, test_teachers
from tests.trainer.strategies import test_sft_runs as test_sft
from trainer import program as program_lib
from trainer import strategies
from trainer.config import checks as config_checks
from trainer.config import defaults, strategy
from trainer.errors import ConfigError
from trainer.generate import sampler
from trainer.metrics import Mean
from trainer.modes import invariances, verify
from trainer.modes.fixture import Fixture, Skip
from trainer.optim import optimizer as optim

pytestmark = pytest.mark.devices(8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("verify")


@pytest.fixture(scope="module")
def corpus(folder):
  return tiny.write_corpus(folder / "corpus")


def seq(corpus, **changed):
  c = tiny.config(corpus, seq_len=96, **changed)
  c.model.dropout = 0.1
  c.schedule.update(name="wsd", decay_percent=50.0)
  c.precision.compute = "bfloat16"
  return c


def by_what(results):
  return {result.what: result for result in results}


SKIPPED = {"policy = reference: margin 0, loss ln 2", "gradient where all rewards are equal",
           "evaluated loss: batches of 1, 3, all", "loss and gradient: prompts shared, apart",
           "ratio of the first step after a rollout: 1"}


@pytest.mark.parametrize("whole", [
    pytest.param(False, marks=pytest.mark.devices(2)), pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.host_patches
def test_pretraining(corpus, tmp_path, capsys, monkeypatch, whole):
  """With dropout, in bfloat16: every equality on a mesh along three axes, or one beside those that have nothing here to
  be measured by."""
  c = seq(corpus)
  c.mesh.update(dict(data=2, fsdp=2, tensor=2) if whole else dict(data=1, fsdp=2))
  if not whole:
    monkeypatch.setattr(invariances, "CHECKS", [check for check in invariances.CHECKS if check.what in {
        "gradient: this mesh, one device", *SKIPPED}])
  results = verify.verify(c, tmp_path)
  shown = capsys.readouterr().out
  assert {r.what for r in results if r.status == "SKIP"} == SKIPPED
  assert not [r for r in results if r.status == "FAIL"] and f"{14 if whole else 2} PASS, 0 FAIL, 5 SKIP" in shown
  for result in results:
    assert result.line() in shown
    assert (result.measured is None) == (result.status == "SKIP") and bool(result.why) == (result.status == "SKIP")
  assert 0 < by_what(results)["gradient: this mesh, one device"].measured < 1e-5
  assert by_what(results)["gradient where all rewards are equal"].why == "no advantages"
  saved = json.loads((tmp_path / "verify" / "results.json").read_text(encoding="utf-8"))
  assert [row["measured"] for row in saved] == [r.measured for r in results]
  # A run in the same folder begins as if nothing had been here.
  assert {p.name for p in tmp_path.iterdir()} == {"verify", "cache"}
  assert {p.name for p in (tmp_path / "verify").iterdir()} == {"results.json", "log.txt"}


# What each strategy has of its own; all of them are measured in the test above.
OWN = {
    "sft": ("loss and gradient: packed, one document a row", "derivative along the gradient: its norm",
            "log-probs: generated, in one pass"),
    "dpo": ("policy = reference: margin 0, loss ln 2", "arrays that a step with NaN changes",
            "hidden states that another document changes"),
    "grpo": ("gradient where all rewards are equal", "gradient: this mesh, one device",
             "derivative along the gradient: its norm", "loss and gradient: prompts shared, apart",
             "ratio of the first step after a rollout: 1"),
    "rollouts": ("gradient where all rewards are equal", "ratio of the first step after a rollout: 1",
                 "log-probs: generated, in one pass"),
    "images": ("loss and gradient: packed, one document a row", "hidden states that a later token changes",
               "hidden states that another document changes"),
    "taught": ("loss and gradient: packed, one document a row", "derivative along the gradient: its norm"),
}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.devices(1)) if name in ("rollouts", "taught") else name for name in OWN])
@pytest.mark.host_patches
def test_strategies(folder, tmp_path, monkeypatch, name):
  if name == "sft":
    c = test_sft.config(test_sft.write_conversations(folder / "chats.jsonl"))
  elif name == "dpo":
    c = test_dpo.config(test_dpo.write_pairs(folder / "pairs.jsonl"))
  elif name in ("grpo", "rollouts"):
    c = rollout_runs.config(rollout_runs.write_prompts(folder))
    # What needs something that answers, which is left out.
    c.rollout.update(environment=f"{rollout_runs.TOYS}.Echo", kept_texts=2, turn_share=0.5)
    c.precision.compute = "bfloat16"
  elif name == "taught":
    # What a model of the same size says that knows nothing yet, either: the objective is small and bends soon.
    _, file = test_teachers.taught_rows(folder, tiny.hf_folder(folder / "teacher", vocab_size=258), 4)
    c = test_teachers.taught_config(folder, file, "best_fit", teacher="rows", cached_top_k=3, beta=0.3)
  else:
    c = test_image_runs.config(folder, "sft")
  if name not in ("rollouts", "taught"):
    c.mesh.update(data=2, fsdp=1, tensor=2, context=2 if name == "sft" else 1, expert=1 if name == "sft" else 2)
  monkeypatch.setattr(invariances, "CHECKS", [check for check in invariances.CHECKS if check.what in OWN[name]])
  results = verify.verify(c, tmp_path)
  assert len(results) == len(OWN[name]) + 1 and {result.status for result in results} == {"PASS"}, results


@pytest.mark.devices(1)
def test_a_reward_model_is_measured_by_its_scores(tmp_path, monkeypatch):
  """With margins, which stand where advantages do, and no tokens to evaluate. Its export is read with scores twice as
  large: a distance of exactly 1 from what was trained, so that without that there is none."""
  def doubled(out):
    model, params = load(out)
    return model, params | {"score": {"kernel": 2 * params["score"]["kernel"]}}

  load = invariances.hf.load
  monkeypatch.setattr(invariances.hf, "load", doubled)
  told = {"logits, scores, vectors: exported and loaded": ("FAIL", 1.0),
          "evaluated loss: batches of 1, 3, all": ("SKIP", None),
          "gradient where all rewards are equal": ("SKIP", None)}
  monkeypatch.setattr(invariances, "CHECKS", [check for check in invariances.CHECKS if check.what in told])
  with pytest.raises(ConfigError, match="1 of 4 equalities do not hold"):
    verify.verify(test_reward.config_of(tmp_path), tmp_path / "w")
  rows = json.loads((tmp_path / "w" / "verify" / "results.json").read_text(encoding="utf-8"))
  assert {row["what"]: (row["status"], row["measured"]) for row in rows if row["what"] in told} == told


@pytest.mark.devices(1)
def test_what_was_found_is_printed_counted_and_kept(corpus, tmp_path, monkeypatch, capsys):
  """Without the runs that it is measured on."""
  def of(value):
    if isinstance(value, Exception):
      raise value
    return value

  made = {"a": 1e-7, "b": 2e-6, "c": Skip("not here"), "d": ZeroDivisionError("by nothing"), "e": float("nan")}
  asked = []
  monkeypatch.setattr(verify, "_straight", lambda *given: asked.append(given[3]) or (SimpleNamespace(model=None), None))
  monkeypatch.setattr(verify, "_resumed", lambda *_: 0.0)
  check = [invariances.Check("I3", what, 1e-6, lambda _, value=value: of(value)) for what, value in made.items()]
  monkeypatch.setattr(invariances, "CHECKS", check)
  with pytest.raises(ConfigError, match=r"^3 of 6 equalities do not hold .*verify/results.json has the numbers"):
    verify.verify(tiny.config(corpus), tmp_path)
  said = capsys.readouterr().out
  for words in (r"PASS  I3   a +1.0e-07 ≤ 1e-06\n", r"FAIL  I3   b +2.0e-06 > 1e-06\n", r"SKIP  I3   c +not here\n",
                r"FAIL  I3   d +ZeroDivisionError: by nothing\n", r"FAIL  I3   e +nan > 1e-06\n",
                r"PASS  I5   arrays of the state: \d+ steps, .* 0.0e\+00 ≤ 0e\+00\n", "2 PASS, 3 FAIL, 1 SKIP in"):
    assert re.search(words, said), words
  rows = json.loads((tmp_path / "verify" / "results.json").read_text(encoding="utf-8"))
  assert [row["status"] for row in rows] == ["PASS", "FAIL", "SKIP", "FAIL", "FAIL", "PASS"]
  monkeypatch.setattr(invariances, "CHECKS", check[:1])
  assert [result.status for result in verify.verify(tiny.config(corpus), tmp_path)] == ["PASS"] * 2
  assert asked == ["float32"] * 2  # what precision.compute=auto is here


@pytest.mark.devices(1)
def test_the_slice_is_small_exact_and_asks_nobody(corpus, tmp_path):
  c = tiny.config(corpus, seq_len=64, batch_size=64, grad_accum_steps=4, total_steps=1000, ckpt_steps=7, report=True,
                  keep_best="eval/val/loss", export=dict(path="out"), spikes=dict(action="warn"))
  c.optimizer.group_warmup, c.input.batch_size_stages = (("embed", 3),), ((5, 128),)
  c.precision.update(params="bfloat16", compute="bfloat16", matmul="int8")
  c.model.update(dropout=0.1, neftune_alpha=5.0)
  c.model.lora.dropout = 0.2
  s = verify.slice_of(program_lib.resolve(c)[0], tmp_path)
  assert (s.batch_size, s.grad_accum_steps, s.seq_len) == (min(verify.ROWS, verify.TOKENS // 64), 1, 64)
  assert (s.total_steps, s.log_steps, s.ckpt_steps, s.ckpt_percent) == (verify.STEPS, 1, -1, -1)
  assert (s.precision.params, s.precision.compute, s.precision.matmul) == ("float32", "float32", "none")
  assert (s.model.dropout, s.model.neftune_alpha, s.model.lora.dropout) == (0.0, 0.0, 0.0)
  assert (dict(s.evals), dict(s.callbacks), s.keep_best, s.export.path, s.report, s.spikes.action) == (
      {}, {}, None, None, False, "none")
  assert s.input.batch_size_stages == s.optimizer.group_warmup == () and s.schedule.name == defaults().schedule.name
  assert s.input.sources.main.path == str(corpus) and s.optimizer.learning_rate == c.optimizer.learning_rate
  c = tiny.config(corpus, strategy=strategy("dpo", precompute=True, beta=0.3), seq_len=2**20)
  s = verify.slice_of(config_checks.resolve(c), tmp_path)
  assert s.batch_size == 2 and s.strategy.precompute is False and s.strategy.beta == 0.3
  c = rollout_runs.config(rollout_runs.write_prompts(tmp_path))
  c.rollout.update(group_size=8, max_new_tokens=5, environment="a.b", resample=3, reward_workers=4, temperature=0.7)
  s = verify.slice_of(config_checks.resolve(c), tmp_path)
  r = s.rollout
  assert (r.num_prompts, r.group_size, r.max_new_tokens, r.batch_size, r.updates) == (2, 4, 5, 8, 2)
  assert (r.environment, r.resample, r.reward_workers, r.temperature, list(r.rewards)) == (None, 0, 0, 0.7, ["made_up"])
  assert verify.made_up(["x"] * 5) == [0, 1 / 3, 2 / 3, 1, 0]


def test_one_ratio_beside_1_is_told(tmp_path):
  """Mean and divergence of ten ratios of which two differ, so that their mean is 1 all the same."""
  def of(compute="float32", **metrics):
    rows = [{"step": 1} | {f"policy/{name}": value for name, value in metrics.items()}, {"step": 2, "loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"bfloat16": {"policy/ratio_mean": 1.0, "policy/approx_kl": 2.0**-9}}
    return invariances.first_ratio(SimpleNamespace(
        workdir=tmp_path, compute=compute, gradient=lambda precision__compute: (None, own[precision__compute])))

  assert of(ratio_mean=1.0, approx_kl=0.0) == 0
  logs = np.log([1 + 1e-6, 1 - 1e-6])
  assert of(ratio_mean=1.0, approx_kl=float(np.sum(np.expm1(logs) - logs) / 10)) > 0
  assert of(ratio_mean=1.0 + 2**-23, approx_kl=0.0) > 0
  assert of("bfloat16", ratio_mean=1.0, approx_kl=0.0) == 2.0**-9  # in the run's own precision
  with pytest.raises(Skip, match="no ratios"):
    of()


@pytest.mark.parametrize("wrong", [1.0, 1.1, 0.5])
def test_an_objective_that_bends_soon_has_its_derivative(wrong):
  """Of 1e-4 (1 + tanh 30 x), in float32: bent at the first step that is tried. A gradient that is wrong stays so."""
  def gradient(batch, params=None):
    x = np.float32(0.1) if params is None else params["w"][0]
    slope = 30e-4 * (1 - np.tanh(3.0) ** 2)
    return {"w": np.array([wrong * slope, 0], np.float32)}, {"loss": float(np.float32(1e-4) * (1 + np.tanh(30 * x)))}

  given = SimpleNamespace(built_in=False, batch={}, params={"w": np.array([0.1, 10], np.float32)}, gradient=gradient,
                          config=SimpleNamespace(strategy=None))
  assert invariances.derivative(given) == pytest.approx(abs(1 / wrong - 1), abs=1e-2)


def broken(monkeypatch, what):
  """Breaks one thing; returns the equality that is to notice."""
  seq = strategies.STRATEGIES["seq"]
  loss = seq.loss
  if what == "mean of means":
    def means(model, params, batch, rng, cfg):
      terms, metrics = loss(model, params, batch, rng, cfg)
      total, weight = jnp.sum(terms["loss"].sum), jnp.sum(terms["loss"].weight)
      return terms | {"loss": Mean(total / jnp.maximum(weight, 1), jnp.ones(()))}, metrics

    monkeypatch.setitem(strategies.STRATEGIES, "seq", replace(seq, loss=means))
    return "gradient: micro-batches, whole batch"
  if what == "leak":
    hidden = Fixture.hidden
    monkeypatch.setattr(Fixture, "hidden", lambda self, batch: (
        hidden(self, batch) + 1e-6 * (np.roll(batch["tokens"], 40, axis=1)[..., None] % 5)))
    return "hidden states that another document changes"
  if what == "guard":
    monkeypatch.setattr(optim, "choose", lambda condition, yes, no: yes)
    return "arrays that a step with NaN changes"
  if what == "data":
    batch, calls = loader.TrainData.batch, []

    def other_each_time(self, step, rows=slice(None)):
      calls.append(step)
      made = batch(self, step, rows)
      made["tokens"] = (made["tokens"] + len(calls)) % 250
      return made

    monkeypatch.setattr(loader.TrainData, "batch", other_each_time)
    return f"arrays of the state: {verify.STEPS} steps, {verify.STOP} + {verify.STEPS - verify.STOP}"
  if what == "temperature":
    generate = sampler.Sampler.generate
    monkeypatch.setattr(sampler.Sampler, "generate",
                        lambda self, *a, **options: generate(self, *a, **options | {"temperature": 0.9}))
    return "log-probs: generated, in one pass"
  if what == "gradient":
    def half(model, params, batch, rng, cfg):
      terms, metrics = loss(model, params, batch, rng, cfg)
      value = terms["loss"].sum
      return terms | {"loss": Mean(value + 0.5 * (jax.lax.stop_gradient(value) - value), terms["loss"].weight)}, metrics

    monkeypatch.setitem(strategies.STRATEGIES, "seq", replace(seq, loss=half))
    return "derivative along the gradient: its norm"
  assert what == "evaluation"
  sums = loss_evaluator._make_row_sums
  monkeypatch.setattr(loss_evaluator, "_make_row_sums", lambda model: lambda params, batch: (
      sums(model)(params, batch) * jnp.array([1.0 / len(batch["tokens"]), 1.0, 1.0])))
  return "evaluated loss: batches of 1, 3, all"


@pytest.mark.devices(1)  # one shard of rows, so that all apply
@pytest.mark.parametrize("what", ["mean of means", "leak", "guard", "data", "temperature", "gradient", "evaluation"])
def test_what_is_broken_is_told(corpus, tmp_path, monkeypatch, capsys, what):
  """Of the equalities only that one is measured."""
  c = tiny.config(corpus, seq_len=96)
  expected = broken(monkeypatch, what)
  monkeypatch.setattr(invariances, "CHECKS", [check for check in invariances.CHECKS if check.what == expected])
  if what != "data":
    monkeypatch.setattr(verify, "_resumed", lambda *args: 0.0)
  with pytest.raises(ConfigError, match=r"1 of \d+ equalities do not hold"):
    verify.verify(c, tmp_path)
  failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
  assert len(failed) == 1 and expected in failed[0] and " > " in failed[0], failed


def test_rounding_of_a_recurrence_is_allowed_for_and_nothing_else():
  """Of gradients in parts and with layers otherwise; what is to be 0 stays 0."""
  for pattern, expected in ((("global", "local"), 1e-6), (("delta", "global"), 1e-5), (("mamba",), 1e-5)):
    fixture = SimpleNamespace(model=SimpleNamespace(spec=SimpleNamespace(layer_pattern=pattern)))
    for measured, status in ((0.9 * expected, "PASS"), (1.1 * expected, "FAIL")):
      check = invariances.Check("I1", "x", 1e-6, lambda _, measured=measured: measured)
      assert verify._measured(check, fixture).status == status
    for row, allowed in (("I3", 0), ("I9", 1e-5)):
      check = invariances.Check(row, "x", allowed, lambda _, allowed=allowed: 1.1 * allowed + 1e-9)
      assert verify._measured(check, fixture).status == "FAIL"


@pytest.mark.devices(1)
def test_several_processes_are_refused(corpus, tmp_path, monkeypatch):
  monkeypatch.setattr(verify.processes, "join", lambda limits: None)
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  with pytest.raises(ConfigError, match="^--mode=verify runs in one process; give it a mesh of its devices.$"):
    verify.verify(tiny.config(corpus), tmp_path)


@pytest.mark.devices(1)
@pytest.mark.parametrize("teacher, kept", [("/a/model", 0), (top_k.ROWS, 5)])
def test_what_a_teacher_has_said_is_kept_only_where_nobody_else_says_it(corpus, tmp_path, teacher, kept):
  c = tiny.config(corpus, strategy=strategy("distill", teacher=teacher, cached_top_k=5))
  c.precision.frozen = "bfloat16"
  s = verify.slice_of(config_checks.resolve(c), tmp_path)
  assert s.strategy.cached_top_k == kept and s.precision.frozen == "float32"


@pytest.fixture
def trained(monkeypatch, tmp_path):
  """Runs that only say that they were: {folder: callbacks}; their state counts them, their losses too."""
  (tmp_path / "tokenizer.json").write_text("{}")
  (tmp_path / "other").write_text("")
  runs = []

  def train(config, folder):
    callbacks = {name: dict(cfg) for name, cfg in config.callbacks.items()}
    runs.append((folder.name, callbacks, sorted(file.name for file in folder.iterdir())))
    run = SimpleNamespace(state={"params": np.float32(1), "reference": np.float32(2), "n": np.arange(2)}, step=0,
                          batch={"tokens": jnp.arange(3)}, mesh=None)
    for name in callbacks:
      if name == "capture":
        capture = verify.Capture()
        capture.on_train_begin(run)
        for step in (1, 2):
          run.batch = {"tokens": jnp.arange(3) + step}
          capture.on_step_end(run, step, {})
    rows = [{"step": 1, "loss": 2.0}, {"step": 1, "mfu": 1}, {"step": 2, "loss": 1.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.state["n"] = changed.get(len(runs), run.state["n"])
    return run

  changed = {}
  monkeypatch.setattr(verify, "train", train)
  monkeypatch.setattr(verify, "Fixture", lambda *given: given)
  return runs, changed


@pytest.mark.devices(1)
def test_the_slice_is_run_in_one_go_then_stopped_and_continued(corpus, tmp_path, trained):
  runs, changed = trained
  given = tiny.config(corpus).lock()
  folder = tmp_path / "verify"
  folder.mkdir()
  (config, of, run, params, reference, batch, compute), (state, losses) = verify._straight(
      given, folder, tmp_path, "bfloat16")
  assert compute == "bfloat16" and config is given and of == folder / "straight" and (params, reference) == (1, 2)
  assert batch["tokens"].tolist() == [1, 2, 3]  # of the first step
  assert losses == [(1, 2.0), (2, 1.5)] and state["n"].tolist() == [0, 1]
  (folder / "straight" / "metrics.jsonl").unlink()  # what is compared is the other's
  assert verify._resumed(given, folder, tmp_path, (state, losses)) == 0
  files = ["tokenizer.json"]
  assert runs == [("straight", {"capture": {"type": "trainer.modes.verify.Capture"}}, files),
                  ("stopped", {"stop": {"type": "trainer.modes.verify.Stop"}}, files),
                  ("stopped", {}, ["metrics.jsonl", *files])]
  assert 0 < verify.STOP < verify.STEPS  # something is left to continue with
  changed[5] = np.array([0, 2])  # what the one that is continued ends with
  assert verify._resumed(given, folder, tmp_path, (state, losses)) == 1
  assert verify._resumed(given, folder, tmp_path, (state, losses[:1])) == 1
  assert "callbacks" in given and not given.callbacks


def test_a_run_is_stopped_after_its_first_update_and_without_a_reference_there_is_none():
  run = SimpleNamespace(step=0, stop_requested="")
  for step, stopped in ((verify.STOP - 1, ""), (verify.STOP + 1, ""), (verify.STOP, "--mode=verify")):
    run.step = step
    verify.Stop().on_optimizer_step(run)
    assert run.stop_requested == stopped
  verify.Capture().on_train_begin(SimpleNamespace(state={"params": np.float32(3)}))
  assert (verify.Capture.params, verify.Capture.reference) == (3, None)
