"""Adapters of others, and checkpoints that are no longer what was saved."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.hostile.common import named, refused, write
from tests.models.hf.test_peft import Case
from trainer.checkpoints import checkpoint

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def options(content=None, **changed):
  """Another adapter_config.json, or the folder's with other entries."""
  def make(folder):
    entries = json.loads((folder / CONFIG).read_text()) | changed
    write(folder / CONFIG, entries if content is None else content)
  return make


def adapters(change):
  """Changes the adapters' tensors, {name: array}."""
  def make(folder):
    arrays = load_file(folder / TENSORS)
    change(arrays)
    save_file(arrays, folder / TENSORS)
  return make


def pickled(folder):
  (folder / TENSORS).unlink()
  write(folder / "adapter_model.bin", b"\x80\x04cos\nsystem\n(S'echo pwned'\ntR.")


ADAPTERS = [
    ("no config", lambda f: (f / CONFIG).unlink(), "has no adapter_config.json"),
    ("config not json", options("{"), CONFIG, "not valid JSON"),
    ("config a list", options("[]"), CONFIG, "must be an object"),
    ("config nested deep", options('{"a":' * 100_000), CONFIG, "not valid JSON"),
    ("another method", options(peft_type="IA3"), "peft_type is 'IA3'"),
    ("a method that is a list", options(peft_type=["LORA"]), "peft_type is ['LORA']"),
    ("dora", options(use_dora=True), "use_dora is True"),
    ("an unknown option", options(evil={"a": 1}), "evil = {'a': 1}"),
    ("an unknown option of a megabyte", options(evil=["x" * 1_000_000]), "evil"),
    ("rank a string", options(r="3"), "r is '3'"),
    ("rank zero", options(r=0), "r is 0"),
    ("rank a fraction", options(r=2.5), "r"),
    ("rank absurd", options(r=10**400), "r"),
    ("alpha nan", options('{"peft_type": "LORA", "r": 3, "lora_alpha": NaN}'), "lora_alpha is nan"),
    ("alpha infinite", options('{"peft_type": "LORA", "r": 3, "lora_alpha": Infinity}'), "lora_alpha"),
    ("patterns that are a list", options(rank_pattern=[1]), "rank_pattern is [1]"),
    ("a pattern that is no regex", options(rank_pattern={"(": 3}), "'(' is not a regular expression"),
    ("a pattern without an end", options(rank_pattern={"(a|a)*$": 3, "(.*)*(.*)*(.*)*(.*)*(.*)*x": 3}), CONFIG),
    ("a pattern's rank a string", options(rank_pattern={"q_proj": "3"}), "rank_pattern"),
    ("a pattern's rank of zero", options(rank_pattern={"q_proj": 0}), "rank_pattern"),
    ("no tensors", lambda f: (f / TENSORS).unlink(), "has no adapter_model.safetensors"),
    ("pickled tensors", pickled, "adapter_model.bin", "never opened"),
    ("tensors empty", lambda f: write(f / TENSORS, b""), TENSORS, "not a whole safetensors file"),
    ("tensors cut", lambda f: write(f / TENSORS, (f / TENSORS).read_bytes()[:-3]), TENSORS, "not a whole"),
    ("a tensor missing", adapters(lambda a: a.pop(sorted(a)[0])), "- base_model.model", "not in the file"),
    ("a tensor more", adapters(lambda a: a.update(evil=np.zeros(2, np.float32))), "+ evil (2,): matches no target"),
    ("a tensor misshapen", adapters(lambda a: a.update({sorted(a)[0]: np.zeros((1, 1), np.float32)})), "! base_model"),
    ("a tensor of integers", adapters(lambda a: a.update({sorted(a)[0]: np.zeros((3, 16), np.int8)})), "is I8"),
]


@pytest.mark.parametrize("row", named([(row[0].replace("'", ""), row[1:]) for row in ADAPTERS]))
def test_bad_adapters_are_one_message(row, tmp_path, guard):
  make, *expected = row
  case = Case("llama")
  folder = tmp_path / "data"
  shutil.copytree(case.folder / "adapters", folder)
  make(folder)
  with guard.only():
    refused(lambda: case.read(folder), str(folder), *expected)


def state(value=0.0):
  return {"step": jnp.int32(1), "params": {"a": {"kernel": jnp.full((64, 64), value)}, "b": jnp.arange(3.0)}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  folder = tmp_path_factory.mktemp("saved") / "checkpoints"
  checkpoints = checkpoint.Checkpoints(folder)
  checkpoints.save(1, state(), {"step": 1, "data_fingerprint": "x"}, arrays={"more": np.arange(5)})
  checkpoints.close()
  return folder


def target():
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), state())


def largest(folder, pattern="**/d/*"):
  """The largest file there: the one with the arrays."""
  return max((p for p in folder.glob(pattern) if p.is_file()), key=lambda p: p.stat().st_size)


def cut(file):
  file.write_bytes(file.read_bytes()[:-7])


def flip(file):
  raw = bytearray(file.read_bytes())
  raw[len(raw) // 2] ^= 0xFF
  file.write_bytes(bytes(raw))


def replaced_by_folder(file):
  file.unlink()
  file.mkdir()


def replaced_by_file(folder):
  shutil.rmtree(folder)
  folder.write_bytes(b"not a folder")


def meta(folder, content):
  write(folder / "meta" / "metadata", content)


def poisoned(folder):
  """Says that what it says of itself is a pickle of code."""
  for file in folder.glob("**/*"):
    if file.is_file() and file.parent.name != "d":
      file.write_bytes(b"\x80\x04cos\nsystem\n(S'echo pwned'\ntR.")


DAMAGE = [
    ("arrays cut", lambda f: cut(largest(f / "state"))),
    ("arrays flipped", lambda f: flip(largest(f / "state"))),
    ("arrays empty", lambda f: largest(f / "state").write_bytes(b"")),
    ("arrays gone", lambda f: largest(f / "state").unlink()),
    ("arrays a folder", lambda f: replaced_by_folder(largest(f / "state"))),
    ("further arrays gone", lambda f: shutil.rmtree(f / "arrays")),
    ("state gone", lambda f: shutil.rmtree(f / "state")),
    ("state a file", lambda f: replaced_by_file(f / "state")),
    ("state metadata gone", lambda f: (f / "state" / "_METADATA").unlink()),
    ("state metadata not json", lambda f: (f / "state" / "_METADATA").write_bytes(b"{")),
    ("state metadata a list", lambda f: (f / "state" / "_METADATA").write_bytes(b"[]")),
    ("state metadata nested deep", lambda f: (f / "state" / "_METADATA").write_bytes(b"[" * 100_000)),
    ("database of arrays not one", lambda f: (f / "state" / "manifest.ocdbt").write_bytes(b"\0" * 40)),
    ("database of arrays gone", lambda f: (f / "state" / "manifest.ocdbt").unlink()),
    ("meta gone", lambda f: shutil.rmtree(f / "meta")),
    ("meta empty", lambda f: meta(f, b"")),
    ("meta not json", lambda f: meta(f, b"\x80\x04")),
    ("meta a list", lambda f: meta(f, b"[]")),
    ("meta a number", lambda f: meta(f, b"7")),
    ("meta nested deep", lambda f: meta(f, b"[" * 100_000)),
    ("meta without a seal", lambda f: meta(f, {"step": 1})),
    ("meta changed", lambda f: meta(f, json.loads((f / "meta" / "metadata").read_text()) | {"step": 2})),
    ("meta of another", lambda f: meta(f, json.loads((f / "meta" / "metadata").read_text()) | {"seal": 7})),
    ("further arrays empty", lambda f: [p.unlink() for p in (f / "arrays").glob("**/*") if p.is_file()]),
    ("everything gone", lambda f: [shutil.rmtree(p) for p in f.iterdir() if p.is_dir()]),
    ("everything a pickle", poisoned),
]


@pytest.fixture
def damaged(request, saved, tmp_path):
  shutil.copytree(saved, tmp_path / "work" / "checkpoints")
  request.param(tmp_path / "work" / "checkpoints" / "1")
  return tmp_path / "work" / "checkpoints"


@pytest.mark.parametrize("damaged", named(DAMAGE), indirect=True)
def test_a_damaged_checkpoint_is_named_and_set_aside(damaged, tmp_path, guard):
  checkpoints = checkpoint.Checkpoints(damaged)
  with guard.only(tmp_path / "work"):
    refused(lambda: checkpoints.restore_newest(target()), "no checkpoint of this workdir can be read", f"{damaged}/1 ")
  checkpoints.close()
  assert (damaged / "1.unreadable").is_dir() and not (damaged / "1").exists()


@pytest.mark.parametrize("damaged", named(DAMAGE), indirect=True)
def test_a_damaged_checkpoint_of_another_run_is_one_message(damaged, tmp_path, guard):
  with guard.only():
    refused(lambda: checkpoint.restore_from(str(damaged / "1"), target()), f"{damaged}/1")
  assert (damaged / "1").is_dir()  # it is not ours to rename
