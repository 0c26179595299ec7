"""What a record says of a strategy, by hand; what of it cannot be is refused in test_own.py."""

from types import SimpleNamespace

import pytest

from trainer import strategies
from trainer.errors import ConfigError
from trainer.strategies import record
from trainer.strategies.record import Strategy


def loss(model, params, batch, rng, cfg, reference=None):
  pass


def cfg(**values):
  return SimpleNamespace(get=values.get, **values)


@pytest.mark.parametrize("made, given, learns, each, shares, takes", [
    (dict(), {}, "texts", 1, False, False), (dict(data="rollouts"), {}, "rollouts", 1, False, True),
    (dict(data="pairs"), {}, "pairs", 2, True, True), (dict(data="pairs", graded=True), {}, "graded", 2, True, True),
    (dict(data="pairs", head="score"), {}, "pairs", 2, True, False),
    (dict(data="labelled", mismatched=True), {}, "mismatched", 1, True, False),
    (dict(data="labelled", mismatched=lambda cfg: cfg.x > 1), dict(x=2), "mismatched", 1, True, False),
    (dict(data="labelled", mismatched=lambda cfg: cfg.x > 1), dict(x=1), "labelled", 1, False, False),
    (dict(data="matches"), dict(negatives=3), "matches", 5, False, False),
    (dict(data="conversations", teacher=True, rewarded=False), dict(teacher="rows"), "taught", 1, False, True),
    (dict(data="conversations", teacher=True), dict(teacher="a", teacher_key="k"), "routed", 1, False, False),
    (dict(data="conversations", teacher=True), dict(teacher="a"), "conversations", 1, False, False),
    (dict(data="conversations"), dict(teacher="rows", teacher_key="k"), "conversations", 1, False, False),
])
def test_what_it_learns_from(made, given, learns, each, shares, takes):
  made, given = Strategy(loss, **made), cfg(**given)
  assert (made.learns(given), made.sequences_each(given), made.shares_prompts(given), made.takes_rollouts) == (
      learns, each, shares, takes)
  assert made.takes_preferences == (made.data in ("pairs", "labelled"))


def test_old_log_probs_are_held_where_the_policy_will_have_moved():
  made = Strategy(loss, data="rollouts", rollout_keys=("advantages", "old_logprobs"))
  assert made.keys(1) == ("advantages",) and made.keys(2) == ("advantages", "old_logprobs")
  assert Strategy(loss, data="pairs").keys(2) == ()


MOVING = ("reference", "reference_ema", "reference_ema_steps")


@pytest.mark.parametrize("made, has, more", [
    (dict(), False, ()), (dict(needs_reference=True), True, MOVING),
    (dict(needs_reference=True, data="pairs"), True, ("precompute", *MOVING)),
    (dict(needs_reference=True, data="pairs", critic=True), True, MOVING),
    (dict(needs_reference=lambda cfg: cfg.beta > 0), False, MOVING),
])
def test_options_of_a_reference(made, has, more):
  made = Strategy(loss, options=dict(beta=0.0, reference="base"), **made)
  expected = dict(reference="start", precompute=False, reference_ema=0.0, reference_ema_steps=512)
  assert made.all_options() == {key: expected[key] for key in more} | dict(beta=0.0, reference="base")
  assert made.has_reference(cfg(beta=0.0)) is has and made.has_reference(cfg(beta=1.0)) is (has or bool(more))


def test_the_progress_line_says_the_headline_or_else_the_loss():
  made = Strategy(loss, headline={"b": "b {:.1f}", "a": "a {:.2f}"})
  assert made.shown({"a": 1.0, "b": 2.0, "loss": 3.0}) == ["b 2.0", "a 1.00"]
  assert made.shown({"a": 1.0}) == ["a 1.00"] and made.shown({"loss": 3.0}) == ["loss 3.000"]
  said = {"loss": 0.5, "frac_reward_zero_std": 0.25, "reward": 2.0, "completions/mean_length": 41.7}
  assert Strategy(loss).shown(said) == ["reward 2.000", "length 42", "taught nothing 25%", "loss 0.500"]


@pytest.mark.parametrize("key", record.OF_CRITIC)
def test_values_of_a_critic_need_one(monkeypatch, key):
  made = Strategy(loss, data="rollouts", rollout_keys=("advantages", key))
  monkeypatch.setattr(record, "load_object", lambda name, where, allowed: made)
  with pytest.raises(ConfigError, match=f"^strategy.name is 'a.b', a Strategy whose rollout_keys have '{key}', which a "
                                        "critic's values make: that needs critic=True.$"):
    record.load("a.b", ())
  made = Strategy(loss, data="rollouts", rollout_keys=("advantages", key), critic=True)
  assert record.load("a.b", ()) is made


def test_a_loss_whose_arguments_cannot_be_known_is_believed(monkeypatch):
  asked = []
  monkeypatch.setattr(record, "load_object", lambda *given: asked.append(given) or max)  # written in C
  assert record.load("a.b", ("seq", "sft")).loss is max
  assert asked == [("a.b", "strategy.name", "seq, sft, or the dotted path of a strategy of yours")]


def test_an_objective_is_called_as_its_loss():
  made = record.Objective(lambda *given: given, None)
  assert made(1, 2, 3) == (1, 2, 3)


class Given(SimpleNamespace):
  """`config.strategy`, of which it is asked what it has."""

  def __contains__(self, key):
    return hasattr(self, key)


@pytest.mark.parametrize("name, values, precomputes, mix", [
    ("dpo", dict(loss={"sigmoid": 1.0}, precompute=True, reference_ema=0.0), True, (0.0, 7)),
    ("dpo", dict(loss={"sigmoid": 1.0}, precompute=False, reference_ema=0.25), False, (0.25, 7)),
    # Which compares the policy with none.
    ("dpo", dict(loss={"simpo": 1.0}, precompute=True, reference_ema=0.25), False, (0.0, 1)),
    ("ppo", dict(kl_coef=0.1, reference_ema=0.5), False, (0.5, 7)), ("sft", {}, False, (0.0, 1)),
    ("distill", dict(cached_top_k=0), False, (0.0, 1)), ("distill", dict(cached_top_k=4), True, (0.0, 1))])
def test_what_is_computed_before_and_how_a_reference_moves(name, values, precomputes, mix):
  given = Given(name=name, reference_ema_steps=7, **values)
  assert strategies.precomputes(given) is precomputes and strategies.reference_mix(given) == mix
  assert strategies.temperature(given) == 1.0 and strategies.temperature(Given(name=name, temperature=0.5)) == 0.5


def test_a_strategy_is_told_of_micro_batches_and_of_the_model(monkeypatch):
  asked = []
  monkeypatch.setitem(strategies.STRATEGIES, "mine", Strategy(loss, check=lambda *given: asked.append(given)))
  config = SimpleNamespace(strategy=Given(name="mine"), grad_accum_steps=3, model=SimpleNamespace(
      head="lm", mtp_layers=0))
  strategies.check(config)
  assert asked == [(config.strategy, 3, config.model)]
  for key, value, message in (("head", "score", "model.head is 'score', but strategy 'mine' reads logits of tokens"),
                              ("mtp_layers", 1, "model.mtp_layers is 1, but strategy 'mine' does not")):
    config.model = SimpleNamespace(**{"head": "lm", "mtp_layers": 0, key: value})
    with pytest.raises(ConfigError, match=message):
      strategies.check(config)
  config.strategy.mtp_weight = 0.1
  strategies.check(config)
  assert len(asked) == 2
