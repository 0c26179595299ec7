"""Signs of trouble: each is seen where it is and not where it is not, is told once, and changes nothing."""

import json
import math
import re
import time
import types

import jax
import numpy as np
import pytest

from input_pipeline import loader
from tests import tiny
from tests.trainer import rollout_runs
from tests.trainer.strategies.test_sft_runs import config as sft_config
from trainer import train, tree
from trainer.errors import ConfigError
from trainer.program import resolve
from trainer.telemetry import diagnostics
from trainer.telemetry.events import read_notes


def ramp(a, b, count):
  return [float(x) for x in np.linspace(a, b, count)]


def flat(value, count, noise=0.0):
  return [float(x) for x in value + noise * np.random.default_rng(0).normal(size=count)]


# name: (values that show it, what is said of them, values that do not show it)
CASES = {
  "equal_rewards": ({"frac_reward_zero_std": flat(0.95, 10)}, "in 95% of the groups",
                    {"frac_reward_zero_std": [1.0] * 5 + [0.5] * 5}),
  "rewards_missing": ({"frac_without_reward": [1.0, 0.5, 0.5]}, "67% of the completions of the last rollouts have no",
                      {"frac_without_reward": [1.0, 0.2, 0.2]}),
  "chosen_falls": ({"rewards/chosen": ramp(0, -2, 100), "rewards/margins": ramp(0, 3, 100)}, "fell from -0.495 to -1.5",
                   {"rewards/chosen": ramp(0, 1, 100), "rewards/margins": ramp(0, 3, 100)}),
  "ratio_one": ({"policy/ratio_mean": flat(1.0, 20, 1e-7), "clip_ratio/region_mean": flat(0, 20)}, "on-policy",
                {"policy/ratio_mean": [1.0] * 19 + [1.001], "clip_ratio/region_mean": flat(0, 20)}),
  "updates_lost": ({"params_changed": flat(0.02, 10), "grad_norm": flat(1, 10)}, "changes 2.0% of the bfloat16",
                   {"params_changed": flat(0.4, 10), "grad_norm": flat(1, 10)}),
  "truncation_rises": ({"completions/clipped_ratio": ramp(0.1, 0.4, 20)}, "37% of the completions",
                       {"completions/clipped_ratio": flat(0.2, 20, 0.02)}),
  "input_bound": ({"time/data": flat(0.3, 5), "time/step": flat(1.0, 5)}, "30% of a step's time is waiting",
                  {"time/data": flat(0.05, 5), "time/step": flat(1.0, 5)}),
  "always_clipped": ({"grad_norm": flat(50, 200, 1)}, "from a norm of 50",
                     {"grad_norm": flat(50, 199, 1) + [0.5]}),
  "flat_loss": ({"loss": flat(5.5, 500, 0.01)}, "has not fallen in the first 500 steps",
                {"loss": ramp(5.5, 5.0, 500)}),
  "entropy_collapses": ({"entropy": ramp(1.0, 0.0, 50), "policy/ratio_mean": flat(1, 50)}, "entropy fell from",
                        {"entropy": ramp(1.0, 0.5, 50), "policy/ratio_mean": flat(1, 50)}),
  "pairs_too_easy": ({"rewards/accuracies": flat(1, 100)}, "already told apart",
                     {"rewards/accuracies": flat(0.9, 100)}),
  "nothing_trained": ({"trained_tokens": [0.0] * 10 + [5.0] * 40}, "20% of the last steps",
                      {"trained_tokens": [0.0] + [5.0] * 49}),
}


def a_run(step=500, seconds=None):
  config = types.SimpleNamespace(optimizer=types.SimpleNamespace(clip_norm=1.0))
  chrono = types.SimpleNamespace(state=lambda: seconds)
  data = types.SimpleNamespace(metrics={})
  return types.SimpleNamespace(step=step, config=config, chrono=chrono, data=data)


def test_every_signature_has_a_case():
  assert set(CASES) | {"overhead"} == set(diagnostics.DIAGNOSTICS)


@pytest.mark.parametrize("name", CASES)
def test_a_signature_is_seen_where_it_is(name):
  shows, text, does_not = CASES[name]
  diagnostic = diagnostics.DIAGNOSTICS[name]
  for values in (shows, does_not):
    assert set(values) == set(diagnostic.metrics) and {len(v) for v in values.values()} == {diagnostic.window}
  assert text in diagnostic.find(shows, a_run())
  assert diagnostic.find(does_not, a_run()) is None


def test_evaluations_and_checkpoints_that_take_long_are_seen():
  find = diagnostics.DIAGNOSTICS["overhead"].find
  spent = dict(train=600.0, data=5.0, eval=300.0, checkpoint=100.0, compile=0.0, rollout=0.0)
  assert "evaluations took 30% and checkpoints 10% of the 1,000 s" in find({}, a_run(seconds=spent))
  assert find({}, a_run(seconds=spent | {"eval": 100.0})) is None
  assert find({}, a_run(seconds={key: value / 10 for key, value in spent.items()})) is None  # too early to say


def test_a_loss_that_is_flat_later_on_is_none_of_them():
  assert diagnostics.DIAGNOSTICS["flat_loss"].find({"loss": flat(2, 500)}, a_run(step=5000)) is None


def test_values_that_are_not_finite_are_not_judged():
  made, run = _begun()
  for step in range(1, 21):
    run.step = step
    made.on_step_end(run, step, {"policy/ratio_mean": 1.0, "clip_ratio/region_mean": 0.0 if step > 1 else math.nan})
  assert not run.said


def test_a_name_that_does_not_exist_is_refused(tmp_path):
  with pytest.raises(ConfigError, match="health_silent names 'overfit'; allowed: .*overfits"):
    resolve(tiny.config(tmp_path, health_silent=("overfit", "ratio_one")))


def _begun(silent=(), remembered=None):
  """(the callback, a run that collects what is said)."""
  said = []
  run = types.SimpleNamespace(
      step=0, remembered={} if remembered is None else remembered, last_row={}, batch=None, said=said, total_steps=1000,
      note=lambda kind, name, text, advice: said.append((kind, name, run.step)),
      config=types.SimpleNamespace(rollout=types.SimpleNamespace(num_prompts=4),
                                   strategy=types.SimpleNamespace(name="grpo")))
  made = diagnostics.Diagnostics(silent)
  made.on_train_begin(run)
  return made, run


def test_it_is_said_once_also_after_a_restart():
  def steps(made, run, first):
    for step in range(first, first + 45):
      run.step = step
      made.on_step_end(run, step, {"policy/ratio_mean": 1.0, "clip_ratio/region_mean": 0.0})

  made, run = _begun()
  steps(made, run, 1)
  assert run.said == [("health", "ratio_one", 20)]
  again, later = _begun(remembered=json.loads(json.dumps(run.remembered)))
  steps(again, later, 46)
  assert not later.said
  silent, quiet = _begun(silent=("ratio_one",))
  steps(silent, quiet, 1)
  assert not quiet.said


def test_an_evaluation_that_gets_worse_is_told_with_its_best_step():
  made, run = _begun()
  for step, loss in ((10, 2.0), (20, 1.5), (30, 1.6), (40, 1.7), (50, 1.49), (60, 1.52), (70, 1.55), (80, 1.53)):
    run.step = step
    made.on_eval(run, "val", {"eval/val/loss": loss})
  assert run.said == [("health", "overfits", 80)]
  assert run.remembered["best"]["val"]["step"] == 50


# ---------------------------------------------------------------- whole runs


@pytest.fixture
def narrow(monkeypatch):
  def to(window):
    monkeypatch.setattr(diagnostics, "DIAGNOSTICS",
                        {name: s._replace(window=window) for name, s in diagnostics.DIAGNOSTICS.items()})
  return to


def health(workdir):
  return {row["name"]: row for row in read_notes(workdir / "notes.jsonl") if row["kind"] == "health"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return tiny.write_corpus(tmp_path_factory.mktemp("corpus"))


def test_a_run_without_trouble_has_nothing_to_hear_and_nothing_changes(corpus, tmp_path):
  runs = [train(tiny.config(corpus, health_silent=silent), tmp_path / str(len(silent)))
          for silent in ((), diagnostics.NAMES)]
  assert health(tmp_path / "0") == {}
  for a, b in zip(*(jax.tree.leaves(run.state["params"]) for run in runs), strict=True):
    np.testing.assert_array_equal(a, b)


def test_rewards_that_are_all_equal_are_told(tmp_path, narrow):
  narrow(2)
  prompts = rollout_runs.write_prompts(tmp_path)
  config = rollout_runs.config(prompts, score="", total_steps=3, rollout=dict(updates=1))
  config.rollout.rewards.same = dict(type="tests.trainer.rollout_toys.same", weight=1.0)
  train(config, tmp_path / "w")
  told = health(tmp_path / "w")
  assert {"equal_rewards", "ratio_one"} <= set(told)
  assert "in 100% of the groups" in told["equal_rewards"]["text"]
  assert "rollout.group_size" in told["equal_rewards"]["advice"]


def test_rewards_that_fail_are_told_and_not_as_equal_ones(tmp_path):
  config = rollout_runs.config(rollout_runs.write_prompts(tmp_path), "never", total_steps=4, rollout=dict(updates=1))
  train(config, tmp_path / "w")
  told = health(tmp_path / "w")
  assert set(told) == {"rewards_missing"} and "never failed for 100%" in told["rewards_missing"]["text"]


def write_answers(file, words):
  rows = [{"messages": [{"role": "user", "content": f"number {i}"}, {"role": "assistant", "content": "x " * words}]}
          for i in range(60)]
  file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
  return file


@pytest.mark.parametrize("words, silent", [(100, False), (3, True)])
def test_answers_whose_end_is_never_trained_are_told(tmp_path, words, silent):
  """Cut at the row's end, answers have no end; short ones have."""
  config = sft_config(write_answers(tmp_path / "a.jsonl", words), total_steps=4, evals={})
  config.update(seq_len=64)
  config.input.update(max_over_long=1.0)
  train(config, tmp_path / "w")
  assert ("end_never_trained" in health(tmp_path / "w")) == (not silent)


def test_an_end_without_a_weight_is_not_trained():
  batch = {"tokens": np.array([[5, 2, 7, 3], [2, 2, 0, 0]]), "loss_weights": np.array([[1, 0, 1, 1], [0.5, 0, 0, 0]])}
  assert diagnostics._ends_trained(np.array([2, 3]), batch) == 2



def test_bfloat16_updates_that_are_lost_are_told(corpus, tmp_path, narrow):
  narrow(3)
  config = tiny.config(corpus, evals={}, total_steps=4)
  config.precision.params = "bfloat16"
  config.optimizer.update(name="sgd", learning_rate=1e-4)
  config.schedule.update(name="constant", warmup_percent=0.0)
  run = train(config, tmp_path)
  assert tree.flatten(run.state["params"])["embed/embedding"].dtype == "bfloat16"
  assert "of the bfloat16 parameters" in health(tmp_path)["updates_lost"]["text"]


@pytest.mark.host_patches
def test_steps_that_wait_for_data_are_told(corpus, tmp_path, narrow, monkeypatch):
  narrow(2)
  batch = loader.TrainData.batch
  monkeypatch.setattr(loader.TrainData, "batch", lambda *args: time.sleep(0.3) or batch(*args))
  train(tiny.config(corpus, evals={}), tmp_path)
  assert "waiting for data" in health(tmp_path)["input_bound"]["text"]


def test_each_sign_is_documented():
  page = (tiny.ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
  table = page.split("\n## Health\n")[1].split("\n## ")[0]
  assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(diagnostics.NAMES)
