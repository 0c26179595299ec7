"""Presets: each recipe's values, what fills in what, and that nothing is filled in that has no effect."""

import re

import jax
import numpy as np
import pytest

from input_pipeline.examples.roles import COMPLETION
from tests import tiny
from tests.trainer.strategies import pairs, test_grpo
from trainer import strategies
from trainer.config import checks as config_checks
from trainer.config import strategy
from trainer.errors import ConfigError
from trainer.strategies import grpo, presets


def filled(rollout=None, **options):
  """(the config with its options filled in, the lines for the log); rollouts unless told otherwise."""
  config = config_checks.resolve({
      "strategy": dict(name="grpo", **options), "rollout": {"num_prompts": 2, **(rollout or {})}})
  return config, strategies.fill_in(config)


def read_all(config):
  """A view of which everything was read that a run with rollouts reads of these sections."""
  view, model = config_checks.View(config), tiny.model()
  presets.check(view.strategy, 4, view.model)
  _ = view.rollout.num_prompts, view.rollout.group_size, view.rollout.resample
  batch = pairs.layout([[([1], [2, 3], COMPLETION)]], 8, 1)
  batch |= dict(advantages=batch["segment_roles"].astype(np.float32), behavior_logprobs=batch["loss_weights"],
               old_logprobs=batch["loss_weights"])
  params = model.abstract_params()
  jax.eval_shape(lambda p, b: grpo.loss(model, p, b, None, view.strategy, reference=p), params, batch)
  return view


def of(config, *keys):
  return tuple(config.strategy[key] for key in keys)


@pytest.mark.parametrize("preset, keys, values", [
    ("grpo", "ratio clip clip_low clip_high aggregate baseline scale kl_coef",
     ("token", "ppo", 0.2, 0.2, "sequence", "group", "group", 0.0)),
    ("dapo", "ratio clip clip_low clip_high aggregate baseline scale kl_coef",
     ("token", "ppo", 0.2, 0.28, "token", "group", "group", 0.0)),
    ("dr_grpo", "clip_low clip_high aggregate aggregate_length baseline scale kl_coef",
     (0.2, 0.2, "constant", 128, "group", "none", 0.0)),
    ("gspo", "ratio clip clip_low clip_high aggregate scale kl_coef",
     ("sequence", "ppo", 3e-4, 4e-4, "sequence", "group", 0.0)),
    ("cispo", "ratio clip clip_high aggregate scale kl_coef", ("token", "cispo", 5.0, "token", "group", 0.0)),
    ("sapo", "clip sapo_temperature_pos sapo_temperature_neg clip_low aggregate combine scale",
     ("sapo", 1.0, 1.05, None, "sequence", "sum_then_normalize", "group")),
    ("luspo", "ratio clip clip_low clip_high aggregate aggregate_length",
     ("sequence", "ppo", 3e-4, 4e-4, "constant", 1)),
    ("gdpo", "clip clip_high aggregate combine baseline scale",
     ("ppo", 0.2, "sequence", "normalize_then_sum", "group", "group")),
    ("rloo", "ratio clip aggregate aggregate_length baseline scale kl kl_coef kl_corrected",
     ("token", "none", "constant", 1, "leave_one_out", "none", "k2", 0.05, False)),
    ("reinforce++", "clip clip_low aggregate baseline scale kl kl_coef kl_corrected",
     ("ppo", 0.2, "token", "batch", "batch", "k2", 0.01, False)),
    ("astrai", "clip_low aggregate kl kl_coef kl_corrected reference_ema reference_ema_steps",
     (0.2, "token", "k2", 0.02, False, 1.0, 200)),
])
def test_values_of_the_recipes(preset, keys, values):
  config, _ = filled(preset=preset)
  assert of(config, *keys.split()) == values


def test_rollouts_of_the_recipes():
  sizes = {name: (c.rollout.group_size, c.rollout.resample) for name in presets.PRESETS
           for c in (filled(preset=name)[0],)}
  assert sizes.pop("dapo") == (8, 10) and sizes.pop("astrai") == (4, 0)
  assert set(sizes.values()) == {(8, 0)}


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_a_recipe_can_be_used_as_it_is(preset):
  """Its values work together, the loss's options are all there, and nothing is without effect."""
  config, lines = filled(preset=preset)
  config_checks.audit(read_all(config))
  assert len(lines) == 1 and lines[0].startswith(f"strategy.preset {preset}: ")
  assert config.is_locked


def test_what_is_given_stays_and_is_not_listed():
  config, (line,) = filled(preset="dapo", clip_high=0.4, scale="none", rollout=dict(group_size=3, resample=0))
  assert of(config, "clip_low", "clip_high", "scale") == (0.2, 0.4, "none")
  assert (config.rollout.group_size, config.rollout.resample) == (3, 0)
  assert "strategy.clip_low=0.2" in line and "strategy.aggregate=token" in line
  assert not re.search("clip_high|scale|group_size|resample", line)
  assert strategies.fill_in(config) == []  # nothing is left to decide


def test_what_has_no_effect_stays_open():
  """So that one the user gives is refused by the audit, and one the preset has is not."""
  config, _ = filled(preset="grpo", clip="none")
  assert of(config, "clip_low", "clip_high", "clip_dual", "aggregate_length", "kl", "kl_corrected", "reference_ema",
            "reference_ema_steps") == (None,) * 8
  for options in (dict(clip="none", clip_low=0.3), dict(kl="k2"), dict(aggregate_length=64), dict(reference_ema=0.5)):
    config, _ = filled(**options)
    with pytest.raises(ConfigError, match=f"strategy.{list(options)[-1]} ="):
      config_checks.audit(read_all(config))


def test_a_coefficient_brings_the_estimator_with_it():
  config, (line,) = filled(kl_coef=0.04)
  assert of(config, "kl", "kl_corrected", "reference_ema", "reference_ema_steps") == ("k3", True, 0.0, None)
  assert "strategy.kl=k3" in line
  config, _ = filled(kl_coef=0.04, reference_ema=0.1)
  assert config.strategy.reference_ema_steps == 512


@pytest.mark.parametrize("options, keys, values", [
    (dict(preset="grpo", clip="cispo"), "clip_low clip_high", (None, 5.0)),
    (dict(preset="dapo", ratio="sequence"), "clip_low clip_high", (3e-4, 4e-4)),
    (dict(preset="gspo", ratio="token"), "clip_low clip_high", (0.2, 0.2)),
    (dict(preset="rloo", clip="ppo"), "clip_low clip_high", (0.2, 0.2)),
])
def test_bounds_are_of_the_clipping_that_is_used(options, keys, values):
  """A preset's bounds for another kind of ratio or clipping would pin every weight, or none."""
  config, lines = filled(**options)
  assert of(config, *keys.split()) == values
  assert len(lines) == 2 and lines[1].startswith(f"for strategy.clip={config.strategy.clip} and ratio=")
  assert f"strategy.clip_high={values[1]}" in lines[1] and "clip_high" not in lines[0]
  presets.check(config.strategy, 1, config.model)


def test_temperature_and_length_are_those_of_the_rollouts():
  config, _ = filled(preset="dr_grpo", rollout=dict(temperature=0.7, max_new_tokens=99))
  assert of(config, "temperature", "aggregate_length") == (0.7, 99)
  config, _ = filled(preset="dr_grpo", aggregate_length=7, temperature=0.7, rollout=dict(temperature=0.7))
  assert of(config, "temperature", "aggregate_length") == (0.7, 7)
  with pytest.raises(ConfigError, match="strategy.temperature is 1.0, but rollout.temperature is 0.7"):
    filled(temperature=1.0, rollout=dict(temperature=0.7))


def test_without_rollouts():
  """Completions that come with the data were sampled at a temperature of their own."""
  config, (line,) = filled(preset="dapo", temperature=0.6, rollout=dict(num_prompts=0))
  assert config.strategy.temperature == 0.6 and "rollout" not in line
  assert config.rollout.group_size is None and config.rollout.resample is None


def test_other_strategies_get_a_group_alone():
  config = config_checks.resolve({"strategy": {"name": "dpo"}, "rollout": {"num_prompts": 2}})
  before = config.strategy.to_dict()
  assert strategies.fill_in(config) == []
  assert (config.rollout.group_size, config.rollout.resample) == (8, 0) and config.strategy.to_dict() == before
  config = config_checks.resolve({})
  assert strategies.fill_in(config) == [] and config.rollout.group_size is None


def test_an_unknown_preset():
  with pytest.raises(ConfigError, match=r"'dr-grpo'; did you mean 'dr_grpo'\? Known presets: grpo, dapo, dr_grpo,"):
    filled(preset="dr-grpo")


def test_presets_name_options_that_exist():
  open_options = {key for key, value in grpo.GRPO.options.items() if isinstance(value, type)}
  for name, preset in presets.PRESETS.items():
    assert set(preset["strategy"]) <= open_options, name
    for key, value in preset["strategy"].items():
      assert type(value) is strategy("grpo").get_type(key), (name, key)
    assert set(preset["rollout"]) <= {"group_size", "resample"}


# ----------------------------------------------------------------------------------------------
# The equations of the presets, once more: of a batch's tokens by sequence, in float64.


def clip(x, low, high):
  return np.minimum(np.maximum(x, low), high)


def ppo(s, low, high):
  return -np.minimum(s["ratio"] * s["A"], clip(s["ratio"], 1 - low, 1 + high) * s["A"])


def k2(s):
  return (s["logp"] - s["ref"]) ** 2 / 2


def token_mean(sequences, loss):
  return sum(loss(s).sum() for s in sequences) / sum(len(s["logp"]) for s in sequences)


EQUATIONS = {
    "grpo": lambda q, length: np.mean([ppo(s, 0.2, 0.2).mean() for s in q]),
    "dapo": lambda q, length: token_mean(q, lambda s: ppo(s, 0.2, 0.28)),
    "dr_grpo": lambda q, length: sum(ppo(s, 0.2, 0.2).sum() for s in q) / (len(q) * length),
    "gspo": lambda q, length: np.mean(
        [ppo(s | dict(ratio=np.exp(np.mean(s["logp"] - s["old"]))), 0.0003, 0.0004) for s in q]),
    "cispo": lambda q, length: token_mean(q, lambda s: -np.minimum(s["ratio"], 5.0) * s["A"] * s["logp"]),
    "sapo": lambda q, length: np.mean([np.mean(-4 / tau / (1 + np.exp(-tau * (s["ratio"] - 1))) * s["A"])
                                       for s in q for tau in [1.0 if s["A"] > 0 else 1.05]]),
    "luspo": lambda q, length: np.mean([len(s["logp"]) * ppo(
        s | dict(ratio=np.exp(np.mean(s["logp"] - s["old"]))), 0.0003, 0.0004) for s in q]),
    "gdpo": lambda q, length: np.mean([ppo(s, 0.2, 0.2).mean() for s in q]),
    "rloo": lambda q, length: sum((-s["ratio"] * s["A"] + 0.05 * k2(s)).sum() for s in q) / (len(q) * 1),
    "reinforce++": lambda q, length: token_mean(q, lambda s: ppo(s, 0.2, 0.2) + 0.01 * k2(s)),
    "astrai": lambda q, length: token_mean(q, lambda s: ppo(s, 0.2, 0.2) + 0.02 * k2(s)),
}


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets_are_what_their_equations_say(name):
  config = config_checks.resolve({"strategy": dict(name="grpo", preset=name, temperature=0.7),
                                  "rollout": dict(max_new_tokens=11)})
  strategies.fill_in(config)
  _, logits, batch = test_grpo.table()
  batch = batch | dict(advantages=batch["advantages"] + 0.4 * (batch["segment_roles"] > 0))  # sums that do not cancel
  logp = test_grpo.logps(logits, batch)
  sequences = []
  for row, segment, at in test_grpo.sequences_of(batch):
    s = dict(logp=logp[row, at], old=batch["old_logprobs"][row, at].astype(np.float64),
             ref=batch["ref_logprobs"][row, at].astype(np.float64), A=float(batch["advantages"][row, segment]))
    sequences.append(s | dict(ratio=np.exp(s["logp"] - s["old"])))
  expected = EQUATIONS[name](sequences, 11)
  found = test_grpo.of_table(config.strategy, advantages=batch["advantages"].astype(np.float32))[0]
  assert found == pytest.approx(expected, rel=2e-5) and abs(expected) > 1e-2


@pytest.mark.parametrize("options, message", [
    (dict(clip="cispo", clip_high=0.99), "strategy.clip_high is 0.99; with clip='cispo' it is the cap on the ratio it"),
    (dict(clip="cispo", clip_high=1.0), None), (dict(clip_low=1.0), None),
    (dict(clip_low=1.01), "strategy.clip_low is 1.01; the ratio counts from 1 - clip_low on"),
    (dict(clip_low=-0.1), "strategy.clip_low is -0.1; the ratio counts from 1 - clip_low on: it must be from 0 to 1."),
    (dict(clip_high=-0.1), "strategy.clip_high is -0.1; the ratio counts up to 1 + clip_high: it must be from 0 on."),
    (dict(clip_high=0.0), None), (dict(clip_dual=1.0), "strategy.clip_dual is 1.0; it bounds the ratio where the adva"),
    (dict(clip="sapo", sapo_temperature_neg=0.0), "strategy.sapo_temperature_neg is 0.0; the gate is steeper"),
    (dict(clip="sapo", sapo_temperature_pos=-1.0), "strategy.sapo_temperature_pos is -1.0; the gate is steeper"),
    (dict(clip="sapo", ratio="sequence"), None), (dict(off_policy_mask_threshold=0.1), None),
    (dict(off_policy_mask_threshold=-0.1), "strategy.off_policy_mask_threshold is -0.1; it is a mean of log-r"),
    (dict(combine="normalize_then_sum"), None),
    (dict(combine="normalize_then_sum", baseline="leave_one_out"), "strategy: combine is 'normalize_then_sum'"),
    (dict(combine="normalize_then_sum", baseline="batch", scale="batch"), "strategy: combine is 'normalize_then_sum'"),
    (dict(combine="normalize_then_sum", scale="none"), "strategy: combine is 'normalize_then_sum'"),
    (dict(combine="apart"), "strategy: combine is 'apart'; allowed: sum_then_normalize, normalize_then_sum."),
    (dict(clip_dual=0.0), None), (dict(aggregate="constant", aggregate_length=0), "strategy.aggregate_length is 0; it"),
    (dict(aggregate="constant", aggregate_length=1), None), (dict(kl_coef=-0.1), "strategy.kl_coef is -0.1; it must b"),
    (dict(entropy_coef=-0.1), "strategy.entropy_coef is -0.1; it must be a number from 0 on."),
    (dict(correction="token_truncate", correction_min=1.1), "strategy.correction_min is 1.1, correction_max 3.0; they"),
    (dict(correction="token_truncate", correction_max=0.9), "strategy.correction_min is 0.0, correction_max 0.9; they"),
    (dict(correction="token_truncate", correction_min=0.5, correction_max=1.0), None),
    (dict(kl_coef=0.1, reference_ema=1.1), "strategy.reference_ema is 1.1; it is the share"),
    (dict(kl_coef=0.1, reference_ema=0.5, reference_ema_steps=0), "strategy.reference_ema_steps is 0; it must be 1 or"),
    (dict(kl_coef=0.1, reference_ema=1.0, reference_ema_steps=1), None),
    (dict(kl_coef=0.1, kl="k1", kl_corrected=False), "strategy.kl is 'k1' without kl_corrected: its gradient"),
    (dict(kl_coef=0.1, kl="k1", kl_corrected=True), None), (dict(kl_coef=0.1, kl="k2", kl_corrected=False), None),
    (dict(kl_coef=0.1, kl="k9"), "strategy.kl is 'k9'; allowed"),
    (dict(scale="group", baseline="none"), "strategy: "), (dict(ratio="words"), "strategy.ratio is 'words'; allowed"),
    (dict(rollout=dict(temperature=0.0)), "strategy.temperature is 0.0; log-probs are of a distribution at"),
    (dict(kl_coef=0.1, reference="none"), "strategy.reference is 'none', but strategy.kl_coef 0.1 compares the polic")])
def test_where_each_option_ends(options, message):
  config, _ = filled(**options)
  if message is None:
    presets.check(config.strategy, 1, config.model)
  else:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
      presets.check(config.strategy, 1, config.model)
