"""When the kernels of the gated delta rule are taken: refusals, the trial on a GPU that is here, what a layer asks."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import gpu
from models.attention import delta_gpu, delta_kernels
from models.attention.delta_rule import Inputs
from models.sharding import logical_axes


def a_gpu(capability="9.0", kind="NVIDIA H100 80GB HBM3"):
  return types.SimpleNamespace(platform="gpu", compute_capability=capability, device_kind=kind)


def refused(device, dtype=jnp.bfloat16, K=128, V=128):
  return delta_gpu.refusal(device, jnp.dtype(dtype), K, V)


def test_refusals_name_the_reason():
  assert refused(a_gpu()) is None  # not here: there is nothing to try
  assert refused(a_gpu(), K=16, V=64) is None
  for K, V in ((96, 128), (128, 256), (8, 128)):
    assert refused(a_gpu(), K=K, V=V) == f"heads of sizes {K} and {V}; allowed: powers of two from 16 to 128"
  assert "compute capability is 7.5; they need 8.0" in refused(a_gpu("7.5", "Tesla T4"))
  assert "precision.compute=bfloat16" in refused(a_gpu(), jnp.float32)
  assert refused(a_gpu(), jnp.float16) == "float16, but bfloat16"
  assert refused(jax.devices()[0], jnp.float32) is None  # interpreted


def test_kernels_are_tried_on_a_gpu_that_is_here(monkeypatch):
  device, asked = a_gpu(), []
  monkeypatch.setattr(jax, "local_devices", lambda: [device])

  def now(error):
    monkeypatch.setattr(delta_gpu, "error", error)
    delta_gpu._distrust.cache_clear()
    return refused(device, K=16, V=32)

  assert now(lambda *given: asked.append(given) or gpu.MOST_OFF) is None
  assert asked == [(delta_kernels.chunked, 16, 32)]
  assert refused(a_gpu("8.0", "NVIDIA A100-SXM4-80GB")) is None and len(asked) == 1  # not here
  assert now(lambda *_: 0.5) == "this GPU, where their results are off by 0.5 of the largest number"

  def fail(*_):
    raise RuntimeError("no kernel image is available\nand more")

  assert now(fail) == "this GPU, where they fail: RuntimeError: no kernel image is available"
  delta_gpu._distrust.cache_clear()


def test_the_trial_allows_what_bfloat16_rounds_and_little_more():
  def interpreted(*given):
    return delta_kernels.chunked(*given, interpret=True)

  def half_as_often(inputs, segment_ids):
    return interpreted(inputs._replace(beta_BxTxH=inputs.beta_BxTxH * 0.9), segment_ids)

  assert delta_gpu.error(interpreted, 16, 16) < gpu.MOST_OFF / 3
  assert delta_gpu.error(half_as_often, 16, 16) > 2 * gpu.MOST_OFF


@pytest.mark.parametrize("impl, platform, taken", [
    ("auto", "gpu", True), ("auto", "cpu", False), ("auto", "tpu", False), ("triton", "cpu", True),
    ("blocked", "gpu", False), ("splash", "gpu", False)])
def test_kernels_are_taken_on_gpus_and_where_they_are_asked_for(impl, platform, taken, monkeypatch):
  """And never by a model that was told `blocked`."""
  called = []
  monkeypatch.setattr(delta_kernels, "chunked", lambda inputs, ids, state, *, interpret: called.append(interpret))
  monkeypatch.setattr(logical_axes, "platform", lambda: platform)
  monkeypatch.setattr(logical_axes, "device", lambda: a_gpu() if platform == "gpu" else jax.devices()[0])
  keys, values, scalars = (jnp.ones(shape, jnp.bfloat16) for shape in ((1, 4, 1, 16), (1, 4, 2, 16), (1, 4, 2)))
  made = delta_gpu.chunked(impl, Inputs(keys, keys, values, -scalars, scalars), jnp.ones((1, 4), jnp.int32), 4, None)
  assert called == ([platform != "gpu"] if taken else [])
  assert taken or np.isfinite(np.asarray(made[0], np.float32)).all()


def test_what_is_not_taken_is_said_once(monkeypatch, caplog):
  said = []
  monkeypatch.setattr(gpu, "warn", lambda what, reason: said.append((what, reason)))
  ones, scalars = jnp.ones((1, 4, 1, 12), jnp.bfloat16), jnp.ones((1, 4, 1))
  given = Inputs(ones, ones, ones, -scalars, scalars), jnp.ones((1, 4), jnp.int32)
  out, _ = delta_gpu.chunked("triton", *given, 4, None)
  assert said == [("gated delta rule", "heads of sizes 12 and 12; allowed: powers of two from 16 to 128")]
  assert out.shape == ones.shape
