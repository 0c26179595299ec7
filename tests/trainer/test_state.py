"""The parts of the training state: what they begin as, what is evaluated, what checkpoints leave out."""

import contextlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer import state as state_lib
from trainer import tree
from trainer.errors import ConfigError

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
  both = {"params": PARAMS, "ema": {name: {"kernel": jnp.asarray([9.0])} for name in PARAMS}}
  assert [float(part["kernel"][0]) for part in state_lib.averaged(both).values()] == [9.0, 9.0]


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


def test_a_teacher_is_left_out_whole_by_a_strategy_whose_reference_cannot_move():
  program = types.SimpleNamespace(
      model=types.SimpleNamespace(trained_only=None), optimizer=optimizer("a/kernel", "b/kernel"),
      abstract_state={"params": PARAMS, "reference": {"teacher": {"main": PARAMS["a"]}}})
  assert state_lib.left_out(program, types.SimpleNamespace()) == {"reference": {"teacher/main/kernel"}}


def test_each_part_that_is_left_out_is_pinned_by_its_values():
  def pinned(base, reference):
    left_out = {"params": {"b": {"kernel": jnp.asarray(base)}}, "reference": {"a": {"kernel": jnp.asarray(reference)}}}
    return state_lib._pinned({}, types.SimpleNamespace(split=lambda state: ({}, left_out)))

  was = pinned([3.0], [1.0, 2.0])
  assert was.keys() == {"base", "reference"} and pinned([3.0], [1.0, 2.0]) == was
  for name, other in (("base", pinned([3.5], [1.0, 2.0])), ("reference", pinned([3.0], [1.0, 2.5]))):
    assert {part for part in was if other[part] != was[part]} == {name}


@pytest.mark.parametrize("was, told", [
    ("same", None), ({}, "its fingerprint is None"), ({"base": "other"}, "is other")])
def test_a_base_that_is_not_the_one_pinned_is_refused_and_so_is_one_of_which_nothing_is_known(was, told):
  """The checkpoint leaves out b/kernel, which is made again with the value 3."""
  frozen = {"params": {"b": PARAMS["b"]}}
  checkpoints = types.SimpleNamespace(
      split=lambda state: ({"step": 4, "params": {"a": PARAMS["a"]}}, frozen),
      merge=lambda stored, left_out: stored | {"params": PARAMS},
      restore_newest=lambda stored: types.SimpleNamespace(
          state={"step": 4, "params": {"a": PARAMS["a"]}}, path="w/checkpoints/4", arrays={"logprobs": 1}, meta={
              "pinned": state_lib._pinned({}, checkpoints) if was == "same" else was}))
  program = types.SimpleNamespace(abstract_state={"params": PARAMS}, model=None)
  config = types.SimpleNamespace(model=types.SimpleNamespace(hf="folder"))
  origin = types.SimpleNamespace(resume=None)
  made = []

  def first_params(config, origin, model, wanted, partial):
    made.append((list(tree.flatten(wanted)), partial))
    return frozen["params"], "from a folder"

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(state_lib.critic, "first_params", first_params)
    with pytest.raises(ConfigError, match=f"w/checkpoints/4 was trained with another base.*{told}.*model.hf \\(folder"
                       ) if told else contextlib.nullcontext():
      start = state_lib.initialise(config, origin, program, checkpoints)
      assert start.origin == "continuing w/checkpoints/4 after step 4" and start.state["params"] is PARAMS
      assert start.arrays == {"logprobs": 1}
  assert made == [(["b/kernel"], True)]


@pytest.mark.parametrize("from_start, wanted", [(True, ["a/kernel", "b/kernel"]), (False, ["b/kernel"])])
def test_a_reference_of_the_runs_beginning_is_made_of_its_own_leaves_too(from_start, wanted, monkeypatch):
  """The base, b, and where the reference is what the run began with, the leaf a that it holds of its own."""
  made = []
  monkeypatch.setattr(state_lib.critic, "first_params", lambda config, origin, model, target, partial: (
      made.append(sorted(tree.flatten(target))), ({"a": PARAMS["a"], "b": PARAMS["b"]}, ""))[1])
  monkeypatch.setattr(state_lib.reference_lib, "from_start", lambda config: from_start)
  monkeypatch.setattr(state_lib.reference_lib, "first_reference", lambda config, model, params, target: params["a"])
  checkpoints = types.SimpleNamespace(merge=lambda stored, added: added)
  left_out = {"params": {"b": PARAMS["b"]}, "reference": {"a": PARAMS["a"]}}
  added = state_lib._complete({}, left_out, None, None, None, checkpoints)
  assert made == [wanted] and list(added["params"]) == ["b"] and added["reference"] is PARAMS["a"]
