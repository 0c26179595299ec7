"""Frozen parameters in fewer bits: the code book, bounds on errors, memory, and training on top of them."""

import functools
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from models import api, lora
from models.quantization import quantize
from tests import tiny
from trainer import tree
from trainer.config import defaults
from trainer.errors import ConfigError

# Dettmers et al. 2023, appendix E.
PAPER = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
         -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
         0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
# Compiled as a whole: one by one, their operations would each be.
QUANTIZE, DEQUANTIZE = jax.jit(quantize.quantize, static_argnums=(1, 2)), jax.jit(quantize.dequantize, static_argnums=1)
SHAPES = [(128, 24), (3, 64, 8), (2, 3, 192, 5), (2, 16, 4), (100, 6)]


def kernel(shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.05, jnp.float32)


def test_the_code_book_is_the_papers():
  np.testing.assert_allclose(quantize.NORMAL_FLOAT, PAPER, atol=2e-7)


def test_the_code_book_has_the_normal_distributions_probabilities():
  """Its definition: on each side of zero, evenly spaced probabilities, up to the mean of the tails 1/30 and 1/32."""
  largest = NormalDist().inv_cdf(1 - (1 / 30 + 1 / 32) / 2)
  probabilities = np.array([NormalDist().cdf(float(v) * largest) for v in quantize.NORMAL_FLOAT])
  np.testing.assert_allclose(np.diff(probabilities[:8]), np.diff(probabilities[:8])[0], atol=1e-6)
  np.testing.assert_allclose(np.diff(probabilities[7:]), np.diff(probabilities[7:])[0], atol=1e-6)
  assert probabilities[0] == pytest.approx(1 - probabilities[-1]) and probabilities[7] == 0.5


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_wrong_by_half_a_step_at_most(shape):
  w = kernel(shape)
  parts = QUANTIZE(w, "int8")
  assert parts["_int8"].dtype == jnp.int8 and parts["_int8"].shape == shape
  assert parts["_scale"].shape == (*shape[:-2], 1, shape[-1])
  np.testing.assert_allclose(parts["_scale"], np.abs(w).max(-2, keepdims=True) / 127, rtol=1e-6)
  error = np.abs(DEQUANTIZE(parts, jnp.float32) - w)
  assert np.all(error <= parts["_scale"] / 2 * (1 + 1e-5))


@pytest.mark.parametrize("shape", SHAPES)
def test_nf4_takes_the_nearest_value_of_its_block(shape):
  """Against a search over all 16 values, block by block."""
  w = np.asarray(kernel(shape))
  parts = QUANTIZE(jnp.asarray(w), "nf4")
  assert parts["_nf4"].dtype == jnp.uint8 and parts["_nf4"].shape == (*shape[:-2], shape[-2] // 2, shape[-1])
  found = np.asarray(DEQUANTIZE(parts, jnp.float32))
  assert found.shape == shape
  for start in range(0, shape[-2], 64):
    block = w[..., start:start + 64, :]
    scale = np.abs(block).max(-2, keepdims=True)
    nearest = np.abs(block[..., None] - scale[..., None] * np.array(PAPER)).min(-1)
    np.testing.assert_allclose(np.abs(found[..., start:start + 64, :] - block), nearest, atol=1e-7)


@pytest.mark.parametrize("kind", quantize.KINDS)
def test_what_was_quantised_stays_as_it_is(kind):
  first = QUANTIZE(kernel((128, 24)), kind)
  again = QUANTIZE(DEQUANTIZE(first, jnp.float32), kind)
  np.testing.assert_array_equal(first[f"_{kind}"], again[f"_{kind}"])
  np.testing.assert_allclose(first["_scale"], again["_scale"], rtol=0 if kind == "nf4" else 2e-7)


@pytest.mark.parametrize("kind", quantize.KINDS)
def test_zeros_stay_zeros(kind):
  w = kernel((64, 4)).at[:, 1].set(0.0)
  found = DEQUANTIZE(QUANTIZE(w, kind), jnp.float32)
  assert not np.any(found[:, 1]) and np.all(np.isfinite(found))


def test_an_odd_number_of_inputs_cannot_be_nf4():
  with pytest.raises(ConfigError, match="x/kernel has 7"):
    QUANTIZE(kernel((7, 4)), "nf4", "x/kernel")


def make(frozen, *, params_dtype="float32", freeze=(), size=64, rank=4, **changed):
  cfg = defaults().model
  cfg.update(num_layers=2, hidden_size=size, intermediate_size=2 * size, num_heads=2, vocab_multiple=8)
  cfg.update({**(dict(lora=dict(rank=rank)) if rank else {}), **changed})
  return api.make_model(cfg, vocab_size=24, params_dtype=params_dtype, compute_dtype="float32", frozen=frozen,
                        freeze=freeze)


@functools.cache
def params_of(frozen, moe=False, as_users=False):
  model = make(frozen, **(dict(moe=dict(num_experts=4), lora=dict(rank=4, targets=("attn/",))) if moe else {}))
  return model, jax.jit(model.init, compiler_options=tiny.AS_USERS if as_users else None)(jax.random.key(0))


@pytest.mark.parametrize("frozen, moe", [("bfloat16", False), ("int8", False), ("nf4", True)])
def test_what_is_trained_stays_float32_and_the_tree_says_what_is_kept(frozen, moe):
  model, params = params_of(frozen, moe)
  abstract, flat = tree.flatten(model.abstract_params()), tree.flatten(params)
  assert {p: (x.shape, x.dtype) for p, x in abstract.items()} == {p: (x.shape, x.dtype) for p, x in flat.items()}
  quantised = {"int8": jnp.int8, "nf4": jnp.uint8}
  for path, leaf in flat.items():
    expected = quantised.get(frozen) if path.endswith(("_int8", "_nf4")) else (
        jnp.float32 if lora.is_adapter(path) or path.endswith("_scale") else jnp.bfloat16)
    assert leaf.dtype == expected, path
  if moe:
    assert "blocks/moe/router/kernel" in flat
  shapes = {p: x.shape for p, x in quantize.logical(flat).items()}
  full, _ = params_of("float32", moe)
  assert shapes == {p: x.shape for p, x in tree.flatten(full.abstract_params()).items()}


@pytest.mark.parametrize("kind, bits", [("int8", 8 + 32 / 64), ("nf4", 4 + 32 / 64)])
def test_memory(kind, bits):
  """Bits per weight of a matrix with 64 inputs, on this machine, in device buffers."""
  _, params = params_of(kind)
  parts = {p: x for p, x in tree.flatten(params).items() if p.startswith("blocks/attn/q/kernel_")}
  assert sum(x.nbytes for x in parts.values()) * 8 == bits * 2 * 64 * 64
  device = sum(shard.data.on_device_size_in_bytes() for x in parts.values() for shard in x.addressable_shards)
  assert device * 8 == bits * 2 * 64 * 64


def restored(flat):
  """The parameters by path, in float32, with each quantised kernel turned back into one array."""
  found = {}
  for path, leaf in flat.items():
    kernel, kind = path.removesuffix("_int8").removesuffix("_nf4"), path.rpartition("_")[2]
    if kernel != path:
      leaf = quantize.dequantize({f"_{kind}": leaf, "_scale": flat[f"{kernel}_scale"]}, jnp.float32)
    if not path.endswith("kernel_scale"):
      found[kernel] = leaf.astype(jnp.float32)
  return found


@pytest.mark.parametrize("kind, moe", [("int8", False), ("nf4", True)])
def test_the_model_computes_with_the_dequantised_kernels(kind, moe):
  model, params = params_of(kind, moe)
  full, _ = params_of("float32", moe)
  whole = tree.unflatten(restored(tree.flatten(params)))
  batch = tiny.batch(4, 16)
  found, expected = (jax.jit(m.apply)(p, batch).hidden for m, p in ((model, params), (full, whole)))
  np.testing.assert_allclose(found, expected, atol=1e-5)


def _loss(model, base, batch):
  def loss(adapters):
    logits = model.logits(tree.unflatten(base | adapters), batch)[..., :24]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], batch["tokens"][:, 1:, None], axis=-1)
    return -jnp.mean(picked)
  return loss


@pytest.mark.parametrize("kind, moe", [("int8", False), ("nf4", True)])
def test_training_on_a_quantised_base_has_its_gradient_and_lowers_the_loss(kind, moe):
  model, params = params_of(kind, moe)
  full, _ = params_of("float32", moe)
  flat = tree.flatten(params)
  adapters = {p: x for p, x in flat.items() if lora.is_adapter(p)}
  base = {p: x for p, x in flat.items() if p not in adapters}
  batch = tiny.batch(4, 16)
  step = jax.jit(jax.value_and_grad(_loss(model, base, batch)))
  first, gradient = step(adapters)
  expected = jax.jit(jax.grad(_loss(full, restored(base), batch)))(adapters)
  assert max(np.abs(g).max() for g in expected.values()) > 1e-3
  for path, g in expected.items():
    np.testing.assert_allclose(gradient[path], g, atol=1e-6, err_msg=path)
  for _ in range(20):
    _, gradient = step(adapters)
    adapters = {p: x - 0.5 * gradient[p] for p, x in adapters.items()}
  assert float(step(adapters)[0]) < float(first) - 0.05


def test_the_backward_pass_keeps_codes_and_not_kernels():
  """Temporary memory of a step does not grow by a dequantised kernel for each layer."""
  def temporary(layers):
    model = make("nf4", size=128, num_layers=layers, lora=dict(rank=2, targets=("attn/q",)))
    flat = tree.flatten(model.abstract_params())
    adapters = {p: x for p, x in flat.items() if lora.is_adapter(p)}
    base = {p: x for p, x in flat.items() if p not in adapters}
    batch = tiny.batch(1, 8)
    fn = jax.jit(lambda adapters, base: jax.grad(_loss(model, base, batch))(adapters))
    return fn.lower(adapters, base).compile().memory_analysis().temp_size_in_bytes

  kernels = 4 * (4 * 128**2 + 3 * 128 * 256)  # bytes of one layer's, in float32
  assert (temporary(12) - temporary(4)) / 8 < 0.4 * kernels


def test_each_parameter_is_stored_as_the_model_has_it():
  """From full-precision leaves, one by one, on a mesh: what a checkpoint from elsewhere goes through."""
  full, given = params_of("float32", as_users=True)
  model = make("nf4")
  mesh = jax.make_mesh((4,), ("tensor",), axis_types=(AxisType.Auto,))
  spec = NamedSharding(mesh, P(None, None, "tensor"))
  wanted = {p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spec if x.ndim == 3 else NamedSharding(mesh, P()))
            for p, x in tree.flatten(model.abstract_params()).items() if not lora.is_adapter(p)}
  logical = quantize.logical(wanted)
  leaves = {p: jnp.copy(x) for p, x in tree.flatten(given).items() if not lora.is_adapter(p)}
  assert {p: x.shape for p, x in logical.items()} == {p: x.shape for p, x in leaves.items()}
  assert logical["blocks/attn/q/kernel"].sharding == spec
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  unsharded = {p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for p, x in wanted.items()}
  stored, stored_here = {}, {}
  for path in logical:
    stored_here |= quantize.store(path, jnp.copy(leaves[path]), unsharded)
    stored |= quantize.store(path, jax.device_put(leaves[path], logical[path].sharding), wanted)
  direct = tree.flatten(jax.jit(model.init, compiler_options=tiny.AS_USERS)(jax.random.key(0)))
  assert stored.keys() == wanted.keys()
  for path, leaf in stored.items():
    assert leaf.sharding.is_equivalent_to(wanted[path].sharding, leaf.ndim), path
    np.testing.assert_array_equal(leaf, stored_here[path], err_msg=path)
    np.testing.assert_array_equal(leaf, direct[path], err_msg=path)


def test_storing_gives_up_the_leaf():
  wanted = {"x/kernel_nf4": jax.ShapeDtypeStruct((32, 4), jnp.uint8),
            "x/kernel_scale": jax.ShapeDtypeStruct((1, 4), jnp.float32)}
  leaf = kernel((64, 4))
  assert quantize.store("x/kernel", leaf, wanted).keys() == wanted.keys()
  assert leaf.is_deleted()


def test_quantised_matrices_need_adapters():
  with pytest.raises(ConfigError, match="precision.frozen is nf4.*model.lora.rank"):
    make("nf4", rank=0)


def test_frozen_by_pattern_without_adapters():
  model = make("bfloat16", rank=0, freeze=("^embed/", "mlp/up"))
  kinds = {p: x.dtype for p, x in tree.flatten(model.abstract_params()).items()}
  assert {p for p, kind in kinds.items() if kind == jnp.bfloat16} == {"embed/embedding", "blocks/mlp/up/kernel"}


def test_a_checkpoint_from_elsewhere_has_kernels_whole():
  stored = {"a/kernel_nf4": ((2, 4, 6), np.uint8), "a/kernel_scale": ((2, 1, 6), np.float32), "c": ((3,), jnp.bfloat16),
            "b/kernel_int8": ((8, 6), np.int8), "b/kernel_scale": ((1, 6), np.float32)}
  found = quantize.logical({path: jax.ShapeDtypeStruct(*of) for path, of in stored.items()})
  assert {path: (leaf.shape, leaf.dtype.name) for path, leaf in found.items()} == {
      "a/kernel": ((2, 8, 6), "float32"), "b/kernel": ((8, 6), "float32"), "c": ((3,), "bfloat16")}
