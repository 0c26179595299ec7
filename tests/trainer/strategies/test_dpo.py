"""DPO from tokens to gradients: against single sequences and full logits, and unmoved by micro-batches, packing,
padding, devices and dtypes; what it refuses."""

import functools
import json
import math
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from input_pipeline.examples.roles import CHOSEN
from tests import tiny
from tests.models.initial import initial
from tests.trainer import test_update
from tests.trainer.strategies import pairs
from tests.trainer.strategies.pairs import Options, options
from trainer.config import defaults
from trainer.errors import ConfigError
from trainer.metrics import to_floats
from trainer.strategies import STRATEGIES, dpo, kto, ppo, preference, sequences

EVERY = {name: 0.5 + 0.1 * i for i, name in enumerate(preference.LOSSES)}
# Those for which a step may have several micro-batches.
SUMS = {name: weight for name, weight in EVERY.items() if name not in preference.WHOLE_BATCH}
EXAMPLES = pairs.examples(7)
ROWS = [EXAMPLES[:2], EXAMPLES[2:3], EXAMPLES[3:5], EXAMPLES[5:6], [], EXAMPLES[6:], [], []]


@functools.cache
def model_and_params(dtype="float32"):
  model = tiny.model(compute_dtype=dtype)
  return model, *(initial(model, seed) for seed in (0, 1))


def smoothed(**changed):
  return options(**dict(label_smoothing=0.1, loss=EVERY) | changed)


@functools.cache
def jitted(cfg_json, dropout):
  model = tiny.model(dropout=0.5) if dropout else model_and_params()[0]
  rng, cfg = jax.random.key(3) if dropout else None, Options(json.loads(cfg_json))
  return jax.jit(lambda params, reference, batch: dpo.loss(model, params, batch, rng, cfg, reference=reference))


def results(cfg, batch, reference=None, dropout=False):
  """Metrics and terms as numbers, of a jitted loss."""
  _, params, default_reference = model_and_params()
  fn = jitted(json.dumps(cfg), dropout)
  terms, metrics = fn(params, default_reference if reference is None else reference, batch)
  total = {k: type(v)(v.sum.sum(), v.weight.sum()) for k, v in (terms | metrics).items()}
  return to_floats(jax.device_get(total))


@functools.cache
def objective_and_gradient(cfg_items):
  model, _, _ = model_and_params()
  cfg = smoothed(**dict(cfg_items))

  @jax.jit
  def fn(params, reference, batch):
    def objective(params):
      terms, _ = dpo.loss(model, params, batch, None, cfg, reference=reference)
      return sum(jnp.sum(t.sum) / jnp.sum(t.weight) for t in terms.values())

    return jax.value_and_grad(objective)(params)

  return fn


def assert_same_gradient(a, b, tolerance):
  norm = math.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(a)))
  assert norm > 0.1
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, atol=tolerance * norm)


@functools.cache
def sequences_alone():
  """For policy and reference, chosen and rejected: the token log-probs (and summed squares) of each example."""
  model, *both = model_and_params()
  return [[[pairs.token_logps(model, params, x, y) for x, y in ((x, w), (x, r))] for x, w, r in EXAMPLES]
          for params in both]


def test_values_and_metrics_are_those_of_the_sequences_alone():
  policy, reference = sequences_alone()
  values = results(options(), pairs.batch(ROWS))
  logps, ref = ([[lp.sum() for lp, _ in example] for example in side] for side in (policy, reference))
  (w, r), (ref_w, ref_r) = np.transpose(logps), np.transpose(ref)
  margin = 0.1 * ((w - ref_w) - (r - ref_r))
  lengths = np.asarray([[len(y) for y in example[1:]] for example in EXAMPLES])
  expected = {
      "loss": np.log1p(np.exp(-margin)).mean(), "losses/sigmoid": np.log1p(np.exp(-margin)).mean(),
      "rewards/chosen": 0.1 * (w - ref_w).mean(), "rewards/rejected": 0.1 * (r - ref_r).mean(),
      "rewards/margins": margin.mean(), "rewards/accuracies": (margin > 0).mean(),
      "logps/chosen": w.mean(), "logps/rejected": r.mean(), "logps_ref/chosen": ref_w.mean(),
      "logps_ref/rejected": ref_r.mean(), "logps_mean/chosen": (w / lengths[:, 0]).mean(),
      "logps_mean/rejected": (r / lengths[:, 1]).mean(),
  }
  assert 0 < expected["rewards/accuracies"] < 1
  for name, value in expected.items():
    assert values.pop(name) == pytest.approx(value, rel=1e-5, abs=1e-6), name
  assert set(values) == {"entropy", "mean_token_accuracy"}


def test_entropy_is_of_all_completion_tokens_and_accuracy_of_chosen_ones():
  model, params, _ = model_and_params()
  both = [(example[0], y) for example in EXAMPLES for y in example[1:]]
  padded = np.asarray([x + y + [0] * (16 - len(x + y)) for x, y in both])
  every = np.asarray(jax.jit(model.logits)(params, padded), np.float64)[..., :24]
  logits = [z[len(x) - 1:len(x + y) - 1] for z, (x, y) in zip(every, both, strict=True)]
  p = [np.exp(z) / np.exp(z).sum(-1, keepdims=True) for z in logits]
  entropies = np.concatenate([-(q * np.log(q)).sum(-1) for q in p])
  hits = np.concatenate([q.argmax(-1) == y for q, (_, y, _) in zip(p[::2], EXAMPLES, strict=True)])
  values = results(options(), pairs.batch(ROWS))
  assert values["entropy"] == pytest.approx(entropies.mean(), rel=1e-6)
  assert values["mean_token_accuracy"] == pytest.approx(hits.mean())


@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_ld_alpha_weighs_tokens_beyond_the_shorter_completion(alpha):
  """In policy and reference, for losses with a reference; SimPO and metrics keep all tokens."""

  def total(example, side):
    shorter = min(len(lp) for lp, _ in example)
    lp = example[side][0]
    return lp[:shorter].sum() + alpha * lp[shorter:].sum()

  policy, reference = sequences_alone()
  ratios = [[total(p, i) - total(q, i) for i in (0, 1)] for p, q in zip(policy, reference, strict=True)]
  margin = 0.1 * (np.asarray(ratios)[:, 0] - np.asarray(ratios)[:, 1])
  values = results(options(ld_alpha=alpha, loss={"sigmoid": 1.0, "simpo": 1.0}), pairs.batch(ROWS))
  plain = results(options(loss={"sigmoid": 1.0, "simpo": 1.0}), pairs.batch(ROWS))
  assert values["losses/sigmoid"] == pytest.approx(np.log1p(np.exp(-margin)).mean(), rel=1e-5)
  assert values["losses/sigmoid"] != pytest.approx(plain["losses/sigmoid"], rel=1e-4)
  for name in ("losses/simpo", "logps/chosen", "rewards/margins"):
    assert values[name] == plain[name]


def test_wpo_weighs_pairs_by_their_likelihood_without_a_gradient():
  policy, reference = sequences_alone()
  weight = np.asarray([math.exp(sum((lp - square).mean() for lp, square in example)) for example in policy])
  margin = np.asarray([0.1 * sum(sign * (p.sum() - q.sum()) for sign, (p, _), (q, _) in zip((1, -1), a, b, strict=True))
                       for a, b in zip(policy, reference, strict=True)])
  cfg = options(wpo=True, loss={"sigmoid": 1.0, "sft": 0.1})
  values = results(cfg, pairs.batch(ROWS))
  assert values["loss"] == pytest.approx((weight * np.log1p(np.exp(-margin))).mean(), rel=1e-5)
  assert values["wpo_weight"] == pytest.approx(weight.mean(), rel=1e-5)
  tokens = np.concatenate([example[0][0] for example in policy])
  assert values["sft"] == pytest.approx(-0.1 * tokens.mean(), rel=1e-5)

  # The gradient is that of constants times losses.
  model, params, ref = model_and_params()
  batch = pairs.batch([[example] for example in EXAMPLES], pairs=1)

  def total(params, wpo, factor):
    terms, _ = dpo.loss(model, params, batch, None, options(wpo=wpo), reference=ref)
    return jnp.sum(terms["loss"].sum * factor)

  a = jax.jit(jax.grad(lambda p: total(p, True, 1.0)))(params)
  b = jax.jit(jax.grad(lambda p: total(p, False, jnp.asarray(weight, jnp.float32))))(params)
  assert_same_gradient(a, b, 1e-5)


def test_rewards_without_a_reference():
  """β times the log-probability, which for SimPO and ORPO is the average."""
  values = results(options(beta=2.0, loss={"cpo": 1.0, "sft": 1.0}, reference="none"), pairs.batch(ROWS))
  assert values["rewards/chosen"] == pytest.approx(2 * values["logps/chosen"]) and "logps_ref/chosen" not in values
  values = results(options(beta=2.0, loss={"simpo": 1.0, "orpo": 0.5}), pairs.batch(ROWS))
  assert values["rewards/margins"] == pytest.approx(
      2 * (values["logps_mean/chosen"] - values["logps_mean/rejected"]), abs=1e-5)


def test_a_policy_that_equals_its_reference_starts_at_the_closed_form():
  """I7, T22: margins are 0 but for rounding, and count one half."""
  _, params, _ = model_and_params()
  values = results(smoothed(), pairs.batch(ROWS), reference=params)
  assert abs(values["rewards/margins"]) < 1e-6 and values["rewards/accuracies"] == 0.5
  assert values["losses/sigmoid"] == pytest.approx(math.log(2), rel=1e-6)
  assert values["losses/ipo"] == pytest.approx(25.0, rel=1e-6)
  assert [values["losses/apo_zero"], values["losses/apo_down"]] == pytest.approx([1.0, 1.0])
  assert values["logps/chosen"] == pytest.approx(values["logps_ref/chosen"], rel=1e-6)


def test_precomputed_log_probs_of_the_reference_give_the_same_bits():
  model, params, reference = model_and_params()
  batch = pairs.batch(ROWS)
  stored = np.asarray(jax.jit(lambda p, b: sequences.token_logprobs(model, p, b))(reference, batch))
  assert stored.dtype == np.float32 and not np.any(stored[batch["loss_weights"] == 0])
  with_stored = results(smoothed(), batch | {"ref_logprobs": stored}, reference=params)  # these are not looked at
  assert with_stored == results(smoothed(), batch)
  sums = np.asarray(jax.jit(sequences.segment_sums)(stored, batch))
  expected = [[y[0].sum() for y in example] for example in sequences_alone()[1]]
  np.testing.assert_allclose(sums[0], np.ravel(expected[:2]), rtol=1e-5)
  assert not sums[4].any()


def test_the_reference_gets_no_gradient():
  model, params, reference = model_and_params()
  batch = pairs.batch(ROWS)

  def total(reference):
    terms, _ = dpo.loss(model, params, batch, None, smoothed(), reference=reference)
    return sum(jnp.sum(t.sum) for t in terms.values())

  assert not any(leaf.any() for leaf in jax.tree.leaves(jax.jit(jax.grad(total))(reference)))


def test_dropout_is_off_unless_asked_for_and_never_in_the_reference():
  batch = pairs.batch(ROWS)
  plain = results(options(), batch)
  assert results(options(), batch, dropout=True) == plain
  dropped = results(options(disable_dropout=False), batch, dropout=True)
  assert dropped["logps/chosen"] != plain["logps/chosen"]
  assert dropped["logps_ref/chosen"] == pytest.approx(plain["logps_ref/chosen"], rel=1e-6)


@pytest.mark.parametrize("rows, length, room, changed", [
    ([[example] for example in EXAMPLES], 24, 1, ()),
    ([EXAMPLES[4:], EXAMPLES[:4]], 99, 5, (("ld_alpha", 0.5), ("wpo", True))),
])
def test_packing_and_padding_change_neither_loss_nor_gradient(rows, length, room, changed):
  """I3: one pair a row; all in two longer rows in another order, with room for more pairs than there are."""
  _, params, reference = model_and_params()
  fn = objective_and_gradient(changed)
  value, gradient = fn(params, reference, pairs.batch(ROWS))
  other, other_gradient = fn(params, reference, pairs.batch(rows, length, room))
  assert float(other) == pytest.approx(float(value), rel=2e-6)
  assert_same_gradient(gradient, other_gradient, 2e-6)


def step_with(micro_batch_size):
  model, reference, _ = model_and_params()  # the update starts from the other parameters
  cfg = smoothed(loss=SUMS)
  update, state = test_update.make(micro_batch_size, loss_fn=lambda params, batch, rng: dpo.loss(
      model, params, batch, rng, cfg, reference=reference))
  new, metrics = update(state, pairs.batch(ROWS))
  gradient = jax.tree.map(lambda a, b: np.asarray(a - b), state["params"], new["params"])
  return gradient, to_floats(jax.device_get(metrics))


def test_micro_batches_do_not_change_the_gradient():
  """I1, T4: micro-batches of two pairs, one and none; means over pairs and over tokens, each with its own total."""
  whole, whole_metrics = step_with(8)
  split, split_metrics = step_with(1)
  assert_same_gradient(whole, split, 1e-6)
  for name, value in whole_metrics.items():
    assert split_metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
  assert whole_metrics["objective"] == pytest.approx(whole_metrics["loss"] + whole_metrics["sft"], rel=1e-6)
  assert {"loss/a", "rewards/margins/b"} <= set(whole_metrics)


def test_counting_the_weights_computes_no_forward_pass():
  """Neither of the policy nor of the reference: the update has the products of the loss and its gradient alone."""
  model, params, reference = model_and_params()
  cfg, batch = smoothed(loss={"sigmoid": 1.0, "sft": 1.0}, wpo=True), pairs.batch(ROWS)
  update, state = test_update.make(8, loss_fn=lambda params, batch, rng: dpo.loss(
      model, params, batch, rng, cfg, reference=reference))

  def alone(params, batch):
    terms, metrics = dpo.loss(model, params, batch, None, cfg, reference=reference)
    return sum(jnp.sum(t.sum) for t in terms.values()), metrics

  products = jax.jit(jax.grad(alone, has_aux=True)).lower(params, batch).compile().as_text().count(" dot(")
  assert update.lower(state, batch).compile().as_text().count(" dot(") == products > 0


def test_eight_devices_give_what_one_gives():
  """I2, T23: with losses that put all pairs in order."""
  _, params, reference = model_and_params()
  fn, batch = objective_and_gradient(()), pairs.batch(ROWS)
  value, gradient = fn(params, reference, batch)
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  put = lambda tree, *spec: jax.device_put(tree, jax.NamedSharding(mesh, jax.P(*spec)))  # noqa: E731
  other, other_gradient = fn(put(params), put(reference), put(batch, "data"))
  assert float(other) == pytest.approx(float(value), rel=1e-6)
  assert_same_gradient(gradient, other_gradient, 1e-5)


def test_an_absent_pair_and_what_stands_in_prompts_and_padding_change_nothing():
  _, params, reference = model_and_params()
  fn, batch = objective_and_gradient(()), pairs.batch(ROWS)
  value, gradient = fn(params, reference, batch)
  absent = {key: array.copy() for key, array in batch.items()}
  # A pair whose tokens are there but which does not count, in a row that had none; loud padding elsewhere.
  extra = pairs.batch([[EXAMPLES[0]]])
  for key in ("tokens", "positions", "segment_ids", "loss_weights"):
    absent[key][4] = extra[key][0]
  absent["tokens"][6:] = 23
  assert not absent["segment_roles"][4].any()
  other, other_gradient = fn(params, reference, absent)
  assert float(other) == float(value)
  for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(other_gradient), strict=True):
    np.testing.assert_array_equal(a, b)


def test_a_completion_without_tokens_is_never_nan():
  """T11e: data drop such pairs, but one that slips through must not end a run."""
  _, params, reference = model_and_params()
  rows = [[([1, 2], [3, 4], [])], [([5], [], [6, 7])], [EXAMPLES[0]], [], [], [], [], []]
  value, gradient = objective_and_gradient(())(params, reference, pairs.batch(rows))
  assert np.isfinite(value) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_sums_of_a_bfloat16_policy_are_float32():
  """T24: a long completion's sum is that of its float32 tokens, which bfloat16 could not hold."""
  model, params, reference = model_and_params("bfloat16")
  rng = np.random.default_rng(0)
  example = ([1], rng.integers(0, 24, 300).tolist(), rng.integers(0, 24, 200).tolist())
  batch = pairs.batch([[example]], length=512, pairs=1)
  tokens = jax.jit(lambda p, b: sequences.token_logprobs(model, p, b))(params, batch)
  sums = jax.jit(lambda p, b: sequences.segment_sums(sequences.token_logprobs(model, p, b), b))(params, batch)
  assert tokens.dtype == sums.dtype == jnp.float32
  expected = np.asarray(tokens, np.float64)[0, 1:301].sum()
  assert float(sums[0, 0]) == pytest.approx(expected, rel=1e-6)
  assert abs(float(jnp.bfloat16(expected)) - expected) > 0.1
  terms, metrics = jax.eval_shape(
      lambda p, r, b: dpo.loss(model, p, b, None, smoothed(), reference=r), params, reference, batch)
  assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((terms, metrics)))


def test_no_logits_for_the_whole_vocabulary_in_the_compiled_program():
  rows, length, vocab = 4, 40, 2048

  def largest(chunk):
    model = tiny.model(vocab_size=vocab, vocab_chunk=chunk)
    params = jax.eval_shape(model.init, jax.random.key(0))
    batch = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in pairs.batch([[]] * rows, length).items()}

    def objective(params, reference, batch):
      terms, metrics = dpo.loss(model, params, batch, None, smoothed(wpo=True), reference=reference)
      return sum(jnp.sum(t.sum) / jnp.sum(t.weight) for t in terms.values()), metrics

    hlo = jax.jit(jax.grad(objective, has_aux=True)).lower(params, params, batch).compile().as_text()
    sizes = re.findall(r"[fsup][a-z0-9]+\[([0-9,]+)\]", hlo)
    return max(math.prod(map(int, dims.split(","))) for dims in sizes)

  assert largest(128) < rows * length * vocab / 4
  # The same search does find them where they exist.
  assert largest(vocab) >= rows * length * vocab


@pytest.mark.parametrize("changed, message", [
    (dict(loss={"sigmiod": 1.0}), "'sigmiod'; did you mean 'sigmoid'"),
    (dict(loss={"xyz": 1.0}), "Known losses: sigmoid, hinge"),
    (dict(loss={}), "names no loss"),
    (dict(loss={"sigmoid": 0.0}), "names no loss"),
    (dict(loss={"sigmoid": -1.0}), "a number from 0 on"),
    (dict(loss={"sigmoid": "much"}), "a number from 0 on"),
    (dict(beta=0.0), "strategy.beta is 0.0"),
    (dict(label_smoothing=0.5), "strategy.label_smoothing is 0.5"),
    (dict(loss={"exo_pair": 1.0}), "label_smoothing=0.001"),
    (dict(f_divergence="kl"), "allowed: reverse_kl"),
    (dict(f_divergence="js", loss={"apo_zero": 1.0, "sft": 1.0}), "not defined for apo_zero"),
    (dict(ld_alpha=2.0), "strategy.ld_alpha is 2.0"),
    (dict(loss={"cpo": 1.0}, cpo_alpha=-1.0), "strategy.cpo_alpha is -1.0"),
    (dict(loss={"discopop": 1.0}, discopop_tau=0.0), "strategy.discopop_tau is 0.0"),
    (dict(reference="none", loss={"sft": 1.0, "ipo": 1.0}), "ipo compares the policy with one"),
])
def test_options_that_cannot_work(changed, message):
  with pytest.raises(ConfigError, match=re.escape(message)):
    dpo.check(options(**changed), 1)


def test_losses_over_the_whole_batch_refuse_micro_batches():
  """T23."""
  for name in preference.WHOLE_BATCH:
    cfg = options(loss={"sigmoid": 1.0, name: 0.1})
    dpo.check(cfg, 1)
    with pytest.raises(ConfigError, match=f"'{name}', which puts all pairs of a step in order, but grad_accum_steps"):
      dpo.check(cfg, 2)
    dpo.check(options(loss={"sigmoid": 1.0, name: 0}), 2)


@pytest.mark.parametrize("strategy, changed", [(dpo, {}), (kto, {}), (ppo, dict(kl_coef=0.0, temperature=1.0))],
                         ids=("dpo", "kto", "ppo"))
def test_noise_without_effect_is_refused(strategy, changed):
  cfg_model, check = defaults().model, strategy.check
  of = functools.partial(options, strategy.__name__.rpartition(".")[2], **changed)
  for section, key in ((cfg_model, "dropout"), (cfg_model, "neftune_alpha"), (cfg_model.lora, "dropout")):
    section[key], cfg_model.lora.rank = 0.25, 2
    where = "model.lora" if section is cfg_model.lora else "model"
    with pytest.raises(ConfigError, match=f"{where}.{key} is 0.25, but strategy.disable_dropout"):
      check(of(), 1, cfg_model)
    check(of(disable_dropout=False), 1, cfg_model)
    if section is cfg_model.lora:  # which there are none of
      cfg_model.lora.rank = 0
      check(of(), 1, cfg_model)
    section[key] = 0.0
  check(of(), 1, cfg_model)


class Applied(Exception):
  """What a model was asked for."""


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_noise_is_there_unless_the_strategy_says_no(name):
  def apply(params, batch, *, rng=None, train=False):
    raise Applied(rng, train)

  model, strategy = SimpleNamespace(apply=apply), STRATEGIES[name]
  for off in (False, True) if "disable_dropout" in strategy.options else (False,):
    cfg = options(name, **dict(disable_dropout=off) if "disable_dropout" in strategy.options else {})
    for rng in ("a key", None):
      with pytest.raises(Applied) as applied:
        strategy.loss(model, "parameters", {}, rng, cfg)
      assert applied.value.args == ((None, False) if off or rng is None else (rng, True)), (off, rng)


def test_a_reference_that_is_missing():
  model, params, _ = model_and_params()

  def trace(batch, cfg):
    return jax.eval_shape(lambda p, b: dpo.loss(model, p, b, None, cfg), params, batch)

  with pytest.raises(ValueError, match="no ref_logprobs"):
    trace(pairs.batch(ROWS), options())
  assert dpo.needs_reference(options()) and not dpo.needs_reference(options(loss={"simpo": 1.0, "ipo": 0.0}))
  trace(pairs.batch(ROWS), options(loss={"simpo": 1.0, "ipo": 0.0}))
  with pytest.raises(ValueError, match="even number"):
    trace(pairs.layout([[([1], [2], CHOSEN)]], 8, 3), options(loss={"simpo": 1.0}))
