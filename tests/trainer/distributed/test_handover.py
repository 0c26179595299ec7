"""Parameters on devices that do not train: the same numbers, split as that mesh splits them."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests import tiny
from trainer import tree
from trainer.distributed import handover
from trainer.distributed import mesh as mesh_lib

pytestmark = pytest.mark.devices(8)


@pytest.mark.parametrize("before", [
    (), ("fsdp",), ("fsdp", "tensor"), ("tensor", "fsdp"), (("tensor", "fsdp"),)], ids=str)
@pytest.mark.parametrize("after", [(), ("tensor",), (None, "tensor")], ids=str)
def test_an_array_is_the_same_wherever_it_goes(before, after):
  """From six devices to two: its parts there are those of a whole array that is placed there."""
  devices = jax.devices()
  train = mesh_lib.make_mesh(dict(fsdp=3, tensor=2), devices[:6])
  sample = mesh_lib.make_mesh(dict(tensor=2), devices[6:])
  whole = np.arange(12 * 6 * 5, dtype=np.float32).reshape(12, 6, 5)
  there = NamedSharding(sample, PartitionSpec(*after))
  moved = handover.move(jax.device_put(whole, NamedSharding(train, PartitionSpec(*before))), there)
  assert moved.sharding == there and moved.sharding.device_set == set(devices[6:])
  for part in moved.addressable_shards:
    np.testing.assert_array_equal(part.data, whole[part.index])


def test_what_is_trained_is_given_each_time_and_what_is_frozen_once():
  devices = jax.devices()
  train, sample = mesh_lib.make_mesh(dict(fsdp=4), devices[:4]), mesh_lib.make_mesh(dict(data=2, tensor=2), devices[4:])
  params = jax.jit(tiny.model().init)(jax.random.key(0))
  params = jax.device_put(params, mesh_lib.param_shardings(params, train)[0])
  frozen = {path for path in tree.flatten(params) if "attn" in path}
  give = handover.Handover(sample)
  first, second = (tree.flatten(give(jax.tree.map(lambda leaf, times=times: times * leaf, params),
                                     tree.flatten(params).keys() - frozen)) for times in (1, 2))
  split = mesh_lib.param_shardings(params, sample)[0]
  for path, leaf in tree.flatten(params).items():
    assert first[path].sharding == second[path].sharding == tree.flatten(split)[path]
    assert (second[path] is first[path]) == (path in frozen)
    np.testing.assert_array_equal(second[path], leaf * (1 if path in frozen else 2))
  assert any("tensor" in str(leaf.sharding.spec) for leaf in first.values())
  own = handover.Handover(sample, (("^embed/embedding$", (None, "data")),))(params, ())
  assert own["embed"]["embedding"].sharding.spec == PartitionSpec(None, "data") != split["embed"]["embedding"].spec
