"""The Transformer against a numpy one; what each option does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import api
from models.blocks import Block
from models.sharding import logical_axes
from tests.models.common import (
  BATCH,
  DEEPSEEK_MOE,
  FAMILIES,
  GEMMA3N,
  GPT2,
  INDEXED,
  LLAMA,
  OPTIONS_OF,
  SEGMENTS,
  TOKENS,
  VOCAB,
  B,
  T,
  config,
  family,
  make,
  paths,
  random_params,
)
from tests.models.initial import initial
from tests.models.numpy_model import np_forward
from trainer import tree
from trainer.config import defaults
from trainer.distributed import mesh as mesh_lib


@pytest.mark.parametrize("scan_layers", [True, False])
@pytest.mark.parametrize("name", OPTIONS_OF)
def test_logits_equal_the_numpy_model(name, scan_layers):
  _, params, compiled = family(name, scan_layers)
  logits = np.asarray(compiled(params, BATCH))
  assert logits.dtype == np.float32 and logits.shape == (B, T, 56)
  assert (logits[:, :, VOCAB:] == -np.inf).all()
  for row in range(B):
    real = SEGMENTS[row] > 0
    expected = np_forward(config(**OPTIONS_OF[name]), params, TOKENS[row], SEGMENTS[row])
    np.testing.assert_allclose(logits[row, real, :VOCAB], expected[real, :VOCAB], atol=2e-4, rtol=2e-4)


@pytest.mark.host_patches
def test_layers_of_a_kind_are_traced_once(monkeypatch):
  """One after another in the program, or within a period: of each kind, the first."""
  calls, call = [], Block.__call__
  monkeypatch.setattr(Block, "__call__", lambda self, *args: calls.append(args[2]) or call(self, *args))
  pattern = ("local", "local", "local", "global")
  for scan_layers in (False, True):
    model = make(**LLAMA | dict(num_layers=9, window=3, layer_pattern=pattern, scan_layers=scan_layers, dropout=0.5))
    calls.clear()
    apply = functools.partial(model.apply, rng=jax.random.key(0), train=True)
    jaxpr = jax.make_jaxpr(apply)(model.abstract_params(), BATCH)
    assert len(calls) == 2 + scan_layers  # and the ninth, which stands behind the scan
    of_layers = [eqn.params for eqn in jaxpr.eqns if eqn.primitive.name == "jit" and "layer" in eqn.params["name"]]
    if not scan_layers:
      assert len(of_layers) == 9 and len({id(params["jaxpr"]) for params in of_layers}) == 2


def test_layers_of_other_sparsities_are_of_other_kinds():
  options = GEMMA3N | dict(
      layer_pattern=("local",), activation_sparsity=(0.7, 0.7, 0.4, 0.4, 0, 0, 0), scan_layers=False)
  model = make(**options)
  params = random_params(model)
  logits = np.asarray(jax.jit(model.logits)(params, BATCH))
  real = SEGMENTS[0] > 0
  expected = np_forward(config(**options), params, TOKENS[0], SEGMENTS[0])
  np.testing.assert_allclose(logits[0, real, :VOCAB], expected[real, :VOCAB], atol=2e-4, rtol=2e-4)


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
  for name in FAMILIES:
    model, params, _ = family(name)
    assert type(params) is dict and type(params["blocks"]) is dict
    assert jax.tree.map(lambda p: (p.shape, p.dtype), params) == jax.tree.map(
        lambda p: (p.shape, p.dtype), model.abstract_params()
    )


OPTIONS = [
    (dict(num_kv_heads=2), {}),
    (dict(head_dim=8), {}),
    (dict(norm="layernorm"), {}),
    (dict(norm_eps=0.5), {}),
    (dict(norm_scale_plus_one=True), {}),
    (dict(norm_bias=True), {}),
    (dict(norm_position="post"), {}),
    (dict(norm_position="sandwich"), {}),
    (dict(parallel_blocks=True), {}),
    (dict(activation="geglu"), {}),
    (dict(activation="clamped_swiglu"), {}),
    (dict(activation="gelu"), {}),
    (dict(activation="gelu_exact"), dict(activation="gelu")),
    (dict(activation="relu2"), dict(activation="gelu")),
    (dict(positions="none"), {}),
    (dict(positions="learned", max_positions=16), {}),
    (dict(rope_theta=50.0), {}),
    (dict(rope_local_theta=50.0, layer_pattern=("local", "global"), window=3),
     dict(layer_pattern=("local", "global"), window=3)),
    (dict(rope_fraction=0.5), {}),
    (dict(rope_interleaved=True), {}),
    (dict(tie_embeddings=False), {}),
    (dict(scale_embeddings=True), {}),
    (dict(embedding_scale=2.0), {}),
    (dict(residual_scale=0.5), {}),
    (dict(logit_scale=0.5), {}),
    (dict(qkv_bias=True), {}),
    (dict(attention_out_bias=True), {}),
    (dict(mlp_bias=True), {}),
    (dict(qk_norm=True), {}),
    (dict(qk_norm=True, qk_norm_over="all"), dict(qk_norm=True)),
    (dict(qk_norm=True, qk_norm_over="each_head"), dict(qk_norm=True)),
    (dict(qk_norm=True, qk_norm_over="unscaled"), dict(qk_norm=True)),
    (dict(attention_scale=0.9), {}),
    (dict(attention_logit_cap=0.5), {}),
    (dict(final_logit_cap=0.5), {}),
    (dict(window=3, layer_pattern=("local",)), {}),
    (dict(window=3, layer_pattern=("global", "local")), dict(window=3, layer_pattern=("local", "global"))),
    (dict(layer_pattern=("global", "nope")), {}),
    (dict(attention_chunk=3, layer_pattern=("chunked",)), dict(window=3, layer_pattern=("local",))),
    (dict(layer_pattern=("global", "nope"), nope_temperature=dict(scale=0.5, floor=2)),
     dict(layer_pattern=("global", "nope"))),
    (dict(layer_pattern=("delta", "global")), {}),
    (dict(layer_pattern=("mamba", "global")), {}),
    (dict(layer_pattern=("global", "mlp")), {}),
    (dict(layer_pattern=("mamba",), mamba=dict(num_groups=2)), dict(layer_pattern=("mamba",))),
    (dict(attention_gate=True), {}),
    (dict(attention_sinks=True), {}),
    (dict(value_norm=True), {}),
    (dict(global_attention=dict(head_dim=4, num_kv_heads=2)), {}),
    (dict(global_attention=dict(head_dim=4, values_are_keys=True)), dict(global_attention=dict(head_dim=4))),
    (dict(global_attention=dict(head_dim=4, rope_fraction=0.5)), dict(global_attention=dict(head_dim=4))),
    (dict(layer_pattern=("delta",), delta=dict(conv_width=2)), dict(layer_pattern=("delta",))),
    (dict(init_std=0.3), {}),
    (dict(vocab_size=64), {}),
]  # fmt: skip


@pytest.mark.parametrize("changed,base", OPTIONS, ids=lambda d: "-".join(map(str, d)) or "default")
def test_each_option_changes_the_logits(changed, base):
  def logits(options):
    # Operation by operation, most of which are compiled once for all options.
    model = make(num_layers=2, scan_layers=False, attention_block=T, **options)
    params = model.init(jax.random.key(0))
    # Norms and biases are the same numbers with and without the option, and not 0 or 1.
    vectors = ("scale", "bias")
    params = jax.tree_util.tree_map_with_path(
        lambda path, p: jnp.linspace(0.3, 0.8, p.size).reshape(p.shape) if path[-1].key in vectors else p, params
    )
    return np.asarray(model.logits(params, BATCH))

  a, b = logits(changed), logits(base)
  assert a.shape != b.shape or np.abs(a[..., :VOCAB] - b[..., :VOCAB]).max() > 1e-5


def test_initial_scale_and_first_loss():
  model = make(hidden_size=256, intermediate_size=512, num_layers=8, norm_bias=True)
  params = jax.jit(model.init)(jax.random.key(0))
  std = {path: float(p.std()) for path, p in paths(params).items()}
  np.testing.assert_allclose(std["embed/embedding"], 0.02, rtol=0.03)
  np.testing.assert_allclose(std["blocks/mlp/up/kernel"], 256**-0.5, rtol=0.01)
  np.testing.assert_allclose(std["blocks/mlp/down/kernel"], 512**-0.5 / 4, rtol=0.01)
  assert (params["final_norm"]["scale"] == 1).all() and (params["final_norm"]["bias"] == 0).all()
  logits = jax.jit(model.logits)(params, TOKENS)
  loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), np.roll(TOKENS, -1, 1)[..., None], -1).mean()
  assert abs(loss - np.log(VOCAB)) < 0.3
  given = paths(jax.jit(make(init_std=0.1, num_layers=2, tie_embeddings=False).init)(jax.random.key(0)))
  np.testing.assert_allclose(given["blocks/mlp/up/kernel"].std(), 0.1, rtol=0.05)
  np.testing.assert_allclose(given["blocks/mlp/down/kernel"].std(), 0.05, rtol=0.05)
  np.testing.assert_allclose(given["unembed/kernel"].std(), 0.1, rtol=0.05)


def test_dropout_acts_in_training_only_and_needs_a_key():
  model = make(dropout=0.5, num_layers=2)
  params = random_params(model)
  apply = jax.jit(lambda *args, **kw: model.apply(*args, **kw).hidden, static_argnames="train")
  still = apply(params, BATCH)
  np.testing.assert_array_equal(apply(params, BATCH, rng=jax.random.key(0)), still)
  a, b = (apply(params, BATCH, rng=jax.random.key(i), train=True) for i in (0, 1))
  assert (a != still).any() and (a != b).any()
  np.testing.assert_array_equal(a, apply(params, BATCH, rng=jax.random.key(0), train=True))
  with pytest.raises(ValueError, match="needs rng"):
    model.apply(params, BATCH, train=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_compute_is_close_to_float32(name):
  exact, _, logits = family(name)
  fast = make(**FAMILIES[name], compute_dtype=jnp.bfloat16)
  params = initial(exact)
  assert jax.eval_shape(fast.apply, params, BATCH).hidden.dtype == jnp.bfloat16
  fast_logits = jax.jit(fast.logits)(params, BATCH)
  assert fast_logits.dtype == jnp.float32
  real = SEGMENTS > 0
  expected = np.asarray(logits(params, BATCH))[real][:, :VOCAB]
  error = np.abs(np.asarray(fast_logits)[real][:, :VOCAB] - expected)
  assert 0 < error.mean() < 0.02 * expected.std()


def test_unembedding_is_the_embedding_when_tied():
  tied, untied = make(), make(tie_embeddings=False)
  params = tied.init(jax.random.key(0))
  np.testing.assert_array_equal(tied.unembedding(params), params["embed"]["embedding"].T)
  params = untied.init(jax.random.key(0))
  np.testing.assert_array_equal(untied.unembedding(params), params["unembed"]["kernel"])


def test_streams_of_nothing_have_a_finite_gradient():
  """The root of a magnitude has none at 0; the embedding of padding may be 0."""
  model = make(num_layers=1, altup=dict(num_inputs=3, coef_clip=0.2))
  params = random_params(model)
  params = {**params, "embed": {"embedding": params["embed"]["embedding"].at[0].set(0.0)}}
  tokens = np.where(np.arange(T) < T // 2, TOKENS[:1], 0)
  gradients = jax.jit(jax.grad(lambda p: model.apply(p, dict(tokens=tokens)).hidden.sum()))(params)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_the_factor_of_a_layer_has_no_gradient():
  """A buffer in transformers; what is trained is the same there and here."""
  model, params, _ = family("gemma4")
  gradients = jax.jit(jax.grad(lambda p: model.apply(p, BATCH).hidden[SEGMENTS > 0].sum()))(params)
  assert not gradients["blocks"]["layer_scale"].any() and gradients["blocks"]["attn_norm"]["scale"].any()


def test_a_cache_of_latents_holds_no_more_than_they_are():
  """Of each token and layer the latent and one rotated key."""
  cache = make(**DEEPSEEK_MOE).empty_cache(2, 32)
  assert sum(part.size for part in (*cache.keys, *cache.values)) == 2 * 32 * 3 * (10 + 4)
  indexed = make(**INDEXED).empty_cache(2, 32)  # and the indexer's key
  assert sum(part.size for part in (*indexed.keys, *indexed.values)) == 2 * 32 * 4 * (10 + 4 + 6)


def test_activations_are_constrained_by_name():
  """The hook sees every activation that a mesh may want to lay out, with one name per dimension."""
  seen = {}

  class Recorder(logical_axes.Placement):

    def constrain(self, x, names):
      seen[names] = x.shape
      return super().constrain(x, names)

  model = make(**LLAMA)
  params = jax.jit(model.init)(jax.random.key(0))
  record = Recorder(mesh_lib.make_mesh({}, jax.devices()[:1]), {})
  with logical_axes.placed(record):
    model.logits(params, TOKENS)
  assert seen == {
      ("batch", "stream", "embed"): (B, T, 16),
      ("batch", "length", "heads", None): (B, T, 4, 4),
      ("batch", "length", "kv_heads", None): (B, T, 2, 4),
      ("batch", "length", "mlp"): (B, T, 24),
      ("batch", "length", "vocab"): (B, T, 56),
  }
  with logical_axes.placed(record), pytest.raises(ValueError, match="depth"):
    logical_axes.constrain(jnp.zeros((2, 2)), "batch", "depth")


def test_apply_with_plain_jax_transformations_only():
  """The parameters are plain dicts to grad, vmap, eval_shape and scan alike."""
  model = make(num_layers=2)
  stacked = jax.vmap(model.init)(jax.random.split(jax.random.key(0), 2))
  hidden = jax.vmap(lambda p: model.apply(p, BATCH).hidden)(stacked)
  first = model.apply(jax.tree.map(lambda p: p[0], stacked), BATCH).hidden
  np.testing.assert_allclose(hidden[0], first, atol=1e-5)
  assert jax.eval_shape(model.apply, model.abstract_params(), BATCH).hidden.shape == (B, T, 16)


def of_embeddings(**changed):
  """(model, parameters whose layers add nothing): hidden states are what enters the first layer, over its RMS."""
  model = make(num_layers=2, **changed)
  params = tree.flatten(jax.jit(model.init)(jax.random.key(0)))
  return model, tree.unflatten({path: leaf * (not path.endswith(("/o/kernel", "down/kernel")))
                                for path, leaf in params.items()})


def rms(x):
  return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6)


def test_noise_is_added_to_the_table_s_rows_before_they_are_scaled():
  """NEFTune: even noise in ± alpha / sqrt(length × D), by document; sqrt(D) times the sum enters the first layer."""
  model, params = of_embeddings(neftune_alpha=5.0, scale_embeddings=True)
  key = jax.random.key(7)
  found = jax.jit(functools.partial(model.apply, train=True))(params, BATCH, rng=key).hidden
  lengths = np.array([[5] * 5 + [4] * 4 + [3] * 3, [7] * 7 + [3] * 3 + [2] * 2])
  even = jax.random.uniform(jax.random.fold_in(key, 2 + 1), (B, T, 16), minval=-1.0, maxval=1.0)
  table = np.asarray(params["embed"]["embedding"], np.float64)
  expected = 4.0 * (table[TOKENS] + 5.0 / np.sqrt(lengths * 16.0)[..., None] * np.asarray(even, np.float64))
  real = SEGMENTS > 0
  np.testing.assert_allclose(np.asarray(found)[real], rms(expected)[real], atol=1e-5)


def test_each_place_of_dropout_has_a_key_of_its_own():
  """Attention adds 1 to a stream of zeros in each entry and the MLP 10, in the second layer 100 and 1000, if they are
  kept: all combinations occur, each about as often as it must if no mask depends on another."""
  model = make(num_layers=2, dropout=0.5, attention_out_bias=True, mlp_bias=True, tie_embeddings=False)
  params = {path: jnp.zeros(leaf.shape) for path, leaf in tree.flatten(model.abstract_params()).items()}
  params["final_norm/scale"] = jnp.ones(16)
  params["blocks/attn/o/bias"] = jnp.ones((2, 16)) * jnp.asarray([[1.0], [100.0]])
  params["blocks/mlp/down/bias"] = jnp.ones((2, 16)) * jnp.asarray([[10.0], [1000.0]])
  batch = dict(tokens=jnp.zeros((8, 64), jnp.int32), segment_ids=jnp.ones((8, 64), jnp.int32))
  apply = jax.jit(functools.partial(model.apply, train=True))
  hidden = np.asarray(apply(tree.unflatten(params), batch, rng=jax.random.key(0)).hidden, np.float64)
  # Of a row with an entry that has all four the norm's scale is known: its entries are whole numbers then.
  sums = 1111 * hidden.reshape(-1, 16) / hidden.reshape(-1, 16).max(-1, keepdims=True)
  whole = np.rint(sums[(np.abs(sums - np.rint(sums)) < 0.01).all(-1)]).astype(int)
  counts = {n: (whole == n).mean() for n in np.unique(whole)}
  assert len(counts) == 16 and all(0.03 < share < 0.13 for share in counts.values()), counts


def test_a_published_model_has_a_softmax_over_all_its_entries_and_one_of_ones_own_over_its_tokens():
  """As they were trained: 24 tokens of 32 entries."""
  for folder, real in ((None, 24), ("a folder", 32)):
    cfg = defaults().model
    cfg.update(num_layers=1, hidden_size=16, intermediate_size=16, num_heads=2, vocab_size=32, hf=folder)
    model = api.make_model(cfg, vocab_size=24, params_dtype="float32", compute_dtype="float32")
    logits = jax.eval_shape(model.logits, model.abstract_params(), jax.ShapeDtypeStruct((1, 2), jnp.int32))
    assert (model.num_real_vocab, model.vocab_size, logits.shape[-1]) == (real, 32, 32)
