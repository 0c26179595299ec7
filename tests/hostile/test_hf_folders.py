"""Hugging Face folders and folders of adapters that are damaged, contradict themselves or name other files."""

import json
import shutil
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from models import hf
from tests import tiny
from tests.hostile.common import named, refused, write

HEADER = "model.safetensors"


def tensors(header, body=b"", length=None):
  """The bytes of a safetensors file with that header, an object or bytes."""
  raw = header if isinstance(header, bytes) else json.dumps(header).encode()
  return struct.pack("<Q", len(raw) if length is None else length) + raw + body


def one(dtype="F32", shape=(1,), offsets=(0, 4)):
  return {"a": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


def weights(content):
  return lambda folder: write(folder / HEADER, content)


def edited(change):
  """Changes the tensors, {name: array}."""
  def make(folder):
    from safetensors.numpy import load_file
    arrays = load_file(folder / HEADER)
    arrays = change(arrays) or arrays
    save_file(arrays, folder / HEADER)
  return make


def config(content=None, **changed):
  """Another config.json, or the folder's with other entries; None takes one out."""
  def make(folder):
    file = folder / "config.json"
    if content is not None:
      write(file, content)
      return
    entries = json.loads(file.read_text()) | changed
    write(file, {key: value for key, value in entries.items() if value is not None})
  return make


def index(weight_map, **files):
  def make(folder):
    (folder / HEADER).rename(folder / "model-00001-of-00001.safetensors")
    write(folder / "model.safetensors.index.json", {"weight_map": weight_map} if not isinstance(
        weight_map, (str, bytes)) else weight_map)
    for name, content in files.items():
      write(folder / name, content)
  return make


def every_tensor(file):
  """An index that says each tensor is in that file."""
  def make(folder):
    with open(folder / HEADER, "rb") as f:
      header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
    index(dict.fromkeys((key for key in header if key != "__metadata__"), file))(folder)
  return make


def dropped(arrays):
  del arrays["model.norm.weight"]


def added(arrays):
  arrays["model.evil.weight"] = np.zeros(3, np.float32)


def misshapen(arrays):
  arrays["model.norm.weight"] = np.zeros(7, np.float32)


def of_integers(arrays):
  arrays["model.norm.weight"] = np.zeros(16, np.int32)


def pickled(folder):
  (folder / HEADER).unlink()
  write(folder / "pytorch_model.bin", b"\x80\x04cos\nsystem\n(S'echo pwned'\ntR.")


def linked_out(folder):
  (folder / HEADER).unlink()
  (folder / HEADER).symlink_to("/dev/zero")


FOLDERS = [
    ("weights empty", weights(b""), HEADER, "not a whole safetensors file"),
    ("weights of seven bytes", weights(b"1234567"), HEADER, "not a whole safetensors file"),
    ("weights that are text", weights(b"hello, this is no file of tensors at all"), HEADER, "not a whole"),
    ("header longer than the file", weights(tensors({}, length=10**6)), HEADER, "not a whole"),
    ("header of 2 to the 63 bytes", weights(tensors({}, length=2**63)), HEADER, "not a whole"),
    ("header of no bytes", weights(tensors(b"")), HEADER, "not a whole"),
    ("header not json", weights(tensors(b"{oops}")), HEADER, "not a whole"),
    ("header not utf-8", weights(tensors(b"{\"\xff\": 1}")), HEADER, "not a whole"),
    ("header a list", weights(tensors(b"[]")), HEADER, "not a whole"),
    ("header nested deep", weights(tensors(b'{"a":' * 100_000)), HEADER, "not a whole"),
    ("header with a name twice", weights(tensors(json.dumps(one()).encode()[:-1] + b", " + json.dumps(
        one()).encode()[1:], b"\0" * 4)), HEADER, "twice"),
    ("offsets beyond the end", weights(tensors(one(offsets=(0, 400)), b"\0" * 4)), HEADER, "not a whole"),
    ("offsets negative", weights(tensors(one(offsets=(-4, 0)), b"\0" * 4)), HEADER, "not a whole"),
    ("offsets swapped", weights(tensors(one(offsets=(4, 0)), b"\0" * 4)), HEADER, "not a whole"),
    ("offsets that overlap", weights(tensors(one(shape=(2,), offsets=(0, 8)) | {
        "b": one(offsets=(4, 8))["a"]}, b"\0" * 8)), HEADER, "not a whole"),
    ("offsets with a hole", weights(tensors(one() | {"b": one(offsets=(8, 12))["a"]}, b"\0" * 12)), HEADER,
     "not a who"),
    ("a shape of other bytes", weights(tensors(one(shape=(9,)), b"\0" * 4)), HEADER, "not a whole"),
    ("a shape that overflows", weights(tensors(one(shape=(2**40, 2**40)), b"\0" * 4)), HEADER, "not a whole"),
    ("a shape that is negative", weights(tensors(one(shape=(-1,)), b"\0" * 4)), HEADER, "not a whole"),
    ("an unknown dtype", weights(tensors(one("F31"), b"\0" * 4)), HEADER, "not a whole"),
    ("bytes behind the last tensor", weights(tensors(one(), b"\0" * 9)), HEADER, "not a whole"),
    ("a tensor missing", edited(dropped), "- model.norm.weight (16,): not in the folder"),
    ("a tensor more", edited(added), "+ model.evil.weight (3,): not of this model"),
    ("a tensor misshapen", edited(misshapen), "! model.norm.weight: (16,) by config.json, (7,)"),
    ("a tensor of integers", edited(of_integers), "! model.norm.weight: I32"),
    ("no weights", lambda folder: (folder / HEADER).unlink(), "has no model.safetensors"),
    ("weights pickled", pickled, "pytorch_model.bin", "never opened"),
    ("weights that are a device", linked_out, "model.safetensors is not a regular file"),
    ("weights that are a folder", lambda folder: ((folder / HEADER).unlink(), (folder / HEADER).mkdir()),
     "not a regular"),
    ("index beside the weights", lambda folder: write(folder / "model.safetensors.index.json", {}), "has both"),
    ("index not json", index("{"), "index.json", "not valid JSON"),
    ("index without a map", index([1]), "index.json", "weight_map"),
    ("index of numbers", index({"a": 1}), "index.json", "weight_map"),
    ("index of a file that is not there", every_tensor("model-00002-of-00002.safetensors"), "not in the folder"),
    ("index of a file above", every_tensor("../model.safetensors"), "../model.safetensors: named by the index"),
    ("index of an absolute file", every_tensor("/etc/passwd"), "/etc/passwd: named by the index"),
    ("index of the folder", every_tensor("."), "named by the index, but not in the folder"),
    ("index with a nul", every_tensor("a\0b"), "index.json"),
    ("index of thousands of files", index({f"t{i}": f"f{i}.safetensors" for i in range(5000)}), "5000 problems"),
    ("index that lacks tensors", index({"model.norm.weight": "model-00001-of-00001.safetensors"}),
     "in the index nowhere"),
    ("no config", lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    ("config empty", config(b""), "config.json is not valid JSON"),
    ("config a list", config("[]"), "must be an object"),
    ("config nested deep", config("[" * 100_000), "config.json is not valid JSON"),
    ("config of many digits", config('{"a": ' + "9" * 9999 + "}"), "config.json is not valid JSON"),
    ("config with a key twice", config('{"model_type": "llama", "model_type": "gpt2"}'), "stands in it twice"),
    ("config without a type", config(model_type=None), "config.json", "model_type"),
    ("config of an unknown type", config(model_type="evil"), "evil"),
    ("config whose type is a list", config(model_type=["llama"]), "model_type"),
    ("config of another architecture", config(architectures=["EvilForCausalLM"]), "EvilForCausalLM"),
    ("config whose architectures are a string", config(architectures="LlamaForCausalLM"), "architectures"),
    ("config whose architectures are empty lists", config(architectures=[[]]), "architectures"),
    ("config of code", config(auto_map={"AutoModel": "evil--pwned.Model"}, quantization_config={"a": 1}),
     "quantization"),
    ("config with an unknown entry", config(evil=1), "evil = 1"),
    ("config with an unknown entry of a megabyte", config(evil=["x" * 1_000_000]), "evil"),
    ("config with unknown entries by the thousand", config(**{f"evil{i}": i for i in range(10_000)}), "9980 more"),
    ("config with an unknown entry of an evil name", config(**{"\x1b[2J": 1}), r"'\x1b[2J' = 1"),
    ("config of strings", config(hidden_size="16"), "hidden_size is '16'"),
    ("config of no layers", config(num_hidden_layers=0), "num_hidden_layers is 0"),
    ("config of a fraction of heads", config(num_attention_heads=1.5), "num_attention_heads is 1.5"),
    ("config of true layers", config(num_hidden_layers=True), "num_hidden_layers is True"),
    ("config of other layers", config(num_hidden_layers=3), "model.layers.2", "not in the folder"),
    ("config of absurdly many layers", config(num_hidden_layers=10**9), "1,000,000,000 layers"),
    ("config absurdly wide", config(hidden_size=2**40, head_dim=8), "hidden_size"),
    ("config of an absurd vocabulary", config(vocab_size=2**62), "vocab_size"),
    ("config of more heads than numbers", config(num_attention_heads=512, num_key_value_heads=512, head_dim=None),
     "512 heads for a hidden size of"),
    ("config of heads that do not divide", config(num_key_value_heads=3, num_attention_heads=2), "num_kv_heads"),
    ("config of an unknown activation", config(hidden_act="evil"), "hidden_act is 'evil'"),
    ("config whose activation is a list", config(hidden_act=["silu"]), "hidden_act is ['silu']"),
    ("config with theta of nothing", config(rope_theta="big"), "rope_theta is 'big'"),
    ("config with theta of nan", config('{"model_type": "llama", "rope_theta": NaN}'), "config.json"),
    ("config with theta below 0", config(rope_theta=-1.0), "rope_theta"),
    ("config with eps of nan", lambda folder: write(folder / "config.json",
     (folder / "config.json").read_text().replace(
        '"rms_norm_eps": 1e-06', '"rms_norm_eps": NaN')), "rms_norm_eps"),
    ("config with a scaling unknown", config(rope_scaling={"rope_type": "evil", "factor": 2.0}), "rope_type is 'evil'"),
    ("config with a scaling of strings", config(rope_scaling={"rope_type": "linear", "factor": "2"}), "factor is '2'"),
    ("config with a scaling that is a list", config(rope_scaling=[1]), "rope_scaling is [1]"),
    ("config with a scaling of 0", config(rope_scaling={"rope_type": "linear", "factor": 0.0}), "factor"),
    ("config with yarn of nothing", config(rope_scaling={"rope_type": "yarn", "factor": -1.0,
                                                        "original_max_position_embeddings": 8}), "factor"),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
  return tiny.hf_folder(tmp_path_factory.mktemp("hf") / "folder")


@pytest.mark.parametrize("row", named([(row[0], row[1:]) for row in FOLDERS]))
def test_a_bad_folder_is_one_message(row, good, tmp_path, guard):
  make, *expected = row
  folder = tmp_path / "data"
  shutil.copytree(good, folder)
  make(folder)
  with guard.only():
    message = refused(lambda: hf.load(folder), *expected)
  assert str(folder) in message or "model." in message, message
