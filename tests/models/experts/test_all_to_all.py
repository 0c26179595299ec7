"""Tokens that travel to their experts: whatever the router chooses, the outputs and gradients of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from models.experts import all_to_all as exchange_lib
from models.experts import moe as moe_lib
from models.experts.all_to_all import Split, at_home, exchange
from tests.pairwise import covering
from trainer.distributed import mesh as mesh_lib

pytestmark = pytest.mark.devices(8)

N, D, F, E, K = 32, 8, 12, 8, 2
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(N, D)), jnp.float32)
MIX = jnp.asarray(RNG.normal(size=(N * K, D)), jnp.float32)
KERNELS = tuple(jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((E, D, F), (E, D, F), (E, F, D)))
RUN = functools.partial(moe_lib.expert_outputs, activation="swiglu", matmuls=(None,) * 3)
ANY = functools.partial(RUN, zeros=False)
# Nearly: of the 8 assignments of a device one device gets 3, so that a last round may have room left.
OF_A_DEVICE = np.array([[0, 1], [0, 2], [4, 5], [6, 7]], np.int32)
EVEN = np.concatenate([(RNG.permutation(OF_A_DEVICE) + 2 * device) % E for device in range(8)])
ROUTES = {
    "even": EVEN,
    "two experts": np.tile(np.array([3, 2], np.int32), (N, 1)),  # both on one device
    "some of none": np.where(RNG.random((N, 1)) < 0.4, E, EVEN).astype(np.int32),
    "none at all": np.full((N, K), E, np.int32),
    "one device's tokens only": np.where(np.arange(N)[:, None] < 8, EVEN, E).astype(np.int32),
}
MESH = dict(data=1, fsdp=2, expert=4)
TOKENS, BY_EXPERT = P(("fsdp", "expert")), (P("expert", "fsdp"), P("expert", "fsdp"), P("expert", None, "fsdp"))


def in_turn(fn):
  """`fn` with all choices of each token in turn, as they are split over devices; not the first of all tokens first."""
  def changed(x, experts, kernels):
    y = fn(x, experts.reshape(-1, K).T.reshape(-1), kernels)
    return y.reshape(K, -1, D).swapaxes(0, 1).reshape(-1, D)
  return changed


def outcome(fn, experts):
  """(outputs, gradients of x and the kernels)."""
  def loss(x, kernels):
    y = fn(x, jnp.asarray(experts).reshape(-1), kernels)
    return jnp.sum(y * MIX), y

  (_, y), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(X, KERNELS)
  return y, gradients


def on_mesh(local, kernel_specs, mesh=MESH):
  return jax.shard_map(in_turn(local), mesh=mesh_lib.make_mesh(mesh), in_specs=(TOKENS, TOKENS, kernel_specs),
                       out_specs=TOKENS, check_vma=False)


def equal(actual, expected):
  for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("rounds, name", covering((1, 2, 7), ROUTES, strength=1))
def test_nothing_is_dropped(rounds, name, monkeypatch):
  """With little room in a round there are more of them."""
  monkeypatch.setattr(exchange_lib, "rounds_when_even", lambda assignments: rounds)
  split = Split("expert", ((("fsdp",), 1), (("fsdp",), 1), (("fsdp",), 2)), mesh_lib.AXES)

  def local(x, experts, kernels):
    return exchange(ANY, split, x, experts, kernels, E)

  equal(outcome(on_mesh(local, BY_EXPERT), ROUTES[name]), outcome(in_turn(RUN), ROUTES[name]))


@pytest.mark.parametrize("name", ["even", "some of none"])
def test_gathered_experts_compute_the_same(name):
  split = Split(None, ((("fsdp", "expert"), 1), (("fsdp", "expert"), 1), (("fsdp",), 2)), mesh_lib.AXES)
  specs = (P(None, ("fsdp", "expert")), P(None, ("fsdp", "expert")), P(None, None, "fsdp"))
  gathered = on_mesh(functools.partial(at_home, RUN, split), specs)
  equal(outcome(gathered, ROUTES[name]), outcome(in_turn(RUN), ROUTES[name]))


def test_the_number_of_rounds_is_decided_when_the_step_runs(monkeypatch):
  """Evenly spread tokens take few rounds, those that all go to one device more, in the same program; memory is that of
  a round: no buffer has room for all assignments of all devices."""
  split = Split("expert", (((), 1), ((), 1), ((), 2)), mesh_lib.AXES)
  specs = (P("expert"), P("expert"), P("expert"))
  taken = []

  def counted(x, experts, kernels):
    jax.debug.callback(lambda: taken.append(1))
    return RUN(x, experts, kernels)

  mapped = on_mesh(lambda x, e, k: exchange(counted, split, x, e, k, E), specs)
  compiled = jax.jit(mapped).lower(X, jnp.zeros(N * K, jnp.int32), KERNELS).compile()
  counts = {}
  for name in ("none at all", "even", "two experts"):
    taken.clear()
    jax.block_until_ready(compiled(X, jnp.asarray(ROUTES[name]).reshape(-1), KERNELS))
    jax.effects_barrier()
    counts[name] = len(taken) // 8
  # A device has 8 assignments and sends each of 4 devices at most 1 in a round.
  assert counts["none at all"] == 0 and counts["two experts"] == 8 and 2 <= counts["even"] < 8


def test_sums_over_devices_are_float32():
  """Each of 8 devices adds 1/256 of the largest gradient, which bfloat16 sums would lose."""
  mesh = mesh_lib.make_mesh(dict(data=1, fsdp=8))
  split = Split(None, (((), 1), ((), 1), ((), 2)), mesh_lib.AXES)

  def local(x, experts, kernels):
    return at_home(lambda x, experts, kernels: x * kernels[0][0, :1, :1], split, x, experts, kernels)

  x = jnp.asarray([[1.0]] + [[2.0**-9]] * 7, jnp.bfloat16)
  kernels = tuple(jnp.ones((1, 1, 1), jnp.float32) for _ in range(3))
  mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("fsdp"), P("fsdp"), (P(), P(), P())), out_specs=P("fsdp"),
                         check_vma=False)
  gradient = jax.jit(jax.grad(lambda k: jnp.sum(mapped(x, jnp.zeros(8, jnp.int32), k).astype(jnp.float32))))(kernels)
  assert float(gradient[0][0, 0, 0]) == 1 + 7 * 2.0**-9
