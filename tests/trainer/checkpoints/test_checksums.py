"""Checksums of arrays, and the seal on what a checkpoint says of itself."""

import jax.numpy as jnp
import numpy as np
import pytest

from trainer.checkpoints import checksums
from trainer.errors import Damaged


def test_further_arrays_must_all_be_there(tmp_path):
  arrays = {"a": np.arange(3), "b": np.arange(4)}
  meta = {"arrays": checksums._of_arrays(arrays)}
  checksums.check_arrays(meta, arrays, tmp_path)
  for given, wrong in (
      ({"a": arrays["a"]}, "b"), (arrays | {"b": np.arange(5)}, "b"), (arrays | {"c": arrays["a"]}, "c")):
    with pytest.raises(Damaged, match=f"1 of .* arrays in .* are not what was saved: {wrong}$"):
      checksums.check_arrays(meta, given, tmp_path)


@pytest.mark.parametrize("key, other", [
    ("step", 4), ("checksums", {"params/w": "0"}), ("arrays", {}), ("remembered", {"spikes": {"recent": [1.0]}}),
    ("more", 1), ("seal", "0"), ("step", None)])
def test_whatever_is_changed_of_what_a_checkpoint_says_is_seen(key, other):
  meta = {"step": 3, "remembered": {"spikes": {"recent": []}}}
  sealed = checksums.add_checksums(meta, {"params/w": jnp.ones(3)}, {"rest": np.arange(3)})
  rest = checksums.checked_meta(sealed)
  assert rest.keys() == {"step", "remembered", "checksums", "arrays"} and rest["step"] == 3
  changed = {name: part for name, part in (sealed | {key: other}).items() if part is not None}
  with pytest.raises(Damaged, match="is not what was saved"):
    checksums.checked_meta(changed)


def test_the_order_in_which_a_checkpoint_says_things_is_no_damage():
  sealed = checksums.add_checksums({"step": 3, "data": {"b": 1, "a": 2}}, {}, {})
  turned = {**dict(reversed(sealed.items())), "data": {"a": 2, "b": 1}}
  assert checksums.checked_meta(turned)["data"] == {"a": 2, "b": 1}


def test_what_is_sealed_is_a_copy():
  meta = {"remembered": {"recent": [1.0]}}
  sealed = checksums.add_checksums(meta, {}, {})
  meta["remembered"]["recent"].append(2.0)
  assert checksums.checked_meta(sealed)["remembered"] == {"recent": [1.0]}


def test_leaves_that_differ_or_of_which_nothing_was_saved_are_named(tmp_path):
  saved = {"a": jnp.arange(3), "b": jnp.ones(2)}
  meta = checksums.add_checksums({}, saved, {})
  checksums.check(meta, saved, tmp_path)
  checksums.check(meta, {"a": saved["a"]}, tmp_path)  # some of them may be read alone
  for given, wrong in ((saved | {"b": jnp.zeros(2)}, "1 of 2 .*: b"), (saved | {"c": jnp.ones(2)}, "1 of 3 .*: c"),
                       ({"a": saved["a"].astype(jnp.float32)}, "1 of 1 .*: a")):
    with pytest.raises(Damaged, match=f"{wrong}$"):
      checksums.check(meta, given, tmp_path)
