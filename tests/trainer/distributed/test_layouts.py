"""Whatever the mesh, the same numbers (I2), and compiled programs that move what they should and nothing else."""

import functools

import jax
import numpy as np
import pytest

from tests import tiny
from tests.models.common import (
  DEEPSEEK_MOE,
  GEMMA3N,
  GEMMA4_MOE,
  GEMMA4_SHARED,
  GPT_OSS,
  GRANITE4,
  INDEXED,
  LLAMA4_MOE,
  NEMOTRON_3,
  OLMO,
  QWEN3_NEXT,
)
from trainer import state as state_lib
from trainer import update as update_lib
from trainer.config import defaults
from trainer.config.checks import View
from trainer.distributed import mesh as mesh_lib
from trainer.metrics import to_floats
from trainer.optim import optimizer as optim
from trainer.planning.collectives import collectives
from trainer.strategies import seq

pytestmark = pytest.mark.devices(8)

ROWS, LENGTH = 16, 16
MOE = dict(num_experts=4, experts_per_token=2, expert_size=16, shared_size=8, balance_loss=0.2, z_loss=0.05)
KINDS = {"dense": dict(num_layers=4, layer_pattern=("local", "global"), window=5, num_kv_heads=1, attention_block=8),
         "olmo": dict(OLMO, num_heads=4, lora=dict(rank=2, alpha=4.0), attention_block=8),
         # What states give is small at first; a norm that blows it up blows up its rounding, too.
         "delta": dict(QWEN3_NEXT, num_heads=4, num_layers=1, layer_pattern=("delta",), norm_eps=0.1,
                       attention_block=8),
         # Two devices each have a half of the heads, but there is one group.
         "mamba": dict(GRANITE4, num_layers=2, layer_pattern=("mamba", "global"), norm_eps=0.1, attention_block=8,
                       lora=dict(rank=2, alpha=4.0), mamba=dict(GRANITE4["mamba"], num_groups=1, state_dim=6)),
         "latent": dict(DEEPSEEK_MOE, num_heads=4, num_layers=3, attention_block=8,
                        latent=dict(kv_rank=8, q_rank=12, nope_dim=3, rope_dim=4, value_dim=5),
                        moe=dict(DEEPSEEK_MOE["moe"], shared_size=8, expert_size=8)),
         "indexed": dict(INDEXED, num_heads=4, attention_block=8, latent=dict(
             INDEXED["latent"], kv_rank=8, q_rank=12, index_topk=5, index_heads=8, index_head_dim=8)),
         "moe": dict(moe=MOE, attention_block=8),
         "mtp": dict(num_layers=1, mtp_layers=2, norm_eps=0.1, attention_block=8),
         "mtp_moe": dict(mtp_layers=1, moe=dict(MOE, dense_layers=1), norm_eps=0.1, attention_block=8),
         "adapters": dict(moe=MOE, attention_block=8, lora=dict(rank=2, alpha=4.0, targets=("moe/experts/", "embed/"))),
         "rows": dict(num_heads=4, attention_block=8, lora=dict(rank=2, alpha=4.0, targets=("attn/q/",),
                                                                trainable_token_indices=(3, 17, 9))),
         # So many norms of what is small blow rounding up. In float64, with that of GEMMA4_SHARED, the gradients of the
         # two meshes are 8e-16 apart, in float32 2e-6, and with this 2e-8.
         "gemma4_shared": dict(GEMMA4_SHARED, num_layers=6, kv_shared_layers=2, norm_eps=0.3, num_heads=4,
                               attention_block=8, per_layer_size=8),
         "gemma4": dict(GEMMA4_MOE, num_heads=4, attention_block=8, moe=GEMMA4_MOE["moe"] | dict(balance_loss=0.2)),
         "gemma3n": dict(GEMMA3N, num_layers=6, num_heads=4, activation_sparsity=(0.7, 0.7, 0, 0, 0, 0), norm_eps=0.3,
                         attention_block=8, per_layer_size=8, per_layer_vocab=None, laurel_rank=8),
         # Of a row of 16 tokens, devices have eight, of which chunks of five are no part.
         "llama4": dict(LLAMA4_MOE, num_heads=4, num_layers=4, attention_chunk=5, attention_block=8, norm_eps=0.1,
                        moe=LLAMA4_MOE["moe"] | dict(expert_size=8, shared_size=8, experts_per_token=2,
                                                     balance_loss=0.2)),
         "nemotron_3": dict(NEMOTRON_3, num_heads=4, norm_eps=0.1, attention_block=8,
                            moe=NEMOTRON_3["moe"] | dict(expert_size=8, shared_size=8)),
         "gpt_oss": dict(GPT_OSS, num_heads=4, mlp_bias=True, attention_block=8, moe=MOE | dict(router_bias=True))}
LAYOUTS = {
    "dense": [dict(data=8), dict(fsdp=8), dict(context=8), dict(slice=2, data=2, fsdp=2),
              dict(data=2, fsdp=2, tensor=2), dict(fsdp=2, context=2, tensor=2)],
    # Norms of queries and of keys are over all heads, which `tensor` splits.
    "olmo": [dict(fsdp=2, context=2, tensor=2)],
    "delta": [dict(data=2, fsdp=2, tensor=2)],
    "mamba": [dict(data=2, fsdp=2, tensor=2)],
    "latent": [dict(fsdp=2, context=2, tensor=2)],
    "indexed": [dict(data=2, fsdp=2, tensor=2)],
    "moe": [dict(fsdp=4, tensor=2), dict(data=2, expert=4), dict(expert=2, context=2, tensor=2),
            dict(fsdp=2, expert=2, context=2)],
    "mtp": [dict(data=2, fsdp=2, tensor=2)],
    "mtp_moe": [dict(fsdp=2, expert=2, tensor=2)],
    # Every axis that splits adapters of experts, and of tables.
    "adapters": [dict(fsdp=2, expert=2, tensor=2)],
    "rows": [dict(fsdp=2, context=2, tensor=2)],
    "gemma4_shared": [dict(fsdp=2, context=2, tensor=2)],
    "gemma4": [dict(fsdp=2, expert=2, tensor=2)],
    "gemma3n": [dict(fsdp=2, context=2, tensor=2)],
    "llama4": [dict(expert=2, context=2, tensor=2)],
    "nemotron_3": [dict(fsdp=2, expert=2, tensor=2)],
    "gpt_oss": [dict(fsdp=2, context=2, tensor=2), dict(expert=2, context=2, tensor=2)],
}


def named(layout):
  return " ".join(f"{axis}{size}" for axis, size in layout)


def make(kind):
  """(init, update) of a tiny model under AdamW, with dropout and two micro-batches."""
  model, config = tiny.model(dropout=0.1, **KINDS[kind]), defaults()
  config.optimizer.eps = 1e-3  # so that rounding of tiny gradients is not blown up to the size of a step
  optimizer = optim.make_optimizer(config.optimizer, config.schedule, model.abstract_params(), total_steps=10,
                                   to_steps=lambda cfg, prefix, default=None, where="": 0)
  strategy = View(config.strategy)

  def loss_fn(params, batch, rng):
    return seq.loss(model, params, batch, rng, strategy)

  update = update_lib.make_update_fn(loss_fn, optimizer, update_lib.Options(
      seed=0, micro_batch_size=ROWS // 2, clip_norm=1.0, ema_decay=0.9, source_names=("a", "b")))
  fresh = state_lib.make_fresh(optimizer, ema=True)

  def decided(key):
    """A router decided enough for uneven loads."""
    state = fresh(model.init(key))
    if kind == "moe":
      state["params"]["blocks"]["moe"]["router"]["kernel"] *= 6.0
    return state

  return decided, update


def steps(init, update, batches, place):
  state = init(jax.random.key(3))
  first = jax.device_get(state)
  for batch in batches:
    state, metrics = update(state, place(batch))
  return first, jax.device_get(state), to_floats(jax.device_get(metrics))


def batches():
  return [tiny.batch(ROWS, LENGTH, seed) for seed in range(2)]


@functools.cache
def on_one_device(kind):
  init, update = make(kind)
  return steps(jax.jit(init), jax.jit(update), batches(), lambda batch: batch)


@functools.cache
def on_eight_devices(kind, layout):
  """(state before, state after, metrics, collectives of the compiled step) of the same steps."""
  init, update = make(kind)
  mesh = mesh_lib.make_mesh({"data": 1} | dict(layout))
  abstract = jax.eval_shape(init, jax.random.key(0))
  params, notes = mesh_lib.param_shardings(abstract["params"], mesh)
  assert notes == []
  shardings = mesh_lib.state_shardings(abstract, abstract["params"], params, mesh)

  def place(batch):
    return mesh_lib.place_batch(lambda rows: {k: v[rows] for k, v in batch.items()}, ROWS,
                                mesh_lib.batch_sharding(mesh))

  with mesh_lib.activation_rules(mesh):
    init = jax.jit(init, out_shardings=shardings)
    target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)
    compiled = jax.jit(update, donate_argnums=0, out_shardings=(shardings, None)).lower(
        target, place(batches()[0])).compile()
    return (*steps(init, compiled, batches(), place), collectives(compiled.as_text(), mesh))


ALL = [(kind, tuple(layout.items())) for kind, layouts in LAYOUTS.items() for layout in layouts]


@pytest.mark.parametrize("kind, layout", ALL, ids=lambda value: value if isinstance(value, str) else named(value))
def test_one_device_and_eight_compute_the_same(kind, layout):
  """I2, with dropout, packing, and two micro-batches: initialisation is exact, the rest equal to rounding."""
  first, after, metrics = on_one_device(kind)
  first_8, after_8, metrics_8, _ = on_eight_devices(kind, layout)
  for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(first)[0], jax.tree.leaves(first_8), strict=True):
    np.testing.assert_array_equal(a, b, err_msg=str(path))
  for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(after)[0], jax.tree.leaves(after_8), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=str(path))
  for name, value in metrics.items():
    assert metrics_8[name] == pytest.approx(value, rel=1e-5), name
  assert np.any(after["params"]["embed"]["embedding"] != first["params"]["embed"]["embedding"])


# ------------------------------------------------------------------------------------------ what compiled programs move


def moved(kind, layout, what):
  return [one for one in on_eight_devices(kind, layout)[3] if one.kind == what and one.group_size > 1]


def times(found, **wanted):
  return sum(one.times for one in found if all(getattr(one, name) == value for name, value in wanted.items()))


# How many kernels of that many bytes a layer of the dense model has: q and o; k and v; gate, up and down.
KERNELS = {4 * 16 * 16: 2, 4 * 16 * 8: 2, 4 * 16 * 32: 3}
MICRO, LAYERS = 2, 4


def test_fsdp_gathers_one_kernel_at_a_time_and_scatters_its_gradient():
  """ZeRO-3: each kernel is gathered forward and backward, its gradient reduced to the part that is kept."""
  layout = (("slice", 2), ("data", 2), ("fsdp", 2))
  gathered, scattered = (moved("dense", layout, what) for what in ("all-gather", "reduce-scatter"))
  for size, count in KERNELS.items():
    assert times(gathered, bytes=size, axes=("fsdp",)) >= 2 * count * LAYERS * MICRO
    assert times(scattered, bytes=size, axes=("fsdp",)) >= count * LAYERS * MICRO
  # Nothing larger: no stack of layers, and no activations, which have three dimensions.
  assert max(one.bytes for one in gathered + scattered) == 4 * 16 * 32
  assert not [one for one in gathered if one.shape.startswith("f32") and one.shape.count(",") > 1]


@pytest.mark.parametrize("layout", [(("fsdp", 2), ("context", 2), ("tensor", 2)),
                                    (("data", 2), ("fsdp", 2), ("tensor", 2))], ids=named)
def test_sequence_parallelism_gathers_and_scatters_over_tensor(layout):
  """Between layers a device has its part of the length: gathered before a layer's products, reduced after them."""
  gathered, scattered = (moved("dense", layout, what) for what in ("all-gather", "reduce-scatter"))
  sizes = dict(layout)
  rows = ROWS // MICRO // sizes.get("data", 1) // sizes["fsdp"]
  length = LENGTH // sizes.get("context", 1)
  # Before attention and before the MLP, forward and twice backward; after them, forward, and before them, backward.
  whole = dict(bytes=4 * rows * length * 16, axes=("tensor",))
  assert times(gathered, **whole) >= 3 * 2 * LAYERS * MICRO
  assert times(scattered, **whole) >= 2 * 2 * LAYERS * MICRO
  # Over axes with other rows, or other parts of the length, no activations are gathered, nor anything larger.
  others = [one for one in gathered if one.axes != ("tensor",) and one.shape.startswith("f32")]
  assert others and not [one for one in others if one.shape.count(",") > 1 or one.bytes > 4 * 16 * 32]


def test_experts_get_their_tokens_by_all_to_all():
  layout = (("data", 2), ("expert", 4))
  sent = [one for one in moved("moe", layout, "all-to-all") if one.shape.startswith("f32")]
  # To the experts and back, forward; tokens, gradients and their gradients backward, in every layer. (How many rounds
  # that takes is decided when the step runs, and the text counts one.)
  assert {one.axes for one in sent} == {("expert",)} and times(sent) >= 5 * 2 * MICRO
  # An expert's kernels stay where they are.
  assert not [one for one in moved("moe", layout, "all-gather") if one.shape.startswith(("f32[1,", "f32[4,"))]


def test_long_rows_pass_their_keys_round_and_gather_nothing():
  layout = (("context", 8),)
  passed = moved("dense", layout, "collective-permute")
  assert passed and {one.axes for one in passed} == {("context",)}
  assert not [one for one in moved("dense", layout, "all-gather")
              if one.shape.startswith("f32") and one.shape.count(",") > 1]
