"""The time that a compiled schedule takes: closed forms of small ones, a cycle a second."""

import pytest

from tests.trainer.test_collectives import MESH
from trainer import mesh as mesh_lib
from trainer import timeline

SPEEDS = timeline.Speeds(cycles=1.0, flops=10.0, memory=100.0)
CALLED = """%sent (p: f32[8,16]) -> f32[4,16] {
  ROOT %rs = f32[4,16]{1,0} reduce-scatter(%p), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}
}, execution_thread="sparsecore"
"""
BODY = """
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
LINES
}
"""


def cycles(name, count, operands="%x", more=""):
  return (f'  %{name} = f32[8,16]{{1,0}} fusion({operands}), kind=kLoop, calls=%nothing{more}, '
          f'backend_config={{"window_config":{{"estimated_cycles":"{count}"}}}}')


def gather(name, of="%x", axis="[4,2]<=[8]"):
  return f"  %{name} = (f32[4], f32[8]) all-gather-start({of}), channel_id=7, replica_groups={axis}, dimensions={{0}}"


def done(name):
  return f"  %{name}.d = f32[8] all-gather-done(%{name})"


def walk(*lines, before=CALLED, seconds=lambda one: 10.0, **more):
  text = "HloModule step\n\n" + before + "\nENTRY %main (x: f32[8]) -> f32[8] {\n" + "\n".join(lines) + "\n}\n"
  return timeline.walk(text, mesh_lib.make_mesh(MESH), SPEEDS, seconds, **more)


def test_what_is_computed_meanwhile_is_not_waited_for():
  found = walk(cycles("a", 3), gather("g"), cycles("b", 4), done("g"), cycles("c", 5))
  assert (found.computes, found.waits, found.seconds) == (12, 10 - 4, 18)
  assert found.transfers == {("all-gather", ("tensor",)): (10, 6)}
  assert walk(gather("g"), cycles("b", 40), done("g")).waits == 0


def test_transfers_over_the_same_links_take_turns_and_others_do_not():
  one = walk(gather("g"), gather("h"), cycles("b", 4), done("g"), done("h"))
  assert one.waits == 20 - 4
  two = walk(gather("g"), gather("h", axis="[2,4]<=[2,2,2]T(1,0,2)"), cycles("b", 4), done("g"), done("h"))
  assert two.waits == 10 - 4 and len(two.transfers) == 2


def test_what_does_not_run_beside_others_is_waited_for_whole():
  found = walk(cycles("a", 3), "  %r = f32[8] all-reduce(%a), channel_id=3, replica_groups=[1,8]<=[8]", cycles("b", 4))
  assert (found.computes, found.waits) == (7, 10)
  # In a fusion: a product may hide it, as long as it takes itself.
  before = CALLED.replace("%sent", "%nothing").replace(', execution_thread="sparsecore"', "")
  found = walk(cycles("a", 3), before=before)
  assert (found.computes, found.waits) == (3, 7)


def test_a_gather_in_several_fusions_is_one():
  before = "\n".join(f"""%part.{i} (p: f32[4]) -> f32[8] {{
  ROOT %g.{i} = f32[8] all-gather(%p), channel_id=7, replica_groups=[4,2]<=[8], dimensions={{0}}
}}
""" for i in range(3))
  lines = [cycles(f"f{i}", 2).replace("%nothing", f"%part.{i}") for i in range(3)]
  found = walk(*lines, cycles("after", 1), before=before)
  assert found.transfers == {("all-gather", ("tensor",)): (10, 10 - 6)} and found.computes == 7


@pytest.mark.parametrize("update", [False, True])
def test_what_sparse_cores_send_begins_when_there_is_something(update):
  """Their program may be begun before."""
  operands = "" if update else "%x"
  start = f'  %s = ((), f32[4]) call-start({operands}), async_execution_thread="sparsecore", to_apply=%sent'
  lines = [start, cycles("a", 3)]
  if update:
    lines += ["  %s.u = ((f32[8,16]), f32[4]) call-update(%s, %a)", cycles("b", 2)]
  found = walk(*lines, f"  %s.d = f32[4] call-done(%s{'.u' if update else ''})")
  assert found.transfers == {("reduce-scatter", ("tensor",)): (10, 10 - (2 if update else 3))}


@pytest.mark.parametrize("how, times", [(', backend_config={"known_trip_count":{"n":"5"}}', 5),
                                        (', metadata={op_name="jit(f)/runs_at_most_3/while"}', 3),
                                        (', metadata={op_name="jit(f)/jvp(runs_at_most_3)/while"}', 3),
                                        (', metadata={op_name="jit(f)/runs_at_most_3/scan/while"}', 1), ("", 1)])
def test_loops_count_as_often_as_they_run(how, times):
  before = BODY.replace("LINES", "\n".join((gather("g"), cycles("b", 4), done("g"))))
  found = walk(gather("h", axis="[1,8]<=[8]"), f"  %w = (s32[], f32[8]) while(%t), condition=%c, body=%body{how}",
               done("h"), before=before)
  # What began before the loop goes on meanwhile.
  assert (found.computes, found.waits) == (4 * times, 6 * times)
  assert found.transfers["all-gather", ("tensor",)] == (10 * times, 6 * times)


def test_branches_count_as_the_longest():
  before = "".join(BODY.replace("body", name).replace("LINES", cycles(name, count))
                   for name, count in (("one", 3), ("two", 8)))
  assert walk("  %c = f32[8] conditional(%p, %x, %x), branch_computations={%one, %two}", before=before).computes == 8


def test_kernels_take_what_they_say_or_else_their_bytes():
  kernel = '  %k = f32[8,16]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"'
  layouts = ", operand_layout_constraints={f32[8,16]{1,0}}, metadata={}"
  cost = ', backend_config={"cost_estimate":{"flops":"%d","transcendentals":"0","bytes_accessed":"%d"}}'
  known = cycles("a", 1)
  assert walk(known, kernel + cost % (200, 100)).computes == 1 + 20
  assert walk(known, kernel + cost % (20, 900)).computes == 1 + 9
  assert walk(known, kernel + layouts).computes == pytest.approx(1 + 2 * 512 / 100)
  assert walk(known, kernel.replace("tpu_custom_call", "AllocateBuffer") + layouts).computes == 1
  assert walk(known, cycles("b", 2**63 - 1)).computes == 1


def test_without_cycles_nothing_is_known():
  assert walk(gather("g"), done("g")) is None


@pytest.mark.parametrize("dq, total", [(True, 2 * 2 + 3 + 4), (False, 2 * 2 + 5)])
def test_attention_takes_what_the_model_says(dq, total):
  """Two layers, forward, forward again and backward: seconds of all layers, whatever the parts."""
  kernel = '  %splash_mha_{}_segmented.{} = f32[8]{{0}} custom-call(%x), custom_call_target="tpu_custom_call"'
  before = BODY.replace("LINES", "\n".join(
      kernel.format(name, i) for i, name in enumerate(("fwd", "fwd", "dkv", *(("dq",) if dq else ())))))
  loop = '  %w = f32[8] while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"2"}}'
  assert walk(cycles("a", 1), loop, before=before, attention=100.0).computes == pytest.approx(1 + 100 * total)
