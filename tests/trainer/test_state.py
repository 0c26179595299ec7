"""The parts of the training state: what they begin as, what is evaluated, what checkpoints leave out."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer import state as state_lib
from trainer import tree

PARAMS = {"a": {"kernel": jnp.asarray([1.0, 2.0], jnp.bfloat16)}, "b": {"kernel": jnp.asarray([3.0])}}


def optimizer(*trained):
  """Of the optimizer what a state needs: which parameters are trained, and a count of their entries."""
  def split(params):
    flat = tree.flatten(params)
    return tuple(tree.unflatten({path: x for path, x in flat.items() if (path in trained) == these})
                 for these in (True, False))

  return types.SimpleNamespace(split=split, trainable=frozenset(trained),
                               init=lambda trainable: {"size": jax.tree.map(jnp.size, trainable)})


def test_before_the_first_update_averages_are_the_trained_parameters_in_float32():
  state = state_lib.make_rest(optimizer("a/kernel"), ema=True)(PARAMS)
  assert list(tree.flatten(state["ema"])) == ["a/kernel"] and state["ema"]["a"]["kernel"].dtype == jnp.float32
  np.testing.assert_array_equal(state["ema"]["a"]["kernel"], [1.0, 2.0])
  assert state["opt"] == {"size": {"a": {"kernel": 2}}}
  assert [int(state[key]) for key in ("step", "nonfinite", "nonfinite_in_a_row")] == [0, 0, 0]
  assert "ema" not in state_lib.make_rest(optimizer("a/kernel"), ema=False)(PARAMS)


def test_what_is_evaluated_are_the_averages_and_what_has_none():
  state = {"params": PARAMS, "ema": {"a": {"kernel": jnp.asarray([7.0, 8.0])}}}
  found = state_lib.averaged(state)
  assert list(found) == ["a", "b"]
  np.testing.assert_array_equal(found["a"]["kernel"], [7.0, 8.0])
  np.testing.assert_array_equal(found["b"]["kernel"], [3.0])
  assert state_lib.averaged({"params": PARAMS}) is PARAMS


def test_the_shapes_of_a_state_with_a_reference():
  state = jax.eval_shape(state_lib.make_fresh(optimizer("a/kernel"), ema=True, reference={"b": PARAMS["b"]}), PARAMS)
  assert set(state) == {"step", "params", "opt", "ema", "reference", "nonfinite", "nonfinite_in_a_row"}
  assert state["reference"]["b"]["kernel"].shape == (1,) and list(state["reference"]) == ["b"]


@pytest.mark.parametrize("trained_only, reference_ema, expected", [
    (None, 0.0, {"reference": {"a/kernel"}}), (None, 0.5, {}),
    ("a/", 0.0, {"params": {"b/kernel"}, "reference": {"a/kernel"}}), ("a/", 0.5, {"params": {"b/kernel"}})])
def test_checkpoints_leave_out_what_can_be_had_again(trained_only, reference_ema, expected):
  """The base under adapters, and a reference unless it moves."""
  program = types.SimpleNamespace(
      model=types.SimpleNamespace(trained_only=trained_only), optimizer=optimizer("a/kernel"),
      abstract_state={"params": PARAMS, "reference": {"a": PARAMS["a"]}})
  strategy = types.SimpleNamespace(reference_ema=reference_ema)
  assert state_lib.left_out(program, strategy) == expected


def test_each_part_that_is_left_out_is_pinned_by_its_values():
  def pinned(base, reference):
    left_out = {"params": {"b": {"kernel": jnp.asarray(base)}}, "reference": {"a": {"kernel": jnp.asarray(reference)}}}
    return state_lib._pinned({}, types.SimpleNamespace(split=lambda state: ({}, left_out)))

  was = pinned([3.0], [1.0, 2.0])
  assert was.keys() == {"base", "reference"} and pinned([3.0], [1.0, 2.0]) == was
  for name, other in (("base", pinned([3.5], [1.0, 2.0])), ("reference", pinned([3.0], [1.0, 2.5]))):
    assert {part for part in was if other[part] != was[part]} == {name}
