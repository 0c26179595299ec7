"""Names of activations' dimensions and the mesh axes they mean."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from models.sharding import logical_axes
from models.sharding.logical_axes import Placement, fit
from trainer.distributed import mesh as mesh_lib

pytestmark = pytest.mark.devices(8)

MESH = dict(data=2, fsdp=2, tensor=2)


def test_without_a_mesh_nothing_is_constrained():
  x = jnp.ones((2, 3))
  assert logical_axes.current() is None and logical_axes.constrain(x, "batch", "embed") is x
  with logical_axes.placed(Placement(mesh_lib.make_mesh(MESH), {"batch": "data"})):
    with logical_axes.placed(None):
      assert logical_axes.constrain(x, "batch", "embed") is x
  assert logical_axes.current() is None


@pytest.mark.parametrize("platform, barriers", [("cpu", 0), ("gpu", 0), ("tpu", 2)])
def test_what_several_products_read_is_made_once_on_tpu(platform, barriers, monkeypatch):
  """And its gradient."""
  monkeypatch.setattr(logical_axes, "platform", lambda: platform)
  step = jax.value_and_grad(lambda x: jnp.sum(jnp.square(logical_axes.made_once(jnp.sin(x)))))
  assert str(jax.make_jaxpr(step)(2.0)).count("optimization_barrier") == barriers
  assert all(abs(a - b) < 1e-6 for a, b in zip(step(2.0), (jnp.sin(2.0)**2, jnp.sin(4.0)), strict=True))


def test_names_become_the_axes_of_the_rules():
  placed = Placement(mesh_lib.make_mesh(MESH), mesh_lib.ACTIVATION_RULES)
  assert placed.spec(("batch", "stream", "embed"), (8, 16, 4)) == P(("data", "fsdp"), "tensor", None)
  assert placed.spec(("batch", "length", "heads", None), (8, 16, 4, 2)) == P(("data", "fsdp"), None, "tensor", None)
  with logical_axes.placed(placed):
    x = jax.jit(lambda x: logical_axes.constrain(x, "batch", "mlp"))(jnp.ones((8, 4)))
  assert x.sharding.is_equivalent_to(jax.NamedSharding(placed.mesh, P(("data", "fsdp"), "tensor")), 2)


def test_a_wrong_name_and_a_wrong_number_of_names_are_refused():
  placed = Placement(mesh_lib.make_mesh(MESH), {})
  with pytest.raises(ValueError, match="depth"):
    placed.spec(("depth",), (2,))
  with pytest.raises(ValueError, match="shape"):
    placed.spec(("batch",), (2, 2))


def test_of_axes_that_do_not_divide_the_first_ones_are_kept():
  mesh = mesh_lib.make_mesh(MESH)
  assert fit((("data", "fsdp"), "tensor"), (8, 2), mesh) == (("data", "fsdp"), "tensor")
  assert fit((("data", "fsdp"), "tensor"), (6, 3), mesh) == ("data", None)
  assert fit((("data", "fsdp"),), (3,), mesh) == (None,)
  assert fit(("tensor", ("fsdp", "tensor")), (2, 4), mesh) == ("tensor", "fsdp")  # no axis twice
  assert fit((("slice", "context", "fsdp"),), (2,), mesh) == ("fsdp",)  # axes of size 1 do nothing
