"""Small models and batches that the tests of models/ share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from models import api
from models.transformer import Transformer
from tests.models.initial import initial
from trainer.config import defaults

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
OLMO = dict(norm_position="post", tie_embeddings=False, rope_fraction=0.5, activation="relu2", num_kv_heads=2,
            qk_norm=True, qk_norm_over="all", rope_interleaved=True, embedding_scale=3.0,
            residual_scale=0.4, logit_scale=0.7)
COHERE = dict(
    num_kv_heads=2,
    norm="layernorm",
    parallel_blocks=True,
    rope_interleaved=True,
    qk_norm=True,
    qk_norm_over="each_head",
    window=3,
    layer_pattern=("local", "nope"),
)
QWEN3_NEXT = dict(
    norm_eps=1e-3,
    num_layers=4,  # a period of the pattern, and one more
    num_kv_heads=2,
    head_dim=6,
    norm_scale_plus_one=True,
    rope_fraction=0.34,
    qk_norm=True,
    attention_gate=True,
    layer_pattern=("delta", "delta", "global"),
    delta=dict(num_key_heads=2, num_value_heads=4, key_head_dim=6, value_head_dim=4, conv_width=3, chunk=5),
)
GRANITE4 = dict(
    norm_eps=1e-3,
    num_layers=4,
    num_kv_heads=2,
    positions="none",
    residual_scale=0.4,
    layer_pattern=("mamba", "global", "mamba"),
    mamba=dict(num_heads=4, head_dim=6, num_groups=2, state_dim=5, conv_width=3, min_step=0.02, chunk=5),
)
NEMOTRON_H = dict(
    GRANITE4,
    tie_embeddings=False,
    activation="relu2",
    num_layers=5,
    layer_pattern=("mamba", "mlp", "global"),
)
# Experts without a gate, in layers of their own.
NEMOTRON_3 = dict(
    NEMOTRON_H,
    num_layers=6,  # a period of the pattern, and two more
    layer_pattern=("mamba", "moe", "global", "mlp"),
    moe=dict(num_experts=4, experts_per_token=2, expert_size=8, shared_size=6, scores="sigmoid", choice_bias=True,
             weight_scale=2.5),
)
GPT_OSS = dict(
    num_kv_heads=2,
    head_dim=6,
    activation="clamped_swiglu",
    qkv_bias=True,
    attention_out_bias=True,
    attention_sinks=True,
    window=3,
    layer_pattern=("local", "global"),
)
# Heads of different sizes, and one of keys and values in global layers.
GEMMA4 = dict(
    num_layers=5,
    num_kv_heads=2,
    head_dim=6,
    norm_eps=1e-3,
    norm_position="sandwich",
    activation="geglu",
    scale_embeddings=True,
    layer_scale=True,
    qk_norm=True,
    value_norm=True,
    attention_scale=1.0,
    final_logit_cap=2.0,
    rope_local_theta=100.0,
    window=3,
    layer_pattern=("local", "local", "global"),
    global_attention=dict(head_dim=8, num_kv_heads=1, values_are_keys=True, rope_fraction=0.5),
)
DEEPSEEK = dict(
    norm_eps=1e-3,
    tie_embeddings=False,
    rope_interleaved=True,
    qkv_bias=True,
    attention_scale=0.5,
    latent=dict(kv_rank=10, q_rank=7, nope_dim=3, rope_dim=4, value_dim=5),
)
# Of a few heads, whose scores are often 0, so that they tie.
INDEXED = dict(DEEPSEEK, num_layers=4, latent=dict(DEEPSEEK["latent"], index_topk=3, index_heads=3, index_head_dim=6,
                                                   index_shared_layers=(1, 3)))
# With experts, which the model in NumPy has not.
DEEPSEEK_MOE = dict(DEEPSEEK, moe=dict(
    num_experts=8, experts_per_token=2, expert_size=6, shared_size=5, scores="sigmoid", choice_bias=True, groups=4,
    groups_used=2, weight_scale=1.5, dense_layers=1))
GEMMA4_MOE = dict(GEMMA4, num_layers=3, moe=dict(
    num_experts=4, experts_per_token=2, expert_size=8, beside_mlp=True, router_norm=True, expert_scale=True))
# The last three layers use keys and values of others; the depth is no whole number of periods, nor is that before them.
GEMMA4_SHARED = dict(GEMMA4, num_layers=8, layer_pattern=("local", "global"), kv_shared_layers=3, double_wide_mlp=True,
                     per_layer_size=6, norm_eps=0.05)
# Two layers in a scan, one of another sparsity, two more, and two that use keys and values of others.
GEMMA3N = dict(
    num_layers=7,
    num_kv_heads=2,
    head_dim=6,
    norm_eps=0.05,
    norm_position="sandwich",
    activation="geglu",
    scale_embeddings=True,
    qk_norm=True,
    value_norm=True,
    attention_scale=1.0,
    final_logit_cap=2.0,
    rope_local_theta=100.0,
    window=3,
    layer_pattern=("local", "global"),
    kv_shared_layers=2,
    per_layer_size=6,
    per_layer_vocab=20,
    altup=dict(num_inputs=3, coef_clip=0.2),
    laurel_rank=5,
    activation_sparsity=(0.7, 0.7, 0.4, 0, 0, 0, 0),
)
LLAMA4 = dict(
    norm_eps=1e-3,
    num_layers=4,  # a period of the pattern, and one more
    num_kv_heads=2,
    tie_embeddings=False,
    rope_interleaved=True,
    qk_norm=True,
    qk_norm_over="unscaled",
    attention_chunk=3,
    layer_pattern=("chunked", "chunked", "nope"),
    nope_temperature=dict(scale=0.5, floor=2),
)
# Experts in every other layer, the second of a pattern of two.
LLAMA4_MOE = dict(LLAMA4, num_layers=5, layer_pattern=("chunked", "nope"), moe=dict(
    num_experts=4, experts_per_token=1, expert_size=6, shared_size=6, scores="sigmoid", normalize_weights=False,
    weights_on_input=True, layer_step=2))
FAMILIES = dict(llama=LLAMA, gemma=GEMMA, gpt2=GPT2, olmo=OLMO)
OPTIONS_OF = dict(**FAMILIES, cohere=COHERE, qwen3_next=QWEN3_NEXT, granite4=GRANITE4, nemotron_h=NEMOTRON_H,
                  gpt_oss=GPT_OSS, deepseek=DEEPSEEK, gemma3n=GEMMA3N, gemma4=GEMMA4, gemma4_shared=GEMMA4_SHARED,
                  llama4=LLAMA4, indexed=INDEXED)


def config(**changed):
  m = defaults().model
  m.update(dict(num_layers=3, hidden_size=16, intermediate_size=24, num_heads=4, vocab_multiple=8, attention_block=8))
  m.update(changed)
  return m


def make(remat="none", compute_dtype=jnp.float32, **changed) -> Transformer:
  return api.make_model(
      config(**changed), vocab_size=VOCAB, params_dtype=jnp.float32, compute_dtype=compute_dtype, remat=remat
  )


def random_params(model, seed=0):
  """Parameters that are nowhere 0 or 1, so that no norm or bias can be forgotten."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda p: jnp.asarray(np.asarray(p) + 0.2 * rng.normal(size=p.shape).astype(np.float32)),
                      initial(model, seed))


@functools.cache
def family(name, scan_layers=True):
  """Model, parameters and compiled `logits` of one of OPTIONS_OF."""
  model = make(**OPTIONS_OF[name], scan_layers=scan_layers)
  return model, random_params(model), jax.jit(model.logits)


def paths(tree):
  return {"/".join(k.key for k in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def value_and_gradients(attend, q, k, v, cotangent):
  """[output, dq, dk, dv]."""
  def both(q, k, v, cotangent):
    out, pull = jax.vjp(attend, q, k, v)
    return [out, *pull(cotangent)]

  return jax.jit(both)(q, k, v, cotangent)


def assert_isolated(attend, q, k, v, segments):
  """Other contents of documents 1 and 3, and of padding, change no bit of the others' output, and all of their own."""
  attend = jax.jit(attend)
  before = np.asarray(attend(q, k, v))
  for changed in (1, 3, 0):
    where = (segments == changed)[:, :, None, None]
    after = np.asarray(attend(*(jnp.where(where, x * 1e3 + 1.0, x) for x in (q, k, v))))
    others = (segments != changed) & (segments != 0)
    np.testing.assert_array_equal(after[others], before[others])
    assert changed == 0 or (after[segments == changed] != before[segments == changed]).any()
