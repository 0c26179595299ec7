"""The update: exact accumulation (I1), the finite guard (I14), per-source metrics, clipping, EMA."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tests.models.initial import initial
from trainer import state as state_lib
from trainer import update as update_lib
from trainer.config import defaults
from trainer.config.checks import View
from trainer.metrics import Mean, to_floats
from trainer.optim import optimizer as optim
from trainer.strategies import seq


def make(micro_batch_size, *, optimizer=None, clip_norm=0.0, ema_decay=0.0, loss_fn=None, sources=("a", "b"),
         freeze=(), dropout=0.0, reference_mix=(0.0, 1)):
  """(update_fn, state) of a tiny model; by default plain SGD of rate 1, whose step is minus the gradient."""
  model = tiny.model(dropout=dropout)
  config = defaults()
  config.optimizer.update(optimizer or dict(name="sgd", learning_rate=1.0, momentum=0.0, nesterov=False,
                                            weight_decay=0.0))
  config.optimizer.freeze = freeze
  config.schedule.update(name="constant", warmup_percent=-1.0, warmup_steps=0)
  optimizer = optim.make_optimizer(config.optimizer, config.schedule, model.abstract_params(), total_steps=10,
                                   to_steps=lambda cfg, prefix, default=None, where="": 0)
  strategy = View(config.strategy)
  loss_fn = loss_fn or (lambda params, batch, rng: seq.loss(model, params, batch, rng if dropout else None, strategy))
  update = update_lib.make_update_fn(loss_fn, optimizer, update_lib.Options(
      seed=0, micro_batch_size=micro_batch_size, clip_norm=clip_norm, ema_decay=ema_decay, source_names=sources,
      reference_mix=reference_mix))
  state = jax.jit(state_lib.make_fresh(optimizer, ema=ema_decay > 0))(initial(model, 1))
  return jax.jit(update), state


@functools.cache
def plain(micro_batch_size):
  """That of `make` without more, traced once."""
  return make(micro_batch_size)


@functools.cache
def step_with(micro_batch_size, seed):
  update, state = plain(micro_batch_size)
  new, metrics = update(state, tiny.batch(8, 16, seed))
  gradient = jax.tree.map(lambda a, b: np.asarray(a - b), state["params"], new["params"])
  return gradient, to_floats(jax.device_get(metrics))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_micro_batches_do_not_change_the_gradient(micro_batch_size, seed):
  """I1: 1×8, 2×4, 4×2 and 8×1 micro-batches of ragged rows, one of them empty."""
  whole, whole_metrics = step_with(8, seed)
  split, split_metrics = step_with(micro_batch_size, seed)
  norm = np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(whole)))
  assert norm > 0.1
  for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(split), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6 * norm)
  for name, value in whole_metrics.items():
    assert split_metrics[name] == pytest.approx(value, rel=1e-5), name


def test_the_loss_is_the_weighted_mean_over_the_whole_step():
  """A reference without any of the update's code: full logits, numpy, one division."""
  model, batch = tiny.model(), tiny.batch(8, 16)
  _, state = plain(2)
  logits = np.asarray(jax.jit(model.logits)(state["params"], batch), np.float64)[..., :24]
  logp = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
  nll = -np.take_along_axis(logp[:, :-1], batch["tokens"][:, 1:, None], axis=-1)[..., 0]
  weights = batch["loss_weights"][:, 1:]
  _, metrics = step_with(2, 0)
  assert metrics["loss"] == pytest.approx(np.sum(nll * weights) / np.sum(weights), rel=1e-6)
  for index, name in enumerate("ab"):
    mine = batch["source_ids"] == index
    expected = np.sum(nll[mine] * weights[mine]) / np.sum(weights[mine])
    assert metrics[f"loss/{name}"] == pytest.approx(expected, rel=1e-6)
  assert metrics["trained_tokens"] == pytest.approx(weights.sum())


def _two_terms(params, batch, rng):
  """Cross-entropy per trained token, and the mean square of the hidden states over all real tokens."""
  model = tiny.model()
  terms, metrics = seq.loss(model, params, batch, rng, View(defaults().strategy))
  real_BxT = batch["segment_ids"] > 0
  square_BxT = jnp.square(model.apply(params, batch).hidden).mean(-1)
  terms["square"] = Mean(0.3 * jnp.sum(square_BxT * real_BxT, axis=1), jnp.sum(real_BxT, axis=1))
  return terms, metrics


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_each_term_is_divided_by_its_own_total(micro_batch_size):
  """T4: a second term with another weight is a mean of its own, whatever the micro-batches."""
  update, state = make(micro_batch_size, loss_fn=_two_terms)
  batch = tiny.batch(8, 16)

  def objective(params):
    terms, _ = _two_terms(params, batch, None)
    return sum(jnp.sum(t.sum) / jnp.sum(t.weight) for t in terms.values())

  expected, gradient = jax.jit(jax.value_and_grad(objective))(state["params"])
  new, metrics = update(state, batch)
  values = to_floats(jax.device_get(metrics))
  assert values["objective"] == pytest.approx(float(expected), rel=1e-6)
  assert values["loss"] + values["square"] == pytest.approx(values["objective"], rel=1e-6)
  norm = float(optim.global_norm(gradient))
  for before, after, g in zip(*map(jax.tree.leaves, (state["params"], new["params"], gradient)), strict=True):
    np.testing.assert_allclose(before - after, g, atol=1e-6 * norm)


def test_counting_the_weights_computes_no_forward_pass():
  """The compiler removes all of the call that finds the totals, but for the weights."""
  update, state = plain(8)
  model, batch = tiny.model(), tiny.batch(8, 16)

  def backward_alone(params):
    terms, _ = seq.loss(model, params, batch, None, View(defaults().strategy))
    return jnp.sum(terms["loss"].sum)

  products = jax.jit(jax.value_and_grad(backward_alone)).lower(state["params"]).compile().as_text().count(" dot(")
  assert update.lower(state, batch).compile().as_text().count(" dot(") == products > 0


def test_donating_the_state_changes_nothing():
  """I11, its last part; the rest is in tests/models."""
  update, state = make(4, optimizer=dict(name="muon"))
  donating = jax.jit(update, donate_argnums=0)
  kept, given = state, jax.tree.map(jnp.copy, state)
  for seed in range(3):
    kept, _ = update(kept, tiny.batch(8, 16, seed))
    given, _ = donating(given, tiny.batch(8, 16, seed))
  for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(given), strict=True):
    np.testing.assert_array_equal(a, b)


def test_nothing_to_train_is_a_zero_gradient():
  update, state = plain(2)
  batch = tiny.batch(8, 16)
  batch["loss_weights"] = np.zeros_like(batch["loss_weights"])
  new, metrics = update(state, batch)
  values = to_floats(jax.device_get(metrics))
  assert values["grad_norm"] == 0.0 and values["nonfinite"] == 0 and "loss" not in values
  for a, b in zip(jax.tree.leaves(state["params"]), jax.tree.leaves(new["params"]), strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_a_step_that_trains_nothing_changes_nothing(micro_batch_size):
  """Not by weight decay, momentum, a term of the model's own, the moving average or the reference that follows."""
  def with_model_losses(params, batch, rng, reference):
    return _two_terms(params, batch, rng)

  model = tiny.model()
  update, state = make(micro_batch_size, optimizer=dict(name="adamw", weight_decay=0.5), ema_decay=0.9,
                       loss_fn=with_model_losses, reference_mix=(0.5, 1))
  state["reference"] = jax.jit(model.init)(jax.random.key(9))
  state, _ = update(state, tiny.batch(8, 16))
  nothing = tiny.batch(8, 16)
  nothing["loss_weights"] = np.zeros_like(nothing["loss_weights"])
  after, metrics = update(state, nothing)
  assert int(after.pop("step")) == int(state["step"]) + 1 and after.keys() | {"step"} == state.keys()
  for part in after:
    for a, b in zip(jax.tree.leaves(state[part]), jax.tree.leaves(after[part]), strict=True):
      np.testing.assert_array_equal(a, b, err_msg=part)
  values = to_floats(jax.device_get(metrics))
  assert values["trained_tokens"] == values["update_norm"] == values["nonfinite"] == 0 and "loss" not in values
  assert all(np.isfinite(value) for value in values.values())
  moved, _ = update({**after, "step": state["step"] + 1}, tiny.batch(8, 16))
  for part in ("params", "opt", "ema", "reference"):
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (after[part], moved[part])), strict=True)), part


def test_the_reference_moves_every_third_step_by_its_share_towards_the_parameters_after_it():
  """r ← 0.25 p + 0.75 r after updates 3 and 6, p being what update 3 or 6 made."""
  update, state = make(8, loss_fn=lambda params, batch, rng, reference: _two_terms(params, batch, rng),
                       reference_mix=(0.25, 3))
  state["reference"] = jax.tree.map(lambda p: p + 1.0, state["params"])
  for step in range(1, 7):
    before = state["reference"]
    state, _ = update(state, tiny.batch(8, 16, step))
    for r, was, p in zip(*map(jax.tree.leaves, (state["reference"], before, state["params"])), strict=True):
      wanted = 0.25 * np.asarray(p, np.float64) + 0.75 * np.asarray(was, np.float64) if step % 3 == 0 else was
      np.testing.assert_allclose(r, wanted, rtol=1e-6, atol=1e-7)
  assert any(np.any(np.abs(np.asarray(a) - b) > 1e-4) for a, b in zip(
      jax.tree.leaves(state["params"]), jax.tree.leaves(make(8)[1]["params"]), strict=True))  # they moved


@pytest.mark.parametrize("weight, moved", [(1.0, [0.5, -0.5]), (0.0, [0.0, 0.0])])
def test_biases_of_the_choice_of_experts_stay_where_nothing_is_trained(weight, moved):
  """Two experts with 3 and 9 of the tokens: rate 0.5 towards the one that got less, if anything was trained."""
  class Counted:
    """As `models.experts.moe` counts: of each layer, the tokens of its experts."""
    counts = {"blocks/moe": jnp.asarray([[3.0, 9.0]])}

  asked = []
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(update_lib, "evened", lambda trainable, counts, rate, taken: (
        asked.append((counts, rate)),
        {"bias": jnp.where(taken, trainable["bias"] + jnp.asarray([rate, -rate]), trainable["bias"])})[1])
    trained = {"bias": jnp.zeros(2)}
    optimizer = types.SimpleNamespace(
        split=lambda params: (params, {}), merge=lambda trainable, frozen: trainable,
        advance=lambda grads, opt, params, step, taken, prepare: (params, opt, optim.Advance(jnp.float32(0), {})))
    fn = update_lib.make_update_fn(
        lambda params, batch, rng: (
            {"loss": Mean(jnp.sum(params["bias"]) * weight, jnp.float32(weight))}, {"moe": Counted}),
        optimizer, update_lib.Options(0, 4, ("a",), choice_bias_rate=0.5))
    state = {"step": jnp.int32(0), "params": trained, "opt": {}, "nonfinite": jnp.int32(0),
             "nonfinite_in_a_row": jnp.int32(0)}
    batch = {"tokens": jnp.zeros((4, 2), jnp.int32), "loss_weights": jnp.full((4, 2), weight),
             "source_ids": jnp.zeros(4, jnp.int32)}
    new, _ = fn(state, batch)
  np.testing.assert_array_equal(new["params"]["bias"], moved)
  assert asked == [(Counted.counts, 0.5)]


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing(where):
  """I14: parameters, optimizer and EMA stay bitwise; the step is counted and named, the run goes on."""
  model = tiny.model()

  def poisoned(params, batch, rng):
    terms, metrics = seq.loss(model, params, batch, None, View(defaults().strategy))
    bad, loss = jnp.any(batch["tokens"] == 23), terms["loss"]
    if where == "loss":
      return {"loss": Mean(jnp.where(bad, jnp.nan, loss.sum), loss.weight)}, metrics
    # sqrt has an infinite slope at 0: a finite loss with a non-finite gradient (mlx-lm#1658)
    kernel = params["blocks"]["mlp"]["up"]["kernel"]
    steep = jax.lax.cond(bad, lambda k: jnp.sqrt(jnp.sum(k * 0.0)), lambda k: 0.0, kernel)
    return {"loss": Mean(loss.sum + steep, loss.weight)}, metrics

  update, state = make(4, optimizer=dict(name="adamw"), loss_fn=poisoned, ema_decay=0.9)
  good, bad = tiny.batch(8, 16, vocab=23), tiny.batch(8, 16, vocab=23)
  bad["tokens"][3, 3] = 23
  state, _ = update(state, good)
  after_bad, metrics = update(state, bad)
  for part in ("params", "opt", "ema"):
    for a, b in zip(jax.tree.leaves(state[part]), jax.tree.leaves(after_bad[part]), strict=True):
      np.testing.assert_array_equal(a, b)
  values = to_floats(jax.device_get(metrics))
  assert (values["nonfinite"], values["nonfinite_in_a_row"], int(after_bad["step"])) == (1, 1, 2)
  if where == "gradient":
    paths = update_lib.gradient_paths(_adamw(model), model.abstract_params())
    assert paths[int(values["nonfinite_leaf"])] == "blocks/mlp/up/kernel"
  after_good, metrics = update(after_bad, good)
  values = to_floats(jax.device_get(metrics))
  assert (values["nonfinite"], values["nonfinite_in_a_row"]) == (1, 0)
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(after_good))
  assert np.any(after_good["params"]["embed"]["embedding"] != after_bad["params"]["embed"]["embedding"])


def test_an_update_that_is_skipped_says_nothing_of_changed_entries():
  """Of [1, 1] in bfloat16, whose next number below is 1 - 2**-8, an update by [2**-6, 2**-12] changes the first."""
  config, rows = defaults(), np.ones((1, 2), np.float32)
  config.optimizer.update(name="sgd", learning_rate=1.0, momentum=0.0, nesterov=False, weight_decay=0.0)
  config.schedule.update(name="constant", warmup_percent=-1.0, warmup_steps=0)
  params = {"w": jnp.ones(2, jnp.bfloat16)}
  optimizer = optim.make_optimizer(config.optimizer, config.schedule, jax.eval_shape(lambda: params), total_steps=10,
                                   to_steps=lambda cfg, prefix, default=None, where="": 0)

  def loss(params, batch, rng):
    return {"loss": Mean(jnp.sum(params["w"] * batch["x"], axis=1), jnp.ones(1))}, {}

  update = jax.jit(update_lib.make_update_fn(loss, optimizer, update_lib.Options(
      seed=0, micro_batch_size=1, clip_norm=0.0, ema_decay=0.0, source_names=("a",), reference_mix=(0.0, 1))))
  state = jax.jit(state_lib.make_fresh(optimizer, ema=False))(params)
  batch = dict(tokens=np.zeros((1, 2), np.int32), loss_weights=rows, segment_ids=np.ones((1, 2), np.int32),
               source_ids=np.zeros((1, 2), np.int32))
  for x, changed in (([2.0**-6, 2.0**-12], 0.5), ([np.nan, 1.0], None)):
    _, metrics = update(state, batch | dict(x=np.array([x], np.float32)))
    assert to_floats(jax.device_get(metrics)).get("params_changed") == changed


def _adamw(model):
  config = defaults()
  return optim.make_optimizer(config.optimizer, config.schedule, model.abstract_params(), total_steps=10,
                              to_steps=lambda cfg, prefix, default=None, where="": 0)


@pytest.fixture(scope="module")
def clipped():
  """(state, state and metrics after a step that is clipped and averaged)"""
  update, state = make(8, clip_norm=0.01, ema_decay=0.75)
  return state, *update(state, tiny.batch(8, 16))


def test_clipping_bounds_the_step_and_logs_the_norm_before_it(clipped):
  state, new, metrics = clipped
  step = jax.tree.map(lambda a, b: a - b, new["params"], state["params"])
  assert float(optim.global_norm(step)) == pytest.approx(0.01, rel=1e-3)
  assert float(metrics["grad_norm"]) == pytest.approx(step_with(8, 0)[1]["grad_norm"], rel=1e-6) and float(
      metrics["grad_norm"]) > 0.01


def test_ema_follows_with_its_decay(clipped):
  state, new, _ = clipped
  expected = jax.tree.map(lambda e, p: 0.75 * e + 0.25 * p, state["ema"], new["params"])
  for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(new["ema"]), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
  assert np.any(new["ema"]["embed"]["embedding"] != state["ema"]["embed"]["embedding"])


def test_frozen_parameters_do_not_move():
  update, state = make(8, freeze=("^embed/",))
  new, metrics = update(state, tiny.batch(8, 16))
  np.testing.assert_array_equal(new["params"]["embed"]["embedding"], state["params"]["embed"]["embedding"])
  trained = jax.tree.leaves({name: part for name, part in new["params"].items() if name != "embed"})
  assert float(metrics["param_norm"]) == pytest.approx(
      np.sqrt(sum(np.square(np.float64(leaf)).sum() for leaf in trained)), rel=1e-6)
  assert np.any(new["params"]["blocks"]["attn"]["q"]["kernel"] != state["params"]["blocks"]["attn"]["q"]["kernel"])


def _telling(params, batch, rng):
  """A loss of one parameter, and metrics that tell of the key and of which rows there are at once."""
  ones_B = jnp.ones(batch["tokens"].shape[0])
  told = {"draw": jax.random.uniform(rng), "square": jnp.square(jnp.sum(batch["tokens"][:, 0]))}
  return ({"loss": Mean(jnp.sum(params["embed"]["embedding"]) * ones_B, ones_B)},
          {name: Mean(jnp.float32(value), jnp.float32(1.0)) for name, value in told.items()})


def test_each_micro_batch_has_a_key_of_its_own_and_every_fourth_row():
  """Of 8 rows in 4 micro-batches: rows j and j + 4, so that a mesh that splits rows keeps its own."""
  update, state = make(2, loss_fn=_telling)
  batch = tiny.batch(8, 16)
  batch["tokens"] = jnp.asarray(batch["tokens"]).at[:, 0].set(jnp.arange(8))
  metrics = to_floats(jax.device_get(update({**state, "step": state["step"] + 3}, batch)[1]))
  keys = [jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 3), index) for index in range(4)]
  assert metrics["draw"] == pytest.approx(np.mean([jax.random.uniform(key) for key in keys]), rel=1e-6)
  assert metrics["square"] == pytest.approx(np.mean([(j + j + 4) ** 2 for j in range(4)]), rel=1e-6)


def test_dropout_is_a_function_of_seed_and_step():
  update, state = make(4, dropout=0.3)
  batch = tiny.batch(8, 16)
  first, again = update(state, batch)[1], update(state, batch)[1]
  later = update({**state, "step": state["step"] + 1}, batch)[1]
  assert to_floats(first)["loss"] == to_floats(again)["loss"] != to_floats(later)["loss"]
