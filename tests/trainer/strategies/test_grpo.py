"""GRPO's losses against float64 loops over tokens, their gradients against finite differences of these loops; what must
not matter; what is refused."""

import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from input_pipeline.examples.roles import COMPLETION
from models.api import Output
from tests.trainer.strategies import pairs
from tests.trainer.strategies.pairs import options
from trainer.config import checks as config_checks
from trainer.metrics import Mean, to_floats
from trainer.strategies import grpo, presets, sequences

VOCAB = 24
OPTIONS = dict(ratio="token", clip="ppo", clip_low=0.2, clip_high=0.25, clip_dual=0.0, aggregate="token",
               aggregate_length=10, combine="sum_then_normalize", baseline="group", scale="group", kl_coef=0.0, kl="k3",
               kl_corrected=False, entropy_coef=0.0, temperature=0.7, reference_ema=0.0, reference_ema_steps=512)
CLIPS = ("ppo", "dual", "cispo", "sapo", "none")


def cfg_of(**changed):
  return options("grpo", **OPTIONS | changed)


def clipped(clip, ratio="token"):
  """Options with bounds that some of the table's ratios cross; those of sequences are nearer to 1."""
  bound = 0.2 if ratio == "token" else 0.05
  changed = {"ppo": {}, "dual": dict(clip_dual=1 + 1.5 * bound), "cispo": dict(clip_high=1 + bound), "none": {},
             "sapo": dict(sapo_temperature_pos=0.2 / bound, sapo_temperature_neg=0.4 / bound)}[clip]
  return dict(ratio=ratio, clip="ppo" if clip == "dual" else clip, clip_low=bound, clip_high=1.25 * bound) | changed


class Table:
  """A model whose logits are its parameters, [B, T, V]: gradients per token, and nothing to compile."""

  vocab_chunk, final_logit_cap, num_real_vocab = VOCAB, None, VOCAB

  def apply(self, params, batch, rng=None, train=False):
    return Output(params)

  def unembedding(self, params):
    return jnp.eye(VOCAB)


def batch_of(rows, length=24, segments=2, seed=0, spread=0.4):
  """A batch of rows of (prompt, completion), with advantages and log-probs that look like those of other policies."""
  batch = pairs.layout([[(x, y, COMPLETION) for x, y in row] for row in rows], length, segments)
  rng = np.random.default_rng(seed)
  there = batch["segment_roles"] > 0
  batch["advantages"] = (rng.normal(size=there.shape) * there).astype(np.float32)
  for name in ("old_logprobs", "ref_logprobs", "behavior_logprobs"):
    shift = rng.normal(size=batch["tokens"].shape) * spread
    batch[name] = ((shift - 3.0) * batch["loss_weights"]).astype(np.float32)
  return batch


@functools.cache
def table():
  """(model, logits, batch): four sequences and an empty row; of one some tokens are an environment's."""
  both = [(x, y) for x, y, _ in pairs.examples(4, seed=3)]
  both[1] = (both[1][0], both[1][1] + [3, 1, 4, 1, 5])
  batch = batch_of([both[:2], both[2:3], [], both[3:]])
  rng = np.random.default_rng(1)
  logits = rng.normal(size=(*batch["tokens"].shape, VOCAB)).astype(np.float32) * 0.5
  environment = np.flatnonzero(batch["segment_ids"][0] == 2)[-3:-1]
  batch["loss_weights"][0, environment] = 0
  for name in ("old_logprobs", "ref_logprobs", "behavior_logprobs"):
    # Around the log-probs of now, so that ratios lie on both sides of the bounds.
    around = batch[name] + 3.0 + logps(logits, batch)
    batch[name] = np.where(batch["loss_weights"] > 0, around, 0).astype(np.float32)
  batch["advantages"][[0, 0, 1, 3], [0, 1, 0, 0]] = -0.8, -0.5, 1.2, 0.7
  return Table(), logits, batch


def probabilities(logits, temperature=0.7):
  z = np.asarray(logits, np.float64) / temperature
  z = z - z.max(-1, keepdims=True)
  return np.exp(z) / np.exp(z).sum(-1, keepdims=True)


def logps(logits, batch, temperature=0.7):
  """log p of each token of the rows, [B, T] float64; that of a row's first is meaningless."""
  p = np.roll(probabilities(logits, temperature), 1, axis=1)
  return np.log(np.take_along_axis(p, batch["tokens"][..., None], axis=-1)[..., 0])


def sequences_of(batch):
  """(row, segment, places of trained tokens) of each sequence."""
  for row, segment in np.argwhere(batch["segment_roles"] > 0):
    at = np.flatnonzero((batch["segment_ids"][row] == segment + 1) & (batch["loss_weights"][row] > 0))
    yield row, segment, at


def corrections(differences, cfg):
  """The weights of a sequence's tokens from log p_old - log q, as TRL has them (grpo_trainer.py of 1.16.0, mode
  vllm_importance_sampling_mode, bounds vllm_importance_sampling_clip_min and _max); NaN: q is not known."""
  differences = [0.0 if math.isnan(d) else d for d in differences]
  if cfg.correction == "none":
    return [1.0] * len(differences)
  if cfg.correction.startswith("sequence"):
    differences = [sum(differences)] * len(differences)
  weights = [math.exp(d) for d in differences]
  if cfg.correction.endswith("truncate"):
    return [max(min(w, cfg.correction_max), cfg.correction_min) for w in weights]
  return [0.0 if w < cfg.correction_min or w > cfg.correction_max else w for w in weights]


def by_loops(logits, fixed, batch, cfg):
  """The objective in float64, a token at a time; what has no gradient is computed from the logits `fixed`."""
  lp, lp_fixed = logps(logits, batch), logps(fixed, batch)
  p = np.roll(probabilities(logits), 1, axis=1)
  old = batch.get("old_logprobs", lp_fixed)
  total, weight = 0.0, 0.0
  for row, segment, at in sequences_of(batch):
    advantage = float(batch["advantages"][row, segment])
    differences = [lp[row, t] - old[row, t] for t in at]
    mean, mean_fixed = np.mean(differences), np.mean([lp_fixed[row, t] - old[row, t] for t in at])
    losses, weights = [], corrections([old[row, t] - batch["behavior_logprobs"][row, t] for t in at], cfg)
    for t, difference, correction in zip(at, differences, weights, strict=True):
      ratio = math.exp(mean if cfg.ratio == "sequence" else difference)
      if cfg.clip == "ppo":
        clipped = min(max(ratio, 1 - cfg.clip_low), 1 + cfg.clip_high)
        gain = min(ratio * advantage, clipped * advantage)
        if cfg.clip_dual and advantage < 0:
          gain = max(gain, cfg.clip_dual * advantage)
        loss = -gain
      elif cfg.clip == "cispo":
        fixed_ratio = math.exp(mean_fixed if cfg.ratio == "sequence" else lp_fixed[row, t] - old[row, t])
        loss = -min(fixed_ratio, cfg.clip_high) * advantage * lp[row, t]
      elif cfg.clip == "sapo":
        tau = cfg.sapo_temperature_pos if advantage > 0 else cfg.sapo_temperature_neg
        loss = -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage
      else:
        loss = -ratio * advantage
      d = lp[row, t] - float(batch["ref_logprobs"][row, t])
      penalty = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[cfg.kl]
      penalty *= math.exp(difference) if cfg.kl_corrected else 1.0
      entropy = -sum(q * math.log(q) for q in p[row, t])
      losses.append(correction * loss + cfg.kl_coef * penalty - cfg.entropy_coef * entropy)
    if cfg.aggregate == "sequence":
      total, weight = total + sum(losses) / len(losses), weight + 1
    else:
      total, weight = total + sum(losses), weight + (len(losses) if cfg.aggregate == "token" else cfg.aggregate_length)
  return total / weight


def objective(model, params, batch, cfg, **given):
  terms, metrics = grpo.loss(model, params, batch, None, cfg, **given)
  total = jax.tree.map(jnp.sum, terms, is_leaf=lambda x: not isinstance(x, (Mean, dict)))
  return total["loss"].sum / total["loss"].weight, terms | metrics


def numbers(metrics):
  """Metrics as floats; those per row summed."""
  summed = {k: Mean(v.sum.sum(), v.weight.sum()) if isinstance(v, Mean) else v for k, v in metrics.items()}
  return to_floats(jax.device_get(summed))


def of_table(cfg, **changed):
  """(value, gradient, metrics) of the table's batch."""
  model, logits, batch = table()
  batch = {k: v for k, v in (batch | changed).items() if v is not None}
  fn = jax.value_and_grad(lambda logits: objective(model, logits, batch, cfg), has_aux=True)
  (value, metrics), gradient = fn(logits)
  return float(value), np.asarray(gradient), numbers(metrics)


def agrees_with_loops(cfg, **changed):
  value, gradient, _ = of_table(cfg, **changed)
  _, logits, batch = table()
  batch = {k: v for k, v in (batch | changed).items() if v is not None}
  assert value == pytest.approx(by_loops(logits, logits, batch, cfg), rel=2e-5, abs=1e-6)
  logits, rng, h = logits.astype(np.float64), np.random.default_rng(2), 1e-5
  assert np.abs(gradient).max() > 1e-3
  for _ in range(4):
    step = rng.normal(size=logits.shape)
    ends = [by_loops(logits + sign * h * step, logits, batch, cfg) for sign in (1, -1)]
    assert np.sum(gradient * step) == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("aggregate", presets.AGGREGATES)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("ratio", presets.RATIOS)
def test_value_and_gradient_are_those_of_loops_over_tokens(ratio, clip, aggregate):
  """I8. Of one sequence two tokens are an environment's: its mean and its ratio are over the others."""
  agrees_with_loops(cfg_of(aggregate=aggregate, **clipped(clip, ratio)))


def of_trl(name):
  """What TRL makes of a loss type (make_grpo_references.py): (loss, gradient by log-probs, what it was given)."""
  with np.load(Path(__file__).with_name("grpo_references.npz")) as found:
    given = {key: found[key] for key in ("now", "old", "sampled", "mask", "advantages")}
    return float(found[f"loss/{name}"]), found[f"gradient/{name}"], given


@pytest.mark.parametrize("name, changed", [
    ("grpo", dict(aggregate="sequence")),
    ("dapo", dict()),
    ("cispo", dict(clip="cispo", clip_high=1.2)),
    ("sapo", dict(clip="sapo", sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, aggregate="sequence")),
    ("sapo, sequence", dict(clip="sapo", sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, aggregate="sequence",
                            ratio="sequence")),
    ("sapo, steep", dict(clip="sapo", sapo_temperature_pos=2.0, sapo_temperature_neg=5.0, aggregate="sequence")),
    ("luspo", dict(ratio="sequence", clip_low=0.05, clip_high=0.06, aggregate="constant", aggregate_length=1)),
    ("masked", dict(off_policy_mask_threshold=0.1)),
])
def test_value_and_gradient_are_trls(name, changed):
  expected, gradient, given = of_trl(name)
  sizes = given["mask"].sum(axis=1)
  batch = pairs.layout([[([0], [1] * size, COMPLETION)] for size in sizes], 8, 1)
  batch |= dict(advantages=given["advantages"][:, None].astype(np.float32))
  for key, of in (("old_logprobs", "old"), ("behavior_logprobs", "sampled")):
    batch[key] = np.pad(np.where(given["mask"], given[of], np.nan), ((0, 0), (1, 0))).astype(np.float32)
  p = np.exp(given["now"])
  # The logit of each token beside others that are 0 whose log-prob is that; d log p / d logit = 1 - p.
  logits = np.zeros((*batch["tokens"].shape, VOCAB), np.float32)
  logits[:, :-1, 1] = np.log((VOCAB - 1) * p / (1 - p))
  fn = jax.value_and_grad(lambda logits: objective(Table(), logits, batch, cfg_of(temperature=1.0, **changed)),
                          has_aux=True)
  (value, metrics), found = fn(logits)
  assert value == pytest.approx(expected, rel=1e-5)
  np.testing.assert_allclose(np.where(given["mask"], found[:, :-1, 1] / (1 - p), 0), gradient, rtol=2e-5, atol=1e-7)
  if name == "masked":
    assert numbers(metrics)["policy/off_policy_masked"] == pytest.approx(2 / 5)


def test_what_the_policy_would_not_say_any_more_is_left_out():
  """Where the sampler's log-prob is not known, since p_old; only what is worse than others, and by more than the
  threshold; divisors stay, and the penalty does."""
  cfg = cfg_of(off_policy_mask_threshold=0.1, clip="none", kl_coef=0.1)
  batch = pairs.layout([[([0], [1, 2], COMPLETION), ([0], [3, 6], COMPLETION)], [([0], [4, 5], COMPLETION)]], 8, 2)
  batch["advantages"] = np.array([[-1, -2], [1, 0]], np.float32)
  # Equal logits: log p is -log V. Fallen by 0.3 and 0, by 0.06 twice (the mean is below 0.1), and of a good one by 9.
  old = np.full(batch["tokens"].shape, np.nan, np.float32)
  old[0, [1, 2, 4, 5]] = np.array([0.3, 0.0, 0.06, 0.06]) - math.log(VOCAB)
  old[1, [1, 2]] = 9 - math.log(VOCAB)
  batch |= dict(old_logprobs=old, behavior_logprobs=np.full_like(old, np.nan),
                ref_logprobs=np.full_like(old, -math.log(VOCAB) - 0.2))
  value, metrics = objective(Table(), np.zeros((*old.shape, VOCAB), np.float32), batch, cfg)
  penalty = math.exp(-0.2) - 1 + 0.2
  assert float(value) == pytest.approx((4 * math.exp(-0.06) - 2 * math.exp(-9) + 6 * 0.1 * penalty) / 6, rel=1e-5)
  assert numbers(metrics)["policy/off_policy_masked"] == pytest.approx(1 / 3)
  batch["behavior_logprobs"][0, 4] = 0.2 - math.log(VOCAB)  # known of that token: beyond the threshold, too
  _, metrics = objective(Table(), np.zeros((*old.shape, VOCAB), np.float32), batch, cfg)
  assert numbers(metrics)["policy/off_policy_masked"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("kl, corrected", [("k1", True), ("k2", False), ("k2", True), ("k3", False), ("k3", True)])
def test_the_penalty_and_the_bonus_are_those_of_loops_over_tokens(kl, corrected):
  agrees_with_loops(cfg_of(kl=kl, kl_corrected=corrected, kl_coef=0.3, entropy_coef=0.1, ratio="sequence"))


@pytest.mark.parametrize("ratio", presets.RATIOS)
@pytest.mark.parametrize("clip", ["ppo", "cispo", "none"])
def test_without_old_log_probs(clip, ratio):
  """The ratio is 1 with the gradient of log p; the penalty's correction too. NaN says the same, and token by token."""
  cfg = cfg_of(kl_coef=0.1, kl_corrected=True, **clipped(clip, ratio))
  agrees_with_loops(cfg, old_logprobs=None)
  absent, unknown = of_table(cfg, old_logprobs=None), of_table(cfg, old_logprobs=table()[2]["old_logprobs"] * np.nan)
  assert absent[0] == unknown[0] and absent[2] == unknown[2]
  np.testing.assert_array_equal(absent[1], unknown[1])


@pytest.mark.parametrize("clip", ["ppo", "cispo"])
@pytest.mark.parametrize("correction", presets.CORRECTIONS[1:])
def test_what_another_program_sampled_is_weighted(correction, clip):
  """Tokens within the bounds and beyond both of them; penalty and bonus have no weight."""
  low, high = (0.8, 1.2) if correction.startswith("token") else (0.5, 1.5)
  changed = dict(correction=correction, correction_min=low, correction_max=high, kl_coef=0.1, entropy_coef=0.1)
  cfg = cfg_of(**changed | clipped(clip))
  for old in ({}, dict(old_logprobs=None)):
    agrees_with_loops(cfg, **old)
  metrics, batch, differences = of_table(cfg)[2], table()[2], []
  for row, _, at in sequences_of(batch):
    some = (batch["old_logprobs"] - batch["behavior_logprobs"])[row, at].astype(np.float64)
    differences += [some.sum()] if correction.startswith("sequence") else some.tolist()
  ratios = np.exp(differences)
  assert (ratios < low).any() and (ratios > high).any() and ((low < ratios) & (ratios < high)).any(), ratios
  assert metrics["sampling/correction_bounded"] == pytest.approx(np.mean((ratios < low) | (ratios > high)))
  for name in ("min", "mean", "max"):
    assert metrics[f"sampling/importance_sampling_ratio/{name}"] == pytest.approx(getattr(ratios, name)(), rel=1e-5)


@pytest.mark.parametrize("correction", presets.CORRECTIONS[1:])
def test_what_is_not_known_of_a_sampler_is_not_corrected(correction):
  """A sequence without log q, as rows of responses may have it: its tokens weigh 1, and no metric of the sampler has
  them."""
  low, high = (0.8, 1.2) if correction.startswith("token") else (0.5, 1.5)
  cfg, batch = cfg_of(correction=correction, correction_min=low, correction_max=high), table()[2]
  (row, _, unknown), *others = sequences_of(batch)
  sampled = batch["behavior_logprobs"].copy()
  sampled[row, unknown] = np.nan
  agrees_with_loops(cfg, behavior_logprobs=sampled)
  metrics = of_table(cfg, behavior_logprobs=sampled)[2]
  differences = np.concatenate([np.abs(batch["old_logprobs"] - sampled)[row, at] for row, _, at in others])
  assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(differences.mean(), rel=1e-5)


def test_every_bound_is_met_above():
  """Otherwise the tests above would not see them."""
  for ratio in presets.RATIOS:
    for clip, number in (("dual", 4), ("cispo", 1)):
      shares = [value for name, value in of_table(cfg_of(**clipped(clip, ratio)))[2].items()
                if name.endswith(("_mean", "cispo_clip_ratio")) and "clip_ratio" in name]
      assert len(shares) == number and all(0 < share < 1 for share in shares)


def on_policy(temperature=0.7):
  """The table's batch, sampled by the policy itself."""
  model, logits, batch = table()
  return np.asarray(sequences.token_logprobs(model, logits, batch, temperature))


@pytest.mark.parametrize("clip", CLIPS)
def test_on_policy_the_gradient_is_that_of_reinforce(clip):
  """I9, T25: ρ is 1 exactly, nothing is clipped; -A ∇ log p, the mean over tokens. Also with bounds at 1 itself."""
  model, logits, batch = table()

  def reinforce(logits):
    lp = sequences.token_logprobs(model, logits, batch, 0.7)
    advantage = np.take_along_axis(batch["advantages"], np.maximum(batch["segment_ids"] - 1, 0), axis=1)
    return -jnp.sum(advantage * lp) / batch["loss_weights"].sum()

  expected = np.asarray(jax.jit(jax.grad(reinforce))(logits))
  for changed in ({}, dict(clip_low=0.0, clip_high=0.0))[:2 if clip == "ppo" else 1]:
    _, gradient, metrics = of_table(cfg_of(**clipped(clip) | changed), old_logprobs=on_policy(),
                                    behavior_logprobs=on_policy())
    np.testing.assert_allclose(gradient, expected, atol=1e-7)
    assert metrics["policy/ratio_mean"] == 1.0
    assert metrics["sampling/importance_sampling_ratio/max"] == metrics["sampling/importance_sampling_ratio/min"] == 1.0
    assert metrics["sampling/sampling_logp_difference/max"] == 0.0
    assert not any(value for name, value in metrics.items() if "clip_ratio" in name)


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_every_preset_offline_is_what_it_is_on_policy(preset):
  """The same bits; finite, and with a gradient. What the sampler says does not matter without a correction."""
  config = config_checks.resolve({"strategy": dict(name="grpo", preset=preset, temperature=0.7)})
  presets.fill_in(config)
  value, gradient, metrics = of_table(config.strategy, old_logprobs=on_policy())
  offline_value, offline_gradient, offline_metrics = of_table(config.strategy, old_logprobs=None,
                                                              behavior_logprobs=None)
  assert value == offline_value and math.isfinite(value)
  np.testing.assert_array_equal(gradient, offline_gradient)
  assert np.abs(gradient).max() > 1e-4
  assert {k: v for k, v in metrics.items() if not k.startswith("sampling/")} == offline_metrics
  assert ("kl" in metrics) == (config.strategy.kl_coef > 0)


def test_no_advantage_no_gradient():
  """T26: exactly, also where ratios are far from 1."""
  nothing = np.zeros_like(table()[2]["advantages"])
  for clip in CLIPS:
    value, gradient, _ = of_table(cfg_of(**clipped(clip)), advantages=nothing)
    assert value == 0 and not gradient.any()


def test_which_estimators_have_the_gradient_of_the_divergence():
  """Expectations over all tokens: k2, k1 and k3 corrected; k1 has none, k3 that of the other divergence (T30)."""
  model, rng = Table(), np.random.default_rng(0)
  logits, ref_logits = (rng.normal(size=VOCAB).astype(np.float32) for _ in range(2))
  log_p, log_ref = (np.asarray(jax.nn.log_softmax(z)) for z in (logits, ref_logits))
  batch = pairs.layout([[([0], [v], COMPLETION)] for v in range(VOCAB)], 2, 1)
  batch |= dict(advantages=np.zeros((VOCAB, 1), np.float32), ref_logprobs=np.stack([0 * log_ref, log_ref], axis=1))
  exact = jax.grad(lambda z: jnp.sum(jax.nn.softmax(z) * (jax.nn.log_softmax(z) - log_ref)))(logits)

  def expected_gradient(kl, corrected):
    cfg = cfg_of(kl_coef=1.0, kl=kl, kl_corrected=corrected, temperature=1.0)

    def expectation(z):
      terms, _ = grpo.loss(model, jnp.broadcast_to(z, (VOCAB, 2, VOCAB)), batch, None, cfg)
      return jnp.sum(np.exp(log_p) * terms["loss"].sum)

    return jax.jit(jax.grad(expectation))(logits)

  for kl, corrected in (("k1", True), ("k2", False), ("k3", True)):
    np.testing.assert_allclose(expected_gradient(kl, corrected), exact, atol=1e-6)
  np.testing.assert_allclose(expected_gradient("k1", False), 0.0, atol=1e-6)
  other = jax.grad(lambda z: jnp.sum(np.exp(log_ref) * (log_ref - jax.nn.log_softmax(z))))(logits)
  np.testing.assert_allclose(expected_gradient("k3", False), other, atol=1e-6)
  assert np.linalg.norm(other - exact) > 0.1 * np.linalg.norm(exact)


def test_estimators_by_hand():
  d = jnp.asarray([math.log(2.0), 0.0, -math.log(4.0)])
  np.testing.assert_allclose(grpo.divergence(d, "k1"), d)
  np.testing.assert_allclose(grpo.divergence(d, "k2"), np.square(d) / 2)
  np.testing.assert_allclose(grpo.divergence(d, "k3"), [0.5 - 1 + math.log(2), 0.0, 4 - 1 - math.log(4)], rtol=1e-6)
  assert float(grpo.divergence(jnp.asarray(1e-4), "k3")) == pytest.approx(5e-9, rel=0.2)  # no cancellation


def test_far_policies_have_finite_losses():
  """T30: log-ratios are clamped before exp."""
  _, _, batch = table()
  for shift in (-200.0, 200.0):
    far = (batch["old_logprobs"] + shift).astype(np.float32)
    for ratio, clip in (("token", "none"), ("sequence", "dual")):
      cfg = cfg_of(kl_coef=0.1, kl_corrected=True, correction=f"{ratio}_truncate", **clipped(clip, ratio))
      value, gradient, metrics = of_table(cfg, old_logprobs=far, behavior_logprobs=-far, ref_logprobs=-far)
      assert math.isfinite(value) and np.isfinite(gradient).all() and all(map(math.isfinite, metrics.values()))


def test_metrics_are_shares_of_trained_tokens():
  """And of each sequence's for the smallest and the largest share."""
  cfg = cfg_of(kl_coef=0.1, kl="k2", clip_dual=1.4)
  _, logits, batch = table()
  metrics = of_table(cfg)[2]
  lp, p = logps(logits, batch), np.roll(probabilities(logits), 1, axis=1)
  low, high, dual, ratios, weights, entropies, k3 = ([] for _ in range(7))
  for row, segment, at in sequences_of(batch):
    positive = batch["advantages"][row, segment] > 0
    ratio = np.exp(lp[row, at] - batch["old_logprobs"][row, at])
    low.append((ratio < 0.8) & ~positive)
    high.append((ratio > 1.25) & positive)
    dual.append((ratio > 1.4) & ~positive)
    ratios.append(ratio)
    weights.append(np.exp(np.float64(batch["old_logprobs"][row, at]) - batch["behavior_logprobs"][row, at]))
    entropies.append(-(p[row, at] * np.log(p[row, at])).sum(-1))
    d = lp[row, at] - batch["ref_logprobs"][row, at]
    k3.append(np.exp(-d) - 1 + d)
  mean = lambda parts: float(np.mean(np.concatenate(parts)))  # noqa: E731
  joined, weights = np.concatenate(ratios), np.concatenate(weights)
  expected = {
      "clip_ratio/low_mean": mean(low), "clip_ratio/low_min": min(x.mean() for x in low),
      "clip_ratio/high_mean": mean(high), "clip_ratio/high_max": max(x.mean() for x in high),
      "clip_ratio/region_mean": mean(low) + mean(high), "clip_ratio/dual_mean": mean(dual),
      "policy/ratio_mean": joined.mean(), "policy/approx_kl": (joined - 1 - np.log(joined)).mean(),
      "sampling/importance_sampling_ratio/mean": weights.mean(),
      "sampling/importance_sampling_ratio/min": weights.min(), "sampling/importance_sampling_ratio/max": weights.max(),
      "sampling/sampling_logp_difference/mean": np.abs(np.log(weights)).mean(),
      "sampling/sampling_logp_difference/max": np.abs(np.log(weights)).max(),
      "sampling/kl": (weights - 1 - np.log(weights)).mean(),
      "entropy": mean(entropies), "kl": mean(k3),
      "policy_loss": by_loops(logits, logits, batch, cfg_of(clip_dual=1.4)),
      "loss": by_loops(logits, logits, batch, cfg),
  }
  assert expected["clip_ratio/dual_mean"] > 0 and expected["clip_ratio/low_mean"] > 0
  assert metrics == pytest.approx(expected, rel=2e-5, abs=1e-6)
  capped = of_table(cfg_of(clip="cispo", clip_high=1.3))[2]
  assert capped["cispo_clip_ratio"] == pytest.approx((joined > 1.3).mean()) and "clip_ratio/low_mean" not in capped


@pytest.mark.parametrize("outside", [np.nan, -90.0])
def test_what_stands_outside_trained_tokens_changes_no_bit(outside):
  """Nor does a sequence whose entry in `sequences` is 0."""
  _, _, batch = table()
  cfg = cfg_of(kl_coef=0.1, ratio="sequence", aggregate="sequence", correction="sequence_truncate", correction_max=1.5)
  plain_value, plain, _ = of_table(cfg)
  untrained = batch["loss_weights"] == 0
  loud = {name: np.where(untrained, outside, batch[name]).astype(np.float32)
          for name in ("old_logprobs", "behavior_logprobs", "ref_logprobs")}
  loud["advantages"] = np.where(batch["segment_roles"] > 0, batch["advantages"], outside).astype(np.float32)
  value, gradient, _ = of_table(cfg, **loud)
  assert value == plain_value
  np.testing.assert_array_equal(gradient, plain)
  without, short = batch["segment_roles"].copy(), batch["loss_weights"].copy()
  without[0, 0], short[0, batch["segment_ids"][0] == 1] = 0, 0
  absent, removed = of_table(cfg, segment_roles=without), of_table(cfg, segment_roles=without, loss_weights=short)
  assert absent[0] == removed[0] != plain_value
  np.testing.assert_array_equal(absent[1], removed[1])


def test_a_token_without_an_advantage_is_never_clipped():
  """Ratios on both sides with A = 0, A > 0 and A < 0, far outside and between both bounds: what is clipped counts."""
  ratio = jnp.asarray([[0.1, 0.1, 0.1, 5.0, 5.0, 5.0, 5.0, 1.0, 1.22, 0.78]])
  advantage = jnp.asarray([[0.0, 1.0, -1.0, 0.0, 0.0, 1.0, -1.0, 0.0, 1.0, -1.0]])
  policy = grpo.policy_term(ratio, advantage, jnp.zeros((1, 10)), cfg_of(clip_dual=3.0))
  np.testing.assert_array_equal(policy.low[0], [0, 0, 1, 0, 0, 0, 0, 0, 0, 1])
  np.testing.assert_array_equal(policy.high[0], [0, 0, 0, 0, 0, 1, 0, 0, 0, 0])
  np.testing.assert_array_equal(policy.dual[0], [0, 0, 0, 0, 0, 0, 1, 0, 0, 0])
  np.testing.assert_allclose(policy.losses[0], [0, -0.1, 0.8, 0, 0, -1.25, 3.0, 0, -1.22, 0.8], atol=1e-7)
