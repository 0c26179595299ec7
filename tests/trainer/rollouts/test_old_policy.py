"""What ratios are taken to: the policy when the rollout began, by the program that trains, in any precision."""

import numpy as np
import pytest

from tests.trainer.rollout_runs import STOP, config, rows_of, start_of, write_prompts
from tests.trainer.strategies import pairs
from tests.trainer.strategies.test_grpo import probabilities
from trainer import main, train
from trainer.rollouts import experience, old_policy
from trainer.strategies import presets

pytestmark = pytest.mark.host_patches


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
  return write_prompts(tmp_path_factory.mktemp("prompts"))


@pytest.fixture
def sampler_elsewhere(monkeypatch):
  """The sampler's log-probs are 0.01 away from the trainer's, further than GSPO's bounds: programs of tests are
  compiled so that sampling and training round alike."""
  collect = experience.collect

  def shifted(units):
    found = collect(units)
    return found._replace(logprobs=found.logprobs - np.float32(0.01) * found.weights)

  monkeypatch.setattr(experience, "collect", shifted)


@pytest.mark.parametrize("kind", [pytest.param("mesh", marks=pytest.mark.devices(8)), "noise", "experts"])
def test_in_bfloat16_a_policy_that_does_not_move_has_ratios_of_one(kind, sampler_elsewhere, prompts, tmp_path):
  """GSPO, whose bounds are 3e-4: two updates, two epochs, two micro-batches, also with dropout or as a mixture of
  experts, at a learning rate of 0."""
  noise = kind == "noise"
  c = config(prompts, total_steps=4, batch_size=16, grad_accum_steps=2, rollout=dict(epochs=2),
             strategy=dict(preset="gspo", disable_dropout=not noise))
  c.precision.compute, c.optimizer.learning_rate, c.model.dropout = "bfloat16", 0.0, 0.2 * noise
  if kind == "experts":
    c.model.moe.update(num_experts=8, experts_per_token=2, expert_size=8)
  train(c, tmp_path / "w")
  for step, row in rows_of(tmp_path / "w").items():
    assert row["policy/ratio_mean"] == (1 if step == 1 else pytest.approx(1, abs=3e-4))
    assert step > 1 or row["clip_ratio/region_mean"] == row["policy/approx_kl"] == 0
    assert row["sampling/sampling_logp_difference/max"] > 5e-3
    assert noise or row["sampling/kl"] == pytest.approx(0.01**2 / 2, rel=0.2)  # what samples has no dropout


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_with_one_update_a_rollout_nothing_is_scored_nor_clipped(preset, sampler_elsewhere, prompts, tmp_path,
                                                                 monkeypatch):
  """Every recipe in bfloat16, while the policy moves from rollout to rollout."""
  monkeypatch.setattr(old_policy, "make_score_fn", None)
  monkeypatch.setattr(old_policy, "of_rollout", None)
  c = config(prompts, total_steps=2, rollout=dict(updates=1), strategy=dict(preset=preset))
  c.precision.compute = "bfloat16"
  train(c, tmp_path / "w")
  rows = rows_of(tmp_path / "w").values()
  assert len(rows) == 2
  for row in rows:
    clipped = [value for key, value in row.items() if key.startswith("clip_ratio/") or key == "cispo_clip_ratio"]
    assert bool(clipped) == (preset not in ("rloo", "sapo")) and not any(clipped)
    assert row["policy/ratio_mean"] == 1 and row["update_norm"] > 0
    assert row["sampling/sampling_logp_difference/max"] > 5e-3


def test_later_steps_are_compared_with_the_policy_when_the_rollout_began(prompts, tmp_path, monkeypatch):
  """Against float64 log-probs of single sequences from full logits, under the parameters of the run's beginning and
  those before each update; three updates of one rollout, of which a restart continues the last."""
  batches, place = [], main.mesh_lib.place_batch

  def placing(make, size, sharding):
    batches.append(make(slice(None)))
    return place(make, size, sharding)

  c = config(prompts, total_steps=3, rollout=dict(updates=3))
  states = []
  for stop in (1, 2, None):
    c.callbacks = {} if stop is None else dict(stop=dict(type=STOP, step=stop))
    with monkeypatch.context() as patch:
      patch.setattr(main.mesh_lib, "place_batch", placing)
      run = train(c, tmp_path / "w")
    states.append(run.state["params"])
  before, real = [start_of(run), *states[:2]], run.model.num_real_vocab
  trained = [batch for batch in batches if "old_logprobs" in batch and np.isfinite(batch["old_logprobs"]).any()]
  assert len(trained) == 2
  rows = rows_of(tmp_path / "w")
  for step, batch in enumerate(trained, 1):
    ratios = []
    for row, segment in np.argwhere(batch["segment_roles"] > 0):
      at = np.flatnonzero(batch["segment_ids"][row] == segment + 1)
      ids = batch["tokens"][row, at]
      if "prompt_ids" in batch and (number := batch["prompt_ids"][row, at[0]]):
        ids = np.concatenate([batch["tokens"][row, batch["segment_ids"][row] == number], ids])
      sampled = np.flatnonzero(batch["loss_weights"][row, at] > 0) + len(ids) - len(at)
      lp_old, lp = (np.log(probabilities(pairs.jitted_logits(run.model)(params, padded(ids))[..., :real]))[0]
                    for params in (before[0], before[step]))
      here = sampled - 1, ids[sampled]
      ratios += np.exp(lp[here] - lp_old[here]).tolist()
      old = batch["old_logprobs"][row, at][batch["loss_weights"][row, at] > 0]
      np.testing.assert_allclose(old, lp_old[here], atol=2e-5)
    assert rows[step + 1]["policy/ratio_mean"] == pytest.approx(np.mean(ratios), rel=1e-5)
    assert abs(np.mean(ratios) - 1) > 1e-3 or np.std(ratios) > 1e-3


def padded(ids):
  out = np.zeros((1, 64), np.int32)
  out[0, :len(ids)] = ids
  return out


def test_values_are_put_where_their_tokens_are():
  """Two updates, two epochs over five tokens; in each batch they stand in another place, beside padding."""
  layouts = [[[0, 1, -1]], [[-1, 2, 3, 4]], [[2, -1], [4, 3]], [[1, 0]]]

  asked = []

  def score(batch, nth, whole):
    assert set(batch) == {"tokens"}
    asked.append((nth, whole))
    found = {"old_logprobs": 10.0 * nth + batch["tokens"]}
    return found | {"old_values": -found["old_logprobs"]} if whole else found

  def batch_of(nth):
    return {"places": np.array(layouts[nth]), "tokens": np.array(layouts[nth]) + 0.5}

  found, first = old_policy.of_rollout(score, batch_of, 5, 2, 2)
  assert not first and asked == [(1, False), (2, False), (3, False)]
  np.testing.assert_array_equal(found[0], [np.nan, np.nan, 12.5, 13.5, 14.5])
  np.testing.assert_array_equal(found[1], [30.5, 31.5, 22.5, 23.5, 24.5])
  asked.clear()
  again, first = old_policy.of_rollout(score, batch_of, 5, 2, 2, with_critic=True)
  np.testing.assert_array_equal(again, found)
  assert asked == [(0, True), (1, True), (2, False), (3, False)]
  np.testing.assert_array_equal(first["old_values"], [-0.5, -1.5, -12.5, -13.5, -14.5])
  np.testing.assert_array_equal(first["old_logprobs"], -first["old_values"])
