"""Whole runs with everything of docs/precision.md at once: a run that was stopped, and where its state lies."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from trainer import train, tree
from trainer.errors import ConfigError
from trainer.optim import offload
from trainer.telemetry.writers import read_rows

pytestmark = pytest.mark.devices(8)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return tiny.write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


def config(corpus, **changed):
  c = tiny.config(corpus, total_steps=4, remat="offload", **changed)
  c.evals = {}
  c.ckpt_steps = 2
  c.precision.update(params="bfloat16", stochastic_rounding=True, moments="bfloat16", second_moments="int8",
                     offload_optimizer=True, matmul="int8", matmul_skip=("attn/k/",))
  c.mesh.update(data=2, fsdp=2, tensor=2)
  return c


def test_a_stopped_run_continues_bitwise(corpus, tmp_path):
  """I5, on eight devices: parameters, codes, exponents; everything in its place afterwards."""
  straight = train(config(corpus), tmp_path / "straight")
  stopped = config(corpus)
  stopped.callbacks.crash = dict(type="tests.trainer.test_main.Crash", after=3)
  with pytest.raises(KeyboardInterrupt):
    train(stopped, tmp_path / "stopped")
  again = train(config(corpus), tmp_path / "stopped")
  for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(straight.state), jax.tree.leaves(again.state),
                          strict=True):
    assert a.dtype == b.dtype and a.sharding == b.sharding, path
    np.testing.assert_array_equal(np.asarray(a).view(f"V{a.dtype.itemsize}"),
                                  np.asarray(b).view(f"V{b.dtype.itemsize}"), err_msg=str(path))
  flat = tree.flatten(again.state["opt"]["adam"])
  assert {leaf.sharding.memory_kind for leaf in flat.values()} == {offload.HOST}
  assert flat["mu/blocks/mlp/up/kernel"].dtype == jnp.bfloat16
  assert flat["nu/blocks/mlp/up/kernel"].dtype == flat["nu_exponent/blocks/mlp/up/kernel"].dtype == jnp.uint8
  assert {leaf.dtype.name for leaf in jax.tree.leaves(again.state["params"])} == {"bfloat16"}
  changed = [row["params_changed"] for row in read_rows(tmp_path / "stopped" / "metrics.jsonl")
             if "params_changed" in row]
  assert len(changed) == 4 and all(0.05 < share <= 1 for share in changed)


def test_a_backend_without_memory_of_the_host_is_named(monkeypatch):
  class Device:
    platform, device_kind = "abacus", "beads"

    def addressable_memories(self):
      return [type("Memory", (), {"kind": "device"})()]

  class Mesh(jax.sharding.Mesh):
    devices = np.array([Device()])

  mesh = object.__new__(Mesh)
  with pytest.raises(ConfigError, match=r"remat = offload needs .*'pinned_host', but the backend 'abacus'.*has device"):
    offload.check(mesh, "remat = offload")


def test_a_step_that_is_refused_leaves_the_state_as_it_is_and_where_it_is():
  """I14: the branch not taken fetches nothing."""
  device = jax.NamedSharding(jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,)), jax.P("fsdp"))
  host = offload.to_host(device)

  @functools.partial(jax.jit, out_shardings=(device, host, None), donate_argnums=(0, 1))
  def step(params, state, good):
    return offload.with_state_on_device(good, lambda p, s: (p + s, 2 * s, jnp.sum(s)), params, state)

  params, state = jax.device_put(jnp.arange(8.0), device), jax.device_put(jnp.ones(8), host)
  for good, expected in ((False, (28.0, 8.0, 0.0)), (True, (36.0, 16.0, 8.0)), (False, (36.0, 16.0, 0.0))):
    params, state, value = step(params, state, good)
    assert (float(params.sum()), float(np.asarray(state).sum()), float(value)) == expected
    assert (params.sharding.memory_kind, state.sharding.memory_kind) == ("device", offload.HOST)
