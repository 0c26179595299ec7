"""The fingerprint sees every bit, and nothing of where arrays lie."""

import hashlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from trainer.checkpoints.fingerprint import checksums, fingerprint


def tree(seed=0, dtype=np.float32):
  rng = np.random.default_rng(seed)
  return {"a": {"kernel": jnp.asarray(rng.normal(size=(8, 4, 16)), dtype)}, "b": jnp.asarray(rng.normal(size=8), dtype)}


def test_sharding_does_not_matter():
  mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  spec = {"a": {"kernel": PartitionSpec("x", None, "y")}, "b": PartitionSpec(("x", "y"))}
  sharded = jax.tree.map(lambda leaf, s: jax.device_put(leaf, NamedSharding(mesh, s)), tree(), spec)
  assert fingerprint(sharded) == fingerprint(tree())


def test_the_last_bit_of_any_element_matters():
  original = fingerprint(tree())
  for index in ((0, 0, 0), (7, 3, 15), (3, 1, 8)):
    changed = tree()
    kernel = changed["a"]["kernel"]
    changed["a"]["kernel"] = kernel.at[index].set(jnp.nextafter(kernel[index], 1e9))
    assert fingerprint(changed) != original


@pytest.mark.parametrize("change", [
    lambda t: t | {"b": t["b"][::-1]},  # the same values in another order
    lambda t: t | {"b": t["b"].at[:2].set(t["b"][1::-1])},
    lambda t: t | {"b": t["b"].reshape(2, 4)},
    lambda t: t | {"b": t["b"].astype(jnp.bfloat16)},
    lambda t: {"a": t["a"], "c": t["b"]},
    lambda t: {"a": {"kernel": jnp.swapaxes(t["a"]["kernel"], 0, 0).transpose(0, 2, 1)}, "b": t["b"]},
    lambda t: t | {"b": t["b"].at[0].multiply(-1.0)},
    # Two elements whose places have the same sum change places.
    lambda t: t | {"a": {"kernel": t["a"]["kernel"].at[0, 1].set(t["a"]["kernel"][1, 0]).at[1, 0].set(
        t["a"]["kernel"][0, 1])}},
])
def test_order_shape_dtype_names_and_signs_matter(change):
  assert fingerprint(change(tree())) != fingerprint(tree())


def test_minus_zero_is_not_zero_and_every_dtype_has_one():
  assert fingerprint({"x": jnp.zeros(3)}) != fingerprint({"x": -jnp.zeros(3)})
  dtypes = ("float32", "bfloat16", "int8", "uint8", "int32", "bool")
  prints = {fingerprint({"x": jnp.ones(4, dtype)}) for dtype in dtypes}
  assert len(prints) == 6


def test_both_halves_of_64_bits_matter():
  with jax.enable_x64(True):
    prints = {fingerprint({"x": jnp.asarray([value, 1], jnp.int64)}) for value in (0, 1, 1 << 32, (1 << 32) + 1)}
  assert len(prints) == 4


def sums_of(bits):
  """The two sums of an array's bits, in Python's own integers, element by element."""
  def mix(x):
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
      x = (x ^ x >> shift) * factor % 2**32
    return x ^ x >> 16

  sums = [0, 0]
  for place in itertools.product(*map(range, bits.shape)):
    index = 0
    for at, size, factor in zip(place, bits.shape, (0x9E3779B1, 0xC2B2AE35, 0x27D4EB2F), strict=False):
      index = ((index + at) * factor + size) % 2**32
    for which, seed in enumerate((0x9E3779B9, 0x85EBCA6B)):
      sums[which] += mix(int(bits[place]) ^ mix((index + seed) % 2**32))
  return [total % 2**32 for total in sums]


def test_checkpoints_of_earlier_versions_keep_their_names():
  """By the definition: what is written in checkpoints is compared to what a later version computes."""
  kernel, bias = np.random.default_rng(3).normal(size=(2, 3, 4)).astype(np.float32), np.float32([1.5, -2.0])
  half = np.arange(3, dtype=np.uint16) + 0x3F80  # 1 and the next two numbers in bfloat16
  found = {"b": jnp.asarray(bias), "a": {"kernel": jnp.asarray(kernel)},
           "c": jax.lax.bitcast_convert_type(jnp.asarray(half), jnp.bfloat16)}
  sums = {"a/kernel": sums_of(kernel.view(np.uint32)), "b": sums_of(bias.view(np.uint32)), "c": sums_of(half)}
  said = "".join(f"{path} {shape} {dtype} {sums[path]}\n" for path, shape, dtype in (
      ("a/kernel", (2, 3, 4), "float32"), ("b", (2,), "float32"), ("c", (3,), "bfloat16")))
  assert fingerprint(found) == hashlib.blake2b(said.encode(), digest_size=16).hexdigest()
  assert checksums({"a/kernel": found["a"]["kernel"], "c": found["c"]}) == {
      path: f"{sums[path][0]:08x}{sums[path][1]:08x}" for path in ("a/kernel", "c")}
