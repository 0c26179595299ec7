"""What a strategy is made of, as a user gives one by its dotted path: `strategy.name = "my_project.losses.MINE"`."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.config import ConfigError, load_object
from trainer.strategy_kinds import DATA, WITH_PARTS

# Of what strategies learn from, what the user's own may have: rollouts read options of grpo, its baseline and scale.
OWN_DATA = ("texts", "conversations", "pairs", "labelled")
_VALUES = (bool, int, float, str, tuple, dict)


@dataclass(frozen=True)
class Strategy:
  """An objective, and what the rest of a run has to know of it.

  Attributes:
    loss: `(model, params, batch, rng, cfg) -> (terms, metrics)`, with one more argument `reference=None` where it needs
      one; see trainer/strategies/__init__.py.
    options: its keys of `config.strategy` with their defaults; a type stands for "no value yet".
    data: what it learns from, of `DATA`.
    needs_reference: whether it compares the policy with a reference, or a function of its options that says so. It then
      has the options `reference`, `reference_ema`, `reference_ema_steps` and, of documents with parts, `precompute`.
    check: `(cfg, grad_accum_steps, cfg_model)`, raises ConfigError for options that cannot work, before any device
      work.
  """

  loss: Callable[..., tuple[dict[str, Any], dict[str, Any]]]
  options: Mapping[str, Any] = field(default_factory=dict)
  data: str = "texts"
  needs_reference: bool | Callable[[Any], bool] = False
  check: Callable[[Any, int, Any], None] | None = None


def load(name: str) -> Strategy:
  """The user's own strategy of that dotted path: a `Strategy`, or a loss of texts without options.

  Raises:
    ConfigError: there is none, or it cannot be one.
  """
  found = load_object(name, "strategy.name", f"{', '.join(DATA.values())}, or the dotted path of a strategy of yours")
  where = f"strategy.name is {name!r}"
  made = found if isinstance(found, Strategy) else Strategy(found)
  if isinstance(found, type) or not callable(made.loss):
    what = "a class" if isinstance(found, type) else f"of type {type(found).__name__}"
    what = "a Strategy whose loss is no function" if isinstance(found, Strategy) else what
    raise ConfigError(f"{where}, which is {what}. A strategy is a trainer.strategies.Strategy(loss, options, …), or a "
                      "function loss(model, params, batch, rng, cfg) -> (terms, metrics) (docs/extending.md).")
  if made.data not in OWN_DATA:
    raise ConfigError(f"{where}, a Strategy with data={made.data!r}; allowed: {', '.join(map(repr, OWN_DATA))}.")
  _check_call(made, where)
  _check_options(made, where)
  return made


def _check_call(made: Strategy, where: str) -> None:
  """Refuses a loss that cannot be called as a run does."""
  calls: list[tuple[str, ...]] = [("model", "params", "batch", "rng", "cfg")]
  if made.needs_reference is not False:
    calls.append((*calls[0], "reference"))  # with precompute, batches have what it says, and it is not there
  for call in calls:
    try:
      inspect.signature(made.loss).bind(*call)
    except TypeError as e:
      optional = ", reference=None" if len(calls) > 1 else ""
      raise ConfigError(f"{where}, whose loss is called as loss({', '.join(call)}), which it does not take: {e}. "
                        f"Define it as loss({', '.join(calls[0])}{optional}).") from e
    except ValueError:  # written in C without a signature
      return


def _check_options(made: Strategy, where: str) -> None:
  """Refuses options that cannot stand in a config."""
  if not isinstance(made.options, Mapping):
    raise ConfigError(f"{where}, whose options are {made.options!r:.80}; they are a dict of names and defaults, such "
                      "as dict(beta=0.1).")
  for key, value in made.options.items():
    if not isinstance(key, str) or not key.isidentifier() or key == "name":
      raise ConfigError(f"{where}, which has an option {key!r:.80}; options have names such as beta, and not `name`.")
    if not isinstance(value, _VALUES) and value not in _VALUES:
      kinds = ", ".join(kind.__name__ for kind in _VALUES)
      raise ConfigError(f"{where}, whose option {key} is {value!r:.80} by default; it may be of type {kinds}, or one "
                        f"of these types itself, which stands for no value yet: options=dict({key}=float).")


def all_options(made: Strategy) -> dict[str, Any]:
  """Its options with those that come with a reference."""
  if made.needs_reference is False:
    return dict(made.options)
  precompute = {"precompute": False} if made.data in WITH_PARTS else {}
  return {"reference": "start", **precompute, "reference_ema": 0.0, "reference_ema_steps": 512, **made.options}
