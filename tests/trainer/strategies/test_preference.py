"""Each loss on pairs against formulas written down a second time, in float64 numpy, and its gradient against finite
differences (I8); what equal policies give (I7); orders, ties, absent pairs, extreme values."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainer.strategies.pairs import options
from trainer.strategies import preference
from trainer.strategies.preference import LOSSES, Pairs, Side

# Sums of log-probabilities of four pairs in two rows, and their lengths in tokens.
CHOSEN = [[-9.0, -4.5], [-19.5, -7.25]]
REJECTED = [[-8.0, -6.5], [-27.0, -7.0]]
REF_CHOSEN = [[-10.0, -4.0], [-18.0, -7.75]]
REF_REJECTED = [[-9.5, -6.0], [-25.0, -8.25]]
LENGTHS = [[[3, 2], [11, 4]], [[4, 1], [9, 5]]]
BETA, EPS, TAU, GAMMA = 0.3, 0.1, 0.05, 0.5
WITH_REFERENCE = [name for name in LOSSES if name not in preference.REFERENCE_FREE]


def cfg(**changed):
  return options(**dict(beta=BETA, label_smoothing=EPS, discopop_tau=TAU, simpo_gamma=GAMMA) | changed)


def sigma(x):
  return 1 / (1 + np.exp(-x))


def score(l, kind="reverse_kl", alpha=0.5):  # noqa: E741 (the papers' name)
  return {"reverse_kl": l, "forward_kl": 1 - np.exp(-l), "js": np.log(2 * sigma(l)),
          "alpha": (np.exp((alpha - 1) * l) - 1) / (alpha - 1)}[kind]


def by_hand(name, x, kind="reverse_kl"):
  """The loss of each pair, from x = [chosen, rejected, ref_chosen, ref_rejected] [4, B, P]."""
  x, lengths = np.asarray(x, np.float64), np.asarray(LENGTHS, np.float64)
  l_w, l_l = x[0] - x[2], x[1] - x[3]
  s_w, s_l = score(l_w, kind), score(l_l, kind)
  d, q, ls = s_w - s_l, sigma(BETA * (s_w - s_l)), lambda z: -np.log1p(np.exp(-z))
  mean_w, mean_l = x[0] / lengths[0], x[1] / lengths[1]

  def smooth(z):
    return -(1 - EPS) * ls(z) - EPS * ls(-z)

  def by_rank(a, b):
    return (np.sort(a, axis=None) - np.sort(b, axis=None))[np.argsort(np.argsort(a, axis=None))].reshape(a.shape)

  def odds(logp):
    return np.exp(logp) / (1 - np.exp(logp))

  m = sigma(BETA * d / TAU)
  return {
      "sigmoid": lambda: smooth(BETA * d),
      "hinge": lambda: np.where(BETA * d < 1, 1 - BETA * d, 0),
      "ipo": lambda: (s_w / lengths[0] - s_l / lengths[1] - 1 / (2 * BETA)) ** 2,
      "sigmoid_norm": lambda: -ls(BETA * (s_w / lengths[0] - s_l / lengths[1])),
      "robust": lambda: (-(1 - EPS) * np.log(q) + EPS * np.log(1 - q)) / (1 - 2 * EPS),
      "exo_pair": lambda: q * np.log(q / (1 - EPS)) + (1 - q) * np.log((1 - q) / EPS),
      "nca_pair": lambda: -ls(BETA * s_w) - 0.5 * ls(-BETA * s_w) - 0.5 * ls(-BETA * s_l),
      "bco_pair": lambda: -np.log(sigma(BETA * s_w)) - np.log(1 - sigma(BETA * s_l)),
      "sppo_hard": lambda: (s_w - 1 / (2 * BETA)) ** 2 + (s_l + 1 / (2 * BETA)) ** 2,
      "apo_zero": lambda: 1 - sigma(BETA * l_w) + sigma(BETA * l_l),
      "apo_down": lambda: sigma(BETA * l_w) + 1 - sigma(BETA * (l_w - l_l)),
      "aot": lambda: smooth(BETA * by_rank(x[0] - x[1], x[2] - x[3])),
      "aot_unpaired": lambda: smooth(BETA * by_rank(l_w, l_l)),
      "discopop": lambda: (1 - m) * -np.log(q) + m * np.exp(-BETA * d),
      "sft": lambda: -x[0],
      "simpo": lambda: smooth(BETA * (mean_w - mean_l) - GAMMA),
      "orpo": lambda: -BETA * np.log(sigma(np.log(odds(mean_w) / odds(mean_l)))),
      "cpo": lambda: smooth(BETA * (x[0] - x[1])),
  }[name]()


def make_pairs(x, lengths=LENGTHS, present=None):
  chosen, rejected, ref_chosen, ref_rejected = x
  count = jnp.asarray(lengths, chosen.dtype)
  present = jnp.ones_like(chosen) if present is None else jnp.asarray(present, chosen.dtype)
  return Pairs(Side(chosen, count[0], chosen, ref_chosen), Side(rejected, count[1], rejected, ref_rejected), present)


FIXTURE = np.asarray([CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED])


@pytest.mark.parametrize("name", LOSSES)
def test_values_by_hand(name):
  kinds = preference.DIVERGENCES if name in preference.SCORED else ["reverse_kl"]
  for kind in kinds:
    expected = by_hand(name, FIXTURE, kind)
    ours = LOSSES[name](make_pairs(jnp.asarray(FIXTURE, jnp.float32)), cfg(f_divergence=kind))
    assert ours.dtype == jnp.float32 and ours.shape == (2, 2)
    np.testing.assert_allclose(ours, expected, rtol=2e-6, atol=2e-6, err_msg=kind)
    with jax.enable_x64(True):
      ours = LOSSES[name](make_pairs(jnp.asarray(FIXTURE)), cfg(f_divergence=kind))
      np.testing.assert_allclose(ours, expected, rtol=1e-9, err_msg=kind)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_finite_differences(name):
  """Of the policy's log-probabilities; weights make a mix-up of pairs visible."""
  weights = np.asarray([[1.0, 0.3], [-0.7, 2.0]])
  for kind in preference.DIVERGENCES if name in preference.SCORED else ["reverse_kl"]:
    with jax.enable_x64(True):

      def total(policy, kind=kind):
        x = [policy[0], policy[1], *jnp.asarray(FIXTURE[2:])]
        return jnp.sum(weights * LOSSES[name](make_pairs(x), cfg(f_divergence=kind)))

      gradient = np.asarray(jax.grad(total)(jnp.asarray(FIXTURE[:2])))
    h = 1e-5
    for at in itertools.product(range(2), repeat=3):
      up, down = FIXTURE.copy(), FIXTURE.copy()
      up[at] += h
      down[at] -= h
      expected = (weights * (by_hand(name, up, kind) - by_hand(name, down, kind))).sum() / (2 * h)
      assert gradient[at] == pytest.approx(expected, rel=1e-6, abs=1e-8), (kind, at)


AT_START = {
    "sigmoid": math.log(2), "hinge": 1.0, "ipo": 1 / (4 * BETA**2), "sigmoid_norm": math.log(2),
    "robust": math.log(2), "exo_pair": -math.log(2) - 0.5 * math.log(EPS * (1 - EPS)), "nca_pair": 2 * math.log(2),
    "bco_pair": 2 * math.log(2), "sppo_hard": 1 / (2 * BETA**2), "apo_zero": 1.0, "apo_down": 1.0,
    "aot": math.log(2), "aot_unpaired": math.log(2), "discopop": 0.5 * math.log(2) + 0.5,
}


@pytest.mark.parametrize("name", WITH_REFERENCE)
def test_a_policy_that_equals_its_reference_has_the_closed_form(name):
  """I7, whatever the divergence."""
  x = jnp.asarray([CHOSEN, REJECTED, CHOSEN, REJECTED])
  for kind in preference.DIVERGENCES if name in preference.SCORED else ["reverse_kl"]:
    ours = LOSSES[name](make_pairs(x), cfg(f_divergence=kind))
    np.testing.assert_allclose(ours, AT_START[name], rtol=1e-6, err_msg=kind)


def test_without_label_smoothing():
  pairs = make_pairs(jnp.asarray(FIXTURE, jnp.float32))
  margin = 0.3 * ((FIXTURE[0] - FIXTURE[2]) - (FIXTURE[1] - FIXTURE[3]))
  for name in ("sigmoid", "robust"):
    np.testing.assert_allclose(LOSSES[name](pairs, cfg(label_smoothing=0.0)), np.log1p(np.exp(-margin)), rtol=1e-6)


def test_an_alpha_of_one_is_the_reverse_divergence_and_its_neighbours_are_near():
  ratio = jnp.linspace(-3, 3, 7)
  np.testing.assert_array_equal(preference.divergence(ratio, cfg(f_divergence="alpha", alpha=1.0)), ratio)
  np.testing.assert_allclose(preference.divergence(ratio, cfg(f_divergence="alpha", alpha=1.001)), ratio, atol=1e-2)
  zero = preference.divergence(jnp.linspace(-3, 3, 7), cfg(f_divergence="alpha", alpha=0.0))
  np.testing.assert_allclose(zero, preference.divergence(ratio, cfg(f_divergence="forward_kl")), rtol=1e-5)


@pytest.mark.parametrize("name", sorted(preference.WHOLE_BATCH))
def test_the_order_is_of_all_pairs_whatever_their_places(name):
  """T23: pairs moved between rows, and beside absent ones, are compared with the same quantiles."""
  x = np.asarray(FIXTURE, np.float32)
  expected = np.asarray(LOSSES[name](make_pairs(jnp.asarray(x)), cfg())).ravel()
  order, places = [2, 0, 3, 1], [5, 0, 1, 4]
  scattered = np.full((4, 6), 7.0, np.float32)
  scattered[:, places] = x.reshape(4, 4)[:, order]
  present = np.zeros(6, np.float32)
  present[places] = 1
  pairs = make_pairs(jnp.asarray(scattered.reshape(4, 3, 2)), np.ones((2, 3, 2)), present.reshape(3, 2))
  ours = np.asarray(LOSSES[name](pairs, cfg())).ravel()
  np.testing.assert_array_equal(ours[places], expected[order])


@pytest.mark.parametrize("name", sorted(preference.WHOLE_BATCH))
def test_ties_in_the_order_change_neither_the_sum_nor_lose_a_gradient(name):
  x = jnp.asarray([[[-5.0, -5.0, -3.0]], [[-6.0, -6.0, -2.0]], [[-5.0, -4.0, -3.0]], [[-6.0, -5.0, -4.0]]])

  def total(x):
    return jnp.sum(LOSSES[name](make_pairs(x, np.ones((2, 1, 3))), cfg(label_smoothing=0.0)))

  gradient = jax.grad(total)(x)
  assert np.isfinite(gradient).all() and np.all(gradient[0] < 0) and np.all(gradient[1] > 0)
  swapped = x[:, :, jnp.array([1, 0, 2])]
  assert float(total(x)) == pytest.approx(float(total(swapped)), rel=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_pairs_and_empty_completions_stay_finite(name):
  """Log-ratios of a thousand nats either way, certain completions, completions without tokens (T11e)."""
  x = jnp.asarray([[[-1000.0, -1e-9, 0.0, 0.0]], [[-1.0, -2000.0, -5.0, 0.0]],
                   [[-1.0, -1000.0, 0.0, 0.0]], [[-1000.0, -3.0, -5.0, 0.0]]])
  lengths = [[[5, 5, 0, 0]], [[7, 7, 3, 0]]]

  def total(x):
    return jnp.sum(LOSSES[name](make_pairs(x, lengths), cfg()))

  value, gradient = jax.value_and_grad(total)(x)
  assert np.isfinite(value) and np.isfinite(gradient).all()


def test_terms_are_means_over_pairs_and_over_tokens_with_their_coefficients():
  """MPO-like weights, ORPO and CPO with the cross-entropy that belongs to them; absent pairs count nowhere."""
  x = jnp.asarray(FIXTURE, jnp.float32)
  lengths = np.asarray(LENGTHS, np.float64)
  present = np.asarray([[1.0, 1.0], [1.0, 0.0]])
  here = present > 0
  pairs = make_pairs(x, present=present)

  def mean(term):
    return float(jnp.sum(term.sum) / jnp.sum(term.weight))

  def per_pair(name):
    return by_hand(name, FIXTURE)[here].mean()

  nll = -np.asarray(CHOSEN)[here].sum() / lengths[0][here].sum()
  terms, metrics = preference.terms(pairs, cfg(loss={"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.5, "hinge": 0.0}))
  assert list(terms) == ["loss", "sft"] and terms["loss"].sum.shape == (2,)
  np.testing.assert_array_equal(terms["loss"].weight, [2, 1])
  np.testing.assert_array_equal(terms["sft"].weight, [5, 11])
  assert mean(terms["loss"]) == pytest.approx(0.8 * per_pair("sigmoid") + 0.2 * per_pair("bco_pair"), rel=1e-6)
  assert mean(terms["sft"]) == pytest.approx(1.5 * nll, rel=1e-6)
  assert list(metrics) == ["losses/sigmoid", "losses/bco_pair", "losses/sft"]
  assert mean(metrics["losses/bco_pair"]) == pytest.approx(per_pair("bco_pair"), rel=1e-6)
  assert mean(metrics["losses/sft"]) == pytest.approx(nll, rel=1e-6)

  terms, _ = preference.terms(pairs, cfg(loss={"orpo": 2.0, "cpo": 3.0, "sft": 0.25}, cpo_alpha=0.5))
  assert mean(terms["loss"]) == pytest.approx(2 * per_pair("orpo") + 3 * per_pair("cpo"), rel=1e-6)
  assert mean(terms["sft"]) == pytest.approx((2.0 + 3 * 0.5 + 0.25) * nll, rel=1e-6)

  terms, _ = preference.terms(pairs, cfg(loss={"sft": 2.0}))
  assert list(terms) == ["loss"] and mean(terms["loss"]) == pytest.approx(2 * nll, rel=1e-6)


def test_ties_count_one_half_and_so_does_rounding():
  """T22."""
  chosen = jnp.asarray([1.0, 1.0, 2.0, 1.0, 1.0 + 2e-6])
  rejected = jnp.asarray([1.0, 2.0, 1.0, 1.001, 1.0])
  np.testing.assert_array_equal(preference.accuracy(chosen, rejected, jnp.full(5, 10.0)), [0.5, 0, 1, 0, 0.5])


def test_every_loss_says_what_it_is():
  for name, fn in LOSSES.items():
    assert "arXiv" in fn.__doc__ or name == "aot_unpaired", name
  assert preference.SCORED < set(LOSSES) and preference.SMOOTHED < set(LOSSES)


@pytest.mark.parametrize("kind, far, slope", [
    ("forward_kl", 1.0 - math.exp(80.0), 0.0), ("js", math.log(2.0) - 1e4, 1.0),
    ("alpha", (math.exp(80.0) - 1.0) / -0.5, 0.0), ("reverse_kl", -1e4, 1.0)])
def test_a_policy_far_below_its_reference_has_a_finite_score_and_slope(kind, far, slope):
  """Exponents end at 80; beyond it the score is constant. On the other side every divergence is bounded or linear."""
  value, gradient = jax.value_and_grad(lambda x: preference.divergence(x, cfg(f_divergence=kind)))(-1e4)
  assert float(value) == pytest.approx(far, rel=1e-5) and float(gradient) == slope
  above = {"forward_kl": 1.0, "js": math.log(2.0), "alpha": 2.0, "reverse_kl": 1e4}[kind]
  value, gradient = jax.value_and_grad(lambda x: preference.divergence(x, cfg(f_divergence=kind)))(1e4)
  assert float(value) == pytest.approx(above, rel=1e-5) and float(gradient) == (kind == "reverse_kl")
  # An alpha above 1 grows on that side.
  if kind == "alpha":
    value, gradient = jax.value_and_grad(lambda x: preference.divergence(x, cfg(f_divergence=kind, alpha=2.0)))(1e4)
    assert float(value) == pytest.approx(math.exp(80.0), rel=1e-5) and float(gradient) == 0.0
