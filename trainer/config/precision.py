"""Checks of the config section `precision`: values, and combinations that cannot work or would do nothing."""

from collections.abc import Mapping
from typing import Any

from trainer.errors import ConfigError

ALLOWED = {
    "params": ("float32", "bfloat16"),
    "frozen": ("auto", "float32", "bfloat16", "int8", "nf4"),
    "compute": ("auto", "float32", "bfloat16"),
    "moments": ("float32", "bfloat16", "int8"),
    "second_moments": (None, "float32", "bfloat16", "int8"),
    "matmul": ("none", "int8", "fp8"),
    "matmul_gradients": ("none", "inputs", "all"),
}
# Below it, most updates of a bfloat16 parameter are less than half of the distance to the next number.
SMALL_LEARNING_RATE = 1e-4


def check_precision(config: Mapping[str, Any]) -> None:
  """Refuses what cannot work, whatever the machine. Raises ConfigError."""
  p, o = config["precision"], config["optimizer"]
  for key, allowed in ALLOWED.items():
    if p[key] not in allowed:
      raise ConfigError(f"precision.{key} is {p[key]!r}; allowed: {', '.join(str(value) for value in allowed)}.")
  if p.params == "bfloat16" and o.learning_rate < SMALL_LEARNING_RATE and not p.stochastic_rounding:
    raise ConfigError(
        f"precision.params is bfloat16 with a learning rate of {o.learning_rate}: most updates would be "
        "lost to rounding (bfloat16 keeps 8 bits). Use --config.precision.params=float32, or "
        "--config.precision.stochastic_rounding=True, which loses none on average.")
  if p.stochastic_rounding and p.params != "bfloat16":
    raise ConfigError(f"precision.stochastic_rounding is for parameters in bfloat16, and precision.params is {p.params}"
                      ": there is nothing to round. (Moments are always rounded so.) Leave it out, or use "
                      "--config.precision.params=bfloat16.")
  _check_moments(p, o.name)
  if p.matmul == "none":
    for key, default in (("matmul_gradients", "inputs"), ("matmul_skip", ())):
      if p[key] != default:
        raise ConfigError(f"precision.{key} is {p[key]!r}, but precision.matmul is none, so that nothing uses it. Use "
                          "--config.precision.matmul=int8, or leave it out.")
  elif p.frozen in ("int8", "nf4"):
    raise ConfigError(f"precision.matmul is {p.matmul} and precision.frozen is {p.frozen}: kernels that are kept in 8 "
                      "or 4 bits would be rounded twice. Use --config.precision.frozen=bfloat16 or "
                      "--config.precision.matmul=none.")


def _check_moments(p: Any, optimizer: str) -> None:
  second = p.second_moments
  if optimizer == "adafactor" and (p.moments != "float32" or second not in (None, "float32")):
    raise ConfigError("precision.moments: adafactor keeps means of rows and columns, in float32 alone; they are small. "
                      "Leave it out, or use --config.optimizer.name=adamw, whose moments can be int8.")
  if optimizer in ("lion", "sgd") and second is not None:
    raise ConfigError(f"precision.second_moments is {second}, but {optimizer} has no second moments. Leave it out; "
                      "precision.moments is for its first moments.")
