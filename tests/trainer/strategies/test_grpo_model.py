"""GRPO with a model: against single sequences and full logits, and unmoved by micro-batches, packing, padding and
devices; which options are refused."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tests.models.initial import initial
from tests.trainer import test_update
from tests.trainer.strategies import pairs
from tests.trainer.strategies import test_grpo as losses
from trainer.config import defaults
from trainer.errors import ConfigError
from trainer.metrics import to_floats
from trainer.strategies import grpo, presets, sequences

EXAMPLES = [(x, y) for x, y, _ in pairs.examples(7)]
ROWS = [[0, 1], [2], [3, 4], [5], [], [6], [], []]
EVERYTHING = dict(ratio="sequence", kl_coef=0.2, kl_corrected=True, entropy_coef=0.05, clip_low=0.1, clip_high=0.1,
                  correction="sequence_truncate", correction_max=1.05)


@functools.cache
def model_and_params():
  model = tiny.model()
  return model, *(initial(model, seed) for seed in (0, 1))


def laid_out(rows, length=48, segments=3):
  """A batch of rows of numbers of EXAMPLES, each with its advantage and its log-probs wherever it stands."""
  batch = losses.batch_of([[EXAMPLES[i] for i in row] for row in rows], length, segments)
  rng = np.random.default_rng(5)
  advantages = rng.normal(size=len(EXAMPLES))
  behavior = rng.normal(size=(len(EXAMPLES), 8)) * 0.2 - math.log(losses.VOCAB)
  for row, examples in enumerate(rows):
    for segment, i in enumerate(examples):
      at = (batch["segment_ids"][row] == segment + 1) & (batch["loss_weights"][row] > 0)
      batch["advantages"][row, segment] = advantages[i]
      batch["old_logprobs"][row, at] = behavior[i, :at.sum()]
      batch["behavior_logprobs"][row, at] = behavior[i, :at.sum()] / 1.01
  del batch["ref_logprobs"]
  return batch


def every_aggregate(params, batch, rng, reference):
  """The losses of all aggregations as terms of one objective, of one pass of the policy and one of the reference."""
  model, _, _ = model_and_params()
  terms, passes, token_stats = {}, {}, sequences.token_stats

  def one_pass(model, params, batch, rng, want, *more):
    if want not in passes:  # policy and reference want different things
      passes[want] = token_stats(model, params, batch, rng, want, *more)
    return passes[want]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sequences, "token_stats", one_pass)
    for name in presets.AGGREGATES:
      cfg = losses.cfg_of(aggregate=name, **EVERYTHING)
      own, metrics = grpo.loss(model, params, batch, rng, cfg, reference=reference)
      terms[name] = own["loss"]
  assert passes.keys() == {("logprob", "entropy"), ("logprob",)}
  return terms, metrics


@functools.cache
def compiled():
  """(params, reference, batch) -> ((the sum of the terms, terms and metrics as sums), gradient)."""

  def objective(params, reference, batch):
    terms, metrics = every_aggregate(params, batch, None, reference)
    return sum(jnp.sum(t.sum) / jnp.sum(t.weight) for t in terms.values()), terms | metrics

  return jax.jit(jax.value_and_grad(objective, has_aux=True))


@functools.cache
def updating(micro_batch_size):
  _, reference, _ = model_and_params()  # the update starts from the other parameters
  return test_update.make(micro_batch_size, loss_fn=functools.partial(every_aggregate, reference=reference))


def assert_same_gradient(a, b, tolerance):
  norm = math.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(a)))
  assert norm > 0.05
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, atol=tolerance * norm)


def test_log_probs_are_those_of_the_sequence_alone_at_the_temperature():
  """T12: policy and reference; the loops have them from full logits of single sequences."""
  model, policy, reference = model_and_params()
  batch = laid_out(ROWS)
  logits = np.zeros((2, len(ROWS), 48, losses.VOCAB))
  for row, examples in enumerate(ROWS):
    for segment in range(len(examples)):
      at = np.flatnonzero(batch["segment_ids"][row] == segment + 1)
      ids = np.zeros((1, 16), np.int32)
      ids[0, :len(at)] = batch["tokens"][row, at]
      for k, params in enumerate((policy, reference)):
        alone = np.asarray(pairs.jitted_logits(model)(params, ids), np.float64)
        logits[k, row, at] = alone[0, :len(at), :losses.VOCAB]
  (_, metrics), _ = compiled()(policy, reference, batch)
  values = losses.numbers(metrics)
  with_reference = batch | {"ref_logprobs": losses.logps(logits[1], batch)}
  for name in presets.AGGREGATES:
    cfg = losses.cfg_of(aggregate=name, **EVERYTHING)
    assert values[name] == pytest.approx(losses.by_loops(logits[0], logits[0], with_reference, cfg), rel=1e-5)


def test_precomputed_log_probs_of_the_reference_give_the_same_loss():
  model, policy, reference = model_and_params()
  batch, cfg = laid_out(ROWS), losses.cfg_of(**EVERYTHING)
  stored = jax.jit(lambda p, b: sequences.token_logprobs(model, p, b, cfg.temperature))(reference, batch)
  batch["ref_logprobs"] = np.asarray(stored)
  # The parameters given as reference are not looked at.
  value, _ = jax.jit(lambda p, b: losses.objective(model, p, b, cfg, reference=p))(policy, batch)
  (_, metrics), _ = compiled()(policy, reference, laid_out(ROWS))
  assert float(value) == pytest.approx(losses.numbers(metrics)["token"], rel=1e-6)


def test_packing_and_padding_change_neither_loss_nor_gradient():
  """I3: one sequence a row; all in two longer rows in another order, with room for more than there are."""
  _, params, reference = model_and_params()
  (value, metrics), gradient = compiled()(params, reference, laid_out(ROWS))
  for rows, length, segments in (([[i] for i in range(7)], 24, 1), ([[6, 5, 4], [3, 2, 1, 0]], 64, 6)):
    (other, other_metrics), other_gradient = compiled()(params, reference, laid_out(rows, length, segments))
    assert float(other) == pytest.approx(float(value), rel=1e-6)
    assert_same_gradient(gradient, other_gradient, 1e-6)
    assert losses.numbers(other_metrics) == pytest.approx(losses.numbers(metrics), rel=1e-5, abs=1e-6)


def test_micro_batches_do_not_change_the_gradient():
  """I1, T5: micro-batches of two sequences, one and none, for every aggregation; minima and maxima of metrics too."""
  outcomes = []
  for size in (8, 1):
    update, state = updating(size)
    new, metrics = update(state, laid_out(ROWS))
    gradient = jax.tree.map(lambda a, b: np.asarray(a - b), state["params"], new["params"])
    outcomes.append((gradient, to_floats(jax.device_get(metrics))))
  (whole, whole_metrics), (split, split_metrics) = outcomes
  assert_same_gradient(whole, split, 1e-6)
  assert split_metrics == pytest.approx(whole_metrics, rel=1e-5, abs=1e-6)
  assert {"token/a", "clip_ratio/high_max", "sampling/importance_sampling_ratio/min"} <= set(whole_metrics)


def test_a_step_of_nothing_is_zero():
  """Every completion failed, say: no value, no gradient, nothing that is not finite."""
  update, state = updating(8)
  new, metrics = update(state, laid_out([[]] * 8))
  for a, b in zip(jax.tree.leaves(state["params"]), jax.tree.leaves(new["params"]), strict=True):
    np.testing.assert_array_equal(a, b)
  floats = to_floats(jax.device_get(metrics))
  assert "token" not in floats and "clip_ratio/high_max" not in floats and floats["nonfinite"] == 0


def test_eight_devices_give_what_one_gives():
  """I2."""
  _, params, reference = model_and_params()
  batch = laid_out(ROWS)
  (value, metrics), gradient = compiled()(params, reference, batch)
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  put = lambda tree, *spec: jax.device_put(tree, jax.NamedSharding(mesh, jax.P(*spec)))  # noqa: E731
  (other, other_metrics), other_gradient = compiled()(put(params), put(reference), put(batch, "data"))
  assert float(other) == pytest.approx(float(value), rel=1e-6)
  assert_same_gradient(gradient, other_gradient, 1e-5)
  assert losses.numbers(other_metrics) == pytest.approx(losses.numbers(metrics), rel=1e-5, abs=1e-6)


def test_no_logits_for_the_whole_vocabulary_in_the_compiled_program():
  """4 × 40 × 2048 = 327,680 numbers; with chunks of 128 the largest array is the embedding, 2048 × 16 = 32,768."""
  rows, length, vocab = 4, 40, 2048

  def largest(chunk):
    model = tiny.model(vocab_size=vocab, vocab_chunk=chunk)
    params = jax.eval_shape(model.init, jax.random.key(0))
    batch = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in laid_out([[]] * rows, length).items()}
    cfg = losses.cfg_of(**EVERYTHING)
    fn = jax.grad(lambda p, r, b: losses.objective(model, p, b, cfg, reference=r), has_aux=True)
    hlo = jax.jit(fn).lower(params, params, batch).compile().as_text()
    sizes = re.findall(r"[fsup][a-z0-9]+\[([0-9,]+)\]", hlo)
    return max(math.prod(map(int, dims.split(","))) for dims in sizes)

  assert largest(128) == vocab * 16
  # The same search does find them where they exist.
  assert largest(vocab) >= rows * length * vocab


# ----------------------------------------------------------------------------------------------
# Options.


@pytest.mark.parametrize("changed, message", [
    (dict(preset="ppo"), "strategy.preset is 'ppo'; allowed: grpo, dapo"),
    (dict(ratio="word"), "strategy.ratio is 'word'; allowed: token, sequence"),
    (dict(clip="both"), "strategy.clip is 'both'; allowed: ppo, cispo, sapo, none"),
    (dict(aggregate="mean"), "allowed: token, sequence, constant"),
    (dict(baseline="mean"), "baseline is 'mean'; allowed: group, leave_one_out, batch, none"),
    (dict(baseline="none"), "scale is 'group' with baseline 'none'"),
    (dict(clip_low=1.5), "strategy.clip_low is 1.5"),
    (dict(clip_high=-0.1), "strategy.clip_high is -0.1"),
    (dict(clip_dual=0.9), "strategy.clip_dual is 0.9"),
    (dict(clip="cispo", clip_high=0.2), "cap on the ratio itself"),
    (dict(aggregate="constant", aggregate_length=0), "strategy.aggregate_length is 0"),
    (dict(correction="vllm"), "allowed: none, token_truncate, token_mask, sequence_truncate, sequence_mask"),
    (dict(correction="token_mask", correction_max=0.5), "strategy.correction_min is 0.0, correction_max 0.5"),
    (dict(temperature=0.0), "strategy.temperature is 0.0"),
    (dict(kl_coef=-0.1), "strategy.kl_coef is -0.1"),
    (dict(entropy_coef=math.inf), "strategy.entropy_coef is inf"),
    (dict(kl_coef=0.1, kl="k4"), "allowed: k1, k2, k3"),
    (dict(kl_coef=0.1, kl="k1"), "'k1' without kl_corrected: its gradient"),
    (dict(kl_coef=0.1, reference="none"), "compares the policy with one"),
    (dict(kl_coef=0.1, reference_ema=1.5), "strategy.reference_ema is 1.5"),
    (dict(kl_coef=0.1, reference_ema=0.5, reference_ema_steps=0), "strategy.reference_ema_steps is 0"),
])
def test_options_that_cannot_work(changed, message):
  with pytest.raises(ConfigError, match=re.escape(message)):
    presets.check(losses.cfg_of(**changed), 1)


def test_options_that_can():
  for changed in ({}, dict(kl_coef=0.1, kl="k1", kl_corrected=True), dict(clip="none", clip_low=None, clip_high=None),
                  dict(kl_coef=0.0, kl="k1", reference="none"), dict(clip_dual=3.0), dict(clip="cispo", clip_high=5.0)):
    presets.check(losses.cfg_of(**changed), 4)


def test_noise_without_effect_is_refused():
  cfg_model = defaults().model
  cfg_model.dropout = 0.25
  with pytest.raises(ConfigError, match="model.dropout is 0.25, but strategy.disable_dropout"):
    presets.check(losses.cfg_of(), 1, cfg_model)
  presets.check(losses.cfg_of(disable_dropout=False), 1, cfg_model)


def test_a_reference_is_needed_for_the_penalty_alone():
  model, params, _ = model_and_params()
  assert grpo.needs_reference(losses.cfg_of(kl_coef=0.1)) and not grpo.needs_reference(losses.cfg_of())
  with pytest.raises(ValueError, match="no ref_logprobs"):
    jax.eval_shape(lambda p, b: grpo.loss(model, p, b, None, losses.cfg_of(kl_coef=0.1)), params, laid_out(ROWS))
