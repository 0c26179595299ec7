"""The experts of sampled tokens: recorded, compared with those of training, and gone through again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.experts import moe as moe_lib
from tests.models.common import VOCAB, make, random_params
from tests.trainer.rollout_runs import STOP, assert_same_state, config, rows_of, write_prompts
from trainer import train
from trainer.errors import ConfigError
from trainer.generate.sampler import Sampler
from trainer.rollouts.experience import RowFormat, Trajectory, collect, make_batch

MOE = dict(num_experts=8, experts_per_token=2, expert_size=8)
# A dense layer, then two with experts.
DENSE_FIRST = dict(MOE, scores="sigmoid", choice_bias=True, dense_layers=1, shared_size=4)
DISAGREEMENT = "rollout/expert_disagreement"


def sampled(compute_dtype, layers=3, **changed):
  """(model, parameters, experience of 24 completions of 6 prompts) with the experts that sampling went through."""
  model = make(compute_dtype=compute_dtype, num_layers=layers, scan_layers=False, moe=dict(DENSE_FIRST, **changed))
  params = random_params(model)
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, VOCAB, n).astype(np.int32) for n in (3, 5, 9, 4, 7, 2)]
  completions = Sampler(model, rows=4, chunk=4, record=True).generate(
      params, prompts, num_samples=4, max_new_tokens=20, stop_ids=(3,), seed=1)
  units = []
  for c in completions:
    prompt = prompts[c.prompt]
    ids, weights = np.concatenate([prompt, c.ids]), np.repeat([0.0, 1.0], [len(prompt), len(c.ids)])
    units.append([(Trajectory(ids, weights.astype(np.float32), np.zeros(len(ids), np.float32), len(prompt),
                              c.finish_reason, c.prompt, experts=c.experts), 1.0, 0)])
  return model, params, collect(units)


def rows(experience, **changed):
  form = RowFormat(**dict(seq_len=64, pad_id=0, row_multiple=1, routing=(2, 2)) | changed)
  return make_batch(experience, np.arange(experience.num_units), form)


def metrics_and_logits(model, params, batch, monkeypatch):
  """(the model's metrics; of each layer with experts the router's logits [B, T, E] + bias, as that same program has
  them)."""
  logits, statistics = [], moe_lib.statistics

  def keeping(logits_BxTxE, *more):
    jax.debug.callback(lambda part: logits.append(np.asarray(part, np.float64)), logits_BxTxE, ordered=True)
    return statistics(logits_BxTxE, *more)

  with monkeypatch.context() as patch:
    patch.setattr(moe_lib, "statistics", keeping)
    found = jax.jit(lambda params, batch: model.apply(params, batch).metrics)(params, batch)
    jax.effects_barrier()
  return found, logits


def recount(params, batch, logits, key):
  """Token by token, layer by layer: (how many tokens chose another set of experts than the recorded, how many are
  recorded)."""
  bias = np.asarray(params["blocks"]["moe"]["router"]["choice_bias"], np.float64)
  differ = known = 0
  for b, t in np.argwhere(np.asarray(batch["segment_ids"]) > 0):
    recorded = batch[key][b, t]
    if (recorded < 0).all():
      continue
    assert (recorded >= 0).all()
    known += 1
    chosen = [set(np.argsort(-(1 / (1 + np.exp(-part[b, t])) + bias[layer]), kind="stable")[:2])
              for layer, part in enumerate(logits)]
    differ += any(its != set(then) for its, then in zip(chosen, recorded.tolist(), strict=True))
  return differ, known


@functools.cache
def in_bfloat16():
  return sampled(jnp.bfloat16)


@pytest.mark.parametrize("share_prompts", [False, True])
def test_the_metric_counts_the_tokens_whose_experts_differ(share_prompts, monkeypatch):
  """In bfloat16, in which the program that samples rounds otherwise than the one that trains."""
  model, params, experience = in_bfloat16()
  batch = rows(experience, share_prompts=share_prompts)
  metrics, logits = metrics_and_logits(model, params, batch, monkeypatch)
  differ, known = recount(params, batch, logits, "sampled_experts")
  total, weight = (np.asarray(part).sum() for part in (metrics[DISAGREEMENT].sum, metrics[DISAGREEMENT].weight))
  assert (differ, known) == (total, weight) and 0 < differ < known / 2
  # All are recorded but what nothing follows: the last token of each completion.
  assert known == (batch["segment_ids"] > 0).sum() - experience.num_units


def test_with_replay_no_token_differs_and_logits_are_of_the_recorded_experts(monkeypatch):
  model, params, experience = in_bfloat16()
  metrics, _ = metrics_and_logits(model, params, rows(experience, replay=True), monkeypatch)
  assert np.asarray(metrics[DISAGREEMENT].sum).sum() == 0 < np.asarray(metrics[DISAGREEMENT].weight).sum()


@pytest.mark.parametrize("changed", [{}, dict(layers=5, dense_layers=0, layer_step=2, weights_on_input=True)])
def test_in_float32_decoding_and_training_choose_the_same(changed, monkeypatch):
  """Of two layers with experts, the second and the third, or the second and the fourth."""
  model, params, experience = sampled(jnp.float32, **changed)
  batch = rows(experience)
  metrics, logits = metrics_and_logits(model, params, batch, monkeypatch)
  assert recount(params, batch, logits, "sampled_experts")[0] == np.asarray(metrics[DISAGREEMENT].sum).sum() == 0


# ------------------------------------------------------------------------------------------------ runs


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
  return write_prompts(tmp_path_factory.mktemp("prompts"))


def moe_config(prompts, **rollout):
  """With a rate at which the second of two updates sees other experts chosen than were sampled."""
  c = config(prompts, rollout=rollout)
  c.model.moe.update(MOE)
  c.optimizer.learning_rate = 30.0
  return c


def test_a_run_says_how_many_differ_and_with_replay_none_does(prompts, tmp_path):
  """In float32 none differs before the first update, by which the policy moves. With replay its gradients are those of
  the sampled experts, so that the run becomes another."""
  own, replayed = (train(moe_config(prompts, replay_experts=on), tmp_path / str(on)) for on in (False, True))
  own_rows, rows = (rows_of(tmp_path / str(on)) for on in (False, True))
  assert own_rows[1][DISAGREEMENT] == rows[1][DISAGREEMENT] == rows[2][DISAGREEMENT] == 0 < own_rows[2][DISAGREEMENT]
  assert own_rows[1]["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)
  assert own.step == replayed.step == 2
  assert own_rows[1]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-6) and own_rows[2]["loss"] != rows[2]["loss"]


def test_what_was_recorded_is_in_checkpoints(prompts, tmp_path):
  """A run stopped within a rollout goes on to the bit."""
  whole = train(moe_config(prompts, replay_experts=True), tmp_path / "whole")
  stopping = moe_config(prompts, replay_experts=True)
  stopping.callbacks.stop = dict(type=STOP, step=1)
  assert train(stopping, tmp_path / "parts").step == 1
  parts = train(moe_config(prompts, replay_experts=True), tmp_path / "parts")
  assert_same_state(whole.state["params"], parts.state["params"])
  assert rows_of(tmp_path / "parts")[2][DISAGREEMENT] == 0


def test_what_cannot_be_replayed_is_refused(prompts, tmp_path):
  with pytest.raises(ConfigError, match=r"rollout\.replay_experts is True, but the model has no experts"):
    train(config(prompts, rollout=dict(replay_experts=True)), tmp_path / "dense")
  c = moe_config(prompts, replay_experts=True, engine="http://127.0.0.1:1")
  with pytest.raises(ConfigError, match=r"servers do not tell which experts.*replay_experts=False"):
    train(c, tmp_path / "engine")
