"""Options of grpo: published recipes, how those that are not given get their values, and which cannot work.

Where a recipe is mapped onto other means than its paper's, docs/grpo.md says how.
"""

import difflib
import math
from typing import Any

from ml_collections import ConfigDict

from input_pipeline.examples import advantages
from trainer.errors import ConfigError, one_of
from trainer.strategies import sequences

RATIOS = ("token", "sequence")
CLIPS = ("ppo", "cispo", "sapo", "none")
AGGREGATES = ("token", "sequence", "constant")
ESTIMATORS = ("k1", "k2", "k3")
CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")

# Bounds that mean something for this clipping of this ratio, where the preset's are of another kind.
_CLIP_BOUNDS = {
    ("ppo", "token"): dict(clip_low=0.2, clip_high=0.2, clip_dual=0.0),
    ("ppo", "sequence"): dict(clip_low=3e-4, clip_high=4e-4, clip_dual=0.0),
    ("cispo", "token"): dict(clip_high=5.0),
    ("cispo", "sequence"): dict(clip_high=5.0),
    # The paper's, where the ratio is of a token.
    ("sapo", "token"): dict(sapo_temperature_pos=1.0, sapo_temperature_neg=1.05),
    ("sapo", "sequence"): dict(sapo_temperature_pos=1.0, sapo_temperature_neg=1.05),
}
# What a rollout has where neither the config nor a preset says it.
ROLLOUT = dict(group_size=8, resample=0)


def _strategy(**changed: Any) -> dict[str, Any]:
  """GRPO as DeepSeekMath has it (arXiv 2402.03300, eq. 3), but for the divergence; `changed`: what others do."""
  options = dict(
      ratio="token", clip="ppo", aggregate="sequence", combine="sum_then_normalize", baseline="group", scale="group",
      # The paper has 0.04. With 0 no reference is kept, as in TRL and in the later recipes.
      kl_coef=0.0,
      # Unbiased, and never negative for a token.
      kl="k3", kl_corrected=True,
      entropy_coef=0.0, reference_ema=0.0, reference_ema_steps=512)
  options |= changed
  return _CLIP_BOUNDS.get((str(options["clip"]), str(options["ratio"])), {}) | options


PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "grpo": dict(strategy=_strategy(), rollout={}),
    # arXiv 2503.14476. So many rounds of dynamic sampling as in the recipe of its authors.
    "dapo": dict(strategy=_strategy(clip_high=0.28, aggregate="token"), rollout=dict(resample=10)),
    # arXiv 2503.20783.
    "dr_grpo": dict(strategy=_strategy(aggregate="constant", scale="none"), rollout={}),
    # arXiv 2507.18071.
    "gspo": dict(strategy=_strategy(ratio="sequence"), rollout={}),
    # arXiv 2506.13585.
    "cispo": dict(strategy=_strategy(clip="cispo", aggregate="token"), rollout={}),
    # arXiv 2511.20347.
    "sapo": dict(strategy=_strategy(clip="sapo"), rollout={}),
    # arXiv 2602.05261: GSPO with the completion's sum over tokens, hence a length of 1 to divide by.
    "luspo": dict(strategy=_strategy(ratio="sequence", aggregate="constant", aggregate_length=1), rollout={}),
    # arXiv 2601.05242.
    "gdpo": dict(strategy=_strategy(combine="normalize_then_sum"), rollout={}),
    # arXiv 2402.14740: a sum over tokens, hence a length of 1 to divide by.
    "rloo": dict(strategy=_strategy(clip="none", aggregate="constant", aggregate_length=1, baseline="leave_one_out",
                                    scale="none", kl_coef=0.05, kl="k2", kl_corrected=False), rollout={}),
    # arXiv 2501.03262.
    "reinforce++": dict(strategy=_strategy(aggregate="token", baseline="batch", scale="batch", kl_coef=0.01, kl="k2",
                                           kl_corrected=False), rollout={}),
    # AstrAI: 0.01 × (log-ratio)², which is twice k2; the reference follows the policy.
    "astrai": dict(strategy=_strategy(aggregate="token", kl_coef=0.02, kl="k2", kl_corrected=False, reference_ema=1.0,
                                      reference_ema_steps=200), rollout=dict(group_size=4)),
}


def fill_in(config: ConfigDict) -> list[str]:
  """Gives every option of grpo that is None its value: from the preset, or from `config.rollout`.

  Options that have no effect beside the others (bounds of a clipping that is off, say) stay None, so that one the user
  gives is found to be without effect. Runs on the resolved config, before it is validated.

  Args:
    config: the resolved config, locked or not; changed in place.

  Returns:
    A line for the log that lists what the preset decided, and one for what the kind of clipping decided; empty for
    what was all given.

  Raises:
    ConfigError: no such preset.
  """
  preset, decided = _preset(config.strategy.preset), []
  with config.unlocked():
    if config.rollout.num_prompts > 0:
      decided += _fill(config, "rollout", ROLLOUT | preset["rollout"])
    bounds = _fill_strategy(config, preset["strategy"], decided)
  lines = [f"strategy.preset {config.strategy.preset}: {', '.join(decided)}"] if decided else []
  if bounds:
    lines.append(f"for strategy.clip={config.strategy.clip} and ratio={config.strategy.ratio}: {', '.join(bounds)}")
  return lines


def _fill_strategy(config: ConfigDict, preset: dict[str, Any], decided: list[str]) -> list[str]:
  """Fills in `config.strategy`; adds to `decided`, and returns what the preset did not decide."""
  options, rollout = config.strategy, config.rollout
  keys = ["ratio", "clip", "aggregate", "combine", "baseline", "scale", "kl_coef", "entropy_coef"]
  decided += _fill(config, "strategy", {key: preset[key] for key in keys})
  bounds = _CLIP_BOUNDS.get((options.clip, options.ratio), {})
  is_of_preset = (options.clip, options.ratio) == (preset["clip"], preset["ratio"])
  filled = _fill(config, "strategy", {key: preset[key] if is_of_preset else value for key, value in bounds.items()})
  decided += filled if is_of_preset else []

  late = []
  if options.aggregate == "constant" and "aggregate_length" in preset:
    late.append("aggregate_length")
  if options.kl_coef > 0:
    late += ["kl", "kl_corrected", "reference_ema"]
  decided += _fill(config, "strategy", {key: preset[key] for key in late})
  if options.kl_coef > 0 and options.reference_ema > 0:
    decided += _fill(config, "strategy", dict(reference_ema_steps=preset["reference_ema_steps"]))

  if options.aggregate == "constant":
    _fill(config, "strategy", dict(aggregate_length=rollout.max_new_tokens))
  return [] if is_of_preset else filled


def _preset(name: str) -> dict[str, dict[str, Any]]:
  if name not in PRESETS:
    near = difflib.get_close_matches(str(name), PRESETS, n=1, cutoff=0.5)
    raise ConfigError(f"strategy.preset is {name!r}; " + (f"did you mean {near[0]!r}? " if near else "")
                      + f"Known presets: {', '.join(PRESETS)}.")
  return PRESETS[name]


def _fill(config: ConfigDict, section: str, values: dict[str, Any]) -> list[str]:
  """Sets those that are None; returns them as `section.key=value`."""
  done = []
  for key, value in values.items():
    if config[section][key] is None:
      config[section][key] = value
      done.append(f"{section}.{key}={value}")
  return done


def check(cfg: Any, grad_accum_steps: int, cfg_model: Any = None) -> None:
  """Refuses options of the strategy that cannot work, before any device work. Raises ConfigError.

  Keys are read only where they have an effect, so that the audit finds those without.

  Args:
    grad_accum_steps: micro-batches of a step; any number will do.
    cfg_model: the config's `model` section; None: not looked at.
  """
  for key, allowed in (("preset", tuple(PRESETS)), ("ratio", RATIOS), ("clip", CLIPS),
                       ("aggregate", AGGREGATES)):
    one_of(f"strategy.{key}", cfg[key], allowed)
  if problem := advantages.mismatch(cfg.baseline, cfg.scale, cfg.combine):
    raise ConfigError(f"strategy: {problem}")
  _check_clip(cfg)
  if not 0 <= cfg.off_policy_mask_threshold < math.inf:
    raise ConfigError(f"strategy.off_policy_mask_threshold is {cfg.off_policy_mask_threshold}; it is a mean of "
                      "log-ratios, in nats: above 0, 0.5 say, or 0, and no completion is left out.")
  if cfg.aggregate == "constant" and cfg.aggregate_length < 1:
    raise ConfigError(f"strategy.aggregate_length is {cfg.aggregate_length}; it must be 1 or more.")
  check_common(cfg)
  if cfg.kl_coef > 0:
    check_divergence(cfg)
  sequences.check_noise(cfg, cfg_model)


def check_common(cfg: Any) -> None:
  """Refuses values of options that all strategies on rewards have. Raises ConfigError."""
  one_of("strategy.correction", cfg.correction, CORRECTIONS)
  if cfg.correction != "none" and not 0 <= cfg.correction_min <= 1 <= cfg.correction_max:
    raise ConfigError(f"strategy.correction_min is {cfg.correction_min}, correction_max {cfg.correction_max}; they "
                      "bound p_old / q, which is 1 where trainer and sampler agree: the one must be from 0 to 1, the "
                      "other from 1 on (inf: no bound).")
  if not 0 < cfg.temperature < math.inf:
    raise ConfigError(f"strategy.temperature is {cfg.temperature}; log-probs are of a distribution at a temperature "
                      "above 0. Use rollout.temperature=1.0, say.")
  for key in ("kl_coef", "entropy_coef"):
    if not 0 <= cfg[key] < math.inf:
      raise ConfigError(f"strategy.{key} is {cfg[key]}; it must be a number from 0 on.")


def _check_clip(cfg: Any) -> None:
  if cfg.clip == "cispo" and not 1 <= cfg.clip_high < math.inf:
    raise ConfigError(f"strategy.clip_high is {cfg.clip_high}; with clip='cispo' it is the cap on the ratio itself, "
                      "which is 1 for a policy that has not changed. Use 1 or more, 5.0 say.")
  if cfg.clip == "ppo":
    check_bounds(cfg)
  for key in ("sapo_temperature_pos", "sapo_temperature_neg") if cfg.clip == "sapo" else ():
    if not 0 < cfg[key] < math.inf:
      raise ConfigError(f"strategy.{key} is {cfg[key]}; the gate is steeper the higher it is: it must be above 0, 1.0 "
                        "say.")


def check_bounds(cfg: Any) -> None:
  """Refuses bounds of PPO's clipping that cannot be. Raises ConfigError."""
  if not 0 <= cfg.clip_low <= 1:
    raise ConfigError(f"strategy.clip_low is {cfg.clip_low}; the ratio counts from 1 - clip_low on: it must be from 0 "
                      "to 1.")
  if not 0 <= cfg.clip_high < math.inf:
    raise ConfigError(f"strategy.clip_high is {cfg.clip_high}; the ratio counts up to 1 + clip_high: it must be from 0 "
                      "on.")
  if cfg.clip_dual and not 1 < cfg.clip_dual < math.inf:
    raise ConfigError(f"strategy.clip_dual is {cfg.clip_dual}; it bounds the ratio where the advantage is negative and "
                      "must be above 1, 3.0 say, or 0 for none.")


def check_divergence(cfg: Any, in_loss: bool = True) -> None:
  """Refuses a penalty that cannot be, a term of the loss or part of the reward. Raises ConfigError."""
  one_of("strategy.kl", cfg.kl, ESTIMATORS)
  if in_loss and cfg.kl == "k1" and not cfg.kl_corrected:
    raise ConfigError("strategy.kl is 'k1' without kl_corrected: its gradient as a loss, that of log p, is 0 in "
                      "expectation. Use --config.strategy.kl_corrected=True, or kl='k2' or 'k3'.")
  if cfg.reference == "none":
    raise ConfigError(f"strategy.reference is 'none', but strategy.kl_coef {cfg.kl_coef} compares the policy with one. "
                      "Use strategy.reference='start', or kl_coef=0.")
  if not 0 <= cfg.reference_ema <= 1:
    raise ConfigError(f"strategy.reference_ema is {cfg.reference_ema}; it is the share by which the reference moves "
                      "towards the policy, from 0 to 1.")
  if cfg.reference_ema and cfg.reference_ema_steps < 1:
    raise ConfigError(f"strategy.reference_ema_steps is {cfg.reference_ema_steps}; it must be 1 or more.")
