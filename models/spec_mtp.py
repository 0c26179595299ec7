"""How many modules predict tokens further ahead (`model.mtp_layers`, models/mtp.py): checked."""

from collections.abc import Sequence

from ml_collections import ConfigDict

from models.spec_checks import TOKENWISE
from trainer.errors import ConfigError

# Types of layers whose form the modules' blocks can have.
KINDS = ("global", "local", "nope")


def model_layer(pattern: Sequence[str], num_layers: int) -> int | None:
  """The layer whose form the modules' blocks have: the last of KINDS; None: there is none."""
  return max((i for i in range(num_layers) if pattern[i % len(pattern)] in KINDS), default=None)


def make_mtp_layers(m: ConfigDict, pattern: tuple[str, ...]) -> int:
  """`model.mtp_layers`, where the model is one that they are defined for; raises ConfigError."""
  if m.mtp_layers < 0:
    raise ConfigError(f"model.mtp_layers: found {m.mtp_layers}, allowed: 0 or more.")
  if not m.mtp_layers:
    return 0
  others = {
      "model.head": "there are no tokens to predict" if m.head != "lm" else "",
      "model.lora.rank": "adapters train no modules: merge them first" if m.lora.rank else "",
      "model.vision.tower": "it is not defined for models of images" if m.vision.tower != "none" else "",
      "model.layer_pattern": f"no layer is {', '.join(KINDS[:-1])} or {KINDS[-1]}, whose form they would have"
                             if model_layer(pattern, m.num_layers) is None or set(TOKENWISE) & set(pattern) else "",
      "model.kv_shared_layers": "the last layer has no keys and values of its own" if m.kv_shared_layers else "",
      "model.per_layer_size": "there are no embeddings for further layers" if m.per_layer_size else "",
      "model.altup.num_inputs": "it is not defined for several streams" if m.altup.num_inputs else "",
      "model.mup_base_size": "no rule of muP is known for it" if m.mup_base_size is not None else "",
  }
  for key, why in others.items():
    if why:
      raise ConfigError(f"model.mtp_layers is {m.mtp_layers}, which does not go with this {key}: {why}. Use "
                        "--config.model.mtp_layers=0.")
  return m.mtp_layers
