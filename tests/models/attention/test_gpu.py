"""When the GPU kernels are taken: refusals, the trial on a GPU that is here, rows in parts on several devices."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from models import gpu
from models.attention import gpu as attention_gpu
from models.attention import gpu_kernels as flash_gpu
from models.attention import ring
from models.attention.mask import QKV, Rule, TokenIds
from tests.models.attention.common import attention
from tests.models.common import value_and_gradients

RULE = Rule(0.3)


def a_gpu(capability="9.0", kind="NVIDIA H100 80GB HBM3"):
  return types.SimpleNamespace(platform="gpu", compute_capability=capability, device_kind=kind)


def refused(device, K=64, dtype=jnp.bfloat16, rule=RULE):
  q, k = jnp.zeros((1, 8, 4, K), dtype), jnp.zeros((1, 8, 2, K), dtype)
  return attention_gpu.refusal(device, rule, QKV(q, k, k), False, False)


def test_refusals_name_the_reason():
  assert refused(a_gpu()) is None  # not here: there is nothing to try
  assert refused(a_gpu(), K=300) == "heads of size 300, above 256"
  assert "compute capability is 7.5; they need 8.0" in refused(a_gpu("7.5", "Tesla T4"))
  assert "compute capability is gfx942" in refused(a_gpu("gfx942", "MI300X"))
  assert "precision.compute=bfloat16" in refused(a_gpu(), dtype=jnp.float32)
  assert refused(jax.devices()[0], dtype=jnp.float32) is None  # interpreted, which rounds nothing


@pytest.fixture
def gpu_here(monkeypatch):
  """A device that is here and calls itself a GPU, on which kernels are interpreted."""
  device = a_gpu()
  monkeypatch.setattr(jax, "local_devices", lambda: [device])
  monkeypatch.setattr(attention_gpu, "on", lambda device: functools.partial(flash_gpu.attend, interpret=True))
  attention_gpu._distrust.cache_clear()
  yield device
  attention_gpu._distrust.cache_clear()


def test_kernels_are_tried_on_a_gpu_that_is_here(gpu_here, monkeypatch):
  assert refused(gpu_here) is None
  attention_gpu._distrust.cache_clear()
  right = flash_gpu._scores
  monkeypatch.setattr(flash_gpu, "_scores", lambda rule, products, *_, **__: right(
      rule, products, None, None))  # no mask
  assert "their results are off by" in refused(gpu_here)
  attention_gpu._distrust.cache_clear()
  monkeypatch.setattr(flash_gpu, "_scores", lambda rule, products, *_, **__: (
      jnp.sqrt(-1.0 - products**2), 1.0))
  assert "off by inf" in refused(gpu_here)
  attention_gpu._distrust.cache_clear()

  def fail(*args, **more):
    raise RuntimeError("no kernel image is available\nand more")

  monkeypatch.setattr(flash_gpu, "_scores", fail)
  assert refused(gpu_here) == "this GPU, where they fail: RuntimeError: no kernel image is available"


def test_processes_agree_though_the_first_device_of_a_mesh_is_anothers(gpu_here, monkeypatch):
  monkeypatch.setattr(attention_gpu, "error", lambda *_: 1.0)
  assert "off by 1" in refused(a_gpu())  # of the same kind, and not here
  assert refused(a_gpu("8.0", "NVIDIA A100-SXM4-80GB")) is None


def test_they_are_tried_as_they_are_to_be_used(gpu_here, monkeypatch):
  asked = []
  monkeypatch.setattr(attention_gpu, "error", lambda attend, *how: asked.append(how) or 0.0)
  q, k = jnp.zeros((1, 8, 6, 64), jnp.float16), jnp.zeros((1, 8, 2, 64), jnp.float16)
  for blocks, prompts in ((True, False), (False, True)):
    assert attention_gpu.refusal(gpu_here, RULE, QKV(q, k, k), blocks, prompts) is None
  assert asked == [(RULE, 3, 64, "float16", True, False), (RULE, 3, 64, "float16", False, True)]


def test_tiles_are_as_large_as_the_chip_allows():
  def shared(device):
    return attention_gpu.on(device).keywords["shared_bytes"]

  for capability, large in (("8.0", True), ("9.0", True), ("8.9", False), ("12.0", False)):
    assert (shared(a_gpu(capability)) >= flash_gpu.LARGE) == large
  known = a_gpu("12.0")
  known.shared_memory_per_block_optin = 300_000
  assert shared(known) == 300_000


@pytest.mark.devices(8)
def test_the_trial_runs_while_a_step_is_traced(gpu_here):
  """Within jit, a loop and shard_map, whose traces it has no part in."""
  mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
  found = []

  def local(x):
    def body(carry, _):
      found.append(refused(gpu_here))
      return carry, None
    return jax.lax.scan(body, x, length=2)[0]

  spec = PartitionSpec("data")
  jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(jnp.ones(2))
  assert found and set(found) == {None}
  assert attention_gpu._distrust.cache_info().misses == 1


@pytest.mark.parametrize("rule,more", [
    (Rule(0.1), {}), (Rule(0.1, window=100), {}), (Rule(0.1, 5.0), {}),
    (Rule(0.1), dict(blocks=True)), (Rule(0.1), dict(prompts=True)),
])
def test_the_trial_allows_what_bfloat16_rounds_and_little_more(rule, more):
  """A quarter of it; exact where nothing is rounded; other keys than those that are to be seen are found out."""
  attend = functools.partial(flash_gpu.attend, interpret=True)
  assert attention_gpu.error(attend, rule, **more) < gpu.MOST_OFF / 4
  assert attention_gpu.error(attend, rule, dtype=jnp.float32, **more) < 1e-5

  def too_near(rule, *given):
    return attend(rule._replace(window=(rule.window or 300) // 3), *given)

  assert attention_gpu.error(too_near, rule, **more) > 2 * gpu.MOST_OFF


def test_attention_takes_the_kernels_where_it_is_told_to(monkeypatch):
  """And says once why it does not."""
  q, k, v = (jax.random.normal(jax.random.key(i), (2, 40, heads, 8)) for i, heads in enumerate((4, 2, 2)))
  options = dict(segment_ids=jnp.repeat(jnp.array([[1, 2], [1, 0]]), 20, axis=1), scale=0.3, window=9)
  called, said = [], []
  right = flash_gpu.attend
  monkeypatch.setattr(flash_gpu, "attend", lambda *args, **more: called.append(1) or right(*args, **more))
  ours = attention(q, k, v, impl="triton", **options)
  assert called
  np.testing.assert_allclose(ours, attention(q, k, v, impl="blocked", **options), atol=2e-6)
  gpu.warn.cache_clear()
  monkeypatch.setattr(gpu.logging, "warning", lambda text, *args: said.append(text % args))
  wide = [jnp.ones((1, 4, 1, 320))] * 3
  for _ in range(2):
    attention(*wide, segment_ids=jnp.ones((1, 4), jnp.int32), scale=1.0, impl="triton")
  assert said == ["attention: blocked, since the GPU kernels do not take heads of size 320, above 256"]


# Four devices with 64 tokens each of two rows: all of the row, a window within a part, one beyond; prompts, blocks.
@pytest.mark.devices(8)
@pytest.mark.parametrize("window,ids", [(None, {}), (40, {}), (101, {}), (None, dict(prompts=True)),
                                        (30, dict(blocks=True))])
@pytest.mark.parametrize("length", [256, 252])
def test_rows_in_parts_equal_whole_rows(window, ids, length):
  if length == 252 and ids:
    pytest.skip("an odd part is no other with them")
  C, B, H, G, K = 4, 2, 4, 2, 8
  rng = np.random.default_rng(0)
  segments = np.sort(rng.integers(1, 6, (B, length)).astype(np.int32))
  segments[1, -70:] = 0
  blocks = jnp.asarray(rng.integers(0, 3, (B, length)), jnp.int32) if ids.get("blocks") else None
  prompts = jnp.where(segments > 2, 2, 0) if ids.get("prompts") else None
  keys = jax.random.split(jax.random.key(0), 4)
  q, k, v, cotangent = (jax.random.normal(key, (B, length, heads, K)) for key, heads in zip(keys, (H, G, G, H),
                                                                                           strict=True))
  rule = Rule(0.3, window=window)
  mesh = jax.make_mesh((C,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:C])
  spec = PartitionSpec(None, "context")

  def local(q, k, v, tokens):
    return ring.by_kernel("context", rule, functools.partial(flash_gpu.attend, interpret=True), QKV(q, k, v),
                          tokens)

  def ours(q, k, v):
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return mapped(q, k, v, TokenIds(jnp.asarray(segments), blocks, prompts))

  whole = functools.partial(attention, segment_ids=jnp.asarray(segments), block_ids=blocks, prompt_ids=prompts,
                            window=window, scale=0.3, impl="blocked")
  given = q, k, v, cotangent
  for a, b in zip(value_and_gradients(ours, *given), value_and_gradients(whole, *given), strict=True):
    np.testing.assert_allclose(a, b, atol=5e-6, rtol=1e-5)
