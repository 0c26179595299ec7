"""Where first parameters come from: another run's by name after `remap`, with both sides listed where they differ."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.checkpoints import init_from
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.config import defaults
from trainer.errors import ConfigError


class Fresh:
  """A model whose fresh parameters are sevens."""

  def __init__(self, shapes):
    self._shapes = shapes

  def init(self, rng):
    return jax.tree.map(lambda leaf: jnp.full(leaf.shape, 7.0), self._shapes)


@pytest.fixture
def run(tmp_path):
  """A run's folder; shapes that fit it after `remap` and `ignore`."""
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, {"params": {"old": {"kernel": jnp.full((8, 2), 3.0)}, "extra": jnp.ones(4)}}, {})
  checkpoints.close()
  like = {"a": {"kernel": jnp.zeros((8, 2))}, "head": jnp.zeros(5)}
  return tmp_path, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)


def first(run, **changed):
  path, wanted = run
  config = defaults()
  config.init_from.path = str(path)
  config.init_from.update(changed)
  return init_from.first_params(init_from.origin_of(config), Fresh(wanted), wanted)


def test_another_runs_parameters_with_remap_and_ignore(run, caplog):
  caplog.set_level(logging.INFO, logger="absl")
  loaded, where = first(run, remap=(("^old/", "a/"), ("^extra$", "")), ignore=("^head$",))
  assert np.all(loaded["a"]["kernel"] == 3.0) and np.all(loaded["head"] == 7.0)
  assert where == f"1 arrays from {run[0]}, 1 fresh arrays"
  assert "1 kept fresh, 1 of the checkpoint dropped" in caplog.text


def test_what_does_not_fit_is_listed_from_both_sides(run):
  with pytest.raises(ConfigError) as error:
    first(run)
  for line in ("- a/kernel (8, 2): not in the checkpoint", "+ old/kernel (8, 2): not in this run", "- head (5,)"):
    assert line in str(error.value)


def test_another_shape_and_two_names_for_one(run):
  with pytest.raises(ConfigError, match=r"! head: here \(5,\), in the checkpoint \(4,\)"):
    first(run, remap=(("^extra$", "head"), ("^old/", "a/")))
  with pytest.raises(ConfigError, match="maps both old/kernel and extra|maps both extra and old/kernel"):
    first(run, remap=(("^extra$", "head"), ("^old/kernel$", "head")))
