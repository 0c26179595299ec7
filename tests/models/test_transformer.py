"""The Transformer against a numpy one; what each option does; what must not change the numbers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import api
from models.transformer import Transformer
from trainer.config import ConfigError, defaults

VOCAB = 50
B, T = 2, 12
SEGMENTS = np.array([[1] * 5 + [2] * 4 + [3] * 3, [1] * 7 + [2] * 3 + [0] * 2], np.int32)
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (B, T)).astype(np.int32)
BATCH = dict(tokens=TOKENS, segment_ids=SEGMENTS)

LLAMA = dict(num_kv_heads=2)
GEMMA = dict(
    num_kv_heads=1,
    head_dim=6,
    norm_scale_plus_one=True,
    norm_position="sandwich",
    activation="geglu",
    rope_local_theta=50.0,
    scale_embeddings=True,
    qk_norm=True,
    attention_scale=0.3,
    attention_logit_cap=1.5,
    final_logit_cap=2.0,
    window=3,
    layer_pattern=("local", "global"),
)
GPT2 = dict(
    norm="layernorm",
    norm_bias=True,
    activation="gelu",
    positions="learned",
    max_positions=16,
    qkv_bias=True,
    attention_out_bias=True,
    mlp_bias=True,
)
OLMO = dict(norm_position="post", tie_embeddings=False, rope_fraction=0.5, activation="relu2")
FAMILIES = dict(llama=LLAMA, gemma=GEMMA, gpt2=GPT2, olmo=OLMO)


def config(**changed):
  m = defaults().model
  m.update(dict(num_layers=3, hidden_size=16, intermediate_size=24, num_heads=4, vocab_multiple=8, attention_block=5))
  m.update(changed)
  return m


def make(remat="none", compute_dtype=jnp.float32, **changed) -> Transformer:
  return api.make_model(
      config(**changed), vocab_size=VOCAB, params_dtype=jnp.float32, compute_dtype=compute_dtype, remat=remat
  )


def random_params(model, seed=0):
  """Parameters that are nowhere 0 or 1, so that no norm or bias can be forgotten."""
  params = jax.jit(model.init)(jax.random.key(seed))
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda p: p + 0.2 * rng.normal(size=p.shape).astype(np.float32), params)


def paths(tree):
  return {"/".join(k.key for k in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def np_softmax(x):
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def np_forward(m, params, tokens, segments):
  """Logits of one row, in float64, one head at a time; `m` is the config."""
  p = {k: np.asarray(v, np.float64) for k, v in paths(params).items()}
  D, H, G = m.hidden_size, m.num_heads, m.num_kv_heads or m.num_heads
  K = m.head_dim or D // H
  n = len(tokens)
  positions = np.array([t - segments.tolist().index(segments[t]) for t in range(n)])

  def norm(x, name, kind=m.norm, layer=...):
    x = x - x.mean(-1, keepdims=True) if kind == "layernorm" else x
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + m.norm_eps)
    scale = p[name + "/scale"][layer] + m.norm_scale_plus_one
    return x * scale + (p[name + "/bias"][layer] if name + "/bias" in p else 0)

  def dense(x, name, layer):
    return x @ p[name + "/kernel"][layer] + (p[name + "/bias"][layer] if name + "/bias" in p else 0)

  def rope(x, theta):
    P = int(K * m.rope_fraction) // 2
    turned = (x[:, :P] + 1j * x[:, P : 2 * P]) * np.exp(1j * positions[:, None] * theta ** (-np.arange(P) / P))
    return np.concatenate([turned.real, turned.imag, x[:, 2 * P :]], 1)

  def self_attention(x, layer):
    local = m.layer_pattern[layer % len(m.layer_pattern)] == "local"
    q, k, v = (dense(x, f"blocks/attn/{c}", layer).reshape(n, -1, K) for c in "qkv")
    if m.qk_norm:
      q, k = (norm(c, f"blocks/attn/{name}_norm", "rmsnorm", layer) for c, name in ((q, "q"), (k, "k")))
    behind = np.arange(n)[:, None] - np.arange(n)
    seen = (behind >= 0) & (segments[:, None] == segments) & (behind < (m.window if local else n))
    heads = []
    for h in range(H):
      q_h, k_h = q[:, h], k[:, h // (H // G)]
      if m.positions == "rope":
        theta = m.rope_local_theta if local and m.rope_local_theta else m.rope_theta
        q_h, k_h = rope(q_h, theta), rope(k_h, theta)
      scores = q_h @ k_h.T * (m.attention_scale or K**-0.5)
      if m.attention_logit_cap:
        scores = m.attention_logit_cap * np.tanh(scores / m.attention_logit_cap)
      heads.append(np_softmax(np.where(seen, scores, -np.inf)) @ v[:, h // (H // G)])
    return dense(np.concatenate(heads, 1), "blocks/attn/o", layer)

  def mlp(x, layer):
    act = {
        "swiglu": lambda x: x / (1 + np.exp(-x)),
        "relu2": lambda x: np.maximum(x, 0) ** 2,
    }.get(m.activation, lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))
    up = dense(x, "blocks/mlp/up", layer)
    gated = m.activation.endswith("glu")
    return dense(act(dense(x, "blocks/mlp/gate", layer)) * up if gated else act(up), "blocks/mlp/down", layer)

  x = p["embed/embedding"][tokens] * (D**0.5 if m.scale_embeddings else 1)
  if m.positions == "learned":
    x = x + p["pos_embed/embedding"][positions]
  for layer in range(m.num_layers):
    for branch, name in ((self_attention, "attn"), (mlp, "mlp")):
      y = norm(x, f"blocks/{name}_norm", layer=layer) if m.norm_position != "post" else x
      y = branch(y, layer)
      x = x + (norm(y, f"blocks/{name}_post_norm", layer=layer) if m.norm_position != "pre" else y)
  x = norm(x, "final_norm")
  logits = x @ (p["embed/embedding"].T if m.tie_embeddings else p["unembed/kernel"])
  return m.final_logit_cap * np.tanh(logits / m.final_logit_cap) if m.final_logit_cap else logits


@pytest.mark.parametrize("scan_layers", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_numpy_model(family, scan_layers):
  model = make(**FAMILIES[family], scan_layers=scan_layers)
  params = random_params(model)
  logits = np.asarray(jax.jit(model.logits)(params, BATCH))
  assert logits.dtype == np.float32 and logits.shape == (B, T, 56)
  assert (logits[:, :, VOCAB:] == -np.inf).all()
  for row in range(B):
    real = SEGMENTS[row] > 0
    expected = np_forward(config(**FAMILIES[family]), params, TOKENS[row], SEGMENTS[row])
    np.testing.assert_allclose(logits[row, real, :VOCAB], expected[real, :VOCAB], atol=2e-4, rtol=2e-4)


def test_parameter_layout():
  changed = {**GPT2, "norm_position": "sandwich", "activation": "swiglu", "qk_norm": True, "tie_embeddings": False}
  shapes = {k: v.shape for k, v in paths(make(**changed, num_kv_heads=2).abstract_params()).items()}
  L, D, F, V, H, G, K = 3, 16, 24, 56, 4, 2, 4
  expected = {"embed/embedding": (V, D), "pos_embed/embedding": (16, D), "unembed/kernel": (D, V)}
  expected |= {"final_norm/scale": (D,), "final_norm/bias": (D,)}
  for name in ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm"):
    expected |= {f"blocks/{name}/scale": (L, D), f"blocks/{name}/bias": (L, D)}
  dense = dict(q=(D, H * K), k=(D, G * K), v=(D, G * K), o=(H * K, D))
  dense = {f"attn/{k}": v for k, v in dense.items()} | {"mlp/gate": (D, F), "mlp/up": (D, F), "mlp/down": (F, D)}
  for name, (d_in, d_out) in dense.items():
    expected |= {f"blocks/{name}/kernel": (L, d_in, d_out), f"blocks/{name}/bias": (L, d_out)}
  expected |= {"blocks/attn/q_norm/scale": (L, K), "blocks/attn/k_norm/scale": (L, K)}
  assert shapes == expected
  assert not [k for k in paths(make().abstract_params()) if "unembed" in k or "bias" in k or "gate/bias" in k]


def test_abstract_params_describe_init():
  for family in FAMILIES.values():
    model = make(**family)
    params = jax.jit(model.init)(jax.random.key(0))
    assert type(params) is dict and type(params["blocks"]) is dict
    assert jax.tree.map(lambda p: (p.shape, p.dtype), params) == jax.tree.map(
        lambda p: (p.shape, p.dtype), model.abstract_params()
    )


def perturbed_positions(model, params, t):
  """Which positions' hidden states have a gradient to the embedding of position t, in row 0."""
  tokens = np.arange(T)[None]
  batch = dict(tokens=tokens, segment_ids=SEGMENTS[:1])

  def hidden_sums(embedding):
    return model.apply({**params, "embed": {"embedding": embedding}}, batch).astype(jnp.float32)[0].sum(-1)

  tangent = jnp.zeros_like(params["embed"]["embedding"]).at[t].set(jnp.linspace(0.5, 1.5, 16))
  return np.asarray(jax.jvp(hidden_sums, (params["embed"]["embedding"],), (tangent,))[1]) != 0


def test_causality_and_segments_by_gradient():
  """d hidden[s] / d embedding[t] is exactly 0 for s < t and across documents, and nonzero otherwise."""
  model = make(tie_embeddings=False)
  params = random_params(model)
  reach = jax.jit(lambda p, t: perturbed_positions(model, p, t)) if False else perturbed_positions
  for t in (0, 3, 5, 8, 11):
    s = np.arange(T)
    np.testing.assert_array_equal(reach(model, params, t), (s >= t) & (SEGMENTS[0] == SEGMENTS[0, t]))


def test_windows_follow_the_layer_pattern_by_gradient():
  """A layer of window 2 looks one token back; two of them two; a global one reaches everything."""
  for pattern, layers, reach in ((("local",), 1, 1), (("local",), 2, 2), (("local", "global"), 2, T)):
    model = make(tie_embeddings=False, window=2, layer_pattern=pattern, num_layers=layers)
    affected = perturbed_positions(model, random_params(model), 0)
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


@pytest.mark.parametrize("family", FAMILIES)
def test_packing_and_padding_change_nothing(family):
  """I3: the same documents packed, alone, padded left, right, on both sides: same loss and gradients."""
  model = make(**FAMILIES[family])
  params = random_params(model)
  rng = np.random.default_rng(1)
  a, b, c = (rng.integers(0, VOCAB, n) for n in (5, 4, 3))
  layouts = {
      "packed": place([(0, 0, a), (0, 5, b), (0, 9, c)], 1),
      "right": place([(0, 0, a), (1, 0, b), (2, 0, c)], 3),
      "left": place([(0, T - 5, a), (1, T - 4, b), (2, T - 3, c)], 3),
      "extra": place([(0, 2, c), (0, 7, a), (1, 1, b)], 3),
  }
  mix = jnp.asarray(rng.normal(size=(16,)), jnp.float32)

  def loss(params, batch):
    hidden = model.apply(params, batch)
    weights = (batch["segment_ids"] > 0) * (1.0 + batch["positions"])
    return (jnp.tanh(hidden @ mix) * weights).sum()

  results = {name: jax.jit(jax.value_and_grad(loss))(params, batch) for name, batch in layouts.items()}
  value, grads = results.pop("packed")
  scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(grads))
  for name, (other_value, other_grads) in results.items():
    np.testing.assert_allclose(other_value, value, rtol=1e-5, err_msg=name)
    for path, g in paths(other_grads).items():
      np.testing.assert_allclose(g, paths(grads)[path], atol=2e-6 * scale, err_msg=f"{name} {path}")


@pytest.mark.parametrize("family", FAMILIES)
def test_perturbing_one_document_leaves_the_others_bitwise(family):
  model = make(**FAMILIES[family])
  params = random_params(model)
  apply = jax.jit(model.apply)
  before = np.asarray(apply(params, BATCH))
  for segment in (1, 2, 0):
    after = np.asarray(apply(params, dict(BATCH, tokens=np.where(SEGMENTS == segment, (TOKENS + 7) % VOCAB, TOKENS))))
    np.testing.assert_array_equal(after[SEGMENTS != segment], before[SEGMENTS != segment])
    assert (after[SEGMENTS == segment] != before[SEGMENTS == segment]).any()


def test_positions_and_segments_default_to_restarting_documents():
  model = make(**GPT2)
  params = random_params(model)
  positions = np.array([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 0, 1]], np.int32)
  np.testing.assert_array_equal(model.apply(params, BATCH), model.apply(params, dict(BATCH, positions=positions)))
  one = dict(tokens=TOKENS, segment_ids=np.ones_like(TOKENS), positions=np.arange(T)[None].repeat(B, 0))
  np.testing.assert_array_equal(model.logits(params, TOKENS), model.logits(params, one))


OPTIONS = [
    (dict(num_kv_heads=2), {}),
    (dict(head_dim=8), {}),
    (dict(norm="layernorm"), {}),
    (dict(norm_eps=0.5), {}),
    (dict(norm_scale_plus_one=True), {}),
    (dict(norm_bias=True), {}),
    (dict(norm_position="post"), {}),
    (dict(norm_position="sandwich"), {}),
    (dict(activation="geglu"), {}),
    (dict(activation="gelu"), {}),
    (dict(activation="gelu_exact"), dict(activation="gelu")),
    (dict(activation="relu2"), dict(activation="gelu")),
    (dict(positions="none"), {}),
    (dict(positions="learned", max_positions=16), {}),
    (dict(rope_theta=50.0), {}),
    (dict(rope_local_theta=50.0, layer_pattern=("local", "global"), window=3),
     dict(layer_pattern=("local", "global"), window=3)),
    (dict(rope_fraction=0.5), {}),
    (dict(tie_embeddings=False), {}),
    (dict(scale_embeddings=True), {}),
    (dict(qkv_bias=True), {}),
    (dict(attention_out_bias=True), {}),
    (dict(mlp_bias=True), {}),
    (dict(qk_norm=True), {}),
    (dict(attention_scale=0.9), {}),
    (dict(attention_logit_cap=0.5), {}),
    (dict(final_logit_cap=0.5), {}),
    (dict(window=3, layer_pattern=("local",)), {}),
    (dict(window=3, layer_pattern=("global", "local")), dict(window=3, layer_pattern=("local", "global"))),
    (dict(init_std=0.3), {}),
    (dict(vocab_size=64), {}),
]  # fmt: skip


@pytest.mark.parametrize("changed,base", OPTIONS, ids=lambda d: "-".join(map(str, d)) or "default")
def test_each_option_changes_the_logits(changed, base):
  def logits(options):
    # Not jitted as one program: scanning would compile once per option.
    model = make(**{"num_layers": 2, **options})
    fresh = jax.jit(model.init)(jax.random.key(0))
    noise = iter(jax.random.split(jax.random.key(1), 100))
    params = jax.tree.map(lambda p: p + (0.2 * jax.random.normal(next(noise), p.shape) if p.ndim < 3 else 0), fresh)
    return np.asarray(jax.jit(model.logits)(params, BATCH))

  a, b = logits(changed), logits({**base})
  assert a.shape != b.shape or np.abs(a[..., :VOCAB] - b[..., :VOCAB]).max() > 1e-4


@pytest.mark.parametrize("layers,pattern", [(3, ("global",)), (5, ("local", "global")), (5, ("local", "local", "global"))])
def test_scanned_equals_unrolled(layers, pattern):
  """I11, with layers left over after whole periods of the pattern; dropout included."""
  options = dict(num_layers=layers, layer_pattern=pattern, dropout=0.3)
  options |= dict(window=3) if "local" in pattern else {}
  models = [make(**options, scan_layers=scan) for scan in (True, False)]
  params = random_params(models[0])

  def loss(model):
    return jax.jit(jax.value_and_grad(
        lambda p: jnp.square(model.apply(p, BATCH, rng=jax.random.key(1), train=True)).mean(where=SEGMENTS[..., None] > 0)
    ))(params)  # fmt: skip

  (a, grads_a), (b, grads_b) = loss(models[0]), loss(models[1])
  np.testing.assert_allclose(a, b, rtol=1e-6)
  for path, g in paths(grads_a).items():
    np.testing.assert_allclose(g, paths(grads_b)[path], atol=1e-6, rtol=1e-5, err_msg=path)


@pytest.mark.parametrize("remat", ["full", "dots", "dots_no_batch", "everything_saveable"])
@pytest.mark.parametrize("scan_layers", [True, False])
def test_remat_changes_no_gradient(remat, scan_layers):
  def grads(remat):
    model = make(remat=remat, scan_layers=scan_layers, num_layers=2)
    params = random_params(model)
    return jax.jit(jax.grad(lambda p: jnp.tanh(model.apply(p, BATCH)).sum()))(params)

  expected = paths(grads("none"))
  for path, g in paths(grads(remat)).items():
    np.testing.assert_allclose(g, expected[path], rtol=1e-5, atol=1e-5 * float(jnp.abs(expected[path]).max()))


def test_full_remat_keeps_less_memory():
  def temp_bytes(remat):
    model = make(remat=remat, num_layers=8, intermediate_size=256)
    loss = jax.grad(lambda p: model.apply(p, dict(tokens=jnp.zeros((4, 64), jnp.int32))).sum())
    return jax.jit(loss).lower(model.abstract_params()).compile().memory_analysis().temp_size_in_bytes

  assert temp_bytes("full") < 0.5 * temp_bytes("none")


def test_initial_values_do_not_depend_on_other_parameters():
  one = paths(jax.jit(make(num_layers=2).init)(jax.random.key(0)))
  two = paths(jax.jit(make(num_layers=4, qkv_bias=True, tie_embeddings=False, vocab_size=64).init)(jax.random.key(0)))
  for path in ("blocks/attn/q/kernel", "blocks/mlp/gate/kernel"):
    np.testing.assert_array_equal(one[path], two[path][:2])
    assert (one[path][0] != one[path][1]).all()
  assert (one["blocks/attn/k/kernel"] != one["blocks/attn/q/kernel"]).all()


def test_initial_scale_and_first_loss():
  model = make(hidden_size=256, intermediate_size=512, num_layers=8, norm_bias=True)
  params = jax.jit(model.init)(jax.random.key(0))
  std = {path: float(p.std()) for path, p in paths(params).items()}
  np.testing.assert_allclose(std["embed/embedding"], 0.02, rtol=0.03)
  np.testing.assert_allclose(std["blocks/mlp/up/kernel"], 256**-0.5, rtol=0.01)
  np.testing.assert_allclose(std["blocks/mlp/down/kernel"], 512**-0.5 / 4, rtol=0.01)
  assert (params["final_norm"]["scale"] == 1).all() and (params["final_norm"]["bias"] == 0).all()
  logits = model.logits(params, TOKENS)
  loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), np.roll(TOKENS, -1, 1)[..., None], -1).mean()
  assert abs(loss - np.log(VOCAB)) < 0.3
  given = paths(jax.jit(make(init_std=0.1, num_layers=2).init)(jax.random.key(0)))
  np.testing.assert_allclose(given["blocks/mlp/up/kernel"].std(), 0.1, rtol=0.05)
  np.testing.assert_allclose(given["blocks/mlp/down/kernel"].std(), 0.05, rtol=0.05)


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
  apply = jax.jit(lambda p, t: model.apply(p, dict(tokens=t), rng=jax.random.key(9), train=True))
  np.testing.assert_allclose(apply(params, tokens), apply(sharded, jax.device_put(tokens, shard)), atol=1e-5)


def test_dropout_acts_in_training_only_and_needs_a_key():
  model = make(dropout=0.5, num_layers=2)
  params = random_params(model)
  apply = jax.jit(model.apply, static_argnames="train")
  still = apply(params, BATCH)
  np.testing.assert_array_equal(apply(params, BATCH, rng=jax.random.key(0)), still)
  a, b = (apply(params, BATCH, rng=jax.random.key(i), train=True) for i in (0, 1))
  assert (a != still).any() and (a != b).any()
  np.testing.assert_array_equal(a, apply(params, BATCH, rng=jax.random.key(0), train=True))
  with pytest.raises(ValueError, match="needs rng"):
    model.apply(params, BATCH, train=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_compute_is_close_to_float32(family):
  exact, fast = make(**FAMILIES[family]), make(**FAMILIES[family], compute_dtype=jnp.bfloat16)
  params = jax.jit(exact.init)(jax.random.key(0))
  hidden = jax.jit(fast.apply)(params, BATCH)
  assert hidden.dtype == jnp.bfloat16 and fast.logits(params, BATCH).dtype == jnp.float32
  real = SEGMENTS > 0
  error = np.abs(np.asarray(hidden.astype(jnp.float32)) - jax.jit(exact.apply)(params, BATCH))[real]
  assert 0 < error.mean() < 0.05


def test_unembedding_is_the_embedding_when_tied():
  tied, untied = make(), make(tie_embeddings=False)
  params = tied.init(jax.random.key(0))
  np.testing.assert_array_equal(tied.unembedding(params), params["embed"]["embedding"].T)
  params = untied.init(jax.random.key(0))
  np.testing.assert_array_equal(untied.unembedding(params), params["unembed"]["kernel"])


def test_flops_against_a_hand_count():
  model = make(**LLAMA, num_layers=2, window=4, layer_pattern=("local", "global"))
  per_layer = 16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24  # q and o, k and v, gate, up and down
  visible = (1 + 2 + 3 + 4 * 5) / 8 + (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8) / 8
  assert model.flops_per_token(8) == 6 * (2 * per_layer + 16 * 56) + 12 * 4 * 4 * visible
  assert model.flops_per_token(8, document_length=2) < model.flops_per_token(8)


def test_flops_against_the_compiler():
  """Within 5% of what XLA counts for products in forward and backward of a plain model."""
  model = make(num_layers=2, hidden_size=128, intermediate_size=384, scan_layers=False, attention_block=2,
               positions="none")  # fmt: skip
  tokens = jax.ShapeDtypeStruct((4, 32), jnp.int32)

  def loss(params, tokens):
    return jnp.square(model.apply(params, dict(tokens=tokens)) @ model.unembedding(params)).sum()

  counted = jax.jit(jax.grad(loss)).lower(model.abstract_params(), tokens).compile().cost_analysis()["flops"]
  np.testing.assert_allclose(model.flops_per_token(32) * 4 * 32, counted, rtol=0.05)


def test_activations_are_constrained_by_name():
  """The hook sees every activation that a mesh may want to lay out, with one name per dimension."""
  seen = {}

  def record(x, names):
    seen[names] = x.shape
    return x

  model = make(**LLAMA)
  params = model.init(jax.random.key(0))
  with api.activation_rules(record):
    model.logits(params, TOKENS)
  assert seen == {
      ("batch", "length", "embed"): (B, T, 16),
      ("batch", "length", "heads", None): (B, T, 4, 4),
      ("batch", "length", "kv_heads", None): (B, T, 2, 4),
      ("batch", "length", "mlp"): (B, T, 24),
      ("batch", "length", "vocab"): (B, T, 56),
  }
  with api.activation_rules(record), pytest.raises(ValueError, match="constrain"):
    api.constrain(jnp.zeros((2, 2)), "batch", "depth")


def test_apply_with_plain_jax_transformations_only():
  """The parameters are plain dicts to grad, vmap, eval_shape and scan alike."""
  model = make(num_layers=2)
  stacked = jax.vmap(model.init)(jax.random.split(jax.random.key(0), 2))
  hidden = jax.vmap(lambda p: model.apply(p, BATCH))(stacked)
  first = model.apply(jax.tree.map(lambda p: p[0], stacked), BATCH)
  np.testing.assert_allclose(hidden[0], first, atol=1e-5)
  assert jax.eval_shape(model.apply, model.abstract_params(), BATCH).shape == (B, T, 16)


BAD = [
    (dict(num_kv_heads=3), r"num_kv_heads: found 3.*Allowed: \[1, 2, 4\]"),
    (dict(hidden_size=18), "head_dim is not set and hidden_size=18"),
    (dict(head_dim=5), "RoPE rotates pairs, but head_dim=5"),
    (dict(rope_fraction=0.25), "rotates 1 dimensions"),
    (dict(rope_fraction=0.0), "rope_fraction: found 0.0"),
    (dict(norm="rms"), "norm: found 'rms', allowed: rmsnorm, layernorm. Did you mean 'rmsnorm'"),
    (dict(norm_position="before"), "norm_position: found 'before', allowed: pre, post, sandwich"),
    (dict(activation="silu"), "activation: found 'silu', allowed: swiglu"),
    (dict(positions="alibi"), "positions: found 'alibi', allowed: rope, learned, none"),
    (dict(positions="learned"), "needs model.max_positions"),
    (dict(max_positions=8), "seq_len is 12, but model.max_positions is 8"),
    (dict(layer_pattern=("local",)), "need model.window"),
    (dict(layer_pattern=("sliding",)), "layer_pattern: found 'sliding', allowed: global, local"),
    (dict(layer_pattern=()), "layer_pattern is empty"),
    (dict(layer_pattern=("local",), window=0), "window: found 0"),
    (dict(num_layers=0), "num_layers: found 0"),
    (dict(attention="flash"), "attention: found 'flash', allowed: auto, blocked"),
    (dict(attention_block=0), "attention_block: found 0"),
    (dict(vocab_chunk=0), "vocab_chunk: found 0"),
    (dict(final_logit_cap=0.0), "final_logit_cap: found 0.0"),
    (dict(dropout=1.0), "dropout: found 1.0"),
]


@pytest.mark.parametrize("changed,message", BAD, ids=lambda x: "-".join(x) if isinstance(x, dict) else "")
def test_bad_configs_are_refused_with_what_is_allowed(changed, message):
  with pytest.raises(ConfigError, match=message):
    api.validate(config(**changed), T)


def test_bad_vocabulary_and_remat():
  with pytest.raises(ConfigError, match="vocab_size: found 40, but the tokenizer has 50"):
    make(vocab_size=40)
  with pytest.raises(ConfigError, match="remat: found 'some', allowed: none, full, dots"):
    make(remat="some")


def test_derived_values_come_with_their_reason():
  reasons = "\n".join(make().reasons)
  for expected in (r"num_kv_heads = 4: ", r"head_dim = 4: ", r"attention_scale = 0\.5: ", r"vocab_size = 56: .* 50"):
    assert re.search(expected, reasons)
  assert not make(num_kv_heads=4, head_dim=4, attention_scale=0.5, vocab_size=50).reasons
