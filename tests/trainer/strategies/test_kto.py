"""KTO against a float64 computation from sequences alone; what must not matter; what it refuses."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from input_pipeline.examples.roles import DESIRABLE, MISMATCHED, UNDESIRABLE
from tests import tiny
from tests.models.initial import initial
from tests.trainer import test_update
from tests.trainer.strategies import pairs
from tests.trainer.strategies.pairs import options
from trainer.errors import ConfigError
from trainer.metrics import Mean, to_floats
from trainer.strategies import kto

LABELS = (DESIRABLE, UNDESIRABLE, UNDESIRABLE, DESIRABLE, DESIRABLE, UNDESIRABLE)
# (prompt, completion, label); the mismatched completion of each is the next one's.
EXAMPLES = [(x, y, label) for (x, y, _), label in zip(pairs.examples(6, seed=1), LABELS, strict=True)]
UNITS = [[(x, y, label), (x, EXAMPLES[(i + 1) % 6][1], MISMATCHED)] for i, (x, y, label) in enumerate(EXAMPLES)]
ROWS = [UNITS[0] + UNITS[1], UNITS[2], [], UNITS[3] + UNITS[4], UNITS[5], [], [], []]
WEIGHTS = dict(beta=0.3, desirable_weight=1.5, undesirable_weight=0.7)


def batch(rows=ROWS, length=48, segments=4):
  return pairs.layout(rows, length, segments)


@functools.cache
def model_and_params():
  model = tiny.model()
  return model, *(initial(model, seed) for seed in (0, 1))


@functools.cache
def compiled(loss):
  model, _, _ = model_and_params()
  cfg = options("kto", loss=loss, **WEIGHTS)

  @jax.jit
  def fn(params, reference, batch):
    def objective(params):
      terms, metrics = kto.loss(model, params, batch, None, cfg, reference=reference)
      return jnp.sum(terms["loss"].sum) / jnp.sum(terms["loss"].weight), terms | metrics

    return jax.value_and_grad(objective, has_aux=True)(params)

  return fn


def results(loss="kto", given=None, swap=False):
  """(gradient, metrics as numbers); `swap`: policy and reference change places."""
  _, policy, reference = model_and_params()
  policy, reference = (reference, policy) if swap else (policy, reference)
  (_, metrics), gradient = compiled(loss)(policy, reference, given or batch())
  total = {k: v if isinstance(v, kto.Difference) else type(v)(v.sum.sum(), v.weight.sum()) for k, v in metrics.items()}
  return gradient, to_floats(jax.device_get(total))


def ratios(swap=False):
  """(log-ratios of the examples, of the mismatched sequences, log-probs of the examples under the policy)."""
  model, *both = model_and_params()
  both = both[::-1] if swap else both
  logps = np.asarray([[[pairs.token_logps(model, params, x, y)[0].sum() for x, y, _ in unit] for unit in UNITS]
                      for params in both])
  r = logps[0] - logps[1]
  return r[:, 0], r[:, 1], logps[0][:, 0]


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("loss", kto.LOSSES)
def test_values_and_metrics_are_those_of_the_sequences_alone(loss, swap):
  """Once with a positive estimate of the divergence, once with a negative one, which counts as 0."""
  r, mismatched, logps = ratios(swap)
  good = np.asarray([label == DESIRABLE for _, _, label in EXAMPLES])
  z = max(mismatched.mean(), 0.0) if loss == "kto" else 0.0
  x = 0.3 * np.where(good, r - z, z - r)
  expected = np.where(good, 1.5, 0.7) * (1 - 1 / (1 + np.exp(-x)))
  _, values = results(loss, swap=swap)
  assert values["loss"] == pytest.approx(expected.mean(), rel=1e-5)
  assert values["rewards/chosen"] == pytest.approx(0.3 * r[good].mean(), rel=1e-4)
  assert values["rewards/rejected"] == pytest.approx(0.3 * r[~good].mean(), rel=1e-4)
  assert values["rewards/margins"] == pytest.approx(0.3 * (r[good].mean() - r[~good].mean()), rel=1e-4)
  assert values["logps/chosen"] == pytest.approx(logps[good].mean(), rel=1e-5)
  assert ("kl" in values) == (loss == "kto")
  if loss == "kto":
    assert values["kl"] == pytest.approx(mismatched.mean(), rel=1e-4)


def test_means_of_each_side_and_of_tokens():
  """The entropy is that of all judged tokens; the accuracy, and the reference's log-probs, are a side's own."""
  model, policy, reference = model_and_params()
  good = np.asarray([label == DESIRABLE for _, _, label in EXAMPLES])
  logits = jax.jit(model.logits)
  entropies, hits = [], []
  for x, y, label in EXAMPLES:
    ids = np.asarray([x + y + [0] * (16 - len(x + y))], np.int32)
    p = np.asarray(jax.nn.softmax(logits(policy, ids)[0, len(x) - 1:len(x + y) - 1, :24]), np.float64)
    entropies += list(-(p * np.log(p)).sum(-1))
    hits += list(p.argmax(-1) == y) if label == DESIRABLE else []
  referred = np.asarray([pairs.token_logps(model, reference, x, y)[0].sum() for x, y, _ in EXAMPLES])
  means = np.asarray([pairs.token_logps(model, policy, x, y)[0].mean() for x, y, _ in EXAMPLES])
  _, values = results()
  assert values["entropy"] == pytest.approx(np.mean(entropies), rel=1e-5)
  assert values["mean_token_accuracy"] == pytest.approx(np.mean(hits))
  for side, of in (("chosen", good), ("rejected", ~good)):
    assert values[f"logps_ref/{side}"] == pytest.approx(referred[of].mean(), rel=1e-5)
    assert values[f"logps_mean/{side}"] == pytest.approx(means[of].mean(), rel=1e-5)


def test_both_signs_of_the_divergence_are_tried_above():
  assert ratios(False)[1].mean() * ratios(True)[1].mean() < 0


def test_the_divergence_has_no_gradient():
  """That of the loss is -λ β σ(x) σ(-x) r' for desirable completions, with z a constant; finite differences agree."""
  cfg = options("kto", **WEIGHTS)
  ratio = jnp.asarray([[1.5, 0.8, -0.5, 2.0]])
  mismatched = jnp.asarray([[0.0, 1.0, 0.0, 1.0]])

  def total(ratio, z=None):
    z = kto.divergence(ratio, mismatched) if z is None else z
    good, bad = kto.example_losses(ratio, z, cfg)
    return good[0, 0] + bad[0, 2]

  gradient = jax.grad(total)(ratio)
  assert float(kto.divergence(ratio, mismatched)) == pytest.approx(1.4)
  assert gradient[0, 1] == gradient[0, 3] == 0
  h = 1e-2
  for at in (0, 2):
    step = jnp.zeros_like(ratio).at[0, at].set(h)
    difference = (total(ratio + step, 1.4) - total(ratio - step, 1.4)) / (2 * h)
    assert float(gradient[0, at]) == pytest.approx(float(difference), rel=1e-3)
  assert float(kto.divergence(ratio, jnp.zeros((1, 4)))) == 0


def test_a_policy_that_equals_its_reference():
  """I7: each loss is half its weight; log-probs differ by the last bit at most, one of them being differentiated."""
  _, policy, _ = model_and_params()
  for loss in kto.LOSSES:
    (value, metrics), _ = compiled(loss)(policy, policy, batch())
    assert float(value) == pytest.approx((3 * 1.5 + 3 * 0.7) / 12, rel=1e-6)
    np.testing.assert_allclose(metrics["rewards/chosen"].sum, 0, atol=2e-6)


@pytest.mark.parametrize("loss", kto.LOSSES)
def test_packing_and_devices_change_nothing(loss):
  """I2, I3: the estimate of the divergence is that of all rows."""
  gradient, values = results(loss)
  spread = batch([[*unit] for unit in UNITS] + [[], []], length=24, segments=2)
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  sharded = jax.device_put(spread, jax.NamedSharding(mesh, jax.P("data")))
  norm = math.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(gradient)))
  _, policy, reference = model_and_params()
  (value, _), other = compiled(loss)(*jax.device_put((policy, reference), jax.NamedSharding(mesh, jax.P())), sharded)
  assert float(value) == pytest.approx(values["loss"], rel=2e-6) and norm > 0.01
  for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(other), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * norm)


def test_without_the_divergence_micro_batches_change_nothing():
  """I1."""
  model, _, reference = model_and_params()
  cfg = options("kto", loss="apo_zero_unpaired", **WEIGHTS)
  outcomes = []
  for size in (8, 2):
    update, state = test_update.make(size, loss_fn=lambda params, batch, rng: kto.loss(
        model, params, batch, rng, cfg, reference=reference))
    new, metrics = update(state, batch())
    outcomes.append((new["params"], to_floats(jax.device_get(metrics))))
  for a, b in zip(*(jax.tree.leaves(params) for params, _ in outcomes), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6)
  for name, value in outcomes[0][1].items():
    assert outcomes[1][1][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
  assert "rewards/margins" in outcomes[0][1]


def test_a_margin_needs_both_kinds():
  _, values = results(given=batch([UNITS[0], UNITS[3], [], [], [], [], [], []]))
  assert "rewards/margins" not in values and "rewards/rejected" not in values and values["rewards/chosen"] != 0


@pytest.mark.parametrize("changed, steps, message", [
    (dict(loss="sigmoid"), 1, "allowed for kto: kto, apo_zero_unpaired"),
    (dict(), 2, "grad_accum_steps is 2"),
    (dict(beta=-1.0), 1, "strategy.beta is -1.0"),
    (dict(undesirable_weight=-1.0), 1, "strategy.undesirable_weight is -1.0"),
    (dict(reference="none"), 1, "compares the policy with one"),
])
def test_options_that_cannot_work(changed, steps, message):
  with pytest.raises(ConfigError, match=message):
    kto.check(options("kto", **changed), steps)


def test_options_that_can():
  kto.check(options("kto"), 1)
  kto.check(options("kto", loss="apo_zero_unpaired"), 4)


def test_a_difference_of_means_adds_up_each_by_itself():
  """Of two evaluated batches: (1 + 6) / (1 + 2) - (4 + 0) / (1 + 3)."""
  one = kto.Difference(Mean(1.0, 1.0), Mean(4.0, 1.0))
  whole = one + kto.Difference(Mean(6.0, 2.0), Mean(0.0, 3.0))
  assert whole.to_floats("x") == {"x": pytest.approx(7 / 3 - 1)}
  for plus, minus in ((0.0, 1.0), (1.0, 0.0)):
    assert kto.Difference(Mean(1.0, plus), Mean(1.0, minus)).to_floats("x") == {}


@pytest.mark.parametrize("loss, estimated, no_sums", [("kto", True, {"loss"}), ("apo_zero_unpaired", False, set())])
def test_the_loss_from_which_a_mean_is_subtracted_is_no_sum(loss, estimated, no_sums):
  cfg = options("kto", loss=loss)
  assert kto.no_sums(cfg) == no_sums and kto.KTO.mismatched(cfg) == estimated
  assert kto.at_reference(cfg) == {"rewards/margins": 0.0}
