"""Runs that learn from a teacher: the loss by both models' logits, what goes on is the same, and what is refused."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import hf
from tests import tiny
from tests.trainer import rollout_runs
from tests.trainer.strategies import test_reference
from tests.trainer.strategies.pairs import jitted_logits
from trainer import train
from trainer.config import defaults, reward, source, strategy
from trainer.errors import ConfigError, DataError
from trainer.telemetry.row_losses import Rows


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
  if beta == 1:  # the limit: reverse KL
    of_token = (np.exp(logp) * (logp - logq)).sum(-1)
  return (of_token[:, :-1] * weights[:, 1:]).sum() / weights[:, 1:].sum()


def test_the_loss_is_that_of_both_models_logits(tmp_path):
  """Of a teacher of another width and depth, whose vocabulary has other padding."""
  folder = tiny.hf_folder(tmp_path / "teacher", num_layers=3, hidden_size=32, vocab_size=258)
  c = config_of(tmp_path, strategy=strategy("distill", teacher=str(folder), beta=0.3, temperature=0.7), total_steps=2)
  run = train(c, tmp_path / "w")
  teacher, params = hf.load(folder)
  student = tiny_student(c)
  for step, (before, batch, loss) in Keep.found.items():
    before = jax.tree.map(jnp.asarray, before)
    logits = [np.asarray(jitted_logits(model)(given, batch))[..., :258]
              for model, given in ((student, before), (teacher, params))]
    assert loss == pytest.approx(divergence(*logits, batch["loss_weights"], 0.3, 0.7), abs=1e-6), step
  # So are the losses of rows, of which replays tell, and steps that are not finite.
  logits[0] = np.asarray(jitted_logits(student)(run.state["params"], batch))[..., :258]
  sums_B, weights_B = Rows(run).losses(batch, 2)
  assert sums_B.sum() / weights_B.sum() == pytest.approx(divergence(*logits, batch["loss_weights"], 0.3, 0.7), abs=1e-6)


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
  with pytest.raises(ConfigError, match="whose tokenizer is another one than this run's: entry 0 is"):
    train(c, tmp_path / "other")
  fewer = str(tiny.hf_folder(tmp_path / "fewer", vocab_size=256))
  with pytest.raises(ConfigError, match="whose embeddings are of 256 tokens, where this run's model has 258"):
    train(config_of(tmp_path, strategy=strategy("distill", teacher=fewer)), tmp_path / "fewer_w")
  for option, message in ((dict(beta=1.5), "strategy.beta is 1.5; allowed: 0"),
                          (dict(temperature=0.0), "strategy.temperature is 0.0; it must be above 0")):
    with pytest.raises(ConfigError, match=message):
      train(config_of(tmp_path, strategy=strategy("distill", teacher=folder, **option)), tmp_path / "w")


def on_policy(folder, teacher, **changed):
  """Two prompts × two completions of up to 6 tokens, in two updates."""
  rollout = changed.pop("rollout", {})
  c = config_of(folder, strategy=strategy("distill", teacher=str(teacher), beta=1.0, temperature=0.7), **changed)
  c.rollout.update(dict(num_prompts=2, group_size=2, max_new_tokens=6, updates=2, batch_size=4) | rollout)
  c.seq_len, c.input.cache_dir, c.input.packing = 48, None, "auto"
  return c


def test_on_policy_the_loss_is_that_of_both_models_logits_at_what_was_sampled(tmp_path):
  folder = tiny.hf_folder(tmp_path / "teacher", num_layers=3, hidden_size=32, vocab_size=258)
  c = on_policy(tmp_path, folder, total_steps=3, log_steps=1)
  run = train(c, tmp_path / "w")
  teacher, params = hf.load(folder)
  student, said = tiny_student(c), []
  for step, (before, batch, loss) in Keep.found.items():
    before = jax.tree.map(jnp.asarray, before)
    # Rows without shared prompts: a completion and its own prompt see what they see alone.
    alone = [_alone(batch, row, segment) for row, ids in enumerate(batch["segment_ids"])
             for segment in range(1, batch["segment_roles"].shape[1] + 1) if (ids == segment).any()]
    total = weight = 0.0
    for ids, weights in alone:
      padded = np.pad(ids, (0, 128 - len(ids)))[None]  # so that all lengths share a program
      logits = [np.asarray(jitted_logits(model)(given, padded))[:, :len(ids), :258]
                for model, given in ((student, before), (teacher, params))]
      total += divergence(*logits, weights[None], 1.0, 0.7) * weights.sum()
      weight += weights.sum()
      said.append(run.tokenizer.decode(ids[weights > 0].tolist()))
    assert loss == pytest.approx(total / weight, abs=1e-6), step
  written = [json.loads(line)["completion"] for step in (1, 3)
             for line in (tmp_path / "w" / "samples" / f"rollout-{step:08d}.jsonl").read_text().splitlines()]
  assert len(said) == 6 and set(said) <= {text.encode().decode() for text in written}


def _alone(batch, row, segment):
  """A completion's own text, its prompt included where rows share it: (ids, weights)."""
  at = batch["segment_ids"][row] == segment
  ids, weights = batch["tokens"][row][at], batch["loss_weights"][row][at]
  if "prompt_ids" in batch and (shared := batch["prompt_ids"][row][at].max()):
    prompt = batch["tokens"][row][batch["segment_ids"][row] == shared]
    ids, weights = np.concatenate([prompt, ids]), np.concatenate([np.zeros(len(prompt)), weights])
  return ids, weights


def test_on_policy_rewards_are_reported_alone(tmp_path):
  folder = tiny.hf_folder(tmp_path / "teacher", vocab_size=258)
  plain = train(on_policy(tmp_path, folder), tmp_path / "plain")
  kept = {step: kept[2] for step, kept in Keep.found.items()}
  c = on_policy(tmp_path, folder)
  c.rollout.rewards.low = reward(type="tests.trainer.rollout_toys.low")
  rewarded = train(c, tmp_path / "rewarded")
  assert {step: kept[2] for step, kept in Keep.found.items()} == kept and len(kept) == 4
  rollout_runs.assert_same_state(plain.state["params"], rewarded.state["params"])
  rows = rollout_runs.rows_of(tmp_path / "rewarded")
  assert "rewards/low/mean" in rows[4] and "reward" not in rollout_runs.rows_of(tmp_path / "plain")[4]


def test_on_policy_a_stopped_run_goes_on(tmp_path):
  """After a step within a rollout; one completion a prompt."""
  folder = tiny.hf_folder(tmp_path / "teacher", vocab_size=258)
  options = dict(rollout=dict(group_size=1))
  whole = train(on_policy(tmp_path, folder, **options), tmp_path / "whole")
  c = on_policy(tmp_path, folder, **options)
  c.callbacks.keep.stop = 3
  train(c, tmp_path / "parts")
  assert max(Keep.found) == 3
  parts = train(on_policy(tmp_path, folder, **options), tmp_path / "parts")
  rollout_runs.assert_same_state(whole.state["params"], parts.state["params"])


def test_on_policy_all_cut_off_is_told(tmp_path, caplog):
  folder = tiny.hf_folder(tmp_path / "teacher", vocab_size=258)
  c = on_policy(tmp_path, folder, rollout=dict(mask_truncated=True, max_new_tokens=1, max_without_lesson=1))
  with pytest.raises(DataError, match="all of its 4 completions were cut off at rollout.max_new_tokens"):
    train(c, tmp_path / "w")
  c = on_policy(tmp_path, folder, rollout=dict(resample=1))
  with pytest.raises(ConfigError, match="there is nothing to replace"):
    train(c, tmp_path / "w")
