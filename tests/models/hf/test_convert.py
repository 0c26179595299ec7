"""Names and layouts both ways, on a made-up family: what fits, what does not, on which device which bytes."""

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

from models.hf import convert, files
from models.hf.errors import HFError
from models.hf.family import Tensor
from trainer import tree

V, D, L, E, F = 12, 8, 2, 4, 16
SHAPES = {
    "embed/embedding": (V, D), "final_norm/scale": (D,),
    "blocks/attn_norm/scale": (L, D),
    "blocks/attn/q/kernel": (L, D, 8), "blocks/attn/k/kernel": (L, D, 4), "blocks/attn/v/kernel": (L, D, 4),
    "blocks/attn/q/bias": (L, 8), "blocks/attn/k/bias": (L, 4), "blocks/attn/v/bias": (L, 4),
    "blocks/moe/experts/gate/kernel": (L, E, D, F), "blocks/moe/experts/up/kernel": (L, E, D, F),
    "blocks/moe/experts/down/kernel": (L, E, F, D),
}
QKV = ("q", "k", "v")
EXPERTS = "blocks/moe/experts"


class MadeUp:
  """A family with every kind of tensor: plain, transposed, fused, per expert or fused over experts."""

  name = "made-up"
  prefixes = ("model.", "")
  ignored, ahead = (r"rotary\.inv_freq$",), None

  def passed_over(self, model):
    return self.ignored

  def tensors(self, model):
    head = [Tensor("head.weight", "unembed/kernel", transpose=True, prefixed=False)]
    return [
        Tensor("embed.weight", "embed/embedding"),
        Tensor("norm.weight", "final_norm/scale"),
        Tensor("h.{layer}.norm.weight", "blocks/attn_norm/scale"),
        # Two ways for the same leaves: as [in, out] side by side, and a torch Linear each.
        Tensor("h.{layer}.qkv.weight", tuple(f"blocks/attn/{x}/kernel" for x in QKV), axis=1),
        *(Tensor(f"h.{{layer}}.{x}.weight", f"blocks/attn/{x}/kernel", transpose=True) for x in QKV),
        Tensor("h.{layer}.qkv.bias", tuple(f"blocks/attn/{x}/bias" for x in QKV)),
        *(Tensor(f"h.{{layer}}.e.{{expert}}.{x}.weight", f"{EXPERTS}/{x}/kernel", transpose=True)
          for x in ("gate", "up", "down")),
        Tensor("h.{layer}.e.gate_up", (f"{EXPERTS}/gate/kernel", f"{EXPERTS}/up/kernel"), transpose=True, axis=1),
        Tensor("h.{layer}.e.down", f"{EXPERTS}/down/kernel", transpose=True),
        *(head if not model["tie_embeddings"] else []),
    ]


FAMILY, TIED, UNTIED = MadeUp(), dict(tie_embeddings=True), dict(tie_embeddings=False)


def ours(tied=True, dtype=np.float32):
  rng = np.random.default_rng(0)
  shapes = SHAPES if tied else {**SHAPES, "unembed/kernel": (D, V)}
  return {path: rng.standard_normal(shape, np.float32).astype(dtype) for path, shape in shapes.items()}


def theirs(leaves, prefix="model.", fused_qkv=True, fused_experts=False):
  """The tensors of our leaves, spelled out by hand."""
  t = {"embed.weight": leaves["embed/embedding"], "norm.weight": leaves["final_norm/scale"]}
  for i in range(L):
    layer = {path[7:]: leaf[i] for path, leaf in leaves.items() if path.startswith("blocks/")}
    t[f"h.{i}.norm.weight"] = layer["attn_norm/scale"]
    if fused_qkv:
      t[f"h.{i}.qkv.weight"] = np.concatenate([layer[f"attn/{x}/kernel"] for x in QKV], axis=1)
    else:
      t.update({f"h.{i}.{x}.weight": layer[f"attn/{x}/kernel"].T for x in QKV})
    t[f"h.{i}.qkv.bias"] = np.concatenate([layer[f"attn/{x}/bias"] for x in QKV])
    gate, up, down = (layer[f"moe/experts/{x}/kernel"] for x in ("gate", "up", "down"))
    if fused_experts:
      t[f"h.{i}.e.gate_up"] = np.concatenate([gate.transpose(0, 2, 1), up.transpose(0, 2, 1)], axis=1)
      t[f"h.{i}.e.down"] = down.transpose(0, 2, 1)
    else:
      for e in range(E):
        t |= {f"h.{i}.e.{e}.{x}.weight": w[e].T for x, w in (("gate", gate), ("up", up), ("down", down))}
  named = {prefix + name: np.ascontiguousarray(values) for name, values in t.items()}
  if "unembed/kernel" in leaves:
    named["head.weight"] = np.ascontiguousarray(leaves["unembed/kernel"].T)
  return named


def folder_of(path, tensors):
  save_file(tensors, path / files.SINGLE)
  return files.TensorFolder(path)


def abstract(leaves):
  return tree.unflatten({path: jax.ShapeDtypeStruct(leaf.shape, np.float32) for path, leaf in leaves.items()})


def load(folder, leaves, model=TIED, shardings=None, dtype=None):
  plan = convert.plan(FAMILY, model, abstract(leaves), folder)
  return dict(convert.iter_params(plan, folder, None if shardings is None else tree.flatten(shardings), dtype))


def assert_bitwise(found, expected):
  assert set(found) == set(expected)
  for path, values in expected.items():
    assert found[path].dtype == values.dtype and found[path].shape == values.shape, path
    assert np.asarray(found[path]).tobytes() == values.tobytes(), path


@pytest.mark.parametrize("spelling", [
    dict(), dict(prefix=""), dict(fused_qkv=False), dict(fused_experts=True),
    dict(prefix="", fused_qkv=False, fused_experts=True)])
def test_every_spelling_gives_the_same_parameters(tmp_path, spelling):
  leaves = ours()
  assert_bitwise(load(folder_of(tmp_path, theirs(leaves, **spelling)), leaves), leaves)


@pytest.mark.parametrize("tied, model", [(True, TIED), (False, UNTIED)])
def test_written_tensors_are_those_spelled_out_by_hand(tmp_path, tied, model):
  leaves = ours(tied)
  convert.write_tensors(lambda path, index: leaves[path][index], FAMILY, model, leaves, tmp_path)
  folder = files.TensorFolder(tmp_path)
  assert_bitwise({name: folder.read(name) for name in folder.tensors}, theirs(leaves))
  assert_bitwise(load(folder, leaves, model), leaves)


def test_writing_asks_for_one_layer_and_expert_at_a_time_and_cuts_what_shapes_cut(tmp_path):
  leaves, asked = ours(), []
  shapes = {path: jax.ShapeDtypeStruct(leaf.shape, np.float32) for path, leaf in leaves.items()}
  shapes["embed/embedding"] = jax.ShapeDtypeStruct((V - 3, D), np.float32)

  def read_leaf(path, index):
    asked.append(leaves[path][index].size)
    return leaves[path][index]

  convert.write_tensors(read_leaf, FAMILY, TIED, shapes, tmp_path, max_shard_bytes=1000)
  assert max(asked) == D * F
  embedding = files.TensorFolder(tmp_path).read("model.embed.weight")
  np.testing.assert_array_equal(embedding, leaves["embed/embedding"][:-3])


SPECS = {
    "embed/embedding": P("tensor", "fsdp"), "blocks/attn/q/kernel": P(None, "fsdp", "tensor"),
    "blocks/attn/k/kernel": P(None, "fsdp", "tensor"), "blocks/attn/q/bias": P(None, "tensor"),
    "blocks/attn_norm/scale": P("tensor"), f"{EXPERTS}/gate/kernel": P(None, "tensor", "fsdp", None),
    f"{EXPERTS}/up/kernel": P(None, None, "fsdp", "tensor"), f"{EXPERTS}/down/kernel": P(None, "fsdp", "tensor"),
}


def shardings(leaves):
  mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
  return tree.unflatten({path: NamedSharding(mesh, SPECS.get(path, P())) for path in leaves})


@pytest.mark.parametrize("spelling", [dict(), dict(fused_qkv=False, fused_experts=True)])
def test_eight_devices_hold_what_one_does(tmp_path, spelling):
  leaves = ours()
  folder = folder_of(tmp_path, theirs(leaves, **spelling))
  placed = shardings(leaves)
  params = load(folder, leaves, shardings=placed)
  assert_bitwise(params, leaves)
  for path, sharding in tree.flatten(placed).items():
    assert params[path].sharding == sharding
  assert len(params["blocks/attn/q/kernel"].addressable_shards) == 8


def test_only_the_slices_of_a_shard_are_read_and_replicas_once(tmp_path):
  leaves = ours()
  folder = folder_of(tmp_path, theirs(leaves))
  read, per_read = folder.read, []
  folder.read = lambda name, index=(): per_read.append((name, read(name, index).nbytes)) or read(name, index)
  load(folder, leaves, shardings=shardings(leaves))
  size = sum(leaf.nbytes for leaf in leaves.values())
  assert sum(n for _, n in per_read) == size
  # [D, F] of one expert, over fsdp=4 in D: never more than a shard's part of one tensor.
  assert {n for name, n in per_read if ".gate." in name} == {D // 4 * F * 4}
  assert {n for name, n in per_read if name.endswith("embed.weight")} == {V * D * 4 // 8}


def test_the_host_holds_one_shard_of_one_leaf(tmp_path, monkeypatch):
  leaves = ours()
  folder = folder_of(tmp_path, theirs(leaves))
  empty, held = np.empty, []

  def counted(shape, dtype=float):
    held.append(empty(shape, dtype).nbytes)
    return empty(shape, dtype)

  monkeypatch.setattr(convert.np, "empty", counted)
  load(folder, leaves, shardings=shardings(leaves))
  assert max(held) == leaves[f"{EXPERTS}/gate/kernel"].nbytes // 8


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("asked", ["float32", "bfloat16", "float16", None])
def test_dtypes_are_cast_on_the_host(tmp_path, stored, asked):
  leaves = ours(dtype=stored)
  params = load(folder_of(tmp_path, theirs(leaves)), leaves, dtype=asked)
  assert_bitwise(params, {path: leaf.astype(asked or stored) for path, leaf in leaves.items()})


def test_some_of_the_leaves_with_a_dtype_each(tmp_path):
  leaves = ours()
  folder = folder_of(tmp_path, theirs(leaves))
  dtypes = {"blocks/attn/v/kernel": "bfloat16", "final_norm/scale": None}
  some = convert.plan(FAMILY, TIED, abstract(leaves), folder).only(dtypes)
  params = dict(convert.iter_params(some, folder, dtype=dtypes))
  assert_bitwise(params, {path: leaves[path].astype(dtype or "float32") for path, dtype in dtypes.items()})


def test_what_float16_cannot_hold_is_an_error_and_infinities_stay(tmp_path):
  leaves = ours()
  leaves["blocks/attn/q/kernel"][1, 2, 3] = np.inf
  params = load(folder_of(tmp_path, theirs(leaves)), leaves, dtype="float16")
  assert np.isinf(params["blocks/attn/q/kernel"][1, 2, 3])
  leaves["blocks/attn/q/kernel"][1, 2, 3] = 1e6
  with pytest.raises(HFError, match="model.h.1.qkv.weight has values beyond float16's range"):
    load(folder_of(tmp_path, theirs(leaves)), leaves, dtype="float16")
  with pytest.raises(HFError, match="model.h.1.qkv.weight has values beyond"):
    convert.write_tensors(lambda path, index: leaves[path][index], FAMILY, TIED, leaves, tmp_path, "float16")


def test_mixed_dtypes_within_a_leaf_need_a_dtype(tmp_path):
  leaves = ours()
  tensors = theirs(leaves)
  tensors["model.h.1.norm.weight"] = tensors["model.h.1.norm.weight"].astype(ml_dtypes.bfloat16)
  folder = folder_of(tmp_path, tensors)
  with pytest.raises(HFError, match="blocks/attn_norm/scale differ in dtype"):
    load(folder, leaves)
  assert load(folder, leaves, dtype="float32")["blocks/attn_norm/scale"].dtype == np.float32


def changed(tensors, remove=(), **add):
  return {**{name: values for name, values in tensors.items() if name not in remove},
          **{name.replace("__", "."): values for name, values in add.items()}}


@pytest.mark.parametrize("change, lines", [
    (dict(remove=["model.h.1.norm.weight"]), [r"- model.h.1.norm.weight \(8,\): not in the folder"]),
    (dict(model__other=np.ones(2, np.float32)), [r"\+ model.other \(2,\): not of this model"]),
    (dict(model__norm__weight=np.ones(9, np.float32)),
     [r"! model.norm.weight: \(8,\) by config.json, \(9,\) in model.safetensors"]),
    (dict(model__norm__weight=np.ones(8, np.int8)), [r"! model.norm.weight: I8 in model.safetensors"]),
    (dict(remove=["model.embed.weight"], embed__weight=np.ones((V, D), np.float32)),
     [r"- model.embed.weight", r"\+ embed.weight"]),
    (dict(remove=["model.h.0.e.3.up.weight"], extra=np.ones(1, np.float32)),
     [r"- model.h.0.e.3.up.weight", r"\+ extra"]),
    (dict(model__h__0__e__gate_up=np.ones((E, 2 * F, D), np.float32)), [r"\+ model.h.0.e.gate_up"]),
    (dict(model__h__2__norm__weight=np.ones(D, np.float32)), [r"\+ model.h.2.norm.weight"]),
])
def test_what_does_not_match_is_listed_on_both_sides(tmp_path, change, lines):
  leaves = ours()
  folder = folder_of(tmp_path, changed(theirs(leaves), **change))
  for line in lines:
    with pytest.raises(HFError, match=rf"made-up \({len(lines)} differences(?s:.*)" + line):
      convert.plan(FAMILY, TIED, abstract(leaves), folder)


def test_buffers_are_ignored_by_name_whatever_their_dtype(tmp_path):
  leaves = ours()
  tensors = changed(theirs(leaves), model__h__0__rotary__inv_freq=np.ones(3, np.int8))
  assert_bitwise(load(folder_of(tmp_path, tensors), leaves), leaves)


def test_a_tied_head_may_be_there_if_it_is_the_embedding(tmp_path):
  leaves = ours()
  tensors = theirs(leaves)
  head = tensors["model.embed.weight"].copy()
  assert_bitwise(load(folder_of(tmp_path, {**tensors, "head.weight": head}), leaves), leaves)
  head[-1, -1] += 1
  with pytest.raises(HFError, match="head.weight .* is not equal to model.embed.weight"):
    load(folder_of(tmp_path, {**tensors, "head.weight": head}), leaves)
  with pytest.raises(HFError, match="head.weight .* is not equal to model.embed.weight"):
    load(folder_of(tmp_path, {**tensors, "head.weight": head[:-1]}), leaves)


def test_an_untied_head_must_be_there(tmp_path):
  leaves = ours(tied=False)
  with pytest.raises(HFError, match=r"tie_word_embeddings(?s:.*)- head.weight \(12, 8\)"):
    load(folder_of(tmp_path, theirs(ours())), leaves, UNTIED)


def test_a_family_that_does_not_know_a_parameter_is_told(tmp_path):
  leaves = {**ours(), "blocks/extra/kernel": np.ones((L, D), np.float32)}
  folder = folder_of(tmp_path, theirs(ours()))
  with pytest.raises(HFError, match="made-up has no tensor for our parameter blocks/extra/kernel"):
    convert.plan(FAMILY, TIED, abstract(leaves), folder)
  with pytest.raises(HFError, match="made-up has no tensor for blocks/extra/kernel"):
    convert.write_tensors(lambda path, index: leaves[path][index], FAMILY, TIED, leaves, tmp_path)


@pytest.mark.parametrize("shape", [(3,), (700, 300), (2, 300, 700), (0, 4)])
@pytest.mark.parametrize("transposed", [False, True])
def test_copy_into_is_assignment(shape, transposed):
  values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
  if transposed and len(shape) > 1:
    values = values.swapaxes(-1, -2)
  for dtype in (np.float32, ml_dtypes.bfloat16, np.float16):
    target = np.empty(values.shape, dtype)
    convert.copy_into(target, values, "x")
    assert target.tobytes() == values.astype(dtype).tobytes()
