"""What must not change a model's numbers: packing, padding, other documents, scanning, remat, the mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.common import (
  BATCH,
  FAMILIES,
  SEGMENTS,
  TOKENS,
  VOCAB,
  B,
  T,
  family,
  make,
  paths,
  random_params,
)


def perturbed_positions(model, params):
  """[t, s]: whether the hidden state of position s has a gradient to the embedding of position t, in row 0."""
  tokens = np.arange(T)[None]
  batch = dict(tokens=tokens, segment_ids=SEGMENTS[:1])

  def hidden(embedding):
    return model.apply({**params, "embed": {"embedding": embedding}}, batch).hidden.astype(jnp.float32)[0]

  @jax.jit
  def gradients(s):
    """Of one position's hidden state to the embedding of each [T, D]."""
    weights = jnp.linspace(0.5, 1.5, 16)
    return jax.grad(lambda embedding: hidden(embedding)[s] @ weights)(params["embed"]["embedding"])[:T]

  return np.stack([np.any(gradients(s) != 0, axis=-1) for s in range(T)], axis=1)


@pytest.mark.parametrize("pattern", ["global", "mamba"])
def test_causality_and_segments_by_gradient(pattern):
  """d hidden[s] / d embedding[t] is exactly 0 for s < t and across documents, and nonzero otherwise."""
  model = make(tie_embeddings=False, layer_pattern=(pattern,))
  t, s = np.arange(T)[:, None], np.arange(T)
  expected = (s >= t) & (SEGMENTS[0] == SEGMENTS[0][:, None])
  np.testing.assert_array_equal(perturbed_positions(model, random_params(model)), expected)


def test_windows_follow_the_layer_pattern_by_gradient():
  """A layer of window 2 looks one token back; two of them two; a global one reaches everything."""
  for pattern, layers, reach in ((("local",), 1, 1), (("local",), 2, 2), (("local", "global"), 2, T)):
    model = make(tie_embeddings=False, window=2, layer_pattern=pattern, num_layers=layers)
    affected = perturbed_positions(model, random_params(model))[0]
    np.testing.assert_array_equal(affected, (np.arange(T) <= reach) & (SEGMENTS[0] == 1))


def place(documents, rows):
  """A batch from (row, start, document) entries; the rest is padding."""
  tokens, segments, positions = (np.zeros((rows, T), np.int32) for _ in range(3))
  used = [0] * rows
  for row, start, document in documents:
    used[row] += 1
    where = slice(start, start + len(document))
    tokens[row, where], segments[row, where], positions[row, where] = document, used[row], np.arange(len(document))
  return dict(tokens=tokens, segment_ids=segments, positions=positions)


@pytest.mark.parametrize("name", [*FAMILIES, "qwen3_next", "nemotron_h", "gpt_oss", "gemma4", "gemma4_shared",
                                  "llama4", "gemma3n", "indexed"])
def test_packing_and_padding_change_nothing(name):
  """I3: the same documents packed, alone, padded left, right, on both sides: same loss and gradients."""
  model, params, _ = family(name)
  rng = np.random.default_rng(1)
  a, b, c = (rng.integers(0, VOCAB, n) for n in (5, 4, 3))
  layouts = {
      "packed": place([(0, 0, a), (0, 5, b), (0, 9, c)], 3),
      "right": place([(0, 0, a), (1, 0, b), (2, 0, c)], 3),
      "left": place([(0, T - 5, a), (1, T - 4, b), (2, T - 3, c)], 3),
      "extra": place([(0, 2, c), (0, 7, a), (1, 1, b)], 3),
  }
  mix = jnp.asarray(rng.normal(size=(16,)), jnp.float32)

  @jax.jit
  @jax.value_and_grad
  def loss(params, batch):
    hidden = model.apply(params, batch).hidden
    weights = (batch["segment_ids"] > 0) * (1.0 + batch["positions"])
    return (jnp.square(jnp.tanh(hidden @ mix)) * weights).sum()

  results = {layout: loss(params, batch) for layout, batch in layouts.items()}
  value, grads = results.pop("packed")
  scale = {path: float(jnp.abs(g).max()) for path, g in paths(grads).items()}
  for layout, (other_value, other_grads) in results.items():
    np.testing.assert_allclose(other_value, value, rtol=3e-6, err_msg=layout)
    for path, g in paths(other_grads).items():
      # Some are 0 but for rounding: a bias of keys shifts all scores alike.
      # Chunks of the delta rule begin where a text does, and this model's gradients of them are ill-conditioned: with
      # parameters and products in float64 the layouts agree to 2e-7 of each.
      atol = (5e-5 if name == "qwen3_next" else 1e-5) * scale[path] + 1e-7 * max(scale.values())
      np.testing.assert_allclose(g, paths(grads)[path], atol=atol, err_msg=f"{layout} {path}")


@pytest.mark.parametrize("scan_layers", [True, False])
@pytest.mark.parametrize("name", [*FAMILIES, "qwen3_next", "nemotron_h", "gpt_oss", "llama4", "indexed"])
def test_perturbing_one_document_leaves_the_others_bitwise(name, scan_layers):
  _, params, logits = family(name, scan_layers)
  before = np.asarray(logits(params, BATCH))
  for segment in (1, 2, 0):
    changed = np.where(SEGMENTS == segment, (TOKENS + 7) % VOCAB, TOKENS)
    after = np.asarray(logits(params, dict(BATCH, tokens=changed)))
    np.testing.assert_array_equal(after[SEGMENTS != segment], before[SEGMENTS != segment])
    assert (after[SEGMENTS == segment] != before[SEGMENTS == segment]).any()


def test_positions_and_segments_default_to_restarting_documents():
  model, params, _ = family("gpt2")
  positions = np.array([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 0, 1]], np.int32)
  given = model.apply(params, dict(BATCH, positions=positions))
  np.testing.assert_array_equal(model.apply(params, BATCH).hidden, given.hidden)
  one = dict(tokens=TOKENS, segment_ids=np.ones_like(TOKENS), positions=np.arange(T)[None].repeat(B, 0))
  np.testing.assert_array_equal(model.logits(params, TOKENS), model.logits(params, one))


@pytest.mark.parametrize("layers,pattern", [(3, ["global"]), (3, ["local", "global"]), (4, ["local"] * 2 + ["global"]),
                                            (3, ["delta", "global"]), (3, ["delta"]), (6, ["dense", "global"]),
                                            (5, ["mamba", "global"]), (5, ["mamba", "mlp"]),
                                            (8, ["chunked", "step"])])
def test_scanned_equals_unrolled(layers, pattern):
  """I11, with layers left over after whole periods of the pattern; `dense`: the first three without experts; `step`:
  every third has experts, so that a period has six layers."""
  kinds = tuple({"dense": "local", "step": "nope"}.get(kind, kind) for kind in pattern)
  options = dict(num_layers=layers, layer_pattern=kinds, attention_block=T, attention_chunk=3)
  options |= dict(window=3, moe=dict(num_experts=4, expert_size=8, dense_layers=3)) if "dense" in pattern else {}
  options |= dict(moe=dict(num_experts=4, expert_size=8, layer_step=3)) if "step" in pattern else {}
  options |= dict(window=3) if "local" in pattern else {}
  models = [make(**options, scan_layers=scan) for scan in (True, False)]
  params = random_params(models[0])

  def loss(model):
    def mean_square(params):
      return jnp.square(model.apply(params, BATCH).hidden).mean(where=SEGMENTS[..., None] > 0)

    return jax.jit(jax.value_and_grad(mean_square))(params)

  (a, grads_a), (b, grads_b) = loss(models[0]), loss(models[1])
  np.testing.assert_allclose(a, b, rtol=1e-6)
  for path, g in paths(grads_a).items():
    np.testing.assert_allclose(g, paths(grads_b)[path], atol=1e-6, rtol=1e-5, err_msg=path)


def test_dropout_is_the_same_scanned_and_unrolled():
  options = dict(num_layers=2, attention_block=T, dropout=0.3)
  models = [make(**options, scan_layers=scan) for scan in (True, False)]
  params = random_params(models[0])
  a, b = (jax.jit(functools.partial(model.apply, train=True))(params, BATCH, rng=jax.random.key(1)).hidden
          for model in models)
  np.testing.assert_allclose(a, b, atol=1e-5)


@functools.cache
def remat_grads(remat, scan_layers):
  model = make(remat=remat, scan_layers=scan_layers, num_layers=2, attention_block=T)
  return paths(jax.jit(jax.grad(lambda p: jnp.tanh(model.apply(p, BATCH).hidden).sum()))(random_params(model)))


@pytest.mark.parametrize(
    "remat,scan_layers", [("full", True), ("full", False), ("dots", True), ("dots_no_batch", True)]
)
def test_remat_changes_no_gradient(remat, scan_layers):
  expected = remat_grads("none", scan_layers)
  for path, g in remat_grads(remat, scan_layers).items():
    np.testing.assert_allclose(g, expected[path], rtol=1e-6, atol=1e-6 * float(jnp.abs(expected[path]).max()))


def test_full_remat_keeps_less_memory():
  def temp_bytes(remat):
    model = make(remat=remat, num_layers=8, intermediate_size=256, attention_block=64)
    loss = jax.grad(lambda p: model.apply(p, dict(tokens=jnp.zeros((4, 64), jnp.int32))).hidden.sum())
    return jax.jit(loss).lower(model.abstract_params()).compile().memory_analysis().temp_size_in_bytes

  assert temp_bytes("full") < 0.5 * temp_bytes("none")


def test_initial_values_do_not_depend_on_other_parameters():
  one = paths(jax.jit(make(num_layers=2).init)(jax.random.key(0)))
  two = paths(jax.jit(make(num_layers=4, qkv_bias=True, tie_embeddings=False, vocab_size=64).init)(jax.random.key(0)))
  for path in ("blocks/attn/q/kernel", "blocks/mlp/gate/kernel"):
    np.testing.assert_array_equal(one[path], two[path][:2])
    assert (one[path][0] != one[path][1]).all()
  assert (one["blocks/attn/k/kernel"] != one["blocks/attn/q/kernel"]).all()


def test_sharded_init_and_dropout_equal_those_of_one_device():
  mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
  shard = jax.NamedSharding(mesh, jax.P("fsdp"))
  model = make(num_layers=8, dropout=0.5)
  shardings = jax.tree.map(
      lambda p: shard if p.shape[0] % 8 == 0 else jax.NamedSharding(mesh, jax.P()), model.abstract_params()
  )
  params = jax.jit(model.init)(jax.random.key(3))
  sharded = jax.jit(model.init, out_shardings=shardings)(jax.random.key(3))
  for path, p in paths(params).items():
    np.testing.assert_array_equal(p, paths(sharded)[path], err_msg=path)
  tokens = np.tile(TOKENS, (4, 1))
  apply = jax.jit(lambda p, t: model.apply(p, dict(tokens=t), rng=jax.random.key(9), train=True).hidden)
  np.testing.assert_allclose(apply(params, tokens), apply(sharded, jax.device_put(tokens, shard)), atol=1e-5)
