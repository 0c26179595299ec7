"""Folders of safetensors: what is read, what is refused and how it is told, how shards are written."""

import json
import os
import re
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from models.hf import files
from models.hf.errors import HFError

A = np.arange(12, dtype=np.float32).reshape(3, 4)
KINDS = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}


def entry(dtype, shape, begin, end):
  return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def raw(header, data=b"", length=None) -> bytes:
  """A safetensors file by hand: `header` is an object or bytes; `length` in place of the header's true one."""
  header = header if isinstance(header, bytes) else json.dumps(header).encode()
  return struct.pack("<Q", len(header) if length is None else length) + header + data


def sharded(folder, shards, weight_map=None):
  """A folder of shards {file: {name: array}}, whose index says `weight_map`, or the truth."""
  for file, tensors in shards.items():
    save_file(tensors, folder / file)
  truth = {name: file for file, tensors in shards.items() for name in tensors}
  (folder / files.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map or truth}))
  return folder


@pytest.mark.parametrize("kind", KINDS)
def test_reads_slices_in_each_dtype(tmp_path, kind):
  values = A.astype(KINDS[kind])
  save_file({"odd": np.ones(3, np.int8), "a": values}, tmp_path / files.SINGLE)
  folder = files.TensorFolder(tmp_path)
  assert folder.tensors["a"].shape == (3, 4) and folder.tensors["a"].dtype == kind
  assert folder.read("a").dtype == values.dtype
  np.testing.assert_array_equal(folder.read("a"), values)
  np.testing.assert_array_equal(folder.read("a", (slice(1, 3), slice(0, 4, 1))), values[1:3])
  np.testing.assert_array_equal(folder.read("a", (slice(0, 3), slice(1, 2))), values[:, 1:2])


def test_reads_scalars_and_empty_tensors(tmp_path):
  save_file({"scalar": np.array(2.5, np.float32), "empty": np.zeros((0, 3), np.float32)}, tmp_path / files.SINGLE)
  folder = files.TensorFolder(tmp_path)
  assert folder.read("scalar") == 2.5 and folder.read("empty").shape == (0, 3)


def test_a_view_of_the_file_cannot_be_written_to(tmp_path):
  save_file({"a": A}, tmp_path / files.SINGLE)
  with pytest.raises(ValueError, match="read-only"):
    files.TensorFolder(tmp_path).read("a")[0] = 1


def test_reads_shards_by_their_index(tmp_path):
  folder = files.TensorFolder(sharded(tmp_path, {"x.safetensors": {"a": A}, "y.safetensors": {"b": A + 1}}))
  assert folder.tensors["b"].file.name == "y.safetensors"
  np.testing.assert_array_equal(folder.read("b", (slice(0, 1),)), A[:1] + 1)


@pytest.mark.parametrize("dtype", ["I32", "I8", "BOOL", "F64", "F8_E4M3"])
def test_dtypes_that_hold_no_parameters_are_refused_when_read(tmp_path, dtype):
  size = {"I32": 4, "F64": 8}.get(dtype, 1)
  (tmp_path / files.SINGLE).write_bytes(raw({"a": entry(dtype, [2], 0, 2 * size)}, b"\0" * 2 * size))
  folder = files.TensorFolder(tmp_path)
  with pytest.raises(HFError, match=f"'a' is {dtype}; parameters are F32, BF16, F16"):
    folder.read("a")


F32_2 = entry("F32", [2], 0, 8)
DAMAGED = {
    "empty": b"",
    "shorter than its length": b"abc",
    "truncated header": raw({"a": F32_2})[:20],
    "truncated data": raw({"a": F32_2}, b"\0" * 7),
    "bytes of no tensor": raw({"a": F32_2}, b"\0" * 9),
    "overlapping": raw({"a": F32_2, "b": entry("F32", [2], 4, 12)}, b"\0" * 12),
    "gap": raw({"a": F32_2, "b": entry("F32", [2], 12, 20)}, b"\0" * 20),
    "beyond the end": raw({"a": entry("F32", [2], 8, 16)}, b"\0" * 8),
    "backwards": raw({"a": entry("F32", [2], 8, 0)}, b"\0" * 8),
    "shape and size differ": raw({"a": entry("F32", [3], 0, 8)}, b"\0" * 8),
    "negative dimension": raw({"a": entry("F32", [-2], 0, 8)}, b"\0" * 8),
    "product of dimensions overflows": raw({"a": entry("F32", [2**40, 2**40], 0, 8)}, b"\0" * 8),
    "unknown dtype": raw({"a": entry("FOO", [2], 0, 8)}, b"\0" * 8),
    "not JSON": raw(b"{nope", b"\0" * 8),
    "not an object": raw(b"[1, 2]"),
    "not UTF-8": raw(b"\xff\xfe{}"),
    "absurd header length": raw(b"{}", length=2**60),
    "header longer than the file": raw(b"{}", length=100),
    "a name twice": raw(json.dumps({"a": F32_2, "b": F32_2}).replace('"b"', '"a"').encode(), b"\0" * 8),
    "a pickle": b"\x80\x04\x95" + b"\0" * 64,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_named(tmp_path, content):
  (tmp_path / files.SINGLE).write_bytes(content)
  with pytest.raises(HFError, match=re.escape(str(tmp_path / files.SINGLE)) + ".*is not a whole safetensors file"):
    files.TensorFolder(tmp_path)


def test_a_damaged_shard_is_named(tmp_path):
  sharded(tmp_path, {"x.safetensors": {"a": A}, "y.safetensors": {"b": A}})
  whole = (tmp_path / "y.safetensors").read_bytes()
  (tmp_path / "y.safetensors").write_bytes(whole[:-1])
  with pytest.raises(HFError, match="y.safetensors.*truncated"):
    files.TensorFolder(tmp_path)


@pytest.mark.parametrize("shards, weight_map, message", [
    ({"x.safetensors": {"a": A}}, {"a": "x.safetensors", "b": "gone.safetensors"}, "gone.safetensors: named by the"),
    ({"x.safetensors": {"a": A}}, {"a": "x.safetensors", "b": "x.safetensors"}, "b: in the index with x.safetensors"),
    ({"x.safetensors": {"a": A, "b": A}}, {"a": "x.safetensors"}, "b: in x.safetensors, but in the index nowhere"),
    ({"x.safetensors": {"a": A}, "y.safetensors": {"b": A}}, {"a": "y.safetensors", "b": "x.safetensors"},
     "a: in x.safetensors, but in the index y.safetensors"),
    ({"x.safetensors": {"a": A}, "y.safetensors": {"a": A, "b": A}}, {"a": "x.safetensors", "b": "y.safetensors"},
     "a: in both x.safetensors and y.safetensors"),
    ({"x.safetensors": {"a": A}}, {"a": "../x.safetensors"}, r"\.\./x.safetensors: named by the index"),
])
def test_an_index_that_does_not_fit_lists_what_does_not(tmp_path, shards, weight_map, message):
  folder = tmp_path / "model"
  folder.mkdir()
  save_file({"a": A}, tmp_path / "x.safetensors")
  with pytest.raises(HFError, match="does not fit its files(?s:.*)" + message):
    files.TensorFolder(sharded(folder, shards, weight_map))


@pytest.mark.parametrize("content", ["[]", "{", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_a_malformed_index_is_named(tmp_path, content):
  (tmp_path / files.INDEX).write_text(content)
  with pytest.raises(HFError, match=files.INDEX):
    files.TensorFolder(tmp_path)


def test_folders_without_safetensors_say_what_to_do(tmp_path):
  with pytest.raises(HFError, match="does not exist; give the folder"):
    files.TensorFolder(tmp_path / "organisation/name")
  with pytest.raises(HFError, match="has no model.safetensors and no"):
    files.TensorFolder(tmp_path)
  (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
  with pytest.raises(HFError, match="only pytorch_model.bin. Pickled weights can run code.*save_pretrained"):
    files.TensorFolder(tmp_path)
  (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
  with pytest.raises(HFError, match="only model-00001-of-00002.safetensors.*index"):
    files.TensorFolder(tmp_path)
  with pytest.raises(HFError, match="is a file"):
    files.TensorFolder(tmp_path / "pytorch_model.bin")


def test_single_file_and_index_together_are_ambiguous(tmp_path):
  sharded(tmp_path, {"x.safetensors": {"a": A}})
  save_file({"a": A}, tmp_path / files.SINGLE)
  with pytest.raises(HFError, match="both"):
    files.TensorFolder(tmp_path)


@pytest.mark.parametrize("content, message", [
    (None, "has no config.json"), (b"{", "not valid JSON"), (b"\xff", "not valid JSON"), (b"[1]", "holds a JSON list"),
    (b'{"a": 1, "a": 2}', "'a' stands in it twice"), (b"[" * 100_000, "not valid JSON"),
])
def test_a_wrong_config_is_told(tmp_path, content, message):
  if content is not None:
    (tmp_path / files.CONFIG).write_bytes(content)
  with pytest.raises(HFError, match=message):
    files.read_config(tmp_path)


def test_files_that_cannot_be_read_and_tensors_that_are_not_there_are_named(tmp_path):
  (tmp_path / files.CONFIG).mkdir()
  with pytest.raises(HFError, match="config.json cannot be read: Is a directory"):
    files.read_json(tmp_path / files.CONFIG)
  save_file({"a": A}, tmp_path / files.SINGLE)
  with pytest.raises(HFError, match="has no tensor 'b'"):
    files.TensorFolder(tmp_path).read("b", ...)


def test_shards_of_cuts_in_order():
  sizes = dict(a=4, b=4, c=9, d=1, e=7)
  assert list(files.shards_of(sizes, 8).values()) == [["a", "b"], ["c"], ["d", "e"]]
  assert list(files.shards_of(sizes, 8)) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
  assert files.shards_of(sizes, 25) == {files.SINGLE: list("abcde")}
  with pytest.raises(HFError, match="0 bytes"):
    files.shards_of(sizes, 0)


def layout(tensors):
  return {name: (values.shape, values.dtype) for name, values in tensors.items()}


TENSORS = {"b": A, "a": A.astype(ml_dtypes.bfloat16), "c": A[0].astype(np.float16)}


@pytest.mark.parametrize("max_bytes, expected", [(10**9, [files.SINGLE]), (72, [
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", files.INDEX])])
def test_written_tensors_are_read_back_bitwise(tmp_path, max_bytes, expected):
  written = files.write_tensors(tmp_path / "new", layout(TENSORS), TENSORS.get, max_bytes)
  assert [p.name for p in written] == expected and sorted(tmp_path.glob("new/*")) == sorted(written)
  folder = files.TensorFolder(tmp_path / "new")
  assert set(folder.tensors) == set(TENSORS)
  for name, values in TENSORS.items():
    assert folder.read(name).dtype == values.dtype and folder.read(name).tobytes() == values.tobytes()
  with safe_open(written[0], "np") as f:
    assert f.metadata() == {"format": "pt"}
  if len(expected) > 1:
    metadata = json.loads(written[-1].read_text())["metadata"]
    assert metadata == {"total_parameters": 28, "total_size": 48 + 24 + 8}


def test_the_writer_holds_one_shard_at_a_time(tmp_path):
  alive, most = [], 0

  class Counted(np.ndarray):
    def __del__(self):
      if self.base is None:
        alive.remove(self.nbytes)

  def make(name):
    nonlocal most
    values = Counted((16,), np.float32)
    values[...] = 0
    alive.append(values.nbytes)
    most = max(most, sum(alive))
    return values

  files.write_tensors(tmp_path, {f"t{i}": ((16,), np.dtype(np.float32)) for i in range(12)}, make, 128)
  assert most == 128


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_have_the_permissions_that_any_new_file_has(tmp_path, umask, mode):
  before = os.umask(umask)
  try:
    for size in (10**9, 72):
      files.write_tensors(tmp_path / str(size), layout(TENSORS), TENSORS.get, size)
    single = tmp_path / "adapter_model.safetensors"
    single.touch(0o600)  # by a version that wrote private files
    files.save_tensors({"a": A}, single)
  finally:
    os.umask(before)
  written = [p for p in tmp_path.rglob("*") if p.is_file()]
  assert len(written) == 5 and {p.stat().st_mode & 0o777 for p in written} == {mode}


def test_old_weights_go_and_other_files_stay(tmp_path):
  files.write_tensors(tmp_path, layout(TENSORS), TENSORS.get, 72)
  (tmp_path / "adapter_model.safetensors").write_bytes(b"other")
  files.write_tensors(tmp_path, layout(TENSORS), TENSORS.get)
  assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter_model.safetensors", files.SINGLE]


def test_a_failed_write_leaves_the_old_model(tmp_path):
  files.write_tensors(tmp_path, layout(TENSORS), TENSORS.get)
  before = (tmp_path / files.SINGLE).read_bytes()

  def fails(name):
    if name == "c":
      raise OSError(28, "No space left on device")
    return TENSORS[name]

  with pytest.raises(HFError, match="could not be written.*No space left"):
    files.write_tensors(tmp_path, layout(TENSORS), fails, 50)
  assert [p.name for p in tmp_path.iterdir()] == [files.SINGLE]
  assert (tmp_path / files.SINGLE).read_bytes() == before


def test_a_tensor_that_is_not_as_announced_leaves_no_file(tmp_path):
  announced = (2,), np.dtype("float32")
  for made in (np.zeros(3, np.float32), np.zeros(2)):
    with pytest.raises(ValueError, match=r"^a became float(32\(3,\)|64\(2,\)), announced: float32\(2,\)$"):
      files.write_tensors(tmp_path / "out", {"a": announced}, lambda name, made=made: made, 1000)
  assert list((tmp_path / "out").iterdir()) == []


def test_parts_of_a_quantised_matrix_are_of_few_dtypes(tmp_path):
  save_file({"a": np.zeros(2, np.float64)}, tmp_path / "model.safetensors")
  folder = files.TensorFolder(tmp_path)
  info = folder.tensors["a"]
  with pytest.raises(HFError, match="model.safetensors: a tensor of a quantised matrix is F64; read are "):
    folder._part(info)
