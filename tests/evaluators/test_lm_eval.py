"""Tasks of lm_eval as an evaluator, with a stand-in for the package: what is asked, what is told and put back."""

import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from evaluators import lm_eval as evaluator
from trainer.config import defaults
from trainer.errors import ConfigError

RESULTS = {"results": {"sums": {"acc,none": 0}, "words": {
    "acc,none": 0.5, "acc_stderr,none": 0.1, "alias": "words", "exact,flexible": 1, "n,none": "x"}}}


@pytest.fixture
def made(monkeypatch):
  """`made(**options)`: (the evaluator, what was called)."""
  def of(**cfg):
    called = []
    lm = SimpleNamespace(params=None)

    def harness(*given, **named):
      called.append((given, named))
      return lm

    def evaluate(model, tasks, **options):
      called.append((model.params, tasks, options))
      random.seed(1)
      np.random.seed(1)
      return RESULTS

    monkeypatch.setitem(sys.modules, "trainer.lm_eval.harness", SimpleNamespace(Harness=harness))
    monkeypatch.setattr(evaluator.lm_eval, "require", lambda: None)
    monkeypatch.setattr(evaluator.lm_eval, "known", lambda *given: called.append(given) or ["words", "sums"])
    monkeypatch.setattr(evaluator.lm_eval, "evaluate", evaluate)
    monkeypatch.setattr(evaluator, "Prompter", lambda config, tokenizer: "prompter")
    monkeypatch.setattr(evaluator, "begins_with", lambda section, tokenizer: (1,))
    config = defaults()
    config.update(seq_len=96, batch_size=12, grad_accum_steps=3)
    setup = SimpleNamespace(config=config, model="model", tokenizer="tokenizer", workdir="w", mesh="mesh")
    cfg = {"batch_size": None, "tasks": ("words", "sums"), **cfg}
    section = type("Section", (dict,), {"__getattr__": dict.__getitem__})(cfg)
    return evaluator.LmEval("x", section, setup), called
  return of


@pytest.mark.parametrize("tasks", [None, (), "words"])
def test_tasks_are_a_list_of_names(made, tasks):
  with pytest.raises(ConfigError, match="^evals.x.tasks is .*; it must be a list of names, as in tasks=..arc_easy"):
    made(tasks=tasks)


def test_what_is_asked_is_what_the_section_says(made):
  _, called = made(include_path="folder", num_fewshot=0, limit=5, max_length=64, batch_size=8, gen_kwargs=None)
  known, ((loaded, mesh), sizes) = called
  assert known == (["words", "sums"], "folder", "evals.x.tasks") and mesh == "mesh"
  assert (loaded.model, loaded.tokenizer, loaded.prompter, loaded.origin) == ("model", "tokenizer", "prompter", "w")
  assert sizes == dict(head=(1,), max_length=64, batch_size=8)
  assert made()[1][1][1] == dict(head=(1,), max_length=96, batch_size=4)  # the run's


def test_metrics_are_told_without_their_errors_and_generators_are_put_back(made):
  found, called = made(num_fewshot=0, limit=5)
  states = random.getstate(), np.random.get_state()[1].tolist()
  assert dict(found.run("parameters", 7)) == {"words/acc": 0.5, "words/exact_flexible": 1.0, "sums/acc": 0.0}
  assert called[-1] == ("parameters", ["words", "sums"], dict(
      include_path=None, bootstrap_iters=0, num_fewshot=0, limit=5)) and found._lm.params is None
  assert (random.getstate(), np.random.get_state()[1].tolist()) == states
