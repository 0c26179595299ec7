"""The GPU kernels of experts, interpreted, against the blocked products: numbers, gradients, groups without rows."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from models import gpu
from models.experts import grouped, grouped_gpu
from trainer.planning import gpu as plan_gpu

H100 = types.SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H100 80GB HBM3")


def refused(block=64, sizes=(64, 48), dtype=jnp.bfloat16, device=H100):
  return grouped_gpu.refusal(device, block, sizes, dtype)


def test_refusals_name_the_reason():
  assert refused() is None
  assert refused(block=8) == "blocks of 8 rows, fewer than 16"
  assert refused(sizes=(64, 40)) == "matrices of 64 x 40: no multiples of 16"
  assert "float32; with precision.compute=bfloat16" in refused(dtype=jnp.float32)
  assert "int8" in refused(dtype=jnp.int8)
  assert "7.5; they need 8.0" in refused(device=types.SimpleNamespace(**vars(H100) | dict(compute_capability="7.5")))


def test_kernels_are_tried_on_a_gpu_that_is_here(monkeypatch):
  monkeypatch.setattr(jax, "local_devices", lambda: [H100])
  interpreted = functools.partial(grouped_gpu.error, interpret=True)

  def fail(dtype):
    raise RuntimeError("no kernel image is available")

  for error, said in ((interpreted, None), (lambda dtype: 0.5, "off by 0.5"), (fail, "fail: RuntimeError: no kernel")):
    grouped_gpu._distrust.cache_clear()
    monkeypatch.setattr(grouped_gpu, "error", error)
    assert refused() is None if said is None else said in refused()
  grouped_gpu._distrust.cache_clear()


def test_the_trial_is_exact_where_nothing_is_rounded():
  assert grouped_gpu.error(jnp.float32, interpret=True) < 1e-5
  assert grouped_gpu.error(jnp.bfloat16, interpret=True) < gpu.MOST_OFF / 4


@pytest.mark.parametrize("K,N,block", [(48, 32, 16), (64, 256, 32)])
def test_products_and_gradients_equal_the_blocked_ones(K, N, block, monkeypatch):
  """As the model uses them, with groups of no, one and several blocks, and rows that are of none."""
  counts = np.array([2, 0, 1, 4, 0]) * block
  E, M = len(counts), int(counts.sum()) + 2 * block
  keys = jax.random.split(jax.random.key(0), 3)
  x, w, g = (jax.random.normal(key, shape) for key, shape in zip(keys, ((M, K), (E, K, N), (M, N)), strict=True))
  sizes = jnp.asarray(counts, jnp.int32)

  def both(x, w, g):
    y, pull = jax.vjp(lambda x, w: grouped.grouped_matmul(x, w, sizes, block), x, w)
    return y, *pull(g)

  expected = jax.jit(both)(x, w, g)
  called = []
  for name in ("grouped", "grouped_outer"):
    kernel = getattr(grouped_gpu, name)
    monkeypatch.setattr(grouped_gpu, name, lambda *args, kernel=kernel: called.append(kernel) or kernel(
        *args, interpret=True))
  monkeypatch.setattr(grouped, "_by_kernel", lambda *_: True)
  found = jax.jit(lambda *given: both(*given))(x, w, g)
  assert len(called) == 3
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-5)
  assert not np.asarray(found[0])[counts.sum():].any()
  assert not np.asarray(found[2])[counts == 0].any()


@pytest.mark.skipif(plan_gpu.plugin() is None, reason="needs XLA for GPUs, JAX's CUDA plugin")
@pytest.mark.parametrize("kind", ["a100", "l4", "h100", "b200"])
def test_kernels_compile_for_gpus_that_are_not_here(kind):
  (device,) = plan_gpu.devices(kind, 1, 1)
  sharding = SingleDeviceSharding(device)
  E, K, N, block, M = 8, 512, 384, 256, 4096

  def shaped(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  def all_of(x, w, g, of_block, ends):
    y = grouped_gpu.grouped(x, w, of_block, block, False, jnp.bfloat16)
    dx = grouped_gpu.grouped(g, w, of_block, block, True, jnp.bfloat16)
    return y, dx, grouped_gpu.grouped_outer(x, g, ends - block, ends, block, jnp.float32)

  with plan_gpu.meant([device]):
    compiled = jax.jit(all_of).lower(shaped(M, K), shaped(E, K, N), shaped(M, N), shaped(M // block, dtype=jnp.int32),
                                     shaped(E, dtype=jnp.int32)).compile()
  assert compiled.as_text().count('custom_call_target="__gpu$xla.gpu.triton"') == 3


@pytest.mark.parametrize("size, most, found", [(96, 64, 32), (128, 64, 64), (64, 64, 64), (7, 64, 1), (12, 2, 2)])
def test_blocks_divide_sizes_by_powers_of_two(size, most, found):
  assert grouped_gpu._divisor(size, most) == found
