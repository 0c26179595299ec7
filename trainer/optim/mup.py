"""Maximal update parametrisation: the learning rate found on a narrow model is the right one for a wide one (muP; Yang
et al. 2022, arXiv 2203.03466, table 8).

With `model.mup_base_size` = D₀, the hidden size at which rates were found, and m = D / D₀:

- matrices of the blocks have the rate divided by m (of Muon's, whose updates here have the same size of entries, but
  full rank: by √m), and their weight decay multiplied by it, so that rate × decay stays what it was;
- logits are multiplied by 1 / m (`model.logit_scale`);
- embeddings, the unembedding and vectors keep rate and initial size. Matrices begin with fan_in ** -0.5 anyway.

At D = D₀ nothing changes. Heads keep their size, so that the scale of attention scores stays: wider is more heads.
"""

from typing import Any

from trainer.errors import ConfigError

# Of what muP gives other rates.
HIDDEN = r"^blocks/.*kernel$"


def fill_in(config: Any) -> list[str]:
  """Sets `model.logit_scale` of the resolved config; returns sentences on what was set.

  Raises:
    ConfigError: what is scaled otherwise, or not known how.
  """
  m = config.model
  if m.mup_base_size is None:
    return []
  if m.mup_base_size < 1:
    raise ConfigError(f"model.mup_base_size is {m.mup_base_size}; it is a hidden size, at least 1.")
  others = [kind for kind in ("delta", "mamba", "mlp", "moe") if kind in m.layer_pattern]
  why = {
      "optimizer.name": ("sgd, whose steps follow the size of gradients: use adamw, lion, adafactor or muon"
                         if config.optimizer.name == "sgd" else ""),
      "model.hf": "a model that is there, with rates of its own" if m.hf is not None else "",
      "model.init_std": "one size for all matrices: leave it unset" if m.init_std is not None else "",
      "model.scale_embeddings": "a factor that grows with the width: use False" if m.scale_embeddings else "",
      "model.vision.tower": "a tower with a width of its own" if m.vision.tower != "none" else "",
      "model.head": "scores, whose matrix would need a rule of its own: use lm" if m.head != "lm" else "",
      "model.lora.rank": "adapters, for which it is not defined" if m.lora.rank else "",
      "model.per_layer_size": "embeddings for each layer, for which it is not defined" if m.per_layer_size else "",
      "model.altup.num_inputs": "several streams, for which it is not defined" if m.altup.num_inputs else "",
      "model.laurel_rank": "low-rank connections, for which it is not defined" if m.laurel_rank else "",
      "model.layer_pattern": f"{others[0]} layers, for which it is not defined" if others else "",
  }
  for key, problem in why.items():
    if problem:
      raise ConfigError(f"model.mup_base_size is {m.mup_base_size}, and {key} means {problem}. Or leave "
                        "model.mup_base_size out.")
  scale = m.mup_base_size / m.hidden_size
  if m.logit_scale not in (1.0, scale):
    raise ConfigError(f"model.logit_scale is {m.logit_scale}, and model.mup_base_size={m.mup_base_size} makes it "
                      f"{scale:g}. Leave one of them out.")
  with config.unlocked():
    m.logit_scale = scale
  return [f"model.logit_scale = {scale:g}: mup_base_size / hidden_size; matrices of the blocks learn at "
          f"{lr_mult(1 / scale, config.optimizer.name == 'muon'):g} of the rate"]


def width(model: Any) -> float:
  """m, of the config's `model` section; 1 without muP."""
  return 1.0 if model.mup_base_size is None else model.hidden_size / model.mup_base_size


def lr_mult(width: float, by_muon: bool) -> float:
  """What the rate of a hidden matrix is multiplied by."""
  return width**-0.5 if by_muon else 1 / width
