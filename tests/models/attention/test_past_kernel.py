"""The GPU kernel of one more token per row, interpreted, against a softmax in float64; when it is taken."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, SingleDeviceSharding

from models import gpu
from models.attention import gpu as attention_gpu
from models.attention import past_kernel
from models.attention.dispatch import attend_to_past
from models.attention.mask import Rule
from models.attention.pages import PAGE, Seen, Table
from models.sharding import logical_axes
from tests.models.common import make, random_params
from trainer.planning import gpu as plan_gpu

B, G, R, K = 4, 2, 3, 16


def made(slots, dtype=jnp.float32):
  """(queries, keys, values, which slots are seen): from the first one on, some in the middle, a single one, none."""
  rng, number = np.random.default_rng(slots), np.arange(slots)
  cache = B, G, slots, K
  q, k, v = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((B, G * R, K), cache, cache))
  seen = np.stack([number < slots - 3, (number > slots // 3) & (number % 5 > 0), number == 9, number < 0])
  return q, k, v, jnp.asarray(seen)


def by_hand(rule, q, k, v, seen, sinks=None):
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  out = np.zeros(q.shape)
  for row, head in np.ndindex(B, G * R):
    scores = rule.scale * (k[row, head // R] @ q[row, head])
    scores = scores if rule.logit_cap is None else rule.logit_cap * np.tanh(scores / rule.logit_cap)
    weights = np.where(seen[row], np.exp(scores), 0)
    total = weights.sum() + (0 if sinks is None else np.exp(float(sinks[head])))
    out[row, head] = weights @ v[row, head // R] / (total or 1)
  return out


@pytest.mark.parametrize("slots, rule, with_sinks, parts", [
    (48, Rule(0.3), False, 1), (1024, Rule(0.3), False, 4), (512, Rule(0.3, 1.5), True, 2)])
def test_equals_a_softmax_by_hand(slots, rule, with_sinks, parts):
  """Also where a part of a row sees nothing, and where a row does."""
  q, k, v, seen = made(slots)
  sinks = jnp.linspace(-1, 2, G * R) if with_sinks else None

  def run(q, k, v, seen):
    return past_kernel.attend(rule, q, Seen(k, v, seen), sinks_H=sinks, interpret=True)

  np.testing.assert_allclose(jax.jit(run)(q, k, v, seen), by_hand(rule, q, k, v, seen, sinks), atol=2e-6)
  call = str(jax.make_jaxpr(run)(q, k, v, seen))
  assert f"f32[{B},{G},{parts},16,{K}]" in call


def test_pages_are_read_wherever_they_lie():
  """Of rows with different numbers of them; some pages are nobody's, and hold what is not a number."""
  q, k, v, seen = made(192)
  seen = seen & (np.arange(192) < np.array([192, 100, 64, 64])[:, None])
  owns, order = [3, 2, 1, 1], np.append(8, np.random.default_rng(1).permutation(8))
  table, owners, firsts = np.full((B, 3), 9, np.int32), np.full(9, B, np.int32), np.zeros(9, np.int32)
  pages = [np.full((9, G, 64, K), np.nan, np.float32) for _ in "kv"]
  seen_in, place = np.zeros((9, 64), bool), 0
  for row, own in enumerate(owns):
    for j in range(own):
      page, slots = order[place], slice(64 * j, 64 * (j + 1))
      table[row, j], owners[page], firsts[page], place = page, row, 64 * j, place + 1
      seen_in[page] = seen[row, slots]
      for to, x in zip(pages, (k, v), strict=True):
        to[page] = x[row, :, slots]
  given = Seen(*map(jnp.asarray, pages), jnp.asarray(seen_in), Table(*map(jnp.asarray, (table, owners, firsts))))
  out = attend_to_past(Rule(0.3), q[:, None], given, jnp.array([True, True, True, False]), impl="triton")[:, 0]
  np.testing.assert_allclose(out, by_hand(Rule(0.3), q, k, v, seen & np.array([[1], [1], [1], [0]], bool)), atol=2e-6)


def test_slots_that_are_not_seen_change_no_bit():
  q, k, v, seen = made(256)
  run = jax.jit(lambda q, *given: past_kernel.attend(Rule(0.3), q, Seen(*given), interpret=True))
  hidden = ~seen[:, None, :, None]
  changed = jnp.where(hidden, 1e30, k), jnp.where(hidden, -1e30, v)
  np.testing.assert_array_equal(run(q, k, v, seen), run(q, *changed, seen))


def test_tiles_without_a_slot_that_is_seen_are_passed_over():
  """They may hold what is not a number, which a product would spread."""
  q, k, v, seen = made(256)
  seen = seen.at[:, 64:192].set(False).at[1, 70].set(True)
  unread = jnp.zeros((B, 1, 256, 1), bool).at[0, :, 192:].set(True).at[1, :, :64].set(True).at[2, :, 64:].set(True)
  seen = seen & ~unread[:, 0, :, 0]
  run = jax.jit(lambda q, *given: past_kernel.attend(Rule(0.3), q, Seen(*given), interpret=True))
  np.testing.assert_array_equal(run(q, jnp.where(unread, jnp.nan, k), jnp.where(unread, jnp.nan, v), seen),
                                run(q, k, v, seen))


def test_the_trial_allows_what_bfloat16_rounds_and_little_more():
  attend = functools.partial(past_kernel.attend, interpret=True)
  for rule in (Rule(0.1), Rule(0.1, 3.0)):
    assert attention_gpu.error_to_past(attend, rule) < gpu.MOST_OFF / 2
    assert attention_gpu.error_to_past(attend, rule, dtype=jnp.float32, of_cache=jnp.float32) < 1e-5

  def sees_one_more(rule, q, seen):
    return attend(rule, q, seen._replace(seen_BxS=seen.seen_BxS | jnp.roll(seen.seen_BxS, 40, axis=1)))

  assert attention_gpu.error_to_past(sees_one_more, Rule(0.1)) > 2 * gpu.MOST_OFF


def a_gpu(capability="9.0", kind="NVIDIA H100 80GB HBM3"):
  return types.SimpleNamespace(platform="gpu", compute_capability=capability, device_kind=kind)


def test_refusals_name_the_reason(monkeypatch):
  def refused(device, slots=64, size=64, dtype=jnp.bfloat16):
    cache = jnp.zeros((1, 2, slots, size), jnp.float32)
    return attention_gpu.refusal_to_past(device, Rule(0.1, window=7), jnp.zeros((1, 1, 6, size), dtype),
                                         Seen(cache, cache, jnp.ones((1, slots), bool)))

  assert refused(a_gpu()) is None  # not here: there is nothing to try
  assert refused(a_gpu(), size=96) == "heads of size 96; allowed: powers of two from 16 to 256"
  assert refused(a_gpu(), slots=1000) == "a cache of 1000 slots, which is no multiple of 16"
  assert "compute capability is 7.5; they need 8.0" in refused(a_gpu("7.5", "Tesla T4"))
  assert "precision.compute=bfloat16" in refused(a_gpu(), dtype=jnp.float32)
  asked = []
  monkeypatch.setattr(jax, "local_devices", lambda: [a_gpu()])
  monkeypatch.setattr(attention_gpu, "error_to_past", lambda *given: asked.append(given) or 0.5)
  attention_gpu._distrust_to_past.cache_clear()
  assert refused(a_gpu()) == "this GPU, where their results are off by 0.5 of the largest number"
  assert asked == [(past_kernel.attend, Rule(0.1), 3, 64, "bfloat16", "float32")]  # for layers of all windows
  attention_gpu._distrust_to_past.cache_clear()


def decoded(impl, slots=64, size=K, **options):
  q, k, v, seen = made(slots)
  q, k, v = (x[..., :size] for x in (q, k, v))
  active = jnp.array([True, False, True, False])  # a token that is there sees itself
  return attend_to_past(Rule(0.3), q[:, None], Seen(k, v, seen), active, impl=impl, **options)


def test_decoding_takes_it_where_it_is_told_to(monkeypatch):
  called, said = [], []
  right = past_kernel.attend
  monkeypatch.setattr(past_kernel, "attend", lambda *args, **more: called.append(1) or right(*args, **more))
  monkeypatch.setattr(gpu, "warn", lambda what, reason: said.append((what, reason)))
  ours, theirs = decoded("triton"), decoded("blocked")
  assert (called, said) == ([1], [])
  np.testing.assert_allclose(ours, theirs, atol=1e-6)
  assert not ours[1].any() and ours[0].any()
  decoded("auto"), decoded("splash")  # which is no GPU's, here
  q, k, _, _ = made(64)
  decoded("triton", more=(q[:, None], k))  # of which the kernel knows nothing
  assert (called, said) == ([1], [])
  decoded("triton", size=12)
  assert called == [1]
  assert said == [("attention to a cache", "heads of size 12; allowed: powers of two from 16 to 256")]


@pytest.mark.parametrize("impl", ["triton", "blocked", "auto"])
def test_a_model_decodes_as_its_key_says(impl, monkeypatch):
  """On what says that it is a GPU, whose kernel is interpreted; the hidden states are the same."""
  def hidden(impl):
    model = make(num_layers=2, head_dim=16, attention=impl)
    params, cache = model.decoding_params(random_params(model)), model.empty_cache(2, 32)
    tokens, active = np.arange(3, 5, dtype=np.int32), np.ones(2, bool)
    for step in range(3):
      out, cache = model.decode(params, tokens + step, active, cache)
    return out

  expected, called = hidden("auto"), []
  right = past_kernel.attend
  monkeypatch.setattr(logical_axes, "platform", lambda: "gpu")
  monkeypatch.setattr(past_kernel, "attend", lambda *args, **more: called.append(1) or right(
      *args, **more | dict(interpret=True)))
  np.testing.assert_allclose(hidden(impl), expected, atol=1e-5)
  assert bool(called) == (impl != "blocked")


@pytest.mark.devices(8)
@pytest.mark.parametrize("shape, rules", [
    ((2, 2), dict(batch="data", heads="tensor", kv_heads="tensor")), ((1, 4), dict(heads="tensor"))])
def test_on_a_mesh_each_device_attends_for_its_rows_and_heads(shape, rules):
  """In the second, four devices cannot have two key/value heads each, and have all."""
  mesh = jax.make_mesh(shape, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
  with logical_axes.placed(logical_axes.Placement(mesh, rules)):
    split = jax.jit(functools.partial(decoded, "triton"))()
  np.testing.assert_allclose(split, decoded("blocked"), atol=1e-6)


@pytest.mark.skipif(plan_gpu.plugin() is None, reason="needs XLA for GPUs, JAX's CUDA plugin")
@pytest.mark.parametrize("kind, size", [("a100", 64), ("l4", 128), ("h100", 128), ("b200", 256)])
def test_it_compiles_for_gpus_that_are_not_here(kind, size):
  device = plan_gpu.devices(kind, 1, 1)[0]

  def shaped(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

  cache = shaped(8, 8, 2048, size)
  with plan_gpu.meant([device]):
    run = jax.jit(functools.partial(past_kernel.attend, Rule(0.1, 30.0)))
    rows = run.lower(shaped(8, 16, size), Seen(cache, cache, shaped(8, 2048, dtype=jnp.bool_)))
    pages, ids = shaped(100, 8, PAGE, size), functools.partial(shaped, dtype=jnp.int32)
    paged = run.lower(shaped(8, 16, size), Seen(pages, pages, shaped(100, PAGE, dtype=jnp.bool_),
                                                Table(ids(8, 32), ids(100), ids(100))))
    programs = [lowered.compile().as_text() for lowered in (rows, paged)]
  assert [text.count('custom_call_target="__gpu$xla.gpu.triton"') for text in programs] == [1, 1]
