"""Mixture of experts: against plain loops, and what must not change a token's output."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import activations
from models.experts import moe as moe_lib
from tests import tiny
from tests.models.common import BATCH, SEGMENTS, TOKENS, VOCAB, make, paths, random_params
from trainer import state as state_lib
from trainer import update as update_lib
from trainer.config import defaults
from trainer.config.checks import View
from trainer.distributed import mesh as mesh_lib
from trainer.metrics import Mean, to_floats
from trainer.optim import optimizer as optim
from trainer.strategies import seq
from trainer.telemetry.writers import read_rows

pytestmark = pytest.mark.devices(8)

E, K = 4, 2
PLAIN = dict(num_experts=E, experts_per_token=K, expert_size=12)
GROUPS = dict(num_experts=8, experts_per_token=3, expert_size=12, scores="sigmoid", groups=4, groups_used=2,
              weight_scale=1.5)
SHARED = dict(PLAIN, shared_size=8, shared_gate=True, normalize_weights=False)
LOSSES = dict(SHARED, balance_loss=0.3, z_loss=0.1)


@functools.cache
def model_and_params(**changed):
  """A model of two layers with random parameters, and a router decided enough for uneven loads."""
  moe = dict(LOSSES, **changed)
  model = make(num_layers=2, attention_block=16, moe=moe)
  params = random_params(model)
  params["blocks"]["moe"]["router"]["kernel"] *= 3.0
  return model, params


def equal(expected, actual, rel=1e-6):
  """Leaf by leaf, relative to each leaf's largest entry; `rel` of the whole tree's where a leaf is only rounding."""
  leaves = paths(expected)
  largest = max(float(np.abs(x).max()) for x in leaves.values())
  for path, leaf in paths(actual).items():
    atol = rel * max(float(np.abs(leaves[path]).max()), 1e-2 * largest)
    np.testing.assert_allclose(leaf, leaves[path], rtol=0, atol=atol, err_msg=path)


# ------------------------------------------------------------------------------------------ the layer

LAYERS = {
    "softmax first": PLAIN,
    "not normalized": dict(PLAIN, normalize_weights=False),
    "softmax after": dict(PLAIN, softmax="after_topk", normalize_weights=False),
    "one expert": dict(PLAIN, experts_per_token=1, normalize_weights=False),
    "all experts": dict(PLAIN, experts_per_token=E),
    "shared": dict(PLAIN, shared_size=8),
    "shared with a gate": SHARED,
    "geglu": dict(PLAIN, activation="geglu_exact"),
    "groups": dict(GROUPS, scores="softmax"),
    "sigmoid": dict(GROUPS, choice_bias=True),
    "sigmoid, not normalized": dict(GROUPS, groups=1, groups_used=1, normalize_weights=False),
    "on input": dict(PLAIN, shared_size=8, scores="sigmoid", normalize_weights=False, weights_on_input=True),
    "biases": dict(PLAIN, shared_size=8, router_bias=True, mlp_bias=True),
    "without a gate": dict(PLAIN, shared_size=8, scores="sigmoid", choice_bias=True, activation="relu2"),
}


def silu(x):
  return x / (1 + np.exp(-x))


def np_layer(p, x, moe, act, given=None):
  """One token after another, one expert after another; `p` are one layer's parameters, in float64. `given`: the experts
  of each token, in place of those that are chosen."""
  out = np.zeros_like(x)

  def dense(x, name, e=...):
    return x @ p[name + "/kernel"][e] + (p[name + "/bias"][e] if name + "/bias" in p else 0)

  def hidden(x, of, e=...):
    up = dense(x, f"{of}/up", e)
    return act(dense(x, f"{of}/gate", e)) * up if f"{of}/gate/kernel" in p else act(up)

  for t, x_D in enumerate(x):
    logits = dense(x_D, "router")
    sigmoid = moe.get("scores") == "sigmoid"
    weights = 1 / (1 + np.exp(-logits)) if sigmoid else np.exp(logits) / np.exp(logits).sum()
    by = weights + p.get("router/choice_bias", 0.0)
    size = len(by) // moe.get("groups", 1)
    best = [np.sort(by[at:at + size])[-2 if sigmoid else -1:].sum() for at in range(0, len(by), size)]
    used = np.argsort(best)[-moe.get("groups_used", 1):]
    allowed = [e for e in np.argsort(-by, kind="stable") if e // size in used]
    chosen = allowed[: moe["experts_per_token"]] if given is None or given[t][0] < 0 else list(given[t])
    if moe.get("softmax") == "after_topk":
      weights = np.exp(logits) / np.exp(logits[chosen]).sum()
    if moe.get("normalize_weights", True):
      weights = weights / weights[chosen].sum()
    weights = weights * moe.get("weight_scale", 1.0)
    for e in chosen:
      before, after = (weights[e], 1.0) if moe.get("weights_on_input") else (1.0, weights[e])
      out[t] += after * dense(hidden(before * x_D, "experts", e), "experts/down", e)
    if "shared/up/kernel" in p:
      shared = dense(hidden(x_D, "shared"), "shared/down")
      out[t] += shared / (1 + np.exp(-x_D @ p["shared_gate/kernel"])) if moe.get("shared_gate") else shared
  return out


def layer_of(moe):
  """(module of one layer, its random parameters, the function of both) for the options of LAYERS."""
  options = dict(moe)
  outside = dict(activation=options.pop("activation", "swiglu"), mlp_bias=options.pop("mlp_bias", False))
  model = make(num_layers=1, moe=options, **outside)
  whole, rng = jax.jit(model.init)(jax.random.key(0)), np.random.default_rng(0)
  params = jax.tree.map(lambda p: rng.normal(scale=0.4, size=p.shape[1:]).astype(np.float32), whole["blocks"]["moe"])

  def apply(params, x, segments, *more):
    stacked = {**whole["blocks"], "moe": jax.tree.map(lambda p: p[None], params)}
    blocks = nnx.merge(model._graph, {**whole, "blocks": stacked}).blocks
    return jax.tree.map(lambda p: p[0], blocks).moe(x, segments, *more)

  return params, apply


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_equals_a_loop_over_tokens_and_experts(name):
  moe = LAYERS[name]
  params, apply = layer_of(moe)
  x = np.random.default_rng(1).normal(size=(*SEGMENTS.shape, 16)).astype(np.float32)
  y, _ = jax.jit(apply)(params, x, SEGMENTS)
  p = {path: np.asarray(leaf, np.float64) for path, leaf in paths(params).items()}
  act = {"swiglu": silu, "relu2": lambda x: np.maximum(x, 0) ** 2,
         "geglu_exact": lambda x: x * np.asarray(jax.scipy.stats.norm.cdf(x), np.float64)}[
             moe.get("activation", "swiglu")]
  real = SEGMENTS > 0
  np.testing.assert_allclose(np.asarray(y)[real], np_layer(p, x[real].astype(np.float64), moe, act), atol=2e-5)
  assert "shared_size" in moe or not np.asarray(y)[~real].any()  # which no expert spends time on


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_equal_those_of_every_expert_on_every_token(name):
  """The same function without any dispatch: all experts computed, weights of those not chosen 0."""
  moe = LAYERS[name]
  params, apply = layer_of(moe)
  act = {**activations.GATED, **activations.UNGATED}[moe.get("activation", "swiglu")]
  x = np.random.default_rng(1).normal(size=(*SEGMENTS.shape, 16)).astype(np.float32)
  mix = np.random.default_rng(2).normal(size=x.shape).astype(np.float32) * (SEGMENTS > 0)[..., None]

  def hidden(up, gate=None):
    return act(up) if gate is None else act(gate) * up

  def dense(p, x):
    logits = x @ p["router"]["kernel"] + p["router"].get("bias", 0.0)
    sigmoid, groups = moe.get("scores") == "sigmoid", moe.get("groups", 1)
    scores = jax.nn.sigmoid(logits) if sigmoid else jax.nn.softmax(logits)
    by = jax.lax.stop_gradient(scores + p["router"].get("choice_bias", 0.0))
    best = jnp.sort(by.reshape(*by.shape[:-1], groups, -1), axis=-1)[..., -2 if sigmoid else -1:].sum(-1)
    used = best >= jnp.sort(best, axis=-1)[..., -moe.get("groups_used", 1), None]
    by = jnp.where(jnp.repeat(used, by.shape[-1] // groups, axis=-1), by, -jnp.inf)
    chosen = by >= jnp.sort(by, axis=-1)[..., -moe["experts_per_token"], None]
    if moe.get("softmax") == "after_topk":
      weights = jax.nn.softmax(jnp.where(chosen, logits, -jnp.inf))
    else:
      weights = scores * chosen
    if moe.get("normalize_weights", True):
      weights = weights / weights.sum(-1, keepdims=True)
    weights = weights * moe.get("weight_scale", 1.0)
    w = {name: part["kernel"] for name, part in p["experts"].items()}
    b = {name: part.get("bias", np.zeros((1, 1))) for name, part in p["experts"].items()}
    seen = x[:, :, None]
    if moe.get("weights_on_input"):
      seen, weights = weights[..., None] * seen, chosen.astype(x.dtype)
    wide = {name: jnp.einsum("bted,edf->btef", jnp.broadcast_to(seen, (*weights.shape, 16)), w[name]) + b[name]
            for name in w if name != "down"}
    y = jnp.einsum("bte,bted->btd", weights, jnp.einsum("btef,efd->bted", hidden(**wide), w["down"]) + b["down"])
    if "shared" in p:
      wide = {name: x @ part["kernel"] + part.get("bias", 0) for name, part in p["shared"].items() if name != "down"}
      down = p["shared"]["down"]
      shared = hidden(**wide) @ down["kernel"] + down.get("bias", 0)
      y += shared * (jax.nn.sigmoid(x @ p["shared_gate"]["kernel"]) if "shared_gate" in p else 1.0)
    return y

  def gradients(f):
    return jax.jit(jax.grad(lambda p, x: jnp.sum(f(p, x) * mix), argnums=(0, 1)))(params, x)

  expected, actual = gradients(dense), gradients(lambda p, x: apply(p, x, SEGMENTS)[0])
  equal(dict(p=expected[0], x=expected[1]), dict(p=actual[0], x=actual[1]), rel=5e-6)
  if moe["experts_per_token"] < E and moe.get("normalize_weights", True) is False:
    assert np.abs(actual[0]["router"]["kernel"]).max() > 1e-3


@pytest.mark.parametrize("name", ["softmax first", "not normalized", "sigmoid", "on input", "biases"])
def test_replayed_experts_have_the_outputs_and_gradients_of_a_loop_with_these(name):
  """Routing replay: random experts for most tokens, the router's own for others; slopes of the loop in float64 along
  random directions of all parameters and inputs."""
  moe = LAYERS[name]
  params, apply = layer_of(moe)
  rng = np.random.default_rng(3)
  x, mix = (rng.normal(size=(*SEGMENTS.shape, 16)).astype(np.float32) for _ in range(2))
  mix *= (SEGMENTS > 0)[..., None]
  k = moe["experts_per_token"]
  recorded = np.array([[rng.permutation(moe["num_experts"])[:k] for _ in row] for row in SEGMENTS])
  recorded[:, ::5] = -1

  def product(params, x):
    routing = moe_lib.Routing(jnp.asarray(recorded, jnp.int16), replay=True)
    y, stats = apply(params, x, SEGMENTS, None, routing)
    return jnp.sum(y * mix), (y, stats)

  (_, (y, stats)), gradients = jax.jit(jax.value_and_grad(product, (0, 1), has_aux=True))(params, x)
  real = SEGMENTS > 0
  assert not np.asarray(stats["differs"])[recorded[..., 0] >= 0].any()

  def loop(p, x):
    return np_layer(paths(p), x[real], moe, silu, recorded[real])

  exact = jax.tree.map(lambda a: np.asarray(a, np.float64), (params, x))
  np.testing.assert_allclose(np.asarray(y)[real], loop(*exact), atol=2e-5)
  for _ in range(4):
    towards = jax.tree.map(lambda a: rng.normal(size=a.shape), exact)
    ends = [(loop(*jax.tree.map(lambda a, d, h=h: a + h * d, exact, towards)) * mix[real]).sum() for h in (1e-6, -1e-6)]
    slope = sum((np.asarray(g, np.float64) * d).sum() for g, d in zip(*map(jax.tree.leaves, (gradients, towards)),
                                                                     strict=True))
    assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(slope, rel=1e-4, abs=1e-3)


def test_parameter_layout_and_initial_scale():
  model = make(num_layers=3, hidden_size=64, moe=dict(LOSSES, expert_size=48))
  params = {k: v for k, v in paths(jax.jit(model.init)(jax.random.key(0))).items() if "/moe/" in k}
  assert {k.removeprefix("blocks/moe/"): v.shape for k, v in params.items()} == {
      "router/kernel": (3, 64, E), "experts/gate/kernel": (3, E, 64, 48), "experts/up/kernel": (3, E, 64, 48),
      "experts/down/kernel": (3, E, 48, 64), "shared/gate/kernel": (3, 64, 8), "shared/up/kernel": (3, 64, 8),
      "shared/down/kernel": (3, 8, 64), "shared_gate/kernel": (3, 64, 1)}
  np.testing.assert_allclose(params["blocks/moe/experts/up/kernel"].std(), 64**-0.5, rtol=0.03)
  np.testing.assert_allclose(params["blocks/moe/experts/down/kernel"].std(), (48 * 2 * 3) ** -0.5, rtol=0.03)
  assert not any("/mlp/" in path for path in paths(model.abstract_params()))


# ------------------------------------------------------------------------------------------ others change nothing


@pytest.mark.parametrize("scan_layers", [True, False])
def test_perturbing_another_document_or_padding_changes_nothing(scan_layers):
  """T14: no capacity, no shared statistic. Rows move within the sorted batch: bitwise, but for rounding on a CPU whose
  products compute a block's last rows in another way (seen with AVX2 in blocks of 8 and 32 rows)."""
  block = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
  product = jax.jit(lambda x: x @ np.eye(16, dtype=np.float32)[::-1] @ (block.T @ block))
  exact = all((np.asarray(product(np.roll(block, n, 0))) == np.roll(product(block), n, 0)).all() for n in range(8))
  model = make(num_layers=2, moe=LOSSES, scan_layers=scan_layers)
  params = model_and_params()[1]
  hidden = jax.jit(lambda batch: model.apply(params, batch).hidden)
  before = np.asarray(hidden(BATCH))
  for segment in (1, 2, 0):
    for shift in (7, 11):
      changed = np.where(SEGMENTS == segment, (TOKENS + shift) % VOCAB, TOKENS)
      after = np.asarray(hidden(dict(BATCH, tokens=changed)))
      others = SEGMENTS != segment
      np.testing.assert_allclose(after[others], before[others], rtol=0, atol=0 if exact else 3e-6)
      assert (after[SEGMENTS == segment] != before[SEGMENTS == segment]).any()


def test_a_document_is_the_same_bits_beside_partners_of_any_length():
  """In rows of one length, at one place: packed with others, with padding, in front of anything."""
  model, params = model_and_params()
  rng = np.random.default_rng(0)
  document = rng.integers(0, VOCAB, 9)
  hidden = jax.jit(lambda batch: model.apply(params, batch).hidden)
  seen = []
  for partner in (0, 1, 6, 15):
    tokens, segments = rng.integers(0, VOCAB, (3, 24)), np.zeros((3, 24), np.int32)
    tokens[1, :9], segments[1, :9], segments[1, 9 : 9 + partner] = document, 1, 2
    segments[0, : 2 * partner] = segments[2, :partner] = 1
    seen.append(np.asarray(hidden(dict(tokens=tokens, segment_ids=segments)))[1, :9])
  for other in seen[1:]:
    np.testing.assert_array_equal(other, seen[0])


def test_nothing_is_dropped_when_every_token_wants_the_same_experts():
  params, apply = layer_of(PLAIN)
  params["router"]["kernel"][:] = 0.0
  params["router"]["kernel"][:, 1], params["router"]["kernel"][:, 3] = 2.0, 1.0
  x = np.abs(np.random.default_rng(0).normal(size=(2, 200, 16))).astype(np.float32)
  y, stats = jax.jit(apply)(params, x, np.ones((2, 200), np.int32))
  np.testing.assert_array_equal(stats["counts"], [[0, 200, 0, 200]] * 2)
  p = {path: np.asarray(leaf, np.float64) for path, leaf in paths(params).items()}
  np.testing.assert_allclose(y.reshape(-1, 16), np_layer(p, x.reshape(-1, 16).astype(np.float64), PLAIN, silu),
                             atol=1e-4)


# ------------------------------------------------------------------------------------------ losses and metrics


def np_statistics(logits, segments):
  """Per row, token after token: entropy, counts, balance (within each document), z."""
  out = dict(entropy=[], counts=[], balance=[], z=[])
  for row, ids in zip(logits.astype(np.float64), segments, strict=True):
    p = np.exp(row) / np.exp(row).sum(-1, keepdims=True)
    chosen = np.argsort(-row, axis=-1, kind="stable")[:, :K]
    real = np.flatnonzero(ids)
    counts = np.zeros((ids.max() + 1, E))
    for t in real:
      counts[ids[t], chosen[t]] += 1
    length = np.bincount(ids)
    out["counts"].append(counts.sum(0))
    out["entropy"].append(sum(-(p[t] * np.log(p[t])).sum() for t in real))
    out["balance"].append(sum(E / (K * length[ids[t]]) * (counts[ids[t]] * p[t]).sum() for t in real))
    out["z"].append(sum(np.log(np.exp(row[t]).sum()) ** 2 for t in real))
  return {name: np.array(values) for name, values in out.items()}


def test_statistics_equal_a_loop_over_tokens():
  logits = np.random.default_rng(0).normal(scale=2.0, size=(*SEGMENTS.shape, E)).astype(np.float32)
  spec = make(moe=LOSSES).spec.moe

  @jax.jit
  def statistics(logits, segments):
    experts, _ = moe_lib.route((logits,), moe=spec)
    return moe_lib.statistics(logits, experts, segments, spec)

  stats = statistics(logits, SEGMENTS)
  expected = np_statistics(logits, SEGMENTS)
  assert set(stats) == set(expected)
  for name, value in stats.items():
    np.testing.assert_allclose(value, expected[name], rtol=1e-5, err_msg=name)


def test_losses_in_closed_form():
  """Even routing over all experts: balance 1, entropy log E; one pair of experts, certain: balance E / k, z known."""
  spec = make(moe=LOSSES).spec.moe
  segments = jnp.asarray([[1, 1, 2, 2, 0]])

  @jax.jit
  def reported(logits):
    experts, _ = moe_lib.route((logits,), moe=spec)
    stats = {k: v[None] for k, v in moe_lib.statistics(logits, experts, segments, spec).items()}
    return moe_lib.report(stats, segments, spec)

  def values(logits_TxE):
    losses, metrics = reported(jnp.asarray(logits_TxE, jnp.float32)[None])
    return to_floats({k: Mean(m.sum.sum(), m.weight.sum()) if isinstance(m, Mean) else m
                      for k, m in (losses | metrics).items()})

  tiny_preference = 1e-4 * np.array([[1, 1, 0, 0], [0, 0, 1, 1]] * 2 + [[9, 9, 0, 0]])
  even = values(tiny_preference)
  assert even["moe/balance_loss"] == pytest.approx(0.3 * 1.0, rel=1e-3)
  assert even["moe/entropy"] == pytest.approx(np.log(E), rel=1e-3)
  assert even["moe/z_loss"] == pytest.approx(0.1 * np.log(E) ** 2, rel=1e-3)
  assert (even["moe/dead_experts"], even["moe/max_load"]) == (0.0, 1.0)
  certain = values([[50, 50, 0, 0]] * 4 + [[0, 0, 50, 50]])
  assert certain["moe/balance_loss"] == pytest.approx(0.3 * E / K, rel=1e-5)
  assert certain["moe/entropy"] == pytest.approx(np.log(2), rel=1e-5)
  assert certain["moe/z_loss"] == pytest.approx(0.1 * (50 + np.log(2)) ** 2, rel=1e-5)
  assert (certain["moe/dead_experts"], certain["moe/max_load"]) == (0.5, 2.0)


def test_load_of_layers():
  load = moe_lib.Load(np.array([[4, 0, 0, 0], [1, 1, 1, 1], [0, 2, 1, 1]], np.int32))
  assert load.to_floats("moe") == {"moe/dead_experts": pytest.approx(4 / 12), "moe/max_load": pytest.approx(7 / 3)}
  assert moe_lib.Load(np.zeros((2, 4), np.int32)).to_floats("moe") == {}


def test_the_model_reports_every_layers_statistics_with_its_coefficients():
  """Terms are means over tokens and layers; padding, whatever it holds, is in none of them."""
  model, params = model_and_params()
  apply = jax.jit(model.apply)
  out = apply(params, BATCH)
  weight = 2 * (SEGMENTS > 0).sum(1)
  assert set(out.losses) == {"moe/balance_loss", "moe/z_loss"} and set(out.metrics) == {"moe/entropy", "moe"}
  for term in (*out.losses.values(), out.metrics["moe/entropy"]):
    np.testing.assert_array_equal(term.weight, weight)
  assert out.metrics["moe"].counts.shape == (2, E)
  np.testing.assert_array_equal(out.metrics["moe"].counts.sum(1), [K * (SEGMENTS > 0).sum()] * 2)
  other = apply(params, dict(BATCH, tokens=np.where(SEGMENTS == 0, (TOKENS + 9) % VOCAB, TOKENS)))
  jax.tree.map(np.testing.assert_array_equal, (out.losses, out.metrics), (other.losses, other.metrics))
  doubled = jax.jit(make(num_layers=2, moe=dict(LOSSES, balance_loss=0.6)).apply)(params, BATCH).losses
  np.testing.assert_allclose(doubled["moe/balance_loss"].sum, 2 * out.losses["moe/balance_loss"].sum, rtol=1e-5)
  assert jax.eval_shape(make(num_layers=2, moe=SHARED).apply, params, BATCH).losses == {}


def test_dense_models_report_nothing():
  model = make(num_layers=2)
  out = jax.eval_shape(model.apply, model.abstract_params(), BATCH)
  assert out.losses == {} and out.metrics == {}


# ------------------------------------------------------------------------------------------ how it is run


def gradient(model, params):
  """(gradient, counts)."""
  def objective(params):
    out = model.apply(params, BATCH)
    # A loss that needs every expert's output, and the model's own terms.
    weights = (SEGMENTS > 0) * np.linspace(0.5, 1.5, SEGMENTS.shape[1])
    value = jnp.sum(jnp.tanh(out.hidden).sum(-1) * weights) + sum(jnp.sum(m.sum) for m in out.losses.values())
    return value, out.metrics["moe"].counts

  return jax.jit(jax.grad(objective, has_aux=True))(params)


@functools.cache
def gradient_of_base():
  return gradient(*model_and_params())


@pytest.mark.parametrize("options", [dict(scan_layers=False), dict(remat="full"), dict(remat="attention_mlp"),
                                     dict(remat="dots"),
                                     dict(window=16, layer_pattern=("local", "global"), remat="full")], ids=str)
def test_scanned_unrolled_and_remat_agree(options):
  """I11; a period of two layers scans both at once (and the window is as long as the row)."""
  params = model_and_params()[1]
  model = make(num_layers=2, attention_block=16, moe=LOSSES, **options)
  expected, actual = gradient_of_base(), gradient(model, params)
  equal(expected[0], actual[0], rel=2e-6)
  np.testing.assert_array_equal(expected[1], actual[1])


def test_layers_left_over_after_whole_periods_keep_their_order():
  model = make(num_layers=3, window=3, layer_pattern=("local", "global"), moe=LOSSES)
  unrolled = make(num_layers=3, window=3, layer_pattern=("local", "global"), moe=LOSSES, scan_layers=False)
  params = random_params(model)
  counts = [np.asarray(jax.jit(m.apply)(params, BATCH).metrics["moe"].counts) for m in (model, unrolled)]
  np.testing.assert_array_equal(*counts)
  assert (counts[0][0] != counts[0][2]).any() and (counts[0][1] != counts[0][2]).any()


def test_bfloat16_is_close_to_float32():
  exact, params = model_and_params()
  fast = make(num_layers=2, attention_block=16, moe=LOSSES, compute_dtype=jnp.bfloat16)
  expected, actual = (jax.jit(m.apply)(params, BATCH) for m in (exact, fast))
  assert actual.hidden.dtype == jnp.bfloat16
  error = np.abs(np.asarray(actual.hidden, np.float32) - expected.hidden)[SEGMENTS > 0]
  # A token whose router nearly ties may choose another expert: most errors are small, not all.
  assert 0 < np.median(error) < 0.03 * np.asarray(expected.hidden).std()
  assert actual.losses["moe/z_loss"].sum.dtype == jnp.float32
  np.testing.assert_allclose(actual.losses["moe/z_loss"].sum, expected.losses["moe/z_loss"].sum, rtol=0.1)
  norms = [float(optim.global_norm(gradients)) for gradients in (gradient(fast, params)[0], gradient_of_base()[0])]
  np.testing.assert_allclose(*norms, rtol=0.2)


def test_flops_count_the_experts_that_a_token_passes_through():
  dense = make(num_layers=2, intermediate_size=4).flops_per_token(8) - 6 * 2 * 3 * 16 * 4
  moe = make(num_layers=2, moe=LOSSES).flops_per_token(8)
  router, experts, shared, gate = 16 * E, K * 3 * 16 * 12, 3 * 16 * 8, 16
  assert moe == pytest.approx(dense + 6 * 2 * (router + experts + shared + gate))


# ------------------------------------------------------------------------------------------ steps of training

TRAINED = dict(num_experts=E, experts_per_token=K, expert_size=16, shared_size=8, shared_gate=True,
               balance_loss=0.2, z_loss=0.05)


def make_update(micro_batch_size):
  """(update, state) of a tiny model under plain SGD, whose step is minus the gradient."""
  model, config = tiny.model(moe=TRAINED), defaults()
  config.optimizer.update(dict(name="sgd", learning_rate=1.0, momentum=0.0, nesterov=False,
                               weight_decay=0.0))
  config.schedule.update(name="constant", warmup_percent=-1.0, warmup_steps=0)
  optimizer = optim.make_optimizer(config.optimizer, config.schedule, model.abstract_params(), total_steps=10,
                                   to_steps=lambda cfg, prefix, default=None, where="": 0)
  strategy = View(config.strategy)
  update = update_lib.make_update_fn(
      lambda params, batch, rng: seq.loss(model, params, batch, rng, strategy), optimizer,
      update_lib.Options(seed=0, micro_batch_size=micro_batch_size, source_names=("a", "b")))
  fresh = state_lib.make_fresh(optimizer, ema=False)
  return update, lambda key: fresh(model.init(key))


def spread_router(state):
  """A router decided enough for uneven loads and experts without tokens."""
  state["params"]["blocks"]["moe"]["router"]["kernel"] *= 6.0
  return state


@functools.cache
def step_in(micro_batch_size):
  update, init = make_update(micro_batch_size)
  state = spread_router(jax.jit(init)(jax.random.key(1)))
  new, metrics = jax.jit(update)(state, tiny.batch(8, 16))
  return jax.tree.map(lambda a, b: np.asarray(a - b), state["params"], new["params"]), jax.device_get(metrics)


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_micro_batches_change_neither_gradient_nor_terms_nor_load(micro_batch_size):
  """I1, T4: 8 × 1 and 4 × 2 rows of ragged documents, one row of padding only, against 8 at once."""
  whole, whole_metrics = step_in(8)
  split, metrics = step_in(micro_batch_size)
  norm = float(optim.global_norm(whole))
  assert norm > 0.1 and np.abs(whole["blocks"]["moe"]["router"]["kernel"]).max() > 1e-3
  for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(split), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * norm)
  np.testing.assert_array_equal(metrics["moe"].counts, whole_metrics["moe"].counts)
  values, whole_values = to_floats(metrics), to_floats(whole_metrics)
  for name in ("moe/balance_loss", "moe/balance_loss/a", "moe/z_loss", "moe/entropy", "moe/entropy/b", "objective"):
    assert values[name] == pytest.approx(whole_values[name], rel=1e-6), name
  assert values["objective"] == pytest.approx(values["loss"] + values["moe/balance_loss"] + values["moe/z_loss"])


def test_the_balance_loss_evens_the_load():
  """Steps against its gradient alone, from a router that sends most tokens to two experts of four."""
  model = make(moe=dict(PLAIN, balance_loss=1.0))
  x = np.random.default_rng(0).normal(size=(4, 64, 16)).astype(np.float32) + 0.5
  segments = np.repeat([[1] * 30 + [2] * 30 + [0] * 4], 4, axis=0)
  start = np.random.default_rng(1).normal(scale=0.05, size=(16, E)).astype(np.float32) + [0.1, 0.1, 0.0, 0.0]

  def loss(kernel):
    logits = x @ kernel
    experts, _ = moe_lib.route((logits,), moe=model.spec.moe)
    stats = jax.tree.map(lambda v: v[None], moe_lib.statistics(logits, experts, segments, model.spec.moe))
    losses, metrics = moe_lib.report(stats, segments, model.spec.moe)
    return losses["moe/balance_loss"].sum.sum() / losses["moe/balance_loss"].weight.sum(), metrics["moe"]

  def step(kernel, _):
    (value, load), gradient = jax.value_and_grad(loss, has_aux=True)(kernel)
    return kernel - 0.1 * gradient, (value, load)

  _, (values, loads) = jax.jit(lambda kernel: jax.lax.scan(step, kernel, length=40))(start)
  first, last = (moe_lib.Load(loads.counts[i]).to_floats("moe")["moe/max_load"] for i in (0, -1))
  assert first > 1.5 and last < 1.1 and values[-1] < 1.01 < values[0]


MESHES = {"data": dict(data=8, fsdp=1, tensor=1), "fsdp": dict(data=1, fsdp=8, tensor=1),
          "tensor and fsdp": dict(data=1, fsdp=4, tensor=2)}


@pytest.mark.parametrize("name", MESHES)
def test_eight_devices_compute_what_one_does(name):
  """I2: loss, gradient (one step of SGD) and load."""
  expected, expected_metrics = step_in(8)
  update, init = make_update(8)
  mesh = mesh_lib.make_mesh(MESHES[name])
  abstract = jax.eval_shape(init, jax.random.key(0))
  params, notes = mesh_lib.param_shardings(abstract["params"], mesh)
  shardings = mesh_lib.state_shardings(abstract, abstract["params"], params, mesh)
  batch = tiny.batch(8, 16)
  with mesh_lib.activation_rules(mesh):
    state = jax.jit(lambda key: spread_router(init(key)), out_shardings=shardings)(jax.random.key(1))
    placed = mesh_lib.place_batch(lambda rows: {k: v[rows] for k, v in batch.items()}, 8,
                                  mesh_lib.batch_sharding(mesh))
    compiled = jax.jit(update, out_shardings=(shardings, None)).lower(state, placed).compile()
    new, metrics = compiled(state, placed)
  actual = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), state["params"], new["params"])
  norm = float(optim.global_norm(expected))
  for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * norm)
  np.testing.assert_array_equal(metrics["moe"].counts, expected_metrics["moe"].counts)
  values = to_floats(jax.device_get(metrics))
  for key, value in to_floats(expected_metrics).items():
    assert values[key] == pytest.approx(value, rel=1e-5), key
  if name == "fsdp":
    return
  # Tokens stay where they are: no collective moves the activations of the sorted batch, [rows, D] and [rows, F].
  gathered = [line for line in compiled.as_text().splitlines() if "all-gather(" in line or "all-to-all(" in line]
  assert not any("argsort" in line or "top_k" in line for line in gathered)


def test_expert_kernels_are_split_over_fsdp_and_tensor():
  mesh = mesh_lib.make_mesh(MESHES["tensor and fsdp"])
  placed = paths(mesh_lib.param_shardings(tiny.model(moe=TRAINED).abstract_params(), mesh)[0]["blocks"]["moe"])
  specs = {path: tuple(sharding.spec) for path, sharding in placed.items()}
  assert specs["experts/gate/kernel"] == specs["experts/up/kernel"] == (None, None, "fsdp", "tensor")
  assert specs["experts/down/kernel"] == (None, None, "tensor", "fsdp")
  assert specs["shared/up/kernel"] == (None, "fsdp", "tensor") and specs["router/kernel"][1] == "fsdp"


def test_rows_that_the_mesh_does_not_divide_are_computed_everywhere():
  """As in evaluations of a few rows."""
  model, params = model_and_params()
  expected = jax.jit(model.apply)(params, BATCH)
  with mesh_lib.activation_rules(mesh_lib.make_mesh(MESHES["data"])):
    actual = jax.jit(lambda params: model.apply(params, BATCH))(params)
  np.testing.assert_allclose(actual.hidden, expected.hidden, atol=1e-5)


def test_a_run_writes_the_metrics(tmp_path):
  from trainer import train
  corpus = tiny.write_corpus(tmp_path / "texts")
  config = tiny.config(corpus, total_steps=3, grad_accum_steps=2)
  del config.evals.val
  config.model.moe.update(TRAINED)
  config.remat, config.mesh = "full", dict(data=2, fsdp=2, tensor=2)
  train(config, tmp_path / "run")
  rows = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
  assert [row["step"] for row in rows] == [1, 2, 3]
  for row in rows:
    assert 0 < row["moe/entropy"] <= np.log(E) + 1e-6 and 0 <= row["moe/dead_experts"] < 1 <= row["moe/max_load"] <= E
    assert row["moe/balance_loss"] >= 0.2 * 0.9 and row["moe/z_loss"] > 0
    assert row["objective"] == pytest.approx(row["loss"] + row["moe/balance_loss"] + row["moe/z_loss"], rel=1e-5)


def test_a_choice_bias_has_no_gradient_and_steps_towards_even_loads():
  """By hand: it rises by the rate where an expert got fewer tokens than the mean, and falls where it got more."""
  router = dict(choice_bias=jnp.array([[0.5, 0.0, 0.0, 0.0]]), kernel=jnp.ones((1, 16, 4)))
  params = {"blocks": {"moe": {"router": router}}, "embed": {}}
  counts = jnp.array([[9, 1, 4, 2]])
  new = moe_lib.evened(params, counts, 0.25, jnp.array(True))
  np.testing.assert_array_equal(new["blocks"]["moe"]["router"]["choice_bias"], [[0.25, 0.25, 0.0, 0.25]])
  np.testing.assert_array_equal(
      moe_lib.evened(params, counts, 0.25, jnp.array(False))["blocks"]["moe"]["router"]["choice_bias"],
      router["choice_bias"])
  behind = {**params, "mtp": {"blocks": {"moe": {"router": dict(choice_bias=jnp.zeros((1, 4)))}}}}
  new = moe_lib.evened(behind, jnp.array([[9, 1, 4, 2], [1, 9, 4, 2]]), 0.25, jnp.array(True))
  np.testing.assert_array_equal(new["blocks"]["moe"]["router"]["choice_bias"], [[0.25, 0.25, 0.0, 0.25]])
  np.testing.assert_array_equal(new["mtp"]["blocks"]["moe"]["router"]["choice_bias"], [[0.25, -0.25, 0.0, 0.25]])
  params, apply = layer_of(dict(GROUPS, choice_bias=True))
  x = np.random.default_rng(1).normal(size=(*SEGMENTS.shape, 16)).astype(np.float32)
  apply = jax.jit(apply)
  gradient = jax.grad(lambda p: jnp.square(apply(p, x, SEGMENTS)[0]).sum())(params)
  assert not gradient["router"]["choice_bias"].any() and gradient["router"]["kernel"].any()
  without = jax.tree.map(lambda p: p, params)
  without["router"]["choice_bias"] = np.zeros_like(params["router"]["choice_bias"])
  assert np.abs(apply(params, x, SEGMENTS)[0] - apply(without, x, SEGMENTS)[0]).max() > 0.01


@pytest.mark.parametrize("layer, nth", [(1, 0), (3, 1), (4, 2)])
def test_what_is_recorded_is_of_the_layers_with_experts(layer, nth):
  """Of layers 1, 3 and 4; also where the number of the layer is traced."""
  spec = types.SimpleNamespace(layers_with=lambda part: [1, 3, 4])
  recorded = jnp.arange(2 * 5 * 3 * 2, dtype=jnp.int16).reshape(2, 5, 3, 2)
  routing = moe_lib.Routing(recorded, True)
  for found in (routing.of_layer(layer, spec), routing.of_layer(jnp.int32(layer), spec)):
    np.testing.assert_array_equal(found.recorded, recorded[:, :, nth])
    assert found.recorded.dtype == jnp.int32 and found.replay
  assert moe_lib.Routing().of_layer(layer, spec).recorded is None
