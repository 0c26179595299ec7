"""What programs move, read from their texts: counted in programs whose collectives are known."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from trainer.distributed import mesh as mesh_lib
from trainer.planning.collectives import Collective, collectives, copies, size_of, summary

pytestmark = pytest.mark.devices(8)

MESH = dict(data=2, fsdp=2, tensor=2)


def compiled(local, in_spec, out_spec, shape=(16, 16)):
  mesh = mesh_lib.make_mesh(MESH)
  mapped = jax.shard_map(local, mesh=mesh, in_specs=in_spec, out_specs=out_spec, check_vma=False)
  x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, in_spec))
  return collectives(jax.jit(mapped).lower(x).compile().as_text(), mesh)


KNOWN = {
    "all-gather": (lambda x: jax.lax.all_gather(x, ("data", "fsdp"), tiled=True), P(("data", "fsdp")), P(),
                   1024, 4, ("data", "fsdp"), 768.0),
    "reduce-scatter": (lambda x: jax.lax.psum_scatter(x, "tensor", tiled=True), P(), P("tensor"),
                       1024, 2, ("tensor",), 512.0),
    "all-reduce": (lambda x: jax.lax.psum(x, ("data", "tensor")), P(("data", "tensor")), P(),
                   256, 4, ("data", "tensor"), 384.0),
    "all-to-all": (lambda x: jax.lax.all_to_all(x, "fsdp", 0, 1, tiled=True), P("fsdp"), P(None, "fsdp"),
                   512, 2, ("fsdp",), 256.0),
    "collective-permute": (lambda x: jax.lax.ppermute(x, "fsdp", [(0, 1), (1, 0)]), P("fsdp"), P("fsdp"),
                           512, 2, ("fsdp",), 512.0),
}


@pytest.mark.parametrize("kind", KNOWN)
def test_each_kind_is_found_with_its_bytes_devices_and_axes(kind):
  local, in_spec, out_spec, size, group, axes, traffic = KNOWN[kind]
  found = [one for one in compiled(local, in_spec, out_spec) if one.group_size > 1]
  assert [(one.kind, one.bytes, one.group_size, one.axes, one.times) for one in found] == [(kind, size, group, axes, 1)]
  assert found[0].traffic == traffic


def test_loops_count_as_often_as_they_run():
  def local(x):
    def inner(x, _):
      return x + jax.lax.ppermute(x, "tensor", [(0, 1), (1, 0)]), None

    def outer(x, _):
      return jax.lax.psum(jax.lax.scan(inner, x, length=3)[0], "data") / 2, None

    return jax.lax.scan(outer, x, length=5)[0]

  found = {one.kind: one.times for one in compiled(local, P("tensor"), P("tensor")) if one.group_size > 1}
  assert found == {"collective-permute": 15, "all-reduce": 5}


ONE = functools.partial(Collective, shape="", name="")


def test_summary_adds_up_by_kind_and_axes():
  found = [ONE("all-gather", 100, group_size=4, times=3, axes=("fsdp",)),
           ONE("all-gather", 60, group_size=4, times=1, axes=("fsdp",)),
           ONE("all-gather", 60, group_size=4, times=1, axes=("fsdp",), hidden=True),
           ONE("all-reduce", 1000, group_size=2, times=2, axes=("data",))]
  assert summary(found) == {("all-reduce", ("data",)): (2, 2000.0, 0.0), ("all-gather", ("fsdp",)): (5, 315.0, 45.0)}
  assert list(summary(found))[0][0] == "all-reduce"


TEXT = """HloModule step

%region_body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %g = bf16[8,4]{1,0} all-gather-start(%x), replica_groups=GROUPS, dimensions={0}, metadata={op_name="jit(f)/a"}
  %d = bf16[8,4]{1,0} all-gather-done(%g)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]) while(%t), condition=%c, body=%region_body, backend_config={"known_trip_count":{"n":"6"}}
}
"""


@pytest.mark.parametrize("groups, axes", [
    ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",)), ("[4,2]<=[8]", ("tensor",)), ("[2,4]<=[4,2]T(1,0)", ("data", "fsdp")),
    ("mesh['a'=2,'b'=4] {'b'}", ("fsdp", "tensor")),
    ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", ("fsdp", "tensor")),
    ("mesh['a'=8] {'a':(2)2}", ("fsdp",)),
])
def test_groups_are_read_however_they_are_written(groups, axes):
  (one,) = collectives(TEXT.replace("GROUPS", groups), mesh_lib.make_mesh(MESH))
  assert (one.kind, one.bytes, one.times, one.axes, one.name) == ("all-gather", 64, 6, axes, "jit(f)/a")


# As libtpu writes it: loops without a count, a kernel's text with lines of its own, an asynchronous gather in each of
# the fusions that run meanwhile, a reduce-scatter as a computation with a name, several reductions as one.
TPU_TEXT = """HloModule step

%all-reduce-scatter.1 (input: bf16[64,4]) -> bf16[8,4] {
  %input = bf16[64,4]{1,0:T(8,128)} parameter(0)
  %r = bf16[64,4]{1,0:T(8,128)} all-reduce(%input), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %s = bf16[8,4]{1,0:T(8,128)} dynamic-slice(%r, %at, %zero), dynamic_slice_sizes={8,4}
}

%fused_computation.1 (p: bf16[4,4]) -> bf16[8,4] {
  ROOT %g.1 = bf16[8,4]{1,0:T(8,128)} all-gather(%p), channel_id=2, replica_groups=[4,2]<=[8], dimensions={0}
}

%async_collective_fusion.2 (p: bf16[4,4]) -> bf16[8,4] {
  ROOT %g.2 = bf16[8,4]{1,0:T(8,128)} all-gather(%p), channel_id=2, replica_groups=[4,2]<=[8], dimensions={0}
}

%condition (p: (s32[], f32[8])) -> pred[] {
  %five = s32[]{:T(128)} constant(5)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %five), direction=LT
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %k = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config={"metadata":{
"text":"{\\"block\\": 512}"
}}, metadata={op_name="kernel"}
  %a = bf16[8,4]{1,0:T(8,128)} fusion(%x), kind=kCustom, calls=%fused_computation.1
  %b = bf16[8,4]{1,0:T(8,128)} fusion(%a), kind=kCustom, calls=%async_collective_fusion.2
  %c = bf16[8,4]{1,0:T(8,128)} fusion(%b), kind=kCustom, calls=%all-reduce-scatter.1
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]) while(%t), condition=%condition, body=%body
  %sums = (f32[2]{0:T(128)}, f32[3]{0:T(128)}) all-reduce(%m, %n), channel_id=3, replica_groups=[1,8]<=[8]
}
"""


def test_text_of_tpus():
  found = collectives(TPU_TEXT, mesh_lib.make_mesh(MESH))
  assert {(one.kind, one.bytes, one.times, one.axes) for one in found} == {
      ("all-gather", 64, 5, ("tensor",)), ("reduce-scatter", 512, 5, ("data", "fsdp", "tensor")),
      ("all-reduce", 20, 1, ("data", "fsdp", "tensor"))}
  assert len(found) == 3 and not any(one.hidden for one in found)
  # The same with a product in the fusion that runs meanwhile.
  text = TPU_TEXT.replace("%async_collective_fusion.2 (p: bf16[4,4]) -> bf16[8,4] {", """\
%async_collective_fusion.2 (p: bf16[4,4]) -> bf16[8,4] {
  %d = f32[8,8]{1,0} convolution(%m, %n), dim_labels=bf_io->bf""")
  assert {one.kind: one.hidden for one in collectives(text, mesh_lib.make_mesh(MESH))} == {
      "all-gather": True, "reduce-scatter": False, "all-reduce": False}


# Lines of a step that JAX 0.10.2's CUDA plugin compiled for H100s, shortened: several joined into one, with what enters
# and what leaves in the result of a beginning; one that ends before anything else begins, whatever stands between; a
# fusion that only counts; names of which one begins as another does; one in a computation of its own.
GPU_TEXT = """HloModule jit_update, is_scheduled=true

%gemm_fusion_dot.7_computation (parameter_0: bf16[8,16], parameter_1: bf16[16,16]) -> bf16[8,16] {
  ROOT %dot.1 = bf16[8,16]{1,0} dot(%parameter_0, %parameter_1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%wrapped_all_to_all (p: bf16[8,4]) -> bf16[8,4] {
  ROOT %all-to-all.2 = bf16[8,4]{1,0} all-to-all(%p), channel_id=9, \
replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}
}

%region_79.187_spmd.clone (loop_peel_param: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %all-gather-start = ((bf16[2,16]{1,0}, bf16[2,8]{1,0}), (bf16[16,16]{1,0}, bf16[16,8]{1,0})) all-gather-start(\
%bitcast.318.0, %bitcast.319.0), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, \
use_global_device_ids=true, metadata={op_name="jit(update)/while/body/shard_map/all_gather" stack_frame_id=165}, \
backend_config={"operation_queue_id":"0","collective_backend_config":{"is_sync":false,"is_pipelined":false}}
  %loop_add_fusion.60 = s32[] fusion(%copy.679), kind=kLoop, calls=%fused_add.60
  %all-gather-start.1 = (bf16[2,16]{1,0}, bf16[16,16]{1,0}) all-gather-start(%bitcast.6.0), channel_id=1, \
replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_0'}, dimensions={0}, use_global_device_ids=true, \
backend_config={"collective_backend_config":{"is_sync":BOTH_AT_ONCE,"is_pipelined":false}}
  %all-gather-done = (bf16[16,16]{1,0}, bf16[16,8]{1,0}) all-gather-done(%all-gather-start)
  %gemm_fusion_dot.7 = bf16[8,16]{1,0} fusion(%bitcast.10, %get-tuple-element.3), kind=kCustom, \
calls=%gemm_fusion_dot.7_computation
  %all-gather-done.1 = bf16[16,16]{1,0} all-gather-done(%all-gather-start.1)
  %reduce-scatter-start.1 = ((f32[16,16]{1,0}, /*index=1*/f32[16,8]{1,0}), (f32[2,16]{1,0}, f32[2,8]{1,0})) \
reduce-scatter-start(%copy.779, %wrapped_transpose.6), channel_id=71, replica_groups={{0,1,2,3,4,5,6,7}}, \
use_global_device_ids=true, dimensions={0}, to_apply=%region_164.179.clone
  %gemm_fusion_dot.8 = bf16[8,16]{1,0} fusion(%bitcast.11, %all-gather-done.1), kind=kCustom, \
calls=%gemm_fusion_dot.7_computation
  %reduce-scatter-done.1 = (f32[2,16]{1,0}, f32[2,8]{1,0}) reduce-scatter-done(%reduce-scatter-start.1)
}

ENTRY %main.12_spmd (param: f32[2]) -> f32[2] {
  %while.1 = (s32[], bf16[8,16]{1,0}) while(%tuple.3), condition=%region_80, body=%region_79.187_spmd.clone, \
backend_config={"known_trip_count":{"n":"15"}}
  %all-reduce-start.1 = (f32[2]{0}, f32[3]{0}) all-reduce-start(%p.1, %p.2), channel_id=9, \
replica_groups=[2,4]<=[2,2,2]T(1,0,2), use_global_device_ids=true, to_apply=%region_75.83.clone
  %all-reduce-done.1 = (f32[2]{0}, f32[3]{0}) all-reduce-done(%all-reduce-start.1)
  %async-start = ((bf16[8,4]{1,0}), bf16[8,4]{1,0}) async-start(%p.3), calls=%wrapped_all_to_all
  %gemm_fusion_dot.9 = bf16[8,16]{1,0} fusion(%p.4, %p.5), kind=kCustom, calls=%gemm_fusion_dot.7_computation
  %async-done = bf16[8,4]{1,0} async-done(%async-start)
}
"""


@pytest.mark.parametrize("both_at_once", ["false", "true"])
def test_text_of_gpus(both_at_once):
  found = collectives(GPU_TEXT.replace("BOTH_AT_ONCE", both_at_once), mesh_lib.make_mesh(MESH))
  everything = ("data", "fsdp", "tensor")
  assert [(one.kind, one.bytes, one.times, one.axes, one.hidden) for one in found] == [
      ("all-to-all", 64, 1, ("tensor",), True),
      ("all-gather", 2 * 16 * (16 + 8), 15, everything, False),
      ("all-gather", 2 * 16 * 16, 15, everything, both_at_once == "false"),
      ("reduce-scatter", 4 * 16 * (16 + 8), 15, everything, True),
      ("all-reduce", 4 * (2 + 3), 1, ("data", "tensor"), False)]
  assert found[1].name == "jit(update)/while/body/shard_map/all_gather"


SPARSE_CORE_TEXT = """HloModule step

%called_computation (param_0.129: f32[8,16], param_1.105: token[]) -> f32[4,16] {
  %param_1.105 = token[] parameter(1)
  %param_0.129 = f32[8,16]{1,0:T(8,128)} parameter(0)
  ROOT %reduce-scatter.2 = f32[4,16]{1,0:T(8,128)} reduce-scatter(%param_0.129), channel_id=1, \
replica_groups={{0,1},{2,3},{4,5},{6,7}}, use_global_device_ids=true, dimensions={0}, to_apply=%region_3
}, execution_thread="sparsecore"

ENTRY %main (x: f32[8,16]) -> f32[4,16] {
  %room = s32[]{:S(2)} custom-call(), custom_call_target="PrepareAsyncCallStart"
  %ready = token[] custom-call(%room), custom_call_target="PrepareAsyncCallDone"
  %rs.call-start = ((f32[8,16]{1,0}, token[]), f32[4,16]{1,0}) call-start(%x, %ready), \
async_execution_thread="sparsecore", to_apply=%called_computation
  %next = token[] custom-call(%room), custom_call_target="PrepareAsyncCallDone"
BETWEEN  %rs.call-done = f32[4,16]{1,0} call-done(%rs.call-start)
  ROOT %after = f32[4,16]{1,0} fusion(%rs.call-done), kind=kLoop, calls=%doubled
}
"""


@pytest.mark.parametrize("between, hidden", [
    ("  %product = f32[8,16]{1,0} fusion(%x), kind=kOutput, calls=%convolved\n", True), ("", False)])
def test_text_of_tpus_whose_sparse_cores_transfer(between, hidden):
  """What makes room for another transfer is no computation."""
  found = collectives(SPARSE_CORE_TEXT.replace("BETWEEN", between), mesh_lib.make_mesh(MESH))
  assert [(one.kind, one.bytes, one.times, one.axes, one.hidden) for one in found] == [
      ("reduce-scatter", 4 * 8 * 16, 1, ("tensor",), hidden)]


def test_loops_whose_count_only_their_condition_knows():
  """As compilers for GPUs leave it where they have taken a turn out of the loop: compared in a fusion."""
  text = GPU_TEXT.replace('backend_config={"known_trip_count":{"n":"15"}}', "backend_config={}")
  condition = """%fused_compare.6 (param_0.6: s32[]) -> pred[] {
  %constant_830_1 = s32[] constant(3)
  ROOT %compare.19.1 = pred[] compare(%param_0.6, %constant_830_1), direction=LT
}

%region_80 (cond_param.8: (s32[], bf16[8,16])) -> pred[] {
  ROOT %loop_compare_fusion.6 = pred[] fusion(%get-tuple-element.1), kind=kLoop, calls=%fused_compare.6
}

ENTRY"""
  assert {one.times for one in collectives(text.replace("ENTRY", condition))} == {1, 3}


@pytest.mark.parametrize("between, hidden", [
    ("%f = f32[8]{0} fusion(%x), kind=kLoop, calls=%c", True),
    ("%f = ((f32[8]{0}), f32[8]{0}) fusion-start(%x), kind=kLoop, calls=%c", True),
    ("%t = f32[8]{0} get-tuple-element(%x), index=0", False)])
def test_what_is_under_way_while_something_is_computed(between, hidden):
  done = "  %d = bf16[8,4]{1,0} all-gather-done(%g)\n"
  text = TEXT.replace("GROUPS", "[4,2]<=[8]").replace(done, f"  {between}\n{done}  %e = f32[8]{{0}} fusion(%d)\n")
  assert [one.hidden for one in collectives(text)] == [hidden]


COPIES = """HloModule step

%fused (p: f32[4,8,16]) -> f32[4,16,8] {
  %c.0 = f32[4,16,8]{2,1,0} transpose(%p), dimensions={0,2,1}
  ROOT %s = f32[4,16,8]{2,1,0} add(%c.0, %c.0)
}

%wrapped_transpose_computation (p: f32[4,8,16]) -> f32[4,16,8] {
  %p = f32[4,8,16]{2,1,0} parameter(0)
  ROOT %c.4 = f32[4,16,8]{2,1,0} transpose(%p), dimensions={0,2,1}
}

%body (p: f32[8]) -> f32[8] {
  %c.1 = bf16[1,16,8]{1,2,0} copy(%p)
  %c.2 = bf16[16,9]{1,0} copy(%p)
  %wrapped_transpose = f32[4,16,8]{2,1,0} fusion(%p), kind=kInput, calls=%wrapped_transpose_computation
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %f = f32[4,16,8]{2,1,0} fusion(%x), kind=kLoop, calls=%fused
  %w = f32[8] while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  %c.3 = f32[4,8,16]{1,2,0} copy(%x)
}
"""


def test_copies_of_arrays_with_the_shapes_of_parameters():
  assert copies(COPIES, [(4, 8, 16), (8, 16)]) == [
      ("bf16[1,16,8]", 6), ("f32[4,16,8]", 6), ("f32[4,8,16]", 1)]
  assert copies(COPIES, [(3, 5)]) == []
  assert size_of("bf16[1,16,8]") == 256


BETWEEN_SLICES = """HloModule step

ENTRY %main (p: f32[128,8,128]) -> f32[] {
  %send.21 = (f32[128,8,128]{2,1,0:T(8,128)}, u32[], token[]) send(%p, %after-all.21), channel_id=2, \
is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",\
_xla_host_transfer_rendezvous="all-reduce.52_0",_xla_megascale_reduce_operation="SUM",\
_xla_megascale_target="{1,2}x{0:15}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %send-done.21 = token[] send-done(%send.21), channel_id=2, is_host_transfer=true
  %send.1 = (f32[64]{0}, u32[], token[]) send(%p, %after-all.1), channel_id=3, is_host_transfer=true
}
"""


def test_what_hosts_carry_between_slices_counts():
  """Two lines of a step that libtpu 0.0.42 compiled for two slices, and a transfer to the host that is none."""
  (one,) = collectives(BETWEEN_SLICES, mesh_lib.make_mesh(dict(slice=2, data=4)))
  assert (one.kind, one.axes, one.group_size, one.bytes, one.traffic) == (
      "all-reduce", ("slice",), 2, 4 * 128 * 8 * 128, 4 * 128 * 8 * 128)


@pytest.mark.parametrize("operand", ["%p", "f32[16,16]{1,0} %p"])
def test_what_enters_a_reduce_scatter_counts_whether_the_text_says_its_shape_or_not(operand):
  text = f"""HloModule m
ENTRY %main (p: f32[16,16]) -> f32[2,16] {{
  %p = f32[16,16]{{1,0}} parameter(0)
  ROOT %r = f32[2,16]{{1,0}} reduce-scatter({operand}), replica_groups={{{{0,1,2,3,4,5,6,7}}}}, to_apply=%add
}}
"""
  (found,) = collectives(text, mesh_lib.make_mesh(MESH))
  assert (found.kind, found.bytes, found.group_size, found.axes) == (
      "reduce-scatter", 1024, 8, ("data", "fsdp", "tensor"))
