"""Training objectives. A strategy is one file with a pure `loss`, and one line in STRATEGIES; or the user's own, by its
dotted path (record.py).

    loss(model, params, batch, rng, cfg) -> (terms, metrics)

A term is a `Mean(sum, weight)`: a SUM with its WEIGHT, never a mean. The objective is the sum over the terms of
Σ sum / Σ weight, each Σ over every device and micro-batch of the optimizer step: the update divides once, each term by
its own total. A weight depends on the batch alone, not on the parameters. `metrics` maps a name to a `Mean`, or to
anything that adds up and has `to_floats` (trainer/metrics.py); sums and weights of shape [B] (one per row) are also
reported per data source, those of terms included. `model` is the seam of models/api.py, whose own `losses` and
`metrics` belong into the result; `cfg` is `config.strategy`.
"""

from collections.abc import Callable
from typing import Any

from trainer import config_sections
from trainer.strategies import dpo, grpo, kto, seq, sft
from trainer.strategies.record import Strategy, all_options, load
from trainer.strategy_kinds import DATA, WITH_PARTS, data, has_parts, wants_mismatched

__all__ = ["DATA", "STRATEGIES", "WITH_PARTS", "Loss", "Strategy", "check", "data", "find", "has_parts",
           "needs_reference", "options", "precomputes", "reference_mix", "temperature", "wants_mismatched"]

Loss = Callable[..., tuple[dict[str, Any], dict[str, Any]]]

# The options and defaults of each are in trainer/config_sections.py STRATEGIES.
STRATEGIES: dict[str, Loss] = {
    "seq": seq.loss, "sft": sft.loss, "dpo": dpo.loss, "kto": kto.loss, "grpo": grpo.loss}

# Which options need a reference policy (trainer/reference.py), given to their loss as one more argument.
_NEEDS_REFERENCE: dict[str, Callable[[Any], bool]] = {
    "dpo": dpo.needs_reference, "kto": kto.needs_reference, "grpo": grpo.needs_reference}

_CHECKS: dict[str, Callable[[Any, int, Any], None]] = {"dpo": dpo.check, "kto": kto.check, "grpo": grpo.check}


def find(name: str) -> Strategy:
  """The strategy of that name: a built-in one, or the user's own by its dotted path.

  Raises:
    ConfigError: there is none.
  """
  if name not in STRATEGIES:
    return load(name)
  return Strategy(STRATEGIES[name], config_sections.STRATEGIES[name], data(name), _NEEDS_REFERENCE.get(name, False),
                  _CHECKS.get(name))


def options(name: str) -> dict[str, Any]:
  """{option: default} of the user's own strategy of that dotted path."""
  return all_options(load(name))


def needs_reference(cfg: Any) -> bool:
  """Whether the strategy of `config.strategy` compares the policy with a reference."""
  needs = find(cfg.name).needs_reference
  return bool(needs(cfg)) if callable(needs) else needs


def precomputes(cfg: Any) -> bool:
  """Whether the reference's log-probs of all data are computed before the first step."""
  return needs_reference(cfg) and "precompute" in cfg and cfg.precompute


def reference_mix(cfg: Any) -> tuple[float, int]:
  """(share, every): how the reference moves towards the policy, see `reference.mix`; share 0: it does not."""
  return (cfg.reference_ema, cfg.reference_ema_steps) if needs_reference(cfg) else (0.0, 1)


def temperature(cfg: Any) -> float:
  """What divides the logits in the log-probs that the strategy compares."""
  return cfg.temperature if "temperature" in cfg else 1.0


def check(config: Any) -> None:
  """Refuses options that cannot work, before any device is touched.

  Raises:
    ConfigError: naming the key.
  """
  if (own_check := find(config.strategy.name).check) is not None:
    own_check(config.strategy, config.grad_accum_steps, config.model)
