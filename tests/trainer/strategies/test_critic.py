"""A policy with its critic, by two models that only say what they were asked; what cannot be one; what it begins as."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from trainer.config import defaults, strategy
from trainer.errors import ConfigError
from trainer.strategies import critic


class Said:
  """A model whose methods return what they were asked."""

  num_labels = 1

  def __init__(self, name, trained_only=None, reasons=(), **more):
    self.name, self.trained_only, self.reasons = name, trained_only, reasons
    self.__dict__.update(more)

  def abstract_params(self):
    return {f"of {self.name}": 1}

  def init(self, rng):
    return {f"of {self.name}": rng}

  def flops_per_token(self, seq_len, *given, factor=1):
    return factor * seq_len + sum(given)

  def _said(self, *given, **named):
    return (self.name, given, named)

  apply = unembedding = unembed = logits = layer_inputs = extend = decoding_params = own = _said


BOTH = critic.ActorCritic(Said("policy"), Said("critic"))
PARAMS = {"a": 1, "b": 2, "critic": {"c": 3}}
POLICYS = {"a": 1, "b": 2}


@pytest.mark.parametrize("method, given, named", [
    ("apply", ("batch",), dict(rng=None, train=True)), ("unembedding", (), {}), ("unembed", ("hidden",), {}),
    ("logits", ("batch", "more"), dict(rng=4)), ("layer_inputs", ("batch",), {}),
    ("extend", ("cache", "tokens"), dict(at=3)), ("decoding_params", (), {})])
def test_what_is_asked_of_the_policy_gets_its_parameters_alone(method, given, named):
  assert getattr(BOTH, method)(PARAMS, *given, **named) == ("policy", (POLICYS, *given), named)


def test_parameters_and_costs_are_of_both():
  assert BOTH.abstract_params() == {"of policy": 1, "critic": {"of critic": 1}}
  assert BOTH.init("key") == {"of policy": "key", "critic": {"of critic": "key"}}
  assert BOTH.flops_per_token(7, 1, factor=2) == 2 * (14 + 1)
  assert BOTH.own(1) == ("policy", (1,), {}) and BOTH.name == "policy"
  with pytest.raises(AttributeError):
    BOTH.nothing  # noqa: B018
  assert critic.policy_params(PARAMS) == POLICYS and critic.policy_params(POLICYS) == POLICYS
  assert critic.policy_of(BOTH).name == "policy" and critic.policy_of(7) == 7


@pytest.mark.parametrize("of_policy, of_critic, only", [
    (None, "x", None), ("lora_[ab]$", None, "lora_[ab]$|^critic/"), ("lora_[ab]$", "lora_[ab]$",
                                                                     "lora_[ab]$|^critic/score/")])
def test_what_of_both_is_trained(of_policy, of_critic, only):
  assert critic.ActorCritic(Said("p", of_policy), Said("c", of_critic)).trained_only == only


def test_reasons_of_either_are_told_once():
  both = critic.ActorCritic(Said("p", reasons=["slow", "dense"], no_prefix_sharing=None, no_split_length="windows"),
                            Said("c", reasons=["dense", "wide"], no_prefix_sharing="mixes", no_split_length="other"))
  assert both.reasons == ["slow", "dense", "critic: wide"]
  assert (both.no_prefix_sharing, both.no_split_length) == ("mixes", "windows")
  assert BOTH.no_prefix_sharing == "it has no attribute no_prefix_sharing" and BOTH.no_split_length is None


def test_a_value_is_the_score_of_the_state_before_its_token():
  class Scores(Said):
    def apply(self, params, batch, rng=None, train=False):
      assert "sampled_experts" not in batch and params == {"c": 3} and train == (rng is not None)
      return SimpleNamespace(hidden=jnp.array([[[1.0], [2.0], [3.0], [4.0]]]))

    def score(self, params, hidden):
      return 10 * hidden

  both = critic.ActorCritic(Said("policy"), Scores("critic"))
  batch = {"loss_weights": np.array([[1.0, 0.0, 1.0, 0.5]]), "sampled_experts": 1}
  for rng in (None, "key"):
    values, out = both.values(PARAMS, batch, rng)
    assert values.tolist() == [[0, 0, 20, 30]] and out.hidden.shape == (1, 4, 1)


def config_of(path="start", **model):
  c = defaults()
  c.strategy = strategy("ppo", critic=path)
  c.model.update(model)
  return c


@pytest.fixture
def found(monkeypatch):
  """What is asked for: the sources that are looked up, and the models that are made, with `labels` scores."""
  asked = SimpleNamespace(paths=[], made=[], labels=1, head="score")

  def find(path, key):
    asked.paths.append((path, key))
    section = defaults().model
    section.update(head=asked.head, num_labels=asked.labels, name="theirs")
    return SimpleNamespace(section=section, vocab_size=99)

  def make_model(section, **options):
    asked.made.append((section, options))
    return Said("critic", num_labels=asked.labels)

  monkeypatch.setattr(critic.teacher, "find", find)
  monkeypatch.setattr(critic.api, "make_model", make_model)
  return asked


def test_a_critic_is_made_as_its_source_says(found):
  c = config_of(num_layers=5, head="lm")
  both = critic.beside(Said("policy"), c, vocab_size=40, frozen="x", params_dtype="float32")
  (section, options), = found.made
  assert (both.critic.name, section.num_layers, section.head, section.num_labels) == ("critic", 5, "score", 1)
  assert options == dict(vocab_size=40, frozen="x", params_dtype="float32") and c.model.head == "lm"
  critic.beside(Said("policy"), config_of("a/run"), vocab_size=40, frozen="x", params_dtype="float32")
  section, options = found.made[1]
  assert options == dict(vocab_size=99, frozen=None, params_dtype="float32") and section.name == "theirs"
  assert set(found.paths) == {("a/run", "strategy.critic")}


def test_what_cannot_be_a_critic_is_refused(found):
  experts = config_of(moe=dict(num_experts=4, choice_bias_rate=0.1))
  with pytest.raises(ConfigError, match="^model.moe.choice_bias_rate is above 0, and the critic would have experts"):
    critic.beside(Said("policy"), experts)
  for harmless in (dict(num_experts=4, choice_bias_rate=0.0), dict(num_experts=0, choice_bias_rate=0.1)):
    critic.beside(Said("policy"), config_of(moe=harmless))
  taken = Said("policy")
  taken.abstract_params = lambda: {"critic": 1}
  with pytest.raises(ConfigError, match="^model.name is 'own', whose parameters have a part 'critic', where those of"):
    critic.beside(taken, config_of(name="own"))
  found.labels, found.head = 3, "lm"
  with pytest.raises(ConfigError, match="^strategy.critic is 'a/run', of the model 'theirs', which does not score "):
    critic.beside(Said("policy"), config_of("a/run"))
  found.head = "score"
  with pytest.raises(ConfigError, match="^strategy.critic is 'a/run', a model with 3 labels. Give one with a single"):
    critic.beside(Said("policy"), config_of("a/run"))


def test_tokens_are_compared_unless_it_begins_as_the_run(monkeypatch):
  asked = []
  monkeypatch.setattr(critic.teacher, "check", lambda *given: asked.append(given))
  critic.check(config_of(), "tokenizer")
  c = config_of("a/run")
  critic.check(c, "tokenizer")
  assert asked == [(c, "tokenizer", "a/run", "strategy.critic")]


@pytest.mark.parametrize("path, head, of_critic, message", [
    ("start", None, "fresh parameters", None), ("a/run", "score", "all of a/run", None),
    ("a/run", "lm", "9 arrays from a/run, 1 fresh arrays", None),  # its head is a new one
    ("a/run", "score", "9 arrays from a/run, 1 fresh arrays", "a/run does not have all of its model's parameters"),
    ("a/run", "score", "9 arrays from a/fresh arrays", None), ("a/run", "score", "fresh parameters", "a/run does not"),
    ("a/run", "lm", "fresh parameters", "a/run does not have all"),
])
def test_where_the_parameters_of_both_come_from(found, monkeypatch, path, head, of_critic, message):
  asked = []
  found.head = head
  origin = critic.init_from.Origin("p", (), (), "f", "adapters", False, 0, None, (), None, "section")

  def first_params(origin, model, target, partial):
    asked.append((origin, model.name, target, partial))
    return {"of": model.name}, "where p" if model.name == "policy" else of_critic

  monkeypatch.setattr(critic.init_from, "first_params", first_params)
  monkeypatch.setattr(critic.teacher, "origin_at", lambda origin, source, section: ("at", section.head))
  given = (config_of(path), origin, critic.ActorCritic(Said("policy"), Said("critic")))
  target = {"a": 1, "critic": {"c": 2}}
  if message:
    with pytest.raises(ConfigError, match=f"^strategy.critic: {message}"):
      critic.first_params(*given, target)
    return
  found_params, where = critic.first_params(*given, target, partial=True)
  assert found_params == {"of": "policy", "critic": {"of": "critic"}} and where == f"where p; critic: {of_critic}"
  (first, *of_policy), (source, *of_other) = asked
  assert first is origin and of_policy == ["policy", {"a": 1}, True] and of_other == ["critic", {"c": 2}, True]
  if path == "start":
    assert (source.path, source.peft, source.model.head) == ("p", None, "score")
  else:
    assert source == ("at", "score")
  # The critic alone, and the policy alone.
  assert critic.first_params(*given, {"critic": {"c": 2}}) == ({"critic": {"of": "critic"}}, f"critic: {of_critic}")
  assert critic.first_params(*given, {"a": 1}) == ({"of": "policy"}, "where p")
