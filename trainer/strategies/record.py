"""What a strategy is: one record, which says what the rest of a run has to know of it. The built-in ones stand at the
end of their files, a user's own wherever its dotted path leads: `strategy.name = "my_project.losses.MINE"`."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from input_pipeline.examples.kinds import WITH_PARTS
from input_pipeline.examples.top_k import ROWS
from models.spec_head import HEADS
from trainer.dotted import load_object
from trainer.errors import ConfigError

# What a strategy can learn from.
DATA = ("texts", "conversations", "pairs", "labelled", "rollouts", "matches")
# Of these, what completions that are sampled and rewarded can be made into (trainer/rollouts/groups.py).
SAMPLED = ("rollouts", "pairs")
# What batches of a rollout can hold for each completion ("advantages") or each of its tokens.
ROLLOUT_KEYS = ("advantages", "behavior_logprobs", "old_logprobs", "old_values", "returns", "token_advantages")
# Of these, what a critic's values make of rewards (trainer/rollouts/returns.py).
OF_CRITIC = ("old_values", "returns", "token_advantages")
# What the progress line shows of a rollout: its loss says little, and is 0 of a policy that has not moved.
OF_COMPLETIONS = {"reward": "reward {:.3f}", "completions/mean_length": "length {:.0f}"}
# Where completions of a prompt are compared, and equal rewards teach nothing.
OF_ROLLOUTS = {**OF_COMPLETIONS, "frac_reward_zero_std": "taught nothing {:.0%}"}
HEADLINE = {**OF_ROLLOUTS, "loss": "loss {:.3f}"}
_VALUES = (bool, int, float, str, tuple, dict)


@dataclass(frozen=True)
class Strategy:
  """An objective, and what the rest of a run has to know of it; `cfg` is always `config.strategy`.

  Attributes:
    loss: `(model, params, batch, rng, cfg) -> (terms, metrics)`, with one more argument `reference=None` where it needs
      one; see trainer/strategies/__init__.py.
    options: its keys of `config.strategy` with their defaults; a type stands for "no value yet".
    data: what it learns from, of `DATA`.
    graded: of pairs: whether each comes with its margin, `advantages` [B, S] of the chosen side.
    head: the value of `model.head` that its loss is for: it reads logits of tokens (lm), scores of sequences, or
      embeddings.
    mismatched: of labelled completions: whether each comes with that of another prompt, or a function of `cfg` that
      says so.
    rollout_keys: of rollouts: which of ROLLOUT_KEYS its loss wants in a batch.
    rewarded: of rollouts: whether it learns from rewards. One that does not trains on every completion, whatever its
      `data`, with `loss_weights` of 1 where a token was sampled; rewards are then only reported.
    needs_reference: whether it compares the policy with a reference, or a function of `cfg` that says so. It then
      has the options `reference`, `reference_ema`, `reference_ema_steps` and, of documents with parts, `precompute`
      (not with a critic, which learns from what is sampled alone).
    teacher: it learns from another model, its option `teacher`, whose parameters are `reference["teacher"]` of the loss
      (trainer/strategies/teacher.py).
    critic: of rollouts: it trains a critic beside the policy, its option `critic`; the model of its loss is an
      `ActorCritic` (trainer/strategies/critic.py), and its batches can hold what is made of values. Each completion
      then counts by itself, with no group to be compared with. It has the options that trainer/rollouts/returns.py
      reads.
    fill_in: `(config) -> lines for the log`: gives options without a value the one that follows from others.
    whole: `(model, params, batch, cfg, in_micro_batches) -> {name: arrays [B, …]}`, of a loss that compares the rows of
      a batch: what each of several micro-batches is told of the whole, as its `whole`. `in_micro_batches(fn)` gives
      what `fn(micro-batch, rng)` makes of the rows, with the random key that the loss is given for each.
    check: `(cfg, grad_accum_steps, cfg_model)`, raises ConfigError for options that cannot work, before any device
      work.
    no_sums: `(cfg) -> names` of terms and metrics that are no sums over examples, which no evaluation can show.
    at_reference: `(cfg) -> {metric: its value}` where policy and reference are the same, for `--mode=verify`.
    token_numbers: `(batch, logprobs, cfg) -> {name: [B, T]}`: more to see of each token (trainer/modes/microscope.py).
    headline: {metric: how its value is shown} on the progress line, in this order; those that a step does not have are
      left out. Default: a rollout's mean reward, length of completions and share of groups whose rewards are all
      equal, and the loss.
  """

  loss: Callable[..., tuple[dict[str, Any], dict[str, Any]]]
  options: Mapping[str, Any] = field(default_factory=dict)
  data: str = "texts"
  graded: bool = False
  head: str = "lm"
  mismatched: bool | Callable[[Any], bool] = False
  rollout_keys: tuple[str, ...] = ("advantages",)
  rewarded: bool = True
  needs_reference: bool | Callable[[Any], bool] = False
  teacher: bool = False
  critic: bool = False
  fill_in: Callable[[Any], list[str]] | None = None
  whole: Callable[..., dict[str, Any]] | None = None
  check: Callable[[Any, int, Any], None] | None = None
  no_sums: Callable[[Any], frozenset[str]] | None = None
  at_reference: Callable[[Any], Mapping[str, float]] | None = None
  token_numbers: Callable[[Mapping[str, Any], Any, Any], dict[str, Any]] | None = None
  headline: Mapping[str, str] = field(default_factory=lambda: HEADLINE)

  def shown(self, metrics: Mapping[str, float]) -> list[str]:
    """What the progress line says of a step's metrics; of those without any of its headline, the loss."""
    headline = self.headline if any(name in metrics for name in self.headline) else HEADLINE
    return [text.format(metrics[name]) for name, text in headline.items() if name in metrics]

  @property
  def takes_rollouts(self) -> bool:
    """Whether it can learn from completions that are sampled."""
    return (self.data in SAMPLED or not self.rewarded) and self.head == "lm"

  @property
  def takes_preferences(self) -> bool:
    """Whether its data say which completions are better, so that its loss can be evaluated as a preference."""
    return self.data in ("pairs", "labelled")

  def sequences_each(self, cfg: Any) -> int:
    """How many sequences of a row belong together: the two of a pair, a query with its positive and negatives."""
    return 2 + cfg.negatives if self.data == "matches" else 2 if self.data == "pairs" else 1

  def learns(self, cfg: Any) -> str:
    """What it learns from as the input pipeline has it, of `input_pipeline.examples.kinds.KINDS`."""
    if self.teacher and cfg.teacher == ROWS:
      return "taught"
    if self.teacher and cfg.get("teacher_key"):
      return "routed"
    return "mismatched" if _asked(self.mismatched, cfg) else "graded" if self.graded else self.data

  def shares_prompts(self, cfg: Any) -> bool:
    """Whether sequences that come with the data have a prompt in common."""
    return self.learns(cfg) in ("pairs", "graded", "mismatched")

  def has_reference(self, cfg: Any) -> bool:
    """Whether it compares the policy with a reference."""
    return _asked(self.needs_reference, cfg)

  def keys(self, steps: int) -> tuple[str, ...]:
    """What batches of a rollout of so many steps hold besides the tokens. In the first step the policy is still
    the one whose log-probs `old_logprobs` are."""
    held = self.rollout_keys if self.data == "rollouts" else ()
    return tuple(key for key in held if not (steps == 1 and key == "old_logprobs"))

  def all_options(self) -> dict[str, Any]:
    """Its options with those that come with a reference."""
    if self.needs_reference is False:
      return dict(self.options)
    precompute = {"precompute": False} if self.data in WITH_PARTS and not self.critic else {}
    return {"reference": "start", **precompute, "reference_ema": 0.0, "reference_ema_steps": 512, **self.options}


@dataclass(frozen=True)
class Objective:
  """A loss bound to its model and options, with what its micro-batches are told of the whole batch (`Strategy.whole`):
  `(params, batch, in_micro_batches) -> {name: arrays [B, …]}`."""

  loss: Callable
  whole: Callable

  def __call__(self, *args: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return self.loss(*args)


def _asked(answer: bool | Callable[[Any], bool], cfg: Any) -> bool:
  return bool(answer(cfg)) if callable(answer) else answer


def load(name: str, built_in: Iterable[str]) -> Strategy:
  """The user's own strategy of that dotted path: a `Strategy`, or a loss of texts without options.

  Raises:
    ConfigError: there is none, or it cannot be one.
  """
  found = load_object(name, "strategy.name", f"{', '.join(built_in)}, or the dotted path of a strategy of yours")
  where = f"strategy.name is {name!r}"
  made = found if isinstance(found, Strategy) else Strategy(found)
  if isinstance(found, type) or not callable(made.loss):
    what = "a class" if isinstance(found, type) else f"of type {type(found).__name__}"
    what = "a Strategy whose loss is no function" if isinstance(found, Strategy) else what
    raise ConfigError(f"{where}, which is {what}. A strategy is a trainer.strategies.Strategy(loss, options, …), or a "
                      "function loss(model, params, batch, rng, cfg) -> (terms, metrics) (docs/extending.md).")
  if made.data not in DATA:
    raise ConfigError(f"{where}, a Strategy with data={made.data!r}; allowed: {', '.join(map(repr, DATA))}.")
  if made.mismatched is not False and made.data != "labelled":
    raise ConfigError(f"{where}, a Strategy with mismatched={made.mismatched!r} and data={made.data!r}; completions of "
                      "other prompts come with data='labelled' alone.")
  if made.graded and made.data != "pairs" or made.head not in HEADS:
    raise ConfigError(f"{where}, a Strategy with graded={made.graded!r}, data={made.data!r} and head={made.head!r}; "
                      f"margins come with data='pairs' alone, and heads are {', '.join(HEADS)}.")
  if invalid := [key for key in made.rollout_keys if key not in ROLLOUT_KEYS]:
    raise ConfigError(f"{where}, a Strategy whose rollout_keys have {invalid[0]!r}; allowed: "
                      f"{', '.join(ROLLOUT_KEYS)}.")
  if not made.critic and (alone := [key for key in made.rollout_keys if key in OF_CRITIC]):
    raise ConfigError(f"{where}, a Strategy whose rollout_keys have {alone[0]!r}, which a critic's values make: that "
                      "needs critic=True.")
  for metric, text in made.headline.items():
    try:
      str(text).format(0.0)
    except (ValueError, LookupError, TypeError) as e:
      raise ConfigError(f"{where}, a Strategy whose headline shows {metric!r} as {text!r}, which is no format of a "
                        f"number ({e}). Write for instance '{metric} {{:.3f}}'.") from e
  _check_call(made, where)
  _check_options(made, where)
  return made


def _check_call(made: Strategy, where: str) -> None:
  """Refuses a loss that cannot be called as a run does."""
  calls: list[tuple[str, ...]] = [("model", "params", "batch", "rng", "cfg")]
  if made.teacher or made.needs_reference is not False:
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
