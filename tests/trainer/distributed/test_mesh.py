"""Meshes: clear refusals, and placement by rules. That they change no number: test_layouts.py."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from models.sharding import logical_axes
from tests import tiny
from trainer import state as state_lib
from trainer import tree
from trainer.config import defaults
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError
from trainer.optim import optimizer as optim

pytestmark = pytest.mark.devices(8)

MIXED = dict(data=2, fsdp=2, tensor=2)


def test_parameters_and_moments_are_really_split():
  """The parameter, its average, and two moments; of these in 8 bits the exponents of rows, too."""
  mesh = mesh_lib.make_mesh(MIXED)
  model, config = tiny.model(), defaults()
  config.precision.moments = "int8"
  optimizer = optim.make_optimizer(config.optimizer, config.schedule, model.abstract_params(), total_steps=10,
                                   to_steps=lambda cfg, prefix, default=None, where="": 0, precision=config.precision)
  abstract = jax.eval_shape(state_lib.make_fresh(optimizer, ema=True), model.abstract_params())
  params, notes = mesh_lib.param_shardings(abstract["params"], mesh)
  assert notes == []
  shardings = mesh_lib.state_shardings(abstract, abstract["params"], params, mesh)
  assert tree.flatten(params)["blocks/mlp/up/kernel"].spec == P(None, "fsdp", "tensor")
  followers = [(leaf.shape[-1], sharding.spec) for (path, leaf), sharding in zip(
      jax.tree_util.tree_flatten_with_path(abstract)[0], jax.tree.leaves(shardings), strict=True)
               if "'up'" in str(path) and "'kernel'" in str(path)]
  size = tree.flatten(abstract["params"])["blocks/mlp/up/kernel"].shape[-1]
  assert sorted(followers) == [(1, P(None, "fsdp"))] * 2 + [(size, P(None, "fsdp", "tensor"))] * 4


def test_the_mesh_must_fit_the_devices():
  with pytest.raises(ConfigError, match=r"there are 8 .*try --config.mesh.data=-1"):
    mesh_lib.make_mesh(dict(data=3, fsdp=1, tensor=1))
  with pytest.raises(ConfigError, match="data=-1, fsdp=3, which makes 3 devices or a multiple, but there are 8 .cpu"):
    mesh_lib.make_mesh(dict(data=-1, fsdp=3, tensor=1))
  with pytest.raises(ConfigError, match="mesh is 1 on every axis, which makes 1 devices, but there are 8 .*data=-1"):
    mesh_lib.make_mesh({})
  with pytest.raises(ConfigError, match="at most one is -1"):
    mesh_lib.make_mesh(dict(data=-1, fsdp=-1, tensor=1))
  whole = mesh_lib.make_mesh(dict(data=-1, fsdp=2, tensor=2))
  assert whole.shape == dict(slice=1, data=2, fsdp=2, expert=1, context=1, tensor=2)
  assert mesh_lib.describe(whole) == "data=2, fsdp=2, tensor=2"
  with pytest.raises(ConfigError, match="'tensors' .do you mean tensor"):
    mesh_lib.make_mesh(dict(tensors=8))


def test_the_last_devices_sample_and_the_others_train():
  config = defaults()
  config.rollout.update(num_prompts=2, devices=2, tensor=2)
  trains = mesh_lib.training_mesh(config)
  assert list(trains.devices.flat) == jax.devices()[:6] and trains.shape["data"] == 6
  samples = mesh_lib.sampling_mesh(config, trains)
  assert list(samples.devices.flat) == jax.devices()[6:] and samples.shape["tensor"] == 2


def test_the_batch_must_split_evenly():
  mesh = mesh_lib.make_mesh(MIXED)
  mesh_lib.check_batch(mesh, 8)
  with pytest.raises(ConfigError, match="multiple of 4"):
    mesh_lib.check_batch(mesh, 6)
  config = defaults()
  config.update(batch_size=16, grad_accum_steps=4)
  with pytest.raises(ConfigError, match="grad_accum_steps is 4, which cannot be split over 8"):
    mesh_lib.start(config)


def test_user_rules_come_first_and_are_checked():
  mesh = mesh_lib.make_mesh(MIXED)
  abstract = tiny.model().abstract_params()
  placed, _ = mesh_lib.param_shardings(abstract, mesh, (("mlp/up/kernel", (None, None, "data")),))
  assert tree.flatten(placed)["blocks/mlp/up/kernel"].spec == P(None, None, "data")
  for rule, message in [(("mpl/up", (None,)), "mlp"), (("mlp/up/kernel", (None, "model")), "unknown mesh axis 'model'"),
                        (("final_norm", (None, "data")), "has 2 dimensions"),
                        (("mlp/up/kernel", ("fsdp", ("data", "fsdp"))), "names the mesh axis 'fsdp' twice"),
                        (("blocks/attn_norm/scale", (("data", "fsdp"),)), "not divisible")]:
    with pytest.raises(ConfigError, match=message):
      mesh_lib.param_shardings(abstract, mesh, (rule,))


def test_a_dimension_that_does_not_divide_is_replicated_and_said():
  mesh = mesh_lib.make_mesh(dict(data=1, fsdp=1, tensor=8))
  placed, notes = mesh_lib.param_shardings({"blocks": {"attn": {"q": {"bias": jnp.zeros((2, 12))}}}}, mesh)
  assert placed["blocks"]["attn"]["q"]["bias"].spec == P(None, None)
  assert "blocks/attn/q/bias: dimension 1 of (2, 12) is not divisible by mesh axis 'tensor' (8)" in notes[0]
  mesh = mesh_lib.make_mesh(dict(fsdp=4, context=2))
  _, notes = mesh_lib.param_shardings({"unembed": {"kernel": jnp.zeros((3, 4))}}, mesh)
  assert notes == ["unembed/kernel: dimension 0 of (3, 4) is not divisible by mesh axis 'fsdp' (4), 'context' (2); "
                   "replicated over it"]


@pytest.mark.parametrize("sizes", [MIXED, dict(fsdp=2, expert=2, context=2)])
def test_place_batch_asks_only_for_rows_and_puts_them_in_order(sizes):
  """In either mesh four devices share the rows."""
  mesh = mesh_lib.make_mesh(sizes)
  whole = np.arange(32).reshape(8, 4)
  placed = mesh_lib.place_batch(lambda rows: {"x": whole[rows], "y": whole[rows, 0]}, 8, mesh_lib.batch_sharding(mesh))
  np.testing.assert_array_equal(placed["x"], whole)
  np.testing.assert_array_equal(placed["y"], whole[:, 0])
  assert {s.data.shape for s in placed["x"].addressable_shards} == {(2, 4)}


def test_large_parameters_that_no_rule_splits_are_named():
  mesh = mesh_lib.make_mesh(MIXED)
  abstract = {"own": {"table": jax.ShapeDtypeStruct((1024, 512), jnp.float32),
                      "small": jax.ShapeDtypeStruct((16, 16), jnp.float32)}}
  _, notes = mesh_lib.param_shardings(abstract, mesh)
  assert len(notes) == 1 and "own/table (1024, 512) is whole on every device: 2.0 MiB each" in notes[0]
  assert mesh_lib.param_shardings(abstract, mesh, (("own/table", ("fsdp",)),))[1] == []
  # Without axes that split parameters there is nothing to say.
  assert mesh_lib.param_shardings(abstract, mesh_lib.make_mesh(dict(data=8)))[1] == []


def test_parameters_are_split_over_the_axes_that_have_no_use_for_them():
  """ZeRO-3 over fsdp, expert and context; of experts over fsdp and context, beside the experts themselves."""
  mesh = mesh_lib.make_mesh(dict(data=1, fsdp=2, expert=2, context=2))
  model = tiny.model(moe=dict(num_experts=4, experts_per_token=2, expert_size=16))
  specs = {path: tuple(s.spec) for path, s in tree.flatten(mesh_lib.param_shardings(
      model.abstract_params(), mesh)[0]).items()}
  assert specs["blocks/attn/q/kernel"] == (None, ("fsdp", "expert", "context"), None)
  assert specs["blocks/moe/experts/up/kernel"] == (None, "expert", ("fsdp", "context"), None)
  assert specs["blocks/moe/experts/down/kernel"] == (None, "expert", None, ("fsdp", "context"))


def test_rules_of_activations_are_checked():
  mesh = mesh_lib.make_mesh(MIXED)
  placed = mesh_lib.make_placement(mesh, (("stream", "context"), ("batch", ("data",))))
  assert placed.spec(("batch", "stream"), (8, 8)) == P("data", None)
  with mesh_lib.activation_rules(mesh, (("stream", "context"), ("batch", ("data",)))):
    assert logical_axes.current() == placed
  for rule, message in [(("strem", None), "unknown name 'strem'"), (("mlp", "model"), "unknown mesh axis 'model'"),
                        (("mlp",), "each is")]:
    with pytest.raises(ConfigError, match=message):
      mesh_lib.make_placement(mesh, (rule,))


class Device:
  """One of a slice, as far as a mesh looks at it."""

  def __init__(self, number, slice_index):
    self.id, self.slice_index, self.platform, self.device_kind, self.process_index = number, slice_index, "gpu", "H", 0

  def __repr__(self):
    return f"{self.slice_index}:{self.id}"


def test_slices_are_the_outermost_axis():
  devices = [Device(i, slice_index) for i, slice_index in enumerate([0, 1, 0, 1, 0, 1, 0, 1])]
  mesh = mesh_lib.make_mesh(dict(slice=2, fsdp=2, data=-1), devices)
  assert mesh.devices.shape == (2, 2, 2, 1, 1, 1)
  assert [{d.slice_index for d in part.flat} for part in mesh.devices] == [{0}, {1}]
  with pytest.raises(ConfigError, match="mesh.slice is 1, but the devices are in 2 slices.*mesh.slice=2"):
    mesh_lib.make_mesh(dict(data=-1), devices)
  with pytest.raises(ConfigError, match="mesh.slice is 3, but the devices are in 2 slices"):
    mesh_lib.make_mesh(dict(slice=3, data=-1), [Device(i, i % 2) for i in range(12)])
  assert mesh_lib.make_mesh(dict(slice=4, data=-1), devices).devices.shape[:2] == (4, 2)
  # Without slices, the groups follow the processes.
  whole = mesh_lib.make_mesh(dict(slice=2, data=-1))
  assert [[d.id for d in part.flat] for part in whole.devices] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_where_every_parameter_of_a_model_is_split():
  """What goes into a layer's product is split over fsdp on one side and over tensor on the other: q, k, v, gate and up
  by their outputs, o and down by their inputs, so that between the two nothing need be sent."""
  mesh, fsdp = mesh_lib.make_mesh(MIXED), "fsdp"
  model = tiny.model(tie_embeddings=False, qkv_bias=True, mlp_bias=True, attention_out_bias=True)
  placed, notes = mesh_lib.param_shardings(model.abstract_params(), mesh)
  wide, narrow = P(None, fsdp, "tensor"), P(None, "tensor", fsdp)
  expected = {
      "embed/embedding": P("tensor", fsdp), "unembed/kernel": P(fsdp, "tensor"), "final_norm/scale": P(),
      "blocks/attn_norm/scale": P(), "blocks/mlp_norm/scale": P(),
      **{f"blocks/{name}/kernel": wide for name in ("attn/q", "attn/k", "attn/v", "mlp/gate", "mlp/up")},
      **{f"blocks/{name}/bias": P(None, "tensor") for name in ("attn/q", "attn/k", "attn/v", "mlp/gate", "mlp/up")},
      "blocks/attn/o/kernel": narrow, "blocks/mlp/down/kernel": narrow,
      "blocks/attn/o/bias": P(), "blocks/mlp/down/bias": P(),
  }
  assert {path: s.spec for path, s in tree.flatten(placed).items()} == expected and notes == []


def test_where_adapters_and_experts_are_split():
  mesh = mesh_lib.make_mesh(dict(data=1, fsdp=2, expert=2, tensor=2))
  fsdp, model = ("fsdp", "expert"), tiny.model(
      lora=dict(rank=2, targets=("attn/", "shared/")), moe=dict(num_experts=4, expert_size=16, shared_size=16))
  placed = {path: tuple(s.spec) for path, s in tree.flatten(mesh_lib.param_shardings(
      model.abstract_params(), mesh)[0]).items()}
  for name in ("attn/q", "attn/k", "attn/v", "moe/shared/gate", "moe/shared/up"):
    assert placed[f"blocks/{name}/lora_a"] == (None, fsdp, None), name
    assert placed[f"blocks/{name}/lora_b"] == (None, None, "tensor"), name
  for name in ("attn/o", "moe/shared/down"):
    assert placed[f"blocks/{name}/lora_a"] == (None, "tensor", None), name
    assert placed[f"blocks/{name}/lora_b"] == (None, None, fsdp), name
  assert placed["blocks/moe/experts/up/kernel"] == (None, "expert", "fsdp", "tensor")
  assert placed["blocks/moe/experts/down/kernel"] == (None, "expert", "tensor", "fsdp")
  assert placed["blocks/moe/router/kernel"] == (None, fsdp, None)


def test_an_axis_that_covers_no_whole_dimension_of_the_torus_is_split(monkeypatch):
  asked = []

  def create(shape, devices, **options):
    asked.append((shape, options))
    if not options:
      raise NotImplementedError
    return np.array(devices, object).reshape(shape)

  monkeypatch.setattr(mesh_lib.mesh_utils, "create_device_mesh", create)
  mesh = mesh_lib.make_mesh(dict(fsdp=4, tensor=2))
  shape = (1, 1, 4, 1, 1, 2)
  assert asked == [(shape, {}), (shape, dict(allow_split_physical_axes=True))] and mesh.devices.shape == shape


@pytest.mark.parametrize("count, apart, message", [
    (8, 8, "rollout.devices is 8, and there are 8 devices in all: none would be left to train. Use at most 7."),
    (1, 1, "there are 1 devices in all: none would be left to train. Use 0.")])
def test_devices_must_be_left_to_train(count, apart, message):
  config = defaults()
  config.rollout.update(num_prompts=2, devices=apart)
  with pytest.raises(ConfigError, match=message):
    mesh_lib.num_training(config, count)
  config.rollout.devices = 7
  assert mesh_lib.num_training(config, 8) == 1
  config.rollout.num_prompts = 0  # nothing is sampled: all train
  assert mesh_lib.num_sampling(config) == 0 and mesh_lib.num_training(config, 8) == 8
  assert mesh_lib.sampling_mesh(config, "the mesh of updates") == "the mesh of updates"


def test_a_run_says_what_its_devices_are(capsys):
  config = defaults()
  config.update(batch_size=8)
  mesh_lib.start(config)
  config.batch_size, config.mesh = 6, dict(data=2, fsdp=3)
  config.rollout.update(num_prompts=2, devices=2, tensor=2)
  mesh_lib.start(config)
  kind = jax.devices()[0].device_kind
  assert capsys.readouterr().out == (
      f"8 × {kind} in 1 process(es), mesh: data=8\n8 × {kind} in 1 process(es), mesh: data=2, fsdp=3; "
      "2 more that sample: tensor=2\n")


def test_what_does_not_split_says_the_sizes_and_the_way_out():
  mesh = mesh_lib.make_mesh(dict(data=2, fsdp=2, tensor=2))
  with pytest.raises(ConfigError, match=r"^evals.x.batch_size is 6, which cannot be split over 4 devices "
                                        r"\(data=2, fsdp=2\). Use a multiple of 4, or move"):
    mesh_lib.check_batch(mesh, 6, "evals.x.batch_size")


def test_a_stage_that_samples_splits_rows_over_context_too():
  mesh = mesh_lib.make_mesh(dict(data=2, context=2, tensor=2))
  names, shape = ("batch", "length", "stream"), (8, 8, 8)
  assert mesh_lib.make_placement(mesh).spec(names, shape) == P("data", "context", "tensor")
  assert mesh_lib.make_placement(mesh, sampling=True).spec(names, shape) == P(("data", "context"), None, None)


def test_a_batch_that_is_whole_here_is_placed_row_by_row():
  mesh = mesh_lib.make_mesh(dict(data=4, tensor=2))
  batch = {"x": np.arange(24).reshape(8, 3), "y": np.arange(8)}
  placed = mesh_lib.place(batch, mesh_lib.batch_sharding(mesh))
  for name, part in batch.items():
    np.testing.assert_array_equal(placed[name], part)
    assert {shard.data.shape[0] for shard in placed[name].addressable_shards} == {2}


@pytest.mark.host_patches
def test_a_process_builds_the_rows_of_its_own_devices_alone(monkeypatch):
  """Of eight rows it holds two devices' parts, 2 to 3 and 6 to 7; other processes hold the others."""
  mine = [(slice(6, 8),), (slice(2, 4),)]
  sharding = SimpleNamespace(addressable_devices_indices_map=lambda shape: dict(enumerate(mine)))
  monkeypatch.setattr(mesh_lib.jax, "make_array_from_callback", lambda shape, sharding, shard: (
      shape, [shard((*index, slice(None))).tolist() for index in mine]))
  asked = []
  placed = mesh_lib.place_batch(lambda rows: asked.append(rows.tolist()) or {"x": rows[:, None] * 10}, 8, sharding)
  assert asked == [[2, 3, 6, 7]] and placed == {"x": ((8, 1), [[[60], [70]], [[20], [30]]])}
