"""PPO's losses of policy and critic against float64 loops over tokens, their gradients against finite differences of
these loops; what must not matter; what is refused."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.api import Output
from tests import tiny
from tests.trainer.strategies.pairs import options
from tests.trainer.strategies.test_grpo import Table, corrections, logps, numbers, probabilities, sequences_of, table
from trainer import tree
from trainer.config import checks as config_checks
from trainer.config import reward, strategy
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError
from trainer.metrics import Mean
from trainer.strategies import critic, fill_in, ppo

OPTIONS = dict(critic="start", clip_low=0.2, clip_high=0.25, kl_coef=0.0, temperature=0.7, value_coef=0.3,
               value_clip=0.2)


def cfg_of(**changed):
  return options("ppo", **OPTIONS | changed)


class PolicyTable(Table):
  """A policy whose logits are its parameters."""

  trained_only, reasons = None, ()

  def apply(self, params, batch, rng=None, train=False):
    return Output(params["logits"])


class CriticTable(PolicyTable):
  """A critic whose scores are its parameters, [B, T]: of the text up to a token, that token included."""

  num_labels = 1

  def apply(self, params, batch, rng=None, train=False):
    return Output(params["scores"][..., None])

  def score(self, params, hidden):
    return hidden


MODEL = critic.ActorCritic(PolicyTable(), CriticTable())


def batch_and_params():
  """The batch of GRPO's tests with numbers of each token in the place of advantages; NaN where nothing is trained."""
  _, logits, batch = table()
  rng = np.random.default_rng(5)
  scores = rng.normal(size=batch["tokens"].shape).astype(np.float32)
  trained = batch["loss_weights"] > 0
  batch = {key: part for key, part in batch.items() if key != "advantages"}
  batch["old_values"] = np.roll(scores, 1, axis=1) + 0.4 * rng.normal(size=scores.shape).astype(np.float32)
  batch["returns"], batch["token_advantages"] = (rng.normal(size=scores.shape).astype(np.float32) for _ in range(2))
  for key in ("old_values", "returns", "token_advantages"):
    batch[key] = np.where(trained, batch[key], np.nan).astype(np.float32)
  return batch, {"logits": logits, "critic": {"scores": scores}}


def by_loops(logits, scores, batch, cfg):
  """(the objective, values whose bound counts), in float64, a token at a time."""
  lp, p = logps(logits, batch), np.roll(probabilities(logits), 1, axis=1)
  total = weight = values = count = bounded = 0.0
  for row, _, at in sequences_of(batch):
    losses, differences = [], [batch["old_logprobs"][row, t] - batch["behavior_logprobs"][row, t] for t in at]
    for t, correction in zip(at, corrections(differences, cfg), strict=True):
      advantage, ratio = float(batch["token_advantages"][row, t]), math.exp(lp[row, t] - batch["old_logprobs"][row, t])
      gain = min(ratio * advantage, min(max(ratio, 1 - cfg.clip_low), 1 + cfg.clip_high) * advantage)
      if cfg.clip_dual and advantage < 0:
        gain = max(gain, cfg.clip_dual * advantage)
      entropy = -sum(q * math.log(q) for q in p[row, t])
      losses.append(-correction * gain - cfg.entropy_coef * entropy)
      if cfg.kl_coef and cfg.kl_in == "loss":
        d = lp[row, t] - float(batch["ref_logprobs"][row, t])
        losses[-1] += cfg.kl_coef * (math.exp(-d) - 1 + d)
      value, old, target = scores[row, t - 1], float(batch["old_values"][row, t]), float(batch["returns"][row, t])
      near = min(max(value, old - cfg.value_clip), old + cfg.value_clip) if cfg.value_clip else value
      values += 0.5 * max((value - target)**2, (near - target)**2)
      bounded += (near - target)**2 > (value - target)**2
      count += 1
    total += sum(losses) / (len(losses) if cfg.aggregate == "sequence" else 1)
    weight += 1 if cfg.aggregate == "sequence" else len(losses)
  return total / weight + cfg.value_coef * values / count, bounded / count


def objective(params, batch, cfg):
  terms, metrics = ppo.loss(MODEL, params, batch, None, cfg)
  sums = [(jnp.sum(term.sum), jnp.sum(term.weight)) for term in terms.values()]
  return sum(total / weight for total, weight in sums), terms | metrics


@pytest.mark.parametrize("changed", [
    {}, dict(value_clip=0.0), dict(aggregate="sequence"), dict(clip_dual=1.3, entropy_coef=0.1),
    dict(kl_coef=0.3, kl_in="loss", kl="k3", kl_corrected=False), dict(correction="token_truncate", correction_max=1.1),
    dict(kl_coef=0.3, kl_in="reward", kl="k1")], ids=str)
def test_value_and_gradient_are_those_of_loops_over_tokens(changed):
  """I8. Prompts, padding and an environment's tokens have NaN; nothing of it counts."""
  cfg, (batch, params) = cfg_of(**changed), batch_and_params()
  (value, metrics), gradient = jax.value_and_grad(objective, has_aux=True)(params, batch, cfg)
  logits, scores = params["logits"].astype(np.float64), params["critic"]["scores"].astype(np.float64)
  wanted, bounded = by_loops(logits, scores, batch, cfg)
  assert float(value) == pytest.approx(wanted, rel=2e-5)
  assert numbers(metrics).get("value/clip_ratio", 0.0) == pytest.approx(bounded)
  assert (bounded > 0.1) == bool(cfg.value_clip)
  rng, h = np.random.default_rng(2), 1e-6
  for _ in range(4):
    step, of_critic = rng.normal(size=logits.shape), rng.normal(size=scores.shape)
    ends = [by_loops(logits + sign * h * step, scores + sign * h * of_critic, batch, cfg)[0] for sign in (1, -1)]
    found = np.sum(gradient["logits"] * step) + np.sum(gradient["critic"]["scores"] * of_critic)
    assert found == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-4, abs=1e-5)
    assert abs(np.sum(gradient["critic"]["scores"] * of_critic)) > 1e-3


def test_rows_are_what_they_are_in_any_batch():
  """Sums and weights of rows: whole, and each row by itself with more padding; so neither packing nor micro-batches nor
  devices matter."""
  cfg, (batch, params) = cfg_of(), batch_and_params()
  _, whole = objective(params, batch, cfg)
  for row in range(len(batch["tokens"])):
    alone = {key: np.pad(part[row:row + 1], [(0, 2)] + [(0, 0)] * (part.ndim - 1)) for key, part in batch.items()}
    mine = jax.tree.map(lambda part, row=row: np.pad(part[row:row + 1], [(0, 2)] + [(0, 0)] * (part.ndim - 1)), params)
    _, found = objective(mine, alone, cfg)
    for name in ("loss", "critic_loss", "value_loss", "value/mean", "policy_loss"):
      for part in ("sum", "weight"):
        ours, theirs = getattr(found[name], part).sum(), getattr(whole[name], part)[row]
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_on_policy_the_ratio_is_one_and_no_value_is_bounded():
  """Without log p_old the gradient is that of the advantage times log p; values that are V_old are inside the bound."""
  cfg, (batch, params) = cfg_of(), batch_and_params()
  batch.pop("old_logprobs"), batch.pop("behavior_logprobs")
  batch["old_values"] = np.roll(params["critic"]["scores"], 1, axis=1)
  (_, metrics), gradient = jax.value_and_grad(objective, has_aux=True)(params, batch, cfg)
  found = numbers(metrics)
  assert found["policy/ratio_mean"] == 1 and found["clip_ratio/region_mean"] == found["value/clip_ratio"] == 0
  trained = batch["loss_weights"] > 0
  error = np.where(trained, np.roll(params["critic"]["scores"], 1, axis=1) - batch["returns"], 0) / trained.sum()
  np.testing.assert_allclose(gradient["critic"]["scores"], cfg.value_coef * np.roll(error, -1, axis=1), atol=1e-7)


def test_what_the_critic_asks_for_has_its_own_names():
  class Balanced(CriticTable):

    def apply(self, params, batch, rng=None, train=False):
      return super().apply(params, batch)._replace(losses={"balance": Mean(2.0, 1.0)}, metrics={"moe": Mean(1.0, 1.0)})

  batch, params = batch_and_params()
  terms, metrics = ppo.loss(critic.ActorCritic(PolicyTable(), Balanced()), params, batch, None, cfg_of())
  assert set(terms) == {"loss", "critic_loss", "critic/balance"} and "critic/moe" in metrics


@pytest.mark.parametrize("disabled", [False, True])
def test_policy_and_critic_drop_out_by_keys_of_their_own(disabled):
  given = []

  class Noted(PolicyTable):

    def apply(self, params, batch, rng=None, train=False):
      given.append((None if rng is None else jax.random.key_data(rng).tolist(), train))
      return super().apply(params, batch)

  class NotedCritic(Noted, CriticTable):
    apply = Noted.apply

    def score(self, params, hidden):
      return params["scores"][..., None]

  batch, params = batch_and_params()
  params["critic"]["logits"] = params["logits"]
  model, cfg = critic.ActorCritic(Noted(), NotedCritic()), cfg_of(disable_dropout=disabled)
  ppo.loss(model, params, batch, jax.random.key(3), cfg)
  assert [train for _, train in given] == [not disabled] * 2
  assert len({str(key) for key, _ in given} - {"None"}) == (0 if disabled else 2)


def test_a_critic_lies_on_the_mesh_as_a_policy_does():
  """Also its embedding, whose rule is of a path from its beginning on."""
  params = tiny.model().abstract_params()
  mesh = jax.sharding.AbstractMesh((2, 2), ("fsdp", "tensor"))
  placed, _ = mesh_lib.param_shardings({**params, "critic": params}, mesh)
  of_critic = tree.flatten(placed["critic"])
  assert of_critic["embed/embedding"].spec == jax.sharding.PartitionSpec("tensor", "fsdp")
  for path, sharding in of_critic.items():
    assert sharding == tree.flatten(placed)[path], path


def filled(**changed):
  rollout = changed.pop("rollout", dict(num_prompts=2))
  c = config_checks.resolve(dict(strategy=strategy("ppo", **changed), rollout=rollout | dict(
      rewards=dict(right=reward(type="exact_match")))))
  fill_in(c)
  return c


def test_options_that_are_not_given_follow_from_others():
  c = filled()
  assert (c.rollout.group_size, c.strategy.kl_in, c.strategy.kl, c.strategy.temperature) == (1, "reward", "k1", 1.0)
  assert c.strategy.kl_corrected is None  # so that one that is given is found to be without effect
  c = filled(kl_in="loss")
  assert (c.strategy.kl, c.strategy.kl_corrected) == ("k3", True)
  assert filled(kl_coef=0.0).strategy.kl_in is None


@pytest.mark.parametrize("changed, message", [
    (dict(gamma=1.1), "strategy.gamma is 1.1; it must be from 0 to 1"),
    (dict(gae_lambda=-0.1), "strategy.gae_lambda is -0.1"),
    (dict(value_coef=0.0), "strategy.value_coef is 0: the critic would not learn"),
    (dict(value_clip=-1.0), "strategy.value_clip is -1.0; it must be a number from 0 on"),
    (dict(clip_low=2.0), "strategy.clip_low is 2.0"), (dict(aggregate="constant"), "allowed: token, sequence"),
    (dict(kl_in="both"), "strategy.kl_in is 'both'; allowed: reward, loss"),
    (dict(kl_in="loss", kl="k1", kl_corrected=False), "strategy.kl is 'k1' without kl_corrected"),
    (dict(correction="always"), "strategy.correction is 'always'"),
    (dict(rollout=dict(num_prompts=0)), "set rollout.num_prompts. From responses with rewards that are there already, "
                                        "grpo learns")], ids=str)
def test_options_that_cannot_work_are_refused(changed, message):
  with pytest.raises(ConfigError, match=message):
    ppo.check(filled(**changed).strategy, 1, None)


def test_a_reference_that_moves_does_so_after_so_many_steps():
  assert filled(kl_coef=0.1, reference_ema=0.5).strategy.reference_ema_steps == 512
  assert filled(kl_coef=0.1, reference_ema=0.5, reference_ema_steps=3).strategy.reference_ema_steps == 3
  assert filled(kl_coef=0.1).strategy.reference_ema_steps is None and filled(kl_coef=0.1).strategy.reference_ema == 0.0
  assert filled(rollout=dict(num_prompts=2, group_size=4)).rollout.group_size == 4
  needs_reference = ppo.PPO.needs_reference
  assert needs_reference(filled(kl_coef=0.1).strategy) and not needs_reference(filled(kl_coef=0.0).strategy)


def test_what_there_is_to_see_of_each_token():
  """Ratios of each token alone, and what is bounded of them."""
  batch, params = batch_and_params()
  lp = np.asarray(logps(params["logits"].astype(np.float64), batch), np.float32)
  found = ppo.token_numbers({key: jnp.asarray(part) for key, part in batch.items()}, jnp.asarray(lp), cfg_of())
  trained = batch["loss_weights"] > 0
  ratio = np.exp(lp.astype(np.float64) - batch["old_logprobs"])[trained]
  advantage = batch["token_advantages"][trained]
  bounded = (advantage > 0) & (ratio > 1.25) | (advantage < 0) & (ratio < 0.8)
  assert 0 < bounded.sum() < len(bounded)
  held = {key: batch[key][trained] for key in ("old_values", "returns", "old_logprobs", "behavior_logprobs")}
  for name, expected in (held | dict(ratios=ratio, advantages=advantage, clipped=bounded)).items():
    np.testing.assert_allclose(np.asarray(found[name])[trained], expected, rtol=1e-5, err_msg=name)
  assert len(found) == 7
