"""Training objectives. A strategy is one file with a pure `loss` and, at its end, the record of what the rest of a run
has to know of it (record.py), which STRATEGIES names; a user's own is named by its dotted path.

    loss(model, params, batch, rng, cfg) -> (terms, metrics)

A term is a `Mean(sum, weight)`: a SUM with its WEIGHT, never a mean. The objective is the sum over the terms of
Σ sum / Σ weight, each Σ over every device and micro-batch of the optimizer step: the update divides once, each term by
its own total. A weight depends on the batch alone, not on the parameters. `metrics` maps a name to a `Mean`, or to
anything that adds up and has `to_floats` (trainer/metrics.py); sums and weights of shape [B] (one per row) are also
reported per data source, those of terms included.

Every loss is given `model`, a `Model` (models/api.py), whose own `losses` and `metrics` belong into the result;
`params`, a nested dict of arrays; `rng`, a key for dropout and noise, None: none (with the option `disable_dropout`
there is none in any case); `cfg`, `config.strategy`, with the options of its record; and, where it compares the policy
with one, `reference`, that one's parameters, not needed where the batch has `ref_logprobs`.

May import: trainer.checkpoints, trainer.distributed, input_pipeline, models.
"""

from typing import Any

from trainer.errors import ConfigError
from trainer.strategies import presets
from trainer.strategies.contrastive import CONTRASTIVE
from trainer.strategies.distill import DISTILL
from trainer.strategies.dpo import DPO
from trainer.strategies.grpo import GRPO
from trainer.strategies.kto import KTO
from trainer.strategies.ppo import PPO
from trainer.strategies.record import Objective, Strategy, load
from trainer.strategies.reward import REWARD
from trainer.strategies.seq import SEQ
from trainer.strategies.sft import SFT

__all__ = ["STRATEGIES", "Objective", "Strategy", "check", "fill_in", "find", "learns", "needs_reference", "of",
           "options", "precomputes", "reference_mix", "temperature"]

STRATEGIES: dict[str, Strategy] = {"seq": SEQ, "sft": SFT, "dpo": DPO, "kto": KTO, "grpo": GRPO, "ppo": PPO,
                                    "distill": DISTILL, "reward": REWARD, "contrastive": CONTRASTIVE}


_READ = {"lm": "logits of tokens", "score": "scores of sequences", "embedding": "embeddings of texts"}


def find(name: str) -> Strategy:
  """The strategy of that name: a built-in one, or the user's own by its dotted path.

  Raises:
    ConfigError: there is none.
  """
  if str(name) in STRATEGIES:
    return STRATEGIES[name]
  if "." not in str(name):
    raise ConfigError(f"strategy.name is {name!r}; known strategies: {', '.join(STRATEGIES)}, or the dotted path of "
                      "one of yours (docs/extending.md).")
  return load(name, STRATEGIES)


def of(config: Any) -> Strategy:
  """The strategy of a config."""
  return find(config.strategy.name)


def options(name: str) -> dict[str, Any]:
  """{option: default} of the strategy of that name; a type stands for "no value yet"."""
  return find(name).all_options()


def learns(config: Any) -> str:
  """What the config's strategy learns from, as the input pipeline is told it."""
  return of(config).learns(config.strategy)


def needs_reference(cfg: Any) -> bool:
  """Whether the strategy of `config.strategy` compares the policy with a reference."""
  return find(cfg.name).has_reference(cfg)


def precomputes(cfg: Any) -> bool:
  """Whether the log-probs of the reference, or of a teacher, of all data are computed before the first step."""
  if find(cfg.name).teacher:
    return "cached_top_k" in cfg and cfg.cached_top_k > 0
  return needs_reference(cfg) and "precompute" in cfg and cfg.precompute


def reference_mix(cfg: Any) -> tuple[float, int]:
  """(share, every): how the reference moves towards the policy, see `reference.mix`; share 0: it does not."""
  return (cfg.reference_ema, cfg.reference_ema_steps) if needs_reference(cfg) else (0.0, 1)


def temperature(cfg: Any) -> float:
  """What divides the logits in the log-probs that the strategy compares."""
  return cfg.temperature if "temperature" in cfg else 1.0


def fill_in(config: Any) -> list[str]:
  """Gives options without a value the one that follows from others: by the strategy's own `fill_in`, and `temperature`,
  which is that of rollouts; rollouts get a group size. Runs on the resolved config, before it is validated.

  Args:
    config: the resolved config, locked or not; changed in place.

  Returns:
    Lines for the log.

  Raises:
    ConfigError: see the strategy's; or log-probs at another temperature than that of the rollouts.
  """
  strategy, cfg, rollout = of(config), config.strategy, config.rollout
  lines = [] if strategy.fill_in is None else strategy.fill_in(config)
  with config.unlocked():
    for key, value in presets.ROLLOUT.items():
      if rollout.num_prompts > 0 and rollout[key] is None:
        rollout[key] = value
    if "temperature" in cfg and cfg.temperature is None:
      cfg.temperature = rollout.temperature
  if rollout.num_prompts > 0 and strategy.data == "rollouts" and (
      "temperature" in cfg and cfg.temperature != rollout.temperature):
    raise ConfigError(
        f"strategy.temperature is {cfg.temperature}, but rollout.temperature is {rollout.temperature}: the "
        "log-probs of what was sampled would be those of another distribution. Leave strategy.temperature out.")
  return lines


def check(config: Any) -> None:
  """Refuses options that cannot work, before any device is touched. Raises ConfigError."""
  if config.model.head != of(config).head:
    head = of(config).head
    raise ConfigError(f"model.head is {config.model.head!r}, but strategy {config.strategy.name!r} reads "
                      f"{_READ[head]}. Use --config.model.head={head}.")
  if config.model.mtp_layers and "mtp_weight" not in config.strategy:
    raise ConfigError(f"model.mtp_layers is {config.model.mtp_layers}, but strategy {config.strategy.name!r} does not "
                      "train what predicts tokens further ahead: seq and sft do. Use --config.model.mtp_layers=0, with "
                      "which a folder's are passed over.")
  if (own_check := of(config).check) is not None:
    own_check(config.strategy, config.grad_accum_steps, config.model)
