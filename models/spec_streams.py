"""What layers hand on beside hidden states, and how these join, of the config's `model` section: checked.

Keys and values of earlier layers, embeddings of each layer, the streams of AltUp, sparse MLPs.
"""

import dataclasses

from ml_collections import ConfigDict

from models.activations import GATED
from models.spec_checks import TOKENWISE
from trainer.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class AltUp:
  """The streams of hidden states; the keys of `model.altup`."""

  num_inputs: int
  coef_clip: float | None


def make_altup(m: ConfigDict) -> AltUp | None:
  """Reads `model.altup`; None: there is one stream."""
  N, clip = m.altup.num_inputs, m.altup.coef_clip
  if N < 0 or N == 1 or clip is not None and clip <= 0:
    raise ConfigError(f"model.altup: found num_inputs={N}, coef_clip={clip}; allowed: 0 (one stream alone), or 2 or "
                      "more; and a number above 0, or unset.")
  if N and (m.vision.tower != "none" or m.layer_scale):
    raise ConfigError(f"model.altup.num_inputs is {N}, which goes with neither layer_scale nor images; found "
                      f"layer_scale={m.layer_scale}, vision.tower={m.vision.tower!r}; allowed: False, 'none'.")
  for key, value in (("altup.num_inputs", N), ("laurel_rank", m.laurel_rank)):
    if value < 0 or value and (m.parallel_blocks or set(TOKENWISE) & set(m.layer_pattern)):
      raise ConfigError(f"model.{key}: found {value}; allowed: 0, or above it where each layer is attention and then "
                        f"an MLP: found parallel_blocks={m.parallel_blocks}, layer_pattern={tuple(m.layer_pattern)}.")
  return AltUp(N, clip) if N else None


def make_activation_sparsity(m: ConfigDict) -> tuple[float, ...]:
  """Reads `model.activation_sparsity`: of each layer, or () if it is 0 in all."""
  shares = tuple(m.activation_sparsity)
  if shares and len(shares) != m.num_layers or not all(0 <= share < 1 for share in shares):
    raise ConfigError(f"model.activation_sparsity: found {shares}, allowed: (), or for each of the {m.num_layers} "
                      "layers a number from 0 to below 1.")
  if not any(shares):
    return ()
  if m.activation not in GATED or m.moe.num_experts:
    raise ConfigError(f"model.activation_sparsity cuts the gates of MLPs, so it needs a gated activation "
                      f"({', '.join(GATED)}) and no experts; found activation={m.activation!r}, moe.num_experts="
                      f"{m.moe.num_experts}.")
  return shares


def make_per_layer_size(m: ConfigDict) -> int:
  """Reads `model.per_layer_size`, and checks `per_layer_vocab`."""
  entries = m.per_layer_vocab
  if entries is not None and (not m.per_layer_size or not 1 <= entries <= (m.vocab_size or entries)):
    raise ConfigError(f"model.per_layer_vocab: found {entries}, allowed: unset, or, where per_layer_size is above 0, 1 "
                      f"to vocab_size; found per_layer_size={m.per_layer_size}, vocab_size={m.vocab_size}.")
  if m.per_layer_size < 0 or m.per_layer_size and m.activation not in GATED:
    raise ConfigError(f"model.per_layer_size: found {m.per_layer_size}, allowed: 0, or above it with a gated "
                      f"activation ({', '.join(GATED)}); found {m.activation!r}.")
  return m.per_layer_size


def make_kv_shared_layers(m: ConfigDict, pattern: tuple[str, ...]) -> int:
  """Reads `model.kv_shared_layers`: how many of the last layers have no keys and values of their own."""
  count, layers_ = m.kv_shared_layers, m.num_layers
  if not 0 <= count < layers_ or count and m.latent.kv_rank:
    raise ConfigError(f"model.kv_shared_layers: found {count}, allowed: 0, or, without latent.kv_rank, up to "
                      f"{layers_ - 1}, so that a layer has keys and values.")
  kinds = [pattern[i % len(pattern)] for i in range(layers_)]
  alone = {"delta"} & set(kinds[layers_ - count:]) | set(kinds[layers_ - count:]) - set(kinds[:layers_ - count])
  if alone:
    raise ConfigError(f"model.kv_shared_layers: found {count}; among the last so many layers is one of type "
                      f"{min(alone)!r}, for which no earlier layer has keys and values.")
  if m.double_wide_mlp and not count:
    raise ConfigError("model.double_wide_mlp is set, but kv_shared_layers, whose MLPs it widens, is 0.")
  return count
