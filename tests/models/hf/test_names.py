"""Names behind which other programs have put tensors: taken off where that is safe, told where it is not."""

import shutil
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import hf
from models.hf import files, names
from models.hf.errors import HFError
from tests import tiny
from trainer import tree

TOKENS = jnp.arange(16)[None] + 65


@pytest.fixture(scope="module")
def base(tmp_path_factory):
  """(folder, its tensors, its logits)"""
  folder = tiny.hf_folder(tmp_path_factory.mktemp("names") / "base")
  model, params = hf.load(folder)
  return folder, load_file(folder / files.SINGLE), np.asarray(model.logits(params, TOKENS))


def renamed(base, path, new_name, extra=()):
  """A copy of the folder whose tensors have other names, and some more tensors."""
  folder, tensors, _ = base
  shutil.copytree(folder, path)
  save_file({**{new_name(name): values for name, values in tensors.items()}, **dict(extra)}, path / files.SINGLE)
  return path


# As torch.compile(m), DDP(m), DDP(torch.compile(m)), torch.compile(DDP(m)), FSDP around layers, a checkpointed layer
# and a PEFT model that was merged give them with state_dict().
WRAPPED = {
    "_orig_mod.": lambda name: f"_orig_mod.{name}",
    "module.": lambda name: f"module.{name}",
    "module._orig_mod.": lambda name: f"module._orig_mod.{name}",
    "_orig_mod.module.": lambda name: f"_orig_mod.module.{name}",
    "fsdp": lambda name: "_fsdp_wrapped_module." + name.replace("layers.0.", "layers.0._fsdp_wrapped_module."),
    "checkpointed": lambda name: name.replace("layers.1.", "layers.1._checkpoint_wrapped_module."),
    "base_model.model.": lambda name: f"base_model.model.{name}",
    "module.base_model.model.": lambda name: f"module.base_model.model.{name}",
}


@pytest.mark.parametrize("name", WRAPPED)
def test_what_programs_put_around_is_taken_off_and_said(base, tmp_path, name):
  folder = renamed(base, tmp_path / "w", WRAPPED[name])
  model, params = hf.load(folder)
  np.testing.assert_array_equal(model.logits(params, TOKENS), base[2])
  note = files.TensorFolder(folder).note
  assert "are read without" in note and all(part in note for part in name.split(".") if part.startswith("_"))
  assert files.TensorFolder(base[0]).note == ""


def test_another_prefix_is_named_with_the_command_that_takes_it_off(base, tmp_path):
  folder = renamed(base, tmp_path / "w", lambda name: f"student.net.{name}")
  with pytest.raises(HFError, match="behind 'student.net.', which some program has put before them") as error:
    hf.load(folder)
  command = str(error.value).split('python -c "')[1].split('"; where')[0]
  subprocess.run([sys.executable, "-c", command], check=True, timeout=60)
  model, params = hf.load(folder)
  np.testing.assert_array_equal(model.logits(params, TOKENS), base[2])


def test_adapters_that_are_not_merged_are_told(base, tmp_path):
  def peft(name):
    return "base_model.model." + name.replace("q_proj.weight", "q_proj.base_layer.weight")

  lora = {f"base_model.model.model.layers.0.self_attn.q_proj.lora_{x}.default.weight": np.ones((2, 16), np.float32)
          for x in "AB"}
  with pytest.raises(HFError, match="adapters beside their base(?s:.*)merge_and_unload"):
    hf.load(renamed(base, tmp_path / "w", peft, lora))


def test_a_folder_of_adapters_alone_is_told(base, tmp_path):
  (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
  save_file({"a": np.ones(1, np.float32)}, tmp_path / "adapter_model.safetensors")
  with pytest.raises(HFError, match=f"some/base.*--config.model.lora.peft={tmp_path}"):
    hf.load(tmp_path)
  shutil.copy(base[0] / files.CONFIG, tmp_path)
  with pytest.raises(HFError, match=f"some/base.*--config.model.lora.peft={tmp_path}"):
    hf.load(tmp_path)


def test_names_that_would_be_the_same_stay():
  assert names.unwrapped(["a.weight", "_orig_mod.a.weight"])[1] == ""
  assert names.unwrapped(["module.a", "b"]) == ({"module.a": "module.a", "b": "b"}, "")


# ------------------------------------------------------------------------------- embedding and unembedding, one matrix


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def tied(request, tmp_path_factory):
  more = {} if request.param == "llama" else dict(
      norm="layernorm", norm_bias=True, positions="learned", max_positions=32, qkv_bias=True, attention_out_bias=True,
      mlp_bias=True, activation="gelu", norm_eps=1e-5)
  folder = tiny.hf_folder(tmp_path_factory.mktemp(request.param) / "base", tie_embeddings=True, **more)
  model, params = hf.load(folder)
  return folder, load_file(folder / files.SINGLE), np.asarray(model.logits(params, TOKENS))


EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight")


@pytest.mark.parametrize("has", ["head", "embedding", "both"])
def test_one_matrix_may_have_either_name(tied, tmp_path, has):
  """transformers 5 saves one of the two, and takes the other for the same where it is missing."""
  (embedding,) = (name for name in EMBEDDINGS if name in tied[1])
  head = {"lm_head.weight": tied[1][embedding]} if has != "embedding" else {}
  folder = renamed(tied, tmp_path / "w", lambda name: "lm_head.weight" if (name, has) == (embedding, "head") else name,
                   head)
  model, params = hf.load(folder)
  assert "unembed" not in params
  np.testing.assert_array_equal(model.logits(params, TOKENS), tied[2])


def test_two_matrices_are_one_model_only_where_the_config_says_so(tied, tmp_path):
  (embedding,) = (name for name in EMBEDDINGS if name in tied[1])
  head = tied[1][embedding] + 1
  folder = renamed(tied, tmp_path / "w", str, {"lm_head.weight": head})
  with pytest.raises(HFError, match="lm_head.weight .* is not equal to .*--config.model.tie_embeddings=False"):
    hf.load(folder)
  for path, expected in ((folder, head.T), (tied[0], tied[1][embedding].T)):
    family, keys, _ = hf.architecture(path)
    tensors = files.TensorFolder(path)
    apart = hf.abstract_params({**keys, "tie_embeddings": False})
    params = dict(hf.iter_params(hf.plan(family, keys, apart, tensors), tensors))
    np.testing.assert_array_equal(params["unembed/kernel"], expected)
    np.testing.assert_array_equal(params["embed/embedding"], tied[1][embedding])


def test_an_unembedding_that_is_missing_is_told(base, tmp_path):
  tensors = {name: values for name, values in base[1].items() if name != "lm_head.weight"}
  with pytest.raises(HFError, match='Only the unembedding is missing.*"tie_word_embeddings": true'):
    hf.load(renamed((base[0], tensors, None), tmp_path / "w", str))
  assert "unembed/kernel" in tree.flatten(hf.load(base[0])[1])


@pytest.mark.parametrize("before, pasted", [("wrapped.net.", True), ("a b.", False), ("$(x).", False)])
def test_what_is_to_be_taken_off_can_be_pasted_into_a_shell(before, pasted):
  wanted = [["a.weight", "b.weight", "c.weight"]]
  said = names.hint([f"{before}{name}" for name in wanted[0]], wanted, "DIR")
  assert said.startswith(f"DIR: 3 of its 3 tensors have the names that are wanted behind {before!r}, which some progra")
  assert said.endswith("/model.safetensors.index.json") == pasted
  assert said.endswith("before them. Take it off where the folder was made.") == (not pasted)
