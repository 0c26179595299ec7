"""What strategies learn from, by name: what the input pipeline asks of them; without JAX for those built in."""

from typing import Any

# What a strategy can learn from, each with the built-in one whose rows, batches and keys of the data are the same.
DATA = {"texts": "seq", "conversations": "sft", "pairs": "dpo", "labelled": "kto", "rollouts": "grpo"}
# Kinds whose documents have parts, which are kept whole.
WITH_PARTS = ("pairs", "labelled", "rollouts")
_KINDS = {name: data for data, name in DATA.items()}


def data(name: str) -> str:
  """What the strategy of that name learns from, of `DATA`.

  Raises:
    ConfigError: there is none.
  """
  if name in _KINDS:
    return _KINDS[name]
  from trainer.strategies import record  # imports JAX, and whatever the user's own file does

  return record.load(name).data


def has_parts(name: str) -> bool:
  """Whether its documents have parts: sides of a preference, or completions, that are kept whole."""
  return data(name) in WITH_PARTS


def wants_mismatched(cfg: Any) -> bool:
  """Whether labelled completions come with another example's for the same prompt, see strategies/kto.py."""
  return cfg.name == "kto" and cfg.loss == "kto"
