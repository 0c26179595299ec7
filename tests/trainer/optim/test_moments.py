"""Moments in fewer bits: what a code may change, that nothing is lost on average, and what the state weighs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer import tree as tree_lib
from trainer.config import defaults
from trainer.distributed import mesh as mesh_lib
from trainer.optim import moments
from trainer.optim import optimizer as optim

SHAPES = {"embed/embedding": (32, 256), "blocks/mlp/up/kernel": (2, 64, 256), "final_norm/scale": (256,)}
CODES = {"first": (moments.encode_first, moments.decode_first),
         "second": (moments.encode_second, moments.decode_second)}


def tree(seed, spread=1.0, shapes=SHAPES):
  rng = np.random.default_rng(seed)
  return tree_lib.unflatten({path: jnp.asarray(rng.normal(size=shape) * np.exp(spread * rng.normal(size=shape)),
                                               jnp.float32) for path, shape in shapes.items()})


def make(name="adamw", moments="float32", second=None, seed=0, params=None, **changed):
  config = defaults()
  config.optimizer.update(dict(name=name) | changed)
  config.schedule.update(name="constant", warmup_percent=-1.0)
  config.precision.moments, config.precision.second_moments = moments, second
  return optim.make_optimizer(config.optimizer, config.schedule, params or tree(0), total_steps=20,
                              to_steps=lambda cfg, prefix, default=None, where="": 0, precision=config.precision,
                              seed=seed)


def bits(x, step=0, path="p"):
  return moments.rounding_bits(0, step, path, x.shape)


@pytest.mark.parametrize("kind", CODES)
def test_a_code_changes_a_number_by_less_than_an_eighth(kind):
  """Within the range of a row: 2^15 of first moments, 2^31 of second moments, below the largest."""
  encode, decode = CODES[kind]
  rng = np.random.default_rng(0)
  octaves = 15 if kind == "first" else 31
  x = (2.0 ** rng.uniform(-octaves + 1, 0, size=(64, 500))).astype(np.float32)
  x[:, 0] = 1.0
  x *= 2.0 ** rng.integers(-60, 60, size=(64, 1)).astype(np.float32)
  if kind == "first":
    x *= rng.choice([-1, 1], size=x.shape)
  codes, exponents = encode(jnp.asarray(x), bits(x))
  assert codes.dtype.itemsize == 1 and codes.shape == x.shape
  assert exponents.dtype == jnp.uint8 and exponents.shape == (64, 1)
  error = np.abs(np.asarray(decode(codes, exponents)) / x - 1)
  assert 0.1 < error.max() < 0.125


@pytest.mark.parametrize("kind", [*CODES, "bfloat16"])
def test_rounding_keeps_the_mean(kind):
  x = jnp.asarray([[1.0, 1.99, 0.3, 1e-2, 3.3e-4, 2e-5, 1e-5, 7.7, 1.2e-4]], jnp.float32)
  encode, decode = CODES.get(kind, (lambda x, bits: (moments.to_bfloat16(x, bits),), lambda y: y.astype(jnp.float32)))
  rounds = 20_000
  values = jax.jit(jax.vmap(lambda step: decode(*encode(x, bits(x, step)))))(jnp.arange(rounds))
  # Of two neighbours at a distance d: a standard deviation of at most d / 2; and 16 random bits are not quite even.
  spread = np.asarray(values).max(0) - np.asarray(values).min(0)
  assert (np.abs(np.asarray(values, np.float64).mean(0) - x) <= 5 * spread / 2 / rounds**0.5 + 2.0**-15 * spread).all()
  assert len(np.unique(np.asarray(values)[:, 0, 1])) <= 2 and spread[0, 4] > 0


def test_a_second_moment_is_never_0_beside_others_and_zeros_stay_zeros():
  x = jnp.asarray([[4.0, 0.0, 1e-30], [0.0, 0.0, 0.0]])
  values = np.asarray(moments.decode_second(*moments.encode_second(x, bits(x))))
  assert (values[0, 1:] == 1.125 * 2.0**-29).all() and (values[1] == 0).all()
  assert (np.asarray(moments.decode_first(*moments.encode_first(x, bits(x))))[1] == 0).all()


@pytest.mark.devices(8)
def test_random_bits_depend_on_seed_step_and_path_and_on_no_mesh():
  shape = (16, 8)
  one = moments.rounding_bits(0, 3, "a", shape)
  for seed, step, path in ((1, 3, "a"), (0, 4, "a"), (0, 3, "b")):
    assert (np.asarray(moments.rounding_bits(seed, step, path, shape)) != one).mean() > 0.9
  mesh = mesh_lib.make_mesh(dict(data=1, fsdp=4, tensor=2))
  split = jax.jit(functools.partial(moments.rounding_bits, 0, path="a", shape=shape),
                  out_shardings=jax.NamedSharding(mesh, jax.P("fsdp", "tensor")))(step=3)
  np.testing.assert_array_equal(split, one)


@pytest.mark.parametrize("form, bytes_each, rows", [("float32", 4, 0), ("bfloat16", 2, 0), ("int8", 1, 1)])
@pytest.mark.parametrize("name, kept", [("adamw", 2), ("lion", 1), ("sgd", 1), ("muon", None)])
def test_what_the_state_weighs(name, kept, form, bytes_each, rows):
  state = jax.eval_shape(make(name, form).init, tree(0))
  weight = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state) if leaf.ndim)
  sizes = {path: (np.prod(shape), np.prod(shape[:-1])) for path, shape in SHAPES.items()}
  # Muon keeps one moment of matrices and two of the rest.
  count = {path: kept or (1 if path.startswith("blocks") else 2) for path in SHAPES}
  assert weight == sum(count[path] * (size * bytes_each + rows * lines) for path, (size, lines) in sizes.items())


def test_first_and_second_moments_may_differ():
  state = tree_lib.flatten(jax.eval_shape(make(moments="bfloat16", second="int8").init, tree(0)))
  kinds = {path.split("/")[1]: leaf.dtype.name for path, leaf in state.items() if leaf.ndim}
  assert kinds == {"mu": "bfloat16", "nu": "uint8", "nu_exponent": "uint8"}


@pytest.mark.devices(8)
def test_codes_and_exponents_are_split_like_their_parameter():
  mesh = mesh_lib.make_mesh(dict(data=2, fsdp=2, tensor=2))
  abstract = jax.eval_shape(lambda: tree(0))
  placed, _ = mesh_lib.param_shardings(abstract, mesh)
  state = jax.eval_shape(make(moments="int8").init, abstract)
  shardings = mesh_lib.state_shardings(state, abstract, placed, mesh)
  specs = {path: sharding.spec for path, sharding in tree_lib.flatten(shardings).items()}
  kernel = tree_lib.flatten(placed)["blocks/mlp/up/kernel"].spec
  assert kernel[2] is not None
  assert specs["adam/mu/blocks/mlp/up/kernel"] == specs["adam/nu/blocks/mlp/up/kernel"] == kernel
  assert tuple(specs["adam/nu_exponent/blocks/mlp/up/kernel"]) == tuple(kernel[:2])


@pytest.mark.parametrize("form, spread", [("bfloat16", 0.02), ("int8", 0.6)])
def test_moving_averages_move_where_rounding_to_the_nearest_stands_still(form, spread):
  """T33: with b2 = 0.999, each update is 0.1% of what is missing, a fraction of the distance of two numbers."""
  b2, steps, size = 0.999, 300, 2000
  kept = moments.Moments(second=form)
  state = {"nu": {"p": jnp.full((1, size), 0.75)}}
  nearest = state["nu"]["p"].astype(jnp.bfloat16)

  @jax.jit
  def update(encoded, step):
    nu = kept.decode(encoded)["nu"]["p"]
    return kept.encode({"nu": {"p": b2 * nu + (1 - b2) * 1.0}}, step)

  encoded = kept.encode(state, 0)
  for step in range(steps):
    encoded = update(encoded, step)
    nearest = (b2 * nearest.astype(jnp.float32) + (1 - b2) * 1.0).astype(jnp.bfloat16)
  exact = 1 - 0.25 * b2**steps
  values = np.asarray(kept.decode(encoded)["nu"]["p"])
  assert (nearest == 0.75).all()
  assert abs(values.mean() - exact) < 5 * values.std() / size**0.5
  assert 0 < values.std() < spread


@pytest.mark.parametrize("form, distance, flips", [("bfloat16", 0.01, 0.01), ("int8", 0.1, 0.02)])
@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "muon"])
def test_directions_stay_close_to_those_of_float32(name, form, distance, flips):
  """After ten steps of gradients of very different sizes: the relative distance of the updates; of signs, the share
  that is another."""
  updates = {}
  for kind in ("float32", form):
    optimizer = make(name, kind, weight_decay=0.0)
    params, update = tree(0), jax.jit(optimizer.update)
    state = optimizer.init(params)
    for step in range(10):
      grads = jax.tree.map(lambda a, b: a + 0.3 * b, tree(7, 2.0), tree(step, 2.0))
      updates[kind], state = update(grads, state, params, step)
  for path, expected in tree_lib.flatten(updates["float32"]).items():
    got = tree_lib.flatten(updates[form])[path]
    if name == "lion":
      assert float((got != expected).mean()) < flips, path
    else:
      assert 0 < float(jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected)) < distance, path


@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_moments_are_rounded_anew_at_each_step(form):
  """From the same state, gradients and parameters: bits drawn for the step decide, the same for the same step."""
  params = tree(0)
  optimizer = make("lion", form, params=params)  # whose moment has no correction by the step
  update, state = jax.jit(optimizer.update), optimizer.init(params)
  third, again, fourth = (tree_lib.flatten(update(tree(1), state, params, step)[1]) for step in (3, 3, 4))
  rounded = [path for path, leaf in third.items() if leaf.ndim and leaf.dtype in (jnp.bfloat16, jnp.int8)]
  assert rounded
  for path in rounded:
    np.testing.assert_array_equal(third[path], again[path])
    assert np.mean(np.asarray(third[path]) != np.asarray(fourth[path])) > 0.2, path


def test_bits_are_of_the_runs_seed_the_step_the_array_and_its_layer(monkeypatch):
  asked = set()

  def bits(seed, step, path, shape, layer=None):
    asked.add((seed, int(step), path, shape, layer is not None))
    return jnp.zeros(shape, jnp.uint32)

  for module in (moments, optim):
    monkeypatch.setattr(module, "rounding_bits", bits)
  monkeypatch.setattr(optim, "LARGE", 12)  # w goes layer by layer; u has no layers
  params = {name: jnp.zeros(shape, jnp.bfloat16) for name, shape in (("u", (4, 4)), ("v", (2,)), ("w", (3, 2, 2)))}
  config = defaults()
  config.schedule.update(name="constant", warmup_percent=-1.0)

  def made(**precision):
    config.precision.update(precision)
    return optim.make_optimizer(config.optimizer, config.schedule, params, total_steps=20, seed=5,
                                to_steps=lambda *_, **__: 0, precision=config.precision)

  assert not any("moments" in note for note in made().notes) and not made().stochastic_rounding
  optimizer = made(moments="bfloat16", second_moments="int8", stochastic_rounding=True)
  assert optimizer.notes[-1] == "moments: first in bfloat16, second in int8"
  state = jax.eval_shape(optimizer.init, params)
  assert asked == {(5, 0, name, p.shape, False) for name, p in params.items()}
  asked.clear()
  jax.eval_shape(lambda grads, state, params: optimizer.advance(grads, state, params, 7), params, state, params)
  assert asked == {(5, 7, f"{of}{name}", shape, name == "w") for of in ("", "params/")
                   for name, shape in (("u", (4, 4)), ("v", (2,)), ("w", (1, 2, 2)))}
  for first, second in (("float32", "int8"), ("bfloat16", "float32")):
    other = made(moments=first, second_moments=second)
    assert other.moments.reduced and other.notes[-1] == f"moments: first in {first}, second in {second}"


def test_first_and_second_moments_are_rounded_by_bits_of_their_own():
  """Of the same numbers: where one goes up the other does as often as chance has it, f² + (1 - f)², 2/3 on average."""
  values = {"p": jnp.asarray(1.0 + np.random.default_rng(0).random((64, 64)), jnp.float32)}
  kept = make(moments="bfloat16", second="bfloat16").moments.encode({"mu": values, "nu": values}, 3)
  assert kept["mu"]["p"].dtype == kept["nu"]["p"].dtype == jnp.bfloat16
  assert np.mean(np.asarray(kept["mu"]["p"]) == np.asarray(kept["nu"]["p"])) == pytest.approx(2 / 3, abs=0.03)


@pytest.mark.parametrize("name, first", [("adamw", "float32"), ("adamw", "int8"), ("lion", "bfloat16"),
                                         ("sgd", "float32"), ("adafactor", "float32"), ("muon", "float32")])
def test_large_arrays_go_layer_by_layer_to_the_same_values(name, first, monkeypatch):
  """Several updates of parameters in bfloat16, rounded to the nearest; codes of moments without random bits."""
  monkeypatch.setattr(moments, "rounding_bits", lambda seed, step, path, shape, layer=None:
                      jnp.full(shape, 0x40004000, jnp.uint32))
  params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), tree(0))
  optimizer = make(name, first, params=params, learning_rate=0.1)
  found = {}
  for large in (optim.LARGE, 1):
    monkeypatch.setattr(optim, "LARGE", large)
    p, state, did = params, optimizer.init(params), None
    for step in range(3):
      before = p
      p, state, did = jax.jit(optimizer.advance)(tree(step + 1), state, p, step)
    for path, now in tree_lib.flatten(p).items():
      assert 0 < float(did.changed[path]) == float(jnp.sum(now != tree_lib.flatten(before)[path])), path
    found[large] = (p, state), did
  whole, layers = found.values()
  assert jax.tree.structure(whole) == jax.tree.structure(layers) and set(layers[1].changed) == set(SHAPES)
  for a, b in zip(jax.tree.leaves(whole[0]), jax.tree.leaves(layers[0]), strict=True):
    assert a.dtype == b.dtype
    # Compiled in another way a number may be rounded up that was rounded down; of Muon's products, more of them.
    different = np.mean(~np.isclose(np.float32(a), np.float32(b), rtol=1e-6, atol=0))
    assert different < (0.05 if name == "muon" else 1e-3)
    np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=0.02, atol=1 if a.dtype.itemsize == 1 else 0.02)
  assert float(whole[1].norm) == pytest.approx(float(layers[1].norm), rel=1e-5)
  # Where the loss is not finite nothing moves.
  kept = jax.jit(optimizer.advance)(tree(9), layers[0][1], layers[0][0], 3, jnp.bool_(False))
  jax.tree.map(np.testing.assert_array_equal, kept[:2], layers[0])
  assert not any(np.asarray(x) for x in jax.tree.leaves(kept[2]))


def test_a_large_array_is_one_update_of_its_layers(monkeypatch):
  """What corrects Adam's first steps counts updates, not layers: of two steps with equal layers both stay equal, and
  move by the learning rate each time, since all gradients are the same."""
  monkeypatch.setattr(optim, "LARGE", 1)
  params = {"w": jnp.zeros((3, 2, 2), jnp.bfloat16)}
  optimizer = make("adamw", params=params, learning_rate=0.25, weight_decay=0.0)
  state, advance = optimizer.init(params), jax.jit(optimizer.advance)
  for step in (0, 1):
    params, state, _ = advance({"w": jnp.ones((3, 2, 2))}, state, params, step)
    np.testing.assert_array_equal(np.float32(params["w"]), -0.25 * (step + 1))
    assert int(state["adam"]["count"]) == step + 1


def test_layer_by_layer_numbers_are_rounded_at_random_as_well(monkeypatch):
  """T33, and no two layers by the same bits."""
  monkeypatch.setattr(optim, "LARGE", 1)
  shape, lr = (4, 100, 250), 1e-3
  params = {"w": jnp.ones(shape, jnp.bfloat16)}
  optimizer = make("sgd", params=params, learning_rate=lr, momentum=0.0, nesterov=False, weight_decay=0.0)
  optimizer = dataclasses.replace(optimizer, stochastic_rounding=True)
  new, _, did = jax.jit(optimizer.advance)({"w": jnp.ones(shape)}, optimizer.init(params), params, 0)
  moved = np.asarray(new["w"], np.float64) - 1
  # Below 1 the numbers of bfloat16 are 2^-8 apart.
  assert moved.mean() == pytest.approx(-lr, rel=0.05)
  assert float(did.changed["w"]) == (moved != 0).sum() == pytest.approx(moved.size * lr / 2.0**-8, rel=0.05)
  assert len({(layer != 0).tobytes() for layer in moved}) == 4


def test_bfloat16_parameters_move_on_average_however_small_the_updates():
  """T33: updates of 1e-6 of a parameter. To the nearest, nothing changes; at random, the mean is right."""
  size, lr, steps = 100_000, 1e-6, 20
  params = {"w": jnp.ones((size,), jnp.bfloat16)}
  optimizer = make("sgd", params=params, learning_rate=lr, momentum=0.0, nesterov=False, weight_decay=0.0)
  rounding = dataclasses.replace(optimizer, stochastic_rounding=True)
  grads, moved = {"w": jnp.ones((size,))}, {}
  for which, o in (("nearest", optimizer), ("random", rounding)):
    p, state = params, o.init(params)

    @jax.jit
    def step_of(p, state, step, o=o):
      updates, state = o.update(grads, state, p, step)
      return o.apply(updates, p, step), state

    for step in range(steps):
      p, state = step_of(p, state, step)
    moved[which] = np.asarray(p["w"], np.float64) - 1
  assert not moved["nearest"].any()
  assert moved["random"].mean() == pytest.approx(-lr * steps, rel=0.1)
  assert (moved["random"] != 0).mean() == pytest.approx(lr * steps / 2.0**-8, rel=0.1)
