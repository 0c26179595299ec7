"""Optimizers against references written by hand, and what the per-parameter rules do."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import api
from trainer import tree as tree_lib
from trainer.config import defaults, durations
from trainer.errors import ConfigError
from trainer.optim import optimizer as optim
from trainer.optim import transforms

SHAPES = {
    "embed/embedding": (11, 8),
    "blocks/attn/q/kernel": (2, 8, 8),
    "blocks/attn/q/bias": (2, 8),
    "blocks/mlp/down/kernel": (2, 16, 8),
    "final_norm/scale": (8,),
    "unembed/kernel": (8, 11),
}
TOTAL = 20


def tree(seed, dtype=jnp.float32, shapes=SHAPES):
  rng = np.random.default_rng(seed)
  return tree_lib.unflatten({path: jnp.asarray(rng.normal(size=shape), dtype) for path, shape in shapes.items()})


def make(params=None, schedule=None, **changed):
  """An optimizer of the default config with some keys changed; constant learning rate unless given."""
  config = defaults()
  config.optimizer.update(changed)
  config.schedule.update({"name": "constant", "warmup_percent": -1.0} | (schedule or {}))
  to_steps = functools.partial(
      durations.steps, run=durations.RunLengths(TOTAL, batch_size=8, seq_len=16, rows_per_epoch=None))
  shapes = jax.eval_shape(lambda: tree(0) if params is None else params)
  return optim.make_optimizer(config.optimizer, config.schedule, shapes, total_steps=TOTAL, to_steps=to_steps)


def first_update(optimizer, params=None, grads=None, step=0):
  """Flat updates of the first step."""
  params, grads = params or tree(0), grads or tree(1)
  trainable, _ = optimizer.split(params)
  updates, _ = jax.jit(optimizer.update)(optimizer.split(grads)[0], optimizer.init(trainable), trainable, step)
  return tree_lib.flatten(updates)


def test_adamw_equals_a_hand_written_one_with_decoupled_decay():
  optimizer = make(learning_rate=0.1, b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.5, wd_mults=(("bias$", 0.0),),
                   schedule={"name": "linear", "floor": 0.0, "warmup_steps": 2})
  params = tree(0)
  state = optimizer.init(params)
  update = jax.jit(optimizer.update)
  ours = {path: np.float64(p) for path, p in tree_lib.flatten(params).items()}
  m = dict.fromkeys(ours, 0.0)
  v = dict.fromkeys(ours, 0.0)
  factors = [0.5, 1.0, 18 / 19]
  for step in range(3):
    grads = tree(10 + step)
    updates, state = update(grads, state, params, step)
    params = optax.apply_updates(params, updates)
    for path, g in tree_lib.flatten(grads).items():
      g = np.float64(g)
      m[path] = 0.8 * m[path] + 0.2 * g
      v[path] = 0.9 * v[path] + 0.1 * g**2
      m_hat, v_hat = m[path] / (1 - 0.8 ** (step + 1)), v[path] / (1 - 0.9 ** (step + 1))
      decay = 0.0 if path.endswith("bias") else 0.5
      ours[path] -= 0.1 * factors[step] * (m_hat / (np.sqrt(v_hat) + 1e-3) + decay * ours[path])
  for path, p in tree_lib.flatten(params).items():
    np.testing.assert_allclose(p, ours[path], rtol=2e-5, atol=2e-6, err_msg=path)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_equals_a_hand_written_one(nesterov):
  optimizer = make(name="sgd", learning_rate=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.0)
  params, path = tree(0), "final_norm/scale"
  state, trace = optimizer.init(params), 0.0
  for step in range(3):
    updates, state = optimizer.update(tree(5 + step), state, params, step)
    g = np.asarray(tree_lib.flatten(tree(5 + step))[path])
    trace = g + 0.9 * trace
    expected = -0.1 * (g + 0.9 * trace if nesterov else trace)
    np.testing.assert_allclose(tree_lib.flatten(updates)[path], expected, rtol=1e-5)


def test_lion_updates_are_signs_of_the_interpolated_momentum():
  optimizer = make(name="lion", learning_rate=0.1, b1=0.9, b2=0.5, weight_decay=0.0)
  params, path = tree(0), "final_norm/scale"
  _, state = optimizer.update(tree(1), optimizer.init(params), params, 0)
  updates, _ = optimizer.update(tree(2), state, params, 1)
  g1, g2 = (np.asarray(tree_lib.flatten(tree(seed))[path]) for seed in (1, 2))
  np.testing.assert_allclose(tree_lib.flatten(updates)[path], -0.1 * np.sign(0.9 * 0.5 * g1 + 0.1 * g2), rtol=1e-6)


def test_adafactor_equals_optax_matrix_by_matrix():
  shapes = {"blocks/q/kernel": (3, 6, 4), "blocks/q/bias": (3, 5), "embed/embedding": (9, 5), "s/scale": (7,),
            "thin/kernel": (3, 6)}  # with one side below 4
  direction = transforms.adafactor(0.8, 4)
  params = tree(0, shapes=shapes)
  state = direction.init(params)
  reference = optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=4), optax.clip_by_block_rms(1.0))
  # Each layer of a stacked leaf is a leaf of its own for the reference.
  layers = {path: [*x] if path.startswith("blocks") else [x] for path, x in tree_lib.flatten(params).items()}
  ref_state = reference.init(layers)
  for seed in (1, 2, 3):
    grads = tree(seed, shapes=shapes)
    directed, state = jax.jit(direction.update)(grads, state)
    ref_grads = {p: [*g] if p.startswith("blocks") else [g] for p, g in tree_lib.flatten(grads).items()}
    expected, ref_state = jax.jit(reference.update)(ref_grads, ref_state, layers)
    for path, got in tree_lib.flatten(directed).items():
      np.testing.assert_allclose(got if path.startswith("blocks") else got[None], jnp.stack(expected[path]),
                                 rtol=1e-5, atol=1e-6, err_msg=path)
  kept = {path: leaf.shape for path, leaf in tree_lib.flatten(state).items()}
  assert kept == {
      "count": (), "v_row/blocks/q/kernel": (3, 6), "v_col/blocks/q/kernel": (3, 4),
      "v_row/embed/embedding": (9,), "v_col/embed/embedding": (5,), "v/blocks/q/bias": (3, 5), "v/s/scale": (7,),
      "v/thin/kernel": (3, 6)}


@pytest.mark.parametrize("name, options, directions", [
    ("adafactor", dict(decay_exponent=0.6, min_dim_size_to_factor=3), dict(adafactor=transforms.adafactor(0.6, 3))),
    ("muon", dict(momentum=0.7, nesterov=False, muon_steps=2, b1=0.6, b2=0.8, eps=0.01),
     dict(muon=transforms.muon(0.7, False, 2), adam=transforms.adam(0.6, 0.8, 0.01))),
])
def test_the_options_of_the_config_are_those_of_the_direction(name, options, directions):
  optimizer, params = make(name=name, learning_rate=0.5, weight_decay=0.0, **options), tree(0)
  assert optimizer.parts.keys() == directions.keys()
  of_part = {part: {path: x for path, x in tree_lib.flatten(params).items() if path in optimizer.parts[part][0]}
             for part in directions}
  states = {part: directions[part].init(tree_lib.unflatten(of_part[part])) for part in directions}
  state = optimizer.init(params)
  for step in range(2):
    grads = tree(step + 1)
    updates, state = jax.jit(optimizer.update)(grads, state, params, step)
    found = tree_lib.flatten(updates)
    for part, direction in directions.items():
      some = tree_lib.unflatten({path: tree_lib.flatten(grads)[path] for path in of_part[part]})
      directed, states[part] = jax.jit(direction.update)(some, states[part])
      for path, wanted in tree_lib.flatten(directed).items():
        np.testing.assert_allclose(found.pop(path), -0.5 * wanted, rtol=1e-5, atol=1e-7, err_msg=path)
    assert not found


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (3, 24, 40)])
def test_orthogonalised_matrices_keep_their_directions_with_singular_values_near_one(shape):
  x = np.random.default_rng(0).normal(size=shape) * 1e-3
  result = np.asarray(jax.jit(transforms.orthogonalise)(jnp.asarray(x, jnp.float32)))
  singular = np.linalg.svd(result, compute_uv=False)
  # What five iterations make of any start between 0.0015 and 1.
  assert singular.min() >= 0.679 and singular.max() <= 1.203
  # The reference acts on the singular values alone.
  u, s, vt = np.linalg.svd(x, full_matrices=False)
  s = s / np.linalg.norm(s, axis=-1, keepdims=True)
  for _ in range(5):
    s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
  np.testing.assert_allclose(result, (u * s[..., None, :]) @ vt, atol=1e-4)


def test_orthogonalising_a_batch_equals_matrix_by_matrix():
  orthogonalise = jax.jit(transforms.orthogonalise)
  x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 24, 16)), jnp.float32)
  singly = jnp.stack([jnp.stack([orthogonalise(m) for m in layer]) for layer in x])
  np.testing.assert_allclose(orthogonalise(x), singly, atol=1e-5)
  np.testing.assert_allclose(orthogonalise(x), orthogonalise(x.swapaxes(-1, -2)).swapaxes(-1, -2), atol=1e-5)


def test_orthogonalising_does_not_depend_on_scale_and_keeps_zero():
  x = jnp.asarray(np.random.default_rng(1).normal(size=(16, 24)), jnp.float32)
  np.testing.assert_allclose(transforms.orthogonalise(x * 1e-30), transforms.orthogonalise(x * 1e30), atol=1e-4)
  assert not transforms.orthogonalise(jnp.zeros((2, 4, 3))).any()


def test_muon_serves_hidden_matrices_and_adam_the_rest():
  optimizer = make(name="muon")
  muon, adam = optimizer.parts["muon"][0], optimizer.parts["adam"][0]
  assert muon == {"blocks/attn/q/kernel", "blocks/mlp/down/kernel"}
  assert muon | adam == set(SHAPES) and not muon & adam
  muon_updates, adam_updates = first_update(optimizer), first_update(make(name="adamw"))
  for path in adam:
    assert (muon_updates[path] == adam_updates[path]).all(), path
  # Nested parts of larger models, too.
  shapes = {"pos_embed/kernel": (4, 4), "text/embed/kernel": (4, 4), "text/embedder/kernel": (4, 4)}
  assert make(tree(0, shapes=shapes), name="muon").parts["muon"][0] == {"text/embedder/kernel"}


ATTENTION = {f"blocks/attn/{p}/kernel" for p in "qkvo"}
MLP = {f"blocks/mlp/{p}/kernel" for p in ("gate", "up", "down")}
# Of Jordan's definition, https://kellerjordan.github.io/posts/muon: "hidden layers"; not the embedding, the head,
# scalars and vectors. Patches are embedded by the convolution that is a tower's first layer; the columns of a router
# and a gate are one classifier each, as a head's.
HIDDEN = {
    "gpt2": (dict(positions="learned", max_positions=8, tie_embeddings=False, activation="gelu", mlp_bias=True,
                  qkv_bias=True), ATTENTION | (MLP - {"blocks/mlp/gate/kernel"})),
    "experts": (dict(moe=dict(num_experts=4, shared_size=8, shared_gate=True)),
                ATTENTION | {f"blocks/moe/{of}/{p}/kernel" for of in ("experts", "shared")
                             for p in ("gate", "up", "down")}),
    "clip": (dict(vision=dict(tower="clip", projector="mlp")),
             ATTENTION | MLP | {f"vision/{path}" for path in ATTENTION}
             | {f"{of}/{p}/kernel" for of in ("vision/blocks/mlp", "projector") for p in ("up", "down")}),
    "siglip": (dict(vision=dict(tower="siglip", projector="pool", tokens_per_image=1)),
               ATTENTION | MLP | {f"vision/{path}" for path in ATTENTION}
               | {"vision/blocks/mlp/up/kernel", "vision/blocks/mlp/down/kernel", "projector/linear/kernel"}),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_muon_serves_hidden_matrices_of_whole_models(name):
  changed, hidden = HIDDEN[name]
  cfg = defaults().model
  cfg.update(num_layers=2, hidden_size=8, intermediate_size=16, num_heads=2)
  cfg.vision.update(image_size=28, num_layers=1, hidden_size=8, intermediate_size=16, num_heads=2, image_token=3)
  cfg.update(changed)
  model = api.make_model(cfg, vocab_size=11, params_dtype="float32", compute_dtype="float32")
  optimizer = make(model.abstract_params(), name="muon")
  assert optimizer.parts["muon"][0] == hidden
  assert optimizer.parts["adam"][0] == set(tree_lib.flatten(model.abstract_params())) - hidden


def test_muon_leaves_out_what_a_model_of_ones_own_says_and_what_is_no_matrix():
  shapes = {"conv_1/kernel": (3, 3, 4, 4), "stem/deconv/kernel": (3, 3, 4, 4), "score/kernel": (4, 1),
            "lm_head/kernel": (4, 6), "first/kernel": (4, 4), "second/kernel": (2, 3, 4, 4)}
  params = tree(0, shapes=shapes)
  assert make(params, name="muon").parts["muon"][0] == {"first/kernel", "second/kernel"}
  assert make(params, name="muon", muon_exclude=("^first/",)).parts["muon"][0] == {
      "conv_1/kernel", "stem/deconv/kernel", "lm_head/kernel", "second/kernel"}
  with pytest.raises(ConfigError, match=r"optimizer\.muon_exclude: the pattern 'frist'.*'first' instead of 'frist'"):
    make(params, name="muon", muon_exclude=("frist",))
  adapters = {"blocks/attn/q/lora_a": (2, 4, 2), "blocks/attn/q/lora_b": (2, 2, 4)}
  with pytest.raises(ConfigError, match="adapters are factors.*optimizer.name=adamw"):
    make(tree(0, shapes=adapters), name="muon")


@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 24, 96), (96, 24)])
def test_muon_updates_have_the_rms_of_adam_updates(shape):
  params = {"kernel": jnp.zeros(shape)}
  grads = {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)}
  update = first_update(make(params, name="muon", learning_rate=0.5), params, grads)["kernel"]
  # An orthogonal matrix would give 0.2 exactly; singular values lie between 0.68 and 1.21.
  assert 0.2 * 0.68 < float(jnp.sqrt(jnp.mean(update**2))) / 0.5 < 0.2 * 1.21
  assert float(jnp.sum(update * grads["kernel"])) < 0


@pytest.mark.parametrize("name", optim.NAMES)
def test_every_optimizer_reduces_a_quadratic(name):
  target = tree(3)
  params = jax.tree.map(jnp.zeros_like, target)
  optimizer = make(name=name, learning_rate=0.02, weight_decay=0.0, min_dim_size_to_factor=8)

  def loss(params):
    return sum(jnp.sum((p - t) ** 2) for p, t in zip(jax.tree.leaves(params), jax.tree.leaves(target), strict=True))

  @jax.jit
  def train(params, state, step):
    updates, state = optimizer.update(jax.grad(loss)(params), state, params, step)
    return optax.apply_updates(params, updates), state

  state, start = optimizer.init(params), float(loss(params))
  for step in range(TOTAL):
    params, state = train(params, state, step)
  assert float(loss(params)) < 0.8 * start


@pytest.mark.parametrize("name", optim.NAMES)
def test_state_is_float32_shaped_by_eval_shape_and_follows_parameter_paths(name):
  optimizer = make(name=name)
  params = tree(0, jnp.bfloat16)
  state = optimizer.init(params)
  shapes = jax.eval_shape(optimizer.init, params)
  same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), shapes, state)
  assert all(jax.tree.leaves(same))
  moments = {path: leaf for path, leaf in tree_lib.flatten(state).items() if leaf.ndim}
  assert {leaf.dtype for leaf in moments.values()} == {jnp.dtype(jnp.float32)}
  for path, leaf in moments.items():
    owner = next(param for param in SHAPES if path.endswith(param))
    assert leaf.shape == SHAPES[owner]
  updates, new_state = jax.jit(optimizer.update)(tree(1, jnp.bfloat16), state, params, 0)
  assert jax.tree.structure(new_state) == jax.tree.structure(state)
  assert jax.tree.map(lambda x: x.dtype, new_state) == jax.tree.map(lambda x: x.dtype, state)
  assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype(jnp.float32)}


def test_frozen_parameters_have_neither_gradient_nor_state():
  optimizer = make(name="muon", freeze=("embed", "attn/q/kernel"))
  params = tree(0)
  trainable, frozen = optimizer.split(params)
  assert set(tree_lib.flatten(frozen)) == {"embed/embedding", "blocks/attn/q/kernel", "unembed/kernel"}
  assert set(tree_lib.flatten(trainable)) == optimizer.trainable == SHAPES.keys() - tree_lib.flatten(frozen).keys()
  merged = optimizer.merge(trainable, frozen)
  assert jax.tree.structure(merged) == jax.tree.structure(params)
  assert all(a is b for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(params), strict=True))
  state = tree_lib.flatten(optimizer.init(trainable))
  assert not [path for path in state for gone in tree_lib.flatten(frozen) if path.endswith(gone)]
  assert set(first_update(optimizer)) == optimizer.trainable
  assert optimizer.notes[-1] == "frozen: 304 parameters in 3 arrays"


def test_freezing_does_not_change_the_others():
  whole, part = first_update(make()), first_update(make(freeze=("blocks",)))
  for path, update in part.items():
    assert (update == whole[path]).all()


def test_what_is_frozen_stays_frozen_among_what_alone_is_trained():
  """As with adapters: of the blocks, which are all that may be trained, the config freezes attention."""
  config = defaults()
  config.optimizer.freeze = ("attn",)
  optimizer = optim.make_optimizer(config.optimizer, config.schedule, jax.eval_shape(lambda: tree(0)), only="^blocks/",
                                   total_steps=TOTAL, to_steps=lambda cfg, prefix, default=None, where="": 0)
  assert optimizer.trainable == {"blocks/mlp/down/kernel"}


def test_freezing_everything_is_an_error():
  with pytest.raises(ConfigError, match="freezes all 6 parameters"):
    make(freeze=(".",))


@pytest.mark.parametrize("name", optim.NAMES)
def test_lr_mults_scale_updates_exactly_weight_decay_included(name):
  plain = first_update(make(name=name, weight_decay=0.3))
  halved = first_update(make(name=name, weight_decay=0.3, lr_mults=(("attn", 0.5),)))
  for path, update in plain.items():
    np.testing.assert_array_equal(halved[path], update * (0.5 if "attn" in path else 1))


def test_wd_mults_scale_only_the_decay():
  params, path = tree(0), "blocks/attn/q/kernel"
  p = tree_lib.flatten(params)[path]
  def change(weight_decay, **rules):
    return first_update(make(learning_rate=0.5, weight_decay=weight_decay, **rules))
  without = change(0.0)
  np.testing.assert_allclose(change(0.2)[path] - without[path], -0.5 * 0.2 * p, atol=1e-6)
  np.testing.assert_allclose(change(0.2, wd_mults=(("attn", 3.0),))[path] - without[path], -0.5 * 0.6 * p, atol=1e-6)
  # By default neither norms nor biases nor embeddings decay.
  for spared in ("embed/embedding", "blocks/attn/q/bias", "final_norm/scale"):
    np.testing.assert_array_equal(change(0.2)[spared], without[spared])


def test_group_warmup_replaces_the_schedules_warmup_for_its_parameters():
  schedule = {"name": "linear", "warmup_steps": 2, "floor": 0.0}
  optimizer = make(schedule=schedule, group_warmup=(("embed/", 10),))
  plain = make(schedule=schedule)
  for step, ratio in ((0, 0.1 / 0.5), (1, 0.2 / 1), (4, 0.5), (9, 1), (15, 1)):
    ours, reference = first_update(optimizer, step=step), first_update(plain, step=step)
    for path, update in reference.items():
      np.testing.assert_allclose(ours[path], update * (ratio if "embed/" in path else 1), rtol=1e-6)


def test_learning_rates_name_every_group_in_use():
  optimizer = make(learning_rate=0.01, schedule={"warmup_steps": 4}, freeze=("unembed",),
                   lr_mults=(("unembed", 7.0), ("embed", 0.1), ("attn", 0.5)), group_warmup=(("^embed", 10),))
  rates = optimizer.learning_rates(0)
  assert rates == pytest.approx({
      "learning_rate": 0.01 / 4, "learning_rate_x0.1_warmup10": 0.1 * 0.01 / 10, "learning_rate_x0.5": 0.01 / 8})
  assert all(type(rate) is float for rate in rates.values())
  traced = jax.jit(optimizer.learning_rates)(0)
  assert {name: float(rate) for name, rate in traced.items()} == pytest.approx(rates)


@pytest.mark.parametrize("key", ["lr_mults", "wd_mults", "group_warmup"])
def test_a_rule_that_matches_nothing_is_an_error_with_near_misses(key):
  with pytest.raises(ConfigError, match=rf"optimizer\.{key}: the pattern 'atn/q'.*'attn' instead of 'atn'"):
    make(**{key: (("atn/q", 1),)})


def test_a_frozen_pattern_that_matches_nothing_is_an_error_but_default_rules_are_not():
  with pytest.raises(ConfigError, match=r"optimizer\.freeze: the pattern 'lora'.*embed/embedding"):
    make(freeze=("lora",))
  assert make({"w": jnp.zeros((2, 2))}).trainable == {"w"}


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"lr_mults": (("attn", 0.0),)}, r"use optimizer\.freeze.*'\^blocks/attn/q/bias\$'"),
        ({"wd_mults": (("attn", -1.0),)}, "0 or above"),
        ({"group_warmup": (("attn", TOTAL + 1),)}, "at most the run's 20"),
        ({"group_warmup": (("attn", 1.5),)}, "whole number"),
        ({"name": "muon", "freeze": ("blocks",)}, "optimizer.name=adamw"),
    ],
)
def test_impossible_optimizers(changed, message):
  with pytest.raises(ConfigError, match=message):
    make(**changed)


@pytest.mark.parametrize(
    "name, unread",
    [
        ("adamw", {"momentum", "nesterov", "muon_steps", "muon_exclude", "decay_exponent", "min_dim_size_to_factor"}),
        ("adafactor", {"b1", "b2", "eps", "momentum", "nesterov", "muon_steps", "muon_exclude"}),
        ("muon", {"decay_exponent", "min_dim_size_to_factor"}),
        ("lion", {"eps", "momentum", "nesterov", "muon_steps", "muon_exclude", "decay_exponent",
                  "min_dim_size_to_factor"}),
        ("sgd", {"b1", "b2", "eps", "muon_steps", "muon_exclude", "decay_exponent", "min_dim_size_to_factor"}),
    ],
)
def test_only_keys_of_the_chosen_optimizer_are_read(name, unread):
  # Keys that belong to update.py.
  others = {"clip_norm", "ema_decay", "max_nonfinite_steps"}
  read = set()

  class Recorder:
    def __init__(self, cfg):
      self.cfg = cfg

    def __getattr__(self, key):
      read.add(key)
      return getattr(self.cfg, key)

  config = defaults()
  config.optimizer.name = name
  to_steps = functools.partial(
      durations.steps, run=durations.RunLengths(TOTAL, batch_size=8, seq_len=16, rows_per_epoch=None))
  optim.make_optimizer(Recorder(config.optimizer), config.schedule, tree(0), total_steps=TOTAL, to_steps=to_steps)
  assert set(config.optimizer) - read == unread | others


def test_clipping_scales_to_the_bound_and_reports_the_norm_before():
  grads = {"a": jnp.array([3.0, 0.0]), "b": {"c": jnp.array([[4.0]])}}
  clip, norm = optim.clipping(grads, 1.0)
  clipped = jax.tree.map(clip, grads)
  assert float(norm) == 5
  np.testing.assert_allclose(clipped["a"], [0.6, 0.0], rtol=1e-6)
  assert float(optim.clipping(clipped, 0.0)[1]) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("max_norm", [5.0, 6.0, 0.0])
def test_clipping_changes_no_bit_within_the_bound(max_norm):
  grads = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([4.0], jnp.bfloat16)}

  @jax.jit
  def clipped_and_norm(grads):
    clip, norm = optim.clipping(grads, max_norm)
    return jax.tree.map(clip, grads), norm

  clipped, norm = clipped_and_norm(grads)
  assert float(norm) == 5
  assert all((clipped[k] == grads[k]).all() and clipped[k].dtype == grads[k].dtype for k in grads)


def test_clipping_keeps_a_nonfinite_norm_visible():
  a = jnp.array([1.0, jnp.nan])
  clip, norm = optim.clipping({"a": a}, 1.0)
  assert jnp.isnan(norm) and jnp.isnan(clip(a)).all()


def test_ema_is_a_weighted_average_in_float32():
  ema, params = {"a": jnp.array([1.0, 2.0])}, {"a": jnp.array([3.0, 2.0], jnp.bfloat16)}
  for count in (1, 2):
    ema = optim.ema_update(ema, params, 0.9)
    np.testing.assert_allclose(ema["a"], [3 - 2 * 0.9**count, 2], rtol=1e-6)
  assert ema["a"].dtype == jnp.float32 and float(ema["a"][1]) == 2


def test_each_array_and_each_step_is_rounded_by_bits_of_its_own():
  """Of two arrays of ones in bfloat16 half move by 2^-9, which is half of what is between two numbers below 1."""
  shapes = {"a/kernel": (64, 64), "b/kernel": (64, 64)}
  params = tree_lib.unflatten({path: jnp.ones(shape, jnp.bfloat16) for path, shape in shapes.items()})
  optimizer = dataclasses.replace(make(params), stochastic_rounding=True)
  updates = jax.tree.map(lambda p: jnp.full(p.shape, -(2.0**-9)), params)
  apply = jax.jit(optimizer.apply)
  moved = {(step, path): np.asarray(p != 1) for step in (0, 1)
           for path, p in tree_lib.flatten(apply(updates, params, step)).items()}
  assert all(0.4 < part.mean() < 0.6 for part in moved.values())
  pairs = itertools.combinations(moved.values(), 2)
  assert all(0.4 < (one != other).mean() < 0.6 for one, other in pairs)  # as independent ones differ
  again = tree_lib.flatten(apply(updates, params, 1))["a/kernel"]
  np.testing.assert_array_equal(np.asarray(again != 1), moved[1, "a/kernel"])


def test_matrices_of_a_wider_model_learn_slower_and_decay_as_much():
  """Yang et al. 2022 (arXiv 2203.03466, table 8), at four times the width: rate / 4, rate × decay unchanged."""
  _at_another_width({}, lambda path: 4 if path.startswith("blocks/") and path.endswith("kernel") else 1)


def test_a_wider_model_by_muon_learns_slower_by_the_root_and_what_adam_serves_of_it_by_the_whole():
  """A matrix that Muon leaves out has Adam's factor, 4, not Muon's, 2."""
  _at_another_width(dict(name="muon", muon_exclude=("/q/",)), lambda path: (
      4 if "/q/" in path else 2) if path.startswith("blocks/") and path.endswith("kernel") else 1)


def _at_another_width(changed, factor):
  narrow = make(weight_decay=0.5, lr_mults=(("/q/", 0.5),), **changed).rules
  config = defaults()
  config.optimizer.update(weight_decay=0.5, lr_mults=(("/q/", 0.5),), **changed)
  config.schedule.update(name="constant", warmup_percent=-1.0)
  wide = optim.make_optimizer(config.optimizer, config.schedule, jax.eval_shape(lambda: tree(0)), total_steps=TOTAL,
                              to_steps=lambda cfg, prefix, default=None, where="": 0, width=4.0).rules
  for path, rules in wide.items():
    assert rules.lr_mult == narrow[path].lr_mult / factor(path), path
    assert rules.lr_mult * rules.wd_mult == narrow[path].lr_mult * narrow[path].wd_mult, path


def test_a_step_that_is_not_taken_says_nothing_of_its_size():
  params, grads = tree(0), tree(1)
  optimizer = make(name="sgd", learning_rate=0.5, momentum=0.0, nesterov=False, weight_decay=0.0)
  for taken, norm in ((True, 0.5 * float(optim.global_norm(grads))), (False, 0.0)):
    new, _, did = jax.jit(optimizer.advance)(grads, optimizer.init(params), params, 0, jnp.bool_(taken))
    assert float(did.norm) == pytest.approx(norm, rel=1e-5)
    assert taken == any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (new, params)), strict=True))
