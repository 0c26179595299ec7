"""What no value of a config may be, whatever its key: numbers that are none, names that are paths, sizes without sense.

What a value may be for one key alone is checked where it is used.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from trainer.errors import ConfigError

# Names become parts of metrics, files and keys on the command line.
NAME, LONGEST_NAME = re.compile(r"\w[\w-]*"), 64
INT32, INT64 = 2**31 - 1, 2**63 - 1
# (keys, least value, greatest value); those that are unset are left out. What is counted on devices is an int32.
RANGES = (
    (("batch_size", "seq_len", "total_steps", "model.hidden_size", "model.intermediate_size", "model.num_heads",
      "model.vocab_size", "model.vocab_multiple", "model.vocab_chunk", "model.head_dim", "model.moe.num_experts",
      "model.moe.expert_size", "model.vision.image_size", "model.vision.hidden_size", "tokenizer.vocab_size",
      "rollout.max_new_tokens", "rollout.num_prompts", "rollout.batch_size"), -INT32, INT32),
    (("model.num_layers", "model.vision.num_layers"), -INT32, 10_000),
    (("input.prefetch", "input.workers", "input.images.workers", "rollout.reward_workers",
      "rollout.environment_workers"), -INT32, 1024),
    (("optimizer.b1", "optimizer.b2", "optimizer.momentum"), 0.0, math.nextafter(1.0, 0.0)),
    (("optimizer.eps", "optimizer.weight_decay", "optimizer.decay_exponent", "model.norm_eps", "model.vision.norm_eps"),
     0.0, math.inf),
    (("model.init_std", "model.attention_scale", "model.embedding_scale", "model.residual_scale", "model.logit_scale",
      "schedule.timescale", "tokenizer.train_megabytes"),
     math.nextafter(0.0, 1.0), math.inf),
    (("optimizer.muon_steps", "optimizer.min_dim_size_to_factor"), 1, INT32),
)


def invalid(value: Any) -> str | None:
  """What a value must be, if no key can have this one; None: some key can."""
  if isinstance(value, bool) or value is None:
    return None
  if isinstance(value, int) and abs(value) > INT64:
    return "a number of at most 64 bits"
  if isinstance(value, float) and not math.isfinite(value):
    return "a finite number"
  if isinstance(value, str) and "\0" in value:
    return "a string without NUL characters"
  parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
  return next((f"{must_be.removesuffix(' throughout')} throughout" for must_be in map(invalid, parts) if must_be), None)


def invalid_name(name: Any) -> str | None:
  """What a name that the user chooses must be, if it is not; None: it is."""
  if isinstance(name, str) and NAME.fullmatch(name) and len(name) <= LONGEST_NAME:
    return None
  return f"letters, digits, _ and -, at most {LONGEST_NAME} of them"


def check_ranges(config: Mapping[str, Any]) -> None:
  """Refuses numbers beyond RANGES. Raises ConfigError."""
  for keys, low, high in RANGES:
    for key in keys:
      value: Any = config
      for part in key.split("."):
        value = value[part]
      if value is not None and not low <= value <= high:
        raise ConfigError(f"{key} is {value}; allowed: {_shown(low, high)}.")


def _shown(low: float, high: float) -> str:
  if isinstance(high, int):
    return f"at most {high:,}" if low == -INT32 else f"{low} to {high:,}"
  least = "above 0" if low > 0 else "from 0 on"
  return least if high == math.inf else f"{least} and below 1"
