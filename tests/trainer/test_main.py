"""Whole runs: what a user sees, resuming in the same process, and what is refused."""

import contextlib
import json
import os
import re
import types

import jax
import numpy as np
import pytest

from input_pipeline import once
from tests import tiny
from trainer import main, train, update
from trainer.callbacks import Callback
from trainer.config import source
from trainer.errors import ConfigError, DataError
from trainer.telemetry.writers import read_rows


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return tiny.write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("straight")
  return train(tiny.config(corpus, schedule=tiny.COSINE), workdir), workdir


class Crash(Callback):
  """Ends the run with an error after an update, as a power cut would."""

  def __init__(self, after: int):
    self._after = after

  def on_optimizer_step(self, run):
    if run.step == self._after:
      raise KeyboardInterrupt(f"crash after step {run.step}")


HOOKS = []


class Recorder(Callback):
  """Writes down which hooks were called; the README's and docs' example of a callback of one's own."""

  def on_train_begin(self, run):
    HOOKS.append(("train_begin", run.step))

  def on_epoch_begin(self, run, epoch):
    HOOKS.append(("epoch_begin", epoch))

  def on_step_begin(self, run):
    HOOKS.append(("step_begin", run.step))

  def on_optimizer_step(self, run):
    HOOKS.append(("optimizer_step", run.step))

  def on_step_end(self, run, step, metrics):
    HOOKS.append(("step_end", step))
    assert metrics["loss"] > 0

  def on_epoch_end(self, run, epoch):
    HOOKS.append(("epoch_end", epoch))

  def on_eval(self, run, name, metrics):
    HOOKS.append(("eval", name, run.step))

  def on_checkpoint(self, run, step):
    HOOKS.append(("checkpoint", step))

  def on_train_end(self, run):
    HOOKS.append(("train_end", run.step))

  def on_error(self, run, error):
    HOOKS.append(("error", type(error).__name__))


def losses(workdir):
  return {row["step"]: row["loss"] for row in read_rows(workdir / "metrics.jsonl") if "loss" in row}


def assert_same_state(a, b):
  for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(a)[0], jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=str(path))


def test_a_run_leaves_what_it_promises(straight):
  run, workdir = straight
  assert run.step == 8
  rows = read_rows(workdir / "metrics.jsonl")
  assert sorted(losses(workdir)) == list(range(1, 9))
  last = next(row for row in rows if row["step"] == 8 and "loss" in row)
  for name in ("grad_norm", "learning_rate", "tokens_per_second", "mfu", "tokens_seen", "epoch", "time/step",
               "time/data", "goodput"):
    assert last[name] >= 0, name
  assert 0 < last["goodput"] < 1 and (workdir / "started").exists()
  assert last["tokens_seen"] == 8 * 8 * 32
  assert sorted(row["step"] for row in rows if "eval/val/bits_per_byte" in row) == [0, 4, 8]
  for name in ("time/compile", "time/eval", "time/checkpoint"):
    assert any(row.get(name, -1) >= 0 for row in rows), name
  assert json.loads((workdir / "config.json").read_text())["seq_len"] == 32
  assert list((workdir / "tensorboard").glob("events*")) and (workdir / "tokenizer.json").exists()
  assert losses(workdir)[8] < losses(workdir)[1]


@pytest.mark.devices(2)
@pytest.mark.parametrize("changed", [dict(), dict(grad_accum_steps=2, mesh=dict(tensor=2))],
                         ids=["one device", "mesh and micro-batches"])
def test_the_step_is_traced_once(changed, corpus, tmp_path, monkeypatch):
  """What is looked at before anything is allocated is what then runs."""
  traced, make = [], update.make_update_fn

  def counted(*args, **options):
    fn = make(*args, **options)
    return lambda state, batch: traced.append(batch["tokens"].shape) or fn(state, batch)

  monkeypatch.setattr(update, "make_update_fn", counted)
  run = train(tiny.config(corpus, total_steps=2, **changed), tmp_path)
  assert traced == [(run.config.batch_size, run.config.seq_len)]


@pytest.mark.parametrize("after", [2, 3, 5])
def test_a_crashed_run_continues_bitwise(straight, corpus, tmp_path, after):
  """I5 within one process: a crash before, at and after a checkpoint; evaluations and every logged loss agree too."""
  config = tiny.config(corpus, schedule=tiny.COSINE)
  config.callbacks.crash = dict(type="tests.trainer.test_main.Crash", after=after)
  with pytest.raises(KeyboardInterrupt):
    train(config, tmp_path)
  run = train(tiny.config(corpus, schedule=tiny.COSINE), tmp_path)
  reference, workdir = straight
  assert_same_state(run.state, reference.state)
  assert losses(tmp_path) == losses(workdir)
  evals = [{(r["step"], k): v for r in read_rows(d / "metrics.jsonl") for k, v in r.items() if k.startswith("eval/")}
           for d in (tmp_path, workdir)]
  assert evals[0] == evals[1]


def test_a_finished_run_started_again_says_so_and_changes_nothing(straight, corpus, capsys):
  reference, workdir = straight
  before = (workdir / "metrics.jsonl").read_text()
  run = train(tiny.config(corpus, schedule=tiny.COSINE), workdir)
  assert_same_state(run.state, reference.state)
  assert (workdir / "metrics.jsonl").read_text() == before
  assert run.last_eval == (8, pytest.approx(reference.last_eval[1]))
  assert "finished all 8 steps" in capsys.readouterr().out


def test_hooks_are_called_in_their_order(corpus, tmp_path):
  HOOKS.clear()
  config = tiny.config(corpus, total_steps=3, ckpt_steps=2)
  config.callbacks.recorder = dict(type="tests.trainer.test_main.Recorder")
  train(config, tmp_path)
  assert HOOKS == [
      ("eval", "val", 0), ("train_begin", 0), ("epoch_begin", 0),
      ("step_begin", 0), ("optimizer_step", 1),
      ("step_begin", 1), ("step_end", 1), ("step_end", 2), ("checkpoint", 2), ("optimizer_step", 2),
      ("step_begin", 2), ("step_end", 3), ("eval", "val", 3), ("optimizer_step", 3), ("checkpoint", 3),
      ("train_end", 3)]


def test_epochs_begin_and_end(corpus, tmp_path):
  HOOKS.clear()
  config = tiny.config(corpus, total_steps=-1, total_epochs=2.0, evals={})
  config.callbacks.recorder = dict(type="tests.trainer.test_main.Recorder")
  run = train(config, tmp_path)
  assert run.step == round(2 * run.data.rows_per_epoch / 8)
  epochs = [int(run.data.epoch(step)) for step in range(run.step + 1)]
  begins = [("epoch_begin", e) for e in dict.fromkeys(epochs[:-1])]
  ends = [("epoch_end", e) for e in range(epochs[-1])]
  assert [h for h in HOOKS if h[0] == "epoch_begin"] == begins and [h for h in HOOKS if h[0] == "epoch_end"] == ends
  assert len(begins) >= 2 and len(ends) >= 1


def test_resume_continues_another_run(straight, corpus, tmp_path):
  reference, workdir = straight
  config = tiny.config(corpus, resume=str(workdir), schedule=tiny.COSINE)
  run = train(config, tmp_path)
  assert run.step == 8
  assert_same_state(run.state, reference.state)


def test_init_from_takes_parameters_only(straight, corpus, tmp_path):
  reference, workdir = straight
  config = tiny.config(corpus, total_steps=1)
  config.optimizer.learning_rate = 0.0
  config.init_from.path = str(workdir)
  run = train(config, tmp_path)
  assert run.step == 1
  assert_same_state(run.state["params"], reference.state["params"])


def test_a_mixture_reports_each_source(corpus, tmp_path, capsys):
  other = tiny.write_corpus(tmp_path / "other", seed=1)
  config = tiny.config(corpus, total_steps=4)
  config.input.sources.other = source(type="text", path=str(other), split="train", validation_fraction=0.3, weight=3.0)
  config.input.batch_size_stages = ((2, 16),)
  train(config, tmp_path / "w")
  row = next(r for r in read_rows(tmp_path / "w" / "metrics.jsonl") if r["step"] == 4 and "loss" in r)
  assert row["tokens_seen"] == (2 * 8 + 2 * 16) * 32
  assert "step 3: update_fn compiles again, for tokens (8, 32) → (16, 32), " in capsys.readouterr().out
  assert row["data/main/rows"] + row["data/other/rows"] == 48 and row["data/other/rows"] == 36
  assert {"loss/main", "loss/other", "accuracy/other", "data/other/epoch"} <= row.keys()
  evaluated = next(r for r in read_rows(tmp_path / "w" / "metrics.jsonl") if "eval/val/loss" in r)
  assert {"eval/val/loss/main", "eval/val/bits_per_byte/other"} <= evaluated.keys()


def test_the_run_ends_where_the_data_end(corpus, tmp_path, capsys):
  config = tiny.config(corpus, total_steps=1000)
  config.input.stop = "first"
  run = train(config, tmp_path)
  assert run.step == run.data.num_steps < 1000 and "the data end there" in capsys.readouterr().out


def _change(path, value):
  def apply(config):
    *parents, key = path.split(".")
    node = config
    for parent in parents:
      node = node[parent]
    with node.unlocked():
      node[key] = value
  return apply


@pytest.mark.devices(8)
@pytest.mark.parametrize("path, value, error, expected", [
    ("input.sources.main.path", "/nowhere/at/all", DataError, "/nowhere/at/all"),
    ("optimizer.momentum", 0.5, ConfigError, "config.optimizer.momentum = 0.5"),
    ("optimizer.lr_mults", (("atn/q", 0.5),), ConfigError, "optimizer.lr_mults"),
    ("mesh.data", 3, ConfigError, "there are 8"),
    ("batch_size", 12, ConfigError, "multiple of 8"),
    ("evals.val.type", "lss", ConfigError, "Allowed: loss, samples, generate"),
    ("evals.val.baselines", ("zip",), ConfigError, "known: gzip, xz"),
    ("callbacks.mine", dict(type="no.such.Thing"), ConfigError, "callbacks.mine.type: found 'no.such.Thing'"),
    ("callbacks.mine", dict(type="tests.trainer.test_main.Crash", when=3), ConfigError, "does not take"),
    ("total_tokens", 100, ConfigError, "--config.total_"),
    ("model.num_heads", 3, ConfigError, "num_heads"),
    ("remat", "everything", ConfigError, "everything"),
    ("keep_best", "eval/vla/loss", ConfigError, "eval/val/loss"),
    ("keep_best", "loss", ConfigError, "eval/val/loss"),
    ("total_steps", 0, ConfigError, "total_steps is 0"),
    ("resume", "/nowhere/at/all", ConfigError, "does not exist"),
    ("init_from", dict(path="/nowhere/at/all", made_by="configs.quickstart"), ConfigError, "Train it first"),
])
def test_what_cannot_work_is_refused_before_training(corpus, tmp_path, path, value, error, expected):
  config = tiny.config(corpus)
  _change(path, value)(config)
  with pytest.raises(error) as caught:
    train(config, tmp_path)
  assert expected in str(caught.value)
  assert not read_rows(tmp_path / "metrics.jsonl")


def test_a_key_that_nothing_uses_is_refused_before_parameters_are_made(corpus, tmp_path, monkeypatch):
  monkeypatch.setattr("trainer.state.initialise", lambda *args: pytest.fail("parameters are made"))
  config = tiny.config(corpus)
  config.optimizer.momentum = 0.5
  with pytest.raises(ConfigError, match="nothing in this configuration uses them:\n  - config.optimizer.momentum = 0.5"
                     r"\nRemove them \(by a flag: --config.optimizer.momentum=0.95\), or change what"):
    train(config, tmp_path)


def test_a_workdir_of_another_config_says_what_differs(straight, corpus):
  _, workdir = straight
  with pytest.raises(ConfigError) as error:
    train(tiny.config(corpus, seed=1, schedule=tiny.COSINE), workdir)
  assert re.search(r"begun with another config:\n  seed: 0 -> 1\n", str(error.value))


def test_changed_data_are_not_continued_silently(tmp_path):
  corpus = tiny.write_corpus(tmp_path / "texts")
  train(tiny.config(corpus, total_steps=2), tmp_path / "w")
  with open(corpus / "000.txt", "a") as file:
    file.write("one more line\n")
  with open(corpus / "001.txt", "a") as file:
    file.write("one more line\n")
  with pytest.raises(ConfigError, match="the training data, the tokenizer or their order changed"):
    train(tiny.config(corpus, total_steps=2), tmp_path / "w")


def test_a_misspelt_metric_of_keep_best_is_an_error(corpus, tmp_path):
  with pytest.raises(ConfigError, match="keep_best is 'eval/val/los', .* It gives: eval/val/loss, eval/val/perplexity"):
    train(tiny.config(corpus, keep_best="eval/val/los", ckpt_steps=4), tmp_path)


def test_the_best_checkpoint_is_kept(corpus, tmp_path):
  config = tiny.config(corpus, total_steps=6, keep_best="eval/val/loss", keep_best_mode="max", ckpt_steps=1,
                       keep_last=1)
  config.evals.val.eval_steps = 1
  run = train(config, tmp_path)
  values = {r["step"]: r["eval/val/loss"] for r in read_rows(tmp_path / "metrics.jsonl") if "eval/val/loss" in r}
  worst = max((step for step in values if step), key=values.get)
  assert {int(p.name) for p in (tmp_path / "checkpoints").iterdir()} == {worst, run.step}


def test_an_evaluator_that_fails_stops_the_run_unless_told_otherwise(corpus, tmp_path):
  config = tiny.config(corpus, total_steps=1)
  config.evals.bad = dict(type="tests.trainer.test_main.FailingEvaluator")
  with pytest.raises(RuntimeError, match="evaluator 'bad' failed at step 0: no luck"):
    train(config, tmp_path / "a")
  config.evals.bad = dict(type="tests.trainer.test_main.FailingEvaluator", on_error="warn")
  run = train(config, tmp_path / "b")
  assert run.step == 1 and run.last_eval[1]["eval/bad/failures"] == 2


class FailingEvaluator:
  def __init__(self, name, cfg, setup):
    pass

  def run(self, params, step):
    raise OSError("no luck")
    yield


def test_a_run_that_stays_non_finite_stops_and_names_the_leaf(corpus, tmp_path):
  config = tiny.config(corpus, total_steps=50)
  config.optimizer.update(name="sgd", learning_rate=1e30, max_nonfinite_steps=3)
  config.optimizer.clip_norm = 0.0
  config.evals = {}
  with pytest.raises(FloatingPointError, match="3 steps in a row were not finite, from step .* first in "):
    train(config, tmp_path)


@pytest.mark.parametrize("error", [KeyError("x"), KeyboardInterrupt(), None])
def test_after_an_error_in_the_loop_nothing_goes_on_beside_it(error):
  calls = []
  ends, saves = (types.SimpleNamespace(**{name: lambda said=said: calls.append(said)}) for name, said in (
      ("close", "clock"), ("abandon", "saves")))
  run = types.SimpleNamespace(callbacks=lambda *given: calls.append(given), chrono=types.SimpleNamespace(ends=ends),
                              checkpoints=saves)
  with contextlib.nullcontext() if error is None else pytest.raises(type(error)):
    with main._reporting_errors(run, types.SimpleNamespace(wait=lambda: calls.append("compiler"))):
      if error is not None:
        raise error
  assert calls == ([] if error is None else [("on_error", run, error), "saves", "compiler"]) + ["clock"]


def test_a_profile_is_written(corpus, tmp_path):
  config = tiny.config(corpus, total_steps=4)
  config.profile.update(start_step=1, num_steps=2)
  train(config, tmp_path)
  assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_a_workdir_that_cannot_be_written_to_is_refused_at_once(corpus, tmp_path, monkeypatch, caplog):
  monkeypatch.setattr(os, "access", lambda path, mode: False)  # the tests' user may write everywhere
  once.warning("of a run before")
  with pytest.raises(ConfigError, match=f"--workdir {tmp_path} cannot be written to"):
    train(tiny.config(corpus), tmp_path)
  caplog.clear()
  once.warning("of a run before")  # another run has begun in this process: it is said again
  assert "of a run before" in caplog.text


def test_a_workdir_may_begin_with_the_home_folder(corpus, tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  monkeypatch.setattr(os, "access", lambda path, mode: False)
  with pytest.raises(ConfigError, match=f"--workdir {tmp_path}/runs/a cannot be written to"):
    train(tiny.config(corpus), "~/runs/a")
