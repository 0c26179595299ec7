"""Adapters: they start as nothing, are all that is trained, and merge into what they compute."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from models import lora
from tests import tiny
from trainer import state as state_lib
from trainer import tree
from trainer import update as update_lib
from trainer.config import defaults
from trainer.config.checks import View
from trainer.errors import ConfigError
from trainer.optim import optimizer as optim
from trainer.strategies import seq

SHARED_EXPERT = dict(num_experts=4, expert_size=8, shared_size=8, shared_gate=True)
TARGETS = ("blocks/attn/[qkvo]/kernel", "blocks/mlp/.*/kernel")


@functools.cache
def made(rank=4, targets=TARGETS, alpha=8.0, rslora=False, dropout=0.0, moe=False, scan=True, std=0.3, dora=False):
  """(model, parameters, all of them random)."""
  changed = dict(moe=SHARED_EXPERT) if moe else {}
  model = tiny.model(lora=dict(rank=rank, targets=targets, alpha=alpha, rslora=rslora, dropout=dropout, dora=dora),
                     scan_layers=scan, **changed)
  rng = np.random.default_rng(0)
  params = {path: jnp.asarray(path.endswith("scale") + std * rng.normal(size=leaf.shape), jnp.float32)
            for path, leaf in tree.flatten(model.abstract_params()).items()}
  return model, tree.unflatten(params)


@functools.cache
def base_of(moe=False):
  """The model without adapters."""
  return tiny.model(**(dict(moe=SHARED_EXPERT) if moe else {}))


@functools.cache
def _hidden(model, train):
  return jax.jit(lambda params, batch, rng: model.apply(params, batch, rng=rng, train=train).hidden,
                 compiler_options=tiny.AS_USERS)


def hidden(model, params, batch, rng=None, train=False):
  return np.asarray(_hidden(model, train)(params, batch, rng))


@pytest.mark.parametrize("moe, dora", [(False, False), (True, False), (False, True)])
def test_a_fresh_adapter_changes_nothing(moe, dora):
  """The base has the initial values it would have alone, and logits are equal to the bit."""
  base = base_of(moe)
  adapted, _ = made(moe=moe, dora=dora, targets=("attn/q", "moe/shared/", "shared_gate") if moe else TARGETS)
  plain, params = (jax.jit(m.init)(jax.random.key(3)) for m in (base, adapted))
  flat, alone = tree.flatten(params), tree.flatten(plain)
  assert {path for path in flat if not lora.is_adapter(path)} == set(alone)
  for path, leaf in alone.items():
    np.testing.assert_array_equal(flat[path], leaf, err_msg=path)
  assert all(np.any(leaf) == path.endswith("/lora_a") for path, leaf in flat.items() if lora.is_adapter(path))
  batch = tiny.batch(4, 16)
  np.testing.assert_array_equal(hidden(adapted, params, batch), hidden(base, plain, batch))


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_off_is_the_base(dora):
  model, params = made(dora=dora)
  batch, base = tiny.batch(4, 16), base_of()
  without = tree.unflatten({p: x for p, x in tree.flatten(params).items() if not lora.is_adapter(p)})
  expected = hidden(base, without, batch)
  np.testing.assert_array_equal(hidden(model, lora.off(params), batch), expected)
  assert np.abs(hidden(model, params, batch) - expected).max() > 0.1


def test_initial_values_are_even_within_the_bound_and_differ_by_path_and_layer():
  params = jax.jit(made(rank=8)[0].init)(jax.random.key(0))
  q, k = params["blocks"]["attn"]["q"]["lora_a"], params["blocks"]["attn"]["k"]["lora_a"]
  assert q.shape == (2, 16, 8) and 0.2 < np.abs(q).max() <= 16**-0.5
  assert np.std(q) == pytest.approx(16**-0.5 / 3**0.5, rel=0.15)
  assert not np.any(q[0] == q[1]) and not np.any(q == k)


@pytest.mark.parametrize("alpha, rslora, scale, dora", [
    (8.0, False, 2.0, False), (8.0, True, 4.0, False), (2.0, False, 0.5, False), (2.0, False, 0.5, True)])
def test_the_kernel_is_moved_by_a_times_b_times_the_scale(alpha, rslora, scale, dora):
  """scale = alpha / r, or alpha / sqrt(r) with rsLoRA: put by hand into the kernels of a model without adapters.

  With DoRA each column then has the base's length and `lora_m`.
  """
  model, params = made(alpha=alpha, rslora=rslora, dora=dora)
  flat = tree.flatten(params)
  by_hand = {}
  for path, leaf in flat.items():
    if not lora.is_adapter(path):
      a, b = (flat.get(beside) for beside in lora.pair(path)) if path.endswith("/kernel") else (None, None)
      by_hand[path] = leaf if a is None else leaf + scale * np.einsum("lir,lro->lio", a, b, dtype=np.float64)
      if dora and a is not None:
        wanted = np.linalg.norm(np.float64(leaf), axis=1) + flat[path.replace("kernel", "lora_m")]
        by_hand[path] = by_hand[path] / np.linalg.norm(by_hand[path], axis=1, keepdims=True) * wanted[:, None]
  batch, moved = tiny.batch(4, 16), {p: jnp.asarray(x, jnp.float32) for p, x in by_hand.items()}
  expected = hidden(base_of(), tree.unflatten(moved), batch)
  np.testing.assert_allclose(hidden(model, params, batch), expected, atol=1e-5)


@pytest.mark.parametrize("moe, dora", [(False, False), (True, False), (False, True)])
def test_merged_equals_unmerged(moe, dora):
  model, params = made(moe=moe, dora=dora, targets=("attn/[qo]/", "moe/shared/", "shared_gate") if moe else TARGETS)
  base, merged = base_of(moe), lora.merge(params, model.spec.lora)
  assert tree.flatten(merged).keys() == tree.flatten(base.abstract_params()).keys()
  batch = tiny.batch(4, 16)
  np.testing.assert_allclose(hidden(base, merged, batch), hidden(model, params, batch), atol=1e-5)


@pytest.mark.parametrize("dora", [False, True])
def test_merging_slice_by_slice_is_merging(dora):
  model, params = made(targets=("attn/q", "mlp/down"), dora=dora)
  flat, lora_spec = tree.flatten(params), model.spec.lora
  merged = tree.flatten(lora.merge(params, lora_spec))
  read = lora.merged_reader(*[lambda path, index: np.asarray(flat[path][index])] * 2, flat, lora_spec)
  for path, leaf in merged.items():
    whole = tuple(slice(0, n) for n in leaf.shape)
    if path.startswith("blocks/"):
      for layer in range(2):
        np.testing.assert_allclose(read(path, (layer, *whole[1:])), leaf[layer], atol=1e-6, err_msg=path)
  part = (1, slice(3, 9), slice(2, 5))
  np.testing.assert_allclose(read("blocks/mlp/down/kernel", part), merged["blocks/mlp/down/kernel"][part], atol=1e-6)
  np.testing.assert_array_equal(read("blocks/mlp/up/kernel", part), flat["blocks/mlp/up/kernel"][part])


def _update(model, learning_rate=1.0, micro_batch_size=4, **optimizer):
  config = defaults()
  config.optimizer.update(name="sgd", learning_rate=learning_rate, momentum=0.0, nesterov=False, weight_decay=0.0,
                          **optimizer)
  config.schedule.update(name="constant", warmup_percent=-1.0, warmup_steps=0)
  made_optimizer = optim.make_optimizer(config.optimizer, config.schedule, model.abstract_params(), total_steps=10,
                                        to_steps=lambda cfg, prefix, default=None, where="": 0, only=model.trained_only)
  strategy = View(config.strategy)
  update = update_lib.make_update_fn(lambda params, batch, rng: seq.loss(model, params, batch, rng, strategy),
                                     made_optimizer, update_lib.Options(
                                         seed=0, micro_batch_size=micro_batch_size, source_names=("a", "b")))
  return made_optimizer, update


def _start(optimizer, params):
  return jax.jit(state_lib.make_fresh(optimizer, ema=False))(params)


def test_only_adapters_are_trained_and_known_to_the_optimizer():
  model, params = made(targets=("attn/q",))
  optimizer, update = _update(model)
  assert optimizer.trainable == {"blocks/attn/q/lora_a", "blocks/attn/q/lora_b"}
  new, metrics = jax.jit(update)(_start(optimizer, params), tiny.batch(4, 16))
  before, after = tree.flatten(params), tree.flatten(new["params"])
  moved = {path for path in before if np.any(before[path] != after[path])}
  assert moved == optimizer.trainable
  # The norm is that of the adapters' gradients alone, which plain SGD of rate 1 subtracts.
  step = np.sqrt(sum(np.sum((before[path] - after[path]) ** 2) for path in moved))
  assert float(metrics["grad_norm"]) == pytest.approx(step, rel=1e-4)


def test_no_product_computes_a_gradient_of_the_base():
  """Of the backward pass's products none has a frozen kernel's shape but the adapters' own; the base alone has them."""
  def products(model, params):
    optimizer, update = _update(model)
    text = jax.jit(update).lower(_start(optimizer, params), tiny.batch(4, 16)).compile().as_text()
    lines = [line for line in text.splitlines() if " dot(" in line]
    return sum("f32[16,32]" in line.split(" dot(")[0] or "f32[32,16]" in line.split(" dot(")[0] for line in lines)

  base = tiny.model()
  assert products(base, jax.jit(base.init)(jax.random.key(0))) >= 3  # gate, up and down
  assert products(*made(targets=("attn/q",))) == 0


def test_dropout_is_for_training_alone_and_a_function_of_its_key():
  model, params = made(dropout=0.5)
  still, _ = made()
  batch, key = tiny.batch(4, 16), jax.random.key(7)
  evaluated = hidden(model, params, batch, rng=key)
  np.testing.assert_array_equal(evaluated, hidden(still, params, batch))
  trained = hidden(model, params, batch, rng=key, train=True)
  assert np.abs(trained - evaluated).max() > 0.05
  np.testing.assert_array_equal(trained, hidden(model, params, batch, rng=key, train=True))
  assert np.any(trained != hidden(model, params, batch, rng=jax.random.key(8), train=True))
  with pytest.raises(ValueError, match="needs rng"):
    model.apply(params, batch, train=True)


def test_dropout_spares_the_base():
  """With adapters that change nothing, dropping their input changes nothing."""
  model, params = made(dropout=0.5)
  batch = tiny.batch(4, 16)
  dropped = hidden(model, lora.off(params), batch, rng=jax.random.key(0), train=True)
  np.testing.assert_array_equal(dropped, hidden(model, lora.off(params), batch))


def test_dropout_does_not_depend_on_scanning():
  batch, key = tiny.batch(4, 16), jax.random.key(1)
  (scanned, params), (unrolled, _) = made(dropout=0.5), made(dropout=0.5, scan=False)
  np.testing.assert_allclose(hidden(scanned, params, batch, rng=key, train=True),
                             hidden(unrolled, params, batch, rng=key, train=True), atol=1e-5)


def _sharding(mesh, path, leaf):
  """Adapters as their kernels: the large dimension split."""
  if path.endswith("/lora_a"):
    return NamedSharding(mesh, P(None, "fsdp"))
  if path.endswith("/lora_m"):
    return NamedSharding(mesh, P(None, "tensor"))
  return NamedSharding(mesh, P(None, None, "tensor") if path.endswith("/lora_b") or "/kernel" in path else P())


@pytest.mark.parametrize("dora", [False, True])
def test_eight_devices_compute_what_one_does(dora):
  """I2: initial values and dropout masks to the bit, the step (of gradients themselves) to 1e-5 of its largest number.

  With larger parameters, attention looks at single keys: rounding a parameter otherwise then changes gradients by more.
  """
  model, params = made(dropout=0.3, std=0.1, dora=dora)
  optimizer, update = _update(model, micro_batch_size=8)
  batch = tiny.batch(8, 16)
  expected, _ = jax.jit(update)(_start(optimizer, params), batch)

  mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
  placed = {path: _sharding(mesh, path, leaf) for path, leaf in tree.flatten(params).items()}
  init = jax.jit(model.init, out_shardings=tree.unflatten(placed))
  alone = tree.flatten(jax.jit(model.init)(jax.random.key(5)))
  for path, leaf in tree.flatten(init(jax.random.key(5))).items():
    np.testing.assert_array_equal(leaf, alone[path], err_msg=path)
  sharded = tree.unflatten({p: jax.device_put(x, placed[p]) for p, x in tree.flatten(params).items()})
  rows = {name: jax.device_put(x, NamedSharding(mesh, P(("data", "fsdp")))) for name, x in batch.items()}
  state = jax.device_put(_start(optimizer, params), NamedSharding(mesh, P()))
  new, _ = jax.jit(update)({**state, "params": sharded}, rows)
  found, wanted = tree.flatten(new["params"]), tree.flatten(expected["params"])
  assert all(np.any(wanted[path] != tree.flatten(params)[path]) for path in optimizer.trainable)
  for path in optimizer.trainable:
    step = np.abs(wanted[path] - tree.flatten(params)[path]).max()
    np.testing.assert_allclose(found[path], wanted[path], rtol=0, atol=1e-5 * step, err_msg=path)


@pytest.mark.parametrize("targets, message", [
    (("blocks/attn/query/kernel",), "matches none of the .* blocks/attn/q/kernel"),
    (("attn/q", "mlp/gaet"), "'gate' instead of 'gaet'"),
    (("attn/[q",), "not a regular expression"),
    ((), "is empty"),
])
def test_targets_that_cannot_be_are_refused(targets, message):
  with pytest.raises(ConfigError, match=message):
    tiny.model(lora=dict(rank=2, targets=targets))


def test_routers_and_positions_are_refused():
  with pytest.raises(ConfigError, match="matches blocks/moe/router/kernel, which cannot have adapters"):
    tiny.model(moe=SHARED_EXPERT, lora=dict(rank=2, targets=("moe/",)))
  latent = dict(kv_rank=8, q_rank=8, index_topk=4)
  with pytest.raises(ConfigError, match="matches blocks/indexer/keys/kernel, which cannot have adapters"):
    tiny.model(latent=latent, lora=dict(rank=2, targets=("attn/", "indexer/keys")))
  with pytest.raises(ConfigError, match="matches pos_embed/embedding, which cannot have adapters"):
    tiny.model(positions="learned", max_positions=16, lora=dict(rank=2, targets=("embed/",)))


def test_off_leaves_what_begins_at_random_and_takes_what_changes_the_base():
  names = ("kernel", "lora_a", "lora_b", "lora_m", "lora_rows", "bias")
  found = tree.flatten(lora.off({"a": {name: jnp.ones(2) for name in names}}))
  assert {path for path, leaf in found.items() if not np.any(leaf)} == {"a/lora_b", "a/lora_m", "a/lora_rows"}


def test_ids_are_found_among_indices_in_any_order():
  found = lora.places_of((7, 2, 5), jnp.asarray([[2, 7, 6], [5, 0, 9]]))
  assert found.tolist() == [[1, 0, 3], [2, 3, 3]] and found.dtype == jnp.int32


@pytest.mark.parametrize("path", ["embed/embedding", "unembed/kernel"])
def test_rows_that_are_trained_are_added_to_their_tokens_whichever_part_of_the_table_is_read(path):
  """Tokens 6, 0 and 3 of eight, by a loop; the whole table and slices of its entries and features."""
  rng = np.random.default_rng(0)
  across, indices = path == "unembed/kernel", (6, 0, 3)
  table, rows = rng.normal(size=(8, 4)).astype(np.float32), rng.normal(size=(3, 4)).astype(np.float32)
  wanted = table.copy()
  for token, row in zip(indices, rows, strict=True):
    wanted[token] += row
  stored = table.T if across else table
  whole = lora.with_rows(jnp.asarray(stored), jnp.asarray(rows), indices, across)
  np.testing.assert_allclose(whole, wanted.T if across else wanted, rtol=1e-6)
  beside = lora.rows(path)
  read = lora.merged_reader(lambda path, index: stored[index], lambda path, index: rows[index], [beside],
                            SimpleNamespace(scale=1.0, trainable_token_indices=indices))
  for entries in (slice(None), slice(0, 3), slice(3, 7), slice(6, 8), slice(7, 8)):
    for features in (slice(None), slice(1, 3)):
      index = (features, entries) if across else (entries, features)
      part = wanted[entries, features]
      np.testing.assert_allclose(read(path, index), part.T if across else part, rtol=1e-6)
