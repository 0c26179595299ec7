"""Which parameters a reference's log-probs are of; runs with references are in test_dpo_runs.py."""

import json

import numpy as np
import pytest

from tests.trainer import test_wiring
from trainer import train
from trainer.callbacks import Callback
from trainer.config import defaults, source, strategy


class Keep(Callback):
  """The reference's log-probs of the last batch, with its tokens, where they are trained; w of the run's beginning."""

  found: list = []

  def on_train_begin(self, run):
    self.first = np.array(run.state["params"]["head"]["w"], np.float64)

  def on_step_end(self, run, step, metrics):
    trained = np.asarray(run.batch["loss_weights"]) > 0
    self.found.append((self.first, np.asarray(run.batch["tokens"])[trained],
                       np.asarray(run.batch["ref_logprobs"])[trained], metrics["loss"]))


def test_two_models_with_one_folder_of_caches_have_log_probs_of_their_own(tmp_path):
  """The log-probs of the model of test_wiring.py are those of softmax(w), whose w the second run has from the first."""
  file = tmp_path / "pairs.jsonl"
  file.write_text("".join(json.dumps(dict(prompt="p", chosen=chosen * 2, rejected=rejected)) + "\n"
                          for chosen, rejected in ("ab", "cd", "ef", "gh")))

  def of_run(name, **changed):
    c = defaults()
    c.update(batch_size=4, seq_len=16, total_steps=2, report=False)
    c.model.name = "tests.trainer.test_wiring.Unigram"
    c.tokenizer.type = "bytes"
    c.strategy = strategy("dpo", precompute=True)
    c.input.sources.main = source(type="jsonl", path=str(file))
    c.input.cache_dir = str(tmp_path / "cache")
    c.optimizer.update(name="sgd", learning_rate=50.0, momentum=0.0, nesterov=False, weight_decay=0.0)
    c.schedule.update(name="constant", warmup_percent=0.0)
    c.callbacks.keep = dict(type="tests.trainer.strategies.test_reference.Keep")
    c.update(changed)
    Keep.found.clear()
    train(c, tmp_path / name)
    return list(Keep.found)

  one, two = of_run("one"), of_run("two", init_from=dict(path=str(tmp_path / "one")))
  np.testing.assert_allclose(one[0][0], test_wiring.FIRST, atol=1e-7)
  assert np.abs(two[0][0] - one[0][0]).max() > 0.1
  for run in (one, two):
    w, tokens, logprobs, loss = run[0]
    np.testing.assert_allclose(logprobs, np.log(test_wiring.softmax(w))[tokens], atol=1e-5)
    assert loss == pytest.approx(np.log(2), abs=1e-5)  # the policy is still its reference
    assert run[1][3] < 0.69
