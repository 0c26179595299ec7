"""Quantised tensors as the libraries read them that wrote them, or number by number; whole folders."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from models import hf
from models.hf import files
from models.hf.errors import HFError
from tests import tiny

HERE = Path(__file__).parent
OPTIONS = {"nf4": dict(quant_method="bitsandbytes", bnb_4bit_quant_type="nf4"),
           "nf4_double": dict(quant_method="bitsandbytes", bnb_4bit_quant_type="nf4"),
           "fp4_odd": dict(quant_method="bitsandbytes", bnb_4bit_quant_type="fp4"),
           "int8": dict(quant_method="bitsandbytes", load_in_8bit=True),
           "fp8": dict(quant_method="fp8", weight_block_size=[4, 8]),
           "fp8_one": dict(quant_method="fp8", activation_scheme="static"),
           "fp8_rows": dict(quant_method="fp8")}
NUMBERS = np.random.default_rng(0)


def folder_of(path, options, tensors=None):
  (path / "config.json").write_text(json.dumps(dict(quantization_config=options)))
  if tensors is not None:
    save_file(tensors, path / "model.safetensors")
  return files.TensorFolder(path)


def slices(shape):
  N, K = shape
  return [(), np.s_[1:3], np.s_[:, 3:K - 1], np.s_[N // 2:N, 5:6], np.s_[3:3]]


def same(folder, name, expected):
  """Every slice is that of what is expected."""
  assert folder.tensors[name].shape == expected.shape
  for index in slices(expected.shape):
    index = index if isinstance(index, tuple) else (index,)
    np.testing.assert_array_equal(folder.read(name, index).astype(np.float32), expected[index].astype(np.float32))


@pytest.mark.parametrize("name", OPTIONS)
def test_what_a_library_has_stored_is_what_it_reads(tmp_path, name, monkeypatch):
  (tmp_path / "model.safetensors").symlink_to(HERE / f"{name}.safetensors")
  folder = folder_of(tmp_path, OPTIONS[name])
  assert folder.tensors.keys() == {"weight", "expected"}
  same(folder, "weight", folder.read("expected"))
  monkeypatch.setattr("models.hf.quantised.slices.AT_ONCE", 64)  # one row or two at a time
  same(folder, "weight", folder.read("expected"))
  stored = folder.tensors["weight"].dtype
  assert stored == (folder.tensors["expected"].dtype if name != "int8" else "BF16")


def test_blocks_at_the_edge_are_smaller_and_experts_are_stacked(tmp_path):
  """Of 5 × 7 in blocks of 2 × 4; DeepSeek's projection to 576 is such a one."""
  codes = NUMBERS.normal(size=(2, 5, 7)).astype(files._PACKED["F8_E4M3"])
  scales = NUMBERS.uniform(size=(2, 3, 2)).astype(np.float32)
  expected = np.zeros(codes.shape, np.float32)
  for e, n, k in np.ndindex(codes.shape):
    expected[e, n, k] = np.float32(codes[e, n, k]) * scales[e, n // 2, k // 4]
  tensors = {"a.weight": codes, "a.weight_scale_inv": scales, "a.input_scale": np.ones(1, np.float32),
             "b.input_scale": np.ones(1, np.float32)}
  folder = folder_of(tmp_path, dict(quant_method="fp8", weight_block_size=[2, 4]), tensors)
  assert folder.tensors.keys() == {"a.weight", "b.input_scale"}
  for index in [(), np.s_[1:2, 1:4, 2:6]]:
    np.testing.assert_array_equal(folder.read("a.weight", index), expected.astype(files.DTYPES["BF16"])[index])


def packed(numbers, bits, order):
  """[R, C] numbers -> [R, C bits / 32] words: number i of a word at place order[i]."""
  each = 32 // bits
  words = [[sum(int(row[at + i]) << bits * place for i, place in enumerate(order)) for at in range(0, len(row), each)]
           for row in numbers]
  return np.array(words, np.uint64).astype(np.uint32).view(np.int32)


def integers(bits, groups, per_group, outputs):
  codes_KxN = NUMBERS.integers(0, 2**bits, (groups * per_group, outputs))
  zeros_GxN = NUMBERS.integers(0, 2**bits, (groups, outputs))
  zeros_GxN[0, :3] = 0
  return codes_KxN, zeros_GxN, NUMBERS.uniform(1, 2, (groups, outputs)).astype(np.float16)


@pytest.mark.parametrize("bits,form,ordered", [(4, "gptq", True), (4, "gptq_v2", False), (8, "gptq", False),
                                               (2, "gptq_v2", True), (4, None, False)])
def test_gptq_is_its_formula(tmp_path, bits, form, ordered):
  codes, zeros, scales = integers(bits, 3, 32, 32)
  groups = np.arange(96) // 32 if ordered else NUMBERS.permutation(np.arange(96) // 32)
  each = list(range(32 // bits))
  words = packed(zeros, bits, each)
  if form != "gptq_v2":  # the writer takes one from each, from words as wholes
    words = (words.view(np.uint32) - np.uint32(sum(1 << bits * i for i in each))).view(np.int32)
  tensors = {"a.qweight": np.ascontiguousarray(packed(codes.T, bits, each).T), "a.qzeros": words, "a.scales": scales}
  if not ordered:
    tensors["a.g_idx"] = groups.astype(np.int32)
  expected = np.array([[np.float64(scales[g, n]) * (int(codes[k, n]) - int(zeros[g, n])) for k, g in enumerate(groups)]
                       for n in range(32)])
  said = {} if form is None else dict(checkpoint_format=form)
  folder = folder_of(tmp_path, dict(quant_method="gptq", bits=bits) | said, tensors)
  assert folder.tensors.keys() == {"a.weight"}
  same(folder, "a.weight", expected.astype(np.float16))


def test_awq_is_its_formula(tmp_path):
  codes, zeros, scales = integers(4, 3, 8, 16)
  place = [0, 4, 1, 5, 2, 6, 3, 7]  # of number i; by place that is 0 2 4 6 1 3 5 7
  tensors = {"a.qweight": packed(codes, 4, place), "a.qzeros": packed(zeros, 4, place), "a.scales": scales}
  expected = np.array([[np.float64(scales[k // 8, n]) * (int(codes[k, n]) - int(zeros[k // 8, n])) for k in range(24)]
                       for n in range(16)])
  folder = folder_of(tmp_path, dict(quant_method="awq", bits=4, version="GEMM", zero_point=True), tensors)
  assert folder.tensors.keys() == {"a.weight"}
  same(folder, "a.weight", expected.astype(np.float16))


@pytest.mark.parametrize("options,told", [
    (dict(quant_method="compressed-tensors"), "quant_method 'compressed-tensors'; read are awq, bitsandbytes, fp8,"),
    (dict(quant_method="gptq", bits=3), "bits 3; read are 2, 4, 8"),
    (dict(quant_method="gptq", bits=4, checkpoint_format="marlin"), "checkpoint_format 'marlin'"),
    (dict(quant_method="awq", bits=4, version="gemv"), "version 'gemv'"),
    (dict(quant_method="fp8", fmt="e5m2"), "fmt 'e5m2'"),
    (dict(quant_method="fp8", weight_block_size=128), "weight_block_size 128; it must be two numbers"),
    (dict(quant_method="bitsandbytes", bnb_4bit_quant_type="int4"), "bnb_4bit_quant_type 'int4'"),
])
def test_what_is_not_read_is_refused(tmp_path, options, told):
  folder = tiny.hf_folder(tmp_path / "m", num_layers=1)
  config = json.loads((folder / "config.json").read_text())
  (folder / "config.json").write_text(json.dumps(config | dict(quantization_config=options)))
  with pytest.raises(HFError, match=told):
    hf.load(folder)


def test_a_state_that_is_not_understood_is_refused(tmp_path):
  tensors = load_file(HERE / "fp4_odd.safetensors")
  tensors["weight.quant_state.bitsandbytes__fp4"] = np.frombuffer(b'{"shape": [7, 9]}', np.uint8)
  with pytest.raises(HFError, match="does not say how weight is stored"):
    folder_of(tmp_path, OPTIONS["fp4_odd"], tensors)


def test_another_order_of_eight_bits_is_refused(tmp_path):
  tensors = load_file(HERE / "int8.safetensors") | {"weight_format": np.array(1, np.uint8)}
  with pytest.raises(HFError, match="weight_format is 1; rows one after another"):
    folder_of(tmp_path, OPTIONS["int8"], tensors)


def test_a_folder_in_few_bits_is_the_model_of_the_numbers_that_it_stands_for(tmp_path):
  """Every matrix of the layers in float8: loaded, it is what the same folder in bfloat16 is; exported, it is plain."""
  folder = tiny.hf_folder(tmp_path / "m", num_layers=2)
  stored, plain = load_file(folder / "model.safetensors"), {}
  for name, whole in list(stored.items()):
    if name.startswith("model.layers") and whole.ndim == 2:
      scale = np.float32(np.abs(whole).max() / 448)
      stored[name] = (whole / scale).astype(files._PACKED["F8_E4M3"])
      stored[f"{name}_scale_inv"] = np.array([[scale]])
      plain[name] = (stored[name].astype(np.float32) * scale).astype(files.DTYPES["BF16"])
  assert len(plain) == 14
  save_file(stored, folder / "model.safetensors")
  config = json.loads((folder / "config.json").read_text())
  (folder / "config.json").write_text(json.dumps(config | dict(quantization_config=dict(quant_method="fp8"))))
  model, params = hf.load(folder, dtype="float32")
  hf.save(model, params, tmp_path / "out")
  assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
  with safe_open(tmp_path / "out" / "model.safetensors", "np") as written:
    assert set(written.keys()) == {name for name in stored if not name.endswith("_scale_inv")}
    for name, expected in plain.items():
      np.testing.assert_array_equal(written.get_tensor(name), expected.astype(np.float32))
