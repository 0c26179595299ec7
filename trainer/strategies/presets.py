"""The published recipes of `config.strategy` for grpo, and how options that are not given get their values.

Where a recipe is mapped onto other means than its paper's, docs/grpo.md says how.
"""

import difflib
from typing import Any

from ml_collections import ConfigDict

from trainer.errors import ConfigError

# Bounds that mean something for this clipping of this ratio, where the preset's are of another kind.
_CLIP_BOUNDS = {
    ("ppo", "token"): dict(clip_low=0.2, clip_high=0.2, clip_dual=0.0),
    ("ppo", "sequence"): dict(clip_low=3e-4, clip_high=4e-4, clip_dual=0.0),
    ("cispo", "token"): dict(clip_high=5.0),
    ("cispo", "sequence"): dict(clip_high=5.0),
}
_GROUP_SIZE = 8


def _strategy(**changed: Any) -> dict[str, Any]:
  """GRPO as DeepSeekMath has it (arXiv 2402.03300, eq. 3), but for the divergence; `changed`: what others do."""
  options = dict(
      ratio="token", clip="ppo", aggregate="sequence", baseline="group", scale="group",
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
  """Gives every option that is None its value: from the preset, or from `config.rollout`.

  Options that have no effect beside the others (bounds of a clipping that is off, say) stay None, so that one the user
  gives is found to be without effect. Runs on the resolved config, before it is validated.

  Args:
    config: the resolved config, locked or not; changed in place. With a strategy other than grpo, only
      `rollout.group_size` and `rollout.resample` are filled in, where there are rollouts.

  Returns:
    A line for the log that lists what the preset decided, and one for what the kind of clipping decided; empty for
    what was all given.

  Raises:
    ConfigError: no such preset, or log-probs at another temperature than that of the rollouts.
  """
  is_grpo = config.strategy.name == "grpo"
  preset = _preset(config.strategy.preset) if is_grpo else dict(strategy={}, rollout={})
  decided = []
  with config.unlocked():
    if config.rollout.num_prompts > 0:
      decided += _fill(config, "rollout", dict(group_size=_GROUP_SIZE, resample=0) | preset["rollout"])
    if not is_grpo:
      return []
    bounds = _fill_strategy(config, preset["strategy"], decided)
  lines = [f"strategy.preset {config.strategy.preset}: {', '.join(decided)}"] if decided else []
  if bounds:
    lines.append(f"for strategy.clip={config.strategy.clip} and ratio={config.strategy.ratio}: {', '.join(bounds)}")
  return lines


def _fill_strategy(config: ConfigDict, preset: dict[str, Any], decided: list[str]) -> list[str]:
  """Fills in `config.strategy`; adds to `decided`, and returns what the preset did not decide."""
  options, rollout = config.strategy, config.rollout
  keys = ["ratio", "clip", "aggregate", "baseline", "scale", "kl_coef", "entropy_coef"]
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
  _fill(config, "strategy", dict(temperature=rollout.temperature))
  if rollout.num_prompts > 0 and options.temperature != rollout.temperature:
    raise ConfigError(
        f"strategy.temperature is {options.temperature}, but rollout.temperature is {rollout.temperature}: the "
        "log-probs of what was sampled would be those of another distribution. Leave strategy.temperature out.")
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
