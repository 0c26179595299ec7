"""The critic of a policy (PPO): another model over the same tokens, which says of each place what reward is to come.

It is a model of its own with one score a token, beside the policy: `params["critic"]` of the training state. So it is
split over the mesh, optimized, averaged, stopped and continued as all parameters are, and rules over paths
(`optimizer.lr_mults`, `sharding_rules`) know it as `^critic/`; what reads a checkpoint for the policy leaves it out. It
shares nothing with the policy: a value loss through a common trunk would move the policy, and a reward model, from
which critics are best begun (`strategy.critic`), has a trunk of its own.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from models import api
from models.api import Output
from trainer.checkpoints import init_from
from trainer.errors import ConfigError
from trainer.strategies import sequences, teacher

KEY = "strategy.critic"
NAME = "critic"
# A critic that begins as a copy of the policy, but for the head.
START = "start"


def _of_policy(name: str) -> Any:
  """The method of the policy, of whose parameters the critic's are taken away."""

  def method(self: "ActorCritic", params: api.Params, *args: Any, **options: Any) -> Any:
    return getattr(self.policy, name)(policy_params(params), *args, **options)

  return method


class ActorCritic:
  """A policy with its critic, as a `Model` (models/api.py) and all that the policy is besides: only the parameters are
  of both, and what they cost."""

  def __init__(self, policy: Any, critic: Any):
    self.policy, self.critic = policy, critic
    only = policy.trained_only
    if only is not None:  # of a critic with adapters these and its head, another one whole
      only += f"|^{NAME}/" + ("" if critic.trained_only is None else "score/")
    self.trained_only = only
    self.reasons = [*policy.reasons, *(f"critic: {why}" for why in critic.reasons if why not in policy.reasons)]
    self.no_prefix_sharing = _either("no_prefix_sharing", "it has no attribute no_prefix_sharing", policy, critic)
    self.no_split_length = _either("no_split_length", None, policy, critic)

  def __getattr__(self, name: str) -> Any:
    # What needs no parameters, or those of `decoding_params`.
    if name.startswith("__") or "policy" not in self.__dict__:
      raise AttributeError(name)
    return getattr(self.policy, name)

  def abstract_params(self) -> api.Params:
    """See `models.api.Model`."""
    return {**self.policy.abstract_params(), NAME: self.critic.abstract_params()}

  def init(self, rng: jax.Array) -> api.Params:
    """See `models.api.Model`; the policy's are those that it would have alone."""
    return {**self.policy.init(rng), NAME: self.critic.init(rng)}

  # See `models.api.Model`, `models.api.Generative` and `models.transformer.Transformer`.
  apply = _of_policy("apply")
  unembedding = _of_policy("unembedding")
  unembed = _of_policy("unembed")
  logits = _of_policy("logits")
  layer_inputs = _of_policy("layer_inputs")
  extend = _of_policy("extend")
  decoding_params = _of_policy("decoding_params")

  def flops_per_token(self, seq_len: int, *args: Any, **kwargs: Any) -> float:
    """See `models.api.Model`: those of both."""
    return sum(model.flops_per_token(seq_len, *args, **kwargs) for model in (self.policy, self.critic))

  def values(self, params: api.Params, batch: dict, rng: jax.Array | None = None) -> tuple[jax.Array, Output]:
    """(what the critic expects before each token of a completion, [B, T] float32, 0 elsewhere; its `Output`).

    The value of token t is the score of the hidden state of the token before it: of the state in which t was chosen.
    """
    out = self.critic.apply(params[NAME], sequences.unrouted(batch), rng=rng, train=rng is not None)
    scores_BxT = self.critic.score(params[NAME], out.hidden)[..., 0]
    # As in `sequences.token_stats`: nothing outside completions may count, whatever its value.
    return jnp.where(sequences.completion_mask(batch) > 0, jnp.roll(scores_BxT, 1, axis=1), 0.0), out


def _either(name: str, missing: str | None, *models: Any) -> str | None:
  """The first reason that one of the models has."""
  return next((reason for model in models if (reason := getattr(model, name, missing)) is not None), None)


def policy_params(params: Mapping[str, Any]) -> dict[str, Any]:
  """The parameters without the critic's, whether or not there is one."""
  return {name: part for name, part in params.items() if name != NAME}


def policy_of(model: Any) -> Any:
  """The policy of a model that may have a critic."""
  return model.policy if isinstance(model, ActorCritic) else model


def beside(policy: Any, config: Any, **options: Any) -> ActorCritic:
  """The policy with the critic that `strategy.critic` names; `options` are those of `models.api.make_model` that both
  have.

  Raises:
    ConfigError: no such critic, or one that cannot be.
  """
  section, from_start = _section(config), config.strategy.critic == START
  if section.moe.num_experts and section.moe.choice_bias_rate:
    raise ConfigError("model.moe.choice_bias_rate is above 0, and the critic would have experts, too: their biases "
                      "follow the counts of one model alone. Use --config.model.moe.choice_bias_rate=0.")
  if not from_start:
    source = teacher.find(config.strategy.critic, KEY)
    # Trained whole, whatever the policy keeps frozen.
    options |= dict(vocab_size=source.vocab_size, frozen=None)
  if NAME in policy.abstract_params():
    raise ConfigError(f"model.name is {config.model.name!r}, whose parameters have a part {NAME!r}, where those of the "
                      "critic would be. Give that part another name.")
  critic = api.make_model(section, **options)
  if getattr(critic, "num_labels", 0) != 1:
    raise ConfigError(f"{KEY} is {config.strategy.critic!r}, of the model {section.name!r}, which does not score "
                      "(`Scoring` in models/api.py). Give another critic: a Hugging Face folder, or a run.")
  return ActorCritic(policy, critic)


def _section(config: Any) -> Any:
  """The `model` section of the critic: that of its source, with one score."""
  path = config.strategy.critic
  section = ConfigDict(config.model.to_dict()) if path == START else teacher.find(path, KEY).section
  if section.head == "score" and section.num_labels != 1:
    raise ConfigError(f"{KEY} is {path!r}, a model with {section.num_labels} labels. Give one with a single score, "
                      "such as a run of strategy reward, or one that predicts tokens, whose head is then a new one.")
  with section.unlocked():
    section.head, section.num_labels = "score", 1
  return section


def check(config: Any, tokenizer: Any) -> None:
  """Refuses a critic of other tokens than the policy's. Raises ConfigError, before any device work."""
  if config.strategy.critic != START:
    teacher.check(config, tokenizer, config.strategy.critic, KEY)


def first_params(config: Any, origin: init_from.Origin, model: Any, target: Any, *, partial: bool = False
                 ) -> tuple[Any, str]:
  """`init_from.first_params` of a model that may have a critic.

  Raises:
    ConfigError: see there; or the critic's source lacks more than the head.
  """
  params, where = {}, ""
  if wanted := policy_params(target):
    params, where = init_from.first_params(origin, policy_of(model), wanted, partial=partial)
  if NAME not in target or not isinstance(model, ActorCritic):
    return params, where
  path, held = config.strategy.critic, None
  if path == START:
    source = dataclasses.replace(origin, model=_section(config), peft=None)
  else:
    held = teacher.find(path, KEY)
    source = teacher.origin_at(origin, held, _section(config))
  params[NAME], found = init_from.first_params(source, model.critic, target[NAME], partial=partial)
  if held is not None and (init_from.has_fresh(found) if held.section.head == "score" else
                           found == init_from.ALL_FRESH):
    raise ConfigError(f"{KEY}: {path} does not have all of its model's parameters ({found}).")
  return params, f"{where}; critic: {found}" if where else f"critic: {found}"
