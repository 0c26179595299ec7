"""Whether a compiled step may give other bits each time."""

import types

import jax
import jax.numpy as jnp
import pytest

from models.sharding import logical_axes
from tests import tiny
from tests.models import vision
from trainer import program as program_lib
from trainer import startup
from trainer.compiler import compiled, repeatable
from trainer.config import reward, strategy
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError
from trainer.generate import decoding

# Of what XLA made of a step for an H100, jax 0.11.2.
ADDS = """HloModule jit_update, is_scheduled=true

%region_16.36.clone.39 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0), metadata={op_name="reduce_sum"}
  %b = f32[] parameter(1), metadata={op_name="reduce_sum"}
  ROOT %sum.0 = KIND[] HOW(%a, %b), metadata={op_name="jit(update)/reduce_sum"}
}

%update_replace_computation (scalar_lhs: s32[], scalar_rhs: s32[]) -> s32[] {
  %scalar_lhs = s32[] parameter(0)
  ROOT %scalar_rhs = s32[] parameter(1), metadata={scheduling_name="scalar_rhs"}
}

%fused_scatter (param_0.1258: f32[128256,2048], param_1: bf16[8,4096,2048], param_3: s32[8,4096]) -> f32[128256,2048] {
  ROOT %scatter-add.5.1 = KIND[128256,2048]{1,0} scatter(%param_0.1258, %bitcast.121.2, %bitcast.154.1), \
update_window_dims={1,2}, inserted_window_dims={}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, \
to_apply=%region_16.36.clone.39, metadata={op_name="jit(update)/transpose(jvp())/scatter-add" stack_frame_id=346}
}

%fused_scatter.1 (param_0.1268: s32[32768], param_1.2140: s32[32768]) -> s32[32768] {
  ROOT %scatter.14 = s32[32768]{0} scatter(%param_0.1268, %bitcast.149.1, %iota.45.1), update_window_dims={1}, \
inserted_window_dims={}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, UNIQUE\
to_apply=%update_replace_computation, metadata={op_name="jit(update)/jvp(jit(argsort))/sort" stack_frame_id=361}
}

ENTRY %main (p: f32[2]) -> f32[2] {
  CALL
  ROOT %p = f32[2] parameter(0)
}
"""
FMHA = ('%cudnn = (bf16[8,16,4096,128]{3,1,2,0}) custom-call(%q), custom_call_target="__cudnn$fmhaSoftmaxBackward", '
        'backend_config={"cudnn_fmha_backend_config":{"is_causal_mask":true}}')
SCAN = '%cub = (f32[512]{0}, u8[1023]{0}) custom-call(%a), custom_call_target="xla.gpu.ext.cub_scan_unassigned"'
KERNEL = ('%pallas_call.10 = (bf16[8]{0}) custom-call(%a), custom_call_target="__gpu$xla.gpu.triton", '
          'backend_config="%1 = \\"tt.ADD\\"(%0)"')

# And of one that jax 0.10.2 compiled for it: bytecode, here without what stands before and behind its names.
BYTECODE = ('ROOT %pallas_call.1 = f32[64]{0} custom-call(%x.1), custom_call_target="__gpu$xla.gpu.triton", '
            'metadata={op_name="jit(f)/atomic_rmw"}, backend_config={debug = false, grid_x = 16 : i32, ir = '
            r'"ML\EFR\0DMLIR23.0.0git\00\0D\07\11builtin\00tt\00arith\00get_program_id\00load\00ADD\00kernel\00'
            r'atomic_rmw:\00\08A\13", name = "kernel", num_warps = 4 : i32}')


def text(how="add", kind="f32", unique=False, call=""):
  made = ADDS.replace("KIND", kind).replace("HOW", how)
  return made.replace("UNIQUE", "unique_indices=true, " if unique else "").replace("CALL", call)


@pytest.mark.parametrize(("given", "found"), [
    (dict(), ["scatter, add, scatter-add.5.1 (jit(update)/transpose(jvp())/scatter-add)"]),
    (dict(how="multiply", kind="bf16"),
     ["scatter, multiply, scatter-add.5.1 (jit(update)/transpose(jvp())/scatter-add)"]),
    (dict(how="maximum"), []), (dict(kind="s32"), []), (dict(how="or", kind="pred"), []),
    (dict(kind="s32", call="%s = f32[4,4]{1,0} select-and-scatter(%x, %g, %z), window={size=2x2}"),
     ["select-and-scatter s"]),
    (dict(kind="s32", call=FMHA), ["__cudnn$fmhaSoftmaxBackward cudnn"]),
    *((dict(kind="s32", call=FMHA.replace("fmhaSoftmaxBackward", f"conv{kind}")), [f"__cudnn$conv{kind} cudnn"][:count])
      for kind, count in (("BackwardFilter", 1), ("BackwardInput", 1), ("BiasActivationForward", 0))),
    (dict(kind="s32", call=KERNEL.replace("ADD", "atomic_rmw")), ["kernel with atomic operations pallas_call.10"]),
    (dict(kind="s32", call=KERNEL.replace("ADD", "load")), []),
    *((dict(kind="s32", call=BYTECODE.replace("ADD", f"atomic_{kind}")),
       ["kernel with atomic operations pallas_call.1 (jit(f)/atomic_rmw)"]) for kind in ("rmw", "cas")),
    (dict(kind="s32", call=BYTECODE.replace("ADD", "store")), []),
    (dict(kind="s32", call=SCAN), ["running sum cub"]), (dict(kind="s32", call=SCAN.replace("f32", "s32")), [])])
def test_what_adds_in_an_order_left_to_chance_is_found(given, found):
  assert repeatable.unordered(text(unique=True, **given)) == found


def test_of_cudnn_it_is_known_from_what_xla_was_told():
  assert not repeatable.unordered(text(kind="s32", unique=True, call=FMHA), told=True)
  convolution = FMHA.replace("fmhaSoftmaxBackward", "convBackwardFilter")
  assert not repeatable.unordered(text(kind="s32", unique=True, call=convolution), told=True)
  assert len(repeatable.unordered(text(unique=True, call=FMHA), told=True)) == 1


def test_so_is_what_is_written_over_another_value_unless_no_two_share_a_place():
  assert repeatable.unordered(text(kind="s32")) == [
      "scatter, one value over another, scatter.14 (jit(update)/jvp(jit(argsort))/sort)"]


def test_a_real_program_is_read():
  """As XLA for CPU writes it, which leaves scatters as they are."""
  ids, rows = jnp.array([0, 0, 3]), jnp.ones((3, 2))
  add = jax.jit(lambda x: x.at[ids].add(rows)).lower(jnp.zeros((5, 2))).compile()
  assert [found.split(",")[:2] for found in repeatable.unordered(add.as_text())] in ([["scatter", " add"]], [])
  assert not repeatable.unordered(jax.jit(lambda x: x @ x).lower(jnp.ones((4, 4))).compile().as_text())


def test_a_step_that_does_not_hold_the_promise_is_refused_and_the_operations_named():
  with pytest.raises(ConfigError, match=r"left to chance:\n  scatter, add, scatter-add.5.1 .*\n.*deterministic=False"):
    repeatable.check(text(unique=True))
  repeatable.check(text(kind="s32", unique=True))


def test_it_is_promised_on_gpus_unless_the_config_says_otherwise(tmp_path):
  config, _ = program_lib.resolve(tiny.config(tmp_path))
  assert repeatable.of(config, "gpu") is repeatable.compile_in_order
  lowered = types.SimpleNamespace(compile=lambda: "compiled")
  assert repeatable.of(config, "cpu")(lowered) == repeatable.of(config, "tpu")(lowered) == "compiled"
  config, _ = program_lib.resolve(tiny.config(tmp_path, deterministic=False))
  assert repeatable.of(config, "gpu")(lowered) == "compiled"


@pytest.mark.parametrize(("said", "missing"), [
    (" ".join(["--other=1", *(f"{flag}={value}" for flag, value in startup.untimed_flags().items())]), None),
    ("--xla_gpu_dot_merger_threshold_mb=0 --xla_gpu_autotune_level=4",
     "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"),
    ("--xla_gpu_autotune_level=0 --xla_gpu_dot_merger_threshold_mb=0", "--xla_gpu_enable_triton_gemm=false")])
def test_it_is_said_where_only_the_step_is_held_to_it(said, missing, monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", said)
  notes = repeatable.notes(types.SimpleNamespace(deterministic=True), "gpu")
  assert len(notes) == (missing is not None) and all(f"XLA_FLAGS='{missing}'," in note for note in notes)
  assert not repeatable.notes(types.SimpleNamespace(deterministic=False), "gpu")
  assert not repeatable.notes(types.SimpleNamespace(deterministic=True), "cpu")


class Lowered:
  """Whose program is `ordinary`, or `told` where XLA is told to keep an order."""

  def __init__(self, ordinary, told):
    self.texts, self.given = [ordinary, told], []

  def compile(self, compiler_options=None):
    self.given.append(compiler_options)
    found = self.texts[compiler_options == repeatable.IN_ORDER]
    return types.SimpleNamespace(as_text=lambda: found)


def test_xla_is_told_to_keep_an_order_where_there_is_none():
  ordered, unordered = text(kind="s32", unique=True), text(unique=True)
  lowered = Lowered(ordered, "")
  step = compiled.Step(types.SimpleNamespace(lower=lambda *args: lowered), repeatable.compile_in_order)
  step.compile(jnp.float32(0), {"tokens": jnp.ones((2, 4))})
  assert lowered.given == [repeatable.UNTIMED] and len(step) == 1
  lowered = Lowered(unordered, ordered)
  assert repeatable.compile_in_order(lowered).as_text() == ordered and lowered.given == [
      repeatable.UNTIMED, repeatable.IN_ORDER]
  step = compiled.Step(types.SimpleNamespace(lower=lambda *args: Lowered(unordered, unordered)),
                       repeatable.compile_in_order)
  with pytest.raises(ConfigError, match="left to chance"):
    step.compile(jnp.float32(0), {"tokens": jnp.ones((2, 4))})
  assert not step  # nothing that could run


def shared(jaxpr):
  """Scatters whose places may be shared, where the order matters."""
  return [str(e.source_info.traceback) for e in tiny.equations(jaxpr) if e.primitive.name in (
      "scatter", "scatter-add", "scatter_add", "scatter_mul") and not e.params["unique_indices"]
      and e.invars[1].aval.shape[:-1] not in ((), (1,))]


@pytest.mark.parametrize(("name", "changed"), [
    ("seq", {}), ("seq", dict(model__tie_embeddings=False, model__vocab_chunk=64)),
    ("seq", dict(model__positions="learned", model__max_positions=64)),
    ("seq", dict(model__moe__num_experts=4, model__moe__experts_per_token=2)),
    ("sft", {}), ("dpo", {}), ("kto", {}),
    ("grpo", dict(rollout__num_prompts=2, rollout__rewards__right=reward(type="numeric")))])
def test_no_step_of_ours_scatters_to_places_that_may_be_shared(name, changed, tmp_path, monkeypatch):
  monkeypatch.setattr(logical_axes, "platform", lambda: "gpu")
  config = tiny.config(tmp_path, strategy=strategy(name))
  config.model.attention = "blocked"
  for key, value in changed.items():
    *path, last = key.split("__")
    node = config
    for part in path:
      node = node[part]
    node[last] = value
  config, _ = program_lib.resolve(config)
  program_lib.settle(config, "gpu")
  model = program_lib.make_model(config, 258)
  program = program_lib.make_program(config, model, program_lib.planned_optimizer(config, model),
                                     mesh_lib.make_mesh({}), ["main"])
  batch = program_lib.abstract_batch(config, model, config.batch_size, precompute=program.precompute,
                                     share_prompts=program.share_prompts)
  found = shared(jax.make_jaxpr(program.update_fn)(program.abstract_state, batch).jaxpr)
  assert not found, found[0]


def test_nor_does_a_gradient_of_images(monkeypatch):
  monkeypatch.setattr(logical_axes, "platform", lambda: "gpu")
  model, batch = vision.make_vlm("siglip", attention="blocked"), vision.packed()
  loss = jax.grad(lambda params: jnp.sum(model.apply(params, batch).hidden))
  assert not (found := shared(jax.make_jaxpr(loss)(model.abstract_params()).jaxpr)), found[0]


def test_nor_does_sampling(monkeypatch):
  monkeypatch.setattr(logical_axes, "platform", lambda: "gpu")
  model = tiny.model()
  state = jax.eval_shape(lambda: decoding.empty(model, 4, 32))
  params = model.abstract_params()
  tokens, lengths = jnp.zeros((2, 8), jnp.int32), jnp.ones(2, jnp.int32)
  last, begun = jax.eval_shape(lambda p: decoding.prefill(model, p, tokens, lengths, {}), params)
  extend = jax.make_jaxpr(lambda *args: decoding.extend(model, *args, tokens, lengths))(params, begun, last)
  given = jnp.array([0, 4]), jnp.array([0, 0]), jnp.zeros((2, 2), jnp.uint32), *jnp.zeros((3, 2), jnp.int32)
  begin = jax.make_jaxpr(lambda *args: decoding.begin(model, *args, given))(state, last, begun)
  read = jax.eval_shape(model.decoding_params, params)
  numbers = jnp.full(8, -1, jnp.int32), jnp.ones(3), jnp.int32(0), jnp.int32(1)
  options = decoding.DecodeOptions(4, greedy=False, truncated=True)
  decode = jax.make_jaxpr(lambda *args: decoding.decode(model, options, *args, numbers))(read, state)
  for program in (begin, extend, decode):
    assert not (found := shared(program.jaxpr)), found[0]
