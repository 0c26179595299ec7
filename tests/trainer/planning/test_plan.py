"""--mode=plan against what is really allocated, compiled and sent, and against closed forms."""

import functools
import importlib.util
import itertools
import json
import math
import re
import types
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from models.attention import blocked
from tests import tiny
from tests.models.attention.common import attention
from trainer import program as program_lib
from trainer.config import checks as config_checks
from trainer.config import strategy
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError
from trainer.planning import collectives
from trainer.planning import compile as plan_compile
from trainer.planning import estimate as plan_estimate
from trainer.planning import gpu as plan_gpu
from trainer.planning import network as plan_network
from trainer.planning import plan as plan_lib
from trainer.planning import search as plan_search
from trainer.planning import trace as plan_trace
from trainer.strategies import chunked_loss
from trainer.telemetry import hardware

pytestmark = pytest.mark.devices(8)

NOWHERE = Path("/no/such/corpus")  # a plan reads no data
LAYOUTS = (dict(data=1, fsdp=8), dict(data=2, fsdp=2, tensor=2))


def resolved(platform="cpu", **changed):
  """A config large enough that a step is more than its overhead, resolved."""
  model = dict(num_layers=3, hidden_size=64, intermediate_size=128, num_heads=4) | changed.pop("model", {})
  config = tiny.config(NOWHERE, **{"seq_len": 64, "batch_size": 16} | changed)
  config.model.update(model)
  config, _ = program_lib.resolve(config)
  program_lib.settle(config, platform)
  return config


# Programs that were traced, by all of a config that matters for them.
TRACED = {}


def planner_of(config, topology="cpu:8", usable=None):
  """A planner that shares what it traces with those of the other tests; `usable`: bytes of each device."""
  topology = hardware.topology(topology, config.plan.slices)
  if usable is not None:
    topology = topology._replace(chip=topology.chip._replace(usable=usable))
  planner = plan_estimate.Planner(config, 258, topology, ["main"])
  same = {key: value for key, value in config.items() if key not in ("plan", "mesh")}
  planner._programs = TRACED.setdefault(f"{topology.devices} {same}", {})
  return planner


@functools.cache
def compiled_on(layout, experts=False):
  """(config, planner, compiled program, mesh) of the unrolled model on 8 host devices."""
  moe = dict(moe=dict(num_experts=8, experts_per_token=2, expert_size=32, dense_layers=1)) if experts else {}
  config = resolved(model=dict(scan_layers=False, **moe), mesh=dict(zip(mesh_lib.AXES, layout, strict=True)))
  planner, mesh = planner_of(config), mesh_lib.make_mesh(config.mesh)
  model = program_lib.make_model(config, 258)
  program = program_lib.make_program(config, model, program_lib.planned_optimizer(config, model), mesh, ["main"])
  batch = program_lib.abstract_batch(config, model, config.batch_size, sharding=program.batch_sharding)
  with mesh_lib.activation_rules(mesh):
    return config, planner, program.update_fn.lower(program.abstract_state, batch).compile(), mesh


def layout_of(sizes):
  return tuple(sizes.get(axis, 1) for axis in mesh_lib.AXES)


# ---------------------------------------------------------------- against reality


@pytest.mark.parametrize("sizes", LAYOUTS, ids=["fsdp", "mixed"])
@pytest.mark.parametrize("changed", [{}, dict(optimizer="muon")], ids=["adamw", "muon"])
def test_bytes_of_the_state_are_those_that_a_device_holds(sizes, changed):
  config = resolved(mesh=sizes)
  if changed:
    config.optimizer.name = changed["optimizer"]
    config.optimizer.ema_decay = 0.9
  estimate = planner_of(config).estimate(config.mesh)
  mesh, model = mesh_lib.make_mesh(config.mesh), program_lib.make_model(config, 258)
  program = program_lib.make_program(config, model, program_lib.planned_optimizer(config, model), mesh, ["main"])
  state = jax.tree.map(lambda leaf, s: jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), s),
                       program.abstract_state, program.state_sharding)

  def held(part):
    return sum(shard.data.nbytes for leaf in jax.tree.leaves(part) for shard in leaf.addressable_shards
               if shard.device == jax.devices()[0])

  assert estimate.memory["parameters"] == held(state["params"])
  assert estimate.memory["optimizer"] == held(state["opt"])
  assert estimate.memory.get("ema", 0) == held(state.get("ema", {}))


@pytest.mark.parametrize("sizes", LAYOUTS, ids=["fsdp", "mixed"])
def test_memory_products_and_traffic_are_close_to_those_of_the_compiled_step(sizes):
  config, planner, compiled, mesh = compiled_on(layout_of(sizes))
  estimate, memory = planner.estimate(config.mesh), compiled.memory_analysis()
  counters = 3 * 4  # step, nonfinite, nonfinite_in_a_row
  known = estimate.memory["parameters"] + estimate.memory["optimizer"] + estimate.memory["batch"] + counters
  assert memory.argument_size_in_bytes == pytest.approx(known, abs=64)
  total = (memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
           - memory.alias_size_in_bytes)
  assert 1 / 1.5 < estimate.total / total < 1.5

  # The compiler counts elementwise operations too, and each device's own.
  flops = compiled.cost_analysis()["flops"] * mesh.size
  assert 0.75 < estimate.hardware_flops / flops < 1.05

  sent = collectives.summary(collectives.collectives(compiled.as_text(), mesh))
  gathered = sum(size for (kind, axes), (_, size, _) in sent.items() if kind == "all-gather" and axes == ("fsdp",))
  planned = sum(x.bytes for x in estimate.transfers if x.kind == "all-gather" and x.axes == ("fsdp",))
  assert 1 / 2 < planned / gathered < 2


@pytest.mark.parametrize("sizes", [dict(expert=8), dict(expert=4, tensor=2)], ids=["alone", "with tensor"])
def test_tokens_travel_to_experts_as_often_as_in_the_compiled_step(sizes):
  """In layers that have experts, of which the first is none; whole tokens, however experts' widths are split."""
  config, planner, compiled, mesh = compiled_on(layout_of(sizes), experts=True)
  sent = collectives.summary(collectives.collectives(compiled.as_text(), mesh))
  moved = sum(size for (kind, axes), (_, size, _) in sent.items() if kind == "all-to-all" and axes == ("expert",))
  planned = sum(x.bytes for x in planner.estimate(config.mesh).transfers if x.kind == "all-to-all")
  assert moved == pytest.approx(planned, rel=0.01)  # beside tokens there go the numbers of their experts


def test_tokens_travel_to_experts_whole_however_their_widths_are_split():
  """Where `tensor` has the place of `data`, a device has twice the tokens."""
  def back(sizes):
    config = resolved(model=dict(moe=dict(num_experts=8, experts_per_token=2, expert_size=32)),
                      mesh=dict(zip(mesh_lib.AXES, layout_of(sizes), strict=True)))
    return [x.bytes for x in planner_of(config).estimate(config.mesh).transfers if x.what == "experts' outputs back"]

  alone, = back(dict(data=2, expert=4))
  assert back(dict(expert=4, tensor=2)) == [2 * alone] and alone > 0


def test_the_command_compiles_in_a_process_of_its_own():
  config = resolved(mesh=dict(data=1, fsdp=2), batch_size=2, seq_len=32, model=dict(num_layers=1, hidden_size=16))
  topology = hardware.topology("cpu:2")
  found = plan_compile.compile_step(config_checks.to_json(config), 258, ["main"], topology)
  estimate = plan_estimate.Planner(config, 258, topology, ["main"]).estimate(config.mesh)
  assert found.failure == "" and found.temporaries > 0 and found.flops > 0
  known = sum(estimate.memory[kind] for kind in ("parameters", "optimizer", "batch"))
  assert found.arguments == pytest.approx(known, abs=64)
  assert found.total == found.arguments + found.outputs + found.temporaries - found.aliased
  assert any(axes == ("fsdp",) for _, axes, *_ in found.collectives)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler, libtpu")
def test_a_step_compiles_for_tpus_that_are_not_here_or_is_said_not_to_fit():
  config = resolved("tpu", mesh=dict(data=1, fsdp=4), batch_size=4, model=dict(hidden_size=512,
                                                                               intermediate_size=1024))
  topology = hardware.topology("v5e:2x2")
  found = plan_compile.compile_step(config_checks.to_json(config), 258, ["main"], topology)
  estimate = plan_estimate.Planner(config, 258, topology, ["main"]).estimate(config.mesh)
  known = sum(estimate.memory[kind] for kind in ("parameters", "optimizer", "batch"))
  assert found.failure == "" and known <= found.arguments < 1.1 * known  # small arrays are padded
  assert {kind for kind, *_ in found.collectives} >= {"all-gather"} and found.copied >= 0
  huge = resolved("tpu", mesh=dict(data=4), batch_size=4, model=dict(num_layers=1, hidden_size=32768,
                                                                    intermediate_size=65536))
  refused = plan_compile.compile_step(config_checks.to_json(huge), 258, ["main"], topology)
  assert refused.too_large and "15.75G" in refused.failure
  assert not plan_estimate.Planner(huge, 258, topology, ["main"]).estimate(huge.mesh).fits


@pytest.mark.skipif(plan_gpu.plugin() is None, reason="needs XLA for GPUs, JAX's CUDA plugin")
@pytest.mark.parametrize(("name", "sizes"), [("h100:4", dict(data=1, fsdp=4)), ("h100:2x2", dict(fsdp=2, tensor=2))])
def test_a_step_compiles_for_gpus_that_are_not_here(name, sizes):
  config = resolved("gpu", mesh={"data": 1, **sizes}, batch_size=4, model=dict(hidden_size=256, intermediate_size=512))
  topology = hardware.topology(name)
  assert plan_compile.refusal(topology) == ""
  found = plan_compile.compile_step(config_checks.to_json(config), 258, ["main"], topology)
  estimate = plan_estimate.Planner(config, 258, topology, ["main"]).estimate(config.mesh)
  known = sum(estimate.memory[kind] for kind in ("parameters", "optimizer", "batch"))
  assert found.failure == "" and known <= found.arguments < 1.1 * known
  assert found.temporaries > 0 and found.aliased == pytest.approx(found.outputs, rel=0.01)
  moved = {(kind, axes): sent for kind, axes, _, sent, _ in found.collectives}
  gathered = sum(sent for (kind, axes), sent in moved.items() if kind == "all-gather" and axes == ("fsdp",))
  planned = sum(x.bytes for x in estimate.transfers if x.kind == "all-gather" and x.axes == ("fsdp",))
  assert 1 / 2 < planned / gathered < 2
  assert {axis for _, axes in moved for axis in axes} == {axis for axis in sizes if sizes[axis] > 1}


def test_gpus_are_described_by_their_figures(monkeypatch):
  for kind, chip in hardware.CHIPS.items():
    if chip.platform != "gpu":
      assert chip.gpu is None
      continue
    text = plan_gpu.target(chip)
    said = dict(re.findall(r"(\w+): ([\d.]+)", text))
    assert text.count("{") == text.count("}") and f'"{chip.kinds[0]}"' in text
    assert (float(said["device_memory_size"]), float(said["memory_bandwidth"])) == (chip.memory, chip.memory_bandwidth)
    # Peaks of data sheets are for the clock under load, which is lower; tensor cores multiply 64 to 1024 pairs a clock
    # and unit of float32: what the figures give must be of that order.
    per_clock = chip.peak / (chip.gpu.multiprocessors * chip.gpu.clock * 1e9)
    assert 900 < per_clock < 8200, kind
    assert int(said["shared_memory_per_block_optin"]) == int(said["shared_memory_per_core"]) - 1024
    assert ("ACCELERATED" in text) == (chip.gpu.capability >= (9, 0))
  monkeypatch.setattr(plan_gpu, "plugin", lambda: None)
  assert "pip install -e '.[cuda]'" in plan_compile.refusal(hardware.topology("h100:8"))
  assert "version" not in plan_gpu.target(hardware.CHIPS["h100"])  # of packages that are not here


# ---------------------------------------------------------------- closed forms


def test_products_are_counted_in_loops_and_without_those_nobody_needs():
  def f(x, w):
    dead = w @ w
    y, _ = jax.lax.scan(lambda y, _: (jnp.tanh(y @ w), None), x, length=5)
    del dead
    return jnp.sum(y)

  x, w = jax.ShapeDtypeStruct((3, 4), jnp.float32), jax.ShapeDtypeStruct((4, 4), jnp.float32)
  forward = 5 * 2 * 3 * 4 * 4
  assert plan_trace._flops(jax.make_jaxpr(f)(x, w)) == forward
  # The gradient of each product is two more; that of x alone is not asked for, but in a loop it is made.
  assert plan_trace._flops(jax.make_jaxpr(jax.grad(f, 1))(x, w)) == 3 * forward


def test_attention_counts_as_much_in_loops_over_tiles_as_unrolled(monkeypatch):
  def counted(**options):
    x, ids = jax.ShapeDtypeStruct((4, 64, 2, 8), jnp.float32), jnp.ones((4, 64), jnp.int32)

    def loss(q, k, v):
      return attention(q, k, v, segment_ids=ids, scale=1.0, block=16, **options).sum()

    return plan_trace._flops(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, x, x))

  monkeypatch.setattr(blocked, "MAX_UNROLLED", 1)
  monkeypatch.setattr(blocked, "SPANS_OF_TILE", 1)
  in_loops = counted(), counted(window=17)
  monkeypatch.setattr(blocked, "MAX_UNROLLED", 1000)
  assert in_loops == pytest.approx((counted(), counted(window=17)), rel=1e-5)
  assert in_loops[1] < 0.75 * in_loops[0]


def test_logits_that_are_made_a_part_of_the_tokens_at_a_time_count_as_those_made_at_once():
  def losses_of(hidden_nxD, kernel_DxV, tokens):
    return jnp.sum(jnp.square(hidden_nxD @ kernel_DxV), -1) * tokens, {}

  def loss(chunks, hidden_NxD, kernel_DxV):
    ones = jnp.ones(64)
    return chunked_loss.sum_over_tokens(losses_of, chunks, (), hidden_NxD, kernel_DxV, ones, ones > 0)[0]

  shapes = jax.ShapeDtypeStruct((64, 8), jnp.float32), jax.ShapeDtypeStruct((8, 32), jnp.float32)
  for chunks in (1, 4):
    gradient = jax.grad(functools.partial(loss, chunks), (0, 1))
    assert plan_trace._flops(jax.make_jaxpr(gradient)(*shapes)) == 3 * 2 * 64 * 8 * 32


def test_remat_full_keeps_what_enters_each_layer_and_multiplies_it_again():
  costs = {}
  for layers in (2, 4):
    for remat in ("none", "full"):
      config = resolved(remat=remat, model=dict(num_layers=layers))
      costs[layers, remat] = planner_of(config).traced()[1]
  one_layer = 64 * 64 * 4  # T × D numbers of 4 bytes
  assert costs[4, "full"].kept - costs[2, "full"].kept == 2 * one_layer
  assert costs[4, "none"].kept > 3 * costs[4, "full"].kept
  # Of a layer's three products forward and backward one is repeated, but not the last one, whose result nobody needs.
  again, whole = (costs[4, "full"].flops - costs[2, "full"].flops, costs[4, "none"].flops - costs[2, "none"].flops)
  assert 1.15 < again / whole <= 4 / 3


def test_embeddings_that_micro_batches_are_told_of_cost_a_forward_pass_more():
  """GradCache: 4 passes where one batch takes 3, forward once and backward twice; texts compared are few products."""
  costs = []
  for accum in (1, 2):
    config = resolved(batch_size=16, grad_accum_steps=accum, remat="none", strategy=strategy("contrastive"),
                      model=dict(head="embedding", num_layers=1))
    costs.append(planner_of(config).traced()[1].flops)
  assert costs[1] / costs[0] == pytest.approx(4 / 3, rel=0.02)


def test_model_flops_are_those_that_mfu_is_made_of():
  config = resolved()
  planner = planner_of(config, "v5e:2x4")
  estimate = planner.estimate(config.mesh)
  assert estimate.tokens == 16 * 64
  assert estimate.model_flops == planner.traced()[0].model.flops_per_token(64) * estimate.tokens
  step = estimate.seconds["step"]
  assert estimate.mfu == pytest.approx(estimate.model_flops / (step * 8 * 197e12))
  t = estimate.seconds
  assert step == max(t["compute"], t["memory"], t["hidden"]) + t["exposed"]


def test_parameters_are_gathered_twice_and_gradients_summed_once_for_each_micro_batch():
  config = resolved("tpu", mesh=dict(data=1, fsdp=8), grad_accum_steps=2)
  planner = planner_of(config, "v5e:2x4")
  estimate = planner.estimate(config.mesh)
  params = planner.traced()[0].abstract_state["params"]
  placed = plan_estimate.Placed(config, planner.traced()[0], planner.mesh(config.mesh))
  split = sum(leaf.size for leaf, part in placed.parts.values() if part < leaf.size)
  whole = sum(leaf.size for leaf, part in placed.parts.values() if part == leaf.size)
  by_kind = {transfer.kind: transfer.bytes for transfer in estimate.transfers}
  assert split > 10 * whole and len(jax.tree.leaves(params)) == len(placed.parts)
  bfloat16, float32 = 2, 4
  assert by_kind["all-gather"] == 2 * 2 * bfloat16 * split * 7 / 8
  assert by_kind["reduce-scatter"] == 2 * float32 * split * 7 / 8
  assert by_kind["all-reduce"] == 2 * 2 * float32 * whole * 7 / 8


def test_each_axis_moves_what_belongs_to_it():
  config = resolved("tpu", seq_len=128, mesh=dict(data=1, tensor=2, context=2, fsdp=2))
  moved = [x for x in planner_of(config, "v5e:2x4").estimate(config.mesh).transfers if not x.hidden]
  assert {x.axes for x in moved if x.what != "gradients"} == {("tensor",), ("context",)}
  # What is scattered is waited for where there are no SparseCores.
  assert {x.axes for x in moved if x.what == "gradients"} == {("fsdp", "context")}
  assert all(x.hidden for x in planner_of(config, "v5p:2x2x2").estimate(config.mesh).transfers if x.what == "gradients")
  moe = resolved("tpu", mesh=dict(data=1, expert=8),
                 model=dict(moe=dict(num_experts=8, experts_per_token=2, expert_size=32)))
  estimate = planner_of(moe, "v5e:2x4").estimate(moe.mesh)
  tokens = {transfer.hidden: transfer.bytes for transfer in estimate.transfers if transfer.kind == "all-to-all"}
  # There, and there again with gradients, while others are computed, in 2 rounds and an empty one; back, and the
  # gradients back. In 3 layers: 2 rows of 64 tokens, 2 experts each, 64 bfloat16 numbers.
  once = 3 * (2 * 64) * 2 * 64 * 2 * 7 / 8
  assert tokens == {True: 3 * once * 3 / 2, False: 2 * once}
  experts = [x for x in estimate.transfers if x.kind == "all-gather" and "expert" in x.axes]
  assert experts and not any("context" in x.axes for x in experts)  # all but the experts themselves


@pytest.mark.parametrize(("topology", "sizes", "expected"), [
    # A whole dimension of a v5e slice is a ring, both ways; all of it are two of them.
    ("v5e:16x16", dict(fsdp=16, tensor=16), dict(fsdp=("ICI", 100e9), tensor=("ICI", 100e9))),
    ("v5e:16x16", dict(fsdp=256), dict(fsdp=("ICI", 200e9))),
    ("v5e:16x16", dict(fsdp=64, tensor=4), dict(tensor=("ICI", 50e9))),
    ("v5p:4x4x8", dict(fsdp=32, tensor=4), dict(fsdp=("ICI", 400e9), tensor=("ICI", 200e9))),
    ("h100:8x4", dict(fsdp=4, tensor=8), dict(fsdp=("InfiniBand", 50e9), tensor=("NVLink", 450e9))),
    ("h100:8x4", dict(fsdp=32), dict(fsdp=("InfiniBand", 400e9))),
    ("h100:8x4", dict(data=4, fsdp=8), dict(data=("InfiniBand", 50e9), fsdp=("NVLink", 450e9)))])
def test_links_of_axes_follow_from_the_topology(topology, sizes, expected):
  found = plan_network.links(hardware.topology(topology), {axis: sizes.get(axis, 1) for axis in mesh_lib.AXES})
  assert {axis: (found[axis].name, found[axis].bandwidth) for axis in expected} == expected


@pytest.mark.parametrize(("expert", "seconds"), [(8, 1 / 450), (16, 8 / 15 / 50), (32, 24 / 31 / 50)])
def test_what_each_gpu_sends_each_leaves_a_node_through_its_own_port(expert, seconds):
  """Of 15 others, 8 are in the other node. The parts of one array come in through the ports of a whole node."""
  topology = hardware.topology("h100:8x4")
  by_axis = plan_network.links(topology, {axis: expert if axis == "expert" else 1 for axis in mesh_lib.AXES})
  assert plan_network.duration(topology, by_axis, "all-to-all", ("expert",), 1e9, 0.5) == pytest.approx(seconds / 0.5)
  whole = plan_network.duration(topology, by_axis, "all-gather", ("expert",), 1e9, 1.0)
  assert whole == pytest.approx(1 / 450 if expert == 8 else 1 / 400)


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_experts_multiply_the_tokens_that_chose_them_however_many_rows_a_device_has(rows):
  """As an MLP as wide as two experts: blocks of tokens are padded by how many an expert gets of all devices, which a
  trace of one device's does not show."""
  shape = dict(hidden_size=32, num_layers=2)
  dense, moe = (planner_of(resolved("gpu", batch_size=8 * rows, model=shape | more), "h100:8").traced()[1].flops
                for more in (dict(intermediate_size=2 * 256), dict(moe=dict(num_experts=16, experts_per_token=2,
                                                                           expert_size=256))))
  router = 2 * 4 * 2 * 64 * 32 * 16  # layers; forward, again, backward twice; a product of 64 tokens
  assert moe == pytest.approx(dense + router, rel=1e-6)


def test_slices_talk_over_the_slow_network():
  config = resolved("tpu", mesh=dict(slice=2, data=1, fsdp=4), plan=dict(slices=2))
  transfers = planner_of(config, "v5e:2x2").estimate(config.mesh).transfers
  between = [transfer for transfer in transfers if transfer.axes == ("slice",)]
  assert [(t.kind, t.what, t.link) for t in between] == [("all-reduce", "gradients", "DCN")]
  with pytest.raises(ConfigError, match=r"--config.mesh.slice=2"):
    planner_of(resolved("tpu", plan=dict(slices=2)), "v5e:2x2").estimate(dict(data=8))


# ---------------------------------------------------------------- what fits, what is better


def small_planner(config, gib):
  return planner_of(config, "v5e:2x4", usable=gib * 2**30)


def test_the_most_rows_fit_and_one_more_does_not():
  most = small_planner(resolved("tpu"), 0.01).estimate(dict(data=8)).most_rows
  assert most > 2
  for rows, fits in ((most, True), (most + 1, False)):
    estimate = small_planner(resolved("tpu", batch_size=8 * rows), 0.01).estimate(dict(data=8))
    assert (estimate.rows, estimate.fits) == (rows, fits)


def test_advice_is_what_was_estimated():
  config = resolved("tpu", batch_size=64, mesh=dict(data=8))
  planner = small_planner(config, 0.004)
  now = planner.estimate(config.mesh)
  assert not now.fits
  by_remat, by_mesh = plan_search.remats(planner, config.mesh), plan_search.meshes(planner)
  lines = plan_search.advice(planner, now, by_remat, by_mesh)
  assert lines[0].startswith("It does not fit")
  (accum,) = [line.rpartition("=")[2] for line in lines if "grad_accum_steps" in line]
  config = resolved("tpu", batch_size=64, mesh=dict(data=8), grad_accum_steps=int(accum))
  assert small_planner(config, 0.004).estimate(config.mesh).fits


class Estimated:
  """Of a step of so many seconds on some mesh, with room for `most_rows` on each of 8 devices."""

  def __init__(self, step, remat="none", data=8, rows=2, most_rows=2):
    self.seconds, self.remat, self.rows, self.most_rows, self.fits = {"step": step}, remat, rows, most_rows, True
    self.sizes = dict(slice=1, data=data, fsdp=8 // data, expert=1, context=1, tensor=1)
    self.total = self.usable = 2**30


@pytest.mark.parametrize("step, expected", [
    (0.97, ["Faster, 0.97 s a step, 1.00 GiB: --config.mesh.data=4 --config.mesh.fsdp=2"]),
    (0.99, ["No other mesh or remat is faster by 2% of a step or more, within which estimates are no guide; the "
            "fastest of them is by 1.0%."]),
    (1.5, ["No other mesh or remat is faster by 2% of a step or more, within which estimates are no guide."]),
])
def test_what_is_not_clearly_faster_is_said_with_the_bound(step, expected):
  planner = types.SimpleNamespace(config=resolved("tpu", batch_size=16, mesh=dict(data=8)))
  now = Estimated(1.0)
  assert plan_search.advice(planner, now, [now, Estimated(1.2, "full")], [Estimated(step, data=4), now]) == expected


@pytest.mark.parametrize("accum, most_rows, expected", [
    # 64 rows in 4 micro-batches of 16, 2 on each device; 4 would fit: 2 micro-batches of 32.
    (4, 4, "The same batch in fewer micro-batches: --config.grad_accum_steps=2"),
    # 3 on a device are 24 at a time: 64 rows need three of them, but there are four or two.
    (4, 3, "A larger batch is another training"),
    (1, 16, "if that is wanted: --config.batch_size=128"),
])
def test_rows_that_fit_are_first_the_same_batch(accum, most_rows, expected):
  config = resolved("tpu", batch_size=64, grad_accum_steps=accum, mesh=dict(data=8))
  now = Estimated(1.0, rows=64 // accum // 8, most_rows=most_rows)
  assert expected in plan_search.advice(types.SimpleNamespace(config=config), now, [], [now])[0]


def test_other_meshes_are_ranked_and_use_all_devices():
  config = resolved("tpu", batch_size=16, mesh=dict(data=-1))
  found = plan_search.meshes(planner_of(config, "v5e:2x4"))
  assert all(math.prod(estimate.sizes.values()) == 8 for estimate in found)
  assert all(estimate.fits for estimate in found)
  times = [estimate.seconds["step"] for estimate in found]  # some 50 µs, and up to three times that
  assert all(one <= 1.01 * other for one, other in itertools.pairwise(times)), times
  assert max(times) > 1.1 * min(times) and len(found) == plan_search.SHOWN
  typed = plan_search.flags(dict(slice=1, data=1, fsdp=4, expert=1, context=1, tensor=2), "full")
  assert typed == "--config.mesh.data=1 --config.mesh.fsdp=4 --config.mesh.tensor=2 --config.remat=full"


# ---------------------------------------------------------------- the command


def test_the_command_needs_no_data_and_says_that_it_estimates(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(plan_gpu, "plugin", lambda: None)
  config = tiny.config(NOWHERE, plan=dict(topology="h100:8x2"), batch_size=16)
  page = plan_lib.plan(config, tmp_path)
  text = capsys.readouterr().out
  for words in ("16 × h100", "An estimate, not compiled: XLA for GPUs is not installed; pip install -e '.[cuda]'",
                "adamw: ", "MFU", "What to type", "XLA_PYTHON_CLIENT_MEM_FRACTION", "InfiniBand",
                "data=16 (as configured)"):
    assert words in text
  html = page.read_text()
  assert "a step on other meshes, predicted" in html and "Memory of each device" in html
  assert not (tmp_path / "config.json").exists()  # nothing was begun


def test_collectives_of_the_compiled_program_stand_beside_the_estimate(tmp_path, capsys, monkeypatch):
  compiled = plan_compile.Compiled(
      arguments=1e6, temporaries=1e6, seconds=1.0,
      collectives=(("all-gather", ("fsdp",), 7, 2e6, 1e6), ("all-reduce", ("data", "fsdp"), 1, 1e6, 0.0)))
  monkeypatch.setattr(plan_compile, "refusal", lambda topology: "")
  monkeypatch.setattr(plan_compile, "compile_step", lambda *_: compiled)
  plan_lib.plan(tiny.config(NOWHERE, plan=dict(topology="v5e:2x4"), batch_size=16), tmp_path)
  text = capsys.readouterr().out
  for words in ("all, compiled +1.91 MiB of", "all-gather +fsdp +7 +1.91 MiB +50%", r"all-reduce +data\+fsdp +1 +976"):
    assert re.search(words, text), text


@pytest.mark.parametrize(("changed", "said"), [
    (dict(plan=dict(topology="v5x:4x4")), "do you mean v5"),
    (dict(plan=dict(topology="h100:8"), mesh=dict(data=1, fsdp=3)), r"makes 3 devices, but there are 8 \(h100\)"),
    (dict(plan=dict(topology="v4:2x2x1", compile="always")), "plan.compile is always"),
    (dict(plan=dict(topology="v5e:2x2", slices=2), batch_size=16, mesh=dict(slice=1, data=8)),
     "mesh.slice is 1, but the devices are in 2 slices.* Use --config.mesh.slice=2"),
    (dict(plan=dict(topology="cpu:8"), tokenizer=dict(type="hf")), "tokenizer.path is not set"),
    (dict(plan=dict(topology="h100:8", compile="yes")), "allowed: auto, always, never"),
    (dict(plan=dict(topology="h100:8", memory_gb=-1.0)), "plan.memory_gb must be above 0"),
    (dict(plan=dict(topology="h100:8x2")), "batch_size / grad_accum_steps is 8")])
def test_mistakes_are_told_as_training_would(changed, said, tmp_path):
  with pytest.raises(ConfigError, match=said):
    plan_lib.plan(tiny.config(NOWHERE, **changed), tmp_path)


def test_the_axis_of_slices_is_a_multiple_of_them():
  of = SimpleNamespace(devices=12, topology=SimpleNamespace(kind="v5e", slices=2))
  assert dict(plan_estimate.Planner.mesh(of, dict(slice=4, data=3)).shape)["slice"] == 4
  with pytest.raises(ConfigError, match="mesh.slice is 3, but the devices are in 2 slices.* --config.mesh.slice=2"):
    plan_estimate.Planner.mesh(of, dict(slice=3, data=4))


def test_figures_of_the_config_replace_those_of_the_table():
  config = resolved(plan=dict(topology="h100:8", memory_gb=40.0, tflops=500.0, network_bandwidth=25.0))
  chip = plan_lib.find_topology(config.plan).chip
  assert (chip.usable, chip.peak, chip.network_bandwidth, chip.link_bandwidth) == (40e9, 500e12, 25e9, 450e9)


def test_the_vocabulary_is_known_without_a_text(tmp_path):
  config = resolved()
  assert plan_lib.find_vocabulary(config, tmp_path)[0] == 258
  config.tokenizer.update(type="bpe", vocab_size=777)
  assert plan_lib.find_vocabulary(config, tmp_path)[0] == 777
  config.tokenizer.update(type="hf", path="/no/such/folder")
  with pytest.raises(ConfigError):
    plan_lib.find_vocabulary(config, tmp_path)
  config.model.vocab_size = 32_000
  count, where = plan_lib.find_vocabulary(config, tmp_path)
  assert count == 32_000 and "model.vocab_size" in where


def test_what_a_plan_is_asked_does_not_hinder_training():
  config = resolved(plan=dict(topology="v5e:16x16"))
  view = config_checks.View(config)
  for key in config_checks.flatten(config):
    if not key.startswith("plan."):
      functools.reduce(lambda node, part: node[part], key.split("."), view)
  config_checks.audit(view)
  assert config_checks.differences(json.loads(config_checks.to_json(resolved())), config) == []
