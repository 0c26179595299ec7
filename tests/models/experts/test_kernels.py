"""Adapters of routed experts: as if put by hand into the experts' kernels, on plain and on quantised ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import api, lora
from models.quantization import quantize
from tests import tiny
from trainer import tree
from trainer.config import defaults
from trainer.errors import ConfigError

MOE = dict(num_experts=4, experts_per_token=2, expert_size=8)
TARGETS = {"all": ("moe/experts/",), "down": ("experts/down",), "gate": ("attn/q/", "experts/gate")}


def make(adapted=True, frozen=None, targets=TARGETS["all"], **changed):
  cfg = defaults().model
  cfg.update(num_layers=2, hidden_size=16, intermediate_size=32, num_heads=2, vocab_multiple=8, moe=MOE, **changed)
  if adapted:
    cfg.lora.update(rank=3, alpha=6.0, targets=targets)
  return api.make_model(cfg, vocab_size=24, params_dtype="float32", compute_dtype="float32", frozen=frozen)


@functools.cache
def made(kind, **changed):
  """(model, parameters, all of them random)."""
  model = make(targets=TARGETS[kind], **changed)
  return model, tree.unflatten(random(model))


def random(model):
  rng = np.random.default_rng(0)
  return {path: jnp.asarray(path.endswith("scale") + 0.3 * rng.normal(size=leaf.shape), jnp.float32)
          for path, leaf in tree.flatten(model.abstract_params()).items()}


@functools.cache
def compiled(model):
  return jax.jit(lambda p: model.apply(p, tiny.batch(4, 16)).hidden, compiler_options=tiny.AS_USERS)


def hidden(model, params):
  return np.asarray(compiled(model)(params))


def test_the_first_values_of_a_are_bounded_by_the_size_of_the_inputs():
  """As a linear layer's: evenly between -1 / sqrt(inputs) and 1 / sqrt(inputs); 16 to an expert, 8 within."""
  drawn = tree.flatten(jax.jit(make().init)(jax.random.key(0)))
  for name, inputs in (("gate", 16), ("up", 16), ("down", 8)):
    largest = np.abs(drawn[f"blocks/moe/experts/{name}/lora_a"]).max() * inputs**0.5
    assert 0.95 < largest <= 1


# gpt-oss has biases and another activation.
@pytest.mark.parametrize("kind, changed", [
    ("all", {}), ("down", {}), ("gate", {}), ("all", dict(mlp_bias=True, activation="clamped_swiglu"))])
def test_each_expert_is_moved_by_a_pair_of_its_own(kind, changed):
  model, params = made(kind, **changed)
  base, flat = make(adapted=False, **changed), tree.flatten(params)
  moved = {path: np.float64(leaf) for path, leaf in flat.items() if not lora.is_adapter(path)}
  for path in moved:
    a, b = (flat.get(part) for part in lora.pair(path)) if path.endswith("/kernel") else (None, None)
    if a is not None:
      moved[path] += 2.0 * np.matmul(np.float64(a), np.float64(b))
  expected = hidden(base, tree.unflatten({path: jnp.asarray(x, jnp.float32) for path, x in moved.items()}))
  np.testing.assert_allclose(hidden(model, params), expected, atol=1e-5)
  np.testing.assert_allclose(hidden(base, lora.merge(params, model.spec.lora)), expected, atol=1e-5)
  without = tree.unflatten({path: leaf for path, leaf in flat.items() if not lora.is_adapter(path)})
  assert np.abs(expected - hidden(base, without)).max() > 0.05
  np.testing.assert_array_equal(hidden(model, lora.off(params)), hidden(base, without))


def test_fresh_ones_change_nothing():
  model, base = make(), make(adapted=False)
  params, alone = (jax.jit(m.init)(jax.random.key(3)) for m in (model, base))
  np.testing.assert_array_equal(hidden(model, params), hidden(base, alone))
  a, b = (params["blocks"]["moe"]["experts"]["gate"][name] for name in ("lora_a", "lora_b"))
  assert a.shape == (2, 4, 16, 3) and b.shape == (2, 4, 3, 8) and not np.any(b)
  assert 0.2 < np.abs(a).max() <= 16**-0.5 and not np.any(a[0, 0] == a[0, 1])


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_on_a_quantised_base(kind):
  """As on the numbers that the base's codes stand for, with the same gradient."""
  model, plain = make(frozen=kind), make()
  whole, batch = random(plain), tiny.batch(2, 8)
  stored = tree.flatten(model.abstract_params())
  params = {}
  for path, leaf in whole.items():
    params |= quantize.store(path, leaf, stored)
  assert f"blocks/moe/experts/up/kernel_{kind}" in params
  restored = {path: quantize.dequantize({end: params[path + end] for end in ("_int8", "_nf4", "_scale")
                                         if path + end in params}, jnp.float32)
              if path not in params else params[path].astype(jnp.float32) for path in whole}

  def loss(model, others):
    return lambda adapters: jnp.sum(jnp.square(model.apply(tree.unflatten(others | adapters), batch).hidden))

  adapters = {path: leaf for path, leaf in params.items() if lora.is_adapter(path)}
  found, expected = (jax.jit(jax.value_and_grad(loss(*of)))(adapters) for of in ((model, params), (plain, restored)))
  np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
  for path, leaf in expected[1].items():
    np.testing.assert_allclose(found[1][path], leaf, rtol=0, atol=1e-4 * np.abs(leaf).max(), err_msg=path)


def test_flops_count_the_experts_that_a_token_passes_through():
  base, adapted = make(adapted=False), make()
  of_experts = 2 * 2 * 3 * (16 + 8) * 3  # layers, experts of a token, rank, inputs and outputs, matrices
  frozen = base.flops_per_token(8)
  weights = 2 * (4 * 16 * 16 + 2 * 3 * 16 * 8 + 16 * 4) + 16 * 24
  assert adapted.flops_per_token(8) == frozen - 2 * weights + 6 * of_experts


@pytest.mark.parametrize("changed, message", [
    (dict(dropout=0.1), "dropout is 0.1, .*experts/down/kernel.*: adapters of routed experts have none"),
    (dict(dora=True), "dora is True, .*experts/down/kernel.*Set model.lora.dora=False"),
    (dict(targets=("moe/router/",)), "router/kernel, which cannot have adapters"),
])
def test_what_cannot_be_is_refused(changed, message):
  with pytest.raises(ConfigError, match=message):
    tiny.model(moe=MOE, lora={**dict(rank=2, targets=("experts/",)), **changed})
