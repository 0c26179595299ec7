"""What a strategy's record says of it: for strategies of every kind, and those of one's own that cannot be."""

from types import SimpleNamespace

import pytest

from trainer.strategies.record import Strategy


def loss(model, params, batch, rng, cfg, reference=None):
  return {}, {}


class Options(SimpleNamespace):
  def get(self, name):
    return getattr(self, name, None)


@pytest.mark.parametrize("made, cfg, learns, shares, each", [
    (dict(), {}, "texts", False, 1), (dict(data="conversations"), {}, "conversations", False, 1),
    (dict(data="pairs"), {}, "pairs", True, 2), (dict(data="pairs", graded=True), {}, "graded", True, 2),
    (dict(data="labelled"), {}, "labelled", False, 1),
    (dict(data="labelled", mismatched=True), {}, "mismatched", True, 1),
    (dict(data="labelled", mismatched=lambda cfg: cfg.z), dict(z=0), "labelled", False, 1),
    (dict(data="labelled", mismatched=lambda cfg: cfg.z), dict(z=1), "mismatched", True, 1),
    (dict(data="rollouts"), {}, "rollouts", False, 1), (dict(data="matches"), dict(negatives=3), "matches", False, 5),
    (dict(data="conversations", teacher=True), dict(teacher="a"), "conversations", False, 1),
    (dict(data="conversations", teacher=True), dict(teacher="rows"), "taught", False, 1),
    (dict(data="conversations", teacher=True), dict(teacher="a", teacher_key="who"), "routed", False, 1),
    (dict(data="conversations"), dict(teacher="rows"), "conversations", False, 1)])
def test_what_is_learned_from_and_what_of_it_belongs_together(made, cfg, learns, shares, each):
  strategy = Strategy(loss, **made)
  cfg = Options(**cfg)
  assert (strategy.learns(cfg), strategy.shares_prompts(cfg), strategy.sequences_each(cfg)) == (learns, shares, each)


@pytest.mark.parametrize("made, sampled, preferred", [
    (dict(), False, False), (dict(rewarded=False), True, False), (dict(data="conversations"), False, False),
    (dict(data="conversations", rewarded=False), True, False), (dict(data="pairs"), True, True),
    (dict(data="rollouts"), True, False), (dict(data="rollouts", head="score"), False, False),
    (dict(data="labelled"), False, True), (dict(data="pairs", head="score"), False, True)])
def test_what_can_be_sampled_and_what_says_which_is_better(made, sampled, preferred):
  strategy = Strategy(loss, **made)
  assert (strategy.takes_rollouts, strategy.takes_preferences) == (sampled, preferred)


def test_batches_of_rollouts_hold_what_the_loss_wants():
  """The policy of a rollout of one step is that whose log-probs the old ones are."""
  keys = ("advantages", "behavior_logprobs", "old_logprobs")
  strategy = Strategy(loss, data="rollouts", rollout_keys=keys)
  assert strategy.keys(1) == keys[:2] and strategy.keys(2) == keys == strategy.keys(6)
  assert Strategy(loss, data="rollouts").keys(1) == ("advantages",)
  assert Strategy(loss, data="pairs", rollout_keys=keys).keys(2) == ()


@pytest.mark.parametrize("made, has, options", [
    (dict(), False, {"beta": 0.1}), (dict(needs_reference=lambda cfg: cfg.kl > 0), True, {
        "reference": "start", "reference_ema": 0.0, "reference_ema_steps": 512, "beta": 0.1}),
    (dict(needs_reference=True, data="pairs"), True, {
        "reference": "start", "precompute": False, "reference_ema": 0.0, "reference_ema_steps": 512, "beta": 0.1}),
    (dict(needs_reference=True, data="rollouts", critic=True), True, {
        "reference": "start", "reference_ema": 0.0, "reference_ema_steps": 512, "beta": 0.1})])
def test_options_that_come_with_a_reference(made, has, options):
  strategy = Strategy(loss, options=dict(beta=0.1), **made)
  assert strategy.has_reference(Options(kl=0.5)) == has and strategy.all_options() == options
  own = Strategy(loss, options=dict(reference_ema=0.5), **made)
  assert own.all_options()["reference_ema"] == 0.5


def test_not_held_near_a_reference_there_is_none():
  assert not Strategy(loss, needs_reference=lambda cfg: cfg.kl > 0).has_reference(Options(kl=0.0))


@pytest.mark.parametrize("headline, metrics, shown", [
    (None, {"loss": 2.5}, ["loss 2.500"]),
    (None, {"loss": 0.0, "reward": 0.25, "completions/mean_length": 17.6, "frac_reward_zero_std": 0.5, "other": 1.0},
     ["reward 0.250", "length 18", "taught nothing 50%", "loss 0.000"]),
    ({"accuracy": "right {:.1%}", "margin": "by {:g}"}, {"margin": 2.0, "accuracy": 0.5, "loss": 1.0},
     ["right 50.0%", "by 2"]),
    ({"accuracy": "right {:.1%}"}, {"loss": 1.0}, ["loss 1.000"]), ({"accuracy": "right {:.1%}"}, {}, [])])
def test_the_headline_is_shown_in_its_order_and_without_it_the_loss(headline, metrics, shown):
  assert Strategy(loss, **({} if headline is None else dict(headline=headline))).shown(metrics) == shown
