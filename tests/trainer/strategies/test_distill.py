"""Runs that learn from a teacher: the loss by both models' logits, what goes on is the same, and what is refused."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import hf
from tests import tiny
from tests.trainer.strategies import test_reference
from trainer import train
from trainer.config import defaults, source, strategy
from trainer.errors import ConfigError


class Keep(test_reference.Keep):
  """With all parameters before a step."""

  found: dict = {}

  def on_step_begin(self, run):
    self._before[run.step + 1] = jax.device_get(run.state["params"])


def config_of(folder, **changed):
  file = folder / "rows.jsonl"
  file.write_text("".join(json.dumps(dict(prompt=f"{i} and", completion=f" {i + 1}")) + "\n" for i in range(16)))
  c = defaults()
  c.update(batch_size=4, seq_len=16, total_steps=4, report=False)
  c.model.update(num_layers=1, hidden_size=16, intermediate_size=32, num_heads=2, vocab_chunk=100)
  c.tokenizer.type = "bytes"
  c.input.sources.main = source(type="jsonl", path=str(file))
  c.input.cache_dir = str(folder / "cache")
  c.input.packing = "none"
  c.callbacks.keep = dict(type="tests.trainer.strategies.test_distill.Keep", stop=0)
  c.update(changed)
  Keep.found = {}
  return c


def divergence(student, teacher, weights, beta, temperature):
  """The mean over weights, of logits [B, T, V] in float64; the teacher's last entries are nobody's."""
  logps = [z.astype(np.float64) / temperature for z in (student, teacher[..., :student.shape[-1]])]
  logp, logq = (z - np.log(np.exp(z).sum(-1, keepdims=True)) for z in logps)
  logm = np.log((1 - beta) * np.exp(logp) + beta * np.exp(logq))
  of_token = (beta * np.exp(logq) * (logq - logm) + (1 - beta) * np.exp(logp) * (logp - logm)).sum(-1)
  return (of_token[:, :-1] * weights[:, 1:]).sum() / weights[:, 1:].sum()


def test_the_loss_is_that_of_both_models_logits(tmp_path):
  """Of a teacher of another width and depth, whose vocabulary has other padding."""
  folder = tiny.hf_folder(tmp_path / "teacher", num_layers=3, hidden_size=32, vocab_size=258)
  c = config_of(tmp_path, strategy=strategy("distill", teacher=str(folder), beta=0.3, temperature=0.7), total_steps=2)
  train(c, tmp_path / "w")
  teacher, params = hf.load(folder)
  student = tiny_student(c)
  for step, (before, batch, loss) in Keep.found.items():
    before = jax.tree.map(jnp.asarray, before)
    logits = [np.asarray(model.logits(given, batch))[..., :258]
              for model, given in ((student, before), (teacher, params))]
    assert loss == pytest.approx(divergence(*logits, batch["loss_weights"], 0.3, 0.7), abs=1e-6), step


def tiny_student(c):
  from models import api
  return api.make_model(c.model, vocab_size=258, params_dtype="float32", compute_dtype="float32")


def test_a_stopped_run_goes_on_and_a_run_can_teach(tmp_path):
  folder = tiny.hf_folder(tmp_path / "teacher", vocab_size=258)
  options = dict(strategy=strategy("distill", teacher=str(folder)))
  train(config_of(tmp_path, **options), tmp_path / "whole")
  whole = {step: kept[2] for step, kept in Keep.found.items()}
  c = config_of(tmp_path, **options)
  c.callbacks.keep.stop = 2
  train(c, tmp_path / "parts")
  first = {step: kept[2] for step, kept in Keep.found.items()}
  train(config_of(tmp_path, **options), tmp_path / "parts")
  assert first | {step: kept[2] for step, kept in Keep.found.items()} == whole and list(first) == [1, 2]
  # Its parameters are in no checkpoint: what it was is known by its fingerprint.
  shutil.rmtree(folder)
  tiny.hf_folder(folder, seed=2, vocab_size=258)
  with pytest.raises(ConfigError, match="was trained with another reference"):
    train(config_of(tmp_path, total_steps=6, allow_config_changes=True, **options), tmp_path / "parts")
  # A student that has learned is a teacher, and there is nothing to learn from oneself.
  own = config_of(tmp_path, strategy=strategy("distill", teacher=str(tmp_path / "whole")), total_steps=1)
  own.init_from.path = str(tmp_path / "whole")
  train(own, tmp_path / "own")
  assert abs(Keep.found[1][2]) < 1e-6


def test_what_cannot_teach_is_refused(tmp_path):
  for teacher, message in ((None, "strategy.teacher is not set"), (str(tmp_path / "no"), "which is no folder")):
    with pytest.raises(ConfigError, match=message):
      train(config_of(tmp_path, strategy=strategy("distill", teacher=teacher)), tmp_path / "w")
  folder = str(tiny.hf_folder(tmp_path / "teacher", vocab_size=258))
  c = config_of(tmp_path, strategy=strategy("distill", teacher=folder))
  c.tokenizer.update(type="hf", path=str(tiny.ROOT / "tests" / "input_pipeline" / "references" / "tiny"))
  with pytest.raises(ConfigError, match="whose tokenizer is another one than the student's: entry 0 is"):
    train(c, tmp_path / "other")
  for option, message in ((dict(beta=1.5), "strategy.beta is 1.5; allowed: 0"),
                          (dict(temperature=0.0), "strategy.temperature is 0.0; it must be above 0")):
    with pytest.raises(ConfigError, match=message):
      train(config_of(tmp_path, strategy=strategy("distill", teacher=folder, **option)), tmp_path / "w")
